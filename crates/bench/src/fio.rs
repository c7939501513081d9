//! fio, run as a user would run it, and the results from its JSON.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::job::Job;

/// Requests are counted over time in slices of this length.
const LOG_MILLISECONDS: u64 = 100;

/// The result of a job.
#[derive(Clone, Debug)]
pub struct JobResult {
    /// Requests per second.
    pub iops: f64,
    /// Seconds from its first request to the end of its last.
    pub seconds: f64,
    /// Their mean time, in nanoseconds.
    pub mean_nanos: f64,
    /// Their times, in nanoseconds, at the percentiles asked for.
    pub percentiles: Vec<f64>,
    /// The longest of them.
    pub worst_nanos: f64,
    /// Times of flushes at the same percentiles, if there were any.
    pub sync_percentiles: Vec<f64>,
}

/// Runs `job` on the NBD server at a Unix socket.
pub fn nbd(socket: &Path, job: &Job, percents: &[f64]) -> Result<JobResult> {
    let arguments = nbd_arguments(socket, job);
    let reads = job.rw.read_percent(job.rwmixread);
    // The write times of a mixed load.
    run(if reads == 100 { "read" } else { "write" }, reads, &arguments, percents)
}

fn nbd_arguments(socket: &Path, job: &Job) -> Vec<String> {
    let mut arguments = vec![
        "--ioengine=nbd".to_owned(),
        format!("--uri=nbd+unix:///?socket={}", socket.display()),
    ];
    arguments.extend(job.fio_arguments());
    arguments
}

/// Runs `job` of writes on a device of `table` in fio's own process, by the engine of udm at
/// `library`. Memory that survives fio is in the folder `memory`.
pub fn engine(
    library: &Path,
    table: &str,
    memory: &Path,
    job: &Job,
    percents: &[f64],
) -> Result<JobResult> {
    let mut arguments = vec![
        format!("--ioengine=external:{}", library.display()),
        format!("--udm_table={table}"),
        format!("--udm_memory={}", memory.display()),
        "--udm_format=1".to_owned(),
    ];
    arguments.extend(job.fio_arguments());
    run("write", 0, &arguments, percents)
}

/// The same over NBD, and requests per second over time: seconds, and the rate around then.
pub fn nbd_over_time(
    socket: &Path,
    job: &Job,
    percents: &[f64],
    scratch: &Path,
) -> Result<(JobResult, Vec<(f64, f64)>)> {
    let prefix = scratch.display().to_string();
    let mut arguments = nbd_arguments(socket, job);
    arguments.push(format!("--write_iops_log={prefix}"));
    arguments.push(format!("--log_avg_msec={LOG_MILLISECONDS}"));
    arguments.push("--per_job_logs=0".into());
    let reads = job.rw.read_percent(job.rwmixread);
    let result = run(if reads == 100 { "read" } else { "write" }, reads, &arguments, percents)?;
    let log = format!("{prefix}_iops.log");
    let text = std::fs::read_to_string(&log).with_context(|| format!("fio wrote no {log}"))?;
    let _ = std::fs::remove_file(&log);
    Ok((result, rates(&text)))
}

/// Lines of fio's log: milliseconds, requests per second, and more.
fn rates(text: &str) -> Vec<(f64, f64)> {
    let number = |word: Option<&str>| word.and_then(|word| word.trim().parse::<f64>().ok());
    let line = |line: &str| {
        let mut words = line.split(',');
        Some((number(words.next())? / 1000.0, number(words.next())?))
    };
    text.lines().filter_map(line).collect()
}

/// Runs one job of writes with `arguments`.
pub fn write(arguments: &[String]) -> Result<JobResult> {
    run("write", 0, arguments, &[50.0])
}

/// One of several jobs that fio runs at the same time.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its file.
    pub path: PathBuf,
    /// Whether it passes the page cache by.
    pub is_direct: bool,
    /// Runs the job until its time ends. Its writes are durable then.
    pub job: Job,
}

