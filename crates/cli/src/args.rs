//! The command line: each command, argument and flag is defined here once, and help, the manual
//! page and the completions are generated from it.
//!
//! This file parses the command line, and `commands/` carries it out. The verbs of `dmsetup` have
//! the same meaning here.

pub mod cache;
pub mod config;
pub mod doctor;
pub mod exports;
pub mod media;
pub mod watch;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use udm::base::area::bytes_of;
use udm::targets::{CacheMode, caches};
use udm_export::FORMS;

use crate::runtime::DeviceName;

/// What `--export` takes.
static EXPORT_HELP: LazyLock<String> =
    LazyLock::new(|| format!("Export the device to clients at URI: {FORMS}; may be repeated"));

/// Linux's device-mapper caches in user space, on the kernel's own media.
#[derive(Debug, Parser)]
#[command(name = "udm", version, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
Each device has a server process of its own. Exit codes: 0 done, 1 refused or failed, 2 usage.

Example:
  udm create vol --table '0 2097152 pcache /dev/dax0.0 /data/slow.img' \\
      --export nbd+unix:///run/vol.sock
  udm status vol
  udm remove vol --drain

Files: the runtime directory holds each device's control socket, log and shared memory. It is
$UDM_RUNTIME_DIR, else /run/udm for root, else $XDG_RUNTIME_DIR/udm. udm refuses a directory that
other users may enter or replace. The state directory holds measurements of this machine. It is
$UDM_STATE_DIR, else /var/lib/udm for root, else $XDG_STATE_HOME/udm or ~/.local/state/udm. The
configuration files are in $UDM_CONFIG_DIR, else /etc/udm.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create a device and start serving it
    Create(CreateArgs),
    /// Remove a device; dirty data stays in the cache unless --drain
    Remove(RemoveArgs),
    /// Give up a cache whose fast device is dead, and list the lost data
    Detach(DetachArgs),
    /// Write all dirty data back to the origin; the device stays
    Drain(DrainArgs),
    /// Make everything written so far durable, as a client's flush does
    Flush(NameArgs),
    /// Print the kernel's status lines
    Status(StatusArgs),
    /// Print the active table
    Table(TableArgs),
    /// Print details of a device: server, exports, medium, dirty data
    Info(InfoArgs),
    /// Send a message to a target
    Message(MessageArgs),
    /// Pause a device: requests wait until `resume`
    Suspend(NameArgs),
    /// Serve requests again, with the loaded table if there is one
    Resume(NameArgs),
    /// Load a table into the inactive slot; `resume` activates it
    Load(LoadArgs),
    /// Give a device another name
    Rename(RenameArgs),
    /// List devices
    Ls(LsArgs),
    /// Wait until a device serves, is clean, or is removed
    Wait(WaitArgs),
    /// Open an export, through which clients use a device
    Export(exports::ExportArgs),
    /// Close an export
    Unexport(exports::UnexportArgs),
    /// Print metrics in Prometheus' text format
    Metrics(watch::MetricsArgs),
    /// Collect the state, counters and log of a device for a bug report
    Report(watch::ReportArgs),
    /// Show the contents of a cache device: geometry, dirty data, damage
    Inspect(media::InspectArgs),
    /// Write the dirty data of a cache device back to its origin, without serving it
    Recover(media::RecoverArgs),
    /// Check, print, make or repair the metadata of a dm-cache
    Cache(cache::CacheArgs),
    /// Test which exports and I/O modes work here, and which writes are durable
    Doctor(doctor::DoctorArgs),
    /// List the target types, or print the grammar of one
    Targets(media::TargetsArgs),
    /// Run the program udm-bench, which measures udm on this machine
    #[command(disable_help_flag = true)]
    Bench(BenchArgs),
    /// Check configuration files, without opening any device
    CheckConfig(config::CheckConfigArgs),
    /// Print the configuration of a device as a file for `create --config`
    Save(config::SaveArgs),
    /// Compare a device with its configuration file
    Diff(config::DiffArgs),
    /// Open and close exports as a device's configuration file says
    Apply(config::ApplyArgs),
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  udm completions bash > /etc/bash_completion.d/udm")]
    Completions(CompletionsArgs),
    /// Print the manual page
    #[command(after_help = "Example:\n  udm man | man -l -")]
    Man(ManArgs),
    /// Serve one device: what `create` starts
    #[command(hide = true)]
    Serve(ServeArgs),
}

