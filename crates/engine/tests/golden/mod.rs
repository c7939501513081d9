//! Opens the golden media of `tests/vectors`, which the kernel's own targets wrote.

// Each test binary uses its own part of this.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

/// How much is unpacked at a time; stretches of this size that hold only zeroes stay holes.
const PIECE_BYTES: usize = 64 << 10;

/// One set of media, with the kernel's status of it.
pub struct Vector {
    pub name: String,
    pub folder: PathBuf,
    pub manifest: Value,
}

/// All vectors whose name starts with `prefix`, in order of name. Never none.
pub fn vectors(prefix: &str) -> Vec<Vector> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors");
    let mut found: Vec<Vector> = fs::read_dir(&root)
        .expect("tests/vectors is part of the repository")
        .map(|entry| entry.expect("folder entry"))
        .filter(|entry| entry.path().is_dir())
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| Vector::open(entry.path()))
        .collect();
    assert!(!found.is_empty(), "no vector is called {prefix}*");
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

impl Vector {
    fn open(folder: PathBuf) -> Vector {
        let text = fs::read_to_string(folder.join("manifest.json")).expect("a manifest");
        let manifest: Value = serde_json::from_str(&text).expect("the manifest is JSON");
        let name = manifest["name"].as_str().expect("a name").to_owned();
        Vector { name, folder, manifest }
    }

    /// The manifest's `key`, which must be a string.
    pub fn text(&self, key: &str) -> &str {
        self.manifest[key].as_str().unwrap_or_else(|| panic!("{}: no {key}", self.name))
    }

    /// The table line, with the place-holders replaced.
    pub fn table(&self, cache: &str, origin: &str) -> String {
        self.text("table").replace("{cache}", cache).replace("{origin}", origin)
    }

    /// Unpacks image `role` (`cache`, `origin`) into memory.
    pub fn image(&self, role: &str) -> Vec<u8> {
        let mut bytes = vec![0; self.image_bytes(role)];
        self.for_each_piece(role, |at, piece| bytes[at..at + piece.len()].copy_from_slice(piece));
        bytes
    }

    /// Unpacks image `role` into a sparse file at `path`.
    pub fn unpack(&self, role: &str, path: &Path) {
        let file = File::create(path).expect("create image");
        file.set_len(self.image_bytes(role) as u64).expect("size image");
        self.for_each_piece(role, |at, piece| {
            file.write_all_at(piece, at as u64).expect("write image");
        });
    }

    fn image_bytes(&self, role: &str) -> usize {
        let size = self.manifest["images"][role]["size"].as_u64().expect("an image size");
        usize::try_from(size).expect("images fit into memory")
    }

    fn for_each_piece(&self, role: &str, mut visit: impl FnMut(usize, &[u8])) {
        let packed = self.manifest["images"][role]["file"].as_str().expect("an image file");
        let file = BufReader::new(File::open(self.folder.join(packed)).expect("open image"));
        let mut stream = ruzstd::decoding::StreamingDecoder::new(file).expect("a zstd frame");
        let mut piece = vec![0; PIECE_BYTES];
        let mut at = 0;
        loop {
            let mut len = 0;
            while len < PIECE_BYTES {
                match stream.read(&mut piece[len..]).expect("unpack image") {
                    0 => break,
                    more => len += more,
                }
            }
            if len == 0 {
                break;
            }
            if piece[..len].iter().any(|&byte| byte != 0) {
                visit(at, &piece[..len]);
            }
            at += len;
        }
        assert_eq!(at, self.image_bytes(role), "{}: unpacked size of {role}", self.name);
    }
}

/// SHA-256 of `bytes`, as the manifests write it.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
