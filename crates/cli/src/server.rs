//! The state of a device's server that its threads share: the device with its doors, and the names
//! under which others find it. `daemon.rs` begins and ends its process, `methods.rs` answers
//! commands.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use udm::attaching::AttachProgress;
use udm::units::human_bytes;

use crate::log;
use crate::runtime::{DeviceName, KeepLog, NameLock, RuntimeDir};
use crate::served::Served;
use crate::spec::Spec;

/// Control connections at one time; commands are short, so more is a mistake.
pub const CONNECTIONS_MAX: usize = 64;

/// How long a control connection may be silent.
pub const SILENCE_MAX: Duration = Duration::from_secs(60);

/// How long a command may take to read its answer.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the server ends.
#[derive(Debug)]
pub enum Stop {
    /// A signal asked for it.
    Signal(i32),
    /// `remove` asked for it and waits for the answer. The device is at rest, or it was to be
    /// forced, and there was trouble.
    Removed {
        /// Hears what stays.
        asked: SyncSender<Result<Value>>,
        /// What was wrong.
        trouble: Option<String>,
        /// The cache is to be wiped, with this progress.
        wipe: Option<Arc<AttachProgress>>,
    },
}

/// A running server, as its threads share it.
#[derive(Debug)]
pub struct Server {
    /// The runtime directory.
    pub runtime: Arc<RuntimeDir>,
    /// The device and its ways in.
    pub served: Served,
    /// Where metrics are answered.
    pub metrics: Option<SocketAddr>,
    /// When it began to serve, in seconds since 1970.
    pub started: u64,
    /// Tells the main thread to end.
    pub stop: Sender<Stop>,
    /// Set when the end has begun: all waiting work gives up.
    pub is_stopping: AtomicBool,
    /// Control connections that are open.
    pub connections: AtomicUsize,
    lock: Mutex<NameLock>,
}

/// The process name of the server of `name`.
pub fn title(name: &DeviceName) -> String {
    format!("udm: {name}")
}

/// Calls this process by the device's name. The kernel keeps 15 bytes of it; the command line stays
/// as it was.
pub fn set_title(name: &DeviceName) {
    // Where there is no /proc, it keeps the program's name.
    let _ = std::fs::write("/proc/self/comm", title(name));
}

impl Server {
    /// The device and its exports, without a thread that answers commands.
    pub fn build(
        spec: &Spec,
        runtime: Arc<RuntimeDir>,
        lock: NameLock,
        stop: Sender<Stop>,
    ) -> Result<Server> {
        let served = Served::build(spec, Arc::clone(&runtime), &lock)?;
        let opened = spec.exports.iter().try_for_each(|uri| served.add_export(uri).map(drop));
        if let Err(error) = opened {
            // A refused device leaves nothing, neither on its media nor in memory.
            served.undo();
            return Err(error);
        }
        Ok(Server {
            runtime,
            served,
            metrics: None,
            started: log::now_seconds(),
            stop,
            is_stopping: AtomicBool::new(false),
            lock: Mutex::new(lock),
            connections: AtomicUsize::new(0),
        })
    }

    /// The device's name, which `rename` changes.
    pub fn name(&self) -> DeviceName {
        lock(&self.lock).name().clone()
    }

    /// Where it logs, unless that is a terminal or a file that udm did not open.
    pub fn log(&self) -> Option<String> {
        let path = self.runtime.log(&self.name());
        path.exists().then(|| path.display().to_string())
    }

    /// What `create` reports to its user.
    pub fn ready(&self) -> Value {
        let name = self.name();
        let mut ready = json!({
            "name": name.as_str(),
            "pid": std::process::id(),
            "size_bytes": self.served.size_bytes(),
            "exports": self.served.exports_json(),
            "notes": self.served.notes(),
            "log": self.log(),
        });
        if let Some(address) = self.metrics {
            ready["metrics"] = json!(format!("http://{address}/metrics"));
        }
        ready
    }

    /// Writes down the active table, for the next server if this one dies.
    pub fn note_table(&self) {
        let path = self.runtime.table(&self.name());
        let new = self.runtime.new_table(&self.name());
        // Without this file, the next server does not compare tables. A server that dies here
        // leaves a complete one.
        let _ = std::fs::remove_file(&new);
        let is_written = std::fs::write(&new, self.served.given_table());
        let _ = is_written.and_then(|()| std::fs::rename(&new, &path));
    }

    /// Moves the device to another name, if that is free.
    pub fn rename(&self, to: &DeviceName) -> Result<()> {
        let mut own = lock(&self.lock);
        let from = own.name().clone();
        if from == *to {
            return Ok(());
        }
        let Some(new) = self.runtime.try_lock(to)? else {
            bail!("a device {to} exists already");
        };
        if let Err(error) = self.move_files(&from, to) {
            self.runtime.give_up(&new);
            return Err(error);
        }
        let old = std::mem::replace(&mut *own, new);
        self.runtime.clear(&old, KeepLog::Yes);
        log::moves_to(&self.runtime.log(to));
        drop(own);
        self.note_table();
        set_title(to);
        log::line(&format!("{from}: renamed to {to}"));
        Ok(())
    }

    fn move_files(&self, from: &DeviceName, to: &DeviceName) -> Result<()> {
        if self.runtime.control(to).exists() {
            bail!(
                "the server of a device {to} died; create it again, or `udm remove --force {to}`"
            );
        }
        let place = |path: &Path| format!("rename {}", path.display());
        let (log_from, log_to) = (self.runtime.log(from), self.runtime.log(to));
        if log_from.exists() {
            // The log of a device that is gone.
            let _ = std::fs::rename(&log_to, log::before(&log_to));
            std::fs::rename(&log_from, &log_to).with_context(|| place(&log_from))?;
        }
        let control = self.runtime.control(from);
        std::fs::rename(&control, self.runtime.control(to)).with_context(|| place(&control))?;
        self.served.rename(to.as_str())
    }

    /// Wipes the cache of a device that was closed, clean, and says so in `left`.
    pub fn wipe(&self, left: &mut Value, progress: &Arc<AttachProgress>) {
        let text = self.served.given_table();
        let table = udm::table::Table::parse(&text).map_err(anyhow::Error::from);
        let wiped =
            table.and_then(|table| Ok(crate::ground::wipe(&table, &self.runtime, progress)?));
        left["is_wiped"] = json!(wiped.is_ok());
        let name = self.name();
        match wiped {
            Ok(()) => log::line(&format!("{name}: its cache was wiped")),
            Err(error) => {
                log::line(&format!("{name}: its cache was not wiped: {error:#}"));
                left["wipe_failed"] = json!(format!("{error:#}"));
            }
        }
    }

    /// Ends the service of a device at rest, or in `trouble`: files of the name are gone after
    /// this. Returns what stays in the cache.
    pub fn close(&self, trouble: Option<&str>) -> Value {
        let left = self.served.end();
        let name = self.name();
        let fate = if left.is_lost {
            "are lost with the deleted cache device"
        } else {
            "stay in the cache"
        };
        let bytes = human_bytes(left.dirty_bytes);
        let errors = trouble.map_or(String::new(), |why| format!("; with errors: {why}"));
        log::line(&format!("{name}: removed; {bytes} of dirty data {fate}{errors}"));
        self.runtime.clear(&lock(&self.lock), KeepLog::Yes);
        json!({
            "dirty_bytes": left.dirty_bytes,
            "cache": left.cache,
            "is_lost": left.is_lost,
            "notes": left.troubles,
            "trouble": trouble,
        })
    }
}

/// Takes a lock; a thread that panicked in it has ended the process already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
