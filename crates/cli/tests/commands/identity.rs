//! The identity of disks: a dirty cache is written back to its own disk, even if it was moved, and
//! to no other disk. A table of kinds of disks and acts on them, for each target, with `create` and
//! `recover`.

use std::os::unix::fs::FileExt;

use crate::common::{Udm, client, for_clients, pattern, read_export, text, write_export};

mod kinds;

use kinds::{
    Act, Copied, Ext4, Ext4Small, Fuse, Kind, LoopPart, Memory, Moved, Nothing, ORIGIN_BYTES,
    Overlay, PartOf, Partition, Plain, Remounted, Renumbered, Replaced, Xfs,
};

const MIB: u64 = 1 << 20;
const TARGETS: [&str; 3] = ["cache", "pcache", "writecache"];
const DIRTY_BYTES: usize = 64 << 10;

/// A device of this target on the disk called `origin`.
fn create<'a>(target: &'a str, origin: &'a str, uri: &'a str) -> Vec<&'a str> {
    let words = ["create", "v", "--origin", origin, "--fast", "f", "--target", target];
    [&words[..], &["--export", uri]].concat()
}

/// Makes the cache, with dirty data, and ends it in order.
fn leave_dirty(udm: &Udm, target: &str, origin: &str, data: &[u8]) {
    let uri = udm.uri("s");
    udm.ok(&create(target, origin, &uri));
    write_export(udm, &uri, data);
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
}

fn check_refused<K: Kind>(udm: &Udm, kind: &mut K, target: &str, act: Act) {
    let origin = kind.act(udm, act);
    let uri = udm.uri("s");
    for words in [&create(target, &origin, &uri)[..], &["recover", "f", &origin]] {
        let outcome = udm.run(words);
        let line = &outcome.err;
        let is_told = line.contains("belongs to another") || line.contains("was changed");
        let is_refused = outcome.code == 1 && is_told && line.contains("--rebind");
        assert!(is_refused, "{target}, {act:?}, {words:?}: {outcome:?}");
    }
    kind.undo(udm, act);
}

/// After each of the acts that leave the disk the same, the dirty data is there; after each of the
/// others, and after a replacement, the disk is refused.
fn check<K: Kind>(same: &[Act], others: &[Act]) {
    for target in TARGETS {
        let udm = Udm::new();
        let Some(mut kind) = K::make(&udm) else { return };
        let uri = udm.uri("s");
        let data = pattern(1, DIRTY_BYTES);
        udm.file("f", 600 * MIB);
        let origin = kind.act(&udm, Nothing);
        leave_dirty(&udm, target, &origin, &data);
        for &act in others {
            check_refused(&udm, &mut kind, target, act);
        }
        for &act in same {
            let origin = kind.act(&udm, act);
            let outcome = udm.run(&create(target, &origin, &uri));
            assert_eq!(outcome.code, 0, "{target}, {act:?}: {outcome:?}");
            assert!(read_export(&udm, &uri)[..DIRTY_BYTES] == data, "{target}, {act:?}");
            udm.ok(&["suspend", "v"]);
            udm.ok(&["remove", "v"]);
            kind.undo(&udm, act);
        }
        let origin = kind.act(&udm, same[0]);
        udm.ok(&["recover", "f", &origin]);
        let mut found = vec![0; DIRTY_BYTES];
        std::fs::File::open(udm.path(&origin)).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == data, "{target}: recovered");
        leave_dirty(&udm, target, &origin, &pattern(2, DIRTY_BYTES));
        check_refused(&udm, &mut kind, target, Replaced);
    }
}

