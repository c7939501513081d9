//! Write-back: a batch of the log is written to the backing device, the device is flushed, then
//! dirty_tail moves. Kernel counterpart: `cache_writeback.c`.
//!
//! A batch never crosses a flush mark unless the order is `fast`. So between two batches the
//! backing device has the state of a client's flush, and during a batch it has a state that a disk
//! with a volatile cache may have. Within a batch the last write of each sector wins, and
//! neighbours are merged. A log of a kernel lacks marks: there every key set may end at a
//! flush, and is its own batch.
//!
//! A batch that crosses a mark makes the backing device alone inconsistent from the batch's first
//! write until dirty_tail has passed its end. The label records this before the first write.
//!
//! dirty_tail moves only when every write *and* the flush have succeeded; otherwise the whole batch
//! is written again after a pause. Pauses grow.

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

use super::args::WritebackOrder;
use super::coalesce::{Latest, Run};
use super::index::Place;
use super::keylog::{KeyCounts, KeyLog, LogReader, after};
use super::layout::{KEY_CLEAN, Key, Position, Record};
use super::{Pcache, TOKEN_FLUSH, TOKEN_WRITEBACK};

/// Most bytes that a batch writes, unless a single key set has more. Known zeroes count for less.
pub(super) const BATCH_BYTES_MAX: u64 = 32 * MIB;
/// Most keys that a batch passes, including those that need not be written.
pub(super) const BATCH_KEYS_MAX: usize = 32 * 1024;
/// Longest write made of neighbouring pieces.
pub(super) const WRITE_BYTES_MAX: u64 = 512 * KIB;
/// Writes in flight.
pub(super) const DEPTH_MAX: usize = 64;
/// Pieces of at least this length are checked for zeroes, which are written as such.
const ZEROES_BYTES_MIN: u64 = 64 * KIB;
/// Most zeroes that are being written at a time. A device without a command for it takes about a
/// second.
pub(super) const ZEROES_BYTES_MAX: u64 = 64 * MIB;
/// This many bytes of known zeroes count as one byte that a batch writes: most devices have a
/// command for zeroes. On the others, a batch still ends within seconds.
const ZEROES_PER_BYTE: u64 = 16;

/// The part of the log for a batch.
#[derive(Debug, Default)]
struct Batch {
    /// Where dirty_tail goes when the batch is done.
    end: Position,
    /// The keys in the batch.
    keys: KeyCounts,
    /// Keys and records.
    passed: usize,
    /// Of dirty data, written or not; and how many of these are known zeroes.
    bytes: u64,
    zeroes: u64,
    /// It ends in the part of the log that this server wrote, after this many of its marks.
    is_own: bool,
    marks: u64,
    /// It has data from both sides of a mark.
    crosses: bool,
    has_skipped: bool,
}

/// The writes of a batch to the backing device.
#[derive(Debug, Default)]
struct Writes {
    runs: Vec<Run>,
    /// The first of them that was not sent.
    next: usize,
    outstanding: usize,
    /// Bytes of outstanding writes of zeroes.
    zeroing: u64,
    /// Where runs begin that were damaged and not written.
    damaged: Vec<u64>,
    /// One of them could not be added to the list of bad ranges.
    unlisted: Option<Status>,
}

/// Whether the backing device alone has a state that a power failure could have left.
#[derive(Debug, Default)]
struct Torn {
    /// It is inconsistent until dirty_tail gets here.
    until: Option<Position>,
    since: Option<Nanos>,
    /// The present batch gets there.
    mends: bool,
}

/// The state of write-back.
#[derive(Debug, Default)]
pub(super) struct Writeback {
    reader: LogReader,
    cycle: Cycle,
    latest: Latest,
    batch: Batch,
    writes: Writes,
    torn: Torn,
    /// The log is known to carry flush marks from here on; `None`: from dirty_tail on.
    marks_from: Option<Position>,
    /// This server wrote the log from here on; `None`: from dirty_tail on.
    own_from: Option<Position>,
    /// The number of the log's counted marks that dirty_tail has passed.
    marks_passed: u64,
    /// Whether the order `adaptive` merges across flushes now.
    is_merging: bool,
    is_stuck: bool,
}

impl Writeback {
    /// Write-back of a cache whose attach has left `log` in its present state.
    pub(super) fn new(
        log: &KeyLog,
        marks_from: Option<Position>,
        torn_until: Option<Position>,
    ) -> Writeback {
        let (own_from, marks_passed) = (Some(log.head()), log.marks());
        let torn = Torn { until: torn_until, ..Torn::default() };
        Writeback { marks_from, torn, own_from, marks_passed, ..Writeback::default() }
    }

