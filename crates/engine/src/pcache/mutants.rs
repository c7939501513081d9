//! Deliberate bugs of pcache. Where a function has several, its wrong copy stands in a file
//! `wrong.rs` beside it.

use crate::mutants::list_mutants;

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
    /// A place that two keys may name is taken for that of the passed one.
    SharedPlaceTrusted,
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

    /// What only a client shows that changes its memory while it is copied, cuts it short, or takes
    /// no data.
    PCACHE_SOURCES {
    /// What is remembered of the data is of a second reading.
    LookedAtTwice,
    /// Data with checksums is copied only once too; they are of a second reading.
    SummedTwice,
    /// A key is made for data of which a part was cut off.
    CutOffKept,
    /// A read is done although where its data should go has not taken it.
    RefusalIgnored,
    }

    /// What only threads that run into each other show.
    PCACHE_RACES {
    /// A reader does not look at the generation again after its copy.
    HitNotRechecked,
    /// A reader believes the row that the entry named before the side table was locked.
    RowBelieved,
    /// A reader does not look whether its region still has the array that the entry stood in.
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
    /// A tick looks whether it may work before it has the background's lock.
    SuspendSeenEarly,
    /// What was replayed late joins the index without the stripe's lock.
    JoinedUnlocked,
    /// A key can be seen before its data, which was moved, has left the CPU.
    MoveUndrained,
    /// A write does its piece of collection beside the background's, without the lock.
    PieceUnlocked,
    }

    /// pcache: what only memory shows that reorders what the code does not order.
    PCACHE_ORDERINGS {
    /// A reader's copy may move after its second look at the generation.
    HitUnfenced,
    /// A writer's stores may move before the reuse of its segment.
    SpaceUnfenced,
    /// An entry of the index can be seen before the data that it names.
    EntryRelaxed,
    /// An entry can be seen in an array before the region that had the array is seen to have let
    /// go.
    ArrayRelaxed,
    /// An array is cleared before the region that had it is seen to have let go.
    ClearedRelaxed,
    /// A head's place can be seen before what was done to its segment.
    HeadRelaxed,
    }
}
