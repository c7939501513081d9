//! Facts, metrics and messages that the documents quote: the tests read them from the documents,
//! and look for them in the output and the source.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::common::{Udm, text};

const MIB: u64 = 1 << 20;

/// Facts that are there only when something is wrong, and the tests that see them.
const ELSEWHERE: [(&str, &str); 1] = [("certificates_problem", include_str!("tls.rs"))];

/// Documents for people who use udm.
fn documents() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let names = ["tables", "cli", "cache", "limits", "behaviour", "operations", "choosing"];
    let paths = names.iter().map(|name| root.join(format!("docs/{name}.md")));
    let paths = std::iter::once(root.join("README.md")).chain(paths);
    paths.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

/// Words between back-quotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// Names of facts in paragraphs that speak of a command that prints facts.
fn claimed_facts(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let prints_facts = ["udm info", "udm status --all", "--json"];
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.contains("```")) {
        let paragraph = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if !prints_facts.iter().any(|command| paragraph.contains(command)) {
            continue;
        }
        for word in quoted(&paragraph) {
            let is_name = |c: char| c.is_ascii_lowercase() || c == '_' || c == '*';
            // A module of the kernel, and functions of libudm.
            if word == "ublk_drv" || word.starts_with("udm_") {
                continue;
            }
            if word.contains('_') && word.chars().all(is_name) && !word.starts_with('_') {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

/// Devices of each kind that has facts of its own: the facts and the metrics that they print.
fn printed(udm: &Udm) -> (String, String) {
    udm.file("slow.img", 16 * MIB);
    let slow = text(&udm.path("slow.img")).to_owned();
    let (mut printed, mut metrics) = (String::new(), String::new());
    for (nth, (line, bytes)) in [
        ("pcache FAST SLOW", 512 * MIB),
        ("writecache s SLOW FAST 4096 0", 32 * MIB),
        ("cache FAST?size=8M FAST?offset=8M SLOW 64 1 writeback smq 0", 32 * MIB),
        ("linear FAST?io=lazy 0", 16 * MIB),
    ]
    .into_iter()
    .enumerate()
    {
        let fast = udm.file(&format!("fast{nth}"), bytes);
        let line = line.replace("FAST", text(&fast)).replace("SLOW", &slow);
        let table = format!("0 {} {line}", 16 * MIB / 512);
        let export = format!("vhost-user://{}", udm.path("vhost.sock").display());
        let nbd = udm.uri("vol.sock");
        udm.ok(&["create", "vol", "--table", &table, "--export", &export, "--export", &nbd]);
        for words in [&["info", "vol"][..], &["status", "--all", "vol"], &["ls"]] {
            printed += &udm.json(words).to_string();
        }
        printed += &udm.ok(&["status", "--all", "vol"]);
        metrics += &udm.ok(&["metrics", "vol"]);
        printed += &udm.json(&["remove", "vol", "--drain"]).to_string();
    }
    (printed, metrics)
}

#[test]
fn facts_that_documents_name_are_printed() {
    let udm = Udm::new();
    let printed = printed(&udm).0;
    let names = ["pcache", "writecache", "cache"].map(|name| udm.ok(&["targets", name]));
    let grammar = names.concat();
    let mut count = 0;
    for (path, text) in documents() {
        for name in claimed_facts(&text) {
            count += 1;
            let is_there = match name.strip_suffix('*') {
                Some(front) => printed.contains(&format!("\"{front}")),
                None => {
                    let quoted = format!("\"{name}\"");
                    // Or a word of tables, which a paragraph about facts may also name.
                    let is_elsewhere =
                        |(fact, test): &(&str, &str)| *fact == name && test.contains(&quoted);
                    printed.contains(&quoted)
                        || grammar.contains(&name)
                        || ELSEWHERE.iter().any(is_elsewhere)
                }
            };
            assert!(is_there, "{}: `{name}` is printed nowhere", path.display());
        }
    }
    assert!(count >= 5, "the documents name facts, and {count} were found");
}

#[test]
fn metrics_that_documents_name_are_printed() {
    let udm = Udm::new();
    let metrics = printed(&udm).1;
    let documents = documents();
    let text = &documents.iter().find(|(path, _)| path.ends_with("docs/operations.md")).unwrap().1;
    let is_metric = |word: &&str| word.len() > 4 && word.starts_with("udm_");
    let names: BTreeSet<&str> = quoted(text).into_iter().filter(is_metric).collect();
    assert!(names.len() >= 5, "{names:?}");
    for name in names {
        assert!(metrics.contains(&format!("\n{name}{{")), "`{name}` is not printed");
    }
}

/// The product's source as one text, in which a string of several lines is one.
fn source() -> String {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<_> =
        ["cli", "engine", "export"].map(|name| crates.join(name).join("src")).into();
    let mut source = String::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => folders.push(path),
                false => source += &std::fs::read_to_string(path).unwrap(),
            }
        }
    }
    let mut parts = source.split("\\\n");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

#[test]
fn messages_that_documents_quote_are_in_the_source() {
    let source = source();
    let documents = documents();
    let text = &documents.iter().find(|(path, _)| path.ends_with("docs/operations.md")).unwrap().1;
    let mut count = 0;
    for quote in text.lines().flat_map(|line| line.split('"').skip(1).step_by(2)) {
        for part in quote.split("...").map(|part| part.trim_matches([' ', ':', ')'])) {
            count += usize::from(!part.is_empty());
            assert!(source.contains(part), "{quote}: no message says \"{part}\"");
        }
    }
    assert!(count >= 10, "{count} parts of messages");
}

/// The first words of the rows of the tables under a heading.
fn rows_of(text: &str, heading: &str) -> Vec<String> {
    let chapter = text.split(heading).nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = chapter.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| quoted(row)[0].replace('\\', "")).collect()
}

#[test]
fn the_grammar_of_a_target_has_every_word_that_the_documents_have() {
    let udm = Udm::new();
    let documents = documents();
    let tables = &documents.iter().find(|(path, _)| path.ends_with("docs/tables.md")).unwrap().1;
    for target in ["pcache", "writecache", "cache"] {
        let grammar = udm.ok(&["targets", target]);
        assert!(grammar.starts_with(&format!("START LENGTH {target} ")), "{grammar}");
        let rows = rows_of(tables, &format!("## {target}\n"));
        assert!(!rows.is_empty(), "{target}");
        for row in rows {
            assert!(grammar.contains(&row), "{target}: {row} is not in {grammar}");
        }
        // Each of its fields, as the line has them.
        let json = udm.json(&["targets", target]);
        assert!(json["status_fields"].as_array().unwrap().len() > 8, "{json}");
    }
    assert!(udm.ok(&["targets", "pcache"]).contains("data_crc"));
    assert!(udm.ok(&["targets", "writecache"]).contains("autocommit_time"));
    assert!(udm.ok(&["targets", "cache"]).contains("no_discard_passdown"));
    assert!(udm.ok(&["targets", "linear"]).starts_with("START LENGTH linear <device> <offset>"));
    assert_eq!(udm.run(&["targets", "nonesuch"]).code, 2);
}
