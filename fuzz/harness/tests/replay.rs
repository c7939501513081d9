//! Every committed input goes through its target, so that past findings stay fixed. Then a fixed
//! number of changed inputs, the same in each run, goes through it. `UDM_FUZZ_TIMES` multiplies the
//! number, `UDM_FUZZ_SEED` chooses other changes, and `UDM_FUZZ_SECONDS` replaces the number.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use udm::prng::Prng;
use udm_fuzz_harness::{TARGETS, Target};

const BYTES_MAX: usize = 4096;

fn seeds(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../seeds").join(name);
    let mut paths: Vec<PathBuf> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(&path).unwrap())).collect()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Runs an input; one that fails is kept, so that it can become a seed.
fn run(target: &Target, bytes: &[u8], what: &str) {
    let (name, function) = target;
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| function(bytes))) {
        let kept = std::env::temp_dir().join(format!("udm-fuzz-{name}-failure"));
        fs::write(&kept, bytes).unwrap();
        eprintln!("{name}: {what} fails; its bytes are kept in {}", kept.display());
        std::panic::resume_unwind(panic);
    }
}

/// One or a few changes of the kind that fuzzers make.
fn mutate(prng: &mut Prng, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + prng.below(4) {
        let at = prng.below(bytes.len() as u64 + 1) as usize;
        let len = (prng.below(16) as usize).min(bytes.len() - at);
        match prng.below(6) {
            0 => drop(bytes.drain(at..at + len)),
            1 => {
                let mut new = vec![0; 1 + prng.below(8) as usize];
                prng.fill(&mut new);
                bytes.splice(at..at, new);
            }
            2 => {
                let again = bytes[at..at + len].to_vec();
                let to = prng.below(bytes.len() as u64 + 1) as usize;
                bytes.splice(to..to, again);
            }
            3 if !other.is_empty() => {
                let from = prng.below(other.len() as u64) as usize;
                let len = (prng.below(64) as usize).min(other.len() - from);
                bytes.splice(at..at, other[from..from + len].iter().copied());
            }
            4 if at < bytes.len() => bytes[at] = prng.next_u64() as u8,
            _ if at < bytes.len() => bytes[at] ^= 1 << prng.below(8),
            _ => {}
        }
    }
    bytes.truncate(BYTES_MAX);
}

/// Replays the committed inputs, then `count` changed ones, which take about two seconds.
fn explore(name: &str, count: u64) {
    let target = TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    let seeds = seeds(name);
    assert!(!seeds.is_empty());
    for (path, bytes) in &seeds {
        run(target, bytes, &path.display().to_string());
    }
    let seed = number("UDM_FUZZ_SEED").unwrap_or(1);
    let count = count * number("UDM_FUZZ_TIMES").unwrap_or(1);
    let seconds = number("UDM_FUZZ_SECONDS").map(Duration::from_secs);
    let mut prng = Prng::new(seed);
    let (mut tries, begun) = (0_u64, Instant::now());
    while seconds.map_or(tries < count, |seconds| begun.elapsed() < seconds) {
        let [one, other] = [(); 2].map(|()| prng.below(seeds.len() as u64) as usize);
        let mut bytes = seeds[one].1.clone();
        mutate(&mut prng, &mut bytes, &seeds[other].1);
        run(target, &bytes, &format!("try {tries} of seed {seed}"));
        tries += 1;
    }
    println!("{name}: {} seeds, {tries} changed inputs from seed {seed}", seeds.len());
}

#[test]
fn hostile_pcaches_do_no_harm() {
    explore("pcache", 3_000);
}

#[test]
fn hostile_cache_metadata_does_no_harm() {
    explore("cache", 120);
}

#[test]
fn hostile_calls_do_no_harm() {
    explore("calls", 300);
}

#[test]
fn hostile_control_messages_do_no_harm() {
    explore("control", 56_000);
}

#[test]
fn hostile_nbd_clients_do_no_harm() {
    explore("nbd", 5_000);
}

#[test]
fn hostile_tables_do_no_harm() {
    explore("table", 480_000);
}

#[test]
fn hostile_guests_do_no_harm() {
    explore("vhost", 15_000);
}

#[test]
fn hostile_writecaches_do_no_harm() {
    explore("writecache", 1_700);
}
