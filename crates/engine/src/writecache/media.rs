//! A cache device while it is opened or inspected: memory or a disk, with I/O that the caller waits
//! for. Requests are not served through this file.

use zerocopy::{FromZeros, IntoBytes};

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Absence, Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::pmem::{Persistence, Pmem};
use crate::probe::{self, Finding};
use crate::sync::Arc;
use crate::units::{KIB, MIB, SECTOR};

use super::layout::Superblock;

/// Bytes of one read or write of a disk.
const PIECE_BYTES: u64 = MIB;
/// This many pieces are in flight together.
const PIECES_MAX: u64 = 16;
/// A chunk of memory that fits a processor's own caches.
const CHUNK_BYTES: u64 = 256 * KIB;
/// Ranges that are this close together are read with the bytes between them: that is faster than a
/// separate read.
const GAP_BYTES: u64 = 32 * KIB;
/// This many reads or writes of single places are in flight together.
const SPANS_MAX: usize = 64;

/// A cache device.
#[derive(Clone, Debug)]
pub enum Medium {
    /// Mode `p`.
    Pmem(Arc<dyn Pmem>),
    /// Mode `s`.
    Disk(Arc<dyn Disk>),
}

impl Medium {
    /// The name for messages.
    pub fn name(&self) -> &str {
        match self {
            Medium::Pmem(pmem) => &pmem.medium().name,
            Medium::Disk(disk) => &disk.limits().name,
        }
    }

    /// The permanent failure of the medium, as a sentence. Checks the medium.
    pub fn failure(&self) -> Option<String> {
        match self {
            Medium::Pmem(pmem) => pmem.failure(),
            Medium::Disk(disk) => {
                disk.loss().map(|loss| format!("cache device {} failed: it {loss}", self.name()))
            }
        }
    }

    /// From now on all data that is read from byte `from` on was written: see
    /// [`Disk::expect_data`].
    pub fn expect_data(&self, from: u64) {
        if let Medium::Disk(disk) = self {
            disk.expect_data(from);
        }
    }

    /// Whether a part of a range was a hole of a file when the medium was opened. With a disk,
    /// reads report holes.
    pub fn was_hole(&self, at: u64, len: u64) -> bool {
        matches!(self, Medium::Pmem(pmem) if pmem.was_hole(at, len))
    }

    /// See [`Pmem::has_given_up`].
    pub fn has_given_up(&self) -> bool {
        matches!(self, Medium::Pmem(pmem) if pmem.has_given_up())
    }

    /// See [`Pmem::reserve`].
    pub fn reserve(&self) -> Result<()> {
        match self {
            Medium::Pmem(pmem) => pmem.reserve(),
            Medium::Disk(_) => Ok(()),
        }
    }

    /// Whether the file of the device was deleted: then its content is lost when the last user
    /// closes it.
    pub fn is_deleted(&self) -> bool {
        match self {
            Medium::Pmem(pmem) => pmem.is_deleted(),
            Medium::Disk(disk) => disk.absence() == Some(Absence::Deleted),
        }
    }

    /// The recognised contents from byte `start` on.
    pub fn probe(&self, start: u64) -> Vec<Finding> {
        match self {
            Medium::Pmem(pmem) => probe::pmem(&**pmem, start),
            Medium::Disk(disk) => probe::cache_disk(disk, start),
        }
    }

    /// Data from byte `start` on that a format would not see.
    pub fn data_behind(&self, start: u64) -> Option<u64> {
        match self {
            Medium::Pmem(pmem) => probe::data_on_pmem(&**pmem, start),
            Medium::Disk(disk) => probe::data_on_disk(disk, start, &|_, _| false),
        }
    }

    /// The device's name as the kernel would print it in a table.
    pub fn kernel_name(&self) -> &str {
        match self {
            Medium::Pmem(pmem) => &pmem.medium().kernel_name,
            Medium::Disk(disk) => &disk.limits().kernel_name,
        }
    }

    /// Size in bytes.
    pub fn size_bytes(&self) -> u64 {
        match self {
            Medium::Pmem(pmem) => pmem.len_bytes(),
            Medium::Disk(disk) => disk.limits().size_bytes,
        }
    }

    /// The number of bytes that exist: all, unless the device was cut short and is to be recovered.
    pub fn left_bytes(&self) -> u64 {
        match self {
            Medium::Pmem(pmem) => pmem.left_bytes(),
            Medium::Disk(disk) => disk.limits().size_bytes,
        }
    }

    /// The smallest unit of a write.
    pub fn unit_bytes(&self) -> u32 {
        match self {
            Medium::Pmem(_) => SECTOR as u32,
            Medium::Disk(disk) => disk.limits().block_bytes,
        }
    }

