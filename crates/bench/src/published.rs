//! The generated part of docs/benchmarks.md: one table for each question, then the missed targets,
//! each with its cause. A missed target without an entry in `MISSES` is an error.

use std::fmt::Write;

use anyhow::{Context, Result};

use crate::results::Page;
use crate::results::{Claim, Table};
use crate::studies::DIFFERENCES;

/// A question, and the claims that answer it: the study, and the claim as the study names it.
type Question = (&'static str, &'static [(&'static str, &'static str)]);

const QUESTIONS: [Question; 4] = [
    (
        "How long does a request to a cache take, compared with the copy of its data?",
        &[
            ("write", "write / bare copy, p50, one by one"),
            ("write", "FUA write, p50, microseconds"),
            ("write", "read hit / bare load, p50"),
            ("write", "write, p99.9 / p50, during write-back and collection"),
            ("steady", "2 jobs: rate, full of clean data / empty"),
            ("writecache", "p: write / bare copy"),
        ],
    ),
    (
        "How fast are the exports?",
        &[
            ("nbd", "udm pcache / nbdkit, randread, depth 1"),
            ("nbd", "udm pcache / nbdkit, randread, depth 32"),
            ("exports", "write 1, both poll: p50, microseconds"),
            ("exports", "read 1, both poll: p50, microseconds"),
            ("exports", "write 32, both poll: requests/s"),
            ("exports", "read 32, both poll: requests/s"),
        ],
    ),
    (
        "How close is the target `cache` to its fast device?",
        &[
            ("dmcache", "randread, depth 1: through cache / fast device alone"),
            ("dmcache", "randread, depth 16: through cache / fast device alone"),
            ("dmcache", "randwrite, depth 1: through cache / fast device alone"),
            ("dmcache", "randwrite, depth 16: through cache / fast device alone"),
            ("dmcache", "p99.9 of hits, during write-back / alone"),
            ("adapt", "udm, smq, served, blocks of 256 KiB: bytes until 90 %, in hot sets"),
        ],
    ),
    (
        "How long does a start take, and how much memory does a block need?",
        &[
            ("recovery", "million keys per second, one thread, largest log"),
            ("recovery", "milliseconds until the first read, small clean cache"),
            ("dmcache", "million blocks opened in a second"),
            ("footprint", "bytes of memory per 4 KiB block"),
        ],
    ),
];

/// Tables that are shown with some of their columns only: the study, the title, and the question.
const RATES: [(&str, &str, &str); 2] = [
    ("randwrite", "fio over NBD", "How much faster are random writes of 4 KiB over NBD?"),
    ("randwrite", "in process", "And in the client's own process, with `libudm`?"),
];
const RATE_COLUMNS: [&str; 3] = ["IOPS", "p50", "p99.9"];

/// Missed targets with one cause: the study, a part of the claims' names, the name of the row, and
/// the cause.
type Miss = (&'static str, &'static str, &'static str, &'static str);

