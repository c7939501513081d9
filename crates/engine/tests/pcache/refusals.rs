//! Every error of the specification's section 18.5 at attach, and our refusals beyond the
//! kernel's: kind, errno, and a text that names the place.

use std::sync::Arc;

use udm::disk::RamDisk;
use udm::error::Kind;

use crate::builder::{Builder, Key, cache_info, kset, last, meta, seg_info, superblock, tail};
use crate::fixture::{Fixture, Setup};

/// Opens an image and expects a refusal of this kind whose text has all these words.
fn refused(image: &[u8], table: &'static str, kind: Kind, words: &[&str]) {
    let mut fixture = Fixture::of_image(image, table);
    let before = fixture.pmem.image();
    let error = fixture.try_open(false).expect_err("a refusal");
    assert_eq!(error.kind(), kind, "{error}");
    let text = error.to_string();
    for word in words {
        assert!(text.contains(word), "'{word}' is not in: {text}");
    }
    assert!(!text.contains('\n') && !text.ends_with('.'), "one line: {text}");
    assert!(fixture.pmem.image() == before, "a refused device is not touched: {text}");
}

/// A cache of 24 segments whose log holds one dirty key, changed by `change` at the end.
fn with(change: impl FnOnce(&mut Vec<u8>, &Builder)) -> Vec<u8> {
    let mut built = Builder::new(24);
    let key = built.key(0, 5, 0, &[1; 512], 0);
    built.append(&[key], 1);
    let mut image = built.finish();
    change(&mut image, &built);
    image
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

fn io(image: &[u8], words: &[&str]) {
    refused(image, "C B 0", Kind::Io, words);
}

#[test]
fn a_small_cache_device_is_refused_with_enospc() {
    let mut setup = Setup::small();
    setup.geometry.device_bytes_min = setup.cache_bytes + 1;
    let error = Fixture::new(setup).try_open(true).unwrap_err();
    assert_eq!((error.kind(), error.kind().errno()), (Kind::NoSpace, 28), "{error}");
}

#[test]
fn superblock_errors() {
    let crc = with(|image, _| image[4112] ^= 1);
    refused(&crc, "C B 0", Kind::Invalid, &["superblock", "4096", "CRC"]);
    let magic = with(|image, _| image[4104] ^= 1);
    refused(&magic, "C B 0", Kind::Refused, &["not a pcache", "--force-format"]);
    let endian = with(|image, _| put(image, 4096, &superblock(24, 1, 0)));
    refused(&endian, "C B 0", Kind::Invalid, &["big-endian"]);
    for count in [0, 25, 1 << 20, u32::MAX] {
        io(
            &with(|image, _| put(image, 4096, &superblock(count, 0, 0))),
            &["segments", "superblock"],
        );
    }
    let mut fixture = Fixture::of_image(&with(|_, _| {}), "C B 0");
    fixture.pmem.poison(4096, 64);
    assert_eq!(fixture.try_open(false).unwrap_err().kind(), Kind::Io, "unreadable");
}

#[test]
fn cache_info_errors() {
    let lost = with(|image, _| {
        image[8192] ^= 1;
        image[12288] ^= 1;
    });
    io(&lost, &["cache_info", "8192", "12288", "--force-format"]);
    let unfinished = with(|image, _| {
        put(image, 8192, &cache_info(0, 0, 24, 0x1180));
        put(image, 12288, &cache_info(1, 0, 24, 0x1180));
    });
    io(&unfinished, &["cache_info", "format was interrupted"]);
    for n_segs in [0, 25, u32::MAX] {
        let image = with(|image, _| put(image, 12288, &cache_info(1, 0, n_segs, 0x1182)));
        io(&image, &["cache_info", "chain"]);
    }
    refused(&with(|_, _| {}), "C B 2 data_crc true", Kind::Invalid, &["data_crc", "false"]);
    let crc = with(|image, _| put(image, 12288, &cache_info(1, 0, 24, 0x1183)));
    refused(&crc, "C B 0", Kind::Invalid, &["data_crc", "true"]);
}

#[test]
fn chain_errors() {
    let info = |segment: usize, record: Vec<u8>| {
        with(|image, built| put(image, built.segment_at(segment as u32), &record))
    };
    refused(&info(3, seg_info(2, None)), "C B 0", Kind::Fault, &["chain ends after 4 of 24"]);
    assert_eq!(Kind::Fault.errno(), 14);
    io(&info(3, seg_info(2, Some(24))), &["physical segment 24"]);
    io(&info(3, seg_info(2, Some(2))), &["segment 2", "twice"]);
    let both = with(|image, built| {
        image[built.segment_at(7)] ^= 1;
        image[built.segment_at(7) + 4096] ^= 1;
    });
    io(&both, &["segment 7", "both copies of its info"]);
    let both = with(|image, built| {
        image[built.segment_at(7) + 8192] ^= 1;
        image[built.segment_at(7) + 8208] ^= 1;
    });
    io(&both, &["segment 7", "generation"]);
}

#[test]
fn tail_errors() {
    for (at, name) in [(16384, "key_tail"), (16416, "dirty_tail")] {
        let lost = with(|image, _| {
            image[at] ^= 1;
            image[at + 16] ^= 1;
        });
        io(&lost, &[name, "both copies"]);
        // The last: a position after which no record has room.
        for place in [(24, 0), (u32::MAX, 0), (0, 53248), (0, 4), (23, 53248 - 8)] {
            let image = with(|image, _| {
                put(image, at, &tail(5, place));
                put(image, at + 16, &tail(4, place));
            });
            io(&image, &[name, &format!("{}:{}", place.0, place.1)]);
        }
    }
    let beyond = with(|image, _| put(image, 16416, &tail(5, (9, 512))));
    io(&beyond, &["without passing dirty_tail 9:512"]);
}

fn with_key(change: impl FnOnce(&mut Key)) -> Vec<u8> {
    let mut built = Builder::new(24);
    let good = built.key(4096, 5, 0, &[1; 512], 0);
    let mut key = built.key(0, 6, 0, &[1; 512], 0);
    change(&mut key);
    built.append(&[good, key], 1);
    built.finish()
}

#[test]
fn key_errors_name_the_key() {
    let place = "log at 0:0, key 1";
    io(&with_key(|key| key.segment = 24), &[place, "segment 24 of 24"]);
    io(&with_key(|key| key.at = 53248), &[place, "leaves segment 6"]);
    io(&with_key(|key| key.at = u32::MAX - 511), &[place, "leaves segment"]);
    io(&with_key(|key| key.len = 0), &[place, "0 bytes at 0"]);
    io(&with_key(|key| key.len = 100), &[place, "not whole sectors"]);
    io(&with_key(|key| key.off = 7), &[place, "not whole sectors"]);
    io(&with_key(|key| key.at = 3), &[place, "not whole sectors"]);
    let cross = |key: &mut Key| {
        key.off = (4 << 20) - 512;
        key.len = 1024;
    };
    io(&with_key(cross), &[place, "border of 4 MiB"]);
    io(&with_key(|key| key.off = 12 << 20), &[place, "backing device has"]);
    io(&with_key(|key| key.off = u64::MAX - 511), &[place, "backing device has"]);
    for flags in [1, 3, 4, u32::MAX] {
        io(&with_key(|key| key.flags = flags), &[place, "flags"]);
    }
    io(&with_key(|key| key.generation = 1), &[place, "generation 1 of segment 6"]);
    io(&with_key(|key| key.segment = 0), &["segment 0", "holds the log"]);
}

#[test]
fn log_errors() {
    let mut built = Builder::new(24);
    built.append_raw(&last(24));
    io(&built.finish(), &["log at 0:0", "segment 24 of 24"]);
    let mut built = Builder::new(24);
    built.append_last(3);
    built.append_raw(&last(0));
    io(&built.finish(), &["log at 3:0", "has a cycle at segment 0"]);
    // A key set that leaves no room for LAST after it.
    let mut built = Builder::new(24);
    built.head.1 = built.data_bytes() - 64 - 16;
    (built.key_tail, built.dirty_tail) = (built.head, built.head);
    let key = built.key(0, 5, 0, &[1; 512], 0);
    built.data(0, built.head.1, &kset(&[key]));
    io(&built.finish(), &["leaves no space"]);
}

#[test]
fn the_backing_device_must_be_long_enough_and_the_one_on_the_label() {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(0, &[1; 4096], true);
    fixture.kill();
    let len = fixture.setup.backing_bytes;
    let other = |name: &str, len: u64| Arc::new(RamDisk::new(len, 512).named(name));
    fixture.disk = other("ram", len - 512);
    let error = fixture.try_open(false).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid, "{error}");
    fixture.disk = other("wrong", len);
    let error = fixture.try_open(false).unwrap_err();
    assert_eq!(error.kind(), Kind::Refused, "{error}");
    assert!(error.to_string().contains("rebind true"), "{error}");
    fixture.setup.table = "C B 0 rebind true";
    fixture.open();
    assert_eq!(fixture.read(0, 4096), [1; 4096]);
    fixture.remove();
    fixture.setup.table = "C B 0";
    fixture.open();
    fixture.remove();
    fixture.disk = other("wrong", len + (4 << 20));
    fixture.open();
    assert_eq!(fixture.read(0, 4096), [1; 4096], "a backing device may grow");
    fixture.remove();
    fixture.disk = other("wrong", len);
    let error = fixture.try_open(false).unwrap_err();
    assert_eq!(error.kind(), Kind::Refused, "but not shrink: {error}");
}

