//! Reports about devices and their state: `status`, `table`, `info`, `ls`, `metrics`.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Map, Value, json};
use udm::units::{SECTOR, human_bytes};

use super::rpc::{Heard, ask_all, ask_each};
use super::stopped::{self, Server};
use super::{explain, exports, print_answers};
use crate::args::watch::MetricsArgs;
use crate::args::{InfoArgs, LsArgs, StatusArgs, TableArgs};
use crate::columns::{Columns, pairs};
use crate::control::QUESTION_TIMEOUT;
use crate::http;
use crate::output::{print, print_error, print_json, print_line, print_note};
use crate::runtime::{DeviceName, RuntimeDir};

/// How long servers may take to answer a scraper, which waits for 10 seconds by default.
const SCRAPE_MAX: Duration = Duration::from_secs(4);

/// `udm status`: the kernel's lines, as `dmsetup status` prints them.
pub fn status(args: &StatusArgs) -> Result<()> {
    if args.all {
        return status_all(args);
    }
    lines("status", "Status", &json!({}), &args.names, args.json.json)
}

/// `udm table`: the lines of the active or inactive table.
pub fn table(args: &TableArgs) -> Result<()> {
    let parameters = json!({ "inactive": args.inactive });
    lines("table", "Table", &parameters, &args.names, args.json.json)
}

/// Lines of text, with the device's name in front unless exactly one was named.
fn lines(
    what: &str,
    method: &str,
    parameters: &Value,
    names: &[DeviceName],
    json: bool,
) -> Result<()> {
    let mut text = String::new();
    let mut answers = Vec::new();
    let asked = ask_each(what, names, method, parameters, &mut |name, answer| {
        let answer = answer.unwrap_or_else(|state| {
            text += &format!("{name}: {state}\n");
            json!({ "state": state, "lines": [] })
        });
        for line in answer["lines"].as_array().into_iter().flatten() {
            if names.len() != 1 {
                text += &format!("{name}: ");
            }
            text += line.as_str().unwrap_or_default();
            text += "\n";
        }
        print_notes(name.as_str(), &answer);
        let mut shown = json!({ "name": name.as_str(), "lines": answer["lines"] });
        if let Some(state) = answer.get("state") {
            shown["state"] = state.clone();
        }
        answers.push(shown);
    });
    if json {
        print_answers(names, answers)?;
    } else if answers.is_empty() && names.is_empty() {
        print_line("No devices found")?;
    } else {
        print(&text)?;
    }
    asked
}

/// The troubles of the devices below, which the kernel's lines do not contain.
fn print_notes(name: &str, answer: &Value) {
    for note in answer["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        print_note(&format!("{name}: {note}"));
    }
}

/// `udm status --all`: the lines, and every fact in words.
fn status_all(args: &StatusArgs) -> Result<()> {
    let mut text = String::new();
    let mut answers = Vec::new();
    let asked =
        ask_each("status", &args.names, "Info", &json!({}), &mut |name, answer| match answer {
            Ok(answer) => {
                text += &explain::device(name, &answer);
                answers.push(shape(answer));
            }
            Err(state) => {
                text += &format!("{name}: {state}\n");
                answers.push(lost(name, state));
            }
        });
    if args.json.json {
        print_answers(&args.names, answers)?;
    } else {
        print(&text)?;
    }
    asked
}

/// `udm info --limits`: every stated maximum.
fn limits(args: &InfoArgs) -> Result<()> {
    let mut texts = Vec::new();
    let mut answers = Vec::new();
    let asked = ask_each("info", &args.names, "Limits", &json!({}), &mut |name, answer| {
        let Ok(answer) = answer else { return };
        let mut list = Columns::new(&["LIMIT", "VALUE", "MEANING"]);
        let mut values = Map::new();
        for limit in answer["limits"].as_array().into_iter().flatten() {
            let word = |key: &str| limit[key].as_str().unwrap_or_default().to_owned();
            list.row(vec![word("name"), limit["value"].to_string(), word("about")]);
            values.insert(word("name"), limit["value"].clone());
        }
        texts.push(list.text());
        answers.push(json!({ "name": name.as_str(), "limits": values }));
    });
    if args.json.json {
        print_answers(&args.names, answers)?;
    } else {
        print(&texts.join("\n"))?;
    }
    asked
}

/// `udm info`.
pub fn info(args: &InfoArgs) -> Result<()> {
    if args.limits {
        return limits(args);
    }
    let mut texts = Vec::new();
    let mut answers = Vec::new();
    let asked = ask_each("info", &args.names, "Info", &json!({}), &mut |name, answer| {
        let answer = answer.unwrap_or_else(|state| lost(name, state));
        texts.push(describe(&answer));
        answers.push(shape(answer));
    });
    if args.json.json {
        print_answers(&args.names, answers)?;
    } else {
        print(&texts.join("\n"))?;
    }
    asked
}

