//! Wiping: taking a clean cache off its devices, so that they are not recognised as a cache again.
//!
//! 1. The origin is flushed, and then the superblock is erased, durably: from then on there is no
//!    cache.
//! 2. The rest of the metadata is erased, and the first block of the cache device: it may be a copy
//!    of an origin's block with a file system at its front.

use super::binding;
use super::binding::Devices;
use super::metadata::transaction::erase_superblock;
use super::metadata::{Change, Loaded, Writer, load};
use crate::base::attaching::AttachProgress;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::probe;
use crate::sync::Arc;
use crate::units::{KIB, MIB};

/// Bytes of one write.
const PIECE_BYTES: u64 = MIB;
/// Bytes at both ends of the cache device that go in any case.
const END_BYTES: u64 = MIB;
/// Bytes that go around what tells something.
const AROUND_BYTES: u64 = 64 * KIB;
/// How often the cache device is looked at again.
const LOOKS_MAX: usize = 16;

/// Wipes the cache on `devices`, which no server serves; refuses unless it is clean. `progress`
/// counts bytes.
pub fn wipe(devices: &Devices, progress: &AttachProgress) -> Result<()> {
    let loaded = check(devices)?;
    if !mutants::is(Mutant::WipedUnflushed) {
        flush(&devices.origin).inspect_err(|_| tell_doubt(devices, &loaded))?;
    }
    erase_superblock(&devices.metadata)?;
    let metadata_bytes = devices.metadata.limits().size_bytes;
    let size = devices.cache.limits().size_bytes;
    let end = END_BYTES.min(size);
    progress.begin("bytes", metadata_bytes + 2 * end);
    zero(&devices.metadata, 0, metadata_bytes, progress)?;
    zero(&devices.cache, 0, end, progress)?;
    zero(&devices.cache, size - end, size, progress)?;
    for _ in 0..LOOKS_MAX {
        let found = probe::disk(&devices.cache, 0);
        for finding in &found {
            let start = finding.at / AROUND_BYTES * AROUND_BYTES;
            zero(&devices.cache, start, size.min(start + AROUND_BYTES), progress)?;
        }
        if found.is_empty() {
            break;
        }
    }
    flush(&devices.metadata)?;
    flush(&devices.cache)
}

/// Records for the next server that the origin failed a flush, if possible: the error of the flush
/// matters more than one of the record.
fn tell_doubt(devices: &Devices, loaded: &Loaded) {
    let mut superblock = loaded.superblock.clone();
    superblock.doubt.origin = true;
    superblock.note = None;
    let Ok(writer) = Writer::new(loaded) else { return };
    if let Ok(mut transaction) = writer.prepare(&Change::of_superblock(superblock)) {
        let _ = transaction.carry_out(&devices.metadata);
    }
}

/// An error unless the origin has everything.
fn check(devices: &Devices) -> Result<Loaded> {
    let name = &devices.metadata.limits().name;
    let refuse = |what: &str| Err(Error::new(Kind::Refused, format!("{name}: not wiped: {what}")));
    let loaded = load(&devices.metadata).map_err(|error| error.at("cache"))?;
    binding::check(devices, &loaded.superblock, "wipe it there")?;
    if loaded.superblock.needs_check() {
        return refuse("its metadata has the needs-check flag");
    }
    if !loaded.superblock.is_clean() {
        return refuse("it was not shut down cleanly, so any of its blocks may be dirty");
    }
    match loaded.contents.dirty.ones() {
        0 => Ok(loaded),
        dirty => refuse(&format!("it has {dirty} dirty blocks")),
    }
}

/// Zeroes the bytes from `start` to `end`, which are whole sectors.
fn zero(disk: &Arc<dyn Disk>, start: u64, end: u64, progress: &AttachProgress) -> Result<()> {
    let mut at = start;
    while at < end {
        let len = PIECE_BYTES.min(end - at);
        carry_out(disk, DiskIo::new(disk, Op::Write, at, Buffer::zeroed(len as usize), 0))?;
        at += len;
        progress.advance(len);
    }
    Ok(())
}

fn flush(disk: &Arc<dyn Disk>) -> Result<()> {
    carry_out(disk, DiskIo::bare(disk, Op::Flush, 0, 0, 0))
}

fn carry_out(disk: &Arc<dyn Disk>, io: DiskIo) -> Result<()> {
    disk.carry_out(vec![io]).iter().try_for_each(|io| io.result).map_err(|status| {
        Error::new(Kind::Io, format!("{}: wiping a cache: {status}", disk.limits().name))
    })
}
