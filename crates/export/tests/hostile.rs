//! Clients that misbehave, and servers that stop: the others go on, and everything ends.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Served;
use udm::device::SLOW_SECONDS;
use udm_export::nbd::{CONNECTIONS_MAX, Connections, Server, UNUSED_SECONDS_MAX, Uri};

const SIZE: u64 = 64 << 20;

#[test]
fn those_who_break_the_protocol_lose_their_connection_and_nobody_else_does() {
    let served = Served::start(SIZE);
    let mut bystander = served.client();
    let usual = common::usual_handshake(true);
    let huge_option = [&b"IHAVEOPT"[..], &7_u32.to_be_bytes(), &u32::MAX.to_be_bytes()].concat();
    let attacks: Vec<(Vec<u8>, &str)> = vec![
        (b"GET / HTTP/1.1\r\nHost: you\r\n\r\n".to_vec(), "client flags"),
        ([common::client_flags(3), vec![0xff; 64]].concat(), "option starts"),
        ([common::client_flags(3), huge_option].concat(), "carries 4294967295 bytes"),
        ([&common::client_flags(3)[..], &common::option(1, b"stranger")].concat(), "EXPORT_NAME"),
        (common::client_flags(0), "fixed newstyle"),
        ([&usual[..], &[0xff; 64]].concat(), "request starts"),
        ([&usual[..], &common::request(0, 1, 1, 0, u32::MAX)].concat(), "write of 4294967295"),
    ];
    for (number, (bytes, word)) in attacks.iter().enumerate() {
        let mut attacker = served.connect();
        attacker.write_all(bytes).unwrap();
        let mut answer = Vec::new();
        let _ = attacker.read_to_end(&mut answer);
        served.wait_until("a violation", |counts| counts.violations == number as u64 + 1);
        let last = served.server.connections().last_violation.unwrap();
        assert!(last.contains(word), "{last:?} should contain {word:?}");
        bystander.check();
    }
    assert_eq!(served.server.connections().current, 1);
}

#[test]
fn the_silent_and_the_truncated_hold_nobody_up() {
    let served = Served::start(SIZE);
    let silent: Vec<_> = (0..5).map(|_| served.connect()).collect();
    let mut dribbling = served.connect();
    dribbling.write_all(&common::client_flags(3)[..2]).unwrap();
    served.client().check();
    let mut truncated = served.client();
    truncated.send(&common::write(0, 1, 0, &[7; 65536])[..1000]);
    truncated.stream.shutdown(Shutdown::Both).unwrap();
    served.wait_until("the cut one ends", |counts| counts.violations == 1);
    drop((silent, dribbling));
    served.wait_until("all end", |counts| counts.current == 0);
    served.client().check();
}

#[test]
fn one_who_never_reads_his_answers_waits_alone() {
    let served = Served::start(SIZE);
    let mut greedy = served.client();
    greedy.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    for cookie in 0..10_000 {
        // In the end the server stops reading, and this fails.
        if greedy.stream.write_all(&common::request(0, 0, cookie, 0, 1 << 20)).is_err() {
            break;
        }
    }
    served.client().check();
    greedy.stream.shutdown(Shutdown::Both).unwrap();
    served.wait_until("the greedy one ends", |counts| counts.current == 0);
}

#[test]
fn a_client_may_leave_with_requests_in_flight() {
    let served = Served::start(SIZE);
    served.device.begin_suspend().unwrap();
    let mut leaver = served.client();
    let mut patient = served.client();
    for cookie in 0..50 {
        leaver.send(&common::write(0, cookie, cookie * 4096, &[9; 4096]));
        patient.send(&common::request(0, 0, cookie, cookie * 4096, 4096));
    }
    leaver.stream.shutdown(Shutdown::Both).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    while !served.device.finish_suspend().unwrap() {}
    served.device.resume().unwrap();
    for _ in 0..50 {
        assert_eq!(patient.reply(4096).error, 0);
    }
    served.wait_until("the leaver is gone", |counts| counts.current == 1);
    patient.check();
}

#[test]
fn too_many_clients_are_turned_away() {
    let served = Served::start(SIZE);
    let mut clients: Vec<_> = (0..CONNECTIONS_MAX).map(|_| served.client()).collect();
    let mut late = common::Client { stream: served.connect() };
    assert!(late.is_closed());
    served.wait_until("the late one is counted", |counts| counts.refused == 1);
    clients.iter_mut().for_each(common::Client::check);
    drop(clients.pop());
    served.wait_until("one leaves", |counts| counts.current < CONNECTIONS_MAX as u64);
    // Its thread may take a moment longer to end.
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut next = loop {
        let mut stream = served.connect();
        let _ = stream.write_all(&common::usual_handshake(false));
        if stream.read_exact(&mut [0; common::USUAL_ANSWER_BYTES]).is_ok() {
            break common::Client { stream };
        }
        assert!(Instant::now() < deadline, "the place of the one who left stays taken");
        std::thread::sleep(Duration::from_millis(5));
    };
    next.check();
}

