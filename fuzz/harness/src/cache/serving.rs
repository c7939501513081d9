//! A cache that is served from hostile metadata.

use std::sync::Arc;

use udm::cache::Devices;
use udm::cache::metadata::{BLOCK_BYTES, load};
use udm::cache::{Cache, OpenOptions, TableArgs, View};
use udm::disk::{Disk, RamDisk};
use udm::error::Result;
use udm::table::Word;
use udm::units::{MIB, SECOND, SECTOR};

use super::BLOCKS;
use crate::check_error;
use crate::client::Client;
use crate::input::Input;

const ORIGIN_BYTES: u64 = 4 * MIB;
const SLOT_BYTES: u64 = 64 * SECTOR;
const SLOTS_MAX: u64 = 100;
const OPERATIONS_MAX: u8 = 40;
const TABLES: [&str; 5] = [
    "64 0 smq 0",
    "64 1 writethrough smq 0",
    "64 1 passthrough smq 0",
    "64 2 metadata2 no_discard_passdown mq 0",
    "64 0 cleaner 0",
];

struct Fixture {
    disks: [Arc<RamDisk>; 3],
    table: &'static str,
    client: Client,
}

/// Serves a copy of `metadata` and checks it, if it opens.
pub fn serve(metadata: &RamDisk, input: &mut Input<'_>) {
    let bytes = BLOCKS * BLOCK_BYTES as u64;
    let mut image = vec![0; bytes as usize];
    metadata.peek(0, &mut image);
    let copy = Arc::new(RamDisk::new(bytes, 512).named("meta"));
    copy.poke(0, &image);
    let source: Arc<dyn Disk> = copy.clone();
    let Ok(loaded) = load(&source) else { return };
    let contents = loaded.contents.opened(&loaded.superblock);
    let slots = contents.slots().clamp(1, SLOTS_MAX);
    let data = Arc::new(RamDisk::new(slots * SLOT_BYTES, 512).named("cache"));
    for slot in contents.dirty.iter().filter(|slot| *slot < slots) {
        data.poke(slot * SLOT_BYTES, &[1 + (slot % 250) as u8; 512]);
    }
    let origin = Arc::new(RamDisk::new(ORIGIN_BYTES, 512).named("origin"));
    let table = TABLES[usize::from(input.u8()) % TABLES.len()];
    let mut fixture = Fixture { disks: [copy, data, origin], table, client: Client::new() };
    let shown = match fixture.view() {
        Ok(()) => Some(fixture.shown()),
        Err(error) => {
            check_error(&error);
            None
        }
    };
    fixture.client.kill();
    if let Err(error) = fixture.open() {
        return check_error(&error);
    }
    if let Some(shown) = shown {
        assert!(fixture.shown() == shown, "the server shows something else");
    }
    for _ in 0..input.u8() % OPERATIONS_MAX {
        fixture.operate(input);
    }
    fixture.end(input.u8().is_multiple_of(2));
    fixture.open().expect("the next server opens the media");
    fixture.client.check_model(false, false);
    fixture.client.drain(false);
    fixture.end(true);
    fixture.check_origin();
}

impl Fixture {
    fn parts(&self) -> (TableArgs, Devices) {
        let args = TableArgs::parse(&Word::list(&format!("M C O {}", self.table))).unwrap();
        let [metadata, cache, origin] = self.disks.clone();
        (args, Devices { metadata, cache, origin })
    }

    fn view(&mut self) -> Result<()> {
        let (args, devices) = self.parts();
        self.client.open(View::open(&args, String::new(), ORIGIN_BYTES, devices)?);
        Ok(())
    }

    fn open(&mut self) -> Result<()> {
        let (args, devices) = self.parts();
        self.client.open(Cache::open(args, ORIGIN_BYTES, devices, OpenOptions::default())?);
        Ok(())
    }

    /// All data that clients see.
    fn shown(&mut self) -> Vec<u8> {
        let pieces = (0..ORIGIN_BYTES).step_by(1 << 20);
        pieces.flat_map(|at| self.client.read(at, 1 << 20).unwrap()).collect()
    }

    fn operate(&mut self, input: &mut Input<'_>) {
        let first = input.near(ORIGIN_BYTES / SECTOR) % (ORIGIN_BYTES / SECTOR);
        let (offset, room) = (first * SECTOR, ORIGIN_BYTES - first * SECTOR);
        let len = match input.u8() {
            long @ ..40 => u64::from(long) * 8,
            40..60 => 64,
            short => u64::from(short % 16),
        };
        let len = ((1 + len) * SECTOR).min(room);
        match input.u8() % 16 {
            0..6 => self.client.write(offset, len, false),
            6 => self.client.write(offset, len, true),
            // Often enough for the policy to admit the block.
            7 => (0..40).for_each(|_| drop(self.client.read(offset, SECTOR))),
            8..11 => drop(self.client.read(offset, len)),
            11 => self.client.zero(offset / SLOT_BYTES * SLOT_BYTES, SLOT_BYTES, false),
            12 => self.client.zero(offset, len, true),
            13 => self.client.flush(),
            14 => self.client.tick(SECOND * u64::from(input.u8() % 20)),
            _ => self.client.set_draining(input.u8().is_multiple_of(2)),
        }
    }

    /// An orderly end, or the end of the process.
    fn end(&mut self, is_orderly: bool) {
        match is_orderly {
            true => self.client.remove(),
            false => self.client.kill(),
        }
        let metadata: Arc<dyn Disk> = self.disks[0].clone();
        load(&metadata).expect("the metadata can be loaded");
    }

    /// The origin has all written data.
    fn check_origin(&self) {
        for (sector, byte) in &self.client.model {
            let mut found = [0; SECTOR as usize];
            self.disks[2].peek(sector * SECTOR, &mut found);
            assert!(found.iter().all(|found| found == byte), "sector {sector} of the origin");
        }
    }
}
