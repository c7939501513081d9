//! Brings an origin up to date from its cache at rest, without serving it.
//!
//! 1. A batch of dirty blocks is copied, the origin is flushed, and then their dirty bits are
//!    cleared, in a transaction. So a crash at any moment loses no data: the data of clean blocks
//!    is durable on the origin.
//! 2. From the first transaction on, the metadata's dirty bits are valid, even if they were not
//!    before: no other program has the cache, so they remain right.
//! 3. Before the origin is written to, the metadata's note of it (`origin`) is removed, and the
//!    metadata names the devices (`binding`): the user may have accepted others.
//! 4. Blocks that cannot be read from the cache stay dirty. A failing origin ends the work.
//! 5. Blocks of a cache device that failed a flush in this boot are dropped instead of becoming
//!    clean, because the device may show older data after a power failure (`doubt`).

use std::collections::VecDeque;

use super::binding::{self, Devices};
use super::metadata::bits::Bits;
use super::metadata::superblock::{CLEAN_SHUTDOWN, OriginNote};
use super::metadata::{Change, Contents, Doubt, Loaded, Next, Writer};
use super::open::settle;
use super::origin::{self, drop_clean, note_of};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::units::{MIB, SECTOR};

/// Bytes of one I/O.
const PIECE_BYTES: u64 = MIB;
/// I/Os in flight together.
const PIECES_MAX: usize = 16;
/// Bytes between two transactions, or one block.
const BATCH_BYTES: u64 = 64 * MIB;
/// Elements of a block of mappings, or of words of dirty bits.
const PER_BLOCK: u64 = 509;

/// A cache that is being drained.
#[derive(Debug)]
pub struct Drain {
    devices: Devices,
    writer: Writer,
    contents: Contents,
    block_bytes: u64,
    /// Dirty slots with the origin's blocks that they hold, in the origin's order.
    left: VecDeque<(u64, u64)>,
    /// Slots that could not be read.
    unreadable: Vec<u64>,
    /// Whether the dirty bits on the device are valid.
    is_told: bool,
    /// The device's note of the origin, until the origin is written to.
    note: Option<OriginNote>,
    /// Whether the origin was as its cache had left it.
    was_same: bool,
    /// Whether the metadata names these devices.
    is_bound: bool,
    /// Whether blocks are dropped when they are written back.
    drops: bool,
    /// The devices that failed a flush.
    doubt: Doubt,
    /// Whether the metadata device has the metadata durably.
    is_settled: bool,
}

/// A piece of a block that is copied.
#[derive(Clone, Copy, Debug)]
struct Piece {
    slot: u64,
    from: u64,
    to: u64,
    len: u64,
}

impl Drain {
    /// Determines the work, without writes. An error if there are dirty blocks and the origin has
    /// changed since its cache ended; `remedy`: the option that would continue then; `None`:
    /// continue.
    pub fn new(devices: Devices, loaded: Loaded, remedy: Option<&str>) -> Result<Drain> {
        let same = origin::same(&devices, &loaded.superblock);
        devices.cache.expect_data(0);
        let writer = Writer::new(&loaded)?;
        let superblock = loaded.superblock;
        if superblock.needs_check() {
            let name = &devices.metadata.limits().name;
            let message = format!(
                "{name} has the needs-check flag: run `udm cache check --clear-needs-check-flag \
                 {name}`"
            );
            return Err(Error::new(Kind::Refused, message));
        }
        let block_bytes = u64::from(superblock.fields.data_sectors.get()) * SECTOR;
        let mut contents = loaded.contents.opened(&superblock);
        if let Some(remedy) = remedy {
            origin::check(same, &devices, &superblock, &contents, remedy)?;
        }
        // Clean blocks that are copies of another state of the origin must not outlive this.
        let drops = superblock.doubt.cache && !mutants::is(Mutant::LostKeptAsIs);
        let has_dropped = (drops || !same.has_its_data()) && drop_clean(&mut contents);
        let dirty = contents.dirty.iter();
        let mut left: Vec<(u64, u64)> =
            dirty.filter_map(|slot| Some((contents.block(slot)?, slot))).collect();
        left.sort_unstable();
        for &(block, slot) in &left {
            check_place(&devices.origin, "block", block, block_bytes)?;
            check_place(&devices.cache, "slot", slot, block_bytes)?;
        }
        Ok(Drain {
            writer,
            contents,
            block_bytes,
            left: left.into_iter().map(|(block, slot)| (slot, block)).collect(),
            unreadable: Vec::new(),
            is_told: superblock.is_clean() && !has_dropped,
            note: superblock.note,
            was_same: same.is_proven(),
            is_bound: binding::renew_mark(&devices, &mut superblock.clone()),
            drops,
            doubt: superblock.doubt,
            is_settled: false,
            devices,
        })
    }

