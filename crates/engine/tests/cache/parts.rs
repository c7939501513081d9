//! Write-back copies the sectors that are newer than the origin, and never fewer.

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Disk, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, SECTOR, disks};

const TABLE: &str = "64 1 metadata2 smq 0";
const THROUGH: &str = "64 2 metadata2 writethrough smq 0";

/// A cache with block 3, clean, of an origin full of nines.
fn with_block(table: &str) -> Fixture {
    let mut fixture = Fixture::new(table, disks(4, 8 * BLOCK));
    fixture.disks[2].poke(0, &vec![9; 8 * BLOCK as usize]);
    fixture.open();
    fixture.bring(3);
    fixture.tick(2 * SECOND);
    fixture.history.clear();
    fixture
}

/// The ranges written to the origin in block 3, in bytes from its start.
fn written_back(fixture: &Fixture) -> Vec<(u64, u64)> {
    let writes = fixture.history.iter();
    let writes = writes.filter(|(name, op, ..)| name == "origin" && *op == Op::Write);
    writes.map(|(_, _, at, len)| (at - 3 * BLOCK, *len)).collect()
}

/// The origin's block 3 is the same as what clients see.
fn assert_drained(fixture: &mut Fixture) {
    let seen = fixture.read(3 * BLOCK, BLOCK as usize);
    let mut below = vec![0; BLOCK as usize];
    fixture.disks[2].peek(3 * BLOCK, &mut below);
    let differs = (0..BLOCK as usize / 512).find(|nth| seen[nth * 512] != below[nth * 512]);
    assert!(seen == below, "sector {differs:?}");
}

#[test]
fn write_back_moves_what_was_written() {
    let mut fixture = with_block(TABLE);
    fixture.write(3 * BLOCK + 4096, &[1; 4096]);
    fixture.write(3 * BLOCK + 8192, &[2; 512]);
    fixture.write(3 * BLOCK + 20480, &[3; 1024]);
    fixture.write(3 * BLOCK + 4096, &[4; 512]);
    assert_eq!(fixture.fact("dirty_bytes"), BLOCK);
    fixture.drain();
    assert_eq!(written_back(&fixture), [(4096, 4608), (20480, 1024)]);
    assert_drained(&mut fixture);
    // It was clean in between.
    fixture.history.clear();
    fixture.write(3 * BLOCK, &[5; 512]);
    fixture.drain();
    assert_eq!(written_back(&fixture), [(0, 512)]);
    assert_drained(&mut fixture);
}

#[test]
fn what_a_dead_server_left_is_written_back_as_a_whole() {
    let mut fixture = with_block(TABLE);
    fixture.write(3 * BLOCK + 512, &[1; 512]);
    fixture.kill();
    fixture.open();
    fixture.write(3 * BLOCK, &[2; 512]);
    fixture.history.clear();
    fixture.drain();
    assert_eq!(written_back(&fixture), [(0, BLOCK)]);
    assert_drained(&mut fixture);
}

#[test]
pub fn scattered_writes_are_all_written_back() {
    let mut prng = Prng::new(11);
    let mut fixture = with_block(TABLE);
    for _ in 0..30 {
        for _ in 0..1 + prng.below(40) {
            let sector = prng.below(BLOCK / SECTOR);
            fixture.write(3 * BLOCK + sector * SECTOR, &[1 + prng.below(250) as u8; 512]);
        }
        fixture.drain();
        assert_drained(&mut fixture);
    }
}

#[test]
pub fn zeroes_of_a_part_are_written_back() {
    for op in [Op::Discard, Op::WriteZeroes] {
        let mut fixture = with_block(TABLE);
        fixture.write(3 * BLOCK, &[1; 512]);
        fixture.bare(op, 3 * BLOCK + 2048, 4096);
        fixture.history.clear();
        fixture.drain();
        assert_eq!(written_back(&fixture), [(0, 512), (2048, 4096)]);
        assert_drained(&mut fixture);
    }
}

/// Zeroes reach the origin below a dirty slot, and the request fails at another device or at the
/// flush that follows.
#[test]
pub fn zeroes_that_failed_below_a_slot_do_not_stay_below_it() {
    for (nth, failing) in [(1, Op::WriteZeroes), (2, Op::WriteZeroes), (2, Op::Flush)] {
        let mut fixture = with_block(TABLE);
        fixture.bring(2);
        fixture.write(2 * BLOCK, &[1; 512]);
        fixture.write(3 * BLOCK, &[1; 512]);
        fixture.flush();
        fixture.disks[nth].inject(Fault::new(Effect::Tear(Status::Io)).of(failing));
        let zeroes = Bio::bare(Op::WriteZeroes, 3 * BLOCK - 4096, BLOCK + 4096, false, 0);
        assert_eq!(fixture.run(zeroes).status, Err(Status::Io), "{failing:?}");
        fixture.disks[nth].heal();
        fixture.drain();
        assert_drained(&mut fixture);
    }
}

