//! Every line of the table is found at its position, on memory and on disks, and no other signature
//! is found.

use super::*;
use crate::disk::RamDisk;
use crate::pmem::Persistence;
use crate::pmem::sim::SimPmem;
use crate::prng::Prng;

const SIZE: u64 = 8 << 20;

/// The findings on a device with these bytes at these places.
fn found_on(size: u64, places: &[(u64, &[u8])]) -> Vec<Finding> {
    let memory = SimPmem::new(size, Persistence::Cpu);
    let ram = Arc::new(RamDisk::new(size, 4096));
    let mut image = vec![0; size as usize];
    for (at, bytes) in places {
        memory.store(*at, bytes);
        image[*at as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    ram.load_image(&image);
    let ram: Arc<dyn Disk> = ram;
    let found = disk(&ram, 0);
    let load = |at: u64, into: &mut [u8]| memory.load(at, into).is_ok();
    assert_eq!(look(size, 0, None, &load), found);
    found
}

fn is_found(name: &str, at: u64, bytes: &[u8]) {
    let found = found_on(SIZE, &[(at, bytes)]);
    let is_it = |finding: &Finding| finding.name.contains(name) && finding.at == at;
    assert!(found.iter().any(is_it), "{name} at {at}: {found:?}");
}

#[test]
fn whole_lines_of_the_table_are_found() {
    for (name, at, bytes) in [
        ("ext4", 1080, &b"\x53\xEF"[..]),
        ("xfs", 0, b"XFSB"),
        ("btrfs", 65_600, b"_BHRfS_M"),
        ("LVM2_member", 512, b"LABELONE"),
        ("linux_raid_member (1.1)", 0, b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00"),
        ("linux_raid_member (1.2)", 4096, b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00"),
        ("linux_raid_member (1.0)", SIZE - 8192, b"\xFC\x4E\x2B\xA9\x01\x00\x00\x00"),
        ("linux_raid_member (0.90)", SIZE - 65_536, b"\xFC\x4E\x2B\xA9\x00\x00\x00\x00"),
        ("gpt", 512, b"EFI PART"),
        ("gpt", SIZE - 512, b"EFI PART"),
        ("swap", 4086, b"SWAPSPACE2"),
        ("crypto_LUKS", 0, b"LUKS\xBA\xBE"),
        ("bcache", 4120, b"\xC6\x85\x73\xF6\x4E\x1A\x45\xCA\x82\x65\xF5\x7F\x48\xBA\x6D\x81"),
        ("zfs_member", 131_072 + 4096, b"\x0C\xB1\xBA\x00\x00\x00\x00\x00"),
        ("zfs_member", SIZE - 131_072, b"\x00\x00\x00\x00\x00\xBA\xB1\x0C"),
        ("VDO", 0, b"dmvdo001"),
        ("ceph_bluestore", 0, b"bluestore block device\n"),
        ("drbd", SIZE - 4036, b"\x83\x74\x02\x6D"),
    ] {
        is_found(name, at, bytes);
    }
}

#[test]
fn what_is_nothing_is_not_taken_for_something() {
    assert_eq!(found_on(SIZE, &[]), []);
    let mut prng = Prng::new(3);
    let noise: Vec<u8> = (0..SIZE).map(|_| prng.below(256) as u8).collect();
    assert_eq!(found_on(SIZE, &[(0, &noise)]), []);
    // A boot sector that is not a partition table.
    assert_eq!(found_on(SIZE, &[(446, &[7; 64]), (510, b"\x55\xAA")]), []);
    for size in [512, 4096, 65_536, 200_000 / 512 * 512] {
        assert_eq!(found_on(size.max(4096), &[]), []);
    }
}

#[test]
fn a_partition_table_is_found_where_nothing_else_is() {
    let mut sector = [0; 66];
    sector[4] = 0x83;
    sector[64..].copy_from_slice(b"\x55\xAA");
    let found = found_on(SIZE, &[(446, &sector)]);
    assert_eq!(listed(&found), "dos partition table (byte 510)");
    // The partition table in front of a GPT is not reported.
    let found = found_on(SIZE, &[(446, &sector), (512, b"EFI PART")]);
    assert_eq!(listed(&found), "gpt (byte 512)");
}

#[test]
fn what_lies_before_the_start_does_not_count() {
    let memory = SimPmem::new(SIZE, Persistence::Cpu);
    memory.store(512, b"EFI PART");
    memory.store(SIZE - 512, b"EFI PART");
    assert_eq!(listed(&pmem(&memory, 4096)), "gpt (the copy at the end) (byte 8388096)");
}

#[test]
fn objections_say_what_they_see() {
    let finding = |name: &str, is_cache| Finding { name: name.into(), at: 0, is_cache };
    let names = ("/dev/slow", "pcache CACHE BACKING");
    let said = |found: &[Finding], is_blank, origin: &[Finding]| {
        objection(found, is_blank, origin, names).unwrap_or_default()
    };
    let (ext4, cache) = ([finding("ext4", false)], [finding("pcache", true)]);
    assert_eq!(said(&[], true, &ext4), "");
    assert_eq!(said(&[], true, &[]), "");
    assert!(said(&[], false, &ext4).starts_with("it is not empty"));
    assert!(said(&ext4, true, &ext4).ends_with("--force-format overwrites it"));
    assert!(
        said(&ext4, false, &[])
            .contains("the two devices may be swapped (the order is pcache CACHE")
    );
    assert!(
        said(&ext4, false, &cache).contains("/dev/slow holds pcache (byte 0): the two devices")
    );
    assert!(said(&[], true, &cache).contains("it is empty, and /dev/slow holds pcache"));
}

#[test]
fn the_systems_library_is_asked_where_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("swap");
    let mut image = vec![0; 1 << 20];
    image[4086..4096].copy_from_slice(b"SWAPSPACE2");
    image[1024..1036].copy_from_slice(&[1, 0, 0, 0, 255, 0, 0, 0, 0, 0, 0, 0]);
    std::fs::write(&path, &image).unwrap();
    match blkid::look(path.to_str().unwrap(), 0, 1 << 20) {
        None => eprintln!("SKIPPED: no libblkid"),
        Some(found) => assert_eq!(listed(&found), "swap (byte 4086)"),
    }
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    assert!(blkid::look(path.to_str().unwrap(), 0, 1 << 20).is_none_or(|found| found.is_empty()));
    assert!(blkid::look("/does/not/exist", 0, 512).is_none());
    // In a part of a device, places count from the part's start, and bytes outside of the part are
    // not read.
    std::fs::write(&path, [vec![0; 4096], image, vec![0; 4096]].concat()).unwrap();
    let at = |start, len| blkid::look(path.to_str().unwrap(), start, len);
    assert!(at(4096, 1 << 20).is_none_or(|found| listed(&found) == "swap (byte 4086)"));
    assert!(at(0, 4096).is_none_or(|found| found.is_empty()));
    assert!(at(8192, 1 << 19).is_none_or(|found| found.is_empty()));
}

#[test]
fn a_cache_in_the_middle_is_found_before_a_format() {
    let magic = b"\x21\x93\x48\x23\x01\x00\x00\x00";
    let found = found_on(SIZE, &[(3 << 20, magic)]);
    assert!(found.is_empty(), "{found:?}");
    let memory = SimPmem::new(SIZE, Persistence::Cpu);
    memory.store(3 << 20, magic);
    assert_eq!(listed(&pmem(&memory, 0)), "writecache (byte 3145728)");
    assert_eq!(listed(&pmem(&memory, 3 << 20)), "writecache (byte 3145728)");
    assert!(pmem(&memory, 4 << 20).is_empty());
    let ram = Arc::new(RamDisk::new(SIZE, 4096));
    let mut image = vec![0; SIZE as usize];
    image[(5 << 20) + 4104..][..8].copy_from_slice(b"\xEF\x96\xC5\x96\xFA\x5E\xB0\x65");
    ram.load_image(&image);
    let ram: Arc<dyn Disk> = ram;
    assert_eq!(listed(&cache_disk(&ram, 0)), "pcache (byte 5242880)");
    // The probe of an origin does not search for such data.
    assert!(disk(&ram, 0).is_empty());
}
