//! The checklist of the specification's section 26, on media made by `builder`.

use udm::pcache::layout::{
    CacheInfo, Generation, Geometry, Key as MediaKey, KsetHeader, Position, SegmentInfo,
    Superblock, Tail, info_flags, kset_bytes, seal_kset,
};
use udm::pcache::slots::choose;
use udm::prng::Prng;
use udm::target::Target;
use zerocopy::IntoBytes;

use crate::builder::{Builder, CLEAN, Key, cache_info, crc, generation, kset, last, tail};
use crate::fixture::{Fixture, Setup};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The engine's key set of these keys.
fn engine_kset(keys: &[Key]) -> Vec<u8> {
    let mut set = vec![0; kset_bytes(keys.len())];
    for (nth, key) in keys.iter().enumerate() {
        let mut media = MediaKey {
            off: key.off.into(),
            len: key.len.into(),
            flags: key.flags.into(),
            segment: key.segment.into(),
            segment_off: key.at.into(),
            generation: key.generation.into(),
            data_crc: key.crc.into(),
            reserved: 0.into(),
        };
        set[24 + nth * 40..][..40].copy_from_slice(media.as_mut_bytes());
    }
    seal_kset(&mut set, keys.len());
    set
}

#[test]
fn crc_vectors() {
    let same = |data: &[u8], value: u32| {
        assert_eq!(udm::base::crc::pcache_crc(data), value);
        assert_eq!(crc(data), value, "the tests' own");
    };
    same(b"", 0x0003_B15A);
    same(b"123456789", 0xE586_8AB2);
    same(&[0; 8], 0x46E4_ACEF);
    same(&[0; 12], 0x5F84_0B80);
    same(&[0; 20], 0xB9B6_9066);
    same(&[0; 4096], 0x6035_71B1);
    same(&[0; 8192], 0xD555_7D8C);
    same(&[0xFF; 512], 0xA7F4_E604);
    same(&[0x55; 4096], 0x0B22_E4C7);
}

#[test]
fn structures_have_the_bytes_of_section_25() {
    let at = |segment, offset| Position { segment, offset };
    let list: Vec<(String, &str)> = vec![
        (
            hex(Superblock::new(35, 0).as_bytes()),
            "d89d2fee00000000ef96c596fa5eb0652300000000000000",
        ),
        (
            hex(Superblock::new(31, 0).as_bytes()),
            "42777f0400000000ef96c596fa5eb0651f00000000000000",
        ),
        (
            hex(Superblock::new(63, 0).as_bytes()),
            "db127f0900000000ef96c596fa5eb0653f00000000000000",
        ),
        (
            hex(Superblock::new(35, 0xEFBE_ADDE).as_bytes()),
            "91a1945700000000ef96c596fa5eb06523000000deadbeef",
        ),
        (
            hex(CacheInfo::new(1, 0, 35, info_flags(70, false)).as_bytes()),
            "e91115bd01000000000000002300000082110000 00000000",
        ),
        (
            hex(CacheInfo::new(1, 0, 31, info_flags(70, false)).as_bytes()),
            "6dfecadd01000000000000001f0000008211000000000000",
        ),
        (
            hex(CacheInfo::new(1, 0, 35, info_flags(70, true)).as_bytes()),
            "ce6c29f401000000000000002300000083110000 00000000",
        ),
        (
            hex(CacheInfo::new(5, 0, 35, info_flags(70, false)).as_bytes()),
            "1dcf1a6005000000000000002300000082110000 00000000",
        ),
        (
            hex(CacheInfo::new(8, 0, 35, info_flags(0, false)).as_bytes()),
            "476dfcf508000000000000002300000002000000 00000000",
        ),
        (hex(SegmentInfo::new(2, Some(1)).as_bytes()), "318e663b020000000300000001000000"),
        (hex(SegmentInfo::new(2, Some(34)).as_bytes()), "8313618e020000000300000022000000"),
        (hex(SegmentInfo::new(1, None).as_bytes()), "fe258dfc010000000200000000000000"),
        (hex(Generation::new(1, 0).as_bytes()), "b0dff56e010000000000000000000000"),
        (hex(Generation::new(2, 1).as_bytes()), "c7de5b74020000000100000000000000"),
        (hex(Tail::new(6, at(0, 400)).as_bytes()), "5c1925e6060000000000000090010000"),
        (hex(Tail::new(8, at(0, 2128)).as_bytes()), "ee0c75ab080000000000000050080000"),
        (hex(Tail::new(16, at(2, 1224)).as_bytes()), "f97849451000000002000000c8040000"),
        (hex(Tail::new(0, at(34, 16_764_904)).as_bytes()), "57fc9bbb0000000022000000e8cfff00"),
        (hex(KsetHeader::last(2).as_bytes()), "9604dcdd020000001a4f164ea69468670100000000000000"),
        (hex(KsetHeader::last(0).as_bytes()), "eceb5bb3000000001a4f164ea69468670100000000000000"),
        (hex(&engine_kset(&[])), "cb9667fa000000001a4f164ea69468670000000000000000"),
    ];
    for (found, expected) in list {
        assert_eq!(found, expected.replace(' ', ""));
    }
}

