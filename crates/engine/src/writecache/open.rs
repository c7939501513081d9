//! Opening a cache: checks, the findings of an attach (`attach`), and the assembly of the running
//! target.
//!
//! The medium is changed only to format it, to finish the commit of a server that died, and to name
//! this attach on the label. Entries that must be marked free wait for the first commit, and must
//! be marked before its counter makes them live.

use crate::bio::Op;
use crate::common::room::Room;
use crate::disk::{Disk, DiskIo, DiskLimits, Recorded, Refused, Same};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;
use crate::recovery::CUT_ADVICE;
use crate::shm::{SharedStore, SharedWords};
use crate::sync::Arc;
use crate::units::{SECTOR, human_bytes, human_pair};

use super::args::{Mode, TableArgs};
use super::attach::{Found, look, take_up};
use super::background::Background;
use super::commit::Commits;
use super::control::Orders;
use super::counts::Counts;
use super::device::CacheDevice;
use super::format::prepare;
use super::index::{Index, State};
use super::inspect::load_geometry;
use super::layout::{Geometry, Label, SEQ_COUNT_AT, Superblock};
use super::lists::Lists;
use super::marks::Marks;
use super::media::Medium;
use super::memory::{self, Memory, difference, forget_stamp, rewrite_all, rolled_back};
use super::openlist::{LeftBehind, OpenLists, begin_flush, note_failure};
use super::origin::Origin;
use super::plan::Plan;
use super::pool::{Pool, SLOTS_MAX};
use super::rounds::Rounds;
use super::walk::{Census, Damage};
use super::{Jobs, ORIGIN_BYTES_MAX, OpenOptions, Writecache};

/// A commit counter beyond this cannot have been reached by counting.
const SEQ_MAX: u64 = 1 << 62;

impl Writecache {
    /// Opens the cache that `args` describes over persistent memory, formatting it if it is empty.
    pub fn open_pmem(
        args: TableArgs,
        len_bytes: u64,
        origin: Arc<dyn Disk>,
        cache: Arc<dyn Pmem>,
        memory: impl Into<SharedStore>,
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
        memory: impl Into<SharedStore>,
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
    shared_store: &SharedStore,
    options: &OpenOptions,
) -> Result<Writecache> {
    let limits = origin.limits().clone();
    check_devices(&args, len_bytes, &limits, &medium)?;
    let start = args.options.start_sector.unwrap_or(0) * SECTOR;
    let unseen = match options.force_format {
        true => memory::unseen(&medium, start, shared_store, &args)?,
        false => None,
    };
    if prepare(&medium, start, args.block_bytes, options.force_format, &origin)? {
        options.progress.note_format();
    }
    unseen.iter().for_each(SharedWords::remove);
    drop(unseen);
    let opening = Opening { args, origin, medium, shared_store, options };
    let cache = match opening.attach(None)? {
        Attached::Open(cache) => *cache,
        Attached::OtherMemory(note) => match opening.attach(Some(note))? {
            Attached::Open(cache) => *cache,
            Attached::OtherMemory(_) => unreachable!("new memory has one owner"),
        },
    };
    // All stored data is known to exist, so holes may be filled now.
    cache.device.medium.reserve()?;
    Ok(cache)
}

/// A cache that is being opened.
struct Opening<'a> {
    args: TableArgs,
    origin: Arc<dyn Disk>,
    medium: Medium,
    shared_store: &'a SharedStore,
    options: &'a OpenOptions,
}

/// The result of an opening.
enum Attached {
    Open(Box<Writecache>),
    /// The memory belongs to another medium, and the user accepts the loss, which a note describes.
    OtherMemory(String),
}

