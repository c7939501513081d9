//! `export` and `unexport`: doors for clients, opened and closed while the device serves.

use anyhow::Result;
use serde_json::{Value, json};

use super::print_result;
use crate::args::{ExportArgs, UnexportArgs};
use crate::control::Client;
use crate::runtime::RuntimeDir;

/// `udm export`.
pub fn export(args: &ExportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let mut answer = client.order("Export", json!({ "uri": args.uri }))?;
    let mut answer = answer["door"].take();
    shape(&mut answer);
    let text =
        format!("{}: serving at {}", args.name, answer["client_uri"].as_str().unwrap_or("-"));
    print_result(args.json, &text, &answer)
}

/// Makes a door what `--json` prints: its facts stand next to the other fields.
fn shape(door: &mut Value) {
    let Some(object) = door.as_object_mut() else { return };
    for fact in object.remove("facts").iter().filter_map(Value::as_array).flatten() {
        let name = fact["name"].as_str().unwrap_or_default();
        object.insert(name.to_owned(), fact["value"].clone());
    }
}

/// The same for all doors of a device.
pub fn shape_all(device: &mut Value) {
    device["exports"].as_array_mut().into_iter().flatten().for_each(shape);
}

/// `udm unexport`.
pub fn unexport(args: &UnexportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    client.order("Unexport", json!({ "uri": args.uri, "force": args.force }))?;
    print_result(args.json, "", &json!({ "name": args.name.as_str(), "uri": args.uri }))
}
