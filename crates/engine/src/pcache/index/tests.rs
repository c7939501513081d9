//! The index against an array of sectors.

use super::*;
use crate::prng::Prng;
use crate::sync::lock;

/// Regions that are flat immediately, soon, or not before they have many entries.
const FLAT_FROMS: [usize; 4] = [1, 4, 20, FLAT_FROM];

fn collect(index: &Index, offset: u64, end: u64) -> Vec<Option<(u32, u32)>> {
    let mut sectors = Vec::new();
    let mut at = offset;
    while at < end {
        let piece = index.lookup(at, end, |place| place.is_of(7));
        assert!(piece.len > 0);
        for nth in 0..piece.len / SECTOR {
            sectors.push(piece.place.map(|p| (p.segment, p.offset + (nth * SECTOR) as u32)));
        }
        at += piece.len;
    }
    sectors
}

#[test]
fn random_overlays_equal_a_sector_array() {
    let len = 3 * REGION_BYTES;
    for seed in 0..20 {
        let mut prng = Prng::new(seed);
        let index = Index::with_flats(len, FLAT_FROMS[seed as usize % 4]);
        let mut model = vec![None; (len / SECTOR) as usize];
        for _ in 0..600 {
            let region = prng.below(3) * REGION_BYTES;
            // Few blocks, so that overlaps of every shape happen.
            let start = prng.below(64);
            let longest = if prng.one_in(4) { 60 } else { 9 };
            let count = 1 + prng.below(longest);
            // Sometimes as much as one key of a discard.
            let (start, count) = match prng.one_in(16) {
                true => (prng.below(3) * 2048 + prng.below(2) * 8, 2048),
                false => (start, count),
            };
            let offset = region + start * SECTOR;
            let place = (!prng.one_in(5)).then(|| {
                let generation = if prng.one_in(6) { 6 } else { 7 };
                Place::new(prng.below(9) as u32, (prng.below(1000) * SECTOR) as u32, generation)
            });
            index.set(offset, count * SECTOR, place);
            if prng.one_in(9) {
                index.sweep(prng.below(3), |place| place.is_of(7), |_| false);
                check_rows(&index);
            }
            for nth in 0..count {
                model[(offset / SECTOR + nth) as usize] = place
                    .filter(|place| place.is_of(7))
                    .map(|p| (p.segment, p.offset + (nth * SECTOR) as u32));
            }
            let from = region + prng.below(100) * SECTOR;
            let to = from + (1 + prng.below(200)) * SECTOR;
            let range = (from / SECTOR) as usize..(to / SECTOR) as usize;
            assert_eq!(collect(&index, from, to), model[range], "seed {seed}");
        }
        assert_eq!(collect(&index, 0, len), model, "seed {seed}");
    }
}

#[test]
fn what_joins_fills_gaps_only() {
    let len = 3 * REGION_BYTES;
    for seed in 0..60 {
        let mut prng = Prng::new(seed);
        let newer = Index::with_flats(len, FLAT_FROMS[seed as usize % 4]);
        let mut older = newer.sibling();
        for nth in 0..60 {
            // The last region is only in one of them, the first one in both.
            let is_newer = nth % 2 == 0;
            let region = if is_newer { prng.below(2) } else { prng.below(3) };
            let (start, count) = match prng.one_in(8) {
                true => (prng.below(2) * 2048, 2048),
                false => (prng.below(80), 1 + prng.below(20)),
            };
            let generation = if is_newer && prng.one_in(9) { 6 } else { 7 };
            let (segment, sector) = (prng.below(9) as u32, prng.below(1000));
            let place = Place::new(segment, (sector * SECTOR) as u32, generation);
            let place = (!prng.one_in(5)).then_some(place);
            let index = if is_newer { &newer } else { &older };
            let at = region * REGION_BYTES + start * SECTOR;
            index.set(at, count * SECTOR, place);
        }
        let known = |index: &Index| -> Vec<Option<Place>> {
            let sector = |nth| index.lookup(nth * SECTOR, (nth + 1) * SECTOR, |_| true).place;
            (0..len / SECTOR).map(sector).collect()
        };
        let (before, offered) = (known(&newer), known(&older));
        let expected: Vec<_> =
            before.iter().zip(&offered).map(|(newer, older)| newer.or(*older)).collect();
        (0..3).for_each(|region| newer.join(&mut older, region));
        assert!(known(&newer) == expected, "seed {seed}");
        assert!(known(&older).iter().all(Option::is_none));
        check_rows(&newer);
    }
}

/// Rows that no entry names are free, and no row has two owners.
fn check_rows(index: &Index) {
    for region in index.regions.iter().filter_map(OnceLock::get) {
        let entries = (0..REGION_BLOCKS).map(|block| region.entry(&index.flats, block));
        let rows =
            entries.filter(|entry| entry >> KIND_SHIFT == KIND_ROW).map(|entry| entry as u32);
        let rows: Vec<u32> = rows.collect();
        let side = lock(&region.side);
        let mut rows: Vec<u32> = rows.into_iter().chain(side.free.iter().copied()).collect();
        rows.sort_unstable();
        assert!(rows.into_iter().eq(0..side.rows.len()));
    }
}

