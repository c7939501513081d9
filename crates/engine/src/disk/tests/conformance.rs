//! The contract of disks, as functions that test any implementation.

use super::{bare, io, next, pattern, read, run, transfer, write};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, Ring};
use crate::error::Status;
use crate::prng::Prng;
use crate::sync::Arc;
use crate::units::{KIB, MIB, SECTOR};

/// The disk under test has this many bytes.
pub const SIZE: u64 = 9 * MIB + 3 * SECTOR;

/// The whole contract of a disk. The disk reads as zeroes at the start.
pub fn check_all(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    assert_eq!(disk.limits().size_bytes, SIZE);
    starts_as_zeroes(disk, ring);
    keeps_what_was_written(disk, ring);
    refuses_what_is_not_there(disk, ring);
    zeroes_and_discards(disk, ring);
    gives_everything_back(disk, ring);
    equals_a_model(disk, ring, 1);
    equals_a_model(disk, ring, 2);
    completes_thousands(disk, ring);
    assert_eq!(ring.awaited(), 0);
}

fn starts_as_zeroes(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    assert!(read(disk, ring, 0, SIZE).unwrap().iter().all(|byte| *byte == 0));
}

fn keeps_what_was_written(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    let ranges = [
        (0, 512),
        (0, 4096),
        (512, 512),
        (4096 - 512, 1024),
        (4096, 64 * KIB),
        (3 * 512, MIB),
        (MIB, 4 * MIB),
        (SIZE - 512, 512),
        (SIZE - 8192, 8192),
        (0, SIZE),
    ];
    for (seed, (offset, len)) in ranges.into_iter().enumerate() {
        let bytes = pattern(len, seed as u64);
        write(disk, ring, offset, &bytes).unwrap();
        assert!(read(disk, ring, offset, len).unwrap() == bytes, "{len} bytes at {offset}");
    }
    assert_eq!(bare(disk, ring, Op::Flush, 0, 0), Ok(()));
    assert!(read(disk, ring, 0, SIZE).unwrap() == pattern(SIZE, 9));
}

fn refuses_what_is_not_there(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    let before = read(disk, ring, 0, SIZE).unwrap();
    let bad = [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512), (1, 512), (0, 511)];
    for (offset, len) in bad {
        let bytes = pattern(len, 77);
        assert_eq!(write(disk, ring, offset, &bytes), Err(Status::Invalid), "{offset} {len}");
        assert_eq!(read(disk, ring, offset, len), Err(Status::Invalid));
        assert_eq!(bare(disk, ring, Op::WriteZeroes, offset, len), Err(Status::Invalid));
        assert_eq!(bare(disk, ring, Op::Discard, offset, len), Err(Status::Invalid));
    }
    let mut lying = transfer(disk, Op::Write, 0, Buffer::zeroed(512), 0);
    lying.len = 4096;
    assert_eq!(run(ring, lying).result, Err(Status::Invalid));
    assert!(read(disk, ring, 0, SIZE).unwrap() == before);
}

fn zeroes_and_discards(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    let mut expected = pattern(SIZE, 5);
    write(disk, ring, 0, &expected).unwrap();
    let ranges = [(512, 512), (4096, 8192), (MIB - 512, 1024), (2 * MIB + 512, 3 * MIB)];
    for (offset, len) in ranges {
        bare(disk, ring, Op::WriteZeroes, offset, len).unwrap();
        expected[offset as usize..(offset + len) as usize].fill(0);
    }
    assert!(read(disk, ring, 0, SIZE).unwrap() == expected);
    assert_eq!(bare(disk, ring, Op::WriteZeroes, 0, 0), Ok(()));

    // A discarded range may read as anything; its neighbours must not change.
    let (offset, len) = (6 * MIB + 512, MIB);
    let result = bare(disk, ring, Op::Discard, offset, len);
    assert_eq!(result.is_ok(), disk.limits().has_discard, "{result:?}");
    let found = read(disk, ring, 0, SIZE).unwrap();
    assert!(found[..offset as usize] == expected[..offset as usize]);
    assert!(found[(offset + len) as usize..] == expected[(offset + len) as usize..]);
}

