//! Metadata written by the kernel's own target: each one is read without a finding, agrees with the
//! kernel's status, and leads to the same data.

use udm::cache::metadata::{Contents, Superblock, survey};

use crate::golden::{Vector, sha256, vectors};

/// The words of a status line, from the metadata's use on.
fn status(vector: &Vector, key: &str) -> Vec<String> {
    let words = vector.text(key).split_once(" cache 8 ").expect("a cache's status").1;
    words.split_whitespace().map(str::to_owned).collect()
}

/// The metadata of a vector.
fn read(vector: &Vector) -> (Superblock, Contents, u64) {
    let image = vector.image("meta");
    let found = survey(&image, survey::superblock(&image).unwrap());
    let findings: Vec<String> = found.findings().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{}: {findings:?}", vector.name);
    let loaded = found.loaded().unwrap();
    (loaded.superblock, loaded.contents, loaded.counts.used.ones())
}

#[test]
fn the_kernels_metadata_says_what_its_status_says() {
    for vector in vectors("cache-") {
        let (superblock, contents, used) = read(&vector);
        let contents = contents.opened(&superblock);
        let words = status(&vector, "status_after_attach_frozen");
        let name = &vector.name;
        assert_eq!(format!("{used}/1024"), words[0], "{name}: metadata blocks");
        assert_eq!(superblock.fields.data_sectors.get().to_string(), words[1], "{name}");
        let slots = format!("{}/{}", contents.mapped(), contents.slots());
        assert_eq!(slots, words[2], "{name}: slots");
        let fields = &superblock.fields;
        let counters =
            [fields.read_hits, fields.read_misses, fields.write_hits, fields.write_misses];
        let counters: Vec<String> = counters.iter().map(|n| n.get().to_string()).collect();
        assert_eq!(counters, words[3..7], "{name}: counters");
        assert_eq!(contents.dirty.ones().to_string(), words[9], "{name}: dirty slots");
        assert_eq!(superblock.is_clean(), !name.ends_with("crash"), "{name}");
        assert_eq!(contents.hints.is_some(), superblock.is_clean(), "{name}: hints");
    }
}

#[test]
fn what_is_dirty_makes_the_origin_whole() {
    for vector in vectors("cache-") {
        let (superblock, contents, _) = read(&vector);
        let contents = contents.opened(&superblock);
        let (cache, mut origin) = (vector.image("cache"), vector.image("origin"));
        let bytes = superblock.fields.data_sectors.get() as usize * 512;
        for slot in contents.dirty.iter() {
            let to = contents.block(slot).unwrap() as usize * bytes;
            let from = slot as usize * bytes;
            origin[to..to + bytes].copy_from_slice(&cache[from..from + bytes]);
        }
        let wanted = vector.text("sha256_origin_after_drain");
        assert_eq!(sha256(&origin), wanted, "{}", vector.name);
    }
}
