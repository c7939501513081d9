//! The protocol's state machines against a reference client, without a socket: the same bytes cut
//! at every place must give the same answers, and no bytes at all may upset the server.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{HashMap, VecDeque};

use common::{FUA, OptionReply, Reply};
use proptest::prelude::*;
use udm::bio::{Bio, Op};
use udm::buffer::BufferPool;
use udm::error::Status;
use udm::queue::Conversation;
use udm_export::nbd::connection::Connection;
use udm_export::nbd::handshake::ExportInfo;
use udm_export::nbd::proto::Violation;

const SIZE: u64 = 4 << 20;

fn export(size_bytes: u64) -> ExportInfo {
    ExportInfo {
        name: "disk".into(),
        size_bytes,
        block_bytes: 512,
        minimum_bytes: 512,
        has_discard: true,
        is_read_only: false,
        needs_tls: false,
    }
}

/// Drives one connection, with a plain array as the device.
struct Bench {
    connection: Connection,
    pool: BufferPool,
    bios: VecDeque<Bio>,
    device: Vec<u8>,
    sent: Vec<u8>,
    /// The requests to the device: operation, FUA, length.
    log: Vec<(Op, bool, u64)>,
    /// Bios stay in flight.
    is_held: bool,
    /// The client does not read from the server.
    is_unread: bool,
}

impl Bench {
    fn new(size_bytes: u64) -> Bench {
        Bench {
            connection: Connection::new(export(size_bytes)),
            pool: BufferPool::new(),
            bios: VecDeque::new(),
            device: vec![0; size_bytes.min(SIZE) as usize],
            sent: Vec::new(),
            log: Vec::new(),
            is_held: false,
            is_unread: false,
        }
    }

    fn serve(&mut self, mut bio: Bio) -> Bio {
        self.log.push((bio.op, bio.fua, bio.len));
        let range = bio.offset as usize..bio.end() as usize;
        match bio.op {
            _ if bio.end() > self.device.len() as u64 => {}
            Op::Read => bio.buffer.as_mut_slice().copy_from_slice(&self.device[range]),
            Op::Write => self.device[range].copy_from_slice(bio.buffer.as_slice()),
            Op::Discard | Op::WriteZeroes => self.device[range].fill(0),
            Op::Flush => {}
        }
        bio
    }

    /// Does what there is to do apart from receiving.
    fn work(&mut self) {
        loop {
            if !self.is_held
                && let Some(bio) = self.bios.pop_front()
            {
                let bio = self.serve(bio);
                self.connection.finished(bio, &mut self.bios, &mut self.pool);
            } else if !self.is_unread
                && let Some(buffer) = self.connection.outgoing()
            {
                self.sent.extend_from_slice(buffer.as_slice());
                self.connection.sent(buffer, &mut self.bios, &mut self.pool);
            } else {
                return;
            }
        }
    }

    /// Lets the server receive `bytes`, at most `step` at a time; returns how many it took.
    fn feed(&mut self, bytes: &[u8], step: usize) -> usize {
        let mut fed = 0;
        self.work();
        while fed < bytes.len() {
            let Some(mut space) = self.connection.incoming() else { break };
            let count = (space.end - space.at).min(step).min(bytes.len() - fed);
            assert!(count > 0, "a space without room looks like a client that hung up");
            let place = &mut space.buffer.as_mut_slice()[space.at..][..count];
            place.copy_from_slice(&bytes[fed..fed + count]);
            fed += count;
            self.connection.received(space, count, &mut self.bios, &mut self.pool);
            self.work();
        }
        fed
    }

    fn hang_up(&mut self) {
        if let Some(space) = self.connection.incoming() {
            self.connection.received(space, 0, &mut self.bios, &mut self.pool);
        }
        self.work();
    }
}

fn option_replies(mut sent: &[u8]) -> Vec<OptionReply> {
    common::take_greeting(&mut sent);
    let mut replies = Vec::new();
    while !sent.is_empty() {
        replies.push(common::take_option_reply(&mut sent));
    }
    replies
}

/// Sends the options after good flags and returns (option, type) of each answer.
fn haggle(options: &[Vec<u8>]) -> Vec<(u32, u32)> {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::client_flags(3), 999);
    bench.feed(&options.concat(), 999);
    option_replies(&bench.sent).iter().map(|reply| (reply.0, reply.1)).collect()
}

const ACK: u32 = 1;
const INFO: u32 = 3;
const UNSUP: u32 = 0x8000_0001;
const INVALID: u32 = 0x8000_0003;
const UNKNOWN: u32 = 0x8000_0006;
const TOO_BIG: u32 = 0x8000_0009;

