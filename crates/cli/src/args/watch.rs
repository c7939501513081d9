//! The arguments of `metrics` and `report`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::JsonArgs;
use crate::runtime::DeviceName;

/// Arguments of `metrics`.
#[derive(Debug, Args)]
#[command(after_help = "\
With --serve the command runs until it is ended. It answers GET /metrics for the named devices, or
for all devices, including devices that are created later. A device whose server does not answer
within 4 seconds has udm_device_up 0 and no other metrics.

Examples:
  udm metrics vol
  udm metrics --serve 127.0.0.1:9180")]
pub struct MetricsArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Answer GET /metrics at this address instead of printing
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "json")]
    pub serve: Option<SocketAddr>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_help = "\
The report has the versions, the machine, the table, the counters, the configuration and the end of
the log. It has no data of the device. It also works when the server is dead or does not answer.
With --anonymous, names of devices, files, hosts and addresses are replaced by numbers; the same
name has the same number everywhere.

Examples:
  udm report vol -o vol.txt
  udm report vol --anonymous")]
pub struct ReportArgs {
    /// The device's name
    pub name: DeviceName,
    /// Write FILE, which keeps its old content if that fails [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace names and addresses
    #[arg(long)]
    pub anonymous: bool,
}
