//! Opening a cache: checks, the changes that the medium needs before it is served, and the assembly
//! of the running target.
//!
//! 1. A blank metadata device is formatted, if no other content is recognised on it.
//! 2. Data that a dead server left is made durable before it is trusted: the server may have died
//!    between a superblock and its flush.
//! 3. After an unclean shutdown the medium is corrected: all blocks become dirty, durably, and from
//!    then on the medium marks its dirty bits as right.
//! 4. If the origin was changed since the orderly end of the last server, clean blocks are dropped
//!    (`origin`).
//! 5. Dirty data of a cache device that failed a flush in this boot is written to it again, and its
//!    clean blocks are dropped (`doubt`).
//! 6. Discards of an earlier server are dropped: they would not be true after the next write.

use crate::base::attaching::AttachProgress;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::common::contents::NOT_BY_FORCE;
use crate::disk::{Disk, DiskIo, Extent};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::probe;
use crate::sync::{Arc, Mutex};
use crate::units::{SECTOR, human_bytes, human_pair};

use super::args::{Mode, PolicyName, TableArgs};
use super::background::Background;
use super::binding;
use super::binding::Devices;
use super::blocks::Blocks;
use super::commit::Commits;
use super::control::Orders;
use super::counts::Counts;
use super::data_device::DataDevice;
use super::doubt::write_again;
use super::metadata::bits::Bits;
use super::metadata::block::{Block, BlockKind};
use super::metadata::format::format_in_doubt;
use super::metadata::source::{Source, read_each, read_one};
use super::metadata::superblock::{CLEAN_SHUTDOWN, Superblock};
use super::metadata::transaction::erase_superblock;
use super::metadata::{BLOCK_BYTES, Change, Contents, Doubt, Writer, load};
use super::origin;
use super::plan::Plan;
use super::policy::{Policy, Probation, Rules, Shape, Smq, Uses};
use super::slots::Slots;
use super::{Cache, Jobs, SLOTS_MAX};

/// Options for opening a cache that are not in the table line.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Format the metadata device although it, or the cache device, may hold other data; also over
    /// a clean cache.
    pub force_format: bool,
    /// Hears of a format.
    pub progress: Arc<AttachProgress>,
}

fn error(kind: Kind, what: impl std::fmt::Display) -> Error {
    Error::new(kind, format!("cache: {what}"))
}

