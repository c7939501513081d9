//! A cache device that goes away under a running server: cut short, or deleted.
//!
//! A mapped file that was cut short causes a CPU fault in the middle of a request. The request then
//! fails. The process, its control socket and requests that do not need the lost pages continue. No
//! read ever shows the older data of the origin.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{PATIENCE, Udm, is_gone, pattern, read_export, text, wait_until, write_export};
use udm::prng::Prng;

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;
const DEVICE_BYTES: u64 = 32 * MIB;
const CLIENTS: u64 = 2;
/// Blocks of each client: its own, so that it knows what they hold.
const BLOCKS: u64 = DEVICE_BYTES / BLOCK / CLIENTS;

struct Bench {
    udm: Udm,
    cache: tempfile::NamedTempFile,
    origin: PathBuf,
    table: String,
    uri: String,
}

impl Bench {
    fn new(folder: &Path, options: &str) -> Bench {
        let udm = Udm::new();
        let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
        cache.as_file().set_len(512 * MIB).unwrap();
        let origin = udm.file("origin.img", DEVICE_BYTES);
        let words = format!("{}{options} {}", text(cache.path()), text(&origin));
        let table = format!("0 {} pcache {words}", DEVICE_BYTES / 512);
        let uri = udm.uri("vol.sock");
        Bench { udm, cache, origin, table, uri }
    }

    fn create(&self) {
        self.udm.ok(&["create", "vol", "--table", &self.table, "--export", &self.uri]);
    }

    fn info(&self, name: &str) -> serde_json::Value {
        self.udm.json(&["info", "vol"])["lines"][0]["facts"][name].clone()
    }

    /// Writes, and stops write-back where it is.
    fn write_and_hold(&self, data: &[u8]) {
        write_export(&self.udm, &self.uri, data);
        self.udm.ok(&["suspend", "vol"]);
        assert!(self.info("dirty_bytes").as_u64().unwrap() > 0);
    }
}

fn memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// One client with one request at a time: it knows exactly what each of its blocks may hold.
struct Client {
    nbd: crate::nbd::Client,
    first: u64,
    random: Prng,
    /// The version of each block that was acknowledged last, and the last one asked for.
    acknowledged: Vec<u64>,
    asked: Vec<u64>,
    errors: u64,
    cookie: u64,
}

impl Client {
    fn connect(socket: &Path, nth: u64) -> Client {
        let mut stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&crate::nbd::usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; crate::nbd::USUAL_ANSWER_BYTES]).unwrap();
        Client {
            nbd: crate::nbd::Client { stream },
            first: nth * BLOCKS,
            random: Prng::new(nth + 1),
            acknowledged: vec![0; BLOCKS as usize],
            asked: vec![0; BLOCKS as usize],
            errors: 0,
            cookie: 0,
        }
    }

    /// Sends a request. Returns the `len` bytes of its reply, or `None` for an error.
    fn ask(&mut self, request: &[u8], len: usize) -> Option<Vec<u8>> {
        self.nbd.send(request);
        let reply = self.nbd.reply(len);
        self.errors += u64::from(reply.error != 0);
        (reply.error == 0).then_some(reply.data)
    }

    fn write(&mut self, block: u64) {
        let nth = block as usize;
        self.asked[nth] += 1;
        self.cookie += 1;
        let data = content(self.first + block, self.asked[nth]);
        let place = (self.first + block) * BLOCK;
        if self.ask(&crate::nbd::write(0, self.cookie, place, &data), 0).is_some() {
            self.acknowledged[nth] = self.asked[nth];
        }
    }

    /// Reads a block: an error, or a version that may be there. Never an older one.
    fn read(&mut self, block: u64) {
        let (nth, place) = (block as usize, (self.first + block) * BLOCK);
        self.cookie += 1;
        let request = crate::nbd::request(0, 0, self.cookie, place, BLOCK as u32);
        let Some(data) = self.ask(&request, BLOCK as usize) else { return };
        let version = u64::from_le_bytes(data[8..16].try_into().unwrap());
        assert!(data == content(self.first + block, version), "block {block}: foreign or torn");
        let known = self.acknowledged[nth]..=self.asked[nth];
        assert!(known.contains(&version), "block {block}: version {version}, not {known:?}");
    }

    /// Writes and reads, until `enough` requests were made after the first error.
    fn load(&mut self, done: &AtomicU64, enough: u64) {
        let mut left = enough;
        while left > 0 {
            let block = self.random.below(BLOCKS);
            match self.random.below(3) {
                0 => self.read(block),
                _ => self.write(block),
            }
            if self.random.one_in(50) {
                self.cookie += 1;
                self.ask(&crate::nbd::request(0, 3, self.cookie, 0, 0), 0);
            }
            done.fetch_add(1, Ordering::Relaxed);
            left -= u64::from(self.errors > 0);
        }
    }
}

/// The content of a block in a version.
fn content(block: u64, version: u64) -> Vec<u8> {
    [block, version].map(u64::to_le_bytes).concat().repeat(BLOCK as usize / 16)
}

