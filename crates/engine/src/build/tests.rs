//! Tests of this folder.

use super::*;
use crate::device::Device;
use crate::disk::RamDisk;
use crate::local::{Local, SystemClock};
use crate::pmem::Persistence;
use crate::pmem::sim::SimPmem;
use crate::table::pointer;
use crate::units::{KIB, MIB, SECTOR};

fn devices() -> NamedDevices {
    let mut devices = NamedDevices::new();
    for name in ["/a", "/b"] {
        devices.add_disk(name, Arc::new(RamDisk::new(MIB, 512).named(name)));
    }
    devices
}

fn build_in(devices: &NamedDevices, text: &str) -> Result<LoadedTable> {
    build(&Table::parse(text).unwrap(), devices, &BuildOptions::named(1))
}

/// The error of a wrong table, drawn.
fn drawing(text: &str) -> String {
    let error = build_in(&devices(), text).unwrap_err();
    let drawn = pointer(text, &error).unwrap();
    let (line, carets) = drawn.split_once('\n').unwrap();
    let marks = line.chars().zip(carets.chars()).filter(|(_, caret)| *caret == '^');
    let marked: String = marks.map(|(c, _)| c).collect();
    format!("{error} [{marked}]")
}

#[test]
fn a_table_of_all_small_targets_works() {
    let text = "0 512 linear /a 8\n\
                512 8 zero\n\
                520 8 error /b 0\n\
                528 1024 delay /a 1024 0 /b 0 0\n\
                1552 16 flakey /b 1024 10 0 1 error_writes\n";
    let table = build_in(&devices(), text).unwrap();
    let device = Device::with_table("mix", table).unwrap();
    assert_eq!(
        device.table(),
        [
            "0 512 linear /a 8",
            "512 8 zero ",
            "520 8 error ",
            "528 1024 delay /a 1024 0 /b 0 0",
            "1552 16 flakey /b 1024 10 0 1 error_writes",
        ]
    );
    assert_eq!(device.status()[3], "528 1024 delay 0 0 0");
    assert_eq!(device.size_bytes(), 1568 * SECTOR);
    let mut local = Local::without_kernel(&device).unwrap();
    let mut bytes = vec![1; 260 * KIB as usize];
    local.read_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|b| *b == 0));
    // Writes of the delay line go to another disk than its reads.
    local.write_at(&[5; 512], 528 * SECTOR, true).unwrap();
    local.read_at(&mut bytes[..512], 528 * SECTOR).unwrap();
    assert_eq!(bytes[0], 0);
    assert_eq!(local.read_at(&mut bytes[..1024], 519 * SECTOR), Err(crate::error::Status::Io));
    local.flush().unwrap();
}

#[test]
fn errors_point_at_the_bad_word() {
    let cases = [
        (
            "0 8 linaer /a 0",
            "table line 1, column 5: `linaer`: unknown target type; there are cache, delay, error, \
             flakey, linear, pcache, writecache, zero [linaer]",
        ),
        (
            "0 8 linear",
            "table line 1, column 11: Invalid argument count: linear <device> <offset> []",
        ),
        (
            "0 8 linear /a 0 1",
            "table line 1, column 17: `1`: Invalid argument count: linear <device> \
             <offset> [1]",
        ),
        (
            "0 8 linear /c 0",
            "table line 1, column 12: Device lookup failed: /c: no such device [/c]",
        ),
        (
            "0 8 linear /a -1",
            "table line 1, column 15: `-1`: Invalid device sector: it is a plain decimal \
             number [-1]",
        ),
        (
            "0 4096 linear /a 0",
            "table line 1, column 15: `/a`: /a too small for target: start=0, len=4096, \
             dev_size=2048 (sectors) [/a]",
        ),
        (
            "0 8 linear /a 2041",
            "table line 1, column 15: `2041`: /a too small for target: start=2041, len=8, \
             dev_size=2048 (sectors) [2041]",
        ),
        ("0 8 zero 1", "table line 1, column 10: `1`: No arguments required [1]"),
        (
            "0 8 linear /a?persist=cpu 0",
            "table line 1, column 12: `/a?persist=cpu`: persist is for cache devices; a slow \
             device takes io [/a?persist=cpu]",
        ),
        (
            "0 8 zero\n8 8 pcache /c /a",
            "table line 2, column 5: `pcache`: must be the only target of its table [pcache]",
        ),
        (
            "0 8 pcache /p /a 2 data_crc maybe",
            "table line 1, column 29: pcache: invalid option for data_crc: 'maybe' [maybe]",
        ),
        ("0 8 pcache /p", "table line 1, column 14: pcache: backing device is missing []"),
        ("0 8 pcache", "table line 1, column 11: pcache: cache device is missing []"),
    ];
    for (text, expected) in cases {
        assert_eq!(drawing(text), expected);
    }
}

