//! The target `cache`: a block cache on a fast disk, with its mapping on a metadata device.
//!
//! | file | what |
//! |---|---|
//! | `args`, `plan`, `facts` | the table line's words, and their meaning; facts of a cache |
//! | `metadata` | the metadata device: every byte of it, reading, transactions, checks |
//! | `policy` | which blocks the cache has: pure decisions |
//! | `open`, `incoming` | opening a cache; a cache that will replace another one |
//! | `bit_array`, `index`, `slots`, `in_flight` | slots of blocks; states of slots; I/O in flight |
//! | `dirty_sectors`, `ranges`, `numbers` | dirty sectors of a block; sets of sectors; a hash |
//! | `blocks` | all of that under one lock: whether a request may go on |
//! | `through` | blocks that the origin also has, and a cache device that fails |
//! | `marks` | the effects of a commit on the blocks |
//! | `data_device` | a device with data, and which of its writes are not durable |
//! | `request` | the life of a request |
//! | `changes`, `commit` | changes in memory, and their way to the medium |
//! | `partial`, `fill` | partially cached blocks, and reading their rest |
//! | `copy`, `background` | writing blocks back, and demoting them |
//! | `aside` | dirty blocks that could not be copied, and the device that refused |
//! | `settle` | the flushes of an orderly end |
//! | `control`, `counts` | status, messages, suspend; counters |
//! | `cut` | metadata that its device has lost |
//! | `xml` | metadata as text, in the format of thin-provisioning-tools |
//! | `repair` | rescuing the readable part of damaged metadata |
//! | `drain` | brings an origin up to date from a cache at rest |
//! | `binding`, `origin` | the devices of a cache; whether the origin is unchanged |
//! | `view` | a cache that is served read-only |
//! | `inspect`, `wipe` | the report on a metadata device; taking a cache off its devices |
//! | `mutants` | deliberate bugs, in tests alone |
//! | `schedules` | tests of it under a scheduler |
//!
//! The medium is always marked as shut down cleanly. Its dirty bits are right at any moment,
//! because a dirty bit is durable before its slot is written to, and is removed after the slot's
//! data is durable on the origin. So after a crash exactly the dirty blocks are dirty, also for the
//! kernel.
//!
//! Locks, outermost first: background; commit; blocks; the rest. None is held during I/O.

pub mod args;
mod aside;
mod background;
pub mod binding;
mod bit_array;
mod blocks;
mod changes;
mod commit;
mod control;
mod copy;
mod counts;
mod cut;
mod data_device;
mod dirty_sectors;
mod doubt;
pub mod drain;
mod facts;
mod fill;
mod in_flight;
mod incoming;
mod index;
pub mod inspect;
mod keys;
mod marks;
pub mod metadata;
mod mutants;
mod numbers;
mod open;
pub mod origin;
mod partial;
mod plan;
pub mod policy;
mod ranges;
pub mod repair;
mod request;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
mod settle;
mod slots;
pub(crate) mod survey;
mod through;
mod view;
mod waits;
pub mod wipe;
pub mod xml;

use crate::bio::{Bio, Op};
use crate::common::per_port::PerPort;
use crate::disk::{Disk, DiskIo};
use crate::error::Result;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::target::{Dirty, Events, Fact, Health, OnlyCached, Port, Target, TargetLimits, Waiting};
use crate::units::Nanos;

pub use args::{Mode, TableArgs, WORDS};
pub use binding::Devices;
pub use facts::limits;
pub use incoming::Incoming;
pub use open::OpenOptions;
pub use view::View;

use background::Background;
use blocks::Blocks;
use commit::Commits;
use control::Orders;
use counts::Counts;
use data_device::DataDevice;
use plan::Plan;

/// The kind of an I/O, in the high byte of its token; below it, 24 bits for the kind's own use,
/// then the place of its job.
const TOKEN_KIND: u64 = 0xFF << 56;
const TOKEN_REQUEST: u64 = 1 << 56;
const TOKEN_FLUSH: u64 = 2 << 56;
const TOKEN_COMMIT: u64 = 3 << 56;
const TOKEN_COPY: u64 = 4 << 56;
const TOKEN_CLEANED: u64 = 5 << 56;
const TOKEN_FILL: u64 = 6 << 56;
const TOKEN_SETTLED: u64 = 7 << 56;
const OWN_SHIFT: u32 = 32;

