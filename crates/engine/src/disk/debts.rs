//! Who must hear of a failed flush.
//!
//! The kernel reports data that it could not write to one fsync of an open file, and a device that
//! could not empty its cache says so to one flush. But each ring that has written since the last
//! good flush believes that its next flush will cover what it wrote. So a failure is owed to all of
//! them: to each once, whatever the kernel says to its flush. What a ring that is gone
//! should have heard, a ring that comes later hears: it may be the same client, connected again.

use std::collections::BTreeMap;

use crate::mutants::{self, Mutant};
use crate::sync::Weak;

/// How many rings are remembered before those that are gone are looked for.
const RINGS_MIN: usize = 64;

/// What one ring has written.
#[derive(Debug)]
struct Writes {
    /// Whether the ring is still there.
    life: Weak<()>,
    in_flight: u64,
    /// The moment at which its last write ended.
    ended: u64,
    is_owed: bool,
}

/// The writes of each ring, and which rings a failed flush is owed to.
#[derive(Debug, Default)]
pub(super) struct Debts {
    rings: BTreeMap<u64, Writes>,
    /// Counts the ends of writes: the time, here.
    now: u64,
    /// What had ended then is durable.
    good: u64,
    /// When the last write of a ring that is gone had ended.
    gone: u64,
    /// Rings that are gone were owed: a ring with this number or a higher one hears of it.
    heirs_from: Option<u64>,
    /// When to look for rings that are gone.
    crowd: usize,
}

impl Debts {
    /// A ring has begun a write, discard or the like.
    pub(super) fn begin_write(&mut self, ring: u64, life: impl FnOnce() -> Weak<()>) {
        if !self.rings.contains_key(&ring) && self.rings.len() >= self.crowd.max(RINGS_MIN) {
            self.bury();
            self.crowd = 2 * self.rings.len();
        }
        let fresh = || Writes { life: life(), in_flight: 0, ended: 0, is_owed: false };
        self.rings.entry(ring).or_insert_with(fresh).in_flight += 1;
    }

    /// It has ended, well or not.
    pub(super) fn end_write(&mut self, ring: u64) {
        self.now += 1;
        if let Some(writes) = self.rings.get_mut(&ring) {
            writes.in_flight -= 1;
            writes.ended = self.now;
        }
    }

    /// The moment: a flush that begins now covers what has ended until now.
    pub(super) fn now(&self) -> u64 {
        self.now
    }

    /// A flush that had begun at `moment` has succeeded.
    pub(super) fn succeeded(&mut self, moment: u64) {
        self.good = self.good.max(moment);
    }

    /// A flush, or a write-out, has failed. `next`: all rings have lower numbers.
    pub(super) fn failed(&mut self, next: u64) {
        if mutants::is(Mutant::FailureSaidToOne) {
            return;
        }
        self.bury();
        for writes in self.rings.values_mut() {
            // Also if it has heard of one failure: some of what it wrote may still be on its way.
            writes.is_owed |= writes.in_flight > 0 || writes.ended > self.good;
        }
        if self.gone > self.good {
            self.heirs_from = Some(next);
        }
    }

    /// Whether the flush that `ring` asks for must fail. It counts as said.
    pub(super) fn collect(&mut self, ring: u64) -> bool {
        let is_heir = self.heirs_from.is_some_and(|from| ring >= from);
        if is_heir {
            self.heirs_from = None;
        }
        let own = self.rings.get_mut(&ring).map(|writes| &mut writes.is_owed);
        own.is_some_and(std::mem::take) || is_heir
    }

    /// A flush of `ring` fails.
    pub(super) fn has_heard(&mut self, ring: u64) {
        if let Some(writes) = self.rings.get_mut(&ring) {
            writes.is_owed = false;
        }
    }

    /// Whether a ring is owed something.
    pub(super) fn has_any(&self) -> bool {
        self.heirs_from.is_some() || self.rings.values().any(|writes| writes.is_owed)
    }

    /// Forgets rings that are gone, but not what they wrote.
    fn bury(&mut self) {
        let Debts { rings, now, gone, heirs_from, .. } = self;
        rings.retain(|number, writes| {
            if writes.life.strong_count() > 0 {
                return true;
            }
            // A ring waits for what it has begun before it goes.
            let ended = if writes.in_flight > 0 { *now + 1 } else { writes.ended };
            *now = (*now).max(ended);
            *gone = (*gone).max(ended);
            if writes.is_owed {
                *heirs_from = (*heirs_from).max(Some(number + 1));
            }
            false
        });
    }

    /// How many rings are remembered.
    #[cfg(test)]
    pub(super) fn rings(&self) -> usize {
        self.rings.len()
    }
}
