//! The client of vhost-user-blk that programs use: against the server, against one that dies, and
//! against one that lies.

#![allow(clippy::unwrap_used, clippy::host_endian_bytes)] // A test that cannot go on ends.

mod common;

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::linear;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use udm::bio::Op;
use udm::disk::RamDisk;
use udm::error::Status;
use udm::pmem::client_memory::ClientMemory;
use udm::prng::Prng;
use udm::sync::Arc;
use udm_export::vhost::front::{Ask, DEPTH_MAX, Front, Queue};
use udm_export::vhost::poll::Poll;
use udm_export::vhost::{Server, Uri};

const DISK_BYTES: u64 = 8 << 20;
const POLLS: [Poll; 3] = [Poll::Never, Poll::Auto, Poll::Always];

struct Served {
    _folder: tempfile::TempDir,
    uri: Uri,
    device: Arc<udm::device::Device>,
    server: Server,
    _background: udm::queue::Queue,
}

impl Served {
    fn start(poll: Poll) -> Served {
        let folder = tempfile::tempdir().unwrap();
        let uri = Uri { reconnect: Some(0), ..Uri::new(folder.path().join("socket"), poll) };
        let device = linear(Arc::new(RamDisk::new(DISK_BYTES, 512)));
        let server = Server::start(&device, &uri).unwrap();
        let _background = udm::queue::Queue::background("background", &device).unwrap();
        Served { _folder: folder, uri, device, server, _background }
    }
}

fn ask(op: Op, offset: u64, len: u64, token: u64) -> Ask {
    Ask { op, offset, len, fua: false, token }
}

/// Waits for the next answer; the data of a read is returned too.
fn next(queue: &mut Queue, len: usize) -> (u64, Result<(), Status>, Vec<u8>) {
    let deadline = Instant::now() + Duration::from_secs(300);
    let mut data = vec![0; len];
    loop {
        if let Some(answer) = queue.poll(|_, bytes| bytes.get(&mut data)) {
            return (answer.token, answer.result, data);
        }
        assert!(Instant::now() < deadline, "no answer");
        queue.wait(Some(udm::queue::now() + 1_000_000_000));
    }
}

fn carry_out(queue: &mut Queue, ask: Ask, data: &[u8]) -> (Result<(), Status>, Vec<u8>) {
    assert!(queue.start(ask, |bytes| bytes.put(data)).unwrap());
    let len = if ask.op == Op::Read { ask.len as usize } else { 0 };
    let (token, result, data) = next(queue, len);
    assert_eq!(token, ask.token);
    (result, data)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 7 + seed * 13) >> 3) as u8).collect()
}

#[test]
fn what_is_written_is_read_back() {
    for poll in POLLS {
        let served = Served::start(poll);
        let front = Front::connect(&served.uri).unwrap();
        assert_eq!((front.facts().size_bytes, front.facts().block_bytes), (DISK_BYTES, 512));
        let mut queue = front.queue().unwrap();
        let mut model = vec![0_u8; DISK_BYTES as usize];
        let mut random = Prng::new(5);
        for nth in 0..400_u64 {
            // Up to some pieces of data each.
            let longest = 1 + random.below(2000);
            let len = 512 * (1 + random.below(longest));
            let offset = 512 * random.below((DISK_BYTES - len) / 512);
            let range = offset as usize..(offset + len) as usize;
            match nth % 5 {
                0 | 1 => {
                    let data = pattern(nth, len as usize);
                    let write = Ask { fua: nth % 2 == 0, ..ask(Op::Write, offset, len, nth) };
                    assert_eq!(carry_out(&mut queue, write, &data).0, Ok(()));
                    model[range].copy_from_slice(&data);
                }
                2 => {
                    let op = if nth % 2 == 0 { Op::Discard } else { Op::WriteZeroes };
                    assert_eq!(carry_out(&mut queue, ask(op, offset, len, nth), &[]).0, Ok(()));
                    model[range].fill(0);
                }
                3 => assert_eq!(carry_out(&mut queue, ask(Op::Flush, 0, 0, nth), &[]).0, Ok(())),
                _ => {
                    let (result, data) =
                        carry_out(&mut queue, ask(Op::Read, offset, len, nth), &[]);
                    assert_eq!(result, Ok(()));
                    assert!(data == model[range], "{offset}+{len}");
                }
            }
        }
        let flushes = served.device.info();
        assert_eq!(queue.in_flight(), 0, "{flushes:?}");
        assert_eq!(served.server.clients().failed_rings, 0);
    }
}

