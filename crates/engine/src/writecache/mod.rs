//! The writecache target: a write-back cache that admits writes only, on the media of Linux's
//! dm-writecache, over persistent memory (mode `p`) or a disk (mode `s`).
//!
//! A write takes a free slot, puts its data there, and only then becomes the newest version of its
//! block. What was written since the last commit is known in memory only (which outlives the
//! process); a commit writes the entries of all of it, and then the commit counter, one atomic
//! store. Mode `s` overwrites blocks that are committed already where they are: nothing but a flush
//! is due then. Write-back takes the oldest blocks with their neighbours to the origin, and frees
//! their slots.
//!
//! | file | what happens there |
//! |---|---|
//! | `args`, `facts` | the table line's words; what is told beyond the status |
//! | `layout`, `label`, `media`, `walk` | every on-media byte; access while nobody is served |
//! | `format`, `inspect`, `attach` | making a cache, looking at one, opening one |
//! | `index`, `word`, `pool` | which slot has which block; free slots |
//! | `openlist`, `memory` | what is not committed yet, also after the death of the server |
//! | `write`, `overwrite`, `read`, `zero` | the life of a request |
//! | `commit`, `round` | batches become durable, entries are marked free |
//! | `writeback` | the life of data afterwards |
//! | `control` | the background, status, messages |
//!
//! Locks, outermost first: background; commit; stripes, one at a time; marks; the rest. None is
//! held while data is copied or while the world is waited for, except commit in mode `p`, whose
//! stores are made under it.

pub mod args;
mod attach;
mod commit;
pub mod contents;
mod control;
mod extent;
mod facts;
pub mod format;
pub mod index;
pub mod inspect;
mod label;
pub mod layout;
pub mod media;
mod memory;
mod openlist;
mod overwrite;
mod pool;
mod read;
mod round;
pub mod salvage;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
pub mod walk;
mod word;
mod write;
mod writeback;
mod zero;

use std::collections::HashMap;

use crate::alarm::Alarm;
use crate::attaching::AttachProgress;
use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskErrors, DiskIo};
use crate::error::{Result, Status};
use crate::mutants::{self, Mutant};
use crate::per_port::PerPort;
use crate::room::Room;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::target::{Dirty, Events, Extent, Fact, Health, Port, Target, TargetLimits};
use crate::units::Nanos;

pub use args::{Mode, TableArgs, WORDS};
use commit::{Commit, Marks};
pub use facts::limits;
use index::Index;
use layout::{Entry, Geometry, Label};
use media::Medium;
use openlist::{Filled, OpenLists};
use pool::Pool;
use writeback::Writeback;

/// The kind of an I/O, in the high byte of its token; below it, 24 bits that are its own, then
/// the place of its job.
const TOKEN_KIND: u64 = 0xFF << 56;
const TOKEN_READ: u64 = 1 << 56;
const TOKEN_WRITE: u64 = 2 << 56;
const TOKEN_ZERO: u64 = 3 << 56;
const TOKEN_FLUSH: u64 = 4 << 56;
const TOKEN_COMMIT: u64 = 5 << 56;
const TOKEN_WB_READ: u64 = 6 << 56;
const TOKEN_WB_WRITE: u64 = 7 << 56;
const TOKEN_WB_FLUSH: u64 = 8 << 56;
const OWN_SHIFT: u32 = 32;

/// The largest origin.
pub const ORIGIN_BYTES_MAX: u64 = 64 << 40;
/// Stripes of a cache.
pub const STRIPES: usize = 8;

/// How a cache is opened; what the table line does not say.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Format the device even if it may hold something else.
    pub force_format: bool,
    /// A fresh random number: names this attach.
    pub attach_id: u64,
    /// Stripes, 1 to 16.
    pub stripes: usize,
    /// Threads that may share the reading of a large cache.
    pub threads: usize,
    /// Is told how far it is.
    pub progress: Arc<AttachProgress>,
}

