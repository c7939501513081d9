//! How fast a `cache` adapts to its clients: bytes of I/O after a change of the hot set until the
//! hit ratio reaches 90 % of its final value. The simulated policies, including the kernel's smq,
//! are compared with the engine that udm serves.

use std::sync::Arc;

use anyhow::{Context, Result};
use udm::cache::Devices;
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::device::{Device, LoadedTable};
use udm::local::{Local, ManualClock};
use udm::prng::Prng;
use udm::table::Word;
use udm::target::Target;
use udm::units::{BLOCK, MIB, SECOND, SECTOR};

use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, ram_disk};
use crate::simulator::{CachePolicy, run_watched};
use crate::stats::median;
use crate::trace::{Request, Trace};
use crate::unit::Unit;

/// Sizes of blocks, where none are asked for.
const BLOCK_SIZES: [u64; 3] = [32 << 10, 256 << 10, MIB];
/// The engine, in tables.
const SERVED: &str = "udm, smq, served";
/// One request in this many is for any block of the device.
const ELSEWHERE: u64 = 10;
/// How often the hot set is asked for, in bytes: the old one and the new one.
const OLD_SETS: u64 = 10;
const NEW_SETS: u64 = 40;
/// How often all is asked for, each time at other random places.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=5;
/// Hits are counted in this many windows for each hot set of bytes.
const WINDOWS: u64 = 16;
/// Requests in a second.
const RATE: u64 = 2000;
/// The engine's background looks at its clock after this many requests.
const REQUESTS_PER_TICK: u64 = 20;

/// The sizes of a cache and of its load, in bytes.
#[derive(Clone, Copy, Debug)]
struct Shape {
    cache: u64,
    hot: u64,
    device: u64,
}

/// The results of one policy for a new hot set.
#[derive(Clone, Debug)]
struct Course {
    /// Hits of each window, in percent of the requested bytes.
    hits: Vec<f64>,
}

impl Course {
    /// The hit ratio of the last quarter.
    fn steady(&self) -> f64 {
        let last = &self.hits[self.hits.len() * 3 / 4..];
        last.iter().sum::<f64>() / last.len() as f64
    }

    /// Bytes, in hot sets, until a window reaches 90 % of the final hit ratio and the windows of
    /// the next half hot set reach it on average: two lucky windows are not enough. None: never.
    fn until_most(&self) -> Option<f64> {
        let wanted = 0.9 * self.steady();
        let lasts = |next: &[f64]| {
            next[0] >= wanted && next.iter().sum::<f64>() >= wanted * next.len() as f64
        };
        let found = self.hits.windows(WINDOWS as usize / 2).position(lasts)?;
        Some((found + 1) as f64 / WINDOWS as f64)
    }
}

/// The results of one policy, for each size of blocks and each repeat.
type Row = Vec<Vec<Course>>;

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mib = setup.choose(32, 64);
    let shape = Shape { cache: mib * MIB, hot: mib * MIB / 2, device: mib * MIB * 8 };
    let text = |bytes: u64| Unit::Bytes.text(bytes as f64);
    let about = format!(
        "Reads of 4 KiB, nine of ten at random in a hot set of {}, in front of a device of {}; the \
         cache has {}. When the old hot set has been read {OLD_SETS} times, another one takes its \
         place. {RATE} requests pass in a second of the policies' clock. The last row is the \
         engine, over disks in memory; the others are computed on paper, where copies take no \
         time. Medians of {} runs, each with other random places.",
        text(shape.hot),
        text(shape.device),
        text(shape.cache),
        SEEDS.count()
    );
    let title = "bytes of I/O from a new hot set until 90 % of the steady hits";
    let mut study = Study::new("adapt", title, &about);
    let sizes = match setup.blocks() {
        [] => setup.choose(&BLOCK_SIZES[..2], &BLOCK_SIZES[..]),
        asked => asked,
    };
    let traces: Vec<Trace> = SEEDS.map(|seed| trace(&shape, seed)).collect();
    let mut names: Vec<&str> = CachePolicy::ALL.iter().map(|policy| policy.name()).collect();
    names.push(SERVED);
    let mut rows: Vec<Row> = vec![Row::new(); names.len()];
    for &block_bytes in sizes {
        for (policy, row) in CachePolicy::ALL.iter().zip(&mut rows) {
            let courses = traces.iter().map(|trace| on_paper(*policy, trace, &shape, block_bytes));
            row.push(courses.collect());
        }
        let served = rows.last_mut().context("the engine has a row")?;
        let courses = traces.iter().map(|trace| of_engine(trace, &shape, block_bytes));
        served.push(courses.collect::<Result<_>>()?);
    }
    show(&mut study, &names, sizes, &rows);
    Ok(study)
}

