//! The first page of a report: what this machine's path is like, as one ladder of times, from a
//! copy in memory to the slow device, with every export and every mode of I/O. It is filled from
//! the studies that the report has.

use std::fmt::Write;

use crate::results::Page;
use crate::results::Table;
use crate::svg::escape;
use crate::unit::Unit;

/// The subject of a row, which gives its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Memory,
    Cache,
    Export,
    Device,
    Mode,
}

const KINDS: [(Kind, &str, &str); 5] = [
    (Kind::Memory, "memory, the fast device", "#009e73"),
    (Kind::Cache, "udm in process", "#0072b2"),
    (Kind::Export, "exports, depth 1", "#56b4e9"),
    (Kind::Device, "slow device, depth 1", "#d55e00"),
    (Kind::Mode, "its modes and its page cache", "#e69f00"),
];

/// Rows of a study's table that are rungs.
struct Source {
    kind: Kind,
    study: &'static str,
    /// How the titles of the tables with the median and with the slow ones begin, and the columns.
    p50: (&'static str, &'static str),
    p999: (&'static str, &'static str),
    /// Rows and their names here; all rows with their own names, if there are none.
    rows: &'static [(&'static str, &'static str)],
    /// A prefix of the row's own name.
    before: &'static str,
}

const ONE_THREAD: [(&str, &str); 2] = [("one thread", "p50"), ("one thread", "p99.9")];
const IN_PROCESS: [(&str, &str); 2] = [("in process", "p50"), ("in process", "p99.9")];
const WRITE_MODES: &str = "Single client, random write";
const READ_PAGES: &str = "Page cache, random read";

const SOURCES: [Source; 7] = [
    Source {
        kind: Kind::Memory,
        study: "write",
        p50: ONE_THREAD[0],
        p999: ONE_THREAD[1],
        rows: &[("bare load", "load of 4 KiB"), ("bare durable copy", "durable copy of 4 KiB")],
        before: "",
    },
    Source {
        kind: Kind::Cache,
        study: "write",
        p50: ONE_THREAD[0],
        p999: ONE_THREAD[1],
        rows: &[
            ("read hit, device", "pcache: read hit"),
            ("write, device", "pcache: write"),
            ("FUA write, device", "pcache: FUA write"),
        ],
        before: "",
    },
    Source {
        kind: Kind::Cache,
        study: "randwrite",
        p50: IN_PROCESS[0],
        p999: IN_PROCESS[1],
        rows: &[("1 job, through udm", "a cache over the slow device: random write")],
        before: "",
    },
    Source {
        kind: Kind::Export,
        study: "exports",
        p50: ("latency, p50", "write 1"),
        p999: ("latency, p99.9", "write 1"),
        rows: &[],
        before: "write: ",
    },
    Source {
        kind: Kind::Device,
        study: "randwrite",
        p50: IN_PROCESS[0],
        p999: IN_PROCESS[1],
        rows: &[("1 job, backing alone", "the slow device alone: random write")],
        before: "",
    },
    Source {
        kind: Kind::Mode,
        study: "iomodes",
        p50: (WRITE_MODES, "p50"),
        p999: (WRITE_MODES, "p99.9"),
        rows: &[],
        before: "random write, depth 16: ",
    },
    Source {
        kind: Kind::Mode,
        study: "pagecache",
        p50: (READ_PAGES, "p50"),
        p999: (READ_PAGES, "p99.9"),
        rows: &[],
        before: "random read, depth 32: ",
    },
];

/// One time.
#[derive(Clone, Debug, PartialEq)]
struct Rung {
    kind: Kind,
    name: String,
    p50: f64,
    p999: Option<f64>,
}

/// The rungs that `pages` have, the fastest first.
fn rungs(pages: &[Page]) -> Vec<Rung> {
    let mut rungs: Vec<Rung> = SOURCES.iter().flat_map(|source| of_source(source, pages)).collect();
    rungs.sort_by(|one, other| one.p50.total_cmp(&other.p50));
    rungs
}

