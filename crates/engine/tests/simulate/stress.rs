//! Real threads on one device, and what each sector did judged as a register afterwards.
//!
//! Every write carries a value of its own, so whether a sector's history is linearizable can be
//! decided exactly (Gibbons and Korach, "Testing Shared Memories"): each value has a zone, from the
//! first end to the last begin among its write and its reads. A zone is *forward* when that end is
//! before that begin: then the sector surely held the value in between. The history is
//! linearizable when forward zones do not overlap, no other zone lies within one of them, and no
//! read ends before its write begins.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use udm::build::{BuildOptions, NamedDevices, build};
use udm::device::Device;
use udm::disk::RamDisk;
use udm::local::{Local, SystemClock};
use udm::pcache::layout::Geometry;
use udm::pmem::Persistence;
use udm::pmem::dax::{DaxOptions, DaxPmem};
use udm::prng::Prng;
use udm::table::Table;
use udm::units::MIB;

use crate::oracle::{SECTOR, decode, encode};

const CLIENTS: u32 = 3;
const SECTORS: u64 = 8 * MIB / SECTOR as u64;
/// After this long the events are judged, and a new round begins: events take memory.
const ROUND: Duration = Duration::from_secs(1);
/// This long after the end all requests must have ended: only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// One sector's part of a request.
#[derive(Clone, Copy)]
struct Event {
    sector: u32,
    value: u32,
    begin: u64,
    end: u64,
    is_write: bool,
}

/// The first end and the last begin of a value's write and reads.
#[derive(Clone, Copy)]
struct Zone {
    end: u64,
    begin: u64,
    write_begin: u64,
}

/// Runs for `time`. Returns the number of requests, or an error.
pub fn stress(seed: u64, time: Duration) -> Result<u64, String> {
    let end = Instant::now() + time;
    let mut requests = 0;
    let mut seed = seed;
    while Instant::now() < end {
        seed += 1;
        let path = cache_file(seed);
        let result = device(&path).and_then(|device| run(&device, seed, ROUND));
        let _ = std::fs::remove_file(&path);
        requests += result?;
    }
    Ok(requests)
}

fn cache_file(seed: u64) -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    let folder = if memory.is_dir() { memory } else { std::env::temp_dir() };
    folder.join(format!("udm-stress-{}-{seed}", std::process::id()))
}

/// A pcache on real memory, so small that its segments are reused all the time.
fn device(path: &PathBuf) -> Result<Arc<Device>, String> {
    let geometry = Geometry { segment_bytes: 64 << 10, device_bytes_min: 0 };
    let file = std::fs::File::create(path).map_err(|error| error.to_string())?;
    file.set_len(20480 + 32 * geometry.segment_bytes).map_err(|error| error.to_string())?;
    let make = || {
        let options = DaxOptions { persistence: Some(Persistence::Cpu), ..DaxOptions::default() };
        let mut devices = NamedDevices::new();
        devices.add_pmem("C", Arc::new(DaxPmem::open(path, options)?));
        devices.add_disk("B", Arc::new(RamDisk::new(SECTORS * SECTOR as u64, 512)));
        let table = Table::parse(&format!("0 {SECTORS} pcache C B"))?;
        let options = BuildOptions { geometry: Some(geometry), ..BuildOptions::named(1) };
        Device::with_table("stress", build(&table, &devices, &options)?)
    };
    make().map_err(|error| error.to_string())
}

fn run(device: &Arc<Device>, seed: u64, time: Duration) -> Result<u64, String> {
    let clock = Arc::new(AtomicU64::new(1));
    let is_over = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = mpsc::channel();
    let background = thread::spawn({
        let (device, is_over) = (device.clone(), is_over.clone());
        move || work_in_background(&device, &is_over)
    });
    for client in 0..CLIENTS {
        let (device, clock, sender) = (device.clone(), clock.clone(), sender.clone());
        let end = Instant::now() + time;
        thread::spawn(move || {
            let mut prng = Prng::new(seed << 8 | u64::from(client));
            let events = talk(&device, &clock, client, &mut prng, end);
            // The receiver is gone only if this was too late.
            let _ = sender.send(events);
        });
    }
    let mut prng = Prng::new(seed);
    let end = Instant::now() + time;
    while Instant::now() < end {
        thread::sleep(Duration::from_millis(20 + prng.below(100)));
        suspend_and_resume(device)?;
    }
    let mut events = Vec::new();
    for _ in 0..CLIENTS {
        let status = || format!("a client waits indefinitely: {:?}", device.status());
        events.extend(receiver.recv_timeout(PATIENCE).map_err(|_| status())??);
    }
    is_over.store(true, Ordering::SeqCst);
    background.join().map_err(|_| "the background died".to_string())?;
    judge(&events)?;
    Ok(clock.load(Ordering::SeqCst) / 2)
}

fn work_in_background(device: &Arc<Device>, is_over: &AtomicBool) {
    let local = Local::without_kernel(device).expect("a port is free");
    let mut local = local.with_background(SystemClock);
    let mut due = Instant::now();
    while !is_over.load(Ordering::SeqCst) {
        if !local.turn() {
            thread::sleep(Duration::from_micros(50));
        }
        if due.elapsed() > Duration::from_millis(5) {
            due = Instant::now();
            device.events().work();
        }
    }
}