#[test]
fn key_sets_have_the_bytes_of_section_25() {
    let key = |off, len, segment, at, flags, crc| Key {
        off,
        len,
        flags,
        segment,
        at,
        generation: 0,
        crc,
    };
    let list: [(Vec<Key>, &str); 5] = [
        (vec![key(0, 4096, 2, 0, 0, 0)], "77f7ea1f"),
        (vec![key(0, 4096, 1, 0, 0, 0), key(8192, 8192, 1, 4096, 0, 0)], "b7257e50"),
        (vec![key(1 << 20, 4096, 1, 20480, 2, 0), key(4096, 4096, 1, 24576, 2, 0)], "5ed470ea"),
        (vec![key(0, 4096, 1, 0, 0, crc(&[0x55; 4096]))], "8fdcc0c4"),
        (vec![key(7_340_032, 8192, 2, 0, 2, crc(&[0; 8192]))], "347631b1"),
    ];
    for (keys, sum) in list {
        let set = engine_kset(&keys);
        assert_eq!(set, kset(&keys), "{keys:?}");
        assert_eq!(hex(&set[..4]), sum);
    }
}

#[test]
fn the_current_copy_is_chosen_as_the_kernel_does() {
    assert_eq!(choose(Some(255), Some(0)), Some(1));
    assert_eq!(choose(Some(5), Some(5)), Some(0));
    assert_eq!(choose(Some(0), Some(128)), Some(0));
    assert_eq!(choose(Some(0), Some(127)), Some(1));
    assert_eq!(choose(None, Some(1)), Some(1));
    assert_eq!(choose(None, None), None);
}

#[test]
fn a_permuted_chain_with_wrapped_sequence_numbers_is_followed() {
    let mut built = Builder::new(24);
    let mut prng = Prng::new(5);
    for nth in (1..24).rev() {
        built.chain.swap(nth, prng.below(nth as u64 + 1) as usize);
    }
    built.seq = 0;
    built.generations = (0..24).map(|nth| nth * 3).collect();
    built.head = (4, 800);
    built.key_tail = built.head;
    built.dirty_tail = built.head;
    built.log = vec![4];
    for nth in 0..40_u64 {
        let segment = 7 + nth as u32 % 3;
        let key = built.key(nth * 8192, segment, nth as u32 * 1024, &[nth as u8 + 1; 1024], 0);
        built.append(&[key], 12);
    }
    let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
    fixture.open();
    let expected = format!("0 24 24 4 70 1182 4:{} 4:800 4:800", 800 + 40 * 64);
    assert_eq!(fixture.target().status(), expected);
    for nth in 0..40_u64 {
        assert_eq!(fixture.read(nth * 8192, 1024), [nth as u8 + 1; 1024]);
        assert_eq!(fixture.read(nth * 8192 + 1024, 512), [0xEE; 512]);
    }
    let content = fixture.content();
    fixture.drain();
    assert_eq!(fixture.disk.image(), content);
}

/// A log whose free rest is `rest` bytes, with one block at offset 0 in it.
fn log_with_rest(rest: u32) -> (Builder, Fixture) {
    let mut built = Builder::new(24);
    let key = built.key(0, 9, 0, &[1; 512], 0);
    built.append(&[key], 1);
    while built.data_bytes() - built.head.1 >= rest + 5144 + 64 {
        built.append_raw(&kset(&vec![key; 128]));
    }
    // 24a + 40b bytes of no-ops and repeats fill the gap exactly.
    let gap = built.data_bytes() - built.head.1 - rest;
    let keys = (0..=gap / 40).find(|keys| gap > keys * 40 && (gap - keys * 40).is_multiple_of(24));
    let keys = keys.expect("every gap of 64 bytes or more can be filled, but 80");
    let sets = (gap - keys * 40) / 24;
    for nth in 0..sets {
        let here = keys / sets + u32::from(nth < keys % sets);
        built.append_raw(&kset(&vec![key; here as usize]));
    }
    assert_eq!(built.data_bytes() - built.head.1, rest);
    built.dirty_tail = built.head;
    let fixture = Fixture::of_image(&built.finish(), "C B 0");
    (built, fixture)
}

