//! Tables that change while a device is live, and the words in them: paths and numbers.

use std::fs::OpenOptions;

use crate::common::{Loop, Udm, client, for_clients, pattern, read_export, text, write_export};

const MIB: u64 = 1 << 20;

#[test]
fn a_linear_grows_on_the_device_that_it_has() {
    let udm = Udm::new();
    let disk = udm.file("disk.img", MIB);
    let uri = udm.uri("l.sock");
    udm.ok(&["create", "l", "--table", "0 2048 linear disk.img 0", "--export", &uri]);
    let data = pattern(7, MIB as usize);
    write_export(&udm, &uri, &data);
    OpenOptions::new().write(true).open(&disk).unwrap().set_len(4 * MIB).unwrap();
    // Also through another name of it.
    std::os::unix::fs::symlink(&disk, udm.path("link")).unwrap();
    for (table, sectors) in [
        ("0 4096 linear disk.img 0", 4096),
        ("0 4096 delay link 0 1", 4096),
        ("0 2048 linear disk.img?io=buffered 0\n2048 6144 linear link 2048", 8192),
        ("0 8192 linear disk.img 0", 8192),
    ] {
        udm.ok(&["load", "l", "--table", table]);
        udm.ok(&["resume", "l"]);
        assert_eq!(udm.json(&["info", "l"])["size_bytes"], sectors * 512);
        assert!(read_export(&udm, &uri)[..data.len()] == data[..], "{table}");
    }
    let more = pattern(8, 4 * MIB as usize);
    write_export(&udm, &uri, &more);
    assert!(std::fs::read(&disk).unwrap() == more);

    // It is still for this device alone, also while only a loaded table has it.
    let other = ["create", "other", "--table", "0 8 linear disk.img 0"];
    assert!(udm.refused(&other).contains("in use"));
    udm.ok(&["load", "l", "--table", "0 8 zero"]);
    udm.ok(&["resume", "l"]);
    udm.ok(&other);
    udm.ok(&["remove", "other"]);
    udm.ok(&["load", "l", "--table", "0 8 linear disk.img 0"]);
    assert!(udm.refused(&other).contains("in use"));
    udm.ok(&["load", "l", "--table", "0 8 zero"]);
    udm.ok(&other);
}

#[test]
fn a_table_that_cannot_be_loaded_leaves_the_active_one() {
    let udm = Udm::new();
    udm.file("disk.img", MIB);
    let uri = udm.uri("l.sock");
    udm.ok(&["create", "l", "--table", "0 2048 linear disk.img 0", "--export", &uri]);
    let data = pattern(9, MIB as usize);
    write_export(&udm, &uri, &data);
    for (table, why) in [
        ("0 1024 linear disk.img 0\n1024 8 linear missing.img 0", "No such file"),
        ("0 4096 linear disk.img 0", "too small"),
        // What keeps data on a device, or about it, has it alone.
        ("0 1024 writecache s disk.img disk.img 4096 0", "the same"),
        ("0 1024 writecache s disk.img other.img 4096 0", "in use"),
    ] {
        udm.file("other.img", MIB);
        let line = udm.refused(&["load", "l", "--table", table]);
        assert!(line.contains(why), "{line}");
        assert!(read_export(&udm, &uri) == data);
    }
    assert!(udm.refused(&["create", "o", "--table", "0 8 linear disk.img 0"]).contains("in use"));
    udm.ok(&["remove", "l"]);
    udm.ok(&["create", "o", "--table", "0 8 linear disk.img 0"]);
}

#[test]
fn paths_are_printed_as_they_are_found_from_anywhere() {
    let udm = Udm::new();
    udm.file("slow.img", 8 * MIB);
    udm.file("fast.img", 8 * MIB);
    let folder = udm.path("");
    let folder = text(&folder).trim_end_matches('/');
    let table = "0 16384 writecache s ./slow.img fast.img?io=buffered 4096 0";
    let uri = udm.uri("w.sock");
    udm.ok(&["create", "w", "--table", table, "--export", &uri]);
    let printed = udm.ok(&["table", "w"]);
    assert!(printed.contains(&format!(" s {folder}/slow.img {folder}/fast.img?io=buffered ")));
    let facts = &udm.json(&["info", "w"])["lines"][0]["facts"];
    assert_eq!(facts["origin_device"], format!("{folder}/slow.img"));
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    udm.ok(&["suspend", "w"]);
    assert!(udm.ok(&["remove", "w"]).contains(&format!("stay in the cache {folder}/fast.img")));
    let line = udm.refused(&["create", "v", "--table", "0 8 linear no/such.img 0"]);
    assert!(line.contains(&format!("{folder}/no/such.img: No such file")), "{line}");
    // The printed table makes the same device in any directory.
    let mut create = udm.command(&["create", "w", "--table", &printed]);
    assert!(create.current_dir("/").output().unwrap().status.success());
    assert_eq!(udm.ok(&["table", "w"]), printed);
}

