//! Files and block devices through the ring.
//!
//! 1. An I/O may take several calls. Short calls are continued. Interrupted calls are repeated, and
//!    so are calls that the kernel refuses for lack of memory. If a file system does not
//!    support one method, another is tried. The sender sees one completion.
//! 2. With direct I/O, a request that does not fit the device's alignment goes through a second,
//!    buffered descriptor of the same file. The kernel keeps both views consistent: a direct read
//!    or write first writes back the cached pages of its range, and a direct write drops them
//!    before and afterwards. One case is left: a direct write at the same time as a buffered write
//!    *of the same page*. So "fits" means whole pages wherever the alignment is above a sector;
//!    then two such requests overlap, and their sender must order them. The alternative would be to
//!    read a block, change it and write it back. That would race with every other request to the
//!    block, from this process or another.
//! 3. fdatasync works on the inode, so a flush through one descriptor covers both.
//! 4. The size is the size at the time of opening. I/O to a part that was cut off since then fails,
//!    and so do all writes: see `whole`.
//! 5. One flush is in flight at a time. After a failed flush, each ring with unflushed writes gets
//!    an error: see `flushes`.
//! 6. A disk may be a part of a file. An I/O's offset counts from the start of the part, and a call
//!    to the kernel counts from the start of the file. A file that is cut is cut for all of its
//!    parts.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::claims::Claims;
use super::errors::DiskErrors;
use super::files::Files;
use super::flushing::{FlushJob, Lead};
use super::holes;
use super::lazy::{Budget, Pacing, Reservation, Waiter};
use super::open::{FileOptions, Opened, open};
use super::pagecache::{self, Cached};
use super::whole::Absence;
use super::{Disk, DiskIo, DiskLimits, Evidence, Extent, Ring, Work, carry_out_with, check};
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::error::{Error, Kind, Result, Status};
use crate::ring::{CALL_BYTES_MAX, Call, Job, Memory};
use crate::sync::Arc;
use crate::sync::statics::atomic::Ordering;
use crate::units::MIB;

/// A file or block device as a disk.
#[derive(Debug)]
pub struct FileDisk {
    limits: DiskLimits,
    files: Arc<Files>,
}

/// Bytes of zeroes written at a time where the file system cannot zero a range.
const ZEROES: u64 = MIB;

/// How often a call is repeated that may succeed the next time. When memory is short, the kernel
/// tries to free some before it fails a call, so this many repetitions take a long time.
const RETRIES_MAX: u32 = 10_000;

impl FileDisk {
    /// Opens the file or block device at `path`.
    pub fn open(path: impl AsRef<Path>, options: &FileOptions) -> Result<FileDisk> {
        FileDisk::open_within(path, options, &[], &Budget::default())
    }

    /// Opens the file even if this process already has it open through one of `claims`.
    pub fn open_shared(
        path: impl AsRef<Path>,
        options: &FileOptions,
        claims: &Claims,
    ) -> Result<FileDisk> {
        FileDisk::open_within(path, options, &[claims], claims.budget())
    }

    /// The same; lazy writes share `budget`.
    pub fn open_within(
        path: impl AsRef<Path>,
        options: &FileOptions,
        claims: &[&Claims],
        budget: &Budget,
    ) -> Result<FileDisk> {
        let Opened { limits, files } = open(path.as_ref(), options, claims, budget)?;
        Ok(FileDisk { limits, files: Arc::new(files) })
    }

    /// Whether aligned requests go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.files.direct.is_some()
    }

    /// The amount of the file that the page cache holds; `None` if the kernel does not report it
    /// (before Linux 6.5).
    pub fn cached(&self) -> Option<Cached> {
        pagecache::look(&self.files.buffered, 0, 0)
    }

    /// Whether a range of the file can be written out alone. `io=lazy` needs this where the kernel
    /// does not write pages out by itself. Tested by waiting for one page.
    pub fn has_write_out(&self) -> bool {
        pagecache::await_write_out(&self.files.buffered, 0, 1)
    }

    /// Lets the page cache drop the file's clean pages. Only a hint.
    pub fn forget_cached(&self) {
        let _ = rustix::fs::fadvise(&self.files.buffered, 0, None, rustix::fs::Advice::DontNeed);
    }
}

