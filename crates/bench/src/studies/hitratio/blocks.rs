//! The policies of the target `cache`, by the size of its blocks: the share of requested bytes that
//! are cached, and the bytes that promotions and demotions copy.

use std::collections::HashMap;

use anyhow::Result;
use udm::units::BLOCK;

use super::{each, served};
use crate::policies::Policy;
use crate::results::{Claim, Promise, Study, Table};
use crate::rig::Setup;
use crate::simulator::{CachePolicy, Tally, pieces, run};
use crate::trace::Trace;
use crate::unit::Unit;

/// Cache sizes, in percent of the different blocks of the trace.
const SIZES: [f64; 5] = [1.0, 5.0, 10.0, 20.0, 40.0];
/// The same, if there is little time.
const SIZES_SMALL: [f64; 3] = [5.0, 10.0, 40.0];
/// No cache has fewer slots.
const SLOTS_MIN: u32 = 8;
/// The policy of ours that is to be better than all others.
const OURS: CachePolicy = CachePolicy::Probation;
/// The engine that udm serves, with the policies of its tables.
const SERVED: [(&str, &str); 2] =
    [("udm, smq, served", "smq"), ("udm, probation, served", "probation")];
const OURS_SERVED: &str = SERVED[1].0;

/// One trace with one size of blocks.
struct Found {
    slots: Vec<u32>,
    on_paper: Vec<(&'static str, Vec<Tally>)>,
    cache: Vec<(&'static str, Vec<Tally>)>,
    served: Vec<(&'static str, Vec<Tally>)>,
}

/// Adds the tables of one trace.
pub fn add(setup: &Setup, trace: &Trace, study: &mut Study) -> Result<()> {
    for &block_bytes in setup.blocks() {
        let found = replay(setup, trace, block_bytes)?;
        let size = Unit::Bytes.text(block_bytes as f64);
        let columns: Vec<(String, Unit)> =
            found.slots.iter().map(|slots| (format!("{slots} slots"), Unit::Percent)).collect();
        let hits = format!("{}, blocks of {size}: bytes that were hit", trace.name);
        let moved = format!(
            "{}, blocks of {size}: bytes moved between the devices, for each byte that was asked \
             for",
            trace.name
        );
        study.tables.push(table(&hits, &columns, &found, percent_hit));
        let columns: Vec<(String, Unit)> =
            columns.into_iter().map(|(name, _)| (name, Unit::Ratio)).collect();
        study.tables.push(table(&moved, &columns, &found, moved_ratio));
        if !setup.traces().is_empty() {
            claims(study, &format!("{}, {size}", trace.name), &found);
        }
    }
    Ok(())
}

fn percent_hit(tally: &Tally) -> f64 {
    100.0 * tally.hit as f64 / tally.asked as f64
}

fn moved_ratio(tally: &Tally) -> f64 {
    tally.moved() as f64 / tally.asked as f64
}

fn table(
    title: &str,
    columns: &[(String, Unit)],
    found: &Found,
    number: impl Fn(&Tally) -> f64,
) -> Table {
    let columns: Vec<(&str, Unit)> =
        columns.iter().map(|(name, unit)| (name.as_str(), *unit)).collect();
    let mut table = Table::new(title, &columns);
    for (name, tallies) in found.served.iter().chain(&found.cache).chain(&found.on_paper) {
        let row: Vec<f64> = tallies.iter().map(&number).collect();
        table.row(*name, &row);
    }
    table
}

/// The targets of our policy: simulated, served, and one compared with the other.
fn claims(study: &mut Study, what: &str, found: &Found) {
    let (on_paper, served) = (of(&found.cache, OURS.name()), of(&found.served, OURS_SERVED));
    beside_others(study, &format!("{what}, on paper"), found, &on_paper);
    beside_others(study, &format!("{what}, served"), found, &served);
    let of_paper = |(served, paper): (&Tally, &Tally)| {
        (percent_hit(served) + 0.5) / percent_hit(paper).max(0.5)
    };
    let least = served.iter().zip(&on_paper).map(of_paper).fold(f64::MAX, f64::min);
    let text = format!("{what}: bytes hit + 0.5 %, served over on paper");
    study.claims.push(Claim::new(text, &[least], Some(Promise::AtLeast(1.0))));
}

/// At the worst size: hits compared with the best policy that does not know the future, and copied
/// bytes compared with the kernel's policy and with that best one.
fn beside_others(study: &mut Study, what: &str, found: &Found, ours: &[Tally]) {
    let kernel = &of(&found.cache, CachePolicy::KernelSmq.name());
    let able = || {
        let min = Policy::Min.name();
        found.on_paper.iter().filter(move |(name, _)| *name != min).map(|(_, tallies)| tallies)
    };
    let (mut hits, mut beside_kernel, mut beside_best) = (f64::MAX, 0.0_f64, 0.0_f64);
    for nth in 0..found.slots.len() {
        let rivals = able().map(|tallies| &tallies[nth]).chain([&kernel[nth]]);
        let best = rivals.max_by(|one, other| one.hit.cmp(&other.hit)).expect("there are some");
        hits = hits.min((percent_hit(&ours[nth]) + 0.5) / percent_hit(best).max(0.5));
        let ratio = |other: &Tally| ours[nth].moved() as f64 / other.moved().max(BLOCK) as f64;
        beside_kernel = beside_kernel.max(ratio(&kernel[nth]));
        beside_best = beside_best.max(ratio(best));
    }
    let mut claim = |text: &str, number: f64, promise| {
        study.claims.push(Claim::new(format!("{what}: {text}"), &[number], Some(promise)));
    };
    claim("bytes hit + 0.5 %, over the best of all", hits, Promise::AtLeast(1.0));
    claim("bytes moved, over the kernel's smq", beside_kernel, Promise::AtMost(0.5));
    claim("bytes moved, over the policy with most hits", beside_best, Promise::AtMost(0.5));
}

fn of(rows: &[(&'static str, Vec<Tally>)], wanted: &str) -> Vec<Tally> {
    rows.iter().find(|(name, _)| *name == wanted).expect("it is in the table").1.clone()
}

fn replay(setup: &Setup, trace: &Trace, block_bytes: u64) -> Result<Found> {
    let (pieces, _) = pieces(trace, block_bytes);
    let mut numbers = HashMap::new();
    let references: Vec<u32> = pieces
        .iter()
        .map(|piece| {
            let next = numbers.len() as u32;
            *numbers.entry(piece.block).or_insert(next)
        })
        .collect();
    let unique = numbers.len();
    let percents = setup.choose(&SIZES_SMALL[..], &SIZES[..]);
    let slots = percents.iter().map(|percent| (unique as f64 * percent / 100.0) as u32);
    let mut slots: Vec<u32> = slots.filter(|slots| *slots >= SLOTS_MIN).collect();
    if slots.is_empty() {
        slots.push(SLOTS_MIN);
    }
    let asked = pieces.iter().map(|piece| u64::from(piece.len) * BLOCK).sum();
    let on_paper = each(Policy::ALL.len(), slots.len(), |policy, size| {
        let mut tally = Tally { asked, ..Tally::default() };
        let mut missed = pieces.len() as u64;
        Policy::ALL[policy].run(&references, unique, slots[size] as usize, |at| {
            tally.hit += u64::from(pieces[at].len) * BLOCK;
            missed -= 1;
        });
        // They promote whole blocks, and do not count write-back.
        tally.filled = missed * block_bytes;
        Ok(tally)
    })?;
    let cache = each(CachePolicy::ALL.len(), slots.len(), |policy, size| {
        Ok(run(CachePolicy::ALL[policy], trace, block_bytes, slots[size]))
    })?;
    let served = each(SERVED.len(), slots.len(), |who, size| {
        served::run(SERVED[who].1, trace, block_bytes, slots[size])
    })?;
    Ok(Found {
        slots,
        on_paper: Policy::ALL.iter().map(|policy| policy.name()).zip(on_paper).collect(),
        cache: CachePolicy::ALL.iter().map(|policy| policy.name()).zip(cache).collect(),
        served: SERVED.iter().map(|(name, _)| *name).zip(served).collect(),
    })
}
