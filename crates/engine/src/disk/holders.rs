//! Other users of a file or block device, as far as the kernel lists them, for the error of a
//! refused open.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, fstat, major, minor, stat};

/// The major and minor number of a block device.
pub(super) type Number = (u32, u32);

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
    swaps().iter().any(|swap| (swap.st_dev, swap.st_ino) == (own.st_dev, own.st_ino))
}

/// The files and block devices that the kernel swaps to.
fn swaps() -> Vec<rustix::fs::Stat> {
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let paths = swaps.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    paths.filter_map(|path| stat(unescaped(path)).ok()).collect()
}

/// The user with a claim on the block device at `path`, or on one of its partitions.
pub(crate) fn of_device(path: &Path) -> Option<String> {
    let number = number_at(path)?;
    if let Some(who) = of_number(number) {
        return Some(who);
    }
    let folder = folder(number);
    let mut parts: Vec<_> = names_in(&folder)
        .into_iter()
        .filter(|name| folder.join(name).join("partition").exists())
        .collect();
    parts.sort();
    parts.iter().find_map(|name| {
        let text = std::fs::read_to_string(folder.join(name).join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        let who = of_number((major.parse().ok()?, minor.parse().ok()?))?;
        Some(format!("{who}, which has its partition {name}"))
    })
}

fn of_number(number: Number) -> Option<String> {
    let is_it = |swap: &rustix::fs::Stat| {
        FileType::from_raw_mode(swap.st_mode) == FileType::BlockDevice
            && (major(swap.st_rdev), minor(swap.st_rdev)) == number
    };
    if swaps().iter().any(is_it) {
        return Some("the kernel, which swaps to it (`swapoff` ends that)".into());
    }
    if let Some(holder) = names_in(&folder(number).join("holders")).first() {
        return Some(format!("the device {holder}"));
    }
    // Paths there may have any bytes.
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mounts = String::from_utf8_lossy(&mounts);
    let place = mounts.lines().find_map(|line| mounted_in(line, number))?;
    Some(format!("the mount on {place}"))
}

/// The mount point in a line of mountinfo, if it is the mount of a block device.
fn mounted_in(line: &str, number: Number) -> Option<String> {
    let (start, end) = line.split_once(" - ")?;
    let mut words = start.split(' ').skip(2);
    let listed = words.next()?;
    // The second word from there: the root of the mount stands between.
    let place = words.nth(1)?;
    // File systems over several devices have a number of their own.
    let is_source = || number_at(Path::new(&unescaped(end.split(' ').nth(1)?)));
    let is_it = listed == format!("{}:{}", number.0, number.1) || is_source() == Some(number);
    is_it.then(|| unescaped(place))
}

/// The number of the block device at `path`.
fn number_at(path: &Path) -> Option<Number> {
    let stat = stat(path).ok()?;
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
    is_device.then(|| (major(stat.st_rdev), minor(stat.st_rdev)))
}

/// Where sysfs describes a block device.
pub(super) fn folder((major, minor): Number) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// The names of the entries of a folder.
pub(super) fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
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

    #[test]
    fn a_mount_is_found_by_the_number_or_by_the_source() {
        let line = "29 1 8:1 / /mnt/a\\040b rw,relatime shared:1 - ext4 /dev/root rw";
        assert_eq!(mounted_in(line, (8, 1)), Some("/mnt/a b".into()));
        assert_eq!(mounted_in(line, (8, 11)), None);
        assert_eq!(mounted_in("29 1 8:1 /", (8, 1)), None);
        let line = "29 1 0:41 /sub /mnt rw - btrfs /dev/null rw";
        assert_eq!(mounted_in(line, (1, 3)), None, "this is no block device");
    }
}
