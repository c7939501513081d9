//! The modes of I/O compared, as in a published study of the modes on XFS: a single client, four
//! writers (A), readers during a bulk write (C), writers among buffered readers (D), a writer next
//! to a buffered one (E), and the memory that is used.
//!
//! The rows are in the published order, and the published figures are next to ours where they are
//! known. That study ran on 80 processors with 256 GiB and an NVMe disk: compare the ratios of
//! rows, not the rows.

mod parallel;
mod pressure;
mod price;
mod second;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use udm::disk::{IoMode, LAZY_WINDOW_BYTES};
use udm::units::{KIB, MIB};

use self::parallel::{Client, Outcome, play};
use self::pressure::Pressure;
use self::second::Checked;
use super::pagecache::is_unsupported;
use crate::flame;
use crate::job::{Job, Rw};
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, write_out};
use crate::stats::{Histogram, median, ratios};
use crate::unit::Unit;
use udm_export::check::file_system;

const MODES: [(&str, IoMode); 4] = [
    ("buffered", IoMode::Buffered),
    ("dontcache", IoMode::DontCache),
    ("direct", IoMode::Direct),
    ("lazy", IoMode::Lazy),
];
/// Place of a mode in the list.
const BUFFERED: usize = 0;
const LAZY: usize = 3;
/// Windows of the table that the default is taken from.
const WINDOWS: [u64; 5] = [4, 8, 16, 32, 64];
/// Writes under way may lie on top of a window.
const SLACK_BYTES: u64 = MIB;
const MS: f64 = 1e6;
const PERCENTS: [f64; 7] = [1.0, 50.0, 75.0, 90.0, 99.0, 99.9, 99.99];

/// Published for one sequential writer: MB/s, and p50, p99 and p99.9 in milliseconds.
const PUBLISHED_SEQUENTIAL: [[f64; 4]; 4] = [
    [575.0, 30.0, 43.8, 51.1],
    [1179.0, 3.2, 103.3, 170.9],
    [1374.0, 11.5, 21.9, 24.2],
    [1442.0, 10.7, 22.2, 23.5],
];
/// Published for the p99.9 of four writers, in milliseconds; lazy's was 329 to 447.
const PUBLISHED_FOUR: [f64; 4] = [58.0, f64::NAN, f64::NAN, 388.0];

/// The files, and how they are used.
struct Fixture<'a> {
    setup: &'a Setup,
    repeats: usize,
    /// Each file has twice the memory's size. With smaller files, pages may be overwritten before
    /// they are written out: one of four buffered writers then writes only to memory, far above the
    /// disk's rate.
    files: [PathBuf; 4],
    file_bytes: u64,
}

/// A row: its name and its clients; and what each repeat of it reached.
struct Row {
    name: String,
    clients: Vec<Client>,
    outcomes: Vec<Outcome>,
}

impl Row {
    fn new(name: impl Into<String>, clients: Vec<Client>) -> Row {
        Row { name: name.into(), clients, outcomes: Vec::new() }
    }

    fn each(&self, measure: impl Fn(&Outcome) -> f64) -> Vec<f64> {
        self.outcomes.iter().map(measure).collect()
    }

    fn median(&self, measure: impl Fn(&Outcome) -> f64) -> f64 {
        median(&self.each(measure))
    }

    /// Times of all requests of the writers, or of the readers, over all repeats.
    fn times(&self, is_writer: bool) -> Histogram {
        let mut times = Histogram::default();
        for client in self.outcomes.iter().flat_map(|outcome| &outcome.clients) {
            if client.is_writer == is_writer {
                times.merge(&client.reached.all());
            }
        }
        times
    }

