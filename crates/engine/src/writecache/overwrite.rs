//! Mode `s`: committed blocks are overwritten in place, as in the kernel. That takes one write, and
//! a flush when a client asks for one, but no entry, counter or mark. If the medium may tear a
//! block, blocks are overwritten only if the table allows it (`atomic_blocks false`).
//!
//! After a crash, each unit that the disk writes atomically has the old or the new content, and the
//! new content once it is flushed, as with any write to a disk. The rest of the cache relies on
//! these rules:
//!
//! 1. While the write is in flight, its slots are `Overwriting`. They are neither written back nor
//!    overwritten by another write, which takes free slots instead. A version that supersedes them
//!    leaves them `Outdated` until the write is complete: no slot in flight ever gets another
//!    block.
//! 2. Then they are in the list of their stripe, as blocks that are not committed, until a round
//!    has flushed. Write-back does not take them, so a power failure cannot undo data that the
//!    origin has. A round that closes only overwritten blocks is a flush of the medium.
//! 3. If the write fails, it is unknown which version the medium will return from now on, or after
//!    the next crash. The cache has failed, as after a failed commit, and these blocks are not read
//!    any more. The next server finds in shared memory which writes were in flight, or not flushed.
//!    It writes the data that it reads there again, so that the data stays, whether or not a client
//!    got the error.
//! 4. No block is overwritten in a range that a discard is zeroing: the discard drops the blocks
//!    that were there when it began.

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;

use super::Writecache;
use super::args::TableArgs;
use super::counts::add;
use super::index::State;
use super::layout::Geometry;
use super::media::Medium;
use super::pool::Slots;

/// About this many blocks between two rounds are overwritten; further ones take free slots. For a
/// flush after a few writes, the round costs most. When many writes share a round, its cost is
/// divided, and free slots are neighbours.
const BLOCKS_MAX: u64 = 16;

/// Whether committed blocks are overwritten in place: if the medium writes a block atomically, or
/// if the table accepts torn blocks after a power failure.
pub(super) fn is_wanted(args: &TableArgs, medium: &Medium, geometry: &Geometry) -> bool {
    let Medium::Disk(disk) = medium else { return false };
    let block_bytes = geometry.block_bytes;
    let is_aligned = geometry.block_at(0).is_multiple_of(u64::from(block_bytes));
    let is_whole = is_aligned && disk.limits().atomic_bytes >= block_bytes;
    args.atomic_blocks.map_or(is_whole, |is_atomic| !is_atomic)
}

impl Writecache {
    /// Claims the slots of `count` blocks from `first` on to be overwritten, if all of them are
    /// cached, are neighbours, and are not in use otherwise. Promises space for them in the list.
    pub(super) fn claim(&self, first: u64, count: usize) -> Option<Slots> {
        if self.lists.blocks() >= BLOCKS_MAX {
            return None;
        }
        let mut locked = self.index.lock_of(first);
        // Under the lock: a drain that awaits a block has announced this before it examined the
        // block.
        if self.orders.is_draining() {
            return None;
        }
        let lead = locked.newest(first)?.slot;
        let is_claimable = |(block, slot): (u64, u32)| {
            locked.newest(block).is_some_and(|found| {
                use State::{Live, OverwrittenA, OverwrittenB};
                found.slot == slot
                    && matches!(found.word.state(), Live | OverwrittenA | OverwrittenB)
            })
        };
        let end = first + count as u64;
        if !(first..end).zip(lead..).all(is_claimable) {
            return None;
        }
        // Under the stripe's lock: a discard that is not yet in the list will see the claim.
        let meets = |range: &(u64, u64)| range.0 < end && first < range.1;
        if self.jobs.zeroing.is_any(meets) && !mutants::is(Mutant::OverwrittenWhileZeroed) {
            return None;
        }
        let slots: Slots = (lead..).take(count).collect();
        if !self.lists.begin_overwrite(&locked, &slots) {
            return None;
        }
        let epoch = self.background.epoch();
        slots.iter().for_each(|slot| locked.begin_overwrite(*slot, epoch));
        Some(slots)
    }

    /// The write of `slots`, which were claimed, is back.
    pub(super) fn overwritten(
        &self,
        first: u64,
        slots: &Slots,
        data: &[u8],
        status: Result<(), Status>,
    ) {
        let block_bytes = self.device.geometry.block_bytes as usize;
        let mut data = data.chunks(block_bytes);
        let mut locked = self.index.lock_of(first);
        let filling = self.lists.filling(&locked);
        for (block, &slot) in (first..).zip(slots.iter()) {
            let data = data.next().unwrap_or_default();
            if self.index.word(slot).state() == State::Outdated {
                self.drop_outdated(&mut locked, slot);
                continue;
            }
            if mutants::is(Mutant::OverwriteUncounted) {
                locked.set_state(slot, State::Live);
                continue;
            }
            self.lists.push_overwritten(&locked, (block, slot), data);
            locked.set_state(slot, State::overwritten_in(filling));
        }
        self.lists.end_overwrite(&locked, slots);
        let stats = self.counts.of(&locked);
        add(&stats.writes, slots.len() as u64);
        add(&stats.hits_committed, slots.len() as u64);
        self.counts.overwrites.fetch_add(slots.len() as u64, Ordering::Relaxed);
        drop(locked);
        if status.is_err() {
            // Data written by others is not affected.
            self.stop();
        }
        self.lists.tell();
        // A discard may have waited for the write.
        self.jobs.zeroing.tell();
        if !mutants::is(Mutant::OverwriteEndUnheard) {
            self.tell_of_progress();
        }
    }
}
