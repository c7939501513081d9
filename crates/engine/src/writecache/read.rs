//! Reads: cached blocks are read from their slots, the rest from the origin. Reads do not admit
//! blocks.
//!
//! No lock or reference is held while a slot is read: a slot's content does not change until the
//! slot is retired, and the reader checks afterwards whether that happened meanwhile. If so, the
//! block is looked up again. A slot that mode `s` overwrites in place keeps its block: a concurrent
//! read finds old or new data, as on any disk.

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::sync::atomic::Ordering;
use crate::target::Port;

use super::counts::add;
use super::index::{Found, State};
use super::media::Medium;
use super::{OWN_SHIFT, TOKEN_READ, Writecache};

/// Own bits of a token: the piece's first block within the bio, and whether its buffer is the
/// bio's own.
const OWN_LENT: u64 = 1 << 23;

/// A read that waits for disks.
#[derive(Debug)]
pub(super) struct ReadJob {
    bio: Bio,
    outstanding: u32,
    status: Result<(), Status>,
    /// The slots being read, by block within the bio.
    hits: Vec<(u32, Found)>,
}

/// Neighbouring blocks of a bio with one source.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// First block within the bio.
    first: u32,
    blocks: u32,
    /// The first slot; `None`: the origin.
    slot: Option<Found>,
}

impl Writecache {
    /// Serves blocks in memory immediately; reads the rest from disks.
    pub(super) fn read(&self, mut bio: Bio, port: &mut Port) {
        let count = self.block_at(bio.len) as u32;
        if count == 1
            && let Medium::Pmem(pmem) = &self.device.medium
            && self.read_one(&**pmem, &mut bio)
        {
            return port.finish(bio, Ok(()));
        }
        let mut job_hits = Vec::new();
        let mut pieces = Vec::new();
        let found = self.find(self.block_at(bio.offset), 0, count, &mut pieces, &mut job_hits);
        if let Err(status) = found {
            return port.finish(bio, Err(status));
        }
        if let Medium::Pmem(pmem) = &self.device.medium {
            match self.load_hits(&**pmem, &mut bio, &mut pieces, &job_hits) {
                Ok(true) => {}
                Ok(false) => return self.read(bio, port),
                Err(status) => return port.finish(bio, Err(status)),
            }
            if pieces.is_empty() {
                return port.finish(bio, Ok(()));
            }
        }
        let outstanding = pieces.len() as u32;
        let is_lent = pieces.len() == 1 && pieces[0].blocks == count;
        let mut lent = is_lent.then(|| std::mem::replace(&mut bio.buffer, Buffer::empty()));
        let offset = bio.offset;
        let job = ReadJob { bio, outstanding, status: Ok(()), hits: job_hits };
        let place = self.jobs.reads.of(port).insert(job);
        for piece in pieces {
            self.ask(offset, piece, lent.take(), place, port);
        }
    }

    /// Reads a single block from memory. Returns `false` if the block is not in memory, or cannot
    /// be read.
    fn read_one(&self, pmem: &dyn Pmem, bio: &mut Bio) -> bool {
        if self.has_failed() {
            return false;
        }
        let block = self.block_at(bio.offset);
        let locked = self.index.lock_of(block);
        let Some(found) = locked.newest(block) else { return false };
        if !found.word.state().is_readable() {
            return false;
        }
        let stats = self.counts.of(&locked);
        add(&stats.reads, 1);
        add(&stats.read_hits, 1);
        drop(locked);
        let at = self.device.slot_at(found.slot);
        let is_loaded = pmem.load(at, bio.buffer.as_mut_slice()).is_ok();
        is_loaded && (self.index.is_still(found) || mutants::is(Mutant::SlotNotRechecked))
    }

    /// Finds the places of `count` blocks, from block `first` of a bio on. `at`: the bio's own
    /// first.
    fn find(
        &self,
        at: u64,
        first: u32,
        count: u32,
        pieces: &mut Vec<Piece>,
        hits: &mut Vec<(u32, Found)>,
    ) -> Result<(), Status> {
        let end = at + u64::from(first + count);
        let mut block = at + u64::from(first);
        while block < end {
            let region_end = self.index.region_end(block).min(end);
            let locked = self.index.lock_of(block);
            let stats = self.counts.of(&locked);
            add(&stats.reads, region_end - block);
            for block in block..region_end {
                let nth = (block - at) as u32;
                let newest = locked.newest(block);
                if newest.is_some_and(|found| found.word.state() == State::Damaged) {
                    return Err(Status::Corrupt);
                }
                let is_doubtful = newest.is_some_and(|found| found.word.state().is_unflushed());
                if is_doubtful && self.has_failed() {
                    // A failed flush may have lost this block.
                    return Err(Status::Io);
                }
                let slot = newest.filter(|found| found.word.state().is_readable());
                if let Some(found) = slot {
                    add(&stats.read_hits, 1);
                    hits.push((nth, found));
                }
                match pieces.last_mut() {
                    Some(piece) if continues(piece, nth, slot) => piece.blocks += 1,
                    _ => pieces.push(Piece { first: nth, blocks: 1, slot }),
                }
            }
            drop(locked);
            block = region_end;
        }
        Ok(())
    }

