//! The target `cache` in front of a slow disk: the loads of a study that was published for
//! dm-cache, in process, and the numbers that udm promises of hits, of write-back and of opening.
//!
//! The slow disk is a model in memory (`slow`), so that its times are the same on any machine; the
//! fast one is a file, and everything is compared with that file alone.

mod numbers;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use udm::cache::Devices;
use udm::cache::{Cache, OpenOptions, TableArgs};
use udm::device::{Device, LoadedTable};
use udm::disk::Disk;
use udm::queue::Queue;
use udm::table::Word;
use udm::target::{FactValue, Target};
use udm::units::{KIB, MIB, SECTOR};

use crate::job::{Job, Rw};
use crate::load;
use crate::results::{Claim, Plot, Promise, Study, Table};
use crate::rig::{Setup, linear_device, open_disk, settle, write_out};
use crate::slow::SlowDisk;
use crate::stats::{median, ratios};
use crate::unit::Unit;

/// Bytes of a block.
const BLOCK_BYTES: u64 = 256 * KIB;
/// Bytes of the metadata device.
const METADATA_BYTES: u64 = 16 * MIB;
const JOBS: u32 = 4;
const DEPTHS: [u32; 2] = [1, 16];
/// The published study's loads, and percent of reads of the last one.
const LOADS: [(&str, Rw); 3] =
    [("randread", Rw::Randread), ("randwrite", Rw::Randwrite), ("randrw 75/25", Rw::Randrw)];
const READS: u32 = 75;

/// Contenders, in the order in which they take turns.
const CONTENDERS: [&str; 3] = ["origin alone", "through cache", "fast device alone"];
const ORIGIN: usize = 0;
const CACHE: usize = 1;
const FAST: usize = 2;

/// A cache whose fast device has all that is asked for, and its devices alone.
struct Rig {
    cache: Arc<Cache>,
    slow: Arc<SlowDisk>,
    /// By contender.
    devices: [Arc<Device>; 3],
    /// The cached bytes; after them, the origin has as many bytes that are not cached.
    area: u64,
    _background: Queue,
}

impl Rig {
    /// Of a fast device and metadata in files.
    fn new(setup: &Setup, area: u64) -> Result<Rig> {
        let file = |name: &str, bytes: u64| -> Result<PathBuf> {
            let path = setup.places.disk.file(name, bytes)?;
            write_out(&path, bytes)?;
            Ok(path)
        };
        let fast = open_disk(&file("dmcache-fast", area + area / 4)?)?;
        let metadata = open_disk(&setup.places.disk.file("dmcache-metadata", METADATA_BYTES)?)?;
        Rig::over(Arc::new(metadata), Arc::new(fast), area)
    }

    /// Of these devices.
    fn over(metadata: Arc<dyn Disk>, fast: Arc<dyn Disk>, area: u64) -> Result<Rig> {
        let slow = SlowDisk::new(2 * area)?;
        let words = format!("M C O {} 2 metadata2 writeback smq 0", BLOCK_BYTES / SECTOR);
        let devices = Devices { metadata, cache: fast.clone(), origin: slow.clone() };
        let options = OpenOptions { force_format: true, ..OpenOptions::default() };
        let args = TableArgs::parse(&Word::list(&words))?;
        let cache = Arc::new(Cache::open(args, 2 * area, devices, options)?);
        let device = Device::with_table("dmcache", LoadedTable::single(cache.clone(), 2 * area))?;
        let background = Queue::background("udm-background", &device)?;
        let devices = [linear_device(slow.clone())?, device, linear_device(fast)?];
        let rig = Rig { cache, slow, devices, area, _background: background };
        rig.warm()?;
        Ok(rig)
    }

    /// Brings the area into the cache: whole blocks that are written enter by themselves. Then all
    /// is written back, while the origin is fast.
    fn warm(&self) -> Result<()> {
        self.slow.set_slow(false);
        let job = Job {
            rw: Rw::Write,
            bs: BLOCK_BYTES,
            iodepth: 8,
            size: self.area,
            io_size: self.area,
            runtime: Duration::from_secs(600),
            ..Job::default()
        };
        load::run(&self.devices[CACHE], &job)?;
        settle(&self.devices[CACHE])?;
        let cached = self.fact("cached_bytes")?;
        let (has, area) = (cached / MIB, self.area / MIB);
        ensure!(has >= area - area / 50, "the cache has {has} MiB of {area}");
        Ok(())
    }

