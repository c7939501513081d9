//! The shared memory of an attach in progress: memory that a dead server left, or new memory. New
//! memory is removed again, unless the label is changed to name it.

use crate::error::{Error, Kind, Result};

use super::{SharedStore, SharedWords};

/// The memory of an attach that is under way.
#[derive(Debug)]
pub struct Taken {
    shared_store: SharedStore,
    words: SharedWords,
    attach_id: u64,
    /// The attach that the label names.
    owner: u64,
    is_new: bool,
    is_named: bool,
}

impl Taken {
    /// Takes `found`, which has at least `words_min` words, or creates `words` new ones for this
    /// attach. `name`: the medium's name. `owner`: the attach that its label names.
    pub fn of(
        shared_store: SharedStore,
        found: Option<SharedWords>,
        (words, words_min): (usize, usize),
        (attach_id, owner): (u64, u64),
        name: &str,
    ) -> Result<Taken> {
        let is_new = found.is_none();
        let words = match found {
            Some(words) => words,
            None => shared_store.create(attach_id, words)?,
        };
        if words.words().len() < words_min {
            let what = "the shared memory of the last server has another version";
            return Err(Error::new(Kind::Unsupported, format!("{name}: {what}")));
        }
        Ok(Taken { shared_store, words, attach_id, owner, is_new, is_named: false })
    }

    /// Whether no dead server has left it.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The memory itself.
    pub fn words(&self) -> &SharedWords {
        &self.words
    }

    /// The store that holds the memory.
    pub fn shared_store(&self) -> &SharedStore {
        &self.shared_store
    }

    /// The attach that is under way.
    pub fn attach_id(&self) -> u64 {
        self.attach_id
    }

    /// The label is about to name the memory, so it is kept in any case. Memory that a dead server
    /// left gets a second name. Before that, `announce` records in it the attach that owned it and
    /// the attach that will own it.
    pub fn name(&mut self, announce: impl FnOnce(&SharedWords, u64, u64)) -> Result<()> {
        if !self.is_new {
            announce(&self.words, self.owner, self.attach_id);
            self.shared_store.rename(&self.words, self.attach_id)?;
        }
        self.is_named = true;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.is_new && !self.is_named {
            self.words.remove();
        }
    }
}
