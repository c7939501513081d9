//! Real memory: a DAX device, or a file, mapped.
//!
//! 1. The mapping is accessed as `*mut u8` and through `copy` only; no reference to it exists, so
//!    other threads and processes may store to it, and the medium may fail, at any time.
//! 2. Every range is checked against the medium's length before an address is made of it.
//! 3. A medium that failed once (a page could not be read, was cut off, or a sync failed) is never
//!    trusted again: every later `drain` and `sync` fails. Loads of other pages still work. Loads
//!    of a part that was cut off fail, even if the medium is extended again.
//! 4. After damage was seen, stores are dropped, because they could not become durable any more. A
//!    file that was cut and extended to its old length between two accesses has holes: a load that
//!    finds zeroes, and a sync, compare the space that the file takes. Loading from a hole may fill
//!    it, so from then on no zeroes are trusted.
//! 5. A store never meets a full file system, because blocks are reserved when the medium is
//!    opened. In a file with data and holes they are reserved after the data was inspected, because
//!    reserving fills the holes.
//!
//! `media` determines the kind of the medium and locks it; `sigbus` handles SIGBUS.

#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::ptr::{self, NonNull};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, msync, munmap};

use super::copy::{self, CAN_FLUSH, CopyPlan, Primitive, SharedBytes};
use super::copy_target::CopyTarget;
use super::media::{self, Access, Nature, Opened};
use super::{Medium, Persistence, Pmem};
use crate::base::area::Area;
use crate::base::fingerprint::mix_fingerprint;
use crate::disk::whole::{Absence, Whole};
use crate::error::{Error, Kind, Result, Status};
use crate::pmem::sigbus::{Watch, Watched, watch};
use crate::sync::statics::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};
use crate::units::{MIB, SECTOR};

/// Media in memory up to this size are mapped page by page when opened, so that no later request
/// pays for it: about 10 ms. Larger ones would make the first request wait; for those the server
/// calls [`DaxPmem::prefault`] while it already serves.
const PREFAULT_BYTES_MAX: u64 = 32 * MIB;

/// A sector may be zeroes if its first bytes are.
const WORD: usize = 8;

/// The user's own choices.
#[derive(Clone, Copy, Debug, Default)]
pub struct DaxOptions {
    /// The method that makes stores durable, overriding the detected one (`?persist=`).
    pub persistence: Option<Persistence>,
    /// The part that is meant. It begins at a page of the medium.
    pub area: Area,
}

/// A mapped cache device.
#[derive(Debug)]
pub struct DaxPmem {
    // Unmapped before the file is closed and its lock is gone: fields drop in this order.
    mapping: Mapping,
    opened: Opened,
    whole: Whole,
    /// Holes of the file when it was opened, in order: start and end on the medium.
    holes: Vec<(u64, u64)>,
    /// The blocks of the file are reserved, so its holes do not show a loss any more.
    is_reserved: AtomicBool,
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

    /// Opens `path` to read, while no process may change it. Storing to it is a bug.
    pub fn open_shared(path: &Path, options: DaxOptions) -> Result<DaxPmem> {
        DaxPmem::map(path, Access::Shared, options)
    }

