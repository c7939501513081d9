//! The identity of a device or file: it stays the same over restarts, and differs from all others.
//!
//! For block devices it is the identifier of the hardware or its driver (`wwid`, a serial number,
//! the UUID of the device mapper or of a RAID, a loop device's file). For files it is the file
//! system, the inode and the birth time, so a file that replaced another one has another identity.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{Statx, StatxFlags};

/// An identity has at most this many bytes.
const IDENTITY_BYTES_MAX: usize = 200;

/// The kernel's information about an open file.
pub(super) fn stat(file: &OwnedFd) -> rustix::io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME | DIO_ALIGN;
    rustix::fs::statx(file, "", rustix::fs::AtFlags::EMPTY_PATH, wanted)
}

/// STATX_DIOALIGN.
pub(super) const DIO_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2000);

/// The identity of an open file or block device. `size_bytes`: the size of the whole. `start`: the
/// start of the used part.
pub(super) fn of(
    file: &OwnedFd,
    stat: &Statx,
    is_block_device: bool,
    size_bytes: u64,
    start: u64,
) -> String {
    let identity = if is_block_device {
        of_block_device(stat, size_bytes)
    } else {
        let file_system = rustix::fs::fstatvfs(file).map_or(0, |statvfs| statvfs.f_fsid);
        let born = match stat.stx_mask & StatxFlags::BTIME.bits() {
            0 => String::new(),
            _ => format!(" born {}.{:09}", stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
        };
        format!("file on {file_system:016x} inode {}{born}", stat.stx_ino)
    };
    let part = if start > 0 { format!(" from byte {start}") } else { String::new() };
    shortened(identity + &part)
}

fn of_block_device(stat: &Statx, size_bytes: u64) -> String {
    // A loop device's file may be attached again, in part or whole. The other identifiers identify
    // the device itself, which may grow.
    let words = [
        ("dm/uuid", "dm", false),
        ("dm/name", "dm name", false),
        ("loop/backing_file", "loop on", true),
        ("md/uuid", "md", false),
        ("wwid", "wwid", false),
        ("device/wwid", "wwid", false),
        ("serial", "serial", false),
        ("device/serial", "serial", false),
        ("backend", "nbd", true),
    ];
    let found = words.iter().find_map(|(file, word, has_size)| {
        Some((format!("{word} {}", sysfs(number(stat), file)?), *has_size))
    });
    // Without any identity, name and size are the best available identity.
    let (found, has_size) =
        found.unwrap_or_else(|| (format!("block device {}", kernel_word(stat)), true));
    let partition = match sysfs(number(stat), "partition") {
        Some(number) => format!(" partition {number}"),
        None => String::new(),
    };
    let size = if has_size { format!(" of {size_bytes} bytes") } else { String::new() };
    format!("{found}{partition}{size}")
}

/// The kernel's own name of a block device: `vda`, `loop0`.
fn kernel_word(stat: &Statx) -> String {
    let link = std::fs::canonicalize(folder(number(stat))).ok();
    let name = link.as_ref().and_then(|path| path.file_name());
    name.map_or_else(|| "without a name".into(), |name| name.to_string_lossy().into_owned())
}

/// The number of a block device, major and minor.
pub(super) fn number(stat: &Statx) -> (u32, u32) {
    (stat.stx_rdev_major, stat.stx_rdev_minor)
}

fn folder((major, minor): (u32, u32)) -> PathBuf {
    format!("/sys/dev/block/{major}:{minor}").into()
}

/// The content of `file` in sysfs for a block device, or for the disk that it is a partition of.
/// Empty content counts as none.
pub(super) fn sysfs(device: (u32, u32), file: &str) -> Option<String> {
    let own = folder(device);
    // The kernel resolves the link: the parent folder of a partition's folder is its disk's folder.
    let places = match own.join("partition").exists() {
        true => vec![own.join(file), own.join("..").join(file)],
        false => vec![own.join(file)],
    };
    places.iter().find_map(|place| {
        let text = std::fs::read(place).ok()?;
        let text = String::from_utf8_lossy(&text).trim().replace(char::is_control, " ");
        (!text.is_empty()).then_some(text)
    })
}

/// Long names keep their beginning, and a checksum of everything.
fn shortened(identity: String) -> String {
    if identity.len() <= IDENTITY_BYTES_MAX {
        return identity;
    }
    let checksum = crate::base::crc::crc32c_raw(0, identity.as_bytes());
    let mut kept = IDENTITY_BYTES_MAX - 10;
    while !identity.is_char_boundary(kept) {
        kept -= 1;
    }
    format!("{}~{checksum:08x}", &identity[..kept])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_identities_stay_distinct() {
        let long = |end: &str| shortened(format!("{}{end}", "\u{e9}".repeat(300)));
        assert_ne!(long("a"), long("b"));
        assert!(long("a").len() <= IDENTITY_BYTES_MAX);
        assert_eq!(shortened("short".into()), "short");
    }
}
