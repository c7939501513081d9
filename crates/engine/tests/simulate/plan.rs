//! A history before it runs: the parts of the fixture, and its steps. All of it follows from
//! the seed, and each step carries the seed of its own choices, so that a step can be left out
//! without changing what the others do.

use udm::bio::Op;
use udm::pmem::Persistence;
use udm::prng::Prng;
use udm::units::{MIB, Nanos, SECOND, SECTOR};

use crate::cached;

/// Which target, on which cache.
#[derive(Clone, Copy, Debug)]
pub enum Engine {
    /// No cache: lines that pass requests on, late or immediately. Their table changes.
    Plain,
    Pcache {
        segments: u64,
        segment_bytes: u64,
    },
    Writecache {
        is_on_disk: bool,
        cache_bytes: u64,
        /// Sectors of the smallest request.
        block_sectors: usize,
    },
    Cache {
        /// Blocks that the whole cache device has.
        slots: u64,
    },
}

/// From this seed on, cases are those of writecache.
pub const WRITECACHE_FROM: u64 = 1 << 32;
/// From this seed on, cases use the target cache.
pub const CACHE_FROM: u64 = 1 << 36;
/// From this seed on, cases are without a cache.
pub const PLAIN_FROM: u64 = 1 << 40;

/// Sectors of the device.
const SECTORS: u64 = 5 * MIB / SECTOR;

/// The parts of a fixture.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    pub engine: Engine,
    /// Sectors where the cached line begins and ends. Before and after it are
    /// other lines, on another disk.
    pub cuts: (u64, u64),
    pub backing_bytes: u64,
    pub persistence: Persistence,
    pub clients: usize,
    pub words: String,
    pub is_ordered: bool,
    pub trouble: Trouble,
}

/// The faults in addition to the end of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    Nothing,
    Origin,
    /// Bit rot, memory errors.
    Cache,
    /// The cache refuses to make stores durable.
    Medium,
    OriginAndCache,
}

impl Trouble {
    pub fn has_cache(self) -> bool {
        matches!(self, Trouble::Cache | Trouble::OriginAndCache)
    }
}

/// One step of a history.
#[derive(Clone, Debug)]
pub struct Step {
    pub salt: u64,
    pub action: Action,
}

/// A step.
#[derive(Clone, Debug)]
pub enum Action {
    /// A client submits.
    Io {
        client: usize,
        op: Op,
        first: usize,
        count: usize,
        fua: bool,
    },
    /// Threads and disks move, this many times; a slow disk moves rarely.
    Pump {
        events: u64,
        is_slow: bool,
    },
    /// Time passes.
    Pass {
        nanos: Nanos,
    },
    /// Everything that can end ends.
    Settle,
    Suspend,
    Resume,
    /// `gc_percent`, some out of range; a writecache flushes or clears its counters.
    Message(u32),
    /// Status, table, facts; a table that may not be loaded.
    Look,
    /// Another table that means the same, while requests wait.
    Load,
    /// All goes to the origin.
    Drain,
    /// An orderly end and a new beginning; with a reboot between, shared memory is forgotten.
    Remove {
        forgets: bool,
    },
    /// The server is killed; `again`: this many fences later, while it attaches, once more.
    Kill {
        keeps: bool,
        again: u64,
    },
    /// The machine loses power, just before a fence to come if `fences` is not 0.
    PowerCut {
        fences: u64,
        again: u64,
    },
    /// Judges the origin alone, as if the cache device were lost now.
    OriginAlone,
    /// Reads everything.
    Scan,
    Fault(OriginFault),
    Heal,
    Rot(Rot),
    /// Memory errors in what holds data; in anything.
    Poison {
        is_data: bool,
        bytes: u64,
    },
    /// The cache refuses fences.
    MediumFails {
        after: u64,
    },
}

/// A fault of the origin. Ranges are sectors.
#[derive(Clone, Copy, Debug)]
pub enum OriginFault {
    Fails { op: Option<Op>, first: u64, count: u64, times: u64 },
    Tears { times: u64 },
    Sticks { op: Option<Op>, times: u64 },
}

/// Which bit turns over.
#[derive(Clone, Copy, Debug)]
pub enum Rot {
    /// In cached data, zeroes included.
    Data,
    /// In one copy of a record that has two.
    Record,
}

/// The fixture of a seed.
pub fn setup(seed: u64) -> Setup {
    match seed {
        PLAIN_FROM.. => setup_plain(seed),
        CACHE_FROM.. => cached::setup(seed),
        WRITECACHE_FROM.. => setup_writecache(seed),
        _ => setup_pcache(seed),
    }
}

