//! Traces of block requests: the requests of a program to its disk, in the formats in which traces
//! are published, or generated from a seed.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use udm::prng::Prng;
use udm::units::{BLOCK, SECTOR};

/// The longest request, in blocks: longer ones are cut.
const BLOCKS_MAX: u64 = 1024;

/// One request, in whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// First block.
    pub block: u64,
    /// How many.
    pub count: u32,
    /// Whether it writes.
    pub is_write: bool,
}

/// A sequence of requests.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Its name.
    pub name: String,
    /// The requests, in their order.
    pub requests: Vec<Request>,
    /// The time of each request, in seconds since the first one; empty if the trace lacks times.
    pub seconds: Vec<f32>,
}

impl Trace {
    /// Reads a file: `.csv` with the columns op, size and lbn; `.lis`, text with a first block
    /// and a count on each line; anything else is an array of 32-bit block numbers. Files that
    /// end in `.zst` or `.xz` are unpacked by the programs of that name.
    pub fn read(path: &Path) -> Result<Trace> {
        let shown = path.display();
        let (bytes, inner) = unpack(path)?;
        let text = || std::str::from_utf8(&bytes).with_context(|| format!("{shown} is not text"));
        let found = match inner.extension().and_then(|ext| ext.to_str()) {
            Some("csv") => parse_csv(text()?),
            Some("lis") => parse_lis(text()?).map(|requests| (requests, Vec::new())),
            _ => parse_array(&bytes).map(|requests| (requests, Vec::new())),
        };
        let (requests, seconds) = found.with_context(|| format!("{shown} is not a trace"))?;
        ensure!(!requests.is_empty(), "{shown} contains no requests");
        let name = inner.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Trace { name, requests, seconds })
    }

    /// A made-up trace: a popular part and a tail of rare blocks, with scans in between.
    pub fn synthetic(seed: u64, references: usize) -> Trace {
        let mut prng = Prng::new(seed);
        let blocks = (references as u64 / 8).max(64);
        let mut requests = Vec::with_capacity(references);
        let mut scanned = blocks;
        while requests.len() < references {
            let is_write = prng.one_in(4);
            let one = |block| Request { block, count: 1, is_write };
            if prng.one_in(200) {
                requests
                    .extend((0..200).map(|nth| Request { is_write: false, ..one(scanned + nth) }));
                scanned += 200;
                continue;
            }
            // The product of uniform numbers: small ones are much more frequent.
            let skewed = blocks * prng.below(1000) / 1000 * prng.below(1000) / 1000;
            requests.push(one(skewed * prng.below(1000) / 1000));
        }
        requests.truncate(references);
        Trace { name: format!("synthetic, seed {seed}"), requests, seconds: Vec::new() }
    }

    /// Every block that is asked for, in order, by its number among the different ones; and how
    /// many different ones there are.
    pub fn references(&self) -> (Vec<u32>, usize) {
        let mut numbers = HashMap::new();
        let mut references = Vec::new();
        for request in &self.requests {
            for block in request.block..request.block + u64::from(request.count) {
                let next = numbers.len() as u32;
                references.push(*numbers.entry(block).or_insert(next));
            }
        }
        (references, numbers.len())
    }

    /// Blocks of the smallest device that has all of them.
    pub fn device_blocks(&self) -> u64 {
        let ends = self.requests.iter().map(|request| request.block + u64::from(request.count));
        ends.max().unwrap_or(0)
    }
}

