//! `udm-bench`: every study runs, its JSON has its fields, and the report is well-formed, complete
//! and self-contained. `make bench` checks the report in a browser.

#![allow(clippy::unwrap_used)]

#[path = "../../cli/tests/common/mod.rs"]
mod common;
#[path = "bench/paths.rs"]
mod paths;

use std::fs;

use common::Udm;
use roxmltree::{Document, Node, ParsingOptions};
use serde_json::Value;

/// The program that these tests run.
const PROGRAM: &str = env!("CARGO_BIN_EXE_udm-bench");

/// The studies that `all` stands for.
const STUDIES: [&str; 17] = [
    "copy",
    "randwrite",
    "latency",
    "steady",
    "scaling",
    "write",
    "nbd",
    "exports",
    "writeback",
    "recovery",
    "footprint",
    "writecache",
    "pagecache",
    "iomodes",
    "hitratio",
    "adapt",
    "dmcache",
];

/// As little of each measure as there can be.
const TINY: [&str; 11] = [
    "--small",
    "--repeats",
    "1",
    "--size",
    "64m",
    "--io-size",
    "1m",
    "--runtime",
    "0.03",
    "--cache-size",
    "96m",
];

fn check_table(study: &str, table: &Value) {
    let columns = table["columns"].as_array().unwrap();
    assert!(!columns.is_empty(), "{study}: {table}");
    assert!(columns.iter().all(|column| column["name"].is_string() && column["unit"].is_string()));
    let rows = table["rows"].as_array().unwrap();
    assert!(!rows.is_empty(), "{study}: a table without rows");
    for row in rows {
        let values = row["values"].as_array().unwrap();
        assert_eq!(values.len(), columns.len(), "{study}: {row}");
        assert!(values.iter().any(Value::is_f64), "{study}: no value in {row}");
        assert!(values.iter().filter_map(Value::as_f64).all(|value| value >= 0.0), "{row}");
    }
}

fn check_study(page: &Value) {
    let machine = &page["machine"];
    assert!(machine["cpu"].is_string() && machine["processors"].as_u64().unwrap() > 0);
    assert!(machine["date"].as_str().unwrap().starts_with("20"), "{machine}");
    let study = &page["study"];
    let name = study["name"].as_str().unwrap();
    assert!(!study["title"].as_str().unwrap().is_empty(), "{name}");
    assert!(!study["about"].as_str().unwrap().is_empty(), "{name}");
    assert!(study["facts"].as_array().unwrap().iter().any(|fact| fact[0] == "took"), "{name}");
    let noise = &study["noise"];
    assert!(noise["is_quiet"].is_boolean() && noise["steal_percent"].is_f64(), "{name}: {noise}");
    let tables = study["tables"].as_array().unwrap();
    assert!(!tables.is_empty(), "{name}: no tables");
    tables.iter().for_each(|table| check_table(name, table));
    for claim in study["claims"].as_array().unwrap() {
        // Sleeping threads are not woken, samples of a short run may miss the pacer, or all
        // unwritten pages, and a short run may have a moment without requests, or no whole one.
        // These values may be zero, and all others are positive.
        let what = claim["what"].as_str().unwrap();
        let nothings = [
            "sleeps per second",
            "nanoseconds of the pacer",
            "unwritten / (window + 1 MiB)",
            " ms / mean",
        ];
        let may_be_nothing = nothings.iter().any(|nothing| what.ends_with(nothing));
        let median = claim["median"].as_f64().unwrap_or_else(|| panic!("{name}: {claim}"));
        assert!(median > 0.0 || (median == 0.0 && may_be_nothing), "{name}: {claim}");
        assert!(claim["low"].as_f64() <= claim["high"].as_f64(), "{name}: {claim}");
    }
    let plots = study["plots"].as_array().unwrap();
    assert!(!plots.is_empty(), "{name}: no plots");
    for plot in plots {
        for series in plot["series"].as_array().unwrap() {
            let points = series["points"].as_array().unwrap();
            assert!(!points.is_empty(), "{name}: {}: {}", plot["title"], series["name"]);
        }
    }
}

/// Attaching is measured on one thread and on all.
fn check_recovery(pages: &[Value]) {
    let page = pages.iter().find(|page| page["study"]["name"] == "recovery").unwrap();
    let claims = page["study"]["claims"].as_array().unwrap();
    for threads in ["one thread", "all threads"] {
        let what = format!("million keys per second, {threads}, largest log");
        assert!(claims.iter().any(|claim| claim["what"] == what.as_str()), "{what}: {claims:?}");
        let columns = page["study"]["tables"][0]["columns"].as_array().unwrap();
        let name = format!("keys per second, {threads}");
        assert!(columns.iter().any(|column| column["name"] == name.as_str()), "{columns:?}");
    }
}

