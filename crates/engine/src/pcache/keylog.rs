//! The log of key sets: append at the head, read from any position, and the two tails. Kernel
//! counterpart: `cache_key.c`.
//!
//! Invariants:
//! 1. At least 24 zero bytes follow the last key set, and they are durable before it: the log is
//!    zeroed a stretch ahead, so that one fence per key set is enough and old bytes never follow
//!    it.
//! 2. Every key set leaves space for a LAST record after it in its segment.
//! 3. Data is durable before the key that names it; a key set before anything appended later.
//! 4. A tail's update goes to the slot that is not current.

use zerocopy::IntoBytes;

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pcache::slots::SlotState;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock, lock_soon};

use super::key::check_key;
use super::layout::{
    DIRTY_TAIL_AT, KEY_BYTES, KEY_CLEAN, KEY_TAIL_AT, KEYS_MAX, KSET_BYTES_MAX, KSET_HEADER_BYTES,
    Key, KsetHeader, Position, Record, SMALL_STRIDE, Tail, kset_bytes, parse_record, seal_kset,
};
use super::media::Media;
use super::openset::{LastSet, LogEnd};
use super::segment::Segments;

#[cfg(feature = "mutants")]
mod wrong;

/// How far ahead of the head the log is zeroed, in bytes.
const ZERO_AHEAD: u32 = 16 << 10;
/// At least this many zero bytes follow the log's end, or all bytes to the end of its segment. So
/// if an attach finds a torn append, it knows that data further on is old.
pub const ZERO_BEHIND: u32 = 8 << 10;
/// While the log's segment has at least this many bytes left, writes are admitted even when no
/// segment is free: every key of a bounded number of writes in flight still fits.
const ADMISSION_BYTES: u32 = 1 << 20;

/// Why keys could not be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// The log's segment is full and no segment is free.
    NoRoom,
    /// The medium failed.
    Medium(Status),
}

impl From<Status> for AppendError {
    fn from(status: Status) -> AppendError {
        AppendError::Medium(status)
    }
}

#[derive(Debug)]
struct Head {
    position: Position,
    /// Bytes of the head's segment known to be zero and durable from the head on.
    zeroed_until: u32,
    /// Whether something was logged since the last flush mark.
    is_unmarked: bool,
    /// The last keys that were appended.
    last: LastSet,
    /// Whether a mark must be logged before any other record; see [`KeyLog::owe_mark`].
    owes_mark: bool,
}

/// State that every append changes, separate from the state that every write reads.
#[derive(Debug)]
#[repr(align(128))]
struct Front {
    head: Mutex<Head>,
    /// A copy of the head's position, packed, to be read without the lock.
    head_seen: AtomicU64,
    /// Flush marks that were appended. Changes under the head's lock.
    marks: AtomicU64,
    /// See [`KeyLog::keys`].
    logged: AtomicU64,
    keys_dirty: AtomicU64,
    keys_kept: AtomicU64,
}

/// Key sets of up to this many keys are made before the log is locked.
const SMALL_KEYS: usize = 4;
const SMALL_BYTES: usize = kset_bytes(SMALL_KEYS) + KSET_HEADER_BYTES;

#[derive(Debug)]
struct TailState {
    at: u64,
    position: Position,
    slot: SlotState,
}

/// The log of a cache.
#[derive(Debug)]
pub struct KeyLog {
    media: Media,
    segments: Arc<Segments>,
    front: Front,
    /// Where large key sets are made. Taken under the head's lock.
    scratch: Mutex<Box<[u8; KSET_BYTES_MAX + KSET_HEADER_BYTES]>>,
    key_tail: Mutex<TailState>,
    dirty_tail: Mutex<TailState>,
    has_failed: AtomicBool,
}

/// How many keys: all of them, and those that write-back has not passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCounts {
    /// Of whatever kind.
    pub all: u64,
    /// From dirty_tail on, not CLEAN.
    pub dirty: u64,
    /// From dirty_tail on, CLEAN.
    pub kept: u64,
}

impl KeyCounts {
    /// Of these keys.
    pub fn of(keys: &[Key]) -> KeyCounts {
        let kept = keys.iter().filter(|key| key.flags.get() & KEY_CLEAN != 0).count() as u64;
        let all = keys.len() as u64;
        KeyCounts { all, dirty: all - kept, kept }
    }

