//! Progress of work that moves data: a bar on a terminal, plain lines elsewhere.
//!
//! The caller reports the number of bytes left, again and again. Clients may write meanwhile, so
//! the total is the sum of the bytes done so far and the bytes left, not the first number.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use udm::units::human_bytes;

use crate::attach_progress::{LINE_EVERY, clock};

/// Weight of the newest sample in the smoothed rate, per second of its length.
const RATE_WEIGHT_PER_SECOND: f64 = 0.5;

/// Room for the numbers after the bar, so that the bar does not move when they grow.
const NUMBERS_CHARS: usize = 52;

/// Work without progress for this long is reported.
const STILL_MAX: Duration = Duration::from_secs(15);

/// The width of a terminal that does not report its width.
const WIDTH_DEFAULT: usize = 80;

/// The name for the device that the work waits for, if that device is unknown.
const SOME_DEVICE: &str = "the origin or the cache device";

/// The message about write-back without progress.
const WRITE_BACK_IS_STILL: &str = "does not answer; no data is lost (Ctrl-C stops waiting, and the \
                                   rest stays in the cache)";

/// The message about a wipe without progress.
const WIPE_IS_STILL: &str = "does not answer; no data is lost, all of it is written back (Ctrl-C \
                             stops waiting)";

/// Watches a number of bytes fall to zero.
#[derive(Debug)]
pub struct Progress {
    what: String,
    is_still: &'static str,
    /// The device that the work waits for.
    waits_for: String,
    is_terminal: bool,
    width: usize,
    started: Instant,
    sampled: Instant,
    printed: Option<Instant>,
    left: Option<u64>,
    done: u64,
    rate: Option<f64>,
    is_failing: bool,
    moved: Instant,
    is_stuck: bool,
}

impl Progress {
    /// Progress of `what` ("drain vol"), on standard error.
    pub fn new(what: impl Into<String>) -> Progress {
        let stderr = std::io::stderr();
        let is_terminal = stderr.is_terminal();
        let width = rustix::termios::tcgetwinsize(&stderr).map_or(0, |size| size.ws_col.into());
        let width = if width == 0 { WIDTH_DEFAULT } else { width };
        Progress::with(what.into(), is_terminal, width, Instant::now())
    }

    /// The same of a wipe.
    pub fn of_wipe(what: impl Into<String>) -> Progress {
        let waits_for = "the cache device".into();
        Progress { is_still: WIPE_IS_STILL, waits_for, ..Progress::new(what) }
    }

    fn with(what: String, is_terminal: bool, width: usize, now: Instant) -> Progress {
        Progress {
            what,
            is_still: WRITE_BACK_IS_STILL,
            waits_for: SOME_DEVICE.into(),
            is_terminal,
            width,
            started: now,
            sampled: now,
            printed: None,
            left: None,
            done: 0,
            rate: None,
            is_failing: false,
            moved: now,
            is_stuck: false,
        }
    }

    /// Write-back waits for this device, if that is known.
    pub fn wait_for(&mut self, device: Option<&str>) {
        device.unwrap_or(SOME_DEVICE).clone_into(&mut self.waits_for);
    }

    /// `left` bytes are to do; `is_failing` if the origin refuses them at the moment.
    pub fn update(&mut self, left: u64, is_failing: bool) {
        let now = Instant::now();
        self.sample(left, now);
        if is_failing != self.is_failing {
            self.is_failing = is_failing;
            self.say(if is_failing {
                "the origin fails; no data is lost: udm retries with growing pauses (Ctrl-C stops \
                 waiting, and the rest stays in the cache)"
            } else {
                "the origin works again"
            });
        }
        self.watch_stillness(now);
        if left == 0 && self.done == 0 {
            return;
        }
        let is_due = self.printed.is_none_or(|at| now - at >= LINE_EVERY);
        if self.is_terminal || is_due {
            self.printed = Some(now);
            self.show();
        }
    }

    /// Prints one line when progress has stopped without an error, and one when it continues.
    fn watch_stillness(&mut self, now: Instant) {
        let is_stuck = !self.is_failing && now - self.moved >= STILL_MAX;
        if is_stuck == self.is_stuck {
            return;
        }
        self.is_stuck = is_stuck;
        let seconds = STILL_MAX.as_secs();
        match is_stuck {
            true => {
                let (who, what) = (&self.waits_for, self.is_still);
                self.say(&format!("no progress for {seconds} s: {who} {what}"));
            }
            false => self.say("it continues"),
        }
    }

    /// The work is done: prints the amount and the time that it took.
    pub fn finish(&mut self) {
        self.sample(0, Instant::now());
        let seconds = self.started.elapsed().as_secs_f64();
        if self.done > 0 {
            let rate = human_bytes((self.done as f64 / seconds.max(0.001)) as u64);
            self.say(&format!("{} in {seconds:.1} s, {rate}/s", human_bytes(self.done)));
        }
    }

