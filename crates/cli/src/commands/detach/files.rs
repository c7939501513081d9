//! Finds the files in ranges of an origin: the commands of the file system's own tools for that,
//! with their arguments.

use udm::bio::Op;
use udm::buffer::Buffer;
use udm::disk::{Disk, DiskIo, FileDisk, FileOptions, OpenMode};
use udm::probe;
use udm::sync::Arc;
use udm::table::DeviceWord;
use udm::units::SECTOR;

use crate::output::shell;

/// Ranges that get commands of their own.
const RANGES_MAX: usize = 16;
/// The bytes at the front of a file system that udm reads: ext4's superblock ends within them.
const FRONT_BYTES: usize = 4096;

/// A line to print: a command, or a remark about the commands after it.
#[derive(Debug)]
pub struct Line {
    /// The text of the line.
    pub text: String,
    /// Whether a shell can run the line.
    pub is_command: bool,
}

/// The lines to print for `ranges` of an origin. The origin is only read.
pub fn commands(origin: &DeviceWord, ranges: &[(u64, u64)]) -> Vec<Line> {
    let options =
        FileOptions { mode: OpenMode::ReadOnly, area: origin.options.area, ..Default::default() };
    let Ok(disk) = FileDisk::open(&origin.path, &options) else { return Vec::new() };
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let found = probe::disk(&disk, 0);
    let holds = |name: &str| found.iter().any(|finding| finding.name.starts_with(name));
    let Some(front) = front(&disk) else { return Vec::new() };
    let shown = &ranges[..ranges.len().min(RANGES_MAX)];
    let size = disk.limits().size_bytes;
    match (ext4_block(&front), xfs_block(&front)) {
        (Some(block), _) if holds("ext") => ext4_lines(origin, shown, block),
        (_, Some(block)) if holds("xfs") => xfs_lines(origin, shown, block, size),
        _ => Vec::new(),
    }
}

fn note(text: impl Into<String>) -> Line {
    Line { text: text.into(), is_command: false }
}

fn command(text: impl Into<String>) -> Line {
    Line { text: text.into(), is_command: true }
}

fn ext4_lines(origin: &DeviceWord, ranges: &[(u64, u64)], block: u64) -> Vec<Line> {
    let device = match origin.options.area.start() {
        0 => shell(&origin.path),
        start => shell(&format!("{}?offset={start}", origin.path)),
    };
    let mut lines = vec![note(format!("it holds an ext4 with blocks of {block} bytes"))];
    if !ranges.is_empty() {
        lines.push(note("the inodes that have blocks there, and their names:"));
    }
    lines.extend(ranges.iter().map(|range| {
        let (first, last) = blocks(*range, block);
        command(format!(
            "debugfs -R \"icheck $(seq -s' ' {first} {last})\" {device} 2>/dev/null | awk \
             '$2+0 {{print $2}}' | sort -u | while read i; do debugfs -R \"ncheck $i\" {device} \
             2>/dev/null; done"
        ))
    }));
    lines.push(note("afterwards, check it:"));
    lines.push(command(format!("e2fsck -f {device}")));
    lines
}

fn xfs_lines(origin: &DeviceWord, ranges: &[(u64, u64)], block: u64, size: u64) -> Vec<Line> {
    let mut lines = vec![note(format!("it holds an XFS with blocks of {block} bytes"))];
    let mut device = shell(&origin.path);
    let start = origin.options.area.start();
    if start > 0 {
        lines.push(command(format!(
            "loop=$(losetup --find --show --read-only --offset {start} --sizelimit {size} {device})"
        )));
        device = "$loop".into();
    }
    let step = block / SECTOR;
    let spans = || ranges.iter().map(|range| blocks(*range, block));
    if !ranges.is_empty() {
        lines.push(note("the files that have blocks there, while it is not mounted:"));
    }
    lines.extend(spans().map(|(first, last)| {
        command(format!(
            "{{ echo 'blockget -n'; for s in $(seq {} {step} {}); do echo \"daddr $s\"; echo \
             'blockuse -n'; done; }} | xfs_db -r {device}",
            first * step,
            last * step
        ))
    }));
    if !ranges.is_empty() {
        lines.push(note("or their inodes, while it is mounted at MOUNTPOINT:"));
    }
    lines.extend(spans().map(|(first, last)| {
        let (from, to) = (first * step, (last + 1) * step);
        command(format!("xfs_io -r -c 'fsmap -d {from} {to}' MOUNTPOINT"))
    }));
    lines.push(note("afterwards, check it:"));
    lines.push(command(format!("xfs_repair -n {device}")));
    lines
}

/// The first and last block that a range touches.
fn blocks((at, len): (u64, u64), block: u64) -> (u64, u64) {
    (at / block, (at + len.max(1) - 1) / block)
}

fn front(disk: &Arc<dyn Disk>) -> Option<Vec<u8>> {
    let io = DiskIo::new(disk, Op::Read, 0, Buffer::zeroed(FRONT_BYTES), 0);
    let done = disk.carry_out(vec![io]).pop()?;
    done.result.ok()?;
    Some(done.buffer.as_slice().to_vec())
}

/// The block size in ext4's superblock, if it is a valid one.
fn ext4_block(front: &[u8]) -> Option<u64> {
    let shift = u32::from_le_bytes(front.get(1048..1052)?.try_into().ok()?);
    (shift <= 6).then(|| 1024 << shift)
}

/// The block size in XFS's superblock, if it is a valid one.
fn xfs_block(front: &[u8]) -> Option<u64> {
    let block = u64::from(u32::from_be_bytes(front.get(4..8)?.try_into().ok()?));
    (block.is_power_of_two() && (SECTOR..=65536).contains(&block)).then_some(block)
}
