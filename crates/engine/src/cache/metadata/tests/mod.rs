//! The metadata against a plain model, against what the kernel writes, and against itself.

mod damage;
mod trees;
mod writing;

use super::*;
use crate::disk::{Disk, RamDisk};
use crate::sync::Arc;

/// A device of `blocks` blocks.
fn device(blocks: u64) -> (Arc<RamDisk>, Arc<dyn Disk>) {
    let ram = Arc::new(RamDisk::new(blocks * BLOCK_BYTES as u64, 512));
    (Arc::clone(&ram), ram)
}

/// Formats `disk`.
fn formatted(disk: &Arc<dyn Disk>, version: u32) -> Writer {
    let Formatted { mut transaction, writer } =
        format(disk.limits().size_bytes / BLOCK_BYTES as u64, 64, version).unwrap();
    transaction.carry_out(disk).unwrap();
    writer
}

/// Does `change` in one transaction.
fn commit(disk: &Arc<dyn Disk>, writer: &mut Writer, change: &Change<'_>) {
    let mut transaction = writer.prepare(change).unwrap();
    transaction.carry_out(disk).unwrap();
    writer.committed(transaction);
}

/// The metadata on `disk`; fails if the check finds an error.
fn spotless(disk: &Arc<dyn Disk>) -> Loaded {
    let found = survey(disk, survey::superblock(disk).unwrap());
    let findings: Vec<String> = found.findings().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    found.loaded().unwrap()
}