fn of_source(source: &Source, pages: &[Page]) -> Vec<Rung> {
    let page = pages.iter().find(|page| page.study.name == source.study);
    let tables = page.map_or(&[][..], |page| &page.study.tables);
    let find = |start: &str| tables.iter().find(|table| table.title.starts_with(start));
    let Some(table) = find(source.p50.0) else { return Vec::new() };
    let slow = find(source.p999.0);
    let rung = |row: &str, name: String| {
        let p50 = value(table, row, source.p50.1)?;
        let p999 = slow.and_then(|slow| value(slow, row, source.p999.1));
        Some(Rung { kind: source.kind, name, p50, p999 })
    };
    match source.rows {
        [] => table
            .rows
            .iter()
            .filter_map(|row| rung(&row.name, format!("{}{}", source.before, row.name)))
            .collect(),
        rows => rows.iter().filter_map(|(row, name)| rung(row, (*name).into())).collect(),
    }
}

/// A time in nanoseconds; 0 is none.
fn value(table: &Table, row: &str, column: &str) -> Option<f64> {
    let row = table.rows.iter().find(|other| other.name == row)?;
    let column = table.columns.iter().position(|other| other.name == column)?;
    (*row.values.get(column)?).filter(|value| *value > 0.0)
}

const WIDTH: f64 = 960.0;
const LEFT: f64 = 350.0;
const RIGHT: f64 = 90.0;
const TOP: f64 = 64.0;
const ROW: f64 = 19.0;

/// The summary as HTML: a picture, and its numbers as a table and as CSV. Empty if the report has
/// none of the studies that it needs.
pub fn write(pages: &[Page]) -> String {
    let rungs = rungs(pages);
    if rungs.is_empty() {
        return String::new();
    }
    let mut out = draw(&rungs);
    out.push_str(
        "<p>A dot is the median of single requests, the line goes on to 99.9 %. The axis is \
         logarithmic: a step to the right is ten times as long. Requests of 4 KiB.</p>\n",
    );
    let mut csv = "what,kind,p50 [ns],p99.9 [ns]\n".to_owned();
    let mut rows = String::new();
    for rung in &rungs {
        let (kind, _) = look(rung.kind);
        let plain = rung.p999.map_or(String::new(), |p999| p999.to_string());
        let fields = [rung.name.as_str(), kind].map(crate::csv::field);
        let _ = writeln!(csv, "{},{},{plain}", fields.join(","), rung.p50);
        let p999 = rung.p999.map_or("-".into(), |p999| Unit::Nanos.text(p999));
        let (name, p50) = (escape(&rung.name), Unit::Nanos.text(rung.p50));
        let _ = writeln!(rows, "<tr><td>{name}</td><td>{p50}</td><td>{p999}</td></tr>");
    }
    let link = crate::csv::percent_encoded(&csv);
    let _ = write!(
        out,
        "<details><summary>Numbers: the ladder</summary>\n\
         <table>\n<tr><th></th><th>p50</th><th>p99.9</th></tr>\n{rows}</table>\n\
         <p><a download=\"ladder.csv\" href=\"data:text/csv;charset=utf-8,{link}\">ladder.csv</a>\
         </p>\n</details>\n"
    );
    out
}

fn look(kind: Kind) -> (&'static str, &'static str) {
    let found = KINDS.iter().find(|(other, ..)| *other == kind);
    found.map_or(("", "#000000"), |(_, name, colour)| (name, colour))
}

