//! Commands about udm itself: `targets`, `completions`, `man`, `bench`.

use anyhow::{Context, Result, anyhow, bail};
use clap::CommandFactory;
use serde_json::json;
use udm::targets::{TARGETS, TargetType};
use udm_bench::args::BenchArgs;

use crate::args::{Cli, CompletionsArgs, JsonArgs, ManArgs};
use crate::output::{print, print_json};

/// `udm targets`, in the format of `dmsetup targets`.
pub fn targets(args: JsonArgs) -> Result<()> {
    if args.json {
        let all: Vec<_> = TARGETS
            .iter()
            .map(|known| json!({ "name": known.name, "version": known.version }))
            .collect();
        return print_json(&all.into());
    }
    let line = |known: &&TargetType| format!("{:<16} v{}\n", known.name, known.version);
    let lines: Vec<String> = TARGETS.iter().map(line).collect();
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

/// `udm bench`.
pub fn bench(args: &BenchArgs) -> Result<()> {
    if !udm_bench::run(args)? {
        bail!("a promise is broken");
    }
    Ok(())
}
