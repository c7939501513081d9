//! `create`: starts a server process, and waits until it serves or fails.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use udm::sync::Arc;
use udm::table::Table;
use udm::units::human_bytes;
use udm_export::{Uri, activation};

use super::setup::Composed;
use super::{exports, print_result, recover, setup};
use crate::args::{CreateArgs, JsonArgs, SetupArgs, TableSource};
use crate::attach_progress::{Shown, Step};
use crate::config;
use crate::control::{Answer, Client};
use crate::daemon::{NAME_IS_USED, serve_here};
use crate::loading::with_whole_line;
use crate::output::{Usage, print_note};
use crate::process::doing;
use crate::runtime::{DeviceName, RuntimeDir};
use crate::server::title;
use crate::spec::Spec;

/// A server that makes no progress for this long is reported.
const SILENCE: Duration = Duration::from_secs(10);

/// How long the present server of a name may take to answer at first.
const ANSWER_MAX: Duration = Duration::from_millis(300);

/// The longest table that is read; the engine's own limit is lower.
const TABLE_BYTES_MAX: u64 = 1 << 20;

/// `udm create`.
pub fn create(mut args: CreateArgs) -> Result<()> {
    let device = match (&args.name, &args.config) {
        (Some(name), _) => name.clone(),
        (None, Some(path)) => config::name_of(path)?,
        (None, None) => return Err(Usage("no name".into()).into()),
    };
    let name = device.as_str();
    let is_from_file = args.config.is_some();
    let of = if is_from_file { "the file" } else { "--origin and --fast" };
    if let Some(path) = args.config.take() {
        config::read(&path)?.complete(&mut args)?;
    }
    if let (Some(option), None) = (args.setup.option_for_devices(), &args.setup.origin) {
        let what = format!("{option} needs an origin and a fast device, from {of}");
        return Err(Usage(what).into());
    }
    if !args.setup.dry_run {
        refuse_used_name(&device)?;
    }
    let composed = match args.setup.origin {
        Some(_) => Some(setup::compose(name, &args.setup, args.force_format)?),
        None => None,
    };
    if let Some(note) = composed.as_ref().and_then(|composed| composed.note.as_ref()) {
        print_note(&format!("{name}: {note}"));
    }
    if args.setup.dry_run
        && let Some(composed) = &composed
    {
        let mut value = json!({ "name": name });
        composed.tell(&mut value);
        return print_result(args.json, &composed.lines(name).join("\n"), &value);
    }
    let spec = Spec {
        name: name.to_owned(),
        table: match &composed {
            Some(composed) => composed.table.clone(),
            None => consented(read_table(&args.source)?, &args.setup)?,
        },
        exports: args.export,
        queues: args.queues,
        force_format: args.force_format,
        metrics: args.metrics,
        progress: Arc::default(),
    };
    // A user who did not write the table gets advice about options.
    let has_table = composed.is_none() && !is_from_file;
    let advise = |error: anyhow::Error| match has_table {
        true => with_whole_line(error, &spec.table),
        false => recover::in_words_of_options(&error, "--accept-loss"),
    };
    if args.foreground {
        let exports = spec.exports.iter().map(|uri| uri.parse());
        let exports = exports.collect::<udm::error::Result<Vec<Uri>>>()?;
        let addresses: Vec<_> = exports.iter().filter_map(Uri::socket).collect();
        activation::take(&addresses)?;
        let ready = |ready: &Value| announce(args.json, ready, composed, args.force_format);
        return serve_here(&spec, ready).map_err(advise);
    }
    if activation::is_asked() {
        let advice = "sockets were passed to this process (LISTEN_FDS), and only a server in the \
                      foreground takes them: add --foreground";
        return Err(Usage(advice.into()).into());
    }
    let runtime = RuntimeDir::open()?;
    let ready = start_server(&runtime, &device, &spec).map_err(advise)?;
    announce(args.json, &ready, composed, args.force_format)
}

/// The table with the options by which the user allows something for this attach. The server
/// reports the mistakes of a table.
fn consented(text: String, args: &SetupArgs) -> Result<String> {
    match Table::parse(&text) {
        Ok(mut table) if args.rebind || args.accept_loss => {
            setup::consent(&mut table, args)?;
            Ok(table.to_string())
        }
        _ => Ok(text),
    }
}

