//! Memory of another process that is mapped here too: a virtual machine's, mostly.
//!
//! Its owner may store to it at any time, and may cut it short. So:
//!
//! 1. It is loaded and stored through calls that take ranges, and through atomics; no reference to
//!    plain bytes exists. What is loaded twice may differ: a user copies first, then checks.
//! 2. Each range is checked against the length by assertion: users check what others say before.
//! 3. Bytes that were cut off become zeroes of our own instead of a SIGBUS (`sigbus`), and
//!    [`Foreign::has_damage`] says so from then on. A user asks after it has loaded or stored.
//! 4. Only files that are nothing but memory are mapped: no access waits for a disk, a network or
//!    another process.
//!
//! What a driver of the kernel shows of its own memory is [`Shown`]: that is loaded alone.

#![allow(unsafe_code)]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{FileType, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{Error, Kind, Result};
use crate::pmem::copy::{self, SharedBytes};
use crate::ring::{UBLK_MEMORY_BYTES, ublk_memory};
use crate::sigbus::{FOREIGN_MAX, Watch, Watched, watch};
use crate::sync::statics::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A process maps at most this many.
pub const MAPPINGS_MAX: usize = FOREIGN_MAX;

const HUGETLBFS: u64 = 0x9584_58F6;
/// Magic numbers of file systems in memory, as in statfs(2): tmpfs (and memfd), ramfs, hugetlbfs.
const IN_MEMORY: [u64; 3] = [0x0102_1994, 0x8584_58F6, HUGETLBFS];

/// A mapped part of a file that is memory.
#[derive(Debug)]
pub struct Foreign {
    // The watch ends before the region is unmapped: fields drop in this order.
    watch: Watch,
    region: Region,
    /// Where in the region the part begins: within its first page.
    lead: usize,
    len: usize,
}

/// A range of such memory, to copy from; then [`Source::is_whole`] tells whether it was there.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    memory: &'a Foreign,
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

impl Foreign {
    /// Maps `len` bytes of `file` at `offset`, to load and to store.
    pub fn map(file: &OwnedFd, offset: u64, len: u64) -> Result<Foreign> {
        let page_bytes = check(file, offset, len)?;
        let lead = offset % page_bytes;
        let too_large = || Error::new(Kind::Unsupported, format!("{len} bytes are too many"));
        let mapped = (len + lead).checked_next_multiple_of(page_bytes).ok_or_else(too_large)?;
        let mapped_bytes = usize::try_from(mapped).map_err(|_| too_large())?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe {
            let null = std::ptr::null_mut();
            mmap(null, mapped_bytes, protection, MapFlags::SHARED, file, offset - lead)
        };
        let start = start.map_err(|errno| Error::from_io("mapping", "its memory", errno.into()))?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap maps nothing at address 0");
        let region = Region { start, mapped_bytes };
        // SAFETY: the region was just mapped in whole pages, is accessed as volatile memory only,
        // and outlives the watch.
        let watch =
            unsafe { watch(start.as_ptr(), mapped_bytes, page_bytes as usize, Watched::Foreign)? };
        Ok(Foreign { watch, region, lead: lead as usize, len: len as usize })
    }

    /// Bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len as u64
    }

    /// What ublk's driver is given to know its pages again. It holds them, and neither loads from
    /// them nor stores there.
    pub fn ublk_memory(&self) -> [u8; UBLK_MEMORY_BYTES] {
        let address = self.region.start.as_ptr().expose_provenance() + self.lead;
        ublk_memory(address as u64, self.len as u64)
    }

    /// Whether anything of it was ever cut off, or could not be loaded.
    #[inline]
    pub fn has_damage(&self) -> bool {
        self.watch.has_damage()
    }

    /// Whether `at` is at a multiple of `align` (a power of two) in memory.
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
        // SAFETY: `place` checked the range; the mapping lives as long as `self`, and is no Rust
        // object, so `bytes` cannot overlap it.
        unsafe { copy::store_shared(place, bytes) }
    }

    /// A range of it, to copy to.
    #[inline]
    pub fn shared(&self, at: u64, len: usize) -> SharedBytes<'_> {
        // SAFETY: `place` checked the range; the mapping lives as long as `self`, and is no Rust
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

    /// The bytes `from..from + len` of it. Panics if there are none such.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Source<'a> {
        Source { bytes: self.bytes.part(from, len), ..self }
    }

    /// The memory that it is of.
    pub fn memory(self) -> &'a Foreign {
        self.memory
    }

    /// Whether nothing of its memory was ever cut off: what was copied was all there.
    #[inline]
    pub fn is_whole(self) -> bool {
        !self.memory.has_damage()
    }
}

