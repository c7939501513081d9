//! What people do to files between two servers, and beside one.
//!
//! Whatever was done, a server that starts is right about every sector, or it is refused. Where it
//! is refused, the act is undone, and what is as it was must be taken up.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::commands;
use crate::load::Load;
use crate::oracle::Loss;
use crate::scene::Target;
use crate::world::World;

/// What is done.
#[derive(Clone, Copy, Debug)]
enum Act {
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
}

const ACTS: [Act; 10] = [
    Act::MovedCache,
    Act::CopiedCache,
    Act::Elsewhere,
    Act::CutCache,
    Act::CutOrigin,
    Act::SecondServer,
    Act::RolledBack,
    Act::ReplacedOrigin,
    Act::LostMemory,
    Act::ReadOnly,
];

impl World {
    /// Does something to the files of a server that is gone; whether a new one serves and was
    /// judged. What it had acknowledged may be in shared memory only.
    pub fn people(&mut self) -> bool {
        if self.random.one_in(2) {
            return false;
        }
        let act = ACTS[self.random.below(ACTS.len() as u64) as usize];
        let nth = self.random.below(self.caches.len() as u64) as usize;
        let Some(cache) = self.caches[nth].clone() else { return false };
        self.oracle.note(format!("people: {act:?}, line {nth}"));
        self.tally.acts += 1;
        match act {
            Act::MovedCache => self.move_cache(nth, &cache),
            Act::CopiedCache => self.copy_cache(nth, &cache),
            Act::Elsewhere => self.go_elsewhere(),
            Act::CutCache => self.cut(&cache),
            Act::CutOrigin => self.cut(&self.origins[nth].clone()),
            Act::SecondServer => self.second_server(),
            Act::RolledBack => self.roll_back(&cache),
            Act::ReplacedOrigin => self.replace_origin(nth, &cache),
            Act::LostMemory => self.lose_memory(),
            Act::ReadOnly => self.read_only(false),
        }
    }

    /// Whether a server takes up what there is; if so, it must be right.
    fn attempt(&mut self) -> bool {
        match self.try_create(&[]) {
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
            let is_cache =
                |nth: usize| matches!(self.scene.lines[nth].target, Target::Cache { .. });
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
            // What is left can be read, if it is known what that is.
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
        let target = &self.scene.lines[nth].target;
        // A cache is bound by the first commit of its metadata, so before it has any block.
        let is_bound = match target {
            Target::Pcache { .. } => true,
            Target::Cache { .. } => found["blocks_used"].as_u64() != Some(0),
            _ => false,
        };
        let aside = beside(&origin, "aside");
        std::fs::rename(&origin, &aside).unwrap();
        File::create(&origin).unwrap().set_len(self.scene.lines[nth].bytes).unwrap();
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

    /// Without the memory that a dead server left, nothing is taken up, or nothing was in it; and
    /// if the loss is accepted, what was durable is there.
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

    /// A server that may not write shows what the next one will. Of a cache that was cut, that
    /// `is_partial`, it shows what is left, or is refused.
    fn read_only(&mut self, is_partial: bool) -> bool {
        self.is_read_only = true;
        let made = self.try_create(&[]);
        self.is_read_only = false;
        if let Err(error) = made {
            assert!(is_partial, "what is whole can be read: {error}");
            self.tally.refused += 1;
            return false;
        }
        self.judge(Loss::Process, is_partial, "by a server that only reads");
        assert_ne!(self.refused_write(), 0, "a write to what is read only");
        if self.random.one_in(2) {
            self.kill();
        } else {
            let pid = self.server.take().unwrap();
            self.ok(&["remove", "vol"]);
            commands::wait_for_end(pid);
        }
        false
    }

    /// While a server has the files, nobody else gets them, whatever they are called.
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
        self.judge(Loss::Process, false, "beside a second server that was refused");
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

/// Copies a file with its holes; one that is there keeps its place.
fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").args(["--sparse=always", "-T"]).args([from, to]).status();
    assert!(copied.unwrap().success(), "cp {} {}", from.display(), to.display());
}