fn study<'a>(pages: &'a [Value], name: &str) -> &'a Value {
    let page = pages.iter().find(|page| page["study"]["name"] == name).unwrap();
    &page["study"]
}

fn claim_of(study: &Value, what: &str) -> f64 {
    let claims = study["claims"].as_array().unwrap();
    let found = claims.iter().find(|claim| claim["what"].as_str().unwrap().trim() == what);
    found.unwrap_or_else(|| panic!("{what}: {claims:?}"))["median"].as_f64().unwrap()
}

/// The steady state is shown over time, with every burst of every repeat.
fn check_steady(pages: &[Value]) {
    let study = study(pages, "steady");
    let table = &study["tables"][0];
    let columns: Vec<&str> = table["columns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["name"].as_str().unwrap())
        .collect();
    for name in ["IOPS", "p99.9", "p99.99", "worst", "CPU, clients", "background"] {
        assert!(columns.contains(&name), "{columns:?}");
    }
    let rows = table["rows"].as_array().unwrap();
    let named = |part: &str| {
        rows.iter().filter(|row| row["name"].as_str().unwrap().ends_with(part)).count()
    };
    assert_eq!((named("empty"), named("full")), (1, 3), "{rows:?}");
    assert!(named("fills") >= 7, "the cache is filled three times: {rows:?}");
    let plots = study["plots"].as_array().unwrap();
    let has =
        |start: &str| plots.iter().any(|plot| plot["title"].as_str().unwrap().starts_with(start));
    assert!(has("Requests per second in bursts") && has("Requests per second without pause"));
    let claims = study["claims"].as_array().unwrap();
    let promised = |part: &str| {
        claims.iter().any(|claim| {
            claim["what"].as_str().unwrap().contains(part) && !claim["promise"].is_null()
        })
    };
    for part in ["full of clean data / empty", "p99.9 / p50", "longest request", "first job"] {
        assert!(promised(part), "{part}: {claims:?}");
    }
}

/// Processor time is reported, of a client and in all.
fn check_costs(pages: &[Value]) {
    let write = study(pages, "write");
    for name in ["rewrite", "FUA rewrite"] {
        let what = format!("processor time of a {name}, in all / bare copy");
        assert!(claim_of(write, &what) > 0.0);
    }
    assert!(claim_of(study(pages, "nbd"), "CPU of the server for a request, microseconds") > 0.0);
}

fn with_class<'a>(node: Node<'a, 'a>, class: &'a str) -> impl Iterator<Item = Node<'a, 'a>> {
    node.descendants().filter(move |node| node.attribute("class") == Some(class))
}

/// Each plot of the data is drawn, and the report loads no external resources.
fn check_report(text: &str, pages: &[Value]) {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).unwrap();
    for page in pages {
        let study = &page["study"];
        let name = study["name"].as_str().unwrap();
        let section = document
            .descendants()
            .find(|node| {
                node.has_tag_name(("http://www.w3.org/1999/xhtml", "section"))
                    && node.attribute("id") == Some(name)
            })
            .unwrap_or_else(|| panic!("no page for {name}"));
        let flames = study["flames"].as_array().map_or(0, Vec::len);
        assert_eq!(with_class(section, "flame").count(), flames, "{name}");
        let plots = study["plots"].as_array().unwrap();
        let drawn: Vec<Node<'_, '_>> = with_class(section, "plot").collect();
        assert_eq!(drawn.len(), plots.len(), "{name}");
        for (plot, svg) in plots.iter().zip(drawn) {
            assert_eq!(svg.attribute("aria-label"), plot["title"].as_str());
            let series = plot["series"].as_array().unwrap();
            let points = |one: &Value| one["points"].as_array().unwrap().len();
            let expected = match plot["kind"].as_str().unwrap() {
                "bars" => series.iter().map(points).sum(),
                _ => series.len(),
            };
            assert_eq!(with_class(svg, "series").count(), expected, "{name}: {}", plot["title"]);
        }
    }
    let rungs = with_class(document.root(), "rung").count();
    let is_on_ladder = |name: &str| pages.iter().any(|page| page["study"]["name"] == name);
    let has_ladder = ["write", "randwrite", "exports", "iomodes", "pagecache"].map(is_on_ladder);
    assert_eq!(rungs > 0, has_ladder.contains(&true), "{rungs} rungs");
    for node in document.descendants() {
        for attribute in node.attributes().filter(|one| ["src", "href"].contains(&one.name())) {
            let value = attribute.value();
            assert!(value.starts_with('#') || value.starts_with("data:"), "loads {value}");
        }
    }
    assert!(!text.contains("@import") && !text.contains("url("));
}

