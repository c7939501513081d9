//! A writecache over real processes, in both modes: dirty data, write-back, and the messages about
//! both.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{
    Udm, client, for_clients, pattern, read_export, text, wait_until, write_export,
};

const MIB: u64 = 1 << 20;

/// Size of the device and of its origin.
const DEVICE_BYTES: u64 = 64 * MIB;
/// Size of the cache: less than the device.
const CACHE_BYTES: u64 = 32 * MIB;
/// Blocks of such a cache.
const BLOCKS: u64 = 8160;

/// A udm with a cache file, an origin, and a device's table.
struct Bench {
    udm: Udm,
    cache: tempfile::NamedTempFile,
    origin: PathBuf,
    uri: String,
    mode: char,
}

impl Bench {
    fn new(mode: char) -> Bench {
        let udm = Udm::new();
        let memory = Path::new("/dev/shm");
        let folder = match mode {
            'p' if memory.is_dir() => memory.to_owned(),
            _ => PathBuf::from(env!("CARGO_TARGET_TMPDIR")),
        };
        let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
        cache.as_file().set_len(CACHE_BYTES).unwrap();
        let origin = udm.file("origin.img", DEVICE_BYTES);
        let uri = udm.uri("vol.sock");
        Bench { udm, cache, origin, uri, mode }
    }

    /// In both modes.
    fn each(work: impl Fn(&Bench)) {
        ['p', 's'].map(Bench::new).iter().for_each(work);
    }

    fn cache(&self) -> &str {
        text(self.cache.path())
    }

    fn table(&self) -> String {
        let sectors = DEVICE_BYTES / 512;
        let (origin, cache) = (text(&self.origin), self.cache());
        format!("0 {sectors} writecache {} {origin} {cache} 4096 0", self.mode)
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

    fn dirty_bytes(&self) -> u64 {
        self.udm.json(&["info", "vol"])["dirty_bytes"].as_u64().unwrap()
    }
}

#[test]
fn status_table_and_messages_are_the_kernels() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        bench.create();
        let sectors = DEVICE_BYTES / 512;
        let fresh = format!("0 {sectors} writecache 0 {BLOCKS} {BLOCKS} 0 0 0 0 0 0 0 0 0 0 0\n");
        assert_eq!(udm.ok(&["status", "vol"]), fresh);
        write_export(udm, &bench.uri, &pattern(1, 1 << 20));
        assert!(udm.ok(&["status", "vol"]).starts_with("0 131072 writecache 0 8160 7904 0 "));
        assert_eq!(udm.ok(&["message", "vol", "0", "FLUSH"]), "");
        assert_eq!(bench.dirty_bytes(), 0, "the message's sender has waited, as the kernel's does");
        udm.ok(&["message", "vol", "0", "clear_stats"]);
        assert_eq!(udm.ok(&["status", "vol"]), fresh);
        for words in [&["flush", "now"][..], &["nothing"]] {
            let line = udm.refused(&[&["message", "vol", "0"], words].concat());
            assert!(line.starts_with("udm: message: vol: "), "{line}");
        }
        let table = udm.ok(&["table", "vol"]);
        assert!(table.starts_with(&format!("0 {sectors} writecache {} ", bench.mode)), "{table}");
        assert!(table.trim().ends_with(" 4096 0"), "{table}");
        assert!(udm.ok(&["status", "--all", "vol"]).contains("dirty_bytes"));
        assert_eq!(udm.json(&["info", "vol"])["cache_device"], bench.cache());
        assert!(udm.ok(&["metrics", "vol"]).contains("udm_dirty_bytes{device=\"vol\""));
        // The line that it prints is one that it takes.
        udm.ok(&["remove", "vol"]);
        udm.ok(&["create", "vol", "--table", table.trim()]);
    });
}

#[test]
fn remove_keeps_dirty_data_and_drain_does_not() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        bench.create();
        let data = pattern(7, 8 << 20);
        write_export(udm, &bench.uri, &data);
        assert_eq!(bench.dirty_bytes(), 8 << 20, "no data is written back yet");
        let said = udm.ok(&["remove", "vol"]);
        assert!(said.contains("of dirty data stay in the cache"), "{said}");
        bench.create();
        assert!(read_export(udm, &bench.uri)[..data.len()] == data[..]);
        let drained = udm.json(&["drain", "vol"]);
        assert_eq!(drained["dirty_bytes"], 0);
        assert!(bench.origin_bytes(data.len()) == data, "the origin has everything");
        assert_eq!(udm.ok(&["remove", "vol"]), "vol: removed\n");
    });
}

#[test]
fn more_than_fits_goes_round() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        bench.create();
        for seed in 0..3 {
            let data = pattern(seed, DEVICE_BYTES as usize);
            write_export(udm, &bench.uri, &data);
            assert!(read_export(udm, &bench.uri) == data, "pass {seed}");
        }
        udm.ok(&["remove", "vol", "--drain"]);
        assert!(bench.origin_bytes(DEVICE_BYTES as usize) == pattern(2, DEVICE_BYTES as usize));
    });
}

