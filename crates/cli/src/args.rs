//! What may be typed: each command, argument and flag is defined here once, and help, the manual
//! page and the completions are generated from it.
//!
//! This file says what was typed; `commands/` says what it means. `dmsetup` users find their
//! verbs with their meaning.

pub mod cache;
pub mod doctor;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use udm::area::bytes_of;
use udm::targets::{CacheMode, caches};
use udm_export::FORMS;

use crate::runtime::DeviceName;

/// What `--start-sector` takes; `device` names the cache device.
fn start_help(device: &str) -> String {
    let movable = caches().filter(|(_, cache)| cache.begins_anywhere);
    let names: Vec<&str> = movable.map(|(kind, _)| kind.name).collect();
    format!("Where a {} begins on {device}, if its table says so", names.join(" or a "))
}

static INSPECT_START_HELP: LazyLock<String> = LazyLock::new(|| start_help("it"));
static RECOVER_START_HELP: LazyLock<String> = LazyLock::new(|| start_help("its device"));

/// What `--export` takes.
static EXPORT_HELP: LazyLock<String> =
    LazyLock::new(|| format!("A way in for clients: {FORMS}; may be repeated"));

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

Files: the runtime directory is $UDM_RUNTIME_DIR, else /run/udm for root, else
$XDG_RUNTIME_DIR/udm. It holds each device's control socket, log and shared memory; one that other
users may enter or replace is refused. The state directory is $UDM_STATE_DIR, else /var/lib/udm for
root, else $XDG_STATE_HOME/udm or ~/.local/state/udm. It holds what was found out about this
machine.")]
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
    /// Give up a cache whose fast device is dead, and say what is lost
    Detach(DetachArgs),
    /// Write all dirty data back to the origin; the device stays
    Drain(DrainArgs),
    /// Make everything written so far durable, as a client's flush does
    Flush(NameArgs),
    /// Print the kernel's status lines
    Status(StatusArgs),
    /// Print the active table
    Table(TableArgs),
    /// Print what is known about a device: server, exports, medium, dirty data
    Info(InfoArgs),
    /// Send a message to a target
    Message(MessageArgs),
    /// Stop serving requests: they wait until `resume`
    Suspend(NameArgs),
    /// Serve requests again, with the loaded table if there is one
    Resume(NameArgs),
    /// Load a table into the inactive slot; `resume` makes it live
    Load(LoadArgs),
    /// Give a device another name
    Rename(RenameArgs),
    /// List devices
    Ls(LsArgs),
    /// Wait until a device serves, is clean, or is gone
    Wait(WaitArgs),
    /// Open one more way in for clients
    Export(ExportArgs),
    /// Close a way in
    Unexport(UnexportArgs),
    /// Print metrics in Prometheus' text format
    Metrics(NamesArgs),
    /// Show what a cache device holds: geometry, dirty data, damage; never writes
    Inspect(InspectArgs),
    /// Write the dirty data of a cache device back to its origin, without serving it
    Recover(RecoverArgs),
    /// Check, print, make or repair the metadata of a dm-cache
    Cache(cache::CacheArgs),
    /// Say which doors and modes of I/O work here, what is durable, and why not
    Doctor(doctor::DoctorArgs),
    /// List the target types that tables may name
    Targets(JsonArgs),
    /// Measure udm on this machine, beside what it is compared with
    Bench(Box<udm_bench::args::BenchArgs>),
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
    /// Read the table from FILE; without --table and --table-file it is read from standard input
    #[arg(long, value_name = "FILE")]
    pub table_file: Option<PathBuf>,
}

/// A table that is put together from its devices.
#[derive(Debug, Args)]
#[group(multiple = true)]
pub struct SetupArgs {
    /// Instead of a table: cache this slow device...
    #[arg(long, value_name = "SLOW", requires = "fast",
          conflicts_with_all = ["table", "table_file"])]
    pub origin: Option<String>,
    /// ...on this fast one, which is formatted if it is empty, or goes on if it holds their cache
    #[arg(long, value_name = "FAST", requires = "origin")]
    pub fast: Option<String>,
    /// The target; else that of the cache on FAST, else pcache for memory and writecache for disks
    /// (cache, for writethrough)
    #[arg(long, value_name = "TARGET", requires = "origin", value_parser = cache_names())]
    pub target: Option<String>,
    /// writeback (a write is done when the cache has it) or writethrough (when SLOW has it, too),
    /// where the target has both
    #[arg(long, value_name = "MODE", requires = "origin", value_parser = cache_mode)]
    pub mode: Option<CacheMode>,
    /// What decides which blocks a `cache` has: smq (the kernel's, the default) or probation
    /// (blocks enter in part, and stay if they are used again)
    #[arg(long, value_name = "POLICY", requires = "origin", value_parser = ["smq", "probation"])]
    pub policy: Option<String>,
    /// Size of the cache's blocks in bytes, with units if you like, where the target has them
    #[arg(long, value_name = "SIZE", requires = "origin", default_value = "auto",
          value_parser = block_size)]
    pub block_size: BlockSize,
    /// Print what would be created, and create nothing
    #[arg(long, requires = "origin")]
    pub dry_run: bool,
}

