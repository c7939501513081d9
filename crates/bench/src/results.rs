//! Results of studies: one model, which the terminal, the JSON and the report each show in their
//! way. It can be read back from JSON, so that a report can get further pages.

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::noise::Noise;
use crate::stats::{median, percentile, sorted};
use crate::unit::Unit;

/// A study, and where it ran.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Page {
    /// Where and when.
    pub machine: Machine,
    /// The results.
    pub study: Study,
}

/// The results of one study.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Study {
    /// Its name on the command line.
    pub name: String,
    /// The question, in one line.
    pub title: String,
    /// The method, in a sentence or two.
    pub about: String,
    /// Under which conditions: names and values.
    pub facts: Vec<(String, String)>,
    /// The measurements.
    pub tables: Vec<Table>,
    /// The targets, compared with the measurements.
    pub claims: Vec<Claim>,
    /// The same as pictures.
    pub plots: Vec<Plot>,
    /// Notes that a reader needs to interpret the results.
    pub notes: Vec<String>,
    /// Where time went, case by case, if it was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub flames: Vec<Flame>,
    /// The main measures, repeat by repeat, from which the spread is computed.
    pub repeats: Vec<Repeats>,
    /// Whether the machine was quiet; set at the end of the study.
    pub noise: Option<Noise>,
}

impl Study {
    /// A study without results yet.
    pub fn new(name: &str, title: &str, about: &str) -> Study {
        Study {
            name: name.into(),
            title: title.into(),
            about: about.into(),
            facts: Vec::new(),
            tables: Vec::new(),
            claims: Vec::new(),
            plots: Vec::new(),
            notes: Vec::new(),
            flames: Vec::new(),
            repeats: Vec::new(),
            noise: None,
        }
    }

    /// Adds a condition.
    pub fn fact(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.facts.push((name.into(), value.into()));
    }

    /// Adds a measure's repeats.
    pub fn repeats(&mut self, what: impl Into<String>, unit: Unit, values: &[f64]) {
        self.repeats.push(Repeats { what: what.into(), unit, values: values.to_vec() });
    }
}

/// Where the time of a case went, by samples of its stacks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Flame {
    /// The case.
    pub title: String,
    /// Functions, the outermost first, with `;` between them; and how often they were found so.
    pub stacks: Vec<(String, u64)>,
    /// The same of the case that this one is compared with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<(String, u64)>,
}

/// One measure, repeat by repeat.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Repeats {
    /// The measure.
    pub what: String,
    /// The unit of the values.
    pub unit: Unit,
    /// One for each repeat.
    pub values: Vec<f64>,
}

/// Numbers in rows and columns.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Table {
    /// The heading above the table.
    pub title: String,
    /// What each column holds.
    pub columns: Vec<Column>,
    /// One for each contender.
    pub rows: Vec<Row>,
}

/// A column: its name and its unit.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Column {
    /// Its head.
    pub name: String,
    /// What its numbers count.
    pub unit: Unit,
}

/// One contender's numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// The contender.
    pub name: String,
    /// A number for each column, where there is one.
    pub values: Vec<Option<f64>>,
    /// The row's numbers count this instead of what their columns say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<Unit>,
    /// Columns whose number stands out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub marked: Vec<usize>,
}

impl Table {
    /// A table without rows.
    pub fn new(title: impl Into<String>, columns: &[(&str, Unit)]) -> Table {
        let column = |(name, unit): &(&str, Unit)| Column { name: (*name).into(), unit: *unit };
        Table {
            title: title.into(),
            columns: columns.iter().map(column).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row(&mut self, name: impl Into<String>, values: &[f64]) -> &mut Row {
        self.rows.push(Row {
            name: name.into(),
            values: values.iter().map(|value| value.is_finite().then_some(*value)).collect(),
            unit: None,
            marked: Vec::new(),
        });
        self.rows.last_mut().expect("a row was just added")
    }

    /// The contents of a cell, as text.
    pub fn cell(&self, row: &Row, column: usize) -> String {
        let Some(Some(value)) = row.values.get(column) else { return "-".into() };
        let unit = row.unit.or(self.columns.get(column).map(|column| column.unit));
        let mark = if row.marked.contains(&column) { "*" } else { "" };
        format!("{}{mark}", unit.unwrap_or(Unit::Number).text(*value))
    }
}

/// A promise and its measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// The compared quantity.
    pub what: String,
    /// The median over all rounds.
    pub median: f64,
    /// The lowest round.
    pub low: f64,
    /// The highest round.
    pub high: f64,
    /// The target, if any.
    pub promise: Option<Promise>,
    /// Whether the median keeps it.
    pub holds: bool,
}

/// A bound on a measure.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// The measure must not be larger.
    AtMost(f64),
    /// The measure must not be smaller.
    AtLeast(f64),
}

impl Promise {
    fn is_kept_by(self, measure: f64) -> bool {
        match self {
            Promise::AtMost(bound) => measure <= bound,
            Promise::AtLeast(bound) => measure >= bound,
        }
    }
}

impl Claim {
    /// A claim about `rounds`, one measure for each round; their median must keep the promise.
    pub fn new(what: impl Into<String>, rounds: &[f64], promise: Option<Promise>) -> Claim {
        let sorted = sorted(rounds);
        let median = median(rounds);
        let holds = promise.is_none_or(|promise| promise.is_kept_by(median));
        let (low, high) = (percentile(&sorted, 0.0), percentile(&sorted, 100.0));
        Claim { what: what.into(), median, low, high, promise, holds }
    }

