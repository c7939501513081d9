//! An orderly end makes all written data durable, for every target: after exit code 0, a power cut
//! loses no data. If a device fails the flush, the command reports it.

use udm::disk::{Effect, Fault};
use udm::prng::Prng;
use udm::{Op, Status};

use crate::common::{Udm, client, for_clients, is_gone, pattern, signal, text, wait_until};
use crate::disks::Disks;

const MIB: u64 = 1 << 20;
const SECTORS: u64 = MIB / 512;

/// Table lines of 1 MiB over the disk ORIGIN, which has all data after an orderly end. FAST and
/// META are files.
const LINES: [&str; 5] = [
    "linear ORIGIN 0",
    "delay ORIGIN 0 1",
    "flakey ORIGIN 0 100 1",
    "cache META FAST ORIGIN 64 1 writethrough smq 0",
    "writecache s ORIGIN FAST 4096 1 cleaner",
];

/// Each way to an end after which an origin must have everything. The commands, of which the last
/// one may be a signal to the server.
const ENDS: [&[&str]; 6] = [
    &["remove vol"],
    &["remove vol --drain"],
    &["remove vol --drain --force"],
    &["suspend vol", "remove vol"],
    &["TERM"],
    &["drain vol", "KILL"],
];

struct Bench {
    disks: Disks,
    udm: Udm,
    table: String,
    origins: usize,
}

impl Bench {
    /// A device with these lines; `None` where disks cannot be mounted.
    fn new(lines: &[&str]) -> Option<Bench> {
        let udm = Udm::new();
        let sizes: Vec<(String, u64)> =
            (0..lines.len()).map(|nth| (format!("origin{nth}"), MIB)).collect();
        let disks = Disks::mount(&udm.path("disks"), &sizes, 1)?;
        let line = |(nth, line): (usize, &&str)| {
            let fast = udm.file(&format!("fast{nth}"), MIB);
            let meta = udm.file(&format!("meta{nth}"), MIB);
            let line = line.replace("FAST", text(&fast)).replace("META", text(&meta));
            let line = line.replace("ORIGIN", text(&disks.path(&sizes[nth].0)));
            format!("{} {SECTORS} {line}\n", nth as u64 * SECTORS)
        };
        let table = lines.iter().enumerate().map(line).collect();
        let bench = Bench { disks, udm, table, origins: lines.len() };
        bench.create();
        Some(bench)
    }

    fn create(&self) {
        let uri = self.udm.uri("vol.sock");
        self.udm.ok(&["create", "vol", "--table", &self.table, "--export", &uri]);
    }

    /// Writes all of it; the client does not flush.
    fn write(&self, seed: u64) -> Vec<u8> {
        let bytes = pattern(seed, self.origins * MIB as usize);
        let file = self.udm.path("to-write");
        std::fs::write(&file, &bytes).unwrap();
        client("nbdcopy", &[text(&file), &for_clients(&self.udm.uri("vol.sock"))]);
        bytes
    }

    fn end(&self, end: &[&str]) {
        let pid = self.udm.pid("vol");
        for words in end {
            match *words {
                "TERM" | "KILL" => signal(pid, words),
                words => drop(self.udm.ok(&words.split(' ').collect::<Vec<_>>())),
            }
        }
        wait_until("the server is gone", || is_gone(pid));
    }

    /// The data of the origins after a power cut.
    fn after_a_power_cut(&self, seed: u64) -> Vec<u8> {
        self.disks.cut_power(&mut Prng::new(seed));
        let origin = |nth| std::fs::read(self.disks.path(&format!("origin{nth}"))).unwrap();
        (0..self.origins).flat_map(origin).collect()
    }
}

#[test]
fn exit_code_0_means_that_a_power_cut_takes_nothing() {
    let alone = LINES.iter().map(std::slice::from_ref);
    for lines in alone.chain([&LINES[..]]) {
        let Some(bench) = Bench::new(lines) else { return };
        for (seed, end) in (1..).zip(ENDS) {
            if seed > 1 {
                bench.create();
            }
            let wanted = bench.write(seed);
            bench.end(end);
            assert!(bench.after_a_power_cut(seed) == wanted, "{lines:?} after {end:?}");
        }
    }
}

#[test]
fn an_end_that_is_not_durable_says_so() {
    for (nth, line) in LINES.iter().enumerate() {
        // The first line's device works.
        let Some(bench) = Bench::new(&["linear ORIGIN 0", line]) else { return };
        let refuse = || {
            let flushes = Fault::new(Effect::Fail(Status::Io)).of(Op::Flush);
            bench.disks.inject("origin1", flushes);
        };
        let mut seed = nth as u64 * 100;
        for words in [&["remove", "vol"][..], &["remove", "vol", "--drain"], &["drain", "vol"]] {
            seed += 1;
            bench.write(seed);
            refuse();
            let line_of_error = bench.udm.refused(words);
            let says = ["flush", "origin fails"];
            assert!(says.iter().any(|word| line_of_error.contains(word)), "{line_of_error}");
            bench.disks.heal();
            // The device still serves: the next flush may report the error, later ones succeed.
            let _ = bench.udm.run(&["drain", "vol"]);
            bench.write(seed);
            bench.udm.ok(&["drain", "vol"]);
        }
        refuse();
        bench.write(seed + 1);
        let line_of_error = bench.udm.refused(&["flush", "vol"]);
        let is_named = line_of_error.contains(": the last error of its origin: flush: ");
        // Targets without a cache do not count errors.
        let is_cached = line.starts_with("writecache") || line.starts_with("cache");
        assert!(is_named || !is_cached, "{line}: {line_of_error}");
        assert!(!line_of_error.contains("linear at 0: "), "{line_of_error}");
        let pid = bench.udm.pid("vol");
        signal(pid, "TERM");
        wait_until("the server is gone", || is_gone(pid));
        let log = std::fs::read_to_string(bench.udm.runtime().join("vol.log")).unwrap();
        assert!(log.contains("failed a flush"), "{line}: {log}");
        bench.disks.heal();
    }
}
