//! Write-back: the oldest blocks, with their neighbours, are written to the origin; then the origin
//! is flushed; then their slots are freed.
//!
//! A batch takes blocks by age, each with the dirty blocks before and after it, sorts them all, and
//! writes neighbours together, many writes at a time. Only committed blocks are taken, so a power
//! failure cannot undo data that the origin has. But a batch ignores clients' flushes: from its
//! first write until all dirty data is written back, the origin alone does not have a state that a
//! client has seen.
//!
//! Blocks that cannot be read from the cache device are left out of their batch, and tried again
//! later (`unread`): an error belongs to the device that returned it, and a batch fails only by the
//! origin's errors.
//!
//! No slot is freed before the origin's flush has succeeded. If the flush or any write fails, the
//! whole batch is dirty as before, and is tried again after a pause. Pauses grow.

mod taker;
pub(super) mod unread;

use crate::base::pending::Pending;
use crate::base::retry::Retry;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::common::cycle::Cycle;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;
use crate::target::Port;
use crate::units::{KIB, MIB, Nanos};

use super::index::{Locked, State};
use super::media::Medium;
use super::plan::Plan;
use super::{OWN_SHIFT, TOKEN_KIND, TOKEN_WB_FLUSH, TOKEN_WB_READ, TOKEN_WB_WRITE, Writecache};
use taker::Taker;
use unread::{PROBES, Unread};

/// Most bytes, and most blocks, of a batch.
pub(super) const BATCH_BYTES_MAX: u64 = 32 * MIB;
pub(super) const BATCH_BLOCKS_MAX: u64 = 16 * 1024;
/// While writers are limited, a batch is this part (1 / n) of the cache.
const BATCH_PART: u64 = 32;
/// Longest write made of neighbouring blocks.
pub(super) const WRITE_BYTES_MAX: u64 = 512 * KIB;
/// Writes in flight.
pub(super) const DEPTH_MAX: usize = 64;
/// At most this many blocks that cannot be taken are skipped in a stripe.
const PASSED_MAX: usize = 64;

/// A block of the batch, with its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Item {
    block: u64,
    slot: u32,
}

/// Neighbouring blocks in flight.
#[derive(Debug)]
struct Move {
    first: usize,
    count: usize,
    buffer: Buffer,
    /// Reads from the cache device that are not back.
    reads: usize,
    status: Result<(), Status>,
}

/// The state of write-back.
#[derive(Debug, Default)]
pub(super) struct Writeback {
    cycle: Cycle,
    items: Vec<Item>,
    next: usize,
    moves: Pending<Move>,
    /// Slots of the batch that could not be read, or were not tried.
    left_out: Vec<u32>,
    /// Blocks that could not be read, in this batch and before.
    unread: Unread,
    /// The device was dead when the batch began, and the batch tests whether it still is.
    is_probe: bool,
    /// Failed flushes of the origin, other than write-back's, when the batch began.
    flush_failures: u64,
    /// Between the watermarks: whether the high one was reached last.
    is_cleaning: bool,
    /// Where the search for the next batch begins.
    cursor: usize,
    /// Write-back rests until then, because of writes that bypassed the cache.
    rests_until: Nanos,
    bypassed_seen: u64,
    /// The time since which the origin is not consistent by itself; `None` if it is consistent, or
    /// if the time began before the attach.
    torn_since: Option<Nanos>,
}

