//! fio's engine (`make fio-engine`): fio drives a pcache in its own process, by libudm, with the
//! load of the published measurements. If the engine is not built, the study prints how to get it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use udm::units::SECTOR;

use crate::fio::{self, JobResult};
use crate::job::Job;
use crate::results::{Claim, Promise, Study, Table};
use crate::rig::{CACHE_BYTES, Setup, is_installed};
use crate::stats::median;
use crate::unit::Unit;

/// Jobs, and the requests per second that are promised of them.
const LOADS: [(u32, f64); 2] = [(1, 700e3), (8, 1.38e6)];
const PERCENTS: [f64; 2] = [50.0, 99.9];

/// Measures it, and adds what was found to `study`: a table with promises, or why there is none.
pub fn add(study: &mut Study, setup: &Setup, bytes: u64, rounds: usize) {
    match find().and_then(|engine| measure(setup, &engine, bytes, rounds)) {
        Ok(results) => report(study, &results, rounds),
        Err(error) => study.notes.push(format!(
            "SKIPPED: the rows of fio's engine: {error:#}. `make fio-engine` builds it for the fio \
             that is installed."
        )),
    }
}

/// The path of the built engine, next to the folder of this program.
fn find() -> Result<PathBuf> {
    ensure!(is_installed("fio"), "fio is not installed");
    let program = std::env::current_exe()?;
    let target = program.parent().and_then(|folder| folder.parent()).unwrap_or(&program);
    let engine = target.join("fio").join("udm-fio.so");
    ensure!(engine.is_file(), "there is no {}", engine.display());
    Ok(engine)
}

/// By load, by round.
fn measure(setup: &Setup, engine: &Path, bytes: u64, rounds: usize) -> Result<Vec<Vec<JobResult>>> {
    let own = setup.choose(Duration::from_millis(500), Duration::from_secs(2));
    let cache_bytes = setup.cache_bytes().max(CACHE_BYTES);
    let job = Job {
        size: cache_bytes / 8 * 3,
        io_size: 1 << 40,
        runtime: setup.asked().runtime.unwrap_or(own),
        // Until the cache was full once.
        ramp_time: setup.choose(Duration::from_millis(200), Duration::from_secs(1)),
        ..Job::default()
    };
    let memory = &setup.places.memory;
    let mut results = vec![Vec::new(); LOADS.len()];
    for _ in 0..rounds {
        for ((numjobs, _), of_load) in LOADS.into_iter().zip(&mut results) {
            let origin = memory.file("exports.fio-origin", bytes)?;
            let cache = memory.file("exports.fio-cache", cache_bytes)?;
            let (sectors, cache_at) = (bytes / SECTOR, cache.display());
            let table = format!("0 {sectors} pcache {cache_at} {}", origin.display());
            let job = Job { numjobs, ..job.clone() };
            let folder = memory.path("");
            let result = fio::engine(engine, &table, &folder, &job, &PERCENTS);
            std::fs::remove_file(&cache)?;
            std::fs::remove_file(&origin)?;
            of_load.push(result?);
        }
    }
    Ok(results)
}

fn report(study: &mut Study, results: &[Vec<JobResult>], rounds: usize) {
    let columns =
        [("requests per second", Unit::PerSecond), ("p50", Unit::Nanos), ("p99.9", Unit::Nanos)];
    let title = format!("fio's engine in process, random 4 KiB writes, depth 1 ({rounds} rounds)");
    let mut table = Table::new(title, &columns);
    for ((jobs, promise), of_load) in LOADS.into_iter().zip(results) {
        type Number = fn(&JobResult) -> f64;
        let numbers: [Number; 3] =
            [|one| one.iops, |one| one.percentiles[0], |one| one.percentiles[1]];
        let of = |number: &Number| of_load.iter().map(number).collect::<Vec<f64>>();
        let name = format!("{jobs} job{}", if jobs == 1 { "" } else { "s" });
        let values: Vec<f64> = numbers.iter().map(|number| median(&of(number))).collect();
        table.row(name.clone(), &values);
        let (what, rates) = (format!("fio's engine, {name}"), of(&numbers[0]));
        study.repeats(what.clone(), Unit::PerSecond, &rates);
        let claim = format!("{what}: requests/s");
        study.claims.push(Claim::new(claim, &rates, Some(Promise::AtLeast(promise))));
    }
    study.tables.push(table);
}
