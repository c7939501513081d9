//! A model of a lazy file: the real pacer and flushes, over the test's own page cache and a
//! malicious disk that is slow, fails and gets stuck. Each action of the real threads is a step
//! here, and a seed decides the order of steps.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use proptest::prelude::*;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::flushes::Flushes;
use crate::disk::pacer::{BUDGET_BYTES_MIN, PAGE, Pacer, Step, Writer};
use crate::disk::{Disk, DiskIo, Effect, Fault, Ring, SimDisk};
use crate::error::Status;
use crate::prng::Prng;
use crate::sync::Arc;

/// Pages of each client, which no other client writes.
const OWN: u64 = 400;
/// Pages of a write.
const PAGES: u64 = 16;
const STEPS: usize = 1500;
/// Steps after the last fault within which all I/O has to end.
const PATIENCE: usize = 60_000;

/// A write: whose, and which pages.
#[derive(Clone, Debug)]
struct Write {
    client: usize,
    pages: Range<u64>,
    begun: u64,
}

/// The pages and versions that a client believes durable when a flush succeeds.
type Believed = BTreeMap<u64, u64>;

/// A flush that was asked for.
#[derive(Debug)]
struct Asked {
    client: usize,
    covers: Believed,
}

/// The kernel's part of a flush.
#[derive(Debug)]
struct Call {
    asked: Asked,
    /// Pages that are not out yet.
    left: BTreeSet<u64>,
    is_sent: bool,
}

#[derive(Debug, Default)]
struct Client {
    life: Arc<()>,
    in_flight: usize,
    flushing: usize,
    ended: Believed,
    /// Flushes that failed, and the version up to which the client knows that all may be lost.
    failed: usize,
    doubted: u64,
}

struct Fixture {
    pacer: Pacer<Write>,
    file: u32,
    flushes: Flushes<Asked>,
    sim: Arc<SimDisk>,
    ring: Ring,
    clients: Vec<Client>,
    copying: Vec<Write>,
    dirty: BTreeMap<u64, u64>,
    /// Under write-out: versions, and for which batch.
    out: BTreeMap<u64, (u64, u64)>,
    call: Option<Call>,
    /// The kernel owes the next flush an error.
    is_unreported: bool,
    version: u64,
    wrong: Vec<String>,
    prng: Prng,
}

/// The token of a flush; those of write-outs are pages.
const FLUSH: u64 = u64::MAX;

impl Fixture {
    fn new(clients: usize, seed: u64) -> Fixture {
        let mut pacer = Pacer::new();
        let sim = Arc::new(SimDisk::new(clients as u64 * OWN * PAGE, 512));
        sim.hold(true);
        sim.seed(seed);
        Fixture {
            file: pacer.open(BUDGET_BYTES_MIN),
            pacer,
            flushes: Flushes::default(),
            sim,
            ring: Ring::without_kernel(),
            clients: (0..clients).map(|_| Client::default()).collect(),
            copying: Vec::new(),
            dirty: BTreeMap::new(),
            out: BTreeMap::new(),
            call: None,
            is_unreported: false,
            version: 0,
            wrong: Vec::new(),
            prng: Prng::new(seed),
        }
    }

    fn step(&mut self, is_over: bool) {
        let client = self.prng.below(self.clients.len() as u64) as usize;
        match self.prng.below(16) {
            0..4 if !is_over => self.begin(client),
            4..8 => self.copy(),
            8..11 => self.background(),
            11 if !is_over => self.ask(client),
            _ => self.device(),
        }
        let usage = self.pacer.usage();
        let held = usage.dirty + usage.under_write_out + usage.reserved;
        let unclean = (self.dirty.len() + self.out.len()) as u64 * PAGE;
        if held > BUDGET_BYTES_MIN || unclean > usage.dirty + usage.under_write_out {
            self.wrong.push(format!("{unclean} bytes are unclean, {held} are held"));
        }
    }

    fn begin(&mut self, client: usize) {
        if self.clients[client].in_flight > 2 {
            return;
        }
        self.clients[client].in_flight += 1;
        let first = client as u64 * OWN + self.prng.below(OWN / PAGES) * PAGES;
        let life = Arc::downgrade(&self.clients[client].life);
        let begun = self.flushes.pending_errors.begin_write(client as u64, || life);
        let write = Write { client, pages: first..first + PAGES, begun };
        let writer = Writer { file: self.file, ring: client as u64 };
        let bytes = write.pages.start * PAGE..write.pages.end * PAGE;
        match self.pacer.try_hold(writer, bytes.clone()) {
            true => self.copying.push(write),
            false => self.pacer.wait(writer, bytes, write),
        }
    }