/// Millions of bytes per second that all `sections` write, and that they read.
pub fn rates_of_files(sections: &[Section]) -> Result<(f64, f64)> {
    let mut arguments: Vec<String> =
        ["--output-format=json", "--allow_file_create=0", "--ioengine=io_uring"]
            .map(str::to_owned)
            .into();
    for (nth, Section { path, is_direct, job }) in sections.iter().enumerate() {
        arguments.push(format!("--name=client{nth}"));
        arguments.push(format!("--filename={}", path.display()));
        arguments.push(format!("--direct={}", u8::from(*is_direct)));
        arguments.extend(["--time_based=1".into(), "--end_fsync=1".into()]);
        arguments.extend(job.fio_arguments());
    }
    let json = run_to_json(&arguments)?;
    let jobs = json["jobs"].as_array().context("fio's JSON has no jobs")?;
    let sum = |direction: &str| {
        let rates = jobs.iter().map(|job| job[direction]["bw_bytes"].as_f64().unwrap_or(0.0));
        rates.sum::<f64>() / 1e6
    };
    Ok((sum("write"), sum("read")))
}

/// How often a job is run that ended without any request: its time may have passed before fio got a
/// processor.
const TRIES: u32 = 10;

/// Runs one job; `direction` is "read" or "write": the part of its JSON to return.
fn run(
    direction: &str,
    read_percent: u32,
    arguments: &[String],
    percents: &[f64],
) -> Result<JobResult> {
    let list: Vec<String> = percents.iter().map(f64::to_string).collect();
    let mut all: Vec<String> =
        ["--name=job", "--output-format=json", "--allow_file_create=0"].map(str::to_owned).into();
    all.push(format!("--percentile_list={}", list.join(":")));
    all.extend_from_slice(arguments);
    let mut json = run_to_json(&all)?;
    for _ in 1..TRIES {
        if json["jobs"][0][direction]["total_ios"] != 0 {
            break;
        }
        json = run_to_json(&all)?;
    }
    parse(&json["jobs"][0], direction, read_percent, percents)
}

fn run_to_json(arguments: &[String]) -> Result<Value> {
    let output = Command::new("fio").args(arguments).output().context("cannot start fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("fio {} failed: {said}{text}", arguments.join(" "));
    }
    // fio may say something before its JSON.
    let start = text.find('{').with_context(|| format!("fio printed no JSON: {text}"))?;
    serde_json::from_str(&text[start..]).context("fio's JSON")
}

fn parse(job: &Value, direction: &str, read_percent: u32, percents: &[f64]) -> Result<JobResult> {
    let find = |direction: &str, pointer: &str| {
        let value = job[direction].pointer(pointer).and_then(Value::as_f64);
        value.with_context(|| format!("fio's JSON has no {direction}{pointer}"))
    };
    let mut iops = find(direction, "/iops")?;
    if read_percent > 0 && read_percent < 100 {
        iops += find("read", "/iops")?;
    }
    let percentiles = |place: &str| -> Result<Vec<f64>> {
        let at = |percent: &f64| find(direction, &format!("/{place}/percentile/{percent:.6}"));
        percents.iter().map(at).collect()
    };
    let sync = |percent: &f64| {
        job["sync"].pointer(&format!("/lat_ns/percentile/{percent:.6}")).and_then(Value::as_f64)
    };
    Ok(JobResult {
        iops,
        seconds: find(direction, "/runtime")? / 1000.0,
        mean_nanos: find(direction, "/clat_ns/mean")?,
        percentiles: percentiles("clat_ns")?,
        worst_nanos: find(direction, "/clat_ns/max")?,
        sync_percentiles: percents.iter().filter_map(sync).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_log_is_understood() {
        let text = "100, 2500, 1, 0, 0\n200, 0, 1, 0, 0\nnonsense\n";
        assert_eq!(rates(text), [(0.1, 2500.0), (0.2, 0.0)]);
    }

    #[test]
    fn fios_json_is_understood() {
        let clat = serde_json::json!({ "mean": 5.0, "max": 11,
                "percentile": { "50.000000": 4, "99.900000": 9 } });
        let job = serde_json::json!({
            "read": { "iops": 10.0 },
            "write": { "iops": 30.5, "runtime": 2000, "clat_ns": clat },
            "sync": { "lat_ns": { "percentile": { "50.000000": 7, "99.900000": 8 } } },
        });
        let result = parse(&job, "write", 25, &[50.0, 99.9]).unwrap();
        assert_eq!((result.iops, result.seconds, result.mean_nanos), (40.5, 2.0, 5.0));
        assert_eq!((&result.percentiles[..], result.worst_nanos), (&[4.0, 9.0][..], 11.0));
        assert_eq!(result.sync_percentiles, [7.0, 8.0]);
        assert!(parse(&job, "read", 100, &[50.0]).is_err());
    }
}
