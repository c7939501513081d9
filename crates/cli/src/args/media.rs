//! The arguments of the commands about media and types of targets: `inspect`, `recover` and
//! `targets`.

use std::sync::LazyLock;

use clap::Args;
use clap::builder::PossibleValuesParser;
use udm::targets::{TARGETS, caches};

use super::JsonArgs;

/// What `--start-sector` takes; `device` names the cache device.
fn start_help(device: &str) -> String {
    let movable = caches().filter(|(_, cache)| cache.begins_anywhere);
    let names: Vec<&str> = movable.map(|(kind, _)| kind.name).collect();
    format!("Look for the {} at this sector of {device}, as its table says", names.join(" or "))
}

static INSPECT_START_HELP: LazyLock<String> = LazyLock::new(|| start_help("it"));
static RECOVER_START_HELP: LazyLock<String> = LazyLock::new(|| start_help("its device"));

fn target_names() -> PossibleValuesParser {
    PossibleValuesParser::new(TARGETS.iter().map(|kind| kind.name))
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
It only reads, so you may run it while the device is served. Then it prints a snapshot.

Example:
  udm inspect /dev/dax0.0")]
pub struct InspectArgs {
    /// The cache device, as the table names it
    pub cache_device: String,
    /// Where the cache begins.
    #[arg(long, value_name = "SECTOR", default_value_t = 0, help = INSPECT_START_HELP.as_str())]
    pub start_sector: u64,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `recover`.
#[derive(Debug, Args)]
#[command(after_help = "\
You may interrupt it and run it again: it then continues.

For the target `cache`, give the device of `create --fast`. If the metadata is on a separate device,
give the metadata device first. The blocks stay cached and become clean. If a server of this cache
died, recover also removes its udm device after all dirty data is written back.

Examples:
  udm recover /dev/dax0.0 /data/slow.img
  udm recover /dev/vg/meta /dev/vg/cache /data/slow.img")]
pub struct RecoverArgs {
    /// The cache device, as the table names it
    pub cache_device: String,
    /// The backing device, as the table names it
    pub origin: String,
    /// The origin, if the first two arguments are the metadata device and the cache device of a
    /// `cache`
    pub cache_origin: Option<String>,
    /// Print how much would be written, without writing
    #[arg(long)]
    pub dry_run: bool,
    /// Discard the log after the first damaged record (pcache), or the data of lost entries
    /// (writecache) [default: refuse]
    #[arg(long)]
    pub truncate: bool,
    /// Accept an origin that is not the one of the cache's last use, or that was changed since
    /// [default: refuse]
    #[arg(long)]
    pub rebind: bool,
    /// Accept the loss of acknowledged, unflushed writes if the last server's shared memory is
    /// lost [default: refuse]
    #[arg(long)]
    pub accept_loss: bool,
    /// Where the cache begins.
    #[arg(long, value_name = "SECTOR", default_value_t = 0, help = RECOVER_START_HELP.as_str())]
    pub start_sector: u64,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `targets`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  udm targets\n  udm targets pcache")]
pub struct TargetsArgs {
    /// Print the arguments of this target's table line, and the fields of its status line
    #[arg(value_parser = target_names())]
    pub target: Option<String>,
    #[command(flatten)]
    pub json: JsonArgs,
}
