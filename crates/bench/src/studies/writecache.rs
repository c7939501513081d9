//! The writecache target: the cost of a write in mode `p` compared with the bare copy, by block
//! size and by the instructions that store it (the table of the published dm-writecache
//! measurement, but through the whole target), and in mode `s` compared with fio on the same file.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::device::Device;
use udm::disk::{Disk, Ring};
use udm::local::Local;
use udm::pmem::copy::{COPY_CLASSES, CopyPlan, Primitive};
use udm::pmem::dax::DaxPmem;
use udm::pmem::{Persistence, Pmem};
use udm::prng::Prng;
use udm::queue::Queue;
use udm::units::{GIB, MIB};
use udm::writecache::layout::{ENTRY_BYTES, SEQ_COUNT_AT, SUPERBLOCK_BYTES};

use crate::background::Background;
use crate::fio;
use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, need_tools, open_disk, open_pmem, ram_disk, write_out};
use crate::stats::{median, ratios};
use crate::targets::{Ground, forget, writecache};
use crate::unit::Unit;

const CACHE_BYTES: u64 = 512 * MIB;
const ORIGIN_BYTES: u64 = GIB;
/// Bytes of the device that are written to.
const SPAN: u64 = 128 * MIB;
/// Where bare data begins, after room for its entries.
const DATA_AT: u64 = 4 * MIB;
/// Operations timed together, and in one measure.
const BATCH: usize = 16;
const OPS: usize = 4096;
const BLOCK_SIZES: [usize; 4] = [512, 1024, 2048, 4096];
/// Requests in flight in mode `s`.
const DEPTH: u32 = 32;

/// The measurements of dm-writecache's author: MB/s of single copies, by size.
const PUBLISHED: [(&str, [f64; 4]); 2] = [
    ("movnti", [496.0, 642.0, 725.0, 744.0]),
    ("copy + clflushopt", [373.0, 688.0, 1100.0, 1200.0]),
];

/// Sorted by the compared quantity, round by round.
#[derive(Debug, Default)]
struct Rounds {
    copy: Vec<f64>,
    least: Vec<f64>,
    write: Vec<f64>,
    flushed: Vec<f64>,
    small_blocks: Vec<f64>,
    one: Vec<f64>,
    two: Vec<f64>,
    fio: Vec<f64>,
    ssd: Vec<f64>,
    fio_synced: Vec<f64>,
    ssd_synced: Vec<f64>,
    /// The same where the cache has all blocks.
    again: Vec<f64>,
    again_synced: Vec<f64>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    need_tools(&[("fio", "fio")])?;
    let rounds = setup.repeats(3, 7);
    let mut study = Study::new(
        "writecache",
        "the writecache target, in both modes",
        "Mode p: random writes of one block to a writecache of 512 MiB in memory, by block size \
         and by the instructions that store them, and the bare durable copy, alone and with the \
         entry and the counter that the format demands of a flush; nothing is written back \
         meanwhile. Mode s: random writes of 4 KiB to a writecache on a file with direct I/O, of \
         blocks that are new to it and of blocks that it has, and fio on the same file, in turns.",
    );
    study.fact("rounds", rounds.to_string());
    let plans = plans(setup)?;
    // By plan, by block size, by round: nanoseconds of a write.
    let mut times = vec![vec![Vec::new(); BLOCK_SIZES.len()]; plans.len()];
    let mut found = Rounds::default();
    let ssd = Ssd::new(setup)?;
    for round in 0..rounds {
        for (plan, (_, copies)) in plans.iter().enumerate() {
            for (size, bytes) in BLOCK_SIZES.into_iter().enumerate() {
                let fixture = Fixture::new(setup, bytes, *copies)?;
                times[plan][size].push(fixture.writes(round, bytes, false)?);
            }
        }
        memory_round(setup, round, &mut found)?;
        ssd.round(round, &mut found)?;
    }
    study.fact("file of mode s", ssd.describe());
    show(&mut study, &plans, &times);
    claims(&mut study, &found);
    Ok(study)
}

/// Ways to store: the calibrated one is the last.
fn plans(setup: &Setup) -> Result<Vec<(&'static str, CopyPlan)>> {
    let calibrated = open_pmem(&setup.places.memory.file("writecache-plan", CACHE_BYTES)?)?.plan();
    let mut plans = Vec::new();
    if Primitive::Movnti.is_available() {
        plans.push(("movnti", CopyPlan::only(Primitive::Movnti)));
    }
    if Primitive::Movnti.is_available() && Primitive::Clflushopt.is_available() {
        plans.push(("copy + clflushopt", CopyPlan::only(Primitive::Clflushopt)));
        // The kernel's changes at 768 bytes, between two of these sizes.
        let rule = |class: usize| match 32 << class {
            ..768 => Primitive::Movnti,
            _ => Primitive::Clflushopt,
        };
        plans.push((
            "dm-writecache's rule",
            CopyPlan::new(std::array::from_fn::<_, COPY_CLASSES, _>(rule)),
        ));
    }
    plans.push(("udm, calibrated", calibrated));
    Ok(plans)
}

