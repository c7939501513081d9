//! Configuration files: one device each, `NAME.conf`, in TOML. docs/configuration.md lists the keys
//! for users.
//!
//! A file is checked as a whole: all mistakes are listed, each with its line and column. No device
//! is opened here. A key means the same as the option of `create` with its name, and an option on
//! the command line replaces the key. A user's consent that is for one attach is refused in a file,
//! which would give it each time.

mod files;

use std::fmt;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use udm::build::make_absolute;
use udm::table::{Table, Word};
use udm::targets::{CacheMode, Consent, caches, find_consent, without_all_consents};
use udm_export::Uri;

use crate::args::{BlockSize, CreateArgs, POLICIES, QUEUES_MAX, SetupArgs, block_size, cache_mode};
use crate::output::Usage;

pub use files::{
    EXTENSION, FOLDER, escaped, file_of, files_in, folder, name_of, read, shown, text_of,
};

/// More mistakes of a file are not listed.
const MISTAKES_MAX: usize = 100;
/// Keys that allow something once, which a file would allow each time; and the options for it.
const CONSENTS: [(&str, &str); 3] =
    [("rebind", "--rebind"), ("accept_loss", "--accept-loss"), ("force_format", "--force-format")];

/// The type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Texts,
    Number,
}

/// All keys, with types and meanings.
const KEYS: [(&str, Kind, &str); 10] = [
    ("table", Kind::Text, "the table; or give origin and fast"),
    ("origin", Kind::Text, "the slow device"),
    ("fast", Kind::Text, "the fast device, which is formatted if empty"),
    ("target", Kind::Text, "the target; udm chooses by the fast device if it is not given"),
    ("mode", Kind::Text, "writeback (the default) or writethrough"),
    ("policy", Kind::Text, "smq (the default) or probation; for the target cache"),
    ("block_size", Kind::Text, "bytes of a block of the cache, with a unit"),
    ("exports", Kind::Texts, "the addresses at which clients reach the device"),
    ("queues", Kind::Number, "the most connections of each export, from 1 to 64 (the default)"),
    ("metrics", Kind::Text, "ADDRESS:PORT where the server answers Prometheus"),
];

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// The table's text.
    pub table: Option<String>,
    /// The slow device.
    pub origin: Option<String>,
    /// The fast device.
    pub fast: Option<String>,
    /// The target.
    pub target: Option<String>,
    /// When a write is complete.
    pub mode: Option<CacheMode>,
    /// The policy of a `cache`.
    pub policy: Option<String>,
    /// The size of the cache's blocks.
    pub block_size: Option<BlockSize>,
    /// The exports for clients.
    pub exports: Vec<String>,
    /// Connections served at most.
    pub queues: Option<u16>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
}

/// A mistake in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// The mistake in words.
    pub what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.what)
    }
}

/// Parses a file's text. An error: all mistakes, in the order of their places.
pub fn parse(text: &str) -> Result<Config, Vec<Mistake>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut check = Check { text, mistakes: Vec::new() };
    for error in errors {
        let at = error.span().map_or(text.len(), |span| span.start);
        check.wrong(at, error.message().to_owned());
    }
    let config = check.config(document.get_ref());
    let mut mistakes = check.mistakes;
    mistakes.sort_by_key(|mistake| (mistake.line, mistake.column));
    if mistakes.is_empty() { Ok(config) } else { Err(mistakes) }
}

/// The check of a file.
struct Check<'a> {
    text: &'a str,
    mistakes: Vec<Mistake>,
}

type Given<'a> = Spanned<DeValue<'a>>;

