//! Commits: which batches there are, who waits for them, and which entries must be marked free.
//!
//! A *round* makes durable, in this order: the entries of the batch that it closes, together with
//! the free marks of slots that an earlier round let go; then the commit counter. Slots whose
//! marks are durable go back to the pool. Many waiting flushes share a round. How the bytes get to
//! the medium is in `round`.
//!
//! Why marks may be late, and in which order they come:
//! 1. A slot is not used again before its mark is durable. Superseded slots wait until they are
//!    many, or needed.
//! 2. An older version is superseded once the newer one's counter is durable; its mark may be
//!    stored with the next round. Marks of superseded slots need no order among themselves.
//! 3. The newest version (dropped after write-back or discard) must not be marked before every
//!    older one is: a crash between the two would bring the older one back. So it waits for a
//!    whole round in between, unless nothing at all was waiting before it; and as long as any
//!    such waits, no round leaves marks out.
//! 4. A slot that was written back while a newer version was on its way is not dropped: the
//!    newer one's commit supersedes it.
//! 5. Entries that a crash kept from being committed have the number of the next batch, or a
//!    later one. The first round after an attach marks them, before its counter brings them to
//!    life.

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::lock;
use crate::target::Port;

use super::args::Mode;
use super::index::{Locked, State};
use super::round::{Phase, Run};
use super::{TOKEN_FLUSH, Writecache, add};

/// A bio that waits for a round: its progress says which, and how far the bio is.
const WAITS: u64 = 1 << 63;
const GOES_ON: u64 = 1 << 62;
const ROUND_SHIFT: u32 = 20;
const ROUND_MASK: u64 = (1 << 42) - 1;
/// Progress is counted in sectors of 512 bytes there.
const SECTOR_SHIFT: u32 = 9;

/// A round marks superseded slots free when so many wait for it; they are cheaper together.
const MARKS_MAX: usize = 1024;

/// The state of rounds.
#[derive(Debug, Default)]
pub(super) struct Commit {
    /// The commit counter on the medium.
    pub(super) seq: u64,
    pub(super) phase: Phase,
    /// The port whose thread drives the round of mode `s`.
    pub(super) driver: usize,
    /// Bios of the driving port that wait for rounds.
    pub(super) waiters: Vec<(u64, bool, Bio)>,
    /// Whether it commits a batch: then it has entries to write, and the counter.
    pub(super) has_batch: bool,
    /// Stripes whose lists it closed, as bits.
    pub(super) closed: u32,
    /// Slots in no chain that this round marks free.
    pub(super) marks: Vec<u32>,
    /// Slots in chains that it marks free.
    pub(super) drops: Vec<u32>,
    /// Room for its entries.
    pub(super) batch: Vec<Run>,
    /// Slots that commits have superseded, and that wait for their marks.
    pub(super) superseded: Vec<u32>,
}

/// Slots that wait for their free marks.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Newer versions of their blocks are durable, and their write-back has ended, or they were so
    /// when the cache was opened. In no chain.
    superseded: Vec<u32>,
    /// Were the newest versions. In their chains.
    dropped: Vec<u32>,
    /// As those, and a round has begun since.
    ready: Vec<u32>,
    /// Some of the superseded ones may never have been committed: rule 5.
    has_uncommitted: bool,
}

impl Marks {
    /// What an attach found, entries that were never committed among them.
    pub(super) fn of(superseded: Vec<u32>) -> Marks {
        Marks { superseded, has_uncommitted: true, ..Marks::default() }
    }

    /// Slots in no chain, and slots in chains.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn audit(&self) -> (Vec<u32>, Vec<u32>) {
        (self.superseded.clone(), [&self.dropped[..], &self.ready].concat())
    }

    fn count(&self) -> usize {
        self.superseded.len() + self.dropped.len() + self.ready.len()
    }
}

/// A flush of the origin that a client waits for, or a suspend.
#[derive(Debug)]
pub(super) struct FlushJob {
    bio: Option<Bio>,
    bypasses: u64,
}

/// The stripes whose bits are set.
fn stripes_of(bits: u32) -> impl Iterator<Item = usize> + use<> {
    std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)))
        .take_while(|bits| *bits != 0)
        .map(|bits| bits.trailing_zeros() as usize)
}

/// Whether a parked bio waits for a round.
pub(super) fn is_waiting(bio: &Bio) -> bool {
    bio.progress & WAITS != 0
}

