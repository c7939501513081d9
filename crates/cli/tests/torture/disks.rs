//! Disks that fail: files of a FUSE file system of our own, each of them the engine's malicious
//! disk (`SimDisk`).
//!
//! A disk has a volatile write cache, fails at will by operation and by range, hangs, and loses its
//! power. It executes requests one at a time, in their order of arrival.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use udm::disk::{Disk, DiskIo, Fault, SimDisk};
use udm::prng::Prng;
use udm::{Buffer, Op};

/// Bytes of a sector.
const SECTOR: usize = 512;
/// Bytes of the largest request.
const REQUEST_MAX: u32 = 1 << 20;
/// Of the header before each request and each answer.
const IN_HEADER: usize = 40;
const OUT_HEADER: usize = 16;

/// Flags of FUSE: there are more flags, and the 36th one of all.
const INIT_EXT: u32 = 1 << 30;
const DIRECT_IO_ALLOW_MMAP: u32 = 1 << 4;

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const ENOSYS: i32 = 38;

/// FUSE's operations, as the kernel numbers them.
mod code {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

/// One disk.
struct Drive {
    name: String,
    bytes: u64,
    sim: Arc<SimDisk>,
    is_hanging: bool,
    /// Requests that came while it hangs.
    waiting: Vec<Vec<u8>>,
    /// Changes by others than a server: the time of the last one.
    changes: u64,
}

struct Shared {
    fuse: File,
    drives: Mutex<Vec<Drive>>,
    /// Whether files with direct I/O can also be mapped, as commands for caches at rest do.
    can_map: AtomicBool,
    is_over: AtomicBool,
}

/// The disks of a case, and the folder in which they are files.
pub struct Disks {
    shared: Arc<Shared>,
    folder: PathBuf,
}

impl Disks {
    /// Disks of zeroes. None, with a word about it, where FUSE cannot be mounted.
    pub fn mount(folder: &Path, sizes: &[(String, u64)], seed: u64) -> Option<Disks> {
        let fuse = match OpenOptions::new().read(true).write(true).open("/dev/fuse") {
            Ok(fuse) => fuse,
            Err(error) => {
                println!("SKIPPED: disks that fail need /dev/fuse: {error}");
                return None;
            }
        };
        std::fs::create_dir_all(folder).unwrap();
        let inherited = Stdio::from(fuse.try_clone().unwrap());
        let drive = |(nth, (name, bytes)): (usize, &(String, u64))| {
            let (name, bytes) = (name.clone(), *bytes);
            let sim = new_sim(SimDisk::new(bytes, SECTOR as u32), seed + nth as u64);
            Drive { name, bytes, sim, is_hanging: false, waiting: Vec::new(), changes: 0 }
        };
        let drives = Mutex::new(sizes.iter().enumerate().map(drive).collect());
        let (can_map, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let shared = Arc::new(Shared { fuse, drives, can_map, is_over });
        let disks = Disks { shared: shared.clone(), folder: folder.to_owned() };
        std::thread::spawn(move || shared.serve());
        let options = "fd=0,rootmode=40000,user_id=0,group_id=0,allow_other";
        let words = ["-i", "-t", "fuse", "-o", options, "disks"];
        let mounted = Command::new("mount").args(words).arg(folder).stdin(inherited).output();
        if !mounted.as_ref().is_ok_and(|output| output.status.success()) {
            println!("SKIPPED: disks that fail need root: {mounted:?}");
            return None;
        }
        let is_there = disks.path(&sizes[0].0).is_file();
        if !is_there || !disks.shared.can_map.load(Ordering::SeqCst) {
            println!("SKIPPED: disks that fail need Linux 6.6");
            return None;
        }
        Some(disks)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The program that serves the file system ends: open files fail from now on, and the path
    /// leads to an empty folder.
    #[allow(dead_code, reason = "only the commands' tests use it")]
    pub fn die(self) {
        let words = ["-f".as_ref(), self.folder.as_os_str()];
        let _ = Command::new("umount").args(words).stderr(Stdio::null()).status();
    }

    fn with<T>(&self, name: &str, action: impl FnOnce(&Shared, &mut Drive) -> T) -> T {
        let mut drives = self.shared.drives.lock().unwrap();
        let drive = drives.iter_mut().find(|drive| drive.name == name).expect("a disk");
        action(&self.shared, drive)
    }

    /// From now on, the disk also fails like this.
    pub fn inject(&self, name: &str, fault: Fault) {
        self.with(name, |_, drive| drive.sim.inject(fault));
    }

    /// From now on it answers no request.
    pub fn hang(&self, name: &str) {
        self.with(name, |_, drive| drive.is_hanging = true);
    }

    /// All disks are well, and answer what they were asked.
    pub fn heal(&self) {
        let mut drives = self.shared.drives.lock().unwrap_or_else(|error| error.into_inner());
        for drive in drives.iter_mut() {
            drive.sim.heal();
            drive.is_hanging = false;
            for request in std::mem::take(&mut drive.waiting) {
                self.shared.carry_out(drive, &request);
            }
        }
    }

    /// The power fails and returns: each unflushed write survives or not, by chance.
    pub fn cut_power(&self, random: &mut Prng) {
        for drive in self.shared.drives.lock().unwrap().iter_mut() {
            assert!(drive.waiting.is_empty(), "a request of a dead server waits");
            drive.sim = new_sim(drive.sim.crash(random), random.next_u64());
        }
    }

    /// It is replaced by a new one, of zeroes.
    pub fn replace(&self, name: &str) {
        self.with(name, |_, drive| {
            drive.sim = new_sim(SimDisk::new(drive.bytes, SECTOR as u32), drive.changes);
            drive.changes += 1;
        });
    }

    /// Another program writes to it, durably.
    pub fn change(&self, name: &str, offset: u64, bytes: &[u8]) {
        self.with(name, |_, drive| {
            drive.sim.poke(offset, bytes);
            drive.changes += 1;
        });
    }

    /// Saves the content of the disks as files, for the analysis of a failure.
    pub fn save(&self, folder: &Path) {
        for drive in self.shared.drives.lock().unwrap_or_else(|error| error.into_inner()).iter() {
            let _ = std::fs::write(folder.join(format!("{}.image", drive.name)), drive.sim.image());
        }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        self.heal();
        // By force: a child between fork and exec may have both a file and `/dev/fuse` of this
        // process, and its close of the file would wait for an answer that never comes.
        let _ = Command::new("umount").arg("-fl").arg(&self.folder).stderr(Stdio::null()).status();
        self.shared.is_over.store(true, Ordering::SeqCst);
    }
}

/// The data of a failed flush can be read until the power fails, as in a page cache.
fn new_sim(sim: SimDisk, seed: u64) -> Arc<SimDisk> {
    sim.seed(seed);
    sim.show_lost();
    Arc::new(sim)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Little-endian fields, one after another.
#[derive(Default)]
struct Fields(Vec<u8>);

impl Fields {
    fn words(mut self, words: &[u64]) -> Fields {
        words.iter().for_each(|word| self.0.extend(word.to_le_bytes()));
        self
    }

    fn halves(mut self, halves: &[u32]) -> Fields {
        halves.iter().for_each(|half| self.0.extend(half.to_le_bytes()));
        self
    }
}

/// Attributes of a node, as FUSE has them; node 1 is the folder.
fn attributes(node: u64, drive: Option<&Drive>) -> Vec<u8> {
    let (mode, bytes, time) = match drive {
        Some(drive) => (0o100_600, drive.bytes, 1 + drive.changes),
        None => (0o040_700, 0, 1),
    };
    let fields = Fields::default().words(&[node, bytes, bytes / SECTOR as u64, time, time, time]);
    fields.halves(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]).0
}

type Answer = Result<Vec<u8>, i32>;

impl Shared {
    /// Answers until the file system is not mounted any more.
    fn serve(&self) {
        let mut request = vec![0; REQUEST_MAX as usize + 4096];
        while !self.is_over.load(Ordering::SeqCst) {
            match (&self.fuse).read(&mut request) {
                Ok(len) => self.take(&request[..len]),
                // It is not mounted yet.
                Err(error) if error.raw_os_error() == Some(1) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // A request that was withdrawn.
                Err(error) if error.raw_os_error() == Some(ENOENT) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn take(&self, request: &[u8]) {
        let (operation, node) = (half(request, 4), word(request, 16));
        if matches!(operation, code::FORGET | code::BATCH_FORGET | code::INTERRUPT) {
            return;
        }
        let mut drives = self.drives.lock().unwrap_or_else(|error| error.into_inner());
        let is_io = matches!(operation, code::READ | code::WRITE | code::FSYNC | code::FALLOCATE);
        if operation == code::INIT {
            let has_more = half(request, IN_HEADER + 12) & INIT_EXT != 0;
            let more = if has_more { half(request, IN_HEADER + 16) } else { 0 };
            self.can_map.store(more & DIRECT_IO_ALLOW_MMAP != 0, Ordering::SeqCst);
        }
        if !is_io {
            let answer = about(&drives, request);
            drop(drives);
            return self.answer(request, answer);
        }
        let drive = &mut drives[node as usize - 2];
        if drive.is_hanging {
            return drive.waiting.push(request.to_vec());
        }
        self.carry_out(drive, request);
    }

    fn carry_out(&self, drive: &mut Drive, request: &[u8]) {
        self.answer(request, drive.carry_out(request));
    }

    fn answer(&self, request: &[u8], answer: Answer) {
        let (error, data) = match answer {
            Ok(data) => (0, data),
            Err(error) => (error, Vec::new()),
        };
        let len = (OUT_HEADER + data.len()) as u32;
        let head = Fields::default().halves(&[len, (-error) as u32]).words(&[word(request, 8)]).0;
        // The caller may be gone.
        let _ = (&self.fuse).write(&[head, data].concat());
    }
}

/// The answer to a question that is not about data.
fn about(drives: &[Drive], request: &[u8]) -> Answer {
    let (node, body) = (word(request, 16), &request[IN_HEADER..]);
    let drive = (node as usize).checked_sub(2).and_then(|nth| drives.get(nth));
    match half(request, 4) {
        code::INIT => {
            // Asynchronous reads, large writes, asynchronous direct I/O, many pages.
            let flags = half(body, 12) & (1 | 1 << 5 | 1 << 15 | 1 << 22 | INIT_EXT);
            let more = if flags & INIT_EXT != 0 { half(body, 16) } else { 0 };
            let minor = half(body, 4).min(36);
            let fields = Fields::default().halves(&[7, minor, 0, flags, 64 | 64 << 16]);
            let pages = REQUEST_MAX / 4096;
            let more = more & DIRECT_IO_ALLOW_MMAP;
            Ok(fields.halves(&[REQUEST_MAX, 1, pages, more, 0, 0, 0, 0, 0, 0, 0]).0)
        }
        code::LOOKUP => {
            let name = body.split(|byte| *byte == 0).next().unwrap_or_default();
            let nth = drives.iter().position(|drive| drive.name.as_bytes() == name);
            let nth = nth.ok_or(ENOENT)?;
            let node = nth as u64 + 2;
            let fields = Fields::default().words(&[node, 1, 1000, 0]).halves(&[0, 0]).0;
            Ok([fields, attributes(node, Some(&drives[nth]))].concat())
        }
        // Attributes are asked for each time.
        code::GETATTR | code::SETATTR => {
            Ok([Fields::default().words(&[0, 0]).0, attributes(node, drive)].concat())
        }
        // Direct I/O, with several writes at a time.
        code::OPEN => Ok(Fields::default().words(&[0]).halves(&[1 | 1 << 6, 0]).0),
        code::OPENDIR => Ok(Fields::default().words(&[0, 0]).0),
        code::STATFS => {
            let fields = Fields::default().words(&[1 << 20, 1 << 20, 1 << 20, 9, 9]);
            Ok(fields.halves(&[4096, 64, 4096, 0, 0, 0, 0, 0, 0, 0]).0)
        }
        code::RELEASE | code::FLUSH | code::READDIR | code::RELEASEDIR => Ok(Vec::new()),
        _ => Err(ENOSYS),
    }
}

impl Drive {
    fn carry_out(&mut self, request: &[u8]) -> Answer {
        let body = &request[IN_HEADER..];
        if half(request, 4) == code::FSYNC {
            return self.do_it(|disk| DiskIo::bare(disk, Op::Flush, 0, 0, 0)).map(|_| Vec::new());
        }
        let (offset, size) = (word(body, 8), u64::from(half(body, 16)));
        match half(request, 4) {
            code::READ => self.read(offset, size),
            code::WRITE => {
                let data = &body[40..40 + size as usize];
                self.check(offset, size)?;
                self.do_it(|disk| {
                    DiskIo::new(disk, Op::Write, offset, Buffer::from_bytes(data), 0)
                })?;
                Ok(Fields::default().halves(&[size as u32, 0]).0)
            }
            _ => {
                let (len, mode) = (word(body, 16), half(body, 24));
                // A hole beyond the end, by which it is found out that there can be holes.
                if offset >= self.bytes && mode & 1 != 0 {
                    return Ok(Vec::new());
                }
                self.check(offset, len)?;
                // A hole, or zeroes; else room, which is there.
                if mode & 0x12 != 0 {
                    self.do_it(|disk| DiskIo::bare(disk, Op::WriteZeroes, offset, len, 0))?;
                }
                Ok(Vec::new())
            }
        }
    }

    fn check(&self, offset: u64, len: u64) -> Result<(), i32> {
        let is_whole = (offset | len).is_multiple_of(SECTOR as u64);
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes && is_whole => Ok(()),
            Some(end) if end <= self.bytes => Err(EINVAL),
            _ => Err(ENOSPC),
        }
    }

    /// A read of any bytes, as far as there are some.
    fn read(&self, offset: u64, size: u64) -> Answer {
        let end = (offset + size).min(self.bytes);
        if offset >= end {
            return Ok(Vec::new());
        }
        let sector = SECTOR as u64;
        let first = offset / sector * sector;
        let len = (end.next_multiple_of(sector) - first) as usize;
        let io = self.do_it(|disk| DiskIo::new(disk, Op::Read, first, Buffer::zeroed(len), 0))?;
        let from = (offset - first) as usize;
        Ok(io.buffer.as_slice()[from..from + (end - offset) as usize].to_vec())
    }

    fn do_it(&self, io: impl FnOnce(&Arc<dyn Disk>) -> DiskIo) -> Result<DiskIo, i32> {
        let disk: Arc<dyn Disk> = self.sim.clone();
        let done = disk.carry_out(vec![io(&disk)]).remove(0);
        if done.result.is_ok() { Ok(done) } else { Err(EIO) }
    }
}
