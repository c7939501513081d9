//! The role of a queue that accepts connections.

use std::os::fd::OwnedFd;

use super::{Core, Queue, Role, Turn, now};
use crate::error::Result;
use crate::ring::Event;
use crate::sync::Arc;
use crate::units::{Nanos, SECOND};

/// How long the listener pauses after the process ran out of file descriptors or memory.
const ACCEPT_PAUSE_NS: Nanos = SECOND / 10;

impl Queue {
    /// Accepts connections at `listener` and hands each to `welcome`.
    pub fn listen(
        name: &str,
        listener: Arc<OwnedFd>,
        welcome: impl FnMut(OwnedFd) + Send + 'static,
    ) -> Result<Queue> {
        Queue::run(name, |_| Ok(Acceptor::new(listener, Box::new(welcome))))
    }
}

/// Accepts connections.
struct Acceptor {
    listener: Arc<OwnedFd>,
    welcome: Box<dyn FnMut(OwnedFd) + Send>,
    is_accepting: bool,
    shut_until: Nanos,
}

impl Acceptor {
    fn new(listener: Arc<OwnedFd>, welcome: Box<dyn FnMut(OwnedFd) + Send>) -> Acceptor {
        Acceptor { listener, welcome, is_accepting: false, shut_until: 0 }
    }
}

impl Role for Acceptor {
    /// It makes one kind of request only: accept a connection.
    type Tag = ();

    fn event(&mut self, event: Event<()>, _core: &mut Core<()>) {
        self.is_accepting = false;
        match event.connection {
            Some(connection) => (self.welcome)(connection),
            None => self.shut_until = now() + ACCEPT_PAUSE_NS,
        }
    }

    fn turn(&mut self, core: &mut Core<()>, is_stopping: bool) -> Turn {
        if is_stopping {
            return Turn::Over;
        }
        if self.is_accepting {
            return Turn::Idle(None);
        }
        if now() < self.shut_until {
            return Turn::Idle(Some(self.shut_until));
        }
        core.submissions().accept(&self.listener, ());
        self.is_accepting = true;
        Turn::Idle(None)
    }

    fn leave(self, _core: &mut Core<()>) {}
}
