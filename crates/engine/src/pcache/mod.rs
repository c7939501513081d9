//! The pcache target: a log-structured write-back cache on persistent memory, on the media of
//! Linux's dm-pcache.
//!
//! A write goes to the next free bytes of a data segment; a 40-byte key says where. Keys gather
//! in open key sets and are logged 128 at a time, or at once for FUA and flush. Write-back
//! follows the log from dirty_tail, collection follows write-back from key_tail.
//!
//! | file | what happens there | kernel |
//! |---|---|---|
//! | `args`, `facts` | the table line's words; what is told beyond the status | `dm_pcache.c` |
//! | `layout`, `media` | every on-media byte; typed access to them | `*.h` |
//! | `format`, `attach` | making a cache, opening one | `cache.c` |
//! | `survey`, `batch`, `walk`, `replay` | what its log says | `cache.c` |
//! | `label` | knowing a cache again | |
//! | `segment`, `chain` | allocation, references, generations | `cache_segment.c` |
//! | `index` | logical block to place | `cache_key.c` |
//! | `openset`, `memory`, `takeup` | keys in memory, also those of a dead server | `cache_key.c` |
//! | `keylog` | keys on media | `cache_key.c` |
//! | `write`, `read` | the life of a request | `cache_req.c` |
//! | `writeback`, `pace`, `latest` | what goes to the backing device, when | `cache_writeback.c` |
//! | `gc` | room is made | `cache_gc.c` |
//! | `retention`, `retain`, `classes` | which data stays when space is short, and how | |
//! | `pressure` | what is done when writes would wait for room | |
//! | `datacrc`, `quarantine` | damage: found, and kept from spreading | |
//! | `salvage` | what a cache has that is not to be changed, or was cut short | |
//!
//! Locks, outermost first: background; collector; stripes in index order; the scratch of keys; the
//! log's head; allocator. None of the last four is held while data is copied, and none while the
//! world is waited for.

mod args;
mod attach;
mod batch;
mod chain;
mod classes;
pub mod contents;
mod control;
mod datacrc;
mod facts;
mod format;
mod gc;
pub mod index;
pub mod inspect;
mod keylog;
mod label;
mod latest;
pub mod layout;
mod media;
mod memory;
mod openset;
#[cfg(test)]
#[cfg(feature = "loom")]
pub(crate) mod orderings;
mod pace;
mod pressure;
mod quarantine;
mod read;
mod replay;
mod retain;
mod retention;
pub mod salvage;
#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules;
mod segment;
mod survey;
mod takeup;
mod walk;
mod write;
mod writeback;

use crate::alarm::Alarm;
use crate::attaching::AttachProgress;
use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::room::Room;
use crate::shm::Keeper;
use crate::slots::SlotState;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::target::{Dirty, Events, Extent, Fact, Health, Port, Target, TargetLimits};
use crate::units::{Nanos, SECOND, human_bytes, human_pair};

pub use args::{TableArgs, WORDS, WritebackOrder};
pub use attach::LogDamage;
use control::Attached;
use datacrc::DataCrcs;
pub use facts::limits;
use gc::{Gc, Sweep};
use index::{FLAT_FROM, Index};
use keylog::KeyLog;
use label::Label;
use layout::{CacheInfo, Geometry, KEYS_MAX, Key, REGION_BYTES};
use media::{Found, Media};
use memory::Memory;
use openset::OpenSets;
use pace::{FillBell, Pace};
use quarantine::Quarantine;
use read::{Fill, Misses};
use replay::Replay;
pub use replay::ReplayPace;
use retention::Retention;
pub use retention::RetentionKind;
use segment::Segments;
use write::{KnownZeroes, ZeroExtent};
use writeback::Writeback;

/// The kind of an I/O, in the high byte of its token.
const TOKEN_KIND: u64 = 0xFF << 56;
const TOKEN_MISS: u64 = 1 << 56;
const TOKEN_WRITEBACK: u64 = 2 << 56;
const TOKEN_FLUSH: u64 = 3 << 56;

/// Most stripes, that is open key sets.
const STRIPES_MAX: usize = 16;
/// An open key set with keys is logged after so long.
const CLOSE_AFTER: Nanos = SECOND;
/// So often the background looks whether the medium is all there.
const LOOK_EVERY: Nanos = SECOND / 10;