impl Check<'_> {
    /// Notes a mistake at byte `at`.
    fn wrong(&mut self, at: usize, what: String) {
        if self.mistakes.len() >= MISTAKES_MAX {
            return;
        }
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        self.mistakes.push(Mistake {
            line: 1 + before.matches('\n').count(),
            column: 1 + before[line_start..].chars().count(),
            what: escaped(&what.trim_end().replace('\n', " ")),
        });
    }

    fn config(&mut self, table: &DeTable<'_>) -> Config {
        let mut config = Config::default();
        for (key, value) in table {
            match &**key.get_ref() {
                "table" => config.table = self.text(value, |text| table_of(&text)),
                "origin" => config.origin = self.text(value, |text| device_of(&text)),
                "fast" => config.fast = self.text(value, |text| device_of(&text)),
                "target" => config.target = self.text(value, target_of),
                "mode" => config.mode = self.text(value, |text| cache_mode(&text)),
                "policy" => config.policy = self.text(value, policy_of),
                "block_size" => config.block_size = self.text(value, |text| block_size(&text)),
                "exports" => config.exports = self.exports(value),
                "queues" => config.queues = self.number(value),
                "metrics" => config.metrics = self.text(value, address_of),
                other => self.wrong(key.span().start, unknown(other)),
            }
        }
        self.check_together(table);
        config
    }

    /// Keys that exclude or need each other.
    fn check_together(&mut self, table: &DeTable<'_>) {
        let place = |name: &str| {
            table.iter().find(|(key, _)| &**key.get_ref() == name).map(|(key, _)| key.span().start)
        };
        match (place("table"), place("origin"), place("fast")) {
            (Some(at), Some(_), _) | (Some(at), _, Some(_)) => {
                self.wrong(at, "give either table, or origin and fast".into());
            }
            (None, Some(at), None) => self.wrong(at, "origin needs fast".into()),
            (None, None, Some(at)) => self.wrong(at, "fast needs origin".into()),
            // A syntax error may hide them.
            (None, None, None) if self.mistakes.is_empty() => {
                self.wrong(0, "no device: give table, or origin and fast".into());
            }
            _ => {}
        }
        for name in ["target", "mode", "policy", "block_size"] {
            if let (Some(at), Some(_)) = (place(name), place("table")) {
                self.wrong(at, format!("{name} is for origin and fast; a table says it itself"));
            }
        }
    }

    /// A text that `of` accepts.
    fn text<T>(
        &mut self,
        value: &Given<'_>,
        of: impl Fn(String) -> Result<T, String>,
    ) -> Option<T> {
        let at = value.span().start;
        let DeValue::String(text) = value.get_ref() else {
            self.wrong(at, format!("expected a string in quotes, not {}", kind_of(value)));
            return None;
        };
        of(text.clone().into_owned()).map_err(|what| self.wrong(at, what)).ok()
    }

    fn texts<T>(&mut self, value: &Given<'_>, of: impl Fn(String) -> Result<T, String>) -> Vec<T> {
        let DeValue::Array(values) = value.get_ref() else {
            let what = format!("expected a list of strings, not {}", kind_of(value));
            self.wrong(value.span().start, what);
            return Vec::new();
        };
        values.iter().filter_map(|value| self.text(value, &of)).collect()
    }

    /// Exports that can be open at the same time.
    fn exports(&mut self, value: &Given<'_>) -> Vec<String> {
        let exports = self.texts(value, export_of);
        let uris: Vec<_> = exports.iter().filter_map(|uri| uri.parse::<Uri>().ok()).collect();
        for (nth, uri) in uris.iter().enumerate() {
            if uris[..nth].iter().any(|other| uri.excludes(other)) {
                self.wrong(value.span().start, format!("{uri}: its address is there twice"));
            }
        }
        exports
    }

    fn number(&mut self, value: &Given<'_>) -> Option<u16> {
        let number = match value.get_ref() {
            DeValue::Integer(number) => u16::from_str_radix(number.as_str(), number.radix()).ok(),
            _ => None,
        };
        let number = number.filter(|number| (1..=QUEUES_MAX).contains(number));
        if number.is_none() {
            self.wrong(value.span().start, format!("expected a number from 1 to {QUEUES_MAX}"));
        }
        number
    }
}

fn unknown(key: &str) -> String {
    let name = key.replace('-', "_");
    if let Some((_, option)) = CONSENTS.iter().find(|(consent, _)| *consent == name) {
        return for_one_attach(key, option);
    }
    let known = KEYS.map(|(name, ..)| name).join(", ");
    format!("unknown key {key:?}; the keys are {known}")
}

/// The refusal of words that allow something once.
fn for_one_attach(words: &str, option: &str) -> String {
    format!(
        "`{words}` must not be in a file, which would allow it each time: give {option} once, to \
         `udm create NAME --config FILE`"
    )
}

