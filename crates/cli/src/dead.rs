//! Devices whose servers died, as the runtime directory remembers them: their tables, and the marks
//! that identify the media of their caches.
//!
//! A server that died may have acknowledged writes that its origin lacks. So the next server must
//! find the same medium: with a blank device, another cache or an older copy it would serve, or
//! write back, data without these writes. `create` and `recover` refuse it, and `detach` gives the
//! dead device up.
//!
//! 1. `NAME.media` is written when a server serves, and again by a server or `recover` that has
//!    opened the media after its death. It holds the boot of the machine: the memory of an earlier
//!    boot is gone in any case, so a file from an earlier boot is not evidence about the media.
//! 2. A medium is identified by the mark of its last attach, or by memory in this directory that
//!    its label names: in that case a server or a `recover` in between died.
//! 3. An orderly end removes the attach from the medium, so `NAME.media` records before it that the
//!    end begins (`is_ending`): if the end is interrupted, a cache at rest counts as the remembered
//!    one. A medium without a cache is still refused.
//! 4. A table whose caches all write through, and had no dirty data, is not remembered: its origins
//!    have all data.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use udm::table::{DeviceWord, Table, TableLine};
use udm::targets::{self, WordRole};

use crate::control::{Absent, Client};
use crate::known::Known;
use crate::last_end::boot;
use crate::platform;
use crate::runtime::{DeviceName, KeepLog, NameLock, RuntimeDir};

/// The content of `NAME.media`.
#[derive(Debug, Deserialize, Serialize)]
struct Media {
    boot: String,
    marks: Vec<String>,
    /// Whether the server, or a later one, was about to end in order.
    #[serde(default)]
    is_ending: bool,
}

/// A device whose server died.
#[derive(Debug)]
pub struct Dead {
    /// The name of the device.
    pub name: DeviceName,
    /// The table of the device.
    pub table: Table,
    /// The marks of its caches; empty if they are not remembered.
    marks: Vec<String>,
    /// Whether an orderly end had begun, which may have removed the marks from the media.
    was_ending: bool,
}

/// The marks that identify the caches of `table`, which were opened.
pub fn marks(runtime: &RuntimeDir, table: &str) -> Vec<String> {
    let known =
        Table::parse(table).map(|table| platform::known(&table, runtime)).unwrap_or_default();
    known.into_iter().filter_map(|known| known.mark).collect()
}

/// Writes down these marks of caches that may get dirty data. Returns whether there are any.
pub fn remember(runtime: &RuntimeDir, name: &DeviceName, marks: Vec<String>) -> bool {
    let path = runtime.media(name);
    if marks.is_empty() {
        let _ = fs::remove_file(&path);
        return false;
    }
    // Without this file the next server does not compare any marks.
    write(&path, &Media { boot: boot(), marks, is_ending: false });
    true
}

/// The caches of a device, whose media are the remembered ones, are about to end in order.
pub fn expect_end(runtime: &RuntimeDir, name: &DeviceName) {
    if let Some(media) = read(runtime, name) {
        write(&runtime.media(name), &Media { is_ending: true, ..media });
    }
}

fn read(runtime: &RuntimeDir, name: &DeviceName) -> Option<Media> {
    serde_json::from_slice(&fs::read(runtime.media(name)).ok()?).ok()
}

/// If the process dies here, the old file remains.
fn write(path: &Path, media: &Media) {
    let new = path.with_extension("media.new");
    let text = serde_json::to_vec(media).unwrap_or_default();
    let _ = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
}

/// Whether a cache of the table may get dirty data.
pub fn may_have_dirty(table: &str, dirty_bytes: u64) -> bool {
    let writes_through =
        |line: &TableLine| line.args.iter().any(|word| word.text == "writethrough");
    let Ok(table) = Table::parse(table) else { return true };
    dirty_bytes > 0 || !table.lines.iter().filter(is_cache).all(writes_through)
}

/// The dead devices whose caches are in `table`, which is about to be opened. Returns an error if
/// the table has the origin of a dead device, but not the cache that the dead server had.
pub fn before(table: &Table, runtime: &RuntimeDir) -> Result<Vec<Dead>> {
    let mut found = Vec::new();
    let mut known = None;
    for name in runtime.names()? {
        let Some(dead) = of(runtime, name) else { continue };
        let known = known.get_or_insert_with(|| platform::known(table, runtime));
        let shares_origin = dead.shares(table, &[WordRole::Origin]);
        if shares_origin {
            dead.refuse_replaced(known)?;
        }
        if dead.has_one_of(known) || dead.shares(table, &MEDIA) {
            found.push(dead);
        }
    }
    Ok(found)
}

/// The same if the user accepts the loss: only the dead devices that share a cache with `table`.
pub fn before_loss(table: &Table, runtime: &RuntimeDir) -> Result<Vec<Dead>> {
    let names = runtime.names()?.into_iter();
    let all = names.filter_map(|name| of(runtime, name));
    Ok(all.filter(|dead| dead.shares(table, &MEDIA)).collect())
}

/// A description of the medium in the place of a cache of the dead device `name`, if it is not that
/// cache.
pub fn replaced(runtime: &RuntimeDir, name: &DeviceName, table: &Table) -> Option<String> {
    let dead = of(runtime, name.clone())?;
    dead.replaced(&platform::known(table, runtime))
}