fn draw(rungs: &[Rung]) -> String {
    let longest = |rung: &Rung| rung.p999.unwrap_or(rung.p50).max(rung.p50);
    let low = rungs.iter().map(|rung| rung.p50).fold(f64::INFINITY, f64::min).log10().floor();
    let high = rungs.iter().map(longest).fold(1.0, f64::max).log10().ceil().max(low + 1.0);
    let x = |nanos: f64| LEFT + (nanos.log10() - low) / (high - low) * (WIDTH - LEFT - RIGHT);
    let bottom = TOP + rungs.len() as f64 * ROW;
    let height = bottom + 8.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"ladder\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"Ladder of latencies\" \
         font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"0\" y=\"16\" font-weight=\"bold\">How long a request takes here</text>\n"
    );
    let mut at = 0.0;
    for (_, name, colour) in
        KINDS.iter().filter(|kind| rungs.iter().any(|rung| rung.kind == kind.0))
    {
        let _ = writeln!(
            out,
            "<circle cx=\"{:.1}\" cy=\"30\" r=\"4.5\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"34\">{name}</text>",
            at + 5.0,
            at + 14.0
        );
        at += 34.0 + name.len() as f64 * 6.3;
    }
    for power in low as i32..=high as i32 {
        let nanos = 10_f64.powi(power);
        let _ = writeln!(
            out,
            "<path d=\"M{0:.1} {TOP}V{bottom:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{0:.1}\" y=\"{1:.1}\" text-anchor=\"middle\">{2}</text>",
            x(nanos),
            TOP - 6.0,
            Unit::Nanos.tick(nanos)
        );
    }
    for (nth, rung) in rungs.iter().enumerate() {
        let y = TOP + (nth as f64 + 0.5) * ROW;
        let (_, colour) = look(rung.kind);
        let (from, to) = (x(rung.p50), x(longest(rung)));
        let _ = writeln!(
            out,
            "<g class=\"rung\"><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <path d=\"M{from:.1} {y:.1}H{to:.1}\" stroke=\"{colour}\" stroke-width=\"3\" \
             stroke-opacity=\"0.45\"/>\
             <circle cx=\"{from:.1}\" cy=\"{y:.1}\" r=\"4.5\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\">{}</text></g>",
            LEFT - 10.0,
            y + 4.0,
            escape(&rung.name),
            to + 8.0,
            y + 4.0,
            Unit::Nanos.text(rung.p50)
        );
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::results::Study;

    fn page(name: &str, tables: Vec<Table>) -> Page {
        let mut study = Study::new(name, "title", "about");
        study.tables = tables;
        Page { machine: Machine::default(), study }
    }

    #[test]
    fn rungs_are_what_the_studies_found_from_fast_to_slow() {
        let times = [("p50", Unit::Nanos), ("p99.9", Unit::Nanos)];
        let mut write = Table::new("one thread (3 rounds)", &times);
        write.row("bare durable copy", &[400.0, 900.0]);
        write.row("bare load", &[f64::NAN, 1.0]);
        write.row("unknown", &[1.0, 2.0]);
        let export = [("write 1", Unit::Nanos), ("read 1", Unit::Nanos)];
        let mut exports = Table::new("latency, p50", &export);
        exports.row("NBD <unix>", &[12_000.0, 1.0]);
        exports.row("in process", &[300.0, 1.0]);
        let mut slow = Table::new("latency, p99.9", &export);
        slow.row("NBD <unix>", &[90_000.0, 1.0]);
        let pages = [page("exports", vec![exports, slow]), page("write", vec![write])];
        let rungs = rungs(&pages);
        let found: Vec<(&str, f64, Option<f64>)> =
            rungs.iter().map(|rung| (rung.name.as_str(), rung.p50, rung.p999)).collect();
        assert_eq!(
            found,
            [
                ("write: in process", 300.0, None),
                ("durable copy of 4 KiB", 400.0, Some(900.0)),
                ("write: NBD <unix>", 12_000.0, Some(90_000.0)),
            ]
        );
        let html = super::write(&pages);
        assert_eq!(html.matches("class=\"rung\"").count(), 3);
        assert!(html.contains("write: NBD &lt;unix&gt;"), "{html}");
        assert!(html.contains("durable%20copy%20of%204%20KiB"), "{html}");
        assert!(super::write(&[page("copy", Vec::new())]).is_empty());
    }
}
