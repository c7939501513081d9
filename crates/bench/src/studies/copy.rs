//! Which instructions copy fastest to the cache device: the table of the dm-writecache study for
//! this machine, with udm's choice.
//!
//! With `--remember`, servers that open such a medium on this machine use the result.

use std::time::Duration;

use anyhow::{Context, Result};
use udm::pmem::calibrate::{
    Contender, Pattern, SCRATCH_BYTES, SIZES, Times, candidates, choose, measure,
};
use udm::pmem::copies::{Key, remember, state_dir};
use udm::pmem::copy::{CopyPlan, Primitive};
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::pmem::{Persistence, Pmem};

use crate::libpmem::Libpmem;
use crate::results::{Axis, Claim, Plot, Promise, Study, Table};
use crate::rig::Setup;
use crate::stats::median;
use crate::unit::Unit;

/// The smallest copy that dm-writecache makes with clflushopt.
const WRITECACHE_CLFLUSHOPT_FROM: usize = 768;
/// The smallest copy that libpmem makes with non-temporal stores.
const LIBPMEM_NT_FROM: usize = 256;

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let rounds = setup.repeats(9, 31);
    let path = match setup.named_cache() {
        Some(path) => path.to_owned(),
        None => setup.places.memory.file("copies", SCRATCH_BYTES)?,
    };
    let mut pmem = DaxPmem::open(&path, DaxOptions::default())?;
    let library = Libpmem::open(&path);
    let primitives = candidates();
    let mut study = Study::new(
        "copy",
        "which instructions copy fastest, and which udm uses",
        "Copies of each size to the medium, with the fence that makes them durable, timed in \
         batches; lines are out of the processor's caches when a copy begins. Contenders take \
         turns within each round; medians over rounds. What was chosen is marked with *; with \
         --remember, `udm create` uses it on such media.",
    );
    study.fact("medium", format!("{}, {}", pmem.medium().name, pmem.medium().description));
    if primitives.is_empty() || pmem.medium().persistence != Persistence::Cpu {
        study.notes.push("Stores to this medium become durable by msync only.".into());
        return Ok(study);
    }
    let plan = find_plan(&mut pmem, &primitives, rounds)?;
    let mut contenders: Vec<_> = primitives.iter().map(|one| Contender::Only(*one)).collect();
    contenders.push(Contender::Plan(plan));
    let copy = library.as_ref().map(|library| |at: u64, bytes: &[u8]| library.store(at, bytes));
    contenders.extend(copy.as_ref().map(|copy| Contender::Other(copy)));
    let times = measure(&mut pmem, &contenders, rounds, Duration::MAX);
    let times = times.context("the medium failed")?;
    let view =
        View { primitives: &primitives, plan, times: &times, has_library: library.is_some() };
    view.fill(&mut study);
    study.fact("rounds", rounds.to_string());
    if setup.may_remember() {
        match state_dir().map(|folder| remember(&folder, &Key::of(&pmem), &plan)) {
            Some(Ok(path)) => study.fact("remembered in", path.display().to_string()),
            Some(Err(error)) => study.notes.push(format!("It could not be remembered: {error}.")),
            None => study.notes.push("It could not be remembered: no state directory.".into()),
        }
    }
    Ok(study)
}

/// The plan comes from a measurement of its own, so that the table judges it rather than
/// repeating it.
fn find_plan(pmem: &mut DaxPmem, primitives: &[Primitive], rounds: usize) -> Result<CopyPlan> {
    let contenders: Vec<_> = primitives.iter().map(|one| Contender::Only(*one)).collect();
    let times = measure(pmem, &contenders, rounds, Duration::MAX);
    Ok(choose(primitives, &times.context("the medium failed, or is too small")?))
}

/// The measurements: first each primitive, then udm, then libpmem.
struct View<'a> {
    primitives: &'a [Primitive],
    plan: CopyPlan,
    times: &'a Times,
    has_library: bool,
}

/// One row: its name, and which contender's time stands for each size.
type RowOf<'a> = (String, Box<dyn Fn(usize) -> Option<usize> + 'a>);

