//! An open table with a thread for its background work: the simplest way to read and write a device
//! from a program.
//!
//! 1. Each opening draws a random name, by which a cache recognises the shared memory that belongs
//!    to it.
//! 2. Flushed writes are durable. Acknowledged writes that were not flushed survive the death of
//!    the process, unless the caller opted out ([`Options::without_memory`]).
//! 3. A volume is open as long as it lives. It closes in order when it is dropped.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::build::{BuildOptions, SystemOpener, build, make_absolute};
use crate::device::{Device, DeviceState};
use crate::error::{Error, Kind, Result};
use crate::local::Local;
use crate::queue::{Queue, now};
use crate::sync::Arc;
use crate::table::Table;
use crate::units::SECOND;

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
    /// Keeps the shared memory in files in `folder`, which must exist. If the process dies, the
    /// next one finds the acknowledged writes, if it names the same folder and the machine was not
    /// restarted. A folder in memory, as in `/run`, is best.
    pub fn with_memory_in(folder: impl Into<PathBuf>) -> Options {
        Options { memory: Some(folder.into()), is_format_forced: false }
    }

    /// Keeps all memory private: when the process dies, unflushed writes are lost, as with the
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
    /// Opens the devices that `table` names and serves it. `name` appears in errors. Paths are
    /// relative to the current directory. An empty cache device is formatted.
    pub fn open(name: &str, table: &str, options: &Options) -> Result<Volume> {
        let device = Device::new(name)?;
        let mut table = Table::parse(table)?;
        // Absolute paths also work in a directory that was deleted.
        let directory = std::env::current_dir().unwrap_or_default();
        make_absolute(&mut table, &directory)?;
        let opener = match &options.memory {
            Some(folder) => SystemOpener::with_memory_in(folder),
            None => SystemOpener::without_memory(),
        };
        let fresh = BuildOptions::fresh()?;
        let asked = BuildOptions { force_format: options.is_format_forced, ..fresh };
        // Started first: if the thread cannot start, no device has to be closed.
        let background = Queue::background("udm-background", &device)?;
        device.load(build(&table, &opener, &asked)?)?;
        device.resume()?;
        Ok(Volume { device, _background: background, is_closed: false })
    }

    /// A handle to read and write with, for the thread that calls this. There are at most
    /// [`PORTS_MAX`](crate::device::PORTS_MAX) at a time. When the volume has closed, their
    /// requests fail.
    pub fn caller(&self) -> Result<Local> {
        Local::new(&self.device)
    }

    /// The mapped device: its status, its facts, messages, suspend and resume.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Closes the volume: acknowledged writes are then durable in the cache or on the origin, and
    /// the shared memory is removed. Waits for requests that other callers have in flight. If they
    /// do not end within 30 seconds, no acknowledged write is lost, but the next opening needs the
    /// shared memory.
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
                        "{}: requests are not answered after {REST_SECONDS_MAX} s; no completed \
                         write is lost",
                        self.device.name()
                    );
                    return Err(Error::new(Kind::Busy, message));
                }
                thread::sleep(LOOK_EVERY);
            }
        }
        let is_durable = self.device.is_durable();
        self.device.remove()?;
        if !is_durable {
            let name = self.device.name();
            let message = format!(
                "{name}: closed, but a device of the table failed a flush: data written since the \
                 last successful flush may be lost"
            );
            return Err(Error::new(Kind::Io, message));
        }
        Ok(())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // A panicking thread may hold callers whose requests are not driven any more.
        if !self.is_closed && !thread::panicking() {
            // To see an error, call `close`.
            let _ = self.end();
        }
    }
}

#[cfg(test)]
mod tests;