const MISSES: [Miss; 23] = [
    (
        "randwrite",
        "of the backing's rate",
        "p99.9 at equal rates / backing's",
        "fio spins between requests: with server and write-back, three threads on two processors",
    ),
    ("steady", "8 jobs: p99.9 / p50", "8 jobs: p99.9 / p50", "unknown; repeats differ widely"),
    (
        "steady",
        "8 jobs: requests of the first",
        "8 jobs: first / last job",
        "unknown; repeats differ widely",
    ),
    (
        "write",
        "bare copy, p50, batches",
        "write, FUA write / copy",
        "a write also updates index and key set; FUA adds a record and a fence",
    ),
    (
        "write",
        "two threads / one",
        "write, FUA write: 2 threads / 1",
        "unknown; read hits reach their target on the same processors",
    ),
    (
        "write",
        "processor time of a",
        "write, FUA write: CPU / copy",
        "background work counts as well, and each FUA write stores a record",
    ),
    (
        "nbd",
        "nbdkit, randwrite, depth 32",
        "pcache on a file / nbdkit in memory, depth 32",
        "at this depth fio is busier than either server",
    ),
    (
        "nbd",
        "CPU of the server",
        "server's CPU / nbdkit's",
        "most of it is the export: the empty target `zero` is above the bound as well",
    ),
    (
        "nbd",
        "target zero's",
        "pcache / target `zero`",
        "unknown; repeats lie on both sides of the target",
    ),
    (
        "exports",
        "both poll: p50 / in process",
        "both sides poll: p50 / in process",
        "each request crosses two processors' caches; their share is unknown",
    ),
    (
        "exports",
        "no polling: p50 / NBD's",
        "no polling: p50 / NBD",
        "two wake-ups of halted virtual processors, 25 us each; NBD has one",
    ),
    ("exports", "no polling: CPU", "no polling: CPU / NBD", "it has the same two wake-ups"),
    (
        "exports",
        "requests/s / qemu's null",
        "depth 32 / qemu's null device",
        "the null device copies no data",
    ),
    (
        "exports",
        "poll=auto: requests/s",
        "depth 32, `poll=auto`, requests/s",
        "client and server poll on both processors; none is left for write-back",
    ),
    (
        "exports",
        "32, NBD: CPU",
        "NBD: server's CPU / nbdkit's",
        "most of it is the export, as in the study `nbd`",
    ),
    (
        "exports",
        "fio's engine",
        "fio's engine, requests/s",
        "both processors are busy; the host gives a VM memory at 10 us a page",
    ),
    ("writecache", "p: two threads", "`p`: 2 threads / 1", "unknown; repeats differ widely"),
    (
        "writecache",
        "s: time of write and flush",
        "`s`: write and flush / fio",
        "new blocks need two flushes, and fio one; cached blocks: unknown",
    ),
    (
        "iomodes",
        "lazy, random write",
        "`lazy` / buffered: rate, p99.9",
        "buffered merges pages to writes of 8.3 KiB; 16 MiB of dirty pages have few neighbours",
    ),
    (
        "iomodes",
        "A: four lazy",
        "`lazy` / buffered: 4 writers",
        "repeats spread widely; ten have a median of 1.14",
    ),
    (
        "iomodes",
        "D: lazy",
        "`lazy` / buffered: among 3 readers",
        "readers occupy both processors; a writer that sleeps is scheduled late",
    ),
    (
        "iomodes",
        "nanoseconds of the pacer",
        "pacer, ns for a random write",
        "repeats spread widely; ten have a median of 233",
    ),
    (
        "hitratio",
        "cloudPhysicsIO",
        "hit ratio / best policy",
        "the log keeps overwritten copies until it reuses their segment",
    ),
];

/// The generated part of docs/benchmarks.md for `pages`.
pub fn write(pages: &[Page]) -> Result<String> {
    let machine = &pages.first().context("no studies")?.machine;
    let mut out = format!(
        "Measured on {}, {},\nudm {}, by `make bench`. Numbers are medians of the repeats; of two, \
         the higher.\n",
        machine.sentence(),
        machine.date,
        machine.udm
    );
    for (study, title, question) in RATES {
        let found = table_of(pages, study, title)?;
        let columns = found.columns.iter().enumerate();
        let shown: Vec<usize> = columns
            .filter_map(|(nth, column)| RATE_COLUMNS.contains(&&*column.name).then_some(nth))
            .collect();
        table(&mut out, question, found, &shown);
    }
    let later = pages.iter().filter(|page| page.machine.date != machine.date);
    for Page { machine, study } in later {
        let (date, kernel) = (&machine.date, &machine.kernel);
        let _ = writeln!(out, "\n`{}` was measured on {date}, Linux {kernel}.", study.name);
    }
    for (question, rows) in QUESTIONS {
        let _ = writeln!(out, "\n**{question}**\n\n| study | what | measured | target |");
        out.push_str("|---|---|---:|---:|\n");
        for (study, what) in rows {
            let claim = claim_of(pages, study, what)?;
            let (measured, target) = (claim.measured_median(), target(claim));
            let _ = writeln!(out, "| {study} | {what} | {measured} | {target} |");
        }
    }
    let found = table_of(pages, "hitratio", DIFFERENCES)?;
    let question = "How does the hit ratio of `retention hot` compare with the best of FIFO, LRU, \
                    ARC and\nS3-FIFO, in points, by the cache's share of the trace's blocks?";
    table(&mut out, question, found, &(0..found.columns.len()).collect::<Vec<_>>());
    misses(&mut out, pages)?;
    Ok(out)
}