impl Writeback {
    /// Whether no I/O is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.cycle.is_idle()
    }

    /// Attempts on the origin and their failures.
    pub(super) fn retry(&self) -> Retry {
        self.cycle.retry()
    }

    /// Blocks that cannot be read from the cache device.
    pub(super) fn unread(&self) -> &Unread {
        &self.unread
    }

    /// The same, to change it.
    pub(super) fn unread_mut(&mut self) -> &mut Unread {
        &mut self.unread
    }

    /// The device that the batch in flight waits for. If some I/O of both is in flight, one that
    /// hangs may keep I/O of the other in a queue.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        let is_read = self.moves.values().any(|of| of.reads > 0);
        let is_written = self.moves.values().any(|of| of.reads == 0);
        let device = match (is_read, is_written) {
            (true, true) => "the cache device or the origin",
            (true, false) => "the cache device",
            (false, _) => "the origin",
        };
        (!self.is_idle()).then_some(device)
    }

    /// Blocks being written back.
    pub(super) fn blocks(&self) -> usize {
        if self.is_idle() { 0 } else { self.items.len() }
    }

    /// How long the origin alone has not been consistent, as far as is known.
    pub(super) fn torn_for(&self, now: Nanos) -> Nanos {
        self.torn_since.map_or(0, |since| now.saturating_sub(since))
    }

    /// For its pauses.
    pub(super) fn cycle_mut(&mut self) -> &mut Cycle {
        &mut self.cycle
    }

    /// The time of the next call.
    pub(super) fn deadline(&self, now: Nanos) -> Option<Nanos> {
        let rest = (self.is_idle() && self.rests_until > now).then_some(self.rests_until);
        let next = self.cycle.deadline().or(rest);
        next.into_iter().chain(self.unread.deadline().filter(|at| *at > now)).min()
    }
}

/// The content of a batch.
#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    blocks: u64,
    /// Whether the batch also takes all blocks that are old enough.
    has_aged: bool,
}

impl Writecache {
    /// Starts a batch if none is in progress and some blocks must be written back.
    pub(super) fn writeback_step(&self, writeback: &mut Writeback, now: Nanos, port: &mut Port) {
        if !writeback.cycle.is_free(now) {
            return;
        }
        // A suspend that cleans does not wait for an origin that fails: see `is_at_rest`.
        let is_cleaning = self.orders.is_flushing()
            && (!self.is_hindered(writeback) || mutants::is(Mutant::SuspendedRetries));
        if self.orders.is_suspended() && !is_cleaning
            || self.has_failed()
            || self.is_resting(writeback, now)
        {
            return;
        }
        let wanted = self.wanted(writeback);
        if wanted.blocks == 0 && !wanted.has_aged {
            return;
        }
        let needs_commit = self.select(writeback, wanted, now);
        if writeback.items.is_empty() {
            if needs_commit {
                self.commit_for_writeback(port);
            }
            return;
        }
        self.origin.tear();
        writeback.torn_since.get_or_insert(now);
        writeback.cycle.write();
        writeback.flush_failures = self.origin.flush_failures();
        self.emit_moves(writeback, port);
        self.plan_retry(writeback, now);
    }

    /// Whether no more blocks can be written back at the moment, because of one of the devices.
    pub(super) fn is_hindered(&self, writeback: &Writeback) -> bool {
        let unread = &writeback.unread;
        writeback.retry().is_failing()
            || unread.is_dead()
            || !unread.is_empty() && unread.count() >= self.index.dirty() as usize
    }

    /// No block is dirty any more: the origin alone is consistent.
    pub(super) fn mend(&self, writeback: &mut Writeback) {
        writeback.torn_since = None;
        self.forget_read(writeback);
        self.origin.mend(&self.index);
    }

    /// Blocks must be committed before they are written back: mode `p` does that here, and no
    /// signal follows.
    fn commit_for_writeback(&self, port: &mut Port) {
        if !self.plan.is_pmem() {
            return self.commit_soon(port);
        }
        if self.has_open() {
            self.commit_until(self.rounds.next());
            self.events.work();
        }
    }

    /// `pause_writeback`: whether a write has bypassed the cache recently. Flushes do not count.
    fn is_resting(&self, writeback: &mut Writeback, now: Nanos) -> bool {
        let pause = self.plan.pause_writeback();
        let bypassed = self.origin.bypassed();
        if bypassed != writeback.bypassed_seen {
            writeback.bypassed_seen = bypassed;
            writeback.rests_until = now + pause;
        }
        let is_urgent = self.orders.cleans_all() || self.room.is_wanted();
        now < writeback.rests_until && !is_urgent
    }

