//! The meaning of a seed: a target, and the program that runs on it.

use std::ops::Range;
use std::sync::Arc;

use udm::pmem::Persistence;
use udm::prng::Prng;

use crate::of_cache::CacheKind;
use crate::of_pcache::PcacheKind;
use crate::of_writecache::WritecacheKind;
use crate::program::{Step, with_others};
use crate::program_pcache::{WRITTEN, random, written};
use crate::subject::{Ground, Kind};
use crate::{program_cache, program_writecache};

/// Seeds of pcache's histories in the normal run. Its mutants must be killed within them.
pub const PCACHE: Range<u64> = 0..480 + ADAPTIVE;
/// The last ones of them, this many, have the order `adaptive`.
const ADAPTIVE: u64 = 40;
/// Long histories of pcache that once found a defect; part of the normal run.
pub const PCACHE_REGRESSIONS: [u64; 1] = [
    // A server died owing the mark after what it had found; the next one logged its keys first.
    6_000_031,
];
/// From here on, seeds mean long histories, tried harder.
pub const LONG_FROM: u64 = 1_000_000;
const TABLES: [&str; 3] = ["C B 0", "C B 2 data_crc true", "C B 2 writeback_order fast"];
const ADAPTIVE_TABLE: &str = "C B 2 writeback_order adaptive";

/// The first ones are the written programs, without and with data CRCs.
fn of_pcache(seed: u64) -> Case {
    let mut prng = Prng::new(seed);
    if seed < 2 * WRITTEN as u64 {
        let (table, nth) = (seed as usize / WRITTEN, seed as usize % WRITTEN);
        let segments = if nth + 1 == WRITTEN { 7 } else { 10 };
        let kind = PcacheKind::new(segments, Persistence::Cpu, TABLES[table]);
        return (Arc::new(kind), written(nth));
    }
    let segments = 8 + prng.below(5);
    let persistence = if prng.one_in(4) { Persistence::Msync } else { Persistence::Cpu };
    let table = TABLES[[0, 0, 0, 1, 1, 2][prng.below(6) as usize]];
    let is_adaptive = match seed < LONG_FROM {
        true => (PCACHE.end - ADAPTIVE..PCACHE.end).contains(&seed),
        false => seed % 8 == 3,
    };
    let table = if is_adaptive { ADAPTIVE_TABLE } else { table };
    let longest = if seed < LONG_FROM { 40 } else { 120 };
    let len = 6 + prng.below(longest) as usize;
    let has_kernel = prng.one_in(3);
    let kind = PcacheKind::new(segments, persistence, table);
    let program = random(&mut prng, len, has_kernel);
    (Arc::new(kind), maybe_with_others(seed, &mut prng, program, false))
}

/// Seeds of writecache's histories in the normal run.
pub const WRITECACHE: Range<u64> = 500_000..501_000;
/// As `PCACHE_REGRESSIONS`, of writecache.
pub const WRITECACHE_REGRESSIONS: [u64; 3] = [
    // A kernel wrote where a write had failed before: a defect of the explorer.
    20_261_122_000_668,
    // A server died with a flush of the origin in flight. It lost writes that had bypassed the
    // cache, although the next server's flush succeeded: no server can prevent that.
    20_261_125_002_434,
    // A kernel committed without having freed what a failed commit had left: no kernel does.
    20_261_127_006_082,
];
const GROUNDS: [Ground; 3] =
    [Ground::Disk, Ground::Memory(Persistence::Cpu), Ground::Memory(Persistence::Msync)];
const OPTIONS: [&str; 8] = [
    "0",
    "0",
    "2 autocommit_blocks 3",
    "2 max_age 500",
    "4 high_watermark 20 low_watermark 20",
    "2 start_sector 3",
    "2 autocommit_blocks 0",
    "2 high_watermark 100",
];

/// Half of the long histories have other clients at work; histories that once found a defect are
/// not changed.
fn maybe_with_others(seed: u64, prng: &mut Prng, program: Vec<Step>, is_disk: bool) -> Vec<Step> {
    let is_old = PCACHE_REGRESSIONS.contains(&seed) || WRITECACHE_REGRESSIONS.contains(&seed);
    match seed >= LONG_FROM && !is_old && prng.one_in(2) {
        true => with_others(prng, program, is_disk),
        false => program,
    }
}

