//! Acts on cache devices: they are moved, copied, replaced by old copies, or used with another
//! runtime directory, while a server is alive and after one was killed. Afterwards all acknowledged
//! data is there, or the attach is refused and the error names the place of the data. Data is never
//! missing without a report, and shared memory is never written to a medium that it does not belong
//! to.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::Command;

use crate::common::{Outcome, Udm, client, for_clients, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
const ACCEPT: &str = " lost_memory accept";

/// A target, and how large its cache is.
#[derive(Clone, Copy, Debug)]
struct Kind {
    target: &'static str,
    cache_bytes: u64,
}

const PCACHE: Kind = Kind { target: "pcache", cache_bytes: 512 * MIB };
const WC_P: Kind = Kind { target: "writecache p", cache_bytes: 64 * MIB };
const WC_S: Kind = Kind { target: "writecache s", cache_bytes: 64 * MIB };

fn for_each_kind(run: impl Fn(Kind, &Udm)) {
    for kind in [PCACHE, WC_P, WC_S] {
        let udm = Udm::new();
        udm.file("O", ORIGIN_BYTES);
        udm.file("O2", ORIGIN_BYTES);
        udm.file("C", kind.cache_bytes);
        println!("{kind:?}");
        run(kind, &udm);
    }
}

fn table(kind: Kind, cache: &str, origin: &str) -> String {
    let sectors = ORIGIN_BYTES / 512;
    match kind.target {
        "pcache" => format!("0 {sectors} pcache {cache} {origin} 0"),
        target => format!("0 {sectors} {target} {origin} {cache} 4096 0"),
    }
}

impl Kind {
    fn create(self, udm: &Udm, name: &str, cache: &str, origin: &str) {
        udm.ok(&[
            "create",
            name,
            "--table",
            &table(self, cache, origin),
            "--export",
            &udm.uri(name),
        ]);
    }

    fn refused(self, udm: &Udm, name: &str, cache: &str, origin: &str) -> String {
        udm.refused(&["create", name, "--table", &table(self, cache, origin)])
    }
}

/// Writes without a flush: udm only acknowledges the data.
fn write_unflushed(udm: &Udm, name: &str, bytes: &[u8]) {
    let file = udm.path("to-write");
    std::fs::write(&file, bytes).unwrap();
    client("nbdcopy", &[text(&file), &for_clients(&udm.uri(name))]);
}

fn holds(udm: &Udm, name: &str, bytes: &[u8]) -> bool {
    read_export(udm, &udm.uri(name))[..bytes.len()] == *bytes
}

fn copy(udm: &Udm, from: &str, to: &str) {
    let (from, to) = (udm.path(from), udm.path(to));
    client("cp", &["--sparse=auto", text(&from), text(&to)]);
}

fn rename(udm: &Udm, from: &str, to: &str) {
    std::fs::rename(udm.path(from), udm.path(to)).unwrap();
}

/// Files of shared memory.
fn memories(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains(".shm")).collect()
}

