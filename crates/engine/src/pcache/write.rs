//! Writes and flushes. Kernel counterpart: `cache_req.c`.
//!
//! The promises rest on the order within a write: space is taken, the data is stored and has left
//! the CPU, then under the stripe's lock the index and the open key set change together. Log space
//! is checked before the index is touched, so a write never fails halfway.

use crate::base::crc::pcache_crc;
use crate::base::fingerprint::fingerprint_of;
use crate::bio::Bio;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::client_memory::Source;
use crate::sync::atomic::Ordering;
use crate::target::Port;
use crate::units::BLOCK;

use super::Pcache;
use super::index::{Place, Trace};
use super::keylog::AppendError;
use super::layout::REGION_BYTES;
use super::retention::{Class, Seen};
use super::segment::Space;
use super::stripes::{Close, Sums};

#[cfg(feature = "mutants")]
mod wrong;

/// With data CRCs, no key covers more than this many bytes: a read of any part of a key checks all
/// of it.
const CRC_EXTENT_BYTES: u64 = 16 << 10;
/// Most pieces of a write that is stored without a bio: it may cross the borders of a segment and
/// of a region.
const PIECES_MAX: usize = 4;

/// A write: its range, and whether it has to be durable when it completes.
#[derive(Clone, Copy)]
struct Request {
    offset: u64,
    end: u64,
    fua: bool,
}

/// The data of a write: the buffer of a bio, or memory that clients may change meanwhile.
trait Data {
    /// Stores the bytes from `from` on in `space`, as many as that has. The caller drains them.
    fn store(&self, from: usize, space: &Space, cache: &Pcache) -> Result<Sums, Status>;
}

impl Data for [u8] {
    #[inline]
    fn store(&self, from: usize, space: &Space, cache: &Pcache) -> Result<Sums, Status> {
        let data = &self[from..from + space.len as usize];
        cache.media.store(cache.segments.data_at(space.segment, space.offset), data);
        Ok(cache.sums_of(data))
    }
}

impl Data for Source<'_> {
    /// Reads the memory once: clients may change it meanwhile, so the fingerprint is computed from
    /// the bytes that were stored. It stores no checksum, which would need a private copy. Fails
    /// if the memory was cut off, because zeroes were stored in its place.
    #[inline]
    fn store(&self, from: usize, space: &Space, cache: &Pcache) -> Result<Sums, Status> {
        let part = self.part(from, space.len as usize);
        let place = cache.segments.data_at(space.segment, space.offset);
        let look = cache.media.pmem.store_shared(place, part.bytes());
        if !part.is_whole() && !mutants::is(Mutant::CutOffKept) {
            return Err(Status::Io);
        }
        let sums = Sums { crc: 0, look };
        #[cfg(feature = "mutants")]
        let sums = cache.sums_of_second_reading(part, sums);
        Ok(sums)
    }
}

impl Pcache {
    /// Stores the bio's data in the cache. Without free space the bio waits, and continues after
    /// the pieces that it has stored.
    pub(super) fn write(&self, mut bio: Bio, port: &mut Port) {
        if !self.signals.room().may_take(port.id) {
            return self.wait_for_room(bio, port);
        }
        let request = Request { offset: bio.offset, end: bio.end(), fua: bio.fua };
        let mut has_helped = false;
        let take = |at, len| loop {
            if let Some(space) = self.take_space(at, len, port.id) {
                return Some(space);
            }
            if std::mem::replace(&mut has_helped, true) || !self.collect_piece() {
                return None;
            }
        };
        match self.store(request, &mut bio.progress, bio.buffer.as_slice(), take) {
            Ok(()) => {
                self.signals.room().took(port.id, bio.len);
                port.finish(bio, Ok(()));
            }
            Err(AppendError::NoRoom) => self.wait_for_room(bio, port),
            Err(AppendError::Medium(status)) => port.finish(bio, Err(status)),
        }
    }

