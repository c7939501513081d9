//! Resource limits of a server's process that are lower than its device may need.

use rustix::process::{Resource, getrlimit};
use udm::table::Table;
use udm::targets::{self, WordRole};
use udm::units::human_bytes;

/// Descriptors of one connection: its socket, its io_uring, and its wake-up.
const CONNECTION_FILES: u64 = 3;
/// Address space of one connection: the stack of its thread, its io_uring and its buffers.
const CONNECTION_BYTES: u64 = 4 << 20;

/// Notes about the limits of this process, which serves `table` and up to `connections`.
pub fn notes(table: &str, connections: u64) -> Vec<String> {
    let pid = std::process::id();
    let mut notes = Vec::new();
    let file_size = getrlimit(Resource::Fsize).current;
    if let (Some(limit), Some((path, len))) = (file_size, longest_file(table))
        && limit < len
    {
        notes.push(format!(
            "files of this server can have at most {} (ulimit -f), and {path} has {}: writes \
             beyond that fail (EFBIG); `prlimit --pid {pid} --fsize=unlimited:unlimited` lifts the \
             limit",
            human_bytes(limit),
            human_bytes(len)
        ));
    }
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64);
    let files = open + connections * CONNECTION_FILES;
    if let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < files) {
        notes.push(format!(
            "this server can open at most {limit} files (ulimit -n), and may need {files} with \
             {connections} connections: further clients would be refused; `prlimit --pid {pid} \
             --nofile={files}:{files}` raises the limit"
        ));
    }
    let space = address_space() + connections * CONNECTION_BYTES;
    if let Some(limit) = getrlimit(Resource::As).current.filter(|limit| *limit < space) {
        notes.push(format!(
            "this server can use at most {} of address space (ulimit -v), and may need {} with \
             {connections} connections: further clients would be refused; `prlimit --pid {pid} \
             --as=unlimited:unlimited` lifts the limit",
            human_bytes(limit),
            human_bytes(space)
        ));
    }
    notes
}

/// The longest file among the devices of a table.
fn longest_file(table: &str) -> Option<(String, u64)> {
    let roles = [WordRole::Origin, WordRole::Cache, WordRole::Metadata];
    let table = Table::parse(table).ok()?;
    let words = table.lines.iter().flat_map(|line| {
        let places = targets::find(&line.target.text).map(|kind| kind.places(&roles));
        places.into_iter().flatten().filter_map(|nth| line.args.get(nth)?.device().ok())
    });
    let files = words.filter_map(|device| {
        let meta = std::fs::metadata(&device.path).ok()?;
        meta.is_file().then_some((device.path, meta.len()))
    });
    files.max_by_key(|(_, len)| *len)
}

/// Bytes of address space that this process has now.
fn address_space() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}
