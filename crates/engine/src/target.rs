//! The contract between engines and their drivers.
//!
//! An engine is a state machine that many threads may call at the same time. What it wants from the
//! world it puts into the [`Port`] handed to it: finished bios, I/O for disks, bios that must wait.
//! The driver (a queue thread, an in-process caller, the simulator) carries that out and calls
//! back.
//!
//! Contract, asserted by `device.rs` on both sides of every call:
//! 1. Each submitted bio comes out exactly once, in `port.done` or in `port.parked`. A parked bio
//!    is submitted again, unchanged, when [`Events::room`] has been signalled, in the order parked.
//! 2. `submit` and `complete` never block except on short locks, and never call the world.
//! 3. I/O emitted into a port completes through the same port's `complete`.

use std::collections::VecDeque;

use crate::bio::Bio;
use crate::buffer::BufferPool;
use crate::disk::{Disk, DiskErrors, DiskIo, troubles};
use crate::error::{Result, Status};
use crate::foreign::Source;
use crate::pmem::sink::Sink;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::units::Nanos;

pub use crate::disk::Extent;

/// One thread's connection to the targets: what they ask it to do.
#[derive(Debug, Default)]
pub struct Port {
    /// Finished bios, with their status.
    pub done: VecDeque<Bio>,
    /// I/O to start.
    pub ios: VecDeque<DiskIo>,
    /// Bios that wait for room or for resume.
    pub parked: VecDeque<Bio>,
    /// Memory for private copies.
    pub pool: BufferPool,
    /// Which thread this is, as a small number: engines spread their data heads by it.
    pub id: usize,
}

impl Port {
    /// A port for thread number `id`.
    pub fn new(id: usize) -> Port {
        Port { id, ..Port::default() }
    }

    /// Ends `bio` with `status`.
    #[inline]
    pub fn finish(&mut self, mut bio: Bio, status: std::result::Result<(), Status>) {
        bio.status = status;
        self.done.push_back(bio);
    }
}

/// A thread that sleeps until there is something to do. Implemented by queues.
pub trait Wake: Send + Sync {
    /// Makes the sleeper look again. Cheap when it is awake.
    fn wake(&self);
}

/// How a target wakes sleeping queues when something changed.
#[derive(Default)]
pub struct Events {
    room_epoch: AtomicU64,
    listeners: Mutex<Vec<Arc<dyn Wake>>>,
    background: Mutex<Option<Arc<dyn Wake>>>,
}

impl Events {
    /// Adds a queue to wake when there is room.
    pub fn listen(&self, wake: Arc<dyn Wake>) {
        lock(&self.listeners).push(wake);
    }

    /// Removes a queue again.
    pub fn forget(&self, wake: &Arc<dyn Wake>) {
        lock(&self.listeners).retain(|other| !Arc::ptr_eq(other, wake));
    }

    /// Sets the queue that runs `tick`.
    pub fn set_background(&self, wake: Option<Arc<dyn Wake>>) {
        *lock(&self.background) = wake;
    }

    /// Signals that parked bios may be tried again.
    pub fn room(&self) {
        self.room_epoch.fetch_add(1, Ordering::SeqCst);
        for listener in lock(&self.listeners).iter() {
            listener.wake();
        }
    }

    /// Counts calls of `room`: a queue with parked bios retries them when this has changed.
    pub fn room_epoch(&self) -> u64 {
        self.room_epoch.load(Ordering::SeqCst)
    }

    /// Wakes the background, which should tick now rather than at its next deadline.
    pub fn work(&self) {
        if let Some(background) = lock(&self.background).as_ref() {
            background.wake();
        }
    }
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Events(room epoch {})", self.room_epoch())
    }
}

/// What clients should know of a target: block sizes and which requests are worth sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetLimits {
    /// Smallest unit of a request, in bytes: 512 or the disk's logical block.
    pub block_bytes: u32,
    /// Whether discards are worth sending.
    pub has_discard: bool,
}

/// Parts of a line for which the cache device may have newer data than the origin: what is lost
/// with that device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnlyCached {
    /// First byte on the line and length, in order.
    pub ranges: Vec<(u64, u64)>,
    /// Whether all of them have; else some may have been written back.
    pub is_exact: bool,
}

impl OnlyCached {
    /// The most ranges: those that lie nearest to each other are joined.
    pub const RANGES_MAX: usize = 8192;

    /// Of blocks or ranges in any order, which may overlap.
    pub fn of(mut found: Vec<(u64, u64)>, is_exact: bool) -> OnlyCached {
        found.sort_unstable();
        let mut all = OnlyCached { ranges: joined(found, 0), is_exact };
        let mut gap = 4096;
        while all.ranges.len() > OnlyCached::RANGES_MAX {
            all = OnlyCached { ranges: joined(all.ranges, gap), is_exact: false };
            gap *= 2;
        }
        all
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(_, len)| len).sum()
    }
}

