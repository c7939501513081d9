//! The features of a device, a file or the files of a folder, found by opening them as servers do.
//!
//! A device or file is only read, even while it is in use. In a folder a file is created, written
//! and removed.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use udm::bio::Op;
use udm::buffer::Buffer;
use udm::disk::{Disk, DiskIo, FileDisk, FileOptions, IoMode, OpenMode};
use udm::error::{Error, Kind};
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::pmem::{Persistence, Pmem};
use udm::sync::Arc;
use udm::table::{DeviceWord, Table, Word};
use udm::targets::{self, WordRole};
use udm::units::{KIB, MIB, human_bytes};
use udm_export::check::{self, Check};

use crate::control::{Absent, no_answer};
use crate::runtime::{DeviceName, RuntimeDir};

/// Bytes of the file that is created in a folder: whole huge pages.
const TRIAL_BYTES: u64 = 4 * MIB;
/// Bytes that are written to the file.
const WRITTEN_BYTES: usize = 64 * KIB as usize;

/// A device, file or folder to be tested.
#[derive(Clone, Debug)]
pub struct Place {
    /// The path.
    pub path: PathBuf,
    /// The udm device whose table names it, and its role in that table.
    pub device: Option<String>,
}

/// The places that `words` name: paths, or devices of udm.
pub fn find(words: &[String], runtime: Option<&RuntimeDir>) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for word in words {
        let path = path_of(Word::new(word.as_str()).device()?);
        match (path.try_exists(), word.parse::<DeviceName>(), runtime) {
            (Ok(true), _, _) => places.push(Place { path, device: None }),
            (_, Ok(name), Some(runtime)) => places.extend(of_device(&name, runtime)?),
            (Err(error), _, _) => return Err(error).with_context(|| word.clone()),
            (Ok(false), _, _) => bail!("{word}: no such file"),
        }
    }
    Ok(places)
}

/// The path of a device, which a table may name by its number.
fn path_of(word: DeviceWord) -> PathBuf {
    match word.number() {
        Some((major, minor)) => format!("/dev/block/{major}:{minor}").into(),
        None => word.path.into(),
    }
}

/// The devices in the table of `name`.
fn of_device(name: &DeviceName, runtime: &RuntimeDir) -> Result<Vec<Place>> {
    let Ok(text) = std::fs::read_to_string(runtime.table(name)) else {
        return Err(no_answer(runtime, name, Absent::NoDevice));
    };
    let table = Table::parse(&text)?;
    let roles = [
        (WordRole::Cache, "cache"),
        (WordRole::Metadata, "metadata"),
        (WordRole::Origin, "origin"),
    ];
    let mut places: Vec<Place> = Vec::new();
    for line in &table.lines {
        let Some(kind) = targets::find(&line.target.text) else { continue };
        for (role, words) in roles {
            for nth in kind.places(&[role]) {
                let Some(Ok(word)) = line.args.get(nth).map(Word::device) else { continue };
                let path = path_of(word);
                if !places.iter().any(|place| place.path == path) {
                    places.push(Place { path, device: Some(format!("{words} of {name}")) });
                }
            }
        }
    }
    Ok(places)
}

impl Place {
    /// The heading for its checks.
    pub fn heading(&self) -> String {
        let path = self.path.display();
        match &self.device {
            Some(device) => format!("{path} ({device})"),
            None => path.to_string(),
        }
    }

    /// Runs its checks.
    pub fn look(&self) -> Vec<Check> {
        if !self.path.is_dir() {
            return all(&self.path, OpenMode::ReadOnly);
        }
        let mut checks = match Trial::make(&self.path) {
            Ok(trial) => {
                let (own, folder) = (trial.0.display().to_string(), self.path.display());
                let mut checks = all(&trial.0, OpenMode::Exclusive);
                for check in &mut checks {
                    check.what = check.what.replace(&own, &format!("files in {folder}"));
                }
                checks
            }
            Err(error) => vec![Check::of("files", Err(error))],
        };
        checks.extend(check::certificates(&self.path));
        checks
    }
}

/// All checks of a file or device.
fn all(path: &Path, mode: OpenMode) -> Vec<Check> {
    let (medium, is_volatile) = medium(path, mode == OpenMode::Exclusive);
    [disk(path, mode, is_volatile), medium].concat()
}

/// A file for the checks, which is removed when this value is dropped.
struct Trial(PathBuf);

