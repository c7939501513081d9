//! The kernel's side of a [`Ring`](super::Ring): one io_uring and the table of work in flight.
//!
//! This is the only file that hands memory to the kernel and takes it back. Its unit is [`Work`]: a
//! call, the open file of the call, the memory that it moves, and an owner that gets the result and
//! is opaque here. The invariants on which its `unsafe` rests:
//!
//! 1. Work is moved into a slot of the table before its entry is written to the submission queue,
//!    and leaves the slot only when its completion has been taken from the completion queue. So
//!    memory and file live as long as the kernel may use them.
//! 2. The memory of work in a slot is not accessed: slots are private, and no method hands out
//!    references into them.
//! 3. Memory in a slot does not move: buffers and message headers live on the heap, and moving
//!    their owner moves only the pointer.
//! 4. Each entry asks for exactly one completion (no multi-shot requests, no zero-copy notices).
//! 5. Dropping the table waits for every slot to become empty. If that fails, the memory is leaked.
//!    A leak is harmless; freed memory that the kernel still writes to is not.
//! 6. A command names only the memory of its work's buffer (`command`, the only module that makes
//!    commands).

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use io_uring::{Builder, IoUring, Parameters, Submitter, cqueue, opcode, squeue, types};

use super::command::Command;
use super::way::Way;
use crate::buffer::Buffer;
use crate::sync::Arc;

/// A call to the kernel. Ranges `from..from + len` lie within the work's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// Read from the file at `offset`, with flags as preadv2 takes them.
    Read { offset: u64, from: usize, len: usize, flags: i32 },
    /// Write to the file at `offset`, with flags as pwritev2 takes them.
    Write { offset: u64, from: usize, len: usize, flags: i32 },
    /// fdatasync.
    Sync,
    /// fallocate.
    Allocate { mode: i32, offset: u64, len: u64 },
    /// Receive what is there, at most `len` bytes.
    Recv { from: usize, len: usize },
    /// Send.
    Send { from: usize, len: usize },
    /// Send all buffers of the work's message but the first `skip` bytes.
    SendMany { skip: usize },
    /// Wait until the file can be read without waiting.
    Poll,
    /// Accept a connection.
    Accept,
    /// A command to the driver of the file.
    Command(Command),
}

/// The memory of a call.
#[derive(Debug)]
pub(crate) enum Memory {
    /// One buffer, maybe empty.
    One(Buffer),
    /// Several, with the header that lists them.
    Many(Box<Message>),
}

/// Several buffers to send with one call, and the header that sendmsg needs for them.
pub(crate) struct Message {
    /// The bytes, in order.
    pub buffers: Vec<Buffer>,
    vectors: Vec<libc::iovec>,
    header: libc::msghdr,
}

// SAFETY: the raw pointers lead into memory that the message itself owns (`buffers`, `vectors`).
unsafe impl Send for Message {}

impl Message {
    /// A message without buffers.
    pub fn empty() -> Box<Message> {
        // SAFETY: a msghdr is integers and pointers, for which zero is a value: "none".
        let header = unsafe { std::mem::zeroed() };
        Box::new(Message { buffers: Vec::new(), vectors: Vec::new(), header })
    }

    /// Bytes of all buffers.
    pub fn len(&self) -> usize {
        self.buffers.iter().map(Buffer::len).sum()
    }

    /// Lists all but the first `skip` bytes in the header, and returns its address.
    fn prepare(&mut self, mut skip: usize) -> *const libc::msghdr {
        self.vectors.clear();
        for buffer in &mut self.buffers {
            let skipped = skip.min(buffer.len());
            skip -= skipped;
            let rest = &mut buffer.as_mut_slice()[skipped..];
            if !rest.is_empty() {
                let iov_base = rest.as_mut_ptr().cast();
                self.vectors.push(libc::iovec { iov_base, iov_len: rest.len() });
            }
        }
        self.header.msg_iov = self.vectors.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.len() as _;
        &raw const self.header
    }
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Message({} buffers, {} bytes)", self.buffers.len(), self.len())
    }
}

