//! One conformance suite for every disk, and tests of the properties special to each kind.

mod conformance;
mod disks;
mod flushing;
mod fuse;
mod hollow;
mod lazy;
mod paced;
mod parts;
mod sim;

use crate::bio::Op;
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo, Ring};
use crate::error::Status;
use crate::sync::Arc;

/// An I/O to `disk`.
fn io(disk: &Arc<dyn Disk>, op: Op, offset: u64, len: u64, buffer: Buffer, token: u64) -> DiskIo {
    DiskIo { disk: disk.clone(), op, offset, len, buffer, token, line: 0, result: Ok(()) }
}

/// A read or write.
fn transfer(disk: &Arc<dyn Disk>, op: Op, offset: u64, buffer: Buffer, token: u64) -> DiskIo {
    let len = buffer.len() as u64;
    io(disk, op, offset, len, buffer, token)
}

/// The next completed I/O, however long it takes.
fn next(ring: &mut Ring) -> DiskIo {
    for _ in 0..2000 {
        if let Some(io) = ring.pop_completed() {
            return io;
        }
        ring.submit_and_wait(Some(std::time::Duration::from_millis(50)));
    }
    panic!("an I/O did not complete");
}

/// Carries out one I/O.
fn run(ring: &mut Ring, io: DiskIo) -> DiskIo {
    let disk = io.disk.clone();
    disk.start(io, ring);
    next(ring)
}

/// Reads.
fn read(disk: &Arc<dyn Disk>, ring: &mut Ring, offset: u64, len: u64) -> Result<Vec<u8>, Status> {
    let io = run(ring, transfer(disk, Op::Read, offset, Buffer::zeroed(len as usize), 0));
    io.result.map(|()| io.buffer.as_slice().to_vec())
}

/// Writes.
fn write(disk: &Arc<dyn Disk>, ring: &mut Ring, offset: u64, bytes: &[u8]) -> Result<(), Status> {
    run(ring, transfer(disk, Op::Write, offset, Buffer::from_bytes(bytes), 0)).result
}

/// Flush, discard or write-zeroes.
fn bare(disk: &Arc<dyn Disk>, ring: &mut Ring, op: Op, at: u64, len: u64) -> Result<(), Status> {
    run(ring, io(disk, op, at, len, Buffer::empty(), 0)).result
}

/// Bytes that name their place and time.
fn pattern(len: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    crate::prng::Prng::new(seed).fill(&mut bytes);
    bytes
}
