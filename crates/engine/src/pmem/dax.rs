//! Real memory: a DAX device, or a file, mapped.
//!
//! 1. The mapping is seen as `*mut u8` and through `copy` only; no reference to it exists, so
//!    other threads and processes may store to it, and the medium may fail, at any time.
//! 2. Every range is checked against the medium's length before an address is made of it.
//! 3. A medium that failed once (a page could not be read, was cut off, or a sync failed) is never
//!    trusted again: every later `drain` and `sync` fails. Loads of other pages go on; those of a
//!    part that was cut off fail, even if the medium is made longer again.
//! 4. Nothing is stored after damage was seen: it could not become durable any more.
//! 5. A store never meets a full file system: blocks are reserved when the medium is opened.
//!
//! `media` finds out what the medium is and locks it; `sigbus` handles SIGBUS.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, msync, munmap};

use super::copy::{self, CAN_FLUSH, CopyPlan, Primitive, SharedBytes};
use super::media::{self, Access, Nature, Opened};
use super::sink::Sink;
use super::{Medium, Persistence, Pmem};
use crate::area::Area;
use crate::disk::whole::{Absence, Whole};
use crate::error::{Error, Kind, Result, Status};
use crate::look::mix_look;
use crate::sigbus::{Watch, Watched, watch};
use crate::sync::{Mutex, lock};
use crate::units::MIB;

/// Media in memory up to this size are mapped page by page when opened, so that no later request
/// pays for it: about 10 ms. Larger ones would make the first request wait; for those the server
/// calls [`DaxPmem::prefault`] while it already serves.
const PREFAULT_BYTES_MAX: u64 = 32 * MIB;

/// The user's own choices.
#[derive(Clone, Copy, Debug, Default)]
pub struct DaxOptions {
    /// What makes stores durable, overriding what was found out (`?persist=`).
    pub persistence: Option<Persistence>,
    /// The part that is meant. It begins at a page of the medium.
    pub area: Area,
}

/// A mapped cache device.
#[derive(Debug)]
pub struct DaxPmem {
    // Unmapped before the file is closed and its lock is gone: fields drop in this order.
    mapping: Mapping,
    file: File,
    whole: Whole,
    /// Where the mapping begins on the file.
    start: u64,
    medium: Medium,
    access: Access,
    /// Whether pages can be mapped ahead of their use without I/O.
    is_memory: bool,
    plan: CopyPlan,
    /// Whether a sync failed. Held while syncing: the kernel reports an error to one caller only.
    has_sync_failed: Mutex<bool>,
}

impl DaxPmem {
    /// Opens `path` for use, alone.
    pub fn open(path: &Path, options: DaxOptions) -> Result<DaxPmem> {
        DaxPmem::map(path, Access::Exclusive, options)
    }

    /// Opens `path` to inspect it, even while it is in use. Storing to it is a bug.
    pub fn open_read_only(path: &Path, area: Area) -> Result<DaxPmem> {
        DaxPmem::map(path, Access::ReadOnly, DaxOptions { area, ..DaxOptions::default() })
    }

    /// Opens `path` to read, while nothing may change it. Storing to it is a bug.
    pub fn open_shared(path: &Path, options: DaxOptions) -> Result<DaxPmem> {
        DaxPmem::map(path, Access::Shared, options)
    }

    fn map(path: &Path, access: Access, options: DaxOptions) -> Result<DaxPmem> {
        let opened = media::open(path, access, options.area)?;
        let whole = Whole::new(path, &opened.file, opened.whole_bytes);
        if access == Access::Exclusive && opened.nature == Nature::File {
            reserve_blocks(&opened)?;
        }
        let mapping = Mapping::new(&opened, access)?;
        let durability = media::decide(
            opened.nature,
            mapping.is_synchronous,
            options.persistence,
            &opened.name,
        )?;
        // Small core dumps and huge pages are wishes; a kernel without them works too.
        let _ = mapping.advise(0, opened.len_bytes, Advice::LinuxDontDump);
        let is_memory = is_memory(&opened, &mapping);
        if access == Access::Exclusive && is_memory {
            let _ = mapping.advise(0, opened.len_bytes, Advice::LinuxHugepage);
            fill_memory(&opened, &mapping)?;
        }
        let plan = match durability.persistence {
            Persistence::Cpu => CopyPlan::usual(),
            Persistence::Msync => CopyPlan::only(Primitive::Plain),
        };
        let medium = Medium {
            name: opened.name,
            persistence: durability.persistence,
            is_volatile: durability.is_volatile,
            description: durability.description,
            kernel_name: opened.kernel_name + &suffix(&options),
        };
        let has_sync_failed = Mutex::new(false);
        let (file, start) = (opened.file, opened.start);
        Ok(DaxPmem {
            mapping,
            file,
            whole,
            start,
            medium,
            access,
            is_memory,
            plan,
            has_sync_failed,
        })
    }

