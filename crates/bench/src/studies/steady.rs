//! A cache that has been full for a long time: the rate of bursts, with write-back of all data
//! between them, compared with the first one into an empty cache; then the rate without any pause,
//! when the backing device limits it.
//!
//! A repeat has a fresh cache with the default settings, in front of a real file. The background
//! runs as in a server, and its processor time is reported separately. Each burst and each repeat
//! has its row, and rates are shown over time.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use udm::device::Device;
use udm::disk::Disk;
use udm::queue::Queue;
use udm::units::MIB;

use crate::cpu::{Meter, Spent};
use crate::job::Job;
use crate::load::{self, Reached};
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{FILLS, Setup, linear_device, settle};
use crate::stats::median;
use crate::unit::Unit;

/// Bursts that count when the cache has been filled often enough.
const FULL_BURSTS: usize = 3;
/// Jobs in addition to one for each processor, as in the published measurements.
const MANY_JOBS: u32 = 8;
/// The size of a burst as a part of the cache. A full cache has this much clean data with any
/// retention setting.
const BURST_PART: (u64, u64) = (3, 8);
/// A burst that the backing device holds up is cut off after this long.
const BURST_SECONDS: u64 = 20;

/// Without pause, rates are looked at over this time, and over five times as much.
const ENDLESS_SLICE: Duration = Duration::from_millis(20);

/// One burst, and its cost.
struct Burst {
    reached: Reached,
    spent: Spent,
    /// Bytes that were written before it.
    before: u64,
}

/// One repeat: a cache from its first write on.
struct Course {
    bursts: Vec<Burst>,
    /// Without pause.
    endless: Reached,
}

/// All repeats with this many jobs.
struct Load {
    numjobs: u32,
    /// No job waits for a processor that another one has.
    has_processors: bool,
    courses: Vec<Course>,
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "steady",
        "a cache that has been full for long",
        "4 KiB random writes, one request at a time for each job, through a fresh cache with the \
         default settings in front of a real file. First in bursts of 3/8 of the cache, all \
         written back in between, until the cache was filled three times, and three bursts more: \
         the first one finds it empty, the last three full of clean data. Then without pause, \
         until the backing device limits the rate. Processor time is what the clients' threads \
         and the rest of the process spend for each request, until all of it is written back.",
    );
    let repeats = setup.repeats(2, 5);
    let disk: Arc<dyn Disk> = setup.backing_disk()?;
    let alone = alone(setup, disk.clone())?;
    let mut loads = Vec::new();
    for numjobs in numjobs(setup) {
        let mut courses = Vec::new();
        for repeat in 0..repeats {
            let (device, cache) = setup.fresh_target("steady", disk.clone(), "0")?;
            if study.facts.is_empty() {
                study.fact("target", setup.target.name());
                setup.describe_as(&mut study, cache)?;
            }
            courses.push(course(setup, &device, numjobs, repeat as u64)?);
        }
        let has_processors = numjobs <= processors();
        loads.push(Load { numjobs, has_processors, courses });
    }
    study.fact("repeats", repeats.to_string());
    study.fact("a burst", Unit::Bytes.text(burst_bytes(setup) as f64));
    for load in &loads {
        show(setup, &mut study, load, &alone);
    }
    if loads.iter().any(|load| !load.has_processors) {
        study.notes.push(
            "More jobs than processors wait for each other's time slices as well: the longest \
             requests of such a load say more of the kernel's scheduler than of the cache, and \
             nothing is promised of them."
                .into(),
        );
    }
    Ok(study)
}

fn processors() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

fn numjobs(setup: &Setup) -> Vec<u32> {
    if let Some(asked) = setup.asked().numjobs {
        return vec![asked];
    }
    let mut counts = vec![processors().min(MANY_JOBS), MANY_JOBS];
    counts.dedup();
    counts
}

fn burst_bytes(setup: &Setup) -> u64 {
    let (part, of) = BURST_PART;
    setup.cache_bytes() / of * part / MIB * MIB
}

