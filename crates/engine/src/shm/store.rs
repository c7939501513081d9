//! The store of shared memory that outlives a server, where the next server finds it.
//!
//! Memory is named by the attach that created it or took it over: a random number that the medium's
//! label also has. The medium's path is not part of the name. So a medium that was moved finds its
//! memory, and another medium at its old path does not. A server that detaches in order leaves no
//! memory.
//!
//! 1. While the label says that the medium is served, the memory of that name exists: it is created
//!    before the label is stored, and removed after the label changed.
//! 2. Memory is opened only by the label that names it, and removed only by the holder of its lock;
//!    or after a restart of the machine, when it is not valid any more.

use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex, lock};

use super::{SharedWords, boot, boot_text, know_boot};

/// Keeps the memory of one target's servers.
#[derive(Clone, Debug)]
pub struct SharedStore(Arc<Place>);

#[derive(Debug)]
enum Place {
    /// Files of a directory.
    Folder(Folder),
    /// One piece of memory, for tests; words that are all zero count as none.
    One(Mutex<Option<SharedWords>>, u64),
    /// Memory of a server before this version, in its old place, for tests.
    Old(SharedWords),
    /// Memory does not outlive the process.
    Nowhere,
}

#[derive(Debug)]
struct Folder {
    path: PathBuf,
    target: &'static str,
    /// Where servers before this version kept it.
    old: Option<PathBuf>,
}

/// The server that a label names: it has the medium, or had it and died.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The attach.
    pub id: u64,
    /// Whether the machine was not restarted since.
    pub is_of_this_boot: bool,
    /// Where its memory should be, for people.
    pub place: String,
}

impl From<SharedWords> for SharedStore {
    fn from(words: SharedWords) -> SharedStore {
        let boot = words.boot();
        SharedStore(Arc::new(Place::One(Mutex::new(Some(words)), boot)))
    }
}

impl SharedStore {
    /// Memory of `target` in files of a directory. `old`: where servers before this version kept
    /// it, by the medium's path.
    pub fn folder(path: &Path, target: &'static str, old: Option<PathBuf>) -> Result<SharedStore> {
        know_boot()?;
        Ok(SharedStore(Arc::new(Place::Folder(Folder { path: path.to_owned(), target, old }))))
    }

    /// One piece of memory, made on first use: for tests.
    pub fn one(boot: u64) -> SharedStore {
        SharedStore(Arc::new(Place::One(Mutex::new(None), boot)))
    }

    /// One piece of memory where servers before this version kept it: for tests.
    pub fn old(words: SharedWords) -> SharedStore {
        SharedStore(Arc::new(Place::Old(words)))
    }

    /// Memory of this process alone: its acknowledged and unflushed writes die with it.
    pub fn nowhere() -> Result<SharedStore> {
        know_boot()?;
        Ok(SharedStore(Arc::new(Place::Nowhere)))
    }

    /// Whether memory outlives the process.
    pub fn survives(&self) -> bool {
        !matches!(*self.0, Place::Nowhere)
    }

    /// Identifies this boot of the machine.
    pub fn boot(&self) -> u64 {
        match &*self.0 {
            Place::Folder(_) | Place::Nowhere => boot(),
            Place::One(_, boot) => *boot,
            Place::Old(words) => words.boot(),
        }
    }

    /// The directory, for labels and people.
    pub fn place(&self) -> String {
        match &*self.0 {
            Place::Folder(folder) => folder.path.to_string_lossy().into_owned(),
            Place::One(..) | Place::Old(_) => "memory".into(),
            Place::Nowhere => String::new(),
        }
    }

    /// The path of memory of this name, stored by a server in the directory `place`.
    pub fn path_in(&self, place: &str, id: u64) -> String {
        match &*self.0 {
            Place::Folder(folder) => {
                let path = Path::new(place).join(folder.name_of(id));
                path.to_string_lossy().into_owned()
            }
            _ => place.to_owned(),
        }
    }

    /// The memory of this name, if it exists; locked for this process alone.
    pub fn find(&self, id: u64) -> Result<Option<SharedWords>> {
        match &*self.0 {
            Place::Folder(folder) => {
                SharedWords::open_existing(&folder.path.join(folder.name_of(id)))
            }
            Place::One(one, _) => {
                let one = lock(one).clone();
                Ok(one.filter(|words| words.words()[0].load(Ordering::SeqCst) != 0))
            }
            Place::Old(_) | Place::Nowhere => Ok(None),
        }
    }

    /// The memory left by a server before this version, which named it by the medium's path.
    pub fn find_old(&self) -> Result<Option<SharedWords>> {
        match &*self.0 {
            Place::Folder(Folder { old: Some(path), .. }) => SharedWords::open_existing(path),
            Place::Old(words) => Ok(Some(words.clone())),
            _ => Ok(None),
        }
    }

    /// New memory of this name, all zero. Removes memory that earlier boots left.
    pub fn create(&self, id: u64, words: usize) -> Result<SharedWords> {
        match &*self.0 {
            Place::Folder(folder) => {
                folder.sweep();
                SharedWords::create(&folder.path.join(folder.name_of(id)), words)
            }
            Place::One(one, boot) => {
                let mut one = lock(one);
                let new = || SharedWords::private(words).in_boot(*boot);
                let known = one.get_or_insert_with(new);
                known.words().iter().for_each(|word| word.store(0, Ordering::SeqCst));
                Ok(known.clone())
            }
            Place::Old(old) => Ok(SharedWords::private(words).in_boot(old.boot())),
            Place::Nowhere => Ok(SharedWords::private(words)),
        }
    }

