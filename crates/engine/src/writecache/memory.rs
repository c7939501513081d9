//! The shared memory of an attach, which outlives its server: found again, or made.
//!
//! The label says "served" from before the first acknowledged write until all blocks are committed,
//! and names the memory. pcache's memory.rs describes the order in which an attach and an orderly
//! end change label and memory, and the reason why a death or a power failure between any two steps
//! loses no write. The differences here:
//!
//! 1. The label has only one copy: it is in one sector, and over memory each of its words of eight
//!    bytes is changed separately. An attach stores its number first, durably, then the mark that
//!    says "served" with its check, which is valid for either state of the mark. An orderly end
//!    removes the mark. So no crash leaves an invalid label, or a mark with another attach's
//!    number. (A crash while the label gets another origin may damage the label: then an attach
//!    refuses.)
//! 2. Every commit of mode `s` that writes the first metadata unit also writes the label with its
//!    value in memory.
//! 3. The medium is recognised by the commit counter, announced before it is stored and confirmed
//!    after it, and by fingerprints of the newest blocks.

use std::collections::{BTreeMap, BTreeSet};

use zerocopy::{FromZeros, IntoBytes};

use crate::base::fingerprint::fingerprint_of;
use crate::disk::Stamp;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::shm::{Served, SharedStore, SharedWords, Taken, recall};
use crate::units::{MIB, SECTOR};

use super::OpenOptions;
use super::args::TableArgs;
use super::device::CacheDevice;
use super::index::{Index, State};
use super::label::Place;
use super::layout::{Geometry, LABEL_AT, Label, SUPERBLOCK_BYTES};
use super::media::Medium;
use super::openlist::{
    self, LIST_MAX, LeftBehind, OpenLists, announce_attach, look_in_entry, words_needed,
};
use crate::recovery::IN_HOLE;

/// Blocks whose places are computed together.
const REWRITTEN_TOGETHER: usize = 4096;

