//! Which devices belong together: a mark in the superblock's uuid, which nobody else reads or
//! writes, and which the kernel leaves as it is.
//!
//! | bytes | what |
//! |---|---|
//! | 0..4 | `udm`, and the mark's version, 1 |
//! | 4..8 | CRC-32C of the cache device's identity |
//! | 8..12 | CRC-32C of the origin's |
//! | 12..16 | zero |
//!
//! Metadata without a mark is whose it is said to be, and gets one when it is served. A uuid that
//! is no mark stays as it is.

use super::drain::Devices;
use super::metadata::Superblock;
use crate::crc::crc32c_raw;
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};

const MAGIC: [u8; 4] = *b"udm\x01";

/// The mark of metadata whose cache device and origin these are.
pub(super) fn mark_of(devices: &Devices) -> [u8; 16] {
    let mut mark = [0; 16];
    mark[..4].copy_from_slice(&MAGIC);
    mark[4..8].copy_from_slice(&sum(&*devices.cache));
    mark[8..12].copy_from_slice(&sum(&*devices.origin));
    mark
}

fn sum(disk: &dyn Disk) -> [u8; 4] {
    (!crc32c_raw(u32::MAX, disk.limits().identity.as_bytes())).to_le_bytes()
}

/// Whether metadata with this uuid is to be marked, or marked again.
pub(super) fn is_markable(uuid: &[u8; 16]) -> bool {
    *uuid == [0; 16] || uuid[..4] == MAGIC
}

/// An error if the metadata says that it belongs to other devices. `remedy`: what would have it
/// taken nevertheless.
pub fn check(devices: &Devices, superblock: &Superblock, remedy: &str) -> Result<()> {
    let (uuid, mark) = (&superblock.fields.uuid, mark_of(devices));
    if uuid[..4] != MAGIC || *uuid == mark {
        return Ok(());
    }
    let named = |disk: &dyn Disk| {
        let limits = disk.limits();
        format!("{} ({})", limits.name, limits.identity)
    };
    let mut others = Vec::new();
    if uuid[4..8] != mark[4..8] {
        others.push(format!("another cache device than {}", named(&*devices.cache)));
    }
    if uuid[8..] != mark[8..] {
        others.push(format!("another origin than {}", named(&*devices.origin)));
    }
    let what = format!(
        "{} belongs to {}; if it is the same data in a new place, {remedy}",
        devices.metadata.limits().name,
        others.join(" and ")
    );
    Err(Error::new(Kind::Refused, what))
}
