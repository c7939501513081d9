//! `remove` and `drain`: dirty data is written back, or remains in the cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use udm::build::{self, SystemOpener};
use udm::error::Kind;
use udm::table::Table;
use udm::targets;
use udm::units::human_bytes;

use super::print_result;
use crate::args::{DrainArgs, RemoveArgs};
use crate::control::{Absent, Client, wait_for_exit};
use crate::dead;
use crate::loading::recoveries;
use crate::output::print_note;
use crate::process;
use crate::progress::Progress;
use crate::runtime::{DeviceName, RuntimeDir};

/// The exit code of a command that Ctrl-C ended immediately, as shells have it.
const INTERRUPTED: i32 = 130;

/// `udm remove`.
pub fn remove(args: &RemoveArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let name = &args.name;
    if args.force
        && let Err(Absent::Died) = Client::find(&runtime, name)?
    {
        return clear_dead(&runtime, args);
    }
    let mut client = Client::connect(&runtime, name)?;
    let (process, pid) = (client.server_process(), client.server_pid());
    let parameters = json!({ "drain": args.drain, "force": args.force, "wipe": args.wipe });
    let (left, drained_bytes) = if args.drain {
        follow(&mut client, name, "Remove", parameters)?
    } else {
        (client.order("Remove", parameters)?, 0)
    };
    if !wait_for_exit(process) {
        let what = pid.map(process::doing).unwrap_or_default();
        print_note(&format!("{name}: removed, but its devices are still in use: {what}"));
    }
    if let Some(trouble) = left["trouble"].as_str() {
        print_note(&format!("{name}: removed by force: {trouble}"));
    }
    let dirty_bytes = left["dirty_bytes"].as_u64().unwrap_or(0);
    for note in left["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        print_note(&format!("{name}: {note}"));
    }
    note_unmarked(name, &left);
    let cache = left["cache"].as_str().unwrap_or("device");
    if let Some(why) = left["wipe_failed"].as_str() {
        bail!("{name}: removed, and its cache {cache} is clean, but could not be wiped: {why}");
    }
    let commands = left["recover"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let recover = commands.collect::<Vec<_>>().join("` and `");
    let mut text = format!("{name}: removed");
    if left["is_wiped"] == true {
        text += &format!("; all dirty data is written back, and the cache on {cache} is erased");
    }
    if left["is_lost"] == true {
        let bytes = human_bytes(dirty_bytes);
        text += &format!("; {bytes} of dirty data are lost with the deleted cache device");
    } else if dirty_bytes > 0 && left["medium_failure"].is_string() {
        let bytes = human_bytes(dirty_bytes);
        text += &format!(
            "; {bytes} of dirty data were in the cache {cache}, which has failed: `{recover}` \
             writes back the readable part, and the rest is lost"
        );
    } else if dirty_bytes > 0 {
        text += &format!(
            "; {} of dirty data stay in the cache {cache}: `udm create` reopens the cache with \
             them, `{recover}` writes them back",
            human_bytes(dirty_bytes)
        );
    }
    let value = json!({
        "name": name.as_str(),
        "dirty_bytes": dirty_bytes,
        "drained_bytes": drained_bytes,
        "cache": left["cache"],
        "recover": left["recover"],
        "is_wiped": left["is_wiped"] == true,
        "medium_failure": left["medium_failure"],
        "trouble": left["trouble"],
    });
    print_result(args.json, &text, &value)
}

/// Warns if the cache may be used again, and will not notice changes of its origin.
fn note_unmarked(name: &DeviceName, left: &Value) {
    let may_be_used_again = left["cache"].is_string()
        && left["is_wiped"] != true
        && left["is_lost"] != true
        && left["medium_failure"].is_null();
    if may_be_used_again && left["is_origin_marked"] == false {
        print_note(&format!(
            "{name}: the state of the origin could not be recorded, so udm will not notice if \
             another program changes the origin from now on: before you use it without the cache, \
             create the device again and run `udm remove {name} --drain --wipe`"
        ));
    }
}

/// Removes the files of a dead server. Its shared memory is kept, because the next server needs it.
fn clear_dead(runtime: &RuntimeDir, args: &RemoveArgs) -> Result<()> {
    let name = &args.name;
    if args.drain {
        bail!("{name}: its server died, so it cannot be drained; create it again first");
    }
    let Some(lock) = runtime.try_lock(name)? else {
        bail!("{name}: a server for it is starting now");
    };
    let table = std::fs::read_to_string(runtime.table(name)).unwrap_or_default();
    let (fate, is_there) = fate_of_dead(runtime, &table);
    let disks = dead::forget(runtime, &lock)?;
    let mut text = format!("{name}: its server had died{fate}");
    let recover = if is_there { recoveries(&table) } else { Vec::new() };
    if !recover.is_empty() {
        text += &format!(": `{}` writes it back", recover.join("` and `"));
    }
    for disk in disks {
        text += &format!("; {disk} is deleted");
    }
    print_result(
        args.json,
        &text,
        &json!({ "name": name.as_str(), "was_dead": true, "recover": recover }),
    )
}

/// A sentence about the dirty data of a dead server, as far as its cache shows; and whether any of
/// it can be written back.
fn fate_of_dead(runtime: &RuntimeDir, table: &str) -> (String, bool) {
    let opener = SystemOpener::with_memory_in(runtime.path());
    let (mut fates, mut is_there) = (String::new(), false);
    for line in Table::parse(table).map_or_else(|_| Vec::new(), |table| table.lines) {
        let is_cache = |kind: &targets::TargetType| kind.cache.is_some();
        if !targets::find(&line.target.text).is_some_and(is_cache) {
            continue;
        }
        let surveyed = build::survey(&Table { lines: vec![line] }, &opener);
        is_there |= surveyed.as_ref().map_or_else(
            |error| matches!(error.kind(), Kind::Refused | Kind::Busy),
            |survey| survey.dirty_bytes > 0 && !survey.is_all_unread(),
        );
        fates += &match surveyed {
            Ok(survey) if survey.unread > 0 => format!(
                "; its cache has {} of dirty data, of which the unreadable part is lost",
                human_bytes(survey.dirty_bytes)
            ),
            Ok(survey) if survey.dirty_bytes == 0 => "; its cache has no dirty data".to_owned(),
            Ok(_) => "; dirty data stays in the cache".to_owned(),
            Err(error) if matches!(error.kind(), Kind::Refused | Kind::Busy) => {
                format!("; dirty data stays in the cache ({error})")
            }
            Err(error) => format!(
                "; its cache cannot be read, so its dirty data is lost unless it becomes readable \
                 again ({error})"
            ),
        };
    }
    (fates, is_there)
}

/// `udm drain`.
pub fn drain(args: &DrainArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let mut client = Client::connect(&runtime, &args.name)?;
    let (left, drained_bytes) = follow(&mut client, &args.name, "Drain", json!({}))?;
    let value = json!({
        "name": args.name.as_str(),
        "dirty_bytes": left["dirty_bytes"],
        "drained_bytes": drained_bytes,
    });
    let text = match left["dirty_bytes"].as_u64() {
        None | Some(0) => format!("{}: all dirty data is written back", args.name),
        Some(since) => format!(
            "{}: all data from before the drain is written back; {} were written since, and are \
             dirty",
            args.name,
            human_bytes(since)
        ),
    };
    print_result(args.json, &text, &value)
}

/// Ctrl-C: the first one is noticed between two steps, a second one ends the command immediately,
/// which is as safe.
#[derive(Debug)]
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Handles SIGINT from now on.
    pub fn take() -> Result<Interrupts> {
        let flag = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register_conditional_shutdown(SIGINT, INTERRUPTED, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&flag)))
            .context("take signals")?;
        Ok(Interrupts(flag))
    }

    /// Whether SIGINT has arrived.
    pub fn is_interrupted(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Reads the progress of work that writes everything back.
fn follow(
    client: &mut Client,
    name: &DeviceName,
    method: &str,
    parameters: Value,
) -> Result<(Value, u64)> {
    let interrupts = Interrupts::take()?;
    let mut progress = Progress::new(format!("drain {name}"));
    let mut wipe = None;
    let mut left = 0;
    let value = client.follow(method, parameters, &mut |now| {
        if let Some(bytes) = now.get("wipe_bytes") {
            if interrupts.is_interrupted() {
                bail!(
                    "{name}: interrupted; all dirty data is written back, and the removal continues"
                );
            }
            if let Some(bytes) = bytes.as_u64() {
                let wipe = wipe.get_or_insert_with(|| {
                    progress.finish();
                    Progress::of_wipe(format!("wipe {name}"))
                });
                wipe.update(bytes, false);
            }
            return Ok(());
        }
        // While the device comes to rest, answers do not contain a number of bytes.
        left = now["left_bytes"].as_u64().or(now["dirty_bytes"].as_u64()).unwrap_or(left);
        if interrupts.is_interrupted() {
            return Err(anyhow!(
                "{name}: interrupted; {} of dirty data are still safe in the cache, and the device \
                 still serves: run the command again to continue",
                human_bytes(left)
            ));
        }
        progress.wait_for(now["waits_for"].as_str());
        progress.update(left, now["is_failing"] == true);
        Ok(())
    });
    let last = wipe.as_mut().unwrap_or(&mut progress);
    let value = value.inspect_err(|_| last.pause())?;
    last.finish();
    Ok((value, progress.done_bytes()))
}
