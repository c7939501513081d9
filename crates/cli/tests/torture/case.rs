//! The parts of a case from its seed: table lines, sizes, places, clients.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::path::{Path, PathBuf};

use udm::prng::Prng;

use crate::oracle::SECTOR;

const MIB: u64 = 1 << 20;

/// Where the files of a cache lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Memory,
    Disk,
}

impl Place {
    /// A folder there.
    pub fn folder(self) -> PathBuf {
        let memory = Path::new("/dev/shm");
        match self {
            Place::Memory if memory.is_dir() => memory.to_owned(),
            _ => PathBuf::from(env!("CARGO_TARGET_TMPDIR")),
        }
    }
}

/// A table line's target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Linear,
    Pcache {
        data_crc: bool,
        retention: &'static str,
    },
    Writecache {
        mode: char,
        block: u64,
        words: String,
    },
    /// Sectors of a block; the table's words after that.
    Cache {
        block: u64,
        words: String,
    },
}

/// A table line.
#[derive(Clone, Debug)]
pub struct Line {
    pub target: Target,
    pub bytes: u64,
    pub cache_bytes: u64,
    pub place: Place,
}

/// A case.
#[derive(Clone, Debug)]
pub struct Case {
    pub seed: u64,
    pub lines: Vec<Line>,
    pub connections: u64,
    /// Requests that a connection keeps in flight.
    pub depth: u64,
    pub rounds: u64,
    /// Whether a connection sends its requests in batches, each in one piece.
    pub is_batched: bool,
    /// Origins, and caches that are not mapped, lie on disks that fail.
    pub has_disks: bool,
}

impl Line {
    /// Whether its cache is read and written by calls, so that it may lie on a disk.
    pub fn has_cache_on_disk(&self) -> bool {
        matches!(self.target, Target::Writecache { mode: 's', .. } | Target::Cache { .. })
    }
}

impl Case {
    pub fn from_seed(seed: u64) -> Case {
        let mut random = Prng::new(seed);
        // A pcache is alone in its table, as the kernel has it.
        let mut lines = match random.below(12) {
            0 => vec![linear(&mut random), linear(&mut random)],
            1..=4 => vec![pcache(&mut random)],
            5..=8 => cache_lines(&mut random),
            _ => lines(&mut random),
        };
        if random.one_in(2) {
            lines.reverse();
        }
        // From its own seed, so that the rest of a case is the same with and without disks.
        let has_disks = Prng::new(seed ^ 0xd15c).one_in(2);
        Case {
            seed,
            lines,
            connections: 2 + random.below(7),
            depth: 8 + random.below(25),
            rounds: 4 + random.below(8),
            is_batched: random.one_in(2),
            has_disks,
        }
    }

    /// The sectors of lines whose data the kernel copies. A pcache's is copied under its locks.
    pub fn by_calls(&self) -> Vec<Range<u64>> {
        let mut at = 0;
        let mut ranges = Vec::new();
        for line in &self.lines {
            let end = at + line.bytes / SECTOR as u64;
            if !matches!(line.target, Target::Pcache { .. }) {
                ranges.push(at..end);
            }
            at = end;
        }
        ranges
    }

    pub fn bytes(&self) -> u64 {
        self.lines.iter().map(|line| line.bytes).sum()
    }

    /// Sectors of the largest block, which requests keep to.
    pub fn granule(&self) -> u64 {
        let block = |line: &Line| match line.target {
            Target::Writecache { block, .. } => block / SECTOR as u64,
            _ => 1,
        };
        self.lines.iter().map(block).max().unwrap_or(1)
    }

    /// Whether a trim of any sector always leaves zeroes.
    pub fn trims_to_zero(&self) -> bool {
        self.lines.iter().all(|line| matches!(line.target, Target::Pcache { .. }))
    }
}

impl Display for Case {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        for line in &self.lines {
            let (mib, cache) = (line.bytes / MIB, line.cache_bytes / MIB);
            write!(out, "[{:?} {mib} MiB, cache {cache} MiB in {:?}] ", line.target, line.place)?;
        }
        let batches = if self.is_batched { "in batches" } else { "one by one" };
        write!(out, "{} connections, {} in flight, {batches}", self.connections, self.depth)?;
        if self.has_disks { write!(out, ", on disks that fail") } else { Ok(()) }
    }
}

/// Lines of which at least one is cached.
fn lines(random: &mut Prng) -> Vec<Line> {
    let mut lines = vec![writecache(random)];
    if random.one_in(3) {
        lines.push(linear(random));
    }
    if random.one_in(4) {
        lines.push(writecache(random));
    }
    lines
}

/// A cache, alone or beside others.
fn cache_lines(random: &mut Prng) -> Vec<Line> {
    let mut lines = vec![cache(random)];
    match random.below(5) {
        0 => lines.push(cache(random)),
        1 => lines.push(writecache(random)),
        2 => lines.push(linear(random)),
        _ => {}
    }
    lines
}

fn linear(random: &mut Prng) -> Line {
    let bytes = (1 + random.below(4)) * MIB;
    Line { target: Target::Linear, bytes, cache_bytes: 0, place: Place::Disk }
}

fn place(random: &mut Prng) -> Place {
    if random.one_in(3) { Place::Disk } else { Place::Memory }
}

fn pcache(random: &mut Prng) -> Line {
    let retention = if random.one_in(3) { "fifo" } else { "hot" };
    Line {
        target: Target::Pcache { data_crc: random.one_in(2), retention },
        bytes: (4 + random.below(21)) * MIB,
        // The smallest that there is.
        cache_bytes: 512 * MIB,
        place: place(random),
    }
}

fn writecache(random: &mut Prng) -> Line {
    let mode = if random.one_in(2) { 'p' } else { 's' };
    let block = if random.one_in(2) { 512 } else { 4096 };
    let mut words = match random.below(4) {
        0 => "2 autocommit_blocks 1".to_owned(),
        1 => "2 autocommit_blocks 64".to_owned(),
        2 => "4 high_watermark 20 low_watermark 10".to_owned(),
        _ => "0".to_owned(),
    };
    match random.below(3) {
        0 if mode == 's' => words += " atomic_blocks false",
        1 if mode == 's' => words += " atomic_blocks true",
        _ => {}
    }
    Line {
        target: Target::Writecache { mode, block, words },
        bytes: (4 + random.below(13)) * MIB,
        cache_bytes: (1 + random.below(16)) * MIB,
        place: place(random),
    }
}

fn cache(random: &mut Prng) -> Line {
    let mode = match random.below(6) {
        0 => "writethrough",
        _ => "writeback",
    };
    let features =
        if random.one_in(2) { format!("2 metadata2 {mode}") } else { format!("1 {mode}") };
    let policy = match random.below(8) {
        0 => "cleaner 0",
        1 => "mq 0",
        2 => "smq 2 migration_threshold 0",
        3 | 4 => "smq 0",
        _ => "probation 0",
    };
    Line {
        target: Target::Cache {
            block: 64 << random.below(4),
            words: format!("{features} {policy}"),
        },
        // The last block need not be whole.
        bytes: (4 + random.below(13)) * MIB + random.below(3) * 36 * 1024,
        cache_bytes: (1 + random.below(8)) * MIB,
        place: place(random),
    }
}
