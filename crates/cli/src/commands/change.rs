//! Commands that change a device: `message`, `suspend`, `resume`, `flush`, `load`, `rename`.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::create::read_table;
use super::print_result;
use crate::args::{LoadArgs, MessageArgs, NameArgs, RenameArgs};
use crate::control::Client;
use crate::loading::{current_directory, with_whole_line};
use crate::output::print_note;
use crate::runtime::RuntimeDir;

/// A method without parameters and without a result.
pub fn simple(method: &str, args: &NameArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    client.order(method, json!({}))?;
    print_result(args.json, "", &json!({ "name": args.name.as_str() }))
}

/// `udm message`.
pub fn message(args: &MessageArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let parameters = json!({ "sector": args.sector, "words": args.words });
    let answer = client.order("Message", parameters)?;
    let text = answer["text"].as_str().unwrap_or_default();
    print_result(args.json, text, &json!({ "name": args.name.as_str(), "text": text }))
}

/// `udm load`.
pub fn load(args: &LoadArgs) -> Result<()> {
    let table = read_table(&args.source)?;
    let directory = current_directory();
    let directory = directory.to_str().context("the current directory's path is not UTF-8")?;
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let answer = client.order("Load", json!({ "table": table, "directory": directory }));
    let answer = answer.map_err(|error| with_whole_line(error, &table))?;
    for note in answer["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        print_note(&format!("{}: {note}", args.name));
    }
    let text = format!("{0}: loaded; `udm resume {0}` makes it live", args.name);
    print_result(args.json, &text, &json!({ "name": args.name.as_str() }))
}

/// `udm rename`.
pub fn rename(args: &RenameArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    client.order("Rename", json!({ "to": args.new_name.as_str() }))?;
    print_result(args.json, "", &json!({ "name": args.new_name.as_str() }))
}
