//! The cost of a rewrite in processor time: the client's thread, the background while it runs, and
//! the background until all is written back.
//!
//! 1. The written blocks are an eighth of the cache, and are cached: each is overwritten many
//!    times, like the blocks of a journal or the hot pages of a database. Blocks that are
//!    overwritten before write-back need no write-back.
//! 2. Each measurement writes the size of the cache three times, so the log wraps, or lasts some
//!    seconds if the backing device limits the rate.
//! 3. Rewrites are measured in front of a real file. FUA rewrites are measured in front of a disk
//!    in memory: with `ordered`, the default, a real file would need hundreds of thousands of
//!    flushes one by one, and the measurement would show only those.
//! 4. The bare copy is requested in the same way, with a reading of the clock for each. A ratio to
//!    it can be compared between machines.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use udm::disk::Disk;
use udm::pmem::Pmem;
use udm::pmem::dax::DaxPmem;
use udm::prng::Prng;
use udm::queue::Queue;
use udm::units::{GIB, MIB};

use super::contenders::BLOCK;
use crate::cpu::{self, Meter, Spent};
use crate::job::{Job, Rw};
use crate::load::{self, Reached};
use crate::pcache_rig::PcacheRig;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::{FILLS, Setup, bare_memory, ram_disk, settle};
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// In all that a rewrite may take, in bare copies: 1.3 us where a copy takes 0.45.
const REWRITE_MAX: f64 = 2.9;
/// And a FUA rewrite: 1.8 us there.
const FUA_MAX: f64 = 4.0;
/// A measure that the backing device holds up ends after this long.
const SECONDS: u64 = 2;

/// One measure.
struct Measure {
    reached: Reached,
    spent: Spent,
}

/// All rounds.
#[derive(Default)]
pub struct Price {
    copy: Vec<f64>,
    rewrite: Vec<Measure>,
    /// Copies in the rounds of FUA rewrites.
    fua_copy: Vec<f64>,
    fua: Vec<Measure>,
}

impl Price {
    /// The whole measurement, on a cache of its own.
    pub fn measure(setup: &Setup, rounds: usize) -> Result<Price> {
        let file: Arc<dyn Disk> = setup.backing_disk()?;
        let memory = bare_memory(setup, "write-price-copy")?;
        let mut price = Price::default();
        price.part(setup, file, rounds, |price, cache, job| {
            price.copy.push(copy(&memory, job.size, job.randseed)?);
            price.rewrite.push(measure(cache, job)?);
            Ok(())
        })?;
        price.part(setup, ram_disk(GIB), rounds, |price, cache, job| {
            price.fua_copy.push(copy(&memory, job.size, job.randseed)?);
            price.fua.push(measure(cache, &Job { fua: true, ..job.clone() })?);
            Ok(())
        })?;
        Ok(price)
    }

    /// All rounds in front of one origin.
    fn part(
        &mut self,
        setup: &Setup,
        origin: Arc<dyn Disk>,
        rounds: usize,
        round: impl Fn(&mut Price, &PcacheRig, &Job) -> Result<()>,
    ) -> Result<()> {
        let cache = setup.pcache("write-price", origin, "0")?;
        let _background = Queue::background("udm-background", &cache.device)?;
        load::fill_often(&cache.device, FILLS * setup.cache_bytes())?;
        let size = (setup.cache_bytes() / 8).min(cache.device.size_bytes()) / MIB * MIB;
        for nth in 0..rounds {
            load::refill(&cache.device, size)?;
            let job = Job {
                rw: Rw::Randwrite,
                size,
                io_size: FILLS * setup.cache_bytes(),
                runtime: setup.asked().runtime.unwrap_or(Duration::from_secs(SECONDS)),
                randseed: nth as u64 + 1,
                slice: Duration::from_millis(20),
                ..Job::default()
            };
            round(self, &cache, &job)?;
        }
        Ok(())
    }

