//! Writes since a file was last seen whole, and what they say about a file that was cut.
//!
//! A write beyond the end of a file makes it longer. So a file that was cut while writes were in
//! flight is as long afterwards as the last of them reaches; in front of them are holes, which read
//! as zeroes. Beyond the cut there is nothing but such holes and what these writes left. So if a
//! write since the last good check may have made the file's end, then, from that end downwards, all
//! holes and all that was written since are not trusted. An end that no such write made is the cut
//! itself.
//!
//! A write that failed, or that ended short, may have reached any byte of its range.
//!
//! Known gaps: a file system that does not report holes shows none, so of its files only the end is
//! known; and the file under a loop device is written by the kernel, so its writes are unknown. A
//! write up to the very end of the file that is in flight while the file is cut makes it as long as
//! it was, and hides the cut. That a file takes less space than before would reveal it, but file
//! systems free space for reasons of their own.

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use rustix::fs::SeekFrom;

use crate::sync::{Mutex, lock};
use crate::units::SECTOR;

/// Beyond this many ranges, some are joined.
const RANGES_MAX: usize = 4096;
/// In a file of more pieces, what follows the first of the writes is not to be trusted.
const PIECES_MAX: usize = 1 << 16;

/// A range of bytes: where it begins, where it ends.
type Range = (u64, u64);

/// The writes of one file. Locked while the file is checked.
#[derive(Debug, Default)]
pub(super) struct Recent(Mutex<Sent>);

#[derive(Debug, Default)]
struct Sent {
    next: u64,
    under_way: BTreeMap<u64, Range>,
    ended: Vec<Range>,
    /// Writes that may have ended anywhere: failed ones, and those that ended before the others,
    /// joined.
    older: Vec<Range>,
}

impl Recent {
    /// A write is about to be sent. Pass the result to [`Recent::end`].
    pub(super) fn begin(&self, range: Range) -> u64 {
        let mut sent = lock(&self.0);
        sent.next += 1;
        let ticket = sent.next;
        sent.under_way.insert(ticket, range);
        ticket
    }

    /// The write is back; `is_done`: all of it was written.
    pub(super) fn end(&self, ticket: u64, is_done: bool) {
        let mut sent = lock(&self.0);
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

    /// Checks the file, which was `opened` bytes long: how many bytes from its start can be
    /// trusted. `None`: the file does not say.
    pub(super) fn look(&self, file: impl AsFd, opened: u64) -> Option<u64> {
        let mut sent = lock(&self.0);
        let stat = rustix::fs::fstat(&file).ok()?;
        let bytes = (stat.st_size as u64).min(opened);
        if bytes == opened {
            sent.ended.clear();
            sent.older.clear();
            return Some(bytes);
        }
        // A write that has ended reached its end; a cut since is an end of its own.
        let ends = |range: &Range| bytes == range.1;
        let reaches = |range: &Range| range.0 < bytes && bytes <= range.1;
        let is_reached =
            sent.ended.iter().any(ends) || sent.under_way.values().chain(&sent.older).any(reaches);
        if !is_reached {
            return Some(bytes);
        }
        let block = (stat.st_blksize as u64).max(SECTOR);
        let written = sent.ended.iter().chain(sent.under_way.values()).chain(&sent.older);
        // The rest of a block that a write begins or ends in is zeroes, not a hole.
        let blocks = |range: &Range| (range.0 / block * block, range.1.next_multiple_of(block));
        let written = joined(written.map(blocks).collect());
        Some(trusted(pieces(&file, bytes).as_deref(), &written, bytes, block))
    }
}

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
/// file does not say.
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

/// Where the trusted part ends. A cut within a block of the file system (`block` bytes) leaves the
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

    use super::*;
    use crate::units::MIB;

    fn full(bytes: u64) -> (File, Recent) {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![1; bytes as usize], 0).unwrap();
        (file, Recent::default())
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
        let left = recent.look(&file, 8 * MIB).unwrap();
        assert!((4 * MIB - (64 << 10)..=4 * MIB).contains(&left), "{left}");
    }

    #[test]
    fn a_cut_is_found_behind_writes_that_made_the_file_longer_again() {
        for is_back in [false, true] {
            let (file, recent) = full(8 * MIB);
            write(&file, &recent, 3 * MIB, is_back);
            assert_eq!(recent.look(&file, 8 * MIB), Some(8 * MIB));
            file.set_len(4 * MIB).unwrap();
            write(&file, &recent, 6 * MIB + 512, is_back);
            write(&file, &recent, 5 * MIB + 3584, is_back);
            let left = recent.look(&file, 8 * MIB).unwrap();
            assert!((4 * MIB - (64 << 10)..=4 * MIB).contains(&left), "{left}");
        }
    }

    #[test]
    fn an_end_that_nobody_wrote_is_the_cut() {
        let (file, recent) = full(8 * MIB);
        write(&file, &recent, MIB, true);
        file.set_len(5 * MIB + 512).unwrap();
        assert_eq!(recent.look(&file, 8 * MIB), Some(5 * MIB + 512));
    }

    #[test]
    fn many_writes_are_joined() {
        let recent = Recent::default();
        for nth in 0..RANGES_MAX as u64 {
            let ticket = recent.begin((nth * 512, nth * 512 + 512));
            recent.end(ticket, true);
        }
        assert_eq!(lock(&recent.0).older, [(0, RANGES_MAX as u64 * 512)]);
    }
}
