//! Wrong copies of functions of `openlist.rs`, with deliberate bugs that would be woven into every
//! line of the right ones. Only builds with deliberate bugs contain them.

use super::{LOOKED_AT_MAX, LeftBehind, entries, older_first};
use crate::mutants::{self, Mutant};
use crate::shm::SharedWords;

pub(super) fn leaves() -> bool {
    let bugs = [Mutant::OlderListIgnored, Mutant::PastLookAsked, Mutant::HeldIgnored];
    bugs.into_iter().any(mutants::is)
}

impl LeftBehind {
    pub(super) fn wrongly_of(shared: &SharedWords, version: u64, stripes: usize) -> LeftBehind {
        let mut left = LeftBehind::without_lists(shared, version, stripes);
        for stripe in 0..stripes {
            let lists = older_first(shared, version, stripes, stripe);
            let has_newer = lists[1].1 > 0;
            let skipped = usize::from(has_newer && mutants::is(Mutant::OlderListIgnored));
            for (list, count) in lists.into_iter().skip(skipped) {
                for (nth, entry) in entries(list, count).enumerate() {
                    left.add(&entry);
                    let is_looked_at = version > 2 && nth + LOOKED_AT_MAX >= count;
                    let look = if is_looked_at { entry.look } else { 0 };
                    if is_looked_at || !mutants::is(Mutant::PastLookAsked) {
                        left.looks.push(((entry.block, entry.slot), look));
                    }
                }
            }
        }
        if mutants::is(Mutant::HeldIgnored) {
            left.held.clear();
        }
        left
    }
}
