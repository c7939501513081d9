//! A second client, on its own thread: it writes in the middle of a request of the first one. A
//! thread can lose its processor at any point. Here it loses it after a fence, while it holds its
//! locks, and continues when the other client's write has been acknowledged. The process may die at
//! any event of both.

use std::sync::Arc;

use udm::target::Port;

use crate::machine::{Machine, Outcome};
use crate::sim::Meanwhile;
use crate::subject::Ground;
use crate::trace::{Ask, Event};

impl Machine {
    /// Another client is about to write, once this many fences of the next step are done. A disk
    /// lacks fences: there, requests that are not awaited meet each other.
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
        let sim = Arc::downgrade(&self.devices.sim);
        let act = move || {
            let sim = sim.upgrade().expect("the fencing machine exists");
            let mut port = Port::new(1);
            subject.submit(bio, &mut port);
            let done = port.done.pop_front().expect("memory with room serves a write at once");
            assert_eq!(done.status, Ok(()));
            sim.note(Event::Ack(id));
        };
        self.devices.sim.arrange(Some(Meanwhile::new(fences, Box::new(act))));
        self.arranged = Some(id);
        Ok(())
    }

    /// A step has ended: the other client's request in it is done by now, or is done immediately.
    pub(crate) fn end_arranged(&mut self) {
        if let Some(id) = self.arranged.take() {
            self.devices.sim.interrupt_now();
            self.model.ack(id);
        }
    }
}
