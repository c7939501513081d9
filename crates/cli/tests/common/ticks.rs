//! A clock for bounds that are a test's subject: the caller ends before a timeout of udm's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Counts the wake-ups of a thread that sleeps 10 ms at a time. The count does not advance while
/// the machine is stopped, and advances slowly while other programs take the processors.
pub struct Ticks {
    count: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
}

impl Ticks {
    pub fn start() -> Ticks {
        let ticks = Ticks { count: Arc::default(), is_over: Arc::default() };
        let (count, is_over) = (ticks.count.clone(), ticks.is_over.clone());
        std::thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        ticks
    }

    pub fn seconds(&self) -> f64 {
        self.count.load(Ordering::Relaxed) as f64 / 100.0
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}
