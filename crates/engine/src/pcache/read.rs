//! Reads: hits are copied without a lock, gaps are read from the backing device into private
//! memory and offered to the cache. Kernel counterpart: `cache_req.c`.
//!
//! A hit is safe against reuse of its segment because the generation is checked before and after
//! the copy. A fill is safe against writes that overtake it because the gap is registered, under
//! the stripe's lock, before the backing device is asked: a write cancels what it overlaps.

use crate::bio::{Bio, Op};
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;
use crate::sync::lock;
use crate::target::Port;

use super::background::Work;
use super::index::{Piece, Place};
use super::keylog::{LogReader, after};
use super::layout::{KEY_CLEAN, KEYS_MAX, Key, REGION_BYTES, Record};
use super::stripes::Close;
use super::write::Sums;
use super::{Pcache, TOKEN_MISS};

/// A read that waits for the backing device.
#[derive(Debug)]
pub(super) struct Miss {
    bio: Bio,
    outstanding: u32,
    status: Result<(), Status>,
}

/// Reads in flight, by the number in their token.
#[derive(Debug, Default)]
pub(super) struct Misses {
    slots: Vec<Option<Miss>>,
    free: Vec<u32>,
}

/// A range that is being read from the backing device to be cached.
#[derive(Clone, Copy, Debug)]
struct Fill {
    offset: u64,
    len: u64,
    miss: u32,
    is_cancelled: bool,
}

/// Those of a stripe.
#[derive(Debug, Default)]
pub(super) struct Fills(Vec<Fill>);

impl Fills {
    /// A write makes whatever is being read from the backing device for its range outdated.
    pub(super) fn cancel(&mut self, at: u64, len: u64) {
        if !self.0.is_empty() && !mutants::is(Mutant::FillNotCancelled) {
            for fill in &mut self.0 {
                fill.is_cancelled |= fill.offset < at + len && at < fill.offset + fill.len;
            }
        }
    }
}

impl Pcache {
    /// Serves what the cache has at once; asks the backing device for the rest.
    pub(super) fn read(&self, mut bio: Bio, port: &mut Port) {
        let mut gaps = Vec::new();
        let (mut at, end) = (bio.offset, bio.end());
        while at < end {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            let from = (at - bio.offset) as usize;
            let into = &mut bio.buffer.as_mut_slice()[from..from + piece.len as usize];
            let read = match piece.place {
                Some(place) => self.read_hit(&piece, place, into),
                None => Ok(false),
            };
            match read {
                Ok(true) => self.index.note_use(piece.offset, piece.len),
                Ok(false) if piece.place.is_some() => continue,
                Ok(false) => gaps.push((piece.offset, piece.len)),
                Err(status) => return port.finish(bio, Err(status)),
            }
            at += piece.len;
        }
        if gaps.is_empty() {
            self.counters.read_hits.raise(port.id);
            return port.finish(bio, Ok(()));
        }
        self.counters.read_misses.fetch_add(1, Ordering::Relaxed);
        self.read_gaps(bio, &gaps, port);
    }

    /// Whether a place's segment still has its generation.
    pub(super) fn is_live(&self, place: Place) -> bool {
        place.is_of(self.segments.generation(place.segment))
    }

    /// Copies a piece out of the cache. `Ok(false)`: the segment was reused meanwhile, or clean
    /// damaged data was dropped; look again.
    fn read_hit(&self, piece: &Piece, place: Place, into: &mut [u8]) -> Result<bool, Status> {
        let result = self.segments.load(place.segment, place.offset, into);
        let verified = match (&self.crcs, result) {
            (Some(crcs), Ok(())) => crcs.verify(&self.segments, place, into),
            (_, result) => result,
        };
        if !self.segments.is_still(place) && !mutants::is(Mutant::HitNotRechecked) {
            return Ok(false);
        }
        match verified {
            Ok(()) => Ok(true),
            Err(status) => self.drop_if_clean(piece, place).then_some(false).ok_or(status),
        }
    }