/// One call on its way to the kernel and back.
#[derive(Debug)]
pub(crate) struct Work<O> {
    /// The file of the call; stays open as long as the work lives.
    pub file: Arc<OwnedFd>,
    /// What to do.
    pub call: Call,
    /// The memory it moves.
    pub memory: Memory,
    /// Whom to report the end to.
    pub owner: O,
    /// Whether its end is awaited: then a dropped ring waits for it too; otherwise it is cancelled.
    pub is_awaited: bool,
}

impl<O> Work<O> {
    /// The same for another owner.
    pub(super) fn owned_by<P>(self, other: impl FnOnce(O) -> P) -> Work<P> {
        let Work { file, call, memory, owner, is_awaited } = self;
        Work { file, call, memory, owner: other(owner), is_awaited }
    }

    /// The submission entry for this work.
    ///
    /// The entry holds raw pointers into `self.memory`; the caller keeps `self` until the
    /// completion.
    fn entry(&mut self) -> squeue::Entry {
        let fd = types::Fd(self.file.as_raw_fd());
        // A peer that went away is an error, not a signal; a full socket is worth waiting for.
        let sending = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        match self.call {
            Call::Read { offset, from, len, flags } => {
                opcode::Read::new(fd, self.part(from, len).as_mut_ptr(), len as u32)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            Call::Write { offset, from, len, flags } => {
                opcode::Write::new(fd, self.part(from, len).as_ptr(), len as u32)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            Call::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Call::Allocate { mode, offset, len } => {
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
            // 0 would stand for all bytes up to the end of the file.
            Call::Recv { from, len } => {
                opcode::Recv::new(fd, self.part(from, len).as_mut_ptr(), len as u32).build()
            }
            Call::Send { from, len } => {
                opcode::Send::new(fd, self.part(from, len).as_ptr(), len as u32)
                    .flags(sending)
                    .build()
            }
            Call::SendMany { skip } => {
                let Memory::Many(message) = &mut self.memory else {
                    panic!("a vectored send goes with a message");
                };
                opcode::SendMsg::new(fd, message.prepare(skip)).flags(sending as u32).build()
            }
            Call::Poll => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
            Call::Accept => opcode::Accept::new(fd, std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build(),
            Call::Command(_) => panic!("a command is longer than other entries"),
        }
    }

    /// The entry that asks for a command.
    fn long_entry(&mut self, command: Command) -> squeue::Entry128 {
        let Memory::One(buffer) = &mut self.memory else {
            panic!("only a vectored send goes with a message");
        };
        let fd = types::Fd(self.file.as_raw_fd());
        let bytes = command.bytes(buffer.as_mut_slice());
        opcode::UringCmd80::new(fd, command.number()).cmd(bytes).build()
    }

    /// The bytes `from..from + len` of the buffer. Panics if the range is not within it: this check
    /// keeps the kernel inside the buffer.
    fn part(&mut self, from: usize, len: usize) -> &mut [u8] {
        let Memory::One(buffer) = &mut self.memory else {
            panic!("only a vectored send goes with a message");
        };
        assert!(len <= CALL_BYTES_MAX, "a call of {len} bytes is longer than the kernel takes");
        &mut buffer.as_mut_slice()[from..from + len]
    }
}

/// The longest range of one call. The kernel cuts off at 2 GiB less a page.
pub(crate) const CALL_BYTES_MAX: usize = 1 << 30;

/// How long a drop waits for work in flight before it leaks the memory.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// The mark of entries whose completion is ignored. No slot has that index.
const NOBODY: u64 = u64::MAX;

/// How long the entries of a submission queue are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entries {
    /// 64 bytes: enough for all calls but commands.
    Short,
    /// 128 bytes: for commands too (Linux 5.19).
    Long,
}

/// An io_uring with entries of either length.
enum Uring {
    Short(IoUring),
    Long(IoUring<squeue::Entry128>),
}

/// An entry of a submission queue.
enum Entry {
    Short(squeue::Entry),
    Long(squeue::Entry128),
}

impl Uring {
    /// Sets up in the first of `ways` that this kernel knows.
    fn new(count: u32, entries: Entries, ways: &[Way]) -> io::Result<(Uring, Way)> {
        let mut last = io::Error::from_raw_os_error(libc::EINVAL);
        for way in ways {
            let uring = match entries {
                Entries::Short => set_up(IoUring::builder(), count, *way).map(Uring::Short),
                Entries::Long => set_up(IoUring::builder(), count, *way).map(Uring::Long),
            };
            match uring {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
                uring => return Ok((uring?, *way)),
            }
        }
        Err(last)
    }

    fn params(&self) -> &Parameters {
        match self {
            Uring::Short(uring) => uring.params(),
            Uring::Long(uring) => uring.params(),
        }
    }

    fn submitter(&self) -> Submitter<'_> {
        match self {
            Uring::Short(uring) => uring.submitter(),
            Uring::Long(uring) => uring.submitter(),
        }
    }

    fn completion(&mut self) -> cqueue::CompletionQueue<'_> {
        match self {
            Uring::Short(uring) => uring.completion(),
            Uring::Long(uring) => uring.completion(),
        }
    }

    /// Whether the kernel holds something back until it is entered.
    fn is_entry_due(&mut self) -> bool {
        fn is_due<E: squeue::EntryMarker>(queue: &squeue::SubmissionQueue<'_, E>) -> bool {
            !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
        }
        match self {
            Uring::Short(uring) => is_due(&uring.submission()),
            Uring::Long(uring) => is_due(&uring.submission()),
        }
    }

    /// Entries that wait to be submitted.
    fn pending(&mut self) -> usize {
        match self {
            Uring::Short(uring) => uring.submission().len(),
            Uring::Long(uring) => uring.submission().len(),
        }
    }

    /// Puts `entry` into the submission queue; false if that is full.
    ///
    /// # Safety
    ///
    /// The memory to which the entry points stays in place until its completion.
    unsafe fn push(&mut self, entry: &Entry) -> bool {
        match (self, entry) {
            // SAFETY: the caller promises that.
            (Uring::Short(uring), Entry::Short(entry)) => unsafe {
                uring.submission().push(entry).is_ok()
            },
            // SAFETY: the caller promises that.
            (Uring::Long(uring), Entry::Short(entry)) => unsafe {
                uring.submission().push(&entry.clone().into()).is_ok()
            },
            // SAFETY: the caller promises that.
            (Uring::Long(uring), Entry::Long(entry)) => unsafe {
                uring.submission().push(entry).is_ok()
            },
            (Uring::Short(_), Entry::Long(_)) => {
                unreachable!("no work with a command was let in")
            }
        }
    }
}

fn set_up<E: squeue::EntryMarker>(
    mut builder: Builder<E>,
    count: u32,
    way: Way,
) -> io::Result<IoUring<E>> {
    builder.setup_cqsize(count * 4).setup_clamp();
    match way {
        Way::Deferred => {
            builder.setup_single_issuer().setup_defer_taskrun();
            builder.setup_taskrun_flag().setup_submit_all();
        }
        Way::Cooperative => {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        Way::Plain => {}
    }
    builder.build(count)
}

/// A place for work in flight.
struct Slot<O> {
    /// Changes with each use, so that a cancellation never hits the next work in the slot.
    stamp: u32,
    /// Later work has a higher number.
    number: u64,
    work: Option<Work<O>>,
}

/// Work that the kernel has completed.
pub(super) struct Ended<O> {
    pub work: Work<O>,
    /// The call's result, or a negative errno.
    pub result: i32,
    /// The accepted connection, if the call was an accept.
    pub connection: Option<OwnedFd>,
}

/// An io_uring and its work in flight.
pub(super) struct Kernel<O> {
    uring: Uring,
    /// How it was set up.
    pub way: Way,
    /// The kernel gets at most this many submissions with one call.
    pub submits_by: u32,
    slots: Vec<Slot<O>>,
    free: Vec<u32>,
    /// The number of the newest work.
    newest: u64,
    /// Completions taken from the queue and not yet passed on.
    arrived: VecDeque<(u64, i32)>,
}

impl<O> Kernel<O> {
    /// An io_uring with space for `count` submissions at a time. Call it on the thread that will
    /// use it.
    pub fn new(count: u32, entries: Entries, ways: &[Way]) -> io::Result<Kernel<O>> {
        let (uring, way) = Uring::new(count, entries, ways)?;
        let params = uring.params();
        // Without these the kernel may drop completions, or cannot wait with a timeout.
        if !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let depth = params.cq_entries() as usize;
        Ok(Kernel {
            uring,
            way,
            submits_by: u32::MAX,
            slots: Vec::with_capacity(depth),
            free: Vec::with_capacity(depth),
            newest: 0,
            arrived: VecDeque::with_capacity(depth),
        })
    }

    /// Completions that the queue can hold.
    pub fn depth(&self) -> usize {
        self.uring.params().cq_entries() as usize
    }

    /// Lets the kernel add to an eventfd whenever a call has ended.
    pub fn signal_to(&self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        self.uring.submitter().register_eventfd(eventfd.as_raw_fd())
    }

    /// How much work is in flight.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The awaited work that was started first, of the work in flight.
    pub fn oldest_awaited(&self) -> Option<&Work<O>> {
        let slots = self.slots.iter().filter_map(|slot| Some((slot.number, slot.work.as_ref()?)));
        slots.filter(|(_, work)| work.is_awaited).min_by_key(|(number, _)| *number).map(|it| it.1)
    }

    /// Puts `work` into the submission queue; goes to the kernel only if that queue is full.
    pub fn start(&mut self, mut work: Work<O>) {
        let entry = match work.call {
            Call::Command(command) => {
                let takes_long = matches!(self.uring, Uring::Long(_));
                assert!(takes_long, "commands go through a ring that was made for them");
                Entry::Long(work.long_entry(command))
            }
            _ => Entry::Short(work.entry()),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { stamp: 0, number: 0, work: None });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.stamp = slot.stamp.wrapping_add(1);
        self.newest += 1;
        slot.number = self.newest;
        slot.work = Some(work);
        let mark = mark(slot, index);
        let entry = match entry {
            Entry::Short(entry) => Entry::Short(entry.user_data(mark)),
            Entry::Long(entry) => Entry::Long(entry.user_data(mark)),
        };
        if let Err(error) = self.push(&entry) {
            give_up(&error);
        }
    }

    /// Asks the kernel to cancel all work of owners that `is_meant`. It completes with ECANCELED,
    /// or with its own result.
    pub fn cancel(&mut self, mut is_meant: impl FnMut(&O) -> bool) -> io::Result<()> {
        self.cancel_work(|work| is_meant(&work.owner))
    }

    fn cancel_work(&mut self, mut is_meant: impl FnMut(&Work<O>) -> bool) -> io::Result<()> {
        let marks = self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let work = slot.work.as_ref()?;
            is_meant(work).then(|| mark(slot, index as u32))
        });
        for mark in marks.collect::<Vec<u64>>() {
            let entry = opcode::AsyncCancel::new(mark).build().user_data(NOBODY);
            self.push(&Entry::Short(entry))?;
        }
        Ok(())
    }

