//! One thread's connection to the kernel: an io_uring, and the jobs that use it.
//!
//! A ring runs any `Job`. A job makes one call to the kernel after the other and at the end returns
//! a `D`, which the loop that owns the ring takes out with [`Ring::pop_completed`]. For disks `D`
//! is their I/O; the ring does not know its users. The loop itself makes calls on sockets and the
//! like through a [`SubmissionQueue`], and gets the results from it. Users need no `unsafe`: the
//! ring owns their jobs and memory until it returns them.
//!
//! 1. Each job is returned exactly once, unless the ring is dropped first.
//! 2. A ring with a kernel is used by the thread that made it; the kernel refuses other threads,
//!    and the ring panics then. Other threads reach it through its [`Mailbox`].
//! 3. At most [`Ring::awaited_max`] awaited jobs are in the kernel; further ones wait here in
//!    order. Their callers bound the number of waiting jobs. Jobs that are not awaited, and
//!    requests of the submission queue, do not wait for them.
//! 4. A dropped ring waits for awaited jobs, and cancels the others.

mod command;
mod give_way;
mod kernel;
mod mailbox;
mod notifier;
mod submission;
#[cfg(test)]
mod tests;
mod way;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub(crate) use command::ublk_memory;
pub use command::{Command, UBLK_MEMORY_BYTES, UblkControl};
pub(crate) use give_way::give_way;
pub(crate) use kernel::{CALL_BYTES_MAX, Call, Memory};
pub use mailbox::{Mailbox, RemoteJob};
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use notifier::schedules;
pub use submission::{Event, SEND_BUFFERS_MAX, SubmissionQueue};
pub(crate) use way::WAYS;
#[cfg(test)]
pub(crate) use way::Way;

use crate::error::{Error, Result};
use crate::sync::statics::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Weak};
use kernel::{Ended, Entries, Kernel, Message};

/// Numbers of rings.
static RINGS: AtomicU64 = AtomicU64::new(0);

/// All rings that exist have lower numbers.
pub(crate) fn number_of_the_next() -> u64 {
    RINGS.load(Ordering::Relaxed)
}

/// A call that a job wants next, and the job.
pub(crate) type Work<D> = kernel::Work<Box<dyn Job<D>>>;

/// Work that needs calls to the kernel, one at a time.
pub(crate) trait Job<D>: Send + std::fmt::Debug {
    /// The job's `call` has ended with `result` (negative: an errno). Returns the next call. A job
    /// that has finished passes its result to `ring`, and returns no call.
    fn ended(
        self: Box<Self>,
        call: Call,
        memory: Memory,
        result: i32,
        ring: &mut Ring<D>,
    ) -> Option<Work<D>>;

    /// The value that the job passes to the ring in the end.
    fn value(&self) -> &D;
}

/// Where the end of a call is reported.
#[derive(Debug)]
enum Owner<D> {
    /// A job.
    Job(Box<dyn Job<D>>),
    /// The submission queue.
    Submission(submission::Asked),
    /// The mailbox: an outcome or a wake has arrived.
    Mailbox,
}

/// One thread's window to the kernel.
#[derive(Debug)]
pub struct Ring<D> {
    /// Unique in this process over all rings, past and present; later rings have higher numbers.
    id: u64,
    /// Others see by it that the ring is gone.
    life: Arc<()>,
    completed: VecDeque<D>,
    waiting: VecDeque<Work<D>>,
    /// Awaited jobs with the kernel.
    awaited: usize,
    /// Ended requests of the submission queue.
    events: VecDeque<Event<u32>>,
    /// Headers of sends that are over, for the next ones.
    #[expect(clippy::vec_box, reason = "the kernel knows a header by its address")]
    messages: Vec<Box<Message>>,
    mailbox: Option<Arc<Mailbox<D>>>,
    /// Whether the kernel watches the mailbox.
    is_watched: bool,
    /// Remote jobs that have not returned.
    remote_jobs: usize,
    kernel: Option<Kernel<Owner<D>>>,
}

impl<D> Ring<D> {
    /// A ring with space for `entries` (a power of two) submissions at a time. Call it on the
    /// thread that will use the ring.
    pub fn new(entries: u32) -> Result<Ring<D>> {
        Ring::with_entries(entries, Entries::Short)
    }

    /// As [`Ring::new`], but the ring also takes commands ([`SubmissionQueue::command`]), whose
    /// submissions are twice as long.
    pub fn with_commands(entries: u32) -> Result<Ring<D>> {
        Ring::with_entries(entries, Entries::Long)
    }

    fn with_entries(count: u32, entries: Entries) -> Result<Ring<D>> {
        let kernel = Kernel::new(count, entries, &WAYS).map_err(|source| {
            Error::from_io("setting up", "io_uring (Linux 5.11 or later, and permitted)", source)
        })?;
        Ok(Ring { kernel: Some(kernel), ..Ring::without_kernel() })
    }

    /// As [`Ring::new`] works on an older kernel.
    #[cfg(test)]
    pub(crate) fn in_way(entries: u32, way: Way) -> Ring<D> {
        let kernel = Kernel::new(entries, Entries::Short, &[way]).unwrap();
        Ring { kernel: Some(kernel), ..Ring::without_kernel() }
    }

    /// A ring for I/O that completes without the kernel, such as I/O of disks in memory. It panics
    /// if it is used for files, block devices or sockets.
    pub fn without_kernel() -> Ring<D> {
        Ring {
            id: RINGS.fetch_add(1, Ordering::Relaxed),
            life: Arc::new(()),
            completed: VecDeque::new(),
            waiting: VecDeque::new(),
            awaited: 0,
            events: VecDeque::new(),
            messages: Vec::new(),
            mailbox: None,
            is_watched: false,
            remote_jobs: 0,
            kernel: None,
        }
    }

