//! Two-slot records: an update is written to the spare slot with the next sequence number, and the
//! newest valid slot wins. So a torn update loses only itself.

/// Which of two slots is current, given the sequence number of each valid one.
///
/// Slot 1 is current exactly when it is 1..=127 ahead of slot 0 (modulo 256), else slot 0.
pub fn choose(seq0: Option<u8>, seq1: Option<u8>) -> Option<usize> {
    match (seq0, seq1) {
        (None, None) => None,
        (Some(_), None) => Some(0),
        (None, Some(_)) => Some(1),
        (Some(seq0), Some(seq1)) => Some(usize::from((1..=127).contains(&seq1.wrapping_sub(seq0)))),
    }
}

/// The state of a two-slot record: which slot is current, and its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotState {
    /// The slot that holds the newest valid record.
    pub current: usize,
    /// The sequence number of that record.
    pub seq: u8,
}

impl SlotState {
    /// Before the first write: the next one goes to `first_slot` with sequence number 1.
    pub fn unwritten(first_slot: usize) -> SlotState {
        SlotState { current: 1 - first_slot, seq: 0 }
    }

    /// The slot and sequence number of the next update. Never the current slot: a crash while it
    /// is being stored must leave the current record whole.
    pub fn next(self) -> SlotState {
        let is_in_place = crate::mutants::is(crate::mutants::Mutant::SlotInPlace) && self.seq > 1;
        let current = if is_in_place { self.current } else { 1 - self.current };
        SlotState { current, seq: self.seq.wrapping_add(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_slot_wins_across_the_wrap() {
        assert_eq!(choose(Some(255), Some(0)), Some(1));
        assert_eq!(choose(Some(0), Some(255)), Some(0));
        assert_eq!(choose(Some(5), Some(5)), Some(0));
        assert_eq!(choose(Some(0), Some(128)), Some(0));
        assert_eq!(choose(Some(0), Some(127)), Some(1));
        assert_eq!(choose(None, Some(9)), Some(1));
        assert_eq!(choose(Some(9), None), Some(0));
        assert_eq!(choose(None, None), None);
    }

    #[test]
    fn an_update_never_goes_to_the_current_slot() {
        let mut state = SlotState::unwritten(1);
        assert_eq!(state.next(), SlotState { current: 1, seq: 1 });
        for _ in 0..600 {
            let next = state.next();
            assert_ne!(next.current, state.current);
            assert_eq!(next.seq, state.seq.wrapping_add(1));
            state = next;
        }
    }
}
