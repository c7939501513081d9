//! The role of a thread that serves one queue of a disk.
//!
//! 1. For each tag, either a command is outstanding or the server holds its request. One turn does
//!    all available work: it starts new requests and answers finished bios. All answers go to the
//!    kernel in the system call in which the thread then waits.
//! 2. This thread copies data between the pages of the request and a bio's buffer, through the
//!    device's file. The kernel accesses only memory that a call hands to it. Where the driver may
//!    copy from any memory of the process, a read hit needs no buffer. Data in memory that the
//!    client shares needs no call: the thread copies it there, only once if the request allows it.
//! 3. A queue ends when the driver has taken back all tags. A stopping queue answers its requests
//!    in bounded time, so that the driver can take their tags back.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use udm::bio::{Bio, Op};
use udm::buffer::{Buffer, BufferPool, CLIENT_POOL_BYTES_MAX};
use udm::device::Driver;
use udm::error::{Error, Result};
use udm::pmem::client_memory::Shown;
use udm::pmem::copy_target::FilePart;
use udm::queue::{Core, Role, Turn, now};
use udm::ring::{Command, Event};
use udm::sync::Arc;
use udm::units::{Nanos, SECOND};

use super::Shared;
use super::counts::Counts;
use super::memory::Known;
use super::proto::{DEPTH_MAX_OF_KERNEL, DESCRIPTION_BYTES, Description, Wish, data_offset};
use super::requests::{Requests, held_bytes};
use crate::budget::{BUDGET, Share};

/// Maximum bytes of a queue's requests in flight; a single request may exceed it.
pub const HELD_BYTES_MAX: u64 = 16 << 20;
/// Maximum time that a stopping queue waits for requests.
const STOP_SECONDS_MAX: u64 = 20;
/// The same, if all requests wait for free space or for resume.
const PARKED_SECONDS_MAX: u64 = 2;
/// Time between two checks for slow requests, while any is in flight.
const LOOK_NS: Nanos = SECOND;
/// Time between two attempts to get memory that other clients hold.
const STARVED_LOOK_NS: Nanos = SECOND / 100;

/// The answer to a failed request.
const FAILED: i32 = -Errno::IO.raw_os_error();

/// Whether a request was started or answered.
enum Begun {
    Yes,
    /// It waits for memory of this queue's other requests.
    AfterAnother,
    /// It waits for memory that other clients hold.
    Starved,
}

/// One queue.
pub struct Worker {
    driver: Driver,
    file: Arc<OwnedFd>,
    descriptions: Shown,
    queue: u16,
    requests: Requests,
    share: Share,
    shared: Arc<Shared>,
    look_at: Option<Nanos>,
    stopping_since: Option<Nanos>,
    /// The driver's error, if it refused a command.
    failure: Option<std::io::Error>,
}

impl Worker {
    /// Starts fetching requests of `queue`. Call this on the thread that serves the queue.
    pub fn start(
        core: &mut Core<u16>,
        shared: Arc<Shared>,
        file: Arc<OwnedFd>,
        queue: u16,
        depth: u16,
    ) -> Result<Worker> {
        let mut worker = Worker::new(core, shared, file, queue, depth)?;
        for tag in 0..depth {
            let fetch = Command::ublk_fetch(queue, tag);
            core.submissions().command(&worker.file, fetch, Buffer::empty(), tag);
        }
        core.ring_mut().submit_and_wait(Some(Duration::ZERO));
        while let Some(event) = core.submissions().pop_event() {
            worker.event(event, core);
        }
        match worker.failure.take() {
            None => Ok(worker),
            Some(source) => Err(Error::from_io("fetching requests of", "a ublk queue", source)),
        }
    }

    /// A queue without requests, which fetches none.
    fn new(
        core: &mut Core<u16>,
        shared: Arc<Shared>,
        file: Arc<OwnedFd>,
        queue: u16,
        depth: u16,
    ) -> Result<Worker> {
        let page_bytes = rustix::param::page_size();
        let apart = (DEPTH_MAX_OF_KERNEL * DESCRIPTION_BYTES).next_multiple_of(page_bytes);
        let at = u64::from(queue) * apart as u64;
        let descriptions = Shown::map(&file, at, usize::from(depth) * DESCRIPTION_BYTES)?;
        let mut driver = core.driver(&shared.device)?;
        driver.pool().keep_at_most(CLIENT_POOL_BYTES_MAX);
        Ok(Worker {
            driver,
            file,
            descriptions,
            queue,
            requests: Requests::new(depth),
            share: Share::of(&BUDGET),
            shared,
            look_at: None,
            stopping_since: None,
            failure: None,
        })
    }

    fn describe(&self, tag: u16) -> Description {
        let at = usize::from(tag) * DESCRIPTION_BYTES;
        Description {
            op_flags: self.descriptions.u32_at(at),
            sectors: self.descriptions.u32_at(at + 4),
            start_sector: self.descriptions.u64_at(at + 8),
            address: self.descriptions.u64_at(at + 16),
        }
    }