    /// Whether the backing device alone has a state that a power failure could have left.
    pub(super) fn is_origin_consistent(&self) -> bool {
        self.torn.until.is_none()
    }

    /// Since when it is inconsistent; `None` also stands for a time before the attach.
    pub(super) fn inconsistent_since(&self) -> Option<Nanos> {
        self.torn.since
    }

    /// Whether no I/O is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.cycle.is_idle()
    }

    /// Attempts on the backing device and their failures.
    pub(super) fn retry(&self) -> Retry {
        self.cycle.retry()
    }

    /// Damage in the log stops write-back.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// When to be called again.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.cycle.deadline()
    }

    /// The backing device has served a client: ends a pause.
    pub(super) fn end_early(&mut self) {
        self.cycle.end_early();
    }
}

impl Pcache {
    /// Starts a batch of about `bytes` if none is under way and something is dirty.
    pub(super) fn writeback_step(
        &self,
        writeback: &mut Writeback,
        bytes: u64,
        now: Nanos,
        port: &mut Port,
    ) {
        if !writeback.cycle.is_free(now) {
            return;
        }
        let mut passed = 0;
        loop {
            if self.background.is_suspended() || writeback.is_stuck {
                return;
            }
            if passed >= BATCH_KEYS_MAX {
                // No I/O is in flight whose end would cause the next tick.
                return self.signals.work();
            }
            match self.collect_batch(writeback, bytes, now) {
                Ok(0) => return,
                Ok(keys) if writeback.writes.runs.is_empty() => {
                    // Only CLEAN keys, marks and overwritten data: no flush is needed.
                    if !self.finish_batch(writeback) {
                        return;
                    }
                    passed += keys;
                }
                Ok(_) => break,
                Err(_) => {
                    writeback.is_stuck = true;
                    return;
                }
            }
        }
        writeback.cycle.write();
        self.emit_writes(writeback, port);
        // Damage that cannot be set aside fails the batch before any I/O.
        self.plan_retry(writeback, now);
    }

    /// Gathers key sets from dirty_tail on. Returns how many keys and records; 0: the log ends
    /// there.
    fn collect_batch(
        &self,
        writeback: &mut Writeback,
        bytes: u64,
        now: Nanos,
    ) -> Result<usize, Status> {
        let merges = self.merges(writeback)?;
        // A drain ends when the origin has all data that was dirty, or newer data: no data may be
        // left out then.
        let drains = self.background.is_draining() && !mutants::is(Mutant::DrainSkips);
        let can_skip = self.can_skip(writeback) && !drains;
        let mut batch = self.read_batch(writeback, bytes, merges, can_skip)?;
        if batch.has_skipped && !self.secure_newer(writeback) {
            batch = self.read_batch(writeback, bytes, merges, false)?;
        }
        if batch.crosses {
            self.tear(writeback, batch.end, now)?;
        }
        let passed = batch.passed;
        writeback.batch = batch;
        let Writeback { latest, writes, .. } = writeback;
        latest.take_runs(&mut writes.runs);
        writeback.writes.next = 0;
        writeback.writes.damaged.clear();
        writeback.writes.unlisted = None;
        writeback.cycle.gather();
        Ok(passed)
    }

