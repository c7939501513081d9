//! The pacer of `io=lazy`: the budget of dirty bytes that all writers of a device share. It decides
//! which writer may write now, and which pages are written out next. It is a state machine without
//! I/O, clock or thread; `lazy` drives it.
//!
//! A *writer* is a thread with a ring, at one file. The bytes that a writer *holds* are reserved by
//! its writes in flight, dirty, or in write-out. A page that was dirty already still counts for the
//! writer that holds it.
//!
//! 1. All held bytes fit into the budget. But a file that holds no bytes may always write once,
//!    beyond it and against rule 2. So stuck files cannot stop other files.
//! 2. A file holds at most [`SHARES`] times the free part of the budget, and a writer at most that
//!    many times the free part of its file's share. So a writer that runs ahead has to wait while
//!    there is still free budget, and a writer that holds little can use that. The bytes of a stuck
//!    file leave budget for others. A file that is the only one may have the whole budget, and its
//!    writer, if it is the only one, nearly all.
//! 3. Waiting writers of a file take turns. The one that has written least since it appeared is
//!    first, and no other passes it. Files take turns by their held bytes, but a file that has its
//!    share does not stop the others. Writes of one writer are admitted in order.
//! 4. Dirty bytes are written out in passes. A pass takes all bytes that were dirty when it began,
//!    in the order of the file, in *batches* of [`Pacer::batch_bytes`] or [`RUNS_MAX`] runs. Bytes
//!    written meanwhile belong to the next pass, so no writer delays the bytes of others. At most
//!    [`DEPTH`] batches of a file are in write-out. A pass is due when it fills a batch, when a
//!    writer waits, or after a pause without writes.
//! 5. After a flush the whole pass is due: its batches are found clean, and are removed.

pub(super) mod pages;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use pages::Pages;
pub(super) use pages::Run;

use crate::mutants::{self, Mutant};
use crate::units::{KIB, MIB};

/// At most this many times the free budget is held.
const SHARES: u64 = 4;
/// The same for the only writer of a file. The first write of a second writer finds
/// free budget: a write has at most a sixteenth of the budget, and leaves a quarter of that.
const SHARES_ALONE: u64 = 11;
/// Batches of a file that are under write-out at a time.
const DEPTH: usize = 3;
/// Most runs of a batch: writes that wait for scattered pages get budget in small steps.
const RUNS_MAX: usize = 64;
/// The smallest budget.
pub const BUDGET_BYTES_MIN: u64 = MIB;
/// The largest.
pub const BUDGET_BYTES_MAX: u64 = 4096 * MIB;
/// The unit of the page cache.
pub(super) const PAGE: u64 = 4096;

/// A thread that writes to a file: numbers of both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Writer {
    pub file: u32,
    pub ring: u64,
}

/// The bytes that a writer holds, and its waiting writes.
#[derive(Debug)]
struct Share<W> {
    held: u64,
    /// The position of its next write in the order of turns, which counts bytes.
    turn: u64,
    waiting: VecDeque<Waiting<W>>,
}

#[derive(Debug)]
struct Waiting<W> {
    bytes: u64,
    /// Rises with each write that has to wait.
    number: u64,
    who: W,
}

/// Bytes that are written out together.
#[derive(Debug)]
struct Batch {
    id: u64,
    bytes: u64,
    /// The writers that hold these bytes.
    owners: Vec<(u64, u64)>,
}

impl Batch {
    fn new(id: u64, owners: Vec<(u64, u64)>) -> Batch {
        Batch { id, bytes: owners.iter().map(|(_, bytes)| bytes).sum(), owners }
    }
}

/// One file.
#[derive(Debug)]
struct File {
    window: u64,
    /// Held by its writers.
    held: u64,
    /// The position, in the order of turns, of the last write that was admitted. A new writer
    /// begins there.
    turn: u64,
    /// Its writes that wait.
    waiting: usize,
    dirty: Pages,
    /// Under write-out, the oldest first.
    batches: VecDeque<Batch>,
    /// The file was flushed, or not written for a while.
    is_idle: bool,
}