    fn push(&mut self, entry: &Entry) -> io::Result<()> {
        // SAFETY: the entry points into work that lies in a slot (invariants 1 and 3) whose
        // ranges were checked when it was built, or it points to no memory at all.
        while !unsafe { self.uring.push(entry) } {
            self.try_enter(0, None)?;
            self.harvest();
        }
        Ok(())
    }

    /// The next work that ended, and how.
    pub fn next_ended(&mut self) -> Option<Ended<O>> {
        loop {
            let (mark, result) = self.arrived.pop_front()?;
            if mark == NOBODY {
                continue;
            }
            let index = mark as u32;
            let slot = &mut self.slots[index as usize];
            assert_eq!(slot.stamp, (mark >> 32) as u32, "a completion meets its own work");
            let work = slot.work.take().expect("work stays in its slot until it completes");
            self.free.push(index);
            let is_connection = work.call == Call::Accept && result >= 0;
            // SAFETY: the kernel opened this descriptor for us alone; its completion was taken from
            // the queue, and is taken once.
            let connection = is_connection.then(|| unsafe { OwnedFd::from_raw_fd(result) });
            return Some(Ended { work, result, connection });
        }
    }

    /// Takes completions out of the completion queue, without entering the kernel.
    pub fn harvest(&mut self) {
        let completed = |entry: cqueue::Entry| (entry.user_data(), entry.result());
        self.arrived.extend(self.uring.completion().map(completed));
    }

