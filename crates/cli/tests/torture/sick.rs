//! Devices that fail under a server: dead to some operations, in some places, or silent.
//!
//! Whatever fails, a read is right or an error, errors name the failed device and no other, and
//! every command ends. When the device works again, a new server has all acknowledged data; after a
//! power cut, all durable data. A fast device that stays dead is detached, and the origin is older
//! only in the ranges that `detach` names.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use udm::Op;
use udm::disk::{Effect, Fault};
use udm::error::Status;

use crate::case::Target;
use crate::commands;
use crate::fixture::{Fixture, META_BYTES};
use crate::load::Load;
use crate::oracle::{Loss, SECTOR};
use crate::rounds::Fate;

/// The role of a disk in its line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Origin,
    Cache,
    Metadata,
}

/// The way in which the disk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ailment {
    /// Operations fail.
    Reads,
    Writes,
    ReadsAndWrites,
    Flushes,
    Everything,
    /// Writes fail, and have written some of their sectors.
    TornWrites,
    /// The disk does not answer for some seconds.
    Silence,
}

const AILMENTS: [Ailment; 8] = [
    Ailment::Reads,
    Ailment::Writes,
    Ailment::ReadsAndWrites,
    Ailment::Flushes,
    Ailment::Everything,
    Ailment::TornWrites,
    Ailment::Silence,
    Ailment::Silence,
];

impl Ailment {
    fn operations(self) -> &'static [Op] {
        match self {
            Ailment::Reads => &[Op::Read],
            Ailment::Writes | Ailment::TornWrites => &[Op::Write, Op::WriteZeroes],
            Ailment::ReadsAndWrites => &[Op::Read, Op::Write, Op::WriteZeroes],
            Ailment::Flushes => &[Op::Flush],
            Ailment::Everything => &[Op::Read, Op::Write, Op::WriteZeroes, Op::Flush],
            Ailment::Silence => &[],
        }
    }

    fn has_flushes(self) -> bool {
        self.operations().contains(&Op::Flush)
    }
}

/// A disk that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patient {
    nth: usize,
    role: Role,
    name: String,
    ailment: Ailment,
    /// Where the server's log stood before.
    log: usize,
}

/// How long a disk is silent, at most, in milliseconds.
const SILENCE_MAX: u64 = 3000;

impl Fixture {
    /// A disk of some line falls ill under load.
    pub fn sicken(&mut self, load: &Load) -> Fate {
        let (patient, bytes) = self.choose_patient();
        let disks = self.disks.clone().unwrap();
        self.tally.sick += 1;
        let is_whole = self.random.one_in(2);
        self.oracle.note(format!("{patient:?}, as a whole: {is_whole}"));
        if patient.ailment == Ailment::Silence {
            return self.silence(&patient, load);
        }
        load.may_fail.store(true, Ordering::SeqCst);
        if patient.ailment.has_flushes() {
            self.oracle.doubt();
            self.is_origin_doubted |= patient.role == Role::Origin;
        }
        let start = if is_whole { 0 } else { self.random.below(bytes) / 4096 * 4096 };
        let range = start..if is_whole { u64::MAX } else { start + bytes / 4 };
        let effect = match patient.ailment {
            Ailment::TornWrites => Effect::Tear(Status::Io),
            _ => Effect::Fail(Status::Io),
        };
        for op in patient.ailment.operations() {
            disks.inject(&patient.name, Fault::new(effect).of(*op).within(range.clone()));
        }
        let pause = Duration::from_millis(20 + self.random.below(600));
        std::thread::sleep(pause);
        self.ask_about_it(false);
        match self.random.below(6) {
            0 => self.kill(),
            1 => {
                self.kill();
                self.recover_disks();
                self.cut_power();
                return Fate::PowerCut;
            }
            2 | 3 if patient.role == Role::Cache && !self.is_origin_doubted => {
                load.hang_up();
                return Fate::Dead(patient);
            }
            _ => {
                self.recover_disks();
                std::thread::sleep(pause / 2);
                return Fate::Healed(patient);
            }
        }
        self.recover_disks();
        Fate::KilledSick
    }

    fn choose_patient(&mut self) -> (Patient, u64) {
        let mut all = Vec::new();
        for (nth, line) in self.case.lines.iter().enumerate() {
            all.push((nth, Role::Origin, format!("origin{nth}"), line.bytes));
            if line.has_cache_on_disk() {
                all.push((nth, Role::Cache, format!("cache{nth}"), line.cache_bytes));
                all.push((nth, Role::Cache, format!("cache{nth}"), line.cache_bytes));
            }
            if matches!(line.target, Target::Cache { .. }) {
                all.push((nth, Role::Metadata, format!("meta{nth}"), META_BYTES));
            }
        }
        let (nth, role, name, bytes) =
            all.swap_remove(self.random.below(all.len() as u64) as usize);
        let ailment = AILMENTS[self.random.below(AILMENTS.len() as u64) as usize];
        (Patient { nth, role, name, ailment, log: self.log().len() }, bytes)
    }

    /// All disks are well again.
    fn recover_disks(&mut self) {
        self.disks.as_ref().unwrap().heal();
        self.oracle.note("all disks are well".into());
        if self.oracle.is_doubtful() {
            self.oracle.end_doubt();
        }
    }

    /// A disk does not answer for a while, and then continues. No request fails. The server may die
    /// meanwhile.
    fn silence(&mut self, patient: &Patient, load: &Load) -> Fate {
        let disks = self.disks.clone().unwrap();
        disks.hang(&patient.name);
        let pause = Duration::from_millis(self.random.below(SILENCE_MAX));
        std::thread::sleep(pause);
        self.ask_about_it(true);
        if self.random.one_in(3) {
            // A process does not end before its calls have.
            let was_there = commands::kill_server(self.server.unwrap());
            self.recover_disks();
            self.killed(was_there);
            load.is_over.store(true, Ordering::SeqCst);
            return Fate::Killed;
        }
        self.recover_disks();
        Fate::Alive
    }

