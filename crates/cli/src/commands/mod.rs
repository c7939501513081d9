//! The commands. Each takes its arguments as `args.rs` defines them, prints its result, and returns
//! an error whose text names where and why; `main.rs` puts the command's name in front.

mod about;
mod apply;
mod bundle;
mod cache;
mod change;
mod config;
mod create;
mod detach;
mod doctor;
mod explain;
mod exports;
mod inspect;
mod manual;
mod recover;
mod remove;
mod report;
mod rpc;
mod setup;
mod stopped;
mod wait;

use anyhow::Result;
use clap::CommandFactory;
use serde_json::Value;

use crate::args::{Cli, Command, JsonArgs};
use crate::output::{print_json, print_line};
use crate::runtime::DeviceName;

/// Carries out `command`.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Create(args) => create::create(args),
        Command::Remove(args) => remove::remove(&args),
        Command::Detach(args) => detach::detach(&args),
        Command::Drain(args) => remove::drain(&args),
        Command::Flush(args) => change::simple("Flush", &args),
        Command::Status(args) => report::status(&args),
        Command::Table(args) => report::table(&args),
        Command::Info(args) => report::info(&args),
        Command::Message(args) => change::message(&args),
        Command::Suspend(args) => change::simple("Suspend", &args),
        Command::Resume(args) => change::simple("Resume", &args),
        Command::Load(args) => change::load(&args),
        Command::Rename(args) => change::rename(&args),
        Command::Ls(args) => report::ls(&args),
        Command::Wait(args) => wait::wait(&args),
        Command::Export(args) => exports::export(&args),
        Command::Unexport(args) => exports::unexport(&args),
        Command::Metrics(args) => report::metrics(&args),
        Command::Report(args) => bundle::report(&args),
        Command::Inspect(args) => inspect::inspect(&args),
        Command::Recover(args) => recover::recover(&args),
        Command::Cache(args) => cache::cache(&args.command),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Targets(args) => about::targets(&args),
        Command::Bench(args) => about::bench(&args),
        Command::CheckConfig(args) => config::check(&args),
        Command::Save(args) => config::save(&args),
        Command::Diff(args) => apply::diff(&args),
        Command::Apply(args) => apply::apply(&args),
        Command::Completions(args) => manual::completions(&args),
        Command::Man(args) => manual::man(&args),
        Command::Serve(args) => crate::daemon::serve(&args.name),
    }
}

/// The command's name, for error messages.
pub fn name(command: &Command) -> &'static str {
    match command {
        Command::Create(_) => "create",
        Command::Remove(_) => "remove",
        Command::Detach(_) => "detach",
        Command::Drain(_) => "drain",
        Command::Flush(_) => "flush",
        Command::Status(_) => "status",
        Command::Table(_) => "table",
        Command::Info(_) => "info",
        Command::Message(_) => "message",
        Command::Suspend(_) => "suspend",
        Command::Resume(_) => "resume",
        Command::Load(_) => "load",
        Command::Rename(_) => "rename",
        Command::Ls(_) => "ls",
        Command::Wait(_) => "wait",
        Command::Export(_) => "export",
        Command::Unexport(_) => "unexport",
        Command::Metrics(_) => "metrics",
        Command::Report(_) => "report",
        Command::Inspect(_) => "inspect",
        Command::Recover(_) => "recover",
        Command::Cache(_) => "cache",
        Command::Doctor(_) => "doctor",
        Command::Targets(_) => "targets",
        Command::Bench(_) => "bench",
        Command::CheckConfig(_) => "check-config",
        Command::Save(_) => "save",
        Command::Diff(_) => "diff",
        Command::Apply(_) => "apply",
        Command::Completions(_) => "completions",
        Command::Man(_) => "man",
        Command::Serve(_) => "serve",
    }
}

/// Whether `word` is a command.
pub fn is_name(word: &str) -> bool {
    Cli::command().find_subcommand(word).is_some()
}

/// Prints answers as JSON: the object itself if exactly one name was given, else a list.
fn print_answers(names: &[DeviceName], mut answers: Vec<Value>) -> Result<()> {
    match answers.pop() {
        Some(only) if names.len() == 1 => print_json(&only),
        last => {
            answers.extend(last);
            print_json(&Value::Array(answers))
        }
    }
}

/// Prints `text`, or `value` with `--json`.
fn print_result(json: JsonArgs, text: &str, value: &Value) -> Result<()> {
    match (json.json, text) {
        (true, _) => print_json(value),
        (false, "") => Ok(()),
        (false, text) => print_line(text),
    }
}