/// An error if a device of this name is served: before its devices are examined, which takes time.
/// The new server checks again, and handles a server that died or hangs.
fn refuse_used_name(name: &DeviceName) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let Ok(Ok(mut client)) = Client::find_within(&runtime, name, ANSWER_MAX) else {
        return Ok(());
    };
    match client.ask_within("Status", Value::Null, ANSWER_MAX) {
        Ok(_) => bail!("{name}: {NAME_IS_USED}"),
        Err(_) => Ok(()),
    }
}

/// The table's text: from the argument, the file, or standard input.
pub fn read_table(source: &TableSource) -> Result<String> {
    if let Some(table) = &source.table {
        return Ok(table.clone());
    }
    let mut bytes = Vec::new();
    let place = match &source.table_file {
        Some(path) => {
            let place = format!("table file {}", path.display());
            let file = std::fs::File::open(path).with_context(|| place.clone())?;
            file.take(TABLE_BYTES_MAX + 1)
                .read_to_end(&mut bytes)
                .with_context(|| place.clone())?;
            place
        }
        None => {
            let stdin = std::io::stdin();
            if rustix::termios::isatty(&stdin) {
                let advice = "no table: give --table, --table-file, or one on standard input";
                return Err(Usage(advice.into()).into());
            }
            let place = "table on standard input";
            stdin.take(TABLE_BYTES_MAX + 1).read_to_end(&mut bytes).context(place)?;
            place.into()
        }
    };
    if bytes.len() as u64 > TABLE_BYTES_MAX {
        bail!("{place}: longer than {}", human_bytes(TABLE_BYTES_MAX));
    }
    String::from_utf8(bytes).map_err(|_| anyhow!("{place}: not UTF-8 text"))
}

/// Starts the server and waits until it serves, or reports the reason for its failure.
fn start_server(runtime: &RuntimeDir, name: &DeviceName, spec: &Spec) -> Result<Value> {
    let log = runtime.open_log(name)?;
    // The program's file may have been replaced since this process started; this path is the
    // running program.
    let mut server = Command::new("/proc/self/exe")
        .arg0(title(name))
        .args(["serve", name.as_str()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("start the server process")?;
    let mut input = server.stdin.take().context("the server's standard input")?;
    let output = server.stdout.take().context("the server's standard output")?;
    // If the write fails, the server has ended, which is noticed below.
    let _ = input.write_all(&serde_json::to_vec(spec)?);
    drop(input);
    let mut shown = Shown::new(name.as_str());
    let pid = i32::try_from(server.id()).unwrap_or_default();
    let silent = || {
        let seconds = SILENCE.as_secs();
        print_note(&format!(
            "{name}: its server has made no progress for {seconds} s; still waiting: {}",
            doing(pid)
        ));
    };
    let heard = hear(output, |step| shown.show(step), silent)
        .with_context(|| format!("{name}: wait for the server to report"))?;
    drop(shown);
    match heard {
        Some(answer) => answer.into_result(),
        None => Err(died(runtime, name, &mut server)),
    }
}

/// Reports progress until the server's last answer, and returns that answer, if there is one.
/// `silent` is called after each [`SILENCE`] without progress. Waits as long as the server lives;
/// its end closes `from`.
fn hear(
    from: impl Read + Send + 'static,
    mut show: impl FnMut(&Step),
    mut silent: impl FnMut(),
) -> std::io::Result<Option<Answer>> {
    let (said, lines) = channel();
    // The thread is not joined, so that the command does not wait for a server that it has given
    // up.
    let reader = thread::Builder::new().name("udm-hear".into());
    reader.spawn(move || {
        for line in BufReader::new(from).lines() {
            if said.send(line).is_err() {
                return;
            }
        }
    })?;
    let mut last: Option<(String, u64)> = None;
    let mut news = Instant::now();
    loop {
        let line = match lines.recv_timeout(SILENCE.saturating_sub(news.elapsed())) {
            Ok(line) => line?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                silent();
                news = Instant::now();
                continue;
            }
        };
        let Ok(answer) = serde_json::from_str::<Answer>(&line) else { return Ok(None) };
        if !answer.continues {
            return Ok(Some(answer));
        }
        if let Ok(step) = serde_json::from_value::<Step>(answer.parameters) {
            let place = Some((step.what.clone(), step.done));
            if place != last {
                (last, news) = (place, Instant::now());
            }
            show(&step);
        }
    }
}

/// The error of a server that ended without an answer: how it ended, and its last log lines.
fn died(runtime: &RuntimeDir, name: &DeviceName, server: &mut Child) -> anyhow::Error {
    let how = match server.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => format!("with exit code {code}"),
            (None, Some(signal)) => format!("by signal {signal}"),
            (None, None) => "somehow".into(),
        },
        Err(error) => format!("({error})"),
    };
    let log = runtime.log(name);
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let last = text.lines().rfind(|line| line.contains("Z ")).unwrap_or("(no message)");
    anyhow!("{name}: the server ended {how} before it was ready; log {}: {last}", log.display())
}

