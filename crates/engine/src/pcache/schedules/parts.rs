//! Test cases of single modules: segments with their accounts, the index with its rows.

use shuttle::thread;

use super::fixture::GEOMETRY;
use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::common::room::Room;
use crate::pcache::datacrc::DataCrcs;
use crate::pcache::index::{Index, Place};
use crate::pcache::layout::{REGION_BYTES, SEGMENTS_AT};
use crate::pcache::media::Media;
use crate::pcache::retention::Class;
use crate::pcache::segment::SegmentOnMedia;
use crate::pcache::segment::{Segments, Space};
use crate::pcache::slots::SlotState;
use crate::pmem::Persistence;
use crate::pmem::sim::SimPmem;
use crate::prng::Prng;
use crate::schedules::history::{History, INITIAL};
use crate::sync::{Arc, Condvar, Mutex, lock};
use crate::target::{Events, Port, Wake};
use crate::units::{BLOCK, SECTOR};

/// The data of every other thread is stored in the main part.
fn class_of(port: usize) -> Class {
    if port.is_multiple_of(2) { Class::Window } else { Class::Main }
}

/// `count` free segments with one block of data each.
fn segments(count: u32) -> Arc<Segments> {
    let bytes = SEGMENTS_AT + u64::from(count) * GEOMETRY.segment_bytes;
    let pmem = Arc::new(SimPmem::new(bytes, Persistence::Cpu));
    let slot = SlotState::unwritten(0);
    let found: Vec<SegmentOnMedia> =
        (0..count).map(|physical| SegmentOnMedia { physical, generation: 7, slot }).collect();
    Arc::new(Segments::new(Media { pmem, geometry: GEOMETRY, shared: None }, &found))
}

/// Space is taken, given back and reused by several threads, and the log takes its share.
pub fn spaces(mut prng: Prng) {
    // With 16 segments there are two heads; with 4, freed segments are taken again immediately.
    let segments = segments([4, 4, 6, 16][prng.below(4) as usize]);
    let crcs = Arc::new(DataCrcs::new(segments.count()));
    let ever = Arc::new(std::sync::Mutex::new(Vec::<Space>::new()));
    let mut threads = Vec::new();
    for port in 0..3 {
        let (segments, crcs, ever) = (segments.clone(), crcs.clone(), ever.clone());
        let mut prng = Prng::new(prng.next_u64());
        threads.push(thread::spawn(move || {
            for _ in 0..6 {
                let len = (1 + prng.below(8) as u32) * SECTOR as u32;
                let Some(space) = segments.take(port, len, 0, class_of(port)) else { continue };
                let tag = {
                    let mut ever = ever.lock().unwrap();
                    ever.push(space);
                    ever.len() as u32
                };
                crcs.insert(space.segment, space.offset, space.len, tag);
                thread::yield_now();
                // While the space is held, its segment stays what it is.
                assert_eq!(segments.generation(space.segment), space.generation);
                assert_eq!(crcs.crc_at(space.segment, space.offset), Some(tag), "no checksum");
                segments.release(space.segment);
            }
        }));
    }
    let (collected, log_too) = (segments.clone(), prng.one_in(2));
    threads.push(thread::spawn(move || {
        for _ in 0..6 {
            if collected.has_released() {
                collected.recycle(|segment| crcs.forget(segment)).unwrap();
            }
            if log_too && let Some(segment) = collected.take_log() {
                thread::yield_now();
                collected.free_log(segment);
            }
            thread::yield_now();
        }
    }));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let mut ever = std::mem::take(&mut *ever.lock().unwrap());
    ever.sort_by_key(|space| (space.segment, space.generation, space.offset));
    for pair in ever.windows(2) {
        let is_apart = pair[0].segment != pair[1].segment
            || pair[0].generation != pair[1].generation
            || pair[0].offset + pair[0].len <= pair[1].offset;
        assert!(is_apart, "space is given twice: {pair:?}");
    }
    segments.audit(&[]).unwrap_or_else(|wrong| panic!("accounts: {wrong}"));
    if segments.has_released() {
        segments.recycle(|_| ()).unwrap();
    }
    segments.audit(&[]).unwrap_or_else(|wrong| panic!("accounts: {wrong}"));
}

