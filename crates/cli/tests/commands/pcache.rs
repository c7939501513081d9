//! A pcache over real processes: dirty data, write-back, and the messages about both.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{PATIENCE, Udm, pattern, read_export, signal, text, wait_until, write_export};

const MIB: u64 = 1 << 20;

/// Size of the device and of its origin.
const DEVICE_BYTES: u64 = 64 * MIB;

/// A udm with a cache file in memory, an origin, and a device's table.
struct Bench {
    udm: Udm,
    cache: tempfile::NamedTempFile,
    origin: PathBuf,
    uri: String,
}

impl Bench {
    fn new() -> Bench {
        let udm = Udm::new();
        // The smallest cache; in memory where there is some, since its blocks are all written.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
        cache.as_file().set_len(512 * MIB).unwrap();
        let origin = udm.file("origin.img", DEVICE_BYTES);
        let uri = udm.uri("vol.sock");
        Bench { udm, cache, origin, uri }
    }

    fn cache(&self) -> &str {
        text(self.cache.path())
    }

    fn table(&self) -> String {
        format!("0 {} pcache {} {}", DEVICE_BYTES / 512, self.cache(), text(&self.origin))
    }

    fn create(&self) {
        self.udm.ok(&["create", "vol", "--table", &self.table(), "--export", &self.uri]);
    }

    /// Bytes of the origin's start.
    fn origin_bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        OpenOptions::new().read(true).open(&self.origin).unwrap().read_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Waits until the cache has that many blocks of 64 KiB.
    fn wait_for_blocks(&self, count: u64) {
        let cached = || self.udm.json(&["info", "vol"])["cached_bytes"].as_u64().unwrap();
        wait_until("the client's write is there", || cached() >= count << 16);
    }

    fn dirty_bytes(&self) -> u64 {
        self.udm.json(&["info", "vol"])["dirty_bytes"].as_u64().unwrap()
    }
}

/// Writes, and stops write-back immediately, so that the data stays dirty until the test looks.
fn write_and_hold(bench: &Bench, data: &[u8]) {
    write_export(&bench.udm, &bench.uri, data);
    bench.udm.ok(&["suspend", "vol"]);
}

#[test]
fn status_table_and_messages_are_the_kernels() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    let sectors = DEVICE_BYTES / 512;
    let fresh = format!("0 {sectors} pcache 0 31 31 1 70 1182 0:0 0:0 0:0\n");
    assert_eq!(udm.ok(&["status", "vol"]), fresh);
    assert_eq!(udm.ok(&["message", "vol", "0", "gc_percent", "80"]), "");
    assert!(udm.ok(&["status", "vol"]).contains(" 80 "), "gc_percent shows");
    for words in [&["gc_percent", "91"][..], &["gc_percent"], &["nothing", "1"]] {
        let line = udm.refused(&[&["message", "vol", "0"], words].concat());
        assert!(line.starts_with("udm: message: vol: "), "{line}");
    }
    let table = udm.ok(&["table", "vol"]);
    assert!(table.contains(" 4 cache_mode writeback crc false"), "{table}");
    let all = udm.ok(&["status", "--all", "vol"]);
    assert!(all.contains("dirty_bytes") && all.contains("origin_is_consistent"), "{all}");
    let info = udm.json(&["info", "vol"]);
    assert_eq!(info["cache_device"], bench.cache());
    assert!(info["medium"].is_string() && info["cached_bytes"].is_u64(), "{info}");
    assert!(udm.ok(&["metrics", "vol"]).contains("udm_dirty_bytes{device=\"vol\""));
    let line = udm.refused(&["load", "vol", "--table", &bench.table()]);
    assert!(line.contains("pcache cannot replace"), "{line}");

    // The line that it prints is one that it takes.
    udm.ok(&["remove", "vol"]);
    udm.ok(&["create", "vol", "--table", table.trim()]);
}

#[test]
fn remove_keeps_dirty_data_and_says_so() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    let data = pattern(7, 8 << 20);
    write_and_hold(&bench, &data);
    let dirty = bench.dirty_bytes();
    assert!(dirty > 0, "no data is dirty right after a write");
    let said = udm.ok(&["remove", "vol"]);
    assert!(said.contains("of dirty data stay in the cache"), "{said}");
    assert!(said.contains(bench.cache()), "{said}");
    bench.create();
    assert!(read_export(udm, &bench.uri)[..data.len()] == data[..]);
    udm.ok(&["remove", "vol", "--drain"]);
    assert!(bench.origin_bytes(data.len()) == data, "the origin has everything");
}

