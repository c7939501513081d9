//! The contract between engines and their drivers.
//!
//! An engine is a state machine that many threads may call at the same time. It puts its output
//! into the [`Port`] that each call gets: finished bios, I/O for disks, and bios that must wait.
//! The driver (a queue thread, an in-process caller, the simulator) takes this output, does the I/O
//! and calls the engine back.
//!
//! Contract, asserted by `device.rs` on both sides of every call:
//! 1. Each submitted bio comes out exactly once, in `port.done` or in `port.parked`. A parked bio
//!    is submitted again, unchanged, when [`Events::room`] has been signalled, in the order in
//!    which bios were parked.
//! 2. `submit` and `complete` never block except on short locks, and make no system calls.
//! 3. I/O emitted into a port completes through the same port's `complete`.

use std::collections::VecDeque;

use crate::bio::Bio;
use crate::buffer::BufferPool;
use crate::disk::{Disk, DiskErrors, DiskIo, troubles};
use crate::error::{Result, Status};
use crate::pmem::client_memory::Source;
use crate::pmem::copy_target::CopyTarget;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::units::Nanos;

pub use crate::disk::Extent;
pub use crate::topology::TargetLimits;

/// One thread's connection to the targets, with the output of their calls.
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

/// Ranges of a line for which the cache device may have newer data than the origin. If the device
/// is lost, this data is lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnlyCached {
    /// First byte on the line and length, in order.
    pub ranges: Vec<(u64, u64)>,
    /// Whether all of the data in these ranges is newer; else some may have been written back.
    pub is_exact: bool,
}

impl OnlyCached {
    /// The most ranges: beyond this, the ranges nearest to each other are joined.
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

/// The same ranges, where ranges with at most `gap` bytes between them become one.
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
    /// Its meaning, in one sentence.
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

/// Events of a slow device other than failed I/O; `role` is the target's name for the device.
pub(crate) fn origin_facts(origin: &dyn Disk, role: &str) -> Vec<Fact> {
    let found = troubles(origin, role);
    let about = "the slow device was deleted: its data is lost when this server ends";
    let mut facts = vec![flag("origin_is_deleted", found.is_deleted, about)];
    let errors = origin.errors();
    facts.push(number("origin_errors_total", errors.count, "I/O of the slow device that failed"));
    let last = errors.last.map(|_| errors.to_string());
    facts.extend(
        last.map(|last| text("origin_last_error", &last, "the last error of the slow device")),
    );
    let about = "data that the slow device lost";
    facts.extend(found.lost.map(|lost| text("origin_failure", &lost, about)));
    let about = "whether the slow device was deleted, moved or replaced";
    facts.extend(found.gone.map(|gone| text("origin_missing", &gone, about)));
    facts.extend(pacing_facts(origin));
    facts
}

/// How the write-out of a slow device is doing, if it is paced.
pub(crate) fn pacing_facts(origin: &dyn Disk) -> Vec<Fact> {
    let Some(pacing) = origin.pacing() else { return Vec::new() };
    vec![
        number(
            "paced_window_bytes",
            pacing.window_bytes,
            "the most bytes of paced_dirty_bytes and paced_write_out_bytes together",
        ),
        number(
            "paced_dirty_bytes",
            pacing.dirty_bytes,
            "bytes of io=lazy that are dirty in the page cache",
        ),
        number(
            "paced_write_out_bytes",
            pacing.write_out_bytes,
            "bytes of io=lazy that are being written to the device",
        ),
        number("paced_waited_total", pacing.waited, "writes that waited for space in the window"),
        number("paced_skipped_total", pacing.skipped, "write-out batches that were already clean"),
        number("rewrites_total", pacing.again, "write-out batches that were written twice"),
        number(
            "paced_failed_total",
            pacing.failed,
            "write-out batches that failed; flushes report the failure",
        ),
        text("paced_by", pacing.way, "the method that writes pages out"),
    ]
}

/// How pages of a lazy slow device are written out, once udm knows that the kernel does not write
/// them.
pub(crate) fn refused_push(origin: &dyn Disk) -> Option<&'static str> {
    origin.pacing().filter(|pacing| pacing.is_push_refused).map(|pacing| pacing.way)
}

/// State that a server logs when it changes. It must be cheap to get, because the server reads it
/// every second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Health {
    /// I/O of slow devices that failed.
    pub origin: DiskErrors,
    /// I/O of a cache device that is a disk, and failed.
    pub medium: DiskErrors,
    /// I/O of a metadata device that failed.
    pub metadata: DiskErrors,
    /// How pages of a lazy slow device are written out if the kernel does not do it by itself.
    pub paced_by: Option<&'static str>,
    /// Whether write-back meets errors, and pauses.
    pub is_failing: bool,
    /// Batches of write-back that failed.
    pub failed_batches: u64,
    /// Why the cache device takes no more writes.
    pub medium_failure: Option<String>,
    /// Why the metadata device takes no more commits.
    pub metadata_failure: Option<String>,
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