#[test]
fn a_block_device_may_be_named_by_its_number() {
    let udm = Udm::new();
    let line = udm.refused(&["create", "n", "--table", "0 8 linear 4095:77 0"]);
    assert!(line.contains("4095:77: no node in /dev has this device number"), "{line}");
    if !rustix::process::geteuid().is_root() {
        eprintln!("not tested: only root can make loop devices");
        return;
    }
    let image = udm.file("image", 4 * MIB);
    let device = Loop::attach(&image, &[]).expect("root can make loop devices");
    let node = text(&device.0);
    udm.ok(&["create", "n", "--table", &format!("0 2048 linear {node} 0")]);
    let printed = udm.ok(&["table", "n"]);
    assert!(printed.starts_with("0 2048 linear 7:"), "{printed}");
    // Loaded over itself, then as a device of its own.
    udm.ok(&["load", "n", "--table", &printed.replace("2048", "4096")]);
    udm.ok(&["resume", "n"]);
    assert_eq!(udm.json(&["info", "n"])["size_bytes"], 2 * MIB);
    udm.ok(&["remove", "n"]);
    let uri = udm.uri("n.sock");
    udm.ok(&["create", "n", "--table", &printed, "--export", &uri]);
    assert_eq!(udm.ok(&["table", "n"]), printed);
    let data = pattern(2, MIB as usize);
    write_export(&udm, &uri, &data);
    udm.ok(&["remove", "n"]);
    assert!(std::fs::read(&image).unwrap()[..data.len()] == data[..]);
}

/// Offsets and lengths that an export says are data, as far as `len`.
fn data_of(uri: &str, len: u64) -> Vec<(u64, u64)> {
    let map = client("nbdinfo", &["--map", &for_clients(uri)]);
    let mut data: Vec<(u64, u64)> = Vec::new();
    let mut covered = 0;
    for line in map.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |nth: usize| words[nth].parse::<u64>().unwrap();
        let (at, bytes, kind) = (number(0), number(1), number(2));
        assert_eq!(at, covered, "{map}");
        covered += bytes;
        match data.last_mut() {
            _ if kind != 0 => {}
            Some(last) if last.0 + last.1 == at => last.1 += bytes,
            _ => data.push((at, bytes)),
        }
    }
    assert_eq!(covered, len, "{map}");
    data
}

#[test]
fn holes_of_the_origin_are_told_and_never_where_the_cache_has_data() {
    for target in ["linear", "delay", "writecache", "pcache"] {
        let udm = Udm::new();
        let slow = udm.file("slow.img", 64 * MIB);
        let on_disk = pattern(3, MIB as usize);
        std::os::unix::fs::FileExt::write_all_at(
            &OpenOptions::new().write(true).open(&slow).unwrap(),
            &on_disk,
            32 * MIB,
        )
        .unwrap();
        udm.file("fast.img", 600 * MIB);
        let words = match target {
            "linear" => "linear slow.img 0",
            "delay" => "delay slow.img 0 1",
            "writecache" => "writecache s slow.img fast.img 4096 2 high_watermark 100",
            _ => "pcache fast.img slow.img",
        };
        let uri = udm.uri("vol.sock");
        let table = format!("0 131072 {words}");
        udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
        assert_eq!(data_of(&uri, 64 * MIB), [(32 * MIB, MIB)], "{target}");
        // Over a hole, and not written back.
        let data = pattern(4, 2 * MIB as usize + 4096);
        write_export(&udm, &uri, &data);
        let wanted = [(0, data.len() as u64), (32 * MIB, MIB)];
        for step in [&["suspend", "vol"][..], &["resume", "vol"], &["drain", "vol"]] {
            udm.ok(step);
            assert_eq!(data_of(&uri, 64 * MIB), wanted, "{target} {step:?}");
        }
        // A copy that trusts it is the same.
        let copy = read_export(&udm, &uri);
        assert!(copy[..data.len()] == data[..], "{target}");
        assert!(copy[32 << 20..][..on_disk.len()] == on_disk[..], "{target}");
        udm.ok(&["remove", "vol"]);
    }
}

#[test]
fn a_mixed_lazy_device_is_made_again_from_its_table() {
    let udm = Udm::new();
    udm.file("disk.img", 4 * MIB);
    let uri = udm.uri("l.sock");
    let word = "disk.img?io=lazy,read=buffered&window=16M";
    let line = format!("0 8192 linear {word} 0");
    udm.ok(&["create", "l", "--table", &line, "--export", &uri]);
    let data = pattern(11, 4 * MIB as usize);
    write_export(&udm, &uri, &data);
    let table = udm.ok(&["table", "l"]);
    assert!(table.contains("disk.img?io=lazy,read=buffered&window=16M"), "{table}");
    let has_window = || udm.ok(&["status", "l", "--all"]).contains("16777216");
    assert!(has_window());
    udm.ok(&["remove", "l"]);
    udm.ok(&["create", "l", "--table", table.trim_end(), "--export", &uri]);
    assert_eq!(udm.ok(&["table", "l"]), table);
    assert!(has_window());
    assert!(read_export(&udm, &uri) == data);
}