    /// Commands answer while a device fails. If a device is silent, they may report that the server
    /// waits for it.
    fn ask_about_it(&mut self, is_silent: bool) {
        for words in [&["info", "vol"][..], &["ls"], &["metrics", "vol"]] {
            let outcome = self.udm(words);
            let is_told = outcome.err.contains("waits for a device in the kernel");
            assert!(outcome.code == 0 || is_silent && is_told, "{words:?}: {outcome:?}");
            if outcome.code != 0 {
                self.oracle.note(outcome.err.trim().into());
                return;
            }
        }
    }

    /// The log names the failed device, and no other.
    fn check_blame(&self, patient: &Patient) {
        let log = self.log();
        let since = log.get(patient.log..).unwrap_or_default();
        let wrong: &[&str] = match patient.role {
            Role::Origin => &["cache device fails:", "cache device has failed", "metadata device"],
            Role::Cache => &["the origin fails:", "metadata device fails:"],
            Role::Metadata => &["the origin fails:", "the cache device fails:"],
        };
        for words in wrong {
            assert!(!since.contains(words), "{patient:?}: the log says {words:?}: {since}");
        }
    }

    /// The disk is well again, and the server that saw it fail lives.
    pub fn after_sickness(&mut self, patient: &Patient) {
        let what = "after a device was well again";
        self.check_blame(patient);
        // An origin that reported no loss only has to work again.
        let is_easy = patient.role == Role::Origin && !patient.ailment.has_flushes();
        self.judge(Loss::Nothing, !is_easy, what);
        if self.random.one_in(2) {
            let outcome = self.udm(&["drain", "vol"]);
            let is_well = outcome.code == 0;
            assert!(is_well || !is_easy, "{what}: {outcome:?}");
            self.check_outcome(patient, &outcome);
        }
        let pid = self.server.unwrap();
        if self.random.one_in(2) {
            self.kill();
        } else {
            let outcome = self.udm(&["remove", "vol", "--force"]);
            assert_eq!(outcome.code, 0, "{what}: {outcome:?}");
            self.server = None;
            commands::wait_for_end(pid);
        }
        self.oracle.server_is_gone();
        self.create_after_sickness(Loss::Process, "by the next server, after a failing device");
    }

    /// A command that failed names the device.
    fn check_outcome(&self, patient: &Patient, outcome: &commands::Outcome) {
        if outcome.code == 0 {
            return;
        }
        let is_named = outcome.err.contains(&patient.name);
        assert!(outcome.code == 1 && is_named, "{patient:?}: {outcome:?}");
        let is_origin = outcome.err.contains("origin fails");
        assert!(!is_origin || patient.role == Role::Origin, "{patient:?}: {outcome:?}");
    }

    /// A cache's device is dead for good: the origin goes on without it.
    pub fn bury(&mut self, patient: &Patient) {
        let what = "without a device that died";
        self.judge(Loss::Nothing, true, "next to a dead device");
        let drained = self.udm(&["drain", "vol"]);
        self.oracle.note(format!("drain: {} {}", drained.code, drained.err.trim()));
        self.check_outcome(patient, &drained);
        self.check_blame(patient);
        let pid = self.server.unwrap();
        let refused = self.udm(&["detach", "vol"]);
        assert_eq!(refused.code, 1, "a detach without --accept-loss: {refused:?}");
        let detached = self.udm(&["detach", "vol", "--accept-loss", "--json"]);
        self.oracle.note(format!("detach: {} {}", detached.code, detached.err.trim()));
        if detached.code != 0 {
            let may_be = detached.err.contains("has not failed") && drained.code == 0;
            assert!(may_be || self.has_several(), "{patient:?}: {detached:?}, {drained:?}");
            self.ok(&["remove", "vol", "--force"]);
        }
        self.server = None;
        commands::wait_for_end(pid);
        self.oracle.server_is_gone();
        if detached.code != 0 {
            self.recover_disks();
            self.create_after_sickness(Loss::Process, what);
            return;
        }
        self.tally.detached += 1;
        let said: serde_json::Value = serde_json::from_str(&detached.out).unwrap();
        assert_eq!(said["is_known"], true, "{said}");
        self.accept_losses(patient, &said);
        // A new fast device takes the place of the dead one.
        self.recover_disks();
        let disks = Arc::clone(self.disks.as_ref().unwrap());
        disks.replace(&patient.name);
        if matches!(self.case.lines[patient.nth].target, Target::Cache { .. }) {
            disks.replace(&format!("meta{}", patient.nth));
        }
        self.compare_origins(Loss::Process);
        self.create();
        self.judge(Loss::Process, false, what);
    }

    fn has_several(&self) -> bool {
        self.caches.iter().flatten().count() > 1
    }

    /// The origin may be older in the ranges that were named.
    fn accept_losses(&mut self, patient: &Patient, said: &serde_json::Value) {
        let start = self.start_of(patient.nth);
        let data = self.origin_alone(patient.nth);
        let sector = SECTOR as u64;
        for range in said["lost_ranges"].as_array().unwrap() {
            let (at, len) = (range["offset"].as_u64().unwrap(), range["len"].as_u64().unwrap());
            let end = (at + len).div_ceil(sector).min(data.len() as u64 / sector);
            for number in at / sector..end {
                let bytes = &data[number as usize * SECTOR..][..SECTOR];
                self.oracle.accept(start + number, bytes, "where a cache was lost");
            }
        }
    }
}
