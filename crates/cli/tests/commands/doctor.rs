//! `doctor`: `create` and `export` can use everything that doctor reports as working, and doctor
//! leaves no files.

use serde_json::Value;

use crate::common::{Udm, text};

const MIB: u64 = 1 << 20;

/// The check `name` of a list.
fn check<'a>(list: &'a Value, name: &str) -> &'a Value {
    let mut all = list.as_array().unwrap().iter();
    all.find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}: {list}"))
}

fn works(list: &Value, name: &str) -> bool {
    check(list, name)["works"].as_bool().unwrap()
}

#[test]
fn a_export_that_it_says_works_can_be_opened_and_another_cannot() {
    let udm = Udm::new();
    let exports = &udm.json(&["doctor"])["exports"];
    let names: Vec<&str> =
        exports.as_array().unwrap().iter().map(|export| export["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ublk", "vhost-user", "nbd+unix", "nbd", "nbds", "libudm"]);
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let vhost = format!("vhost-user://{}", udm.path("vhost").display());
    let nbd = udm.uri("nbd");
    for (name, uri) in [
        ("ublk", "ublk:"),
        ("vhost-user", &vhost),
        ("nbd+unix", &nbd),
        ("nbd", "nbd://127.0.0.1:0"),
    ] {
        let is_open = udm.run(&["export", "vol", uri]).code == 0;
        assert_eq!(is_open, works(exports, name), "{name}: {}", check(exports, name));
    }
    for export in exports.as_array().unwrap().iter().filter(|export| export["works"] == false) {
        assert!(export["what"].as_str().is_some_and(|why| !why.is_empty()), "{export}");
        assert!(export["help"].as_str().is_some_and(|help| !help.is_empty()), "{export}");
    }
    let mut left = udm.left();
    left.sort();
    assert_eq!(left, ["vol.ctl", "vol.lock", "vol.table"], "doctor left files");
}

#[test]
fn a_mode_that_it_says_works_in_a_folder_is_one_that_a_table_can_have() {
    let udm = Udm::new();
    let folder = udm.path("data");
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("file");
    let places = udm.json(&["doctor", text(&folder)])["places"].take();
    assert_eq!(places.as_array().unwrap().len(), 1);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "the file is removed again");
    std::fs::File::create(&file).unwrap().set_len(MIB).unwrap();
    let checks = &places[0]["checks"];
    for mode in ["direct", "dontcache", "lazy"] {
        let table = format!("0 2048 linear {}?io={mode} 0", file.display());
        let is_served = udm.run(&["create", mode, "--table", &table]).code == 0;
        let name = format!("io={mode}");
        assert_eq!(is_served, works(checks, &name), "{}", check(checks, &name));
        if is_served {
            udm.ok(&["remove", mode]);
        }
    }
    assert!(works(checks, "sync_file_range"), "{checks}");
    // How pages get to the device is found by the first write, here as in a server.
    let way = check(checks, "io=lazy")["what"].as_str().unwrap();
    assert!(way.starts_with("RWF_DONTCACHE:") || way.starts_with("sync_file_range:"), "{way}");
}

#[test]
fn what_is_in_use_is_only_read_and_memory_is_told_from_what_survives_power() {
    let udm = Udm::new();
    let (origin, fast) = (udm.file("origin", 64 * MIB), udm.file("fast", 512 * MIB));
    let table = format!("0 131072 pcache {} {}", fast.display(), origin.display());
    udm.ok(&["create", "vol", "--table", &table]);
    let before = std::fs::read(&fast).unwrap();
    let said = udm.json(&["doctor", "vol", text(&origin)]);
    let places = said["places"].as_array().unwrap();
    let told: Vec<(&str, Option<&str>)> = places
        .iter()
        .map(|place| (place["path"].as_str().unwrap(), place["device"].as_str()))
        .collect();
    let expected = [
        (text(&fast), Some("cache of vol")),
        (text(&origin), Some("origin of vol")),
        (text(&origin), None),
    ];
    assert_eq!(told, expected);
    assert!(std::fs::read(&fast).unwrap() == before, "doctor does not write");
    // The server says the same of the medium.
    let facts = udm.json(&["info", "vol"])["lines"][0]["facts"].take();
    let medium = check(&places[0]["checks"], "as a cache in memory");
    assert_eq!(medium["what"], facts["medium"]);
    let survives = facts["medium_is_volatile"] == false;
    assert_eq!(works(&places[0]["checks"], "power cuts"), survives);
    let text = udm.ok(&["doctor", "vol"]);
    assert!(text.contains(&format!("{} (cache of vol):\n", fast.display())), "{text}");
    if std::path::Path::new("/dev/shm").exists() {
        let places = &udm.json(&["doctor", "/dev/shm"])["places"];
        assert!(!works(&places[0]["checks"], "power cuts"), "{places}");
        assert!(!works(&places[0]["checks"], "DAX"), "{places}");
    }
}

#[test]
fn what_is_not_there_is_refused_and_where_nothing_works_the_code_says_so() {
    let udm = Udm::new();
    assert!(udm.refused(&["doctor", "/nonexistent/file"]).contains("no such file"));
    let line = udm.refused(&["doctor", "missing"]);
    assert!(line.contains("missing: no such device"), "{line}");
    // A device that can be looked at in no way is a finding, not an error.
    let places = udm.json(&["doctor", "/dev/null"])["places"].take();
    assert!(!works(&places[0]["checks"], "as a disk"), "{places}");
    // Without a directory of its own a server cannot start; a program can have a device.
    std::fs::write(udm.path("file"), "").unwrap();
    let mut elsewhere = udm.command(&["doctor", "--json"]);
    let output = elsewhere.env("UDM_RUNTIME_DIR", udm.path("file/below")).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!works(&said["exports"], "nbd+unix") && works(&said["exports"], "libudm"), "{said}");
    assert!(!works(&said["machine"], "shared memory"), "{said}");
    // Without a free file descriptor, io_uring and sockets do not work.
    let own = udm.command(&["doctor", "--json"]);
    let mut poor = std::process::Command::new("prlimit");
    poor.arg("--nofile=4").arg(own.get_program()).args(own.get_args());
    own.get_envs().for_each(|(name, value)| match value {
        Some(value) => _ = poor.env(name, value),
        None => _ = poor.env_remove(name),
    });
    let output = poor.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        said["exports"].as_array().unwrap().iter().all(|export| export["works"] == false),
        "{said}"
    );
    assert!(!works(&said["machine"], "io_uring"), "{said}");
}
