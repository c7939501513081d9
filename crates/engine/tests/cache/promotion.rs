//! Blocks that are promoted whole, as the policy `smq` requires: the data that this moves, before a
//! miss is answered and in all, and which requests wait for it.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::cache::metadata::load;
use udm::disk::{Disk, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, disks};
use crate::in_part::{content, is_on, moved};

/// Bytes of a block of these caches.
const LARGE: u64 = 256 << 10;
const BLOCKS: u64 = 8;
/// The block that comes.
const OURS: u64 = 3;

fn opened(slots: u64, table: &str) -> Fixture {
    let mut fixture = Fixture::new(table, disks(slots * LARGE / BLOCK, BLOCKS * LARGE));
    fixture.disks[2].poke(0, &content(0, BLOCKS * LARGE));
    fixture.open();
    fixture.settle();
    fixture
}

/// A read of 4 KiB of our block is answered and promotes it; the background's reads for that are
/// held. Returns the bytes that were read from the origin before the answer, and the address of the
/// read.
fn miss(fixture: &mut Fixture) -> (u64, u64) {
    for nth in 1..4000 {
        let at = OURS * LARGE + nth % 64 * 4096;
        fixture.history.clear();
        fixture.holds = Box::new(|io| io.op == Op::Read && is_on(io, "origin"));
        fixture.submit(Bio::read(at, Buffer::zeroed(4096), 1));
        fixture.settle();
        let asked = fixture.held.iter().map(|io| io.len).sum();
        let own = fixture.held.iter().position(|io| io.len == 4096).expect("the client's own");
        let io = fixture.held.remove(own);
        io.disk.clone().start(io, &mut fixture.ring);
        fixture.settle();
        let bio = fixture.port.done.pop_front().expect("the read does not wait");
        assert_eq!(bio.buffer.as_slice(), content(at, 4096));
        if fixture.fact("cached_bytes") > 0 {
            return (asked, at);
        }
    }
    panic!("the block does not come");
}

#[test]
pub fn a_miss_of_4_kib_moves_4_kib_before_its_answer_and_its_block_once() {
    let mut fixture = opened(4, "512 1 metadata2 smq 0");
    let (asked, _) = miss(&mut fixture);
    fixture.release();
    // Each was 266240 when a block was promoted by a copy separate from the client's read.
    assert_eq!((asked, 4096 + moved(&fixture, "origin", Op::Read)), (4096, LARGE));
    assert_eq!(moved(&fixture, "cache", Op::Write), LARGE);
    assert_comes(&mut fixture);
}

/// Our block is there as a whole, the medium names it, and it equals the origin.
fn assert_comes(fixture: &mut Fixture) {
    fixture.tick(3 * SECOND);
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    let (slot, block) = load(&disk).unwrap().contents.in_use().next().expect("it is named");
    assert_eq!(block, OURS);
    let [mut held, mut below] = [(); 2].map(|()| vec![0; LARGE as usize]);
    fixture.disks[1].peek(slot * LARGE, &mut held);
    fixture.disks[2].peek(OURS * LARGE, &mut below);
    assert!(held == below);
    fixture.history.clear();
    assert!(fixture.read(OURS * LARGE, LARGE as usize) == below);
    assert_eq!(moved(fixture, "origin", Op::Read), 0);
}

#[test]
fn a_block_that_comes_serves_what_it_has_and_is_not_named() {
    let mut fixture = opened(4, "512 1 metadata2 smq 0");
    let (_, at) = miss(&mut fixture);
    assert!(!fixture.held.is_empty(), "the rest is on its way");
    fixture.history.clear();
    assert_eq!(fixture.read(at, 4096), content(at, 4096));
    assert_eq!(moved(&fixture, "cache", Op::Read), 4096);
    assert_eq!(moved(&fixture, "origin", Op::Read), 0);
    fixture.tick(5 * SECOND);
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    assert_eq!(load(&disk).unwrap().contents.mapped(), 0);
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.fact("cached_bytes"), 0);
}

#[test]
fn a_write_to_a_block_that_comes_waits_for_nothing_and_costs_itself() {
    for op in [Op::Write, Op::Discard, Op::WriteZeroes] {
        let mut fixture = opened(4, "512 1 metadata2 smq 0");
        miss(&mut fixture);
        let on_its_way: u64 = fixture.held.iter().map(|io| io.len).sum();
        assert_eq!(on_its_way, LARGE - 4096);
        // The block's first page: the read in flight has its old data.
        let bio = match op {
            Op::Write => Bio::write(OURS * LARGE, Buffer::from_bytes(&[0; 4096]), false, 2),
            _ => Bio::bare(op, OURS * LARGE, 4096, false, 2),
        };
        fixture.submit(bio);
        fixture.settle();
        fixture.port.done.pop_front().expect("it does not wait").status.unwrap();
        fixture.history.clear();
        fixture.release();
        let read = moved(&fixture, "origin", Op::Read);
        assert_eq!(read, on_its_way + 4096, "{op:?}: the written sectors are read again");
        assert_comes(&mut fixture);
    }
}

