//! A cache's metadata with arbitrary content: read, checked, repaired, written, served, drained,
//! printed.
//!
//! The input first makes metadata, then damages it and corrects the checksums, so that they do not
//! reveal the damage. Other inputs are XML. The promises: no panic, no hang, bounded
//! allocations; undamaged metadata can be written and reads back the same; a repaired copy passes
//! all checks; a block in use is not overwritten; a server shows the same data as a reader, loses
//! no written data, and leaves metadata that
//! can be loaded.

mod serving;

use std::sync::Arc;

use udm::cache::Devices;
use udm::cache::drain::Drain;
use udm::cache::metadata::block::BlockKind;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::format::write_whole;
use udm::cache::metadata::{
    BLOCK_BYTES, Block, Change, Contents, Superblock, Writer, load, survey,
};
use udm::cache::repair::repair;
use udm::cache::xml;
use udm::disk::{Disk, RamDisk};

use crate::check_error;
use crate::input::Input;

const BLOCKS: u64 = 64;
const SLOTS_MAX: u64 = 3000;
const DAMAGE_MAX: u8 = 12;

/// The content of a metadata device, or a text.
pub fn cache(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.u8() {
        b'<' => text(bytes),
        shape => media(shape, &mut input),
    }
}

fn text(bytes: &[u8]) {
    let Ok(text) = xml::text_of(bytes) else { return };
    let description = match xml::parse(text, SLOTS_MAX) {
        Ok(description) => description,
        Err(error) => {
            assert!(error.place().is_some(), "{error}");
            return check_error(&error);
        }
    };
    let (_, disk) = device();
    if let Err(error) = description.write(&disk, 2, true) {
        return check_error(&error);
    }
    let loaded = load(&disk).unwrap();
    assert_eq!(loaded.contents.mappings, description.contents.mappings);
    assert_eq!(loaded.contents.dirty, description.contents.dirty);
    let printed = printed(&loaded.superblock, &loaded.contents);
    let again = xml::parse(&printed, SLOTS_MAX).unwrap();
    assert_eq!(again.contents.mappings, description.contents.mappings);
}

fn printed(superblock: &Superblock, contents: &Contents) -> String {
    let mut text = String::new();
    xml::print(superblock, contents, |line| {
        text += line;
        Ok(())
    })
    .unwrap();
    text
}

fn device() -> (Arc<RamDisk>, Arc<dyn Disk>) {
    let ram = Arc::new(RamDisk::new(BLOCKS * BLOCK_BYTES as u64, 512));
    (ram.clone(), ram)
}

fn media(shape: u8, input: &mut Input<'_>) {
    let (ram, disk) = device();
    make(&disk, shape, input);
    for _ in 0..input.u8() % DAMAGE_MAX {
        damage(&ram, input);
    }
    look(&disk);
    let before = ram.counts().writes;
    match repair(&disk) {
        Err(error) => check_error(&error),
        Ok(kept) => {
            let (_, other) = device();
            match write_whole(&other, kept.superblock, &kept.contents) {
                Err(error) => check_error(&error),
                Ok(()) => {
                    let found = survey(&other, survey::superblock(&other).unwrap());
                    assert_eq!(found.findings().count(), 0);
                    assert_eq!(found.loaded().unwrap().contents, kept.contents);
                }
            }
        }
    }
    assert_eq!(ram.counts().writes, before, "a repair has written");
    serving::serve(&ram, input);
    write(&disk);
    drain(&disk);
}

/// The metadata of a cache.
fn make(disk: &Arc<dyn Disk>, shape: u8, input: &mut Input<'_>) {
    let slots = input.below(SLOTS_MAX);
    let mut contents = Contents::empty(slots);
    for slot in 0..u64::from(input.u8()).min(slots) {
        contents.mappings[slot as usize] = mapping(Some(slot * 3));
        contents.dirty.put(slot, slot % 2 == 0);
    }
    if shape & 4 != 0 {
        contents.hints = Some(vec![7; slots as usize]);
    }
    if shape & 8 != 0 {
        contents.discards.resize(input.below(16_384));
    }
    let mut superblock = Superblock::fresh(1 + u32::from(shape & 1), 64);
    superblock.fields.flags.set(u32::from(shape >> 1 & 1));
    write_whole(disk, superblock, &contents).unwrap();
}

