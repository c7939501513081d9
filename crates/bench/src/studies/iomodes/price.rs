//! What the pacer itself costs: the processor time of small writes to a file in memory, lazy and
//! buffered in turn. Nothing is written out there, so what lazy takes longer is the pacer, its
//! thread and its calls.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use udm::disk::{FileDisk, FileOptions, IoMode};
use udm::units::{KIB, MIB};

use crate::cpu;
use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Claim, Promise, Study, Table};
use crate::rig::{Folder, linear_device};
use crate::stats::median;
use crate::unit::Unit;

const FILE_BYTES: u64 = 64 * MIB;
/// Promised for a write of 4 KiB, in nanoseconds.
const PRICE_MAX: f64 = 300.0;
const REPEATS: usize = 7;

/// Adds the table and its claims; `writes` is how many each repeat has.
pub fn add(memory: &Folder, writes: u64, study: &mut Study) -> Result<()> {
    let columns = [("buffered", Unit::Nanos), ("lazy", Unit::Nanos), ("the pacer", Unit::Nanos)];
    let mut table = Table::new("CPU per write of 4 KiB to a file in memory", &columns);
    let path = memory.file("price", FILE_BYTES)?;
    for (name, rw) in [("sequential", Rw::Write), ("random", Rw::Randwrite)] {
        let (mut buffered, mut lazy, mut pacer) = (Vec::new(), Vec::new(), Vec::new());
        for repeat in 0..REPEATS {
            let mut each = |io: IoMode| {
                let options = FileOptions { io, ..FileOptions::default() };
                let open = || FileDisk::open(&path, &options);
                spent(crate::rig::open_when_free(open)?, rw, writes, repeat as u64)
            };
            let pair = (each(IoMode::Buffered)?, each(IoMode::Lazy)?);
            buffered.push(pair.0);
            lazy.push(pair.1);
            pacer.push(pair.1 - pair.0);
        }
        table.row(name, &[median(&buffered), median(&lazy), median(&pacer)]);
        let what = format!("{name} write of 4 KiB, nanoseconds of the pacer");
        study.claims.push(Claim::new(what, &pacer, Some(Promise::AtMost(PRICE_MAX))));
    }
    study.tables.push(table);
    Ok(())
}

/// Processor time of a write, of all threads, until all is written out.
fn spent(disk: FileDisk, rw: Rw, writes: u64, seed: u64) -> Result<f64> {
    let disk = Arc::new(disk);
    let device = linear_device(disk.clone())?;
    let job = Job {
        rw,
        bs: 4 * KIB,
        iodepth: 16,
        size: FILE_BYTES,
        io_size: writes * 4 * KIB,
        runtime: Duration::from_secs(60),
        randseed: seed + 1,
        ..Job::default()
    };
    // The file has all its pages then, and the ring its memory.
    load::run(&device, &Job { rw: Rw::Write, io_size: FILE_BYTES, ..job.clone() })?;
    let before = cpu::of_process();
    let reached = load::run(&device, &job)?;
    drop((device, disk));
    Ok((cpu::of_process() - before) / reached.count().max(1) as f64)
}
