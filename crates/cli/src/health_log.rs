//! Log lines about a device's health: each change once, with counts and errno. Requests are not
//! logged: a thread checks the device every second, and compares. While no state lasts and no queue
//! works, it sleeps, or checks every minute if there is dirty data or a device has failed: a cache
//! file may be cut short, or become whole again, without any I/O.
//!
//! A recurring state (errors of the origin, a full cache, pauses of write-back) begins with its
//! first sign, and ends some seconds after its last sign: so a flapping state is one state and does
//! not fill the log. A failed device counts as working after an operation of the failed kind has
//! succeeded, not after a time without operations. Each state makes two lines, regardless of the
//! events in between.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use udm::disk::DiskErrors;
use udm::queue;
use udm::target::Health;

use crate::exports::OpenExport;
use crate::log;
use crate::server::Server;

/// Time between two checks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time between two checks of a device that is at rest, and has dirty data or has failed.
const REST: Duration = Duration::from_secs(60);

/// A state has ended this long after its last sign.
const CALM: Duration = Duration::from_secs(5);

/// Checks the device of `server`, until the process ends.
pub fn keep(server: &Arc<Server>) -> std::io::Result<()> {
    let server: Weak<Server> = Arc::downgrade(server);
    let watch = move || {
        let mut journal = Journal::default();
        let mut paths = Paths::default();
        loop {
            queue::await_work();
            // Before the check: it sees all changes that are older than this pause.
            thread::sleep(LOOK_EVERY);
            let Some(server) = server.upgrade() else { return };
            let name = server.name();
            let (health, exports) = (server.served.health(), server.served.exports());
            for line in journal.look(&health, &exports, Instant::now()) {
                log::line(&format!("{name}: {line}"));
            }
            if health.iter().any(|(_, _, health)| is_failing(&health.origin)) {
                for line in paths.look(&server) {
                    log::line(&format!("{name}: {line}"));
                }
            }
            for line in server.served.look_for_stalls() {
                log::line(&format!("{name}: {line}"));
            }
            let is_calm = journal.is_calm() && server.served.waits_for().is_none();
            let is_clean = server.served.dirty().bytes == 0;
            let is_well = health.iter().all(|(_, _, health)| !has_failed(health));
            drop(server);
            if is_calm {
                queue::wait_for_work((!is_clean || !is_well).then_some(REST));
            }
        }
    };
    thread::Builder::new().name("journal".into()).spawn(watch).map(drop)
}

/// The paths of origins that fail. A path may hang, as on NFS without its server, so another thread
/// looks it up.
#[derive(Debug, Default)]
struct Paths {
    found: Arc<Mutex<Vec<String>>>,
    /// The thread that looks.
    looks: Option<JoinHandle<()>>,
    said: Vec<String>,
}

impl Paths {
    /// Returns sentences that were not said yet, from the last look, and looks again.
    fn look(&mut self, server: &Arc<Server>) -> Vec<String> {
        if self.looks.as_ref().is_some_and(|looks| !looks.is_finished()) {
            return Vec::new();
        }
        let now = self.found.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_new = |line: &&String| !self.said.contains(line);
        let lines = now.iter().filter(is_new).cloned().collect();
        self.said = now;
        let (found, server) = (Arc::clone(&self.found), Arc::clone(server));
        let look = move || {
            let missing = server.served.missing_origins();
            *found.lock().unwrap_or_else(PoisonError::into_inner) = missing;
        };
        // Without a thread, the next check tries again.
        self.looks = thread::Builder::new().name("paths".into()).spawn(look).ok();
        lines
    }
}

/// A recurring state.
#[derive(Debug, Default)]
struct Spell {
    /// The time when the state began, and the count at that time.
    since: Option<(Instant, u64)>,
    /// The time of the last sign.
    seen: Option<Instant>,
    count: u64,
}

/// The change of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Began,
    /// The seconds that the state lasted, and the events counted in them.
    Ended(u64, u64),
}

impl Spell {
    /// `count` grows while the state lasts; `is_on`: the state lasts even if `count` does not grow.
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
    metadata: Spell,
    pauses: Spell,
    full: Spell,
    failure: Option<String>,
    metadata_failure: Option<String>,
    paced_by: Option<&'static str>,
}

impl Line {
    /// Whether no state lasts.
    fn is_calm(&self) -> bool {
        let spells = [&self.origin, &self.medium, &self.metadata, &self.pauses, &self.full];
        spells.iter().all(|spell| spell.since.is_none())
    }