fn kind_of(value: &Given<'_>) -> &'static str {
    match value.get_ref() {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a section",
    }
}

/// A table whose paths do not depend on a current directory.
fn table_of(text: &str) -> Result<String, String> {
    let table = Table::parse(text).map_err(|error| error.to_string())?;
    udm::build::check(&table).map_err(|error| error.to_string())?;
    if let Some((consent, name, value)) = find_consent(&table) {
        let option = match consent {
            Consent::Rebind => "--rebind",
            Consent::Loss => "--accept-loss",
        };
        return Err(for_one_attach(&format!("{} {}", name.text, value.text), option));
    }
    let mut absolute = table.clone();
    make_absolute(&mut absolute, Path::new("/")).map_err(|error| error.to_string())?;
    for (given, absolute) in table.lines.iter().zip(&absolute.lines) {
        let words = given.args.iter().zip(&absolute.args);
        if let Some((given, _)) = words.into_iter().find(|(given, other)| given.text != other.text)
        {
            return Err(format!("{}: the path must begin with /", given.text));
        }
    }
    Ok(text.to_owned())
}

fn device_of(text: &str) -> Result<String, String> {
    let word = Word::new(text).device().map_err(|error| error.to_string())?;
    if text.contains('\n') {
        return Err("a table cannot name a path with a line break".into());
    }
    if !word.path.starts_with('/') && word.number().is_none() {
        return Err(format!("{text}: the path must begin with /"));
    }
    Ok(text.to_owned())
}

fn target_of(text: String) -> Result<String, String> {
    let mut names = caches().map(|(kind, _)| kind.name);
    if names.any(|name| name == text) {
        return Ok(text);
    }
    let names = caches().map(|(kind, _)| kind.name).collect::<Vec<_>>().join(", ");
    Err(format!("no cache target {text:?}; there are {names}"))
}

fn policy_of(text: String) -> Result<String, String> {
    match POLICIES.contains(&text.as_str()) {
        true => Ok(text),
        false => Err(format!("expected {}", POLICIES.join(" or "))),
    }
}

fn export_of(text: String) -> Result<String, String> {
    text.parse::<Uri>().map_err(|error| error.to_string())?;
    Ok(text)
}

fn address_of(text: String) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("{text:?}: expected ADDRESS:PORT, such as 127.0.0.1:9000"))
}

impl Config {
    /// Fills in the options that the command line leaves out.
    pub fn complete(self, args: &mut CreateArgs) -> Result<()> {
        let has_table = args.source.table.is_some() || args.source.table_file.is_some();
        if has_table || args.setup.origin.is_some() || args.setup.fast.is_some() {
            let what = "--config names the devices; give it without a table, --origin and --fast";
            return Err(Usage(what.into()).into());
        }
        args.source.table = self.table;
        let setup = &mut args.setup;
        (setup.origin, setup.fast) = (self.origin, self.fast);
        setup.target = setup.target.take().or(self.target);
        setup.mode = setup.mode.or(self.mode);
        setup.policy = setup.policy.take().or(self.policy);
        setup.block_size = setup.block_size.or(self.block_size);
        if args.export.is_empty() {
            args.export = self.exports;
        }
        args.queues = args.queues.or(self.queues);
        args.metrics = args.metrics.or(self.metrics);
        Ok(())
    }
}

impl Config {
    /// The options of `create` that put the table together, if the file names devices.
    pub fn setup(&self) -> Option<SetupArgs> {
        let origin = Some(self.origin.clone()?);
        Some(SetupArgs {
            origin,
            fast: self.fast.clone(),
            target: self.target.clone(),
            mode: self.mode,
            policy: self.policy.clone(),
            block_size: self.block_size,
            ..SetupArgs::default()
        })
    }
}

/// The addresses in a file that no other export can have too: of exports, and of metrics.
pub fn addresses(config: &Config) -> impl Iterator<Item = String> {
    let uris = config.exports.iter().filter_map(|uri| uri.parse::<Uri>().ok());
    let metrics = config.metrics.filter(|address| address.port() != 0);
    uris.filter_map(|uri| uri.place()).chain(metrics.map(|address| address.to_string()))
}

/// The table of a device as a file may have it: without any option that allows something.
pub fn table_for_file(table: &str) -> String {
    let parsed = Table::parse(table).map(|table| without_all_consents(&table).to_string());
    parsed.map_or_else(|_| table.to_owned(), |table| table.trim_end().to_owned())
}

