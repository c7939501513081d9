//! Anything on the media: an attach reads it, refuses it or serves it, but never panics and never
//! hangs; and random logs mean to the engine what they mean to the builder.

use std::sync::Arc;

use udm::pcache::inspect::inspect;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::builder::{Builder, CLEAN, Key, cache_info, kset, last, meta, tail};
use crate::fixture::{Fixture, SMALL};

const SECTORS: usize = 256;

/// A random log and its meaning: per sector, the data of a read and the origin's data after a
/// drain. Written from the specification: sections 7 to 10, 15 and 24.
struct Case {
    built: Builder,
    read: Vec<u8>,
    drained: Vec<u8>,
    used: u32,
}

fn case(prng: &mut Prng, has_crc: bool) -> Case {
    let mut built = Builder::new(24);
    built.has_crc = has_crc;
    for nth in (1..24).rev() {
        built.chain.swap(nth, prng.below(nth as u64 + 1) as usize);
    }
    built.seq = prng.below(256) as u8;
    built.generations = (0..24).map(|_| 1 + prng.below(5)).collect();
    built.head = (prng.below(3) as u32, prng.below(6000) as u32 * 8);
    built.log = vec![built.head.0];
    built.key_tail = built.head;
    built.dirty_tail = built.head;
    // Per sector: `None` is the origin's data; whether it is in the cache, and the origin's data.
    let mut cached: Vec<Option<u8>> = vec![None; SECTORS];
    let mut drained = vec![0xEE_u8; SECTORS];
    let mut used = std::collections::BTreeSet::new();
    let mut offsets = [0_u32; 24];
    let sets = prng.below(150);
    let dirty_from = prng.below(sets + 1);
    for nth in 0..sets {
        if nth == dirty_from {
            built.dirty_tail = built.head;
        }
        let is_dirty = nth >= dirty_from;
        let mut keys = Vec::new();
        let most = if prng.one_in(10) { 129 } else { 6 };
        for _ in 0..prng.below(most) {
            let first = prng.below(SECTORS as u64) as usize;
            let count = (1 + prng.below(12) as usize).min(SECTORS - first);
            let is_stale = !is_dirty && prng.one_in(10);
            let is_clean = prng.one_in(5);
            let segment = 12 + prng.below(12) as u32;
            let place = &mut offsets[segment as usize];
            if *place + count as u32 * 512 > 53248 {
                continue;
            }
            let fill = prng.below(250) as u8;
            let flags = if is_clean { CLEAN } else { 0 };
            let data = vec![fill; count * 512];
            let mut key = built.key(first as u64 * 512, segment, *place, &data, flags);
            *place += count as u32 * 512;
            if is_stale {
                key.generation -= 1;
                key.crc ^= 1;
            } else {
                used.insert(segment);
            }
            for sector in first..first + count {
                let was = cached[sector];
                match (is_stale, is_clean) {
                    (true, _) => cached[sector] = None,
                    (_, true) => cached[sector] = was.or(Some(fill)),
                    _ => cached[sector] = Some(fill),
                }
                if is_dirty && !is_clean {
                    drained[sector] = fill;
                }
            }
            keys.push(key);
        }
        let next = built.log.last().copied().unwrap_or(0) % 11 + 1;
        built.append(&keys, next);
    }
    if dirty_from == sets {
        built.dirty_tail = built.head;
    }
    let read = cached.iter().map(|sector| sector.unwrap_or(0xEE)).collect();
    used.extend(&built.log);
    Case { read, drained, used: used.len() as u32, built }
}

