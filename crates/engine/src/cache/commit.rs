//! Commits: changes in memory are written to the medium. One commit is in progress at a time,
//! shared by all waiting requests.
//!
//! 1. The blocks of the transaction are written.
//! 2. The metadata device is flushed, and with it the devices whose data the transaction names.
//! 3. The superblock is written, and the metadata device flushed again.
//! 4. Only then may the newly marked slots be written to, and only then are emptied slots free.
//!
//! A failed commit has no effect; the next commit has its changes. Until one succeeds, requests
//! that would have to wait for a commit fail, and the others continue. A commit whose own I/O
//! succeeds, while other I/O to the origin fails and makes its content doubtful, is repeated a few
//! times, and requests wait for the repetition: the client of the other I/O gets the error.

use std::collections::VecDeque;

use crate::base::retry::Retry;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Status};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::target::Port;
use crate::units::{Nanos, SECOND};

use super::blocks::Blocks;
use super::changes::{Changes, Picture};
use super::cut::Witness;
use super::metadata::superblock::{CLEAN_SHUTDOWN, Superblock};
use super::metadata::transaction::Reached;
use super::metadata::writer::Next;
use super::metadata::{BLOCK_BYTES, Change, Doubt, Transaction, Writer};
use super::{Cache, OWN_SHIFT, TOKEN_COMMIT, waits};

/// How often a commit is repeated before it fails: the writes of a client may fail without end.
const REPEATS_MAX: u32 = 4;
/// Devices that failed a flush are recorded this long after the last try failed.
const TELL_AGAIN_AFTER: Nanos = SECOND;
/// Metadata writes in flight.
pub(super) const DEPTH_MAX: usize = 64;
/// Own bits of a token: which device is flushed; none: the metadata device.
const OWN_CACHE: u64 = 1;
const OWN_ORIGIN: u64 = 2;

/// Why a commit begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Something changed.
    Changes,
    /// The cache comes to rest: the medium is to have the exact state, and the hints.
    Rest,
    /// Only devices that failed a flush are recorded.
    Tell,
}

/// What became of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Open,
    Durable,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Blocks,
    Settling,
    Superblock,
    Last,
}

/// A commit under way.
#[derive(Debug)]
struct Round {
    number: u64,
    purpose: Purpose,
    phase: Phase,
    transaction: Transaction,
    queue: VecDeque<(u64, Buffer)>,
    /// I/O in flight, by the device: the metadata device, the cache device, the origin.
    outstanding: [u32; 3],
    status: Result<(), Status>,
    changes: Changes,
    /// Words that requests wait for, with the bits that the medium gets.
    wanted: Vec<(u64, u64)>,
    /// The marks of the flushes of the cache device and of the origin.
    marks: [u64; 2],
    /// How often the origin had lost something when it began.
    doubts: u64,
}

impl Round {
    /// Whether none of its I/O is in flight.
    fn is_quiet(&self) -> bool {
        self.outstanding == [0; 3]
    }

    /// Whether its own I/O has succeeded, and requests may wait for a repetition.
    fn may_be_repeated(&self) -> bool {
        self.status.is_ok() && self.purpose == Purpose::Changes
    }
}

/// The state of commits.
#[derive(Debug)]
pub(super) struct State {
    pub(super) writer: Writer,
    round: Option<Round>,
    retry: Retry,
    retry_at: Nanos,
    /// When to try to record the devices that failed a flush; `MAX`: not any more.
    tell_at: Nanos,
    /// How often the commit under way was repeated.
    repeats: u32,
    pub(super) now: Nanos,
    /// The last commit that brought the cache to rest, or failed to, has ended.
    pub(super) has_rested: bool,
    /// Whether the metadata is still there.
    pub(super) witness: Witness,
    /// Why the metadata device did not take the last commit.
    pub(super) refusal: Option<String>,
}

/// The commits of a cache.
#[derive(Debug)]
pub(super) struct Commits {
    state: Mutex<State>,
    /// The last commit that is durable.
    durable: AtomicU64,
    /// The last one that failed.
    failed: AtomicU64,
}

