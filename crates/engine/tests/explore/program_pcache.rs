//! The actions of clients and of the environment on a pcache: short written programs, and random
//! ones from a seed.

use udm::prng::Prng;

use crate::elsewhere::What;
use crate::model::SLOTS;
use crate::program::Step::{self, *};
use crate::program::{fua, r, range, w, z};

/// The written cases, by number.
pub fn written(nth: usize) -> Vec<Step> {
    match nth.checked_sub(SHORT.len()) {
        None => SHORT[nth].to_vec(),
        Some(0) => long_log(),
        Some(1) => laps(),
        Some(2) => hot_laps(),
        Some(3) => pressed_laps(),
        Some(4) => outlived(),
        Some(5) => zeroed_again(),
        Some(6) => hidden_laps(),
        Some(_) => log_laps(),
    }
}

/// How many there are.
pub const WRITTEN: usize = SHORT.len() + 8;

const SHORT: &[&[Step]] = &[
    &[],
    &[w(0, 2), w(12, 2), Flush, w(0, 1), fua(13, 1), w(1, 1)],
    &[w(0, 3), z(1, 1), Flush, z(12, 2), fua(1, 1), Drain, w(0, 1)],
    &[w(0, 1), Flush, w(1, 1), Flush, w(0, 2), Flush, Tick(20), Tick(20), w(2, 1)],
    &[w(0, 1), w(12, 1), Flush, w(0, 1), HoldWrites, Tick(20), OneWrite, w(1, 1), Flush, OneWrite],
    &[w(0, 2), Flush, FailFlush, Tick(20), w(0, 1), Flush, Tick(30), Drain],
    &[w(0, 2), w(4, 1), Flush, FailWrite, Tick(20), Tick(30), Drain, w(4, 1)],
    &[r(0, 4), HoldReads, r(4, 4), w(5, 1), Release, Flush, Check, Kill, w(6, 1), Check],
    &[w(0, 2), w(12, 1), Kill, w(1, 2), Kill, Flush, w(0, 1), Remove, w(2, 1)],
    &[Percent(0), w(0, 4), Flush, Drain, Percent(33), w(0, 1), Kill, Percent(5), w(1, 1)],
    &[w(0, 2), Flush, w(0, 1), w(3, 1), Reformat, w(0, 1), Flush],
    &[w(11, 1), fua(12, 4), Write { first: 12, count: 8, fua: true }, z(12, 8), Flush],
    &[w(0, 2), Flush, Kernel(What::TwoFlushes { first: 3, second: 4 }), Tick(20), w(0, 1), Flush],
    &[w(0, 8), Flush, w(0, 2), Flush, Drain, Kernel(What::StaleKeys), Check, w(0, 1), Drain],
    &[w(0, 2), Flush, Kernel(What::CleanBehindDirty { slot: 1 }), Check, Drain, Check],
    &[Percent(0), w(0, 2), Flush, Kernel(What::CleanBehindDirty { slot: 1 }), Check, Drain, Check],
    &[r(0, 4), Flush, w(0, 1), Flush, Drain, r(0, 8), Tick(20), w(1, 1), Flush, Kill],
    &[
        w(0, 1),
        Flush,
        Kernel(What::TwoFlushes { first: 0, second: 1 }),
        Kernel(What::TwoFlushes { first: 1, second: 0 }),
        HoldWrites,
        Tick(20),
        OneWrite,
        Release,
    ],
    // Overwritten before it is written back: with the newer version in memory only, logged after a
    // flush, and logged without one.
    &[w(0, 2), Flush, Tick(25), w(0, 2), w(3, 1), Tick(11), w(0, 1), Drain, w(1, 1)],
    &[w(0, 2), Tick(11), w(0, 1), Flush, w(1, 1), w(12, 1), Tick(11), w(0, 2), Drain, Kill],
];

/// Enough FUA writes to take the log through a segment and into the next one.
fn long_log() -> Vec<Step> {
    let mut steps = vec![Percent(0)];
    for nth in 0..50 {
        steps.push(fua(nth % 11, 1 + nth % 2));
        if nth % 16 == 15 {
            steps.push(Tick(20));
        }
    }
    steps.push(Drain);
    steps.extend([fua(3, 2), w(12, 4), Flush]);
    steps
}

/// Data goes round the segments more than once; zeroes lie where other data was.
fn laps() -> Vec<Step> {
    let mut steps = vec![Percent(0)];
    for nth in 0..12 {
        steps.extend([w(nth % 5, 8), Flush]);
        if nth % 2 == 1 {
            steps.push(Drain);
        }
    }
    steps.extend([z(2, 2), Flush, w(0, 3), Flush, Drain, z(13, 3), w(1, 2), Flush]);
    steps
}

/// Some slots are read again and again while data passes through the segments: they are moved, kept
/// in place by later servers, and written again in between.
fn hot_laps() -> Vec<Step> {
    let mut steps = vec![w(12, 4), Flush, r(12, 4), r(12, 4), r(12, 4), Drain];
    for nth in 0..14 {
        steps.extend([w(nth % 5, 7), Flush, Drain, r(12, 4)]);
        match nth {
            4 | 11 => steps.push(Remove),
            6 | 9 => steps.extend([w(13, 1), Flush, r(12, 4), r(12, 4)]),
            7 => steps.push(Kill),
            _ => {}
        }
    }
    steps.push(Check);
    steps
}

