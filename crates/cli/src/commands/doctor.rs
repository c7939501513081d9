//! `doctor` tests which exports and modes work here, and which data is durable, with the reasons.
//!
//! The checks run the code that serves devices, so `create` would get the same results.

mod machine;
mod place;

use anyhow::Result;
use serde_json::{Value, json};
use udm_export::check::{self, Check};

use crate::args::doctor::DoctorArgs;
use crate::columns::Columns;
use crate::output::{Reported, print, print_json, without_numbers};
use crate::runtime::RuntimeDir;
use place::Place;

/// `udm doctor`.
pub fn doctor(args: &DoctorArgs) -> Result<()> {
    let runtime = RuntimeDir::open();
    let places = place::find(&args.places, runtime.as_ref().ok())?;
    let io_uring = check::io_uring();
    let mut exports = match &runtime {
        Ok(runtime) => check::exports(runtime.path()),
        Err(_) => check::no_exports(
            "no server can start without a runtime directory",
            machine::NO_DIRECTORY,
        ),
    };
    exports.push(machine::in_process(&io_uring));
    let machine = machine::look(io_uring, &runtime);
    let places: Vec<(Place, Vec<Check>)> =
        places.into_iter().map(|place| (place.clone(), place.look())).collect();
    if args.json.json {
        let places = places.iter().map(|(place, checks)| {
            json!({ "path": place.path, "device": place.device, "checks": all_json(checks) })
        });
        print_json(&json!({
            "exports": all_json(&exports),
            "machine": all_json(&machine),
            "places": places.collect::<Vec<_>>(),
        }))?;
    } else {
        let mut parts = vec![text("EXPORT", &exports), text("MACHINE", &machine)];
        parts.extend(
            places.iter().map(|(place, checks)| {
                format!("{}:\n{}", place.heading(), text("PROMISE", checks))
            }),
        );
        print(&parts.join("\n"))?;
    }
    if exports.iter().any(|export| export.works) { Ok(()) } else { Err(Reported.into()) }
}

/// The checks that do not concern a single device, for a report.
pub fn machine_text() -> String {
    text("MACHINE", &machine::look(check::io_uring(), &RuntimeDir::open()))
}

fn text(heading: &str, checks: &[Check]) -> String {
    let mut list = Columns::new(&[heading, "WORKS", "HOW, OR WHY NOT"]);
    for check in checks {
        let works = if check.works { "yes" } else { "no" };
        let help = check.help.as_ref().map(|help| format!("; {help}")).unwrap_or_default();
        list.row(vec![
            check.name.to_owned(),
            works.to_owned(),
            without_numbers(&format!("{}{help}", check.what)),
        ]);
    }
    list.text()
}

fn all_json(checks: &[Check]) -> Vec<Value> {
    let one = |check: &Check| {
        let Check { name, works, what, help } = check;
        json!({ "name": name, "works": works, "what": without_numbers(what), "help": help })
    };
    checks.iter().map(one).collect()
}
