//! The measured bounds of the target `cache`, one number each: hits, hits during other work,
//! processor time, write-back, opening.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use udm::bio::Op;
use udm::buffer::Buffer;
use udm::cache::Devices;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::{Contents, Superblock};
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::prng::Prng;
use udm::table::Word;
use udm::units::{MIB, SECTOR};

use super::{BLOCK_BYTES, CACHE, FAST, ORIGIN, Rig};
use crate::cpu;
use crate::job::{Job, Rw};
use crate::load::{self, Reached};
use crate::results::{Claim, Promise, Study, Table};
use crate::rig::{Setup, ram_disk, settle};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// Bytes that are hit while other work goes on, of the area.
const HIT_PART: u64 = 2;
/// Blocks that are dirty before write-back is timed.
const DIRTY_BLOCKS: u64 = 128;

/// All of them.
pub fn add(setup: &Setup, rig: &Rig, study: &mut Study) -> Result<()> {
    let repeats = setup.repeats(2, 5);
    let mut table = Table::new("one number each", &[("median", Unit::Number)]);
    let mut row = |study: &mut Study, name: &str, unit: Unit, values: &[f64]| {
        table.row(name, &[median(values)]).unit = Some(unit);
        study.repeats(name, unit, values);
    };
    let hits = Hits::measure(setup, rig, repeats)?;
    row(study, "hit, depth 1, p50", Unit::Nanos, &hits.cache);
    row(study, "fast device, depth 1, p50", Unit::Nanos, &hits.fast);
    row(study, "hits, depth 32", Unit::PerSecond, &hits.cache_deep);
    row(study, "fast device, depth 32", Unit::PerSecond, &hits.fast_deep);
    let memory = InMemory::measure(setup, repeats)?;
    row(study, "processor time of a hit, in memory", Unit::Nanos, &memory.cpu[0]);
    row(study, "processor time of a read, in memory", Unit::Nanos, &memory.cpu[1]);
    row(study, "hits in memory, one thread", Unit::PerSecond, &memory.one[0]);
    row(study, "hits in memory, two threads", Unit::PerSecond, &memory.two[0]);
    row(study, "reads in memory, one thread", Unit::PerSecond, &memory.one[1]);
    row(study, "reads in memory, two threads", Unit::PerSecond, &memory.two[1]);
    let write_back = write_back(rig, repeats)?;
    row(study, "write-back", Unit::MbPerSecond, &write_back[0]);
    row(study, "the origin, the same blocks", Unit::MbPerSecond, &write_back[1]);
    let opening = opening(setup, repeats)?;
    row(study, "blocks opened in a second", Unit::PerSecond, &opening);
    let beside = Beside::measure(setup, rig, repeats)?;
    row(study, "hits alone, p99.9", Unit::Nanos, &beside.alone);
    row(study, "hits during write-back, p99.9", Unit::Nanos, &beside.write_back);
    row(study, "hits during promotions, p99.9", Unit::Nanos, &beside.promotions);
    study.tables.push(table);
    let at_most = |bound| Some(Promise::AtMost(bound));
    let at_least = |bound| Some(Promise::AtLeast(bound));
    let micros: Vec<f64> = memory.cpu[0].iter().map(|nanos| nanos / 1000.0).collect();
    let millions: Vec<f64> = opening.iter().map(|rate| rate / 1e6).collect();
    let claim = |what: &str, values: &[f64], promise| Claim::new(what, values, promise);
    let (writing, promoting) = ("p99.9 of hits, during write-back / alone", "promotions");
    let promoting = format!("p99.9 of hits, during {promoting} / alone");
    study.claims.extend([
        claim("hit / fast device, depth 1, p50", &ratios(&hits.cache, &hits.fast), at_most(1.1)),
        claim(
            "rate of hits / of the fast device, depth 32",
            &ratios(&hits.cache_deep, &hits.fast_deep),
            at_least(0.9),
        ),
        claim("microseconds of processor time for a hit, in memory", &micros, at_most(0.8)),
        claim("hits in memory: two threads / one", &ratios(&memory.two[0], &memory.one[0]), None),
        claim("  the same reads: two threads / one", &ratios(&memory.two[1], &memory.one[1]), None),
        claim(writing, &ratios(&beside.write_back, &beside.alone), at_most(3.0)),
        claim(&promoting, &ratios(&beside.promotions, &beside.alone), at_most(3.0)),
        claim(
            "write-back / what the origin takes",
            &ratios(&write_back[0], &write_back[1]),
            at_least(0.9),
        ),
        claim("million blocks opened in a second", &millions, at_least(10.0)),
    ]);
    Ok(())
}

