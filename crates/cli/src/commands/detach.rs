//! `detach`: the fast device is dead, and its origin is used without it. The command reports the
//! known part of the lost data:
//!
//! 1. A live server has the list of cached blocks in memory. A writecache knows the lost blocks
//!    exactly. A pcache knows the cached ranges, and some of that data is also on the origin. If
//!    the server has not met an error of the medium yet, it reads samples of the dirty data.
//! 2. Without a live server, the command reads the medium as `recover` would read it. A readable
//!    medium is not dead, so the command refuses to give it up. The memory of a dead server is
//!    found only by the medium's label.
//! 3. If both fail, the command reports that the lost data is unknown.
//!
//! The command never writes to the origin or to the fast device.

mod files;

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use udm::build::{self, SystemOpener};
use udm::error::Kind;
use udm::recovery::Survey;
use udm::table::{DeviceWord, Table, TableLine, Word};
use udm::targets::{self, WordRole};
use udm::units::human_bytes;

use super::print_result;
use crate::args::DetachArgs;
use crate::control::{Absent, Client, no_answer, wait_for_exit};
use crate::dead;
use crate::runtime::{DeviceName, RuntimeDir};

/// Ranges that are named one by one; `--json` has all.
const NAMED_MAX: usize = 16;

/// The known facts about the lost data.
#[derive(Debug, Default)]
struct Known {
    /// First byte on the origin and length; none if they are unknown.
    ranges: Option<Vec<(u64, u64)>>,
    /// Whether the lost data is exactly these ranges.
    is_exact: bool,
    /// The source of the ranges, or the reason why they are unknown.
    why: String,
    /// Whether the origin is a state that a power cut could have left, if that is known.
    is_consistent: Option<bool>,
}

/// The origin to be detached from its cache, with the device's name and table if they are known.
struct Subject {
    name: Option<DeviceName>,
    origin: DeviceWord,
    table: Option<Table>,
}

/// `udm detach`.
pub fn detach(args: &DetachArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let subject = find(&runtime, &args.device)?;
    let mut server = None;
    let known = match (&subject.name, &subject.table) {
        (Some(name), Some(table)) => match Client::find(&runtime, name)? {
            Ok(mut client) => {
                let known = of_server(&mut client, name)?;
                server = Some(client);
                known
            }
            Err(Absent::Died) => match dead::replaced(&runtime, name, table) {
                Some(why) => Known { why, ..Known::default() },
                None => of_medium(&runtime, table)?,
            },
            Err(absent @ Absent::NoDevice) => return Err(no_answer(&runtime, name, absent)),
        },
        _ => {
            let place = runtime.path().display();
            let why = format!("no table in {place} names this device, and no server uses it");
            Known { why, ..Known::default() }
        }
    };
    let (mut lines, mut value) = told(&args.device, &subject, &known);
    if !args.accept_loss {
        bail!(
            "{}; no change was made: --accept-loss ends the device without this data",
            lines.join("; ")
        );
    }
    if let Some(name) = &subject.name {
        end(&runtime, name, server)?;
        lines.push(format!("{name}: detached; {} is as write-back left it", subject.origin.path));
    }
    value["is_detached"] = json!(subject.name.is_some());
    print_result(args.json, &lines.join("\n"), &value)
}

/// The device of this name, or whose origin this is.
fn find(runtime: &RuntimeDir, device: &str) -> Result<Subject> {
    let table_of = |name: &DeviceName| {
        let text = std::fs::read_to_string(runtime.table(name)).ok()?;
        Table::parse(&text).ok()
    };
    let by_name = device.parse::<DeviceName>().ok();
    if let Some(name) = by_name.filter(|name| runtime.control(name).exists()) {
        let table = table_of(&name).with_context(|| format!("{name}: its table is unknown"))?;
        return one_cache(name, table);
    }
    let origin = Word::new(device).device()?;
    let place = |path: &str| {
        let meta = std::fs::metadata(path).ok()?;
        Some(if meta.rdev() != 0 { (0, meta.rdev()) } else { (meta.dev(), meta.ino()) })
    };
    let Some(here) = place(&origin.path) else {
        bail!("{device}: no such device; `udm ls` lists the devices there are");
    };
    for name in runtime.names()? {
        let Some(table) = table_of(&name) else { continue };
        let start = |word: &DeviceWord| word.options.area.start();
        let is_it =
            |found: &DeviceWord| place(&found.path) == Some(here) && start(found) == start(&origin);
        if origins_of(&table).iter().any(is_it) {
            return one_cache(name, table);
        }
    }
    Ok(Subject { name: None, origin, table: None })
}

