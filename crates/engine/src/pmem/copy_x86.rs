//! The primitives of x86-64, in assembly.
//!
//! Every block here moves whole cache lines with `dst` aligned to 64 bytes, stores one aligned
//! word, or flushes one line.
//! None of them says `nomem` or `readonly`: the compiler takes each as touching any memory, which
//! keeps it from moving other accesses across.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

use super::{LINE, Primitive};
use crate::sync::OnceLock;

/// CPU features that std does not detect.
#[derive(Clone, Copy)]
struct Features {
    has_clflushopt: bool,
    has_clwb: bool,
    has_movdir64b: bool,
}

fn features() -> Features {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    *FEATURES.get_or_init(|| {
        // Leaf 7 exists on every CPU whose highest leaf is at least 7; else all bits count as
        // clear.
        if __cpuid_count(0, 0).eax < 7 {
            return Features { has_clflushopt: false, has_clwb: false, has_movdir64b: false };
        }
        let leaf = __cpuid_count(7, 0);
        Features {
            has_clflushopt: leaf.ebx & 1 << 23 != 0,
            has_clwb: leaf.ebx & 1 << 24 != 0,
            has_movdir64b: leaf.ecx & 1 << 28 != 0,
        }
    })
}

pub(super) fn is_available(primitive: Primitive) -> bool {
    match primitive {
        Primitive::Plain | Primitive::Movnti => true,
        Primitive::Nt32 => is_x86_feature_detected!("avx"),
        Primitive::Nt64 => is_x86_feature_detected!("avx512f"),
        Primitive::Movdir64b => features().has_movdir64b,
        Primitive::Clflushopt => features().has_clflushopt,
        Primitive::Clwb => features().has_clwb,
    }
}

/// # Safety
/// `dst` is a multiple of 64; it is writable and `src` readable for `lines` lines, of which there
/// is at least one, and they do not overlap. The primitive is available. Others may store to `src`
/// meanwhile.
pub(super) unsafe fn copy_lines(primitive: Primitive, dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: the caller's promise, handed on.
    unsafe {
        match primitive {
            Primitive::Plain => plain(dst, src, lines),
            Primitive::Movnti => movnti(dst, src, lines),
            Primitive::Nt32 => nt32(dst, src, lines),
            Primitive::Nt64 => nt64(dst, src, lines),
            Primitive::Movdir64b => movdir64b(dst, src, lines),
            Primitive::Clflushopt => {
                plain(dst, src, lines);
                clflushopt(dst, lines);
            }
            Primitive::Clwb => {
                plain(dst, src, lines);
                clwb(dst, lines);
            }
        }
    }
}

