//! Media written by the kernel's dm-writecache: every one opens, says what the kernel's said,
//! reads as the kernel read it, and drains to the same origin; in the other mode too.

use std::sync::Arc;

use udm::disk::SimDisk;
use udm::target::Target;
use udm::units::SECOND;

use crate::golden::{Vector, sha256, vectors};
use crate::world::{Cache, World, mode_of};

fn world_of(vector: &Vector, is_other_mode: bool) -> World {
    let (cache, origin) = (vector.image("cache"), vector.image("origin"));
    let line = vector.table("C", "O");
    let words = line.split_once(" writecache ").expect("a writecache line").1;
    let words = match is_other_mode {
        false => words.to_string(),
        true => words.replacen(&words[..1], if words.starts_with('p') { "s" } else { "p" }, 1),
    };
    let disk = SimDisk::new(origin.len() as u64, 512).named("origin");
    disk.load_image(&origin);
    World::over(&words, Cache::of_image(mode_of(&words), &cache), Arc::new(disk))
}

fn status_words(vector: &Vector, key: &str) -> String {
    vector.text(key).split_once(" writecache ").expect("a writecache status").1.to_string()
}

#[test]
fn the_kernels_media_open_read_and_drain_as_in_the_kernel() {
    for vector in vectors("writecache-") {
        for is_other_mode in [false, true] {
            let name = format!("{} (other mode: {is_other_mode})", vector.name);
            let mut world = world_of(&vector, is_other_mode);
            world.holds = Box::new(|io| io.disk.limits().name == "origin");
            world.open();
            let status = world.target().status();
            assert_eq!(status, status_words(&vector, "status_after_attach_frozen"), "{name}");
            world.tick(SECOND);
            world.release();
            world.drain();
            let status = world.target().status();
            assert_eq!(status, status_words(&vector, "status_after_drain"), "{name}");
            let origin = sha256(&world.origin.image());
            assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained");

            let mut world = world_of(&vector, is_other_mode);
            world.open();
            assert_eq!(sha256(&world.content()), vector.text("sha256_logical"), "{name}: read");
            let status = world.target().status();
            let wanted = status_words(&vector, "status_after_full_read_frozen");
            assert_eq!(status, wanted, "{name}: after a full read");
            world.remove();
            world.open();
            assert_eq!(sha256(&world.content()), vector.text("sha256_logical"), "{name}: again");
            world.drain();
            let origin = sha256(&world.origin.image());
            assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained again");
            // Nothing is left for a kernel to write back.
            world.remove();
            world.open();
            assert_eq!(world.status(2), world.status(3), "{name}: all blocks are free");
        }
    }
}
