//! New tables for a live `cache`: it and its origin grow and shrink while clients use it. A refused
//! table has no effect.

use std::fs::File;
use std::time::Duration;

use crate::common::{Udm, for_clients, pattern, read_export, wait_until, write_export};

const MIB: u64 = 1 << 20;

/// A cache device and an origin, in files, with metadata at the front of the first.
struct Bench {
    udm: Udm,
    uri: String,
}

impl Bench {
    fn new() -> Bench {
        let udm = Udm::new();
        udm.file("slow.img", 64 * MIB);
        udm.file("hot.img", 36 * MIB);
        let uri = udm.uri("vol.sock");
        Bench { udm, uri }
    }

    /// A table of this many MiB of cached blocks and of origin, in this mode.
    fn table(cache: u64, origin: u64, mode: &str) -> String {
        format!(
            "0 {} cache hot.img?size=4M hot.img?offset=4M&size={cache}M slow.img 64 2 metadata2 \
             {mode} smq 2 migration_threshold 0",
            origin * 2048
        )
    }

    fn create(&self, cache: u64, origin: u64, mode: &str) {
        let table = Bench::table(cache, origin, mode);
        self.udm.ok(&["create", "vol", "--table", &table, "--export", &self.uri]);
    }

    fn load(&self, cache: u64, origin: u64, mode: &str) {
        self.udm.ok(&["load", "vol", "--table", &Bench::table(cache, origin, mode)]);
    }

    fn change(&self, cache: u64, origin: u64, mode: &str) {
        self.load(cache, origin, mode);
        self.udm.ok(&["resume", "vol"]);
    }

    /// The change is refused, for a reason that has `what`; the device is as before, and active.
    fn refused(&self, cache: u64, origin: u64, mode: &str, what: &str) {
        let table = self.udm.ok(&["table", "vol"]);
        self.load(cache, origin, mode);
        let line = self.udm.refused(&["resume", "vol"]);
        assert!(line.contains(what), "{line}");
        assert_eq!(self.udm.ok(&["table", "vol"]), table);
        assert_eq!(self.udm.json(&["ls"])[0]["state"], "active");
        // The table that failed is gone.
        assert_eq!(self.udm.ok(&["table", "--inactive", "vol"]), "");
    }

    /// Blocks of the cache, blocks in use, and dirty ones.
    fn blocks(&self) -> [u64; 3] {
        let [all, used, dirty, ..] = self.counts();
        [all, used, dirty]
    }

    /// The same, and blocks that the policy has removed and added under this table.
    fn counts(&self) -> [u64; 5] {
        let line = self.udm.ok(&["status", "vol"]);
        let words: Vec<&str> = line.split_whitespace().collect();
        let (used, all) = words[6].split_once('/').unwrap();
        [all, used, words[13], words[11], words[12]].map(|word| word.parse().unwrap())
    }

    /// Changes the table to one with this many MiB of cached blocks. All blocks in use stay in use,
    /// except those that the policy removes at any time to have free ones; none becomes dirty.
    fn keeps_blocks_with(&self, cache: u64) {
        self.udm.ok(&["suspend", "vol"]);
        let [_, used, dirty] = self.blocks();
        self.change(cache, 32, "writeback");
        wait_until("all blocks are there", || {
            let [all, now, now_dirty, removed, added] = self.counts();
            assert!(all == cache * 32 && now_dirty <= dirty, "{all}, {now_dirty} of {dirty}");
            now + removed == used + added
        });
    }

    /// Writes until most of the cache is dirty.
    fn fill(&self, data: &[u8]) {
        for _ in 0..20 {
            write_export(&self.udm, &self.uri, data);
            if self.blocks()[2] * 4 > self.blocks()[0] {
                return;
            }
        }
        panic!("the cache stores no blocks: {:?}", self.blocks());
    }
}

