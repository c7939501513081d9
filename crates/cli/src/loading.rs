//! Tables as users give them: loading one, and comparing whether two are of the same device.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use udm::attaching::AttachProgress;
use udm::device::{Device, DeviceState, LoadedTable};
use udm::disk::TableClaims;
use udm::error::Kind;
use udm::sync::Arc;
use udm::table::{DeviceWord, Table, TableLine};
use udm::target::FactValue;
use udm::targets::{self, WordRole};
use udm::world::{BuildOptions, make_absolute};

use crate::control::{AFTERLIFE_MAX, has_anyone_died};
use crate::ground;
use crate::output::Pointed;
use crate::runtime::RuntimeDir;

/// Time between two tries at devices in use.
const BUSY_EVERY: Duration = Duration::from_millis(20);

/// Tables as they were given.
#[derive(Debug, Default)]
pub struct Given {
    /// The active one.
    pub active: String,
    /// The loaded one that is to replace it.
    pub inactive: Option<String>,
}

impl Given {
    /// The inactive table, if there is one, is active now; or it could not be, and is gone.
    pub fn end_change(&mut self, is_active: bool) {
        if let Some(table) = self.inactive.take().filter(|_| is_active) {
            self.active = table;
        }
    }
}

/// What was loaded.
#[derive(Debug)]
pub struct Loaded {
    /// The cache device, if there is one, as the table names it.
    pub cache: Option<String>,
    /// The table, with absolute paths.
    pub table: String,
}

/// A table's text as a server writes it down: with paths made absolute from `directory`. `None` if
/// it is not a table.
pub fn canonical(text: &str, directory: &Path) -> Option<String> {
    let mut table = Table::parse(text).ok()?;
    make_absolute(&mut table, directory);
    Some(table.to_string())
}

/// Whether two tables, with absolute paths, are of the same device: equal in places, targets and
/// the devices that hold its data permanently. Options may differ, and so may the place of a cache,
/// which has a label of its own.
pub fn is_same_device(one: &str, other: &str) -> bool {
    let lines = |text: &str| {
        let table = Table::parse(text).ok()?;
        Some(table.lines.iter().map(essence).collect::<Vec<_>>())
    };
    lines(one) == lines(other)
}

/// The parts of a table line that identify it.
fn essence(line: &TableLine) -> (u64, u64, String, Vec<String>) {
    let path = |nth: usize| {
        let word = line.args.get(nth)?;
        // Where a part begins says which data it is, as its device's name does.
        let place = |device: DeviceWord| match device.options.area.start() {
            0 => device.path,
            start => format!("{} from byte {start}", device.path),
        };
        Some(word.device().map_or_else(|_| word.text.clone(), place))
    };
    let known = targets::find(&line.target.text);
    let places = known.iter().flat_map(|known| known.places(&[WordRole::Origin, WordRole::Offset]));
    let words = places.filter_map(path).collect();
    (line.start, line.len, line.target.text.clone(), words)
}

/// How a table is loaded.
#[derive(Debug, Default)]
pub struct LoadHow {
    /// Format a cache device even if it may hold something else.
    pub force_format: bool,
    /// This name's own server died.
    pub after_death: bool,
    /// Receives the progress of opening a cache.
    pub progress: Arc<AttachProgress>,
    /// Claims that the device's tables may share.
    pub claims: Arc<TableClaims>,
}

/// Reads a table, opens its devices, and puts it into the inactive slot of `device`. Waits for
/// devices that a dead server, or the I/O that it had in flight, still holds.
pub fn load_table(
    device: &Device,
    text: &str,
    directory: &Path,
    runtime: &RuntimeDir,
    how: &LoadHow,
) -> Result<Loaded> {
    let pointed = |error: udm::error::Error| Pointed::from(text, &error);
    let mut table = Table::parse(text).map_err(pointed)?;
    make_absolute(&mut table, directory);
    device.check_load(&table).map_err(pointed)?;
    let options = BuildOptions {
        force_format: how.force_format,
        is_live: device.info().state != DeviceState::Empty,
        progress: Arc::clone(&how.progress),
        ..BuildOptions::fresh()?
    };
    let build = || ground::build(&table, runtime, &options, &how.claims);
    let mut built = build();
    let deadline = Instant::now() + AFTERLIFE_MAX;
    let may_get_free = || how.after_death || has_anyone_died(runtime);
    while is_busy(&built) && Instant::now() < deadline && may_get_free() {
        thread::sleep(BUSY_EVERY);
        built = build();
    }
    let loaded = built.map_err(pointed)?;
    device.load(loaded)?;
    let cache_word = |line: &TableLine| {
        let place = targets::find(&line.target.text)?.places(&[WordRole::Cache]).next()?;
        line.args.get(place).map(|word| word.text.clone())
    };
    Ok(Loaded { cache: table.lines.iter().find_map(cache_word), table: table.to_string() })
}

fn is_busy(built: &udm::error::Result<LoadedTable>) -> bool {
    built.as_ref().is_err_and(|error| error.kind() == Kind::Busy)
}

/// What the attach found: damage that was tolerated, or a loss.
pub fn attach_notes(device: &Device) -> Vec<String> {
    let facts = device.facts().into_iter().flat_map(|line| line.facts);
    let notes = facts.filter(|fact| fact.name == "attach_note");
    notes
        .filter_map(|note| match note.value {
            FactValue::Text(text) => Some(text),
            _ => None,
        })
        .collect()
}