    /// Gives memory the name of the attach that takes it over, in addition to its present name.
    pub fn rename(&self, words: &SharedWords, id: u64) -> Result<()> {
        match &*self.0 {
            Place::Folder(folder) => words.add_name(folder.path.join(folder.name_of(id))),
            _ => Ok(()),
        }
    }
}

impl Folder {
    fn name_of(&self, id: u64) -> String {
        format!("{}-{id:016x}-{}.shm", self.target, boot_text())
    }

    /// Removes what was left before the machine was restarted.
    fn sweep(&self) {
        let ours = format!("-{}.shm", boot_text());
        for entry in std::fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(stem) = name.to_str().and_then(|name| name.strip_suffix(".shm")) else {
                continue;
            };
            let is_memory = ["pcache-", "writecache-"].iter().any(|target| {
                let rest = stem.strip_prefix(target).and_then(|rest| rest.rsplit_once('-'));
                rest.is_some_and(|(_, boot)| {
                    boot.len() == 12 && boot.bytes().all(|byte| byte.is_ascii_hexdigit())
                })
            });
            if is_memory && !name.to_string_lossy().ends_with(&ours) {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }
}

/// The memory of a medium whose label says `served`. If it should exist and does not, this refuses,
/// unless the user accepts the loss; `notes` then describes the loss. `is_its`: whether memory of
/// that name belongs to the medium.
pub fn recall(
    shared_store: &SharedStore,
    served: Option<&Served>,
    accepts_loss: bool,
    medium: &str,
    is_its: impl Fn(&SharedWords) -> Result<bool>,
    notes: &mut Vec<String>,
) -> Result<Option<SharedWords>> {
    let Some(served) = served else { return Ok(None) };
    if !served.is_of_this_boot {
        notes.push(
            "the last server was killed, and the machine was rebooted since: acknowledged, \
             unflushed writes are lost"
                .into(),
        );
        return Ok(None);
    }
    let (kind, why) = match shared_store.find(served.id) {
        Ok(Some(words)) if is_its(&words)? => return Ok(Some(words)),
        Ok(Some(_)) => (Kind::Refused, "the file there is not that shared memory".to_owned()),
        Ok(None) if shared_store.place().is_empty() => {
            (Kind::Refused, "this process lacks a runtime directory".to_owned())
        }
        Ok(None) => (Kind::Refused, format!("it is not in {}", shared_store.place())),
        Err(error) if error.kind() == Kind::Busy => (
            Kind::Busy,
            "a running server uses the shared memory, with this medium or with one that this is a \
            copy of"
                .into(),
        ),
        Err(error) => return Err(error),
    };
    let what = format!(
        "its last server was killed, and acknowledged, unflushed writes are in shared memory at {}",
        served.place
    );
    if accepts_loss {
        notes.push(format!("{what}; {why}: these writes are LOST"));
        return Ok(None);
    }
    Err(Error::new(
        kind,
        format!(
            "{medium}: {what}; {why}. Use the runtime directory of that server (UDM_RUNTIME_DIR), \
             or add `lost_memory accept` to the table to continue without them"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).unwrap().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn memory_is_found_by_its_name_and_gone_when_removed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("pcache-c-01234567-0123456789ab.shm"), "old").unwrap();
        std::fs::write(folder.path().join("foreign-0123456789ab.shm"), "else's").unwrap();
        let shared_store = SharedStore::folder(folder.path(), "pcache", None).unwrap();
        assert!(shared_store.find(7).unwrap().is_none());
        let words = shared_store.create(7, 16).unwrap();
        assert_eq!(names(folder.path()).len(), 2, "files of another boot are gone");
        assert_eq!(shared_store.find(7).unwrap_err().kind(), Kind::Busy);
        assert!(shared_store.create(7, 16).is_err());
        shared_store.rename(&words, 8).unwrap();
        drop(words);
        let words = shared_store.find(7).unwrap().unwrap();
        assert_eq!(shared_store.find(8).unwrap_err().kind(), Kind::Busy, "one memory, one server");
        drop(words);
        let words = shared_store.find(8).unwrap().unwrap();
        words.remove();
        drop(words);
        assert_eq!(names(folder.path()), ["foreign-0123456789ab.shm"]);
    }

    #[test]
    fn what_should_be_there_and_is_not_is_refused() {
        let shared_store = SharedStore::one(3);
        let served = Served { id: 7, is_of_this_boot: true, place: "/run/x/m".into() };
        let recall = |served: Option<&Served>, accepts| {
            let mut notes = Vec::new();
            let found = recall(&shared_store, served, accepts, "C", |_| Ok(true), &mut notes)?;
            Ok::<_, Error>((found.is_some(), notes.len()))
        };
        assert_eq!(recall(None, false).unwrap(), (false, 0));
        let error = recall(Some(&served), false).unwrap_err().to_string();
        assert!(error.contains("/run/x/m") && error.contains("lost_memory accept"), "{error}");
        assert_eq!(recall(Some(&served), true).unwrap(), (false, 1));
        let other = Served { is_of_this_boot: false, ..served.clone() };
        assert_eq!(recall(Some(&other), false).unwrap(), (false, 1));
        shared_store.create(7, 4).unwrap().words()[0].store(1, Ordering::SeqCst);
        assert_eq!(recall(Some(&served), false).unwrap(), (true, 0));
    }
}