#[test]
fn what_is_written_during_a_copy_that_fails_is_not_all_that_is_written_back() {
    let mut fixture = with_block(TABLE);
    fixture.write(3 * BLOCK, &[1; 512]);
    fixture.holds = Box::new(|io| io.op == Op::Write && Disk::limits(&*io.disk).name == "origin");
    fixture.target().set_draining(true);
    fixture.tick(SECOND);
    assert_eq!(fixture.held.len(), 1);
    let other = Bio::write(3 * BLOCK + 8192, Buffer::from_bytes(&[2; 512]), false, 1);
    fixture.submit(other);
    fixture.settle();
    assert!(fixture.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()), "it waits");
    fixture.disks[2].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
    fixture.release();
    fixture.drain();
    assert_eq!(written_back(&fixture), [(0, 512), (0, 512), (8192, 512)]);
    assert_drained(&mut fixture);
}

#[test]
fn a_write_through_that_one_device_failed_makes_nothing_dirty() {
    for disk in [1, 2] {
        let mut fixture = with_block(THROUGH);
        fixture.write(3 * BLOCK, &[1; 512]);
        fixture.disks[disk].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Write).times(1));
        // The block is dropped, and the next read goes to the origin.
        fixture.write(3 * BLOCK, &[2; 512]);
        assert_eq!((fixture.fact("dirty_bytes"), fixture.fact("passed_by_total")), (0, 1));
        let mut below = [0; 512];
        fixture.disks[2].peek(3 * BLOCK, &mut below);
        assert_eq!((below, fixture.read(3 * BLOCK, 512)), ([2; 512], vec![2; 512]));
    }
}

#[test]
fn what_is_clean_and_cannot_be_read_does_not_keep_the_rest_from_the_origin() {
    let mut fixture = with_block(TABLE);
    fixture.write(3 * BLOCK, &[1; 512]);
    // A part that was never written.
    let slot =
        fixture.history.iter().rev().find(|(name, op, ..)| name == "cache" && *op == Op::Write);
    let slot_at = slot.expect("the write was a hit").2;
    let bad = slot_at + 8192..slot_at + 12288;
    fixture.disks[1].inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Read).within(bad));
    fixture.drain();
    assert_eq!(written_back(&fixture), [(0, 512)]);
    let found = fixture.read(3 * BLOCK, BLOCK as usize);
    assert!(found[..512] == [1; 512] && found[512..].iter().all(|byte| *byte == 9));
    assert_eq!(fixture.fact("fallbacks_total"), 1);
}

/// Has the oldest of the held requests carried out.
fn release_one(fixture: &mut Fixture) {
    let io = fixture.held.remove(0);
    io.disk.clone().start(io, &mut fixture.ring);
    fixture.settle();
}

#[test]
fn a_drain_ends_beside_writes_that_overlap_and_never_leave_their_block_idle() {
    let mut fixture = with_block(TABLE);
    fixture.write(3 * BLOCK, &[1; 4096]);
    fixture.holds = Box::new(|io| io.op == Op::Write && Disk::limits(&*io.disk).name == "cache");
    let write = |fixture: &mut Fixture, version: u8| {
        let (at, data) = (3 * BLOCK + 4096, Buffer::from_bytes(&[version; 4096]));
        fixture.submit(Bio::write(at, data, false, version.into()));
        fixture.settle();
    };
    write(&mut fixture, 2);
    fixture.target().set_draining(true);
    for version in 3..100 {
        write(&mut fixture, version);
        assert_eq!(fixture.held.len(), 2, "two writes are under way");
        release_one(&mut fixture);
        fixture.tick(SECOND / 10);
        assert!(
            fixture.port.done.pop_front().is_some_and(|bio| bio.status.is_ok()),
            "no write waits"
        );
    }
    assert_eq!(fixture.target().left_to_drain(), 0);
    fixture.target().set_draining(false);
    // The block is on the origin as it was when the drain began. It stays dirty: its writers may
    // have been faster or slower than the copy.
    let mut below = [0; 4096];
    fixture.disks[2].peek(3 * BLOCK, &mut below);
    assert_eq!((below, fixture.fact("dirty_bytes")), ([1; 4096], BLOCK));
    fixture.release();
    fixture.port.done.clear();
    fixture.drain();
    assert_drained(&mut fixture);
}

#[test]
fn the_device_that_hangs_is_the_one_that_is_waited_for() {
    let hangs: [(&str, Op, &str); 4] = [
        ("cache", Op::Read, "the cache device"),
        ("origin", Op::Write, "the origin"),
        ("origin", Op::Flush, "the origin"),
        ("meta", Op::Write, "the metadata device"),
    ];
    for (disk, op, name) in hangs {
        let mut fixture = with_block(TABLE);
        fixture.write(3 * BLOCK, &[1; 4096]);
        assert_eq!(fixture.target().waits_for(), None);
        fixture.holds = Box::new(move |io| io.op == op && Disk::limits(&*io.disk).name == disk);
        fixture.target().set_draining(true);
        // The last of these commits that the block is clean.
        (0..30).for_each(|_| fixture.tick(SECOND));
        let before = fixture.target().waits_for().expect("an I/O is held");
        assert_eq!(before.device, name);
        fixture.tick(SECOND);
        assert_eq!(fixture.target().waits_for(), Some(before), "{name}: none of its I/O has ended");
        fixture.release();
        (0..30).for_each(|_| fixture.tick(SECOND));
        assert_eq!(fixture.target().waits_for(), None);
        assert_drained(&mut fixture);
    }
}
