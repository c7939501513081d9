//! Finds data on a device outside of the bytes that a format checks: a wrong or forgotten part in a
//! device's word must not cost that data.
//!
//! 1. *Within.* A cache that begins in the middle of a device, because it has a part of it or
//!    begins at a sector of its own, leaves the device's front empty. Such caches begin at whole
//!    MiB, mostly at whole GiB: so udm checks a bounded number of these places.
//! 2. *Around.* A part of a device that holds a file system or a partition table as a whole may be
//!    empty, and still belong to this file system or table. Caches around the part do not count,
//!    because they may be its neighbours.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{Finding, Load, look, signatures};
use crate::units::{GIB, MIB};

/// The number of whole MiB, from the start on, that are checked.
const MIBS: u64 = 256;
/// The number of whole GiB that are checked.
const GIBS: u64 = 1024;
/// The bytes by which a cache is recognised.
const FRONT_BYTES: u64 = 8192;

/// Caches of ours that begin after the front of a device of `size` bytes.
pub(super) fn within(size: u64, load: Load<'_>) -> Vec<Finding> {
    let mut places: Vec<u64> = (1..=MIBS).map(|nth| nth * MIB).collect();
    places.extend((1..=GIBS).map(|nth| nth * GIB));
    places.retain(|at| at.checked_add(FRONT_BYTES).is_some_and(|end| end <= size));
    let mut front = vec![0; FRONT_BYTES as usize];
    let mut found = Vec::new();
    for at in places {
        if load(at, &mut front)
            && let Some(name) = signatures::cache_of_ours(&front)
        {
            found.push(Finding { name: name.into(), at, is_cache: true });
        }
    }
    found
}

/// The findings on the whole device at `path`, if `len` bytes from `start` on are a part of it.
pub(super) fn around(path: &str, start: u64, len: u64) -> Vec<Finding> {
    let Ok(file) = File::open(path) else {
        return Vec::new();
    };
    let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).unwrap_or(0);
    if size <= len {
        return Vec::new();
    }
    let load = |at: u64, into: &mut [u8]| file.read_exact_at(into, at).is_ok();
    let part = start..start.saturating_add(len);
    let all = look(size, 0, Some((path.to_owned(), 0)), &load).into_iter();
    // The probe of the part has found the signatures within the part.
    let others = all.filter(|finding| !finding.is_cache && !part.contains(&finding.at));
    let named = |finding: Finding| Finding {
        name: format!("on the whole device, {}", finding.name),
        // Not a content of the part itself.
        is_cache: true,
        ..finding
    };
    others.map(named).collect()
}
