//! Tables as users give them: loading a table, and checking whether two tables are of the same
//! device.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use udm::base::attaching::AttachProgress;
use udm::build::{BuildOptions, make_absolute};
use udm::device::{Device, DeviceState, LoadedTable};
use udm::disk::TableClaims;
use udm::error::Kind;
use udm::sync::Arc;
use udm::table::{DeviceWord, Table, TableLine, Word};
use udm::target::FactValue;
use udm::targets::{self, WordRole};

use crate::control::{AFTERLIFE_MAX, has_anyone_died};
use crate::output::{Pointed, shell};
use crate::platform;
use crate::runtime::RuntimeDir;

/// Time between two tries at devices in use.
const BUSY_EVERY: Duration = Duration::from_millis(20);

/// The error about the table `text`. If it advises to add words to the table, the whole line with
/// these words follows.
pub fn with_whole_line(error: anyhow::Error, text: &str) -> anyhow::Error {
    let message = format!("{error:#}");
    let Some(line) = advised_line(&message, text) else { return error };
    let message = format!("{message}; the whole line is `{line}`");
    match error.downcast::<Pointed>() {
        Ok(pointed) => Pointed { message, ..pointed }.into(),
        Err(_) => anyhow!(message),
    }
}

fn advised_line(message: &str, text: &str) -> Option<String> {
    let words = message.split_once("add `")?.1.split_once("` to the table")?.0;
    let words = Word::list(words);
    let (key, value) = (words.first()?, words.get(1)?);
    let Table { mut lines } = Table::parse(text).ok()?;
    if lines.len() > 1 {
        // The message begins with the number of the line in the text.
        let number = message.split_once("table line ")?.1.split([',', ':']).next()?;
        let is_it = |line: &TableLine| {
            line.target.place().is_some_and(|place| Ok(place.line) == number.parse())
        };
        lines.retain(is_it);
    }
    let args = &mut lines.first_mut()?.args;
    match args.iter().position(|word| word == key) {
        Some(nth) if nth + 1 < args.len() => args[nth + 1] = value.clone(),
        _ => args.extend([key.clone(), value.clone()]),
    }
    Some(Table { lines }.to_string().trim_end().to_owned())
}

/// Tables as they were given.
#[derive(Debug, Default)]
pub struct Given {
    /// The active table.
    pub active: String,
    /// The loaded table that is to replace the active one.
    pub inactive: Option<String>,
}

impl Given {
    /// A resume has ended. The inactive table, if there is one, is now active; after a failure it
    /// is dropped.
    pub fn end_change(&mut self, is_active: bool) {
        if let Some(table) = self.inactive.take().filter(|_| is_active) {
            self.active = table;
        }
    }
}

/// The result of a load.
#[derive(Debug)]
pub struct Loaded {
    /// The cache device, if there is one, as the table names it.
    pub cache: Option<String>,
    /// The table, with absolute paths.
    pub table: String,
    /// Notes for the user: one sentence each.
    pub notes: Vec<String>,
}

/// The current directory; empty if it was deleted. Then absolute paths still work.
pub fn current_directory() -> PathBuf {
    std::env::current_dir().unwrap_or_default()
}

