//! `remove --drain --wipe`: the origin has everything, and the fast device holds no cache any more.
//! A cache that is not clean, or belongs to another origin, is not wiped.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::common::{Udm, pattern, text, write_export};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 64 * MIB;

/// The table of each sort of cache, over new files.
fn tables(udm: &Udm) -> Vec<(tempfile::NamedTempFile, String)> {
    let memory = Path::new("/dev/shm");
    let memory = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let file = |folder: &Path, bytes: u64| {
        let file = tempfile::NamedTempFile::new_in(folder).unwrap();
        file.as_file().set_len(bytes).unwrap();
        file
    };
    let disk = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (origin, sectors) = (udm.file("origin.img", ORIGIN_BYTES), ORIGIN_BYTES / 512);
    let origin = text(&origin).to_owned();
    let pcache = file(&memory, 512 * MIB);
    let pmem = file(&memory, 32 * MIB);
    let ssd = file(&disk, 32 * MIB);
    let part = file(&disk, 64 * MIB);
    let two = file(&disk, 40 * MIB);
    let lines = [
        format!("0 {sectors} pcache {} {origin}", text(pcache.path())),
        format!("0 {sectors} writecache p {origin} {} 4096 0", text(pmem.path())),
        format!("0 {sectors} writecache s {origin} {} 4096 0", text(ssd.path())),
        format!(
            "0 {sectors} writecache s {origin} {}?offset=8M&size=32M 512 2 start_sector 2048",
            text(part.path())
        ),
        format!(
            "0 {sectors} cache {two}?size=8M {two}?offset=8M {origin} 64 1 writeback smq 0",
            two = text(two.path())
        ),
    ];
    [pcache, pmem, ssd, part, two].into_iter().zip(lines).collect()
}

#[test]
fn a_wiped_cache_leaves_a_bare_origin_and_a_device_for_anything() {
    let udm = Udm::new();
    for (nth, (cache, table)) in tables(&udm).into_iter().enumerate() {
        let uri = udm.uri("vol.sock");
        let create = ["create", "vol", "--table", &table, "--export", &uri];
        udm.ok(&create);
        let data = pattern(nth as u64, 8 << 20);
        write_export(&udm, &uri, &data);
        let removed = udm.json(&["remove", "vol", "--drain", "--wipe"]);
        assert!(removed["is_wiped"] == true && removed["dirty_bytes"] == 0, "{removed}");
        assert!(std::fs::read(udm.path("origin.img")).unwrap()[..8 << 20] == data, "{table}");
        let outcome = udm.run(&["inspect", text(cache.path())]);
        assert_eq!(outcome.code, 1, "{outcome:?}");
        // The fast device shows no owner: the next format sees an empty device, even for another
        // origin.
        udm.file("other.img", ORIGIN_BYTES);
        udm.ok(&["create", "vol", "--table", &table.replace("origin.img", "other.img")]);
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
        let other = std::fs::read(udm.path("other.img")).unwrap();
        assert!(other.iter().all(|byte| *byte == 0), "{table}");
        assert_eq!(udm.left(), [""; 0]);
    }
}