/// The load without its end.
fn job(setup: &Setup, numjobs: u32) -> Result<Job> {
    let size = setup.backing_bytes()?;
    let asked = setup.job(Job { numjobs, ..Job::default() });
    Ok(Job { size, ramp_time: Duration::ZERO, io_size: 1 << 50, ..asked })
}

/// How long writes without pause are measured.
fn endless_time(setup: &Setup) -> Duration {
    let own = setup.choose(Duration::from_secs(2), Duration::from_secs(8));
    setup.asked().runtime.unwrap_or(own)
}

/// The rate of the backing device without a cache, with many requests in flight.
fn alone(setup: &Setup, disk: Arc<dyn Disk>) -> Result<Reached> {
    let job = job(setup, 1)?;
    let runtime = endless_time(setup) / 2;
    load::run(&linear_device(disk)?, &Job { iodepth: 32, runtime, ..job })
}

/// A cache from its first write on.
fn course(setup: &Setup, device: &Arc<Device>, numjobs: u32, repeat: u64) -> Result<Course> {
    let background = Queue::background("udm-background", device)?;
    let job = job(setup, numjobs)?;
    let job = Job { randseed: job.randseed + repeat * 100, ..job };
    let bytes = burst_bytes(setup);
    let filling = (FILLS * setup.cache_bytes()).div_ceil(bytes) as usize;
    let mut bursts = Vec::new();
    let mut before = 0;
    for nth in 0..filling + FULL_BURSTS {
        let burst = Job {
            io_size: bytes,
            runtime: Duration::from_secs(BURST_SECONDS),
            slice: Duration::from_millis(5),
            randseed: job.randseed + nth as u64,
            ..job.clone()
        };
        let mut meter = Meter::start();
        let reached = load::run(device, &burst)?;
        meter.clients_done(reached.cpu_nanos);
        settle(device)?;
        let spent = meter.finish(reached.count());
        let written = reached.count() * job.bs;
        bursts.push(Burst { reached, spent, before });
        before += written;
    }
    let runtime = endless_time(setup);
    let endless = Job { runtime, ramp_time: runtime / 2, slice: ENDLESS_SLICE, ..job };
    let endless = load::run(device, &endless)?;
    settle(device)?;
    drop(background);
    Ok(Course { bursts, endless })
}

fn jobs_in_words(count: u32) -> String {
    if count == 1 { "1 job".into() } else { format!("{count} jobs") }
}

fn show(setup: &Setup, study: &mut Study, load: &Load, alone: &Reached) {
    let jobs = jobs_in_words(load.numjobs);
    burst_table(study, load, &jobs);
    endless_table(study, load, &jobs, alone);
    over_fills(setup, study, load, &jobs);
    let mut plot = Plot::lines(
        &format!("Requests per second without pause, {jobs}"),
        Axis::linear("seconds", Unit::Number),
        Axis::log("requests per second", Unit::PerSecond),
    );
    for (nth, course) in load.courses.iter().enumerate() {
        plot.add(format!("repeat {}", nth + 1), course.endless.timeline.rates());
    }
    plot.add("backing alone, depth 32", alone.timeline.rates());
    study.plots.push(plot);
    claims(setup, study, load, &jobs, alone);
}

