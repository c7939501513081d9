//! Units of numbers, and how they are printed.

use serde::{Deserialize, Serialize};

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Just a number.
    Number,
    /// Operations per second.
    PerSecond,
    /// Nanoseconds.
    Nanos,
    /// Millions of bytes per second.
    MbPerSecond,
    /// Bytes.
    Bytes,
    /// This many times as much.
    Ratio,
    /// Parts of a hundred.
    Percent,
}

impl Unit {
    /// A value as people read it.
    pub fn text(self, value: f64) -> String {
        match self {
            Unit::Number => plain(value),
            Unit::PerSecond => thousands(value),
            Unit::Nanos => time(value),
            Unit::MbPerSecond => plain(value),
            Unit::Bytes => bytes(value),
            Unit::Ratio => format!("{}x", plain(value)),
            Unit::Percent => format!("{} %", plain(value)),
        }
    }

    /// The unit, in a word; empty for bare numbers.
    pub fn plain(self) -> &'static str {
        match self {
            Unit::Number => "",
            Unit::PerSecond => "1/s",
            Unit::Nanos => "ns",
            Unit::MbPerSecond => "MB/s",
            Unit::Bytes => "bytes",
            Unit::Ratio => "ratio",
            Unit::Percent => "%",
        }
    }

    /// A value on an axis: as short as can be.
    pub fn tick(self, value: f64) -> String {
        match self {
            Unit::Nanos => short(self.text(value)),
            Unit::Bytes => bytes(value),
            Unit::Ratio => format!("{}x", short(thousands(value))),
            Unit::Percent => format!("{} %", short(plain(value))),
            _ => short(thousands(value)),
        }
    }
}

/// Three digits or so.
fn plain(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn scaled(value: f64, steps: &[(f64, &str)]) -> String {
    for (size, name) in steps {
        // What would be printed as 1000 belongs to the next step.
        if value.abs() >= size * 0.9995 {
            return format!("{} {name}", plain(value / size));
        }
    }
    plain(value)
}

fn thousands(value: f64) -> String {
    scaled(value, &[(1e9, "G"), (1e6, "M"), (1e3, "K")])
}

fn time(nanos: f64) -> String {
    if nanos.abs() < 999.5 {
        return format!("{nanos:.0} ns");
    }
    scaled(nanos, &[(1e9, "s"), (1e6, "ms"), (1e3, "us")])
}

fn bytes(value: f64) -> String {
    let steps = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    for (bits, name) in steps {
        let size = f64::from(1_u32 << bits);
        if value >= size {
            let whole = value / size;
            let is_whole = whole.fract() == 0.0;
            return if is_whole { format!("{whole} {name}") } else { format!("{whole:.1} {name}") };
        }
    }
    format!("{value:.0} B")
}

/// Without insignificant zeroes: `1.00 K` is `1 K`.
fn short(text: String) -> String {
    let (number, name) = text.split_once(' ').unwrap_or((&text, ""));
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    if name.is_empty() { number.into() } else { format!("{number} {name}") }
}

#[cfg(test)]
mod tests {
    use super::Unit;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(Unit::PerSecond.text(1_380_000.0), "1.38 M");
        assert_eq!(Unit::PerSecond.text(999_900.0), "1.00 M");
        assert_eq!(Unit::PerSecond.tick(20_000.0), "20 K");
        assert_eq!(Unit::Nanos.text(415.4), "415 ns");
        assert_eq!(Unit::Nanos.text(15_600.0), "15.6 us");
        assert_eq!(Unit::Nanos.tick(1e6), "1 ms");
        assert_eq!(Unit::Bytes.text(1024.0 * 768.0), "768 KiB");
        assert_eq!(Unit::Bytes.text(512.0), "512 B");
        assert_eq!(Unit::Ratio.text(3.8), "3.80x");
    }
}
