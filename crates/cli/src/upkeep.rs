//! The upkeep of a living server's files in the runtime directory: a file that another program
//! removed is restored within [`KEEP_EVERY`].
//!
//! The thread that accepts commands does it, because the control socket is one of these files. An
//! end that has begun is not disturbed: it removes the files for good. The thread sleeps until the
//! kernel reports a change (`changes.rs`), or checks every second if that is not possible.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::changes::Changes;
use crate::log;
use crate::runtime::{DeviceName, RuntimeDir};
use crate::server::Server;

/// Least time between two checks of the files.
pub const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The control socket of a server.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    /// The device and inode of its file.
    file: (u64, u64),
    /// `None` until the first check, and where the kernel does not report changes.
    changes: Option<Changes>,
    /// The time of the last check, or of the beginning.
    checked: Instant,
    /// Another check is due, [`KEEP_EVERY`] after the last one.
    is_due: bool,
}

impl Control {
    /// Opens the control socket of `name`, whose lock this process has: a file at its path belongs
    /// to a dead server.
    pub fn open(runtime: &RuntimeDir, name: &DeviceName) -> Result<Control> {
        let path = runtime.control(name);
        let place = || format!("control socket {}", path.display());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error).with_context(place)?,
            _ => {}
        }
        let listener = UnixListener::bind(runtime.control_address(name)).with_context(place)?;
        listener.set_nonblocking(true).with_context(place)?;
        let file = file_at(&path).with_context(place)?;
        Ok(Control { listener, file, changes: None, checked: Instant::now(), is_due: true })
    }

    /// The next connection. Looks after the files of `server` while it waits.
    pub fn next(&mut self, server: &Arc<Server>) -> std::io::Result<UnixStream> {
        loop {
            if self.is_due && self.checked.elapsed() >= KEEP_EVERY {
                self.check(server);
            }
            let is_ready = self.wait();
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if is_ready => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Waits for a connection, a change of the files, or the next check. Returns whether there may
    /// be a connection.
    fn wait(&mut self) -> bool {
        let connections = PollFd::new(&self.listener, PollFlags::IN);
        let mut polled = [connections.clone(), connections];
        let mut timeout = None;
        match &self.changes {
            Some(changes) if !self.is_due => polled[1] = changes.polled(),
            _ => {
                let left = KEEP_EVERY.saturating_sub(self.checked.elapsed());
                let nanos = left.as_nanos().min(999_999_999);
                timeout = Some(Timespec { tv_sec: 0, tv_nsec: nanos as _ });
            }
        }
        let count = poll(&mut polled, timeout.as_ref());
        let has_come = |polled: &PollFd<'_>| !polled.revents().is_empty();
        let (is_ready, has_report) = (has_come(&polled[0]), has_come(&polled[1]));
        self.is_due |= count.is_err() || timeout.is_some() || has_report;
        is_ready
    }

    /// Checks the files. Changes are reported from before the check.
    fn check(&mut self, server: &Arc<Server>) {
        self.checked = Instant::now();
        if self.changes.is_none() {
            self.changes = Changes::new().ok();
        }
        let is_watched = |changes: &Changes| {
            changes.forget();
            let has_guard = server.with_lock(|lock| lock.report_guard(changes.polled_fd()));
            has_guard == Some(true) && changes.watch(server.runtime.path()).is_ok()
        };
        let is_watching = self.changes.as_ref().is_some_and(is_watched);
        let is_settled = keep(server, self);
        self.is_due = !is_watching || !is_settled;
    }
}

/// Restores files of shared memory, in a thread of its own: the device has to come to rest.
fn keep_memory(server: &Arc<Server>) {
    // A drain before a removal may take hours, and its clients need the memory.
    let is_wanted = !server.served.is_stopping() && udm::shm::are_nameless();
    if !is_wanted || server.is_renewing.swap(true, Ordering::SeqCst) {
        return;
    }
    let shared = Arc::clone(server);
    let renew = move || {
        let may = || match shared.served.is_stopping() {
            true => bail!("the device is being removed"),
            false => Ok(()),
        };
        match shared.served.renew_memory(may) {
            Ok(()) => tell_made(&shared, "shared memory"),
            Err(_) if shared.served.is_stopping() => {}
            Err(error) => tell_trouble(&shared, &error),
        }
        shared.is_renewing.store(false, Ordering::SeqCst);
    };
    // Without a thread, the memory stays without a name until a later check.
    if thread::Builder::new().name("memory".into()).spawn(renew).is_err() {
        server.is_renewing.store(false, Ordering::SeqCst);
    }
}

fn tell_made(server: &Server, made: &str) {
    let name = server.name();
    log::line(&format!(
        "{name}: files in the runtime directory were removed, and were restored: {made}"
    ));
}

fn tell_trouble(server: &Server, error: &anyhow::Error) {
    let text = format!("{error:#}");
    if server.is_first_trouble(&text) {
        log::line(&format!("{}: removed files cannot be restored: {text}", server.name()));
    }
}

fn file_at(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

/// Restores the files about the table, and returns whether it did. Their facts are read without the
/// lock, since a hanging cache device must not keep others from the name.
fn keep_notes(server: &Server) -> bool {
    if server.has_notes(&server.name()) {
        return false;
    }
    let notes = server.table_notes();
    server.with_lock(|lock| server.note_table_of(lock.name(), notes)).is_some()
}

/// Restores missing files. Returns whether all of them are there; if not, the next check tries
/// again.
fn keep(server: &Arc<Server>, control: &mut Control) -> bool {
    let runtime = &server.runtime;
    keep_memory(server);
    let mut made = server.with_lock(|lock| -> Result<Vec<&str>> {
        lock.answer_guard();
        let mut made = Vec::new();
        let is_new_place = runtime.renew()?;
        if is_new_place {
            made.push("directory");
        }
        // First: without it, the other files may belong to another server.
        if lock.renew(runtime, is_new_place)? {
            made.push("lock");
        }
        let name = lock.name();
        if file_at(&runtime.control(name)).ok() != Some(control.file) {
            let Control { listener, file, .. } = Control::open(runtime, name)?;
            (control.listener, control.file) = (listener, file);
            made.push("control socket");
        }
        if log::is_elsewhere() && log::reopen()? {
            made.push("log");
        }
        Ok(made)
    });
    if let Some(Ok(made)) = &mut made
        && keep_notes(server)
    {
        made.push("table");
    }
    let is_settled = match &made {
        Some(Ok(made)) => made.is_empty() && server.has_notes(&server.name()),
        // An end that has begun may still fail.
        Some(Err(_)) | None => false,
    };
    match made {
        Some(Ok(made)) if !made.is_empty() => tell_made(server, &made.join(", ")),
        Some(Err(error)) => tell_trouble(server, &error),
        _ => {}
    }
    is_settled && !server.is_renewing.load(Ordering::SeqCst) && !udm::shm::are_nameless()
}
