//! The state of a device's server that its threads share: the device with its exports, and the
//! names under which commands and clients find it. `daemon.rs` starts and ends its process,
//! `methods.rs` answers commands.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use udm::base::attaching::AttachProgress;
use udm::units::human_bytes;

use crate::loading::recoveries;
use crate::log;
use crate::runtime::{DeviceName, KeepLog, NameLock, RuntimeDir};
use crate::served::Served;
use crate::spec::Spec;
use crate::{dead, last_end};

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
    /// `remove` asked for it and waits for the answer. The device is at rest, or its end was forced
    /// in spite of an error.
    Removed {
        /// Receives the facts about the data that remains in the cache.
        asked: SyncSender<Result<Value>>,
        /// The error of a forced end.
        trouble: Option<String>,
        /// The cache is to be wiped, with this progress.
        wipe: Option<Arc<AttachProgress>>,
    },
}

/// The facts about the active table that a server writes down for the next one.
#[derive(Debug)]
pub struct TableNotes {
    table: String,
    /// The marks of its caches, if they may get dirty data.
    marks: Vec<String>,
}

/// A running server, as its threads share it.
#[derive(Debug)]
pub struct Server {
    /// The runtime directory.
    pub runtime: Arc<RuntimeDir>,
    /// The device and its exports.
    pub served: Served,
    /// The address where the server answers requests for metrics.
    pub metrics: Option<SocketAddr>,
    /// Whether a cache device was formatted for it.
    pub has_formatted: bool,
    /// When it began to serve, in seconds since 1970.
    pub started: u64,
    /// Tells the main thread to end.
    pub stop: Sender<Stop>,
    /// Control connections that are open.
    pub connections: AtomicUsize,
    lock: Mutex<NameLock>,
    /// A thread restores files of shared memory.
    pub is_renewing: AtomicBool,
    /// There is a file with the marks of its caches.
    has_media: AtomicBool,
    /// The last error of the upkeep of files.
    trouble: Mutex<String>,
}

/// The process name of the server of `name`.
pub fn title(name: &DeviceName) -> String {
    format!("udm: {name}")
}

/// Sets the process's name to the device's name. The kernel keeps 15 bytes of it; the command line
/// does not change.
pub fn set_title(name: &DeviceName) {
    // Without /proc, the process keeps the program's name.
    let _ = std::fs::write("/proc/self/comm", title(name));
}

impl Server {
    /// The device and its exports, which still refuse clients, without a thread that answers
    /// commands.
    pub fn build(
        spec: &Spec,
        runtime: Arc<RuntimeDir>,
        lock: NameLock,
        stop: Sender<Stop>,
    ) -> Result<Server> {
        let served = Served::build(spec, Arc::clone(&runtime), &lock)?;
        if let Err(error) = served.open_exports(&spec.exports) {
            // A refused device leaves no trace on its media or in memory.
            served.undo();
            return Err(error);
        }
        Ok(Server {
            runtime,
            served,
            metrics: None,
            has_formatted: spec.progress.has_formatted(),
            started: log::now_seconds(),
            stop,
            lock: Mutex::new(lock),
            is_renewing: AtomicBool::new(false),
            has_media: AtomicBool::new(false),
            trouble: Mutex::default(),
            connections: AtomicUsize::new(0),
        })
    }

    /// The device's name, which `rename` changes.
    pub fn name(&self) -> DeviceName {
        lock(&self.lock).name().clone()
    }

