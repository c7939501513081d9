//! Commits: bios that wait until all complete writes are durable. Many of them share a *round*
//! (`round`).
//!
//! Mode `p` makes rounds within the call that needs one. In mode `s` a port whose bio waits drives
//! the round, and keeps that bio; the bios of other ports are parked until the round ends.

use crate::bio::{Bio, Op};
use crate::disk::DiskIo;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::target::Port;

use super::round::{Ended, Round};
use super::{TOKEN_FLUSH, Writecache};

/// The note on a parked bio that waits for a round: flag bits, and above them the round.
const WAITS: u64 = 1;
/// The bio continues after the round.
const GOES_ON: u64 = 2;
const ROUND_SHIFT: u32 = 2;

/// A bio that waits for a round.
#[derive(Debug)]
struct Waiter {
    round: u64,
    /// Whether the bio continues after the round, or is done.
    goes_on: bool,
    bio: Bio,
}

/// State that belongs to rounds, and needs their lock.
#[derive(Debug, Default)]
struct Commit {
    round: Round,
    /// Mode `s`: the port whose thread drives the round.
    driver: usize,
    /// Bios of that port that wait for rounds.
    waiters: Vec<Waiter>,
}

/// The round under way, and the bios that wait for rounds.
#[derive(Debug, Default)]
pub(super) struct Commits {
    commit: Mutex<Commit>,
    /// Bios of other ports may wait for the end of a round.
    wants_round: AtomicBool,
    /// Mode `s`: the background must commit.
    is_asked: AtomicBool,
}

impl Commits {
    /// No round is in progress. `seq`: the commit counter on the medium.
    pub(super) fn new(seq: u64) -> Commits {
        let commit = Commit { round: Round::new(seq), ..Commit::default() };
        Commits { commit: Mutex::new(commit), ..Commits::default() }
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Commit> {
        lock(&self.commit)
    }

    /// The commit counter on the medium.
    pub(super) fn seq(&self) -> u64 {
        self.lock().round.seq()
    }

    /// Whether the background was asked to commit. Clears that.
    pub(super) fn take_request(&self) -> bool {
        self.is_asked.swap(false, Ordering::SeqCst)
    }

    /// Mode `s`: whether no round is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().round.is_idle()
    }

    /// Whether no round is in progress, and no bio waits; and the slots that wait for marks.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn audit(&self) -> (bool, Vec<u32>) {
        let commit = self.lock();
        let (round, marks) = (&commit.round, commit.round.marks());
        let is_idle = round.is_idle() && commit.waiters.is_empty() && marks.is_empty();
        (is_idle, marks.superseded().to_vec())
    }
}

/// A flush of the origin for a client, or for a suspend.
#[derive(Debug)]
pub(super) struct FlushJob {
    bio: Option<Bio>,
    /// The number of writes that had bypassed the cache when the flush began.
    bypassed: u64,
}

/// Whether a parked bio waits for a round.
pub(super) fn is_waiting(bio: &Bio) -> bool {
    bio.note & WAITS != 0
}

/// If a bio waited for a round: the round, and whether the bio continues after it or is done.
pub(super) fn take_wait(bio: &mut Bio) -> Option<(u64, bool)> {
    if !is_waiting(bio) {
        return None;
    }
    let note = std::mem::take(&mut bio.note);
    Some((note >> ROUND_SHIFT, note & GOES_ON != 0))
}

fn waiting(mut bio: Bio, round: u64, goes_on: bool) -> Bio {
    let flags = if goes_on { WAITS | GOES_ON } else { WAITS };
    bio.note = round << ROUND_SHIFT | flags;
    bio
}

impl Writecache {
    /// Whether a round has ended, or none will end any more.
    pub(super) fn is_past(&self, round: u64) -> bool {
        self.rounds.ended() >= round || self.has_failed()
    }

    /// Whether a write that completed before may be uncommitted. Blocks that their thread has not
    /// yet put into a list do not count, since no round can take them: otherwise a committer would
    /// spin until that thread has published them.
    pub(super) fn has_open(&self) -> bool {
        // In this order: a round counts itself, then takes the filled lists.
        self.lists.has_any() || self.rounds.is_any_under_way()
    }

