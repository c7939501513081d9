//! `udm-bench`: measures udm beside what it is compared with, in one run.
//!
//! ```text
//! udm-bench [write|nbd|writeback|all]... [--rounds N] [--json] [--check] [--scratch FOLDER]
//! ```
//!
//! Absolute numbers depend on the machine and on who else uses it; the promises are therefore
//! ratios, each from contenders that take turns within one round.

mod fio;
mod nbd;
mod report;
mod rig;
mod write;
mod writeback;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use report::Study;
use rig::Places;

const USAGE: &str = "\
usage: udm-bench [STUDY]... [options]

studies:
  write       4 KiB writes in process, beside the bare durable copy
  nbd         4 KiB requests over a Unix socket, beside nbdkit's memory plugin
  writeback   dirty data on its way to a file, beside fio
  all         all of them (the default)

options:
  --rounds N        rounds of each study (each study has its own default)
  --json            print JSON instead of tables
  --check           exit with 1 if a promise is broken
  --scratch FOLDER  a folder on a disk, for files (default: the folder for temporary files)
";

const STUDIES: [&str; 3] = ["write", "nbd", "writeback"];

/// What was asked for.
#[derive(Debug)]
struct Options {
    studies: Vec<&'static str>,
    rounds: Option<usize>,
    is_json: bool,
    is_check: bool,
    scratch: PathBuf,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Options>> {
    let mut options = Options {
        studies: Vec::new(),
        rounds: None,
        is_json: false,
        is_check: false,
        scratch: std::env::temp_dir(),
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().with_context(|| format!("{word} needs a value"));
        match word.as_str() {
            "--json" => options.is_json = true,
            "--check" => options.is_check = true,
            "--scratch" => options.scratch = PathBuf::from(value()?),
            "--rounds" => {
                let rounds = value()?.parse().context("--rounds needs a number")?;
                options.rounds = Some(std::cmp::max(1, rounds));
            }
            "--help" | "-h" => return Ok(None),
            "all" => options.studies.extend(STUDIES),
            word => match STUDIES.into_iter().find(|study| *study == word) {
                Some(study) => options.studies.push(study),
                None => bail!("'{word}' is no study and no option\n\n{USAGE}"),
            },
        }
    }
    if options.studies.is_empty() {
        options.studies.extend(STUDIES);
    }
    Ok(Some(options))
}

fn measure(study: &str, places: &Places, rounds: Option<usize>) -> Result<Study> {
    match study {
        "write" => write::run(places, rounds.unwrap_or(15)),
        "nbd" => nbd::run(places, rounds.unwrap_or(9)),
        "writeback" => writeback::run(places, rounds.unwrap_or(5)),
        other => bail!("'{other}' is no study"),
    }
}

/// Says so if others keep the processors busy: then the numbers tell of them.
fn warn_if_busy() {
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = text.split(' ').next().and_then(|word| word.parse::<f64>().ok());
    if let Some(load) = load.filter(|load| *load > processors as f64 / 2.0) {
        eprintln!(
            "udm-bench: WARNING: the machine is busy (load {load} on {processors} processors): \
             rates, above all over NBD, will say little"
        );
    }
}

fn run() -> Result<bool> {
    let Some(options) = parse(std::env::args().skip(1))? else {
        print!("{USAGE}");
        return Ok(true);
    };
    warn_if_busy();
    let places = Places::new(&options.scratch)?;
    let mut studies = Vec::new();
    for name in &options.studies {
        let study = measure(name, &places, options.rounds)?;
        if !options.is_json {
            report::print(&study);
        }
        studies.push(study);
    }
    if options.is_json {
        println!("{}", serde_json::to_string_pretty(&studies)?);
    }
    let holds = studies.iter().flat_map(|study| &study.claims).all(|claim| claim.holds);
    Ok(holds || !options.is_check)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("udm-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
