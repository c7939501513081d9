//! Free marks: the entries on the medium that are not needed any more, and the time when each is
//! marked free. A round (`round`) takes them, and makes them durable together with its batch.
//!
//! The rules for the delay and the order of marks:
//! 1. A slot is not used again before its mark is durable. Superseded slots wait until they are
//!    many, or needed.
//! 2. An older version is superseded once the newer one's counter is durable; its mark may be
//!    stored with the next round. Marks of superseded slots need no order among themselves.
//! 3. The newest version (dropped after write-back or discard) must not be marked before every
//!    older one is: a crash between the two would bring the older one back. So it waits for a whole
//!    round in between, unless no other slot was waiting before it; and as long as any such slot
//!    waits, no round leaves marks out.
//! 4. A slot that was written back while a newer version was being written is not dropped: the
//!    newer version's commit supersedes it.
//! 5. Entries that a crash kept from being committed have the number of the next batch, or a later
//!    one. The first round after an attach marks them, before its counter brings them to life.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};

use super::Writecache;
use super::index::{Locked, State};
use super::rounds::Rounds;

/// A round marks superseded slots free when this many wait for it; they are cheaper together.
const MARKS_MAX: usize = 1024;

/// Slots that wait for their free marks.
#[derive(Debug)]
pub(super) struct Marks {
    waiting: Mutex<Waiting>,
    /// Numbers of these slots, and of those that rounds have superseded since.
    count: AtomicUsize,
    superseded_count: AtomicUsize,
    /// The round after which all dropped slots are marked.
    marked_by: AtomicU64,
}

#[derive(Debug, Default)]
struct Waiting {
    /// Slots whose blocks have a durable newer version, and whose write-back has ended, or that
    /// were in this state when the cache was opened. In no chain.
    superseded: Vec<u32>,
    /// Slots that had the newest versions. They are still in their chains.
    dropped: Vec<u32>,
    /// Dropped slots, as soon as a round has begun since their drop.
    ready: Vec<u32>,
    /// Some superseded slots may never have been committed: rule 5.
    has_uncommitted: bool,
}

impl Waiting {
    fn count(&self) -> usize {
        self.superseded.len() + self.dropped.len() + self.ready.len()
    }
}

/// The marks of a round, and of the next one; kept with the state of the round, under its lock.
#[derive(Debug, Default)]
pub(super) struct RoundMarks {
    /// Slots in no chain that this round marks free.
    marks: Vec<u32>,
    /// Slots in chains that it marks free.
    drops: Vec<u32>,
    /// Slots that rounds have superseded, and that wait for their marks.
    superseded: Vec<u32>,
}

impl RoundMarks {
    /// Whether this round stores no marks.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.marks.is_empty() && self.drops.is_empty()
    }

    /// The slots that this round marks free.
    #[inline]
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> + '_ {
        self.marks.iter().chain(&self.drops).copied()
    }

    /// Slots that wait for the next round.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn superseded(&self) -> &[u32] {
        &self.superseded
    }
}

impl Marks {
    /// The findings of an attach, including entries that were never committed.
    pub(super) fn new(superseded: Vec<u32>) -> Marks {
        Marks {
            count: AtomicUsize::new(superseded.len()),
            superseded_count: AtomicUsize::new(0),
            marked_by: AtomicU64::new(0),
            waiting: Mutex::new(Waiting {
                superseded,
                has_uncommitted: true,
                ..Waiting::default()
            }),
        }
    }

    /// Slots that wait for their marks.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.count.load(Ordering::SeqCst) + self.superseded_count.load(Ordering::SeqCst)
    }

    /// The round after which all dropped slots are marked.
    #[inline]
    pub(super) fn marked_by(&self) -> u64 {
        self.marked_by.load(Ordering::SeqCst)
    }

    /// Takes the slots that a round marks free: none, unless some were dropped (rule 3), may be
    /// uncommitted (rule 5), or are due.
    fn take(&self, round: &mut RoundMarks, is_due: bool) {
        let has_others = self.count.load(Ordering::SeqCst) > 0;
        if !has_others && (round.superseded.is_empty() || !is_due) {
            return;
        }
        let mut guard = lock(&self.waiting);
        let waiting = &mut *guard;
        let has_dropped = !waiting.dropped.is_empty() || !waiting.ready.is_empty();
        if !has_dropped && !is_due && !waiting.has_uncommitted {
            return;
        }
        waiting.has_uncommitted = false;
        round.marks.append(&mut round.superseded);
        self.superseded_count.store(0, Ordering::SeqCst);
        round.marks.append(&mut waiting.superseded);
        let is_first = round.marks.is_empty() && waiting.ready.is_empty();
        round.drops.append(&mut waiting.ready);
        if is_first || mutants::is(Mutant::NewerFreedFirst) {
            round.drops.append(&mut waiting.dropped);
        } else {
            waiting.ready.append(&mut waiting.dropped);
        }
        self.recount(&guard);
    }

    /// The newest version of a block, which stays in its chain.
    fn add_dropped(&self, slot: u32, rounds: &Rounds) {
        let mut waiting = lock(&self.waiting);
        waiting.dropped.push(slot);
        // Before the check of the rounds: a round that begins now and sees no waiting slots is not
        // counted.
        self.recount(&waiting);
        // Two rounds that have not begun yet: rule 3.
        self.marked_by.fetch_max(rounds.begun() + 2, Ordering::SeqCst);
    }

    /// A slot in no chain.
    fn add_superseded(&self, slot: u32) {
        let mut waiting = lock(&self.waiting);
        waiting.superseded.push(slot);
        self.recount(&waiting);
    }

    fn recount(&self, waiting: &Waiting) {
        self.count.store(waiting.count(), Ordering::SeqCst);
    }

    /// A round has superseded slots. No round takes marks before that round has ended: a slot that
    /// becomes the newest now cannot be marked before the slots that it supersedes.
    #[inline]
    pub(super) fn count_superseded(&self, round: &RoundMarks) {
        self.superseded_count.store(round.superseded.len(), Ordering::SeqCst);
    }

    /// Slots in no chain, and slots in chains.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn audit(&self) -> (Vec<u32>, Vec<u32>) {
        let waiting = lock(&self.waiting);
        (waiting.superseded.clone(), [&waiting.dropped[..], &waiting.ready].concat())
    }
}