impl Cache {
    /// Opens the cache that `args` describes, formatting its metadata device if that is blank.
    pub fn open(
        args: TableArgs,
        len_bytes: u64,
        devices: Devices,
        options: OpenOptions,
    ) -> Result<Cache> {
        let slots = check_devices(&args, len_bytes, &devices)?;
        let has_discard = devices.origin.limits().has_discard;
        let plan = Plan::new(args, len_bytes, has_discard);
        prepare(&plan.args, &devices, &options)?;
        if !mutants::is(Mutant::LeftUnsettled) {
            settle(&devices.metadata)?;
        }
        let loaded = load(&devices.metadata).map_err(|error| error.at(NO_METADATA))?;
        check_superblock(&plan.args, &devices.metadata, &loaded.superblock)?;
        let mut writer = Writer::new(&loaded).map_err(|error| error.at(NO_METADATA))?;
        let mut superblock = loaded.superblock;
        let same = origin::same(&devices, &superblock);
        let is_marked = bind(&plan.args, &devices, &mut superblock, loaded.contents.mapped())?;
        let was_untrusted = superblock.is_untrusted;
        let was_clean = superblock.is_clean() && !was_untrusted;
        let is_believed = was_clean || mutants::is(Mutant::UncleanBelieved);
        let mut contents = match is_believed && !was_untrusted {
            true => loaded.contents,
            false => loaded.contents.opened(&superblock),
        };
        let has_hints = was_clean && are_hints_ours(&superblock, plan.args.policy);
        let fits = fit(&plan, &mut contents, slots)?;
        let fits = fits || mutants::is(Mutant::FitUncommitted);
        // Not earlier: until here the device may have been read for other contents.
        devices.cache.expect_data(0);
        let is_as_before = forget_holes(&plan, &mut contents, &*devices.cache) && fits;
        if !plan.args.rebinds {
            let remedy = "add `rebind true` to the table";
            origin::check(same, &devices, &superblock, &contents, remedy)?;
        }
        let doubt = superblock.doubt;
        let has_changed = !same.has_its_data();
        let has_dropped = (has_changed || doubt.cache) && origin::drop_clean(&mut contents);
        let mut notes: Vec<String> = (has_dropped && has_changed)
            .then(|| same.dropped(&devices.origin.limits().name))
            .into_iter()
            .collect();
        let dirty = contents.dirty.ones();
        let passes = plan.args.features.mode == Mode::Passthrough;
        if passes && dirty > 0 && !mutants::is(Mutant::PassedByDirty) {
            let what = format!(
                "passthrough mode needs a cache without dirty blocks, and {dirty} are dirty: \
                 `udm recover` writes them back"
            );
            return Err(error(Kind::Refused, what));
        }
        let has_discards = superblock.fields.discard_blocks.get() > 0;
        let is_untrusted = plan.args.features.mode != Mode::Writeback && contents.dirty.ones() == 0;
        superblock.is_untrusted = is_untrusted;
        if doubt.cache && !mutants::is(Mutant::LostKeptAsIs) {
            notes.push(renew(&contents, &devices, plan.block_bytes, &options.progress)?);
            superblock.doubt.cache = false;
        }
        // From here on the origin changes.
        let had_note = superblock.note.take().is_some();
        if !was_clean || !is_as_before || has_discards || has_dropped {
            make_true(&mut writer, &superblock, &mut contents, &devices.metadata)?;
        } else if !is_marked || had_note || is_untrusted || superblock.doubt != doubt {
            commit(&mut writer, &Change::of_superblock(superblock), &devices.metadata)?;
        }
        Ok(Cache { notes, ..assemble(plan, devices, writer, contents, has_hints) })
    }
}

/// Writes the dirty data of a cache device that failed a flush to the device again. Returns a note
/// for the user.
fn renew(
    contents: &Contents,
    devices: &Devices,
    block_bytes: u64,
    progress: &AttachProgress,
) -> Result<String> {
    let bytes = write_again(contents, devices, block_bytes, progress)?;
    let written = match bytes {
        0 => String::new(),
        _ => format!("its {} of dirty data were written to it again, and ", human_bytes(bytes)),
    };
    let name = &devices.cache.limits().name;
    Ok(format!(
        "cache device {name} failed a flush since the machine started: {written}its clean blocks \
         were dropped"
    ))
}

/// Checks `args` against the devices, but not properties that change while another cache serves
/// them. Does not write.
pub(super) fn check(args: &TableArgs, len_bytes: u64, devices: &Devices) -> Result<()> {
    check_devices(args, len_bytes, devices)?;
    let block = read_one(&devices.metadata, 0);
    let block = block.map_err(|finding| Error::from(finding).at(NO_METADATA))?;
    match Superblock::parse(&block).map_err(|error| error.at(NO_METADATA))? {
        Some(superblock) => check_superblock(args, &devices.metadata, &superblock),
        None => Ok(()),
    }
}

pub(super) const NO_METADATA: &str = "cache: Error creating metadata object";

