//! Whether the queues of this process work: for a thread that checks the devices every second, and
//! must sleep while they rest.
//!
//! The thread calls [`await_work`] before a check, and [`wait_for_work`] when the state is settled.
//! A queue notes its work when it wakes and before it sleeps. So a change that the check missed is
//! followed by a note, which ends the wait. A note costs one load while the thread does not wait.

use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::sync::statics::Mutex;
use crate::sync::statics::atomic::{AtomicBool, Ordering};

static IS_AWAITED: AtomicBool = AtomicBool::new(false);
/// The thread that waits.
static WAITER: Mutex<Option<Thread>> = Mutex::new(None);

/// Notes that a queue, or another thread, works.
#[inline]
pub fn note_work() {
    if IS_AWAITED.load(Ordering::SeqCst) {
        wake();
    }
}

#[cold]
fn wake() {
    if !IS_AWAITED.swap(false, Ordering::SeqCst) {
        return;
    }
    if let Some(waiter) = &*WAITER.lock().expect("threads do not panic with this lock") {
        waiter.unpark();
    }
}

/// From now on, [`wait_for_work`] waits for the next work. One thread of a process may wait.
pub fn await_work() {
    *WAITER.lock().expect("threads do not panic with this lock") = Some(std::thread::current());
    IS_AWAITED.store(true, Ordering::SeqCst);
}

/// Waits until a thread has worked after the last [`await_work`], or for the `longest` time.
pub fn wait_for_work(longest: Option<Duration>) {
    let start = Instant::now();
    while IS_AWAITED.load(Ordering::SeqCst) {
        match longest.map(|longest| longest.checked_sub(start.elapsed())) {
            None => std::thread::park(),
            Some(Some(left)) if !left.is_zero() => std::thread::park_timeout(left),
            Some(_) => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Queues of other tests may note work at any time, so only this direction can be tested here.
    #[test]
    fn noted_work_or_time_ends_the_wait() {
        await_work();
        wait_for_work(Some(Duration::ZERO));
        for _ in 0..100 {
            await_work();
            let worker = std::thread::spawn(note_work);
            wait_for_work(None);
            worker.join().unwrap();
        }
    }
}