/// The memory of an attach that is under way.
#[derive(Debug)]
pub struct Memory {
    taken: Taken,
    /// The last server died in this boot, and its memory, which would tell of a failed flush, is
    /// not found.
    pub is_in_doubt: bool,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The server that has a cache, or had it and died, according to its label.
pub fn served(
    medium: &Medium,
    geometry: &Geometry,
    label: &Label,
    shared_store: &SharedStore,
) -> Option<Served> {
    let id = label.attach_id();
    (label.is_served() && !label.is_served_alone()).then(|| Served {
        id,
        is_of_this_boot: label.is_of_boot(shared_store.boot()),
        place: place_of(medium, geometry, label, shared_store),
    })
}

fn place_of(
    medium: &Medium,
    geometry: &Geometry,
    label: &Label,
    shared_store: &SharedStore,
) -> String {
    let id = label.attach_id();
    if let Some(directory) = place_at(medium, geometry).and_then(|at| {
        let mut place = Place::new_zeroed();
        medium.load(at, place.as_mut_bytes()).ok()?;
        place.directory(id)
    }) {
        return shared_store.path_in(&directory, id);
    }
    let here = shared_store.place();
    if label.is_of_place(&here) {
        return shared_store.path_in(&here, id);
    }
    format!("{} (the medium lacks space to record the directory)", shared_store.path_in("", id))
}

fn place_at(medium: &Medium, geometry: &Geometry) -> Option<u64> {
    let raw = medium.size_bytes().saturating_sub(geometry.start);
    geometry.place_at(raw, u64::from(medium.unit_bytes()).max(SECTOR))
}

/// The memory that belongs to the medium, if the label names one. If it is missing, this refuses,
/// unless the loss is accepted.
pub fn its_memory(
    medium: &Medium,
    geometry: &Geometry,
    label: &Label,
    shared_store: &SharedStore,
    accepts_loss: bool,
    notes: &mut Vec<String>,
) -> Result<Option<SharedWords>> {
    if label.is_damaged() && !accepts_loss {
        let what = format_args!(
            "the label is damaged (byte {}), so its origin is unknown, and acknowledged writes may \
             be in shared memory; to continue without them, add `lost_memory accept` to the table",
            geometry.start + LABEL_AT
        );
        return Err(medium.error(Kind::Io, what));
    }
    let id = label.attach_id();
    let is_its = |words: &SharedWords, bug| Ok(openlist::is_of(words, id)? || mutants::is(bug));
    if label.is_valid() && !label.is_served() {
        // A server before this version named the memory by the medium's path, and did not record it
        // in the label.
        let old = shared_store.find_old()?;
        return match old
            .as_ref()
            .map(|words| is_its(words, Mutant::OldHeldOfAnybody))
            .transpose()?
        {
            Some(true) => Ok(old),
            _ => Ok(None),
        };
    }
    let served = served(medium, geometry, label, shared_store);
    let name = format!("writecache: {}", medium.name());
    let is_its = |words: &SharedWords| is_its(words, Mutant::HeldOfAnybody);
    recall(shared_store, served.as_ref(), accepts_loss, &name, is_its, notes)
}

/// Memory of the medium that is to be formatted by force: refused if it holds writes.
pub fn unseen(
    medium: &Medium,
    start: u64,
    shared_store: &SharedStore,
    args: &TableArgs,
) -> Result<Option<SharedWords>> {
    if medium.size_bytes() < start.saturating_add(SUPERBLOCK_BYTES) {
        return Ok(None);
    }
    let superblock = medium.superblock(start)?;
    let raw = medium.size_bytes() - start;
    let Ok(geometry) = Geometry::of_superblock(&superblock, start, raw, None) else {
        return Ok(None);
    };
    let label = &superblock.label;
    let mut notes = Vec::new();
    let found = its_memory(medium, &geometry, label, shared_store, args.accepts_loss, &mut notes)?;
    let left = found.as_ref().map(OpenLists::left_behind).transpose()?.flatten();
    let blocks = left.map_or(0, |left| left.held.len());
    if blocks > 0 && !args.accepts_loss {
        let what = format_args!(
            "its last server died, and acknowledged writes to {blocks} blocks are recorded only in \
             shared memory in {}: open the cache without formatting it, or add `lost_memory \
             accept` to the table",
            shared_store.place()
        );
        return Err(medium.error(Kind::Refused, what));
    }
    Ok(found)
}

impl Memory {
    /// The memory of the last server, if it died, or new memory. `is_to_go`: the memory of that
    /// server turned out to belong to another medium.
    pub fn of(
        medium: &Medium,
        geometry: &Geometry,
        label: &Label,
        shared_store: SharedStore,
        args: &TableArgs,
        options: &OpenOptions,
        is_to_go: bool,
    ) -> Result<Memory> {
        let mut notes = Vec::new();
        let found = match is_to_go {
            true => None,
            false => {
                its_memory(medium, geometry, label, &shared_store, args.accepts_loss, &mut notes)?
            }
        };
        let was_served = label.is_served() && label.is_of_boot(shared_store.boot());
        let is_in_doubt = found.is_none() && (was_served || label.is_damaged());
        let needed = [LIST_MAX, 1].map(|list_max| words_needed(options.stripes, list_max));
        let attaches = (options.attach_id & Label::ATTACH_MAX, label.attach_id());
        let name = format!("writecache: {}", medium.name());
        let taken = Taken::of(shared_store, found, needed.into(), attaches, &name)?;
        Ok(Memory { taken, is_in_doubt, notes })
    }

    /// The memory itself.
    pub fn words(&self) -> SharedWords {
        self.taken.words().clone()
    }

    /// The writes that a dead server left in it.
    pub fn left(&self) -> Result<Option<LeftBehind>> {
        if self.taken.is_new() { Ok(None) } else { OpenLists::left_behind(self.taken.words()) }
    }

