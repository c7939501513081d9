//! thin-provisioning-tools as judge: version 0.9, which `make test` installs, and in `make prove`
//! also 1.x, which is a rewrite (`scripts/newer-tools.sh`). If the tools are missing, these tests
//! print that loudly and are skipped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use udm::cache::Devices;
use udm::cache::drain::Drain;
use udm::cache::metadata::contents::mapping;
use udm::cache::metadata::{Contents, Superblock, format, load, survey};
use udm::cache::xml;
use udm::disk::{Disk, FileDisk, FileOptions, RamDisk};
use udm::prng::Prng;

use crate::golden::vectors;

/// Runs a tool; none if it is not there.
fn tool(words: &[&str]) -> Option<Output> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    match Command::new(words[0]).args(&words[1..]).env("PATH", path).output() {
        Ok(output) => Some(output),
        Err(_) => {
            eprintln!("SKIPPED: {} is not installed (thin-provisioning-tools)", words[0]);
            None
        }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An error unless `cache_check` reports no finding.
pub fn check(path: &Path) {
    if let Some(output) = tool(&["cache_check", text(path)]) {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The tools' own version, `0.9.0` or `1.1.0`.
fn said_version() -> String {
    let output = tool(&["cache_dump", "-V"]).unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_string()
}

pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn file(&self, name: &str, len: u64) -> PathBuf {
        let path = self.0.path().join(name);
        File::create(&path).unwrap().set_len(len).unwrap();
        path
    }
}

fn open(path: &Path) -> Arc<dyn Disk> {
    Arc::new(FileDisk::open(path, &FileOptions::default()).unwrap())
}

/// A cache with blocks here and there.
fn some_contents(slots: u64, seed: u64) -> Contents {
    let mut prng = Prng::new(seed);
    let mut contents = Contents::empty(slots);
    let mut hints = vec![0; slots as usize];
    for slot in 0..slots {
        if prng.one_in(3) {
            contents.mappings[slot as usize] = mapping(Some(slot * 7 + prng.below(7)));
            contents.dirty.put(slot, prng.one_in(2));
            hints[slot as usize] = prng.below(64) as u32;
        }
    }
    contents.hints = Some(hints);
    contents
}

fn superblock(version: u32) -> Superblock {
    let mut superblock = Superblock::fresh(version, 128);
    superblock.set_policy("smq").unwrap();
    superblock.fields.flags.set(1);
    superblock.fields.hint_bytes.set(4);
    superblock
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

#[test]
fn cache_check_and_cache_dump_take_what_we_write() {
    let folder = Folder::new();
    // 0.9.0 does not take a cache without slots, which the kernel's own format is.
    for (nth, slots) in [1, 509, 70_000, 200_000].into_iter().enumerate() {
        for version in [1, 2] {
            let path = folder.file("meta", 16 << 20);
            let contents = some_contents(slots, nth as u64);
            format::write_whole(&open(&path), superblock(version), &contents).unwrap();
            check(&path);
            let Some(output) = tool(&["cache_dump", text(&path)]) else { return };
            let mut ours = printed(&superblock(version), &contents);
            match said_version().as_str() {
                // It does not look at the dirty bits of version 2.
                old if old.starts_with("0.") && version == 2 => {
                    ours = ours.replace("\"true\"", "\"false\"");
                }
                old if old.starts_with("0.") => {}
                // It ends without the end of a line.
                _ => assert_eq!(ours.pop(), Some('\n')),
            }
            assert!(output.stdout == ours.as_bytes(), "{slots} slots, version {version}");
        }
    }
}

#[test]
fn what_cache_restore_writes_is_read() {
    let folder = Folder::new();
    let contents = some_contents(70_000, 5);
    let text_path = folder.0.path().join("meta.xml");
    std::fs::write(&text_path, printed(&superblock(1), &contents)).unwrap();
    for version in ["1", "2"] {
        let path = folder.file("meta", 16 << 20);
        let (input, output) = (text(&text_path), text(&path));
        let words =
            ["cache_restore", "--metadata-version", version, "-i", input, "-o", output, "-q"];
        let Some(output) = tool(&words) else { return };
        assert!(output.status.success(), "{output:?}");
        let loaded = load(&open(&path)).unwrap();
        assert_eq!(loaded.contents, contents, "version {version}");
    }
}

#[test]
fn cache_check_is_content_with_a_cache_that_was_drained() {
    let folder = Folder::new();
    for vector in vectors("cache-") {
        let path = folder.file("meta", 0);
        vector.unpack("meta", &path);
        let ram = |role: &str| -> Arc<dyn Disk> {
            let image = vector.image(role);
            let disk = RamDisk::new(image.len() as u64, 512);
            disk.load_image(&image);
            Arc::new(disk)
        };
        let metadata = open(&path);
        let loaded = load(&metadata).unwrap();
        let devices = Devices { metadata, cache: ram("cache"), origin: ram("origin") };
        let mut drain = Drain::new(devices, loaded, None).unwrap();
        while !drain.is_done() {
            drain.step().unwrap();
        }
        drop(drain);
        check(&path);
        let metadata = open(&path);
        let found = survey(&metadata, survey::superblock(&metadata).unwrap());
        assert_eq!(found.findings().count(), 0);
    }
}
