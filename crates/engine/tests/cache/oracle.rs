//! The versions that each sector may show, and which of them count.

/// A version of a sector.
#[derive(Clone, Copy, Debug)]
struct Version {
    value: u64,
    is_done: bool,
    /// A flush that should have made it durable failed.
    is_doubtful: bool,
}

#[derive(Clone, Debug)]
struct Sector {
    versions: Vec<Version>,
    /// No power cut may show an older one.
    floor: usize,
    is_busy: bool,
}

impl Sector {
    fn done(&self) -> usize {
        self.versions.iter().rposition(|version| version.is_done).expect("one is there")
    }

    fn may_show(&self, from: usize, value: u64) -> bool {
        self.versions[from..].iter().any(|version| version.value == value)
    }
}

/// All sectors of a device.
#[derive(Clone, Debug)]
pub struct Oracle {
    sectors: Vec<Sector>,
}

/// For each sector, the places of two versions at one moment.
pub type Snapshot = Vec<Seen>;

/// The versions that a reader that begins now must find at least.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    done: usize,
    /// If a disk may forget, because a flush has failed.
    floor: usize,
}

impl Oracle {
    /// Of zeroes.
    pub fn new(sectors: usize) -> Oracle {
        let version = Version { value: 0, is_done: true, is_doubtful: false };
        let sector = Sector { versions: vec![version], floor: 0, is_busy: false };
        Oracle { sectors: vec![sector; sectors] }
    }

    pub fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Whether a write of these sectors is under way.
    pub fn is_busy(&self, range: std::ops::Range<usize>) -> bool {
        self.sectors[range].iter().any(|sector| sector.is_busy)
    }

    pub fn begin_write(&mut self, range: std::ops::Range<usize>, value: u64) {
        for sector in &mut self.sectors[range] {
            let (is_done, is_doubtful) = (false, false);
            sector.versions.push(Version { value, is_done, is_doubtful });
            sector.is_busy = true;
        }
    }

    pub fn end_write(&mut self, range: std::ops::Range<usize>, is_good: bool, is_durable: bool) {
        for sector in &mut self.sectors[range] {
            sector.is_busy = false;
            let last = sector.versions.len() - 1;
            sector.versions[last].is_done = is_good;
            if is_good && is_durable {
                sector.floor = last;
            }
        }
    }

    /// The writes that are complete now.
    pub fn done(&self) -> Snapshot {
        let seen = |sector: &Sector| Seen { done: sector.done(), floor: sector.floor };
        self.sectors.iter().map(seen).collect()
    }

    /// The writes of the snapshot are durable.
    pub fn flushed(&mut self, done: &Snapshot) {
        for (sector, Seen { done, .. }) in self.sectors.iter_mut().zip(done) {
            if !sector.versions[*done].is_doubtful {
                sector.floor = sector.floor.max(*done);
            }
        }
    }

    /// A flush failed: data that is not durable may never be, and may be gone.
    pub fn doubt(&mut self) {
        for sector in &mut self.sectors {
            let floor = sector.floor;
            for version in &mut sector.versions[floor + 1..] {
                version.is_doubtful = true;
            }
        }
    }

    /// Whether a read that began then may show `value`. `has_failed`: so may a flush.
    pub fn check(
        &self,
        at: usize,
        done: &Snapshot,
        value: u64,
        has_failed: bool,
    ) -> Result<(), String> {
        let (sector, seen) = (&self.sectors[at], done[at]);
        let from = if has_failed { seen.floor } else { seen.done };
        match sector.may_show(from, value) {
            true => Ok(()),
            false => Err(format!("sector {at} shows {value}, of {:?}", sector.versions)),
        }
    }

    /// After a power cut, or a kill, the sectors show these values, and no others from now on. A
    /// disk may forget without a power cut when a flush has failed.
    pub fn found(
        &mut self,
        values: &[u64],
        is_power_cut: bool,
        has_failed: bool,
    ) -> Result<(), String> {
        for (at, (sector, &value)) in self.sectors.iter_mut().zip(values).enumerate() {
            let from = if is_power_cut || has_failed { sector.floor } else { sector.done() };
            if !sector.may_show(from, value) {
                let (all, cut) = (&sector.versions, is_power_cut);
                return Err(format!(
                    "sector {at} shows {value}, but version {from} on may (power cut: {cut}), of \
                     {all:?}"
                ));
            }
            let (is_done, is_doubtful) = (true, false);
            let version = Version { value, is_done, is_doubtful };
            // After a kill the value may still be lost by a power cut.
            if is_power_cut {
                let versions = vec![version];
                *sector = Sector { versions, floor: 0, is_busy: false };
            } else {
                sector.is_busy = false;
                sector.versions.push(version);
            }
        }
        Ok(())
    }
}
