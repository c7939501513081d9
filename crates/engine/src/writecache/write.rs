//! Writes: take a free slot, store the data, then change the index.
//!
//! A bio is served in stages. A stage is a run of blocks that all go to free slots, or that all
//! bypass the cache (because no new blocks are admitted). In mode `p` a cached stage ends within
//! the call; otherwise the stage's I/O is emitted and the bio continues when all of it is complete.
//! Only then do its blocks get new slots: a write is invisible until its data is stored, and a
//! failed stage does not change any older version.

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::sync::atomic::Ordering;
use crate::target::Port;

use super::counts::add;
use super::index::{Locked, State};
use super::lists::ListRoom;
use super::media::Medium;
use super::pool::{SLOTS_MAX, Slots};
use super::{OWN_SHIFT, TOKEN_WRITE, Writecache};

/// Most blocks of a stage. A stripe's lock is held for at most this many blocks at a time.
const STAGE_BLOCKS_MAX: usize = SLOTS_MAX;

/// The stage of a bio that waits for disks.
#[derive(Debug)]
pub(super) struct Stage {
    bio: Bio,
    /// Bytes of the bio that it covers, from the bio's progress on.
    len: u64,
    outstanding: u32,
    status: Result<(), Status>,
    destination: Destination,
}

/// Where the data of a stage goes.
#[derive(Debug)]
enum Destination {
    /// To the origin, bypassing the cache.
    Origin,
    /// To slots that were free.
    Free(Slots),
    /// To slots that hold its blocks already.
    Same(Slots),
}

/// Runs of neighbouring slots: the index of the first, and their number.
fn runs(slots: &[u32]) -> impl Iterator<Item = (usize, usize)> {
    let mut next = 0;
    std::iter::from_fn(move || {
        let first = next;
        slots.get(first)?;
        next += 1;
        while next < slots.len() && slots[next] == slots[next - 1] + 1 {
            next += 1;
        }
        Some((first, next - first))
    })
}

impl Writecache {
    /// Stores the bio's data in the cache, from its progress on.
    pub(super) fn write(&self, mut bio: Bio, port: &mut Port) {
        let block_bytes = self.block_bytes();
        while bio.progress < bio.len {
            let first = self.block_at(bio.offset + bio.progress);
            let end = self.block_at(bio.end()).min(self.index.region_end(first));
            let count = ((end - first) as usize).min(STAGE_BLOCKS_MAX).min(self.lists.list_max());
            let (is_cached, count) = self.destination(&bio, first, count);
            if !is_cached {
                return self.pass_by(bio, count, port);
            }
            if self.plan.overwrites
                && let Some(slots) = self.claim(first, count)
            {
                return self.send(bio, Destination::Same(slots), port);
            }
            if !self.room.may_take(port.id) {
                return self.wait_for_room(bio, port);
            }
            let mut slots = Slots::default();
            if self.pool.take(port.id, count, &mut slots) {
                self.look_at_space(port);
            }
            if slots.is_empty() {
                if self.make_room_at_once() {
                    continue;
                }
                return self.wait_for_room(bio, port);
            }
            // In mode `p` the thread that meets a full list commits it.
            if !self.plan.is_pmem() {
                match self.promise(first, slots.len()) {
                    ListRoom::Promised => {}
                    room => {
                        self.pool.put_all(&slots);
                        self.signal_room();
                        return match room {
                            ListRoom::AfterOthers => port.parked.push_back(bio),
                            _ => self.wait_for_list(bio, port),
                        };
                    }
                }
            }
            self.room.took(port.id, slots.len() as u64 * block_bytes);
            match &self.device.medium {
                Medium::Pmem(pmem) => {
                    self.index.touch(first, &slots);
                    if let Err(status) = self.store(&**pmem, &bio, &slots) {
                        self.pool.put_all(&slots);
                        self.fail();
                        return port.finish(bio, Err(status));
                    }
                    while !self.publish(first, &slots, self.data_of(&bio, &slots)) {
                        self.commit_until(self.rounds.next());
                        if self.has_failed() {
                            self.pool.put_all(&slots);
                            return port.finish(bio, Err(Status::Io));
                        }
                    }
                    bio.progress += slots.len() as u64 * block_bytes;
                }
                Medium::Disk(_) => return self.send(bio, Destination::Free(slots), port),
            }
        }
        self.written(bio, port);
    }

