//! Plots as SVG: lines, bars and percentiles, on linear or logarithmic axes.
//!
//! Made for screen and paper: subjects differ in colour, in dashes and in markers, and colours that
//! colour-blind people confuse are not used. The plots load no external resources.

use std::fmt::Write;

use crate::results::{Axis, Plot, PlotKind, Series};

const WIDTH: f64 = 720.0;
const LEFT: f64 = 78.0;
const RIGHT: f64 = 20.0;
const PLOT_HEIGHT: f64 = 250.0;
const LEGEND_LINE: f64 = 18.0;

/// Colours that stay apart for everybody (Okabe and Ito), and the dashes that go with them.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c8c00"];
const DASHES: [&str; 4] = ["none", "7 3", "2 3", "9 3 2 3"];

/// Percentiles that get a tick.
const PERCENTS: [f64; 7] = [0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999];

/// How numbers of one direction become places.
struct Scale {
    low: f64,
    high: f64,
    is_log: bool,
    ticks: Vec<f64>,
}

impl Scale {
    fn new(axis: &Axis, values: &[f64], from_zero: bool) -> Scale {
        let positive = |value: &&f64| !axis.is_log || **value > 0.0;
        let low = values.iter().filter(positive).copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().filter(positive).copied().fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (1.0, 10.0) };
        match axis.is_log {
            true if axis.unit == crate::unit::Unit::Bytes => Scale::powers(low, high),
            true => Scale::decades(low, high),
            false => Scale::steps(if from_zero { low.min(0.0) } else { low }, high),
        }
    }

    /// Ticks at 1, 2 and 5 if there are few decades, else at powers of ten.
    fn decades(low: f64, high: f64) -> Scale {
        let span = (high / low).log10();
        let digits: &[f64] = if span <= 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let all: Vec<f64> = (low.log10().floor() as i32 - 1..=high.log10().ceil() as i32 + 1)
            .flat_map(|power| digits.iter().map(move |digit| digit * 10_f64.powi(power)))
            .collect();
        Scale::around(low, high, true, &all)
    }

    /// Ticks at powers of two, every second or fourth one if there are many.
    fn powers(low: f64, high: f64) -> Scale {
        let first = low.log2().floor() as i32;
        let last = high.log2().ceil() as i32;
        let step = if last - first > 8 { 2 } else { 1 };
        let all: Vec<f64> = (0..)
            .map(|nth| first + nth * step)
            .take_while(|power| *power < last + step)
            .map(|power| 2_f64.powi(power))
            .collect();
        Scale::around(low, high, true, &all)
    }

    /// Ticks at round numbers, about five of them.
    fn steps(low: f64, high: f64) -> Scale {
        // A single value gets a span as large as itself.
        let span = if high > low { high - low } else { low.abs().max(1.0) };
        let rough = (span / 5.0).max(f64::MIN_POSITIVE);
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
        let step = step.into_iter().find(|step| *step >= rough).unwrap_or(power);
        let first = (low / step).floor() as i64;
        let all: Vec<f64> = (first..first + 12).map(|nth| nth as f64 * step).collect();
        Scale::around(low, high, false, &all)
    }

    /// From the last tick below everything to the first one above.
    fn around(low: f64, high: f64, is_log: bool, all: &[f64]) -> Scale {
        let below = all.iter().rposition(|tick| *tick <= low * 1.000_001).unwrap_or(0);
        let above = all.iter().position(|tick| *tick >= high * 0.999_999);
        let above = above.unwrap_or(all.len() - 1).max(below + 1).min(all.len() - 1);
        let ticks = all[below..=above].to_vec();
        Scale { low: ticks[0], high: ticks[ticks.len() - 1], is_log, ticks }
    }

    /// Percentiles: the rarer, the more room.
    fn rarity(highest: f64) -> Scale {
        let last = PERCENTS.iter().position(|tick| *tick >= highest).unwrap_or(6).max(2);
        Scale { low: 0.0, high: PERCENTS[last], is_log: false, ticks: PERCENTS[..=last].to_vec() }
    }

    /// 0 for the lowest, 1 for the highest.
    fn part(&self, value: f64) -> f64 {
        let (low, high, value) = match self.is_log {
            true => (self.low.log10(), self.high.log10(), value.max(self.low).log10()),
            false => (self.low, self.high, value),
        };
        ((value - low) / (high - low)).clamp(0.0, 1.0)
    }
}

