//! The writes since a file was last seen whole, and the conclusions from them for a file that was
//! cut.
//!
//! A write beyond the end of a file makes it longer. So if a file is cut while writes are in
//! flight, it ends afterwards at the end of the last of these writes, with holes before them, which
//! read as zeroes. Beyond the cut there are only such holes and the data of these writes. So if a
//! write since the last good check may have made the file's end, then, from that end downwards, udm
//! trusts neither holes nor the data written since. If no such write made the end, the end is the
//! cut itself.
//!
//! A write that failed or ended short may have reached any byte of its range.
//!
//! A file can also be cut and extended to its old length, by another program or by a write up to
//! its very end. The length then does not show the cut, but the file has holes. So once all blocks
//! of a file have existed ("full"), a hole in it is a loss. A check compares the space that the
//! file takes, and searches for holes only if that is less than before. Two kinds of files are
//! excluded: files in which udm itself punches holes, and files on file systems that free blocks of
//! zeroes for reasons of their own.
//!
//! Known gaps: a file system that does not report holes shows none, so only the end of its files is
//! known. And the kernel writes the file under a loop device, so those writes are unknown.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, Stat};

use super::facts::kind_of;
use crate::sync::{Mutex, lock};
use crate::units::SECTOR;

/// Beyond this many ranges, some are joined.
const RANGES_MAX: usize = 4096;
/// In a file of more pieces, data after the first of the writes is not trusted.
const PIECES_MAX: usize = 1 << 16;

/// A range of bytes: where it begins, where it ends.
type Range = (u64, u64);

/// This many further checks must also find less space: a file system that moves blocks during a
/// check may count some of them neither at the old address nor at the new one.
const LOOKS_AGAIN: usize = 3;
/// The unit of `st_blocks`.
const BLOCKS_UNIT: u64 = 512;

/// The writes of one file. Locked while the file is checked.
#[derive(Debug)]
pub(super) struct Recent {
    sent: Mutex<Sent>,
    /// Whether the file system reports holes, and makes none by itself.
    keeps_blocks: bool,
}

/// The result of a check of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Bytes from its start that can be trusted.
    pub left_bytes: u64,
    /// The file has holes although all of its blocks existed before.
    pub is_hollow: bool,
}

#[derive(Debug, Default)]
struct Sent {
    next: u64,
    under_way: BTreeMap<u64, Range>,
    ended: Vec<Range>,
    /// Writes that may have ended at any byte, joined: failed ones, and those that ended before the
    /// others.
    older: Vec<Range>,
    /// All blocks of the file have existed.
    is_full: bool,
    /// The number of blocks at the last search for holes, which found none.
    searched: Option<i64>,
    /// Holes were punched into it by this process.
    is_punched: bool,
}

impl Recent {
    /// The record of `file`, to which no write has been sent yet.
    pub(super) fn new(file: impl AsFd) -> Recent {
        let keeps_blocks = KEEPS_BLOCKS.contains(&kind_of(file));
        Recent { sent: Mutex::default(), keeps_blocks }
    }

    /// Whether the file system reports holes, and makes none by itself.
    pub(super) fn keeps_blocks(&self) -> bool {
        self.keeps_blocks
    }

    /// Its blocks were reserved: from now on all of them exist, written or not.
    pub(super) fn reserved(&self, file: impl AsFd, opened: u64) {
        if self.keeps_blocks && rustix::fs::fstat(file).is_ok_and(|stat| has_all(&stat, opened)) {
            lock(&self.sent).is_full = true;
        }
    }

    /// Its holes, in order, if it has fewer blocks than bytes; `None` if they are unknown.
    pub(super) fn holes(&self, file: impl AsFd, opened: u64) -> Vec<Range> {
        let is_full = |stat: Stat| has_all(&stat, opened);
        if !self.keeps_blocks || rustix::fs::fstat(&file).map_or(true, is_full) {
            return Vec::new();
        }
        let Some(pieces) = pieces(&file, opened) else { return Vec::new() };
        let starts = std::iter::once(0).chain(pieces.iter().map(|piece| piece.1));
        let ends = pieces.iter().map(|piece| piece.0).chain([opened]);
        starts.zip(ends).filter(|(start, end)| start < end).collect()
    }

    /// This process is about to punch a hole into it.
    pub(super) fn punched(&self) {
        lock(&self.sent).is_punched = true;
    }

    /// A write is about to be sent. Pass the result to [`Recent::end`].
    pub(super) fn begin(&self, range: Range) -> u64 {
        let mut sent = lock(&self.sent);
        sent.next += 1;
        let ticket = sent.next;
        sent.under_way.insert(ticket, range);
        ticket
    }

    /// The write is back; `is_done`: all of it was written.
    pub(super) fn end(&self, ticket: u64, is_done: bool) {
        let mut sent = lock(&self.sent);
        if let Some(range) = sent.under_way.remove(&ticket) {
            match is_done {
                true => sent.ended.push(range),
                false => sent.older.push(range),
            }
            if sent.ended.len() >= RANGES_MAX {
                let Sent { ended, older, .. } = &mut *sent;
                ended.append(older);
                *older = joined(std::mem::take(ended));
            }
        }
    }

