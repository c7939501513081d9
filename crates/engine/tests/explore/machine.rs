//! A server with its devices, driven through a program on one thread; all events go to a trace.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, Extent, Ring};
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::target::Port;
use udm::topology::Topology;
use udm::units::{Nanos, SECOND};

use crate::background::Background;
use crate::elsewhere;
use crate::judge::is_torn_format;
use crate::model::{Model, ORIGIN_BYTES, SECTOR, SLOTS, slot_at};
use crate::program::Step;
use crate::sectors::{End, Sectors};
use crate::sim::SimMedium;
use crate::subject::{Devices, Kind, PassesBy, Subject, Who};
use crate::trace::{Ask, Event, Trace};

/// The origin as the engine knows it: limits, and holes where it has zeroes. Its I/O is carried
/// out by the driver; only an attach may flush it by itself.
#[derive(Debug)]
pub struct Origin {
    limits: DiskLimits,
    sim: Arc<SimMedium>,
    next_id: AtomicU32,
    holes: [AtomicBool; SLOTS],
}

/// Numbers of the flushes of attaches; the machine's own are far below.
const OWN_IDS: u32 = 1 << 31;

impl Origin {
    /// `sim` has the record.
    pub fn named(name: &str, sim: &Arc<SimMedium>) -> Arc<Origin> {
        let limits = DiskLimits {
            name: name.into(),
            size_bytes: ORIGIN_BYTES,
            block_bytes: 512,
            atomic_bytes: 512,
            has_discard: true,
            topology: Topology::default(),
            identity: name.into(),
            kernel_name: name.into(),
        };
        let holes = Default::default();
        Arc::new(Origin { limits, sim: sim.clone(), next_id: AtomicU32::new(OWN_IDS), holes })
    }

    /// `slot` has this content now.
    pub(crate) fn has(&self, slot: usize, stamp: u64) {
        self.holes[slot].store(stamp == 0, Ordering::Relaxed);
    }

    fn is_hole(&self, offset: u64) -> bool {
        slot_at(offset).is_some_and(|slot| self.holes[slot].load(Ordering::Relaxed))
    }
}

impl Disk for Origin {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if io.op == Op::Read {
            // A format reads the device to detect known content. There is none.
            return ring.finish(io, Ok(()));
        }
        assert!(io.op == Op::Flush, "the explorer carries out I/O itself");
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.sim.note(Event::OriginFlush(id));
        self.sim.note(Event::OriginDone(id, true));
        ring.finish(io, Ok(()));
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        let is_hole = self.is_hole(offset);
        let sectors = (offset..offset + len).step_by(SECTOR);
        let same = sectors.take_while(|at| self.is_hole(*at) == is_hole).count();
        ((same * SECTOR) as u64, if is_hole { Extent::Zeroes } else { Extent::Data })
    }
}

/// Devices, shared memory and their possible contents, with no server running.
#[derive(Clone, Debug)]
pub struct MachineState {
    pub image: Vec<u8>,
    /// Unflushed data of a disk.
    pub unflushed: Sectors,
    pub model: Model,
    /// What shared memory holds; empty when it was lost.
    pub shared: Vec<u64>,
    pub attaches: u64,
    /// How often the machine was started.
    pub boot: u64,
}

impl MachineState {
    pub fn blank(kind: &dyn Kind, salt: u64) -> MachineState {
        MachineState {
            image: vec![0; kind.device_bytes()],
            unflushed: Sectors::default(),
            model: Model::new(salt).forgetting(kind.passes_by() == PassesBy::Always),
            shared: Vec::new(),
            attaches: 0,
            boot: 0,
        }
    }

    /// An empty cache that was attached once.
    pub fn formatted(kind: &Arc<dyn Kind>, salt: u64) -> Result<MachineState, String> {
        let mut initial = MachineState::blank(&**kind, salt);
        let mut machine = Machine::new(kind, &initial, 0);
        machine.attach(Who::Server)?;
        machine.remove()?;
        initial.image = machine.devices.sim.image();
        initial.attaches = machine.attaches;
        initial.model.attached();
        Ok(initial)
    }
}

/// A memory whose words are as given; zeroes beyond.
pub fn shared_of(kind: &dyn Kind, words: &[u64]) -> SharedWords {
    let shared = SharedWords::private(kind.shared_words());
    for (word, value) in shared.words().iter().zip(words) {
        word.store(*value, std::sync::atomic::Ordering::SeqCst);
    }
    shared
}