/// The text of the configuration of a device, from what its server answers.
pub fn text_from(answer: &Value) -> String {
    let quoted = |text: &str| toml::Value::String(text.to_owned()).to_string();
    let table = table_for_file(answer["table"].as_str().unwrap_or_default());
    // Between ''', all characters stand for themselves; most control characters are not allowed.
    let is_plain = !table.contains("'''")
        && !table.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\t'));
    let mut text = match table.contains(['\n', '"', '\\']) && is_plain {
        true => format!("table = '''\n{table}\n'''\n"),
        false => format!("table = {}\n", quoted(&table)),
    };
    let exports: Vec<_> = answer["exports"].as_array().into_iter().flatten().collect();
    if !exports.is_empty() {
        text += "exports = [\n";
        for export in exports.iter().filter_map(|export| export.as_str()) {
            text += &format!("    {},\n", quoted(export));
        }
        text += "]\n";
    }
    if let Some(queues) = answer["queues"].as_u64() {
        text += &format!("queues = {queues}\n");
    }
    if let Some(metrics) = answer["metrics"].as_str() {
        text += &format!("metrics = {}\n", quoted(metrics));
    }
    text
}

/// The JSON schema of a file, for editors.
pub fn schema() -> Value {
    let property = |(name, kind, about): (&str, Kind, &str)| {
        let mut value = match kind {
            Kind::Text => json!({ "type": "string" }),
            Kind::Texts => json!({ "type": "array", "items": { "type": "string" } }),
            Kind::Number => json!({ "type": "integer", "minimum": 1, "maximum": QUEUES_MAX }),
        };
        value["description"] = json!(about);
        match name {
            "mode" => value["enum"] = json!(["writeback", "writethrough"]),
            "policy" => value["enum"] = json!(POLICIES),
            "target" => value["enum"] = caches().map(|(kind, _)| kind.name).collect(),
            _ => {}
        }
        (name.to_owned(), value)
    };
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A device of udm",
        "type": "object",
        "additionalProperties": false,
        "properties": KEYS.map(property).into_iter().collect::<serde_json::Map<_, _>>(),
        "oneOf": [{ "required": ["table"] }, { "required": ["origin", "fast"] }],
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn mistakes(text: &str) -> Vec<String> {
        parse(text).unwrap_err().iter().map(Mistake::to_string).collect()
    }

    #[test]
    fn a_file_says_what_create_would() {
        let config = parse(
            "# A volume.\norigin = '/data/slow.img'\nfast = '/dev/dax0.0?offset=1G'\n\
             target = 'pcache'\nmode = 'writeback'\nblock_size = '4K'\nqueues = 8\n\
             exports = ['nbd+unix:///run/udm/vol.sock', 'ublk:']\nmetrics = '127.0.0.1:9000'\n",
        );
        let config = config.unwrap();
        assert_eq!(config.origin.as_deref(), Some("/data/slow.img"));
        assert_eq!(config.fast.as_deref(), Some("/dev/dax0.0?offset=1G"));
        assert_eq!((config.queues, config.exports.len()), (Some(8), 2));
        assert_eq!(config.block_size, Some(BlockSize(Some(4096))));
        let config = parse("table = '''\n0 8 zero\n8 8 error\n'''").unwrap();
        assert_eq!(config.table.as_deref(), Some("0 8 zero\n8 8 error\n"));
    }

    #[test]
    fn all_mistakes_are_found_with_their_places() {
        let found = mistakes(
            "origin = 'slow.img'\nfasst = '/f'\nmode = 'sometimes'\npolicy = 7\n  queues = 65\n\
             exports = ['nbd:///x', 'smb://x']\nmetrics = 'here'\ntarget = 'linear'\n",
        );
        let places = found.iter().map(|line| line.split(": ").next().unwrap()).collect::<Vec<_>>();
        assert_eq!(
            places,
            ["1:1", "1:10", "2:1", "3:8", "4:10", "5:12", "6:12", "6:24", "7:11", "8:10"],
            "{found:#?}"
        );
        assert!(
            found[2].contains("unknown key \"fasst\"; the keys are table, origin"),
            "{found:?}"
        );
        assert!(found[4].contains("not a number"), "{found:?}");
        assert!(found[9].contains("there are "), "{found:?}");
    }

    #[test]
    fn a_file_allows_nothing() {
        let named = |text: &str, words: &str, option: &str| {
            let found = mistakes(text);
            let all = format!("`{words}` must not be in a file");
            assert!(found.len() == 1 && found[0].contains(&all), "{found:?}");
            assert!(found[0].contains(&format!("give {option} once, to `udm create")), "{found:?}");
        };
        for (line, words, option) in [
            ("pcache /f /o 0 rebind true", "rebind true", "--rebind"),
            ("pcache /f /o 2 lost_memory accept", "lost_memory accept", "--accept-loss"),
            ("pcache /f /o 0 log_damage truncate", "log_damage truncate", "--accept-loss"),
            (
                "writecache s /o /f 4096 0 lost_entries accept",
                "lost_entries accept",
                "--accept-loss",
            ),
            ("cache /m /f /o 64 0 smq 0 rebind true", "rebind true", "--rebind"),
        ] {
            named(&format!("table = '0 64 {line}'\n"), words, option);
        }
        for (key, option) in [
            ("rebind", "--rebind"),
            ("accept-loss", "--accept-loss"),
            ("accept_loss", "--accept-loss"),
            ("force_format", "--force-format"),
        ] {
            named(&format!("table = '0 8 zero'\n{key} = true\n"), key, option);
        }
        parse("table = '0 64 pcache /f /o 0 rebind false log_damage refuse'").unwrap();
        let answer = json!({ "table": "0 64 pcache /f /o 0 log_damage truncate", "exports": [] });
        assert_eq!(text_from(&answer), "table = \"0 64 pcache /f /o 0\"\n");
    }

    #[test]
    fn mistakes_are_one_line() {
        let text = "table = '0 8 zero'\nexports = [\"nbd+unix:///a\\u001b[2J\\n:1:1: x\"]\n\
                    metrics = \"a\\nb\"\n\"k\\u0007\" = 1\n";
        let found = mistakes(text);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found.iter().all(|line| !line.contains(char::is_control)), "{found:?}");
        assert!(found[0].contains("a control character"), "{found:?}");
    }

    #[test]
    fn files_that_make_no_sense_are_refused() {
        for (text, place, what) in [
            ("", "1:1", "no device"),
            ("table = '0 8 zero'\norigin = '/o'\nfast = '/f'\n", "1:1", "either table"),
            ("table = '0 8 zero'\nmode = 'writeback'\n", "2:1", "a table says it itself"),
            ("table = '0 8 linear disk 0'\n", "1:9", "disk: the path must begin with /"),
            ("table = '0 8 nonsense'\n", "1:9", "nonsense"),
            ("origin = '/o'\n", "1:1", "origin needs fast"),
            ("fast = '/o'\n", "1:1", "fast needs origin"),
            ("table = '0 8 zero\n", "1:18", "invalid literal string"),
            ("[cache]\ntable = '0 8 zero'\n", "1:2", "unknown key \"cache\""),
            ("table = '0 8 zero'\ntable = '0 8 zero'\n", "2:1", "duplicate"),
            ("table = '0 8 zero'\nqueues = 0\n", "2:10", "from 1 to 64"),
            ("table = '0 8 zero'\nqueues = 1.5\n", "2:10", "from 1 to 64"),
            (
                "table = '0 8 zero'\nexports = ['nbd+unix:///a', 'nbd+unix:///x?socket=/a']\n",
                "2:11",
                "its address is there twice",
            ),
        ] {
            let found = mistakes(text);
            let is_there = |line: &String| line.starts_with(place) && line.contains(what);
            assert!(found.iter().any(is_there), "{text:?}: {found:?}");
        }
    }

    #[test]
    fn a_saved_device_is_read_back() {
        for table in
            ["0 8 zero", "0 8 zero\n8 8 error", r"0 8 linear /a\ b 0", r"0 8 linear /it's 0"]
        {
            let exports = ["nbd+unix:///run/a%20b.sock", "nbd://[::1]:10809"];
            let answer = json!({
                "table": table, "exports": exports, "queues": 3, "metrics": "[::1]:9000",
            });
            let config = parse(&text_from(&answer)).unwrap_or_else(|all| panic!("{all:?}"));
            assert_eq!(config.table.unwrap().trim_end(), table);
            assert_eq!(config.exports, exports);
            assert_eq!((config.queues, config.metrics), (Some(3), "[::1]:9000".parse().ok()));
        }
    }
}
