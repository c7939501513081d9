//! The upkeep of a living server's files in the runtime directory: a file that another program
//! removed is restored within [`KEEP_EVERY`].
//!
//! The thread that accepts commands does it, because the control socket is one of these files. An
//! end that has begun is not disturbed: it removes the files for good.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::log;
use crate::runtime::{DeviceName, RuntimeDir};
use crate::server::Server;

/// Time between two checks of the files.
pub const KEEP_EVERY: Duration = Duration::from_secs(1);

/// The control socket of a server.
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    /// The device and inode of its file.
    file: (u64, u64),
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
        Ok(Control { listener, file: file_at(&path).with_context(place)? })
    }

    /// The next connection. Looks after the files of `server` while it waits.
    pub fn next(
        &mut self,
        server: &Arc<Server>,
        kept: &mut Instant,
    ) -> std::io::Result<UnixStream> {
        loop {
            if kept.elapsed() >= KEEP_EVERY {
                *kept = Instant::now();
                keep(server, self);
            }
            let left = KEEP_EVERY.saturating_sub(kept.elapsed());
            let timeout = Timespec { tv_sec: 0, tv_nsec: left.as_nanos().min(999_999_999) as _ };
            let mut polled = [PollFd::new(&self.listener, PollFlags::IN)];
            let is_ready = poll(&mut polled, Some(&timeout)).is_ok_and(|count| count > 0);
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(stream),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if is_ready => return Err(error),
                Err(_) => {}
            }
        }
    }
}

/// Restores files of shared memory, in a thread of its own: the device has to come to rest.
fn keep_memory(server: &Arc<Server>) {
    let is_wanted = || !server.is_stopping.load(Ordering::SeqCst) && udm::shm::are_nameless();
    if !is_wanted() || server.is_renewing.swap(true, Ordering::SeqCst) {
        return;
    }
    let server = Arc::clone(server);
    let renew = move || {
        match server.served.renew_memory() {
            Ok(()) => tell_made(&server, "shared memory"),
            Err(error) => tell_trouble(&server, &error),
        }
        server.is_renewing.store(false, Ordering::SeqCst);
    };
    // Without a thread, this stays set, and the memory stays without a name.
    let _ = thread::Builder::new().name("memory".into()).spawn(renew);
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

/// Restores missing files. The next check tries again after an error.
fn keep(server: &Arc<Server>, control: &mut Control) {
    let runtime = &server.runtime;
    keep_memory(server);
    let made = server.with_lock(|lock| -> Result<Vec<&str>> {
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
            *control = Control::open(runtime, name)?;
            made.push("control socket");
        }
        if !server.has_notes(name) {
            server.note_table_of(name);
            made.push("table");
        }
        if log::is_elsewhere() && log::reopen()? {
            made.push("log");
        }
        Ok(made)
    });
    match made {
        Some(Ok(made)) if !made.is_empty() => tell_made(server, &made.join(", ")),
        Some(Err(error)) => tell_trouble(server, &error),
        _ => {}
    }
}
