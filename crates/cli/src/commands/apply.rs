//! `diff` and `apply`: a running device and its configuration file.

mod settings;

use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, anyhow, bail};
use serde_json::{Value, json};
use udm_export::Uri;

use super::config::check_all;
use super::print_result;
use crate::args::config::{ApplyArgs, DiffArgs};
use crate::config::{self, EXTENSION, shown};
use crate::control::{Absent, Client};
use crate::output::{Reported, Usage, print_error, print_json, print_line, shell};
use crate::runtime::{DeviceName, RuntimeDir};
use settings::{Exports, Settings};

/// Where systemd has the units that start with the machine.
const UNITS: &str = "/etc/systemd/system";

/// A device and its file.
struct Pair {
    name: DeviceName,
    file: PathBuf,
}

/// A device that does not run.
struct Stopped {
    state: &'static str,
    /// The command that starts it.
    command: String,
}

impl Pair {
    fn of(name: &DeviceName, file: Option<&Path>) -> Pair {
        let file = file.map_or_else(|| config::file_of(name), Path::to_owned);
        Pair { name: name.clone(), file }
    }

    fn file_word(&self) -> String {
        shell(&shown(&self.file))
    }

    fn create(&self) -> String {
        let stem = self.file.file_stem().and_then(|stem| stem.to_str());
        let is_named = self.file.extension().is_some_and(|extension| extension == EXTENSION);
        match is_named && stem == Some(self.name.as_str()) {
            true => format!("udm create --config {}", self.file_word()),
            false => format!("udm create {} --config {}", self.name, self.file_word()),
        }
    }

    /// The systemd service of the device, which reads the file in `/etc/udm`.
    fn service(&self) -> String {
        format!("udm@{}", self.name)
    }

    /// The command that starts or restarts the service with this file.
    fn with_service(&self, verb: &str) -> String {
        let usual = Path::new(config::FOLDER).join(format!("{}.{EXTENSION}", self.name));
        let command = format!("systemctl {verb} {}", self.service());
        match usual == self.file {
            true => command,
            false => format!("cp {} {} && {command}", self.file_word(), shell(&shown(&usual))),
        }
    }

    fn start(&self) -> String {
        let unit = format!("{}.service", self.service());
        let folders = std::fs::read_dir(UNITS).into_iter().flatten().flatten();
        let mut links = folders.map(|folder| folder.path().join(&unit));
        match links.any(|link| link.symlink_metadata().is_ok()) {
            true => self.with_service("start"),
            false => self.create(),
        }
    }

    fn restart(&self, pid: Option<i32>) -> String {
        let group = pid.and_then(|pid| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok());
        let unit = format!("/{}.service", self.service());
        match group.is_some_and(|group| group.lines().any(|line| line.ends_with(&unit))) {
            true => self.with_service("restart"),
            false => format!("udm remove {} && {}", self.name, self.create()),
        }
    }

    /// The server of the device.
    fn connect(&self, runtime: &RuntimeDir) -> Result<Result<Client, Stopped>> {
        Ok(Client::find(runtime, &self.name)?.map_err(|absent| Stopped {
            state: match absent {
                Absent::NoDevice => "stopped",
                Absent::Died => "dead",
            },
            command: self.start(),
        }))
    }
}

impl Stopped {
    fn line(&self) -> String {
        format!("{}: `{}` starts it", self.state, self.command)
    }

    fn json(&self, pair: &Pair) -> Value {
        json!({
            "name": pair.name.as_str(),
            "file": pair.file.display().to_string(),
            "state": self.state,
            "start": self.command,
        })
    }
}

/// `udm diff`.
pub fn diff(args: &DiffArgs) -> Result<()> {
    let pair = Pair::of(&args.name, args.config.as_deref());
    let name = &pair.name;
    let config = config::read(&pair.file)?;
    let mut client = match pair.connect(&RuntimeDir::open()?)? {
        Ok(client) => client,
        Err(stopped) => {
            let text = format!("{name}: {}", stopped.line());
            print_result(args.json, &text, &stopped.json(&pair))?;
            return Err(Reported.into());
        }
    };
    let wanted = Settings::of_file(name, &config).with_context(|| shown(&pair.file))?;
    let actual = Settings::of_server(&client.order("Configuration", json!({}))?)?;
    let found = wanted.differences(&actual);
    let lines: Vec<_> = found
        .iter()
        .map(|it| format!("{name}: {}: running {}, file {}", it.key, it.running(), it.file()))
        .collect();
    let value = json!({
        "name": name.as_str(),
        "file": pair.file.display().to_string(),
        "state": "running",
        "differences": found.iter().map(settings::Difference::json).collect::<Vec<_>>(),
    });
    print_result(args.json, &lines.join("\n"), &value)?;
    if found.is_empty() { Ok(()) } else { Err(Reported.into()) }
}

