//! The background: blocks enter, leave and are written back; commits without a waiting request.

mod committing;
mod draining;

use std::collections::VecDeque;

use crate::common::cycle::{Cycle, Served};
use crate::common::wakeup::Wakeup;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::target::{Events, Port};
use crate::units::{MIB, Nanos, SECOND, SECTOR};

use super::args::PolicyName;
use super::aside::Culprit;
use super::blocks::Blocks;
use super::copy::Copies;
use super::in_flight::Mover;
use super::partial::PARTIALS_MAX;
use super::policy::Next;
use super::settle::Settling;
use super::{Cache, TOKEN_CLEANED, TOKEN_SETTLED, waits};

/// Clients are idle when they have sent no request for this long.
const IDLE_AFTER: Nanos = SECOND;
/// Mappings that clients do not wait for are committed this long after the first of them.
const COMMIT_AFTER: Nanos = SECOND;
/// Marks of slots that are clean go after one to two of these.
const TIDY_EVERY: Nanos = 10 * SECOND;
/// Bytes of a batch of write-back that hurries, or one block.
pub(super) const BATCH_BYTES_MAX: u64 = 64 * MIB;
/// Blocks in flight of a batch that hurries.
pub(super) const HURRY_BYTES_MAX: u64 = 32 * MIB;
/// Slots that are made free together when one is wanted.
pub(super) const ROOM_MAX: u32 = 64;
/// Of this many slots one is kept free.
pub(super) const ROOM_PART: u32 = 64;

/// The background, and the part of it that other threads use without its lock.
#[derive(Debug)]
pub(super) struct Background {
    agenda: Mutex<Agenda>,
    wakeup: Wakeup,
    requests: AtomicU64,
    /// The end left no record of the origin's state.
    pub(super) is_unmarked: AtomicBool,
    /// Whether the origin has served a client during a pause of write-back.
    pub(super) served: Served,
    /// I/O for ports that may not be driven again.
    handed_over: Mutex<VecDeque<DiskIo>>,
}

/// State of the background.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    now: Nanos,
    copies: Copies,
    cycle: Cycle,
    /// Slots of the batch that are still to be copied, with their blocks.
    left: VecDeque<(u32, u64)>,
    /// Slots of the batch that were copied.
    copied: Vec<(u32, u64)>,
    /// How many are being copied.
    cleaning: u64,
    /// The devices that failed a copy of the batch.
    culprits: Vec<Culprit>,
    /// Blocks of the batch are being copied.
    is_writing: bool,
    /// It began before the drain that is under way.
    is_older: bool,
    /// The mark of the flush after it, and the number of the origin's losses when it began.
    mark: u64,
    doubts: u64,
    settling: Settling,
    commit_at: Option<Nanos>,
    tidy_at: Nanos,
    quiet: Quiet,
}

/// The number of counted requests, and the time of the last one.
#[derive(Debug, Default)]
struct Quiet {
    requests: u64,
    since: Nanos,
}

impl Agenda {
    /// Whether no I/O is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.copies.count() == 0
            && self.cycle.is_idle()
            && self.left.is_empty()
            && self.settling.is_idle()
    }

    /// The device that it waits for.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        let is_flushing = self.cycle.is_flushing();
        let of_copies = self.copies.waits_for().or(is_flushing.then_some(waits::ORIGIN));
        of_copies.or_else(|| self.settling.waits_for())
    }

    /// Failed work is tried again now.
    pub(super) fn end_pause(&mut self) {
        self.cycle.end_pause();
    }

    /// Whether write-back meets errors.
    pub(super) fn is_failing(&self) -> bool {
        self.cycle.retry().is_failing()
    }

    fn is_quiet(&self) -> bool {
        self.now >= self.quiet.since.saturating_add(IDLE_AFTER)
    }
}

