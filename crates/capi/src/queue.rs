//! The requests of one thread: a slot for each, with its memory and the program's `user_data`.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use udm::bio::{Bio, Op};
use udm::error::{Error, Kind, Result};
use udm::local::Local;
use udm::queue::now;
use udm::units::{BIO_BYTES_MAX, Nanos, SECTOR};
use udm_export::vhost::front::{self, Ask};

use crate::memory::Memory;

/// Maximum requests of a queue in flight.
pub(crate) const REQUESTS_MAX: usize = 4096;

/// Returns a number that is unique to this thread while it lives.
pub(crate) fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

/// A request in flight, or a free slot.
#[derive(Debug, Default)]
struct Place {
    user_data: u64,
    memory: Memory,
    is_read: bool,
}

/// A completed request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    /// The program's value.
    pub user_data: u64,
    /// 0, or a negative errno.
    pub result: i32,
}

/// The other side of the queue.
#[derive(Debug)]
pub(crate) enum Way {
    /// The engine, in this process.
    Local(Box<Local>),
    /// A server.
    Served(Box<front::Queue>),
}

/// One thread's requests.
#[derive(Debug)]
pub(crate) struct Queue {
    way: Way,
    places: Vec<Place>,
    free: Vec<usize>,
    /// Requests that wait for free space in the ring to the server.
    waiting: VecDeque<Ask>,
    /// Requests that the server will not answer any more.
    lost: Vec<usize>,
}

impl Queue {
    pub(crate) fn new(way: Way) -> Queue {
        let (places, free) = (Vec::new(), Vec::new());
        Queue { way, places, free, waiting: VecDeque::new(), lost: Vec::new() }
    }

