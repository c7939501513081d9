//! Two runs, compared: which measures have changed by more than their own repeats differ.

use anyhow::{Result, ensure};

use crate::results::Page;
use crate::results::{Claim, Repeats, Study, Table};
use crate::stats::median;
use crate::unit::Unit;

/// A page that compares what both runs have: every measure with repeats, every promise.
pub fn compare(before: &[Page], after: &[Page]) -> Result<Page> {
    let mut study = Study::new(
        "compare",
        "changes between two runs",
        "Medians of all measures that both runs repeated, and after / before. A ratio stands out \
         if no repeat of one run lies within the range of the other's: what is not marked may be \
         chance.",
    );
    let pairs: Vec<(&Page, &Page)> = before
        .iter()
        .filter_map(|page| {
            Some((page, after.iter().find(|other| other.study.name == page.study.name)?))
        })
        .collect();
    let Some((first, last)) = pairs.first() else {
        anyhow::bail!("the two runs do not share a study");
    };
    for (name, page) in [("before", first), ("after", last)] {
        let Page { machine, .. } = page;
        let what = format!("{}; udm {}, {}", machine.sentence(), machine.udm, machine.date);
        study.fact(name, what);
    }
    if first.machine.sentence() != last.machine.sentence() {
        study.notes.push("Two machines: only ratios within a run can be compared.".into());
    }
    for (old, new) in &pairs {
        measures(&mut study, &old.study, &new.study);
    }
    promises(&mut study, &pairs);
    for (name, from, to) in [("after", before, after), ("before", after, before)] {
        let is_missing = |page: &&Page| to.iter().all(|other| other.study.name != page.study.name);
        let missing: Vec<&str> =
            from.iter().filter(is_missing).map(|page| page.study.name.as_str()).collect();
        if !missing.is_empty() {
            study.notes.push(format!("Not in the run {name}: {}.", missing.join(", ")));
        }
    }
    ensure!(!study.tables.is_empty(), "the two runs do not share a measure");
    Ok(Page { machine: last.machine.clone(), study })
}

/// A table of the repeated measures of one study in both runs; one table for each unit.
fn measures(study: &mut Study, old: &Study, new: &Study) {
    let mut units: Vec<Unit> = Vec::new();
    for measure in &old.repeats {
        if !units.contains(&measure.unit) {
            units.push(measure.unit);
        }
    }
    for unit in units {
        let columns = [("before", unit), ("after", unit), ("after / before", Unit::Ratio)];
        let mut table = Table::new(title(&old.name, unit), &columns);
        let mut left: Vec<&Repeats> = new.repeats.iter().collect();
        for measure in old.repeats.iter().filter(|measure| measure.unit == unit) {
            // A study may use a name twice: then they are in the same order.
            let is_same = |other: &&Repeats| other.what == measure.what && other.unit == unit;
            let Some(place) = left.iter().position(is_same) else { continue };
            let other = left.remove(place);
            let medians = [&measure.values, &other.values].map(|values| median(values));
            let ratio = medians[1] / medians[0];
            let row = table.row(&measure.what, &[medians[0], medians[1], ratio]);
            if are_apart(&measure.values, &other.values) {
                row.marked.push(2);
            }
        }
        if !table.rows.is_empty() {
            study.tables.push(table);
        }
    }
}

fn title(study: &str, unit: Unit) -> String {
    match unit.plain() {
        "" => study.to_owned(),
        plain => format!("{study}, {plain}"),
    }
}

/// Whether all repeats of one run exceed all of the other. A single repeat is not enough.
fn are_apart(one: &[f64], other: &[f64]) -> bool {
    let low = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = |values: &[f64]| values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let is_enough = one.len() > 1 && other.len() > 1;
    is_enough && (high(one) < low(other) || high(other) < low(one))
}

/// The promises of both runs; those that one of them breaks stand out.
fn promises(study: &mut Study, pairs: &[(&Page, &Page)]) {
    let columns = [("before", Unit::Number), ("after", Unit::Number)];
    let mut table = Table::new("Ratios and promises; marked: broken", &columns);
    for (old, new) in pairs {
        for claim in &old.study.claims {
            let is_same = |other: &&Claim| other.what == claim.what;
            let Some(other) = new.study.claims.iter().find(is_same) else { continue };
            let promise = claim.promised();
            let bound = if promise.is_empty() { promise } else { format!(" ({promise})") };
            let name = format!("{}: {}{bound}", old.study.name, claim.what.trim());
            let row = table.row(name, &[claim.median, other.median]);
            let broken = [claim, other].into_iter().enumerate().filter(|(_, one)| !one.holds);
            row.marked.extend(broken.map(|(nth, _)| nth));
            if claim.holds != other.holds {
                let now = if other.holds { "holds now" } else { "is broken now" };
                study.notes.push(format!("{}: {} {now}.", old.study.name, claim.what.trim()));
            }
        }
    }
    if !table.rows.is_empty() {
        study.tables.push(table);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::results::Promise;

    fn page(name: &str, rates: &[f64], claim: f64) -> Page {
        let mut study = Study::new(name, "title", "about");
        study.repeats("rate", Unit::PerSecond, rates);
        study.claims.push(Claim::new("ratio", &[claim], Some(Promise::AtMost(1.0))));
        Page { machine: Machine::default(), study }
    }

    #[test]
    fn what_differs_by_more_than_its_repeats_stands_out() {
        let before = [page("a", &[10.0, 11.0, 12.0], 0.5), page("gone", &[1.0], 0.1)];
        for (after, ratio, marked) in [
            ([5.0, 5.5, 6.0], 0.5, vec![2]),
            ([11.5, 16.5, 22.0], 1.5, vec![]),
            ([12.5, 16.5, 20.5], 1.5, vec![2]),
        ] {
            let page = compare(&before, &[page("a", &after, 1.5)]).unwrap();
            let [rates, claims] = &page.study.tables[..] else { panic!("two tables") };
            assert_eq!(rates.title, "a, 1/s");
            assert_eq!((rates.rows[0].values[2], &rates.rows[0].marked), (Some(ratio), &marked));
            assert_eq!(claims.rows[0].name, "a: ratio (at most 1.00)");
            assert_eq!(claims.rows[0].marked, [1], "only the second run breaks it");
            assert_eq!(
                page.study.notes,
                ["a: ratio is broken now.", "Not in the run after: gone."]
            );
        }
        let single = compare(&[page("a", &[1.0], 0.5)], &[page("a", &[9.0], 0.5)]).unwrap();
        assert!(single.study.tables[0].rows[0].marked.is_empty(), "one repeat shows no spread");
        let error = compare(&before, &[page("b", &[1.0], 0.5)]).unwrap_err();
        assert!(error.to_string().contains("do not share a study"));
    }
}
