//! Devices that shrink, or lose their names, under a running server. Lost data is never read as
//! zeroes, no further request is acknowledged, and every command and log reports the cause.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::common::{PATIENCE, Udm, pattern, text, wait_until, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 64 * MIB;
const BLOCK: usize = 4096;

/// Which target, on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Pcache,
    Pmem,
    Disk,
    Cache,
}

const ALL: [What; 3] = [What::Pcache, What::Pmem, What::Disk];

struct Bench {
    udm: Udm,
    what: What,
    cache: tempfile::NamedTempFile,
    origin: PathBuf,
    uri: String,
}

impl Bench {
    fn new(what: What) -> Bench {
        let udm = Udm::new();
        let memory = Path::new("/dev/shm");
        let folder = match what {
            What::Pcache | What::Pmem if memory.is_dir() => memory.to_owned(),
            _ => PathBuf::from(env!("CARGO_TARGET_TMPDIR")),
        };
        let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
        cache.as_file().set_len(if what == What::Pcache { 512 } else { 64 } * MIB).unwrap();
        let origin = udm.file("origin.img", ORIGIN_BYTES);
        let uri = udm.uri("vol.sock");
        Bench { udm, what, cache, origin, uri }
    }

    fn table(&self) -> String {
        let (cache, origin) = (text(self.cache.path()), text(&self.origin));
        let sectors = ORIGIN_BYTES / 512;
        match self.what {
            What::Pcache => format!("0 {sectors} pcache {cache} {origin}"),
            What::Pmem => format!("0 {sectors} writecache p {origin} {cache} 4096 0"),
            What::Disk => format!("0 {sectors} writecache s {origin} {cache} 4096 0"),
            What::Cache => {
                let metadata = self.udm.path("metadata.img");
                if !metadata.exists() {
                    self.udm.file("metadata.img", 4 * MIB);
                }
                let metadata = text(&metadata);
                format!("0 {sectors} cache {metadata} {cache} {origin} 64 1 writeback smq 0")
            }
        }
    }

    fn create(&self) {
        self.udm.ok(&["create", "vol", "--table", &self.table(), "--export", &self.uri]);
    }

    fn fact(&self, name: &str) -> serde_json::Value {
        self.udm.json(&["info", "vol"])["lines"][0]["facts"][name].clone()
    }

    fn cut(path: &Path, len: u64) {
        OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
    }

    fn client(&self) -> crate::nbd::Client {
        let mut stream = UnixStream::connect(self.udm.path("vol.sock")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&crate::nbd::usual_handshake(false)).unwrap();
        stream.read_exact(&mut [0; crate::nbd::USUAL_ANSWER_BYTES]).unwrap();
        crate::nbd::Client { stream }
    }

    fn origin_bytes(&self) -> Vec<u8> {
        std::fs::read(&self.origin).unwrap()
    }
}

fn read(client: &mut crate::nbd::Client, block: usize) -> Option<Vec<u8>> {
    client.send(&crate::nbd::request(0, 0, 7, (block * BLOCK) as u64, BLOCK as u32));
    let reply = client.reply(BLOCK);
    (reply.error == 0).then_some(reply.data)
}

fn write(client: &mut crate::nbd::Client, block: usize, data: &[u8]) -> bool {
    client.send(&crate::nbd::write(0, 7, (block * BLOCK) as u64, data));
    client.reply(0).error == 0
}

/// A command that ends with an error, maybe after it has told how far it is: the error.
fn failed(udm: &Udm, words: &[&str]) -> String {
    let outcome = udm.run(words);
    assert_eq!(outcome.code, 1, "udm {words:?}: {outcome:?}");
    outcome.err.lines().last().unwrap().to_owned()
}

/// Every block reads as what was written there, or not at all; how many do.
fn readable(bench: &Bench, data: &[u8]) -> usize {
    let mut client = bench.client();
    let blocks = data.chunks(BLOCK).enumerate();
    blocks
        .filter(|(block, wanted)| match read(&mut client, *block) {
            Some(found) => {
                assert!(
                    found == *wanted,
                    "{:?}: block {block} reads as what it is not",
                    bench.what
                );
                true
            }
            None => false,
        })
        .count()
}