/// `--json`, which every command has.
#[derive(Clone, Copy, Debug, Args)]
pub struct JsonArgs {
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
}

/// Where a table comes from: an argument, a file, or standard input.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct TableSource {
    /// The table: lines of `start length target arguments...`, in sectors of 512 bytes
    #[arg(long, value_name = "TABLE")]
    pub table: Option<String>,
    /// Read the table from FILE [default: standard input, unless --table is given]
    #[arg(long, value_name = "FILE")]
    pub table_file: Option<PathBuf>,
}

/// A table that is put together from its devices.
#[derive(Debug, Default, Args)]
#[group(multiple = true)]
pub struct SetupArgs {
    /// Cache this slow device (instead of a table)
    #[arg(long, value_name = "SLOW", requires = "fast",
          conflicts_with_all = ["table", "table_file"])]
    pub origin: Option<String>,
    /// Cache it on this fast device, which is formatted if empty and reopened if it holds the cache
    #[arg(long, value_name = "FAST", requires = "origin")]
    pub fast: Option<String>,
    /// Use this target [default: the one of the cache on FAST, else pcache for memory, writecache
    /// for a disk, cache for a disk with --mode writethrough]
    #[arg(long, value_name = "TARGET", value_parser = cache_names())]
    pub target: Option<String>,
    /// Complete a write when the cache has stored it (writeback), or when SLOW also has stored it
    /// (writethrough, which the target cache has) [default: writeback]
    #[arg(long, value_name = "MODE", value_parser = cache_mode)]
    pub mode: Option<CacheMode>,
    /// Choose which blocks a `cache` keeps by smq (the kernel's policy), or by probation (blocks
    /// are cached partially at first, and kept if they are used again) [default: smq]
    #[arg(long, value_name = "POLICY", value_parser = POLICIES)]
    pub policy: Option<String>,
    /// Set the size of the cache's blocks, in bytes or with a unit; pcache has no blocks [default:
    /// auto]
    #[arg(long, value_name = "SIZE", value_parser = block_size)]
    pub block_size: Option<BlockSize>,
    /// Accept, this once, a cache even if it or its origin is not the device of its last use
    #[arg(long)]
    pub rebind: bool,
    /// Accept, this once, the loss of data that a cache had and cannot return: of a dead server's
    /// missing memory, after a damaged part of a log, or cut off with the end of a device
    #[arg(long)]
    pub accept_loss: bool,
    /// Print what would be created, without creating it
    #[arg(long)]
    pub dry_run: bool,
}

impl SetupArgs {
    /// An option that is only for a table that is put together from devices, if one is given.
    pub fn option_for_devices(&self) -> Option<&'static str> {
        let given = [
            (self.target.is_some(), "--target"),
            (self.mode.is_some(), "--mode"),
            (self.policy.is_some(), "--policy"),
            (self.block_size.is_some(), "--block-size"),
            (self.dry_run, "--dry-run"),
        ];
        given.iter().find(|(is_given, _)| *is_given).map(|(_, option)| *option)
    }
}

/// The policies of a `cache`.
pub const POLICIES: [&str; 2] = ["smq", "probation"];

/// A block size, or none for `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize(pub Option<u64>);

/// The size that a word names.
pub fn block_size(word: &str) -> Result<BlockSize, String> {
    match word {
        "auto" => Ok(BlockSize(None)),
        _ => Ok(BlockSize(Some(bytes_of(word, 1)?))),
    }
}

/// The mode that a word names.
pub fn cache_mode(word: &str) -> Result<CacheMode, String> {
    match word {
        "writeback" => Ok(CacheMode::Writeback),
        "writethrough" => Ok(CacheMode::Writethrough),
        _ => Err("expected writeback or writethrough".into()),
    }
}

fn cache_names() -> PossibleValuesParser {
    PossibleValuesParser::new(caches().map(|(kind, _)| kind.name))
}

