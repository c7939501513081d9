//! The life of a request.
//!
//! A bio is served in stages. A stage is the part of the bio, from its progress on, that may
//! continue now: its I/O is emitted, and the bio continues when all of the I/O is complete. A bio
//! that may not continue is parked unchanged, and tries again after a change, so it holds no
//! resource while it waits. If a block was given a slot, or lost one, the bio waits for a commit,
//! whose number is in the bio's note. The note of a FUA bio also has the number of the origin's
//! losses when its first stage began: if the origin loses more data before the bio is durable, this
//! may have been the bio's data.

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::target::Port;
use crate::units::SECTOR;

use super::blocks::{Blocks, Claim, Way};
use super::commit::Verdict;
use super::policy::Miss;
use super::{Cache, OWN_SHIFT, TOKEN_FLUSH, TOKEN_REQUEST};

/// Own bits of a token: the first sector within the bio, and whether the buffer is the bio's own.
const OWN_LENT: u64 = 1 << 23;
/// The last block of an origin whose size is not a multiple of the block size: it is never cached.
const TAIL: u64 = u64::MAX;
/// A note's upper bits: one more than the losses of the origin; below, the number of a commit.
const NOTE_LOSSES: u32 = 48;
/// Bit of a note: the cache device failed a write of a whole block, and the origin is to take it.
const NOTE_PAST: u64 = 1 << 47;
/// Most blocks of a stage.
const STAGE_BLOCKS_MAX: usize = 1024;

/// A part of a stage, in one block.
#[derive(Clone, Copy, Debug)]
struct Part {
    block: u64,
    way: Way,
    len: u64,
}

/// A stage whose I/O is under way.
#[derive(Debug)]
pub(super) struct Stage {
    bio: Bio,
    len: u64,
    outstanding: u32,
    status: Result<(), Status>,
    parts: Vec<Part>,
    /// Slots that could not be read, and slots that were read in the same I/O.
    unread: Vec<u32>,
    /// The same of writes that the origin has, or can take.
    unwritten: Vec<u32>,
    /// The origin is flushed, for slots that are given up.
    is_settling: bool,
    /// How often the origin had lost something when it began.
    doubts: u64,
}

impl Part {
    /// The result for this part, if the stage ended with `status`, and these slots could not be
    /// written.
    fn ended(&self, status: Result<(), Status>, unwritten: &[u32]) -> Result<(), Status> {
        match self.way {
            Way::New(slot) | Way::Both(slot) if unwritten.contains(&slot) => Err(Status::Io),
            _ => status,
        }
    }

    /// Whether the request is served again, without the slot that this part had.
    fn is_to_come_again(&self, ended: Result<(), Status>, status: Result<(), Status>) -> bool {
        match self.way {
            Way::Both(_) => ended.is_err() && !mutants::is(Mutant::ThroughFailedClean),
            Way::New(_) => ended.is_err() && status.is_ok(),
            _ => false,
        }
    }
}

impl Stage {
    /// Whether what it writes to a slot is to be nowhere else.
    fn has_alone(&self, slot: u32) -> bool {
        self.parts.iter().any(|part| part.way == Way::Slot(slot))
    }
}

/// A flush under way.
#[derive(Debug)]
pub(super) struct FlushJob {
    bio: Bio,
    outstanding: u32,
    status: Result<(), Status>,
    /// The marks of the flushes of the cache device and of the origin.
    marks: [u64; 2],
    /// How often the origin had lost something when it began.
    doubts: u64,
}

/// A run of bytes to or from one device.
#[derive(Clone, Copy, Debug)]
struct Run {
    at: u64,
    from: u64,
    len: u64,
}

/// Adds bytes to the last of `runs`, if they follow it there and in the bio.
fn add(runs: &mut Vec<Run>, new: Run) {
    match runs.last_mut() {
        Some(last) if last.at + last.len == new.at && last.from + last.len == new.from => {
            last.len += new.len;
        }
        _ => runs.push(new),
    }
}

