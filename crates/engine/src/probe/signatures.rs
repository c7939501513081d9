//! The table: magic numbers and their positions, from the formats' own documents.
//!
//! A line of the table is a name and bytes at a place, counted from the start or, as "this many
//! bytes before the end", from the end. Signatures that need more than that have a function below.

use super::{Finding, Window};
use crate::units::KIB;

/// The position of a magic number.
#[derive(Clone, Copy, Debug)]
enum At {
    Start(u64),
    End(u64),
}

use At::{End, Start};

/// Signatures of formats other than caches.
const CONTENTS: &[(&str, At, &[u8])] = &[
    ("ext2, ext3 or ext4", Start(1080), b"\x53\xEF"),
    ("xfs", Start(0), b"XFSB"),
    ("btrfs", Start(65_600), b"_BHRfS_M"),
    ("f2fs", Start(1024), b"\x10\x20\xF5\xF2"),
    ("ntfs", Start(3), b"NTFS    "),
    ("exfat", Start(3), b"EXFAT   "),
    ("BitLocker", Start(3), b"-FVE-FS-"),
    ("vfat", Start(54), b"FAT12   "),
    ("vfat", Start(54), b"FAT16   "),
    ("vfat", Start(82), b"FAT32   "),
    ("iso9660", Start(32_769), b"CD001"),
    ("udf", Start(32_769), b"BEA01"),
    ("squashfs", Start(0), b"hsqs"),
    ("erofs", Start(1024), b"\xE2\xE1\xF5\xE0"),
    ("cramfs", Start(0), b"\x45\x3D\xCD\x28"),
    ("jfs", Start(32_768), b"JFS1"),
    ("reiserfs", Start(65_588), b"ReIsEr"),
    ("reiser4", Start(65_536), b"ReIsEr4"),
    ("nilfs2", Start(1030), b"\x34\x34"),
    ("ocfs2", Start(8192), b"OCFSV2"),
    ("gfs2", Start(65_536), b"\x01\x16\x19\x70"),
    ("apfs", Start(32), b"NXSB"),
    ("hfsplus", Start(1024), b"H+\x00\x04"),
    ("hfsx", Start(1024), b"HX\x00\x05"),
    ("ReFS", Start(3), b"ReFS\x00\x00\x00\x00"),
    ("bcachefs", Start(4120), b"\xC6\x85\x73\xF6\x66\xCE\x90\xA9\xD9\x6A\x60\xCF\x80\x3D\xF7\xEF"),
    ("VMFS_volume_member", Start(1 << 20), b"\x0D\xD0\x01\xC0"),
    ("VMFS", Start(2 << 20), b"\x5E\xF1\xAB\x2F"),
    ("LVM2_member", Start(0), b"LABELONE"),
    ("LVM2_member", Start(512), b"LABELONE"),
    ("LVM2_member", Start(1024), b"LABELONE"),
    ("LVM2_member", Start(1536), b"LABELONE"),
    ("linux_raid_member (1.1)", Start(0), b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00"),
    ("linux_raid_member (1.2)", Start(4096), b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00"),
    ("isw_raid_member", End(1024), b"Intel Raid ISM Cfg"),
    ("ddf_raid_member", End(512), b"\xDE\x11\xDE\x11"),
    ("gpt", Start(512), b"EFI PART"),
    ("gpt", Start(4096), b"EFI PART"),
    ("gpt (the copy at the end)", End(512), b"EFI PART"),
    ("gpt (the copy at the end)", End(4096), b"EFI PART"),
    ("swap", Start(4086), b"SWAPSPACE2"),
    ("swap", Start(4086), b"SWAP-SPACE"),
    ("swap", Start(8182), b"SWAPSPACE2"),
    ("swap", Start(16_374), b"SWAPSPACE2"),
    ("swap", Start(65_526), b"SWAPSPACE2"),
    ("suspend image", Start(4086), b"S1SUSPEND"),
    ("suspend image", Start(4086), b"S2SUSPEND"),
    ("crypto_LUKS", Start(0), b"LUKS\xBA\xBE"),
    ("crypto_LUKS (second header)", Start(16 * KIB), b"SKUL\xBA\xBE"),
    ("dm-verity", Start(0), b"verity\x00\x00"),
    ("dm-integrity", Start(0), b"integrt\x00"),
    ("VDO", Start(0), b"dmvdo001"),
    ("stratis", Start(528), b"!Stra0tis\x86\xFF\x02^\x41rh"),
    ("ceph_bluestore", Start(0), b"bluestore block device"),
    ("oracleasm", Start(32), b"ORCLDISK"),
    ("drbd", End(4096 - 60), b"\x83\x74\x02"),
    ("DM_era", Start(32), b"\x7B\x07\xC1\x7E\x00\x00\x00\x00"),
    ("qcow2 image", Start(0), b"QFI\xFB"),
    ("vmdk image", Start(0), b"KDMV"),
    ("vhdx image", Start(0), b"vhdxfile"),
    ("vhd image", End(512), b"conectix"),
];

/// udm serves this many of [`CACHES`], the first ones.
const OURS: usize = 3;

/// Signatures of cache devices.
const CACHES: &[(&str, At, &[u8])] = &[
    ("pcache", Start(4104), b"\xEF\x96\xC5\x96\xFA\x5E\xB0\x65"),
    ("writecache", Start(0), b"\x21\x93\x48\x23\x01\x00\x00\x00"),
    ("DM_cache", Start(32), b"\x03\xC4\x18\x00\x00\x00\x00\x00"),
    ("DM_thin", Start(32), b"\xBA\x52\x9C\x01\x00\x00\x00\x00"),
    ("bcache", Start(4120), b"\xC6\x85\x73\xF6\x4E\x1A\x45\xCA\x82\x65\xF5\x7F\x48\xBA\x6D\x81"),
];

/// The cache of a target of ours that begins with these bytes.
pub fn cache_of_ours(front: &[u8]) -> Option<&'static str> {
    let is_there = |(_, at, magic): &&(&str, At, &[u8])| match at {
        Start(at) => front.get(*at as usize..).is_some_and(|rest| rest.starts_with(magic)),
        End(_) => false,
    };
    CACHES[..OURS].iter().find(is_there).map(|(name, ..)| *name)
}

/// All signatures of the table that the device has.
pub fn look(window: &mut Window<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let both = [(CONTENTS, false), (CACHES, true)];
    for (table, is_cache) in both {
        for &(name, at, magic) in table {
            let at = match at {
                Start(at) => at,
                End(back) => match window.size.checked_sub(back) {
                    Some(at) => at,
                    None => continue,
                },
            };
            if window.bytes(at, magic.len()).as_deref() == Some(magic) {
                found.push(Finding { name: name.into(), at, is_cache });
            }
        }
    }
    let others = [old_md(window), md_at_the_end(window), zfs(window)];
    let other = |(name, at): (&str, u64)| Finding { name: name.into(), at, is_cache: false };
    found.extend(others.into_iter().flatten().map(other));
    if found.is_empty() {
        found.extend(partitions(window).map(other));
    }
    found
}

/// md 0.90: in the last whole 64 KiB but one.
fn old_md(window: &mut Window<'_>) -> Option<(&'static str, u64)> {
    let at = (window.size / (64 * KIB) * (64 * KIB)).checked_sub(64 * KIB)?;
    let magic = window.bytes(at, 4)?;
    let is_md = [*b"\xFC\x4E\x2B\xA9", *b"\xA9\x2B\x4E\xFC"].iter().any(|known| magic == known);
    is_md.then_some(("linux_raid_member (0.90)", at))
}

/// md 1.0: at least 8 KiB before the end, on a multiple of 4 KiB.
fn md_at_the_end(window: &mut Window<'_>) -> Option<(&'static str, u64)> {
    let at = (window.size / 512).checked_sub(16)? / 8 * 8 * 512;
    let is_md = window.bytes(at, 8)? == b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00";
    is_md.then_some(("linux_raid_member (1.0)", at))
}

/// zfs: four labels of 256 KiB, two at each end; the second half of each has uberblocks.
fn zfs(window: &mut Window<'_>) -> Option<(&'static str, u64)> {
    const LABEL: u64 = 256 * KIB;
    let end = window.size / LABEL * LABEL;
    let labels = [Some(0), Some(LABEL), end.checked_sub(2 * LABEL), end.checked_sub(LABEL)];
    for label in labels.into_iter().flatten() {
        let Some(half) = window.bytes(label + LABEL / 2, (LABEL / 2) as usize) else { continue };
        let magics = [0x00BA_B10C_u64.to_le_bytes(), 0x00BA_B10C_u64.to_be_bytes()];
        let is_one = |block: &[u8]| magics.iter().any(|magic| block.starts_with(magic));
        if let Some(nth) = half.chunks(KIB as usize).position(is_one) {
            return Some(("zfs_member", label + LABEL / 2 + nth as u64 * KIB));
        }
    }
    None
}

/// A partition table of the old kind. Many other formats look like it, so it is reported last.
fn partitions(window: &mut Window<'_>) -> Option<(&'static str, u64)> {
    let sector = window.bytes(0, 512)?;
    let entries: Vec<&[u8]> = sector[446..510].chunks(16).collect();
    let is_table = sector[510..] == [0x55, 0xAA]
        && entries.iter().all(|entry| entry[0] & 0x7F == 0)
        && entries.iter().any(|entry| entry[4] != 0);
    is_table.then_some(("dos partition table", 510))
}
