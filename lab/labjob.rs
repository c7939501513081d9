//! labjob: random I/O on a file of a mounted file system, as the published study of dm-cache did,
//! with content that can be judged afterwards.
//!
//!     labjob fill FILE BYTES VERSIONS              makes FILE, or fills a block device, in writes
//!                                                  of 1 MiB
//!     labjob read FILE VERSIONS SECONDS THREADS    reads 4 KiB at random places, and prints how
//!                                                  many of them there were in a second
//!     labjob write FILE VERSIONS SECONDS THREADS   the same with writes
//!     labjob check FILE VERSIONS                   every block holds its last version
//!
//! All I/O is past the page cache (O_DIRECT), and each thread has one at a time. A block of 4 KiB
//! holds its number and its version, again and again; VERSIONS is a file elsewhere with the
//! versions of all blocks, eight bytes for each. A thread writes blocks of its own. LAB_MEMORY, in
//! the environment, is a file in memory, the source and destination of all data (`memory.rs`).
//!
//! Without dependencies, so that `rustc` alone builds it, statically, for the guest.

mod memory;
mod random;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use random::Random;

const BLOCK: u64 = 4096;
const PIECE_BLOCKS: u64 = 256;
const O_DIRECT: i32 = 0o40000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A block in memory as direct I/O wants it.
struct Block(&'static mut [u8]);

impl Block {
    fn new() -> io::Result<Block> {
        memory::take(BLOCK as usize).map(Block)
    }

    fn word(number: u64, version: u64) -> [u8; 16] {
        (u128::from(version) << 64 | u128::from(number)).to_le_bytes()
    }

    /// Makes it this one.
    fn fill(&mut self, number: u64, version: u64) {
        let word = Block::word(number, version);
        self.0.chunks_exact_mut(16).for_each(|found| found.copy_from_slice(&word));
    }

    /// An error unless it is this one.
    fn check(&self, number: u64, version: u64) -> io::Result<()> {
        let expected = Block::word(number, version);
        let Some(other) = self.0.chunks_exact(16).find(|word| **word != expected) else {
            return Ok(());
        };
        let found = u128::from_le_bytes(*other.first_chunk().expect("a word"));
        let (found_number, found_version) = (found as u64, found >> 64);
        let what = format!(
            "block {number} is not of version {version}: it has words of block {found_number} of \
             version {found_version}"
        );
        Err(io::Error::other(what))
    }
}

/// A file whose blocks are of known versions.
struct Judged {
    file: File,
    versions: Vec<u64>,
}

impl Judged {
    fn open(path: &str, versions: &str) -> Outcome<Judged> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(path)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes"));
        let versions = std::fs::read(versions)?.chunks_exact(8).map(word).collect();
        Ok(Judged { file, versions })
    }

    fn read(&self, number: u64, version: u64, block: &mut Block) -> io::Result<()> {
        // Old content of the buffer must not pass as an answer.
        block.0.fill(0xA5);
        self.file.read_exact_at(block.0, number * BLOCK)?;
        block.check(number, version)
    }
}

fn save(path: &str, versions: &[u64]) -> Outcome<()> {
    let bytes: Vec<u8> = versions.iter().flat_map(|version| version.to_le_bytes()).collect();
    Ok(std::fs::write(path, bytes)?)
}

fn fill(path: &str, bytes: u64, versions: &str) -> Outcome<()> {
    let is_block = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(!is_block).custom_flags(O_DIRECT).open(path)?;
    let blocks = bytes / BLOCK;
    let room = memory::take((PIECE_BLOCKS * BLOCK) as usize)?;
    for first in (0..blocks).step_by(PIECE_BLOCKS as usize) {
        let count = PIECE_BLOCKS.min(blocks - first);
        let piece = &mut room[..(count * BLOCK) as usize];
        for (number, block) in (first..).zip(piece.chunks_exact_mut(BLOCK as usize)) {
            let word = Block::word(number, 0);
            block.chunks_exact_mut(16).for_each(|place| place.copy_from_slice(&word));
        }
        file.write_all_at(piece, first * BLOCK)?;
    }
    file.sync_all()?;
    save(versions, &vec![0; blocks as usize])
}

/// The operations of a thread: their number, and the versions that it has written.
type Done = io::Result<(u64, Vec<(u64, u64)>)>;

fn work(judged: &Judged, is_write: bool, thread: u64, threads: u64, end: Instant) -> Done {
    let (mut random, mut block) = (Random(thread + 1), Block::new()?);
    let blocks = judged.versions.len() as u64;
    let own = (blocks - thread).div_ceil(threads);
    let mut versions: Vec<u64> =
        (0..own).map(|nth| judged.versions[(thread + nth * threads) as usize]).collect();
    let mut count = 0;
    while Instant::now() < end {
        match is_write {
            true => {
                let nth = random.below(own);
                let number = thread + nth * threads;
                versions[nth as usize] += 1;
                block.fill(number, versions[nth as usize]);
                judged.file.write_all_at(block.0, number * BLOCK)?;
            }
            false => {
                let number = random.below(blocks);
                judged.read(number, judged.versions[number as usize], &mut block)?;
            }
        }
        count += 1;
    }
    let numbers = (0..own).map(|nth| thread + nth * threads);
    Ok((count, numbers.zip(versions).collect()))
}

fn job(path: &str, list: &str, is_write: bool, seconds: u64, threads: u64) -> Outcome<()> {
    let mut judged = Judged::open(path, list)?;
    if seconds == 0 || !(1..=judged.versions.len() as u64).contains(&threads) {
        return Err("SECONDS is 0, or THREADS is out of range".into());
    }
    let end = Instant::now() + Duration::from_secs(seconds);
    let ended: Vec<Done> = std::thread::scope(|scope| {
        let judged = &judged;
        let running: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || work(judged, is_write, thread, threads, end)))
            .collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    let mut sum = 0;
    for done in ended {
        let (count, versions) = done?;
        sum += count;
        for (number, version) in versions {
            judged.versions[number as usize] = version;
        }
    }
    if is_write {
        judged.file.sync_all()?;
        save(list, &judged.versions)?;
    }
    println!("{}", sum / seconds);
    Ok(())
}

fn check(path: &str, versions: &str) -> Outcome<()> {
    let judged = Judged::open(path, versions)?;
    let (mut numbers, mut block) = ((0..).zip(&judged.versions), Block::new()?);
    numbers.try_for_each(|(number, version)| judged.read(number, *version, &mut block))?;
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["fill", file, bytes, versions] => (|| fill(file, bytes.parse()?, versions))(),
        [what @ ("read" | "write"), file, versions, seconds, threads] => {
            (|| job(file, versions, what == "write", seconds.parse()?, threads.parse()?))()
        }
        ["check", file, versions] => check(file, versions),
        _ => Err("usage: labjob fill|read|write|check ...; see the head of lab/labjob.rs".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("labjob: {error}");
            ExitCode::FAILURE
        }
    }
}
