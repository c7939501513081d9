//! The factors of a request's cost: threads, the filling of the cache, its share of dirty data, and
//! the size of the request. All devices are in memory, so that only udm is measured.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::disk::Ring;
use udm::local::Local;
use udm::pmem::Pmem;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::units::{GIB, MIB};

use crate::background::Background;
use crate::job::{Job, Rw};
use crate::load::{self, Reached};
use crate::pcache_rig::PcacheRig;
use crate::results::{Axis, Claim, Plot, Study, Table};
use crate::rig::{CACHE_BYTES, FILLS, Setup, bare_memory, open_pmem, ram_disk, settle};
use crate::stats::{median, ratios};
use crate::unit::Unit;

const BLOCK: u64 = 4096;
/// Operations timed together.
const BATCH: u64 = 16;
/// Percent of the cache that is in use, or dirty.
const LEVELS: [u64; 3] = [1, 50, 100];
const DIRTY_LEVELS: [u64; 4] = [1, 25, 50, 75];
/// Sizes of requests.
const SIZES: [u64; 7] = [512, 2048, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "scaling",
        "the factors in the cost of a request",
        "Random requests in process to a pcache in memory with the default settings and its \
         background: by threads, as the cache fills (clean data, 4 KiB), as dirty data grows \
         (without write-back), and by the size of the \
         request, compared with the bare durable copy. The disk is in memory, because the study \
         would measure a real disk instead; for real disks see the studies steady and write. By \
         threads and by size, the cache was filled three times before. Except by threads, times \
         are medians of batches of 16.",
    );
    let repeats = setup.repeats(3, 7);
    study.fact("repeats", repeats.to_string());
    threads(setup, repeats, &mut study)?;
    fullness(setup, repeats, &mut study)?;
    dirtiness(setup, repeats, &mut study)?;
    sizes(setup, repeats, &mut study)?;
    Ok(study)
}

/// Threads to try: powers of two up to the number of processors, and that number.
fn thread_counts() -> Vec<u32> {
    let most = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
    let powers = (0..).map(|power| 1 << power).take_while(|count| *count < most);
    powers.chain([most]).collect()
}

fn threads(setup: &Setup, repeats: usize, study: &mut Study) -> Result<()> {
    let counts = thread_counts();
    let span = setup.cache_bytes() / 8 * 3;
    let cache = setup.pcache("scaling-threads", ram_disk(GIB), "0")?;
    let _background = Queue::background("udm-background", &cache.device)?;
    load::fill_often(&cache.device, FILLS * setup.cache_bytes())?;
    let own = setup.choose(Duration::from_millis(150), Duration::from_millis(500));
    let runtime = setup.asked().runtime.unwrap_or(own);
    let slice = Duration::from_millis(5);
    let job = Job { size: span, runtime, slice, ..Job::default() };
    let mut rates = vec![vec![Vec::new(); counts.len()]; 2];
    let mut writes: Vec<Vec<Reached>> = counts.iter().map(|_| Vec::new()).collect();
    for repeat in 0..repeats {
        for (nth, count) in counts.iter().enumerate() {
            for (kind, rw) in [Rw::Randwrite, Rw::Randread].into_iter().enumerate() {
                load::refill(&cache.device, span)?;
                // The written bytes are fewer than the clean bytes of a full cache.
                let io_size = match rw {
                    Rw::Randwrite => span,
                    _ => GIB * u64::from(*count),
                };
                let randseed = repeat as u64 + 1;
                let job = Job { rw, numjobs: *count, io_size, randseed, ..job.clone() };
                let reached = load::run(&cache.device, &job)?;
                rates[kind][nth].push(reached.iops());
                if rw == Rw::Randwrite {
                    writes[nth].push(reached);
                }
                settle(&cache.device)?;
            }
        }
    }
    writes_by_threads(study, &counts, &writes);
    let names: Vec<String> = counts.iter().map(u32::to_string).collect();
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::PerSecond)).collect();
    let mut table = Table::new("requests per second, by threads", &columns);
    let mut plot = Plot::lines(
        "Requests per second, by threads",
        Axis::linear("threads", Unit::Number),
        Axis::linear("requests per second", Unit::PerSecond),
    );
    for (name, rates) in ["write", "read hit"].into_iter().zip(&rates) {
        let medians: Vec<f64> = rates.iter().map(|rates| median(rates)).collect();
        table.row(name, &medians);
        let points = counts.iter().zip(&medians).map(|(count, rate)| (f64::from(*count), *rate));
        plot.add(name, points.collect());
        for (count, rates) in counts.iter().zip(rates) {
            study.repeats(format!("{name}, {count} threads"), Unit::PerSecond, rates);
        }
        if let (Some(first), Some(last), true) = (rates.first(), rates.last(), rates.len() > 1) {
            let what = format!("{name}: {} threads / 1", names[names.len() - 1]);
            study.claims.push(Claim::new(what, &ratios(last, first), None));
        }
    }
    study.tables.push(table);
    study.plots.push(plot);
    Ok(())
}