/// The device and its only cache. A device with several caches is refused: the command could not
/// tell which cache's loss the user accepts, and it ends the whole device, whose other caches may
/// be alive.
fn one_cache(name: DeviceName, table: Table) -> Result<Subject> {
    let origins = origins_of(&table);
    let count = origins.len();
    match <[DeviceWord; 1]>::try_from(origins) {
        Ok([origin]) => Ok(Subject { name: Some(name), origin, table: Some(table) }),
        Err(_) if count == 0 => bail!("{name}: it has no cache"),
        Err(_) => bail!(
            "{name}: its table has {count} caches, and `detach` takes a device with one: run `udm \
             remove {name} --force`, which leaves dirty data in the caches; then create each line \
             as a device of its own, and detach the one whose cache is dead"
        ),
    }
}

/// The origins of a table's caches.
fn origins_of(table: &Table) -> Vec<DeviceWord> {
    let origin = |line: &TableLine| {
        let kind = targets::find(&line.target.text).filter(|kind| kind.cache.is_some())?;
        let place = kind.places(&[WordRole::Origin]).next()?;
        line.args.get(place)?.device().ok()
    };
    table.lines.iter().filter_map(origin).collect()
}

/// The facts that a live server knows. Refused if its cache device has not failed, and its dirty
/// data can be read.
fn of_server(client: &mut Client, name: &DeviceName) -> Result<Known> {
    let info = client.ask("Info", json!({}))?;
    let lines = info["lines"].as_array().cloned().unwrap_or_default();
    let facts = || lines.iter().flat_map(|line| line["facts"].as_array().into_iter().flatten());
    let fact =
        |name: &str| facts().find(|fact| fact["name"] == name).map(|fact| fact["value"].clone());
    let failure = fact("medium_failure").and_then(|why| why.as_str().map(str::to_owned));
    let has_failed = fact("medium_has_failed") == Some(json!(true));
    let is_known = failure.is_some() || has_failed;
    let held = client.order("OnlyCached", json!({ "sample": !is_known }))?;
    let (samples, unread) = (held["samples"].as_u64(), held["unread"].as_u64());
    let (samples, unread) = (samples.unwrap_or(0), unread.unwrap_or(0));
    if !is_known && unread == 0 {
        let can_be_read = match samples {
            0 => String::new(),
            _ => format!(", and its dirty data can be read ({samples} samples)"),
        };
        bail!(
            "{name}: its cache device has not failed, even if it was deleted{can_be_read}: `udm \
             remove {name} --drain` writes all dirty data back without loss"
        );
    }
    let why = match failure {
        Some(failure) => failure,
        None if is_known => "the cache device has failed".into(),
        None if unread == samples => "dirty data cannot be read from the cache device".into(),
        None => format!(
            "{unread} of {samples} samples of dirty data cannot be read from the cache device: \
             write the rest back first with `udm drain {name}`"
        ),
    };
    let held = held["lines"].as_array().cloned().unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let range = |range: &Value| (number(&range[0]), number(&range[1]));
    let ranges = held.iter().flat_map(|line| line["ranges"].as_array().into_iter().flatten());
    Ok(Known {
        ranges: Some(ranges.map(range).collect()),
        is_exact: held.iter().all(|line| line["is_exact"] == true),
        why: why + " (if it becomes readable again, `udm recover` writes back its dirty data)",
        is_consistent: fact("origin_is_consistent").and_then(|flag| flag.as_bool()),
    })
}

