//! Holes of files: ranges that take no space and read as zeroes.

use std::os::fd::OwnedFd;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::Extent;
use crate::units::SECTOR;

/// The state of the first bytes of `[offset, offset + len)` in a file, and how many bytes have this
/// state, by at most two calls. If the state is unknown, it counts as data, even beyond the end of
/// a file that was cut short.
pub(super) fn extent(file: &OwnedFd, offset: u64, len: u64) -> (u64, Extent) {
    let data_at = match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(at) => at,
        // The rest of the file is a hole, or its end is before `offset`.
        Err(Errno::NXIO) => rustix::fs::fstat(file).map_or(0, |stat| stat.st_size as u64),
        Err(_) => return (len, Extent::Data),
    };
    let zeroes = data_at.saturating_sub(offset).min(len) / SECTOR * SECTOR;
    if zeroes > 0 {
        return (zeroes, Extent::Zeroes);
    }
    let data = rustix::fs::seek(file, SeekFrom::Hole(offset))
        .map_or(len, |hole_at| hole_at.saturating_sub(offset).next_multiple_of(SECTOR));
    (data.clamp(SECTOR, len), Extent::Data)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::units::MIB;

    #[test]
    fn holes_are_told_and_the_rest_is_data() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * MIB).unwrap();
        file.write_all_at(&[7; 65536], 2 * MIB).unwrap();
        let fd = OwnedFd::from(file.try_clone().unwrap());
        assert_eq!(extent(&fd, 0, 8 * MIB), (2 * MIB, Extent::Zeroes));
        assert_eq!(extent(&fd, SECTOR, SECTOR), (SECTOR, Extent::Zeroes));
        assert_eq!(extent(&fd, 2 * MIB, MIB), (65536, Extent::Data));
        assert_eq!(extent(&fd, 3 * MIB, 5 * MIB), (5 * MIB, Extent::Zeroes));
        // The part that was cut off is not a hole.
        file.set_len(4 * MIB).unwrap();
        assert_eq!(extent(&fd, 3 * MIB, 5 * MIB), (MIB, Extent::Zeroes));
        assert_eq!(extent(&fd, 4 * MIB, 4 * MIB), (4 * MIB, Extent::Data));
    }
}