    fn wanted(&self, writeback: &mut Writeback) -> Wanted {
        let limit = (BATCH_BYTES_MAX / self.block_bytes()).min(BATCH_BLOCKS_MAX);
        let limit = match self.plan.args.options.writeback_jobs {
            Some(jobs) if jobs > 0 => limit.min(u64::from(jobs)),
            _ => limit,
        };
        let is_limiting = self.room.is_shared();
        let part = u64::from(self.index.slots()) / BATCH_PART;
        let limit = if is_limiting { limit.min(part.max(1)) } else { limit };
        let has_aged = self.plan.has_max_age();
        if self.orders.cleans_all() || is_limiting {
            return Wanted { blocks: limit, has_aged };
        }
        let Plan { high_watermark: high, low_watermark: low, .. } = self.plan;
        let available = self.available();
        if available <= high {
            writeback.is_cleaning = true;
        } else if available > low {
            writeback.is_cleaning = false;
        }
        let missing = (low + 1).saturating_sub(available);
        Wanted { blocks: if writeback.is_cleaning { missing.min(limit) } else { 0 }, has_aged }
    }

    /// Free slots and those that write-back is about to free, as the watermarks count them.
    pub(super) fn available(&self) -> u64 {
        let usable = u64::from(self.index.slots()) - self.device.aside.len() as u64;
        usable.saturating_sub(u64::from(self.index.dirty()))
    }

    /// Whether the background may be about to write blocks back, or a bio waits for it.
    pub(super) fn has_plans(&self) -> bool {
        self.orders.cleans_all()
            || self.orders.is_suspended()
            || self.plan.has_max_age()
            || self.room.is_wanted()
            || self.jobs.zeroing.is_waiting()
            || self.available() <= self.plan.low_watermark
    }

    /// Forgets unreadable blocks that are no longer dirty.
    fn forget_read(&self, writeback: &mut Writeback) {
        writeback.unread.retain(|slot, block| self.index.dirty_block(slot) == Some(block));
    }

    /// Takes blocks for a batch. Returns whether a commit would give more.
    fn select(&self, writeback: &mut Writeback, mut wanted: Wanted, now: Nanos) -> bool {
        writeback.items.clear();
        writeback.left_out.clear();
        writeback.cycle.gather();
        writeback.next = 0;
        self.forget_read(writeback);
        writeback.is_probe = writeback.unread.is_dead();
        if writeback.is_probe {
            wanted = Wanted { blocks: wanted.blocks.clamp(1, PROBES), has_aged: false };
        }
        let stripes = self.index.stripes();
        let mut needs_commit = false;
        loop {
            let before = writeback.items.len();
            let missing = wanted.blocks.saturating_sub(before as u64);
            for _ in 0..stripes {
                let stripe = writeback.cursor % stripes;
                writeback.cursor += 1;
                let left = wanted.blocks.saturating_sub(writeback.items.len() as u64);
                let share = missing.div_ceil(stripes as u64).min(left);
                let wanted = Wanted { blocks: share, ..wanted };
                needs_commit |= self.select_of(stripe, wanted, writeback, now);
            }
            let count = writeback.items.len();
            if count == before || count as u64 >= wanted.blocks.max(1) {
                writeback.items.sort_unstable();
                return needs_commit;
            }
        }
    }