/// A block size, or none for `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize(pub Option<u64>);

fn block_size(word: &str) -> Result<BlockSize, String> {
    match word {
        "auto" => Ok(BlockSize(None)),
        _ => Ok(BlockSize(Some(bytes_of(word, 1)?))),
    }
}

fn cache_mode(word: &str) -> Result<CacheMode, String> {
    match word {
        "writeback" => Ok(CacheMode::Writeback),
        "writethrough" => Ok(CacheMode::Writethrough),
        _ => Err("expected writeback or writethrough".into()),
    }
}

fn cache_names() -> PossibleValuesParser {
    PossibleValuesParser::new(caches().map(|(kind, _)| kind.name))
}

/// Arguments of `create`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  udm create vol --origin /data/slow.img --fast /dev/dax0.0 --export nbd+unix:///run/vol.sock
  udm create vol --origin /dev/sdb --fast /dev/nvme0n1 --dry-run
  udm create vol --table '0 2097152 pcache /dev/dax0.0 /data/slow.img'
  udm create vol --table-file vol.table --export nbd+unix:///run/vol.sock
  echo '0 204800 linear /data/disk.img 0' | udm create vol --export nbd://127.0.0.1:10809

Devices are named by path, or by MAJOR:MINOR as `udm table` prints block devices; relative paths
start here. A device in the table may say how to reach it:
  /data/slow.img?io=direct     past the page cache (default where it works)
  /data/slow.img?io=buffered   through it; dontcache: nothing stays there; lazy: written out
                               early, at most 16 MiB (&window=SIZE) unwritten;
                               lazy,read=buffered: what was read stays
  /mnt/dax/fast?persist=cpu    stores are durable when flushed by the CPU; msync: by the kernel
                               (found out by default)
  /dev/sdb?offset=1G&size=8G   a part of it: in sectors, or bytes with a unit")]
