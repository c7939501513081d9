//! `docs/cli.md` is a real session: this test runs every command in it, in order, and compares the
//! output with the document.
//!
//! In the document's code blocks, a shell runs a line `$ COMMAND`, with `udm` on its path, in a
//! folder that the document calls `/srv/demo`. The lines up to the next `$` or the block's end are
//! its output, errors included. There, `[..]` matches anything within a line, and a line `...`
//! matches any lines. The number of blanks between words does not matter.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Udm, text};

/// The document's name for the folder.
const FOLDER: &str = "/srv/demo";

/// A command of the document, and its output there.
#[derive(Debug)]
struct Step {
    line: usize,
    command: String,
    output: Vec<String>,
}

fn document() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    std::fs::read_to_string(path).unwrap()
}

fn steps(document: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut is_code = false;
    for (nth, line) in document.lines().enumerate() {
        if line.starts_with("```") {
            is_code = !is_code;
        } else if !is_code {
            continue;
        } else if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { line: nth + 1, command: command.into(), output: Vec::new() });
        } else {
            let step = steps.last_mut().expect("a block begins with a command");
            step.output.push(squeezed(line));
        }
    }
    steps
}

/// A line whose columns do not matter: how wide they are depends on the folder's name.
fn squeezed(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether `line` is what `pattern` says, `[..]` being anything.
fn is_like(pattern: &str, line: &str) -> bool {
    let Some((front, rest)) = pattern.split_once("[..]") else { return pattern == line };
    let Some(mut line) = line.strip_prefix(front) else { return false };
    loop {
        if is_like(rest, line) {
            return true;
        }
        let mut letters = line.chars();
        if letters.next().is_none() {
            return false;
        }
        line = letters.as_str();
    }
}

/// Whether `lines` are what `patterns` say, `...` being any lines.
fn are_like(patterns: &[String], lines: &[&str]) -> bool {
    match (patterns, lines) {
        ([], []) => true,
        ([any, rest @ ..], _) if any == "..." => {
            (0..=lines.len()).any(|skip| are_like(rest, &lines[skip..]))
        }
        ([pattern, patterns @ ..], [line, lines @ ..]) => {
            is_like(pattern, line) && are_like(patterns, lines)
        }
        _ => false,
    }
}

fn run(udm: &Udm, cache: &Path, command: &str) -> String {
    let folder = udm.path("");
    let folder = text(&folder).trim_end_matches('/');
    let places = [("/dev/shm/fast.img", text(cache)), (FOLDER, folder)];
    let mut command = command.to_owned();
    for (there, here) in places {
        command = command.replace(there, here);
    }
    let program = Path::new(env!("CARGO_BIN_EXE_udm")).parent().unwrap();
    let path = format!("{}:{}", text(program), std::env::var("PATH").unwrap());
    let output = Command::new("sh")
        .args(["-c", &format!("exec 2>&1\n{command}")])
        .current_dir(folder)
        .env("PATH", path)
        .env("UDM_RUNTIME_DIR", udm.runtime())
        .env("UDM_STATE_DIR", udm.path("state"))
        .env("UDM_CONFIG_DIR", udm.path("etc"))
        .env("COLUMNS", "100")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let mut said = String::from_utf8(output.stdout).unwrap();
    for (there, here) in places {
        said = said.replace(here, there);
    }
    said
}

#[test]
fn the_session_in_the_manual_is_true() {
    let udm = Udm::new();
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
    let mut wrong = String::new();
    for step in steps(&document()) {
        let said = run(&udm, cache.path(), &step.command);
        // A slow machine shows the progress of steps that are too short for it elsewhere.
        let is_progress = |line: &&str| line.contains(" so far, ") && line.ends_with("/s");
        let lines = said.lines().filter(|line| !is_progress(line));
        let lines: Vec<String> = lines.map(squeezed).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        if !are_like(&step.output, &lines) {
            wrong += &format!("line {}: $ {}\n{said}\n", step.line, step.command);
        }
    }
    assert!(wrong.is_empty(), "docs/cli.md says otherwise at\n{wrong}");
}

#[test]
fn the_session_shows_every_command() {
    let steps = steps(&document());
    let help = Udm::new().ok(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    for line in commands.take_while(|line| !line.is_empty()) {
        let name = line.split_whitespace().next().unwrap();
        let is_shown = steps.iter().any(|step| {
            let words: Vec<&str> = step.command.split_whitespace().collect();
            words.windows(2).any(|pair| pair == ["udm", name])
        });
        assert!(is_shown || name == "help" || name == "bench", "{name} is not in docs/cli.md");
    }
}

#[test]
fn patterns_mean_what_they_say() {
    assert!(is_like("a[..]c", "abc") && is_like("a[..]c", "ac") && !is_like("a[..]c", "acb"));
    assert!(!is_like("", "a") && is_like("[..]", ""));
    let lines = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect::<Vec<_>>();
    assert!(are_like(&lines(&["a", "...", "b"]), &["a", "x", "b"]));
    assert!(!are_like(&lines(&["a", "..."]), &["x", "a"]) && !are_like(&[], &["a"]));
}
