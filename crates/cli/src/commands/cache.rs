//! `cache`: the metadata device of a dm-cache, at rest.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use udm::cache::metadata::source::{Source, read_each};
use udm::cache::metadata::superblock::NEEDS_CHECK;
use udm::cache::metadata::survey::{self, superblock};
use udm::cache::metadata::{BLOCK_BYTES, Change, Contents, Superblock, Survey, Writer, load};
use udm::cache::repair::{Repaired, repair as repaired};
use udm::cache::xml;
use udm::disk::{Disk, FileDisk, FileOptions, OpenMode};
use udm::probe;
use udm::sync::Arc;

use crate::args::cache::{CacheCommand, CheckArgs, DumpArgs, RepairArgs, RestoreArgs};
use crate::output::{print, print_json, print_line, print_note};

/// `udm cache`.
pub fn cache(command: &CacheCommand) -> Result<()> {
    match command {
        CacheCommand::Check(args) => check(args),
        CacheCommand::Dump(args) => dump(args),
        CacheCommand::Restore(args) => restore(args),
        CacheCommand::Repair(args) => repair(args),
    }
}

/// Opens a metadata device.
fn open(path: &Path, mode: OpenMode) -> Result<Arc<dyn Disk>> {
    let options = FileOptions { mode, ..FileOptions::default() };
    Ok(Arc::new(FileDisk::open(path, &options)?))
}

fn check(args: &CheckArgs) -> Result<()> {
    let name = args.metadata.display();
    let clears = args.clear_needs_check_flag;
    let mode = if clears { OpenMode::Exclusive } else { OpenMode::Shared };
    let disk = open(&args.metadata, mode)?;
    let root = superblock(&disk).with_context(|| name.to_string())?;
    let needs_check = root.needs_check();
    if args.super_block_only {
        return report(args, None, needs_check);
    }
    let found = survey::survey(&disk, root);
    let count = found.damage.count() + found.remarks.count();
    report(args, Some(&found), needs_check)?;
    if count > 0 {
        bail!(
            "{name}: {}",
            if count == 1 { "1 finding".into() } else { format!("{count} findings") }
        );
    }
    if clears && needs_check {
        let mut writer = Writer::new(&found.loaded()?)?;
        let mut superblock = writer.superblock().clone();
        superblock.put_flag(NEEDS_CHECK, false);
        let mut transaction = writer.prepare(&Change::of_superblock(superblock))?;
        transaction.carry_out(&disk).map_err(|(error, _)| error)?;
        writer.committed(transaction);
    }
    Ok(())
}

/// Prints what was found.
fn report(args: &CheckArgs, found: Option<&Survey>, needs_check: bool) -> Result<()> {
    let damage = found.map_or(&[][..], |found| &found.damage.list);
    let remarks = found.map_or(&[][..], |found| &found.remarks.list);
    let more = found.map_or(0, |found| found.damage.more + found.remarks.more);
    if args.quiet {
        return Ok(());
    }
    if args.json.json {
        let mut findings = Vec::new();
        for (list, is_damage) in [(damage, true), (remarks, false)] {
            findings.extend(list.iter().map(|finding| {
                json!({
                    "block": finding.block,
                    "what": finding.what,
                    "is_damage": is_damage,
                })
            }));
        }
        return print_json(&json!({
            "metadata": args.metadata,
            "findings": findings,
            "more_findings": more,
            "needs_check": needs_check,
        }));
    }
    for finding in damage.iter().chain(remarks) {
        print_line(&finding.to_string())?;
    }
    if more > 0 {
        print_line(&format!("and {more} more findings"))?;
    }
    let name = args.metadata.display();
    if needs_check && !args.clear_needs_check_flag {
        print_note(&format!("{name} has the needs-check flag; --clear-needs-check-flag clears it"));
    }
    match (found, damage.is_empty() && remarks.is_empty()) {
        (None, _) => print_line(&format!("{name}: the superblock is good")),
        (Some(_), true) => print_line(&format!("{name}: no errors found")),
        _ => Ok(()),
    }
}

fn dump(args: &DumpArgs) -> Result<()> {
    let name = args.metadata.display();
    if args.output.as_ref().is_some_and(|output| is_same(output, &args.metadata)) {
        bail!("{name} is the metadata device: write the XML to another file");
    }
    let disk = open(&args.metadata, OpenMode::Shared)?;
    let (superblock, contents) = match args.repair {
        false => {
            let loaded = load(&disk).with_context(|| name.to_string())?;
            if !loaded.superblock.is_clean() {
                print_note("it was not shut down: every block in use counts as dirty");
            }
            let contents = loaded.contents.opened(&loaded.superblock);
            (loaded.superblock, contents)
        }
        true => {
            let kept = repaired(&disk).with_context(|| name.to_string())?;
            let notes = [&kept.found, &kept.notes, &kept.lost];
            notes.into_iter().flatten().for_each(|line| print_note(line));
            (kept.superblock, kept.contents)
        }
    };
    if let Some(what) = superblock.beyond_xml() {
        print_note(&format!("{name} has {what}, which XML cannot hold: a restore loses them"));
    }
    match &args.output {
        None => dump_to(&superblock, &contents, |text| {
            print(text).map_err(|error| std::io::Error::other(format!("{error:#}")))
        }),
        Some(path) => {
            let mut file =
                BufWriter::new(File::create(path).with_context(|| path.display().to_string())?);
            dump_to(&superblock, &contents, |text| file.write_all(text.as_bytes()))?;
            let file = file.into_inner().map_err(|error| anyhow!("{error}"))?;
            file.sync_all().with_context(|| path.display().to_string())
        }
    }
}

