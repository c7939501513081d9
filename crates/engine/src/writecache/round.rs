//! A round's bytes on their way to the medium.
//!
//! Mode `p`: stores, within the call, under the lock of commit; whoever waits for that lock finds
//! his batch committed by the one before him. Mode `s`: a state machine that one port drives.
//! There only the metadata sectors are written that the round touches, in the medium's own unit of
//! atomicity, made anew from the index: entries that stay live get the number below the counter,
//! whatever number they had, which says the same. Those that are not needed any more are free.
//! A round that closes nothing but overwritten blocks is a flush of the medium, and no more.

use zerocopy::IntoBytes;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::sync::atomic::Ordering;
use crate::sync::lock;
use crate::target::Port;
use crate::units::{KIB, SECTOR};

use super::commit::Commit;
use super::index::State;
use super::layout::{
    ENTRY_BYTES, Entry, FREE, Geometry, SEQ_COUNT_AT, SUPERBLOCK_BYTES, Superblock,
};
use super::media::Medium;
use super::{TOKEN_COMMIT, Writecache};

/// Longest write of neighbouring metadata units.
const WRITE_BYTES_MAX: u64 = 64 * KIB;
/// Metadata writes in flight.
pub(super) const DEPTH_MAX: usize = 32;

/// Entries stored together in mode `p`.
const RUN_MAX: usize = 16;

/// How far a round of mode `s` is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Idle,
    /// Entries and marks are being written.
    Entries { units: Vec<u64>, next: usize, outstanding: usize, failure: Option<Status> },
    /// They, and the data, are being made durable.
    EntriesFlush,
    /// The commit counter is being written.
    Counter,
    /// It is being made durable.
    CounterFlush,
}

/// Neighbouring slots that hold neighbouring blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    slot: u32,
    count: u32,
    block: u64,
}

impl Run {
    /// Adds a slot to a list of runs.
    fn add(runs: &mut Vec<Run>, slot: u32, block: u64) {
        if let Some(last) = runs.last_mut()
            && last.slot + last.count == slot
            && last.block + u64::from(last.count) == block
        {
            last.count += 1;
        } else {
            runs.push(Run { slot, count: 1, block });
        }
    }

    fn blocks(&self) -> std::ops::Range<u64> {
        self.block..self.block + u64::from(self.count)
    }
}

/// Entries of neighbouring slots, with the same number, on their way to memory: they are stored
/// together, whole lines where possible.
struct Row<'a> {
    pmem: &'a dyn Pmem,
    geometry: &'a Geometry,
    seq: u64,
    first: u32,
    count: usize,
    entries: [Entry; RUN_MAX],
}

impl<'a> Row<'a> {
    fn new(cache: &'a Writecache, pmem: &'a dyn Pmem, seq: u64) -> Row<'a> {
        let entries = [Entry::FRESH; RUN_MAX];
        Row { pmem, geometry: &cache.geometry, seq, first: 0, count: 0, entries }
    }

    fn add(&mut self, slot: u32, block: u64) {
        if self.count == RUN_MAX || self.first + self.count as u32 != slot {
            self.store();
            self.first = slot;
        }
        self.entries[self.count] = Entry::new(block * self.geometry.block_sectors(), self.seq);
        self.count += 1;
    }

    /// Stores those that are there.
    fn store(&mut self) {
        if self.count > 0 {
            let at = self.geometry.entry_at(u64::from(self.first));
            self.pmem.store(at, self.entries[..self.count].as_bytes());
            self.count = 0;
        }
    }
}

impl Writecache {
    /// A round of mode `p`. Says whether it freed slots.
    pub(super) fn memory_round(&self, commit: &mut Commit) -> bool {
        let Medium::Pmem(pmem) = &self.medium else { unreachable!("mode p is over memory") };
        if !self.close(commit) {
            self.ended.store(self.begun.load(Ordering::SeqCst), Ordering::SeqCst);
            return false;
        }
        match self.store_round(&**pmem, commit) {
            Ok(()) => self.finish_round(commit),
            Err(_) => {
                self.fail();
                false
            }
        }
    }

    fn store_round(&self, pmem: &dyn Pmem, commit: &mut Commit) -> Result<(), Status> {
        let settle = || pmem.drain().and_then(|()| pmem.sync());
        self.store_entries(pmem, commit);
        if !mutants::is(Mutant::CounterBeforeEntries) {
            settle()?;
        }
        if commit.has_batch {
            let seq = commit.seq + 1;
            if !mutants::is(Mutant::CounterUnannounced) {
                self.open.announce_seq(seq);
            }
            pmem.store(self.geometry.start + SEQ_COUNT_AT, &seq.to_le_bytes());
            settle()?;
            if !mutants::is(Mutant::CounterUnconfirmed) {
                self.open.confirm_seq(seq);
            }
            commit.seq = seq;
        }
        Ok(())
    }