    /// The same, but every round must keep it.
    pub fn of_every(what: impl Into<String>, rounds: &[f64], promise: Promise) -> Claim {
        let holds = rounds.iter().all(|round| promise.is_kept_by(*round));
        Claim { holds, ..Claim::new(what, rounds, Some(promise)) }
    }

    /// The median with the range of all rounds, as text.
    pub fn measured(&self) -> String {
        let [median, low, high] = [self.median, self.low, self.high].map(|n| Unit::Number.text(n));
        format!("{median} ({low} .. {high})")
    }

    /// The median alone, as text.
    pub fn measured_median(&self) -> String {
        Unit::Number.text(self.median)
    }

    /// The target, as text; empty if there is none.
    pub fn promised(&self) -> String {
        match self.promise {
            None => String::new(),
            Some(Promise::AtMost(bound)) => format!("at most {}", Unit::Number.text(bound)),
            Some(Promise::AtLeast(bound)) => format!("at least {}", Unit::Number.text(bound)),
        }
    }

    /// Whether the target was met, as text; empty without a target.
    pub fn verdict(&self) -> &'static str {
        match (self.promise, self.holds) {
            (None, _) => "",
            (_, true) => "holds",
            (_, false) => "BROKEN",
        }
    }
}

/// A picture of numbers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plot {
    /// The subject of the plot.
    pub title: String,
    /// How it is shown.
    pub kind: PlotKind,
    /// The quantity of the x axis.
    pub x: Axis,
    /// The quantity of the y axis.
    pub y: Axis,
    /// Bars: the groups' names, from the left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// The contenders.
    pub series: Vec<Series>,
}

/// How a plot shows its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlotKind {
    /// Lines from point to point.
    Lines,
    /// Bars in groups; a point's x is the number of its group.
    Bars,
    /// Lines over percentiles, with as much room for the last percent as for the first ninety.
    Percentiles,
}

/// One direction of a plot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Axis {
    /// The text at the axis.
    pub label: String,
    /// What its numbers count.
    pub unit: Unit,
    /// Whether equal steps are equal factors.
    pub is_log: bool,
}

impl Axis {
    /// An axis of equal steps, from 0.
    pub fn linear(label: &str, unit: Unit) -> Axis {
        Axis { label: label.into(), unit, is_log: false }
    }

    /// An axis of equal factors.
    pub fn log(label: &str, unit: Unit) -> Axis {
        Axis { label: label.into(), unit, is_log: true }
    }
}

/// One contender's points.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Series {
    /// The contender.
    pub name: String,
    /// Its points, x and y.
    pub points: Vec<(f64, f64)>,
}

impl Plot {
    /// A plot of lines.
    pub fn lines(title: &str, x: Axis, y: Axis) -> Plot {
        let (groups, series) = (Vec::new(), Vec::new());
        Plot { title: title.into(), kind: PlotKind::Lines, x, y, groups, series }
    }

    /// A plot of bars in groups.
    pub fn bars(title: &str, groups: &[&str], y: Axis) -> Plot {
        let mut plot = Plot::lines(title, Axis::linear("", Unit::Number), y);
        plot.kind = PlotKind::Bars;
        plot.groups = groups.iter().map(|group| (*group).into()).collect();
        plot
    }

    /// A plot of times over percentiles.
    pub fn percentiles(title: &str) -> Plot {
        let x = Axis::linear("percentile", Unit::Percent);
        let mut plot = Plot::lines(title, x, Axis::log("time", Unit::Nanos));
        plot.kind = PlotKind::Percentiles;
        plot
    }

    /// Adds a contender; points that are not numbers are left out.
    pub fn add(&mut self, name: impl Into<String>, points: Vec<(f64, f64)>) {
        let is_number = |(x, y): &(f64, f64)| x.is_finite() && y.is_finite();
        let points = points.into_iter().filter(is_number).collect();
        self.series.push(Series { name: name.into(), points });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_kept_by_the_median() {
        let claim = Claim::new("x", &[1.0, 3.0, 2.0], Some(Promise::AtMost(2.0)));
        assert!(claim.holds && (claim.low, claim.high) == (1.0, 3.0));
        let broken = Claim::new("x", &[1.0], Some(Promise::AtLeast(1.1)));
        assert_eq!((broken.holds, broken.verdict()), (false, "BROKEN"));
        let every = |bound| Claim::of_every("x", &[1.0, 3.0, 2.0], Promise::AtMost(bound));
        assert!(!every(2.5).holds && every(3.0).holds, "one round breaks it");
    }

    #[test]
    fn cells_know_their_unit() {
        let mut table = Table::new("t", &[("a", Unit::Nanos), ("b", Unit::PerSecond)]);
        table.row("r", &[1500.0, f64::NAN]).marked.push(0);
        table.row("ratio", &[2.0, 3.0]).unit = Some(Unit::Ratio);
        assert_eq!(table.cell(&table.rows[0], 0), "1.50 us*");
        assert_eq!(table.cell(&table.rows[0], 1), "-");
        assert_eq!(table.cell(&table.rows[1], 1), "3.00x");
    }
}
