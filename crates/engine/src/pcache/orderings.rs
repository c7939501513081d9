//! Models for `crate::orderings`: the real index and the real segments, with two or three threads
//! that do one action each. Data is copied by loads and stores without any order, as in the
//! product.

use loom::thread;

use super::index::{Index, Place};
use super::layout::{Geometry, REGION_BYTES, SEGMENT_META_BYTES, SEGMENTS_AT};
use super::media::Media;
use super::retention::Class;
use super::segment::{SegmentOnMedia, Segments, Space};
use crate::error::Status;
use crate::pcache::slots::SlotState;
use crate::pmem::{Medium, Persistence, Pmem};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::{BLOCK, SECTOR};

const GEOMETRY: Geometry =
    Geometry { segment_bytes: SEGMENT_META_BYTES + BLOCK, device_bytes_min: 0 };
/// One stretch of the log, the log's reserve, and one for data.
const COUNT: u32 = 4;
const OLD: u64 = 1;
const NEW: u64 = 2;

/// The first word of each segment's data; the models use no other word. A fence of persistent
/// memory does nothing here: the code must not rely on one.
#[derive(Debug)]
struct Words {
    medium: Medium,
    words: Vec<AtomicU64>,
}

impl Words {
    fn new() -> Words {
        let medium = Medium {
            name: "words".into(),
            persistence: Persistence::Cpu,
            is_volatile: true,
            description: String::new(),
            kernel_name: "words".into(),
        };
        Words { medium, words: (0..COUNT).map(|_| AtomicU64::new(0)).collect() }
    }

    fn word(&self, at: u64) -> Option<&AtomicU64> {
        (0..COUNT).find(|nth| GEOMETRY.data_at(*nth) == at).map(|nth| &self.words[nth as usize])
    }
}

impl Pmem for Words {
    fn len_bytes(&self) -> u64 {
        SEGMENTS_AT + u64::from(COUNT) * GEOMETRY.segment_bytes
    }

    fn medium(&self) -> &Medium {
        &self.medium
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        if let Some(word) = self.word(at) {
            let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            word.store(value, Ordering::Relaxed);
        }
    }

    fn zero(&self, _: u64, _: u64) {}

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        let word = self.word(at).expect("only the first word is looked at");
        into.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        Ok(())
    }

    fn drain(&self) -> Result<(), Status> {
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        Ok(())
    }
}

struct Cache {
    media: Media,
    segments: Segments,
    index: Index,
}

impl Cache {
    fn new() -> Arc<Cache> {
        let media = Media { pmem: Arc::new(Words::new()), geometry: GEOMETRY, shared: None };
        let slot = SlotState::unwritten(0);
        let found: Vec<SegmentOnMedia> =
            (0..COUNT).map(|physical| SegmentOnMedia { physical, generation: 7, slot }).collect();
        let segments = Segments::new(media.clone(), &found);
        segments.mark_log(0);
        // Flat immediately: a packed region is under a lock.
        Arc::new(Cache { media, segments, index: Index::with_flats(2 * BLOCK, 1) })
    }

    /// Stores `value` in the space and points the block to it, as a write does.
    fn fill(&self, space: Space, block: u64, value: u64) {
        let at = self.segments.data_at(space.segment, space.offset);
        self.media.store(at, &value.to_le_bytes());
        self.media.pmem.drain().unwrap();
        let place = Place::new(space.segment, space.offset, space.generation);
        self.index.set(block * BLOCK, u64::from(space.len), Some(place));
    }

    /// Reads a block as a read does. Returns the value, or `None` for a miss.
    fn read(&self, block: u64) -> Option<u64> {
        let is_live = |place: Place| place.is_of(self.segments.generation(place.segment));
        let place = self.index.lookup(block * BLOCK, block * BLOCK + SECTOR, is_live).place?;
        let mut word = [0; 8];
        self.segments.load(place.segment, place.offset, &mut word).unwrap();
        self.segments.is_still(place).then(|| u64::from_le_bytes(word))
    }
}

/// A reader reads a block while its segment is released, collected and taken again.
fn reuse() {
    let cache = Cache::new();
    let old = cache.segments.take(0, BLOCK as u32, 0, Class::Window).unwrap();
    cache.fill(old, 0, OLD);
    let (reader, writer) = (cache.clone(), cache.clone());
    let reading = thread::spawn(move || reader.read(0));
    let writing = thread::spawn(move || {
        if let Some(space) = writer.segments.take(0, BLOCK as u32, 0, Class::Window) {
            writer.fill(space, 1, NEW);
        }
    });
    cache.segments.release(old.segment);
    cache.segments.recycle(|_| ()).unwrap();
    writing.join().unwrap();
    assert!(matches!(reading.join().unwrap(), None | Some(OLD)), "foreign data");
}

/// A reader looks at a block that is just being written.
fn publish() {
    let cache = Cache::new();
    // The region's entries must exist: loom does not see their creation.
    cache.index.set(BLOCK, BLOCK, Some(Place::new(3, 0, 7)));
    let space = cache.segments.take(0, BLOCK as u32, 0, Class::Window).unwrap();
    let reader = cache.clone();
    let reading = thread::spawn(move || reader.read(0));
    cache.fill(space, 0, NEW);
    let found = reading.join().unwrap();
    assert!(matches!(found, None | Some(NEW)), "the index names data that is not there");
}

/// Two writers share a head whose segment has just been collected.
fn share() {
    let cache = Cache::new();
    let old = cache.segments.take(0, BLOCK as u32, 0, Class::Window).unwrap();
    let writers = [cache.clone(), cache.clone()].map(|writer| {
        thread::spawn(move || writer.segments.take(0, SECTOR as u32, 0, Class::Window))
    });
    cache.segments.release(old.segment);
    cache.segments.recycle(|_| ()).unwrap();
    for space in writers.into_iter().filter_map(|writer| writer.join().unwrap()) {
        // Held all along, so the generation cannot have been raised since.
        assert_eq!(space.generation, cache.segments.generation(space.segment), "outdated");
    }
}

/// A reader reads a block of a region whose array moves to another region.
fn moves() {
    let index = Arc::new(Index::with_flats(2 * REGION_BYTES, 4));
    let place = |segment| Some(Place::new(segment, 0, 7));
    index.set(0, 4 * BLOCK, place(OLD as u32));
    let reader = index.clone();
    let reading = thread::spawn(move || reader.lookup(0, BLOCK, |_| true).place);
    index.set(BLOCK, 3 * BLOCK, None);
    index.sweep(0, |_| true, |_| true);
    index.set(REGION_BYTES, 4 * BLOCK, place(NEW as u32));
    let found = reading.join().unwrap().expect("a block that is cached");
    assert_eq!(found.segment, OLD as u32, "another region's place");
}

/// All of them, by name.
pub(crate) const MODELS: [(&str, fn()); 4] =
    [("reuse", reuse), ("publish", publish), ("share", share), ("moves", moves)];