fn suspend_and_resume(device: &Device) -> Result<(), String> {
    let start = Instant::now();
    device.begin_suspend().map_err(|error| error.to_string())?;
    // Full, or not quiet yet: both pass.
    while !device.finish_suspend().unwrap_or(false) {
        if start.elapsed() > PATIENCE {
            return Err(format!("suspend does not end: {:?}", device.status()));
        }
        thread::yield_now();
    }
    device.resume().map_err(|error| error.to_string())
}

/// A client's requests, as it saw them.
fn talk(
    device: &Arc<Device>,
    clock: &AtomicU64,
    client: u32,
    prng: &mut Prng,
    end: Instant,
) -> Result<Vec<Event>, String> {
    let mut local = Local::without_kernel(device).map_err(|error| error.to_string())?;
    let mut events = Vec::new();
    let mut bytes = vec![0; 256 * SECTOR];
    let mut value = client << 28;
    let failed = |status| format!("a request failed: {status}");
    while Instant::now() < end {
        if prng.one_in(40) {
            local.flush().map_err(failed)?;
        }
        let wide = if prng.one_in(50) { 256 } else { 8 };
        let count = 1 + prng.below(wide);
        let first = match prng.below(4) {
            0 | 1 => prng.below(32),
            2 => 8192 - 8 + prng.below(16),
            _ => prng.below(SECTORS - count),
        };
        let bytes = &mut bytes[..count as usize * SECTOR];
        let is_write = prng.one_in(2);
        if is_write {
            value += 1;
            encode(first as usize, value, bytes);
        }
        let begin = clock.fetch_add(1, Ordering::SeqCst);
        let result = match is_write {
            true => local.write_at(bytes, first * SECTOR as u64, prng.one_in(10)),
            false => local.read_at(bytes, first * SECTOR as u64),
        };
        let end = clock.fetch_add(1, Ordering::SeqCst);
        result.map_err(failed)?;
        for (nth, bytes) in bytes.chunks(SECTOR).enumerate() {
            let sector = first as u32 + nth as u32;
            let found = decode(sector as usize, bytes)?.unwrap_or(0);
            events.push(Event { sector, value: found, begin, end, is_write });
        }
    }
    Ok(events)
}

/// Whether each sector's history is linearizable, like a register's history.
fn judge(events: &[Event]) -> Result<(), String> {
    let mut sectors: HashMap<u32, HashMap<u32, Zone>> = HashMap::new();
    for event in events {
        let zones = sectors.entry(event.sector).or_default();
        // The zeroes of the beginning were written before everything.
        let new = Zone { end: u64::MAX, begin: 0, write_begin: u64::MAX };
        let first = Zone { end: 0, begin: 0, write_begin: 0 };
        let zone = zones.entry(event.value).or_insert(if event.value == 0 { first } else { new });
        zone.end = zone.end.min(event.end);
        zone.begin = zone.begin.max(event.begin);
        if event.is_write {
            zone.write_begin = event.begin;
        }
    }
    for (sector, zones) in &sectors {
        judge_sector(zones).map_err(|what| format!("sector {sector}: {what}"))?;
    }
    Ok(())
}

fn judge_sector(zones: &HashMap<u32, Zone>) -> Result<(), String> {
    let mut forward = Vec::new();
    let mut backward = Vec::new();
    for (value, zone) in zones {
        if zone.write_begin == u64::MAX || zone.end < zone.write_begin {
            return Err(format!("{value:#x} was read before it was written"));
        }
        match zone.end < zone.begin {
            true => forward.push((zone.end, zone.begin, value)),
            false => backward.push((zone.begin, zone.end, value)),
        }
    }
    forward.sort_unstable();
    for pair in forward.windows(2) {
        if pair[1].0 < pair[0].1 {
            return Err(format!("{:#x} and {:#x} were held at once", pair[0].2, pair[1].2));
        }
    }
    for (from, to, value) in backward {
        let nth = forward.partition_point(|zone| zone.0 < from);
        let around = nth.checked_sub(1).map(|nth| forward[nth]).filter(|zone| to < zone.1);
        if let Some(around) = around {
            return Err(format!("{value:#x} appears while {:#x} was held", around.2));
        }
    }
    Ok(())
}

/// The judge must know a wrong history when it sees one.
pub fn judge_is_awake() {
    let event = |value, begin, end, is_write| Event { sector: 0, value, begin, end, is_write };
    let good = [event(1, 1, 2, true), event(2, 3, 6, true), event(1, 4, 5, false)];
    assert!(judge(&good).is_ok());
    let stale = [event(1, 1, 2, true), event(2, 3, 4, true), event(1, 5, 6, false)];
    assert!(judge(&stale).is_err());
    let back =
        [event(1, 1, 2, true), event(2, 3, 20, true), event(2, 5, 6, false), event(1, 7, 8, false)];
    assert!(judge(&back).is_err());
}