    /// Stores the entries of the batch, and free marks.
    fn store_entries(&self, pmem: &dyn Pmem, commit: &mut Commit) {
        let mut batch = std::mem::take(&mut commit.batch);
        for stripe in Writecache::closed_stripes(commit) {
            self.closing(stripe).for_each(|(block, slot)| Run::add(&mut batch, slot, block));
        }
        batch.sort_unstable_by_key(|run| run.slot);
        let mut row = Row::new(self, pmem, commit.seq);
        for run in &batch {
            run.blocks().zip(run.slot..).for_each(|(block, slot)| row.add(slot, block));
        }
        row.store();
        batch.clear();
        commit.batch = batch;
        if commit.marks.is_empty() && commit.drops.is_empty() {
            return;
        }
        self.begin_marks(commit);
        let mut row = Row::new(self, pmem, FREE);
        for &slot in commit.marks.iter().chain(&commit.drops) {
            let block = if mutants::is(Mutant::MarkRenames) {
                0
            } else {
                // As it is: a torn entry, still with its number, must not name another block.
                self.index.word(slot).block()
            };
            row.add(slot, block);
        }
        row.store();
    }

    /// Begins rounds of mode `s` until one has I/O in flight, or round `until` has ended, which a
    /// bio of this port waits for (or the background wants). No further, whatever others wait for:
    /// a port none of whose bios waits is not looked after, and its round would never end. The
    /// others hear of each round's end, and begin the next one themselves.
    pub(super) fn begin_disk_round(&self, commit: &mut Commit, until: u64, port: &mut Port) {
        while commit.phase == Phase::Idle
            && self.ended.load(Ordering::SeqCst) < until
            && !self.has_failed()
        {
            if !self.close(commit) {
                self.ended.store(self.begun.load(Ordering::SeqCst), Ordering::SeqCst);
                continue;
            }
            commit.driver = port.id;
            self.begin_marks(commit);
            let units = self.touched(commit);
            commit.phase = Phase::Entries { units, next: 0, outstanding: 0, failure: None };
            self.emit_entries(commit, port);
        }
    }

    fn unit_bytes(&self) -> u64 {
        u64::from(self.medium.unit_bytes()).max(SECTOR)
    }

