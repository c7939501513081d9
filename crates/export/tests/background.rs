//! Clients of a device whose answers depend on its background: parked requests continue, even if
//! other clients disconnect or the export stops meanwhile.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, RamDisk};
use udm::queue::Queue;
use udm::simple::{Delay, DelayArgs};
use udm::sync::Arc;
use udm::table::Table;
use udm_export::nbd::Server;

const SIZE: u64 = 8 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A disk that takes `delay_ms` for everything, its server, and the queue that makes it tick.
struct Slow {
    // In the order in which they must end.
    server: Server,
    _background: Queue,
    device: Arc<Device>,
    folder: tempfile::TempDir,
}

impl Slow {
    fn start(delay_ms: u64) -> Slow {
        let table = Table::parse(&format!("0 {} delay memory 0 {delay_ms}", SIZE / 512)).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(SIZE, 512));
        let args = DelayArgs::parse(&table.lines[0].args).unwrap();
        let delay = Delay::new(&args, SIZE, &mut |_| Ok(disk.clone())).unwrap();
        let table = LoadedTable::single(Arc::new(delay), SIZE);
        let device = Device::with_table("slow", table).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let uri = format!("nbd+unix://{}/socket", folder.path().display()).parse().unwrap();
        let server = Server::start(&device, &uri).unwrap();
        let background = Queue::background("background", &device).unwrap();
        Slow { server, _background: background, device, folder }
    }

    fn client(&self) -> common::Client {
        let mut stream = UnixStream::connect(self.folder.path().join("socket")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&common::usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; common::USUAL_ANSWER_BYTES]).unwrap();
        common::Client { stream }
    }
}

#[test]
fn delayed_requests_come_in_time() {
    // A hundred delays, one after the other, would take longer than a client waits.
    let slow = Slow::start(700);
    let mut client = slow.client();
    for round in 0..3 {
        let start = Instant::now();
        for cookie in 0..100 {
            client.send(&common::write(0, cookie, cookie * 4096, &[round; 4096]));
        }
        for _ in 0..100 {
            assert_eq!(client.reply(0).error, 0);
        }
        let elapsed = start.elapsed();
        assert!(elapsed >= Duration::from_millis(700), "{elapsed:?}");
        assert!(elapsed < PATIENCE, "{elapsed:?}");
    }
    client.check();
}

#[test]
fn leaving_and_stopping_wait_for_what_is_in_flight() {
    let slow = Slow::start(100);
    let mut leaver = slow.client();
    let mut stayer = slow.client();
    for cookie in 0..20 {
        leaver.send(&common::write(0, cookie, 0, &[1; 4096]));
        stayer.send(&common::write(0, cookie, 8192, &[1; 4096]));
    }
    drop(leaver);
    // A request that the device refuses is answered without delay: those before it have arrived.
    // Then the server stops, and still answers them.
    stayer.send(&common::request(0, 0, 99, SIZE, 4096));
    let mut answered = 0;
    loop {
        let reply = stayer.reply(0);
        if reply.cookie == 99 {
            break assert_ne!(reply.error, 0);
        }
        assert_eq!(reply.error, 0);
        answered += 1;
    }
    let Slow { server, _background, device, folder } = slow;
    server.stop();
    for _ in answered..20 {
        assert_eq!(stayer.reply(0).error, 0);
    }
    assert!(stayer.is_closed());
    drop(_background);
    assert_eq!((device.info().ports, device.info().bios_in_flight), (0, 0));
    drop(folder);
}