#[test]
fn a_file_is_its_inode() {
    check::<Plain>(&[Nothing, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_in_memory_is_its_inode() {
    check::<Memory>(&[Nothing, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_an_overlay_is_its_inode() {
    check::<Overlay>(&[Remounted, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_ext4_is_its_inode() {
    check::<Ext4>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_without_a_birth_is_its_generation() {
    check::<Ext4Small>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_xfs_is_its_inode_and_not_its_device() {
    check::<Xfs>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_fuse_is_its_place_and_its_content() {
    check::<Fuse>(&[Nothing, Remounted], &[Copied]);
}

#[test]
fn a_loop_device_is_the_part_of_its_file() {
    check::<LoopPart>(&[Nothing, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_partition_is_the_part_of_its_disk() {
    check::<Partition>(&[Nothing, Renumbered, Moved], &[Copied, PartOf]);
}

/// From then on, the cache belongs to the disk that its data was written to.
#[test]
fn a_recovery_to_another_disk_binds_the_cache_to_it() {
    for target in TARGETS {
        let udm = Udm::new();
        udm.file("f", 600 * MIB);
        udm.file("a", ORIGIN_BYTES);
        let uri = udm.uri("s");
        let data = pattern(1, DIRTY_BYTES);
        leave_dirty(&udm, target, "a", &data);
        udm.file("b", ORIGIN_BYTES);
        assert_eq!(udm.run(&["recover", "f", "b"]).code, 1, "{target}");
        udm.ok(&["recover", "f", "b", "--rebind"]);
        // A writecache is empty after a recovery, and may then serve any disk.
        if target != "writecache" {
            let refused = udm.run(&create(target, "a", &uri));
            let is_told = refused.err.contains("belongs to another");
            assert!(refused.code == 1 && is_told, "{target}: {refused:?}");
        }
        udm.ok(&create(target, "b", &uri));
        assert!(read_export(&udm, &uri)[..DIRTY_BYTES] == data, "{target}");
        udm.ok(&["remove", "v"]);
    }
}

#[test]
fn a_doubt_is_told() {
    let udm = Udm::new();
    let Some(_fuse) = Fuse::make(&udm) else { return };
    udm.file("f", 600 * MIB);
    let words = ["create", "v", "--origin", "a/o", "--fast", "f"];
    let outcome = udm.run(&words);
    assert!(outcome.code == 0 && outcome.err.contains("only by its place"), "{outcome:?}");
    udm.ok(&["remove", "v"]);
    let identity = |path: &str| {
        let checks = udm.json(&["doctor", path])["places"][0]["checks"].take();
        let found = checks.as_array().unwrap().iter().find(|check| check["name"] == "identity");
        found.unwrap()["works"].as_bool().unwrap()
    };
    assert!(!identity("a/o") && identity("f"));
}

/// The table line of a cache of this target on these two files.
fn table(target: &str, origin: &str) -> String {
    let sectors = ORIGIN_BYTES / 512;
    match target {
        "cache" => format!("0 {sectors} cache M f {origin} 64 1 writeback smq 0"),
        "pcache" => format!("0 {sectors} pcache f {origin} 0"),
        _ => format!("0 {sectors} writecache s {origin} f 4096 0"),
    }
}

/// The table that udm prints and stores does not allow it again, and works.
fn check_used_up(udm: &Udm, target: &str, consent: &str) {
    let table = udm.ok(&["table", "v"]);
    let stored = std::fs::read_to_string(udm.runtime().join("v.table")).unwrap();
    for text in [&table, &stored, &udm.ok(&["info", "v", "--json"])] {
        assert!(!text.contains(consent), "{target}: {text}");
    }
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--table", &table]);
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--table", &stored]);
}

#[test]
fn a_consent_is_for_one_attach() {
    for target in TARGETS {
        let udm = Udm::new();
        [("o", ORIGIN_BYTES), ("o2", ORIGIN_BYTES), ("M", MIB), ("f", 600 * MIB)]
            .into_iter()
            .for_each(|(name, bytes)| drop(udm.file(name, bytes)));
        let uri = udm.uri("s");
        udm.ok(&["create", "v", "--table", &table(target, "o"), "--export", &uri]);
        write_export(&udm, &uri, &pattern(1, DIRTY_BYTES));
        udm.ok(&["suspend", "v"]);
        udm.ok(&["remove", "v"]);
        let other = table(target, "o2");
        assert!(udm.refused(&["create", "v", "--table", &other]).contains("rebind true"));
        udm.ok(&["create", "v", "--table", &format!("{other} rebind true"), "--export", &uri]);
        check_used_up(&udm, target, "rebind");
        udm.ok(&["remove", "v", "--drain"]);
    }
}

#[test]
fn an_accepted_loss_is_accepted_once() {
    for target in ["pcache", "writecache"] {
        let udm = Udm::new();
        udm.file("o", ORIGIN_BYTES);
        udm.file("f", 600 * MIB);
        let (uri, line) = (udm.uri("s"), table(target, "o"));
        udm.ok(&["create", "v", "--table", &line, "--export", &uri]);
        // Acknowledged, and not flushed.
        let data = udm.path("data");
        std::fs::write(&data, pattern(1, DIRTY_BYTES)).unwrap();
        client("nbdcopy", &[text(&data), &for_clients(&uri)]);
        udm.kill_server("v");
        for entry in std::fs::read_dir(udm.runtime()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().contains(".shm") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        assert!(udm.refused(&["create", "v", "--table", &line]).contains("lost_memory accept"));
        udm.ok(&["create", "v", "--table", &format!("{line} lost_memory accept")]);
        check_used_up(&udm, target, "lost_memory");
        udm.ok(&["remove", "v", "--drain"]);
    }
}