#[test]
fn options_are_answered_one_by_one() {
    let starttls = common::option(5, &[]);
    let nonsense = common::option(0xdead, &[7; 3000]);
    let huge = common::option(0xbeef, &vec![7; 100_000]);
    assert_eq!(
        haggle(&[starttls, nonsense, huge, common::option(3, &[]), common::option(3, &[1])]),
        [(5, UNSUP), (0xdead, UNSUP), (0xbeef, TOO_BIG), (3, 2), (3, ACK), (3, INVALID)]
    );
    let stranger = common::option(6, &common::go("stranger", &[]));
    let long_name = common::option(6, &common::go(&"x".repeat(5000), &[]));
    let broken = common::option(6, &[0, 0, 0, 200, 1, 2]);
    let named = common::option(6, &common::go("disk", &[1, 2, 3]));
    assert_eq!(
        haggle(&[stranger, long_name, broken, named]),
        [
            (6, UNKNOWN),
            (6, TOO_BIG),
            (6, INVALID),
            (6, INFO),
            (6, INFO),
            (6, INFO),
            (6, INFO),
            (6, ACK)
        ]
    );
}

#[test]
fn contexts_need_structured_replies_first() {
    let set = common::option(10, &common::contexts("", &["base:allocation", "qemu:x"]));
    let list = common::option(9, &common::contexts("", &[]));
    let structured = common::option(8, &[]);
    assert_eq!(
        haggle(&[set.clone(), structured, list, set]),
        [(10, INVALID), (8, ACK), (9, 4), (9, ACK), (10, 4), (10, ACK)]
    );
}

#[test]
fn go_tells_size_flags_and_block_sizes() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(true), 999);
    let replies = common::take_handshake(&mut &bench.sent[..]);
    let info = |kind: u16| {
        let found = replies.iter().find(|reply| reply.1 == 3 && reply.2[..2] == kind.to_be_bytes());
        found.unwrap().2[2..].to_vec()
    };
    let export = info(0);
    let mut rest = &export[..];
    assert_eq!(common::take_u64(&mut rest), SIZE);
    // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, DF, MULTI_CONN, CACHE, FAST_ZERO.
    assert_eq!(common::take_u16(&mut rest), 0b1101_1110_1101);
    let sizes = info(3);
    let mut rest = &sizes[..];
    let sizes = [(); 3].map(|()| common::take_u32(&mut rest));
    assert_eq!(sizes, [512, 4096, 32 << 20]);
}

#[test]
fn export_name_pads_with_zeroes_unless_told_not_to() {
    for (flags, padding) in [(1, 124), (3, 0)] {
        let mut bench = Bench::new(SIZE);
        bench.feed(&common::client_flags(flags), 1);
        bench.feed(&common::option(1, b"disk"), 1);
        assert_eq!(bench.sent.len(), 18 + 10 + padding);
        bench.feed(&common::request(0, 3, 9, 0, 0), 1);
        assert_eq!(bench.log, [(Op::Flush, false, 0)]);
    }
}

#[test]
fn abort_is_acknowledged_and_ends_the_conversation() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::client_flags(3), 1);
    bench.feed(&common::option(2, &[]), 1);
    assert_eq!(option_replies(&bench.sent), [(2, ACK, vec![])]);
    assert!(bench.connection.is_over());
    assert_eq!(bench.connection.violation(), None);
}

