//! Sizes that all modules share. The only file where 512 appears as a sector's size.

/// Bytes in a sector: the unit of table lines, of atomicity, and of every request's alignment.
pub const SECTOR: u64 = 512;

/// Bytes in a block of the index and in a page of memory.
pub const BLOCK: u64 = 4096;

/// One kibibyte.
pub const KIB: u64 = 1 << 10;
/// One mebibyte.
pub const MIB: u64 = 1 << 20;
/// One gibibyte.
pub const GIB: u64 = 1 << 30;

/// The longest request that an engine takes, in bytes: the NBD protocol's usual maximum.
pub const BIO_BYTES_MAX: u64 = 32 * MIB;

/// A moment, in nanoseconds since an arbitrary origin. Handed in: no engine reads a clock.
pub type Nanos = u64;

/// One second, as [`Nanos`].
pub const SECOND: Nanos = 1_000_000_000;

/// Two sizes for a message that compares them: in rounded units, or in bytes if different sizes
/// would look equal.
pub fn human_pair(one: u64, other: u64) -> (String, String) {
    let pair = (human_bytes(one), human_bytes(other));
    if pair.0 != pair.1 || one == other {
        return pair;
    }
    (format!("{one} bytes"), format!("{other} bytes"))
}

/// Prints a number of bytes in units: `512 B`, `4.0 KiB`, `1.5 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_differ_look_different() {
        let pair = |one, other| human_pair(one, other);
        assert_eq!(pair(512 * MIB, GIB), ("512.0 MiB".into(), "1.0 GiB".into()));
        assert_eq!(pair(MIB, MIB), ("1.0 MiB".into(), "1.0 MiB".into()));
        assert_eq!(pair(8 * MIB - 512, 8 * MIB), ("8388096 bytes".into(), "8388608 bytes".into()));
        assert_eq!(pair(512 * MIB - 1, 512 * MIB).0, "536870911 bytes");
    }
}
