//! Medians, percentiles, spreads, and a histogram of times that takes no memory while it counts.

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

/// The median of numbers in any order: of an even count, the mean of the two in the middle.
pub fn median(numbers: &[f64]) -> f64 {
    let sorted = sorted(numbers);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len.is_multiple_of(2) => sorted[middle - 1].midpoint(sorted[middle]),
        _ => sorted[middle],
    }
}

/// The arithmetic mean; 0 for an empty slice.
pub fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// Each round's number of one contender over that of another.
pub fn ratios(of: &[f64], over: &[f64]) -> Vec<f64> {
    of.iter().zip(over).map(|(of, over)| of / over).collect()
}

/// How far repeats are apart, as a part of their median. With five and more, the highest and the
/// lowest do not count.
pub fn spread(repeats: &[f64]) -> f64 {
    let sorted = sorted(repeats);
    let inner = if sorted.len() >= 5 { &sorted[1..sorted.len() - 1] } else { &sorted[..] };
    match (inner.first(), inner.last(), percentile(inner, 50.0)) {
        (Some(low), Some(high), middle) if middle > 0.0 => (high - low) / middle,
        _ => 0.0,
    }
}

/// Parts of each power of two.
const PARTS: u64 = 64;
const PART_BITS: u32 = PARTS.ilog2();
const BUCKETS: usize = ((64 - PART_BITS as usize) + 1) * PARTS as usize;

/// Counts of times in nanoseconds, each within 1.6 % of the measured time.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    count: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { counts: vec![0; BUCKETS].into(), count: 0, sum: 0, max: 0 }
    }
}

impl Histogram {
    /// Counts a time.
    pub fn add(&mut self, nanos: u64) {
        self.counts[bucket(nanos)] += 1;
        self.count += 1;
        self.sum += u128::from(nanos);
        self.max = self.max.max(nanos);
    }

    /// Counts all that `other` has counted.
    pub fn merge(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The longest of them, in nanoseconds.
    pub fn worst(&self) -> f64 {
        self.max as f64
    }

    /// Their mean, in nanoseconds.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.count.max(1) as f64
    }

    /// The time that `percent` of them do not exceed, in nanoseconds.
    pub fn percentile(&self, percent: f64) -> f64 {
        let wanted = (percent / 100.0 * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (nth, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return middle(nth).min(self.max as f64);
            }
        }
        self.max as f64
    }
}

fn bucket(nanos: u64) -> usize {
    if nanos < PARTS {
        return nanos as usize;
    }
    let power = nanos.ilog2() - PART_BITS;
    (u64::from(power + 1) * PARTS + ((nanos >> power) - PARTS)) as usize
}

/// The middle of a bucket's range.
fn middle(bucket: usize) -> f64 {
    let bucket = bucket as u64;
    if bucket < PARTS {
        return bucket as f64;
    }
    let power = (bucket / PARTS - 1) as u32;
    let low = (PARTS + bucket % PARTS) as f64;
    (low + 0.5) * 2_f64.powi(power as i32) - 0.5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[8.0, 1.0, 2.0, 4.0]), 3.0);
        assert_eq!((median(&[1.0, 2.0]), median(&[])), (1.5, 0.0));
        assert_eq!(percentile(&[], 50.0), 0.0);
        let numbers: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(percentile(&numbers, 99.0), 99.0);
        assert_eq!(spread(&[9.0, 10.0, 11.0]), 0.2);
        assert_eq!(spread(&[1.0, 9.0, 10.0, 11.0, 100.0]), 0.2, "the extremes do not count");
        assert_eq!(spread(&[]), 0.0);
    }

    #[test]
    fn a_histogram_keeps_times_within_two_percent() {
        for nanos in (0..60).map(|bit| 1_u64 << bit).chain([0, 63, 64, 65, 12345, u64::MAX]) {
            let found = middle(bucket(nanos));
            let error = (found - nanos as f64).abs() / (nanos as f64).max(1.0);
            assert!(error < 0.016, "{nanos} became {found}");
        }
        let mut histogram = Histogram::default();
        let mut other = Histogram::default();
        (1..=500).for_each(|nth| histogram.add(nth * 1000));
        (501..=1000).for_each(|nth| other.add(nth * 1000));
        histogram.merge(&other);
        assert_eq!(histogram.count(), 1000);
        assert!((histogram.mean() - 500_500.0).abs() < 1.0);
        assert!((histogram.percentile(50.0) / 500_000.0 - 1.0).abs() < 0.016);
        assert!((histogram.percentile(99.9) / 999_000.0 - 1.0).abs() < 0.016);
        assert_eq!(histogram.percentile(100.0), 1_000_000.0);
    }
}
