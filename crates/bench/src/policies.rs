//! Caches on paper: how many references a policy would serve if it could keep any `capacity` blocks
//! at no cost. udm is compared with these, and with the best possible policy.

use std::collections::{BTreeSet, VecDeque};

/// A policy on paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// What came first goes first.
    Fifo,
    /// Evicts the least recently used block first.
    Lru,
    /// Megiddo and Modha, FAST 2003.
    Arc,
    /// Yang et al., SOSP 2023: a small queue of 10 %, a main one, and a memory of what left.
    S3Fifo,
    /// Belady: evicts the block whose next use is the latest, or does not admit it.
    Min,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 5] =
        [Policy::Fifo, Policy::Lru, Policy::Arc, Policy::S3Fifo, Policy::Min];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Fifo => "FIFO",
            Policy::Lru => "LRU",
            Policy::Arc => "ARC",
            Policy::S3Fifo => "S3-FIFO",
            Policy::Min => "MIN (ceiling)",
        }
    }

    /// Hits among `references` to `unique` different blocks, with room for `capacity` of them.
    pub fn hits(self, references: &[u32], unique: usize, capacity: usize) -> u64 {
        let mut hits = 0;
        self.run(references, unique, capacity, |_| hits += 1);
        hits
    }

    /// The same; returns the positions of the references that are hits.
    pub fn run(
        self,
        references: &[u32],
        unique: usize,
        capacity: usize,
        mut hit: impl FnMut(usize),
    ) {
        match self {
            Policy::Fifo => fifo(references, unique, capacity, &mut hit),
            Policy::Lru => lru(references, unique, capacity, &mut hit),
            Policy::Arc => arc(references, unique, capacity, &mut hit),
            Policy::S3Fifo => s3_fifo(references, unique, capacity, &mut hit),
            Policy::Min => min(references, unique, capacity, &mut hit),
        }
    }
}

fn fifo(references: &[u32], unique: usize, capacity: usize, hit: &mut dyn FnMut(usize)) {
    let mut is_cached = vec![false; unique];
    let mut queue = VecDeque::new();
    for (at, &block) in references.iter().enumerate() {
        if is_cached[block as usize] {
            hit(at);
            continue;
        }
        if queue.len() == capacity
            && let Some(oldest) = queue.pop_front()
        {
            is_cached[oldest as usize] = false;
        }
        queue.push_back(block);
        is_cached[block as usize] = true;
    }
}

/// Lists of blocks in the order of their last use; a block is in one of them, or in none.
struct Recency {
    /// For each block: which list, and when it came there; the latter is its place in the list.
    place: Vec<(u8, u64)>,
    lists: [BTreeSet<(u64, u32)>; 4],
    now: u64,
}

const NOWHERE: u8 = u8::MAX;

impl Recency {
    fn new(unique: usize) -> Recency {
        Recency { place: vec![(NOWHERE, 0); unique], lists: Default::default(), now: 0 }
    }

    fn list_of(&self, block: u32) -> u8 {
        self.place[block as usize].0
    }

    fn len(&self, list: u8) -> usize {
        self.lists[list as usize].len()
    }

    /// Puts a block at the end of a list, or nowhere.
    fn put(&mut self, block: u32, list: u8) {
        let (old, since) = self.place[block as usize];
        if old != NOWHERE {
            self.lists[old as usize].remove(&(since, block));
        }
        self.now += 1;
        self.place[block as usize] = (list, self.now);
        if list != NOWHERE {
            self.lists[list as usize].insert((self.now, block));
        }
    }

    /// Moves the first block of a list.
    fn shift(&mut self, from: u8, to: u8) {
        if let Some(&(_, block)) = self.lists[from as usize].first() {
            self.put(block, to);
        }
    }
}

fn lru(references: &[u32], unique: usize, capacity: usize, hit: &mut dyn FnMut(usize)) {
    let mut blocks = Recency::new(unique);
    for (at, &block) in references.iter().enumerate() {
        if blocks.list_of(block) == 0 {
            hit(at);
        } else if blocks.len(0) == capacity {
            blocks.shift(0, NOWHERE);
        }
        blocks.put(block, 0);
    }
}

