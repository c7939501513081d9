//! Shared-memory words that outlive the process: state of a server that its medium does not have,
//! or not yet.
//!
//! The clients of a server that dies by SIGKILL continue to run, so the writes that it acknowledged
//! must survive it. A server therefore keeps such state in a file of the runtime directory, mapped
//! shared: the kernel keeps the pages, and the next server maps them again. The file need not
//! survive a power failure, so this module does not flush it.
//!
//! 1. The memory is only ever seen as `SharedWord`: other processes may change it at any time, and
//!    no reference to plain bytes exists.
//! 2. The mapping is exactly as long as the file, and lives until the last clone is dropped.
//! 3. The file is never truncated. It is created at its full length, with its blocks reserved,
//!    before it gets its name, so that no store meets a full file system.
//! 4. A process that maps a file has locked it, and holds the lock as long as the mapping. So two
//!    servers never use the same memory, even if they find it by different names.
//! 5. If the file's last name is removed under a living server, the next server would not find the
//!    memory. A file without a name cannot get one again, so [`renew_nameless`] moves the words to
//!    a new file, at the same addresses, while no thread stores.

#![allow(unsafe_code)]

mod header;
mod nameless;
mod store;
mod taken;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, FlockOperation, fallocate, flock};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{Error, Kind, Result};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex, SharedWord, lock};

pub use header::{Header, Heading};
pub use nameless::{are_nameless, renew_nameless};
pub use store::{Served, SharedStore, recall};
pub use taken::Taken;

const WORD_BYTES: usize = size_of::<SharedWord>();
/// No server needs more; a file that is larger is not ours.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// The kernel's identifier of this boot of the machine: a random UUID.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const BOOT_DIGITS: usize = 32;

/// A fixed number of shared 64-bit words. Clones share them.
#[derive(Clone, Debug)]
pub struct SharedWords {
    memory: Arc<Memory>,
    is_fresh: bool,
    boot: u64,
}

#[derive(Debug)]
enum Memory {
    Private(Box<[SharedWord]>),
    Mapped(Mapped),
}

/// A mapping of `words` words, unmapped when dropped.
#[derive(Debug)]
struct Mapped {
    start: NonNull<SharedWord>,
    words: usize,
    /// Boxed, because a mutex of the schedules is large.
    names: Box<Mutex<Vec<PathBuf>>>,
    /// Locked. Closed after the mapping.
    file: Box<Mutex<File>>,
}

