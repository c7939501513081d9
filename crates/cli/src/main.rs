//! The `udm` command: device-mapper's caches in user space.
//!
//! The modules, from the command line inwards:
//!
//! * [`args`] parses the command line, `commands` carries it out, with one file per group of verbs,
//!   and [`config`] reads and writes configuration files;
//! * [`control`] carries commands to servers, [`runtime`] is the place where they find each other,
//!   a [`directory`] of this user alone;
//! * [`daemon`] is the life of a device's server, [`methods`] its answers, [`server`] the state
//!   that its threads share, [`served`] the device itself with its exports ([`exports`]),
//!   [`loading`] its tables, [`spec`] the specification that `create` gives to it, [`work`] its
//!   long work, [`upkeep`] restores removed files, [`changes`] reports removals, [`platform`] the
//!   system's devices and addresses, [`samples`] reads samples of dirty data, [`http`] and
//!   [`metrics`] its metrics;
//! * [`process`] finds out why a server does not answer, [`last_end`] how the last one ended;
//!   [`signals`] and [`rlimits`] are about signals and resource limits;
//! * [`output`], [`columns`], [`progress`] and [`attach_progress`] are the output for people,
//!   [`log`] writes the servers' logs, [`health_log`] logs changes of a device's health, and
//!   [`stalls`] finds devices that do not answer.

#![forbid(unsafe_code)]

mod anonymous;
mod args;
mod attach_progress;
mod changes;
mod columns;
mod commands;
mod config;
mod control;
mod daemon;
mod dead;
mod directory;
mod ending;
mod exports;
mod flushing;
mod health_log;
mod http;
mod known;
mod last_end;
mod loading;
mod log;
mod methods;
mod metrics;
mod output;
mod platform;
mod process;
mod progress;
mod rlimits;
mod runtime;
mod samples;
mod served;
mod server;
mod signals;
mod spec;
mod stalls;
mod troubles;
mod upkeep;
mod work;

use clap::Parser;
use clap::error::ErrorKind;

use crate::args::Cli;
use crate::output::{Reported, USAGE, Usage, print_error};

fn main() {
    if let Err(error) = signals::survive_file_size_limit() {
        print_error("start", &error);
        std::process::exit(1);
    }
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

/// Prints help unchanged, and an error as one line that names the command for help.
fn refuse_usage(error: &clap::Error) -> i32 {
    use ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    if matches!(error.kind(), DisplayHelp | DisplayVersion) {
        let Err(error) = output::print(&error.render().to_string()) else { return 0 };
        print_error("help", &error);
        return 1;
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
