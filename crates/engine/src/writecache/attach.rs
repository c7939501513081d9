//! Opening a cache: checks, the walk over its entries, and what the last server left in memory.
//!
//! The medium is changed only to format it, to finish the commit of a server that died, and to
//! name this attach on the label. Entries that must be marked free wait for the first commit,
//! whose counter they must not survive.

use std::collections::{BTreeMap, HashMap};

use zerocopy::IntoBytes;

use crate::alarm::Alarm;
use crate::bio::Op;
use crate::disk::{Disk, DiskIo, DiskLimits};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::room::Room;
use crate::shm::{Keeper, SharedWords};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use crate::sync::{Arc, Mutex};
use crate::units::{SECTOR, human_pair};

use super::args::{Mode, TableArgs};
use super::commit::{Commit, Marks};
use super::format::prepare;
use super::index::{Index, State};
use super::inspect::load_geometry;
use super::layout::{ENTRY_SEQ_AT, Entry, FREE, Geometry, Label, SEQ_COUNT_AT, Superblock};
use super::media::Medium;
use super::memory::{self, Memory, difference, rewrite, rewrite_blocks, rolled_back};
use super::openlist::{Filled, Held, LeftBehind, OpenLists, announce_seq, found_seq, note_failure};
use super::overwrite;
use super::pool::{Pool, SLOTS_MAX};
use super::walk::{Census, Finder, walk};
use super::{Counters, Jobs, ORIGIN_BYTES_MAX, OpenOptions, Stats, Writecache};

/// A commit counter beyond this was not reached by counting.
const SEQ_MAX: u64 = 1 << 62;

/// From so many entries on, threads share them.
const SHARED_BLOCKS_MIN: u64 = 64 << 10;

/// What the walk found, in the index.
struct Attach {
    index: Index,
    aside: HashMap<u32, Entry>,
    /// Slots whose entries must be marked free.
    stale: Vec<u32>,
    /// Those of them, in rising order, whose entries were never committed.
    uncommitted: Vec<u32>,
    notes: Vec<String>,
    /// The origin may have writes of an earlier server that are not durable.
    owes_flush: bool,
}

/// What one of several threads found: of a part of the stripes.
struct Part<'a> {
    index: &'a Index,
    /// Which part, of how many.
    share: (usize, usize),
    aside: HashMap<u32, Entry>,
    stale: Vec<u32>,
    uncommitted: Vec<u32>,
}

impl Part<'_> {
    fn of(index: &Index, nth: usize, count: usize) -> Part<'_> {
        let (aside, stale, uncommitted) = (HashMap::new(), Vec::new(), Vec::new());
        Part { index, share: (nth, count), aside, stale, uncommitted }
    }
}

impl Finder for Part<'_> {
    fn is_mine(&self, block: u64) -> bool {
        let (nth, count) = self.share;
        count == 1 || self.index.stripe_of(block) % count == nth
    }

    fn soon(&self, block: u64, index: u64) {
        self.index.touch(block, &[index as u32]);
    }

    fn sooner(&self, block: u64) {
        self.index.touch_older(block, 1);
    }

    fn known(&self, block: u64) -> Option<u64> {
        self.index.lock_of(block).newest(block).map(|found| u64::from(found.slot))
    }

    fn live(&mut self, block: u64, index: u64) {
        let mut locked = self.index.lock_of(block);
        let older: Vec<u32> = locked.versions(block).map(|found| found.slot).collect();
        for slot in older {
            locked.unlink(slot);
            self.index.set_marking(slot);
            self.stale.push(slot);
        }
        locked.link(index as u32, block, State::Live, 0);
        locked.push_newest(index as u32);
    }

    fn superseded(&mut self, block: u64, index: u64) {
        self.index.set_marking_of(index as u32, block);
        self.stale.push(index as u32);
    }

    fn uncommitted(&mut self, index: u64) {
        self.index.set_marking(index as u32);
        self.stale.push(index as u32);
        self.uncommitted.push(index as u32);
    }

    fn damaged(&mut self, index: u64, entry: &Entry) {
        self.index.set_aside(index as u32);
        self.aside.insert(index as u32, *entry);
    }

    fn twin(&mut self, block: u64, index: u64, entry: &Entry) {
        let mut locked = self.index.lock_of(block);
        let twins: Vec<u32> = locked.versions(block).map(|found| found.slot).collect();
        for slot in twins {
            locked.remove_age(slot);
            locked.set_state(slot, State::Damaged);
            self.aside.insert(slot, *entry);
        }
        locked.link(index as u32, block, State::Damaged, 0);
        self.aside.insert(index as u32, *entry);
    }
}