pub fn device_bytes() -> u64 {
    SECTORS * SECTOR
}

/// All of the device, or for one writecache or cache in four the middle of it: then requests cross
/// lines. (A pcache is the only target of its table.)
pub fn cuts(seed: u64) -> (u64, u64) {
    let mut prng = Prng::new(seed ^ 0x0C07);
    match seed % 4 {
        3 => (8 * (1 + prng.below(60)), 8192 - 32 + 8 * prng.below(8)),
        _ => (0, SECTORS),
    }
}

fn setup_plain(seed: u64) -> Setup {
    let mut prng = Prng::new(seed ^ 0x0091_A170);
    let trouble = if prng.one_in(2) { Trouble::Origin } else { Trouble::Nothing };
    Setup {
        seed,
        engine: Engine::Plain,
        cuts: (0, SECTORS),
        backing_bytes: SECTORS * SECTOR,
        persistence: Persistence::Cpu,
        clients: 1 + prng.below(4) as usize,
        words: String::new(),
        is_ordered: false,
        trouble,
    }
}

fn setup_writecache(seed: u64) -> Setup {
    let mut prng = Prng::new(seed ^ 0x0057_C0DE);
    let trouble = match prng.below(6) {
        0 | 1 => Trouble::Nothing,
        2..5 => Trouble::Origin,
        _ => Trouble::Medium,
    };
    let is_on_disk = prng.one_in(2);
    let block_sectors = 1 << prng.below(4);
    let options = match prng.below(8) {
        0 => "2 autocommit_blocks 5",
        1 => "2 max_age 3000",
        2 => "4 high_watermark 20 low_watermark 10",
        3 => "2 start_sector 8",
        4 if is_on_disk => "2 pause_writeback 0",
        5 => "2 autocommit_time 10",
        _ => "0",
    };
    let mode = if is_on_disk { "s" } else { "p" };
    let cache_bytes = (64 << 10) << prng.below(6);
    let persistence = if prng.one_in(3) { Persistence::Msync } else { Persistence::Cpu };
    let clients = 1 + prng.below(4) as usize;
    // Even blocks of several sectors are overwritten in place.
    let tears = if is_on_disk && prng.one_in(2) { " atomic_blocks false" } else { "" };
    Setup {
        seed,
        engine: Engine::Writecache { is_on_disk, cache_bytes, block_sectors },
        cuts: cuts(seed),
        backing_bytes: SECTORS * SECTOR,
        persistence,
        clients,
        words: format!("writecache {mode} B C {} {options}{tears}", block_sectors * 512),
        is_ordered: false,
        trouble,
    }
}

fn setup_pcache(seed: u64) -> Setup {
    let mut prng = Prng::new(seed ^ 0x0051_3017);
    let trouble = match prng.below(8) {
        0 | 1 => Trouble::Nothing,
        2..5 => Trouble::Origin,
        5 => Trouble::Cache,
        6 => Trouble::Medium,
        _ => Trouble::OriginAndCache,
    };
    let has_crc = trouble.has_cache() || prng.one_in(4);
    let is_ordered = !prng.one_in(5);
    let mut words = if has_crc { "2 data_crc true" } else { "0" }.to_string();
    if !is_ordered {
        words += " writeback_order fast";
    }
    if prng.one_in(4) {
        words += " read_fill never";
    }
    // From a generator of its own: so older seeds still mean what they meant.
    let mut pace = Prng::new(seed ^ 0x9ACE);
    words += ["", "", " max_age 0", " max_age 700"][pace.below(4) as usize];
    words += ["", "", " high_watermark 3", " high_watermark 100"][pace.below(4) as usize];
    let spread = if prng.one_in(3) { 40 } else { 10 };
    let segments = 8 + prng.below(spread);
    let segment_bytes = if prng.one_in(4) { 256 << 10 } else { 64 << 10 };
    Setup {
        seed,
        engine: Engine::Pcache { segments, segment_bytes },
        cuts: (0, SECTORS),
        backing_bytes: SECTORS * SECTOR,
        persistence: if prng.one_in(3) { Persistence::Msync } else { Persistence::Cpu },
        clients: 1 + prng.below(4) as usize,
        words: format!("pcache C B {words}"),
        is_ordered,
        trouble,
    }
}

impl Setup {
    pub fn sectors(&self) -> usize {
        (self.backing_bytes / 512) as usize
    }

    pub fn cache_bytes(&self) -> u64 {
        match self.engine {
            Engine::Pcache { segments, segment_bytes } => 20480 + segments * segment_bytes,
            Engine::Writecache { cache_bytes, .. } => cache_bytes,
            Engine::Cache { slots } => slots * cached::BLOCK_SECTORS * SECTOR,
            Engine::Plain => 64 << 10,
        }
    }

