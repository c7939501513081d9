//! The end of a served device: it is brought to rest, and then closed, or served again if the end
//! failed. While an end is under way, the device takes no change and no second end.
//!
//! 1. A removal may fail: then the device is as it was before. The end that a signal began cannot
//!    be taken back, nor can a removal after it has succeeded.
//! 2. One atomic has the state of the end, so that a removal that fails cannot take back an end
//!    that a signal began meanwhile.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use udm::device::DeviceState;

use super::{LOOK_EVERY, Served, come_to_rest, lock};
use crate::exports::Exports;
use crate::work::Watch;

/// How long a removal waits for another one, which notices after a second that its command is gone.
const OTHER_END_MAX: Duration = Duration::from_secs(5);

/// No end is under way.
const NONE: usize = 0;
/// A removal is under way, and may be refused.
const BEGUN: usize = 1;
/// A removal brings the device to rest, which may fail. All work that waits gives up.
const RESTING: usize = 2;
/// The server ends.
const FINAL: usize = 3;

/// The state of the end.
#[derive(Debug, Default)]
pub(super) struct End {
    state: AtomicUsize,
    /// Another removal, by force, waits for the one that is under way.
    is_overtaken: AtomicBool,
    /// A rest found the device suspended, or did not touch its state: see `go_on`.
    stays_as_it_is: AtomicBool,
}

impl End {
    fn state(&self) -> usize {
        self.state.load(Ordering::SeqCst)
    }

