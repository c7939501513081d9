//! Deliberate bugs of cache.

use crate::mutants::list_mutants;

list_mutants! {
    /// cache: what a crash, a failing device or a single thread shows.
    CACHE {
    /// A clean slot is written to before the medium says that it is dirty.
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
    /// A block comes into the cache as it was before a write that is under way.
    PromotedOverWrite,
    /// What is written while its block is copied to the origin counts as copied.
    RewriteUnseen,
    /// What was written back is clean before the origin's flush.
    CleanedUnflushed,
    /// A failed flush of the origin is taken for a good one, after write-back.
    CleanedByFailedFlush,
    /// A failed copy is taken for a good one.
    CleanedUnwritten,
    /// A request that changed where its block is does not wait for the commit.
    MovedUnsettled,
    /// The origin is zeroed below a slot that counts as clean.
    ZeroedBelowClean,
    /// A FUA write is not flushed.
    CacheFuaUnflushed,
    /// What an origin shows whose flush failed is taken for durable.
    DoubtForgotten,
    /// Nobody hears of a failed flush that a client did not ask for.
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
    /// What a failed commit carried is not in the next one.
    FailedForgotten,
    /// What a lost slot had is read from the origin, as it was earlier.
    LossServed,
    /// A client's flush flushes the cache device alone.
    FlushOfCacheOnly,
    /// Of a dirty block only what made it dirty is written back.
    PartUnseen,
    /// Of a block that is dirty as a whole only what is written from now on is written back.
    WholeTakenForPart,
    /// What is being written back is not written again after an error.
    PartsTakenEarly,
    /// A write does not spoil what it overlaps of a fill.
    FillNotSpoiled,
    /// What a slot has of a block stays valid when it is written to at the origin.
    RewrittenPartValid,
    /// A fill begins while another is on its way to the same sectors.
    FillsOverlap,
    /// A block of which a part is in its slot gets a mapping.
    NamedInPart,
    /// What could not be read, or not be written to its slot, counts as filled.
    FillUnread,
    /// After an unclean shutdown the medium says that its dirty bits are right before they are.
    CleanSaidEarly,
    /// Dirty bits are believed after an unclean shutdown.
    UncleanBelieved,
    /// The medium does not hear that a table has made the cache longer or shorter.
    FitUncommitted,
    }

    /// cache: what random histories meet too rarely, and a scene made for it shows.
    CACHE_SCENES {
    /// In passthrough a write leaves the slot as it is.
    PassthroughKept,
    /// Two writes of a block go through to both devices together.
    ThroughUnordered,
    /// A mark goes while a write through its slot is under way.
    ClearedUnderWrite,
    /// What a superblock leads to that was sent and failed is written over.
    AbandonedReused,
    /// Of a word of version 1 that is in two blocks of mappings, the first is marked.
    MarkedShort,
    /// A slot is given away while a read of it is on its way.
    LeftWhileRead,
    /// Hints of another policy are believed.
    ForeignHints,
    /// What a server that died left is believed before it is durable.
    LeftUnsettled,
    /// What a write brought is read that the server's death would still take back.
    UnsettledSeen,
    /// Zeroes are read that the server's death would still take back.
    UnsettledZeroesSeen,
    /// Zeroes below a slot count as durable though a flush of somebody else has lost them.
    ZeroedByFailedFlush,
    /// A block that was written to in too many places is not written back in some of them.
    PartsCutShort,
    /// Zeroes of a part of a dirty block are not written back.
    ZeroesUnseen,
    /// What a slot has of a block stays valid when it is zeroed at the origin.
    ZeroedPart,
    /// A block in part leaves its slot while a read of it is on its way.
    PartLeftWhileRead,
    /// A write of a whole block takes the slot of a part while a fill is on its way there.
    WholeOverFill,
    /// The rest of a block is read before the answer to the request that lets it come.
    GapsFirst,
    /// Another table takes the media over after a flush of the origin failed, and does not know.
    DoubtLeftUnsaid,
    }

    /// cache: what requests of several blocks and tables that change show; the simulation finds it.
    CACHE_TABLES {
    /// A request of which a later block has to leave its slot has nobody commit that.
    LaterBlockUncommitted,
    /// A table that makes a cache shorter cuts off what is dirty.
    ShrunkOverDirty,
    /// A table in passthrough mode takes over a cache that has dirty blocks.
    PassedByDirty,
    }

    /// cache: what only threads that run into each other show.
    CACHE_RACES {
    /// A block is written back while a write to its slot is on its way.
    CleanedBesideWriter,
    /// Write-back hears of a write to what it copies when the write has ended.
    RewriteSeenLate,
    /// A fill hears of a write to the same sectors when the origin has answered that.
    SpoiledLate,
    /// A flush covers what was written while it was under way.
    FlushMarkedLate,
    /// Requests that wait for a commit are woken before they can see that it is durable.
    CommitToldEarly,
    /// Nobody notes that a request waits for what is under way in its block.
    WaitUnnoted,
    }
}