/// Whether `make test` explores this seed of `range` too: all written programs, and each fourth of
/// the random ones. `make prove` explores all, and shows that this part kills nearly every mutant.
pub fn is_in_short_form(seed: u64, range: Range<u64>) -> bool {
    let nth = seed - range.start;
    let written = match range.start {
        start if start == PCACHE.start => 2 * WRITTEN,
        start if start == WRITECACHE.start => 6 * program_writecache::CASES.len(),
        _ => CACHE_LINES.len() * program_cache::CASES.len(),
    };
    nth < written as u64 || nth.is_multiple_of(4)
}

/// Seeds of long histories with this remainder of a division by 8 are cache's.
const CACHE_REMAINDER: u64 = 5;
/// Seeds of cache's histories in the normal run.
pub const CACHE: Range<u64> = 700_000..700_800;
/// The tables of a history, with the blocks of the cache.
const CACHE_LINES: [&[(u64, &str)]; 7] = [
    &[(2, "1 metadata2 smq 0")],
    &[(1, "0 default 0")],
    &[(2, "2 metadata2 writethrough smq 0")],
    &[(3, "1 metadata2 probation 0")],
    &[(3, "1 metadata2 smq 0"), (1, "1 metadata2 smq 2 migration_threshold 64"), (2, "0 mq 0")],
    &[(2, "0 smq 0"), (2, "1 writethrough smq 0"), (2, "1 passthrough smq 0"), (2, "0 cleaner 0")],
    &[(2, "2 metadata2 no_discard_passdown probation 0"), (1, "1 writethrough probation 0")],
];

/// The first ones are the written programs, with each of the tables.
fn of_cache(seed: u64) -> Case {
    let cases = program_cache::CASES;
    let nth = (seed - CACHE.start) as usize;
    if let Some(lines) = CACHE_LINES.get(nth / cases.len()) {
        return (Arc::new(CacheKind::new(lines)), cases[nth % cases.len()].to_vec());
    }
    let mut prng = Prng::new(seed);
    let lines = CACHE_LINES[prng.below(CACHE_LINES.len() as u64) as usize];
    let longest = if seed < LONG_FROM { 40 } else { 120 };
    let len = 6 + prng.below(longest) as usize;
    (Arc::new(CacheKind::new(lines)), program_cache::random(&mut prng, len))
}

/// A target and its program.
pub type Case = (Arc<dyn Kind>, Vec<Step>);

pub fn case(seed: u64) -> Case {
    if CACHE.contains(&seed) || seed >= LONG_FROM && seed % 8 == CACHE_REMAINDER {
        return of_cache(seed);
    }
    let is_writecache = match seed < LONG_FROM {
        true => seed >= WRITECACHE.start,
        false => seed.is_multiple_of(2),
    };
    if is_writecache { of_writecache(seed) } else { of_pcache(seed) }
}

/// The first ones are the written programs: over a disk, where blocks are overwritten or are not,
/// and over memory; with blocks of one sector and of two.
fn of_writecache(seed: u64) -> Case {
    let cases = program_writecache::CASES;
    let nth = seed.wrapping_sub(WRITECACHE.start) as usize;
    if nth < 6 * cases.len() {
        let (variant, nth) = (nth / cases.len(), nth % cases.len());
        // The last one needs entries in two sectors, the one before it a long list of them.
        let blocks = match cases.len() - nth {
            1 => 33,
            2 => 110,
            _ => 13,
        };
        let (ground, options) = [
            (Ground::Disk, "0"),
            (Ground::Memory(Persistence::Cpu), "0"),
            (Ground::Disk, ["0 atomic_blocks true", "0 atomic_blocks false"][variant / 3]),
        ][variant % 3];
        let kind = WritecacheKind::new(ground, 512 << (variant / 3), blocks, options);
        return (Arc::new(kind), cases[nth].to_vec());
    }
    let mut prng = Prng::new(seed);
    let ground = GROUNDS[[0, 0, 0, 1, 1, 2][prng.below(6) as usize]];
    let block_bytes = if prng.one_in(3) { 1024 } else { 512 };
    let blocks = [9, 13, 27, 33][prng.below(4) as usize];
    let mut options = OPTIONS[prng.below(OPTIONS.len() as u64) as usize].to_string();
    if ground == Ground::Disk && prng.one_in(2) {
        options += ["", " atomic_blocks true", " atomic_blocks false"][prng.below(3) as usize];
    }
    let kind = WritecacheKind::new(ground, block_bytes, blocks, &options);
    let longest = if seed < LONG_FROM { 40 } else { 120 };
    let len = 6 + prng.below(longest) as usize;
    let has_kernel = prng.one_in(3);
    let is_disk = ground == Ground::Disk;
    let program = program_writecache::random(&mut prng, len, has_kernel, is_disk);
    (Arc::new(kind), maybe_with_others(seed, &mut prng, program, is_disk))
}
