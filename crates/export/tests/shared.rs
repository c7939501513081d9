//! Several exports at one address: a client gets the export that it names, whichever export it met;
//! no export needs another; and a dead, stopped or hostile export does not affect the others.

#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::{Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{client_flags, contexts, go, linear, option, request, string, take_u32};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use udm::disk::RamDisk;
use udm::error::Kind;
use udm::sync::Arc;
use udm_export::nbd::Server;

const SIZE: u64 = 1 << 20;
const UNKNOWN: u32 = (1 << 31) | 6;

/// A folder for entries and the socket.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("socket")
    }

    /// An export whose device has `name`'s first letter in all bytes.
    fn open(&self, name: &str) -> udm::error::Result<Server> {
        self.open_as(name, "")
    }

    fn open_as(&self, name: &str, options: &str) -> udm::error::Result<Server> {
        let disk = Arc::new(RamDisk::new(SIZE, 512));
        disk.poke(0, &vec![name.as_bytes()[0]; SIZE as usize]);
        let uri = format!("nbd+unix:///{name}?socket={}{options}", self.socket().display());
        Server::start_at(&linear(disk), &uri.parse().unwrap(), self.0.path())
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path()).unwrap().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The entry of `name`, with the place that another entry names.
    fn entry(&self, name: &str) -> PathBuf {
        let files = self.files();
        let other = files.iter().find(|file| file.ends_with(".export")).unwrap();
        let (prefix, _) = other.split_once('.').unwrap();
        self.0.path().join(format!("{prefix}.{name}.export"))
    }

    fn greet(&self) -> Talk {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&client_flags(3)).unwrap();
        Talk(stream)
    }
}

/// A client.
struct Talk(UnixStream);

impl Talk {
    /// The answers to one option, up to the one that ends them.
    fn ask(&mut self, number: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.0.write_all(&option(number, data)).unwrap();
        self.answers(number)
    }

    fn answers(&mut self, number: u32) -> Vec<(u32, Vec<u8>)> {
        let mut all = Vec::new();
        loop {
            let mut head = [0; 20];
            self.0.read_exact(&mut head).unwrap();
            let mut rest = &head[8..];
            let (of, kind, len) = (take_u32(&mut rest), take_u32(&mut rest), take_u32(&mut rest));
            assert_eq!(of, number);
            let mut data = vec![0; len as usize];
            self.0.read_exact(&mut data).unwrap();
            all.push((kind, data));
            if kind == 1 || kind >> 31 == 1 {
                return all;
            }
        }
    }

    /// The reply that ended the answers to an option.
    fn verdict(&mut self, number: u32, data: &[u8]) -> (u32, String) {
        let (kind, words) = self.ask(number, data).pop().unwrap();
        (kind, String::from_utf8(words).unwrap())
    }

    fn list(&mut self) -> Vec<String> {
        let names = self.ask(3, &[]).into_iter().filter(|(kind, _)| *kind == 2);
        let mut names: Vec<String> =
            names.map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect();
        names.sort();
        names
    }

    /// The letter of the export that it is on.
    fn letter(&mut self) -> char {
        self.0.write_all(&request(0, 0, 7, 4096, 512)).unwrap();
        let mut reply = [0; 16 + 512];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0; 4]);
        assert!(reply[16..].iter().all(|byte| *byte == reply[16]));
        char::from(reply[16])
    }
}

#[test]
fn a_client_gets_the_export_that_it_names_whichever_export_it_met() {
    let place = Place::new();
    let exports = [place.open("a").unwrap(), place.open("b").unwrap(), place.open("c").unwrap()];
    assert_eq!(place.greet().list(), ["a", "b", "c"]);
    for nth in 0..60 {
        let name = ["a", "b", "c"][nth % 3];
        let mut talk = place.greet();
        match nth % 4 {
            // In one piece, so that the option and the bytes after it are passed along.
            0 => {
                let all = [option(8, &[]), option(7, &go(name, &[]))].concat();
                talk.0.write_all(&all).unwrap();
                assert_eq!(talk.answers(8), [(1, vec![])]);
                assert_eq!(talk.answers(7).pop(), Some((1, vec![])));
                continue;
            }
            // EXPORT_NAME, which knows no errors; with NO_ZEROES, which the next export must know.
            1 => {
                talk.0.write_all(&option(1, name.as_bytes())).unwrap();
                talk.0.read_exact(&mut [0; 10]).unwrap();
            }
            // Another one's INFO first: its export goes on, and passes it to the one that is meant.
            2 => {
                let other = ["b", "c", "a"][nth % 3];
                assert_eq!(talk.ask(6, &go(other, &[])).pop(), Some((1, vec![])));
                assert_eq!(talk.ask(7, &go(name, &[])).pop(), Some((1, vec![])));
            }
            _ => assert_eq!(talk.ask(7, &go(name, &[])).pop(), Some((1, vec![]))),
        }
        assert_eq!(talk.letter().to_string(), name);
    }
    // One that has chosen contexts has them at the export where it arrives.
    for name in ["a", "b", "c"] {
        let mut talk = place.greet();
        talk.ask(8, &[]);
        assert_eq!(talk.ask(10, &contexts(name, &["base:allocation"])).len(), 2);
        assert_eq!(talk.ask(7, &go(name, &[])).pop(), Some((1, vec![])));
        talk.0.write_all(&request(0, 7, 1, 0, 4096)).unwrap();
        let mut chunk = [0; 20];
        talk.0.read_exact(&mut chunk).unwrap();
        assert_eq!(chunk[6..8], [0, 5], "a block status, and no error");
    }
    let passed: u64 = exports.iter().map(|export| export.connections().handed_over).sum();
    assert!(passed > 0, "no connection met another's export");
    assert!(exports.iter().all(|export| export.connections().violations == 0));
}

