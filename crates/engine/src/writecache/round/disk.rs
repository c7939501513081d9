//! A round of mode `s`: a state machine that one port drives.
//!
//! The round writes only the metadata sectors that it changes, in the medium's own unit of
//! atomicity, generated again from the index. Entries that stay live get the number below the
//! counter in place of any older number, which means the same. Entries that are not needed any more
//! become free. A round that closes only overwritten blocks is just a flush of the medium.

use zerocopy::IntoBytes;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;
use crate::target::Port;
use crate::units::{KIB, SECTOR};

use super::Round;
use crate::writecache::index::State;
use crate::writecache::layout::{ENTRY_BYTES, Entry, SUPERBLOCK_BYTES, Superblock};
use crate::writecache::{TOKEN_COMMIT, Writecache};

#[cfg(feature = "mutants")]
mod wrong;

/// Longest write of neighbouring metadata units.
const WRITE_BYTES_MAX: u64 = 64 * KIB;
/// Metadata writes in flight.
pub(in crate::writecache) const DEPTH_MAX: usize = 32;

/// The stage of a round.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    #[default]
    Idle,
    /// Entries and marks are being written.
    Entries { units: Vec<u64>, next: usize, outstanding: usize, failure: Option<Status> },
    /// Entries, marks and data are being made durable.
    EntriesFlush,
    /// The commit counter is being written.
    Counter,
    /// The counter is being made durable.
    CounterFlush,
}

/// A round has ended.
#[derive(Clone, Copy, Debug)]
pub(in crate::writecache) struct Ended {
    /// Slots are free again.
    pub has_freed: bool,
    /// The round has only flushed overwritten blocks.
    pub is_flush_only: bool,
}

impl Writecache {
    /// Begins rounds until one has I/O in flight, or round `until` has ended, for which a bio of
    /// this port (or the background) waits. It begins no further rounds for bios of other ports: a
    /// port without waiting bios is not driven, and its round would never end. The other ports are
    /// woken at each round's end, and begin the next one themselves. Returns whether this port now
    /// drives a round.
    pub(in crate::writecache) fn begin_disk_round(
        &self,
        round: &mut Round,
        until: u64,
        port: &mut Port,
    ) -> bool {
        while round.is_idle() && self.rounds.ended() < until && !self.has_failed() {
            if !self.close(round) {
                self.rounds.end();
                continue;
            }
            self.begin_marks(&round.marks);
            let units = self.touched(round);
            round.phase = Phase::Entries { units, next: 0, outstanding: 0, failure: None };
            self.emit_entries(round, port);
            return true;
        }
        false
    }

