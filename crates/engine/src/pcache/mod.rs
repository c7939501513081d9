//! The pcache target: a log-structured write-back cache on persistent memory, on the media of
//! Linux's dm-pcache.
//!
//! A write is stored in the next free bytes of a data segment, and a 40-byte key records the place.
//! Keys gather in open key sets and are logged 128 at a time, or immediately for FUA and flush.
//! Write-back follows the log from dirty_tail, collection follows write-back from key_tail.
//!
//! | file | job | kernel |
//! |---|---|---|
//! | `args` | the table line's words | `dm_pcache.c` |
//! | `facts`, `counters` | facts beyond the status line | |
//! | `layout`, `media`, `slots` | every on-media byte; typed access; updates in two slots | `*.h` |
//! | `format`, `open`, `attach` | making a cache, opening one | `cache.c` |
//! | `label`, `identity` | recognising a cache | |
//! | `backing` | whether the backing device is unchanged | |
//! | `segment`, `classes` | allocation, references, generations | `cache_segment.c` |
//! | `index` | logical block to place | `cache_key.c` |
//! | `stripes`, `openset` | keys in memory, under the locks of their regions | `cache_key.c` |
//! | `memory` | the shared memory with the keys of a dead server | |
//! | `keylog`, `key` | keys on media, and their meaning | `cache_key.c` |
//! | `write`, `zero`, `read`, `fills` | the life of a request | `cache_req.c` |
//! | `control` | status, table, messages, suspend and the end | `dm_pcache.c` |
//! | `background` | the order of the background's work | |
//! | `signals` | waking the background and bios that wait for free space | |
//! | `writeback`, `pace`, `coalesce` | writing dirty data back | `cache_writeback.c` |
//! | `gc` | freeing space | `cache_gc.c` |
//! | `retention`, `retain` | which data is kept when space is short, and how | |
//! | `pressure` | space for writes that would have to wait | |
//! | `datacrc`, `quarantine` | damage: found, and kept from spreading | |
//! | `recovery` | reading a cache that must not be changed, or was cut short | |
//! | `mutants` | deliberate bugs, in tests alone | |
//!
//! Only the file of a type changes the type's fields.
//!
//! Locks, outermost first: background; collector; stripes in index order; the scratch of keys; the
//! log's head; allocator. None of the last four is held while data is copied, and none during I/O.

mod args;
mod attach;
mod background;
mod backing;
mod classes;
mod coalesce;
pub mod contents;
mod control;
mod counters;
mod datacrc;
mod facts;
mod fills;
mod format;
mod gc;
mod identity;
pub mod index;
pub mod inspect;
mod key;
mod keylog;
mod label;
pub mod layout;
mod media;
mod memory;
mod mutants;
mod open;
mod openset;
#[cfg(test)]
#[cfg(feature = "loom")]
pub(crate) mod orderings;
mod pace;
mod pressure;
mod quarantine;
mod read;
pub mod recovery;
mod retain;
mod retention;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
mod segment;
mod signals;
pub mod slots;
mod stripes;
pub mod wipe;
mod write;
mod writeback;
mod zero;

use crate::bio::{Bio, Op};
use crate::common::per_port::PerPort;
use crate::disk::{Disk, DiskIo};
use crate::error::{Result, Status};
use crate::pmem::client_memory::Source;
use crate::pmem::copy_target::CopyTarget;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::target::{
    Dirty, Events, Extent, Fact, Health, OnlyCached, Port, Target, TargetLimits, Waiting,
    refused_push,
};
use crate::units::Nanos;

pub use args::LogDamage;
pub use args::{TableArgs, WORDS, WritebackOrder};
pub use attach::ReplayPace;
use background::Background;
use counters::Counters;
use datacrc::DataCrcs;
pub use facts::limits;
use gc::Collector;
use identity::Identity;
use index::Index;
use keylog::KeyLog;
use media::Media;
pub use open::OpenOptions;
use quarantine::Quarantine;
use read::Miss;
pub use retention::RetentionKind;
use segment::Segments;
use signals::Signals;
use stripes::Stripes;
use zero::Zeroes;

/// The kind of an I/O, in the high byte of its token.
const TOKEN_KIND: u64 = 0xFF << 56;
const TOKEN_MISS: u64 = 1 << 56;
const TOKEN_WRITEBACK: u64 = 2 << 56;
const TOKEN_FLUSH: u64 = 3 << 56;
/// Of a miss: the data is offered to the cache when it is read.
const TOKEN_FILL: u64 = 1 << 55;

/// The largest backing device. It bounds the memory that the index takes while the cache is empty
/// (28 bytes for each 4 MiB).
pub const BACKING_BYTES_MAX: u64 = 64 << 40;

/// Words of shared memory that a cache needs to survive the death of its server.
pub fn shared_words(stripes: usize) -> usize {
    openset::words_needed(stripes)
}