impl OpenOptions {
    /// Eight stripes, no force, one thread.
    pub fn new(attach_id: u64) -> OpenOptions {
        OpenOptions {
            force_format: false,
            attach_id,
            stripes: STRIPES,
            threads: 1,
            progress: Arc::default(),
        }
    }
}

/// Words of shared memory that a cache needs to survive the death of its server.
pub fn shared_words(stripes: usize) -> usize {
    shared_words_for(stripes, openlist::LIST_MAX)
}

/// The same for a cache with at most `list_max` uncommitted blocks of a stripe: for tests, which
/// copy them all the time.
pub fn shared_words_for(stripes: usize, list_max: usize) -> usize {
    openlist::words_needed(stripes, list_max)
}

/// The kernel's statistics, of one stripe. Changed under its lock.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stats {
    reads: AtomicU64,
    read_hits: AtomicU64,
    writes: AtomicU64,
    hits_uncommitted: AtomicU64,
    hits_committed: AtomicU64,
    around: AtomicU64,
    allocated: AtomicU64,
}

/// Adds without an atomic addition: the stripe's lock is held.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

#[derive(Debug, Default)]
struct Counters {
    flushes: AtomicU64,
    discards: AtomicU64,
    commits: AtomicU64,
    metadata_writes: AtomicU64,
    batches: AtomicU64,
    overwrites: AtomicU64,
    written_back_bytes: AtomicU64,
    writeback_failures: AtomicU64,
    failed_requests: AtomicU64,
}

/// What the background remembers.
#[derive(Debug, Default)]
struct Background {
    now: Nanos,
    /// When the medium is looked at next.
    look_at: Nanos,
    /// When the open batch is committed at the latest.
    commit_at: Option<Nanos>,
    writeback: Writeback,
    /// Since then; `None` also when that began before the attach.
    torn_since: Option<Nanos>,
}

/// Requests that wait for disks.
#[derive(Debug, Default)]
struct Jobs {
    reads: PerPort<read::ReadJob>,
    writes: PerPort<write::Stage>,
    zeroes: PerPort<zero::ZeroJob>,
    flushes: PerPort<commit::FlushJob>,
}

/// An open cache.
#[derive(Debug)]
pub struct Writecache {
    args: TableArgs,
    medium: Medium,
    origin: Arc<dyn Disk>,
    geometry: Geometry,
    /// Whether committed blocks are overwritten where they are.
    overwrites: bool,
    label: Label,
    index: Index,
    pool: Pool,
    open: OpenLists,
    /// Which of its two lists each stripe fills. Changes under the stripe's lock.
    filling: Box<[AtomicU32]>,
    /// What the lists that are being filled have together.
    filled: Filled,
    /// Mode `s`, for each list of each stripe: whether it has blocks that need entries. Changes
    /// under the stripe's lock.
    has_fresh: Box<[AtomicBool]>,
    /// Room promised in the list that is being filled; under the stripe's lock.
    promised: Box<[AtomicU32]>,
    /// Number of the batch that is open.
    batch: AtomicU64,
    commit: Mutex<Commit>,
    marks: Mutex<Marks>,
    /// How many slots wait there, and in `commit`.
    marks_count: AtomicUsize,
    superseded_count: AtomicUsize,
    /// Rounds of commit: begun, ended, and needed until all that was dropped is marked so.
    begun: AtomicU64,
    ended: AtomicU64,
    marked_by: AtomicU64,
    /// Entries that must stay as they are.
    aside: HashMap<u32, Entry>,
    damage: Vec<String>,
    /// Writes to the origin that passed by: done, and known to be durable.
    bypassed: AtomicU64,
    bypasses_flushed: AtomicU64,
    /// For a suspend: the origin is being flushed; it refused.
    is_flushing_origin: AtomicBool,
    is_origin_flush_refused: AtomicBool,
    /// Flushes of the origin, not of write-back, that failed: what was written may be lost.
    origin_flush_failures: AtomicU64,
    jobs: Jobs,
    /// Ranges of blocks that discards are zeroing.
    zeroing: Mutex<Vec<(u64, u64)>>,
    background: Mutex<Background>,
    stats: Box<[Stats]>,
    counters: Counters,
    events: Arc<Events>,
    watermarks: (u64, u64),
    epoch: AtomicU64,
    is_cleaner: AtomicBool,
    is_draining: AtomicBool,
    /// The message `flush`: write everything back once.
    is_flushing: AtomicBool,
    flushes_on_suspend: AtomicBool,
    is_suspended: AtomicBool,
    room: Room,
    alarm: Alarm,
    /// A write may wait for others that have the promise of a whole list.
    wants_list: AtomicBool,
    /// A discard may wait for blocks that are being written back.
    wants_batch_end: AtomicBool,
    wants_round: AtomicBool,
    /// Mode `s`: the background is to commit.
    is_commit_asked: AtomicBool,
    /// The origin alone is not consistent: it has newer data than some that only the cache has.
    is_torn: AtomicBool,
    /// The cache device refused what must not be refused.
    has_failed: AtomicBool,
    notes: Vec<String>,
}

