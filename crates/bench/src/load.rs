//! The load generator: a [`Job`] on a device, in process, with one thread for each of its jobs.
//!
//! The clock is read once for each request: its time is what passed since the one before at depth
//! 1, and since it was submitted otherwise. Reading takes tens of nanoseconds, which are included.
//! In a load with a rate, the time of a request that is late, because the one before it was slow,
//! begins when it was due. So a stall counts for all requests that it delays.

use std::sync::{Arc, Barrier, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::device::Device;
use udm::local::Local;
use udm::prng::Prng;

use crate::job::{Job, Rw};
use crate::rig::settle;
use crate::stats::Histogram;
use crate::timeline::Timeline;
use crate::unit::Unit;
use crate::{cpu, flame};

/// The result of a load.
#[derive(Clone, Debug)]
pub struct Reached {
    /// Times of reads.
    pub reads: Histogram,
    /// Times of writes.
    pub writes: Histogram,
    /// Seconds from the first request that counts to the last.
    pub seconds: f64,
    /// Requests over time, from the very first, whether they count or not.
    pub timeline: Timeline,
    /// Requests that count, of each job.
    pub by_job: Vec<u64>,
    /// Processor time of the jobs' threads, in nanoseconds.
    pub cpu_nanos: f64,
}

impl Reached {
    fn new(slice: Duration) -> Reached {
        Reached {
            reads: Histogram::default(),
            writes: Histogram::default(),
            seconds: 0.0,
            timeline: Timeline::new(slice),
            by_job: Vec::new(),
            cpu_nanos: 0.0,
        }
    }

    fn merge(&mut self, other: &Reached) {
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
        self.timeline.merge(&other.timeline);
        self.by_job.extend(&other.by_job);
        self.cpu_nanos += other.cpu_nanos;
    }

    /// How many requests count.
    pub fn count(&self) -> u64 {
        self.reads.count() + self.writes.count()
    }

    /// The spread of the jobs: requests of the fastest job divided by requests of the slowest job.
    pub fn unfairness(&self) -> f64 {
        let most = self.by_job.iter().copied().max().unwrap_or(0);
        let least = self.by_job.iter().copied().min().unwrap_or(0);
        most as f64 / least.max(1) as f64
    }

    /// Times of all requests.
    pub fn all(&self) -> Histogram {
        let mut all = self.reads.clone();
        all.merge(&self.writes);
        all
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.count() as f64 / self.seconds.max(1e-9)
    }
}

/// The requests of a load with a rate.
struct Pace {
    /// When the next one is due.
    due: Instant,
    interval: Duration,
    /// How late the thread woke up for the last one that was not late itself. No request's time
    /// includes that.
    overslept: Duration,
}

impl Pace {
    /// Waits until the next request is due. Returns when its time begins.
    fn wait(&mut self, now: Instant) -> Instant {
        let due = self.due;
        self.due += self.interval;
        if due <= now {
            return now.min(due + self.overslept);
        }
        std::thread::sleep(due - now);
        let woken = Instant::now();
        self.overslept = woken.saturating_duration_since(due);
        woken
    }
}

/// One job's part of a load.
struct Worker<'a> {
    job: &'a Job,
    /// Its number among the jobs.
    nth: u32,
    local: Local,
    prng: Prng,
    /// Blocks of the device, and the next one of a sequential job.
    blocks: u64,
    next: u64,
    spare: Vec<Buffer>,
    /// When each request in flight was submitted.
    submitted: Vec<Instant>,
    unflushed: u32,
    pace: Option<Pace>,
    reached: Reached,
}

/// Runs `job` on `device`, whose background work is done elsewhere.
pub fn run(device: &Arc<Device>, job: &Job) -> Result<Reached> {
    let size = job.size.min(device.size_bytes().saturating_sub(job.offset));
    ensure!(size / job.bs > 0, "size={size} holds no request of bs={}", job.bs);
    ensure!(job.rate == 0 || job.iodepth == 1, "--rate needs --iodepth 1");
    let _case = flame::case_if_unnamed(|| {
        let Job { rw, bs, iodepth, numjobs, .. } = job;
        let bs = Unit::Bytes.text(*bs as f64);
        format!("{}: {}, {bs}, depth {iodepth}, {numjobs} jobs", device.name(), rw.name())
    });
    let gate = Barrier::new(job.numjobs as usize);
    let begun = OnceLock::new();
    let parts: Vec<Result<(Reached, Instant, Instant)>> = std::thread::scope(|scope| {
        let spawn = |nth: u32| {
            let (gate, begun) = (&gate, &begun);
            scope.spawn(move || {
                let worker = Worker::new(device, job, nth, size / job.bs);
                gate.wait();
                worker?.work(*begun.get_or_init(Instant::now))
            })
        };
        let threads: Vec<_> = (0..job.numjobs).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("no worker panics")).collect()
    });
    let mut reached = Reached::new(job.slice);
    let (mut first, mut last) = (None, None);
    for part in parts {
        let (one, start, end) = part?;
        reached.merge(&one);
        first = Some(first.map_or(start, |first: Instant| first.min(start)));
        last = Some(last.map_or(end, |last: Instant| last.max(end)));
    }
    if let (Some(first), Some(last)) = (first, last) {
        reached.seconds = last.saturating_duration_since(first).as_secs_f64();
    }
    Ok(reached)
}