/// The same ranges; those with no more than `gap` bytes between them are one.
fn joined(ranges: Vec<(u64, u64)>, gap: u64) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (at, len) in ranges {
        match joined.last_mut() {
            Some(last) if at <= last.0 + last.1 + gap => last.1 = last.1.max(at + len - last.0),
            _ => joined.push((at, len)),
        }
    }
    joined
}

/// A named number of a target, for `status --all`, `info --json` and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fact {
    /// Snake-case name with its unit last: `dirty_bytes`.
    pub name: &'static str,
    /// The value, as JSON would carry it.
    pub value: FactValue,
    /// What it means, in one sentence.
    pub about: &'static str,
}

/// The value of a [`Fact`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FactValue {
    /// A number.
    Number(u64),
    /// Yes or no.
    Flag(bool),
    /// Words.
    Text(String),
    /// There is none yet.
    Nothing,
}

pub(crate) fn number(name: &'static str, value: u64, about: &'static str) -> Fact {
    Fact { name, value: FactValue::Number(value), about }
}

pub(crate) fn flag(name: &'static str, value: bool, about: &'static str) -> Fact {
    Fact { name, value: FactValue::Flag(value), about }
}

pub(crate) fn text(name: &'static str, value: &str, about: &'static str) -> Fact {
    Fact { name, value: FactValue::Text(value.to_owned()), about }
}

pub(crate) fn count(name: &'static str, counter: &AtomicU64, about: &'static str) -> Fact {
    number(name, counter.load(Ordering::Relaxed), about)
}

/// What happened to a slow device besides failing I/O; `role` is what the target calls it.
pub(crate) fn origin_facts(origin: &dyn Disk, role: &str) -> Vec<Fact> {
    let found = troubles(origin, role);
    let about = "the slow device has no name any more: its data ends with this server";
    let mut facts = vec![flag("origin_is_deleted", found.is_deleted, about)];
    let errors = origin.errors();
    facts.push(number("origin_errors_total", errors.count, "I/O of the slow device that failed"));
    let last = errors.last.map(|_| errors.to_string());
    facts.extend(last.map(|last| text("origin_last_error", &last, "the last of these")));
    let about = "what the slow device lost";
    facts.extend(found.lost.map(|lost| text("origin_failure", &lost, about)));
    let about = "what has become of the slow device's name";
    facts.extend(found.gone.map(|gone| text("origin_absence", &gone, about)));
    facts.extend(pacing_facts(origin));
    facts
}

/// How the write-out of a slow device is doing, if it is paced.
pub(crate) fn pacing_facts(origin: &dyn Disk) -> Vec<Fact> {
    let Some(pacing) = origin.pacing() else { return Vec::new() };
    vec![
        number("paced_window_bytes", pacing.window_bytes, "most that may be in the next two"),
        number("paced_dirty_bytes", pacing.dirty_bytes, "dirty in the page cache, by io=lazy"),
        number("paced_write_out_bytes", pacing.write_out_bytes, "on their way to the device"),
        number("paced_waited_total", pacing.waited, "writes that have waited for room in it"),
        number("paced_skipped_total", pacing.skipped, "batches that were clean already"),
        number("paced_again_total", pacing.again, "batches that had to be written out twice"),
        number("paced_failed_total", pacing.failed, "batches that failed; flushes report it"),
        text("paced_by", pacing.way, "how pages get to the device"),
    ]
}

/// How pages of a lazy slow device get there, once it is known that the kernel does not push them.
pub(crate) fn refused_push(origin: &dyn Disk) -> Option<&'static str> {
    origin.pacing().filter(|pacing| pacing.is_push_refused).map(|pacing| pacing.way)
}

/// What a server logs when it changes. Cheap: it is read every second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// I/O of slow devices that failed.
    pub origin: DiskErrors,
    /// I/O of a cache device that is a disk, and failed.
    pub medium: DiskErrors,
    /// How pages of a lazy slow device get there if the kernel does not push them by itself.
    pub paced_by: Option<&'static str>,
    /// Whether write-back meets errors, and pauses.
    pub is_failing: bool,
    /// Batches of write-back that failed.
    pub failed_batches: u64,
    /// Why the cache device takes no more writes.
    pub medium_failure: Option<String>,
    /// Requests that have waited for room.
    pub waited: u64,
}

/// Data to be written back: what `drain` and `remove --drain` watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dirty {
    /// Bytes that only the cache has.
    pub bytes: u64,
    /// Whether write-back is failing at the moment, and the pauses it makes are growing.
    pub is_failing: bool,
}

