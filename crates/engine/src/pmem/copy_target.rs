//! The target of a copy from a medium that udm itself does not read: memory shared with other
//! processes, or a part of a file that stands for the pages of a request in a kernel driver.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use super::copy::SharedBytes;

/// See the module. It only reveals its length: the copied bytes are not read back from it.
#[derive(Clone, Copy, Debug)]
pub enum CopyTarget<'a> {
    /// Memory.
    Memory(SharedBytes<'a>),
    /// A part of a file.
    File(FilePart<'a>),
}

/// A part of a file, to write to by calls.
#[derive(Clone, Copy, Debug)]
pub struct FilePart<'a> {
    file: &'a OwnedFd,
    at: u64,
    len: usize,
}

impl<'a> From<SharedBytes<'a>> for CopyTarget<'a> {
    fn from(bytes: SharedBytes<'a>) -> CopyTarget<'a> {
        CopyTarget::Memory(bytes)
    }
}

impl<'a> From<FilePart<'a>> for CopyTarget<'a> {
    fn from(part: FilePart<'a>) -> CopyTarget<'a> {
        CopyTarget::File(part)
    }
}

impl CopyTarget<'_> {
    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "callers need no is_empty")]
    #[inline]
    pub fn len(self) -> usize {
        match self {
            CopyTarget::Memory(bytes) => bytes.len(),
            CopyTarget::File(part) => part.len,
        }
    }

    /// Whether each copy to it is a call of the kernel, so that many small ones are expensive.
    #[inline]
    pub fn is_by_call(self) -> bool {
        matches!(self, CopyTarget::File(_))
    }

    /// The bytes `from..from + len` of it. Panics if the range is not within it.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Self {
        match self {
            CopyTarget::Memory(bytes) => CopyTarget::Memory(bytes.part(from, len)),
            CopyTarget::File(part) => CopyTarget::File(part.part(from, len)),
        }
    }

    /// Copies `bytes`, which have its length, to it. False if it does not take them all.
    pub fn store(self, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), self.len(), "both sides of a copy have the same length");
        match self {
            CopyTarget::Memory(shared) => {
                shared.store(bytes);
                true
            }
            // SAFETY: as many bytes of ours as the part has.
            CopyTarget::File(part) => unsafe { part.write_from(bytes.as_ptr()) },
        }
    }

    /// Copies the bytes at `src` to it. False if it does not take all of them, or some cannot be
    /// read.
    ///
    /// # Safety
    /// As many bytes are mapped at `src`, outside this memory's mapping.
    #[inline]
    pub(super) unsafe fn copy_from(self, src: *const u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                CopyTarget::Memory(bytes) => {
                    bytes.copy_from(src);
                    true
                }
                CopyTarget::File(part) => part.write_from(src),
            }
        }
    }
}

impl<'a> FilePart<'a> {
    /// The `len` bytes of `file` at `at`.
    pub fn new(file: &'a OwnedFd, at: u64, len: usize) -> FilePart<'a> {
        FilePart { file, at, len }
    }

    fn part(self, from: usize, len: usize) -> Self {
        assert!(from <= self.len && len <= self.len - from, "{from}+{len} of {}", self.len);
        FilePart { at: self.at + from as u64, len, ..self }
    }

    /// Lets the kernel copy the bytes at `src`. If a part of them does not exist any more, because
    /// its file was cut short or its memory has failed, the call returns an error, and there is no
    /// signal.
    ///
    /// # Safety
    /// As many bytes are mapped at `src`.
    unsafe fn write_from(self, src: *const u8) -> bool {
        let mut done = 0;
        while done < self.len {
            let Ok(at) = libc::off_t::try_from(self.at + done as u64) else { return false };
            // SAFETY: the kernel reads the rest of the caller's range, whose content may change at
            // any time: to Rust it is not an object.
            let count = unsafe {
                libc::pwrite(self.file.as_raw_fd(), src.add(done).cast(), self.len - done, at)
            };
            match usize::try_from(count) {
                Ok(count) if count > 0 => done += count,
                _ => return false,
            }
        }
        true
    }
}
