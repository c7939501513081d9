//! A server whose clients are silent uses no processor, however brisk they were before; with
//! `poll=never` it does not look for their next request either.

#![allow(clippy::unwrap_used)] // A test that cannot go on ends.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use udm::device::{Device, LoadedTable};
use udm::disk::RamDisk;
use udm::queue::{Watched, watched};
use udm::simple::{Linear, LinearArgs};
use udm::sync::Arc;
use udm::table::Table;
use udm_export::nbd::{Server, Uri};

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Greets, and asks for the only export in the oldest way.
fn connect(path: &std::path::Path) -> UnixStream {
    let mut client = UnixStream::connect(path).unwrap();
    client.read_exact(&mut [0; 18]).unwrap();
    client.write_all(&[0, 0, 0, 3]).unwrap();
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    client
}

/// Reads 512 bytes.
fn read(client: &mut UnixStream) {
    let mut request = [0; 28];
    request[..4].copy_from_slice(&[0x25, 0x60, 0x95, 0x13]);
    request[26] = 2;
    client.write_all(&request).unwrap();
    client.read_exact(&mut [0; 16 + 512]).unwrap();
}

#[test]
fn silent_clients_cost_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let table = Table::parse("0 2048 linear memory 0").unwrap();
    let args = LinearArgs::parse(&table.lines[0].args).unwrap();
    let target = Linear::new(&args, 1 << 20, Arc::new(RamDisk::new(1 << 20, 512))).unwrap();
    let loaded = LoadedTable::single(Arc::new(target), 1 << 20);
    let device = Device::with_table("memory", loaded).unwrap();
    let mut uri = Uri::unix(&path);
    uri.is_polled = false;
    let server = Server::start(&device, &uri).unwrap();
    let mut client = connect(&path);
    (0..500).for_each(|_| read(&mut client));
    assert_eq!(watched(), Watched::default(), "poll=never does not poll");
    drop((client, server));
    let server = Server::start(&device, &Uri::unix(&path)).unwrap();
    let mut clients: Vec<UnixStream> = (0..4).map(|_| connect(&path)).collect();
    if std::thread::available_parallelism().unwrap().get() > 1 {
        // A client that others keep from its processor is not quick: so it may take some rounds.
        let deadline = Instant::now() + Duration::from_secs(60);
        while watched() == Watched::default() {
            assert!(Instant::now() < deadline, "without poll=never a quick client is watched");
            (0..500).for_each(|_| read(&mut clients[0]));
        }
    }
    for _ in 0..200 {
        clients.iter_mut().for_each(read);
    }
    let before = processor_time();
    std::thread::sleep(Duration::from_millis(500));
    let spent = processor_time() - before;
    assert!(spent < Duration::from_millis(20), "{spent:?} of processor time while idle");
    // Sleeping clients are back immediately, and a server with sleepers ends immediately.
    clients.iter_mut().for_each(read);
    // A stop that waits for clients ends after 10 seconds at the earliest.
    let stopping = common::ticks::Ticks::start();
    server.stop();
    assert!(stopping.seconds() < 8.0, "{} s", stopping.seconds());
}