#[test]
fn as_many_as_fit_are_in_flight_and_each_is_answered_once() {
    for poll in POLLS {
        let served = Served::start(poll);
        let front = Front::connect(&served.uri).unwrap();
        let mut queue = front.queue().unwrap();
        let mut answered = vec![0; 5000];
        let mut begun = 0;
        while answered.iter().sum::<u64>() < 5000 {
            let block = begun % (DISK_BYTES / 4096);
            if begun < 5000
                && queue
                    .start(ask(Op::Write, block * 4096, 4096, begun), |bytes| {
                        bytes.put(&pattern(block, 4096));
                    })
                    .unwrap()
            {
                begun += 1;
                continue;
            }
            assert!(begun == 5000 || queue.in_flight() == DEPTH_MAX);
            let (token, result, _) = next(&mut queue, 0);
            assert_eq!(result, Ok(()));
            answered[token as usize] += 1;
        }
        assert!(answered.iter().all(|count| *count == 1));
        for block in [0, 7, 2047] {
            let (_, data) = carry_out(&mut queue, ask(Op::Read, block * 4096, 4096, 1), &[]);
            assert!(data == pattern(block, 4096));
        }
        // Another queue at the same time, and one after it.
        let other = std::thread::scope(|scope| {
            let front = &front;
            let run = move || {
                let mut queue = front.queue().unwrap();
                carry_out(&mut queue, ask(Op::Read, 4096, 4096, 1), &[]).1
            };
            (0..20).map(|_| scope.spawn(run).join().unwrap()).collect::<Vec<_>>()
        });
        assert!(other.iter().all(|data| *data == pattern(1, 4096)));
    }
}

#[test]
fn what_cannot_be_is_answered_without_the_server() {
    let served = Served::start(Poll::Never);
    let front = Front::connect(&served.uri).unwrap();
    let mut queue = front.queue().unwrap();
    let most = front.facts().request_bytes_max;
    assert_eq!(most, 126 * (256 << 10));
    for (op, offset, len, status) in [
        (Op::Read, 0, 0, Status::Invalid),
        (Op::Read, 1, 512, Status::Invalid),
        (Op::Read, 0, 513, Status::Invalid),
        (Op::Read, DISK_BYTES, 512, Status::Invalid),
        (Op::Read, 0, most + 512, Status::Invalid),
        (Op::Write, DISK_BYTES - 512, 1024, Status::NoSpace),
        (Op::Write, u64::MAX - 511, 512, Status::NoSpace),
        (Op::Discard, DISK_BYTES, 512, Status::Invalid),
    ] {
        let answer = carry_out(&mut queue, ask(op, offset, len, 9), &[]);
        assert_eq!(answer.0, Err(status), "{op:?} {offset} {len}");
    }
    let mut queues: Vec<Queue> = (1..16).map(|_| front.queue().unwrap()).collect();
    let error = front.queue().unwrap_err().to_string();
    assert!(error.contains("all 16 rings"), "{error}");
    drop(queues.pop());
    front.queue().unwrap();
}

#[test]
fn a_server_that_goes_ends_everything_with_an_error() {
    for poll in POLLS {
        let served = Served::start(poll);
        let front = Front::connect(&served.uri).unwrap();
        let mut queue = front.queue().unwrap();
        assert_eq!(carry_out(&mut queue, ask(Op::Flush, 0, 0, 1), &[]).0, Ok(()));
        // Requests that wait, because the device does.
        served.device.begin_suspend().unwrap();
        while !served.device.finish_suspend().unwrap() {}
        for token in 0..10 {
            assert!(queue.start(ask(Op::Read, 0, 512, token), |_| ()).unwrap());
        }
        let stopping = std::thread::spawn(move || drop(served.server));
        // A server that waits for the device ends after 20 seconds at the earliest.
        let ticks = common::ticks::Ticks::start();
        let mut tokens: Vec<u64> = (0..10)
            .map(|_| {
                let (token, result, _) = next(&mut queue, 512);
                assert_eq!(result, Err(Status::Io));
                token
            })
            .collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..10).collect::<Vec<_>>(), "each once");
        assert!(ticks.seconds() < 15.0, "soon");
        let error = queue.start(ask(Op::Flush, 0, 0, 1), |_| ()).unwrap_err().to_string();
        assert!(error.contains("socket: it disconnected"), "{error}");
        assert!(front.queue().is_err());
        drop(queue);
        stopping.join().unwrap();
    }
}