/// The most connections that can be served for an export.
pub const QUEUES_MAX: u16 = 64;

/// Arguments of `create`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  udm create vol --origin /data/slow.img --fast /dev/dax0.0 --export nbd+unix:///run/vol.sock
  udm create vol --origin /dev/sdb --fast /dev/nvme0n1 --dry-run
  udm create vol --table '0 2097152 pcache /dev/dax0.0 /data/slow.img'
  udm create vol --table-file vol.table --export nbd+unix:///run/vol.sock
  udm create --config /etc/udm/vol.conf
  udm create --config /etc/udm/vol.conf --rebind       accept a moved device, this once
  echo '0 204800 linear /data/disk.img 0' | udm create vol --export nbd://127.0.0.1:10809

Name a device by its path, or by MAJOR:MINOR as `udm table` prints block devices. Paths may be
relative. Options after the path select how udm uses the device:
  /data/slow.img?io=direct     bypass the page cache (default where it works)
  /data/slow.img?io=buffered   use the page cache
  /data/slow.img?io=dontcache  use the page cache, and drop pages after the I/O
  /data/slow.img?io=lazy       use the page cache for writes, write them out early, with at most
                               16 MiB (&window=SIZE) unwritten; lazy,read=buffered also keeps
                               data that was read
  /mnt/dax/fast?persist=cpu    flush stores by instructions of the CPU; persist=msync: by the
                               kernel (default: what the device needs)
  /dev/sdb?offset=1G&size=8G   use a part of the device; numbers without a unit are sectors")]