impl Writecache {
    /// Whether enough slots wait for their marks that a round is due.
    pub(super) fn are_marks_due(&self) -> bool {
        let waiting = self.marks.waiting();
        waiting >= MARKS_MAX || waiting > 0 && self.pool.count() < self.index.slots() / 8
    }

    /// Takes the slots that a round marks free. Called after the batch is closed: slots dropped
    /// from here on are not older than any slot in the batch.
    pub(super) fn take_marks(&self, round: &mut RoundMarks, has_closed: bool) {
        self.marks.take(round, !has_closed || self.are_marks_due());
    }

    /// The marks of this round are about to be stored.
    pub(super) fn begin_marks(&self, round: &RoundMarks) {
        if mutants::is(Mutant::MarkedSlotsFree) {
            round.marks.iter().for_each(|slot| self.index.retire(*slot));
            self.pool.put_all(&round.marks);
        }
        for &slot in &round.drops {
            let mut locked = self.index.lock_of(self.index.word(slot).block());
            locked.set_state(slot, State::Marking);
        }
    }

    /// The marks of this round are durable: its slots are free. Returns whether there are any.
    pub(super) fn free_marked(&self, round: &mut RoundMarks) -> bool {
        for &slot in &round.drops {
            self.index.lock_of(self.index.word(slot).block()).unlink(slot);
        }
        let has_freed = !round.is_empty();
        if mutants::is(Mutant::MarkedSlotsFree) {
            round.marks.clear();
        }
        for slots in [&mut round.drops, &mut round.marks] {
            if slots.is_empty() {
                continue;
            }
            slots.iter().for_each(|slot| self.index.retire(*slot));
            self.pool.put_all(slots);
            slots.clear();
        }
        if has_freed {
            // Bios that had given up may wait again.
            self.room.hope();
        }
        has_freed
    }

    /// `slot` is committed: older versions of its block are not needed any more. The stripe is
    /// locked.
    pub(super) fn supersede(
        &self,
        locked: &mut Locked<'_>,
        block: u64,
        slot: u32,
        round: &mut RoundMarks,
    ) {
        #[cfg(feature = "mutants")]
        if self.supersede_wrongly(locked, block, slot, round) {
            return;
        }
        let mut at = slot;
        while let Some((before, found)) = locked.next_older(block, at) {
            at = before;
            match found.word.state() {
                State::Live
                | State::OverwrittenA
                | State::OverwrittenB
                | State::Cleaned
                | State::Damaged => {
                    self.orders.awaited.replace(found.slot, slot);
                    locked.supersede_behind(before, found);
                    round.superseded.push(found.slot);
                    continue;
                }
                // The slot is freed when the write in flight has ended.
                State::Cleaning | State::Overwriting => {
                    locked.set_state(found.slot, State::Outdated);
                }
                _ => {}
            }
            at = found.slot;
        }
    }

    /// The origin has the data of `slot`, or newer data. The stripe is locked.
    pub(super) fn drop_clean(&self, locked: &mut Locked<'_>, block: u64, slot: u32) {
        self.orders.awaited.remove(slot);
        locked.remove_age(slot);
        let newest = locked.newest(block);
        if newest.is_some_and(|newest| newest.word.state().is_uncommitted()) {
            return locked.set_state(slot, State::Cleaned);
        }
        locked.set_state(slot, State::Dropped);
        self.marks.add_dropped(slot, &self.rounds);
    }

    /// A superseded slot whose write-back has ended. The stripe is locked.
    pub(super) fn drop_outdated(&self, locked: &mut Locked<'_>, slot: u32) {
        self.await_newest(locked, slot);
        locked.unlink(slot);
        self.index.set_marking(slot);
        self.marks.add_superseded(slot);
    }
}

#[cfg(feature = "mutants")]
impl Writecache {
    fn supersede_wrongly(
        &self,
        locked: &mut Locked<'_>,
        block: u64,
        slot: u32,
        round: &mut RoundMarks,
    ) -> bool {
        let frees = mutants::is(Mutant::FreeMarkLate);
        let takes_moving = mutants::is(Mutant::OverwritingFreed);
        if !frees && !takes_moving {
            return false;
        }
        use State::{Cleaned, Cleaning, Damaged, Live, Overwriting, OverwrittenA, OverwrittenB};
        let mut at = slot;
        while let Some((before, found)) = locked.next_older(block, at) {
            at = before;
            let state = found.word.state();
            let is_idle = matches!(state, Live | OverwrittenA | OverwrittenB | Cleaned | Damaged);
            if is_idle || state == Overwriting && takes_moving {
                locked.supersede_behind(before, found);
                if frees {
                    self.index.retire(found.slot);
                    self.pool.put(found.slot);
                } else {
                    round.superseded.push(found.slot);
                }
                continue;
            }
            if matches!(state, Cleaning | Overwriting) {
                locked.set_state(found.slot, State::Outdated);
            }
            at = found.slot;
        }
        true
    }
}
