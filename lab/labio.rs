//! labio: writes what an ops file says, to a block device, a file or an NBD export, and checks it.
//!
//!     labio gen SEED SIZE COUNT LEN_MAX FLAGS   prints COUNT random operations on SIZE bytes
//!     labio run TARGET OPS                      executes them
//!     labio apply FILE OPS                      does to a plain file what they mean
//!     labio check TARGET OPS                    every sector holds a value it may hold after a
//!                                               crash: the last flushed one or a later one
//!     labio cat TARGET                          prints the whole content
//!     labio size TARGET                         prints its size in bytes
//!     labio rate TARGET SECONDS THREADS [read]  writes, or reads, 4 KiB at random places, and
//!                                               prints how many of them there were in a second
//!     labio tear CACHE SEGMENT:OFFSET WORDS     tears the key set of a pcache log that ends there:
//!                                               only its first WORDS words were stored
//!
//! TARGET is a path, or nbd+unix:///PATH. The language of ops files is described in
//! tests/vectors/README.md. FLAGS of `gen` are letters: `d` discards, `z` writes zeroes,
//! `f` FUA writes, `s` flushes, `u` leaves the last tenth of the operations unflushed, `4` keeps to
//! whole blocks of 4 KiB. LABIO_PIECE, in the environment, is how much `cat` and `check` read at a
//! time (dm-writecache's mode `p` answers longer reads wrongly); LAB_MEMORY is a file in memory,
//! the source and destination of all data (`memory.rs`).
//!
//! Without dependencies, so that `rustc` alone builds it, statically, for the guest too.

mod memory;
mod random;

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use random::Random;

const SECTOR: u64 = 512;
/// No operation is longer, and this much is read at a time.
const PIECE: usize = 1 << 20;
/// The longest write that an ops file may hold.
const WRITE_MAX: usize = 4 << 20;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The content of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// Generator `p`: the sector's number and this version, 32 times.
    Version(u64),
    /// Generator `c`: this byte everywhere. A sector that was never written is zero.
    Byte(u8),
}

impl Content {
    fn parse(kind: &str, value: u64) -> Outcome<Content> {
        match kind {
            "p" => Ok(Content::Version(value)),
            "c" => Ok(Content::Byte(value as u8)),
            _ => Err(format!("unknown generator {kind}").into()),
        }
    }

    fn fill(self, offset: u64, bytes: &mut [u8]) {
        match self {
            Content::Byte(byte) => bytes.fill(byte),
            Content::Version(version) => {
                for (index, word) in bytes.chunks_exact_mut(16).enumerate() {
                    let sector = (offset + index as u64 * 16) / SECTOR;
                    word[..8].copy_from_slice(&sector.to_le_bytes());
                    word[8..].copy_from_slice(&version.to_le_bytes());
                }
            }
        }
    }
}

/// One line of an ops file that changes content or durability.
#[derive(Clone, Copy, Debug)]
enum Operation {
    Base { offset: u64, len: u64, content: Content },
    Write { offset: u64, len: u64, content: Content, is_fua: bool },
    Zero { offset: u64, len: u64, is_discard: bool },
    Flush,
    Sleep { milliseconds: u64 },
}

fn parse(path: &str) -> Outcome<Vec<Operation>> {
    let mut operations = Vec::new();
    for (number, line) in BufReader::new(File::open(path)?).lines().enumerate() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        parse_line(&words, &mut operations)
            .map_err(|error| format!("{path}:{}: {error}: {line}", number + 1))?;
    }
    Ok(operations)
}

