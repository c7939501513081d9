//! The actions of clients and of the environment, step by step. Each target has its own programs,
//! made of these.

use udm::bio::Op;
use udm::prng::Prng;

use crate::elsewhere::What;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Write {
        first: usize,
        count: usize,
        fua: bool,
    },
    Zero {
        first: usize,
        count: usize,
        fua: bool,
    },
    Flush,
    /// As `Write`, `Flush` and `Zero`, but the client does not wait for the end.
    Post {
        first: usize,
        count: usize,
        fua: bool,
    },
    PostFlush,
    PostZero {
        first: usize,
        count: usize,
    },
    /// Another client writes within the next step, after this many of its fences.
    Meanwhile {
        first: usize,
        count: usize,
        fences: u32,
    },
    Percent(u32),
    Message(&'static str),
    Read {
        first: usize,
        count: usize,
    },
    /// Reads a block of the origin until the cache has it.
    Bring(u64),
    /// The same, but the cache may not want it.
    Seek(u64),
    /// The same until the cache begins to copy it; its disks are held from then on.
    Begin(u64),
    /// Suspend, and resume.
    Rest,
    /// Reads of the origin do not come back until `Release`.
    HoldReads,
    /// Writes and flushes of the origin do not come back until `Release`.
    HoldWrites,
    /// One held write or flush comes back: any, or the one that was begun last.
    OneWrite,
    LastWrite,
    /// The same for a cache that is a disk.
    HoldCache,
    OneCache,
    /// Of these, only the flushes.
    HoldFlushes,
    Release,
    /// This many tenths of a second pass.
    Tick(u64),
    /// The next write, or flush, of the origin fails.
    FailWrite,
    FailFlush,
    /// The same for a cache that is a disk.
    FailCache(Op),
    Drain,
    /// Everything is read and compared.
    Check,
    /// Orderly end, and attach.
    Remove,
    /// The process dies; the next one finds the shared memory.
    Kill,
    /// Everything is written back, then the cache is formatted by force.
    Reformat,
    Kernel(What),
}

use Step::*;

/// A write.
pub const fn w(first: usize, count: usize) -> Step {
    Write { first, count, fua: false }
}

/// A FUA write.
pub const fn fua(first: usize, count: usize) -> Step {
    Write { first, count, fua: true }
}

/// Zeroes.
pub const fn z(first: usize, count: usize) -> Step {
    Zero { first, count, fua: false }
}

/// A read.
pub const fn r(first: usize, count: usize) -> Step {
    Read { first, count }
}

/// A program with other clients in between: they post requests without waiting, and let requests of
/// disks end out of order. (No [`Meanwhile`]: that is for points where no lock is held that a write
/// needs, which only written programs know.)
pub fn with_others(prng: &mut Prng, steps: Vec<Step>, is_disk: bool) -> Vec<Step> {
    // Zeroes may pass by, which not every program is made for.
    let zeroes = steps.iter().any(|step| matches!(step, Zero { .. }));
    let mut mixed = Vec::with_capacity(steps.len() * 2);
    for step in steps {
        let (first, count) = range(prng, 3);
        let other = match prng.below(20) {
            0 | 1 => Some(LastWrite),
            2 if is_disk => Some(HoldFlushes),
            3 if zeroes => Some(PostZero { first, count }),
            4 => Some(Post { first, count, fua: prng.one_in(4) }),
            5 => Some(PostFlush),
            _ => None,
        };
        mixed.extend(other.into_iter().chain([step]));
    }
    mixed
}

/// What happens after a crash, in a few steps.
pub fn aftermath(prng: &mut Prng) -> Vec<Step> {
    let (first, count) = range(prng, 3);
    let write = Write { first, count, fua: prng.one_in(3) };
    let end = match prng.below(5) {
        0 => Flush,
        1 => Drain,
        2 => Tick(25),
        3 => Kill,
        _ => write,
    };
    match prng.below(4) {
        0 => vec![],
        1 => vec![end],
        2 => vec![write, end],
        _ => vec![write, Flush, end],
    }
}

/// A few slots of one span.
pub fn range(prng: &mut Prng, longest: u64) -> (usize, usize) {
    let (base, len) = if prng.one_in(3) { (12, 8) } else { (0, 12) };
    let first = prng.below(len) as usize;
    let count = (1 + prng.below(longest) as usize).min(len as usize - first);
    (base + first, count)
}