/// One job of hits, or of the same reads elsewhere.
fn reads(setup: &Setup, size: u64, iodepth: u32, seed: usize) -> Job {
    let runtime = setup.choose(Duration::from_millis(300), Duration::from_secs(1));
    let runtime = setup.asked().runtime.unwrap_or(runtime);
    let randseed = seed as u64 + 1;
    let job = Job { rw: Rw::Randread, iodepth, size, runtime, randseed, ..Job::default() };
    Job { io_size: u64::MAX, ..job }
}

/// Times and rates of hits, and of the fast device's own reads.
#[derive(Default)]
struct Hits {
    cache: Vec<f64>,
    fast: Vec<f64>,
    cache_deep: Vec<f64>,
    fast_deep: Vec<f64>,
}

impl Hits {
    fn measure(setup: &Setup, rig: &Rig, repeats: usize) -> Result<Hits> {
        let mut hits = Hits::default();
        let run = |who: usize, depth: u32, repeat: usize| -> Result<Reached> {
            load::run(&rig.devices[who], &reads(setup, rig.area, depth, repeat))
        };
        for repeat in 0..repeats {
            hits.cache.push(run(CACHE, 1, repeat)?.reads.percentile(50.0));
            hits.fast.push(run(FAST, 1, repeat)?.reads.percentile(50.0));
            hits.cache_deep.push(run(CACHE, 32, repeat)?.iops());
            hits.fast_deep.push(run(FAST, 32, repeat)?.iops());
        }
        Ok(hits)
    }
}

/// Hits over disks in memory, and reads of such a disk: where the device takes no time, the
/// program's own shows.
#[derive(Default)]
struct InMemory {
    /// Nanoseconds of processor time for each.
    cpu: [Vec<f64>; 2],
    /// Requests per second of one thread.
    one: [Vec<f64>; 2],
    /// The same of two, which share the cache and its lock.
    two: [Vec<f64>; 2],
}

impl InMemory {
    fn measure(setup: &Setup, repeats: usize) -> Result<InMemory> {
        let area = 32 * MIB;
        let rig = Rig::over(ram_disk(16 * MIB), ram_disk(area + area / 4), area)?;
        let mut found = InMemory::default();
        for repeat in 0..repeats {
            for (nth, who) in [CACHE, FAST].into_iter().enumerate() {
                let job = reads(setup, area, 1, repeat);
                let one = load::run(&rig.devices[who], &job)?;
                let two = load::run(&rig.devices[who], &Job { numjobs: 2, ..job })?;
                found.cpu[nth].push(one.cpu_nanos / one.count().max(1) as f64);
                found.one[nth].push(one.iops());
                found.two[nth].push(two.iops());
            }
        }
        Ok(found)
    }
}

/// p99.9 of hits in one half of the area, alone and while the background works.
#[derive(Default)]
struct Beside {
    alone: Vec<f64>,
    write_back: Vec<f64>,
    promotions: Vec<f64>,
}

impl Beside {
    fn measure(setup: &Setup, rig: &Rig, repeats: usize) -> Result<Beside> {
        let mut found = Beside::default();
        let device = &rig.devices[CACHE];
        let half = rig.area / HIT_PART;
        let hits = |repeat: usize| -> Result<f64> {
            let reached = load::run(device, &reads(setup, half, 1, repeat))?;
            Ok(reached.reads.percentile(99.9))
        };
        for repeat in 0..repeats {
            found.alone.push(hits(repeat)?);
            soil(rig, half, half / BLOCK_BYTES)?;
            rig.slow.set_slow(true);
            device.set_draining(true);
            let beside = hits(repeat);
            rig.slow.set_slow(false);
            settle(device)?;
            found.write_back.push(beside?);
        }
        // Last, because this changes the cached blocks: reads of blocks that are not cached, by
        // another job.
        for repeat in 0..repeats {
            let before = rig.promotions()?;
            rig.slow.set_slow(true);
            let misses = Job { offset: rig.area, ..reads(setup, rig.area, 4, repeat) };
            // A few places, often: they are to come into the cache.
            let misses = Job { size: 64 * BLOCK_BYTES, ..misses };
            let beside = std::thread::scope(|scope| {
                let other = scope.spawn(|| load::run(device, &misses));
                let beside = hits(repeat);
                other.join().expect("no panic").and(beside)
            });
            rig.slow.set_slow(false);
            settle(device)?;
            found.promotions.push(beside?);
            ensure!(rig.promotions()? >= before, "promotions are counted");
        }
        Ok(found)
    }
}

