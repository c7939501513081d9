//! `detach`: the fast device is dead, and its origin goes on without it. What that costs is said as
//! far as anybody knows it:
//!
//! 1. A server that lives knows in memory what its cache had. A writecache knows it exactly; a
//!    pcache knows what it had cached, of which some was on the origin, too.
//! 2. Without one, the medium is read as `recover` would read it. If it can be read, it is not
//!    dead, and nothing is given up here. What a dead server held in memory is found by the
//!    medium's label alone.
//! 3. Where both fail, that is what is said.
//!
//! Nothing is ever written to the origin, nor to the fast device.

mod files;

use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use udm::error::Kind;
use udm::table::{DeviceWord, Table, TableLine, Word};
use udm::targets::{self, WordRole};
use udm::units::human_bytes;
use udm::world::{self, SystemOpener};

use super::print_result;
use crate::args::DetachArgs;
use crate::control::{Absent, Client, no_answer, wait_for_exit};
use crate::runtime::{DeviceName, KeepLog, RuntimeDir};

/// Ranges that are named one by one; `--json` has all.
const NAMED_MAX: usize = 16;

/// What is known of what is lost.
#[derive(Debug, Default)]
struct Known {
    /// First byte on the origin and length; none if nobody knows.
    ranges: Option<Vec<(u64, u64)>>,
    /// Whether all of them is lost, and nothing else.
    is_exact: bool,
    /// Where that comes from, or why nobody knows.
    why: String,
    /// Whether the origin is a state that a power cut could have left, if that is known.
    is_consistent: Option<bool>,
}

/// What is to be detached.
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
            Err(Absent::Died) => of_medium(&runtime, table)?,
            Err(absent @ Absent::NoDevice) => return Err(no_answer(&runtime, name, absent)),
        },
        _ => {
            let place = runtime.path().display();
            let why = format!("no table in {place} names it, and no server has it");
            Known { why, ..Known::default() }
        }
    };
    let (mut lines, mut value) = told(&args.device, &subject, &known);
    if !args.accept_loss {
        bail!("{}; nothing was changed: --accept-loss goes on without it", lines.join("; "));
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
        let table = table_of(&name).with_context(|| format!("{name}: its table is not known"))?;
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

/// The device and its cache. With several, nobody could tell which one's loss is accepted, and a
/// device is ended whole: its other caches may live.
fn one_cache(name: DeviceName, table: Table) -> Result<Subject> {
    let origins = origins_of(&table);
    let count = origins.len();
    match <[DeviceWord; 1]>::try_from(origins) {
        Ok([origin]) => Ok(Subject { name: Some(name), origin, table: Some(table) }),
        Err(_) if count == 0 => bail!("{name}: it has no cache"),
        Err(_) => bail!(
            "{name}: its table has {count} caches, and `detach` gives up a device with one: `udm \
             remove {name} --force` ends it, with dirty data left in its caches; create each line \
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

/// What a server that lives knows. Refused if its cache lives, too.
fn of_server(client: &mut Client, name: &DeviceName) -> Result<Known> {
    let info = client.ask("Info", json!({}))?;
    let lines = info["lines"].as_array().cloned().unwrap_or_default();
    let facts = || lines.iter().flat_map(|line| line["facts"].as_array().into_iter().flatten());
    let fact =
        |name: &str| facts().find(|fact| fact["name"] == name).map(|fact| fact["value"].clone());
    let failure = fact("medium_failure").and_then(|why| why.as_str().map(str::to_owned));
    let has_failed = fact("medium_has_failed") == Some(json!(true));
    if failure.is_none() && !has_failed {
        bail!(
            "{name}: its cache device has not failed, though it may have been deleted: `udm remove \
             {name} --drain` writes all back, and loses nothing"
        );
    }
    let held = client.ask("OnlyCached", json!({}))?;
    let held = held["lines"].as_array().cloned().unwrap_or_default();
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let range = |range: &Value| (number(&range[0]), number(&range[1]));
    let ranges = held.iter().flat_map(|line| line["ranges"].as_array().into_iter().flatten());
    Ok(Known {
        ranges: Some(ranges.map(range).collect()),
        is_exact: held.iter().all(|line| line["is_exact"] == true),
        why: failure.unwrap_or_else(|| "the cache device has failed".into())
            + " (should it be read again one day, `udm recover` writes back what it has)",
        is_consistent: fact("origin_is_consistent").and_then(|flag| flag.as_bool()),
    })
}

/// What the medium says without a server. Refused if it can be read.
fn of_medium(runtime: &RuntimeDir, table: &Table) -> Result<Known> {
    let salvaged = world::salvage(table, &SystemOpener::with_memory_in(runtime.path()));
    let salvage = match salvaged {
        Ok((salvage, _origin)) => salvage,
        Err(error) if matches!(error.kind(), Kind::Refused | Kind::Busy) => {
            bail!("the cache device can be read, and is not given up: {error}");
        }
        Err(error) => {
            let why = format!("its server died, and its cache device cannot be read: {error}");
            return Ok(Known { why, ..Known::default() });
        }
    };
    let dirty = salvage.dirty_bytes();
    if dirty > 0 {
        bail!(
            "the cache device can be read, and has {} that the origin has not: `udm recover` \
             writes it back first",
            human_bytes(dirty)
        );
    }
    Ok(Known {
        is_exact: !salvage.has_more,
        ranges: Some(salvage.lost()),
        why: salvage.notes.join("; "),
        is_consistent: None,
    })
}

/// Ends the server, or clears up after one that died.
fn end(runtime: &RuntimeDir, name: &DeviceName, server: Option<Client>) -> Result<()> {
    let Some(mut client) = server else {
        let lock = runtime.try_lock(name)?;
        let lock = lock.ok_or_else(|| anyhow!("{name}: a server for it is starting"))?;
        runtime.clear(&lock, KeepLog::Yes);
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
            "{device}: nothing is known of which ranges of {origin} the cache had newer data for, \
             or whether it had any"
        )),
        Some(ranges) if ranges.is_empty() && known.is_exact => {
            lines.push(format!("{device}: nothing is lost: {origin} has everything"));
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
        lines.push(format!("{device}: {origin} alone is no state of any flush: check it first"));
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
