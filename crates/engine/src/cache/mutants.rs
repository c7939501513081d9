//! Deliberate bugs of cache.

use crate::mutants::list_mutants;

list_mutants! {
    /// cache: bugs that a crash, a failing device or a single thread shows.
    CACHE {
    /// A clean slot is written to before the medium has marked it as dirty.
    WrittenUnmarked,
    /// Slots count as marked when the commit that marks them begins.
    MarkedEarly,
    /// The superblock is written before what it leads to is durable.
    SuperblockEarly,
    /// A mapping is committed before its slot's data is durable (dm-cache, no data flush).
    CommittedUnflushedCache,
    /// A mapping is committed before the origin's data, which its slot equals, is durable.
    CommittedUnflushedOrigin,
    /// A slot is given out again before the medium has forgotten what it held.
    FreedEarly,
    /// A block that leaves is written to at the origin while the medium still has its slot.
    LeavingWritten,
    /// A block is promoted with its state before a concurrent write.
    PromotedOverWrite,
    /// Data that is written while its block is copied to the origin counts as copied.
    RewriteUnseen,
    /// A block that was written back is clean before the origin's flush.
    CleanedUnflushed,
    /// A failed flush of the origin counts as successful, after write-back.
    CleanedByFailedFlush,
    /// A failed copy is taken for a good one.
    CleanedUnwritten,
    /// A request that changed where its block is does not wait for the commit.
    MovedUnsettled,
    /// The origin is zeroed below a slot that counts as clean.
    ZeroedBelowClean,
    /// A FUA write is not flushed.
    CacheFuaUnflushed,
    /// Data read from an origin whose flush failed counts as durable.
    DoubtForgotten,
    /// A failed flush without a client's request is never reported.
    FailedFlushUnsaid,
    /// After a failed flush of the cache device its data is committed by the next one.
    CacheLossForgotten,
    /// A dirty block that the cache device cannot read is read from the origin.
    StaleFallback,
    /// A flush that a dead server owed is forgotten.
    CacheOwedForgotten,
    /// A slot is clean after a write through it of which one half failed.
    ThroughFailedClean,
    /// A request that joins late takes the commit under way for its own.
    JoinedLate,
    /// The changes of a failed commit are not in the next one.
    FailedForgotten,
    /// A block of a lost slot is read from the origin, which has older data.
    LossServed,
    /// A client's flush flushes the cache device alone.
    FlushOfCacheOnly,
    /// Of a dirty block only what made it dirty is written back.
    PartUnseen,
    /// Of a block that is dirty as a whole only what is written from now on is written back.
    WholeTakenForPart,
    /// Sectors that are being written back are not written again after an error.
    PartsTakenEarly,
    /// A write does not spoil what it overlaps of a fill.
    FillNotSpoiled,
    /// The slot's part of a block stays valid when the block is written at the origin.
    RewrittenPartValid,
    /// A fill begins while another one to the same sectors is in flight.
    FillsOverlap,
    /// A block of which a part is in its slot gets a mapping.
    NamedInPart,
    /// A fill that failed to read, or to write to its slot, counts as complete.
    FillUnread,
    /// After an unclean shutdown the medium marks its dirty bits as right before they are.
    CleanSaidEarly,
    /// Dirty bits are believed after an unclean shutdown.
    UncleanBelieved,
    /// The medium does not record that a table has made the cache longer or shorter.
    FitUncommitted,
    }

    /// cache: bugs that random histories meet too rarely, and that special tests show.
    CACHE_CASES {
    /// In passthrough a write does not change the slot.
    PassthroughKept,
    /// Two writes of a block go through to both devices together.
    ThroughUnordered,
    /// A read of a block that is being written through is answered by the slot.
    ThroughReadEarly,
    /// A mark goes while a write through its slot is under way.
    ClearedUnderWrite,
    /// Blocks of a superblock that was sent and failed are overwritten.
    AbandonedReused,
    /// A bitmap of the space map is not written if blocks were only freed in it.
    FreedBitmapUnwritten,
    /// A word of format 1 that spans two blocks of mappings is marked in the first block only.
    MarkedShort,
    /// A slot is given away while a read of it is on its way.
    LeftWhileRead,
    /// Hints of another policy are believed.
    ForeignHints,
    /// Data that a dead server left is trusted before it is durable.
    LeftUnsettled,
    /// A client can read a write's data that the server's death would still take back.
    UnsettledSeen,
    /// A client can read zeroes that the server's death would still take back.
    UnsettledZeroesSeen,
    /// Zeroes below a slot count as durable although another client's failed flush has lost them.
    ZeroedByFailedFlush,
    /// A block that was written to in too many places is not written back in some of them.
    PartsCutShort,
    /// Zeroes of a part of a dirty block are not written back.
    ZeroesUnseen,
    /// Zeroes below a slot, of a request that failed, stay below its sectors that are not dirty.
    ZeroedInPartKept,
    /// The slot's part of a block stays valid when the block is zeroed at the origin.
    ZeroedPart,
    /// A partially cached block is dropped while a read of it is in flight.
    PartLeftWhileRead,
    /// A write of a whole block takes the slot of a part while a fill to it is in flight.
    WholeOverFill,
    /// The rest of a block is read before the answer to the request that admitted it.
    GapsFirst,
    /// Another table takes the media over after a flush of the origin failed, and does not know.
    DoubtLeftUnsaid,
    /// A write in writethrough goes to the slot alone, which becomes dirty.
    ThroughDirty,
    /// Mappings of a server that died in writethrough are trusted.
    UntrustedBelieved,
    /// A block that came before a flush of the origin failed stays clean.
    DoubtedFreshClean,
    /// A message that invalidates a range leaves its last block.
    LastKeptInRange,
    /// A partial block at the end of the origin counts as a whole one.
    TailRoundedUp,
    /// A cache is wiped before its origin is flushed.
    WipedUnflushed,
    /// After a failed commit, the next one does not flush the data of slots whose marks it removes.
    ClearedForgotten,
    /// A good flush counts although another client's flush failed meanwhile.
    OthersFlushBelieved,
    /// A drain does not wait for blocks after whose write-back the origin's flush failed.
    FailedBatchDrained,
    /// A slot where a write failed stays in use when its block is clean.
    RefusedSlotKept,
    /// A block of the origin where a write failed is clean in the cache.
    HalfWrittenClean,
    /// The medium does not record that a device failed a flush.
    DoubtUntold,
    /// New metadata forgets that a device failed a flush.
    DoubtFormatted,
    /// The next server takes the data of a cache device that failed a flush for durable.
    LostKeptAsIs,
    }

    /// cache: bugs that need requests of several blocks and changing tables; the simulation finds
    /// them.
    CACHE_TABLES {
    /// A request needs a later block to give up its slot, and starts no commit for that.
    LaterBlockUncommitted,
    /// A table that makes a cache shorter cuts off what is dirty.
    ShrunkOverDirty,
    /// A table in passthrough mode takes over a cache with dirty blocks.
    PassedByDirty,
    }

    /// cache: what only threads that run into each other show.
    CACHE_RACES {
    /// A block is written back while a write to its slot is in flight.
    CleanedBesideWriter,
    /// Write-back notices a write to the block that it copies only when the write has ended.
    RewriteSeenLate,
    /// A fill notices a write to the same sectors only when the origin has answered the write.
    SpoiledLate,
    /// A flush covers what was written while it was under way.
    FlushMarkedLate,
    /// Requests that wait for a commit are woken before they can see that it is durable.
    CommitToldEarly,
    /// A request that waits for I/O in flight in its block is not recorded as waiting.
    WaitUnnoted,
    }
}
