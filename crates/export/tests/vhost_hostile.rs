//! Clients of vhost-user that are wrong in every way: each loses its ring or its connection, and
//! other clients are not affected.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)] // A test that cannot go on ends.

mod common;
#[path = "common/front.rs"]
mod front;

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::linear;
use front::{DATA, Front, GUEST, NEXT, PACKED, Ring, TABLE, USER, USUAL, WRITABLE, pair, words};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::disk::RamDisk;
use udm::sync::Arc;
use udm_export::Export;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Clients, Server, Uri};

struct Served {
    _folder: tempfile::TempDir,
    path: PathBuf,
    server: Server,
}

impl Served {
    fn start() -> Served {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let device = linear(Arc::new(RamDisk::new(8 << 20, 512)));
        let uri = Uri { is_shared: true, ..Uri::new(&path, Poll::Never) };
        let server = Server::start(&device, &uri).unwrap();
        Served { _folder: folder, path, server }
    }

    fn client(&self) -> (Front, Ring) {
        self.client_with(USUAL)
    }

    fn client_with(&self, features: u64) -> (Front, Ring) {
        let mut front = Front::connect(&self.path);
        front.negotiate(features);
        let ring = front.ring(0, 16);
        (front, ring)
    }

    fn wait_until(&self, what: &str, is_true: impl Fn(&Clients) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_true(&self.server.clients()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.server.clients());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn messages_that_make_no_sense_end_the_connection_and_no_other() {
    let served = Served::start();
    let (mut honest, mut ring) = served.client();
    let region = |guest: u64, len: u64, user: u64, offset: u64| words(&[guest, len, user, offset]);
    let table = |count: u32, regions: &[u8]| [&pair(count, 0)[..], regions].concat();
    let far = region(GUEST, 1 << 60, USER, 0);
    let twice = [region(GUEST, 4096, USER, 0), region(GUEST + 1, 4096, USER + 8192, 0)].concat();
    let one_more = [&words(&[0])[..], &region(0, 4096, 0, 0)].concat();
    let notes = |bytes: u64, offset: u64, more: usize| {
        let numbers = [8_u16.to_ne_bytes(), 16_u16.to_ne_bytes()].concat();
        [words(&[bytes, offset]), numbers, vec![0; more]].concat()
    };
    // Request, payload, files, and the error.
    let cases: Vec<(u32, Vec<u8>, usize, &str)> = vec![
        (6, words(&[0]), 0, "message 6 is not supported"),
        (9999, vec![], 0, "message 9999 is not supported"),
        (2, vec![1], 0, "SetFeatures with 1 bytes instead of 8"),
        (2, words(&[1 << 63]), 0, "features 0x8000000000000000, which were not offered"),
        (16, words(&[1 << 8]), 0, "protocol features 0x100, which"),
        (5, table(2, &twice), 2, "regions overlap"),
        (5, table(1, &far), 1, "more than 4398046511104 bytes of memory"),
        (5, table(1, &region(GUEST, 1 << 40, USER, 0)), 1, "not in a file of 67108864 bytes"),
        (5, table(1, &region(GUEST, 4096, USER, 0)), 0, "1 regions of memory with 0 files"),
        (5, table(u32::MAX, &[]), 0, "a table of memory of 8 bytes"),
        (5, vec![], 0, "a table of memory of 0 bytes"),
        (37, one_more.clone(), 0, "AddMemReg needs one file"),
        (37, one_more.clone(), 2, "AddMemReg needs one file"),
        (38, one_more, 0, "there is no region at 0x0"),
        (8, pair(16, 4), 0, "ring 16 of 16"),
        (8, pair(u32::MAX, 4), 0, "ring 4294967295 of 16"),
        (8, pair(0, 1 << 16), 0, "SetVringNum with 65536"),
        (8, pair(0, 100), 0, "a ring of 100 entries"),
        (8, pair(0, 2048), 0, "a ring of 2048 entries"),
        (10, pair(0, 1 << 16), 0, "SetVringBase with 65536"),
        (18, pair(0, 2), 0, "SetVringEnable with 2"),
        (9, words(&[0, 1, 2, 3, 4]), 0, "are outside of its memory"),
        (9, words(&[0, USER + 8, USER + 0x5000, USER + 0x4000, 0]), 0, "not a multiple of 16"),
        (9, words(&[0, u64::MAX, u64::MAX, u64::MAX, 0]), 0, "are outside of its memory"),
        (9, words(&[1 << 32, USER, USER, USER, 0]), 0, "logging was not offered"),
        (11, pair(77, 0), 0, "ring 77 of 16"),
        (12, words(&[0]), 0, "SetVringKick needs one file"),
        (12, words(&[0]), 2, "SetVringKick needs one file"),
        (12, words(&[1 << 8]), 0, "a ring without a kick file descriptor"),
        (13, words(&[255]), 1, "ring 255 of 16"),
        (21, vec![], 2, "SetBackendReqFd needs one file"),
        (24, words(&[0]), 0, "a configuration of 8 bytes"),
        (24, [pair(200, 100), pair(0, 0)].concat(), 0, "12 bytes of a configuration"),
        (24, pair(0, u32::MAX).into_iter().chain([0; 4]).collect(), 0, "of a configuration at 0"),
        (25, [pair(0, 1), vec![0; 4], vec![7]].concat(), 0, "which is read-only"),
        (25, [pair(32, 1), vec![0; 4], vec![1]].concat(), 0, "which is read-only"),
        (31, vec![0; 16], 0, "requests in flight by 16 bytes"),
        (31, vec![0; 20], 0, "requests in flight of 0 rings of 0 entries"),
        (31, vec![0xff; 24], 0, "requests in flight of 65535 rings"),
        (32, notes(8 << 10, 0, 0), 0, "SetInflightFd needs one file"),
        (32, notes(64, 0, 0), 1, "64 bytes at 0 for requests in flight, and 2560 are needed"),
        (32, notes(1 << 63, 1 << 63, 0), 1, "its file of requests in flight cannot be used"),
    ];
    for (nth, (request, payload, files, said)) in cases.iter().enumerate() {
        let (mut front, _ring) = served.client();
        let fds: Vec<BorrowedFd<'_>> = (0..*files).map(|_| front.file.as_fd()).collect();
        front.tell(*request, payload, &fds);
        let said = said.replace("12 bytes of a configuration", "100 bytes of a configuration");
        served.wait_until(&said, |clients| clients.violations == nth as u64 + 1);
        let last = served.server.clients().last_violation.unwrap();
        assert!(last.contains(&said), "message {request}: {last}, not {said}");
        assert!(front.is_closed());
        assert_eq!(ring.flush(&honest), 0, "another client goes on");
    }
    assert_eq!(honest.stop(&ring), ring.available);
}

#[test]
fn bytes_that_are_no_messages_end_the_connection() {
    let served = Served::start();
    let mut nth = 0;
    let mut say = |bytes: &[u8], said: &str| {
        let mut stream = UnixStream::connect(&served.path).unwrap();
        stream.write_all(bytes).unwrap();
        drop(stream);
        nth += 1;
        served.wait_until(said, |clients| clients.violations == nth);
        let last = served.server.clients().last_violation.unwrap();
        assert!(last.contains(said), "{last}, not {said}");
    };
    say(b"GET / HTTP/1.1\r\n\r\n", "a message has flags");
    say(&[1, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0], "a message has flags 0x5");
    say(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], "a message has flags 0x2");
    say(&[2, 0, 0, 0, 1, 0, 0, 0, 1, 16, 0, 0], "SetFeatures with 4097 bytes");
    say(&[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1], "it disconnected in the middle of a message");
    say(&[2, 0], "it disconnected in the middle of a message");
}

#[test]
fn more_files_than_a_message_may_have_end_the_connection() {
    let served = Served::start();
    let (front, _ring) = served.client();
    let fds: Vec<BorrowedFd<'_>> = (0..12).map(|_| front.file.as_fd()).collect();
    front.tell(3, &[], &fds);
    served.wait_until("too many files", |clients| clients.violations == 1);
    let last = served.server.clients().last_violation.unwrap();
    assert_eq!(last, "more file descriptors than a message may have");
}

#[test]
fn a_client_that_does_not_read_its_answers_is_cut_off() {
    let served = Served::start();
    let front = Front::connect(&served.path);
    front.stream.set_nonblocking(true).unwrap();
    let message: Vec<u8> = [1_u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let many = message.repeat(1000);
    let deadline = Instant::now() + Duration::from_secs(60);
    while served.server.clients().violations == 0 {
        assert!(Instant::now() < deadline);
        let _ = (&front.stream).write(&many);
    }
    let last = served.server.clients().last_violation.unwrap();
    assert!(last.contains("does not read replies") || last.contains("middle"), "{last}");
}

/// Damages a ring, and expects that only this ring fails.
fn breaks_the_ring(said: &str, make: impl FnOnce(&mut Front, &mut Ring)) {
    breaks_the_ring_with(USUAL, said, make);
}

fn breaks_the_ring_with(features: u64, said: &str, make: impl FnOnce(&mut Front, &mut Ring)) {
    let served = Served::start();
    let (honest, mut its_ring) = served.client();
    let (mut front, mut ring) = served.client_with(features);
    let other = front.ring(1, 16);
    make(&mut front, &mut ring);
    ring.kick();
    served.wait_until(said, |clients| clients.failed_rings > 0);
    let last = served.server.clients().last_violation.unwrap();
    assert!(last.contains(said), "{last}, not {said}");
    assert_eq!(its_ring.flush(&honest), 0, "another client goes on");
    let clients = served.server.clients();
    assert_eq!((clients.current, clients.violations), (2, 0), "it stays connected");
    // Its driver may begin again with the ring, and did not lose the other one.
    front.stop(&ring);
    let has_memory = !last.contains("truncated");
    if has_memory {
        let mut again = front.ring(0, 16);
        assert_eq!(again.flush(&front), 0);
        let mut other = Ring { at: other.at, ..other };
        assert_eq!(other.flush(&front), 0);
    }
}

#[test]
fn rings_that_make_no_sense_are_not_served_any_more() {
    breaks_the_ring("a cycle of descriptors", |front, ring| {
        ring.descriptor(front, ring.at, 0, (GUEST + DATA, 16, 1, 0));
        ring.publish(front, 0);
    });
    breaks_the_ring("are not in its memory", |front, ring| {
        ring.descriptor(front, ring.at, 0, (0, 16, 0, 0));
        ring.publish(front, 0);
    });
    breaks_the_ring("65000 requests available in a ring of 16", |front, ring| {
        let [_, available, _] = ring.parts();
        front.memory.store(available + 2, &65000_u16.to_ne_bytes());
    });
    breaks_the_ring("with room for an answer of 0", |front, ring| {
        ring.offer(front, &[(DATA, 16, false)], true);
    });
    breaks_the_ring("a request of 15 bytes", |front, ring| {
        ring.offer(front, &[(DATA, 15, false), (DATA, 1, true)], true);
    });
    breaks_the_ring("a table of descriptors within another", |front, ring| {
        let table = ring.at + 0x8000;
        ring.descriptor(front, ring.at, 0, (GUEST + table, 16, 4, 0));
        ring.descriptor(front, table, 0, (GUEST + table, 16, 4, 0));
        ring.publish(front, 0);
    });
    breaks_the_ring("a part of its memory was truncated", |front, ring| {
        ring.offer(front, &[(DATA, 16, false), (60 << 20, 4096, true), (DATA, 1, true)], true);
        ftruncate(&front.file, 40 << 20).unwrap();
    });
    breaks_the_ring("a part of its memory was truncated", |front, ring| {
        ring.offer(front, &[(DATA, 16, false), (DATA, 1, true)], true);
        ftruncate(&front.file, 0).unwrap();
        // Then the ring's memory is gone: it reads as zeroes.
        std::thread::sleep(Duration::from_millis(20));
    });
}

#[test]
fn a_descriptor_that_is_in_use_is_not_taken_again() {
    breaks_the_ring("is available again while it is in flight", |front, ring| {
        Ring::header(front, DATA, 0, 0);
        // Large enough that the first is in flight when the second is looked at.
        let head = ring.offer(front, &[(DATA, 16, false), (DATA + 64, 513, true)], true);
        ring.publish(front, head);
    });
}

#[test]
fn packed_rings_that_make_no_sense_are_not_served_any_more() {
    let breaks = |said: &str, make: fn(&mut Front, &mut Ring)| {
        breaks_the_ring_with(USUAL | PACKED, said, make);
    };
    breaks("more descriptors available than a ring of 16 has", |front, ring| {
        ring.put(front, 0, &[(GUEST + DATA, 16, NEXT); 16]);
    });
    breaks("are not in its memory", |front, ring| ring.put(front, 0, &[(0, 16, 0)]));
    breaks("request 16 in a ring of 16", |front, ring| {
        ring.put(front, 16, &[(GUEST + DATA, 16, 0)])
    });
    breaks("with room for an answer of 0", |front, ring| {
        ring.put(front, 0, &[(GUEST + DATA, 16, 0)]);
    });
    breaks("an unexpected table of descriptors", |front, ring| {
        ring.put(front, 0, &[(GUEST + DATA, 16, NEXT), (GUEST + DATA, 16, TABLE)]);
    });
    breaks("something to read after", |front, ring| {
        ring.put(front, 0, &[(GUEST + DATA, 16, NEXT | WRITABLE), (GUEST + DATA, 16, 0)]);
    });
    breaks("request 3 is available again while it is in flight", |front, ring| {
        Ring::header(front, DATA, 0, 0);
        let words = [(GUEST + DATA, 16, NEXT), (GUEST + DATA + 64, 513, WRITABLE)];
        ring.put(front, 3, &words);
        ring.put(front, 3, &words);
    });
    breaks("a part of its memory was truncated", |front, ring| {
        ring.offer(front, &[(DATA, 16, false), (60 << 20, 4096, true), (DATA, 1, true)], true);
        ftruncate(&front.file, 40 << 20).unwrap();
    });
}

#[test]
fn packed_rings_that_are_nowhere_end_the_connection() {
    let served = Served::start();
    for (nth, base) in [0x8000_8010_u32, 0x8010_8000, 0x8003_8002, 0x7fff_7fff].iter().enumerate() {
        let (mut front, ring) = served.client_with(USUAL | PACKED);
        front.stop(&ring);
        front.tell(10, &pair(0, *base), &[]);
        front.tell(12, &words(&[0]), &[ring.kick.as_fd()]);
        served.wait_until("a violation", |clients| clients.violations == nth as u64 + 1);
        let last = served.server.clients().last_violation.unwrap();
        assert!(last.contains(&format!("of 16 entries that is at {base:#x}")), "{last}");
        assert!(front.is_closed());
    }
    // Notes of the other kind of rings.
    let (mut front, ring) = served.client();
    front.stop(&ring);
    let notes = front.get_in_flight(1, 16);
    front.set_in_flight(&notes);
    front.tell_and_wait(2, &words(&[USUAL | PACKED]), &[]);
    front.tell(10, &pair(0, front::BEGIN), &[]);
    front.tell(12, &words(&[0]), &[ring.kick.as_fd()]);
    served.wait_until("a violation", |clients| clients.violations == 5);
    let last = served.server.clients().last_violation.unwrap();
    assert!(last.contains("packed ring 0 with 16 entries"), "{last}");
}

#[test]
fn files_that_are_no_eventfds_do_no_harm() {
    let served = Served::start();
    let (honest, mut its_ring) = served.client();
    let (mut front, mut ring) = served.client();
    // A full pipe: a write to it blocks without end.
    let (reader, writer) = std::io::pipe().unwrap();
    let writer = OwnedFd::from(writer);
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    front.tell_and_wait(13, &words(&[0]), &[writer.as_fd()]);
    for _ in 0..10 {
        front::Ring::header(&front, DATA, 4, 0);
        ring.offer(&front, &[(DATA, 16, false), (DATA + 16, 1, true)], false);
        ring.kick();
        let deadline = Instant::now() + Duration::from_secs(60);
        while ring.pop(&front).is_none() {
            assert!(Instant::now() < deadline, "the server waits for its client's pipe");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(front.stop(&ring), ring.available);
    // Kicks that come through a file which can always be read, or never.
    // What waits for such a file ends after 20 seconds at the earliest.
    for file in [
        memfd_create("kick", MemfdFlags::CLOEXEC).unwrap(),
        OwnedFd::from(reader),
        OwnedFd::from(UnixStream::pair().unwrap().0),
    ] {
        front.tell_and_wait(12, &words(&[0]), &[file.as_fd()]);
        assert_eq!(its_ring.flush(&honest), 0);
        let stopping = common::ticks::Ticks::start();
        front.stop(&ring);
        assert!(stopping.seconds() < 15.0, "{} s", stopping.seconds());
    }
    let stopping = common::ticks::Ticks::start();
    Export::stop(Box::new(served.server));
    assert!(stopping.seconds() < 15.0, "{} s", stopping.seconds());
}

#[test]
fn a_client_without_a_ring_makes_room_for_another_one() {
    let served = Served::start();
    let mut idle: Vec<_> = (0..8).map(|_| Front::connect(&served.path)).collect();
    served.wait_until("all are there", |clients| clients.current == 8);
    let (front, mut ring) = served.client();
    assert_eq!(ring.flush(&front), 0);
    served.wait_until("one has gone", |clients| clients.current == 8 && clients.refused == 1);
    assert!(idle[0].is_closed());
    // Those that use the device are not replaced.
    let mut others: Vec<_> = (0..7).map(|_| served.client()).collect();
    // A client is active when the server has read that its ring starts: an answer shows that.
    for (front, ring) in &mut others {
        assert_eq!(ring.flush(front), 0);
    }
    let mut late = Front::connect(&served.path);
    assert!(late.is_closed());
    assert_eq!(ring.flush(&front), 0);
}

#[test]
fn a_request_that_changes_while_it_is_read_harms_only_its_guest() {
    let served = Served::start();
    let (front, mut ring) = served.client();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The header, the descriptors and the table flicker between sense and nonsense.
            let mut nth = 0_u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                nth = nth.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let at = nth >> 33;
                let words = (GUEST + DATA + at % 8192, (at % 5000) as u32, (at % 8) as u16, 1);
                front::put_descriptor(&front.memory, 0, (at % 16) as u16, words);
                front.memory.store(DATA + at % 32, &at.to_ne_bytes());
            }
        });
        for _ in 0..2000 {
            if served.server.clients().failed_rings > 0 || ring.free.len() < 4 {
                break;
            }
            front::Ring::header(&front, DATA, (ring.available % 2).into(), 0);
            let pieces = [(DATA, 16, false), (DATA + 64, 512, false), (DATA + 16, 1, true)];
            ring.offer(&front, &pieces, false);
            ring.kick();
            while ring.sleep(1) {}
            let [_, _, used] = ring.parts();
            let count = front.memory.u16_at(used + 2).load(std::sync::atomic::Ordering::Acquire);
            ring.used = count;
            ring.free = (0..16).collect();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let (honest, mut its_ring) = served.client();
    assert_eq!(its_ring.flush(&honest), 0, "the server is as before");
    assert_eq!(served.server.clients().violations, 0);
}