impl Disk for FileDisk {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        if let Err(status) = check(&self.limits, &io) {
            return ring.finish(io, Err(status));
        }
        let way = match io.op {
            Op::Read | Op::Write => Way::Move,
            Op::Flush => Way::Sync,
            Op::WriteZeroes if self.files.was_written(&io) => Way::Allocate(ZERO_MODES.len()),
            Op::Discard | Op::WriteZeroes => Way::Allocate(0),
        };
        let is_change = matches!(io.op, Op::Write | Op::Discard | Op::WriteZeroes);
        if self.files.is_read_only && is_change {
            return ring.finish(io, Err(Status::ReadOnly));
        }
        if !self.files.has(&io) {
            return ring.finish(io, Err(Status::Io));
        }
        if io.len == 0 && io.op != Op::Flush {
            return ring.finish(io, Ok(()));
        }
        let at = self.files.start + io.offset;
        let write = is_change.then(|| self.files.whole.begin_write(at, io.len));
        let begun = if is_change { self.files.flushing.begin_write(ring) } else { 0 };
        if way == Way::Allocate(0) && (io.op == Op::Discard || !self.files.keeps_room()) {
            self.files.whole.punched();
        }
        let mut job = Box::new(FileJob {
            io,
            files: self.files.clone(),
            write: write.flatten(),
            begun,
            way,
            done: 0,
            retries: 0,
            is_buffered: self.files.direct.is_none(),
            flags: 0,
            reservation: None,
            ring: ring.id(),
            lead: None,
        });
        if way == Way::Sync {
            match self.files.flushing.clone().ask(job, ring) {
                Some(leads) => job = leads,
                None => return,
            }
        }
        let memory = std::mem::replace(&mut job.io.buffer, Buffer::empty());
        match job.next(memory) {
            Next::Call(work) => ring.start(work),
            Next::Over(io) => ring.complete(io),
            Next::Write(job, write) => {
                if let Some(work) = job.send(write, ring) {
                    ring.start(work);
                }
            }
        }
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        let offset = offset.saturating_add(self.files.start);
        let end = offset.saturating_add(len);
        if self.files.is_block_device || end > self.files.whole.left_bytes() {
            return (len, Extent::Data);
        }
        let (len, extent) = holes::extent(&self.files.buffered, offset, len);
        // A hole may be new: see `recent`.
        let is_there = extent == Extent::Data
            || self.files.whole.look(&self.files.buffered)
            || offset + len <= self.files.whole.left_bytes();
        (len, if is_there { extent } else { Extent::Data })
    }

    fn expect_data(&self, from: u64) {
        self.files.written_from.store(from, Ordering::Relaxed);
    }

    fn errors(&self) -> DiskErrors {
        self.files.errors.look()
    }

    fn carry_out(&self, mut ios: Vec<DiskIo>) -> Vec<DiskIo> {
        match Ring::new(CARRY_OUT_DEPTH) {
            Ok(ring) => carry_out_with(self, ios, ring, |ring| {
                while !ring.has_ended() {
                    ring.submit_and_wait(None);
                }
            }),
            Err(_) => {
                ios.iter_mut().for_each(|io| io.result = Err(Status::Unsupported));
                ios
            }
        }
    }

    fn is_read_only(&self) -> bool {
        self.files.is_read_only
    }

    fn loss(&self) -> Option<String> {
        self.files.whole.loss(&self.files.buffered)
    }

    fn absence(&self) -> Option<Absence> {
        self.files.whole.absence(&self.files.buffered)
    }

    fn evidence(&self, is_end: bool) -> Evidence {
        self.files.evidence(self.limits.size_bytes, is_end)
    }

    fn open_as(&self) -> Option<String> {
        let number = self.files.buffered.as_raw_fd();
        Some(format!("/proc/{}/fd/{number}", std::process::id()))
    }

    fn pacing(&self) -> Option<Pacing> {
        self.files.lazy.as_ref().map(|lazy| lazy.pacing())
    }

    fn keep_room(&self) -> Result<()> {
        self.files.keep_room(self.limits.size_bytes).map_err(|errno| match errno {
            rustix::io::Errno::NOSPC => {
                let what = format!(
                    "{} is a sparse file of {} bytes, and its file system lacks the space",
                    self.limits.name, self.limits.size_bytes
                );
                Error::new(Kind::NoSpace, what)
            }
            errno => Error::from_io("reserving room for", &self.limits.name, errno.into()),
        })
    }

    fn begins_at(&self) -> u64 {
        self.files.start
    }

    fn losses(&self) -> u64 {
        self.files.flushing.losses()
    }

    fn is_owing(&self) -> bool {
        self.files.flushing.is_owing()
    }
}

