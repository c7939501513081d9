//! The writecache target: a write-back cache that admits writes only, on the media of Linux's
//! dm-writecache, over persistent memory (mode `p`) or a disk (mode `s`).
//!
//! A write takes a free slot, stores its data in it, and only then becomes the newest version of
//! its block. Blocks written since the last commit are recorded in shared memory only (which
//! outlives the process); a commit writes the entries of all of them, and then the commit counter,
//! one atomic store. Mode `s` overwrites committed blocks in their place: then only a flush is
//! needed. Write-back copies the oldest blocks with their neighbours to the origin, and frees their
//! slots.
//!
//! | file | job |
//! |---|---|
//! | `args`, `plan`, `facts` | the table line's words, and their meaning; facts of a cache |
//! | `layout`, `label`, `media`, `walk` | every on-media byte; access before requests are served |
//! | `format`, `inspect`, `wipe` | making a cache, inspecting one, taking one off its device |
//! | `open`, `attach/`, `memory` | opening one, with the writes that the last server left |
//! | `device`, `origin` | the two devices while requests are served |
//! | `index`, `regions`, `word`, `pool` | which slot has which block; free slots |
//! | `openlist`, `lists` | blocks that are not committed yet, also after the death of the server |
//! | `write`, `overwrite`, `read`, `zero` | the life of a request |
//! | `commit` | the bios that wait until complete writes are durable |
//! | `round/`, `marks` | making batches durable; marking entries free |
//! | `writeback`, `drain` | writing dirty blocks back; drains |
//! | `background` | the order of the background's work |
//! | `control`, `counts` | status, messages, suspend; counters |
//! | `mutants` | deliberate bugs, in tests alone |
//!
//! Only the file of a type changes the type's fields.
//!
//! Locks, outermost first: background; commit; stripes, one at a time; marks; the rest. None is
//! held while data is copied or during I/O, except commit in mode `p`, whose stores are made under
//! it.

pub mod args;
mod attach;
mod background;
mod commit;
pub mod contents;
mod control;
mod counts;
mod device;
mod drain;
mod extent;
mod facts;
pub mod format;
pub mod index;
pub mod inspect;
mod label;
pub mod layout;
mod lists;
mod marks;
pub mod media;
mod memory;
mod mutants;
mod open;
mod openlist;
mod origin;
mod overwrite;
mod plan;
mod pool;
mod read;
pub mod recovery;
mod regions;
mod round;
mod rounds;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
pub mod walk;
pub mod wipe;
mod word;
mod write;
mod writeback;
mod zero;

use crate::base::attaching::AttachProgress;
use crate::bio::{Bio, Op};
use crate::common::per_port::PerPort;
use crate::common::room::Room;
use crate::disk::{Disk, DiskIo};
use crate::error::{Result, Status};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::target::{
    Dirty, Events, Extent, Fact, Health, OnlyCached, Port, Target, TargetLimits, Waiting,
    refused_push,
};
use crate::units::Nanos;

pub use args::{Mode, TableArgs, WORDS};
pub use facts::limits;

use background::Background;
use commit::Commits;
use control::Orders;
use counts::Counts;
use device::CacheDevice;
use index::Index;
use lists::Lists;
use marks::Marks;
use origin::Origin;
use plan::Plan;
use pool::Pool;
use rounds::Rounds;

/// The kind of an I/O, in the high byte of its token; below it, 24 bits for the kind's own use,
/// then the index of its job.
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

/// Options for opening a cache that are not in the table line.
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
    /// Receives the progress of the attach.
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
/// copy the words often.
pub fn shared_words_for(stripes: usize, list_max: usize) -> usize {
    openlist::words_needed(stripes, list_max)
}

/// Requests that wait for disks.
#[derive(Debug)]
struct Jobs {
    reads: PerPort<read::ReadJob>,
    writes: PerPort<write::Stage>,
    zeroes: PerPort<zero::ZeroJob>,
    flushes: PerPort<commit::FlushJob>,
    zeroing: zero::Zeroing,
}

impl Jobs {
    fn new(events: &Arc<Events>) -> Jobs {
        Jobs {
            reads: PerPort::default(),
            writes: PerPort::default(),
            zeroes: PerPort::default(),
            flushes: PerPort::default(),
            zeroing: zero::Zeroing::new(events),
        }
    }
}

/// An open cache.
#[derive(Debug)]
pub struct Writecache {
    plan: Plan,
    device: CacheDevice,
    origin: Origin,
    index: Index,
    pool: Pool,
    lists: Lists,
    rounds: Rounds,
    commits: Commits,
    marks: Marks,
    jobs: Jobs,
    background: Background,
    orders: Orders,
    room: Room,
    events: Arc<Events>,
    counts: Counts,
}

