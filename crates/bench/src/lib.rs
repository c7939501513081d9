//! `udm-bench`: measures udm and its competitors in one run.
//!
//! Absolute numbers depend on the machine and on its other load. Targets are therefore ratios of
//! subjects that take turns within one round, and every study reports whether the machine was too
//! noisy.
//!
//! | module | task |
//! |---|---|
//! | [`args`], `job` | arguments; loads in fio's terms |
//! | `studies` | one file for each study |
//! | `trace`, `policies`, `simulator` | recorded requests; simulated caches |
//! | `load`, `fio` | the load generator; fio as a user runs it |
//! | `timeline`, `cpu` | requests over time; processor time, of clients and of the background |
//! | `rig`, `pcache_rig`, `targets` | files and disks; caches over them |
//! | `slow` | a disk with an arm, in memory |
//! | `meminfo`, `dirty_ratio` | the kernel's counters of the page cache; its limits for writers |
//! | `loopdev` | a block device over a file |
//! | `cleanup` | cleanup after a run, even if it is killed |
//! | `background` | a device's background work, on the calling thread |
//! | `counting`, `heap` | bytes written to a cache device; memory that the process has allocated |
//! | `results`, `unit`, `stats` | the numbers |
//! | `terminal`, `html`, `svg`, `summary`, `markdown`, `csv` | output |
//! | `published` | the tables of docs/benchmarks.md |
//! | `compare` | a comparison of two runs |
//! | `flame`, `perf` | samples of stacks |
//! | `machine`, `noise` | the machine, and whether it was quiet |
//! | `libpmem` | libpmem's own copy |

pub mod args;
mod background;
mod cleanup;
mod compare;
mod counting;
mod cpu;
mod csv;
mod dirty_ratio;
mod fio;
mod flame;
mod heap;
mod html;
mod job;
mod libpmem;
mod load;
mod loopdev;
mod machine;
mod markdown;
mod meminfo;
mod noise;
mod pcache_rig;
mod perf;
mod policies;
mod published;
mod results;
mod rig;
mod simulator;
mod slow;
mod stats;
mod studies;
mod summary;
mod svg;
mod targets;
mod terminal;
mod timeline;
mod trace;
mod unit;

use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result};
use clap::CommandFactory;

use args::{BenchArgs, BenchCommand, CompareArgs, StudyName};
use machine::Machine;
use noise::Watch;
use results::Page;
use results::Study;
use rig::Setup;

pub use studies::STUDIES_OF_ALL;

/// The part of the README that numbers are in, as the JSON of `--numbers` has them.
pub fn readme_numbers(json: &str) -> Result<String> {
    Ok(markdown::first(&pages(json)?))
}

/// The generated part of docs/benchmarks.md, with the cause of each missed target.
pub fn benchmarks_numbers(json: &str) -> Result<String> {
    published::write(&pages(json)?)
}

fn pages(json: &str) -> Result<Vec<Page>> {
    serde_json::from_str(json).context("the numbers")
}

/// Runs `udm-bench`. True if all targets are met, or if this was not requested.
pub fn run(args: &BenchArgs) -> Result<bool> {
    match &args.command {
        Some(BenchCommand::Compare(args)) => return compare(args).map(|()| true),
        Some(BenchCommand::Man) => return manual().map(|()| true),
        None => {}
    }
    let pages = match &args.from {
        Some(path) => read(args, path)?,
        None => measure_all(args)?,
    };
    let holds = pages.iter().flat_map(|page| &page.study.claims).all(|claim| claim.holds);
    leave(args, pages)?;
    Ok(holds || !args.check)
}

/// The manual page, in roff.
fn manual() -> Result<()> {
    let mut page = Vec::new();
    clap_mangen::Man::new(args::Cli::command().disable_help_subcommand(true))
        .source(concat!("udm ", env!("CARGO_PKG_VERSION")))
        .manual("udm")
        .render(&mut page)?;
    let see = ".SH \"SEE ALSO\"\n.BR udm (1),\n.BR udm (7)\n";
    print(&(String::from_utf8(page)? + see))
}

