//! Reads: hits are copied without a lock, gaps are read from the backing device into private memory
//! and offered to the cache. Kernel counterpart: `cache_req.c`.
//!
//! A hit is safe against reuse of its segment because the generation is checked before and after
//! the copy. A fill is safe against concurrent writes because the gap is registered, under the
//! stripe's lock, before the read from the backing device: a write cancels the fills that it
//! overlaps.
//!
//! A miss takes no lock that all threads share: it is kept in the table of its port, and its stripe
//! is locked twice, if the data is to be cached.

use crate::bio::{Bio, Op};
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::copy_target::CopyTarget;
use crate::sync::atomic::Ordering;
use crate::target::Port;

use super::background::Work;
use super::fills::Gap;
use super::index::{Piece, Place};
use super::keylog::{LogReader, after};
use super::layout::{KEY_CLEAN, KEYS_MAX, Key, REGION_BYTES, Record};
use super::segment::Space;
use super::stripes::{Close, Sums};
use super::{Pcache, TOKEN_FILL, TOKEN_MISS};

/// A read that waits for the backing device.
#[derive(Debug)]
pub(super) struct Miss {
    bio: Bio,
    outstanding: u32,
    status: Result<(), Status>,
}

/// The destination of a read: the buffer of a bio, or memory that clients use at the same time.
trait Destination {
    /// Why the read cannot continue.
    type Stop;

    /// Copies a piece that the cache has to the bytes from `from` on. `Ok(false)`: look up again.
    fn load(
        &mut self,
        from: usize,
        piece: &Piece,
        place: Place,
        cache: &Pcache,
    ) -> Result<bool, Self::Stop>;

    /// The cache does not have this piece.
    fn miss(&mut self, piece: &Piece) -> Result<(), Self::Stop>;
}

/// The buffer of a bio. Pieces that the cache does not have are noted.
struct Private<'a> {
    bytes: &'a mut [u8],
    gaps: &'a mut Vec<(u64, u64)>,
}

impl Destination for Private<'_> {
    type Stop = Status;

    #[inline(always)]
    fn load(
        &mut self,
        from: usize,
        piece: &Piece,
        place: Place,
        cache: &Pcache,
    ) -> Result<bool, Status> {
        cache.read_hit(piece, place, &mut self.bytes[from..from + piece.len as usize])
    }

    fn miss(&mut self, piece: &Piece) -> Result<(), Status> {
        push_gap(self.gaps, piece.offset, piece.len);
        Ok(())
    }
}

/// A read that cannot be served in place, so that a bio has to do it.
struct NotInPlace;

impl Destination for CopyTarget<'_> {
    type Stop = NotInPlace;

    /// Stops if the data cannot be read or its segment was reused, and if the copies would take
    /// several system calls, which cost more than a bio.
    #[inline(always)]
    fn load(
        &mut self,
        from: usize,
        piece: &Piece,
        place: Place,
        cache: &Pcache,
    ) -> Result<bool, NotInPlace> {
        if self.is_by_call() && piece.len < self.len() as u64 {
            return Err(NotInPlace);
        }
        let into = self.part(from, piece.len as usize);
        let read = cache.segments.load_shared(place.segment, place.offset, into);
        let is_read = read.is_ok() || mutants::is(Mutant::RefusalIgnored);
        let is_still = cache.segments.is_still(place) || mutants::is(Mutant::HitNotRechecked);
        if is_read && is_still { Ok(true) } else { Err(NotInPlace) }
    }

    fn miss(&mut self, _: &Piece) -> Result<(), NotInPlace> {
        Err(NotInPlace)
    }
}

impl Pcache {
    /// Serves cached data immediately; reads the rest from the backing device.
    pub(super) fn read(&self, mut bio: Bio, port: &mut Port) {
        let (offset, end) = (bio.offset, bio.end());
        let mut gaps = Vec::new();
        let mut into = Private { bytes: bio.buffer.as_mut_slice(), gaps: &mut gaps };
        if let Err(status) = self.read_into(offset, end, &mut into) {
            return port.finish(bio, Err(status));
        }
        if gaps.is_empty() {
            self.counters.read_hits.raise(port.id);
            return port.finish(bio, Ok(()));
        }
        self.counters.read_misses.raise(port.id);
        self.read_gaps(bio, &gaps, port);
    }