#[test]
#[ignore = "a minute and a half of studies: `make prove`"]
fn every_study_runs_and_leaves_its_results() {
    let udm = Udm::new();
    let scratch = udm.path("scratch");
    fs::create_dir(&scratch).unwrap();
    let words = ["all", "--path", "scratch", "--report", "out/report.html"];
    let files = ["--json=results.json", "--markdown", "summary.md", "--numbers", "numbers.json"];
    let text = udm.ok(&[&words[..], &files, &TINY].concat());
    let json = fs::read_to_string(udm.path("results.json")).unwrap();
    let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
    let names: Vec<&str> =
        pages.iter().map(|page| page["study"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, STUDIES);
    for page in &pages {
        check_study(page);
        let name = page["study"]["name"].as_str().unwrap();
        assert!(text.contains(&format!("== {name}: ")), "{name} was not printed");
    }
    check_recovery(&pages);
    check_steady(&pages);
    check_costs(&pages);
    // The written results can be shown again, and the main numbers are the same.
    let again = udm.ok(&["--from", "results.json", "--markdown", "again.md"]);
    assert!(again.contains("== steady: "), "{again}");
    udm.ok(&["--from", "numbers.json", "--markdown", "numbers.md"]);
    let read = |name: &str| fs::read_to_string(udm.path(name)).unwrap();
    assert_eq!(read("summary.md"), read("again.md"));
    assert_eq!(read("summary.md"), read("numbers.md"));
    assert!(text.contains("published for the kernel's dm-pcache"));
    assert_eq!(text.matches("The machine was ").count(), STUDIES.len());
    check_report(&fs::read_to_string(udm.path("out/report.html")).unwrap(), &pages);
    let summary = fs::read_to_string(udm.path("summary.md")).unwrap();
    assert!(summary.contains("| study | what | measured | promised |"), "{summary}");
    assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0, "something was left behind");
    // The study of copies was remembered.
    assert!(fs::read_to_string(udm.path("state/copies")).unwrap().contains("4096="));
}

#[test]
#[ignore = "studies take their time: `make prove`"]
fn the_modes_of_io_are_compared_beside_a_published_study() {
    let udm = Udm::new();
    fs::create_dir(udm.path("scratch")).unwrap();
    let words = ["iomodes", "--path", "scratch", "--json=out.json"];
    udm.ok(&[&words[..], &["--report", "report.html"], &TINY].concat());
    let json = fs::read_to_string(udm.path("out.json")).unwrap();
    let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
    check_study(&pages[0]);
    check_report(&fs::read_to_string(udm.path("report.html")).unwrap(), &pages);
    let tables = study(&pages, "iomodes")["tables"].as_array().unwrap();
    let table = |start: &str| {
        let is_it = |table: &&Value| table["title"].as_str().unwrap().starts_with(start);
        tables.iter().find(is_it).unwrap_or_else(|| panic!("no table {start}"))
    };
    let rows = |start: &str| -> Vec<String> {
        let rows = table(start)["rows"].as_array().unwrap();
        rows.iter().map(|row| row["name"].as_str().unwrap().to_owned()).collect()
    };
    // In the published order; a file system may not know dontcache.
    for start in ["Single client, sequential write", "A: four", "C: a bulk", "D: a bulk"] {
        let mut names = rows(start);
        names.retain(|name| name != "dontcache");
        assert_eq!(names, ["buffered", "direct", "lazy"], "{start}");
    }
    assert!(rows("E: a writer").contains(&"lazy, buffered".to_owned()));
    assert_eq!(rows("Footprint").len(), 5);
    let single = table("Single client, sequential write");
    let place = |name: &str| {
        let mut columns = single["columns"].as_array().unwrap().iter();
        columns.position(|column| column["name"] == name).unwrap()
    };
    let buffered = &single["rows"][0]["values"];
    assert_eq!(buffered[place("published MB/s")].as_f64(), Some(575.0));
    if let Some(bytes) = buffered[place("disk's write")].as_f64() {
        assert!((4096.0..16e6).contains(&bytes), "a write of the disk has {bytes} bytes");
    }
    if std::process::Command::new("fio").arg("--version").output().is_ok() {
        // Two rows of each of the eight tables.
        assert_eq!(rows("The same loads, by fio").len(), 16);
    }

    // The report has every plot's numbers as CSV; and two runs can be compared.
    let report = fs::read_to_string(udm.path("report.html")).unwrap();
    let plots = study(&pages, "iomodes")["plots"].as_array().unwrap().len();
    assert_eq!(report.matches("href=\"data:text/csv").count(), plots + 1, "and the ladder's");
    let text = udm.ok(&["compare", "out.json", "report.html"]);
    assert!(text.contains("Single client, random read, direct"), "{text}");
    assert!(text.lines().any(|line| line.ends_with(" 1.00x")), "{text}");
    let pages = udm.ok(&["compare", "out.json", "out.json", "--json"]);
    let pages: Vec<Value> = serde_json::from_str(&pages).unwrap();
    check_table("compare", &pages[0]["study"]["tables"][0]);
    assert!(udm.refused(&["compare", "out.json", "nothing"]).contains("nothing"));
    assert_eq!(fs::read_dir(udm.path("scratch")).unwrap().count(), 0, "something was left behind");
}