    /// Takes `share` blocks of a stripe. Returns whether a commit would give more.
    fn select_of(
        &self,
        stripe: usize,
        wanted: Wanted,
        writeback: &mut Writeback,
        now: Nanos,
    ) -> bool {
        let early = mutants::is(Mutant::ZeroingCopiedEarly).then(|| self.jobs.zeroing.ranges());
        let locked = self.index.lock(stripe);
        // Under the stripe's lock: a discard that is not yet in the list sees the taken blocks.
        let zeroing = early.unwrap_or_else(|| self.jobs.zeroing.ranges());
        let mut taker = Taker {
            cache: self,
            locked,
            zeroing: &zeroing,
            items: &mut writeback.items,
            unread: &writeback.unread,
            now,
            needs_commit: false,
            is_draining: self.orders.is_draining() && !mutants::is(Mutant::NewestAwaited),
        };
        taker.take(wanted.blocks, wanted.has_aged);
        taker.needs_commit
    }

    /// Keeps up to [`DEPTH_MAX`] moves in flight; after the last one, the flush.
    fn emit_moves(&self, writeback: &mut Writeback, port: &mut Port) {
        while writeback.moves.count() < DEPTH_MAX
            && writeback.next < writeback.items.len()
            && writeback.cycle.failure().is_none()
        {
            let first = writeback.next;
            let items = &writeback.items[first..];
            if writeback.unread.is_dead() && !writeback.is_probe {
                // The rest of the batch would fail in the same way.
                writeback.left_out.extend(items.iter().map(|item| item.slot));
                writeback.next = writeback.items.len();
                break;
            }
            let max = (WRITE_BYTES_MAX / self.block_bytes()).max(1) as usize;
            let is_alone = |nth: usize| writeback.unread.has(items[nth].slot);
            let is_next =
                |nth: &usize| items[*nth].block == items[*nth - 1].block + 1 && !is_alone(*nth);
            let max = if is_alone(0) { 1 } else { items.len().min(max) };
            let count = 1 + (1..max).take_while(is_next).count();
            writeback.next += count;
            match &self.device.medium {
                Medium::Pmem(_) => self.move_memory(writeback, first, count, port),
                Medium::Disk(_) => self.move_disk(writeback, first, count, port),
            }
        }
        if writeback.moves.count() > 0 {
            return;
        }
        let has_failed = writeback.cycle.failure().is_some();
        if has_failed && !mutants::is(Mutant::OriginWriteErrorIgnored) {
            return self.put_back(writeback);
        }
        if writeback.left_out.len() >= writeback.items.len() {
            // The origin was not asked for anything.
            writeback.cycle.flushed();
            return self.put_unread_back(writeback);
        }
        writeback.cycle.flush();
        let token = TOKEN_WB_FLUSH;
        if mutants::is(Mutant::FreedBeforeOriginFlush) {
            let buffer = port.pool.take(512);
            return port.ios.push_back(self.origin.io(Op::Read, 0, 512, buffer, token));
        }
        port.ios.push_back(self.origin.flush(token));
    }

    /// Copies blocks out of memory, up to one that cannot be read, and writes them.
    fn move_memory(&self, writeback: &mut Writeback, first: usize, count: usize, port: &mut Port) {
        let Medium::Pmem(pmem) = &self.device.medium else { unreachable!("mode p uses memory") };
        let block_bytes = self.device.geometry.block_bytes as usize;
        let mut buffer = port.pool.take(count * block_bytes);
        let mut done = 0;
        for (item, into) in writeback.items[first..first + count]
            .iter()
            .zip(buffer.as_mut_slice().chunks_mut(block_bytes))
        {
            if pmem.load(self.device.slot_at(item.slot), into).is_err() {
                writeback.left_out.push(item.slot);
                writeback.unread.fail(item.slot, item.block, true);
                writeback.unread.count_failure();
                break;
            }
            writeback.unread.worked();
            done += 1;
        }
        if done < count {
            // The rest is another move.
            writeback.next = first + done + 1;
        }
        if done == 0 {
            return port.pool.put(buffer);
        }
        buffer.set_len(done * block_bytes);
        let moved = Move { first, count: done, buffer: Buffer::empty(), reads: 0, status: Ok(()) };
        let place = writeback.moves.insert(moved);
        self.write_move(writeback.items[first].block, buffer, place, port);
    }

