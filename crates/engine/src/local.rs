//! The in-process caller: reads and writes of a device on the calling thread.
//!
//! A [`Local`] owns a driver and a ring, runs both and, if asked to, does the device's background
//! work. One `Local` is used by one thread; each thread that wants to do I/O makes its own. A
//! request that a target answers from memory takes no system call and, once warm, no allocation.

mod notifier;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::bio::{Bio, Op};
use crate::buffer::BufferPool;
use crate::device::{Device, Driver};
use crate::disk::Ring;
use crate::error::{Result, Status};
use crate::mutants::{self, Mutant};
use crate::queue::now;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Mutex, OnceLock, lock};
use crate::target::Wake;
use crate::units::{BIO_BYTES_MAX, Nanos};
use notifier::Notifier;

/// The token of the request that a blocking call waits for.
const BLOCKING: u64 = u64::MAX;

/// The time, for a [`Local`] that does background work.
pub trait Clock: Send {
    /// Now.
    fn now(&mut self) -> Nanos;

    /// No event can happen before `until`. A simulated clock advances to it and returns true; a
    /// real one returns false, and the caller waits.
    fn skip_to(&mut self, until: Nanos) -> bool;
}

/// The system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&mut self) -> Nanos {
        now()
    }

    fn skip_to(&mut self, _until: Nanos) -> bool {
        false
    }
}

/// A clock that only the caller advances. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Lets `nanos` pass.
    pub fn advance(&self, nanos: Nanos) {
        self.0.fetch_add(nanos, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&mut self) -> Nanos {
        self.0.load(Ordering::SeqCst)
    }

    fn skip_to(&mut self, until: Nanos) -> bool {
        self.0.fetch_max(until, Ordering::SeqCst);
        true
    }
}

/// A device to read and write from this thread.
pub struct Local {
    ring: Ring,
    wake: Arc<Parker>,
    background: Option<Background>,
    // Dropped last: it gives the port up when all of the port's requests are gone.
    driver: Driver,
}

/// The device's background work, if this caller does it.
struct Background {
    clock: Box<dyn Clock>,
    signal: Arc<Signal>,
    next: Option<Nanos>,
}

impl Local {
    /// A caller with an io_uring for files and block devices. Make it on the thread that uses it.
    pub fn new(device: &Arc<Device>) -> Result<Local> {
        Local::with_ring(device, Ring::new(64)?)
    }

    /// A caller for devices whose disks need no kernel: RAM and simulated ones.
    pub fn without_kernel(device: &Arc<Device>) -> Result<Local> {
        Local::with_ring(device, Ring::without_kernel())
    }

    /// A caller that uses `ring`.
    pub fn with_ring(device: &Arc<Device>, ring: Ring) -> Result<Local> {
        let wake = Arc::new(Parker::default());
        let driver = Driver::new(device, wake.clone())?;
        Ok(Local { ring, wake, background: None, driver })
    }

    /// Makes this caller also do the device's background work, by `clock`, whenever it is called. A
    /// device has one such caller or queue at a time.
    pub fn with_background(mut self, clock: impl Clock + 'static) -> Local {
        let wake = self.wake.clone();
        let signal = Arc::new(Signal { has_work: AtomicBool::new(true), wake });
        self.driver.device().events().set_background(Some(signal.clone()));
        self.background = Some(Background { clock: Box::new(clock), signal, next: None });
        self
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.driver.device()
    }

    /// Its driver.
    #[cfg(test)]
    pub(crate) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Its driver.
    #[cfg(test)]
    pub(crate) fn driver_mut(&mut self) -> &mut Driver {
        &mut self.driver
    }

    /// The number of its port.
    pub fn port_id(&self) -> usize {
        self.driver.port().id
    }

    /// Memory for bios: put the buffer of a finished bio back into this pool.
    pub fn pool(&mut self) -> &mut BufferPool {
        self.driver.pool()
    }

    /// The ring, for simulators that complete I/O themselves.
    pub fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// Bios that were submitted and have not come out of `poll` or `wait`.
    pub fn in_flight(&self) -> usize {
        self.driver.in_flight()
    }

    /// Bios that wait for room, or for the device to be resumed.
    pub fn parked(&self) -> usize {
        self.driver.port().parked.len()
    }

