//! Discards and write-zeroes: keys that name zeroes, which are stored once for many keys. A range
//! that reads as zeroes already needs no key. So the cost depends on the data that is there, not on
//! the length of the request.

use std::collections::VecDeque;

use crate::base::crc::pcache_crc;
use crate::base::fingerprint::mix_fingerprint;
use crate::bio::{Bio, Op};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::{Mutex, lock};
use crate::target::{Extent, Port};
use crate::units::MIB;

use super::Pcache;
use super::index::Place;
use super::keylog::AppendError;
use super::layout::REGION_BYTES;
use super::retention::Class;
use super::segment::Space;
use super::stripes::Sums;

/// The longest run of zeroes that one key can name. Zeroes are stored once and named by many keys.
const ZERO_EXTENT_BYTES: u64 = MIB;
/// A zero extent is replaced after this many keys, so that it does not pin an old segment.
const ZERO_EXTENT_KEYS_MAX: u32 = 4096;

/// The last zero extents made by this server: the places in them read as zeroes, until their
/// segments are reused.
#[derive(Debug, Default)]
struct KnownZeroes {
    spaces: VecDeque<Space>,
}

/// This many zero extents are remembered; each has served up to [`ZERO_EXTENT_KEYS_MAX`] keys.
pub(super) const KNOWN_ZEROES_MAX: usize = 64;

impl KnownZeroes {
    fn remember(&mut self, space: Space) {
        if self.spaces.len() == KNOWN_ZEROES_MAX {
            self.spaces.pop_front();
        }
        self.spaces.push_back(space);
    }

    /// The known kind of the first of `len` bytes at a live place, and how many bytes have it: a
    /// run may lead from data into zeroes after it, or out of them.
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

/// Most pieces that are examined for one extent.
const EXTENT_PIECES_MAX: usize = 32;

/// Zeroes on the cache device that keys may name. Holds a reference to its segment.
#[derive(Debug)]
struct ZeroExtent {
    space: Space,
    keys: u32,
}

/// The zeroes that new keys may name now, and the zeroes that existing keys name.
#[derive(Debug, Default)]
pub(super) struct Zeroes {
    extent: Mutex<Option<ZeroExtent>>,
    known: Mutex<KnownZeroes>,
    /// The last computed checksum of zeroes: for this many bytes, and the checksum.
    crc: Mutex<Option<(u32, u32)>>,
}

#[cfg(all(test, feature = "shuttle"))]
impl Zeroes {
    /// The segment of the present extent.
    pub(super) fn segment(&self) -> Option<u32> {
        lock(&self.extent).as_ref().map(|extent| extent.space.segment)
    }
}

impl Pcache {
    /// Discards and write-zeroes: keys that name zeroes.
    pub(super) fn write_zeroes(&self, mut bio: Bio, port: &mut Port) {
        debug_assert!(matches!(bio.op, Op::Discard | Op::WriteZeroes));
        while bio.progress < bio.len {
            let zeroes = self.zeroes_at(bio.offset + bio.progress, &bio);
            if zeroes > 0 {
                bio.progress += zeroes;
                continue;
            }
            let space = match self.take_zeroes(&bio, port) {
                Ok(Some(space)) => space,
                Ok(None) => return self.wait_for_room(bio, port),
                Err(status) => return port.finish(bio, Err(status)),
            };
            let crc = match self.crcs {
                Some(_) => self.zero_crc(space.len),
                None => 0,
            };
            let (at, sums) =
                (bio.offset + bio.progress, Sums { crc, look: mix_fingerprint([0; 3]) });
            match self.commit(at, space, sums, bio.end(), false) {
                Ok(()) => {
                    bio.progress += u64::from(space.len);
                    self.stripes.note_zeroed(space.len.into());
                }
                Err(AppendError::NoRoom) => return self.wait_for_room(bio, port),
                Err(AppendError::Medium(status)) => return port.finish(bio, Err(status)),
            }
        }
        if !bio.fua || mutants::is(Mutant::FuaNotClosing) {
            return port.finish(bio, Ok(()));
        }
        // The last part may have needed no key, so no key of the request could close for all.
        self.flush(bio, port);
    }