/// An open cache.
#[derive(Debug)]
pub struct Pcache {
    args: TableArgs,
    media: Media,
    backing: Arc<dyn Disk>,
    segments: Arc<Segments>,
    log: KeyLog,
    index: Index,
    /// Checksums of data, with `data_crc`.
    crcs: Option<DataCrcs>,
    stripes: Stripes,
    zeroes: Zeroes,
    misses: PerPort<Miss>,
    bad: Quarantine,
    identity: Identity,
    background: Background,
    collector: Collector,
    signals: Signals,
    counters: Counters,
}

impl Pcache {
    /// Whether the backing device alone has a state that a power failure could have left. Always
    /// true with the order `ordered`, once the data that another order left incomplete is written
    /// back.
    pub fn is_origin_consistent(&self) -> bool {
        self.background.lock().writeback.is_origin_consistent()
    }

    /// How many bytes of a range are in the cache now.
    pub fn cached_bytes_in(&self, offset: u64, len: u64) -> u64 {
        let end = offset + len;
        let mut at = offset;
        let mut cached = 0;
        while at < end {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            cached += piece.place.map_or(0, |_| piece.len);
            at += piece.len;
        }
        cached
    }
}

impl Target for Pcache {
    fn name(&self) -> &'static str {
        "pcache"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        // The rest can still be read.
        if self.log.has_failed() && bio.op != Op::Read {
            return port.finish(bio, Err(Status::Io));
        }
        match bio.op {
            Op::Read => self.read(bio, port),
            Op::Write => self.write(bio, port),
            Op::Flush => self.flush(bio, port),
            Op::Discard | Op::WriteZeroes => self.write_zeroes(bio, port),
        }
    }

    fn read_into(&self, offset: u64, into: CopyTarget<'_>, port: usize) -> bool {
        self.read_hits_into(offset, into, port)
    }

    fn write_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
        self.store_from(offset, from, fua, port)
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        match io.token & TOKEN_KIND {
            TOKEN_MISS => self.complete_miss(io, port),
            TOKEN_WRITEBACK => self.written_back(io, port),
            TOKEN_FLUSH => self.flushed_back(io, port),
            kind => panic!("no I/O of ours has token kind {kind:#x}"),
        }
    }

    fn role_of(&self, _disk: &Arc<dyn Disk>) -> &'static str {
        "the origin"
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.tick_at(now, port)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(self.signals.events())
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits { has_discard: true, ..self.backing.limits().of_target() }
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.extent_at(offset, len)
    }

    fn has_fast_zeroes(&self) -> bool {
        true
    }

    fn health(&self) -> Health {
        let failure = self.media.pmem.failure();
        let has_failed = self.log.has_failed().then(|| "it refused a store".to_owned());
        Health {
            origin: self.backing.errors(),
            is_failing: self.background.lock().writeback.retry().is_failing(),
            failed_batches: self.counters.writeback_failures.load(Ordering::Relaxed),
            medium_failure: failure.map(|failure| failure.to_string()).or(has_failed),
            waited: self.signals.room().waited.load(Ordering::Relaxed),
            paced_by: refused_push(&*self.backing),
            ..Health::default()
        }
    }

    fn status(&self) -> String {
        self.status_line()
    }

    fn table(&self) -> String {
        self.table_words()
    }

    fn facts(&self) -> Vec<Fact> {
        self.all_facts()
    }

    fn message(&self, words: &[String]) -> Result<String> {
        self.take_message(words)
    }

    fn dirty(&self) -> Dirty {
        Dirty {
            bytes: self.stripes.dirty_bytes(),
            is_failing: self.background.lock().writeback.retry().is_failing(),
        }
    }

    fn only_cached(&self) -> Option<OnlyCached> {
        Some(self.at_most_dirty())
    }

    fn set_draining(&self, draining: bool) {
        self.order_drain(draining);
    }

    fn waits_for(&self) -> Option<Waiting> {
        // The background has its lock while it waits for the cache device.
        let is_idle = self.background.lock().writeback.is_idle();
        let ended = self.counters.writeback_ios.load(Ordering::Relaxed);
        (!is_idle).then_some(Waiting { device: "the origin", ended })
    }

    fn left_to_drain(&self) -> u64 {
        self.bytes_to_drain()
    }

    fn suspend(&self) -> Result<()> {
        self.log_all_and_suspend()
    }

    fn is_idle(&self) -> bool {
        self.background.lock().writeback.is_idle()
    }

    fn is_durable(&self) -> bool {
        !self.stripes.has_open_keys() && !self.log.has_failed()
    }

    fn detach(&self) {
        let is_marked = self.end();
        self.background.is_unmarked.store(!is_marked, Ordering::SeqCst);
    }

    fn is_origin_marked(&self) -> bool {
        !self.background.is_unmarked.load(Ordering::SeqCst)
    }

    fn resume(&self) -> Result<()> {
        self.background.set_suspended(false);
        self.signals.work();
        Ok(())
    }
}