fn show(study: &mut Study, names: &[&str], sizes: &[u64], rows: &[Row]) {
    let heads: Vec<String> = sizes.iter().map(|bytes| Unit::Bytes.text(*bytes as f64)).collect();
    let columns = |unit: Unit| -> Vec<(&str, Unit)> {
        heads.iter().map(|head| (head.as_str(), unit)).collect()
    };
    let title = "bytes until 90 % of the steady hits, in hot sets, by the size of blocks";
    let mut until = Table::new(title, &columns(Unit::Ratio));
    let mut steady = Table::new("bytes hit in the end", &columns(Unit::Percent));
    for (name, row) in names.iter().zip(rows) {
        // What never came took longer than all that was asked for.
        let most = |course: &Course| course.until_most().unwrap_or(NEW_SETS as f64);
        let found: Vec<Vec<f64>> =
            row.iter().map(|courses| courses.iter().map(most).collect()).collect();
        until.row(*name, &found.iter().map(|times| median(times)).collect::<Vec<_>>());
        let in_the_end =
            |courses: &Vec<Course>| median(&courses.iter().map(Course::steady).collect::<Vec<_>>());
        steady.row(*name, &row.iter().map(in_the_end).collect::<Vec<_>>());
        let promise = (*name == SERVED).then_some(Promise::AtMost(3.0));
        for (head, found) in heads.iter().zip(&found) {
            let what = format!("{name}, blocks of {head}: bytes until 90 %, in hot sets");
            study.claims.push(Claim::new(what, found, promise));
        }
    }
    for (nth, head) in heads.iter().enumerate() {
        let mut plot = Plot::lines(
            &format!("Bytes hit after the change, blocks of {head}, the first run"),
            Axis::log("bytes asked for, in hot sets", Unit::Ratio),
            Axis::linear("bytes hit", Unit::Percent),
        );
        for (name, row) in names.iter().zip(rows) {
            let hits = row[nth][0].hits.iter().enumerate();
            let at = |window: usize| (window + 1) as f64 / WINDOWS as f64;
            plot.add(*name, hits.map(|(window, hits)| (at(window), *hits)).collect());
        }
        study.plots.push(plot);
    }
    study.tables.extend([until, steady]);
}

/// Requests for as many bytes as the hot set has.
fn per_set(shape: &Shape) -> u64 {
    shape.hot / BLOCK
}

/// All requests: to the old hot set, and then to the new one.
fn trace(shape: &Shape, seed: u64) -> Trace {
    let mut prng = Prng::new(seed);
    let (hot, all) = (per_set(shape), shape.device / BLOCK);
    let count = (OLD_SETS + NEW_SETS) * hot;
    let one = |nth: u64| {
        // The first and the third quarter of the device.
        let first = if nth < OLD_SETS * hot { 0 } else { all / 2 };
        let block = match prng.one_in(ELSEWHERE) {
            true => prng.below(all),
            false => first + prng.below(hot),
        };
        Request { block, count: 1, is_write: false }
    };
    let requests = (0..count).map(one).collect();
    let seconds = (0..count).map(|nth| nth as f32 / RATE as f32).collect();
    Trace { name: "a hot set that changes".into(), requests, seconds }
}

/// The hits of each window after the change, from all hits up to the end of each window.
fn course(hit_bytes: &[u64], window_bytes: u64) -> Course {
    let percent = |two: &[u64]| 100.0 * (two[1] - two[0]) as f64 / window_bytes as f64;
    Course { hits: hit_bytes.windows(2).map(percent).collect() }
}

