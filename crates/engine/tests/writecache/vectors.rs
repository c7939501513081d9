//! Media written by the kernel's dm-writecache: each opens, has the kernel's status,
//! reads as the kernel read it, and drains to the same origin; also in the other mode.

use std::sync::Arc;

use udm::disk::SimDisk;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{Cache, Fixture, mode_of};
use crate::golden::{Vector, sha256, vectors};

fn fixture_of(vector: &Vector, is_other_mode: bool) -> Fixture {
    let (cache, origin) = (vector.image("cache"), vector.image("origin"));
    let line = vector.table("C", "O");
    let words = line.split_once(" writecache ").expect("a writecache line").1;
    let words = match is_other_mode {
        false => words.to_string(),
        true => words.replacen(&words[..1], if words.starts_with('p') { "s" } else { "p" }, 1),
    };
    let disk = SimDisk::new(origin.len() as u64, 512).named("origin");
    disk.load_image(&origin);
    Fixture::over(&words, Cache::of_image(mode_of(&words), &cache), Arc::new(disk))
}

fn status_words(vector: &Vector, key: &str) -> String {
    vector.text(key).split_once(" writecache ").expect("a writecache status").1.to_string()
}

#[test]
fn the_kernels_media_open_read_and_drain_as_in_the_kernel() {
    for vector in vectors("writecache-") {
        for is_other_mode in [false, true] {
            let name = format!("{} (other mode: {is_other_mode})", vector.name);
            let mut fixture = fixture_of(&vector, is_other_mode);
            fixture.holds = Box::new(|io| io.disk.limits().name == "origin");
            fixture.open();
            let status = fixture.target().status();
            assert_eq!(status, status_words(&vector, "status_after_attach_frozen"), "{name}");
            fixture.tick(SECOND);
            fixture.release();
            fixture.drain();
            let status = fixture.target().status();
            assert_eq!(status, status_words(&vector, "status_after_drain"), "{name}");
            let origin = sha256(&fixture.origin.image());
            assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained");

            let mut fixture = fixture_of(&vector, is_other_mode);
            fixture.open();
            assert_eq!(sha256(&fixture.content()), vector.text("sha256_logical"), "{name}: read");
            let status = fixture.target().status();
            let wanted = status_words(&vector, "status_after_full_read_frozen");
            assert_eq!(status, wanted, "{name}: after a full read");
            fixture.remove();
            fixture.open();
            assert_eq!(sha256(&fixture.content()), vector.text("sha256_logical"), "{name}: again");
            fixture.drain();
            let origin = sha256(&fixture.origin.image());
            assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained again");
            // A kernel would find no dirty data.
            fixture.remove();
            fixture.open();
            assert_eq!(fixture.status(2), fixture.status(3), "{name}: all blocks are free");
        }
    }
}
