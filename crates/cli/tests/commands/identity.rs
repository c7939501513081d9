//! Who a disk is: a dirty cache is written back to its own disk, wherever that was moved, and to no
//! other one. A table of kinds of disks and acts on them, for each target, with `create` and
//! `recover`.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{
    Loop, Udm, client, for_clients, pattern, read_export, text, wait_until, write_export,
};

const MIB: u64 = 1 << 20;
const ORIGIN_BYTES: u64 = 16 * MIB;
const TARGETS: [&str; 3] = ["cache", "pcache", "writecache"];
const DIRTY_BYTES: usize = 64 << 10;

/// An act on the disk, between two attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Nothing,
    /// It, or the file behind it, gets another path.
    Moved,
    /// The device below gets another number.
    Renumbered,
    /// Its file system is mounted again.
    Remounted,
    /// Another one with the same content is given.
    Copied,
    /// Another one is at its place.
    Replaced,
    /// Another part of it is given.
    PartOf,
}
use Act::{Copied, Moved, Nothing, PartOf, Remounted, Renumbered, Replaced};

/// A kind of disk, and what this machine needs for it.
trait Kind {
    /// Makes the disk; `None` if this machine cannot.
    fn make(udm: &Udm) -> Option<Self>
    where
        Self: Sized;
    /// Acts, and returns the disk's name afterwards.
    fn act(&mut self, udm: &Udm, act: Act) -> String;
    /// Undoes the act.
    fn undo(&mut self, udm: &Udm, act: Act);
}

/// Runs a program that may be missing or forbidden.
fn try_run(program: &str, words: &[&str]) -> Option<()> {
    match Command::new(program).args(words).output() {
        Ok(output) if output.status.success() => Some(()),
        other => {
            eprintln!("SKIPPED: {program} {words:?}: {other:?}");
            None
        }
    }
}

fn rename(udm: &Udm, from: &str, to: &str) {
    std::fs::rename(udm.path(from), udm.path(to)).unwrap();
}

/// A file of the origin's length with data of its own.
fn other_file(path: &Path, bytes: u64) {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(bytes).unwrap();
    file.write_all_at(&pattern(9, 4096), 8192).unwrap();
}

/// A mount, which ends with the test.
struct Mount(PathBuf);

impl Mount {
    fn make(udm: &Udm, words: &[&str]) -> Option<Mount> {
        Mount::at(&udm.path("m"), words)
    }