    fn look(&mut self, health: &Health, now: Instant, say: &mut dyn FnMut(String)) {
        let (origin, medium) = (&health.origin, &health.medium);
        match self.origin.look(origin.count, is_failing(origin), now) {
            Some(Change::Began) => say(format!("the origin fails: {origin}")),
            Some(Change::Ended(seconds, count)) => say(format!(
                "the origin works again: {count} errors in {seconds} s, the last one: {origin}"
            )),
            None => {}
        }
        for (spell, errors, which) in [
            (&mut self.medium, medium, "cache"),
            (&mut self.metadata, &health.metadata, "metadata"),
        ] {
            match spell.look(errors.count, is_failing(errors), now) {
                Some(Change::Began) => say(format!("the {which} device fails: {errors}")),
                Some(Change::Ended(seconds, count)) => say(format!(
                    "the {which} device works again: {count} errors in {seconds} s, the last one: \
                     {errors}"
                )),
                None => {}
            }
        }
        match self.pauses.look(health.failed_batches, health.is_failing, now) {
            Some(Change::Began) => {
                say("write-back pauses: a batch failed; udm retries it with growing pauses, and \
                     dirty data stays in the cache"
                    .into());
            }
            Some(Change::Ended(seconds, count)) => {
                say(format!("write-back resumes: {count} batches failed in {seconds} s"));
            }
            None => {}
        }
        match self.full.look(health.waited, false, now) {
            Some(Change::Began) => {
                say("dirty data nearly fills the cache: writes wait for write-back".into());
            }
            Some(Change::Ended(seconds, count)) => {
                say(format!("writes wait no longer: {count} requests waited in {seconds} s"));
            }
            None => {}
        }
        if self.paced_by != health.paced_by {
            self.paced_by = health.paced_by;
            let way = health.paced_by.unwrap_or("the kernel");
            say(format!("io=lazy writes pages out by {way}"));
        }
        if self.failure != health.medium_failure {
            self.failure.clone_from(&health.medium_failure);
            say(match &self.failure {
                Some(why) => format!("the cache device has failed: {why}"),
                None => "the cache device works again".into(),
            });
        }
        if self.metadata_failure.is_some() != health.metadata_failure.is_some() {
            self.metadata_failure.clone_from(&health.metadata_failure);
            say(match &self.metadata_failure {
                Some(why) => why.clone(),
                None => "the metadata device takes commits again".into(),
            });
        }
    }
}

fn has_failed(health: &Health) -> bool {
    health.medium_failure.is_some() || health.metadata_failure.is_some()
}

/// Whether a device had an error, and no operation has succeeded since.
fn is_failing(errors: &DiskErrors) -> bool {
    errors.count > 0 && !errors.has_worked
}

/// The states at the last check.
#[derive(Debug, Default)]
struct Journal {
    lines: Vec<(u64, &'static str, Line)>,
    exports: Vec<ExportState>,
}

/// The state of an export at the last check.
#[derive(Debug)]
struct ExportState {
    uri: String,
    violations: u64,
    unaligned: u64,
    certificates_problem: Option<String>,
}

impl Journal {
    /// Whether the next line can only come after work of a queue.
    fn is_calm(&self) -> bool {
        self.lines.iter().all(|(_, _, line)| line.is_calm())
    }

