//! The paths to one device, in one run: none (in process), vhost-user with and without polling,
//! NBD, and other software: nbdkit, and qemu-storage-daemon by vhost-user. Also fio with libudm in
//! its own process, if its engine is built.
//!
//! The device is a pcache in memory in front of a disk in memory, filled and steady, so that only
//! the path differs. The client of vhost-user is libudm's; NBD's is fio.

mod engine;
mod load;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use udm::device::Device;
use udm::queue::Queue;
use udm_export::vhost::Uri;
use udm_export::vhost::poll::Poll;

use crate::cpu;
use crate::fio;
use crate::job::{Job, Rw};
use crate::load::fill_often;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{Export, FILLS, Setup, has_fio_nbd, is_installed, ram_disk, settle, zero_device};
use crate::stats::{median, ratios};
use crate::unit::Unit;

use load::{Load, Measure, Peer, hand_overs, idle_nbd, idle_vhost, wake_ups};

/// Bytes of the devices.
const BYTES: u64 = 1 << 30;

/// Depth and direction of each load.
const LOADS: [(usize, bool); 4] = [(1, false), (1, true), (32, false), (32, true)];
const LOAD_NAMES: [&str; 4] = ["write 1", "read 1", "write 32", "read 32"];

/// The ways, in the order of the tables.
const WAYS: [&str; 9] = [
    "in process",
    "vhost-user, both poll",
    "vhost-user, poll=auto",
    "vhost-user, no polling",
    "NBD",
    "NBD, no polling",
    "NBD, target zero",
    "nbdkit memory, NBD",
    "qemu-storage-daemon null, vhost-user",
];
/// The prefix of the names of vhost-user's paths.
const VHOST: &str = "vhost-user, ";
const LOCAL: usize = 0;
const POLLING: usize = 1;
const ADAPTIVE: usize = 2;
const SLEEPING: usize = 3;
const NBD: usize = 4;
const NBD_SLEEPING: usize = 5;
const NBD_ZERO: usize = 6;
const NBDKIT: usize = 7;
const QEMU: usize = 8;

/// By path, by load, by round; `None` for paths that are not available.
type Measures = Vec<Vec<Vec<Measure>>>;

/// Everything that is measured.
struct Fixture<'a> {
    setup: &'a Setup,
    device: Arc<Device>,
    nothing: Arc<Device>,
    nbdkit: Option<Peer>,
    qemu: Option<Peer>,
    has_fio: bool,
}