fn burst_table(study: &mut Study, load: &Load, jobs: &str) {
    let columns = [
        ("IOPS", Unit::PerSecond),
        ("p50", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("p99.99", Unit::Nanos),
        ("worst", Unit::Nanos),
        ("CPU, clients", Unit::Nanos),
        ("background", Unit::Nanos),
    ];
    let mut table = Table::new(format!("{jobs}, in bursts"), &columns);
    for (repeat, course) in load.courses.iter().enumerate() {
        let filling = course.bursts.len() - FULL_BURSTS;
        for (nth, Burst { reached, spent, .. }) in course.bursts.iter().enumerate() {
            let state = match nth {
                0 => "empty",
                nth if nth < filling => "fills",
                _ => "full",
            };
            let all = reached.all();
            let at = |percent| all.percentile(percent);
            let times = [at(50.0), at(99.9), at(99.99), all.worst()];
            let [p50, p999, p9999, worst] = times;
            let (clients, background) = (spent.clients, spent.beside + spent.after);
            let values = [reached.iops(), p50, p999, p9999, worst, clients, background];
            table.row(format!("repeat {}, burst {}, {state}", repeat + 1, nth + 1), &values);
        }
    }
    study.tables.push(table);
}

fn endless_table(study: &mut Study, load: &Load, jobs: &str, alone: &Reached) {
    let columns = [
        ("IOPS", Unit::PerSecond),
        ("p50", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("p99.99", Unit::Nanos),
        ("worst", Unit::Nanos),
        ("first job / last", Unit::Ratio),
    ];
    let mut table = Table::new(format!("{jobs}, without pause"), &columns);
    let values = |reached: &Reached| {
        let all = reached.all();
        let at = |percent| all.percentile(percent);
        [reached.iops(), at(50.0), at(99.9), at(99.99), all.worst(), reached.unfairness()]
    };
    for (nth, course) in load.courses.iter().enumerate() {
        table.row(format!("repeat {}", nth + 1), &values(&course.endless));
    }
    table.row("backing alone, depth 32", &values(alone));
    study.tables.push(table);
}

/// Rates and longest requests of all bursts, over what was written.
fn over_fills(setup: &Setup, study: &mut Study, load: &Load, jobs: &str) {
    let x = || Axis::linear("how often the cache was filled", Unit::Number);
    let mut rates = Plot::lines(
        &format!("Requests per second in bursts of 5 ms slices, {jobs}"),
        x(),
        Axis::log("requests per second", Unit::PerSecond),
    );
    let mut worst = Plot::lines(
        &format!("The longest request of each slice, {jobs}"),
        x(),
        Axis::log("time", Unit::Nanos),
    );
    let cache = setup.cache_bytes() as f64;
    for (nth, course) in load.courses.iter().enumerate() {
        let (mut rate_points, mut worst_points) = (Vec::new(), Vec::new());
        for Burst { reached, before, .. } in &course.bursts {
            // Within a burst, time is scaled to the written bytes.
            let written = reached.count() as f64 * burst_block(setup);
            let place = |seconds: f64| {
                let part = (seconds / reached.seconds.max(1e-9)).min(1.0);
                (*before as f64 + written * part) / cache
            };
            let scaled = |points: Vec<(f64, f64)>| {
                points.into_iter().map(move |(x, y)| (place(x), y)).collect::<Vec<_>>()
            };
            rate_points.extend(scaled(reached.timeline.rates()));
            worst_points.extend(scaled(reached.timeline.worst()));
        }
        rates.add(format!("repeat {}", nth + 1), rate_points);
        worst.add(format!("repeat {}", nth + 1), worst_points);
    }
    study.plots.extend([rates, worst]);
}

fn burst_block(setup: &Setup) -> f64 {
    setup.job(Job::default()).bs as f64
}

/// Whether clients without pause go on evenly: rates over short times, and the longest requests
/// compared with the mean time between two of a client's requests that the backing device allows.
fn smoothness(setup: &Setup, study: &mut Study, load: &Load, jobs: &str, alone: &Reached) {
    let ramp = endless_time(setup) / 2;
    let of = |measure: &dyn Fn(&Reached) -> f64| -> Vec<f64> {
        load.courses.iter().map(|one| measure(&one.endless)).collect()
    };
    let mut claim = |what: &str, values: &[f64], promise| {
        study.claims.push(Claim::new(format!("{jobs}, without pause: {what}"), values, promise));
    };
    let (at_least, at_most) = (Promise::AtLeast, Promise::AtMost);
    let low = of(&|reached| reached.timeline.extremes(ramp, 1).0);
    claim("least rate over 20 ms / mean", &low, Some(at_least(0.4)));
    let low = of(&|reached| reached.timeline.extremes(ramp, 5).0);
    claim("least rate over 100 ms / mean", &low, Some(at_least(0.7)));
    let high = of(&|reached| reached.timeline.extremes(ramp, 5).1);
    claim("highest rate over 100 ms / mean", &high, Some(at_most(1.3)));
    let fair = 1e9 * f64::from(load.numjobs) / alone.iops();
    let tail = of(&|reached| reached.all().percentile(99.9) / fair);
    claim("p99.9 / (jobs / rate of the backing device)", &tail, Some(at_most(3.0)));
    let worst = of(&|reached| reached.all().worst() / fair);
    claim("longest request / the same", &worst, Some(at_most(10.0)));
}

fn claims(setup: &Setup, study: &mut Study, load: &Load, jobs: &str, alone: &Reached) {
    let of_full = |measure: &dyn Fn(&Course, &Burst) -> f64| -> Vec<f64> {
        let bursts = |course: &Course| -> Vec<f64> {
            let filling = course.bursts.len() - FULL_BURSTS;
            course.bursts[filling..].iter().map(|burst| measure(course, burst)).collect()
        };
        load.courses.iter().flat_map(bursts).collect()
    };
    let at_most = |bound| Some(Promise::AtMost(bound));
    let at_least = |bound| Some(Promise::AtLeast(bound));
    let rates = of_full(&|course, burst| burst.reached.iops() / course.bursts[0].reached.iops());
    let what = format!("{jobs}: rate, full of clean data / empty");
    study.claims.push(Claim::new(what, &rates, at_least(0.8)));
    let tails = of_full(&|_, burst| {
        let all = burst.reached.all();
        all.percentile(99.9) / all.percentile(50.0).max(1.0)
    });
    study.claims.push(Claim::new(format!("{jobs}: p99.9 / p50, full"), &tails, at_most(20.0)));
    let worst = of_full(&|_, burst| burst.reached.all().worst() / 1e6);
    let what = format!("{jobs}: the longest request, full, milliseconds");
    study.claims.push(match load.has_processors {
        true => Claim::of_every(what, &worst, Promise::AtMost(10.0)),
        false => Claim::new(what, &worst, None),
    });
    let first: Vec<f64> =
        load.courses.iter().map(|one| one.bursts[0].reached.all().worst() / 1e6).collect();
    study.claims.push(Claim::new("  the same, empty", &first, None));
    let cost = of_full(&|_, burst| burst.spent.in_all() / 1000.0);
    let what = format!("{jobs}: processor time of a write in all, full, microseconds");
    study.claims.push(Claim::new(what, &cost, None));
    let origin = alone.iops();
    let rates: Vec<f64> = load.courses.iter().map(|one| one.endless.iops() / origin).collect();
    let what = format!("{jobs}: rate without pause / backing alone at depth 32");
    study.claims.push(Claim::new(what, &rates, at_least(0.9)));
    smoothness(setup, study, load, jobs, alone);
    let apart: Vec<f64> = load.courses.iter().map(|one| one.endless.unfairness()).collect();
    if load.numjobs > 1 {
        let what = format!("{jobs}: requests of the first job / of the last, without pause");
        study.claims.push(Claim::new(what, &apart, at_most(1.5)));
    }
    let of = |measure: &dyn Fn(&Burst) -> f64| -> Vec<f64> {
        load.courses
            .iter()
            .map(|one| median(&one.bursts.iter().map(measure).collect::<Vec<_>>()))
            .collect()
    };
    let iops = of(&|burst| burst.reached.iops());
    study.repeats(format!("{jobs}, bursts, IOPS"), Unit::PerSecond, &iops);
    let iops: Vec<f64> = load.courses.iter().map(|one| one.endless.iops()).collect();
    study.repeats(format!("{jobs}, without pause, IOPS"), Unit::PerSecond, &iops);
}