/// How slow the slow writes are, and rates over time, of every repeat.
fn writes_by_threads(study: &mut Study, counts: &[u32], writes: &[Vec<Reached>]) {
    let columns = [
        ("IOPS", Unit::PerSecond),
        ("p50", Unit::Nanos),
        ("p99.99", Unit::Nanos),
        ("worst", Unit::Nanos),
    ];
    let mut table = Table::new("writes, by threads", &columns);
    let mut plot = Plot::lines(
        "Writes per second, all repeats one behind the other",
        Axis::linear("seconds", Unit::Number),
        Axis::log("requests per second", Unit::PerSecond),
    );
    for (count, repeats) in counts.iter().zip(writes) {
        let threads = if *count == 1 { "1 thread".into() } else { format!("{count} threads") };
        let (mut points, mut begun) = (Vec::new(), 0.0);
        for (nth, reached) in repeats.iter().enumerate() {
            let all = reached.all();
            let values = [reached.iops(), all.percentile(50.0), all.percentile(99.99), all.worst()];
            table.row(format!("{threads}, repeat {}", nth + 1), &values);
            points.extend(reached.timeline.rates().iter().map(|(x, y)| (begun + x, *y)));
            begun += reached.seconds;
        }
        plot.add(threads, points);
    }
    study.tables.push(table);
    study.plots.push(plot);
}

/// A caller that times its requests in batches.
struct Caller {
    local: Local,
    prng: Prng,
    spare: Option<Buffer>,
}

impl Caller {
    fn new(cache: &PcacheRig, len: u64) -> Result<Caller> {
        let mut prng = Prng::new(4);
        let mut buffer = Buffer::zeroed(len as usize);
        prng.fill(buffer.as_mut_slice());
        let local = Local::without_kernel(&cache.device)?;
        Ok(Caller { local, prng, spare: Some(buffer) })
    }

    fn one(&mut self, offset: u64, is_read: bool) -> Result<()> {
        let buffer = self.spare.take().context("a buffer got lost")?;
        self.local.submit(match is_read {
            true => Bio::read(offset, buffer, 0),
            false => Bio::write(offset, buffer, false, 0),
        });
        let done = self.local.wait().context("a request got lost")?;
        done.status.map_err(|status| anyhow!("a request at {offset} failed: {status:?}"))?;
        self.spare = Some(done.buffer);
        Ok(())
    }

    /// The median time of a request within `range`, over this many batches.
    fn cost(&mut self, range: Range<u64>, len: u64, is_read: bool, batches: u64) -> Result<f64> {
        let slots = (range.end - range.start) / len;
        let mut times = Vec::new();
        for _ in 0..batches {
            let places = [(); BATCH as usize].map(|()| range.start + self.prng.below(slots) * len);
            let start = Instant::now();
            for place in places {
                self.one(place, is_read)?;
            }
            times.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        }
        Ok(median(&times))
    }