/// Checks that need no reading. How many slots there are.
fn check_devices(args: &TableArgs, len_bytes: u64, devices: &Devices) -> Result<u64> {
    let block_bytes = u64::from(args.block_sectors) * SECTOR;
    let slots = devices.cache.limits().size_bytes / block_bytes;
    if slots == 0 {
        let (block, size) = human_pair(block_bytes, devices.cache.limits().size_bytes);
        let what = format!(
            "Data block size is larger than the cache device: {block}, and {} has {size}",
            devices.cache.limits().name
        );
        return Err(error(Kind::Invalid, what));
    }
    if slots > SLOTS_MAX {
        let what = format!("a cache has at most {SLOTS_MAX} blocks, this one would have {slots}");
        return Err(error(Kind::Invalid, what));
    }
    let origin = devices.origin.limits();
    if len_bytes > origin.size_bytes {
        let (len, size) = human_pair(len_bytes, origin.size_bytes);
        let what = format!("the table is {len} long, but origin {} has {size}", origin.name);
        return Err(error(Kind::Invalid, what));
    }
    Ok(slots)
}

/// Makes sure that there is metadata.
fn prepare(args: &TableArgs, devices: &Devices, options: &OpenOptions) -> Result<()> {
    let disk = &devices.metadata;
    let block = read_one(disk, 0).map_err(|finding| Error::from(finding).at(NO_METADATA))?;
    let parsed = Superblock::parse(&block);
    let is_foreign = parsed.is_err() && !Superblock::unchecked(&block).has_magic();
    let mut has_old = false;
    match parsed {
        Ok(Some(_)) if options.force_format => {
            refuse_dirty(disk)?;
            has_old = true;
        }
        Ok(Some(_)) => return Ok(()),
        Ok(None) => {}
        Err(error) if !is_foreign && options.force_format => return Err(damaged(disk, &error)),
        // Damaged metadata must not be overwritten.
        Err(error) if !is_foreign => return Err(error.at(NO_METADATA)),
        Err(_) => {}
    }
    let version = if args.features.has_metadata2 { 2 } else { 1 };
    // A new cache over devices that failed a flush has the mark of the old one.
    let doubt = match is_foreign || mutants::is(Mutant::DoubtFormatted) {
        true => Doubt::default(),
        false => Superblock::unchecked(&block).doubt,
    };
    let mut formatted = format_in_doubt(disk.blocks(), args.block_sectors, version, doubt)
        .map_err(|error| error.at(NO_METADATA))?;
    if !options.force_format {
        let looked = [disk, &devices.cache].map(|disk| (disk, probe::cache_disk(disk, 0)));
        if let Some((disk, found)) = looked.iter().find(|(_, found)| !found.is_empty()) {
            let (name, found) = (&disk.limits().name, probe::listed(found));
            let what = format!(
                "{name} holds {found}: a new cache would overwrite it; --force-format allows this"
            );
            return Err(error(Kind::Refused, what));
        }
        if is_foreign {
            return Err(not_empty(disk, 0));
        }
        refuse_unknown(disk, formatted.transaction.blocks())?;
        refuse_data(devices)?;
    }
    options.progress.note_format();
    if has_old {
        // No old superblock may outlive the first change of the rest.
        erase_superblock(disk)?;
    }
    formatted.transaction.carry_out(disk).map_err(|(error, _)| error.at(NO_METADATA))
}

/// Even by force, dirty blocks that only this cache has are not discarded.
fn refuse_dirty(disk: &Arc<dyn Disk>) -> Result<()> {
    let loaded = load(disk).map_err(|error| damaged(disk, &error))?;
    let superblock = &loaded.superblock;
    if superblock.needs_check() {
        let what = Error::new(Kind::Invalid, "its needs-check flag is set");
        return Err(damaged(disk, &what));
    }
    let is_clean = superblock.is_clean();
    let dirty = loaded.contents.opened(superblock).dirty.ones();
    if dirty == 0 {
        return Ok(());
    }
    let why = if is_clean { "" } else { " (it was not shut down cleanly, so all blocks count)" };
    let name = &disk.limits().name;
    let what = format!(
        "{name} has the metadata of {dirty} dirty blocks, which only the cache has{why}; \
         {NOT_BY_FORCE}"
    );
    Err(error(Kind::Refused, what))
}

