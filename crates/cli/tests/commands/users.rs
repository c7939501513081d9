//! Files and devices that another program uses are refused, by name: QEMU, loop devices, mounts,
//! swap, and udm by another path. And these programs refuse what udm uses.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::common::{Loop, Udm, text, wait_until};

const MIB: u64 = 1 << 20;

/// Tables that use the file `a`, each in another way.
fn tables(udm: &Udm, used: &Path) -> Vec<String> {
    let (origin, fast) = (udm.file("origin", 16 * MIB), udm.file("fast", 512 * MIB));
    let meta = udm.file("meta", 8 * MIB);
    let [used, origin, fast, meta] = [used, &origin, &fast, &meta].map(text);
    vec![
        format!("0 32768 linear {used} 0"),
        format!("0 32768 pcache {fast} {used} 0"),
        format!("0 32768 pcache {used} {origin} 0"),
        format!("0 32768 writecache s {used} {fast} 4096 0"),
        format!("0 32768 writecache s {origin} {used} 4096 0"),
        format!("0 32768 writecache p {origin} {used} 4096 0"),
        format!("0 32768 cache {meta} {fast} {used} 128 1 writeback smq 0"),
        format!("0 32768 cache {meta} {used} {origin} 128 1 writeback smq 0"),
        format!("0 32768 cache {used} {fast} {origin} 128 1 writeback smq 0"),
    ]
}

fn is_refused_for(udm: &Udm, table: &str, who: &str) {
    let line = udm.refused(&["create", "v", "--table", table]);
    assert!(line.contains(" is in use by ") && line.contains(who), "{table}: {line}");
}

/// QEMU's program with `file` open, until it is dropped.
struct Qemu(Child);

impl Qemu {
    fn open(file: &Path) -> Qemu {
        let mut child = Command::new("qemu-io")
            .args(["-f", "raw", text(file)])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("qemu-io; the tests need it installed");
        let inode = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
        let locks = || std::fs::read_to_string("/proc/locks").unwrap();
        let has_locked =
            |line: &str| line.contains("OFDLCK") && line.contains(&format!(":{inode} "));
        wait_until("QEMU has its locks", || {
            assert!(child.try_wait().unwrap().is_none(), "QEMU has ended");
            locks().lines().any(has_locked)
        });
        Qemu(child)
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What QEMU says of a file that it cannot open, or an empty text.
fn refusal_of_qemu(file: &Path) -> String {
    let words = ["-f", "raw", "-c", "read 0 512", text(file)];
    let done = Command::new("qemu-io").args(words).output().unwrap();
    String::from_utf8_lossy(&done.stderr).into_owned()
}

#[test]
fn a_disk_of_a_guest_is_refused_and_qemu_refuses_a_disk_of_udm() {
    let udm = Udm::new();
    let used = udm.file("used", 512 * MIB);
    let qemu = Qemu::open(&used);
    let tables = tables(&udm, &used);
    for table in &tables {
        is_refused_for(&udm, table, "QEMU");
    }
    drop(qemu);
    for table in tables {
        udm.ok(&["create", "v", "--table", &table, "--force-format"]);
        let said = refusal_of_qemu(&used);
        assert!(said.contains("lock"), "{table}: {said:?}");
        udm.ok(&["remove", "v", "--drain", "--force"]);
        assert_eq!(refusal_of_qemu(&used), "", "{table}");
        udm.file("used", 512 * MIB);
        udm.file("fast", 512 * MIB);
        udm.file("meta", 8 * MIB);
    }
}

#[test]
fn a_device_of_a_guest_is_refused_with_its_partitions() {
    let udm = Udm::new();
    let used = udm.file("used", 64 * MIB);
    // A partition of 32 MiB that begins after the first MiB.
    let mut sector = [0; 512];
    sector[450] = 0x83;
    sector[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    sector[458..462].copy_from_slice(&65536_u32.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xAA]);
    let file = std::fs::File::options().write(true).open(&used).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &sector, 0).unwrap();
    let Some(device) = Loop::attach(&used, &["--partscan"]) else { return };
    let part = std::path::PathBuf::from(format!("{}p1", text(&device.0)));
    if !part.exists() {
        return eprintln!("SKIPPED: {} is not made here", part.display());
    }
    let table = |path: &Path| format!("0 32768 linear {} 0", text(path));
    for of_guest in [&device.0, &part] {
        let _qemu = Qemu::open(of_guest);
        for path in [&device.0, &part] {
            is_refused_for(&udm, &table(path), "QEMU");
        }
    }
    udm.ok(&["create", "v", "--table", &table(&part)]);
    assert!(refusal_of_qemu(&part).contains("lock"));
    udm.ok(&["remove", "v"]);
}

#[test]
fn readers_share_a_disk_with_readers() {
    let udm = Udm::new();
    let used = udm.file("used", 16 * MIB);
    let table = format!("0 32768 linear {}?readonly 0", text(&used));
    udm.ok(&["create", "v", "--table", &table]);
    udm.ok(&["create", "w", "--table", &table]);
    let words = ["-f", "raw", "-r", "-c", "read 0 512", text(&used)];
    let done = Command::new("qemu-io").args(words).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&done.stderr), "");
    assert!(refusal_of_qemu(&used).contains("lock"), "it would write");
}