/// A table below the question that it answers.
fn table(out: &mut String, question: &str, table: &Table, columns: &[usize]) {
    let names: Vec<&str> = columns.iter().map(|nth| table.columns[*nth].name.as_str()).collect();
    let _ = writeln!(out, "\n**{question}**\n\n| | {} |", names.join(" | "));
    let _ = writeln!(out, "|---|{}", "---:|".repeat(names.len()));
    for row in &table.rows {
        let cells: Vec<String> = columns.iter().map(|nth| table.cell(row, *nth)).collect();
        let _ = writeln!(out, "| {} | {} |", row.name, cells.join(" | "));
    }
}

/// The table of the missed targets. Claims with one cause share a row.
fn misses(out: &mut String, pages: &[Page]) -> Result<()> {
    let all = pages.iter().flat_map(|page| &page.study.claims).filter(|one| one.promise.is_some());
    let missed: Vec<(&str, &Claim)> = pages
        .iter()
        .flat_map(|page| page.study.claims.iter().map(|claim| (page.study.name.as_str(), claim)))
        .filter(|(_, claim)| !claim.holds)
        .collect();
    let _ = writeln!(out, "\n## Missed targets\n\n{} of {}.\n", missed.len(), all.count());
    out.push_str("| study | what | measured | target | cause |\n");
    out.push_str("|---|---|---:|---:|---|\n");
    let mut by_cause: [Vec<&Claim>; MISSES.len()] = Default::default();
    for (study, claim) in &missed {
        let is_its = |miss: &Miss| *study == miss.0 && claim.what.contains(miss.1);
        let nth = MISSES.iter().position(is_its).with_context(|| {
            format!("{study}: '{}' is missed: add its cause to published.rs", claim.what.trim())
        })?;
        by_cause[nth].push(claim);
    }
    for (miss, claims) in MISSES.iter().zip(by_cause) {
        let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
        for claim in claims {
            let target = target(claim);
            match rows.iter_mut().find(|(of, _)| *of == target) {
                Some((_, medians)) => medians.push(claim.median),
                None => rows.push((target, vec![claim.median])),
            }
        }
        if rows.is_empty() {
            continue;
        }
        let measured: Vec<String> = rows.iter().map(|(_, medians)| range(medians)).collect();
        let targets: Vec<&str> = rows.iter().map(|(target, _)| target.as_str()).collect();
        let (measured, targets) = (measured.join("; "), targets.join("; "));
        let _ = writeln!(out, "| {} | {} | {measured} | {targets} | {} |", miss.0, miss.2, miss.3);
    }
    Ok(())
}

/// A target in few characters.
fn target(claim: &Claim) -> String {
    claim.promised().replace("at most", "<=").replace("at least", ">=")
}

fn range(medians: &[f64]) -> String {
    let text = |value: f64| crate::unit::Unit::Number.text(value);
    let low = text(medians.iter().copied().fold(f64::INFINITY, f64::min));
    let high = text(medians.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    if low == high { low } else { format!("{low} .. {high}") }
}

fn table_of<'a>(pages: &'a [Page], study: &str, title: &str) -> Result<&'a Table> {
    let of_study = pages.iter().filter(|page| page.study.name == study);
    let mut tables = of_study.flat_map(|page| &page.study.tables);
    let found = tables.find(|table| table.title.starts_with(title));
    found.with_context(|| format!("{study} lacks the table '{title}'"))
}

fn claim_of<'a>(pages: &'a [Page], study: &str, what: &str) -> Result<&'a Claim> {
    let of_study = pages.iter().filter(|page| page.study.name == study);
    let mut claims = of_study.flat_map(|page| &page.study.claims);
    let found = claims.find(|claim| claim.what.trim() == what);
    found.with_context(|| format!("{study} lacks the claim '{what}'"))
}