    /// Compares, and returns the lines to log.
    fn look(
        &mut self,
        health: &[(u64, &'static str, Health)],
        exports: &[OpenExport],
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
        self.look_at_exports(exports, &mut said);
        said
    }

    /// Since the last check: clients that broke the protocol, or began to send requests that are
    /// not whole blocks, and certificates that changed.
    fn look_at_exports(&mut self, exports: &[OpenExport], said: &mut Vec<String>) {
        for export in exports {
            let known = self.exports.iter().find(|known| known.uri == export.uri);
            let problem = export.certificates_problem();
            if problem != known.and_then(|known| known.certificates_problem.as_deref()) {
                said.push(match problem {
                    Some(why) => format!(
                        "{}: the new certificates are not used, the previous ones stay: {why}",
                        export.uri
                    ),
                    None => format!("{}: the new certificates are used", export.uri),
                });
            }
            let before = known.map_or((0, 0), |known| (known.violations, known.unaligned));
            let (count, last) = export.violations();
            if count > before.0 {
                let what = last.unwrap_or("unknown");
                let new = count - before.0;
                said.push(format!(
                    "{}: {new} clients disconnected for violating the protocol ({count} so far), \
                     the last one: {}",
                    export.uri,
                    what.escape_debug()
                ));
            }
            let unaligned = export.unaligned_clients();
            if unaligned > before.1 {
                let new = unaligned - before.1;
                said.push(format!(
                    "{}: {new} clients send requests that are not whole blocks ({unaligned} so \
                     far); these are served slowly: give clients the block size (nbd-client -b)",
                    export.uri
                ));
            }
        }
        let state = |export: &OpenExport| ExportState {
            uri: export.uri.clone(),
            violations: export.violations().0,
            unaligned: export.unaligned_clients(),
            certificates_problem: export.certificates_problem().map(str::to_owned),
        };
        self.exports = exports.iter().map(state).collect();
    }
}

#[cfg(test)]
mod tests {
    use udm::bio::Op;
    use udm::target::{Fact, FactValue};

    use super::*;

    #[test]
    fn a_state_is_two_lines_however_often_it_flaps() {
        let start = Instant::now();
        let mut journal = Journal::default();
        let mut look = |second: u64, count: u64, is_failing: bool| {
            let last = (count > 0).then_some((Op::Write, 5));
            let health = Health {
                origin: DiskErrors { count, last, has_worked: !is_failing },
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
        assert!(ended[0].contains("works again: 22 errors in 58 s"), "{ended:?}");
        assert!(ended.len() == 2 && ended[1].contains("write-back resumes"), "{ended:?}");
        assert!(look(80, 22, false).is_empty());
    }

    #[test]
    fn a_device_works_again_when_something_has_worked() {
        let start = Instant::now();
        let mut journal = Journal::default();
        let mut look = |second: u64, has_worked: bool| {
            let origin = DiskErrors { count: 3, last: Some((Op::Write, 5)), has_worked };
            let health = Health { origin, ..Health::default() };
            journal.look(&[(0, "cache", health)], &[], start + Duration::from_secs(second))
        };
        assert_eq!(look(0, false).len(), 1);
        assert!((1..60).all(|second| look(second, false).is_empty()), "no request was sent");
        assert!(look(60, true).is_empty());
        let said = look(66, true);
        assert!(said[0].contains("works again: 3 errors in 59 s"), "{said:?}");
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
            ["writecache at 8: dirty data nearly fills the cache: writes wait for write-back"]
        );
        assert!(look(1, 20, None).is_empty());
        let said = look(9, 20, None);
        assert_eq!(said, ["writecache at 8: writes wait no longer: 20 requests waited in 1 s"]);
        let said = look(10, 20, Some("it was cut short"));
        assert_eq!(said, ["writecache at 8: the cache device has failed: it was cut short"]);
        assert!(look(11, 20, Some("it was cut short")).is_empty());
    }

    #[test]
    fn certificates_that_are_not_used_are_logged_once() {
        let mut journal = Journal::default();
        let mut look = |problem: Option<&str>| {
            let value = problem.map_or(FactValue::Nothing, |why| FactValue::Text(why.into()));
            let export = OpenExport {
                uri: "nbds://[::1]:10809?tls=/pki".into(),
                client_uri: String::new(),
                clients: 0,
                facts: vec![Fact { name: "certificates_problem", value, about: "" }],
                notes: Vec::new(),
            };
            journal.look(&[], &[export], Instant::now())
        };
        assert!(look(None).is_empty());
        let said = "nbds://[::1]:10809?tls=/pki: the new certificates are not used, the previous \
                    ones stay: /pki/server-cert.pem expired 3 days ago";
        assert_eq!(look(Some("/pki/server-cert.pem expired 3 days ago")), [said]);
        assert!(look(Some("/pki/server-cert.pem expired 3 days ago")).is_empty());
        assert_eq!(look(Some("/pki/server-key.pem holds no private key")).len(), 1);
        assert_eq!(look(None), ["nbds://[::1]:10809?tls=/pki: the new certificates are used"]);
        assert!(look(None).is_empty());
    }

    #[test]
    fn a_client_without_the_block_size_is_logged_once() {
        let now = Instant::now();
        let mut journal = Journal::default();
        let mut look = |clients| {
            let fact = Fact {
                name: "unaligned_clients",
                value: FactValue::Number(clients),
                about: "clients",
            };
            let export = OpenExport {
                uri: "nbd://[::1]:1".into(),
                client_uri: String::new(),
                clients: 1,
                facts: vec![fact],
                notes: Vec::new(),
            };
            journal.look(&[], &[export], now)
        };
        assert!(look(0).is_empty());
        let said = look(1);
        assert!(said.len() == 1 && said[0].starts_with("nbd://[::1]:1: 1 clients"), "{said:?}");
        assert!(look(1).is_empty());
        assert!(look(3)[0].contains("2 clients send requests that are not whole blocks (3 so far"));
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
        let way = Some("sync_file_range: the kernel refuses RWF_DONTCACHE");
        let said = "linear at 0: io=lazy writes pages out by sync_file_range: the kernel refuses \
                    RWF_DONTCACHE";
        assert_eq!(look(way), [said]);
        assert!(look(way).is_empty());
    }
}