/// How rare something beyond a percentile is, as the number of nines.
fn nines(percent: f64) -> f64 {
    -(1.0 - percent.min(99.9999) / 100.0).log10()
}

/// Draws a plot; the text is a whole `svg` element.
pub fn draw(plot: &Plot) -> String {
    let top = 26.0 + legend_lines(plot) as f64 * LEGEND_LINE;
    let height = top + PLOT_HEIGHT + 48.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {WIDTH} {height}\" \
         role=\"img\" aria-label=\"{title}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"16\" font-weight=\"bold\">{title}</text>\n",
        title = escape(&plot.title)
    );
    legend(&mut out, plot);
    let mut ys: Vec<f64> =
        plot.series.iter().flat_map(|one| one.points.iter().map(|p| p.1)).collect();
    if plot.kind == PlotKind::Bars {
        room_for_bars(&mut ys, plot.y.is_log);
    }
    let y_scale = Scale::new(&plot.y, &ys, true);
    let frame = Frame { top, y: y_scale };
    frame.grid(&mut out, plot);
    match plot.kind {
        PlotKind::Bars => frame.bars(&mut out, plot),
        PlotKind::Lines | PlotKind::Percentiles => frame.lines(&mut out, plot),
    }
    out.push_str("</svg>\n");
    out
}

/// Bars need space for their labels. On an axis without zero they need a whole decade, because
/// small differences would look large otherwise.
fn room_for_bars(values: &mut Vec<f64>, is_log: bool) {
    let low = values.iter().copied().filter(|value| *value > 0.0).fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    if low.is_finite() {
        values.push(high * 1.08);
        if is_log {
            values.push(10_f64.powf((low / 2.0).log10().floor()));
        }
    }
}

/// Text of this length takes this much room.
fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 6.6
}

/// Where each contender's name stands: line and distance from the left.
fn legend_places(plot: &Plot) -> Vec<(usize, f64)> {
    let (mut line, mut x) = (0, LEFT);
    let mut places = Vec::new();
    for series in &plot.series {
        let width = 46.0 + text_width(&series.name);
        if x + width > WIDTH - RIGHT && x > LEFT {
            (line, x) = (line + 1, LEFT);
        }
        places.push((line, x));
        x += width;
    }
    places
}

fn legend_lines(plot: &Plot) -> usize {
    legend_places(plot).last().map_or(0, |(line, _)| line + 1)
}

fn legend(out: &mut String, plot: &Plot) {
    for (nth, (series, (line, x))) in plot.series.iter().zip(legend_places(plot)).enumerate() {
        let y = 34.0 + line as f64 * LEGEND_LINE;
        if plot.kind == PlotKind::Bars {
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"14\" height=\"10\" {}/>",
                y - 8.0,
                bar_style(nth)
            );
        } else {
            let line = format!("{x:.1},{0:.1} {1:.1},{0:.1}", y - 4.0, x + 26.0);
            let _ = writeln!(out, "<polyline points=\"{line}\" {}/>", line_style(nth));
            marker(out, nth, x + 13.0, y - 4.0);
        }
        let text = escape(&series.name);
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"{y:.1}\">{text}</text>", x + 31.0);
    }
}

fn colour(nth: usize) -> &'static str {
    COLOURS[nth % COLOURS.len()]
}

fn line_style(nth: usize) -> String {
    let dashes = DASHES[nth % DASHES.len()];
    format!(
        "fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"{dashes}\"",
        colour(nth)
    )
}