    /// The label names the memory from here on, durably, so it is kept in any case.
    pub fn name(
        &mut self,
        medium: &Medium,
        geometry: &Geometry,
        label: Label,
        stripes: usize,
        seq: u64,
    ) -> Result<Label> {
        let attach_id = self.taken.attach_id();
        if self.taken.is_new() {
            let _ = OpenLists::begin(self.words(), stripes, attach_id, seq);
        }
        self.taken.name(announce_attach)?;
        let shared_store = self.taken.shared_store();
        let directory = shared_store.place();
        let is_said = shared_store.survives() && !mutants::is(Mutant::ServedUnsaid);
        let label = match is_said {
            true => label.served(shared_store.boot(), &directory),
            false if mutants::is(Mutant::ServedUnsaid) => label,
            false => label.served_alone(shared_store.boot()),
        };
        if mutants::is(Mutant::WritecacheUnlabelled) {
            return Ok(label);
        }
        if let Some(at) = place_at(medium, geometry).filter(|_| is_said) {
            medium.store(at, Place::new(attach_id, &directory).as_bytes())?;
        }
        store_label(medium, geometry, &label)?;
        Ok(label)
    }
}

/// First the number of the attach, then the rest. On a medium without a label, only `check` and
/// `magic` come second: the other bytes alone do not count as a damaged label. This also makes all
/// found data durable: writes of a dead server may be readable, and not durable yet, and the attach
/// is about to rely on them.
fn store_label(medium: &Medium, geometry: &Geometry, label: &Label) -> Result<()> {
    let at = geometry.start + LABEL_AT;
    let is_labelled = medium.superblock(geometry.start)?.label.is_valid();
    let middle = if is_labelled { Label::ATTACH_AT } else { Label::ORIGIN_AT };
    let (rest, first) = label.as_bytes().split_at(middle);
    let is_unsettled = mutants::is(Mutant::FoundUnsettled) && matches!(medium, Medium::Disk(_));
    let settle = || if is_unsettled { Ok(()) } else { medium.settle() };
    medium.store(at + middle as u64, first)?;
    settle()?;
    medium.store(at, rest)?;
    settle()
}

/// Records in the label that the cache no longer has a server.
pub(super) fn say_at_rest(device: &CacheDevice) -> Result<()> {
    let CacheDevice { medium, geometry, label, .. } = device;
    forget_stamp(medium, geometry, label)
}

/// Stores the label of a cache at rest, without a stamp. This comes before the attach number
/// changes, so that no crash leaves a label whose attach number reads as a stamp.
pub(super) fn forget_stamp(medium: &Medium, geometry: &Geometry, label: &Label) -> Result<()> {
    let label = label.at_rest();
    let (rest, _) = label.as_bytes().split_at(Label::ATTACH_AT);
    medium.store(geometry.start + LABEL_AT, rest)?;
    medium.settle()
}

/// Stores the origin's stamp in the label of a cache at rest, whose commit counter is `seq`: first
/// in the field of the attach, which no longer has a meaning.
pub(super) fn store_stamp(device: &CacheDevice, stamp: Stamp, seq: u64) -> Result<()> {
    let CacheDevice { medium, geometry, label, .. } = device;
    store_label(medium, geometry, &label.stamped(stamp, seq))
}

/// An error about a medium that is older than the memory.
pub fn rolled_back(medium: &Medium, what: &str) -> Error {
    let what = format_args!(
        "{what}; use the newest copy, or add `lost_memory accept` to the table to continue without \
         the acknowledged writes"
    );
    medium.error(Kind::Refused, what)
}

/// The difference between memory and medium: the medium has an older commit counter, or lacks the
/// data of an entry in memory.
pub fn difference(
    medium: &Medium,
    geometry: &Geometry,
    seq: u64,
    left: &LeftBehind,
) -> Option<String> {
    if left.has_failed {
        return None;
    }
    let is_older = "this is an older copy of the medium of the last server, which died with writes \
        to";
    let blocks = left.held.len();
    let last = left.seqs[0].min(left.seqs[1]);
    if seq < last {
        return Some(format!(
            "its commit counter is {seq}, but the last server's shared memory says {last}: \
             {is_older} {blocks} blocks in memory"
        ));
    }
    if !left.seqs.contains(&seq) {
        return None;
    }
    let block_bytes = u64::from(geometry.block_bytes);
    let is_gone =
        |(_, slot): &&(u64, u32)| medium.was_hole(geometry.block_at(u64::from(*slot)), block_bytes);
    if let Some((block, slot)) = left.held.iter().find(is_gone) {
        return Some(format!(
            "the data of block {block} of the origin, which the last server's shared memory says \
             is in slot {slot}, {IN_HOLE}; or {is_older} {blocks} blocks in memory"
        ));
    }
    let newest: BTreeMap<u64, u32> = left.held.iter().copied().collect();
    let mut looks: BTreeMap<u32, (u64, u32)> = BTreeMap::new();
    for &((block, slot), look) in &left.looks {
        if newest.get(&block).is_none_or(|held| *held == slot) {
            looks.insert(slot, (block, look));
        }
    }
    looks.retain(|slot, (_, look)| {
        *look != 0 && u64::from(*slot) < geometry.blocks && !left.overwriting.contains(slot)
    });
    let mut data = vec![0; geometry.block_bytes as usize];
    // Unreadable data is damage, which shows when it is used.
    let wrong = looks.into_iter().find(|(slot, (_, look))| {
        medium.load(geometry.block_at(u64::from(*slot)), &mut data).is_ok()
            && look_in_entry(fingerprint_of(&data)) != *look
    });
    wrong.map(|(slot, (block, _))| {
        format!(
            "the data of block {block} of the origin, which the last server's shared memory says \
             is in slot {slot}, is missing: {is_older} {blocks} blocks in memory"
        )
    })
}

/// The last server may have seen a flush of the cache device fail. All that can be read now, and is
/// to be relied on, is written again: the entries, and the data of blocks.
pub fn rewrite_all(
    medium: &Medium,
    geometry: &Geometry,
    index: &Index,
    notes: &mut Vec<String>,
) -> Result<()> {
    if mutants::is(Mutant::LostMemoryTrusted) {
        return Ok(());
    }
    rewrite(medium, geometry)?;
    let has_data = |slot: &u32| !matches!(index.word(*slot).state(), State::Free | State::Marking);
    let slots: Vec<u32> = (0..index.slots()).filter(has_data).collect();
    let mut unreadable = 0;
    for slots in slots.chunks(REWRITTEN_TOGETHER) {
        let places: Vec<u64> =
            slots.iter().map(|slot| geometry.block_at(u64::from(*slot))).collect();
        unreadable += medium.rewrite_each(&places, geometry.block_bytes as usize)?;
    }
    if unreadable > 0 {
        notes.push(format!("{unreadable} blocks cannot be read, and were not stored again"));
    }
    medium.settle()
}

/// The last server saw the cache device fail. The entries that can be read now may never become
/// durable, even by a flush, unless they are written again.
pub fn rewrite(medium: &Medium, geometry: &Geometry) -> Result<()> {
    let (mut at, end) = (geometry.start, geometry.start + geometry.table_bytes());
    while at < end {
        let mut bytes = vec![0; MIB.min(end - at) as usize];
        medium.load(at, &mut bytes)?;
        medium.store(at, &bytes)?;
        at += bytes.len() as u64;
    }
    medium.settle()
}

/// The same for blocks that were being overwritten, or were overwritten and not flushed: a failure
/// may not have been reported. This keeps the version that can be read now.
pub fn rewrite_blocks(
    medium: &Medium,
    geometry: &Geometry,
    slots: &[u32],
    notes: &mut Vec<String>,
) -> Result<()> {
    let slots: BTreeSet<u64> = slots.iter().map(|slot| u64::from(*slot)).collect();
    if mutants::is(Mutant::OverwrittenUnsettled) || slots.is_empty() {
        return Ok(());
    }
    let places: Vec<u64> =
        slots.range(..geometry.blocks).map(|slot| geometry.block_at(*slot)).collect();
    let unreadable = medium.rewrite_each(&places, geometry.block_bytes as usize)?;
    if unreadable > 0 {
        let what = format!("{unreadable} blocks that were being overwritten cannot be read");
        notes.push(what);
    }
    medium.settle()
}
