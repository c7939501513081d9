//! The header of every server's shared memory: its kind, version and shape, the attach that owns
//! it, and the boot of the machine. Each target chooses the words for these fields.
//!
//! There is one rule for versions: a server reads versions up to its own, and refuses any other
//! with an error that names it. The unreadable memory may hold acknowledged writes.

use crate::error::{Error, Kind, Result};
use crate::sync::SharedWord;
use crate::sync::atomic::Ordering;

use super::SharedWords;

/// The words in which a target's memory has its header, and their expected values.
#[derive(Debug)]
pub struct Header {
    /// Says that it is this target's; stored last.
    pub magic: u64,
    /// The newest version that is known.
    pub version: u64,
    /// Most stripes that a header may claim.
    pub stripes_max: usize,
    /// The word of the magic number.
    pub magic_at: usize,
    /// The word of the version, and of the number of stripes in its lower bits.
    pub shape_at: usize,
    /// Of the attach that owns the memory.
    pub attach_at: usize,
    /// Of the attach that is taking it over.
    pub attach_next_at: usize,
    /// Of the run of the machine.
    pub boot_at: usize,
}

/// The content of a header.
#[derive(Clone, Copy, Debug)]
pub struct Heading {
    /// The version of the server that left it.
    pub version: u64,
    /// Its stripes.
    pub stripes: usize,
    /// The attach, as on the label; and another attach that was taking the memory over.
    pub attach_ids: [u64; 2],
    /// Whether the machine has not been started again since.
    pub is_of_this_boot: bool,
}

impl Heading {
    /// Whether the memory belongs to an attach.
    pub fn is_of(&self, attach_id: u64) -> bool {
        self.is_of_this_boot && self.attach_ids.contains(&attach_id)
    }
}

const STRIPES_MASK: u64 = 0xFFFF_FFFF;

impl Header {
    fn load(&self, words: &[SharedWord], at: usize) -> u64 {
        words[at].load(Ordering::SeqCst)
    }

    /// Reads the header: `None` if no server has used the memory, an error if a server of another
    /// version has. `has_room`: whether the memory is long enough for a version and a number of
    /// stripes.
    pub fn read(
        &self,
        shared: &SharedWords,
        has_room: impl Fn(u64, usize) -> bool,
    ) -> Result<Option<Heading>> {
        let words = shared.words();
        let last = self.magic_at.max(self.shape_at).max(self.attach_at);
        let last = last.max(self.attach_next_at).max(self.boot_at);
        if words.len() <= last || self.load(words, self.magic_at) != self.magic {
            return Ok(None);
        }
        let (version, stripes) = self.shape(shared);
        let is_known = (1..=self.version).contains(&version) && stripes <= self.stripes_max;
        if !is_known || !has_room(version, stripes) {
            return Err(Error::new(
                Kind::Unsupported,
                format!(
                    "the shared memory of the last server has version {version} and {stripes} \
                     stripes in {} words, but this udm supports versions up to {}: use the udm of \
                     that server, or add `lost_memory accept` to the table to continue without it",
                    words.len(),
                    self.version
                ),
            ));
        }
        Ok(Some(Heading {
            version,
            stripes,
            attach_ids: [self.attach_at, self.attach_next_at].map(|at| self.load(words, at)),
            is_of_this_boot: self.load(words, self.boot_at) == shared.boot(),
        }))
    }

    /// The version and the number of stripes in the header, unchecked.
    pub fn shape(&self, shared: &SharedWords) -> (u64, usize) {
        let shape = self.load(shared.words(), self.shape_at);
        (shape >> 32, (shape & STRIPES_MASK) as usize)
    }

    /// Gives the memory this version's shape. Its words must not have a meaning in either shape at
    /// this moment.
    pub fn set_shape(&self, shared: &SharedWords, stripes: usize) {
        let shape = self.version << 32 | stripes as u64;
        shared.words()[self.shape_at].store(shape, Ordering::SeqCst);
    }

    /// Makes an attach the owner of the memory, and records that in the header.
    pub fn own(&self, shared: &SharedWords, attach_id: u64) {
        let words = shared.words();
        words[self.boot_at].store(shared.boot(), Ordering::SeqCst);
        words[self.attach_next_at].store(attach_id, Ordering::SeqCst);
        words[self.attach_at].store(attach_id, Ordering::SeqCst);
        words[self.magic_at].store(self.magic, Ordering::SeqCst);
    }

    /// Another attach is about to take the memory over from `owner`, which the label names: both
    /// attaches own the memory. The owner may itself have been taking the memory over when its
    /// server died.
    pub fn announce_attach(&self, shared: &SharedWords, owner: u64, attach_id: u64) {
        shared.words()[self.attach_at].store(owner, Ordering::SeqCst);
        shared.words()[self.attach_next_at].store(attach_id, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header {
        magic: 7,
        version: 3,
        stripes_max: 4,
        magic_at: 0,
        shape_at: 1,
        attach_at: 2,
        attach_next_at: 5,
        boot_at: 4,
    };

    #[test]
    fn either_attach_owns_memory_that_is_taken_over() {
        let shared = SharedWords::private(8);
        let read = || HEADER.read(&shared, |_, _| true).unwrap();
        assert!(read().is_none());
        HEADER.set_shape(&shared, 2);
        HEADER.own(&shared, 77);
        let found = read().unwrap();
        assert!((found.version, found.stripes) == (3, 2) && found.is_of(77) && !found.is_of(78));
        HEADER.announce_attach(&shared, 77, 78);
        let found = read().unwrap();
        assert!(found.is_of(77) && found.is_of(78) && !found.is_of(79));
        HEADER.announce_attach(&shared, 78, 79);
        let found = read().unwrap();
        assert!(found.is_of(78) && found.is_of(79) && !found.is_of(77));
        assert!(HEADER.read(&SharedWords::private(5), |_, _| true).unwrap().is_none());
    }

    #[test]
    fn what_is_of_another_version_or_shape_is_an_error_that_says_so() {
        let shared = SharedWords::private(8);
        HEADER.own(&shared, 77);
        for (version, stripes) in [(0, 1), (4, 1), (1 << 31, 1), (3, 5)] {
            shared.words()[1].store(version << 32 | stripes, Ordering::SeqCst);
            let error = HEADER.read(&shared, |_, _| true).unwrap_err().to_string();
            assert!(error.contains(&format!("version {version} and {stripes} stripes")), "{error}");
        }
        HEADER.set_shape(&shared, 4);
        assert!(HEADER.read(&shared, |_, stripes| stripes < 4).is_err());
        assert!(HEADER.read(&shared, |version, _| version == 3).unwrap().is_some());
    }
}
