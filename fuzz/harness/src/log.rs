//! In the place of a server's log: nobody reads it here, but its lines must be lines.

/// Takes one line.
pub fn line(text: &str) {
    assert!(!text.contains('\n'), "{text:?}");
}

/// No time: runs of the same input are alike.
pub fn now_seconds() -> u64 {
    0
}

/// A time as text.
pub fn timestamp(seconds: u64) -> String {
    seconds.to_string()
}

/// Panics are the fuzzer's.
pub fn abort_on_panic() {}

/// The longest log.
pub const LOG_BYTES_MAX: u64 = 1 << 20;

/// There is no log.
pub fn lies_at(_: std::path::PathBuf) {}

/// There is no log.
pub fn moves_to(_: &std::path::Path) {}

/// There is no log.
pub fn reopen() -> std::io::Result<bool> {
    Ok(false)
}

/// There is no log.
pub fn length() -> u64 {
    0
}

/// Where the log before this one would be.
pub fn before(path: &std::path::Path) -> std::path::PathBuf {
    path.with_extension("log.1")
}