/// The script's requests, each command in a good and a bad form, with the answer due.
fn script(is_structured: bool) -> (Vec<u8>, Vec<Reply>) {
    let data: Vec<u8> = (0..8192_u32).map(|byte| (byte % 251) as u8).collect();
    let long = vec![0x5a; 70_000_usize.next_multiple_of(512)];
    let mut bytes = common::usual_handshake(is_structured);
    let mut replies = Vec::new();
    let mut ask = |request: Vec<u8>, error: u32, data: &[u8]| {
        let cookie = u64::from_be_bytes(request[8..16].try_into().unwrap());
        bytes.extend(request);
        replies.push(Reply { cookie, error, data: data.to_vec() });
    };
    let of_structured = |error: u32| if is_structured { error } else { 22 };
    let end = SIZE - 512;
    ask(common::write(0, 1, 4096, &data), 0, &[]);
    ask(common::request(0, 0, 2, 4096, 8192), 0, &data);
    ask(
        common::request(4, 0, 3, 4608, 512),
        of_structured(0),
        if is_structured { &data[512..1024] } else { &[] },
    );
    ask(common::write(FUA, 4, end, &data[..512]), 0, &[]);
    ask(common::write(0, 5, end, &data[..1024]), 28, &[]);
    ask(common::request(0, 0, 6, end, 1024), 22, &[]);
    ask(common::request(0, 0, 7, u64::MAX - 511, 512), 22, &[]);
    ask(common::write(0, 8, 100, &data[..512]), 22, &[]);
    ask(common::request(0, 0, 9, 0, 0), 22, &[]);
    ask(common::write(0, 10, 8192, &long), 0, &[]);
    ask(common::request(0, 0, 11, 8192, 1024), 0, &[0x5a; 1024]);
    ask(common::request(0, 4, 12, 8192, 512), 0, &[]);
    ask(common::request(FUA | 2, 6, 13, 8704, 512), 0, &[]);
    ask(common::request(0, 0, 14, 8192, 1024), 0, &[0; 1024]);
    ask(common::request(16, 6, 15, 0, 512), 95, &[]);
    ask(common::request(0, 6, 16, 0, SIZE as u32 + 512), 28, &[]);
    ask(common::request(0, 3, 17, 0, 0), 0, &[]);
    ask(common::request(0, 3, 18, 512, 0), 22, &[]);
    ask(common::request(0, 5, 19, 0, 4096), 0, &[]);
    ask(common::request(0, 99, 20, 0, 4096), 22, &[]);
    ask(common::request(1 << 9, 0, 21, 0, 4096), 22, &[]);
    let extent = [&1_u32.to_be_bytes()[..], &4096_u32.to_be_bytes(), &[0; 4]].concat();
    let status = if is_structured { &extent[..] } else { &[] };
    ask(common::request(8, 7, 22, 0, 4096), of_structured(0), status);
    ask(common::write(1 << 9, 23, 0, &data), 22, &[]);
    // Beyond the end: a trim, a prefetch and a block status are mistakes, not a lack of space.
    for (cookie, command) in [(24, 4), (26, 5), (28, 7)] {
        ask(common::request(0, command, cookie, end, 1024), 22, &[]);
        ask(common::request(0, command, cookie + 1, SIZE, 512), 22, &[]);
    }
    ask(common::request(0, 6, 30, SIZE, 512), 28, &[]);
    (bytes, replies)
}

fn run_script(bytes: &[u8], cut: usize, step: usize) -> Bench {
    let mut bench = Bench::new(SIZE);
    assert_eq!(bench.feed(&bytes[..cut], step), cut);
    assert_eq!(bench.feed(&bytes[cut..], step), bytes.len() - cut);
    bench
}

fn replies(sent: &[u8], expected: &[Reply]) -> Vec<Reply> {
    let lens: HashMap<u64, usize> =
        expected.iter().map(|reply| (reply.cookie, reply.data.len())).collect();
    let mut rest = sent;
    common::take_handshake(&mut rest);
    let mut replies = Vec::new();
    while !rest.is_empty() {
        replies.push(common::take_reply(&mut rest, |cookie| lens[&cookie]));
    }
    // Answers may overtake each other.
    replies.sort_by_key(|reply| reply.cookie);
    replies
}

#[test]
fn every_command_is_answered_as_the_protocol_says() {
    for is_structured in [false, true] {
        let (bytes, expected) = script(is_structured);
        let bench = run_script(&bytes, 0, usize::MAX);
        for (reply, due) in replies(&bench.sent, &expected).iter().zip(&expected) {
            assert!(reply == due, "request {} got error {}", due.cookie, reply.error);
        }
        assert_eq!(
            bench.log.iter().filter(|entry| entry.1).map(|entry| entry.0).collect::<Vec<_>>(),
            [Op::Write, Op::WriteZeroes]
        );
    }
}

#[test]
fn the_answers_do_not_depend_on_where_the_stream_is_cut() {
    for is_structured in [false, true] {
        let (bytes, expected) = script(is_structured);
        let is_right = |bench: Bench| replies(&bench.sent, &expected) == expected;
        for cut in 0..bytes.len() {
            // Inside long payloads all places are alike.
            if cut % 97 == 0 || cut < 4000 || bytes.len() - cut < 30_000 && cut % 7 == 0 {
                assert!(is_right(run_script(&bytes, cut, usize::MAX)), "cut at {cut}");
            }
        }
        for step in [1, 2, 3, 27, 28, 29, 4096] {
            assert!(is_right(run_script(&bytes, 0, step)), "steps of {step}");
        }
    }
}

