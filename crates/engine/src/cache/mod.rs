//! The target `cache`: a block cache on a fast disk, with its mapping on a metadata device.
//!
//! | file | what |
//! |---|---|
//! | `args`, `plan`, `facts` | the table line's words, and their meaning; facts of a cache |
//! | `metadata` | the metadata device: every byte of it, reading, transactions, checks |
//! | `policy` | which blocks the cache has: pure decisions |
//! | `open`, `coming` | opening a cache; one that will take over from another |
//! | `packed`, `index`, `slots`, `traffic` | where blocks are, what slots have, what is under way |
//! | `parts`, `ranges`, `numbers` | which sectors of a block are dirty; sets of sectors; a hash |
//! | `blocks` | all of that under one lock: whether a request may go on |
//! | `marks` | what a commit changes of that |
//! | `side` | the devices with data, and what of them is not durable |
//! | `request` | the life of a request |
//! | `changes`, `commit` | what memory knows and the medium does not, and how it gets there |
//! | `partial`, `fill` | blocks that are in their slots in part, and what brings the rest |
//! | `copy`, `background` | blocks go, and are written back |
//! | `control`, `counts` | status, messages, suspend; counters |
//! | `xml` | metadata as text, as thin-provisioning-tools have it |
//! | `repair` | what can be kept of damaged metadata |
//! | `drain` | brings an origin up to date from a cache at rest |
//! | `binding` | which metadata, cache device and origin belong together |
//! | `view` | a cache that is served to read, and stays as it is |
//! | `inspect`, `wipe` | what `inspect` reports of a metadata device; taking a cache apart |
//! | `mutants` | deliberate bugs, in tests alone |
//! | `schedules` | tests of it under a scheduler |
//!
//! The medium always says that it was shut down cleanly: its dirty bits are right at any moment,
//! because one is durable before its slot is written to, and goes after the slot's data is durable
//! on the origin. So after a crash only what was dirty is dirty, for the kernel, too.
//!
//! Locks, outermost first: background; commit; blocks; the rest. None is held during I/O.

pub mod args;
mod background;
pub mod binding;
mod blocks;
mod changes;
mod coming;
mod commit;
mod control;
mod copy;
mod counts;
pub mod drain;
mod facts;
mod fill;
mod index;
pub mod inspect;
mod keys;
mod marks;
pub mod metadata;
mod mutants;
mod numbers;
mod open;
mod packed;
mod partial;
mod parts;
mod plan;
pub mod policy;
mod ranges;
pub mod repair;
mod request;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
mod side;
mod slots;
mod traffic;
mod view;
pub mod wipe;
pub mod xml;

use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::Result;
use crate::per_port::PerPort;
use crate::sync::{Arc, Mutex, MutexGuard, lock};
use crate::target::{Dirty, Events, Fact, Health, OnlyCached, Port, Target, TargetLimits};
use crate::units::Nanos;

pub use args::{Mode, TableArgs, WORDS};
pub use coming::Coming;
pub use facts::limits;
pub use open::OpenOptions;
pub use view::View;

use background::Background;
use blocks::Blocks;
use commit::Commits;
use control::Orders;
use counts::Counts;
use plan::Plan;
use side::Side;

/// The kind of an I/O, in the high byte of its token; below it, 24 bits for the kind's own use,
/// then the place of its job.
const TOKEN_KIND: u64 = 0xFF << 56;
const TOKEN_REQUEST: u64 = 1 << 56;
const TOKEN_FLUSH: u64 = 2 << 56;
const TOKEN_COMMIT: u64 = 3 << 56;
const TOKEN_COPY: u64 = 4 << 56;
const TOKEN_CLEANED: u64 = 5 << 56;
const TOKEN_FILL: u64 = 6 << 56;
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
    cache: Side,
    origin: Side,
    blocks: Mutex<Blocks>,
    commits: Commits,
    jobs: Jobs,
    background: Background,
    orders: Orders,
    events: Arc<Events>,
    counts: Counts,
}

impl Cache {
    #[inline]
    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        lock(&self.blocks)
    }
}

/// What clients should know of a cache on these devices.
fn limits_of(cache: &dyn Disk, origin: &dyn Disk) -> TargetLimits {
    let bytes = |disk: &dyn Disk| disk.limits().block_bytes;
    TargetLimits { block_bytes: bytes(cache).max(bytes(origin)), has_discard: true }
}

impl Target for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        match bio.op {
            Op::Flush => self.flush(bio, port),
            _ => self.serve(bio, port),
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        match io.token & TOKEN_KIND {
            TOKEN_REQUEST => self.complete_request(io, port),
            TOKEN_FLUSH => self.complete_flush(io, port),
            TOKEN_COMMIT => self.complete_commit(io, port),
            TOKEN_FILL => self.complete_fill(io, port),
            TOKEN_COPY | TOKEN_CLEANED => self.background_is_back(io, port),
            kind => panic!("no I/O of ours has token kind {kind:#x}"),
        }
    }

    fn parked_for(&self, bio: &Bio) -> &'static str {
        match request::commit_of(bio) {
            0 => "a commit, or a block that moves",
            _ => "a commit",
        }
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
        Dirty {
            bytes: u64::from(blocks.slots.dirty_count()) * self.plan.block_bytes,
            is_failing: is_failing || blocks.trouble.has_lost,
        }
    }

    fn only_cached(&self) -> Option<OnlyCached> {
        Some(self.dirty_ranges())
    }

    fn set_draining(&self, draining: bool) {
        self.order_drain(draining);
    }

    fn suspend(&self) -> Result<()> {
        self.begin_suspend();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.is_at_rest()
    }

    fn hand_over(&self) -> Result<()> {
        self.leave_media()
    }

    fn resume(&self) -> Result<()> {
        self.take_media_back()?;
        self.end_suspend();
        Ok(())
    }
}
