//! Every stated maximum of the engine, by name: what `udm info NAME --limits` prints.

use crate::buffer::{CLIENT_POOL_BYTES_MAX, POOL_BYTES_MAX};
use crate::device::{LATE_SECONDS, NAME_BYTES_MAX, PORTS_MAX};
use crate::pcache;
use crate::pmem::MAPPINGS_MAX;
use crate::table::{LINE_WORDS_MAX, TABLE_BYTES_MAX, TABLE_LINES_MAX, TARGET_NAME_BYTES_MAX};
use crate::units::BIO_BYTES_MAX;

/// A maximum, with its name (unit last) and what it bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Snake-case name with its unit last.
    pub name: &'static str,
    /// The most there can be.
    pub value: u64,
    /// What it bounds, in a few words.
    pub about: &'static str,
}

/// A maximum.
pub const fn limit(name: &'static str, value: u64, about: &'static str) -> Limit {
    Limit { name, value, about }
}

/// The engine's maxima, those of the targets included.
pub fn limits() -> Vec<Limit> {
    let mut all = vec![
        limit("table_bytes", TABLE_BYTES_MAX as u64, "a table's text"),
        limit("table_lines", TABLE_LINES_MAX as u64, "lines of a table"),
        limit("table_line_words", LINE_WORDS_MAX as u64, "words of a line"),
        limit("target_name_bytes", TARGET_NAME_BYTES_MAX as u64, "a target's name"),
        limit("device_name_bytes", NAME_BYTES_MAX as u64, "a device's name within the engine"),
        limit("device_ports", PORTS_MAX as u64, "threads that use a device at a time"),
        limit("request_bytes", BIO_BYTES_MAX, "one request to a target"),
        limit("pool_bytes", POOL_BYTES_MAX as u64, "free buffers that a thread keeps for reuse"),
        limit(
            "client_pool_bytes",
            CLIENT_POOL_BYTES_MAX as u64,
            "the same, of a thread that serves a client",
        ),
        limit("late_seconds", LATE_SECONDS, "a request in flight for longer is reported"),
        limit("cache_devices", MAPPINGS_MAX as u64, "cache devices that a process maps"),
    ];
    all.extend(pcache::limits());
    all.extend(crate::writecache::limits());
    all
}
