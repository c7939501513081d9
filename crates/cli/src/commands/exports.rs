//! `export` and `unexport`: exports for clients, opened and closed while the device serves.

use anyhow::Result;
use serde_json::{Value, json};

use super::print_result;
use crate::args::exports::{ExportArgs, UnexportArgs};
use crate::control::Client;
use crate::output::print_note;
use crate::runtime::RuntimeDir;

/// `udm export`.
pub fn export(args: &ExportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let mut answer = client.order("Export", json!({ "uri": args.uri }))?;
    let mut answer = answer["export"].take();
    shape(&mut answer);
    let notes = answer["notes"].as_array().cloned().unwrap_or_default();
    for note in notes.iter().filter_map(Value::as_str) {
        print_note(&format!("{}: {note}", args.name));
    }
    let text =
        format!("{}: serving at {}", args.name, answer["client_uri"].as_str().unwrap_or("-"));
    print_result(args.json, &text, &answer)
}

/// Makes an export what `--json` prints: its facts stand next to the other fields.
fn shape(export: &mut Value) {
    let Some(object) = export.as_object_mut() else { return };
    for fact in object.remove("facts").iter().filter_map(Value::as_array).flatten() {
        let name = fact["name"].as_str().unwrap_or_default();
        object.insert(name.to_owned(), fact["value"].clone());
    }
}

/// The same for all exports of a device.
pub fn shape_all(device: &mut Value) {
    device["exports"].as_array_mut().into_iter().flatten().for_each(shape);
}

/// `udm unexport`.
pub fn unexport(args: &UnexportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    client.order("Unexport", json!({ "uri": args.uri, "force": args.force }))?;
    print_result(args.json, "", &json!({ "name": args.name.as_str(), "uri": args.uri }))
}
