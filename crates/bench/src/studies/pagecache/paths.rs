//! Direct and buffered I/O on a block device and on a file, with its pages cached or not, and the
//! kernel's counters for those pages.
//!
//! Cold: no page was cached (fio's `invalidate=1`). Warm: all pages were cached and clean; a direct
//! write has to drop those pages first, which is the kernel's own invalidation.

use std::time::Duration;

use anyhow::{Result, anyhow};
use udm::disk::IoMode;
use udm::local::Local;
use udm::units::{KIB, MIB};

use super::is_unsupported;
use super::places::Place;
use crate::job::{Job, Rw};
use crate::meminfo::{self, Meminfo, Seen};
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, linear_device};
use crate::stats::{Histogram, median};
use crate::unit::Unit;
use crate::{cpu, dirty_ratio, flame, load};

/// Name, operation, bytes of a request, requests in flight.
const LOADS: [(&str, Rw, u64, u32); 4] = [
    ("sequential write", Rw::Write, MIB, 4),
    ("random write", Rw::Randwrite, 4 * KIB, 32),
    ("sequential read", Rw::Read, MIB, 4),
    ("random read", Rw::Randread, 4 * KIB, 32),
];
/// Name, mode, whether all is cached before.
const WAYS: [(&str, IoMode, bool); 4] = [
    ("direct, cold", IoMode::Direct, false),
    ("direct, warm", IoMode::Direct, true),
    ("buffered, cold", IoMode::Buffered, false),
    ("buffered, warm", IoMode::Buffered, true),
];
/// Places of two of them.
const BUFFERED_COLD: usize = 2;
const BUFFERED_WARM: usize = 3;
/// Published for sequential writes to an NVMe device: direct is twice as fast as buffered.
const PUBLISHED_RATIO: f64 = 2.0;
/// How often all pages are read and dropped, to see where they are counted.
const PASSES: usize = 9;
/// One sample's share of a pass: small enough that other programs' use of the page cache disturbs
/// few samples, and more than the kernel's counters lag (about 1 MiB per processor).
const STEP_BYTES: u64 = 8 * MIB;

/// The results of a path with a load, repeat by repeat.
#[derive(Debug, Default)]
struct Cell {
    rates: Vec<f64>,
    times: Histogram,
    cpu: Vec<f64>,
    /// Growth of what /proc/meminfo says.
    growth: Vec<[f64; 4]>,
}

/// Adds tables and plots to `study`.
pub fn run(setup: &Setup, study: &mut Study) -> Result<()> {
    study.fact("dirty pages", dirty_ratio::in_words());
    let places = Place::all(setup, study)?;
    for place in &places {
        counted_where(place, study)?;
    }
    let mut worth = Table::new(
        "Direct over buffered, of the same place; published: sequential writes to NVMe",
        &[("cold", Unit::Ratio), ("warm", Unit::Ratio), ("published", Unit::Ratio)],
    );
    for (title, rw, bs, iodepth) in LOADS {
        let is_write = rw.read_percent(0) == 0;
        let these: Vec<&Place> =
            places.iter().filter(|place| place.may_write || !is_write).collect();
        let job = |place: &Place| {
            let job = Job { rw, bs, iodepth, size: place.bytes, ..Job::default() };
            let io_size = if rw.is_random() { place.bytes / 8 } else { place.bytes };
            let runtime = setup.choose(Duration::from_millis(400), Duration::from_secs(5));
            setup.job(Job { io_size, runtime, rw, bs, iodepth, ..job })
        };
        let mut cells: Vec<[Cell; WAYS.len()]> = these.iter().map(|_| Default::default()).collect();
        for repeat in 0..setup.repeats(1, 5) {
            for (place, cells) in these.iter().zip(&mut cells) {
                let job = Job { randseed: repeat as u64 + 1, ..job(place) };
                for ((way, io, is_warm), cell) in WAYS.iter().zip(cells) {
                    match once(place, *io, *is_warm, &job, cell, &case_name(place, title, way)) {
                        Err(error) if is_unsupported(&error) => {
                            let note = format!("{} was not measured: {error:#}", place.name);
                            if !study.notes.contains(&note) {
                                study.notes.push(note);
                            }
                        }
                        done => done?,
                    }
                }
            }
        }
        show(study, &mut worth, title, &these, &cells);
        compare_flames(&these, title);
    }
    study.tables.push(worth);
    if places.iter().any(|place| !place.may_write) {
        let note = "The device was only read: --destroy allows writes.";
        study.notes.push(note.into());
    }
    Ok(())
}

