//! Queues of a disk, with a fake of the driver: `/dev/zero`. All of its data is zeroes, and it
//! takes no commands. The test gives each request to the queue itself.

#![allow(clippy::unwrap_used)]

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::fs::{Mode, OFlags};
use udm::build::{BuildOptions, NamedDevices, build};
use udm::device::Device;
use udm::disk::{Effect, Fault, SimDisk};
use udm::error::Status;
use udm::queue::Queue;
use udm::sync::atomic::{AtomicBool, Ordering};
use udm::table::Table;

use super::*;

const WRITE: u32 = 1;
const FLUSH: u32 = 2;
const DISCARD: u32 = 3;
const ZEROES: u32 = 5;
const FUA: u32 = 1 << 13;

/// Gives requests to a queue, one at a time.
struct Driver {
    worker: Worker,
    requests: Receiver<Description>,
    results: Sender<bool>,
    /// The number of failed requests before the request in progress.
    failed_before: Option<u64>,
}

impl Role for Driver {
    type Tag = u16;

    /// The answer to a request. The fake does not take it; the queue has counted it.
    fn event(&mut self, _event: Event<u16>, _core: &mut Core<u16>) {}

    fn turn(&mut self, core: &mut Core<u16>, is_stopping: bool) -> Turn {
        if self.failed_before.is_none()
            && let Ok(description) = self.requests.try_recv()
        {
            self.failed_before = Some(self.worker.shared.counts.failed());
            self.worker.requests.came(0, true);
            assert!(matches!(self.worker.begin(core, 0, &description), Begun::Yes));
        }
        let has_progress = self.worker.pump(core);
        if self.worker.requests.here() == 0
            && let Some(before) = self.failed_before.take()
        {
            self.results.send(self.worker.shared.counts.failed() == before).unwrap();
        }
        match (is_stopping, has_progress) {
            (true, _) => Turn::Over,
            (_, true) => Turn::Again,
            (_, false) => Turn::Idle(None),
        }
    }

    fn leave(self, core: &mut Core<u16>) {
        self.worker.leave(core);
    }
}

/// A queue, for its client.
struct Client {
    queue: Queue,
    requests: Sender<Description>,
    results: Receiver<bool>,
}

fn shared(device: &Arc<Device>) -> Arc<Shared> {
    Arc::new(Shared {
        device: device.clone(),
        counts: Counts::default(),
        copies_by_address: false,
        memory: OnceLock::new(),
        is_given_up: AtomicBool::new(false),
    })
}

fn driver_file() -> Arc<OwnedFd> {
    Arc::new(rustix::fs::open("/dev/zero", OFlags::RDWR, Mode::empty()).unwrap())
}

impl Client {
    fn start(device: &Arc<Device>, queue: u16) -> Client {
        let (shared, file) = (shared(device), driver_file());
        let (to_queue, requests) = channel();
        let (results, from_queue) = channel();
        let queue = Queue::run_with_commands("ublk", move |core| {
            let worker = Worker::new(core, shared, file, queue, 1)?;
            Ok(Driver { worker, requests, results, failed_before: None })
        });
        Client { queue: queue.unwrap(), requests: to_queue, results: from_queue }
    }

    /// Whether the request succeeds.
    fn succeeds(&self, op_flags: u32, sectors: u32) -> bool {
        self.requests.send(Description { op_flags, sectors, start_sector: 8, address: 0 }).unwrap();
        self.queue.wake();
        self.results.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    fn flushes(&self) -> bool {
        self.succeeds(FLUSH, 0)
    }
}

fn device() -> (Arc<SimDisk>, Arc<Device>) {
    let disk = Arc::new(SimDisk::new(8 << 20, 512));
    disk.say_to_all();
    let mut devices = NamedDevices::new();
    devices.add_disk("/origin", disk.clone());
    let table = Table::parse("0 16384 linear /origin 0").unwrap();
    let table = build(&table, &devices, &BuildOptions::named(1)).unwrap();
    (disk, Device::with_table("disk", table).unwrap())
}

/// Two queues of a disk, and a disk with one queue. A durable write, discard or write of zeroes
/// reports the loss like a flush.
#[test]
fn each_queue_gets_one_error_of_a_failed_flush() {
    let (disk, device) = device();
    let clients = [0, 1, 0].map(|queue| Client::start(&device, queue));
    let changes = [None, Some(WRITE), Some(DISCARD), Some(ZEROES)];
    for (asker, change) in changes.into_iter().flat_map(|op| [0, 1, 2].map(|asker| (asker, op))) {
        assert!(clients.iter().all(Client::flushes), "asker {asker}: before anything failed");
        assert!(clients[(asker + 1) % clients.len()].succeeds(WRITE, 8));
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        assert!(!clients[asker].flushes(), "asker {asker}: its own flush failed");
        for (nth, client) in clients.iter().enumerate().filter(|(nth, _)| *nth != asker) {
            let succeeds = match change {
                Some(op) if nth == 2 => client.succeeds(op | FUA, 8),
                _ => client.flushes(),
            };
            assert!(!succeeds, "asker {asker}: queue {nth} relies on the write");
        }
        for (nth, client) in clients.iter().enumerate() {
            assert!(client.flushes(), "asker {asker}: queue {nth} got its error");
            assert!(client.succeeds(WRITE | FUA, 8), "asker {asker}: queue {nth}");
        }
    }
}

/// A queue with `depth` writes of 1 MiB, of which it has begun as many as it may; their number.
fn parked(device: &Arc<Device>, shared: &Arc<Shared>, depth: u16) -> (Queue, usize) {
    device.begin_suspend().unwrap();
    let (shared, file) = (shared.clone(), driver_file());
    let (report, count) = channel();
    let queue = Queue::run_with_commands("ublk", move |core| {
        let mut worker = Worker::new(core, shared, file, 0, depth)?;
        (0..depth).for_each(|tag| worker.requests.came(tag, true));
        let write = Description { op_flags: WRITE, sectors: 2048, start_sector: 0, address: 0 };
        let has_begun = |tag: &u16| matches!(worker.begin(core, *tag, &write), Begun::Yes);
        report.send((0..depth).take_while(has_begun).count()).unwrap();
        Ok(worker)
    });
    (queue.unwrap(), count.recv().unwrap())
}

#[test]
fn a_queue_holds_no_more_memory_than_its_limit() {
    let (_, device) = device();
    let (queue, count) = parked(&device, &shared(&device), 20);
    assert_eq!(count as u64, HELD_BYTES_MAX >> 20);
    drop(queue);
}

/// The driver takes the tags back when their requests are answered.
#[test]
fn a_queue_that_stops_fails_requests_that_wait_for_a_resume() {
    let (_, device) = device();
    let shared = shared(&device);
    let (queue, count) = parked(&device, &shared, 3);
    assert_eq!((count, shared.counts.failed()), (3, 0));
    queue.stop();
    // 15 seconds at least: a queue that waits for its requests ends after 20.
    for _ in 0..1500 {
        if queue.is_over() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let is_over = queue.is_over();
    shared.is_given_up.store(true, Ordering::SeqCst);
    drop(queue);
    assert_eq!((is_over, shared.counts.failed()), (true, 3));
}
