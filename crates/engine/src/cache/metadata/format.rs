//! A new metadata device, byte for byte as the kernel formats a blank one.

use super::array::Place;
use super::bits::Bits;
use super::block::{BLOCK_BYTES, Block, BlockKind};
use super::btree::{self, NodeAt};
use super::contents::Contents;
use super::counts::{BLOCKS_MAX, Counts, IndexEntry, PER_BITMAP, build_bitmap, build_index};
use super::doubt::Doubt;
use super::source::read_one;
use super::superblock::{Superblock, VERSION_MAX, check_data_sectors};
use super::survey::Places;
use super::transaction::{Transaction, erase_superblock};
use super::writer::{Change, Writer};
use crate::buffer::Buffer;
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::Arc;

/// The index is after the superblock.
const INDEX_AT: u64 = 1;
const OVERFLOW_AT: u64 = 2;
const BITMAPS_AT: u64 = 3;

/// A format that is to be carried out.
#[derive(Debug)]
pub struct Formatted {
    /// What to write; it needs no `committed`.
    pub transaction: Transaction,
    /// Goes on from there.
    pub writer: Writer,
}

/// Formats a device of `device_blocks` blocks for a cache with blocks of `data_sectors` sectors,
/// without slots.
pub fn format(device_blocks: u64, data_sectors: u32, version: u32) -> Result<Formatted> {
    format_in_doubt(device_blocks, data_sectors, version, Doubt::default())
}

/// The same if devices failed a flush under an earlier cache.
pub fn format_in_doubt(
    device_blocks: u64,
    data_sectors: u32,
    version: u32,
    doubt: Doubt,
) -> Result<Formatted> {
    check_data_sectors(data_sectors)?;
    if !(1..=VERSION_MAX).contains(&version) {
        let message = format!("unknown metadata version {version}: use 1 or 2");
        return Err(Error::new(Kind::Invalid, message));
    }
    let managed = device_blocks.min(BLOCKS_MAX);
    let bitmaps = managed.div_ceil(PER_BITMAP);
    let trees = BITMAPS_AT + bitmaps;
    let used = trees + 1 + u64::from(version);
    if managed < used {
        let message = format!("{device_blocks} metadata blocks are too few: a format needs {used}");
        return Err(Error::new(Kind::NoSpace, message));
    }
    let mut blocks = Vec::new();
    let mut put = |kind: BlockKind, address: u64, mut block: Block| {
        kind.seal(&mut block, address);
        blocks.push((address, Buffer::from_bytes(&block)));
    };
    let mut counts = Counts {
        managed,
        allocated: used,
        index: INDEX_AT,
        overflow: vec![OVERFLOW_AT],
        used: Bits::new(managed),
        ..Counts::default()
    };
    (0..used).for_each(|block| counts.used.set(block));
    for nth in 0..bitmaps {
        let (first, end) = counts.range(nth);
        let (block, entry) = build_bitmap(end - first, |nth| counts.used.is_set(first + nth));
        counts.entries.push(IndexEntry { address: BITMAPS_AT + nth, ..entry });
        put(BlockKind::Bitmap, BITMAPS_AT + nth, block);
    }
    put(BlockKind::Index, INDEX_AT, build_index(&counts.entries));
    put(BlockKind::Node, OVERFLOW_AT, btree::build(true, 4, &[]));
    (trees..used).for_each(|address| put(BlockKind::Node, address, btree::build(true, 8, &[])));
    let empty = |address: u64| Place {
        levels: vec![vec![NodeAt { address, start: 0, len: 0 }]],
        ..Place::default()
    };
    let places = Places {
        mappings: empty(trees),
        dirty: (version == 2).then(|| empty(trees + 1)),
        hints: None,
        discards: empty(used - 1),
    };
    let mut superblock = Superblock::fresh(version, data_sectors);
    superblock.fields.map.overflow.set(OVERFLOW_AT);
    superblock.doubt = doubt;
    let mut writer = Writer::with(superblock.clone(), places, counts, device_blocks);
    // The superblock of a transaction without changes.
    let mut transaction = writer.prepare(&Change::of_superblock(superblock))?;
    writer.superblock = transaction.after_superblock().clone();
    transaction.put_blocks(blocks);
    Ok(Formatted { transaction, writer })
}

/// Writes metadata with all of `contents` to `disk`, over any earlier content. The superblock
/// provides all fields but roots and lengths. Until all of it is durable, the device is blank. A
/// mark of devices that failed a flush stays.
pub fn write_whole(
    disk: &Arc<dyn Disk>,
    mut superblock: Superblock,
    contents: &Contents,
) -> Result<()> {
    superblock.check_writable()?;
    if let Ok(block) = read_one(disk, 0)
        && !mutants::is(Mutant::DoubtFormatted)
    {
        let Doubt { cache, origin } = Superblock::unchecked(&block).doubt;
        superblock.doubt.cache |= cache;
        superblock.doubt.origin |= origin;
    }
    let blocks = disk.limits().size_bytes / BLOCK_BYTES as u64;
    let (data_sectors, version) = (superblock.fields.data_sectors.get(), superblock.version());
    let Formatted { mut transaction, writer } = format(blocks, data_sectors, version)?;
    let mut filling = writer.prepare(&Change::whole(superblock, contents))?;
    erase_superblock(disk)?;
    transaction.carry_out_blocks(disk)?;
    filling.carry_out(disk).map_err(|(error, _)| error)
}