/// # Safety
/// As for [`copy_lines`]; so for each function below.
unsafe fn plain(dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: reads and writes exactly `lines` lines. Aligned 16-byte stores, of which each
    // 8-byte half is whole.
    unsafe {
        asm!(
            "2:",
            "movups {a}, [{src}]",
            "movups {b}, [{src} + 16]",
            "movups {c}, [{src} + 32]",
            "movups {d}, [{src} + 48]",
            "movaps [{dst}], {a}",
            "movaps [{dst} + 16], {b}",
            "movaps [{dst} + 32], {c}",
            "movaps [{dst} + 48], {d}",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {lines}",
            "jnz 2b",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            lines = inout(reg) lines => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// # Safety
/// See [`plain`].
unsafe fn movnti(dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: reads and writes exactly `lines` lines.
    unsafe {
        asm!(
            "2:",
            "mov {a}, [{src}]",
            "mov {b}, [{src} + 8]",
            "mov {c}, [{src} + 16]",
            "mov {d}, [{src} + 24]",
            "movnti [{dst}], {a}",
            "movnti [{dst} + 8], {b}",
            "movnti [{dst} + 16], {c}",
            "movnti [{dst} + 24], {d}",
            "mov {a}, [{src} + 32]",
            "mov {b}, [{src} + 40]",
            "mov {c}, [{src} + 48]",
            "mov {d}, [{src} + 56]",
            "movnti [{dst} + 32], {a}",
            "movnti [{dst} + 40], {b}",
            "movnti [{dst} + 48], {c}",
            "movnti [{dst} + 56], {d}",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {lines}",
            "jnz 2b",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            lines = inout(reg) lines => _,
            a = out(reg) _,
            b = out(reg) _,
            c = out(reg) _,
            d = out(reg) _,
            options(nostack),
        );
    }
}

/// # Safety
/// See [`plain`].
#[target_feature(enable = "avx")]
unsafe fn nt32(dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: reads and writes exactly `lines` lines. vzeroupper clears upper halves of registers;
    // the clobbers (every ymm register) keep the compiler from relying on them. It spares the SSE
    // code that follows a penalty.
    unsafe {
        asm!(
            "2:",
            "vmovdqu ymm0, [{src}]",
            "vmovdqu ymm1, [{src} + 32]",
            "vmovntdq [{dst}], ymm0",
            "vmovntdq [{dst} + 32], ymm1",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {lines}",
            "jnz 2b",
            "vzeroupper",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            lines = inout(reg) lines => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
            out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
            out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
            options(nostack),
        );
    }
}

/// # Safety
/// See [`plain`].
#[target_feature(enable = "avx512f")]
unsafe fn nt64(dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: reads and writes exactly `lines` lines. Registers 16 and up lack SSE names, so no
    // upper half has to be cleared.
    unsafe {
        asm!(
            "2:",
            "vmovdqu64 zmm16, [{src}]",
            "vmovntdq [{dst}], zmm16",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {lines}",
            "jnz 2b",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            lines = inout(reg) lines => _,
            out("zmm16") _,
            options(nostack),
        );
    }
}

/// # Safety
/// See [`plain`].
unsafe fn movdir64b(dst: *mut u8, src: *const u8, lines: usize) {
    // SAFETY: reads and writes exactly `lines` lines; `dst` is aligned as the instruction demands.
    unsafe {
        asm!(
            "2:",
            "movdir64b {dst}, [{src}]",
            "add {src}, 64",
            "add {dst}, 64",
            "dec {lines}",
            "jnz 2b",
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            lines = inout(reg) lines => _,
            options(nostack),
        );
    }
}

/// # Safety
/// `dst` points to `lines` mapped lines; the CPU has the instruction.
unsafe fn clflushopt(dst: *mut u8, lines: usize) {
    for line in 0..lines {
        // SAFETY: changes no content; the address is mapped.
        unsafe { asm!("clflushopt [{}]", in(reg) dst.add(line * LINE), options(nostack)) };
    }
}

/// # Safety
/// `dst` points to `lines` mapped lines; the CPU has the instruction.
unsafe fn clwb(dst: *mut u8, lines: usize) {
    for line in 0..lines {
        // SAFETY: changes no content; the address is mapped.
        unsafe { asm!("clwb [{}]", in(reg) dst.add(line * LINE), options(nostack)) };
    }
}

/// Stores a word past the caches.
///
/// # Safety
/// `dst` is a multiple of 8 and writable.
pub(super) unsafe fn store_past(dst: *mut u64, word: u64) {
    // SAFETY: the caller's promise. movnti is part of SSE2, which every x86-64 has.
    unsafe { asm!("movnti [{}], {}", in(reg) dst, in(reg) word, options(nostack)) };
}

/// Sends the line of `dst` out of the caches, by the best instruction there is; complete after
/// the next fence.
///
/// # Safety
/// `dst` is mapped.
pub(super) unsafe fn flush_line(dst: *mut u8) {
    let features = features();
    // SAFETY: changes no content; the caller vouches for the address. clflush is part of SSE2,
    // which every x86-64 has.
    unsafe {
        if features.has_clwb {
            asm!("clwb [{}]", in(reg) dst, options(nostack));
        } else if features.has_clflushopt {
            asm!("clflushopt [{}]", in(reg) dst, options(nostack));
        } else {
            asm!("clflush [{}]", in(reg) dst, options(nostack));
        }
    }
}

pub(super) fn fence() {
    // SAFETY: sfence is part of SSE, which every x86-64 has; it touches no memory itself.
    unsafe { asm!("sfence", options(nostack)) };
}
