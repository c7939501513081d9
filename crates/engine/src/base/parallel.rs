//! Threads that share the work of opening a cache. Engines do not start threads themselves; they
//! only get the number of threads that may help.

use crate::sync::statics::Mutex;
use crate::sync::statics::atomic::{AtomicUsize, Ordering};

/// How many threads can be at work at the same time.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A parallel for: does `work` on each of `items` at the same time, as far as there can be threads:
/// this one does what is left. Returns the results in the order of the items.
pub fn each<T: Send, R: Send>(items: &mut [T], work: impl Fn(&mut T) -> R + Sync) -> Vec<R> {
    let tasks: Vec<_> = items.iter_mut().map(|item| Mutex::new((item, None))).collect();
    let next = AtomicUsize::new(0);
    let help = || {
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut task = task.lock().expect("no other thread has this task");
            task.1 = Some(work(task.0));
        }
    };
    std::thread::scope(|scope| {
        let start =
            || std::thread::Builder::new().name("udm-each".into()).spawn_scoped(scope, help);
        let _helpers: Vec<_> = (1..tasks.len()).map_while(|_| start().ok()).collect();
        help();
    });
    let result = |task: Mutex<(_, Option<R>)>| task.into_inner().ok()?.1;
    tasks.into_iter().map(|task| result(task).expect("each task is done")).collect()
}

#[cfg(test)]
mod tests {
    use super::each;

    #[test]
    fn each_is_done_once_and_keeps_its_place() {
        let mut items = [1, 2, 3];
        let results = each(&mut items, |item| {
            *item *= 10;
            *item + 1
        });
        assert_eq!((items, results), ([10, 20, 30], vec![11, 21, 31]));
        assert!(each(&mut [] as &mut [u8], |_| ()).is_empty());
    }

    #[test]
    #[should_panic(expected = "told on")]
    fn a_panic_is_passed_on() {
        each(&mut [1, 2], |item| assert!(*item < 2, "told on"));
    }
}
