//! `recover`: bring an origin up to date from its cache, without a server.
//!
//! The cache is opened as a device without doors, drained, and closed again. This is the same code
//! that drains a served device, so an interruption, even a kill, loses nothing and the next
//! `recover` continues.

mod cut;
mod metadata;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::json;
use udm::device::Device;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::target::FactValue;
use udm::targets::{Recovery, caches};
use udm::units::human_bytes;

use super::inspect::look_at;
use super::print_result;
use super::remove::Interrupts;
use crate::args::RecoverArgs;
use crate::attaching::{Shown, watched};
use crate::loading::attach_notes;
use crate::loading::{LoadHow, load_table};
use crate::output::print_note;
use crate::progress::Progress;
use crate::runtime::RuntimeDir;
use crate::served::come_to_rest;
use crate::work::Watch;

/// Time between two checks of how much is left.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// `udm recover`.
pub fn recover(args: &RecoverArgs) -> Result<()> {
    if let Some(origin) = &args.cache_origin {
        return metadata::recover(args, origin);
    }
    if let Some((kind, found)) = cut::find(args)? {
        return cut::recover(args, kind, &found);
    }
    // Inspecting first keeps a device that is not a cache from being formatted as one.
    let found = look_at(&args.cache_device, args.start_sector)?;
    if found.kind.cache.as_ref().is_some_and(|cache| cache.has_metadata_device) {
        bail!("{} has the metadata of a {}: give META CACHE ORIGIN", found.name, found.kind.name);
    }
    let with_log: Vec<&str> =
        caches().filter(|(_, cache)| cache.has_log).map(|(kind, _)| kind.name).collect();
    if args.truncate && !with_log.contains(&found.kind.name) {
        bail!(
            "--truncate is about the log of a {}; {} is none",
            with_log.join(" or a "),
            args.cache_device
        );
    }
    let device = open(&found.kind.recovery_table(&found.contents.shape, &asked(args)))?;
    let background = Queue::background("udm-recover", &device)?;
    let drained = drain(args, &device);
    let rested = come_to_rest(&device, &Watch::default());
    let lost_bytes = quarantined_bytes(&device);
    drop(background);
    let drained_bytes = drained?;
    rested?;
    device.remove()?;
    if lost_bytes > 0 {
        print_note(&format!(
            "{} of dirty data were damaged in the cache and were not written; \
             `udm inspect {}` lists where",
            human_bytes(lost_bytes),
            args.cache_device
        ));
    }
    let text = format!("{}: it has everything that {} had", args.origin, args.cache_device);
    let value = json!({
        "cache_device": args.cache_device,
        "origin": args.origin,
        "drained_bytes": drained_bytes,
        "dirty_bytes": 0,
        "damaged_bytes": lost_bytes,
    });
    print_result(args.json, &text, &value)
}

/// The user's options for a recovery.
fn asked(args: &RecoverArgs) -> Recovery<'_> {
    Recovery {
        cache: &args.cache_device,
        origin: &args.origin,
        accepts_damage: args.truncate,
        rebinds: args.rebind,
        accepts_loss: args.accept_loss,
    }
}

fn open(table: &str) -> Result<Arc<Device>> {
    let runtime = RuntimeDir::open()?;
    let device = Device::new("recover")?;
    let how = LoadHow::default();
    let directory = std::env::current_dir().context("the current directory")?;
    let load = || load_table(&device, table, &directory, &runtime, &how);
    let mut shown = Shown::new("recover");
    let loaded = watched(&how.progress, |step| shown.show(step), load);
    drop(shown);
    loaded.map_err(|error| in_words_of_recover(&without_place(&error)))?;
    device.resume()?;
    attach_notes(&device).iter().for_each(|note| print_note(note));
    Ok(device)
}

/// An error about the table, without the place in it: the user wrote no table.
fn without_place(error: &anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    let rest = text.strip_prefix("table line ").and_then(|rest| rest.split_once(": "));
    anyhow!(rest.map_or(text.clone(), |(_, rest)| rest.to_owned()))
}

/// Replaces advice about table words by the options of this command.
fn in_words_of_recover(error: &anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    let text = text
        .replace("add `lost_memory accept` to the table", "give --accept-loss")
        .replace("`lost_memory accept` in the table goes on", "--accept-loss goes on")
        .replace("add `rebind true` to the table", "give --rebind");
    anyhow!(caches().fold(text, |text, (_, cache)| {
        let table = format!("`{}` in the table goes on", cache.words_to_accept_damage);
        text.replace(&table, "--truncate goes on")
    }))
}

/// Writes everything back, and returns how many bytes that was.
fn drain(args: &RecoverArgs, device: &Device) -> Result<u64> {
    let interrupts = Interrupts::take()?;
    let mut progress = Progress::new(format!("recover {}", args.cache_device));
    device.set_draining(true);
    loop {
        let dirty = device.dirty();
        if dirty.bytes == 0 {
            progress.finish();
            return Ok(progress.done_bytes());
        }
        if interrupts.is_interrupted() {
            progress.pause();
            bail!(
                "interrupted; {} of dirty data stay safe in {}: give the command again to go on",
                human_bytes(dirty.bytes),
                args.cache_device
            );
        }
        progress.update(dirty.bytes, dirty.is_failing);
        thread::sleep(LOOK_EVERY);
    }
}

fn quarantined_bytes(device: &Device) -> u64 {
    let facts = device.facts();
    let mut numbers = facts.iter().flat_map(|line| &line.facts).filter_map(|fact| {
        match (fact.name, &fact.value) {
            ("quarantined_bytes", FactValue::Number(bytes)) => Some(*bytes),
            _ => None,
        }
    });
    numbers.next().unwrap_or(0)
}