/// Whether a bio waits for a round: which, and whether it goes on then or is done. What it had
/// done before is restored.
pub(super) fn waits_for(bio: &mut Bio) -> Option<(u64, bool)> {
    if !is_waiting(bio) {
        return None;
    }
    let round = bio.progress >> ROUND_SHIFT & ROUND_MASK;
    let goes_on = bio.progress & GOES_ON != 0;
    bio.progress = (bio.progress & ((1 << ROUND_SHIFT) - 1)) << SECTOR_SHIFT;
    Some((round, goes_on))
}

fn waiting(mut bio: Bio, round: u64, goes_on: bool) -> Bio {
    let flags = if goes_on { WAITS | GOES_ON } else { WAITS };
    bio.progress = flags | (round & ROUND_MASK) << ROUND_SHIFT | bio.progress >> SECTOR_SHIFT;
    bio
}

impl Writecache {
    pub(super) fn is_pmem(&self) -> bool {
        self.args.mode == Mode::Pmem
    }

    pub(super) fn autocommit_blocks(&self) -> u64 {
        let default = if self.is_pmem() { 64 } else { 65_536 };
        self.args.options.autocommit_blocks.map_or(default, u64::from)
    }

    /// Whether a round has ended, or none will end any more.
    pub(super) fn is_past(&self, round: u64) -> bool {
        self.ended.load(Ordering::SeqCst) >= round || self.has_failed()
    }

    /// Whether anything may be uncommitted that was completed before. What no round can take yet,
    /// because whoever puts it into a list is not ready, does not count: nobody is to commit in
    /// circles until he is.
    pub(super) fn has_open(&self) -> bool {
        // In this order: a round counts itself, then takes what is filled.
        self.filled.stripes() != 0
            || self.ended.load(Ordering::SeqCst) < self.begun.load(Ordering::SeqCst)
    }

    /// Slots that wait for their marks.
    pub(super) fn marks_waiting(&self) -> usize {
        self.marks_count.load(Ordering::SeqCst) + self.superseded_count.load(Ordering::SeqCst)
    }

    /// The round after which all that is complete now is durable: the one that is under way if no
    /// list that is being filled has anything, else the next. When a round begins during the look,
    /// a list may have been closed just before it was looked at.
    fn round_needed(&self) -> u64 {
        loop {
            let begun = self.begun.load(Ordering::SeqCst);
            let is_any_filled = self.filled.stripes() != 0;
            if self.begun.load(Ordering::SeqCst) == begun || mutants::is(Mutant::RoundReadOnce) {
                return (begun + u64::from(is_any_filled))
                    .max(self.marked_by.load(Ordering::SeqCst));
            }
        }
    }

    /// A flush.
    pub(super) fn flush(&self, bio: Bio, port: &mut Port) {
        self.counters.flushes.fetch_add(1, Ordering::Relaxed);
        if mutants::is(Mutant::FlushUncommitted) {
            return port.finish(bio, Ok(()));
        }
        self.make_durable(bio, port);
    }

    /// Everything that is complete becomes durable, then the bio is done.
    pub(super) fn make_durable(&self, bio: Bio, port: &mut Port) {
        let bypasses = self.bypassed.load(Ordering::SeqCst);
        if self.owes_flush() {
            let job = FlushJob { bio: Some(bio), bypasses };
            let place = self.jobs.flushes.of(port).insert(job);
            let token = TOKEN_FLUSH | u64::from(place);
            port.ios.push_back(self.origin_io(Op::Flush, 0, 0, Buffer::empty(), token));
            return;
        }
        self.settle(bio, port);
    }

    /// Nobody but a suspend waits for it.
    pub(super) fn flush_origin(&self, port: &mut Port) {
        let bypasses = self.bypassed.load(Ordering::SeqCst);
        let place = self.jobs.flushes.of(port).insert(FlushJob { bio: None, bypasses });
        let token = TOKEN_FLUSH | u64::from(place);
        port.ios.push_back(self.origin_io(Op::Flush, 0, 0, Buffer::empty(), token));
    }

    /// Whether the origin has writes that may not be durable.
    pub(super) fn owes_flush(&self) -> bool {
        self.bypasses_flushed.load(Ordering::SeqCst) < self.bypassed.load(Ordering::SeqCst)
    }

    /// The origin is flushed.
    pub(super) fn complete_flush(&self, io: DiskIo, port: &mut Port) {
        let FlushJob { bio, bypasses } = self.jobs.flushes.of(port).remove(io.token as u32);
        match io.result {
            Ok(()) => {
                let covered = match mutants::is(Mutant::BypassesAsOfEnd) {
                    true => self.bypassed.load(Ordering::SeqCst),
                    false => bypasses,
                };
                self.bypasses_flushed.fetch_max(covered, Ordering::SeqCst);
            }
            Err(_) => _ = self.origin_flush_failures.fetch_add(1, Ordering::SeqCst),
        }
        match (bio, io.result) {
            (Some(bio), Ok(())) => self.settle(bio, port),
            (Some(bio), Err(status)) => port.finish(bio, Err(status)),
            (None, result) => {
                self.is_origin_flush_refused.store(result.is_err(), Ordering::SeqCst);
                self.is_flushing_origin.store(false, Ordering::SeqCst);
                self.events.work();
            }
        }
    }

