//! The arguments of the commands on configuration files.

use std::path::PathBuf;

use clap::Args;

use super::JsonArgs;
use crate::runtime::DeviceName;

/// Arguments of `check-config`.
#[derive(Debug, Args)]
#[command(after_help = "\
All mistakes of a file are printed, each with its line and column. Files that are checked together
must not use the same address.

Examples:
  udm check-config                       all files in /etc/udm
  udm check-config vol.conf
  udm check-config --schema > udm.json   for editors that complete TOML by a JSON schema")]
pub struct CheckConfigArgs {
    /// The files [default: /etc/udm/*.conf]
    pub files: Vec<PathBuf>,
    /// Print the JSON schema of the files instead
    #[arg(long, conflicts_with = "files")]
    pub schema: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `save`.
#[derive(Debug, Args)]
#[command(after_help = "\
Consent that a user gave once, such as --rebind or `log_damage truncate`, is not saved.

Example:
  udm save vol -o /etc/udm/vol.conf")]
pub struct SaveArgs {
    /// The device's name
    pub name: DeviceName,
    /// Write FILE, which keeps its old content if that fails [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
It compares the table, the exports, the queues and the address of metrics, and prints one line for
each difference. Two tables are equal if they are the same after parsing. A port or disk number that
the kernel chose is not a difference. udm reads the devices of a file with origin and fast to find
the table that `create` would use.

The exit code is 0 if the device is as its file says. It is 1 if the device differs, is not running,
or cannot be compared.

Examples:
  udm diff vol
  udm diff vol --config new.conf --json")]
pub struct DiffArgs {
    /// The device's name
    pub name: DeviceName,
    /// Compare with FILE [default: /etc/udm/NAME.conf]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `apply`.
#[derive(Debug, Args)]
#[command(after_help = "\
It changes the exports without a restart: it opens the new ones, and then closes the old ones. An
export with clients stays open without --force. For the table, the queues and the address of
metrics, it prints the command that restarts the device. If a file has a mistake, no device changes.
If a new export cannot be opened, it closes the new exports of the device and opens the old ones
again. The error lists exports for which that failed. Clients that --force disconnected must connect
again.

The exit code is 0 if all exports are as the files say, even if a restart is needed; `udm diff`
tells the rest. It is 1 if a change failed or an export with clients stayed open. With --all, a
stopped device does not change the exit code, and a dead or hung one makes it 1.

Examples:
  udm apply vol --dry-run
  udm apply vol
  udm apply --all")]
pub struct ApplyArgs {
    /// The device's name
    #[arg(required_unless_present = "all")]
    pub name: Option<DeviceName>,
    /// Take the configuration from FILE [default: /etc/udm/NAME.conf]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Apply all files in /etc/udm
    #[arg(long, conflicts_with_all = ["name", "config"])]
    pub all: bool,
    /// Close old exports even if clients are connected
    #[arg(long)]
    pub force: bool,
    /// Print what would change, without changing it
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}
