//! The rules of the code and the documents, kept by a test, so that readers may rely on them.

// A test may stop where it is wrong.
#![allow(clippy::unwrap_used)]

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/formats.rs"]
mod formats;
#[path = "tidy/rooms.rs"]
mod rooms;
#[path = "tidy/structs.rs"]
mod structs;
#[path = "tidy/style.rs"]
mod style;
#[path = "tidy/words.rs"]
mod words;

use std::fs;
use std::path::{Path, PathBuf};

const LINE_CHARS_MAX: usize = 100;
const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
/// The size that a newcomer can read in ten minutes, in bytes.
const FIRST_PAGES: [(&str, usize); 2] = [("README.md", 10 << 10), ("ARCHITECTURE.md", 16 << 10)];

/// The only files with `unsafe` code.
const UNSAFE_FILES: [&str; 28] = [
    "crates/bench/src/cpu.rs",
    "crates/bench/src/heap.rs",
    "crates/bench/src/libpmem.rs",
    "crates/bench/src/loopdev.rs",
    "crates/bench/src/perf.rs",
    "crates/capi/src/ffi.rs",
    "crates/capi/src/forked.rs",
    "crates/capi/src/memory.rs",
    "crates/engine/src/buffer.rs",
    "crates/engine/src/disk/byte_locks.rs",
    "crates/engine/src/disk/ioctls.rs",
    "crates/engine/src/disk/pagecache.rs",
    "crates/engine/src/pmem/client_memory.rs",
    "crates/engine/src/base/prefetch.rs",
    "crates/engine/src/pmem/copy.rs",
    "crates/engine/src/pmem/copy_tests.rs",
    "crates/engine/src/pmem/copy_x86.rs",
    "crates/engine/src/pmem/dax.rs",
    "crates/engine/src/pmem/dax_tests.rs",
    "crates/engine/src/pmem/copy_target.rs",
    "crates/engine/src/probe/blkid.rs",
    "crates/engine/src/ring/give_way.rs",
    "crates/engine/src/ring/kernel.rs",
    "crates/engine/src/shm.rs",
    "crates/engine/src/pmem/sigbus.rs",
    "crates/engine/tests/cache_memory.rs",
    "crates/engine/tests/hotpath.rs",
    "lab/memory.rs",
];

/// Engines and nouns: no thread, clock, file or environment, and no other engine.
const PURE_ROOMS: [&str; 4] = [
    "crates/engine/src/cache/",
    "crates/engine/src/pcache/",
    "crates/engine/src/simple/",
    "crates/engine/src/writecache/",
];
const WORLDLY_WORDS: [&str; 8] = [
    "std::thread",
    "std::time",
    "std::fs",
    "std::env",
    "std::net",
    "std::process",
    "Instant::now",
    "SystemTime",
];

fn root() -> PathBuf {
    // At run time: a binary that another checkout has built checks the present one.
    let crate_dir = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    Path::new(&crate_dir).join("../..").canonicalize().unwrap()
}

/// Every Rust file of the project, with its path from the root.
fn sources() -> Vec<(String, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.join("crates"), root.join("lab"), root.join("fuzz")];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let is_built = path.ends_with("target");
            if path.is_dir() && !is_built {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).unwrap().to_string_lossy().into_owned();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.len() > 40, "the project's sources were not found");
    found.sort();
    found
}