/// A writecache in memory and its device.
struct Fixture {
    device: Arc<Device>,
}

impl Fixture {
    fn new(setup: &Setup, block_bytes: usize, plan: CopyPlan) -> Result<Fixture> {
        let mut pmem = open_pmem(&setup.places.memory.file("writecache-p", CACHE_BYTES)?)?;
        if pmem.medium().persistence == Persistence::Cpu {
            pmem.set_plan(plan);
        }
        let words = format!("{block_bytes} 4 high_watermark 100 low_watermark 100");
        let ground = Ground::Memory(Arc::new(pmem));
        let fixture = Fixture { device: writecache(&words, ram_disk(ORIGIN_BYTES), ground)? };
        // Every block gets its place, so that all memory was touched.
        fixture.fill()?;
        Ok(fixture)
    }

    fn fill(&self) -> Result<()> {
        let mut local = Local::without_kernel(&self.device)?;
        let mut buffer = Buffer::zeroed(64 << 10);
        for offset in (0..SPAN).step_by(buffer.len()) {
            buffer = carry_out(&mut local, Bio::write(offset, buffer, false, 0))?;
        }
        local.flush().ok().context("the flush failed")?;
        Ok(())
    }

    /// Random writes of `len` bytes: the median time of one, with a flush after each if asked for.
    fn writes(&self, seed: usize, len: usize, is_flushed: bool) -> Result<f64> {
        let mut caller = Caller::new(self, seed as u64, len)?;
        let mut times = Vec::with_capacity(OPS / BATCH);
        for _ in 0..OPS / BATCH {
            let start = Instant::now();
            for _ in 0..BATCH {
                caller.write(is_flushed)?;
            }
            times.push(nanos(start) / BATCH as f64);
        }
        Ok(median(&times))
    }

    /// Writes per microsecond of this many threads.
    fn rate(&self, threads: usize) -> Result<f64> {
        let gate = Barrier::new(threads);
        let spans: Vec<Result<f64>> = std::thread::scope(|scope| {
            let run = |thread: usize| {
                let gate = &gate;
                scope.spawn(move || {
                    let made = Caller::new(self, 50 + thread as u64, 4096);
                    gate.wait();
                    let mut caller = made?;
                    let start = Instant::now();
                    (0..OPS * 2).try_for_each(|_| caller.write(false))?;
                    Ok(nanos(start))
                })
            };
            let handles: Vec<_> = (0..threads).map(run).collect();
            handles.into_iter().map(|handle| handle.join().expect("no panic")).collect()
        });
        let spans = spans.into_iter().collect::<Result<Vec<f64>>>()?;
        Ok(spans.iter().map(|span| (OPS * 2) as f64 * 1000.0 / span).sum())
    }
}

/// A thread that writes to a fixture.
struct Caller {
    local: Local,
    prng: Prng,
    buffer: Option<Buffer>,
}

impl Caller {
    fn new(fixture: &Fixture, seed: u64, len: usize) -> Result<Caller> {
        let mut prng = Prng::new(seed);
        let mut buffer = Buffer::zeroed(len);
        prng.fill(buffer.as_mut_slice());
        let local = Local::without_kernel(&fixture.device)?;
        Ok(Caller { local, prng, buffer: Some(buffer) })
    }

    fn write(&mut self, is_flushed: bool) -> Result<()> {
        let buffer = self.buffer.take().context("a buffer got lost")?;
        let len = buffer.len() as u64;
        let offset = self.prng.below(SPAN / len) * len;
        self.buffer = Some(carry_out(&mut self.local, Bio::write(offset, buffer, false, 0))?);
        if is_flushed {
            carry_out(&mut self.local, Bio::flush(0))?;
        }
        Ok(())
    }
}

fn carry_out(local: &mut Local, bio: Bio) -> Result<Buffer> {
    local.submit(bio);
    let done = local.poll().context("a request in memory is done at once")?;
    ensure!(done.status.is_ok(), "a request failed: {:?}", done.status);
    Ok(done.buffer)
}

fn nanos(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64
}