#[test]
fn what_a_cache_lost_is_neither_read_nor_written_back_as_zeroes() {
    for what in ALL {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        // The older data in the origin must never be read again either.
        let old = pattern(1, ORIGIN_BYTES as usize);
        std::fs::write(&bench.origin, &old).unwrap();
        bench.create();
        let data = pattern(2, 24 << 20);
        let written = udm.path("data");
        std::fs::write(&written, &data).unwrap();
        write_export(udm, &bench.uri, &data);
        udm.ok(&["suspend", "vol"]);
        let dirty = bench.fact("dirty_bytes").as_u64().unwrap();
        assert!(dirty > 0, "{what:?}");
        let len = if what == What::Pcache { 20 * MIB } else { 12 * MIB };
        Bench::cut(bench.cache.path(), len);
        udm.ok(&["resume", "vol"]);

        let whole = readable(&bench, &data);
        assert!(whole > 0 && whole < data.len() / BLOCK, "{what:?}: {whole} blocks");
        let failure = bench.fact("medium_failure");
        assert!(failure.as_str().unwrap().contains("cut short"), "{what:?}: {failure}");
        assert_eq!(bench.fact("medium_has_failed"), true, "{what:?}");
        // From here on, no write is acknowledged, at any offset.
        let mut client = bench.client();
        for block in [0, 4000, 9000, 16000] {
            assert!(!write(&mut client, block, &[9; BLOCK]), "{what:?}: block {block}");
        }
        drop(client);
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("cut short") && line.contains("udm recover"), "{what:?}: {line}");
        // Longer again is not whole again.
        Bench::cut(bench.cache.path(), if what == What::Pcache { 512 } else { 64 } * MIB);
        assert_eq!(readable(&bench, &data), whole, "{what:?}");
        assert_eq!(udm.run(&["drain", "vol"]).code, 1, "{what:?}");
        // The origin has each block as it was or as it was written, and none as zeroes.
        let origin = bench.origin_bytes();
        let blocks = origin.chunks(BLOCK).zip(old.chunks(BLOCK).zip(data.chunks(BLOCK)));
        for (nth, (found, (old, new))) in blocks.enumerate() {
            assert!(found == old || found == new, "{what:?}: block {nth} of the origin");
        }
        udm.run(&["remove", "--force", "vol"]);
    }
}

/// During the cut, no read and no check meets the short file.
#[test]
fn a_cut_that_was_undone_before_anybody_looked_is_a_loss() {
    for (what, cut) in [
        (What::Pcache, 20 * MIB),
        (What::Pmem, 12 * MIB),
        (What::Disk, 12 * MIB),
        (What::Cache, 12 * MIB),
        (What::Cache, 100_000),
    ] {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        let old = pattern(1, ORIGIN_BYTES as usize);
        std::fs::write(&bench.origin, &old).unwrap();
        bench.create();
        // Real zeroes are data: only a hole is a loss.
        let mut data = pattern(2, 24 << 20);
        data[..32 * BLOCK].fill(0);
        write_export(udm, &bench.uri, &data);
        assert_eq!(readable(&bench, &data), data.len() / BLOCK, "{what:?}");
        udm.ok(&["suspend", "vol"]);
        Bench::cut(bench.cache.path(), cut);
        Bench::cut(bench.cache.path(), bench.full_bytes());
        udm.ok(&["resume", "vol"]);

        let whole = readable(&bench, &data);
        assert!(whole < data.len() / BLOCK, "{what:?}: {whole} blocks");
        // The origin of a `cache` takes what the cache device does not.
        if what != What::Cache {
            let mut client = bench.client();
            wait_until("writes are refused", || !write(&mut client, 9000, &[9; BLOCK]));
            client.send(&crate::nbd::request(0, 3, 7, 0, 0));
            assert_ne!(client.reply(0).error, 0, "{what:?}: a flush");
            let failure = bench.fact("medium_failure");
            let failure = failure.as_str().unwrap();
            let is_told = ["cut short", "has a hole"].iter().any(|words| failure.contains(words));
            assert!(is_told, "{what:?}: {failure}");
        }
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("cut short"), "{what:?}: {line}");
        // The block before the cut is not trusted any more once a check has seen the hole.
        assert!(readable(&bench, &data) <= whole, "{what:?}");
        let origin = bench.origin_bytes();
        let blocks = origin.chunks(BLOCK).zip(old.chunks(BLOCK));
        for (nth, (found, old)) in blocks.enumerate() {
            let new = data.get(nth * BLOCK..(nth + 1) * BLOCK);
            assert!(found == old || Some(found) == new, "{what:?}: block {nth} of the origin");
        }
        udm.run(&["remove", "--force", "vol"]);
    }
}

