//! How a ring's thread is woken, at the price of a system call only if it sleeps.
//!
//! Sequentially consistent on both sides: either the sleeper sees the signal before it waits, or
//! the signaller sees that it sleeps.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, Ordering};

/// Whether a ring's thread sleeps, and whether it was asked to wake.
#[derive(Debug, Default)]
pub(super) struct Bell {
    is_asleep: AtomicBool,
    is_signalled: AtomicBool,
}

impl Bell {
    /// Asks the thread to wake. Returns whether it sleeps, and so needs the system call.
    #[must_use]
    pub(super) fn ring(&self) -> bool {
        self.is_signalled.store(true, Ordering::SeqCst);
        self.is_asleep.swap(false, Ordering::SeqCst)
    }

    /// The thread is about to look: it sees everything that was done before any earlier `ring`.
    pub(super) fn answer(&self) {
        self.is_signalled.store(false, Ordering::SeqCst);
    }

    /// The thread has nothing to do. Returns whether it may sleep.
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
    //! Tests of a thread that sleeps, and of others that give it work.

    use shuttle::thread;

    use super::Bell;
    use crate::prng::Prng;
    use crate::schedules::Story;
    use crate::sync::atomic::{AtomicU64, Ordering};
    use crate::sync::{Arc, Condvar, Mutex, lock};

    pub(crate) const STORIES: &[Story] = &[Story { name: "bell", play: bell, times: 16 }];

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
    struct Desk {
        bell: Bell,
        event: Event,
        work: AtomicU64,
    }

    /// All work is done, or the thread sleeps for ever.
    fn bell(mut prng: Prng) {
        let desk = Arc::new(Desk::default());
        let mut threads = Vec::new();
        for _ in 0..2 {
            let (desk, pause) = (desk.clone(), prng.below(6));
            threads.push(thread::spawn(move || {
                for _ in 0..2 {
                    (0..pause).for_each(|_| thread::yield_now());
                    desk.work.fetch_add(1, Ordering::SeqCst);
                    if desk.bell.ring() {
                        desk.event.add();
                    }
                }
            }));
        }
        let mut done = 0;
        while done < 4 {
            desk.bell.answer();
            let work = desk.work.swap(0, Ordering::SeqCst);
            done += work;
            if work == 0 {
                if desk.bell.lie_down() {
                    desk.event.wait();
                }
                desk.bell.get_up();
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
