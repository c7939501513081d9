//! If the machine's boot cannot be identified, udm neither uses the memory of a dead server nor
//! treats it as lost. It opens no cache.

use std::process::Command;

use crate::common::{Outcome, Udm, pattern, text, write_export};

/// A table of a cache, and the words that recover it by hand.
struct Case {
    table: String,
    cache: String,
    origin: String,
}

fn cases(udm: &Udm) -> Vec<Case> {
    let new = |name: &str, bytes: u64, line: &dyn Fn(&str, &str) -> String| {
        let origin = udm.file(&format!("{name}.origin"), 64 << 20);
        let cache = udm.file(&format!("{name}.cache"), bytes);
        let (origin, cache) = (text(&origin).to_owned(), text(&cache).to_owned());
        Case { table: format!("0 131072 {}", line(&origin, &cache)), cache, origin }
    };
    vec![
        new("pcache", 512 << 20, &|origin, cache| format!("pcache {cache} {origin}")),
        new("memory", 72 << 20, &|origin, cache| format!("writecache p {origin} {cache} 4096 0")),
        new("disk", 72 << 20, &|origin, cache| format!("writecache s {origin} {cache} 4096 0")),
    ]
}

/// Runs a command with the kernel's random numbers hidden, the boot id among them.
fn without_boot(udm: &Udm, words: &[&str]) -> Outcome {
    let hide = "mount -t tmpfs none /proc/sys/kernel/random && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", hide, "sh", env!("CARGO_BIN_EXE_udm")]).args(words);
    let of_udm = udm.command(&[]);
    for (name, value) in of_udm.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.current_dir(of_udm.get_current_dir().unwrap()).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

#[test]
fn memory_of_a_dead_server_is_not_judged_by_an_unknown_boot() {
    let udm = Udm::new();
    let outcome = without_boot(&udm, &["ls"]);
    if outcome.err.contains("unshare") || outcome.err.contains("mount:") {
        eprintln!("SKIPPED: the files cannot be hidden here (it needs root): {}", outcome.err);
        return;
    }
    assert_eq!(outcome.code, 0, "a command that opens no cache needs no boot: {outcome:?}");
    for case in cases(&udm) {
        let uri = udm.uri("vol.sock");
        let create = ["create", "vol", "--table", &case.table, "--export", &uri];
        udm.ok(&create);
        write_export(&udm, &uri, &pattern(5, 1 << 20));
        udm.kill_server("vol");
        let before = std::fs::read(&case.cache).unwrap();
        for words in [
            &create[..],
            &["inspect", &case.cache],
            &["recover", &case.cache, &case.origin],
            &["recover", &case.cache, &case.origin, "--accept-loss"],
        ] {
            let line = without_boot(&udm, words).one_line(words[0]);
            assert!(line.contains("the boot ID cannot be read"), "{line}");
            assert!(line.contains("/proc/sys/kernel/random/boot_id"), "{line}");
        }
        assert!(std::fs::read(&case.cache).unwrap() == before, "the medium is as it was");
        udm.ok(&create);
        udm.ok(&["remove", "vol", "--drain"]);
        let origin = std::fs::read(&case.origin).unwrap();
        assert!(origin[..1 << 20] == pattern(5, 1 << 20), "{}", case.table);
    }
}
