//! A case's life: rounds of load, each of which a server does not survive.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use udm::prng::Prng;

use crate::case::Target;
use crate::commands;
use crate::disks::Disks;
use crate::fixture::Fixture;
use crate::load::Load;
use crate::oracle::{Loss, SECTOR};
use crate::sick::Patient;

/// What happens to a server under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// No fault: every request must be answered.
    Answered,
    /// It is killed.
    Killed,
    /// It is killed while it writes back on demand.
    Draining,
    /// It is killed while it is removed, everything written back first.
    RemovedDrained,
    /// It is killed while it is removed.
    Removed,
    /// It is killed while it is suspended, or just after its end.
    Suspended,
    /// It is killed while it carries out flushes and messages.
    Talking,
    /// It is killed while it takes a table in place of another.
    Loading,
    /// It is removed in order, and not killed.
    Orderly,
    /// A cache or an origin loses its second half. The lost part must not be readable.
    Cut,
    /// It writes everything back while clients continue, and is not killed.
    Drained,
    /// The same, and then it is removed; clients are cut off.
    ForcedOut,
    /// It takes another table of the same words, and goes on.
    Reloaded,
}

const ENDS: [End; 21] = [
    End::Answered,
    End::Answered,
    End::Answered,
    End::Answered,
    End::Killed,
    End::Killed,
    End::Killed,
    End::Killed,
    End::Draining,
    End::RemovedDrained,
    End::Removed,
    End::Suspended,
    End::Suspended,
    End::Talking,
    End::Loading,
    End::Orderly,
    End::Cut,
    End::Drained,
    End::Drained,
    End::ForcedOut,
    End::Reloaded,
];

/// The result of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    Alive,
    Killed,
    /// It was killed, and the power went.
    PowerCut,
    /// It was killed while a device failed, which is well again.
    KilledSick,
    /// A device has failed, and is well again. The server lives.
    Healed(Patient),
    /// A cache's device has failed for good. The server lives.
    Dead(Patient),
    Removed,
    Drained,
    /// The files cannot be used any more.
    Spoiled,
    /// The same, but udm cannot notice it.
    Hidden,
}

/// How long clients may take to hear the replies to all that they sent.
const PATIENCE: Duration = Duration::from_secs(180);

impl Fixture {
    /// The whole life of a case.
    pub fn run(&mut self) {
        self.first_format();
        for nth in 0..self.case.rounds {
            let fate = self.round(nth);
            if fate == Fate::Hidden {
                return;
            }
            if fate == Fate::Spoiled {
                self.oracle.server_is_gone();
                if self.try_create(&[]).is_ok() {
                    self.judge(Loss::Process, true, "after a file was cut under the server");
                    self.kill();
                }
                return;
            }
            self.after(fate);
            if self.is_late() {
                break;
            }
            if self.random.one_in(4) {
                self.drain_and_compare();
                // A cache that is clean may be formatted.
                let words: &[&str] = if self.random.one_in(3) { &["--force-format"] } else { &[] };
                assert_eq!(self.try_create(words), Ok(()), "a clean cache must be opened");
                self.judge(Loss::Process, false, "after everything was written back");
            }
        }
        self.drain_and_compare();
    }

    /// New caches, whose first server may die while it formats them.
    fn first_format(&mut self) {
        if self.random.one_in(2) {
            (0..1 + self.random.below(4)).for_each(|_| self.die_early());
        }
        self.create();
    }

    fn after(&mut self, fate: Fate) {
        match &fate {
            Fate::Alive => return,
            Fate::Healed(patient) => return self.after_sickness(patient),
            Fate::Dead(patient) => return self.bury(patient),
            Fate::KilledSick => {
                self.oracle.server_is_gone();
                return self.create_after_sickness(Loss::Process, "after a failing device");
            }
            _ => {}
        }
        self.oracle.server_is_gone();
        assert!(self.has_no_panic(), "the server has panicked");
        let is_orderly = matches!(fate, Fate::Removed | Fate::Drained);
        let has_power = fate != Fate::PowerCut && !self.may_cut_power();
        let loss = match (has_power, is_orderly) {
            (true, _) => Loss::Process,
            (false, true) => Loss::Power,
            (false, false) => Loss::Memory,
        };
        if fate == Fate::Drained {
            self.compare_origins(loss);
        }
        if has_power && is_orderly && self.random.one_in(3) {
            return self.change_origin();
        }
        if self.random.one_in(3) {
            (0..1 + self.random.below(3)).for_each(|_| self.die_early());
        }
        if !has_power {
            self.create();
            return self.judge(loss, false, "after a power cut");
        }
        self.was_touched = false;
        if !self.people() {
            self.create_after_people();
        }
    }

