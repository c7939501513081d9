//! `report`: the state of a device in one text, for a bug report. No data is read.

use std::fmt::Write;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::config::replace;
use super::doctor;
use super::rpc::{Heard, ask_all};
use crate::anonymous::anonymous;
use crate::args::watch::ReportArgs;
use crate::config;
use crate::control::QUESTION_TIMEOUT;
use crate::log::{now_seconds, timestamp};
use crate::output::{print, print_line};
use crate::runtime::{DeviceName, RuntimeDir};

/// The end of the log that a report has.
const LOG_BYTES_MAX: u64 = 256 << 10;
/// Characters of a device's name in the short name of its server's process.
const COMM_CHARS: usize = 10;
/// The longest file of other kinds that a report has.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// `udm report`.
pub fn report(args: &ReportArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let name = &args.name;
    let file = config::folder().join(format!("{name}.{}", config::EXTENSION));
    let names = std::slice::from_ref(name);
    let answers = |method: &str, parameters: &Value| {
        ask_all(&runtime, names, method, parameters, QUESTION_TIMEOUT).pop()
    };
    let log = runtime.log(name);
    let info = match answers("Info", &json!({})) {
        Some(Heard::NoDevice(error)) if !log.exists() && !file.exists() => return Err(error),
        info => info,
    };
    let mut text = String::new();
    section(&mut text, "report", &about());
    section(&mut text, "machine", &doctor::machine_text());
    section(&mut text, "device", &words_of(info));
    for (heading, parameters) in
        [("active table", json!({})), ("inactive table", json!({ "inactive": true }))]
    {
        section(&mut text, heading, &words_of(answers("Table", &parameters)));
    }
    section(&mut text, "running configuration", &words_of(answers("Configuration", &json!({}))));
    // The second one has the table of a dead device.
    let files =
        [(file, FILE_BYTES_MAX), (runtime.table(name), FILE_BYTES_MAX), (log, LOG_BYTES_MAX)];
    for (path, most) in files {
        section(&mut text, &format!("file {}", path.display()), &end_of(&path, most));
    }
    if args.anonymous {
        let names = names_in(&text, &runtime, name);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        text = anonymous(&text, &names);
    }
    match &args.output {
        None => print(&text),
        Some(path) => {
            let place = config::shown(path);
            replace(path, &text).with_context(|| place.clone())?;
            print_line(&format!("{name}: report in {place}"))
        }
    }
}

/// The names of devices and of the host that a report may have.
fn names_in(text: &str, runtime: &RuntimeDir, name: &DeviceName) -> Vec<String> {
    let mut names = vec![name.to_string()];
    names.extend(runtime.names().unwrap_or_default().iter().map(ToString::to_string));
    let files = config::files_in(&config::folder()).unwrap_or_default();
    names.extend(files.iter().filter_map(|path| Some(config::name_of(path).ok()?.to_string())));
    for line in text.lines() {
        // Lines of the log begin with a time and a device, which may have been renamed.
        let mut words = line.split(' ');
        let is_time = words.next().is_some_and(|word| word.len() == 20 && word.ends_with('Z'));
        let device = words.next().and_then(|word| word.strip_suffix(':')).filter(|_| is_time);
        names.extend(device.map(str::to_owned));
    }
    // The kernel knows a server by the beginning of its title.
    let short: Vec<String> = names.iter().map(|it| it.chars().take(COMM_CHARS).collect()).collect();
    names.extend(short);
    let host = rustix::system::uname();
    let host = host.nodename().to_string_lossy();
    names.extend(host.split('.').next().map(str::to_owned));
    names.push(host.into_owned());
    names
}

/// The versions and the machine.
fn about() -> String {
    let uname = rustix::system::uname();
    let [system, release, machine] = [uname.sysname(), uname.release(), uname.machine()];
    let found = |path: &str, key: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
        line.split_once(':').map_or("unknown", |(_, value)| value.trim()).to_owned()
    };
    let processors = std::thread::available_parallelism().map_or(0, usize::from);
    format!(
        "udm {}, {}\n{} {} {}\n{processors} processors: {}\nmemory: {}",
        env!("CARGO_PKG_VERSION"),
        timestamp(now_seconds()),
        system.to_string_lossy(),
        release.to_string_lossy(),
        machine.to_string_lossy(),
        found("/proc/cpuinfo", "model name"),
        found("/proc/meminfo", "MemTotal"),
    )
}

fn section(text: &mut String, heading: &str, content: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "== {heading} ==\n{}\n", content.trim_end());
}

/// An answer as JSON, or why there is none.
fn words_of(heard: Option<Heard>) -> String {
    match heard {
        Some(Heard::Answer(value)) => serde_json::to_string_pretty(&value).unwrap_or_default(),
        Some(Heard::Lost(state, why)) => format!("{state}: {why:#}"),
        Some(Heard::NoDevice(why)) => format!("{why:#}"),
        None => "not asked".to_owned(),
    }
}

/// The end of a file, or why it cannot be read.
fn end_of(path: &Path, most: u64) -> String {
    let read = || -> std::io::Result<String> {
        // A file of another kind may block.
        if !std::fs::metadata(path)?.is_file() {
            return Ok("not a regular file".to_owned());
        }
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(most)))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        let cut =
            if len > most { format!("(the last {most} of {len} bytes)\n") } else { String::new() };
        Ok(cut + &String::from_utf8_lossy(&bytes))
    };
    read().unwrap_or_else(|error| format!("not readable: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_of_a_long_file_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(end_of(&path, 10), "0123456789");
        assert_eq!(end_of(&path, 3), "(the last 3 of 10 bytes)\n789");
        assert!(end_of(&folder.path().join("none"), 3).contains("No such file"));
    }

    #[test]
    fn a_name_that_is_not_there_is_said() {
        let lost = Heard::Lost("dead", anyhow::anyhow!("vol: its server died"));
        assert_eq!(words_of(Some(lost)), "dead: vol: its server died");
    }
}
