//! Numbers at their limits: each number that a command line, a table or a message takes either
//! works or is refused with a sentence. No command panics, and no server ends.
//!
//! The options are those that `--help` and `udm targets` list, and so the test has new ones.

use crate::common::{Outcome, Udm, text};

const MIB: u64 = 1 << 20;

/// 0, 1, and the values around the limits of all types; fractions, signs, and no number.
const VALUES: [&str; 25] = [
    "0",
    "1",
    "2",
    "127",
    "65534",
    "65535",
    "65536",
    "4294967294",
    "4294967295",
    "4294967296",
    "9223372036854775806",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551614",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
    "0.5",
    "1.",
    ".5",
    "-1",
    "",
    "1e3",
    "nan",
    "99999999999999999999999999999999999999999999999999999999999999999999999999999999.9",
];

fn refuses_or_works(outcome: &Outcome, words: &[&str]) {
    let is_known = (0..=2).contains(&outcome.code);
    assert!(is_known, "udm {words:?}: {outcome:?}");
    assert!(outcome.code == 0 || outcome.err.starts_with("udm: "), "udm {words:?}: {outcome:?}");
    for word in ["panicked", "this server ends because of a bug", "the server ended"] {
        assert!(!outcome.err.contains(word), "udm {words:?}: {outcome:?}");
    }
}

/// The commands below `words`, as help lists them.
fn commands_of(udm: &Udm, words: &[&str]) -> Vec<String> {
    let help = udm.ok(&[words, &["--help"]].concat());
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| line.starts_with("  "));
    let names = lines.filter(|line| !line.starts_with("   ")).filter_map(|line| {
        line.split_whitespace().next().filter(|name| !["help", "bench"].contains(name))
    });
    names.map(str::to_owned).collect()
}

/// The options with a value, and the words that the command needs in any case.
fn options_of(help: &str) -> (Vec<String>, Vec<String>) {
    let options = help.lines().filter_map(|line| {
        let mut words = line.split_whitespace().skip_while(|word| !word.starts_with('-'));
        let name = words.find(|word| word.starts_with("--"))?;
        words.next().is_some_and(|value| value.starts_with('<')).then(|| name.to_owned())
    });
    let usage = help.lines().find(|line| line.starts_with("Usage: ")).unwrap_or_default();
    let needed = usage.split_whitespace().filter(|word| word.starts_with('<'));
    (options.collect(), needed.map(str::to_owned).collect())
}

#[test]
fn each_number_of_the_command_line_works_or_is_refused() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let mut commands: Vec<Vec<String>> = Vec::new();
    for name in commands_of(&udm, &[]) {
        let below = commands_of(&udm, &[&name]);
        match below.is_empty() {
            true => commands.push(vec![name]),
            false => commands.extend(below.into_iter().map(|sub| vec![name.clone(), sub])),
        }
    }
    let mut tried = Vec::new();
    for command in &commands {
        let command: Vec<&str> = command.iter().map(String::as_str).collect();
        let (options, needed) = options_of(&udm.ok(&[&command[..], &["--help"]].concat()));
        // A device that exists, so that the number is reached; a new one for `create`.
        let new = ["create", "n", "--table", "0 8 zero"];
        let plain: Vec<&str> = match command[0] {
            "create" => new.to_vec(),
            _ => {
                let word = |word: &String| match word.as_str() {
                    "<SECTOR>" => "0",
                    _ => "v",
                };
                command.iter().copied().chain(needed.iter().map(word)).collect()
            }
        };
        for option in &options {
            for value in VALUES {
                // A value with a sign needs the form with `=`.
                let given = format!("{option}={value}");
                let words = [&plain[..], &[&given]].concat();
                refuses_or_works(&udm.run(&words), &words);
                if command[0] == "create" {
                    let _ = udm.run(&["remove", "n"]);
                }
            }
            tried.push(format!("{} {option}", command.join(" ")));
        }
    }
    for known in
        ["wait --timeout", "create --queues", "create --block-size", "recover --start-sector"]
    {
        assert!(tried.iter().any(|tried| tried == known), "{known}: {tried:?}");
    }
    // Sectors are arguments and not options.
    for value in VALUES {
        let words = ["message", "v", value, "word"];
        refuses_or_works(&udm.run(&words), &words);
    }
    assert_eq!(udm.json(&["info", "v"])["state"], "active");
}

#[test]
fn a_timeout_is_any_number_of_seconds() {
    let udm = Udm::new();
    udm.ok(&["create", "v", "--table", "0 8 zero"]);
    let forever = "9".repeat(400);
    for value in ["0", "0.5", ".5", "1.", "1000000000", "9223372036854775807", &forever] {
        udm.ok(&["wait", "v", "--timeout", value]);
        if let Ok(0.0..1.0) = value.parse::<f64>() {
            let line = udm.refused(&["wait", "w", "--timeout", value]);
            assert!(line.contains(&format!("no such device after {value} s")), "{line}");
        }
    }
    for value in ["-1", "", ".", "1e3", "inf", "nan", "1,5", "1s", "0x10"] {
        let outcome = udm.run(&["wait", "v", &format!("--timeout={value}")]);
        assert_eq!(outcome.code, 2, "{value}: {outcome:?}");
        assert!(outcome.err.contains("a number of seconds"), "{value}: {outcome:?}");
    }
}