impl Commits {
    pub(super) fn new(metadata: &dyn Disk, writer: Writer) -> Commits {
        let state = State {
            witness: Witness::new(metadata, &writer),
            writer,
            round: None,
            retry: Retry::default(),
            retry_at: 0,
            tell_at: 0,
            repeats: 0,
            now: 0,
            has_rested: false,
            refusal: None,
        };
        Commits { state: Mutex::new(state), durable: AtomicU64::new(0), failed: AtomicU64::new(0) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl State {
    /// Whether none is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.round.is_none()
    }

    /// The device that the commit under way waits for.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        let outstanding = self.round.as_ref()?.outstanding.into_iter();
        let devices = [waits::METADATA, waits::CACHE, waits::ORIGIN];
        outstanding.zip(devices).find_map(|(count, device)| (count > 0).then_some(device))
    }

    /// When to try again.
    pub(super) fn retry_at(&self) -> Option<Nanos> {
        self.retry.is_failing().then_some(self.retry_at)
    }

    /// When to try to record the devices that failed a flush, if there are any to be recorded.
    pub(super) fn tell_at(&self, now: Nanos) -> Option<Nanos> {
        let at = if self.is_idle() { self.tell_at } else { now + TELL_AGAIN_AFTER };
        (at < Nanos::MAX).then_some(at)
    }

    /// They may be recorded now, and once in a suspend.
    pub(super) fn may_tell(&mut self) {
        self.tell_at = 0;
    }
}

impl Cache {
    /// Checks the metadata device. Whether it has lost something, now or before.
    pub(super) fn has_lost_metadata(&self, state: &mut State) -> bool {
        if state.witness.look(&*self.metadata) {
            self.blocks().trouble.is_stuck = true;
        }
        state.witness.loss().is_some()
    }

    /// The failure of the metadata device, for people: a loss, or the reason why it did not take
    /// the last commit.
    pub(super) fn metadata_failure(&self, state: &State) -> Option<String> {
        let name = &self.metadata.limits().name;
        if let Some(loss) = state.witness.loss() {
            return Some(format!(
                "metadata device {name} failed: it {loss}; only `udm drain` can still save dirty \
                 data, by writing it back"
            ));
        }
        let refusal = state.refusal.as_ref()?;
        Some(format!(
            "metadata device {name} does not take commits: {refusal}; no new block is cached, and \
             writes that need a commit fail; udm retries, and `udm drain` can write dirty data back"
        ))
    }

    /// What became of a commit.
    pub(super) fn verdict(&self, round: u64) -> Verdict {
        let has_failed = self.commits.failed.load(Ordering::SeqCst) >= round;
        match self.commits.durable.load(Ordering::SeqCst) >= round {
            true => Verdict::Durable,
            false if has_failed => Verdict::Failed,
            false => Verdict::Open,
        }
    }

    /// Has a commit begin, now or when the present one has ended.
    pub(super) fn commit(&self, port: &mut Port) {
        let mut state = self.commits.lock();
        if state.is_idle() {
            self.begin_commit(&mut state, Purpose::Changes, port);
        }
    }

    /// Begins a commit, if there is anything to commit.
    pub(super) fn begin_commit(&self, state: &mut State, purpose: Purpose, port: &mut Port) {
        let mut blocks = self.blocks();
        if blocks.trouble.has_lost {
            return;
        }
        if purpose == Purpose::Rest {
            blocks.leave_unreadable();
            blocks.tidy(true);
        } else if blocks.changes.is_empty() && !blocks.is_mark_due() && !state.retry.is_failing() {
            return;
        }
        let slots = u64::from(blocks.slots.count());
        let changes = blocks.changes.take(slots);
        let picture = changes.picture(&blocks.slots);
        blocks.rounds += 1;
        let (number, doubts) = (blocks.rounds, blocks.trouble.doubts);
        let hints = (purpose == Purpose::Rest).then(|| hints(&blocks));
        let superblock = self.next_superblock(&state.writer, &blocks, hints.is_some());
        // The mark is relied on only while every superblock that may be there has it.
        blocks.trouble.is_untrusted &= superblock.is_untrusted;
        drop(blocks);
        if mutants::is(Mutant::MarkedEarly) {
            self.blocks().mark(picture.wanted());
        }
        let is_lost = self.has_lost_metadata(state);
        let prepared = prepare(&state.writer, superblock, &picture, hints.as_deref());
        let mut transaction = match prepared {
            Ok(transaction) if !is_lost => transaction,
            failed => {
                state.refusal = failed.err().map(|error| refusal_of(&error));
                return self.commit_failed(state, number, purpose, changes);
            }
        };
        let queue = transaction.take_blocks().into();
        state.round = Some(Round {
            number,
            purpose,
            phase: Phase::Blocks,
            transaction,
            queue,
            outstanding: [0; 3],
            status: Ok(()),
            changes,
            wanted: picture.wanted().to_vec(),
            marks: [0; 2],
            doubts,
        });
        self.go_on(state, port);
    }

