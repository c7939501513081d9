//! The small targets: linear, zero, error, delay, flakey. Useful by themselves, and tools for
//! tests, which put them below the others.
//!
//! Three of them pass bios on to a disk, and share two types: a `Mapping` is a range of a disk, and
//! a `Carrier` sends bios to the disk and takes them back. Grammar, status and table text are as in
//! the kernel's documents (`linear`, `zero`, `delay`, `dm-flakey`).

mod delay;
mod flakey;
mod linear;
mod rest;
mod void;

pub use delay::{DELAY_WORDS, Delay, DelayArgs};
pub use flakey::{CorruptByte, FLAKEY_WORDS, Features, Flakey, FlakeyArgs};
pub use linear::{LINEAR_WORDS, Linear, LinearArgs};
pub use void::{ERROR_WORDS, ErrorTarget, Zero};

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::common::per_port::PerPort;
use crate::disk::{Disk, DiskIo};
use crate::error::{Error, Kind, Result, Status};
use crate::sync::Arc;
use crate::table::{DeviceWord, Word};
use crate::target::{Extent, Health, Port, TargetLimits, refused_push};
use crate::units::SECTOR;
use rest::Rest;

/// Two words of a table line: a device, and the sector on it where the mapping starts.
#[derive(Clone, Debug)]
pub struct Location {
    /// The device.
    pub device: DeviceWord,
    /// The first sector.
    pub offset: u64,
    offset_word: Word,
}

impl Location {
    fn parse(device: &Word, offset: &Word) -> Result<Location> {
        Ok(Location {
            device: device.device()?,
            offset: offset.sectors("Invalid device sector: it")?,
            offset_word: offset.clone(),
        })
    }
}

/// A range of a disk.
#[derive(Clone, Debug)]
struct Mapping {
    disk: Arc<dyn Disk>,
    start: u64,
}

impl Mapping {
    /// The range of `len` bytes at `place` on `disk`, which must hold it.
    fn new(place: &Location, len: u64, disk: Arc<dyn Disk>) -> Result<Mapping> {
        let limits = disk.limits();
        let start = place.offset * SECTOR;
        if start.checked_add(len).is_none_or(|end| end > limits.size_bytes) {
            let message = format!(
                "{} too small for target: start={}, len={}, dev_size={} (sectors)",
                limits.name,
                place.offset,
                len / SECTOR,
                limits.size_bytes / SECTOR
            );
            let word =
                if len > limits.size_bytes { &place.device.word } else { &place.offset_word };
            return Err(word.error(Kind::Invalid, message));
        }
        Ok(Mapping { disk, start })
    }

    fn losses(&self) -> u64 {
        self.disk.losses()
    }

    fn limits(&self) -> TargetLimits {
        self.disk.limits().of_target().from(self.start)
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.disk.extent(self.start + offset, len)
    }

    fn health(&self) -> Health {
        let paced_by = refused_push(&*self.disk);
        Health { origin: self.disk.errors(), paced_by, ..Health::default() }
    }

    /// Device and start sector, as the table line has them.
    fn words(&self) -> String {
        let name = Word::new(self.disk.limits().kernel_name.as_str());
        format!("{} {}", name.quoted(), self.start / SECTOR)
    }
}

/// Sends bios to disks and takes them back. A bio with FUA is followed by a flush of its disk.
/// A suspend flushes written data.
#[derive(Debug, Default)]
struct Carrier {
    pending: PerPort<Bio>,
    rest: Rest,
}

impl Carrier {
    /// Emits the I/O of `bio`; it continues in `complete`.
    fn send(&self, mut bio: Bio, to: &Mapping, port: &mut Port) {
        let buffer = std::mem::replace(&mut bio.buffer, Buffer::empty());
        self.send_with(bio, buffer, to, port);
    }

    /// Emits the I/O of `bio` with `buffer` instead of its own, which it keeps.
    fn send_with(&self, bio: Bio, buffer: Buffer, to: &Mapping, port: &mut Port) {
        if bio.op == Op::Discard && !to.disk.limits().has_discard {
            port.pool.put(buffer);
            return port.finish(bio, Err(Status::Unsupported));
        }
        let (op, len) = (bio.op, bio.len);
        self.rest.note(op);
        let offset = if op == Op::Flush { 0 } else { to.start + bio.offset };
        let token = u64::from(self.pending.of(port).insert(bio));
        let disk = to.disk.clone();
        port.ios.push_back(DiskIo {
            disk,
            op,
            offset,
            len,
            buffer,
            token,
            line: 0,
            result: Ok(()),
        });
    }

    /// Takes an I/O back. Returns the bio it belongs to, with its status and data, once it is done;
    /// none for the flush of a suspend.
    fn complete(&self, mut io: DiskIo, port: &mut Port) -> Option<Bio> {
        if self.rest.end(io.token, io.result) {
            return None;
        }
        let place = io.token as u32;
        let mut pending = self.pending.of(port);
        let changes = !matches!(io.op, Op::Read | Op::Flush);
        if changes && io.result.is_ok() && pending.value(place).fua {
            let bio = pending.value(place);
            let spare = give_back(bio, std::mem::replace(&mut io.buffer, Buffer::empty()));
            drop(pending);
            port.pool.put(spare);
            (io.op, io.offset, io.len) = (Op::Flush, 0, 0);
            port.ios.push_back(io);
            return None;
        }
        let mut bio = pending.remove(place);
        drop(pending);
        port.pool.put(give_back(&mut bio, io.buffer));
        bio.status = io.result;
        Some(bio)
    }

    /// Emits the flush of `to` that a suspend wants, if it wants one.
    fn tick(&self, to: &Mapping, port: &mut Port) {
        if let Some(token) = self.rest.start() {
            port.ios.push_back(DiskIo::bare(&to.disk, Op::Flush, 0, 0, token));
        }
    }

    /// The same flush ends without a disk.
    fn tick_without_disk(&self, result: std::result::Result<(), Status>) {
        if let Some(token) = self.rest.start() {
            self.rest.end(token, result);
        }
    }
}

/// Puts the buffer that was lent to an I/O back into its bio; or returns it, if the bio kept its
/// own.
fn give_back(bio: &mut Bio, buffer: Buffer) -> Buffer {
    if bio.buffer.is_empty() { std::mem::replace(&mut bio.buffer, buffer) } else { buffer }
}

/// A wrong number of arguments: points at the word that is one too many, or past the last.
fn wrong_count(args: &[Word], at_most: usize, message: &str) -> Error {
    match (args.get(at_most), args.last()) {
        (Some(extra), _) => extra.error(Kind::Invalid, message),
        (None, Some(last)) => last.behind(message),
        (None, None) => Error::new(Kind::Invalid, message),
    }
}

#[cfg(test)]
mod tests;