/// Applies `rule` to each line of each file; it returns the error in a line, if there is one.
fn check_lines(rule: impl Fn(&str, &str) -> Option<String>) {
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        if name.ends_with("tests/tidy.rs") {
            continue;
        }
        for (nth, line) in text.lines().enumerate() {
            if let Some(what) = rule(&name, line) {
                wrong.push(format!("{name}:{}: {what}", nth + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

fn code_of(line: &str) -> &str {
    line.split("//").next().unwrap_or_default()
}

#[test]
fn every_file_says_what_it_is_for() {
    for (name, text) in sources() {
        let first = text.lines().find(|line| !line.starts_with("#!")).unwrap_or_default();
        assert!(first.starts_with("//!"), "{name} does not open with //! prose");
    }
}

#[test]
fn lines_are_ascii_short_and_finished() {
    check_lines(|_, line| {
        if !line.is_ascii() {
            return Some("not ASCII".to_string());
        }
        if line.chars().count() > LINE_CHARS_MAX {
            return Some(format!("longer than {LINE_CHARS_MAX} characters"));
        }
        let marks = ["TODO", "FIXME", "XXX", "todo!(", "unimplemented!(", "dbg!("];
        marks.iter().find(|mark| line.contains(**mark)).map(|mark| format!("'{mark}'"))
    });
}

#[test]
fn unsafe_is_where_it_may_be() {
    check_lines(|name, line| {
        let code = code_of(line);
        let is_unsafe = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"]
            .iter()
            .any(|word| code.contains(word));
        (is_unsafe && !UNSAFE_FILES.contains(&name)).then(|| "unsafe".to_string())
    });
}

#[test]
fn engines_do_not_know_the_world_or_each_other() {
    check_lines(|name, line| {
        let room = PURE_ROOMS.iter().find(|room| name.starts_with(**room))?;
        let code = code_of(line);
        let other = PURE_ROOMS.iter().filter(|other| *other != room).find(|other| {
            let module = other.trim_end_matches('/').rsplit('/').next().unwrap();
            code.contains(&format!("crate::{module}"))
        });
        if let Some(other) = other {
            return Some(format!("names another engine: {other}"));
        }
        WORLDLY_WORDS.iter().find(|word| code.contains(**word)).map(|word| format!("'{word}'"))
    });
}

#[test]
fn locks_and_atomics_come_from_one_place() {
    check_lines(|name, line| {
        let is_code = name.starts_with("crates/engine/src/") && !name.ends_with("src/sync.rs");
        // Tests run on threads of their own, and may use what those have.
        let is_test = ["tests", "schedules", "orderings"].iter().any(|word| name.contains(word));
        let is_lock = code_of(line).replace("std::sync::mpsc", "").contains("std::sync");
        (is_code && !is_test && is_lock).then(|| "a lock that no test can swap".to_string())
    });
}

#[test]
fn the_engine_knows_no_protocol_and_no_command() {
    check_lines(|name, line| {
        let is_engine = name.starts_with("crates/engine/src/");
        let words = ["udm_export", "clap", "serde"];
        let word = words.iter().find(|word| code_of(line).contains(**word))?;
        is_engine.then(|| format!("'{word}'"))
    });
}

#[test]
fn the_first_pages_are_read_in_ten_minutes() {
    for (name, bytes_max) in FIRST_PAGES {
        let bytes = fs::metadata(root().join(name)).unwrap().len() as usize;
        assert!(bytes <= bytes_max, "{name} has {bytes} bytes, more than {bytes_max}");
    }
}

/// Every document but the changelog, which is about the past, with its path from the root.
fn documents() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in ["", "docs/", "docs/decisions/", "lab/", "tests/vectors/"] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let name = format!("{folder}{}", entry.unwrap().file_name().to_string_lossy());
            if name.ends_with(".md") && name != "CHANGELOG.md" {
                let text = fs::read_to_string(root().join(&name)).unwrap();
                found.push((name, text));
            }
        }
    }
    assert!(found.len() > 20, "the documents were not found");
    found
}

/// The links of a document, as paths from the root.
fn links_of(name: &str, text: &str) -> Vec<PathBuf> {
    let folder = root().join(name).parent().unwrap().to_owned();
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let paths = links.map(|(link, _)| link.split('#').next().unwrap_or_default());
    let is_local = |path: &&str| !path.is_empty() && !path.contains("://");
    paths.filter(is_local).map(|path| folder.join(path)).collect()
}

/// The files of the project that a document names, as written there.
fn files_named_in(text: &str) -> impl Iterator<Item = &str> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let is_file = word.ends_with(".rs") || word.ends_with(".sh");
        is_file && word.contains('/') && !word.contains(['*', ' ', '\n'])
    })
}

#[test]
fn documents_name_what_is_there() {
    let folders = ["", "crates/engine/src", "crates/cli/src", "lab"].map(|name| root().join(name));
    let mut wrong = Vec::new();
    for (name, text) in documents() {
        let links = links_of(&name, &text).into_iter().filter(|link| !link.exists());
        wrong.extend(links.map(|link| format!("{name}: {}", link.display())));
        let is_missing = |file: &&str| !folders.iter().any(|folder| folder.join(file).exists());
        wrong
            .extend(files_named_in(&text).filter(is_missing).map(|file| format!("{name}: {file}")));
    }
    assert!(wrong.is_empty(), "documents name what is not there:\n{}", wrong.join("\n"));
}

#[test]
fn documents_have_short_lines() {
    let mut wrong = Vec::new();
    for (name, text) in documents() {
        let (mut is_code, mut is_generated) = (false, false);
        for (nth, line) in text.lines().enumerate() {
            is_code ^= line.starts_with("```");
            is_generated ^= line.starts_with("<!-- generated");
            let is_free = is_code || is_generated || line.starts_with(['|', ' ']);
            if !is_free && line.chars().count() > LINE_CHARS_MAX {
                wrong.push(format!("{name}:{}: longer than {LINE_CHARS_MAX} characters", nth + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_and_functions_fit_a_readers_head() {
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        let lines: Vec<&str> = text.lines().collect();
        if lines.len() > FILE_LINES_MAX {
            wrong.push(format!("{name}: {} lines", lines.len()));
        }
        for (nth, line) in lines.iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let word = ["pub ", "pub(super) ", "pub(crate) ", "unsafe "]
                .iter()
                .fold(line.trim_start(), |word, before| word.trim_start_matches(before));
            if !(word.starts_with("fn ") || word.starts_with("const fn ")) {
                continue;
            }
            let end = format!("{}}}", " ".repeat(indent));
            let len = lines[nth..].iter().position(|line| *line == end).map_or(0, |last| last + 1);
            if len > FUNCTION_LINES_MAX {
                wrong.push(format!("{name}:{}: a function of {len} lines", nth + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
