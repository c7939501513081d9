//! The memory of an attach that is under way: what a dead server left, or new. New memory is
//! removed again, unless the label comes to name it.

use crate::error::{Error, Kind, Result};

use super::{Keeper, SharedWords};

/// The memory of an attach that is under way.
#[derive(Debug)]
pub struct Taken {
    keeper: Keeper,
    words: SharedWords,
    attach_id: u64,
    /// The attach that the label names.
    owner: u64,
    is_new: bool,
    is_named: bool,
}

impl Taken {
    /// `found`, which has `words_min` words at least, or `words` new ones for this attach. `name`:
    /// the medium's. `owner`: the attach that its label names.
    pub fn of(
        keeper: Keeper,
        found: Option<SharedWords>,
        (words, words_min): (usize, usize),
        (attach_id, owner): (u64, u64),
        name: &str,
    ) -> Result<Taken> {
        let is_new = found.is_none();
        let words = match found {
            Some(words) => words,
            None => keeper.create(attach_id, words)?,
        };
        if words.words().len() < words_min {
            let what = "the memory that the last server left is of another version";
            return Err(Error::new(Kind::Unsupported, format!("{name}: {what}")));
        }
        Ok(Taken { keeper, words, attach_id, owner, is_new, is_named: false })
    }

    /// Whether no dead server has left it.
    pub fn is_new(&self) -> bool {
        self.is_new
    }

    /// The memory itself.
    pub fn words(&self) -> &SharedWords {
        &self.words
    }

    /// Who keeps it.
    pub fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// The attach that is under way.
    pub fn attach_id(&self) -> u64 {
        self.attach_id
    }

    /// The label is about to name it, and it stays in any case. What a dead server left gets a
    /// second name, after `announce` has said in it which attach owned it and which one will.
    pub fn name(&mut self, announce: impl FnOnce(&SharedWords, u64, u64)) -> Result<()> {
        if !self.is_new {
            announce(&self.words, self.owner, self.attach_id);
            self.keeper.rename(&self.words, self.attach_id)?;
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
