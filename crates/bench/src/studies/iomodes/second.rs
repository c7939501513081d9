//! A second opinion: fio itself runs some of the same clients, in the same run. If its rate
//! differs, the page reports the difference.

use std::collections::BTreeMap;

use anyhow::Result;
use udm::disk::IoMode;

use super::parallel::{Client, Outcome};
use super::{BUFFERED, MODES, Row};
use crate::fio::{self, Section};
use crate::results::{Study, Table};
use crate::stats::median;
use crate::unit::Unit;

/// fio and we should agree within this factor.
const AGREE_WITHIN: f64 = 1.10;
/// Place of direct I/O in the list of modes. fio knows this and buffered.
const DIRECT: usize = 2;

/// What fio reached, table by table.
#[derive(Debug, Default)]
pub struct Checked {
    /// By table and row: our rate, fio's, the clients' kind.
    cells: BTreeMap<String, (f64, f64)>,
    /// Why fio was not asked.
    trouble: Option<String>,
}

impl Checked {
    /// Lets fio play two rows of the table `title`, as often as they were played.
    pub fn check(&mut self, title: &str, rows: &[Row]) {
        for nth in [BUFFERED, DIRECT] {
            let row = &rows[nth];
            if row.outcomes.is_empty() || self.trouble.is_some() {
                continue;
            }
            let is_writer = row.outcomes[0].clients.iter().any(|client| client.is_writer);
            let ours = row.median(|outcome: &Outcome| outcome.rate(is_writer));
            let theirs: Result<Vec<f64>> =
                row.outcomes.iter().map(|_| rate_of_fio(&row.clients, is_writer)).collect();
            match theirs {
                Ok(theirs) => {
                    let name = format!("{title}: {}", MODES[nth].0);
                    self.cells.insert(name, (ours, median(&theirs)));
                }
                Err(error) => self.trouble = Some(format!("{error:#}")),
            }
        }
    }

    /// Its table, and the disagreements.
    pub fn show(self, study: &mut Study) {
        if let Some(why) = self.trouble {
            study.notes.push(format!("fio did not check the rates: {why}"));
        }
        let columns =
            [("MB/s", Unit::MbPerSecond), ("fio's", Unit::MbPerSecond), ("ratio", Unit::Ratio)];
        let mut table = Table::new("The same loads, by fio", &columns);
        let mut apart = Vec::new();
        for (name, (ours, theirs)) in self.cells {
            let ratio = ours / theirs;
            let agrees = (1.0 / AGREE_WITHIN..=AGREE_WITHIN).contains(&ratio);
            let row = table.row(name.clone(), &[ours, theirs, ratio]);
            if !agrees {
                row.marked.push(2);
                apart.push(name);
            }
        }
        if !apart.is_empty() {
            study.notes.push(format!(
                "fio does not agree within 10 % about these rates, so do not trust them more than \
                 the table above says: {}.",
                apart.join("; ")
            ));
        }
        if !table.rows.is_empty() {
            study.tables.push(table);
        }
    }
}

/// What fio's writers reach with the same clients, or its readers.
fn rate_of_fio(clients: &[Client], is_writer: bool) -> Result<f64> {
    let sections: Vec<Section> = clients
        .iter()
        .map(|client| Section {
            path: client.path.clone(),
            is_direct: client.io == IoMode::Direct,
            job: client.job.clone(),
        })
        .collect();
    let (writes, reads) = fio::rates_of_files(&sections)?;
    Ok(if is_writer { writes } else { reads })
}
