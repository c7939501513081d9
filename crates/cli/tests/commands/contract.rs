//! What every command promises: help with examples, exit codes, errors in one line, JSON that
//! parses.

use std::io::Write;
use std::process::Stdio;

use crate::common::Udm;
use serde_json::Value;

/// Every command that `udm --help` lists, and words that make a well-formed call of it for a
/// device that does not exist.
const COMMANDS: [(&str, &[&str]); 31] = [
    ("create", &["vol", "--table", "0 8 zero"]),
    ("remove", &["vol"]),
    ("drain", &["vol"]),
    ("detach", &["vol"]),
    ("flush", &["vol"]),
    ("status", &["vol"]),
    ("table", &["vol"]),
    ("info", &["vol"]),
    ("message", &["vol", "0", "word"]),
    ("suspend", &["vol"]),
    ("resume", &["vol"]),
    ("load", &["vol", "--table", "0 8 zero"]),
    ("rename", &["vol", "other"]),
    ("ls", &[]),
    ("wait", &["vol", "--timeout", "0"]),
    ("export", &["vol", "nbd+unix:///tmp/x"]),
    ("unexport", &["vol", "nbd+unix:///tmp/x"]),
    ("metrics", &["vol"]),
    ("report", &["vol"]),
    ("inspect", &["/nonexistent/cache"]),
    ("recover", &["/nonexistent/cache", "/nonexistent/origin"]),
    ("cache", &["check", "/nonexistent/meta"]),
    ("doctor", &[]),
    ("targets", &[]),
    ("check-config", &["/nonexistent/vol.conf"]),
    ("save", &["vol"]),
    ("diff", &["absent", "--config", "/nonexistent/absent.conf"]),
    ("apply", &["absent", "--config", "/nonexistent/absent.conf"]),
    ("completions", &["bash"]),
    ("man", &[]),
    ("bench", &["copy"]),
];

#[test]
fn help_lists_exactly_these_commands() {
    let udm = Udm::new();
    let help = udm.ok(&["--help"]);
    let listed: Vec<&str> = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .collect();
    let mut expected: Vec<&str> = COMMANDS.iter().map(|(name, _)| *name).collect();
    let mut sorted = listed.clone();
    sorted.sort_unstable();
    expected.sort_unstable();
    assert_eq!(sorted, expected);
}

/// The commands that udm parses: `bench` passes its arguments to the program udm-bench.
fn parsed() -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
    COMMANDS.into_iter().filter(|(name, _)| *name != "bench")
}

#[test]
fn every_command_has_help() {
    let udm = Udm::new();
    for (name, _) in parsed() {
        let help = udm.ok(&[name, "--help"]);
        assert!(help.contains(&format!("Usage: udm {name}")), "{help}");
        assert!(udm.ok(&[name, "-h"]).contains(&format!("Usage: udm {name}")), "{name}");
    }
}

#[test]
fn unknown_flags_and_missing_arguments_are_usage_errors() {
    let udm = Udm::new();
    for (name, words) in parsed() {
        let outcome = udm.run(&[name, "--no-such-flag"]);
        assert_eq!(outcome.code, 2, "{name}: {outcome:?}");
        let line = outcome.one_line(name);
        assert!(line.contains("--no-such-flag") && line.contains(&format!("udm {name} --help")));
        if words.first().is_some_and(|word| !word.starts_with('-')) && name != "completions" {
            let without = ["status", "table", "info", "metrics", "check-config"];
            let needs_name = !without.contains(&name);
            if needs_name {
                assert_eq!(udm.run(&[name]).code, 2, "{name}");
            }
        }
    }
    assert_eq!(udm.run(&[]).code, 2);
    assert_eq!(udm.run(&["no-such-command"]).code, 2);
    assert_eq!(udm.run(&["create", "a/b", "--table", "0 8 zero"]).code, 2);
    assert_eq!(udm.run(&["create", "vol", "--table", "x", "--table-file", "y"]).code, 2);
    assert_eq!(udm.run(&["create", "vol", "--table", "x", "--queues", "0"]).code, 2);
    assert_eq!(udm.run(&["message", "vol", "zero", "x"]).code, 2);
}

#[test]
fn a_device_that_is_not_there_is_an_error_with_advice() {
    let udm = Udm::new();
    for (name, words) in COMMANDS {
        if words.first() != Some(&"vol") || name == "create" || name == "wait" {
            continue;
        }
        let line = udm.refused(&[&[name], words].concat());
        assert_eq!(
            line,
            format!("udm {name}: vol: no such device; `udm ls` lists the devices there are")
                .replacen("udm ", "udm: ", 1)
        );
    }
    let line = udm.refused(&["wait", "vol", "--timeout", "0"]);
    assert_eq!(line, "udm: wait: vol: there is no such device after 0 s");
    assert!(udm.refused(&["inspect", "/nonexistent/cache"]).contains("/nonexistent/cache"));
    assert!(
        udm.refused(&["recover", "/nonexistent/cache", "/nonexistent/origin"])
            .contains("/nonexistent/cache")
    );
}

#[test]
fn without_devices_lists_are_empty() {
    let udm = Udm::new();
    for name in ["status", "table", "ls"] {
        assert_eq!(udm.ok(&[name]), "No devices found\n");
    }
    for name in ["status", "table", "info", "ls", "metrics"] {
        assert_eq!(udm.json(&[name]), Value::Array(vec![]), "{name}");
    }
    assert_eq!(udm.ok(&["metrics"]), "");
}

#[test]
fn targets_completions_and_manual() {
    let udm = Udm::new();
    assert!(udm.ok(&["targets"]).contains("pcache           v0.1.0\n"));
    assert!(udm.json(&["targets"]).as_array().unwrap().iter().any(|t| t["name"] == "linear"));
    for shell in ["bash", "zsh", "fish"] {
        let script = udm.ok(&["completions", shell]);
        assert!(script.contains("create") && !script.contains("udm__serve"), "{shell}");
        assert!(!script.contains("'serve"), "{shell}: the hidden command is not completed");
    }
    assert!(udm.ok(&["man"]).contains(".TH udm 1"));
    assert!(udm.ok(&["man", "create"]).contains("force"));
    assert!(udm.refused(&["man", "nothing"]).contains("no such command"));
    let folder = udm.path("man");
    udm.ok(&["man", "--folder", folder.to_str().unwrap()]);
    assert!(folder.join("udm.1").exists() && folder.join("udm-create.1").exists());
    assert!(!folder.join("udm-serve.1").exists(), "the hidden command has no page");
}

#[test]
fn the_runtime_directory_is_explained_when_it_cannot_be_had() {
    let udm = Udm::new();
    std::fs::write(udm.path("file"), "").unwrap();
    let output = udm.command(&["ls"]).env("UDM_RUNTIME_DIR", udm.path("file/below")).output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.starts_with("udm: ls: runtime directory "), "{text}");
}

#[test]
fn a_table_comes_from_a_file_or_standard_input_too() {
    let udm = Udm::new();
    let missing = udm.refused(&["create", "vol", "--table-file", "nowhere.table"]);
    assert!(missing.contains("table file nowhere.table"), "{missing}");
    let mut child = udm
        .command(&["create", "vol"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"0 8 zero \xff\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard input: not UTF-8"));
}
