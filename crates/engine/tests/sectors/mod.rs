//! The expected content of each sector of a device: the model that random histories of caches are
//! compared with, before crashes and after.

use std::time::{Duration, Instant};

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::prng::Prng;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// Per sector: all versions since the last flushed one, oldest first; the last is the current.
pub struct Model {
    versions: Vec<Vec<u64>>,
    next: u64,
}

impl Model {
    /// All sectors are zeroes, durably.
    pub fn new(sectors: usize) -> Model {
        Model { versions: vec![vec![0]; sectors], next: 1 }
    }

    /// A new version for a range; the bytes that carry it.
    pub fn write(&mut self, first: usize, count: usize, is_zero: bool) -> Vec<u8> {
        let mut data = Vec::with_capacity(count * SECTOR);
        for sector in first..first + count {
            let version = if is_zero { 0 } else { self.next };
            self.versions[sector].push(version);
            data.extend(content(sector, version));
        }
        self.next += 1;
        data
    }

    /// The range is durable: older versions may not come back.
    pub fn flushed(&mut self, sectors: std::ops::Range<usize>) {
        for versions in &mut self.versions[sectors] {
            let last = *versions.last().unwrap();
            *versions = vec![last];
        }
    }

    /// The data that reads must return.
    pub fn current(&self, first: usize, count: usize) -> Vec<u8> {
        (first..first + count)
            .flat_map(|sector| content(sector, *self.versions[sector].last().unwrap()))
            .collect()
    }

    /// After a crash: each sector shows one of its versions, and from now on that is the one.
    pub fn adopt(&mut self, found: &[u8], why: &str) {
        for (sector, bytes) in found.chunks(SECTOR).enumerate() {
            let versions = &mut self.versions[sector];
            let version = versions.iter().rev().find(|&&version| content(sector, version) == bytes);
            let Some(&version) = version else {
                panic!("{why}: sector {sector} is none of {versions:?}: {:?}", &bytes[..16]);
            };
            *versions = vec![version];
        }
    }
}

/// Random requests of whole units.
pub struct Requests {
    /// Sectors of a unit.
    pub unit: usize,
    /// Most units of most requests, and of one in eight.
    pub units_max: [u64; 2],
}

impl Requests {
    /// Of ten kinds five are writes, two are zeroes, three are reads. The model has what it writes.
    pub fn next(&self, kind: u64, prng: &mut Prng, model: &mut Model) -> Bio {
        let units = model.versions.len() / self.unit;
        let longest = self.units_max[usize::from(prng.one_in(8))];
        let first = prng.below(units as u64) as usize;
        let count = (1 + prng.below(longest) as usize).min(units - first) * self.unit;
        let first = first * self.unit;
        let (offset, len) = ((first * SECTOR) as u64, count * SECTOR);
        let fua = prng.one_in(8);
        match kind {
            0..5 => {
                let data = model.write(first, count, false);
                Bio::write(offset, Buffer::from_bytes(&data), fua, 0)
            }
            5 | 6 => {
                let op = if prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                model.write(first, count, true);
                Bio::bare(op, offset, len as u64, fua, 0)
            }
            _ => Bio::read(offset, Buffer::zeroed(len), 0),
        }
    }

    /// Compares what was read, and notes what is durable.
    pub fn end(&self, bio: &Bio, model: &mut Model, why: &str) {
        bio.status.unwrap();
        let (first, count) = (bio.offset as usize / SECTOR, bio.len as usize / SECTOR);
        if bio.op == Op::Read {
            let is_current = bio.buffer.as_slice() == model.current(first, count);
            assert!(is_current, "{why}: read {first}+{count}");
        } else if bio.fua {
            model.flushed(first..first + count);
        }
    }
}

/// Plays histories for `ENGINE_SECONDS`, from the seed `ENGINE_FROM`.
pub fn soak(engine: &str, history: impl Fn(u64)) {
    let number = |what: &str| {
        let word = std::env::var(format!("{}_{what}", engine.to_uppercase())).ok()?;
        Some(word.parse::<u64>().unwrap())
    };
    let end = Instant::now() + Duration::from_secs(number("SECONDS").unwrap_or(10));
    let first = number("FROM").unwrap_or(0);
    let mut seed = first;
    while Instant::now() < end {
        history(seed);
        seed += 1;
    }
    println!("{engine}: {} busy histories from seed {first}", seed - first);
}

fn content(sector: usize, version: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if version != 0 {
        for pair in bytes.chunks_mut(16) {
            pair[..8].copy_from_slice(&(sector as u64).to_le_bytes());
            pair[8..].copy_from_slice(&version.to_le_bytes());
        }
    }
    bytes
}
