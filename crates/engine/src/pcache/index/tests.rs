//! The index against an array of sectors.

use super::*;
use crate::prng::Prng;

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
        let index = Index::new(len);
        let mut model = vec![None; (len / SECTOR) as usize];
        for _ in 0..600 {
            let region = prng.below(3) * REGION_BYTES;
            // Few blocks, so that overlaps of every shape happen.
            let start = prng.below(64);
            let longest = if prng.one_in(4) { 60 } else { 9 };
            let count = 1 + prng.below(longest);
            let offset = region + start * SECTOR;
            let place = (!prng.one_in(5)).then(|| {
                let generation = if prng.one_in(6) { 6 } else { 7 };
                Place::new(prng.below(9) as u32, (prng.below(1000) * SECTOR) as u32, generation)
            });
            index.set(offset, count * SECTOR, place);
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
        let (newer, mut older) = (Index::new(len), Index::new(len));
        for nth in 0..60 {
            // The last region is only in one of them, the first one in both.
            let is_newer = nth % 2 == 0;
            let region = if is_newer { prng.below(2) } else { prng.below(3) };
            let (start, count) = (prng.below(80), 1 + prng.below(20));
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
        // Rows that became whole blocks are free again, and nobody's twice.
        for region in newer.regions.iter().filter_map(OnceLock::get) {
            let side = lock(&region.side);
            let slots = region.slots.iter().map(|slot| slot.load(Ordering::Relaxed));
            let rows = slots.filter(|slot| slot >> KIND_SHIFT == KIND_ROW);
            let mut rows: Vec<u32> =
                rows.map(|slot| slot as u32).chain(side.free.clone()).collect();
            rows.sort_unstable();
            assert!(rows.into_iter().eq(0..side.rows.len() as u32), "seed {seed}");
        }
    }
}

#[test]
fn a_place_survives_packing() {
    let place = Place::new((1 << 20) - 1, 16_764_928 - 512, 1 << 40 | 5);
    assert_eq!(Place::unpack(place.pack()), Some(place));
    assert!(place.is_of(5) && !place.is_of(6));
    assert_eq!(Place::unpack(0), None);
}
