//! The cost of the pacer itself: the processor time of small writes to a file in memory, lazy and
//! buffered in turn.
//!
//! In the program, the additional time of the mode `lazy` is the cost of the pacer and its thread.
//! In the kernel, it is the cost of the system calls for the write-out, which a test counts. Their
//! time here does not match a real file, because a file in memory is never written out and keeps
//! all its pages.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use udm::disk::{FileDisk, FileOptions, IoMode};
use udm::units::{KIB, MIB};

use crate::cpu;
use crate::flame;
use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Claim, Promise, Study, Table};
use crate::rig::{Setup, linear_device};
use crate::stats::median;
use crate::unit::Unit;

const FILE_BYTES: u64 = 64 * MIB;
/// Promised for a write of 4 KiB, in nanoseconds.
const PRICE_MAX: f64 = 300.0;

/// Nanoseconds of a write.
#[derive(Clone, Copy)]
struct Price {
    program: f64,
    kernel: f64,
}

/// Adds the table and its claims.
pub fn add(setup: &Setup, study: &mut Study) -> Result<()> {
    let (writes, repeats) = (setup.choose(20_000, 200_000), setup.repeats(3, 7) as u64);
    let columns = [
        ("buffered: program", Unit::Nanos),
        ("kernel", Unit::Nanos),
        ("lazy: program", Unit::Nanos),
        ("kernel", Unit::Nanos),
    ];
    let mut table = Table::new("CPU per write of 4 KiB to a file in memory", &columns);
    let path = setup.places.memory.file("price", FILE_BYTES)?;
    for (name, rw) in [("sequential", Rw::Write), ("random", Rw::Randwrite)] {
        let (mut buffered, mut lazy) = (Vec::new(), Vec::new());
        for repeat in 0..repeats {
            let each = |io: IoMode| {
                let _case = flame::case(format!("CPU per write, {name}: {io:?}"));
                let options = FileOptions { io, ..FileOptions::default() };
                let disk = crate::rig::open_when_free(|| FileDisk::open(&path, &options))?;
                spent(disk, rw, writes, repeat)
            };
            buffered.push(each(IoMode::Buffered)?);
            lazy.push(each(IoMode::Lazy)?);
        }
        // A negative difference is the error of the kernel's samples.
        let more = |(lazy, other): (&Price, &Price)| (lazy.program - other.program).max(0.0);
        let pacer: Vec<f64> = lazy.iter().zip(&buffered).map(more).collect();
        let of = |prices: &[Price], part: fn(&Price) -> f64| {
            median(&prices.iter().map(part).collect::<Vec<_>>())
        };
        let medians = [
            of(&buffered, |price| price.program),
            of(&buffered, |price| price.kernel),
            of(&lazy, |price| price.program),
            of(&lazy, |price| price.kernel),
        ];
        table.row(name, &medians);
        let what = format!("{name} write of 4 KiB, nanoseconds of the pacer");
        study.claims.push(Claim::new(what, &pacer, Some(Promise::AtMost(PRICE_MAX))));
    }
    study.tables.push(table);
    Ok(())
}

/// Processor time of a write, of all threads, until all is written out.
fn spent(disk: FileDisk, rw: Rw, writes: u64, seed: u64) -> Result<Price> {
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
    let (all, program) = (cpu::of_process(), cpu::of_program());
    let reached = load::run(&device, &job)?;
    drop((device, disk));
    let (all, program) = (cpu::of_process() - all, cpu::of_program() - program);
    let each = |nanos: f64| nanos / reached.count().max(1) as f64;
    Ok(Price { program: each(program), kernel: each(all - program) })
}