impl Fixture<'_> {
    fn socket(&self, name: &str) -> std::path::PathBuf {
        self.setup.places.memory.path(name)
    }

    /// One path with one load; `None` if it is not available.
    fn measure(&self, way: usize, load: &Load) -> Result<Option<Measure>> {
        let socket = self.socket("exports.vhost");
        let vhost = |poll| load.over_udm(&self.device, &socket, poll).map(Some);
        match way {
            LOCAL => load.in_process(&self.device).map(Some),
            POLLING => vhost(Poll::Always),
            ADAPTIVE => vhost(Poll::Auto),
            SLEEPING => vhost(Poll::Never),
            NBD | NBD_SLEEPING | NBD_ZERO if self.has_fio => {
                let device = if way == NBD_ZERO { &self.nothing } else { &self.device };
                let socket = self.socket("exports.nbd");
                let mut uri = udm_export::nbd::Uri::unix(socket.clone());
                uri.is_polled = way != NBD_SLEEPING;
                let _server = udm_export::nbd::Server::start(device, &uri)?;
                let spent = || cpu::of_process() - cpu::of_threads("bg-exports");
                self.over_nbd(&socket, load, spent).map(Some)
            }
            NBDKIT if self.has_fio => self.nbdkit.as_ref().map_or(Ok(None), |nbdkit| {
                self.over_nbd(&nbdkit.socket, load, || nbdkit.cpu()).map(Some)
            }),
            QEMU => self.qemu.as_ref().map_or(Ok(None), |qemu| {
                let uri = Uri::new(&qemu.socket, Poll::Always);
                load.over_vhost(&uri, || qemu.cpu()).map(Some)
            }),
            _ => Ok(None),
        }
    }

    fn over_nbd(&self, socket: &Path, load: &Load, spent: impl Fn() -> f64) -> Result<Measure> {
        let rw = if load.is_read { Rw::Randread } else { Rw::Randwrite };
        let job = Job { rw, iodepth: load.depth as u32, size: load.span, ..Job::default() };
        let job = Job { io_size: 1 << 40, runtime: load.runtime, ..job };
        let before = spent();
        let result = fio::nbd(socket, &job, &[50.0, 99.9])?;
        let server = (spent() - before).max(0.0) / (result.iops * result.seconds).max(1.0);
        let [p50, p999] = [result.percentiles[0], result.percentiles[1]];
        Ok(Measure { iops: result.iops, p50, p999, server })
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let rounds = setup.repeats(2, 7);
    let own = setup.choose(Duration::from_millis(200), Duration::from_millis(600));
    let runtime = setup.asked().runtime.unwrap_or(own);
    let span = setup.cache_bytes() / 8 * 3;
    let rig = setup.pcache_of("exports", setup.cache_bytes(), ram_disk(BYTES), "0")?;
    let socket = |name: &str| setup.places.memory.path(name);
    let nbdkit = is_installed("nbdkit").then(|| Peer::nbdkit(&socket("exports.nbdkit"), BYTES));
    let qemu = is_installed("qemu-storage-daemon");
    let qemu = qemu.then(|| Peer::qemu(&socket("exports.qemu"), BYTES));
    let fixture = Fixture {
        setup,
        device: rig.device.clone(),
        nothing: zero_device(BYTES)?,
        nbdkit: nbdkit.transpose()?,
        qemu: qemu.transpose()?,
        has_fio: has_fio_nbd(),
    };
    let mut measures: Measures = vec![vec![Vec::new(); LOADS.len()]; WAYS.len()];
    let mut idle = Vec::new();
    {
        let _background = Queue::background("bg-exports", &rig.device)?;
        fill_often(&rig.device, FILLS * setup.cache_bytes())?;
        for _ in 0..rounds {
            for (nth, (depth, is_read)) in LOADS.into_iter().enumerate() {
                let load = Load { depth, is_read, span, runtime };
                for (way, of_way) in measures.iter_mut().enumerate() {
                    of_way[nth].extend(fixture.measure(way, &load)?);
                    settle(&rig.device)?;
                }
            }
        }
        for poll in [Poll::Auto, Poll::Never] {
            let name = format!("vhost-user, poll={}", poll.name());
            idle.push((name, idle_vhost(&fixture.device, &socket("exports.idle"), poll)?));
        }
    }
    let idle_socket = socket("exports.idle-nbd");
    let export = Export::new(&rig.device, &idle_socket)?;
    idle.push(("NBD".into(), idle_nbd(&idle_socket)?));
    drop(export);
    let mut study = study(&measures, &idle, rounds);
    let asleep = (0..rounds).map(|_| wake_ups(runtime)).collect::<Result<Vec<_>>>()?;
    let awake = (0..rounds).map(|_| hand_overs(runtime)).collect::<Result<Vec<_>>>()?;
    add_bare(&mut study, &measures, &asleep, &awake);
    missing(&mut study, &fixture);
    engine::add(&mut study, setup, BYTES, rounds);
    setup.describe(&mut study, rig.pmem.as_ref())?;
    Ok(study)
}