fn on_paper(policy: CachePolicy, trace: &Trace, shape: &Shape, block_bytes: u64) -> Course {
    let (window, first) = (per_set(shape) / WINDOWS, OLD_SETS * per_set(shape));
    let mut sums = Vec::new();
    let slots = (shape.cache / block_bytes) as u32;
    run_watched(policy, trace, block_bytes, slots, |nth, tally| {
        let done = nth as u64 + 1;
        if done >= first && (done - first).is_multiple_of(window) {
            sums.push(tally.hit);
        }
    });
    course(&sums, window * BLOCK)
}

fn of_engine(trace: &Trace, shape: &Shape, block_bytes: u64) -> Result<Course> {
    let words = format!("M C O {} 1 metadata2 smq 0", block_bytes / SECTOR);
    let devices = Devices {
        metadata: ram_disk(16 * MIB),
        cache: ram_disk(shape.cache),
        origin: ram_disk(shape.device),
    };
    let args = TableArgs::parse(&Word::list(&words))?;
    let cache = Arc::new(Cache::open(args, shape.device, devices, OpenOptions::default())?);
    let table = LoadedTable::single(cache.clone(), shape.device);
    let device = Device::with_table("adapt", table)?;
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&device)?.with_background(clock.clone());
    let (window, first) = (per_set(shape) / WINDOWS, OLD_SETS * per_set(shape));
    let (mut sums, mut bytes) = (Vec::new(), vec![0; BLOCK as usize]);
    for (nth, request) in (1..).zip(&trace.requests) {
        local.read_at(&mut bytes, request.block * BLOCK).ok().context("a read failed")?;
        if nth % REQUESTS_PER_TICK == 0 {
            clock.advance(REQUESTS_PER_TICK * (SECOND / RATE));
            device.events().work();
            local.turn();
        }
        if nth >= first && (nth - first).is_multiple_of(window) {
            sums.push(read_hits(&cache)? * BLOCK);
        }
    }
    Ok(course(&sums, window * BLOCK))
}

/// The kernel's counter in the status line.
fn read_hits(cache: &Cache) -> Result<u64> {
    let status = cache.status();
    let word = status.split(' ').nth(4).context("a status line has hits")?;
    word.parse().context("hits are a number")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_course_says_when_most_is_hit() {
        let hits = |hits: &[u64]| {
            let sum = |sum: &mut u64, hits: &u64| {
                *sum += hits;
                Some(*sum)
            };
            [0].into_iter().chain(hits.iter().scan(0, sum)).collect::<Vec<u64>>()
        };
        // Two lucky windows come before the fall, and most is hit after it.
        let mut all = [0, 90, 90, 40, 40, 40, 40, 40, 40, 40].to_vec();
        all.extend([90; 24]);
        let found = course(&hits(&all), 100);
        assert_eq!(found.hits.len(), 34);
        assert_eq!(found.hits[..4], [0.0, 90.0, 90.0, 40.0]);
        assert_eq!((found.steady(), found.until_most()), (90.0, Some(11.0 / WINDOWS as f64)));
        let never = course(&hits(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 100, 0, 100]), 100);
        assert_eq!(never.until_most(), None);
    }

    #[test]
    fn the_engine_follows_a_new_hot_set() {
        // With fewer slots than this a level of the policy has one or two, and the course is noise.
        let shape = Shape { cache: 16 * MIB, hot: 8 * MIB, device: 128 * MIB };
        let follow = |seed| of_engine(&trace(&shape, seed), &shape, 32 << 10).unwrap();
        let courses: Vec<Course> = SEEDS.map(follow).collect();
        for found in &courses {
            assert_eq!(found.hits.len() as u64, NEW_SETS * WINDOWS);
            assert!(found.hits[0] < 60.0 && found.steady() > 80.0, "{:?}", found.hits);
        }
        let until = courses.iter().map(|found| found.until_most().expect("most is hit"));
        let until: Vec<f64> = until.collect();
        assert!(median(&until) <= 1.5, "{until:?}");
        let steady: Vec<f64> = courses.iter().map(Course::steady).collect();
        assert!(median(&steady) >= 88.0, "{steady:?}");
    }
}