#[test]
fn advice_names_the_whole_line() {
    for target in ["pcache", "writecache", "cache"] {
        let udm = Udm::new();
        let (origin, other) = (udm.file("o", 8 << 20), udm.file("other", 8 << 20));
        let (fast, meta) = (udm.file("f", 512 << 20), udm.file("m", 4 << 20));
        let (fast, meta) = (text(&fast), text(&meta));
        let line = |origin: &std::path::Path| match target {
            "pcache" => format!("0 16384 pcache {fast} {} 0 max_age 3600000", text(origin)),
            "writecache" => {
                format!("0 16384 writecache s {} {fast} 4096 2 max_age 3600000", text(origin))
            }
            _ => format!("0 16384 cache {meta} {fast} {} 128 0 smq 0", text(origin)),
        };
        let uri = udm.uri("v.sock");
        udm.ok(&["create", "v", "--table", &line(&origin), "--export", &uri]);
        write_export(&udm, &uri, &pattern(3, 1 << 20));
        udm.ok(&["remove", "v", "--force"]);
        let refused = udm.run(&["create", "v", "--table", &line(&other)]);
        let right = format!("{} rebind true", line(&other));
        let advice = format!("; the whole line is `{right}`");
        assert!(refused.code == 1 && refused.err.contains(&advice), "{target}: {refused:?}");
        // The line is as good as the advice says.
        udm.ok(&["create", "v", "--table", &right]);
    }
}

#[test]
fn own_options_among_the_counted_ones_are_refused_with_the_right_line() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("o", 8 << 20), udm.file("f", 8 << 20));
    let (blocks, meta) = (udm.file("b", 8 << 20), udm.file("m", 4 << 20));
    let (o, f, b, m) = (text(&origin), text(&fast), text(&blocks), text(&meta));
    for (wrong, right) in [
        (
            format!("writecache s {o} {f} 4096 3 cleaner lost_memory accept"),
            format!("writecache s {o} {f} 4096 1 cleaner lost_memory accept"),
        ),
        (
            format!("cache {m} {b} {o} 128 0 smq 2 rebind true"),
            format!("cache {m} {b} {o} 128 0 smq 0 rebind true"),
        ),
    ] {
        let refused = udm.run(&["create", "v", "--table", &format!("0 16384 {wrong}")]);
        let advice = format!("follows the counted arguments: `{right}`");
        assert!(refused.code == 1 && refused.err.contains(&advice), "{refused:?}");
        udm.ok(&["create", "v", "--table", &format!("0 16384 {right}")]);
        udm.ok(&["remove", "v"]);
    }
}

#[test]
fn absolute_paths_work_in_a_directory_that_was_deleted() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("o", 8 << 20), udm.file("f", 8 << 20));
    let (o, f) = (text(&origin), text(&fast));
    let gone = udm.path("gone");
    let run = |words: &[&str]| {
        std::fs::create_dir(&gone).unwrap();
        let own = udm.command(words);
        // A shell is in the directory when it is deleted.
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "cd \"$0\" && rmdir \"$0\" && exec \"$@\"", text(&gone)]);
        let output = udm.at_home(shell).arg(own.get_program()).args(words).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let line = format!("0 16384 linear {o} 0");
    for words in [
        &["create", "v", "--table", &line][..],
        &["load", "v", "--table", &line],
        &["ls"],
        &["remove", "v"],
        &["create", "v", "--origin", o, "--fast", f, "--target", "writecache"],
        &["remove", "v"],
        &["recover", f, o],
    ] {
        let (code, errors) = run(words);
        assert_eq!(code, Some(0), "{words:?}: {errors}");
    }
    let (code, errors) = run(&["create", "v", "--table", "0 16384 linear o 0"]);
    assert!(code == Some(1) && errors.contains("deleted: give absolute paths"), "{errors}");
}

#[test]
fn a_path_with_a_line_break_is_refused_by_name() {
    let udm = Udm::new();
    let origin = udm.file("a\nb", 8 << 20);
    let fast = udm.file("f", 8 << 20);
    let outcome = udm.run(&["create", "v", "--origin", text(&origin), "--fast", text(&fast)]);
    assert!(outcome.code == 2 && outcome.err.contains("--origin"), "{outcome:?}");
    assert!(outcome.err.contains("a path with a line break"), "{outcome:?}");
}
