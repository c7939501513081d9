//! Caches that are not to be changed: whole ones, ones whose server died, and ones cut at every
//! place. A read returns the last written data, or an error; older data only where the cache has
//! reported that it cannot know.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::{Disk, RamDisk, Ring};
use udm::error::{Result, Status};
use udm::pcache::TableArgs;
use udm::pcache::recovery::recover;
use udm::pmem::sim::SimPmem;
use udm::pmem::{Persistence, Pmem};
use udm::prng::Prng;
use udm::recovery::{Recovery, View};
use udm::shm::SharedStore;
use udm::table::Word;
use udm::target::{Port, Target};
use udm::units::SECOND;

use crate::fixture::{Fixture, SMALL, Setup};

const SECTOR: usize = 512;
const SECTORS: usize = 4096;

/// A fixture, and what each sector was, oldest first.
struct Case {
    fixture: Fixture,
    versions: Vec<Vec<u32>>,
}

fn fill(value: u32) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    bytes.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value.to_le_bytes()));
    bytes
}

fn value(sector: &[u8]) -> u32 {
    assert!(sector.chunks(4).all(|word| word == &sector[..4]), "torn, or never written");
    u32::from_le_bytes(sector[..4].try_into().unwrap())
}

impl Case {
    /// A history that makes some laps of the cache, and ends with writes that are not flushed.
    fn new(seed: u64, table: &'static str) -> Case {
        let setup = Setup { backing_bytes: (SECTORS * SECTOR) as u64, ..Setup::small() };
        let mut fixture = Fixture::new(setup.table(table));
        fixture.open();
        let mut case = Case { fixture, versions: vec![vec![0]; SECTORS] };
        let mut random = Prng::new(seed);
        for step in 1..700 {
            let first = random.below(SECTORS as u64 - 64) as usize;
            let longest = if random.one_in(4) { 60 } else { 8 };
            let count = 1 + random.below(longest) as usize;
            let (at, len) = ((first * SECTOR) as u64, (count * SECTOR) as u64);
            match random.below(20) {
                0 => case.fixture.flush(),
                1 => case.fixture.tick(SECOND * random.below(3)),
                2 if step < 500 => case.fixture.drain(),
                3 => {
                    case.fixture.zero(Op::WriteZeroes, at, len, false);
                    case.wrote(first, count, 0);
                }
                4 => drop(case.fixture.read(at, len as usize)),
                _ => {
                    case.fixture.write(at, &fill(step).repeat(count), random.one_in(8));
                    case.wrote(first, count, step);
                }
            }
        }
        case
    }

    fn wrote(&mut self, first: usize, count: usize, value: u32) {
        self.versions[first..first + count].iter_mut().for_each(|known| known.push(value));
    }

    fn recover(&self, bytes: usize, words: &str) -> Result<Recovery> {
        let table = format!("{} {words}", self.fixture.setup.table);
        let args = TableArgs::parse(&Word::list(&table)).unwrap();
        let image = &self.fixture.pmem.image()[..bytes];
        let pmem: Arc<dyn Pmem> = Arc::new(SimPmem::from_image(image, Persistence::Cpu));
        let shared_store = SharedStore::from(self.fixture.shared.clone());
        let origin: Arc<dyn Disk> = self.fixture.disk.clone();
        recover(&args, pmem, &shared_store, SMALL, &origin)
    }

    fn origin(&self) -> Arc<RamDisk> {
        let disk = RamDisk::new((SECTORS * SECTOR) as u64, 512);
        disk.load_image(&self.fixture.disk.image());
        Arc::new(disk)
    }

    /// Reads every sector, and judges it; how many cannot be read.
    fn judge(&self, why: &str, recovery: Recovery) -> usize {
        let (lost, has_more) = (recovery.lost(), recovery.has_more);
        let view = View::new("pcache", String::new(), recovery, self.origin());
        let mut unreadable = 0;
        for (sector, versions) in self.versions.iter().enumerate() {
            let at = (sector * SECTOR) as u64;
            let is_lost = lost.iter().any(|(first, len)| (*first..first + len).contains(&at));
            match read(&view, at) {
                Err(_) => {
                    assert!(is_lost, "{why}: sector {sector} fails, and is not said to be lost");
                    unreadable += 1;
                }
                Ok(found) => {
                    assert!(!is_lost, "{why}: sector {sector} is lost, and can be read");
                    let found = value(&found);
                    let is_newest = versions.last() == Some(&found);
                    let is_known = has_more && versions.contains(&found);
                    assert!(is_newest || is_known, "{why}: sector {sector} reads {found}");
                }
            }
        }
        assert_eq!(write(&view), Err(Status::ReadOnly));
        unreadable
    }

