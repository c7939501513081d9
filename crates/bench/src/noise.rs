//! Whether the machine was quiet enough for its numbers to be trusted.
//!
//! Three signs: time that the hypervisor gave to others while this machine wanted to run (steal),
//! time that other processes of this machine used, and how far repeats of one measure are apart.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::stats::median;

/// Steal may take this much of the processors' busy time, in percent.
const STEAL_PERCENT_MAX: f64 = 3.0;
/// Others may use this much of the whole machine, in percent.
const OTHERS_PERCENT_MAX: f64 = 10.0;
/// Repeats of a study's measures may be so far apart, as the median over its measures, in percent.
const SPREAD_PERCENT_MAX: f64 = 25.0;

/// The observations during one study.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Noise {
    /// Part of the busy time that the hypervisor took away, in percent.
    pub steal_percent: f64,
    /// Part of all processors that other processes used, in percent.
    pub others_percent: f64,
    /// How far the repeats of the study's measures are apart, in percent of their median.
    pub spread_percent: f64,
    /// Whether the numbers can be trusted.
    pub is_quiet: bool,
    /// In words.
    pub verdict: String,
}

/// Processor time, in the kernel's ticks.
#[derive(Clone, Copy, Debug, Default)]
struct Ticks {
    /// Time of all processes, without idle, waiting and stolen time.
    busy: u64,
    idle: u64,
    steal: u64,
    /// Our own and that of our children that have ended.
    own: u64,
}

/// Watches from its making on.
#[derive(Debug)]
pub struct Watch {
    before: Ticks,
    started: Instant,
}

impl Watch {
    /// Starts watching.
    pub fn new() -> Watch {
        Watch { before: Ticks::now(), started: Instant::now() }
    }

    /// Seconds since then.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// The observations since then. `spreads`: of each main measure, over its repeats.
    pub fn judge(&self, spreads: &[f64]) -> Noise {
        let now = Ticks::now();
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let busy = since(now.busy, self.before.busy);
        let idle = since(now.idle, self.before.idle);
        let steal = since(now.steal, self.before.steal);
        let others = (busy - since(now.own, self.before.own)).max(0.0);
        Noise::new(
            100.0 * steal / (busy + steal).max(1.0),
            100.0 * others / (busy + idle + steal).max(1.0),
            100.0 * median(spreads),
        )
    }
}

impl Default for Watch {
    fn default() -> Watch {
        Watch::new()
    }
}

impl Noise {
    fn new(steal_percent: f64, others_percent: f64, spread_percent: f64) -> Noise {
        let verdict = String::new();
        let is_quiet = false;
        let mut noise = Noise { steal_percent, others_percent, spread_percent, is_quiet, verdict };
        let reasons = noise.reasons();
        noise.is_quiet = reasons.is_empty();
        noise.verdict = match noise.is_quiet {
            true => format!(
                "quiet enough: stolen {steal_percent:.1} %, others {others_percent:.1} %, \
                 repeats {spread_percent:.0} % apart"
            ),
            false => format!(
                "TOO NOISY to trust absolute numbers: {reasons}; ratios within this run say more"
            ),
        };
        noise
    }

    /// The kinds of noise above their limits, in words; empty for a quiet machine.
    pub fn reasons(&self) -> String {
        let Noise { steal_percent, others_percent, spread_percent, .. } = *self;
        let mut reasons = Vec::new();
        if steal_percent > STEAL_PERCENT_MAX {
            reasons.push(format!("the hypervisor took {steal_percent:.0} % of the time away"));
        }
        if others_percent > OTHERS_PERCENT_MAX {
            reasons.push(format!("other processes used {others_percent:.0} % of the machine"));
        }
        if spread_percent > SPREAD_PERCENT_MAX {
            reasons.push(format!("repeats are {spread_percent:.0} % apart"));
        }
        reasons.join(", ")
    }
}

impl Ticks {
    /// The kernel's counters; zeroes if it has none.
    fn now() -> Ticks {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        Ticks::parse(&read("/proc/stat"), &read("/proc/self/stat"))
    }

    fn parse(machine: &str, own: &str) -> Ticks {
        let numbers = |text: &str| -> Vec<u64> {
            text.split_whitespace().map(|word| word.parse().unwrap_or_default()).collect()
        };
        // user nice system idle iowait irq softirq steal
        let line = machine.lines().find_map(|line| line.strip_prefix("cpu "));
        let all = numbers(line.unwrap_or_default());
        let nth = |nth: usize| all.get(nth).copied().unwrap_or_default();
        // Fields are counted after the name, which may hold anything.
        let fields = numbers(own.rsplit(')').next().unwrap_or_default());
        Ticks {
            busy: nth(0) + nth(1) + nth(2) + nth(5) + nth(6),
            idle: nth(3) + nth(4),
            steal: nth(7),
            own: fields.iter().skip(11).take(4).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_numbers_are_understood() {
        let own = "12 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 100 20 3 4 20 0 5 0";
        let ticks = Ticks::parse("cpu  10 20 30 400 50 6 7 8 0 0\ncpu0 1 2\n", own);
        assert_eq!((ticks.busy, ticks.idle, ticks.steal, ticks.own), (73, 450, 8, 127));
    }

    #[test]
    fn noise_is_named() {
        assert!(Noise::new(0.5, 3.0, 10.0).is_quiet);
        let noise = Noise::new(10.0, 3.0, 60.0);
        assert!(!noise.is_quiet);
        assert!(noise.verdict.contains("took 10 %") && noise.verdict.contains("60 % apart"));
        assert!(!noise.verdict.contains("other processes"));
    }
}