    /// Whether the blocks from `first` on are written to the cache, and for how many of `count`
    /// blocks the answer is the same.
    fn destination(&self, bio: &Bio, first: u64, count: usize) -> (bool, usize) {
        let is_admitted = !self.plan.args.options.metadata_only || bio.is_metadata;
        if is_admitted && !self.orders.is_cleaner() {
            return (true, count);
        }
        let locked = self.index.lock_of(first);
        let is_known = |nth: usize| locked.newest(first + nth as u64).is_some();
        let answer = is_known(0);
        let same = (1..count).take_while(|nth| is_known(*nth) == answer).count() + 1;
        if !answer {
            let stats = self.counts.of(&locked);
            add(&stats.writes, same as u64);
            add(&stats.around, same as u64);
        }
        (answer, same)
    }

    /// Promises room in the list of uncommitted blocks.
    fn promise(&self, first: u64, count: usize) -> ListRoom {
        self.lists.promise(&self.index.lock_of(first), count)
    }

    fn unpromise(&self, first: u64, count: usize) {
        self.lists.keep_promise(&self.index.lock_of(first), count);
        self.lists.tell();
    }

    /// Copies the stage's data into its slots.
    fn store(&self, pmem: &dyn Pmem, bio: &Bio, slots: &[u32]) -> Result<(), Status> {
        let block_bytes = self.device.geometry.block_bytes as usize;
        for (nth, count) in runs(slots) {
            let from = bio.progress as usize + nth * block_bytes;
            let data = &bio.buffer.as_slice()[from..from + count * block_bytes];
            pmem.store(self.device.slot_at(slots[nth]), data);
        }
        let first = self.block_at(bio.offset + bio.progress);
        self.index.prefetch_older(first, slots.len());
        pmem.drain()
    }

    /// Sends the stage's data to its slots.
    fn send(&self, mut bio: Bio, destination: Destination, port: &mut Port) {
        let Medium::Disk(disk) = &self.device.medium else { unreachable!("mode s uses a disk") };
        let (Destination::Free(slots) | Destination::Same(slots)) = &destination else {
            unreachable!("a bypassing write uses no slots")
        };
        let block_bytes = self.device.geometry.block_bytes as usize;
        let len = slots.len() * block_bytes;
        let pieces: Vec<(usize, usize)> = runs(slots).collect();
        let is_lent = pieces.len() == 1 && len as u64 == bio.len;
        let start = bio.progress as usize;
        let mut lent = is_lent.then(|| std::mem::replace(&mut bio.buffer, Buffer::empty()));
        let first = port.ios.len();
        for &(nth, count) in &pieces {
            let buffer = lent.take().unwrap_or_else(|| {
                let from = start + nth * block_bytes;
                let mut copy = port.pool.take(count * block_bytes);
                let data = &bio.buffer.as_slice()[from..from + count * block_bytes];
                copy.as_mut_slice().copy_from_slice(data);
                copy
            });
            let at = self.device.slot_at(slots[nth]);
            let token = TOKEN_WRITE | u64::from(is_lent) << OWN_SHIFT;
            port.ios.push_back(DiskIo::new(disk, Op::Write, at, buffer, token));
        }
        let outstanding = pieces.len() as u32;
        #[cfg(feature = "mutants")]
        let destination = self.publish_early(&bio, destination);
        let stage = Stage { bio, len: len as u64, outstanding, status: Ok(()), destination };
        let place = u64::from(self.jobs.writes.of(port).insert(stage));
        port.ios.range_mut(first..).for_each(|io| io.token |= place);
    }

