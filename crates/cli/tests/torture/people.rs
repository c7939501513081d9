//! What people do to files between two servers, and beside one.
//!
//! After each action, a new server is right about every sector, or the attach is refused. If it is
//! refused, the action is undone, and the attach must succeed.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::case::Target;
use crate::commands;
use crate::fixture::Fixture;
use crate::load::Load;
use crate::oracle::{Loss, SECTOR, fill};

/// An action on the files.
#[derive(Clone, Copy, Debug)]
enum Action {
    /// A cache gets another name.
    MovedCache,
    /// A copy of a cache is used in its place.
    CopiedCache,
    /// The next server has another runtime directory.
    Elsewhere,
    /// A cache loses its second half.
    CutCache,
    /// An origin does.
    CutOrigin,
    /// A second server takes the same files.
    SecondServer,
    /// An older copy of a cache is put in its place.
    RolledBack,
    /// Another file is put in an origin's place.
    ReplacedOrigin,
    /// The memory that servers share is removed.
    LostMemory,
    /// A server that only reads comes in between.
    ReadOnly,
    /// The cache is to be formatted.
    ForcedFormat,
    /// Its cache is to be given up, though it can be read.
    Detached,
    /// Everything is written back without a server.
    Recovered,
}

/// Actions on a device whose disks fail: such disks are not files that can be moved.
const ACTS_ON_DISKS: [Action; 5] = [
    Action::Elsewhere,
    Action::ReadOnly,
    Action::ForcedFormat,
    Action::Detached,
    Action::Recovered,
];

const ACTS: [Action; 13] = [
    Action::MovedCache,
    Action::CopiedCache,
    Action::Elsewhere,
    Action::CutCache,
    Action::CutOrigin,
    Action::SecondServer,
    Action::RolledBack,
    Action::ReplacedOrigin,
    Action::LostMemory,
    Action::ReadOnly,
    Action::ForcedFormat,
    Action::Detached,
    Action::Recovered,
];

/// Places of an origin that another program writes to, at most, and sectors of each.
const PLACES_MAX: u64 = 8;
/// The first MiB is among the areas of which a stamp has a checksum.
const NOTICED_SECTORS: u64 = 2048;
const PLACE_MAX: u64 = 64;

impl Fixture {
    /// Does an action on the files of a dead server. Returns whether a new server serves and was
    /// judged. Acknowledged data may be in shared memory only.
    pub fn people(&mut self) -> bool {
        if self.random.one_in(2) {
            return false;
        }
        let actions = if self.disks.is_some() { &ACTS_ON_DISKS[..] } else { &ACTS };
        let action = actions[self.random.below(actions.len() as u64) as usize];
        let nth = self.random.below(self.caches.len() as u64) as usize;
        let Some(cache) = self.caches[nth].clone() else { return false };
        self.oracle.note(format!("people: {action:?}, line {nth}"));
        self.was_touched = matches!(action, Action::CutOrigin | Action::ReplacedOrigin);
        self.tally.actions += 1;
        match action {
            Action::MovedCache => self.move_cache(nth, &cache),
            Action::CopiedCache => self.copy_cache(nth, &cache),
            Action::Elsewhere => self.go_elsewhere(),
            Action::CutCache => self.cut(&cache),
            Action::CutOrigin => self.cut(&self.origins[nth].clone()),
            Action::SecondServer => self.second_server(),
            Action::RolledBack => self.roll_back(&cache),
            Action::ReplacedOrigin => self.replace_origin(nth, &cache),
            Action::LostMemory => self.lose_memory(),
            Action::ReadOnly => self.read_only(false),
            // A new cache does not know that the origin failed a flush since the machine started.
            Action::ForcedFormat | Action::Detached if self.is_origin_doubted => self.attempt(),
            Action::ForcedFormat => self.attempt_with(&["--force-format"]),
            Action::Detached => self.detach(),
            Action::Recovered => self.recover(),
        }
    }

    /// Whether a server takes up what there is; if so, it must be right.
    fn attempt(&mut self) -> bool {
        self.attempt_with(&[])
    }

    fn attempt_with(&mut self, words: &[&str]) -> bool {
        match self.try_create(words) {
            Ok(()) => {
                self.judge(Loss::Process, false, "after what people did");
                true
            }
            Err(_) => {
                self.tally.refused += 1;
                false
            }
        }
    }