    fn settle(&self, bio: Bio, port: &mut Port) {
        self.wait_until(self.round_needed(), bio, false, port);
    }

    /// The bio goes on once all that is complete now is durable, and marked.
    pub(super) fn settle_and_go_on(&self, bio: Bio, port: &mut Port) {
        let next = self.begun.load(Ordering::SeqCst) + 1;
        self.wait_until(self.round_needed().max(next), bio, true, port);
    }

    /// The list of uncommitted blocks is full.
    pub(super) fn wait_for_list(&self, bio: Bio, port: &mut Port) {
        self.wait_until(self.begun.load(Ordering::SeqCst) + 1, bio, true, port);
    }

    fn wait_until(&self, round: u64, bio: Bio, goes_on: bool, port: &mut Port) {
        if self.is_pmem() {
            self.commit_until(round);
        }
        match self.is_past(round) {
            true => self.go_on(bio, goes_on, port),
            false => self.wait_for_round(bio, round, goes_on, port),
        }
    }

    /// Mode `s`: the bio waits here if this port drives the rounds, else parked. Nobody but its
    /// own port may finish it.
    pub(super) fn wait_for_round(&self, bio: Bio, round: u64, goes_on: bool, port: &mut Port) {
        let mut commit = lock(&self.commit);
        self.begin_disk_round(&mut commit, round, port);
        if self.is_past(round) {
            drop(commit);
            return self.go_on(bio, goes_on, port);
        }
        if commit.driver == port.id {
            commit.waiters.push((round, goes_on, bio));
        } else {
            // Under the lock: the round's end must see it.
            self.wants_round.store(true, Ordering::SeqCst);
            port.parked.push_back(waiting(bio, round, goes_on));
        }
    }

    /// What a bio waited for is past.
    pub(super) fn go_on(&self, bio: Bio, goes_on: bool, port: &mut Port) {
        match bio.op {
            _ if self.has_failed() => port.finish(bio, Err(Status::Io)),
            _ if !goes_on => port.finish(bio, Ok(())),
            Op::Write => self.write(bio, port),
            _ => self.zero(bio, port),
        }
    }

    /// Commits in mode `p`. In mode `s` the background does, as soon as it can: a round goes on
    /// only while its port is looked after, and a client may have nothing else in flight.
    pub(super) fn ask_for_commit(&self, port: &mut Port) {
        if self.is_pmem() || mutants::is(Mutant::RoundOfNobody) {
            return self.commit_soon(port);
        }
        if !self.is_commit_asked.swap(true, Ordering::SeqCst) {
            self.events.work();
        }
    }

    /// Commits in mode `p`; begins to in mode `s`, on the background's port.
    pub(super) fn commit_soon(&self, port: &mut Port) {
        let round = self.begun.load(Ordering::SeqCst) + 1;
        if self.is_pmem() {
            // Somebody who commits already is as good, and nobody needs to wait for him.
            let freed =
                self.commit.try_lock().is_ok_and(|mut commit| self.memory_round(&mut commit));
            if freed {
                self.signal_room();
            }
            return;
        }
        let mut commit = lock(&self.commit);
        if commit.phase == Phase::Idle {
            self.begin_disk_round(&mut commit, round, port);
        }
    }

    /// Mode `p`: rounds until `round` has ended.
    pub(super) fn commit_until(&self, round: u64) {
        let mut freed = false;
        while !self.is_past(round) {
            let mut commit = lock(&self.commit);
            if !self.is_past(round) {
                freed |= self.memory_round(&mut commit);
            }
        }
        if freed {
            self.signal_room();
        }
    }

    /// Mode `p`, and no slot is free: frees those that only wait for their marks. Whether that
    /// gave any.
    pub(super) fn make_room_at_once(&self) -> bool {
        if !self.is_pmem() || self.has_failed() {
            return false;
        }
        let mut tries = 0;
        while !self.pool.has_any() && tries < 3 && (self.marks_waiting() > 0 || self.has_open()) {
            self.commit_until(self.begun.load(Ordering::SeqCst) + 1);
            tries += 1;
        }
        self.pool.has_any()
    }