    /// The length of the part of `bio` from `at` that needs no key, because it reads as zeroes:
    ///
    /// * The index has a gap there, and the backing device has a hole. This holds after a crash as
    ///   well: udm removes a key from the index only after a flush of the backing device.
    /// * Its live keys name known zeroes. They may not be logged yet, so this does not count for a
    ///   request with FUA.
    fn zeroes_at(&self, at: u64, bio: &Bio) -> u64 {
        // First the index, then the backing device, as in `extent_at`.
        let piece = self.index.lookup(at, bio.end(), |place| self.is_live(place));
        let place = piece.place.filter(|_| !mutants::is(Mutant::HoleBelieved));
        let (len, extent) = match place {
            Some(_) if bio.fua => return 0,
            Some(place) => lock(&self.zeroes.known).extent(place, piece.len),
            None if self.log.has_failed() || self.bad.overlaps(at, piece.len) => return 0,
            None => self.backing.extent(at, piece.len),
        };
        if extent == Extent::Zeroes { len } else { 0 }
    }

    /// Names zeroes for the next piece, with a reference for its key.
    fn take_zeroes(&self, bio: &Bio, port: &Port) -> Result<Option<Space>, Status> {
        if !self.log.has_room() {
            return Ok(None);
        }
        let at = bio.offset + bio.progress;
        let wanted = (bio.len - bio.progress).min(REGION_BYTES - at % REGION_BYTES);
        let mut extent_lock = lock(&self.zeroes.extent);
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
            let reserve = self.collector.write_reserve();
            let taken = self.segments.take(port.id, limit as u32, reserve, Class::Window);
            let Some(space) = taken else {
                return Ok(None);
            };
            self.segments.set_shared(space.segment, true);
            let place = self.segments.data_at(space.segment, space.offset);
            self.media.pmem.zero(place, u64::from(space.len));
            let is_fenced = !mutants::is(Mutant::ZeroesUnfenced);
            if is_fenced && let Err(status) = self.media.pmem.drain() {
                // A key must not name what may not be zeroes after a crash.
                self.segments.release(space.segment);
                return Err(status);
            }
            lock(&self.zeroes.known).remember(space);
            *extent = Some(ZeroExtent { space, keys: 0 });
        }
        let Some(extent) = extent.as_mut() else { return Ok(None) };
        extent.keys += 1;
        let named = extent.space;
        if mutants::is(Mutant::ZeroReferenceLate) {
            drop(extent_lock);
        }
        self.segments.reference(named.segment);
        let len = wanted.min(u64::from(named.len)) as u32;
        Ok(Some(Space { len, ..named }))
    }

    /// Whether the range starts with zeroes that this server named, and the length of these zeroes.
    pub(super) fn extent_at(&self, offset: u64, len: u64) -> (u64, Extent) {
        let end = offset + len;
        // First the index, then the backing device: data that is evicted from the cache is there by
        // then.
        let kind_at = |at: u64| {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            match piece.place {
                Some(place) => lock(&self.zeroes.known).extent(place, piece.len),
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

    /// Whether the `len` bytes at a live place are zeroes that this server named.
    pub(super) fn is_known_zero(&self, place: Place, len: u64) -> bool {
        // Others need no lock.
        self.segments.is_shared(place.segment)
            && lock(&self.zeroes.known).extent(place, len) == (len, Extent::Zeroes)
    }

    fn zero_crc(&self, len: u32) -> u32 {
        let mut known = lock(&self.zeroes.crc);
        match *known {
            Some((of, crc)) if of == len => crc,
            _ => known.insert((len, pcache_crc(&vec![0; len as usize]))).1,
        }
    }

    /// Drops the zero extent: its segment may be needed.
    pub(super) fn drop_zero_extent(&self) {
        if let Some(extent) = lock(&self.zeroes.extent).take() {
            self.segments.release(extent.space.segment);
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