    /// The path of the server's log, unless it logs to a terminal or to a file that udm did not
    /// open.
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
            "formatted": self.has_formatted,
            "log": self.log(),
        });
        if let Some(address) = self.metrics {
            ready["metrics"] = json!(format!("http://{address}/metrics"));
        }
        ready
    }

    /// Writes down the active table, for the next server if this one dies.
    pub fn note_table(&self) {
        let notes = self.table_notes();
        let own = lock(&self.lock);
        self.note_table_of(own.name(), notes);
    }

    /// What [`Server::note_table`] writes. It reads the cache devices, which may hang, so it is not
    /// for a caller that has the lock of the name.
    pub fn table_notes(&self) -> TableNotes {
        let (table, dirty) = (self.served.given_table(), self.served.dirty().bytes);
        let may_have_dirty = dead::may_have_dirty(&table, dirty) && !self.served.is_read_only();
        let marks = match may_have_dirty {
            true => dead::marks(&self.runtime, &table),
            false => Vec::new(),
        };
        TableNotes { table, marks }
    }

    /// Writes them down, for a caller that has the lock of the name.
    pub fn note_table_of(&self, name: &DeviceName, notes: TableNotes) {
        // Another table may have taken effect since they were read.
        let is_fresh = notes.table == self.served.given_table();
        let TableNotes { table, marks } = if is_fresh { notes } else { self.table_notes() };
        let path = self.runtime.table(name);
        let new = self.runtime.new_table(name);
        // Without this file, the next server does not compare tables. If the server dies here, a
        // complete table remains.
        let _ = std::fs::remove_file(&new);
        let is_written = std::fs::write(&new, &table);
        let _ = is_written.and_then(|()| std::fs::rename(&new, &path));
        let has_media = dead::remember(&self.runtime, name, marks);
        self.has_media.store(has_media, Ordering::SeqCst);
    }

    /// Whether the files that [`Server::note_table`] writes are there.
    pub fn has_notes(&self, name: &DeviceName) -> bool {
        let has_media = self.has_media.load(Ordering::SeqCst);
        self.runtime.table(name).exists() && (!has_media || self.runtime.media(name).exists())
    }

    /// Works on the files of the device's name, unless its end has begun, which removes them.
    pub fn with_lock<T>(&self, work: impl FnOnce(&mut NameLock) -> T) -> Option<T> {
        let mut own = lock(&self.lock);
        (!self.served.is_stopping()).then(|| work(&mut own))
    }

    /// Whether this trouble of the files differs from the last one.
    pub fn is_first_trouble(&self, trouble: &str) -> bool {
        let mut last = lock(&self.trouble);
        let is_first = *last != trouble;
        trouble.clone_into(&mut last);
        is_first
    }

    /// Renames the device, if the new name is free.
    pub fn rename(&self, to: &DeviceName) -> Result<()> {
        self.served.refuse_ending()?;
        let notes = self.table_notes();
        let mut own = lock(&self.lock);
        self.served.refuse_ending()?;
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
        last_end::begin(new.file());
        let old = std::mem::replace(&mut *own, new);
        self.runtime.clear(&old, KeepLog::Yes);
        log::moves_to(&self.runtime.log(to));
        // With the lock: an end that begins now removes these files.
        self.note_table_of(to, notes);
        drop(own);
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

    /// Wipes the cache of a clean device that was closed, and records the result in `left`.
    pub fn wipe(&self, left: &mut Value, progress: &Arc<AttachProgress>) {
        let text = self.served.given_table();
        let table = udm::table::Table::parse(&text).map_err(anyhow::Error::from);
        let wiped =
            table.and_then(|table| Ok(crate::platform::wipe(&table, &self.runtime, progress)?));
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
    /// this. Returns the facts about the data that remains in the cache.
    pub fn close(&self, trouble: Option<&str>) -> Value {
        let name = self.name();
        dead::expect_end(&self.runtime, &name);
        let left = self.served.end();
        let fate = match (left.is_lost, &left.failure) {
            (true, _) => "are lost with the deleted cache device",
            (_, Some(_)) => "were in the cache, which has failed",
            _ => "stay in the cache",
        };
        let bytes = human_bytes(left.dirty_bytes);
        let errors = trouble.map_or(String::new(), |why| format!("; with errors: {why}"));
        log::line(&format!("{name}: removed; {bytes} of dirty data {fate}{errors}"));
        self.runtime.clear(&lock(&self.lock), KeepLog::Yes);
        json!({
            "dirty_bytes": left.dirty_bytes,
            "cache": left.cache,
            "recover": recoveries(&self.served.given_table()),
            "is_lost": left.is_lost,
            "is_origin_marked": left.is_origin_marked,
            "medium_failure": left.failure,
            "notes": left.troubles,
            "trouble": trouble,
        })
    }
}

/// Takes a lock; a thread that panicked in it has ended the process already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
