//! Copying to and from memory that other threads and other processes may touch at any time.
//!
//! 1. No reference to media ever exists: media are `*mut u8`, and every access is assembly or
//!    volatile. So a concurrent store may give an unexpected value, but never undefined behaviour.
//! 2. A durable copy leaves no dirty lines in the CPU's caches: whole cache lines are stored by the
//!    primitive itself; the edges before the first and after the last whole line (any offset, any
//!    length) are stored word by word, past the caches or flushed by line. After [`fence`] all of
//!    it has left the CPU. No line outside the range is ever stored to.
//! 3. Eight aligned bytes are stored by one instruction, whichever the primitive.
//! 4. A primitive is used only if [`Primitive::is_available`]; the constructors of [`CopyPlan`]
//!    assert it.
//!
//! The kernel's counterpart is `memcpy_flushcache` (movnti, and clwb for the edges).

#![allow(unsafe_code)]

use std::arch::asm;
use std::ffi::c_void;
use std::marker::PhantomData;

use crate::base::fingerprint::fingerprint_offsets;
use crate::sync::statics::atomic::{AtomicU64, Ordering};

#[cfg(not(target_arch = "x86_64"))]
use portable as arch;
#[cfg(target_arch = "x86_64")]
use x86 as arch;

/// Whether this CPU can make stores leave its caches. Without it, only media that are synced by
/// the kernel are durable.
pub const CAN_FLUSH: bool = cfg!(target_arch = "x86_64");

const LINE: usize = 64;
/// Bytes of shared memory that are loaded together: whole sectors, so that no word crosses the
/// border of a piece.
const PIECE: usize = 4096;

/// A way to store whole cache lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Primitive {
    /// Ordinary stores, never flushed: for media that are durable through the kernel only.
    Plain,
    /// 8-byte non-temporal stores: the kernel's way.
    Movnti,
    /// 32-byte non-temporal stores (AVX).
    Nt32,
    /// 64-byte non-temporal stores (AVX-512).
    Nt64,
    /// 64-byte direct stores.
    Movdir64b,
    /// Ordinary stores, then clflushopt of every line.
    Clflushopt,
    /// Ordinary stores, then clwb of every line.
    Clwb,
}

impl Primitive {
    /// All of them.
    pub const ALL: [Primitive; 7] = [
        Primitive::Plain,
        Primitive::Movnti,
        Primitive::Nt32,
        Primitive::Nt64,
        Primitive::Movdir64b,
        Primitive::Clflushopt,
        Primitive::Clwb,
    ];

    /// Those that this CPU has.
    pub fn available() -> Vec<Primitive> {
        Primitive::ALL.into_iter().filter(|primitive| primitive.is_available()).collect()
    }

    /// Whether this CPU (and kernel) has it.
    pub fn is_available(self) -> bool {
        self == Primitive::Plain || arch::is_available(self)
    }

    /// Whether stores have left the CPU after it and a fence.
    pub fn is_durable(self) -> bool {
        self != Primitive::Plain
    }

    /// Whether its stores bypass the caches.
    fn passes_caches(self) -> bool {
        use Primitive::{Movdir64b, Movnti, Nt32, Nt64};
        matches!(self, Movnti | Nt32 | Nt64 | Movdir64b)
    }

    /// Its name, for people.
    pub fn name(self) -> &'static str {
        match self {
            Primitive::Plain => "plain",
            Primitive::Movnti => "movnti",
            Primitive::Nt32 => "nt32",
            Primitive::Nt64 => "nt64",
            Primitive::Movdir64b => "movdir64b",
            Primitive::Clflushopt => "clflushopt",
            Primitive::Clwb => "clwb",
        }
    }
}

/// Number of size classes in a [`CopyPlan`].
pub const COPY_CLASSES: usize = 12;

/// The primitive for each size of copy. Class 0 is below 64 bytes, class `n` starts at `32 << n`,
/// and the last one starts at 64 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    by_class: [Primitive; COPY_CLASSES],
}

