//! Memory that a disk's clients share: a memory file that clients and this server map. If the pages
//! of a request belong to the file, the request names their offset, and the server copies the data
//! there without a system call.
//!
//! Clients own the file: they may store to it at any time, and may truncate it. Only the driver
//! knows the address of a request's data. Each request can therefore also be served through system
//! calls on its own pages (see `worker`), and is so served
//!
//! 1. if the driver names another memory: one that an earlier server has shared;
//! 2. from the moment when udm finds a part of the file truncated. The driver still has the
//!    truncated pages.
//!
//! A file that was truncated and extended again unnoticed, or in which a hole was punched, has
//! other pages than the driver. Requests from the new pages go through system calls. A request in
//! flight uses the bytes that its client sees in the file: a write stores the bytes that the client
//! then reads there.

use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat};
use udm::error::{Error, Kind, Result};
use udm::pmem::client_memory::{ClientMemory, Source};
use udm::pmem::copy::SharedBytes;
use udm::units::GIB;

use super::proto::{InMemory, Wish};

/// Maximum length of the file, set by the driver.
pub const BYTES_MAX: u64 = 4 * GIB;

/// A mapped memory file.
#[derive(Debug)]
pub struct Memory {
    client_memory: ClientMemory,
}

/// Memory that the driver knows, with its index there.
#[derive(Debug)]
pub struct Known {
    /// The memory.
    pub memory: Memory,
    /// The driver's index.
    pub index: u16,
}

impl Memory {
    /// Maps the file at `path`. An error names the file and the reason.
    pub fn map(path: &Path) -> Result<Memory> {
        let name = path.display();
        let refused = |why: String| Error::new(Kind::Unsupported, format!("shared={name}: {why}"));
        let failed = |errno: rustix::io::Errno| Error::from_io("opening", &name, errno.into());
        // If the path is not a regular file, opening it must not block.
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty()).map_err(failed)?;
        let stat = fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused("it is not a file".into()));
        }
        let (bytes, page) = (stat.st_size as u64, rustix::param::page_size() as u64);
        if bytes == 0 || !bytes.is_multiple_of(page) {
            return Err(refused(format!("its {bytes} bytes are not whole pages of {page} bytes")));
        }
        if bytes > BYTES_MAX {
            return Err(refused(format!("its {bytes} bytes are more than {BYTES_MAX}")));
        }
        let mapped = ClientMemory::map(&file, 0, bytes);
        let client_memory = mapped.map_err(|error| error.at(format!("shared={name}")))?;
        Ok(Memory { client_memory })
    }

    /// Returns the mapping.
    pub fn client_memory(&self) -> &ClientMemory {
        &self.client_memory
    }

    /// Whether a part of the file was truncated, so that it is not used any more.
    pub fn is_lost(&self) -> bool {
        self.client_memory.has_damage()
    }
}

impl Known {
    /// Locates the data of `wish` in this memory, if the driver names it and it is usable. Returns
    /// `None` if the driver's address is invalid.
    pub fn place(&self, said: InMemory, wish: &Wish) -> Option<Option<u64>> {
        let InMemory { index, at, reserved } = said;
        if reserved != 0 {
            return None;
        }
        if index != self.index {
            return Some(None);
        }
        let (at, bytes) = (u64::from(at), self.memory.client_memory.len_bytes());
        let is_inside = at <= bytes && wish.len <= bytes - at;
        is_inside.then(|| (!self.memory.is_lost()).then_some(at))
    }