/// At rest: as long as it was, but with a hole where data was.
#[test]
fn a_cut_at_rest_that_was_undone_is_a_loss() {
    for (what, cut) in [
        (What::Pcache, 20 * MIB),
        (What::Pcache, 100 * MIB),
        (What::Pmem, 12 * MIB),
        (What::Pmem, 128 << 10),
        (What::Disk, 12 * MIB),
        (What::Disk, 128 << 10),
    ] {
        let (bench, old, data) = Bench::filled(what, End::Removed);
        let udm = &bench.udm;
        Bench::cut(bench.cache.path(), cut);
        Bench::cut(bench.cache.path(), bench.full_bytes());
        // Twice: an attempt fills no hole.
        for _ in 0..2 {
            let table = bench.table();
            let made = udm.run(&["create", "vol", "--table", &table, "--export", &bench.uri]);
            match made.code {
                // Either all data is there, or each read of lost data fails.
                0 => {
                    let whole = readable(&bench, &data);
                    assert!(whole < data.len() / BLOCK || cut == 100 * MIB, "{what:?}: {whole}");
                    udm.run(&["remove", "vol", "--force"]);
                }
                _ => assert!(made.err.contains("cut short"), "{what:?}, {cut}: {made:?}"),
            }
        }
        let outcome = bench.recover(&["--json"]);
        if cut == 128 << 10 {
            assert!(
                outcome.code == 1 && outcome.err.contains("cut short"),
                "{what:?}: {outcome:?}"
            );
        } else {
            let report = serde_json::from_str(&outcome.out);
            let lost = lost_blocks(&report.unwrap_or_else(|_| panic!("{what:?}: {outcome:?}")));
            assert_eq!(lost.is_empty(), outcome.code == 0, "{what:?}, {cut}: {outcome:?}");
            assert!(cut == 100 * MIB || !lost.is_empty(), "{what:?}: {outcome:?}");
        }
        let origin = bench.origin_bytes();
        for (block, found) in origin.chunks(BLOCK).enumerate() {
            let new = data.get(block * BLOCK..(block + 1) * BLOCK);
            let is_old = found == &old[block * BLOCK..][..BLOCK];
            assert!(is_old || Some(found) == new, "{what:?}, {cut}: block {block} of the origin");
        }
    }
}

#[test]
fn what_an_origin_lost_is_not_cached_as_zeroes() {
    for what in ALL {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        let old = pattern(3, ORIGIN_BYTES as usize);
        std::fs::write(&bench.origin, &old).unwrap();
        bench.create();
        let mut client = bench.client();
        let data = pattern(4, BLOCK);
        assert!(write(&mut client, 100, &data));
        Bench::cut(&bench.origin, 16 * MIB);
        for block in [5000, 9000, 16383] {
            assert_eq!(read(&mut client, block), None, "{what:?}: block {block}");
        }
        assert!(read(&mut client, 10).unwrap() == old[10 * BLOCK..11 * BLOCK], "{what:?}");
        assert!(read(&mut client, 100).unwrap() == data, "{what:?}");
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("cut short, from 67108864 to 16777216 bytes"), "{what:?}: {line}");
        assert!(line.contains("stay in the cache"), "{what:?}: {line}");
        assert!(udm.ok(&["info", "vol"]).contains("Origin:"), "{what:?}");
        // As long as before, but with other data.
        Bench::cut(&bench.origin, ORIGIN_BYTES);
        assert_eq!(read(&mut client, 5000), None, "{what:?}");
        drop(client);
        // A new server accepts the changed origin, and writes the dirty block back to it.
        udm.ok(&["remove", "vol"]);
        bench.create();
        udm.ok(&["remove", "vol", "--drain"]);
        assert!(bench.origin_bytes()[100 * BLOCK..101 * BLOCK] == data, "{what:?}");
    }
}