/// Two runs, side by side.
fn compare(args: &CompareArgs) -> Result<()> {
    let page = compare::compare(&pages_in(&args.before)?, &pages_in(&args.after)?)?;
    if args.json {
        print(&(serde_json::to_string_pretty(&[&page])? + "\n"))?;
    } else {
        print(&terminal::study(&page.study))?;
    }
    match &args.report {
        Some(path) => html::add(path, vec![page]),
        None => Ok(()),
    }
}

/// What an earlier run wrote to `path`: JSON, or a report.
fn pages_in(path: &Path) -> Result<Vec<Page>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let pages = match text.trim_start().starts_with('<') {
        true => html::read(&text),
        false => serde_json::from_str(&text).map_err(Into::into),
    };
    pages.with_context(|| format!("{} is neither JSON nor a report of udm bench", path.display()))
}

/// What an earlier run wrote to `path`.
fn read(args: &BenchArgs, path: &Path) -> Result<Vec<Page>> {
    let pages = pages_in(path)?;
    if !prints_json(args) {
        for (nth, page) in pages.iter().enumerate() {
            if nth == 0 {
                print(&terminal::machine(&page.machine))?;
            }
            print(&terminal::study(&page.study))?;
        }
    }
    Ok(pages)
}

fn prints_json(args: &BenchArgs) -> bool {
    args.json.as_deref() == Some(Path::new("-"))
}

fn measure_all(args: &BenchArgs) -> Result<Vec<Page>> {
    let prints_json = prints_json(args);
    let machine = Machine::here();
    if !prints_json {
        print(&terminal::machine(&machine))?;
    }
    let setup = Setup::new(args)?;
    let mut pages = Vec::new();
    for name in StudyName::expand(&args.studies) {
        let study = measure(name, &setup, args.flame)?;
        if !prints_json {
            print(&terminal::study(&study))?;
        }
        pages.push(Page { machine: machine.clone(), study });
    }
    Ok(pages)
}

/// Runs one study, and records the noise meanwhile.
fn measure(name: StudyName, setup: &Setup, with_flame: bool) -> Result<Study> {
    let watch = Watch::new();
    let waits = std::io::stderr().is_terminal();
    if waits {
        eprint!("{}: measuring, which may take minutes ...", name.name());
    }
    let recorder = with_flame.then(flame::Recorder::start);
    let study = studies::run(name, setup);
    if waits {
        eprint!("\r\x1b[K");
    }
    let mut study = study.with_context(|| name.name())?;
    match recorder {
        Some(Ok(recorder)) => recorder.finish(&mut study),
        Some(Err(why)) => study.notes.push(format!("No flamegraphs: {why}.")),
        None => {}
    }
    let spreads: Vec<f64> = study.repeats.iter().map(|one| stats::spread(&one.values)).collect();
    study.noise = Some(watch.judge(&spreads));
    study.fact("took", format!("{:.1} s", watch.seconds()));
    Ok(study)
}

/// Writes what stays: JSON, the report, Markdown, the main numbers.
fn leave(args: &BenchArgs, pages: Vec<Page>) -> Result<()> {
    let prints_json = prints_json(args);
    let write = |path: &Path, text: &str| {
        std::fs::write(path, text).with_context(|| path.display().to_string())
    };
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&pages)? + "\n";
        if prints_json { print(&json)? } else { write(path, &json)? }
    }
    if let Some(path) = &args.markdown {
        write(path, &markdown::write(&pages))?;
    }
    if let Some(path) = &args.numbers {
        let json = serde_json::to_string_pretty(&markdown::main_numbers(&pages))? + "\n";
        write(path, &json)?;
    }
    let Some(path) = &args.report else { return Ok(()) };
    html::add(path, pages)?;
    if !prints_json {
        print(&format!("\nreport: {}\n", path.display()))?;
    }
    Ok(())
}

/// Prints. It is not an error if the reader closes the pipe.
fn print(text: &str) -> Result<()> {
    use std::io::{ErrorKind, Write, stdout};
    match stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}
