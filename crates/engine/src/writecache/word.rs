//! The state of a slot in one word: its block, its generation, its state, its epoch.

const BLOCK_BITS: u32 = 38;
const GENERATION_BITS: u32 = 16;
const STATE_BITS: u32 = 4;
const GENERATION_SHIFT: u32 = BLOCK_BITS;
const STATE_SHIFT: u32 = BLOCK_BITS + GENERATION_BITS;
const EPOCH_SHIFT: u32 = STATE_SHIFT + STATE_BITS;
/// Epochs count modulo this number.
pub const EPOCHS: u64 = 1 << (64 - EPOCH_SHIFT);

/// The life of a slot, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// In the pool, or taken from it and not yet used: in no chain.
    Free,
    /// Not committed, in list 0 of its stripe: in the open batch, or in the batch being committed.
    OpenA,
    /// Not committed, in list 1.
    OpenB,
    /// Committed, and not on the origin.
    Live,
    /// Committed, and a write that overwrites it is in flight.
    Overwriting,
    /// Committed, then overwritten; the overwrite is not flushed, and is in list 0 of its stripe.
    OverwrittenA,
    /// The same, in list 1.
    OverwrittenB,
    /// Committed, and being written back.
    Cleaning,
    /// Written back, but a newer version is being written: that version's commit frees this slot.
    Cleaned,
    /// A newer version was committed while this one was being written back.
    Outdated,
    /// Written back, the newest committed version; its entry on the medium is still live.
    Dropped,
    /// Not needed any more; its entry may be marked free. In a chain only if it was `Dropped`.
    Marking,
    /// In a chain, but another entry contradicts it: the content of the block is unknown.
    Damaged,
    /// Its entry cannot be trusted, and is not changed. In no chain.
    Aside,
}

impl State {
    /// States by their bits in a word; unused values count as free.
    const BY_BITS: [State; 1 << STATE_BITS] = {
        let mut all = [State::Free; 1 << STATE_BITS];
        let known = [
            State::Free,
            State::OpenA,
            State::OpenB,
            State::Live,
            State::Overwriting,
            State::OverwrittenA,
            State::OverwrittenB,
            State::Cleaning,
            State::Cleaned,
            State::Outdated,
            State::Dropped,
            State::Marking,
            State::Damaged,
            State::Aside,
        ];
        let mut nth = 0;
        while nth < known.len() {
            all[known[nth] as usize] = known[nth];
            nth += 1;
        }
        all
    };

    /// Whether reads may use the slot.
    pub fn is_readable(self) -> bool {
        use State::{Cleaned, Cleaning, Live, OpenA, OpenB};
        self.is_overwritten() || matches!(self, OpenA | OpenB | Live | Cleaning | Cleaned)
    }

    /// Whether no commit has made it durable.
    pub fn is_uncommitted(self) -> bool {
        matches!(self, State::OpenA | State::OpenB)
    }

    /// Whether no flush has made its content durable.
    pub fn is_unflushed(self) -> bool {
        self.is_uncommitted() || self.is_overwritten()
    }

    /// Not committed, in this list.
    pub fn open_in(list: usize) -> State {
        if list == 0 { State::OpenA } else { State::OpenB }
    }

    /// Whether the slot was overwritten, or is being overwritten, and no flush has made the new
    /// data durable.
    pub fn is_overwritten(self) -> bool {
        matches!(self, State::Overwriting | State::OverwrittenA | State::OverwrittenB)
    }

    /// Overwritten, in this list.
    pub fn overwritten_in(list: usize) -> State {
        if list == 0 { State::OverwrittenA } else { State::OverwrittenB }
    }
}

/// The state word of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub(super) u64);

impl Word {
    pub(super) fn new(block: u64, generation: u64, state: State, epoch: u64) -> Word {
        debug_assert!(block < 1 << BLOCK_BITS);
        Word(
            block
                | (generation & ((1 << GENERATION_BITS) - 1)) << GENERATION_SHIFT
                | (state as u64) << STATE_SHIFT
                | (epoch % EPOCHS) << EPOCH_SHIFT,
        )
    }

    /// The origin's block.
    pub fn block(self) -> u64 {
        self.0 & ((1 << BLOCK_BITS) - 1)
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT & ((1 << GENERATION_BITS) - 1)
    }

    /// The state of the slot.
    pub fn state(self) -> State {
        State::BY_BITS[(self.0 >> STATE_SHIFT) as usize & ((1 << STATE_BITS) - 1)]
    }

    /// When it was linked, modulo [`EPOCHS`].
    pub fn epoch(self) -> u64 {
        self.0 >> EPOCH_SHIFT
    }

    pub(super) fn with_state(self, state: State) -> Word {
        let others = self.0 & !(((1 << STATE_BITS) - 1) << STATE_SHIFT);
        Word(others | (state as u64) << STATE_SHIFT)
    }

    /// Whether the slot holds this block, in this state.
    pub(super) fn is_of(self, block: u64, state: State) -> bool {
        let told = ((1 << BLOCK_BITS) - 1) | ((1 << STATE_BITS) - 1) << STATE_SHIFT;
        self.0 & told == block | (state as u64) << STATE_SHIFT
    }

    /// Whether both words mean the same content, in whatever state.
    pub(super) fn is_same_content(self, other: Word) -> bool {
        (self.0 ^ other.0) & ((1 << STATE_SHIFT) - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_what_they_are_told() {
        let word = Word::new((1 << 37) + 5, 65_535, State::Aside, 63);
        assert_eq!((word.block(), word.generation()), ((1 << 37) + 5, 65_535));
        assert_eq!((word.state(), word.epoch()), (State::Aside, 63));
        assert!(word.is_same_content(word.with_state(State::Live)));
        assert!(!word.is_same_content(Word::new((1 << 37) + 5, 0, State::Aside, 63)));
        for (bits, state) in State::BY_BITS.into_iter().enumerate() {
            let expected = if bits <= State::Aside as usize { bits } else { 0 };
            assert_eq!(state as usize, expected);
        }
        assert!(word.is_of((1 << 37) + 5, State::Aside));
        assert!(!word.is_of((1 << 37) + 5, State::Live) && !word.is_of(5, State::Aside));
    }
}