/// What went wrong while the program ran.
pub type Outcome = Result<(), String>;

/// An I/O of a disk, or a request, that completes later.
type Ios = Vec<(u32, DiskIo)>;

pub struct Machine {
    pub(crate) kind: Arc<dyn Kind>,
    pub(crate) devices: Devices,
    pub trace: Arc<Mutex<Trace>>,
    /// The model as far as clients know it; the explorer builds its own from the trace.
    pub(crate) model: Model,
    pub(crate) subject: Option<Arc<dyn Subject>>,
    pub(crate) port: Port,
    pub(crate) now: Nanos,
    pub(crate) prng: Prng,
    pub(crate) attaches: u64,
    pub(crate) next_id: u32,
    /// The origin's content.
    pub(crate) visible: Vec<u64>,
    pub(crate) writes: Ios,
    /// Writes and flushes of the cache, where it is a disk.
    pub(crate) cache_ios: Ios,
    pub(crate) reads: Vec<DiskIo>,
    pub(crate) held_reads: Vec<DiskIo>,
    /// A client's read is being submitted.
    pub(crate) is_reading: bool,
    pub(crate) is_holding_writes: bool,
    pub(crate) is_holding_reads: bool,
    pub(crate) is_holding_cache: bool,
    pub(crate) is_holding_flushes: bool,
    pub(crate) failing: Option<(Op, u32)>,
    /// While requests are under way.
    pub(crate) has_origin_failed: bool,
    /// Requests went to the origin alone, or may have.
    has_passed_by: bool,
    pub(crate) failing_cache: Option<Op>,
    /// From then on, requests may fail.
    pub(crate) has_cache_failed: bool,
    /// Reads that are not awaited: the first slot, and the least that each must return.
    pub(crate) asked: HashMap<u32, (usize, Vec<usize>)>,
    /// Writes and flushes that are not awaited.
    pub(crate) posted: Vec<(u32, Ask)>,
    /// The requests of another client within the next step.
    pub(crate) arranged: Option<u32>,
    /// Calls for the background, of a target whose background is called.
    pub(crate) background: Background,
}

impl Machine {
    pub fn new(kind: &Arc<dyn Kind>, initial: &MachineState, seed: u64) -> Machine {
        let sim = Arc::new(SimMedium::new(initial.image.clone(), kind.ground()));
        for (sector, content) in initial.unflushed.visible() {
            sim.poke(sector as usize * SECTOR, content);
        }
        let trace = Arc::new(Mutex::new(Trace::default()));
        let shared = shared_of(&**kind, &initial.shared).in_boot(initial.boot);
        sim.record(trace.clone(), shared.clone());
        let slots = initial.model.origin.iter().take(SLOTS);
        let visible: Vec<u64> = slots.map(|slot| slot.visible().next().unwrap()).collect();
        let devices = Devices::new(&**kind, &sim, shared);
        visible.iter().enumerate().for_each(|(slot, stamp)| devices.origin.has(slot, *stamp));
        Machine {
            kind: kind.clone(),
            devices,
            trace,
            model: initial.model.clone(),
            subject: None,
            port: Port::new(0),
            now: 0,
            prng: Prng::new(seed),
            attaches: initial.attaches,
            next_id: 0,
            visible,
            writes: Vec::new(),
            cache_ios: Vec::new(),
            reads: Vec::new(),
            held_reads: Vec::new(),
            is_reading: false,
            is_holding_writes: false,
            is_holding_reads: false,
            is_holding_cache: false,
            is_holding_flushes: false,
            failing: None,
            has_origin_failed: false,
            has_passed_by: kind.passes_by() == PassesBy::Always,
            failing_cache: None,
            has_cache_failed: false,
            asked: HashMap::new(),
            posted: Vec::new(),
            arranged: None,
            background: Background::default(),
        }
    }

    pub(crate) fn note(&self, event: Event) {
        self.devices.sim.note(event);
    }

    /// Notes what the server says of the origin.
    pub(crate) fn claim(&self) {
        self.note(Event::Claim(self.target().is_origin_consistent()));
    }

    pub(crate) fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn target(&self) -> &dyn Subject {
        &**self.subject.as_ref().expect("the server runs")
    }

    /// Runs the program, attaching first.
    pub fn run(&mut self, program: &[Step]) -> Outcome {
        self.attach(Who::Server)?;
        for step in program {
            self.step(*step).map_err(|what| format!("{step:?}: {what}"))?;
            if !matches!(step, Step::Meanwhile { .. }) {
                self.end_arranged();
            }
        }
        self.is_holding_reads = false;
        self.release();
        self.end_posted()?;
        self.check_content()
    }