    /// Sends `count` blocks past the cache, to the origin.
    fn pass_by(&self, mut bio: Bio, count: usize, port: &mut Port) {
        let len = count as u64 * self.block_bytes();
        let is_lent = len == bio.len;
        let buffer = if is_lent {
            std::mem::replace(&mut bio.buffer, Buffer::empty())
        } else {
            let mut copy = port.pool.take(len as usize);
            let from = bio.progress as usize;
            let data = &bio.buffer.as_slice()[from..from + len as usize];
            copy.as_mut_slice().copy_from_slice(data);
            copy
        };
        self.origin.tear_if_dirty(&self.index);
        let offset = bio.offset + bio.progress;
        let destination = Destination::Origin;
        let stage = Stage { bio, len, outstanding: 1, status: Ok(()), destination };
        let place = u64::from(self.jobs.writes.of(port).insert(stage));
        let token = TOKEN_WRITE | u64::from(is_lent) << OWN_SHIFT | place;
        port.ios.push_back(self.origin.io(Op::Write, offset, len, buffer, token));
    }

    /// An I/O of a stage is back.
    pub(super) fn complete_stage(&self, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let is_lent = io.token >> OWN_SHIFT & 1 == 1;
        let mut stages = self.jobs.writes.of(port);
        let stage = stages.value(place);
        stage.status = stage.status.and(io.result);
        stage.outstanding -= 1;
        let mut spare = io.buffer;
        if is_lent {
            std::mem::swap(&mut stage.bio.buffer, &mut spare);
        }
        let is_done = stage.outstanding == 0;
        let stage = is_done.then(|| stages.remove(place));
        drop(stages);
        port.pool.put(spare);
        if let Some(stage) = stage {
            self.end_stage(stage, port);
        }
    }

    fn end_stage(&self, stage: Stage, port: &mut Port) {
        let Stage { mut bio, len, status, destination, .. } = stage;
        let first = self.block_at(bio.offset + bio.progress);
        if !matches!(destination, Destination::Origin) {
            self.device.note_write(status);
        }
        match (&destination, status) {
            (Destination::Origin, Ok(())) => {
                if !mutants::is(Mutant::BypassUncounted) {
                    self.origin.count_bypass();
                }
            }
            (Destination::Origin, Err(_)) => {}
            (Destination::Free(slots), Ok(())) => {
                let has_room = self.publish(first, slots, self.data_of(&bio, slots));
                assert!(has_room, "room was promised");
            }
            (Destination::Free(slots), Err(_)) => self.give_back(first, slots),
            (Destination::Same(slots), status) => {
                let data = if status.is_ok() { self.data_of(&bio, slots) } else { &[] };
                self.overwritten(first, slots, data, status);
            }
        }
        if let Err(status) = status {
            self.counts.failed_requests.fetch_add(1, Ordering::Relaxed);
            self.events.work();
            return port.finish(bio, Err(status));
        }
        bio.progress += len;
        self.write(bio, port);
    }

    /// The slots were not used.
    fn give_back(&self, first: u64, slots: &[u32]) {
        if mutants::is(Mutant::FailedWriteMapped) && self.publish(first, slots, &[]) {
            return;
        }
        // In this order: a slot that is neither promised nor free would never be free again.
        self.pool.put_all(slots);
        if !mutants::is(Mutant::PromiseOfFailed) {
            self.unpromise(first, slots.len());
        }
        self.signal_room();
    }

