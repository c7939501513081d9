//! The basic behaviour of a served cache.

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

use crate::fixture::{BLOCK, Fixture, SECTOR, disks};
use crate::golden::{sha256, vectors};

const ORIGIN: u64 = 8 * BLOCK;
const TABLE: &str = "64 1 metadata2 smq 0";

fn metadata(fixture: &Fixture) -> Loaded {
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    load(&disk).unwrap()
}

/// I/O of a device since the history was cleared.
fn ios(fixture: &Fixture, device: &str, op: Op) -> usize {
    fixture.history.iter().filter(|(name, did, ..)| name == device && *did == op).count()
}

/// A cache whose block 3 is in a slot, and dirty.
fn with_dirty_block(table: &str) -> Fixture {
    let mut fixture = Fixture::opened(table, 4, ORIGIN);
    fixture.bring(3);
    fixture.write(3 * BLOCK, &[7; 512]);
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
    fixture
}

#[test]
fn a_flush_after_write_hits_costs_one_flush_of_the_cache_device_and_no_metadata() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.flush();
    fixture.history.clear();
    for nth in 0..10 {
        fixture.write(3 * BLOCK + nth * SECTOR, &[nth as u8; 512]);
    }
    fixture.flush();
    assert_eq!(ios(&fixture, "cache", Op::Write), 10);
    assert_eq!(ios(&fixture, "cache", Op::Flush), 1);
    assert_eq!(fixture.history.len(), 11, "{:?}", fixture.history);
    // All data of the cache is flushed, so no device is flushed.
    fixture.flush();
    assert_eq!(fixture.history.len(), 11);
}

#[test]
fn the_origin_alone_is_consistent_when_nothing_is_dirty() {
    let mut fixture = with_dirty_block(TABLE);
    assert_eq!(fixture.fact("origin_is_consistent"), 0);
    fixture.drain();
    assert_eq!((fixture.fact("dirty_bytes"), fixture.fact("origin_is_consistent")), (0, 1));
    fixture.write(3 * BLOCK, &[9; 512]);
    assert_eq!(fixture.fact("origin_is_consistent"), 0);
}

#[test]
fn reads_come_from_where_the_block_is_and_a_request_may_span_blocks() {
    let mut fixture = with_dirty_block(TABLE);
    let data: Vec<u8> = (0..2 * BLOCK).map(|at| (at / 512) as u8).collect();
    fixture.write(2 * BLOCK + BLOCK / 2, &data);
    fixture.history.clear();
    assert_eq!(fixture.read(2 * BLOCK + BLOCK / 2, data.len()), data);
    assert_eq!((ios(&fixture, "cache", Op::Read), ios(&fixture, "origin", Op::Read)), (1, 2));
}

#[test]
fn an_orderly_stop_leaves_exact_dirty_bits_and_hints() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.remove();
    let loaded = metadata(&fixture);
    assert!(loaded.superblock.is_clean());
    assert_eq!((loaded.superblock.policy().as_str(), loaded.contents.dirty.ones()), ("smq", 1));
    let slot = loaded.contents.dirty.iter().next().unwrap();
    assert_eq!(loaded.contents.block(slot), Some(3));
    assert!(loaded.contents.hints.is_some());
    fixture.open();
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
    fixture.drain();
    fixture.remove();
    assert_eq!(metadata(&fixture).contents.dirty.ones(), 0);
    let mut bytes = [0; 512];
    fixture.disks[2].peek(3 * BLOCK, &mut bytes);
    assert_eq!(bytes, [7; 512]);
}

#[test]
fn after_a_kill_only_what_was_dirty_and_its_neighbours_are_dirty() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.drain();
    // Marks go lazily.
    for _ in 0..4 {
        fixture.tick(11 * SECOND);
    }
    fixture.tick(2 * SECOND);
    fixture.kill();
    assert!(metadata(&fixture).superblock.is_clean());
    fixture.open();
    assert_eq!(fixture.fact("dirty_bytes"), 0);
    assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512]);
}

#[test]
fn what_an_unclean_shutdown_left_is_dirty_and_its_discards_are_gone() {
    for version in [1, 2] {
        let mut fixture = Fixture::new("64 0 smq 0", disks(4, ORIGIN));
        let mut contents = Contents::empty(4);
        contents.mappings[2] = mapping(Some(5));
        contents.discards = Bits::new(16);
        contents.discards.set(5);
        let mut superblock = Superblock::fresh(version, 64);
        superblock.fields.discard_sectors.set(32);
        let disk: Arc<dyn Disk> = fixture.disks[0].clone();
        write_whole(&disk, superblock, &contents).unwrap();
        fixture.disks[1].poke(2 * BLOCK, &[9; 512]);
        fixture.open();
        assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
        let loaded = metadata(&fixture);
        assert!(loaded.superblock.is_clean() && loaded.contents.discards.is_empty());
        assert_eq!(loaded.contents.dirty.iter().collect::<Vec<_>>(), [2]);
        assert_eq!(fixture.read(5 * BLOCK, 512), [9; 512]);
    }
}