impl Writecache {
    fn block_bytes(&self) -> u64 {
        u64::from(self.geometry.block_bytes)
    }

    /// The block of the origin at a byte. Blocks have powers of two as sizes, and a shift is much
    /// shorter than a division.
    fn block_at(&self, byte: u64) -> u64 {
        byte >> self.geometry.block_bytes.trailing_zeros()
    }

    fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    /// The cache device refused a commit: what was acknowledged since the last one may be lost. If
    /// it was cut short, no flush is to be doubted: what is left is what it is.
    fn fail(&self) {
        if self.medium.failure().is_none() {
            self.open.note_failure();
        }
        self.stop();
    }

    /// The cache device is not to be trusted any more.
    fn stop(&self) {
        self.has_failed.store(true, Ordering::SeqCst);
        self.events.room();
    }

    /// Nobody serves the cache any more, and all that was acknowledged is committed; else nothing
    /// is said, and the next server takes it up.
    fn end(&self) {
        let is_all_committed = !self.has_open() && !self.has_failed() && !self.owes_flush();
        if is_all_committed
            && self.label.is_served()
            && memory::say_at_rest(&self.medium, &self.geometry, &self.label).is_ok()
        {
            self.open.end();
        }
    }

    /// Whether the origin alone is what a power cut could have left of a device without cache.
    pub fn is_origin_consistent(&self) -> bool {
        !self.is_torn.load(Ordering::SeqCst)
    }

    /// Something is about to go to the origin. Before others that only the cache has?
    fn tear(&self) {
        if self.index.dirty() > 0 && !mutants::is(Mutant::PassedUnsaid) {
            self.is_torn.store(true, Ordering::SeqCst);
        }
    }

    /// Nothing was dirty: the origin alone was consistent. It is not to be said of an origin that
    /// somebody has torn since, in front of something that has become dirty since.
    fn mend(&self, background: &mut Background) {
        background.torn_since = None;
        self.is_torn.store(false, Ordering::SeqCst);
        if self.index.dirty() > 0 {
            self.is_torn.store(true, Ordering::SeqCst);
        }
    }

    fn is_aligned(&self, bio: &Bio) -> bool {
        (bio.offset | bio.len) & (self.block_bytes() - 1) == 0
    }

    /// Something waits for the background: make sure that it will look.
    fn arm(&self) {
        self.alarm.arm(false);
    }

    /// No slot is free: the bio waits, the background makes room.
    fn wait_for_room(&self, bio: Bio, port: &mut Port) {
        if self.has_failed() {
            return port.finish(bio, Err(Status::Io));
        }
        self.room.wait(bio, port);
    }

    fn origin_io(&self, op: Op, offset: u64, len: u64, buffer: Buffer, token: u64) -> DiskIo {
        DiskIo { len, buffer, ..DiskIo::bare(&self.origin, op, offset, 0, token) }
    }
}