/// Changes some bytes of a block, and usually corrects its checksum.
fn damage(ram: &RamDisk, input: &mut Input<'_>) {
    let choice = input.u8();
    let address = if choice & 0xC0 == 0 { 0 } else { input.below(BLOCKS / 2) };
    let mut block: Block = [0; BLOCK_BYTES];
    ram.peek(address * BLOCK_BYTES as u64, &mut block);
    let kind = BlockKind::ALL.into_iter().find(|kind| kind.is_sealed(&block));
    for _ in 0..1 + choice % 3 {
        let room = if address == 0 { 300 } else { BLOCK_BYTES as u64 };
        let at = match input.u8() {
            near @ ..=159 => u64::from(near),
            _ => input.below(room),
        };
        let width = 1 << (input.u8() % 4);
        let at = (at as usize / width * width).min(BLOCK_BYTES - width);
        let value = input.near(BLOCKS).to_le_bytes();
        block[at..at + width].copy_from_slice(&value[..width]);
    }
    let kind = kind.filter(|_| choice & 0x20 == 0 || choice & 0x10 != 0);
    kind.into_iter().for_each(|kind| kind.seal(&mut block, address));
    ram.poke(address * BLOCK_BYTES as u64, &block);
}

/// A read returns the content, or an error that names the damage.
fn look(disk: &Arc<dyn Disk>) {
    let superblock = match survey::superblock(disk) {
        Ok(superblock) => superblock,
        Err(error) => return check_error(&error),
    };
    let found = survey(disk, superblock);
    for finding in found.findings() {
        let line = finding.to_string();
        assert!(!line.contains('\n') && line.starts_with("metadata block "), "{line}");
    }
    let has_damage = !found.damage.is_empty();
    match found.loaded() {
        Ok(loaded) => {
            assert!(!has_damage);
            printed(&loaded.superblock, &loaded.contents);
        }
        Err(error) => check_error(&error),
    }
}

/// Loaded metadata can be written, in whole and in part.
fn write(disk: &Arc<dyn Disk>) {
    let Ok(loaded) = load(disk) else { return };
    let used = loaded.counts.used.clone();
    let mut writer = match Writer::new(&loaded) {
        Ok(writer) => writer,
        Err(error) => return check_error(&error),
    };
    let superblock = writer.superblock().clone();
    let mut transaction = match writer.prepare(&Change::whole(superblock, &loaded.contents)) {
        Ok(transaction) => transaction,
        Err(error) => return check_error(&error),
    };
    assert!(transaction.blocks().iter().all(|(at, _)| *at > 0 && !used.is_set(*at)));
    transaction.carry_out(disk).map_err(|(error, _)| error).unwrap();
    writer.committed(transaction);
    assert_eq!(load(disk).unwrap().contents, loaded.contents);
}

fn drain(disk: &Arc<dyn Disk>) {
    let Ok(loaded) = load(disk) else { return };
    let data: Arc<dyn Disk> = Arc::new(RamDisk::new(16 << 20, 512));
    let origin: Arc<dyn Disk> = Arc::new(RamDisk::new(16 << 20, 512));
    let devices = Devices { metadata: disk.clone(), cache: data, origin };
    let mut drain = match Drain::new(devices, loaded, None) {
        Ok(drain) => drain,
        Err(error) => return check_error(&error),
    };
    while !drain.is_done() {
        if let Err(error) = drain.step() {
            return check_error(&error);
        }
    }
    let loaded = load(disk).unwrap();
    assert!(loaded.superblock.is_clean() && loaded.contents.dirty.ones() == 0);
}
