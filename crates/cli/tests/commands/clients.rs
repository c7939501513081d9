//! Hostile and unlucky clients of a real server. Their announcements take no memory, and they make
//! room for others. A request without memory fails alone, and a request without an answer is
//! reported.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{PATIENCE, Udm, client, for_clients, text, wait_until};

const MIB: u64 = 1 << 20;

/// A connection, of which the greeting was read.
fn greeted(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream
}

/// A connection in transmission.
pub fn agreed(socket: &Path) -> UnixStream {
    let mut stream = greeted(socket);
    // Fixed newstyle without the padding; then EXPORT_NAME with the empty name.
    stream.write_all(&3_u32.to_be_bytes()).unwrap();
    stream.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0; 4]].concat()).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

pub fn request(command: u16, cookie: u64, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend_from_slice(&[0, 0]);
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    bytes.extend_from_slice(&(len as u32).to_be_bytes());
    bytes
}

/// The error of the next reply.
fn reply(stream: &mut UnixStream) -> u32 {
    let mut head = [0; 16];
    stream.read_exact(&mut head).unwrap();
    u32::from_be_bytes(head[4..8].try_into().unwrap())
}

/// Serves a file of 64 MiB, in a process with at most `limit` MiB of memory, if given.
fn serve(udm: &Udm, table: &str, limit_mib: Option<u64>) -> u64 {
    let words = ["create", "vol", "--table", table, "--export", &udm.uri("vol.sock")];
    match limit_mib {
        None => _ = udm.ok(&words),
        Some(mib) => {
            let own = udm.command(&words);
            let mut limited = std::process::Command::new("prlimit");
            limited.arg(format!("--as={}", mib * MIB)).arg(own.get_program()).args(own.get_args());
            own.get_envs().for_each(|(name, value)| match value {
                Some(value) => _ = limited.env(name, value),
                None => _ = limited.env_remove(name),
            });
            let output = limited.output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
    }
    udm.pid("vol")
}

fn linear(udm: &Udm) -> String {
    format!("0 131072 linear {} 0", text(&udm.file("disk.img", 64 * MIB)))
}

fn nbdinfo(udm: &Udm) {
    client("nbdinfo", &["--size", &for_clients(&udm.uri("vol.sock"))]);
}

/// A number of /proc/PID/status, in bytes.
fn memory(pid: u64, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn what_is_announced_takes_no_memory() {
    let udm = Udm::new();
    let pid = serve(&udm, &linear(&udm), None);
    let before = memory(pid, "VmRSS");
    let boasters: Vec<_> = (0..32)
        .map(|_| {
            let mut stream = agreed(&udm.path("vol.sock"));
            stream.write_all(&request(1, 1, 0, 32 * MIB)).unwrap();
            stream.write_all(&[7; 1000]).unwrap();
            stream
        })
        .collect();
    nbdinfo(&udm);
    let grown = memory(pid, "VmRSS").saturating_sub(before);
    assert!(grown < 64 * MIB, "32 clients who announced 32 MiB each cost {} MiB", grown >> 20);
    drop(boasters);
}

#[test]
fn half_open_connections_keep_nobody_out() {
    let udm = Udm::new();
    serve(&udm, &linear(&udm), None);
    let half_open: Vec<_> = (0..100).map(|_| greeted_or_not(&udm.path("vol.sock"))).collect();
    for _ in 0..4 {
        nbdinfo(&udm);
    }
    drop(half_open);
}

fn greeted_or_not(socket: &Path) -> UnixStream {
    UnixStream::connect(socket).unwrap()
}

#[test]
fn a_request_without_memory_fails_and_the_server_goes_on() {
    let udm = Udm::new();
    let pid = serve(&udm, &linear(&udm), Some(640));
    let mut greedy: Vec<_> = (0..8).map(|_| agreed(&udm.path("vol.sock"))).collect();
    udm.ok(&["suspend", "vol"]);
    for stream in &mut greedy {
        for cookie in 0..2 {
            stream.write_all(&request(0, cookie, 0, 32 * MIB)).unwrap();
        }
    }
    // Of 512 MiB that are asked for, 640 less all the rest are there.
    let (mut refused, deadline) = (0, Instant::now() + PATIENCE);
    while refused == 0 {
        assert!(Instant::now() < deadline, "there was memory for all");
        for stream in &mut greedy {
            stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut head = [0; 16];
            while stream.read_exact(&mut head).is_ok() {
                assert_eq!(head[4..8], 12_u32.to_be_bytes(), "ENOMEM");
                refused += 1;
            }
        }
    }
    drop(greedy);
    udm.ok(&["resume", "vol"]);
    let socket = udm.path("vol.sock");
    wait_until("memory is back", || {
        let mut stream = agreed(&socket);
        stream.write_all(&request(0, 3, 0, 4096)).unwrap();
        reply(&mut stream) == 0
    });
    assert_eq!(udm.pid("vol"), pid);
}

#[test]
fn a_request_that_is_not_answered_is_in_info_log_and_metrics() {
    let udm = Udm::new();
    serve(&udm, &linear(&udm), None);
    let mut stream = agreed(&udm.path("vol.sock"));
    udm.ok(&["suspend", "vol"]);
    stream.write_all(&[request(1, 1, 4096, 512), vec![1; 512]].concat()).unwrap();
    wait_until("the request is slow", || {
        udm.json(&["info", "vol"])["slow_requests"].as_array().is_some_and(|slow| slow.len() == 1)
    });
    let info = udm.json(&["info", "vol"]);
    let slow = &info["slow_requests"][0];
    assert_eq!(
        (slow["waits_for"].as_str(), &info["slow_requests_total"]),
        (Some("resume"), &1.into())
    );
    let said = udm.ok(&["info", "vol"]);
    let line = said.lines().find(|line| line.starts_with("Slow:")).unwrap();
    assert!(line.contains("write, 512 bytes at 4096: has waited for resume for 1"), "{line}");
    assert!(
        udm.ok(&["metrics", "vol"]).contains("udm_device_slow_requests_total{device=\"vol\"} 1")
    );
    let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
    assert!(log.contains("vol: slow: write, 512 bytes at 4096: not answered for 1"), "{log}");
    udm.ok(&["resume", "vol"]);
    assert_eq!(reply(&mut stream), 0);
    wait_until("no request is slow", || {
        udm.json(&["info", "vol"])["slow_requests"].as_array().is_some_and(Vec::is_empty)
    });
}