/// The bare cost of reaching another thread, asleep or awake, for comparison with the exports.
fn add_bare(study: &mut Study, measures: &Measures, asleep: &[Measure], awake: &[Measure]) {
    let columns = [("p50", Unit::Nanos), ("p99.9", Unit::Nanos), ("CPU", Unit::Nanos)];
    let mut table = Table::new("two threads, and no more", &columns);
    let numbers: [fn(&Measure) -> f64; 3] = [|one| one.p50, |one| one.p999, |one| one.server];
    let mut row = |name: &str, rounds| {
        table.row(name, &numbers.map(|number| median(&of(rounds, number))));
    };
    row("a wake-up and the answer's", asleep);
    row("a page and an answer, both look", awake);
    study.tables.push(table);
    for (load, name) in LOAD_NAMES.iter().enumerate().take(2) {
        let mut claim = |what: &str, export: Vec<f64>, bare: Vec<f64>| {
            let parts = ratios(&export, &bare);
            study.claims.push(Claim::new(format!("{name}, {what}"), &parts, None));
        };
        let way = |way: usize, number: fn(&Measure) -> f64| of(&measures[way][load], number);
        let p50 = |one: &Measure| one.p50;
        let server = |one: &Measure| one.server;
        let (sleeping, bare) = (way(SLEEPING, p50), of(asleep, p50));
        claim("no polling: p50 / that of bare wake-ups", sleeping, bare);
        let (sleeping, bare) = (way(SLEEPING, server), of(asleep, server));
        claim("no polling: CPU of the server / that of bare wake-ups", sleeping, bare);
        let local = way(LOCAL, p50);
        let least = local.iter().zip(awake).map(|(local, page)| local + page.p50).collect();
        claim("both poll: p50 / in process and a page's way", way(POLLING, p50), least);
    }
}

fn missing(study: &mut Study, fixture: &Fixture<'_>) {
    let mut say = |is_here: bool, what: &str| {
        if !is_here {
            study.notes.push(format!("{what} is not installed: it was not measured."));
        }
    };
    say(fixture.has_fio, "fio with its NBD engine");
    say(fixture.nbdkit.is_some(), "nbdkit");
    say(fixture.qemu.is_some(), "qemu-storage-daemon");
}

fn study(measures: &Measures, idle: &[(String, f64)], rounds: usize) -> Study {
    let mut study = Study::new(
        "exports",
        "the ways to one device, side by side",
        "random 4 KiB requests at depths 1 and 32 to a pcache in memory in front of a disk in \
         memory: in process; by vhost-user with libudm's client, both sides polling, adaptively, \
         and not at all; by NBD with fio, where the server looks at a quick client's socket before \
         it sleeps, and where it does not. Beside them NBD of the target zero, which does nothing, \
         nbdkit's memory plugin, and a device that does nothing of qemu-storage-daemon, with the \
         same clients. fio's engine is libudm in fio's process, on a pcache of its own in \
         memory. CPU is that of the server's threads for each request, without write-back; \
         in process it is the caller's.",
    );
    type Number = fn(&Measure) -> f64;
    let tables: [(String, Unit, Number); 4] = [
        (format!("requests per second ({rounds} rounds)"), Unit::PerSecond, |one| one.iops),
        ("latency, p50".into(), Unit::Nanos, |one| one.p50),
        ("latency, p99.9".into(), Unit::Nanos, |one| one.p999),
        ("CPU of the server for a request".into(), Unit::Nanos, |one| one.server),
    ];
    for (title, unit, number) in tables {
        let mut table = Table::new(title, &LOAD_NAMES.map(|name| (name, unit)));
        for (name, of_way) in WAYS.iter().zip(measures) {
            if of_way.iter().all(|rounds| !rounds.is_empty()) {
                let values: Vec<f64> =
                    of_way.iter().map(|rounds| median(&of(rounds, number))).collect();
                table.row(*name, &values);
            }
        }
        study.tables.push(table);
    }
    let mut table = Table::new("a silent client", &[("sleeps per second", Unit::Number)]);
    for (name, sleeps) in idle {
        table.row(name.clone(), &[*sleeps]);
    }
    study.tables.push(table);
    let axis = Axis::log("nanoseconds", Unit::Nanos);
    let mut bars = Plot::bars("4 KiB, p50 by way", &LOAD_NAMES, axis);
    for (name, of_way) in WAYS.iter().zip(measures) {
        if of_way.iter().all(Vec::is_empty) {
            continue;
        }
        let points = of_way.iter().enumerate().filter(|(_, rounds)| !rounds.is_empty());
        let points = points.map(|(nth, rounds)| (nth as f64, median(&of(rounds, |one| one.p50))));
        bars.add(*name, points.collect());
        for (nth, rounds) in of_way.iter().enumerate().filter(|(_, rounds)| !rounds.is_empty()) {
            let what = format!("{name}, {}", LOAD_NAMES[nth]);
            study.repeats(what, Unit::PerSecond, &of(rounds, |one| one.iops));
        }
    }
    study.plots.push(bars);
    claims(&mut study, measures, idle);
    study
}