/// The largest backing device: bounds the memory that the index takes before anything is cached
/// (28 bytes for each 4 MiB).
pub const BACKING_BYTES_MAX: u64 = 64 << 40;

/// How a cache is opened; what the table line does not say.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Format the device even if it may hold something else.
    pub force_format: bool,
    /// Size of segments; the kernel's except in tests.
    pub geometry: Geometry,
    /// Open key sets, 1 to 16.
    pub stripes: usize,
    /// A fresh random number: names this attach.
    pub attach_id: u64,
    /// Is told how far it is.
    pub progress: Arc<AttachProgress>,
    /// What of the log is replayed before the first request, and how fast the rest.
    pub replay: ReplayPace,
    /// From how many slots on a 4 MiB region of the index has them in an array. Any is right.
    pub flat_from: usize,
    /// Threads that may share the reading of a long log.
    pub threads: usize,
}

impl OpenOptions {
    /// The kernel's geometry, eight stripes, and one thread.
    pub fn new(attach_id: u64) -> OpenOptions {
        OpenOptions {
            force_format: false,
            geometry: Geometry::KERNEL,
            stripes: 8,
            attach_id,
            progress: Arc::default(),
            replay: ReplayPace::default(),
            flat_from: FLAT_FROM,
            threads: 1,
        }
    }
}

/// Words of shared memory that a cache needs to survive the death of its server.
pub fn shared_words(stripes: usize) -> usize {
    openset::words_needed(stripes)
}

#[derive(Debug, Default)]
struct StripeState {
    fills: Vec<Fill>,
}

/// The lock of every `n`-th 4 MiB region, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    state: Mutex<StripeState>,
    /// Dirty bytes that were ever written here. Changes under the lock, is read without it.
    dirtied_bytes: AtomicU64,
}

impl Stripe {
    /// The caller holds the lock, so this needs no atomic addition.
    fn add_dirty(&self, bytes: u64) {
        let sum = self.dirtied_bytes.load(Ordering::Relaxed) + bytes;
        self.dirtied_bytes.store(sum, Ordering::Release);
    }
}

#[derive(Debug, Default)]
struct Background {
    now: Nanos,
    /// When the medium is looked at next.
    look_at: Nanos,
    last_close: Nanos,
    pace: Pace,
    writeback: Writeback,
    sweep: Sweep,
    replay: Option<Replay>,
}

/// A counter that threads raise all the time: by port, so that they do not wait for each other's
/// cache line.
#[derive(Debug, Default)]
struct BusyCounter([Line; 8]);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Line(AtomicU64);

impl BusyCounter {
    fn raise(&self, port: usize) {
        self.0[port % self.0.len()].0.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|line| line.0.load(Ordering::Relaxed)).sum()
    }
}

#[derive(Debug, Default)]
struct Counters {
    read_hits: BusyCounter,
    read_misses: AtomicU64,
    filled_bytes: AtomicU64,
    damaged_reads: AtomicU64,
    damaged_runs: AtomicU64,
    batches: AtomicU64,
    written_back_bytes: AtomicU64,
    writeback_failures: AtomicU64,
    collected_keys: AtomicU64,
    recycled_segments: AtomicU64,
    kept_bytes: AtomicU64,
    moved_bytes: AtomicU64,
    dropped_bytes: AtomicU64,
    yielded_bytes: AtomicU64,
    helped: AtomicU64,
    /// Segments with data that is kept behind dirty data.
    pinned: AtomicU32,
    /// Segments in use when the background was last told that they get short.
    used_told: AtomicU32,
    /// Segments in use when a write did a piece of collection last; 0: that was long ago.
    used_helped: AtomicU32,
}

