//! Deliberate bugs of pcache. If a function has several, its wrong copy is in a file `wrong.rs` in
//! its folder.

use crate::mutants::list_mutants;

list_mutants! {
    /// pcache: bugs that a crash or a single thread shows.
    PCACHE {
    /// dm-pcache: an update overwrites the current slot.
    SlotInPlace,
    /// dm-pcache: an update is written between the slots.
    UpdateBetweenSlots,
    /// dm-pcache: a position moves before the data that it covers is durable (here: the key set).
    PositionBeforeKset,
    /// A tail's update is not fenced, so space is reused without a durable tail.
    TailUnfenced,
    /// The zeroes after the log are stored together with the key set, not before it.
    TerminatorWithKset,
    /// A key set is logged while its data is still on its way.
    KeyBeforeData,
    /// Zeroes that keys name are not fenced.
    ZeroesUnfenced,
    /// Zeroes need no key where the origin has a hole, even if newer data is cached there.
    HoleBelieved,
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
    /// Overwritten data is not written back although a flush ended in between.
    SkippedAcrossMark,
    /// Overwritten data is not written back although the newer version is not logged yet.
    SkippedForUnlogged,
    /// A flush leaves no mark.
    FlushUnmarked,
    /// The log that an attach found gets no mark after it.
    AttachUnmarked,
    /// Flush marks are expected in a log that a kernel wrote.
    MarksOnKernelLog,
    /// Keys of reused segments are believed at attach.
    StaleKeyBelieved,
    /// Keys of reused segments are skipped, and older ones become visible.
    StaleKeySkipped,
    /// A CLEAN key hides dirty data at attach.
    CleanHidesDirty,
    /// A CLEAN key that dirty keys hide stays in the log when they are passed.
    HiddenCleanOutlives,
    /// An attach does not count dirty data.
    DirtyNotCounted,
    /// An attach takes all of the log for clean.
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
    /// Shared memory of any attach of any medium is trusted, under the name on the label.
    SharedOfAnybody,
    /// The same where servers before this version kept it, by the path of the medium.
    OldSharedOfAnybody,
    /// Shared memory is cleared before its keys are logged.
    SharedClearedFirst,
    /// The label says "served" only after the memory has been used.
    ServedSaidLate,
    /// The label says "detached" before all keys are in the log.
    DetachedSaidEarly,
    /// Shared memory records the log's new end only after the append.
    EndUnannounced,
    /// Write-back merges across flushes, and the label does not record it.
    TornOriginUnlabelled,
    /// The label is not stored.
    LabelUnwritten,
    /// A key of the main part is logged again although the index has a newer place.
    KeptUnchecked,
    /// Data that collection drops is removed from the index although the index has a newer place.
    DroppedUnchecked,
    /// A place that two keys may name counts as the place of the passed key.
    SharedPlaceTrusted,
    /// A key that is logged again takes no reference: its segment is reused.
    KeptUnreferenced,
    /// The superblock of a format comes first.
    SuperblockFirst,
    /// A late replay covers data that was written since.
    ReplayCoversNewer,
    /// Segments are reused before the keys that name them are replayed.
    CollectedBeforeReplayed,
    /// A FUA write across regions closes the key set of the last one only.
    FuaOfLastRegion,
    /// Keys that were logged for lack of space or for their age get no mark when a client flushes.
    LoggedUnmarked,
    }

    /// Bugs that show only if a client changes its memory during a copy, cuts it short, or takes no
    /// data.
    PCACHE_SOURCES {
    /// The stored fingerprint of the data is taken from a second read.
    LookedAtTwice,
    /// Data with checksums is also copied only once; the checksums are taken from a second read.
    SummedTwice,
    /// A key is made for data of which a part was cut off.
    CutOffKept,
    /// A read succeeds although the target of the copy has refused the data.
    RefusalIgnored,
    }

    /// What only threads that run into each other show.
    PCACHE_RACES {
    /// A reader does not check the generation again after its copy.
    HitNotRechecked,
    /// A reader trusts the row that the entry named before the side table was locked.
    RowBelieved,
    /// A reader does not check whether its region still has the array of the entry.
    FormNotRechecked,
    /// A segment is free before its raised generation can be seen.
    FreeBeforeRaised,
    /// A head's place is visible before its segment has the references of the keys to come.
    ReferencesLate,
    /// Space is taken with a load and a store.
    SpaceTakenTwice,
    /// Data takes the segments that only the log may take.
    ReserveTaken,
    /// The count of used segments changes outside the allocator's lock.
    UsedUnlocked,
    /// A segment that is released while the collector takes the list is not announced.
    ReleasedForgotten,
    /// A key of the zero extent gets its reference after the extent's lock is released.
    ZeroReferenceLate,
    /// The checksums of a segment are forgotten when others may use it already.
    CrcsForgottenLate,
    /// The index changes before the stripe's lock is taken.
    IndexBeforeLock,
    /// The key joins the open set after the stripe's lock is released.
    KeyAfterUnlock,
    /// Dirty bytes are counted after the stripe's lock is let go.
    DirtyCountedLate,
    /// A flush releases the stripes between collecting the keys and emptying their sets.
    SetClearedUnlocked,
    /// The log's head is visible before the record is stored.
    HeadSeenEarly,
    /// dirty_tail moves to the log's present head, not to the end of the batch.
    TailJumpsToHead,
    /// A gap is registered as a fill without a check whether it still is a gap.
    GapNotRechecked,
    /// Damaged data is quarantined when collection may have dropped it already.
    QuarantineLate,
    /// A tick checks whether it may work before it has the background's lock.
    SuspendSeenEarly,
    /// A late replay joins the index without the stripe's lock.
    JoinedUnlocked,
    /// The key of moved data is visible before the data has left the CPU.
    MoveUndrained,
    /// A write does its piece of collection without the lock, at the same time as the background.
    PieceUnlocked,
    }

    /// pcache: syncs of the cache device that failed under an earlier server.
    PCACHE_DOUBTS {
    /// A cache whose last server's memory is lost is trusted to be durable.
    LostOpenSetsTrusted,
    }

    /// pcache: bugs that show only with memory that reorders unordered accesses.
    PCACHE_ORDERINGS {
    /// A reader's copy may move after its second check of the generation.
    HitUnfenced,
    /// A writer's stores may move before the reuse of its segment.
    SpaceUnfenced,
    /// An entry of the index is visible before the data that it names.
    EntryRelaxed,
    /// An entry is visible in an array before the new form of the array's earlier region.
    ArrayRelaxed,
    /// The cleared array is visible before the new form of its earlier region.
    ClearedRelaxed,
    /// A head's place is visible before the changes of its segment.
    HeadRelaxed,
    }
}
