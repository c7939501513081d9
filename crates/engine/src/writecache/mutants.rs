//! Deliberate bugs of writecache. Where a function has several, its wrong copy stands at the foot
//! of the file that the right one is in.

use crate::mutants::list_mutants;

list_mutants! {
    /// writecache: what a crash or a single thread shows.
    WRITECACHE {
    /// The commit counter moves before the entries of its batch are durable.
    CounterBeforeEntries,
    /// A block can be committed while its data is still on its way.
    EntryBeforeData,
    /// A superseded slot is given out again before its entry is durably marked free.
    FreeMarkLate,
    /// A free mark changes the block that an entry names, too.
    MarkRenames,
    /// What was written back is freed before the origin's flush.
    FreedBeforeOriginFlush,
    /// A failed flush of the origin is taken for a good one, after write-back.
    OriginFlushErrorIgnored,
    /// A failed write to the origin is taken for a good one, in write-back.
    OriginWriteErrorIgnored,
    /// A FUA write is not committed (dm-writecache, defect A).
    FuaUncommitted,
    /// A flush commits nothing.
    FlushUncommitted,
    /// Of two committed versions, an attach believes the older one.
    OlderVersionWins,
    /// The newest version may be marked free before older ones are.
    NewerFreedFirst,
    /// Entries that were never committed are believed at attach.
    UncommittedBelieved,
    /// The entries in shared memory are ignored.
    HeldIgnored,
    /// Shared memory of any attach of any medium is believed, in the place that the label names.
    HeldOfAnybody,
    /// The same where servers before this version kept it, by the path of the medium.
    OldHeldOfAnybody,
    /// The label never says that the cache is served.
    ServedUnsaid,
    /// The label says that the cache was detached before everything is committed.
    WcDetachedSaidEarly,
    /// Shared memory hears of a new commit counter only once that is there.
    SeqUnannounced,
    /// A failed write to the cache keeps its mapping (dm-writecache, defect D).
    FailedWriteMapped,
    /// A failed flush of the cache is taken for a good one.
    CacheFlushErrorIgnored,
    /// What a dead server saw a failing cache take is believed to be there.
    FailureForgotten,
    /// An attach begins with a lower commit counter.
    CounterBackwards,
    /// An attach commits on top of a counter that may not be durable.
    FoundUnsettled,
    /// A free mark of an attach changes both halves of its entry.
    MarkTorn,
    /// Zeroes do not wait for blocks that are on their way.
    ZeroOvertakes,
    /// A read does not look whether its slots were retired meanwhile.
    RetiredBelieved,
    /// The flush that a dead server owed the origin is forgotten.
    OwedFlushForgotten,
    /// What passes by in front of dirty data leaves the origin consistent, it says.
    PassedUnsaid,
    /// The label is not stored.
    WritecacheUnlabelled,
    /// A format leaves no mark that says whose it is.
    FormatUnmarked,
    /// A flush does not wait for what was overwritten.
    OverwriteUncounted,
    /// Write-back takes what was overwritten and is not flushed.
    UnflushedWrittenBack,
    /// What a dead server saw overwritten on a failing cache is believed to stay.
    OverwrittenUnsettled,
    /// Mode `p`: shared memory does not know the counter before it is on the medium.
    CounterUnannounced,
    /// The same in mode `s`.
    DiskCounterUnannounced,
    /// Mode `p`: shared memory never hears that the counter has come to the medium.
    CounterUnconfirmed,
    /// A flush of the origin covers what passed by while it was under way.
    BypassesAsOfEnd,
    /// What passed by owes the origin no flush.
    BypassUncounted,
    /// The room that was promised to a write is not given back when that fails.
    PromiseOfFailed,
    /// What a discard has zeroed leaves the cache before the origin's flush.
    ZeroesUnflushed,
    /// Write-back does not hear of another flush of the origin that failed during its batch.
    OthersFailureIgnored,
    /// A batch that fails brings superseded versions back to life.
    OutdatedRevived,
    /// Of a stripe's two lists, the next server takes up the newer one only.
    OlderListIgnored,
    /// The number of the open batch follows the counter, which some rounds leave as it is.
    BatchByCounter,
    /// What a block looked like is asked for though it was overwritten since, long ago.
    PastLookAsked,
    }

    /// writecache: what only threads that run into each other show.
    WRITECACHE_RACES {
    /// Write-back copies the list of ranges that are being zeroed before it locks a stripe.
    ZeroingCopiedEarly,
    /// Slots are given out again when their marks are about to be stored.
    MarkedSlotsFree,
    /// A write reads which list is being filled before it locks the stripe.
    FillingReadEarly,
    /// Free slots that other threads have taken for themselves wake nobody.
    ReservesIgnored,
    /// A flush does not look again whether a round began while it looked.
    RoundReadOnce,
    /// A read from memory does not look whether its slot was retired meanwhile.
    SlotNotRechecked,
    /// Slots that writes are filling count as lost.
    SlotsInHandForgotten,
    /// A thread that waits for a slot does not see what others publish.
    PublishUnheard,
    /// A discard says that it waits for write-back after it has looked.
    BatchEndMissed,
    /// A tick takes a message `flush` for carried out that came after its look.
    FlushForgotten,
    /// A client's port begins a round that none of its bios waits for.
    RoundOfNobody,
    /// Write-back takes a block twice for a batch, when a newer version is committed meanwhile.
    BlockTakenTwice,
    /// A thread that waits for others that have the promise of a list does not hear of them.
    PromisesUnheard,
    /// Write-back tries again after a suspend has given up cleaning.
    SuspendedRetries,
    /// A slot is superseded while it is being overwritten, and given out again.
    OverwritingFreed,
    /// A block is overwritten while a discard is zeroing it.
    OverwrittenWhileZeroed,
    }
}