impl CopyPlan {
    /// A plan. Panics if the CPU lacks one of its primitives.
    pub fn new(by_class: [Primitive; COPY_CLASSES]) -> CopyPlan {
        for primitive in by_class {
            assert!(primitive.is_available(), "this CPU has no {}", primitive.name());
        }
        CopyPlan { by_class }
    }

    /// The same primitive for every size.
    pub fn only(primitive: Primitive) -> CopyPlan {
        CopyPlan::new([primitive; COPY_CLASSES])
    }

    /// A good plan on most machines: the widest non-temporal stores available.
    pub fn usual() -> CopyPlan {
        let widest = [Primitive::Nt64, Primitive::Nt32, Primitive::Movnti, Primitive::Plain];
        let primitive = widest.into_iter().find(|primitive| primitive.is_available());
        CopyPlan::only(primitive.expect("plain stores exist everywhere"))
    }

    /// Whether every store has left the CPU after a fence.
    pub fn is_durable(&self) -> bool {
        self.by_class.iter().all(|primitive| primitive.is_durable())
    }

    /// The class that copies of `len` bytes belong to.
    pub fn class(len: usize) -> usize {
        (len.max(32).ilog2() as usize - 5).min(COPY_CLASSES - 1)
    }

    /// The primitive for `len` bytes.
    pub fn choose(&self, len: usize) -> Primitive {
        self.by_class[CopyPlan::class(len)]
    }
}

/// `movnti, nt32 from 256, nt64 from 4096`: sizes in bytes; equal neighbours are merged.
impl std::fmt::Display for CopyPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.by_class[0].name())?;
        for (class, pair) in self.by_class.windows(2).enumerate() {
            if pair[0] != pair[1] {
                write!(f, ", {} from {}", pair[1].name(), 64 << class)?;
            }
        }
        Ok(())
    }
}

/// Copies `src` over `dst`, which is of the same length, as a store to a medium would; a [`fence`]
/// completes it. For calibration. Panics if the CPU lacks the primitive.
pub fn copy_with(primitive: Primitive, dst: &mut [u8], src: &[u8]) {
    assert!(primitive.is_available(), "this CPU has no {}", primitive.name());
    assert_eq!(dst.len(), src.len(), "both sides of a copy have the same length");
    // SAFETY: dst is exclusively ours and as long as src; the primitive exists.
    unsafe { copy_raw(primitive, dst.as_mut_ptr(), src) }
}

/// Stores `src` to `dst`. Durable primitives: it has left the CPU after the next [`fence`].
///
/// # Safety
/// `dst` is writable for `src.len()` bytes, belongs to no Rust object to which any other reference
/// exists, and does not overlap `src`. The primitive is available.
pub(super) unsafe fn copy_raw(primitive: Primitive, dst: *mut u8, src: &[u8]) {
    if src.len() < LINE - dst.addr() % LINE {
        // A word or an entry, as most stores are: no whole line.
        // SAFETY: the caller's promise; it is all within one line.
        return unsafe { store_edge(primitive, dst, src) };
    }
    let head = dst.align_offset(LINE).min(src.len());
    let (head, rest) = src.split_at(head);
    let (lines, tail) = rest.split_at(rest.len() - rest.len() % LINE);
    // SAFETY: head, lines and tail follow one another in the range that the caller vouches for;
    // the lines start at a multiple of 64, or there is none.
    unsafe {
        store_edge(primitive, dst, head);
        if !lines.is_empty() {
            let count = lines.len() / LINE;
            arch::copy_lines(primitive, dst.add(head.len()), lines.as_ptr(), count);
        }
        store_edge(primitive, dst.add(head.len() + lines.len()), tail);
    }
}

