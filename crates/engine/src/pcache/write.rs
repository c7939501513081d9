//! Writes and flushes. Kernel counterpart: `cache_req.c`.
//!
//! The promises rest on the order within a write: space is taken, the data is stored and has left
//! the CPU, then under the stripe's lock the index and the open key set change together. Log space
//! is checked before the index is touched, so a write never fails halfway.

use crate::bio::Bio;
use crate::crc::pcache_crc;
use crate::error::Status;
use crate::foreign::Source;
use crate::look::look_of;
use crate::mutants::{self, Mutant};
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

impl Pcache {
    /// Stores the bio's data in the cache.
    pub(super) fn write(&self, mut bio: Bio, port: &mut Port) {
        if !self.signals.room().may_take(port.id) {
            return self.wait_for_room(bio, port);
        }
        let mut has_helped = false;
        while bio.progress < bio.len {
            let at = bio.offset + bio.progress;
            let Some(space) = self.take_space(at, bio.len - bio.progress, port.id) else {
                if !std::mem::replace(&mut has_helped, true) && self.collect_piece() {
                    continue;
                }
                return self.wait_for_room(bio, port);
            };
            let from = bio.progress as usize;
            self.stripes.open().touch(self.stripes.of(bio.offset + bio.progress));
            let data = &bio.buffer.as_slice()[from..from + space.len as usize];
            self.media.store(self.segments.data_at(space.segment, space.offset), data);
            let sums = self.sums_of(data);
            if let Err(status) = self.drain_data() {
                self.segments.release(space.segment);
                return port.finish(bio, Err(status));
            }
            match self.commit(at, space, sums, bio.end(), bio.fua) {
                Ok(()) => bio.progress += u64::from(space.len),
                Err(AppendError::NoRoom) => return self.wait_for_room(bio, port),
                Err(AppendError::Medium(status)) => return port.finish(bio, Err(status)),
            }
        }
        self.look_at_space();
        self.signals.room().took(port.id, bio.len);
        port.finish(bio, Ok(()));
    }

    /// Stores what others' memory holds in the cache, if there is room for it now. Others may store
    /// to it meanwhile, so nothing looks at it twice: what is remembered of the data is of the
    /// bytes that were stored. Checksums would take a copy of our own. So then, and without room, a
    /// bio does it, and nothing is done before: of what others have read already and overwritten,
    /// the bio would bring the old data back.
    pub(super) fn store_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
        let has_sums = self.crcs.is_some() && !mutants::is(Mutant::SummedTwice);
        if has_sums || self.log.has_failed() || !self.signals.room().may_take(port) {
            return false;
        }
        let len = from.bytes().len() as u64;
        let (mut at, end) = (offset, offset + len);
        let Some(spaces) = self.take_all(offset, end, port) else { return false };
        let mut left = spaces.iter().flatten();
        while let Some(&space) = left.next() {
            self.stripes.open().touch(self.stripes.of(at));
            let part = from.part((at - offset) as usize, space.len as usize);
            let place = self.segments.data_at(space.segment, space.offset);
            let look = self.media.pmem.store_shared(place, part.bytes());
            // Of a part that was cut off, zeroes were stored that nobody wrote.
            let is_whole = part.is_whole() || mutants::is(Mutant::CutOffKept);
            let is_stored = is_whole && self.drain_data().is_ok();
            if !is_stored {
                self.segments.release(space.segment);
            }
            let sums = Sums { crc: 0, look };
            #[cfg(feature = "mutants")]
            let sums = self.sums_of_second_reading(part, sums);
            if !is_stored || self.commit(at, space, sums, end, fua).is_err() {
                self.release_all(left);
                return false;
            }
            at += u64::from(space.len);
        }
        self.look_at_space();
        self.signals.room().took(port, len);
        true
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
        Sums { crc, look: look_of(data) }
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

    /// What was stored has left the CPU, so a key may name it.
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