fn of(rounds: &[Measure], number: impl Fn(&Measure) -> f64) -> Vec<f64> {
    rounds.iter().map(number).collect()
}

/// The targets, compared with the measurements. A target for unavailable software is left out.
fn claims(study: &mut Study, measures: &Measures, idle: &[(String, f64)]) {
    use Promise::{AtLeast, AtMost};
    let mut claim = |what: String, rounds: &[f64], promise| {
        if !rounds.is_empty() {
            study.claims.push(Claim::new(what, rounds, Some(promise)));
        }
    };
    let p50 = |way: usize, load: usize| of(&measures[way][load], |one| one.p50);
    let iops = |way: usize, load: usize| of(&measures[way][load], |one| one.iops);
    let server = |way: usize, load: usize| of(&measures[way][load], |one| one.server);
    for (load, name) in LOAD_NAMES.iter().enumerate().take(2) {
        let micros: Vec<f64> = p50(POLLING, load).iter().map(|nanos| nanos / 1000.0).collect();
        claim(format!("{name}, both poll: p50, microseconds"), &micros, AtMost(2.5));
        let times = ratios(&p50(POLLING, load), &p50(LOCAL, load));
        claim(format!("{name}, both poll: p50 / in process"), &times, AtMost(3.0));
        claim(format!("{name}, both poll: requests/s"), &iops(POLLING, load), AtLeast(350e3));
        let nbd = ratios(&p50(SLEEPING, load), &p50(NBD, load));
        claim(format!("{name}, no polling: p50 / NBD's, which looks"), &nbd, AtMost(1.0));
        let nbd = ratios(&p50(SLEEPING, load), &p50(NBD_SLEEPING, load));
        claim(format!("{name}, no polling: p50 / NBD's without"), &nbd, AtMost(1.0));
    }
    for (load, name) in LOAD_NAMES.iter().enumerate().skip(2) {
        for way in [POLLING, ADAPTIVE] {
            let what = format!("{name}, {}: requests/s", WAYS[way].trim_start_matches(VHOST));
            claim(what.clone(), &iops(way, load), AtLeast(700e3));
            let qemu = ratios(&iops(way, load), &iops(QEMU, load));
            claim(format!("{what} / qemu's null"), &qemu, AtLeast(1.5));
        }
        let nbdkit = ratios(&server(NBD, load), &server(NBDKIT, load));
        claim(format!("{name}, NBD: CPU of the server / nbdkit's"), &nbdkit, AtMost(0.6));
        let zero = ratios(&iops(NBD, load), &iops(NBD_ZERO, load));
        claim(format!("{name}, NBD: requests/s / target zero's"), &zero, AtLeast(0.95));
    }
    for (load, name) in LOAD_NAMES.iter().enumerate() {
        let nbd = ratios(&server(SLEEPING, load), &server(NBD_SLEEPING, load));
        claim(format!("{name}, no polling: CPU of the server / NBD's"), &nbd, AtMost(0.5));
    }
    for (name, sleeps) in idle {
        claim(format!("{name}, silent: sleeps per second"), &[*sleeps], AtMost(0.0));
    }
}
