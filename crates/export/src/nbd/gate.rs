//! The thread of a door at a shared address: it accepts connections, takes those that other doors
//! pass on, and lets new doors have the listener.

use rustix::io::Errno;
use rustix::net::SocketFlags;
use udm::queue::{Core, Role, Turn, now};
use udm::ring::Event;
use udm::sync::Arc;
use udm::units::{Nanos, SECOND};

use super::Clients;
use super::shared::{Joined, Message, next_message};

/// How long no connection is accepted after the process ran out of file descriptors or memory.
const PAUSE_NS: Nanos = SECOND / 10;
/// Connections that are accepted in a row before messages are looked at, and the other way round.
const IN_A_ROW: usize = 16;

/// What it waits for.
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
}

impl Gate {
    pub(super) fn new(clients: Arc<Clients>, joined: Joined) -> Gate {
        Gate { clients, joined, is_listening: false, is_reading: false, shut_until: 0 }
    }

    fn accept(&mut self) {
        for _ in 0..IN_A_ROW {
            match rustix::net::accept_with(&self.joined.listener, SocketFlags::CLOEXEC) {
                Ok(connection) => self.clients.welcome(connection, None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Another door was faster, or there are no more.
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
                Some(Message::Connection(connection, said, rest)) => {
                    self.clients.welcome(connection, Some((said, rest)));
                }
            }
        }
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
            core.desk().poll_readable(&self.joined.entry, Source::Entry);
            self.is_reading = true;
        }
        let is_shut = now() < self.shut_until;
        if !self.is_listening && !is_shut {
            core.desk().poll_readable(&self.joined.listener, Source::Listener);
            self.is_listening = true;
        }
        Turn::Idle(is_shut.then_some(self.shut_until))
    }

    fn leave(self, _core: &mut Core<Source>) {}
}
