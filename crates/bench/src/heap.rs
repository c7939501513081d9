//! How many bytes of memory the process has allocated and not freed.
//!
//! The kernel's numbers for a process do not show this: freed memory is kept for later.

#![allow(unsafe_code)]

/// Bytes in use, by the C library's own account.
#[cfg(target_env = "gnu")]
pub fn bytes_in_use() -> u64 {
    // SAFETY: it takes no arguments, and only reads the allocator's counters under its locks.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as u64
}

/// Bytes in use as the kernel counts them, if the C library keeps no count.
#[cfg(not(target_env = "gnu"))]
pub fn bytes_in_use() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    const ALONE: &str = "UDM_TEST_HEAP_ALONE";

    /// The account is of the whole process, so other tests must not run in it.
    #[test]
    fn what_is_taken_is_counted_and_what_is_freed_is_not() {
        if std::env::var_os(ALONE).is_some() {
            return take_and_free();
        }
        let this = "heap::tests::what_is_taken_is_counted_and_what_is_freed_is_not";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    fn take_and_free() {
        let before = super::bytes_in_use();
        let taken: Vec<Vec<u8>> = (0..1000).map(|_| vec![1; 8192]).collect();
        let between = super::bytes_in_use();
        assert!(between >= before + 8_000_000, "{before} {between}");
        drop(taken);
        assert!(super::bytes_in_use() < between - 4_000_000);
    }
}
