//! Queues of a device in this process, and of connections to its server.

#![allow(clippy::unwrap_used)]

use udm::build::{BuildOptions, NamedDevices, build};
use udm::device::Device;
use udm::disk::{Effect, Fault, SimDisk};
use udm::error::Status;
use udm::sync::Arc;
use udm::table::Table;
use udm_export::vhost::front::Front;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Server, Uri};

use super::*;

/// Carries out a request of `len` bytes, and returns its result.
fn result(queue: &mut Queue, op: Op, len: u64, is_durable: bool) -> i32 {
    queue.bare(op, 0, len, is_durable, 1).unwrap();
    let mut result = None;
    let timeout = Some(Duration::from_secs(60));
    assert_eq!(queue.reap(1, 1, timeout, |_, done| result = Some(done.result)), 1);
    result.unwrap()
}

fn flush(queue: &mut Queue) -> i32 {
    result(queue, Op::Flush, 0, false)
}

/// Two queues of a device in this process, two of a connection to its server, and one of another
/// connection.
#[test]
fn each_queue_gets_one_error_of_a_failed_flush() {
    let lost = -Kind::Io.errno();
    let disk = Arc::new(SimDisk::new(8 << 20, 512));
    disk.say_to_all();
    let mut devices = NamedDevices::new();
    devices.add_disk("/origin", disk.clone());
    let table = Table::parse("0 16384 linear /origin 0").unwrap();
    let table = build(&table, &devices, &BuildOptions::named(1)).unwrap();
    let device = Device::with_table("flushed", table).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let uri = Uri::new(folder.path().join("socket"), Poll::Never);
    let uri = Uri { is_shared: true, ..uri };
    let server = Server::start(&device, &uri).unwrap();
    let fronts = [(); 2].map(|()| Front::connect(&uri).unwrap());
    let served = [&fronts[0], &fronts[0], &fronts[1]]
        .map(|front| Queue::new(Way::Served(Box::new(front.queue().unwrap()))));
    let local = || Queue::new(Way::Local(Box::new(Local::new(&device).unwrap())));
    let mut queues: Vec<Queue> = [local(), local()].into_iter().chain(served).collect();
    for asker in 0..queues.len() {
        for queue in &mut queues {
            assert_eq!(flush(queue), 0, "asker {asker}: before anything failed");
        }
        let writer = (asker + 2) % queues.len();
        assert_eq!(result(&mut queues[writer], Op::WriteZeroes, 4096, false), 0);
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
        assert_eq!(flush(&mut queues[asker]), lost, "asker {asker}: its own flush failed");
        for (nth, queue) in queues.iter_mut().enumerate().filter(|(nth, _)| *nth != asker) {
            // A durable write reports the loss like a flush.
            let reported = match (asker + nth) % 2 {
                0 => flush(queue),
                _ => result(queue, Op::WriteZeroes, 4096, true),
            };
            assert_eq!(reported, lost, "asker {asker}: queue {nth} relies on the write");
        }
        for (nth, queue) in queues.iter_mut().enumerate() {
            assert_eq!(flush(queue), 0, "asker {asker}: queue {nth} got its error");
        }
    }
    drop(queues);
    drop(server);
}