    /// Its tables, plots and claims.
    pub fn show(&self, setup: &Setup, study: &mut Study) {
        let contenders =
            [("rewrite", &self.rewrite, &self.copy), ("FUA rewrite", &self.fua, &self.fua_copy)];
        let columns = [
            ("client", Unit::Nanos),
            ("background during", Unit::Nanos),
            ("afterwards", Unit::Nanos),
            ("in all", Unit::Nanos),
            ("/ copy", Unit::Ratio),
            ("IOPS", Unit::PerSecond),
            ("p99.99", Unit::Nanos),
            ("worst", Unit::Nanos),
        ];
        let blocks = Unit::Bytes.text((setup.cache_bytes() / 8) as f64);
        let title = format!("processor time of a 4 KiB rewrite of {blocks}, one client");
        let mut table = Table::new(title, &columns);
        let bare = median(&self.copy);
        let none = f64::NAN;
        table.row("bare durable copy", &[bare, none, none, bare, 1.0, none, none, none]);
        let mut rates = Plot::lines(
            "Rewrites per second",
            Axis::linear("seconds", Unit::Number),
            Axis::log("requests per second", Unit::PerSecond),
        );
        for (name, measures, copies) in contenders {
            for (nth, Measure { reached, spent }) in measures.iter().enumerate() {
                let all = reached.all();
                let values = [
                    spent.clients,
                    spent.beside,
                    spent.after,
                    spent.in_all(),
                    spent.in_all() / copies[nth],
                    reached.iops(),
                    all.percentile(99.99),
                    all.worst(),
                ];
                table.row(format!("{name}, round {}", nth + 1), &values);
            }
            // The first and the last tell whether anything piles up.
            let ends = [("first round", measures.first()), ("last round", measures.last())];
            for (which, measure) in ends {
                if let Some(measure) = measure {
                    rates.add(format!("{name}, {which}"), measure.reached.timeline.rates());
                }
            }
        }
        study.tables.push(table);
        study.plots.push(rates);
        self.claims(study);
    }

    fn claims(&self, study: &mut Study) {
        let of = |measures: &[Measure], part: fn(&Spent) -> f64| -> Vec<f64> {
            measures.iter().map(|measure| part(&measure.spent)).collect()
        };
        for (name, measures, copies, bound) in [
            ("rewrite", &self.rewrite, &self.copy, REWRITE_MAX),
            ("FUA rewrite", &self.fua, &self.fua_copy, FUA_MAX),
        ] {
            let in_all = of(measures, Spent::in_all);
            let what = format!("processor time of a {name}, in all / bare copy");
            let rounds = ratios(&in_all, copies);
            study.claims.push(Claim::new(what, &rounds, Some(Promise::AtMost(bound))));
            let clients = ratios(&of(measures, |spent| spent.clients), copies);
            study.claims.push(Claim::new("  of it the client's thread", &clients, None));
            study.repeats(format!("processor time of a {name}, ns"), Unit::Nanos, &in_all);
        }
    }
}

fn measure(cache: &PcacheRig, job: &Job) -> Result<Measure> {
    let mut meter = Meter::start();
    let reached = load::run(&cache.device, job)?;
    meter.clients_done(reached.cpu_nanos);
    settle(&cache.device)?;
    let spent = meter.finish(reached.count());
    Ok(Measure { reached, spent })
}

/// Processor time of one bare durable copy to a random place, in nanoseconds.
fn copy(memory: &DaxPmem, span: u64, seed: u64) -> Result<f64> {
    let mut prng = Prng::new(seed);
    let mut bytes = vec![0; BLOCK];
    prng.fill(&mut bytes);
    let count = FILLS * memory.len_bytes() / BLOCK as u64;
    let blocks = span.max(BLOCK as u64) / BLOCK as u64;
    let before = cpu::of_thread();
    let times = load::time(Duration::from_secs(SECONDS), count, |_| {
        memory.store(prng.below(blocks) * BLOCK as u64, &bytes);
        memory.drain().ok().context("the memory failed")
    })?;
    Ok((cpu::of_thread() - before) / times.count().max(1) as f64)
}