#[test]
fn a_device_named_twice_is_opened_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slow");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let path = path.to_str().unwrap();
    let text = format!("0 8 linear {path} 0\n8 8 linear {path} 512\n16 8 zero");
    // An opener is of one mapped device, whose tables share.
    let (own, other) = (SystemOpener::without_memory(), SystemOpener::without_memory());
    let build =
        |opener: &SystemOpener| build(&Table::parse(&text)?, opener, &BuildOptions::named(1));
    let (table, second) = (build(&own).unwrap(), build(&own).unwrap());
    drop(table);
    let busy = build(&other).unwrap_err();
    assert_eq!((busy.kind(), busy.place().unwrap().column), (Kind::Busy, 12));
    drop(second);
    build(&other).unwrap();
}

#[test]
fn a_pcache_is_built_and_serves() {
    let mut devices = devices();
    let cache = SimPmem::new(576 * MIB, Persistence::Cpu);
    devices.add_pmem("/p", Arc::new(cache));
    devices.add_disk("/slow", Arc::new(RamDisk::new(64 * MIB, 512).named("/slow")));
    let table = build_in(&devices, "0 131072 pcache /p /slow 2 data_crc false").unwrap();
    let device = Device::with_table("fast", table).unwrap();
    assert_eq!(device.status(), ["0 131072 pcache 0 35 35 1 70 1182 0:0 0:0 0:0"]);
    let again = Table::parse("0 131072 pcache /p /slow").unwrap();
    assert_eq!(device.check_load(&again).unwrap_err().kind(), Kind::Unsupported);
    let mut local = Local::without_kernel(&device).unwrap();
    local.write_at(&[9; 4096], 4096, true).unwrap();
    let mut bytes = [0; 8192];
    local.read_at(&mut bytes, 4096).unwrap();
    assert_eq!((bytes[0], bytes[4095], bytes[4096]), (9, 9, 0));
    assert_eq!(device.message(0, &["gc_percent".into(), "50".into()]).unwrap(), "");
    assert!(device.message(131_072, &["gc_percent".into(), "50".into()]).is_err());
    local.suspend().unwrap();
    drop(local);
    device.remove().unwrap();
}

#[test]
fn a_wipe_says_how_far_it_is() {
    let mut devices = NamedDevices::new();
    for (name, bytes) in [("/meta", 2 * MIB), ("/fast", 8 * MIB), ("/slow", 16 * MIB)] {
        devices.add_disk(name, Arc::new(RamDisk::new(bytes, 512).named(name)));
    }
    let sim = |bytes| SimPmem::new(bytes, Persistence::Cpu);
    devices.add_pmem("/p", Arc::new(sim(512 * MIB)));
    devices.add_pmem("/wc", Arc::new(sim(8 * MIB)));
    for (text, least) in [
        // All of the metadata, and both ends of the blocks.
        ("0 32768 cache /meta /fast /slow 64 1 metadata2 smq 0", 4 * MIB),
        // An entry of 16 bytes for each block.
        ("0 32768 writecache p /slow /wc 4096 0", 8 * MIB / 4112 * 16),
        ("0 32768 pcache /p /slow", 31 * 4096),
    ] {
        let device = Device::with_table("vol", build_in(&devices, text).unwrap()).unwrap();
        let mut local = Local::without_kernel(&device).unwrap().with_background(SystemClock);
        local.suspend().unwrap();
        drop(local);
        device.remove().unwrap();
        drop(device);
        let progress = Arc::<AttachProgress>::default();
        wipe(&Table::parse(text).unwrap(), &devices, &progress).unwrap();
        let step = progress.look().unwrap();
        assert_eq!((step.what, Some(step.done)), ("bytes", step.total), "{text}");
        assert!(step.done >= least, "{text}: {step:?}");
        assert_eq!(progress.left(), Some(0));
    }
}

#[test]
fn servers_before_named_shared_memory_after_the_cache() {
    let name = |path| old_shared_name("pcache", path);
    assert_eq!(name("/dev/null"), name("/dev/../dev/null"));
    assert_ne!(name("/a/x"), name("/b/x"));
    assert!(name("/a/x y").starts_with("pcache-x-y-"));
}
