//! Deliberate bugs of writecache. If a function has several, its wrong copy is at the end of the
//! same file.

use crate::mutants::list_mutants;

list_mutants! {
    /// writecache: bugs that a crash or a single thread shows.
    WRITECACHE {
    /// The commit counter moves before the entries of its batch are durable.
    CounterBeforeEntries,
    /// A block can be committed while its data is still being written.
    EntryBeforeData,
    /// A superseded slot is given out again before its entry is durably marked free.
    FreeMarkLate,
    /// A free mark also changes the block that an entry names.
    MarkRenames,
    /// Slots that were written back are freed before the origin's flush.
    FreedBeforeOriginFlush,
    /// A failed flush of the origin counts as successful, after write-back.
    OriginFlushErrorIgnored,
    /// A failed write to the origin counts as successful, in write-back.
    OriginWriteErrorIgnored,
    /// A FUA write is not committed (dm-writecache, defect A).
    FuaUncommitted,
    /// A flush does not commit.
    FlushUncommitted,
    /// Of two committed versions, an attach believes the older one.
    OlderVersionWins,
    /// The newest version may be marked free before older ones are.
    NewerFreedFirst,
    /// Entries that were never committed are believed at attach.
    UncommittedBelieved,
    /// The entries in shared memory are ignored.
    HeldIgnored,
    /// An attach trusts any shared memory under the name on the label, even the memory of another
    /// attach or medium.
    HeldOfAnybody,
    /// The same for the place of servers before this version, the path of the medium.
    OldHeldOfAnybody,
    /// The label never says "served".
    ServedUnsaid,
    /// The label says "detached" before all blocks are committed.
    WcDetachedSaidEarly,
    /// Shared memory records a new commit counter only after it is stored.
    SeqUnannounced,
    /// A failed write to the cache keeps its mapping (dm-writecache, defect D).
    FailedWriteMapped,
    /// A failed flush of the cache counts as successful.
    CacheFlushErrorIgnored,
    /// Data that a dead server stored on a failing cache device is trusted to exist.
    FailureForgotten,
    /// An attach begins with a lower commit counter.
    CounterBackwards,
    /// An attach commits on top of a counter that may not be durable.
    FoundUnsettled,
    /// A free mark of an attach changes both halves of its entry.
    MarkTorn,
    /// Zeroes do not wait for write-back in flight in their range.
    ZeroOvertakes,
    /// A read does not check whether its slots were retired meanwhile.
    RetiredBelieved,
    /// The flush that a dead server owed the origin is forgotten.
    OwedFlushForgotten,
    /// A write that bypasses the cache before dirty data is written back leaves the origin marked
    /// as consistent.
    PassedUnsaid,
    /// The label is not stored.
    WritecacheUnlabelled,
    /// A format leaves no mark that says whose it is.
    FormatUnmarked,
    /// A flush does not wait for overwritten blocks.
    OverwriteUncounted,
    /// Write-back takes blocks that were overwritten and are not flushed.
    UnflushedWrittenBack,
    /// Blocks that a dead server overwrote on a failing cache device are trusted to stay.
    OverwrittenUnsettled,
    /// Mode `p`: the counter reaches the medium before shared memory knows it.
    CounterUnannounced,
    /// The same in mode `s`.
    DiskCounterUnannounced,
    /// Mode `p`: shared memory never records that the counter is stored.
    CounterUnconfirmed,
    /// A flush of the origin also covers writes that bypassed the cache while it was in flight.
    BypassesAsOfEnd,
    /// A write that bypassed the cache does not require a flush of the origin.
    BypassUncounted,
    /// The list space that was promised to a write is not given back when the write fails.
    PromiseOfFailed,
    /// Blocks that a discard has zeroed are dropped from the cache before the origin's flush.
    ZeroesUnflushed,
    /// Write-back does not notice another flush of the origin that failed during its batch.
    OthersFailureIgnored,
    /// A batch that fails brings superseded versions back to life.
    OutdatedRevived,
    /// The next server takes up only the newer one of a stripe's two lists.
    OlderListIgnored,
    /// The number of the open batch follows the counter, which some rounds do not change.
    BatchByCounter,
    /// The fingerprint of a block is required although the block was overwritten later.
    PastLookAsked,
    }

    /// writecache: flushes of the cache device that failed under an earlier server.
    WRITECACHE_DOUBTS {
    /// A cache whose last server's memory is lost is trusted to be durable.
    LostMemoryTrusted,
    /// A flush that was in flight when the last server died is trusted to have succeeded.
    FlushAtDeathTrusted,
    /// A failed sync of memory counts as the loss of a part of it.
    FailedSyncForgotten,
    }

    /// writecache: what lets waiting clients go on does not wake the background.
    WRITECACHE_WAITS {
    /// The end of an overwrite in place does not.
    OverwriteEndUnheard,
    /// The end of a discard does not.
    ZeroingEndUnheard,
    }

    /// writecache: races that only colliding threads show.
    WRITECACHE_RACES {
    /// Write-back copies the list of ranges that are being zeroed before it locks a stripe.
    ZeroingCopiedEarly,
    /// Slots are given out again when their marks are about to be stored.
    MarkedSlotsFree,
    /// A write reads which list is being filled before it locks the stripe.
    FillingReadEarly,
    /// Free slots that other threads have reserved for themselves do not cause a wake-up.
    ReservesIgnored,
    /// A flush does not check again whether a round began during its check.
    RoundReadOnce,
    /// A read from memory does not check whether its slot was retired meanwhile.
    SlotNotRechecked,
    /// Slots that writes are filling count as lost.
    SlotsInHandForgotten,
    /// A thread that waits for a slot does not see slots that others publish.
    PublishUnheard,
    /// A discard announces that it waits for write-back only after its check.
    BatchEndMissed,
    /// A message `flush` that comes after a tick's check counts as carried out.
    FlushForgotten,
    /// A client's port begins a round that none of its bios waits for.
    RoundOfNobody,
    /// Write-back takes a block twice for a batch, when a newer version is committed meanwhile.
    BlockTakenTwice,
    /// A thread that waits for the promises of others is not woken when they are given up.
    PromisesUnheard,
    /// Write-back tries again after a suspend has given up cleaning.
    SuspendedRetries,
    /// A slot is superseded while it is being overwritten, and given out again.
    OverwritingFreed,
    /// A block is overwritten while a discard is zeroing it.
    OverwrittenWhileZeroed,
    /// The end of a round in memory does not wake write-back, which clients wait for.
    MemoryRoundUnheard,
    }
}