    /// The sum of both.
    pub fn add(&mut self, more: KeyCounts) {
        self.all += more.all;
        self.dirty += more.dirty;
        self.kept += more.kept;
    }
}

/// A tail as found on media.
#[derive(Clone, Copy, Debug)]
pub struct TailOnMedia {
    /// Where it points.
    pub position: Position,
    /// Where its record stands.
    pub slot: SlotState,
}

/// One thread at a time takes; keys that were never counted are not taken.
fn take_from(count: &AtomicU64, less: u64) {
    count.fetch_sub(less.min(count.load(Ordering::Relaxed)), Ordering::Relaxed);
}

fn pack(position: Position) -> u64 {
    u64::from(position.segment) << 32 | u64::from(position.offset)
}

fn unpack(packed: u64) -> Position {
    Position { segment: (packed >> 32) as u32, offset: packed as u32 }
}

impl KeyLog {
    /// A log that continues at `head`.
    pub fn new(
        media: Media,
        segments: Arc<Segments>,
        head: Position,
        key_tail: TailOnMedia,
        dirty_tail: TailOnMedia,
    ) -> KeyLog {
        let tail = |at, tail: TailOnMedia| {
            Mutex::new(TailState { at, position: tail.position, slot: tail.slot })
        };
        KeyLog {
            media,
            segments,
            front: Front {
                head: Mutex::new(Head {
                    position: head,
                    zeroed_until: head.offset,
                    is_unmarked: true,
                    last: LastSet::default(),
                    owes_mark: false,
                }),
                head_seen: AtomicU64::new(pack(head)),
                marks: AtomicU64::new(0),
                logged: AtomicU64::new(0),
                keys_dirty: AtomicU64::new(0),
                keys_kept: AtomicU64::new(0),
            },
            scratch: Mutex::new(Box::new([0; KSET_BYTES_MAX + KSET_HEADER_BYTES])),
            key_tail: tail(KEY_TAIL_AT, key_tail),
            dirty_tail: tail(DIRTY_TAIL_AT, dirty_tail),
            has_failed: AtomicBool::new(false),
        }
    }

    /// How many flush marks were appended since the attach. A mark is counted before any later
    /// record is appended.
    pub fn marks(&self) -> u64 {
        self.front.marks.load(Ordering::Acquire)
    }