/// Mode p at 4 KiB, compared with the bare copy; one thread and two.
fn memory_round(setup: &Setup, round: usize, found: &mut Rounds) -> Result<()> {
    let bare = open_pmem(&setup.places.memory.file("writecache-bare", CACHE_BYTES)?)?;
    found.copy.push(bare_stores(&bare, round, false)?);
    found.least.push(bare_stores(&bare, round, true)?);
    let fixture = Fixture::new(setup, 4096, bare.plan())?;
    found.write.push(fixture.writes(round, 4096, false)?);
    found.flushed.push(fixture.writes(round, 4096, true)?);
    found.one.push(fixture.rate(1)?);
    found.two.push(fixture.rate(2)?);
    drop(fixture);
    found.small_blocks.push(Fixture::new(setup, 512, bare.plan())?.writes(round, 4096, false)?);
    Ok(())
}

/// The same bytes to as many random places, each with its fence. Committed: each with its entry
/// too, and then the counter with a fence of its own, which is the least that the format demands
/// of a write and a flush.
fn bare_stores(bare: &DaxPmem, seed: usize, is_committed: bool) -> Result<f64> {
    let settle = || bare.drain().ok().context("the memory failed");
    let mut prng = Prng::new(seed as u64);
    let mut bytes = vec![0; 4096];
    prng.fill(&mut bytes);
    let mut times = Vec::with_capacity(OPS / BATCH);
    for batch in 0..OPS / BATCH {
        let start = Instant::now();
        for nth in 0..BATCH {
            let slot = prng.below(SPAN / 4096);
            bare.store(DATA_AT + slot * 4096, &bytes);
            if is_committed {
                bare.store(SUPERBLOCK_BYTES + slot * ENTRY_BYTES, &bytes[..ENTRY_BYTES as usize]);
                settle()?;
                bare.store(SEQ_COUNT_AT, &((batch * BATCH + nth) as u64).to_le_bytes());
            }
            settle()?;
        }
        times.push(nanos(start) / BATCH as f64);
    }
    Ok(median(&times))
}

/// Mode s: a file that fio and the target write in turns.
struct Ssd {
    path: std::path::PathBuf,
    io_size: u64,
}

impl Ssd {
    fn new(setup: &Setup) -> Result<Ssd> {
        let path = setup.places.disk.file("writecache-s", CACHE_BYTES)?;
        write_out(&path, CACHE_BYTES)?;
        Ok(Ssd { path, io_size: setup.choose(48 * MIB, 192 * MIB) })
    }

    fn describe(&self) -> String {
        let disk = open_disk(&self.path);
        let how = if disk.is_ok_and(|disk| disk.is_direct()) { "direct I/O" } else { "page cache" };
        format!("{}, {how}", udm_export::check::file_system(&self.path))
    }

    fn job(&self, round: usize, iodepth: u32) -> Job {
        Job {
            rw: Rw::Randwrite,
            bs: 4096,
            iodepth,
            size: SPAN,
            io_size: if iodepth == 1 { self.io_size / 16 } else { self.io_size },
            runtime: Duration::from_secs(20),
            randseed: round as u64 + 1,
            ..Job::default()
        }
    }

    fn round(&self, round: usize, found: &mut Rounds) -> Result<()> {
        let deep = self.job(round, DEPTH);
        let synced = Job { fsync: 1, ..self.job(round, 1) };
        found.fio.push(self.fio(&deep)?);
        found.ssd.push(self.through(&deep, false)?);
        found.again.push(self.through(&deep, true)?);
        found.fio_synced.push(self.fio(&synced)?);
        found.ssd_synced.push(self.through(&synced, false)?);
        found.again_synced.push(self.through(&synced, true)?);
        Ok(())
    }

    /// fio's writes per second.
    fn fio(&self, job: &Job) -> Result<f64> {
        let mut arguments: Vec<String> =
            job.fio_arguments().into_iter().filter(|word| !word.starts_with("--fsync")).collect();
        arguments.extend([
            format!("--filename={}", self.path.display()),
            "--direct=1".into(),
            "--ioengine=io_uring".into(),
            format!("--fdatasync={}", job.fsync),
        ]);
        Ok(fio::write(&arguments)?.iops)
    }