    /// An error about this device.
    pub fn error(&self, kind: Kind, what: impl std::fmt::Display) -> Error {
        Error::new(kind, format!("writecache: {}: {what}", self.name()))
    }

    /// Reads `into.len()` bytes at `at`, whole sectors or not.
    pub fn load(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let len = into.len();
        let failed = |status: Status| {
            let loss = match self {
                Medium::Disk(disk) => disk.loss(),
                Medium::Pmem(_) => None,
            };
            let loss = loss.map_or(String::new(), |loss| format!(": it {loss}"));
            self.error(Kind::Io, format_args!("cannot read {len} bytes at {at}: {status}{loss}"))
        };
        match self {
            Medium::Pmem(pmem) => {
                if at.checked_add(len as u64).is_none_or(|end| end > pmem.len_bytes()) {
                    return Err(failed(Status::Invalid));
                }
                pmem.load(at, into).map_err(|status| {
                    let what =
                        format_args!("Hardware memory error when reading byte {at}: {status}");
                    self.error(Kind::Io, what)
                })
            }
            Medium::Disk(disk) => load_disk(disk, at, into).map_err(failed),
        }
    }

    /// Bytes to read at a time when the whole medium is read.
    pub fn chunk_bytes(&self) -> u64 {
        match self {
            Medium::Pmem(_) => CHUNK_BYTES,
            Medium::Disk(_) => PIECE_BYTES * PIECES_MAX,
        }
    }

    /// Reads `len` bytes at each of `places`, which rise and are multiples of `len`; `found` gets
    /// them with the number of the place.
    pub fn load_each(
        &self,
        places: &[u64],
        len: usize,
        mut found: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let Medium::Disk(disk) = self else {
            let mut bytes = vec![0; len];
            return places.iter().enumerate().try_for_each(|(nth, &at)| {
                self.load(at, &mut bytes)?;
                found(nth, &bytes);
                Ok(())
            });
        };
        let mut nth = 0;
        for spans in spans(disk, places, GAP_BYTES).chunks(SPANS_MAX) {
            for (at, buffer) in load_spans(self, disk, spans)? {
                let bytes = buffer.as_slice();
                while nth < places.len() && places[nth] < at + bytes.len() as u64 {
                    let from = (places[nth] - at) as usize;
                    found(nth, &bytes[from..from + len]);
                    nth += 1;
                }
            }
        }
        Ok(())
    }

    /// Stores `changes`, whose places rise, and none of which crosses a sector; in any order.
    pub fn store_each(&self, changes: &[(u64, &[u8])]) -> Result<()> {
        let Medium::Disk(disk) = self else {
            return changes.iter().try_for_each(|(at, bytes)| self.store(*at, bytes));
        };
        let places: Vec<u64> = changes.iter().map(|change| change.0).collect();
        let mut rest = changes;
        for spans in spans(disk, &places, 0).chunks(SPANS_MAX) {
            let mut ios = Vec::with_capacity(spans.len());
            for (at, mut buffer) in load_spans(self, disk, spans)? {
                let end = at + buffer.len() as u64;
                while let Some((&(place, bytes), behind)) = rest.split_first()
                    && place < end
                {
                    let from = (place - at) as usize;
                    buffer.as_mut_slice()[from..from + bytes.len()].copy_from_slice(bytes);
                    rest = behind;
                }
                ios.push(DiskIo::new(disk, Op::Write, at, buffer, 0));
            }
            carry_out(disk, ios).map_err(|status| {
                self.error(Kind::Io, format_args!("cannot write entries: {status}"))
            })?;
        }
        Ok(())
    }

    /// Writes the data of `len` bytes at each of `places` of a disk again. Returns the number of
    /// unreadable places, which it does not change. Of memory, only pages of a file need it.
    pub fn rewrite_each(&self, places: &[u64], len: usize) -> Result<usize> {
        let disk = match self {
            Medium::Disk(disk) => disk,
            Medium::Pmem(pmem) => return Ok(rewrite_memory(&**pmem, places, len)),
        };
        let mut unreadable = 0;
        for places in places.chunks(SPANS_MAX) {
            let read = |at: &u64| DiskIo::new(disk, Op::Read, *at, Buffer::zeroed(len), 0);
            let found = disk.carry_out(places.iter().map(read).collect());
            let readable = found.into_iter().filter(|io| io.result.is_ok());
            let writes: Vec<DiskIo> = readable
                .map(|done| DiskIo::new(disk, Op::Write, done.offset, done.buffer, 0))
                .collect();
            unreadable += places.len() - writes.len();
            carry_out(disk, writes).map_err(|status| {
                self.error(Kind::Io, format_args!("cannot write blocks again: {status}"))
            })?;
        }
        Ok(unreadable)
    }

