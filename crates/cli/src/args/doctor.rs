//! The arguments of `udm doctor`.

use clap::Args;

use super::JsonArgs;

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
doctor tries each feature, and draws no conclusions from version numbers. It only reads devices and
files. In a folder, it creates a file of 4 MiB, writes to it and removes it. If a folder has a
server-cert.pem, doctor also tests the folder as nbds' ?tls=FOLDER.

The exit code is 1 if no export works.

Examples:
  udm doctor
  udm doctor /data /mnt/dax /dev/nvme0n1
  udm doctor vol                        the devices of vol's table
  udm doctor --json | jq -r '.exports[] | select(.works) | .name'")]
pub struct DoctorArgs {
    /// Also test these folders, files, block devices, DAX devices or devices of udm
    #[arg(value_name = "PATH|NAME")]
    pub places: Vec<String>,
    #[command(flatten)]
    pub json: JsonArgs,
}
