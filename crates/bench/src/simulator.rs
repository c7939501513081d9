//! A simulated `cache`: the engine's own policies decide, and the bytes that they would copy are
//! counted. It stores no data, and its copies take no time.

use std::collections::HashMap;
use std::sync::Arc;

use udm::cache::policy::{Admission, Fill, Miss, Next, Policy, Probation, Rules, Shape, Smq, Uses};
use udm::units::{BLOCK, SECOND};

use crate::trace::{Request, Trace};

/// Requests in a second, where a trace does not say when they came.
const REQUESTS_PER_SECOND: u64 = 1000;
/// The kernel's policy looks at its clock at most this often, in nanoseconds.
pub const TICK: u64 = SECOND / 100;
/// After this many consecutive answers that cannot be used, the policy cannot evict a block.
const ASKED_MAX: usize = 100_000;

/// The policies of the target `cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachePolicy {
    /// `smq` as Linux 7.2 has it.
    KernelSmq,
    /// `smq` of udm.
    Smq,
    /// `probation` of udm.
    Probation,
}

impl CachePolicy {
    /// All of them.
    pub const ALL: [CachePolicy; 3] =
        [CachePolicy::KernelSmq, CachePolicy::Smq, CachePolicy::Probation];

    /// As tables of studies name it.
    pub fn name(self) -> &'static str {
        match self {
            CachePolicy::KernelSmq => "kernel's smq",
            CachePolicy::Smq => "udm, smq",
            CachePolicy::Probation => "udm, probation",
        }
    }

    fn make(self, shape: &Shape, uses: Arc<Uses>) -> Box<dyn Policy> {
        match self {
            CachePolicy::KernelSmq => Box::new(Smq::new(shape, Rules::KERNEL, uses)),
            CachePolicy::Smq => Box::new(Smq::new(shape, Rules::MENDED, uses)),
            CachePolicy::Probation => Box::new(Probation::new(shape, uses)),
        }
    }
}

/// The bytes that a trace requested, hit and copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// All that was asked for.
    pub asked: u64,
    /// Requested bytes that the cache had.
    pub hit: u64,
    /// Written to the fast device because of misses.
    pub filled: u64,
    /// Written to the origin from the cache.
    pub written_back: u64,
}

impl Tally {
    /// Moved between the devices.
    pub fn moved(&self) -> u64 {
        self.filled + self.written_back
    }
}

/// When a request came, in nanoseconds since the first one.
pub fn moment(trace: &Trace, nth: usize) -> u64 {
    match trace.seconds.get(nth) {
        Some(seconds) => (f64::from(*seconds) * SECOND as f64) as u64,
        None => nth as u64 * (SECOND / REQUESTS_PER_SECOND),
    }
}

/// Requests, cut at the borders of blocks; and the device's size, in blocks.
pub fn pieces(trace: &Trace, block_bytes: u64) -> (Vec<Piece>, u64) {
    let per_block = block_bytes / BLOCK;
    let mut pieces = Vec::new();
    for (nth, request) in trace.requests.iter().enumerate() {
        let Request { block, count, is_write } = *request;
        let (mut at, end) = (block, block + u64::from(count));
        while at < end {
            let stop = end.min((at / per_block + 1) * per_block);
            let (first, len) = ((at % per_block) as u32, (stop - at) as u32);
            pieces.push(Piece { block: at / per_block, first, len, is_write, nth });
            at = stop;
        }
    }
    (pieces, trace.device_blocks().div_ceil(per_block))
}

/// A part of a request, in one block of the cache. Counted in pages of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The block.
    pub block: u64,
    /// First page in it.
    pub first: u32,
    /// Pages.
    pub len: u32,
    /// Whether it writes.
    pub is_write: bool,
    /// Which request it is of.
    pub nth: usize,
}

/// A slot with a block: which pages it has, and which of them are dirty.
#[derive(Debug)]
struct Filled {
    block: u64,
    has: Vec<bool>,
    dirty: Vec<bool>,
}

impl Filled {
    fn count(&self) -> u32 {
        self.has.iter().filter(|has| **has).count() as u32
    }
}

