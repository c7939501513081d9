//! The memory of an attach, which outlives its server: found again, or made.
//!
//! The label says "served" from before the first write that a client hears of until everything is
//! committed, and names the memory. The order in which an attach and an orderly end change the two,
//! and why a death or a power cut between any two steps loses nothing, is that of pcache's
//! memory.rs; what differs:
//!
//! 1. The label has no second copy: it stands in one sector, and over memory each of its words of
//!    eight bytes is changed by itself. An attach stores its number first, durably, then the mark
//!    that says "served" with its check, which is valid for either state of the mark. An orderly
//!    end removes the mark. So no crash leaves an invalid label, or a mark with another attach's
//!    number.
//! 2. Every commit of mode `s` that writes the first metadata unit writes the label with it, as it
//!    is in memory.
//! 3. The medium is recognised by the commit counter, announced before it is stored and confirmed
//!    after it, and by samples of the newest blocks.

use std::collections::{BTreeMap, BTreeSet};

use zerocopy::{FromZeros, IntoBytes};

use crate::error::{Error, Kind, Result};
use crate::look::look_of;
use crate::mutants::{self, Mutant};
use crate::shm::{Keeper, Served, SharedWords, Taken, recall};
use crate::units::{MIB, SECTOR};

use super::OpenOptions;
use super::args::TableArgs;
use super::device::CacheDevice;
use super::label::Place;
use super::layout::{Geometry, LABEL_AT, Label, SUPERBLOCK_BYTES};
use super::media::Medium;
use super::openlist::{
    self, LIST_MAX, LeftBehind, OpenLists, announce_attach, look_in_entry, words_needed,
};

/// The memory of an attach that is under way.
#[derive(Debug)]
pub struct Memory {
    taken: Taken,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The server that has a cache, or had it and died, according to its label.
pub fn served(
    medium: &Medium,
    geometry: &Geometry,
    label: &Label,
    keeper: &Keeper,
) -> Option<Served> {
    let id = label.attach_id();
    label.is_served().then(|| Served {
        id,
        is_of_this_boot: label.is_of_boot(keeper.boot()),
        place: place_of(medium, geometry, label, keeper),
    })
}

fn place_of(medium: &Medium, geometry: &Geometry, label: &Label, keeper: &Keeper) -> String {
    let id = label.attach_id();
    if let Some(directory) = place_at(medium, geometry).and_then(|at| {
        let mut place = Place::new_zeroed();
        medium.load(at, place.as_mut_bytes()).ok()?;
        place.directory(id)
    }) {
        return keeper.path_in(&directory, id);
    }
    let here = keeper.place();
    if label.is_of_place(&here) {
        return keeper.path_in(&here, id);
    }
    format!("{} (the medium has no room to say in which directory)", keeper.path_in("", id))
}

fn place_at(medium: &Medium, geometry: &Geometry) -> Option<u64> {
    let raw = medium.size_bytes().saturating_sub(geometry.start);
    geometry.place_at(raw, u64::from(medium.unit_bytes()).max(SECTOR))
}

/// The memory that belongs to the medium, if there should be any. If it is missing, this refuses,
/// unless the loss is accepted.
pub fn its_memory(
    medium: &Medium,
    geometry: &Geometry,
    label: &Label,
    keeper: &Keeper,
    accepts_loss: bool,
    notes: &mut Vec<String>,
) -> Result<Option<SharedWords>> {
    let id = label.attach_id();
    let is_its = |words: &SharedWords, bug| Ok(openlist::is_of(words, id)? || mutants::is(bug));
    if label.is_valid() && !label.is_served() {
        // A server before this version named it by the medium's path, and the label says nothing.
        let old = keeper.find_old()?;
        return match old
            .as_ref()
            .map(|words| is_its(words, Mutant::OldHeldOfAnybody))
            .transpose()?
        {
            Some(true) => Ok(old),
            _ => Ok(None),
        };
    }
    let served = served(medium, geometry, label, keeper);
    let name = format!("writecache: {}", medium.name());
    let is_its = |words: &SharedWords| is_its(words, Mutant::HeldOfAnybody);
    recall(keeper, served.as_ref(), accepts_loss, &name, is_its, notes)
}

/// Memory of the medium that is to be formatted by force: refused if it holds writes.
pub fn unseen(
    medium: &Medium,
    start: u64,
    keeper: &Keeper,
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
    let found = its_memory(medium, &geometry, label, keeper, args.accepts_loss, &mut notes)?;
    let left = found.as_ref().map(OpenLists::left_behind).transpose()?.flatten();
    let blocks = left.map_or(0, |left| left.held.len());
    if blocks > 0 && !args.accepts_loss {
        let what = format_args!(
            "its last server died, and writes to {blocks} blocks that it had acknowledged are \
             known in memory in {} alone: attach it as it is, or add `lost_memory accept` to the \
             table",
            keeper.place()
        );
        return Err(medium.error(Kind::Refused, what));
    }
    Ok(found)
}

impl Memory {
    /// The memory of the last server, if it died, or new memory. `is_to_go`: what that server left
    /// was found not to be this medium's.
    pub fn of(
        medium: &Medium,
        geometry: &Geometry,
        label: &Label,
        keeper: Keeper,
        args: &TableArgs,
        options: &OpenOptions,
        is_to_go: bool,
    ) -> Result<Memory> {
        let mut notes = Vec::new();
        let found = match is_to_go {
            true => None,
            false => its_memory(medium, geometry, label, &keeper, args.accepts_loss, &mut notes)?,
        };
        let needed = [LIST_MAX, 1].map(|list_max| words_needed(options.stripes, list_max));
        let attaches = (options.attach_id & Label::ATTACH_MAX, label.attach_id());
        let name = format!("writecache: {}", medium.name());
        let taken = Taken::of(keeper, found, needed.into(), attaches, &name)?;
        Ok(Memory { taken, notes })
    }