    /// Writes `range` once, in requests of the caller's size.
    fn fill(&mut self, range: Range<u64>) -> Result<()> {
        let step = self.spare.as_ref().map_or(BLOCK as usize, Buffer::len);
        range.step_by(step).try_for_each(|offset| self.one(offset, false))
    }
}

/// A table, a plot and repeats of write and read hit by a level in percent.
fn by_level(study: &mut Study, title: &str, levels: &[u64], costs: &[Vec<Vec<f64>>]) {
    let names: Vec<String> = levels.iter().map(|level| format!("{level} %")).collect();
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::Nanos)).collect();
    let mut table = Table::new(title, &columns);
    let mut plot = Plot::lines(
        title,
        Axis::linear("percent of the cache", Unit::Number),
        Axis::linear("time of a request", Unit::Nanos),
    );
    for (name, costs) in ["write", "read hit", "bare load"].into_iter().zip(costs) {
        let medians: Vec<f64> = costs.iter().map(|costs| median(costs)).collect();
        table.row(name, &medians);
        plot.add(name, levels.iter().zip(&medians).map(|(x, y)| (*x as f64, *y)).collect());
        for (level, costs) in names.iter().zip(costs) {
            study.repeats(format!("{name}, {title}, {level}"), Unit::Nanos, costs);
        }
    }
    if let ([write, hit, load], [first, .., last]) = (costs, names.as_slice()) {
        let what = format!("write, {title}: {last} / {first}");
        study.claims.push(Claim::new(what, &ratios(&write[levels.len() - 1], &write[0]), None));
        let what = format!("read hit / bare load, {title}: {last}");
        let (hit, load) = (&hit[levels.len() - 1], &load[levels.len() - 1]);
        study.claims.push(Claim::new(what, &ratios(hit, load), None));
    }
    study.tables.push(table);
    study.plots.push(plot);
}

/// The median time of a bare load from as much memory, in batches: what little data costs less
/// because it is in the processor's caches shows here too.
fn bare_load(bare: &dyn Pmem, span: u64, batches: u64) -> Result<f64> {
    let mut prng = Prng::new(4);
    let mut into = vec![0; BLOCK as usize];
    let mut times = Vec::new();
    for _ in 0..batches {
        let places = [(); BATCH as usize].map(|()| prng.below(span / BLOCK) * BLOCK);
        let start = Instant::now();
        for place in places {
            bare.load(place, &mut into).ok().context("the memory failed")?;
        }
        times.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
    }
    Ok(median(&times))
}

fn fullness(setup: &Setup, repeats: usize, study: &mut Study) -> Result<()> {
    let cache = setup.pcache("scaling-fullness", ram_disk(2 * GIB), "0")?;
    let background = Queue::background("udm-background", &cache.device)?;
    let mut caller = Caller::new(&cache, BLOCK)?;
    let bare = bare_memory(setup, "scaling-bare")?;
    let mut costs = vec![vec![Vec::new(); LEVELS.len()]; 3];
    let mut filled = 0;
    for (nth, level) in LEVELS.into_iter().enumerate() {
        // Full means that every write needs room that collection has to make.
        let bytes = setup.cache_bytes();
        let wanted = if level == 100 { FILLS * bytes } else { bytes * level / 100 };
        let wanted = wanted / BLOCK * BLOCK;
        while filled < wanted {
            let next = wanted.min(filled + 64 * MIB);
            caller.fill(filled..next)?;
            filled = next;
            settle(&cache.device)?;
        }
        // The latest writes are certainly cached.
        let span = filled.clamp(BLOCK * BATCH, setup.cache_bytes() / 4);
        let last = filled - span..filled;
        for _ in 0..repeats {
            costs[0][nth].push(caller.cost(last.clone(), BLOCK, false, 256)?);
            settle(&cache.device)?;
            costs[1][nth].push(caller.cost(last.clone(), BLOCK, true, 256)?);
            costs[2][nth].push(bare_load(&bare, span, 256)?);
        }
    }
    drop(background);
    by_level(study, "4 KiB, as the cache fills", &LEVELS, &costs);
    Ok(())
}

