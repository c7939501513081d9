//! Arguments of `cache` and its verbs, with the names of thin-provisioning-tools.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::JsonArgs;

/// Arguments of `cache`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
These commands work on the metadata device of a `cache`, in both versions of the format, while the
device is not in use. `udm inspect META` shows its contents. `udm recover META CACHE ORIGIN` writes
the dirty blocks back to the origin.

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
    /// Check metadata, and print one line for each error
    Check(CheckArgs),
    /// Print metadata as XML
    Dump(DumpArgs),
    /// Create metadata from XML
    Restore(RestoreArgs),
    /// Write the intact part of damaged metadata to another device
    Repair(RepairArgs),
}

/// Arguments of `cache check`.
#[derive(Debug, Args)]
#[command(after_help = "\
The exit code is 0 if there is no error, even if the needs-check flag is set.

It checks all that cache_check checks. In addition, it checks the number of blocks in use, each
bitmap's number of free blocks, and each bitmap's first free block. Debian's cache_check 0.9.0 does
not check the space map (lost blocks, blocks in use that count as free), dirty bits of unused
blocks, or the keys of parent nodes in a tree.

Example:
  udm cache check /dev/vg/meta && udm cache check --clear-needs-check-flag /dev/vg/meta")]
pub struct CheckArgs {
    /// The metadata device
    pub metadata: PathBuf,
    /// Print no output
    #[arg(short, long)]
    pub quiet: bool,
    /// If the check finds no error, clear the flag that makes a kernel refuse the metadata
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
The XML has the format of cache_dump. After an unclean shutdown, it marks every block as dirty, as
the kernel does, and has no hints. Debian's cache_dump 0.9.0 marks every block of version 2 as
clean. After an unclean shutdown, both 0.9.0 and 1.1.0 print the outdated dirty flags of the disk,
so restoring their XML would lose dirty data.

Example:
  udm cache dump -o meta.xml /dev/vg/meta")]
pub struct DumpArgs {
    /// The metadata device
    pub metadata: PathBuf,
    /// Write to FILE instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Print the part of damaged metadata that `udm cache repair` would keep
    #[arg(long)]
    pub repair: bool,
}

/// Arguments of `cache restore`.
#[derive(Debug, Args)]
#[command(after_help = "\
The output must be a block device or an existing file of at least 4 MiB and 28 bytes for each block
of the cache. Debian's cache_restore 0.9.0 leaves dirty bits of unused blocks set in version
2, loses a block in version 1, and stores hints that the kernel ignores.

Example:
  truncate -s 8M new-meta.img && udm cache restore -i meta.xml -o new-meta.img")]
pub struct RestoreArgs {
    /// Read the XML from FILE
    #[arg(short, long, value_name = "FILE")]
    pub input: PathBuf,
    /// Write the metadata to META
    #[arg(short, long, value_name = "META")]
    pub output: PathBuf,
    /// Write this version of the format
    #[arg(long, value_name = "1|2", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=2))]
    pub metadata_version: u32,
    /// Write metadata as after a crash, so that every block counts as dirty
    #[arg(long)]
    pub omit_clean_shutdown: bool,
    /// Overwrite a device that holds data
    #[arg(long)]
    pub force_format: bool,
    /// Print no output
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}

/// Arguments of `cache repair`.
#[derive(Debug, Args)]
#[command(after_help = "\
It never writes to the damaged device. It marks a block as dirty unless the block is known to be
clean. It lists losses, and then exits with code 1. Debian's cache_repair 0.9.0
turns version 2 into version 1 with every block clean, which destroys the data of a writeback cache.

Example:
  truncate -s 8M new-meta.img && udm cache repair -i /dev/vg/meta -o new-meta.img")]
pub struct RepairArgs {
    /// Read the damaged metadata from META
    #[arg(short, long, value_name = "META")]
    pub input: PathBuf,
    /// Write the new metadata to NEW, which must be another device
    #[arg(short, long, value_name = "NEW")]
    pub output: PathBuf,
    /// Overwrite a device that holds data
    #[arg(long)]
    pub force_format: bool,
    /// Print only losses
    #[arg(short, long)]
    pub quiet: bool,
    #[command(flatten)]
    pub json: JsonArgs,
}