/// Gives the label in `slot` another version; `is_whole`: with the CRC that belongs to it.
fn relabel(image: &mut [u8], slot: usize, version: u16, is_whole: bool) {
    let slot = &mut image[slot * 2048..][..2048];
    assert_eq!(&slot[8..16], b"udmlabel");
    slot[6..8].copy_from_slice(&version.to_le_bytes());
    let sum = crate::builder::crc(&slot[4..]);
    slot[..4].copy_from_slice(&(sum ^ u32::from(!is_whole)).to_le_bytes());
}

#[test]
fn what_a_newer_udm_labelled_is_refused_and_left_alone() {
    let mut fixture = Fixture::new(Setup::small());
    for _ in 0..2 {
        fixture.open();
        fixture.write(0, &[1; 4096], true);
        fixture.remove();
    }
    let labelled = fixture.pmem.image();
    for slot in [0, 1] {
        let mut image = labelled.clone();
        relabel(&mut image, slot, 3, true);
        refused(&image, "C B 0", Kind::Unsupported, &["newer udm", "version 3", "64 KiB"]);
        let fixture = Fixture::of_image(&image, "C B 0");
        let report = udm::pcache::inspect::inspect(fixture.pmem.clone(), fixture.setup.geometry);
        assert_eq!(report.unwrap_err().kind(), Kind::Unsupported);
        // Neither by force, nor if the remaining bytes are not a pcache.
        for is_pcache in [true, false] {
            if !is_pcache {
                put(&mut image, 4096, &[0; 24]);
            }
            let mut fixture = Fixture::of_image(&image, "C B 0");
            assert_eq!(fixture.try_open(true).unwrap_err().kind(), Kind::Unsupported);
            assert!(fixture.pmem.image() == image);
        }
    }
    // A rotten label is not a newer one; the other slot counts.
    let mut image = labelled;
    relabel(&mut image, 0, 3, false);
    Fixture::of_image(&image, "C B 0").open();
}