/// The event that the background I/O of a target (write-back, commits) waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The device, in a few words.
    pub device: &'static str,
    /// Background I/O that has ended so far. While this stays the same, the device has not
    /// answered.
    pub ended: u64,
}

/// The code that serves a table line.
pub trait Target: Send + Sync + std::fmt::Debug {
    /// The target's name in table lines.
    fn name(&self) -> &'static str;

    /// Serves `bio`, whose range is relative to the start of the table line.
    fn submit(&self, bio: Bio, port: &mut Port);

    /// Reads the range that begins at `offset` directly into client memory, if that takes no more
    /// than a copy. `port` is the number of the caller's port. False: the caller must submit a bio,
    /// and must ignore the bytes copied so far.
    fn read_into(&self, _offset: u64, _into: CopyTarget<'_>, _port: usize) -> bool {
        false
    }

    /// Writes from client memory to the range that begins at `offset`, if that takes no more than a
    /// copy; with `fua`, durably. The client may store to its memory meanwhile, so no decision may
    /// rest on a second read of it. `port` is the number of the caller's port. False: the caller
    /// must submit a bio. Then no data was written, unless the medium failed, or the client's
    /// memory was cut off and no bio can be made.
    fn write_from(&self, _offset: u64, _from: Source<'_>, _fua: bool, _port: usize) -> bool {
        false
    }

    /// Takes back an I/O that this target emitted into `port`.
    fn complete(&self, io: DiskIo, port: &mut Port);

    /// The event that a bio parked by this target waits for, in a few words.
    fn parked_for(&self, _bio: &Bio) -> &'static str {
        "room"
    }

    /// The part that `disk` has in this target, in a few words.
    fn role_of(&self, _disk: &Arc<dyn Disk>) -> &'static str {
        "a disk"
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

    /// The limits that clients should know.
    fn limits(&self) -> TargetLimits;

    /// The state of the first bytes of `[offset, offset + len)`, and how many bytes have this
    /// state, as far as memory and the disks know without reading. `len` and the answer are more
    /// than 0, and whole sectors within the target.
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

    /// The words after the target's name in the status line, as in the kernel.
    fn status(&self) -> String;

    /// The words after the target's name in the table line.
    fn table(&self) -> String;

    /// Its state, for a log.
    fn health(&self) -> Health {
        Health::default()
    }

    /// Facts that do not fit into the kernel's status line.
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

    /// How often acknowledged writes were lost, or may have been lost, before a flush covered them.
    /// The next flush of any client must fail. This number only rises.
    fn losses(&self) -> u64 {
        0
    }

    /// Data that is not on the origin yet.
    fn dirty(&self) -> Dirty {
        Dirty::default()
    }

    /// The data that would be lost with the cache device, as far as udm knows without reading the
    /// device. `None` for a target without a cache. This walks over all entries.
    fn only_cached(&self) -> Option<OnlyCached> {
        None
    }

    /// `true`: from now on the target writes everything back as fast as the origin takes it,
    /// beginning with the data that is dirty now, which [`Target::left_to_drain`] counts. `false`:
    /// back to normal.
    fn set_draining(&self, _draining: bool) {}

    /// The device that background I/O waits for at the moment, if there is such I/O.
    fn waits_for(&self) -> Option<Waiting> {
        None
    }

    /// The bytes that were dirty at the last call of `set_draining(true)` and that the origin does
    /// not have durably yet, in that version or in a newer one. Later writes of clients do not
    /// count, so this falls to 0 even if clients never stop.
    fn left_to_drain(&self) -> u64 {
        self.dirty().bytes
    }

    /// Brings the media to rest (closes key sets, stops background work). No bio is in flight, and
    /// none arrives until `resume`. Background I/O may still be in flight; see `is_idle`.
    fn suspend(&self) -> Result<()> {
        Ok(())
    }

    /// Whether, after `suspend`, no background I/O is in flight.
    fn is_idle(&self) -> bool {
        true
    }

    /// Whether, after `suspend`, all acknowledged writes are durable: on the cache device, or on
    /// the origin if they bypassed the cache. If not, a device failed a flush.
    fn is_durable(&self) -> bool {
        true
    }

    /// Another table is about to take effect: the target writes all state that the new targets need
    /// to the media. After an error the other table does not take effect. `resume` may follow, if
    /// the other table fails.
    fn hand_over(&self) -> Result<()> {
        Ok(())
    }

    /// The table takes effect: the targets that it replaces are at rest, and will not continue. If
    /// this target was made before its media could be read, this returns the target that serves in
    /// its place.
    fn take_effect(&self) -> Result<Option<Arc<dyn Target>>> {
        Ok(None)
    }

    /// The device ends: no request is in flight or will arrive, and the background is idle. The
    /// target may mark the medium as detached and complete. If that fails, the medium is left as
    /// after the death of the server, and the next server recovers from that state.
    fn detach(&self) {}

    /// After `detach`: whether the next attach can find out that another program has changed the
    /// origin meanwhile. True where no medium outlives the device.
    fn is_origin_marked(&self) -> bool {
        true
    }

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