#[test]
fn last_at_exactly_24_bytes_from_the_end_is_written_and_followed() {
    let (built, mut fixture) = log_with_rest(24);
    fixture.open();
    let head = format!("0:{}", built.head.1);
    assert!(fixture.target().status().contains(&head), "{}", fixture.target().status());
    fixture.write(4096, &[7; 512], true);
    let at = built.place(0, built.head.1);
    assert_eq!(fixture.pmem.peek(at as u64, 24)[8..16], last(1)[8..16], "a LAST record");
    fixture.kill();
    fixture.open();
    assert_eq!(fixture.read(4096, 512), [7; 512]);
    assert_eq!(fixture.read(0, 512), [1; 512]);
    // And the kernel's own: a log that was left there.
    let mut built = built;
    built.append_last(3);
    let key = built.key(8192, 9, 1024, &[8; 512], 0);
    built.append(&[key], 4);
    let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
    fixture.open();
    assert_eq!(fixture.read(8192, 512), [8; 512]);
}

#[test]
fn a_key_set_that_just_fits_stays_and_one_that_just_does_not_moves_on() {
    // A marked set of one key takes 64 + 24 bytes, and 24 more must be left for LAST.
    for (rest, segment) in [(112, "0:"), (104, "10:")] {
        let (built, mut fixture) = log_with_rest(rest);
        fixture.open();
        fixture.write(4096, &[7; 512], true);
        let head = fixture.target().status().split(' ').nth(6).unwrap().to_string();
        assert_eq!(head.starts_with(segment), rest == 112 || head.starts_with("0:"), "{head}");
        let stays = head.starts_with("0:");
        assert_eq!(stays, rest == 112, "{rest}: {head}");
        if stays {
            assert_eq!(head, format!("0:{}", built.data_bytes() - 24));
        }
        fixture.write(8192, &[9; 512], true);
        fixture.kill();
        fixture.open();
        assert_eq!(
            (fixture.read(4096, 512), fixture.read(8192, 512)),
            (vec![7; 512], vec![9; 512])
        );
    }
}

/// The six rows of the overlap table: the new key's sectors against an old one of 8..16.
const OVERLAPS: [(&str, u64, u64); 8] = [
    ("before", 2, 8),
    ("after", 16, 20),
    ("covers the head", 4, 12),
    ("equal", 8, 16),
    ("covers all and more", 4, 20),
    ("strictly inside", 10, 13),
    ("covers the tail", 12, 20),
    ("the tail exactly", 12, 16),
];

#[test]
fn overlaps_keep_what_the_newest_left() {
    for (row, first, end) in OVERLAPS {
        for second in [false, true] {
            let mut built = Builder::new(24);
            let mut model = vec![0xEE_u8; 40];
            let mut put = |built: &mut Builder, first: u64, end: u64, at: u32, fill: u8| {
                model[first as usize..end as usize].fill(fill);
                built.key(first * 512, 5, at, &vec![fill; (end - first) as usize * 512], 0)
            };
            let old = put(&mut built, 8, 16, 0, 1);
            let new = put(&mut built, first, end, 8192, 2);
            let third = put(&mut built, 11, 14, 20480, 3);
            match second {
                true => built.append(&[old, new, third], 1),
                false => [old, new, third].iter().for_each(|key| built.append(&[*key], 1)),
            }
            let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
            fixture.open();
            let found: Vec<u8> = fixture.read(0, 40 * 512).chunks(512).map(|s| s[511]).collect();
            assert_eq!(found, model, "{row}");
            fixture.drain();
            let image = fixture.disk.image();
            let found: Vec<u8> = image[..40 * 512].chunks(512).map(|s| s[0]).collect();
            assert_eq!(found, model, "{row}, drained");
        }
    }
}

#[test]
fn a_stale_key_punches_older_keys_out() {
    let mut built = Builder::new(24);
    built.generations[6] = 4;
    let old = built.key(0, 5, 0, &[1; 4096], 0);
    let mut stale = built.key(1024, 6, 0, &[2; 1024], 0);
    stale.generation = 3;
    built.append(&[old, stale], 1);
    built.dirty_tail = built.head;
    let newer = built.key(3072, 5, 8192, &[3; 512], 0);
    built.append(&[newer], 1);
    let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
    fixture.disk.load_image(&vec![9; 12 << 20]);
    fixture.open();
    let found: Vec<u8> = fixture.read(0, 4608).chunks(512).map(|sector| sector[0]).collect();
    assert_eq!(found, [1, 1, 9, 9, 1, 1, 3, 1, 9]);
}

