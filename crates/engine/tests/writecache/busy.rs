//! Random histories of a small device, nearly all of which is cached and written again and again,
//! while its origin is slow and fails now and then: slots are reused all the time. Compared with an
//! array of sectors, as the histories of model.rs.

use std::cell::Cell;
use std::rc::Rc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::prng::Prng;
use udm::target::{Port, Target};
use udm::units::{KIB, MIB, SECOND};

use crate::fixture::Fixture;
use crate::sectors::{Model, Requests, SECTOR};

const OPTIONS: [&str; 5] = [
    "",
    "autocommit_blocks 3",
    "high_watermark 100 low_watermark 100",
    "high_watermark 20 low_watermark 20",
    "max_age 500",
];
const STEPS: u64 = 1000;

/// A fixture, and its expected data.
struct Busy {
    prng: Prng,
    fixture: Fixture,
    model: Model,
    sectors: usize,
    /// Sectors of a block.
    block: usize,
    /// This many writes of the origin fail.
    failures: Rc<Cell<u64>>,
}

fn is_write_back(io: &DiskIo) -> bool {
    io.op == Op::Write && io.disk.limits().name == "origin"
}

impl Busy {
    fn new(seed: u64) -> Busy {
        let mut prng = Prng::new(seed);
        let mode = ["p", "s"][prng.below(2) as usize];
        let block_bytes = 512 << prng.below(4);
        let options = OPTIONS[prng.below(OPTIONS.len() as u64) as usize];
        let pause = if mode == "s" && prng.one_in(2) { " pause_writeback 0" } else { "" };
        let words = format!("{options}{pause}");
        let count = words.split_whitespace().count();
        let table = format!("{mode} O C {block_bytes} {count} {words}");
        let origin_bytes = (32 << prng.below(4)) * KIB;
        let mut fixture = Fixture::new(&table, (24 << prng.below(3)) * KIB, origin_bytes);
        let failures = Rc::new(Cell::new(0_u64));
        let left = Rc::clone(&failures);
        fixture.refuses = Box::new(move |io| {
            let fails = is_write_back(io) && left.get() > 0;
            left.set(left.get() - u64::from(fails));
            fails
        });
        fixture.open();
        let sectors = origin_bytes as usize / SECTOR;
        let block = block_bytes as usize / SECTOR;
        Busy { prng, fixture, model: Model::new(sectors), sectors, block, failures }
    }

    /// Like [`Fixture::run`], but a bio does not wait for held I/O, and may wait for longer:
    /// write-back rests after failures.
    fn run(&mut self, bio: Bio) -> Bio {
        self.fixture.submit(bio);
        for _ in 0..1000 {
            if let Some(done) = self.fixture.done() {
                return done;
            }
            self.fixture.release();
            if let Some(done) = self.fixture.done() {
                return done;
            }
            self.fixture.tick(SECOND / 4);
            if let Some(parked) = self.fixture.port.parked.pop_front() {
                self.fixture.submit(parked);
            }
        }
        panic!("a bio waited indefinitely: {}", self.fixture.target().status());
    }

    fn request(&mut self, kind: u64, why: &str) {
        let requests = Requests { unit: self.block, units_max: [4, 24] };
        let bio = requests.next(kind, &mut self.prng, &mut self.model);
        let bio = self.run(bio);
        requests.end(&bio, &mut self.model, why);
    }

    fn event(&mut self, why: &str) {
        match self.prng.below(40) {
            0..8 => {
                self.run(Bio::flush(0)).status.unwrap();
                self.model.flushed(0..self.sectors);
            }
            8..22 => self.fixture.tick(SECOND * self.prng.below(3) / 2),
            22..29 => self.fixture.holds = Box::new(is_write_back),
            29..34 => self.failures.set(1 + self.prng.below(3)),
            34 => {
                self.fixture.release();
                self.fixture.remove();
                self.model.flushed(0..self.sectors);
                self.fixture.open();
            }
            35 | 36 => {
                self.fixture.kill();
                self.fixture.open();
            }
            37 => {
                self.fixture.power_cut(&mut self.prng);
                self.fixture.try_open(false).unwrap_or_else(|error| panic!("{why}: {error}"));
                let found = self.fixture.content();
                self.model.adopt(&found, why);
            }
            _ => self.drain(why),
        }
    }

    fn drain(&mut self, why: &str) {
        self.fixture.release();
        self.fixture.drain();
        let image = self.fixture.origin.image();
        assert!(image == self.model.current(0, self.sectors), "{why}: the drained origin");
    }
}

fn history(seed: u64) {
    let mut busy = Busy::new(seed);
    for step in 0..STEPS {
        let why = format!("seed {seed}, step {step}, {}", busy.fixture.table);
        if !busy.fixture.held.is_empty() && busy.prng.one_in(6) {
            busy.fixture.release();
        }
        match busy.prng.below(12) {
            kind @ 0..10 => busy.request(kind, &why),
            _ => busy.event(&why),
        }
    }
    let why = format!("seed {seed}, at the end");
    busy.fixture.release();
    assert!(busy.fixture.content() == busy.model.current(0, busy.sectors), "{why}");
    busy.drain(&why);
}

#[test]
fn busy_histories_keep_the_promises() {
    (0..60).for_each(history);
}

/// For `WRITECACHE_SECONDS`, from the seed `WRITECACHE_FROM`.
#[test]
#[ignore = "runs for a given time: scripts/soak.sh runs it"]
fn soak() {
    crate::sectors::soak("writecache", history);
}

/// Free slots in the reserves of threads count as free.
#[test]
fn free_slots_that_threads_have_reserved_limit_no_writer() {
    let mut fixture = Fixture::new("s O C 65536 0", 32 * MIB, 64 * MIB);
    fixture.open();
    for round in 0..3 {
        for port in 0..8 {
            fixture.port = Port::new(port);
            let at = (round * 8 + port as u64) * 64 * KIB;
            let bio = fixture.run(Bio::write(at, Buffer::zeroed(64 << 10), false, 0));
            assert_eq!(bio.status, Ok(()), "round {round}, port {port}");
        }
        fixture.tick(SECOND / 100);
    }
    assert_eq!(fixture.target().dirty().bytes, 24 * 64 * KIB);
}
