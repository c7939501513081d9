//! Commits that no request waits for: by the clock, after a failed commit, of devices that failed a
//! flush, and of a cache that comes to rest.

use super::super::Cache;
use super::super::commit::Purpose;
use super::{Agenda, COMMIT_AFTER, TIDY_EVERY};
use crate::target::Port;

impl Cache {
    /// Commits by the clock.
    pub(super) fn commit_if_due(&self, agenda: &mut Agenda, port: &mut Port) {
        let mut state = self.commits.lock();
        state.now = agenda.now;
        let mut blocks = self.blocks();
        if agenda.now >= agenda.tidy_at {
            agenda.tidy_at = agenda.now + TIDY_EVERY;
            blocks.tidy(false);
        }
        // A commit that failed is tried again even without changes: until then the cache is stuck.
        let is_due = blocks.is_mark_due() || state.retry_at().is_some();
        let is_untold = blocks.trouble.is_untold();
        let is_empty = blocks.changes.is_empty() && !is_due;
        let is_urgent = blocks.changes.is_urgent() || is_due || is_untold;
        let has_lost = blocks.trouble.has_lost;
        drop(blocks);
        let is_paused = state.retry_at().is_some_and(|at| agenda.now < at);
        if is_untold && (is_empty || is_paused || has_lost) {
            // No other commit records it now.
            drop(state);
            self.tell_doubt(agenda.now, port);
            return;
        }
        if is_empty || is_paused || !state.is_idle() {
            if is_empty {
                agenda.commit_at = None;
            }
            return;
        }
        let at = *agenda.commit_at.get_or_insert(agenda.now + COMMIT_AFTER);
        if is_urgent || agenda.now >= at {
            agenda.commit_at = None;
            self.begin_commit(&mut state, Purpose::Changes, port);
        }
    }

    /// Suspended: when no I/O is in flight, the medium gets the exact state.
    pub(super) fn come_to_rest(&self, agenda: &mut Agenda, port: &mut Port) {
        if !agenda.is_idle() {
            return;
        }
        if self.begin_settling(&mut agenda.settling, port) {
            return;
        }
        if !self.blocks().leave_parts() || self.tell_doubt(agenda.now, port) {
            return;
        }
        let mut state = self.commits.lock();
        state.now = agenda.now;
        if !state.is_idle() || state.has_rested {
            return;
        }
        if self.blocks().trouble.has_lost {
            // The dirty bits on the medium do not change any more.
            state.has_rested = true;
            return;
        }
        self.begin_commit(&mut state, Purpose::Rest, port);
    }
}