#[test]
fn a_live_cache_grows_and_shrinks() {
    let bench = Bench::new();
    bench.create(16, 32, "writeback");
    let data = pattern(1, 32 << 20);
    bench.fill(&data);
    assert_eq!(bench.blocks()[0], 512);
    bench.keeps_blocks_with(32);
    assert!(read_export(&bench.udm, &bench.uri) == data);
    // A reload of the same sizes.
    bench.keeps_blocks_with(32);
    // Dirty blocks beyond the new end: the table is refused, and no data is lost.
    bench.refused(2, 32, "writeback", "is dirty: write it back first");
    assert!(read_export(&bench.udm, &bench.uri) == data);
    bench.refused(32, 2, "writeback", "is dirty, and beyond the end of the table");
    bench.refused(32, 32, "passthrough", "passthrough mode needs a cache without dirty blocks");
    // Clean ones just go.
    bench.udm.ok(&["drain", "vol"]);
    let clean = bench.blocks();
    assert!(clean[1] > 64 && clean[2] == 0, "{clean:?}");
    bench.change(2, 32, "writeback");
    let small = bench.blocks();
    assert!(small[0] == 64 && small[1] <= 64 && small[2] == 0, "{small:?}");
    assert!(read_export(&bench.udm, &bench.uri) == data);
    // The origin grows and shrinks.
    bench.change(16, 64, "writeback");
    let mut whole = pattern(2, 64 << 20);
    bench.fill(&whole);
    assert!(read_export(&bench.udm, &bench.uri) == whole);
    bench.udm.ok(&["drain", "vol"]);
    bench.change(16, 8, "writeback");
    assert!(read_export(&bench.udm, &bench.uri) == whole[..8 << 20]);
    // After the origin has grown again, no old block beyond its earlier end is cached.
    bench.udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap() == whole);
    whole[40 << 20..48 << 20].copy_from_slice(&pattern(3, 8 << 20));
    std::fs::write(bench.udm.path("slow.img"), &whole).unwrap();
    bench.create(16, 8, "writeback");
    bench.change(16, 64, "writeback");
    assert!(read_export(&bench.udm, &bench.uri) == whole);
    // The live table survives its server.
    bench.udm.kill_server("vol");
    bench.create(16, 64, "writeback");
    assert!(read_export(&bench.udm, &bench.uri) == whole);
    bench.udm.ok(&["remove", "vol"]);
    bench.udm.ok(&["cache", "check", "hot.img"]);
}

#[test]
fn a_server_that_died_leaves_a_cache_that_does_not_lose_its_end() {
    let bench = Bench::new();
    bench.create(16, 32, "writeback");
    let data = pattern(1, 32 << 20);
    bench.fill(&data);
    let dirty = bench.blocks()[2];
    bench.udm.kill_server("vol");
    let table = Bench::table(2, 32, "writeback");
    let line = bench.udm.refused(&["create", "vol", "--table", &table]);
    assert!(line.contains("is dirty: write it back first"), "{line}");
    bench.create(16, 32, "writeback");
    // The policy writes blocks back until the kill.
    let left = bench.blocks()[2];
    assert!((1..=dirty).contains(&left), "only what was dirty is dirty after a crash: {left}");
    assert!(read_export(&bench.udm, &bench.uri) == data);
}

#[test]
fn modes_change_and_tables_that_do_not_fit_are_refused() {
    let bench = Bench::new();
    bench.create(16, 32, "writeback");
    let data = pattern(1, 32 << 20);
    bench.fill(&data);
    bench.change(16, 32, "writethrough");
    assert!(bench.blocks()[2] > 0, "dirty blocks stay dirty");
    bench.udm.ok(&["drain", "vol"]);
    write_export(&bench.udm, &bench.uri, &data);
    assert_eq!(bench.blocks()[2], 0);
    bench.change(16, 32, "passthrough");
    assert!(read_export(&bench.udm, &bench.uri) == data);
    let load = |table: &str| bench.udm.refused(&["load", "vol", "--table", table]);
    let table = Bench::table(16, 32, "writeback");
    let line = load(&table.replace(" 64 2 ", " 128 2 "));
    assert!(line.contains("belongs to a cache with blocks of 64 sectors, not 128"), "{line}");
    let line = load(&table.replace("size=4M", "size=5M"));
    assert!(line.contains("overlaps"), "{line}");
    let line = load(&table.replace("size=16M", "size=33M"));
    assert!(line.contains("hot.img"), "{line}");
    let line = load(&Bench::table(16, 65, "writeback"));
    assert!(line.contains("the table is 65.0 MiB long"), "{line}");
    // Devices of another server, and those that this one keeps data on.
    bench.udm.file("other.img", 64 * MIB);
    bench.udm.ok(&["create", "other", "--table", "0 2048 linear other.img 0"]);
    let line = load(&table.replace("slow.img", "other.img"));
    assert!(line.contains("in use"), "{line}");
    let line = load("0 2048 linear slow.img 0");
    assert!(line.contains("in use"), "{line}");
    assert!(read_export(&bench.udm, &bench.uri) == data);
    bench.udm.ok(&["remove", "vol"]);
    bench.udm.ok(&["remove", "other"]);
}