    /// Reads `into.len()` bytes.
    pub fn read_at(&mut self, into: &mut [u8], offset: u64) -> std::result::Result<(), Status> {
        let mut at = offset;
        for part in into.chunks_mut(BIO_BYTES_MAX as usize) {
            let buffer = self.driver.pool().take(part.len());
            let bio = self.carry_out(Bio::read(at, buffer, BLOCKING));
            if bio.status.is_ok() {
                part.copy_from_slice(bio.buffer.as_slice());
            }
            self.driver.pool().put(bio.buffer);
            bio.status?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Writes `bytes`; with `fua` they are durable when this returns.
    pub fn write_at(
        &mut self,
        bytes: &[u8],
        offset: u64,
        fua: bool,
    ) -> std::result::Result<(), Status> {
        let mut at = offset;
        for part in bytes.chunks(BIO_BYTES_MAX as usize) {
            let mut buffer = self.driver.pool().take(part.len());
            buffer.as_mut_slice().copy_from_slice(part);
            let bio = self.carry_out(Bio::write(at, buffer, fua, BLOCKING));
            self.driver.pool().put(bio.buffer);
            bio.status?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Makes all that was written durable.
    pub fn flush(&mut self) -> std::result::Result<(), Status> {
        self.carry_out(Bio::flush(BLOCKING)).status
    }

    /// Discards a range.
    pub fn discard(&mut self, offset: u64, len: u64) -> std::result::Result<(), Status> {
        self.bare(Op::Discard, offset, len, false)
    }

    /// Makes a range read as zeroes.
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        len: u64,
        fua: bool,
    ) -> std::result::Result<(), Status> {
        self.bare(Op::WriteZeroes, offset, len, fua)
    }

    fn bare(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        fua: bool,
    ) -> std::result::Result<(), Status> {
        let mut done = 0;
        while done < len {
            let part = (len - done).min(BIO_BYTES_MAX);
            let at = offset.checked_add(done).ok_or(Status::Invalid)?;
            self.carry_out(Bio::bare(op, at, part, fua, BLOCKING)).status?;
            done += part;
        }
        Ok(())
    }

    /// Starts `bio`, whose token is not `u64::MAX`; `poll` or `wait` returns it.
    #[inline]
    pub fn submit(&mut self, bio: Bio) {
        assert_ne!(bio.token, BLOCKING, "this token is the blocking calls' own");
        self.start(bio);
        if self.wake.notifier.get().is_some() {
            self.ring_if_done();
        }
    }

    /// Notifies a program that waits next. The kernel's completions and wake-ups notify the program
    /// by themselves; this covers requests that are done already.
    fn ring_if_done(&mut self) {
        self.turn();
        if let Some(notifier) = self.wake.notifier.get()
            && !self.driver.port().done.is_empty()
        {
            notifier.ring();
        }
    }

    /// Does what can be done without waiting; returns a finished bio, if there is one.
    pub fn poll(&mut self) -> Option<Bio> {
        if self.driver.port().done.is_empty() {
            if let Some(notifier) = self.wake.notifier.get() {
                notifier.answer();
            }
            self.turn();
        }
        self.driver.pop_done()
    }

    /// A file descriptor for a program's own event loop: it is readable while `poll` may have
    /// something to do, and until `poll` has returned `None`. The program must not read from it.
    /// From the first call on, a request that is answered within `submit` costs a system call.
    pub fn fd(&mut self) -> Result<BorrowedFd<'_>> {
        if self.wake.notifier.get().is_none() {
            let notifier = Notifier::new(&self.ring)?;
            self.wake.notifier.get_or_init(|| notifier);
            self.ring_if_done();
        }
        Ok(self.wake.notifier.get().expect("it was just made").fd())
    }

    /// As [`Local::wait`], but gives up at `deadline`, in the queues' time.
    pub fn wait_until(&mut self, deadline: Nanos) -> Option<Bio> {
        while self.in_flight() > 0 {
            if let Some(bio) = self.poll() {
                return Some(bio);
            }
            let left = deadline.checked_sub(now()).filter(|left| *left > 0)?;
            self.rest_at_most(Duration::from_nanos(left));
        }
        None
    }

    /// Waits for a finished bio; `None` if none is in flight. Waits indefinitely if all bios are
    /// parked and no space is freed.
    pub fn wait(&mut self) -> Option<Bio> {
        while self.in_flight() > 0 {
            if let Some(bio) = self.poll() {
                return Some(bio);
            }
            self.rest();
        }
        None
    }

    /// Does everything that can be done without waiting: starts I/O, takes completions, retries
    /// parked bios, ticks. Returns whether anything changed.
    pub fn turn(&mut self) -> bool {
        let mut has_moved = false;
        loop {
            let mut goes_on = self.tick_if_asked();
            goes_on |= self.driver.retry_parked();
            goes_on |= self.move_io();
            if !goes_on {
                return has_moved;
            }
            has_moved = true;
        }
    }

    /// Suspends the device, driving this caller's part. Other callers and queues drive theirs.
    pub fn suspend(&mut self) -> Result<()> {
        let device = self.driver.device().clone();
        device.begin_suspend()?;
        while !device.finish_suspend()? {
            if !self.turn() {
                self.rest_at_most(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    #[inline]
    fn start(&mut self, bio: Bio) {
        self.driver.submit(bio);
        if !self.driver.port().ios.is_empty() {
            self.move_io();
        }
    }

    fn carry_out(&mut self, bio: Bio) -> Bio {
        self.start(bio);
        loop {
            // Usually it is there already, as the newest.
            if let Some(bio) = self.driver.take_done(BLOCKING) {
                self.tick_if_asked();
                return bio;
            }
            if !self.turn() {
                self.rest();
            }
        }
    }

    fn move_io(&mut self) -> bool {
        let has_started = self.driver.start_ios(&mut self.ring);
        if self.ring.in_flight() > 0 {
            self.ring.submit();
        }
        self.driver.take_completed(&mut self.ring) || has_started
    }

    fn tick_if_asked(&mut self) -> bool {
        let Some(background) = &mut self.background else { return false };
        let is_late = mutants::is(Mutant::WorkClearedAfterTick);
        if !background.signal.has_work.swap(is_late, Ordering::SeqCst) {
            return false;
        }
        let now = background.clock.now();
        background.next = self.driver.tick(now);
        if is_late {
            background.signal.has_work.store(false, Ordering::SeqCst);
        }
        true
    }

    /// Waits until something may have changed.
    pub(crate) fn rest(&mut self) {
        let Some(background) = &mut self.background else { return self.park(None) };
        let Some(next) = background.next else { return self.park(None) };
        let now = background.clock.now();
        if next <= now || (self.ring.in_flight() == 0 && background.clock.skip_to(next)) {
            background.signal.has_work.store(true, Ordering::SeqCst);
        } else {
            self.park(Some(Duration::from_nanos(next - now)));
            background_is_due(&mut self.background);
        }
    }

    fn rest_at_most(&mut self, timeout: Duration) {
        self.park(Some(timeout));
        background_is_due(&mut self.background);
    }

    /// I/O in flight ends by itself, so a bio that waits for room is retried then.
    fn park(&mut self, timeout: Option<Duration>) {
        if self.ring.in_flight() > 0 {
            self.ring.submit_and_wait(timeout);
        } else {
            self.wake.park(timeout);
        }
    }
}

fn background_is_due(background: &mut Option<Background>) {
    if let Some(background) = background
        && background.next.is_some_and(|next| next <= background.clock.now())
    {
        background.signal.has_work.store(true, Ordering::SeqCst);
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if self.background.take().is_some() {
            self.driver.device().events().set_background(None);
        }
        if std::thread::panicking() {
            return;
        }
        // The ring must return I/O in flight before its buffers can be freed.
        while self.turn() || self.ring.in_flight() > 0 {
            self.ring.submit_and_wait(None);
        }
    }
}

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Local({:?})", self.driver)
    }
}

/// Wakes a caller that waits.
#[derive(Debug, Default)]
struct Parker {
    is_woken: Mutex<bool>,
    signal: Condvar,
    /// For a caller that waits in a loop of its own.
    notifier: OnceLock<Notifier>,
}

impl Parker {
    fn park(&self, timeout: Option<Duration>) {
        let mut is_woken = lock(&self.is_woken);
        if !*is_woken || mutants::is(Mutant::DozeForgets) {
            // This may end early: callers check whether something has changed.
            is_woken = match timeout {
                None => self.signal.wait(is_woken).expect("wakers do not panic"),
                Some(timeout) => {
                    self.signal.wait_timeout(is_woken, timeout).expect("wakers do not panic").0
                }
            };
        }
        *is_woken = false;
    }
}

impl Wake for Parker {
    fn wake(&self) {
        *lock(&self.is_woken) = true;
        self.signal.notify_one();
        if let Some(notifier) = self.notifier.get() {
            notifier.ring();
        }
    }
}

/// How the device requests background work.
#[derive(Debug)]
struct Signal {
    has_work: AtomicBool,
    wake: Arc<Parker>,
}

impl Wake for Signal {
    fn wake(&self) {
        // The first call since the last tick wakes; further ones need not.
        if !self.has_work.swap(true, Ordering::SeqCst) {
            self.wake.wake();
        }
    }
}

#[cfg(test)]
mod tests;