    /// The data of the bio's next blocks, which go to `slots`.
    fn data_of<'a>(&self, bio: &'a Bio, slots: &[u32]) -> &'a [u8] {
        let len = slots.len() * self.device.geometry.block_bytes as usize;
        bio.buffer
            .as_slice()
            .get(bio.progress as usize..)
            .and_then(|rest| rest.get(..len))
            .unwrap_or_default()
    }

    /// Makes `slots`, whose data is stored, the newest versions of the blocks from `first` on,
    /// unless the list of uncommitted blocks is full.
    fn publish(&self, first: u64, slots: &[u32], data: &[u8]) -> bool {
        #[cfg(feature = "mutants")]
        if let Some(has_room) = self.publish_wrongly(first, slots, data) {
            return has_room;
        }
        let locked = self.index.lock_of(first);
        let filling = self.lists.filling(&locked);
        self.publish_in(locked, filling, first, slots, data)
    }

    /// The same, where the stripe is locked and fills this list.
    fn publish_in(
        &self,
        mut locked: Locked<'_>,
        filling: usize,
        first: u64,
        slots: &[u32],
        data: &[u8],
    ) -> bool {
        if self.plan.is_pmem() && !self.lists.has_room(&locked, filling, slots.len()) {
            return false;
        }
        let state = State::open_in(filling);
        let epoch = self.background.epoch();
        let (mut uncommitted, mut committed) = (0, 0);
        // Before the slot of an older version can get another block.
        let is_first = self.lists.push(&locked, filling, first, slots, data);
        locked.link_run(first, slots, (state, epoch), |locked, older| match older.word.state() {
            found if found == state => {
                // No entry on the medium names the older slot.
                let newer = slots[(older.word.block() - first) as usize];
                self.orders.awaited.replace(older.slot, newer);
                locked.unlink(older.slot);
                self.index.retire(older.slot);
                self.pool.put(older.slot);
                uncommitted += 1;
            }
            found if found.is_uncommitted() => uncommitted += 1,
            State::Dropped | State::Marking => {}
            _ => {
                // A commit will take it out of the list.
                locked.bring_age_near(older.slot);
                committed += 1;
            }
        });
        if !self.plan.is_pmem() {
            self.lists.note_fresh(&locked, filling);
            self.lists.keep_promise(&locked, slots.len());
        }
        let stats = self.counts.of(&locked);
        let count = slots.len() as u64;
        add(&stats.writes, count);
        add(&stats.hits_uncommitted, uncommitted);
        add(&stats.hits_committed, committed);
        let hits = if self.plan.is_pmem() { uncommitted } else { uncommitted + committed };
        add(&stats.allocated, count - hits);
        // As late as possible: a locked instruction waits for the data's stores to leave the CPU,
        // and all earlier instructions proceed meanwhile. A round that checked before either waits
        // for the lock, because the list was not empty, or leaves these blocks to the next round.
        self.lists.count(&locked, is_first, count);
        drop(locked);
        // A slot that it replaced is free, or there are more blocks to be committed and written
        // back.
        if !mutants::is(Mutant::PublishUnheard) {
            self.tell_of_progress();
        }
        self.lists.tell();
        true
    }

    /// All of the bio's data is stored.
    fn written(&self, bio: Bio, port: &mut Port) {
        self.background.arm();
        if bio.fua && !mutants::is(Mutant::FuaUncommitted) {
            return self.make_durable(bio, port);
        }
        let uncommitted = self.lists.blocks();
        if uncommitted > 0 && uncommitted >= self.plan.autocommit_blocks() {
            self.ask_for_commit(port);
        }
        port.finish(bio, Ok(()));
    }
}

#[cfg(feature = "mutants")]
impl Writecache {
    fn publish_wrongly(&self, first: u64, slots: &[u32], data: &[u8]) -> Option<bool> {
        let filling = self.lists.filling_of(self.index.stripe_of(first));
        let publish = || self.publish_in(self.index.lock_of(first), filling, first, slots, data);
        mutants::is(Mutant::FillingReadEarly).then(publish)
    }

    fn publish_early(&self, bio: &Bio, destination: Destination) -> Destination {
        let first = self.block_at(bio.offset + bio.progress);
        match &destination {
            Destination::Free(slots)
                if mutants::is(Mutant::EntryBeforeData) && self.publish(first, slots, &[]) =>
            {
                Destination::Free(Slots::default())
            }
            _ => destination,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn neighbours_go_together() {
        let found: Vec<_> = runs(&[4, 5, 6, 9, 1, 2, 7]).collect();
        assert_eq!(found, [(0, 3), (3, 1), (4, 2), (6, 1)]);
        assert_eq!(runs(&[]).count(), 0);
    }
}