#[test]
fn drain_brings_the_origin_up_to_date() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    let data = pattern(8, 16 << 20);
    write_export(udm, &bench.uri, &data);
    let drained = udm.json(&["drain", "vol"]);
    assert_eq!(drained["dirty_bytes"], 0);
    assert!(bench.origin_bytes(data.len()) == data);
    assert_eq!(bench.dirty_bytes(), 0);
    udm.ok(&["wait", "vol", "--until", "clean", "--timeout", "10"]);
    assert_eq!(udm.ok(&["remove", "vol"]), "vol: removed\n");
}

#[test]
fn a_killed_server_loses_nothing() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    for round in 0..5 {
        let data = pattern(100 + round, 4 << 20);
        write_export(udm, &bench.uri, &data);
        udm.kill_server("vol");
        // The next server finds the memory by the cache device, even under another device name.
        let name = format!("vol{round}");
        udm.ok(&["create", &name, "--table", &bench.table(), "--export", &bench.uri]);
        assert!(read_export(udm, &bench.uri)[..data.len()] == data[..], "round {round}");
        udm.ok(&["remove", &name]);
        udm.ok(&["remove", "vol", "--force"]);
        bench.create();
    }
}

#[test]
fn formatting_needs_to_be_wanted() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.cache.as_file().write_all_at(b"the user's data", 4096).unwrap();
    let words = ["create", "vol", "--table", &bench.table()];
    let line = udm.refused(&words);
    assert!(line.contains(bench.cache()) && line.contains("--force-format"), "{line}");
    let mut there = [0; 15];
    bench.cache.as_file().read_exact_at(&mut there, 4096).unwrap();
    assert_eq!(&there, b"the user's data");
    udm.ok(&[&words[..], &["--force-format"]].concat());
}

#[test]
fn inspect_and_recover_need_no_server() {
    let bench = Bench::new();
    let udm = &bench.udm;
    assert!(udm.refused(&["inspect", bench.cache()]).contains(bench.cache()));
    let line = udm.refused(&["recover", bench.cache(), text(&bench.origin)]);
    assert!(line.contains(bench.cache()), "an empty device is not formatted: {line}");
    bench.create();
    let data = pattern(9, 8 << 20);
    write_and_hold(&bench, &data);
    let snapshot = udm.run(&["inspect", bench.cache()]);
    assert_eq!(snapshot.code, 0, "{snapshot:?}");
    assert!(snapshot.err.contains("in use"), "{snapshot:?}");
    assert_eq!(udm.json(&["inspect", bench.cache()])["is_in_use"], true);
    let line = udm.refused(&["recover", bench.cache(), text(&bench.origin)]);
    assert!(line.contains("in use"), "{line}");

    udm.kill_server("vol");
    let before = std::fs::read(bench.cache.path()).unwrap();
    let report = udm.json(&["inspect", bench.cache()]);
    assert_eq!(report["format"], "pcache");
    assert_eq!(report["segments"], 31);
    assert_eq!(report["is_in_use"], false);
    assert!(udm.ok(&["inspect", bench.cache()]).contains("Dirty data:"));
    assert!(std::fs::read(bench.cache.path()).unwrap() == before, "inspect never writes");

    let recovered = udm.json(&["recover", bench.cache(), text(&bench.origin)]);
    assert_eq!(recovered["dirty_bytes"], 0);
    assert!(bench.origin_bytes(data.len()) == data, "the origin alone has everything");
    assert_eq!(udm.json(&["inspect", bench.cache()])["dirty_bytes"], 0);
    udm.ok(&["recover", bench.cache(), text(&bench.origin)]);
    let other = udm.file("other.img", DEVICE_BYTES);
    let line = udm.refused(&["recover", bench.cache(), text(&other)]);
    assert!(line.contains("another backing device"), "{line}");
    assert!(line.contains("give --rebind"), "the user wrote no table: {line}");
}

#[test]
fn a_killed_recover_goes_on() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    let data = pattern(10, 48 << 20);
    write_and_hold(&bench, &data);
    udm.ok(&["remove", "vol"]);
    let words = ["recover", bench.cache(), text(&bench.origin)];
    for pause_ms in [5, 10, 20, 40] {
        let mut recover = udm.spawn(&words);
        std::thread::sleep(std::time::Duration::from_millis(pause_ms));
        recover.kill().unwrap();
        recover.wait().unwrap();
    }
    // The last of the killed may hold the devices for a moment.
    wait_until("recover has the devices", || udm.run(&words).code == 0);
    assert!(bench.origin_bytes(data.len()) == data, "the origin alone has everything");
}