    /// How many keys were ever logged, including the keys that the attach found: before the head,
    /// and before dirty_tail. For decisions that may be a little wrong: no durable state depends on
    /// it.
    pub fn keys(&self) -> (u64, u64) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let behind = load(&self.front.keys_dirty) + load(&self.front.keys_kept);
        let logged = load(&self.front.logged);
        (logged, logged.saturating_sub(behind))
    }

    /// This many more keys are in the log.
    pub fn note_logged(&self, counts: KeyCounts) {
        self.front.logged.fetch_add(counts.all, Ordering::Relaxed);
        self.front.keys_dirty.fetch_add(counts.dirty, Ordering::Relaxed);
        self.front.keys_kept.fetch_add(counts.kept, Ordering::Relaxed);
    }

    /// Write-back has passed this many keys.
    pub fn note_written_back(&self, counts: KeyCounts) {
        take_from(&self.front.keys_dirty, counts.dirty);
        take_from(&self.front.keys_kept, counts.kept);
    }

    /// Where the next key set goes.
    pub fn head(&self) -> Position {
        unpack(self.front.head_seen.load(Ordering::Acquire))
    }

    /// Everything before has been collected.
    pub fn key_tail(&self) -> Position {
        lock(&self.key_tail).position
    }

    /// Everything before is on the backing device.
    pub fn dirty_tail(&self) -> Position {
        lock(&self.dirty_tail).position
    }

    /// Moves key_tail, durably.
    pub fn set_key_tail(&self, to: Position) -> Result<(), Status> {
        self.set_tail(&self.key_tail, to)
    }

    /// Moves dirty_tail, durably.
    pub fn set_dirty_tail(&self, to: Position) -> Result<(), Status> {
        self.set_tail(&self.dirty_tail, to)
    }

    fn set_tail(&self, tail: &Mutex<TailState>, to: Position) -> Result<(), Status> {
        let mut tail = lock(tail);
        if tail.position == to {
            return Ok(());
        }
        let next = tail.slot.next();
        let record = Tail::new(next.seq, to);
        if mutants::is(Mutant::TailUnfenced) {
            self.media.store(tail.at + next.current as u64 * SMALL_STRIDE, record.as_bytes());
        } else {
            self.media.store_slot(tail.at, SMALL_STRIDE, next, &record)?;
        }
        tail.slot = next;
        tail.position = to;
        Ok(())
    }

    /// Whether a write may begin: the log will have space for its keys. Checked before the index is
    /// touched, so that no write fails halfway.
    pub fn has_room(&self) -> bool {
        let data_bytes = self.media.geometry.data_bytes();
        // In caches scaled down for tests, a quarter of a segment replaces the MiB.
        let needed = ADMISSION_BYTES.min(data_bytes / 4);
        self.segments.free() > 0 || data_bytes - self.head().offset >= needed
    }

    /// The medium has lost a part: no more data is stored there.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether the medium failed under the log; then later writes cannot become durable.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Logs `keys` in order, durably. With `mark`, a key set without keys follows: all earlier keys
    /// are then reported durable to a client.
    pub fn append(&self, keys: &[Key], mark: bool) -> Result<(), AppendError> {
        // The lock that all appends share is held as briefly as possible: the set is made before.
        let mut small = [0; SMALL_BYTES];
        let is_small = (1..=SMALL_KEYS).contains(&keys.len());
        let sealed = if is_small { seal(&mut small, keys, mark) } else { &[] };
        let mut head = lock_soon(&self.front.head);
        let result = self.append_locked(&mut head, keys, sealed, mark);
        drop(head);
        if let Err(AppendError::Medium(_)) = result {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        result
    }

    /// `sealed` are the keys as a set, if they are few.
    fn append_locked(
        &self,
        head: &mut Head,
        keys: &[Key],
        sealed: &[u8],
        mark: bool,
    ) -> Result<(), AppendError> {
        if self.has_failed() {
            return Err(AppendError::Medium(Status::Io));
        }
        // Data before keys. On memory where leaving the CPU is enough, the writers have ensured
        // that already, and this costs no time.
        self.media.sync()?;
        // All or none: a key that is logged twice would be collected twice.
        if !self.fits(head, keys.len(), mark) {
            return Err(AppendError::NoRoom);
        }
        if head.owes_mark && !keys.is_empty() {
            self.append_set(head, &[], false)?;
            head.owes_mark = false;
        }
        if !sealed.is_empty() {
            return self.append_sealed(head, keys, sealed, mark);
        }
        let sets = keys.len().div_ceil(KEYS_MAX);
        for (nth, set) in keys.chunks(KEYS_MAX).enumerate() {
            self.append_set(head, set, mark && nth + 1 == sets)?;
        }
        if keys.is_empty() && mark && head.is_unmarked {
            self.append_set(head, &[], false)?;
            head.owes_mark = false;
        }
        Ok(())
    }

    /// The present end of the log counts as the end of a client's flush: clients have seen this
    /// state after a crash and build on it, so write-back must not mix it with later writes. The
    /// mark is stored with the next append; an attach alone does not write.
    pub fn owe_mark(&self) {
        lock(&self.front.head).owes_mark = true;
    }

    /// Whether `keys` keys fit: into the head's segment, or with one more segment.
    fn fits(&self, head: &Head, keys: usize, mark: bool) -> bool {
        let marks = usize::from(mark) + usize::from(head.owes_mark);
        let headers = keys.div_ceil(KEYS_MAX) + marks + 1;
        let needed = keys * KEY_BYTES + headers * KSET_HEADER_BYTES;
        let left = (self.media.geometry.data_bytes() - head.position.offset) as usize;
        needed <= left || self.segments.free() > 0
    }

    fn append_set(&self, head: &mut Head, keys: &[Key], mark: bool) -> Result<(), AppendError> {
        let mut scratch = lock(&self.scratch);
        let sealed = seal(&mut scratch[..], keys, mark);
        self.append_sealed(head, keys, sealed, mark || keys.is_empty())
    }

    /// Stores a key set of `keys`, which ends in a mark if `is_marked`. One store, one fence.
    fn append_sealed(
        &self,
        head: &mut Head,
        keys: &[Key],
        sealed: &[u8],
        is_marked: bool,
    ) -> Result<(), AppendError> {
        #[cfg(feature = "mutants")]
        if wrong::appends() {
            return self.append_sealed_wrongly(head, keys, sealed, is_marked);
        }
        let end = self.make_way(head, keys, sealed)?;
        let at = self.segments.data_at(head.position.segment, head.position.offset);
        self.media.announce_end(end);
        self.media.store(at, sealed);
        self.media.settle()?;
        self.media.confirm_end(end);
        if is_marked {
            self.front.marks.fetch_add(1, Ordering::Release);
        }
        head.position = end.position;
        self.note_logged(KeyCounts::of(keys));
        head.is_unmarked = !is_marked;
        self.show(head.position);
        Ok(())
    }

    /// Ensures that `sealed`, which has `keys`, fits at the head, and zeroes after it. Returns the
    /// new end of the log.
    fn make_way(
        &self,
        head: &mut Head,
        keys: &[Key],
        sealed: &[u8],
    ) -> Result<LogEnd, AppendError> {
        let needed = (sealed.len() + KSET_HEADER_BYTES) as u32;
        if self.media.geometry.data_bytes() - head.position.offset < needed {
            self.next_segment(head)?;
            if keys.is_empty() {
                // The segment with the last keys may be reused before there are new ones.
                head.last = LastSet::default();
            }
        }
        self.zero_ahead(head, head.position.offset + needed + ZERO_BEHIND)?;
        if !keys.is_empty() {
            let crc = u32::from_le_bytes([0, 1, 2, 3].map(|nth| sealed[nth]));
            head.last = LastSet::new(head.position, crc);
        }
        let offset = head.position.offset + sealed.len() as u32;
        Ok(LogEnd { position: Position { offset, ..head.position }, last: head.last })
    }

    /// Invariant 1: bytes up to `until` are zero and durable.
    fn zero_ahead(&self, head: &mut Head, until: u32) -> Result<(), Status> {
        let until = until.min(self.media.geometry.data_bytes());
        if until <= head.zeroed_until {
            return Ok(());
        }
        let from = head.zeroed_until.max(head.position.offset);
        let end = until.saturating_add(ZERO_AHEAD).min(self.media.geometry.data_bytes());
        let at = self.segments.data_at(head.position.segment, from);
        self.media.pmem.zero(at, u64::from(end - from));
        if !mutants::is(Mutant::TerminatorWithKset) {
            self.media.settle()?;
        }
        head.zeroed_until = end;
        Ok(())
    }

    fn next_segment(&self, head: &mut Head) -> Result<(), AppendError> {
        let next = self.segments.take_log().ok_or(AppendError::NoRoom)?;
        let end = ZERO_AHEAD.min(self.media.geometry.data_bytes());
        if mutants::is(Mutant::LastBeforeZeroes) {
            self.store_last(head, next)?;
        }
        self.media.pmem.zero(self.segments.data_at(next, 0), u64::from(end));
        self.media.settle()?;
        self.store_last(head, next)?;
        head.position = Position { segment: next, offset: 0 };
        head.zeroed_until = end;
        self.show(head.position);
        Ok(())
    }

    /// Ends the head's segment with a record that leads to the next one.
    fn store_last(&self, head: &mut Head, next: u32) -> Result<(), Status> {
        // Invariant 1 also holds here: the rest of an earlier torn append at this position, mixed
        // with a torn LAST, looks like damage, or leads to the segment of an older LAST.
        self.zero_ahead(head, head.position.offset + KSET_HEADER_BYTES as u32)?;
        let at = self.segments.data_at(head.position.segment, head.position.offset);
        let position = Position { segment: next, offset: 0 };
        let end = LogEnd { position, last: head.last };
        self.media.announce_end(end);
        self.media.store(at, KsetHeader::last(next).as_bytes());
        self.media.settle()?;
        self.media.confirm_end(end);
        Ok(())
    }

    /// Where the log ends now, for those who only look.
    fn show(&self, position: Position) {
        self.front.head_seen.store(pack(position), Ordering::Release);
    }
}