    fn round(&mut self, nth: u64) -> Fate {
        let end = ENDS[self.random.below(ENDS.len() as u64) as usize];
        if self.disks.is_some() && (end == End::Cut || self.random.one_in(2)) {
            self.oracle.note(format!("round {nth}: a device fails"));
            return self.under_load(|fixture, load| fixture.sicken(load));
        }
        self.oracle.note(format!("round {nth}: {end:?}"));
        self.under_load(|fixture, load| fixture.bring_about(end, load))
    }

    /// What `action` comes to, while clients send requests; each of them comes to its end.
    fn under_load(&mut self, action: impl FnOnce(&mut Fixture, &Load) -> Fate) -> Fate {
        let (seeds, moment) = (self.random.next_u64(), 5_000 + self.random.below(500_000));
        let (load, pid) = (self.load(), self.server.unwrap());
        let fate = std::thread::scope(|scope| {
            let clients: Vec<ScopedJoinHandle<'_, ()>> = (0..self.case.connections)
                .map(|nth| (nth, &load))
                .map(|(nth, load)| scope.spawn(move || load.run(nth, Prng::new(seeds ^ nth))))
                .collect();
            // A panic here leaves clients that would wait for a server.
            let _guard = KillOnPanic { pid, load: &load, disks: self.disks.clone() };
            std::thread::sleep(Duration::from_micros(moment));
            let fate = action(self, &load);
            load.is_over.store(true, Ordering::SeqCst);
            self.await_answers(&clients, pid);
            fate
        });
        self.tally.rounds += 1;
        self.tally.answered += load.answered.load(Ordering::SeqCst);
        self.tally.in_flight += load.in_flight.load(Ordering::SeqCst);
        fate
    }

    /// Some load, and a server that does not survive it.
    pub fn killed_under_load(&mut self) {
        self.under_load(|fixture, load| fixture.bring_about(End::Killed, load));
        self.oracle.server_is_gone();
    }

    fn load(&self) -> Load {
        let mut borders = Vec::new();
        for line in &self.case.lines {
            borders.push(borders.last().unwrap_or(&0) + line.bytes / SECTOR as u64);
        }
        Load {
            oracle: self.oracle.clone(),
            socket: self.socket(),
            sectors: self.case.bytes() / SECTOR as u64,
            granule: self.case.granule(),
            borders,
            depth: self.case.depth,
            is_batched: self.case.is_batched,
            trims_to_zero: self.case.trims_to_zero(),
            may_fail: AtomicBool::new(false),
            spares_ends: AtomicBool::new(false),
            cut: Mutex::new(None),
            is_over: AtomicBool::new(false),
            sockets: Mutex::default(),
            answered: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
        }
    }