/// Hot data yields: write-back hangs while more is written than was free, so that writes and the
/// background drop clean data, and move the hottest; then the origin continues.
fn pressed_laps() -> Vec<Step> {
    let mut steps = vec![w(12, 4), Flush, r(12, 4), r(12, 4), r(12, 4), Drain];
    for nth in 0..7 {
        steps.extend([w(nth % 5, 7), Flush, Drain, r(12, 4), r(12, 4), r(12, 4)]);
    }
    for nth in 0..4 {
        steps.extend([HoldWrites, w(nth, 4), Flush, Tick(11), w(nth + 4, 4), Flush, w(nth, 2)]);
        steps.extend([Flush, w(13, 1), Flush, Tick(1), w(nth + 1, 3), OneWrite, Flush, Release]);
        steps.extend([Drain, r(12, 4), r(12, 4), r(12, 4), w(nth, 4), Flush, Drain]);
        if nth == 2 {
            steps.push(Kill);
        }
    }
    steps.push(Check);
    steps
}

/// While a long log is being replayed, newer data passes through the segments; an older version of
/// it is in the log before the hot data and shares a segment with it.
fn outlived() -> Vec<Step> {
    let mut steps = vec![Remove, z(0, 1), w(8, 1), Flush, Drain];
    for nth in 0..50 {
        steps.push(Zero { first: nth % 4, count: 1, fua: true });
    }
    steps.extend([Drain, w(12, 1), Flush, Kill, w(8, 2), Flush, Drain]);
    for nth in 0..16 {
        steps.extend([w(nth % 4 * 2, 2), Flush, Drain]);
    }
    steps.extend([Tick(250), r(8, 1), Check]);
    steps
}

/// A slot is zeroed, written and zeroed again, so two keys name the same place. The first two are
/// written back; the last write fails and is tried again when collection has passed the first key.
fn zeroed_again() -> Vec<Step> {
    let mut steps = vec![z(12, 1), Flush, w(12, 1), Flush, z(12, 1), HoldWrites, Tick(11)];
    steps.extend([OneWrite, OneWrite, Tick(11), OneWrite, OneWrite, Tick(11), FailWrite, OneWrite]);
    steps.extend((0..20).flat_map(|nth| [w(nth % 4, 8), Tick(1)]));
    steps.extend([Check, Release, Drain, Check]);
    steps.extend((0..12).flat_map(|nth| [w(nth % 4, 8), Flush, Drain]));
    steps.push(Check);
    steps
}

/// Data goes round the segments in front of a CLEAN key that dirty keys hide: collection passes
/// few keys at a time.
fn hidden_laps() -> Vec<Step> {
    let mut steps = vec![w(0, 2), Flush, Kernel(What::CleanBehindDirty { slot: 1 }), Check, Drain];
    steps.extend((0..12).flat_map(|_| [w(4, 8), Flush, Drain]));
    steps.push(Check);
    steps
}

/// The log passes through all segments and reaches its own earlier records: zeroes take only log
/// space.
fn log_laps() -> Vec<Step> {
    let mut steps = vec![Percent(0)];
    for nth in 0..330 {
        steps.push(match nth % 8 {
            0 => fua(nth % 11, 1),
            _ => Zero { first: nth % 11, count: 1, fua: true },
        });
        if nth % 24 == 23 {
            steps.push(Tick(20));
        }
    }
    steps
}

/// A random program of `len` steps.
pub fn random(prng: &mut Prng, len: usize, has_kernel: bool) -> Vec<Step> {
    let mut steps = Vec::with_capacity(len);
    if prng.one_in(2) {
        steps.push(Percent(0));
    }
    // Few slots meet often; bulk goes round the segments.
    let is_bulky = prng.one_in(2);
    let is_syncing = prng.one_in(3);
    while steps.len() < len {
        let longest = if is_bulky { 8 } else { 3 };
        let (first, count) = range(prng, longest);
        let step = match prng.below(100) {
            0..40 => Write { first, count, fua: prng.one_in(if is_syncing { 2 } else { 8 }) },
            40..46 => Zero { first, count, fua: prng.one_in(4) },
            46..64 => Flush,
            64..69 => r(first, count),
            69..71 => HoldReads,
            71..74 => HoldWrites,
            74..78 => OneWrite,
            78..81 => Release,
            81..89 => Tick([1, 11, 25][prng.below(3) as usize]),
            89 => FailWrite,
            90 => FailFlush,
            91..93 => Drain,
            93..95 => Remove,
            95..97 => Kill,
            97 => Percent(prng.below(91) as u32),
            98 if prng.one_in(3) => Reformat,
            _ if has_kernel => Kernel(match prng.below(3) {
                0 => What::StaleKeys,
                1 => What::CleanBehindDirty { slot: first },
                _ => What::TwoFlushes { first, second: prng.below(SLOTS as u64) as usize },
            }),
            _ => Flush,
        };
        steps.push(step);
    }
    steps
}