impl Served {
    /// Requests wait from now on.
    fn hold(&self) {
        self.device.begin_suspend().unwrap();
        while !self.device.finish_suspend().unwrap() {}
    }
}

/// Waits for an answer in a loop of its own.
fn next_by_file(queue: &mut Queue) -> (u64, Result<(), Status>) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(answer) = queue.poll(|_, _| ()) {
            return (answer.token, answer.result);
        }
        assert!(Instant::now() < deadline, "no answer");
        let fd = queue.fd().unwrap();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let longest = rustix::time::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert!(rustix::event::poll(&mut fds, Some(&longest)).unwrap() > 0, "no wake-up");
    }
}

#[test]
fn the_next_server_goes_on_with_what_the_last_one_left() {
    for (poll, has_loop) in [(Poll::Never, false), (Poll::Never, true), (Poll::Always, false)] {
        let mut served = Served::start(poll);
        let uri = Uri { reconnect: Some(60), ..served.uri.clone() };
        let front = Front::connect(&uri).unwrap();
        let (mut queue, mut idle) = (front.queue().unwrap(), front.queue().unwrap());
        assert_eq!(carry_out(&mut queue, ask(Op::Flush, 0, 0, 1), &[]).0, Ok(()));
        for round in 0..2_u64 {
            served.hold();
            for token in 0..10 {
                let at = token * 4096;
                let write = Ask { fua: token % 2 == 0, ..ask(Op::Write, at, 4096, token) };
                let data = pattern(round * 10 + token, 4096);
                assert!(queue.start(write, |bytes| bytes.put(&data)).unwrap());
            }
            // All are with the server.
            assert!(queue.poll(|_, _| ()).is_none());
            drop(served.server);
            // The server is gone: the queue waits, and accepts more requests.
            queue.wait(Some(udm::queue::now() + 30_000_000));
            assert!(queue.poll(|_, _| ()).is_none());
            assert!(queue.start(ask(Op::Flush, 0, 0, 10), |_| ()).unwrap());
            served.device.resume().unwrap();
            served.server = Server::start(&served.device, &uri).unwrap();
            let mut tokens: Vec<u64> = (0..11)
                .map(|_| {
                    let (token, result) = if has_loop {
                        next_by_file(&mut queue)
                    } else {
                        let (token, result, _) = next(&mut queue, 0);
                        (token, result)
                    };
                    assert_eq!(result, Ok(()));
                    token
                })
                .collect();
            tokens.sort_unstable();
            assert_eq!(tokens, (0..11).collect::<Vec<_>>(), "each once");
            for token in 0..10 {
                let read = ask(Op::Read, token * 4096, 4096, token);
                let (result, data) = carry_out(&mut idle, read, &[]);
                assert_eq!(result, Ok(()));
                assert!(data == pattern(round * 10 + token, 4096), "round {round}, {token}");
            }
            assert_eq!((queue.in_flight(), served.server.clients().failed_rings), (0, 0));
        }
    }
}

#[test]
fn no_server_is_waited_for_longer_than_was_said_and_no_other_device_is_taken() {
    wait_for_a_server(false, 1);
    // A handshake with a server that is there may take a third of the time: longer, if the server
    // gets no processor.
    let is_answered = |patience: &u32| wait_for_a_server(true, *patience);
    assert!([3, 12, 48, 180].iter().any(is_answered), "no server answers");
}

/// Returns whether the client ends with the error that it should, and not because a server did not
/// answer in time.
fn wait_for_a_server(is_other: bool, patience: u32) -> bool {
    let served = Served::start(Poll::Never);
    let uri = Uri { reconnect: Some(patience), ..served.uri.clone() };
    let front = Front::connect(&uri).unwrap();
    let mut queue = front.queue().unwrap();
    assert_eq!(carry_out(&mut queue, ask(Op::Flush, 0, 0, 1), &[]).0, Ok(()));
    drop(served.server);
    let shorter = linear(Arc::new(RamDisk::new(DISK_BYTES / 2, 512)));
    let _other = is_other.then(|| Server::start(&shorter, &uri).unwrap());
    let (begin, ticks) = (Instant::now(), common::ticks::Ticks::start());
    for token in 0..3 {
        assert!(queue.start(ask(Op::Read, 0, 512, token), |_| ()).unwrap());
    }
    for _ in 0..3 {
        assert_eq!(next(&mut queue, 512).1, Err(Status::Io));
    }
    assert!(begin.elapsed().as_secs() >= patience.into(), "{:?}", begin.elapsed());
    assert!(ticks.seconds() < f64::from(patience) + 20.0, "{} s", ticks.seconds());
    let error = queue.start(ask(Op::Flush, 0, 0, 1), |_| ()).unwrap_err().to_string();
    let words =
        if is_other { "it is not the device that was there before" } else { "connecting to" };
    assert!(error.contains(&format!("it disconnected, and after {patience} s: ")), "{error}");
    let is_slow = is_other && error.contains("does not answer");
    assert!(is_slow || error.contains(words), "{error}");
    !is_slow
}