/// Follows the policy. Returns how many slots it will free soon; `None`: not now.
fn follow(blocks: &mut Blocks, agenda: &mut Agenda, next: Next) -> Option<u32> {
    let (Next::Leave(slot) | Next::Clean(slot) | Next::Complete(slot)) = next;
    let Some(block) = blocks.slots.block(slot) else { return blocks.follow_in_part(next) };
    let is_dirty = blocks.slots.is_dirty(slot);
    let is_quiet = blocks.in_flight.is_quiet(block);
    let is_quiet = is_quiet && (!is_dirty || blocks.slots.aside.is_due(slot, agenda.now));
    match next {
        Next::Leave(_)
            if mutants::is(Mutant::LeftWhileRead)
                && !is_dirty
                && blocks.in_flight.mover(block).is_none()
                && !blocks.in_flight.has_writers(block) =>
        {
            blocks.leave(block, slot);
        }
        Next::Leave(_) if is_quiet && !is_dirty => blocks.leave(block, slot),
        Next::Clean(_) if is_quiet && is_dirty => agenda.left.push_back((slot, block)),
        Next::Leave(_) if is_quiet => {
            // Its turn to leave comes again, when it is clean.
            blocks.policy.stay(slot);
            blocks.policy.set_dirty(slot, true);
            agenda.left.push_back((slot, block));
        }
        Next::Leave(_) | Next::Clean(_) => {
            blocks.policy.stay(slot);
            blocks.policy.set_dirty(slot, is_dirty);
            return None;
        }
        // All of it is there.
        Next::Complete(_) => return Some(0),
    }
    Some(1)
}

/// Whether a request writes to a block, so that a copy of the block may miss its data.
fn is_written(blocks: &Blocks, block: u64) -> bool {
    blocks.in_flight.has_writers(block) && !mutants::is(Mutant::CleanedBesideWriter)
}

/// Whether a dirty block may be copied now. While commits fail, a block that waits for one is
/// copied, because its slot is not on the medium. An awaited block is copied despite writers,
/// and stays dirty: otherwise overlapping writes would delay the drain.
fn is_free_to_clean(blocks: &Blocks, block: u64, slot: u32) -> bool {
    let waits = blocks.slots.is_fresh(slot) && !blocks.trouble.is_stuck;
    let is_kept = is_written(blocks, block) && !blocks.slots.is_awaited(slot);
    blocks.in_flight.mover(block).is_none() && !is_kept && !waits
}

impl Background {
    pub(super) fn new(events: &Arc<Events>) -> Background {
        Background {
            agenda: Mutex::default(),
            wakeup: Wakeup::new(events),
            requests: AtomicU64::new(0),
            is_unmarked: AtomicBool::new(false),
            served: Served::default(),
            handed_over: Mutex::default(),
        }
    }

    /// Locks the background out.
    pub(super) fn lock(&self) -> MutexGuard<'_, Agenda> {
        lock(&self.agenda)
    }

    /// Makes sure that the background will look.
    pub(super) fn arm(&self) {
        self.wakeup.arm(true);
    }

    /// Has the background see to an I/O.
    pub(super) fn hand_over(&self, io: DiskIo) {
        lock(&self.handed_over).push_back(io);
    }

    /// A client asks for something.
    #[inline]
    pub(super) fn note_request(&self) {
        // A lost count does not matter.
        let count = self.requests.load(Ordering::Relaxed);
        self.requests.store(count.wrapping_add(1), Ordering::Relaxed);
    }
}