    /// A write is copied into the page cache. Pages in write-out do not change.
    fn copy(&mut self) {
        self.copying.extend(self.pacer.take_admitted().into_iter().map(|(_, write)| write));
        let is_still = |write: &Write| self.out.range(write.pages.clone()).next().is_none();
        let Some(place) = self.copying.iter().position(is_still) else { return };
        let Write { client, pages, begun } = self.copying.remove(place);
        for page in pages.clone() {
            self.version += 1;
            self.dirty.insert(page, self.version);
            self.clients[client].ended.insert(page, self.version);
        }
        self.clients[client].in_flight -= 1;
        self.flushes.pending_errors.end_write(client as u64, begun);
        let writer = Writer { file: self.file, ring: client as u64 };
        self.pacer.written(writer, pages.start * PAGE..pages.end * PAGE);
    }

    /// A step of the write-out thread.
    fn background(&mut self) {
        match self.pacer.step(self.file).expect("the file is open") {
            Step::Start { batch, runs } => {
                for page in runs.iter().flat_map(|run| run.start / PAGE..run.end / PAGE) {
                    self.write_out(page, batch);
                }
            }
            Step::Wait { batch } => {
                if !self.out.values().any(|(_, other)| *other == batch) {
                    self.pacer.ended(self.file, batch);
                }
            }
            Step::Rest { is_dirty } => {
                if is_dirty && self.prng.one_in(4) {
                    self.pacer.idle(self.file);
                }
            }
        }
    }

    fn write_out(&mut self, page: u64, batch: u64) {
        match (self.dirty.remove(&page), self.out.get_mut(&page)) {
            (Some(version), None) => {
                self.out.insert(page, (version, batch));
                let mut buffer = Buffer::zeroed(PAGE as usize);
                buffer.as_mut_slice()[..8].copy_from_slice(&version.to_le_bytes());
                self.start(Op::Write, page * PAGE, buffer, page);
            }
            // A flush had begun it.
            (_, Some((_, of))) => *of = batch,
            (None, None) => {}
        }
    }

    fn start(&mut self, op: Op, offset: u64, buffer: Buffer, token: u64) {
        let disk: Arc<dyn Disk> = self.sim.clone();
        disk.start(DiskIo::new(&disk, op, offset, buffer, token), &mut self.ring);
    }

    fn ask(&mut self, client: usize) {
        if self.clients[client].flushing > 1 {
            return;
        }
        self.clients[client].flushing += 1;
        let asked = Asked { client, covers: self.clients[client].ended.clone() };
        match self.flushes.try_lead(client as u64) {
            true => self.begin_call(asked),
            false => self.flushes.wait(client as u64, asked),
        }
    }

    /// The kernel begins to write all out.
    fn begin_call(&mut self, asked: Asked) {
        let dirty: Vec<u64> = self.dirty.keys().copied().collect();
        dirty.into_iter().for_each(|page| self.write_out(page, 0));
        let left = self.out.keys().copied().collect();
        self.call = Some(Call { asked, left, is_sent: false });
    }

    fn device(&mut self) {
        if let Some(call) = self.call.as_mut().filter(|call| call.left.is_empty() && !call.is_sent)
        {
            call.is_sent = true;
            self.start(Op::Flush, 0, Buffer::empty(), FLUSH);
        }
        for _ in 0..=self.prng.below(32) {
            self.sim.step(&mut self.ring, &mut self.prng);
        }
        while let Some(io) = self.ring.pop_completed() {
            match io.token {
                FLUSH => self.end_call(io.result),
                page => self.end_write_out(page, io.result),
            }
        }
    }

    fn end_write_out(&mut self, page: u64, result: Result<(), Status>) {
        self.out.remove(&page);
        if let Some(call) = &mut self.call {
            call.left.remove(&page);
        }
        if result.is_err() {
            // The kernel marks the page clean, and reports the error to the write-out and to one
            // flush.
            self.is_unreported = true;
            self.flushes.write_out_failed(self.clients.len() as u64);
        }
    }