    fn at(place: &Path, words: &[&str]) -> Option<Mount> {
        std::fs::create_dir_all(place).unwrap();
        try_run("mount", &[words, &[text(place)]].concat())?;
        Some(Mount(place.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let is_unmounted = Command::new("umount").arg(&self.0).status();
        assert!(is_unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

/// A file in a folder, by the acts that are the same on all file systems. A rename would count as
/// a change of the file, so the folder gets another path.
struct InFolder {
    folder: &'static str,
    elsewhere: Option<Mount>,
}

impl InFolder {
    fn new(folder: &'static str) -> InFolder {
        InFolder { folder, elsewhere: None }
    }

    fn path(&self, udm: &Udm, name: &str) -> PathBuf {
        udm.path(self.folder).join(name)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        let path = |name: &str| format!("{}/{name}", self.folder);
        match act {
            Nothing | Remounted | Renumbered => path("o"),
            Moved => {
                let folder = udm.path(self.folder);
                self.elsewhere = Mount::at(&udm.path("elsewhere"), &["--bind", text(&folder)]);
                "elsewhere/o".into()
            }
            Copied => {
                std::fs::copy(self.path(udm, "o"), self.path(udm, "copy")).unwrap();
                path("copy")
            }
            Replaced => {
                std::fs::rename(self.path(udm, "o"), self.path(udm, "aside")).unwrap();
                other_file(&self.path(udm, "o"), ORIGIN_BYTES);
                path("o")
            }
            PartOf => format!("{}?offset={}", path("o"), ORIGIN_BYTES / 2),
        }
    }

    fn undo(&mut self) {
        self.elsewhere = None;
    }
}

/// A file where the test has its folder.
struct Plain(InFolder);

impl Kind for Plain {
    fn make(udm: &Udm) -> Option<Plain> {
        std::fs::create_dir(udm.path("m")).unwrap();
        udm.file("m/o", ORIGIN_BYTES);
        Some(Plain(InFolder::new("m")))
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.act(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.undo();
    }
}

/// A file on a file system without a disk.
struct Memory(InFolder, #[allow(dead_code)] Mount);

impl Kind for Memory {
    fn make(udm: &Udm) -> Option<Memory> {
        let mount = Mount::make(udm, &["-t", "tmpfs", "-o", "size=256m", "none"])?;
        udm.file("m/o", ORIGIN_BYTES);
        Some(Memory(InFolder::new("m"), mount))
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.act(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.undo();
    }
}

/// A file on an overlay of two folders.
struct Overlay(InFolder, Option<Mount>);

impl Overlay {
    fn mount(udm: &Udm) -> Option<Mount> {
        let place = |name: &str| udm.path(&format!("under/{name}"));
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            text(&place("lower")),
            text(&place("upper")),
            text(&place("work"))
        );
        Mount::make(udm, &["-t", "overlay", "-o", &layers, "overlay"])
    }
}

impl Kind for Overlay {
    fn make(udm: &Udm) -> Option<Overlay> {
        ["lower", "upper", "work"].iter().for_each(|name| {
            std::fs::create_dir_all(udm.path(&format!("under/{name}"))).unwrap();
        });
        let mount = Overlay::mount(udm)?;
        udm.file("m/o", ORIGIN_BYTES);
        Some(Overlay(InFolder::new("m"), Some(mount)))
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        if act == Remounted {
            self.1 = None;
            self.1 = Overlay::mount(udm);
        }
        self.0.act(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.undo();
    }
}

/// A file on a file system on a disk.
struct OnDisk {
    file: InFolder,
    mount: Option<Mount>,
    device: Option<Loop>,
    /// A device that has the number meanwhile.
    dummy: Option<Loop>,
}

impl OnDisk {
    fn with(udm: &Udm, mkfs: &str, words: &[&str]) -> Option<OnDisk> {
        let disk = udm.file("disk", 320 * MIB);
        udm.file("dummy", MIB);
        try_run(mkfs, &[words, &[text(&disk)]].concat())?;
        let mut made = OnDisk { file: InFolder::new("m"), mount: None, device: None, dummy: None };
        made.mount(udm)?;
        udm.file("m/o", ORIGIN_BYTES);
        Some(made)
    }

    fn mount(&mut self, udm: &Udm) -> Option<()> {
        let device = Loop::attach(&udm.path("disk"), &[])?;
        self.mount = Some(Mount::make(udm, &[text(&device.0)])?);
        self.device = Some(device);
        Some(())
    }

    fn again(&mut self, udm: &Udm, act: Act) -> String {
        if matches!(act, Remounted | Renumbered) {
            self.mount = None;
            let was = self.device.take().map(|device| device.0.clone());
            if act == Renumbered {
                self.dummy = Loop::attach(&udm.path("dummy"), &[]);
            }
            self.mount(udm).unwrap();
            let is = self.device.as_ref().map(|device| device.0.clone());
            assert!(act == Remounted || is != was, "it has its old number");
        }
        self.file.act(udm, act)
    }
}

struct Ext4(OnDisk);

impl Kind for Ext4 {
    fn make(udm: &Udm) -> Option<Ext4> {
        OnDisk::with(udm, "mkfs.ext4", &["-q", "-F"]).map(Ext4)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.again(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.file.undo();
    }
}

/// Its inodes are too small for a time of birth.
struct Ext4Small(OnDisk);

impl Kind for Ext4Small {
    fn make(udm: &Udm) -> Option<Ext4Small> {
        OnDisk::with(udm, "mkfs.ext4", &["-q", "-F", "-I", "128"]).map(Ext4Small)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.again(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.file.undo();
    }
}

struct Xfs(OnDisk);

impl Kind for Xfs {
    fn make(udm: &Udm) -> Option<Xfs> {
        OnDisk::with(udm, "mkfs.xfs", &["-q", "-f"]).map(Xfs)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.again(udm, act)
    }

    fn undo(&mut self, _: &Udm, _: Act) {
        self.0.file.undo();
    }
}

/// The only file of a FUSE mount: no inode number, time of birth or file system of its own.
struct Fuse {
    a: Option<Mount>,
    b: Option<Mount>,
}

impl Fuse {
    fn mount(udm: &Udm, place: &str, disk: &str) -> Option<Mount> {
        let (folder, disk) = (udm.path(place), udm.path(disk));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("o");
        let words = [text(&file), "--command", "nbdkit", "-s", "file", text(&disk)];
        let child = Command::new("nbdfuse").args(words).spawn();
        let Ok(mut child) = child else {
            eprintln!("SKIPPED: nbdfuse: {child:?}");
            return None;
        };
        let mut has_ended = false;
        wait_until("nbdfuse has mounted", || {
            has_ended = child.try_wait().unwrap().is_some();
            has_ended || file.exists()
        });
        // It ends with its mount.
        std::thread::spawn(move || child.wait());
        if has_ended {
            eprintln!("SKIPPED: nbdfuse cannot mount here");
            return None;
        }
        Some(Mount(folder))
    }
}

impl Kind for Fuse {
    fn make(udm: &Udm) -> Option<Fuse> {
        udm.file("disk", ORIGIN_BYTES);
        Some(Fuse { a: Some(Fuse::mount(udm, "a", "disk")?), b: None })
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        match act {
            Remounted => {
                self.a = None;
                self.a = Fuse::mount(udm, "a", "disk");
            }
            Copied => {
                std::fs::copy(udm.path("disk"), udm.path("copy")).unwrap();
                self.b = Fuse::mount(udm, "b", "copy");
                return "b/o".into();
            }
            Replaced => {
                self.a = None;
                other_file(&udm.path("other"), ORIGIN_BYTES);
                self.a = Fuse::mount(udm, "a", "other");
            }
            _ => {}
        }
        "a/o".into()
    }

    fn undo(&mut self, udm: &Udm, act: Act) {
        self.b = None;
        if act == Replaced {
            self.a = None;
            self.a = Fuse::mount(udm, "a", "disk");
        }
    }
}

/// A loop device on a part of an image, or a partition of one on the whole image.
struct Image {
    device: Option<Loop>,
    dummy: Option<Loop>,
    is_partitioned: bool,
}

impl Image {
    fn with(udm: &Udm, is_partitioned: bool) -> Option<Image> {
        udm.file("img", 2 * ORIGIN_BYTES + MIB);
        udm.file("dummy", MIB);
        if is_partitioned {
            Image::write_table(&udm.path("img"));
        }
        let mut made = Image { device: None, dummy: None, is_partitioned };
        let name = made.attach(udm, "img", 0)?;
        if !udm.path(&name).exists() {
            eprintln!("SKIPPED: {name} does not appear");
            return None;
        }
        Some(made)
    }

    /// Two partitions, each as long as the origin.
    fn write_table(path: &Path) {
        let mut sector = [0; 512];
        for (nth, at) in [MIB, MIB + ORIGIN_BYTES].into_iter().enumerate() {
            let entry = &mut sector[446 + 16 * nth..][..16];
            entry[4] = 0x83;
            entry[8..12].copy_from_slice(&((at / 512) as u32).to_le_bytes());
            entry[12..].copy_from_slice(&((ORIGIN_BYTES / 512) as u32).to_le_bytes());
        }
        sector[510..].copy_from_slice(&[0x55, 0xAA]);
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&sector, 0).unwrap();
    }

    /// Attaches an image, and returns the name of its part `nth`.
    fn attach(&mut self, udm: &Udm, image: &str, nth: u64) -> Option<String> {
        self.device = None;
        let (offset, limit) = ((MIB + nth * ORIGIN_BYTES).to_string(), ORIGIN_BYTES.to_string());
        let words: &[&str] = match self.is_partitioned {
            true => &["--partscan"],
            false => &["--offset", &offset, "--sizelimit", &limit],
        };
        let device = Loop::attach(&udm.path(image), words)?;
        let name = text(&device.0).to_owned();
        self.device = Some(device);
        match self.is_partitioned {
            true => Some(format!("{name}p{}", nth + 1)),
            false => Some(name),
        }
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        let (mut image, mut nth) = ("img", 0);
        match act {
            Nothing | Remounted => {}
            Renumbered => {
                self.device = None;
                self.dummy = Loop::attach(&udm.path("dummy"), &[]);
            }
            Moved => {
                self.device = None;
                rename(udm, "img", "moved");
                image = "moved";
            }
            Copied => {
                std::fs::copy(udm.path("img"), udm.path("copy")).unwrap();
                image = "copy";
            }
            Replaced => {
                self.device = None;
                rename(udm, "img", "aside");
                other_file(&udm.path("img"), 2 * ORIGIN_BYTES + MIB);
                if self.is_partitioned {
                    Image::write_table(&udm.path("img"));
                }
            }
            PartOf => nth = 1,
        }
        self.attach(udm, image, nth).unwrap()
    }

    fn undo(&mut self, udm: &Udm, act: Act) {
        (self.device, self.dummy) = (None, None);
        match act {
            Moved => rename(udm, "moved", "img"),
            Replaced => rename(udm, "aside", "img"),
            _ => {}
        }
    }
}

struct LoopPart(Image);

impl Kind for LoopPart {
    fn make(udm: &Udm) -> Option<LoopPart> {
        Image::with(udm, false).map(LoopPart)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.act(udm, act)
    }

    fn undo(&mut self, udm: &Udm, act: Act) {
        self.0.undo(udm, act);
    }
}

struct Partition(Image);

impl Kind for Partition {
    fn make(udm: &Udm) -> Option<Partition> {
        Image::with(udm, true).map(Partition)
    }

    fn act(&mut self, udm: &Udm, act: Act) -> String {
        self.0.act(udm, act)
    }

    fn undo(&mut self, udm: &Udm, act: Act) {
        self.0.undo(udm, act);
    }
}

/// A device of this target on the disk called `origin`.
fn create<'a>(target: &'a str, origin: &'a str, uri: &'a str) -> Vec<&'a str> {
    let words = ["create", "v", "--origin", origin, "--fast", "f", "--target", target];
    [&words[..], &["--export", uri]].concat()
}

/// Makes the cache, with dirty data, and ends it in order.
fn leave_dirty(udm: &Udm, target: &str, origin: &str, data: &[u8]) {
    let uri = udm.uri("s");
    udm.ok(&create(target, origin, &uri));
    write_export(udm, &uri, data);
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
}

fn check_refused<K: Kind>(udm: &Udm, kind: &mut K, target: &str, act: Act) {
    let origin = kind.act(udm, act);
    let uri = udm.uri("s");
    for words in [&create(target, &origin, &uri)[..], &["recover", "f", &origin]] {
        let outcome = udm.run(words);
        let line = &outcome.err;
        let is_told = line.contains("belongs to another") || line.contains("was changed");
        let is_refused = outcome.code == 1 && is_told && line.contains("--rebind");
        assert!(is_refused, "{target}, {act:?}, {words:?}: {outcome:?}");
    }
    kind.undo(udm, act);
}

/// After each of the acts that leave the disk the same, the dirty data is there; after each of the
/// others, and after a replacement, the disk is refused.
fn check<K: Kind>(same: &[Act], others: &[Act]) {
    for target in TARGETS {
        let udm = Udm::new();
        let Some(mut kind) = K::make(&udm) else { return };
        let uri = udm.uri("s");
        let data = pattern(1, DIRTY_BYTES);
        udm.file("f", 600 * MIB);
        let origin = kind.act(&udm, Nothing);
        leave_dirty(&udm, target, &origin, &data);
        for &act in others {
            check_refused(&udm, &mut kind, target, act);
        }
        for &act in same {
            let origin = kind.act(&udm, act);
            let outcome = udm.run(&create(target, &origin, &uri));
            assert_eq!(outcome.code, 0, "{target}, {act:?}: {outcome:?}");
            assert!(read_export(&udm, &uri)[..DIRTY_BYTES] == data, "{target}, {act:?}");
            udm.ok(&["suspend", "v"]);
            udm.ok(&["remove", "v"]);
            kind.undo(&udm, act);
        }
        let origin = kind.act(&udm, same[0]);
        udm.ok(&["recover", "f", &origin]);
        let mut found = vec![0; DIRTY_BYTES];
        std::fs::File::open(udm.path(&origin)).unwrap().read_exact_at(&mut found, 0).unwrap();
        assert!(found == data, "{target}: recovered");
        leave_dirty(&udm, target, &origin, &pattern(2, DIRTY_BYTES));
        check_refused(&udm, &mut kind, target, Replaced);
    }
}

#[test]
fn a_file_is_its_inode() {
    check::<Plain>(&[Nothing, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_in_memory_is_its_inode() {
    check::<Memory>(&[Nothing, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_an_overlay_is_its_inode() {
    check::<Overlay>(&[Remounted, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_ext4_is_its_inode() {
    check::<Ext4>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_without_a_birth_is_its_generation() {
    check::<Ext4Small>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_xfs_is_its_inode_and_not_its_device() {
    check::<Xfs>(&[Remounted, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_file_on_fuse_is_its_place_and_its_content() {
    check::<Fuse>(&[Nothing, Remounted], &[Copied]);
}

#[test]
fn a_loop_device_is_the_part_of_its_file() {
    check::<LoopPart>(&[Nothing, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_partition_is_the_part_of_its_disk() {
    check::<Partition>(&[Nothing, Renumbered, Moved], &[Copied, PartOf]);
}

#[test]
fn a_doubt_is_told() {
    let udm = Udm::new();
    let Some(_fuse) = Fuse::make(&udm) else { return };
    udm.file("f", 600 * MIB);
    let words = ["create", "v", "--origin", "a/o", "--fast", "f"];
    let outcome = udm.run(&words);
    assert!(outcome.code == 0 && outcome.err.contains("only by its place"), "{outcome:?}");
    udm.ok(&["remove", "v"]);
    let identity = |path: &str| {
        let checks = udm.json(&["doctor", path])["places"][0]["checks"].take();
        let found = checks.as_array().unwrap().iter().find(|check| check["name"] == "identity");
        found.unwrap()["works"].as_bool().unwrap()
    };
    assert!(!identity("a/o") && identity("f"));
}

/// The table line of a cache of this target on these two files.
fn table(target: &str, origin: &str) -> String {
    let sectors = ORIGIN_BYTES / 512;
    match target {
        "cache" => format!("0 {sectors} cache M f {origin} 64 1 writeback smq 0"),
        "pcache" => format!("0 {sectors} pcache f {origin} 0"),
        _ => format!("0 {sectors} writecache s {origin} f 4096 0"),
    }
}

/// The table that udm prints and stores does not allow it again, and works.
fn check_used_up(udm: &Udm, target: &str, consent: &str) {
    let table = udm.ok(&["table", "v"]);
    let stored = std::fs::read_to_string(udm.runtime().join("v.table")).unwrap();
    for text in [&table, &stored, &udm.ok(&["info", "v", "--json"])] {
        assert!(!text.contains(consent), "{target}: {text}");
    }
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--table", &table]);
    udm.ok(&["suspend", "v"]);
    udm.ok(&["remove", "v"]);
    udm.ok(&["create", "v", "--table", &stored]);
}

#[test]
fn a_consent_is_for_one_attach() {
    for target in TARGETS {
        let udm = Udm::new();
        [("o", ORIGIN_BYTES), ("o2", ORIGIN_BYTES), ("M", MIB), ("f", 600 * MIB)]
            .into_iter()
            .for_each(|(name, bytes)| drop(udm.file(name, bytes)));
        let uri = udm.uri("s");
        udm.ok(&["create", "v", "--table", &table(target, "o"), "--export", &uri]);
        write_export(&udm, &uri, &pattern(1, DIRTY_BYTES));
        udm.ok(&["suspend", "v"]);
        udm.ok(&["remove", "v"]);
        let other = table(target, "o2");
        assert!(udm.refused(&["create", "v", "--table", &other]).contains("rebind true"));
        udm.ok(&["create", "v", "--table", &format!("{other} rebind true"), "--export", &uri]);
        check_used_up(&udm, target, "rebind");
        udm.ok(&["remove", "v", "--drain"]);
    }
}

#[test]
fn an_accepted_loss_is_accepted_once() {
    for target in ["pcache", "writecache"] {
        let udm = Udm::new();
        udm.file("o", ORIGIN_BYTES);
        udm.file("f", 600 * MIB);
        let (uri, line) = (udm.uri("s"), table(target, "o"));
        udm.ok(&["create", "v", "--table", &line, "--export", &uri]);
        // Acknowledged, and not flushed.
        let data = udm.path("data");
        std::fs::write(&data, pattern(1, DIRTY_BYTES)).unwrap();
        client("nbdcopy", &[text(&data), &for_clients(&uri)]);
        udm.kill_server("v");
        for entry in std::fs::read_dir(udm.runtime()).unwrap().flatten() {
            if entry.file_name().to_string_lossy().contains(".shm") {
                std::fs::remove_file(entry.path()).unwrap();
            }
        }
        assert!(udm.refused(&["create", "v", "--table", &line]).contains("lost_memory accept"));
        udm.ok(&["create", "v", "--table", &format!("{line} lost_memory accept")]);
        check_used_up(&udm, target, "lost_memory");
        udm.ok(&["remove", "v", "--drain"]);
    }
}
