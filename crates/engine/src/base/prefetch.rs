//! A prefetch into the CPU's cache. A load would do that too, but a processor holds back all later
//! stores until it has the loaded value: a copy after it would begin late.

#![allow(unsafe_code)]

/// Prefetches the cache line where `value` begins.
pub fn prefetch<T>(value: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint to the processor: it never faults and never stores.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(value).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    std::hint::black_box(value);
}
