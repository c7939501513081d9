//! `drain`, `remove --drain` and `remove --drain --force` beside clients that never stop writing:
//! they end, and exit code 0 means that the origin has everything.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Outcome, Udm, pattern, read_export, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 64 * MIB;
/// Bytes that each write has, and the step between two of them.
const WRITE: usize = 4096;
const STEP: u64 = 64 << 10;
/// Blocks that the clients write in turn.
const BLOCKS: u64 = 60;

/// One-step creates of each sort of cache.
fn creates(udm: &Udm) -> Vec<Vec<String>> {
    let sort = |target: &str, bytes: u64, more: &[&str]| {
        let fast = udm.file(&format!("{target}{}.fast", more.len()), bytes);
        let origin = udm.path("origin.img");
        let words = ["--origin", text(&origin), "--fast", text(&fast), "--target", target];
        words.iter().chain(more).map(|word| (*word).to_owned()).collect()
    };
    vec![
        sort("pcache", 520 * MIB, &[]),
        sort("writecache", 32 * MIB, &[]),
        sort("cache", 32 * MIB, &[]),
    ]
}

/// The newest version of each block that was acknowledged.
type Versions = [AtomicU64; BLOCKS as usize];

/// A client that writes growing numbers to its half of the blocks until it is cut off or told to
/// stop.
fn write_on(socket: &Path, half: u64, goes_on: &AtomicBool, versions: &Versions) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(&crate::nbd::usual_handshake(false)).unwrap();
    stream.read_exact(&mut [0; crate::nbd::USUAL_ANSWER_BYTES]).unwrap();
    for version in 1.. {
        let block = version * 7919 % (BLOCKS / 2) * 2 + half;
        let data = version.to_le_bytes().repeat(WRITE / 8);
        let mut answer = [0; 16];
        let sent = stream.write_all(&crate::nbd::write(0, version, block * STEP, &data));
        if sent.and_then(|()| stream.read_exact(&mut answer)).is_err() {
            return;
        }
        assert_eq!(answer[4..8], [0; 4], "a write fails");
        versions[block as usize].store(version, Ordering::SeqCst);
        if !goes_on.load(Ordering::SeqCst) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `words` while two clients write. Afterwards the origin must have all data that was
/// acknowledged before.
fn beside_writers(udm: &Udm, words: &[&str]) -> Outcome {
    let socket = udm.path("vol.sock");
    let goes_on = AtomicBool::new(true);
    let versions: Versions = std::array::from_fn(|_| AtomicU64::new(0));
    let seen = || versions.each_ref().map(|version| version.load(Ordering::SeqCst));
    let (outcome, before, origin) = std::thread::scope(|scope| {
        for half in 0..2 {
            let (socket, goes_on, versions) = (&socket, &goes_on, &versions);
            scope.spawn(move || write_on(socket, half, goes_on, versions));
        }
        wait_until("every block is written twice", || {
            seen().iter().all(|version| *version > BLOCKS / 2)
        });
        let before = seen();
        let outcome = udm.run(words);
        let origin = std::fs::read(udm.path("origin.img")).unwrap();
        goes_on.store(false, Ordering::SeqCst);
        (outcome, before, origin)
    });
    for (block, before) in before.iter().enumerate() {
        let at = block * STEP as usize;
        let found = u64::from_le_bytes(origin[at..at + 8].try_into().unwrap());
        assert!(found >= *before, "{words:?}: byte {at} has version {found}, not {before}");
    }
    outcome
}

#[test]
fn a_drain_ends_beside_clients_that_never_stop() {
    let udm = Udm::new();
    let uri = udm.uri("vol.sock");
    for words in creates(&udm) {
        udm.file("origin.img", ORIGIN_BYTES);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let create = [&["create", "vol"], &words[..], &["--export", &uri]].concat();
        udm.ok(&create);
        let outcome = beside_writers(&udm, &["drain", "vol"]);
        assert_eq!(outcome.code, 0, "{words:?}: {outcome:?}");
        assert!(outcome.out.contains("is written back"), "{outcome:?}");

        // Clients are cut off, and then the rest is written back.
        let outcome = beside_writers(&udm, &["remove", "vol", "--drain", "--force"]);
        assert_eq!((outcome.code, outcome.out.as_str()), (0, "vol: removed\n"), "{outcome:?}");
        assert!(udm.refused(&["status", "vol"]).contains("no such device"));
        // The cache is empty of dirty data: the origin alone has the clients' last writes.
        let alone = std::fs::read(udm.path("origin.img")).unwrap();
        udm.ok(&create);
        assert_eq!(udm.json(&["info", "vol"])["dirty_bytes"], 0);
        assert!(read_export(&udm, &uri) == alone, "{words:?}");
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    }
}

/// A client that always has some writes of one block in flight, until `goes_on` is false.
fn write_one_block(socket: &Path, nth: u64, goes_on: &AtomicBool, count: &AtomicU64) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(&crate::nbd::usual_handshake(false)).unwrap();
    stream.read_exact(&mut [0; crate::nbd::USUAL_ANSWER_BYTES]).unwrap();
    let data = vec![1 + nth as u8; WRITE];
    let ask = crate::nbd::write(0, 1, nth * WRITE as u64, &data);
    stream.write_all(&ask.repeat(8)).unwrap();
    let mut answer = [0; 16];
    while goes_on.load(Ordering::SeqCst) {
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[4..8], [0; 4], "a write fails");
        count.fetch_add(1, Ordering::SeqCst);
        stream.write_all(&ask).unwrap();
    }
}