fn parse_line(words: &[&str], operations: &mut Vec<Operation>) -> Outcome<()> {
    let number = |index: usize| -> Outcome<u64> {
        Ok(words.get(index).ok_or("too few words")?.parse::<u64>()?)
    };
    match words.first().copied() {
        None | Some("u" | "r" | "cpu" | "m") => {}
        Some(word) if word.starts_with('#') => {}
        Some(word @ ("b" | "w" | "W")) => {
            let (offset, len) = (number(1)?, number(2)?);
            let content = Content::parse(words.get(3).ok_or("too few words")?, number(4)?)?;
            operations.push(match word {
                "b" => Operation::Base { offset, len, content },
                _ => Operation::Write { offset, len, content, is_fua: word == "W" },
            });
        }
        Some("q") => {
            let kind = words.get(6).ok_or("too few words")?;
            for index in 0..number(3)? {
                operations.push(Operation::Write {
                    offset: number(1)? + index * number(2)? % number(4)?,
                    len: number(5)?,
                    content: Content::parse(kind, number(7)? + index)?,
                    is_fua: number(8)? == 1,
                });
            }
        }
        Some(word @ ("d" | "0")) => {
            let (offset, len) = (number(1)?, number(2)?);
            operations.push(Operation::Zero { offset, len, is_discard: word == "d" });
        }
        Some("s") => operations.push(Operation::Flush),
        Some("z") => operations.push(Operation::Sleep { milliseconds: number(1)? }),
        Some(_) => return Err("unknown operation".into()),
    }
    Ok(())
}

/// A device that operations run on.
trait Device {
    fn size(&self) -> u64;
    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    fn write(&mut self, offset: u64, bytes: &[u8], is_fua: bool) -> io::Result<()>;
    fn zero(&mut self, offset: u64, len: u64, is_discard: bool) -> io::Result<()>;
    fn flush(&mut self) -> io::Result<()>;
}

/// A file, or a block device past the page cache.
struct Local {
    plain: File,
    fua: File,
    size: u64,
    bounce: &'static mut [u8],
}

impl Local {
    fn open(path: &str) -> io::Result<Local> {
        const O_DSYNC: i32 = 0o10000;
        const O_DIRECT: i32 = 0o40000;
        let is_block = std::fs::metadata(path)?.file_type().is_block_device();
        let direct = if is_block { O_DIRECT } else { 0 };
        let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
        let (mut plain, fua) = (open(direct)?, open(direct | O_DSYNC)?);
        let size = plain.seek(SeekFrom::End(0))?;
        Ok(Local { plain, fua, size, bounce: memory::take(WRITE_MAX)? })
    }
}

impl Device for Local {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let aligned = &mut self.bounce[..bytes.len()];
        self.plain.read_exact_at(aligned, offset)?;
        bytes.copy_from_slice(aligned);
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8], is_fua: bool) -> io::Result<()> {
        let aligned = &mut self.bounce[..bytes.len()];
        aligned.copy_from_slice(bytes);
        let file = if is_fua { &self.fua } else { &self.plain };
        file.write_all_at(aligned, offset)
    }

    fn zero(&mut self, offset: u64, len: u64, _is_discard: bool) -> io::Result<()> {
        let zeroes = vec![0; PIECE];
        let mut done = 0;
        while done < len {
            let piece = (len - done).min(PIECE as u64);
            self.write(offset + done, &zeroes[..piece as usize], false)?;
            done += piece;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.plain.sync_all()
    }
}

/// The smallest NBD client: fixed newstyle, option GO, one request at a time.
struct Nbd {
    stream: UnixStream,
    size: u64,
}

impl Nbd {
    const READ: u16 = 0;
    const WRITE: u16 = 1;
    const DISCONNECT: u16 = 2;
    const FLUSH: u16 = 3;
    const TRIM: u16 = 4;
    const WRITE_ZEROES: u16 = 6;

