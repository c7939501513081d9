//! The notifier of a ring's thread: a wake-up costs a system call only if the thread sleeps.
//!
//! Sequentially consistent on both sides: either the sleeper sees the signal before it waits, or
//! the signaller sees that it sleeps.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};

/// Whether a ring's thread sleeps, and whether it was asked to wake.
#[derive(Debug, Default)]
pub(super) struct Notifier {
    is_asleep: AtomicBool,
    is_signalled: AtomicBool,
}

impl Notifier {
    /// Asks the thread to wake. Returns whether it sleeps, and so needs the system call.
    #[must_use]
    pub(super) fn ring(&self) -> bool {
        self.is_signalled.store(true, Ordering::SeqCst);
        self.is_asleep.swap(false, Ordering::SeqCst)
    }

    /// The thread is about to check: it sees the results of all earlier calls of `ring`.
    pub(super) fn answer(&self) {
        self.is_signalled.store(false, Ordering::SeqCst);
    }

    /// The thread is idle. Returns whether it may sleep.
    #[must_use]
    pub(super) fn lie_down(&self) -> bool {
        self.is_asleep.store(true, Ordering::SeqCst);
        !self.is_signalled.load(Ordering::SeqCst) || mutants::is(Mutant::BellUnheard)
    }

    /// The thread is awake.
    pub(super) fn get_up(&self) {
        self.is_asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[cfg(feature = "shuttle")]
pub(crate) mod schedules {
    //! Tests of a thread that sleeps, and of other threads that give it work.

    use shuttle::thread;

    use super::Notifier;
    use crate::prng::Prng;
    use crate::schedules::Case;
    use crate::sync::atomic::{AtomicU64, Ordering};
    use crate::sync::{Arc, Condvar, Mutex, lock};

    pub(crate) const CASES: &[Case] = &[Case { name: "notifier", play: notifier, times: 16 }];

    /// What an eventfd is.
    #[derive(Default)]
    struct Event {
        count: Mutex<u64>,
        signal: Condvar,
    }

    impl Event {
        fn wait(&self) {
            let mut count = lock(&self.count);
            while *count == 0 {
                count = self.signal.wait(count).unwrap();
            }
            *count = 0;
        }

        fn add(&self) {
            *lock(&self.count) += 1;
            self.signal.notify_one();
        }
    }

    #[derive(Default)]
    struct Worker {
        notifier: Notifier,
        event: Event,
        work: AtomicU64,
    }

    /// All work is done, or the thread sleeps indefinitely.
    fn notifier(mut prng: Prng) {
        let worker = Arc::new(Worker::default());
        let mut threads = Vec::new();
        for _ in 0..2 {
            let (worker, pause) = (worker.clone(), prng.below(6));
            threads.push(thread::spawn(move || {
                for _ in 0..2 {
                    (0..pause).for_each(|_| thread::yield_now());
                    worker.work.fetch_add(1, Ordering::SeqCst);
                    if worker.notifier.ring() {
                        worker.event.add();
                    }
                }
            }));
        }
        let mut done = 0;
        while done < 4 {
            worker.notifier.answer();
            let work = worker.work.swap(0, Ordering::SeqCst);
            done += work;
            if work == 0 {
                if worker.notifier.lie_down() {
                    worker.event.wait();
                }
                worker.notifier.get_up();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