#[test]
#[ignore = "studies take their time: `make prove`"]
fn the_ways_to_a_device_are_compared() {
    let udm = Udm::new();
    let words = [&["exports", "--json=out.json", "--report", "report.html"][..], &TINY];
    udm.ok(&words.concat());
    let json = fs::read_to_string(udm.path("out.json")).unwrap();
    let pages: Vec<Value> = serde_json::from_str(&json).unwrap();
    check_study(&pages[0]);
    check_report(&fs::read_to_string(udm.path("report.html")).unwrap(), &pages);
    let exports = study(&pages, "exports");
    let notes = exports["notes"].to_string();
    let has_engine = !notes.contains("SKIPPED: the rows of fio's engine");
    assert!(has_engine || notes.contains("`make fio-engine` builds it"), "{notes}");
    assert_eq!(exports["tables"].as_array().unwrap().len(), 6 + usize::from(has_engine));
    assert!(claim_of(exports, "read 1, no polling: p50 / that of bare wake-ups") > 0.0);
    for jobs in ["1 job", "8 jobs"].iter().filter(|_| has_engine) {
        assert!(claim_of(exports, &format!("fio's engine, {jobs}: requests/s")) > 0.0);
    }
    for claim in ["write 1, both poll: p50 / in process", "read 32, both poll: requests/s"] {
        assert!(claim_of(exports, claim) > 0.0);
    }
    assert!(claim_of(exports, "vhost-user, poll=never, silent: sleeps per second") < 1.0);
}

#[test]
fn what_exists_is_not_overwritten_unasked() {
    let udm = Udm::new();
    let precious = udm.path("precious");
    fs::write(&precious, vec![7; 1 << 20]).unwrap();
    for option in ["--path", "--cache"] {
        let words = [&["randwrite", option, "precious"][..], &TINY].concat();
        let outcome = udm.run(&words);
        assert_eq!(outcome.code, 1);
        assert!(outcome.err.contains("precious exists"), "{outcome:?}");
        assert!(outcome.err.contains("--overwrite"), "{outcome:?}");
    }
    assert_eq!(fs::read(&precious).unwrap(), vec![7; 1 << 20]);
    // A text that is not a report is refused and not overwritten.
    fs::write(udm.path("letter"), "dear").unwrap();
    let outcome = udm.run(&[&["recovery", "--report", "letter"][..], &TINY].concat());
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert_eq!(fs::read_to_string(udm.path("letter")).unwrap(), "dear");
}

#[test]
fn a_load_in_fios_terms_is_taken() {
    let udm = Udm::new();
    let load = ["--rw", "randrw", "--bs", "8k", "--iodepth", "4", "--numjobs", "2"];
    let tail = ["--path", "made.img", "--rwmixread", "70", "--randseed", "9", "--json"];
    let out = udm.ok(&[&["job"][..], &load, &tail, &TINY].concat());
    let pages: Value = serde_json::from_str(&out).unwrap();
    let facts = pages[0]["study"]["facts"].to_string();
    let expected = "rw=randrw bs=8KiB iodepth=4 numjobs=2 size=64MiB io_size=1MiB";
    assert!(facts.contains(expected), "{facts}");
    assert!(facts.contains("randseed=9 rwmixread=70"), "{facts}");
    assert!(!udm.path("made.img").exists(), "what was made is removed");
}

