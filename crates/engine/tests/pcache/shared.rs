//! Reads into memory that others use too: what takes no more than a copy, and nothing else.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::Op;
use udm::foreign::Foreign;
use udm::target::Target;

use crate::world::{Setup, World};

const BYTES: u64 = 64 << 10;

fn memory() -> Foreign {
    let file = memfd_create("shared", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, BYTES).unwrap();
    Foreign::map(&file, 0, BYTES).unwrap()
}

/// What is read in place; nothing if it takes a bio.
fn read(world: &World, memory: &Foreign, offset: u64, len: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let is_read = world.target().read_into(offset, memory.shared(512, len), 0);
    memory.load(512, &mut bytes);
    is_read.then_some(bytes)
}

#[test]
fn hits_are_read_in_place_and_everything_else_takes_a_bio() {
    let memory = memory();
    let mut world = World::new(Setup::small());
    world.open();
    world.write(8192, &[7; 8192], false);
    world.write(8192 + 512, &[9; 512], false);
    let hits = world.fact("read_hits_total");
    let expected = [vec![7; 512], vec![9; 512], vec![7; 7168]].concat();
    assert_eq!(read(&world, &memory, 8192, 8192), Some(expected));
    assert_eq!(read(&world, &memory, 8704, 512), Some(vec![9; 512]));
    assert_eq!(world.fact("read_hits_total"), hits + 2, "each is counted once");
    // A part of it, or all of it, is on the backing device alone.
    for (offset, len) in [(4096, 8192), (12288, 8192), (32768, 512)] {
        assert_eq!(read(&world, &memory, offset, len), None);
    }
    assert_eq!(world.fact("read_hits_total"), hits + 2);
    world.zero(Op::WriteZeroes, 8192, 512, false);
    let bytes = read(&world, &memory, 8704, 512);
    assert_eq!(bytes, Some(vec![9; 512]), "what is next to zeroes is still there");
    assert_eq!(world.read(8192, 1024), [[0; 512], [9; 512]].concat());
}

#[test]
fn data_with_checksums_is_checked_where_nobody_else_stores() {
    let memory = memory();
    let mut world = World::new(Setup::small().table("C B 2 data_crc true"));
    world.open();
    world.write(8192, &[7; 4096], false);
    assert_eq!(read(&world, &memory, 8192, 4096), None);
    assert_eq!(world.read(8192, 4096), [7; 4096]);
}
