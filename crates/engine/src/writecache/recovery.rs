//! Read-only recovery of a cache that must not be changed: its dirty blocks for the origin, by
//! reading alone. If a device was cut short, its end is missing:
//!
//! 1. The entries are at the front, the data follows. If only data is missing, the entries name
//!    exactly the lost blocks.
//! 2. If entries are missing, the blocks with newer data are unknown, even among blocks that other
//!    entries name. udm refuses such a cache, unless the user gives `lost_entries accept`.
//! 3. Writes that a dead server had acknowledged and not committed are in memory. They are read
//!    from there as in an attach, and the memory is not changed.
//!
//! The format is the same in both modes, and reading needs neither: the device is mapped.

use std::collections::{BTreeMap, HashSet};

use crate::base::attaching::AttachProgress;
use crate::disk::{Disk, DiskLimits};
use crate::error::{Kind, Result};
use crate::pmem::Pmem;
use crate::pmem::rest::Rest;
use crate::recovery::{Cut, Recovery};
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::units::SECTOR;

use super::args::TableArgs;
use super::inspect::load_geometry;
use super::layout::{ENTRY_BYTES, Geometry, SUPERBLOCK_BYTES};
use super::media::Medium;
use super::memory::{difference, its_memory, rolled_back};
use super::open::{check_binding, dirty_blocks};
use super::openlist::{LeftBehind, OpenLists};
use super::walk::{Census, Lookup, walk};

/// How much of the writecache that begins at byte `start` of `pmem` is missing, if there is one and
/// it was cut short; and its block size.
pub fn cut_of(pmem: &Arc<dyn Pmem>, start: u64) -> Option<(Cut, u32)> {
    let medium = Medium::Pmem(Arc::clone(pmem));
    let has_room = start.checked_add(SUPERBLOCK_BYTES)? <= pmem.left_bytes();
    let superblock = has_room.then(|| medium.superblock(start).ok())??;
    let geometry = Geometry::of_superblock(&superblock, start, u64::MAX, None).ok()?;
    let end = start.checked_add(geometry.data_end())?;
    let seq = superblock.seq_count.get();
    let left = left_bytes(&medium, &geometry, seq).unwrap_or(pmem.left_bytes());
    Cut::of(left, end).map(|cut| (cut, geometry.block_bytes))
}

/// The start of the hole with which the file ends, if the cache has data there: then the file was
/// cut and extended to its old length.
fn left_bytes(medium: &Medium, geometry: &Geometry, seq: u64) -> Option<u64> {
    let Medium::Pmem(pmem) = medium else { return None };
    let hole = pmem.hole_at_end()?;
    let table_end = geometry.start + geometry.table_bytes();
    if hole < table_end {
        return Some(hole);
    }
    let mut found = [Lookup::default()];
    walk(medium, geometry, seq, None, &mut found, &AttachProgress::default()).ok()?;
    let is_lost = |slot: &u64| geometry.block_at(*slot) + u64::from(geometry.block_bytes) > hole;
    found[0].blocks.values().any(is_lost).then_some(hole)
}

/// The dirty blocks that the cache on `pmem` has for `origin`.
pub fn recover(
    args: &TableArgs,
    pmem: Arc<dyn Pmem>,
    shared_store: &SharedStore,
    origin: &Arc<dyn Disk>,
) -> Result<Recovery> {
    let limits = origin.limits();
    let start = args.options.start_sector.unwrap_or(0) * SECTOR;
    let cut = cut_of(&pmem, start).map(|(cut, _)| cut);
    let pmem = match cut {
        Some(cut) if cut.left_bytes < pmem.left_bytes() => Rest::of_cut(pmem, cut.left_bytes),
        cut => Rest::of(pmem, cut.map_or(0, |cut| cut.wanted_bytes)),
    };
    let medium = Medium::Pmem(Arc::clone(&pmem));
    let (superblock, geometry) = load_geometry(&medium, start, Some(args.block_bytes))?;
    let mut notes: Vec<String> = cut.iter().map(ToString::to_string).collect();
    let loss = args.accepts_loss;
    let memory = its_memory(&medium, &geometry, &superblock.label, shared_store, loss, &mut notes)?;
    let mut out = Recovery::new(pmem);
    out.notes = notes;
    let seq = superblock.seq_count.get();
    let mut recoverer = Recoverer { args, medium, geometry, seq, limits, out };
    let census = recoverer.entries(cut)?;
    let left = memory.as_ref().map(OpenLists::left_behind).transpose()?.flatten();
    let dirty = dirty_blocks(&census, left.as_ref());
    check_binding(args, &recoverer.medium, &superblock, dirty, origin)?;
    if let Some(left) = left {
        recoverer.memory(&left)?;
    }
    Ok(recoverer.out)
}