    fn step(&mut self, step: Step) -> Outcome {
        match step {
            Step::Write { first, count, fua } => {
                self.ask(Ask::Write { first, count, fua, is_zero: false }, true)
            }
            Step::Zero { first, count, fua } => {
                self.has_passed_by |= self.kind.passes_by() != PassesBy::Never;
                self.ask(Ask::Write { first, count, fua, is_zero: true }, true)
            }
            Step::Flush => self.ask(Ask::Flush, true),
            Step::Post { first, count, fua } => {
                self.ask(Ask::Write { first, count, fua, is_zero: false }, false)
            }
            Step::PostFlush => self.ask(Ask::Flush, false),
            Step::PostZero { first, count } => {
                self.has_passed_by |= self.kind.passes_by() != PassesBy::Never;
                self.ask(Ask::Write { first, count, fua: false, is_zero: true }, false)
            }
            Step::Meanwhile { first, count, fences } => self.arrange(first, count, fences),
            Step::Percent(percent) => self.percent(percent),
            Step::Message(word) => self.message(word),
            Step::Read { first, count } => self.read(first, count),
            Step::Bring(block) => self.bring(block, true),
            Step::Seek(block) => self.bring(block, false),
            Step::Begin(block) => self.begin_copy(block),
            Step::HoldReads => self.hold(true, false, false),
            Step::HoldWrites => self.hold(false, true, false),
            Step::HoldCache => self.hold(false, false, true),
            Step::HoldFlushes => {
                self.is_holding_flushes = true;
                Ok(())
            }
            Step::OneWrite | Step::LastWrite | Step::OneCache | Step::Release => self.let_go(step),
            Step::Tick(tenths) => {
                // As a real background does: it looks often.
                for passed in (0..tenths).step_by(5) {
                    self.tick((tenths - passed).min(5) * SECOND / 10);
                }
                self.collect()
            }
            Step::FailWrite => self.fail(Op::Write),
            Step::FailFlush => self.fail(Op::Flush),
            Step::FailCache(op) => {
                self.failing_cache = Some(op);
                Ok(())
            }
            Step::Drain => self.drain(),
            Step::Check => self.check_content(),
            Step::Remove => {
                self.remove()?;
                self.attach(Who::Server)
            }
            Step::Rest => self.rest(),
            Step::Kill => {
                self.kill();
                self.attach(Who::Server)?;
                self.take_stock()
            }
            Step::Reformat => {
                // A write that ends after the drain is dirty, and a formatter refuses it.
                self.end_posted()?;
                self.ask(Ask::Flush, true)?;
                self.drain()?;
                self.remove()?;
                self.attach(Who::Formatter)
            }
            Step::Kernel(what) => self.elsewhere(what),
        }
    }

    /// Some of the held I/O, or all of it, completes.
    fn let_go(&mut self, step: Step) -> Outcome {
        match step {
            Step::OneWrite => self.one_write(),
            Step::LastWrite => self.end_write(self.writes.len().saturating_sub(1)),
            Step::OneCache => self.one_cache_io(),
            _ => {
                self.is_holding_reads = false;
                self.release();
            }
        }
        self.settle();
        self.collect()
    }

    fn hold(&mut self, reads: bool, writes: bool, cache: bool) -> Outcome {
        self.is_holding_reads |= reads;
        self.is_holding_writes |= writes;
        self.is_holding_cache |= cache;
        Ok(())
    }

    fn fail(&mut self, op: Op) -> Outcome {
        self.failing = Some((op, 1));
        Ok(())
    }

    fn percent(&mut self, percent: u32) -> Outcome {
        let id = self.id();
        self.note(Event::Submit(id, Ask::Percent(percent)));
        let words = ["gc_percent".to_string(), percent.to_string()];
        self.target().message(&words).map_err(|error| error.to_string())?;
        self.note(Event::Ack(id));
        Ok(())
    }

    fn message(&mut self, word: &str) -> Outcome {
        self.has_passed_by |= word == "cleaner";
        let words: Vec<String> = word.split(' ').map(String::from).collect();
        let done = self.target().message(&words);
        self.settle();
        done.map(drop).or_else(|error| self.excused(error.to_string()))
    }

    /// An error may be a device's fault.
    pub(crate) fn excused(&self, what: String) -> Outcome {
        // A commit that the origin's failed flush fails also fails reads that wait for it.
        let is_origins = self.has_origin_failed && self.tells_later();
        if self.has_cache_failed || is_origins { Ok(()) } else { Err(what) }
    }