#[test]
fn a_long_trim_goes_piece_by_piece_and_is_answered_once() {
    let mut bench = Bench::new(8 << 30);
    bench.feed(&common::usual_handshake(true), usize::MAX);
    let before = bench.sent.len();
    let len = (2_u32 << 30) + 4096;
    bench.feed(&common::request(FUA, 4, 77, 4096, len), usize::MAX);
    assert_eq!(bench.log.len(), 65);
    assert!(bench.log.iter().all(|entry| entry.0 == Op::Discard && entry.1));
    assert_eq!(bench.log.iter().map(|entry| entry.2).sum::<u64>(), u64::from(len));
    let mut rest = &bench.sent[before..];
    let reply = common::take_reply(&mut rest, |_| 0);
    assert_eq!((reply.cookie, reply.error, rest.len()), (77, 0, 0));
}

#[test]
fn the_error_of_any_piece_is_the_answer_and_the_last_thing_done() {
    const PIECES: usize = 3;
    for (command, bad) in [4, 6].into_iter().flat_map(|c| (0..PIECES).map(move |bad| (c, bad))) {
        let mut bench = Bench::new(8 << 30);
        bench.feed(&common::usual_handshake(true), usize::MAX);
        let before = bench.sent.len();
        bench.is_held = true;
        bench.feed(&common::request(0, command, 77, 0, (64 << 20) + 4096), usize::MAX);
        for nth in 0..=bad {
            assert_eq!((bench.bios.len(), bench.sent.len()), (1, before), "piece by piece");
            let status = if nth == bad { Err(Status::NoSpace) } else { Ok(()) };
            let bio = bench.bios.pop_front().unwrap().finished(status);
            bench.connection.finished(bio, &mut bench.bios, &mut bench.pool);
            bench.work();
        }
        assert_eq!(bench.bios.len(), 0, "requests behind an error are not served");
        let mut rest = &bench.sent[before..];
        let reply = common::take_reply(&mut rest, |_| 0);
        assert_eq!((reply.cookie, reply.error, rest.len()), (77, 28, 0));
    }
}

#[test]
fn a_flush_is_answered_behind_the_devices_own() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(true), usize::MAX);
    bench.is_held = true;
    let before = bench.sent.len();
    bench.feed(&common::request(0, 3, 5, 0, 0), usize::MAX);
    assert_eq!((bench.bios.len(), bench.sent.len()), (1, before));
    assert_eq!(bench.bios[0].op, Op::Flush);
    bench.is_held = false;
    bench.work();
    assert!(bench.sent.len() > before);
}

#[test]
fn oversized_requests_are_refused_and_absurd_ones_end_the_connection() {
    let mut bench = Bench::new(8 << 30);
    bench.feed(&common::usual_handshake(true), usize::MAX);
    let before = bench.sent.len();
    bench.feed(&common::request(0, 0, 1, 0, (32 << 20) + 512), usize::MAX);
    bench.feed(&common::write(0, 2, 0, &vec![1; (32 << 20) + 512]), usize::MAX);
    bench.feed(&common::request(0, 3, 3, 0, 0), usize::MAX);
    let mut rest = &bench.sent[before..];
    let errors = [(); 3].map(|()| common::take_reply(&mut rest, |_| 0).error);
    assert_eq!(errors, [22, 22, 0]);
    bench.feed(&common::request(0, 1, 4, 0, u32::MAX), usize::MAX);
    assert_eq!(bench.connection.violation(), Some(Violation::WriteLength(u32::MAX)));
    assert!(bench.connection.is_over());
}

#[test]
fn a_client_that_asks_too_much_at_once_must_wait() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(true), usize::MAX);
    bench.is_held = true;
    let requests: Vec<u8> =
        (0..1000).flat_map(|cookie| common::request(0, 0, cookie, 0, 512)).collect();
    let taken = bench.feed(&requests, 2000);
    assert!(taken < requests.len());
    assert_eq!(bench.bios.len(), 256);
    bench.is_held = false;
    assert_eq!(bench.feed(&requests[taken..], 2000), requests.len() - taken);
    assert_eq!(bench.log.len(), 1000);
}

#[test]
fn a_client_that_does_not_read_its_answers_must_wait() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(true), usize::MAX);
    bench.is_unread = true;
    let requests: Vec<u8> =
        (0..1000).flat_map(|cookie| common::request(0, 0, cookie, 0, 1 << 20)).collect();
    let taken = bench.feed(&requests, usize::MAX);
    assert!((64..70).contains(&bench.log.len()), "{} reads are served", bench.log.len());
    bench.is_unread = false;
    assert_eq!(bench.feed(&requests[taken..], usize::MAX), requests.len() - taken);
    assert_eq!(bench.log.len(), 1000);
}

