//! Requests of one thread: a number for each, where its data goes, and what the program calls it.

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

/// Most requests of a queue in flight.
pub(crate) const REQUESTS_MAX: usize = 4096;

/// A request in flight, or a place for one.
#[derive(Debug, Default)]
struct Place {
    user_data: u64,
    memory: Memory,
    is_read: bool,
}

/// What became of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completed {
    /// What the program calls it.
    pub user_data: u64,
    /// 0, or a negative errno.
    pub result: i32,
}

/// Who answers.
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
    /// Requests for which the ring to the server has no room yet.
    waiting: VecDeque<Ask>,
    /// Those that the server will not answer any more.
    lost: Vec<usize>,
}

impl Queue {
    pub(crate) fn new(way: Way) -> Queue {
        let (places, free) = (Vec::new(), Vec::new());
        Queue { way, places, free, waiting: VecDeque::new(), lost: Vec::new() }
    }

    /// A file for a program's own loop.
    pub(crate) fn fd(&mut self) -> Result<BorrowedFd<'_>> {
        match &mut self.way {
            Way::Local(local) => local.fd(),
            Way::Served(served) => served.fd(),
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Starts a read or a write of the memory that `fill` names.
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
            () if place.memory.has_null() => Some("a piece of its memory is at NULL".to_owned()),
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

    /// Asks the server, as soon as there is room.
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

    /// Gives the server what there is room for.
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

    /// Starts a flush, a discard or zeroes.
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

    /// A place for one more request.
    fn place(&mut self) -> Result<usize> {
        if let Some(at) = self.free.pop() {
            return Ok(at);
        }
        if self.places.len() == REQUESTS_MAX {
            let message = format!("{REQUESTS_MAX} requests are in flight, the most there can be");
            return Err(Error::new(Kind::Busy, message));
        }
        self.places.push(Place::default());
        Ok(self.places.len() - 1)
    }

    /// Gives completions to `take`, at most `max`: those that are there, and then, until there are
    /// `min` or `timeout` is over, those that come. Returns how many.
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

    /// The next completion; if there is none, waits for it if `waits`, until `deadline`.
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

/// What is wrong with a range in itself. Whether it is within the device, the device knows.
fn unfit(offset: u64, len: u64) -> Option<String> {
    if offset.checked_add(len).is_none() {
        return Some(format!("{len} bytes at byte {offset} have no end"));
    }
    let is_whole = (offset | len).is_multiple_of(SECTOR);
    (!is_whole)
        .then(|| format!("{len} bytes at byte {offset} are not a multiple of {SECTOR} bytes"))
}
