//! Deliberate bugs, one at a time, for the crash-state explorer and for the tests of schedules: the
//! tests must find each of them, or they are not good enough. Without the feature `mutants` they
//! are not compiled.

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
    /// Drains, and orderly ends that a power cut follows: `tests/ends.rs` finds them.
    ENDS {
    /// cache: a suspend leaves writes unflushed that passed by.
    RestedUnflushed,
    /// writecache: a drain does not wait for a newer version that replaces an awaited one.
    AwaitedForgotten,
    /// writecache: during a drain only the newest version of a block is written back.
    NewestAwaited,
    /// pcache: a drain leaves out what was overwritten.
    DrainSkips,
    }

    /// Races in the code that drives every target: only colliding threads show them.
    DRIVING_RACES {
    /// The background is woken before it can see that a bio waits for free space.
    WantsRoomLate,
    /// Free space that is signalled while parked bios are retried is taken as used.
    RoomEpochLate,
    /// A queue goes to sleep without checking whether it was woken.
    BellUnheard,
    /// A thread that waits forgets a wake-up that came before.
    DozeForgets,
    /// Work that is signalled during a tick is taken as done.
    WorkClearedAfterTick,
    /// The background falls asleep at its first check that finds no work.
    AsleepAtOnce,
    }

    /// Flush errors that need several rings, of which some fail.
    FLUSHES {
    /// A flush begins while another is under way.
    FlushesOverlap,
    /// A good flush counts for writes that ended after it began.
    FlushCoversLater,
    /// Only the flush that failed gets the error.
    FailureSaidToOne,
    /// A failed flush does not fail the flushes that wait for the next one.
    WaitingUntold,
    /// A new failure overwrites the previous one if no write came in between.
    FailureForgetsEarlier,
    /// An error that is answered while a write is in flight counts for that write as well.
    ErrorForgivesInFlight,
    }

    /// Bugs that only a lazy file shows.
    PACED {
    /// If a batch is written out twice, the second result counts.
    SecondWriteOutCounts,
    /// A writer that comes begins at the first turn of all.
    NewcomerAtTurnZero,
    }

    /// Bugs that need two ports, one of which loses writes that another had acknowledged.
    LOSSES {
    /// Only the port whose flush failed gets the error.
    LossToldToOne,
    /// A port that comes later gets an error that others have had.
    NewcomerToldAgain,
    }

    /// Bugs that need requests of parts of blocks, and other changes of the same blocks.
    PARTS {
    /// A part is written while other changes of its block are inside.
    BlockUnlocked,
    /// A part does not wait for changes that began before changes were locked.
    UnlistedPassed,
    /// A change that waits for a block is not woken.
    BlockLeftQuietly,
    /// A request is parked by its target, and gives its lock up.
    ParkedUnlocked,
    /// A parked request continues with the block that it read through the table before.
    StalePart,
    /// A part is written without the FUA of its request.
    PartForgetsFua,
    }

    /// Bugs that need tables of several lines, or requests of several pieces of which some fail.
    PIECES {
    /// In a request across lines, the last child's status counts.
    LastChildCounts,
    /// After a table was replaced, a request continues at the progress it had made with the old
    /// one.
    ProgressKept,
    /// FUA reaches only the first line that a write touches.
    FuaOfFirstLine,
    /// A flush reaches only the first line.
    FlushOfFirstLine,
    /// A waiting child misses a wake-up that comes while other children of its request are in
    /// flight.
    LateChildUnheard,
    /// A retried request forgets that one of its children has failed.
    ParkedForgetsError,
    /// pcache: in a read of several pieces from the backing device, the last piece's status counts.
    LastMissCounts,
    /// writecache: in a read of several pieces, the last piece's status counts.
    LastPieceCounts,
    /// pcache: a batch takes a range off the list of bad ranges in the same pass that found it
    /// damaged.
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