#[test]
fn good_bye_waits_for_what_is_in_flight() {
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(false), usize::MAX);
    bench.is_held = true;
    bench.feed(&common::request(0, 0, 5, 0, 512), usize::MAX);
    bench.feed(&common::request(0, 2, 6, 0, 0), usize::MAX);
    assert!(bench.connection.incoming().is_none());
    assert!(!bench.connection.is_over());
    bench.is_held = false;
    bench.work();
    assert!(bench.connection.is_over());
    assert_eq!(bench.connection.violation(), None);
}

#[test]
fn hanging_up_inside_a_message_is_noticed() {
    let usual = common::usual_handshake(true);
    let request = common::request(0, 3, 5, 0, 0);
    for (bytes, is_clean) in [
        (usual.clone(), true),
        ([&usual[..], &request].concat(), true),
        ([&usual[..], &request[..20]].concat(), false),
        ([&usual[..], &common::write(0, 5, 0, &[0; 512])[..200]].concat(), false),
        ([&usual[..], &common::write(0, 5, 0, &[0; 65536])[..200]].concat(), false),
        (usual[..30].to_vec(), false),
    ] {
        let mut bench = Bench::new(SIZE);
        bench.feed(&bytes, usize::MAX);
        bench.hang_up();
        assert!(bench.connection.is_over());
        assert_eq!(bench.connection.violation().is_none(), is_clean);
    }
}

#[test]
fn a_slow_handshake_is_cut_off_and_a_slow_session_is_not() {
    let second = 1_000_000_000;
    let mut bench = Bench::new(SIZE);
    assert_eq!(bench.connection.tick(5 * second), Some(35 * second));
    bench.feed(&common::client_flags(3), 1);
    assert_eq!(bench.connection.tick(34 * second), Some(35 * second));
    bench.connection.tick(35 * second);
    assert!(bench.connection.is_over());
    assert!(matches!(bench.connection.violation(), Some(Violation::TooSlow(_))));
    let mut bench = Bench::new(SIZE);
    bench.feed(&common::usual_handshake(true), 999);
    assert_eq!(bench.connection.tick(500 * second), None);
    // A client that disconnects without reading its answers is cut off as well.
    bench.is_unread = true;
    let farewell = [common::request(0, 0, 1, 0, 512), common::request(0, 2, 2, 0, 0)].concat();
    bench.feed(&farewell, 999);
    assert_eq!(bench.connection.tick(500 * second), Some(510 * second));
    assert!(!bench.connection.is_over());
    bench.connection.tick(511 * second);
    assert!(bench.connection.is_over());
}

#[test]
fn a_failing_device_gives_the_errors_of_linux() {
    for (status, error) in [
        (Status::Io, 5),
        (Status::Corrupt, 5),
        (Status::Timeout, 5),
        (Status::NoSpace, 28),
        (Status::ReadOnly, 1),
        (Status::Unsupported, 95),
        (Status::Invalid, 22),
    ] {
        for is_structured in [false, true] {
            let mut bench = Bench::new(SIZE);
            bench.feed(&common::usual_handshake(is_structured), 999);
            let before = bench.sent.len();
            bench.is_held = true;
            bench.feed(&common::request(0, 0, 4, 0, 512), 999);
            let bio = bench.bios.pop_front().unwrap().finished(Err(status));
            bench.connection.finished(bio, &mut bench.bios, &mut bench.pool);
            bench.work();
            let mut rest = &bench.sent[before..];
            assert_eq!(common::take_reply(&mut rest, |_| 0).error, error);
        }
    }
}

proptest! {
    #[test]
    fn garbage_ends_in_a_violation_or_in_waiting(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        start in 0..3_usize,
    ) {
        let mut bench = Bench::new(SIZE);
        let prefix = [vec![], common::client_flags(3), common::usual_handshake(true)];
        bench.feed(&prefix[start], usize::MAX);
        bench.feed(&bytes, 50);
        bench.hang_up();
        prop_assert!(bench.connection.is_over());
    }

    #[test]
    fn damaged_conversations_do_no_harm(
        at in 0..100_000_usize,
        bit in 0..8_u32,
        step in 1..5000_usize,
    ) {
        let (mut bytes, _) = script(true);
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        let mut bench = Bench::new(SIZE);
        bench.feed(&bytes, step);
        bench.hang_up();
        prop_assert!(bench.connection.is_over());
    }
}
