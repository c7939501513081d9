//! Discards and write-zeroes: the origin's range becomes zeroes, durably, and only then does the
//! cache drop its blocks; so a crash at any moment finds the old content or zeroes.
//!
//! 1. Earlier writes must be committed, and write-back in flight must have ended: the bio waits
//!    until its range has neither uncommitted writes nor write-back in flight.
//! 2. From then on write-back avoids the range. The origin is zeroed, and flushed if the cache has
//!    blocks there.
//! 3. The cache's blocks are dropped, as after write-back. The bio is done when their entries are
//!    durably marked free: neither a crash nor the death of the process brings them back.
//!
//! A concurrent write is newer: its blocks are kept.

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::target::{Events, Port};

use super::index::State;
use super::{TOKEN_ZERO, Writecache};

/// A discard that waits for the origin.
#[derive(Debug)]
pub(super) struct ZeroJob {
    bio: Bio,
    has_cached: bool,
}

/// The ranges that discards are zeroing, in blocks: first and end.
#[derive(Debug)]
pub(super) struct Zeroing {
    ranges: Mutex<Vec<(u64, u64)>>,
    /// A discard may wait for blocks that are being written back, or overwritten.
    wants_batch_end: AtomicBool,
    events: Arc<Events>,
}

impl Zeroing {
    pub(super) fn new(events: &Arc<Events>) -> Zeroing {
        let wants_batch_end = AtomicBool::new(false);
        Zeroing { ranges: Mutex::default(), wants_batch_end, events: events.clone() }
    }

    /// The ranges. Called under the lock of a stripe: a discard that is not yet among them sees all
    /// changes to that stripe.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        lock(&self.ranges).clone()
    }

    /// As [`Zeroing::ranges`]: whether there is such a range.
    pub(super) fn is_any(&self, such: impl FnMut(&(u64, u64)) -> bool) -> bool {
        lock(&self.ranges).iter().any(such)
    }

    fn begin(&self, blocks: (u64, u64)) {
        lock(&self.ranges).push(blocks);
    }

    fn end(&self, blocks: (u64, u64)) {
        let mut ranges = lock(&self.ranges);
        let place = ranges.iter().position(|other| *other == blocks);
        ranges.swap_remove(place.expect("a range is registered while it is zeroed"));
    }

    /// A discard may wait from here on.
    fn wait(&self) {
        self.wants_batch_end.store(true, Ordering::SeqCst);
    }

    /// Whether a discard may wait for blocks in flight.
    pub(super) fn is_waiting(&self) -> bool {
        self.wants_batch_end.load(Ordering::SeqCst)
    }

    /// Blocks in flight have arrived: discards may wait for that.
    pub(super) fn tell(&self) {
        if self.wants_batch_end.swap(false, Ordering::SeqCst) {
            self.events.room();
        }
    }
}

/// The blocks of the cache in a range.
#[derive(Clone, Copy, Debug, Default)]
struct Contents {
    /// Any block.
    has_any: bool,
    /// A block that must be committed first.
    has_unsettled: bool,
    /// A block that is being written back, or overwritten.
    has_moving: bool,
}

impl Contents {
    /// Whether a discard of the range has to wait.
    fn must_wait(self) -> bool {
        self.has_unsettled || self.has_moving
    }
}

impl Writecache {
    /// Begins a discard, or continues one that had to wait.
    pub(super) fn zero(&self, bio: Bio, port: &mut Port) {
        let blocks = (self.block_at(bio.offset), self.block_at(bio.end()));
        #[cfg(feature = "mutants")]
        let Some(bio) = self.zero_wrongly(bio, blocks, port) else { return };
        self.jobs.zeroing.begin(blocks);
        // Before the check: a batch that is in progress then will signal its end.
        self.jobs.zeroing.wait();
        let contents = self.contents(blocks);
        if contents.must_wait() {
            self.jobs.zeroing.end(blocks);
            return self.wait_to_zero(bio, contents, port);
        }
        self.emit_zeroes(bio, contents, port);
    }

    fn wait_to_zero(&self, bio: Bio, contents: Contents, port: &mut Port) {
        if contents.has_unsettled {
            return self.settle_and_go_on(bio, port);
        }
        // Woken when the batch of write-back ends.
        port.parked.push_back(bio);
    }

