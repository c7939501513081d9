//! Where the page cache is measured: a file, and a block device over another file, or one that the
//! user names.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use udm::disk::{Disk, FileDisk, FileOptions, IoMode, OpenMode};
use udm::units::MIB;

use crate::loopdev::LoopDevice;
use crate::results::Study;
use crate::rig::{Setup, open_when_free, write_out};

/// Bytes of the files that the study makes.
const SMALL_BYTES: u64 = 64 * MIB;
const USUAL_BYTES: u64 = 512 * MIB;

/// A file or block device that may be overwritten, or that is only read.
#[derive(Debug)]
pub struct Place {
    /// Its description, in words.
    pub name: &'static str,
    pub path: PathBuf,
    /// Bytes of it that are used.
    pub bytes: u64,
    /// The study does not write to a device without the user's permission.
    pub may_write: bool,
    /// Open during the whole study: the kernel drops a block device's pages when its last user
    /// closes it.
    held: File,
    _loop: Option<LoopDevice>,
}

impl Place {
    /// The file; and the block device, if there can be one.
    pub fn all(setup: &Setup, study: &mut Study) -> Result<Vec<Place>> {
        let own = setup.choose(SMALL_BYTES, USUAL_BYTES);
        let bytes = setup.asked().size.unwrap_or(own).next_multiple_of(MIB).max(SMALL_BYTES);
        let make = |name: &str| {
            let path = setup.places.disk.file(name, bytes)?;
            write_out(&path, bytes)?;
            Ok::<PathBuf, anyhow::Error>(path)
        };
        let device = match setup.device() {
            Some(path) => Some(Place::named(path, setup.may_destroy(), bytes)?),
            None => match LoopDevice::over(&make("below-loop")?) {
                Ok(device) => Some(Place::over_loop(device, bytes, study)?),
                Err(error) => {
                    let note = "No block device was measured: --device names one, and root can \
                                have one made";
                    study.notes.push(format!("{note} ({error:#})."));
                    None
                }
            },
        };
        let file = Place::new("file", &make("pages")?, bytes, true, None)?;
        for place in device.iter().chain([&file]) {
            study.fact(place.name, place.path.display().to_string());
        }
        Ok(device.into_iter().chain([file]).collect())
    }

    fn new(
        name: &'static str,
        path: &Path,
        bytes: u64,
        may_write: bool,
        made: Option<LoopDevice>,
    ) -> Result<Place> {
        let held = File::open(path).with_context(|| path.display().to_string())?;
        Ok(Place { name, path: path.to_owned(), bytes, may_write, held, _loop: made })
    }

    fn over_loop(device: LoopDevice, bytes: u64, study: &mut Study) -> Result<Place> {
        if !device.is_direct {
            let note = "The loop device goes through the page cache of its file, which does not \
                        take direct I/O: each page is cached twice, once in Cached.";
            study.notes.push(note.into());
        }
        let path = device.path().to_owned();
        Place::new("block device", &path, bytes, true, Some(device))
    }

    fn named(path: &Path, may_write: bool, bytes: u64) -> Result<Place> {
        let file_type = std::fs::metadata(path)
            .with_context(|| format!("--device {}", path.display()))?
            .file_type();
        ensure!(file_type.is_block_device(), "--device {} is not a block device", path.display());
        let place = Place::new("block device", path, bytes, may_write, None)?;
        let there = place.disk(IoMode::Buffered)?.limits().size_bytes;
        ensure!(there >= SMALL_BYTES, "{} is smaller than 64 MiB", path.display());
        Ok(Place { bytes: bytes.min(there / MIB * MIB), ..place })
    }

    /// It as a disk: alone, or only to read.
    pub fn disk(&self, io: IoMode) -> Result<Arc<FileDisk>> {
        let mode = if self.may_write { OpenMode::Exclusive } else { OpenMode::ReadOnly };
        let options = FileOptions { io, mode, ..FileOptions::default() };
        Ok(Arc::new(open_when_free(|| FileDisk::open(&self.path, &options))?))
    }

    /// Afterwards no page is cached, and all data is clean.
    pub fn cool(&self) -> Result<()> {
        self.held.sync_data().with_context(|| self.path.display().to_string())?;
        let _ = rustix::fs::fadvise(&self.held, 0, None, rustix::fs::Advice::DontNeed);
        Ok(())
    }

    /// Afterwards all pages are cached and clean.
    pub fn warm(&self) -> Result<()> {
        self.cool()?;
        self.read_again()
    }

    /// Flushes it, and reads all of it through the page cache.
    pub fn read_again(&self) -> Result<()> {
        self.read_in_steps(self.bytes, |_| ())
    }

    /// Flushes it, and reads all of it through the page cache, without reading ahead; calls `seen`
    /// with each step's range of `step_bytes`, which are whole MiB.
    pub fn read_in_steps(&self, step_bytes: u64, mut seen: impl FnMut(Range<u64>)) -> Result<()> {
        self.held.sync_data().with_context(|| self.path.display().to_string())?;
        let mut file = File::open(&self.path).with_context(|| self.path.display().to_string())?;
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
        let mut bytes = vec![0; MIB as usize];
        for nth in 1..=self.bytes / MIB {
            file.read_exact(&mut bytes).with_context(|| self.path.display().to_string())?;
            if nth % (step_bytes / MIB) == 0 {
                seen(nth * MIB - step_bytes..nth * MIB);
            }
        }
        Ok(())
    }

    /// Lets the kernel drop the clean pages of a range.
    pub fn drop_pages(&self, range: Range<u64>) {
        let len = std::num::NonZeroU64::new(range.end - range.start);
        let _ = rustix::fs::fadvise(&self.held, range.start, len, rustix::fs::Advice::DontNeed);
    }
}