impl Cache {
    /// Serves the bio from its progress on.
    pub(super) fn serve(&self, mut bio: Bio, port: &mut Port) {
        if commit_of(&bio) != 0 {
            match self.verdict(commit_of(&bio)) {
                Verdict::Durable => put_commit(&mut bio, 0),
                Verdict::Failed => return port.finish(bio, Err(Status::Io)),
                // There are no more commits.
                Verdict::Open if self.blocks().trouble.has_lost => {
                    return port.finish(bio, Err(Status::Io));
                }
                Verdict::Open => return port.parked.push_back(bio),
            }
        }
        if bio.progress == bio.len {
            return self.served(bio, port);
        }
        let mut parts = Vec::new();
        let (claim, doubts) = self.claim(&bio, &mut parts);
        match claim {
            claim if !parts.is_empty() => {
                self.begin_stage(bio, parts, doubts, port);
                // A later block waits for that, and may not ask for it again.
                if claim == Some(Claim::Commit) && !mutants::is(Mutant::LaterBlockUncommitted) {
                    self.commit(port);
                }
            }
            Some(Claim::Fail(status)) => port.finish(bio, Err(status)),
            Some(Claim::Commit) => {
                port.parked.push_back(bio);
                self.commit(port);
            }
            _ => port.parked.push_back(bio),
        }
    }

    /// All of the bio is in its place.
    fn served(&self, bio: Bio, port: &mut Port) {
        let is_durable = !bio.fua || bio.op == Op::Read || mutants::is(Mutant::CacheFuaUnflushed);
        match is_durable {
            true => port.finish(bio, Ok(())),
            false => self.flush(bio, port),
        }
    }

    /// Claims as much of the bio as may continue. Returns the reason to stop, and the number of the
    /// origin's losses at that time.
    fn claim(&self, bio: &Bio, parts: &mut Vec<Part>) -> (Option<Claim>, u64) {
        let block_bytes = self.plan.block_bytes;
        let mut at = bio.offset + bio.progress;
        let mut blocks = self.blocks();
        let is_past = bio.note & NOTE_PAST != 0;
        let mut stopped = None;
        while at < bio.end() && parts.len() < STAGE_BLOCKS_MAX {
            let block = at / block_bytes;
            if block >= self.plan.origin_blocks {
                parts.push(Part { block: TAIL, way: Way::Origin, len: bio.end() - at });
                break;
            }
            let start = block * block_bytes;
            let len = bio.end().min(start + block_bytes) - at;
            let is_whole = len == block_bytes;
            match claim_part(&mut blocks, bio.op, (block, at - start, len), is_whole, is_past) {
                Claim::Go(way) => parts.push(Part { block, way, len }),
                claim => {
                    stopped = Some(claim);
                    break;
                }
            }
            at += len;
        }
        let has_work = std::mem::take(&mut blocks.has_work);
        let doubts = blocks.trouble.doubts;
        drop(blocks);
        self.background.note_request();
        if has_work {
            self.background.arm();
        }
        (stopped, doubts)
    }

    /// Emits the I/O of a stage.
    fn begin_stage(&self, mut bio: Bio, parts: Vec<Part>, doubts: u64, port: &mut Port) {
        let len = parts.iter().map(|part| part.len).sum();
        let [cache, origin] = self.runs(&bio, &parts);
        let is_lent = cache.len() + origin.len() == 1 && len == bio.len;
        let has_data = matches!(bio.op, Op::Read | Op::Write);
        let mut lent =
            (is_lent && has_data).then(|| std::mem::replace(&mut bio.buffer, Buffer::empty()));
        let op = if bio.op == Op::Discard { Op::WriteZeroes } else { bio.op };
        let first = port.ios.len();
        for (side, runs) in [(&self.cache, cache), (&self.origin, origin)] {
            for run in runs {
                let mut own = run.from / SECTOR;
                let buffer = match lent.take() {
                    Some(buffer) => {
                        own |= OWN_LENT;
                        buffer
                    }
                    None if !has_data => Buffer::empty(),
                    None => {
                        let mut copy = port.pool.take(run.len as usize);
                        if op == Op::Write {
                            let from = run.from as usize;
                            let data = &bio.buffer.as_slice()[from..from + run.len as usize];
                            copy.as_mut_slice().copy_from_slice(data);
                        }
                        copy
                    }
                };
                let token = TOKEN_REQUEST | own << OWN_SHIFT;
                let io = DiskIo::bare(side.disk(), op, run.at, run.len, token);
                port.ios.push_back(DiskIo { buffer, ..io });
            }
        }
        let outstanding = (port.ios.len() - first) as u32;
        if bio.fua && bio.note >> NOTE_LOSSES == 0 {
            bio.note |= losses_note(doubts);
        }
        let (status, unread, unwritten) = (Ok(()), Vec::new(), Vec::new());
        let is_settling = false;
        let stage =
            Stage { bio, len, outstanding, status, parts, unread, unwritten, is_settling, doubts };
        let place = u64::from(self.jobs.stages.of(port).insert(stage));
        port.ios.range_mut(first..).for_each(|io| io.token |= place);
    }

