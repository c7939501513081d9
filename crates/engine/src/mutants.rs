//! Deliberate bugs, one at a time, for the crash-state explorer and for the tests of schedules:
//! each must be found, or the tests are not good enough. Without the feature `mutants` none of this
//! is compiled in.

#[cfg(feature = "mutants")]
use std::cell::Cell;

/// A deliberate bug. Each engine lists its own, with the macro `list_mutants`.
#[derive(Clone, Copy)]
pub struct Mutant {
    name: &'static str,
    /// Tells it from others faster than the name.
    id: u64,
}

impl Mutant {
    pub(crate) const fn new(name: &'static str) -> Mutant {
        let bytes = name.as_bytes();
        let (mut nth, mut id) = (0, 0xCBF2_9CE4_8422_2325);
        while nth < bytes.len() {
            id = (id ^ bytes[nth] as u64).wrapping_mul(0x100_0000_01B3);
            nth += 1;
        }
        Mutant { name, id }
    }
}

impl PartialEq for Mutant {
    fn eq(&self, other: &Mutant) -> bool {
        self.id == other.id
    }
}

impl Eq for Mutant {}

impl std::fmt::Debug for Mutant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Names deliberate bugs, in groups: each becomes a constant of [`Mutant`], and so does each group.
macro_rules! list_mutants {
    ($($(#[$about:meta])* $group:ident { $($(#[$doc:meta])* $name:ident,)* })*) => {
        #[allow(non_upper_case_globals, reason = "they are used as variants of one enum would be")]
        impl $crate::mutants::Mutant {
            $($($(#[$doc])* pub const $name: Self = Self::new(stringify!($name));)*)*
            $($(#[$about])* pub const $group: &[Self] = &[$(Self::$name,)*];)*
        }
    };
}
pub(crate) use list_mutants;

list_mutants! {
    /// What drives every target: what only threads that run into each other show.
    DRIVING_RACES {
    /// The background is woken before it can see that a bio waits for room.
    WantsRoomLate,
    /// Room that is signalled while parked bios are retried is taken as used.
    RoomEpochLate,
    /// A queue goes to sleep without checking whether it was woken.
    BellUnheard,
    /// A thread that waits forgets a wake-up that came before.
    DozeForgets,
    /// Work that is signalled during a tick is taken as done.
    WorkClearedAfterTick,
    /// The background falls asleep at its first look that finds nothing to do.
    AsleepAtOnce,
    }

    /// What only flushes of several rings show, of which some fail.
    FLUSHES {
    /// A flush begins while another is under way.
    FlushesOverlap,
    /// A good flush counts for writes that ended after it began.
    FlushCoversLater,
    /// Only the flush that failed hears of it.
    FailureSaidToOne,
    /// A flush that fails does not fail for those that wait for the next one.
    WaitingUntold,
    }

    /// What only tables of several lines, and requests of several pieces of which some fail, show.
    PIECES {
    /// Of a request across lines, the last child's status counts.
    LastChildCounts,
    /// A request goes on with a new table where it had come with the old one.
    ProgressKept,
    /// FUA reaches only the first line that a write touches.
    FuaOfFirstLine,
    /// A flush reaches only the first line.
    FlushOfFirstLine,
    /// A child that waits does not hear of what came while others of its request were under way.
    LateChildUnheard,
    /// A request that is tried again forgets that a child of it has failed.
    ParkedForgetsError,
    /// pcache: of a read's pieces from the backing device, the last one's status counts.
    LastMissCounts,
    /// writecache: of a read's pieces, the last one's status counts.
    LastPieceCounts,
    /// pcache: what a batch found damaged is taken off the list of bad ranges by that batch.
    SetAsideHealed,
    }
}

#[cfg(feature = "mutants")]
thread_local! {
    static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Makes this thread's engine code wrong in the given way, or right again.
#[cfg(feature = "mutants")]
pub fn set(mutant: Option<Mutant>) {
    ACTIVE.set(mutant);
}

/// Whether this bug is wanted.
#[cfg(feature = "mutants")]
pub(crate) fn is(mutant: Mutant) -> bool {
    ACTIVE.get() == Some(mutant)
}

/// Never: the branch is compiled away.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub(crate) const fn is(_: Mutant) -> bool {
    false
}
