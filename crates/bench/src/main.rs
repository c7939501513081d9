//! The program `udm-bench`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use udm_bench::args::Cli;

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