#[test]
fn a_device_that_has_grown_is_taken_as_it_is() {
    let bench = Bench::new();
    bench.udm.file("meta.img", 4 * MIB);
    bench.udm.file("fast.img", 8 * MIB);
    let table = "0 65536 cache meta.img fast.img slow.img 64 1 writeback smq 0";
    bench.udm.ok(&["create", "vol", "--table", table, "--export", &bench.uri]);
    assert_eq!(bench.blocks()[0], 256);
    let grow = |bytes| {
        File::options().write(true).open(bench.udm.path("fast.img")).unwrap().set_len(bytes)
    };
    grow(16 * MIB).unwrap();
    assert_eq!(bench.blocks()[0], 256, "only a new table adds blocks");
    bench.udm.ok(&["load", "vol", "--table", table]);
    bench.udm.ok(&["resume", "vol"]);
    assert_eq!(bench.blocks()[0], 512);
    let data = pattern(4, 32 << 20);
    bench.fill(&data);
    assert!(read_export(&bench.udm, &bench.uri) == data);
    bench.udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..32 << 20] == data);
}

#[test]
fn clients_do_not_notice() {
    let bench = Bench::new();
    bench.create(16, 32, "writeback");
    let (mut grown, mut refused) = (0, 0);
    // fio may end before the commands get a processor.
    while grown <= 2 {
        assert!(refused < 1000, "{grown} changes, {refused} refused");
        change_under_fio(&bench, &mut grown, &mut refused);
    }
    let shown = read_export(&bench.udm, &bench.uri);
    bench.udm.ok(&["remove", "vol", "--drain"]);
    assert!(std::fs::read(bench.udm.path("slow.img")).unwrap()[..shown.len()] == shown);
    bench.udm.ok(&["cache", "check", "hot.img"]);
}

/// Changes the sizes while fio writes and verifies; counts the changes, and those refused.
fn change_under_fio(bench: &Bench, grown: &mut u32, refused: &mut u32) {
    let uri = for_clients(&bench.uri);
    let mut fio = std::process::Command::new("fio")
        .args(["--name=change", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--size=24M"])
        .args(["--iodepth=8", "--verify=crc32c", "--verify_backlog=256", "--verify_fatal=1"])
        .args(["--loops=4", "--fsync=64", "--output-format=terse", &format!("--uri={uri}")])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let sizes = [(32, 32), (12, 24), (24, 64), (8, 24), (30, 48), (16, 24)];
    for (cache, origin) in sizes.into_iter().cycle().take(60) {
        if fio.try_wait().unwrap().is_some() {
            break;
        }
        bench.load(cache, origin, if *grown % 3 == 2 { "writethrough" } else { "writeback" });
        let outcome = bench.udm.run(&["resume", "vol"]);
        match outcome.code {
            0 => *grown += 1,
            _ => {
                assert!(outcome.err.contains("is dirty"), "{outcome:?}");
                *refused += 1;
                bench.udm.run(&["drain", "vol"]);
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    wait_until("fio has ended", || fio.try_wait().unwrap().is_some());
    let output = fio.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !said.contains("verify"), "{said}");
}