    /// Checks the file, which was `opened` bytes long. Returns `None` if the file system does not
    /// report its blocks.
    pub(super) fn look(&self, file: impl AsFd, opened: u64) -> Option<Seen> {
        let mut sent = lock(&self.sent);
        let stat = rustix::fs::fstat(&file).ok()?;
        let bytes = (stat.st_size as u64).min(opened);
        let is_hollow = bytes == opened && self.is_hollow(&mut sent, &file, &stat, opened);
        if bytes == opened && !is_hollow {
            sent.ended.clear();
            sent.older.clear();
            return Some(Seen { left_bytes: bytes, is_hollow });
        }
        // A write that has ended reached its end; a later cut makes another end.
        let ends = |range: &Range| bytes == range.1;
        let reaches = |range: &Range| range.0 < bytes && bytes <= range.1;
        let is_reached = is_hollow
            || sent.ended.iter().any(ends)
            || sent.under_way.values().chain(&sent.older).any(reaches);
        if !is_reached {
            return Some(Seen { left_bytes: bytes, is_hollow });
        }
        let block = (stat.st_blksize as u64).max(SECTOR);
        let written = sent.ended.iter().chain(sent.under_way.values()).chain(&sent.older);
        // A write that begins or ends within a block fills the rest of the block with zeroes, which
        // are not a hole.
        let blocks = |range: &Range| (range.0 / block * block, range.1.next_multiple_of(block));
        let written = joined(written.map(blocks).collect());
        let left_bytes = trusted(pieces(&file, bytes).as_deref(), &written, bytes, block);
        Some(Seen { left_bytes, is_hollow })
    }

    /// Whether the file, which has its old length, has holes although all of its blocks existed
    /// before.
    fn is_hollow(&self, sent: &mut Sent, file: impl AsFd, stat: &Stat, opened: u64) -> bool {
        if !self.keeps_blocks || sent.is_punched {
            return false;
        }
        let has_hole =
            || rustix::fs::seek(&file, SeekFrom::Hole(0)).is_ok_and(|hole_at| hole_at < opened);
        if has_all(stat, opened) {
            if !sent.is_full && sent.searched != Some(stat.st_blocks) {
                sent.searched = Some(stat.st_blocks);
                sent.is_full = !has_hole();
            }
            return false;
        }
        let still_lacks = || rustix::fs::fstat(&file).is_ok_and(|stat| !has_all(&stat, opened));
        sent.is_full && (0..LOOKS_AGAIN).all(|_| still_lacks()) && has_hole()
    }
}

/// Whether a file takes as much space as `opened` bytes need.
fn has_all(stat: &Stat, opened: u64) -> bool {
    (stat.st_blocks as u64).saturating_mul(BLOCKS_UNIT) >= opened
}

/// Magic numbers, as in statfs(2), of file systems that report holes, and keep a block that was
/// written even if all of it is zero: ext2 to ext4, XFS, Btrfs, F2FS, tmpfs, hugetlbfs, overlayfs.
const KEEPS_BLOCKS: [u64; 7] =
    [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0x0102_1994, 0x9584_58F6, 0x794C_7630];

/// The same ranges, in order, without overlaps.
fn joined(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for (start, end) in ranges {
        match joined.last_mut() {
            Some(last) if start <= last.1 => last.1 = last.1.max(end),
            _ => joined.push((start, end)),
        }
    }
    joined
}

/// The pieces of the first `bytes` of a file that are not holes; `None`: there are too many, or the
/// file system does not tell.
fn pieces(file: impl AsFd, bytes: u64) -> Option<Vec<Range>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < bytes {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => return Some(pieces),
            Err(_) => return None,
        };
        at = rustix::fs::seek(&file, SeekFrom::Hole(start)).ok()?;
        pieces.push((start, at));
        if pieces.len() > PIECES_MAX || at <= start {
            return None;
        }
    }
    Some(pieces)
}

