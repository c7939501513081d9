//! The report: one self-contained HTML file, a page for each study.
//!
//! 1. It loads no resources and runs no scripts: text, tables and SVG, readable on paper.
//! 2. It is well-formed XML as well, so that any tool can read it.
//! 3. It contains its data as JSON; a later run adds its pages to them, in place of older pages of
//!    the same studies.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::machine::Machine;
use crate::results::{Flame, Page, Plot, Study, Table};
use crate::svg::{draw, escape};
use crate::{csv, flame, summary};

const DATA_START: &str = "<script type=\"application/json\" id=\"udm-bench\">";
const DATA_END: &str = "</script>";

const STYLE: &str = "
body { font: 15px/1.45 sans-serif; color: #1a1a1a; background: #fff; margin: 2em auto;
  max-width: 66em; padding: 0 1em; }
h1 { font-size: 1.6em; } h2 { font-size: 1.3em; border-bottom: 2px solid #0072b2; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding: .3em 0; }
table { font-size: .88em; }
th, td { padding: .15em .55em; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.marked { font-weight: bold; background: #e3f0f8; }
.facts td { text-align: left; border: 0; padding: .05em .7em; white-space: normal; }
.facts td:first-child { color: #555; }
.noise { border-left: 5px solid #009e73; padding: .3em .8em; background: #f2faf6; }
.noise.loud, .broken { border-left-color: #d55e00; background: #fdf1e7; }
svg.plot, svg.flame, svg.ladder { display: block; width: 100%; max-width: 56em; height: auto;
  margin: 1em 0; }
svg.flame { max-width: none; } .frame:hover rect { stroke: #000; }
nav a { margin-right: 1em; }
details { font-size: .8em; color: #555; margin: 0 0 1.5em; } pre { overflow-x: auto; }
@media print {
  body { margin: 0; max-width: none; font-size: 9.5pt; } nav { display: none; }
  details { display: none; }
  section { break-before: page; } table, svg { break-inside: avoid; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
";

/// Adds `pages` to the report at `path`, or makes it.
pub fn add(path: &Path, pages: Vec<Page>) -> Result<()> {
    let mut all = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        text => read(&text.with_context(|| path.display().to_string())?)
            .with_context(|| format!("{} is not a report of udm bench", path.display()))?,
    };
    for page in pages {
        match all.iter_mut().find(|old| old.study.name == page.study.name) {
            Some(old) => *old = page,
            None => all.push(page),
        }
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let text = write(&all)?;
    std::fs::write(path, text).with_context(|| path.display().to_string())
}

/// The pages that a report's text holds.
pub fn read(text: &str) -> Result<Vec<Page>> {
    let (_, data) = text.split_once(DATA_START).context("no data in it")?;
    let (data, _) = data.split_once(DATA_END).context("its data does not end")?;
    let pages: Vec<Page> = serde_json::from_str(data).context("its data")?;
    ensure!(!pages.is_empty(), "it contains no pages");
    Ok(pages)
}

/// The report's text.
pub fn write(pages: &[Page]) -> Result<String> {
    let mut out = format!(
        "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\">\n<head>\n\
         <meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <link rel=\"icon\" href=\"data:,\"/>\n\
         <title>udm bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>udm bench</h1>\n\
         <p>udm's caches on one machine, with other programs measured in the same \
         run. Ratios within a run hold on other machines; absolute numbers do not.</p>\n"
    );
    out.push_str(&summary::write(pages));
    out.push_str("<nav>");
    for page in pages {
        let name = escape(&page.study.name);
        let _ = write!(out, "<a href=\"#{name}\">{name}</a> ");
    }
    out.push_str("</nav>\n");
    for page in pages {
        section(&mut out, page);
    }
    // Neither the end of the script nor anything that XML minds can stand in the data.
    let data = serde_json::to_string(pages)?;
    let data = data.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026");
    let _ = write!(out, "{DATA_START}{data}{DATA_END}\n</body>\n</html>\n");
    Ok(out)
}

fn section(out: &mut String, page: &Page) {
    let Page { machine, study } = page;
    let name = escape(&study.name);
    let _ = write!(
        out,
        "<section id=\"{name}\">\n<h2>{name}: {}</h2>\n<p>{}</p>\n",
        escape(&study.title),
        escape(&study.about)
    );
    facts(out, machine, study);
    if let Some(noise) = &study.noise {
        let class = if noise.is_quiet { "noise" } else { "noise loud" };
        let verdict = escape(&noise.verdict);
        let _ = writeln!(out, "<p class=\"{class}\">The machine was {verdict}.</p>");
    }
    for plot in &study.plots {
        out.push_str(&draw(plot));
        numbers(out, plot);
    }
    for one in &study.tables {
        table(out, one);
    }
    for one in &study.flames {
        out.push_str(&flame::draw(one));
        stacks(out, one);
    }
    claims(out, study);
    for note in &study.notes {
        let _ = writeln!(out, "<p>{}</p>", escape(note));
    }
    out.push_str("</section>\n");
}

/// The numbers of a plot, folded: as CSV, to be copied or saved.
fn numbers(out: &mut String, plot: &Plot) {
    let csv = csv::of_plot(plot);
    let name = csv::file_name(&plot.title);
    let link = csv::percent_encoded(&csv);
    let _ = write!(
        out,
        "<details><summary>Numbers: {}</summary>\n\
         <p><a download=\"{name}\" href=\"data:text/csv;charset=utf-8,{link}\">{name}</a></p>\n\
         <pre>{}</pre>\n</details>\n",
        escape(&plot.title),
        escape(&csv)
    );
}

/// The stacks of a flamegraph, folded twice: in the form that other tools take, and on the page.
fn stacks(out: &mut String, flame: &Flame) {
    let mut text = String::new();
    for (stack, count) in &flame.stacks {
        let _ = writeln!(text, "{stack} {count}");
    }
    let name = csv::file_name(&flame.title).replace(".csv", ".folded");
    let link = csv::percent_encoded(&text);
    let _ = writeln!(
        out,
        "<p><a download=\"{name}\" href=\"data:text/plain;charset=utf-8,{link}\">{name}</a></p>"
    );
}

fn facts(out: &mut String, machine: &Machine, study: &Study) {
    let here = format!("{}; udm {}, {}", machine.sentence(), machine.udm, machine.date);
    let machine = ("machine".to_owned(), here);
    out.push_str("<table class=\"facts\">\n");
    for (name, value) in std::iter::once(&machine).chain(&study.facts) {
        let (name, value) = (escape(name), escape(value));
        let _ = writeln!(out, "<tr><td>{name}</td><td>{value}</td></tr>");
    }
    out.push_str("</table>\n");
}

fn table(out: &mut String, table: &Table) {
    let _ = write!(out, "<table>\n<caption>{}</caption>\n<tr><th></th>", escape(&table.title));
    for column in &table.columns {
        let _ = write!(out, "<th>{}</th>", escape(&column.name));
    }
    out.push_str("</tr>\n");
    for row in &table.rows {
        let _ = write!(out, "<tr><td>{}</td>", escape(&row.name));
        for column in 0..table.columns.len() {
            let class = if row.marked.contains(&column) { " class=\"marked\"" } else { "" };
            let _ = write!(out, "<td{class}>{}</td>", escape(&table.cell(row, column)));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table>\n");
}

fn claims(out: &mut String, study: &Study) {
    if study.claims.is_empty() {
        return;
    }
    out.push_str(
        "<table>\n<caption>Ratios: median (lowest .. highest repeat)</caption>\n\
         <tr><th></th><th>measured</th><th>promised</th><th></th></tr>\n",
    );
    for claim in &study.claims {
        let class = if claim.holds { "" } else { " class=\"broken\"" };
        let _ = writeln!(
            out,
            "<tr{class}><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(claim.what.trim()),
            escape(&claim.measured()),
            escape(&claim.promised()),
            claim.verdict()
        );
    }
    out.push_str("</table>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Axis, Plot};
    use crate::unit::Unit;

    fn page(name: &str, title: &str) -> Page {
        let mut study = Study::new(name, title, "about </script> & so on");
        let mut plot =
            Plot::lines("plot", Axis::log("x", Unit::Bytes), Axis::log("y", Unit::Nanos));
        plot.add("one", vec![(64.0, 10.0), (4096.0, 100.0)]);
        study.plots.push(plot);
        Page { machine: Machine::default(), study }
    }

    #[test]
    fn a_report_grows_by_pages_and_replaces_old_ones() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/report.html");
        add(&path, vec![page("a", "first"), page("b", "second")]).unwrap();
        add(&path, vec![page("a", "third"), page("c", "fourth")]).unwrap();
        let pages = read(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let titles: Vec<&str> = pages.iter().map(|page| page.study.title.as_str()).collect();
        assert_eq!(titles, ["third", "second", "fourth"]);
        assert_eq!(pages[0].study.about, "about </script> & so on");
    }

    #[test]
    fn what_is_no_report_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("letter.html");
        std::fs::write(&path, "<html>dear</html>").unwrap();
        let error = add(&path, vec![page("a", "x")]).unwrap_err();
        assert!(format!("{error:#}").contains("letter.html is not a report of udm bench"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "<html>dear</html>");
    }
}