pub struct CreateArgs {
    /// The device's name
    pub name: DeviceName,
    #[command(flatten)]
    pub source: TableSource,
    #[command(flatten)]
    pub setup: SetupArgs,
    /// Ways in for clients.
    #[arg(long, value_name = "URI", help = EXPORT_HELP.as_str())]
    pub export: Vec<String>,
    /// Serve at most N connections per export at a time, each on a queue of its own [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: Option<u16>,
    /// Serve from this process instead of starting a server in the background
    #[arg(long)]
    pub foreground: bool,
    /// Format the cache device even though it may hold something
    #[arg(long)]
    pub force_format: bool,
    /// Answer `GET /metrics` over HTTP at ADDR:PORT
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `remove`.
#[derive(Debug, Args)]
#[command(after_help = "\
Dirty data stays in the cache, as with the kernel, and the next `create` goes on with it. A removal
that fails has removed nothing: the device serves on.

Examples:
  udm remove vol            stop serving, keep dirty data in the cache
  udm remove vol --drain    write everything back to the origin first
  udm remove vol --drain --wipe
                            and take the cache off its device: a bare origin is left")]
pub struct RemoveArgs {
    /// The device's name
    pub name: DeviceName,
    /// Write all dirty data back first, with a progress bar
    #[arg(long)]
    pub drain: bool,
    /// With --drain: wipe the cache, once it is clean, so that its device is no cache any more
    #[arg(long, requires = "drain", conflicts_with = "force")]
    pub wipe: bool,
    /// Remove although clients are connected or devices do not come to rest, or clear up after a
    /// server that died
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `detach`.
#[derive(Debug, Args)]
#[command(after_help = "\
Only for a fast device that is dead: what can be read of one, `remove --drain` and `recover` write
back. It lists the ranges that are lost, as far as anybody knows them, and for an ext4 or XFS on the
origin the commands that name the files there. Nothing is written to either device.

Examples:
  udm detach vol                   says what would be lost, and changes nothing
  udm detach vol --accept-loss     and ends the device
  udm detach /data/slow.img        the same, by the origin")]
pub struct DetachArgs {
    /// The device's name, or its origin
    #[arg(value_name = "NAME|ORIGIN")]
    pub device: String,
    /// Do it
    #[arg(long)]
    pub accept_loss: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `drain`.
#[derive(Debug, Args)]
#[command(after_help = "\
Interrupting it leaves everything safe: what is not written back yet stays in the cache.

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

/// Arguments of commands on some devices or all.
#[derive(Debug, Args)]
pub struct NamesArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
#[command(after_help = "\
The device's name stands in front unless exactly one name was given, as with dmsetup.

Examples:
  udm status vol
  udm status --all vol      the line, and all the server knows, in words
  udm status --json")]
pub struct StatusArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Explain everything, one fact per line
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
    /// Print the loaded table that `resume` would make live
    #[arg(long)]
    pub inactive: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `info`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  udm info vol
  udm info --json vol | jq .dirty_bytes
  udm info vol --limits")]
pub struct InfoArgs {
    /// The devices' names; all devices when none is given
    pub names: Vec<DeviceName>,
    /// Print every maximum that the server states instead
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
    /// A sector within the table line that the message is for; 0 for tables of one line
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
Tables may use what the device has open: a linear can grow, a delay slip in, and a cache grow,
shrink, or change its mode (dirty blocks must not be cut off). A pcache or writecache takes no
second table: remove the device and create it again. A table that cannot take effect leaves the old
one.

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
STATE is active or suspended, or failed (the cache device refuses requests, or the socket is of no
use), hung (the server does not answer), dead (it ended without clearing up: the same `udm create`
goes on). All servers are asked at once, and have 10 seconds.

Examples:
  udm ls
  udm ls --target pcache --json")]
pub struct LsArgs {
    /// Only devices that have a table line of this target
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
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
    /// The device is gone
    Removed,
}

/// Arguments of `wait`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  udm wait vol                                until it serves
  udm wait vol --until clean --timeout 60     until nothing is left to write back")]
pub struct WaitArgs {
    /// The device's name
    pub name: DeviceName,
    /// What to wait for
    #[arg(long, value_enum, default_value_t = Until::Serving)]
    pub until: Until,
    /// Give up after this many seconds; without it, wait for ever
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
#[command(after_help = "\
Which door for what:
  a virtual machine       vhost-user:///PATH: rings in the guest's memory, one thread for each
  a program in C          the same, by udm_connect() of libudm; or none, by udm_open()
  a mount on this host    ublk: makes /dev/ublkbN (root, `modprobe ublk_drv`); without that
                          nbd+unix:///PATH, and nbd-client
  another host            nbds://ADDR:PORT?tls=FOLDER: NBD over TLS

vhost-user:///PATH looks at rings before it sleeps, as long as it pays and at most a tenth of the
time in vain; `udm info` prints how much of it was. ?poll=never sleeps immediately; ?poll=always
never does, and takes a processor for each ring. NBD takes ?poll=never, too.

ublk:N?queues=Q&depth=D names the disk, and says how many queues it has and how many requests each
takes at a time. A disk whose server was killed waits for the next one: `udm create` with the same
words, or `udm export` of the same disk. ?shared=FILE (Linux 7.1) is a file in memory, on tmpfs or
hugetlbfs, in which clients with direct I/O keep their data (fio --mem=mmapshared:FILE): the server
copies from there and to there without a call. It has its length before, and keeps that.

Examples:
  udm export vol ublk:
  udm export vol 'ublk:?shared=/dev/shm/buffers'
  udm export vol nbd://127.0.0.1:10809
  udm export vol nbd://127.0.0.1:10809/vol      beside other devices, which `nbdinfo --list` shows
  udm export vol 'nbds://0.0.0.0:10809?tls=/etc/udm/pki'
  udm export vol vhost-user:///run/udm/vol.vhost")]
pub struct ExportArgs {
    /// The device's name
    pub name: DeviceName,
    /// Where clients come in.
    #[arg(help = FORMS)]
    pub uri: String,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `unexport`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  udm unexport vol nbd://127.0.0.1:10809")]
pub struct UnexportArgs {
    /// The device's name
    pub name: DeviceName,
    /// As `udm info` prints it
    pub uri: String,
    /// Close it although clients are connected
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
It only reads, so it may be used while the device is served; what it prints then is a snapshot.

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
It may be interrupted and started again: it goes on where it was.

Of a `cache`, which has a metadata device, that comes first; its blocks stay cached, clean.

Examples:
  udm recover /dev/dax0.0 /data/slow.img
  udm recover /dev/vg/meta /dev/vg/cache /data/slow.img")]
pub struct RecoverArgs {
    /// The cache device, as the table names it
    pub cache_device: String,
    /// The backing device, as the table names it
    pub origin: String,
    /// The origin of a cache with a metadata device; the two before it are its metadata device and
    /// its cache device
    pub cache_origin: Option<String>,
    /// Write nothing, and print how much would be written; for a cache with a metadata device
    #[arg(long, requires = "cache_origin")]
    pub dry_run: bool,
    /// Give up what stands after a damaged or lost place of the log, or what lost entries of a
    /// writecache named, instead of refusing
    #[arg(long)]
    pub truncate: bool,
    /// Accept an origin that is not the one the cache was last used with
    #[arg(long)]
    pub rebind: bool,
    /// Go on without writes that were acknowledged and not flushed, where the memory that the last
    /// server left is lost
    #[arg(long)]
    pub accept_loss: bool,
    /// Where the cache begins.
    #[arg(long, value_name = "SECTOR", default_value_t = 0, help = RECOVER_START_HELP.as_str())]
    pub start_sector: u64,
    #[command(flatten)]
    pub json: JsonArgs,
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
    /// Print the page of this command instead of udm's own
    pub command: Option<String>,
    /// Write all pages into FOLDER instead
    #[arg(long, value_name = "FOLDER", conflicts_with = "command")]
    pub folder: Option<PathBuf>,
}

/// Arguments of the server process.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The device's name; what to serve is read from standard input
    pub name: DeviceName,
}
