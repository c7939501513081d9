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
    /// What a server that died left is believed before it is durable.
    LeftUnsettled,
    /// A flush that a dead server owed is forgotten.
    CacheOwedForgotten,
    }
}