#[test]
fn a_drain_ends_beside_writes_that_overlap_in_one_block() {
    let udm = Udm::new();
    let uri = udm.uri("vol.sock");
    for words in creates(&udm) {
        let origin = udm.file("origin.img", ORIGIN_BYTES);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        udm.ok(&[&["create", "vol"], &words[..], &["--export", &uri]].concat());
        let (socket, goes_on, count) =
            (udm.path("vol.sock"), AtomicBool::new(true), AtomicU64::new(0));
        let outcome = std::thread::scope(|scope| {
            for nth in 0..4 {
                let (socket, goes_on, count) = (&socket, &goes_on, &count);
                scope.spawn(move || write_one_block(socket, nth, goes_on, count));
            }
            wait_until("the block is dirty", || count.load(Ordering::SeqCst) > 1000);
            let outcome = udm.run(&["drain", "vol"]);
            goes_on.store(false, Ordering::SeqCst);
            outcome
        });
        assert_eq!(outcome.code, 0, "{words:?}: {outcome:?}");
        assert!(outcome.out.contains("is written back"), "{outcome:?}");
        let found = std::fs::read(&origin).unwrap();
        for nth in 0..4 {
            let at = nth * WRITE;
            assert!(found[at..at + WRITE] == vec![1 + nth as u8; WRITE], "{words:?}: byte {at}");
        }
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    }
}

#[test]
fn a_drain_that_fails_leaves_the_exports_open() {
    let udm = Udm::new();
    let uri = udm.uri("vol.sock");
    for words in creates(&udm) {
        let origin = udm.file("origin.img", ORIGIN_BYTES);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        udm.ok(&[&["create", "vol"], &words[..], &["--export", &uri]].concat());
        write_export(&udm, &uri, &pattern(1, MIB as usize));
        let away = udm.path("away.img");
        std::fs::rename(&origin, &away).unwrap();
        let outcome = udm.run(&["remove", "vol", "--drain", "--force"]);
        assert_eq!(outcome.code, 1, "{outcome:?}");
        assert!(outcome.err.contains("moved away"), "{outcome:?}");
        // It is served as before.
        write_export(&udm, &uri, &pattern(2, MIB as usize));
        std::fs::rename(&away, &origin).unwrap();
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
        assert!(std::fs::read(&origin).unwrap()[..MIB as usize] == pattern(2, MIB as usize));
    }
}
