//! `check-config` and `save`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use super::print_result;
use crate::args::config::{CheckConfigArgs, SaveArgs};
use crate::config::{self, FOLDER};
use crate::control::Client;
use crate::output::{print_json, print_line};
use crate::runtime::RuntimeDir;

/// The state of one file.
struct Checked {
    path: PathBuf,
    /// In words, with their places.
    mistakes: Vec<String>,
}

/// `udm check-config`.
pub fn check(args: &CheckConfigArgs) -> Result<()> {
    if args.schema {
        return print_json(&config::schema());
    }
    let mut files = args.files.clone();
    if files.is_empty() {
        files = config::files_in(Path::new(FOLDER))?;
        if files.is_empty() {
            bail!("no configuration file in {FOLDER}");
        }
    }
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
            let path = path.display();
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

fn check_all(files: &[PathBuf]) -> Vec<Checked> {
    // Where an address or a name was seen first.
    let mut seen: BTreeMap<String, PathBuf> = BTreeMap::new();
    let mut check = |path: &PathBuf| {
        let mut mistakes = Vec::new();
        match config::name_of(path) {
            Ok(name) => mistakes.extend(taken(&mut seen, format!("the name {name}"), path)),
            Err(error) => mistakes.push(format!(" {error:#}")),
        }
        match config::text_of(path) {
            Err(error) => mistakes.push(format!(" {error:#}")),
            Ok(text) => match config::parse(&text) {
                Err(found) => mistakes.extend(found.iter().map(ToString::to_string)),
                Ok(config) => mistakes
                    .extend(config::addresses(&config).filter_map(|it| taken(&mut seen, it, path))),
            },
        }
        Checked { path: path.clone(), mistakes }
    };
    files.iter().map(&mut check).collect()
}

/// A mistake, if another file has `what` too.
fn taken(seen: &mut BTreeMap<String, PathBuf>, what: String, path: &Path) -> Option<String> {
    let is_any = what.ends_with(":0") || what == "ublk:";
    if let Some(other) = seen.get(&what).filter(|other| *other != path && !is_any) {
        return Some(format!(" {} uses {what} too", other.display()));
    }
    seen.insert(what, path.to_owned());
    None
}

/// `udm save`.
pub fn save(args: &SaveArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let answer = client.order("Configuration", json!({}))?;
    let text = config::text_from(&answer);
    print_result(args.json, text.trim_end(), &answer)
}
