//! Table lines: parsed, printed, parsed again, and made into targets over simulated devices.

use std::sync::Arc;

use udm::build::{self, BuildOptions, NamedDevices};
use udm::disk::RamDisk;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::table::{self, Table};
use udm::units::MIB;

/// The names that a table line may use.
fn devices() -> NamedDevices {
    let mut devices = NamedDevices::new();
    for (name, bytes) in [("disk", 8 * MIB), ("b", MIB), ("/dev/sdb", 64 * MIB)] {
        devices.add_disk(name, Arc::new(RamDisk::new(bytes, 512).named(name)));
    }
    for (name, bytes) in [("c", 512 * MIB), ("small", MIB), ("/dev/pmem0", 600 * MIB)] {
        devices.add_pmem(name, Arc::new(SimPmem::new(bytes, Persistence::Cpu)));
    }
    devices
}

/// The text of a table, as a user or a control message may send it.
pub fn table(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let parsed = match Table::parse_bytes(bytes) {
        Ok(parsed) => parsed,
        Err(error) => return check_error(&text, &error),
    };
    let printed = parsed.to_string();
    let again = Table::parse(&printed);
    assert_eq!(again.as_ref().ok(), Some(&parsed), "{printed:?} is not {text:?}: {again:?}");
    if let Err(error) = build::check(&parsed) {
        check_error(&text, &error);
    }
    let options = BuildOptions::named(1);
    match build::build(&parsed, &devices(), &options) {
        Err(error) => check_error(&text, &error),
        Ok(loaded) => assert!(build::check(&parsed).is_ok(), "{loaded:?} was built unchecked"),
    }
}

/// An error is one line, and its place can be drawn.
fn check_error(text: &str, error: &udm::error::Error) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
    if let Some(drawn) = table::pointer(text, error) {
        assert_eq!(drawn.matches('\n').count(), 1, "{drawn:?}");
    }
}
