//! `create --origin SLOW --fast FAST`: composes the table that a user would have to write, and the
//! same commands for the kernel's own tools.
//!
//! This file does not write to any device. An existing cache on the fast device decides the target
//! first (the same command reopens its own cache), then `--target`, then the kind of the device and
//! `--mode`. The composed table is loaded and checked like any other table.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use udm::build::{Opener, SystemOpener, make_absolute};
use udm::disk::{Disk, FileDisk, FileOptions, OpenMode};
use udm::pmem::dax::DaxPmem;
use udm::pmem::{Persistence, Pmem};
use udm::probe;
use udm::sync::Arc;
use udm::table::{DeviceWord, Table, Word};
use udm::targets::{self, Consent, Fast, TargetType, Wanted, WordRole};
use udm::units::{SECTOR, human_bytes};

use crate::args::SetupArgs;
use crate::loading::current_directory;
use crate::output::{Usage, shell};

/// The device to be created.
#[derive(Debug)]
pub struct Composed {
    /// The table, with absolute paths.
    pub table: String,
    /// A note about the two devices.
    pub note: Option<String>,
    /// The reason for this target.
    pub why: String,
    /// What will become of the fast device.
    pub fate: String,
    /// The result for the fast device, first if it was not formatted, then if it was.
    done: [String; 2],
    /// Commands of the kernel's tools that mean the same.
    pub kernel: Vec<String>,
}

impl Composed {
    /// The device was created: `fate` now reports the result for the fast device, not the plan, and
    /// the attach has used up what the user allowed for it.
    pub fn is_done(&mut self, has_formatted: bool) {
        if let Ok(table) = Table::parse(&self.table) {
            self.table = targets::without_consents(&table).to_string();
        }
        self.fate = std::mem::take(&mut self.done[usize::from(has_formatted)]);
    }

    /// For people.
    pub fn lines(&self, name: &str) -> Vec<String> {
        let mut lines = vec![format!("{name}: {}", self.why), format!("{name}: {}", self.fate)];
        lines.push(format!("{name}: the table is"));
        lines.extend(self.table.lines().map(|line| format!("    {line}")));
        lines.push(format!("{name}: the same with the kernel's tools"));
        lines.extend(self.kernel.iter().map(|line| format!("    {line}")));
        lines
    }

    /// For programs.
    pub fn tell(&self, value: &mut Value) {
        value["table"] = json!(self.table.trim_end());
        value["why"] = json!(self.why);
        value["fast"] = json!(self.fate);
        value["kernel"] = json!(self.kernel);
    }
}

/// One of the two devices, as it was found.
struct Device {
    word: DeviceWord,
    bytes: u64,
    block_bytes: u64,
}

/// Puts the table together.
pub fn compose(name: &str, args: &SetupArgs, is_forced: bool) -> Result<Composed> {
    let (Some(origin), Some(fast)) = (&args.origin, &args.fast) else {
        return Err(Usage("--origin and --fast must be given together".into()).into());
    };
    for (option, path) in [("--origin", origin), ("--fast", fast)] {
        if path.contains('\n') {
            let message =
                format!("{option} {path:?}: a table cannot name a path with a line break");
            return Err(Usage(message).into());
        }
    }
    let origin = origin_of(origin)?;
    let (fast, pmem) = fast_of(fast)?;
    refuse_the_same(&origin.word, &fast.word)?;
    let nature = nature_of(&fast.word, &*pmem);
    let held = targets::held(&pmem);
    let (kind, why) = choose(args, &fast.word, (held, is_forced), nature, &*pmem)?;
    let found = match held {
        // A device that is to be formatted does not have a shape yet.
        _ if is_forced => None,
        None => None,
        Some(_) => Some(kind.shape_of(&pmem).with_context(|| {
            let path = &fast.word.word.text;
            format!("{path} holds a damaged {}: `udm inspect {path}` prints details", kind.name)
        })?),
    };
    let wanted = Wanted {
        origin: &origin.word.word.text,
        origin_bytes: origin.bytes,
        fast: &fast.word.word.text,
        fast_bytes: fast.bytes,
        nature,
        origin_block_bytes: origin.block_bytes,
        fast_block_bytes: fast.block_bytes,
        mode: args.mode,
        policy: args.policy.as_deref(),
        block_bytes: args.block_size.and_then(|size| size.0),
        found,
    };
    let mut table = Table::parse(&kind.line(&wanted)?)?;
    consent(&mut table, args)?;
    make_absolute(&mut table, &current_directory())?;
    udm::build::check(&table)?;
    let note = (fast.bytes > origin.bytes).then(|| {
        format!(
            "the fast device ({}) is larger than the origin ({}): they may be swapped",
            human_bytes(fast.bytes),
            human_bytes(origin.bytes)
        )
    });
    let kernel = kernel_lines(name, &table, kind, nature);
    let fate = fate(&fast.word, (held, is_forced), &*pmem);
    let done = outcomes(&fast.word, held, kind);
    Ok(Composed { table: table.to_string(), note, why, fate, done, kernel })
}

