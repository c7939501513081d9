//! Media written by the kernel's dm-pcache: each opens, has the kernel's status, reads
//! as the kernel read it, and drains to the same backing device.

use std::sync::Arc;

use udm::disk::RamDisk;
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::target::Target;
use udm::units::SECOND;

use crate::fixture::{Fixture, Setup};
use crate::golden::{Vector, sha256, vectors};

fn fixture_of(vector: &Vector) -> Fixture {
    let cache = vector.image("cache");
    let origin = vector.image("origin");
    let line = vector.table("C", "B");
    let words = line.split_once(" pcache ").expect("a pcache line").1.to_string();
    let setup = Setup {
        geometry: Geometry::KERNEL,
        table: words.leak(),
        cache_bytes: cache.len() as u64,
        backing_bytes: origin.len() as u64,
        stripes: 8,
        persistence: Persistence::Cpu,
        replay: Setup::small().replay,
    };
    let disk = RamDisk::new(origin.len() as u64, 512);
    disk.load_image(&origin);
    let pmem = SimPmem::from_image(&cache, Persistence::Cpu);
    Fixture::over(setup, Arc::new(pmem), Arc::new(disk))
}

fn status_words(vector: &Vector, key: &str) -> String {
    vector.text(key).split_once(" pcache ").expect("a pcache status").1.to_string()
}

#[test]
fn the_kernels_media_open_read_and_drain_as_in_the_kernel() {
    for vector in vectors("pcache-") {
        let name = &vector.name;
        let mut fixture = fixture_of(&vector);
        fixture.is_held = true;
        fixture.open();
        assert_eq!(
            fixture.target().status(),
            status_words(&vector, "status_after_attach_frozen"),
            "{name}"
        );
        // Write-back is held, so dirty data is read from the cache.
        fixture.tick(SECOND);
        fixture.tick(SECOND);
        fixture.release();
        fixture.drain();
        assert_eq!(
            fixture.target().status(),
            status_words(&vector, "status_after_drain"),
            "{name}"
        );
        let origin = sha256(&fixture.disk.image());
        assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained");

        let mut fixture = fixture_of(&vector);
        fixture.open();
        assert_eq!(sha256(&fixture.content()), vector.text("sha256_logical"), "{name}: first read");
        assert_eq!(sha256(&fixture.content()), vector.text("sha256_logical"), "{name}: from cache");
        fixture.kill();
        fixture.open();
        assert_eq!(sha256(&fixture.content()), vector.text("sha256_logical"), "{name}: reopened");
        fixture.drain();
        let origin = sha256(&fixture.disk.image());
        assert_eq!(origin, vector.text("sha256_origin_after_drain"), "{name}: drained again");
    }
}