/// The client's patience has ended when it checks again, but it could not check before.
#[test]
fn a_client_that_was_stopped_meanwhile_goes_on() {
    let mut served = Served::start(Poll::Never);
    // Long enough for a server that gets no processor.
    let uri = Uri { reconnect: Some(10), ..served.uri.clone() };
    let front = Front::connect(&uri).unwrap();
    let mut queue = front.queue().unwrap();
    assert_eq!(carry_out(&mut queue, ask(Op::Flush, 0, 0, 1), &[]).0, Ok(()));
    drop(served.server);
    assert!(queue.start(ask(Op::Read, 0, 512, 3), |_| ()).unwrap());
    let look = |queue: &mut Queue| {
        queue.wait(Some(udm::queue::now() + 30_000_000));
        queue.poll(|_, _| ())
    };
    assert_eq!(look(&mut queue), None);
    std::thread::sleep(Duration::from_millis(10_500));
    assert_eq!(look(&mut queue), None, "the client did not try for 10 s");
    served.server = Server::start(&served.device, &uri).unwrap();
    assert_eq!(next(&mut queue, 512).1, Ok(()));
}

#[test]
fn a_file_is_readable_when_there_is_an_answer() {
    let served = Served::start(Poll::Never);
    let front = Front::connect(&served.uri).unwrap();
    let mut queue = front.queue().unwrap();
    let is_readable = |queue: &mut Queue, milliseconds: i64| {
        let fd = queue.fd().unwrap();
        let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
        let (tv_sec, tv_nsec) = (milliseconds / 1000, milliseconds % 1000 * 1_000_000);
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec { tv_sec, tv_nsec })).unwrap();
        !fds[0].revents().is_empty()
    };
    // Until it was polled, and the server calls once when it begins: then no more.
    let quiet = |queue: &mut Queue| {
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_readable(queue, 0) {
            assert!(queue.poll(|_, _| ()).is_none());
            assert!(Instant::now() < deadline, "it is always readable");
        }
    };
    quiet(&mut queue);
    for nth in 0..200 {
        // Every third is answered without the server.
        let offset = if nth % 3 == 0 { 1 } else { 512 };
        assert!(queue.start(ask(Op::Read, offset, 512, nth), |_| ()).unwrap());
        assert!(is_readable(&mut queue, 60_000), "request {nth}");
        let (token, _, _) = next(&mut queue, 512);
        assert_eq!(token, nth);
        assert!(queue.poll(|_, _| ()).is_none());
        quiet(&mut queue);
    }
    assert!(queue.start(ask(Op::Flush, 0, 0, 7), |_| ()).unwrap());
    drop(served.server);
    assert!(is_readable(&mut queue, 60_000));
}

/// A server that sends a test's answers. It knows the memory, and serves no request by itself.
struct Liar {
    stream: UnixStream,
    /// What `GetFeatures` and the configuration say.
    features: u64,
    config: Vec<u8>,
    memory: Option<ClientMemory>,
}

const HONEST: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 9;

fn honest_config() -> Vec<u8> {
    let mut config = vec![0; 60];
    config[..8].copy_from_slice(&16_u64.to_ne_bytes());
    config
}

impl Liar {
    /// Serves until the connection ends, or the ring is enabled.
    fn serve(&mut self) {
        while let Some((request, flags, payload, fds)) = self.receive() {
            match request {
                1 => self.answer(request, &self.features.to_ne_bytes()),
                15 => self.answer(request, &(1_u64 << 9 | 1 << 3).to_ne_bytes()),
                24 => {
                    let config = [&payload[..12], &self.config].concat();
                    self.answer(request, &config);
                }
                5 => {
                    let bytes = u64::from_ne_bytes(payload[16..24].try_into().unwrap());
                    self.memory = Some(ClientMemory::map(&fds[0], 0, bytes).unwrap());
                    self.answer(request, &[0; 8]);
                }
                11 => self.answer(request, &payload),
                _ if flags & 8 != 0 => self.answer(request, &[0; 8]),
                _ => {}
            }
            if request == 18 {
                return;
            }
        }
    }