    fn end_call(&mut self, result: Result<(), Status>) {
        let Call { asked, .. } = self.call.take().expect("a flush was sent");
        let is_good = result.is_ok() && !std::mem::take(&mut self.is_unreported);
        let result = if is_good { Ok(()) } else { Err(Status::Io) };
        let ended = self.flushes.ended(result, self.clients.len() as u64);
        self.answer(&asked, ended.own);
        ended.others.iter().for_each(|(asked, result)| self.answer(asked, *result));
        self.pacer.idle(self.file);
        if let Some(asked) = ended.leader {
            self.begin_call(asked);
        }
    }

    fn answer(&mut self, asked: &Asked, result: Result<(), Status>) {
        let client = &mut self.clients[asked.client];
        client.flushing -= 1;
        if result.is_err() {
            client.failed += 1;
            client.doubted = self.version;
            return client.ended.clear();
        }
        let durable = self.sim.durable_image();
        for (page, version) in &asked.covers {
            let there = (page * PAGE) as usize;
            let there = u64::from_le_bytes(durable[there..there + 8].try_into().unwrap());
            if *version > client.doubted && there < *version {
                self.wrong.push(format!("page {page} has {there}, {version} was flushed"));
            }
        }
    }

    /// Devices are slow, fail, get stuck, and recover.
    fn trouble(&mut self) {
        let sim = self.sim.clone();
        let at = self.prng.below(self.clients.len() as u64 * OWN) * PAGE;
        let somewhere = at..at + 64 * PAGE;
        match self.prng.below(5) {
            0 => sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).within(somewhere)),
            1 => sim.inject(Fault::new(Effect::Stick).of(Op::Write).within(somewhere)),
            2 => sim.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1)),
            _ => sim.heal(),
        }
    }

    fn is_quiet(&self) -> bool {
        let is_idle = |client: &Client| client.in_flight + client.flushing == 0;
        let usage = self.pacer.usage();
        self.clients.iter().all(is_idle) && usage.dirty + usage.under_write_out == 0
    }

    /// The failures, if there are any.
    fn run(mut self) -> Vec<String> {
        for _ in 0..STEPS {
            if self.prng.one_in(100) {
                self.trouble();
            }
            self.step(false);
        }
        self.sim.heal();
        let is_over = (0..PATIENCE).any(|_| {
            self.step(true);
            self.is_quiet()
        });
        if !is_over {
            self.wrong.push(format!("a write waits indefinitely: {:?}", self.pacer.usage()));
        }
        if !self.dirty.is_empty() || !self.out.is_empty() {
            self.wrong.push("not all is written out".into());
        }
        self.last_flushes();
        // The clients got an error for all lost data.
        let image = self.sim.durable_image();
        for (page, version) in self.clients.iter().flat_map(|client| &client.ended) {
            let there = (*page * PAGE) as usize;
            let there = u64::from_le_bytes(image[there..there + 8].try_into().unwrap());
            if there != *version {
                self.wrong.push(format!("page {page} has {there} at the end, not {version}"));
            }
        }
        self.sim.abandon();
        self.wrong
    }

    /// Each client's pending error is returned once.
    fn last_flushes(&mut self) {
        for client in 0..self.clients.len() {
            let before = self.clients[client].failed;
            for _ in 0..4 {
                self.ask(client);
                while self.clients[client].flushing > 0 {
                    self.device();
                }
            }
            // The kernel's error for the next flush, and this client's pending error.
            let failed = self.clients[client].failed - before;
            if failed > 2 {
                self.wrong.push(format!("{failed} flushes of client {client} failed"));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_paced_file_keeps_its_budget_and_its_word(clients in 1_usize..4, seed in any::<u64>()) {
        let wrong = Fixture::new(clients, seed).run();
        prop_assert!(wrong.is_empty(), "{:?}", &wrong[..wrong.len().min(3)]);
    }
}

#[cfg(feature = "mutants")]
#[test]
fn flushes_that_hide_a_failure_are_found() {
    use crate::mutants::{Mutant, set};
    set(Some(Mutant::FailureSaidToOne));
    let is_found = (0..40).any(|seed| !Fixture::new(3, seed).run().is_empty());
    set(None);
    assert!(is_found);
}
