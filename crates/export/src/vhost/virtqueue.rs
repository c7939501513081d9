//! A ring of either kind with its log of requests in flight, as a worker serves it.
//!
//! Requests have the driver's ids: the first descriptor in split rings, the buffer's id in packed
//! ones. Both are less than the number of entries.

use std::collections::VecDeque;

use super::chain::{Chain, Shape};
use super::inflight::{Notes, Tracker};
use super::inflight_packed::{Noted, PackedTracker};
use super::memory::Memory;
use super::packed::{self, Cursor, Packed};
use super::proto::{Violation, feature, wrong};
use super::split::Split;
use super::steps::{Mutant, has};

/// A ring and its recovery state.
#[derive(Debug)]
pub struct With<R, T, A> {
    ring: R,
    /// The log of its requests in flight, if there is one.
    tracker: Option<T>,
    /// Requests that an earlier server took and did not answer, in order. They are taken before new
    /// ones.
    again: VecDeque<A>,
}

/// A ring with its log.
#[derive(Debug)]
pub enum Virtqueue {
    /// A split one.
    Split(With<Split, Tracker, u16>),
    /// A packed one.
    Packed(With<Packed, PackedTracker, Noted>),
}

use Virtqueue::{Packed as P, Split as S};

impl Virtqueue {
    /// Opens the ring with `shape` at the position `base`, as in `SET_VRING_BASE`. If there is a
    /// log, it continues with the requests in flight of ring `index`.
    pub fn open(
        shape: Shape,
        memory: &Memory,
        base: u32,
        notes: Option<&Notes>,
        index: usize,
    ) -> Result<Virtqueue, Violation> {
        if shape.has(feature::RING_PACKED) {
            let mut ring = Packed::new(shape, memory, base)?;
            let (mut tracker, mut again) = (None, VecDeque::new());
            if let Some(notes) = notes {
                let opened = notes.open_packed(index, &mut ring)?;
                (tracker, again) = (Some(opened.0), opened.1.into());
            }
            return Ok(P(With { ring, tracker, again }));
        }
        let Ok(next) = u16::try_from(base) else {
            return wrong(format!("a split ring that is at {base:#x}"));
        };
        let mut ring = Split::new(shape, memory, next)?;
        let (mut tracker, mut again) = (None, VecDeque::new());
        if let Some(notes) = notes {
            let opened = notes.open(index, ring.entries(), ring.used())?;
            (tracker, again) = (Some(opened.0), opened.1.into());
            ring.go_on_after(again.len());
        }
        Ok(S(With { ring, tracker, again }))
    }

    /// Number of entries.
    pub fn entries(&self) -> u16 {
        match self {
            S(with) => with.ring.entries(),
            P(with) => with.ring.entries(),
        }
    }

    /// Its position, as in `GET_VRING_BASE`.
    pub fn base(&self) -> u32 {
        match self {
            S(with) => with.ring.next().into(),
            P(with) => packed::base(with.ring.next(), with.ring.used()),
        }
    }

    /// Switches to new memory.
    pub fn moved(&mut self, memory: &Memory) -> Result<(), Violation> {
        match self {
            S(with) => with.ring.moved(memory),
            P(with) => with.ring.moved(memory),
        }
    }

    /// Whether the driver has made a request available.
    #[inline]
    pub fn has_request(&self) -> Result<bool, Violation> {
        match self {
            S(with) => with.ring.has_request(),
            P(with) => with.ring.has_request(),
        }
    }

    /// Reads the next request into `chain`, and returns its id; `None` if there is none. It is
    /// still the next one until [`Virtqueue::accept`].
    pub fn peek(&mut self, memory: &Memory, chain: &mut Chain) -> Result<Option<u16>, Violation> {
        match self {
            S(With { ring, again, .. }) => match again.front() {
                Some(head) => ring.walk(*head, memory, chain).map(|()| Some(*head)),
                None => ring.peek(memory, chain),
            },
            P(With { ring, again, .. }) => match again.front() {
                Some(noted) => ring.walk(&noted.descriptors, memory, chain).map(Some),
                None => ring.peek(memory, chain),
            },
        }
    }

    /// Logs and takes the last read request. Returns its position in the ring, unless an earlier
    /// server has taken it.
    pub fn accept(&mut self, id: u16) -> Option<u16> {
        match self {
            S(With { ring, tracker, again }) => {
                if again.pop_front().is_some() {
                    return None;
                }
                if let Some(tracker) = tracker {
                    tracker.note(id);
                }
                let place = ring.next();
                ring.accept();
                Some(place)
            }
            P(With { ring, tracker, again }) => {
                if again.pop_front().is_some() {
                    return None;
                }
                if let Some(tracker) = tracker {
                    tracker.note(id, ring.peeked());
                }
                let place = ring.next().print();
                ring.accept(id);
                Some(place)
            }
        }
    }

    /// Whether request `id`, which was at `place`, is the last one that was accepted.
    pub fn is_newest(&self, id: u16, place: u16) -> bool {
        match self {
            S(with) => with.ring.is_newest(place),
            P(with) => with.ring.is_newest(id, Cursor::parse(place)),
        }
    }

    /// Gives the last accepted request back, as if it had not been taken.
    pub fn give_back(&mut self, id: u16) {
        match self {
            S(With { ring, tracker, .. }) => {
                ring.give_back();
                if let Some(tracker) = tracker {
                    tracker.cross_out(id);
                }
            }
            P(With { ring, tracker, .. }) => {
                ring.give_back(id);
                if let Some(tracker) = tracker {
                    tracker.cross_out(id);
                }
            }
        }
    }

    /// Answers request `id`, with the number of bytes written for it. The driver sees the answer
    /// after [`Virtqueue::publish`] at the latest.
    #[inline]
    pub fn answer(&mut self, id: u16, written: u32) {
        match self {
            S(With { ring, tracker, .. }) => {
                if let Some(tracker) = tracker {
                    tracker.answered(id);
                }
                ring.push(id, written);
            }
            P(With { ring, tracker, .. }) => {
                if let Some(tracker) = tracker {
                    tracker.answered(id, ring.used_after(id));
                }
                ring.push(id, written);
                if let Some(tracker) = tracker {
                    tracker.published();
                }
            }
        }
    }

    /// Publishes the answers.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Violation> {
        match self {
            S(With { ring, tracker, .. }) => {
                let used = ring.used();
                if let (Some(tracker), true) = (&mut *tracker, has(Mutant::CrossedOutEarly)) {
                    tracker.published(used)?;
                }
                ring.publish()?;
                tracker.as_mut().map_or(Ok(()), |tracker| tracker.published(used))
            }
            P(With { ring, tracker, .. }) => {
                ring.check()?;
                tracker.as_ref().map_or(Ok(()), PackedTracker::check)
            }
        }
    }

    /// Whether the driver wants a call for the answers published since the last check.
    pub fn needs_call(&mut self) -> bool {
        match self {
            S(with) => with.ring.needs_call(),
            P(with) => with.ring.needs_call(),
        }
    }

    /// Asks the driver to kick at the next request. Returns whether the device may sleep until
    /// then: no request is available already.
    pub fn may_sleep(&mut self) -> Result<bool, Violation> {
        match self {
            S(with) => with.ring.may_sleep(),
            P(with) => with.ring.may_sleep(),
        }
    }

    /// Asks the driver not to kick.
    pub fn refuse_kicks(&mut self) {
        match self {
            S(with) => with.ring.refuse_kicks(),
            P(with) => with.ring.refuse_kicks(),
        }
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
