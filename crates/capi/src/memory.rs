//! Memory of the program: the source or destination of a request's data.
//!
//! The header's contract: a request's memory stays valid and is not touched by others until the
//! request's completion was reaped or its queue was destroyed.

#![allow(unsafe_code)]

use std::ptr;

/// The pieces of a request's memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pieces: Vec<(*mut u8, usize)>,
    len: usize,
}

impl Memory {
    /// Removes all pieces, and keeps the list's own memory.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.len = 0;
    }

    /// Adds `len` bytes at `start`. Returns whether the sum of all lengths fits.
    ///
    /// # Safety
    ///
    /// The bytes are valid until [`Memory::clear`] or the end of this value. For a read, they are
    /// also writable.
    pub(crate) unsafe fn add(&mut self, start: *mut u8, len: usize) -> bool {
        let Some(sum) = self.len.checked_add(len) else { return false };
        self.len = sum;
        if len > 0 {
            self.pieces.push((start, len));
        }
        true
    }

    /// Sum of the lengths.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether a piece is a NULL pointer.
    pub(crate) fn has_null(&self) -> bool {
        self.pieces.iter().any(|(start, _)| start.is_null())
    }

    /// Copies all pieces into `bytes`, which must have the same length.
    pub(crate) fn gather(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.len);
        let mut rest = bytes;
        for (start, len) in &self.pieces {
            let (part, next) = rest.split_at_mut(*len);
            // SAFETY: the caller of `add` guarantees that the bytes are valid. `part` has the same
            // length, and the library's own buffer does not overlap the program's memory.
            unsafe { ptr::copy_nonoverlapping(*start, part.as_mut_ptr(), *len) };
            rest = next;
        }
    }

    /// Passes each piece to `take`, in order.
    pub(crate) fn each(&self, mut take: impl FnMut(&[u8])) {
        for (start, len) in &self.pieces {
            // SAFETY: the caller of `add` guarantees that the bytes are valid and that no one else
            // touches them; this is for a write, so they are only read.
            take(unsafe { std::slice::from_raw_parts(*start, *len) });
        }
    }

    /// Lets `fill` overwrite each piece, in order.
    pub(crate) fn each_mut(&self, mut fill: impl FnMut(&mut [u8])) {
        for (start, len) in &self.pieces {
            // SAFETY: as above, and this is for a read.
            fill(unsafe { std::slice::from_raw_parts_mut(*start, *len) });
        }
    }

    /// Copies `bytes`, which must have the same length, over all pieces.
    pub(crate) fn scatter(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len);
        let mut rest = bytes;
        for (start, len) in &self.pieces {
            let (part, next) = rest.split_at(*len);
            // SAFETY: as in `gather`, and this is for a read.
            unsafe { ptr::copy_nonoverlapping(part.as_ptr(), *start, *len) };
            rest = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Memory;

    #[test]
    fn pieces_are_gathered_and_scattered_in_their_order() {
        let (mut first, mut second) = ([1_u8, 2, 3], [4_u8, 5]);
        let mut memory = Memory::default();
        // SAFETY: both live to the end of this test, and are used only through `memory`.
        unsafe {
            assert!(memory.add(first.as_mut_ptr(), 3));
            assert!(memory.add(std::ptr::null_mut(), 0));
            assert!(memory.add(second.as_mut_ptr(), 2));
            assert!(!memory.add(second.as_mut_ptr(), usize::MAX));
        }
        assert!(!memory.has_null());
        let mut bytes = [0; 5];
        memory.gather(&mut bytes);
        assert_eq!(bytes, [1, 2, 3, 4, 5]);
        memory.scatter(&[9, 8, 7, 6, 5]);
        assert_eq!((first, second), ([9, 8, 7], [6, 5]));
    }
}
