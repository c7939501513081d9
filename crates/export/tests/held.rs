//! The durability of answered requests: a disk delays its flushes until a client reads a
//! certain sector. Answers come in the order in which things end, so a flush, or a request with
//! FUA, that is answered before that read has not waited for the disk.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/front.rs"]
mod front;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::FUA;
use front::Front;
use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, RamDisk, Ring};
use udm::sync::Arc;
use udm_export::nbd::Server;
use udm_export::vhost;
use udm_export::vhost::poll::Poll;

const SIZE: u64 = 1 << 20;
/// A read of this sector lets the flushes go.
const KEY: u64 = SIZE - 512;
const WRITE_COOKIE: u64 = 1;
const HELD_COOKIE: u64 = 2;
const KEY_COOKIE: u64 = 3;

#[derive(Debug)]
struct Hesitant {
    ram: RamDisk,
    flushes: Mutex<Vec<DiskIo>>,
}

impl Disk for Hesitant {
    fn limits(&self) -> &DiskLimits {
        self.ram.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        let is_key = io.op == Op::Read && io.offset == KEY;
        if io.op == Op::Flush {
            return self.flushes.lock().unwrap().push(io);
        }
        self.ram.start(io, ring);
        if is_key {
            self.flushes.lock().unwrap().drain(..).for_each(|io| self.ram.start(io, ring));
        }
    }
}

/// Sends a write, then `request`, and, when the disk has a flush, the read that lets it go; which
/// answers come, in order.
fn answers(request: &[u8]) -> Vec<u64> {
    let ram = RamDisk::new(SIZE, 512);
    let disk = Arc::new(Hesitant { ram, flushes: Mutex::default() });
    let device = common::linear(disk.clone());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let uri = format!("nbd+unix://{}", socket.display()).parse().unwrap();
    let server = Server::start(&device, &uri).unwrap();
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(&common::usual_handshake(false)).unwrap();
    stream.read_exact(&mut [0; common::USUAL_ANSWER_BYTES]).unwrap();
    let mut client = common::Client { stream };
    let read = common::request(0, 0, KEY_COOKIE, KEY, 512);
    client.send(&[&common::write(0, WRITE_COOKIE, 0, &[7; 512]), request].concat());
    let deadline = Instant::now() + Duration::from_secs(60);
    while disk.flushes.lock().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "the disk is never told to flush");
        std::thread::sleep(Duration::from_millis(1));
    }
    client.send(&read);
    let answers = (0..3).map(|_| {
        let mut head = [0; 16];
        client.stream.read_exact(&mut head).unwrap();
        let mut rest = &head[4..];
        assert_eq!(common::take_u32(&mut rest), 0, "no error");
        let cookie = common::take_u64(&mut rest);
        if cookie == KEY_COOKIE {
            client.stream.read_exact(&mut [0; 512]).unwrap();
        }
        cookie
    });
    let answers = answers.collect();
    drop(client);
    server.stop();
    answers
}

#[test]
fn a_flush_is_answered_when_the_disk_has_flushed() {
    let flush = common::request(0, 3, HELD_COOKIE, 0, 0);
    assert_eq!(answers(&flush), [WRITE_COOKIE, KEY_COOKIE, HELD_COOKIE]);
}

#[test]
fn what_has_fua_is_answered_when_the_disk_has_flushed() {
    let write = common::write(FUA, HELD_COOKIE, 4096, &[7; 512]);
    let trim = common::request(FUA, 4, HELD_COOKIE, 8192, 4096);
    let zeroes = common::request(FUA, 6, HELD_COOKIE, 8192, 4096);
    for request in [write, trim, zeroes] {
        assert_eq!(answers(&request), [WRITE_COOKIE, KEY_COOKIE, HELD_COOKIE]);
    }
}

/// Which answers come to a driver with these features, in order: to a request of this kind and with
/// this data, which changes the disk, and to the read that lets the disk's flushes go.
fn answers_to_a_driver(features: u64, (kind, data): (u32, &[u8])) -> Vec<u64> {
    let ram = RamDisk::new(SIZE, 512);
    let disk = Arc::new(Hesitant { ram, flushes: Mutex::default() });
    let device = common::linear(disk.clone());
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let server = vhost::Server::start(&device, &vhost::Uri::new(&socket, Poll::Never)).unwrap();
    let mut front = Front::connect(&socket);
    front.negotiate(features);
    let mut ring = front.ring(0, 16);
    let write = ring.begin(&front, 1, (kind, 0), data, 0, false);
    ring.kick();
    // The write is answered, or its flush is held.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut answered = None;
    while answered.is_none() && disk.flushes.lock().unwrap().is_empty() {
        assert!(Instant::now() < deadline, "the write is neither answered nor flushed");
        std::thread::sleep(Duration::from_millis(1));
        answered = ring.pop(&front);
    }
    let read = ring.begin(&front, 2, (0, KEY / 512), &[], 512, false);
    ring.kick();
    let cookies = [(write, WRITE_COOKIE), (read, KEY_COOKIE)];
    let mut heads: Vec<u16> = answered.iter().map(|(head, _)| *head).collect();
    while heads.len() < 2 {
        heads.push(ring.wait(&front).0);
    }
    let cookie = |head: &u16| cookies.iter().find(|(other, _)| other == head).unwrap().1;
    let answers = heads.iter().map(cookie).collect();
    drop((front, server));
    answers
}

#[test]
fn a_write_of_a_driver_that_sends_no_flushes_is_durable_with_its_answer() {
    let without = front::VERSION_1 | front::PROTOCOL;
    // A sector, a number of sectors, flags.
    let range = [&8_u64.to_le_bytes()[..], &1_u32.to_le_bytes(), &[0; 4]].concat();
    // Write, discard, zeroes.
    for change in [(1, &[7; 512][..]), (11, &range), (13, &range)] {
        let answers = |features| answers_to_a_driver(features, change);
        assert_eq!(answers(without), [KEY_COOKIE, WRITE_COOKIE], "{change:?}");
        assert_eq!(answers(without | front::FLUSH), [WRITE_COOKIE, KEY_COOKIE], "{change:?}");
    }
}