fn bar_style(nth: usize) -> String {
    let opacity = [1.0, 0.75, 0.5][nth / COLOURS.len() % 3];
    format!("fill=\"{}\" fill-opacity=\"{opacity}\" stroke=\"#333333\"", colour(nth))
}

/// A disk, a square, a diamond or a triangle.
fn marker(out: &mut String, nth: usize, x: f64, y: f64) {
    let fill = colour(nth);
    let shape = match nth % 4 {
        0 => format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\""),
        1 => format!("<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\"", x - 3.0, y - 3.0),
        2 => format!("<path d=\"M{x:.1} {:.1}l4 4l-4 4l-4 -4z\"", y - 4.0),
        _ => format!("<path d=\"M{x:.1} {:.1}l4 7l-8 0z\"", y - 4.0),
    };
    let _ = writeln!(out, "{shape} fill=\"{fill}\"/>");
}

/// The field that the numbers are drawn on.
struct Frame {
    top: f64,
    y: Scale,
}

impl Frame {
    fn x_at(&self, part: f64) -> f64 {
        LEFT + part * (WIDTH - LEFT - RIGHT)
    }

    fn y_at(&self, part: f64) -> f64 {
        self.top + (1.0 - part) * PLOT_HEIGHT
    }

    /// Horizontal lines with their numbers, and the name of the axis.
    fn grid(&self, out: &mut String, plot: &Plot) {
        for tick in &self.y.ticks {
            let y = self.y_at(self.y.part(*tick));
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {y:.1}H{:.1}\" stroke=\"#dddddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                y + 4.0,
                escape(&plot.y.unit.tick(*tick))
            );
        }
        let (bottom, middle) = (self.y_at(0.0), self.y_at(0.5));
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {:.1}V{bottom:.1}H{:.1}\" fill=\"none\" stroke=\"#333333\"/>\
             <text x=\"14\" y=\"{middle:.1}\" text-anchor=\"middle\" \
             transform=\"rotate(-90 14 {middle:.1})\">{}</text>",
            self.top,
            WIDTH - RIGHT,
            escape(&plot.y.label)
        );
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            self.x_at(0.5),
            bottom + 38.0,
            escape(&plot.x.label)
        );
    }

    fn x_tick(&self, out: &mut String, part: f64, text: &str) {
        let (x, y) = (self.x_at(part), self.y_at(0.0));
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {y:.1}v5\" stroke=\"#333333\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            y + 19.0,
            escape(text)
        );
    }

    fn lines(&self, out: &mut String, plot: &Plot) {
        let is_rarity = plot.kind == PlotKind::Percentiles;
        let xs: Vec<f64> =
            plot.series.iter().flat_map(|one| one.points.iter().map(|p| p.0)).collect();
        let scale = match is_rarity {
            true => Scale::rarity(xs.iter().copied().fold(0.0, f64::max)),
            false => Scale::new(&plot.x, &xs, false),
        };
        let part = |x: f64| match is_rarity {
            true => nines(x) / nines(scale.high),
            false => scale.part(x),
        };
        for tick in &scale.ticks {
            let text = match is_rarity {
                true => format!("{tick}"),
                false => plot.x.unit.tick(*tick),
            };
            self.x_tick(out, part(*tick).clamp(0.0, 1.0), &text);
        }
        for (nth, series) in plot.series.iter().enumerate() {
            let place = |(x, y): &(f64, f64)| {
                (self.x_at(part(*x).clamp(0.0, 1.0)), self.y_at(self.y.part(*y)))
            };
            let places: Vec<(f64, f64)> = series.points.iter().map(place).collect();
            let points: Vec<String> =
                places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let _ = writeln!(
                out,
                "<polyline class=\"series\" points=\"{}\" {}/>",
                points.join(" "),
                line_style(nth)
            );
            if places.len() <= 24 {
                places.iter().for_each(|(x, y)| marker(out, nth, *x, *y));
            }
        }
    }

    fn bars(&self, out: &mut String, plot: &Plot) {
        let groups = plot.groups.len().max(1) as f64;
        let room = (WIDTH - LEFT - RIGHT) / groups;
        let width = (room * 0.84 / plot.series.len().max(1) as f64).min(70.0);
        for (nth, name) in plot.groups.iter().enumerate() {
            self.x_tick(out, (nth as f64 + 0.5) / groups, name);
        }
        let has_labels = width >= 26.0;
        for (nth, series) in plot.series.iter().enumerate() {
            self.series_bars(out, plot, nth, series, room, width, has_labels);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn series_bars(
        &self,
        out: &mut String,
        plot: &Plot,
        nth: usize,
        series: &Series,
        room: f64,
        width: f64,
        has_labels: bool,
    ) {
        let first = (room - width * plot.series.len() as f64) / 2.0;
        for (group, value) in &series.points {
            let x = LEFT + group * room + first + nth as f64 * width;
            let (y, bottom) = (self.y_at(self.y.part(*value)), self.y_at(0.0));
            let _ = writeln!(
                out,
                "<rect class=\"series\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" \
                 height=\"{:.1}\" {}/>",
                width - 2.0,
                (bottom - y).max(0.5),
                bar_style(nth)
            );
            if has_labels {
                let _ = writeln!(
                    out,
                    "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"10\">{}\
                     </text>",
                    x + width / 2.0 - 1.0,
                    y - 4.0,
                    escape(&plot.y.unit.tick(*value))
                );
            }
        }
    }
}

/// Text between tags or within quotes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Characters that XML cannot hold at all.
            c if c.is_control() && c != '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unit::Unit;

    #[test]
    fn axes_have_round_ticks_around_all_values() {
        let log = Axis::log("", Unit::Number);
        let scale = Scale::new(&log, &[3.0, 40.0], true);
        assert_eq!(scale.ticks, [2.0, 5.0, 10.0, 20.0, 50.0]);
        assert_eq!(Scale::new(&log, &[3.0, 40_000.0], true).ticks.len(), 6);
        let linear = Axis::linear("", Unit::Number);
        assert_eq!(
            Scale::new(&linear, &[30.0, 95.0], true).ticks,
            [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
        );
        let bytes = Axis::log("", Unit::Bytes);
        assert_eq!(
            Scale::new(&bytes, &[512.0, 4096.0], true).ticks,
            [512.0, 1024.0, 2048.0, 4096.0]
        );
        // No values, zeroes and single values still make an axis.
        for values in [&[][..], &[0.0], &[7.0], &[0.025], &[0.0, 0.0]] {
            for axis in [&log, &linear, &bytes] {
                for from_zero in [true, false] {
                    let scale = Scale::new(axis, values, from_zero);
                    assert!(scale.ticks.len() > 1 && scale.part(5.0).is_finite(), "{values:?}");
                }
            }
        }
    }

    #[test]
    fn places_follow_the_scale() {
        let scale = Scale::new(&Axis::log("", Unit::Number), &[1.0, 10_000.0], true);
        assert_eq!([1.0, 100.0, 10_000.0].map(|value| scale.part(value)), [0.0, 0.5, 1.0]);
        assert!((nines(99.9) - 3.0).abs() < 1e-9 && nines(0.0) == 0.0);
        let rarity = Scale::rarity(99.9);
        assert_eq!(rarity.ticks, [0.0, 50.0, 90.0, 99.0, 99.9]);
    }

    #[test]
    fn names_are_escaped_and_bars_counted() {
        let mut plot = Plot::bars("a < b & \"c\"", &["one", "two"], Axis::linear("y", Unit::Ratio));
        plot.add("x", vec![(0.0, 1.0), (1.0, 2.0)]);
        plot.add("y", vec![(0.0, 3.0), (1.0, f64::NAN)]);
        let svg = draw(&plot);
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;"));
        assert_eq!(svg.matches("class=\"series\"").count(), 3);
    }
}