    /// From now on the kernel gets at most `count` submissions with one call, for a thread that
    /// others should be able to interrupt: the kernel may not give a processor to another thread
    /// during a call.
    pub(crate) fn submit_by(&mut self, count: u32) {
        if let Some(kernel) = &mut self.kernel {
            kernel.submits_by = count;
        }
    }

    /// How the kernel serves it, in words.
    pub fn way(&self) -> &'static str {
        self.kernel.as_ref().map_or("without the kernel", |kernel| kernel.way.words())
    }

    /// Hands back what is complete.
    pub fn complete(&mut self, done: D) {
        self.completed.push_back(done);
    }

    /// The next value that was handed back.
    pub fn pop_completed(&mut self) -> Option<D> {
        self.completed.pop_front()
    }

    /// Whether [`Ring::pop_completed`] or [`SubmissionQueue::pop_event`] has a result.
    pub fn has_ended(&self) -> bool {
        !self.completed.is_empty() || !self.events.is_empty()
    }

    /// Lets the kernel add to `eventfd` whenever a call has ended.
    pub fn signal_to(&self, eventfd: BorrowedFd<'_>) -> Result<()> {
        let Some(kernel) = &self.kernel else { return Ok(()) };
        kernel
            .signal_to(eventfd)
            .map_err(|source| Error::from_io("giving", "an eventfd to io_uring", source))
    }

    /// The number of jobs, remote jobs and requests of the submission queue that have not ended.
    pub fn in_flight(&self) -> usize {
        let with_kernel = self.kernel.as_ref().map_or(0, Kernel::in_flight);
        self.waiting.len() + self.remote_jobs + with_kernel - usize::from(self.is_watched)
    }

    /// The awaited part of [`Ring::in_flight`]: remote jobs, and jobs except those that run by
    /// themselves.
    pub fn awaited(&self) -> usize {
        self.waiting.len() + self.remote_jobs + self.awaited
    }

    /// The value of the awaited job in the kernel that was started first. If a device below does
    /// not answer, this job is most likely one of its jobs.
    pub fn oldest(&self) -> Option<&D> {
        match &self.kernel.as_ref()?.oldest_awaited()?.owner {
            Owner::Job(job) => Some(job.value()),
            Owner::Submission(_) | Owner::Mailbox => None,
        }
    }

    /// Most awaited jobs that are with the kernel at a time.
    pub fn awaited_max(&self) -> usize {
        self.kernel.as_ref().map_or(0, |kernel| kernel.depth() / 2)
    }

    /// Lets the kernel start the new calls, and takes the results of ended ones, without waiting.
    pub fn submit(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.submit();
            self.take_ended();
        }
    }

    /// As [`Ring::submit`]. If no call has ended, it then waits until one ends, `timeout` has
    /// passed, or a signal arrives. May return early. Returns immediately if no call is in flight
    /// and `timeout` is `None`, or if the ring works without a kernel.
    pub fn submit_and_wait(&mut self, timeout: Option<Duration>) {
        let Some(kernel) = &mut self.kernel else { return };
        kernel.harvest();
        self.take_ended();
        let is_pointless = timeout.is_none() && self.in_flight() == 0 && !self.is_watched;
        if self.has_ended() || is_pointless || timeout == Some(Duration::ZERO) {
            return self.submit();
        }
        self.kernel().submit_and_wait(timeout);
        self.take_ended();
    }

    /// Tells this ring from all others, for disks that hold I/O.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Has no owner once the ring is gone.
    pub(crate) fn life(&self) -> Weak<()> {
        Arc::downgrade(&self.life)
    }

    /// Starts a job's first call, or queues it.
    pub(crate) fn start(&mut self, work: Work<D>) {
        if !work.is_awaited {
            self.kernel().start(work.owned_by(Owner::Job));
        } else if self.awaited < self.awaited_max() {
            self.awaited += 1;
            self.kernel().start(work.owned_by(Owner::Job));
        } else {
            self.kernel();
            self.waiting.push_back(work);
        }
    }

    fn kernel(&mut self) -> &mut Kernel<Owner<D>> {
        self.kernel.as_mut().expect("files and sockets are used through a ring with a kernel")
    }

    /// Hands what the kernel has ended to its owners.
    fn take_ended(&mut self) {
        while let Some(ended) = self.kernel().next_ended() {
            let Ended { work, result, connection } = ended;
            let kernel::Work { file, call, memory, owner, is_awaited } = work;
            match owner {
                Owner::Job(job) => match job.ended(call, memory, result, self) {
                    Some(work) => {
                        assert_eq!(work.is_awaited, is_awaited, "a job stays what it is");
                        self.kernel().start(work.owned_by(Owner::Job));
                    }
                    None if is_awaited => self.next_waiting(),
                    None => {}
                },
                Owner::Submission(owner) => {
                    let work = kernel::Work { file, call, memory, owner, is_awaited };
                    self.end_asked(work, result, connection);
                }
                Owner::Mailbox => self.empty_mailbox(),
            }
        }
    }

    /// An awaited job has ended: starts the next waiting one.
    fn next_waiting(&mut self) {
        match self.waiting.pop_front() {
            Some(work) => self.kernel().start(work.owned_by(Owner::Job)),
            None => self.awaited -= 1,
        }
    }
}
