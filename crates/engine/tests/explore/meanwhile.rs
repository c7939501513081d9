//! A second client, on a thread of its own: it writes in the middle of what a request of the
//! first one does. A thread can lose its processor anywhere; here it does so after a fence, with
//! what it has locked still locked, and goes on when the other one's write has been acknowledged.
//! The process may die at any event of both.

use std::sync::Arc;

use udm::target::Port;

use crate::machine::{Machine, Outcome};
use crate::subject::Ground;
use crate::trace::{Ask, Event};
use crate::twin::Meanwhile;

impl Machine {
    /// Another client is about to write, once this many fences of the next step are done. A disk
    /// has no fences: there, requests that nobody waits for meet each other.
    pub(crate) fn arrange(&mut self, first: usize, count: usize, fences: u32) -> Outcome {
        let ask = self.in_blocks(Ask::Write { first, count, fua: false, is_zero: false });
        if self.kind.ground() == Ground::Disk {
            return self.ask(ask, true);
        }
        let id = self.id();
        let bio = self.bio(id, ask);
        self.note(Event::Submit(id, ask));
        self.model.submit(id, ask);
        let subject = self.subject.clone().expect("the server runs");
        let twin = Arc::downgrade(&self.devices.twin);
        let act = move || {
            let twin = twin.upgrade().expect("who fences is there");
            let mut port = Port::new(1);
            subject.submit(bio, &mut port);
            let done = port.done.pop_front().expect("memory with room serves a write at once");
            assert_eq!(done.status, Ok(()));
            twin.note(Event::Ack(id));
        };
        self.devices.twin.arrange(Some(Meanwhile::new(fences, Box::new(act))));
        self.arranged = Some(id);
        Ok(())
    }

    /// A step is over: what another client was to do in it is done by now, or right away.
    pub(crate) fn end_arranged(&mut self) {
        if let Some(id) = self.arranged.take() {
            self.devices.twin.interrupt_now();
            self.model.ack(id);
        }
    }
}