    /// Maps the pages of a range ahead of their use, if that takes no I/O: a page fault within a
    /// request costs as much as the request. May run at the same time as anything else. Takes 70 to
    /// 350 us per MiB, depending on the size of pages; media of 32 MiB and less are mapped already.
    pub fn prefault(&self, at: u64, len: u64) {
        if self.is_memory && self.access == Access::Exclusive {
            // Unreadable pages are found again, and reported, by the loads that need them.
            let _ = self.mapping.advise(at, len, Advice::LinuxPopulateWrite);
        }
    }

    /// Which primitive stores how many bytes.
    pub fn plan(&self) -> CopyPlan {
        self.plan
    }

    /// Uses the plan that was measured as best here. Panics if it does not make stores durable.
    pub fn set_plan(&mut self, plan: CopyPlan) {
        let needs_flush = CAN_FLUSH && self.medium.persistence == Persistence::Cpu;
        assert!(!needs_flush || plan.is_durable(), "plain stores are not durable here");
        self.plan = plan;
    }

    /// An error unless the medium is whole.
    fn check_whole(&self) -> std::result::Result<(), Status> {
        if self.has_lost_part() { Err(Status::Io) } else { Ok(()) }
    }

    fn has_lost_part(&self) -> bool {
        self.mapping.watch.has_damage() || self.whole.is_cut()
    }

    /// Lets `copy` take the `len` bytes at `at`, whose address it is given: they are mapped for as
    /// long as the call lasts. It says whether it could.
    #[inline]
    fn load_with(
        &self,
        at: u64,
        len: usize,
        copy: impl FnOnce(*const u8) -> bool,
    ) -> std::result::Result<(), Status> {
        let place = self.mapping.place(at, len as u64);
        let range = place.addr()..place.addr() + len;
        // Before: so that lost pages are touched a bounded number of times. After: because this
        // load itself may have found the damage.
        let is_there = self.start + at + len as u64 <= self.whole.left_bytes();
        if !is_there || self.mapping.watch.is_damaged(range.clone()) {
            return Err(Status::Io);
        }
        let is_copied = copy(place);
        if is_copied && !self.mapping.watch.is_damaged(range) {
            return Ok(());
        }
        // Then loads beyond the new end fail without touching each page there.
        self.whole.look(&self.file);
        Err(Status::Io)
    }

    /// The address of a range to store to; `None` if nothing can be stored any more.
    fn place_for_store(&self, at: u64, len: u64) -> Option<*mut u8> {
        assert_eq!(self.access, Access::Exclusive, "a medium opened to look at is not stored to");
        let place = self.mapping.place(at, len);
        (!self.has_lost_part()).then_some(place)
    }
}

impl Pmem for DaxPmem {
    fn len_bytes(&self) -> u64 {
        self.mapping.len_bytes
    }

    fn medium(&self) -> &Medium {
        &self.medium
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        let Some(place) = self.place_for_store(at, bytes.len() as u64) else { return };
        // SAFETY: `place` checked the range; the mapping is writable (Access::Exclusive), lives as
        // long as `self`, and is no Rust object, so `bytes` cannot overlap it. Every plan's
        // primitives are available.
        unsafe { copy::copy_raw(self.plan.choose(bytes.len()), place, bytes) }
    }

    fn store_shared(&self, at: u64, from: SharedBytes<'_>) -> u32 {
        let len = from.len();
        // Without a place nothing is stored, and the next drain says so.
        let words = self.place_for_store(at, len as u64).map_or([0; 3], |place| {
            // SAFETY: as in `store`; and this mapping is no other one.
            unsafe { copy::copy_shared(self.plan.choose(len), place, from) }
        });
        mix_look(words)
    }

    fn zero(&self, at: u64, len: u64) {
        let Some(place) = self.place_for_store(at, len) else { return };
        // SAFETY: as in `store`.
        unsafe { copy::zero_raw(self.plan.choose(len as usize), place, len as usize) }
    }

