//! `udm-bench pagecache`, flamegraphs, and caches over a file in each mode: the measurements, the
//! files that are not touched without permission, and the cleanup of a killed run.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::common::{self, Udm};
use crate::{PROGRAM, TINY, check_report, check_study, check_table, claim_of, study};

/// Bytes of a loop device for the study of the page cache: the minimum.
const DEVICE_BYTES: u64 = 64 << 20;

/// The kernel's counter Buffers is common to all tests.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn pages_of_a_block_device_are_buffers_and_those_of_a_file_are_cached() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    let words = ["pagecache", "--path", "scratch", "--json=out.json"];
    udm.ok(&[&words[..], &["--report", "report.html"], &TINY].concat());
    let json = fs::read_to_string(udm.path("out.json")).unwrap();
    let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
    check_study(&pages[0]);
    check_report(&fs::read_to_string(udm.path("report.html")).unwrap(), &pages);
    let study = study(&pages, "pagecache");
    let mut places = vec![("file", "Cached", "Buffers")];
    if study["notes"].to_string().contains("No block device was measured") {
        eprintln!("SKIPPED: no block device: {}", study["notes"]);
    } else {
        places.push(("block device", "Buffers", "Cached"));
    }
    for (place, counted, other) in &places {
        // The study's target is for a quiet machine. Here others add to the counters and take from
        // them, but the wrong counter, or the wrong unit, is at least the whole away.
        let part = claim_of(study, &format!("{place}: pages counted in {counted} / dropped"));
        assert!((0.5..2.0).contains(&part), "{place}: {part} of its pages were in {counted}");
        let is_it = |note: &&str| note.starts_with(&format!("The {place}: "));
        let notes = study["notes"].as_array().unwrap().iter().filter_map(Value::as_str);
        let note = notes.into_iter().find(is_it).unwrap();
        let wrong = note.strip_suffix(&format!(" % in {other}.")).unwrap();
        let wrong: f64 = wrong.rsplit_once(' ').unwrap().1.parse().unwrap();
        assert!(wrong < 50.0, "{note}");
        let plots = study["plots"].as_array().unwrap();
        let start = format!("Where pages of a {place} are counted");
        let plot = plots.iter().find(|plot| plot["title"].as_str().unwrap().starts_with(&start));
        assert_eq!(plot.unwrap()["series"].as_array().unwrap().len(), 4);
    }
    let tables = study["tables"].as_array().unwrap();
    let table = |start: &str| {
        let found = tables.iter().find(|one| one["title"].as_str().unwrap().starts_with(start));
        found.unwrap_or_else(|| panic!("no table {start}"))["rows"].as_array().unwrap()
    };
    for load in ["sequential write", "random write", "sequential read", "random read"] {
        let rows = table(&format!("Page cache, {load}"));
        assert_eq!(rows.len(), 4 * places.len(), "{load}");
    }
    assert_eq!(table("Direct over buffered").len(), 4 * places.len());
    assert!(study["facts"].to_string().contains("writers wait at"));
    assert_eq!(fs::read_dir(udm.path("scratch")).unwrap().count(), 0, "something was left behind");
}

#[test]
fn a_device_is_only_read_unless_it_may_be_destroyed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    let file = udm.file("precious", DEVICE_BYTES);
    let bytes = common::pattern(5, DEVICE_BYTES as usize);
    fs::write(&file, &bytes).unwrap();
    let words = |device: &str| -> Vec<String> {
        let words = ["pagecache", "--path", "scratch", "--device", device];
        words.into_iter().chain(TINY).map(str::to_owned).collect()
    };
    let run = |device: &str, more: &[&str]| {
        let words = words(device);
        let words: Vec<&str> =
            words.iter().map(String::as_str).chain(more.iter().copied()).collect();
        udm.run(&words)
    };
    let outcome = run("precious", &["--destroy"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.err.contains("precious is not a block device"), "{outcome:?}");
    assert_eq!(run("missing", &[]).code, 1);
    assert_eq!(udm.run(&["pagecache", "--destroy"]).code, 2, "of what?");
    let Some(device) = common::Loop::attach(&file, &[]) else { return };
    let device = common::text(&device.0);
    let outcome = run(device, &[]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(outcome.out.contains("The device was only read"), "{outcome:?}");
    assert!(outcome.out.contains("block device, buffered, warm"), "{outcome:?}");
    assert!(fs::read(&file).unwrap() == bytes, "it was written to, unasked");
    let outcome = run(device, &["--destroy"]);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(!outcome.out.contains("The device was only read"), "{outcome:?}");
    assert!(fs::read(&file).unwrap() != bytes, "writes were asked for");
}

#[test]
fn a_run_that_is_killed_puts_everything_back() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    let ratio = || fs::read_to_string("/proc/sys/vm/dirty_ratio").unwrap().trim().to_owned();
    let before: u32 = ratio().parse().unwrap();
    let other = (before % 90 + 1).to_string();
    let words = ["pagecache", "--path", "scratch", "--repeats", "50"];
    let words = [&words[..], &["--dirty-ratio", &other]].concat();
    let is_root = rustix::process::geteuid().is_root();
    if before == 0 || !is_root {
        eprintln!("SKIPPED: only root can set the ratio, and here it is {before}");
        if !is_root {
            assert!(udm.refused(&words).contains("--dirty-ratio is for root"));
        }
        return;
    }
    let files = || fs::read_dir(udm.path("scratch")).unwrap().count();
    let loops = || {
        let devices = fs::read_dir("/sys/block").unwrap().flatten();
        let backing = |device: fs::DirEntry| {
            fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default()
        };
        let ours = udm.path("scratch").display().to_string();
        devices.map(backing).filter(|file| file.starts_with(&ours)).count()
    };
    for signal in ["TERM", "KILL", "INT"] {
        // A shell's background job ignores SIGINT, and so does all that it starts.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").arg(PROGRAM).args(&words);
        let mut child = udm.at_home(command).stdout(Stdio::null()).spawn().unwrap();
        common::wait_until("the ratio is set", || ratio() == other);
        common::wait_until("there are files", || files() > 0);
        common::wait_until("there is a block device", || loops() > 0);
        common::signal(child.id().into(), signal);
        assert!(!child.wait().unwrap().success());
        common::wait_until("the ratio is put back", || ratio() == before.to_string());
        common::wait_until("the files are gone", || files() == 0);
        common::wait_until("the block device is gone", || loops() == 0);
    }
}