    /// Begins a commit that only records the devices that failed a flush: no request waits for it.
    /// Returns whether this or another commit is under way.
    pub(super) fn begin_telling(&self, doubt: Doubt, now: Nanos, port: &mut Port) -> bool {
        let mut state = self.commits.lock();
        state.now = now;
        if !state.is_idle() || now < state.tell_at {
            return !state.is_idle();
        }
        let mut superblock = state.writer.superblock().clone();
        superblock.doubt = doubt;
        let is_lost = self.has_lost_metadata(&mut state);
        let prepared = state.writer.prepare(&Change::of_superblock(superblock)).ok();
        let Some(mut transaction) = prepared.filter(|_| !is_lost) else {
            // No server can read the metadata any more.
            state.tell_at = Nanos::MAX;
            return false;
        };
        let queue = transaction.take_blocks().into();
        state.round = Some(Round {
            number: 0,
            purpose: Purpose::Tell,
            phase: Phase::Blocks,
            transaction,
            queue,
            outstanding: [0; 3],
            status: Ok(()),
            changes: Changes::new(0, 0),
            wanted: Vec::new(),
            marks: [0; 2],
            doubts: 0,
        });
        self.go_on(&mut state, port);
        true
    }

    /// Such a commit has ended. `told`: the record of the medium; `None`: the commit failed.
    fn end_telling(&self, state: &mut State, told: Option<Doubt>, port: &mut Port) {
        let mut blocks = self.blocks();
        match told {
            Some(told) => blocks.trouble.told = told,
            None if self.orders.is_suspended() => state.tell_at = Nanos::MAX,
            None => state.tell_at = state.now.saturating_add(TELL_AGAIN_AFTER),
        }
        let is_urgent = blocks.changes.is_urgent();
        drop(blocks);
        self.events.work();
        if is_urgent {
            self.begin_commit(state, Purpose::Changes, port);
        }
    }

    /// The content of the superblock, except the fields that a writer sets.
    fn next_superblock(&self, writer: &Writer, blocks: &Blocks, has_hints: bool) -> Superblock {
        let mut superblock = writer.superblock().clone();
        superblock.put_flag(CLEAN_SHUTDOWN, true);
        // At rest, unless the origin may have lost data that its slots have.
        let trouble = &blocks.trouble;
        superblock.is_untrusted = match has_hints {
            true => trouble.is_untrusted && blocks.is_origin_in_doubt(),
            false => blocks.wants_mark(),
        };
        superblock.doubt = trouble.record();
        let (fields, stats) = (&mut superblock.fields, &blocks.stats);
        fields.read_hits.set(stats.read_hits as u32);
        fields.read_misses.set(stats.read_misses as u32);
        fields.write_hits.set(stats.write_hits as u32);
        fields.write_misses.set(stats.write_misses as u32);
        if has_hints {
            fields.hint_bytes.set(4);
            let version = blocks.policy.version();
            fields.policy_version.iter_mut().zip(version).for_each(|(to, from)| to.set(from));
            superblock.set_policy(self.plan.args.policy.word()).expect("a short name");
        }
        superblock
    }

    /// An I/O of the commit is back.
    pub(super) fn complete_commit(&self, io: DiskIo, port: &mut Port) {
        let mut state = self.commits.lock();
        let round = state.round.as_mut().expect("a commit is under way");
        let own = io.token >> OWN_SHIFT & 3;
        round.outstanding[own as usize] -= 1;
        self.note_ended();
        match own {
            OWN_CACHE => self.cache.flushed(round.marks[0], io.result),
            OWN_ORIGIN => self.origin.flushed(round.marks[1], io.result),
            _ => {}
        }
        round.status = round.status.and(io.result);
        match (own, io.result) {
            (OWN_CACHE, Err(_)) => self.lose(),
            (OWN_ORIGIN, Err(_)) => self.doubt(),
            (_, Err(status)) if round.purpose != Purpose::Tell => {
                let op = if io.op == Op::Flush { "flush" } else { "write" };
                state.refusal = Some(format!("a {op} of metadata failed ({status})"));
            }
            _ => {}
        }
        self.go_on(&mut state, port);
    }

