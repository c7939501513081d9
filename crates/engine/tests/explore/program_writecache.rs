//! The actions of clients and of the environment on a writecache: short written programs, and
//! random ones.

use udm::bio::Op;
use udm::prng::Prng;

use crate::elsewhere::What;
use crate::model::SLOTS;
use crate::program::Step::{self, *};
use crate::program::{fua, r, range, w, z};

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
    &[w(0, 4), z(2, 2), Flush, z(12, 2), fua(2, 2), Drain, w(0, 2), Flush],
    // Versions: committed, uncommitted, overwritten while they are written back.
    &[w(0, 2), Flush, w(0, 2), w(0, 2), Flush, Tick(20), w(0, 2), Tick(20), Flush, Drain],
    &[
        w(0, 2),
        w(2, 2),
        Flush,
        HoldWrites,
        Message("flush"),
        Tick(1),
        w(0, 2),
        OneWrite,
        w(0, 2),
        Flush,
        OneWrite,
        Release,
        Drain,
    ],
    &[w(0, 2), Flush, FailFlush, Message("flush"), Tick(20), w(0, 2), Flush, Tick(30), Drain],
    &[w(0, 2), w(4, 2), Flush, FailWrite, Message("flush"), Tick(20), Tick(30), Drain, w(4, 2)],
    // The process dies with uncommitted blocks, more than once.
    &[w(0, 2), w(12, 2), Kill, w(2, 2), Kill, Flush, w(0, 2), Remove, w(2, 2), Kill, Check],
    &[w(0, 2), Flush, w(0, 2), Kill, Kill, w(0, 2), Flush, w(2, 2), Kill, Tick(25), Check],
    // The cache is too small; slots are reused, while reads of them are under way.
    &[w(0, 12), Flush, w(12, 8), Flush, w(0, 12), Flush, w(12, 8), Flush, Check],
    &[w(0, 8), Flush, HoldReads, r(0, 8), Drain, w(12, 8), w(8, 4), Flush, Release, Check],
    &[w(0, 8), Flush, Drain, w(12, 8), Flush, Drain, w(0, 8), Kill, Check, Flush],
    // Several requests in flight.
    &[HoldCache, post(0, 2), post(2, 2), PostFlush, OneCache, OneCache, OneCache, Release, Check],
    &[HoldCache, post_fua(0, 2), post_fua(2, 2), OneCache, OneCache, post(4, 2), Release, Kill],
    &[
        w(0, 2),
        HoldCache,
        PostFlush,
        OneCache,
        post(0, 2),
        OneCache,
        PostFlush,
        OneCache,
        OneCache,
        Kill,
        Check,
    ],
    &[HoldCache, post(0, 2), post(0, 2), OneCache, Kill, Check, w(0, 2), Flush],
    &[HoldCache, post(0, 2), r(0, 2), post(0, 4), OneCache, r(0, 4), OneCache, Release, Check],
    // Discards: of committed and uncommitted versions, and of those under write-back.
    &[w(0, 4), Flush, w(0, 2), z(0, 4), w(2, 2), Flush, Drain, Check],
    &[w(0, 4), Flush, HoldWrites, Message("flush"), Tick(1), z(0, 4), w(0, 2), Release, Flush],
    &[w(0, 2), Flush, w(0, 2), Flush, z(0, 2), Flush, Message("cleaner"), w(0, 2), Flush, Check],
    // The cache fails.
    &[w(0, 8), Flush, Drain, FailCache(Op::Write), w(12, 2), Check, Kill, Check],
    &[w(0, 8), Flush, Drain, w(0, 2), FailCache(Op::Flush), Flush, w(2, 2), Flush, Kill, Check],
    &[w(0, 2), FailCache(Op::Write), Flush, Flush, Kill, w(0, 2), Flush],
    // A block is overwritten where it is, and that fails: which version is there?
    &[w(0, 2), Flush, FailCache(Op::Write), w(0, 2), Flush, Kill, Flush, Check, w(0, 2)],
    &[w(0, 2), Flush, FailCache(Op::Write), w(0, 2), Kill, Check, Flush, Drain, Check],
    &[w(0, 2), Flush, w(0, 2), FailCache(Op::Flush), Flush, Kill, Check, Flush, w(0, 2), Check],
    // It is done when a round is under way, or on its way then.
    &[
        w(0, 2),
        Flush,
        w(2, 2),
        HoldCache,
        PostFlush,
        post(0, 2),
        OneCache,
        OneCache,
        Release,
        Flush,
    ],
    &[
        w(0, 2),
        Flush,
        w(2, 2),
        HoldCache,
        post(0, 2),
        PostFlush,
        OneCache,
        OneCache,
        Release,
        Flush,
    ],
    // States that a kernel may leave.
    &[w(0, 2), Flush, Kernel(What::TwoFlushes { first: 3, second: 4 }), Tick(20), w(0, 2), Flush],
    &[w(0, 2), Flush, Kernel(What::TwoFlushes { first: 0, second: 1 }), Drain, w(1, 1), Flush],
    &[w(0, 2), Flush, Kernel(What::Uncommitted { first: 0, beyond: 0 }), Check, w(2, 2), Flush],
    &[w(0, 2), Flush, Kernel(What::Uncommitted { first: 2, beyond: 1 }), w(2, 2), Flush, Flush],
    &[
        w(0, 2),
        Flush,
        w(0, 2),
        Flush,
        w(0, 2),
        Flush,
        Kernel(What::OlderVersion { slot: 0 }),
        Check,
        Drain,
        Check,
    ],
    // Modes and messages.
    &[w(0, 4), Flush, Message("cleaner"), w(0, 2), w(12, 2), Flush, Tick(20), Check, Remove, Check],
    // What passed by is owed a flush, also by the next server.
    &[Message("cleaner"), w(0, 2), Kill, fua(2, 2), Flush, w(0, 2), Kill, Flush],
    &[w(0, 4), Message("flush_on_suspend"), Remove, Check, w(0, 2), Message("flush"), Check],
    // Another client writes while a round is under way: after the entries, after the counter.
    &[w(0, 2), Meanwhile { first: 4, count: 2, fences: 1 }, Flush, w(2, 2), Kill, Check],
    &[w(0, 2), Meanwhile { first: 4, count: 2, fences: 2 }, Flush, fua(6, 2), Kill, Check],
    &[
        w(0, 2),
        Flush,
        w(0, 2),
        Meanwhile { first: 0, count: 2, fences: 1 },
        Flush,
        Meanwhile { first: 2, count: 2, fences: 2 },
        fua(4, 2),
        Flush,
    ],
    // A write bypasses the cache and ends while another client's flush of the origin is in flight.
    &[
        Message("cleaner"),
        w(0, 2),
        HoldWrites,
        PostFlush,
        post(2, 2),
        LastWrite,
        OneWrite,
        Release,
        Flush,
        w(4, 2),
        Check,
    ],
    // A discard's flush of the origin fails while write-back waits for its own.
    &[
        w(0, 2),
        Flush,
        HoldWrites,
        Message("flush"),
        Tick(1),
        OneWrite,
        w(8, 2),
        Flush,
        PostZero { first: 8, count: 2 },
        LastWrite,
        FailFlush,
        LastWrite,
        OneWrite,
        Release,
        Flush,
        Check,
    ],
    // Writes to the cache fail, more than a list has room for.
    &[
        FailCache(Op::Write),
        w(0, 8),
        FailCache(Op::Write),
        w(0, 8),
        FailCache(Op::Write),
        w(0, 8),
        FailCache(Op::Write),
        w(0, 8),
        w(0, 8),
        Flush,
        Kill,
        Check,
    ],
    // Blocks are overwritten, and rounds close only those, which does not change the counter; then
    // two lists of one stripe are filled, and the process dies.
    &[fua(0, 2), w(0, 2), Flush, w(4, 2), HoldFlushes, PostFlush, w(4, 2), Kill, Check],
    &[
        fua(0, 2),
        w(0, 2),
        Flush,
        w(0, 2),
        Flush,
        w(4, 2),
        HoldFlushes,
        PostFlush,
        w(4, 2),
        Kill,
        Check,
    ],
    // A block is overwritten before a round and within it, and many writes follow: its first
    // fingerprint is outdated.
    &[
        fua(0, 1),
        w(0, 1),
        HoldFlushes,
        PostFlush,
        w(0, 1),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        w(1, 8),
        Kill,
        Check,
    ],
    // The process dies while a counter is on its way that commits slots in the first sector of
    // entries and supersedes them in the second one.
    &[
        w(0, 12),
        w(12, 8),
        Flush,
        w(0, 9),
        Flush,
        w(4, 3),
        HoldCache,
        PostFlush,
        post(0, 1),
        OneCache,
        OneCache,
        OneCache,
        OneCache,
        Kill,
        Check,
    ],
];