    /// The round after which all complete writes are durable: the present one if the lists that are
    /// being filled are empty, else the next. If a round begins during this check, it may have
    /// closed a list just before the list was checked.
    fn round_needed(&self) -> u64 {
        loop {
            let begun = self.rounds.begun();
            let is_any_filled = self.lists.has_any();
            if self.rounds.begun() == begun || mutants::is(Mutant::RoundReadOnce) {
                return (begun + u64::from(is_any_filled)).max(self.marks.marked_by());
            }
        }
    }

    /// A flush.
    pub(super) fn flush(&self, bio: Bio, port: &mut Port) {
        self.counts.flushes.fetch_add(1, Ordering::Relaxed);
        if mutants::is(Mutant::FlushUncommitted) {
            return port.finish(bio, Ok(()));
        }
        self.make_durable(bio, port);
    }

    /// All complete writes become durable, then the bio is done.
    pub(super) fn make_durable(&self, bio: Bio, port: &mut Port) {
        let bypassed = self.origin.bypassed();
        match self.origin.owes_clients() {
            true => self.emit_flush(FlushJob { bio: Some(bio), bypassed }, port),
            false => self.settle(bio, port),
        }
    }

    /// Only a suspend waits for it.
    pub(super) fn flush_origin(&self, port: &mut Port) {
        self.emit_flush(FlushJob { bio: None, bypassed: self.origin.bypassed() }, port);
    }

    fn emit_flush(&self, job: FlushJob, port: &mut Port) {
        let place = self.jobs.flushes.of(port).insert(job);
        port.ios.push_back(self.origin.flush(TOKEN_FLUSH | u64::from(place)));
    }

    /// The origin is flushed.
    pub(super) fn complete_flush(&self, io: DiskIo, port: &mut Port) {
        let FlushJob { bio, bypassed } = self.jobs.flushes.of(port).remove(io.token as u32);
        self.origin.end_flush(bypassed, io.result);
        match (bio, io.result) {
            (Some(bio), Ok(())) => self.settle(bio, port),
            (Some(bio), Err(status)) => port.finish(bio, Err(status)),
            (None, result) => {
                self.origin.end_own_flush(result);
                self.events.work();
            }
        }
    }

    fn settle(&self, bio: Bio, port: &mut Port) {
        self.wait_until(self.round_needed(), bio, false, port);
    }

    /// The bio continues once all writes that are complete now are durable, and marked.
    pub(super) fn settle_and_go_on(&self, bio: Bio, port: &mut Port) {
        let next = self.rounds.next();
        self.wait_until(self.round_needed().max(next), bio, true, port);
    }

    /// The list of uncommitted blocks is full.
    pub(super) fn wait_for_list(&self, bio: Bio, port: &mut Port) {
        self.wait_until(self.rounds.next(), bio, true, port);
    }

    fn wait_until(&self, round: u64, bio: Bio, goes_on: bool, port: &mut Port) {
        if self.plan.is_pmem() {
            self.commit_until(round);
        }
        match self.is_past(round) {
            true => self.go_on(bio, goes_on, port),
            false => self.wait_for_round(bio, round, goes_on, port),
        }
    }

    /// Mode `s`: the bio waits here if this port drives the rounds, else it is parked. Only its own
    /// port may finish it.
    pub(super) fn wait_for_round(&self, bio: Bio, round: u64, goes_on: bool, port: &mut Port) {
        let mut commit = self.commits.lock();
        self.drive_round(&mut commit, round, port);
        if self.is_past(round) {
            drop(commit);
            return self.go_on(bio, goes_on, port);
        }
        if commit.driver == port.id {
            commit.waiters.push(Waiter { round, goes_on, bio });
        } else {
            // Set under the lock, so that the end of the round sees this bio.
            self.commits.wants_round.store(true, Ordering::SeqCst);
            port.parked.push_back(waiting(bio, round, goes_on));
        }
    }

    /// Begins a round, if none is under way, unless round `until` has ended.
    fn drive_round(&self, commit: &mut Commit, until: u64, port: &mut Port) {
        if self.begin_disk_round(&mut commit.round, until, port) {
            commit.driver = port.id;
        }
    }