/// Adds the options by which the user allows something for this attach.
pub fn consent(table: &mut Table, args: &SetupArgs) -> Result<()> {
    let asked = [
        (args.rebind, Consent::Rebind, "--rebind"),
        (args.accept_loss, Consent::Loss, "--accept-loss"),
    ];
    for (_, consent, option) in asked.into_iter().filter(|(is_asked, ..)| *is_asked) {
        if !targets::add_consent(table, consent) {
            return Err(Usage(format!("{option} does not apply to this table")).into());
        }
    }
    Ok(())
}

/// The word of a device, with its path if it is a number.
fn word_of(text: &str) -> Result<DeviceWord> {
    let word = Word::new(text).device()?;
    if word.options.is_read_only {
        bail!("{text}: a cache writes to both of its devices");
    }
    Ok(SystemOpener::without_memory().resolve(&word)?)
}

fn origin_of(text: &str) -> Result<Device> {
    let word = word_of(text)?;
    if word.options.persist.is_some() {
        bail!("{text}: persist= is for the fast device only");
    }
    let options =
        FileOptions { mode: OpenMode::ReadOnly, area: word.options.area, ..FileOptions::default() };
    let disk = FileDisk::open(&word.path, &options)?;
    let limits = disk.limits();
    Ok(Device { bytes: limits.size_bytes, block_bytes: limits.block_bytes.into(), word })
}

fn fast_of(text: &str) -> Result<(Device, Arc<dyn Pmem>)> {
    let word = word_of(text)?;
    let pmem: Arc<dyn Pmem> =
        Arc::new(DaxPmem::open_read_only(Path::new(&word.path), word.options.area)?);
    // A DAX device cannot be opened as a disk, and its block size is not used.
    let options =
        FileOptions { mode: OpenMode::ReadOnly, area: word.options.area, ..FileOptions::default() };
    let blocks = FileDisk::open(&word.path, &options).map(|disk| disk.limits().block_bytes);
    let block_bytes = blocks.map_or(SECTOR, u64::from);
    Ok((Device { bytes: pmem.len_bytes(), block_bytes, word }, pmem))
}

/// The kind of the fast device. The options by which the user wants to open it decide first.
fn nature_of(word: &DeviceWord, pmem: &dyn Pmem) -> Fast {
    match (word.options.io, word.options.persist, pmem.medium().persistence) {
        (Some(_), _, _) => Fast::Disk,
        (None, Some(_), _) | (None, None, Persistence::Cpu) => Fast::Memory,
        (None, None, Persistence::Msync) => Fast::Disk,
    }
}

