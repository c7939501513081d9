//! What a served cache does, in small.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::metadata::bits::Bits;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::{Contents, Loaded, Superblock, load};
use udm::disk::{Disk, Effect, Fault};
use udm::error::Status;
use udm::target::Target;
use udm::units::SECOND;

use crate::golden::{sha256, vectors};
use crate::world::{BLOCK, SECTOR, World, disks};

const ORIGIN: u64 = 8 * BLOCK;
const TABLE: &str = "64 1 metadata2 smq 0";

fn metadata(world: &World) -> Loaded {
    let disk: Arc<dyn Disk> = world.disks[0].clone();
    load(&disk).unwrap()
}

/// I/O of a device since the history was cleared.
fn ios(world: &World, device: &str, op: Op) -> usize {
    world.history.iter().filter(|(name, did, ..)| name == device && *did == op).count()
}

/// A cache whose block 3 is in a slot, and dirty.
fn with_dirty_block(table: &str) -> World {
    let mut world = World::opened(table, 4, ORIGIN);
    world.bring(3);
    world.write(3 * BLOCK, &[7; 512]);
    assert_eq!(world.fact("dirty_bytes"), BLOCK);
    world
}

#[test]
fn a_flush_after_write_hits_costs_one_flush_of_the_cache_device_and_no_metadata() {
    let mut world = with_dirty_block(TABLE);
    world.flush();
    world.history.clear();
    for nth in 0..10 {
        world.write(3 * BLOCK + nth * SECTOR, &[nth as u8; 512]);
    }
    world.flush();
    assert_eq!(ios(&world, "cache", Op::Write), 10);
    assert_eq!(ios(&world, "cache", Op::Flush), 1);
    assert_eq!(world.history.len(), 11, "{:?}", world.history);
    // Nothing is owed, so nothing is done.
    world.flush();
    assert_eq!(world.history.len(), 11);
}

#[test]
fn the_origin_alone_is_consistent_when_nothing_is_dirty() {
    let mut world = with_dirty_block(TABLE);
    assert_eq!(world.fact("origin_is_consistent"), 0);
    world.drain();
    assert_eq!((world.fact("dirty_bytes"), world.fact("origin_is_consistent")), (0, 1));
    world.write(3 * BLOCK, &[9; 512]);
    assert_eq!(world.fact("origin_is_consistent"), 0);
}

#[test]
fn reads_come_from_where_the_block_is_and_a_request_may_span_blocks() {
    let mut world = with_dirty_block(TABLE);
    let data: Vec<u8> = (0..2 * BLOCK).map(|at| (at / 512) as u8).collect();
    world.write(2 * BLOCK + BLOCK / 2, &data);
    world.history.clear();
    assert_eq!(world.read(2 * BLOCK + BLOCK / 2, data.len()), data);
    assert_eq!((ios(&world, "cache", Op::Read), ios(&world, "origin", Op::Read)), (1, 2));
}

#[test]
fn an_orderly_stop_leaves_exact_dirty_bits_and_hints() {
    let mut world = with_dirty_block(TABLE);
    world.remove();
    let loaded = metadata(&world);
    assert!(loaded.superblock.is_clean());
    assert_eq!((loaded.superblock.policy().as_str(), loaded.contents.dirty.ones()), ("smq", 1));
    let slot = loaded.contents.dirty.iter().next().unwrap();
    assert_eq!(loaded.contents.block(slot), Some(3));
    assert!(loaded.contents.hints.is_some());
    world.open();
    assert_eq!(world.fact("dirty_bytes"), BLOCK);
    world.drain();
    world.remove();
    assert_eq!(metadata(&world).contents.dirty.ones(), 0);
    let mut bytes = [0; 512];
    world.disks[2].peek(3 * BLOCK, &mut bytes);
    assert_eq!(bytes, [7; 512]);
}

#[test]
fn after_a_kill_only_what_was_dirty_and_its_neighbours_are_dirty() {
    let mut world = with_dirty_block(TABLE);
    world.drain();
    // Marks go lazily.
    for _ in 0..4 {
        world.tick(11 * SECOND);
    }
    world.tick(2 * SECOND);
    world.kill();
    assert!(metadata(&world).superblock.is_clean());
    world.open();
    assert_eq!(world.fact("dirty_bytes"), 0);
    assert_eq!(world.read(3 * BLOCK, 512), [7; 512]);
}

