//! Commands about udm itself: `targets`, `completions`, `man`, `bench`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::CommandFactory;
use serde_json::json;

use crate::args::{BenchArgs, Cli, CompletionsArgs, JsonArgs, ManArgs};
use crate::output::{print, print_json};
use crate::served;

/// `udm targets`, in the format of `dmsetup targets`.
pub fn targets(args: JsonArgs) -> Result<()> {
    if args.json {
        let all: Vec<_> = served::TARGETS
            .iter()
            .map(|(name, version)| json!({ "name": name, "version": version }))
            .collect();
        return print_json(&all.into());
    }
    let lines: Vec<String> =
        served::TARGETS.iter().map(|(name, version)| format!("{name:<16} v{version}\n")).collect();
    print(&lines.concat())
}

/// `udm completions`.
pub fn completions(args: &CompletionsArgs) -> Result<()> {
    // What users do not type is not completed.
    let all = Cli::command();
    let typed = all.get_subcommands().filter(|command| !command.is_hide_set());
    let mut shown = clap::Command::new("udm").version(env!("CARGO_PKG_VERSION"));
    shown = shown.subcommands(typed.cloned());
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut shown, "udm", &mut script);
    print(&String::from_utf8(script)?)
}

/// `udm man`.
pub fn man(args: &ManArgs) -> Result<()> {
    let mut all = Cli::command().disable_help_subcommand(true);
    all.build();
    if let Some(folder) = &args.folder {
        std::fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(all, folder))
            .with_context(|| folder.display().to_string())?;
        return Ok(());
    }
    let page = match &args.command {
        None => all,
        Some(name) => all
            .find_subcommand(name)
            .filter(|command| !command.is_hide_set())
            .cloned()
            .ok_or_else(|| anyhow!("{name}: no such command; `udm --help` lists them"))?,
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    print(&String::from_utf8(text)?)
}

/// `udm bench`: becomes `udm-bench`, if there is one.
pub fn bench(args: &BenchArgs) -> Result<()> {
    let name = "udm-bench";
    let beside = std::env::current_exe().ok().map(|exe| exe.with_file_name(name));
    let program = beside.filter(|path| path.is_file()).or_else(|| on_path(name));
    let Some(program) = program else {
        bail!("{name} is neither beside udm nor on PATH; install it, or run it from the sources");
    };
    let words: Vec<OsString> = args.words.clone();
    let error = Command::new(&program).arg0("udm bench").args(words).exec();
    Err(error).with_context(|| program.display().to_string())
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}
