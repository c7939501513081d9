//! Metadata over several bitmaps of the space map, as a large cache has: one bitmap has the counts
//! of 16,320 blocks, which are 64 MiB. Transactions free blocks in one bitmap and allocate in
//! another. The power is cut before and after each superblock.
//!
//! Writing all blocks of the arrays again moves the search for free blocks through the device, so a
//! few arrays of moderate size use all bitmaps.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::cache::metadata::bits::{Bits, words_of};
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::counts::PER_BITMAP;
use udm::cache::metadata::transaction::Reached;
use udm::cache::metadata::{
    BLOCK_BYTES, Change, Contents, Formatted, Loaded, Transaction, Writer, format, load, survey,
};
use udm::disk::{Disk, DiskIo, RamDisk, SimDisk};
use udm::prng::Prng;
use udm::units::SECOND;

use crate::fixture::{BLOCK, Fixture, disks};
use crate::tools::{Folder, check};

/// Blocks of the device: four bitmaps, of which the last one is short.
const BLOCKS: u64 = 3 * PER_BITMAP + 700;
const BITMAPS: usize = 4;
/// Words of bits of the blocks of a bitmap.
const WORDS: u64 = PER_BITMAP / 64;
/// Elements of a block of an array.
const PER_BLOCK: u64 = 509;
/// Slots whose arrays take about a thousand blocks.
const UNIT: u64 = 1 << 19;

/// Metadata on a device in memory.
struct Medium {
    ram: Arc<RamDisk>,
    disk: Arc<dyn Disk>,
    writer: Writer,
    /// The contents to be committed, and the durable contents.
    contents: Contents,
    durable: Contents,
    /// Blocks in use by the last transaction, and by the superblock on the device.
    used: Bits,
    found: Bits,
    /// For each bitmap, the transactions that freed blocks there and allocated none.
    only_freed: [u64; BITMAPS],
}

impl Medium {
    fn new() -> Medium {
        let ram = Arc::new(RamDisk::new(BLOCKS * BLOCK_BYTES as u64, 512));
        let disk: Arc<dyn Disk> = ram.clone();
        let Formatted { mut transaction, writer } = format(BLOCKS, 64, 2).unwrap();
        transaction.carry_out(&disk).unwrap();
        let used = spotless(&disk).counts.used;
        Medium {
            found: used.clone(),
            used,
            ram,
            disk,
            writer,
            contents: Contents::empty(0),
            durable: Contents::empty(0),
            only_freed: [0; BITMAPS],
        }
    }

    /// Commits the contents of a cache with `slots` slots; all blocks are written again.
    fn resize(&mut self, slots: u64) {
        self.contents.mappings.resize(slots as usize, 0);
        self.contents.dirty.resize(slots);
        self.commit(None);
    }

    /// Changes some slots; returns the changed blocks of mappings and dirty bits.
    fn soil(&mut self, prng: &mut Prng) -> [Bits; 2] {
        let slots = self.contents.slots();
        let blocks = [slots, words_of(slots)].map(|len| Bits::new(len.div_ceil(PER_BLOCK)));
        let [mut mappings, mut dirty] = blocks;
        for _ in 0..20 {
            let slot = prng.below(slots);
            let block = (!prng.one_in(3)).then_some(slot);
            self.contents.mappings[slot as usize] = mapping(block);
            self.contents.dirty.put(slot, block.is_some() && prng.one_in(2));
            mappings.set(slot / PER_BLOCK);
            dirty.set(slot / 64 / PER_BLOCK);
        }
        [mappings, dirty]
    }

    /// Commits changes of some slots.
    fn change(&mut self, prng: &mut Prng) {
        let changed = self.soil(prng);
        self.commit(Some(&changed));
    }

    /// A superblock is written, and its writer gets an error: the next transaction must not write
    /// to blocks of either superblock. It has these changes, and all others.
    fn fail(&mut self, prng: &mut Prng) {
        let changed = self.soil(prng);
        let transaction = self.write(Some(&changed));
        self.writer.abandoned(transaction, Reached::Superblock);
        self.commit(None);
    }

    /// Commits the contents; `changed`: the changed blocks of mappings and dirty bits.
    fn commit(&mut self, changed: Option<&[Bits; 2]>) {
        let transaction = self.write(changed);
        self.writer.committed(transaction);
        self.note();
    }

    /// Writes a transaction, and cuts the power before and after its superblock.
    fn write(&mut self, changed: Option<&[Bits; 2]>) -> Transaction {
        let superblock = self.writer.superblock().clone();
        let change = match changed {
            None => Change::whole(superblock, &self.contents),
            Some([mappings, dirty]) => Change {
                mappings: self.contents.next_mappings(2, Some(mappings)),
                dirty: self.contents.next_dirty(2, Some(dirty)),
                ..Change::of_superblock(superblock)
            },
        };
        let transaction = self.writer.prepare(&change).unwrap();
        drop(change);
        for (at, block) in transaction.blocks() {
            self.ram.poke(at * BLOCK_BYTES as u64, block.as_slice());
        }
        assert!(spotless(&self.disk).contents == self.durable, "cut before the superblock");
        self.ram.poke(0, transaction.superblock().as_slice());
        let loaded = spotless(&self.disk);
        assert!(loaded.contents == self.contents, "cut after the superblock");
        self.found = loaded.counts.used;
        self.durable.clone_from(&self.contents);
        transaction
    }