    /// The bytes of each device: of the cache device, and of the origin.
    fn runs(&self, bio: &Bio, parts: &[Part]) -> [Vec<Run>; 2] {
        let block_bytes = self.plan.block_bytes;
        let (mut cache, mut origin) = (Vec::new(), Vec::new());
        let mut from = bio.progress;
        for &Part { way, len, .. } in parts {
            let at = bio.offset + from;
            let in_slot =
                |slot: u32| Run { at: u64::from(slot) * block_bytes + at % block_bytes, from, len };
            let below = Run { at, from, len };
            match way {
                Way::Origin | Way::Below(_) | Way::Fill { .. } => add(&mut origin, below),
                Way::Slot(slot) | Way::New(slot) => add(&mut cache, in_slot(slot)),
                Way::Both(slot) => {
                    add(&mut cache, in_slot(slot));
                    add(&mut origin, below);
                }
            }
            from += len;
        }
        [cache, origin]
    }

    /// An I/O of a stage is back.
    pub(super) fn complete_request(&self, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let own = io.token >> OWN_SHIFT & ((1 << 24) - 1);
        if io.op != Op::Read {
            match Arc::ptr_eq(&io.disk, self.origin.disk()) {
                true if io.op == Op::Flush => {}
                true => self.origin.count_write(),
                false => self.cache.count_write(),
            }
        }
        let mut stages = self.jobs.stages.of(port);
        let stage = stages.value(place);
        let mut spare = io.buffer;
        if own & OWN_LENT != 0 {
            std::mem::swap(&mut stage.bio.buffer, &mut spare);
        } else if io.op == Op::Read && io.result.is_ok() {
            let from = (own * SECTOR) as usize;
            let into = &mut stage.bio.buffer.as_mut_slice()[from..from + io.len as usize];
            into.copy_from_slice(spare.as_slice());
        }
        let mut result = io.result;
        if result.is_err() && io.len > 0 && Arc::ptr_eq(&io.disk, self.cache.disk()) {
            let (first, last) = (io.offset, io.offset + io.len - 1);
            let slots = first / self.plan.block_bytes..=last / self.plan.block_bytes;
            let slots = slots.map(|slot| slot as u32);
            if io.op == Op::Read {
                stage.unread.extend(slots);
            } else if slots.clone().all(|slot| !stage.has_alone(slot)) {
                stage.unwritten.extend(slots);
                result = Ok(());
            }
        }
        stage.status = stage.status.and(result);
        stage.outstanding -= 1;
        if stage.outstanding > 0 {
            drop(stages);
            return port.pool.put(spare);
        }
        let gives_up = stage.parts.iter().any(|part| matches!(part.way, Way::Below(_)));
        if gives_up && stage.status.is_ok() && !stage.is_settling {
            stage.is_settling = true;
            stage.outstanding = 1;
            drop(stages);
            let token = TOKEN_REQUEST | OWN_LENT << OWN_SHIFT | u64::from(place);
            return port.ios.push_back(self.origin.flush(token));
        }
        let stage = stages.remove(place);
        drop(stages);
        port.pool.put(spare);
        self.end_stage(stage, port);
    }

