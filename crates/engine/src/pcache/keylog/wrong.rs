//! Wrong copies of functions of `keylog.rs`, with deliberate bugs that would be woven into every
//! line of the right ones. Only the builds of the nets have them.

use super::{AppendError, Head, Key, KeyCounts, KeyLog};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;

pub(super) fn appends() -> bool {
    let bugs = [Mutant::HeadSeenEarly, Mutant::PositionBeforeKset, Mutant::LoggedUnmarked];
    bugs.into_iter().any(mutants::is)
}

impl KeyLog {
    pub(super) fn append_sealed_wrongly(
        &self,
        head: &mut Head,
        keys: &[Key],
        sealed: &[u8],
        is_marked: bool,
    ) -> Result<(), AppendError> {
        let end = self.make_way(head, keys, sealed)?;
        let at = self.segments.data_at(head.position.segment, head.position.offset);
        self.media.announce_end(end);
        if mutants::is(Mutant::HeadSeenEarly) {
            self.show(end.position);
        }
        self.media.store(at, sealed);
        if !mutants::is(Mutant::PositionBeforeKset) {
            self.media.settle()?;
        }
        self.media.confirm_end(end);
        if is_marked {
            self.front.marks.fetch_add(1, Ordering::Release);
        }
        head.position = end.position;
        self.note_logged(KeyCounts::of(keys));
        head.is_unmarked = !is_marked && !mutants::is(Mutant::LoggedUnmarked);
        self.show(head.position);
        Ok(())
    }
}