struct Paper {
    policy: Box<dyn Policy>,
    uses: Arc<Uses>,
    slots: Vec<Option<Filled>>,
    free: Vec<u32>,
    index: HashMap<u64, u32>,
    /// The kernel's policy only: one slot is made free for a later request, not for this one.
    is_late: bool,
    pages: u32,
    tally: Tally,
}

/// Sends a trace through a cache of `slots` blocks.
pub fn run(policy: CachePolicy, trace: &Trace, block_bytes: u64, slots: u32) -> Tally {
    run_watched(policy, trace, block_bytes, slots, |_, _| {})
}

/// The same. After each request's part in a block, `watch` gets the request's position and the
/// tally up to there.
pub fn run_watched(
    policy: CachePolicy,
    trace: &Trace,
    block_bytes: u64,
    slots: u32,
    mut watch: impl FnMut(usize, &Tally),
) -> Tally {
    let (pieces, origin_blocks) = pieces(trace, block_bytes);
    let shape = Shape { slots, block_bytes: block_bytes as u32, origin_blocks };
    let uses = Arc::new(Uses::new(slots));
    let mut paper = Paper {
        policy: policy.make(&shape, Arc::clone(&uses)),
        uses,
        slots: (0..slots).map(|_| None).collect(),
        free: (0..slots).rev().collect(),
        index: HashMap::new(),
        is_late: policy == CachePolicy::KernelSmq,
        pages: (block_bytes / BLOCK) as u32,
        tally: Tally::default(),
    };
    let mut ticked = None;
    for piece in &pieces {
        let now = moment(trace, piece.nth);
        if ticked.is_none_or(|ticked| now >= ticked + TICK) {
            ticked = Some(now);
            paper.policy.tick(now);
        }
        paper.access(piece);
        watch(piece.nth, &paper.tally);
    }
    paper.tally
}

impl Paper {
    fn access(&mut self, piece: &Piece) {
        self.tally.asked += u64::from(piece.len) * BLOCK;
        let miss = Miss {
            block: piece.block,
            offset: piece.first * BLOCK as u32,
            len: piece.len * BLOCK as u32,
            is_write: piece.is_write,
        };
        if let Some(&slot) = self.index.get(&piece.block) {
            return self.found(slot, piece, &miss);
        }
        let Admission::Enter(fill) = self.policy.miss(&miss) else { return };
        if self.free.is_empty() {
            self.make_room();
            if self.is_late {
                return;
            }
        }
        let Some(slot) = self.free.pop() else { return };
        let pages = self.pages as usize;
        let block = piece.block;
        let filled = Filled { block, has: vec![false; pages], dirty: vec![false; pages] };
        self.slots[slot as usize] = Some(filled);
        self.index.insert(block, slot);
        self.policy.enter(slot, block);
        self.fill(slot, piece, fill);
    }

    fn found(&mut self, slot: u32, piece: &Piece, miss: &Miss) {
        let filled = self.slots[slot as usize].as_ref().expect("it is in the index");
        let asked = piece.first as usize..(piece.first + piece.len) as usize;
        let has_all = filled.has[asked].iter().all(|has| *has);
        let is_hit = has_all && !self.goes_through(piece, filled) || piece.len == self.pages;
        self.tally.hit += u64::from(piece.len) * BLOCK * u64::from(is_hit);
        let fill = match is_hit {
            true => {
                if self.uses.touch(slot) {
                    self.policy.hit(slot);
                }
                Fill::Asked
            }
            false => self.policy.gap(slot, miss, filled.count() * BLOCK as u32),
        };
        self.fill(slot, piece, fill);
    }

    /// Whether a request goes to the origin, and to the slot then: it writes to a block in part.
    fn goes_through(&self, piece: &Piece, filled: &Filled) -> bool {
        piece.is_write && piece.len < self.pages && filled.count() < self.pages
    }