#[test]
fn hit_ratios_of_several_traces_are_compared_in_one_table() {
    let udm = Udm::new();
    for (name, step) in [("one", 3), ("two", 7)] {
        let lines: Vec<String> =
            (0..6000_u64).map(|nth| format!("{} 1", nth * nth * step % 4001)).collect();
        fs::write(udm.path(&format!("{name}.lis")), lines.join("\n")).unwrap();
    }
    let words = ["hitratio", "--small", "--trace", "one.lis", "--trace", "two.lis"];
    udm.ok(&[&words[..], &["--markdown", "summary.md"]].concat());
    let summary = fs::read_to_string(udm.path("summary.md")).unwrap();
    assert!(summary.contains("Hit ratio of the engine minus the best"), "{summary}");
    for trace in ["one", "two"] {
        assert!(summary.contains(&format!("\n| {trace} | ")), "{summary}");
        assert!(summary.contains(&format!("| hitratio | {trace}: udm's hit ratio")), "{summary}");
    }
    // The result does not depend on the machine, or on the order of calculation.
    udm.ok(&[&words[..], &["--markdown", "again.md"]].concat());
    let table = |text: &str| text.split_once("\n| Hit").map(|(_, rest)| rest.to_owned()).unwrap();
    let again = fs::read_to_string(udm.path("again.md")).unwrap();
    let first = |text: &str| table(text).split("\n\n").next().unwrap().to_owned();
    assert_eq!(first(&summary), first(&again));
}

#[test]
#[ignore = "studies take their time: `make prove`"]
fn a_study_measures_the_target_it_is_told() {
    let udm = Udm::new();
    // Each study once, and in both modes what differs in them.
    let memory =
        ("writecache-p", "/dev/shm/", &["recovery", "footprint", "randwrite", "steady"][..]);
    let disk = ("writecache-s", "scratch/", &["recovery", "footprint", "latency", "writeback"][..]);
    for (target, cache, studies) in [memory, disk] {
        fs::create_dir_all(udm.path("scratch")).unwrap();
        let words = ["--path", "scratch", "--json"];
        // Time enough for fio to flush a disk that others use too.
        let load = ["--small", "--repeats", "1", "--size", "64m", "--io-size", "1m"];
        let load = [&load[..], &["--cache-size", "96m"]].concat();
        let target_words = ["--target", target, "--runtime", "1"];
        let out = udm.ok(&[studies, &words, &target_words, &load].concat());
        let pages: Vec<Value> = serde_json::from_str(&out).unwrap();
        assert_eq!(pages.len(), studies.len());
        for page in &pages {
            check_study(page);
            let facts = page["study"]["facts"].as_array().unwrap();
            let fact = |name: &str| {
                let found = facts.iter().find(|fact| fact[0] == name).unwrap();
                found[1].as_str().unwrap().to_owned()
            };
            assert_eq!(fact("target"), target);
            if page["study"]["name"] != "footprint" {
                assert!(fact("cache").contains(cache), "{facts:?}");
            }
        }
        let claim = |study: &str, what: &str| {
            let page = pages.iter().find(|page| page["study"]["name"] == study).unwrap();
            let claims = page["study"]["claims"].as_array().unwrap();
            let found = claims.iter().find(|claim| claim["what"].as_str().unwrap() == what);
            found.unwrap_or_else(|| panic!("{what}: {claims:?}"))["median"].as_f64().unwrap()
        };
        if target == "writecache-s" {
            assert!(claim("writeback", "write-back / fio") > 0.0);
        }
        assert!(claim("recovery", "million entries per second, largest cache, full") > 0.0);
        // These do not depend on who else uses the machine.
        let memory = claim("footprint", "bytes of memory for each block more");
        assert!((20.0..=24.0).contains(&memory), "{memory} bytes for a block");
        let stored = claim("footprint", "bytes stored per byte, 4 KiB writes");
        assert!((1.0..1.03).contains(&stored), "{stored} bytes stored for a byte");
        assert_eq!(fs::read_dir(udm.path("scratch")).unwrap().count(), 0, "something was left");
    }
    let outcome = udm.run(&["scaling", "--target", "writecache-p"]);
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.err.contains("scaling: it takes no --target, as randwrite,"), "{outcome:?}");
}
