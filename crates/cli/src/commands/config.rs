//! `check-config` and `save`.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::print_result;
use crate::args::config::{CheckConfigArgs, SaveArgs};
use crate::config::{self, EXTENSION, shown};
use crate::control::Client;
use crate::output::{print_json, print_line};
use crate::runtime::RuntimeDir;

/// The state of one file.
pub struct Checked {
    /// The file.
    pub path: PathBuf,
    /// In words, with their places.
    pub mistakes: Vec<String>,
}

/// `udm check-config`.
pub fn check(args: &CheckConfigArgs) -> Result<()> {
    if args.schema {
        return print_json(&config::schema());
    }
    let mut files = args.files.clone();
    if files.is_empty() {
        let folder = config::folder();
        files = config::files_in(&folder)?;
        if files.is_empty() {
            bail!("no configuration file in {}", shown(&folder));
        }
    }
    // A file that is named twice is one file.
    let mut known = Vec::new();
    files.retain(|path| {
        let real = path.canonicalize().unwrap_or_else(|_| path.clone());
        let is_new = !known.contains(&real);
        known.push(real);
        is_new
    });
    let checked = check_all(&files);
    let wrong: usize = checked.iter().map(|file| file.mistakes.len()).sum();
    let value = |file: &Checked| {
        let path = file.path.display().to_string();
        json!({ "file": path, "mistakes": file.mistakes })
    };
    if args.json.json {
        print_json(&Value::Array(checked.iter().map(value).collect()))?;
    } else {
        for Checked { path, mistakes } in &checked {
            let path = shown(path);
            match mistakes.is_empty() {
                true => print_line(&format!("{path}: correct"))?,
                false => mistakes.iter().try_for_each(|it| print_line(&format!("{path}:{it}")))?,
            }
        }
    }
    if wrong > 0 {
        let files = checked.iter().filter(|file| !file.mistakes.is_empty()).count();
        bail!("{wrong} mistakes in {files} of {} files", checked.len());
    }
    Ok(())
}

/// Checks files that are used together.
pub fn check_all(files: &[PathBuf]) -> Vec<Checked> {
    // Where an address or a name was seen first.
    let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut check = |path: &PathBuf| {
        let mut mistakes = Vec::new();
        let mut taken = |what: String| {
            let mistake = taken(&seen, &what, path);
            seen.entry(what).or_insert_with(|| path.clone());
            mistake
        };
        match config::name_of(path) {
            Ok(name) => mistakes.extend(taken(format!("the name {name}"))),
            Err(_) => mistakes.push(format!(" a configuration file is named NAME.{EXTENSION}")),
        }
        match config::text_of(path) {
            Err(error) => mistakes.push(format!(" {error:#}")),
            Ok(text) => match config::parse(&text) {
                Err(found) => mistakes.extend(found.iter().map(ToString::to_string)),
                Ok(config) => mistakes.extend(config::addresses(&config).filter_map(&mut taken)),
            },
        }
        Checked { path: path.clone(), mistakes }
    };
    files.iter().map(&mut check).collect()
}

/// A mistake, if `what` was seen before.
fn taken(seen: &BTreeMap<String, PathBuf>, what: &str, path: &Path) -> Option<String> {
    let mistake = match seen.get(what)? {
        other if other == path => format!(" {what} is there twice"),
        other => format!(" {} uses {what} too", shown(other)),
    };
    Some(mistake)
}

/// `udm save`.
pub fn save(args: &SaveArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let mut answer = client.order("Configuration", json!({}))?;
    let table = answer["table"].as_str().unwrap_or_default();
    answer["table"] = json!(config::table_for_file(table));
    let text = config::text_from(&answer);
    match &args.output {
        None => print_result(args.json, text.strip_suffix('\n').unwrap_or(&text), &answer),
        Some(path) => {
            replace(path, &text).with_context(|| shown(path))?;
            let done = format!("{}: saved in {}", args.name, shown(path));
            print_result(args.json, &done, &answer)
        }
    }
}

/// Writes a whole file, or leaves the old one, whose rights it keeps. Links are followed. A pipe, a
/// terminal and the like are written to, and stay what they are.
pub(super) fn replace(path: &Path, text: &str) -> Result<()> {
    let path = &path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let old = std::fs::metadata(path).ok();
    if let Some(old) = old.as_ref().filter(|old| !old.is_file()) {
        if old.is_dir() || old.file_type().is_block_device() {
            bail!("this is not a file that can be replaced");
        }
        std::fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())?;
        return Ok(());
    }
    let name = path.file_name().context("no file name")?.to_string_lossy();
    let new = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let written = std::fs::File::create_new(&new).and_then(|mut file| {
        if let Some(old) = &old {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    });
    written.inspect_err(|_| drop(std::fs::remove_file(&new)))?;
    Ok(())
}