#[test]
fn what_nobody_has_is_refused_and_the_client_may_ask_again() {
    let place = Place::new();
    let _exports = [place.open("a").unwrap(), place.open("b").unwrap()];
    let mut talk = place.greet();
    let (kind, words) = talk.verdict(7, &go("nobody", &[]));
    assert_eq!((kind, words.as_str()), (UNKNOWN, "this address has no export of that name"));
    let (kind, words) = talk.verdict(7, &go("", &[]));
    assert!(kind == UNKNOWN && words.contains("several exports"), "{words}");
    assert_eq!(talk.verdict(10, &contexts("", &[])).0 >> 31, 1);
    assert_eq!(talk.ask(7, &go("b", &[])).pop(), Some((1, vec![])));
    assert_eq!(talk.letter(), 'b');
    // Names that could leave the folder belong to no export.
    for name in ["../a", "/", ".", "a/../b", "\u{e9}"] {
        assert_eq!(place.greet().verdict(7, &go(name, &[])).0, UNKNOWN, "{name}");
    }
    // A connection cannot stay in the handshake without end.
    let mut talk = place.greet();
    let mut verdicts = (0..60).map(|nth| talk.verdict(6, &go(["a", "b"][nth % 2], &[])));
    assert!(verdicts.any(|(kind, words)| kind == UNKNOWN && words.contains("too many")));
}

#[test]
fn the_others_go_on_when_a_export_closes_and_the_last_one_tidies_up() {
    let place = Place::new();
    let first = place.open("a").unwrap();
    let second = place.open("b").unwrap();
    let error = place.open("b").unwrap_err();
    assert_eq!(error.kind(), Kind::Busy);
    assert!(
        error.to_string().contains("that export name is already served at this address"),
        "{error}"
    );
    drop(first);
    assert!(place.socket().exists(), "the other one listens there");
    let mut talk = place.greet();
    assert_eq!(talk.list(), ["b"]);
    // It is the only one, so it needs no name.
    assert_eq!(talk.ask(7, &go("", &[])).pop(), Some((1, vec![])));
    assert_eq!(talk.letter(), 'b');
    let third = place.open("a").unwrap();
    drop(second);
    let mut talk = place.greet();
    assert_eq!(talk.ask(7, &go("a", &[])).pop(), Some((1, vec![])));
    assert_eq!(talk.letter(), 'a');
    drop(third);
    assert_eq!(place.files(), Vec::<String>::new());
    // An export without a name uses its address alone, and its error explains how to share it.
    let _named = place.open("a").unwrap();
    let uri = format!("nbd+unix://{}", place.socket().display());
    let device = linear(Arc::new(RamDisk::new(SIZE, 512)));
    let error = Server::start_at(&device, &uri.parse().unwrap(), place.0.path()).unwrap_err();
    assert!(error.to_string().contains("also give this one a name"), "{error}");
}

#[test]
fn an_entry_without_a_process_is_no_export_and_is_taken_by_the_next_export() {
    let place = Place::new();
    let _export = place.open("a").unwrap();
    let dead = place.entry("dead");
    drop(UnixDatagram::bind(&dead).unwrap());
    let mut talk = place.greet();
    assert_eq!(talk.list(), ["a"]);
    assert_eq!(talk.verdict(7, &go("dead", &[])).0, UNKNOWN);
    assert_eq!(talk.ask(6, &go("", &[])).pop(), Some((1, vec![])), "it is alone");
    let _again = place.open("dead").unwrap();
    assert_eq!(talk.list(), ["a", "dead"]);
    assert_eq!(talk.ask(7, &go("dead", &[])).pop(), Some((1, vec![])));
    assert_eq!(talk.letter(), 'd');
}