/// The end of the trusted part. A cut within a block of the file system (`block` bytes) leaves the
/// rest of the block as zeroes that are not a hole.
fn trusted(pieces: Option<&[Range]>, written: &[Range], bytes: u64, block: u64) -> u64 {
    let Some(pieces) = pieces else { return written.first().map_or(bytes, |range| range.0) };
    let mut low = bytes;
    while low > 0 {
        // The last range that begins before `low`.
        let before = |ranges: &[Range]| match ranges.partition_point(|range| range.0 < low) {
            0 => None,
            count => Some(ranges[count - 1]),
        };
        if let Some((start, end)) = before(written)
            && end >= low
        {
            low = start;
            continue;
        }
        let data_end = before(pieces).map_or(0, |piece| piece.1);
        if data_end >= low {
            break;
        }
        low = data_end;
    }
    low.saturating_sub(1) / block * block
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{FallocateFlags, fallocate};

    use super::*;
    use crate::units::MIB;

    fn full(bytes: u64) -> (File, Recent) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![1; bytes as usize], 0).unwrap();
        let recent = Recent::new(&file);
        (file, recent)
    }

    /// A write that is recorded; `is_back`: as one that has ended.
    fn write(file: &File, recent: &Recent, at: u64, is_back: bool) {
        let ticket = recent.begin((at, at + 4096));
        file.write_all_at(&[2; 4096], at).unwrap();
        if is_back {
            recent.end(ticket, true);
        }
    }

    #[test]
    fn a_write_that_failed_may_have_ended_anywhere() {
        let (file, recent) = full(8 * MIB);
        file.set_len(4 * MIB).unwrap();
        let ticket = recent.begin((6 * MIB, 6 * MIB + 4096));
        // Half of it is written before the disk refuses the rest.
        file.write_all_at(&[2; 2048], 6 * MIB).unwrap();
        recent.end(ticket, false);
        let left = recent.look(&file, 8 * MIB).unwrap().left_bytes;
        assert!((4 * MIB - (64 << 10)..=4 * MIB).contains(&left), "{left}");
    }

    #[test]
    fn a_cut_is_found_behind_writes_that_made_the_file_longer_again() {
        for is_back in [false, true] {
            let (file, recent) = full(8 * MIB);
            write(&file, &recent, 3 * MIB, is_back);
            assert_eq!(recent.look(&file, 8 * MIB).unwrap().left_bytes, 8 * MIB);
            file.set_len(4 * MIB).unwrap();
            write(&file, &recent, 6 * MIB + 512, is_back);
            write(&file, &recent, 5 * MIB + 3584, is_back);
            let left = recent.look(&file, 8 * MIB).unwrap().left_bytes;
            assert!((4 * MIB - (64 << 10)..=4 * MIB).contains(&left), "{left}");
        }
    }

    #[test]
    fn an_end_that_nobody_wrote_is_the_cut() {
        let (file, recent) = full(8 * MIB);
        write(&file, &recent, MIB, true);
        file.set_len(5 * MIB + 512).unwrap();
        assert_eq!(recent.look(&file, 8 * MIB).unwrap().left_bytes, 5 * MIB + 512);
    }

    #[test]
    fn many_writes_are_joined() {
        let recent = Recent::new(tempfile::tempfile().unwrap());
        for nth in 0..RANGES_MAX as u64 {
            let ticket = recent.begin((nth * 512, nth * 512 + 512));
            recent.end(ticket, true);
        }
        assert_eq!(lock(&recent.sent).older, [(0, RANGES_MAX as u64 * 512)]);
    }

    /// The end of the trusted part of 8 MiB, and whether there are holes that should not exist.
    fn seen(recent: &Recent, file: &File) -> (u64, bool) {
        let seen = recent.look(file, 8 * MIB).unwrap();
        (seen.left_bytes, seen.is_hollow)
    }

    #[test]
    fn a_full_file_that_was_cut_and_made_as_long_again_is_hollow() {
        for cut in [0, 512, 4 * MIB, 8 * MIB - 4096] {
            let (file, recent) = full(8 * MIB);
            assert_eq!(seen(&recent, &file), (8 * MIB, false));
            file.set_len(cut).unwrap();
            file.set_len(8 * MIB).unwrap();
            // Data written there since is not a proof of the earlier data.
            write(&file, &recent, 5 * MIB, true);
            let (left, is_hollow) = seen(&recent, &file);
            assert!(is_hollow && left <= cut && left + 4096 >= cut, "{cut}: {left}");
        }
    }

    #[test]
    fn holes_that_were_always_there_or_that_udm_punches_are_not_a_loss() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 * MIB).unwrap();
        let recent = Recent::new(&file);
        assert_eq!(seen(&recent, &file), (8 * MIB, false));
        file.set_len(MIB).unwrap();
        file.set_len(8 * MIB).unwrap();
        assert_eq!(seen(&recent, &file), (8 * MIB, false), "it never had all of its blocks");
        let (file, recent) = full(8 * MIB);
        assert_eq!(seen(&recent, &file), (8 * MIB, false));
        recent.punched();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, MIB, MIB).unwrap();
        assert_eq!(seen(&recent, &file), (8 * MIB, false));
    }

    #[test]
    fn a_reserved_file_is_full_before_it_is_written() {
        let file = tempfile::tempfile().unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 8 * MIB).unwrap();
        let recent = Recent::new(&file);
        recent.reserved(&file, 8 * MIB);
        write(&file, &recent, MIB, true);
        assert_eq!(seen(&recent, &file), (8 * MIB, false));
        file.set_len(2 * MIB).unwrap();
        file.set_len(8 * MIB).unwrap();
        let (left, is_hollow) = seen(&recent, &file);
        assert!(is_hollow && left <= 2 * MIB, "{left}");
    }
}