impl File {
    fn new(window: u64) -> File {
        File {
            window,
            held: 0,
            turn: 0,
            waiting: 0,
            dirty: Pages::default(),
            batches: VecDeque::new(),
            is_idle: false,
        }
    }
}

/// The next step for the driver of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Start the write-out of these runs, which are in order.
    Start { batch: u64, runs: Vec<Run> },
    /// Wait for the end of this batch, then call [`Pacer::ended`].
    Wait { batch: u64 },
    /// No step now. `is_dirty`: there will be a step some time after the last write.
    Rest { is_dirty: bool },
}

/// How much of the budget is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub budget: u64,
    pub dirty: u64,
    pub under_write_out: u64,
    /// Reserved by writes in flight.
    pub reserved: u64,
    /// Writes that have had to wait.
    pub waited: u64,
}

/// The budget of a device. `W` is a write that waits.
#[derive(Debug)]
pub(super) struct Pacer<W> {
    budget: u64,
    held: u64,
    writers: BTreeMap<Writer, Share<W>>,
    files: BTreeMap<u32, File>,
    /// Writes that wait.
    waiting: usize,
    /// Writes that waited and are admitted now.
    admitted: Vec<(Writer, W)>,
    waited: u64,
    number: u64,
}

impl<W> Pacer<W> {
    /// A pacer without files.
    pub(super) fn new() -> Pacer<W> {
        Pacer {
            budget: BUDGET_BYTES_MIN,
            held: 0,
            writers: BTreeMap::new(),
            files: BTreeMap::new(),
            waiting: 0,
            admitted: Vec::new(),
            waited: 0,
            number: 0,
        }
    }

    /// Adds a file; returns its number. The budget is the largest window of the files.
    pub(super) fn open(&mut self, window: u64) -> u32 {
        assert!((BUDGET_BYTES_MIN..=BUDGET_BYTES_MAX).contains(&window));
        self.number += 1;
        let number = self.number as u32;
        self.files.insert(number, File::new(window));
        self.set_budget();
        number
    }

    /// Removes a file that has no more writes. Its held bytes are freed.
    pub(super) fn close(&mut self, file: u32) {
        let Some(mut closed) = self.files.remove(&file) else { return };
        while closed.dirty.bytes() > 0 {
            let left = closed.dirty.take(u64::MAX, usize::MAX);
            closed.batches.push_back(Batch::new(0, left.owners));
        }
        for batch in closed.batches {
            self.release_batch(file, &batch);
        }
        self.set_budget();
        self.admit();
    }

    fn set_budget(&mut self) {
        let windows = self.files.values().map(|file| file.window);
        self.budget = windows.max().unwrap_or(BUDGET_BYTES_MIN);
    }

    /// Bytes that are written out together.
    pub(super) fn batch_bytes(&self) -> u64 {
        (self.budget / 8).clamp(128 * KIB, 4 * MIB)
    }

    /// Most bytes of one write: a small part of the budget, so that no write is waited for long.
    pub(super) fn write_bytes_max(&self) -> u64 {
        (self.budget / 16).min(MIB)
    }

    /// Whole pages around a range of the file.
    pub(super) fn pages(range: Range<u64>) -> Range<u64> {
        range.start / PAGE * PAGE..range.end.next_multiple_of(PAGE)
    }

    /// Whether a write of `pages` may begin now: then its bytes are reserved. Otherwise it waits.
    pub(super) fn try_hold(&mut self, writer: Writer, pages: Range<u64>) -> bool {
        let bytes = pages.end - pages.start;
        let Some(file) = self.files.get(&writer.file) else { return false };
        let is_free = file.waiting == 0 && self.has_room(writer, bytes);
        if is_free {
            self.hold(writer, bytes);
        }
        is_free
    }

    /// A write of `pages` that found no budget waits. [`Pacer::take_admitted`] returns it later.
    pub(super) fn wait(&mut self, writer: Writer, pages: Range<u64>, who: W) {
        self.number += 1;
        self.waited += 1;
        self.waiting += 1;
        if let Some(file) = self.files.get_mut(&writer.file) {
            file.waiting += 1;
        }
        let waiting = Waiting { bytes: pages.end - pages.start, number: self.number, who };
        self.line_up(writer);
        self.share(writer).waiting.push_back(waiting);
        self.admit();
    }

