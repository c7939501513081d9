//! Log lines about a device's health: each change once, with counts and errno. Requests are not
//! logged: a thread checks the device every second, and compares.
//!
//! A state that may come and go (errors of the origin, a full cache, pauses of write-back) begins
//! with its first sign, and has ended when there was no sign of it for some seconds: so a state
//! that flaps is one state and not many lines. It makes two lines, whatever happens in between.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use udm::target::Health;

use crate::log;
use crate::served::OpenDoor;
use crate::server::Server;

/// Time between two checks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A state has ended when there was no sign of it for this long.
const CALM: Duration = Duration::from_secs(5);

/// Checks the device of `server` as long as that lives.
pub fn keep(server: &Arc<Server>) -> std::io::Result<()> {
    let server: Weak<Server> = Arc::downgrade(server);
    let watch = move || {
        let mut journal = Journal::default();
        while let Some(server) = server.upgrade() {
            let name = server.name();
            let (health, doors) = (server.served.health(), server.served.exports());
            for line in journal.look(&health, &doors, Instant::now()) {
                log::line(&format!("{name}: {line}"));
            }
            drop(server);
            thread::sleep(LOOK_EVERY);
        }
    };
    thread::Builder::new().name("journal".into()).spawn(watch).map(drop)
}

/// A state that comes and goes.
#[derive(Debug, Default)]
struct Spell {
    /// When it began, and the count at that time.
    since: Option<(Instant, u64)>,
    /// Time of its last sign.
    seen: Option<Instant>,
    count: u64,
}

/// How a state changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Began,
    /// How many seconds it lasted, and how much was counted in them.
    Ended(u64, u64),
}

impl Spell {
    /// `count` grows while the state lasts; `is_on`: it lasts although nothing was counted.
    fn look(&mut self, count: u64, is_on: bool, now: Instant) -> Option<Change> {
        let before = std::mem::replace(&mut self.count, count);
        if is_on || count > before {
            self.seen = Some(now);
            if self.since.is_none() {
                self.since = Some((now, before));
                return Some(Change::Began);
            }
            return None;
        }
        let (since, first) = self.since?;
        let seen = self.seen.unwrap_or(since);
        if now - seen < CALM {
            return None;
        }
        self.since = None;
        Some(Change::Ended((seen - since).as_secs(), count - first.min(count)))
    }
}

/// The state of a table line at the last check.
#[derive(Debug, Default)]
struct Line {
    origin: Spell,
    medium: Spell,
    pauses: Spell,
    full: Spell,
    failure: Option<String>,
    paced_by: Option<&'static str>,
}

impl Line {
    fn look(&mut self, health: &Health, now: Instant, say: &mut dyn FnMut(String)) {
        let (origin, medium) = (&health.origin, &health.medium);
        match self.origin.look(origin.count, false, now) {
            Some(Change::Began) => say(format!("the origin fails: {origin}")),
            Some(Change::Ended(seconds, count)) => say(format!(
                "the origin works again: {count} errors in {seconds} s, the last one: {origin}"
            )),
            None => {}
        }
        match self.medium.look(medium.count, false, now) {
            Some(Change::Began) => say(format!("the cache device fails: {medium}")),
            Some(Change::Ended(seconds, count)) => say(format!(
                "the cache device fails no more: {count} errors in {seconds} s, the last one: \
                 {medium}"
            )),
            None => {}
        }
        match self.pauses.look(health.failed_batches, health.is_failing, now) {
            Some(Change::Began) => {
                say("write-back pauses: a batch failed, and is tried again with growing \
                     pauses; what is dirty stays"
                    .into());
            }
            Some(Change::Ended(seconds, count)) => {
                say(format!("write-back goes on: {count} batches failed in {seconds} s"));
            }
            None => {}
        }
        match self.full.look(health.waited, false, now) {
            Some(Change::Began) => say("the cache is full: requests wait for room".into()),
            Some(Change::Ended(seconds, count)) => {
                say(format!("the cache has room again: {count} requests waited in {seconds} s"));
            }
            None => {}
        }
        if self.paced_by != health.paced_by {
            self.paced_by = health.paced_by;
            let way = health.paced_by.unwrap_or("the kernel");
            say(format!("what io=lazy writes is written out by {way}"));
        }
        if self.failure != health.medium_failure {
            self.failure.clone_from(&health.medium_failure);
            say(match &self.failure {
                Some(why) => format!("the cache device takes no more writes: {why}"),
                None => "the cache device takes writes again".into(),
            });
        }
    }
}

