//! Other users of a file or block device, as far as the kernel lists them, for the error of a
//! refused open.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, stat};
use rustix::io::Errno;

use super::ioctls::Inode;

/// The major and minor number of a block device.
pub(super) type Number = (u32, u32);

/// The process that has locked the file.
pub(super) fn of(file: impl AsFd) -> Option<String> {
    let stat = fstat(file).ok()?;
    of_inode(((major(stat.st_dev), minor(stat.st_dev)), stat.st_ino))
}

/// The process that has locked a whole file with `flock`. On some file systems the kernel lists
/// locks under another number of the device; then the process is not known.
pub(super) fn of_inode(((major, minor), inode): Inode) -> Option<String> {
    let place = format!("{major:02x}:{minor:02x}:{inode}");
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    let pid = locks.lines().find_map(|line| holder_in(line, &place))?;
    let name = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(&name).trim_end().replace(char::is_control, " ");
    Some(format!("process {pid} ({name})"))
}

/// The process in a line `1: FLOCK ADVISORY WRITE PID PLACE START END`, if it is about `place`.
fn holder_in(line: &str, place: &str) -> Option<u32> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, "FLOCK", _, _, pid, found, ..] = words[..] else { return None };
    if found == place { pid.parse().ok() } else { None }
}

/// Whether the kernel swaps to the file: then it refuses writes, but only when they are sent.
pub(super) fn is_swap(file: impl AsFd) -> bool {
    let Ok(own) = fstat(file) else { return false };
    swaps().iter().any(|swap| (swap.st_dev, swap.st_ino) == (own.st_dev, own.st_ino))
}

/// The files and block devices that the kernel swaps to.
fn swaps() -> Vec<rustix::fs::Stat> {
    // Paths there may have any bytes.
    let swaps = std::fs::read("/proc/swaps").unwrap_or_default();
    let lines = swaps.split(|byte| *byte == b'\n').skip(1);
    let paths = lines.filter_map(|line| line.split(u8::is_ascii_whitespace).next());
    paths.filter_map(|path| stat(OsStr::from_bytes(&unescaped(path))).ok()).collect()
}

/// The user with a claim on the block device at `path`, or on one of its partitions.
pub(crate) fn of_device(path: &Path) -> Option<String> {
    let number = number_at(path)?;
    if let Some(who) = of_number(number) {
        return Some(who);
    }
    parts_of(&folder(number)).into_iter().find_map(|(name, part)| {
        let who = of_number(part)?;
        Some(format!("{who}, which has its partition {name}"))
    })
}

/// The partitions of the disk that sysfs describes in `folder`.
fn parts_of(folder: &Path) -> Vec<(String, Number)> {
    let names = names_in(folder).into_iter();
    let mut parts: Vec<_> = names
        .filter(|name| folder.join(name).join("partition").exists())
        .filter_map(|name| Some((name.clone(), number_of(&folder.join(name))?)))
        .collect();
    parts.sort();
    parts
}

/// The devices that have bytes of a block device: its partitions, or the disk that it is a
/// partition of.
pub(super) fn related(number: Number) -> Vec<(String, Number)> {
    let Ok(folder) = folder(number).canonicalize() else { return Vec::new() };
    if !folder.join("partition").exists() {
        return parts_of(&folder);
    }
    let whole = || {
        let whole = folder.parent()?;
        Some((whole.file_name()?.to_str()?.to_owned(), number_of(whole)?))
    };
    whole().into_iter().collect()
}

/// The number of the block device that sysfs describes in `folder`.
fn number_of(folder: &Path) -> Option<Number> {
    let text = std::fs::read_to_string(folder.join("dev")).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Whether the block device at `path` has a user with a claim.
pub(super) fn is_claimed(path: impl AsRef<Path>) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    let claim = rustix::fs::open(path.as_ref(), flags, Mode::empty());
    claim.is_err_and(|errno| errno == Errno::BUSY)
}

/// Whether the block device is mounted, and all of its mounts only read.
pub(super) fn is_mounted_read_only(number: Number) -> bool {
    let mounts = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mounts = String::from_utf8_lossy(&mounts);
    let mut of_it = mounts.lines().filter(|line| mounted_in(line, number).is_some()).peekable();
    of_it.peek().is_some() && of_it.all(is_read_only)
}

/// Whether the file system of a line of mountinfo is not written, by whatever mount of it.
fn is_read_only(line: &str) -> bool {
    let options = line.split_once(" - ").and_then(|(_, end)| end.split(' ').nth(2));
    options.is_some_and(|options| options.split(',').next() == Some("ro"))
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
    let source = |path: &str| number_at(Path::new(OsStr::from_bytes(&unescaped(path.as_bytes()))));
    let is_it = listed == format!("{}:{}", number.0, number.1)
        || end.split(' ').nth(1).and_then(source) == Some(number);
    is_it.then(|| String::from_utf8_lossy(&unescaped(place.as_bytes())).into_owned())
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

/// A path as the kernel lists it: blanks and others are octal numbers after a backslash.
fn unescaped(path: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|code| std::str::from_utf8(code).ok());
        let byte = code.and_then(|code| u8::from_str_radix(code, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_with_a_lock_is_found_by_the_file() {
        let line = "7: FLOCK  ADVISORY  WRITE 812 fe:00:1234 0 EOF";
        assert_eq!(holder_in(line, "fe:00:1234"), Some(812));
        assert_eq!((holder_in(line, "fe:00:123"), holder_in("7: FLOCK", "fe")), (None, None));
        let other = "7: POSIX  ADVISORY  WRITE 812 fe:00:1234 0 EOF";
        assert_eq!(holder_in(other, "fe:00:1234"), None, "a lock of a part is another one");
        let file = tempfile::tempfile().unwrap();
        assert!(!is_swap(&file));
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        // Where the file system's number is the listed one, it is this process.
        if let Some(who) = of(&file) {
            assert!(who.starts_with(&format!("process {} (", std::process::id())), "{who}");
        }
        assert_eq!(unescaped(b"/a\\040b\\134\\04\\"), b"/a b\\\\04\\");
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

    #[test]
    fn what_only_reads_is_read_only_by_its_file_system() {
        let line =
            |mount: &str, system: &str| format!("9 1 8:1 / /m {mount} - ext4 /dev/x {system}");
        assert!(is_read_only(&line("ro,noatime", "ro,errors=remount-ro")));
        assert!(!is_read_only(&line("ro", "rw,errors=remount-ro")), "another mount may write");
        assert!(!is_read_only("9 1 8:1 /"));
    }
}
