//! `udm completions` and `udm man`: text that is generated from the definitions of `args.rs`.
//!
//! clap's completion scripts know commands and options. This module adds the names of devices:
//! wherever an argument is a device, the scripts run `udm ls`. Packages and `make install` store
//! this output as files.

use std::any::TypeId;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::output::print;
use crate::runtime::DeviceName;

/// The names of all devices, for a shell. A server that hangs must not block the shell.
const DEVICES: &str = "timeout 2 udm ls 2> /dev/null | sed -n '2,$s/ .*//p'";

/// `udm completions`.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    // The completions leave hidden commands out.
    let all = Cli::command();
    let typed = all.get_subcommands().filter(|command| !command.is_hide_set());
    let mut shown = Command::new("udm").version(env!("CARGO_PKG_VERSION"));
    shown = shown.subcommands(typed.cloned());
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut shown, "udm", &mut script);
    let script = String::from_utf8(script)?;
    print(&match args.shell {
        Shell::Bash => bash(script, &shown),
        Shell::Zsh => zsh(&script),
        Shell::Fish => fish(script, &shown),
        _ => script,
    })
}

/// Whether an argument of `command` is the name of a device.
fn takes_device(command: &&Command) -> bool {
    let is_device = |arg: &Arg| arg.get_value_parser().type_id() == TypeId::of::<DeviceName>();
    command.get_positionals().any(is_device)
}

/// clap offers the options of a command, in the variable `opts`.
fn bash(script: String, all: &Command) -> String {
    let mut named = script;
    for command in all.get_subcommands().filter(takes_device) {
        let options = format!("udm__subcmd__{})\n            opts=\"", command.get_name());
        named = named.replace(&options, &format!("{options}$(_udm_devices) "));
    }
    format!("_udm_devices() {{\n    {DEVICES}\n}}\n\n{named}")
}

/// clap offers files for the arguments `name` and `names`.
fn zsh(script: &str) -> String {
    let mut named = String::new();
    for line in script.lines() {
        let is_device = ["':name ", "':name:", "'::name ", "'::name:", "'*::names ", "'*::names:"]
            .iter()
            .any(|start| line.starts_with(start));
        let files = ":_default' \\";
        match line.strip_suffix(files).filter(|_| is_device) {
            Some(start) => named += &format!("{start}:_udm_devices' \\\n"),
            None => named += &format!("{line}\n"),
        }
        if line == "#compdef udm" {
            named += &format!(
                "\n_udm_devices() {{\n    local -a devices\n    \
                 devices=(${{(f)\"$({DEVICES})\"}})\n    compadd -a devices\n}}\n"
            );
        }
    }
    named
}

/// clap's script for fish has options only.
fn fish(script: String, all: &Command) -> String {
    let mut named = script;
    named += &format!("function __fish_udm_devices\n    {DEVICES}\nend\n");
    for command in all.get_subcommands().filter(takes_device) {
        named += &format!(
            "complete -c udm -n \"__fish_udm_using_subcommand {}\" -f -a \
             \"(__fish_udm_devices)\"\n",
            command.get_name()
        );
    }
    named
}

/// `udm man`.
pub fn man(args: &ManArgs) -> Result<()> {
    let mut all = Cli::command().disable_help_subcommand(true);
    all.build();
    if let Some(folder) = &args.folder {
        let place = || folder.display().to_string();
        fs::create_dir_all(folder).with_context(place)?;
        return write_pages(&all, folder);
    }
    let page = match &args.command {
        None => &all,
        Some(name) => all
            .find_subcommand(name)
            .filter(|command| !command.is_hide_set())
            .ok_or_else(|| anyhow!("{name}: no such command; `udm --help` lists them"))?,
    };
    print(&page_of(page)?)
}

/// Writes the page of `command` and of each command below it. The program udm-bench has the page
/// udm-bench(1): `udm-bench man`.
fn write_pages(command: &Command, folder: &Path) -> Result<()> {
    let is_here = |command: &&Command| !command.is_hide_set() && command.get_name() != "bench";
    for below in command.get_subcommands().filter(is_here) {
        write_pages(below, folder)?;
    }
    let path = folder.join(Man::new(command.clone()).get_filename());
    fs::write(&path, page_of(command)?).with_context(|| path.display().to_string())
}

/// The page of a command, in roff.
fn page_of(command: &Command) -> Result<String> {
    let name = command.get_display_name().unwrap_or(command.get_name());
    let mut text = Vec::new();
    Man::new(command.clone())
        .source(concat!("udm ", env!("CARGO_PKG_VERSION")))
        .manual("udm")
        .render(&mut text)?;
    let mut text = String::from_utf8(text)?;
    text += ".SH \"SEE ALSO\"\n";
    text += match name {
        "udm" => ".BR udm (5),\n.BR udm (7),\n.BR udm\\-bench (1),\n.BR libudm (3)\n",
        _ => ".BR udm (1),\n.BR udm (5),\n.BR udm (7)\n",
    };
    Ok(text)
}
