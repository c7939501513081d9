//! The map of newer data, checked against a plain array.

use super::*;
use crate::disk::RamDisk;
use crate::pmem::Persistence;
use crate::pmem::rest::Rest;
use crate::pmem::sim::SimPmem;
use crate::prng::Prng;

const SECTORS: u64 = 64;

/// The state of a sector of the origin: its own data, the cache's data for it, or lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    Origin,
    Cache(u64),
    Lost,
}

fn image(seed: u8, sectors: u64) -> Vec<u8> {
    (0..sectors * SECTOR).map(|at| (at / SECTOR) as u8 ^ seed).collect()
}

/// A cache device of which half is left.
fn half() -> Arc<dyn Pmem> {
    let left = SimPmem::from_image(&image(0, SECTORS / 2), Persistence::Cpu);
    Rest::of(Arc::new(left), SECTORS * SECTOR)
}

#[test]
fn parts_over_parts_are_what_an_array_says() {
    for seed in 0..200 {
        let mut random = Prng::new(seed);
        let mut recovery = Recovery::new(half());
        let mut model = [Model::Origin; SECTORS as usize];
        for _ in 0..40 {
            let (first, at) = (random.below(SECTORS), random.below(SECTORS));
            let len = 1 + random.below((SECTORS - first.max(at)).min(12));
            let (offset, bytes) = (first * SECTOR, len * SECTOR);
            let act = random.below(6);
            match act {
                0 => recovery.forget(offset, bytes),
                1 => recovery.lose(offset, bytes),
                _ => recovery.put(offset, bytes, at * SECTOR, None),
            }
            for nth in 0..len {
                model[(first + nth) as usize] = match act {
                    0 => Model::Origin,
                    2.. if at + nth < SECTORS / 2 => Model::Cache(at + nth),
                    _ => Model::Lost,
                };
            }
        }
        let mut at = 0;
        while at < SECTORS {
            let wanted = model[at as usize];
            match recovery.piece(at * SECTOR, SECTORS * SECTOR) {
                Piece::Origin(len) => {
                    let len = len / SECTOR;
                    assert!((at..at + len).all(|at| model[at as usize] == Model::Origin));
                    at += len;
                }
                Piece::Cache(part) => {
                    for nth in 0..part.len / SECTOR {
                        let found = part.behind(nth * SECTOR).at.map(|at| at / SECTOR);
                        let found = found.map_or(Model::Lost, Model::Cache);
                        assert_eq!(found, model[(at + nth) as usize], "seed {seed}: {wanted:?}");
                    }
                    at += part.len / SECTOR;
                }
            }
        }
        let count = |is: fn(&Model) -> bool| model.iter().filter(|m| is(m)).count() as u64 * SECTOR;
        assert_eq!(recovery.lost_bytes(), count(|m| *m == Model::Lost));
        assert_eq!(recovery.dirty_bytes(), count(|m| matches!(m, Model::Cache(_))));
        assert!(recovery.lost().windows(2).all(|two| two[0].0 + two[0].1 < two[1].0));

        let disk = Arc::new(RamDisk::new(SECTORS * SECTOR, 512));
        disk.load_image(&image(0x80, SECTORS));
        let origin: Arc<dyn Disk> = disk.clone();
        let dirty = recovery.dirty_bytes();
        assert_eq!(recovery.write_back(&origin, |_| Ok(())).unwrap(), dirty);
        for (sector, (found, model)) in disk.image().chunks(512).zip(model).enumerate() {
            let wanted = match model {
                Model::Cache(at) => at as u8,
                _ => sector as u8 ^ 0x80,
            };
            assert_eq!(found, [wanted; 512], "seed {seed}: sector {sector}");
        }
    }
}

#[test]
fn what_does_not_have_its_checksum_is_lost() {
    let mut recovery = Recovery::new(half());
    let sum = |at: u64, crc| Some(Sum { range: (at, 1024), crc });
    let right = pcache_crc(&image(0, 2));
    recovery.put(0, 1024, 0, sum(0, right));
    recovery.put(512, 512, 512, sum(0, right));
    recovery.put(2048, 1024, 0, sum(0, right ^ 1));
    // Half of it is readable, so its checksum cannot be verified.
    recovery.put(4096, 1024, SECTORS / 2 * SECTOR - 512, sum(SECTORS / 2 * SECTOR - 512, right));
    assert_eq!((recovery.dirty_bytes(), recovery.lost()), (2048, vec![(4096, 1024)]));
    let disk = Arc::new(RamDisk::new(SECTORS * SECTOR, 512));
    let origin: Arc<dyn Disk> = disk.clone();
    assert_eq!(recovery.write_back(&origin, |_| Ok(())).unwrap(), 1024);
    assert_eq!(recovery.lost(), [(2048, 1024), (4096, 1024)]);
    assert_eq!(disk.image()[..1024], image(0, 2));
    assert_eq!(disk.image()[1024..], vec![0; (SECTORS * SECTOR) as usize - 1024]);
}