/// A table's text as a server writes it down: with paths made absolute from `directory`. `None` if
/// it is not a table.
pub fn canonical(text: &str, directory: &Path) -> Option<String> {
    let mut table = Table::parse(text).ok()?;
    make_absolute(&mut table, directory).ok()?;
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
        // The start of a part identifies its data, as its device's name does.
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

/// The commands that write back what the caches of a table have, as a shell takes them.
pub fn recoveries(text: &str) -> Vec<String> {
    let Ok(table) = Table::parse(text) else { return Vec::new() };
    table.lines.iter().filter_map(recovery_of).collect()
}

fn recovery_of(line: &TableLine) -> Option<String> {
    let kind = targets::find(&line.target.text)?;
    let cache = kind.cache.as_ref()?;
    let of = |role| line.args.get(kind.places(&[role]).next()?)?.device().ok();
    let (fast, origin) = (of(WordRole::Cache)?, of(WordRole::Origin)?);
    let mut words = vec![fast.word.text.clone(), origin.word.text];
    if cache.has_metadata_device {
        let metadata = of(WordRole::Metadata)?;
        match is_front_of(&metadata, &fast) {
            true => words[0] = metadata.path,
            false => words.insert(0, metadata.word.text),
        }
    }
    let mut options = line.args.iter().skip_while(|word| word.text != "start_sector");
    if let Some(sector) = options.nth(1).filter(|_| cache.begins_anywhere) {
        words.extend(["--start-sector".into(), sector.text.clone()]);
    }
    let words: Vec<String> = words.iter().map(|word| shell(word)).collect();
    Some(format!("udm recover {}", words.join(" ")))
}

/// Whether the metadata is at the front of the device whose rest has the blocks, as `create --fast`
/// lays it out: then the device alone names both.
fn is_front_of(metadata: &DeviceWord, blocks: &DeviceWord) -> bool {
    let (front, rest) = (metadata.options.area, blocks.options.area);
    metadata.path == blocks.path && front.start() == 0 && front.len_bytes() == Some(rest.start())
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
    make_absolute(&mut table, directory).map_err(pointed)?;
    device.check_load(&table).map_err(pointed)?;
    let options = BuildOptions {
        force_format: how.force_format,
        is_live: device.info().state != DeviceState::Empty,
        progress: Arc::clone(&how.progress),
        ..BuildOptions::fresh()?
    };
    let build = || platform::build(&table, runtime, &options, &how.claims);
    let mut built = build();
    let deadline = Instant::now() + AFTERLIFE_MAX;
    let may_get_free = || how.after_death || has_anyone_died(runtime);
    while is_busy(&built) && Instant::now() < deadline && may_get_free() {
        thread::sleep(BUSY_EVERY);
        built = build();
    }
    let loaded = built.map_err(pointed)?;
    let mut notes = udm::build::left_out(&table, &loaded);
    notes.extend(udm::build::doubts(&table));
    device.load(loaded)?;
    let cache_word = |line: &TableLine| {
        let place = targets::find(&line.target.text)?.places(&[WordRole::Cache]).next()?;
        line.args.get(place).map(|word| word.text.clone())
    };
    // The attach has used up what the user allowed for it.
    let table = targets::without_consents(&table);
    let cache = table.lines.iter().find_map(cache_word);
    Ok(Loaded { cache, table: table.to_string(), notes })
}

fn is_busy(built: &udm::error::Result<LoadedTable>) -> bool {
    built.as_ref().is_err_and(|error| error.kind() == Kind::Busy)
}

/// The findings of the attach: tolerated damage, or a loss.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_ends_with_the_whole_line() {
        let told = |message: &str, table: &str| {
            format!("{:#}", with_whole_line(anyhow!("{message}"), table))
        };
        let message = "table line 2, column 3: it is lost; add `lost_memory accept` to the table";
        let table = "0 8 zero\n8 8 pcache /a\\ b c 0 lost_memory refuse max_age 5\n16 8 zero";
        assert_eq!(
            told(message, table),
            format!(
                "{message}; the whole line is `8 8 pcache /a\\ b c 0 lost_memory accept max_age 5`"
            )
        );
        let table = "# a comment\n0 8 writecache s o f 4096 1 cleaner";
        let message = "table line 2: or add `rebind true` to the table to go on";
        assert!(
            told(message, table).ends_with("is `0 8 writecache s o f 4096 1 cleaner rebind true`")
        );
        // A text that is not a table does not change the error.
        assert_eq!(told("add `rebind true` to the table", "?"), "add `rebind true` to the table");
        assert_eq!(told("wrong", table), "wrong");
    }
}
