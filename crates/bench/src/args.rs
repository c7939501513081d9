//! The arguments of `udm-bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use udm::disk::IoMode;

use crate::job::{Job, Rw};

/// The studies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum StudyName {
    /// Which instructions copy fastest, and which udm uses: sizes from 64 B to 1 MiB
    Copy,
    /// 4 KiB random writes, 1 and 8 jobs: the backing device alone, and with a cache
    Randwrite,
    /// Any job, in fio's terms: the backing device alone, and with a cache
    Job,
    /// Write, FUA write, flush, read hit, read miss: percentiles, in process and over NBD
    Latency,
    /// Bursts into a full and into an empty cache, and writes without pause: rates over time
    Steady,
    /// More threads, a fuller cache, more dirty data, larger requests
    Scaling,
    /// A 4 KiB write in process, compared with a bare durable copy of the same bytes
    Write,
    /// 4 KiB requests over a Unix socket, compared with nbdkit's memory plugin
    Nbd,
    /// The ways to one device: in process, vhost-user with and without polling, NBD
    Exports,
    /// Write-back to the backing device, compared with the speed of fio there
    Writeback,
    /// How long attaching takes, by the number of keys in the log, or of entries
    Recovery,
    /// Memory per cached block, and bytes written to the cache device per byte
    Footprint,
    /// The writecache target: mode p by block size and instruction, mode s next to fio
    Writecache,
    /// A block device and a file, past the page cache and through it, cold and warm
    Pagecache,
    /// The modes of I/O: alone, four writers, next to readers, next to another mode
    Iomodes,
    /// Hit ratios by cache size, compared with policies of the literature and with the optimum
    Hitratio,
    /// The target cache: bytes after a change of the hot set until most of it is hit, and the same
    /// for the kernel's smq
    Adapt,
    /// The target cache over a slow disk: the published study's loads, hits, write-back, opening
    Dmcache,
    /// All of them but `job`
    All,
}

impl StudyName {
    /// As it is typed.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether it measures whichever target `--target` says.
    pub fn takes_target(self) -> bool {
        use StudyName::{Footprint, Job, Latency, Randwrite, Recovery, Steady, Writeback};
        matches!(self, Randwrite | Job | Latency | Steady | Writeback | Recovery | Footprint)
    }

    /// The studies that were asked for, each once.
    pub fn expand(asked: &[StudyName]) -> Vec<StudyName> {
        let mut studies = Vec::new();
        for name in asked {
            let is_of_all = |study: &StudyName| {
                use StudyName::{All, Job};
                !matches!(study, All | Job)
            };
            let names: Vec<StudyName> = match name {
                StudyName::All => {
                    StudyName::value_variants().iter().copied().filter(is_of_all).collect()
                }
                one => vec![*one],
            };
            for name in names {
                if !studies.contains(&name) {
                    studies.push(name);
                }
            }
        }
        studies
    }
}

/// The targets that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TargetName {
    /// pcache, on memory
    Pcache,
    /// writecache in mode p, on memory
    WritecacheP,
    /// writecache in mode s, on a disk
    WritecacheS,
}

impl TargetName {
    /// As it is typed.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Ways to a file, as `?io=` has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoName {
    /// Past the page cache
    Direct,
    /// Through the page cache
    Buffered,
    /// Through the page cache, which drops the data right after
    Dontcache,
    /// Through the page cache, written out early and at a steady pace
    Lazy,
    /// All of them
    All,
}

impl IoName {
    /// The modes that were asked for, each once, with their names.
    pub fn expand(asked: &[IoName]) -> Vec<(&'static str, IoMode)> {
        let all = [
            (IoName::Direct, "direct", IoMode::Direct),
            (IoName::Buffered, "buffered", IoMode::Buffered),
            (IoName::Dontcache, "dontcache", IoMode::DontCache),
            (IoName::Lazy, "lazy", IoMode::Lazy),
        ];
        let is_asked = |name: &IoName| asked.contains(name) || asked.contains(&IoName::All);
        all.into_iter().filter(|(io, ..)| is_asked(io)).map(|(_, name, io)| (name, io)).collect()
    }
}

/// Measure udm on this machine, compared with other software
#[derive(Debug, Parser)]
#[command(name = "udm-bench", version, max_term_width = 100)]
pub struct Cli {
    /// The arguments.
    #[command(flatten)]
    pub args: BenchArgs,
}

/// Commands of `udm-bench` that do not measure.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Compare two runs: what --json wrote, or reports
    Compare(CompareArgs),
    /// Print the manual page
    Man,
}