fn run_in(udm: &Udm, runtime: &str, words: &[&str]) -> Outcome {
    let mut command: Command = udm.command(words);
    let output = command.env("UDM_RUNTIME_DIR", udm.path(runtime)).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn two_servers_never_share_memory() {
    for_each_kind(|kind, udm| {
        kind.create(udm, "f", "C", "O");
        rename(udm, "C", "C2");
        udm.file("C", kind.cache_bytes);
        kind.create(udm, "g", "C", "O2");
        assert_eq!(memories(&udm.runtime()).len(), 2);
        let (a, b) = (pattern(1, 4 << 20), pattern(2, 4 << 20));
        write_export(udm, &udm.uri("f"), &a);
        write_export(udm, &udm.uri("g"), &b);
        let (c, d) = (pattern(3, 2 << 20), pattern(4, 2 << 20));
        write_unflushed(udm, "f", &c);
        write_unflushed(udm, "g", &d);
        udm.kill_server("f");
        udm.kill_server("g");
        kind.create(udm, "h", "C2", "O");
        kind.create(udm, "g", "C", "O2");
        for (name, origin, new, old) in [("h", "O", &c, &a), ("g", "O2", &d, &b)] {
            assert!(holds(udm, name, new), "{kind:?} {name}");
            udm.ok(&["remove", name, "--drain"]);
            let drained = std::fs::read(udm.path(origin)).unwrap();
            assert!(drained[..2 << 20] == new[..] && drained[2 << 20..4 << 20] == old[2 << 20..]);
        }
        assert_eq!(memories(&udm.runtime()), Vec::<String>::new(), "no memory is left");
    });
}

#[test]
fn a_cache_that_was_moved_finds_its_memory() {
    for_each_kind(|kind, udm| {
        let bytes = pattern(5, 3 << 20);
        kind.create(udm, "f", "C", "O");
        write_unflushed(udm, "f", &bytes);
        udm.kill_server("f");
        rename(udm, "C", "C2");
        kind.create(udm, "h", "C2", "O");
        assert!(holds(udm, "h", &bytes), "{kind:?}");
        let again = pattern(6, 3 << 20);
        write_unflushed(udm, "h", &again);
        udm.kill_server("h");
        rename(udm, "C2", "C");
        udm.ok(&["recover", "C", "O"]);
        assert!(std::fs::read(udm.path("O")).unwrap()[..again.len()] == again[..], "{kind:?}");
        assert_eq!(memories(&udm.runtime()), Vec::<String>::new());
    });
}

#[test]
fn memory_that_is_elsewhere_is_asked_for() {
    for_each_kind(|kind, udm| {
        let bytes = pattern(7, 3 << 20);
        kind.create(udm, "f", "C", "O");
        write_unflushed(udm, "f", &bytes);
        udm.kill_server("f");
        let place = udm.runtime();
        let place = text(&place);
        std::fs::DirBuilder::new().mode(0o700).create(udm.path("other")).unwrap();
        let line = table(kind, "C", "O");
        for words in [
            &["create", "g", "--table", &line][..],
            &["recover", "C", "O"],
            &["create", "g", "--force-format", "--table", &line],
        ] {
            let outcome = run_in(udm, "other", words);
            assert_eq!(outcome.code, 1, "{kind:?} {words:?}: {outcome:?}");
            let error = outcome.one_line(words[0]);
            assert!(error.contains(place) && error.contains("in shared memory"), "{error}");
            let word = if words[0] == "recover" { "--accept-loss" } else { "lost_memory accept" };
            assert!(error.contains(word), "{error}");
        }
        assert_eq!(memories(&udm.path("other")), Vec::<String>::new(), "refused: nothing is left");
        for runtime in ["run", "other"] {
            let said = run_in(udm, runtime, &["inspect", "C"]);
            assert!(said.out.contains(place) && said.out.contains("in shared memory"), "{said:?}");
            assert!(!said.out.contains("at most 0 B"), "{said:?}");
            let said = run_in(udm, runtime, &["inspect", "C", "--json"]);
            let said: serde_json::Value = serde_json::from_str(&said.out).unwrap();
            assert_eq!(said["served"]["memory_is_there"], true, "{said}");
        }
        // A refused attach leaves the media unchanged: the right directory has all data.
        copy(udm, "C", "C2");
        kind.create(udm, "f", "C", "O");
        assert!(holds(udm, "f", &bytes), "{kind:?}");
        let line = table(kind, "C2", "O2") + ACCEPT + " rebind true";
        let outcome = run_in(udm, "other", &["create", "g", "--table", &line]);
        assert_eq!(outcome.code, 0, "{outcome:?}");
        assert!(outcome.err.contains("LOST"), "{outcome:?}");
        assert_eq!(run_in(udm, "other", &["remove", "--force", "g"]).code, 0);
        udm.ok(&["remove", "f"]);
        let said = udm.ok(&["inspect", "C"]);
        assert!(!said.contains("in memory"), "{said}");
    });
}

#[test]
fn a_copy_of_a_cache_has_no_memory() {
    for_each_kind(|kind, udm| {
        let bytes = pattern(8, 2 << 20);
        kind.create(udm, "f", "C", "O");
        write_unflushed(udm, "f", &bytes);
        copy(udm, "C", "C2");
        copy(udm, "O", "O3");
        let error = kind.refused(udm, "g", "C2", "O");
        assert!(error.contains("in use") || error.contains("running server"), "{error}");
        // By itself, with an origin of its own.
        let line = table(kind, "C2", "O2") + ACCEPT + " rebind true";
        udm.ok(&["create", "g", "--table", &line, "--export", &udm.uri("g")]);
        let other = pattern(9, 2 << 20);
        write_unflushed(udm, "g", &other);
        udm.kill_server("f");
        udm.kill_server("g");
        kind.create(udm, "h", "C2", "O2");
        kind.create(udm, "f", "C", "O");
        assert!(holds(udm, "f", &bytes) && holds(udm, "h", &other), "{kind:?}");
        udm.ok(&["remove", "f", "--drain"]);
        udm.ok(&["remove", "h", "--drain"]);
        assert_eq!(memories(&udm.runtime()), Vec::<String>::new());
    });
}

#[test]
fn a_cache_that_was_rolled_back_does_not_believe_its_memory() {
    for_each_kind(|kind, udm| {
        // The copy lacks what was logged, or only what memory names.
        for is_logged in [true, false] {
            udm.file("C", kind.cache_bytes);
            udm.file("O", ORIGIN_BYTES);
            kind.create(udm, "f", "C", "O");
            let first = pattern(10, 1 << 20);
            write_export(udm, &udm.uri("f"), &first);
            copy(udm, "C", "old");
            let second = pattern(11, 1 << 20);
            if is_logged {
                write_export(udm, &udm.uri("f"), &second);
            }
            write_unflushed(udm, "f", &second[..64 << 10]);
            udm.kill_server("f");
            rename(udm, "C", "newest");
            copy(udm, "old", "C");
            let error = kind.refused(udm, "f", "C", "O");
            assert!(error.contains("older copy"), "{kind:?}: {error}");
            assert!(error.contains("lost_memory accept"), "{error}");
            // The newest one has all of it.
            kind.create(udm, "h", "newest", "O");
            assert!(holds(udm, "h", &second[..64 << 10]), "{kind:?}");
            udm.ok(&["remove", "h"]);
            // The dead device has the newest one, and the old one does not take its place.
            let error = kind.refused(udm, "f", "C", "O");
            assert!(error.contains("an older copy") && error.contains("udm detach f"), "{error}");
            let line = table(kind, "C", "O") + ACCEPT;
            udm.ok(&["create", "h", "--table", &line, "--export", &udm.uri("h")]);
            assert!(holds(udm, "h", &first), "{kind:?}: the copy has not changed");
            udm.ok(&["remove", "h"]);
            udm.ok(&["remove", "f", "--force"]);
            assert_eq!(memories(&udm.runtime()), Vec::<String>::new());
        }
    });
}

#[test]
fn memory_of_another_version_is_named() {
    for_each_kind(|kind, udm| {
        kind.create(udm, "f", "C", "O");
        write_unflushed(udm, "f", &pattern(12, 1 << 20));
        udm.kill_server("f");
        let memory = udm.runtime().join(&memories(&udm.runtime())[0]);
        let mut bytes = std::fs::read(&memory).unwrap();
        bytes[12] = 77;
        std::fs::write(&memory, &bytes).unwrap();
        let error = kind.refused(udm, "f", "C", "O");
        assert!(error.contains("version 77"), "{error}");
    });
}

#[test]
fn what_is_refused_or_of_an_earlier_boot_leaves_no_memory() {
    for_each_kind(|kind, udm| {
        let stale = format!("{}-0123456789abcdef-000000000000.shm", &kind.target[..6]);
        std::fs::write(udm.runtime().join(stale.replace("writec", "writecache")), "old").unwrap();
        kind.create(udm, "f", "C", "O");
        write_export(udm, &udm.uri("f"), &pattern(13, 1 << 20));
        assert_eq!(memories(&udm.runtime()).len(), 1, "the memory of an earlier boot is gone");
        udm.ok(&["remove", "f"]);
        assert_eq!(memories(&udm.runtime()), Vec::<String>::new());
        kind.refused(udm, "f", "C", "O2");
        let line = table(kind, "C", "O");
        udm.refused(&["create", "f", "--table", &line, "--export", "nbd+unix:///no/such/folder/x"]);
        assert_eq!(memories(&udm.runtime()), Vec::<String>::new());
        let said = udm.ok(&["inspect", "C"]);
        assert!(!said.contains("in memory"), "a refused create leaves the label: {said}");
    });
}
