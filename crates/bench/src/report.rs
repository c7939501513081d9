//! What a study found, as tables for people and as JSON for programs.

use serde::Serialize;

/// What one study measured.
#[derive(Debug, Serialize)]
pub struct Study {
    /// Its name on the command line.
    pub name: &'static str,
    /// What was done, in a sentence or two.
    pub about: String,
    /// What was measured.
    pub tables: Vec<Table>,
    /// What was promised, beside what was measured.
    pub claims: Vec<Claim>,
}

/// Numbers of one unit.
#[derive(Debug, Serialize)]
pub struct Table {
    /// What the numbers are.
    pub title: String,
    /// What each column holds.
    pub columns: Vec<&'static str>,
    /// One for each contender.
    pub rows: Vec<Row>,
}

/// One contender's numbers.
#[derive(Debug, Serialize)]
pub struct Row {
    /// The contender.
    pub name: String,
    /// A number for each column.
    pub values: Vec<f64>,
}

/// A promise and its measure.
#[derive(Debug, Serialize)]
pub struct Claim {
    /// What is compared.
    pub what: String,
    /// The median over all rounds.
    pub median: f64,
    /// The lowest round.
    pub low: f64,
    /// The highest round.
    pub high: f64,
    /// What was promised, if anything was.
    pub promise: Option<Promise>,
    /// Whether the median keeps it.
    pub holds: bool,
}

/// A bound on a measure.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Promise {
    /// The measure must not be larger.
    AtMost(f64),
    /// The measure must not be smaller.
    AtLeast(f64),
}

impl Claim {
    /// A claim about `rounds`, one measure for each round.
    pub fn new(what: impl Into<String>, rounds: &[f64], promise: Option<Promise>) -> Claim {
        let sorted = sorted(rounds);
        let median = percentile(&sorted, 50.0);
        let holds = match promise {
            None => true,
            Some(Promise::AtMost(bound)) => median <= bound,
            Some(Promise::AtLeast(bound)) => median >= bound,
        };
        let (low, high) = (percentile(&sorted, 0.0), percentile(&sorted, 100.0));
        Claim { what: what.into(), median, low, high, promise, holds }
    }
}

/// The same numbers in ascending order.
pub fn sorted(numbers: &[f64]) -> Vec<f64> {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The number that `percent` of `sorted` do not exceed; 0 if there is none.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    let at = (percent / 100.0 * last as f64).round() as usize;
    sorted.get(at).copied().unwrap_or_default()
}

/// The median of numbers in any order.
pub fn median(numbers: &[f64]) -> f64 {
    percentile(&sorted(numbers), 50.0)
}

/// The arithmetic mean; 0 of nothing.
pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Each round's number of one contender over that of another.
pub fn ratios(of: &[f64], over: &[f64]) -> Vec<f64> {
    of.iter().zip(over).map(|(of, over)| of / over).collect()
}

/// Prints a study for people.
pub fn print(study: &Study) {
    println!("\n== {} ==\n{}", study.name, study.about);
    for table in &study.tables {
        println!("\n{}", table.title);
        let width = table.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(8);
        print!("  {:width$}", "");
        for column in &table.columns {
            print!(" {column:>10}");
        }
        println!();
        for row in &table.rows {
            print!("  {:width$}", row.name);
            for value in &row.values {
                print!(" {:>10}", number(*value));
            }
            println!();
        }
    }
    println!();
    for claim in &study.claims {
        let promise = match claim.promise {
            None => String::new(),
            Some(Promise::AtMost(bound)) => format!("promised at most {}", number(bound)),
            Some(Promise::AtLeast(bound)) => format!("promised at least {}", number(bound)),
        };
        let verdict = match (claim.promise, claim.holds) {
            (None, _) => "",
            (_, true) => ": holds",
            (_, false) => ": BROKEN",
        };
        println!(
            "  {:58} {:>7} ({} .. {})  {promise}{verdict}",
            claim.what,
            number(claim.median),
            number(claim.low),
            number(claim.high),
        );
    }
}

fn number(value: f64) -> String {
    match value.abs() {
        1000.0.. => format!("{value:.0}"),
        100.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_promises() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(percentile(&[], 50.0), 0.0);
        let numbers: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(percentile(&numbers, 99.0), 99.0);
        let claim = Claim::new("x", &[1.0, 3.0, 2.0], Some(Promise::AtMost(2.0)));
        assert!(claim.holds && (claim.low, claim.high) == (1.0, 3.0));
        assert!(!Claim::new("x", &[1.0], Some(Promise::AtLeast(1.1))).holds);
    }
}