    fn load(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), Status> {
        self.load_with(at, into.len(), |place| {
            // SAFETY: `load_with` gives out a place with as many bytes.
            unsafe { copy::load_raw(place, into) };
            true
        })
    }

    fn load_shared(&self, at: u64, into: Sink<'_>) -> std::result::Result<(), Status> {
        // SAFETY: as in `load`, and this mapping is no other one.
        self.load_with(at, into.len(), |place| unsafe { into.copy_from(place) })
    }

    fn drain(&self) -> std::result::Result<(), Status> {
        if self.medium.persistence == Persistence::Cpu {
            copy::fence();
        }
        self.check_whole()
    }

    fn sync(&self) -> std::result::Result<(), Status> {
        self.check_whole()?;
        if self.medium.persistence == Persistence::Cpu || self.access != Access::Exclusive {
            return Ok(());
        }
        let mut has_failed = lock(&self.has_sync_failed);
        *has_failed = *has_failed || self.mapping.sync().is_err();
        if *has_failed { Err(Status::Io) } else { self.check_whole() }
    }

    fn has_given_up(&self) -> bool {
        *lock(&self.has_sync_failed)
    }

    fn failure(&self) -> Option<String> {
        let name = &self.medium.name;
        if let Some(loss) = self.whole.loss(&self.file) {
            return Some(format!("cache device {name} failed: it {loss}"));
        }
        let damages = self.mapping.watch.damages();
        if damages > 0 {
            return Some(format!(
                "cache device {name} failed: {damages} of its pages could not be reached (cut \
                 off or unreadable)"
            ));
        }
        let has_sync_failed = *lock(&self.has_sync_failed);
        has_sync_failed.then(|| format!("cache device {name} failed: msync reported an error"))
    }

    fn copies(&self) -> Option<String> {
        Some(self.plan.to_string())
    }

    fn open_as(&self) -> Option<String> {
        Some(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    fn begins_at(&self) -> u64 {
        self.start
    }

    fn is_deleted(&self) -> bool {
        self.whole.absence(&self.file) == Some(Absence::Deleted)
    }
}

/// The whole medium, mapped and watched.
#[derive(Debug)]
struct Mapping {
    // The watch ends before the region is unmapped and its addresses may become somebody else's:
    // fields drop in this order.
    watch: Watch,
    region: Region,
    /// Where in the region the medium begins: within its first page.
    lead: u64,
    len_bytes: u64,
    page_bytes: usize,
    /// The kernel accepted MAP_SYNC: file-system metadata needs no sync of its own for a flushed
    /// store to be found again.
    is_synchronous: bool,
}

/// Mapped addresses, unmapped when dropped.
#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    /// A multiple of the medium's pages.
    mapped_bytes: usize,
}

// SAFETY: the mapping belongs to this value, and is accessed through raw pointers by code that
// allows for concurrent stores.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Mapping {
    fn new(opened: &Opened, access: Access) -> Result<Mapping> {
        let too_large = || Error::new(Kind::Unsupported, format!("{} is too large", opened.name));
        let lead = opened.start % opened.page_bytes as u64;
        let mapped_bytes = usize::try_from(opened.len_bytes + lead)
            .ok()
            .and_then(|len| len.checked_next_multiple_of(opened.page_bytes))
            .ok_or_else(too_large)?;
        let protection = match access {
            Access::ReadOnly | Access::Shared => ProtFlags::READ,
            Access::Exclusive => ProtFlags::READ | ProtFlags::WRITE,
        };
        let map = |flags| {
            // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
            unsafe {
                mmap(
                    ptr::null_mut(),
                    mapped_bytes,
                    protection,
                    flags,
                    &opened.file,
                    opened.start - lead,
                )
            }
        };
        // A kernel that cannot promise MAP_SYNC refuses it, in this combination of flags.
        let (start, is_synchronous) = match map(MapFlags::SHARED_VALIDATE | MapFlags::SYNC) {
            Ok(start) => (start, true),
            Err(_) => {
                let start = map(MapFlags::SHARED)
                    .map_err(|e| Error::from_io("map cache device", &opened.name, e.into()))?;
                (start, false)
            }
        };
        let start = NonNull::new(start.cast::<u8>()).expect("mmap maps nothing at address 0");
        let region = Region { start, mapped_bytes };
        // SAFETY: the region was just mapped in whole pages, is accessed as volatile memory only,
        // and outlives the watch.
        let watch =
            unsafe { watch(start.as_ptr(), mapped_bytes, opened.page_bytes, Watched::Medium)? };
        let Opened { len_bytes, page_bytes, .. } = *opened;
        Ok(Mapping { watch, region, lead, len_bytes, page_bytes, is_synchronous })
    }

