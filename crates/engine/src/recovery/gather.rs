//! Reads whose parts are at several addresses on disks.

use std::collections::HashMap;

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::sync::{Arc, Mutex, lock};
use crate::target::Port;
use crate::units::{BIO_BYTES_MAX, SECTOR};

/// The position within the bio is in the lower bits of an I/O's token, in sectors; the number of
/// the read is in the other bits.
const PLACE_BITS: u32 = 24;
const _: () = assert!(BIO_BYTES_MAX / SECTOR <= 1 << PLACE_BITS);

/// A run of bytes on a disk.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// Its first byte there.
    pub at: u64,
    /// Its first byte in the bio.
    pub from: u64,
    /// How many bytes.
    pub len: u64,
}

/// Reads that wait for disks, by number.
#[derive(Debug, Default)]
pub(crate) struct Gather(Mutex<Reads>);

#[derive(Debug, Default)]
struct Reads {
    waiting: HashMap<u64, Read>,
    next: u64,
}

#[derive(Debug)]
struct Read {
    bio: Bio,
    outstanding: usize,
    status: Result<(), Status>,
}

impl Gather {
    /// Reads `runs`; the other parts of the bio are already present. The bio is finished when all
    /// parts are read.
    pub(crate) fn read(&self, bio: Bio, runs: Vec<Run>, port: &mut Port) {
        if runs.is_empty() {
            return port.finish(bio, Ok(()));
        }
        let number = {
            let mut reads = lock(&self.0);
            reads.next += 1;
            let number = reads.next;
            let read = Read { bio, outstanding: runs.len(), status: Ok(()) };
            reads.waiting.insert(number, read);
            number
        };
        for Run { disk, at, from, len } in runs {
            let buffer = port.pool.take(len as usize);
            let token = (number << PLACE_BITS) | (from / SECTOR);
            port.ios.push_back(DiskIo::new(&disk, Op::Read, at, buffer, token));
        }
    }

    /// An I/O of a read is back.
    pub(crate) fn complete(&self, mut io: DiskIo, port: &mut Port) {
        let number = io.token >> PLACE_BITS;
        let mut reads = lock(&self.0);
        let read = reads.waiting.get_mut(&number).expect("an I/O in flight has its read");
        match io.result {
            Ok(()) => {
                let from = ((io.token & ((1 << PLACE_BITS) - 1)) * SECTOR) as usize;
                let into = &mut read.bio.buffer.as_mut_slice()[from..from + io.len as usize];
                into.copy_from_slice(io.buffer.as_slice());
            }
            Err(status) => read.status = Err(status),
        }
        read.outstanding -= 1;
        let done = if read.outstanding == 0 { reads.waiting.remove(&number) } else { None };
        drop(reads);
        port.pool.put(std::mem::replace(&mut io.buffer, Buffer::empty()));
        if let Some(read) = done {
            port.finish(read.bio, read.status);
        }
    }
}