    /// Writes that waited and may begin now.
    pub(super) fn take_admitted(&mut self) -> Vec<(Writer, W)> {
        std::mem::take(&mut self.admitted)
    }

    /// Whether [`Pacer::take_admitted`] has any.
    pub(super) fn has_admitted(&self) -> bool {
        !self.admitted.is_empty()
    }

    /// A write of `pages` has ended, successfully or not: they may be dirty.
    pub(super) fn written(&mut self, writer: Writer, pages: Range<u64>) {
        let bytes = pages.end - pages.start;
        let Some(file) = self.files.get_mut(&writer.file) else {
            return self.release(writer, bytes);
        };
        let new = file.dirty.add(pages, writer.ring);
        file.is_idle = false;
        if new < bytes {
            self.release(writer, bytes - new);
            self.admit();
        }
    }

    /// `file` has had no write for a while, or was flushed: the rest of its dirty bytes is due.
    pub(super) fn idle(&mut self, file: u32) {
        if let Some(file) = self.files.get_mut(&file) {
            file.is_idle = true;
        }
    }

    /// Whether the driver of `file` has something to do.
    pub(super) fn is_due(&self, file: u32) -> bool {
        let Some(file) = self.files.get(&file) else { return true };
        let (dirty, under_way) = (file.dirty.bytes(), file.batches.len());
        let is_wanted = under_way == 0 && (self.waiting > 0 || file.is_idle);
        let is_full = dirty >= self.batch_bytes() || file.dirty.pass_bytes() > 0;
        under_way < DEPTH && (is_full || dirty > 0 && is_wanted)
    }

    /// Whether the driver of any file has something to do.
    pub(super) fn is_any_due(&self) -> bool {
        self.files.keys().any(|file| self.is_due(*file))
    }

    /// The next step for the driver of `file`; `None`: the file is closed.
    pub(super) fn step(&mut self, file: u32) -> Option<Step> {
        let (is_due, bytes) = (self.is_due(file), self.batch_bytes());
        let entry = self.files.get_mut(&file)?;
        if is_due {
            let taken = entry.dirty.take(bytes, RUNS_MAX);
            self.number += 1;
            entry.batches.push_back(Batch::new(self.number, taken.owners));
            return Some(Step::Start { batch: self.number, runs: taken.runs });
        }
        Some(match entry.batches.front() {
            Some(batch) => Step::Wait { batch: batch.id },
            None => Step::Rest { is_dirty: entry.dirty.bytes() > 0 },
        })
    }

    /// The write-out of a batch has ended, successfully or not: its pages are not dirty any more.
    pub(super) fn ended(&mut self, file: u32, batch: u64) {
        let Some(entry) = self.files.get_mut(&file) else { return };
        let place = entry.batches.iter().position(|other| other.id == batch);
        let batch = place.and_then(|place| entry.batches.remove(place));
        if let Some(batch) = batch {
            self.release_batch(file, &batch);
            self.admit();
        }
    }

    /// Most bytes of `file` that can be dirty now and are in no batch.
    pub(super) fn dirty_at_most(&self, file: u32) -> u64 {
        let Some(file) = self.files.get(&file) else { return u64::MAX };
        file.held - file.batches.iter().map(|batch| batch.bytes).sum::<u64>()
    }

    /// The part of the budget that is in use now.
    pub(super) fn usage(&self) -> Usage {
        let files = self.files.values();
        let dirty = files.clone().map(|file| file.dirty.bytes()).sum();
        let batches = files.flat_map(|file| &file.batches);
        let under_write_out = batches.map(|batch| batch.bytes).sum();
        let reserved = self.held - dirty - under_write_out;
        Usage { budget: self.budget, dirty, under_write_out, reserved, waited: self.waited }
    }