    /// Every client must come to its end.
    fn await_answers(&self, clients: &[ScopedJoinHandle<'_, ()>], pid: u64) {
        let start = Instant::now();
        while !clients.iter().all(ScopedJoinHandle::is_finished) {
            if start.elapsed() > PATIENCE {
                println!("{}", self.udm(&["info", "vol"]).out);
                println!("{}", self.udm(&["status", "--all", "vol"]).out);
                println!("{}", commands::threads_of(pid));
                panic!("a request is not answered for {PATIENCE:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn pause(&mut self) {
        let micros = 1 << self.random.below(18);
        std::thread::sleep(Duration::from_micros(micros + self.random.below(micros)));
    }

    fn bring_about(&mut self, end: End, load: &Load) -> Fate {
        match end {
            End::Answered => return Fate::Alive,
            End::Killed => self.kill(),
            End::Draining => self.kill_while(&["drain", "vol"]),
            End::RemovedDrained => return self.remove(&["--drain"], true, Fate::Drained),
            End::Removed => return self.remove(&[], true, Fate::Removed),
            End::Orderly => return self.remove(&[], false, Fate::Removed),
            End::Suspended => {
                self.ok(&["suspend", "vol"]);
                self.pause();
                if self.random.one_in(2) {
                    self.kill();
                } else {
                    self.kill_while(&["resume", "vol"]);
                }
            }
            End::Talking => self.talk(),
            End::Cut => {
                load.spares_ends.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(200));
                load.may_fail.store(true, Ordering::SeqCst);
                let (cut, bytes) = self.cut_under_server(load);
                // Not awaited: a full cache whose origin fails keeps writers for a minute.
                self.kill();
                if std::fs::metadata(&cut).unwrap().len() == bytes {
                    println!("WARNING: a write hid that {} was cut, a known gap", cut.display());
                    return Fate::Hidden;
                }
                return Fate::Spoiled;
            }
            End::Drained => return self.drain_beside_clients(load),
            End::ForcedOut => return self.remove(&["--drain"], false, Fate::Drained),
            End::Reloaded => {
                let table = self.table();
                // A `cache` takes its table again while it is served; others refuse.
                if self.udm(&["load", "vol", "--table", &table]).code == 0 {
                    self.pause();
                    self.ok(&["resume", "vol"]);
                }
                self.pause();
                return Fate::Alive;
            }
            End::Loading => {
                let table = self.table();
                if self.udm(&["load", "vol", "--table", &table]).code == 0 {
                    self.pause();
                    self.kill_while(&["resume", "vol"]);
                } else {
                    self.kill();
                }
            }
        }
        load.is_over.store(true, Ordering::SeqCst);
        Fate::Killed
    }

    /// The origins have what was answered before a drain began, or newer data; durably.
    fn drain_beside_clients(&mut self, load: &Load) -> Fate {
        let begin = self.oracle.pin();
        self.ok(&["drain", "vol"]);
        let has_power = self.disks.is_none() || self.random.one_in(2);
        if !has_power {
            load.is_over.store(true, Ordering::SeqCst);
            self.kill();
            self.cut_power();
        }
        for nth in 0..self.origins.len() {
            self.compare_beside_clients(nth, begin);
        }
        self.oracle.unpin();
        self.tally.drained += 1;
        if has_power { Fate::Alive } else { Fate::PowerCut }
    }

    fn compare_beside_clients(&self, nth: usize, begin: u64) {
        let origin = File::open(&self.origins[nth]).unwrap();
        let data = self.origin_alone(nth);
        let start = self.start_of(nth);
        for (at, sector) in data.chunks_exact(SECTOR).enumerate() {
            let mut sector = sector.to_vec();
            let number = start + at as u64;
            // One that is being written may show parts of two versions for a moment.
            let is_right = (0..100).any(|_| {
                let is_right = self.oracle.is_as_new(number, &sector, begin);
                if !is_right {
                    std::thread::sleep(Duration::from_millis(1));
                    origin.read_exact_at(&mut sector, (at * SECTOR) as u64).unwrap();
                }
                is_right
            });
            if !is_right {
                self.oracle.accuse(number, &sector, "an origin after a drain beside clients");
            }
        }
    }

    /// Kills the server while it carries out a command, or shortly before or afterwards.
    fn kill_while(&mut self, words: &[&str]) {
        let command = self.start(words);
        self.pause();
        self.kill();
        let outcome = command.outcome();
        self.oracle.note(format!("{words:?}: {}", outcome.code));
    }

    fn remove(&mut self, words: &[&str], is_killed: bool, orderly: Fate) -> Fate {
        let pid = self.server.unwrap();
        let command = self.start(&[&["remove", "vol", "--force"], words].concat());
        if is_killed {
            self.pause();
            commands::kill_server(pid);
        }
        let outcome = command.outcome();
        self.oracle.note(format!("remove {words:?}: {} {}", outcome.code, outcome.err.trim()));
        assert!(is_killed || outcome.code == 0, "a removal fails: {outcome:?}");
        self.server = None;
        commands::wait_for_end(pid);
        // A server that was dead before the command asked it did not end in order.
        if outcome.code == 0 && !outcome.out.contains("its server had died") {
            return orderly;
        }
        self.tally.kills += 1;
        Fate::Killed
    }

    fn talk(&mut self) {
        for _ in 0..self.random.below(6) {
            let words: &[&str] = match self.random.below(4) {
                0 => &["flush", "vol"],
                1 => &["status", "--all", "vol"],
                2 => &["metrics", "vol"],
                _ => &["info", "vol"],
            };
            self.ok(words);
        }
        let is_writecache = matches!(self.case.lines[0].target, Target::Writecache { .. });
        if is_writecache && self.random.one_in(2) {
            self.kill_while(&["message", "vol", "0", "flush"]);
        } else {
            self.kill_while(&["flush", "vol"]);
        }
    }
}

/// Ends a round whose course has failed: its clients hear that.
struct KillOnPanic<'a> {
    pid: u64,
    load: &'a Load,
    disks: Option<Arc<Disks>>,
}

impl Drop for KillOnPanic<'_> {
    fn drop(&mut self) {
        self.load.is_over.store(true, Ordering::SeqCst);
        if std::thread::panicking() {
            commands::kill_server(self.pid);
            // One that is silent would keep the server.
            self.disks.iter().for_each(|disks| disks.heal());
        }
    }
}
