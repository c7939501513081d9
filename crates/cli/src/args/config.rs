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
Consent that a user gave once, such as --rebind, is not saved.

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