/// Makes a key set of `keys` in `scratch`, with `mark` followed by a mark.
fn seal<'a>(scratch: &'a mut [u8], keys: &[Key], mark: bool) -> &'a [u8] {
    let set_bytes = kset_bytes(keys.len());
    let sealed = &mut scratch[..set_bytes + if mark { KSET_HEADER_BYTES } else { 0 }];
    sealed[KSET_HEADER_BYTES..set_bytes].copy_from_slice(keys.as_bytes());
    seal_kset(sealed, keys.len());
    if mark {
        seal_kset(&mut sealed[set_bytes..], 0);
    }
    sealed
}

/// Reads records one after the other, through a window so that small key sets cost little.
///
/// The log of a running cache was checked at the attach, or this server wrote it; but a medium can
/// change under a server. A record that leads out of the cache, or back to an earlier part of the
/// log, is not valid.
#[derive(Debug)]
pub struct LogReader {
    window: Vec<u8>,
    segment: u32,
    start: u32,
    end: u32,
    /// Ways to another segment met since the walk began.
    lasts: u32,
}

/// Bytes of one read from the medium.
const WINDOW_BYTES: u32 = 64 << 10;

impl Default for LogReader {
    fn default() -> LogReader {
        LogReader { window: Vec::new(), segment: u32::MAX, start: 0, end: 0, lasts: 0 }
    }
}