    fn emit_zeroes(&self, bio: Bio, contents: Contents, port: &mut Port) {
        let (offset, len) = (bio.offset, bio.len);
        let job = ZeroJob { bio, has_cached: contents.has_any };
        let place = u64::from(self.jobs.zeroes.of(port).insert(job));
        // Not a discard, after which the origin may read as anything: this must read as zeroes.
        let token = TOKEN_ZERO | place;
        self.origin.tear_if_dirty(&self.index);
        port.ios.push_back(self.origin.io(Op::WriteZeroes, offset, len, Buffer::empty(), token));
    }

    fn contents(&self, (first, end): (u64, u64)) -> Contents {
        let mut contents = Contents::default();
        let mut block = first;
        while self.index.linked() > 0 {
            block = self.index.next_used(block, end);
            if block >= end {
                break;
            }
            let is_whole = self.index.region_end(block) <= end && self.is_region_start(block);
            let region_end = self.index.region_end(block).min(end);
            let locked = self.index.lock_of(block);
            let mut is_empty = true;
            for found in (block..region_end).flat_map(|block| locked.versions(block)) {
                is_empty = false;
                contents.has_any = true;
                match found.word.state() {
                    State::OpenA | State::OpenB => contents.has_unsettled = true,
                    State::Dropped | State::Marking => contents.has_unsettled = true,
                    State::OverwrittenA | State::OverwrittenB => contents.has_unsettled = true,
                    State::Cleaning | State::Outdated | State::Overwriting => {
                        contents.has_moving = true;
                    }
                    _ => {}
                }
            }
            if is_empty && is_whole {
                locked.forget_region(block);
            }
            block = region_end;
        }
        contents
    }

    fn is_region_start(&self, block: u64) -> bool {
        block == 0 || self.index.region_end(block - 1) == block
    }

    /// The origin is zeroed, or flushed.
    pub(super) fn complete_zero(&self, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let mut jobs = self.jobs.zeroes.of(port);
        let has_cached = jobs.value(place).has_cached;
        let is_flushed = !has_cached || mutants::is(Mutant::ZeroesUnflushed);
        if io.result.is_ok() && io.op == Op::WriteZeroes && !is_flushed {
            drop(jobs);
            port.ios.push_back(self.origin.flush(io.token));
            return;
        }
        let bio = jobs.remove(place).bio;
        drop(jobs);
        let blocks = (self.block_at(bio.offset), self.block_at(bio.end()));
        if let Err(status) = io.result {
            if io.op == Op::Flush {
                self.origin.count_flush_failure();
            }
            self.end_zeroing(blocks);
            return port.finish(bio, Err(status));
        }
        self.counts.discards.fetch_add(blocks.1 - blocks.0, Ordering::Relaxed);
        if !has_cached {
            self.end_zeroing(blocks);
            // The origin's flush is owed to the next flush of a client.
            self.origin.count_bypass();
            return if bio.fua { self.make_durable(bio, port) } else { port.finish(bio, Ok(())) };
        }
        self.drop_range(blocks);
        self.end_zeroing(blocks);
        self.make_durable(bio, port);
    }

    /// The range is zeroed, or the discard has failed: its blocks may be written back again.
    fn end_zeroing(&self, blocks: (u64, u64)) {
        self.jobs.zeroing.end(blocks);
        if !mutants::is(Mutant::ZeroingEndUnheard) {
            self.tell_of_progress();
        }
    }

    /// Drops every committed block of the range.
    fn drop_range(&self, (first, end): (u64, u64)) {
        let mut block = first;
        while block < end {
            block = self.index.next_used(block, end);
            let region_end = self.index.region_end(block).min(end);
            for block in block..region_end {
                let mut locked = self.index.lock_of(block);
                let found: Vec<_> = locked.versions(block).collect();
                for found in found {
                    if matches!(found.word.state(), State::Live | State::Damaged | State::Cleaned) {
                        self.drop_clean(&mut locked, block, found.slot);
                    }
                }
            }
            block = region_end;
        }
    }
}

#[cfg(feature = "mutants")]
impl Writecache {
    /// `None`: the deliberate bug has handled the bio.
    fn zero_wrongly(&self, bio: Bio, blocks: (u64, u64), port: &mut Port) -> Option<Bio> {
        let overtakes = mutants::is(Mutant::ZeroOvertakes);
        if !overtakes && !mutants::is(Mutant::BatchEndMissed) {
            return Some(bio);
        }
        self.jobs.zeroing.begin(blocks);
        let contents = self.contents(blocks);
        if contents.must_wait() && !overtakes {
            self.jobs.zeroing.end(blocks);
            if !contents.has_unsettled {
                self.jobs.zeroing.wait();
            }
            self.wait_to_zero(bio, contents, port);
        } else {
            self.emit_zeroes(bio, contents, port);
        }
        None
    }
}