/// The values shown for a device whose server does not answer.
fn lost(name: &DeviceName, state: &str) -> Value {
    json!({ "name": name.as_str(), "state": state, "targets": [] })
}

/// The number of slow requests that are shown one by one.
const SLOW_SHOWN: usize = 5;

/// Facts that every user looks for.
const PROMOTED: [&str; 12] = [
    "cached_bytes",
    "medium",
    "medium_failure",
    "medium_refusal",
    "metadata_failure",
    "medium_is_deleted",
    "medium_is_volatile",
    "origin_failure",
    "origin_missing",
    "origin_is_deleted",
    "cache_device",
    "backing_device",
];

/// An answer of `Info` as `--json` prints it: facts as an object, and the facts that every user
/// looks for next to the name.
fn shape(mut info: Value) -> Value {
    if info["exports"].is_array() {
        exports::shape_all(&mut info);
    }
    let mut first = Map::new();
    let mut used_bytes = None;
    for line in info["lines"].as_array_mut().into_iter().flatten() {
        let mut facts = Map::new();
        if let Some(list) = line["facts"].as_array() {
            for fact in list {
                let name = fact["name"].as_str().unwrap_or_default();
                insert(&mut facts, name, fact["value"].clone());
            }
        }
        for name in PROMOTED {
            if let Some(value) = facts.get(name) {
                first.entry(name).or_insert_with(|| value.clone());
            }
        }
        used_bytes = used_bytes.or_else(|| facts.get("used_bytes").cloned());
        line["facts"] = Value::Object(facts);
    }
    // A target that does not count what it caches reports how much space that takes.
    if let Some(used) = used_bytes.filter(|_| !first.contains_key("cached_bytes")) {
        first.insert("cached_bytes".to_owned(), used);
    }
    if let Some(object) = info.as_object_mut() {
        for (name, value) in first {
            object.entry(name).or_insert(value);
        }
    }
    info
}

/// A fact that appears several times becomes a list.
fn insert(facts: &mut Map<String, Value>, name: &str, value: Value) {
    match facts.get_mut(name) {
        None => {
            facts.insert(name.to_owned(), value);
        }
        Some(Value::Array(list)) => list.push(value),
        Some(first) => *first = Value::Array(vec![first.take(), value]),
    }
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or("-").to_owned()
}

/// The known facts about the rings of an export's clients.
fn rings(export: &Value) -> String {
    let mut text = match (export["rings"].as_u64(), export["clients"].as_u64()) {
        (None, _) | (_, None | Some(0)) => String::new(),
        (Some(1), _) => ", 1 ring".to_owned(),
        (Some(n), _) => format!(", {n} rings"),
    };
    if let Some(seconds) = export["without_rings_seconds"].as_u64() {
        text += &format!("; one client has had no ring for {seconds} s");
    }
    text
}

/// The slow requests, the first few in detail.
fn slow_requests(info: &Value) -> Vec<String> {
    let slow = info["slow_requests"].as_array().map_or(&[][..], Vec::as_slice);
    let shown = slow.iter().take(SLOW_SHOWN).map(|request| {
        let (what, for_what) = (word(&request["request"]), word(&request["waits_for"]));
        format!("{what}: has waited for {for_what} for {} s", request["seconds"])
    });
    let more = slow.len().checked_sub(SLOW_SHOWN).filter(|more| *more > 0);
    shown.chain(more.map(|more| format!("and {more} more"))).collect()
}

/// The state of the cache device, with the heading of each line.
fn medium_rows(shaped: &Value) -> Vec<(&'static str, String)> {
    let fields = [
        ("Medium", "medium"),
        ("Failure", "medium_failure"),
        ("Failure", "medium_refusal"),
        ("Failure", "metadata_failure"),
    ];
    let text_of = |(name, field)| Some((name, shaped[field].as_str()?.to_owned()));
    let mut rows: Vec<_> = fields.into_iter().filter_map(text_of).collect();
    if shaped["medium_is_deleted"] == true {
        let deleted = "the cache device was deleted; its data is lost when the server ends";
        rows.push(("Deleted", deleted.into()));
    }
    rows
}

