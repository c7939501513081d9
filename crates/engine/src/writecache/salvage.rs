//! What a cache that must not be changed has for its origin, by reading alone. Of a device that was
//! cut short the end is missing:
//!
//! 1. The entries stand in front, the data after them. If only data is missing, the entries say
//!    exactly what is lost.
//! 2. If entries are missing, it is unknown which blocks have newer data, even for blocks that
//!    other entries name. That is refused, unless the user says `lost_entries accept`.
//! 3. Writes that a dead server had acknowledged and not committed are in memory, and are found
//!    there as an attach finds them. The memory stays as it is.
//!
//! The format is the same in both modes, and reading needs neither: the device is mapped.

use std::collections::{BTreeMap, HashSet};

use crate::attaching::AttachProgress;
use crate::disk::DiskLimits;
use crate::error::{Kind, Result};
use crate::pmem::Pmem;
use crate::pmem::rest::Rest;
use crate::rescue::{Cut, Salvage};
use crate::shm::Keeper;
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

/// How much is missing of the writecache that begins at byte `start` of `pmem`, if there is one and
/// it was cut short; and the size of its blocks.
pub fn cut_of(pmem: &Arc<dyn Pmem>, start: u64) -> Option<(Cut, u32)> {
    let medium = Medium::Pmem(Arc::clone(pmem));
    let has_room = start.checked_add(SUPERBLOCK_BYTES)? <= pmem.left_bytes();
    let superblock = has_room.then(|| medium.superblock(start).ok())??;
    let geometry = Geometry::of_superblock(&superblock, start, u64::MAX, None).ok()?;
    let end = start.checked_add(geometry.data_end())?;
    Cut::of(pmem.left_bytes(), end).map(|cut| (cut, geometry.block_bytes))
}

/// What the cache on `pmem` has for the origin that `limits` describes.
pub fn salvage(
    args: &TableArgs,
    pmem: Arc<dyn Pmem>,
    keeper: &Keeper,
    limits: &DiskLimits,
) -> Result<Salvage> {
    let start = args.options.start_sector.unwrap_or(0) * SECTOR;
    let cut = cut_of(&pmem, start).map(|(cut, _)| cut);
    let pmem = Rest::of(pmem, cut.map_or(0, |cut| cut.wanted_bytes));
    let medium = Medium::Pmem(Arc::clone(&pmem));
    let (superblock, geometry) = load_geometry(&medium, start, Some(args.block_bytes))?;
    let mut notes: Vec<String> = cut.iter().map(ToString::to_string).collect();
    let loss = args.accepts_loss;
    let memory = its_memory(&medium, &geometry, &superblock.label, keeper, loss, &mut notes)?;
    let mut out = Salvage::new(pmem);
    out.notes = notes;
    let seq = superblock.seq_count.get();
    let mut salvor = Salvor { args, medium, geometry, seq, limits, out };
    let census = salvor.entries(cut)?;
    let left = memory.as_ref().map(OpenLists::left_behind).transpose()?.flatten();
    let dirty = dirty_blocks(&census, left.as_ref());
    check_binding(args, &salvor.medium, &superblock, dirty, limits)?;
    if let Some(left) = left {
        salvor.memory(&left)?;
    }
    Ok(salvor.out)
}

struct Salvor<'a> {
    args: &'a TableArgs,
    medium: Medium,
    geometry: Geometry,
    seq: u64,
    limits: &'a DiskLimits,
    out: Salvage,
}

impl Salvor<'_> {
    /// What the entries say.
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
        let twins: HashSet<u64> = found.twins.into_iter().collect();
        for (block, slot) in found.blocks {
            match twins.contains(&block) {
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
            "{cut}; {} of its {} entries are gone: which blocks have newer data, nobody knows",
            geometry.blocks - there.blocks,
            geometry.blocks
        );
        if !self.args.accepts_lost_entries {
            return Err(self.medium.error(
                Kind::Io,
                format_args!(
                    "{what}; `lost_entries accept` in the table goes on without them, and what \
                     they had newer data for then reads as it was before"
                ),
            ));
        }
        self.out.has_more = true;
        self.out.notes.push(format!(
            "{what}; where they had newer data, OLDER DATA IS READ, and it cannot be told where"
        ));
        Ok(census)
    }

    fn range(&self, block: u64) -> (u64, u64) {
        let len = u64::from(self.geometry.block_bytes);
        let at = block * len;
        (at, len.min(self.limits.size_bytes.saturating_sub(at)))
    }

    fn put(&mut self, block: u64, slot: u64) {
        let (at, len) = self.range(block);
        self.out.put(at, len, self.geometry.block_at(slot), None);
    }

    fn lose(&mut self, block: u64) {
        let (at, len) = self.range(block);
        self.out.lose(at, len);
    }

    /// What a dead server left in memory.
    fn memory(&mut self, left: &LeftBehind) -> Result<()> {
        if let Some(what) = difference(&self.medium, &self.geometry, self.seq, left) {
            if !self.args.accepts_loss {
                return Err(rolled_back(&self.medium, &what));
            }
            self.out.has_more = true;
            self.out.notes.push(format!("{what}: they are LOST here"));
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
                    "the last server's memory says that slot {slot} holds block {block}, but \
                     there is no such slot or block"
                );
                return Err(self.medium.error(Kind::Io, what));
            }
            let is_committed = self.out.is_at(self.range(block).0, self.geometry.block_at(slot));
            match is_ours && !left.has_failed {
                true => self.put(block, slot),
                false if is_committed => {}
                // Their data may be what it was before; but the origin's is older for certain.
                false => {
                    self.lose(block);
                    lost += 1;
                }
            }
        }
        if lost > 0 {
            self.out.notes.push(format!(
                "the last server had acknowledged, but not committed, writes to {lost} blocks, and \
                 they are LOST: the medium has failed, or was used otherwise since"
            ));
        }
        Ok(())
    }
}