    /// The metadata units that the round changes.
    fn touched(&self, round: &Round) -> Vec<u64> {
        let batch = round.stripes().flat_map(|stripe| self.closing(stripe));
        let slots = batch.map(|(_, slot)| slot).chain(round.marks.slots());
        let at = |slot| SUPERBLOCK_BYTES + ENTRY_BYTES * u64::from(slot);
        let mut units: Vec<u64> = slots.map(|slot| at(slot) / self.device.unit_bytes()).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    fn emit_entries(&self, round: &mut Round, port: &mut Port) {
        let seq = round.seq;
        let unit_bytes = self.device.unit_bytes();
        let Phase::Entries { units, next, outstanding, failure } = &mut round.phase else {
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
            return self.fail_round(round);
        }
        round.phase = Phase::EntriesFlush;
        let flush = match mutants::is(Mutant::CounterBeforeEntries) {
            true => self.device.io(Op::Read, 0, port.pool.take(512), TOKEN_COMMIT),
            false => self.cache_flush(),
        };
        port.ios.push_back(flush);
    }

    fn cache_flush(&self) -> DiskIo {
        self.lists.memory().begin_flush();
        self.device.io(Op::Flush, 0, Buffer::empty(), TOKEN_COMMIT)
    }

    /// A write of `count` metadata units from `first` on. `counter`: the superblock's commit
    /// counter; `seq`: the number of the batch that is being committed.
    fn metadata_write(
        &self,
        first: u64,
        count: u64,
        seq: u64,
        counter: u64,
        mut buffer: Buffer,
    ) -> DiskIo {
        let unit_bytes = self.device.unit_bytes();
        let from = first * unit_bytes;
        let (bytes, end) = (buffer.as_mut_slice(), from + count * unit_bytes);
        bytes.fill(0);
        if first == 0 {
            let mut superblock = Superblock::fresh(&self.device.geometry);
            superblock.seq_count.set(counter);
            superblock.label = self.device.label;
            bytes[..SUPERBLOCK_BYTES as usize].copy_from_slice(superblock.as_bytes());
        }
        for sector in from / SECTOR..end / SECTOR {
            for index in self.device.geometry.entries_in(sector) {
                let at = (SUPERBLOCK_BYTES + ENTRY_BYTES * index - from) as usize;
                let entry = self.entry_image(index as u32, seq);
                bytes[at..at + ENTRY_BYTES as usize].copy_from_slice(entry.as_bytes());
            }
        }
        self.counts.metadata_writes.fetch_add(1, Ordering::Relaxed);
        self.device.io(Op::Write, self.device.geometry.start + from, buffer, TOKEN_COMMIT)
    }

    /// The content for the entry of a slot while batch `seq` is being committed.
    fn entry_image(&self, slot: u32, seq: u64) -> Entry {
        let word = self.index.word(slot);
        let block = word.block();
        let entry = |seq| Entry::new(block * self.device.geometry.block_sectors(), seq);
        match word.state() {
            state @ (State::OpenA | State::OpenB) => {
                let stripe = self.index.stripe_of(block);
                let filling = self.lists.filling_of(stripe);
                if state == State::open_in(filling) { Entry::FRESH } else { entry(seq) }
            }
            State::Live | State::Cleaning | State::Cleaned | State::Dropped => {
                entry(seq.saturating_sub(1))
            }
            State::Overwriting | State::OverwrittenA | State::OverwrittenB => {
                entry(seq.saturating_sub(1))
            }
            State::Free | State::Outdated | State::Marking => Entry::FRESH,
            State::Damaged | State::Aside => {
                self.device.aside.get(&slot).copied().unwrap_or(Entry::FRESH)
            }
        }
    }

    /// An I/O of the round is complete. If the round has ended and is durable, returns its result.
    pub(in crate::writecache) fn disk_round_step(
        &self,
        round: &mut Round,
        result: Result<(), Status>,
        port: &mut Port,
    ) -> Option<Ended> {
        let is_flush = matches!(round.phase, Phase::EntriesFlush | Phase::CounterFlush);
        if is_flush && (result.is_ok() || mutants::is(Mutant::CacheFlushErrorIgnored)) {
            self.lists.memory().end_flush();
        }
        #[cfg(feature = "mutants")]
        if wrong::steps() {
            return self.disk_round_step_wrongly(round, result, port);
        }
        let has_batch = round.has_batch;
        match &mut round.phase {
            Phase::Idle => panic!("no round is under way"),
            Phase::Entries { outstanding, failure, .. } => {
                *outstanding -= 1;
                *failure = failure.or(result.err());
                self.emit_entries(round, port);
            }
            _ if result.is_err() => self.fail_round(round),
            Phase::EntriesFlush if has_batch => {
                let seq = round.seq;
                self.lists.memory().announce_seq(seq + 1);
                round.phase = Phase::Counter;
                let buffer = port.pool.take(self.device.unit_bytes() as usize);
                port.ios.push_back(self.metadata_write(0, 1, seq, seq + 1, buffer));
            }
            Phase::Counter => {
                round.phase = Phase::CounterFlush;
                port.ios.push_back(self.cache_flush());
            }
            Phase::EntriesFlush | Phase::CounterFlush => return Some(self.end_disk_round(round)),
        }
        None
    }

    fn end_disk_round(&self, round: &mut Round) -> Ended {
        let is_flush_only = !round.has_batch && round.marks.is_empty();
        if round.has_batch {
            round.seq += 1;
            self.lists.memory().confirm_seq(round.seq);
        }
        round.phase = Phase::Idle;
        Ended { has_freed: self.finish_round(round), is_flush_only }
    }

    fn fail_round(&self, round: &mut Round) {
        round.phase = Phase::Idle;
        self.fail();
    }
}
