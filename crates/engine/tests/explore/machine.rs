//! A server with its devices, driven through a program on one thread; everything goes to a trace.

use std::sync::{Arc, Mutex};

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::error::Status;
use udm::pcache::layout::Geometry;
use udm::pcache::{OpenOptions, Pcache, TableArgs, shared_words};
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::shm::SharedWords;
use udm::target::{Port, Target};
use udm::units::{Nanos, SECOND};

use crate::elsewhere;
use crate::model::{Model, ORIGIN_BYTES, SECTOR, SLOTS, fill, offset_of, slot_at, stamp_of};
use crate::program::Step;
use crate::trace::{Ask, Event, Trace};
use crate::twin::Twin;

pub const GEOMETRY: Geometry = Geometry { segment_bytes: 12288 + 4096, device_bytes_min: 0 };
pub const STRIPES: usize = 2;

/// What a history runs on.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub segments: u64,
    pub persistence: Persistence,
    pub table: &'static str,
}

impl Setup {
    pub fn device_bytes(&self) -> usize {
        (20480 + self.segments * GEOMETRY.segment_bytes) as usize
    }

    pub fn args(&self) -> TableArgs {
        let words: Vec<&str> = self.table.split_whitespace().collect();
        TableArgs::parse(&words).map_err(|error| error.error).unwrap()
    }
}

/// The origin as the engine knows it: limits. Its I/O is carried out by whoever drives.
#[derive(Debug)]
pub struct Origin(DiskLimits);

impl Origin {
    pub fn named(name: &str) -> Arc<Origin> {
        Arc::new(Origin(DiskLimits {
            name: name.into(),
            size_bytes: ORIGIN_BYTES,
            block_bytes: 512,
            has_discard: true,
            identity: name.into(),
            kernel_name: name.into(),
        }))
    }
}

impl Disk for Origin {
    fn limits(&self) -> &DiskLimits {
        &self.0
    }

    fn start(&self, _: DiskIo, _: &mut Ring) {
        unreachable!("the explorer carries out I/O itself");
    }
}

/// Devices, shared memory and what may be found on them, with no server running.
#[derive(Clone, Debug)]
pub struct Scene {
    pub image: Vec<u8>,
    pub model: Model,
    /// What shared memory holds; empty when it was lost.
    pub shared: Vec<u64>,
    pub attaches: u64,
}

impl Scene {
    pub fn blank(setup: &Setup, salt: u64) -> Scene {
        let image = vec![0; setup.device_bytes()];
        Scene { image, model: Model::new(salt), shared: Vec::new(), attaches: 0 }
    }
}

impl Scene {
    /// An empty cache that was attached once.
    pub fn formatted(setup: &Setup, salt: u64) -> Result<Scene, String> {
        let mut scene = Scene::blank(setup, salt);
        let mut machine = Machine::new(*setup, &scene, 0);
        machine.attach(false)?;
        machine.remove()?;
        scene.image = machine.twin.image();
        scene.attaches = machine.attaches;
        scene.model.attached();
        Ok(scene)
    }
}

/// A memory whose words are as given; zeroes beyond.
pub fn shared_of(words: &[u64]) -> SharedWords {
    let shared = SharedWords::private(shared_words(STRIPES));
    for (word, value) in shared.words().iter().zip(words) {
        word.store(*value, std::sync::atomic::Ordering::SeqCst);
    }
    shared
}

pub fn options(attaches: u64, force_format: bool) -> OpenOptions {
    let attach_id = attaches.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 1;
    OpenOptions { force_format, geometry: GEOMETRY, stripes: STRIPES, attach_id }
}

/// The token of reads that nobody waits for.
const HELD: u64 = 1;

/// What went wrong while the program ran.
pub type Outcome = Result<(), String>;