    /// Whether there is more than the cached line.
    pub fn is_cut(&self) -> bool {
        self.cuts != (0, SECTORS)
    }

    /// Whether clients reach a disk without a cache.
    pub fn is_bare(&self) -> bool {
        self.is_plain() || self.is_cut()
    }

    /// Whether a request for this range reaches such a disk. A cache keeps what it likes.
    pub fn is_range_bare(&self, first: usize, count: usize) -> bool {
        let (start, end) = (first as u64, (first + count) as u64);
        self.is_plain() || self.is_cache() || start < self.cuts.0 || end > self.cuts.1
    }

    /// The table of the device: one of many, by `prng`, with or without a cache.
    pub fn table(&self, prng: &mut Prng) -> String {
        match self.engine {
            Engine::Plain => self.table_of_none(prng),
            Engine::Cache { slots } => self.among(cached::line(self, slots, Some(prng))),
            _ => {
                self.among(format!("{} {} {}", self.cuts.0, self.cuts.1 - self.cuts.0, self.words))
            }
        }
    }

    /// The table that takes whatever another one of the same device has left.
    pub fn table_for_all(&self, prng: &mut Prng) -> String {
        match self.engine {
            Engine::Cache { slots } => self.among(cached::line(self, slots, None)),
            _ => self.table(prng),
        }
    }

    /// The lines next to the cached one.
    fn among(&self, cached: String) -> String {
        let (from, to) = self.cuts;
        match self.is_cut() {
            true => {
                let rest = SECTORS - to;
                format!("0 {from} linear L 0\n{cached}\n{to} {rest} linear L {to}")
            }
            false => cached,
        }
    }

    fn table_of_none(&self, prng: &mut Prng) -> String {
        let mut lines = Vec::new();
        let mut at = 0;
        while at < SECTORS {
            let len =
                if prng.one_in(3) { SECTORS - at } else { 8 * (1 + prng.below(SECTORS / 16)) };
            let len = len.min(SECTORS - at);
            lines.push(match prng.one_in(2) {
                true => format!("{at} {len} linear B {at}"),
                false => format!("{at} {len} delay B {at} {}", prng.below(3) * 40),
            });
            at += len;
        }
        lines.join("\n")
    }

    /// Sectors of the smallest request.
    pub fn block_sectors(&self) -> usize {
        match self.engine {
            Engine::Pcache { .. } | Engine::Cache { .. } | Engine::Plain => 1,
            Engine::Writecache { block_sectors, .. } => block_sectors,
        }
    }

    pub fn is_plain(&self) -> bool {
        matches!(self.engine, Engine::Plain)
    }

    pub fn is_pcache(&self) -> bool {
        matches!(self.engine, Engine::Pcache { .. })
    }

    pub fn is_cache(&self) -> bool {
        matches!(self.engine, Engine::Cache { .. })
    }

    /// Whether the cache is a disk.
    pub fn is_on_disk(&self) -> bool {
        self.is_cache() || matches!(self.engine, Engine::Writecache { is_on_disk: true, .. })
    }

    /// Whether a server does without memory that outlives it.
    fn has_no_memory(&self) -> bool {
        self.is_bare() || self.is_cache()
    }
}

/// The first `count` steps of a seed.
pub fn steps(setup: &Setup, count: usize) -> Vec<Step> {
    let mut prng = Prng::new(setup.seed);
    (0..count).map(|_| Step { salt: prng.next_u64(), action: action(setup, &mut prng) }).collect()
}

fn action(setup: &Setup, prng: &mut Prng) -> Action {
    let again = |prng: &mut Prng| if prng.one_in(3) { 1 + prng.below(8) } else { 0 };
    match prng.below(200) {
        0..95 => io(setup, prng),
        95..145 => Action::Pump { events: 1 + prng.below(60), is_slow: prng.one_in(4) },
        145..153 => Action::Pass { nanos: passing(prng) },
        153..157 => Action::Settle,
        157..160 if setup.is_plain() => Action::Load,
        157 | 158 if setup.is_cache() => Action::Load,
        157..160 => Action::Suspend,
        160..164 => Action::Resume,
        164..166 => Action::Message(prng.below(100) as u32),
        166..168 => Action::Look,
        168..171 => Action::Drain,
        171..173 => Action::Remove { forgets: prng.one_in(2) },
        // With a bare disk, a later run of the machine does not make an earlier one's data durable.
        173..177 => {
            Action::Kill { keeps: !prng.one_in(4) || setup.has_no_memory(), again: again(prng) }
        }
        177..180 => Action::PowerCut {
            fences: if prng.one_in(2) { 0 } else { 1 + prng.below(20) },
            again: again(prng),
        },
        180..183 => Action::OriginAlone,
        183 => Action::Scan,
        184..192 => Action::Heal,
        _ => fault(setup, prng).unwrap_or_else(|| io(setup, prng)),
    }
}

