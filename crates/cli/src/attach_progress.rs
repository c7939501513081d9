//! Progress of opening a cache that takes long, from the thread that opens it to the user's
//! terminal.
//!
//! A server reports it to `create` on the pipe between them, as answers that are followed by
//! others. It does not report an opening that takes less than a second.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use udm::base::attaching::AttachProgress;

/// How long an opening may take before progress is reported.
const PATIENCE: Duration = Duration::from_secs(1);

/// Time between two reports after that.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Time between two plain lines.
pub const LINE_EVERY: Duration = Duration::from_secs(2);

/// The progress of an opening.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Step {
    /// The kind of items that are read.
    pub what: String,
    /// The number of items that were read.
    pub done: u64,
    /// The number of all items, if it is known.
    pub total: Option<u64>,
    /// Seconds since the start.
    pub seconds: f64,
}

impl Step {
    /// `reading entries: 41 % of 300.0 M, 52.1 M/s, 0:04 left`
    fn text(&self) -> String {
        let Step { what, done, total, seconds } = self;
        let rate = *done as f64 / seconds.max(0.001);
        let per_second = count(rate as u64);
        match total {
            None => format!("reading {what}: {} so far, {per_second}/s", count(*done)),
            Some(total) => {
                let percent = done.saturating_mul(100) / (*total).max(1);
                let left = total.saturating_sub(*done) as f64 / rate.max(0.001);
                let (total, left) = (count(*total), clock(left));
                format!("reading {what}: {percent} % of {total}, {per_second}/s, {left} left")
            }
        }
    }
}

/// `999`, `12.3 k`, `4.5 M`
fn count(number: u64) -> String {
    let scaled = |unit: u64, letter: &str| format!("{:.1} {letter}", number as f64 / unit as f64);
    match number {
        0..1_000 => number.to_string(),
        1_000..1_000_000 => scaled(1_000, "k"),
        1_000_000..1_000_000_000 => scaled(1_000_000, "M"),
        _ => scaled(1_000_000_000, "G"),
    }
}

/// `0:12`, `1:02:03`.
pub fn clock(seconds: f64) -> String {
    let seconds = seconds.min(359_999.0).ceil() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

/// Carries out `open`. Once that takes longer than a second, `tell` is called with its progress at
/// regular times.
pub fn watched<T>(
    progress: &AttachProgress,
    mut tell: impl FnMut(&Step) + Send,
    open: impl FnOnce() -> T,
) -> T {
    let (done, is_done) = channel::<()>();
    let started = Instant::now();
    thread::scope(|scope| {
        let tells = move || {
            let mut wait = PATIENCE;
            while is_done.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = LOOK_EVERY;
                if let Some(step) = progress.look() {
                    let what = step.what.to_owned();
                    let seconds = started.elapsed().as_secs_f64();
                    tell(&Step { what, done: step.done, total: step.total, seconds });
                }
            }
        };
        // Without a thread, progress is not reported.
        let _ = thread::Builder::new().name("progress".into()).spawn_scoped(scope, tells);
        let opened = open();
        drop(done);
        opened
    })
}

/// Shows steps on standard error: a line that changes on a terminal, occasional lines elsewhere.
#[derive(Debug)]
pub struct Shown {
    name: String,
    is_terminal: bool,
    printed: Option<Instant>,
}

impl Shown {
    /// Steps of opening `name`.
    pub fn new(name: &str) -> Shown {
        let is_terminal = std::io::stderr().is_terminal();
        Shown { name: name.to_owned(), is_terminal, printed: None }
    }

    /// Shows a step, if it is time.
    pub fn show(&mut self, step: &Step) {
        let line = self.line(step, Instant::now());
        // The work continues even if its progress cannot be shown.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn line(&mut self, step: &Step, now: Instant) -> String {
        let is_due = self.printed.is_none_or(|at| now - at >= LINE_EVERY);
        if !self.is_terminal && !is_due {
            return String::new();
        }
        self.printed = Some(now);
        match self.is_terminal {
            true => format!("\r{}: {}\x1b[K", self.name, step.text()),
            false => format!("{}: {}\n", self.name, step.text()),
        }
    }
}

impl Drop for Shown {
    /// Removes the line from the terminal.
    fn drop(&mut self) {
        if self.is_terminal && self.printed.is_some() {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(done: u64, total: Option<u64>) -> Step {
        Step { what: "keys of the log".into(), done, total, seconds: 2.0 }
    }

    #[test]
    fn steps_in_words() {
        let text = step(123_456_789, None).text();
        assert_eq!(text, "reading keys of the log: 123.5 M so far, 61.7 M/s");
        let text = step(100, Some(400)).text();
        assert_eq!(text, "reading keys of the log: 25 % of 400, 50/s, 0:06 left");
    }

    #[test]
    fn elsewhere_than_on_a_terminal_a_line_comes_now_and_then() {
        let start = Instant::now();
        let mut shown = Shown { name: "vol".into(), is_terminal: false, printed: None };
        let lines: Vec<String> = (0..100)
            .map(|nth| shown.line(&step(nth, None), start + nth as u32 * LOOK_EVERY))
            .collect();
        let said = lines.iter().filter(|line| !line.is_empty()).count();
        assert_eq!(said, 13, "every two seconds of 25");
        assert!(lines.iter().all(|line| line.is_empty() || line.ends_with("/s\n")));
        shown.is_terminal = true;
        assert!(shown.line(&step(7, None), start).starts_with("\rvol: reading"));
        shown.printed = None;
    }
}
