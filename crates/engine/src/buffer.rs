//! Page-aligned memory for data in transit, with exactly one owner at any time.
//!
//! The alignment (4096) satisfies O_DIRECT everywhere, so a client's payload can go to a disk
//! without another copy. While the kernel works on a buffer, the ring's in-flight table owns it.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment of every buffer, in bytes.
pub const BUFFER_ALIGN: usize = 4096;

/// An owned, page-aligned run of bytes. `len` can shrink and grow within its capacity.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: a Buffer is the only owner of its memory, as a Vec<u8> is.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// No bytes, no memory.
    pub const fn empty() -> Buffer {
        Buffer { start: NonNull::dangling(), len: 0, capacity: 0 }
    }

    /// `len` zero bytes. Without memory for them the process ends.
    pub fn zeroed(len: usize) -> Buffer {
        let no_memory = || handle_alloc_error(Buffer::layout(len.next_multiple_of(BUFFER_ALIGN)));
        Buffer::try_zeroed(len).unwrap_or_else(no_memory)
    }

    /// `len` zero bytes, if there is memory for them.
    pub fn try_zeroed(len: usize) -> Option<Buffer> {
        if len == 0 {
            return Some(Buffer::empty());
        }
        let capacity = len.next_multiple_of(BUFFER_ALIGN);
        let layout = Buffer::layout(capacity);
        // SAFETY: the layout has a non-zero size.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Buffer { start, len, capacity })
    }

    /// A copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.as_mut_slice().copy_from_slice(bytes);
        buffer
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, BUFFER_ALIGN).expect("capacity is far below isize::MAX")
    }

    /// Bytes in use.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes are in use.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length. Bytes that a longer length uncovers hold old content, but are never
    /// uninitialised.
    ///
    /// Panics if `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} bytes do not fit a buffer of {}", self.capacity);
        self.len = len;
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `start` points to `capacity` initialised bytes that we own; len <= capacity.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to change.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.capacity != 0 {
            // SAFETY: allocated in `zeroed` with exactly this layout.
            unsafe { dealloc(self.start.as_ptr(), Buffer::layout(self.capacity)) }
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} of {} bytes)", self.len, self.capacity)
    }
}

/// Free buffers by power-of-two size class, so that a warmed-up path does not allocate.
#[derive(Debug)]
pub struct BufferPool {
    /// Class `n` holds buffers of capacity `4096 << n`.
    classes: [Vec<Buffer>; 14],
    /// Bytes in all of them.
    kept_bytes: usize,
    kept_bytes_max: usize,
}

impl Default for BufferPool {
    fn default() -> BufferPool {
        let classes = Default::default();
        BufferPool { classes, kept_bytes: 0, kept_bytes_max: POOL_BYTES_MAX }
    }
}

/// A pool keeps at most this many bytes.
pub const POOL_BYTES_MAX: usize = 64 << 20;
/// The pool of a client's thread keeps fewer, as there may be many of those.
pub const CLIENT_POOL_BYTES_MAX: usize = 16 << 20;

impl BufferPool {
    /// An empty pool.
    pub fn new() -> BufferPool {
        BufferPool::default()
    }

    fn class(len: usize) -> usize {
        let pages = len.div_ceil(BUFFER_ALIGN).max(1);
        pages.next_power_of_two().trailing_zeros() as usize
    }

    /// Keeps no more than `bytes` from now on.
    pub fn keep_at_most(&mut self, bytes: usize) {
        self.kept_bytes_max = bytes;
    }

    /// A buffer of `len` bytes whose content is arbitrary (old data of this pool, or zeroes).
    /// Without memory for it the process ends.
    pub fn take(&mut self, len: usize) -> Buffer {
        self.try_take(len).unwrap_or_else(|| Buffer::zeroed(len))
    }

