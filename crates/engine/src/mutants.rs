//! Deliberate bugs, one at a time, for the crash-state explorer: each must be found, or the
//! explorer is not worth its name. Without the feature `mutants` nothing of this is compiled in.

#[cfg(feature = "mutants")]
use std::cell::Cell;

macro_rules! mutants {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A deliberate bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Mutant { $($(#[$doc])* $name,)* }

        impl Mutant {
            /// All of them.
            pub const ALL: &[Mutant] = &[$(Mutant::$name,)*];
        }
    };
}

mutants! {
    /// dm-pcache: an update overwrites the current slot.
    SlotInPlace,
    /// dm-pcache: an update is written between the slots.
    UpdateBetweenSlots,
    /// dm-pcache: a position moves before what it covers is durable (here: the key set).
    PositionBeforeKset,
    /// A tail's update is not fenced, so what is reused relies on nothing.
    TailUnfenced,
    /// The zeroes behind the log are stored together with the key set, not before it.
    TerminatorWithKset,
    /// A key set is logged while its data is still on its way.
    KeyBeforeData,
    /// Zeroes that keys name are not fenced.
    ZeroesUnfenced,
    /// Segments are reused before key_tail has durably left their keys.
    ReuseBeforeKeyTail,
    /// Segments are reused with their old generation.
    GenerationNotRaised,
    /// Collection does not stop at dirty_tail.
    CollectDirty,
    /// dirty_tail moves before the origin's flush.
    DirtyTailBeforeFlush,
    /// A failed flush of the origin is taken for a good one.
    FlushErrorIgnored,
    /// A failed write to the origin is taken for a good one.
    WriteErrorIgnored,
    /// Of two keys for a sector in a batch, the older one is written back.
    OldestWins,
    /// A batch does not end at a flush mark.
    BatchCrossesMark,
    /// A flush leaves no mark.
    FlushUnmarked,
    /// The log that an attach found gets no mark behind it.
    AttachUnmarked,
    /// Flush marks are expected in a log that a kernel wrote.
    MarksOnKernelLog,
    /// Keys of reused segments are believed at attach.
    StaleKeyBelieved,
    /// Keys of reused segments are skipped, and older ones shine through.
    StaleKeySkipped,
    /// A CLEAN key hides dirty data at attach.
    CleanHidesDirty,
    /// A CLEAN key that dirty keys hide stays in the log when they leave it.
    HiddenCleanOutlives,
    /// An attach does not count dirty data.
    DirtyNotCounted,
    /// An attach takes the end of the log for clean: nothing is dirty.
    DirtyTailAtHead,
    /// A FUA write leaves its key set open.
    FuaNotClosing,
    /// A flush forgets the last stripe.
    FlushSkipsStripe,
    /// LAST is stored before the new segment's start is zeroed.
    LastBeforeZeroes,
    /// A write does not cancel the fill that it overtakes.
    FillNotCancelled,
    /// The keys in shared memory are ignored.
    SharedIgnored,
    /// Shared memory of any attach of any medium is believed.
    SharedOfAnybody,
    /// Shared memory is cleared before its keys are logged.
    SharedClearedFirst,
    /// Write-back merges across flushes, and the label does not say so.
    TornOriginUnlabelled,
    /// The label is not stored.
    LabelUnwritten,
    /// The superblock of a format comes first.
    SuperblockFirst,
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
