//! A power failure before every single fence of a history that writes, closes key sets, changes the
//! log's segment, writes back and collects: the data found afterwards is never older than the
//! flushed data, and drains to the same.

use std::sync::Arc;

use udm::disk::RamDisk;
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::prng::Prng;
use udm::target::Target;
use udm::units::SECOND;

use crate::builder::{Key, kset, last};
use crate::fixture::{Fixture, Setup};

const BLOCKS: usize = 24;

/// In two regions, so that keys wait in two open sets.
fn place(block: u64) -> u64 {
    block % 2 * (4 << 20) + block * 8192
}

/// The allowed contents of each block: versions since the last flushed one, oldest first.
struct Case {
    fixture: Fixture,
    versions: Vec<Vec<u8>>,
    prng: Prng,
    step: u8,
}

impl Case {
    fn new(setup: Setup, seed: u64) -> Case {
        let mut fixture = Fixture::new(setup);
        fixture.open();
        let words = ["gc_percent".to_string(), "0".to_string()];
        fixture.target().message(&words).unwrap();
        Case { fixture, versions: vec![vec![0]; BLOCKS], prng: Prng::new(seed), step: 0 }
    }

    /// One request, then perhaps background work.
    fn go_on(&mut self) {
        self.step += 1;
        let block = self.prng.below(BLOCKS as u64);
        match self.prng.below(8) {
            0..=4 => {
                let sectors = 1 + self.prng.below(4) as usize;
                let fua = self.prng.one_in(2);
                self.versions[block as usize].push(self.step);
                // The first sector counts; what follows makes laps.
                self.fixture.write(place(block), &vec![self.step; sectors * 512], fua);
                if fua {
                    self.versions[block as usize] = vec![self.step];
                }
            }
            5 => {
                self.fixture.read(place(block), 512);
            }
            6 => {
                self.fixture.flush();
                for versions in &mut self.versions {
                    versions.drain(..versions.len() - 1);
                }
            }
            _ => self.fixture.tick(SECOND),
        }
    }
}

fn judge(why: &str, cut: SimPmem, case: &Case, disk: &[u8], allowed: &[Vec<u8>]) {
    let setup = case.fixture.setup.clone();
    let backing = RamDisk::new(setup.backing_bytes, 512);
    backing.load_image(disk);
    let mut fixture = Fixture::over(setup, Arc::new(cut), Arc::new(backing));
    fixture.try_open(false).unwrap_or_else(|error| panic!("{why}: {error}"));
    let notes = crate::left::notes(&fixture);
    assert!(notes.iter().all(|note| note.contains("was rebooted")), "{why}: {notes:?}");
    let mut found = Vec::new();
    for (block, allowed) in allowed.iter().enumerate() {
        let sector = fixture.read(place(block as u64), 512);
        assert!(allowed.contains(&sector[0]), "{why}: block {block}: {} of {allowed:?}", sector[0]);
        found.push(sector[0]);
    }
    fixture.drain();
    let image = fixture.disk.image();
    for (block, found) in found.iter().enumerate() {
        assert_eq!(image[place(block as u64) as usize], *found, "{why}: block {block} drained");
    }
}

fn every_fence(setup: Setup, seed: u64, steps: usize) {
    let mut fence = 1;
    loop {
        let mut case = Case::new(setup.clone(), seed);
        case.fixture.catches_cut = true;
        case.fixture.pmem.arm_cut(fence);
        let mut before = case.versions.clone();
        for _ in 0..steps {
            before.clone_from(&case.versions);
            case.go_on();
            if case.fixture.cut.is_some() {
                break;
            }
        }
        let Some((cut, disk)) = case.fixture.cut.take() else { break };
        // A power failure within a step is judged by the states allowed before and after it.
        let mut allowed = before;
        for (allowed, now) in allowed.iter_mut().zip(&case.versions) {
            allowed.extend(now);
        }
        for seed in 0..3 {
            let why = format!("fence {fence}, step {}, crash {seed}", case.step);
            let left = match seed {
                0 => cut.snapshot_durable(),
                _ => cut.crash(&mut Prng::new(seed)),
            };
            judge(&why, left, &case, &disk, &allowed);
        }
        fence += 1;
    }
    assert!(fence > 2 * steps as u64, "{fence} fences");
}