#[test]
#[ignore = "studies take their time: `make prove`"]
fn flamegraphs_show_where_the_time_of_each_case_went() {
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    let words = ["pagecache", "--path", "scratch", "--small", "--repeats", "1", "--flame"];
    udm.ok(&[&words[..], &["--json=out.json", "--report", "report.html"]].concat());
    let json = fs::read_to_string(udm.path("out.json")).unwrap();
    let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
    let report = fs::read_to_string(udm.path("report.html")).unwrap();
    check_report(&report, &pages);
    let study = study(&pages, "pagecache");
    let notes = study["notes"].to_string();
    if notes.contains("No flamegraphs") {
        assert!(notes.contains("kernel.perf_event_paranoid is "), "{notes}");
        return eprintln!("SKIPPED: {notes}");
    }
    let flames = study["flames"].as_array().unwrap();
    let flame = |title: &str| {
        let found = flames.iter().find(|flame| flame["title"] == title);
        found.unwrap_or_else(|| panic!("no picture of {title}"))
    };
    let warm = "sequential read: file, buffered, warm";
    let stacks = flame(warm)["stacks"].to_string();
    // The program's callers, and the kernel's functions on top of them.
    assert!(stacks.contains("udm_bench::load::"), "{stacks}");
    if !notes.contains("is left out") && !notes.contains("hides the names") {
        assert!(stacks.contains("io_uring_enter_[k]"), "{stacks}");
    }
    let cold = "sequential read: file, buffered, cold";
    let both = flame(&format!("{warm}, compared with {cold}: red is more, blue is less"));
    assert!(!both["before"].as_array().unwrap().is_empty());
    assert!(report.contains("sequential-read-file-buffered-warm.folded"));
    udm.ok(&["--from", "out.json", "--numbers", "numbers.json"]);
    let numbers = fs::read_to_string(udm.path("numbers.json")).unwrap();
    assert!(!numbers.contains("flames"), "too much to keep beside documents");
}

#[test]
#[ignore = "studies take their time: `make prove`"]
fn caches_over_a_file_are_compared_by_the_way_to_it() {
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    for (name, io, rows) in [("writeback", "all", 8), ("randwrite", "direct,lazy", 4)] {
        let words = [name, "--io", io, "--path", "scratch", "--json=out.json"];
        udm.ok(&[&words[..], &["--report", "report.html"], &TINY].concat());
        let json = fs::read_to_string(udm.path("out.json")).unwrap();
        let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
        check_study(&pages[0]);
        let study = study(&pages, &format!("{name}-io"));
        let table = &study["tables"][0];
        check_table(name, table);
        // A file system may not know dontcache.
        let missing = 2 * usize::from(study["notes"].to_string().contains("was not measured"));
        let measured = table["rows"].as_array().unwrap();
        assert_eq!(measured.len(), rows - missing, "{table}");
        let row = |name: &str| {
            let found = measured.iter().find(|row| row["name"] == name);
            found.unwrap_or_else(|| panic!("{name}: {table}"))["values"].as_array().unwrap()
        };
        // The largest amount of unwritten data: zero without the page cache, a window with lazy.
        for target in ["pcache", "writecache"] {
            let unwritten = |mode: &str| row(&format!("{target}, {mode}"))[7].as_f64().unwrap();
            assert_eq!(unwritten("direct"), 0.0, "{table}");
            assert!(unwritten("lazy") <= 17.0 * f64::from(1 << 20), "{table}");
            assert!(claim_of(study, &format!("{target}: drain, lazy / direct")) > 0.0);
        }
    }
    assert_eq!(fs::read_dir(udm.path("scratch")).unwrap().count(), 0, "something was left behind");
    let outcome = udm.run(&["latency", "--io", "lazy"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.err.contains("takes no --io, as writeback and randwrite do"), "{outcome:?}");
}