#[test]
fn a_deleted_origin_is_not_said_to_have_everything() {
    for what in ALL {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        bench.create();
        let data = pattern(5, 1 << 20);
        write_export(udm, &bench.uri, &data);
        std::fs::remove_file(&bench.origin).unwrap();
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("was deleted") && line.contains("/proc/"), "{what:?}: {line}");
        for words in [&["info", "vol"][..], &["status", "vol"], &["ls"]] {
            let outcome = udm.run(words);
            assert!((outcome.out + &outcome.err).contains("was deleted"), "{what:?}: {words:?}");
        }
        for words in [&["remove", "vol"][..], &["remove", "--drain", "vol"]] {
            let line = failed(udm, words);
            assert!(line.contains("was deleted"), "{what:?}: {line}");
        }
        // It can be had from where it still is.
        let place = line.split_whitespace().find(|word| word.starts_with("/proc/")).unwrap();
        let recovered = std::fs::read(place.trim_end_matches(|c: char| !c.is_numeric())).unwrap();
        assert!(recovered[..data.len()] == data[..], "{what:?}");
        udm.ok(&["remove", "vol", "--force"]);
    }
}

#[test]
fn a_replaced_origin_is_noticed() {
    for what in ALL {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        bench.create();
        let data = pattern(6, 1 << 20);
        write_export(udm, &bench.uri, &data);
        let away = udm.path("away.img");
        std::fs::rename(&bench.origin, &away).unwrap();
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("was moved away"), "{what:?}: {line}");
        udm.file("origin.img", ORIGIN_BYTES);
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("was replaced"), "{what:?}: {line}");
        let mut found = vec![0; data.len()];
        OpenOptions::new().read(true).open(&away).unwrap().read_at(&mut found, 0).unwrap();
        assert!(found == data, "{what:?}: data is written to the file that was opened");
        // No data is lost with the server, and it names the file that has all data.
        let outcome = udm.run(&["remove", "vol"]);
        assert_eq!(outcome.code, 0, "{what:?}: {outcome:?}");
        assert!(outcome.err.contains("was replaced"), "{what:?}: {outcome:?}");
    }
}

#[test]
fn a_cache_that_shrinks_behind_what_is_used_takes_no_more_writes() {
    for what in [What::Pmem, What::Disk] {
        let bench = Bench::new(what);
        bench.create();
        let mut client = bench.client();
        assert!(write(&mut client, 1, &pattern(7, BLOCK)));
        Bench::cut(bench.cache.path(), 40 * MIB);
        // The slots of the writes so far still exist, but the medium takes no more.
        wait_until("writes are refused", || !write(&mut client, 2, &pattern(8, BLOCK)));
        // Its slot exists or not. A read returns its data or fails.
        let found = read(&mut client, 1);
        assert!(found.is_none_or(|found| found == pattern(7, BLOCK)), "{what:?}");
    }
}

impl Bench {
    /// The table of the same cache, to read.
    fn read_only_table(&self) -> String {
        let (cache, origin) = (text(self.cache.path()), text(&self.origin));
        let shown = |path: &str| format!("{path}?readonly");
        self.table().replace(cache, &shown(cache)).replace(origin, &shown(origin))
    }

    fn full_bytes(&self) -> u64 {
        if self.what == What::Pcache { 512 * MIB } else { 64 * MIB }
    }

    fn recover(&self, more: &[&str]) -> crate::common::Outcome {
        let (cache, origin) = (text(self.cache.path()), text(&self.origin));
        self.udm.run(&[&["recover", cache, origin][..], more].concat())
    }