    /// Copies a range to memory that clients use at the same time. Returns false if the cache does
    /// not have all of it, and with checksums: those must be verified in private memory.
    pub(super) fn read_hits_into(&self, offset: u64, into: CopyTarget<'_>, port: usize) -> bool {
        if self.crcs.is_some() {
            return false;
        }
        let end = offset + into.len() as u64;
        let is_read = self.read_into(offset, end, &mut { into }).is_ok();
        if is_read {
            self.counters.read_hits.raise(port);
        }
        is_read
    }

    /// Copies the pieces of a range that the cache has.
    #[inline(always)]
    fn read_into<D: Destination>(
        &self,
        offset: u64,
        end: u64,
        into: &mut D,
    ) -> Result<(), D::Stop> {
        let mut at = offset;
        while at < end {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            match piece.place {
                None => into.miss(&piece)?,
                Some(place) if into.load((at - offset) as usize, &piece, place, self)? => {
                    self.index.note_use(piece.offset, piece.len);
                }
                Some(_) => continue,
            }
            at += piece.len;
        }
        Ok(())
    }

    /// Whether a place's segment still has its generation.
    pub(super) fn is_live(&self, place: Place) -> bool {
        place.is_of(self.segments.generation(place.segment))
    }

    /// Copies a piece out of the cache. `Ok(false)`: the segment was reused meanwhile, or clean
    /// damaged data was dropped; look up again.
    #[inline]
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