    /// Reads the log from dirty_tail on, as far as a batch reaches, and puts the data to be written
    /// into `latest`; with `can_skip`, without overwritten data.
    fn read_batch(
        &self,
        writeback: &mut Writeback,
        bytes: u64,
        merges: bool,
        can_skip: bool,
    ) -> Result<Batch, Status> {
        let head = self.log.head();
        let is_own = writeback.own_from.is_none();
        let mut batch = Batch { end: self.log.dirty_tail(), is_own, ..Batch::default() };
        let mut has_border = false;
        let mut written_bytes = 0;
        writeback.torn.mends = false;
        writeback.reader.begin();
        writeback.latest.begin();
        while batch.end != head && batch.passed < BATCH_KEYS_MAX && written_bytes < bytes {
            let at = batch.end;
            if writeback.marks_from == Some(at) {
                writeback.marks_from = None;
            }
            batch.is_own |= writeback.own_from == Some(at);
            let record = writeback.reader.read(&self.media, &self.segments, at, Some(head))?;
            let record = record.ok_or(Status::Corrupt)?;
            let next = after(at, &record);
            batch.passed += 1;
            if let Record::Keys(set) = record {
                if can_skip {
                    set.iter().for_each(|key| self.index.touch(key.off.get()));
                }
                for key in set.iter().filter(|key| self.is_to_be_written(key)) {
                    let len = u64::from(key.len.get());
                    let is_known = self.is_known_zero(place_of(key), len);
                    batch.crosses |= has_border;
                    batch.bytes += len;
                    batch.zeroes += len * u64::from(is_known);
                    if can_skip && self.is_overwritten(key) {
                        batch.has_skipped = true;
                        continue;
                    }
                    writeback.latest.put(key);
                    let is_cheap = is_known && len >= ZEROES_BYTES_MIN;
                    written_bytes += if is_cheap { len / ZEROES_PER_BYTE } else { len };
                }
                batch.passed += set.len();
                batch.keys.add(KeyCounts::of(set));
                batch.marks += u64::from(set.is_empty() && batch.is_own);
                let is_border = (set.is_empty() || writeback.marks_from.is_some())
                    && !mutants::is(Mutant::BatchCrossesMark);
                has_border |= is_border && batch.bytes > 0;
            }
            batch.end = next;
            writeback.torn.mends |= writeback.torn.until == Some(next);
            if has_border && !merges {
                break;
            }
        }
        Ok(batch)
    }

    /// Whether overwritten data need not be written. This holds if the log lacks a flush mark after
    /// dirty_tail: then all of its writes belong to one interval between two flushes, and the
    /// backing device may have any part of them.
    fn can_skip(&self, writeback: &Writeback) -> bool {
        let is_own = writeback.own_from.is_none_or(|from| from == self.log.dirty_tail());
        is_own
            && (self.log.marks() == writeback.marks_passed
                || mutants::is(Mutant::SkippedAcrossMark))
    }

    /// The newer version of data that a batch leaves out must be as durable: it is logged now, if
    /// it was not. A flush may have ended between the two, so the marks are checked again. Returns
    /// whether all of this succeeded.
    fn secure_newer(&self, writeback: &Writeback) -> bool {
        if mutants::is(Mutant::SkippedForUnlogged) {
            return true;
        }
        self.close_each().is_ok() && self.can_skip(writeback)
    }