/// Only one segment may hold data, so it is used again when it becomes free: by then the
/// checksums of its old data must be gone.
pub fn checks(_: Prng) {
    let segments = segments(4);
    segments.mark_log(0);
    let crcs = Arc::new(DataCrcs::new(segments.count()));
    let mut threads = Vec::new();
    for port in 0..2 {
        let (segments, crcs) = (segments.clone(), crcs.clone());
        threads.push(thread::spawn(move || {
            for nth in 0..20 {
                let Some(space) = segments.take(port, 4096, 0, class_of(port)) else {
                    thread::yield_now();
                    continue;
                };
                let crc = (port * 100 + nth) as u32;
                crcs.insert(space.segment, space.offset, space.len, crc);
                assert_eq!(crcs.crc_at(space.segment, space.offset), Some(crc), "no checksum");
                segments.release(space.segment);
            }
        }));
    }
    for _ in 0..20 {
        segments.recycle(|segment| crcs.forget(segment)).unwrap();
        thread::yield_now();
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    segments.audit(&[]).unwrap_or_else(|wrong| panic!("accounts: {wrong}"));
}

/// Blocks change between whole and in pieces, so that rows are used, freed and used again, while
/// readers read without a lock. Two regions become flat and are packed again, and have the same
/// arrays one after the other.
pub fn rows(mut prng: Prng) {
    let index = Arc::new(Index::with_flats(2 * REGION_BYTES, FLAT_FROM));
    let history = Arc::new(History::default());
    let stripe = Arc::new(Mutex::new(()));
    let mut threads = Vec::new();
    for _ in 0..2 {
        let (index, history, stripe) = (index.clone(), history.clone(), stripe.clone());
        let mut prng = Prng::new(prng.next_u64());
        threads.push(thread::spawn(move || {
            for _ in 0..6 {
                let (block, from) = (prng.below(3), prng.below(6));
                let region = region_of(&mut prng);
                let (sector, count) = match prng.one_in(2) {
                    true => (region + block * 8, 8),
                    false => (region + block * 8 + from, 1 + prng.below(2)),
                };
                // The place tells the tag, and also which sector it is for.
                let tag = history.new_tag();
                let place = Place::new(tag as u32, offset_for(sector * SECTOR), 7);
                let acts = history.writes(sector, count, tag, false);
                let guard = lock(&stripe);
                index.set(sector * SECTOR, count * SECTOR, Some(place));
                drop(guard);
                history.wrote(acts);
            }
        }));
    }
    let (filled, locked) = (index.clone(), stripe.clone());
    threads.push(thread::spawn(move || {
        (0..2).for_each(|region| pass_through(&filled, &locked, region));
    }));
    for _ in 0..2 {
        let (index, history) = (index.clone(), history.clone());
        let mut prng = Prng::new(prng.next_u64());
        threads.push(thread::spawn(move || {
            (0..6).for_each(|_| {
                let sector = region_of(&mut prng) + prng.below(24);
                look(&index, &history, sector, 1 + prng.below(8));
            });
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for region in 0..2 {
        look(&index, &history, region * REGION_BYTES / SECTOR, 24);
    }
    history.judge();
}

/// The number of blocks at which a region becomes flat; with only the blocks of `rows` it is packed
/// again.
const FLAT_FROM: usize = 8;

/// This many blocks that are never read are added to a region and removed again.
fn pass_through(index: &Index, stripe: &Mutex<()>, region: u64) {
    let guard = lock(stripe);
    let (at, len) = (region * REGION_BYTES + 16 * BLOCK, FLAT_FROM as u64 * BLOCK);
    index.set(at, len, Some(Place::new(1, 0, 7)));
    drop(guard);
    let _guard = lock(stripe);
    index.set(at, len, None);
    index.sweep(region, |place| place.is_of(7), |_| false);
}

/// The first sector of one of two regions.
fn region_of(prng: &mut Prng) -> u64 {
    prng.below(2) * REGION_BYTES / SECTOR
}

/// The part of a data area for a byte of the device: no two of `rows` have the same.
fn offset_for(at: u64) -> u32 {
    (at / REGION_BYTES * BLOCK * 4 + at % REGION_BYTES) as u32
}

/// Looks sectors up as a read does.
fn look(index: &Index, history: &History, sector: u64, count: u64) {
    let end = (sector + count) * SECTOR;
    let mut at = sector * SECTOR;
    while at < end {
        let start = history.now();
        let piece = index.lookup(at, end, |place| place.is_of(7));
        let first = piece.offset / SECTOR;
        let tag = piece.place.map_or(INITIAL, |place| {
            assert_eq!(place.offset, offset_for(piece.offset), "a place of another sector");
            u64::from(place.segment)
        });
        history.found(first, &vec![tag; (piece.len / SECTOR) as usize], start);
        at += piece.len;
    }
}

/// A thread that sleeps until it is woken.
#[derive(Default)]
struct Sleeper {
    is_woken: Mutex<bool>,
    signal: Condvar,
}

impl Wake for Sleeper {
    fn wake(&self) {
        *lock(&self.is_woken) = true;
        self.signal.notify_one();
    }
}

impl Sleeper {
    fn sleep(&self) {
        let mut is_woken = lock(&self.is_woken);
        while !*is_woken {
            is_woken = self.signal.wait(is_woken).unwrap();
        }
        *is_woken = false;
    }
}

/// Bios wait for room, which the background makes when it is woken. All of them must get it.
pub fn room(mut prng: Prng) {
    let events = Arc::new(Events::default());
    let room = Arc::new(Room::new(&events));
    let background = Arc::new(Sleeper::default());
    events.set_background(Some(background.clone()));
    let is_over = Arc::new(Mutex::new(false));
    let clients: Vec<_> = (0..1 + prng.below(2) as usize)
        .map(|id| {
            let (events, room) = (events.clone(), room.clone());
            let client = Arc::new(Sleeper::default());
            events.listen(client.clone());
            thread::spawn(move || {
                let mut port = Port::new(id);
                for _ in 0..2 {
                    let before = events.room_epoch();
                    let bio = Bio::write(0, Buffer::from_bytes(&[0; SECTOR as usize]), false, 0);
                    room.wait(bio, &mut port);
                    while events.room_epoch() == before {
                        client.sleep();
                    }
                    port.parked.clear();
                }
            })
        })
        .collect();
    let is_at_its_end = is_over.clone();
    let sleeper = background.clone();
    let ticks = thread::spawn(move || {
        while !*lock(&is_at_its_end) {
            sleeper.sleep();
            assert_eq!(room.plan(None), None);
            room.tell();
        }
    });
    clients.into_iter().for_each(|client| client.join().unwrap());
    *lock(&is_over) = true;
    background.wake();
    ticks.join().unwrap();
}