    /// The readable data is written to the origin.
    fn judge_written(&self, why: &str, mut recovery: Recovery) {
        let (lost, has_more) = (recovery.lost(), recovery.has_more);
        let disk = self.origin();
        let origin: Arc<dyn Disk> = disk.clone();
        recovery.write_back(&origin, |_| Ok(())).unwrap();
        assert_eq!(recovery.lost(), lost, "{why}");
        let image = disk.image();
        for (sector, (found, versions)) in image.chunks(SECTOR).zip(&self.versions).enumerate() {
            let at = (sector * SECTOR) as u64;
            let is_lost = lost.iter().any(|(first, len)| (*first..first + len).contains(&at));
            let found = value(found);
            let is_old = (is_lost || has_more) && versions.contains(&found);
            let is_newest = versions.last() == Some(&found);
            assert!(is_newest || is_old, "{why}: sector {sector} of the origin is {found}");
        }
    }
}

fn carry_out(view: &View, bio: Bio) -> Bio {
    let (mut port, mut ring) = (Port::new(0), Ring::without_kernel());
    view.submit(bio, &mut port);
    while let Some(io) = port.ios.pop_front() {
        io.disk.clone().start(io, &mut ring);
        while let Some(io) = ring.pop_completed() {
            view.complete(io, &mut port);
        }
    }
    port.done.pop_front().expect("each bio ends")
}

fn read(view: &View, at: u64) -> std::result::Result<Vec<u8>, Status> {
    let bio = carry_out(view, Bio::read(at, Buffer::zeroed(SECTOR), 0));
    bio.status.map(|()| bio.buffer.as_slice().to_vec())
}

fn write(view: &View) -> std::result::Result<(), Status> {
    carry_out(view, Bio::write(0, Buffer::from_bytes(&[9; SECTOR]), false, 0)).status
}

#[test]
fn a_whole_cache_is_read_as_its_server_left_it() {
    for seed in 0..4 {
        for (table, is_removed) in [("C B 0", false), ("C B 2 data_crc true", true)] {
            let mut case = Case::new(seed, table);
            if is_removed {
                case.fixture.remove()
            } else {
                case.fixture.kill()
            };
            let why = format!("seed {seed}, {table}");
            let len = case.fixture.setup.cache_bytes as usize;
            let recovered = || case.recover(len, "").unwrap();
            assert!(recovered().dirty_bytes() > 0 && !recovered().has_more);
            assert_eq!(case.judge(&why, recovered()), 0);
            case.judge_written(&why, recovered());
            // It can be attached as before.
            case.fixture.open();
            let content = case.fixture.content();
            for (found, versions) in content.chunks(SECTOR).zip(&case.versions) {
                assert_eq!(Some(&value(found)), versions.last(), "{why}");
            }
        }
    }
}

#[test]
fn wherever_a_cache_is_cut_nothing_old_is_taken_for_new() {
    let (mut exact, mut partial, mut torn) = (0, 0, 0);
    for seed in 0..6 {
        let table =
            ["C B 0", "C B 2 data_crc true", "C B 0 writeback_order fast"][seed as usize % 3];
        let mut case = Case::new(100 + seed, table);
        if seed % 2 == 0 {
            case.fixture.remove()
        } else {
            case.fixture.kill()
        };
        let len = case.fixture.setup.cache_bytes as usize;
        let cuts = (0..24).flat_map(|nth| [512, 12288, 12800, 40000, 65024].map(|at| (nth, at)));
        for cut in cuts.map(|(nth, at)| 20480 + nth * 65536 + at).chain([len - 4096, len - 512]) {
            let why = format!("seed {seed}, {table}, cut to {cut}");
            let found = match case.recover(cut, "") {
                Ok(found) => found,
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("cut short") && text.contains("truncate"), "{text}");
                    torn += 1;
                    let found = case.recover(cut, "log_damage truncate").unwrap();
                    assert!(found.has_more, "{why}");
                    case.judge_written(&why, case.recover(cut, "log_damage truncate").unwrap());
                    case.judge(&why, found);
                    continue;
                }
            };
            assert!(!found.has_more, "{why}");
            case.judge_written(&why, case.recover(cut, "").unwrap());
            match case.judge(&why, found) {
                0 => exact += 1,
                _ => partial += 1,
            }
        }
    }
    assert!(exact > 5 && partial > 20 && torn > 5, "{exact} {partial} {torn}");
}
