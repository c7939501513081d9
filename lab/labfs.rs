//! labfs: works on a file system until the power is cut, and judges what is there afterwards.
//!
//!     labfs setup DIR                     makes the folders and files that are overwritten later
//!     labfs work DIR ACKS SEED ROUND      writes, makes durable and acknowledges, until killed
//!     labfs check DIR ACKS SEED all       everything acknowledged is there
//!     labfs check DIR ACKS SEED order     some moment explains what is there: if anything of an
//!                                         operation is there, so is all that was acknowledged
//!                                         before it began
//!
//! THREADS threads work at the same time. SEED decides each thread's n-th operation of a round, so
//! an acknowledgement is a number: a line `version start end` in ACKS/ROUND.THREAD, on stable
//! storage outside the machine before the next operation begins. `start` and `end` are ticks of a
//! clock that all threads share. Rounds follow each other on the same file system; versions never
//! repeat. `check` models every file, and allows the last durable version, or any later one that
//! was begun. It allows no torn sector and no other bytes. At the end of a log that was growing
//! there may be zeroes: ext4 may store the new length before the bytes, if the bytes are in a block
//! that the file already has.
//!
//! Without dependencies, so that `rustc` alone builds it, statically, for the guest.

mod random;

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use random::Random;

const THREADS: u64 = 4;
/// Names per thread that are replaced and removed as a whole.
const NAMES: u64 = 6;
/// Files per thread that are overwritten in place, and their size.
const FIXED: u64 = 3;
const FIXED_BYTES: u64 = 256 << 10;
const SECTOR: u64 = 512;
const BLOCK: u64 = 4096;
/// Versions of one round; the first round is 1.
const ROUND: u64 = 1_000_000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
/// A moment: round, then tick.
type Moment = (u64, u64);
const NEVER: Moment = (u64::MAX, u64::MAX);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// A new file, made durable, takes the name; then the folder is made durable.
    Replace { name: u64, len: u64 },
    /// The name goes; the folder is made durable.
    Remove { name: u64 },
    /// Blocks of a file change in place; with `is_synced` the whole file is made durable.
    Overwrite { file: u64, first: u64, blocks: u64, is_synced: bool },
    /// The round's log grows, and is made durable.
    Append { len: u64 },
}

fn action(seed: u64, thread: u64, version: u64) -> Action {
    let mut random = Random(seed ^ (thread << 56) ^ (version << 8));
    match random.below(10) {
        0..=2 => Action::Replace { name: random.below(NAMES), len: 16 + random.below(128 << 10) },
        3 => Action::Remove { name: random.below(NAMES) },
        4..=7 => {
            let blocks = 1 + random.below(16);
            let first = random.below(FIXED_BYTES / BLOCK - blocks + 1);
            let (file, is_synced) = (random.below(FIXED), random.below(2) == 0);
            Action::Overwrite { file, first, blocks, is_synced }
        }
        _ => Action::Append { len: 1 + random.below(5000) },
    }
}

/// A kind of file of a thread, for its path and its content.
#[derive(Clone, Copy)]
enum Kind {
    Name(u64),
    Fixed(u64),
    Log(u64),
}

fn path(root: &Path, thread: u64, kind: Kind) -> PathBuf {
    let name = match kind {
        Kind::Name(number) => format!("name{number}"),
        Kind::Fixed(number) => format!("fixed{number}"),
        Kind::Log(round) => format!("log{round}"),
    };
    root.join(format!("t{thread}")).join(name)
}

/// The bytes from `offset` on, as `version` writes them: where they belong, and the version,
/// every 16 bytes.
fn content(thread: u64, kind: Kind, version: u64, offset: u64, len: u64) -> Vec<u8> {
    let file = match kind {
        Kind::Name(number) => number,
        Kind::Fixed(number) => 100 + number,
        Kind::Log(round) => 200 + round,
    };
    let unit = |index: u64| {
        let place = (thread + 1) << 56 | file << 40 | index;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&place.to_le_bytes());
        bytes[8..].copy_from_slice(&version.to_le_bytes());
        bytes
    };
    let bytes: Vec<u8> = (offset / 16..(offset + len).div_ceil(16)).flat_map(unit).collect();
    let skip = (offset % 16) as usize;
    bytes[skip..skip + len as usize].to_vec()
}

// --- work ----------------------------------------------------------------------------------------

fn setup(root: &Path) -> io::Result<()> {
    for thread in 0..THREADS {
        fs::create_dir_all(root.join(format!("t{thread}")))?;
        for number in 0..FIXED {
            let kind = Kind::Fixed(number);
            let file = File::create(path(root, thread, kind))?;
            file.write_all_at(&content(thread, kind, 0, 0, FIXED_BYTES), 0)?;
            file.sync_all()?;
        }
        File::open(root.join(format!("t{thread}")))?.sync_all()?;
    }
    File::open(root)?.sync_all()
}