/// Stores the bytes of `from` to `dst`, as [`copy_raw`] would. Other threads may store to `from`
/// meanwhile: each of its bytes is loaded once. Returns the words for the fingerprint of the stored
/// bytes.
///
/// # Safety
/// `dst` is writable for `from.len()` bytes, which belong to no Rust object and do not overlap
/// `from`. The primitive is available.
pub(super) unsafe fn copy_shared(
    primitive: Primitive,
    dst: *mut u8,
    from: SharedBytes<'_>,
) -> [u64; 3] {
    let places = fingerprint_offsets(from.len);
    let lines = places.map(|place| place / LINE * LINE);
    if !(dst.addr() | from.len).is_multiple_of(LINE) || lines[0] == lines[1] || lines[1] == lines[2]
    {
        let mut at = 0;
        // SAFETY: the pieces follow one another in the range that the caller vouches for.
        return from.by_pieces(|piece| unsafe {
            copy_raw(primitive, dst.add(at), piece);
            at += piece.len();
        });
    }
    // Lines with words of the fingerprint are loaded to a local copy, and stored from there.
    let mut words = [0; 3];
    let mut done = 0;
    for (word, (line, place)) in words.iter_mut().zip(lines.into_iter().zip(places)) {
        let mut copy = [0; LINE];
        // SAFETY: whole lines that follow one another within both ranges; the caller vouches for
        // them and for the primitive.
        unsafe {
            if done < line {
                let start = from.start.add(done);
                arch::copy_lines(primitive, dst.add(done), start, (line - done) / LINE);
            }
            load_raw(from.start.add(line), &mut copy);
            arch::copy_lines(primitive, dst.add(line), copy.as_ptr(), 1);
        }
        *word = word_at(&copy, place - line).expect("a word lies in one line");
        done = line + LINE;
    }
    debug_assert_eq!(done, from.len, "the last word is in the last line");
    words
}

/// The eight bytes at `at`, if they are there.
fn word_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|word| u64::from_le_bytes(*word))
}

/// Stores `len` zero bytes to `dst`, as [`copy_raw`] would.
///
/// # Safety
/// As for [`copy_raw`].
pub(super) unsafe fn zero_raw(primitive: Primitive, dst: *mut u8, len: usize) {
    // Zeroes are copied from one page that stays in the nearest cache: the media's side costs
    // all the time, and there is only one set of edges to get right.
    static ZEROES: [u8; 4096] = [0; 4096];
    let mut done = 0;
    while done < len {
        // Pieces after the first one start at whole lines.
        let piece = (len - done).min(ZEROES.len() - dst.addr().wrapping_add(done) % LINE);
        // SAFETY: a part of the caller's range; ZEROES is not part of a medium.
        unsafe { copy_raw(primitive, dst.add(done), &ZEROES[..piece]) };
        done += piece;
    }
}

/// Copies from `src`, which other threads may be changing, into `into`.
///
/// # Safety
/// `src` is readable for `into.len()` bytes and does not overlap `into`.
pub(crate) unsafe fn load_raw(src: *const u8, into: &mut [u8]) {
    // SAFETY: the caller vouches for `src`, and `into` is exclusively ours.
    unsafe { copy_hidden(into.as_mut_ptr(), src, into.len()) }
}

/// Whether one of the words at `src`, `src + step`, ... is zero. Other threads may be changing
/// them.
///
/// # Safety
/// `src` is readable for `len` bytes and aligned to 8, as are `len` and `step`.
#[inline]
pub(crate) unsafe fn has_zero_word(src: *const u8, len: usize, step: usize) -> bool {
    let mut from = 0;
    while from < len {
        // SAFETY: the caller vouches for the range and its alignment; the access is atomic.
        let word = unsafe { AtomicU64::from_ptr(src.wrapping_add(from).cast_mut().cast()) };
        if word.load(Ordering::Relaxed) == 0 {
            return true;
        }
        from = from.wrapping_add(step);
    }
    false
}

/// Stores `bytes` to `dst`, which other threads may be loading and storing.
///
/// # Safety
/// `dst` is writable for `bytes.len()` bytes and does not overlap `bytes`.
pub(crate) unsafe fn store_shared(dst: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller vouches for `dst`.
    unsafe { copy_hidden(dst, bytes.as_ptr(), bytes.len()) }
}