    /// An I/O of a round of mode `s` is back.
    pub(super) fn complete_commit(&self, io: DiskIo, port: &mut Port) {
        port.pool.put(io.buffer);
        let mut commit = self.commits.lock();
        if let Some(ended) = self.disk_round_step(&mut commit.round, io.result, port) {
            self.round_has_ended(ended, &mut commit, port);
        }
        self.release_waiters(commit, port);
    }

    fn round_has_ended(&self, ended: Ended, commit: &mut Commit, port: &mut Port) {
        if ended.has_freed {
            self.signal_room();
        }
        if self.commits.wants_round.swap(false, Ordering::SeqCst) {
            self.events.room();
        }
        // This begins the next round only for bios of this port, whose thread drives it until they
        // are done. If a bio waits on another port, that port drives the next round.
        if let Some(until) = commit.waiters.iter().map(|waiter| waiter.round).max() {
            self.drive_round(commit, until, port);
        }
        // The background plans by the committed state. A client that flushes after every write must
        // not wake it each time.
        if !ended.is_flush_only || self.has_plans() {
            self.events.work();
        }
    }

    /// Continues the bios whose round has ended.
    fn release_waiters(&self, mut commit: MutexGuard<'_, Commit>, port: &mut Port) {
        let mut ready = Vec::new();
        let mut nth = 0;
        while nth < commit.waiters.len() {
            if self.is_past(commit.waiters[nth].round) {
                ready.push(commit.waiters.remove(nth));
            } else {
                nth += 1;
            }
        }
        drop(commit);
        for Waiter { goes_on, bio, .. } in ready {
            self.go_on(bio, goes_on, port);
        }
    }

    /// The round for which a bio waited has ended.
    pub(super) fn go_on(&self, bio: Bio, goes_on: bool, port: &mut Port) {
        match bio.op {
            _ if self.has_failed() => port.finish(bio, Err(Status::Io)),
            _ if !goes_on => port.finish(bio, Ok(())),
            Op::Write => self.write(bio, port),
            _ => self.zero(bio, port),
        }
    }

    /// Commits in mode `p`. In mode `s` the background commits as soon as it can, because a round
    /// proceeds only while a thread drives its port, and this may be the client's only request in
    /// flight.
    pub(super) fn ask_for_commit(&self, port: &mut Port) {
        if self.plan.is_pmem() || mutants::is(Mutant::RoundOfNobody) {
            return self.commit_soon(port);
        }
        if !self.commits.is_asked.swap(true, Ordering::SeqCst) {
            self.events.work();
        }
    }

    /// Commits in mode `p`; in mode `s` begins to, on the background's port.
    pub(super) fn commit_soon(&self, port: &mut Port) {
        let next = self.rounds.next();
        if self.plan.is_pmem() {
            // If another thread is committing, that is enough, and this thread need not wait for
            // it.
            if let Ok(mut commit) = self.commits.commit.try_lock() {
                let freed = self.memory_round(&mut commit.round);
                drop(commit);
                self.tell_of_memory_round(freed);
            }
            return;
        }
        self.drive_round(&mut self.commits.lock(), next, port);
    }

    /// Mode `p`: rounds until `round` has ended.
    pub(super) fn commit_until(&self, round: u64) {
        while !self.is_past(round) {
            let mut commit = self.commits.lock();
            if !self.is_past(round) {
                let freed = self.memory_round(&mut commit.round);
                drop(commit);
                self.tell_of_memory_round(freed);
            }
        }
    }

    fn tell_of_memory_round(&self, freed: bool) {
        if freed {
            self.signal_room();
        }
        // Its blocks can be written back.
        if !mutants::is(Mutant::MemoryRoundUnheard) {
            self.tell_of_progress();
        }
    }

    /// Mode `p` without a free slot: frees the slots that only wait for their marks. Returns
    /// whether there are free slots then.
    pub(super) fn make_room_at_once(&self) -> bool {
        if !self.plan.is_pmem() || self.has_failed() {
            return false;
        }
        let mut tries = 0;
        while !self.pool.has_any() && tries < 3 && (self.marks.waiting() > 0 || self.has_open()) {
            self.commit_until(self.rounds.next());
            tries += 1;
        }
        self.pool.has_any()
    }

    /// Bios may wait for the slots that were just put back.
    pub(super) fn signal_room(&self) {
        self.room.tell();
    }
}