fn arc(references: &[u32], unique: usize, capacity: usize, hit: &mut dyn FnMut(usize)) {
    const T1: u8 = 0;
    const T2: u8 = 1;
    const B1: u8 = 2;
    const B2: u8 = 3;
    let mut blocks = Recency::new(unique);
    let mut target = 0.0_f64;
    let replace = |blocks: &mut Recency, target: f64, is_b2: bool| {
        let recent = blocks.len(T1);
        let is_over = recent as f64 > target || is_b2 && recent as f64 == target;
        if recent > 0 && is_over { blocks.shift(T1, B1) } else { blocks.shift(T2, B2) }
    };
    for (at, &block) in references.iter().enumerate() {
        let list = blocks.list_of(block);
        let (b1, b2) = (blocks.len(B1) as f64, blocks.len(B2) as f64);
        match list {
            T1 | T2 => hit(at),
            B1 => {
                target = (target + (b2 / b1).max(1.0)).min(capacity as f64);
                replace(&mut blocks, target, false);
            }
            B2 => {
                target = (target - (b1 / b2).max(1.0)).max(0.0);
                replace(&mut blocks, target, true);
            }
            _ => {
                let recent = blocks.len(T1) + blocks.len(B1);
                let all: usize = (0..4).map(|list| blocks.len(list)).sum();
                if recent == capacity {
                    if blocks.len(T1) < capacity {
                        blocks.shift(B1, NOWHERE);
                        replace(&mut blocks, target, false);
                    } else {
                        blocks.shift(T1, NOWHERE);
                    }
                } else if all >= capacity {
                    if all == 2 * capacity {
                        blocks.shift(B2, NOWHERE);
                    }
                    replace(&mut blocks, target, false);
                }
            }
        }
        blocks.put(block, if list == NOWHERE { T1 } else { T2 });
    }
}

/// Where a block is in S3-FIFO.
#[derive(Clone, Copy, Default)]
struct Standing {
    is_cached: bool,
    uses: u8,
    /// How many had left the small queue when it did.
    left_at: Option<u64>,
}

fn s3_fifo(references: &[u32], unique: usize, capacity: usize, hit: &mut dyn FnMut(usize)) {
    let mut blocks = vec![Standing::default(); unique];
    let (mut small, mut main) = (VecDeque::new(), VecDeque::new());
    let small_max = (capacity / 10).max(1);
    let memory = (capacity - small_max) as u64;
    let mut left = 0;
    for (at, &block) in references.iter().enumerate() {
        let standing = &mut blocks[block as usize];
        if standing.is_cached {
            hit(at);
            standing.uses = (standing.uses + 1).min(3);
            continue;
        }
        let is_remembered = standing.left_at.is_some_and(|at| left - at < memory);
        while small.len() + main.len() >= capacity {
            let is_small = small.len() > small_max || main.is_empty();
            let queue = if is_small { &mut small } else { &mut main };
            let Some(oldest) = queue.pop_front() else { break };
            let standing = &mut blocks[oldest as usize];
            if is_small && standing.uses >= 2 {
                standing.uses = 0;
                main.push_back(oldest);
            } else if !is_small && standing.uses > 0 {
                standing.uses -= 1;
                main.push_back(oldest);
            } else {
                standing.is_cached = false;
                left += u64::from(is_small);
                standing.left_at = is_small.then_some(left);
            }
        }
        blocks[block as usize] = Standing { is_cached: true, uses: 0, left_at: None };
        if is_remembered { main.push_back(block) } else { small.push_back(block) }
    }
}

fn min(references: &[u32], unique: usize, capacity: usize, hit: &mut dyn FnMut(usize)) {
    let never = references.len();
    let mut next = vec![never; references.len()];
    let mut soonest = vec![never; unique];
    for (at, &block) in references.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut soonest[block as usize], at);
    }
    // By when they are wanted again, the latest last.
    let mut cached = BTreeSet::new();
    for (at, &block) in references.iter().enumerate() {
        if cached.remove(&(at, block)) {
            hit(at);
        }
        if next[at] < never {
            cached.insert((next[at], block));
            if cached.len() > capacity {
                cached.pop_last();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use udm::prng::Prng;

    #[test]
    fn small_traces_count_as_by_hand() {
        let references = [0, 1, 2, 0, 3, 0, 1];
        let hits = |policy: Policy, capacity| policy.hits(&references, 4, capacity);
        assert_eq!(hits(Policy::Fifo, 3), 1, "0 leaves for 3, and 1 for 0");
        assert_eq!(hits(Policy::Lru, 3), 2);
        assert_eq!(hits(Policy::Min, 3), 3);
        for policy in Policy::ALL {
            assert_eq!(hits(policy, 4), 3, "{policy:?}: everything finds room");
        }
    }

    #[test]
    fn nobody_is_better_than_min() {
        for seed in 0..20 {
            let mut prng = Prng::new(seed);
            let references: Vec<u32> = (0..3000)
                .map(|_| (prng.below(40) * prng.below(40) / (1 + prng.below(20))) as u32)
                .collect();
            for capacity in [1, 2, 7, 50, 200] {
                let hits = Policy::ALL.map(|policy| policy.hits(&references, 1600, capacity));
                assert!(hits.iter().all(|&count| count <= hits[4]), "{seed} {capacity}: {hits:?}");
            }
        }
    }
}