fn tiny() -> Setup {
    let geometry = Geometry { segment_bytes: 20 << 10, device_bytes_min: 0 };
    Setup {
        geometry,
        cache_bytes: 20480 + 14 * (20 << 10),
        backing_bytes: 5 << 20,
        ..Setup::small()
    }
}

#[test]
fn a_power_cut_before_any_fence_loses_nothing_flushed() {
    every_fence(tiny(), 1, 110);
}

#[test]
fn a_power_cut_before_any_fence_loses_nothing_flushed_with_checksums() {
    every_fence(tiny().table("C B 2 data_crc true"), 2, 80);
}

#[test]
fn a_power_cut_before_any_fence_loses_nothing_flushed_on_page_cache_media() {
    every_fence(Setup { persistence: Persistence::Msync, ..tiny() }, 3, 80);
}

/// What an earlier crash left where LAST goes must be gone before LAST is stored: a mixture of the
/// two looks like damage, or leads into a segment that the log left long ago. Found by a soak of
/// the crash-state explorer.
#[test]
fn a_last_record_torn_over_a_torn_record_is_neither_damage_nor_an_old_one() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    // Six keys first, so that LAST begins with the last word of a line of the medium: then its
    // first word may be missing while the others are there.
    for block in 0..6 {
        fixture.write(block * 8192, &[9; 512], false);
    }
    fixture.flush();
    for _ in 0..601 {
        fixture.write(0, &[1; 512], true);
    }
    let head = fixture.target_head();
    let data_bytes = u64::from(fixture.setup.geometry.data_bytes());
    assert!(data_bytes - head < 88 + 24, "the next append goes to another segment");
    assert_eq!(head % 64, 56);
    let at = 20480 + 12288 + head;
    assert_eq!(fixture.pmem.peek(at, 24), [0; 24]);
    // Segment 23 once held the log: an old key for block 0 stands at its start.
    let old = Key { off: 0, len: 512, segment: 22, at: 0, ..Key::default() };
    fixture.pmem.poke(20480 + 23 * 65536 + 12288, &kset(&[old]));
    for torn in [kset(&[]), last(23)] {
        fixture.pmem.poke(at, &torn[..8]);
        cut_all_of_the_next_write(&fixture, at);
    }
}

/// Cuts the next write before each of its fences; of the two lines from `at` on, either may stay.
fn cut_all_of_the_next_write(fixture: &Fixture, at: u64) {
    let (image, disk) = (fixture.pmem.image(), fixture.disk.image());
    let mut cuts = 0;
    for fence in 1.. {
        let open = |pmem: SimPmem| {
            let backing = RamDisk::new(fixture.setup.backing_bytes, 512);
            backing.load_image(&disk);
            let mut fixture =
                Fixture::over(fixture.setup.clone(), Arc::new(pmem), Arc::new(backing));
            fixture.try_open(false).unwrap_or_else(|error| panic!("before fence {fence}: {error}"));
            fixture
        };
        let mut second = open(SimPmem::from_image(&image, Persistence::Cpu));
        second.pmem.arm_cut(fence);
        second.write(0, &[2; 512], true);
        let Some(cut) = second.pmem.take_cut() else { break };
        for kept in 0..4 {
            let line = |line: u64, words: usize| match line.checked_sub(at / 64) {
                Some(nth @ 0..=1) if kept >> nth & 1 == 1 => words,
                _ => 0,
            };
            let found = open(cut.crash_with(line)).read(0, 512)[0];
            assert!(found == 1 || found == 2, "before fence {fence}: {found}");
            cuts += 1;
        }
    }
    assert!(cuts >= 20, "{cuts} cuts");
}