/// The name of its flamegraph.
fn case_name(place: &Place, title: &str, way: &str) -> String {
    format!("{title}: {}, {way}", place.name)
}

/// How a warm cache differs from a cold one, and a file from a block device.
fn compare_flames(places: &[&Place], title: &str) {
    let name = |place: &Place, nth: usize| case_name(place, title, WAYS[nth].0);
    for place in places {
        flame::compare(&name(place, BUFFERED_COLD), &name(place, BUFFERED_WARM));
    }
    if let [device, file] = places {
        flame::compare(&name(device, BUFFERED_COLD), &name(file, BUFFERED_COLD));
    }
}

/// One repeat of one way.
fn once(
    place: &Place,
    io: IoMode,
    is_warm: bool,
    job: &Job,
    cell: &mut Cell,
    name: &str,
) -> Result<()> {
    let device = linear_device(place.disk(io)?)?;
    if is_warm {
        place.warm()?
    } else {
        place.cool()?
    }
    let is_write = job.rw.read_percent(0) == 0;
    let (before, begun) = (cpu::of_process(), std::time::Instant::now());
    let case = flame::case(name);
    let (reached, seen) = meminfo::during(|| {
        let reached = load::run(&device, job)?;
        if is_write {
            let flush = Local::new(&device)?.flush();
            flush.map_err(|status| anyhow!("the flush failed: {status:?}"))?;
        }
        Ok::<_, anyhow::Error>((reached, begun.elapsed().as_secs_f64()))
    });
    drop(case);
    let (reached, until_durable) = reached?;
    let seconds = if is_write { until_durable } else { reached.seconds };
    let requests = reached.count().max(1) as f64;
    cell.rates.push(requests * job.bs as f64 / 1e6 / seconds.max(1e-9));
    cell.cpu.push((cpu::of_process() - before) / requests);
    cell.times.merge(&reached.all());
    cell.growth.push(seen.growth());
    Ok(())
}

