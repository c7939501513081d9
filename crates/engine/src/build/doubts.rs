//! Disks of caches that udm would not tell from some others.

use std::path::Path;

use super::SystemOpener;
use crate::disk::doubt_of;
use crate::table::Table;
use crate::targets::{self, Opener, WordRole};

/// For the user: one sentence for each disk that a cache of the table belongs to, and that another
/// disk could be taken for later.
pub fn doubts(table: &Table) -> Vec<String> {
    let mut notes = Vec::new();
    for line in &table.lines {
        let Some(kind) = targets::find(&line.target.text) else { continue };
        let Some(cache) = &kind.cache else { continue };
        // A cache device with its own label is known by that.
        let roles: &[WordRole] = match cache.has_metadata_device {
            true => &[WordRole::Origin, WordRole::Cache],
            false => &[WordRole::Origin],
        };
        for nth in kind.places(roles) {
            let word = line.args.get(nth).and_then(|word| word.device().ok());
            let resolve = |word| SystemOpener::without_memory().resolve(&word).ok();
            let Some(word) = word.and_then(resolve) else { continue };
            notes
                .extend(doubt_of(Path::new(&word.path)).map(|why| format!("{}: {why}", word.path)));
        }
    }
    notes.dedup();
    notes
}