/// An open cache.
#[derive(Debug)]
pub struct Pcache {
    args: TableArgs,
    media: Media,
    backing: Arc<dyn Disk>,
    segments: Arc<Segments>,
    retention: Box<dyn Retention>,
    /// See [`gc::write_reserve`].
    write_reserve: u32,
    /// Whether anything was kept, moved or dropped yet. Before, all there is to know of a block is
    /// that it comes in.
    has_retained: AtomicBool,
    log: KeyLog,
    index: Index,
    crcs: Option<DataCrcs>,
    stripes: Box<[Stripe]>,
    open: OpenSets,
    close_scratch: Mutex<Vec<Key>>,
    zero_extent: Mutex<Option<ZeroExtent>>,
    known_zeroes: Mutex<KnownZeroes>,
    zero_crc: Mutex<(u32, u32)>,
    misses: Mutex<Misses>,
    background: Mutex<Background>,
    /// Collection has a lock of its own: a write that needs room does a piece of it.
    collector: Mutex<Gc>,
    bad: Quarantine,
    label: Mutex<(Label, SlotState)>,
    info: Mutex<Found<CacheInfo>>,
    superblock_flags: u32,
    seg_num: u32,
    /// cache_info's flags.
    flags: AtomicU32,
    events: Arc<Events>,
    /// Dirty bytes that the attach found.
    dirty_at_start: u64,
    /// Dirty bytes that were written back since.
    cleaned_bytes: AtomicU64,
    is_draining: AtomicBool,
    is_suspended: AtomicBool,
    fill_bell: FillBell,
    /// Lately, writes waited for write-back and for nothing else. Set by ticks, read by whoever
    /// tells of room.
    is_origin_limiting: AtomicBool,
    room: Room,
    alarm: Alarm,
    counters: Counters,
    notes: Mutex<Vec<String>>,
    /// Whether the background has a [`Replay`].
    is_replaying: AtomicBool,
    replay_pace: ReplayPace,
}

impl Pcache {
    /// Opens the cache that `args` describes, formatting the device if it is empty.
    pub fn open(
        args: TableArgs,
        len_bytes: u64,
        cache: Arc<dyn Pmem>,
        backing: Arc<dyn Disk>,
        memory: impl Into<Keeper>,
        options: &OpenOptions,
    ) -> Result<Pcache> {
        assert!((1..=STRIPES_MAX).contains(&options.stripes));
        let geometry = options.geometry;
        let media = Media { pmem: cache, geometry, shared: None };
        let keeper = memory.into();
        let limits = backing.limits().clone();
        if limits.size_bytes > BACKING_BYTES_MAX {
            let (found, most) = human_pair(limits.size_bytes, BACKING_BYTES_MAX);
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "pcache: backing device {} has {found}; more than {most} is not supported",
                    limits.name
                ),
            ));
        }
        if len_bytes > limits.size_bytes {
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "pcache: the table is {len_bytes} bytes long, but backing device {} has {}",
                    limits.name, limits.size_bytes
                ),
            ));
        }
        control::prepare_media(&media, &backing, &args, options, &keeper)?;
        let opening = control::Opening { args, media, backing, keeper, options };
        match opening.attach(None)? {
            Attached::Open(pcache) => Ok(*pcache),
            Attached::OtherMemory(note) => match opening.attach(Some(note))? {
                Attached::Open(pcache) => Ok(*pcache),
                Attached::OtherMemory(_) => unreachable!("new memory is of nobody else"),
            },
        }
    }

    /// Whether the backing device alone is a state that a power cut could have left. Always so
    /// with the order `ordered`, once what another order left half done is written back.
    pub fn is_origin_consistent(&self) -> bool {
        lock(&self.background).writeback.is_origin_consistent()
    }

    fn stripe_of(&self, offset: u64) -> usize {
        (offset / REGION_BYTES) as usize % self.stripes.len()
    }

    fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    /// Bytes that only the cache has.
    fn dirty_bytes(&self) -> u64 {
        // First what went, then what came: so nothing goes that has not come.
        let cleaned = self.cleaned_bytes.load(Ordering::SeqCst);
        self.came_bytes().saturating_sub(cleaned)
    }

    /// The background is to look. While somebody waits for room, a key that came since it looked
    /// may be all that keeps that room, so it is woken in any case.
    fn arm(&self) {
        self.alarm.arm(self.room.is_wanted());
    }

    fn is_urgent(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed) || self.is_space_short()
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

    fn has_open_keys(&self) -> bool {
        (0..self.open.stripes()).any(|stripe| self.open.len(stripe) > 0)
    }

    /// Looks now and then whether the medium is all there. Once it has lost a part, nothing more is
    /// acknowledged.
    fn look_at_medium(&self, background: &mut Background) {
        if background.now < background.look_at || self.log.has_failed() {
            return;
        }
        background.look_at = background.now + LOOK_EVERY;
        if self.media.pmem.failure().is_some() {
            self.log.fail();
        }
    }

    /// Logs open sets that are old, or that are all that write-back and collection wait for.
    fn close_old_sets(&self, background: &mut Background, is_urgent: bool) {
        let is_old = background.now >= background.last_close + CLOSE_AFTER;
        let is_due = background.pace.share() > 0 && self.dirty_bytes() > 0;
        let is_waited_for = (is_urgent || is_due) && self.log.dirty_tail() == self.log.head();
        if is_old || is_waited_for {
            // Without room the keys stay where they are; a failed medium is latched in the log.
            let _ = self.close_each();
            background.last_close = background.now;
        }
    }

    /// When to look again.
    fn next_look(&self, background: &Background) -> Option<Nanos> {
        let now = background.now;
        if background.replay.is_some() {
            self.alarm.keep();
            return Some(now);
        }
        let has_work = self.has_open_keys() || self.log.dirty_tail() != self.log.head();
        if has_work {
            self.alarm.keep();
            let next = self.writeback_deadline(background).unwrap_or(Nanos::MAX);
            return Some(next.clamp(now, now + CLOSE_AFTER));
        }
        self.alarm.next_look(now, CLOSE_AFTER)
    }
}

