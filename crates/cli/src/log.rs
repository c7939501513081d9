//! The server's log: one line per event, with the time in UTC, on standard error (which is
//! `NAME.log` unless the server runs in the foreground).
//!
//! It outlives the device, and is bounded: a log that has grown to [`LOG_BYTES_MAX`] becomes
//! `NAME.log.1`, replaces the previous one of that name, and a new log begins. SIGHUP opens the log
//! again, so that other programs can move it away first.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::last_end;

/// The longest log. The previous log can have the same length.
pub const LOG_BYTES_MAX: u64 = 1 << 20;

/// The path of the log on standard error, if udm opened it.
static PLACE: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Writes one line.
pub fn line(text: &str) {
    let stamp = timestamp(now_seconds());
    // A part of it may come from a medium or a client, and must not look like another line.
    let text = text.replace(char::is_control, " ");
    // A full disk under the log must not stop a server.
    let _ = writeln!(std::io::stderr(), "{stamp} {text}");
    let place = place();
    if let Some(path) = &*place
        && length() >= LOG_BYTES_MAX
    {
        let _ = std::fs::rename(path, before(path)).and_then(|()| open(path));
    }
}

/// Standard error is the log at `path` from now on.
pub fn lies_at(path: PathBuf) {
    *place() = Some(path);
}

/// The log was moved to `path`.
pub fn moves_to(path: &Path) {
    if let Some(place) = &mut *place() {
        path.clone_into(place);
    }
}

/// Opens the log at its path again, after the old one was moved away. Returns `false` without a
/// log.
pub fn reopen() -> std::io::Result<bool> {
    let place = place();
    let Some(path) = &*place else { return Ok(false) };
    open(path)?;
    Ok(true)
}

/// Whether udm opened a log, and it is not the file at its path any more.
pub fn is_elsewhere() -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = place();
    let Some(path) = &*place else { return false };
    let Ok(own) = rustix::fs::fstat(std::io::stderr()) else { return false };
    let found = std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    !found.is_ok_and(|found| found == (own.st_dev, own.st_ino))
}

/// Bytes of the log; 0 if standard error is not a file.
pub fn length() -> u64 {
    rustix::fs::fstat(std::io::stderr()).map_or(0, |stat| stat.st_size.try_into().unwrap_or(0))
}

/// The path of the log before the log at `path`.
pub fn before(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Makes the file at `path` standard error.
fn open(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let no_follow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
    let mut options = File::options();
    let file = options.create(true).append(true).mode(0o600).custom_flags(no_follow).open(path)?;
    Ok(rustix::stdio::dup2_stderr(&file)?)
}

fn place() -> MutexGuard<'static, Option<PathBuf>> {
    PLACE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Seconds since 1970.
pub fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Makes each panic of any thread a line in the log and the end of the process: the engines are
/// safe against a crash at any point, but not against other effects of a panic.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|info| {
        line(&format!("this server ends because of a bug: {info}"));
        line(&format!("{}", std::backtrace::Backtrace::force_capture()));
        last_end::record("because of a bug, which the log names above");
        std::process::abort();
    }));
}

/// `2026-01-31T23:59:59Z` for seconds since 1970.
pub fn timestamp(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of year 0; leap days then end their years, and eras of 400 years
    // all have the same length.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::timestamp;

    #[test]
    fn times_are_as_date_prints_them() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(timestamp(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(timestamp(1_798_761_599), "2026-12-31T23:59:59Z");
    }
}