    fn connect(path: &str) -> Outcome<Nbd> {
        let mut stream = UnixStream::connect(path)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        if &greeting[..16] != b"NBDMAGICIHAVEOPT" {
            return Err("not an NBD server".into());
        }
        // Fixed newstyle, no zeroes; then option 7 (GO) for the default export, no information.
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(b"IHAVEOPT")?;
        stream.write_all(&7_u32.to_be_bytes())?;
        stream.write_all(&6_u32.to_be_bytes())?;
        stream.write_all(&[0; 6])?;
        let mut size = 0;
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            let word = |at: usize| u32::from_be_bytes([0, 1, 2, 3].map(|byte| head[at + byte]));
            let (kind, len) = (word(12), word(16));
            let mut body = vec![0; len as usize];
            stream.read_exact(&mut body)?;
            match kind {
                // ACK
                1 => return Ok(Nbd { stream, size }),
                // INFO about the export: its size
                3 if body.starts_with(&[0, 0]) => {
                    size = u64::from_be_bytes(body[2..10].try_into()?);
                }
                3 => {}
                _ => return Err(format!("the server refused the export: {kind:#x}").into()),
            }
        }
    }

    fn request(
        &mut self,
        command: u16,
        is_fua: bool,
        offset: u64,
        len: u64,
        data: &[u8],
        answer: &mut [u8],
    ) -> io::Result<()> {
        let mut head = Vec::with_capacity(28 + data.len());
        head.extend_from_slice(&0x2560_9513_u32.to_be_bytes());
        head.extend_from_slice(&u16::from(is_fua).to_be_bytes());
        head.extend_from_slice(&command.to_be_bytes());
        head.extend_from_slice(&offset.to_be_bytes());
        head.extend_from_slice(&offset.to_be_bytes());
        head.extend_from_slice(&u32::try_from(len).map_err(io::Error::other)?.to_be_bytes());
        head.extend_from_slice(data);
        self.stream.write_all(&head)?;
        if command == Nbd::DISCONNECT {
            return Ok(());
        }
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        if reply[..4] != 0x6744_6698_u32.to_be_bytes() {
            return Err(io::Error::other("the reply has the wrong magic"));
        }
        match u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]]) {
            0 => self.stream.read_exact(answer),
            errno => Err(io::Error::from_raw_os_error(errno as i32)),
        }
    }
}

impl Device for Nbd {
    fn size(&self) -> u64 {
        self.size
    }

    fn read(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let len = bytes.len() as u64;
        self.request(Nbd::READ, false, offset, len, &[], bytes)
    }

    fn write(&mut self, offset: u64, bytes: &[u8], is_fua: bool) -> io::Result<()> {
        self.request(Nbd::WRITE, is_fua, offset, bytes.len() as u64, bytes, &mut [])
    }

    fn zero(&mut self, offset: u64, len: u64, is_discard: bool) -> io::Result<()> {
        let command = if is_discard { Nbd::TRIM } else { Nbd::WRITE_ZEROES };
        self.request(command, false, offset, len, &[], &mut [])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.request(Nbd::FLUSH, false, 0, 0, &[], &mut [])
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        // The server may be dead: that is some callers' intention.
        let _ = self.request(Nbd::DISCONNECT, false, 0, 0, &[], &mut []);
    }
}

fn open(target: &str) -> Outcome<Box<dyn Device>> {
    match target.strip_prefix("nbd+unix://") {
        Some(path) => Ok(Box::new(Nbd::connect(path)?)),
        None => Ok(Box::new(Local::open(target)?)),
    }
}

fn run(device: &mut dyn Device, operations: &[Operation], with_base: bool) -> Outcome<()> {
    let mut bytes = vec![0; WRITE_MAX];
    let (mut writes, mut written) = (0_u64, 0_u64);
    for operation in operations {
        match *operation {
            Operation::Base { offset, len, content } if with_base => {
                content.fill(offset, &mut bytes[..len as usize]);
                device.write(offset, &bytes[..len as usize], false)?;
            }
            Operation::Base { .. } => {}
            Operation::Write { offset, len, content, is_fua } => {
                content.fill(offset, &mut bytes[..len as usize]);
                device
                    .write(offset, &bytes[..len as usize], is_fua)
                    .map_err(|error| format!("write {len} bytes at {offset}: {error}"))?;
                (writes, written) = (writes + 1, written + len);
            }
            Operation::Zero { offset, len, is_discard } => device
                .zero(offset, len, is_discard)
                .map_err(|error| format!("zero {len} bytes at {offset}: {error}"))?,
            Operation::Flush => device.flush()?,
            Operation::Sleep { milliseconds } => {
                std::thread::sleep(std::time::Duration::from_millis(milliseconds));
            }
        }
    }
    eprintln!("labio: {writes} writes, {written} bytes");
    Ok(())
}

/// The values that a sector may have: the last durable value, and each one written since.
#[derive(Clone)]
struct Allowed {
    durable: Content,
    since: Vec<Content>,
}