impl Writecache {
    /// Opens the cache that `args` describes over persistent memory, formatting it if it is empty.
    pub fn open_pmem(
        args: TableArgs,
        len_bytes: u64,
        origin: Arc<dyn Disk>,
        cache: Arc<dyn Pmem>,
        memory: impl Into<Keeper>,
        options: &OpenOptions,
    ) -> Result<Writecache> {
        assert!(args.mode == Mode::Pmem);
        open(args, len_bytes, origin, Medium::Pmem(cache), &memory.into(), options)
    }

    /// As [`Writecache::open_pmem`], over a disk.
    pub fn open_disk(
        args: TableArgs,
        len_bytes: u64,
        origin: Arc<dyn Disk>,
        cache: Arc<dyn Disk>,
        memory: impl Into<Keeper>,
        options: &OpenOptions,
    ) -> Result<Writecache> {
        assert!(args.mode == Mode::Ssd);
        open(args, len_bytes, origin, Medium::Disk(cache), &memory.into(), options)
    }
}

fn open(
    args: TableArgs,
    len_bytes: u64,
    origin: Arc<dyn Disk>,
    medium: Medium,
    keeper: &Keeper,
    options: &OpenOptions,
) -> Result<Writecache> {
    let limits = origin.limits().clone();
    check_devices(&args, len_bytes, &limits, &medium)?;
    let start = args.options.start_sector.unwrap_or(0) * SECTOR;
    let unseen = match options.force_format {
        true => memory::unseen(&medium, start, keeper, &args)?,
        false => None,
    };
    prepare(&medium, start, args.block_bytes, options.force_format, &origin)?;
    unseen.iter().for_each(SharedWords::remove);
    drop(unseen);
    let opening = Opening { args, origin, medium, keeper, options };
    match opening.attach(None)? {
        Attached::Open(cache) => Ok(*cache),
        Attached::OtherMemory(note) => match opening.attach(Some(note))? {
            Attached::Open(cache) => Ok(*cache),
            Attached::OtherMemory(_) => unreachable!("new memory is of nobody else"),
        },
    }
}

/// A cache that is being opened.
struct Opening<'a> {
    args: TableArgs,
    origin: Arc<dyn Disk>,
    medium: Medium,
    keeper: &'a Keeper,
    options: &'a OpenOptions,
}

/// How an opening ends.
enum Attached {
    Open(Box<Writecache>),
    /// The memory that was found is not this medium's, and the user accepts what is lost; a note
    /// says what that is.
    OtherMemory(String),
}

impl Opening<'_> {
    /// Reads the cache, and attaches. `forgotten`: without the memory that is there, and why.
    fn attach(&self, forgotten: Option<String>) -> Result<Attached> {
        let Opening { args, medium, options, .. } = self;
        let limits = self.origin.limits();
        let start = args.options.start_sector.unwrap_or(0) * SECTOR;
        let (superblock, geometry) = load_geometry(medium, start, Some(args.block_bytes))?;
        let mut seq = superblock.seq_count.get();
        if seq > SEQ_MAX {
            let at = start + SEQ_COUNT_AT;
            let what =
                format_args!("commit counter {seq} at byte {at}: no cache has counted so far");
            return Err(medium.error(Kind::Invalid, what));
        }
        let (label, keeper) = (&superblock.label, self.keeper.clone());
        let is_to_go = forgotten.is_some();
        let mut memory = Memory::of(medium, &geometry, label, keeper, args, options, is_to_go)?;
        let left = memory.left()?;
        let mut found = Attach {
            index: Index::new(geometry.blocks as u32, geometry.block_bytes, options.stripes),
            aside: HashMap::new(),
            stale: Vec::new(),
            uncommitted: Vec::new(),
            notes: memory.notes.iter().cloned().chain(forgotten).collect(),
            owes_flush: left.is_some()
                && !mutants::is(Mutant::OwedFlushForgotten)
                && !is_flushed(&self.origin),
        };
        if mutants::is(Mutant::CounterBackwards) {
            seq = seq.saturating_sub(1);
        }
        let census = look(medium, &geometry, seq, limits.size_bytes, &mut found, options)?;
        check_binding(args, medium, &superblock, dirty_blocks(&census, left.as_ref()), limits)?;
        if let Some(what) = left.as_ref().and_then(|left| difference(medium, &geometry, seq, left))
        {
            return match args.accepts_loss {
                true => Ok(Attached::OtherMemory(format!("{what}: they are LOST here"))),
                false => Err(rolled_back(medium, &what)),
            };
        }
        let label = Label::new(&limits.identity, limits.size_bytes, options.attach_id);
        let shared = memory.words();
        let named = memory.name(medium, &geometry, label, options.stripes, seq);
        // What could not be made durable now may never be: the next server must not build on it.
        let taken_up = named.and_then(|label| {
            if let Some(left) = left {
                take_up(medium, &geometry, &mut seq, &mut found, &shared, left, limits)?;
            }
            medium.settle().map(|()| label)
        });
        let label = taken_up.inspect_err(|_| note_failure(&shared))?;
        let open = OpenLists::begin(shared, options.stripes, label.attach_id(), seq);
        memory.words().keep_last_name();
        let (args, medium) = (args.clone(), medium.clone());
        let origin = Arc::clone(&self.origin);
        let cache = assemble(args, origin, medium, geometry, label, seq, found, &census, open);
        Ok(Attached::Open(Box::new(cache)))
    }
}