impl Trial {
    fn make(folder: &Path) -> udm::error::Result<Trial> {
        let path = folder.join(format!(".udm-doctor-{}", std::process::id()));
        let failed = |error| Error::from_io("making a file in", folder.display(), error);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
        let trial = Trial(path);
        file.set_len(TRIAL_BYTES).map_err(failed)?;
        Ok(trial)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The modes of I/O, and the state of a write after a power cut.
fn disk(path: &Path, mode: OpenMode, is_volatile: bool) -> Vec<Check> {
    let open = |io| FileDisk::open(path, &FileOptions { mode, io, ..FileOptions::default() });
    let auto = match open(IoMode::Auto) {
        Ok(disk) => disk,
        Err(error) => return vec![Check::of("as a disk", Err(error))],
    };
    let (limits, cached, writes_out) = (auto.limits().clone(), auto.cached(), auto.has_write_out());
    drop(auto);
    let direct = open(IoMode::Direct).map(|_| "bypasses the page cache".to_owned());
    let dontcache = open(IoMode::DontCache).map(|_| "RWF_DONTCACHE is supported".to_owned());
    let atomic = match limits.atomic_bytes {
        _ if is_volatile => Check::bad("atomic writes", "a power cut loses all data"),
        0 => Check::bad(
            "atomic writes",
            "the device does not report what a power cut leaves of a write",
        )
        .or("a block device with direct I/O may report it"),
        bytes => Check::good(
            "atomic writes",
            format!("a power cut leaves a write of {} whole or undone", human_bytes(bytes.into())),
        ),
    };
    let cachestat = match cached {
        Some(cached) => {
            let bytes = human_bytes(cached.cached_bytes);
            Check::good("cachestat", format!("{bytes} are in the page cache"))
        }
        None => Check::bad("cachestat", "the kernel does not report how much is in the page cache")
            .or("it needs Linux 6.5, and no seccomp profile that forbids it"),
    };
    let ranges = match writes_out {
        true => Check::good("sync_file_range", "single ranges can be written out"),
        false => Check::bad("sync_file_range", "single ranges cannot be written out"),
    };
    let identity = match limits.identity.doubt() {
        None => Check::good("identity", "a cache knows it again, wherever it is moved"),
        Some(doubt) => Check::bad("identity", doubt.to_owned())
            .or("compare the device's name before each `create` and `recover`"),
    };
    let mut checks = vec![
        identity,
        Check::of("io=direct", direct),
        Check::of("io=dontcache", dontcache),
        Check::of("io=lazy", open(IoMode::Lazy).and_then(|disk| lazy(disk, mode))),
        cachestat,
        ranges,
        atomic,
    ];
    if mode == OpenMode::Exclusive {
        checks.push(match limits.has_discard {
            true => Check::good("discard", "the file system punches holes"),
            false => Check::bad("discard", "the file system punches no holes"),
        });
    }
    checks
}

/// The method by which lazily written data gets to the device.
fn lazy(disk: FileDisk, mode: OpenMode) -> udm::error::Result<String> {
    if mode != OpenMode::Exclusive {
        return Ok("known after the first write; `udm doctor FOLDER` tries it".into());
    }
    let disk: Arc<dyn Disk> = Arc::new(disk);
    let write = DiskIo::new(&disk, Op::Write, 0, Buffer::zeroed(WRITTEN_BYTES), 0);
    let flush = DiskIo::bare(&disk, Op::Flush, 0, 0, 0);
    for io in [write, flush] {
        if let Some(Err(status)) = disk.carry_out(vec![io]).first().map(|io| io.result) {
            return Err(Error::new(Kind::Io, format!("a write failed: {status}")));
        }
    }
    Ok(disk.pacing().map_or_else(String::new, |pacing| pacing.way.to_owned()))
}

/// The checks of a cache in memory on this file or device, and whether a power cut empties it.
fn medium(path: &Path, is_ours: bool) -> (Vec<Check>, bool) {
    let name = "as a cache in memory";
    let opened = match is_ours {
        true => DaxPmem::open(path, DaxOptions::default()),
        false => DaxPmem::open_read_only(path, DaxOptions::default().area),
    };
    let medium = match opened {
        Ok(pmem) => pmem.medium().clone(),
        Err(error) => return (vec![Check::of(name, Err(error))], false),
    };
    let dax = match (medium.persistence, medium.is_volatile) {
        (Persistence::Cpu, false) => Check::good("DAX", "stores are durable without a system call"),
        (_, true) => Check::bad("DAX", "it is ordinary memory"),
        (Persistence::Msync, false) => Check::bad("DAX", "MAP_SYNC is refused"),
    };
    let dax = dax.or("/dev/daxX.Y, or a file on a file system mounted with -o dax");
    let survives = match medium.is_volatile {
        false => Check::good("power cuts", "flushed writes survive a power cut"),
        true => Check::bad("power cuts", "a power cut loses all of it")
            .or("use another medium for writes that must survive a power cut"),
    };
    (vec![Check::good(name, medium.description), dax, survives], medium.is_volatile)
}