fn allowed_after(operations: &[Operation], size: u64) -> Vec<Allowed> {
    let fresh = Allowed { durable: Content::Byte(0), since: Vec::new() };
    let mut sectors = vec![fresh; (size / SECTOR) as usize];
    let range =
        |offset: u64, len: u64| (offset / SECTOR) as usize..((offset + len) / SECTOR) as usize;
    for operation in operations {
        match *operation {
            Operation::Base { offset, len, content } => {
                for sector in &mut sectors[range(offset, len)] {
                    sector.durable = content;
                }
            }
            Operation::Write { offset, len, content, is_fua } => {
                for sector in &mut sectors[range(offset, len)] {
                    if is_fua {
                        sector.durable = content;
                        sector.since.clear();
                    } else {
                        sector.since.push(content);
                    }
                }
            }
            Operation::Zero { offset, len, .. } => {
                for sector in &mut sectors[range(offset, len)] {
                    sector.since.push(Content::Byte(0));
                }
            }
            Operation::Flush => {
                for sector in &mut sectors {
                    if let Some(last) = sector.since.pop() {
                        sector.durable = last;
                        sector.since.clear();
                    }
                }
            }
            Operation::Sleep { .. } => {}
        }
    }
    sectors
}

fn check(device: &mut dyn Device, operations: &[Operation]) -> Outcome<()> {
    let sectors = allowed_after(operations, device.size());
    let mut piece = vec![0; piece()];
    let mut expected = vec![0; SECTOR as usize];
    let (mut newer, mut wrong) = (0_u64, 0_u64);
    let mut at = 0;
    while at < device.size() {
        let len = (device.size() - at).min(piece.len() as u64) as usize;
        device.read(at, &mut piece[..len])?;
        for (index, found) in piece[..len].chunks_exact(SECTOR as usize).enumerate() {
            let offset = at + index as u64 * SECTOR;
            let sector = &sectors[(offset / SECTOR) as usize];
            let mut holds = |content: Content| {
                content.fill(offset, &mut expected);
                expected == found
            };
            if holds(sector.durable) {
                continue;
            }
            if sector.since.iter().any(|&content| holds(content)) {
                newer += 1;
                continue;
            }
            wrong += 1;
            if wrong <= 10 {
                eprintln!(
                    "labio: sector {} holds {:02x?}..., may hold {:?} or {:?}",
                    offset / SECTOR,
                    &found[..16],
                    sector.durable,
                    sector.since
                );
            }
        }
        at += len as u64;
    }
    println!("labio: {} sectors, {newer} newer than flushed, {wrong} wrong", sectors.len());
    if wrong > 0 { Err("content is wrong".into()) } else { Ok(()) }
}

fn generate(seed: u64, size: u64, count: u64, len_max: u64, flags: &str) -> Outcome<()> {
    let mut random = Random(seed);
    let mut out = BufWriter::new(io::stdout().lock());
    let has = |letter: char| flags.contains(letter);
    let flushed = if has('u') { count - count / 10 } else { count };
    for number in 0..count {
        if number == flushed {
            writeln!(out, "s\nu")?;
        }
        // Half of the writes are whole blocks of 4 KiB, the others any sectors.
        let unit = if random.below(2) == 0 || has('4') { 4096 } else { SECTOR };
        let len = unit * (1 + random.below(len_max / unit));
        let offset = unit * random.below((size - len) / unit + 1);
        let version = (seed << 32) + number + 1;
        match random.below(20) {
            0 if has('d') => writeln!(out, "d {offset} {len}")?,
            1 if has('z') => writeln!(out, "0 {offset} {len}")?,
            2 if has('f') && number < flushed => writeln!(out, "W {offset} {len} p {version}")?,
            3 if has('s') && number < flushed => writeln!(out, "s")?,
            _ => writeln!(out, "w {offset} {len} p {version}")?,
        }
    }
    if !has('u') {
        writeln!(out, "s")?;
    }
    Ok(out.flush()?)
}

/// How much is read at a time.
fn piece() -> usize {
    std::env::var("LABIO_PIECE").map_or(PIECE, |bytes| bytes.parse().expect("a number"))
}

fn cat(device: &mut dyn Device) -> Outcome<()> {
    let mut out = io::stdout().lock();
    let mut piece = vec![0; piece()];
    let mut at = 0;
    while at < device.size() {
        let len = (device.size() - at).min(piece.len() as u64) as usize;
        device.read(at, &mut piece[..len])?;
        out.write_all(&piece[..len])?;
        at += len as u64;
    }
    Ok(())
}

