//! The `udm` command: device-mapper's caches in user space.
//!
//! The modules, from what users type inwards:
//!
//! * [`args`] says what may be typed, `commands` what it means, one file per group of verbs;
//! * [`control`] carries commands to servers, [`runtime`] is where they find each other, a
//!   [`directory`] of this user alone;
//! * [`daemon`] is the life of a device's server, [`methods`] what it answers, [`server`] what its
//!   threads share, [`served`] the device itself with its exports, [`loading`] its tables, [`spec`]
//!   what `create` hands to it, [`work`] its long work, [`ground`] the system's devices and
//!   addresses, [`http`] and [`metrics`] its numbers;
//! * [`process`] says why a server does not answer;
//! * [`output`], [`columns`], [`progress`] and [`attaching`] are what people see, [`log`] writes
//!   the servers' logs, and [`journal`] logs changes of a device's health.

#![forbid(unsafe_code)]

mod args;
mod attaching;
mod columns;
mod commands;
mod control;
mod daemon;
mod directory;
mod flushing;
mod ground;
mod http;
mod journal;
mod loading;
mod log;
mod methods;
mod metrics;
mod output;
mod process;
mod progress;
mod runtime;
mod served;
mod server;
mod spec;
mod work;

use clap::Parser;
use clap::error::ErrorKind;

use crate::args::Cli;
use crate::output::{Reported, USAGE, Usage, print_error};

fn main() {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => std::process::exit(refuse_usage(&error)),
    };
    let what = commands::name(&cli.command);
    let Err(error) = commands::run(cli.command) else { return };
    if error.downcast_ref::<Reported>().is_none() {
        print_error(what, &error);
    }
    let is_usage = error.downcast_ref::<Usage>().is_some();
    std::process::exit(if is_usage { USAGE } else { 1 });
}

/// Prints help as it is, and an error as one line that says where help is.
fn refuse_usage(error: &clap::Error) -> i32 {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion) {
        let _ = output::print(&error.render().to_string());
        return 0;
    }
    let text = error.render().to_string();
    if error.kind() == DisplayHelpOnMissingArgumentOrSubcommand {
        eprint!("{text}");
        return USAGE;
    }
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    let sentence = words.join(" ");
    let sentence = sentence.strip_prefix("error: ").unwrap_or(&sentence);
    let command = std::env::args().nth(1).filter(|word| commands::is_name(word));
    let (what, help) = match &command {
        Some(command) => (command.as_str(), format!("udm {command} --help")),
        None => ("usage", "udm --help".into()),
    };
    eprintln!("udm: {what}: {sentence}; see `{help}`");
    USAGE
}
