//! Tests of queues: wakes are not lost, backgrounds tick when they should, and queues end.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use super::*;
use crate::bio::Bio;
use crate::device::LoadedTable;
use crate::disk::DiskIo;
use crate::sync::atomic::AtomicU64;
use crate::target::{Events, Port, Target, TargetLimits};
use crate::units::MIB;

/// A target whose background only counts its ticks and asks for the next one.
#[derive(Debug, Default)]
struct Clockwork {
    events: Arc<Events>,
    ticks: AtomicU64,
    has_work: AtomicBool,
    /// 0 for none.
    period_ns: AtomicU64,
}

impl Target for Clockwork {
    fn name(&self) -> &'static str {
        "clockwork"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        port.finish(bio, Ok(()));
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {}

    fn tick(&self, now: Nanos, _port: &mut Port) -> Option<Nanos> {
        self.ticks.fetch_add(1, Ordering::SeqCst);
        self.has_work.store(false, Ordering::SeqCst);
        let period_ns = self.period_ns.load(Ordering::SeqCst);
        (period_ns > 0).then_some(now + period_ns)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(512, false)
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        String::new()
    }
}

fn device(target: &Arc<Clockwork>) -> Arc<Device> {
    Device::with_table("clock", LoadedTable::single(target.clone(), MIB)).unwrap()
}

fn wait_until(is_true: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_true() {
        assert!(Instant::now() < deadline, "timeout");
        std::thread::yield_now();
    }
}

#[test]
fn a_background_ticks_at_its_deadline() {
    let target = Arc::new(Clockwork::default());
    target.period_ns.store(SECOND / 500, Ordering::SeqCst);
    let device = device(&target);
    let start = Instant::now();
    let queue = Queue::background("tick", &device).unwrap();
    wait_until(|| target.ticks.load(Ordering::SeqCst) >= 10);
    assert!(start.elapsed() >= Duration::from_millis(16), "it does not tick early");
    drop(queue);
    assert_eq!(device.info().ports, 0);
}

#[test]
fn no_signal_of_work_is_lost() {
    let target = Arc::new(Clockwork::default());
    let device = device(&target);
    let queue = Queue::background("work", &device).unwrap();
    for round in 0..3000 {
        target.has_work.store(true, Ordering::SeqCst);
        device.events().work();
        // Now and then let it fall asleep; otherwise meet it on its way there.
        if round % 100 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        wait_until(|| !target.has_work.load(Ordering::SeqCst));
    }
    drop(queue);
}

#[test]
fn an_idle_background_sleeps() {
    let target = Arc::new(Clockwork::default());
    let device = device(&target);
    let _queue = Queue::background("idle", &device).unwrap();
    wait_until(|| target.ticks.load(Ordering::SeqCst) >= 1);
    std::thread::sleep(Duration::from_millis(100));
    assert!(target.ticks.load(Ordering::SeqCst) <= 3, "it ticks without being asked");
}

#[test]
fn a_queue_that_cannot_be_seated_says_so() {
    let target = Arc::new(Clockwork::default());
    let device = device(&target);
    let mailbox = Ring::without_kernel().mailbox().unwrap();
    let wake: Arc<dyn Wake> = Arc::new(Shared { mailbox, is_stopping: AtomicBool::new(false) });
    let seats: Vec<_> =
        (0..crate::device::PORTS_MAX).map(|_| device.attach_port(wake.clone()).unwrap()).collect();
    let error = Queue::background("late", &device).unwrap_err();
    assert!(error.to_string().contains("ports are attached"), "{error}");
    drop(seats);
    drop(Queue::background("late", &device).unwrap());
}