fn of(runtime: &RuntimeDir, name: DeviceName) -> Option<Dead> {
    if !matches!(Client::find(runtime, &name), Ok(Err(Absent::Died))) {
        return None;
    }
    let table = Table::parse(&fs::read_to_string(runtime.table(&name)).ok()?).ok()?;
    let media = read(runtime, &name).filter(|media| media.boot == boot());
    let was_ending = media.as_ref().is_some_and(|media| media.is_ending);
    let marks = media.map(|media| media.marks).unwrap_or_default();
    Some(Dead { name, table, marks, was_ending })
}

/// The roles of words that name the media of a cache.
const MEDIA: [WordRole; 2] = [WordRole::Cache, WordRole::Metadata];

impl Dead {
    /// Whether one of its caches has a device of `table` in one of these roles.
    fn shares(&self, table: &Table, roles: &[WordRole]) -> bool {
        let theirs = places(table, roles);
        places(&self.table, roles).iter().any(|place| theirs.contains(place))
    }

    fn has_one_of(&self, known: &[Known]) -> bool {
        known.iter().filter_map(|known| known.mark.as_ref()).any(|mark| self.marks.contains(mark))
    }

    /// A description of the medium in the place of a cache, if it is not the cache that the dead
    /// server had.
    fn replaced(&self, known: &[Known]) -> Option<String> {
        if self.marks.is_empty() {
            return None;
        }
        known.iter().filter(|known| !known.accepts_loss).find_map(|known| match &known.mark {
            _ if !known.is_there => Some(format!("{} holds no such cache", known.device)),
            _ if self.was_ending && known.is_at_rest => None,
            Some(mark) if !self.marks.contains(mark) && !known.is_in_memory => {
                Some(format!("{} holds another cache, or an older copy", known.device))
            }
            // The right cache, or a damaged one, which the attach reports.
            _ => None,
        })
    }

    fn refuse_replaced(&self, known: &[Known]) -> Result<()> {
        let Some(found) = self.replaced(known) else { return Ok(()) };
        let name = &self.name;
        let device = medium(&self.table).unwrap_or_default();
        bail!(
            "{name}: its server died, and the cache that it had on {device} may hold acknowledged \
             writes that the origin does not have; but {found}: attach the device that the server \
             used, or give up its data with `udm detach {name} --accept-loss`"
        )
    }

    /// The caches of the device are about to be opened by `table`, and may end in order before
    /// [`Dead::remember_again`].
    pub fn expect_end(&self, runtime: &RuntimeDir, table: &Table) {
        if self.is_remembered_with(table) {
            expect_end(runtime, &self.name);
        }
    }

    fn is_remembered_with(&self, table: &Table) -> bool {
        !self.marks.is_empty() && caches(&self.table) == caches(table)
    }

    /// The caches of the device have been opened by `table` since, and have other marks.
    pub fn remember_again(&self, runtime: &RuntimeDir, table: &Table) {
        if self.is_remembered_with(table) {
            remember(runtime, &self.name, marks(runtime, &table.to_string()));
        }
    }

    /// Forgets the device, if `table` has all of its caches. Returns whether it did.
    pub fn forget_with(&self, runtime: &RuntimeDir, table: &Table) -> Result<bool> {
        let own = caches(&self.table);
        if own == 0 || own != caches(table) {
            return Ok(false);
        }
        let Some(lock) = runtime.try_lock(&self.name)? else { return Ok(false) };
        forget(runtime, &lock)?;
        Ok(true)
    }
}

fn is_cache(line: &&TableLine) -> bool {
    targets::find(&line.target.text).is_some_and(|kind| kind.cache.is_some())
}

fn caches(table: &Table) -> usize {
    table.lines.iter().filter(is_cache).count()
}

/// Removes the files of a dead device, and what its exports have left. Keeps the shared memory,
/// because a label names it. Returns disks that are gone.
pub fn forget(runtime: &RuntimeDir, lock: &NameLock) -> Result<Vec<String>> {
    let name = lock.name();
    // This comes first: after the lock's files are removed, no other file shows that the device
    // existed.
    let home = runtime.path().to_string_lossy();
    let disks = udm_export::ublk::forget(name.as_str(), &home)
        .with_context(|| format!("{name}: removing the disk that its server left behind"))?;
    udm_export::nbd::shared::forget_dead(runtime.path()).with_context(|| {
        format!("{name}: removing files that exports of its server left behind")
    })?;
    runtime.clear(lock, KeepLog::Yes);
    Ok(disks)
}

/// The cache device of the first cache of a table.
fn medium(table: &Table) -> Option<String> {
    let word = |line: &TableLine| {
        let kind = targets::find(&line.target.text).filter(|kind| kind.cache.is_some())?;
        let place = kind.places(&[WordRole::Cache]).next()?;
        line.args.get(place).map(|word| word.text.clone())
    };
    table.lines.iter().find_map(word)
}

/// The devices of a table's caches that have one of these roles: the file or node, and the first
/// byte. One that is gone has its path.
fn places(table: &Table, roles: &[WordRole]) -> Vec<(String, u64)> {
    let place = |device: DeviceWord| {
        let found = match fs::metadata(&device.path) {
            Ok(meta) if meta.rdev() != 0 => format!("node {}", meta.rdev()),
            Ok(meta) => format!("file {} {}", meta.dev(), meta.ino()),
            Err(_) => device.path,
        };
        (found, device.options.area.start())
    };
    let mut found = Vec::new();
    for line in &table.lines {
        let Some(kind) = targets::find(&line.target.text) else { continue };
        if kind.cache.is_none() {
            continue;
        }
        let words = kind.places(roles).filter_map(|nth| line.args.get(nth)?.device().ok());
        found.extend(words.map(place));
    }
    found
}