impl Cache {
    /// See [`Target::tick`](crate::target::Target::tick).
    pub(super) fn take_tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let mut agenda = self.background.lock();
        agenda.now = now;
        if self.background.served.take() {
            agenda.cycle.end_early();
            self.blocks().slots.aside.end_pause_of_origin();
        }
        let requests = self.background.requests.load(Ordering::Relaxed);
        if requests != agenda.quiet.requests {
            agenda.quiet.requests = requests;
            agenda.quiet.since = now;
        }
        self.blocks().policy.tick(now);
        self.work(&mut agenda, port);
        self.next_look(&agenda)
    }

    /// An I/O of a copy, or a flush after a batch, is back.
    pub(super) fn background_is_back(&self, io: DiskIo, port: &mut Port) {
        self.note_ended();
        let mut agenda = self.background.lock();
        if io.token & super::TOKEN_KIND == TOKEN_SETTLED {
            self.end_settling(&mut agenda.settling, &io);
        } else if io.token & super::TOKEN_KIND == TOKEN_CLEANED {
            self.end_flush(&mut agenda, io);
        } else if let Some((copied, status)) = self.complete_copy(&mut agenda.copies, io, port) {
            agenda.cleaning -= 1;
            match status {
                Err(culprit) if !mutants::is(Mutant::CleanedUnwritten) => {
                    self.set_aside(&mut agenda, copied, culprit);
                }
                _ => agenda.copied.push(copied),
            }
        }
        self.work(&mut agenda, port);
        // A tick decides when to look again.
        self.events.work();
    }

    /// A copy failed: its block stays dirty, and the batch continues without it.
    fn set_aside(&self, agenda: &mut Agenda, (slot, block): (u32, u64), culprit: Culprit) {
        let mut blocks = self.blocks();
        blocks.slots.aside.fail(slot, culprit);
        let is_awaited = blocks.in_flight.end_move(block).1;
        blocks.cleaned(slot, false);
        drop(blocks);
        if !agenda.culprits.contains(&culprit) {
            agenda.culprits.push(culprit);
        }
        self.counts.failed_copies.fetch_add(1, Ordering::Relaxed);
        if is_awaited {
            self.events.room();
        }
    }

    /// All that the background does, in this order.
    fn work(&self, agenda: &mut Agenda, port: &mut Port) {
        port.ios.append(&mut lock(&self.background.handed_over));
        let is_suspended = self.orders.is_suspended();
        if !is_suspended {
            self.blocks().leave_unreadable();
            self.make_room(agenda);
            self.fill_gaps(agenda.copies.count(), port);
        }
        self.write_back(agenda, port);
        if is_suspended {
            self.come_to_rest(agenda, port);
        } else {
            self.commit_if_due(agenda, port);
        }
    }

    /// Gives up slots if a block waits for one.
    fn make_room(&self, agenda: &mut Agenda) {
        let mut blocks = self.blocks();
        if !blocks.wants_room || blocks.trouble.is_stuck || blocks.trouble.has_lost {
            return;
        }
        let wanted = blocks.room();
        // Blocks in part have a bound of their own.
        let is_full = blocks.slots.partials.count() >= PARTIALS_MAX;
        let mut coming = if is_full { 0 } else { blocks.slots.free() }
            + blocks.changes.leaving()
            + agenda.left.len() as u32
            + agenda.copied.len() as u32
            + agenda.cleaning as u32;
        let mut skips = if blocks.slots.aside.is_empty() { 0 } else { ROOM_MAX };
        while coming < wanted {
            let Some(next) = blocks.policy.next() else { break };
            match follow(&mut blocks, agenda, next) {
                Some(count) => coming += count,
                None if skips > 0 => skips -= 1,
                None => break,
            }
        }
        // A slot that is written back for this is to be freed then.
        blocks.wants_room = blocks.slots.free() == 0 && coming > 0;
    }

    /// How many blocks may be on their way while clients are busy.
    fn copies_max(&self) -> u64 {
        match self.orders.threshold_bytes() {
            0 => 0,
            bytes => (bytes / self.plan.block_bytes).max(1),
        }
    }

    /// Whether dirty blocks are to be written back now, and whether in a hurry.
    fn cleans(&self, agenda: &Agenda) -> Option<bool> {
        if self.orders.is_draining() || self.plan.args.policy == PolicyName::Cleaner {
            return Some(true);
        }
        (agenda.is_quiet() && self.copies_max() > 0).then_some(false)
    }

    /// The cycle of write-back.
    fn write_back(&self, agenda: &mut Agenda, port: &mut Port) {
        let is_suspended = self.orders.is_suspended();
        if agenda.cycle.plan_retry(agenda.now) {
            self.background.served.want(agenda.cycle.may_end_early(agenda.now));
        }
        if !is_suspended && agenda.cycle.is_free(agenda.now) {
            if let Some(hurries) = self.cleans(agenda).filter(|_| agenda.left.is_empty()) {
                self.gather(agenda, hurries);
            }
            if !agenda.left.is_empty() {
                agenda.cycle.gather();
                agenda.cycle.write();
                agenda.is_writing = true;
                agenda.doubts = self.blocks().trouble.doubts;
            }
        }
        if is_suspended || self.is_dead_end(agenda) {
            self.leave_batch(agenda);
        }
        if !agenda.is_writing {
            return;
        }
        // Data that entering blocks still need also counts, except in a hurry.
        let block_bytes = self.plan.block_bytes;
        let (limit, coming) = match self.cleans(agenda) {
            Some(true) => ((HURRY_BYTES_MAX / block_bytes).max(1), 0),
            _ => {
                let [_, of_gaps] = self.blocks().slots.partials.filling();
                (self.copies_max().max(1), of_gaps * SECTOR / block_bytes)
            }
        };
        while agenda.copies.count() == 0 || agenda.copies.count() + coming < limit {
            let Some((slot, block)) = agenda.left.pop_front() else { break };
            self.begin_cleaning(agenda, slot, block, port);
        }
        if agenda.cleaning == 0 && agenda.left.is_empty() {
            agenda.is_writing = false;
            self.flush_batch(agenda, port);
        }
    }

    /// Whether the rest of the batch would fail as all of it did.
    fn is_dead_end(&self, agenda: &Agenda) -> bool {
        let blocks = self.blocks();
        let is_dead = blocks.slots.aside.unread.is_dead() || blocks.slots.aside.untaken.is_dead();
        is_dead && !agenda.culprits.is_empty()
    }

    /// The rest of the batch is not copied.
    fn leave_batch(&self, agenda: &mut Agenda) {
        let mut blocks = self.blocks();
        for (slot, block) in agenda.left.drain(..) {
            if blocks.slots.block(slot) == Some(block) {
                blocks.policy.stay(slot);
            }
        }
    }

    /// Takes dirty blocks for a batch, in the origin's order.
    fn gather(&self, agenda: &mut Agenda, hurries: bool) {
        let blocks = self.blocks();
        if blocks.slots.dirty_count() == 0 || blocks.trouble.has_lost {
            return;
        }
        let bytes = if hurries { BATCH_BYTES_MAX } else { self.orders.threshold_bytes() };
        let most = (bytes / self.plan.block_bytes).max(1) as usize;
        let most = blocks.slots.aside.most(most);
        // Blocks that a drain waits for precede blocks that clients write meanwhile.
        let awaited = blocks.slots.awaited();
        let first = if awaited.ones() > 0 { awaited } else { blocks.slots.dirty() };
        let dirty = first.iter().map(|slot| slot as u32);
        let free = dirty.filter_map(|slot| {
            let block = blocks.slots.block(slot)?;
            let is_free = is_free_to_clean(&blocks, block, slot)
                && blocks.slots.aside.is_due(slot, agenda.now);
            is_free.then_some((block, slot))
        });
        let (mut taken, mut failed) = (Vec::new(), Vec::new());
        for (block, slot) in free {
            match blocks.slots.aside.has(slot) {
                false => taken.push((block, slot)),
                true if failed.len() < most => failed.push((block, slot)),
                true => {}
            }
            if taken.len() >= most {
                break;
            }
        }
        taken.extend(failed);
        taken.truncate(most);
        taken.sort_unstable();
        agenda.left.extend(taken.into_iter().map(|(block, slot)| (slot, block)));
    }

    fn begin_cleaning(&self, agenda: &mut Agenda, slot: u32, block: u64, port: &mut Port) {
        let mut blocks = self.blocks();
        let is_free = blocks.slots.block(slot) == Some(block)
            && blocks.slots.is_dirty(slot)
            && is_free_to_clean(&blocks, block, slot);
        if !is_free {
            if blocks.slots.block(slot) == Some(block) {
                blocks.policy.stay(slot);
            }
            return;
        }
        let is_rewritten = is_written(&blocks, block);
        blocks.in_flight.begin_move(block, Mover::Cleaning { is_rewritten });
        let left = blocks.slots.write_back_of(slot, self.plan.block_bytes);
        let has_failed = blocks.slots.aside.has(slot);
        drop(blocks);
        agenda.cleaning += 1;
        self.begin_copy(&mut agenda.copies, (slot, block), left, has_failed, port);
    }

    /// All of the batch is on the origin, or was set aside.
    fn flush_batch(&self, agenda: &mut Agenda, port: &mut Port) {
        let mut blocks = self.blocks();
        if !agenda.copied.is_empty() {
            blocks.slots.aside.worked(Culprit::Cache);
            blocks.slots.aside.worked(Culprit::Origin);
        }
        agenda.culprits.iter().for_each(|culprit| blocks.slots.aside.pause(*culprit, agenda.now));
        drop(blocks);
        let culprits = std::mem::take(&mut agenda.culprits);
        if agenda.copied.is_empty() && culprits.contains(&Culprit::Origin) {
            agenda.cycle.note_failure(Status::Io);
            return self.end_batch(agenda, false);
        }
        if agenda.copied.is_empty() && !culprits.is_empty() {
            // The origin was not asked for anything.
            return agenda.cycle.flushed();
        }
        if agenda.copied.is_empty() || mutants::is(Mutant::CleanedUnflushed) {
            return self.end_batch(agenda, true);
        }
        agenda.cycle.flush();
        agenda.mark = self.origin.mark();
        port.ios.push_back(self.origin.flush(TOKEN_CLEANED));
    }

    /// The flush after a batch is back.
    fn end_flush(&self, agenda: &mut Agenda, io: DiskIo) {
        self.origin.flushed(agenda.mark, io.result);
        if let Err(status) = io.result {
            agenda.cycle.note_failure(status);
            self.doubt();
        }
        // Another flush may have failed meanwhile.
        let is_sure = self.blocks().trouble.doubts == agenda.doubts;
        let is_good = io.result.is_ok() && is_sure || mutants::is(Mutant::CleanedByFailedFlush);
        self.end_batch(agenda, is_good);
    }

    /// The blocks of the batch are clean, unless they were written to meanwhile.
    fn end_batch(&self, agenda: &mut Agenda, is_good: bool) {
        let mut blocks = self.blocks();
        let mut tells = false;
        let is_older = std::mem::take(&mut agenda.is_older);
        for (slot, block) in agenda.copied.drain(..) {
            let (mover, is_awaited) = blocks.in_flight.end_move(block);
            let is_as_copied = mover == Mover::Cleaning { is_rewritten: false };
            if (is_good || mutants::is(Mutant::FailedBatchDrained)) && !is_older {
                // It may have been written again since; the drain does not wait for that data.
                blocks.slots.end_wait(slot);
            }
            blocks.cleaned(slot, is_good && is_as_copied);
            tells |= is_awaited;
        }
        drop(blocks);
        if is_good {
            agenda.cycle.flushed();
            agenda.cycle.succeed();
        } else {
            agenda.cycle.fail();
            self.counts.failed_batches.fetch_add(1, Ordering::Relaxed);
        }
        if tells {
            self.events.room();
        }
    }

    /// A suspend begins: it flushes again.
    pub(super) fn begin_rest(&self) {
        self.background.lock().settling = Settling::default();
    }

    /// When to look again.
    fn next_look(&self, agenda: &Agenda) -> Option<Nanos> {
        let now = agenda.now;
        if self.orders.is_suspended() {
            return None;
        }
        let state = self.commits.lock();
        let (retry_at, tell_at) = (state.retry_at(), state.tell_at(now));
        drop(state);
        let blocks = self.blocks();
        let is_dirty = blocks.slots.dirty_count() > 0 && !blocks.trouble.has_lost;
        let has_changes = !blocks.changes.is_empty() || blocks.is_mark_due();
        let has_marks = blocks.has_marks();
        let retry_copies_at = blocks.slots.aside.retry_at();
        let is_untold = blocks.trouble.is_untold();
        drop(blocks);
        let moments = [
            retry_at,
            tell_at.filter(|_| is_untold),
            agenda.commit_at.filter(|_| has_changes),
            has_changes.then_some(now + COMMIT_AFTER),
            agenda.cycle.deadline(),
            retry_copies_at.filter(|_| is_dirty),
            is_dirty.then_some(now + IDLE_AFTER),
            has_marks.then_some(agenda.tidy_at),
        ];
        // Work that was due and is still left needs I/O first, which wakes the background.
        let next = moments.into_iter().flatten().filter(|at| *at > now).min();
        if next.is_some() {
            self.background.wakeup.keep();
            return next;
        }
        self.background.wakeup.next_look(now, SECOND)
    }
}