/// Reads all entries, on several threads if there are many.
fn look(
    medium: &Medium,
    geometry: &Geometry,
    seq: u64,
    origin_bytes: u64,
    found: &mut Attach,
    options: &OpenOptions,
) -> Result<Census> {
    let is_much = geometry.blocks >= SHARED_BLOCKS_MIN;
    let threads = if is_much { options.threads.clamp(1, options.stripes) } else { 1 };
    let mut parts: Vec<Part<'_>> =
        (0..threads).map(|nth| Part::of(&found.index, nth, threads)).collect();
    let census = walk(medium, geometry, seq, Some(origin_bytes), &mut parts, &options.progress)?;
    let parts = parts.into_iter().map(|part| (part.aside, part.stale, part.uncommitted));
    for (aside, stale, uncommitted) in parts.collect::<Vec<_>>() {
        found.aside.extend(aside);
        found.stale.extend(stale);
        found.uncommitted.extend(uncommitted);
    }
    Ok(census)
}

/// A server that died may have owed the origin a flush, for writes that passed by. If the origin
/// refuses, the next flush of a client asks again.
fn is_flushed(origin: &Arc<dyn Disk>) -> bool {
    let flush = DiskIo::bare(origin, Op::Flush, 0, 0, 0);
    origin.carry_out(vec![flush]).iter().all(|io| io.result.is_ok())
}

/// What can be said before the cache device is read.
fn check_devices(
    args: &TableArgs,
    len_bytes: u64,
    origin: &DiskLimits,
    medium: &Medium,
) -> Result<()> {
    let invalid = |what: String| Err(Error::new(Kind::Invalid, format!("writecache: {what}")));
    let block_bytes = args.block_bytes;
    let smallest = origin.block_bytes.max(medium.unit_bytes());
    if block_bytes < smallest {
        return invalid(format!(
            "Block size is smaller than device logical block size: {block_bytes}, {smallest}"
        ));
    }
    let start = args.options.start_sector.unwrap_or(0);
    let sectors = medium.size_bytes() / SECTOR;
    if args.options.start_sector.is_some() && start >= sectors {
        return invalid(format!(
            "Invalid optional argument: start_sector {start}, but {} has {sectors} sectors",
            medium.name()
        ));
    }
    let unit = u64::from(medium.unit_bytes());
    if !(start * SECTOR).is_multiple_of(unit) {
        return invalid(format!(
            "Invalid optional argument: start_sector {start} is not a multiple of the {unit} \
             bytes that {} writes at least",
            medium.name()
        ));
    }
    if origin.size_bytes > ORIGIN_BYTES_MAX {
        let (found, most) = human_pair(origin.size_bytes, ORIGIN_BYTES_MAX);
        let name = &origin.name;
        return invalid(format!("origin {name} has {found}; more than {most} is not supported"));
    }
    if len_bytes > origin.size_bytes {
        return invalid(format!(
            "the table is {len_bytes} bytes long, but origin {} has {}",
            origin.name, origin.size_bytes
        ));
    }
    if len_bytes == 0 || !len_bytes.is_multiple_of(u64::from(block_bytes)) {
        return invalid(format!(
            "Cannot calculate initial queue limits: the table is {len_bytes} bytes long, which is \
             not a multiple of the block size {block_bytes}"
        ));
    }
    Ok(())
}

/// How many blocks the cache has that its origin has not, also in memory alone.
pub(super) fn dirty_blocks(census: &Census, left: Option<&LeftBehind>) -> u64 {
    census.live + census.damaged + left.map_or(0, |left| left.held.len() as u64)
}