fn show(
    study: &mut Study,
    worth: &mut Table,
    title: &str,
    places: &[&Place],
    cells: &[[Cell; WAYS.len()]],
) {
    let mut columns = vec![
        ("MB/s", Unit::MbPerSecond),
        ("p50", Unit::Nanos),
        ("p99", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("CPU per request", Unit::Nanos),
    ];
    columns.extend(meminfo::NAMES.map(|name| (name, Unit::Bytes)));
    let about = format!("Page cache, {title}; the last four: how much they grew");
    let mut table = Table::new(about, &columns);
    let names = WAYS.map(|(name, ..)| name);
    let axis = Axis::linear("MB/s", Unit::Number);
    let mut bars = Plot::bars(&format!("Page cache, {title}"), &names, axis);
    for (place, cells) in places.iter().zip(cells) {
        let mut points = Vec::new();
        for (nth, (name, cell)) in names.iter().zip(cells).enumerate() {
            if cell.rates.is_empty() {
                continue;
            }
            let at = |percent| cell.times.percentile(percent);
            let rate = median(&cell.rates);
            let mut row = vec![rate, at(50.0), at(99.0), at(99.9), median(&cell.cpu)];
            row.extend((0..4).map(|nth| {
                median(&cell.growth.iter().map(|growth| growth[nth]).collect::<Vec<f64>>())
            }));
            let name = format!("{}, {name}", place.name);
            table.row(&name, &row);
            points.push((nth as f64, rate));
            let what = format!("page cache, {title}, {name}");
            study.repeats(what, Unit::MbPerSecond, &cell.rates);
        }
        if points.is_empty() {
            continue;
        }
        bars.add(place.name, points);
        let rate = |nth: usize| median(&cells[nth].rates);
        let is_published = title == "sequential write" && place.name == "block device";
        let published = if is_published { PUBLISHED_RATIO } else { f64::NAN };
        let ratios = [rate(0) / rate(BUFFERED_COLD), rate(1) / rate(BUFFERED_WARM), published];
        worth.row(format!("{}, {title}", place.name), &ratios);
    }
    if !table.rows.is_empty() {
        study.tables.push(table);
        study.plots.push(bars);
    }
}

/// Finds the kernel's counter for pages: all data is written through the page cache, flushed, read
/// again, and dropped, while the counters are sampled. Other programs use memory as well, so the
/// result is the median of many short steps.
fn counted_where(place: &Place, study: &mut Study) -> Result<()> {
    let what = if place.may_write { "written, flushed, read, dropped" } else { "read, dropped" };
    let title = format!("Where pages of a {} are counted: {what}", place.name);
    let axis = Axis::linear("more bytes than before", Unit::Bytes);
    let mut plot = Plot::lines(&title, Axis::linear("seconds", Unit::Number), axis);
    let seen = look(place)?;
    for (nth, name) in meminfo::NAMES.iter().enumerate() {
        plot.add(*name, seen.over_time().map(|(at, grown)| (at, grown[nth])).collect());
    }
    study.plots.push(plot);
    let mut steps = Vec::new();
    for _ in 0..PASSES {
        steps.extend(dropped_in_steps(place)?);
    }
    let [meant, other] = if place.name == "file" { [1, 0] } else { [0, 1] };
    let parts = |nth: usize| -> Vec<f64> { steps.iter().map(|step| step[nth]).collect() };
    let what =
        |nth: usize| format!("{}: pages counted in {} / dropped", place.name, meminfo::NAMES[nth]);
    study.claims.push(Claim::new(what(meant), &parts(meant), Some(Promise::AtLeast(0.9))));
    study.notes.push(format!(
        "The {}: {:.0} % of its pages were counted in {}, and {:.0} % in {}.",
        place.name,
        median(&parts(meant)) * 100.0,
        meminfo::NAMES[meant],
        median(&parts(other)) * 100.0,
        meminfo::NAMES[other],
    ));
    Ok(())
}

/// How much each of /proc/meminfo's four shrinks while the pages of a step are dropped, as parts of
/// the step. Dropping takes no time, so that little of others' use of memory is counted, and needs
/// no memory, for which the kernel would drop other pages.
fn dropped_in_steps(place: &Place) -> Result<Vec<[f64; 4]>> {
    place.cool()?;
    let mut parts = Vec::new();
    place.read_in_steps(STEP_BYTES, |range| {
        let before = Meminfo::now().values();
        place.drop_pages(range);
        let after = Meminfo::now().values();
        parts.push([0, 1, 2, 3].map(|nth| (before[nth] - after[nth]).max(0.0) / STEP_BYTES as f64));
    })?;
    Ok(parts)
}

/// The samples of one pass over all of `place`.
fn look(place: &Place) -> Result<Seen> {
    place.cool()?;
    let device = linear_device(place.disk(IoMode::Buffered)?)?;
    let (done, seen) = meminfo::during(|| {
        if place.may_write {
            let (size, runtime) = (place.bytes, Duration::from_secs(600));
            let job = Job { rw: Rw::Write, bs: MIB, iodepth: 4, size, runtime, ..Job::default() };
            load::run(&device, &Job { io_size: size, ..job })?;
        }
        place.read_again()?;
        std::thread::sleep(meminfo::EVERY * 4);
        place.cool()
    });
    done.map(|()| seen)
}