    /// Emits what comes next of the commit; ends it.
    fn go_on(&self, state: &mut State, port: &mut Port) {
        let is_settled = |round: &Round| round.phase == Phase::Settling && round.is_quiet();
        let is_lost = state.round.as_ref().is_some_and(is_settled) && self.has_lost_metadata(state);
        let may_repeat = state.repeats < REPEATS_MAX;
        let round = state.round.as_mut().expect("a commit is under way");
        if is_lost {
            round.status = Err(Status::Io);
        }
        if round.phase == Phase::Blocks && round.status.is_ok() {
            while (round.outstanding[0] as usize) < DEPTH_MAX
                && let Some((address, buffer)) = round.queue.pop_front()
            {
                let at = address * BLOCK_BYTES as u64;
                let io = DiskIo::new(&self.metadata, Op::Write, at, buffer, TOKEN_COMMIT);
                port.ios.push_back(io);
                round.outstanding[0] += 1;
            }
        }
        if !round.is_quiet() {
            return;
        }
        if round.phase == Phase::Settling && round.changes.needs_data() {
            // A good flush may follow a failed one that has lost data of this commit.
            let trouble = self.blocks().trouble;
            let is_doubtful =
                trouble.doubts != round.doubts && !mutants::is(Mutant::DoubtForgotten);
            if is_doubtful && !trouble.has_lost && may_repeat && round.may_be_repeated() {
                return self.repeat(state, port);
            }
            if is_doubtful || trouble.has_lost {
                round.status = Err(Status::Io);
            }
        }
        if round.status.is_err() {
            return self.end_failed(state, port);
        }
        match round.phase {
            Phase::Blocks if mutants::is(Mutant::SuperblockEarly) => {
                self.write_superblock(round, port);
            }
            Phase::Blocks => self.settle(round, port),
            Phase::Settling => self.write_superblock(round, port),
            Phase::Superblock => {
                round.phase = Phase::Last;
                round.outstanding[0] = 1;
                port.ios.push_back(DiskIo::bare(&self.metadata, Op::Flush, 0, 0, TOKEN_COMMIT));
            }
            Phase::Last => self.end_good(state, port),
        }
    }

    /// Flushes the metadata device, and those whose data the transaction names.
    fn settle(&self, round: &mut Round, port: &mut Port) {
        round.phase = Phase::Settling;
        round.outstanding[0] = 1;
        port.ios.push_back(DiskIo::bare(&self.metadata, Op::Flush, 0, 0, TOKEN_COMMIT));
        if !round.changes.needs_data() {
            return;
        }
        for (nth, own, mutant) in [
            (0, OWN_CACHE, Mutant::CommittedUnflushedCache),
            (1, OWN_ORIGIN, Mutant::CommittedUnflushedOrigin),
        ] {
            let side = [&self.cache, &self.origin][nth];
            if side.owes_flush() && !mutants::is(mutant) {
                round.marks[nth] = side.mark();
                round.outstanding[own as usize] += 1;
                port.ios.push_back(side.flush(TOKEN_COMMIT | own << OWN_SHIFT));
            }
        }
    }

    fn write_superblock(&self, round: &mut Round, port: &mut Port) {
        round.phase = Phase::Superblock;
        round.outstanding[0] = 1;
        let copy = Buffer::from_bytes(round.transaction.superblock().as_slice());
        port.ios.push_back(DiskIo::new(&self.metadata, Op::Write, 0, copy, TOKEN_COMMIT));
    }

    /// The commit is durable.
    fn end_good(&self, state: &mut State, port: &mut Port) {
        let Round { number, purpose, transaction, changes, wanted, .. } =
            state.round.take().expect("a commit is under way");
        state.writer.committed(transaction);
        state.witness = Witness::new(&*self.metadata, &state.writer);
        if purpose == Purpose::Tell {
            let told = state.writer.superblock().doubt;
            return self.end_telling(state, Some(told), port);
        }
        state.retry.succeeded();
        state.repeats = 0;
        state.refusal = None;
        state.has_rested |= purpose == Purpose::Rest;
        if mutants::is(Mutant::CommitToldEarly) {
            self.events.room();
        }
        let mut blocks = self.blocks();
        blocks.trouble.is_stuck = blocks.trouble.has_lost;
        blocks.trouble.is_untrusted = state.writer.superblock().is_untrusted;
        blocks.trouble.told = state.writer.superblock().doubt;
        blocks.committed(&changes, &wanted);
        self.commits.durable.store(number, Ordering::SeqCst);
        let is_urgent = blocks.changes.is_urgent();
        drop(blocks);
        if !mutants::is(Mutant::CommitToldEarly) {
            self.events.room();
        }
        let frees = !changes.leaving.is_empty() || !changes.retired.is_empty();
        if frees || self.orders.is_suspended() {
            self.events.work();
        }
        if is_urgent {
            self.begin_commit(state, Purpose::Changes, port);
        }
    }