    /// Starts requests while there are any and memory for them. Returns whether to try again soon.
    fn begin_all(&mut self, core: &mut Core<u16>) -> bool {
        while let Some(tag) = self.requests.next() {
            match self.begin(core, tag, &self.describe(tag)) {
                Begun::Yes => {}
                Begun::AfterAnother => return false,
                Begun::Starved => return true,
            }
        }
        false
    }

    /// Starts or answers the oldest request, which has this description.
    fn begin(&mut self, core: &mut Core<u16>, tag: u16, description: &Description) -> Begun {
        let wish = match self.wish(description) {
            Ok(wish) => wish,
            Err(errno) => {
                self.shared.counts.was_wrong(description);
                return self.answer_at_once(core, tag, -errno.raw_os_error());
            }
        };
        if self.copy_in_place(tag, &wish) {
            return self.answer_at_once(core, tag, wish.len as i32);
        }
        let held = self.requests.held_bytes() + held_bytes(&wish);
        if self.requests.in_flight() > 0 && held > HELD_BYTES_MAX {
            return Begun::AfterAnother;
        }
        if !self.share.grow(held as usize) {
            return Begun::Starved;
        }
        let Some(mut buffer) = self.driver.pool().try_take(held_bytes(&wish) as usize) else {
            return self.answer_at_once(core, tag, FAILED);
        };
        if wish.op == Op::Write && !self.copy_in(tag, &wish, &mut buffer) {
            return self.answer_at_once(core, tag, FAILED);
        }
        let token = self.requests.begin(wish);
        let mut bio = match wish.op {
            Op::Read => Bio::read(wish.offset, buffer, token),
            Op::Write => Bio::write(wish.offset, buffer, wish.fua, token),
            Op::Flush => Bio::flush(token),
            Op::Discard | Op::WriteZeroes => {
                Bio::bare(wish.op, wish.offset, wish.len, wish.fua, token)
            }
        };
        bio.is_metadata = wish.is_metadata;
        self.driver.bios.push_back(bio);
        Begun::Yes
    }

    fn answer_at_once(&mut self, core: &mut Core<u16>, tag: u16, result: i32) -> Begun {
        self.requests.answer_at_once();
        self.answer(core, tag, result);
        Begun::Yes
    }

    /// Decodes a request, and locates its data.
    fn wish(&self, description: &Description) -> std::result::Result<Wish, Errno> {
        let mut wish = description.wish()?;
        let has_data = matches!(wish.op, Op::Read | Op::Write);
        if let (Some(said), Some(known), true) =
            (description.memory(), self.shared.memory.get(), has_data)
        {
            wish.shared_at = known.place(said, &wish).ok_or(Errno::IO)?;
        }
        Ok(wish)
    }

    /// Copies a request's data once, if the copy completes the request. Returns false if it needs a
    /// bio, which transfers all the data again.
    fn copy_in_place(&mut self, tag: u16, wish: &Wish) -> bool {
        let (Some(at), Some(known)) = (wish.shared_at, self.shared.memory.get()) else {
            return self.read_in_place(tag, wish);
        };
        let intake = self.driver.intake();
        let is_copied = match wish.op {
            Op::Read => {
                let is_read = intake.read_into(wish.offset, known.sink(at, wish.len).into());
                is_read && !known.memory.is_lost()
            }
            Op::Write => intake.write_from(wish.offset, known.source(at, wish.len), wish.fua),
            Op::Flush | Op::Discard | Op::WriteZeroes => false,
        };
        if is_copied {
            self.shared.counts.was_shared();
        }
        is_copied
    }

    /// Lets the driver copy cached data of a read straight from the device's memory. Returns false
    /// if the read needs a bio, which transfers all the data again.
    fn read_in_place(&mut self, tag: u16, wish: &Wish) -> bool {
        if wish.op != Op::Read || !self.shared.copies_by_address {
            return false;
        }
        let into = FilePart::new(&self.file, data_offset(self.queue, tag), wish.len as usize);
        let is_read = self.driver.intake().read_into(wish.offset, into.into());
        if is_read {
            self.shared.counts.was_read_in_place();
        }
        is_read
    }

    /// Copies the data of a write from its client. Returns false if that fails.
    fn copy_in(&self, tag: u16, wish: &Wish, buffer: &mut Buffer) -> bool {
        if let (Some(at), Some(known)) = (wish.shared_at, self.shared.memory.get())
            && known.load(at, buffer.as_mut_slice())
        {
            self.shared.counts.was_shared();
            return true;
        }
        let (mut at, len) = (0, buffer.len());
        while at < len {
            let offset = data_offset(self.queue, tag) + at as u64;
            match rustix::io::pread(&*self.file, &mut buffer.as_mut_slice()[at..], offset) {
                Ok(count) if count > 0 => at += count,
                _ => return false,
            }
        }
        true
    }