/// A device in a few lines for people.
fn describe(info: &Value) -> String {
    let bytes = |value: &Value| value.as_u64().map_or_else(|| "-".into(), human_bytes);
    let mut rows: Vec<(String, String)> = vec![
        ("Name".into(), word(&info["name"])),
        ("State".into(), word(&info["state"]).to_uppercase()),
    ];
    if info["lines"].is_null() {
        return pairs(&rows);
    }
    let mut row = |name: &str, value: String| rows.push((name.to_owned(), value));
    let sectors = info["size_bytes"].as_u64().unwrap_or(0) / SECTOR;
    row("Size", format!("{} ({sectors} sectors)", bytes(&info["size_bytes"])));
    if info["is_read_only"] == true {
        row("Read-only", "a device of the table is read-only".into());
    }
    let inactive = info["has_inactive_table"] == true;
    row("Tables present", if inactive { "LIVE & INACTIVE".into() } else { "LIVE".into() });
    for line in info["lines"].as_array().into_iter().flatten() {
        row("Table", word(&line["table"]));
    }
    let shaped = shape(info.clone());
    for export in shaped["exports"].as_array().into_iter().flatten() {
        let clients = match export["clients"].as_u64() {
            Some(1) => "1 client".to_owned(),
            n => format!("{} clients", n.unwrap_or(0)),
        };
        row("Export", format!("{} ({clients}{})", word(&export["client_uri"]), rings(export)));
    }
    if let Some(uri) = info["metrics"].as_str() {
        row("Metrics", uri.to_owned());
    }
    for (name, text) in medium_rows(&shaped) {
        row(name, text);
    }
    for name in ["origin_failure", "origin_missing"] {
        if let Some(text) = shaped[name].as_str() {
            row("Origin", text.to_owned());
        }
    }
    row("Dirty data", bytes(&info["dirty_bytes"]));
    if shaped["cached_bytes"].is_u64() {
        row("Cached data", bytes(&shaped["cached_bytes"]));
    }
    let is_told = shaped["medium_failure"].is_string() || shaped["origin_failure"].is_string();
    if info["is_writeback_failing"] == true && !is_told {
        row("Write-back", "the origin fails; udm retries with growing pauses".into());
    }
    for stall in info["stalls"].as_array().into_iter().flatten() {
        let (device, seconds) = (word(&stall["waits_for"]), &stall["seconds"]);
        row("Write-back", format!("waits for {device}, which has not answered for {seconds} s"));
    }
    for text in slow_requests(info) {
        row("Slow", text);
    }
    row("Server", format!("process {}, since {}", info["pid"], word(&info["started"])));
    let watch = &info["watch"];
    if let (Some(nanos), Some(caught)) = (watch["nanoseconds"].as_u64(), watch["caught"].as_u64()) {
        let ms = nanos / 1_000_000;
        row("Busy polling", format!("{ms} ms, {caught} requests found"));
    }
    if let Some(log) = info["log"].as_str() {
        row("Log", log.to_owned());
    }
    pairs(&rows)
}

/// `udm ls`: all devices, including those that do not answer.
pub fn ls(args: &LsArgs) -> Result<()> {
    let runtime = RuntimeDir::open()?;
    let mut rows = Vec::new();
    let mut answers = Vec::new();
    for summary in summaries(&runtime, args.all)? {
        let targets: Vec<&str> = texts(&summary["targets"]);
        let is_known = args.target.as_ref().is_none_or(|wanted| targets.contains(&wanted.as_str()));
        // The targets of a device that does not answer are unknown.
        if is_known || targets.is_empty() {
            rows.push(cells(&summary, &targets));
            answers.push(summary);
        }
    }
    // Most devices are not disks of this host: without any disk the column is omitted.
    let has_disk = rows.iter().any(|cells| cells.last().is_some_and(|disk| disk != "-"));
    let headings = ["NAME", "STATE", "SIZE", "TARGET", "DIRTY", "CLIENTS", "DISK"];
    let count = headings.len() - usize::from(!has_disk);
    let mut list = Columns::new(&headings[..count]);
    rows.into_iter().for_each(|cells| list.row(cells[..count].to_vec()));
    match (args.json.json, answers.is_empty()) {
        (true, _) => print_json(&Value::Array(answers)),
        (false, true) => print_line("No devices found"),
        (false, false) => print(&list.text()),
    }
}