    /// The same percentile of each repeat.
    fn percentiles(&self, is_writer: bool, percent: f64) -> Vec<f64> {
        self.each(|outcome| {
            let mut times = Histogram::default();
            let these = outcome.clients.iter().filter(|client| client.is_writer == is_writer);
            these.for_each(|client| times.merge(&client.reached.all()));
            times.percentile(percent)
        })
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let mut study = Study::new(
        "iomodes",
        "the modes of I/O, alone and next to others",
        "Files on the backing file system, without a cache in front; a writer's rate counts until \
         the flush at its end. Cached and unwritten are cachestat's, every 0.5 ms if that takes at \
         most a twentieth of a processor, else less often. Published: a study of these modes in \
         the kernel, on XFS and NVMe with 80 processors and 256 GiB.",
    );
    let fixture = Fixture::new(setup)?;
    let memory = (fixture.file_bytes / 2).max(256 * MIB);
    let pressure = Pressure::of(memory);
    study.fact("files", file_system(&fixture.files[0]));
    study.fact("repeats", fixture.repeats.to_string());
    study.fact("size of each file", Unit::Bytes.text(fixture.file_bytes as f64));
    match &pressure {
        Ok(_) => study.fact("memory", Unit::Bytes.text(memory as f64)),
        Err(why) => study.notes.push(format!("no memory pressure on the page cache: {why}")),
    }
    study.fact("published, four writers", "p99.9 of buffered 58 ms, of lazy 329 to 447 ms");
    let mut checked = Checked::default();
    single(&fixture, &mut study, &mut checked)?;
    four(&fixture, &mut study, &mut checked)?;
    beside(&fixture, &mut study, &mut checked)?;
    against(&fixture, &mut study, &mut checked)?;
    windows(&fixture, &mut study)?;
    price::add(setup, &mut study)?;
    checked.show(&mut study);
    drop(pressure);
    Ok(study)
}

impl Fixture<'_> {
    fn new(setup: &Setup) -> Result<Fixture<'_>> {
        let own = setup.choose(512 * MIB, 1024 * MIB);
        let file_bytes = setup.asked().size.unwrap_or(own).next_multiple_of(4 * MIB);
        let make = |nth: usize| {
            let path = setup.places.disk.file(&format!("file{nth}"), file_bytes)?;
            write_out(&path, file_bytes)?;
            Ok::<PathBuf, anyhow::Error>(path)
        };
        let files = [make(0)?, make(1)?, make(2)?, make(3)?];
        Ok(Fixture { setup, repeats: setup.repeats(1, 10), files, file_bytes })
    }

    /// A client of one file, for as long as the others.
    fn client(&self, path: &Path, io: IoMode, rw: Rw, bs: u64, iodepth: u32) -> Client {
        let size = self.file_bytes;
        let runtime = self.setup.choose(Duration::from_millis(300), Duration::from_secs(3));
        let runtime = self.setup.asked().runtime.unwrap_or(runtime);
        let io_size = 1 << 40;
        let slice = Duration::from_millis(20);
        let job = Job { rw, bs, iodepth, size, io_size, runtime, slice, ..Job::default() };
        Client { path: path.to_path_buf(), io, window: None, job }
    }

    /// Plays all rows in turn, again and again. A mode that is not to be had stays without outcome.
    fn play(&self, title: &str, rows: &mut [Row], study: &mut Study) -> Result<()> {
        for repeat in 0..self.repeats {
            for row in &mut *rows {
                for client in &mut row.clients {
                    client.job.randseed = repeat as u64 + 1;
                }
                let _case = flame::case(format!("{title}: {}", row.name));
                match play(&row.clients) {
                    Ok(outcome) => row.outcomes.push(outcome),
                    Err(error) if is_unsupported(&error) => {
                        let note = format!("{} was not measured: {error:#}", row.name);
                        if !study.notes.contains(&note) {
                            study.notes.push(note);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }
}

/// One client: sequential and random, write and read.
fn single(fixture: &Fixture<'_>, study: &mut Study, checked: &mut Checked) -> Result<()> {
    let loads = [
        ("sequential write", Rw::Write, MIB),
        ("random write", Rw::Randwrite, 4 * KIB),
        ("sequential read", Rw::Read, MIB),
        ("random read", Rw::Randread, 4 * KIB),
    ];
    for (name, rw, bs) in loads {
        let mut rows: Vec<Row> = MODES
            .iter()
            .map(|(mode, io)| {
                Row::new(*mode, vec![fixture.client(&fixture.files[0], *io, rw, bs, 16)])
            })
            .collect();
        fixture.play(&format!("Single client, {name}"), &mut rows, study)?;
        checked.check(&format!("Single client, {name}"), &rows);
        let is_write = matches!(rw, Rw::Write | Rw::Randwrite);
        show_single(study, name, &rows, is_write, bs);
        if is_write {
            claim_single(study, name, &rows, rw.is_random());
        }
    }
    Ok(())
}

fn show_single(study: &mut Study, name: &str, rows: &[Row], is_write: bool, bs: u64) {
    let columns = [
        ("MB/s", Unit::MbPerSecond),
        ("p50", Unit::Nanos),
        ("p99", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("peak cache", Unit::Bytes),
        ("IOPS", Unit::PerSecond),
        ("left", Unit::Bytes),
        ("disk's write", Unit::Bytes),
        ("published MB/s", Unit::MbPerSecond),
        ("published p99.9", Unit::Nanos),
    ];
    let title = format!("Single client, {name}");
    let mut table = Table::new(&title, &columns);
    let mut times = Plot::percentiles(&format!("{title}: time of a request"));
    let mut cached = over_time(&format!("{title}: cached"));
    for (nth, row) in rows.iter().enumerate().filter(|(_, row)| !row.outcomes.is_empty()) {
        let all = row.times(is_write);
        let rate = row.median(|outcome| outcome.rate(is_write));
        let published = match name {
            "sequential write" => PUBLISHED_SEQUENTIAL[nth],
            _ => [f64::NAN; 4],
        };
        let at = |percent| all.percentile(percent);
        let peak = row.median(|outcome| outcome.peak_cached);
        let left = row.median(|outcome| outcome.left);
        let each = match is_write {
            true => row.median(|outcome| outcome.disk_write_bytes),
            false => f64::NAN,
        };
        let [mbs, _, _, last] = published;
        let iops = rate * 1e6 / bs as f64;
        table.row(
            &row.name,
            &[rate, at(50.0), at(99.0), at(99.9), peak, iops, left, each, mbs, last * MS],
        );
        times.add(&row.name, PERCENTS.iter().map(|percent| (*percent, at(*percent))).collect());
        cached.add(&row.name, row.outcomes[0].cached.clone());
        let rates = row.each(|outcome| outcome.rate(is_write));
        study.repeats(format!("{title}, {}", row.name), Unit::MbPerSecond, &rates);
    }
    study.tables.push(table);
    study.plots.extend([times, cached]);
}

fn claim_single(study: &mut Study, name: &str, rows: &[Row], is_random: bool) {
    let rates = |row: &Row| row.each(|outcome| outcome.rate(true));
    let lazy = &rows[LAZY];
    let p999 = lazy.percentiles(true, 99.9);
    let mut claim = |what: &str, measured: &[f64], promise| {
        let what = format!("lazy, {name}: {what}");
        study.claims.push(Claim::new(what, measured, Some(promise)));
    };
    if is_random {
        let (to, theirs) = (rates(&rows[BUFFERED]), rows[BUFFERED].percentiles(true, 99.9));
        claim("rate / buffered's", &ratios(&rates(lazy), &to), Promise::AtLeast(0.95));
        claim("p99.9 / buffered's", &ratios(&p999, &theirs), Promise::AtMost(2.0));
    } else {
        let fastest = rows.iter().map(|row| median(&rates(row))).fold(0.0, f64::max);
        let parts: Vec<f64> = rates(lazy).iter().map(|rate| rate / fastest).collect();
        claim("rate / the fastest mode's", &parts, Promise::AtLeast(0.95));
        let p50 = lazy.percentiles(true, 50.0);
        claim("p99.9 / p50", &ratios(&p999, &p50), Promise::AtMost(3.0));
    }
    claim_within(study, &format!("lazy, {name}"), lazy);
}

/// Lazy writers keep what is unwritten within their window.
fn claim_within(study: &mut Study, name: &str, lazy: &Row) {
    let window = (LAZY_WINDOW_BYTES + SLACK_BYTES) as f64;
    let mut parts = lazy.each(|outcome| outcome.peak_unclean / window);
    parts.retain(|part| !part.is_nan());
    if parts.is_empty() {
        let note = format!("{name}: the kernel does not report unwritten data.");
        return study.notes.push(note);
    }
    let what = format!("{name}: unwritten / (window + 1 MiB)");
    study.claims.push(Claim::new(what, &parts, Some(Promise::AtMost(1.0))));
}

fn over_time(title: &str) -> Plot {
    let seconds = Axis::linear("seconds", Unit::Number);
    Plot::lines(title, seconds, Axis::linear("bytes", Unit::Bytes))
}

/// A: four writers, each its own file.
fn four(fixture: &Fixture<'_>, study: &mut Study, checked: &mut Checked) -> Result<()> {
    let writers = |io: IoMode| -> Vec<Client> {
        let one = |path: &PathBuf| fixture.client(path, io, Rw::Write, MIB, 1);
        fixture.files.iter().map(one).collect()
    };
    let mut rows: Vec<Row> = MODES.iter().map(|(mode, io)| Row::new(*mode, writers(*io))).collect();
    fixture.play("A: four writers", &mut rows, study)?;
    checked.check("A: four writers", &rows);
    let columns = [
        ("aggregate MB/s", Unit::MbPerSecond),
        ("p50", Unit::Nanos),
        ("p99", Unit::Nanos),
        ("p99.9", Unit::Nanos),
        ("peak unwritten", Unit::Bytes),
        ("peak cache", Unit::Bytes),
        ("left", Unit::Bytes),
        ("published p99.9", Unit::Nanos),
    ];
    let mut table = Table::new("A: four writers", &columns);
    let own = [("MB/s", Unit::MbPerSecond), ("p99", Unit::Nanos), ("p99.9", Unit::Nanos)];
    let mut each = Table::new("A: each of the four", &own);
    let mut unwritten = over_time("A: four writers: unwritten");
    let mut cached = over_time("Footprint: four writers: cached");
    for (nth, row) in rows.iter().enumerate().filter(|(_, row)| !row.outcomes.is_empty()) {
        let times = row.times(true);
        let at = |percent| times.percentile(percent);
        let medians = [
            row.median(|outcome| outcome.rate(true)),
            at(50.0),
            at(99.0),
            at(99.9),
            row.median(|outcome| outcome.peak_unclean),
            row.median(|outcome| outcome.peak_cached),
            row.median(|outcome| outcome.left),
            PUBLISHED_FOUR[nth] * MS,
        ];
        table.row(&row.name, &medians);
        for writer in 0..fixture.files.len() {
            let of = |measure: fn(&parallel::Played) -> f64| {
                row.median(|outcome| measure(&outcome.clients[writer]))
            };
            let p99 = of(|client| client.reached.writes.percentile(99.0));
            let p999 = of(|client| client.reached.writes.percentile(99.9));
            each.row(
                format!("{}, writer {}", row.name, writer + 1),
                &[of(|one| one.rate), p99, p999],
            );
        }
        unwritten.add(&row.name, row.outcomes[0].unclean.clone());
        cached.add(&row.name, row.outcomes[0].cached.clone());
    }
    study.tables.extend([table, each]);
    study.plots.extend([unwritten, cached]);
    let rate = |row: &Row| row.each(|outcome| outcome.rate(true));
    let p999 = |row: &Row| row.percentiles(true, 99.9);
    let [buffered, lazy] = [&rows[BUFFERED], &rows[LAZY]];
    let parts = ratios(&rate(lazy), &rate(buffered));
    let what = "A: four lazy writers: aggregate / buffered's";
    study.claims.push(Claim::new(what, &parts, Some(Promise::AtLeast(0.95))));
    let parts = ratios(&p999(lazy), &p999(buffered));
    let what = "A: four lazy writers: p99.9 / buffered's";
    study.claims.push(Claim::new(what, &parts, Some(Promise::AtMost(1.0))));
    claim_within(study, "A: four lazy writers", lazy);
    Ok(())
}

/// C and D: a bulk writer and three readers, all in one mode; and the same with buffered readers.
fn beside(fixture: &Fixture<'_>, study: &mut Study, checked: &mut Checked) -> Result<()> {
    for (title, readers) in [
        ("C: a bulk writer and three readers, in one mode", None),
        ("D: a bulk writer and three buffered readers", Some(IoMode::Buffered)),
    ] {
        let clients = |io: IoMode| -> Vec<Client> {
            let read = |path: &PathBuf| {
                let mut reader = fixture.client(path, readers.unwrap_or(io), Rw::Read, 4 * KIB, 1);
                // Half of what memory holds: it is read again while a writer leaves it there.
                reader.job.size = fixture.file_bytes / 4;
                reader
            };
            let [written, read_ones @ ..] = &fixture.files;
            let writer = fixture.client(written, io, Rw::Write, MIB, 1);
            [writer].into_iter().chain(read_ones.iter().map(read)).collect()
        };
        let mut rows: Vec<Row> =
            MODES.iter().map(|(mode, io)| Row::new(*mode, clients(*io))).collect();
        fixture.play(title, &mut rows, study)?;
        checked.check(title, &rows);
        let columns = [
            ("writer MB/s", Unit::MbPerSecond),
            ("writer p99.9", Unit::Nanos),
            ("readers MB/s", Unit::MbPerSecond),
            ("readers p50", Unit::Nanos),
            ("readers p99", Unit::Nanos),
            ("readers p99.9", Unit::Nanos),
            ("peak unwritten", Unit::Bytes),
        ];
        let mut table = Table::new(title, &columns);
        for row in rows.iter().filter(|row| !row.outcomes.is_empty()) {
            let (writes, reads) = (row.times(true), row.times(false));
            let medians = [
                row.median(|outcome| outcome.rate(true)),
                writes.percentile(99.9),
                row.median(|outcome| outcome.rate(false)),
                reads.percentile(50.0),
                reads.percentile(99.0),
                reads.percentile(99.9),
                row.median(|outcome| outcome.peak_unclean),
            ];
            table.row(&row.name, &medians);
        }
        study.tables.push(table);
        if readers.is_some() {
            claim_mixed(study, &rows);
        }
    }
    Ok(())
}

fn claim_mixed(study: &mut Study, rows: &[Row]) {
    let [buffered, lazy] = [&rows[BUFFERED], &rows[LAZY]];
    let rates = |is_writer: bool| {
        let of = |row: &Row| row.each(|outcome| outcome.rate(is_writer));
        ratios(&of(lazy), &of(buffered))
    };
    let p999 = ratios(&lazy.percentiles(false, 99.9), &buffered.percentiles(false, 99.9));
    let claims = [
        ("D: lazy writer / buffered writer", rates(true), Promise::AtLeast(1.3)),
        ("D: readers next to lazy / next to buffered", rates(false), Promise::AtLeast(0.9)),
        ("D: p99.9 of readers, lazy / buffered", p999, Promise::AtMost(2.0)),
    ];
    for (what, measured, promise) in claims {
        study.claims.push(Claim::new(what, &measured, Some(promise)));
    }
}

/// E: a writer of each mode next to a buffered one.
fn against(fixture: &Fixture<'_>, study: &mut Study, checked: &mut Checked) -> Result<()> {
    let clients = |io: IoMode| -> Vec<Client> {
        let pair = [(&fixture.files[0], io), (&fixture.files[1], IoMode::Buffered)];
        pair.map(|(path, io)| fixture.client(path, io, Rw::Write, MIB, 1)).into()
    };
    let row = |(mode, io): &(&str, IoMode)| Row::new(format!("{mode}, buffered"), clients(*io));
    let mut rows: Vec<Row> = MODES.iter().map(row).collect();
    fixture.play("E: a writer next to a buffered writer", &mut rows, study)?;
    checked.check("E: a writer next to a buffered writer", &rows);
    let columns = [
        ("aggregate MB/s", Unit::MbPerSecond),
        ("first MB/s", Unit::MbPerSecond),
        ("buffered MB/s", Unit::MbPerSecond),
        ("first p99.9", Unit::Nanos),
        ("buffered p99.9", Unit::Nanos),
    ];
    let mut table = Table::new("E: a writer next to a buffered writer", &columns);
    for row in rows.iter().filter(|row| !row.outcomes.is_empty()) {
        let rate = |nth: usize| row.median(|outcome| outcome.clients[nth].rate);
        let p999 =
            |nth: usize| row.median(|outcome| outcome.clients[nth].reached.writes.percentile(99.9));
        let both = row.median(|outcome| outcome.rate(true));
        table.row(&row.name, &[both, rate(0), rate(1), p999(0), p999(1)]);
    }
    study.tables.push(table);
    let rates = |row: &Row| row.each(|outcome| outcome.rate(true));
    let parts = ratios(&rates(&rows[LAZY]), &rates(&rows[BUFFERED]));
    let what = "E: lazy and buffered / two buffered";
    study.claims.push(Claim::new(what, &parts, Some(Promise::AtLeast(0.95))));
    Ok(())
}

/// The cost of a window: four lazy writers, and one of scattered pages.
fn windows(fixture: &Fixture<'_>, study: &mut Study) -> Result<()> {
    let within = |mut clients: Vec<Client>, window: u64| {
        clients.iter_mut().for_each(|client| client.window = Some(window * MIB));
        clients
    };
    let lazy = |path: &Path, rw, bs, depth| fixture.client(path, IoMode::Lazy, rw, bs, depth);
    let four = || fixture.files.iter().map(|path| lazy(path, Rw::Write, MIB, 1)).collect();
    let scattered = || vec![lazy(&fixture.files[0], Rw::Randwrite, 4 * KIB, 16)];
    let columns = [
        ("four MB/s", Unit::MbPerSecond),
        ("four p99.9", Unit::Nanos),
        ("unwritten", Unit::Bytes),
        ("random IOPS", Unit::PerSecond),
        ("random p99.9", Unit::Nanos),
        ("CPU per write", Unit::Nanos),
    ];
    let name = |window: &u64| format!("{window} MiB");
    let row = |window: &u64| Row::new(name(window), within(four(), *window));
    let mut rows: Vec<Row> = WINDOWS.iter().map(row).collect();
    fixture.play("Footprint: four lazy writers, by window", &mut rows, study)?;
    let row = |window: &u64| Row::new(name(window), within(scattered(), *window));
    let mut random: Vec<Row> = WINDOWS.iter().map(row).collect();
    fixture.play("Footprint: random lazy writes, by window", &mut random, study)?;
    let mut table = Table::new("Footprint: lazy, by its window", &columns);
    for (row, random) in rows.iter().zip(&random) {
        let spent = |outcome: &Outcome| {
            let writes: u64 = outcome.clients.iter().map(|one| one.reached.count()).sum();
            outcome.cpu_nanos / writes.max(1) as f64
        };
        let medians = [
            row.median(|outcome| outcome.rate(true)),
            row.times(true).percentile(99.9),
            row.median(|outcome| outcome.peak_unclean),
            random.median(|outcome| outcome.rate(true)) * 1e6 / (4 * KIB) as f64,
            random.times(true).percentile(99.9),
            random.median(spent),
        ];
        table.row(&row.name, &medians);
    }
    study.tables.push(table);
    Ok(())
}
