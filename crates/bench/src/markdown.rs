//! The main numbers as Markdown, for documents that quote a run.

use std::fmt::Write;

use crate::html::Page;
use crate::results::Table;

/// Studies whose tables are quoted whole.
const QUOTED: [&str; 1] = ["randwrite"];
/// Studies whose ratios are quoted even if nothing was promised of them.
const TOLD: [&str; 3] = ["copy", "recovery", "scaling"];

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
    for page in pages.iter().filter(|page| QUOTED.contains(&page.study.name.as_str())) {
        let study = &page.study;
        let _ = writeln!(out, "\n`udm bench {}`: {}", study.name, study.title);
        for (name, value) in study.facts.iter().filter(|(name, _)| name == "load") {
            let _ = writeln!(out, "({name}: `{value}`).");
        }
        for one in &study.tables {
            table(&mut out, one);
        }
    }
    out.push_str("\n| study | what | measured | promised |\n|---|---|---|---|\n");
    for page in pages {
        let is_told = TOLD.contains(&page.study.name.as_str());
        for claim in page.study.claims.iter().filter(|one| is_told || one.promise.is_some()) {
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

fn table(out: &mut String, table: &Table) {
    let names: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
    let _ = writeln!(out, "\n| {} | {} |", table.title, names.join(" | "));
    let _ = writeln!(out, "|---|{}", "---:|".repeat(names.len()));
    for row in &table.rows {
        let cells: Vec<String> = (0..names.len()).map(|nth| table.cell(row, nth)).collect();
        let _ = writeln!(out, "| {} | {} |", row.name, cells.join(" | "));
    }
}
