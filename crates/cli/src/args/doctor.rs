//! What may be typed after `udm doctor`.

use clap::Args;

use super::JsonArgs;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Everything is tried, nothing concluded from a version. Devices and files are opened to be read; in a
FOLDER a file of 4 MiB is made, written and removed again, to see what files there are good for. A
folder with server-cert.pem is tried as the one of nbds' ?tls=FOLDER, too.

Exit code 1: nothing works by which a device could be served.

Examples:
  udm doctor
  udm doctor /data /mnt/dax /dev/nvme0n1
  udm doctor vol                        the devices of vol's table
  udm doctor --json | jq -r '.doors[] | select(.works) | .name'")]
pub struct DoctorArgs {
    /// Folders, files, block devices or DAX devices, as tables name them, or names of udm devices
    #[arg(value_name = "PATH|NAME")]
    pub places: Vec<String>,
    #[command(flatten)]
    pub json: JsonArgs,
}