#[test]
fn a_file_below_a_loop_device_is_refused_and_the_other_way_round() {
    let udm = Udm::new();
    let used = udm.file("used", 512 * MIB);
    let Some(device) = Loop::attach(&used, &[]) else { return };
    for table in tables(&udm, &used) {
        is_refused_for(&udm, &table, &format!("{} (`losetup --detach", text(&device.0)));
    }
    let (reads, table) = (
        format!("0 32768 linear {}?readonly 0", text(&used)),
        format!("0 32768 linear {} 0", text(&used)),
    );
    is_refused_for(&udm, &reads, text(&device.0));
    drop(device);
    let Some(device) = Loop::attach(&used, &["--read-only"]) else { return };
    is_refused_for(&udm, &table, text(&device.0));
    udm.ok(&["create", "v", "--table", &reads]);
    udm.ok(&["remove", "v"]);
    drop(device);
    udm.ok(&["create", "first", "--table", &table]);
    let Some(device) = Loop::attach(&used, &[]) else { return };
    for table in tables(&udm, &device.0) {
        let who = format!("which has its file {}", text(&used));
        is_refused_for(&udm, &table, &who);
        is_refused_for(&udm, &table, &format!("process {}", udm.pid("first")));
    }
    udm.ok(&["remove", "first"]);
    udm.ok(&["create", "v", "--table", &format!("0 32768 linear {} 0", text(&device.0))]);
    udm.ok(&["remove", "v"]);
}