/// The most slots: the kernel's policy counts up to here.
pub const SLOTS_MAX: u64 = (1 << 28) - 1;

/// Requests that wait for disks.
#[derive(Debug, Default)]
struct Jobs {
    stages: PerPort<request::Stage>,
    flushes: PerPort<request::FlushJob>,
}

/// An open cache.
#[derive(Debug)]
pub struct Cache {
    plan: Plan,
    metadata: Arc<dyn Disk>,
    cache: DataDevice,
    origin: DataDevice,
    blocks: Mutex<Blocks>,
    commits: Commits,
    jobs: Jobs,
    background: Background,
    orders: Orders,
    events: Arc<Events>,
    counts: Counts,
    /// Notes for the user about the findings of the attach.
    notes: Vec<String>,
}

impl Cache {
    #[inline]
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        lock(&self.blocks)
    }
}

/// The limits of a cache on these devices for clients.
fn limits_of(cache: &dyn Disk, origin: &dyn Disk) -> TargetLimits {
    let both = cache.limits().of_target().and(origin.limits().of_target());
    TargetLimits { has_discard: true, ..both }
}

impl Target for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn losses(&self) -> u64 {
        // Where the origin has all data, no client loses any with the cache device.
        let needs_cache = || !self.blocks().trouble.is_untrusted;
        self.origin.losses(|| true) + self.cache.losses(needs_cache)
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        match bio.op {
            Op::Flush => self.flush(bio, port),
            _ => self.serve(bio, port),
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        let is_of_client = matches!(io.token & TOKEN_KIND, TOKEN_REQUEST | TOKEN_FLUSH);
        if is_of_client && io.result.is_ok() && Arc::ptr_eq(&io.disk, self.origin.disk()) {
            self.background.served.note(&self.events);
        }
        match io.token & TOKEN_KIND {
            TOKEN_REQUEST => self.complete_request(io, port),
            TOKEN_FLUSH => self.complete_flush(io, port),
            TOKEN_COMMIT => self.complete_commit(io, port),
            TOKEN_FILL => self.complete_fill(io, port),
            TOKEN_COPY | TOKEN_CLEANED | TOKEN_SETTLED => self.background_is_back(io, port),
            kind => panic!("no I/O of ours has token kind {kind:#x}"),
        }
    }

    fn parked_for(&self, bio: &Bio) -> &'static str {
        match request::commit_of(bio) {
            0 => "a commit, or a block that moves",
            _ => "a commit",
        }
    }

    fn role_of(&self, disk: &Arc<dyn Disk>) -> &'static str {
        self.role_of_disk(disk)
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.take_tick(now, port)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        limits_of(&**self.cache.disk(), &**self.origin.disk())
    }

    fn status(&self) -> String {
        self.status_line()
    }

    fn table(&self) -> String {
        self.table_words()
    }

    fn health(&self) -> Health {
        self.state_of_health()
    }

    fn facts(&self) -> Vec<Fact> {
        self.all_facts()
    }

    fn message(&self, words: &[String]) -> Result<String> {
        self.take_message(words)
    }

    fn dirty(&self) -> Dirty {
        let is_failing = self.background.lock().is_failing();
        let blocks = self.blocks();
        Dirty { bytes: u64::from(blocks.slots.dirty_count()) * self.plan.block_bytes, is_failing }
    }

    fn only_cached(&self) -> Option<OnlyCached> {
        Some(self.dirty_ranges())
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
        self.begin_suspend();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.is_at_rest()
    }

    fn is_durable(&self) -> bool {
        self.is_all_durable()
    }

    fn hand_over(&self) -> Result<()> {
        self.leave_media()
    }

    fn detach(&self) {
        let is_marked = self.end();
        self.background.is_unmarked.store(!is_marked, Ordering::SeqCst);
    }

    fn is_origin_marked(&self) -> bool {
        !self.background.is_unmarked.load(Ordering::SeqCst)
    }

    fn resume(&self) -> Result<()> {
        self.take_media_back()?;
        self.end_suspend();
        Ok(())
    }
}