#[test]
fn those_who_never_finish_their_handshake_make_room() {
    let served = Served::start(SIZE);
    let mut served_first = served.client();
    served_first.check();
    let half_open: Vec<_> = (0..2 * CONNECTIONS_MAX)
        .map(|_| {
            let mut stream = served.connect();
            stream.write_all(&common::client_flags(3)).unwrap();
            stream
        })
        .collect();
    for _ in 0..8 {
        served.client().check();
    }
    served_first.check();
    assert!(served.server.connections().refused > CONNECTIONS_MAX as u64);
    drop(half_open);
}

#[test]
fn those_who_ask_for_nothing_make_room_after_a_while() {
    let begun = Instant::now();
    let served = Served::start(SIZE);
    let mut used = served.client();
    used.check();
    let silent: Vec<_> = (1..CONNECTIONS_MAX).map(|_| served.client()).collect();
    let is_refused = common::Client { stream: served.connect() }.is_closed();
    let are_new = begun.elapsed() < Duration::from_secs(UNUSED_SECONDS_MAX);
    assert!(is_refused || !are_new, "they are new");
    std::thread::sleep(Duration::from_secs(UNUSED_SECONDS_MAX));
    served.client().check();
    used.check();
    drop(silent);
}

#[test]
fn a_request_that_is_not_answered_is_seen_and_counted() {
    let served = Served::start(SIZE);
    let told = Arc::new(Mutex::new(Vec::new()));
    let log = told.clone();
    served.device.on_slow(move |slow| log.lock().unwrap().push(slow.to_string()));
    let mut client = served.client();
    client.check();
    served.device.begin_suspend().unwrap();
    while !served.device.finish_suspend().unwrap() {}
    client.send(&common::write(0, 7, 8192, &[1; 4096]));
    let is_slow = |_: &Connections| !served.device.slow_requests().0.is_empty();
    served.wait_until("it is slow", is_slow);
    let (slow, total) = served.device.slow_requests();
    assert_eq!((slow.len(), total, slow[0].waits_for), (1, 1, "resume"));
    assert!(slow[0].seconds() >= SLOW_SECONDS, "{slow:?}");
    let said = told.lock().unwrap().clone();
    assert_eq!(said.len(), 1, "{said:?}");
    let seconds = said[0].strip_prefix("write, 4096 bytes at 8192: not answered for ").unwrap();
    let seconds: u64 = seconds.split(' ').next().unwrap().parse().unwrap();
    assert!(seconds >= SLOW_SECONDS, "{said:?}");
    served.device.resume().unwrap();
    assert_eq!(client.reply(0).error, 0);
    served.wait_until("it is not slow any more", |_| served.device.slow_requests().0.is_empty());
    assert_eq!(served.device.slow_requests().1, 1);
    client.check();
}

#[test]
fn stopping_closes_idle_and_busy_connections_and_removes_the_socket() {
    let Served { folder, device, server, .. } = {
        let served = Served::start(SIZE);
        served.client().check();
        served
    };
    let path = folder.path().join("socket");
    let mut idle =
        common::Client { stream: std::os::unix::net::UnixStream::connect(&path).unwrap() };
    idle.stream.read_exact(&mut [0; 18]).unwrap();
    // A stop that waits for clients ends after 10 seconds at the earliest.
    let stopping = common::ticks::Ticks::start();
    server.stop();
    assert!(stopping.seconds() < 8.0, "no request is in flight");
    assert!(idle.is_closed());
    assert!(!path.exists());
    assert_eq!(device.info().ports, 0);
}

#[test]
fn stopping_ends_even_if_the_device_is_suspended() {
    let served = Served::start(SIZE);
    let mut client = served.client();
    client.check();
    served.device.begin_suspend().unwrap();
    client.send(&common::request(0, 0, 1, 0, 4096));
    std::thread::sleep(Duration::from_millis(50));
    let device = served.device.clone();
    // A stop that waits for the device ends after 20 seconds at the earliest.
    let stopping = common::ticks::Ticks::start();
    served.server.stop();
    assert!(stopping.seconds() < 15.0, "{} s", stopping.seconds());
    assert_eq!(device.info().ports, 1, "only the background has a port");
}

#[test]
fn a_socket_file_is_replaced_only_if_nobody_listens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let uri: Uri = format!("nbd+unix://{}", path.display()).parse().unwrap();
    drop(UnixListener::bind(&path).unwrap());
    let served = Served::start_at(SIZE, folder, &uri.to_string());
    served.client().check();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let busy = Server::start(&served.device, &uri).unwrap_err();
    assert!(busy.to_string().contains("another server listens"), "{busy}");
    served.client().check();
    let file = served.folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let uri: Uri = format!("nbd+unix://{}", file.display()).parse().unwrap();
    let error = Server::start(&served.device, &uri).unwrap_err();
    assert!(error.to_string().contains("not a socket"), "{error}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
}