// SAFETY: Mapped owns its mapping, and hands out only `&[SharedWord]`, which is Sync.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl SharedWords {
    /// Memory of this process alone, all zero: for tests, and where no state needs to outlive the
    /// process.
    pub fn private(words: usize) -> SharedWords {
        let memory = (0..words).map(|_| SharedWord::new(0)).collect();
        SharedWords { memory: Arc::new(Memory::Private(memory)), is_fresh: true, boot: 0 }
    }

    /// The same memory, as a process after a restart of the machine sees it.
    pub fn in_boot(self, boot: u64) -> SharedWords {
        SharedWords { boot, ..self }
    }

    /// The words of the file at `path`. A missing file is created with mode 0600 and all
    /// zero. A file of any other length is refused: another program or another version wrote it.
    pub fn open(path: &Path, words: usize) -> Result<SharedWords> {
        let found = match SharedWords::open_existing(path)? {
            Some(found) => found,
            None => SharedWords::create(path, words)?,
        };
        if found.words().len() != words {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "shared memory {} has {} bytes instead of {}: it has another version or does \
                     not belong to udm; remove it if no server uses it",
                    path.display(),
                    found.words().len() * WORD_BYTES,
                    words * WORD_BYTES
                ),
            ));
        }
        Ok(found)
    }

    /// The words of the file at `path`, if there is one.
    pub fn open_existing(path: &Path) -> Result<Option<SharedWords>> {
        let Some(file) = open_file(path)? else { return Ok(None) };
        lock_file(&file, path)?;
        let fail = |what: &str, e| Error::from_io(what, path.display(), e);
        let metadata = file.metadata().map_err(|e| fail("stat", e))?;
        // Removed before we had the lock, by a process that is done with it.
        if metadata.nlink() == 0 {
            return Ok(None);
        }
        let bytes = metadata.size();
        let is_ours = metadata.is_file()
            && metadata.uid() == rustix::process::geteuid().as_raw()
            && (1..=FILE_BYTES_MAX).contains(&bytes)
            && bytes.is_multiple_of(WORD_BYTES as u64);
        if !is_ours {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "shared memory {} ({bytes} bytes, of user {}) does not belong to udm; remove \
                     it if no server uses it",
                    path.display(),
                    metadata.uid()
                ),
            ));
        }
        let mapped = Mapped::new(file, bytes as usize / WORD_BYTES, path)
            .map_err(|e| fail("map", e.into()))?;
        Ok(Some(SharedWords::of(mapped, false)))
    }

    /// Words of a new file at `path`, all zero.
    pub fn create(path: &Path, words: usize) -> Result<SharedWords> {
        assert!(words > 0, "a mapping has at least one word");
        let file = create_file(path, words * WORD_BYTES)?;
        let mapped = Mapped::new(file, words, path)
            .map_err(|e| Error::from_io("map", path.display(), e.into()))?;
        Ok(SharedWords::of(mapped, true))
    }

    fn of(mapped: Mapped, is_fresh: bool) -> SharedWords {
        let memory = Arc::new(Memory::Mapped(mapped));
        nameless::note(&memory);
        SharedWords { memory, is_fresh, boot: boot() }
    }

    /// Gives the file one more name in the same folder.
    fn add_name(&self, path: PathBuf) -> Result<()> {
        let Memory::Mapped(mapped) = &*self.memory else { return Ok(()) };
        let mut names = lock(&mapped.names);
        let known = names.first().ok_or_else(|| {
            Error::new(Kind::NotFound, format!("{}: the memory is unnamed", path.display()))
        })?;
        std::fs::hard_link(known, &path).map_err(|e| Error::from_io("link", path.display(), e))?;
        names.push(path);
        Ok(())
    }

    /// Removes all names of the file except the last one that it was given.
    pub fn keep_last_name(&self) {
        if let Memory::Mapped(mapped) = &*self.memory {
            let mut names = lock(&mapped.names);
            let last = names.len().saturating_sub(1);
            names.drain(..last).for_each(|name| _ = std::fs::remove_file(name));
        }
    }

    /// The memory is not needed any more: removes the file's names, so no server finds it. If the
    /// words are not in a file, their first word becomes 0, and they count as new.
    pub fn remove(&self) {
        match &*self.memory {
            Memory::Private(words) => words[0].store(0, Ordering::SeqCst),
            Memory::Mapped(mapped) => {
                let mut names = lock(&mapped.names);
                if let Some(folder) = names.first().and_then(|name| name.parent()) {
                    mapped.remove_from(folder);
                }
                names.clear();
            }
        }
    }

    /// Identifies this boot of the machine. The content of a file from an earlier boot may be
    /// outdated: a power cut keeps any of its pages, or none.
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// The words.
    pub fn words(&self) -> &[SharedWord] {
        match &*self.memory {
            Memory::Private(words) => words,
            Memory::Mapped(mapped) => mapped.words(),
        }
    }

    /// Whether they were created by this call of `open` (or are private), and so were all zero.
    pub fn is_fresh(&self) -> bool {
        self.is_fresh
    }
}

/// The first half of the kernel's random number for this boot; 0 if there is none.
pub(crate) fn boot() -> u64 {
    let digits: String = boot_id().take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or(0)
}

/// The first characters of this identifier: a runtime directory that outlives a power failure must
/// not bring back memory from before it.
pub(crate) fn boot_text() -> String {
    boot_id().take(12).collect()
}

