//! All locks and atomics, in one place, so that a test build can swap them for a scheduler's own:
//! with the feature `shuttle` every lock and every atomic is a point where another thread may run,
//! and the scheduler decides which; with the feature `loom` atomics also show what their orderings
//! allow. Products are built with neither, and use std's.

#[cfg(all(feature = "shuttle", feature = "loom"))]
compile_error!("the features `shuttle` and `loom` exclude each other");

#[cfg(not(any(feature = "shuttle", feature = "loom")))]
mod chosen {
    pub use std::sync::atomic;
    pub use std::sync::atomic::AtomicU64 as SharedWord;
    pub use std::sync::{Condvar, Mutex, MutexGuard};
    pub use std::thread::{ThreadId, current as current_thread};
}

#[cfg(feature = "shuttle")]
mod chosen {
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub use shuttle::thread::{ThreadId, current as current_thread};

    use std::sync::atomic::{AtomicU64, Ordering};

    /// An `AtomicU64` in memory that other processes map: it must be laid out like std's. At each
    /// access another thread may run.
    #[derive(Debug)]
    #[repr(transparent)]
    pub struct SharedWord(AtomicU64);

    impl SharedWord {
        /// A word of this process alone.
        pub fn new(value: u64) -> SharedWord {
            SharedWord(AtomicU64::new(value))
        }

        /// As std's.
        pub fn load(&self, order: Ordering) -> u64 {
            others_may_go_on();
            self.0.load(order)
        }

        /// As std's.
        pub fn store(&self, value: u64, order: Ordering) {
            others_may_go_on();
            self.0.store(value, order);
        }

        /// Its value at this very moment: no other thread runs in between.
        #[cfg(test)]
        pub fn peek(&self) -> u64 {
            self.0.load(Ordering::SeqCst)
        }
    }

    /// Any access of an atomic of the scheduler's own is a switch.
    pub fn others_may_go_on() {
        atomic::AtomicBool::new(false).load(Ordering::SeqCst);
    }
}

#[cfg(feature = "loom")]
mod chosen {
    pub use loom::sync::atomic;
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use loom::thread::{ThreadId, current as current_thread};
    pub use std::sync::atomic::AtomicU64 as SharedWord;
}

#[cfg(all(test, feature = "shuttle"))]
pub use chosen::others_may_go_on;
pub use chosen::{Condvar, Mutex, MutexGuard, SharedWord, ThreadId, atomic, current_thread};
pub use std::sync::{Arc, OnceLock, Weak};

/// For statics, always std's: they live longer than any one schedule.
pub mod statics {
    pub use std::sync::{Mutex, atomic};
}

/// Takes a lock. A panic while one is held leaves state that other threads must not use, so a
/// poisoned lock panics here too; servers turn every panic into the end of the process, which a
/// crash-safe engine survives.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a thread panicked while it held this lock")
}

/// Takes a lock that is never held for more than a few microseconds: spins for about as long before
/// it sleeps, because waking up takes longer than all that the holder does.
#[cfg(not(any(feature = "shuttle", feature = "loom")))]
pub fn lock_soon<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    const LOOKS: u32 = 64;
    const PAUSES: u32 = 8;
    for _ in 0..LOOKS {
        if let Ok(guard) = mutex.try_lock() {
            return guard;
        }
        (0..PAUSES).for_each(|_| std::hint::spin_loop());
    }
    lock(mutex)
}

/// A scheduler decides which thread runs next: spinning is useless.
#[cfg(any(feature = "shuttle", feature = "loom"))]
pub fn lock_soon<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    lock(mutex)
}
