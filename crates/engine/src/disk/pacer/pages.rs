//! The dirty pages of one file, and which of them the current pass has not reached yet. They are
//! bits in words of 64 pages. A write looks up one word, at any position, and so does a batch for
//! each word from which it takes pages. Each page is owned by the writer that made it dirty first.

use std::collections::BTreeMap;
use std::ops::Range;

use super::PAGE;

/// Pages of a word.
const WORD: u64 = u64::BITS as u64;

/// Neighbouring dirty bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
}

/// Pages that were taken out of the pass, to be written out.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// In order.
    pub runs: Vec<Run>,
    /// Whose it is: owners and bytes.
    pub owners: Vec<(u64, u64)>,
}

/// Neighbouring pages, some of them dirty.
#[derive(Debug)]
struct Word {
    /// Dirty pages of the current pass and of the next one; `Pages::turn` is the index of the
    /// current pass.
    dirty: [u64; 2],
    /// The owner of the dirty pages that are not in `others`.
    owner: u64,
    /// Owners and their pages.
    others: Vec<(u64, u64)>,
}

/// The dirty pages of one file.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// By their number; none without dirty pages.
    words: BTreeMap<u64, Word>,
    /// How many are dirty in each of the two parts.
    counts: [u64; 2],
    /// The part of the pass.
    turn: usize,
    /// The word that the pass has come to.
    at: u64,
}

impl Word {
    fn new(owner: u64) -> Word {
        Word { dirty: [0; 2], owner, others: Vec::new() }
    }

    /// Makes pages dirty. Returns which were not.
    fn add(&mut self, pages: u64, owner: u64, part: usize) -> u64 {
        let fresh = pages & !(self.dirty[0] | self.dirty[1]);
        self.dirty[part] |= fresh;
        if owner != self.owner && fresh != 0 {
            match self.others.iter_mut().find(|(other, _)| *other == owner) {
                Some((_, its)) => *its |= fresh,
                None => self.others.push((owner, fresh)),
            }
        }
        fresh
    }

    /// Makes pages of a part clean.
    fn take(&mut self, pages: u64, part: usize, owners: &mut Vec<(u64, u64)>) {
        self.dirty[part] &= !pages;
        let mut own = pages;
        for (owner, its) in &mut self.others {
            count(owners, *owner, *its & pages);
            own &= !*its;
            *its &= !pages;
        }
        count(owners, self.owner, own);
        self.others.retain(|(_, its)| *its != 0);
    }

    fn is_clean(&self) -> bool {
        self.dirty == [0; 2]
    }
}

impl Pages {
    /// Bytes of all dirty pages.
    pub(super) fn bytes(&self) -> u64 {
        (self.counts[0] + self.counts[1]) * PAGE
    }

    /// Bytes that the pass has not come to.
    pub(super) fn pass_bytes(&self) -> u64 {
        self.counts[self.turn] * PAGE
    }

    /// Makes whole pages dirty, for the next pass. Pages that are dirty already keep their first
    /// owner. Returns the number of new dirty bytes.
    pub(super) fn add(&mut self, range: Range<u64>, owner: u64) -> u64 {
        let (mut at, end, part) = (range.start / PAGE, range.end / PAGE, 1 - self.turn);
        let mut added = 0;
        while at < end {
            let (number, first) = (at / WORD, at % WORD);
            let count = (end - at).min(WORD - first);
            let word = self.words.entry(number).or_insert_with(|| Word::new(owner));
            added += u64::from(word.add(mask(first, count), owner, part).count_ones());
            at += count;
        }
        self.counts[part] += added;
        added * PAGE
    }

    /// Takes at most `bytes` in at most `count` runs out of the pass, in order. If the pass has
    /// ended, the next one begins.
    pub(super) fn take(&mut self, bytes: u64, count: usize) -> Taken {
        if self.counts[self.turn] == 0 {
            (self.turn, self.at) = (1 - self.turn, 0);
        }
        let (mut taken, mut left) = (Taken::default(), bytes / PAGE);
        let mut clean = Vec::new();
        let part = self.turn;
        for (number, word) in self.words.range_mut(self.at..) {
            self.at = *number;
            let pages = choose(word.dirty[part], *number, &mut left, count, &mut taken.runs);
            if pages != 0 {
                word.take(pages, part, &mut taken.owners);
                self.counts[part] -= u64::from(pages.count_ones());
            }
            if word.is_clean() {
                clean.push(*number);
            }
            if word.dirty[part] != 0 || self.counts[part] == 0 {
                break;
            }
        }
        for number in clean {
            self.words.remove(&number);
        }
        taken
    }
}

/// Chooses pages of a word, as long as some are `left` and there are at most `count` runs.
fn choose(dirty: u64, number: u64, left: &mut u64, count: usize, runs: &mut Vec<Run>) -> u64 {
    let (mut rest, mut chosen) = (dirty, 0);
    while rest != 0 && *left > 0 {
        let first = u64::from(rest.trailing_zeros());
        let len = u64::from((rest >> first).trailing_ones()).min(*left);
        let start = (number * WORD + first) * PAGE;
        let end = start + len * PAGE;
        let is_full = runs.len() >= count;
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ if is_full => break,
            _ => runs.push(Run { start, end }),
        }
        let pages = mask(first, len);
        chosen |= pages;
        rest &= !pages;
        *left -= len;
    }
    chosen
}

/// `count` bits from `first` on: at least one, all within a word.
fn mask(first: u64, count: u64) -> u64 {
    (u64::MAX >> (WORD - count)) << first
}

/// Counts pages for their owner.
fn count(owners: &mut Vec<(u64, u64)>, owner: u64, pages: u64) {
    if pages == 0 {
        return;
    }
    let bytes = u64::from(pages.count_ones()) * PAGE;
    match owners.iter_mut().find(|(other, _)| *other == owner) {
        Some((_, sum)) => *sum += bytes,
        None => owners.push((owner, bytes)),
    }
}