    fn move_cache(&mut self, nth: usize, cache: &Path) -> bool {
        let moved = beside(cache, "moved");
        std::fs::rename(cache, &moved).unwrap();
        self.caches[nth] = Some(moved.clone());
        let serves = self.attempt();
        if !serves {
            std::fs::rename(&moved, cache).unwrap();
            self.caches[nth] = Some(cache.to_owned());
        }
        serves
    }

    fn copy_cache(&mut self, nth: usize, cache: &Path) -> bool {
        let copied = beside(cache, "copy");
        copy(cache, &copied);
        self.caches[nth] = Some(copied.clone());
        let serves = self.attempt();
        if serves {
            std::fs::remove_file(cache).unwrap();
        } else {
            std::fs::remove_file(&copied).unwrap();
            self.caches[nth] = Some(cache.to_owned());
        }
        serves
    }

    fn go_elsewhere(&mut self) -> bool {
        let here = self.runtime.clone();
        let there = beside(&here, "else");
        self.make_runtime(&there);
        self.runtime = there;
        let serves = self.attempt();
        if !serves {
            self.runtime = here;
        }
        serves
    }

    /// A file that lost its second half is refused, and taken up when it is whole again.
    fn cut(&mut self, file: &Path) -> bool {
        let whole = beside(file, "whole");
        copy(file, &whole);
        let opened = OpenOptions::new().write(true).open(file).unwrap();
        let bytes = opened.metadata().unwrap().len();
        opened.set_len(bytes / 2 / 4096 * 4096).unwrap();
        if self.try_create(&[]).is_ok() {
            // Half of such a cache is a smaller one, if no dirty block was in the other half.
            let is_cache = |nth: usize| matches!(self.case.lines[nth].target, Target::Cache { .. });
            let nth = self.caches.iter().position(|cache| cache.as_deref() == Some(file));
            assert!(nth.is_some_and(is_cache), "a file that was cut to its half is taken up");
            self.judge(Loss::Process, false, "with half of the cache device");
            self.killed_under_load();
            opened.set_len(bytes).unwrap();
            std::fs::remove_file(&whole).unwrap();
            return false;
        }
        self.tally.refused += 1;
        if self.caches.iter().flatten().any(|cache| cache == file) {
            // The remaining data can be read if its state is known.
            self.read_only(true);
        }
        copy(&whole, file);
        std::fs::remove_file(&whole).unwrap();
        false
    }

    /// A file of some line loses its second half while it is served.
    pub fn cut_under_server(&mut self, load: &Load) -> (PathBuf, u64) {
        let nth = self.random.below(self.caches.len() as u64) as usize;
        let origin = self.origins[nth].clone();
        let cache = self.caches[nth].clone().filter(|_| self.random.one_in(2));
        let file = cache.unwrap_or(origin);
        self.oracle.note(format!("{} is cut", file.display()));
        let opened = OpenOptions::new().write(true).open(&file).unwrap();
        let bytes = opened.metadata().unwrap().len();
        *load.cut.lock().unwrap() = Some((file.clone(), bytes));
        opened.set_len(bytes / 2 / 4096 * 4096).unwrap();
        let pause = std::time::Duration::from_millis(self.random.below(200));
        std::thread::sleep(pause);
        (file, bytes)
    }

    /// A copy of a cache that was made while a server was idle is refused, or right, when that has
    /// died; and the newest is taken up.
    fn roll_back(&mut self, cache: &Path) -> bool {
        self.create();
        self.judge(Loss::Process, false, "before a copy");
        let older = beside(cache, "older");
        let server = self.server.unwrap();
        if self.random.one_in(2) {
            self.ok(&["flush", "vol"]);
        }
        commands::stop_server(server, true);
        std::thread::sleep(Duration::from_millis(20));
        copy(cache, &older);
        commands::stop_server(server, false);
        self.killed_under_load();
        let newest = beside(cache, "newest");
        std::fs::rename(cache, &newest).unwrap();
        std::fs::rename(&older, cache).unwrap();
        let serves = self.attempt();
        if serves {
            std::fs::remove_file(&newest).unwrap();
        } else {
            std::fs::rename(&newest, cache).unwrap();
        }
        serves
    }

