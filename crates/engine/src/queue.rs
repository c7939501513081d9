//! A queue: one thread, one ring, one loop. The only file of the engine, with its folder, that
//! spawns threads, sleeps or reads time.
//!
//! What a queue does is its role: serve one client's conversation ([`Queue::serve`]), run a
//! device's background ([`Queue::background`]), or accept connections ([`Queue::listen`]). The
//! loop is the same for all:
//!
//! 1. Events of the ring go to the role, then the role takes a turn: all that can be done now.
//! 2. When a turn leaves nothing to do, the queue announces that it sleeps, looks once more
//!    whether somebody signalled, and waits in the ring for an event, a wake or its deadline.
//!    So a [`Wake`] costs a system call only if the queue really sleeps, and none is lost.
//! 3. Stopping is asked for with [`Queue::stop`]; the role ends in its own time, but in bounded
//!    time, and dropping the queue waits for that.

mod clients;
mod device;
mod prefault;
mod watch;

use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::Shutdown;
use rustix::time::ClockId;

pub use clients::{Conversation, InFlight, Space};
pub use prefault::prefault;
pub use watch::{Watched, watched};

use device::{Background, DeviceEnd};

use crate::device::Device;
use crate::disk::{DiskIo, Ring};
use crate::error::{Error, Result};
use crate::ring::{Desk, Event, Mailbox};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Weak};
use crate::target::Wake;
use crate::units::{Nanos, SECOND};

/// Submissions that a queue's ring has room for at a time.
const RING_ENTRIES: u32 = 256;
/// A queue that is asked to stop drops what still waits for others after this long.
const STOP_SECONDS_MAX: u64 = 20;

/// The present, in nanoseconds since an arbitrary origin that all queues share.
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

/// What others know of a queue.
#[derive(Debug)]
struct Shared {
    mailbox: Arc<Mailbox<DiskIo>>,
    is_stopping: AtomicBool,
}

impl Wake for Shared {
    fn wake(&self) {
        self.mailbox.wake();
    }
}

/// What a turn of a role ended with.
enum Turn {
    /// There may be more to do.
    Again,
    /// Nothing to do before the next event, or before this moment.
    Idle(Option<Nanos>),
    /// The role has ended.
    Over,
}

/// What a queue does.
trait Role {
    /// What it asks of the ring, as an event names it.
    type Tag: Copy + PartialEq;

    /// Something asked of the ring has ended.
    fn event(&mut self, event: Event<Self::Tag>, core: &mut Core<Self::Tag>);
    /// Does what can be done now. `is_stopping` from the first time on that a stop was asked for.
    fn turn(&mut self, core: &mut Core<Self::Tag>, is_stopping: bool) -> Turn;
}

/// The loop's own state, which roles use.
struct Core<T> {
    shared: Arc<Shared>,
    desk: Desk<T, DiskIo>,
}

impl<T: Copy + PartialEq> Core<T> {
    fn new() -> Result<Core<T>> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        let mailbox = ring.mailbox()?;
        let shared = Arc::new(Shared { mailbox, is_stopping: AtomicBool::new(false) });
        Ok(Core { shared, desk: Desk::new(ring) })
    }

    fn run(&mut self, role: &mut impl Role<Tag = T>) {
        loop {
            self.desk.ring().answer_wakes();
            while let Some(event) = self.desk.pop_event() {
                role.event(event, self);
            }
            let is_stopping = self.shared.is_stopping.load(Ordering::SeqCst);
            match role.turn(self, is_stopping) {
                Turn::Again => {}
                Turn::Idle(deadline) => self.sleep(deadline),
                Turn::Over => break,
            }
        }
    }

    fn sleep(&mut self, deadline: Option<Nanos>) {
        let timeout = deadline.map(|at| Duration::from_nanos(at.saturating_sub(now())));
        self.desk.ring_mut().sleep(timeout);
    }
}

/// A running queue. Dropping it stops it and waits for its end.
#[derive(Debug)]
pub struct Queue {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The client's socket, in which the thread may sleep.
    client: Option<Weak<OwnedFd>>,
}

impl Queue {
    /// Serves one client of `device` over `socket`; `farewell` is called on the queue's thread
    /// when the conversation is over, with what is left of it.
    pub fn serve<C: Conversation + 'static>(
        name: &str,
        device: &Arc<Device>,
        socket: OwnedFd,
        conversation: C,
        farewell: impl FnOnce(C) + Send + 'static,
    ) -> Result<Queue> {
        let device = device.clone();
        let socket = Arc::new(socket);
        let client = Arc::downgrade(&socket);
        let arrive = move |core: &mut Core<_>| {
            Ok(clients::Client::new(socket, conversation, DeviceEnd::new(&device, core)?))
        };
        let mut queue = Queue::spawn(name, arrive, |core, mut client| {
            core.run(&mut client);
            farewell(client.leave(&mut core.desk));
        })?;
        queue.client = Some(client);
        Ok(queue)
    }

    /// Runs the background work of `device`. A device has one such queue at a time.
    pub fn background(name: &str, device: &Arc<Device>) -> Result<Queue> {
        let device = device.clone();
        let arrive = move |core: &mut Core<_>| Ok(Background::new(DeviceEnd::new(&device, core)?));
        Queue::spawn(name, arrive, |core, mut background| {
            core.run(&mut background);
            background.leave(&mut core.desk);
        })
    }

    /// Accepts connections at `listener` and hands each to `welcome`.
    pub fn listen(
        name: &str,
        listener: OwnedFd,
        welcome: impl FnMut(OwnedFd) + Send + 'static,
    ) -> Result<Queue> {
        let arrive = |_: &mut Core<_>| Ok(clients::Doorman::new(listener, Box::new(welcome)));
        Queue::spawn(name, arrive, |core, mut doorman| core.run(&mut doorman))
    }

    /// Starts a thread on which `arrive` makes a role and `stay` runs it to its end. Returns when
    /// `arrive` has.
    fn spawn<R: Role>(
        name: &str,
        arrive: impl FnOnce(&mut Core<R::Tag>) -> Result<R> + Send + 'static,
        stay: impl FnOnce(&mut Core<R::Tag>, R) + Send + 'static,
    ) -> Result<Queue> {
        let (report, arrived) = mpsc::sync_channel(1);
        let body = move || {
            let made = Core::new().and_then(|mut core| arrive(&mut core).map(|role| (core, role)));
            match made {
                Ok((mut core, role)) => {
                    let _ = report.send(Ok(core.shared.clone()));
                    stay(&mut core, role);
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(|source| Error::from_io("starting thread", name, source))?;
        let shared = arrived.recv().expect("the thread reports before it does anything else")?;
        Ok(Queue { shared, thread: Some(thread), client: None })
    }

    /// Asks the queue to end, without waiting for it.
    pub fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.wake();
        if let Some(socket) = self.client.as_ref().and_then(Weak::upgrade) {
            // What can fail here is a socket that its peer has left, and then nobody sleeps there.
            let _ = rustix::net::shutdown(&socket, Shutdown::Read);
        }
    }

    /// Whether its thread has ended.
    pub fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

#[cfg(test)]
mod tests;

impl Drop for Queue {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
