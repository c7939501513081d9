//! The state of another process that does not answer: whether it is stopped, waits in the kernel
//! for a device, or runs.

use std::fs;

/// A process or thread, by the letter that `ps` has for its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State(char);

impl State {
    /// The state in the text of a `stat` file. The name in it may hold anything, brackets too.
    fn parse(stat: &str) -> Option<State> {
        stat.rsplit_once(')')?.1.trim_start().chars().next().map(State)
    }

    fn of(stat_file: &str) -> Option<State> {
        State::parse(&fs::read_to_string(stat_file).ok()?)
    }
}

/// A description of the state of the process `pid`, which does not answer, with advice.
pub fn doing(pid: i32) -> String {
    let Some(State(letter)) = State::of(&format!("/proc/{pid}/stat")) else {
        return format!("process {pid} has ended; give the command again");
    };
    let advice = "see its log and the kernel log; `kill -9` ends it without loss of completed \
                  writes, and the same `udm create` continues";
    let (hanging, threads) = hanging_threads(pid);
    match letter {
        'T' | 't' => {
            format!("process {pid} is stopped (state {letter}); `kill -CONT {pid}` resumes it")
        }
        'Z' | 'X' => format!("process {pid} is ending (state {letter}); try again"),
        _ if waits_for_mapping(pid) => format!(
            "process {pid} waits in the kernel for a mapped file, which is the cache device of a \
             pcache, or of a writecache in mode p; it goes on when the device answers: look at the \
             kernel's log"
        ),
        _ if hanging > 0 => format!(
            "process {pid} waits for a device in the kernel (state D: {hanging} of {threads} \
             threads); it continues when the device answers: see the kernel log"
        ),
        _ => format!("process {pid} runs (state {letter}); {advice}"),
    }
}

/// The number of the system call that writes out a mapped file.
const MSYNC: &str = if cfg!(target_arch = "x86_64") { "26" } else { "227" };
/// In place of such a number: the thread waits for a page.
const NO_CALL: &str = "-1";

/// Whether a thread of `pid` waits until a mapped file is written out, or until it gets a page.
fn waits_for_mapping(pid: i32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.map(|task| task.path()).any(|task| {
        let call = fs::read_to_string(task.join("syscall")).unwrap_or_default();
        let number = call.split_whitespace().next();
        let state = State::of(&task.join("stat").to_string_lossy());
        number == Some(MSYNC) || number == Some(NO_CALL) && state == Some(State('D'))
    })
}

/// How many threads of `pid` are in uninterruptible sleep, and how many there are.
fn hanging_threads(pid: i32) -> (usize, usize) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let states = tasks.map(|task| State::of(&task.path().join("stat").to_string_lossy()));
    let states: Vec<State> = states.flatten().collect();
    (states.iter().filter(|state| **state == State('D')).count(), states.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_found_behind_any_name() {
        assert_eq!(State::parse("7 (udm: vol) S 1 7 7"), Some(State('S')));
        assert_eq!(State::parse("7 (a) D (x) T) D 1"), Some(State('D')));
        assert_eq!(State::parse("7 (udm"), None);
        let own = std::process::id() as i32;
        assert!(doing(own).starts_with(&format!("process {own} ")));
        assert!(doing(i32::MAX).contains("has ended"));
    }
}
