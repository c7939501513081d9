//! The actions of clients and of the environment on a cache: short written programs, and random
//! ones.

use udm::bio::Op;
use udm::prng::Prng;

use crate::of_cache::BLOCKS;
use crate::program::Step::{self, *};
use crate::program::{fua, r, range, w, z};

/// The explorer's blocks are cached, and the metadata has their mappings.
const FIRST: Step = Bring(BLOCKS[0]);
const SECOND: Step = Bring(BLOCKS[1]);
const NAMED: Step = Tick(11);

const fn post(first: usize, count: usize) -> Step {
    Post { first, count, fua: false }
}

const fn post_fua(first: usize, count: usize) -> Step {
    Post { first, count, fua: true }
}

/// The written cases.
pub const CASES: &[&[Step]] = &[
    &[],
    &[w(0, 2), w(12, 2), Flush, w(0, 2), fua(14, 2), w(2, 2)],
    // Blocks come, become dirty, and are written back.
    &[w(0, 3), Flush, FIRST, NAMED, w(0, 2), fua(1, 1), w(2, 2), Flush, SECOND, w(12, 2), Check],
    &[w(0, 3), FIRST, w(0, 2), Flush, NAMED, w(0, 2), Tick(25), w(1, 2), Flush, Drain, w(0, 1)],
    &[FIRST, NAMED, w(0, 4), Flush, Tick(15), w(4, 2), Tick(130), w(0, 2), Flush, Tick(20), Check],
    &[FIRST, SECOND, NAMED, w(10, 2), w(12, 4), fua(13, 2), Tick(25), w(12, 1), Flush, Drain],
    // Data is overwritten while it is written back.
    &[
        FIRST,
        NAMED,
        w(0, 3),
        Flush,
        HoldWrites,
        Tick(15),
        post(0, 2),
        OneWrite,
        post(1, 1),
        OneWrite,
        Release,
        Flush,
        Tick(15),
        HoldWrites,
        Tick(15),
        Kill,
        Check,
    ],
    // One leaves for the other; others come in between.
    &[FIRST, NAMED, w(0, 2), Flush, SECOND, NAMED, w(12, 2), Flush, FIRST, w(0, 2), Check, Flush],
    &[FIRST, SECOND, NAMED, w(0, 2), w(12, 2), Flush, Seek(5), Seek(6), NAMED, w(0, 1), Seek(7)],
    &[FIRST, NAMED, w(0, 2), Tick(25), Seek(3), Seek(4), NAMED, w(0, 2), Flush, Seek(3), Check],
    // The server dies, or ends.
    &[FIRST, NAMED, w(0, 2), Kill, w(1, 1), Kill, Flush, w(0, 2), Remove, w(2, 1), Kill, Check],
    &[w(0, 2), FIRST, w(0, 2), Remove, w(0, 1), Flush, Remove, Drain, Remove, w(1, 1), Check],
    &[FIRST, NAMED, w(0, 3), Flush, Tick(25), Remove, w(0, 2), Kill, Drain, Kill, w(12, 2), Flush],
    &[FIRST, SECOND, NAMED, w(0, 2), w(12, 2), Rest, w(1, 2), Flush, Rest, Drain, Rest, w(0, 1)],
    &[w(0, 2), FIRST, w(0, 2), Reformat, w(0, 2), FIRST, NAMED, w(1, 1), Flush, Reformat, Check],
    // Zeroes, and whole blocks.
    &[FIRST, NAMED, w(0, 4), z(1, 2), Flush, z(12, 2), w(2, 1), Drain, z(0, 2), w(0, 1), Flush],
    &[FIRST, NAMED, w(0, 12), Flush, w(3, 2), Tick(25), z(0, 12), Flush, w(2, 2), Tick(20), Check],
    &[z(0, 12), w(0, 12), Flush, FIRST, NAMED, z(0, 12), w(1, 1), Kill, z(2, 4), Flush, Drain],
    &[w(0, 12), w(0, 12), w(0, 12), w(1, 2), Flush, z(0, 12), w(0, 12), Tick(15), w(0, 12), Kill],
    // Several requests in flight, and commits that are cut off.
    &[FIRST, NAMED, HoldCache, post(0, 2), post(2, 2), PostFlush, OneCache, OneCache, Release],
    &[
        FIRST,
        NAMED,
        HoldCache,
        post_fua(0, 2),
        post(12, 2),
        OneCache,
        OneCache,
        post(4, 2),
        PostFlush,
        OneCache,
        OneCache,
        OneCache,
        Kill,
        Check,
    ],
    &[
        FIRST,
        SECOND,
        NAMED,
        HoldFlushes,
        post(0, 2),
        PostFlush,
        post(12, 1),
        Release,
        Flush,
        HoldFlushes,
        post(0, 1),
        Kill,
    ],
    &[FIRST, NAMED, w(0, 2), HoldWrites, post(12, 8), PostFlush, LastWrite, OneWrite, Kill, Check],
    // A write to a block while it is promoted.
    &[Begin(BLOCKS[0]), post(0, 2), OneCache, post(20 - 8, 2), OneCache, Release, Flush, Check],
    &[Begin(BLOCKS[0]), post(0, 12), OneCache, OneCache, PostFlush, OneCache, Release, w(0, 1)],
    &[
        Begin(BLOCKS[0]),
        HoldWrites,
        post(1, 2),
        OneCache,
        OneCache,
        LastWrite,
        Release,
        NAMED,
        w(1, 1),
        Flush,
        Kill,
        Check,
    ],
    // A block is demoted during a write or a read of it.
    &[
        FIRST,
        NAMED,
        Tick(15),
        HoldCache,
        Begin(BLOCKS[1]),
        post(0, 2),
        r(0, 2),
        OneCache,
        OneCache,
        OneCache,
        post(12, 1),
        OneCache,
        Release,
        Flush,
        Check,
    ],
    // Devices fail.
    &[FIRST, NAMED, w(0, 2), FailWrite, Tick(15), Tick(30), w(0, 1), Flush, Drain, Check],
    &[FIRST, NAMED, w(0, 2), FailFlush, Tick(15), Flush, Tick(30), w(0, 1), Flush, Drain, Check],
    &[w(0, 2), FailFlush, Flush, FIRST, NAMED, w(0, 1), Flush, Kill, w(1, 1), Flush, Drain],
    &[w(0, 2), w(12, 2), FailFlush, FIRST, NAMED, SECOND, NAMED, w(2, 1), Flush, Tick(30), Check],
    &[FIRST, NAMED, FailWrite, w(12, 4), w(0, 2), Flush, FailFlush, fua(12, 2), w(12, 2), Flush],
    &[FIRST, NAMED, FailCache(Op::Write), w(0, 2), w(1, 2), Flush, Tick(30), w(0, 1), Flush, Kill],
    &[FIRST, NAMED, w(0, 2), FailCache(Op::Flush), Flush, w(0, 1), Flush, Tick(30), Kill, Check],
    &[FIRST, FailCache(Op::Write), NAMED, w(0, 2), Flush, Tick(30), w(0, 2), Flush, Kill, Check],
    &[FIRST, FailCache(Op::Flush), NAMED, w(0, 2), Flush, Tick(30), w(0, 2), Flush, Kill, Check],
    &[
        FIRST,
        NAMED,
        w(0, 2),
        Flush,
        Drain,
        FailCache(Op::Write),
        w(0, 1),
        fua(2, 2),
        Tick(30),
        SECOND,
        Check,
        Remove,
        Check,
    ],
    // Settings.
    &[
        FIRST,
        NAMED,
        Message("migration_threshold 0"),
        w(0, 2),
        Tick(25),
        Message("migration_threshold 64"),
        Tick(25),
        w(0, 1),
        Flush,
    ],
];