#[test]
fn a_torn_key_set_is_the_end_of_the_log_at_every_boundary() {
    let mut built = Builder::new(24);
    let first = built.key(0, 5, 0, &[1; 512], 0);
    built.append(&[first], 1);
    let second = built.key(0, 5, 512, &[2; 512], 0);
    let at = built.place(0, built.head.1);
    let set = kset(&[second, second]);
    for cut in (0..=set.len()).step_by(8) {
        let mut image = built.finish();
        image[at..at + cut].copy_from_slice(&set[..cut]);
        let mut fixture = Fixture::of_image(&image, "C B 0");
        fixture.open();
        // Its last bytes are zero: they were there before.
        let is_whole = set[cut..].iter().all(|byte| *byte == 0);
        let expected = if is_whole { 2 } else { 1 };
        assert_eq!(fixture.read(0, 512), [expected; 512], "{cut}");
        // The log goes on over the torn set.
        fixture.write(512, &[3; 512], true);
        fixture.kill();
        fixture.open();
        assert_eq!(fixture.read(0, 1024), [[expected; 512], [3; 512]].concat(), "{cut}");
    }
}

#[test]
fn a_torn_tail_or_generation_leaves_the_older_copy() {
    let mut built = Builder::new(24);
    let key = built.key(0, 5, 0, &[1; 512], 0);
    built.append(&[key], 1);
    let segment = built.segment_at(5);
    let torn = |at: usize, record: &[u8], cut: usize| {
        let mut image = built.finish();
        image[at..at + cut].copy_from_slice(&record[..cut]);
        let mut fixture = Fixture::of_image(&image, "C B 0");
        fixture.open();
        (fixture.target().status(), fixture.read(0, 512))
    };
    let whole = torn(0, &[], 0);
    assert_eq!(whole.1, [1; 512]);
    // Slot 0 of dirty_tail and slot 1 of key_tail are the spare ones; a generation's is slot 0.
    assert_eq!(torn(16416, &tail(2, (0, 64)), 8), whole);
    assert_eq!(torn(16400, &tail(2, (0, 64)), 8), whole);
    assert_eq!(torn(segment + 8192, &generation(2, 1), 8), whole);
    assert_ne!(torn(16416, &tail(2, (0, 64)), 16).0, whole.0);
    assert_eq!(torn(segment + 8192, &generation(2, 1), 16).1, [0xEE; 512], "stale");
    for cut in [8, 16, 20] {
        assert_eq!(torn(8192, &cache_info(2, 0, 24, 0x1182), cut), whole, "cache_info {cut}");
    }
}

#[test]
fn thirty_one_segments_with_64_writers_do_not_hang() {
    let setup = Setup { cache_bytes: 20480 + 31 * (64 << 10), ..Setup::small() };
    assert_eq!(setup.geometry.segments_on(setup.cache_bytes), 31);
    assert_eq!(Geometry::KERNEL.segments_on(512 << 20), 31);
    let mut fixture = Fixture::new(setup);
    fixture.open();
    for round in 0..40_u64 {
        for writer in 0..64 {
            fixture.port.id = writer as usize;
            fixture.write((writer * 37 + round) * 4096, &[round as u8; 4096], false);
        }
    }
    for writer in 0..64_u64 {
        assert_eq!(fixture.read((writer * 37 + 39) * 4096, 4096), [39; 4096]);
    }
}

#[test]
fn clean_keys_fill_gaps_and_are_not_written_back() {
    let mut built = Builder::new(24);
    let dirty = built.key(4096, 5, 0, &[1; 4096], 0);
    let clean = built.key(0, 5, 8192, &[2; 16384], CLEAN);
    built.append(&[dirty, clean], 1);
    let mut fixture = Fixture::of_image(&built.finish(), "C B 0");
    fixture.open();
    let found: Vec<u8> = fixture.read(0, 16384).chunks(4096).map(|block| block[0]).collect();
    assert_eq!(found, [2, 1, 2, 2]);
    fixture.drain();
    let found: Vec<u8> = fixture.disk.image()[..16384].chunks(4096).map(|block| block[0]).collect();
    assert_eq!(found, [0xEE, 1, 0xEE, 0xEE], "CLEAN data stays where it is");
}
