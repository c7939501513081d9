//! Requests to a file or a loop device, by ioctl, that tell who it is. Each only reads.

#![allow(unsafe_code)]

use std::os::fd::AsFd;

use rustix::ioctl::{Getter, Opcode, ioctl, opcode};

/// The UUID of a file system.
pub(super) type Uuid = [u8; 16];

/// A file: the number of its device, as major and minor, and its inode.
pub(super) type Inode = ((u32, u32), u64);

/// `struct fsuuid2`.
#[repr(C)]
#[derive(Clone, Copy)]
struct FsUuid {
    len: u8,
    uuid: Uuid,
}

/// `struct xfs_fsop_geom_v1`.
#[repr(C)]
#[derive(Clone, Copy)]
struct XfsGeometry {
    before: [u64; 8],
    uuid: Uuid,
    after: [u64; 4],
}

/// `struct loop_info64`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LoopInfo {
    device: u64,
    inode: u64,
    block_device: u64,
    after: [u64; 26],
}

const FS_IOC_GETFSUUID: Opcode = opcode::read::<FsUuid>(0x15, 0);
const FS_IOC_GETVERSION: Opcode = opcode::read::<libc::c_long>(b'v', 1);
const XFS_IOC_FSGEOMETRY_V1: Opcode = opcode::read::<XfsGeometry>(b'X', 100);
const LOOP_GET_STATUS64: Opcode = 0x4C05;

const _: () = assert!(size_of::<FsUuid>() == 17);
const _: () = assert!(size_of::<XfsGeometry>() == 112);
const _: () = assert!(size_of::<LoopInfo>() == 232);

/// The UUID of an open file's file system (Linux 6.9, if the file system has one).
pub(super) fn fs_uuid(file: impl AsFd) -> Option<Uuid> {
    // SAFETY: the request writes one answer of this layout.
    let answer = unsafe { ioctl(file, Getter::<FS_IOC_GETFSUUID, FsUuid>::new()) }.ok()?;
    (usize::from(answer.len) == size_of::<Uuid>()).then_some(answer.uuid)
}

/// The UUID of the XFS of an open file, on any kernel. Only for files on XFS.
pub(super) fn xfs_uuid(file: impl AsFd) -> Option<Uuid> {
    // SAFETY: the request writes one answer of this layout.
    let answer = unsafe { ioctl(file, Getter::<XFS_IOC_FSGEOMETRY_V1, XfsGeometry>::new()) };
    answer.ok().map(|answer| answer.uuid)
}

/// The generation of an open file's inode, which differs for the next file with this inode number.
pub(super) fn generation(file: impl AsFd) -> Option<u32> {
    // SAFETY: the request writes at most one long. File systems write its first four bytes.
    let answer = unsafe { ioctl(file, Getter::<FS_IOC_GETVERSION, [u32; 2]>::new()) }.ok()?;
    Some(answer[0])
}

/// The backing file of an open loop device or of a partition of it, and the number of the block
/// device if the file is one.
pub(super) fn loop_file(device: impl AsFd) -> Option<(Inode, Option<(u32, u32)>)> {
    // SAFETY: the request writes one answer of this layout.
    let answer = unsafe { ioctl(device, Getter::<LOOP_GET_STATUS64, LoopInfo>::new()) }.ok()?;
    let block_device = (answer.block_device != 0).then(|| number_of(answer.block_device as u32));
    Some(((number_of(answer.device as u32), answer.inode), block_device))
}

/// The major and minor of a device, which the kernel packs into 12 and 20 bits.
fn number_of(packed: u32) -> (u32, u32) {
    (packed >> 8 & 0xFFF, packed & 0xFF | packed >> 12 & 0xF_FF00)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_two_numbers() {
        let numbers =
            [(0x0000_0701, (7, 1)), (0x0001_0300, (259, 0)), (0xFDA0_FDBC, (253, 0xF_DABC))];
        for (packed, number) in numbers {
            assert_eq!(number_of(packed), number);
        }
    }
}