    /// Reads blocks from the cache device: one read for each run of neighbouring slots.
    fn move_disk(&self, writeback: &mut Writeback, first: usize, count: usize, port: &mut Port) {
        let items = &writeback.items[first..first + count];
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (nth, item) in items.iter().enumerate() {
            match runs.last_mut() {
                Some((start, len)) if items[*start].slot + *len as u32 == item.slot => *len += 1,
                _ => runs.push((nth, 1)),
            }
        }
        let block_bytes = self.device.geometry.block_bytes as usize;
        let is_whole = runs.len() == 1;
        let buffer = if is_whole { Buffer::empty() } else { port.pool.take(count * block_bytes) };
        let moved = Move { first, count, buffer, reads: runs.len(), status: Ok(()) };
        let place = u64::from(writeback.moves.insert(moved));
        for (start, len) in runs {
            let slot = writeback.items[first + start].slot;
            let token = TOKEN_WB_READ | (start as u64) << OWN_SHIFT | place;
            let offset = self.device.slot_at(slot);
            let buffer = port.pool.take(len * block_bytes);
            port.ios.push_back(self.device.io(Op::Read, offset, buffer, token));
        }
    }

    /// Writes a move to the origin: the part that is within the origin.
    fn write_move(&self, block: u64, mut buffer: Buffer, place: u32, port: &mut Port) {
        let offset = block * self.block_bytes();
        let room = self.origin.disk().limits().size_bytes.saturating_sub(offset);
        let len = (buffer.len() as u64).min(room);
        buffer.set_len(len as usize);
        let token = TOKEN_WB_WRITE | u64::from(place);
        port.ios.push_back(self.origin.io(Op::Write, offset, len, buffer, token));
    }

    /// An I/O of write-back is complete. Returns whether its batch has ended, and is on the origin.
    pub(super) fn complete_writeback(
        &self,
        writeback: &mut Writeback,
        now: Nanos,
        io: DiskIo,
        port: &mut Port,
    ) -> bool {
        let mut is_over = false;
        match io.token & TOKEN_KIND {
            TOKEN_WB_READ => self.complete_wb_read(writeback, io, port),
            TOKEN_WB_WRITE => self.complete_wb_write(writeback, io, port),
            _ => is_over = self.complete_wb_flush(writeback, io.result),
        }
        self.plan_retry(writeback, now);
        is_over
    }

    /// Blocks are read from the cache device.
    fn complete_wb_read(&self, writeback: &mut Writeback, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let block_bytes = self.device.geometry.block_bytes as usize;
        match io.result {
            Ok(()) => writeback.unread.worked(),
            Err(_) => writeback.unread.count_failure(),
        }
        let moved = writeback.moves.value(place);
        moved.status = moved.status.and(io.result);
        moved.reads -= 1;
        if moved.buffer.is_empty() {
            moved.buffer = io.buffer;
        } else {
            let from = (io.token >> OWN_SHIFT & ((1 << 24) - 1)) as usize * block_bytes;
            let into = &mut moved.buffer.as_mut_slice()[from..from + io.len as usize];
            into.copy_from_slice(io.buffer.as_slice());
            port.pool.put(io.buffer);
        }
        if moved.reads > 0 {
            return;
        }
        let buffer = std::mem::replace(&mut moved.buffer, Buffer::empty());
        let (first, count, status) = (moved.first, moved.count, moved.status);
        if status.is_ok() {
            return self.write_move(writeback.items[first].block, buffer, place, port);
        }
        writeback.moves.remove(place);
        port.pool.put(buffer);
        self.counts.failed_requests.fetch_add(1, Ordering::Relaxed);
        for item in &writeback.items[first..first + count] {
            writeback.left_out.push(item.slot);
            writeback.unread.fail(item.slot, item.block, count == 1);
        }
        self.emit_moves(writeback, port);
    }