fn perform(root: &Path, thread: u64, version: u64, action: Action) -> io::Result<()> {
    let folder = root.join(format!("t{thread}"));
    match action {
        Action::Replace { name, len } => {
            let kind = Kind::Name(name);
            let new = folder.join("new");
            let mut file = File::create(&new)?;
            file.write_all(&content(thread, kind, version, 0, len))?;
            file.sync_all()?;
            fs::rename(&new, path(root, thread, kind))?;
            File::open(&folder)?.sync_all()
        }
        Action::Remove { name } => {
            match fs::remove_file(path(root, thread, Kind::Name(name))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            File::open(&folder)?.sync_all()
        }
        Action::Overwrite { file, first, blocks, is_synced } => {
            let kind = Kind::Fixed(file);
            let file = OpenOptions::new().write(true).open(path(root, thread, kind))?;
            let bytes = content(thread, kind, version, first * BLOCK, blocks * BLOCK);
            file.write_all_at(&bytes, first * BLOCK)?;
            if is_synced { file.sync_data() } else { Ok(()) }
        }
        Action::Append { len } => {
            let kind = Kind::Log(version / ROUND);
            let file = path(root, thread, kind);
            let is_new = !file.exists();
            let mut file = OpenOptions::new().append(true).create(true).open(file)?;
            let end = file.metadata()?.len();
            file.write_all(&content(thread, kind, version, end, len))?;
            file.sync_data()?;
            if is_new { File::open(&folder)?.sync_all() } else { Ok(()) }
        }
    }
}

fn work(root: &Path, acks: &Path, seed: u64, round: u64) -> Outcome<()> {
    let clock = AtomicU64::new(1);
    let one = |thread: u64| -> io::Result<()> {
        let mut acks = File::create_new(acks.join(format!("{round}.{thread}")))?;
        for version in round * ROUND + 1..(round + 1) * ROUND {
            let start = clock.fetch_add(1, SeqCst);
            perform(root, thread, version, action(seed, thread, version))?;
            let end = clock.fetch_add(1, SeqCst);
            acks.write_all(format!("{version} {start} {end}\n").as_bytes())?;
            acks.sync_data()?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || one(thread))).collect();
        for thread in started {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Err("the power was not cut".into())
    })
}

// --- check ---------------------------------------------------------------------------------------

/// An operation that was begun.
#[derive(Clone, Copy)]
struct Event {
    version: u64,
    action: Action,
    start: Moment,
    /// [`NEVER`] for the one that the cut caught.
    end: Moment,
}

/// The last round that any thread began.
fn last_round(acks: &Path) -> Outcome<u64> {
    let mut last = 0;
    for entry in fs::read_dir(acks)? {
        let name = entry?.file_name().into_string().map_err(|_| "a strange file of acks")?;
        let (round, _) = name.split_once('.').ok_or("a strange file of acks")?;
        last = last.max(round.parse()?);
    }
    Ok(last)
}

/// The operations of a thread, in order.
fn history(acks: &Path, seed: u64, thread: u64) -> Outcome<Vec<Event>> {
    let mut events = Vec::new();
    for round in 1..=last_round(acks)? {
        let file = acks.join(format!("{round}.{thread}"));
        if !file.exists() {
            // The cut came before this thread had begun.
            continue;
        }
        let (mut next, mut last) = (round * ROUND + 1, 0);
        let event = |version, start, end| {
            let action = action(seed, thread, version);
            Event { version, action, start: (round, start), end }
        };
        let text = fs::read_to_string(&file)?;
        // A line without its end was not acknowledged yet.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let mut words = line.split_whitespace().map(str::parse::<u64>);
            let mut word = || words.next().ok_or("too few words");
            let (version, start, end) = (word()??, word()??, word()??);
            if version != next {
                return Err(format!("{}: {version} instead of {next}", file.display()).into());
            }
            events.push(event(version, start, (round, end)));
            (next, last) = (version + 1, end);
        }
        // It may have begun at any time after the one before it.
        events.push(event(next, last, NEVER));
    }
    Ok(events)
}

/// The content of the file system: a version for each name, log and file. 0 is the version of
/// setup.
#[derive(Default)]
struct Found {
    names: BTreeMap<(u64, u64), Option<u64>>,
    /// By thread, file and sector.
    sectors: BTreeMap<(u64, u64, u64), u64>,
    /// By thread and round: the length, and how far it is right; zeroes may follow.
    logs: BTreeMap<(u64, u64), (u64, u64)>,
}