/// Writes the text in pieces that are large enough for a call.
fn dump_to(
    superblock: &Superblock,
    contents: &Contents,
    mut out: impl FnMut(&str) -> std::io::Result<()>,
) -> Result<()> {
    const PIECE_BYTES: usize = 64 << 10;
    let mut text = String::new();
    xml::print(superblock, contents, |line| {
        text += line;
        if text.len() < PIECE_BYTES {
            return Ok(());
        }
        out(&std::mem::take(&mut text))
    })?;
    Ok(out(&text)?)
}

/// Blocks that must be zero where metadata is to be written: more than the metadata of most caches
/// takes, which is written from the front.
const BLANK_BLOCKS: u64 = 16_384;

/// Opens a device to write metadata to it. The device must be empty.
fn open_output(path: &Path, is_forced: bool) -> Result<Arc<dyn Disk>> {
    let disk = open(path, OpenMode::Exclusive)?;
    if is_forced {
        return Ok(disk);
    }
    let name = path.display();
    let found = probe::disk(&disk, 0);
    if !found.is_empty() {
        bail!("{name} holds {}; --force-format overwrites it", probe::listed(&found));
    }
    let front: Vec<u64> = (0..disk.blocks().min(BLANK_BLOCKS)).collect();
    let mut is_blank = true;
    read_each(&disk, &front, |_, block| {
        is_blank &= block.is_ok_and(|block| block.iter().all(|byte| *byte == 0));
    });
    if !is_blank {
        bail!("{name} is not empty; --force-format overwrites it");
    }
    Ok(disk)
}

fn restore(args: &RestoreArgs) -> Result<()> {
    let (input, output) = (args.input.display(), args.output.display());
    let bytes = std::fs::read(&args.input).with_context(|| input.to_string())?;
    let text = xml::text_of(&bytes).with_context(|| input.to_string())?;
    let disk = open_output(&args.output, args.force_format)?;
    let blocks = disk.limits().size_bytes / BLOCK_BYTES as u64;
    let description =
        xml::parse(text, xml::slots_max(blocks)).with_context(|| input.to_string())?;
    let is_clean = !args.omit_clean_shutdown;
    description
        .write(&disk, args.metadata_version, is_clean)
        .with_context(|| output.to_string())?;
    let contents = &description.contents;
    match (args.json.json, args.quiet) {
        (true, _) => print_json(&value_of(&args.output, contents)),
        (false, true) => Ok(()),
        (false, false) => print_line(&line_of(&args.output, contents)),
    }
}

/// A report of the written metadata, for programs.
fn value_of(path: &Path, contents: &Contents) -> Value {
    json!({
        "metadata": path,
        "blocks": contents.slots(),
        "blocks_used": contents.mapped(),
        "dirty_blocks": contents.dirty.ones(),
    })
}

/// The same for people.
fn line_of(path: &Path, contents: &Contents) -> String {
    let (mapped, dirty) = (contents.mapped(), contents.dirty.ones());
    format!("{}: {mapped} blocks of {} in use, {dirty} dirty", path.display(), contents.slots())
}

fn repair(args: &RepairArgs) -> Result<()> {
    let (input, output) = (args.input.display(), args.output.display());
    if is_same(&args.input, &args.output) {
        bail!("{output} is the damaged device: write the repaired metadata to another device");
    }
    let damaged = open(&args.input, OpenMode::Shared)?;
    let Repaired { superblock, contents, found, notes, lost } =
        repaired(&damaged).with_context(|| input.to_string())?;
    let disk = open_output(&args.output, args.force_format)?;
    udm::cache::metadata::format::write_whole(&disk, superblock, &contents)
        .with_context(|| output.to_string())?;
    if args.json.json {
        let mut value = value_of(&args.output, &contents);
        (value["findings"], value["notes"], value["lost"]) =
            (json!(found), json!(notes), json!(lost));
        print_json(&value)?;
    } else {
        let quiet = args.quiet;
        for line in found.iter().chain(&notes).filter(|_| !quiet) {
            print_line(line)?;
        }
        for line in &lost {
            print_line(&format!("lost: {line}"))?;
        }
    }
    if !lost.is_empty() {
        bail!("{output}: repaired, with {} losses", lost.len());
    }
    match args.json.json || args.quiet {
        true => Ok(()),
        false => print_line(&line_of(&args.output, &contents)),
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let stat = rustix::fs::stat(path).ok()?;
        match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
            rustix::fs::FileType::BlockDevice => Some((0, 0, stat.st_rdev)),
            _ => Some((stat.st_dev, stat.st_ino, 0)),
        }
    };
    place(one).is_some_and(|one| place(other) == Some(one))
}
