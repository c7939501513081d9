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
