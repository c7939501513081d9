//! Requests over time: how many ended in each slice, and how long the longest of them took.
//!
//! Means and percentiles hide a stall that each repeat has at another moment; slices show it.

use std::time::{Duration, Instant};

/// Requests by slices of time, from a common beginning.
#[derive(Clone, Debug)]
pub struct Timeline {
    slice: Duration,
    /// Requests that ended in each slice.
    counts: Vec<u64>,
    /// The longest of them, in nanoseconds.
    worst: Vec<u64>,
    /// When the present slice ends; none has begun before the first request.
    until: Option<Instant>,
}

impl Timeline {
    /// A timeline without requests.
    pub fn new(slice: Duration) -> Timeline {
        let (counts, worst) = (Vec::new(), Vec::new());
        Timeline { slice: slice.max(Duration::from_millis(1)), counts, worst, until: None }
    }

    /// Begins; the room for slices is taken now, so that counting takes no memory.
    pub fn begin(&mut self, now: Instant, expected: Duration) {
        let slices = expected.as_nanos() / self.slice.as_nanos();
        let slices = slices.min(1 << 16) as usize + 64;
        self.counts.reserve(slices);
        self.worst.reserve(slices);
        self.until = Some(now);
    }

    /// Counts a request that ended now.
    #[inline]
    pub fn add(&mut self, now: Instant, nanos: u64) {
        let Some(mut until) = self.until else { return };
        while now >= until {
            until += self.slice;
            self.counts.push(0);
            self.worst.push(0);
            self.until = Some(until);
        }
        if let (Some(count), Some(worst)) = (self.counts.last_mut(), self.worst.last_mut()) {
            *count += 1;
            *worst = (*worst).max(nanos);
        }
    }

    /// Counts what `other` has counted, from the same beginning.
    pub fn merge(&mut self, other: &Timeline) {
        let len = self.counts.len().max(other.counts.len());
        self.counts.resize(len, 0);
        self.worst.resize(len, 0);
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        for (worst, more) in self.worst.iter_mut().zip(&other.worst) {
            *worst = (*worst).max(*more);
        }
    }

    /// Requests per second at the middle of each slice, in seconds since the beginning. The last
    /// slice did not last; it is shown only if it is alone.
    pub fn rates(&self) -> Vec<(f64, f64)> {
        let seconds = self.slice.as_secs_f64();
        let whole = self.counts.len().saturating_sub(1).max(1);
        let point =
            |(nth, count): (usize, &u64)| ((nth as f64 + 0.5) * seconds, *count as f64 / seconds);
        self.counts.iter().enumerate().take(whole).map(point).collect()
    }

    /// The lowest and the highest rate over this many slices in a row, as parts of the mean rate.
    /// Slices that begin before `from`, and the last one, which did not last, do not count.
    pub fn extremes(&self, from: Duration, slices: usize) -> (f64, f64) {
        let first = from.as_nanos().div_ceil(self.slice.as_nanos()) as usize;
        let whole = self.counts.split_last().map_or(&[][..], |(_, whole)| whole);
        let whole = whole.get(first..).unwrap_or(&[]);
        let mean = whole.iter().sum::<u64>() as f64 / whole.len().max(1) as f64;
        if whole.len() < slices.max(1) {
            return (0.0, 0.0);
        }
        let rates = whole
            .windows(slices.max(1))
            .map(|window| window.iter().sum::<u64>() as f64 / window.len() as f64 / mean.max(1e-9));
        rates.fold((f64::INFINITY, 0.0), |(low, high), rate| (rate.min(low), rate.max(high)))
    }

    /// The longest request of each slice, in nanoseconds.
    pub fn worst(&self) -> Vec<(f64, f64)> {
        let seconds = self.slice.as_secs_f64();
        let point = |(nth, worst): (usize, &u64)| ((nth as f64 + 0.5) * seconds, *worst as f64);
        self.worst.iter().enumerate().map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_in_their_slices_and_stalls_are_slices_without_any() {
        let begun = Instant::now();
        let at = |millis: u64| begun + Duration::from_millis(millis);
        let mut one = Timeline::new(Duration::from_millis(10));
        one.begin(begun, Duration::from_millis(100));
        for (millis, nanos) in [(1, 5), (9, 7), (31, 900), (45, 3)] {
            one.add(at(millis), nanos);
        }
        let mut two = Timeline::new(Duration::from_millis(10));
        two.begin(begun, Duration::from_millis(100));
        two.add(at(12), 50);
        two.merge(&one);
        let rates: Vec<f64> = two.rates().iter().map(|(_, rate)| *rate).collect();
        assert_eq!(rates, [200.0, 100.0, 0.0, 100.0], "the last slice did not last");
        let worst: Vec<f64> = two.worst().iter().map(|(_, worst)| *worst).collect();
        assert_eq!(worst, [7.0, 50.0, 0.0, 900.0, 3.0]);
        assert!((two.rates()[1].0 - 0.015).abs() < 1e-9);
    }

    #[test]
    fn extremes_are_those_of_whole_windows() {
        let counts = vec![4, 0, 2, 6, 100];
        let timeline = Timeline { counts, ..Timeline::new(Duration::from_millis(20)) };
        assert_eq!(
            timeline.extremes(Duration::ZERO, 1),
            (0.0, 2.0),
            "the mean is 3; the last slice is cut off"
        );
        assert_eq!(timeline.extremes(Duration::ZERO, 2), (1.0 / 3.0, 4.0 / 3.0));
        assert_eq!(timeline.extremes(Duration::from_millis(21), 2), (1.0, 1.0));
        assert_eq!(timeline.extremes(Duration::from_millis(21), 3), (0.0, 0.0), "none is whole");
    }

    #[test]
    fn what_ends_within_one_slice_is_shown() {
        let begun = Instant::now();
        let mut short = Timeline::new(Duration::from_millis(10));
        assert!(short.rates().is_empty());
        short.begin(begun, Duration::ZERO);
        short.add(begun, 1);
        assert_eq!(short.rates().len(), 1);
    }
}