pub struct Machine {
    setup: Setup,
    twin: Arc<Twin>,
    origin: Arc<Origin>,
    shared: SharedWords,
    pub trace: Arc<Mutex<Trace>>,
    /// The model as far as clients know it; the explorer builds its own from the trace.
    model: Model,
    pcache: Option<Pcache>,
    port: Port,
    now: Nanos,
    prng: Prng,
    attaches: u64,
    next_id: u32,
    /// What the origin shows.
    visible: Vec<u64>,
    writes: Vec<(u32, DiskIo)>,
    reads: Vec<DiskIo>,
    is_holding_writes: bool,
    is_holding_reads: bool,
    failing: Option<(Op, u32)>,
}

impl Machine {
    pub fn new(setup: Setup, scene: &Scene, seed: u64) -> Machine {
        let twin = Arc::new(Twin::new(scene.image.clone(), setup.persistence));
        let trace = Arc::new(Mutex::new(Trace::default()));
        let shared = shared_of(&scene.shared);
        twin.record(trace.clone(), shared.clone());
        let visible =
            (0..SLOTS).map(|slot| scene.model.origin[slot].visible().next().unwrap()).collect();
        Machine {
            setup,
            twin,
            origin: Origin::named("origin"),
            shared,
            trace,
            model: scene.model.clone(),
            pcache: None,
            port: Port::new(0),
            now: 0,
            prng: Prng::new(seed),
            attaches: scene.attaches,
            next_id: 0,
            visible,
            writes: Vec::new(),
            reads: Vec::new(),
            is_holding_writes: false,
            is_holding_reads: false,
            failing: None,
        }
    }

    fn note(&self, event: Event) {
        self.twin.note_shared();
        self.trace.lock().unwrap().push(event);
    }

    /// Notes what the server says of the origin.
    fn claim(&self) {
        self.note(Event::Claim(self.target().is_origin_consistent()));
    }

    fn id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    fn target(&self) -> &Pcache {
        self.pcache.as_ref().expect("the server runs")
    }

    /// Runs the program, attaching first.
    pub fn run(&mut self, program: &[Step]) -> Outcome {
        self.attach(false)?;
        for step in program {
            self.step(*step).map_err(|what| format!("{step:?}: {what}"))?;
        }
        self.is_holding_reads = false;
        self.release();
        self.check_content()
    }

    fn step(&mut self, step: Step) -> Outcome {
        match step {
            Step::Write { first, count, fua } => {
                self.ask(Ask::Write { first, count, fua, is_zero: false })
            }
            Step::Zero { first, count, fua } => {
                self.ask(Ask::Write { first, count, fua, is_zero: true })
            }
            Step::Flush => self.ask(Ask::Flush),
            Step::Percent(percent) => {
                let id = self.id();
                self.note(Event::Submit(id, Ask::Percent(percent)));
                let words = ["gc_percent".to_string(), percent.to_string()];
                self.target().message(&words).map_err(|error| error.to_string())?;
                self.note(Event::Ack(id));
                Ok(())
            }
            Step::Read { first, count } => self.read(first, count),
            Step::HoldReads => {
                self.is_holding_reads = true;
                Ok(())
            }
            Step::HoldWrites => {
                self.is_holding_writes = true;
                Ok(())
            }
            Step::OneWrite => {
                self.one_write();
                self.settle();
                Ok(())
            }
            Step::Release => {
                self.is_holding_reads = false;
                self.release();
                Ok(())
            }
            Step::Tick(tenths) => {
                // As a real background does: it looks often.
                for passed in (0..tenths).step_by(5) {
                    self.tick((tenths - passed).min(5) * SECOND / 10);
                }
                Ok(())
            }
            Step::FailWrite => {
                self.failing = Some((Op::Write, 1));
                Ok(())
            }
            Step::FailFlush => {
                self.failing = Some((Op::Flush, 1));
                Ok(())
            }
            Step::Drain => self.drain(),
            Step::Check => self.check_content(),
            Step::Remove => {
                self.remove()?;
                self.attach(false)
            }
            Step::Kill => {
                self.kill();
                self.attach(false)
            }
            Step::Reformat => {
                self.ask(Ask::Flush)?;
                self.drain()?;
                self.remove()?;
                self.attach(true)
            }
            Step::Kernel(what) => self.elsewhere(what),
        }
    }