    /// The metadata units that the round changes.
    fn touched(&self, commit: &Commit) -> Vec<u64> {
        let stripes = Writecache::closed_stripes(commit);
        let batch = stripes.flat_map(|stripe| self.closing(stripe));
        let slots = batch.map(|(_, slot)| slot);
        let slots = slots.chain(commit.marks.iter().copied()).chain(commit.drops.iter().copied());
        let at = |slot| SUPERBLOCK_BYTES + ENTRY_BYTES * u64::from(slot);
        let mut units: Vec<u64> = slots.map(|slot| at(slot) / self.unit_bytes()).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    fn emit_entries(&self, commit: &mut Commit, port: &mut Port) {
        let seq = commit.seq;
        let unit_bytes = self.unit_bytes();
        let Phase::Entries { units, next, outstanding, failure } = &mut commit.phase else {
            panic!("entries are written first");
        };
        while *outstanding < DEPTH_MAX && *next < units.len() && failure.is_none() {
            let first = units[*next];
            let mut count = 0;
            while units.get(*next) == Some(&(first + count))
                && (count + 1) * unit_bytes <= WRITE_BYTES_MAX.max(unit_bytes)
            {
                *next += 1;
                count += 1;
            }
            *outstanding += 1;
            let buffer = port.pool.take((count * unit_bytes) as usize);
            port.ios.push_back(self.metadata_write(first, count, seq, seq, buffer));
        }
        if *outstanding > 0 {
            return;
        }
        if failure.is_some() {
            return self.fail_round(commit);
        }
        commit.phase = Phase::EntriesFlush;
        let flush = match mutants::is(Mutant::CounterBeforeEntries) {
            true => self.cache_io(Op::Read, 0, port.pool.take(512), TOKEN_COMMIT),
            false => self.cache_flush(),
        };
        port.ios.push_back(flush);
    }

    fn cache_flush(&self) -> DiskIo {
        self.cache_io(Op::Flush, 0, Buffer::empty(), TOKEN_COMMIT)
    }

    pub(super) fn cache_io(&self, op: Op, offset: u64, buffer: Buffer, token: u64) -> DiskIo {
        let Medium::Disk(disk) = &self.medium else { unreachable!("mode s is over a disk") };
        DiskIo::new(disk, op, offset, buffer, token)
    }

    /// A write of `count` metadata units from `first` on. `counter`: what the superblock says;
    /// `seq`: the number of the batch that is being committed.
    fn metadata_write(
        &self,
        first: u64,
        count: u64,
        seq: u64,
        counter: u64,
        mut buffer: Buffer,
    ) -> DiskIo {
        let unit_bytes = self.unit_bytes();
        let from = first * unit_bytes;
        let (bytes, end) = (buffer.as_mut_slice(), from + count * unit_bytes);
        bytes.fill(0);
        if first == 0 {
            let mut superblock = Superblock::fresh(&self.geometry);
            superblock.seq_count.set(counter);
            superblock.label = self.label;
            bytes[..SUPERBLOCK_BYTES as usize].copy_from_slice(superblock.as_bytes());
        }
        for sector in from / SECTOR..end / SECTOR {
            for index in self.geometry.entries_in(sector) {
                let at = (SUPERBLOCK_BYTES + ENTRY_BYTES * index - from) as usize;
                let entry = self.entry_image(index as u32, seq);
                bytes[at..at + ENTRY_BYTES as usize].copy_from_slice(entry.as_bytes());
            }
        }
        self.counters.metadata_writes.fetch_add(1, Ordering::Relaxed);
        self.cache_io(Op::Write, self.geometry.start + from, buffer, TOKEN_COMMIT)
    }

    /// What the entry of a slot must say while batch `seq` is being committed.
    fn entry_image(&self, slot: u32, seq: u64) -> Entry {
        let word = self.index.word(slot);
        let block = word.block();
        let entry = |seq| Entry::new(block * self.geometry.block_sectors(), seq);
        match word.state() {
            state @ (State::OpenA | State::OpenB) => {
                let stripe = self.index.stripe_of(block);
                let filling = self.filling[stripe].load(Ordering::Acquire) as usize;
                if state == State::open_in(filling) { Entry::FRESH } else { entry(seq) }
            }
            State::Live | State::Cleaning | State::Cleaned | State::Dropped => {
                entry(seq.saturating_sub(1))
            }
            State::Overwriting | State::OverwrittenA | State::OverwrittenB => {
                entry(seq.saturating_sub(1))
            }
            State::Free | State::Outdated | State::Marking => Entry::FRESH,
            State::Damaged | State::Aside => self.aside.get(&slot).copied().unwrap_or(Entry::FRESH),
        }
    }

    /// An I/O of a round is back.
    pub(super) fn complete_commit(&self, io: DiskIo, port: &mut Port) {
        let mut commit = lock(&self.commit);
        let result = io.result;
        port.pool.put(io.buffer);
        let has_batch = commit.has_batch;
        match &mut commit.phase {
            Phase::Idle => panic!("no round is under way"),
            Phase::Entries { outstanding, failure, .. } => {
                *outstanding -= 1;
                *failure = failure.or(result.err());
                self.emit_entries(&mut commit, port);
            }
            _ if result.is_err() && !mutants::is(Mutant::CacheFlushErrorIgnored) => {
                self.fail_round(&mut commit);
            }
            Phase::EntriesFlush if has_batch => {
                let seq = commit.seq;
                if !mutants::is(Mutant::DiskCounterUnannounced) {
                    self.open.announce_seq(seq + 1);
                }
                commit.phase = Phase::Counter;
                let buffer = port.pool.take(self.unit_bytes() as usize);
                port.ios.push_back(self.metadata_write(0, 1, seq, seq + 1, buffer));
            }
            Phase::Counter => {
                commit.phase = Phase::CounterFlush;
                port.ios.push_back(self.cache_flush());
            }
            Phase::EntriesFlush | Phase::CounterFlush => self.end_disk_round(&mut commit, port),
        }
        self.release_waiters(commit, port);
    }

    fn end_disk_round(&self, commit: &mut Commit, port: &mut Port) {
        let is_flush_only = !commit.has_batch && commit.marks.is_empty() && commit.drops.is_empty();
        if commit.has_batch {
            commit.seq += 1;
            self.open.confirm_seq(commit.seq);
        }
        commit.phase = Phase::Idle;
        if self.finish_round(commit) {
            self.signal_room();
        }
        if self.wants_round.swap(false, Ordering::SeqCst) {
            self.events.room();
        }
        // Only for bios of this port, which is looked after until they are done. Who waits on
        // another port drives the next round himself.
        if let Some(until) = commit.waiters.iter().map(|waiter| waiter.0).max() {
            self.begin_disk_round(commit, until, port);
        }
        // The background plans by what is committed. Who flushes behind each write does not wake
        // it each time for nothing.
        if !is_flush_only || self.has_plans() {
            self.events.work();
        }
    }

    /// Whether the background may be about to write something back, or somebody waits for it.
    fn has_plans(&self) -> bool {
        self.cleans_all()
            || self.is_suspended()
            || self.args.options.max_age.is_some()
            || self.room.is_wanted()
            || self.wants_batch_end.load(Ordering::SeqCst)
            || self.available() <= self.watermarks.1
    }

    fn fail_round(&self, commit: &mut Commit) {
        commit.phase = Phase::Idle;
        self.fail();
    }

    /// Bios whose round has ended go on.
    fn release_waiters(&self, mut commit: crate::sync::MutexGuard<'_, Commit>, port: &mut Port) {
        let mut ready = Vec::new();
        let mut nth = 0;
        while nth < commit.waiters.len() {
            if self.is_past(commit.waiters[nth].0) {
                let (_, goes_on, bio) = commit.waiters.remove(nth);
                ready.push((bio, goes_on));
            } else {
                nth += 1;
            }
        }
        drop(commit);
        for (bio, goes_on) in ready {
            self.go_on(bio, goes_on, port);
        }
    }
}