/// The target, and why.
fn choose(
    args: &SetupArgs,
    fast: &DeviceWord,
    (held, is_forced): (Option<&'static TargetType>, bool),
    nature: Fast,
    pmem: &dyn Pmem,
) -> Result<(&'static TargetType, String)> {
    let path = &fast.word.text;
    let named = |name: &str| targets::caches().find(|(kind, _)| kind.name == name);
    let asked = args.target.as_deref().and_then(named).map(|(kind, _)| kind);
    match (held, asked) {
        (Some(held), Some(asked)) if held.name != asked.name && !is_forced => bail!(
            "{path} holds a {}, which a {} would overwrite: write it back (`udm recover`, or `udm \
             remove --drain` of its device) and give --force-format, or omit --target",
            held.name,
            asked.name
        ),
        (Some(held), Some(asked)) if held.name != asked.name => {
            Ok((asked, format!("{}, as --target says", asked.name)))
        }
        (Some(held), _) => Ok((held, format!("{}, which {path} holds", held.name))),
        (None, Some(asked)) => Ok((asked, format!("{}, as --target says", asked.name))),
        (None, None) => {
            let kind = targets::chosen_for(nature, args.mode)
                .context("no target supports such a device")?;
            let what = match nature {
                Fast::Memory => {
                    let description = &pmem.medium().description;
                    format!("memory ({})", description.split(':').next().unwrap_or_default())
                }
                Fast::Disk => "reached as a disk".to_owned(),
            };
            // The mode is a reason only if the device alone would get another target.
            let usual = targets::chosen_for(nature, None);
            let mode = match usual.is_some_and(|usual| usual.name == kind.name) {
                true => "",
                false => ", and it has the mode that --mode names",
            };
            Ok((kind, format!("{}, because {path} is {what}{mode}", kind.name)))
        }
    }
}

/// What will become of the fast device.
fn fate(
    fast: &DeviceWord,
    (held, is_forced): (Option<&'static TargetType>, bool),
    pmem: &dyn Pmem,
) -> String {
    let path = &fast.word.text;
    if let Some(held) = held {
        if is_forced {
            return format!(
                "{path} holds a {}: it is formatted if it is clean, and refused if it is dirty",
                held.name
            );
        }
        return format!("the {} on {path} is reopened with its data", held.name);
    }
    let found = probe::pmem(pmem, 0);
    match found.is_empty() {
        true if is_forced => format!("{path} is formatted, regardless of its contents"),
        true => format!("{path} is formatted, if it is empty"),
        false if is_forced => {
            format!("{path} holds {}: --force-format overwrites it", probe::listed(&found))
        }
        false => format!(
            "{path} holds {}: refused without --force-format, which overwrites it",
            probe::listed(&found)
        ),
    }
}

/// The messages after the device was created: without a format, and with one.
fn outcomes(
    fast: &DeviceWord,
    held: Option<&'static TargetType>,
    kind: &'static TargetType,
) -> [String; 2] {
    let path = &fast.word.text;
    let kept = format!("the {} on {path} is reopened with its data", kind.name);
    let formatted = match held {
        Some(held) => format!("{path} held a {}, which was clean, and was formatted", held.name),
        None => format!("{path} was formatted"),
    };
    [kept, formatted]
}

/// One device under two names is a slip.
fn refuse_the_same(origin: &DeviceWord, fast: &DeviceWord) -> Result<()> {
    let place = |word: &DeviceWord| {
        let meta = std::fs::metadata(&word.path).with_context(|| word.path.clone())?;
        let is_node = !meta.file_type().is_file();
        anyhow::Ok(if is_node { (0, 0, meta.rdev()) } else { (meta.dev(), meta.ino(), 0) })
    };
    if place(origin)? != place(fast)? {
        return Ok(());
    }
    let range = |word: &DeviceWord| {
        let area = word.options.area;
        let end = area.len_bytes().map_or(u64::MAX, |len| area.start().saturating_add(len));
        (area.start(), end)
    };
    let (one, other) = (range(origin), range(fast));
    if one.0 < other.1 && other.0 < one.1 {
        bail!("--origin {} and --fast {} are the same device", origin.word.text, fast.word.text);
    }
    Ok(())
}

/// The commands that make the same device with the kernel's target: files become loop devices, and
/// parts linear ones.
fn kernel_lines(name: &str, table: &Table, kind: &TargetType, nature: Fast) -> Vec<String> {
    let mut lines = Vec::new();
    let mut table = targets::without_consents(table);
    let roles =
        [(WordRole::Origin, "origin"), (WordRole::Metadata, "meta"), (WordRole::Cache, "fast")];
    let is_memory = nature == Fast::Memory
        && !kind.cache.as_ref().is_some_and(|cache| cache.has_metadata_device);
    for (role, what) in roles {
        for place in kind.places(&[role]).collect::<Vec<_>>() {
            for line in &mut table.lines {
                let Some(word) = line.args.get_mut(place) else { continue };
                let Ok(device) = word.device() else { continue };
                let is_file = std::fs::metadata(&device.path).is_ok_and(|meta| meta.is_file());
                if role == WordRole::Cache && is_memory && is_file {
                    lines.push(NO_LOOP.into());
                }
                let (before, text) = kernel_device(name, what, &device);
                lines.extend(before);
                word.text = text;
            }
        }
    }
    // The kernel ignores the words after a cache's counted words. It does not know udm's policies,
    // and drops their hints.
    let text = table.to_string().replace(" probation 0", " smq 0");
    lines.push(format!("dmsetup create {} --table \"{}\"", shell(name), text.trim_end()));
    lines
}

const NO_LOOP: &str =
    "# the kernel needs memory with direct access (DAX) here, and a loop device has none";

/// The kernel's name of a device, and the commands that make it.
fn kernel_device(name: &str, what: &str, device: &DeviceWord) -> (Vec<String>, String) {
    let area = device.options.area;
    let path = shell(&device.path);
    let kind = std::fs::metadata(&device.path).map(|meta| meta.file_type());
    if kind.as_ref().is_ok_and(FileTypeExt::is_char_device) {
        let why = "# the kernel needs this memory as a block device with direct access (fsdax)";
        return (vec![why.into()], device.path.clone());
    }
    if kind.as_ref().is_ok_and(std::fs::FileType::is_file) {
        let mut options = String::new();
        if area.start() > 0 {
            options += &format!(" --offset {}", area.start());
        }
        if let Some(len) = area.len_bytes() {
            options += &format!(" --sizelimit {len}");
        }
        let line = format!("{what}=$(losetup --find --show{options} {path})");
        return (vec![line], format!("${what}"));
    }
    if area.is_whole() {
        return (Vec::new(), device.path.clone());
    }
    let start = area.start() / SECTOR;
    let part = format!("{name}-{what}");
    let len = match area.len_bytes() {
        Some(len) => (len / SECTOR).to_string(),
        None => format!("$(($(blockdev --getsz {path}) - {start}))"),
    };
    let table = format!("0 {len} linear {} {start}", Word::new(&device.path).quoted());
    let line = format!("dmsetup create {} --table \"{table}\"", shell(&part));
    (vec![line], format!("/dev/mapper/{part}"))
}