#[test]
fn the_modes_share_their_media() {
    let mut bench = Bench::new('p');
    let mut data = vec![0; 12 << 20];
    for (nth, mode) in ['p', 's', 'p', 's'].into_iter().enumerate() {
        bench.mode = mode;
        bench.create();
        assert!(read_export(&bench.udm, &bench.uri)[..data.len()] == data[..], "round {nth}");
        data[..(2 + nth) << 20].copy_from_slice(&pattern(nth as u64, (2 + nth) << 20));
        write_export(&bench.udm, &bench.uri, &data);
        if nth % 2 == 0 {
            bench.udm.ok(&["remove", "vol"]);
        } else {
            bench.udm.kill_server("vol");
            bench.create();
            bench.udm.ok(&["remove", "vol"]);
        }
    }
    let cache = bench.cache();
    bench.udm.ok(&["recover", cache, text(&bench.origin)]);
    assert!(bench.origin_bytes(data.len()) == data);
}

#[test]
fn inspect_and_recover_need_no_server() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        let line = udm.refused(&["recover", bench.cache(), text(&bench.origin)]);
        assert!(line.contains(bench.cache()), "an empty device is not formatted: {line}");
        bench.create();
        let data = pattern(9, 8 << 20);
        write_export(udm, &bench.uri, &data);
        assert_eq!(udm.json(&["inspect", bench.cache()])["is_in_use"], true);
        let line = udm.refused(&["recover", bench.cache(), text(&bench.origin)]);
        assert!(line.contains("in use"), "{line}");

        udm.kill_server("vol");
        let before = std::fs::read(bench.cache.path()).unwrap();
        let report = udm.json(&["inspect", bench.cache()]);
        assert_eq!(report["format"], "writecache");
        assert_eq!(report["blocks"], BLOCKS);
        assert_eq!(report["block_bytes"], 4096);
        assert_eq!(report["is_in_use"], false);
        assert_eq!(report["label"]["origin_bytes"], DEVICE_BYTES);
        assert!(udm.ok(&["inspect", bench.cache()]).contains("Live blocks:"));
        assert!(std::fs::read(bench.cache.path()).unwrap() == before, "inspect never writes");

        let other = udm.file("other.img", DEVICE_BYTES);
        let line = udm.refused(&["recover", bench.cache(), text(&other)]);
        assert!(line.contains("another"), "{line}");
        assert!(line.contains("give --rebind"), "the user wrote no table: {line}");

        let recovered = udm.json(&["recover", bench.cache(), text(&bench.origin)]);
        assert_eq!(recovered["dirty_bytes"], 0);
        assert!(bench.origin_bytes(data.len()) == data, "the origin alone has everything");
        let report = udm.json(&["inspect", bench.cache()]);
        assert_eq!((&report["dirty_bytes"], &report["free_blocks"]), (&0.into(), &BLOCKS.into()));
    });
}

#[test]
fn a_killed_recover_goes_on() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        bench.create();
        let data = pattern(10, 12 << 20);
        write_export(udm, &bench.uri, &data);
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
    });
}

#[test]
fn start_sector_moves_the_cache() {
    Bench::each(|bench| {
        let udm = &bench.udm;
        let table = bench.table().replace(" 4096 0", " 4096 2 start_sector 2048");
        udm.ok(&["create", "vol", "--table", &table, "--export", &bench.uri]);
        let data = pattern(3, 4 << 20);
        write_export(udm, &bench.uri, &data);
        udm.ok(&["remove", "vol"]);
        let mut front = vec![1; MIB as usize];
        bench.cache.as_file().read_exact_at(&mut front, 0).unwrap();
        assert!(front.iter().all(|&byte| byte == 0), "the bytes before the start are not touched");
        let report = udm.json(&["inspect", bench.cache(), "--start-sector", "2048"]);
        assert_eq!(report["dirty_bytes"], 4 << 20);
        udm.ok(&["recover", bench.cache(), text(&bench.origin), "--start-sector", "2048"]);
        assert!(bench.origin_bytes(data.len()) == data);
    });
}

#[test]
fn fio_verifies_what_it_wrote() {
    Bench::each(|bench| {
        bench.create();
        let uri = format!("--uri={}", for_clients(&bench.uri));
        let job = ["--name=verify", "--ioengine=nbd", &uri, "--size=64m", "--verify=crc32c"];
        let shape = ["--verify_fatal=1", "--verify_interval=4k", "--randseed=5", "--fsync=32"];
        let work = ["--rw=randwrite", "--bsrange=4k-64k", "--blockalign=4k", "--iodepth=16"];
        client("fio", &[&job[..], &shape, &work].concat());
        bench.udm.ok(&["remove", "vol", "--drain"]);
    });
}

#[test]
fn a_file_system_lives_on_it() {
    Bench::each(|bench| {
        // Made on a file and copied in; then out again, past the server, and checked.
        let udm = &bench.udm;
        let image = udm.file("fs.img", DEVICE_BYTES);
        client(&sbin("mkfs.ext4"), &["-q", "-F", "-d", "src", text(&image)]);
        bench.create();
        write_export(udm, &bench.uri, &std::fs::read(&image).unwrap());
        udm.kill_server("vol");
        bench.create();
        udm.ok(&["remove", "vol", "--drain"]);
        client(&sbin("e2fsck"), &["-f", "-n", text(&bench.origin)]);
        assert!(std::fs::read(&bench.origin).unwrap() == std::fs::read(&image).unwrap());
    });
}

/// Tools of file systems are not in everybody's path.
fn sbin(program: &str) -> String {
    let place = format!("/usr/sbin/{program}");
    if Path::new(&place).exists() { place } else { program.to_owned() }
}