    /// Runs the device's work, and answers finished bios.
    fn pump(&mut self, core: &mut Core<u16>) -> bool {
        let (requests, file, queue) = (&mut self.requests, &*self.file, self.queue);
        let (memory, counts) = (self.shared.memory.get(), &self.shared.counts);
        let mut answers = Vec::new();
        let finish = |mut bio: Bio, _: &mut _, pool: &mut BufferPool| {
            if let Some((tag, wish)) = requests.end(bio.token) {
                let data = wish.len as i32;
                let is_given = || {
                    store_shared(memory, counts, &wish, &bio.buffer)
                        || copy_out(file, queue, tag, &bio.buffer)
                };
                let result = match (bio.status, wish.op) {
                    (Err(status), _) => -status.errno(),
                    (Ok(()), Op::Read) if !is_given() => FAILED,
                    (Ok(()), Op::Read | Op::Write) => data,
                    (Ok(()), Op::Flush | Op::Discard | Op::WriteZeroes) => 0,
                };
                answers.push((tag, result));
            }
            pool.put(std::mem::replace(&mut bio.buffer, Buffer::empty()));
        };
        let has_progress = self.driver.pump(core.ring_mut(), finish);
        self.share.shrink(self.requests.held_bytes() as usize);
        for (tag, result) in answers {
            self.answer(core, tag, result);
        }
        has_progress
    }

    fn answer(&self, core: &mut Core<u16>, tag: u16, result: i32) {
        self.shared.counts.was_answered(result);
        let answer = Command::ublk_answer(self.queue, tag, result);
        core.submissions().command(&self.file, answer, Buffer::empty(), tag);
    }

    /// Checks for slow requests if it is time, and returns the time of the next check.
    fn look_for_slow(&mut self, core: &Core<u16>) -> Option<Nanos> {
        if !self.requests.may_be_slow() {
            self.look_at = None;
            return None;
        }
        let now = now();
        let look_at = *self.look_at.get_or_insert(now + LOOK_NS);
        if now >= look_at || self.requests.in_flight() == 0 {
            self.look_at = Some(now + LOOK_NS);
            if let Some(slow) = self.requests.slow(now) {
                self.driver.report_slow(&slow, core.ring());
            }
        }
        self.look_at
    }

    /// Returns the time until which a stopping queue waits for its requests. After it, they are
    /// answered with an error.
    fn stop_deadline(&mut self, core: &mut Core<u16>) -> Option<Nanos> {
        let since = *self.stopping_since.get_or_insert_with(now);
        if self.requests.here() == 0 {
            return None;
        }
        let is_parked = self.driver.is_all_parked();
        let seconds = if is_parked { PARKED_SECONDS_MAX } else { STOP_SECONDS_MAX };
        let deadline = since + seconds * SECOND;
        if now() < deadline {
            return Some(deadline);
        }
        for tag in self.requests.abandon() {
            self.answer(core, tag, FAILED);
        }
        None
    }
}

/// Stores the data of a read into memory that the client shares. Returns false if that fails.
fn store_shared(memory: Option<&Known>, counts: &Counts, wish: &Wish, buffer: &Buffer) -> bool {
    let (Some(at), Some(known)) = (wish.shared_at, memory) else { return false };
    let is_stored = known.store(at, buffer.as_slice());
    if is_stored {
        counts.was_shared();
    }
    is_stored
}

/// Copies the data of a read to its client. Returns false if the driver refuses it.
fn copy_out(file: &OwnedFd, queue: u16, tag: u16, buffer: &Buffer) -> bool {
    let (mut at, bytes) = (0, buffer.as_slice());
    while at < bytes.len() {
        match rustix::io::pwrite(file, &bytes[at..], data_offset(queue, tag) + at as u64) {
            Ok(count) if count > 0 => at += count,
            _ => return false,
        }
    }
    true
}

impl Role for Worker {
    /// The tag of a request.
    type Tag = u16;

    fn event(&mut self, event: Event<u16>, _core: &mut Core<u16>) {
        let is_wanted_back =
            |error: &std::io::Error| Errno::from_io_error(error) == Some(Errno::NODEV);
        self.requests.came(event.tag, event.result.is_ok());
        if let Err(error) = event.result
            && !is_wanted_back(&error)
        {
            self.failure.get_or_insert(error);
        }
    }

    fn turn(&mut self, core: &mut Core<u16>, is_stopping: bool) -> Turn {
        self.pump(core);
        let is_starved = self.begin_all(core);
        let has_progress = self.pump(core);
        let mut deadline = self.look_for_slow(core);
        if is_stopping {
            let stop = self.stop_deadline(core);
            deadline = deadline.into_iter().chain(stop).min();
        }
        if self.requests.is_over() || self.shared.is_given_up() {
            return Turn::Over;
        }
        if is_starved {
            deadline = Some(now() + STARVED_LOOK_NS);
        } else if has_progress && self.requests.next().is_some() {
            // This turn has freed memory for them.
            return Turn::Again;
        }
        Turn::Idle(deadline)
    }

    fn leave(self, core: &mut Core<u16>) {
        self.driver.report_slow(&[], core.ring());
        core.leave(self.driver);
        self.shared.counts.queue_has_ended(self.failure.as_ref());
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
