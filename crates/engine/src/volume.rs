//! A table, opened, with a thread for its background work: all that a program needs to read and
//! write.
//!
//! 1. Each opening draws a random name; by it a cache recognises the memory that belongs to it.
//! 2. What was flushed is durable. What was acknowledged and not flushed survives the death of the
//!    process, unless the caller gave that up ([`Options::without_memory`]).
//! 3. A volume is open as long as it lives. It closes in order when it is dropped.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::device::{Device, DeviceState};
use crate::error::{Error, Kind, Result};
use crate::local::Local;
use crate::queue::{Queue, now};
use crate::sync::Arc;
use crate::table::Table;
use crate::units::SECOND;
use crate::world::{BuildOptions, SystemOpener, build, make_absolute};

/// When a volume closes, requests in flight may take this long to come back.
const REST_SECONDS_MAX: u64 = 30;
/// Time between two checks whether they are back.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Options besides the table.
#[derive(Clone, Debug)]
pub struct Options {
    memory: Option<PathBuf>,
    is_format_forced: bool,
}

impl Options {
    /// Memory that survives this process has its files in `folder`, which must exist: what a
    /// process that died had acknowledged is found by the next one, if it names the same folder and
    /// the machine was not restarted. A folder in memory, as in `/run`, is best.
    pub fn with_memory_in(folder: impl Into<PathBuf>) -> Options {
        Options { memory: Some(folder.into()), is_format_forced: false }
    }

    /// All memory is private: when the process dies, what was not flushed is lost, as with the
    /// volatile cache of a disk whose power fails.
    pub fn without_memory() -> Options {
        Options { memory: None, is_format_forced: false }
    }

    /// Formats a cache device even if it may hold something else.
    #[must_use]
    pub fn force_format(self) -> Options {
        Options { is_format_forced: true, ..self }
    }
}

/// A mapped device of this process.
#[derive(Debug)]
pub struct Volume {
    device: Arc<Device>,
    _background: Queue,
    is_closed: bool,
}

impl Volume {
    /// Opens the devices that `table` names and serves it. `name` is for errors. Paths are relative
    /// to the current directory. A cache device that holds nothing is formatted.
    pub fn open(name: &str, table: &str, options: &Options) -> Result<Volume> {
        let device = Device::new(name)?;
        let mut table = Table::parse(table)?;
        let directory = std::env::current_dir()
            .map_err(|error| Error::from_io("finding", "the current directory", error))?;
        make_absolute(&mut table, &directory);
        let opener = match &options.memory {
            Some(folder) => SystemOpener::with_memory_in(folder),
            None => SystemOpener::without_memory(),
        };
        let fresh = BuildOptions::fresh()?;
        let asked = BuildOptions { force_format: options.is_format_forced, ..fresh };
        // First, since nothing is open yet that would have to be closed if there is no thread.
        let background = Queue::background("udm-background", &device)?;
        device.load(build(&table, &opener, &asked)?)?;
        device.resume()?;
        Ok(Volume { device, _background: background, is_closed: false })
    }

    /// A caller to read and write with, for the thread that calls this. There are at most
    /// [`PORTS_MAX`](crate::device::PORTS_MAX) at a time. When the volume has closed, their
    /// requests fail.
    pub fn caller(&self) -> Result<Local> {
        Local::new(&self.device)
    }

    /// The mapped device: its status, its facts, messages, suspend and resume.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Closes it: what was acknowledged is durable in the cache or on the origin, and its memory is
    /// removed. Waits for requests that other callers have in flight. If they do not come back in
    /// 30 seconds, nothing that was acknowledged is lost, but the next opening has to find the
    /// memory.
    pub fn close(mut self) -> Result<()> {
        self.is_closed = true;
        self.end()
    }

    fn end(&self) -> Result<()> {
        if self.device.info().state != DeviceState::Empty {
            self.device.begin_suspend()?;
            let deadline = now() + REST_SECONDS_MAX * SECOND;
            while !self.device.finish_suspend()? {
                if now() >= deadline {
                    let message = format!(
                        "{}: requests are not answered after {REST_SECONDS_MAX} s; nothing that \
                         was completed is lost",
                        self.device.name()
                    );
                    return Err(Error::new(Kind::Busy, message));
                }
                thread::sleep(LOOK_EVERY);
            }
        }
        self.device.remove()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // A thread that panics may hold callers whose requests are not driven any more.
        if !self.is_closed && !thread::panicking() {
            // To see an error, call `close`.
            let _ = self.end();
        }
    }
}

#[cfg(test)]
mod tests;
