//! libpmem's own copy, where the library is installed: a contender for the study `copy`.
//!
//! It is loaded on demand, never linked. Copies go to a mapping of a file, by offset; the mapping's
//! address is used nowhere else, and no reference to it exists.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

type Persist = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;

const NAMES: [&CStr; 2] = [c"libpmem.so.1", c"libpmem.so"];

/// The library, and a file mapped for it.
#[derive(Debug)]
pub struct Libpmem {
    persist: Persist,
    start: *mut u8,
    len_bytes: usize,
}

impl Libpmem {
    /// The library with the file at `path` mapped; none if either cannot be had.
    pub fn open(path: &Path) -> Option<Libpmem> {
        let persist = find()?;
        let file = File::options().read(true).write(true).open(path).ok()?;
        let len_bytes = file.metadata().ok()?.len() as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice aliases no memory of this
        // process.
        let start = unsafe {
            libc::mmap(ptr::null_mut(), len_bytes, protection, flags, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Libpmem { persist, start: start.cast(), len_bytes })
    }

    /// Copies `bytes` to `at`, durably as far as libpmem can tell.
    pub fn store(&self, at: u64, bytes: &[u8]) {
        let at = at as usize;
        assert!(at <= self.len_bytes && bytes.len() <= self.len_bytes - at, "beyond the mapping");
        // SAFETY: the range is within the mapping, which lives as long as `self` and overlaps no
        // Rust object; the function is pmem_memcpy_persist, which wants exactly that.
        unsafe { (self.persist)(self.start.add(at).cast(), bytes.as_ptr().cast(), bytes.len()) };
    }
}

impl Drop for Libpmem {
    fn drop(&mut self) {
        // SAFETY: `open` made the mapping, and no other code has its address.
        unsafe { libc::munmap(self.start.cast(), self.len_bytes) };
    }
}

/// `pmem_memcpy_persist`, if the library is here. It stays loaded for good.
fn find() -> Option<Persist> {
    let library = NAMES.into_iter().find_map(|name| {
        // SAFETY: a constant name; loading runs the library's own start-up code, which is
        // libpmem's well-known one.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        (!handle.is_null()).then_some(handle)
    })?;
    // SAFETY: a live handle and a constant name.
    let symbol = unsafe { libc::dlsym(library, c"pmem_memcpy_persist".as_ptr()) };
    if symbol.is_null() {
        return None;
    }
    // SAFETY: the library's interface says:
    // void *pmem_memcpy_persist(void *, const void *, size_t).
    Some(unsafe { std::mem::transmute::<*mut c_void, Persist>(symbol) })
}
