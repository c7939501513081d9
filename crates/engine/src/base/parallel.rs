//! Threads that share the work of opening a cache. Engines do not start threads themselves; they
//! only get the number of threads that may help.

/// How many threads can be at work at the same time.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A parallel for: does `work` on each of `items` at the same time, the first one on this thread.
/// Returns the results in the order of the items.
pub fn each<T: Send, R: Send>(items: &mut [T], work: impl Fn(&mut T) -> R + Sync) -> Vec<R> {
    let work = &work;
    let Some((first, others)) = items.split_first_mut() else { return Vec::new() };
    std::thread::scope(|scope| {
        let others: Vec<_> =
            others.iter_mut().map(|item| scope.spawn(move || work(item))).collect();
        let mut results = vec![work(first)];
        results.extend(others.into_iter().map(|other| match other.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }));
        results
    })
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
