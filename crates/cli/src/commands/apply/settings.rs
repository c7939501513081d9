//! The settings of a device, from its server or from its file, in one form that can be compared.

use std::net::SocketAddr;

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use udm::table::Table;
use udm_export::Uri;

use crate::args::QUEUES_MAX;
use crate::commands::setup;
use crate::config::{Config, table_for_file};
use crate::runtime::DeviceName;

/// The settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The table, parsed and printed again.
    table: String,
    /// The exports for clients.
    pub exports: Vec<Uri>,
    queues: u16,
    metrics: Option<SocketAddr>,
}

/// A key whose values differ.
#[derive(Debug)]
pub struct Difference {
    /// The key of the file.
    pub key: &'static str,
    running: Value,
    file: Value,
}

impl Settings {
    /// The settings that a file asks for. The devices of a file without a table are read.
    pub fn of_file(name: &DeviceName, config: &Config) -> Result<Settings> {
        let table = match (&config.table, config.setup()) {
            (Some(table), _) => table.clone(),
            (None, Some(args)) => setup::compose(name.as_str(), &args, false)?.table,
            (None, None) => bail!("no device: give table, or origin and fast"),
        };
        Ok(Settings {
            table: in_one_form(&table)?,
            exports: uris(&config.exports)?,
            queues: config.queues.unwrap_or(QUEUES_MAX),
            metrics: config.metrics,
        })
    }

    /// The settings that a server has, from its answer to `Configuration`.
    pub fn of_server(answer: &Value) -> Result<Settings> {
        let exports = answer["exports"].as_array().into_iter().flatten();
        let exports: Vec<_> = exports.filter_map(Value::as_str).map(str::to_owned).collect();
        let queues = answer["queues"].as_u64().and_then(|queues| queues.try_into().ok());
        let metrics = answer["metrics"].as_str().map(str::parse).transpose();
        Ok(Settings {
            table: in_one_form(answer["table"].as_str().unwrap_or_default())?,
            exports: uris(&exports)?,
            queues: queues.unwrap_or(QUEUES_MAX),
            metrics: metrics.context("the address of metrics")?,
        })
    }

    /// The differences between these settings of a file and the settings of its server.
    pub fn differences(&self, running: &Settings) -> Vec<Difference> {
        let mut found = Vec::new();
        let mut add = |key, running, file| found.push(Difference { key, running, file });
        if self.table != running.table {
            add("table", json!(running.table), json!(self.table));
        }
        let exports = Exports::compare(&self.exports, &running.exports);
        if !exports.new.is_empty() || !exports.old.is_empty() {
            let texts = |uris: &[Uri]| uris.iter().map(Uri::to_string).collect();
            add("exports", texts(&running.exports), texts(&self.exports));
        }
        if self.queues != running.queues {
            add("queues", json!(running.queues), json!(self.queues));
        }
        let is_chosen = |wanted: SocketAddr, actual: SocketAddr| {
            wanted.ip() == actual.ip() && [0, actual.port()].contains(&wanted.port())
        };
        let is_same = match (self.metrics, running.metrics) {
            (Some(wanted), Some(actual)) => is_chosen(wanted, actual),
            (wanted, actual) => wanted == actual,
        };
        if !is_same {
            add("metrics", json!(running.metrics), json!(self.metrics));
        }
        found
    }
}

impl Difference {
    /// The value of the server, for people.
    pub fn running(&self) -> String {
        shown(&self.running)
    }

    /// The value of the file, for people.
    pub fn file(&self) -> String {
        shown(&self.file)
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({ "key": self.key, "running": self.running, "file": self.file })
    }
}

/// A value in one line.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => format!("`{}`", text.replace('\n', "; ")),
        Value::Array(all) if all.is_empty() => "none".into(),
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

fn uris(texts: &[String]) -> Result<Vec<Uri>> {
    texts.iter().map(|text| text.parse().map_err(|error| anyhow!("{error}"))).collect()
}

fn in_one_form(table: &str) -> Result<String> {
    Ok(table_for_file(&Table::parse(table)?.to_string()))
}

/// The difference between two lists of exports.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Exports {
    /// Wanted, and not open.
    pub new: Vec<Uri>,
    /// Open, and not wanted.
    pub old: Vec<Uri>,
}

impl Exports {
    /// Compares the wanted exports with the open ones. An address whose port or number the kernel
    /// chooses matches any open export that is not wanted by its own address.
    pub fn compare(wanted: &[Uri], open: &[Uri]) -> Exports {
        let mut exports = Exports { new: wanted.to_vec(), old: open.to_vec() };
        let is_same: [fn(&Uri, &Uri) -> bool; 2] = [|one, other| one == other, Uri::may_become];
        for is_same in is_same {
            exports.new.retain(|uri| {
                let found = exports.old.iter().position(|open| is_same(uri, open));
                found.map(|at| exports.old.remove(at)).is_none()
            });
        }
        exports
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn settings(table: &str, exports: &[&str], queues: u16, metrics: Option<&str>) -> Settings {
        Settings::of_server(&json!({
            "table": table, "exports": exports, "queues": queues, "metrics": metrics,
        }))
        .unwrap()
    }

    #[test]
    fn tables_are_compared_as_tables() {
        let of = |table: &str| settings(table, &[], 64, None);
        let keys = |one: &str, other: &str| of(one).differences(&of(other)).len();
        for (one, other) in [
            ("0 8 zero", "# A comment.\n\n  0   8\tzero  # another\n"),
            (r"0 8 linear /a\ b 0", r"0 8 linear /\a\ b 0"),
            ("0 64 pcache /f /o 0", "0 64 pcache /f /o 0 log_damage truncate"),
        ] {
            assert_eq!(keys(one, other), 0, "{one} {other}");
        }
        assert_eq!(keys("0 8 zero", "0 16 zero"), 1);
        assert_eq!(keys("0 8 zero", "0 8 error"), 1);
    }

    #[test]
    fn all_differences_are_found() {
        let one = settings("0 8 zero", &["ublk:", "nbd+unix:///a"], 64, Some("127.0.0.1:0"));
        let actual = ["nbd+unix:///?socket=/a", "ublk:7"];
        let same = settings("0 8 zero", &actual, 64, Some("127.0.0.1:9000"));
        assert!(one.differences(&same).is_empty());
        let other = settings("0 8 zero\n8 8 zero", &["ublk:7"], 8, None);
        let found = one.differences(&other);
        let lines: Vec<_> =
            found.iter().map(|it| [it.key, &it.running(), &it.file()].join(" | ")).collect();
        assert_eq!(
            lines,
            [
                "table | `0 8 zero; 8 8 zero` | `0 8 zero`",
                "exports | ublk:7 | ublk: nbd+unix:///a",
                "queues | 8 | 64",
                "metrics | none | `127.0.0.1:0`",
            ]
        );
    }

    #[test]
    fn exact_addresses_are_matched_first() {
        let uris = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect::<Vec<_>>();
        let exports = Exports::compare(&uris(&["ublk:", "ublk:3"]), &uris(&["ublk:3", "ublk:4"]));
        assert_eq!(exports, Exports::default());
        let exports = Exports::compare(&uris(&["ublk:", "ublk:"]), &uris(&["ublk:3"]));
        assert_eq!((exports.new, exports.old), (uris(&["ublk:"]), vec![]));
    }
}