    /// Whether a write of `bytes` fits: into the budget, its file's share and its writer's share.
    fn has_room(&self, writer: Writer, bytes: u64) -> bool {
        if self.held == 0 {
            // It may be larger than the budget, which shrinks when a file is closed.
            return true;
        }
        let by_file = self.files.get(&writer.file).map_or(0, |file| file.held);
        if by_file == 0 && bytes <= self.write_bytes_max() + 2 * PAGE && self.files.len() > 1 {
            return true;
        }
        let Some(free) = self.budget.checked_sub(self.held + bytes) else { return false };
        let own = self.writers.get(&writer).map_or(0, |share| share.held) + bytes;
        if self.files.len() == 1 {
            let is_alone = self.writers.keys().all(|other| *other == writer);
            return own <= if is_alone { SHARES_ALONE } else { SHARES } * free;
        }
        // Each byte that the file takes is one free byte less, and so `SHARES` bytes less for the
        // file.
        let left = (SHARES * free).checked_sub(by_file + bytes).map(|left| left / (SHARES + 1));
        left.is_some_and(|left| own <= SHARES * left)
    }

    fn share(&mut self, writer: Writer) -> &mut Share<W> {
        let fresh = || Share { held: 0, turn: 0, waiting: VecDeque::new() };
        self.writers.entry(writer).or_insert_with(fresh)
    }

    fn hold(&mut self, writer: Writer, bytes: u64) {
        self.line_up(writer);
        self.held += bytes;
        let share = self.share(writer);
        let turn = share.turn;
        share.held += bytes;
        share.turn += bytes;
        if let Some(file) = self.files.get_mut(&writer.file) {
            file.held += bytes;
            file.turn = file.turn.max(turn);
        }
    }

    /// A writer that had no waiting write starts no earlier than the last write that was admitted.
    fn line_up(&mut self, writer: Writer) {
        let last = self.files.get(&writer.file).map_or(0, |file| file.turn);
        let share = self.share(writer);
        if share.waiting.is_empty() && !mutants::is(Mutant::NewcomerAtTurnZero) {
            share.turn = share.turn.max(last);
        }
    }

    fn release(&mut self, writer: Writer, bytes: u64) {
        let Some(share) = self.writers.get_mut(&writer) else { return };
        assert!(share.held >= bytes, "{writer:?} gives back more than it holds");
        share.held -= bytes;
        self.held -= bytes;
        if let Some(file) = self.files.get_mut(&writer.file) {
            file.held -= bytes;
        }
        if share.held == 0 && share.waiting.is_empty() {
            self.writers.remove(&writer);
        }
    }

    fn release_batch(&mut self, file: u32, batch: &Batch) {
        for (owner, bytes) in &batch.owners {
            self.release(Writer { file, ring: *owner }, *bytes);
        }
    }

    /// Admits the writes that may begin now.
    fn admit(&mut self) {
        while self.waiting > 0 {
            let Some((writer, bytes)) = self.next_to_go() else { return };
            // Still in the line, so it keeps its turn.
            self.hold(writer, bytes);
            let Some(first) = self.share(writer).waiting.pop_front() else { return };
            self.waiting -= 1;
            if let Some(file) = self.files.get_mut(&writer.file) {
                file.waiting -= 1;
            }
            self.admitted.push((writer, first.who));
        }
    }

    /// In each file, the writer whose turn it is; of these, the first whose write fits.
    fn next_to_go(&self) -> Option<(Writer, u64)> {
        let mut firsts: BTreeMap<u32, (u64, u64, Writer, u64)> = BTreeMap::new();
        for (writer, share) in &self.writers {
            let Some(first) = share.waiting.front() else { continue };
            // The position where it would end, so that a small write does not wait for a large one.
            let found = (share.turn + first.bytes, first.number, *writer, first.bytes);
            let entry = firsts.entry(writer.file).or_insert(found);
            *entry = found.min(*entry);
        }
        let held = |file: &u32| self.files.get(file).map_or(0, |file| file.held);
        let mut turns: Vec<_> =
            firsts.into_iter().map(|(file, found)| (held(&file), found)).collect();
        turns.sort_unstable();
        let goes = turns.into_iter().map(|(_, (_, _, writer, bytes))| (writer, bytes));
        goes.into_iter().find(|(writer, bytes)| self.has_room(*writer, *bytes))
    }
}
