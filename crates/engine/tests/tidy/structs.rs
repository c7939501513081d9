//! Whether a structure of an engine is small enough to know each field's writers, and whether a
//! file of an engine names its imports.

use super::{PURE_ROOMS, sources};

const FIELDS_MAX: usize = 15;
/// Counters are many by nature: each is changed in one place and independent of the others.
const COUNTERS: [&str; 1] = ["Counters"];

/// The structures of a file, and their numbers of fields. The layout of a medium is
/// left out: the format determines its fields.
fn structs(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (nth, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let code = ["pub ", "pub(super) ", "pub(crate) "]
            .iter()
            .fold(code, |code, before| code.trim_start_matches(before));
        let Some(rest) = code.strip_prefix("struct ").filter(|_| line.ends_with('{')) else {
            continue;
        };
        let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap();
        let is_attribute = |line: &&&str| line.trim_start().starts_with(['#', ')', '/']);
        let mut before = lines[..nth].iter().rev().take_while(is_attribute);
        if before.any(|line| line.contains("repr(C")) {
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let (field, close) = (" ".repeat(indent + 4), format!("{}}}", " ".repeat(indent)));
        let body = lines[nth + 1..].iter().take_while(|line| **line != close);
        let is_field = |line: &&&str| {
            let rest = line.strip_prefix(&field).unwrap_or_default();
            let is_counter = COUNTERS.iter().any(|of| rest.ends_with(&format!(": {of},")));
            rest.contains(": ") && !rest.starts_with(['/', '#', ' ']) && !is_counter
        };
        found.push((rest[..end].to_owned(), body.filter(is_field).count()));
    }
    found
}

#[test]
fn structures_of_engines_have_few_fields() {
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (name, text) in sources() {
        if !PURE_ROOMS.iter().any(|room| name.starts_with(room)) {
            continue;
        }
        for (of, fields) in structs(&text) {
            seen += fields;
            if fields > FIELDS_MAX && !COUNTERS.contains(&&*of) {
                wrong.push(format!("{name}: {of} has {fields} fields"));
            }
        }
    }
    assert!(seen > 300, "the structures were not found");
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn fields_are_counted() {
    let text = "/// A.\n#[derive(Debug)]\npub struct A<'a> {\n    /// a: b\n    a: u8,\n    \
                pub(super) b: Vec<u8>,\n}\n#[repr(C)]\nstruct B {\n    a: u8,\n}\n";
    assert_eq!(structs(text), [("A".to_owned(), 2)]);
}
