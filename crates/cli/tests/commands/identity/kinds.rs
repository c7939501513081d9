//! Kinds of disks, and acts on them between two attaches.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Loop, Udm, pattern, text, wait_until};

const MIB: u64 = 1 << 20;
/// Bytes of each disk.
pub const ORIGIN_BYTES: u64 = 16 * MIB;

/// An act on the disk, between two attaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Nothing,
    /// It, or its backing file, gets another path.
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
pub use Act::{Copied, Moved, Nothing, PartOf, Remounted, Renumbered, Replaced};

/// A kind of disk, and what this machine needs for it.
pub trait Kind {
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
pub struct Mount(PathBuf);

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
        let unmount = |words: &[&str]| {
            let output = Command::new("umount").args(words).arg(&self.0).output();
            output.is_ok_and(|output| output.status.success())
        };
        if std::thread::panicking() {
            unmount(&["--lazy"]);
        } else {
            // A server that was removed closes its files in a moment.
            wait_until("the mount ends", || unmount(&[]));
        }
    }
}

/// A file in a folder, by the acts that are the same on all file systems. A rename would count as
/// a change of the file, so the folder gets another path.
pub struct InFolder {
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
            PartOf => format!("{}?offset={}M", path("o"), ORIGIN_BYTES / 2 / MIB),
        }
    }

    fn undo(&mut self) {
        self.elsewhere = None;
    }
}

/// A file where the test has its folder.
pub struct Plain(InFolder);

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
pub struct Memory(InFolder, #[allow(dead_code)] Mount);

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
pub struct Overlay(InFolder, Option<Mount>);

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
pub struct OnDisk {
    file: InFolder,
    mount: Option<Mount>,
    device: Option<Loop>,
    /// A device that has the number meanwhile.
    dummies: Vec<Loop>,
}

/// Takes loop devices until one of them has the number of `was`, which is free now. Another test
/// may have taken it.
fn occupy(udm: &Udm, was: Option<&Path>) -> Vec<Loop> {
    let mut dummies = Vec::new();
    while dummies.len() < 8 && dummies.last().map(|dummy: &Loop| &*dummy.0) != was {
        let Some(dummy) = Loop::attach(&udm.path("dummy"), &[]) else { break };
        dummies.push(dummy);
    }
    dummies
}

impl OnDisk {
    fn with(udm: &Udm, mkfs: &str, words: &[&str]) -> Option<OnDisk> {
        let disk = udm.file("disk", 320 * MIB);
        udm.file("dummy", MIB);
        try_run(mkfs, &[words, &[text(&disk)]].concat())?;
        let mut made =
            OnDisk { file: InFolder::new("m"), mount: None, device: None, dummies: Vec::new() };
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
                self.dummies = occupy(udm, was.as_deref());
            }
            self.mount(udm).unwrap();
            let is = self.device.as_ref().map(|device| device.0.clone());
            assert!(act == Remounted || is != was, "it has its old number");
        }
        self.file.act(udm, act)
    }
}

pub struct Ext4(OnDisk);

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
pub struct Ext4Small(OnDisk);

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

pub struct Xfs(OnDisk);

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
pub struct Fuse {
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
pub struct Image {
    device: Option<Loop>,
    dummies: Vec<Loop>,
    is_partitioned: bool,
}

impl Image {
    fn with(udm: &Udm, is_partitioned: bool) -> Option<Image> {
        udm.file("img", 2 * ORIGIN_BYTES + MIB);
        udm.file("dummy", MIB);
        if is_partitioned {
            Image::write_table(&udm.path("img"));
        }
        let mut made = Image { device: None, dummies: Vec::new(), is_partitioned };
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
                let was = self.device.take().map(|device| device.0.clone());
                self.dummies = occupy(udm, was.as_deref());
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
        self.device = None;
        self.dummies.clear();
        match act {
            Moved => rename(udm, "moved", "img"),
            Replaced => rename(udm, "aside", "img"),
            _ => {}
        }
    }
}

pub struct LoopPart(Image);

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

pub struct Partition(Image);

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
