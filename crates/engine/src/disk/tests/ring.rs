//! The ring by itself: sockets, polls, timeouts, full queues, and its end with work in flight.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::disk::uring::WAYS;
use crate::disk::{Event, Ring};
use crate::sync::Arc;

const SECOND: Option<Duration> = Some(Duration::from_secs(1));

fn pair() -> (Arc<OwnedFd>, Arc<OwnedFd>) {
    let (left, right) = UnixStream::pair().unwrap();
    (Arc::new(left.into()), Arc::new(right.into()))
}

fn eventfd() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap())
}

fn next_event(ring: &mut Ring) -> Event {
    for _ in 0..100 {
        if let Some(event) = ring.pop_event() {
            return event;
        }
        ring.submit_and_wait(SECOND);
    }
    panic!("no event came");
}

#[test]
fn sends_and_receives() {
    let mut ring = Ring::new(8).unwrap();
    let (left, right) = pair();
    ring.recv(&right, Buffer::zeroed(100), 10, 90, 7);
    ring.send(&left, Buffer::from_bytes(b"..hello"), 2, 5, 8);
    let mut tags = Vec::new();
    for _ in 0..2 {
        let event = next_event(&mut ring);
        assert_eq!(event.result.unwrap(), 5);
        if event.tag == 7 {
            assert_eq!(&event.buffer.as_slice()[10..15], b"hello");
        }
        tags.push(event.tag);
    }
    tags.sort_unstable();
    assert_eq!(tags, [7, 8]);
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn whole_transfers_are_whole_over_a_small_socket_buffer() {
    for way in WAYS {
        transfer_whole(Ring::in_way(8, way));
    }
}

fn transfer_whole(mut ring: Ring) {
    let (left, right) = pair();
    let bytes: Vec<u8> = (0..4_000_000u32).map(|n| (n % 251) as u8).collect();
    let parts = bytes.chunks(999_999).map(Buffer::from_bytes).collect();
    ring.recv(&right, Buffer::zeroed(bytes.len()), 0, bytes.len(), 1);
    ring.send_many(&left, parts, 2);
    let (mut received, mut buffer, mut sent) = (0, Buffer::empty(), None);
    while received < bytes.len() || sent.is_none() {
        let event = next_event(&mut ring);
        let count = *event.result.as_ref().unwrap() as usize;
        if event.tag == 2 {
            assert_eq!(count, bytes.len());
            sent = Some(event);
            continue;
        }
        received += count;
        if received < bytes.len() {
            ring.recv(&right, event.buffer, received, bytes.len() - received, 1);
        } else {
            buffer = event.buffer;
        }
    }
    assert!(buffer.as_slice() == bytes);
    assert_eq!(sent.unwrap().buffers.len(), 5);
}

#[test]
fn the_end_of_a_peer_shows() {
    let mut ring = Ring::new(8).unwrap();
    let (left, right) = pair();
    ring.send(&left, Buffer::from_bytes(b"abc"), 0, 3, 2);
    assert_eq!(next_event(&mut ring).tag, 2);
    drop(left);
    ring.recv(&right, Buffer::zeroed(100), 0, 100, 1);
    let event = next_event(&mut ring);
    assert_eq!((event.tag, event.result.unwrap()), (1, 3));
    ring.recv(&right, Buffer::zeroed(100), 0, 100, 3);
    assert_eq!(next_event(&mut ring).result.unwrap(), 0);
    ring.send(&right, Buffer::from_bytes(b"abc"), 0, 3, 4);
    assert_eq!(next_event(&mut ring).result.unwrap_err().raw_os_error(), Some(libc::EPIPE));
}

#[test]
fn nothing_is_moved_at_once() {
    let mut ring = Ring::new(8).unwrap();
    let (_left, right) = pair();
    ring.recv(&right, Buffer::zeroed(8), 4, 0, 1);
    ring.send(&right, Buffer::empty(), 0, 0, 2);
    for tag in [1, 2] {
        let event = ring.pop_event().unwrap();
        assert_eq!((event.tag, event.result.unwrap()), (tag, 0));
    }
    ring.send_many(&right, Vec::new(), 3);
    assert_eq!(next_event(&mut ring).result.unwrap(), 0);
}

#[test]
fn a_ring_dropped_on_another_thread_leaks_and_returns() {
    let mut ring = Ring::new(8).unwrap();
    let (_left, right) = pair();
    ring.recv(&right, Buffer::zeroed(8), 0, 8, 1);
    ring.submit();
    let started = Instant::now();
    std::thread::spawn(move || drop(ring)).join().unwrap();
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn an_eventfd_wakes_from_another_thread() {
    let mut ring = Ring::new(8).unwrap();
    let wake = eventfd();
    ring.poll_readable(&wake, 5);
    ring.submit();
    assert!(ring.pop_event().is_none());
    let other = wake.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        rustix::io::write(&*other, &[1; 8]).unwrap();
    });
    ring.submit_and_wait(None);
    let event = next_event(&mut ring);
    assert_eq!(event.tag, 5);
    assert!(event.result.unwrap() & libc::POLLIN as u32 != 0);
    thread.join().unwrap();
}