    fn end_stage(&self, stage: Stage, port: &mut Port) {
        let Stage {
            mut bio, len, mut status, parts, unread, unwritten, is_settling, doubts, ..
        } = stage;
        let is_write = bio.op != Op::Read;
        let (mut tells, mut round, mut again) = (false, 0, false);
        if is_settling && status.is_err() {
            self.origin.flushed(0, status);
            self.doubt();
        }
        let mut blocks = self.blocks();
        // Another client's flush may have failed meanwhile, and lost the zeroes below a slot.
        let is_sure = blocks.trouble.doubts == doubts || mutants::is(Mutant::ZeroedByFailedFlush);
        if is_settling && !is_sure {
            status = Err(Status::Io);
        }
        let (mut from, mut spares) = (bio.progress, Vec::new());
        for part in parts.iter().filter(|part| part.block != TAIL) {
            let place = (bio.offset + from, from, part.len);
            let has_data = Cache::has_data(&bio, status);
            spares.extend(self.spare(&mut blocks, (part.block, part.way), place, has_data));
            let ended = part.ended(status, &unwritten);
            again |= part.is_to_come_again(ended, status);
            tells |= blocks.end_part(part.block, part.way, is_write, ended);
            from += part.len;
        }
        if parts.iter().any(|part| matches!(part.way, Way::New(_) | Way::Below(_))) {
            round = blocks.next_round();
        }
        if again {
            bio.note |= NOTE_PAST;
            self.counts.passed_by.fetch_add(1, Ordering::Relaxed);
        }
        // The slot may have lost what it showed.
        let is_stale = !is_write
            && blocks.trouble.has_lost
            && parts.iter().any(|part| matches!(part.way, Way::Slot(_)));
        let falls_back = self.falls_back(&mut blocks, &parts, &unread);
        let has_work = std::mem::take(&mut blocks.has_work);
        drop(blocks);
        if has_work {
            self.background.arm();
        }
        if tells {
            self.events.room();
        }
        self.begin_fills(&bio, &spares, port);
        // Even if it stored no data: gaps may have waited for it.
        if parts.iter().any(|part| matches!(part.way, Way::Fill { .. })) {
            self.events.work();
        }
        if falls_back {
            self.counts.fallbacks.fetch_add(1, Ordering::Relaxed);
        }
        if again {
            self.events.work();
        }
        if is_stale || falls_back || again {
            return self.serve(bio, port);
        }
        if let Err(status) = status {
            return port.finish(bio, Err(status));
        }
        bio.progress += len;
        if round != 0 && !mutants::is(Mutant::MovedUnsettled) {
            put_commit(&mut bio, round);
            self.commit(port);
        }
        self.serve(bio, port);
    }

    /// Whether a read that failed is to be tried again, with at least one slot less.
    fn falls_back(&self, blocks: &mut Blocks, parts: &[Part], unread: &[u32]) -> bool {
        let mut falls_back = false;
        for part in parts {
            if let Way::Slot(slot) = part.way
                && unread.contains(&slot)
            {
                falls_back |= blocks.cannot_read(part.block, slot);
            }
        }
        falls_back
    }

    /// Makes durable what is done.
    pub(super) fn flush(&self, bio: Bio, port: &mut Port) {
        let blocks = self.blocks();
        let (trouble, is_dirty) = (blocks.trouble, blocks.slots.dirty_count() > 0);
        drop(blocks);
        let losses = bio.note >> NOTE_LOSSES << NOTE_LOSSES;
        let has_lost_some = losses != 0 && losses != losses_note(trouble.doubts);
        let needs_cache = !trouble.is_untrusted;
        // Data that the origin has needs no metadata.
        let is_lost = needs_cache && is_dirty && self.has_lost_metadata(&mut self.commits.lock());
        if trouble.has_lost && needs_cache || is_lost || has_lost_some {
            return port.finish(bio, Err(Status::Io));
        }
        let sides = [&self.cache, &self.origin];
        let marks = sides.map(|side| side.mark());
        // A cache device that has failed is not used any more.
        let is_used = !trouble.has_lost;
        let ours = |nth: &usize| match nth {
            0 => is_used,
            _ => !mutants::is(Mutant::FlushOfCacheOnly),
        };
        let mut owing =
            [0, 1].into_iter().filter(ours).filter(|nth| sides[*nth].owes_clients()).peekable();
        if owing.peek().is_none() {
            return self.end_flush_of_client(bio, Ok(()), port);
        }
        let owing: Vec<usize> = owing.collect();
        let outstanding = owing.len() as u32;
        let job = FlushJob { bio, outstanding, status: Ok(()), marks, doubts: trouble.doubts };
        let place = u64::from(self.jobs.flushes.of(port).insert(job));
        for nth in owing {
            port.ios.push_back(sides[nth].flush(TOKEN_FLUSH | (nth as u64) << OWN_SHIFT | place));
        }
    }

