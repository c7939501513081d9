//! Devices that have a configuration file and that no server serves, for `ls --all`: the data that
//! only their caches hold. A file whose caches are not in the table of the server with its name is
//! listed too.
//!
//! Each cache is read by a process of its own, `udm inspect`. A process that waits for a device in
//! the kernel cannot be ended, and this command must not wait for it. A cache that cannot be read
//! is never reported as clean.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};
use udm::build::{Opener, SystemOpener};
use udm::table::{DeviceWord, Table, Word};
use udm::targets::{self, WordRole};
use udm::units::human_bytes;

use super::inspect::IN_USE;
use crate::config::{self, Config, shown};
use crate::output::without_numbers;
use crate::runtime::DeviceName;

/// How long the caches of a file may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// At most this many caches are read at a time.
const READ_MAX: usize = 16;

/// The part of the cache that one word of a table names.
struct Cache {
    word: String,
    start_sector: u64,
}

/// The caches of a device, as their processes report them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Bytes that only the caches have; `None` if one of them cannot be read.
    dirty_bytes: Option<u64>,
    /// A server of another name, or another program, has one of them.
    is_in_use: bool,
}

/// A device that has a server.
pub struct Server {
    /// The device's name.
    pub name: DeviceName,
    /// The active table; `None` if the server does not answer.
    pub table: Option<String>,
}

impl Server {
    /// The server of the device `name`, with the table from its answer to `Info`.
    pub fn of(name: &DeviceName, info: &Value) -> Server {
        let table = info["lines"].as_array().map(|lines| {
            let texts = lines.iter().filter_map(|line| line["table"].as_str());
            texts.collect::<Vec<_>>().join("\n")
        });
        Server { name: name.clone(), table }
    }

    /// Whether the file at `path` has a cache that is not in the table of this server.
    fn lacks_cache_of(&self, path: &Path) -> bool {
        let (Some(table), Ok(config)) = (&self.table, config::read(path)) else { return false };
        let actual = Config { table: Some(table.clone()), ..Config::default() };
        let actual = caches(&actual, &mut Vec::new());
        let wanted = caches(&config, &mut Vec::new());
        wanted.iter().any(|cache| !actual.iter().any(|other| cache.is_at(other)))
    }
}

impl Cache {
    /// Whether both are at the same place of the same device.
    fn is_at(&self, other: &Cache) -> bool {
        let (Some(one), Some(two)) = (self.device(), other.device()) else {
            return self.word == other.word && self.start_sector == other.start_sector;
        };
        self.start_sector == other.start_sector
            && one.options.area.start() == two.options.area.start()
            && (one.path == two.path
                || node(&one.path).is_some_and(|it| Some(it) == node(&two.path)))
    }

    fn device(&self) -> Option<DeviceWord> {
        let device = Word::new(&*self.word).device().ok()?;
        SystemOpener::without_memory().resolve(&device).ok()
    }
}

/// The number of a block device, or the file system and number of a file.
fn node(path: &str) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    match meta.rdev() {
        0 => Some((meta.dev(), meta.ino())),
        number => Some((0, number)),
    }
}