/// Copies between two addresses. Other threads may use either of them meanwhile.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap.
unsafe fn copy_hidden(dst: *mut u8, src: *const u8, len: usize) {
    type Memcpy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    let mut memcpy: Memcpy = libc::memcpy;
    // The C library's copy is assembly chosen for this CPU, so it is the fastest available. But a
    // compiler that recognises the call of memcpy may assume that no other thread uses these bytes.
    // This empty block hides the function's identity: the call could be any unknown code, such as a
    // loop of single loads. SAFETY: no instruction, so the pointer passes unchanged; the caller
    // vouches for the ranges.
    unsafe {
        asm!("/* {0} */", inout(reg) memcpy, options(nostack, preserves_flags));
        memcpy(dst.cast(), src.cast(), len);
    }
}

/// Memory that other threads load and store while this value exists, as a source or target of
/// copies. It is not a Rust object: no reference to its bytes exists.
#[derive(Clone, Copy, Debug)]
pub struct SharedBytes<'a> {
    start: *mut u8,
    len: usize,
    lives: PhantomData<&'a u8>,
}

impl SharedBytes<'_> {
    /// `len` bytes at `start`.
    ///
    /// # Safety
    /// They are writable for as long as the value lives, and belong to no Rust object.
    pub(crate) unsafe fn new<'a>(start: *mut u8, len: usize) -> SharedBytes<'a> {
        SharedBytes { start, len, lives: PhantomData }
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "callers need no is_empty")]
    pub fn len(self) -> usize {
        self.len
    }

    /// The bytes `from..from + len` of it. Panics if the range is not within it.
    pub fn part(self, from: usize, len: usize) -> Self {
        assert!(from <= self.len && len <= self.len - from, "{from}+{len} of {}", self.len);
        // SAFETY: `from` is within the range, or one past its end.
        Self { start: unsafe { self.start.add(from) }, len, ..self }
    }

    /// Copies `bytes` there, which are as many.
    pub fn store(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "both sides of a copy have the same length");
        // SAFETY: `new` was promised that the range is writable and belongs to no Rust object, so
        // it does not overlap `bytes`.
        unsafe { store_shared(self.start, bytes) }
    }

    /// Copies it to `into`, which is as long.
    pub fn load(self, into: &mut [u8]) {
        assert_eq!(into.len(), self.len, "both sides of a copy have the same length");
        // SAFETY: `new` was promised that the range is there; `into` is ours.
        unsafe { load_raw(self.start, into) }
    }

    /// Passes its bytes to `take`, piece after piece; each byte is loaded once, although other
    /// threads may store to it meanwhile. Returns the words for the fingerprint of the bytes that
    /// `take` got. The range is of whole sectors.
    pub fn by_pieces(self, mut take: impl FnMut(&[u8])) -> [u64; 3] {
        let mut words = [0; 3];
        let mut piece = [0; PIECE];
        for from in (0..self.len).step_by(PIECE) {
            let piece = &mut piece[..(self.len - from).min(PIECE)];
            // SAFETY: `new` was promised that the range is there; the piece is ours.
            unsafe { load_raw(self.start.add(from), piece) };
            for (word, place) in words.iter_mut().zip(fingerprint_offsets(self.len)) {
                let found = place.checked_sub(from).and_then(|at| word_at(piece, at));
                *word = found.unwrap_or(*word);
            }
            take(piece);
        }
        words
    }

    /// Copies the bytes at `src` to it.
    ///
    /// # Safety
    /// As many bytes are readable at `src`, outside this memory's mapping.
    pub(super) unsafe fn copy_from(self, src: *const u8) {
        // SAFETY: the caller's promise, and that of `new`.
        unsafe { copy_hidden(self.start, src, self.len) }
    }
}

/// When this returns, all stores of this thread with a durable primitive have left the CPU.
pub fn fence() {
    arch::fence();
}

