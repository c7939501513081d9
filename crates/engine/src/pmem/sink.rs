//! Where data goes from a medium when nobody here looks at it: memory that others use too, or a
//! part of a file that stands for the pages of a request, which a driver of the kernel has.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, OwnedFd};

use super::copy::SharedBytes;

/// See the module. It says by itself only how long it is: nothing is read back from it.
#[derive(Clone, Copy, Debug)]
pub enum Sink<'a> {
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

impl<'a> From<SharedBytes<'a>> for Sink<'a> {
    fn from(bytes: SharedBytes<'a>) -> Sink<'a> {
        Sink::Memory(bytes)
    }
}

impl<'a> From<FilePart<'a>> for Sink<'a> {
    fn from(part: FilePart<'a>) -> Sink<'a> {
        Sink::File(part)
    }
}

impl Sink<'_> {
    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks whether it is empty")]
    #[inline]
    pub fn len(self) -> usize {
        match self {
            Sink::Memory(bytes) => bytes.len(),
            Sink::File(part) => part.len,
        }
    }

    /// Whether each copy to it is a call of the kernel, so that many small ones are expensive.
    #[inline]
    pub fn is_by_call(self) -> bool {
        matches!(self, Sink::File(_))
    }

    /// The bytes `from..from + len` of it. Panics if there are none such.
    #[inline]
    pub fn part(self, from: usize, len: usize) -> Self {
        match self {
            Sink::Memory(bytes) => Sink::Memory(bytes.part(from, len)),
            Sink::File(part) => Sink::File(part.part(from, len)),
        }
    }

    /// Copies `bytes` there, which are as many. False if it does not take them all.
    pub fn store(self, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), self.len(), "both sides of a copy have the same length");
        match self {
            Sink::Memory(shared) => {
                shared.store(bytes);
                true
            }
            // SAFETY: as many bytes of ours as the part has.
            Sink::File(part) => unsafe { part.write_from(bytes.as_ptr()) },
        }
    }

    /// Copies what is at `src` there. False if it does not take all of it, or not all of that can
    /// be read.
    ///
    /// # Safety
    /// As many bytes are mapped at `src`, and are no part of this memory's mapping.
    #[inline]
    pub(super) unsafe fn copy_from(self, src: *const u8) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Sink::Memory(bytes) => {
                    bytes.copy_from(src);
                    true
                }
                Sink::File(part) => part.write_from(src),
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

    /// Lets the kernel copy what is at `src`. A part of it that is not there any more, because its
    /// file was cut short or its memory has failed, is an error of the call, and no signal.
    ///
    /// # Safety
    /// As many bytes are mapped at `src`.
    unsafe fn write_from(self, src: *const u8) -> bool {
        let mut done = 0;
        while done < self.len {
            let Ok(at) = libc::off_t::try_from(self.at + done as u64) else { return false };
            // SAFETY: the kernel reads the rest of the caller's range, whose content may change at
            // any time: it is no Rust object to it.
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