#[test]
fn what_an_unclean_shutdown_left_is_dirty_and_its_discards_are_gone() {
    for version in [1, 2] {
        let mut world = World::new("64 0 smq 0", disks(4, ORIGIN));
        let mut contents = Contents::empty(4);
        contents.mappings[2] = mapping(Some(5));
        contents.discards = Bits::new(16);
        contents.discards.set(5);
        let mut superblock = Superblock::fresh(version, 64);
        superblock.fields.discard_sectors.set(32);
        let disk: Arc<dyn Disk> = world.disks[0].clone();
        write_whole(&disk, superblock, &contents).unwrap();
        world.disks[1].poke(2 * BLOCK, &[9; 512]);
        world.open();
        assert_eq!(world.fact("dirty_bytes"), BLOCK);
        let loaded = metadata(&world);
        assert!(loaded.superblock.is_clean() && loaded.contents.discards.is_empty());
        assert_eq!(loaded.contents.dirty.iter().collect::<Vec<_>>(), [2]);
        assert_eq!(world.read(5 * BLOCK, 512), [9; 512]);
    }
}

#[test]
fn a_discard_frees_whole_blocks_and_shows_zeroes() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut world = with_dirty_block(TABLE);
        let used = world.fact("cached_bytes");
        world.bare(op, 3 * BLOCK, BLOCK);
        assert!(world.fact("cached_bytes") < used && world.fact("dirty_bytes") == 0);
        assert_eq!(world.read(3 * BLOCK, BLOCK as usize), vec![0; BLOCK as usize]);
        world.kill();
        world.open();
        assert_eq!(world.read(3 * BLOCK, BLOCK as usize), vec![0; BLOCK as usize]);
    }
}

#[test]
pub fn passthrough_gives_up_what_is_written_to() {
    let mut world = with_dirty_block(TABLE);
    world.drain();
    world.remove();
    world.table = "64 1 passthrough smq 0".into();
    world.open();
    let used = world.fact("cached_bytes");
    world.write(3 * BLOCK, &[8; 512]);
    assert_eq!(world.fact("cached_bytes"), used - BLOCK);
    assert_eq!(world.read(3 * BLOCK, 512), [8; 512]);
    world.remove();
    assert!(metadata(&world).contents.in_use().all(|(_, block)| block != 3));
}

#[test]
fn passthrough_needs_a_cache_without_dirty_blocks() {
    let mut world = with_dirty_block(TABLE);
    world.remove();
    world.table = "64 1 passthrough smq 0".into();
    let text = world.try_open().unwrap_err().to_string();
    assert!(text.starts_with("cache: passthrough mode needs"), "{text}");
}

#[test]
fn ranges_of_a_message_are_checked_before_any_is_carried_out() {
    let mut world = with_dirty_block(TABLE);
    assert!(world.message("invalidate_cblocks 0").unwrap_err().to_string().contains("passthrough"));
    world.drain();
    world.remove();
    world.table = "64 1 passthrough smq 0".into();
    world.open();
    let used = world.fact("cached_bytes");
    for wrong in ["0-4 9", "0 x", "0 3-2", "0 4294967296", "0-4 -1", "1-"] {
        world.message(&format!("invalidate_cblocks {wrong}")).unwrap_err();
        assert_eq!(world.fact("cached_bytes"), used);
    }
    world.message("INVALIDATE_CBLOCKS 0-4").unwrap();
    world.tick(SECOND);
    assert_eq!((world.fact("cached_bytes"), metadata(&world).contents.mapped()), (0, 0));
    world.message("migration_threshold 77").unwrap();
    assert!(world.target().status().contains("migration_threshold 77"));
    world.message("sequential_threshold 1").unwrap_err();
}

#[test]
fn a_cache_that_grew_or_shrank_is_fitted() {
    let mut world = with_dirty_block(TABLE);
    world.remove();
    let slot = metadata(&world).contents.dirty.iter().next().unwrap();
    let image = world.disks[1].image();
    for slots in [9, slot + 1] {
        let [_, cache, _] = disks(slots, ORIGIN);
        cache.load_image(&image[..image.len().min((slots * BLOCK) as usize)]);
        world.disks[1] = cache;
        world.open();
        assert_eq!(world.read(3 * BLOCK, 512), [7; 512]);
        world.remove();
        assert_eq!(metadata(&world).contents.slots(), slots);
    }
    if slot > 0 {
        world.disks[1] = disks(slot, ORIGIN)[1].clone();
        assert!(world.try_open().unwrap_err().to_string().contains("is dirty"));
    }
}

#[test]
fn the_cleaner_writes_everything_back_and_admits_nothing() {
    let mut world = with_dirty_block(TABLE);
    world.remove();
    world.table = "64 0 cleaner 0".into();
    world.open();
    world.tick(SECOND);
    assert_eq!(world.fact("dirty_bytes"), 0);
    let used = world.fact("cached_bytes");
    (0..300).for_each(|nth| drop(world.read(nth % 8 * BLOCK, 512)));
    assert_eq!(world.fact("cached_bytes"), used);
}

