//! What a device must hold, sector by sector: the model that random histories of every cache are
//! compared with, before crashes and after.

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

    /// What reads must see.
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
