//! Processor time: of a thread, of the process, of other threads by their name, and of a child.
//!
//! A request costs the time of its caller's thread, and the time of other threads that work for it:
//! the background that writes back, the export's threads. Wall-clock time hides the second part
//! while a processor is free for it.

use rustix::time::{ClockId, clock_gettime};

fn nanos(clock: ClockId) -> f64 {
    let time = clock_gettime(clock);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Time of the calling thread, in nanoseconds.
pub fn of_thread() -> f64 {
    nanos(ClockId::ThreadCPUTime)
}

/// What all threads of this process have spent, in nanoseconds, those that have ended too.
pub fn of_process() -> f64 {
    nanos(ClockId::ProcessCPUTime)
}

/// What all threads of this process have spent in the program itself, not in the kernel, in
/// nanoseconds. The kernel tells the two apart by samples, one for each tick.
pub fn of_program() -> f64 {
    // SAFETY: all zeroes are a valid value of this structure of numbers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `rusage`, to a place that is ours.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } != 0 {
        return 0.0;
    }
    usage.ru_utime.tv_sec as f64 * 1e9 + usage.ru_utime.tv_usec as f64 * 1e3
}

/// Time of the threads of this process with this name, in nanoseconds; for running threads within a
/// tick of the kernel.
pub fn of_threads(name: &str) -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let read = |task: &std::fs::DirEntry, file: &str| {
        std::fs::read_to_string(task.path().join(file)).unwrap_or_default()
    };
    let spent = |task: std::fs::DirEntry| {
        // The kernel keeps 15 characters of a name.
        let wanted: String = name.chars().take(15).collect();
        let is_ours = read(&task, "comm").trim_end() == wanted;
        let nanos = read(&task, "schedstat");
        let nanos = nanos.split(' ').next().and_then(|word| word.parse().ok());
        if is_ours { nanos.unwrap_or(0.0) } else { 0.0 }
    };
    tasks.flatten().map(spent).sum()
}

/// How often the threads of this process whose names begin so have gone to sleep.
pub fn sleeps_of_threads(name: &str) -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let sleeps = tasks.flatten().map(|task| {
        let text = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let field = |field: &str| text.lines().find_map(|line| line.strip_prefix(field));
        let is_ours = field("Name:").is_some_and(|found| found.trim().starts_with(name));
        let count = field("voluntary_ctxt_switches:").and_then(|word| word.trim().parse().ok());
        if is_ours { count.unwrap_or(0.0) } else { 0.0 }
    });
    sleeps.sum()
}

/// Time of a child and its ended threads, in nanoseconds. The child has not been waited for yet, so
/// the number is the child's own. `/proc/PID/stat` is not used: it counts in ticks of 10 ms, and a
/// short measurement may show none.
pub fn of_child(pid: u32) -> f64 {
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the call writes one number, to a place that is ours.
    let status = unsafe { libc::clock_getcpuclockid(pid.cast_signed(), &mut clock) };
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`, to a place that is ours.
    if status != 0 || unsafe { libc::clock_gettime(clock, &mut time) } != 0 {
        return 0.0;
    }
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Processor time of some requests, in nanoseconds for each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Of the threads that asked.
    pub clients: f64,
    /// Of all others of the process while the clients ran: the background.
    pub beside: f64,
    /// Time of the background afterwards, until all data was written back.
    pub after: f64,
}

impl Spent {
    /// All of it.
    pub fn in_all(&self) -> f64 {
        self.clients + self.beside + self.after
    }
}

/// Separates clients' processor time from the rest of the process.
#[derive(Debug)]
pub struct Meter {
    before: f64,
    beside: f64,
    clients: f64,
}

impl Meter {
    /// Begins, before clients do.
    pub fn start() -> Meter {
        Meter { before: of_process(), beside: 0.0, clients: 0.0 }
    }

    /// The clients are done, and have spent this much.
    pub fn clients_done(&mut self, clients: f64) {
        self.clients = clients;
        self.beside = (of_process() - self.before - clients).max(0.0);
    }

    /// Everything is written back: what each of `count` requests took.
    pub fn finish(self, count: u64) -> Spent {
        let all = of_process() - self.before;
        let after = (all - self.clients - self.beside).max(0.0);
        let each = |nanos: f64| nanos / count.max(1) as f64;
        Spent { clients: each(self.clients), beside: each(self.beside), after: each(after) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burn(nanos: f64) {
        let start = of_thread();
        while of_thread() - start < nanos {}
    }

    #[test]
    fn threads_are_told_apart() {
        let mut meter = Meter::start();
        let own = of_thread();
        burn(20e6);
        std::thread::scope(|scope| {
            let named = std::thread::Builder::new().name("udm-burns-a-long-name".into());
            let thread = named.spawn_scoped(scope, || {
                burn(30e6);
                of_threads("udm-burns-a-long-name")
            });
            let seen = thread.expect("a thread").join().expect("no panic");
            // No other test of this process has a thread of this name.
            assert!((20e6..60e6).contains(&seen), "{seen}");
        });
        meter.clients_done(of_thread() - own);
        let spent = meter.finish(10);
        assert!(spent.clients >= 2e6, "{spent:?}");
        assert!(spent.beside >= 3e6, "{spent:?}");
        assert!(spent.in_all() >= 5e6, "{spent:?}");
    }

    #[test]
    fn a_child_is_seen_before_a_tick_of_the_kernel_is_over() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let start = std::time::Instant::now();
        while of_child(child.id()) == 0.0 && start.elapsed().as_secs() < 60 {}
        let spent = of_child(child.id());
        child.kill().expect("it sleeps");
        child.wait().expect("it is ours");
        assert!(0.0 < spent && spent < 5e9, "{spent}");
        assert_eq!(of_child(child.id()), 0.0, "there is none any more");
    }
}