    /// Returns a file for a program's own loop.
    pub(crate) fn fd(&mut self) -> Result<BorrowedFd<'_>> {
        match &mut self.way {
            Way::Local(local) => local.fd(),
            Way::Served(served) => served.fd(),
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Starts a read or a write of the memory that `fill` adds.
    pub(crate) fn transfer(
        &mut self,
        op: Op,
        offset: u64,
        fua: bool,
        user_data: u64,
        fill: impl FnOnce(&mut Memory) -> bool,
    ) -> Result<()> {
        let at = self.place()?;
        let place = &mut self.places[at];
        place.memory.clear();
        let is_countable = fill(&mut place.memory);
        let len = place.memory.len();
        let problem = match () {
            () if place.memory.has_null() => {
                Some("a piece of its memory has the address NULL".to_owned())
            }
            () if len == 0 => Some("it has no bytes".to_owned()),
            () if !is_countable || len as u64 > BIO_BYTES_MAX => {
                Some(format!("it has more than {BIO_BYTES_MAX} bytes"))
            }
            () => unfit(offset, len as u64),
        };
        if let Some(problem) = problem {
            self.free.push(at);
            return Err(Error::new(Kind::Invalid, format!("the request is refused: {problem}")));
        }
        (place.user_data, place.is_read) = (user_data, op == Op::Read);
        let token = at as u64;
        let Way::Local(local) = &mut self.way else {
            return self.ask(Ask { op, offset, len: len as u64, fua, token });
        };
        let mut buffer = local.pool().take(len);
        let bio = if op == Op::Read {
            Bio::read(offset, buffer, token)
        } else {
            place.memory.gather(buffer.as_mut_slice());
            Bio::write(offset, buffer, fua, token)
        };
        local.submit(bio);
        Ok(())
    }

    /// Sends a request to the server as soon as there is free space.
    fn ask(&mut self, ask: Ask) -> Result<()> {
        if let Way::Served(served) = &self.way
            && let Some(failure) = served.failure()
        {
            self.free.push(ask.token as usize);
            return Err(failure);
        }
        self.waiting.push_back(ask);
        self.send();
        Ok(())
    }

    /// Sends as many waiting requests to the server as there is free space for.
    fn send(&mut self) {
        let Way::Served(served) = &mut self.way else { return };
        while let Some(ask) = self.waiting.front() {
            let memory = &self.places[ask.token as usize].memory;
            match served.start(*ask, |bytes| memory.each(|piece| bytes.put(piece))) {
                Ok(true) => drop(self.waiting.pop_front()),
                Ok(false) => return,
                Err(_) => self.lost.extend(self.waiting.drain(..).map(|ask| ask.token as usize)),
            }
        }
    }

    /// Starts a flush, a discard or a write-zeroes request.
    pub(crate) fn bare(
        &mut self,
        op: Op,
        offset: u64,
        len: u64,
        fua: bool,
        user_data: u64,
    ) -> Result<()> {
        let problem = match op {
            Op::Flush => None,
            _ if len == 0 => Some("it has no bytes".to_owned()),
            _ if len > BIO_BYTES_MAX => Some(format!("it has more than {BIO_BYTES_MAX} bytes")),
            _ => unfit(offset, len),
        };
        if let Some(problem) = problem {
            return Err(Error::new(Kind::Invalid, format!("the request is refused: {problem}")));
        }
        let at = self.place()?;
        (self.places[at].user_data, self.places[at].is_read) = (user_data, false);
        match &mut self.way {
            Way::Local(local) => local.submit(Bio::bare(op, offset, len, fua, at as u64)),
            Way::Served(_) => return self.ask(Ask { op, offset, len, fua, token: at as u64 }),
        }
        Ok(())
    }

    /// Returns a slot for one more request.
    fn place(&mut self) -> Result<usize> {
        if let Some(at) = self.free.pop() {
            return Ok(at);
        }
        if self.places.len() == REQUESTS_MAX {
            let message = format!("{REQUESTS_MAX} requests are in flight, which is the maximum");
            return Err(Error::new(Kind::Busy, message));
        }
        self.places.push(Place::default());
        Ok(self.places.len() - 1)
    }

    /// Passes at most `max` completions to `take`: first those that are ready, then later ones,
    /// until there are `min` or `timeout` has passed. Returns their number.
    pub(crate) fn reap(
        &mut self,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
        mut take: impl FnMut(usize, Completed),
    ) -> usize {
        let deadline = timeout
            .map(|timeout| now().saturating_add(timeout.as_nanos().min(u64::MAX.into()) as u64));
        let mut count = 0;
        while count < max {
            let Some(completed) = self.next(count < min, deadline) else { break };
            take(count, completed);
            count += 1;
        }
        count
    }

    /// Returns the next completion. If none is ready and `waits` is set, waits for one until
    /// `deadline`.
    fn next(&mut self, waits: bool, deadline: Option<Nanos>) -> Option<Completed> {
        let local = match &mut self.way {
            Way::Served(_) => return self.next_served(waits, deadline),
            Way::Local(local) => local,
        };
        let bio = match (local.poll(), deadline) {
            (Some(bio), _) => bio,
            (None, _) if !waits => return None,
            (None, Some(deadline)) => local.wait_until(deadline)?,
            (None, None) => local.wait()?,
        };
        let place = &self.places[bio.token as usize];
        if place.is_read && bio.status.is_ok() {
            place.memory.scatter(bio.buffer.as_slice());
        }
        local.pool().put(bio.buffer);
        let result = bio.status.map_or_else(|status| -status.errno(), |()| 0);
        Some(self.complete(bio.token as usize, result))
    }

    fn next_served(&mut self, waits: bool, deadline: Option<Nanos>) -> Option<Completed> {
        loop {
            if let Some(at) = self.lost.pop() {
                return Some(self.complete(at, -Kind::Io.errno()));
            }
            let Way::Served(served) = &mut self.way else { return None };
            let places = &self.places;
            let answer = served.poll(|token, bytes| {
                places[token as usize].memory.each_mut(|piece| bytes.get(piece));
            });
            if let Some(answer) = answer {
                self.send();
                let result = answer.result.map_or_else(|status| -status.errno(), |()| 0);
                return Some(self.complete(answer.token as usize, result));
            }
            if !waits || deadline.is_some_and(|deadline| now() >= deadline) {
                return None;
            }
            served.wait(deadline);
        }
    }

    fn complete(&mut self, at: usize, result: i32) -> Completed {
        self.free.push(at);
        Completed { user_data: self.places[at].user_data, result }
    }
}

/// Returns the error in a range, without regard to the device's size.
fn unfit(offset: u64, len: u64) -> Option<String> {
    if offset.checked_add(len).is_none() {
        return Some(format!("{len} bytes at byte {offset} overflow"));
    }
    let is_whole = (offset | len).is_multiple_of(SECTOR);
    (!is_whole)
        .then(|| format!("{len} bytes at byte {offset} are not a multiple of {SECTOR} bytes"))
}

#[cfg(test)]
mod tests;