/// Entries of the ring of [`Disk::carry_out`].
const CARRY_OUT_DEPTH: u32 = 64;

/// How an I/O is being carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Bytes move between the buffer and the file.
    Move,
    /// fdatasync.
    Sync,
    /// fallocate, with the mode of this number.
    Allocate(usize),
    /// Zeroes are written.
    Zeroes,
}

impl Way {
    /// Whether the same call may succeed the next time. In a memory control group a write may fail
    /// with ENOMEM while all of the group's pages are dirty or in write-out, because Linux starts
    /// no write-out for a write that is inside a file system already. A flush is not repeated: the
    /// kernel reports a failed write-out only once.
    fn may_pass(self, result: i32) -> bool {
        match -result {
            libc::EINTR | libc::EAGAIN => true,
            libc::ENOMEM => self != Way::Sync,
            _ => false,
        }
    }
}

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
/// FALLOC_FL_NO_HIDE_STALE.
const NO_HIDE_STALE: i32 = 4;
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Modes of fallocate that discard, best first. The first is a block device's true discard, after
/// which the content of later reads is undefined; newer kernels removed it.
const DISCARD_MODES: [i32; 2] = [PUNCH | NO_HIDE_STALE, PUNCH];

/// Modes of fallocate that zero, best first: both give zeroes, the first also frees space.
const ZERO_MODES: [i32; 2] = [PUNCH, ZERO];

/// An I/O that takes one or more calls. While a call is in flight, the I/O's buffer is in the
/// [`Work`].
#[derive(Debug)]
struct FileJob {
    io: DiskIo,
    files: Arc<Files>,
    /// The ticket of a write to a file in flight.
    write: Option<u64>,
    /// When a change began, for [`Flushing::end_write`](super::flushing::Flushing::end_write).
    begun: u64,
    way: Way,
    /// Bytes done so far.
    done: u64,
    retries: u32,
    /// Whether this I/O must not use the direct descriptor.
    is_buffered: bool,
    /// Flags of the call in flight.
    flags: i32,
    /// The part of the budget that the write in flight holds.
    reservation: Option<Reservation>,
    /// The number of the I/O's ring.
    ring: u64,
    /// Held by the job that makes a flush.
    lead: Option<Lead>,
}

/// The next step of an I/O.
enum Next {
    /// Make this call.
    Call(Work),
    /// Make this write, as soon as the budget allows it.
    Write(Box<FileJob>, PacedWrite),
    /// The I/O has completed.
    Over(DiskIo),
}

/// A write to a lazy file.
struct PacedWrite {
    file: Arc<OwnedFd>,
    call: Call,
    memory: Buffer,
    range: Range<u64>,
}

impl Job<DiskIo> for FileJob {
    fn ended(
        self: Box<Self>,
        _call: Call,
        memory: Memory,
        result: i32,
        ring: &mut Ring,
    ) -> Option<Work> {
        let Memory::One(memory) = memory else { panic!("a disk's work has one buffer") };
        match self.advance(memory, result) {
            Next::Call(work) => Some(work),
            Next::Write(job, write) => job.send(write, ring),
            Next::Over(io) => {
                ring.complete(io);
                None
            }
        }
    }

    fn value(&self) -> &DiskIo {
        &self.io
    }
}

impl FlushJob for FileJob {
    fn take_lead(&mut self, lead: Lead) {
        self.lead = Some(lead);
    }