/// A server whose origin lies on a file system without room: it refuses what is written back.
/// That takes a mount, in a namespace of the server's own; `None` where that is not allowed.
fn create_with_failing_origin(bench: &Bench) -> Option<PathBuf> {
    let folder = bench.udm.path("small");
    std::fs::create_dir(&folder).unwrap();
    let allowed = Command::new("unshare")
        .args(["-rm", "mount", "-t", "tmpfs", "tmpfs", text(&folder)])
        .stderr(Stdio::null())
        .status();
    if !allowed.is_ok_and(|status| status.success()) {
        eprintln!("not run: mounting in a namespace of one's own is not allowed here");
        return None;
    }
    let origin = folder.join("origin.img");
    let table = format!("0 {} pcache {} {}", DEVICE_BYTES / 512, bench.cache(), text(&origin));
    let script = format!(
        "mount -t tmpfs -o size=4m tmpfs {0} && truncate -s {DEVICE_BYTES} {1} && \
         exec {2} create vol --table '{table}' --export '{3}'",
        text(&folder),
        text(&origin),
        env!("CARGO_BIN_EXE_udm"),
        bench.uri
    );
    let created = Command::new("unshare")
        .args(["-rm", "sh", "-c", &script])
        .env("UDM_RUNTIME_DIR", bench.udm.runtime())
        .env("UDM_STATE_DIR", bench.udm.path("state"))
        .output()
        .unwrap();
    assert!(created.status.success(), "{created:?}");
    Some(folder)
}

#[test]
fn a_failing_origin_loses_nothing_and_heals() {
    let bench = Bench::new();
    let udm = &bench.udm;
    let Some(folder) = create_with_failing_origin(&bench) else { return };
    let data = pattern(11, 16 << 20);
    write_export(udm, &bench.uri, &data);
    let mut drain = udm.spawn(&["drain", "vol"]);
    wait_until("write-back fails", || udm.json(&["info", "vol"])["is_writeback_failing"] == true);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(drain.try_wait().unwrap().is_none(), "drain goes on trying");
    assert!(bench.dirty_bytes() > 0);
    assert!(read_export(udm, &bench.uri)[..data.len()] == data[..], "reads go on");

    signal(drain.id().into(), "INT");
    let output = drain.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the origin fails") && said.contains("interrupted"), "{said}");

    let pid = udm.pid("vol").to_string();
    let grown = Command::new("nsenter")
        .args(["-U", "--preserve-credentials", "-m", "-t", &pid, "mount", "-o"])
        .args(["remount,size=128m", text(&folder)])
        .status();
    assert!(grown.unwrap().success());
    let started = std::time::Instant::now();
    udm.ok(&["drain", "vol"]);
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(bench.dirty_bytes(), 0);
    // In the server's own namespace.
    let origin = format!("/proc/{pid}/root{}", text(&folder.join("origin.img")));
    assert!(std::fs::read(origin).unwrap()[..data.len()] == data[..], "the origin has it all");
    udm.ok(&["remove", "vol"]);
}

/// The README's recipe: the server is killed, then removed and made again from its own table, while
/// a client of the kind that reconnects has a disk there. To it all this is a slow write.
#[test]
fn a_client_that_reconnects_outlives_its_servers() {
    let bench = Bench::new();
    let udm = &bench.udm;
    bench.create();
    let socket = text(&udm.path("vol.sock")).to_owned();
    let disk = format!("driver=nbd,server.type=unix,server.path={socket},reconnect-delay=60");
    let mut client = Command::new("qemu-io")
        .args(["--image-opts", &disk])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("qemu-io; the tests need it installed");
    let mut ask = client.stdin.take().unwrap();
    let mut write = |nth: u64| writeln!(ask, "write -P {} {}k 64k", nth + 1, nth * 64).unwrap();
    write(0);
    bench.wait_for_blocks(1);

    udm.kill_server("vol");
    write(1);
    bench.create();
    bench.wait_for_blocks(2);

    let table = udm.path("vol.table");
    std::fs::write(&table, udm.ok(&["table", "vol"])).unwrap();
    udm.refused(&["remove", "vol"]);
    udm.ok(&["remove", "vol", "--force"]);
    write(2);
    udm.ok(&["create", "vol", "--table-file", text(&table), "--export", &bench.uri]);
    bench.wait_for_blocks(3);

    for nth in 0..3 {
        writeln!(ask, "read -P {} {}k 64k", nth + 1, nth * 64).unwrap();
    }
    drop(ask);
    let output = client.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let count = |what: &str| said.matches(what).count();
    assert_eq!((count("wrote 65536/65536"), count("read 65536/65536")), (3, 3), "{said}");
    assert!(!said.contains("verification failed"), "{said}");
    udm.ok(&["remove", "vol"]);
}