    /// The same, if there is memory for it.
    pub fn try_take(&mut self, len: usize) -> Option<Buffer> {
        if len == 0 {
            return Some(Buffer::empty());
        }
        let class = BufferPool::class(len);
        let mut buffer = match self.classes.get_mut(class).and_then(Vec::pop) {
            Some(buffer) => {
                self.kept_bytes -= buffer.capacity;
                buffer
            }
            None => Buffer::try_zeroed(BUFFER_ALIGN << class)?,
        };
        buffer.set_len(len);
        Some(buffer)
    }

    /// Returns a buffer for reuse. When the pool is full, it frees a buffer of the size that takes
    /// most of the pool, because the usual sizes may have changed.
    pub fn put(&mut self, buffer: Buffer) {
        if buffer.capacity == 0 || !buffer.capacity.is_power_of_two() {
            return;
        }
        let class = BufferPool::class(buffer.capacity);
        if class >= self.classes.len() {
            return;
        }
        while self.kept_bytes + buffer.capacity > self.kept_bytes_max {
            let bytes = |class: &usize| self.classes[*class].len() * (BUFFER_ALIGN << class);
            let Some(largest) = (0..self.classes.len()).max_by_key(bytes) else { return };
            if largest == class || self.classes[largest].pop().is_none() {
                return;
            }
            self.kept_bytes -= BUFFER_ALIGN << largest;
        }
        self.kept_bytes += buffer.capacity;
        self.classes[class].push(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zeroed() {
        for len in [1, 512, 4096, 4097, 1 << 20] {
            let mut buffer = Buffer::zeroed(len);
            assert!((buffer.as_slice().as_ptr() as usize).is_multiple_of(BUFFER_ALIGN));
            assert!(buffer.as_slice().iter().all(|byte| *byte == 0));
            assert!(buffer.capacity() >= len && buffer.capacity() < len + BUFFER_ALIGN);
            buffer.set_len(buffer.capacity());
            assert!(buffer.as_mut_slice().iter().all(|byte| *byte == 0));
        }
        assert!(Buffer::empty().as_slice().is_empty());
        assert!(Buffer::zeroed(0).is_empty());
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn a_buffer_does_not_outgrow_its_memory() {
        Buffer::zeroed(100).set_len(4097);
    }

    #[test]
    fn a_pool_gives_the_same_memory_again() {
        let mut pool = BufferPool::new();
        let buffer = pool.take(5000);
        let place = buffer.as_slice().as_ptr();
        assert_eq!((buffer.len(), buffer.capacity()), (5000, 8192));
        pool.put(buffer);
        let again = pool.take(8192);
        assert_eq!((again.as_slice().as_ptr(), again.len()), (place, 8192));
        assert_ne!(pool.take(8192).as_slice().as_ptr(), place);
    }

    #[test]
    fn a_pool_keeps_a_bounded_amount() {
        let mut pool = BufferPool::new();
        let kept = |pool: &BufferPool| -> usize {
            let kept = pool.classes.iter().flatten().map(Buffer::capacity).sum();
            assert_eq!(kept, pool.kept_bytes);
            kept
        };
        let give_back = |pool: &mut BufferPool, count: usize, len: usize| {
            let buffers: Vec<Buffer> = (0..count).map(|_| pool.take(len)).collect();
            buffers.into_iter().for_each(|buffer| pool.put(buffer));
        };
        give_back(&mut pool, 4, 32 << 20);
        assert_eq!(kept(&pool), POOL_BYTES_MAX);
        pool.put(Buffer::empty());
        pool.put(Buffer::zeroed(3 * 4096));
        pool.put(pool_size_beyond());
        assert_eq!(kept(&pool), POOL_BYTES_MAX);
        // Other sizes take the place of the old ones, and all sizes together are bounded.
        for len in [1 << 20, 4096, 64 << 10] {
            give_back(&mut pool, 100, len);
            assert!(kept(&pool) <= POOL_BYTES_MAX);
            assert!(!pool.classes[BufferPool::class(len)].is_empty(), "{len} found a place");
        }
    }

    /// A buffer of a size class that no pool has.
    fn pool_size_beyond() -> Buffer {
        Buffer::zeroed(128 << 20)
    }
}