/// The facts on the medium, without a server. Refused if the medium can be read.
fn of_medium(runtime: &RuntimeDir, table: &Table) -> Result<Known> {
    let survey = match build::survey(table, &SystemOpener::with_memory_in(runtime.path())) {
        Ok(survey) => survey,
        Err(error) if matches!(error.kind(), Kind::Refused | Kind::Busy) => {
            bail!("the cache device can be read, so it cannot be detached: {error}");
        }
        Err(error) => {
            let why = format!("its server died, and its cache device cannot be read: {error}");
            return Ok(Known { why, ..Known::default() });
        }
    };
    let Survey { dirty_bytes, sampled, unread, .. } = survey;
    if dirty_bytes > 0 && unread == 0 {
        bail!(
            "the cache device can be read, and has {} that the origin does not have: write it back \
             first with `udm recover`",
            human_bytes(dirty_bytes)
        );
    }
    let mut why = survey.notes.clone();
    if survey.is_all_unread() {
        why.insert(
            0,
            "its server died, and dirty data cannot be read from its cache device".into(),
        );
    } else if unread > 0 {
        why.insert(
            0,
            format!(
                "its server died, and {unread} of {sampled} samples of dirty data cannot be read \
                 from its cache device: write the rest back first with `udm recover`"
            ),
        );
    }
    Ok(Known {
        ranges: Some(survey.ranges),
        is_exact: survey.is_exact,
        why: why.join("; "),
        is_consistent: None,
    })
}

/// Ends the server, or clears up after one that died.
fn end(runtime: &RuntimeDir, name: &DeviceName, server: Option<Client>) -> Result<()> {
    let Some(mut client) = server else {
        let lock = runtime.try_lock(name)?;
        let lock = lock.ok_or_else(|| anyhow!("{name}: a server for it is starting"))?;
        dead::forget(runtime, &lock)?;
        return Ok(());
    };
    let process = client.server_process();
    client.order("Remove", json!({ "drain": false, "force": true }))?;
    wait_for_exit(process);
    Ok(())
}

/// For people and for programs.
fn told(device: &str, subject: &Subject, known: &Known) -> (Vec<String>, Value) {
    let origin = &subject.origin.word.text;
    let mut lines = Vec::new();
    if !known.why.is_empty() {
        lines.push(format!("{device}: {}", known.why));
    }
    let bytes: u64 = known.ranges.iter().flatten().map(|(_, len)| len).sum();
    let at_most = if known.is_exact { "" } else { "at most " };
    match &known.ranges {
        None => lines.push(format!(
            "{device}: it is unknown for which ranges of {origin} the cache had newer data, if for \
             any"
        )),
        Some(ranges) if ranges.is_empty() && known.is_exact => {
            lines.push(format!("{device}: no data is lost: {origin} has all of it"));
        }
        Some(ranges) => {
            let count = ranges.len();
            let size = human_bytes(bytes);
            let ranges_word = if count == 1 { "range" } else { "ranges" };
            let what = format!("{at_most}{size} in {count} {ranges_word} of {origin}");
            lines.push(format!("{device}: lost: {what}"));
            let range = |(at, len): &(u64, u64)| format!("    {len} bytes at byte {at}");
            lines.extend(ranges.iter().take(NAMED_MAX).map(range));
            if count > NAMED_MAX {
                lines.push(format!("    and {} more, which --json lists", count - NAMED_MAX));
            }
        }
    }
    if known.is_consistent == Some(false) {
        lines.push(format!(
            "{device}: {origin} alone does not match any flush: check it before you use it"
        ));
    }
    let found = files::commands(&subject.origin, known.ranges.as_deref().unwrap_or_default());
    lines.extend(found.iter().map(|line| match line.is_command {
        true => format!("    {}", line.text),
        false => format!("{device}: {}", line.text),
    }));
    let commands = found.iter().filter(|line| line.is_command).map(|line| &line.text);
    let range = |(at, len): &(u64, u64)| json!({ "offset": at, "len": len });
    let value = json!({
        "name": subject.name.as_ref().map(DeviceName::as_str),
        "origin": origin,
        "is_known": known.ranges.is_some(),
        "is_exact": known.ranges.is_some() && known.is_exact,
        "lost_bytes": known.ranges.as_ref().map(|_| bytes),
        "lost_ranges": known.ranges.as_ref().map(|all| all.iter().map(range).collect::<Vec<_>>()),
        "origin_is_consistent": known.is_consistent,
        "why": known.why,
        "commands": commands.collect::<Vec<_>>(),
    });
    (lines, value)
}