#[test]
fn what_is_on_its_way_is_bounded() {
    for (threshold, most) in [(128, 256 << 10), (1024, 768 << 10)] {
        let mut fixture =
            opened(8, &format!("512 1 metadata2 smq 2 migration_threshold {threshold}"));
        fixture.holds = Box::new(|io| io.op == Op::Read && is_on(io, "origin") && io.len > 4096);
        for nth in 0..4000 {
            fixture.read(nth % BLOCKS * LARGE + nth / BLOCKS % 64 * 4096, 4096);
        }
        let on_its_way: u64 = fixture.held.iter().map(|io| io.len).sum();
        assert!(on_its_way > 0 && on_its_way <= most, "{on_its_way} bytes of {threshold} sectors");
        fixture.release();
    }
    let mut fixture = opened(8, "512 1 metadata2 smq 2 migration_threshold 0");
    for nth in 0..4000 {
        fixture.read(nth % BLOCKS * LARGE + nth / BLOCKS % 64 * 4096, 4096);
    }
    assert_eq!(fixture.fact("cached_bytes"), 0);
    fixture.message("migration_threshold 2048").unwrap();
    fixture.read(0, 4096);
    assert_eq!(fixture.fact("cached_bytes"), LARGE);
}

#[test]
fn what_cannot_come_gives_its_slot_back_and_comes_later() {
    for (device, op) in [("origin", Op::Read), ("cache", Op::Write)] {
        let mut fixture = opened(4, "512 1 metadata2 smq 0");
        miss(&mut fixture);
        let nth = if device == "cache" { 1 } else { 2 };
        fixture.disks[nth].inject(Fault::new(Effect::Fail(Status::Io)).of(op).times(1));
        fixture.release();
        fixture.tick(SECOND);
        assert_eq!(fixture.fact("cached_bytes"), 0, "{device}");
        miss(&mut fixture);
        fixture.release();
        assert_comes(&mut fixture);
    }
}

#[test]
fn many_blocks_come_and_none_is_left_in_part() {
    let mut prng = Prng::new(1);
    let blocks = 400;
    let mut fixture = Fixture::new("64 1 metadata2 smq 0", disks(200, blocks * BLOCK));
    fixture.disks[2].poke(0, &content(0, blocks * BLOCK));
    fixture.open();
    fixture.holds = Box::new(|io| io.op == Op::Read && is_on(io, "origin") && io.len > 4096);
    let read = |fixture: &mut Fixture, prng: &mut Prng| {
        let at = prng.below(blocks) * BLOCK + prng.below(8) * 4096;
        assert_eq!(fixture.read(at, 4096), content(at, 4096));
    };
    (0..8000).for_each(|_| read(&mut fixture, &mut prng));
    fixture.tick(3 * SECOND);
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    let in_part = fixture.fact("cached_bytes") / BLOCK - load(&disk).unwrap().contents.mapped();
    assert_eq!(in_part, 64, "so many come at a time");
    fixture.release();
    (0..8000).for_each(|_| read(&mut fixture, &mut prng));
    fixture.tick(3 * SECOND);
    let named = load(&disk).unwrap().contents.mapped();
    assert_eq!(fixture.fact("cached_bytes"), named * BLOCK);
    assert!(named > 190, "{named}");
}

#[test]
fn a_block_that_finds_only_dirty_ones_gets_room_without_coming_again() {
    let mut fixture =
        Fixture::opened("64 1 metadata2 smq 2 migration_threshold 0", 4, BLOCKS * BLOCK);
    for block in 0..4 {
        fixture.write(block * BLOCK, &vec![block as u8 + 1; BLOCK as usize]);
    }
    assert_eq!(fixture.fact("dirty_bytes"), 4 * BLOCK);
    fixture.write(5 * BLOCK, &vec![6; BLOCK as usize]);
    fixture.tick(SECOND / 10);
    assert_eq!((fixture.fact("dirty_bytes"), fixture.fact("cached_bytes")), (3 * BLOCK, 3 * BLOCK));
    fixture.write(5 * BLOCK, &vec![7; BLOCK as usize]);
    assert_eq!(fixture.fact("cached_bytes"), 4 * BLOCK);
}