fn dirtiness(setup: &Setup, repeats: usize, study: &mut Study) -> Result<()> {
    let bare = open_pmem(&setup.places.memory.file("scaling-bare", CACHE_BYTES)?)?;
    let mut costs = vec![vec![Vec::new(); DIRTY_LEVELS.len()]; 3];
    for _ in 0..repeats {
        // In a smaller one, log and reserves would leave no room for this much.
        let cache = setup.pcache_of("scaling-dirtiness", CACHE_BYTES, ram_disk(GIB), "0")?;
        // No thread does its background work, so dirty data stays dirty.
        let mut caller = Caller::new(&cache, BLOCK)?;
        let mut dirty = 0;
        for (nth, level) in DIRTY_LEVELS.into_iter().enumerate() {
            let wanted = CACHE_BYTES * level / 100 / BLOCK * BLOCK;
            caller.fill(dirty..wanted)?;
            dirty = wanted;
            costs[0][nth].push(caller.cost(0..dirty, BLOCK, false, 128)?);
            costs[1][nth].push(caller.cost(0..dirty, BLOCK, true, 128)?);
            costs[2][nth].push(bare_load(&bare, dirty, 128)?);
        }
        drop(caller);
        Background::new(&cache.device, Ring::without_kernel())?.drain();
    }
    by_level(study, "4 KiB, as dirty data grows", &DIRTY_LEVELS, &costs);
    Ok(())
}

fn sizes(setup: &Setup, repeats: usize, study: &mut Study) -> Result<()> {
    let bare = bare_memory(setup, "scaling-bare")?;
    let cache = setup.pcache("scaling-sizes", ram_disk(GIB), "0")?;
    let _background = Queue::background("udm-background", &cache.device)?;
    load::fill_often(&cache.device, FILLS * setup.cache_bytes())?;
    let span = setup.cache_bytes() / 4;
    let rows = ["write", "bare durable copy", "read hit"];
    let mut costs = vec![vec![Vec::new(); SIZES.len()]; rows.len()];
    let mut at = 0;
    for _ in 0..repeats {
        for (nth, len) in SIZES.into_iter().enumerate() {
            let mut caller = Caller::new(&cache, len)?;
            let batches = (32 * MIB / len / BATCH).clamp(5, 128);
            costs[0][nth].push(caller.cost(0..span, len, false, batches)?);
            load::refill(&cache.device, span)?;
            costs[2][nth].push(caller.cost(0..span, len, true, batches)?);
            let bytes = caller.spare.as_ref().context("a buffer got lost")?;
            let mut times = Vec::new();
            for _ in 0..batches {
                let start = Instant::now();
                for _ in 0..BATCH {
                    at = if at + len > bare.len_bytes() { 0 } else { at };
                    bare.store(at, bytes.as_slice());
                    bare.drain().ok().context("the memory failed")?;
                    at += len;
                }
                times.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
            }
            costs[1][nth].push(median(&times));
            drop(caller);
            settle(&cache.device)?;
        }
    }
    let names = SIZES.map(|len| Unit::Bytes.text(len as f64));
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::Nanos)).collect();
    let mut table = Table::new("time, by the size of the request", &columns);
    let mut plot = Plot::lines(
        "Time of a request, by its size",
        Axis::log("bytes of the request", Unit::Bytes),
        Axis::log("time", Unit::Nanos),
    );
    for (name, costs) in rows.into_iter().zip(&costs) {
        let medians: Vec<f64> = costs.iter().map(|costs| median(costs)).collect();
        table.row(name, &medians);
        plot.add(name, SIZES.iter().zip(&medians).map(|(x, y)| (*x as f64, *y)).collect());
        for (size, costs) in names.iter().zip(costs) {
            study.repeats(format!("{name}, {size}"), Unit::Nanos, costs);
        }
    }
    for nth in [2, SIZES.len() - 1] {
        let what = format!("write / bare copy, {}", names[nth]);
        study.claims.push(Claim::new(what, &ratios(&costs[0][nth], &costs[1][nth]), None));
    }
    study.tables.push(table);
    study.plots.push(plot);
    Ok(())
}
