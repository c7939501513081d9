//! Addresses of exports: of an owner that never accepts, of several of which one is taken, and of
//! clients that are gone.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::common::ticks::Ticks;
use crate::common::{PATIENCE, Udm, signal, text, wait_until};

/// A listener at `path` with a full queue: the next `connect` that blocks waits for it. The second
/// value keeps the queue full.
fn owner_that_never_accepts(path: &Path) -> (UnixListener, Vec<std::os::fd::OwnedFd>) {
    let listener = UnixListener::bind(path).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let mut waiting = Vec::new();
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        match rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()) {
            Ok(()) => waiting.push(socket),
            Err(rustix::io::Errno::AGAIN) => return (listener, waiting),
            Err(errno) => panic!("{errno}"),
        }
    }
}

#[test]
fn an_owner_that_never_accepts_holds_up_no_command() {
    for scheme in ["nbd+unix", "vhost-user"] {
        let udm = Udm::new();
        let path = udm.path("owned.sock");
        let _owner = owner_that_never_accepts(&path);
        let uri = format!("{scheme}://{}", path.display());
        let start = Instant::now();
        let said = udm.refused(&["create", "new", "--table", "0 8 zero", "--export", &uri]);
        assert!(said.contains("is in use: another server listens there"), "{said}");
        assert_eq!(udm.left(), Vec::<String>::new());
        udm.ok(&["create", "vol", "--table", "0 8 zero"]);
        let export = udm.spawn(&["export", "vol", &uri]);
        // Meanwhile the device answers, and ends: the export gives up.
        std::thread::sleep(Duration::from_millis(300));
        let asked = Instant::now();
        assert_eq!(udm.json(&["info", "vol"])["clients"], 0);
        assert_eq!(udm.json(&["info", "vol"])["exports"].as_array().unwrap().len(), 0);
        assert!(asked.elapsed() < PATIENCE, "{:?}", asked.elapsed());
        let said = export.wait_with_output().unwrap();
        let said = String::from_utf8(said.stderr).unwrap();
        assert!(said.contains("is in use: another server listens there"), "{said}");
        let export = udm.spawn(&["export", "vol", &uri]);
        std::thread::sleep(Duration::from_millis(300));
        udm.ok(&["remove", "vol"]);
        assert_eq!(export.wait_with_output().unwrap().status.code(), Some(1));
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        assert!(path.exists(), "it is another server's");
    }
}

/// Connects to `path` until `ends` is set, and returns how often a server answered.
fn knock(path: &Path, ends: &AtomicBool) -> usize {
    let mut met = 0;
    while !ends.load(Ordering::SeqCst) {
        met += usize::from(UnixStream::connect(path).is_ok());
        std::thread::sleep(Duration::from_millis(1));
    }
    met
}

#[test]
fn exports_of_which_one_cannot_open_let_nobody_in() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = format!("nbd://{}", busy.local_addr().unwrap());
    for (scheme, name) in [("nbd+unix", ""), ("vhost-user", ""), ("nbd+unix", "vol")] {
        let udm = Udm::new();
        let path = udm.path("first.sock");
        let first = match name {
            "" => format!("{scheme}://{}", path.display()),
            name => format!("{scheme}:///{name}?socket={}", path.display()),
        };
        let ends = AtomicBool::new(false);
        let words = ["create", "vol", "--table", "0 8 zero", "--export", &first, "--export", &busy];
        let (met, said) = std::thread::scope(|scope| {
            let knocking = scope.spawn(|| knock(&path, &ends));
            let said = udm.refused(&words);
            // One that is being opened belongs to its server, even before that listens.
            ends.store(true, Ordering::SeqCst);
            (knocking.join().unwrap(), said)
        });
        assert!(said.contains("ddress already in use"), "{said}");
        assert_eq!(met, 0, "{first}");
        assert!(!path.exists());
        // Where all of them open, all of them let clients in.
        let other = udm.uri("second.sock");
        udm.ok(&["create", "vol", "--table", "0 8 zero", "--export", &first, "--export", &other]);
        UnixStream::connect(&path).unwrap();
        UnixStream::connect(udm.path("second.sock")).unwrap();
    }
}

#[test]
fn a_socket_that_is_bound_and_does_not_listen_yet_is_another_servers() {
    let udm = Udm::new();
    let path = udm.path("bound.sock");
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    let words = ["create", "vol", "--table", "0 8 zero", "--export", &udm.uri("bound.sock")];
    let said = udm.refused(&words);
    assert!(said.contains("another server is about to listen there"), "{said}");
    // Its owner is gone, and its file is left.
    drop(socket);
    udm.ok(&words);
}

#[test]
fn a_wait_for_a_hanging_server_ends_with_its_timeout() {
    let udm = Udm::new();
    udm.ok(&["create", "vol", "--table", "0 8 zero"]);
    let pid = udm.pid("vol");
    signal(pid, "STOP");
    // Without a timeout it takes 10 seconds.
    let ticks = Ticks::start();
    let said = udm.refused(&["wait", "vol", "--until", "removed", "--timeout", "1"]);
    assert!(ticks.seconds() < 8.0, "{} s", ticks.seconds());
    assert!(said.contains("has not answered for 1 s") && said.contains("is stopped"), "{said}");
    signal(pid, "CONT");
}

#[test]
fn a_client_that_died_with_a_parked_request_does_not_count() {
    let udm = Udm::new();
    let file = udm.file("a.img", 1 << 20);
    let table = format!("0 2048 linear {} 0", text(&file));
    udm.ok(&["create", "vol", "--table", &table, "--export", &udm.uri("vol.sock")]);
    let mut stream = UnixStream::connect(udm.path("vol.sock")).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    let option = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &1_u32.to_be_bytes(), &[0; 4]].concat();
    stream.write_all(&option).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    let clients = || udm.json(&["info", "vol"])["clients"].clone();
    assert_eq!(clients(), 1);
    udm.ok(&["suspend", "vol"]);
    let header = [&0x2560_9513_u32.to_be_bytes()[..], &[0, 0, 0, 1], &[7; 8], &[0; 8]].concat();
    let request = [&header[..], &512_u32.to_be_bytes(), &[1; 512]].concat();
    stream.write_all(&request).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(clients(), 1, "it is there, and waits");
    drop(stream);
    wait_until("it does not count", || clients() == 0);
    udm.ok(&["remove", "vol"]);
}