struct Judge<'a> {
    root: &'a Path,
    seed: u64,
    histories: Vec<Vec<Event>>,
    found: Found,
    /// Zeroes at the ends of logs, in bytes.
    zeroes: u64,
    wrong: u64,
}

impl Judge<'_> {
    fn wrong(&mut self, what: &str) {
        self.wrong += 1;
        if self.wrong <= 20 {
            println!("labfs: WRONG: {what}");
        }
    }

    fn was_begun(&self, thread: u64, version: u64) -> bool {
        self.histories[thread as usize]
            .binary_search_by_key(&version, |event| event.version)
            .is_ok()
    }

    /// Reads everything of a thread. All bytes must be some version's that was begun.
    fn look(&mut self, thread: u64) -> io::Result<()> {
        for number in 0..NAMES {
            let kind = Kind::Name(number);
            let bytes = match fs::read(path(self.root, thread, kind)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                other => Some(other?),
            };
            let version = bytes.as_deref().map(version_of);
            if let (Some(bytes), Some(version)) = (bytes, version) {
                let len = bytes.len() as u64;
                let is_right = self.was_begun(thread, version)
                    && action(self.seed, thread, version) == Action::Replace { name: number, len }
                    && bytes == content(thread, kind, version, 0, len);
                if !is_right {
                    self.wrong(&format!("t{thread}/name{number}: {len} bytes match no version"));
                    continue;
                }
            }
            self.found.names.insert((thread, number), version);
        }
        for number in 0..FIXED {
            let kind = Kind::Fixed(number);
            let bytes = fs::read(path(self.root, thread, kind))?;
            if bytes.len() as u64 != FIXED_BYTES {
                self.wrong(&format!("t{thread}/fixed{number} has {} bytes", bytes.len()));
            }
            for (sector, bytes) in (0..).zip(bytes.chunks_exact(SECTOR as usize)) {
                let version = version_of(bytes);
                let is_known = version == 0 || self.was_begun(thread, version);
                if is_known && bytes == content(thread, kind, version, sector * SECTOR, SECTOR) {
                    self.found.sectors.insert((thread, number, sector), version);
                } else {
                    self.wrong(&format!("t{thread}/fixed{number}, sector {sector}: foreign"));
                }
            }
        }
        self.look_at_logs(thread)
    }

    /// Logs are right as far as they go, or zero.
    fn look_at_logs(&mut self, thread: u64) -> io::Result<()> {
        let rounds = self.histories[thread as usize].last().map_or(0, |e| e.version / ROUND);
        for round in 1..=rounds {
            let kind = Kind::Log(round);
            let bytes = match fs::read(path(self.root, thread, kind)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
                other => other?,
            };
            let mut expected = Vec::new();
            for (version, len) in appended(&self.histories[thread as usize], round) {
                expected.extend(content(thread, kind, version, expected.len() as u64, len));
            }
            let mut pairs = bytes.iter().zip(&expected);
            let differs = |(found, right): (&u8, &u8)| found != right;
            let right = pairs.clone().position(differs).unwrap_or(bytes.len());
            let foreign = pairs.position(|(found, right)| found != right && *found != 0);
            if foreign.is_some() || bytes.len() > expected.len() {
                let (has, may) = (bytes.len(), expected.len());
                let place = format!("t{thread}/log{round}, {has} bytes of {may}");
                self.wrong(&format!("{place}: foreign bytes at {foreign:?}"));
            }
            self.zeroes += (bytes.len() - right) as u64;
            self.found.logs.insert((thread, round), (bytes.len() as u64, right as u64));
        }
        Ok(())
    }

    /// The latest beginning of all operations of which anything is there.
    fn horizon(&self) -> Moment {
        let start = |thread: u64, version: u64| {
            let events = &self.histories[thread as usize];
            let at = events.binary_search_by_key(&version, |event| event.version).ok()?;
            Some(events[at].start)
        };
        let named = self.found.names.iter().filter_map(|(key, &v)| start(key.0, v?));
        let fixed = self.found.sectors.iter().filter_map(|(key, &v)| start(key.0, v));
        let logged = self.found.logs.iter().filter_map(|(&(thread, round), &(len, _))| {
            let mut at = 0;
            let records = appended(&self.histories[thread as usize], round);
            let visible = records.into_iter().filter(|(_, record)| {
                at += record;
                at - record < len
            });
            start(thread, visible.last()?.0)
        });
        named.chain(fixed).chain(logged).max().unwrap_or((0, 0))
    }

    /// Whether all that had ended by the horizon is there.
    fn judge(&mut self, horizon: Moment) {
        for ((thread, name), version) in std::mem::take(&mut self.found.names) {
            let allowed = self.allowed_of(thread, name, horizon);
            if !allowed.contains(&version) {
                let text = format!("t{thread}/name{name}: {version:?}, may be {allowed:?}");
                self.wrong(&text);
            }
        }
        for ((thread, file, sector), version) in std::mem::take(&mut self.found.sectors) {
            let durable = self.durable_version(thread, file, sector, horizon);
            if version < durable {
                let place = format!("t{thread}/fixed{file}, sector {sector}");
                self.wrong(&format!("{place}: {version}, but {durable} is durable"));
            }
        }
        for ((thread, round), (_, right)) in std::mem::take(&mut self.found.logs) {
            let events = self.histories[thread as usize].iter();
            let durable: u64 = events
                .filter(|event| event.version / ROUND == round && event.end < horizon)
                .map(|event| if let Action::Append { len } = event.action { len } else { 0 })
                .sum();
            if right < durable {
                let place = format!("t{thread}/log{round}");
                self.wrong(&format!("{place}: right up to {right}, {durable} are durable"));
            }
        }
    }

    /// The versions that a name may have: newest first, down to the durable one. `None`: the name
    /// does not exist.
    fn allowed_of(&self, thread: u64, name: u64, horizon: Moment) -> Vec<Option<u64>> {
        let mut allowed = Vec::new();
        for event in self.histories[thread as usize].iter().rev() {
            match event.action {
                Action::Replace { name: n, .. } if n == name => allowed.push(Some(event.version)),
                Action::Remove { name: n } if n == name => allowed.push(None),
                _ => continue,
            }
            if event.end < horizon {
                return allowed;
            }
        }
        allowed.push(None);
        allowed
    }

    /// The newest version of a sector after which, in the same round, its file was synced.
    fn durable_version(&self, thread: u64, file: u64, sector: u64, horizon: Moment) -> u64 {
        let mut synced_round = 0;
        for event in self.histories[thread as usize].iter().rev() {
            let Action::Overwrite { file: f, first, blocks, is_synced } = event.action else {
                continue;
            };
            if f != file {
                continue;
            }
            if is_synced && event.end < horizon {
                synced_round = event.version / ROUND;
            }
            let is_hit = (first..first + blocks).contains(&(sector * SECTOR / BLOCK));
            if is_hit && synced_round == event.version / ROUND {
                return event.version;
            }
        }
        0
    }
}