    /// The address of a range, which must lie within the medium.
    fn place(&self, at: u64, len: u64) -> *mut u8 {
        let is_inside = at <= self.len_bytes && len <= self.len_bytes - at;
        assert!(is_inside, "{at}+{len} is beyond a medium of {} bytes", self.len_bytes);
        // SAFETY: `at` is within the medium, or one past its end, and that within the mapping.
        unsafe { self.region.start.as_ptr().add((self.lead + at) as usize) }
    }

    fn sync(&self) -> rustix::io::Result<()> {
        let Region { start, mapped_bytes } = self.region;
        // SAFETY: the range is ours; msync changes no memory.
        unsafe { msync(start.as_ptr().cast(), mapped_bytes, MsyncFlags::SYNC) }
    }

    /// Advises about the pages that a range touches.
    fn advise(&self, at: u64, len: u64, advice: Advice) -> rustix::io::Result<()> {
        let page_bytes = self.page_bytes;
        let start = self.place(at, len).map_addr(|address| address / page_bytes * page_bytes);
        let end = (at + len).next_multiple_of(page_bytes as u64);
        let len = end - at / page_bytes as u64 * page_bytes as u64;
        // SAFETY: whole pages of the region, and none of the advices used in this file changes
        // their content.
        unsafe { madvise(start.cast(), len as usize, advice) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `Mapping::new`, and nobody else has its address. Failure would leak.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// The text after a device's name in a table that asks for `options`.
fn suffix(options: &DaxOptions) -> String {
    let persistence = options.persistence.map(|persistence| match persistence {
        Persistence::Cpu => "persist=cpu".to_owned(),
        Persistence::Msync => "persist=msync".to_owned(),
    });
    let words: Vec<String> = persistence.into_iter().chain(options.area.words()).collect();
    if words.is_empty() { String::new() } else { format!("?{}", words.join("&")) }
}

/// Whether stores go straight to memory, so that mapping all pages costs no I/O.
fn is_memory(opened: &Opened, mapping: &Mapping) -> bool {
    matches!(opened.nature, Nature::Memory(_) | Nature::DaxDevice { .. }) || mapping.is_synchronous
}

/// Whether a file has fewer blocks than bytes.
fn has_holes(opened: &Opened) -> bool {
    matches!(opened.nature, Nature::Memory(_) | Nature::File)
        && opened.file.metadata().is_ok_and(|metadata| metadata.blocks() * 512 < metadata.len())
}

/// Reserves the blocks of a sparse file, so that no store finds the file system full.
fn reserve_blocks(opened: &Opened) -> Result<()> {
    if !has_holes(opened) {
        return Ok(());
    }
    match fallocate(&opened.file, FallocateFlags::empty(), opened.start, opened.len_bytes) {
        // A file system that cannot reserve is used as it is; a store that finds it full damages
        // the medium, and is reported.
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(Errno::NOSPC) => Err(no_room(opened)),
        Err(e) => Err(Error::from_io("reserve space for cache device", &opened.name, e.into())),
    }
}

fn no_room(opened: &Opened) -> Error {
    let message = format!(
        "cache device {} is a sparse file of {} bytes, and its file system has no room for them",
        opened.name, opened.len_bytes
    );
    Error::new(Kind::NoSpace, message)
}

/// Gives a medium in memory all its pages, and maps them if they are not too many.
fn fill_memory(opened: &Opened, mapping: &Mapping) -> Result<()> {
    if opened.len_bytes > PREFAULT_BYTES_MAX {
        return reserve_blocks(opened);
    }
    match mapping.advise(0, opened.len_bytes, Advice::LinuxPopulateWrite) {
        Ok(()) => Ok(()),
        // Kernels before 5.14 do not know it.
        Err(Errno::INVAL) => reserve_blocks(opened),
        Err(Errno::FAULT | Errno::NOMEM) if has_holes(opened) => Err(no_room(opened)),
        // Unreadable pages are found again, and reported, by the loads that need them.
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
#[path = "dax_tests.rs"]
mod tests;