    /// Returns whether the state was `from`; then it is `to`.
    fn step(&self, from: usize, to: usize) -> bool {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// The data that remains in a cache when its device is removed.
#[derive(Clone, Debug)]
pub struct Left {
    /// Bytes that only the cache contains.
    pub dirty_bytes: u64,
    /// The cache device, as the table names it.
    pub cache: Option<String>,
    /// Whether the cache device was deleted, so that its content is lost.
    pub is_lost: bool,
    /// The reason why the cache device cannot be read or trusted, if there is one.
    pub failure: Option<String>,
    /// The troubles of the devices.
    pub troubles: Vec<String>,
    /// Whether the next server can find out that another program has changed the origin.
    pub is_origin_marked: bool,
}

impl Served {
    /// A removal begins. Until the guard is dropped, changes are refused. Another removal that is
    /// under way is waited for, because its command may have been killed; with `overtakes`, it
    /// fails if it still writes back. The wait ends when the caller `is_gone`.
    pub fn begin_end(&self, overtakes: bool, is_gone: &dyn Fn() -> bool) -> Result<Ends<'_>> {
        let deadline = Instant::now() + OTHER_END_MAX;
        loop {
            let has_begun = self.end.step(NONE, BEGUN);
            let is_too_late = self.ends_for_good() || Instant::now() >= deadline;
            let is_late = !has_begun && is_too_late;
            let is_given_up = !has_begun && is_gone();
            if overtakes {
                let waits = !has_begun && !is_late && !is_given_up;
                self.end.is_overtaken.store(waits, Ordering::SeqCst);
            }
            if has_begun {
                return Ok(Ends(&self.end));
            }
            if is_given_up {
                bail!("the caller has disconnected");
            }
            if is_late {
                bail!("the device is being removed already");
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// An error if a removal that still writes back is to give way to one by force.
    pub fn refuse_overtaken(&self) -> Result<()> {
        if self.end.is_overtaken.load(Ordering::SeqCst) {
            bail!("the device is being removed by another command");
        }
        Ok(())
    }

    /// The removal that is under way brings the device to rest from now on. An error if a signal
    /// has ended the server already.
    pub fn begin_rest(&self) -> Result<()> {
        if !self.end.step(BEGUN, RESTING) {
            bail!("the device is being removed already");
        }
        Ok(())
    }

    /// The server ends, even if a removal that is under way fails.
    pub fn end_for_good(&self) {
        self.end.state.store(FINAL, Ordering::SeqCst);
    }

    /// Whether the end cannot be taken back any more.
    pub fn ends_for_good(&self) -> bool {
        self.end.state() == FINAL
    }

    /// Whether the device comes to rest for its end: all waiting work gives up.
    pub fn is_stopping(&self) -> bool {
        self.end.state() >= RESTING
    }

    /// An error if an end is under way.
    pub fn refuse_ending(&self) -> Result<()> {
        if self.end.state() != NONE {
            bail!("the device is being removed");
        }
        Ok(())
    }

    /// Disconnects clients and brings the device to rest, before its end. After an error the
    /// service can only end, or [go on](Served::go_on).
    pub fn rest(&self, watch: &Watch) -> Result<()> {
        self.close_exports();
        // Until this has the right to change the state, the state is that of another command.
        self.end.stays_as_it_is.store(true, Ordering::SeqCst);
        let _change = self.change_when(watch, || Ok(()))?;
        let was_suspended = self.device.info().state == DeviceState::Suspended;
        self.end.stays_as_it_is.store(was_suspended, Ordering::SeqCst);
        come_to_rest(&self.device, watch)
    }

    /// The same; also fails if acknowledged data may not be durable.
    pub fn rest_durably(&self, watch: &Watch) -> Result<()> {
        self.rest(watch)?;
        if !self.is_durable() {
            bail!("a device of the table failed a flush");
        }
        Ok(())
    }

    /// Disconnects all clients. [`Served::reopen_exports`] takes that back.
    pub fn close_exports(&self) {
        let mut exports = lock(&self.exports);
        let shut = Exports { open: Vec::new(), are_shut: true };
        let open = std::mem::replace(&mut *exports, shut).open;
        lock(&self.closed_exports).extend(open.iter().map(|export| export.uri().to_string()));
        drop(exports);
        open.into_iter().for_each(|export| export.stop());
    }

    /// Cancels a rest, unless the server ends for good: the device is as it was before, and its
    /// exports are open. Returns the exports that cannot be opened.
    pub fn go_on(&self) -> Result<()> {
        // The state of the device needs no change, and another change may take long.
        if self.end.stays_as_it_is.load(Ordering::SeqCst) {
            return self.reopen_exports();
        }
        let change = self.change_when(&Watch::default(), || match self.ends_for_good() {
            true => bail!("the server is ending"),
            false => Ok(()),
        });
        if self.ends_for_good() {
            return Ok(());
        }
        let change = change?;
        self.device.cancel_suspend()?;
        drop(change);
        self.reopen_exports()
    }

    /// Opens the exports again that were closed for an end, unless the server ends for good.
    /// Returns those that cannot be opened.
    pub fn reopen_exports(&self) -> Result<()> {
        let mut exports = lock(&self.exports);
        if self.ends_for_good() {
            return Ok(());
        }
        exports.are_shut = false;
        let uris = std::mem::take(&mut *lock(&self.closed_exports));
        drop(exports);
        let failed: Vec<String> = uris
            .iter()
            .filter_map(|uri| self.add_again(uri).err().map(|error| format!("{error:#}")))
            .collect();
        if !failed.is_empty() {
            bail!("{}", failed.join("; "));
        }
        Ok(())
    }

    /// Ends the service of a device at rest: no device is open after this. Dirty data stays. A
    /// device that does not rest is left to the end of the process.
    pub fn end(&self) -> Left {
        let cache = lock(&self.cache).clone();
        let is_lost = self.would_lose_data();
        let troubles = self.troubles();
        let (dirty_bytes, failure) = (self.device.dirty().bytes, self.medium_failure());
        // This is refused only if the device is not at rest.
        let is_origin_marked = self.device.remove().unwrap_or(false);
        drop(lock(&self.background).take());
        Left { dirty_bytes, cache, is_lost, failure, troubles, is_origin_marked }
    }

    /// Removes a device that was not announced to any client, and leaves no trace on its media or
    /// in memory.
    pub fn undo(&self) {
        if self.rest(&Watch::default()).is_ok() {
            self.end();
        }
    }
}

/// A removal is under way as long as this lives.
#[derive(Debug)]
pub struct Ends<'a>(&'a End);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        // An end for good stays one.
        let _ = self.0.step(BEGUN, NONE) || self.0.step(RESTING, NONE);
    }
}