impl Writecache {
    fn block_bytes(&self) -> u64 {
        u64::from(self.device.geometry.block_bytes)
    }

    /// The block of the origin that holds a byte. Block sizes are powers of two, and a shift is
    /// much faster than a division.
    fn block_at(&self, byte: u64) -> u64 {
        byte >> self.device.geometry.block_bytes.trailing_zeros()
    }

    fn is_aligned(&self, bio: &Bio) -> bool {
        (bio.offset | bio.len) & (self.block_bytes() - 1) == 0
    }

    /// Whether the origin alone is in a state that a power failure could have left on a device
    /// without a cache.
    pub fn is_origin_consistent(&self) -> bool {
        !self.origin.is_torn()
    }

    /// No slot is free: the bio waits, the background makes room.
    fn wait_for_room(&self, bio: Bio, port: &mut Port) {
        if self.has_failed() {
            return port.finish(bio, Err(Status::Io));
        }
        self.room.wait(bio, port);
    }
}

impl Target for Writecache {
    fn name(&self) -> &'static str {
        "writecache"
    }

    fn losses(&self) -> u64 {
        self.origin.losses()
    }

    fn submit(&self, mut bio: Bio, port: &mut Port) {
        if let Some((round, goes_on)) = commit::take_wait(&mut bio) {
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
        if io.token & TOKEN_KIND >= TOKEN_COMMIT {
            self.counts.ended.fetch_add(1, Ordering::Relaxed);
        } else if io.result.is_ok() && Arc::ptr_eq(&io.disk, self.origin.disk()) {
            self.background.served.note(&self.events);
        }
        match io.token & TOKEN_KIND {
            TOKEN_READ => self.complete_read(io, port),
            TOKEN_WRITE => self.complete_stage(io, port),
            TOKEN_ZERO => self.complete_zero(io, port),
            TOKEN_FLUSH => self.complete_flush(io, port),
            TOKEN_COMMIT => self.complete_commit(io, port),
            TOKEN_WB_READ | TOKEN_WB_WRITE | TOKEN_WB_FLUSH => self.writeback_is_back(io, port),
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

    fn role_of(&self, disk: &Arc<dyn Disk>) -> &'static str {
        let is_origin = Arc::ptr_eq(disk, self.origin.disk());
        if is_origin { "the origin" } else { "the cache device" }
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.take_tick(now, port)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        let origin = self.origin.disk().limits().of_target();
        origin.in_blocks_of(self.device.geometry.block_bytes)
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.extent_at(offset, len)
    }

    fn health(&self) -> Health {
        Health {
            origin: self.origin.disk().errors(),
            paced_by: refused_push(&**self.origin.disk()),
            medium: self.device.errors(),
            is_failing: self.background.is_failing(),
            failed_batches: self.counts.writeback_failures.load(Ordering::Relaxed),
            medium_failure: self.cache_failure(),
            waited: self.room.waited.load(Ordering::Relaxed),
            ..Health::default()
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
        self.orders.is_flushing()
    }

    fn dirty(&self) -> Dirty {
        Dirty {
            bytes: u64::from(self.index.dirty()) * self.block_bytes(),
            is_failing: self.background.is_failing(),
        }
    }

    fn only_cached(&self) -> Option<OnlyCached> {
        let dirty = (0..self.index.slots()).filter_map(|slot| self.index.dirty_block(slot));
        let ranges = dirty.map(|block| (block * self.block_bytes(), self.block_bytes()));
        Some(OnlyCached::of(ranges.collect(), true))
    }

    fn set_draining(&self, draining: bool) {
        self.order_drain(draining);
    }

    fn waits_for(&self) -> Option<Waiting> {
        self.awaited_device()
    }

    fn left_to_drain(&self) -> u64 {
        self.bytes_to_drain()
    }

    fn suspend(&self) -> Result<()> {
        self.begin_suspend()
    }

    fn is_idle(&self) -> bool {
        self.is_at_rest()
    }

    fn is_durable(&self) -> bool {
        self.is_all_durable()
    }

    fn detach(&self) {
        let is_marked = self.end();
        self.background.is_unmarked.store(!is_marked, Ordering::SeqCst);
    }

    fn is_origin_marked(&self) -> bool {
        !self.background.is_unmarked.load(Ordering::SeqCst)
    }

    fn resume(&self) -> Result<()> {
        self.end_suspend();
        Ok(())
    }
}