/// Stores a part of one line: words where they are aligned and whole, else bytes.
///
/// Whole words bypass the caches if the primitive does. So a line that was stored to before (such
/// as a counter's line, or the line of the next table entry) is not fetched from memory again.
///
/// # Safety
/// `dst` is writable for `src.len()` bytes, which lie within one cache line.
#[inline]
unsafe fn store_edge(primitive: Primitive, dst: *mut u8, src: &[u8]) {
    if src.is_empty() {
        return;
    }
    if primitive.passes_caches() && (dst.addr() | src.len()).is_multiple_of(8) {
        for (number, word) in src.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: an unaligned read of a word from `src`; an aligned word of the caller's
            // range.
            unsafe {
                let word = word.as_ptr().cast::<u64>().read_unaligned();
                arch::store_past(dst.cast::<u64>().add(number), word);
            }
        }
        #[cfg(test)]
        tests::note_flush(dst);
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { store_and_flush(primitive, dst, src) };
}

/// Stores a part of one line through the caches, and flushes that line.
///
/// # Safety
/// As for [`store_edge`].
#[inline(never)]
unsafe fn store_and_flush(primitive: Primitive, dst: *mut u8, src: &[u8]) {
    // SAFETY: the caller's promise; the line that is flushed is the one just stored to.
    unsafe {
        store_words(dst, src);
        if primitive.is_durable() {
            arch::flush_line(dst);
            #[cfg(test)]
            tests::note_flush(dst);
        }
    }
}

/// Stores `src`; each aligned 8 bytes of the destination are one store.
///
/// # Safety
/// `dst` is writable for `src.len()` bytes.
unsafe fn store_words(dst: *mut u8, src: &[u8]) {
    let (head, rest) = src.split_at(dst.align_offset(8).min(src.len()));
    let (words, tail) = rest.as_chunks::<8>();
    // SAFETY: the three parts follow one another within the caller's range; the words start at a
    // multiple of 8.
    unsafe {
        store_single_bytes(dst, head);
        let dst = dst.add(head.len());
        for (number, word) in words.iter().enumerate() {
            let word = word.as_ptr().cast::<u64>().read_unaligned();
            dst.cast::<u64>().add(number).write_volatile(word);
        }
        store_single_bytes(dst.add(rest.len() - tail.len()), tail);
    }
}

/// # Safety
/// `dst` is writable for `src.len()` bytes.
unsafe fn store_single_bytes(dst: *mut u8, src: &[u8]) {
    for (number, byte) in src.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { dst.add(number).write_volatile(*byte) };
    }
}

#[cfg(target_arch = "x86_64")]
#[path = "copy_x86.rs"]
mod x86;

#[cfg(not(target_arch = "x86_64"))]
mod portable {
    //! No way to flush caches: every medium is durable through the kernel, or not at all.

    use super::Primitive;

    pub(super) fn is_available(_: Primitive) -> bool {
        false
    }

    /// # Safety
    /// `dst` is writable and `src` readable for `lines` lines, and they do not overlap.
    pub(super) unsafe fn copy_lines(_: Primitive, dst: *mut u8, src: *const u8, lines: usize) {
        for line in 0..lines {
            let mut copy = [0; super::LINE];
            // SAFETY: the caller's promise; line after line of both ranges.
            unsafe {
                super::load_raw(src.add(line * super::LINE), &mut copy);
                super::store_words(dst.add(line * super::LINE), &copy);
            }
        }
    }

    /// # Safety
    /// `dst` is aligned and writable.
    pub(super) unsafe fn store_past(dst: *mut u64, word: u64) {
        // SAFETY: the caller's promise.
        unsafe { dst.write_volatile(word) };
    }

    /// # Safety
    /// None here; on targets that can flush, the function has a condition.
    pub(super) unsafe fn flush_line(_: *mut u8) {}

    pub fn fence() {
        crate::sync::atomic::fence(crate::sync::atomic::Ordering::SeqCst);
    }
}

#[cfg(test)]
#[path = "copy_tests.rs"]
mod tests;