/// The summaries of all devices that have a server, and of the stopped devices if wanted. Prints
/// their notes.
fn summaries(runtime: &RuntimeDir, with_stopped: bool) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    let mut listed = Vec::new();
    let names = runtime.names()?;
    let all_heard = ask_all(runtime, &names, "Info", &json!({}), QUESTION_TIMEOUT);
    for (name, heard) in names.iter().zip(all_heard) {
        all.push(match heard {
            Heard::NoDevice(_) => continue,
            Heard::Lost(state, why) => {
                print_note(&format!("{why:#}"));
                listed.push(Server { name: name.clone(), table: None });
                lost(name, state)
            }
            Heard::Answer(info) => {
                print_notes(name.as_str(), &info);
                listed.push(Server::of(name, &info));
                summary(&info)
            }
        });
    }
    if with_stopped {
        for summary in stopped::summaries(&listed)? {
            print_notes(summary["name"].as_str().unwrap_or("-"), &summary);
            all.push(summary);
        }
        all.sort_by(|one, other| one["name"].as_str().cmp(&other["name"].as_str()));
    }
    Ok(all)
}

/// The summary of a device whose server answers.
fn summary(info: &Value) -> Value {
    let lines = info["lines"].as_array().into_iter().flatten();
    let mut targets: Vec<&str> = lines.filter_map(|line| line["target"].as_str()).collect();
    targets.sort_unstable();
    targets.dedup();
    let exports = info["exports"].as_array().into_iter().flatten();
    let places = exports.filter_map(|export| export["client_uri"].as_str());
    let disks = places.filter(|place| place.starts_with("/dev/"));
    let has_failed = |line: &Value| {
        let facts = line["facts"].as_array().into_iter().flatten();
        facts.into_iter().any(|fact| fact["name"] == "medium_has_failed" && fact["value"] == true)
    };
    let has_failed = info["lines"].as_array().into_iter().flatten().any(has_failed);
    json!({
        "name": info["name"],
        "state": if has_failed { json!("failed") } else { info["state"].clone() },
        "size_bytes": info["size_bytes"],
        "targets": targets,
        "dirty_bytes": info["dirty_bytes"],
        "clients": info["clients"],
        "disks": disks.collect::<Vec<_>>(),
        "notes": info["notes"],
    })
}

fn cells(summary: &Value, targets: &[&str]) -> Vec<String> {
    let bytes = |value: &Value| value.as_u64().map_or_else(|| "-".to_owned(), human_bytes);
    let targets = if targets.is_empty() { "-".to_owned() } else { targets.join(",") };
    let disks = texts(&summary["disks"]);
    vec![
        summary["name"].as_str().unwrap_or("-").to_owned(),
        summary["state"].as_str().unwrap_or("-").to_owned(),
        bytes(&summary["size_bytes"]),
        targets,
        bytes(&summary["dirty_bytes"]),
        summary["clients"].as_u64().map_or_else(|| "-".to_owned(), |n| n.to_string()),
        if disks.is_empty() { "-".to_owned() } else { disks.join(",") },
    ]
}

fn texts(list: &Value) -> Vec<&str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// `udm metrics`.
pub fn metrics(args: &MetricsArgs) -> Result<()> {
    if let Some(address) = args.serve {
        return serve_metrics(address, &args.names);
    }
    let (mut answers, mut lost) = (Vec::new(), Vec::new());
    let asked =
        ask_each("metrics", &args.names, "Info", &json!({}), &mut |name, answer| match answer {
            Ok(answer) => answers.push(answer),
            Err(_) => lost.push(name.clone()),
        });
    if args.json.json {
        print_answers(&args.names, answers.into_iter().map(shape).collect())?;
    } else {
        print(&crate::metrics::text(&answers, &lost))?;
    }
    asked
}

/// Answers `GET /metrics` for these devices, or for all, until the command is ended.
fn serve_metrics(address: SocketAddr, names: &[DeviceName]) -> Result<()> {
    RuntimeDir::open()?;
    let (listener, address) = http::listen(address)?;
    print_line(&format!("metrics are at http://{address}/metrics"))?;
    http::answer_all(&listener, &|| {
        scrape(names).inspect_err(|error| print_error("metrics", error))
    });
    Ok(())
}

fn scrape(names: &[DeviceName]) -> Result<String> {
    // Opened each time: it may be replaced while this runs.
    let runtime = RuntimeDir::open()?;
    let listed = if names.is_empty() { runtime.names()? } else { names.to_vec() };
    let (mut answers, mut lost) = (Vec::new(), Vec::new());
    let heard = ask_all(&runtime, &listed, "Info", &json!({}), SCRAPE_MAX);
    for (name, heard) in listed.iter().zip(heard) {
        match heard {
            Heard::Answer(answer) => answers.push(answer),
            // It was removed since the directory was read.
            Heard::NoDevice(_) if names.is_empty() => {}
            Heard::NoDevice(_) | Heard::Lost(..) => lost.push(name.clone()),
        }
    }
    Ok(crate::metrics::text(&answers, &lost))
}
