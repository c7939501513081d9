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

/// What the process `pid`, which does not answer, is doing, and what helps.
pub fn doing(pid: i32) -> String {
    let Some(State(letter)) = State::of(&format!("/proc/{pid}/stat")) else {
        return format!("process {pid} has ended; give the command again");
    };
    let advice = "look at its log and at the kernel's; `kill -9` ends it without losing what was \
                  completed, and the same `udm create` goes on";
    let (hanging, threads) = hanging_threads(pid);
    match letter {
        'T' | 't' => format!(
            "process {pid} is stopped (state {letter}); `kill -CONT {pid}` lets \
                              it go on"
        ),
        'Z' | 'X' => format!("process {pid} is ending (state {letter}); try again"),
        _ if hanging > 0 => format!(
            "process {pid} waits for a device in the kernel (state D: {hanging} of {threads} \
             threads); it goes on when the device answers: look at the kernel's log"
        ),
        _ => format!("process {pid} runs (state {letter}); {advice}"),
    }
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