impl Worker<'_> {
    fn new<'a>(device: &Arc<Device>, job: &'a Job, nth: u32, blocks: u64) -> Result<Worker<'a>> {
        let mut prng = Prng::new(job.randseed.wrapping_mul(1000) + u64::from(nth));
        let fresh = |_| {
            let mut buffer = Buffer::zeroed(job.bs as usize);
            prng.fill(buffer.as_mut_slice());
            buffer
        };
        let spare = (0..job.iodepth).map(fresh).collect();
        Ok(Worker {
            job,
            nth,
            local: Local::new(device)?,
            prng,
            blocks,
            next: blocks / u64::from(job.numjobs) * u64::from(nth),
            spare,
            submitted: vec![Instant::now(); job.iodepth as usize],
            unflushed: 0,
            pace: None,
            reached: Reached::new(job.slice),
        })
    }

    /// Works until the time or the bytes are used up; from when to when it counted. All workers
    /// have begun at the same moment.
    fn work(mut self, begun: Instant) -> Result<(Reached, Instant, Instant)> {
        let counts_from = begun + self.job.ramp_time;
        let until = counts_from + self.job.runtime;
        let cpu_before = cpu::of_thread();
        self.reached.timeline.begin(begun, until - begun);
        let mut left = (self.job.io_size / u64::from(self.job.numjobs) / self.job.bs).max(1);
        let (mut first, mut now) = (begun, Instant::now());
        if self.job.rate > 0 {
            let interval = Duration::from_secs(1) * self.job.numjobs / self.job.rate;
            // Jobs begin one after the other.
            let due = begun + interval * self.nth / self.job.numjobs;
            self.pace = Some(Pace { due, interval, overslept: Duration::ZERO });
        }
        for token in 0..u64::from(self.job.iodepth) {
            now = self.pace.as_mut().map_or(now, |pace| pace.wait(now));
            self.submit(token, now);
        }
        let mut in_flight = self.job.iodepth;
        while in_flight > 0 {
            let Some(bio) = self.local.wait() else { bail!("a request got lost") };
            if let Err(status) = bio.status {
                bail!("a {:?} of {} bytes at {} failed: {status}", bio.op, bio.len, bio.offset);
            }
            now = Instant::now();
            let token = bio.token;
            let started = self.submitted[token as usize];
            let is_read = bio.op == Op::Read;
            self.spare.push(bio.buffer);
            let nanos = (now - started).as_nanos() as u64;
            self.reached.timeline.add(now, nanos);
            if now < counts_from {
                first = now;
            } else if left > 0 {
                let side = if is_read { &mut self.reached.reads } else { &mut self.reached.writes };
                side.add(nanos);
                left -= 1;
            }
            if left == 0 || now >= until {
                in_flight -= 1;
            } else {
                now = self.flush_if_due(is_read, now)?;
                now = self.pace.as_mut().map_or(now, |pace| pace.wait(now));
                self.submit(token, now);
            }
        }
        self.reached.by_job.push(self.reached.count());
        self.reached.cpu_nanos = cpu::of_thread() - cpu_before;
        Ok((self.reached, first, now))
    }

    fn submit(&mut self, token: u64, now: Instant) {
        let Job { rw, bs, offset, rwmixread, fua, .. } = *self.job;
        let block = if rw.is_random() {
            self.prng.below(self.blocks)
        } else {
            self.next = (self.next + 1) % self.blocks;
            self.next
        };
        let read_percent = rw.read_percent(rwmixread);
        let is_read = match read_percent {
            0 | 100 => read_percent == 100,
            percent => self.prng.below(100) < u64::from(percent),
        };
        let buffer = self.spare.pop().expect("each request in flight has its buffer");
        self.submitted[token as usize] = now;
        self.local.submit(match is_read {
            true => Bio::read(offset + block * bs, buffer, token),
            false => Bio::write(offset + block * bs, buffer, fua, token),
        });
    }

    /// A flush after every `fsync` writes; no request's time includes it.
    fn flush_if_due(&mut self, is_read: bool, now: Instant) -> Result<Instant> {
        if is_read || self.job.fsync == 0 {
            return Ok(now);
        }
        self.unflushed += 1;
        if self.unflushed < self.job.fsync {
            return Ok(now);
        }
        self.unflushed = 0;
        if self.local.flush().is_err() {
            bail!("a flush failed");
        }
        Ok(Instant::now())
    }
}

/// Writes the first `len_bytes` of `device` once, so that all of it is cached: earlier writes may
/// have been collected meanwhile. Another thread does the device's background work.
pub fn refill(device: &Arc<Device>, len_bytes: u64) -> Result<()> {
    fill(device, len_bytes)?;
    settle(device)
}

/// The same, without waiting until it is written back.
pub fn fill(device: &Arc<Device>, len_bytes: u64) -> Result<()> {
    let (bs, runtime) = (64 << 10, Duration::from_secs(3600));
    let size = len_bytes / bs * bs;
    let job = Job { rw: Rw::Write, bs, size, io_size: size, runtime, ..Job::default() };
    run(device, &job).map(drop)
}

/// Fills a cache in front of `device` with this many bytes of its data, lap after lap, and waits
/// until all is written back. The next measurement starts with a cache that is full of clean data.
pub fn fill_often(device: &Arc<Device>, bytes: u64) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let lap = left.min(device.size_bytes());
        refill(device, lap)?;
        left -= lap;
    }
    Ok(())
}

/// Runs `operation` again and again, each time timed on its own, until this long or this often.
pub fn time(
    runtime: Duration,
    count_max: u64,
    mut operation: impl FnMut(u64) -> Result<()>,
) -> Result<Histogram> {
    let mut times = Histogram::default();
    let begun = Instant::now();
    for nth in 0..count_max {
        let start = Instant::now();
        operation(nth)?;
        let end = Instant::now();
        times.add((end - start).as_nanos() as u64);
        if end - begun >= runtime {
            break;
        }
    }
    Ok(times)
}