/// The states at the last check.
#[derive(Debug, Default)]
struct Journal {
    lines: Vec<(u64, &'static str, Line)>,
    violations: Vec<(String, u64)>,
}

impl Journal {
    /// Compares, and returns the lines to log.
    fn look(
        &mut self,
        health: &[(u64, &'static str, Health)],
        doors: &[OpenDoor],
        now: Instant,
    ) -> Vec<String> {
        let mut said = Vec::new();
        let place = |line: &(u64, &'static str, Line)| (line.0, line.1);
        if !self.lines.iter().map(place).eq(health.iter().map(|line| (line.0, line.1))) {
            // A new table: counts of the old one do not apply.
            let begin = |line: &(u64, &'static str, Health)| (line.0, line.1, Line::default());
            self.lines = health.iter().map(begin).collect();
        }
        for ((start, target, line), (_, _, health)) in self.lines.iter_mut().zip(health) {
            line.look(health, now, &mut |what| said.push(format!("{target} at {start}: {what}")));
        }
        self.look_at_doors(doors, &mut said);
        said
    }

    /// Clients that broke the protocol since the last check.
    fn look_at_doors(&mut self, doors: &[OpenDoor], said: &mut Vec<String>) {
        for door in doors {
            let known = self.violations.iter().find(|(uri, _)| *uri == door.uri);
            let before = known.map_or(0, |(_, count)| *count);
            let (count, last) = door.violations();
            if count > before {
                let what = last.unwrap_or("unknown");
                let new = count - before;
                said.push(format!(
                    "{}: {new} clients disconnected for breaking the protocol ({count} so far), \
                     the last one: {}",
                    door.uri,
                    what.escape_debug()
                ));
            }
        }
        self.violations =
            doors.iter().map(|door| (door.uri.clone(), door.violations().0)).collect();
    }
}

#[cfg(test)]
mod tests {
    use udm::bio::Op;
    use udm::disk::DiskErrors;

    use super::*;

    #[test]
    fn a_state_is_two_lines_however_often_it_flaps() {
        let start = Instant::now();
        let mut journal = Journal::default();
        let mut look = |second: u64, count: u64, is_failing: bool| {
            let last = (count > 0).then_some((Op::Write, 5));
            let health = Health {
                origin: DiskErrors { count, last },
                failed_batches: count,
                is_failing,
                ..Health::default()
            };
            journal.look(&[(0, "pcache", health)], &[], start + Duration::from_secs(second))
        };
        assert!(look(0, 0, false).is_empty());
        let began = look(1, 3, true);
        assert_eq!(began[0], "pcache at 0: the origin fails: write: Input/output error (errno 5)");
        assert!(began.len() == 2 && began[1].contains("write-back pauses"), "{began:?}");
        for second in 2..60 {
            assert!(look(second, 3 + second / 3, second % 3 > 0).is_empty());
        }
        assert!(look(61, 22, false).is_empty());
        let ended = look(70, 22, false);
        assert!(ended[0].contains("works again: 22 errors in 56 s"), "{ended:?}");
        assert!(ended.len() == 2 && ended[1].contains("write-back goes on"), "{ended:?}");
        assert!(look(80, 22, false).is_empty());
    }

    #[test]
    fn a_failed_medium_and_a_full_cache_are_said_once() {
        let start = Instant::now();
        let mut journal = Journal::default();
        let mut look = |second: u64, waited: u64, failure: Option<&str>| {
            let medium_failure = failure.map(str::to_owned);
            let health = Health { waited, medium_failure, ..Health::default() };
            let now = start + Duration::from_secs(second);
            journal.look(&[(8, "writecache", health)], &[], now)
        };
        assert_eq!(
            look(0, 9, None),
            ["writecache at 8: the cache is full: requests wait for room"]
        );
        assert!(look(1, 20, None).is_empty());
        let said = look(9, 20, None);
        assert_eq!(said, ["writecache at 8: the cache has room again: 20 requests waited in 1 s"]);
        let said = look(10, 20, Some("it was cut short"));
        assert_eq!(
            said,
            ["writecache at 8: the cache device takes no more writes: it was cut short"]
        );
        assert!(look(11, 20, Some("it was cut short")).is_empty());
    }

    #[test]
    fn how_lazy_writes_get_out_is_said_when_the_first_was_refused() {
        let now = Instant::now();
        let mut journal = Journal::default();
        let mut look = |paced_by| {
            let health = Health { paced_by, ..Health::default() };
            journal.look(&[(0, "linear", health)], &[], now)
        };
        assert!(look(None).is_empty());
        let way = Some("sync_file_range: RWF_DONTCACHE is refused here");
        let said = "linear at 0: what io=lazy writes is written out by sync_file_range: \
                    RWF_DONTCACHE is refused here";
        assert_eq!(look(way), [said]);
        assert!(look(way).is_empty());
    }
}
