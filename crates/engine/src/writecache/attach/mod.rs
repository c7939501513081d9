//! The reads of an attach: the entries of the cache (`look`), and the writes that the last server
//! left in memory (`takeup`).

mod look;
mod takeup;

use std::collections::HashMap;

use super::index::Index;
use super::layout::Entry;

pub(super) use look::look;
pub(super) use takeup::take_up;

/// The findings; live entries are in the index.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) index: Index,
    /// Entries that udm must not change.
    pub(super) aside: HashMap<u32, Entry>,
    /// Slots whose entries must be marked free.
    pub(super) stale: Vec<u32>,
    /// The slots among them, in rising order, whose entries were never committed.
    uncommitted: Vec<u32>,
    /// Notes for the user.
    pub(super) notes: Vec<String>,
}

impl Found {
    /// No findings yet, with an empty index.
    pub(super) fn new(index: Index, notes: Vec<String>) -> Found {
        let (aside, stale, uncommitted) = (HashMap::new(), Vec::new(), Vec::new());
        Found { index, aside, stale, uncommitted, notes }
    }
}