/// A cache that may be dirty, because its metadata is damaged.
fn damaged(disk: &Arc<dyn Disk>, why: &Error) -> Error {
    let name = &disk.limits().name;
    let what = format!(
        "{name} has the metadata of a cache that may have dirty blocks, and is damaged: {why}; \
         `udm cache repair` repairs it; {NOT_BY_FORCE}"
    );
    error(Kind::Refused, what)
}

/// An error if a format would overwrite unknown data. Known are the blocks of a format that was cut
/// off, and metadata whose superblock was erased, as the kernel's documents advise.
fn refuse_unknown(disk: &Arc<dyn Disk>, blocks: &[(u64, Buffer)]) -> Result<()> {
    let addresses: Vec<u64> = blocks.iter().map(|(address, _)| *address).collect();
    let mut unknown = None;
    read_each(disk, &addresses, |nth, read| {
        let (address, written) = &blocks[nth];
        // The data of an unreadable block is lost already.
        let Ok(block) = read else { return };
        let sectors = block.chunks(SECTOR as usize).zip(written.as_slice().chunks(SECTOR as usize));
        let is_cut_off = sectors
            .into_iter()
            .all(|(found, new)| found == new || found.iter().all(|byte| *byte == 0));
        let is_metadata = BlockKind::ALL.iter().any(|kind| kind.check(&block, *address).is_ok());
        if !is_cut_off && !is_metadata && unknown.is_none() {
            unknown = Some(*address);
        }
    });
    unknown.map_or(Ok(()), |address| Err(not_empty(disk, address * BLOCK_BYTES as u64)))
}

/// An error if there is data where the format does not write, which blocks would overwrite.
/// Metadata whose superblock was erased is known.
fn refuse_data(devices: &Devices) -> Result<()> {
    let is_metadata = |address: u64, block: &[u8]| {
        let block: Option<&Block> = block.try_into().ok();
        let is_of = |kind: &BlockKind, block| kind.check(block, address).is_ok();
        block.is_some_and(|block| BlockKind::ALL.iter().any(|kind| is_of(kind, block)))
    };
    let data = probe::data_on_disk(&devices.metadata, 0, &is_metadata)
        .map(|at| (&devices.metadata, at))
        .or_else(|| Some((&devices.cache, probe::data_on_disk(&devices.cache, 0, &|_, _| false)?)));
    let Some((disk, at)) = data else { return Ok(()) };
    let what = format!("{}: {}", disk.limits().name, probe::data_found(at));
    Err(error(Kind::Refused, what))
}

fn not_empty(disk: &Arc<dyn Disk>, at: u64) -> Error {
    let what = format!(
        "{} is not empty where a format would write (byte {at}), and is not cache metadata: it may \
         hold data; --force-format overwrites it",
        disk.limits().name
    );
    error(Kind::Refused, what)
}

/// Makes the metadata durable in its present state. After a failed flush a device may return a
/// superblock that it does not have durably, and a good flush does not write it then, so it is
/// written again. The blocks that it refers to were durable before.
pub(super) fn settle(metadata: &Arc<dyn Disk>) -> Result<()> {
    let block = read_one(metadata, 0).map_err(|finding| Error::from(finding).at(NO_METADATA))?;
    let again = Buffer::from_bytes(block.as_slice());
    let ios = [
        ("write", DiskIo::new(metadata, Op::Write, 0, again, 0)),
        ("flush", DiskIo::bare(metadata, Op::Flush, 0, 0, 0)),
    ];
    for (what, io) in ios {
        let done = metadata.carry_out(vec![io]);
        done.iter().try_for_each(|io| io.result).map_err(|status| {
            let name = &metadata.limits().name;
            Error::new(Kind::Io, format!("{name}: a {what} failed: {status}")).at(NO_METADATA)
        })?;
    }
    Ok(())
}

