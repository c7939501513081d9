//! Deliberate bugs, one at a time, for the crash-state explorer and for the tests of schedules:
//! each must be found, or the tests are not good enough. Without the feature `mutants` none of this
//! is compiled in.

#[cfg(feature = "mutants")]
use std::cell::Cell;

/// A deliberate bug. Each engine lists its own, with [`list_mutants`].
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
    /// pcache: what a crash or a single thread shows.
    PCACHE {
    /// dm-pcache: an update overwrites the current slot.
    SlotInPlace,
    /// dm-pcache: an update is written between the slots.
    UpdateBetweenSlots,
    /// dm-pcache: a position moves before what it covers is durable (here: the key set).
    PositionBeforeKset,
    /// A tail's update is not fenced, so what is reused relies on nothing.
    TailUnfenced,
    /// The zeroes after the log are stored together with the key set, not before it.
    TerminatorWithKset,
    /// A key set is logged while its data is still on its way.
    KeyBeforeData,
    /// Zeroes that keys name are not fenced.
    ZeroesUnfenced,
    /// Segments are reused before key_tail has durably left their keys.
    ReuseBeforeKeyTail,
    /// The same, only of what yields to writes.
    YieldedBeforeKeyTail,
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
    /// What was overwritten is not written back although a flush ended in between.
    SkippedAcrossMark,
    /// What was overwritten is not written back although the newer version is not logged yet.
    SkippedForUnlogged,
    /// A flush leaves no mark.
    FlushUnmarked,
    /// The log that an attach found gets no mark after it.
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
    /// Shared memory of any attach of any medium is believed, in the place that the label names.
    SharedOfAnybody,
    /// The same where servers before this version kept it, by the path of the medium.
    OldSharedOfAnybody,
    /// Shared memory is cleared before its keys are logged.
    SharedClearedFirst,
    /// The label says that the cache is served only after its memory has been used.
    ServedSaidLate,
    /// The label says that the cache was detached before everything is in the log.
    DetachedSaidEarly,
    /// Shared memory hears of the log's new end only once that is there.
    EndUnannounced,
    /// Write-back merges across flushes, and the label does not say so.
    TornOriginUnlabelled,
    /// The label is not stored.
    LabelUnwritten,
    /// A key of the main part is logged again although the index has something newer.
    KeptUnchecked,
    /// What collection drops is taken out of the index although that has something newer.
    DroppedUnchecked,
    /// A key that is logged again takes no reference: its segment is reused.
    KeptUnreferenced,
    /// The superblock of a format comes first.
    SuperblockFirst,
    /// What is replayed late covers what was written since.
    ReplayCoversNewer,
    /// Segments are reused before the keys that name them are replayed.
    CollectedBeforeReplayed,
    /// A FUA write across regions closes the key set of the last one only.
    FuaOfLastRegion,
    /// What was logged for want of room or for its age gets no mark when a client flushes.
    LoggedUnmarked,
    }

    /// pcache, and what drives every target: what only threads that run into each other show.
    PCACHE_RACES {
    /// A reader does not look at the generation again after its copy.
    HitNotRechecked,
    /// A reader believes the row that the slot named before the side table was locked.
    RowBelieved,
    /// A reader does not look whether its region still has the array that the slot stood in.
    FormNotRechecked,
    /// A segment is free before its raised generation can be seen.
    FreeBeforeRaised,
    /// A head's place can be seen before its segment has the references of the keys to come.
    ReferencesLate,
    /// Space is taken with a load and a store.
    SpaceTakenTwice,
    /// Data takes the segments that only the log may take.
    ReserveTaken,
    /// The count of used segments changes outside the allocator's lock.
    UsedUnlocked,
    /// What is released while the collector takes the list is not announced.
    ReleasedForgotten,
    /// A key of the zero extent gets its reference after the extent's lock is let go.
    ZeroReferenceLate,
    /// The checksums of a segment are forgotten when others may use it already.
    CrcsForgottenLate,
    /// The index changes before the stripe's lock is taken.
    IndexBeforeLock,
    /// The key joins the open set after the stripe's lock is let go.
    KeyAfterUnlock,
    /// Dirty bytes are counted after the stripe's lock is let go.
    DirtyCountedLate,
    /// A flush lets go of the stripes between collecting the keys and emptying their sets.
    SetClearedUnlocked,
    /// The log's head can be seen before what stands there is stored.
    HeadSeenEarly,
    /// dirty_tail goes to where the log's head is by now, not to the end of the batch.
    TailJumpsToHead,
    /// A gap is registered as a fill without a look whether it still is one.
    GapNotRechecked,
    /// Damaged data is quarantined when collection may have dropped it already.
    QuarantineLate,
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
    /// A tick looks whether it may work before it has the background's lock.
    SuspendSeenEarly,
    /// What was replayed late joins the index without the stripe's lock.
    JoinedUnlocked,
    /// A key can be seen before its data, which was moved, has left the CPU.
    MoveUndrained,
    /// A write does its piece of collection beside the background's, without the lock.
    PieceUnlocked,
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

    /// pcache: what only memory shows that reorders what the code does not order.
    PCACHE_ORDERINGS {
    /// A reader's copy may move after its second look at the generation.
    HitUnfenced,
    /// A writer's stores may move before the reuse of its segment.
    SpaceUnfenced,
    /// A slot of the index can be seen before the data that it names.
    SlotRelaxed,
    /// A slot can be seen in an array before the region that had the array is seen to have let go.
    ArrayRelaxed,
    /// An array is cleared before the region that had it is seen to have let go.
    ClearedRelaxed,
    /// A head's place can be seen before what was done to its segment.
    HeadRelaxed,
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
