//! The kernel's memory counters over time: /proc/meminfo, read repeatedly.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often it is read: often enough for a burst, and below a percent of a processor.
pub const EVERY: Duration = Duration::from_millis(5);

/// The lines that tell of the page cache, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Meminfo {
    /// Pages of block devices.
    pub buffers: f64,
    /// Pages of files.
    pub cached: f64,
    /// Of both: waiting to be written out.
    pub dirty: f64,
    /// Of both: on their way.
    pub writeback: f64,
}

/// The four, by the kernel's names.
pub const NAMES: [&str; 4] = ["Buffers", "Cached", "Dirty", "Writeback"];

impl Meminfo {
    /// As it is now.
    pub fn now() -> Meminfo {
        Meminfo::parse(&fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    /// Lines that are not there, or not understood, count as 0.
    fn parse(text: &str) -> Meminfo {
        let bytes = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = value.and_then(|value| value.split_whitespace().next());
            number.and_then(|number| number.parse::<u64>().ok()).unwrap_or(0) as f64 * 1024.0
        };
        let [buffers, cached, dirty, writeback] = NAMES.map(bytes);
        Meminfo { buffers, cached, dirty, writeback }
    }

    /// In the order of [`NAMES`].
    pub fn values(&self) -> [f64; 4] {
        [self.buffers, self.cached, self.dirty, self.writeback]
    }
}

/// The samples, from the first one on.
#[derive(Clone, Debug)]
pub struct Seen(Vec<(f64, Meminfo)>);

impl Seen {
    /// How much each has grown at most since the first look, in the order of [`NAMES`].
    pub fn growth(&self) -> [f64; 4] {
        let mut most = [0.0; 4];
        for (_, grown) in self.over_time() {
            for (most, grown) in most.iter_mut().zip(grown) {
                *most = f64::max(*most, grown);
            }
        }
        most
    }

    /// The growth of each counter since the first sample, at least 0. Time is in seconds.
    pub fn over_time(&self) -> impl Iterator<Item = (f64, [f64; 4])> {
        let first = self.0.first().map_or([0.0; 4], |(_, first)| first.values());
        self.0.iter().map(move |(seconds, now)| {
            let mut grown = now.values();
            for (grown, first) in grown.iter_mut().zip(first) {
                *grown = (*grown - first).max(0.0);
            }
            (*seconds, grown)
        })
    }
}

/// Looks at memory before `work`, while it runs, and after it.
pub fn during<T>(work: impl FnOnce() -> T) -> (T, Seen) {
    let begun = Instant::now();
    let first = Meminfo::now();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = vec![(0.0, first)];
            loop {
                let is_last = is_over.load(Ordering::Relaxed);
                seen.push((begun.elapsed().as_secs_f64(), Meminfo::now()));
                if is_last {
                    return Seen(seen);
                }
                std::thread::sleep(EVERY);
            }
        });
        // Also if the work panics: else the watcher would be waited for without end.
        let end = EndsWatch(&is_over);
        let done = work();
        drop(end);
        (done, watcher.join().expect("looking does not panic"))
    })
}

/// Ends the watch when it is dropped.
struct EndsWatch<'a>(&'a AtomicBool);

impl Drop for EndsWatch<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lines_are_understood_and_nonsense_is_nothing() {
        let text = "MemTotal: 9 kB\nBuffers:  85580 kB\nCached:   2 kB\nSwapCached: 7 kB\n\
                    Dirty: -3 kB\nWriteback:\nWritebackTmp: 5 kB\n";
        let expected = Meminfo { buffers: 85580.0 * 1024.0, cached: 2048.0, ..Meminfo::default() };
        assert_eq!(Meminfo::parse(text), expected);
        assert_eq!(Meminfo::parse(""), Meminfo::default());
    }

    #[test]
    fn growth_is_the_most_above_the_first_look() {
        let at = |buffers, cached| Meminfo { buffers, cached, ..Meminfo::default() };
        let seen = Seen(vec![(0.0, at(10.0, 50.0)), (0.1, at(35.0, 20.0)), (0.2, at(15.0, 51.0))]);
        assert_eq!(seen.growth(), [25.0, 1.0, 0.0, 0.0]);
        let buffers: Vec<f64> = seen.over_time().map(|(_, grown)| grown[0]).collect();
        assert_eq!(buffers, [0.0, 25.0, 5.0]);
        let (done, seen) = during(|| 7);
        assert!(done == 7 && seen.0.len() >= 2);
    }
}
