//! The system's libblkid, loaded on demand if it is installed, never linked.
//!
//! The library is asked for types, names and places only. If the library fails in any way, it
//! counts as not installed: udm's own table is used in any case.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;

use super::Finding;
use crate::sync::OnceLock;

type Probe = *mut c_void;
type New = unsafe extern "C" fn() -> Probe;
type Take = unsafe extern "C" fn(Probe, c_int, i64, i64) -> c_int;
type Free = unsafe extern "C" fn(Probe);
type Set = unsafe extern "C" fn(Probe, c_int) -> c_int;
type Go = unsafe extern "C" fn(Probe) -> c_int;
type Lookup = unsafe extern "C" fn(Probe, *const c_char, *mut *const c_char, *mut usize) -> c_int;

const NAMES: [&CStr; 2] = [c"libblkid.so.1", c"libblkid.so"];
/// BLKID_SUBLKS_TYPE and BLKID_SUBLKS_MAGIC.
const SUPERBLOCK_FLAGS: c_int = 1 << 5 | 1 << 9;
/// BLKID_PARTS_MAGIC.
const PARTITION_FLAGS: c_int = 1 << 3;
/// The most findings on a device, which may have remains of many formats.
const FINDINGS_MAX: usize = 32;

struct Library {
    new: New,
    take: Take,
    free: Free,
    superblocks: Set,
    superblock_flags: Set,
    partitions: Set,
    partition_flags: Set,
    go: Go,
    lookup: Lookup,
}

/// The library's findings in the `len` bytes at byte `start` of the device at `path`; none if the
/// library cannot be used.
pub fn look(path: &str, start: u64, len: u64) -> Option<Vec<Finding>> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(find).as_ref()?;
    let (start, len) = (i64::try_from(start).ok()?, i64::try_from(len).ok()?);
    let file = File::open(path).ok()?;
    // SAFETY: makes a probe, or returns NULL if it cannot.
    let probe = unsafe { (library.new)() };
    if probe.is_null() {
        return None;
    }
    // SAFETY: a live probe, and a descriptor that outlives it.
    let is_taken = unsafe { (library.take)(probe, file.as_raw_fd(), start, len) } == 0;
    let found = if is_taken { library.all(probe) } else { Vec::new() };
    // SAFETY: the probe came from the library and is not used afterwards.
    unsafe { (library.free)(probe) };
    Some(found)
}

impl Library {
    /// Everything on the device of a live probe.
    fn all(&self, probe: Probe) -> Vec<Finding> {
        // SAFETY: a live probe, and flags of the library's interface.
        unsafe {
            (self.superblocks)(probe, 1);
            (self.superblock_flags)(probe, SUPERBLOCK_FLAGS);
            (self.partitions)(probe, 1);
            (self.partition_flags)(probe, PARTITION_FLAGS);
        }
        let mut found = Vec::new();
        // SAFETY: a live probe; 0 means that there is one more finding.
        while found.len() < FINDINGS_MAX && unsafe { (self.go)(probe) } == 0 {
            let of_kind = |name: &CStr, place: &CStr| {
                let at = self.value(probe, place)?.parse().ok()?;
                Some((self.value(probe, name)?, at))
            };
            let finding = of_kind(c"TYPE", c"SBMAGIC_OFFSET");
            let finding = finding.or_else(|| of_kind(c"PTTYPE", c"PTMAGIC_OFFSET"));
            if let Some((name, at)) = finding {
                let is_cache = matches!(&*name, "bcache" | "DM_writecache" | "DM_cache");
                found.push(Finding { name, at, is_cache });
            }
        }
        found
    }

    fn value(&self, probe: Probe, name: &CStr) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: a live probe and a constant name; on success `text` is a string of the probe's,
        // which stays until the next step.
        unsafe {
            let is_there = (self.lookup)(probe, name.as_ptr(), &mut text, std::ptr::null_mut());
            (is_there == 0 && !text.is_null())
                .then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    }
}

/// The library, if it is installed. It stays loaded.
fn find() -> Option<Library> {
    let handle = NAMES.into_iter().find_map(|name| {
        // SAFETY: a constant name; loading runs the library's own start-up code, which is
        // util-linux's well-known one.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        (!handle.is_null()).then_some(handle)
    })?;
    let symbol = |name: &CStr| {
        // SAFETY: a live handle and a constant name.
        let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
        (!symbol.is_null()).then_some(symbol)
    };
    // SAFETY: the signatures are as in the library's header, blkid.h, in all releases with this
    // version number.
    unsafe {
        use std::mem::transmute;
        Some(Library {
            new: transmute::<Probe, New>(symbol(c"blkid_new_probe")?),
            take: transmute::<Probe, Take>(symbol(c"blkid_probe_set_device")?),
            free: transmute::<Probe, Free>(symbol(c"blkid_free_probe")?),
            superblocks: transmute::<Probe, Set>(symbol(c"blkid_probe_enable_superblocks")?),
            superblock_flags: transmute::<Probe, Set>(symbol(
                c"blkid_probe_set_superblocks_flags",
            )?),
            partitions: transmute::<Probe, Set>(symbol(c"blkid_probe_enable_partitions")?),
            partition_flags: transmute::<Probe, Set>(symbol(c"blkid_probe_set_partitions_flags")?),
            go: transmute::<Probe, Go>(symbol(c"blkid_do_probe")?),
            lookup: transmute::<Probe, Lookup>(symbol(c"blkid_probe_lookup_value")?),
        })
    }
}
