//! Completions know the devices, and packages contain the page of each command.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Udm, text};

/// The output of `script` in a shell that finds udm first in `$PATH`, if the shell is installed.
fn run_in(udm: &Udm, shell: &str, words: &[&str], script: &str) -> Option<String> {
    if Command::new(shell).arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("SKIPPED: {shell} is not installed");
        return None;
    }
    let folder = Path::new(env!("CARGO_BIN_EXE_udm")).parent().unwrap();
    let path = format!("{}:{}", text(folder), std::env::var("PATH").unwrap());
    let mut command = Command::new(shell);
    command.args(words).args(["-c", script]).env("PATH", path).env("HOME", udm.path(""));
    let output = udm.at_home(command).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && err.is_empty(), "{shell}: {err}");
    Some(String::from_utf8(output.stdout).unwrap())
}

fn words_of(text: &str) -> BTreeSet<&str> {
    text.split_whitespace().collect()
}

/// Two devices, and the completion script of `shell` in a file.
fn fixture(shell: &str) -> (Udm, String) {
    let udm = Udm::new();
    udm.ok(&["create", "alpha", "--table", "0 2048 zero"]);
    udm.ok(&["create", "alps-2", "--table", "0 2048 zero"]);
    let script = udm.path("script");
    std::fs::write(&script, udm.ok(&["completions", shell])).unwrap();
    (udm, text(&script).to_owned())
}

#[test]
fn bash_completes_the_names_of_devices() {
    let (udm, script) = fixture("bash");
    let complete = |line: &str, word: &str| {
        let before = line.rsplit(' ').next().unwrap();
        let code = format!(
            "source {script}; COMP_WORDS=({line} '{word}'); \
             COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _udm udm '{word}' {before}; echo \"${{COMPREPLY[@]}}\""
        );
        run_in(&udm, "bash", &["--norc"], &code).unwrap()
    };
    assert_eq!(words_of(&complete("udm drain", "al")), words_of("alpha alps-2"));
    assert_eq!(words_of(&complete("udm status", "alph")), words_of("alpha"));
    assert_eq!(words_of(&complete("udm status alpha", "alps")), words_of("alps-2"));
    assert_eq!(words_of(&complete("udm dra", "dra")), words_of("drain"));
    assert!(!complete("udm targets", "al").contains("alpha"), "no device is expected there");
}

#[test]
fn zsh_completes_the_names_of_devices() {
    let (udm, script) = fixture("zsh");
    let source = std::fs::read_to_string(&script).unwrap();
    for command in ["(drain)", "(status)", "(rename)", "(message)"] {
        let block = source.split(command).nth(1).unwrap().split(";;").next().unwrap();
        assert!(block.contains(":_udm_devices' \\\n"), "{command}: {block}");
    }
    let block = source.split("(targets)").nth(1).unwrap().split(";;").next().unwrap();
    assert!(!block.contains("_udm_devices"), "{block}");
    // Completion itself needs a terminal: the function's part is to hand over the right names.
    let code = format!(
        "compdef() {{ :; }}; compadd() {{ print -l -- ${{(P)2}}; }}; source {script}; _udm_devices"
    );
    if let Some(names) = run_in(&udm, "zsh", &["-f"], &code) {
        assert_eq!(words_of(&names), words_of("alpha alps-2"));
    }
}

#[test]
fn fish_completes_the_names_of_devices() {
    let (udm, script) = fixture("fish");
    let complete = |line: &str| {
        let code = format!("source {script}; complete -C '{line}'");
        run_in(&udm, "fish", &["--no-config"], &code)
    };
    let Some(names) = complete("udm drain al") else { return };
    assert_eq!(words_of(&names), words_of("alpha alps-2"));
    assert_eq!(words_of(&complete("udm status alpha alps").unwrap()), words_of("alps-2"));
    assert!(!complete("udm targets al").unwrap().contains("alpha"));
}

#[test]
fn packages_contain_the_page_of_each_command() {
    let udm = Udm::new();
    let folder = udm.path("man");
    udm.ok(&["man", "--folder", text(&folder)]);
    let pages = std::fs::read_dir(&folder).unwrap();
    let written: BTreeSet<String> =
        pages.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/files");
    let list = std::fs::read_to_string(list).unwrap();
    let sources = list.lines().filter_map(|line| line.split_whitespace().nth(2));
    let listed: BTreeSet<String> = sources
        .filter_map(|source| source.strip_prefix("@made@/man/"))
        .map(str::to_owned)
        .collect();
    assert_eq!(written, listed, "packaging/files lists the pages that `udm man` writes");
    for page in &written {
        let page = std::fs::read_to_string(folder.join(page)).unwrap();
        let name = page.split(".SH NAME\n").nth(1).unwrap().lines().next().unwrap();
        assert!(name.contains(" \\- "), "apropos finds the page by {name:?}");
        assert!(page.contains(".SH \"SEE ALSO\"\n.BR udm"));
    }
}