    /// Somebody may wait for the slots that were just put back.
    pub(super) fn signal_room(&self) {
        let bytes = u64::from(self.pool.count()) * self.block_bytes();
        // Only write-back gives slots back.
        self.room.tell(bytes, true);
    }

    /// Closes the open batch: from here on writes fill the other lists. Takes the slots that this
    /// round marks free. Says whether there is anything to do.
    pub(super) fn close(&self, commit: &mut Commit) -> bool {
        self.begun.fetch_add(1, Ordering::SeqCst);
        (commit.has_batch, commit.closed) = (false, 0);
        // Behind the count of rounds: who finds nothing filled any more looks again. A stripe's bit
        // comes back when something is put into its other list.
        for stripe in stripes_of(self.filled.take()) {
            let locked = self.index.lock(stripe);
            let filling = self.filling[stripe].load(Ordering::Relaxed) as usize;
            if commit.closed == 0 {
                // Not by the counter, which a round of overwritten blocks leaves as it is: of a
                // stripe's two lists, the next server must know which one is the newer.
                match mutants::is(Mutant::BatchByCounter) {
                    true => self.batch.store(commit.seq + 1, Ordering::Release),
                    false => _ = self.batch.fetch_add(1, Ordering::AcqRel),
                }
            }
            commit.closed |= 1 << stripe;
            let is_fresh = self.has_fresh(stripe, filling).load(Ordering::Relaxed);
            commit.has_batch |= is_fresh || self.is_pmem();
            self.filling[stripe].store(1 - filling as u32, Ordering::Release);
            drop(locked);
        }
        self.take_marks(commit);
        commit.closed != 0 || !commit.marks.is_empty() || !commit.drops.is_empty()
    }

    /// Mode `s`: whether a list of a stripe, whose lock is held, has blocks that need entries, not
    /// only overwritten ones.
    pub(super) fn has_fresh(&self, stripe: usize, list: usize) -> &AtomicBool {
        &self.has_fresh[stripe * 2 + list]
    }

    /// Takes the slots that this round marks free. Called behind the closing of the batch: what
    /// is dropped from here on is not older than anything in it.
    fn take_marks(&self, commit: &mut Commit) {
        let has_others = self.marks_count.load(Ordering::SeqCst) > 0;
        let is_due = commit.closed == 0 || self.are_due(self.marks_waiting());
        if !has_others && (commit.superseded.is_empty() || !is_due) {
            return;
        }
        let mut marks = lock(&self.marks);
        let marks = &mut *marks;
        let has_dropped = !marks.dropped.is_empty() || !marks.ready.is_empty();
        if !has_dropped && !is_due && !marks.has_uncommitted {
            return;
        }
        marks.has_uncommitted = false;
        commit.marks.append(&mut commit.superseded);
        self.superseded_count.store(0, Ordering::SeqCst);
        commit.marks.append(&mut marks.superseded);
        let is_first = commit.marks.is_empty() && marks.ready.is_empty();
        commit.drops.append(&mut marks.ready);
        if is_first || mutants::is(Mutant::NewerFreedFirst) {
            commit.drops.append(&mut marks.dropped);
        } else {
            marks.ready.append(&mut marks.dropped);
        }
        self.marks_count.store(marks.count(), Ordering::SeqCst);
    }

    fn are_due(&self, waiting: usize) -> bool {
        waiting >= MARKS_MAX || waiting > 0 && self.pool.count() < self.index.slots() / 8
    }

    /// The stripes of the batch that is being committed.
    pub(super) fn closed_stripes(commit: &Commit) -> impl Iterator<Item = usize> + use<> {
        stripes_of(commit.closed)
    }

