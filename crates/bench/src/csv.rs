//! The numbers of plots as CSV (RFC 4180), for other programs.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::results::{Plot, PlotKind};
use crate::unit::Unit;

/// The numbers of `plot`: a line for each position on the x axis (for bars: each group), a column
/// for each subject. Numbers are plain; the header gives their units.
pub fn of_plot(plot: &Plot) -> String {
    let head = match plot.kind {
        PlotKind::Bars => "group".to_owned(),
        PlotKind::Lines | PlotKind::Percentiles => with_unit(&plot.x.label, plot.x.unit),
    };
    let mut out = field(&head);
    for series in &plot.series {
        out.push(',');
        out += &field(&with_unit(&series.name, plot.y.unit));
    }
    out.push('\n');
    // Not negative, so their order is that of their bits.
    let places = plot.series.iter().flat_map(|series| &series.points);
    let places: BTreeSet<u64> = places.map(|(x, _)| x.to_bits()).collect();
    for x in places.into_iter().map(f64::from_bits) {
        match plot.kind {
            PlotKind::Bars => {
                out += &field(plot.groups.get(x as usize).map_or("", String::as_str));
            }
            PlotKind::Lines | PlotKind::Percentiles => {
                let _ = write!(out, "{x}");
            }
        }
        for series in &plot.series {
            out.push(',');
            if let Some((_, y)) = series.points.iter().find(|point| point.0 == x) {
                let _ = write!(out, "{y}");
            }
        }
        out.push('\n');
    }
    out
}

fn with_unit(label: &str, unit: Unit) -> String {
    match unit.plain() {
        "" => label.to_owned(),
        plain => format!("{label} [{plain}]"),
    }
}

/// In quotes where it has to be.
pub fn field(text: &str) -> String {
    match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// A name for the numbers of the plot with this title.
pub fn file_name(title: &str) -> String {
    let words: Vec<String> = title
        .split(|letter: char| !letter.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .map(str::to_ascii_lowercase)
        .collect();
    format!("{}.csv", words.join("-"))
}

/// As it can stand in a URI.
pub fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 3 / 2);
    for byte in text.bytes() {
        match byte {
            b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' | b'-' | b'.' | b'_' | b'~' => {
                out.push(char::from(byte));
            }
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Axis;

    #[test]
    fn every_number_of_a_plot_is_in_its_csv() {
        let mut plot = Plot::lines(
            "A: \"four\" writers, now",
            Axis::linear("seconds", Unit::Number),
            Axis::linear("bytes", Unit::Bytes),
        );
        plot.add("direct, lazy", vec![(0.5, 10.0), (0.25, 3.5)]);
        plot.add("buffered", vec![(0.5, 7.0), (1.0, 0.125)]);
        let expected = "seconds,\"direct, lazy [bytes]\",buffered [bytes]\n\
                        0.25,3.5,\n0.5,10,7\n1,,0.125\n";
        assert_eq!(of_plot(&plot), expected);
        assert_eq!(file_name(&plot.title), "a-four-writers-now.csv");
        assert_eq!(percent_encoded("a,b\n%"), "a%2Cb%0A%25");
        let mut bars = Plot::bars("b", &["one", "two"], Axis::linear("time", Unit::Nanos));
        bars.add("x", vec![(0.0, 1.0), (1.0, 2.0)]);
        assert_eq!(of_plot(&bars), "group,x [ns]\none,1\ntwo,2\n");
    }
}