#[test]
fn connections_are_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let listener: Arc<OwnedFd> = Arc::new(UnixListener::bind(&path).unwrap().into());
    let mut ring = Ring::new(8).unwrap();
    ring.accept(&listener, 1);
    ring.submit();
    let mut client = UnixStream::connect(&path).unwrap();
    let event = next_event(&mut ring);
    assert_eq!((event.tag, event.result.unwrap()), (1, 0));
    let server = Arc::new(event.connection.unwrap());
    client.write_all(b"abc").unwrap();
    ring.recv(&server, Buffer::zeroed(3), 0, 3, 2);
    assert_eq!(next_event(&mut ring).buffer.as_slice(), b"abc");
}

#[test]
fn a_timeout_ends_the_wait() {
    let mut ring = Ring::new(8).unwrap();
    let wake = eventfd();
    ring.poll_readable(&wake, 5);
    let started = Instant::now();
    ring.submit_and_wait(Some(Duration::from_millis(30)));
    let elapsed = started.elapsed();
    assert!(elapsed >= Duration::from_millis(29), "waited {elapsed:?}");
    assert!(!ring.has_ended());
    ring.submit_and_wait(Some(Duration::ZERO));
    assert_eq!(ring.in_flight(), 1);
}

#[test]
fn a_cancelled_wait_comes_out() {
    let mut ring = Ring::new(8).unwrap();
    let (wake, (_left, right)) = (eventfd(), pair());
    ring.poll_readable(&wake, 5);
    ring.recv(&right, Buffer::zeroed(64), 0, 64, 6);
    ring.cancel(6);
    let event = next_event(&mut ring);
    assert_eq!((event.tag, event.buffer.len()), (6, 64));
    assert_eq!(event.result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
    assert_eq!(ring.in_flight(), 1);
}

#[test]
fn more_waits_than_the_queues_hold() {
    let mut ring = Ring::new(4).unwrap();
    let wake = eventfd();
    for tag in 0..5000 {
        ring.poll_readable(&wake, tag);
    }
    assert_eq!(ring.in_flight(), 5000);
    rustix::io::write(&*wake, &[1; 8]).unwrap();
    let mut tags: Vec<u64> = (0..5000).map(|_| next_event(&mut ring).tag).collect();
    tags.sort_unstable();
    assert!(tags.into_iter().eq(0..5000));
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn a_dropped_ring_takes_its_waits_along() {
    let started = Instant::now();
    let (left, right) = pair();
    let mut ring = Ring::new(4).unwrap();
    for tag in 0..100 {
        ring.poll_readable(&right, tag);
    }
    ring.recv(&right, Buffer::zeroed(4096), 0, 4096, 1000);
    ring.submit();
    ring.recv(&left, Buffer::zeroed(4096), 0, 4096, 1001);
    drop(ring);
    assert!(started.elapsed() < Duration::from_secs(5), "the drop waited in vain");
    assert_eq!(Arc::strong_count(&right), 1, "nothing keeps the socket open");
}

#[test]
#[should_panic(expected = "through a ring with a kernel")]
fn a_ring_without_kernel_takes_no_sockets() {
    Ring::without_kernel().poll_readable(&eventfd(), 1);
}