struct Recoverer<'a> {
    args: &'a TableArgs,
    medium: Medium,
    geometry: Geometry,
    seq: u64,
    limits: &'a DiskLimits,
    out: Recovery,
}

impl Recoverer<'_> {
    /// Reads the entries.
    fn entries(&mut self, cut: Option<Cut>) -> Result<Census> {
        let geometry = self.geometry;
        let left = cut.map_or(u64::MAX, |cut| cut.left_bytes);
        let readable = left.saturating_sub(geometry.entry_at(0)) / ENTRY_BYTES;
        let there = Geometry { blocks: geometry.blocks.min(readable), ..geometry };
        let mut found = [Lookup::default()];
        let size = Some(self.limits.size_bytes);
        let progress = AttachProgress::default();
        let census = walk(&self.medium, &there, self.seq, size, &mut found, &progress)?;
        let [found] = found;
        let duplicates: HashSet<u64> = found.duplicates.into_iter().collect();
        for (block, slot) in found.blocks {
            match duplicates.contains(&block) {
                true => self.lose(block),
                false => self.put(block, slot),
            }
        }
        if census.damaged > 0 {
            let places = census.places.iter();
            self.out.notes.extend(places.map(|place| format!("damaged {place}")));
        }
        let (Some(cut), true) = (cut, there.blocks < geometry.blocks) else { return Ok(census) };
        let what = format!(
            "{cut}; {} of its {} entries are lost: it is unknown which blocks have newer data",
            geometry.blocks - there.blocks,
            geometry.blocks
        );
        if !self.args.accepts_lost_entries {
            return Err(self.medium.error(
                Kind::Io,
                format_args!(
                    "{what}; to continue without them, add `lost_entries accept` to the table: \
                     reads may then return older data"
                ),
            ));
        }
        self.out.has_more = true;
        self.out.notes.push(format!("{what}; READS MAY RETURN OLDER DATA, in unknown places"));
        Ok(census)
    }

    fn range(&self, block: u64) -> (u64, u64) {
        let len = u64::from(self.geometry.block_bytes);
        let at = block * len;
        (at, len.min(self.limits.size_bytes.saturating_sub(at)))
    }

    fn put(&mut self, block: u64, slot: u64) {
        let (at, len) = self.range(block);
        let place = self.geometry.block_at(slot);
        match self.medium.was_hole(place, u64::from(self.geometry.block_bytes)) {
            true => self.out.lose(at, len),
            false => self.out.put(at, len, place, None),
        }
    }

    fn lose(&mut self, block: u64) {
        let (at, len) = self.range(block);
        self.out.lose(at, len);
    }

    /// Adds the writes that a dead server left in memory.
    fn memory(&mut self, left: &LeftBehind) -> Result<()> {
        if let Some(what) = difference(&self.medium, &self.geometry, self.seq, left) {
            if !self.args.accepts_loss {
                return Err(rolled_back(&self.medium, &what));
            }
            self.out.has_more = true;
            self.out.notes.push(format!("{what}: they are LOST"));
            return Ok(());
        }
        let wanted: BTreeMap<u64, u64> =
            left.held.iter().map(|(block, slot)| (*block, u64::from(*slot))).collect();
        let is_ours = left.seqs.contains(&self.seq);
        let mut lost = 0;
        for (block, slot) in wanted {
            let is_there = slot < self.geometry.blocks
                && block.checked_mul(u64::from(self.geometry.block_bytes)).is_some()
                && self.range(block).1 > 0;
            if !is_there {
                let what = format_args!(
                    "the last server's shared memory says that slot {slot} holds block {block}, \
                     but there is no such slot or block"
                );
                return Err(self.medium.error(Kind::Io, what));
            }
            let is_committed = self.out.is_at(self.range(block).0, self.geometry.block_at(slot));
            match is_ours && !left.has_failed {
                true => self.put(block, slot),
                false if is_committed => {}
                // The data of these slots may be an older version, but the origin's data is
                // certainly older.
                false => {
                    self.lose(block);
                    lost += 1;
                }
            }
        }
        if lost > 0 {
            self.out.notes.push(format!(
                "acknowledged, uncommitted writes of the last server to {lost} blocks are LOST: \
                 the medium has failed, or another program has used it since"
            ));
        }
        Ok(())
    }
}