    /// An origin of old data, and a cache with dirty data (the last value) for its first MiB.
    fn filled(what: What, end: End) -> (Bench, Vec<u8>, Vec<u8>) {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        let old = pattern(1, ORIGIN_BYTES as usize);
        std::fs::write(&bench.origin, &old).unwrap();
        bench.create();
        let data = pattern(2, 24 << 20);
        write_export(udm, &bench.uri, &data);
        match end {
            End::Removed => {
                udm.ok(&["suspend", "vol"]);
                assert!(bench.fact("dirty_bytes").as_u64().unwrap() > 0, "{what:?}");
                udm.ok(&["remove", "vol"]);
            }
            End::Killed => {
                // Acknowledged, and known in memory alone.
                let mut client = bench.client();
                assert!(write(&mut client, 6200, &pattern(3, BLOCK)));
                udm.kill_server("vol");
            }
        }
        (bench, old, data)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Removed,
    Killed,
}

/// The ranges that a recovery says are lost.
fn lost_blocks(report: &serde_json::Value) -> Vec<usize> {
    let ranges = report["lost_ranges"].as_array().unwrap();
    let number = |range: &serde_json::Value, name: &str| range[name].as_u64().unwrap() as usize;
    let blocks = ranges.iter().flat_map(|range| {
        let (at, len) = (number(range, "offset"), number(range, "len"));
        at / BLOCK..(at + len).div_ceil(BLOCK)
    });
    blocks.collect()
}

#[test]
fn half_of_a_cache_can_be_read_and_recovered() {
    for what in ALL {
        let (bench, old, data) = Bench::filled(what, End::Removed);
        let udm = &bench.udm;
        Bench::cut(bench.cache.path(), if what == What::Pcache { 20 } else { 12 } * MIB);
        let before = std::fs::read(bench.cache.path()).unwrap();
        for words in [&["create", "vol", "--table", &bench.table()][..], &["inspect"]] {
            let cache = text(bench.cache.path());
            let line = match words {
                ["inspect"] => udm.refused(&["inspect", cache]),
                words => udm.refused(words),
            };
            let is_told = ["cut short", "udm recover", "?readonly"];
            assert!(is_told.iter().all(|words| line.contains(words)), "{what:?}: {line}");
        }

        let table = bench.read_only_table();
        let made = udm.run(&["create", "vol", "--table", &table, "--export", &bench.uri]);
        assert!(made.code == 0 && made.err.contains("cut short"), "{what:?}: {made:?}");
        let whole = readable(&bench, &data);
        assert!(whole > 0 && whole < data.len() / BLOCK, "{what:?}: {whole} blocks");
        let mut client = bench.client();
        for block in [6200, 16383] {
            let found = read(&mut client, block).unwrap();
            assert!(found == old[block * BLOCK..][..BLOCK], "{what:?}: block {block}");
        }
        assert!(!write(&mut client, 9000, &[9; BLOCK]) && !write(&mut client, 0, &[9; BLOCK]));
        let lost: Vec<usize> =
            (0..data.len() / BLOCK).filter(|block| read(&mut client, *block).is_none()).collect();
        drop(client);
        assert_eq!(udm.json(&["info", "vol"])["is_read_only"], true, "{what:?}");
        assert!(udm.ok(&["table", "vol"]).contains("?readonly"), "{what:?}");
        assert_eq!(bench.fact("lost_bytes"), (lost.len() * BLOCK) as u64, "{what:?}");
        let outcome = bench.recover(&[]);
        assert!(outcome.err.contains("in use"), "{what:?}: {outcome:?}");
        udm.ok(&["status", "--all", "vol"]);
        udm.ok(&["remove", "vol"]);
        assert!(bench.origin_bytes() == old, "{what:?}: recover changed the origin");

        // The first one changes the origin, and the cut cache cannot note that.
        for options in [&["--json"][..], &["--json", "--rebind"]] {
            let outcome = bench.recover(options);
            assert_eq!(outcome.code, 1, "{what:?}: {outcome:?}");
            assert!(outcome.err.contains("not all data was recovered"), "{what:?}: {outcome:?}");
            let report = serde_json::from_str(&outcome.out).unwrap();
            assert_eq!(lost_blocks(&report), lost, "{what:?}");
            let origin = bench.origin_bytes();
            for (block, found) in origin.chunks(BLOCK).enumerate() {
                let is_old = block >= data.len() / BLOCK || lost.contains(&block);
                let wanted = if is_old { &old } else { &data };
                assert!(found == &wanted[block * BLOCK..][..BLOCK], "{what:?}: block {block}");
            }
        }
        let outcome = bench.recover(&["--rebind"]);
        assert!(outcome.code == 1 && outcome.out.contains(": lost: "), "{what:?}: {outcome:?}");
        assert!(std::fs::read(bench.cache.path()).unwrap() == before, "{what:?}: it was changed");
    }
}

#[test]
fn what_a_dead_server_had_in_memory_comes_back_from_what_is_left() {
    for what in ALL {
        let (bench, _, data) = Bench::filled(what, End::Killed);
        Bench::cut(bench.cache.path(), bench.full_bytes() / 2);
        let elsewhere = bench.udm.path("elsewhere");
        let lost = bench
            .udm
            .command(&["recover", text(bench.cache.path()), text(&bench.origin)])
            .env("UDM_RUNTIME_DIR", elsewhere)
            .output();
        let said = String::from_utf8(lost.unwrap().stderr).unwrap();
        assert!(said.contains("--accept-loss"), "{what:?}: {said}");
        let outcome = bench.recover(&[]);
        assert_eq!(outcome.code, 0, "{what:?}: {outcome:?}");
        assert!(outcome.out.contains("is written back"), "{what:?}: {outcome:?}");
        let origin = bench.origin_bytes();
        assert!(origin[..data.len()] == data, "{what:?}");
        assert!(origin[6200 * BLOCK..6201 * BLOCK] == pattern(3, BLOCK), "{what:?}");
    }
}

#[test]
fn a_cache_that_lost_its_last_block_lost_nothing() {
    for what in ALL {
        let (bench, old, data) = Bench::filled(what, End::Removed);
        Bench::cut(bench.cache.path(), bench.full_bytes() - BLOCK as u64);
        let line = bench.udm.refused(&["create", "vol", "--table", &bench.table()]);
        assert!(line.contains("cut short"), "{what:?}: {line}");
        let table = bench.read_only_table();
        bench.udm.ok(&["create", "vol", "--table", &table, "--export", &bench.uri]);
        assert_eq!(readable(&bench, &data), data.len() / BLOCK, "{what:?}");
        bench.udm.ok(&["remove", "vol"]);
        let report: serde_json::Value =
            serde_json::from_str(&bench.recover(&["--json"]).out).unwrap();
        assert_eq!(
            (&report["lost_bytes"], &report["lost_is_truncated"]),
            (&0.into(), &false.into())
        );
        let origin = bench.origin_bytes();
        assert!(origin[..data.len()] == data && origin[data.len()..] == old[data.len()..]);
    }
}

#[test]
fn a_cut_under_a_server_is_recovered_from_as_that_says() {
    for what in ALL {
        let bench = Bench::new(what);
        let udm = &bench.udm;
        let old = pattern(1, ORIGIN_BYTES as usize);
        std::fs::write(&bench.origin, &old).unwrap();
        bench.create();
        let data = pattern(2, 24 << 20);
        write_export(udm, &bench.uri, &data);
        udm.ok(&["suspend", "vol"]);
        Bench::cut(bench.cache.path(), if what == What::Pcache { 20 } else { 12 } * MIB);
        udm.ok(&["resume", "vol"]);
        let line = failed(udm, &["drain", "vol"]);
        assert!(line.contains("udm remove --force"), "{what:?}: {line}");
        udm.run(&["remove", "--force", "vol"]);
        let outcome = bench.recover(&["--json"]);
        assert_eq!(outcome.code, 1, "{what:?}: {outcome:?}");
        let lost = lost_blocks(&serde_json::from_str(&outcome.out).unwrap());
        assert!(!lost.is_empty(), "{what:?}");
        let origin = bench.origin_bytes();
        for (block, found) in origin.chunks(BLOCK).enumerate() {
            let place = block * BLOCK..(block + 1) * BLOCK;
            let is_new = data.get(place.clone()).is_some_and(|data| found == data);
            let is_told = block >= data.len() / BLOCK || lost.contains(&block);
            assert!(is_new || is_told && found == &old[place], "{what:?}: block {block}");
        }
    }
}

#[test]
fn lost_entries_are_refused_unless_that_is_said() {
    for what in [What::Pmem, What::Disk] {
        let (bench, _, data) = Bench::filled(what, End::Removed);
        let udm = &bench.udm;
        // Entries are the first 256 KiB: half of them are lost.
        Bench::cut(bench.cache.path(), 128 << 10);
        let table = bench.read_only_table();
        let line = udm.refused(&["create", "vol", "--table", &table]);
        assert!(line.contains("`lost_entries accept`"), "{what:?}: {line}");
        let outcome = bench.recover(&[]);
        assert!(outcome.code == 1 && outcome.err.contains("--truncate"), "{what:?}: {outcome:?}");
        let table = format!("{table} lost_entries accept");
        let made = udm.run(&["create", "vol", "--table", &table, "--export", &bench.uri]);
        assert!(
            made.code == 0 && made.err.contains("READS MAY RETURN OLDER DATA"),
            "{what:?}: {made:?}"
        );
        let mut client = bench.client();
        assert!(read(&mut client, 0).is_none_or(|found| found == data[..BLOCK]), "{what:?}");
        drop(client);
        udm.ok(&["remove", "vol"]);
        let outcome = bench.recover(&["--truncate"]);
        assert_eq!(outcome.code, 1, "{what:?}: {outcome:?}");
        assert!(outcome.err.contains("more in unknown ranges"), "{what:?}: {outcome:?}");
    }
}
