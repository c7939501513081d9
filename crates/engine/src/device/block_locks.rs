//! Locks of blocks, for requests that are not whole blocks.
//!
//! A write of a part of a block reads the block, and then writes all of it. If another change of
//! the block ended between the read and the write, the write would undo this change, although its
//! client has an answer. So, while any port has such requests, the changes of all ports are listed
//! here: an entry is made before a target gets the change, and removed when the target is done.
//!
//! 1. Entries are in the order of their arrival. An entry begins when no earlier entry excludes it.
//!    Two entries exclude each other if their ranges overlap and at least one of them is a part.
//!    Changes of whole blocks do not exclude each other, as on any disk.
//! 2. So a part begins when all earlier changes of its block have come out, and later ones wait
//!    until the part has come out. An entry waits for earlier entries only, and a request has one
//!    entry at a time, so requests never wait in a circle, and none waits for later ones.
//! 3. An entry that waits belongs to a parked bio. When an entry leaves that excluded it, free
//!    space is signalled, and its port submits its parked bios again. No wake-up is lost: one mutex
//!    guards both steps, and a driver reads the epoch of free space before it submits a bio.
//! 4. A port removes entries without bios: when the table changes (no bio is inside then, and
//!    parked bios enter again), and when the port is detached.
//! 5. Changes that entered a target before changes were listed are only counted. A part begins when
//!    all of them have come out.

use std::ops::Range;

use crate::mutants::{self, Mutant};
use crate::sync::{Arc, Mutex, lock};
use crate::target::Events;

/// The range of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    port: usize,
    range: Range<u64>,
    /// Whether the rest of the block is read before it is written.
    is_part: bool,
    /// Whether the change has begun.
    is_inside: bool,
}

impl Entry {
    fn excludes(&self, other: &Entry) -> bool {
        let overlaps = self.range.start < other.range.end && other.range.start < self.range.end;
        overlaps && (self.is_part || other.is_part)
    }
}

#[derive(Debug, Default)]
struct State {
    entries: Vec<Entry>,
    /// Bios inside targets that may be changes without an entry.
    unlisted: u64,
}

impl State {
    fn may_begin(&self, at: usize) -> bool {
        let entry = &self.entries[at];
        let is_known = !entry.is_part || self.unlisted == 0 || mutants::is(Mutant::UnlistedPassed);
        is_known && !self.entries[..at].iter().any(|earlier| earlier.excludes(entry))
    }
}

/// The locks of a device.
#[derive(Debug)]
pub(super) struct BlockLocks {
    state: Mutex<State>,
    events: Arc<Events>,
}

impl BlockLocks {
    pub fn new(events: &Arc<Events>) -> BlockLocks {
        BlockLocks { state: Mutex::default(), events: events.clone() }
    }

    /// Ports begin to list their changes. Until [`BlockLocks::unlisted_left`] is called once for
    /// this, no part begins.
    pub fn begin(&self) {
        *lock(&self.state) = State { entries: Vec::new(), unlisted: 1 };
    }

    /// A port lists its changes from now on, and has `count` bios inside targets.
    pub fn add_unlisted(&self, count: u64) {
        lock(&self.state).unlisted += count;
    }

    /// One of these bios has come out.
    pub fn unlisted_left(&self) {
        let mut state = lock(&self.state);
        state.unlisted = state.unlisted.checked_sub(1).expect("each comes out once");
        let may_wake = state.unlisted == 0 && state.entries.iter().any(|entry| !entry.is_inside);
        drop(state);
        self.wake(may_wake);
    }

    /// Lists a change of `port`, or finds it if it waits. Returns whether it may begin.
    pub fn enter(&self, port: usize, range: Range<u64>, is_part: bool) -> bool {
        if mutants::is(Mutant::BlockUnlocked) {
            return true;
        }
        let entry = Entry { port, range, is_part, is_inside: false };
        let mut state = lock(&self.state);
        let at = state.entries.iter().position(|other| *other == entry).unwrap_or_else(|| {
            state.entries.push(entry);
            state.entries.len() - 1
        });
        let may_begin = state.may_begin(at);
        state.entries[at].is_inside = may_begin;
        may_begin
    }

    /// A change of `port` that has begun comes out.
    pub fn leave(&self, port: usize, range: Range<u64>, is_part: bool) {
        let entry = Entry { port, range, is_part, is_inside: true };
        let mut state = lock(&self.state);
        let Some(at) = state.entries.iter().position(|other| *other == entry) else {
            let is_wrong = !mutants::is(Mutant::BlockUnlocked);
            assert!(!is_wrong, "a change that comes out was listed");
            return;
        };
        state.entries.remove(at);
        let may_wake =
            state.entries[at..].iter().any(|later| !later.is_inside && entry.excludes(later));
        drop(state);
        self.wake(may_wake && !mutants::is(Mutant::BlockLeftQuietly));
    }

    /// Whether such a change of whole blocks of `port` waits.
    pub fn is_waiting(&self, port: usize, range: Range<u64>) -> bool {
        let entry = Entry { port, range, is_part: false, is_inside: false };
        lock(&self.state).entries.contains(&entry)
    }

    /// Removes entries of `port`: all, or those that wait.
    pub fn forget(&self, port: usize, with_inside: bool) {
        let mut state = lock(&self.state);
        let before = state.entries.len();
        state.entries.retain(|entry| entry.port != port || (entry.is_inside && !with_inside));
        let may_wake = state.entries.len() < before;
        drop(state);
        self.wake(may_wake);
    }

    /// The listeners of `room` take locks of their own: called without the lock.
    fn wake(&self, may_wake: bool) {
        if may_wake {
            self.events.room();
        }
    }
}
