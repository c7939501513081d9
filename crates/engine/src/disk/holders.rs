//! Other users of a file, as far as the kernel lists them, for the error of a refused open.

use std::os::fd::AsFd;

use rustix::fs::{fstat, major, minor};

/// The process that has locked the file. On some file systems the kernel lists locks under another
/// number of the device; then the process is not known.
pub(super) fn of(file: impl AsFd) -> Option<String> {
    let stat = fstat(file).ok()?;
    let (major, minor) = (major(stat.st_dev), minor(stat.st_dev));
    let place = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let pid = locks.lines().find_map(|line| holder_in(line, &place))?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("process {pid} ({})", name.trim_end()))
}

/// The process in a line `1: FLOCK ADVISORY WRITE PID PLACE START END`, if it is about `place`.
fn holder_in(line: &str, place: &str) -> Option<u32> {
    let mut words = line.split_whitespace().skip(4);
    let pid = words.next()?.parse().ok()?;
    (words.next()? == place).then_some(pid)
}

/// Whether the kernel swaps to the file: then it refuses writes, but only when they are sent.
pub(super) fn is_swap(file: impl AsFd) -> bool {
    let Ok(own) = fstat(file) else { return false };
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let paths = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    let mut found = paths.filter_map(|path| rustix::fs::stat(unescaped(path)).ok());
    found.any(|swap| (swap.st_dev, swap.st_ino) == (own.st_dev, own.st_ino))
}

/// A path as the kernel lists it: blanks are octal numbers after a backslash.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, blank)| path.replace(code, blank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_with_a_lock_is_found_by_the_file() {
        let line = "7: FLOCK  ADVISORY  WRITE 812 fe:00:1234 0 EOF";
        assert_eq!(holder_in(line, "fe:00:1234"), Some(812));
        assert_eq!((holder_in(line, "fe:00:123"), holder_in("7: FLOCK", "fe")), (None, None));
        let file = tempfile::tempfile().unwrap();
        assert!(!is_swap(&file));
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        // Where the file system's number is the listed one, it is this process.
        if let Some(who) = of(&file) {
            assert!(who.starts_with(&format!("process {} (", std::process::id())), "{who}");
        }
        assert_eq!(unescaped("/a\\040b\\134c"), "/a b\\c");
    }
}
