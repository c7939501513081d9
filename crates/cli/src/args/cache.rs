//! Arguments of `cache` and its verbs, which are called as thin-provisioning-tools' are.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::JsonArgs;

/// Arguments of `cache`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
These work on the metadata device of a `cache`, in both versions of its format, while nobody uses
it. `udm inspect META` shows what it holds, `udm recover META CACHE ORIGIN` writes its dirty blocks
back to the origin.

Examples:
  udm cache check /dev/vg/meta
  udm cache dump -o meta.xml /dev/vg/meta
  udm cache restore -i meta.xml -o new-meta.img
  udm cache repair -i /dev/vg/meta -o new-meta.img")]
pub struct CacheArgs {
    /// What to do
    #[command(subcommand)]
    pub command: CacheCommand,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Check metadata: one line for everything that is wrong with it
    Check(CheckArgs),
    /// Print metadata as XML
    Dump(DumpArgs),
    /// Make metadata from XML
    Restore(RestoreArgs),
    /// Make new metadata from what can be kept of damaged metadata
    Repair(RepairArgs),
}

/// Arguments of `cache check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit code: 0 if nothing is wrong, also if the metadata is only marked as to be checked.

It checks what cache_check does, and also what no cache_check does: the number of blocks in use,
each bitmap's number of free blocks, and the place before which none is free. Debian's cache_check
0.9.0 does not look at the space map at all (lost blocks, blocks in use that count as free), nor at
dirty bits of blocks that are not in use, nor whether a tree's keys agree.

Example:
  udm cache check /dev/vg/meta && udm cache check --clear-needs-check-flag /dev/vg/meta")]
pub struct CheckArgs {
    /// The metadata device
    pub metadata: PathBuf,
    /// Print nothing
    #[arg(short, long)]
    pub quiet: bool,
    /// If nothing is wrong, remove the mark that keeps a kernel from using the metadata
    #[arg(long)]
    pub clear_needs_check_flag: bool,
    /// Check the superblock only
    #[arg(long, conflicts_with = "clear_needs_check_flag")]
    pub super_block_only: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `cache dump`.
#[derive(Debug, Args)]
#[command(after_help = "\
The XML is that of cache_dump. After an unclean shutdown every block is dirty, as it is for the
kernel, and there are no hints. Debian's cache_dump 0.9.0 shows every block of version 2 as clean,
and both it and 1.1.0 show what the disk says after an unclean shutdown: restored, dirty data would
be lost.

Example:
  udm cache dump -o meta.xml /dev/vg/meta")]
pub struct DumpArgs {
    /// The metadata device
    pub metadata: PathBuf,
    /// Write to FILE instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print what `udm cache repair` would keep of damaged metadata
    #[arg(long)]
    pub repair: bool,
}

/// Arguments of `cache restore`.
#[derive(Debug, Args)]
#[command(after_help = "\
The output is a block device or a file that exists and is large enough: 4 MiB and 28 bytes for each
block of the cache. Debian's cache_restore 0.9.0 leaves dirty bits of unused blocks set in version
2, loses a block in version 1, and stores hints that the kernel ignores.

Example:
  truncate -s 8M new-meta.img && udm cache restore -i meta.xml -o new-meta.img")]
pub struct RestoreArgs {
    /// The XML
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// The metadata device to write
    #[arg(short, long, value_name = "META")]
    pub output: PathBuf,
    /// The version of the format
    #[arg(long, value_name = "1|2", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=2))]
    pub metadata_version: u32,
    /// Write it as after a crash: every block counts as dirty
    #[arg(long)]
    pub omit_clean_shutdown: bool,
    /// Write to a device that holds something
    #[arg(long)]
    pub force_format: bool,
    /// Print nothing
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `cache repair`.
#[derive(Debug, Args)]
#[command(after_help = "\
It never writes to the damaged device. No dirty block becomes clean: where that cannot be known, a
block is dirty. What is lost is listed, and the exit code is 1 then. Debian's cache_repair 0.9.0
turns version 2 into version 1 with every block clean, which destroys the data of a writeback cache.

Example:
  truncate -s 8M new-meta.img && udm cache repair -i /dev/vg/meta -o new-meta.img")]
pub struct RepairArgs {
    /// The damaged metadata device
    #[arg(short, long, value_name = "META")]
    pub input: PathBuf,
    /// The metadata device to write, which is another one
    #[arg(short, long, value_name = "NEW")]
    pub output: PathBuf,
    /// Write to a device that holds something
    #[arg(long)]
    pub force_format: bool,
    /// Print nothing but what is lost
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}