    /// A move is written to the origin.
    fn complete_wb_write(&self, writeback: &mut Writeback, io: DiskIo, port: &mut Port) {
        writeback.moves.remove(io.token as u32);
        match io.result {
            Ok(()) => {
                self.counts.written_back_bytes.fetch_add(io.len, Ordering::Relaxed);
            }
            Err(status) => writeback.cycle.note_failure(status),
        }
        port.pool.put(io.buffer);
        self.emit_moves(writeback, port);
    }

    /// Whether the origin may lack a part of the batch after the batch's flush has ended.
    fn may_lack(&self, writeback: &Writeback, flushed: Result<(), Status>) -> bool {
        if flushed.is_err() && !mutants::is(Mutant::OriginFlushErrorIgnored) {
            return true;
        }
        // Another flush failed meanwhile, and may have lost data that this one should cover.
        self.origin.flush_failures() != writeback.flush_failures
            && !mutants::is(Mutant::OthersFailureIgnored)
    }

    /// The batch's flush is complete. Returns whether the batch is on the origin.
    fn complete_wb_flush(&self, writeback: &mut Writeback, result: Result<(), Status>) -> bool {
        if self.may_lack(writeback, result) {
            // The whole batch is written again.
            self.put_back(writeback);
            return false;
        }
        writeback.cycle.flushed();
        for item in std::mem::take(&mut writeback.items) {
            let mut locked = self.index.lock_of(item.block);
            if writeback.left_out.contains(&item.slot) {
                self.put_item_back(&mut locked, item.slot, true);
            } else if self.index.word(item.slot).state() == State::Outdated {
                self.orders.awaited.remove(item.slot);
                self.drop_outdated(&mut locked, item.slot);
            } else {
                self.counts.cleaned_bytes.fetch_add(self.block_bytes(), Ordering::Relaxed);
                self.drop_clean(&mut locked, item.block, item.slot);
            }
        }
        self.counts.batches.fetch_add(1, Ordering::Relaxed);
        self.forget_read(writeback);
        writeback.cycle.succeed();
        self.room.hope();
        self.jobs.zeroing.tell();
        true
    }

    /// No block of the batch could be read: it is dirty as before.
    fn put_unread_back(&self, writeback: &mut Writeback) {
        for item in std::mem::take(&mut writeback.items) {
            let mut locked = self.index.lock_of(item.block);
            self.put_item_back(&mut locked, item.slot, true);
        }
        self.jobs.zeroing.tell();
    }

    /// The batch has failed: it is dirty as before.
    fn put_back(&self, writeback: &mut Writeback) {
        for item in std::mem::take(&mut writeback.items) {
            let mut locked = self.index.lock_of(item.block);
            self.put_item_back(&mut locked, item.slot, false);
        }
        self.begin_pause(writeback);
        self.jobs.zeroing.tell();
    }

    fn put_item_back(&self, locked: &mut Locked<'_>, slot: u32, is_last: bool) {
        let is_outdated = self.index.word(slot).state() == State::Outdated;
        if is_outdated && !mutants::is(Mutant::OutdatedRevived) {
            return self.drop_outdated(locked, slot);
        }
        locked.set_state(slot, State::Live);
        if is_last { locked.push_newest(slot) } else { locked.push_oldest(slot) }
    }

    /// `plan_retry` follows, which knows the time.
    fn begin_pause(&self, writeback: &mut Writeback) {
        self.counts.writeback_failures.fetch_add(1, Ordering::Relaxed);
        writeback.cycle.fail();
    }

    fn plan_retry(&self, writeback: &mut Writeback, now: Nanos) {
        let plans_read = writeback.is_idle() && writeback.unread.plan_retry(now);
        let plans_write = writeback.cycle.plan_retry(now);
        if plans_write {
            self.background.served.want(writeback.cycle.may_end_early(now));
        }
        if plans_write || plans_read {
            self.events.work();
        }
    }
}