fn unpack(path: &Path) -> Result<(Vec<u8>, std::path::PathBuf)> {
    let shown = path.display();
    let program = match path.extension().and_then(|ext| ext.to_str()) {
        Some("zst") => "zstd",
        Some("xz") => "xz",
        _ => {
            let bytes = std::fs::read(path).with_context(|| format!("cannot read {shown}"))?;
            return Ok((bytes, path.to_path_buf()));
        }
    };
    let output =
        Command::new(program).args(["-dc", "--"]).arg(path).output().with_context(|| {
            format!(
                "{program} is needed to unpack {shown}; or unpack it elsewhere and name that file"
            )
        })?;
    if !output.status.success() {
        bail!(
            "{program} cannot unpack {shown}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok((output.stdout, path.with_extension("")))
}

/// The blocks that a range of bytes touches, in requests that are not too long.
fn push_range(requests: &mut Vec<Request>, offset: u64, len: u64, is_write: bool) {
    let (mut block, end) = (offset / BLOCK, (offset + len).div_ceil(BLOCK));
    while block < end {
        let count = (end - block).min(BLOCKS_MAX);
        requests.push(Request { block, count: count as u32, is_write });
        block += count;
    }
}

/// `op` is a SCSI opcode in hexadecimal, or begins with r or w; `size` is in bytes, `lbn` in
/// sectors, `time`, if there is one, in seconds.
fn parse_csv(text: &str) -> Result<(Vec<Request>, Vec<f32>)> {
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').map(str::trim).collect();
    let column = |name: &str| {
        header.iter().position(|head| *head == name).with_context(|| format!("no column '{name}'"))
    };
    let (op, size, lbn) = (column("op")?, column("size")?, column("lbn")?);
    let time = column("time").ok();
    let (mut requests, mut seconds) = (Vec::new(), Vec::new());
    let mut first = None;
    for (nth, line) in lines.enumerate() {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok());
        let (Some(op), Some(size), Some(lbn)) = (fields.get(op), number(size), number(lbn)) else {
            bail!("line {}: '{line}'", nth + 2);
        };
        let is_write = match op.to_ascii_lowercase().as_str() {
            "28" | "88" | "8" | "08" | "a8" => false,
            "2a" | "8a" | "a" | "0a" | "aa" => true,
            word if word.starts_with('r') => false,
            word if word.starts_with('w') => true,
            _ => continue,
        };
        let offset = lbn.checked_mul(SECTOR).filter(|offset| *offset < 1 << 60);
        let Some(offset) = offset else { bail!("line {}: sector {lbn}", nth + 2) };
        push_range(&mut requests, offset, size, is_write);
        if let Some(time) = time {
            let time = fields.get(time).and_then(|field| field.parse::<f64>().ok());
            let Some(time) = time else { bail!("line {}: '{line}'", nth + 2) };
            let since = time - *first.get_or_insert(time);
            seconds.resize(requests.len(), since as f32);
        }
    }
    Ok((requests, seconds))
}

fn parse_lis(text: &str) -> Result<Vec<Request>> {
    let mut requests = Vec::new();
    for (nth, line) in text.lines().enumerate() {
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(block)), Some(Ok(count))) = (fields.next(), fields.next()) else {
            bail!("line {}: '{line}'", nth + 1);
        };
        ensure!(block < 1 << 48 && count < 1 << 32, "line {}: '{line}'", nth + 1);
        push_range(&mut requests, block * BLOCK, count * BLOCK, false);
    }
    Ok(requests)
}

fn parse_array(bytes: &[u8]) -> Result<Vec<Request>> {
    let (words, rest) = bytes.as_chunks::<4>();
    ensure!(rest.is_empty(), "{} bytes are not a multiple of 32-bit numbers", bytes.len());
    let one = |word: &[u8; 4]| {
        let block = u64::from(u32::from_le_bytes(*word));
        Request { block, count: 1, is_write: false }
    };
    Ok(words.iter().map(one).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(block: u64, count: u32, is_write: bool) -> Request {
        Request { block, count, is_write }
    }

    #[test]
    fn formats_are_read() {
        let csv = "version,time,op,size,lbn\n1,5,2a,512,9\n1,6,28,8192,12\n1,6,35,0,0\n";
        let (read, seconds) = parse_csv(csv).unwrap();
        assert_eq!(seconds, [0.0, 1.0]);
        assert_eq!(read, [request(1, 1, true), request(1, 3, false)], "whole blocks, 12 is in 1");
        let lis = parse_lis("7 1 0 0\n9 2 0 1\n").unwrap();
        assert_eq!(lis, [request(7, 1, false), request(9, 2, false)]);
        assert_eq!(parse_array(&[3, 0, 0, 0, 0, 1, 0, 0]).unwrap()[1], request(256, 1, false));
        assert!(parse_array(&[1, 2, 3]).is_err());
        assert!(parse_csv("time,size\n1,2\n").is_err() && parse_lis("x 1\n").is_err());
        assert!(parse_csv("op,size,lbn\n28,512,99999999999999999\n").is_err());
    }

    #[test]
    fn references_are_numbered_as_they_come() {
        let requests = vec![request(90, 2, false), request(5, 1, true), request(91, 1, false)];
        let trace = Trace { name: String::new(), requests, seconds: Vec::new() };
        assert_eq!(trace.references(), (vec![0, 1, 2, 1], 3));
        assert_eq!(trace.device_blocks(), 92);
        let made = Trace::synthetic(1, 5000);
        assert_eq!(made.requests.len(), 5000);
        assert_eq!(made.requests, Trace::synthetic(1, 5000).requests);
    }
}