/// Memory that the driver of a character device shows, to be loaded alone. It is a driver's own and
/// stays whole as long as it is mapped.
#[derive(Debug)]
pub struct Shown {
    region: Region,
}

impl Shown {
    /// Maps `len` bytes of `file` at `offset`, in whole pages.
    pub fn map(file: &OwnedFd, offset: u64, len: usize) -> Result<Shown> {
        let failed = |errno: rustix::io::Errno| {
            Error::from_io("mapping", "what a driver shows", errno.into())
        };
        let kind = FileType::from_raw_mode(fstat(file).map_err(failed)?.st_mode);
        if kind != FileType::CharacterDevice {
            return Err(Error::new(Kind::Unsupported, "it is not a character device"));
        }
        let mapped_bytes = len.next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing of ours.
        let start = unsafe {
            let null = std::ptr::null_mut();
            mmap(null, mapped_bytes, ProtFlags::READ, MapFlags::SHARED, file, offset)
        };
        let start = start.map_err(failed)?;
        let start = NonNull::new(start.cast::<u8>()).expect("mmap maps nothing at address 0");
        Ok(Shown { region: Region { start, mapped_bytes } })
    }

    /// The four bytes at `at`, which is a multiple of four.
    #[inline]
    pub fn u32_at(&self, at: usize) -> u32 {
        let is_inside = at.is_multiple_of(4) && at <= self.region.mapped_bytes - 4;
        assert!(is_inside, "four bytes at {at} of {}", self.region.mapped_bytes);
        // SAFETY: checked range and alignment, and the mapping lives as long as `self`. Nothing is
        // stored through it: it is mapped to be read.
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
        // SAFETY: mapped by `Foreign::map`, and nobody else has its address. Failure would leak.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Whether the part is there, and is memory. Returns the bytes of its pages.
fn check(file: &OwnedFd, offset: u64, len: u64) -> Result<u64> {
    let failed = |errno: rustix::io::Errno| Error::from_io("examining", "a file", errno.into());
    let stat = fstat(file).map_err(failed)?;
    let system = fstatfs(file).map_err(failed)?;
    let magic = system.f_type as u64 & 0xFFFF_FFFF;
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if !is_file || !IN_MEMORY.contains(&magic) {
        let message = "it is not memory: a memfd, or a file on tmpfs or hugetlbfs is needed";
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
        let (one, other) = (Foreign::map(&file, 0, 64 << 10), Foreign::map(&file, 5000, 10_000));
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
        let address =
            |memory: &Foreign| u64::from_le_bytes(*memory.ublk_memory().first_chunk().unwrap());
        assert!(address(&one) % 4096 == 0 && address(&other) % 4096 == 5000 % 4096);
        assert!(other.is_aligned(0, 8) && !other.is_aligned(4, 8) && !other.is_aligned(0, 16));
    }

    #[test]
    fn memory_that_is_cut_short_becomes_zeroes_and_says_so() {
        let file = memfd(64 << 10);
        let memory = Foreign::map(&file, 0, 64 << 10).unwrap();
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
        let refused =
            |file: &OwnedFd, offset, len| Foreign::map(file, offset, len).unwrap_err().to_string();
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
        Foreign::map(&memfd(8192), 0, 100).unwrap().load(99, &mut [0; 2]);
    }
}