    /// The target's, of blocks that it has or of others.
    fn through(&self, job: &Job, has_blocks: bool) -> Result<f64> {
        forget(&self.path)?;
        let cache: Arc<dyn Disk> = Arc::new(open_disk(&self.path)?);
        let words = "4096 4 high_watermark 100 low_watermark 100";
        let device = writecache(words, ram_disk(ORIGIN_BYTES), Ground::Disk(cache))?;
        let background = Queue::background("udm-background", &device)?;
        if has_blocks {
            load::fill(&device, SPAN)?;
            Local::new(&device)?.flush().ok().context("the flush failed")?;
        }
        let iops = load::run(&device, job)?.iops();
        drop(background);
        Background::new(&device, Ring::new(64)?)?.drain();
        Ok(iops)
    }
}

fn show(study: &mut Study, plans: &[(&'static str, CopyPlan)], times: &[Vec<Vec<f64>>]) {
    let names = BLOCK_SIZES.map(|bytes| Unit::Bytes.text(bytes as f64));
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::MbPerSecond)).collect();
    let mut table = Table::new("mode p, MB/s through the target, by block size", &columns);
    let mut plot = Plot::lines(
        "Mode p, MB/s through the target",
        Axis::log("bytes of a block", Unit::Bytes),
        Axis::linear("MB/s", Unit::Number),
    );
    for ((name, _), times) in plans.iter().zip(times) {
        let rates: Vec<f64> = BLOCK_SIZES
            .iter()
            .zip(times)
            .map(|(bytes, nanos)| *bytes as f64 * 1000.0 / median(nanos))
            .collect();
        table.row(*name, &rates);
        plot.add(*name, BLOCK_SIZES.iter().zip(&rates).map(|(x, y)| (*x as f64, *y)).collect());
        for (size, nanos) in names.iter().zip(times) {
            study.repeats(format!("{name}, {size}"), Unit::Nanos, nanos);
        }
    }
    let mut published = Table::new("published for dm-writecache, MB/s of bare copies", &columns);
    for (name, rates) in PUBLISHED {
        published.row(name, &rates);
    }
    study.tables.extend([table, published]);
    study.plots.push(plot);
}

fn claims(study: &mut Study, found: &Rounds) {
    let columns = [("median", Unit::Number)];
    let mut table = Table::new("4 KiB", &columns);
    let mut row = |name: &str, values: &[f64], unit: Unit| {
        table.row(name, &[median(values)]).unit = Some(unit);
        study.repeats(name, unit, values);
    };
    row("p: bare durable copy", &found.copy, Unit::Nanos);
    row("p: bare copy, entry and counter", &found.least, Unit::Nanos);
    row("p: write", &found.write, Unit::Nanos);
    row("p: write and flush", &found.flushed, Unit::Nanos);
    row("p: write, blocks of 512", &found.small_blocks, Unit::Nanos);
    row("s: fio, depth 32", &found.fio, Unit::PerSecond);
    row("s: udm, depth 32", &found.ssd, Unit::PerSecond);
    row("s: udm, depth 32, cached blocks", &found.again, Unit::PerSecond);
    row("s: fio, write and fdatasync", &found.fio_synced, Unit::PerSecond);
    row("s: udm, write and flush", &found.ssd_synced, Unit::PerSecond);
    row("s: udm, write and flush, cached blocks", &found.again_synced, Unit::PerSecond);
    study.tables.push(table);
    let (at_most, at_least) =
        (|bound| Some(Promise::AtMost(bound)), |bound| Some(Promise::AtLeast(bound)));
    study.claims = vec![
        Claim::new("p: write / bare copy", &ratios(&found.write, &found.copy), at_most(1.75)),
        Claim::new(
            "p: write and flush / bare copy",
            &ratios(&found.flushed, &found.copy),
            at_most(2.5),
        ),
        Claim::new(
            "p: write and flush / bare copy, entry and counter",
            &ratios(&found.flushed, &found.least),
            None,
        ),
        Claim::new("p: two threads / one", &ratios(&found.two, &found.one), at_least(1.7)),
        Claim::new(
            "p: rate of 4 KiB writes, blocks of 512 / of 4096",
            &ratios(&found.write, &found.small_blocks),
            at_least(0.5),
        ),
        Claim::new("s: udm / fio, depth 32", &ratios(&found.ssd, &found.fio), at_least(0.85)),
        Claim::new(
            "s: udm / fio, depth 32, cached blocks",
            &ratios(&found.again, &found.fio),
            at_least(0.85),
        ),
        Claim::new(
            "s: time of write and flush, udm / fio, cached blocks",
            &ratios(&found.fio_synced, &found.again_synced),
            at_most(1.3),
        ),
        Claim::new(
            "s: time of write and flush, udm / fio, new blocks",
            &ratios(&found.fio_synced, &found.ssd_synced),
            at_most(1.3),
        ),
    ];
}
