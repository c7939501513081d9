//! `recover` with the arguments that other commands print: of each target, in one step and by a
//! table, first dry. And its effect on a device whose server died.

use crate::common::{Udm, pattern, text, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
const FAST_BYTES: u64 = 512 * MIB;

/// The table of each sort of cache.
fn tables(udm: &Udm) -> Vec<String> {
    let origin = text(&udm.path("slow.img")).to_owned();
    let fast = text(&udm.path("fast.img")).to_owned();
    let line = |words: String| format!("0 {} {words}", ORIGIN_BYTES / 512);
    vec![
        line(format!("pcache {fast} {origin}")),
        line(format!("writecache s {origin} {fast} 4096 0")),
        line(format!("writecache s {origin} {fast}?offset=8M&size=32M 512 2 start_sector 2048")),
        // As one step lays it out, and the other way round.
        line(format!("cache {fast}?size=8M {fast}?offset=8M {origin} 128 1 writeback smq 0")),
        line(format!(
            "cache {fast}?offset=32M&size=8M {fast}?size=32M {origin} 128 1 writeback smq 0"
        )),
    ]
}

/// The command between the last two back-quotes, run by a shell.
fn run_printed(udm: &Udm, line: &str, more: &str) -> (i32, String) {
    let command = line.rsplit("`udm recover ").next().unwrap().split('`').next().unwrap();
    let mut shell = std::process::Command::new("sh");
    let program = env!("CARGO_BIN_EXE_udm");
    shell.args(["-c", &format!("{program} recover {command} {more}")]);
    let output = udm.at_home(shell).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn fresh(udm: &Udm) {
    for (name, bytes) in [("slow.img", ORIGIN_BYTES), ("fast.img", FAST_BYTES)] {
        let _ = std::fs::remove_file(udm.path(name));
        udm.file(name, bytes);
    }
}

fn make_dirty(udm: &Udm, table: &str) {
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", table, "--export", &uri]);
    write_export(udm, &uri, &pattern(3, 1 << 20));
    udm.ok(&["suspend", "vol"]);
}

#[test]
fn the_command_that_a_removal_prints_writes_everything_back() {
    let udm = Udm::new();
    for table in tables(&udm) {
        fresh(&udm);
        make_dirty(&udm, &table);
        let line = udm.ok(&["remove", "vol"]);
        assert!(line.contains("of dirty data stay"), "{line}");
        let before = std::fs::read(udm.path("fast.img")).unwrap();
        let (code, said) = run_printed(&udm, &line, "--dry-run");
        assert!(code == 0 && said.contains("1.0 MiB would be written"), "{table}: {said}");
        assert!(std::fs::read(udm.path("fast.img")).unwrap() == before, "{table}");
        let origin = std::fs::read(udm.path("slow.img")).unwrap();
        assert!(origin.iter().all(|byte| *byte == 0), "{table}");
        let (code, said) = run_printed(&udm, &line, "");
        assert!(code == 0 && said.contains("is written back"), "{table}: {said}");
        assert!(std::fs::read(udm.path("slow.img")).unwrap()[..1 << 20] == pattern(3, 1 << 20));
        let (code, said) = run_printed(&udm, &line, "--dry-run --json");
        assert!(code == 0 && said.contains("\"dirty_bytes\": 0"), "{table}: {said}");
    }
}

#[test]
fn a_recovered_device_whose_server_died_is_forgotten() {
    let udm = Udm::new();
    for table in tables(&udm) {
        fresh(&udm);
        make_dirty(&udm, &table);
        udm.kill_server("vol");
        assert!(udm.ok(&["ls"]).contains("dead"), "{table}");
        let words = match table.matches("fast.img").count() {
            2 if table.contains("fast.img?size=8M") => vec!["recover", "fast.img", "slow.img"],
            2 => vec!["recover", "fast.img?offset=32M&size=8M", "fast.img?size=32M", "slow.img"],
            _ if table.contains("start_sector") => {
                vec!["recover", "fast.img?offset=8M&size=32M", "slow.img", "--start-sector", "2048"]
            }
            _ => vec!["recover", "fast.img", "slow.img"],
        };
        // A dry run keeps the device's entry.
        udm.ok(&[&words[..], &["--dry-run"]].concat());
        assert!(udm.ok(&["ls"]).contains("dead"), "{table}");
        let outcome = udm.run(&words);
        assert!(outcome.code == 0 && outcome.err.contains("is removed"), "{table}: {outcome:?}");
        assert_eq!(udm.ok(&["ls"]), "No devices found\n", "{table}");
        assert_eq!(udm.left(), [""; 0], "{table}");
        assert!(std::fs::read(udm.path("slow.img")).unwrap()[..1 << 20] == pattern(3, 1 << 20));
        udm.ok(&["create", "vol", "--table", &table]);
        udm.ok(&["remove", "vol", "--drain"]);
    }
}

#[test]
fn a_dead_device_that_is_removed_by_force_says_how_to_recover_it() {
    let udm = Udm::new();
    for table in tables(&udm) {
        fresh(&udm);
        make_dirty(&udm, &table);
        udm.kill_server("vol");
        let line = udm.ok(&["remove", "vol", "--force"]);
        let (code, said) = run_printed(&udm, &line, "");
        assert!(code == 0 && said.contains("is written back"), "{table}: {line} {said}");
        assert!(std::fs::read(udm.path("slow.img")).unwrap()[..1 << 20] == pattern(3, 1 << 20));
    }
}

#[test]
fn create_takes_a_moved_cache_with_rebind() {
    for target in ["pcache", "writecache", "cache"] {
        let udm = Udm::new();
        fresh(&udm);
        let uri = udm.uri("vol.sock");
        let words = |origin: &'static str| {
            ["create", "vol", "--origin", origin, "--fast", "fast.img", "--export", &uri]
                .map(str::to_owned)
        };
        let run = |origin: &'static str, more: &[&str]| {
            let words = words(origin);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            udm.run(&[&words[..], &["--target", target], more].concat())
        };
        assert_eq!(run("slow.img", &[]).code, 0);
        write_export(&udm, &uri, &pattern(3, 1 << 20));
        udm.ok(&["suspend", "vol"]);
        udm.ok(&["remove", "vol"]);
        std::fs::copy(udm.path("slow.img"), udm.path("moved.img")).unwrap();
        let outcome = run("moved.img", &[]);
        assert_eq!(outcome.code, 1, "{target}: {outcome:?}");
        let line = outcome.err.lines().last().unwrap().to_owned();
        assert!(line.contains("give --rebind") && !line.contains("table"), "{target}: {line}");
        let outcome = run("moved.img", &["--rebind"]);
        assert_eq!(outcome.code, 0, "{target}: {outcome:?}");
        udm.ok(&["remove", "vol", "--drain"]);
        assert!(std::fs::read(udm.path("moved.img")).unwrap()[..1 << 20] == pattern(3, 1 << 20));
        assert_eq!(run("moved.img", &[]).code, 0, "{target}: it belongs there now");
        udm.ok(&["remove", "vol"]);
    }
}
