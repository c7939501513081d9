//! `remove` and `drain`: where dirty data goes, or stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use udm::units::human_bytes;

use super::print_result;
use crate::args::{DrainArgs, RemoveArgs};
use crate::control::{Absent, Client, wait_for_exit};
use crate::output::print_note;
use crate::process;
use crate::progress::Progress;
use crate::runtime::{DeviceName, KeepLog, RuntimeDir};

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
        print_note(&format!("{name}: removed, but its devices are in use yet: {what}"));
    }
    if let Some(trouble) = left["trouble"].as_str() {
        print_note(&format!("{name}: removed by force: {trouble}"));
    }
    let dirty_bytes = left["dirty_bytes"].as_u64().unwrap_or(0);
    for note in left["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        print_note(&format!("{name}: {note}"));
    }
    let cache = left["cache"].as_str().unwrap_or("device");
    if let Some(why) = left["wipe_failed"].as_str() {
        bail!("{name}: removed, and its cache {cache} is clean, but could not be wiped: {why}");
    }
    let mut text = format!("{name}: removed");
    if left["is_wiped"] == true {
        text += &format!("; the origin has everything, and {cache} is no cache any more");
    }
    if left["is_lost"] == true {
        let bytes = human_bytes(dirty_bytes);
        text += &format!("; {bytes} of dirty data are lost with the deleted cache device");
    } else if dirty_bytes > 0 {
        text += &format!(
            "; {} of dirty data stay in the cache {cache}: `udm create` goes on with them, \
             `udm recover` writes them back",
            human_bytes(dirty_bytes)
        );
    }
    let value = json!({
        "name": name.as_str(),
        "dirty_bytes": dirty_bytes,
        "drained_bytes": drained_bytes,
        "cache": left["cache"],
        "is_wiped": left["is_wiped"] == true,
        "trouble": left["trouble"],
    });
    print_result(args.json, &text, &value)
}

/// Removes the files of a dead server. Its shared memory stays: the next server needs it.
fn clear_dead(runtime: &RuntimeDir, args: &RemoveArgs) -> Result<()> {
    let name = &args.name;
    if args.drain {
        bail!("{name}: its server died, so nothing can be drained; create it again first");
    }
    let Some(lock) = runtime.try_lock(name)? else {
        bail!("{name}: a server for it is starting at this moment");
    };
    // First: with the lock's files goes the knowledge that there was a device.
    let home = runtime.path().to_string_lossy();
    let disks = udm_export::ublk::forget(name.as_str(), &home)
        .with_context(|| format!("{name}: removing the disk that its server has left"))?;
    udm_export::nbd::shared::forget_dead(runtime.path())
        .with_context(|| format!("{name}: removing what doors of its server have left"))?;
    runtime.clear(&lock, KeepLog::Yes);
    let mut text = format!("{name}: its server had died; dirty data stays in the cache");
    for disk in disks {
        text += &format!("; {disk} is gone");
    }
    print_result(args.json, &text, &json!({ "name": name.as_str(), "was_dead": true }))
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
    let text = format!("{}: the origin has everything", args.name);
    print_result(args.json, &text, &value)
}

/// Ctrl-C: the first one is noticed between two steps, a second one ends the command immediately,
/// which is as safe.
#[derive(Debug)]
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Takes SIGINT from now on.
    pub fn take() -> Result<Interrupts> {
        let flag = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register_conditional_shutdown(SIGINT, INTERRUPTED, Arc::clone(&flag))
            .and_then(|_| signal_hook::flag::register(SIGINT, Arc::clone(&flag)))
            .context("take signals")?;
        Ok(Interrupts(flag))
    }

    /// Whether there was one.
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
                bail!("{name}: interrupted; the origin has everything, and the removal goes on");
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
        // While the device comes to rest, answers have no number of bytes.
        left = now["dirty_bytes"].as_u64().unwrap_or(left);
        if interrupts.is_interrupted() {
            return Err(anyhow!(
                "{name}: interrupted; {} of dirty data stay safe in the cache; \
                 the device goes on, and the command may be given again",
                human_bytes(left)
            ));
        }
        progress.update(left, now["is_failing"] == true);
        Ok(())
    });
    let last = wipe.as_mut().unwrap_or(&mut progress);
    let value = value.inspect_err(|_| last.pause())?;
    last.finish();
    Ok((value, progress.done_bytes()))
}
