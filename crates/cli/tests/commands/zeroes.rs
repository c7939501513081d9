//! Clients learn about zeroes: which ranges are zero without a read, and whether writing
//! zeroes is fast.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::common::{
    Loop, PATIENCE, Udm, client, for_clients, pattern, read_export, text, write_export,
};

const MIB: u64 = 1 << 20;
const FAST_ZERO: u16 = 1 << 4;
const ENOTSUP: u32 = 95;

/// The lines of `nbdinfo --map`: offset, length, flags.
fn map(uri: &str) -> Vec<(u64, u64, u32)> {
    let text = client("nbdinfo", &["--map", &for_clients(uri)]);
    let line = |line: &str| {
        let mut words = line.split_whitespace().map(|word| word.parse::<u64>().ok());
        let mut next = || words.next().flatten().unwrap();
        (next(), next(), next() as u32)
    };
    text.lines().map(line).collect()
}

/// The error of a write of zeroes that must be fast or not be at all.
fn fast_zero(udm: &Udm, offset: u64, len: u32) -> u32 {
    let mut stream = UnixStream::connect(udm.path("vol.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&crate::nbd::usual_handshake(false)).unwrap();
    stream.read_exact(&mut [0; crate::nbd::USUAL_ANSWER_BYTES]).unwrap();
    let mut client = crate::nbd::Client { stream };
    client.send(&crate::nbd::request(FAST_ZERO, 6, 1, offset, len));
    client.reply(0).error
}

#[test]
fn the_zero_target_is_a_hole_and_a_file_is_data() {
    let udm = Udm::new();
    let file = udm.path("file.img");
    std::fs::write(&file, pattern(30, 2 * MIB as usize)).unwrap();
    let uri = udm.uri("vol.sock");
    let table =
        format!("0 2048 linear {0} 0\n2048 8192 zero\n10240 2048 linear {0} 2048", text(&file));
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    assert_eq!(map(&uri), [(0, MIB, 0), (MIB, 4 * MIB, 3), (5 * MIB, MIB, 0)]);
    assert_eq!(fast_zero(&udm, 2 * MIB, 4096), ENOTSUP, "not everywhere");
    udm.ok(&["load", "vol", "--table", "0 12288 zero"]);
    udm.ok(&["resume", "vol"]);
    assert_eq!(map(&uri), [(0, 6 * MIB, 3)]);
    assert_eq!(fast_zero(&udm, 2 * MIB, 4096), 0);
}

#[test]
fn a_cache_tells_what_was_discarded_and_zeroed() {
    let udm = Udm::new();
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let cache = tempfile::NamedTempFile::new_in(folder).unwrap();
    cache.as_file().set_len(512 * MIB).unwrap();
    // Without holes of its own, which are reported as well.
    let origin = udm.path("origin.img");
    std::fs::write(&origin, pattern(32, 64 * MIB as usize)).unwrap();
    let table = format!("0 131072 pcache {} {}", text(cache.path()), text(&origin));
    let uri = udm.uri("vol.sock");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    let mut data = pattern(31, 8 * MIB as usize);
    write_export(&udm, &uri, &data);
    assert_eq!(map(&uri), [(0, 64 * MIB, 0)]);

    let commands = ["-c", "discard 2M 3M", "-c", "write -z 6M 64k"];
    let target = ["-f", "raw", &for_clients(&uri)].map(str::to_owned);
    let words: Vec<&str> = commands.into_iter().chain(target.iter().map(String::as_str)).collect();
    client("qemu-io", &words);
    assert_eq!(fast_zero(&udm, 7 * MIB, 1 << 20), 0);
    data[2 << 20..5 << 20].fill(0);
    data[6 << 20..(6 << 20) + (64 << 10)].fill(0);
    data[7 << 20..8 << 20].fill(0);
    let zeroed = [
        (0, 2 * MIB, 0),
        (2 * MIB, 3 * MIB, 3),
        (5 * MIB, MIB, 0),
        (6 * MIB, 64 << 10, 3),
        (6 * MIB + (64 << 10), MIB - (64 << 10), 0),
        (7 * MIB, MIB, 3),
        (8 * MIB, 56 * MIB, 0),
    ];
    assert_eq!(map(&uri), zeroed);
    assert!(read_export(&udm, &uri)[..data.len()] == data[..]);

    // Rewritten ranges are data. The new server does not guess the dead server's other knowledge.
    let commands = ["-c", "write -P 7 3M 4k"];
    let words: Vec<&str> = commands.into_iter().chain(target.iter().map(String::as_str)).collect();
    client("qemu-io", &words);
    assert_eq!(
        map(&uri)[1..4],
        [(2 * MIB, MIB, 3), (3 * MIB, 4096, 0), (3 * MIB + 4096, 2 * MIB - 4096, 3)]
    );
    udm.kill_server("vol");
    udm.ok(&["create", "vol", "--table", &table, "--export", &uri]);
    assert_eq!(map(&uri), [(0, 64 * MIB, 0)]);
}

/// The memory of a server that is not of files, in bytes.
fn anonymous_bytes(udm: &Udm) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", udm.pid("vol"))).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// mkfs and fstrim discard the unused space of a file system. The cost depends on the cached data,
/// not on the length: unwritten ranges do not become dirty, not even the second time.
#[test]
fn discards_of_what_was_never_written_cost_nothing() {
    const GIB: u64 = 1 << 30;
    const ORIGIN: u64 = 512 * GIB;
    for target in ["pcache", "writecache", "cache"] {
        let udm = Udm::new();
        udm.file("origin.img", ORIGIN);
        udm.file("fast.img", 600 * MIB);
        let uri = udm.uri("vol.sock");
        let words = ["create", "vol", "--origin", "origin.img", "--fast", "fast.img"];
        udm.ok(&[&words[..], &["--target", target, "--export", &uri]].concat());
        let data = pattern(5, 4 * MIB as usize);
        let qemu_io = |commands: &[String]| {
            let mut words: Vec<&str> = commands.iter().flat_map(|line| ["-c", line]).collect();
            let uri = for_clients(&uri);
            words.extend(["-f", "raw", "-d", "unmap", &uri]);
            client("qemu-io", &words);
        };
        std::fs::write(udm.path("data"), &data).unwrap();
        qemu_io(&[format!("write -s {} 100G 4M", text(&udm.path("data")))]);
        udm.ok(&["drain", "vol"]);
        let before = anonymous_bytes(&udm);
        let all: Vec<String> = (0..512).map(|nth| format!("discard {nth}G 1G")).collect();
        let zeroes: Vec<String> = (200..300).map(|nth| format!("write -z -u {nth}G 1G")).collect();
        for commands in [&all, &zeroes, &all] {
            qemu_io(commands);
        }
        let more = anonymous_bytes(&udm).saturating_sub(before);
        assert!(more < 32 * MIB, "{target}: {more} bytes of memory");
        let dirty = udm.json(&["info", "vol"])["dirty_bytes"].as_u64().unwrap();
        assert!(dirty <= 4 * MIB, "{target}: {dirty} dirty bytes");
        qemu_io(&["read -P 0 100G 4M".into(), "read -P 0 511G 1M".into()]);
        udm.ok(&["drain", "vol"]);
        udm.ok(&["remove", "vol"]);
    }
}

/// A block device reports no holes, so each discarded MiB becomes a key of a `pcache`. Memory
/// must follow the number of keys, not the bytes.
#[test]
fn discards_on_a_block_device_cost_a_key_for_each_mib() {
    const GIB: u64 = 1 << 30;
    let udm = Udm::new();
    let Some(device) = Loop::attach(&udm.file("origin.img", 64 * GIB), &[]) else { return };
    udm.file("fast.img", 600 * MIB);
    let uri = udm.uri("vol.sock");
    let words = ["create", "vol", "--origin", text(&device.0), "--fast", "fast.img"];
    udm.ok(&[&words[..], &["--target", "pcache", "--export", &uri]].concat());
    let before = anonymous_bytes(&udm);
    // The second time with FUA.
    for command in ["discard", "write -z -u"] {
        let commands: Vec<String> = (0..64).map(|nth| format!("{command} {nth}G 1G")).collect();
        let mut words: Vec<&str> = commands.iter().flat_map(|line| ["-c", line]).collect();
        let uri = for_clients(&uri);
        words.extend(["-f", "raw", "-d", "unmap", &uri]);
        client("qemu-io", &words);
    }
    let more = anonymous_bytes(&udm).saturating_sub(before);
    assert!(more < 32 * MIB, "{more} bytes of memory");
    udm.ok(&["drain", "vol"]);
    udm.ok(&["remove", "vol"]);
}
