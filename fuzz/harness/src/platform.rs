//! Replaces the system's devices by small ones in the memory of this thread, and allows sockets
//! only in the runtime directory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use udm::base::attaching::AttachProgress;
use udm::build::{self, BuildOptions, Opener};
use udm::device::{Device, LoadedTable};
use udm::disk::{Disk, RamDisk, TableClaims};
use udm::error::{Error, Kind, Result};
use udm::pcache::layout::{Geometry, SEGMENTS_AT};
use udm::pmem::sim::SimPmem;
use udm::pmem::{Persistence, Pmem};
use udm::shm::SharedStore;
use udm::sync::Arc;
use udm::table::{DeviceWord, Table};
use udm::units::KIB;
use udm_export::nbd::uri::Place;
use udm_export::socket::Access;
use udm_export::{Export, Uri, nbd};

use crate::known::Known;
use crate::runtime::RuntimeDir;

/// Bytes of each slow device.
pub const DISK_BYTES: u64 = 256 * KIB;
const SEGMENT_BYTES: u64 = 32 * KIB;

thread_local! {
    static DEVICES: RefCell<Rc<Devices>> = RefCell::new(Rc::new(Devices::new()));
}

/// All devices that a table can name.
struct Devices {
    disks: [(&'static str, Arc<RamDisk>); 3],
    pmems: [(&'static str, Arc<SimPmem>); 2],
    shared_stores: RefCell<HashMap<String, SharedStore>>,
}

impl Devices {
    fn new() -> Devices {
        let disk = |name| (name, Arc::new(RamDisk::new(DISK_BYTES, 512).named(name)));
        let pmem = |name, bytes| (name, Arc::new(SimPmem::new(bytes, Persistence::Cpu)));
        Devices {
            disks: ["disk", "other", "ssd"].map(disk),
            pmems: [pmem("log", SEGMENTS_AT + 12 * SEGMENT_BYTES), pmem("fast", DISK_BYTES)],
            shared_stores: RefCell::default(),
        }
    }
}

/// The device with the name `word`, for one table at a time, like the system's.
fn take<T>(devices: &[(&'static str, Arc<T>)], word: &DeviceWord) -> Result<Arc<T>> {
    let last = word.path.rsplit('/').next();
    match devices.iter().find(|(name, _)| Some(*name) == last) {
        Some((_, device)) if Arc::strong_count(device) == 1 => Ok(device.clone()),
        // Not `Busy`: a server retries that for some seconds.
        Some(_) => Err(Error::new(Kind::Refused, format!("{}: it is in use", word.path))),
        None => Err(Error::new(Kind::NotFound, format!("{}: no such device", word.path))),
    }
}

impl Opener for Devices {
    fn disk(&self, word: &DeviceWord) -> Result<Arc<dyn Disk>> {
        Ok(take(&self.disks, word)?)
    }

    fn pmem(&self, word: &DeviceWord) -> Result<Arc<dyn Pmem>> {
        Ok(take(&self.pmems, word)?)
    }

    fn shared_store(&self, target: &'static str, path: &str) -> Result<SharedStore> {
        let mut shared_stores = self.shared_stores.borrow_mut();
        Ok(shared_stores
            .entry(format!("{target} {path}"))
            .or_insert_with(|| SharedStore::one(0))
            .clone())
    }
}

/// New devices, all zeroes.
pub fn renew() {
    DEVICES.set(Rc::new(Devices::new()));
}

/// Opens the devices of a table and makes its targets.
pub fn build(
    table: &Table,
    _: &RuntimeDir,
    options: &BuildOptions,
    _: &Arc<TableClaims>,
) -> Result<LoadedTable> {
    let geometry = Geometry { segment_bytes: SEGMENT_BYTES, device_bytes_min: 0 };
    let options = BuildOptions { geometry: Some(geometry), ..options.clone() };
    build::build(table, &*DEVICES.with_borrow(Rc::clone), &options)
}

/// The facts of a dead server's caches are not compared here.
pub fn known(_: &Table, _: &RuntimeDir) -> Vec<Known> {
    Vec::new()
}

/// Wipes the caches of a table.
pub fn wipe(table: &Table, _: &RuntimeDir, progress: &Arc<AttachProgress>) -> Result<()> {
    build::wipe(table, &*DEVICES.with_borrow(Rc::clone), progress)
}

/// Opens an export if it is a socket in our folder.
pub fn open_export(device: &Arc<Device>, uri: &Uri, _: &RuntimeDir) -> Result<Box<dyn Export>> {
    match uri {
        Uri::Nbd(nbd::Uri { place: Place::Unix(path, access), tls: None, name: None, .. })
            if path.parent() == Some(&*crate::calls::folder()) && *access == Access::default() =>
        {
            udm_export::open(device, uri, "")
        }
        _ => Err(Error::new(Kind::Refused, format!("{uri}: not here"))),
    }
}