#[test]
fn a_process_that_is_stopped_keeps_nobody_from_the_others() {
    let place = Place::new();
    let _export = place.open("a").unwrap();
    // It has an entry, and never reads it.
    let _stopped = UnixDatagram::bind(place.entry("stopped")).unwrap();
    let mut waiting: Vec<Talk> = (0..40)
        .map(|_| {
            let mut talk = place.greet();
            talk.0.write_all(&option(7, &go("stopped", &[]))).unwrap();
            talk
        })
        .collect();
    let ticks = common::ticks::Ticks::start();
    for _ in 0..10 {
        let mut talk = place.greet();
        assert_eq!(talk.ask(7, &go("a", &[])).pop(), Some((1, vec![])));
        assert_eq!(talk.letter(), 'a');
    }
    // Each of those who wait does so for two seconds.
    assert!(ticks.seconds() < 20.0, "{} s", ticks.seconds());
    // A new export gets the listener from another one.
    let _new = place.open("b").unwrap();
    assert_eq!(place.greet().list(), ["a", "b", "stopped"]);
    // When its entry is full, clients hear so, and may name another export.
    let is_refused = |talk: &mut Talk| {
        talk.0.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let mut head = [0; 20];
        let is_answered = talk.0.read_exact(&mut head).is_ok();
        assert!(!is_answered || head[12..16] == UNKNOWN.to_be_bytes());
        is_answered
    };
    let room: usize = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while room <= 35 && !waiting.iter_mut().any(is_refused) {
        assert!(Instant::now() < deadline, "none was refused, and there is room for {room}");
    }
}

fn send(entry: &Path, bytes: &[u8], files: &[std::os::fd::BorrowedFd<'_>]) {
    let socket = UnixDatagram::unbound().unwrap();
    socket.connect(entry).unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(files));
    }
    sendmsg(&socket, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn what_is_no_message_is_dropped() {
    use std::os::fd::AsFd;
    let place = Place::new();
    let export = place.open("a").unwrap();
    let entry = place.entry("a");
    let file = std::fs::File::open("/dev/null").unwrap();
    let (one, other) = UnixStream::pair().unwrap();
    let good = [0x11, 0, 0, 0, 0, 0, 0, 0];
    for (bytes, files) in [
        (&b""[..], vec![]),
        (&good, vec![]),
        (&good, vec![file.as_fd()]),
        (&good, vec![one.as_fd(), other.as_fd()]),
        (&[0x12], vec![file.as_fd()]),
        (&[0x13], vec![one.as_fd()]),
        (&good[..7], vec![one.as_fd()]),
        (&[0x11, 0, 0, 200, 0, 0, 0, 0], vec![one.as_fd()]),
        (&[0xff; 3000], vec![one.as_fd()]),
    ] {
        send(&entry, bytes, &files);
    }
    // The passed socket is a client's, and is trusted as little as one.
    let junk = [&good[..], &[0xaa; 500]].concat();
    send(&entry, &junk, &[one.as_fd()]);
    drop(one);
    let mut client = Talk(other);
    client.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(client.0.read(&mut [0; 100]).unwrap(), 0, "it is disconnected");
    // The client sees the end of the connection before the server has noted why.
    let deadline = Instant::now() + Duration::from_secs(60);
    let last = loop {
        match export.connections().last_violation {
            Some(last) => break last,
            None => assert!(Instant::now() < deadline, "it was not noted"),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    assert!(last.contains("IHAVEOPT"), "{last}");
    assert_eq!(place.greet().list(), ["a"]);
    assert_eq!(place.greet().ask(6, &[&string("a")[..], &[0, 0]].concat()).pop().unwrap().0, 1);
}

#[test]
fn many_clients_name_exports_at_the_same_time() {
    let place = Place::new();
    let _exports = [place.open("a").unwrap(), place.open("b").unwrap()];
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let place = &place;
            scope.spawn(move || {
                for nth in 0..20 {
                    let name = ["a", "b"][(thread + nth) % 2];
                    let mut talk = place.greet();
                    assert_eq!(talk.ask(7, &go(name, &[])).pop(), Some((1, vec![])));
                    assert_eq!(talk.letter().to_string(), name);
                }
            });
        }
    });
}

#[test]
fn an_export_may_be_read_only_beside_one_that_is_not() {
    let place = Place::new();
    let _exports = [place.open("rw").unwrap(), place.open_as("ro", "&readonly").unwrap()];
    for (name, flag, error) in [("rw", 0, 0), ("ro", 2, 1)] {
        let mut talk = place.greet();
        let answers = talk.ask(7, &go(name, &[]));
        assert_eq!(answers[0].1[11] & 2, flag, "{name}");
        let write = [request(0, 1, 9, 0, 512), vec![1; 512]].concat();
        talk.0.write_all(&write).unwrap();
        let mut reply = [0; 16];
        talk.0.read_exact(&mut reply).unwrap();
        assert_eq!(reply[4..8], [0, 0, 0, error], "{name}");
        assert_eq!(talk.letter(), 'r');
    }
}