impl Rig {
    fn promotions(&self) -> Result<u64> {
        let status = udm::target::Target::status(&*self.cache);
        let word = status.split(' ').nth(9).context("a status line has promotions")?;
        word.parse().context("promotions are a number")
    }
}

/// Makes the `count` blocks from `first` on dirty, by 4 KiB each.
fn soil(rig: &Rig, first: u64, count: u64) -> Result<()> {
    let mut local = udm::local::Local::new(&rig.devices[CACHE])?;
    for nth in 0..count {
        let at = first + nth * BLOCK_BYTES;
        local.write_at(&[1; 4096], at, false).ok().context("a write failed")?;
    }
    Ok(())
}

/// Megabytes per second of write-back of random blocks, and of the same blocks written to the
/// origin by as many requests at a time, each until durable.
fn write_back(rig: &Rig, repeats: usize) -> Result<[Vec<f64>; 2]> {
    let blocks = rig.area / BLOCK_BYTES;
    let mut found: [Vec<f64>; 2] = Default::default();
    for repeat in 0..repeats {
        let mut prng = Prng::new(repeat as u64);
        let mut chosen: Vec<u64> = (0..DIRTY_BLOCKS).map(|_| prng.below(blocks)).collect();
        chosen.sort_unstable();
        chosen.dedup();
        let bytes = (chosen.len() as u64 * BLOCK_BYTES) as f64;
        for block in &chosen {
            soil(rig, block * BLOCK_BYTES, 1)?;
        }
        rig.slow.set_slow(true);
        let begun = Instant::now();
        settle(&rig.devices[CACHE])?;
        found[0].push(bytes / 1e6 / begun.elapsed().as_secs_f64());
        let begun = Instant::now();
        let mut local = udm::local::Local::new(&rig.devices[ORIGIN])?;
        for (nth, block) in (0..).zip(&chosen) {
            let buffer = Buffer::zeroed(BLOCK_BYTES as usize);
            local.submit(udm::Bio::write(block * BLOCK_BYTES, buffer, false, nth));
        }
        while let Some(done) = local.wait() {
            ensure!(done.status.is_ok(), "a write failed");
        }
        local.flush().ok().context("a flush failed")?;
        found[1].push(bytes / 1e6 / begun.elapsed().as_secs_f64());
        rig.slow.set_slow(false);
    }
    Ok(found)
}

/// A device of any size without content.
#[derive(Debug)]
struct Void(DiskLimits);

impl Disk for Void {
    fn limits(&self) -> &DiskLimits {
        &self.0
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        let result = if io.op == Op::Read { Err(udm::Status::Io) } else { Ok(()) };
        ring.finish(io, result);
    }
}

/// Blocks per second and core of opening a full cache, whose metadata is in memory.
fn opening(setup: &Setup, repeats: usize) -> Result<Vec<f64>> {
    let slots: u64 = setup.choose(100_000, 1_000_000);
    let block_sectors = 64;
    let metadata = ram_disk(64 * MIB);
    let mut contents = Contents::empty(slots);
    let mut prng = Prng::new(1);
    let mut blocks: Vec<u64> = (0..slots).collect();
    for nth in (1..blocks.len()).rev() {
        blocks.swap(nth, prng.below(nth as u64 + 1) as usize);
    }
    contents.mappings.iter_mut().zip(&blocks).for_each(|(slot, block)| {
        *slot = mapping(Some(*block));
    });
    let mut superblock = Superblock::fresh(2, block_sectors);
    superblock.put_flag(udm::cache::metadata::superblock::CLEAN_SHUTDOWN, true);
    write_whole(&metadata, superblock, &contents)?;
    let bytes = slots * u64::from(block_sectors) * SECTOR;
    let limits = DiskLimits { size_bytes: bytes, ..metadata.limits().clone() };
    let void: Arc<dyn Disk> = Arc::new(Void(limits));
    let mut found = Vec::new();
    for _ in 0..repeats {
        let (cache, origin) = (void.clone(), void.clone());
        let devices = Devices { metadata: metadata.clone(), cache, origin };
        let args = TableArgs::parse(&Word::list(&format!("M C O {block_sectors} 0 smq 0")))?;
        let before = cpu::of_process();
        let opened = Cache::open(args, bytes, devices, OpenOptions::default())?;
        found.push(slots as f64 * 1e9 / (cpu::of_process() - before));
        drop(opened);
    }
    Ok(found)
}