#[test]
fn a_write_waits_for_its_dirty_bit_and_others_do_not_wait_for_it() {
    let mut world = World::opened(TABLE, 4, ORIGIN);
    world.bring(3);
    world.history.clear();
    world.holds = Box::new(|io| udm::disk::Disk::limits(&*io.disk).name == "meta");
    world.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[1; 512]), false, 1));
    world.settle();
    assert!(world.port.done.is_empty() && ios(&world, "cache", Op::Write) == 0);
    assert_eq!(world.read(3 * BLOCK, 512), [0; 512]);
    world.release();
    assert!(world.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()));
    assert_eq!(world.read(3 * BLOCK, 512), [1; 512]);
}

#[test]
fn the_kernels_caches_are_served_as_the_kernel_would() {
    for vector in vectors("cache-") {
        let images = ["meta", "cache", "origin"].map(|role| vector.image(role));
        let of = |nth: usize, name: &str| {
            let disk = udm::disk::SimDisk::new(images[nth].len() as u64, 512).named(name);
            disk.load_image(&images[nth]);
            Arc::new(disk)
        };
        let all = [of(0, "meta"), of(1, "cache"), of(2, "origin")];
        let mut world = World::new("", all);
        let sectors = metadata(&world).superblock.fields.data_sectors.get();
        world.table = format!("{sectors} 0 smq 0");
        world.open();
        let content = world.read(0, images[2].len());
        assert_eq!(sha256(&content), vector.text("sha256_origin_after_drain"), "{}", vector.name);
    }
}

#[test]
fn what_the_cache_device_cannot_read_the_origin_has_if_it_is_clean() {
    for table in ["64 1 metadata2 smq 0", "64 2 metadata2 writethrough smq 0"] {
        let mut world = World::opened(table, 4, 8 * BLOCK);
        world.write(2 * BLOCK, &[5; 2 * BLOCK as usize]);
        world.bring(2);
        world.bring(3);
        world.drain();
        let slot = (0..4).find(|slot| metadata_block(&mut world, *slot) == Some(2)).unwrap();
        let bad = slot * BLOCK + 1024..slot * BLOCK + 1536;
        let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Read).within(bad);
        world.disks[1].inject(fault);
        // One read over both blocks; what is asked later goes by the slot.
        assert_eq!(world.read(2 * BLOCK, 2 * BLOCK as usize), vec![5; 2 * BLOCK as usize]);
        assert_eq!(world.fact("fallbacks_total"), 1);
        assert_eq!(world.read(2 * BLOCK, 4096), vec![5; 4096]);
        assert_eq!(world.fact("fallbacks_total"), 1);
        // A write does not go to a slot of which a part cannot be read.
        world.write(2 * BLOCK, &[6; 512]);
        let found = world.read(2 * BLOCK, 2048);
        assert!(found[..512] == [6; 512] && found[512..] == [5; 1536], "{table}");
        world.tick(3 * SECOND);
        world.suspend();
        let loaded = metadata(&world).contents;
        assert!(loaded.in_use().all(|(_, block)| block != 2), "the block has left");
    }
}

#[test]
fn what_the_cache_device_cannot_read_is_an_error_if_it_is_dirty() {
    let mut world = with_dirty_block(TABLE);
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Read);
    world.disks[1].inject(fault);
    assert!(world.try_read(3 * BLOCK, 4096).is_err());
    assert_eq!(world.fact("fallbacks_total"), 0);
    assert_eq!(world.status(10), "1", "it is there, and dirty");
    world.disks[1].heal();
    world.drain();
    assert_eq!(world.status(10), "0");
}

/// The block that the medium has in a slot, after a commit.
fn metadata_block(world: &mut World, slot: u64) -> Option<u64> {
    world.tick(2 * SECOND);
    metadata(world).contents.block(slot)
}

#[test]
fn a_request_whose_later_blocks_leave_their_slots_ends() {
    for (table, op) in [("64 1 passthrough smq 0", Op::Write), ("64 0 smq 0", Op::WriteZeroes)] {
        let mut world = World::opened("64 0 smq 0", 4, 6 * BLOCK);
        world.bring(1);
        world.drain();
        world.remove();
        world.table = table.into();
        world.open();
        world.settle();
        let len = 3 * BLOCK as usize;
        // Time stands still: nothing but the request itself has anything committed.
        world.submit(match op {
            Op::Write => Bio::write(0, Buffer::from_bytes(&vec![7; len]), false, 0),
            op => Bio::bare(op, 0, len as u64, false, 0),
        });
        world.settle();
        assert!(world.port.done.pop_front().is_some_and(|done| done.status.is_ok()), "{table}");
        let expected = if op == Op::Write { 7 } else { 0 };
        assert!(world.read(0, len).iter().all(|byte| *byte == expected));
    }
}
