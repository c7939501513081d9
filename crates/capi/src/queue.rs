//! Requests of one thread: a number for each, where its data goes, and what the program calls it.

use std::time::Duration;

use udm::bio::{Bio, Op};
use udm::error::{Error, Kind, Result};
use udm::local::Local;
use udm::queue::now;
use udm::units::{BIO_BYTES_MAX, SECTOR};

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

/// One thread's requests.
#[derive(Debug)]
pub(crate) struct Queue {
    local: Local,
    places: Vec<Place>,
    free: Vec<usize>,
}

impl Queue {
    pub(crate) fn new(local: Local) -> Queue {
        Queue { local, places: Vec::new(), free: Vec::new() }
    }

    /// The caller of the device.
    pub(crate) fn local(&mut self) -> &mut Local {
        &mut self.local
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
        let mut buffer = self.local.pool().take(len);
        let bio = if op == Op::Read {
            Bio::read(offset, buffer, at as u64)
        } else {
            place.memory.gather(buffer.as_mut_slice());
            Bio::write(offset, buffer, fua, at as u64)
        };
        self.local.submit(bio);
        Ok(())
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
        self.local.submit(Bio::bare(op, offset, len, fua, at as u64));
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
            let bio = match (self.local.poll(), deadline) {
                (Some(bio), _) => Some(bio),
                (None, _) if count >= min => None,
                (None, Some(deadline)) => self.local.wait_until(deadline),
                (None, None) => self.local.wait(),
            };
            let Some(bio) = bio else { break };
            take(count, self.complete(bio));
            count += 1;
        }
        count
    }

    fn complete(&mut self, bio: Bio) -> Completed {
        let at = bio.token as usize;
        let place = &mut self.places[at];
        if place.is_read && bio.status.is_ok() {
            place.memory.scatter(bio.buffer.as_slice());
        }
        let completed = Completed {
            user_data: place.user_data,
            result: bio.status.map_or_else(|status| -status.errno(), |()| 0),
        };
        self.free.push(at);
        self.local.pool().put(bio.buffer);
        completed
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