    fn map(path: &Path, access: Access, options: DaxOptions) -> Result<DaxPmem> {
        let opened = media::open(path, access, options.area)?;
        let whole = Whole::new(path, &opened.file, opened.whole_bytes);
        // Before they are filled.
        let (start, end) = (opened.start, opened.start + opened.len_bytes);
        let within = |(from, to): (u64, u64)| (from.max(start), to.min(end));
        let holes = whole.holes(&opened.file).into_iter().map(within);
        let holes =
            holes.filter(|(from, to)| from < to).map(|(from, to)| (from - start, to - start));
        let holes: Vec<(u64, u64)> = holes.collect();
        let mapping = Mapping::new(&opened, access)?;
        let durability = media::decide(
            opened.nature,
            mapping.is_synchronous,
            options.persistence,
            &opened.name,
        )?;
        // Small core dumps and huge pages are optional; kernels without them work as well.
        let _ = mapping.advise(0, opened.len_bytes, Advice::LinuxDontDump);
        let is_memory = is_memory(&opened, &mapping);
        let plan = match durability.persistence {
            Persistence::Cpu => CopyPlan::usual(),
            Persistence::Msync => CopyPlan::only(Primitive::Plain),
        };
        let medium = Medium {
            name: opened.name.clone(),
            persistence: durability.persistence,
            is_volatile: durability.is_volatile,
            description: durability.description,
            kernel_name: opened.kernel_name.clone() + &suffix(&options),
        };
        // Data of a file may have been in its holes, so the file's content is inspected before they
        // are filled.
        let is_fresh = holes.iter().all(|hole| *hole == (0, opened.len_bytes));
        let pmem = DaxPmem {
            mapping,
            opened,
            whole,
            holes,
            is_reserved: AtomicBool::new(false),
            medium,
            access,
            is_memory,
            plan,
            has_sync_failed: Mutex::new(false),
        };
        if is_fresh {
            pmem.reserve()?;
        }
        Ok(pmem)
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

    /// Lets `copy` take the `len` bytes at `at`, whose address it gets: they are mapped for as long
    /// as the call lasts. It returns whether it succeeded.
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
        let is_there = self.opened.start + at + len as u64 <= self.whole.left_bytes();
        if !is_there || self.mapping.watch.is_damaged(range.clone()) {
            return Err(Status::Io);
        }
        let is_copied = copy(place);
        if is_copied && !self.mapping.watch.is_damaged(range) {
            return self.believe(at, place, len);
        }
        // Then loads beyond the new end fail without touching each page there.
        self.whole.look(&self.opened.file);
        Err(Status::Io)
    }

    fn holes(&self) -> &[(u64, u64)] {
        if self.is_reserved.load(Ordering::SeqCst) { &[] } else { &self.holes }
    }

    /// Data loaded from a range, mapped at `place`, counts unless it has zeroes and the file has
    /// holes.
    fn believe(&self, at: u64, place: *const u8, len: usize) -> std::result::Result<(), Status> {
        if !self.may_have_zeroes(at, place, len) {
            return Ok(());
        }
        if !self.whole.is_hollow() && self.whole.look(&self.opened.file) {
            return Ok(());
        }
        let is_there = self.opened.start + at + len as u64 <= self.whole.left_bytes();
        let mut sectors = (0..len).step_by(SECTOR as usize);
        let is_lost = self.whole.is_hollow()
            && sectors
                .any(|from| self.is_zero(at + from as u64, (len - from).min(SECTOR as usize)));
        if is_there && !is_lost { Ok(()) } else { Err(Status::Io) }
    }

    /// Whether a sector of this range may be zeroes. A cheap check of each sector's first word.
    #[inline]
    fn may_have_zeroes(&self, at: u64, place: *const u8, len: usize) -> bool {
        if place.addr().is_multiple_of(WORD) && len.is_multiple_of(WORD) {
            // SAFETY: the caller's `place` is the address of the range, which was checked; the
            // mapping lives as long as `self`, and both ends of the range are aligned.
            return unsafe { copy::has_zero_word(place, len, SECTOR as usize) };
        }
        let mut sectors = (0..len).step_by(SECTOR as usize);
        sectors.any(|from| self.is_zero(at + from as u64, (len - from).min(WORD)))
    }

    /// Whether these bytes, of a sector at most, are zeroes.
    #[inline]
    fn is_zero(&self, at: u64, len: usize) -> bool {
        let mut bytes = [1; SECTOR as usize];
        let place = self.mapping.place(at, len as u64);
        // SAFETY: `place` checked the range, and the mapping lives as long as `self`.
        unsafe { copy::load_raw(place, &mut bytes[..len]) };
        bytes[..len].iter().all(|byte| *byte == 0)
    }

