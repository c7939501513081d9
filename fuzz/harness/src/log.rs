//! Replaces a server's log: it is not read here, but its lines must be lines.

/// Takes one line.
pub fn line(text: &str) {
    assert!(!text.contains('\n'), "{text:?}");
}

/// Always the same time: runs of the same input are alike.
pub fn now_seconds() -> u64 {
    0
}

/// A time as text.
pub fn timestamp(seconds: u64) -> String {
    seconds.to_string()
}

/// The fuzzer handles panics.
pub fn abort_on_panic() {}

/// The maximum size of a log.
pub const LOG_BYTES_MAX: u64 = 1 << 20;

/// Does not open a log.
pub fn lies_at(_: std::path::PathBuf) {}

/// Does not move a log.
pub fn moves_to(_: &std::path::Path) {}

/// No log is anywhere.
pub fn is_elsewhere() -> bool {
    false
}

/// Does not reopen a log.
pub fn reopen() -> std::io::Result<bool> {
    Ok(false)
}

/// The length of the log, which does not exist.
pub fn length() -> u64 {
    0
}

/// The path of the older log.
pub fn before(path: &std::path::Path) -> std::path::PathBuf {
    path.with_extension("log.1")
}
