//! A load, described in fio's terms: the same description drives our own generator and fio.

use std::time::Duration;

use clap::ValueEnum;
use udm::units::{GIB, KIB, MIB};

use crate::unit::Unit;

/// The operation of a job, by fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lowercase")]
// fio's own names.
#[allow(clippy::enum_variant_names)]
pub enum Rw {
    /// Sequential reads
    Read,
    /// Sequential writes
    Write,
    /// Random reads
    Randread,
    /// Random writes
    Randwrite,
    /// Sequential reads and writes
    Rw,
    /// Random reads and writes
    Randrw,
}

impl Rw {
    /// As fio calls it.
    pub fn name(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::Randread => "randread",
            Rw::Randwrite => "randwrite",
            Rw::Rw => "rw",
            Rw::Randrw => "randrw",
        }
    }

    /// Whether places are random.
    pub fn is_random(self) -> bool {
        matches!(self, Rw::Randread | Rw::Randwrite | Rw::Randrw)
    }

    /// Percent of reads.
    pub fn read_percent(self, rwmixread: u32) -> u32 {
        match self {
            Rw::Read | Rw::Randread => 100,
            Rw::Write | Rw::Randwrite => 0,
            Rw::Rw | Rw::Randrw => rwmixread,
        }
    }
}

/// A load.
#[derive(Clone, Debug)]
pub struct Job {
    /// The operation.
    pub rw: Rw,
    /// Bytes of a request.
    pub bs: u64,
    /// Requests in flight, for each job.
    pub iodepth: u32,
    /// Jobs at the same time.
    pub numjobs: u32,
    /// Bytes of the device that are used.
    pub size: u64,
    /// Where they begin.
    pub offset: u64,
    /// It ends after this many bytes, of all jobs together.
    pub io_size: u64,
    /// It ends after this long.
    pub runtime: Duration,
    /// Load before, that is not counted.
    pub ramp_time: Duration,
    /// Percent of reads in a mixed load.
    pub rwmixread: u32,
    /// Seed of all randomness.
    pub randseed: u64,
    /// Whether writes are complete only when durable.
    pub fua: bool,
    /// A flush after each run of this many writes; 0: none.
    pub fsync: u32,
    /// Requests per second, of all jobs together; 0: as many as possible. It needs one request in
    /// flight for each job.
    pub rate: u32,
    /// Requests are counted over time in slices of this length.
    pub slice: Duration,
}

impl Default for Job {
    fn default() -> Job {
        Job {
            rw: Rw::Randwrite,
            bs: 4 * KIB,
            iodepth: 1,
            numjobs: 1,
            size: GIB,
            offset: 0,
            io_size: 192 * MIB,
            runtime: Duration::from_secs(2),
            ramp_time: Duration::ZERO,
            rwmixread: 50,
            randseed: 1,
            fua: false,
            fsync: 0,
            rate: 0,
            slice: Duration::from_millis(50),
        }
    }
}

impl Job {
    /// As a line of fio's terms.
    pub fn text(&self) -> String {
        let mut text = format!(
            "rw={} bs={} iodepth={} numjobs={} size={} io_size={} runtime={}s randseed={}",
            self.rw.name(),
            Unit::Bytes.text(self.bs as f64).replace(' ', ""),
            self.iodepth,
            self.numjobs,
            Unit::Bytes.text(self.size as f64).replace(' ', ""),
            Unit::Bytes.text(self.io_size as f64).replace(' ', ""),
            self.runtime.as_secs_f64(),
            self.randseed
        );
        if matches!(self.rw, Rw::Rw | Rw::Randrw) {
            text += &format!(" rwmixread={}", self.rwmixread);
        }
        if !self.ramp_time.is_zero() {
            text += &format!(" ramp_time={}s", self.ramp_time.as_secs_f64());
        }
        if self.fsync > 0 {
            text += &format!(" fsync={}", self.fsync);
        }
        if self.rate > 0 {
            text += &format!(" rate={}/s", self.rate);
        }
        text
    }

    /// fio's arguments, without the arguments for files and devices.
    pub fn fio_arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            format!("--rw={}", self.rw.name()),
            format!("--bs={}", self.bs),
            format!("--iodepth={}", self.iodepth),
            format!("--numjobs={}", self.numjobs),
            format!("--size={}", self.size),
            format!("--offset={}", self.offset),
            format!("--io_size={}", (self.io_size / u64::from(self.numjobs)).max(self.bs)),
            format!("--runtime={}ms", self.runtime.as_millis().max(1)),
            format!("--rwmixread={}", self.rwmixread),
            format!("--randseed={}", self.randseed),
            "--norandommap=1".into(),
            "--group_reporting=1".into(),
        ];
        if !self.ramp_time.is_zero() {
            arguments.push(format!("--ramp_time={}ms", self.ramp_time.as_millis()));
        }
        if self.fsync > 0 {
            arguments.push(format!("--fsync={}", self.fsync));
        }
        if self.rate > 0 {
            arguments.push(format!("--rate_iops={}", (self.rate / self.numjobs).max(1)));
        }
        arguments
    }
}