impl Target for Pcache {
    fn name(&self) -> &'static str {
        "pcache"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        // What is left can be read.
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

    fn complete(&self, io: DiskIo, port: &mut Port) {
        match io.token & TOKEN_KIND {
            TOKEN_MISS => self.complete_miss(io, port),
            TOKEN_WRITEBACK => self.complete_write(&mut lock(&self.background), io, port),
            TOKEN_FLUSH => self.complete_flush(&mut lock(&self.background), io, port),
            kind => panic!("no I/O of ours has token kind {kind:#x}"),
        }
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let was_suspended = mutants::is(Mutant::SuspendSeenEarly).then(|| self.is_suspended());
        let mut background = lock(&self.background);
        let background = &mut *background;
        background.now = now;
        if was_suspended.unwrap_or_else(|| self.is_suspended()) {
            return None;
        }
        self.look_at_medium(background);
        self.replay_slice(background);
        self.close_old_sets(background, self.is_urgent());
        self.writeback_if_due(background, port);
        self.collect_enough(background, port);
        self.look_at_collection(background);
        // What was kept behind nothing dirty can be given up, once write-back has passed it.
        if background.pace.is_pressed() || self.dirty_bytes() == 0 {
            self.writeback_if_due(background, port);
        }
        self.give_up_if_hopeless(background);
        self.next_look(background)
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits { block_bytes: self.backing.limits().block_bytes.max(512), has_discard: true }
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
            is_failing: lock(&self.background).writeback.retry().is_failing(),
            failed_batches: self.counters.writeback_failures.load(Ordering::Relaxed),
            medium_failure: failure.map(|failure| failure.to_string()).or(has_failed),
            waited: self.room.waited.load(Ordering::Relaxed),
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
            bytes: self.dirty_bytes(),
            is_failing: lock(&self.background).writeback.retry().is_failing(),
        }
    }

    fn set_draining(&self, draining: bool) {
        self.is_draining.store(draining, Ordering::SeqCst);
        self.events.work();
    }

    fn suspend(&self) -> Result<()> {
        if mutants::is(Mutant::DetachedSaidEarly) {
            self.say_at_rest();
        }
        // Keys first: afterwards the media alone hold every completed write.
        self.close_all(false).map_err(|error| {
            let kind = match error {
                keylog::AppendError::NoRoom => Kind::NoSpace,
                keylog::AppendError::Medium(_) => Kind::Io,
            };
            Error::new(
                kind,
                format!("pcache: {}: open key sets cannot be logged", self.media.name()),
            )
        })?;
        self.is_suspended.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn is_idle(&self) -> bool {
        lock(&self.background).writeback.is_idle()
    }

    fn detach(&self) {
        self.end();
    }

    fn resume(&self) -> Result<()> {
        self.is_suspended.store(false, Ordering::SeqCst);
        self.events.work();
        Ok(())
    }
}

const _: () = assert!(KEYS_MAX == 128);
