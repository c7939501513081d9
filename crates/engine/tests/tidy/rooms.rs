//! Whether the engine's rooms use each other as ARCHITECTURE.md's table says: a room uses those
//! that stand before it, and every file belongs to a room of the table.

use std::collections::BTreeSet;

use super::{code_of, root, sources};

const SOURCES: &str = "crates/engine/src/";
/// The names of tests, and of modules that only tests use. They may use any room.
const TESTS: [&str; 4] = ["conformance", "orderings", "schedules", "tests"];

/// The rooms in the order of the table.
fn rooms() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = text.split_once("\n| rooms of ").expect("the table of rooms");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names.map(|name| name.trim_end_matches('/').to_owned()).collect()
}

/// The names on the way to a file's module, the room first.
fn module_of(file: &str) -> Vec<&str> {
    let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').collect()
}

/// The lines of code outside of what only tests have, with their numbers.
pub(super) fn product_lines(text: &str) -> Vec<(usize, &str)> {
    let mut lines = text.lines().enumerate();
    let mut found = Vec::new();
    while let Some((nth, line)) = lines.next() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if line.trim_start().starts_with("#[cfg(test)]")
            || line.trim_start().starts_with("#[cfg(all(test")
        {
            // The item ends in its first line, or with a line that is as far to the right.
            let end = format!("{indent}}}");
            let mut item = lines.by_ref().map(|(_, line)| line);
            let is_attribute = |line: &str| line.trim_start().starts_with("#[");
            let first = item.find(|line| !is_attribute(line)).unwrap_or_default();
            if first.ends_with('{') {
                item.find(|line| *line == end);
            }
            continue;
        }
        found.push((nth + 1, code_of(line)));
    }
    found
}

/// The names of modules that follow `before` in a line of code.
fn words_behind<'a>(code: &'a str, before: &str) -> Vec<&'a str> {
    let word = |rest: &'a str| {
        let end = rest.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(rest.len());
        &rest[..end]
    };
    code.split(before).skip(1).map(word).collect()
}

#[test]
fn every_file_is_in_a_room_of_the_table() {
    let rooms: BTreeSet<String> = rooms().into_iter().collect();
    let mut there = BTreeSet::new();
    for (name, _) in sources() {
        if let Some(file) = name.strip_prefix(SOURCES).filter(|file| *file != "lib.rs") {
            there.insert(module_of(file)[0].to_owned());
        }
    }
    assert_eq!(there, rooms, "files of the engine, and the table of rooms in ARCHITECTURE.md");
}

#[test]
fn rooms_use_those_before_them() {
    let rooms = rooms();
    let place = |room: &str| rooms.iter().position(|known| known == room);
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        let Some(file) = name.strip_prefix(SOURCES).filter(|file| *file != "lib.rs") else {
            continue;
        };
        if TESTS.iter().any(|word| file.contains(word)) {
            continue;
        }
        let module = module_of(file);
        let own = place(module[0]).expect("every file is in a room");
        let out_of_the_room = "super::".repeat(module.len());
        for (nth, code) in product_lines(&text) {
            let mut used = words_behind(code, "crate::");
            used.extend(words_behind(code, &out_of_the_room));
            if code.contains("crate::{") {
                wrong.push(format!("{name}:{nth}: one `use` for each room"));
            }
            let later = used.into_iter().filter(|room| place(room).is_some_and(|at| at > own));
            wrong.extend(later.map(|room| format!("{name}:{nth}: {} uses {room}", module[0])));
        }
    }
    assert!(wrong.is_empty(), "rooms use what stands behind them:\n{}", wrong.join("\n"));
}