/// A random program of `len` steps.
pub fn random(prng: &mut Prng, len: usize) -> Vec<Step> {
    let mut steps = Vec::with_capacity(len);
    let longest = if prng.one_in(2) { 8 } else { 3 };
    let is_syncing = prng.one_in(3);
    let fails = prng.one_in(3);
    let block = |prng: &mut Prng| match prng.below(5) {
        0..3 => BLOCKS[0],
        3 => BLOCKS[1],
        _ => 1 + prng.below(3),
    };
    while steps.len() < len {
        let (first, count) = match prng.one_in(12) {
            true => (0, 12),
            false => range(prng, longest),
        };
        let fua = prng.one_in(if is_syncing { 2 } else { 8 });
        let step = match prng.below(100) {
            0..24 => Write { first, count, fua },
            24..29 => Zero { first, count, fua },
            29..39 => Flush,
            39..42 => Read { first, count },
            42..51 => Seek(block(prng)),
            51..53 => Begin(block(prng)),
            53..56 => HoldWrites,
            56..60 => OneWrite,
            60 => LastWrite,
            61..64 => HoldCache,
            64..69 => OneCache,
            69 => HoldFlushes,
            70..73 => Release,
            73..80 => Tick([1, 11, 15, 25, 130][prng.below(5) as usize]),
            80..82 => Drain,
            82..84 => Remove,
            84..86 => Kill,
            86 => Rest,
            87..93 => Post { first, count, fua },
            93 => PostFlush,
            94 => PostZero { first, count },
            95 if fails => FailWrite,
            96 if fails => FailFlush,
            97 if fails => FailCache([Op::Write, Op::Flush][prng.below(2) as usize]),
            98 => {
                Message(["migration_threshold 0", "migration_threshold 64"][prng.below(2) as usize])
            }
            _ => Write { first, count, fua },
        };
        steps.push(step);
    }
    steps
}
