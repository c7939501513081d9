//! The dm-pcache study: a load on the backing device alone and through the cache, in process and
//! with fio over NBD. `randwrite` is its published load; `job` takes any.

mod rates;

pub use rates::EQUAL_RATES;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use udm::device::Device;
use udm::disk::Disk;
use udm::units::MIB;

use crate::fio;
use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Axis, Claim, Plot, Study, Table};
use crate::rig::{Export, FILLS, Setup, has_fio_nbd, linear_device, settle};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// The kernel's dm-pcache as its author published it with the target: 4 KiB random writes through
/// fio, the backing device alone and with the cache on persistent memory.
const PUBLISHED: [(u32, [f64; 2], Option<[f64; 2]>); 2] =
    [(1, [59e3, 224e3], Some([15_600.0, 4000.0])), (8, [446e3, 1_380e3], None)];

const COLUMNS: [(&str, Unit); 7] = [
    ("IOPS", Unit::PerSecond),
    ("mean", Unit::Nanos),
    ("p50", Unit::Nanos),
    ("p99", Unit::Nanos),
    ("p99.9", Unit::Nanos),
    ("p99.99", Unit::Nanos),
    ("worst", Unit::Nanos),
];
const PERCENTS: [f64; 7] = [10.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99];

/// One subject's repeats of one load: the columns' values, percentiles, rates over time.
#[derive(Debug, Default)]
struct Measured {
    values: [Vec<f64>; COLUMNS.len()],
    percentiles: Vec<Vec<f64>>,
    /// All repeats, one after the other.
    rates: Vec<(f64, f64)>,
    seconds: f64,
}

impl Measured {
    fn add(&mut self, iops: f64, times: [f64; COLUMNS.len() - 1], percentiles: Vec<f64>) {
        for (all, value) in self.values.iter_mut().zip([iops].into_iter().chain(times)) {
            all.push(value);
        }
        self.percentiles.push(percentiles);
    }

    fn medians(&self) -> Vec<f64> {
        self.values.iter().map(|values| median(values)).collect()
    }

    /// Percentiles, each the median over repeats.
    fn curve(&self) -> Vec<(f64, f64)> {
        let at =
            |nth: usize| median(&self.percentiles.iter().map(|one| one[nth]).collect::<Vec<_>>());
        PERCENTS.iter().enumerate().map(|(nth, percent)| (*percent, at(nth))).collect()
    }
}

/// The backing device alone, and through the cache.
type Pair = [Measured; 2];
const NAMES: [&str; 2] = ["backing alone", "through udm"];

/// The published study.
pub fn randwrite(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "randwrite",
        "random writes, alone and with a cache",
        "The dm-pcache study: 4 KiB random writes, one request at a time for each job, on the \
         backing device alone and through udm, which keeps them in the cache and writes them back \
         later. The cache has its default settings and was filled three times before anything \
         counts: what a measure writes takes the place of clean data. All is written back in \
         between; what happens without pauses is in the study steady.",
    );
    let job = Job { rw: Rw::Randwrite, ..Job::default() };
    run(setup, job, &[1, 8], &mut study, setup.asked().rate.is_none())?;
    study.tables.push(published());
    study.notes.push(
        "Published: what the author of the kernel's dm-pcache measured with it, on another \
         machine with real persistent memory. Compare ratios, not numbers."
            .into(),
    );
    Ok(study)
}

/// Any load.
pub fn job(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "job",
        "a load of your own, alone and with a cache",
        "The load on the backing device alone and through udm. The cache has its default settings \
         and was filled three times before anything counts; all is written back between measures.",
    );
    run(setup, Job::default(), &[1], &mut study, false)?;
    Ok(study)
}

/// The measured devices: the backing device alone, and the cache before it.
struct Sides {
    devices: [Arc<Device>; 2],
    sockets: [PathBuf; 2],
    /// Whether fio can use them over NBD.
    with_fio: bool,
}