    /// Submits, if there is an entry to submit or the kernel has work to finish.
    pub fn submit(&mut self) {
        if self.uring.is_entry_due() {
            self.enter(0, None);
        }
        self.harvest();
    }

    /// Submits and waits until a call has completed, `timeout` has passed, or a signal arrived.
    pub fn submit_and_wait(&mut self, timeout: Option<Duration>) {
        self.enter(1, timeout);
        self.harvest();
    }

    fn enter(&mut self, want: usize, timeout: Option<Duration>) {
        if let Err(error) = self.try_enter(want, timeout) {
            give_up(&error);
        }
    }

    fn try_enter(&mut self, want: usize, timeout: Option<Duration>) -> io::Result<()> {
        while self.uring.pending() > self.submits_by as usize {
            let submitter = self.uring.submitter();
            // SAFETY: the entries were put into the queue by `push`, under its promise; the call
            // names no memory.
            let result = unsafe { submitter.enter::<libc::sigset_t>(self.submits_by, 0, 0, None) };
            // The last call says why the kernel refuses.
            if !matches!(result, Ok(1..)) {
                break;
            }
        }
        let submitter = self.uring.submitter();
        let result = match timeout {
            Some(timeout) if want > 0 => {
                let timeout = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&timeout);
                submitter.submit_with_args(want, &args)
            }
            _ => submitter.submit_and_wait(want),
        };
        match result {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // A timeout, a signal, completions that must be taken first, or a short lack of
                // memory.
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Cancels work where possible, and waits for the rest. False if some work stays in flight.
    fn drain(&mut self) -> bool {
        let started = Instant::now();
        if self.cancel_work(|work| !work.is_awaited).is_err() {
            return false;
        }
        while self.in_flight() > 0 {
            self.harvest();
            while self.next_ended().is_some() {}
            let is_late = started.elapsed() > DRAIN_MAX;
            let pause = Some(Duration::from_millis(100));
            if self.in_flight() > 0 && (is_late || self.try_enter(1, pause).is_err()) {
                return false;
            }
        }
        true
    }
}

impl<O> Drop for Kernel<O> {
    fn drop(&mut self) {
        if !self.drain() {
            // Invariant 5. The slots' files stay open too, which is as harmless.
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}

impl<O> std::fmt::Debug for Kernel<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({} in flight)", self.in_flight())
    }
}

/// Only bugs lead here, never input: a wrong thread, a wrong argument.
fn give_up(error: &io::Error) -> ! {
    panic!("entering the io_uring of this thread failed: {error}");
}

/// A number that identifies the completion of a slot's present work.
fn mark<O>(slot: &Slot<O>, index: u32) -> u64 {
    u64::from(slot.stamp) << 32 | u64::from(index)
}
