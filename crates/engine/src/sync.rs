//! The locks and atomics of the house, in one place, so that a test build can swap them for a
//! scheduler's own.

pub use std::sync::atomic;
pub use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

/// Takes a lock. A panic while one is held leaves state that nobody may go on with, so a poisoned
/// lock panics here too; servers turn every panic into the end of the process, which a crash-safe
/// engine survives.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a thread panicked while it held this lock")
}
