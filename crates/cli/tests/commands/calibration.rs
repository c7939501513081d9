//! Copies to memory are calibrated by the first server that opens such a medium.

use std::fs;

use crate::common::Udm;

#[test]
fn a_first_server_calibrates_copies_for_the_next() {
    let udm = Udm::new();
    udm.file("slow", 64 << 20);
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let fast = memory.path().join("fast");
    fs::File::create(&fast).unwrap().set_len(512 << 20).unwrap();
    let table = format!("0 131072 pcache {} slow", fast.display());
    udm.ok(&["create", "vol", "--table", &table]);
    udm.ok(&["remove", "vol"]);
    let remembered = fs::read_to_string(udm.path("state/copies"));
    if cfg!(target_arch = "x86_64") {
        let lines = remembered.unwrap();
        let fields: Vec<&str> = lines.trim_end().split('\t').collect();
        assert!(fields[0].starts_with("0=") && fields[0].contains(" 4096="), "{lines}");
        assert_eq!((fields.len(), fields[1]), (3, "tmpfs"), "{lines}");
    }
    // The scratch file next to the cache device is gone.
    assert_eq!(fs::read_dir(memory.path()).unwrap().count(), 1);
}