fn io(setup: &Setup, prng: &mut Prng) -> Action {
    let sectors = setup.sectors() as u64;
    let first = match prng.below(4) {
        0 => prng.below(64),
        1 => prng.below(512),
        2 => 8192 - 32 + prng.below(64),
        _ => prng.below(sectors),
    };
    let first = match setup.cuts.0 {
        cut if cut > 0 && prng.one_in(3) => cut.saturating_sub(prng.below(16)),
        _ => first,
    };
    let count = match prng.below(20) {
        0 => 1 + prng.below(2048),
        1..4 => 1 + prng.below(256),
        4..8 => 8 * (1 + prng.below(4)),
        _ => 1 + prng.below(16),
    };
    let (first, count) = whole(setup.block_sectors() as u64, first, count.min(sectors - first));
    // Whole blocks of a cache come into it without being read.
    let (first, count) = match setup.is_cache() && prng.one_in(6) {
        true => {
            let block = setup.cuts.0 + prng.below(24) * cached::BLOCK_SECTORS;
            (block as usize, cached::BLOCK_SECTORS as usize)
        }
        false => (first, count),
    };
    let op = match prng.below(100) {
        0..55 => Op::Write,
        55..80 => Op::Read,
        80..90 => Op::Flush,
        90..95 => Op::Discard,
        _ => Op::WriteZeroes,
    };
    // Zeroes pass a writecache by: a failing origin may lose them, as it may lose any disk's.
    let passes_by = !setup.is_pcache() && matches!(op, Op::Discard | Op::WriteZeroes);
    let op = if passes_by && setup.trouble == Trouble::Origin { Op::Write } else { op };
    // The data after a discard is up to the disk.
    let op = if setup.is_bare() && op == Op::Discard { Op::WriteZeroes } else { op };
    let client = prng.below(setup.clients as u64) as usize;
    Action::Io { client, op, first, count, fua: prng.one_in(8) }
}

/// The whole blocks around a range.
fn whole(block: u64, first: u64, count: u64) -> (usize, usize) {
    let end = (first + count).next_multiple_of(block);
    let first = first / block * block;
    (first as usize, (end - first) as usize)
}

fn passing(prng: &mut Prng) -> Nanos {
    match prng.below(5) {
        0 => prng.below(70 * SECOND),
        1 | 2 => prng.below(5 * SECOND),
        _ => prng.below(SECOND / 5),
    }
}

fn fault(setup: &Setup, prng: &mut Prng) -> Option<Action> {
    let is_origin = match setup.trouble {
        Trouble::Nothing => return None,
        Trouble::Medium => {
            return prng.one_in(4).then(|| Action::MediumFails { after: 1 + prng.below(10) });
        }
        Trouble::Origin => true,
        Trouble::Cache => false,
        Trouble::OriginAndCache => prng.one_in(2),
    };
    if is_origin {
        return Some(Action::Fault(origin_fault(setup, prng)));
    }
    Some(match prng.below(8) {
        0..4 => Action::Rot(Rot::Data),
        4 => Action::Rot(Rot::Record),
        5 | 6 => Action::Poison { is_data: true, bytes: 64 },
        _ => Action::Poison { is_data: false, bytes: 64 << prng.below(7) },
    })
}

fn origin_fault(setup: &Setup, prng: &mut Prng) -> OriginFault {
    let ops = [None, Some(Op::Read), Some(Op::Write), Some(Op::Flush), Some(Op::WriteZeroes)];
    let op = match ops[prng.below(5) as usize] {
        // Without a cache, the data that a disk loses with a failed flush is not written again.
        None | Some(Op::Flush) if setup.has_no_memory() => Some(Op::Write),
        op => op,
    };
    let times = if prng.one_in(2) { 1 + prng.below(4) } else { u64::MAX };
    let (first, count) =
        if prng.one_in(2) { (prng.below(8192), 1 + prng.below(2048)) } else { (0, u64::MAX >> 16) };
    match prng.below(5) {
        0 if !setup.has_no_memory() => OriginFault::Tears { times },
        1 => OriginFault::Sticks { op, times },
        _ => OriginFault::Fails { op, first, count, times },
    }
}