    /// The superblock at `start`.
    pub fn superblock(&self, start: u64) -> Result<Superblock> {
        let mut superblock = Superblock::new_zeroed();
        self.load(start, superblock.as_mut_bytes())?;
        Ok(superblock)
    }

    /// Stores `bytes`; the other bytes of a disk's sectors that they touch do not change.
    pub fn store(&self, at: u64, bytes: &[u8]) -> Result<()> {
        match self {
            Medium::Pmem(pmem) => {
                pmem.store(at, bytes);
                Ok(())
            }
            Medium::Disk(disk) => store_disk(self, disk, at, bytes),
        }
    }

    /// All that was stored is durable.
    pub fn settle(&self) -> Result<()> {
        let settled = match self {
            Medium::Pmem(pmem) => pmem.drain().and_then(|()| pmem.sync()),
            Medium::Disk(disk) => {
                carry_out(disk, vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)]).map(drop)
            }
        };
        settled.map_err(|status| self.error(Kind::Io, format_args!("cannot flush: {status}")))
    }
}

/// As [`Medium::rewrite_each`].
fn rewrite_memory(pmem: &dyn Pmem, places: &[u64], len: usize) -> usize {
    if pmem.medium().persistence == Persistence::Cpu {
        return 0;
    }
    let mut bytes = vec![0; len];
    let mut unreadable = 0;
    for &at in places {
        match pmem.load(at, &mut bytes) {
            Ok(()) => pmem.store(at, &bytes),
            Err(_) => unreadable += 1,
        }
    }
    unreadable
}

/// Does all of `ios`, in the order of their offsets.
fn carry_out(disk: &Arc<dyn Disk>, ios: Vec<DiskIo>) -> std::result::Result<Vec<DiskIo>, Status> {
    let mut done = disk.carry_out(ios);
    done.iter().try_for_each(|io| io.result)?;
    done.sort_by_key(|io| io.offset);
    Ok(done)
}

/// The pieces of a range, some at a time: offset and length of each.
fn rounds(at: u64, end: u64) -> impl Iterator<Item = Vec<(u64, u64)>> {
    let round = PIECE_BYTES * PIECES_MAX;
    (at..end).step_by(round as usize).map(move |first| {
        let last = end.min(first + round);
        let piece = |at: u64| (at, (last - at).min(PIECE_BYTES));
        (first..last).step_by(PIECE_BYTES as usize).map(piece).collect()
    })
}

fn load_disk(disk: &Arc<dyn Disk>, at: u64, into: &mut [u8]) -> std::result::Result<(), Status> {
    let unit = u64::from(disk.limits().block_bytes).max(SECTOR);
    let end = at.checked_add(into.len() as u64).ok_or(Status::Invalid)?;
    let (first, last) = (at / unit * unit, end.next_multiple_of(unit));
    for round in rounds(first, last.min(disk.limits().size_bytes).max(first)) {
        let ios = round
            .iter()
            .map(|(at, len)| DiskIo::new(disk, Op::Read, *at, Buffer::zeroed(*len as usize), 0));
        for read in carry_out(disk, ios.collect())? {
            let (from, to) = (read.offset.max(at), (read.offset + read.len).min(end));
            if from < to {
                let part = (from - read.offset) as usize..(to - read.offset) as usize;
                into[(from - at) as usize..(to - at) as usize]
                    .copy_from_slice(&read.buffer.as_slice()[part]);
            }
        }
    }
    if end <= disk.limits().size_bytes { Ok(()) } else { Err(Status::Invalid) }
}

/// Whole units around `places`, which rise: first byte and length of each span. Units that are no
/// more than `gap` bytes apart are one span, unless it gets too long.
fn spans(disk: &Arc<dyn Disk>, places: &[u64], gap: u64) -> Vec<(u64, u64)> {
    let unit = u64::from(disk.limits().block_bytes).max(SECTOR);
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for place in places {
        let first = place / unit * unit;
        match spans.last_mut() {
            Some((at, len)) if first <= *at + *len + gap && first + unit - *at <= PIECE_BYTES => {
                *len = (*len).max(first + unit - *at);
            }
            _ => spans.push((first, unit)),
        }
    }
    spans
}

