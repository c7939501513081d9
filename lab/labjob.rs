//! labjob: random I/O on a file of a mounted file system, as the published study of dm-cache did,
//! with content that can be judged afterwards.
//!
//!     labjob fill FILE BYTES VERSIONS              makes FILE, in writes of 1 MiB
//!     labjob read FILE VERSIONS SECONDS THREADS    reads 4 KiB at random places, and prints how
//!                                                  many of them there were in a second
//!     labjob write FILE VERSIONS SECONDS THREADS   the same with writes
//!     labjob check FILE VERSIONS                   every block is what it was made last
//!
//! All I/O is past the page cache (O_DIRECT), and each thread has one at a time. A block of 4 KiB
//! holds its number and its version, again and again; VERSIONS is a file elsewhere with the
//! versions of all blocks, eight bytes for each. A thread writes blocks of its own.
//!
//! Without dependencies, so that `rustc` alone builds it, statically, for the guest.

mod random;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use random::Random;

const BLOCK: u64 = 4096;
const PIECE_BLOCKS: u64 = 256;
const O_DIRECT: i32 = 0o40000;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Memory as direct I/O wants it.
#[repr(align(4096))]
#[derive(Clone)]
struct Block([u8; BLOCK as usize]);

impl Block {
    fn of(number: u64, version: u64) -> Block {
        let mut block = Block([0; BLOCK as usize]);
        for word in block.0.chunks_exact_mut(16) {
            word[..8].copy_from_slice(&number.to_le_bytes());
            word[8..].copy_from_slice(&version.to_le_bytes());
        }
        block
    }

    /// An error unless it is this one.
    fn check(&self, number: u64, version: u64) -> io::Result<()> {
        if self.0 == Block::of(number, version).0 {
            return Ok(());
        }
        let word = |at: usize| u64::from_le_bytes(*self.0[at..].first_chunk().expect("in a block"));
        let what = format!(
            "block {number} is not of version {version}: it begins as block {} of version {}",
            word(0),
            word(8)
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

    fn read(&self, number: u64, version: u64) -> io::Result<()> {
        let mut block = Block([0; BLOCK as usize]);
        self.file.read_exact_at(&mut block.0, number * BLOCK)?;
        block.check(number, version)
    }
}

fn save(path: &str, versions: &[u64]) -> Outcome<()> {
    let bytes: Vec<u8> = versions.iter().flat_map(|version| version.to_le_bytes()).collect();
    Ok(std::fs::write(path, bytes)?)
}

fn fill(path: &str, bytes: u64, versions: &str) -> Outcome<()> {
    let file = OpenOptions::new().write(true).create_new(true).custom_flags(O_DIRECT).open(path)?;
    let blocks = bytes / BLOCK;
    // Only an aligned piece of memory is taken, and `Vec<Block>` is not one of bytes.
    let mut room = vec![0; ((PIECE_BLOCKS + 1) * BLOCK) as usize];
    let skip = room.as_ptr().align_offset(BLOCK as usize);
    for first in (0..blocks).step_by(PIECE_BLOCKS as usize) {
        let count = PIECE_BLOCKS.min(blocks - first);
        let piece = &mut room[skip..][..(count * BLOCK) as usize];
        for (number, block) in (first..).zip(piece.chunks_exact_mut(BLOCK as usize)) {
            block.copy_from_slice(&Block::of(number, 0).0);
        }
        file.write_all_at(piece, first * BLOCK)?;
    }
    file.sync_all()?;
    save(versions, &vec![0; blocks as usize])
}

/// What a thread has done: how often, and the versions that it has written.
type Done = io::Result<(u64, Vec<(u64, u64)>)>;

fn work(judged: &Judged, is_write: bool, thread: u64, threads: u64, end: Instant) -> Done {
    let mut random = Random(thread + 1);
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
                let block = Block::of(number, versions[nth as usize]);
                judged.file.write_all_at(&block.0, number * BLOCK)?;
            }
            false => {
                let number = random.below(blocks);
                judged.read(number, judged.versions[number as usize])?;
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
        return Err("there is nothing to do".into());
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
    let mut numbers = (0..).zip(&judged.versions);
    numbers.try_for_each(|(number, version)| judged.read(number, *version))?;
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
