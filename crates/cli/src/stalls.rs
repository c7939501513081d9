//! Devices below that do not answer the background I/O of a table line: write-back, commits.
//!
//! A thread looks every second. A line stalls when it waits for the same device for
//! [`SLOW_SECONDS`], and none of its background I/O ends in that time.

use std::time::{Duration, Instant};

use udm::device::SLOW_SECONDS;
use udm::sync::{Mutex, lock};
use udm::target::Waiting;

/// A line that waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    start: u64,
    waiting: Waiting,
    since: Instant,
    /// The stall was logged.
    is_logged: bool,
}

/// A line that stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The sector where the line begins.
    pub start: u64,
    /// The device that does not answer.
    pub device: &'static str,
    /// The duration, at least.
    pub seconds: u64,
}

impl std::fmt::Display for Stall {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Stall { device, seconds, .. } = self;
        write!(out, "write-back waits for {device}, which has not answered for {seconds} s")
    }
}

/// The lines that wait.
#[derive(Debug, Default)]
pub struct Stalls(Mutex<Vec<Wait>>);

impl Stalls {
    /// Records the devices that lines wait for. Returns lines for the log.
    pub fn look(&self, waits: &[(u64, Waiting)], now: Instant) -> Vec<String> {
        let mut known = lock(&self.0);
        let before = std::mem::take(&mut *known);
        let mut said = Vec::new();
        let mut ended = before.clone();
        for &(start, waiting) in waits {
            let same = |wait: &&Wait| wait.start == start && wait.waiting == waiting;
            let new = Wait { start, waiting, since: now, is_logged: false };
            let mut wait = before.iter().find(same).copied().unwrap_or(new);
            ended.retain(|ended| ended.start != start || ended.waiting != waiting);
            if let Some(stall) = stall(&wait, now).filter(|_| !wait.is_logged) {
                wait.is_logged = true;
                said.push(format!("line at {start}: {stall}"));
            }
            known.push(wait);
        }
        for wait in ended.iter().filter(|wait| wait.is_logged) {
            let Wait { start, waiting, since, .. } = wait;
            let (device, seconds) = (waiting.device, (now - *since).as_secs());
            said.push(format!("line at {start}: {device} answers again, after {seconds} s"));
        }
        said
    }

    /// The lines that stall.
    pub fn list(&self, now: Instant) -> Vec<Stall> {
        lock(&self.0).iter().filter_map(|wait| stall(wait, now)).collect()
    }
}

fn stall(wait: &Wait, now: Instant) -> Option<Stall> {
    let age = now - wait.since;
    let is_stalled = age >= Duration::from_secs(SLOW_SECONDS);
    let (start, device) = (wait.start, wait.waiting.device);
    is_stalled.then_some(Stall { start, device, seconds: age.as_secs() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stalls_when_none_of_its_io_ends() {
        let first = Instant::now();
        let at = |seconds| first + Duration::from_secs(seconds);
        let stalls = Stalls::default();
        let wait = |device, ended| (8, Waiting { device, ended });
        for second in 0..30 {
            assert!(stalls.look(&[wait("the origin", second)], at(second)).is_empty());
        }
        assert_eq!(stalls.list(at(30)), []);
        assert!(stalls.look(&[wait("the cache device", 29)], at(30)).is_empty());
        assert!(stalls.look(&[wait("the cache device", 29)], at(39)).is_empty());
        let said = stalls.look(&[wait("the cache device", 29)], at(40));
        assert!(said.len() == 1 && said[0].contains("waits for the cache device"), "{said:?}");
        assert!(stalls.look(&[wait("the cache device", 29)], at(41)).is_empty(), "logged once");
        let stall = Stall { start: 8, device: "the cache device", seconds: 12 };
        assert_eq!(stalls.list(at(42)), [stall]);
        let said = stalls.look(&[], at(43));
        assert_eq!(said, ["line at 8: the cache device answers again, after 13 s"]);
        assert_eq!(stalls.list(at(43)), []);
    }
}