impl View<'_> {
    fn place(&self, primitive: Primitive) -> Option<usize> {
        self.primitives.iter().position(|one| *one == primitive)
    }

    fn udm(&self) -> usize {
        self.primitives.len()
    }

    fn rows(&self) -> Vec<RowOf<'_>> {
        let mut rows: Vec<RowOf<'_>> = Vec::new();
        for (nth, primitive) in self.primitives.iter().enumerate() {
            rows.push((long_name(*primitive).into(), Box::new(move |_| Some(nth))));
        }
        rows.push(("udm, calibrated".into(), Box::new(|_| Some(self.udm()))));
        rows.push(("dm-writecache's rule".into(), Box::new(|size| self.writecache(size))));
        rows.push(("libpmem's rule".into(), Box::new(|size| self.libpmem_rule(size))));
        if self.has_library {
            let name = "libpmem, pmem_memcpy_persist".into();
            rows.push((name, Box::new(|_| Some(self.udm() + 1))));
        }
        rows
    }

    /// movnti, and from 768 bytes on ordinary stores with clflushopt.
    fn writecache(&self, size: usize) -> Option<usize> {
        let is_large = size >= WRITECACHE_CLFLUSHOPT_FROM;
        self.place(if is_large { Primitive::Clflushopt } else { Primitive::Movnti })
    }

    /// Ordinary stores with clwb, and from 256 bytes on the widest non-temporal stores.
    fn libpmem_rule(&self, size: usize) -> Option<usize> {
        if size >= LIBPMEM_NT_FROM {
            return self.place(CopyPlan::usual().choose(size));
        }
        self.place(Primitive::Clwb).or(self.place(Primitive::Clflushopt))
    }

    fn fill(&self, study: &mut Study) {
        for pattern in Pattern::ALL {
            study.tables.push(self.table(pattern, "ns per copy", Unit::Nanos, |nanos, _| nanos));
            let rate = |nanos: f64, size: usize| size as f64 * 1000.0 / nanos;
            study.tables.push(self.table(pattern, "MB/s", Unit::MbPerSecond, rate));
            study.plots.push(self.plot(pattern));
        }
        study.fact("chosen", self.chosen());
        self.claims(study);
        for (nth, size) in SIZES.into_iter().enumerate() {
            let rounds = self.times.rounds(self.udm(), nth, Pattern::Sequential);
            study.repeats(format!("udm, {size} bytes, ns"), Unit::Nanos, rounds);
        }
    }

    /// The plan in words: each primitive from the size on where it begins.
    fn chosen(&self) -> String {
        let mut text = String::new();
        let mut last = None;
        for size in SIZES {
            let primitive = self.plan.choose(size);
            if last != Some(primitive) {
                let separator = if text.is_empty() { "" } else { ", " };
                let from = Unit::Bytes.text(size as f64);
                text += &format!("{separator}{} from {from}", primitive.name());
                last = Some(primitive);
            }
        }
        text
    }

    fn table(
        &self,
        pattern: Pattern,
        what: &str,
        unit: Unit,
        value: impl Fn(f64, usize) -> f64,
    ) -> Table {
        let names: Vec<String> = SIZES.map(|size| Unit::Bytes.text(size as f64)).to_vec();
        let columns: Vec<(&str, Unit)> = names.iter().map(|name| (name.as_str(), unit)).collect();
        let mut table = Table::new(format!("{}, {what}", pattern.name()), &columns);
        for (name, who) in self.rows() {
            let cell = |(nth, size): (usize, &usize)| {
                let who = who(*size)?;
                Some(value(self.times.median(who, nth, pattern), *size))
            };
            let values: Vec<f64> =
                SIZES.iter().enumerate().map(|at| cell(at).unwrap_or(f64::NAN)).collect();
            let row = table.row(name.clone(), &values);
            for (nth, size) in SIZES.into_iter().enumerate() {
                if long_name(self.plan.choose(size)) == name {
                    row.marked.push(nth);
                }
            }
        }
        table
    }

    fn plot(&self, pattern: Pattern) -> Plot {
        let mut plot = Plot::lines(
            &format!("Durable copies, {}", pattern.name()),
            Axis::log("bytes of a copy", Unit::Bytes),
            Axis::log("MB/s", Unit::Number),
        );
        for (name, who) in self.rows() {
            let point = |(nth, size): (usize, usize)| {
                let who = who(size)?;
                let nanos = self.times.median(who, nth, pattern);
                Some((size as f64, size as f64 * 1000.0 / nanos))
            };
            plot.add(name, SIZES.into_iter().enumerate().filter_map(point).collect());
        }
        plot
    }

    /// How udm compares with the best primitive, and with the fixed rules.
    fn claims(&self, study: &mut Study) {
        let over = |what: &dyn Fn(usize) -> Option<usize>, nth: usize| -> Option<Vec<f64>> {
            let other = self.times.rounds(what(SIZES[nth])?, nth, Pattern::Sequential);
            let own = self.times.rounds(self.udm(), nth, Pattern::Sequential);
            Some(own.iter().zip(other).map(|(own, other)| own / other).collect())
        };
        let best = |size: usize| -> Option<usize> {
            let nth = SIZES.iter().position(|one| *one == size)?;
            let time = |who: &usize| self.times.median(*who, nth, Pattern::Sequential);
            (0..self.primitives.len()).min_by(|a, b| time(a).total_cmp(&time(b)))
        };
        let ratios: Vec<f64> = (0..SIZES.len())
            .filter_map(|nth| over(&best, nth).map(|rounds| median(&rounds)))
            .collect();
        // The middle of all sizes, and the worst of them as the highest.
        let promise = Some(Promise::AtMost(1.05));
        study.claims.push(Claim::new("udm / best primitive, over sizes", &ratios, promise));
        let rule = |size: usize| self.writecache(size);
        let library = |size: usize| self.libpmem_rule(size);
        let at = SIZES.iter().position(|size| *size == 4096).unwrap_or(0);
        let what = "udm / dm-writecache's rule, 4 KiB";
        study.claims.extend(over(&rule, at).map(|rounds| Claim::new(what, &rounds, None)));
        let what = "udm / libpmem's rule, 4 KiB";
        study.claims.extend(over(&library, at).map(|rounds| Claim::new(what, &rounds, None)));
        if self.has_library {
            let measured = |_: usize| Some(self.udm() + 1);
            let what = "udm / pmem_memcpy_persist, 4 KiB";
            study.claims.extend(over(&measured, at).map(|rounds| Claim::new(what, &rounds, None)));
        }
    }
}

fn long_name(primitive: Primitive) -> &'static str {
    match primitive {
        Primitive::Nt32 => "AVX2 NT",
        Primitive::Nt64 => "AVX-512 NT",
        other => other.name(),
    }
}
