//! The system's devices and addresses, as a server uses them. The fuzz target `control` replaces
//! this file by simulated ones, so no other file of a server opens any.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use udm::base::attaching::AttachProgress;
use udm::build::{self, BuildOptions, Opener, SystemOpener};
use udm::device::{Device, LoadedTable};
use udm::disk::TableClaims;
use udm::error::{Kind, Result};
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::shm::{Served, SharedStore};
use udm::sync::Arc;
use udm::table::{DeviceWord, Table, TableLine};
use udm::targets;
use udm_export::{Export, Uri};

use crate::control::AFTERLIFE_MAX;
use crate::known::Known;
use crate::runtime::RuntimeDir;

/// Time between the first two tries at an address in use.
const BUSY_EVERY: Duration = Duration::from_millis(20);
/// Time between two later tries: to the owner of the address, each try is a client that connects
/// and disconnects.
const BUSY_EVERY_MAX: Duration = Duration::from_millis(500);

/// Opens the devices of a table and makes its targets.
pub fn build(
    table: &Table,
    runtime: &RuntimeDir,
    options: &BuildOptions,
    claims: &Arc<TableClaims>,
) -> Result<LoadedTable> {
    let opener = SystemOpener {
        claims: Arc::clone(claims),
        tunes: true,
        ..SystemOpener::with_memory_in(runtime.path())
    };
    build::build(table, &opener, options)
}

fn accepts_loss(line: &TableLine) -> bool {
    line.args.windows(2).any(|pair| pair[0].text == "lost_memory" && pair[1].text == "accept")
}

/// The facts that identify the caches of a table. This only reads, even from devices in use.
pub fn known(table: &Table, runtime: &RuntimeDir) -> Vec<Known> {
    let open = |word: &DeviceWord| -> Result<Arc<dyn Pmem>> {
        let word = SystemOpener::without_memory().resolve(word)?;
        let pmem = DaxPmem::open_read_only(Path::new(&word.path), word.options.area)?;
        Ok(Arc::new(pmem))
    };
    let shared_store = |target| SharedStore::folder(runtime.path(), target, None);
    let known = |line: &TableLine| {
        let (device, mark) = targets::mark_of(line, &open, &shared_store)?;
        let device = device.word.text;
        // The attach will report why the cache cannot be read.
        let mark = mark.ok()?;
        let served = mark.as_ref().and_then(|mark| mark.served.as_ref());
        let is_left = |served: &Served| served.is_of_this_boot && Path::new(&served.place).exists();
        Some(Known {
            device,
            is_in_memory: served.is_some_and(is_left),
            is_there: mark.is_some(),
            is_at_rest: mark.is_some() && served.is_none(),
            accepts_loss: accepts_loss(line),
            mark: mark.and_then(|mark| mark.attach).map(|attach| format!("{attach:016x}")),
        })
    };
    table.lines.iter().filter_map(known).collect()
}

/// Wipes the caches of a table. Waits for a device that the end of a service has not closed yet.
pub fn wipe(table: &Table, runtime: &RuntimeDir, progress: &Arc<AttachProgress>) -> Result<()> {
    let deadline = Instant::now() + AFTERLIFE_MAX;
    loop {
        match build::wipe(table, &SystemOpener::with_memory_in(runtime.path()), progress) {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < deadline => {
                thread::sleep(BUSY_EVERY);
            }
            result => return result,
        }
    }
}

/// Opens an export. A server that was killed holds its sockets and disks until all its I/O has
/// ended, so an address in use may be free in a moment.
pub fn open_export(
    device: &Arc<Device>,
    uri: &Uri,
    runtime: &RuntimeDir,
) -> Result<Box<dyn Export>> {
    let home = runtime.path().to_string_lossy();
    let deadline = Instant::now() + AFTERLIFE_MAX;
    let mut pause = BUSY_EVERY;
    loop {
        match udm_export::open(device, uri, &home) {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < deadline => {
                thread::sleep(pause);
                pause = (2 * pause).min(BUSY_EVERY_MAX);
            }
            result => return result,
        }
    }
}