/// Prints the addresses where the device is served.
fn announce(
    json: JsonArgs,
    ready: &Value,
    mut composed: Option<Composed>,
    is_forced: bool,
) -> Result<()> {
    let has_formatted = ready["formatted"] == true;
    composed.iter_mut().for_each(|composed| composed.is_done(has_formatted));
    let name = ready["name"].as_str().unwrap_or_default();
    let size = human_bytes(ready["size_bytes"].as_u64().unwrap_or(0));
    let texts = |key: &str| -> Vec<String> {
        let list = ready[key].as_array().into_iter().flatten();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut lines = composed.as_ref().map_or_else(Vec::new, |composed| composed.lines(name));
    if is_forced && has_formatted && composed.is_none() {
        lines.push(format!("{name}: its cache device was formatted, as --force-format says"));
    }
    let told = lines.len();
    for export in ready["exports"].as_array().into_iter().flatten() {
        let uri = export["client_uri"].as_str().unwrap_or_default();
        lines.push(format!("{name}: serving {size} at {uri}"));
    }
    if lines.len() == told {
        lines.push(format!("{name}: created, {size}; `udm export {name} URI` lets clients in"));
    }
    if let Some(uri) = ready["metrics"].as_str() {
        lines.push(format!("{name}: metrics at {uri}"));
    }
    for note in texts("notes") {
        print_note(&format!("{name}: {note}"));
    }
    let mut ready = ready.clone();
    exports::shape_all(&mut ready);
    composed.iter().for_each(|composed| composed.tell(&mut ready));
    print_result(json, &lines.join("\n"), &ready)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use udm::base::attaching::AttachProgress;

    use super::*;
    use crate::attach_progress::watched;
    use crate::daemon::write_step;

    #[test]
    fn what_a_slow_server_says_is_heard_in_order() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (heard, is_heard) = channel::<u64>();
        let progress = AttachProgress::default();
        let server = std::thread::spawn(move || {
            let mut out = writer.try_clone().unwrap();
            let tell = |step: &Step| write_step(&mut out, step).unwrap();
            progress.begin("entries", 16);
            progress.has_come_to(4);
            // The work waits until the caller has received each of its steps.
            let open = || {
                for nth in [4, 8, 12] {
                    progress.has_come_to(nth);
                    while is_heard.recv_timeout(Duration::from_secs(60)).unwrap() < nth {}
                }
            };
            watched(&progress, tell, open);
            drop(out);
            writeln!(writer, "{}", serde_json::to_string(&Answer::done(json!(7))).unwrap())
        });
        let mut steps = Vec::new();
        let show = |step: &Step| {
            steps.push(step.clone());
            // The work may have ended already.
            let _ = heard.send(step.done);
        };
        let answer = hear(reader, show, || {}).unwrap();
        server.join().unwrap().unwrap();
        assert_eq!(answer.unwrap().parameters, json!(7));
        assert!(steps.is_sorted_by_key(|step| step.done), "{steps:?}");
        let has = |done| steps.iter().any(|step| step.done == done);
        assert!(has(4) && has(8) && has(12), "{steps:?}");
        let is_late = |step: &Step| step.seconds >= 1.0 && step.done > 0;
        assert!(steps.iter().all(|step| is_late(step) && step.total == Some(16)), "{steps:?}");
        // The reports' own times, which a slow machine only moves further apart.
        let pauses = steps.windows(2).map(|pair| pair[1].seconds - pair[0].seconds);
        assert!(pauses.into_iter().all(|pause| pause > 0.249), "{steps:?}");
    }

    #[test]
    fn a_server_that_dies_says_no_last_word() {
        let step = Step { what: "entries".into(), done: 5, total: Some(10), seconds: 1.0 };
        let mut said = Vec::new();
        write_step(&mut said, &step).unwrap();
        let mut steps = Vec::new();
        let said = std::io::Cursor::new(said);
        let answer = hear(said, |step| steps.push(step.clone()), || {}).unwrap();
        assert!(answer.is_none() && steps == [step]);
    }
}