    /// The address of a range to store to; `None` if the medium takes no stores any more.
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
        // long as `self`, and is not a Rust object, so `bytes` cannot overlap it. Every plan's
        // primitives are available.
        unsafe { copy::copy_raw(self.plan.choose(bytes.len()), place, bytes) }
    }

    fn store_shared(&self, at: u64, from: SharedBytes<'_>) -> u32 {
        let len = from.len();
        // Without an address the bytes are not stored, and the next drain returns an error.
        let words = self.place_for_store(at, len as u64).map_or([0; 3], |place| {
            // SAFETY: as in `store`; and this mapping is a different one.
            unsafe { copy::copy_shared(self.plan.choose(len), place, from) }
        });
        mix_fingerprint(words)
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

    fn probe(&self, at: u64, into: &mut [u8]) -> std::result::Result<(), Status> {
        // Through the file: an unreadable page of the mapping would be a damage (SIGBUS).
        let start = self.opened.start + at;
        self.opened.file.read_exact_at(into, start).map_err(|_| Status::Io)
    }

    fn load_shared(&self, at: u64, into: CopyTarget<'_>) -> std::result::Result<(), Status> {
        // SAFETY: as in `load`, and this mapping is a different one.
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
        if self.access != Access::Exclusive {
            return Ok(());
        }
        if self.medium.persistence == Persistence::Cpu {
            // Calls are frequent on such a medium, where a sync costs little else.
            return self.whole.glance(&self.opened.file, 0).then_some(()).ok_or(Status::Io);
        }
        let mut has_failed = lock(&self.has_sync_failed);
        *has_failed = *has_failed || self.mapping.sync().is_err();
        let is_whole = self.whole.look(&self.opened.file) && !self.has_lost_part();
        if *has_failed || !is_whole { Err(Status::Io) } else { Ok(()) }
    }

    fn has_given_up(&self) -> bool {
        *lock(&self.has_sync_failed)
    }

    fn failure(&self) -> Option<String> {
        let name = &self.medium.name;
        if let Some(loss) = self.whole.loss(&self.opened.file) {
            return Some(format!("cache device {name} failed: it {loss}"));
        }
        let damages = self.mapping.watch.damages();
        if damages > 0 {
            return Some(format!(
                "cache device {name} failed: {damages} of its pages are inaccessible (truncated or \
                 unreadable)"
            ));
        }
        let has_sync_failed = *lock(&self.has_sync_failed);
        has_sync_failed.then(|| format!("cache device {name} failed: msync reported an error"))
    }

    fn copies(&self) -> Option<String> {
        Some(self.plan.to_string())
    }

    fn was_hole(&self, at: u64, len: u64) -> bool {
        let holes = self.holes();
        let nth = holes.partition_point(|(_, end)| *end <= at);
        holes.get(nth).is_some_and(|(start, _)| *start < at + len)
    }

    fn hole_at_end(&self) -> Option<u64> {
        let (start, end) = *self.holes().last()?;
        (end == self.len_bytes()).then_some(start)
    }

    fn reserve(&self) -> Result<()> {
        if self.access != Access::Exclusive || self.is_reserved.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let Opened { nature, len_bytes, file, .. } = &self.opened;
        if *nature == Nature::File {
            reserve_blocks(&self.opened)?;
        }
        if self.is_memory {
            let _ = self.mapping.advise(0, *len_bytes, Advice::LinuxHugepage);
            fill_memory(&self.opened, &self.mapping)?;
        }
        self.whole.reserved(file);
        Ok(())
    }

    fn open_as(&self) -> Option<String> {
        Some(format!("/proc/{}/fd/{}", std::process::id(), self.opened.file.as_raw_fd()))
    }

    fn begins_at(&self) -> u64 {
        self.opened.start
    }

    fn is_deleted(&self) -> bool {
        self.whole.absence(&self.opened.file) == Some(Absence::Deleted)
    }
}

/// The whole medium, mapped and watched.
#[derive(Debug)]
struct Mapping {
    // The watch ends before the region is unmapped and its addresses may be used for another
    // mapping: fields drop in this order.
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
            // SAFETY: a new mapping at an address of the kernel's choice does not alias our memory.
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
        let start = NonNull::new(start.cast::<u8>()).expect("mmap never returns address 0");
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
        // SAFETY: mapped by `Mapping::new`, which has the only copy of its address. Failure would
        // leak.
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
        // If the file system cannot reserve space, the file is used without. A store that finds the
        // file system full then damages the medium, and is reported.
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(Errno::NOSPC) => Err(no_room(opened)),
        Err(e) => Err(Error::from_io("reserve space for cache device", &opened.name, e.into())),
    }
}

fn no_room(opened: &Opened) -> Error {
    let message = format!(
        "cache device {} is a sparse file of {} bytes, and its file system lacks the space",
        opened.name, opened.len_bytes
    );
    Error::new(Kind::NoSpace, message)
}

/// Allocates all pages of a medium in memory, and maps them if they are not too many.
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
