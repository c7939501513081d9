//! Memory of another process that is mapped here as well, usually the memory of a virtual machine.
//!
//! The owner may store to this memory at any time, and may cut it short. So:
//!
//! 1. All loads and stores go through calls that take ranges, and through atomics. No reference to
//!    plain bytes exists. Two loads of the same byte may differ, so a caller copies first and then
//!    checks the copy.
//! 2. Each range is checked against the length by an assertion: callers validate the numbers of
//!    other processes before.
//! 3. Bytes that were cut off read as zeroes instead of raising SIGBUS (see `sigbus`), and
//!    [`ClientMemory::has_damage`] returns true from then on. A caller checks it after each load or
//!    store.
//! 4. Only files that live entirely in memory are mapped, so no access waits for a disk, a network
//!    or another process.
//!
//! [`Shown`] is memory that a kernel driver maps for us; it is only loaded.

#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{Error, Kind, Result};
use crate::pmem::copy::{self, SharedBytes};
use crate::pmem::sigbus::{FOREIGN_MAX, Watch, Watched, watch};
use crate::ring::{UBLK_MEMORY_BYTES, ublk_memory};
use crate::sync::statics::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A process maps at most this many.
pub const MAPPINGS_MAX: usize = FOREIGN_MAX;

const HUGETLBFS: u64 = 0x9584_58F6;
/// Magic numbers of file systems in memory, as statfs(2) returns them: tmpfs (and memfd), ramfs,
/// hugetlbfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58F6, HUGETLBFS];

/// A mapped part of a file that is memory.
#[derive(Debug)]
pub struct ClientMemory {
    // The watch ends before the region is unmapped: fields drop in this order.
    watch: Watch,
    region: Region,
    /// Where in the region the part begins: within its first page.
    lead: usize,
    len: usize,
}

/// A range of such memory, to copy from. After the copy, [`Source::is_whole`] tells whether the
/// memory was present.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    memory: &'a ClientMemory,
    bytes: SharedBytes<'a>,
}

#[derive(Debug)]
struct Region {
    start: NonNull<u8>,
    mapped_bytes: usize,
}

// SAFETY: the mapping belongs to this value, and is accessed through atomics and through copies
// that allow for concurrent stores.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl ClientMemory {
    /// Maps `len` bytes of `file` at `offset`, to load and to store.
    pub fn map(file: &OwnedFd, offset: u64, len: u64) -> Result<ClientMemory> {
        let page_bytes = check(file, offset, len)?;
        let lead = offset % page_bytes;
        let too_large = || Error::new(Kind::Unsupported, format!("{len} bytes are too many"));
        let mapped = (len + lead).checked_next_multiple_of(page_bytes).ok_or_else(too_large)?;
        let mapped_bytes = usize::try_from(mapped).map_err(|_| too_large())?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases none of our memory.
        let start = unsafe {
            let null = std::ptr::null_mut();
            mmap(null, mapped_bytes, protection, MapFlags::SHARED, file, offset - lead)
        };
        let start = start.map_err(|errno| Error::from_io("mapping", "its memory", errno.into()))?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap never returns address 0");
        let region = Region { start, mapped_bytes };
        // SAFETY: the region was just mapped in whole pages, is accessed as volatile memory only,
        // and outlives the watch.
        let watch = unsafe {
            watch(start.as_ptr(), mapped_bytes, page_bytes as usize, Watched::ClientMemory)?
        };
        Ok(ClientMemory { watch, region, lead: lead as usize, len: len as usize })
    }

    /// Bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// Describes the pages of this memory so that ublk's driver recognises them. The driver holds
    /// the pages, but does not load from them or store to them.
    pub fn ublk_memory(&self) -> [u8; UBLK_MEMORY_BYTES] {
        let address = self.region.start.as_ptr().expose_provenance() + self.lead;
        ublk_memory(address as u64, self.len as u64)
    }

    /// Whether any of this memory was ever cut off or unreadable.
    #[inline]
    pub fn has_damage(&self) -> bool {
        self.watch.has_damage()
    }

    /// Whether the address of `at` in memory is a multiple of `align` (a power of two).
    pub fn is_aligned(&self, at: u64, align: u64) -> bool {
        (self.lead as u64).wrapping_add(at).is_multiple_of(align)
    }

    /// Copies out of it.
    #[inline]
    pub fn load(&self, at: u64, into: &mut [u8]) {
        let place = self.place(at, into.len());
        // SAFETY: `place` checked the range; the mapping lives as long as `self`.
        unsafe { copy::load_raw(place, into) }
    }

    /// Copies into it.
    #[inline]
    pub fn store(&self, at: u64, bytes: &[u8]) {
        let place = self.place(at, bytes.len());
        // SAFETY: `place` checked the range; the mapping lives as long as `self`, and is not a Rust
        // object, so `bytes` cannot overlap it.
        unsafe { copy::store_shared(place, bytes) }
    }

    /// A range of it, to copy to.
    #[inline]
    pub fn shared(&self, at: u64, len: usize) -> SharedBytes<'_> {
        // SAFETY: `place` checked the range; the mapping lives as long as `self`, and is not a Rust
        // object.
        unsafe { SharedBytes::new(self.place(at, len), len) }
    }

    /// A range of it, to copy from.
    #[inline]
    pub fn source(&self, at: u64, len: usize) -> Source<'_> {
        Source { memory: self, bytes: self.shared(at, len) }
    }

    /// The two bytes at `at`, which is a multiple of two.
    #[inline]
    pub fn u16_at(&self, at: u64) -> &AtomicU16 {
        let place = self.aligned_place(at, 2);
        // SAFETY: checked range and alignment; the mapping lives as long as `self`, and its owner
        // stores to such words as atomics too.
        unsafe { AtomicU16::from_ptr(place.cast()) }
    }

    /// The four bytes at `at`, which is a multiple of four.
    #[inline]
    pub fn u32_at(&self, at: u64) -> &AtomicU32 {
        let place = self.aligned_place(at, 4);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(place.cast()) }
    }

    /// The eight bytes at `at`, which is a multiple of eight.
    #[inline]
    pub fn u64_at(&self, at: u64) -> &AtomicU64 {
        let place = self.aligned_place(at, 8);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }

    fn aligned_place(&self, at: u64, bytes: usize) -> *mut u8 {
        let place = self.place(at, bytes);
        assert!(place.addr().is_multiple_of(bytes), "a word of {bytes} bytes at {at}");
        place
    }

    /// The address of a range, which must lie within the memory.
    fn place(&self, at: u64, len: usize) -> *mut u8 {
        let is_inside = at <= self.len as u64 && len <= self.len - at as usize;
        assert!(is_inside, "{at}+{len} is beyond memory of {} bytes", self.len);
        // SAFETY: `at` is within the part, or one past its end, and that within the mapping.
        unsafe { self.region.start.as_ptr().add(self.lead + at as usize) }
    }
}