fn gives_everything_back(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    let mut request = transfer(disk, Op::Write, 4096, Buffer::from_bytes(&[9; 4096]), 0xFEED);
    request.line = 3;
    let done = run(ring, request);
    assert_eq!((done.token, done.line, done.op), (0xFEED, 3, Op::Write));
    assert_eq!((done.offset, done.len), (4096, 4096));
    assert_eq!(done.buffer.as_slice(), [9; 4096]);
    let done = run(ring, io(disk, Op::WriteZeroes, 0, 512, Buffer::empty(), 1));
    assert_eq!((done.result, done.buffer.len()), (Ok(()), 0));
}

/// Random operations, many in flight, none of which overlap: each slot of the disk has at
/// most one. Now and then a flush is among them.
fn equals_a_model(disk: &Arc<dyn Disk>, ring: &mut Ring, seed: u64) {
    const SLOT: u64 = 32 * KIB;
    let slots = (SIZE / SLOT) as usize;
    let mut prng = Prng::new(seed);
    let mut model = pattern(SIZE, seed + 100);
    write(disk, ring, 0, &model).unwrap();
    let mut is_busy = vec![false; slots];
    let mut in_flight = 0;
    for step in 0..3000u64 {
        let slot = prng.below(slots as u64) as usize;
        if in_flight < 48 && !is_busy[slot] {
            let unit = if prng.one_in(2) { SECTOR } else { 4096 };
            let first = prng.below(SLOT / unit);
            let len = (1 + prng.below(SLOT / unit - first)) * unit;
            let offset = slot as u64 * SLOT + first * unit;
            let request = match prng.below(10) {
                0 => io(disk, Op::WriteZeroes, offset, len, Buffer::empty(), slot as u64),
                1 => io(disk, Op::Flush, 0, 0, Buffer::empty(), slot as u64),
                2..5 => transfer(disk, Op::Read, offset, Buffer::zeroed(len as usize), slot as u64),
                _ => {
                    let buffer = Buffer::from_bytes(&pattern(len, step));
                    transfer(disk, Op::Write, offset, buffer, slot as u64)
                }
            };
            is_busy[slot] = true;
            in_flight += 1;
            disk.start(request, ring);
        }
        if in_flight == 48 || prng.one_in(4) {
            ring.submit();
        }
        while let Some(done) = ring.pop_completed() {
            judge(&done, &mut model);
            is_busy[done.token as usize] = false;
            in_flight -= 1;
        }
        if in_flight == 48 {
            let done = next(ring);
            judge(&done, &mut model);
            is_busy[done.token as usize] = false;
            in_flight -= 1;
        }
    }
    for _ in 0..in_flight {
        judge(&next(ring), &mut model);
    }
    bare(disk, ring, Op::Flush, 0, 0).unwrap();
    assert!(read(disk, ring, 0, SIZE).unwrap() == model, "seed {seed}");
}

fn judge(done: &crate::disk::DiskIo, model: &mut [u8]) {
    assert_eq!(done.result, Ok(()), "{done:?}");
    let range = done.offset as usize..(done.offset + done.len) as usize;
    match done.op {
        Op::Read => assert!(model[range] == *done.buffer.as_slice(), "{done:?}"),
        Op::Write => model[range].copy_from_slice(done.buffer.as_slice()),
        Op::WriteZeroes => model[range].fill(0),
        Op::Flush | Op::Discard => {}
    }
}

/// More I/Os in flight than any queue on the way holds.
fn completes_thousands(disk: &Arc<dyn Disk>, ring: &mut Ring) {
    let count = SIZE / 4096;
    for token in 0..count {
        let buffer = Buffer::from_bytes(&pattern(4096, token));
        disk.start(transfer(disk, Op::Write, token * 4096, buffer, token), ring);
    }
    let mut seen = vec![false; count as usize];
    for _ in 0..count {
        let done = next(ring);
        assert_eq!(done.result, Ok(()));
        assert!(!std::mem::replace(&mut seen[done.token as usize], true), "completed twice");
    }
    for token in (0..count).rev() {
        disk.start(transfer(disk, Op::Read, token * 4096, Buffer::zeroed(4096), token), ring);
    }
    for _ in 0..count {
        let done = next(ring);
        assert!(done.result == Ok(()) && done.buffer.as_slice() == pattern(4096, done.token));
    }
    assert!(ring.pop_completed().is_none());
}
