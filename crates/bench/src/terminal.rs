//! A study for people at a terminal.

use std::fmt::Write;

use crate::machine::Machine;
use crate::results::{Study, Table};

/// The machine, once above all studies.
pub fn machine(machine: &Machine) -> String {
    format!("udm {} on {}\n", machine.udm, machine.sentence())
}

/// A study as text.
pub fn study(study: &Study) -> String {
    let mut text = format!("\n== {}: {} ==\n", study.name, study.title);
    text += &wrapped(&study.about, "");
    text.push('\n');
    let width = study.facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (name, value) in &study.facts {
        let _ = writeln!(text, "  {name:width$}  {value}");
    }
    for one in &study.tables {
        text += &table(one);
    }
    if !study.claims.is_empty() {
        text.push('\n');
    }
    let width = study.claims.iter().map(|claim| claim.what.len()).max().unwrap_or(0);
    for claim in &study.claims {
        let promise = match claim.verdict() {
            "" => String::new(),
            verdict => format!("  promised {}: {verdict}", claim.promised()),
        };
        let _ = writeln!(text, "  {:width$}  {}{promise}", claim.what, claim.measured());
    }
    if !study.notes.is_empty() {
        text.push('\n');
    }
    for note in &study.notes {
        text += &wrapped(note, "  ");
    }
    if let Some(noise) = &study.noise {
        text += &wrapped(&format!("\nThe machine was {}.", noise.verdict), "  ");
    }
    text
}

fn table(table: &Table) -> String {
    let names = table.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..table.columns.len())
        .map(|column| {
            let cells = table.rows.iter().map(|row| table.cell(row, column).len());
            cells.max().unwrap_or(0).max(table.columns[column].name.len())
        })
        .collect();
    let mut text = format!("\n{}\n  {:names$}", table.title, "");
    for (column, width) in table.columns.iter().zip(&widths) {
        let _ = write!(text, "  {:>width$}", column.name);
    }
    text.push('\n');
    for row in &table.rows {
        let _ = write!(text, "  {:names$}", row.name);
        for (column, width) in widths.iter().enumerate() {
            let _ = write!(text, "  {:>width$}", table.cell(row, column));
        }
        text.push('\n');
    }
    text
}

/// Lines of at most 100 characters.
fn wrapped(text: &str, indent: &str) -> String {
    let mut out = String::new();
    for paragraph in text.split('\n') {
        let mut line = indent.to_owned();
        for word in paragraph.split_whitespace() {
            if line.len() + word.len() + 1 > 100 {
                let _ = writeln!(out, "{}", line.trim_end());
                line = indent.to_owned();
            }
            line += word;
            line.push(' ');
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}