/// A random program of `len` steps.
pub fn random(prng: &mut Prng, len: usize, has_kernel: bool, is_disk: bool) -> Vec<Step> {
    let mut steps = Vec::with_capacity(len);
    // Few slots meet often; bulk goes round the blocks.
    let longest = if prng.one_in(2) { 8 } else { 3 };
    let is_syncing = prng.one_in(3);
    let fails = prng.one_in(4);
    // Where requests pass by, a failing origin fails them.
    let passes_by = prng.one_in(2);
    while steps.len() < len {
        let (first, count) = range(prng, longest);
        let fua = prng.one_in(if is_syncing { 2 } else { 8 });
        let step = match prng.below(100) {
            0..32 => Write { first, count, fua },
            32..40 if passes_by => Zero { first, count, fua },
            40..54 => Flush,
            54..59 => Read { first, count },
            59..61 => HoldReads,
            61..64 => HoldWrites,
            64..68 => OneWrite,
            68..71 => Release,
            71..77 => Tick([1, 11, 25][prng.below(3) as usize]),
            77 if !passes_by => FailWrite,
            78 if !passes_by => FailFlush,
            79..81 => Drain,
            81..83 => Remove,
            83..85 => Kill,
            85 => Message("flush"),
            86 if prng.one_in(2) => Message(if passes_by { "cleaner" } else { "flush_on_suspend" }),
            87 if has_kernel => Kernel(match prng.below(3) {
                0 => What::Uncommitted { first, beyond: prng.below(3) },
                1 => What::OlderVersion { slot: first },
                _ => What::TwoFlushes { first, second: prng.below(SLOTS as u64) as usize },
            }),
            88 if is_disk && fails => FailCache([Op::Write, Op::Flush][prng.below(2) as usize]),
            88..91 if is_disk => HoldCache,
            91..94 if is_disk => OneCache,
            94..97 => Post { first, count, fua },
            97 => PostFlush,
            _ => Write { first, count, fua },
        };
        steps.push(step);
    }
    steps
}
