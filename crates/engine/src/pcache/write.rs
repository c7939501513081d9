//! Writes, discards, zeroes and flushes. Kernel counterpart: `cache_req.c`.
//!
//! The order within a write is what the promises rest on: space is taken, the data is stored and
//! has left the CPU, then under the stripe's lock the index and the open key set change together.
//! Log space is made sure of before the index is touched, so a write never fails halfway.

use std::collections::VecDeque;

use zerocopy::FromZeros;

use crate::bio::{Bio, Op};
use crate::crc::pcache_crc;
use crate::error::Status;
use crate::look::{look_of, mix_look};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;
use crate::sync::{lock, lock_soon};
use crate::target::{Extent, Port};
use crate::units::{BLOCK, MIB};

use super::index::{Place, Trace};
use super::keylog::AppendError;
use super::layout::{KEY_CLEAN, KEYS_MAX, Key, REGION_BYTES};
use super::retention::{Class, Seen};
use super::segment::Space;
use super::{Pcache, StripeState};

/// With data CRCs, no key covers more than so many bytes: a read of any part of a key checks all
/// of it.
const CRC_EXTENT_BYTES: u64 = 16 << 10;
/// Zeroes are kept once and named by many keys; this is the longest run one key can name.
const ZERO_EXTENT_BYTES: u64 = MIB;
/// A zero extent is replaced after so many keys, so that it does not pin an old segment.
const ZERO_EXTENT_KEYS_MAX: u32 = 4096;

/// The zero extents of this server that were made last: what their places name reads as zeroes,
/// until their segments are reused.
#[derive(Debug, Default)]
pub(super) struct KnownZeroes {
    spaces: VecDeque<Space>,
}

/// So many zero extents are remembered; each has served up to [`ZERO_EXTENT_KEYS_MAX`] keys.
pub(super) const KNOWN_ZEROES_MAX: usize = 64;

impl KnownZeroes {
    fn remember(&mut self, space: Space) {
        if self.spaces.len() == KNOWN_ZEROES_MAX {
            self.spaces.pop_front();
        }
        self.spaces.push_back(space);
    }

    /// What the first of `len` bytes at a live place surely are, and how far that goes: a run may
    /// lead from data into zeroes behind it, or out of them.
    fn extent(&self, place: Place, len: u64) -> (u64, Extent) {
        let from = u64::from(place.offset);
        let of_segment =
            |space: &&Space| place.segment == space.segment && place.is_of(space.generation);
        let mut until = from + len;
        for space in self.spaces.iter().filter(of_segment) {
            let start = u64::from(space.offset);
            let end = start + u64::from(space.len);
            if start <= from && from < end {
                return (len.min(end - from), Extent::Zeroes);
            }
            if from < start {
                until = until.min(start);
            }
        }
        (until - from, Extent::Data)
    }
}

/// Most pieces that are looked at for one extent.
const EXTENT_PIECES_MAX: usize = 32;

/// What is remembered of data with its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// Its CRC, with `data_crc`.
    pub(super) crc: u32,
    /// What it looks like, for whoever finds the key in memory.
    pub(super) look: u32,
}

/// How an append to an open key set ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// The set stays open, unless it is full.
    No,
    /// The set is logged.
    Yes,
    /// The set is logged with a flush mark behind it.
    Marked,
}

/// Zeroes on the cache device that keys may name. Holds a reference to its segment.
#[derive(Debug)]
pub(super) struct ZeroExtent {
    space: Space,
    keys: u32,
}

#[cfg(all(test, feature = "shuttle"))]
impl ZeroExtent {
    pub(super) fn segment(&self) -> u32 {
        self.space.segment
    }
}

impl Pcache {
    /// Stores the bio's data in the cache.
    pub(super) fn write(&self, mut bio: Bio, port: &mut Port) {
        if !self.room.may_take(port.id) {
            return self.wait_for_room(bio, port);
        }
        let mut has_helped = false;
        while bio.progress < bio.len {
            let Some(space) = self.take_space(&bio, port) else {
                if !std::mem::replace(&mut has_helped, true) && self.collect_piece() {
                    continue;
                }
                return self.wait_for_room(bio, port);
            };
            let from = bio.progress as usize;
            self.open.touch(self.stripe_of(bio.offset + bio.progress));
            let data = &bio.buffer.as_slice()[from..from + space.len as usize];
            self.media.store(self.segments.data_at(space.segment, space.offset), data);
            let sums = self.sums_of(data);
            let drained = match mutants::is(Mutant::KeyBeforeData) {
                true => Ok(()),
                false => self.media.pmem.drain(),
            };
            if let Err(status) = drained {
                self.segments.release(space.segment);
                return port.finish(bio, Err(status));
            }
            match self.commit(&bio, space, sums) {
                Ok(()) => bio.progress += u64::from(space.len),
                Err(AppendError::NoRoom) => return self.wait_for_room(bio, port),
                Err(AppendError::Medium(status)) => return port.finish(bio, Err(status)),
            }
        }
        self.look_at_space();
        self.room.took(port.id, bio.len);
        port.finish(bio, Ok(()));
    }