    fn sync(self: Box<Self>) -> Work {
        let (file, memory) = (self.files.buffered.clone(), Memory::One(Buffer::empty()));
        Work { file, call: Call::Sync, memory, owner: self, is_awaited: true }
    }

    fn end(self: Box<Self>, result: std::result::Result<(), Status>) -> DiskIo {
        self.over(Buffer::empty(), result)
    }
}

impl FileJob {
    /// Continues after a call that ended with `result` (negative: an errno).
    fn advance(mut self: Box<Self>, memory: Buffer, result: i32) -> Next {
        #[cfg(test)]
        let result = self.files.flushing.spoilt(self.way == Way::Sync, result);
        if let (Some(reservation), Some(lazy)) = (self.reservation.take(), &self.files.lazy) {
            if result > 0 {
                let offset = self.files.start + self.io.offset + self.done;
                lazy.wrote(self.flags, offset, result as u64);
            }
            drop(reservation);
        }
        if self.way.may_pass(result) && self.retries < RETRIES_MAX {
            self.retries += 1;
            return self.next(memory);
        }
        let is_refused = result == -libc::EOPNOTSUPP || result == -libc::EINVAL;
        match self.way {
            Way::Allocate(mode) if is_refused => {
                self.way = Way::Allocate(mode + 1);
                self.next(memory)
            }
            // The file system does not know the flag of the write.
            Way::Move | Way::Zeroes
                if is_refused
                    && self.files.lazy.as_ref().is_some_and(|lazy| lazy.refused(self.flags)) =>
            {
                self.next(memory)
            }
            // The device needs more alignment than it reported.
            Way::Move | Way::Zeroes if result == -libc::EINVAL && !self.is_buffered => {
                self.is_buffered = true;
                self.next(memory)
            }
            _ if result < 0 => {
                self.files.errors.note(self.io.op, -result);
                Next::Over(self.over(memory, Err(status_of(-result))))
            }
            Way::Sync if !self.files.whole.look(&self.files.buffered) => {
                Next::Over(self.over(memory, Err(Status::Io)))
            }
            Way::Sync | Way::Allocate(_) => Next::Over(self.over(memory, Ok(()))),
            Way::Move | Way::Zeroes => self.moved(memory, result as u64),
        }
    }

    /// `count` more bytes are done. 0 means that the file has become shorter since it was opened,
    /// or that a device takes no bytes.
    fn moved(mut self: Box<Self>, memory: Buffer, count: u64) -> Next {
        self.done += count;
        self.retries = 0;
        if count == 0 {
            self.files.whole.look(&self.files.buffered);
            return Next::Over(self.over(memory, Err(Status::Io)));
        }
        self.next(memory)
    }

    /// The next call, or the finished I/O.
    fn next(mut self: Box<Self>, mut memory: Buffer) -> Next {
        if self.way == Way::Allocate(ZERO_MODES.len()) {
            if self.io.op == Op::Discard {
                return Next::Over(self.over(memory, Err(Status::Unsupported)));
            }
            self.way = Way::Zeroes;
            memory = Buffer::zeroed(self.io.len.min(ZEROES) as usize);
        }
        if self.way != Way::Sync && self.done == self.io.len {
            return Next::Over(self.over(memory, Ok(())));
        }
        let Some((file, call)) = self.call() else {
            return Next::Over(self.over(memory, Ok(())));
        };
        if let (Call::Write { offset, len, flags, .. }, Some(_)) = (call, &self.files.lazy) {
            self.flags = flags;
            let range = offset..offset + len as u64;
            return Next::Write(self, PacedWrite { file, call, memory, range });
        }
        Next::Call(Work { file, call, memory: Memory::One(memory), owner: self, is_awaited: true })
    }

