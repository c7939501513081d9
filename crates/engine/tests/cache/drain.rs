//! Draining a cache at rest: the kernel's media, and power cuts at every I/O.

use std::sync::Arc;

use udm::Op;
use udm::cache::Devices;
use udm::cache::drain::Drain;
use udm::cache::metadata::{load, survey};
use udm::disk::{Disk, Effect, Fault, SimDisk};
use udm::error::{Result, Status};
use udm::prng::Prng;

use crate::golden::{Vector, sha256, vectors};

/// A cache's three devices.
struct Media {
    metadata: Arc<SimDisk>,
    cache: Arc<SimDisk>,
    origin: Arc<SimDisk>,
}

/// The images of a vector, and the final content of the origin.
struct Images {
    name: String,
    images: [Vec<u8>; 3],
    drained: Vec<u8>,
}

impl Images {
    fn of(vector: &Vector) -> Images {
        let images = ["meta", "cache", "origin"].map(|role| vector.image(role));
        let mut images = Images { name: vector.name.clone(), images, drained: Vec::new() };
        let media = images.media();
        media.drain().unwrap();
        images.drained = media.origin.durable_image();
        let wanted = vector.text("sha256_origin_after_drain");
        assert_eq!(sha256(&images.drained), wanted, "{}", vector.name);
        images
    }

    fn media(&self) -> Media {
        let disk = |nth: usize, role: &str| {
            let image = &self.images[nth];
            let disk = SimDisk::new(image.len() as u64, 512).named(role);
            disk.load_image(image);
            Arc::new(disk)
        };
        Media { metadata: disk(0, "meta"), cache: disk(1, "cache"), origin: disk(2, "origin") }
    }
}

impl Media {
    fn devices(&self) -> Devices {
        Devices {
            metadata: self.metadata.clone(),
            cache: self.cache.clone(),
            origin: self.origin.clone(),
        }
    }

    fn open(&self) -> Result<Drain> {
        let devices = self.devices();
        let loaded = load(&devices.metadata)?;
        Drain::new(devices, loaded, None)
    }

    fn drain(&self) -> Result<()> {
        let mut drain = self.open()?;
        while !drain.is_done() {
            drain.step()?;
        }
        assert!(drain.unreadable().is_empty());
        Ok(())
    }

    /// The images after a power failure.
    fn crashed(&self, prng: &mut Prng) -> Media {
        let crash = |disk: &SimDisk, prng: &mut Prng| Arc::new(disk.crash(prng));
        Media {
            metadata: crash(&self.metadata, prng),
            cache: crash(&self.cache, prng),
            origin: crash(&self.origin, prng),
        }
    }

    fn writes(&self) -> [u64; 3] {
        [&self.metadata, &self.cache, &self.origin].map(|disk| disk.counts().writes)
    }

    /// The metadata without a finding, all of it clean, and the origin with everything.
    fn check(&self, images: &Images) {
        let metadata = self.devices().metadata;
        let found = survey(&metadata, survey::superblock(&metadata).unwrap());
        assert_eq!(found.findings().count(), 0, "{:?}", found.findings().next());
        let loaded = found.loaded().unwrap();
        assert!(loaded.superblock.is_clean() && loaded.contents.dirty.ones() == 0);
        assert!(self.origin.durable_image() == images.drained, "{}", images.name);
    }
}

#[test]
fn the_kernels_caches_are_drained_to_what_the_kernel_makes_of_them() {
    for images in vectors("cache-").iter().map(Images::of) {
        let media = images.media();
        let before = load(&media.devices().metadata).unwrap();
        media.drain().unwrap();
        media.check(&images);
        let after = load(&media.devices().metadata).unwrap();
        assert_eq!(after.contents.mappings, before.contents.mappings, "blocks stay cached");
        if before.superblock.is_clean() {
            assert_eq!(after.contents.hints, before.contents.hints);
            assert_eq!(after.contents.discards, before.contents.discards);
        } else {
            assert!(after.contents.hints.is_none() && after.contents.discards.is_empty());
        }
        // No block is left, so the drain writes no data.
        let writes = media.writes();
        media.drain().unwrap();
        assert_eq!(media.writes(), writes);
    }
}

#[test]
fn a_power_cut_at_any_write_or_flush_costs_nothing() {
    let mut prng = Prng::new(3);
    for images in vectors("cache-wb-").iter().map(Images::of) {
        for nth in (0..).step_by(3) {
            let media = images.media();
            for (disk, op) in [
                (&media.metadata, Op::Write),
                (&media.metadata, Op::Flush),
                (&media.origin, Op::Write),
                (&media.origin, Op::Flush),
            ] {
                disk.inject(Fault::new(Effect::Fail(Status::Io)).of(op).after(nth));
            }
            let ended = media.drain();
            let left = media.crashed(&mut prng);
            left.drain().unwrap();
            left.check(&images);
            if ended.is_ok() {
                break;
            }
        }
    }
}

#[test]
fn dirty_blocks_become_clean_after_the_origins_flush_only() {
    for images in vectors("cache-wb-").iter().map(Images::of) {
        let media = images.media();
        let dirty = |media: &Media| {
            let loaded = load(&media.devices().metadata).unwrap();
            let doubt = loaded.superblock.doubt;
            (loaded.contents.opened(&loaded.superblock).dirty.iter().collect::<Vec<_>>(), doubt)
        };
        let (before, _) = dirty(&media);
        media.origin.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush));
        let error = media.drain().unwrap_err().to_string();
        assert_eq!(error, "origin: writing dirty data back: input/output error");
        let (after, doubt) = dirty(&media);
        assert_eq!(after, before);
        assert!(doubt.origin, "a later server must know");
    }
}

#[test]
fn what_cannot_be_read_stays_dirty() {
    let images = Images::of(&vectors("cache-wb-m2-crash")[0]);
    let media = images.media();
    media
        .cache
        .inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Read).within(5 * 32_768..6 * 32_768));
    let mut drain = media.open().unwrap();
    while !drain.is_done() {
        drain.step().unwrap();
    }
    assert_eq!(drain.unreadable(), [5]);
    let loaded = load(&media.devices().metadata).unwrap();
    assert!(loaded.superblock.is_clean());
    assert_eq!(loaded.contents.dirty.iter().collect::<Vec<_>>(), [5]);
    media.cache.heal();
    media.drain().unwrap();
    media.check(&images);
}

#[test]
fn devices_that_cannot_be_the_right_ones_are_refused() {
    let images = Images::of(&vectors("cache-wb-m2-crash")[0]);
    let media = images.media();
    let short = |disk: &SimDisk, bytes: u64| -> Arc<dyn Disk> {
        Arc::new(SimDisk::new(bytes, 512).named(&disk.limits().name))
    };
    let loaded = || load(&media.devices().metadata).unwrap();
    let origin = short(&media.origin, 1 << 20);
    let error = Drain::new(Devices { origin, ..media.devices() }, loaded(), None).unwrap_err();
    assert!(error.to_string().starts_with("origin has 1048576 bytes, so block "), "{error}");
    let cache = short(&media.cache, 1 << 20);
    let error = Drain::new(Devices { cache, ..media.devices() }, loaded(), None).unwrap_err();
    assert!(error.to_string().starts_with("cache has 1048576 bytes, so slot "), "{error}");
    assert_eq!(media.writes(), [0; 3]);
}
