//! Whether files of a crate use each other in a circle. The head of a folder (`mod.rs`, or the file
//! of the folder's name) declares the folder's files, so their uses of it are not counted.

use std::collections::{BTreeMap, BTreeSet};

use super::rooms::product_lines;
use super::sources;

/// Modules that only tests have.
const TESTS: [&str; 4] = ["conformance", "orderings", "schedules", "tests"];

/// The names on the way to a module.
type Module = Vec<String>;

/// The crate of a source file, and its module.
fn module_of(file: &str) -> Option<(&str, Module)> {
    let (name, path) = file.strip_prefix("crates/")?.split_once("/src/")?;
    let path = path.trim_end_matches(".rs").trim_end_matches("/mod");
    let is_root = path == "lib" || path == "main";
    let names = path.split('/').map(str::to_owned);
    Some((name, if is_root { Module::new() } else { names.collect() }))
}

/// The paths of a tree of `use`.
fn expand(before: &[&str], tree: &str, found: &mut Vec<Module>) {
    let (mut depth, mut start) = (0, 0);
    let mut parts = Vec::new();
    for (at, letter) in tree.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&tree[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&tree[start..]);
    for part in parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty()) {
        let open = part.find('{');
        let path = open.map_or(part, |open| &part[..open]).split(" as ").next().unwrap_or(part);
        let names = path.split("::").map(str::trim).filter(|name| !name.is_empty());
        let path: Vec<&str> = before.iter().copied().chain(names).collect();
        match open.zip(part.rfind('}')) {
            Some((open, close)) => expand(&path, &part[open + 1..close], found),
            None => found.push(path.into_iter().map(str::to_owned).collect()),
        }
    }
}

/// The paths in a file's code: those of `use`, and those that begin with `crate`, `super`, `self`,
/// or the name of a file below.
fn paths_of(code: &str, below: &BTreeSet<String>) -> Vec<Module> {
    let mut found = Vec::new();
    let mut rest = String::new();
    let mut statement: Option<String> = None;
    for line in code.lines() {
        let trimmed = line.trim_start();
        let bare = trimmed.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
        let bare = bare.trim_start_matches("pub ");
        if statement.is_none() && bare.starts_with("use ") {
            statement = Some(String::new());
        }
        let Some(text) = &mut statement else {
            rest += line;
            rest.push('\n');
            continue;
        };
        text.push_str(if text.is_empty() { &bare["use ".len()..] } else { trimmed });
        if let Some(tree) = text.trim_end().strip_suffix(';') {
            expand(&[], tree, &mut found);
            statement = None;
        }
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    for word in rest.split(|c| !is_part(c)).filter(|word| word.contains("::")) {
        let names: Module = word.split("::").map(str::to_owned).collect();
        if ["crate", "super", "self"].contains(&&*names[0]) || below.contains(&names[0]) {
            found.push(names);
        }
    }
    found
}

/// The module of the crate that a path in the file of `own` leads to.
fn resolve(own: &Module, path: &[String], modules: &BTreeMap<Module, String>) -> Option<Module> {
    let is_below = |name: &String| {
        modules.contains_key(&[own.as_slice(), std::slice::from_ref(name)].concat())
    };
    let (mut base, mut names) = match path[0].as_str() {
        "crate" => (Module::new(), &path[1..]),
        "self" => (own.clone(), &path[1..]),
        "super" => (own.clone(), path),
        _ if is_below(&path[0]) => (own.clone(), path),
        _ => return None,
    };
    while names.first().is_some_and(|name| name == "super") {
        base.pop();
        names = &names[1..];
    }
    base.extend(names.iter().cloned());
    while !modules.contains_key(&base) {
        base.pop()?;
    }
    Some(base)
}

/// Which files of a crate use which.
fn uses(modules: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut all = BTreeMap::new();
    for (own, text) in modules {
        if own.iter().any(|name| TESTS.iter().any(|test| name.contains(test))) {
            continue;
        }
        let is_child = |other: &&Module| other.len() == own.len() + 1 && other.starts_with(own);
        let below = modules.keys().filter(is_child).map(|child| child[own.len()].clone());
        let code: Vec<&str> = product_lines(text).into_iter().map(|(_, line)| line).collect();
        let paths = paths_of(&code.join("\n"), &below.collect());
        let used = paths.iter().filter_map(|path| resolve(own, path, modules));
        all.insert(own.clone(), used.filter(|used| !own.starts_with(used)).collect());
    }
    all
}

/// A circle that leads from `own` back to it.
fn circle(own: &Module, all: &BTreeMap<Module, BTreeSet<Module>>) -> Option<Vec<String>> {
    let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
    let mut next = vec![own];
    while let Some(at) = next.pop() {
        for used in all.get(at).into_iter().flatten() {
            if used == own {
                let mut way = vec![at.join("/")];
                let mut at = at;
                while let Some(earlier) = before.get(at).filter(|_| at != own) {
                    way.push(earlier.join("/"));
                    at = earlier;
                }
                way.reverse();
                return Some(way);
            }
            if all.contains_key(used) && !before.contains_key(used) {
                before.insert(used, at);
                next.push(used);
            }
        }
    }
    None
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let mut crates: BTreeMap<String, BTreeMap<Module, String>> = BTreeMap::new();
    for (file, text) in sources() {
        if let Some((name, module)) = module_of(&file) {
            crates.entry(name.to_owned()).or_default().insert(module, text);
        }
    }
    assert!(crates.len() >= 5, "crates: {:?}", crates.keys());
    let mut wrong = Vec::new();
    for (name, modules) in &crates {
        let all = uses(modules);
        assert!(all.values().any(|used| !used.is_empty()), "{name}: no file uses another");
        let circles = all.keys().filter_map(|own| circle(own, &all));
        wrong.extend(circles.map(|way| format!("{name}: {}", way.join(" -> "))));
    }
    assert!(wrong.is_empty(), "circles of files:\n{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found_however_it_is_written() {
    let crate_of = |files: &[(&str, &str)]| -> BTreeMap<Module, String> {
        let module = |path: &str| path.split('/').map(str::to_owned).collect::<Module>();
        files.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect()
    };
    let has_circle = |files: &[(&str, &str)]| {
        let all = uses(&crate_of(files));
        all.keys().any(|own| circle(own, &all).is_some())
    };
    let c = ("c", "fn f() { crate::a::g() }");
    assert!(has_circle(&[("a", "use crate::{b::{One,\n    Two}, d};"), ("b", "use super::c;"), c]));
    assert!(has_circle(&[("a", "pub use crate::c::f;"), c]));
    assert!(has_circle(&[("a", "mod x;\nfn f() { x::f() }"), ("a/x", "use crate::c;"), c]));
    assert!(!has_circle(&[("a", "// use crate::c;\nfn g() {}"), c]));
    assert!(!has_circle(&[("a", "mod x;\nuse x::f;"), ("a/x", "use super::g;")]));
    let of_tests = "#[cfg(test)]\nmod tests {\n    use crate::c;\n}";
    assert!(!has_circle(&[("a", of_tests), c]));
}