/// A cache of 4096 blocks keeps 40 blocks for each region, then all blocks of one region after the
/// other.
#[test]
fn memory_follows_what_is_cached() {
    let regions = 512;
    let place = |nth: u64, generation| Place::new(nth as u32 / 32, 0, generation);
    let per_block = |index: &Index| index.memory_bytes() as f64 / 4096.0;
    let empty = Index::new(regions * REGION_BYTES).memory_bytes();
    let index = Index::new(regions * REGION_BYTES);
    // Scattered: eight blocks in each region.
    for nth in 0..4096 {
        let at = nth % regions * REGION_BYTES + nth / regions * 100 * BLOCK;
        index.set(at, BLOCK, Some(place(nth, 1)));
    }
    assert!(per_block(&index) < 48.0, "{} bytes for each scattered block", per_block(&index));
    // A scan passes, four regions of blocks at a time are live.
    for round in 0..regions / 4 {
        for nth in 0..4096 {
            let at = (round * 4 + nth / 1024) * REGION_BYTES + nth % 1024 * BLOCK;
            index.set(at, BLOCK, Some(place(nth, 2 + round)));
        }
        let is_live = |place: Place| place.is_of(2 + round);
        (0..regions).for_each(|region| index.sweep(region, is_live, |_| false));
        assert_eq!(index.cached_bytes(is_live), 4096 * BLOCK);
        // Eight arrays may exist; the regions themselves stay.
        let bytes = index.memory_bytes() - empty;
        let fixed = regions * size_of::<Region>() as u64;
        assert!(bytes < fixed + 13 * 4 * 8192, "{bytes} bytes in round {round}");
    }
    (0..regions).for_each(|region| index.sweep(region, |_| false, |_| false));
    assert_eq!(index.cached_bytes(|_| true), 0);
}

#[test]
fn what_was_dropped_is_remembered_for_a_while() {
    for flat_from in FLAT_FROMS {
        let index = Index::with_flats(REGION_BYTES, flat_from);
        index.set(0, 4 * BLOCK, Some(Place::new(1, 0, 7)));
        index.leave_ghosts(0, 2 * BLOCK + SECTOR, 5);
        assert_eq!(index.trace(0), Trace::Ghost(5));
        index.note_use(3 * BLOCK, BLOCK);
        assert_eq!((index.uses(3 * BLOCK), index.uses(0)), (1, 0));
        index.sweep(0, |_| true, |time| time >= 5);
        assert_eq!(index.trace(BLOCK), Trace::Ghost(5));
        assert_eq!(index.uses(3 * BLOCK), 1);
        index.set_uses(3 * BLOCK, BLOCK, 3);
        index.sweep(0, |_| true, |time| time > 5);
        assert_eq!((index.trace(BLOCK), index.uses(3 * BLOCK)), (Trace::None, 3));
        let cached = index.cached_bytes(|_| true);
        assert_eq!(cached, 2 * BLOCK - SECTOR, "flat from {flat_from}");
    }
}

#[test]
fn a_sibling_gives_its_arrays_back() {
    let index = Index::with_flats(8 * REGION_BYTES, 1);
    let fill = |index: &Index| {
        (0..8).for_each(|region| {
            index.set(region * REGION_BYTES, BLOCK, Some(Place::new(1, 0, 7)));
        });
    };
    for _ in 0..20 {
        let sibling = index.sibling();
        fill(&sibling);
    }
    // More than there can be would have been packed.
    fill(&index);
    let arrays = index.flats.memory_bytes() / (REGION_BLOCKS * 8) as u64;
    assert!((8..=16).contains(&arrays), "{arrays} arrays for 8 regions");
}

#[test]
fn a_place_survives_packing() {
    let place = Place::new((1 << 20) - 1, 16_764_928 - 512, 1 << 40 | 5);
    assert_eq!(Place::unpack(place.pack()), Some(place));
    assert!(place.is_of(5) && !place.is_of(6));
    assert_eq!(Place::unpack(0), None);
}

/// What loom and the schedules show in small, at full speed.
#[cfg(not(any(feature = "shuttle", feature = "loom")))]
#[test]
fn arrays_that_move_show_nobody_another_regions_places() {
    use crate::sync::atomic::{AtomicBool, Ordering};

    let index = Index::with_flats(2 * REGION_BYTES, 8);
    let place = |region: u64| Some(Place::new(region as u32, 0, 7));
    (0..2).for_each(|region| index.set(region * REGION_BYTES, BLOCK, place(region)));
    let is_over = AtomicBool::new(false);
    // One region after the other is flat, and takes the array of the previous one.
    let change = || {
        for round in 0..4000 {
            let region = round % 2;
            let at = region * REGION_BYTES + 512 * BLOCK;
            index.set(at, 8 * BLOCK, place(9));
            index.set(at, 8 * BLOCK, None);
            index.sweep(region, |_| true, |_| true);
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let look = || {
        for region in 0..2 {
            let at = region * REGION_BYTES;
            let found = index.lookup(at, at + BLOCK, |_| true).place;
            assert_eq!(found.map(|place| u64::from(place.segment)), Some(region));
            index.note_use(at, BLOCK);
        }
    };
    crate::base::parallel::each(&mut [true, false, false], |changes| match changes {
        true => change(),
        false => {
            while !is_over.load(Ordering::Relaxed) {
                look()
            }
        }
    });
    assert_eq!(index.flats.memory_bytes() / (8 * REGION_BLOCKS) as u64, 4, "a chunk of arrays");
}
