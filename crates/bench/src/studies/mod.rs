//! The studies, one file each. A study takes a [`Setup`] and returns a [`Study`]; to add one, add
//! its file, its name in `args`, and its line here.

mod adapt;
mod attach;
mod compare;
mod copy;
mod dmcache;
mod exports;
mod footprint;
mod hitratio;
mod iomodes;
mod latency;
mod modes;
mod nbd;
mod pagecache;
mod pcache_write;
mod recovery;
mod scaling;
mod steady;
mod writeback;
mod writecache;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::args::{StudyName, TargetName};
use crate::results::Study;
use crate::rig::Setup;

/// What `all` stands for, in its order, by name.
pub const STUDIES_OF_ALL: [&str; 17] = [
    "copy",
    "randwrite",
    "latency",
    "steady",
    "scaling",
    "write",
    "nbd",
    "exports",
    "writeback",
    "recovery",
    "footprint",
    "writecache",
    "pagecache",
    "iomodes",
    "hitratio",
    "adapt",
    "dmcache",
];

pub use compare::EQUAL_RATES;
pub use hitratio::DIFFERENCES;

/// Runs one study.
pub fn run(name: StudyName, setup: &Setup) -> Result<Study> {
    if setup.target != TargetName::Pcache && !name.takes_target() {
        let takes_target = |name: &&StudyName| name.takes_target();
        let names: Vec<String> = StudyName::value_variants()
            .iter()
            .filter(takes_target)
            .map(|name| name.name())
            .collect();
        bail!("it takes no --target, as {} do", names.join(", "));
    }
    if !setup.io().is_empty() {
        return match name {
            StudyName::Writeback => modes::writeback(setup),
            StudyName::Randwrite => modes::randwrite(setup),
            _ => bail!("it takes no --io, as writeback and randwrite do"),
        };
    }
    match name {
        StudyName::Copy => copy::run(setup),
        StudyName::Randwrite => compare::randwrite(setup),
        StudyName::Job => compare::job(setup),
        StudyName::Latency => latency::run(setup),
        StudyName::Steady => steady::run(setup),
        StudyName::Scaling => scaling::run(setup),
        StudyName::Write => pcache_write::run(setup),
        StudyName::Nbd => nbd::run(setup),
        StudyName::Exports => exports::run(setup),
        StudyName::Writeback => writeback::run(setup),
        StudyName::Recovery if setup.target == TargetName::Pcache => recovery::run(setup),
        StudyName::Recovery => attach::run(setup),
        StudyName::Footprint => footprint::run(setup),
        StudyName::Writecache => writecache::run(setup),
        StudyName::Pagecache => pagecache::run(setup),
        StudyName::Iomodes => iomodes::run(setup),
        StudyName::Hitratio => hitratio::run(setup),
        StudyName::Adapt => adapt::run(setup),
        StudyName::Dmcache => dmcache::run(setup),
        StudyName::All => bail!("'all' is not a single study"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_told_in_its_order() {
        let names: Vec<String> =
            StudyName::expand(&[StudyName::All]).into_iter().map(StudyName::name).collect();
        assert_eq!(names, STUDIES_OF_ALL);
    }
}