impl Target for Writecache {
    fn name(&self) -> &'static str {
        "writecache"
    }

    fn submit(&self, mut bio: Bio, port: &mut Port) {
        if let Some((round, goes_on)) = commit::waits_for(&mut bio) {
            if !self.is_past(round) {
                return self.wait_for_round(bio, round, goes_on, port);
            }
            return self.go_on(bio, goes_on, port);
        }
        if bio.op != Op::Read && self.has_failed() {
            return port.finish(bio, Err(Status::Io));
        }
        if bio.op != Op::Flush && !self.is_aligned(&bio) {
            return port.finish(bio, Err(Status::Invalid));
        }
        match bio.op {
            Op::Read => self.read(bio, port),
            Op::Write => self.write(bio, port),
            Op::Flush => self.flush(bio, port),
            Op::Discard | Op::WriteZeroes => self.zero(bio, port),
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        match io.token & TOKEN_KIND {
            TOKEN_READ => self.complete_read(io, port),
            TOKEN_WRITE => self.complete_stage(io, port),
            TOKEN_ZERO => self.complete_zero(io, port),
            TOKEN_FLUSH => self.complete_flush(io, port),
            TOKEN_COMMIT => self.complete_commit(io, port),
            TOKEN_WB_READ => self.complete_wb_read(&mut lock(&self.background), io, port),
            TOKEN_WB_WRITE => self.complete_wb_write(&mut lock(&self.background), io, port),
            TOKEN_WB_FLUSH => self.complete_wb_flush(&mut lock(&self.background), io, port),
            kind => panic!("no I/O of ours has token kind {kind:#x}"),
        }
    }

    fn parked_for(&self, bio: &Bio) -> &'static str {
        match bio.op {
            _ if commit::is_waiting(bio) => "a round of commit",
            Op::Discard | Op::WriteZeroes => "the end of write-back in its range",
            _ => "a free block of the cache",
        }
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let mut background = lock(&self.background);
        background.now = now;
        self.work(&mut background, port)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits {
            block_bytes: self.geometry.block_bytes,
            has_discard: self.origin.limits().has_discard,
        }
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.extent_at(offset, len)
    }

    fn health(&self) -> Health {
        let failure = self.medium.failure();
        let has_failed = self.has_failed().then(|| "it refused a write or a flush".to_owned());
        let medium = match &self.medium {
            Medium::Disk(disk) => disk.errors(),
            Medium::Pmem(_) => DiskErrors::default(),
        };
        Health {
            origin: self.origin.errors(),
            medium,
            is_failing: lock(&self.background).writeback.retry().is_failing(),
            failed_batches: self.counters.writeback_failures.load(Ordering::Relaxed),
            medium_failure: failure.map(|failure| failure.to_string()).or(has_failed),
            waited: self.room.waited.load(Ordering::Relaxed),
        }
    }

    fn status(&self) -> String {
        self.status_line()
    }

    fn table(&self) -> String {
        self.table_words()
    }

    fn facts(&self) -> Vec<Fact> {
        self.all_facts()
    }

    fn message(&self, words: &[String]) -> Result<String> {
        self.take_message(words)
    }

    fn is_carrying_out(&self) -> bool {
        self.is_flushing.load(Ordering::SeqCst) && !self.has_failed()
    }

    fn dirty(&self) -> Dirty {
        Dirty {
            bytes: u64::from(self.index.dirty()) * self.block_bytes(),
            is_failing: lock(&self.background).writeback.retry().is_failing() || self.has_failed(),
        }
    }

    fn set_draining(&self, draining: bool) {
        self.is_draining.store(draining, Ordering::SeqCst);
        self.events.work();
    }

    fn suspend(&self) -> Result<()> {
        self.begin_suspend()
    }

    fn is_idle(&self) -> bool {
        self.is_at_rest()
    }

    fn detach(&self) {
        self.end();
    }

    fn resume(&self) -> Result<()> {
        self.is_suspended.store(false, Ordering::SeqCst);
        self.events.work();
        Ok(())
    }
}