/// Both clients load the device; in the midst of it the cache file is cut to `len` bytes.
fn load_and_cut(bench: &Bench, clients: &mut [Client], len: u64) {
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in clients {
            let done = &done;
            scope.spawn(move || client.load(done, 300));
        }
        wait_until("the clients are at work", || done.load(Ordering::Relaxed) > 3000);
        bench.cache.as_file().set_len(len).unwrap();
    });
}

fn a_cache_cut_short(folder: &Path, options: &str, len: u64) {
    let bench = Bench::new(folder, options);
    let udm = &bench.udm;
    bench.create();
    let pid = udm.pid("vol");
    let socket = udm.path("vol.sock");
    let mut clients: Vec<Client> = (0..CLIENTS).map(|nth| Client::connect(&socket, nth)).collect();
    for client in &mut clients {
        (0..BLOCKS).for_each(|block| client.write(block));
        assert_eq!(client.errors, 0);
    }
    // The origin has the first version of each block, which must never be read again.
    udm.ok(&["drain", "vol"]);
    assert_eq!(bench.info("medium_has_failed"), false);
    load_and_cut(&bench, &mut clients, len);
    for client in &mut clients {
        assert!(client.errors > 0);
        (0..BLOCKS).for_each(|block| client.read(block));
    }

    assert!(!is_gone(pid) && udm.pid("vol") == pid, "the process lives");
    assert_eq!(bench.info("medium_has_failed"), true);
    let failure = bench.info("medium_failure");
    assert!(failure.as_str().unwrap().contains("cut short"), "{failure}");
    let text = udm.ok(&["info", "vol"]);
    assert!(text.contains("Failure:") && text.contains("cut short"), "{text}");
    let metrics = udm.ok(&["metrics", "vol"]);
    let is_failed = |line: &str| line.starts_with("udm_medium_has_failed{") && line.ends_with(" 1");
    assert!(metrics.lines().any(is_failed), "{metrics}");

    drop(clients);
    // Data that cannot be logged prevents the removal, and the device stays active, unless the
    // removal is forced.
    assert!(udm.ok(&["ls"]).contains("failed"));
    let outcome = udm.run(&["remove", "vol"]);
    if outcome.code != 0 {
        let said = &outcome.err;
        assert!(said.contains("not removed:") && said.contains("`udm remove --force vol`"));
        assert!(!is_gone(pid) && udm.json(&["info", "vol"])["state"] == "active", "{outcome:?}");
        let outcome = udm.run(&["remove", "vol", "--force"]);
        let said = &outcome.err;
        assert!(outcome.code == 0 && said.contains("vol: removed by force: "), "{outcome:?}");
    }
    wait_until("the server has ended", || is_gone(pid));
    let line = udm.refused(&["create", "vol", "--table", &bench.table]);
    let path = crate::common::text(bench.cache.path());
    assert!(line.contains(path) && line.contains("cut short"), "{line}");
    let line = udm.refused(&["inspect", path]);
    assert!(line.contains("cut short"), "{line}");
}

#[test]
fn a_cache_in_memory_cut_short_fails_requests_and_not_the_server() {
    a_cache_cut_short(&memory(), "", 17 * MIB + 12345);
}

#[test]
fn a_cache_in_a_file_cut_short_fails_requests_and_not_the_server() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    a_cache_cut_short(folder, "?persist=msync", 100 * MIB);
}

#[test]
fn a_deleted_cache_serves_on_and_is_not_left_with_dirty_data() {
    let bench = Bench::new(&memory(), "");
    let udm = &bench.udm;
    bench.create();
    std::fs::remove_file(bench.cache.path()).unwrap();
    let data = pattern(21, 8 << 20);
    bench.write_and_hold(&data);
    assert_eq!(bench.info("medium_is_deleted"), true);
    assert_eq!(bench.info("medium_has_failed"), false);
    assert!(udm.ok(&["info", "vol"]).contains("Deleted:"));
    let line = udm.refused(&["remove", "vol"]);
    assert!(line.contains("deleted") && line.contains("--drain"), "{line}");

    udm.ok(&["resume", "vol"]);
    assert!(read_export(udm, &bench.uri)[..data.len()] == data[..]);
    assert_eq!(udm.ok(&["remove", "vol", "--drain"]), "vol: removed\n");
    assert!(std::fs::read(&bench.origin).unwrap()[..data.len()] == data[..]);
    let line = udm.refused(&["create", "vol", "--table", &bench.table]);
    assert!(line.contains(text(bench.cache.path())) && line.contains("No such file"), "{line}");
}

#[test]
fn losing_a_deleted_cache_takes_force_and_is_said() {
    let bench = Bench::new(&memory(), "");
    let udm = &bench.udm;
    bench.create();
    bench.write_and_hold(&pattern(22, 8 << 20));
    std::fs::remove_file(bench.cache.path()).unwrap();
    let said = udm.ok(&["remove", "vol", "--force"]);
    assert!(said.contains("8.0 MiB of dirty data are lost"), "{said}");
    // A new file of that name becomes a new cache, and the origin has not changed.
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(bench.cache.path())
        .unwrap()
        .set_len(512 * MIB)
        .unwrap();
    bench.create();
    assert!(read_export(udm, &bench.uri) == vec![0; DEVICE_BYTES as usize]);
}