/// Dirty blocks of one origin are not written to another.
pub(super) fn check_binding(
    args: &TableArgs,
    medium: &Medium,
    superblock: &Superblock,
    dirty: u64,
    origin: &DiskLimits,
) -> Result<()> {
    let label = &superblock.label;
    let is_ours = label.is_valid() && !label.is_bound_to(&origin.identity, origin.size_bytes);
    if !is_ours || dirty == 0 || args.rebinds {
        return Ok(());
    }
    let known = label.origin_sectors().saturating_mul(SECTOR);
    let (known, found) = human_pair(known, origin.size_bytes);
    let what = format_args!(
        "it caches another origin (of {known}), not {} ({}, {found}), and holds {dirty} dirty \
         blocks; if it is the same data in a new place, add `rebind true` to the table",
        origin.name, origin.identity
    );
    Err(medium.error(Kind::Refused, what))
}

/// Commits what a dead server had acknowledged: its writes are in their slots, only the entries
/// are missing.
fn take_up(
    medium: &Medium,
    geometry: &Geometry,
    seq: &mut u64,
    found: &mut Attach,
    shared: &SharedWords,
    left: LeftBehind,
    origin: &DiskLimits,
) -> Result<()> {
    let is_believed = mutants::is(Mutant::HeldOfAnybody) || mutants::is(Mutant::OldHeldOfAnybody);
    let is_ours = left.seqs.contains(seq) || is_believed;
    let mut wanted: BTreeMap<u64, u32> = BTreeMap::new();
    wanted.extend(left.held.iter().copied());
    if left.has_failed && is_ours {
        rewrite(medium, geometry)?;
    }
    if is_ours {
        rewrite_blocks(medium, geometry, &left.overwritten, &mut found.notes)?;
    }
    if !is_ours || left.has_failed {
        if !wanted.is_empty() {
            found.notes.push(format!(
                "the last server had acknowledged, but not committed, writes to {} blocks, and \
                 they are LOST: the medium has failed, or was used otherwise since",
                wanted.len()
            ));
        }
        return Ok(());
    }
    let mut missing: Vec<Held> = Vec::new();
    for (block, slot) in wanted {
        if is_to_be_committed(medium, geometry, found, origin, (block, slot))? {
            missing.push((block, slot));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    commit_left(medium, geometry, seq, found, shared, &missing)
}

/// Whether the entry of a write that was left in memory is still missing on the medium.
fn is_to_be_committed(
    medium: &Medium,
    geometry: &Geometry,
    found: &Attach,
    origin: &DiskLimits,
    (block, slot): Held,
) -> Result<bool> {
    let nonsense = |why: &str| {
        let what = format_args!(
            "the last server's memory says that slot {slot} holds block {block}, but {why}"
        );
        medium.error(Kind::Io, what)
    };
    let end = (block.saturating_add(1)).saturating_mul(u64::from(geometry.block_bytes));
    if u64::from(slot) >= geometry.blocks || end > origin.size_bytes {
        return Err(nonsense("there is no such slot or block"));
    }
    let word = found.index.word(slot);
    match word.state() {
        State::Free => Ok(true),
        // The commit was done, but its end not noted.
        State::Live if word.block() == block => Ok(false),
        // Its own entry, of the commit that was under way; or it was superseded.
        State::Marking => match found.uncommitted.binary_search(&slot) {
            Ok(_) => Ok(true),
            Err(_) => Err(nonsense("that is an older version")),
        },
        _ => Err(nonsense("the medium says otherwise")),
    }
}

/// A commit as any other: entries and marks, then the counter. Who died while the counter was on
/// its way may have left one that is read and not durable yet, and an older version must not be
/// marked free before the one that the counter commits is safe: the label of this attach has
/// settled all that was found.
fn commit_left(
    medium: &Medium,
    geometry: &Geometry,
    seq: &mut u64,
    found: &mut Attach,
    shared: &SharedWords,
    missing: &[Held],
) -> Result<()> {
    let entry = |block: u64| Entry::new(block * geometry.block_sectors(), *seq);
    let entries: BTreeMap<u32, Entry> =
        missing.iter().map(|(block, slot)| (*slot, entry(*block))).collect();
    let freed = std::mem::take(&mut found.stale);
    let at = |slot: u32| geometry.entry_at(u64::from(slot));
    let (mark, fresh) = (FREE.to_le_bytes(), Entry::FRESH);
    // Its other half stays: a torn mark would be a live entry for a block that is none.
    let mark_of = |slot: u32| match mutants::is(Mutant::MarkTorn) {
        true => (at(slot), fresh.as_bytes()),
        false => (at(slot) + ENTRY_SEQ_AT, &mark[..]),
    };
    let marked = freed.iter().filter(|slot| !entries.contains_key(*slot));
    let mut changes: Vec<(u64, &[u8])> = marked.map(|slot| mark_of(*slot)).collect();
    changes.extend(entries.iter().map(|(slot, entry)| (at(*slot), entry.as_bytes())));
    changes.sort_unstable_by_key(|change| change.0);
    medium.store_each(&changes)?;
    medium.settle()?;
    found_seq(shared, *seq);
    *seq += 1;
    announce_seq(shared, *seq);
    medium.store(geometry.start + SEQ_COUNT_AT, &seq.to_le_bytes())?;
    medium.settle()?;
    freed.into_iter().for_each(|slot| found.index.retire(slot));
    let mut part = Part::of(&found.index, 0, 1);
    missing.iter().for_each(|&(block, slot)| part.live(block, u64::from(slot)));
    found.stale.extend(part.stale);
    found.notes.push(format!("writes to {} blocks were taken up from memory", missing.len()));
    Ok(())
}

fn free_slots(index: &Index) -> Pool {
    let pool = Pool::new(index.slots());
    let is_free = |slot: &u32| index.word(*slot).state() == State::Free;
    let mut free = Vec::with_capacity(SLOTS_MAX);
    for first in (0..index.slots()).step_by(SLOTS_MAX) {
        let end = first.saturating_add(SLOTS_MAX as u32).min(index.slots());
        free.clear();
        free.extend((first..end).filter(is_free));
        pool.put_all(&free);
    }
    pool
}

#[expect(clippy::too_many_arguments, reason = "the parts of a cache, put together once")]
fn assemble(
    args: TableArgs,
    origin: Arc<dyn Disk>,
    medium: Medium,
    geometry: Geometry,
    label: Label,
    seq: u64,
    found: Attach,
    census: &Census,
    open: OpenLists,
) -> Writecache {
    let index = found.index;
    let stripes = index.stripes();
    let (high, low) = args.watermarks();
    let mark = |percent: u32| (geometry.blocks * u64::from(100 - percent) + 50) / 100;
    let events = Arc::default();
    Writecache {
        overwrites: overwrite::is_wanted(&args, &medium, &geometry),
        label,
        pool: free_slots(&index),
        open,
        filling: (0..stripes).map(|_| AtomicU32::new(0)).collect(),
        has_fresh: (0..stripes * 2).map(|_| AtomicBool::new(false)).collect(),
        promised: (0..stripes).map(|_| AtomicU32::new(0)).collect(),
        batch: AtomicU64::new(seq),
        commit: Mutex::new(Commit { seq, ..Commit::default() }),
        filled: Filled::default(),
        marks_count: AtomicUsize::new(found.stale.len()),
        superseded_count: AtomicUsize::new(0),
        marks: Mutex::new(Marks::of(found.stale)),
        begun: AtomicU64::new(0),
        ended: AtomicU64::new(0),
        marked_by: AtomicU64::new(0),
        damage: damage_in_words(census),
        aside: found.aside,
        bypassed: AtomicU64::new(u64::from(found.owes_flush)),
        bypasses_flushed: AtomicU64::new(0),
        is_flushing_origin: AtomicBool::new(false),
        is_origin_flush_refused: AtomicBool::new(false),
        origin_flush_failures: AtomicU64::new(0),
        jobs: Jobs::default(),
        zeroing: Mutex::default(),
        // What was written back before this attach, nobody knows.
        is_torn: AtomicBool::new(index.dirty() > 0),
        background: Mutex::default(),
        stats: (0..stripes).map(|_| Stats::default()).collect(),
        counters: Counters::default(),
        room: Room::new(&events, geometry.blocks * u64::from(geometry.block_bytes)),
        alarm: Alarm::new(&events),
        events,
        watermarks: (mark(high), mark(low)),
        epoch: AtomicU64::new(0),
        is_cleaner: AtomicBool::new(args.options.cleaner),
        is_draining: AtomicBool::new(false),
        is_flushing: AtomicBool::new(false),
        flushes_on_suspend: AtomicBool::new(args.options.cleaner),
        is_suspended: AtomicBool::new(false),
        wants_list: AtomicBool::new(false),
        wants_batch_end: AtomicBool::new(false),
        wants_round: AtomicBool::new(false),
        is_commit_asked: AtomicBool::new(false),
        has_failed: AtomicBool::new(false),
        notes: found.notes,
        args,
        medium,
        origin,
        geometry,
        index,
    }
}

fn damage_in_words(census: &Census) -> Vec<String> {
    census.places.iter().map(ToString::to_string).collect()
}