/// Whether the metadata is of blocks of this table's size.
pub(super) fn check_block_size(
    args: &TableArgs,
    metadata: &Arc<dyn Disk>,
    superblock: &Superblock,
) -> Result<()> {
    let (found, wanted) = (superblock.fields.data_sectors.get(), args.block_sectors);
    if found == wanted {
        return Ok(());
    }
    let name = &metadata.limits().name;
    let what = format!("{name} belongs to a cache with blocks of {found} sectors, not {wanted}");
    Err(Error::new(Kind::Invalid, what).at(NO_METADATA))
}

/// Whether the metadata is for this table, and may be written to.
fn check_superblock(
    args: &TableArgs,
    metadata: &Arc<dyn Disk>,
    superblock: &Superblock,
) -> Result<()> {
    check_block_size(args, metadata, superblock)?;
    let name = &metadata.limits().name;
    if superblock.needs_check() {
        let what = format!(
            "Unable to get write access to metadata, please check/repair metadata: {name} has the \
             needs-check flag, run `udm cache check --clear-needs-check-flag {name}`"
        );
        return Err(error(Kind::Invalid, what));
    }
    Ok(())
}

/// Records in the metadata which devices belong to it; an error if it names others. Returns whether
/// it did.
fn bind(
    args: &TableArgs,
    devices: &Devices,
    superblock: &mut Superblock,
    mapped: u64,
) -> Result<bool> {
    if !args.rebinds && mapped > 0 {
        let remedy = "add `rebind true` to the table";
        binding::check(devices, superblock, remedy).map_err(|error| error.at("cache"))?;
    }
    Ok(binding::put_mark(devices, superblock))
}

/// Whether the hints on the medium are of this policy.
fn are_hints_ours(superblock: &Superblock, policy: PolicyName) -> bool {
    let fields = &superblock.fields;
    (superblock.policy() == policy.word() || mutants::is(Mutant::ForeignHints))
        && fields.policy_version[0].get() == if policy == PolicyName::Probation { 1 } else { 2 }
        && fields.hint_bytes.get() == 4
}

/// Adapts the contents to a cache of this many slots and to this origin. Returns whether they
/// fitted already.
fn fit(plan: &Plan, contents: &mut Contents, slots: u64) -> Result<bool> {
    let before = contents.slots();
    let cut_off = contents.dirty.iter().find(|slot| *slot >= slots);
    if let Some(slot) = cut_off.filter(|_| !mutants::is(Mutant::ShrunkOverDirty)) {
        let what = format!(
            "the cache device has {slots} blocks now, and block {slot} of the cache is dirty: \
             write it back first"
        );
        return Err(error(Kind::Invalid, what));
    }
    if before != slots {
        contents.mappings.resize(slots as usize, 0);
        contents.dirty.resize(slots);
        contents.hints.iter_mut().for_each(|hints| hints.resize(slots as usize, 0));
    }
    let beyond: Vec<(u64, u64)> =
        contents.in_use().filter(|(_, block)| *block >= plan.origin_blocks).collect();
    for &(slot, block) in &beyond {
        if contents.dirty.is_set(slot) {
            let what = format!(
                "block {block} of the origin is dirty, and beyond the end of the table, which has \
                 {} blocks",
                plan.origin_blocks
            );
            return Err(error(Kind::Invalid, what));
        }
        contents.mappings[slot as usize] = 0;
    }
    Ok(before == slots && beyond.is_empty())
}

/// Drops clean slots that take no space on the cache device: the file may have been cut and
/// extended again, and the origin has the same data in any case. Returns whether there were none.
fn forget_holes(plan: &Plan, contents: &mut Contents, cache: &dyn Disk) -> bool {
    let size = cache.limits().size_bytes;
    let mut known = (0, Extent::Data);
    let mut lost = Vec::new();
    for (slot, _) in contents.in_use().filter(|(slot, _)| !contents.dirty.is_set(*slot)) {
        let (at, end) = (slot * plan.block_bytes, (slot + 1) * plan.block_bytes);
        if known.0 <= at {
            let (len, extent) = cache.extent(at, size - at);
            known = (at + len, extent);
        }
        if known.1 == Extent::Zeroes && known.0 >= end {
            lost.push(slot);
        }
    }
    lost.iter().for_each(|slot| contents.mappings[*slot as usize] = 0);
    lost.is_empty()
}