    /// Another server has the cache for a while.
    fn elsewhere(&mut self, what: elsewhere::What) -> Outcome {
        self.ask(Ask::Flush, true)?;
        if matches!(what, elsewhere::What::StaleKeys) {
            self.drain()?;
        }
        self.remove()?;
        let visible = self.visible.clone();
        let sim = &self.devices.sim;
        let done = self.kind.elsewhere(sim, what, &mut self.model, &visible);
        self.note(Event::Elsewhere(self.devices.sim.image(), done));
        self.attach(Who::Server)
    }

    fn attach(&mut self, who: Who) -> Outcome {
        self.attaches += 1;
        if who == Who::Formatter {
            self.note(Event::Unbound);
        }
        self.has_cache_failed = false;
        self.has_origin_failed = false;
        let mut subject = self.kind.open(self.devices.clone(), self.attaches, who);
        if self.model.is_formatting && subject.as_ref().is_err_and(|error| is_torn_format(error)) {
            subject = self.kind.open(self.devices.clone(), self.attaches, Who::Formatter);
        }
        self.subject = Some(subject.map_err(|error| format!("attach: {error}"))?.into());
        self.begin_background();
        self.note(Event::Attached);
        self.model.show();
        self.claim();
        Ok(())
    }

    fn remove(&mut self) -> Outcome {
        self.suspend()?;
        self.target().detach();
        self.forget();
        Ok(())
    }

    fn rest(&mut self) -> Outcome {
        self.suspend()?;
        let resumed = self.target().resume();
        self.settle();
        resumed.or_else(|error| self.excused(format!("resume: {error}")))
    }

    fn suspend(&mut self) -> Outcome {
        self.is_holding_reads = false;
        self.end_posted()?;
        let rested = self.target().suspend();
        self.release();
        rested.or_else(|error| self.excused(format!("suspend: {error}")))?;
        // The background works until it is idle.
        for _ in 0..400 {
            if self.target().is_idle() {
                break;
            }
            self.tick(SECOND / 10);
        }
        if !self.target().is_idle() {
            self.excused("no rest after suspend".into())?;
        }
        Ok(())
    }

    /// The process is gone; I/O in flight to the disks arrives or does not, and a flush of the
    /// origin has failed without a client to get the error.
    fn kill(&mut self) {
        for (id, io) in std::mem::take(&mut self.writes) {
            let is_good = self.prng.one_in(2);
            if self.has_passed_by && (io.op == Op::Flush || !is_good) {
                // If it failed without a report, writes that bypassed the cache would be lost, or
                // reappear at any time, and no server could detect or prevent that.
                self.note(Event::OriginGone(id));
                continue;
            }
            let arrives = is_good && matches!(io.op, Op::Write | Op::WriteZeroes);
            if arrives {
                self.arrive(&io);
            }
            self.note(Event::OriginDone(id, arrives));
        }
        for (id, mut io) in std::mem::take(&mut self.cache_ios) {
            let arrives = io.op != Op::Flush && self.prng.one_in(2);
            let end = if arrives { End::Good } else { End::Dropped };
            self.devices.ssds.of(&io).end(id, &mut io, end);
        }
        self.forget();
    }

    fn forget(&mut self) {
        self.subject = None;
        self.port = Port::new(0);
        self.reads.clear();
        self.held_reads.clear();
        self.writes.clear();
        self.cache_ios.clear();
        self.asked.clear();
        self.posted.clear();
        self.devices.sim.arrange(None);
        self.arranged = None;
        self.is_holding_reads = false;
        self.is_holding_writes = false;
        self.is_holding_cache = false;
        self.is_holding_flushes = false;
        self.failing_cache = None;
    }

    fn drain(&mut self) -> Outcome {
        self.release();
        self.target().set_draining(true);
        for _ in 0..400 {
            if self.target().dirty().bytes == 0 {
                self.target().set_draining(false);
                return self.collect();
            }
            self.tick(SECOND / 10);
        }
        let what = format!("drain makes no progress: {}", self.target().status());
        self.target().set_draining(false);
        self.collect()?;
        self.excused(what)
    }

    pub(crate) fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.subject.as_ref().unwrap().tick(self.now, &mut self.port);
        self.settle();
    }

    /// How often was attached.
    pub fn attaches(&self) -> u64 {
        self.attaches
    }
}
