//! A cache device while it is opened or looked at: memory or a disk, read and written by
//! whoever waits for it. What serves requests later does not come through here.

use zerocopy::{FromZeros, IntoBytes};

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::units::{MIB, SECTOR};

use super::layout::Superblock;

/// Bytes of one read or write of a disk.
const PIECE_BYTES: u64 = MIB;
/// So many pieces are under way together.
const PIECES_MAX: u64 = 16;

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

    /// What the kernel would print in a table.
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
            let what = format_args!("cannot read {len} bytes at {at}: {status}");
            self.error(Kind::Io, what)
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

    /// The superblock at `start`.
    pub fn superblock(&self, start: u64) -> Result<Superblock> {
        let mut superblock = Superblock::new_zeroed();
        self.load(start, superblock.as_mut_bytes())?;
        Ok(superblock)
    }

    /// Stores `bytes`; a disk's other bytes of the sectors they touch stay as they are.
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
                carry_out(disk, vec![io(disk, Op::Flush, 0, Buffer::empty())]).map(drop)
            }
        };
        settled.map_err(|status| self.error(Kind::Io, format_args!("cannot flush: {status}")))
    }
}

fn io(disk: &Arc<dyn Disk>, op: Op, offset: u64, buffer: Buffer) -> DiskIo {
    let len = buffer.len() as u64;
    DiskIo { disk: disk.clone(), op, offset, len, buffer, token: 0, line: 0, result: Ok(()) }
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
        let ios =
            round.iter().map(|(at, len)| io(disk, Op::Read, *at, Buffer::zeroed(*len as usize)));
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
            io(disk, Op::Write, *at, Buffer::from_bytes(&whole[from..from + *len as usize]))
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