/// `udm apply`.
pub fn apply(args: &ApplyArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let Some(name) = &args.name else { return apply_all(&runtime, args) };
    let pair = Pair::of(name, args.config.as_deref());
    let config = config::read(&pair.file)?;
    let wanted = || Settings::of_file(name, &config).with_context(|| shown(&pair.file));
    let mut client = match pair.connect(&runtime)? {
        Ok(client) => client,
        Err(stopped) => bail!("{name}: {}", stopped.line()),
    };
    let done = change(&pair, &wanted()?, &mut client, args)?;
    print_result(args.json, &done.lines(&pair), &done.json(&pair))?;
    if done.kept.is_empty() { Ok(()) } else { Err(Reported.into()) }
}

/// Applies all files, if none has a mistake.
fn apply_all(runtime: &RuntimeDir, args: &ApplyArgs) -> Result<()> {
    let folder = config::folder();
    let files = config::files_in(&folder)?;
    if files.is_empty() {
        return Err(Usage(format!("no configuration file in {}", shown(&folder))).into());
    }
    let wrong: Vec<_> = check_all(&files)
        .into_iter()
        .flat_map(|file| file.mistakes.into_iter().map(move |what| (file.path.clone(), what)))
        .collect();
    for (path, what) in &wrong {
        print_error("apply", &anyhow!("{}:{what}", shown(path)));
    }
    if !wrong.is_empty() {
        bail!("{} mistakes; no device was changed", wrong.len());
    }
    let (mut values, mut has_failed) = (Vec::new(), false);
    for file in files {
        let one = |pair: &Pair| -> Result<(String, Value, bool)> {
            let config = config::read(&pair.file)?;
            let mut client = match pair.connect(runtime)? {
                Ok(client) => client,
                Err(it) => {
                    let is_well = it.state == "stopped";
                    return Ok((format!("{}: {}", pair.name, it.line()), it.json(pair), is_well));
                }
            };
            let wanted =
                Settings::of_file(&pair.name, &config).with_context(|| shown(&pair.file))?;
            let done = change(pair, &wanted, &mut client, args)?;
            Ok((done.lines(pair), done.json(pair), done.kept.is_empty()))
        };
        match one(&Pair { name: config::name_of(&file)?, file }) {
            Ok((lines, value, is_well)) => {
                has_failed |= !is_well;
                values.push(value);
                if !args.json.json {
                    print_line(&lines)?;
                }
            }
            Err(error) => {
                has_failed = true;
                print_error("apply", &error);
            }
        }
    }
    if args.json.json {
        print_json(&Value::Array(values))?;
    }
    if has_failed { Err(Reported.into()) } else { Ok(()) }
}

/// The changes of a device that were made, or would be made.
#[derive(Debug, Default)]
struct Done {
    is_dry: bool,
    opened: Vec<String>,
    closed: Vec<String>,
    /// Exports that stay as they are, and why.
    kept: Vec<(String, String)>,
    /// Keys that only a restart changes, and the command for it.
    restart: Option<(Vec<&'static str>, String)>,
}

impl Done {
    fn lines(&self, pair: &Pair) -> String {
        let name = &pair.name;
        let (opened, closed) = match self.is_dry {
            true => ("would open", "would close"),
            false => ("opened", "closed"),
        };
        let mut lines = Vec::new();
        lines.extend(self.opened.iter().map(|uri| format!("{name}: {opened} {uri}")));
        lines.extend(self.closed.iter().map(|uri| format!("{name}: {closed} {uri}")));
        lines.extend(self.kept.iter().map(|(uri, why)| format!("{name}: unchanged: {uri}: {why}")));
        if let Some((keys, command)) = &self.restart {
            lines.push(format!("{name}: a restart is needed for {}: `{command}`", keys.join(", ")));
        }
        if lines.is_empty() {
            lines.push(format!("{name}: is as {} says", shown(&pair.file)));
        }
        lines.join("\n")
    }