/// Refuses to work without an identifier of this boot. Otherwise udm could discard the memory of a
/// dead server, or could trust memory that a power failure has damaged.
fn know_boot() -> Result<()> {
    let problem = match std::fs::read_to_string(BOOT_ID) {
        Ok(text) if text.chars().filter(char::is_ascii_hexdigit).count() == BOOT_DIGITS => {
            return Ok(());
        }
        Ok(_) => "it has no such number".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(Error::new(
        Kind::Refused,
        format!(
            "the boot ID cannot be read, so shared memory of a server that died may be outdated: \
             {BOOT_ID}: {problem} (is /proc mounted?)"
        ),
    ))
}

fn boot_id() -> impl Iterator<Item = char> {
    let text = std::fs::read_to_string(BOOT_ID).unwrap_or_default();
    text.chars().filter(char::is_ascii_hexdigit).collect::<Vec<_>>().into_iter()
}

impl Mapped {
    fn new(file: File, words: usize, path: &Path) -> rustix::io::Result<Mapped> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice does not alias our memory.
        let start =
            unsafe { mmap(std::ptr::null_mut(), words * WORD_BYTES, protection, flags, &file, 0)? };
        let start = NonNull::new(start.cast()).expect("mmap returns no null page on success");
        let names = Box::new(Mutex::new(vec![path.to_owned()]));
        Ok(Mapped { start, words, names, file: Box::new(Mutex::new(file)) })
    }

    /// Removes all of the file's names in a folder, including the names left by a server that died
    /// while it took the memory over.
    fn remove_from(&self, folder: &Path) {
        let Ok(own) = lock(&self.file).metadata() else { return };
        let is_own = |entry: &std::fs::DirEntry| {
            entry.metadata().is_ok_and(|found| (found.dev(), found.ino()) == (own.dev(), own.ino()))
        };
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter(is_own).for_each(|entry| _ = std::fs::remove_file(entry.path()));
    }

    /// Maps `file`, which has the same words, in place of the present file. The caller ensures that
    /// no thread stores to the words.
    fn replace(&self, file: File) -> rustix::io::Result<()> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE | MapFlags::FIXED;
        let bytes = self.words * WORD_BYTES;
        // SAFETY: exactly the mapping made in `new`, which stays readable and writable at each
        // moment, with the same content. A word allows changes by others at any time.
        unsafe { mmap(self.start.as_ptr().cast(), bytes, protection, flags, &file, 0)? };
        *lock(&self.file) = file;
        Ok(())
    }

    fn words(&self) -> &[SharedWord] {
        // SAFETY: the mapping is page-aligned, `words` words long (checked against the file's
        // length in `open`), readable and writable, and lives as long as `self`. A word allows
        // any bit pattern and changes by other processes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.words) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; `words` borrows `self`, so no reference to it
        // is left. Failure would only leak.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.words * WORD_BYTES) };
    }
}

fn open_file(path: &Path) -> Result<Option<File>> {
    match OpenOptions::new().read(true).write(true).custom_flags(no_follow()).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::from_io("open", path.display(), e)),
    }
}

/// O_NOFOLLOW: a link in a runtime directory is an attack.
fn no_follow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits() as i32
}

/// Locks the file: no other server has it, and none gets it while it is open.
fn lock_file(file: &File, path: &Path) -> Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::new(
            Kind::Busy,
            format!("shared memory {} is used by another server", path.display()),
        )),
        Err(e) => Err(Error::from_io("lock", path.display(), e.into())),
    }
}

/// Makes the file under another name first, so that no process ever opens a short one, or one that
/// is not locked.
fn create_file(path: &Path, bytes: usize) -> Result<File> {
    let fail = |operation: &str, e: std::io::Error| Error::from_io(operation, path.display(), e);
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".new{}", std::process::id()));
    let temporary = Path::new(&name);
    let _ = std::fs::remove_file(temporary);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(temporary)
        .map_err(|e| fail("create", e))?;
    let named = lock_file(&file, temporary)
        .and_then(|()| {
            fallocate(&file, FallocateFlags::empty(), 0, bytes as u64)
                .map_err(|e| fail("reserve space for", e.into()))
        })
        .and_then(|()| std::fs::hard_link(temporary, path).map_err(|e| fail("create", e)));
    let _ = std::fs::remove_file(temporary);
    named.map(|()| file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn words_outlive_the_mapping() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words");
        let first = SharedWords::open(&path, 1000).unwrap();
        assert!(first.is_fresh());
        assert_eq!(first.words().len(), 1000);
        assert!(first.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        first.clone().words()[999].store(7, Ordering::Relaxed);
        assert_eq!(SharedWords::open(&path, 1000).unwrap_err().kind(), Kind::Busy);
        let other_name = folder.path().join("link");
        first.add_name(other_name.clone()).unwrap();
        assert_eq!(SharedWords::open(&other_name, 1000).unwrap_err().kind(), Kind::Busy);
        std::fs::remove_file(&other_name).unwrap();
        drop(first);
        let second = SharedWords::open(&path, 1000).unwrap();
        assert!(!second.is_fresh());
        assert_eq!(second.words()[999].load(Ordering::Relaxed), 7);

        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "only the file is left");
    }

    #[test]
    fn a_file_of_another_length_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words");
        drop(SharedWords::open(&path, 512).unwrap());
        let error = SharedWords::open(&path, 511).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid);
        assert!(error.to_string().contains("4096 bytes instead of 4088"), "{error}");
        let error = SharedWords::open(&folder.path().join("no/words"), 1).unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound);
    }

    #[test]
    fn private_words_are_fresh_and_shared_by_clones() {
        let words = SharedWords::private(3);
        let second = words.clone();
        words.words()[2].store(1, Ordering::Relaxed);
        assert!(words.is_fresh());
        assert_eq!(second.words()[2].load(Ordering::Relaxed), 1);
    }
}