#[test]
fn a_discard_frees_whole_blocks_and_shows_zeroes() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut fixture = with_dirty_block(TABLE);
        let used = fixture.fact("cached_bytes");
        fixture.bare(op, 3 * BLOCK, BLOCK);
        assert!(fixture.fact("cached_bytes") < used && fixture.fact("dirty_bytes") == 0);
        assert_eq!(fixture.read(3 * BLOCK, BLOCK as usize), vec![0; BLOCK as usize]);
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.read(3 * BLOCK, BLOCK as usize), vec![0; BLOCK as usize]);
    }
}

#[test]
pub fn passthrough_gives_up_what_is_written_to() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.drain();
    fixture.remove();
    fixture.table = "64 1 passthrough smq 0".into();
    fixture.open();
    let used = fixture.fact("cached_bytes");
    fixture.write(3 * BLOCK, &[8; 512]);
    assert_eq!(fixture.fact("cached_bytes"), used - BLOCK);
    assert_eq!(fixture.read(3 * BLOCK, 512), [8; 512]);
    fixture.remove();
    assert!(metadata(&fixture).contents.in_use().all(|(_, block)| block != 3));
}

#[test]
fn passthrough_needs_a_cache_without_dirty_blocks() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.remove();
    fixture.table = "64 1 passthrough smq 0".into();
    let text = fixture.try_open().unwrap_err().to_string();
    assert!(text.starts_with("cache: passthrough mode needs"), "{text}");
}

#[test]
fn ranges_of_a_message_are_checked_before_any_is_carried_out() {
    let mut fixture = with_dirty_block(TABLE);
    assert!(
        fixture.message("invalidate_cblocks 0").unwrap_err().to_string().contains("passthrough")
    );
    fixture.drain();
    fixture.remove();
    fixture.table = "64 1 passthrough smq 0".into();
    fixture.open();
    let used = fixture.fact("cached_bytes");
    for wrong in ["0-4 9", "0 x", "0 3-2", "0 4294967296", "0-4 -1", "1-"] {
        fixture.message(&format!("invalidate_cblocks {wrong}")).unwrap_err();
        assert_eq!(fixture.fact("cached_bytes"), used);
    }
    fixture.message("INVALIDATE_CBLOCKS 0-4").unwrap();
    fixture.tick(SECOND);
    assert_eq!((fixture.fact("cached_bytes"), metadata(&fixture).contents.mapped()), (0, 0));
    fixture.message("migration_threshold 77").unwrap();
    assert!(fixture.target().status().contains("migration_threshold 77"));
    fixture.message("sequential_threshold 1").unwrap_err();
}

#[test]
fn a_cache_that_grew_or_shrank_is_fitted() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.remove();
    let slot = metadata(&fixture).contents.dirty.iter().next().unwrap();
    let image = fixture.disks[1].image();
    for slots in [9, slot + 1] {
        let [_, cache, _] = disks(slots, ORIGIN);
        cache.load_image(&image[..image.len().min((slots * BLOCK) as usize)]);
        fixture.disks[1] = cache;
        fixture.open();
        assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512]);
        fixture.remove();
        assert_eq!(metadata(&fixture).contents.slots(), slots);
    }
    if slot > 0 {
        fixture.disks[1] = disks(slot, ORIGIN)[1].clone();
        assert!(fixture.try_open().unwrap_err().to_string().contains("is dirty"));
    }
}

#[test]
fn the_cleaner_writes_everything_back_and_admits_nothing() {
    let mut fixture = with_dirty_block(TABLE);
    fixture.remove();
    fixture.table = "64 0 cleaner 0".into();
    fixture.open();
    fixture.tick(SECOND);
    assert_eq!(fixture.fact("dirty_bytes"), 0);
    let used = fixture.fact("cached_bytes");
    (0..300).for_each(|nth| drop(fixture.read(nth % 8 * BLOCK, 512)));
    assert_eq!(fixture.fact("cached_bytes"), used);
}