    /// Somebody else has the cache for a while.
    fn elsewhere(&mut self, what: elsewhere::What) -> Outcome {
        self.ask(Ask::Flush)?;
        if matches!(what, elsewhere::What::StaleKeys) {
            self.drain()?;
        }
        self.remove()?;
        let visible = self.visible.clone();
        let done = elsewhere::change(&self.twin, what, &mut self.model, &visible);
        self.note(Event::Elsewhere(self.twin.image(), done));
        self.attach(false)
    }

    fn attach(&mut self, force_format: bool) -> Outcome {
        self.attaches += 1;
        if force_format {
            self.note(Event::Unbound);
        }
        let pcache = Pcache::open(
            self.setup.args(),
            ORIGIN_BYTES,
            self.twin.clone(),
            self.origin.clone(),
            self.shared.clone(),
            &options(self.attaches, force_format),
        );
        self.pcache = Some(pcache.map_err(|error| format!("attach: {error}"))?);
        self.note(Event::Attached);
        self.claim();
        Ok(())
    }

    fn remove(&mut self) -> Outcome {
        self.is_holding_reads = false;
        self.release();
        self.target().suspend().map_err(|error| format!("suspend: {error}"))?;
        self.release();
        if !self.target().is_idle() {
            return Err("write-back goes on after suspend".into());
        }
        self.forget();
        Ok(())
    }

    /// The process is gone; what was on its way to the origin arrives or does not.
    fn kill(&mut self) {
        for (id, io) in std::mem::take(&mut self.writes) {
            let is_good = self.prng.one_in(2);
            if io.op == Op::Write && is_good {
                self.arrive(&io);
            }
            self.note(Event::OriginDone(id, is_good && io.op == Op::Write));
        }
        self.forget();
    }

    fn forget(&mut self) {
        self.pcache = None;
        self.port = Port::new(0);
        self.reads.clear();
        self.writes.clear();
        self.is_holding_reads = false;
        self.is_holding_writes = false;
    }

    fn ask(&mut self, ask: Ask) -> Outcome {
        let id = self.id();
        let bio = match ask {
            Ask::Write { first, count, fua, is_zero: true } => {
                let len = (count * SECTOR) as u64;
                let op = if self.prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                Bio::bare(op, offset_of(first), len, fua, 0)
            }
            Ask::Write { first, count, fua, .. } => {
                let mut buffer = Buffer::zeroed(count * SECTOR);
                for (nth, sector) in buffer.as_mut_slice().chunks_mut(SECTOR).enumerate() {
                    fill(sector, self.model.next_stamp(first + nth, false));
                }
                Bio::write(offset_of(first), buffer, fua, 0)
            }
            _ => Bio::flush(0),
        };
        self.note(Event::Submit(id, ask));
        self.model.submit(id, ask);
        let done = self.serve(bio)?;
        done.status.map_err(|status| format!("request failed: {status}"))?;
        self.note(Event::Ack(id));
        self.model.ack(id);
        Ok(())
    }

    /// Submits a bio and waits for it, with background ticks while it is parked.
    fn serve(&mut self, bio: Bio) -> Result<Bio, String> {
        let mut bio = Some(bio);
        for _ in 0..400 {
            if let Some(bio) = bio.take() {
                self.pcache.as_ref().unwrap().submit(bio, &mut self.port);
            }
            self.settle();
            while let Some(done) = self.port.done.pop_front() {
                if done.token != HELD {
                    return Ok(done);
                }
            }
            // Waiting ends only if the origin is let go on.
            self.release();
            self.tick(SECOND / 10);
            bio = self.port.parked.pop_front();
        }
        Err(format!("a request waits for ever: {}", self.target().status()))
    }

    fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.pcache.as_ref().unwrap().tick(self.now, &mut self.port);
        self.settle();
    }

    /// Starts what the target wants; completes it unless it is held.
    fn settle(&mut self) {
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                self.start(io);
            }
            if !self.is_holding_reads && !self.reads.is_empty() {
                let io = self.reads.remove(0);
                self.finish_read(io);
            } else if self.is_holding_writes || !self.one_write() {
                return;
            }
        }
    }

    fn start(&mut self, io: DiskIo) {
        match io.op {
            Op::Read => self.reads.push(io),
            Op::Write => {
                self.claim();
                let id = self.id();
                self.note(Event::OriginWrite(id, contents(&io)));
                self.writes.push((id, io));
            }
            Op::Flush => {
                let id = self.id();
                self.note(Event::OriginFlush(id));
                self.writes.push((id, io));
            }
            Op::Discard | Op::WriteZeroes => unreachable!("runs are too short for {:?}", io.op),
        }
    }

    fn finish_read(&mut self, mut io: DiskIo) {
        for (nth, sector) in io.buffer.as_mut_slice().chunks_mut(SECTOR).enumerate() {
            let slot = slot_at(io.offset + (nth * SECTOR) as u64);
            fill(sector, slot.map_or(0, |slot| self.visible[slot]));
        }
        self.pcache.as_ref().unwrap().complete(io, &mut self.port);
    }

    /// Completes any one write or flush of the origin.
    fn one_write(&mut self) -> bool {
        if self.writes.is_empty() {
            return false;
        }
        let nth = self.prng.below(self.writes.len() as u64) as usize;
        let (id, mut io) = self.writes.remove(nth);
        let fails = match &mut self.failing {
            Some((op, left)) if *op == io.op => {
                *left -= 1;
                if *left == 0 {
                    self.failing = None;
                }
                true
            }
            _ => false,
        };
        if fails {
            io.result = Err(Status::Io);
        } else if io.op == Op::Write {
            self.arrive(&io);
        }
        self.note(Event::OriginDone(id, !fails));
        self.pcache.as_ref().unwrap().complete(io, &mut self.port);
        self.claim();
        true
    }

    fn arrive(&mut self, io: &DiskIo) {
        for (slot, stamp) in contents(io) {
            if slot < SLOTS {
                self.visible[slot] = stamp;
            }
        }
    }

    fn release(&mut self) {
        self.is_holding_writes = false;
        self.settle();
    }

    fn read(&mut self, first: usize, count: usize) -> Outcome {
        let token = if self.is_holding_reads { HELD } else { 0 };
        let bio = Bio::read(offset_of(first), Buffer::zeroed(count * SECTOR), token);
        if self.is_holding_reads {
            self.pcache.as_ref().unwrap().submit(bio, &mut self.port);
            self.settle();
            return Ok(());
        }
        let done = self.serve(bio)?;
        done.status.map_err(|status| format!("read failed: {status}"))?;
        for (nth, sector) in done.buffer.as_slice().chunks(SECTOR).enumerate() {
            let slot = first + nth;
            let wanted = self.model.versions[slot][self.model.done[slot]];
            if stamp_of(sector) != Some(wanted) {
                return Err(format!("a live read of slot {slot} does not show the last write"));
            }
        }
        Ok(())
    }

    fn check_content(&mut self) -> Outcome {
        self.is_holding_reads = false;
        self.settle();
        self.read(0, 12)?;
        self.read(12, 8)
    }

    fn drain(&mut self) -> Outcome {
        self.release();
        self.target().set_draining(true);
        for _ in 0..400 {
            if self.target().dirty().bytes == 0 {
                self.target().set_draining(false);
                return Ok(());
            }
            self.tick(SECOND / 10);
        }
        Err(format!("drain makes no progress: {}", self.target().status()))
    }

    /// Shared memory as it is now, and how often was attached.
    pub fn attaches(&self) -> u64 {
        self.attaches
    }
}

/// What a write carries: slot (or a number beyond, for foreign sectors) and content.
pub fn contents(io: &DiskIo) -> Vec<(usize, u64)> {
    let sectors = io.buffer.as_slice().chunks(SECTOR).enumerate();
    sectors
        .map(|(nth, sector)| {
            let slot = slot_at(io.offset + (nth * SECTOR) as u64).unwrap_or(usize::MAX);
            (slot, stamp_of(sector).unwrap_or(u64::MAX))
        })
        .collect()
}