/// A server with prepared answers, in place of one with slow devices.
#[test]
fn a_wipe_that_takes_long_is_shown() {
    let udm = Udm::new();
    let listener = UnixListener::bind(udm.runtime().join("vol.ctl")).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut byte = [1];
        while byte != [0] {
            stream.read_exact(&mut byte).unwrap();
        }
        for answer in [
            r#"{"parameters": {"dirty_bytes": 4096, "is_failing": false}, "continues": true}"#,
            r#"{"parameters": {"dirty_bytes": 0, "is_failing": false}, "continues": true}"#,
            r#"{"parameters": {"wipe_bytes": null}, "continues": true}"#,
            r#"{"parameters": {"wipe_bytes": 8388608}, "continues": true}"#,
            r#"{"parameters": {"wipe_bytes": 2097152}, "continues": true}"#,
            r#"{"parameters": {"dirty_bytes": 0, "is_wiped": true, "cache": "/dev/fast"}}"#,
        ] {
            stream.write_all(answer.as_bytes()).unwrap();
            stream.write_all(&[0]).unwrap();
        }
    });
    let outcome = udm.run(&["remove", "vol", "--drain", "--wipe"]);
    server.join().unwrap();
    std::fs::remove_file(udm.runtime().join("vol.ctl")).unwrap();
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let lines: Vec<&str> = outcome.err.lines().collect();
    assert!(lines[0].starts_with("drain vol:   0 %  0 B of 4.0 KiB"), "{outcome:?}");
    assert!(lines[1].starts_with("drain vol: 4.0 KiB in "), "{outcome:?}");
    assert!(lines[2].starts_with("wipe vol:   0 %  0 B of 8.0 MiB"), "{outcome:?}");
    assert!(lines[3].starts_with("wipe vol: 8.0 MiB in "), "{outcome:?}");
    assert!(outcome.out.contains("the cache on /dev/fast is erased"), "{outcome:?}");
}

#[test]
fn what_cannot_be_drained_is_not_wiped_and_not_removed() {
    let udm = Udm::new();
    for (cache, table) in tables(&udm) {
        let uri = udm.uri("vol.sock");
        udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
        write_export(&udm, &uri, &pattern(1, 4 << 20));
        udm.ok(&["suspend", "vol"]);
        // The origin goes away.
        let (origin, away) = (udm.path("origin.img"), udm.path("away.img"));
        std::fs::rename(&origin, &away).unwrap();
        let refused = || {
            let outcome = udm.run(&["remove", "vol", "--drain", "--wipe"]);
            assert_eq!(outcome.code, 1, "{outcome:?}");
            outcome.err
        };
        let line = refused();
        assert!(line.contains("suspended") || line.contains("moved away"), "{line}");
        udm.ok(&["resume", "vol"]);
        let line = refused();
        assert!(line.contains("moved away"), "{line}");
        udm.ok(&["status", "vol"]);
        std::fs::rename(&away, &origin).unwrap();
        // The name belongs to another cache, which stays unchanged.
        let (here, there) = (cache.path().to_owned(), cache.path().with_extension("away"));
        std::fs::rename(&here, &there).unwrap();
        let mut image = vec![0; 1 << 20];
        image[4086..4096].copy_from_slice(b"SWAPSPACE2");
        std::fs::write(&here, &image).unwrap();
        let line = refused();
        assert!(line.contains("is clean, but could not be wiped"), "{line}");
        assert!(std::fs::read(&here).unwrap() == image, "{table}");
        std::fs::rename(&there, &here).unwrap();
        udm.ok(&["create", "vol", "--table", &table]);
        udm.ok(&["remove", "vol", "--drain", "--wipe"]);
    }
}

#[test]
fn wishes_that_make_no_sense_are_refused() {
    let udm = Udm::new();
    udm.file("origin.img", ORIGIN_BYTES);
    udm.ok(&["create", "vol", "--table", "0 2048 linear origin.img 0"]);
    assert_eq!(udm.run(&["remove", "vol", "--wipe"]).code, 2, "it wants --drain");
    assert_eq!(udm.run(&["remove", "vol", "--wipe", "--drain", "--force"]).code, 2);
    let line = udm.refused(&["remove", "vol", "--wipe", "--drain"]);
    assert!(line.contains("no cache to wipe"), "{line}");
    udm.ok(&["remove", "vol"]);
    // A server that died may have left writes.
    for (_, table) in tables(&udm) {
        udm.ok(&["create", "vol", "--table", &table]);
        udm.kill_server("vol");
        assert_eq!(udm.run(&["remove", "vol", "--wipe", "--drain"]).code, 1);
        udm.ok(&["create", "vol", "--table", &table]);
        udm.ok(&["remove", "vol", "--wipe", "--drain"]);
    }
}