fn version_of(bytes: &[u8]) -> u64 {
    match bytes.get(8..16).and_then(|word| word.try_into().ok()) {
        Some(word) => u64::from_le_bytes(word),
        None => u64::MAX,
    }
}

/// The records of a round's log: version and length.
fn appended(events: &[Event], round: u64) -> Vec<(u64, u64)> {
    let of_round = events.iter().filter(|event| event.version / ROUND == round);
    let records = of_round.filter_map(|event| match event.action {
        Action::Append { len } => Some((event.version, len)),
        _ => None,
    });
    records.collect()
}

fn check(root: &Path, acks: &Path, seed: u64, is_ordered_only: bool) -> Outcome<()> {
    let histories: Vec<Vec<Event>> =
        (0..THREADS).map(|thread| history(acks, seed, thread)).collect::<Outcome<_>>()?;
    let mut judge = Judge { root, seed, histories, found: Found::default(), zeroes: 0, wrong: 0 };
    for thread in 0..THREADS {
        judge.look(thread)?;
    }
    let seen = judge.horizon();
    let horizon = if is_ordered_only { seen } else { NEVER };
    judge.judge(horizon);
    let ends: Vec<Moment> = judge.histories.iter().flatten().map(|event| event.end).collect();
    let acknowledged = ends.iter().filter(|&&end| end != NEVER).count();
    let demanded = ends.iter().filter(|&&end| end < horizon).count();
    println!(
        "labfs: {acknowledged} acknowledged, {demanded} demanded, newest seen {}:{}, {} bytes of \
         zeroes at the ends of logs, {} wrong",
        seen.0, seen.1, judge.zeroes, judge.wrong
    );
    if judge.wrong > 0 { Err("content is wrong".into()) } else { Ok(()) }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["setup", root] => setup(Path::new(root)).map_err(Into::into),
        ["work", root, acks, seed, round] => {
            (|| work(Path::new(root), Path::new(acks), seed.parse()?, round.parse()?))()
        }
        ["check", root, acks, seed, what @ ("all" | "order")] => {
            (|| check(Path::new(root), Path::new(acks), seed.parse()?, what == "order"))()
        }
        _ => Err("usage: labfs setup|work|check ...; see the head of lab/labfs.rs".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("labfs: {error}");
            ExitCode::FAILURE
        }
    }
}