/// The devices of configuration files that `servers` do not serve, each in the form of `ls --json`.
pub fn summaries(servers: &[Server]) -> Result<Vec<Value>> {
    let mut files = Vec::new();
    for path in config::files_in(&config::folder())? {
        let name = config::name_of(&path);
        let known = name.as_ref().ok();
        let server = known.and_then(|name| servers.iter().find(|server| server.name == *name));
        let is_served = server.is_some();
        if server.is_none_or(|server| server.lacks_cache_of(&path)) {
            files.push((name, path, is_served));
        }
    }
    let next = AtomicUsize::new(0);
    let slots: Vec<Mutex<Option<Value>>> = files.iter().map(|_| Mutex::default()).collect();
    let work = || {
        while let Some((at, (name, path, is_served))) = {
            let at = next.fetch_add(1, Ordering::Relaxed);
            files.get(at).map(|file| (at, file))
        } {
            let summary = summary(name, path, *is_served);
            if let Ok(mut slot) = slots[at].lock() {
                *slot = Some(summary);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..files.len().min(READ_MAX) {
            scope.spawn(work);
        }
        work();
    });
    Ok(slots.into_iter().filter_map(|slot| slot.into_inner().ok().flatten()).collect())
}

/// `is_served`: a server with another table has the name.
fn summary(name: &Result<DeviceName>, path: &Path, is_served: bool) -> Value {
    let mut notes = Vec::new();
    if is_served {
        notes.push("a server with another table has this name".to_owned());
    }
    let mut targets = Vec::new();
    let mut seen = Seen::default();
    let found = name.as_ref().map_err(|error| anyhow!("{error:#}"));
    match found.and_then(|_| config::read(path)) {
        Err(error) => notes.push(without_numbers(&format!("{error:#}"))),
        Ok(config) => {
            let caches = caches(&config, &mut targets);
            let deadline = Instant::now() + PATIENCE;
            let read = caches.iter().map(|cache| (&*cache.word, inspect(cache, deadline)));
            let read: Vec<_> = read.collect();
            targets.extend(read.iter().filter_map(|(_, found)| {
                let format = found.as_ref().ok()?["format"].as_str();
                format.filter(|_| config.fast.is_some()).map(str::to_owned)
            }));
            seen = judge(&read, &mut notes);
        }
    }
    targets.sort_unstable();
    targets.dedup();
    let stem = path.file_stem().unwrap_or_default();
    json!({
        "name": name.as_ref().map_or_else(|_| shown(Path::new(stem)), ToString::to_string),
        "state": if seen.is_in_use { "in use" } else { "stopped" },
        "targets": targets,
        "dirty_bytes": seen.dirty_bytes,
        "file": path.display().to_string(),
        "notes": notes,
    })
}

/// The devices by which the caches of a file are recognised. Adds the targets of its table.
fn caches(config: &Config, targets: &mut Vec<String>) -> Vec<Cache> {
    if let Some(fast) = &config.fast {
        return vec![Cache { word: fast.clone(), start_sector: 0 }];
    }
    let mut caches = Vec::new();
    let table = config.table.as_deref().and_then(|table| Table::parse(table).ok());
    for line in table.iter().flat_map(|table| &table.lines) {
        targets.push(line.target.text.clone());
        let Some(kind) = targets::find(&line.target.text) else { continue };
        let Some(cache) = &kind.cache else { continue };
        let role = if cache.has_metadata_device { WordRole::Metadata } else { WordRole::Cache };
        let mut options = line.args.iter().skip_while(|word| word.text != "start_sector");
        let start = options.nth(1).filter(|_| cache.begins_anywhere);
        caches.extend(kind.places(&[role]).filter_map(|nth| line.args.get(nth)).map(|word| {
            Cache {
                word: word.text.clone(),
                start_sector: start.and_then(|word| word.text.parse().ok()).unwrap_or(0),
            }
        }));
    }
    caches
}

/// The sum of the answers, and the notes about them.
fn judge(read: &[(&str, Result<Value>)], notes: &mut Vec<String>) -> Seen {
    let mut seen = Seen { dirty_bytes: Some(0), is_in_use: false };
    for (word, found) in read {
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                seen.dirty_bytes = None;
                notes.push(without_numbers(&format!("{word}: {error:#}")));
                continue;
            }
        };
        if found["is_in_use"] == true {
            (seen.is_in_use, seen.dirty_bytes) = (true, None);
            let who = kernel_device_on(word).map(|name| format!("the kernel's device {name}"));
            let who = who.unwrap_or_else(|| "another server or program".into());
            notes.push(format!("{word}: {who} has it open"));
            continue;
        }
        let own = found["dirty_bytes"].as_u64();
        match (own, &found["served"]["is_of_this_boot"]) {
            (Some(bytes), Value::Bool(true)) => {
                seen.dirty_bytes = None;
                let place = found["served"]["memory"].as_str().unwrap_or("shared memory");
                notes.push(format!(
                    "{word}: its server died: {} are dirty on it, and more may be in {place}",
                    human_bytes(bytes)
                ));
            }
            (Some(bytes), served) => {
                seen.dirty_bytes = seen.dirty_bytes.map(|sum| sum.saturating_add(bytes));
                if served == false {
                    notes.push(format!(
                        "{word}: its server died before the machine was restarted: writes that \
                         were not flushed are lost"
                    ));
                }
            }
            (None, _) => seen.dirty_bytes = None,
        }
        if let Some(damage) = found["damage"].as_array().and_then(|damage| damage.first()) {
            seen.dirty_bytes = None;
            let damage = damage.as_str().unwrap_or_default();
            notes.push(format!("{word}: damaged: {damage}; `udm inspect {word}` prints details"));
        }
    }
    seen
}

/// The device of the kernel's device mapper that uses a block device.
fn kernel_device_on(word: &str) -> Option<String> {
    let device = SystemOpener::without_memory().resolve(&Word::new(word).device().ok()?).ok()?;
    let number = std::fs::metadata(device.path).ok()?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let holders = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/holders"));
    let name = |path: PathBuf| std::fs::read_to_string(path.join("dm/name")).ok();
    let mut holders = std::fs::read_dir(holders).ok()?.flatten();
    holders.find_map(|holder| name(holder.path())).map(|name| name.trim_end().to_owned())
}

/// The answer of `udm inspect --json` about a cache.
fn inspect(cache: &Cache, deadline: Instant) -> Result<Value> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        let seconds = PATIENCE.as_secs();
        bail!("it was not read: the other caches of the file took {seconds} s");
    }
    let sector = cache.start_sector.to_string();
    let mut command = Command::new("/proc/self/exe");
    command.args(["inspect", "--json", "--start-sector", &sector, "--", &cache.word]);
    let output = output_within(&mut command, left)?;
    if output.status.success() {
        return serde_json::from_slice(&output.stdout).context("its contents");
    }
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains(IN_USE) {
        return Ok(json!({ "is_in_use": true }));
    }
    let why = text.trim_end().strip_prefix("udm: inspect: ").unwrap_or(text.trim_end());
    let place = format!("{}: ", cache.word);
    bail!("{}", why.strip_prefix(&place).unwrap_or(why).replace('\n', " "))
}

