//! The program `udm-bench`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use udm_bench::args::BenchArgs;

/// Measure udm on this machine, compared with other software
#[derive(Debug, Parser)]
#[command(name = "udm-bench", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    args: BenchArgs,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match udm_bench::run(&cli.args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("udm-bench: a target was missed");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("udm-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
