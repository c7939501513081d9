//! The same load at equal rates, below the rate of the backing device alone, as of clients whose
//! own work sets the pace. A closed loop sends more requests to the faster device, and so compares
//! a busy device with a less busy one.

use anyhow::Result;

use super::{COLUMNS, Measured, NAMES, Sides, jobs};
use crate::job::Job;
use crate::results::{Claim, Promise, Study, Table};
use crate::stats::{median, ratios};

/// Shares of the backing device's own rate, in percent.
const SHARES: [u32; 3] = [25, 50, 75];
/// How the title of the table begins.
pub const EQUAL_RATES: &str = "equal rates";
/// Place of p99.9 among the columns.
const P999: usize = 4;
/// The largest p99.9 through udm, as a share of the backing device's, at half of its rate.
const HALF_AT_MOST: f64 = 0.6;
/// The same at its other rates.
const OTHER_AT_MOST: f64 = 0.8;

/// The load `job` at shares of the backing device's own rate, which `alone` has for each number of
/// jobs.
pub fn run(
    study: &mut Study,
    sides: &Sides,
    job: &Job,
    alone: &[(u32, f64)],
    repeats: usize,
) -> Result<()> {
    let way = sides.way();
    let mut table = Table::new(format!("{EQUAL_RATES}, {way}"), &COLUMNS);
    for (numjobs, iops) in alone {
        let mut rows: Vec<[Measured; 2]> = SHARES.iter().map(|_| Default::default()).collect();
        for repeat in 0..repeats {
            for (share, row) in SHARES.iter().zip(&mut rows) {
                let rate = (iops * f64::from(*share) / 100.0).max(1.0) as u32;
                let randseed = job.randseed + repeat as u64;
                let job = Job { numjobs: *numjobs, rate, randseed, ..job.clone() };
                for (side, measured) in row.iter_mut().enumerate() {
                    sides.measure(side, &job, measured)?;
                }
            }
        }
        for (share, row) in SHARES.iter().zip(&rows) {
            let name = format!("{}, {share} %", jobs(*numjobs));
            for (side, measured) in NAMES.iter().zip(row) {
                table.row(format!("{name}, {side}"), &measured.medians());
            }
            let [alone, cached] = row;
            let p999 = ratios(&cached.values[P999], &alone.values[P999]);
            let bound = if *share == 50 { HALF_AT_MOST } else { OTHER_AT_MOST };
            let what = format!("{way}, {name} of the backing's rate: p99.9, cached / alone");
            study.claims.push(Claim::new(what, &p999, Some(Promise::AtMost(bound))));
            let rates = ratios(&cached.values[0], &alone.values[0]);
            if median(&rates) < 0.98 {
                study.notes.push(format!("{name}: udm did not reach the rate."));
            }
        }
    }
    study.tables.push(table);
    Ok(())
}