fn run(
    setup: &Setup,
    job: Job,
    numjobs: &[u32],
    study: &mut Study,
    with_rates: bool,
) -> Result<()> {
    let small = Job { io_size: 96 * MIB, runtime: std::time::Duration::from_millis(700), ..job };
    let job = setup.job(if setup.is_small { small } else { job });
    let job = Job { slice: std::time::Duration::from_millis(10), ..job };
    let numjobs: Vec<u32> = setup.asked().numjobs.map_or(numjobs.to_vec(), |asked| vec![asked]);
    let repeats = setup.repeats(3, 5);
    let job = Job { size: job.size.min(setup.backing_bytes()?), ..job };
    let disk: Arc<dyn Disk> = setup.backing_disk()?;
    let cached = setup.target(study, disk.clone(), "0")?;
    study.fact("load", job.text());
    study.fact("repeats", repeats.to_string());
    // Both devices have the same disk below. Here it does no harm that each one's writes change the
    // other's data.
    let sides = Sides {
        devices: [linear_device(disk)?, cached],
        sockets: ["alone", "cached"].map(|name| setup.places.memory.path(name)),
        with_fio: has_fio_nbd(),
    };
    let Sides { devices, sockets, with_fio } = &sides;
    let exports = [Export::new(&devices[0], &sockets[0])?, Export::new(&devices[1], &sockets[1])?];
    let mut inside: Vec<Pair> = numjobs.iter().map(|_| Pair::default()).collect();
    let mut outside: Vec<Pair> = numjobs.iter().map(|_| Pair::default()).collect();
    for device in devices {
        // Memory is touched and code is loaded before anything counts.
        load::run(device, &Job { io_size: job.io_size / 4, ..job.clone() })?;
        settle(device)?;
    }
    load::fill_often(&devices[1], FILLS * setup.cache_bytes())?;
    for repeat in 0..repeats {
        for (nth, count) in numjobs.iter().enumerate() {
            let randseed = job.randseed + repeat as u64;
            let job = Job { numjobs: *count, randseed, ..job.clone() };
            for side in 0..2 {
                sides.in_process(side, &job, &mut inside[nth][side])?;
                if *with_fio {
                    sides.over_nbd(side, &job, &mut outside[nth][side])?;
                }
            }
        }
    }
    show(study, "in process", &numjobs, &inside);
    if *with_fio {
        show(study, "fio over NBD", &numjobs, &outside);
    }
    if with_rates {
        let pairs = if *with_fio { &outside } else { &inside };
        let alone = numjobs.iter().zip(pairs);
        let alone: Vec<(u32, f64)> =
            alone.map(|(count, pair)| (*count, median(&pair[0].values[0]))).collect();
        rates::run(study, &sides, &job, &alone, repeats)?;
    }
    drop(exports);
    if !with_fio {
        study.notes.push("fio with its NBD engine is not installed: NBD was not measured.".into());
    }
    Ok(())
}

impl Sides {
    /// The way that the main table is about.
    fn way(&self) -> &'static str {
        if self.with_fio { "fio over NBD" } else { "in process" }
    }

    /// Runs `job` in that way.
    fn measure(&self, side: usize, job: &Job, measured: &mut Measured) -> Result<()> {
        match self.with_fio {
            true => self.over_nbd(side, job, measured),
            false => self.in_process(side, job, measured),
        }
    }

    fn in_process(&self, side: usize, job: &Job, measured: &mut Measured) -> Result<()> {
        let device = &self.devices[side];
        let reached = load::run(device, job)?;
        settle(device)?;
        let all = reached.all();
        let at = |percent| all.percentile(percent);
        let times = [all.mean(), at(50.0), at(99.0), at(99.9), at(99.99), all.worst()];
        let begun = measured.seconds;
        measured.rates.extend(reached.timeline.rates().iter().map(|(x, y)| (begun + x, *y)));
        measured.seconds += reached.seconds;
        measured.add(reached.iops(), times, PERCENTS.map(at).to_vec());
        Ok(())
    }

    fn over_nbd(&self, side: usize, job: &Job, measured: &mut Measured) -> Result<()> {
        let result = fio::nbd(&self.sockets[side], job, &PERCENTS)?;
        settle(&self.devices[side])?;
        let at = |percent: f64| {
            let place = PERCENTS.iter().position(|one| *one == percent);
            place.map_or(f64::NAN, |place| result.percentiles[place])
        };
        let (mean, worst) = (result.mean_nanos, result.worst_nanos);
        let times = [mean, at(50.0), at(99.0), at(99.9), at(99.99), worst];
        measured.add(result.iops, times, result.percentiles);
        Ok(())
    }
}

