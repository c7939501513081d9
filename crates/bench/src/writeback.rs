//! How fast dirty data reaches a file, beside what fio writes to that file.
//!
//! The same number of random 4 KiB blocks each: udm from a full cache, in whatever order and
//! pieces it likes, and fio at depth 32; both past the page cache, and both until a final
//! fdatasync has returned.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::disk::{FileDisk, FileOptions, Ring};
use udm::local::Local;
use udm::prng::Prng;

use crate::fio;
use crate::report::{Claim, Promise, Row, Study, Table, median, percentile, ratios, sorted};
use crate::rig::{Cache, Keeper, Places, need_tools};

const BLOCK: u64 = 4096;
/// Bytes of dirty data.
const DIRTY_BYTES: u64 = 256 << 20;
/// Bytes of the file.
const FILE_BYTES: u64 = 1 << 30;

/// The whole study.
pub fn run(places: &Places, rounds: usize) -> Result<Study> {
    need_tools(&[("fio", "fio")])?;
    let file = places.disk.file("origin", FILE_BYTES)?;
    write_out(&file)?;
    let (mut ordered, mut fast, mut fios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        fios.push(fio_rate(&file, round)?);
        ordered.push(udm_rate(places, &file, round, "0")?);
        fast.push(udm_rate(places, &file, round, "0 writeback_order fast")?);
    }
    let row = |name: &str, rates: &[f64]| {
        let sorted = sorted(rates);
        let (low, high) = (percentile(&sorted, 0.0), percentile(&sorted, 100.0));
        Row { name: name.into(), values: vec![median(rates), low, high] }
    };
    let table = Table {
        title: format!("MiB per second, until durable ({rounds} rounds)"),
        columns: vec!["median", "low round", "high round"],
        rows: vec![
            row("fio, depth 32", &fios),
            row("udm, ordered", &ordered),
            row("udm, fast", &fast),
        ],
    };
    let promise = Some(Promise::AtLeast(0.7));
    let claims = vec![
        Claim::new("write-back / fio", &ratios(&ordered, &fios), promise),
        Claim::new("write-back, order fast / fio", &ratios(&fast, &fios), None),
    ];
    let about = format!(
        "{} MiB of dirty random 4 KiB blocks written back to a file of {} MiB with O_DIRECT, and \
         fio\nwriting as much to the same file, in turns.",
        DIRTY_BYTES >> 20,
        FILE_BYTES >> 20
    );
    Ok(Study { name: "writeback", about, tables: vec![table], claims })
}

/// Gives the file all its blocks, so that nobody pays for their allocation later.
fn write_out(path: &Path) -> Result<()> {
    let file = File::options().write(true).open(path).context("cannot open the file")?;
    let mut bytes = vec![0; 1 << 20];
    Prng::new(3).fill(&mut bytes);
    for at in (0..FILE_BYTES).step_by(bytes.len()) {
        file.write_all_at(&bytes, at).context("cannot fill the file: is the disk full?")?;
    }
    file.sync_all().context("cannot sync the file")
}

fn mib_per_second(since: Instant) -> f64 {
    DIRTY_BYTES as f64 / f64::from(1 << 20) / since.elapsed().as_secs_f64()
}

fn fio_rate(path: &Path, round: usize) -> Result<f64> {
    let arguments = [
        format!("--filename={}", path.display()),
        "--rw=randwrite".into(),
        "--bs=4k".into(),
        "--iodepth=32".into(),
        "--direct=1".into(),
        "--ioengine=io_uring".into(),
        "--allow_file_create=0".into(),
        format!("--randseed={}", round + 1),
        format!("--size={FILE_BYTES}"),
        format!("--io_size={DIRTY_BYTES}"),
    ];
    let job = fio::run("write", &arguments)?;
    let file = File::options().write(true).open(path).context("cannot open the file")?;
    let start = Instant::now();
    file.sync_data().context("cannot sync the file")?;
    let seconds = job.seconds + start.elapsed().as_secs_f64();
    Ok(DIRTY_BYTES as f64 / f64::from(1 << 20) / seconds)
}

fn udm_rate(places: &Places, path: &Path, round: usize, words: &str) -> Result<f64> {
    let disk = FileDisk::open(path, &FileOptions::default())?;
    if !disk.is_direct() {
        bail!("{} does not do direct I/O: use --scratch", path.display());
    }
    let cache = Cache::new(places, "writeback-cache", Arc::new(disk), words)?;
    make_dirty(&cache, round)?;
    let mut keeper = Keeper::new(&cache.device, Ring::new(64)?)?;
    let start = Instant::now();
    keeper.drain();
    let rate = mib_per_second(start);
    ensure!(cache.device.dirty().bytes == 0, "drained, but still dirty");
    Ok(rate)
}

/// Writes distinct random blocks, in random order.
fn make_dirty(cache: &Cache, round: usize) -> Result<()> {
    let mut prng = Prng::new(100 + round as u64);
    let mut blocks: Vec<u64> = (0..FILE_BYTES / BLOCK).collect();
    let mut local = Local::without_kernel(&cache.device)?;
    let mut buffer = Buffer::zeroed(BLOCK as usize);
    prng.fill(buffer.as_mut_slice());
    for nth in 0..(DIRTY_BYTES / BLOCK) as usize {
        let other = nth + prng.below((blocks.len() - nth) as u64) as usize;
        blocks.swap(nth, other);
        local.submit(Bio::write(blocks[nth] * BLOCK, buffer, false, 0));
        let done = local.poll().context("the cache is full too early")?;
        ensure!(done.status.is_ok(), "a write failed");
        buffer = done.buffer;
    }
    local.flush().ok().context("the flush failed")
}
