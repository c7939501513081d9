//! The thread of an export at a shared address: it accepts connections, receives connections that
//! other exports hand over, and gives the listener to new exports.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::SocketFlags;
use udm::queue::{Core, Role, Turn, now};
use udm::ring::Event;
use udm::sync::Arc;
use udm::sync::atomic::Ordering;
use udm::units::{Nanos, SECOND};

use super::Clients;
use super::handshake::Said;
use super::shared::{Joined, Message, next_message};

/// Pause in accepting after the process ran out of file descriptors or memory.
const PAUSE_NS: Nanos = SECOND / 10;
/// Maximum connections accepted in a row before messages are read, and vice versa.
const IN_A_ROW: usize = 16;
/// Maximum clients that wait for the export to open; more are disconnected.
const EARLY_MAX: usize = 16;

/// The sockets that it polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Listener,
    Entry,
}

pub(super) struct Gate {
    clients: Arc<Clients>,
    joined: Joined,
    is_listening: bool,
    is_reading: bool,
    shut_until: Nanos,
    /// Clients that other exports handed over before this one lets any in.
    early: Vec<(OwnedFd, Said, Vec<u8>)>,
}

impl Gate {
    pub(super) fn new(clients: Arc<Clients>, joined: Joined) -> Gate {
        Gate {
            clients,
            joined,
            is_listening: false,
            is_reading: false,
            shut_until: 0,
            early: Vec::new(),
        }
    }

    fn accept(&mut self) {
        for _ in 0..IN_A_ROW {
            match rustix::net::accept_with(&self.joined.listener, SocketFlags::CLOEXEC) {
                Ok(connection) => self.clients.welcome(connection, None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Another export has accepted it, or the queue is empty.
                Err(Errno::AGAIN) => return,
                Err(_) => {
                    self.shut_until = now() + PAUSE_NS;
                    return;
                }
            }
        }
    }

    fn read(&mut self) {
        for _ in 0..IN_A_ROW {
            match next_message(&self.joined.entry) {
                None => return,
                Some(Message::Listener(to)) => {
                    self.joined.member.answer(&to, &self.joined.listener);
                }
                Some(Message::Connection(connection, said, rest)) if self.is_open() => {
                    self.clients.welcome(connection, Some((said, rest)));
                }
                Some(Message::Connection(connection, said, rest)) => {
                    if self.early.len() < EARLY_MAX {
                        self.early.push((connection, said, rest));
                    }
                }
            }
        }
    }

    fn is_open(&self) -> bool {
        self.clients.is_open.load(Ordering::Acquire)
    }
}

impl Role for Gate {
    type Tag = Source;

    fn event(&mut self, event: Event<Source>, _core: &mut Core<Source>) {
        match event.tag {
            Source::Listener => {
                self.is_listening = false;
                self.accept();
            }
            Source::Entry => {
                self.is_reading = false;
                self.read();
            }
        }
    }

    fn turn(&mut self, core: &mut Core<Source>, is_stopping: bool) -> Turn {
        if is_stopping {
            return Turn::Over;
        }
        if !self.is_reading {
            core.submissions().poll_readable(&self.joined.entry, Source::Entry);
            self.is_reading = true;
        }
        if !self.is_open() {
            return Turn::Idle(None);
        }
        for (connection, said, rest) in self.early.drain(..) {
            self.clients.welcome(connection, Some((said, rest)));
        }
        let is_shut = now() < self.shut_until;
        if !self.is_listening && !is_shut {
            core.submissions().poll_readable(&self.joined.listener, Source::Listener);
            self.is_listening = true;
        }
        Turn::Idle(is_shut.then_some(self.shut_until))
    }

    fn leave(self, _core: &mut Core<Source>) {}
}