#[test]
fn random_logs_mean_what_the_specification_says() {
    for seed in 0..250 {
        let mut prng = Prng::new(seed);
        let has_crc = prng.one_in(3);
        let Case { built, read, drained, used } = case(&mut prng, has_crc);
        if built.log.len() > 11 {
            continue;
        }
        let table = if has_crc { "C B 2 data_crc true" } else { "C B 0" };
        let mut fixture = Fixture::of_image(&built.finish(), table);
        fixture.try_open(false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let status = fixture.target().status();
        let at = |place: (u32, u32)| format!("{}:{}", place.0, place.1);
        let expected = format!(
            "0 24 24 {used} 70 {:x} {} {} {}",
            0x1182 | u32::from(has_crc),
            at(built.head),
            at(built.dirty_tail),
            at(built.key_tail)
        );
        assert_eq!(status, expected, "seed {seed}");
        for (sector, expected) in read.iter().enumerate() {
            let found = fixture.read(sector as u64 * 512, 512);
            assert!(found == [*expected; 512], "seed {seed}: sector {sector}: {}", found[0]);
        }
        fixture.drain();
        let image = fixture.disk.image();
        for (sector, expected) in drained.iter().enumerate() {
            let found = &image[sector * 512..][..512];
            assert!(found == [*expected; 512], "seed {seed}: drained {sector}: {}", found[0]);
        }
    }
}

/// Opens whatever it is and, if that works, uses it for a while.
fn use_it(image: &[u8], table: &'static str) {
    let pmem = SimPmem::from_image(image, Persistence::Cpu);
    let _ = inspect(Arc::new(pmem), SMALL);
    let mut fixture = Fixture::of_image(image, table);
    if fixture.try_open(false).is_err() {
        return;
    }
    let _ = fixture.try_read(0, SECTORS * 512);
    for second in 0..4 {
        fixture.tick(SECOND * second);
    }
    let _ = (fixture.target().status(), fixture.target().facts());
}

fn seal(image: &mut [u8], at: usize, len: usize) {
    let sum = udm::base::crc::pcache_crc(&image[at + 4..at + len]);
    image[at..at + 4].copy_from_slice(&sum.to_le_bytes());
}

#[test]
fn flipped_bits_anywhere_never_panic() {
    let mut prng = Prng::new(77);
    for round in 0..40 {
        let has_crc = round % 2 == 0;
        let table = if has_crc { "C B 2 data_crc true" } else { "C B 0 log_damage truncate" };
        let built = case(&mut prng, has_crc).built;
        let image = built.finish();
        for _ in 0..40 {
            let mut image = image.clone();
            for _ in 0..1 + prng.below(4) {
                let at = match prng.below(4) {
                    0 => prng.below(20480) as usize,
                    1 => built.segment_at(prng.below(24) as u32) + prng.below(8300) as usize,
                    2 => built.place(built.key_tail.0, built.key_tail.1) + prng.below(600) as usize,
                    _ => prng.below(image.len() as u64) as usize,
                };
                let at = at.min(image.len() - 1);
                image[at] ^= 1 << prng.below(8);
            }
            use_it(&image, table);
        }
    }
}

#[test]
fn wrong_numbers_under_right_checksums_never_panic() {
    let mut prng = Prng::new(78);
    let odd = |prng: &mut Prng| match prng.below(6) {
        0 => u32::MAX - prng.below(600) as u32,
        1 => 53248 - prng.below(64) as u32,
        2 => prng.below(30) as u32,
        3 => 1 << prng.below(32),
        4 => prng.below(128) as u32 * 8,
        _ => prng.next_u64() as u32,
    };
    for _ in 0..1500 {
        let mut built = case(&mut prng, false).built;
        for _ in 0..prng.below(3) {
            let mut key = Key {
                off: u64::from(odd(&mut prng)) << prng.below(33),
                len: odd(&mut prng),
                flags: if prng.one_in(4) { odd(&mut prng) } else { 0 },
                segment: odd(&mut prng),
                at: odd(&mut prng),
                generation: u64::from(odd(&mut prng)),
                crc: 0,
            };
            if prng.one_in(2) {
                (key.len, key.at, key.segment) = (512, 512 * prng.below(104) as u32, 20);
                key.generation = built.generations[20];
            }
            if built.head.1 + 200 < built.data_bytes() {
                match prng.one_in(4) {
                    true => built.append_raw(&last(odd(&mut prng))),
                    false => built.append_raw(&kset(&[key])),
                }
            }
        }
        let mut image = built.finish();
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        match prng.below(8) {
            0 => put(16384, &tail(built.seq, (odd(&mut prng), odd(&mut prng)))),
            1 => put(16432, &tail(built.seq, (odd(&mut prng), odd(&mut prng)))),
            2 => put(12288, &cache_info(built.seq, odd(&mut prng), odd(&mut prng), 0xFFFF_FFFE)),
            3 => put(12288, &cache_info(built.seq, built.chain[0], prng.below(25) as u32, 2)),
            4 => {
                let info = meta(built.seq, 0, &[odd(&mut prng), odd(&mut prng)]);
                put(built.segment_at(prng.below(24) as u32), &info);
            }
            5 => {
                let generation = meta(built.seq, 0, &[odd(&mut prng), odd(&mut prng)]);
                put(built.segment_at(prng.below(24) as u32) + 8208, &generation);
            }
            _ => {}
        }
        use_it(&image, "C B 0");
    }
}

#[test]
fn wrong_numbers_on_our_label_never_panic() {
    let mut fixture = Fixture::new(crate::fixture::Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    let image = fixture.pmem.image();
    let mut prng = Prng::new(79);
    for _ in 0..1000 {
        let mut image = image.clone();
        for _ in 0..1 + prng.below(6) {
            let at = prng.below(2048) as usize / 8 * 8;
            let value = match prng.below(3) {
                0 => u64::MAX - prng.below(3),
                1 => prng.below(200),
                _ => prng.next_u64(),
            };
            if at != 8 {
                image[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
        for slot in [0, 2048] {
            seal(&mut image, slot, 2048);
        }
        use_it(&image, "C B 0 rebind true");
    }
}