    /// Begins the commit under way again, with the present changes.
    fn repeat(&self, state: &mut State, port: &mut Port) {
        let Round { transaction, changes, .. } = state.round.take().expect("a commit is under way");
        state.writer.abandoned(transaction, Reached::Blocks);
        state.repeats += 1;
        let mut blocks = self.blocks();
        blocks.changes.put_back(changes);
        if !state.writer.is_in_doubt() {
            blocks.trouble.is_untrusted = state.writer.superblock().is_untrusted;
        }
        blocks.soil_doubted();
        drop(blocks);
        self.begin_commit(state, Purpose::Changes, port);
    }

    fn end_failed(&self, state: &mut State, port: &mut Port) {
        let Round { number, purpose, phase, transaction, changes, .. } =
            state.round.take().expect("a commit is under way");
        let reached = match phase {
            Phase::Blocks | Phase::Settling => Reached::Blocks,
            Phase::Superblock | Phase::Last if mutants::is(Mutant::AbandonedReused) => {
                Reached::Blocks
            }
            Phase::Superblock | Phase::Last => Reached::Superblock,
        };
        state.writer.abandoned(transaction, reached);
        if purpose == Purpose::Tell {
            return self.end_telling(state, None, port);
        }
        self.commit_failed(state, number, purpose, changes);
    }

    fn commit_failed(&self, state: &mut State, number: u64, purpose: Purpose, changes: Changes) {
        state.has_rested |= purpose == Purpose::Rest;
        state.retry_at = state.retry.pause_from(state.now);
        state.repeats = 0;
        let mut blocks = self.blocks();
        if !mutants::is(Mutant::FailedForgotten) {
            blocks.changes.put_back(changes);
        }
        if !state.writer.is_in_doubt() {
            blocks.trouble.is_untrusted = state.writer.superblock().is_untrusted;
        }
        if blocks.trouble.doubts > blocks.trouble.inherited {
            blocks.doubt();
        }
        blocks.trouble.is_stuck = true;
        self.commits.failed.store(number, Ordering::SeqCst);
        drop(blocks);
        self.counts.failed_commits.fetch_add(1, Ordering::Relaxed);
        // Those who wait fail; the background tries again.
        self.events.room();
        self.events.work();
    }
}

/// Why no transaction could be prepared, for people.
fn refusal_of(error: &Error) -> String {
    let text = error.to_string();
    match (error.kind(), text.strip_prefix("the metadata device is full: ")) {
        (Kind::NoSpace, Some(rest)) => format!(
            "it is full: {rest} (`udm cache dump`, and `udm cache restore` to a larger device, \
             move the metadata of a removed device)"
        ),
        _ => text,
    }
}

/// The policy's notes of all slots.
fn hints(blocks: &Blocks) -> Vec<u32> {
    let hint = |slot| match blocks.slots.block(slot) {
        Some(_) => blocks.policy.hint(slot),
        None => 0,
    };
    (0..blocks.slots.count()).map(hint).collect()
}

fn prepare(
    writer: &Writer,
    superblock: Superblock,
    picture: &Picture,
    hints: Option<&[u32]>,
) -> crate::error::Result<Transaction> {
    let is_first = superblock.version() == 1;
    let hints = hints.map_or(Next::Same, |hints| {
        let fill = Box::new(move |first: u64, into: &mut [u64]| {
            let values = hints[first as usize..].iter();
            into.iter_mut().zip(values).for_each(|(into, value)| *into = u64::from(*value));
        });
        Next::Elements { len: hints.len() as u64, changed: None, fill }
    });
    let change = Change {
        mappings: picture.next_mappings(),
        dirty: if is_first { Next::Same } else { picture.next_dirty() },
        hints,
        ..Change::of_superblock(superblock)
    };
    writer.prepare(&change)
}