    /// Stores the data of a write from the memory of a client, if there is free space for all of
    /// it. Returns false otherwise, and with checksums: the caller then submits a bio. Space is
    /// taken before the first byte is stored: a part that is already stored can be read and
    /// overwritten by other clients, and the bio would restore the old data.
    pub(super) fn store_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
        let has_sums = self.crcs.is_some() && !mutants::is(Mutant::SummedTwice);
        if has_sums || self.log.has_failed() || !self.signals.room().may_take(port) {
            return false;
        }
        let len = from.bytes().len() as u64;
        let request = Request { offset, end: offset + len, fua };
        let Some(spaces) = self.take_all(offset, request.end, port) else { return false };
        let mut left = spaces.iter().flatten();
        let stored = self.store(request, &mut 0, &from, |_, _| left.next().copied());
        match stored {
            Ok(()) => self.signals.room().took(port, len),
            Err(_) => self.release_all(left),
        }
        stored.is_ok()
    }

    /// Stores a write piece by piece: each piece is stored, leaves the CPU, and gets its key.
    /// `take` returns space for the next piece, which begins at its first argument and has at most
    /// as many bytes as its second. `progress` counts the bytes that are done, also when it fails.
    #[inline(always)]
    fn store<D: Data + ?Sized>(
        &self,
        request: Request,
        progress: &mut u64,
        data: &D,
        mut take: impl FnMut(u64, u64) -> Option<Space>,
    ) -> Result<(), AppendError> {
        let mut at = request.offset + *progress;
        while at < request.end {
            let Some(space) = take(at, request.end - at) else { return Err(AppendError::NoRoom) };
            self.stripes.open().touch(self.stripes.of(at));
            let stored = data.store((at - request.offset) as usize, &space, self);
            let drained = stored.and_then(|sums| self.drain_data().map(|()| sums));
            let sums = match drained {
                Ok(sums) => sums,
                Err(status) => {
                    self.segments.release(space.segment);
                    return Err(AppendError::Medium(status));
                }
            };
            self.commit(at, space, sums, request.end, request.fua)?;
            at += u64::from(space.len);
            *progress = at - request.offset;
        }
        self.look_at_space();
        Ok(())
    }

    /// Space for all pieces of a write, or for none.
    fn take_all(&self, offset: u64, end: u64, port: usize) -> Option<[Option<Space>; PIECES_MAX]> {
        let mut spaces = [None; PIECES_MAX];
        let mut at = offset;
        for place in &mut spaces {
            let Some(space) = self.take_space(at, end - at, port) else { break };
            *place = Some(space);
            at += u64::from(space.len);
            if at == end {
                return Some(spaces);
            }
        }
        self.release_all(spaces.iter().flatten());
        None
    }

    fn release_all<'a>(&self, spaces: impl Iterator<Item = &'a Space>) {
        spaces.for_each(|space| self.segments.release(space.segment));
    }

    pub(super) fn sums_of(&self, data: &[u8]) -> Sums {
        let crc = if self.crcs.is_some() { pcache_crc(data) } else { 0 };
        Sums { crc, look: fingerprint_of(data) }
    }

    /// The kind of segment for data of the block at `at`.
    pub(super) fn admitted_to(&self, at: u64) -> Class {
        if !self.collector.has_retained() {
            // The slot is not needed yet, but will be changed soon.
            self.index.touch(at);
            return Class::Window;
        }
        let seen = match self.index.trace(at) {
            Trace::None => Seen::Never,
            Trace::Place(place) => Seen::Cached(self.segments.class(place.segment)),
            Trace::Ghost(time) => {
                let now = self.counters.dropped_bytes.load(Ordering::Relaxed) / BLOCK;
                Seen::Dropped(now.saturating_sub(time))
            }
        };
        self.collector.retention().admit(seen)
    }

    /// The stored data has left the CPU, so a key may name it.
    fn drain_data(&self) -> Result<(), Status> {
        match mutants::is(Mutant::KeyBeforeData) {
            true => Ok(()),
            false => self.media.pmem.drain(),
        }
    }

    /// Space for the next piece of a write: of no more than `len` bytes at `at`, and never across a
    /// region's border.
    fn take_space(&self, at: u64, len: u64, port: usize) -> Option<Space> {
        if !self.log.has_room() {
            return None;
        }
        let len = self.piece_len(at, len);
        let reserve = self.collector.write_reserve();
        self.segments.take(port, len as u32, reserve, self.admitted_to(at))
    }

    /// How much of `len` bytes at `at` one key may cover.
    pub(super) fn piece_len(&self, at: u64, len: u64) -> u64 {
        let len = len.min(REGION_BYTES - at % REGION_BYTES);
        match self.crcs {
            Some(_) => len.min(CRC_EXTENT_BYTES - at % CRC_EXTENT_BYTES),
            None => len,
        }
    }

    /// Makes the piece at `at`, of a request that ends at `end`, point to `space`.
    pub(super) fn commit(
        &self,
        at: u64,
        space: Space,
        sums: Sums,
        end: u64,
        fua: bool,
    ) -> Result<(), AppendError> {
        let piece_end = at + u64::from(space.len);
        let close = match fua && !mutants::is(Mutant::FuaNotClosing) {
            false => Close::No,
            true if piece_end == end => Close::Marked,
            // Pieces of one region share an open set: its last piece closes for all.
            true if piece_end.is_multiple_of(REGION_BYTES)
                && !mutants::is(Mutant::FuaOfLastRegion) =>
            {
                Close::Yes
            }
            true => Close::No,
        };
        self.commit_key(at, space, sums, close)
    }

    /// Under the stripe's lock: index, pending fills, open key set. When it fails before it
    /// changes anything, the space is given back; later, the key has it.
    fn commit_key(
        &self,
        at: u64,
        space: Space,
        sums: Sums,
        close: Close,
    ) -> Result<(), AppendError> {
        #[cfg(feature = "mutants")]
        if wrong::is_wanted() {
            return self.commit_key_wrongly(at, space, sums, close);
        }
        let stripe = self.stripes.of(at);
        let mut fills = self.stripes.lock_soon(stripe);
        if let Err(error) = self.make_set_room(stripe) {
            self.segments.release(space.segment);
            return Err(error);
        }
        let len = u64::from(space.len);
        fills.cancel(at, len);
        self.point(at, space, sums);
        self.push_key(stripe, at, space, sums, 0);
        self.stripes.add_dirty(stripe, len);
        self.close_after_push(stripe, close)?;
        drop(fills);
        self.signals.arm();
        Ok(())
    }

    /// Points the index to `space`. The stripe is locked.
    pub(super) fn point(&self, at: u64, space: Space, sums: Sums) {
        if let Some(crcs) = &self.crcs {
            crcs.insert(space.segment, space.offset, space.len, sums.crc);
        }
        let place = Place::new(space.segment, space.offset, space.generation);
        self.index.set(at, u64::from(space.len), Some(place));
    }

    /// Makes every write that completed before durable.
    pub(super) fn flush(&self, bio: Bio, port: &mut Port) {
        match self.close_all(!mutants::is(Mutant::FlushUnmarked)) {
            Ok(()) => port.finish(bio, Ok(())),
            Err(AppendError::NoRoom) => self.wait_for_room(bio, port),
            Err(AppendError::Medium(status)) => port.finish(bio, Err(status)),
        }
    }
    /// No room now: the bio waits, the background makes room.
    pub(super) fn wait_for_room(&self, bio: Bio, port: &mut Port) {
        if self.log.has_failed() {
            return port.finish(bio, Err(Status::Io));
        }
        self.signals.wait(bio, port);
    }
}