    /// Stops drawing the bar, so that other output begins on a new line.
    pub fn pause(&self) {
        if self.is_terminal && self.printed.is_some() {
            self.write("\n");
        }
    }

    /// Bytes done so far.
    pub fn done_bytes(&self) -> u64 {
        self.done
    }

    fn sample(&mut self, left: u64, now: Instant) {
        if self.left != Some(left) {
            self.moved = now;
        }
        if let Some(before) = self.left {
            let moved = before.saturating_sub(left);
            self.done += moved;
            let seconds = (now - self.sampled).as_secs_f64();
            if seconds > 0.0 {
                let fresh = moved as f64 / seconds;
                let weight = (RATE_WEIGHT_PER_SECOND * seconds).clamp(0.02, 1.0);
                let rate = self.rate.map_or(fresh, |old| old + (fresh - old) * weight);
                self.rate = Some(rate);
            }
        }
        self.left = Some(left);
        self.sampled = now;
    }

    /// One plain line, above the bar if there is one.
    fn say(&mut self, text: &str) {
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        self.write(&format!("{clear}{}: {text}\n", self.what));
    }

    fn show(&mut self) {
        if self.is_terminal {
            self.write(&format!("\r{}\x1b[K", self.bar()));
        } else {
            self.write(&format!("{}: {}\n", self.what, self.numbers()));
        }
    }

    fn write(&self, text: &str) {
        // The work continues even if its progress cannot be shown.
        let _ = std::io::stderr().write_all(text.as_bytes());
    }

    fn fraction(&self) -> f64 {
        let left = self.left.unwrap_or(0);
        let whole = self.done + left;
        if whole == 0 { 1.0 } else { self.done as f64 / whole as f64 }
    }

    /// `62 %  198.4 MiB of 320.0 MiB  412.3 MiB/s  0:12 left`
    fn numbers(&self) -> String {
        let left = self.left.unwrap_or(0);
        let mut text = format!(
            "{:3.0} %  {} of {}",
            (self.fraction() * 100.0).floor(),
            human_bytes(self.done),
            human_bytes(self.done + left)
        );
        let rate = self.rate.unwrap_or(0.0);
        if rate >= 1.0 {
            text += &format!("  {}/s", human_bytes(rate as u64));
            if left > 0 && !self.is_failing {
                text += &format!("  {} left", clock(left as f64 / rate));
            }
        }
        if self.is_failing {
            text += "  origin fails";
        }
        text
    }

    fn bar(&self) -> String {
        let numbers = self.numbers();
        let around = self.what.len() + numbers.len().max(NUMBERS_CHARS) + 5;
        let room = self.width.saturating_sub(around).min(40);
        if room < 8 {
            let line = format!("{} {numbers}", self.what);
            return line.chars().take(self.width.saturating_sub(1)).collect();
        }
        let full = (self.fraction() * room as f64) as usize;
        let bar = format!("{}{}", "=".repeat(full), " ".repeat(room - full));
        format!("{} [{bar}] {numbers}", self.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn bytes_rate_and_time_left() {
        let start = Instant::now();
        let mut progress = Progress::with("drain vol".into(), true, 100, start);
        progress.sample(300 * MIB, start);
        assert_eq!(progress.numbers(), "  0 %  0 B of 300.0 MiB");
        progress.sample(200 * MIB, start + Duration::from_secs(1));
        assert_eq!(progress.numbers(), " 33 %  100.0 MiB of 300.0 MiB  100.0 MiB/s  0:02 left");
        assert!(progress.bar().len() < 100 && progress.bar().contains("[==="));
        // Clients wrote 50 MiB more: the total grows, the part that is done does not change.
        progress.sample(250 * MIB, start + Duration::from_secs(2));
        assert!(progress.numbers().starts_with(" 28 %  100.0 MiB of 350.0 MiB"));
    }

    #[test]
    fn what_does_not_move_is_noticed() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut progress = Progress::with("drain vol".into(), false, 80, start);
        for (at, left, is_stuck) in
            [(0, 9, false), (14, 9, false), (15, 9, true), (99, 9, true), (100, 8, false)]
        {
            progress.sample(left, after(at));
            progress.watch_stillness(after(at));
            assert_eq!(progress.is_stuck, is_stuck, "after {at} s");
        }
        // A failing origin is a different condition, which is reported elsewhere.
        progress.is_failing = true;
        progress.watch_stillness(after(200));
        assert!(!progress.is_stuck);
    }

    #[test]
    fn narrow_terminals_and_long_waits() {
        let start = Instant::now();
        let mut progress = Progress::with("drain vol".into(), true, 20, start);
        progress.sample(300 * MIB, start);
        assert!(progress.bar().len() < 20);
        assert_eq!(clock(61.2), "1:02");
        assert_eq!(clock(3723.0), "1:02:03");
        assert_eq!(clock(f64::INFINITY), "99:59:59");
    }
}