fn jobs(count: u32) -> String {
    if count == 1 { "1 job".into() } else { format!("{count} jobs") }
}

/// A table, plots and ratios of one way in.
fn show(study: &mut Study, way: &str, numjobs: &[u32], pairs: &[Pair]) {
    let mut table = Table::new(way, &COLUMNS);
    let groups: Vec<String> = numjobs.iter().map(|count| jobs(*count)).collect();
    let group_names: Vec<&str> = groups.iter().map(String::as_str).collect();
    let mut bars = Plot::bars(
        &format!("Requests per second, {way}"),
        &group_names,
        Axis::log("requests per second", Unit::PerSecond),
    );
    let mut curves = Plot::percentiles(&format!("Time of a request, {way}"));
    for (side, name) in NAMES.iter().enumerate() {
        let points = pairs.iter().enumerate();
        bars.add(*name, points.map(|(nth, p)| (nth as f64, median(&p[side].values[0]))).collect());
    }
    for (jobs, pair) in groups.iter().zip(pairs) {
        for (side, name) in NAMES.iter().enumerate() {
            table.row(format!("{jobs}, {name}"), &pair[side].medians());
            curves.add(format!("{jobs}, {name}"), pair[side].curve());
            let what = format!("{way}, {jobs}, {name}, IOPS");
            study.repeats(what, Unit::PerSecond, &pair[side].values[0]);
        }
        let [alone, cached] = pair;
        let better = |nth: usize| match nth {
            0 => median(&ratios(&cached.values[0], &alone.values[0])),
            _ => median(&ratios(&alone.values[nth], &cached.values[nth])),
        };
        let values: Vec<f64> = (0..COLUMNS.len()).map(better).collect();
        table.row(format!("{jobs}, times better"), &values).unit = Some(Unit::Ratio);
        let rounds = ratios(&cached.values[0], &alone.values[0]);
        study.claims.push(Claim::new(format!("IOPS {way}, {jobs}: cached / alone"), &rounds, None));
    }
    study.tables.push(table);
    study.plots.extend([bars, curves]);
    every_repeat(study, way, &groups, pairs);
}

/// What medians hide: each repeat's rate, and rates over time.
fn every_repeat(study: &mut Study, way: &str, groups: &[String], pairs: &[Pair]) {
    let count = pairs.first().map_or(0, |pair| pair[0].values[0].len());
    let names: Vec<String> = (1..=count).map(|nth| format!("repeat {nth}")).collect();
    let columns: Vec<(&str, Unit)> =
        names.iter().map(|name| (name.as_str(), Unit::PerSecond)).collect();
    let mut table = Table::new(format!("IOPS of every repeat, {way}"), &columns);
    let mut plot = Plot::lines(
        &format!("Requests per second over time, {way}, all repeats one behind the other"),
        Axis::linear("seconds of load", Unit::Number),
        Axis::log("requests per second", Unit::PerSecond),
    );
    for (jobs, pair) in groups.iter().zip(pairs) {
        for (measured, name) in pair.iter().zip(NAMES) {
            table.row(format!("{jobs}, {name}"), &measured.values[0]);
            if !measured.rates.is_empty() {
                plot.add(format!("{jobs}, {name}"), measured.rates.clone());
            }
        }
    }
    study.tables.push(table);
    if !plot.series.is_empty() {
        study.plots.push(plot);
    }
}

fn published() -> Table {
    let mut table = Table::new("published for the kernel's dm-pcache", &COLUMNS[..2]);
    for (count, iops, means) in PUBLISHED {
        let jobs = jobs(count);
        let mean = |side: usize| means.map_or(f64::NAN, |means| means[side]);
        table.row(format!("{jobs}, backing alone"), &[iops[0], mean(0)]);
        table.row(format!("{jobs}, through dm-pcache"), &[iops[1], mean(1)]);
        let better = [iops[1] / iops[0], mean(0) / mean(1)];
        table.row(format!("{jobs}, times better"), &better).unit = Some(Unit::Ratio);
    }
    table
}
