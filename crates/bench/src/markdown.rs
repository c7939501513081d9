//! The main numbers as Markdown, for documents that quote a run.

use std::fmt::Write;

use crate::results::Page;
use crate::results::{Claim, Table};
use crate::studies::{DIFFERENCES, EQUAL_RATES};

/// Studies with tables that are quoted, and how the titles of those begin.
const QUOTED: [(&str, &str); 2] = [("randwrite", ""), ("hitratio", DIFFERENCES)];
/// Studies whose ratios are quoted even if they have no target.
const TOLD: [&str; 4] = ["copy", "nbd", "recovery", "scaling"];
/// Facts that are quoted.
const LOAD: &str = "load";
/// The study with the tables of the README.
const FIRST: &str = "randwrite";
/// For each table: the start of its title, the text above it, and the rows (a part of their names)
/// and columns that are shown.
const FIRST_TABLES: [(&str, &str, &str, &[&str]); 2] = [
    ("fio over NBD", "", "", &["IOPS", "p50", "p99", "p99.9", "worst"]),
    (
        EQUAL_RATES,
        "\nAt half of the rate that the backing device alone reached:\n",
        " 50 %",
        &["p50", "p99", "p99.9"],
    ),
];

/// The quoted part of `pages`: small enough to be kept with the documents.
pub fn main_numbers(pages: &[Page]) -> Vec<Page> {
    let slim = |page: &Page| {
        let mut page = page.clone();
        let study = &mut page.study;
        let name = study.name.clone();
        study.facts.retain(|(name, _)| name == LOAD);
        study.tables.retain(|table| is_quoted(&name, table));
        study.claims.retain(|claim| is_told(&name, claim));
        study.plots.clear();
        study.notes.clear();
        study.flames.clear();
        study.repeats.clear();
        page
    };
    pages.iter().map(slim).collect()
}

fn is_quoted(study: &str, table: &Table) -> bool {
    QUOTED.iter().any(|(name, title)| *name == study && table.title.starts_with(title))
}

fn is_told(study: &str, claim: &Claim) -> bool {
    TOLD.contains(&study) || claim.promise.is_some()
}

/// The part for the README: its tables, and whether their study can be trusted.
pub fn first(pages: &[Page]) -> String {
    let mut out = String::new();
    for Page { machine, study } in pages.iter().filter(|page| page.study.name == FIRST) {
        let _ = writeln!(
            out,
            "Measured on {},\n{}, udm {}, by `udm bench {}`:",
            machine.sentence(),
            machine.date,
            machine.udm,
            study.name
        );
        for (title, above, rows, columns) in FIRST_TABLES {
            let found = study.tables.iter().find(|table| table.title.starts_with(title));
            let Some(found) = found else { continue };
            out.push_str(above);
            table(&mut out, found, rows, |name| columns.contains(&name));
        }
        let noise = study.noise.as_ref().filter(|noise| !noise.is_quiet);
        if let Some(noise) = noise {
            let reasons = noise.reasons();
            let _ = writeln!(out, "\nToo noisy for absolute numbers: {reasons}.");
        }
    }
    out
}

/// What `pages` say, in short.
pub fn write(pages: &[Page]) -> String {
    let mut out = String::new();
    let Some(first) = pages.first() else { return out };
    let _ = writeln!(
        out,
        "Measured on {}, {}, udm {}, by `make bench`. Ratios are medians (lowest .. highest\n\
         repeat).",
        first.machine.sentence(),
        first.machine.date,
        first.machine.udm
    );
    for Page { study, .. } in pages {
        let tables: Vec<&Table> =
            study.tables.iter().filter(|table| is_quoted(&study.name, table)).collect();
        if tables.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n`udm bench {}`: {}", study.name, study.title);
        for (name, value) in study.facts.iter().filter(|(name, _)| name == LOAD) {
            let _ = writeln!(out, "({name}: `{value}`).");
        }
        tables.into_iter().for_each(|one| table(&mut out, one, "", |_| true));
    }
    out.push_str("\n| study | what | measured | promised |\n|---|---|---|---|\n");
    for page in pages {
        let told = page.study.claims.iter().filter(|claim| is_told(&page.study.name, claim));
        for claim in told {
            let promised = match claim.verdict() {
                "" => String::new(),
                verdict => format!("{}: {verdict}", claim.promised()),
            };
            let name = &page.study.name;
            let _ = writeln!(
                out,
                "| {name} | {} | {} | {promised} |",
                claim.what.trim(),
                claim.measured()
            );
        }
    }
    let noisy: Vec<String> = pages
        .iter()
        .filter_map(|page| {
            let noise = page.study.noise.as_ref().filter(|noise| !noise.is_quiet)?;
            Some(format!("{} ({})", page.study.name, noise.reasons()))
        })
        .collect();
    let quiet = match noisy.is_empty() {
        true => "The machine was quiet enough during all of them.".to_owned(),
        false => {
            format!("The machine was too noisy for absolute numbers in: {}.", noisy.join("; "))
        }
    };
    let _ = writeln!(out, "\n{quiet}");
    out
}

/// A table with the rows whose names have `rows` in them, and the columns that `is_shown` accepts.
fn table(out: &mut String, table: &Table, rows: &str, is_shown: impl Fn(&str) -> bool) {
    let columns = table.columns.iter().enumerate();
    let (shown, names): (Vec<usize>, Vec<&str>) = columns
        .map(|(nth, column)| (nth, column.name.as_str()))
        .filter(|(_, name)| is_shown(name))
        .unzip();
    let _ = writeln!(out, "\n| {} | {} |", table.title, names.join(" | "));
    let _ = writeln!(out, "|---|{}", "---:|".repeat(names.len()));
    for row in table.rows.iter().filter(|row| row.name.contains(rows)) {
        let cells: Vec<String> = shown.iter().map(|nth| table.cell(row, *nth)).collect();
        let _ = writeln!(out, "| {} | {} |", row.name, cells.join(" | "));
    }
}