    /// Another file in an origin's place never gets what a cache has for the old one.
    fn replace_origin(&mut self, nth: usize, cache: &Path) -> bool {
        let origin = self.origins[nth].clone();
        let described = self.metas[nth].as_deref().unwrap_or(cache);
        let found = self.udm(&["inspect", "--json", described.to_str().unwrap()]);
        let found: serde_json::Value = serde_json::from_str(&found.out).unwrap();
        let is_dirty = found["dirty_bytes"].as_u64() != Some(0);
        let target = &self.case.lines[nth].target;
        // A cache is bound by the first commit of its metadata, so before it has any block.
        let is_bound = match target {
            Target::Pcache { .. } => true,
            Target::Cache { .. } => found["blocks_used"].as_u64() != Some(0),
            _ => false,
        };
        let aside = beside(&origin, "aside");
        std::fs::rename(&origin, &aside).unwrap();
        File::create(&origin).unwrap().set_len(self.case.lines[nth].bytes).unwrap();
        match self.try_create(&[]) {
            Ok(()) => {
                assert!(!is_bound && !is_dirty, "another origin is taken: {found}");
                self.ok(&["flush", "vol"]);
                self.ok(&["drain", "vol"]);
                self.kill();
                let blocks = File::open(&origin).unwrap().metadata().unwrap().blocks();
                assert_eq!(blocks, 0, "another origin was written to: {found}");
            }
            Err(_) => self.tally.refused += 1,
        }
        std::fs::rename(&aside, &origin).unwrap();
        false
    }