impl<'a> Source<'a> {
    /// Its bytes.
    #[inline]
    pub fn bytes(self) -> SharedBytes<'a> {
        self.bytes
    }

    /// The bytes `from..from + len` of it. Panics if the range is not within it.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Source<'a> {
        Source { bytes: self.bytes.part(from, len), ..self }
    }

    /// The memory that it is of.
    pub fn memory(self) -> &'a ClientMemory {
        self.memory
    }

    /// Whether none of its memory was ever cut off, which means that the copy is complete.
    #[inline]
    pub fn is_whole(self) -> bool {
        !self.memory.has_damage()
    }
}

/// Memory that the driver of a character device maps for us, only to be loaded. The driver must not
/// shrink it while it is mapped.
#[derive(Debug)]
pub struct Shown {
    region: Region,
}

impl Shown {
    /// Maps `len` bytes of `file` at `offset`, in whole pages.
    pub fn map(file: &OwnedFd, offset: u64, len: usize) -> Result<Shown> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_io("mapping", "the memory of a driver", errno.into())
        };
        let kind = FileType::from_raw_mode(fstat(file).map_err(failed)?.st_mode);
        if kind != FileType::CharacterDevice {
            return Err(Error::new(Kind::Unsupported, "it is not a character device"));
        }
        let mapped_bytes = len.next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping at an address of the kernel's choice aliases none of our memory.
        let start = unsafe {
            let null = std::ptr::null_mut();
            mmap(null, mapped_bytes, ProtFlags::READ, MapFlags::SHARED, file, offset)
        };
        let start = start.map_err(failed)?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap never returns address 0");
        Ok(Shown { region: Region { start, mapped_bytes } })
    }

    /// The four bytes at `at`, which is a multiple of four.
    #[inline]
    pub fn u32_at(&self, at: usize) -> u32 {
        let is_inside = at.is_multiple_of(4) && at <= self.region.mapped_bytes - 4;
        assert!(is_inside, "four bytes at {at} of {}", self.region.mapped_bytes);
        // SAFETY: checked range and alignment, and the mapping lives as long as `self`. The mapping
        // is read-only, and this code does not store through it.
        let word = unsafe { AtomicU32::from_ptr(self.region.start.as_ptr().add(at).cast()) };
        word.load(Ordering::Relaxed)
    }

    /// The eight bytes at `at`, which is a multiple of four.
    #[inline]
    pub fn u64_at(&self, at: usize) -> u64 {
        u64::from(self.u32_at(at + 4)) << 32 | u64::from(self.u32_at(at))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `ClientMemory::map`, which has the only copy of its address. Failure
        // would leak.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Whether the part exists and is memory. Returns the length in whole pages.
fn check(file: &OwnedFd, offset: u64, len: u64) -> Result<u64> {
    let failed = |errno: rustix::io::Errno| Error::from_io("examining", "a file", errno.into());
    let stat = fstat(file).map_err(failed)?;
    let system = fstatfs(file).map_err(failed)?;
    let magic = system.f_type as u64 & 0xFFFF_FFFF;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || !IN_MEMORY.contains(&magic) {
        let message = "it is not memory: use a memfd, or a file on tmpfs or hugetlbfs";
        return Err(Error::new(Kind::Unsupported, message));
    }
    let bytes = stat.st_size as u64;
    if len == 0 || offset.checked_add(len).is_none_or(|end| end > bytes) {
        let message = format!("{len} bytes at {offset} are not in a file of {bytes} bytes");
        return Err(Error::new(Kind::Invalid, message));
    }
    let page_bytes = if magic == HUGETLBFS { system.f_bsize as u64 } else { 0 };
    Ok(page_bytes.max(rustix::param::page_size() as u64))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(bytes: u64) -> OwnedFd {
        let file = memfd_create("foreign", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    }

    #[test]
    fn what_one_mapping_stores_the_other_loads() {
        let file = memfd(64 << 10);
        let (one, other) =
            (ClientMemory::map(&file, 0, 64 << 10), ClientMemory::map(&file, 5000, 10_000));
        let (one, other) = (one.unwrap(), other.unwrap());
        one.store(5001, b"some words");
        let mut bytes = [0; 10];
        other.load(1, &mut bytes);
        assert_eq!(&bytes, b"some words");
        let many: Vec<u8> = (0..9000).map(|byte| (byte % 251) as u8).collect();
        other.store(7, &many);
        let mut loaded = vec![0; 9000];
        one.load(5007, &mut loaded);
        assert_eq!(loaded, many);
        one.u16_at(6000).store(77, Ordering::Release);
        assert_eq!(other.u16_at(1000).load(Ordering::Acquire), 77);
        one.u64_at(8000).store(1 << 40, Ordering::Relaxed);
        assert_eq!(one.u32_at(8004).load(Ordering::Relaxed), 1 << 8);
        let address = |memory: &ClientMemory| {
            u64::from_le_bytes(*memory.ublk_memory().first_chunk().unwrap())
        };
        assert!(address(&one) % 4096 == 0 && address(&other) % 4096 == 5000 % 4096);
        assert!(other.is_aligned(0, 8) && !other.is_aligned(4, 8) && !other.is_aligned(0, 16));
    }

    #[test]
    fn memory_that_is_cut_short_becomes_zeroes_and_says_so() {
        let file = memfd(64 << 10);
        let memory = ClientMemory::map(&file, 0, 64 << 10).unwrap();
        memory.store(40 << 10, b"x");
        ftruncate(&file, 8 << 10).unwrap();
        let mut byte = [1];
        memory.load(4 << 10, &mut byte);
        assert!(!memory.has_damage());
        memory.load(40 << 10, &mut byte);
        assert_eq!((byte, memory.has_damage()), ([0], true));
        memory.store(50 << 10, b"y");
        memory.u16_at(60 << 10).store(1, Ordering::Relaxed);
    }

    #[test]
    fn only_memory_is_mapped_and_only_what_is_there() {
        let refused = |file: &OwnedFd, offset, len| {
            ClientMemory::map(file, offset, len).unwrap_err().to_string()
        };
        let file = memfd(8192);
        for (offset, len) in [(0, 0), (0, 8193), (8192, 1), (u64::MAX, 2), (1, u64::MAX)] {
            let error = refused(&file, offset, len);
            assert!(error.contains("are not in a file of 8192 bytes"), "{error}");
        }
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert!(refused(&eventfd, 0, 1).contains("is not memory"));
        let mut disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        disk.write_all(&[0; 8192]).unwrap();
        assert!(refused(&disk.into(), 0, 4096).contains("is not memory"));
    }

    #[test]
    fn a_driver_shows_what_is_loaded_and_a_file_does_not() {
        let zero: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();
        let shown = Shown::map(&zero, 0, 100).unwrap();
        assert_eq!((shown.u32_at(4092), shown.u64_at(0)), (0, 0), "in whole pages");
        assert!(Shown::map(&memfd(8192), 0, 100).unwrap_err().to_string().contains("character"));
    }

    #[test]
    #[should_panic(expected = "four bytes at 4096 of 4096")]
    fn nothing_is_loaded_beyond_the_end_of_what_is_shown() {
        let zero: OwnedFd = std::fs::File::open("/dev/zero").unwrap().into();
        Shown::map(&zero, 0, 100).unwrap().u32_at(4096);
    }

    #[test]
    #[should_panic(expected = "is beyond memory of 100 bytes")]
    fn ranges_beyond_the_end_are_a_bug() {
        ClientMemory::map(&memfd(8192), 0, 100).unwrap().load(99, &mut [0; 2]);
    }
}