#[test]
fn a_device_that_may_hold_something_is_formatted_only_by_force() {
    let setup = Setup::small();
    let mut image = vec![0; setup.cache_bytes as usize];
    image[60000] = 1;
    refused(&image, "C B 0", Kind::Refused, &["may hold", "--force-format"]);
    let mut fixture = Fixture::of_image(&image, "C B 0");
    fixture.try_open(true).unwrap();
    fixture.write(0, &[1; 512], true);
    fixture.kill();
    let error = fixture.try_open(true).unwrap_err();
    assert_eq!(error.kind(), Kind::Refused, "dirty data: {error}");
    fixture.open();
    fixture.drain();
    fixture.remove();
    fixture.try_open(true).unwrap();
}

#[test]
fn damage_is_overcome_by_an_erased_front_and_force_alone() {
    let lost = with(|image, _| put(image, 8192, &[0; 4096 + 24]));
    let mut fixture = Fixture::of_image(&lost, "C B 0");
    assert_eq!(fixture.try_open(false).unwrap_err().kind(), Kind::Io);
    // The log may hold dirty data.
    let error = fixture.try_open(true).unwrap_err();
    assert!(error.to_string().contains("erase the first 64 KiB"), "{error}");
    let mut erased = lost.clone();
    erased[..64 << 10].fill(0);
    let mut fixture = Fixture::of_image(&erased, "C B 0");
    fixture.try_open(true).unwrap();
    assert_eq!(fixture.read(0, 512), [0xEE; 512]);
    // So with other damage.
    let damaged = with(|image, _| put(image, 16416, &meta(9, 0, &[99, 0])));
    let error = Fixture::of_image(&damaged, "C B 0").try_open(true).unwrap_err();
    assert!(error.to_string().contains("dirty data"), "{error}");
}