/// The output of a command that ends within `patience`.
fn output_within(command: &mut Command, patience: Duration) -> Result<Output> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().context("start a process that reads it")?;
    let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    let (ended, end) = channel();
    // The thread is not joined: it may wait for as long as the process does.
    thread::Builder::new().spawn(move || drop(ended.send(child.wait_with_output())))?;
    if let Ok(output) = end.recv_timeout(patience) {
        return Ok(output?);
    }
    // The process may have ended meanwhile.
    let _ = pidfd_send_signal(&handle, Signal::KILL);
    bail!("it has not answered for {} s", (patience.as_secs_f64() * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn judged(answers: Vec<Result<Value>>) -> (Seen, String) {
        let read: Vec<_> = answers.into_iter().map(|answer| ("/f", answer)).collect();
        let mut notes = Vec::new();
        let seen = judge(&read, &mut notes);
        (seen, notes.join("\n"))
    }

    fn answer(dirty_bytes: u64) -> Value {
        let none: [&str; 0] = [];
        json!({ "is_in_use": false, "dirty_bytes": dirty_bytes, "served": null, "damage": none })
    }

    #[test]
    fn what_cannot_be_read_is_not_clean() {
        let sum = |dirty_bytes| Seen { dirty_bytes, is_in_use: false };
        assert_eq!(judged(vec![]), (sum(Some(0)), String::new()));
        assert_eq!(judged(vec![Ok(answer(3)), Ok(answer(4))]), (sum(Some(7)), String::new()));
        let (seen, notes) = judged(vec![Err(anyhow!("gone")), Ok(answer(4))]);
        assert_eq!((seen, &*notes), (sum(None), "/f: gone"));
        let mut unknown = answer(0);
        unknown["dirty_bytes"] = Value::Null;
        unknown["damage"] = json!(["entry 5 is torn", "and 3 more entries"]);
        let (seen, notes) = judged(vec![Ok(unknown)]);
        assert!(seen == sum(None) && notes.contains("/f: damaged: entry 5 is torn; "), "{notes}");
        let mut damaged = answer(0);
        damaged["damage"] = json!(["entry 5 is torn"]);
        assert_eq!(judged(vec![Ok(damaged)]).0, sum(None));
    }

    #[test]
    fn servers_and_their_memory_are_reported() {
        let mut used = answer(0);
        used["is_in_use"] = json!(true);
        let (seen, notes) = judged(vec![Ok(used), Ok(answer(4))]);
        assert_eq!(seen, Seen { dirty_bytes: None, is_in_use: true });
        assert_eq!(notes, "/f: another server or program has it open");
        let mut died = answer(0);
        died["served"] = json!({ "is_of_this_boot": true, "memory": "/run/udm/x.shm" });
        let (seen, notes) = judged(vec![Ok(died.clone())]);
        assert_eq!(seen.dirty_bytes, None);
        assert!(notes.contains("its server died: 0 B are dirty on it") && notes.contains(".shm"));
        died["served"]["is_of_this_boot"] = json!(false);
        let (seen, notes) = judged(vec![Ok(died)]);
        assert_eq!(seen.dirty_bytes, Some(0));
        assert!(notes.contains("before the machine was restarted"), "{notes}");
    }

    #[test]
    fn a_process_that_does_not_end_is_given_up() {
        let mut sleep = Command::new("sleep");
        let why = output_within(sleep.arg("1000"), Duration::from_millis(100)).unwrap_err();
        assert_eq!(why.to_string(), "it has not answered for 0.1 s");
        let output = output_within(Command::new("echo").arg("x"), PATIENCE).unwrap();
        assert_eq!(output.stdout, b"x\n");
    }

    #[test]
    fn the_device_with_the_metadata_is_read() {
        let words = |config: &Config| {
            let mut targets = Vec::new();
            let caches = caches(config, &mut targets);
            let caches = caches.into_iter().map(|cache| (cache.word, cache.start_sector));
            (caches.collect::<Vec<_>>(), targets)
        };
        let table = "0 64 cache /m /c /o 64 0 smq 0\n\
                     64 64 writecache s /o2 /w 4096 2 start_sector 128\n128 8 zero";
        let config = Config { table: Some(table.into()), ..Config::default() };
        let caches = vec![("/m".to_owned(), 0), ("/w".to_owned(), 128)];
        let targets = ["cache", "writecache", "zero"].map(str::to_owned).to_vec();
        assert_eq!(words(&config), (caches, targets));
        let config = Config { fast: Some("/f".into()), ..Config::default() };
        assert_eq!(words(&config), (vec![("/f".to_owned(), 0)], vec![]));
    }
}