    /// The memory itself.
    pub fn words(&self) -> SharedWords {
        self.taken.words().clone()
    }

    /// What a dead server left in it.
    pub fn left(&self) -> Result<Option<LeftBehind>> {
        if self.taken.is_new() { Ok(None) } else { OpenLists::left_behind(self.taken.words()) }
    }

    /// The label names it from here on, durably, and it stays in any case.
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
        let keeper = self.taken.keeper();
        let directory = keeper.place();
        let is_said = keeper.survives() && !mutants::is(Mutant::ServedUnsaid);
        let label = match is_said {
            true => label.served(keeper.boot(), &directory),
            false => label,
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

/// First the number of the attach, then the rest. Also makes durable all that was found: writes of
/// a dead server may be readable, and not durable yet, and the attach is about to rely on them.
fn store_label(medium: &Medium, geometry: &Geometry, label: &Label) -> Result<()> {
    let at = geometry.start + LABEL_AT;
    let (rest, attach) = label.as_bytes().split_at(Label::ATTACH_AT);
    let is_unsettled = mutants::is(Mutant::FoundUnsettled) && matches!(medium, Medium::Disk(_));
    let settle = || if is_unsettled { Ok(()) } else { medium.settle() };
    medium.store(at + Label::ATTACH_AT as u64, attach)?;
    settle()?;
    medium.store(at, rest)?;
    settle()
}

/// Stores in the label that the cache has no server any more.
pub(super) fn say_at_rest(device: &CacheDevice) -> Result<()> {
    let CacheDevice { medium, geometry, label, .. } = device;
    let label = label.at_rest();
    let (rest, _) = label.as_bytes().split_at(Label::ATTACH_AT);
    medium.store(geometry.start + LABEL_AT, rest)?;
    medium.settle()
}

/// An error about a medium that is older than the memory.
pub fn rolled_back(medium: &Medium, what: &str) -> Error {
    let what = format_args!(
        "{what}; attach the newest one, or add `lost_memory accept` to the table to go on without \
         what it had acknowledged"
    );
    medium.error(Kind::Refused, what)
}

/// Where memory and medium do not match: the commit counter is an older one, or data that an entry
/// in memory names is not there.
pub fn difference(
    medium: &Medium,
    geometry: &Geometry,
    seq: u64,
    left: &LeftBehind,
) -> Option<String> {
    if left.has_failed {
        return None;
    }
    let is_older = "this is an older copy of what the last server had, which died with writes to";
    let blocks = left.held.len();
    let last = left.seqs[0].min(left.seqs[1]);
    if seq < last {
        return Some(format!(
            "its commit counter is {seq}, but the last server's memory says {last}: {is_older} \
             {blocks} blocks in memory"
        ));
    }
    if !left.seqs.contains(&seq) {
        return None;
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
            && look_in_entry(look_of(&data)) != *look
    });
    wrong.map(|(slot, (block, _))| {
        format!(
            "the data of block {block} of the origin, which the last server's memory says is in \
             slot {slot}, is not there: {is_older} {blocks} blocks in memory"
        )
    })
}

/// The last server saw the cache device fail. The entries that can be read now may never become
/// durable, whatever is flushed, unless they are written again.
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

/// The same of blocks that were being overwritten, or were and not flushed: a failure may not have
/// been reported. The version that can be read now stays.
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