    /// Damaged or unreadable cached data: when the backing device has the same, forget the
    /// cached copy. Says whether that was so.
    fn drop_if_clean(&self, piece: &Piece, place: Place) -> bool {
        self.counters.damaged_reads.fetch_add(1, Ordering::Relaxed);
        // While it is held, dirty_tail stays where it is and no segment of the log is reused.
        let mut work = self.background.lock();
        let stripe = self.stripes.of(piece.offset);
        let _guard = self.stripes.lock(stripe);
        let now = self.index.lookup(piece.offset, piece.offset + piece.len, |p| self.is_live(p));
        if now.place != Some(place) {
            return true;
        }
        if self.is_dirty(&work, stripe, piece.offset, now.len) {
            return false;
        }
        self.index.set(piece.offset, now.len, None);
        if let Some(replay) = &mut work.replay {
            replay.note_dropped(piece.offset, now.len);
        }
        true
    }

    /// Whether a key at or behind dirty_tail, or in the open set of the (locked) stripe, covers
    /// any of the range and is not CLEAN. A walk along the log: for damaged data only. In doubt,
    /// yes. Whoever holds the background keeps the log from being reused under the walk.
    fn is_dirty(&self, _: &Work, stripe: usize, at: u64, len: u64) -> bool {
        let is_hit = |key: &Key| {
            let (off, key_len) = (key.off.get(), u64::from(key.len.get()));
            key.flags.get() & KEY_CLEAN == 0 && off < at + len && at < off + key_len
        };
        let mut open = Vec::new();
        self.stripes.open().collect(stripe, &mut open);
        if open.iter().any(is_hit) {
            return true;
        }
        let head = self.log.head();
        let mut position = self.log.dirty_tail();
        let mut reader = LogReader::default();
        while position != head {
            match reader.read(&self.media, &self.segments, position, Some(head)) {
                Ok(Some(record)) => {
                    if let Record::Keys(keys) = &record
                        && keys.iter().any(is_hit)
                    {
                        return true;
                    }
                    position = after(position, &record);
                }
                _ => return true,
            }
        }
        false
    }

    fn read_gaps(&self, bio: Bio, gaps: &[(u64, u64)], port: &mut Port) {
        if gaps.iter().any(|&(at, len)| self.bad.overlaps(at, len)) {
            return port.finish(bio, Err(Status::Corrupt));
        }
        // Pieces within a region: a fill belongs to one stripe.
        let mut pieces = Vec::with_capacity(gaps.len());
        for &(mut at, len) in gaps {
            let end = at + len;
            while at < end {
                let len = (end - at).min(REGION_BYTES - at % REGION_BYTES);
                pieces.push((at, len));
                at += len;
            }
        }
        let miss = Miss { bio, outstanding: pieces.len() as u32, status: Ok(()) };
        let id = lock(&self.misses).add(miss);
        let fills = self.fills_reads();
        for (offset, len) in pieces {
            if fills {
                self.register_fill(offset, len, id);
            }
            let (buffer, token) = (port.pool.take(len as usize), TOKEN_MISS | u64::from(id));
            port.ios.push_back(DiskIo::new(&self.backing, Op::Read, offset, buffer, token));
        }
    }

    /// Whether what is read from the backing device is offered to the cache.
    fn fills_reads(&self) -> bool {
        self.args.fills_reads && !self.is_replaying()
    }

    /// Registers a gap that is about to be read, if it still is one: since it was seen, a write
    /// may have come and even been evicted again, but from here on none goes unnoticed.
    fn register_fill(&self, offset: u64, len: u64, miss: u32) {
        let mut stripe = self.stripes.lock(self.stripes.of(offset));
        let now = self.index.lookup(offset, offset + len, |place| self.is_live(place));
        let is_gap = now.place.is_none() && now.len == len;
        if is_gap || mutants::is(Mutant::GapNotRechecked) {
            stripe.0.push(Fill { offset, len, miss, is_cancelled: false });
        }
    }