#[test]
fn each_number_of_a_table_works_or_is_refused() {
    let udm = Udm::new();
    let origin = udm.file("o", 4 * MIB);
    let fast = udm.file("f", 8 * MIB);
    let meta = udm.file("m", 4 * MIB);
    let (o, f, m) = (text(&origin), text(&fast), text(&meta));
    let mut tables = Vec::new();
    for target in ["zero", "error"] {
        tables.extend([format!("N 8 {target}"), format!("0 N {target}")]);
    }
    for words in
        ["linear {o} N", "delay {o} 0 N", "delay {o} N 1", "flakey {o} 0 N 1", "flakey {o} 0 1 N"]
    {
        tables.push(format!("0 8192 {words}"));
    }
    for option in ["offset=N", "size=N", "io=lazy&window=N"] {
        tables.push(format!("0 8 linear {{o}}?{option} 0"));
        tables.push(format!("0 8192 writecache s {{o}} {{f}}?{option} 4096 0"));
    }
    tables.push("0 8192 writecache s {o} {f} N 0".into());
    tables.push("0 8192 writecache s {o} {f} 4096 N".into());
    tables.push("0 8192 cache {m} {f} {o} N 0 smq 0".into());
    tables.push("0 8192 cache {m} {f} {o} 128 N smq 0".into());
    tables.push("0 8192 cache {m} {f} {o} 128 0 smq N".into());
    for key in ["migration_threshold", "random_threshold", "sequential_threshold"] {
        tables.push(format!("0 8192 cache {{m}} {{f}} {{o}} 128 0 mq 2 {key} N"));
    }
    // The options that the grammar lists with a number.
    let mut listed = 0;
    for target in ["writecache", "pcache", "cache"] {
        let grammar = udm.ok(&["targets", target]);
        let places = grammar.split('[').skip(1).filter_map(|part| part.split(']').next());
        for option in places {
            let Some((name, value)) = option.split_once(' ') else { continue };
            let is_number = value.chars().all(|letter| letter.is_ascii_uppercase());
            if !is_number || name.contains('<') {
                continue;
            }
            listed += 1;
            tables.push(match target {
                "writecache" => format!("0 8192 writecache s {{o}} {{f}} 4096 2 {name} N"),
                "pcache" => format!("0 8192 pcache {{f}} {{o}} 0 {name} N"),
                _ => format!("0 8192 cache {{m}} {{f}} {{o}} 128 0 smq 2 {name} N"),
            });
        }
    }
    assert!(listed >= 10, "{tables:?}");
    for table in &tables {
        let table = table.replace("{o}", o).replace("{f}", f).replace("{m}", m);
        for value in VALUES {
            let table = table.replacen('N', value, 1);
            let words = ["create", "v", "--table", &table];
            let outcome = udm.run(&words);
            refuses_or_works(&outcome, &words);
            if outcome.code == 0 {
                let removed = udm.run(&["remove", "v"]);
                assert_eq!(removed.code, 0, "{table}: {removed:?}");
            }
            for file in [&fast, &meta] {
                // The next table finds empty devices.
                let len = std::fs::metadata(file).unwrap().len();
                let file = std::fs::File::create(file).unwrap();
                file.set_len(len).unwrap();
            }
        }
    }
}

#[test]
fn each_number_of_a_message_works_or_is_refused() {
    let udm = Udm::new();
    let (o, f, m) = (udm.file("o", 4 * MIB), udm.file("f", 512 * MIB), udm.file("m", 4 * MIB));
    let (o, f, m) = (text(&o), text(&f), text(&m));
    for (table, messages) in [
        (format!("0 8192 pcache {f} {o}"), &["gc_percent N"][..]),
        (format!("0 8192 writecache s {o} {f} 4096 0"), &["flush N", "clear_stats N"]),
        (
            format!("0 8192 cache {m} {f} {o} 128 0 smq 0"),
            &["migration_threshold N", "invalidate_cblocks N", "invalidate_cblocks 0-N"],
        ),
    ] {
        udm.ok(&["create", "v", "--table", &table, "--force-format"]);
        let pid = udm.pid("v");
        for message in messages {
            for value in VALUES {
                let message = message.replace('N', value);
                let words: Vec<&str> = message.split(' ').filter(|word| !word.is_empty()).collect();
                let words = [&["message", "v", "0"], &words[..]].concat();
                refuses_or_works(&udm.run(&words), &words);
            }
        }
        assert_eq!(udm.pid("v"), pid, "{table}");
        udm.ok(&["remove", "v"]);
        std::fs::write(udm.path("f"), "").unwrap();
        udm.file("f", 512 * MIB);
    }
}