    fn receive(&mut self) -> Option<(u32, u32, Vec<u8>, Vec<OwnedFd>)> {
        let mut head = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let vectors = &mut [IoSliceMut::new(&mut head)];
        let got = recvmsg(&self.stream, vectors, &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        if got.bytes < 12 {
            return None;
        }
        let fds = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
            _ => Vec::new(),
        });
        let fds = fds.collect();
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload).unwrap();
        Some((word(0), word(4), payload, fds))
    }

    fn answer(&self, request: u32, payload: &[u8]) {
        let head = [request, 5, payload.len() as u32].map(u32::to_ne_bytes).concat();
        let _ = (&self.stream).write_all(&[head, payload.to_vec()].concat());
    }
}

/// A client of a lying server, and the state of that server after `lie` was carried out while the
/// ring was enabled.
fn lied_to(features: u64, config: Vec<u8>, lie: Lie) -> udm::Result<Arc<Front>> {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut liar = Liar { stream, features, config, memory: None };
        liar.serve();
        if let Some(memory) = &liar.memory {
            lie(memory);
        }
        liar.serve();
    });
    Front::connect(&Uri::new(path, Poll::Never))
}

#[test]
fn what_a_server_says_of_its_device_is_checked() {
    let with = |at: usize, bytes: &[u8]| {
        let mut config = honest_config();
        config[at..at + bytes.len()].copy_from_slice(bytes);
        config
    };
    let all = HONEST | 1 << 1 | 1 << 2 | 1 << 6 | 1 << 12;
    let refusal =
        |features: u64, config: Vec<u8>| lied_to(features, config, |_| ()).unwrap_err().to_string();
    let usual = [&[0; 8][..], &0x1000_u32.to_ne_bytes(), &4_u32.to_ne_bytes()].concat();
    let usual = with(0, &usual);
    let block = |bytes: u32| {
        let mut config = usual.clone();
        config[20..24].copy_from_slice(&bytes.to_ne_bytes());
        config
    };
    for (features, config, words) in [
        (HONEST & !(1 << 32), honest_config(), "it lacks the features 0x100000000"),
        (HONEST, with(0, &u64::MAX.to_ne_bytes()), "sectors"),
        (HONEST, vec![0; 3], "a configuration of 15 bytes"),
        (all, block(0), "blocks of 0 bytes"),
        (all, block(513), "blocks of 513 bytes"),
        (all, block(1 << 20), "blocks of 1048576 bytes"),
        (all, with(20, &512_u32.to_ne_bytes()), "0 pieces of 33554432 bytes"),
    ] {
        let error = refusal(features, config);
        assert!(error.contains(words), "{error}");
    }
    assert!(lied_to(all, block(512), |_| ()).is_ok());
}

/// A change that a server makes to the shared memory.
type Lie = fn(&ClientMemory);

#[test]
fn a_ring_that_lies_ends_with_an_error() {
    let lies: [(Lie, &str); 4] = [
        (|memory| lie(memory, 2, 255), "2 requests answered of 1"),
        (|memory| lie(memory, u16::MAX, 255), "65535 requests answered of 1"),
        (|memory| lie(memory, 1, 256), "request 256 answered"),
        (|memory| lie(memory, 1, 3), "an answer to request 3, which was not sent"),
    ];
    for (lie, words) in lies {
        let front = lied_to(HONEST, honest_config(), lie).unwrap();
        let mut queue = front.queue().unwrap();
        assert!(queue.start(ask(Op::Read, 0, 512, 1), |_| ()).unwrap());
        let (token, result, _) = next(&mut queue, 512);
        assert_eq!((token, result), (1, Err(Status::Io)));
        let error = queue.start(ask(Op::Read, 0, 512, 2), |_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Answers `count` requests, the first of them `head`.
fn lie(memory: &ClientMemory, count: u16, head: u32) {
    const USED: u64 = 8 << 10;
    // After the request is there.
    let deadline = Instant::now() + Duration::from_secs(60);
    while memory.u16_at((4 << 10) + 2).load(Ordering::Acquire) == 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
    memory.u32_at(USED + 4).store(head, Ordering::Relaxed);
    memory.u16_at(USED + 2).store(count, Ordering::Release);
}