    /// Bytes to copy to; check [`Memory::is_lost`] afterwards.
    pub fn sink(&self, at: u64, len: u64) -> SharedBytes<'_> {
        self.memory.client_memory.shared(at, len as usize)
    }

    /// Bytes to copy from.
    pub fn source(&self, at: u64, len: u64) -> Source<'_> {
        self.memory.client_memory.source(at, len as usize)
    }

    /// Copies from offset `at`. Returns false if a part was missing.
    pub fn load(&self, at: u64, into: &mut [u8]) -> bool {
        self.memory.client_memory.load(at, into);
        !self.memory.is_lost()
    }

    /// Copies to offset `at`. Returns false if a part was missing.
    pub fn store(&self, at: u64, bytes: &[u8]) -> bool {
        self.memory.client_memory.store(at, bytes);
        !self.memory.is_lost()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use proptest::prelude::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use udm::bio::Op;

    use super::*;

    const BYTES: u64 = 64 << 10;

    /// Creates a memory file, and a path that opens it while the file is open.
    fn memfd(bytes: u64) -> (File, PathBuf) {
        let file = File::from(
            memfd_create("clients", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap(),
        );
        file.set_len(bytes).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        (file, path)
    }

    fn known(path: &Path) -> Known {
        Known { memory: Memory::map(path).unwrap(), index: 3 }
    }

    fn wish(len: u64) -> Wish {
        let (op, shared_at) = (Op::Read, None);
        Wish { op, offset: 4096, len, fua: false, is_metadata: false, shared_at }
    }

    #[test]
    fn files_that_cannot_be_shared_are_refused_by_name_and_reason() {
        let refused = |path: &Path, why: &str| {
            let error = Memory::map(path).unwrap_err().to_string();
            let name = path.display().to_string();
            assert!(error.contains(&name) && error.contains(why), "{error}");
        };
        let (_empty, path) = memfd(0);
        refused(&path, "its 0 bytes are not whole pages");
        let (_odd, path) = memfd(8191);
        refused(&path, "its 8191 bytes are not whole pages");
        // The file is sparse, and takes no memory.
        let (_long, path) = memfd(BYTES_MAX + 4096);
        refused(&path, "its 4294971392 bytes are more than 4294967296");
        let (sealed, path) = memfd(BYTES);
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::WRITE).unwrap();
        refused(&path, "mapping its memory");
        refused(Path::new("/dev/null"), "it is not a file");
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        refused(folder.path(), "Is a directory");
        refused(&folder.path().join("none"), "No such file");
        let disk = folder.path().join("disk");
        File::create(&disk).unwrap().set_len(BYTES).unwrap();
        refused(&disk, "it is not memory");
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, 0o600.into(), 0).unwrap();
        refused(&pipe, "it is not a file");
    }

    #[test]
    fn what_one_side_stores_the_other_loads() {
        let (_file, path) = memfd(BYTES);
        let (known, client) = (known(&path), Memory::map(&path).unwrap());
        client.client_memory().store(BYTES - 512, &[7; 512]);
        let mut bytes = [0; 512];
        assert!(known.load(BYTES - 512, &mut bytes) && bytes == [7; 512]);
        assert!(known.store(4096, &[9; 512]));
        client.client_memory().load(4096, &mut bytes);
        assert_eq!(bytes, [9; 512]);
    }

    proptest! {
        #[test]
        fn whatever_the_driver_says_is_in_the_memory_or_refused(
            at in prop_oneof![any::<u32>(), 0..2 * BYTES as u32],
            len in prop_oneof![1..=2 * BYTES, Just(1 << 20)],
            index in 2..5_u16,
            reserved in prop_oneof![9 => Just(0), 1 => any::<u16>()],
        ) {
            let (_file, path) = memfd(BYTES);
            let (known, wish) = (known(&path), wish(len));
            let place = known.place(InMemory { index, at, reserved }, &wish);
            match place {
                None => prop_assert!(
                    reserved != 0 || index == 3 && u64::from(at) + len > BYTES
                ),
                Some(None) => prop_assert!(index != 3, "memory of another server"),
                Some(Some(place)) => {
                    prop_assert!(place == at.into() && reserved == 0 && index == 3);
                    prop_assert!(known.load(place, &mut vec![0; len as usize]));
                    prop_assert!(known.sink(place, len).len() == len as usize);
                    prop_assert!(known.source(place, len).is_whole());
                }
            }
        }
    }

    #[test]
    fn memory_that_was_cut_short_is_not_used_any_more() {
        let (file, path) = memfd(BYTES);
        let known = known(&path);
        let said = |at| InMemory { index: 3, at, reserved: 0 };
        file.set_len(8192).unwrap();
        assert_eq!(known.place(said(32768), &wish(4096)), Some(Some(32768)), "no store was tried");
        assert!(known.store(0, &[1; 4096]), "the remaining memory is mapped");
        assert!(!known.store(32768, &[1; 4096]) && known.memory.is_lost());
        assert_eq!(known.place(said(0), &wish(4096)), Some(None));
        assert_eq!(known.place(said(u32::MAX), &wish(4096)), None, "that never was");
        // Extending the file does not restore it: the driver has other pages.
        file.set_len(BYTES).unwrap();
        assert!(!known.load(0, &mut [0; 512]));
    }
}
