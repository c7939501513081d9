//! `export` and `unexport`: ways in for clients, opened and closed while the device serves.

use anyhow::Result;
use serde_json::json;

use super::print_result;
use crate::args::{ExportArgs, UnexportArgs};
use crate::control::Client;
use crate::runtime::RuntimeDir;

/// `udm export`.
pub fn export(args: &ExportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    let mut answer = client.order("Export", json!({ "uri": args.uri }))?;
    let answer = answer["door"].take();
    let text =
        format!("{}: serving at {}", args.name, answer["client_uri"].as_str().unwrap_or("-"));
    print_result(args.json, &text, &answer)
}

/// `udm unexport`.
pub fn unexport(args: &UnexportArgs) -> Result<()> {
    let mut client = Client::connect(&RuntimeDir::open()?, &args.name)?;
    client.order("Unexport", json!({ "uri": args.uri, "force": args.force }))?;
    print_result(args.json, "", &json!({ "name": args.name.as_str(), "uri": args.uri }))
}