/// Arguments of `udm-bench compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The first run: what --json wrote, or a report
    pub before: PathBuf,
    /// The second one
    pub after: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// Add the comparison to the HTML report in FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
}

/// Arguments of `udm-bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --path, files are made in the folder for temporary files, and removed afterwards. A file or
device that exists is used only with --overwrite. Ratios within one run are what to compare; each
study says whether the machine was too noisy to trust its absolute numbers.

Examples:
  udm-bench randwrite --path /data/test.img     a summary in two screens
  udm-bench latency --target writecache-p
  udm-bench copy --cache /dev/dax0.0            measures, leaves the content alone
  udm-bench iomodes --path /data                what ?io= means there
  udm-bench pagecache --device /dev/nvme1n1     reads of it; --destroy for writes
  udm-bench exports                               the cost of each export of a device
  udm-bench hitratio --trace OLTP.lis.zst
  udm-bench hitratio --blocks 32K,256K,1M --trace OLTP.lis.zst
  udm-bench job --rw randrw --bs 8k --iodepth 4 --numjobs 2 --runtime 10
  udm-bench all --small --report report.html --json=results.json
  udm-bench --from results.json --markdown numbers.md
  udm-bench compare before.json after.json      what has changed between two runs")]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct BenchArgs {
    /// Instead of measuring
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// What to measure
    #[arg(required_unless_present = "from", value_enum, hide_possible_values = false)]
    pub studies: Vec<StudyName>,
    /// The backing device to put a cache before: a file to be made, or a folder to make it in
    #[arg(long, value_name = "PATH")]
    pub path: Option<PathBuf>,
    /// randwrite, job, latency, steady, writeback, recovery, footprint: the target to measure
    #[arg(long, value_enum, default_value = "pcache")]
    pub target: TargetName,
    /// The cache device; without it, a file in /dev/shm, or next to --path's file for mode s
    #[arg(long, value_name = "PATH")]
    pub cache: Option<PathBuf>,
    /// Bytes of the caches that are made; without it, 512 MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub cache_size: Option<u64>,
    /// Overwrite what --path and --cache name, if it exists
    #[arg(long)]
    pub overwrite: bool,
    /// pagecache: a block device, which is only read without --destroy; without --device, root gets
    /// a loop device
    #[arg(long, value_name = "PATH")]
    pub device: Option<PathBuf>,
    /// pagecache: allow writes to --device, which destroy its data
    #[arg(long, requires = "device")]
    pub destroy: bool,
    /// Let writers wait when this percentage of memory is dirty (vm.dirty_ratio, for root; half of
    /// it for vm.dirty_background_ratio), until the run has ended
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub dirty_ratio: Option<u32>,
    /// writeback, randwrite: pcache and writecache over a file that is reached in these ways
    #[arg(long, value_name = "MODE,...", value_delimiter = ',', value_enum)]
    pub io: Vec<IoName>,
    /// copy: let later servers on this machine use the result
    #[arg(long)]
    pub remember: bool,
    /// Flamegraphs of each case, of the program and the kernel (perf events)
    #[arg(long)]
    pub flame: bool,
    /// hitratio: a trace to replay: .csv (op, size, lbn), .lis, or 32-bit block numbers; also .zst
    /// and .xz; may be said more than once. Without one, requests are made up
    #[arg(long, value_name = "FILE")]
    pub trace: Vec<PathBuf>,
    /// hitratio: sizes of the cache, in blocks of 4 KiB
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u64).range(32..=1 << 24))]
    pub cache_blocks: Vec<u64>,
    /// hitratio: the policies of the target `cache`, with blocks of these sizes, on paper
    /// and served
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_block)]
    pub blocks: Vec<u64>,
    /// Less of everything: seconds instead of minutes
    #[arg(long)]
    pub small: bool,
    /// How often each measure is repeated; medians are shown
    #[arg(long, alias = "rounds", value_name = "N")]
    pub repeats: Option<usize>,
    /// Print JSON instead of text, or also write it to FILE
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "-")]
    pub json: Option<PathBuf>,
    /// Add a page for each study to the HTML report in FILE
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Write the main numbers to FILE, as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write the main numbers to FILE, as JSON, which --from takes
    #[arg(long, value_name = "FILE")]
    pub numbers: Option<PathBuf>,
    /// Show the results in FILE (written with --json or --numbers) instead of measuring
    #[arg(long, value_name = "FILE", conflicts_with = "studies")]
    pub from: Option<PathBuf>,
    /// Exit with 1 if a promise is broken
    #[arg(long)]
    pub check: bool,
    /// The load
    #[command(flatten)]
    pub job: JobArgs,
}