    /// Without the memory of a dead server, the attach is refused, unless the memory held no dirty
    /// data. If the user accepts the loss, the durable data is there.
    fn lose_memory(&mut self) -> bool {
        for entry in std::fs::read_dir(&self.runtime).unwrap().flatten() {
            if entry.file_name().to_str().is_some_and(|name| name.ends_with(".shm")) {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        if self.attempt() {
            return true;
        }
        self.words = " lost_memory accept";
        self.create();
        self.words = "";
        self.judge(Loss::Memory, false, "without the memory of a dead server");
        true
    }

    /// A readable cache is detached only if its origin has all of its data.
    fn detach(&mut self) -> bool {
        let outcome = self.udm(&["detach", "vol", "--accept-loss"]);
        self.oracle.note(format!("detach: {} {}", outcome.code, outcome.err.trim()));
        assert!(outcome.code == 0 || outcome.code == 1, "{outcome:?}");
        self.tally.refused += u64::from(outcome.code == 1);
        self.attempt()
    }

    /// Without a server, everything can be written back: then the origins alone hold it.
    fn recover(&mut self) -> bool {
        // A known gap: of a dead device with several caches, what `create` knows of them is not
        // brought up to date when one of them is recovered, and it refuses the device after that.
        if self.caches.iter().flatten().count() > 1 {
            return false;
        }
        for nth in 0..self.origins.len() {
            let Some(cache) = &self.caches[nth] else { continue };
            let places = self.metas[nth].iter().chain([cache, &self.origins[nth]]);
            let places: Vec<String> = places.map(|path| path.display().to_string()).collect();
            let words: Vec<&str> = places.iter().map(String::as_str).collect();
            self.ok(&[&["recover"], &words[..]].concat());
        }
        self.oracle.note("recovered".into());
        self.compare_origins(Loss::Process);
        self.attempt()
    }

    /// Another program writes to an origin whose cache ended in order. The cache's clean data is
    /// not used any more. Its dirty data is written over the origin's new data only if the user
    /// asks for that. From then on, the origin does not change by itself.
    pub fn change_origin(&mut self) {
        let nth = self.random.below(self.origins.len() as u64) as usize;
        let described = self.metas[nth].clone().or_else(|| self.caches[nth].clone());
        let is_dirty = described.is_some_and(|path| {
            let found = self.ok(&["inspect", "--json", path.to_str().unwrap()]);
            let found: serde_json::Value = serde_json::from_str(&found.out).unwrap();
            found["dirty_bytes"].as_u64() != Some(0)
        });
        self.oracle.note(format!("origin {nth} is changed, its cache is dirty: {is_dirty}"));
        self.tally.actions += 1;
        for place in 0..1 + self.random.below(PLACES_MAX) {
            // These disks are known by their place, and each server has mounts of its own. Then
            // only a change of certain areas is certain to be noticed (`disk/stamp.rs`).
            let end = if place == 0 && self.disks.is_some() { NOTICED_SECTORS } else { u64::MAX };
            self.change_place(nth, !is_dirty, end);
        }
        if is_dirty {
            let refused = self.try_create(&[]).expect_err("an origin was changed");
            assert!(refused.contains("was changed since its cache ended"), "{refused}");
            self.tally.refused += 1;
            self.words = " rebind true";
        } else if self.random.one_in(3) {
            self.read_only(false);
        }
        self.create();
        self.judge(Loss::Process, false, "after an origin was changed");
        if self.random.one_in(2) {
            self.killed_under_load();
            self.create();
            self.judge(Loss::Process, false, "after an origin was changed, and a kill");
        }
        if is_dirty {
            self.drain_and_compare();
            self.words = "";
            self.create();
            self.judge(Loss::Process, false, "after an origin was changed, and a drain");
        }
    }

    /// Takes up the files after what people did. An origin that was moved away and back, or written
    /// again with the same bytes, counts as changed; then dirty data is written over it, if asked.
    pub fn create_after_people(&mut self) {
        let Err(refused) = self.try_create(&[]) else {
            return self.judge(Loss::Process, false, "after a server's end");
        };
        let is_changed = refused.contains("was changed since its cache ended");
        assert!(is_changed && self.was_touched, "an intact cache must be opened: {refused}");
        self.words = " rebind true";
        self.create();
        self.judge(Loss::Process, false, "with an origin that was touched");
        self.drain_and_compare();
        self.words = "";
        self.create();
        self.judge(Loss::Process, false, "after an origin was touched, and a drain");
    }

    /// Some sectors of an origin get values of their own.
    fn change_place(&mut self, nth: usize, is_sure: bool, end: u64) {
        let (line, start) = (&self.case.lines[nth], self.start_of(nth));
        let sectors = line.bytes / SECTOR as u64;
        let first = self.random.below(sectors.min(end));
        let count = (1 + self.random.below(PLACE_MAX)).min(sectors - first);
        let value = self.oracle.value();
        let mut bytes = vec![0; count as usize * SECTOR];
        for (number, sector) in (start + first..).zip(bytes.chunks_exact_mut(SECTOR)) {
            fill(number, value, sector);
            self.oracle.changed(number, value, is_sure);
        }
        let at = first * SECTOR as u64;
        match &self.disks {
            Some(disks) => disks.change(&format!("origin{nth}"), at, &bytes),
            None => {
                let file = OpenOptions::new().write(true).open(&self.origins[nth]).unwrap();
                file.write_all_at(&bytes, at).unwrap();
            }
        }
    }

    /// A read-only server shows the same data as the next writable one. A cache that was cut
    /// (`is_partial`) shows its remaining data, or is refused.
    fn read_only(&mut self, is_partial: bool) -> bool {
        self.is_read_only = true;
        let made = self.try_create(&[]);
        self.is_read_only = false;
        if let Err(error) = made {
            assert!(is_partial, "an intact cache can be read: {error}");
            self.tally.refused += 1;
            return false;
        }
        self.judge(Loss::Process, is_partial, "by a server that only reads");
        assert_ne!(self.refused_write(), 0, "a write to a read-only device");
        if self.random.one_in(2) {
            self.kill();
        } else {
            let pid = self.server.take().unwrap();
            self.ok(&["remove", "vol"]);
            commands::wait_for_end(pid);
        }
        false
    }

    /// While a server has the files open, a second server is refused, by any name of the files.
    fn second_server(&mut self) -> bool {
        self.create();
        let (runtime, caches) = (self.runtime.clone(), self.caches.clone());
        let there = beside(&runtime, "second");
        self.make_runtime(&there);
        self.runtime = there;
        for cache in self.caches.iter_mut().flatten() {
            let linked = beside(cache, "linked");
            std::fs::hard_link(&*cache, &linked).unwrap();
            *cache = linked;
        }
        let table = self.table();
        let outcome = self.udm(&["create", "second", "--table", &table]);
        assert_eq!(outcome.code, 1, "two servers have the same files: {outcome:?}");
        self.tally.refused += 1;
        self.caches.iter().flatten().for_each(|linked| std::fs::remove_file(linked).unwrap());
        (self.runtime, self.caches) = (runtime, caches);
        self.judge(Loss::Process, false, "next to a second server that was refused");
        true
    }
}

/// A name beside another's; two of them take turns.
fn beside(path: &Path, word: &str) -> PathBuf {
    let text = path.to_str().unwrap();
    match text.strip_suffix(&format!(".{word}")) {
        Some(before) => PathBuf::from(before),
        None => PathBuf::from(format!("{text}.{word}")),
    }
}

/// Copies a file with its holes, and no others: a hole in a cache, where data was, is a loss. A
/// file that is there keeps its place.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").args(["--sparse=auto", "-T"]).args([from, to]).status();
    assert!(copied.unwrap().success(), "cp {} {}", from.display(), to.display());
}
