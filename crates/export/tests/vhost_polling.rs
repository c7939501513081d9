//! Rings that are looked at before the server sleeps.

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod common;
#[path = "common/front.rs"]
mod front;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::linear;
use front::{EVENT_IDX, FLUSH, Front, PROTOCOL, USUAL, VERSION_1};
use udm::disk::RamDisk;
use udm::sync::{Arc, Mutex, lock};
use udm::target::FactValue;
use udm_export::Export;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Server, Uri};

/// Processor time is that of all tests: one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// Features that rings differ by.
const KINDS: [u64; 3] = [USUAL, USUAL & !EVENT_IDX, VERSION_1 | PROTOCOL | FLUSH];

struct Served {
    _folder: tempfile::TempDir,
    path: PathBuf,
    server: Server,
}

impl Served {
    fn start(poll: Poll) -> Served {
        let device = linear(Arc::new(RamDisk::new(8 << 20, 512)));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let uri = Uri { is_shared: true, ..Uri::new(&path, poll) };
        let server = Server::start(&device, &uri).unwrap();
        Served { _folder: folder, path, server }
    }

    fn client(&self, features: u64) -> Front {
        let mut front = Front::connect(&self.path);
        front.negotiate(features);
        front
    }
}

fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The time that a server has spent polling rings, and the part that found no request.
fn polled(served: &Served) -> (Duration, Duration) {
    let facts = served.server.facts();
    let micros = |name| match facts.iter().find(|fact| fact.name == name).unwrap().value {
        FactValue::Number(micros) => Duration::from_micros(micros),
        ref other => panic!("{name}: {other:?}"),
    };
    (micros("busy_poll_us"), micros("busy_poll_wasted_us"))
}

/// Requests that come just when the server goes to sleep, or not yet, or not any more: each is
/// found, with no kick but those that the server asks for.
#[test]
fn nobody_sleeps_while_work_waits() {
    let _alone = lock(&ALONE);
    for (poll, features) in [Poll::Auto, Poll::Always, Poll::Never]
        .into_iter()
        .flat_map(|poll| KINDS.map(|features| (poll, features)))
    {
        let served = Served::start(poll);
        let mut front = served.client(features);
        let mut ring = front.ring(0, 64);
        let mut random = udm::prng::Prng::new(11);
        for nth in 0..3000_u64 {
            // A look lasts up to 100 us; the moments after its end matter most.
            let longest = 1 + random.below(150_000);
            let pause = Duration::from_nanos(random.below(longest));
            let begin = Instant::now();
            while begin.elapsed() < pause {
                std::hint::spin_loop();
            }
            ring.begin(&front, 0, (0, 0), &[], 512, false);
            ring.kick_for(&front, 1);
            let deadline = Instant::now() + Duration::from_secs(60);
            while ring.pop(&front).is_none() {
                assert!(Instant::now() < deadline, "{poll:?} {features:#x}: {nth} is not served");
                std::thread::yield_now();
            }
        }
        let kicks = ring.kicks;
        match poll {
            Poll::Never => assert_eq!(polled(&served).0, Duration::ZERO),
            Poll::Auto => assert!(polled(&served).0 > Duration::ZERO, "it looked"),
            Poll::Always => assert!(kicks < 100, "{kicks} kicks of one that never sleeps"),
        }
    }
}

#[test]
fn a_ring_that_was_looked_at_costs_nothing_while_it_is_silent() {
    let _alone = lock(&ALONE);
    let served = Served::start(Poll::Auto);
    let mut front = served.client(USUAL);
    let mut ring = front.ring(0, 16);
    let begin = Instant::now();
    (0..500).for_each(|_| assert_eq!(ring.flush(&front), 0));
    let sleeps = wait_until_asleep("udm-vhost");
    let (looked, _) = polled(&served);
    let time = processor_time();
    std::thread::sleep(Duration::from_millis(500));
    let spent = processor_time() - time;
    assert!(spent < Duration::from_millis(20), "{spent:?} of processor time while idle");
    assert_eq!(sleeps_of("udm-vhost"), sleeps, "it slept, and was not woken");
    let (looked_then, in_vain) = polled(&served);
    assert_eq!(looked_then, looked);
    // A poll lasts longer than planned if others take its processor.
    let bound = begin.elapsed() / 10 + Duration::from_millis(1 + 1) + kept_waiting("udm-vhost");
    assert!(in_vain <= bound, "{in_vain:?} of {:?}", begin.elapsed());
}

/// This file of each thread whose name begins so.
fn of_threads(name: &str, file: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let is_it = |task: &PathBuf| read(task.join("comm")).starts_with(name);
    tasks.map(|task| task.path()).filter(is_it).map(|task| read(task.join(file))).collect()
}

/// How often threads whose names begin so have gone to sleep.
fn sleeps_of(name: &str) -> u64 {
    let sleeps = of_threads(name, "status").into_iter().map(|status| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse::<u64>().unwrap()
    });
    sleeps.sum()
}

/// How long threads whose names begin so have waited for a processor.
fn kept_waiting(name: &str) -> Duration {
    // Time on a processor, time of waiting for one, number of times.
    let waited = of_threads(name, "schedstat").into_iter().map(|stat| {
        let nanos = stat.split(' ').nth(1).and_then(|nanos| nanos.parse().ok());
        nanos.map_or(Duration::ZERO, Duration::from_nanos)
    });
    waited.sum()
}

/// Waits until threads whose names begin so sleep and are not woken; returns how often they have
/// gone to sleep.
fn wait_until_asleep(name: &str) -> u64 {
    let is_asleep = || of_threads(name, "status").iter().all(|status| status.contains("State:\tS"));
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let sleeps = sleeps_of(name);
        std::thread::sleep(Duration::from_millis(20));
        if is_asleep() && sleeps_of(name) == sleeps {
            return sleeps;
        }
        assert!(Instant::now() < deadline, "{name} does not fall asleep");
    }
}

#[test]
fn silent_clients_cost_nothing_and_a_server_with_them_ends_immediately() {
    let _alone = lock(&ALONE);
    let served = Served::start(Poll::Never);
    let mut fronts: Vec<_> = (0..3).map(|_| served.client(USUAL)).collect();
    let mut rings: Vec<_> = fronts.iter_mut().map(|front| front.ring(0, 16)).collect();
    for (front, ring) in fronts.iter().zip(&mut rings) {
        (0..50).for_each(|_| assert_eq!(ring.flush(front), 0));
    }
    let before = processor_time();
    std::thread::sleep(Duration::from_millis(500));
    let spent = processor_time() - before;
    assert!(spent < Duration::from_millis(20), "{spent:?} of processor time while idle");
    // A stop that waits for clients ends after 20 seconds at the earliest.
    let stopping = common::ticks::Ticks::start();
    Export::stop(Box::new(served.server));
    assert!(stopping.seconds() < 15.0, "{} s", stopping.seconds());
    assert!(fronts.iter_mut().all(Front::is_closed));
}