    fn fact(&self, name: &str) -> Result<u64> {
        let fact = self.cache.facts().into_iter().find(|fact| fact.name == name);
        match fact.map(|fact| fact.value) {
            Some(FactValue::Number(number)) => Ok(number),
            _ => anyhow::bail!("a cache lacks the number {name}"),
        }
    }
}

/// The whole study.
pub fn run(setup: &Setup) -> Result<Study> {
    let repeats = setup.repeats(1, 3);
    let area = setup.asked().size.unwrap_or(setup.choose(64 * MIB, 512 * MIB));
    let area = area.next_multiple_of(BLOCK_BYTES * 8);
    let mut study = Study::new(
        "dmcache",
        "the target cache in front of a slow disk, compared with each of its devices alone",
        "Four jobs in process, 4 KiB at random, through a warm writeback cache with blocks of 256 \
         KiB, on its origin alone, and on its fast device alone, in turns. The origin is a disk \
         with an arm, in memory, as `delay` with `?seek=disk` has it; the fast device and the \
         metadata are files. What comes before a load is counted is half as long: the first \
         write to a clean block waits until the medium says that it is dirty. The published \
         study had four files of 512 MiB on a file system.",
    );
    let rig = Rig::new(setup, area)?;
    study.fact("area", format!("{} in the cache", Unit::Bytes.text(area as f64)));
    study.fact("repeats", repeats.to_string());
    loads(setup, &rig, repeats, &mut study)?;
    numbers::add(setup, &rig, &mut study)?;
    Ok(study)
}

/// The published study's loads.
fn loads(setup: &Setup, rig: &Rig, repeats: usize, study: &mut Study) -> Result<()> {
    let runtime = setup.choose(Duration::from_millis(300), Duration::from_secs(1));
    let columns = [
        (CONTENDERS[ORIGIN], Unit::PerSecond),
        (CONTENDERS[CACHE], Unit::PerSecond),
        (CONTENDERS[FAST], Unit::PerSecond),
        ("cache / origin", Unit::Ratio),
        ("cache / fast", Unit::Ratio),
    ];
    let mut table = Table::new("requests per second", &columns);
    let groups: Vec<String> = LOADS
        .iter()
        .flat_map(|(name, _)| DEPTHS.map(|depth| format!("{name}, depth {depth}")))
        .collect();
    let axis = crate::results::Axis::log("requests per second", Unit::PerSecond);
    let names: Vec<&str> = groups.iter().map(String::as_str).collect();
    let mut plot = Plot::bars("Four jobs of 4 KiB requests", &names, axis);
    let mut points: [Vec<(f64, f64)>; 3] = Default::default();
    let kinds = LOADS.iter().flat_map(|(_, rw)| DEPTHS.map(|depth| (*rw, depth)));
    for ((nth, (rw, iodepth)), name) in kinds.enumerate().zip(&groups) {
        let mut rates: [Vec<f64>; 3] = Default::default();
        for repeat in 0..repeats {
            let job = Job { rw, iodepth, numjobs: JOBS, rwmixread: READS, ..Job::default() };
            let job = Job { runtime, io_size: u64::MAX, randseed: repeat as u64 + 1, ..job };
            let job = Job { size: rig.area, ramp_time: runtime / 2, ..setup.job(job) };
            for (device, rates) in rig.devices.iter().zip(&mut rates) {
                rig.slow.set_slow(true);
                rates.push(load::run(device, &job)?.iops());
                rig.slow.set_slow(false);
                settle(&rig.devices[CACHE])?;
            }
        }
        let [origin, cache, fast] = [ORIGIN, CACHE, FAST].map(|who| median(&rates[who]));
        table.row(name.as_str(), &[origin, cache, fast, cache / origin, cache / fast]);
        for (points, rate) in points.iter_mut().zip([origin, cache, fast]) {
            points.push((nth as f64, rate));
        }
        for (who, rates) in CONTENDERS.iter().zip(&rates) {
            study.repeats(format!("{name}, {who}"), Unit::PerSecond, rates);
        }
        let promise = (rw != Rw::Randrw).then_some(Promise::AtLeast(0.8));
        let what = format!("{name}: through cache / fast device alone");
        study.claims.push(Claim::new(what, &ratios(&rates[CACHE], &rates[FAST]), promise));
    }
    for (name, points) in CONTENDERS.iter().zip(points) {
        plot.add(*name, points);
    }
    study.tables.push(table);
    study.plots.push(plot);
    Ok(())
}