impl LogReader {
    /// Begins a new walk.
    pub fn begin(&mut self) {
        self.lasts = 0;
    }

    /// The record at `position`; `None` if it is not valid. `limit` is the log's head where
    /// it is known: no byte beyond it is read. Records before it get the same checks as in an
    /// attach, but with shorter errors.
    pub fn read(
        &mut self,
        media: &Media,
        segments: &Segments,
        position: Position,
        limit: Option<Position>,
    ) -> Result<Option<Record<'_>>, Status> {
        let end = match limit {
            Some(head) if head.segment == position.segment => head.offset,
            _ => media.geometry.data_bytes(),
        };
        if position.offset > end {
            return Ok(None);
        }
        let needed = end.min(position.offset.saturating_add(KSET_BYTES_MAX as u32));
        let has_all =
            self.segment == position.segment && self.start <= position.offset && needed <= self.end;
        if !has_all {
            self.fill(media, segments, position, end)?;
        }
        let from = position.offset.saturating_sub(self.start) as usize;
        let to = (needed.max(position.offset) - self.start) as usize;
        let record = parse_record(&self.window[from..to]);
        if limit.is_none() {
            return Ok(record);
        }
        self.lasts += u32::from(matches!(record, Some(Record::Last(_))));
        // The log enters no segment twice.
        let is_circle = self.lasts > segments.count();
        Ok(record.filter(|record| !is_circle && is_inside(media, segments, record)))
    }

    fn fill(
        &mut self,
        media: &Media,
        segments: &Segments,
        position: Position,
        end: u32,
    ) -> Result<(), Status> {
        let len = WINDOW_BYTES.min(end.saturating_sub(position.offset));
        self.window.resize(len as usize, 0);
        self.segment = u32::MAX;
        let at = segments.data_at(position.segment, position.offset);
        media.pmem.load(at, &mut self.window)?;
        self.segment = position.segment;
        self.start = position.offset;
        self.end = position.offset + len;
        Ok(())
    }
}

/// Whether a record leads to places of this cache only.
fn is_inside(media: &Media, segments: &Segments, record: &Record<'_>) -> bool {
    match record {
        Record::Last(next) => *next < segments.count(),
        Record::Keys(keys) => {
            keys.iter().all(|key| check_key(media, segments, u64::MAX, key).is_ok())
        }
    }
}

/// The position after a record that stands at `position`.
pub fn after(position: Position, record: &Record<'_>) -> Position {
    match record {
        Record::Last(next) => Position { segment: *next, offset: 0 },
        Record::Keys(keys) => {
            Position { offset: position.offset + kset_bytes(keys.len()) as u32, ..position }
        }
    }
}
