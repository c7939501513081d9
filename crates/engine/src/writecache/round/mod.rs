//! Rounds: the method that makes a batch durable.
//!
//! A *round* makes durable, in this order: the entries of the batch that it closes, together with
//! the free marks of slots released by an earlier round (`marks`); then the commit counter. Slots
//! whose marks are durable return to the pool. `memory` and `disk`, one for each mode, write the
//! bytes to the medium; bios wait for a round in `commit`.

mod disk;
mod memory;

use super::Writecache;
use super::counts::add;
use super::index::State;
use super::marks::RoundMarks;

pub(super) use disk::{DEPTH_MAX, Ended};

/// The round that is under way; under the lock of commit.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// The commit counter on the medium.
    seq: u64,
    phase: disk::Phase,
    /// Whether the round commits a batch: then it writes entries and the counter.
    has_batch: bool,
    /// The stripes whose lists the round closed, as bits.
    closed: u32,
    marks: RoundMarks,
    /// Memory for the entries of the round.
    batch: Vec<memory::Run>,
}

impl Round {
    /// No round is under way.
    pub(super) fn new(seq: u64) -> Round {
        Round { seq, ..Round::default() }
    }

    /// The commit counter on the medium.
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }

    /// Mode `s`: whether no round is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.phase == disk::Phase::Idle
    }

    /// The marks of the round.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn marks(&self) -> &RoundMarks {
        &self.marks
    }

    /// The stripes of the round's batch.
    #[inline]
    fn stripes(&self) -> impl Iterator<Item = usize> + use<> {
        stripes_of(self.closed)
    }
}

/// The stripes whose bits are set.
fn stripes_of(bits: u32) -> impl Iterator<Item = usize> + use<> {
    std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)))
        .take_while(|bits| *bits != 0)
        .map(|bits| bits.trailing_zeros() as usize)
}

impl Writecache {
    /// Closes the open batch: from here on writes fill the other lists. Takes the slots that this
    /// round marks free. Returns whether the round has any work.
    fn close(&self, round: &mut Round) -> bool {
        self.rounds.begin();
        (round.has_batch, round.closed) = (false, 0);
        // After the count of rounds: `round_needed` reads the count again after it has looked at
        // the lists. A stripe's bit is set again when a block is put into its other list.
        for stripe in stripes_of(self.lists.take_filled()) {
            let locked = self.index.lock(stripe);
            if round.closed == 0 {
                self.lists.begin_batch(round.seq);
            }
            round.closed |= 1 << stripe;
            let has_fresh = self.lists.close(&locked);
            round.has_batch |= has_fresh || self.plan.is_pmem();
        }
        self.take_marks(&mut round.marks, round.closed != 0);
        round.closed != 0 || !round.marks.is_empty()
    }

    /// The entries of the batch that is being committed, of one stripe.
    #[inline]
    fn closing(&self, stripe: usize) -> impl Iterator<Item = (u64, u32)> + '_ {
        let state = State::open_in(self.lists.closed(stripe));
        let held = self.lists.closed_entries(stripe);
        held.filter(move |&(block, slot)| self.index.word(slot).is_of(block, state))
    }

    /// The whole round is durable: its batch is committed, its marked slots are free. Returns
    /// whether there are any.
    fn finish_round(&self, round: &mut Round) -> bool {
        for stripe in round.stripes() {
            self.commit_stripe(stripe, &mut round.marks);
        }
        self.marks.count_superseded(&round.marks);
        add(&self.counts.commits, u64::from(round.has_batch));
        let has_freed = self.free_marked(&mut round.marks);
        self.rounds.end();
        has_freed
    }

    /// The stripe's closed list is durable.
    fn commit_stripe(&self, stripe: usize, marks: &mut RoundMarks) {
        let closed = self.lists.closed(stripe);
        let state = State::open_in(closed);
        let mut held = self.lists.closed_entries(stripe);
        while held.len() > 0 {
            let mut locked = self.index.lock(stripe);
            for (block, slot) in held.by_ref().take(64) {
                if locked.make_live(slot, block, state) {
                    self.supersede(&mut locked, block, slot, marks);
                } else {
                    locked.make_live(slot, block, State::overwritten_in(closed));
                }
            }
        }
        self.lists.clear_closed(stripe);
    }
}