#[test]
fn a_write_waits_for_its_dirty_bit_and_others_do_not_wait_for_it() {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(3);
    fixture.history.clear();
    fixture.holds = Box::new(|io| udm::disk::Disk::limits(&*io.disk).name == "meta");
    fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[1; 512]), false, 1));
    fixture.settle();
    assert!(fixture.port.done.is_empty() && ios(&fixture, "cache", Op::Write) == 0);
    assert_eq!(fixture.read(3 * BLOCK, 512), [0; 512]);
    fixture.release();
    assert!(fixture.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()));
    assert_eq!(fixture.read(3 * BLOCK, 512), [1; 512]);
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
        let mut fixture = Fixture::new("", all);
        let sectors = metadata(&fixture).superblock.fields.data_sectors.get();
        fixture.table = format!("{sectors} 0 smq 0");
        fixture.open();
        let content = fixture.read(0, images[2].len());
        assert_eq!(sha256(&content), vector.text("sha256_origin_after_drain"), "{}", vector.name);
    }
}

#[test]
fn what_the_cache_device_cannot_read_the_origin_has_if_it_is_clean() {
    for table in ["64 1 metadata2 smq 0", "64 2 metadata2 writethrough smq 0"] {
        let mut fixture = Fixture::opened(table, 4, 8 * BLOCK);
        fixture.write(2 * BLOCK, &[5; 2 * BLOCK as usize]);
        fixture.bring(2);
        fixture.bring(3);
        fixture.drain();
        let slot = (0..4).find(|slot| metadata_block(&mut fixture, *slot) == Some(2)).unwrap();
        let bad = slot * BLOCK + 1024..slot * BLOCK + 1536;
        let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Read).within(bad);
        fixture.disks[1].inject(fault);
        // One read over both blocks; later reads are decided by the slot.
        assert_eq!(fixture.read(2 * BLOCK, 2 * BLOCK as usize), vec![5; 2 * BLOCK as usize]);
        assert_eq!(fixture.fact("fallbacks_total"), 1);
        assert_eq!(fixture.read(2 * BLOCK, 4096), vec![5; 4096]);
        assert_eq!(fixture.fact("fallbacks_total"), 1);
        // A write does not go to a slot of which a part cannot be read.
        fixture.write(2 * BLOCK, &[6; 512]);
        let found = fixture.read(2 * BLOCK, 2048);
        assert!(found[..512] == [6; 512] && found[512..] == [5; 1536], "{table}");
        fixture.tick(3 * SECOND);
        fixture.suspend();
        let loaded = metadata(&fixture).contents;
        assert!(loaded.in_use().all(|(_, block)| block != 2), "the block has left");
    }
}

#[test]
fn what_the_cache_device_cannot_read_is_an_error_if_it_is_dirty() {
    let mut fixture = with_dirty_block(TABLE);
    let fault = Fault::new(Effect::Fail(Status::Io)).of(Op::Read);
    fixture.disks[1].inject(fault);
    assert!(fixture.try_read(3 * BLOCK, 4096).is_err());
    assert_eq!(fixture.fact("fallbacks_total"), 0);
    assert_eq!(fixture.status(10), "1", "it is there, and dirty");
    fixture.disks[1].heal();
    fixture.drain();
    assert_eq!(fixture.status(10), "0");
}

/// The block that the medium has in a slot, after a commit.
fn metadata_block(fixture: &mut Fixture, slot: u64) -> Option<u64> {
    fixture.tick(2 * SECOND);
    metadata(fixture).contents.block(slot)
}

#[test]
fn a_request_whose_later_blocks_leave_their_slots_ends() {
    for (table, op) in [("64 1 passthrough smq 0", Op::Write), ("64 0 smq 0", Op::WriteZeroes)] {
        let mut fixture = Fixture::opened("64 0 smq 0", 4, 6 * BLOCK);
        fixture.bring(1);
        fixture.drain();
        fixture.remove();
        fixture.table = table.into();
        fixture.open();
        fixture.settle();
        let len = 3 * BLOCK as usize;
        // Time does not advance: only the request itself starts a commit.
        fixture.submit(match op {
            Op::Write => Bio::write(0, Buffer::from_bytes(&vec![7; len]), false, 0),
            op => Bio::bare(op, 0, len as u64, false, 0),
        });
        fixture.settle();
        assert!(fixture.port.done.pop_front().is_some_and(|done| done.status.is_ok()), "{table}");
        let expected = if op == Op::Write { 7 } else { 0 };
        assert!(fixture.read(0, len).iter().all(|byte| *byte == expected));
    }
}