#[test]
fn loop_devices_of_one_file_share_no_byte() {
    let udm = Udm::new();
    let used = udm.file("used", 32 * MIB);
    let at = |offset: u64| {
        ["--offset", &(offset * MIB).to_string(), "--sizelimit", "16777216"].map(str::to_owned)
    };
    let attach = |offset: u64| {
        let words = at(offset);
        Loop::attach(&used, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (Some(front), Some(middle), Some(back)) = (attach(0), attach(8), attach(16)) else {
        return;
    };
    let table = |device: &Loop| format!("0 32768 linear {} 0", text(&device.0));
    udm.ok(&["create", "first", "--table", &table(&front)]);
    is_refused_for(&udm, &table(&middle), &format!("the user of {}", text(&front.0)));
    udm.ok(&["create", "last", "--table", &table(&back)]);
    udm.ok(&["remove", "first"]);
    is_refused_for(&udm, &table(&middle), &format!("the user of {}", text(&back.0)));
    udm.ok(&["remove", "last"]);
    udm.ok(&["create", "v", "--table", &table(&middle)]);
    udm.ok(&["remove", "v"]);
}

/// The loop device `above` has all of the block device `below`.
#[test]
fn a_device_below_a_loop_device_is_refused_and_the_other_way_round() {
    let udm = Udm::new();
    let used = udm.file("used", 512 * MIB);
    let Some(below) = Loop::attach(&used, &[]) else { return };
    let Some(above) = Loop::attach(&below.0, &[]) else { return };
    for table in tables(&udm, &below.0) {
        is_refused_for(&udm, &table, &format!("{} (`losetup --detach", text(&above.0)));
    }
    let line = |device: &Loop, words: &str| format!("0 32768 linear {}{words} 0", text(&device.0));
    is_refused_for(&udm, &line(&below, "?readonly"), text(&above.0));
    drop(above);
    udm.ok(&["create", "first", "--table", &line(&below, "")]);
    let Some(above) = Loop::attach(&below.0, &[]) else { return };
    for table in tables(&udm, &above.0) {
        is_refused_for(&udm, &table, &format!("which has its file {}", text(&below.0)));
    }
    is_refused_for(&udm, &line(&above, "?readonly"), text(&below.0));
    udm.ok(&["remove", "first"]);
    udm.ok(&["create", "v", "--table", &line(&above, "")]);
    udm.ok(&["remove", "v"]);
}

#[test]
fn a_loop_device_whose_file_has_another_name_or_none_is_refused() {
    let udm = Udm::new();
    let used = udm.file("used", 32 * MIB);
    udm.ok(&["create", "first", "--table", &format!("0 32768 linear {} 0", text(&used))]);
    let Some(device) = Loop::attach(&used, &[]) else { return };
    let table = format!("0 32768 linear {} 0", text(&device.0));
    let moved = udm.path("moved");
    std::fs::rename(&used, &moved).unwrap();
    let who = format!("process {}", udm.pid("first"));
    is_refused_for(&udm, &table, &who);
    std::fs::remove_file(&moved).unwrap();
    is_refused_for(&udm, &table, &who);
}

#[test]
fn a_loop_device_is_seen_whatever_the_name_of_its_file() {
    use std::os::unix::ffi::OsStrExt;
    let udm = Udm::new();
    let used = udm.file("used", 32 * MIB);
    let odd = udm.path(".").join(std::ffi::OsStr::from_bytes(b"a\xff"));
    std::fs::hard_link(&used, &odd).unwrap();
    let attached = Command::new("losetup").args(["--find", "--show"]).arg(&odd).output().unwrap();
    if !attached.status.success() {
        return eprintln!("SKIPPED: no loop device: {attached:?}");
    }
    let device = Loop(String::from_utf8(attached.stdout).unwrap().trim().into());
    let table = format!("0 32768 linear {} 0", text(&used));
    is_refused_for(&udm, &table, &format!("{} (`losetup --detach", text(&device.0)));
}

#[test]
fn a_device_that_is_swapped_to_is_refused() {
    let udm = Udm::new();
    let used = udm.file("used", 32 * MIB);
    std::fs::write(&used, vec![0; 32 << 20]).unwrap();
    crate::common::client("mkswap", &[text(&used)]);
    let swap = |program: &str, path: &Path| {
        Command::new(program).arg(path).output().is_ok_and(|done| done.status.success())
    };
    if !swap("swapon", &used) {
        return eprintln!("SKIPPED: cannot swap to a file here");
    }
    let lines: Vec<String> = tables(&udm, &used)
        .iter()
        .map(|table| udm.refused(&["create", "v", "--table", table]))
        .collect();
    assert!(swap("swapoff", &used));
    assert!(lines.iter().all(|line| line.contains("which swaps to it")), "{lines:#?}");
}

#[test]
fn a_reader_shares_a_device_with_a_mount_that_only_reads() {
    let udm = Udm::new();
    let image = udm.file("image", 16 * MIB);
    crate::common::client("mke2fs", &["-q", "-F", text(&image)]);
    let Some(device) = Loop::attach(&image, &[]) else { return };
    let place = udm.path("place");
    std::fs::create_dir(&place).unwrap();
    let table = format!("0 32768 linear {}?readonly 0", text(&device.0));
    let mount = |mode: &str| {
        let words = ["-o", mode, text(&device.0), text(&place)];
        Command::new("mount").args(words).output().is_ok_and(|done| done.status.success())
    };
    if !mount("rw") {
        return eprintln!("SKIPPED: cannot mount");
    }
    let refused = udm.refused(&["create", "v", "--table", &table]);
    crate::common::client("umount", &[text(&place)]);
    assert!(refused.contains(&format!("the mount on {}", text(&place))), "{refused}");
    assert!(mount("ro"));
    let created = udm.run(&["create", "v", "--table", &table]);
    let removed = udm.run(&["remove", "v"]);
    let other = Loop::attach(&image, &[]);
    let writes = other.as_ref().map(|other| {
        udm.run(&["create", "w", "--table", &format!("0 32768 linear {} 0", text(&other.0))])
    });
    crate::common::client("umount", &[text(&place)]);
    assert_eq!((created.code, removed.code), (0, 0), "{created:?} {removed:?}");
    let who = format!("the user of {}", text(&device.0));
    assert!(writes.is_some_and(|writes| writes.err.contains(&who)));
}

#[test]
fn a_mounted_device_is_refused_with_its_mount_point() {
    let udm = Udm::new();
    let image = udm.file("image", 16 * MIB);
    crate::common::client("mke2fs", &["-q", "-F", text(&image)]);
    let Some(device) = Loop::attach(&image, &[]) else { return };
    let place = udm.path("a place");
    std::fs::create_dir(&place).unwrap();
    let mount = Command::new("mount").args([text(&device.0), text(&place)]).output().unwrap();
    if !mount.status.success() {
        return eprintln!("SKIPPED: cannot mount: {mount:?}");
    }
    let refused: Vec<String> = tables(&udm, &device.0)
        .iter()
        .map(|table| udm.refused(&["create", "v", "--table", table]))
        .collect();
    crate::common::client("umount", &[text(&place)]);
    let who = format!("is in use by the mount on {}", text(&place));
    assert!(refused.iter().all(|line| line.contains(&who)), "{refused:#?}");
}

#[test]
fn every_path_to_a_file_in_use_is_refused_with_the_process() {
    let udm = Udm::new();
    let used = udm.file("used", 512 * MIB);
    udm.ok(&["create", "first", "--table", &format!("0 32768 linear {} 0", text(&used))]);
    let (link, hard) = (udm.path("link"), udm.path("hard"));
    symlink(&used, &link).unwrap();
    std::fs::hard_link(&used, &hard).unwrap();
    let who = format!("process {} (", udm.pid("first"));
    for path in [&used, &link, &hard] {
        for table in tables(&udm, path) {
            is_refused_for(&udm, &table, &who);
        }
    }
    udm.ok(&["remove", "first"]);
}