/// Corrects the state on the medium, durably.
fn make_true(
    writer: &mut Writer,
    superblock: &Superblock,
    contents: &mut Contents,
    metadata: &Arc<dyn Disk>,
) -> Result<()> {
    let mut superblock = superblock.clone();
    superblock.put_flag(CLEAN_SHUTDOWN, true);
    if mutants::is(Mutant::CleanSaidEarly) {
        commit(writer, &Change::of_superblock(superblock.clone()), metadata)?;
    }
    superblock.fields.discard_sectors.set(0);
    contents.discards = Bits::default();
    if contents.hints.is_none() {
        superblock.fields.hint_bytes.set(0);
    }
    commit(writer, &Change::whole(superblock, contents), metadata)
}

fn commit(writer: &mut Writer, change: &Change<'_>, metadata: &Arc<dyn Disk>) -> Result<()> {
    let mut transaction = writer.prepare(change).map_err(|error| error.at(NO_METADATA))?;
    transaction.carry_out(metadata).map_err(|(error, _)| error.at(NO_METADATA))?;
    writer.committed(transaction);
    Ok(())
}

/// Puts the parts of a cache together.
fn assemble(
    plan: Plan,
    devices: Devices,
    writer: Writer,
    mut contents: Contents,
    has_hints: bool,
) -> Cache {
    let slots = contents.slots() as u32;
    let uses = Arc::new(Uses::new(slots));
    let shape =
        Shape { slots, block_bytes: plan.block_bytes as u32, origin_blocks: plan.origin_blocks };
    let mut policy: Box<dyn Policy> = match plan.args.policy {
        PolicyName::Probation => Box::new(Probation::new(&shape, uses.clone())),
        _ => Box::new(Smq::new(&shape, Rules::MENDED, uses.clone())),
    };
    let hints = contents.hints.take().filter(|_| has_hints);
    for (slot, _) in contents.in_use() {
        let hint = hints.as_ref().map(|hints| hints[slot as usize]);
        policy.load(slot as u32, hint, contents.dirty.is_set(slot));
    }
    let version = writer.superblock().version();
    let admits = plan.args.policy != PolicyName::Cleaner;
    let slots = Slots::new(contents, plan.origin_blocks, plan.args.block_sectors);
    let mut blocks = Blocks::new(slots, version, policy, uses, plan.args.features.mode, admits);
    let fields = &writer.superblock().fields;
    blocks.may_copy = plan.args.migration_threshold > 0;
    blocks.trouble.is_untrusted = writer.superblock().is_untrusted;
    blocks.trouble.told = writer.superblock().doubt;
    blocks.trouble.inherited = blocks.trouble.told.origin.into();
    blocks.trouble.doubts = blocks.trouble.inherited;
    blocks.stats.read_hits = fields.read_hits.get().into();
    blocks.stats.read_misses = fields.read_misses.get().into();
    blocks.stats.write_hits = fields.write_hits.get().into();
    blocks.stats.write_misses = fields.write_misses.get().into();
    let events = Arc::default();
    let commits = Commits::new(&*devices.metadata, writer);
    Cache {
        orders: Orders::new(plan.args.migration_threshold),
        plan,
        metadata: devices.metadata,
        cache: DataDevice::new(devices.cache),
        origin: DataDevice::new(devices.origin),
        blocks: Mutex::new(blocks),
        commits,
        jobs: Jobs::default(),
        background: Background::new(&events),
        events,
        counts: Counts::default(),
        notes: Vec::new(),
    }
}