    /// Damaged or unreadable cached data: if the backing device has the same data, the cached copy
    /// is dropped. Returns whether that was so.
    fn drop_if_clean(&self, piece: &Piece, place: Place) -> bool {
        self.counters.damaged_reads.fetch_add(1, Ordering::Relaxed);
        // While it is held, dirty_tail does not move and no segment of the log is reused.
        let mut work = self.background.lock();
        let stripe = self.stripes.of(piece.offset);
        let _guard = self.stripes.lock(stripe);
        // A neighbour in another region belongs to another stripe; its own lookup finds it.
        let region_end = (piece.offset / REGION_BYTES + 1) * REGION_BYTES;
        let end = region_end.min(piece.offset + piece.len);
        let now = self.index.lookup(piece.offset, end, |place| self.is_live(place));
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

    /// Whether a key at or after dirty_tail, or in the open set of the (locked) stripe, covers any
    /// of the range and is not CLEAN. Walks the log: for damaged data only. If in doubt, yes. The
    /// caller holds the background, so the log is not reused under the walk.
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

    /// Asks the backing device for the gaps of a bio.
    fn read_gaps(&self, bio: Bio, gaps: &[(u64, u64)], port: &mut Port) {
        if gaps.iter().any(|&(at, len)| self.bad.overlaps(at, len)) {
            return port.finish(bio, Err(Status::Corrupt));
        }
        let miss = Miss { bio, outstanding: gaps.len() as u32, status: Ok(()) };
        let place = self.misses.of(port).insert(miss);
        let fills = self.args.fills_reads && !self.is_replaying();
        for &(offset, len) in gaps {
            let gap = Gap { offset, len, port: port.id, place };
            let mut token = TOKEN_MISS | u64::from(place);
            if fills && self.register_fill(gap) {
                token |= TOKEN_FILL;
            }
            let buffer = port.pool.take(len as usize);
            port.ios.push_back(DiskIo::new(&self.backing, Op::Read, offset, buffer, token));
        }
    }

    /// Registers a gap that is about to be read, if it still is one. Since the lookup a write may
    /// have been cached and even evicted again; from here on every write is noticed.
    fn register_fill(&self, gap: Gap) -> bool {
        let mut fills = self.stripes.lock(self.stripes.of(gap.offset));
        let end = gap.offset + gap.len;
        let now = self.index.lookup(gap.offset, end, |place| self.is_live(place));
        let is_gap = now.place.is_none() && now.len == gap.len;
        let is_filled = is_gap || mutants::is(Mutant::GapNotRechecked);
        if is_filled {
            fills.add(gap);
        }
        is_filled
    }

    /// A read from the backing device is back.
    pub(super) fn complete_miss(&self, mut io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        if io.token & TOKEN_FILL != 0 {
            let gap = Gap { offset: io.offset, len: io.len, port: port.id, place };
            match io.result {
                Ok(()) => self.fill(gap, io.buffer.as_slice(), port),
                Err(_) => self.end_fill(gap),
            }
        }
        let mut misses = self.misses.of(port);
        let miss = misses.value(place);
        match io.result {
            Ok(()) => {
                self.background.served.note(self.signals.events());
                if mutants::is(Mutant::LastMissCounts) {
                    miss.status = Ok(());
                }
                miss.take(&mut io);
            }
            Err(status) => miss.status = Err(status),
        }
        miss.outstanding -= 1;
        let done = (miss.outstanding == 0).then(|| misses.remove(place));
        drop(misses);
        port.pool.put(io.buffer);
        if let Some(miss) = done {
            port.finish(miss.bio, miss.status);
        }
    }

    /// Caches what was read, unless it was overtaken.
    fn fill(&self, gap: Gap, data: &[u8], port: &Port) {
        let reserve = self.fill_reserve();
        let mut done = 0;
        while done < gap.len && self.log.has_room() {
            let at = gap.offset + done;
            let len = self.piece_len(at, gap.len - done);
            let class = self.admitted_to(at);
            let Some(space) = self.segments.take(port.id, len as u32, reserve, class) else {
                break;
            };
            let data = &data[done as usize..][..space.len as usize];
            self.media.store(self.segments.data_at(space.segment, space.offset), data);
            let sums = self.sums_of(data);
            let is_stored = self.media.pmem.drain().is_ok();
            if !is_stored || !self.commit_fill(gap, at, space, sums) {
                self.segments.release(space.segment);
                break;
            }
            self.counters.filled_bytes.add(port.id, u64::from(space.len));
            done += u64::from(space.len);
        }
        if done < gap.len {
            self.end_fill(gap);
        }
        self.look_at_space();
    }

    /// Commits the key of a piece of a fill. The last one ends the fill. Returns false if a write
    /// cancelled the fill, or all space is used.
    fn commit_fill(&self, gap: Gap, at: u64, space: Space, sums: Sums) -> bool {
        let stripe = self.stripes.of(at);
        let mut fills = self.stripes.lock(stripe);
        if !fills.is_wanted(gap)
            || self.make_set_room(stripe).is_err()
            || self.stripes.open().len(stripe) == KEYS_MAX
        {
            return false;
        }
        self.push_clean(stripe, at, space, sums);
        // The key is in the set; if the set could not be logged, the next append handles that.
        let _ = self.close_after_push(stripe, Close::No);
        if at + u64::from(space.len) == gap.offset + gap.len {
            fills.remove(gap);
        }
        drop(fills);
        self.signals.arm();
        true
    }

    fn end_fill(&self, gap: Gap) {
        self.stripes.lock(self.stripes.of(gap.offset)).remove(gap);
    }
}

/// Adds a gap in pieces within a region, because a fill belongs to one stripe.
fn push_gap(gaps: &mut Vec<(u64, u64)>, mut at: u64, len: u64) {
    let end = at + len;
    while at < end {
        let len = (end - at).min(REGION_BYTES - at % REGION_BYTES);
        gaps.push((at, len));
        at += len;
    }
}

impl Miss {
    /// Takes the data that an I/O has read. The cache has its copy by now, so if this is the whole
    /// request, the bio gets the memory itself.
    fn take(&mut self, io: &mut DiskIo) {
        if io.offset == self.bio.offset && io.len == self.bio.len {
            return std::mem::swap(&mut self.bio.buffer, &mut io.buffer);
        }
        let from = (io.offset - self.bio.offset) as usize;
        let into = &mut self.bio.buffer.as_mut_slice()[from..from + io.len as usize];
        into.copy_from_slice(io.buffer.as_slice());
    }
}