    /// Sends a write to a lazy file if the budget has space for it; otherwise it is sent later.
    fn send(mut self: Box<Self>, write: PacedWrite, ring: &mut Ring) -> Option<Work> {
        let Some(lazy) = self.files.lazy.clone() else { panic!("the file is lazy") };
        let PacedWrite { file, call, memory, range } = write;
        if let Some(reservation) = lazy.reserve(ring.id(), range.clone()) {
            self.reservation = Some(reservation);
            let memory = Memory::One(memory);
            return Some(Work { file, call, memory, owner: self, is_awaited: true });
        }
        match ring.remote_job() {
            Ok(remote) => {
                let goes_on: Waiter = Box::new(move |reservation| {
                    self.reservation = Some(reservation);
                    let memory = Memory::One(memory);
                    remote.resume(Work { file, call, memory, owner: self, is_awaited: true });
                });
                lazy.wait(ring.id(), range, goes_on);
            }
            Err(_) => ring.complete(self.over(memory, Err(Status::Io))),
        }
        None
    }

    /// The next call; `None` if no call is needed.
    fn call(&self) -> Option<(Arc<OwnedFd>, Call)> {
        let offset = self.files.start + self.io.offset + self.done;
        let rest = self.io.len - self.done;
        let len = match (&self.files.lazy, self.io.op) {
            (Some(lazy), Op::Write) => rest.min(lazy.write_bytes_max()),
            _ => rest.min(CALL_BYTES_MAX as u64),
        };
        let buffered = self.files.buffered.clone();
        Some(match self.way {
            Way::Sync => (buffered, Call::Sync),
            Way::Allocate(mode) if self.io.op == Op::Discard => {
                let (offset, len) = self.files.whole_blocks(offset, rest)?;
                (buffered, Call::Allocate { mode: DISCARD_MODES[mode], offset, len })
            }
            Way::Allocate(mode) => {
                let mode = if self.files.keeps_room() { ZERO } else { ZERO_MODES[mode] };
                (buffered, Call::Allocate { mode, offset, len: rest })
            }
            Way::Zeroes => {
                let most = self.files.lazy.as_ref().map_or(ZEROES, |lazy| lazy.write_bytes_max());
                let len = len.min(most);
                let (file, flags) = self.files.pick(Op::Write, offset, len, self.is_buffered);
                (file, Call::Write { offset, from: 0, len: len as usize, flags })
            }
            Way::Move => {
                let (file, flags) = self.files.pick(self.io.op, offset, len, self.is_buffered);
                let (from, len) = (self.done as usize, len as usize);
                let call = match self.io.op {
                    Op::Read => Call::Read { offset, from, len, flags },
                    _ => Call::Write { offset, from, len, flags },
                };
                (file, call)
            }
        })
    }

    fn over(mut self, memory: Buffer, mut result: std::result::Result<(), Status>) -> DiskIo {
        match (self.io.op, self.lead.take()) {
            (Op::Flush, Some(lead)) => result = lead.end(result),
            (Op::Flush | Op::Read, _) => {}
            _ => self.files.flushing.end_write(self.ring, self.begun),
        }
        if let (Op::Flush, Ok(()), Some(lazy)) = (self.io.op, result, &self.files.lazy) {
            lazy.flushed();
        }
        let Files { whole, buffered, start, .. } = &*self.files;
        whole.end_write(self.write.take(), result.is_ok());
        if self.io.op == Op::Read && result.is_ok() {
            let (at, data) = (start + self.io.offset, memory.as_slice());
            let is_lost = !whole.believes(buffered, at, data)
                || self.files.was_written(&self.io) && whole.has_hole(buffered, at, data);
            if is_lost {
                result = Err(Status::Io);
            }
        }
        if result.is_ok() {
            self.files.errors.worked(self.io.op);
        }
        let mut io = self.io;
        if matches!(io.op, Op::Read | Op::Write) {
            io.buffer = memory;
        }
        io.result = result;
        io
    }
}

/// The status that the sender of an I/O gets for the errno of a call.
fn status_of(errno: i32) -> Status {
    match errno {
        libc::ENOSPC | libc::EDQUOT => Status::NoSpace,
        libc::EOPNOTSUPP => Status::Unsupported,
        libc::EROFS => Status::ReadOnly,
        libc::ETIMEDOUT => Status::Timeout,
        _ => Status::Io,
    }
}

#[cfg(test)]
mod tests;
