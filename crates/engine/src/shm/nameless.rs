//! Memory of living devices whose file was removed from its folder.

use std::io::Write;
use std::os::unix::fs::MetadataExt;

use zerocopy::IntoBytes;

use crate::error::{Error, Kind, Result};
use crate::sync::atomic::Ordering;
use crate::sync::statics::Mutex;
use crate::sync::{Arc, Weak, lock};

use super::{Mapped, Memory, WORD_BYTES, create_file};

/// All mapped memory of this process.
static LIVING: Mutex<Vec<Weak<Memory>>> = Mutex::new(Vec::new());

/// New mapped memory.
pub(super) fn note(memory: &Arc<Memory>) {
    let mut living = LIVING.lock().expect("threads do not panic with this lock");
    living.retain(|memory| memory.strong_count() > 0);
    living.push(Arc::downgrade(memory));
}

fn living() -> Vec<Arc<Memory>> {
    let living = LIVING.lock().expect("threads do not panic with this lock");
    living.iter().filter_map(Weak::upgrade).collect()
}

/// Whether memory of this process has lost the file's last name: if the process is killed, the next
/// server will not find it.
pub fn are_nameless() -> bool {
    living()
        .iter()
        .any(|memory| matches!(&**memory, Memory::Mapped(mapped) if mapped.is_nameless()))
}

/// Moves such memory to new files with the old names. The devices are suspended, so that no thread
/// stores to the memory meanwhile.
pub fn renew_nameless() -> Result<()> {
    living().iter().filter(|memory| memory.is_nameless()).try_for_each(|memory| memory.renew())
}

impl Memory {
    fn is_nameless(&self) -> bool {
        matches!(self, Memory::Mapped(mapped) if mapped.is_nameless())
    }

    fn renew(&self) -> Result<()> {
        match self {
            Memory::Mapped(mapped) => mapped.renew(),
            Memory::Private(_) => Ok(()),
        }
    }
}

impl Mapped {
    /// Removed memory also lacks names, but does not count.
    fn is_nameless(&self) -> bool {
        let is_gone = || lock(&self.file).metadata().is_ok_and(|found| found.nlink() == 0);
        !lock(&self.names).is_empty() && is_gone()
    }

    fn renew(&self) -> Result<()> {
        let mut names = lock(&self.names);
        let last = names.len().saturating_sub(1);
        names.drain(..last);
        let path = names.first().ok_or_else(|| Error::new(Kind::NotFound, "unnamed memory"))?;
        let fail = |what: &str, error| Error::from_io(what, path.display(), error);
        let mut file = create_file(path, self.words * WORD_BYTES)?;
        let words: Vec<u64> = self.words().iter().map(|word| word.load(Ordering::SeqCst)).collect();
        let moved = file
            .write_all(words.as_bytes())
            .map_err(|error| fail("write", error))
            .and_then(|()| self.replace(file).map_err(|errno| fail("map", errno.into())));
        // An incomplete file must not be taken for the memory.
        moved.inspect_err(|_| drop(std::fs::remove_file(path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::SharedWords;

    #[test]
    fn memory_whose_file_was_removed_gets_a_new_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words");
        let words = SharedWords::create(&path, 1000).unwrap();
        words.words()[999].store(7, Ordering::SeqCst);
        std::fs::remove_file(&path).unwrap();
        assert!(are_nameless() && words.memory.is_nameless());
        words.memory.renew().unwrap();
        assert!(!words.memory.is_nameless());
        words.words()[0].store(8, Ordering::SeqCst);
        assert_eq!(SharedWords::open(&path, 1000).unwrap_err().kind(), Kind::Busy, "locked");
        drop(words);
        let again = SharedWords::open(&path, 1000).unwrap();
        let words = again.words();
        assert_eq!(
            (words[999].load(Ordering::SeqCst), words[0].load(Ordering::SeqCst)),
            (7, 8),
            "stores before and after the move"
        );
        // Memory that its owner has removed stays away.
        again.remove();
        assert!(!again.memory.is_nameless() && !path.exists());
    }
}