/// The load, in fio's terms. The study chooses missing values.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Load, in fio's terms")]
pub struct JobArgs {
    /// The operations of the load
    #[arg(long, value_enum)]
    pub rw: Option<Rw>,
    /// Bytes of a request: 4k, 1m
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub bs: Option<u64>,
    /// Requests in flight, for each job
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub iodepth: Option<u32>,
    /// Jobs at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=128))]
    pub numjobs: Option<u32>,
    /// Bytes of the device that are used
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub size: Option<u64>,
    /// A measure ends after this many bytes
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub io_size: Option<u64>,
    /// A measure ends after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub runtime: Option<Duration>,
    /// Seconds of load before each measure
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub ramp_time: Option<Duration>,
    /// Requests per second, of all jobs together, instead of as many as possible; with --iodepth 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// Percent of reads in a mixed load
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=100))]
    pub rwmixread: Option<u32>,
    /// Seed of all randomness
    #[arg(long, value_name = "N")]
    pub randseed: Option<u64>,
}

impl JobArgs {
    /// `job`, changed as was asked for.
    pub fn apply(&self, job: Job) -> Job {
        Job {
            rw: self.rw.unwrap_or(job.rw),
            bs: self.bs.unwrap_or(job.bs),
            iodepth: self.iodepth.unwrap_or(job.iodepth),
            numjobs: self.numjobs.unwrap_or(job.numjobs),
            size: self.size.unwrap_or(job.size),
            io_size: self.io_size.unwrap_or(job.io_size),
            runtime: self.runtime.unwrap_or(job.runtime),
            ramp_time: self.ramp_time.unwrap_or(job.ramp_time),
            rate: self.rate.unwrap_or(job.rate),
            rwmixread: self.rwmixread.unwrap_or(job.rwmixread),
            randseed: self.randseed.unwrap_or(job.randseed),
            ..job
        }
    }
}

/// Sizes as fio takes them: powers of 1024.
fn parse_size(text: &str) -> Result<u64, String> {
    let lower = text.to_ascii_lowercase();
    let lower = lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower);
    let (digits, shift) = match lower.chars().last() {
        Some('k') => (&lower[..lower.len() - 1], 10),
        Some('m') => (&lower[..lower.len() - 1], 20),
        Some('g') => (&lower[..lower.len() - 1], 30),
        Some('t') => (&lower[..lower.len() - 1], 40),
        _ => (lower, 0),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is not a size; try 4k or 1m"))?;
    let bytes = number.checked_mul(1 << shift).ok_or("too large")?;
    match bytes > 0 && bytes.is_multiple_of(udm::units::SECTOR) {
        true => Ok(bytes),
        false => Err("a size is a multiple of 512".into()),
    }
}

/// The size of a block of the target `cache`.
fn parse_block(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    match bytes % (32 << 10) == 0 && bytes <= 1 << 30 {
        true => Ok(bytes),
        false => Err("blocks are multiples of 32 KiB, at most 1 GiB".to_owned()),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let text = text.strip_suffix('s').unwrap_or(text);
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_fios() {
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("1M"), Ok(1 << 20));
        assert_eq!(parse_size("2GiB"), Ok(2 << 30));
        assert_eq!(parse_size("512"), Ok(512));
        for wrong in ["", "k", "0", "100", "4x", "99999999999t"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_seconds("0.5s"), Ok(Duration::from_millis(500)));
        assert!(parse_seconds("-1").is_err());
    }

    #[test]
    fn modes_are_those_that_were_asked_for() {
        let names = |asked: &[IoName]| -> Vec<&str> {
            IoName::expand(asked).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(
            names(&[IoName::All, IoName::Lazy]),
            ["direct", "buffered", "dontcache", "lazy"]
        );
        assert_eq!(names(&[IoName::Lazy, IoName::Direct, IoName::Lazy]), ["direct", "lazy"]);
        assert!(names(&[]).is_empty());
    }

    #[test]
    fn all_means_each_study_once() {
        let all = StudyName::expand(&[StudyName::Copy, StudyName::All, StudyName::Copy]);
        let apart = [StudyName::All, StudyName::Job];
        for study in StudyName::value_variants() {
            let times = all.iter().filter(|name| *name == study).count();
            assert_eq!(times, usize::from(!apart.contains(study)), "{study:?}");
        }
        assert_eq!(StudyName::expand(&[StudyName::Job]), [StudyName::Job]);
    }
}
