//! How a server ended, for the log of the next one.
//!
//! The lock's file of a name (`NAME.lock`) is removed at an orderly end. If it is there when the
//! next server starts, the last server died, and the file holds its record. The lines are the
//! process, the boot of the machine, and, if the server could still write it, the kind of its end.
//! After SIGKILL or a crash, the third line is missing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// The kernel's file with the identity of the present boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The record of this process, if it is a server.
static RECORD: Mutex<Option<File>> = Mutex::new(None);

/// The identity of the present boot.
pub fn boot() -> String {
    std::fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned()
}

fn head() -> String {
    format!("{}\n{}\n", std::process::id(), boot())
}

/// Begins the record of this process, the server of a name, in the lock's file.
pub fn begin(lock: &File) {
    // Without a record, the next server reports that it does not know.
    write(lock, &head());
    let record = lock.try_clone().ok();
    *RECORD.lock().unwrap_or_else(PoisonError::into_inner) = record;
}

/// This process is not the server any more: the lock's file is closed, and with it the lock.
pub fn give_up() {
    *RECORD.lock().unwrap_or_else(PoisonError::into_inner) = None;
}

/// Records how this process is about to end.
pub fn record(how: &str) {
    // A panic in the thread that has the lock must not wait for it.
    let Ok(record) = RECORD.try_lock() else { return };
    if let Some(file) = &*record {
        write(file, &format!("{}{how}\n", head()));
    }
}

/// Writes the record of an earlier server again, after an attempt to continue it has failed.
pub fn restore(lock: &File, record: &str) {
    write(lock, record);
}

fn write(file: &File, text: &str) {
    let _ = file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0));
}

/// The process in a record.
pub fn process_of(record: &str) -> Option<i32> {
    record.lines().next()?.trim().parse().ok().filter(|pid| *pid > 0)
}

/// A description of how the server of `record` ended, which died.
pub fn told(record: &str) -> String {
    let mut lines = record.lines();
    let who = match lines.next().filter(|pid| !pid.is_empty()) {
        Some(pid) => format!("process {pid}"),
        None => "its process".into(),
    };
    let (then, how) = (lines.next().unwrap_or_default(), lines.next());
    match how {
        Some(how) => format!("{who} ended {how}"),
        None if then != boot() && !then.is_empty() => {
            format!("{who} ended with the last boot of this machine")
        }
        None => format!(
            "it is not known how {who} ended; SIGKILL (also by the kernel when memory is short) \
             and crashes leave no record here, but the kernel's log may have one"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_told_as_far_as_it_was_recorded() {
        let told_of = |how: &str| told(&format!("77\n{}\n{how}", boot()));
        assert_eq!(told_of("by signal 3 (SIGQUIT)\n"), "process 77 ended by signal 3 (SIGQUIT)");
        assert!(told_of("").starts_with("it is not known how process 77 ended; SIGKILL"));
        assert!(told("").contains("how its process ended"));
        assert_eq!(told("77\nother\n"), "process 77 ended with the last boot of this machine");
        assert_eq!(
            (process_of("77\nother\n"), process_of("-1"), process_of("")),
            (Some(77), None, None)
        );
    }
}