pub struct CreateArgs {
    /// The name of the new device [default: the name of the file FILE, NAME.conf]
    #[arg(required_unless_present = "config")]
    pub name: Option<DeviceName>,
    /// Create the device that FILE describes; an option given here replaces the one in FILE
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub source: TableSource,
    #[command(flatten)]
    pub setup: SetupArgs,
    /// The exports to open.
    #[arg(long, value_name = "URI", help = EXPORT_HELP.as_str())]
    pub export: Vec<String>,
    /// Serve at most N connections per export at a time, each on its own queue [default: 64]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub queues: Option<u16>,
    /// Serve from this process [default: start a server in the background]
    #[arg(long)]
    pub foreground: bool,
    /// Format the cache device even if it holds a clean cache or unknown data; a cache with dirty
    /// data is still refused
    #[arg(long)]
    pub force_format: bool,
    /// Serve metrics for Prometheus at http://ADDR/metrics, where ADDR is ADDRESS:PORT
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `remove`.
#[derive(Debug, Args)]
#[command(after_help = "\
Dirty data stays in the cache, as with the kernel, and the next `create` reopens the cache. If the
removal fails, the device continues to serve.

Examples:
  udm remove vol            stop serving, keep dirty data in the cache
  udm remove vol --drain    write everything back to the origin first
  udm remove vol --drain --wipe
                            also erase the cache: only the origin remains")]
pub struct RemoveArgs {
    /// The device's name
    pub name: DeviceName,
    /// Write all dirty data back first, with a progress bar
    #[arg(long)]
    pub drain: bool,
    /// With --drain: erase the cache from its device when it is clean
    #[arg(long, requires = "drain", conflicts_with = "force")]
    pub wipe: bool,
    /// Remove the device even if clients are connected or I/O does not end, and clean up after a
    /// server that died
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Use this only if the fast device is dead. If any of it can be read, use `remove --drain` or
`recover`. It lists the lost ranges as far as they are known. For ext4 or XFS on the origin, it also
prints the commands that list the files in these ranges. It writes to neither device.

Examples:
  udm detach vol                   list what would be lost, without any change
  udm detach vol --accept-loss     end the device
  udm detach /data/slow.img        name the device by its origin")]
pub struct DetachArgs {
    /// The device's name, or its origin
    #[arg(value_name = "NAME|ORIGIN")]
    pub device: String,
    /// Detach the device and accept the loss
    #[arg(long)]
    pub accept_loss: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `drain`.
#[derive(Debug, Args)]
#[command(after_help = "\
It ends even if clients continue to write: then all data from before the drain is written back. You
may interrupt it: data that is not written back yet stays in the cache.

Example:
  udm drain vol")]
pub struct DrainArgs {
    /// The device's name
    pub name: DeviceName,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of commands on one device.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// The device's name
    pub name: DeviceName,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
#[command(after_help = "\
As with dmsetup, each line begins with the device's name, unless you give exactly one name.

Examples:
  udm status vol
  udm status --all vol      the status line, and all facts with their meaning
  udm status --json")]
pub struct StatusArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Also print each field and fact with its meaning, one per line
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `table`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  udm table vol\n  udm table --inactive vol")]
pub struct TableArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Print the loaded table that `resume` would activate
    #[arg(long)]
    pub inactive: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `info`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  udm info vol
  udm info --json vol | jq .dirty_bytes
  udm info vol --limits")]
pub struct InfoArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Print the server's limits instead
    #[arg(long)]
    pub limits: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `message`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  udm message vol 0 gc_percent 80")]
pub struct MessageArgs {
    /// The device's name
    pub name: DeviceName,
    /// A sector within the target's table line; 0 if the table has one line
    pub sector: u64,
    /// The message
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `load`.
#[derive(Debug, Args)]
#[command(after_help = "\
The new table may use devices that are already open. For example, a linear can grow, a delay can be
inserted, and a cache can grow, shrink (not below a dirty block) or change its mode. A pcache or
writecache does not take another table: remove the device and create it again. If `resume` cannot
activate the table, the old one stays.

Example:
  udm load vol --table '0 204800 linear /data/other.img 0' && udm resume vol")]
pub struct LoadArgs {
    /// The device's name
    pub name: DeviceName,
    #[command(flatten)]
    pub source: TableSource,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `rename`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  udm rename vol backup")]
pub struct RenameArgs {
    /// The device's name
    pub name: DeviceName,
    /// Its new name
    pub new_name: DeviceName,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `ls`.
#[derive(Debug, Args)]
#[command(after_help = "\
STATE is active, suspended, failed (the cache device or the control socket does not work), hung (the
server does not answer) or dead (the server was killed: run the same `udm create` to restart it).
udm asks all servers in parallel, and waits for 10 seconds.

--all also lists the devices of the configuration files that no server serves. STATE is then stopped
or in use (another server or program has a cache of the device open). DIRTY is - if udm cannot read
a cache; a note has the reason. udm waits for the caches of a file for 30 seconds. A file is also
listed if a server has its name, but not its caches; a note reports that.

Examples:
  udm ls
  udm ls --all
  udm ls --target pcache --json")]
pub struct LsArgs {
    /// List only devices with a table line of this target
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// Also list the stopped devices that have a configuration file, with the data in their caches
    #[arg(long)]
    pub all: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// What `wait` waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Until {
    /// The device exists and is not suspended
    Serving,
    /// The device has no dirty data
    Clean,
    /// The device is removed
    Removed,
}

/// A time, as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seconds {
    /// The time; `None` if it is longer than any wait.
    pub time: Option<Duration>,
    /// The number as it was given.
    pub given: String,
}

fn seconds(word: &str) -> Result<Seconds, String> {
    let is_decimal = word.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    let number: Option<f64> = word.parse().ok().filter(|_| is_decimal);
    let number = number.ok_or("expected a number of seconds, such as 60 or 0.5")?;
    Ok(Seconds { time: Duration::try_from_secs_f64(number).ok(), given: word.to_owned() })
}

/// Arguments of `wait`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  udm wait vol                                until it serves
  udm wait vol --until clean --timeout 60     until it has no dirty data, for at most a minute")]
pub struct WaitArgs {
    /// The device's name
    pub name: DeviceName,
    /// Wait for this state
    #[arg(long, value_enum, default_value_t = Until::Serving)]
    pub until: Until,
    /// Give up after this many seconds, which may be a fraction [default: wait indefinitely]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Seconds>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Arguments for udm-bench; `udm bench --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub args: Vec<OsString>,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Print the page of this command [default: udm's own page]
    pub command: Option<String>,
    /// Write all pages into FOLDER
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    pub folder: Option<PathBuf>,
}

/// Arguments of the server process.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The device's name; what to serve is read from standard input
    pub name: DeviceName,
}