    /// A read from the backing device is back.
    pub(super) fn complete_miss(&self, mut io: DiskIo, port: &mut Port) {
        let id = io.token as u32;
        if io.result.is_ok() && self.fills_reads() {
            self.fill(&io, id, port);
        } else {
            self.take_fill(io.offset, io.len, id);
        }
        let mut misses = lock(&self.misses);
        let miss = misses.slots[id as usize].as_mut().expect("an I/O in flight has its miss");
        match io.result {
            Ok(()) => {
                if mutants::is(Mutant::LastMissCounts) {
                    miss.status = Ok(());
                }
                let from = (io.offset - miss.bio.offset) as usize;
                let into = &mut miss.bio.buffer.as_mut_slice()[from..from + io.len as usize];
                into.copy_from_slice(io.buffer.as_slice());
            }
            Err(status) => miss.status = Err(status),
        }
        miss.outstanding -= 1;
        let done = if miss.outstanding == 0 { misses.remove(id) } else { None };
        drop(misses);
        port.pool.put(std::mem::replace(&mut io.buffer, crate::buffer::Buffer::empty()));
        if let Some(miss) = done {
            port.finish(miss.bio, miss.status);
        }
    }

    /// Caches what was read, unless it was overtaken.
    fn fill(&self, io: &DiskIo, miss: u32, port: &Port) {
        let reserve = self.fill_reserve();
        let mut done = 0;
        while done < io.len && self.log.has_room() {
            let at = io.offset + done;
            let len = self.piece_len(at, io.len - done);
            let Some(space) =
                self.segments.take(port.id, len as u32, reserve, self.admitted_to(at))
            else {
                break;
            };
            let data = &io.buffer.as_slice()[done as usize..(done + u64::from(space.len)) as usize];
            self.media.store(self.segments.data_at(space.segment, space.offset), data);
            let sums = self.sums_of(data);
            let is_stored = self.media.pmem.drain().is_ok();
            if !is_stored || !self.commit_fill(io, at, space, sums, miss) {
                self.segments.release(space.segment);
                break;
            }
            self.counters.filled_bytes.fetch_add(u64::from(space.len), Ordering::Relaxed);
            done += u64::from(space.len);
        }
        self.take_fill(io.offset, io.len, miss);
        self.look_at_space();
    }

    /// The key of a piece of a fill. `false`: the fill was overtaken, or there is no room.
    fn commit_fill(
        &self,
        io: &DiskIo,
        at: u64,
        space: super::segment::Space,
        sums: Sums,
        miss: u32,
    ) -> bool {
        let stripe = self.stripes.of(at);
        let fills = self.stripes.lock(stripe);
        let is_wanted = fills.0.iter().any(|fill| {
            fill.miss == miss
                && fill.offset == io.offset
                && fill.len == io.len
                && !fill.is_cancelled
        });
        if !is_wanted
            || self.make_set_room(stripe).is_err()
            || self.stripes.open().len(stripe) == KEYS_MAX
        {
            return false;
        }
        self.push_clean(stripe, at, space, sums);
        // The key is in the set; whether the set could be logged is the next append's concern.
        let _ = self.close_after_push(stripe, Close::No);
        drop(fills);
        self.signals.arm();
        true
    }

    fn take_fill(&self, offset: u64, len: u64, miss: u32) {
        let mut stripe = self.stripes.lock(self.stripes.of(offset));
        stripe.0.retain(|fill| !(fill.miss == miss && fill.offset == offset && fill.len == len));
    }
}

impl Misses {
    fn add(&mut self, miss: Miss) -> u32 {
        match self.free.pop() {
            Some(id) => {
                self.slots[id as usize] = Some(miss);
                id
            }
            None => {
                self.slots.push(Some(miss));
                (self.slots.len() - 1) as u32
            }
        }
    }

    fn remove(&mut self, id: u32) -> Option<Miss> {
        self.free.push(id);
        self.slots[id as usize].take()
    }
}