    fn json(&self, pair: &Pair) -> Value {
        let kept = self.kept.iter().map(|(uri, why)| json!({ "uri": uri, "why": why }));
        let restart = self.restart.as_ref();
        json!({
            "name": pair.name.as_str(),
            "file": pair.file.display().to_string(),
            "state": "running",
            "is_dry_run": self.is_dry,
            "opened": self.opened,
            "closed": self.closed,
            "kept": kept.collect::<Vec<_>>(),
            "restart": restart.map(|(keys, command)| json!({ "keys": keys, "command": command })),
        })
    }
}

/// Changes a device as far as that is possible without a restart.
fn change(pair: &Pair, wanted: &Settings, client: &mut Client, args: &ApplyArgs) -> Result<Done> {
    let actual = Settings::of_server(&client.order("Configuration", json!({}))?)?;
    let keys = wanted.differences(&actual).into_iter().map(|it| it.key);
    let keys: Vec<_> = keys.filter(|key| *key != "exports").collect();
    let restart = (!keys.is_empty()).then(|| (keys, pair.restart(client.server_pid())));
    let mut done = Done { is_dry: args.dry_run, restart, ..Done::default() };
    let exports = Exports::compare(&wanted.exports, &actual.exports);
    match args.dry_run {
        true => foresee(&exports, client, args.force, &mut done)?,
        false => carry_out(&exports, client, args.force, &mut done)?,
    }
    // The line has the name and the address already.
    for (uri, why) in &mut done.kept {
        let bare = why.strip_prefix(&format!("{}: ", pair.name)).unwrap_or(why);
        *why = bare.strip_prefix(&format!("{uri}: ")).unwrap_or(bare).to_owned();
    }
    Ok(done)
}

/// Opens the new exports, and closes the old ones. If a new one cannot be opened, the exports are
/// the same as before.
fn carry_out(exports: &Exports, client: &mut Client, force: bool, done: &mut Done) -> Result<()> {
    let (later, first): (Vec<_>, Vec<_>) =
        exports.new.iter().partition(|uri| exports.old.iter().any(|old| uri.excludes(old)));
    for uri in first {
        match open(client, uri) {
            Ok(opened) => done.opened.push(opened),
            Err(error) => return Err(put_back(client, done, force, error)),
        }
    }
    for old in &exports.old {
        let old = old.to_string();
        match close(client, &old, force) {
            Ok(()) => done.closed.push(old),
            Err(error) => done.kept.push((old, format!("{error:#}"))),
        }
    }
    // The old export with the same address had to be closed first.
    for uri in later {
        let in_way = |text: &String| text.parse().is_ok_and(|old: Uri| uri.excludes(&old));
        if let Some((old, _)) = done.kept.iter().find(|(old, _)| in_way(old)) {
            let why = format!("{old} has its address");
            done.kept.push((uri.to_string(), why));
            continue;
        }
        match open(client, uri) {
            Ok(opened) => done.opened.push(opened),
            Err(error) => return Err(put_back(client, done, force, error)),
        }
    }
    Ok(())
}

/// Closes the opened exports, and opens the closed ones again. Returns `error`, with the exports
/// for which this failed.
fn put_back(client: &mut Client, done: &Done, force: bool, error: Error) -> Error {
    let mut more = String::new();
    for uri in &done.opened {
        // It had a client for a moment at most.
        if let Err(why) = close(client, uri, true) {
            more += &format!("; and {uri} stays open: {why:#}");
        }
    }
    for uri in &done.closed {
        let old = uri.parse::<Uri>().map_err(Error::from);
        match old.and_then(|old| open(client, &old)) {
            Ok(_) if force => {
                more += &format!("; {uri} is open again, but --force disconnected its clients");
            }
            Ok(_) => {}
            Err(why) => more += &format!("; and {uri} is closed now: {why:#}"),
        }
    }
    if more.is_empty() { error } else { anyhow!("{error:#}{more}") }
}

/// The changes that would be made.
fn foresee(exports: &Exports, client: &mut Client, force: bool, done: &mut Done) -> Result<()> {
    let info = client.order("Info", json!({}))?;
    let all: Vec<_> = info["exports"].as_array().into_iter().flatten().collect();
    for old in &exports.old {
        let old = old.to_string();
        let export = all.iter().find(|export| export["uri"] == *old);
        match export.and_then(|export| export["clients"].as_u64()).unwrap_or(0) {
            0 => done.closed.push(old),
            _ if force => done.closed.push(old),
            1 => done.kept.push((old, "1 client is connected; --force closes it".into())),
            n => done.kept.push((old, format!("{n} clients are connected; --force closes it"))),
        }
    }
    for uri in &exports.new {
        let in_way = |text: &String| text.parse().is_ok_and(|old: Uri| uri.excludes(&old));
        match done.kept.iter().find(|(old, _)| in_way(old)) {
            Some((old, _)) => {
                let why = format!("{old} has its address");
                done.kept.push((uri.to_string(), why));
            }
            None => done.opened.push(uri.to_string()),
        }
    }
    Ok(())
}

/// Opens an export. Returns its address, of which the kernel may have chosen a part.
fn open(client: &mut Client, uri: &Uri) -> Result<String> {
    let answer = client.order("Export", json!({ "uri": uri.to_string() }))?;
    let uri = answer["export"]["uri"].as_str();
    uri.map(str::to_owned).context("the server did not return the address of the export")
}

fn close(client: &mut Client, uri: &str, force: bool) -> Result<()> {
    client.order("Unexport", json!({ "uri": uri, "force": force })).map(drop)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    // The path in the unit. Other commands may use another folder.
    #[test]
    fn the_service_reads_its_file_in_etc() {
        let command = |file: &str| {
            Pair { name: "v".parse().unwrap(), file: file.into() }.with_service("start")
        };
        assert_eq!(command("/etc/udm/v.conf"), "systemctl start udm@v");
        assert_eq!(
            command("/srv/v.conf"),
            "cp /srv/v.conf /etc/udm/v.conf && systemctl start udm@v"
        );
    }
}