    /// Bytes that the request promotes, and additional promotions.
    fn fill(&mut self, slot: u32, piece: &Piece, fill: Fill) {
        let first = piece.first as usize;
        let end = first + piece.len as usize;
        let Some(filled) = self.slots[slot as usize].as_ref() else { return };
        let goes_through = self.goes_through(piece, filled);
        let Some(filled) = self.slots[slot as usize].as_mut() else { return };
        for page in first..end {
            // A client's write goes to one of the devices in any case.
            let is_filled = if piece.is_write { goes_through } else { !filled.has[page] };
            self.tally.filled += u64::from(is_filled) * BLOCK;
            filled.has[page] = true;
            filled.dirty[page] |= piece.is_write && !goes_through;
        }
        let wanted = match fill {
            Fill::Asked => 0..0,
            Fill::Ahead(bytes) => end..(end + bytes as usize / BLOCK as usize),
            Fill::Whole => 0..usize::MAX,
        };
        let pages = filled.has.len();
        for page in wanted.start..wanted.end.min(pages) {
            let has = std::mem::replace(&mut filled.has[page], true);
            self.tally.filled += u64::from(!has) * BLOCK;
        }
        if piece.is_write && !goes_through {
            self.policy.set_dirty(slot, true);
        }
    }

    fn make_room(&mut self) {
        for _ in 0..ASKED_MAX {
            match self.policy.next() {
                Some(Next::Leave(slot)) => {
                    self.clean(slot);
                    let left = self.slots[slot as usize].take().expect("it has a block");
                    self.index.remove(&left.block);
                    self.policy.leave(slot, left.block);
                    return self.free.push(slot);
                }
                Some(Next::Complete(slot)) => {
                    let piece = Piece { block: 0, first: 0, len: 0, is_write: false, nth: 0 };
                    self.fill(slot, &piece, Fill::Whole);
                }
                Some(Next::Clean(slot)) => {
                    self.clean(slot);
                    if self.is_late {
                        return;
                    }
                }
                None => return,
            }
        }
    }

    fn clean(&mut self, slot: u32) {
        let Some(filled) = self.slots[slot as usize].as_mut() else { return };
        // The kernel knows dirty blocks only.
        let pages = match self.is_late {
            true => u64::from(self.pages) * u64::from(filled.dirty.contains(&true)),
            false => filled.dirty.iter().filter(|dirty| **dirty).count() as u64,
        };
        self.tally.written_back += pages * BLOCK;
        filled.dirty.fill(false);
        self.policy.set_dirty(slot, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(requests: Vec<Request>) -> Trace {
        Trace { name: String::new(), requests, seconds: Vec::new() }
    }

    fn one(block: u64, count: u32, is_write: bool) -> Request {
        Request { block, count, is_write }
    }

    #[test]
    fn requests_are_cut_at_blocks() {
        let (pieces, blocks) = pieces(&trace(vec![one(7, 10, true)]), 32 << 10);
        let parts: Vec<_> = pieces.iter().map(|p| (p.block, p.first, p.len)).collect();
        assert_eq!((parts, blocks), (vec![(0, 7, 1), (1, 0, 8), (2, 0, 1)], 3));
    }

    #[test]
    fn a_working_set_that_fits_is_hit_by_every_policy() {
        let round = (0..64).map(|block| one(block * 8, 1, false));
        let requests: Vec<Request> = std::iter::repeat_n(round, 400).flatten().collect();
        for policy in CachePolicy::ALL {
            let tally = run(policy, &trace(requests.clone()), 32 << 10, 128);
            assert_eq!(tally.asked, 64 * 400 * BLOCK);
            let missed = 100 * (tally.asked - tally.hit) / tally.asked;
            assert!(missed <= 5, "{policy:?} missed {missed} %");
            assert_eq!(tally.written_back, 0);
        }
    }

    #[test]
    fn what_is_written_is_written_back_before_it_leaves() {
        let requests = (0..1000).map(|block| one(block * 8, 8, true)).collect();
        let tally = run(CachePolicy::Probation, &trace(requests), 32 << 10, 10);
        assert_eq!(tally.hit + tally.filled, 0);
        assert_eq!(tally.written_back, (1000 - 10) * (32 << 10), "all but what is there still");
    }

    #[test]
    fn a_scan_does_not_drive_out_what_is_used() {
        let mut requests = Vec::new();
        for round in 0..200_u64 {
            requests.extend((0..32).map(|block| one(block * 8, 1, false)));
            requests.extend((0..40).map(|nth| one((1000 + round * 40 + nth) * 8, 1, false)));
        }
        let tally = run(CachePolicy::Probation, &trace(requests), 32 << 10, 64);
        let hot = 200 * 32 * BLOCK;
        assert!(tally.hit > hot * 9 / 10, "{} of {hot}", tally.hit);
    }
}
