//! fio, run as a user would, and what its JSON says.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// What a job reached.
#[derive(Clone, Copy, Debug)]
pub struct JobResult {
    /// Requests per second.
    pub iops: f64,
    /// Seconds from its first request to the end of its last.
    pub seconds: f64,
    /// Half of the requests took no longer, in microseconds.
    pub p50_micros: f64,
}

/// Runs one job; `direction` is "read" or "write", whichever its JSON is to be looked up for.
pub fn run(direction: &str, arguments: &[String]) -> Result<JobResult> {
    let output = Command::new("fio")
        .args(["--name=job", "--output-format=json"])
        .args(arguments)
        .output()
        .context("cannot start fio")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("fio {} failed: {said}{text}", arguments.join(" "));
    }
    // fio may say something before its JSON.
    let start = text.find('{').with_context(|| format!("fio printed no JSON: {text}"))?;
    let json: Value = serde_json::from_str(&text[start..]).context("fio's JSON")?;
    let side = &json["jobs"][0][direction];
    let find = |pointer: &str| {
        let value = side.pointer(pointer).and_then(Value::as_f64);
        value.with_context(|| format!("fio's JSON has no {direction}{pointer}"))
    };
    Ok(JobResult {
        iops: find("/iops")?,
        seconds: find("/runtime")? / 1000.0,
        p50_micros: find("/clat_ns/percentile/50.000000")? / 1000.0,
    })
}