    /// Bytes that are still to be copied.
    pub fn left_bytes(&self) -> u64 {
        self.left.len() as u64 * self.block_bytes
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// The slots that could not be read. They stay dirty.
    pub fn unreadable(&self) -> &[u64] {
        &self.unreadable
    }

    /// Whether all that can be done is done.
    pub fn is_done(&self) -> bool {
        self.left.is_empty() && self.is_told
    }

    /// Copies some blocks, makes them durable, and then clean.
    pub fn step(&mut self) -> Result<()> {
        if !self.is_settled {
            settle(&self.devices.metadata)?;
            self.is_settled = true;
        }
        if self.note.is_some() || !self.is_bound {
            let none = || Bits::new(0);
            self.commit(&none(), &none(), None)?;
            (self.note, self.is_bound) = (None, true);
        }
        let blocks = (BATCH_BYTES / self.block_bytes).max(1) as usize;
        let batch: Vec<(u64, u64)> = self.left.iter().take(blocks).copied().collect();
        let failed = self.copy(&batch)?;
        if !batch.is_empty() {
            self.flush_origin()?;
        }
        let mut mappings = Bits::new(self.contents.slots().div_ceil(PER_BLOCK));
        let mut dirty = Bits::new(mappings.len());
        let clean = batch.iter().map(|(slot, _)| *slot).filter(|slot| !failed.contains(slot));
        for slot in clean {
            self.contents.dirty.clear(slot);
            if self.drops {
                self.contents.mappings[slot as usize] = 0;
            }
            mappings.set(slot / PER_BLOCK);
            dirty.set(slot / 64 / PER_BLOCK);
        }
        self.commit(&mappings, &dirty, None)?;
        self.left.drain(..batch.len());
        self.unreadable.extend(failed);
        Ok(())
    }

    /// All possible work is done: records the new state of the origin, if its state was known
    /// before. If the origin may have been changed, no note is written.
    pub fn finish(&mut self) -> Result<()> {
        let note = note_of(&self.devices.origin).filter(|_| self.was_same && self.note.is_none());
        match note {
            Some(note) => self.commit(&Bits::new(0), &Bits::new(0), Some(note)),
            None => Ok(()),
        }
    }

    /// A flush that fails is recorded for a later server: the origin may return data that it does
    /// not have durably.
    fn flush_origin(&mut self) -> Result<()> {
        let flushed = carry_out(&self.devices.origin, vec![flush(&self.devices.origin)]);
        if flushed.is_err() {
            self.doubt.origin = true;
            let none = || Bits::new(0);
            // The error of the flush matters more than one of the record.
            let _ = self.commit(&none(), &none(), None);
        }
        flushed
    }

    /// Says on the device what is dirty.
    fn commit(&mut self, mappings: &Bits, dirty: &Bits, note: Option<OriginNote>) -> Result<()> {
        let mut superblock = self.writer.superblock().clone();
        superblock.put_flag(CLEAN_SHUTDOWN, true);
        superblock.note = note;
        superblock.doubt = self.doubt;
        binding::renew_mark(&self.devices, &mut superblock);
        let version = superblock.version();
        let change = match self.is_told {
            true => Change {
                mappings: match version == 1 || self.drops {
                    true => self.contents.next_mappings(version, Some(mappings)),
                    false => Next::Same,
                },
                dirty: self.contents.next_dirty(version, Some(dirty)),
                ..Change::of_superblock(superblock)
            },
            // A note from before an unclean end does not count, and must not count now.
            false => {
                self.contents.hints = None;
                self.contents.discards = Bits::default();
                superblock.fields.hint_bytes.set(0);
                superblock.fields.discard_sectors.set(0);
                Change::whole(superblock, &self.contents)
            }
        };
        let mut transaction = self.writer.prepare(&change)?;
        drop(change);
        match transaction.carry_out(&self.devices.metadata) {
            Ok(()) => {
                self.writer.committed(transaction);
                self.is_told = true;
                Ok(())
            }
            Err((error, reached)) => {
                self.writer.abandoned(transaction, reached);
                Err(error)
            }
        }
    }

    /// Copies blocks from the cache to the origin. The slots that could not be read.
    fn copy(&self, batch: &[(u64, u64)]) -> Result<Vec<u64>> {
        let mut failed: Vec<u64> = Vec::new();
        let pieces = batch.iter().flat_map(|&(slot, block)| {
            let (from, to) = (slot * self.block_bytes, block * self.block_bytes);
            (0..self.block_bytes).step_by(PIECE_BYTES as usize).map(move |at| Piece {
                slot,
                from: from + at,
                to: to + at,
                len: PIECE_BYTES.min(self.block_bytes - at),
            })
        });
        let pieces: Vec<Piece> = pieces.collect();
        for pieces in pieces.chunks(PIECES_MAX) {
            let Devices { cache, origin, .. } = &self.devices;
            let read = |(nth, piece): (usize, &Piece)| {
                let buffer = Buffer::zeroed(piece.len as usize);
                DiskIo::new(cache, Op::Read, piece.from, buffer, nth as u64)
            };
            let done = cache.carry_out(pieces.iter().enumerate().map(read).collect());
            let mut writes = Vec::with_capacity(pieces.len());
            for io in done {
                let piece = pieces[io.token as usize];
                match io.result {
                    Ok(()) => writes.push(DiskIo::new(origin, Op::Write, piece.to, io.buffer, 0)),
                    Err(_) if failed.contains(&piece.slot) => {}
                    Err(_) => failed.push(piece.slot),
                }
            }
            carry_out(origin, writes)?;
        }
        Ok(failed)
    }
}

/// Whether a block or slot is within its device.
fn check_place(disk: &Arc<dyn Disk>, what: &str, number: u64, block_bytes: u64) -> Result<()> {
    let limits = disk.limits();
    let end = number.checked_add(1).and_then(|end| end.checked_mul(block_bytes));
    if end.is_some_and(|end| end <= limits.size_bytes) {
        return Ok(());
    }
    let message = format!(
        "{} has {} bytes, so {what} {number} of {block_bytes} bytes, which is dirty, is beyond its \
         end: check that it is the right device",
        limits.name, limits.size_bytes
    );
    Err(Error::new(Kind::Refused, message))
}

fn flush(disk: &Arc<dyn Disk>) -> DiskIo {
    DiskIo::bare(disk, Op::Flush, 0, 0, 0)
}

fn carry_out(disk: &Arc<dyn Disk>, ios: Vec<DiskIo>) -> Result<()> {
    disk.carry_out(ios).iter().try_for_each(|io| io.result).map_err(|status| {
        let what = "writing dirty data back";
        Error::new(Kind::Io, format!("{}: {what}: {status}", disk.limits().name))
    })
}