impl Opening<'_> {
    /// Reads the cache, and attaches. `forgotten`: ignore the existing memory, with the reason.
    fn attach(&self, forgotten: Option<String>) -> Result<Attached> {
        let Opening { args, medium, options, .. } = self;
        let limits = self.origin.limits();
        let start = args.options.start_sector.unwrap_or(0) * SECTOR;
        let (superblock, geometry) = load_geometry(medium, start, Some(args.block_bytes))?;
        medium.expect_data(start);
        let mut seq = superblock.seq_count.get();
        if seq > SEQ_MAX {
            let at = start + SEQ_COUNT_AT;
            let what = format_args!("commit counter {seq} at byte {at}: it is implausibly large");
            return Err(medium.error(Kind::Invalid, what));
        }
        let (label, shared_store) = (&superblock.label, self.shared_store.clone());
        let is_to_go = forgotten.is_some();
        let mut memory =
            Memory::of(medium, &geometry, label, shared_store, args, options, is_to_go)?;
        let left = memory.left()?;
        let owes_flush =
            left.is_some() && !mutants::is(Mutant::OwedFlushForgotten) && !is_flushed(&self.origin);
        let index = Index::new(
            geometry.blocks as u32,
            geometry.block_bytes,
            options.stripes,
            limits.size_bytes,
        );
        let mut found = Found::new(index, memory.notes.iter().cloned().chain(forgotten).collect());
        if mutants::is(Mutant::CounterBackwards) {
            seq = seq.saturating_sub(1);
        }
        let census = look(medium, &geometry, seq, limits.size_bytes, &mut found, options)?;
        check_binding(
            args,
            medium,
            &superblock,
            dirty_blocks(&census, left.as_ref()),
            &self.origin,
        )?;
        if let Some(place) = census.places.iter().find(|place| place.damage == Damage::Hole) {
            return Err(medium.error(Kind::Io, format_args!("{place}: {CUT_ADVICE}")));
        }
        if let Some(what) = left.as_ref().and_then(|left| difference(medium, &geometry, seq, left))
        {
            return match args.accepts_loss {
                true => Ok(Attached::OtherMemory(format!("{what}: they are LOST"))),
                false => Err(rolled_back(medium, &what)),
            };
        }
        let of_medium = (&superblock, &geometry);
        let label = self.take_over(&mut memory, of_medium, &mut seq, &mut found, left)?;
        let shared = memory.words();
        let lists = OpenLists::begin(shared, options.stripes, label.attach_id(), seq);
        memory.words().keep_last_name();
        let plan = Plan::new(args.clone(), medium, &geometry);
        // It is unknown what was written back before this attach.
        let is_torn = found.index.dirty() > 0;
        let origin = Origin::new(Arc::clone(&self.origin), owes_flush, is_torn);
        let Found { index, aside, stale, notes, .. } = found;
        let damage = census.places.iter().map(ToString::to_string).collect();
        let device = CacheDevice::new(medium.clone(), geometry, label, aside, damage, notes);
        let cache = assemble(plan, device, origin, index, stale, lists, seq);
        Ok(Attached::Open(Box::new(cache)))
    }

    /// Names this attach on the label, and commits the writes that the last server left.
    fn take_over(
        &self,
        memory: &mut Memory,
        (superblock, geometry): (&Superblock, &Geometry),
        seq: &mut u64,
        found: &mut Found,
        left: Option<LeftBehind>,
    ) -> Result<Label> {
        let Opening { medium, options, .. } = self;
        let limits = self.origin.limits();
        if memory.is_in_doubt {
            rewrite_all(medium, geometry, &found.index, &mut found.notes)?;
        }
        let label = Label::new(limits.identity.words(), limits.size_bytes, options.attach_id);
        let shared = memory.words();
        if superblock.label.has_stamp() {
            forget_stamp(medium, geometry, &superblock.label)?;
        }
        begin_flush(&shared);
        let named = memory.name(medium, geometry, label, options.stripes, *seq);
        // Data that cannot be made durable now may never be: the next server must not rely on it.
        let taken_up = named.and_then(|label| {
            if let Some(left) = left {
                take_up(medium, geometry, seq, found, &shared, left, limits)?;
            }
            medium.settle().map(|()| label)
        });
        taken_up.inspect_err(|_| note_failure(&shared))
    }
}

/// A server that died may have owed the origin a flush, for writes that bypassed the cache. If the
/// origin refuses, the next flush of a client tries again.
fn is_flushed(origin: &Arc<dyn Disk>) -> bool {
    let flush = DiskIo::bare(origin, Op::Flush, 0, 0, 0);
    origin.carry_out(vec![flush]).iter().all(|io| io.result.is_ok())
}

/// Checks that need no reading of the cache device.
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

/// The number of blocks in the cache that its origin lacks, including blocks that only memory
/// records.
pub(super) fn dirty_blocks(census: &Census, left: Option<&LeftBehind>) -> u64 {
    census.live + census.damaged + left.map_or(0, |left| left.held.len() as u64)
}

/// Dirty blocks are only written to the origin that they belong to, and only if no other program
/// changed it since. Blocks that were written back are not in the cache any more, so there is no
/// clean data to be dropped.
pub(super) fn check_binding(
    args: &TableArgs,
    medium: &Medium,
    superblock: &Superblock,
    dirty: u64,
    origin: &Arc<dyn Disk>,
) -> Result<()> {
    const REMEDY: &str = "add `rebind true` to the table";
    let (label, limits) = (&superblock.label, origin.limits());
    if !label.is_valid() || dirty == 0 || args.rebinds {
        return Ok(());
    }
    let bytes = label.origin_sectors().saturating_mul(SECTOR);
    let recorded = Recorded {
        identity: label.compare(&limits.identity, limits.size_bytes),
        stamp: label.stamp(superblock.seq_count.get()),
        bytes,
    };
    let dirty = human_bytes(dirty.saturating_mul(args.block_bytes.into()));
    let refused = Refused {
        cache: medium.name(),
        disk: limits,
        role: "origin",
        known: "",
        known_bytes: Some(bytes),
        dirty: &dirty,
        remedy: REMEDY,
    };
    let refusal = Same::of(origin, &recorded).refusal(&refused);
    let error = |what| Error::new(Kind::Refused, format!("writecache: {what}"));
    refusal.map_or(Ok(()), |what| Err(error(what)))
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

/// Puts the parts of a cache together. `stale`: slots whose entries must be marked free.
fn assemble(
    plan: Plan,
    device: CacheDevice,
    origin: Origin,
    index: Index,
    stale: Vec<u32>,
    lists: OpenLists,
    seq: u64,
) -> Writecache {
    let events = Arc::default();
    let throttle = plan.throttle(&device);
    Writecache {
        pool: free_slots(&index),
        lists: Lists::new(lists, index.stripes(), seq, &events),
        rounds: Rounds::default(),
        commits: Commits::new(seq),
        marks: Marks::new(stale),
        jobs: Jobs::new(&events),
        background: Background::new(&events, throttle),
        orders: Orders::new(plan.args.options.cleaner),
        room: Room::new(&events),
        counts: Counts::new(index.stripes()),
        events,
        plan,
        device,
        origin,
        index,
    }
}