    pub(super) fn sums_of(&self, data: &[u8]) -> Sums {
        let crc = if self.crcs.is_some() { pcache_crc(data) } else { 0 };
        Sums { crc, look: look_of(data) }
    }

    /// The kind of segment for data of the block at `at`.
    pub(super) fn admitted_to(&self, at: u64) -> Class {
        if !self.has_retained.load(Ordering::Relaxed) {
            // Nobody waits for the slot now; it will be changed soon.
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
        self.retention.admit(seen)
    }

    /// Space for the next piece of a write: never across a region's border.
    fn take_space(&self, bio: &Bio, port: &Port) -> Option<Space> {
        if !self.log.has_room() {
            return None;
        }
        let at = bio.offset + bio.progress;
        let len = self.piece_len(at, bio.len - bio.progress);
        self.segments.take(port.id, len as u32, self.write_reserve, self.admitted_to(at))
    }

    /// How much of `len` bytes at `at` one key may cover.
    pub(super) fn piece_len(&self, at: u64, len: u64) -> u64 {
        let len = len.min(REGION_BYTES - at % REGION_BYTES);
        match self.crcs {
            Some(_) => len.min(CRC_EXTENT_BYTES - at % CRC_EXTENT_BYTES),
            None => len,
        }
    }

    /// Makes the piece that starts at the bio's progress point to `space`.
    fn commit(&self, bio: &Bio, space: Space, sums: Sums) -> Result<(), AppendError> {
        let at = bio.offset + bio.progress;
        let piece_end = bio.progress + u64::from(space.len);
        let close = match bio.fua && !mutants::is(Mutant::FuaNotClosing) {
            false => Close::No,
            true if piece_end == bio.len => Close::Marked,
            // Pieces of one region share an open set: its last piece closes for all.
            true if (at + u64::from(space.len)).is_multiple_of(REGION_BYTES)
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
        let stripe = self.stripe_of(at);
        if mutants::is(Mutant::IndexBeforeLock) {
            self.point(at, space, sums);
        }
        let mut state = lock_soon(&self.stripes[stripe].state);
        if let Err(error) = self.make_set_room(stripe) {
            self.segments.release(space.segment);
            return Err(error);
        }
        let len = u64::from(space.len);
        state.cancel_fills(at, len);
        if !mutants::is(Mutant::IndexBeforeLock) {
            self.point(at, space, sums);
        }
        let state = (!mutants::is(Mutant::KeyAfterUnlock)).then_some(state);
        self.push_key(stripe, at, space, sums, 0);
        let state = state.filter(|_| !mutants::is(Mutant::DirtyCountedLate));
        self.stripes[stripe].add_dirty(len);
        self.close_after_push(stripe, close)?;
        drop(state);
        self.arm();
        Ok(())
    }

    /// A full set is one whose logging failed before for lack of room: try again, before
    /// anything else changes.
    pub(super) fn make_set_room(&self, stripe: usize) -> Result<(), AppendError> {
        match self.open.len(stripe) {
            KEYS_MAX => self.close_set(stripe, false),
            _ => Ok(()),
        }
    }

    /// Points the index to `space`. The stripe is locked.
    fn point(&self, at: u64, space: Space, sums: Sums) {
        if let Some(crcs) = &self.crcs {
            crcs.insert(space.segment, space.offset, space.len, sums.crc);
        }
        let place = Place::new(space.segment, space.offset, space.generation);
        self.index.set(at, u64::from(space.len), Some(place));
    }

    /// The set has room, its stripe is locked.
    fn push_key(&self, stripe: usize, at: u64, space: Space, sums: Sums, flags: u32) {
        let mut key = Key::new_zeroed();
        key.off.set(at);
        key.len.set(space.len);
        key.flags.set(flags);
        key.segment.set(space.segment);
        key.segment_off.set(space.offset);
        key.generation.set(space.generation);
        key.data_crc.set(sums.crc);
        self.open.push(stripe, &key, sums.look);
    }

    /// Logs the set if it is full or `close` says so. A full set that finds no room stays open:
    /// its keys are in no more danger than those of any open set.
    pub(super) fn close_after_push(&self, stripe: usize, close: Close) -> Result<(), AppendError> {
        if close == Close::No {
            if self.open.len(stripe) == KEYS_MAX {
                match self.close_set(stripe, false) {
                    Err(AppendError::NoRoom) | Ok(()) => {}
                    failed => return failed,
                }
            }
            return Ok(());
        }
        self.close_set(stripe, close == Close::Marked)
    }

    /// Logs one open set, durably. Its stripe is locked.
    fn close_set(&self, stripe: usize, mark: bool) -> Result<(), AppendError> {
        if mutants::is(Mutant::ServedSaidLate) {
            self.say_served();
        }
        if self.open.len(stripe) == 1 {
            // A FUA write, mostly: nothing that other stripes use is needed.
            self.log.append(&[self.open.key(stripe, 0)], mark)?;
            self.open.clear(stripe);
            return Ok(());
        }
        let mut keys = lock_soon(&self.close_scratch);
        keys.clear();
        self.open.collect(stripe, &mut keys);
        self.log.append(&keys, mark)?;
        self.open.clear(stripe);
        Ok(())
    }

    /// Logs every open set, one after the other: a write waits for no more than one of them.
    pub(super) fn close_each(&self) -> Result<(), AppendError> {
        (0..self.open.stripes()).try_for_each(|stripe| {
            let _state = lock_soon(&self.stripes[stripe].state);
            match self.open.len(stripe) {
                0 => Ok(()),
                _ => self.close_set(stripe, false),
            }
        })
    }

    /// Logs every open set, together, durably. With `mark`, as a client's flush.
    pub(super) fn close_all(&self, mark: bool) -> Result<(), AppendError> {
        // All stripes at once, in order: a key of a locked stripe cannot overtake one that is
        // being logged, and keys of many stripes share key sets.
        let guards: [_; super::STRIPES_MAX] =
            std::array::from_fn(|nth| self.stripes.get(nth).map(|stripe| lock(&stripe.state)));
        let mut keys = lock(&self.close_scratch);
        keys.clear();
        let skipped = usize::from(mutants::is(Mutant::FlushSkipsStripe));
        for stripe in 0..self.open.stripes() - skipped {
            self.open.collect(stripe, &mut keys);
        }
        if keys.is_empty() && !mark {
            return Ok(());
        }
        let guards = (!mutants::is(Mutant::SetClearedUnlocked)).then_some(guards);
        self.log.append(&keys, mark)?;
        for stripe in 0..self.open.stripes() - skipped {
            self.open.clear(stripe);
        }
        drop(guards);
        Ok(())
    }

    /// Makes every write that completed before durable.
    pub(super) fn flush(&self, bio: Bio, port: &mut Port) {
        match self.close_all(!mutants::is(Mutant::FlushUnmarked)) {
            Ok(()) => port.finish(bio, Ok(())),
            Err(AppendError::NoRoom) => self.wait_for_room(bio, port),
            Err(AppendError::Medium(status)) => port.finish(bio, Err(status)),
        }
    }

    /// Discards and write-zeroes: keys that name zeroes.
    pub(super) fn write_zeroes(&self, mut bio: Bio, port: &mut Port) {
        debug_assert!(matches!(bio.op, Op::Discard | Op::WriteZeroes));
        while bio.progress < bio.len {
            let space = match self.take_zeroes(&bio, port) {
                Ok(Some(space)) => space,
                Ok(None) => return self.wait_for_room(bio, port),
                Err(status) => return port.finish(bio, Err(status)),
            };
            let crc = match self.crcs {
                Some(_) => self.zero_crc(space.len),
                None => 0,
            };
            match self.commit(&bio, space, Sums { crc, look: mix_look([0; 3]) }) {
                Ok(()) => bio.progress += u64::from(space.len),
                Err(AppendError::NoRoom) => return self.wait_for_room(bio, port),
                Err(AppendError::Medium(status)) => return port.finish(bio, Err(status)),
            }
        }
        port.finish(bio, Ok(()));
    }

    /// Names zeroes for the next piece, with a reference for its key.
    fn take_zeroes(&self, bio: &Bio, port: &Port) -> Result<Option<Space>, Status> {
        if !self.log.has_room() {
            return Ok(None);
        }
        let at = bio.offset + bio.progress;
        let wanted = (bio.len - bio.progress).min(REGION_BYTES - at % REGION_BYTES);
        let mut extent_lock = lock(&self.zero_extent);
        let extent = &mut *extent_lock;
        let is_worn = |extent: &ZeroExtent| {
            extent.keys >= ZERO_EXTENT_KEYS_MAX || u64::from(extent.space.len) < wanted.min(4096)
        };
        if extent.as_ref().is_none_or(is_worn) {
            if let Some(old) = extent.take() {
                self.segments.release(old.space.segment);
            }
            let limit = ZERO_EXTENT_BYTES.min(u64::from(self.media.geometry.data_bytes()) / 16);
            let limit = limit.next_multiple_of(4096);
            let reserve = self.write_reserve;
            let taken = self.segments.take(port.id, limit as u32, reserve, Class::Window);
            let Some(space) = taken else {
                return Ok(None);
            };
            let place = self.segments.data_at(space.segment, space.offset);
            self.media.pmem.zero(place, u64::from(space.len));
            let is_fenced = !mutants::is(Mutant::ZeroesUnfenced);
            if is_fenced && let Err(status) = self.media.pmem.drain() {
                // A key must not name what may not be zeroes after a crash.
                self.segments.release(space.segment);
                return Err(status);
            }
            lock(&self.known_zeroes).remember(space);
            *extent = Some(ZeroExtent { space, keys: 0 });
        }
        let Some(extent) = extent.as_mut() else { return Ok(None) };
        extent.keys += 1;
        let named = extent.space;
        let extent_lock = (!mutants::is(Mutant::ZeroReferenceLate)).then_some(extent_lock);
        self.segments.reference(named.segment);
        drop(extent_lock);
        let len = wanted.min(u64::from(named.len)) as u32;
        Ok(Some(Space { len, ..named }))
    }

    /// Whether the range starts with zeroes that this server named, and how long that goes on.
    pub(super) fn extent_at(&self, offset: u64, len: u64) -> (u64, Extent) {
        let end = offset + len;
        // First the index, then the backing device: what leaves the cache is there by then.
        let kind_at = |at: u64| {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            match piece.place {
                Some(place) => lock(&self.known_zeroes).extent(place, piece.len),
                None if self.log.has_failed() || self.bad.overlaps(at, piece.len) => {
                    (piece.len, Extent::Data)
                }
                None => self.backing.extent(at, piece.len),
            }
        };
        let (mut done, first) = kind_at(offset);
        for _ in 1..EXTENT_PIECES_MAX {
            if done >= len {
                break;
            }
            let (more, kind) = kind_at(offset + done);
            if kind != first {
                break;
            }
            done += more;
        }
        (done, first)
    }

    fn zero_crc(&self, len: u32) -> u32 {
        let mut known = lock(&self.zero_crc);
        if known.0 != len {
            *known = (len, pcache_crc(&vec![0; len as usize]));
        }
        known.1
    }

    /// Lets go of the zero extent: its segment may be wanted.
    pub(super) fn drop_zero_extent(&self) {
        if let Some(extent) = lock(&self.zero_extent).take() {
            self.segments.release(extent.space.segment);
        }
    }

    /// No room now: the bio waits, the background makes room.
    pub(super) fn wait_for_room(&self, bio: Bio, port: &mut Port) {
        if self.log.has_failed() {
            return port.finish(bio, Err(Status::Io));
        }
        self.room.wait(bio, port);
    }

    /// A CLEAN key for data that the backing device has too.
    pub(super) fn push_clean(&self, stripe: usize, at: u64, space: Space, sums: Sums) {
        self.point(at, space, sums);
        self.push_clean_key(stripe, at, space, sums);
    }

    /// As [`Pcache::push_clean`], for data that the index has there already.
    pub(super) fn push_clean_key(&self, stripe: usize, at: u64, space: Space, sums: Sums) {
        self.push_key(stripe, at, space, sums, KEY_CLEAN);
    }
}

impl StripeState {
    /// A write makes whatever is being read from the backing device for its range outdated.
    pub(super) fn cancel_fills(&mut self, at: u64, len: u64) {
        if !self.fills.is_empty() && !mutants::is(Mutant::FillNotCancelled) {
            for fill in &mut self.fills {
                fill.is_cancelled |= fill.offset < at + len && at < fill.offset + fill.len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_begin_and_end_within_runs() {
        let mut known = KnownZeroes::default();
        known.remember(Space { segment: 3, offset: 8192, len: 4096, generation: 7 });
        let extent = |offset, len| known.extent(Place::new(3, offset, 7), len);
        assert_eq!(extent(8192, 4096), (4096, Extent::Zeroes));
        assert_eq!(extent(8192, 8192), (4096, Extent::Zeroes), "data follows in the same run");
        assert_eq!(extent(9216, 512), (512, Extent::Zeroes));
        assert_eq!(extent(4096, 16384), (4096, Extent::Data), "zeroes follow in the same run");
        assert_eq!(extent(12288, 512), (512, Extent::Data));
        assert_eq!(known.extent(Place::new(3, 8192, 8), 512), (512, Extent::Data), "reused");
        assert_eq!(known.extent(Place::new(2, 8192, 7), 512), (512, Extent::Data));
    }
}