    /// Counts the bitmaps in which blocks were only freed.
    fn note(&mut self) {
        let used = self.found.clone();
        for (nth, count) in (0..).zip(&mut self.only_freed) {
            let mut words = (nth * WORDS..(nth + 1) * WORDS)
                .map(|word| (self.used.word(word), used.word(word)));
            let has_freed = words.clone().any(|(before, after)| before & !after != 0);
            let has_taken = words.any(|(before, after)| after & !before != 0);
            *count += u64::from(has_freed && !has_taken);
        }
        self.used = used;
    }

    /// Another server opens the metadata: it allocates from the beginning of the device again.
    fn reopen(&mut self) {
        self.writer = Writer::new(&load(&self.disk).unwrap()).unwrap();
    }

    /// Copies the blocks in use.
    fn copy(&self, mut write: impl FnMut(u64, &[u8])) {
        let mut block = [0; BLOCK_BYTES];
        for at in self.used.iter().map(|block| block * BLOCK_BYTES as u64) {
            self.ram.peek(at, &mut block);
            write(at, &block);
        }
    }

    /// Writes a sparse file.
    fn store(&self, path: &Path) {
        let file = File::options().write(true).open(path).unwrap();
        self.copy(|at, block| file.write_all_at(block, at).unwrap());
    }
}

/// The metadata, in which a check finds no fault.
fn spotless(disk: &Arc<dyn Disk>) -> Loaded {
    let found = survey(disk, survey::superblock(disk).unwrap());
    let findings: Vec<String> = found.findings().take(3).map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    found.loaded().unwrap()
}

/// Metadata that grow and shrink. `judge` sees them now and then.
fn history(mut judge: impl FnMut(&Medium)) {
    let mut medium = Medium::new();
    let mut prng = Prng::new(1);
    let sizes = [2, 8, 6, 0, 8, 2, 16, 0, 8].into_iter().map(|units| units * UNIT);
    for slots in sizes {
        medium.resize(slots.max(1));
        medium.change(&mut prng);
        if slots == 0 {
            medium.fail(&mut prng);
            judge(&medium);
        }
    }
    for slots in [4 * UNIT, 1, UNIT] {
        medium.reopen();
        medium.change(&mut prng);
        medium.resize(slots);
    }
    judge(&medium);
    let counts = medium.only_freed;
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}

/// The case for deliberate bugs, without other programs.
#[cfg(feature = "mutants")]
pub fn metadata_of_several_bitmaps_grow_and_shrink() {
    history(|_| ());
}

#[test]
fn cache_check_is_content_with_metadata_of_several_bitmaps_that_grow_and_shrink() {
    let folder = Folder::new();
    history(|medium| {
        let path = folder.file("meta", BLOCKS * BLOCK_BYTES as u64);
        medium.store(&path);
        check(&path);
    });
}

/// The metadata of a cache with four slots, nearly all in the second bitmap.
fn in_the_second_bitmap() -> Medium {
    let mut medium = Medium::new();
    for slots in [8 * UNIT, 8 * UNIT, 4] {
        medium.resize(slots);
    }
    assert!(in_other_bitmaps(&medium.used) >= 7);
    medium
}

/// Blocks in use that are not in the first bitmap.
fn in_other_bitmaps(used: &Bits) -> usize {
    used.iter().filter(|block| *block >= PER_BITMAP).count()
}

/// The server allocates in the first bitmap, and frees blocks in the second one. The power is cut
/// at each I/O of its first commits.
#[test]
pub fn a_served_cache_frees_blocks_in_another_bitmap_than_it_allocates() {
    let medium = in_the_second_bitmap();
    for seed in 0..32 {
        let mut fixture = Fixture::new("64 1 metadata2 smq 0", disks(4, 8 * BLOCK));
        let metadata = SimDisk::new(BLOCKS * BLOCK_BYTES as u64, 512).named("meta");
        medium.copy(|at, block| metadata.poke(at, block));
        fixture.disks[0] = Arc::new(metadata);
        fixture.open();
        fixture.bring(3);
        let mut left = seed;
        fixture.holds = Box::new(move |io: &DiskIo| {
            let is_metadata = io.disk.limits().name == "meta";
            let is_cut = is_metadata && left == 0;
            left -= u64::from(is_metadata && !is_cut);
            is_cut
        });
        fixture.submit(Bio::write(3 * BLOCK, Buffer::from_bytes(&[7; 512]), true, 1));
        for _ in 0..30 {
            fixture.tick(SECOND);
        }
        let is_kept = fixture.port.done.pop_front().is_some_and(|bio| bio.status.is_ok());
        assert!(is_kept || seed < 20, "two commits have ended");
        fixture.crash(&mut Prng::new(seed));
        let metadata: Arc<dyn Disk> = fixture.disks[0].clone();
        spotless(&metadata);
        fixture.open();
        let data = fixture.read(3 * BLOCK, 512);
        assert!(data == [7; 512] || data == [0; 512] && !is_kept, "seed {seed}");
        fixture.write(3 * BLOCK, &[8; 512]);
        fixture.remove();
        let used = spotless(&metadata).counts.used;
        assert!(in_other_bitmaps(&used) < in_other_bitmaps(&medium.used), "seed {seed}");
    }
}