/// The code that serves a table line.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// The target's name in table lines.
    fn name(&self) -> &'static str;

    /// Serves `bio`, whose range is relative to the start of the table line.
    fn submit(&self, bio: Bio, port: &mut Port);

    /// Reads the range that begins at `offset` to where others use it too, if that takes no more
    /// than a copy. `port` is the number of the caller's port. False: it takes a bio, and what is
    /// there until then means nothing.
    fn read_into(&self, _offset: u64, _into: Sink<'_>, _port: usize) -> bool {
        false
    }

    /// Writes what others' memory holds to the range that begins at `offset`, if that takes no more
    /// than a copy of it; with `fua`, durably. They may store to it meanwhile: nothing is decided
    /// by one reading and done with another. `port` is the number of the caller's port. False: it
    /// takes a bio, and nothing is done yet, unless the medium fails; or the memory was cut off,
    /// and no bio can be made.
    fn write_from(&self, _offset: u64, _from: Source<'_>, _fua: bool, _port: usize) -> bool {
        false
    }

    /// Takes back an I/O that this target emitted into `port`.
    fn complete(&self, io: DiskIo, port: &mut Port);

    /// What a bio that this target parked is waiting for, in a few words.
    fn parked_for(&self, _bio: &Bio) -> &'static str {
        "room"
    }

    /// Does background work; called by one thread at a time. Returns when to call again at the
    /// latest; `None`: only when [`Events::work`] is signalled.
    fn tick(&self, _now: Nanos, _port: &mut Port) -> Option<Nanos> {
        None
    }

    /// Where this target signals.
    fn events(&self) -> Option<&Arc<Events>> {
        None
    }

    /// What clients should know.
    fn limits(&self) -> TargetLimits;

    /// What `[offset, offset + len)` starts with, and for how many bytes, as far as memory and the
    /// disks know without reading. `len` and the answer are more than 0, and whole sectors within
    /// the target.
    fn extent(&self, _offset: u64, len: u64) -> (u64, Extent) {
        (len, Extent::Data)
    }

    /// Whether writing zeroes is much faster than writing as many bytes of data.
    fn has_fast_zeroes(&self) -> bool {
        false
    }

    /// Whether writes are refused, because a device below may only be read.
    fn is_read_only(&self) -> bool {
        false
    }

    /// The words after the target's name in the status line: the same as the kernel's.
    fn status(&self) -> String;

    /// The words after the target's name in the table line.
    fn table(&self) -> String;

    /// Its state, for a log.
    fn health(&self) -> Health {
        Health::default()
    }

    /// Facts that the kernel's status line has no room for.
    fn facts(&self) -> Vec<Fact> {
        Vec::new()
    }

    /// Carries out a message and answers with text, usually empty.
    fn message(&self, words: &[String]) -> Result<String> {
        let _ = words;
        Err(crate::error::Error::new(
            crate::error::Kind::Invalid,
            format!("Target type does not support messages: {}", self.name()),
        ))
    }

    /// Whether a message that was accepted is still being carried out, so that its sender should
    /// wait.
    fn is_carrying_out(&self) -> bool {
        false
    }

    /// Data that is not on the origin yet.
    fn dirty(&self) -> Dirty {
        Dirty::default()
    }

    /// What is lost with the cache device, as far as that is known without reading it; none of a
    /// target that has no cache. A walk over everything.
    fn only_cached(&self) -> Option<OnlyCached> {
        None
    }

    /// Writes everything back as fast as the origin takes it, until `dirty().bytes` is 0, from
    /// `true` on; back to normal from `false` on.
    fn set_draining(&self, _draining: bool) {}

    /// No bio is in flight and none will come until `resume`: bring the media to rest (close key
    /// sets, stop background work). Background I/O may still be in flight; `is_idle` tells.
    fn suspend(&self) -> Result<()> {
        Ok(())
    }

    /// Whether, after `suspend`, no background I/O is in flight.
    fn is_idle(&self) -> bool {
        true
    }

    /// Another table is about to take effect: everything that its targets need is on the media. An
    /// error keeps it from that. `resume` may come after it, if the other table fails.
    fn hand_over(&self) -> Result<()> {
        Ok(())
    }

    /// The table takes effect: what it replaces has come to rest, and will not go on. What serves
    /// in the place of this target, if it was made before its media could be read.
    fn take_effect(&self) -> Result<Option<Arc<dyn Target>>> {
        Ok(None)
    }

    /// The device ends: nothing is in flight, nothing will come, and the background is idle. The
    /// medium may say that no server uses it and that it holds everything. If that fails, the
    /// medium is left as after the death of the server, and the next server finds what it needs.
    fn detach(&self) {}

    /// Bios will come again after this.
    fn resume(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_never_too_many() {
        let some = OnlyCached::of(vec![(8192, 4096), (0, 4096), (4096, 4096), (20480, 512)], true);
        assert_eq!((some.ranges, some.is_exact), (vec![(0, 12288), (20480, 512)], true));
        let many: Vec<(u64, u64)> = (0..100_000).map(|nth| (nth * 8192, 4096)).collect();
        let all = OnlyCached::of(many.clone(), true);
        assert!(all.ranges.len() <= OnlyCached::RANGES_MAX && !all.is_exact);
        let is_within = |(at, len): &(u64, u64)| {
            all.ranges.iter().any(|range| range.0 <= *at && at + len <= range.0 + range.1)
        };
        assert!(many.iter().step_by(997).all(is_within));
    }
}
