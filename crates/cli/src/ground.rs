//! The system's devices and addresses, as a server uses them. The fuzz target `control` replaces
//! this file by simulated ones, so no other file of a server opens any.

use std::thread;
use std::time::{Duration, Instant};

use udm::attaching::AttachProgress;
use udm::device::{Device, LoadedTable};
use udm::disk::TableClaims;
use udm::error::{Kind, Result};
use udm::sync::Arc;
use udm::table::Table;
use udm::world::{self, BuildOptions, SystemOpener};
use udm_export::{Door, Uri};

use crate::control::AFTERLIFE_MAX;
use crate::runtime::RuntimeDir;

/// Time between two tries at an address in use.
const BUSY_EVERY: Duration = Duration::from_millis(20);

/// Opens the devices of a table and makes its targets.
pub fn build(
    table: &Table,
    runtime: &RuntimeDir,
    options: &BuildOptions,
    claims: &Arc<TableClaims>,
) -> Result<LoadedTable> {
    let opener = SystemOpener {
        claims: Arc::clone(claims),
        tune: Some(udm_bench::calibrate::tune),
        ..SystemOpener::with_memory_in(runtime.path())
    };
    world::build(table, &opener, options)
}

/// Wipes the caches of a table. A device that the end of a service has not let go of yet is waited
/// for.
pub fn wipe(table: &Table, runtime: &RuntimeDir, progress: &Arc<AttachProgress>) -> Result<()> {
    let deadline = Instant::now() + AFTERLIFE_MAX;
    loop {
        match world::wipe(table, &SystemOpener::with_memory_in(runtime.path()), progress) {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < deadline => {
                thread::sleep(BUSY_EVERY);
            }
            result => return result,
        }
    }
}

/// Opens a way in. A server that was killed holds its sockets and disks until all its I/O has
/// ended, so an address in use may be free in a moment.
pub fn open_door(device: &Arc<Device>, uri: &Uri, runtime: &RuntimeDir) -> Result<Box<dyn Door>> {
    let home = runtime.path().to_string_lossy();
    let deadline = Instant::now() + AFTERLIFE_MAX;
    loop {
        match udm_export::open(device, uri, &home) {
            Err(error) if error.kind() == Kind::Busy && Instant::now() < deadline => {
                thread::sleep(BUSY_EVERY);
            }
            result => return result,
        }
    }
}