    /// A flush is back.
    pub(super) fn complete_flush(&self, io: DiskIo, port: &mut Port) {
        let place = io.token as u32;
        let nth = (io.token >> OWN_SHIFT & 1) as usize;
        let side = [&self.cache, &self.origin][nth];
        let mut jobs = self.jobs.flushes.of(port);
        let job = jobs.value(place);
        let mark = match mutants::is(Mutant::FlushMarkedLate) {
            true => side.mark(),
            false => job.marks[nth],
        };
        side.flushed(mark, io.result);
        let needs_cache = !self.blocks().trouble.is_untrusted;
        if nth == 1 || needs_cache {
            job.status = job.status.and(io.result);
        }
        job.outstanding -= 1;
        let job = (job.outstanding == 0).then(|| jobs.remove(place));
        drop(jobs);
        match io.result {
            Err(_) if nth == 0 => self.lose(),
            Err(_) => self.doubt(),
            Ok(()) => {}
        }
        if let Some(FlushJob { bio, status, doubts, .. }) = job {
            let trouble = self.blocks().trouble;
            let is_lost = trouble.has_lost && !trouble.is_untrusted;
            let has_failed = trouble.doubts != doubts && !mutants::is(Mutant::OthersFlushBelieved);
            let is_sure = !is_lost && !has_failed;
            let status = if is_sure { status } else { Err(Status::Io) };
            self.end_flush_of_client(bio, status, port);
        }
    }

    /// A failed flush is reported to the client whose flush ends next, even if another client
    /// requested it: a good flush that began after the failed one does not cover the data that the
    /// failed one has lost.
    fn end_flush_of_client(&self, bio: Bio, status: Result<(), Status>, port: &mut Port) {
        let needs_cache = !self.blocks().trouble.is_untrusted;
        let of_cache = needs_cache && self.cache.take_unheard();
        let is_unheard = self.origin.take_unheard() || of_cache;
        port.finish(bio, if is_unheard { Err(Status::Io) } else { status });
    }

    /// A flush of the cache device failed.
    pub(super) fn lose(&self) {
        if mutants::is(Mutant::CacheLossForgotten) {
            return;
        }
        self.blocks().lose();
        self.events.room();
        self.events.work();
    }

    /// A flush of the origin failed.
    pub(super) fn doubt(&self) {
        self.blocks().doubt();
        self.events.work();
    }
}

/// The number of the commit that the bio waits for, or 0.
pub(super) fn commit_of(bio: &Bio) -> u64 {
    bio.note & (NOTE_PAST - 1)
}

fn put_commit(bio: &mut Bio, number: u64) {
    bio.note = bio.note & !(NOTE_PAST - 1) | number;
}

/// The upper bits of a note.
fn losses_note(doubts: u64) -> u64 {
    (doubts % 0xFFFF + 1) << NOTE_LOSSES
}

fn claim_part(
    blocks: &mut Blocks,
    op: Op,
    (block, offset, len): (u64, u64, u64),
    is_whole: bool,
    is_past: bool,
) -> Claim {
    let miss = |is_write| Miss { block, offset: offset as u32, len: len as u32, is_write };
    match op {
        Op::Read => blocks.read(&miss(false)),
        Op::Write => blocks.write(&miss(true), is_whole && !is_past),
        Op::Discard | Op::WriteZeroes => blocks.zero(&miss(true), is_whole),
        Op::Flush => unreachable!("a flush names no blocks"),
    }
}