    /// The entries of the batch that is being committed, of one stripe.
    pub(super) fn closing(&self, stripe: usize) -> impl Iterator<Item = (u64, u32)> + '_ {
        let closing = 1 - self.filling[stripe].load(Ordering::Relaxed) as usize;
        let state = State::open_in(closing);
        let held = self.open.all(stripe, closing);
        held.filter(move |&(block, slot)| self.index.word(slot).is_of(block, state))
    }

    /// The marks of this round are about to be stored.
    pub(super) fn begin_marks(&self, commit: &Commit) {
        if mutants::is(Mutant::MarkedSlotsFree) {
            commit.marks.iter().for_each(|slot| self.index.retire(*slot));
            self.pool.put_all(&commit.marks);
        }
        for &slot in &commit.drops {
            let mut locked = self.index.lock_of(self.index.word(slot).block());
            locked.set_state(slot, State::Marking);
        }
    }

    /// Everything of the round is durable: its batch is committed, its marked slots are free.
    pub(super) fn finish_round(&self, commit: &mut Commit) -> bool {
        let round = self.begun.load(Ordering::SeqCst);
        for stripe in Writecache::closed_stripes(commit) {
            self.commit_stripe(stripe, &mut commit.superseded);
        }
        // No round takes marks before this one has ended: nothing that becomes the newest now can
        // be marked before what it supersedes.
        self.superseded_count.store(commit.superseded.len(), Ordering::SeqCst);
        add(&self.counters.commits, u64::from(commit.has_batch));
        for &slot in &commit.drops {
            self.index.lock_of(self.index.word(slot).block()).unlink(slot);
        }
        let has_freed = !commit.marks.is_empty() || !commit.drops.is_empty();
        if mutants::is(Mutant::MarkedSlotsFree) {
            commit.marks.clear();
        }
        for slots in [&mut commit.drops, &mut commit.marks] {
            if slots.is_empty() {
                continue;
            }
            slots.iter().for_each(|slot| self.index.retire(*slot));
            self.pool.put_all(slots);
            slots.clear();
        }
        if has_freed {
            // Whoever gave up before may wait again.
            self.room.hope();
        }
        self.ended.store(round, Ordering::SeqCst);
        has_freed
    }

    /// The stripe's closed list is durable.
    fn commit_stripe(&self, stripe: usize, superseded: &mut Vec<u32>) {
        let closing = 1 - self.filling[stripe].load(Ordering::Relaxed) as usize;
        let state = State::open_in(closing);
        let mut held = self.open.all(stripe, closing);
        while held.len() > 0 {
            let mut locked = self.index.lock(stripe);
            for (block, slot) in held.by_ref().take(64) {
                if locked.make_live(slot, block, state) {
                    self.supersede(&mut locked, block, slot, superseded);
                } else {
                    locked.make_live(slot, block, State::overwritten_in(closing));
                }
            }
        }
        self.has_fresh(stripe, closing).store(false, Ordering::Relaxed);
        self.open.clear(stripe, closing);
    }

    /// `slot` is committed: older versions of its block are not needed any more.
    fn supersede(&self, locked: &mut Locked<'_>, block: u64, slot: u32, superseded: &mut Vec<u32>) {
        let mut at = slot;
        while let Some((before, found)) = locked.next_older(block, at) {
            at = before;
            match found.word.state() {
                State::Live
                | State::OverwrittenA
                | State::OverwrittenB
                | State::Cleaned
                | State::Damaged => {
                    locked.supersede_behind(before, found);
                    if mutants::is(Mutant::FreeMarkLate) {
                        self.index.retire(found.slot);
                        self.pool.put(found.slot);
                        continue;
                    }
                    superseded.push(found.slot);
                    continue;
                }
                // It goes when what is on its way has arrived.
                State::Overwriting if mutants::is(Mutant::OverwritingFreed) => {
                    locked.supersede_behind(before, found);
                    superseded.push(found.slot);
                    continue;
                }
                State::Cleaning | State::Overwriting => {
                    locked.set_state(found.slot, State::Outdated);
                }
                _ => {}
            }
            at = found.slot;
        }
    }

    /// The origin has what `slot` has, or something newer. The stripe is locked.
    pub(super) fn drop_clean(&self, locked: &mut Locked<'_>, block: u64, slot: u32) {
        locked.remove_age(slot);
        let newest = locked.newest(block);
        if newest.is_some_and(|newest| newest.word.state().is_uncommitted()) {
            return locked.set_state(slot, State::Cleaned);
        }
        locked.set_state(slot, State::Dropped);
        let mut marks = lock(&self.marks);
        marks.dropped.push(slot);
        // Before the look at the rounds: one that begins now and sees none waiting is not counted.
        self.marks_count.store(marks.count(), Ordering::SeqCst);
        // Two rounds that have not begun yet: rule 3.
        self.marked_by.fetch_max(self.begun.load(Ordering::SeqCst) + 2, Ordering::SeqCst);
    }

    /// A superseded slot whose write-back has ended. The stripe is locked.
    pub(super) fn drop_outdated(&self, locked: &mut Locked<'_>, slot: u32) {
        locked.unlink(slot);
        self.index.set_marking(slot);
        let mut marks = lock(&self.marks);
        marks.superseded.push(slot);
        self.marks_count.store(marks.count(), Ordering::SeqCst);
    }

    /// Whether so many slots wait for their marks that a round is due.
    pub(super) fn are_marks_due(&self) -> bool {
        self.are_due(self.marks_waiting())
    }
}
