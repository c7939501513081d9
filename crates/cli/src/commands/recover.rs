//! `recover`: bring an origin up to date from its cache, without a server.
//!
//! The cache is opened as a device without exports, drained, and closed again. This is the same
//! code that drains a served device, so an interruption, even a kill, does not lose data, and the
//! next `recover` continues.

mod cut;
mod metadata;

use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde_json::json;
use udm::build::{self, SystemOpener, make_absolute};
use udm::common::contents::Shape;
use udm::device::Device;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::table::Table;
use udm::target::FactValue;
use udm::targets::{CutCache, RecoveryRequest, TargetType, caches};
use udm::units::human_bytes;

use super::inspect::look_at;
use super::print_result;
use super::remove::Interrupts;
use crate::args::media::RecoverArgs;
use crate::attach_progress::{Shown, watched};
use crate::dead;
use crate::loading::{LoadHow, attach_notes, current_directory, load_table};
use crate::output::print_note;
use crate::progress::Progress;
use crate::runtime::RuntimeDir;
use crate::served::come_to_rest;
use crate::troubles::why_stuck;
use crate::work::Watch;

/// Time between two checks of how much is left.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The cache to be recovered.
enum Subject {
    /// A cache with its metadata on a device or part of its own.
    WithMetadata(metadata::Words),
    /// A cache on a device that was cut short.
    Cut(&'static TargetType, CutCache),
    /// Any other cache.
    Whole(&'static TargetType, Shape),
}

/// `udm recover`.
pub fn recover(args: &RecoverArgs) -> Result<()> {
    let subject = subject(args)?;
    let mut table = Table::parse(&match &subject {
        Subject::WithMetadata(words) => words.table(),
        Subject::Cut(kind, found) => kind.recovery_table(&found.shape, &asked(args)),
        Subject::Whole(kind, shape) => kind.recovery_table(shape, &asked(args)),
    })?;
    make_absolute(&mut table, &current_directory())?;
    let runtime = RuntimeDir::open()?;
    let before = match args.accept_loss {
        false => dead::before(&table, &runtime)?,
        true => dead::before_loss(&table, &runtime)?,
    };
    if args.dry_run {
        return match subject {
            Subject::WithMetadata(words) => metadata::recover(args, &words),
            _ => dry_run(args, &table, &runtime),
        };
    }
    before.iter().for_each(|dead| dead.expect_end(&runtime, &table));
    let done = match &subject {
        Subject::WithMetadata(words) => metadata::recover(args, words),
        Subject::Cut(_, found) => cut::recover(args, &table, found),
        Subject::Whole(..) => recover_whole(args, &table),
    };
    for dead in before {
        if done.is_ok() && dead.forget_with(&runtime, &table)? {
            let name = &dead.name;
            print_note(&format!("{name}: its server had died; the device is removed"));
        } else {
            dead.remember_again(&runtime, &table);
        }
    }
    done
}

fn subject(args: &RecoverArgs) -> Result<Subject> {
    if let Some(origin) = &args.cache_origin {
        let (metadata, cache) = (args.cache_device.clone(), args.origin.clone());
        return Ok(Subject::WithMetadata(metadata::Words {
            metadata,
            cache,
            origin: origin.into(),
        }));
    }
    if let Some((kind, found)) = cut::find(args)? {
        return Ok(Subject::Cut(kind, found));
    }
    // Inspecting first keeps a device that is not a cache from being formatted as one.
    let found = look_at(&args.cache_device, args.start_sector)?;
    if found.kind.cache.as_ref().is_some_and(|cache| cache.has_metadata_device) {
        return Ok(Subject::WithMetadata(metadata::Words::on_one_device(args, found.kind)?));
    }
    let with_log: Vec<&str> =
        caches().filter(|(_, cache)| cache.has_log).map(|(kind, _)| kind.name).collect();
    if args.truncate && !with_log.contains(&found.kind.name) {
        bail!(
            "--truncate applies to the log of a {}, which {} does not have",
            with_log.join(" or a "),
            args.cache_device
        );
    }
    Ok(Subject::Whole(found.kind, found.contents.shape))
}

/// Reports the data that would be written. All devices are opened read-only.
fn dry_run(args: &RecoverArgs, table: &Table, runtime: &RuntimeDir) -> Result<()> {
    let opened = build::recover(table, &SystemOpener::with_memory_in(runtime.path()));
    let (recovery, _origin) =
        opened.map_err(|error| in_words_of_recover(&anyhow::Error::from(error)))?;
    recovery.notes.iter().for_each(|note| print_note(note));
    let (dirty, lost) = (recovery.dirty_bytes(), recovery.lost_bytes());
    let mut text = format!("{}: {} would be written", args.origin, human_bytes(dirty));
    if lost > 0 || recovery.has_more {
        let more = if recovery.has_more { ", and more in unknown ranges," } else { "" };
        text += &format!("; {}{more} cannot be read", human_bytes(lost));
    }
    let value = json!({
        "cache_device": args.cache_device,
        "origin": args.origin,
        "drained_bytes": 0,
        "dirty_bytes": dirty,
        "damaged_bytes": lost,
    });
    print_result(args.json, &text, &value)
}

fn recover_whole(args: &RecoverArgs, table: &Table) -> Result<()> {
    let device = open(&table.to_string())?;
    let background = Queue::background("udm-recover", &device)?;
    let drained = drain(args, &device);
    let rested = come_to_rest(&device, &Watch::default());
    let lost_bytes = quarantined_bytes(&device);
    drop(background);
    let drained_bytes = drained?;
    rested?;
    if !device.is_durable() {
        bail!(
            "{}: a flush failed, so the written data may be lost: run the command again",
            args.origin
        );
    }
    device.remove()?;
    if lost_bytes > 0 {
        print_note(&format!(
            "{} of dirty data were damaged in the cache and were not written; `udm inspect {}` \
             lists the ranges",
            human_bytes(lost_bytes),
            args.cache_device
        ));
    }
    let text = format!("{}: all dirty data of {} is written back", args.origin, args.cache_device);
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
fn asked(args: &RecoverArgs) -> RecoveryRequest<'_> {
    RecoveryRequest {
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
    let directory = current_directory();
    let load = || load_table(&device, table, &directory, &runtime, &how);
    let mut shown = Shown::new("recover");
    let loaded = watched(&how.progress, |step| shown.show(step), load);
    drop(shown);
    loaded.map_err(|error| in_words_of_recover(&error))?;
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
    in_words_of_options(error, "--truncate")
}

/// Replaces advice about table words by options of a command, of which `damage` accepts damage.
pub fn in_words_of_options(error: &anyhow::Error, damage: &str) -> anyhow::Error {
    let text = format!("{:#}", without_place(error));
    let text = text
        .replace("add `lost_memory accept` to the table", "give --accept-loss")
        .replace("add `rebind true` to the table", "give --rebind");
    anyhow!(caches().fold(text, |text, (_, cache)| {
        let table = format!("add `{}` to the table", cache.words_to_accept_damage);
        text.replace(&table, &format!("give {damage}"))
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
        if let Some(why) = why_stuck(device) {
            progress.pause();
            bail!("{why}; {} of dirty data were not written back", human_bytes(dirty.bytes));
        }
        if interrupts.is_interrupted() {
            progress.pause();
            bail!(
                "interrupted; {} of dirty data are still safe in {}: run the command again to \
                continue",
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