/// The layout of a pcache's log on its medium, in bytes.
mod pcache {
    pub const SEGMENTS_AT: u64 = 20480;
    pub const SEGMENT: u64 = 16 << 20;
    pub const SEGMENT_META: u64 = 12288;
    pub const MAGIC: u64 = 0x6768_94A6_4E16_4F1A;
    pub const HEADER: u64 = 24;
    pub const KEY: u64 = 40;
    pub const KEYS_MAX: u64 = 128;
}

/// Only for a log on its first lap: the bytes before the key set are zeroes.
fn tear(path: &str, head: &str, words: u64) -> Outcome<()> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let (segment, offset) = head.split_once(':').ok_or("not SEGMENT:OFFSET")?;
    let (segment, offset): (u64, u64) = (segment.parse()?, offset.parse()?);
    let data = pcache::SEGMENTS_AT + segment * pcache::SEGMENT + pcache::SEGMENT_META;
    for keys in 1..=pcache::KEYS_MAX {
        let len = pcache::HEADER + keys * pcache::KEY;
        let Some(start) = offset.checked_sub(len) else { break };
        let mut header = [0; pcache::HEADER as usize];
        file.read_exact_at(&mut header, data + start)?;
        let magic = u64::from_le_bytes(header[8..16].try_into()?);
        let key_num = u64::from(u32::from_le_bytes(header[4..8].try_into()?));
        if magic == pcache::MAGIC && key_num == keys {
            // A key's length is its second word; those after it may be zeroes anyway.
            let kept = (words * 8).min(len - pcache::KEY + 8);
            file.write_all_at(&vec![0; (len - kept) as usize], data + start + kept)?;
            println!("labio: of a key set of {keys} keys, {kept} of {len} bytes are left");
            return Ok(());
        }
    }
    Err(format!("no key set ends at {head}").into())
}

/// Each thread waits for one write before it begins the next. Versions of writes are not kept.
fn rate(target: &str, seconds: u64, threads: u64, is_read: bool) -> Outcome<()> {
    let end = Instant::now() + Duration::from_secs(seconds);
    let use_all = |seed| -> io::Result<u64> {
        let (mut device, mut random) = (Local::open(target)?, Random(seed));
        let (blocks, bytes) = (device.size() / 4096, [seed as u8; 4096]);
        let mut into = [0; 4096];
        let mut count = 0;
        while Instant::now() < end {
            let at = random.below(blocks) * 4096;
            match is_read {
                true => device.read(at, &mut into)?,
                false => device.write(at, &bytes, false)?,
            }
            count += 1;
        }
        Ok(count)
    };
    let counts = std::thread::scope(|scope| -> Outcome<u64> {
        let use_all = &use_all;
        let running: Vec<_> = (0..threads).map(|seed| scope.spawn(move || use_all(seed))).collect();
        let ended = running.into_iter().map(|thread| thread.join().expect("no panic"));
        Ok(ended.sum::<io::Result<u64>>()?)
    });
    println!("{}", counts? / seconds);
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let outcome = match words[..] {
        ["gen", seed, size, count, len_max, flags] => {
            (|| generate(seed.parse()?, size.parse()?, count.parse()?, len_max.parse()?, flags))()
        }
        ["run", target, ops] => (|| run(&mut *open(target)?, &parse(ops)?, false))(),
        ["apply", file, ops] => (|| run(&mut Local::open(file)?, &parse(ops)?, true))(),
        ["check", target, ops] => (|| check(&mut *open(target)?, &parse(ops)?))(),
        ["cat", target] => (|| cat(&mut *open(target)?))(),
        ["tear", cache, head, words] => (|| tear(cache, head, words.parse()?))(),
        ["rate", target, seconds, threads] => {
            (|| rate(target, seconds.parse()?, threads.parse()?, false))()
        }
        ["rate", target, seconds, threads, "read"] => {
            (|| rate(target, seconds.parse()?, threads.parse()?, true))()
        }
        ["size", target] => open(target).map(|device| println!("{}", device.size())),
        _ => Err(
            "usage: labio gen|run|apply|check|cat|size|rate|tear ...; see the head of lab/labio.rs"
                .into(),
        ),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("labio: {error}");
            ExitCode::FAILURE
        }
    }
}