    /// Whether the index has newer data for all of a key.
    fn is_overwritten(&self, key: &Key) -> bool {
        let (offset, len) = (key.off.get(), u64::from(key.len.get()));
        let own = place_of(key);
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            if piece.place.is_none_or(|place| place == own.plus(at - offset)) {
                return false;
            }
            at += piece.len;
        }
        true
    }

    /// Whether batches may reach beyond flush marks now.
    fn merges(&self, writeback: &mut Writeback) -> Result<bool, Status> {
        match self.args.writeback_order {
            WritebackOrder::Ordered => return Ok(false),
            WritebackOrder::Fast => return Ok(true),
            WritebackOrder::Adaptive => {}
        }
        let low = self.dirty_mark();
        let mark = if writeback.is_merging { low } else { low.midpoint(self.dirty_mark_full()) };
        let was_merging = writeback.is_merging;
        writeback.is_merging = self.stripes.dirty_bytes() > mark || self.is_space_short();
        if was_merging && !writeback.is_merging {
            // Otherwise a far later place in the log might be mistaken for the stored one.
            self.identity.store_torn(writeback.torn.until)?;
        }
        Ok(writeback.is_merging)
    }

    /// The batch up to `end` crosses a mark: that is recorded first, so that a crash during the
    /// batch does not go unnoticed.
    fn tear(&self, writeback: &mut Writeback, end: Position, now: Nanos) -> Result<(), Status> {
        if writeback.torn.until.is_some() && !writeback.torn.mends {
            // An earlier batch, which is being repeated in parts, reached further.
            return Ok(());
        }
        self.identity.store_torn(Some(end))?;
        writeback.torn.until = Some(end);
        writeback.torn.since.get_or_insert(now);
        writeback.torn.mends = true;
        Ok(())
    }

    /// Not CLEAN; and not stale, which no key here should be: the space of a stale key has other
    /// data.
    fn is_to_be_written(&self, key: &Key) -> bool {
        key.flags.get() & KEY_CLEAN == 0
            && self.segments.generation(key.segment.get()) == key.generation.get()
    }

    /// Keeps up to [`DEPTH_MAX`] writes in flight; after the last one, the flush.
    fn emit_writes(&self, writeback: &mut Writeback, port: &mut Port) {
        let mut is_alone = false;
        while writeback.writes.outstanding < DEPTH_MAX
            && writeback.writes.next < writeback.writes.runs.len()
            && writeback.cycle.failure().is_none()
        {
            let first = writeback.writes.next;
            let (zero_runs, zeroes) = self.known_zeroes(&writeback.writes.runs[first..]);
            if zeroes >= ZEROES_BYTES_MIN {
                if writeback.writes.zeroing + zeroes > ZEROES_BYTES_MAX {
                    break;
                }
                let at = writeback.writes.runs[first].offset;
                writeback.writes.next += zero_runs;
                writeback.writes.outstanding += 1;
                writeback.writes.zeroing += zeroes;
                let (disk, token) = (&self.backing, TOKEN_WRITEBACK);
                port.ios.push_back(DiskIo::bare(disk, Op::WriteZeroes, at, zeroes, token));
                continue;
            }
            let longest = if is_alone { 0 } else { WRITE_BYTES_MAX };
            let len = merge(&writeback.writes.runs, &mut writeback.writes.next, longest);
            let runs = &writeback.writes.runs[first..writeback.writes.next];
            let mut buffer = port.pool.take(len as usize);
            if let Err(status) = self.load_runs(runs, &mut buffer) {
                port.pool.put(buffer);
                if runs.len() > 1 {
                    // One of them is bad: from here on one by one, to find out which.
                    (is_alone, writeback.writes.next) = (true, first);
                    continue;
                }
                // If it cannot be listed, the rest of the batch is still written.
                if !mutants::is(Mutant::QuarantineLate) && self.set_aside(runs[0]).is_err() {
                    writeback.writes.unlisted = Some(status);
                }
                writeback.writes.damaged.push(runs[0].offset);
                continue;
            }
            let is_zero = len >= ZEROES_BYTES_MIN && buffer.as_slice().iter().all(|&b| b == 0);
            let (disk, at) = (&self.backing, runs[0].offset);
            writeback.writes.outstanding += 1;
            port.ios.push_back(if is_zero {
                port.pool.put(buffer);
                writeback.writes.zeroing += len;
                DiskIo::bare(disk, Op::WriteZeroes, at, len, TOKEN_WRITEBACK)
            } else {
                DiskIo::new(disk, Op::Write, at, buffer, TOKEN_WRITEBACK)
            });
        }
        if writeback.writes.outstanding == 0 {
            self.writes_done(writeback, port);
        }
    }

    /// How many of the first runs are neighbours of known zeroes, and their length together.
    fn known_zeroes(&self, runs: &[Run]) -> (usize, u64) {
        let (mut count, mut len) = (0, 0);
        for run in runs {
            let is_next = run.offset == runs[0].offset + len && len + run.len <= ZEROES_BYTES_MAX;
            if !is_next || !self.is_known_zero(run.place, run.len) {
                break;
            }
            (count, len) = (count + 1, len + run.len);
        }
        (count, len)
    }

    /// Copies runs out of the cache, checking their data where it has CRCs.
    fn load_runs(&self, runs: &[Run], buffer: &mut Buffer) -> Result<(), Status> {
        let mut at = 0;
        for run in runs {
            let into = &mut buffer.as_mut_slice()[at..at + run.len as usize];
            self.segments.load(run.place.segment, run.place.offset, into)?;
            if let Some(crcs) = &self.crcs {
                crcs.verify(&self.segments, run.place, into)?;
            }
            at += run.len as usize;
        }
        Ok(())
    }

    /// This run cannot be read or is damaged: it is added to the list of bad ranges. All of it,
    /// even data that was written again since, because a power failure may undo that write. The
    /// range is healed once the newer data is written back; until then reads find it in the cache.
    fn set_aside(&self, run: Run) -> Result<(), Status> {
        self.counters.damaged_runs.fetch_add(1, Ordering::Relaxed);
        self.quarantine(run.offset, run.len)
    }

    /// As [`Mutant::QuarantineLate`] does it.
    pub(super) fn set_aside_late(&self, writeback: &Writeback) {
        let is_damaged = |run: &&Run| writeback.writes.damaged.contains(&run.offset);
        for run in writeback.writes.runs.iter().filter(is_damaged) {
            let _ = self.set_aside(*run);
        }
    }

    fn writes_done(&self, writeback: &mut Writeback, port: &mut Port) {
        let Writes { runs, damaged, unlisted, .. } = &writeback.writes;
        if let Some(status) = unlisted.filter(|_| damaged.len() == runs.len()) {
            writeback.cycle.note_failure(status);
        }
        if writeback.cycle.failure().is_some() {
            return self.pause(writeback);
        }
        writeback.cycle.flush();
        if mutants::is(Mutant::DirtyTailBeforeFlush) {
            let _ = self.log.set_dirty_tail(writeback.batch.end);
        }
        port.ios.push_back(DiskIo::bare(&self.backing, Op::Flush, 0, 0, TOKEN_FLUSH));
    }

    /// A write of the batch is back.
    pub(super) fn complete_write(&self, writeback: &mut Writeback, io: DiskIo, port: &mut Port) {
        writeback.writes.outstanding -= 1;
        if io.op == Op::WriteZeroes {
            writeback.writes.zeroing -= io.len;
        }
        match io.result {
            Ok(()) => {
                self.counters.written_back_bytes.fetch_add(io.len, Ordering::Relaxed);
            }
            Err(_) if mutants::is(Mutant::WriteErrorIgnored) => {}
            Err(status) => writeback.cycle.note_failure(status),
        }
        port.pool.put(io.buffer);
        self.emit_writes(writeback, port);
    }

    /// The batch's flush is complete. Returns whether the batch has succeeded.
    pub(super) fn complete_flush(&self, writeback: &mut Writeback, io: &DiskIo) -> bool {
        writeback.cycle.flushed();
        if io.result.is_err() && !mutants::is(Mutant::FlushErrorIgnored) {
            // The state of this batch on the device is unknown, so all of it is written again.
            self.pause(writeback);
            return false;
        }
        if let Some(status) = writeback.writes.unlisted {
            // The good data is safe, and may have healed ranges, which makes space in the list.
            writeback.is_stuck |= self.heal_written(writeback).is_err();
            writeback.cycle.note_failure(status);
            self.pause(writeback);
            return false;
        }
        writeback.cycle.succeed();
        self.signals.room().hope();
        self.counters.batches.fetch_add(1, Ordering::Relaxed);
        self.finish_batch(writeback)
    }

    /// Everything before the batch's end is on the backing device.
    fn finish_batch(&self, writeback: &mut Writeback) -> bool {
        let is_done = self.heal_written(writeback).and_then(|()| {
            // In this order: a dirty range is never on the list without reason.
            self.log.set_dirty_tail(match mutants::is(Mutant::TailJumpsToHead) {
                true => self.log.head(),
                false => writeback.batch.end,
            })
        });
        if is_done.is_err() {
            writeback.is_stuck = true;
            return false;
        }
        self.log.note_written_back(writeback.batch.keys);
        self.stripes.note_cleaned(writeback.batch.bytes, writeback.batch.zeroes);
        writeback.marks_passed += writeback.batch.marks;
        writeback.own_from = writeback.own_from.filter(|_| !writeback.batch.is_own);
        if writeback.torn.mends {
            self.identity.forget_torn();
            writeback.torn.until = None;
            writeback.torn.since = None;
        }
        true
    }

    /// Ranges that were bad and are now on the backing device are good again.
    fn heal_written(&self, writeback: &Writeback) -> Result<(), Status> {
        if !self.bad.is_any() {
            return Ok(());
        }
        let is_written = |run: &&Run| {
            mutants::is(Mutant::SetAsideHealed) || !writeback.writes.damaged.contains(&run.offset)
        };
        let mut written = writeback.writes.runs.iter().filter(is_written);
        written.try_for_each(|run| self.forget_bad(run.offset, run.len))
    }

    /// The batch has failed. `plan_retry` follows, which knows the time.
    fn pause(&self, writeback: &mut Writeback) {
        self.counters.writeback_failures.fetch_add(1, Ordering::Relaxed);
        writeback.cycle.fail();
    }

    /// Plans the next attempt after a failure.
    pub(super) fn plan_retry(&self, writeback: &mut Writeback, now: Nanos) {
        if writeback.cycle.plan_retry(now) {
            self.background.served.want(writeback.cycle.may_end_early(now));
            self.signals.work();
        }
    }
}

/// Where the data of a key is.
fn place_of(key: &Key) -> Place {
    Place::new(key.segment.get(), key.segment_off.get(), key.generation.get())
}

/// Advances `next` over a run, and over further ones that are neighbours while they are at most
/// `longest` together. Returns their length.
fn merge(runs: &[Run], next: &mut usize, longest: u64) -> u64 {
    let first = runs[*next];
    let mut len = first.len;
    *next += 1;
    while let Some(run) = runs.get(*next)
        && run.offset == first.offset + len
        && len + run.len <= longest
    {
        len += run.len;
        *next += 1;
    }
    len
}