    /// Copies all hits, which leave `pieces`. `Ok(false)`: a slot was retired meanwhile.
    fn load_hits(
        &self,
        pmem: &dyn Pmem,
        bio: &mut Bio,
        pieces: &mut Vec<Piece>,
        hits: &[(u32, Found)],
    ) -> Result<bool, Status> {
        let block_bytes = self.device.geometry.block_bytes as usize;
        for piece in pieces.iter() {
            let Some(found) = piece.slot else { continue };
            let from = piece.first as usize * block_bytes;
            let into =
                &mut bio.buffer.as_mut_slice()[from..][..piece.blocks as usize * block_bytes];
            let loaded = pmem.load(self.device.slot_at(found.slot), into);
            if let Err(status) = loaded {
                self.counts.failed_requests.fetch_add(1, Ordering::Relaxed);
                return Err(status);
            }
        }
        pieces.retain(|piece| piece.slot.is_none());
        Ok(hits.iter().all(|(_, found)| self.index.is_still(*found)))
    }

    /// Emits the read of a piece.
    fn ask(&self, at: u64, piece: Piece, lent: Option<Buffer>, place: u32, port: &mut Port) {
        let block_bytes = self.block_bytes();
        let len = u64::from(piece.blocks) * block_bytes;
        let mut own = u64::from(piece.first);
        let buffer = match lent {
            Some(buffer) => {
                own |= OWN_LENT;
                buffer
            }
            None => port.pool.take(len as usize),
        };
        let token = TOKEN_READ | own << OWN_SHIFT | u64::from(place);
        let origin_at = at + u64::from(piece.first) * block_bytes;
        let io = match (&self.device.medium, piece.slot) {
            (Medium::Disk(disk), Some(found)) => {
                let at = self.device.slot_at(found.slot);
                DiskIo::new(disk, Op::Read, at, buffer, token)
            }
            _ => self.origin.io(Op::Read, origin_at, len, buffer, token),
        };
        port.ios.push_back(io);
    }

    /// A piece is back.
    pub(super) fn complete_read(&self, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let own = io.token >> OWN_SHIFT & ((1 << 24) - 1);
        let first = (own & !OWN_LENT) as u32;
        let block_bytes = self.block_bytes();
        let blocks = (io.len / block_bytes) as u32;
        let mut jobs = self.jobs.reads.of(port);
        let job = jobs.value(place);
        let mut spare = io.buffer;
        if own & OWN_LENT != 0 {
            std::mem::swap(&mut job.bio.buffer, &mut spare);
        } else {
            let from = first as usize * block_bytes as usize;
            let into = &mut job.bio.buffer.as_mut_slice()[from..from + io.len as usize];
            into.copy_from_slice(spare.as_slice());
        }
        job.outstanding -= 1;
        job.status = match mutants::is(Mutant::LastPieceCounts) {
            true => io.result,
            false => job.status.and(io.result),
        };
        if io.result.is_err() && !crate::sync::Arc::ptr_eq(&io.disk, self.origin.disk()) {
            self.counts.failed_requests.fetch_add(1, Ordering::Relaxed);
            self.events.work();
        }
        let again = self.retired(job, first, blocks);
        let offset = job.bio.offset;
        job.outstanding += again.len() as u32;
        let is_done = job.outstanding == 0;
        let job = is_done.then(|| jobs.remove(place));
        drop(jobs);
        port.pool.put(spare);
        for piece in again {
            self.ask(offset, piece, None, place, port);
        }
        if let Some(job) = job {
            port.finish(job.bio, job.status);
        }
    }

    /// Looks up again the blocks of a piece whose slots were retired while they were read.
    fn retired(&self, job: &mut ReadJob, first: u32, blocks: u32) -> Vec<Piece> {
        let is_meant = |hit: &(u32, Found)| (first..first + blocks).contains(&hit.0);
        let is_still = |found| mutants::is(Mutant::RetiredBelieved) || self.index.is_still(found);
        let is_gone = |hit: &&(u32, Found)| is_meant(hit) && !is_still(hit.1);
        let gone: Vec<u32> = job.hits.iter().filter(is_gone).map(|hit| hit.0).collect();
        job.hits.retain(|hit| !is_meant(hit));
        let mut pieces = Vec::new();
        if job.status.is_ok() {
            let at = self.block_at(job.bio.offset);
            for nth in gone {
                if let Err(status) = self.find(at, nth, 1, &mut pieces, &mut job.hits) {
                    job.status = Err(status);
                }
            }
        }
        pieces
    }
}

/// Whether block `nth` with its source is the next of `piece`.
fn continues(piece: &Piece, nth: u32, slot: Option<Found>) -> bool {
    nth == piece.first + piece.blocks
        && match (piece.slot, slot) {
            (None, None) => true,
            (Some(first), Some(next)) => next.slot == first.slot + piece.blocks,
            _ => false,
        }
}