/// The content of `spans`, each with its first byte.
fn load_spans(
    medium: &Medium,
    disk: &Arc<dyn Disk>,
    spans: &[(u64, u64)],
) -> Result<impl Iterator<Item = (u64, Buffer)>> {
    let read =
        |(at, len): &(u64, u64)| DiskIo::new(disk, Op::Read, *at, Buffer::zeroed(*len as usize), 0);
    let done = carry_out(disk, spans.iter().map(read).collect())
        .map_err(|status| medium.error(Kind::Io, format_args!("cannot read entries: {status}")))?;
    Ok(done.into_iter().map(|io| (io.offset, io.buffer)))
}

fn store_disk(medium: &Medium, disk: &Arc<dyn Disk>, at: u64, bytes: &[u8]) -> Result<()> {
    let end = at + bytes.len() as u64;
    let (first, last) = (at / SECTOR * SECTOR, end.next_multiple_of(SECTOR));
    let mut whole = vec![0; (last - first) as usize];
    let edges = [(first, first < at), (last - SECTOR, end < last)];
    for (edge, is_cut) in edges {
        if is_cut {
            let from = (edge - first) as usize;
            medium.load(edge, &mut whole[from..from + SECTOR as usize])?;
        }
    }
    let from = (at - first) as usize;
    whole[from..from + bytes.len()].copy_from_slice(bytes);
    for round in rounds(first, last) {
        let piece = |(at, len): &(u64, u64)| {
            let from = (at - first) as usize;
            DiskIo::new(
                disk,
                Op::Write,
                *at,
                Buffer::from_bytes(&whole[from..from + *len as usize]),
                0,
            )
        };
        carry_out(disk, round.iter().map(piece).collect()).map_err(|status| {
            medium.error(Kind::Io, format_args!("cannot write at byte {at}: {status}"))
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{RamDisk, SimDisk};
    use crate::pmem::Persistence;
    use crate::pmem::sim::SimPmem;

    #[test]
    fn odd_ranges_are_stored_and_found() {
        let sim = SimDisk::new(1 << 20, 512);
        sim.hold(true);
        for medium in [
            Medium::Pmem(Arc::new(SimPmem::new(1 << 20, Persistence::Cpu))),
            Medium::Disk(Arc::new(RamDisk::new(1 << 20, 4096))),
            Medium::Disk(Arc::new(sim)),
        ] {
            medium.store(500, &[7; 2000]).unwrap();
            medium.store(1024, &[8; 512]).unwrap();
            medium.settle().unwrap();
            let mut found = [1; 3000];
            medium.load(0, &mut found).unwrap();
            let wanted = |at: usize| match at {
                1024..1536 => 8,
                500..2500 => 7,
                _ => 0,
            };
            assert!((0..3000).all(|at| found[at] == wanted(at)));
            assert!(medium.load((1 << 20) - 8, &mut found).is_err());
        }
    }

    #[test]
    fn single_places_are_loaded_and_stored_together() {
        let places: Vec<u64> = [0, 1, 2, 40, 41, 2000, 30_000, 65_000, 65_535]
            .into_iter()
            .chain((70_000..200_000).step_by(37))
            .map(|nth| nth * 16)
            .collect();
        let content: Vec<u8> = (0..4 << 20).map(|at: u32| (at / 5) as u8).collect();
        for unit in [0, 512, 4096] {
            let medium = match unit {
                0 => Medium::Pmem(Arc::new(SimPmem::new(4 << 20, Persistence::Cpu))),
                _ => Medium::Disk(Arc::new(RamDisk::new(4 << 20, unit))),
            };
            medium.store(0, &content).unwrap();
            let mut count = 0;
            medium
                .load_each(&places, 16, |nth, bytes| {
                    let at = places[nth] as usize;
                    assert_eq!((nth, bytes), (count, &content[at..at + 16]));
                    count += 1;
                })
                .unwrap();
            assert_eq!(count, places.len());
            let changes: Vec<(u64, &[u8])> =
                places.iter().map(|at| (at + 8, &[0xEE; 8][..])).collect();
            medium.store_each(&changes).unwrap();
            let mut wanted = content.clone();
            for (at, bytes) in changes {
                wanted[at as usize..at as usize + 8].copy_from_slice(bytes);
            }
            let mut found = vec![0; wanted.len()];
            medium.load(0, &mut found).unwrap();
            assert!(found == wanted);
        }
    }

    #[test]
    fn large_ranges_go_in_pieces() {
        let disk = Arc::new(RamDisk::new(64 << 20, 512));
        let medium = Medium::Disk(disk.clone());
        let bytes: Vec<u8> = (0..40 << 20).map(|at| (at / 1000) as u8).collect();
        medium.store(1000, &bytes).unwrap();
        let mut found = vec![0; bytes.len()];
        medium.load(1000, &mut found).unwrap();
        assert!(found == bytes);
    }
}
