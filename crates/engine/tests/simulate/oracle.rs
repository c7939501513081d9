//! The versions that a read may return, sector by sector, and those that a crash may leave.
//!
//! Every write, discard and zeroing is a *version* with the interval between its submit and its
//! end. Time is a counter of events. A version dies for readers
//!
//! * when a write that began after its end has ended well, or
//! * when a read that began after its end has returned another version: whichever order two
//!   overlapping writes take, everybody sees the same.
//!
//! A read may return any version that was alive at some moment between its submit and its end. A
//! write that failed, or was under way when its server died, may have happened or not. A read that
//! began before such a write does not decide this: of two copies of its sectors, it may have seen
//! the one that took the write.
//!
//! A dead version may still be found after a crash, until a flush that began after its death (and
//! after the end of the write that killed it) has ended well, or a later FUA write of its sector.
//! After a power cut, the first read decides: from then on the content is fixed. After the death of
//! a server the first read decides as well, but the data may still be in a disk's
//! volatile cache: only the next flush makes it final.
//!
//! *Epochs* count the ends of flushes and FUA writes. A version may be found after a crash from the
//! epoch of its submit until the one that ends it. The origin alone is consistent when there is
//! an epoch that suits all of its sectors.

pub const SECTOR: usize = 512;

const NEVER: u64 = u64::MAX;
const EPOCH_MAX: u32 = u32::MAX;

struct Version {
    begin: u64,
    end: u64,
    is_good: bool,
    is_zero: bool,
    epoch: u32,
}

/// A version that may still be met somewhere.
#[derive(Clone)]
struct Entry {
    version: u32,
    /// When it died for readers, and of what.
    dead_at: u64,
    killer: u32,
    /// From this epoch on no crash leaves it.
    until: u32,
    /// A power cut left several; a read has shown that this is not the one.
    is_gone: bool,
    /// A power cut left it, among others perhaps: it is on a medium, or nowhere.
    is_survivor: bool,
    /// Only reads that began before their killer have shown it.
    is_raced: bool,
    /// A read has shown what killed it, after that had ended.
    is_outlived: bool,
}

/// The model of one mapped device.
pub struct Oracle {
    clock: u64,
    epoch: u32,
    versions: Vec<Version>,
    sectors: Vec<Vec<Entry>>,
    /// Versions that can be met on the origin only, with the epoch that ended them.
    past: Vec<Vec<(u32, u32)>>,
    /// Begins of reads under way.
    reads: Vec<u64>,
}

impl Oracle {
    /// A device of zeroes.
    pub fn new(sectors: usize) -> Oracle {
        let first = Version { begin: 0, end: 0, is_good: true, is_zero: true, epoch: 0 };
        Oracle {
            clock: 0,
            epoch: 0,
            versions: vec![first],
            sectors: vec![vec![Entry::new(0)]; sectors],
            past: vec![Vec::new(); sectors],
            reads: Vec::new(),
        }
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A write begins. Its number, which its content carries.
    pub fn begin_write(&mut self, first: usize, count: usize, is_zero: bool) -> u32 {
        let begin = self.now();
        let number = self.versions.len() as u32;
        let epoch = self.epoch;
        self.versions.push(Version { begin, end: NEVER, is_good: false, is_zero, epoch });
        for entries in &mut self.sectors[first..first + count] {
            entries.push(Entry::new(number));
        }
        number
    }

    /// A write has ended, well or not.
    pub fn end_write(&mut self, number: u32, first: usize, count: usize, is_good: bool, fua: bool) {
        let now = self.now();
        let version = &mut self.versions[number as usize];
        version.end = now;
        version.is_good = is_good;
        if !is_good {
            (first..first + count).for_each(|sector| self.undecide(sector));
            return;
        }
        let begin = version.begin;
        self.epoch += u32::from(fua);
        for sector in first..first + count {
            for entry in &mut self.sectors[sector] {
                if entry.version == number || self.versions[entry.version as usize].end >= begin {
                    continue;
                }
                entry.die(now, number);
                if fua {
                    entry.until = entry.until.min(self.epoch);
                }
            }
            self.forget(sector);
        }
    }

    /// A read begins.
    pub fn begin_read(&mut self) -> u64 {
        let begin = self.now();
        self.reads.push(begin);
        begin
    }

    /// A read has ended, with these bytes if it ended well.
    pub fn end_read(
        &mut self,
        begin: u64,
        first: usize,
        bytes: Option<&[u8]>,
    ) -> Result<(), String> {
        let now = self.now();
        let place = self.reads.iter().position(|read| *read == begin).expect("reads end once");
        self.reads.swap_remove(place);
        let Some(bytes) = bytes else { return Ok(()) };
        for (nth, bytes) in bytes.chunks(SECTOR).enumerate() {
            let sector = first + nth;
            let found = decode(sector, bytes)?;
            let is_fit = |entry: &Entry| {
                self.is(found, entry.version) && entry.dead_at > begin && !entry.is_gone
            };
            let mut fitting = self.sectors[sector].iter().filter(|entry| is_fit(entry));
            let Some(seen) = fitting.next().cloned() else {
                return Err(format!("read sector {sector}: {}", self.tell(sector, found)));
            };
            if fitting.next().is_none() {
                self.see(sector, &seen, begin, now);
            }
        }
        Ok(())
    }

    /// A read that began at `begin` has shown `seen`: it is the newest of those that had ended.
    fn see(&mut self, sector: usize, seen: &Entry, begin: u64, now: u64) {
        if self.sectors[sector].len() == 1 {
            return;
        }
        let version = &self.versions[seen.version as usize];
        let has_ended = version.end < begin;
        let is_raced = begin < version.begin;
        for entry in &mut self.sectors[sector] {
            if entry.version != seen.version && self.versions[entry.version as usize].end < begin {
                entry.is_raced = is_raced && (entry.is_raced || entry.dead_at == NEVER);
                entry.die(now, seen.version);
                entry.is_gone |= entry.is_survivor && seen.is_survivor;
                entry.is_outlived |= has_ended && entry.killer == seen.version;
            }
        }
        self.forget(sector);
    }

    /// A flush begins.
    pub fn begin_flush(&mut self) -> u64 {
        self.now()
    }

    /// A flush that began at `begin` has ended well.
    pub fn end_flush(&mut self, begin: u64) {
        self.now();
        self.epoch += 1;
        for sector in 0..self.sectors.len() {
            if self.sectors[sector].len() == 1 {
                continue;
            }
            for entry in &mut self.sectors[sector] {
                let killer = &self.versions[entry.killer as usize];
                let is_final = killer.is_good || entry.is_outlived;
                if entry.dead_at <= begin && is_final && killer.end <= begin {
                    entry.until = entry.until.min(self.epoch);
                }
            }
            self.forget(sector);
        }
    }

    /// The device was removed in order: from now on no crash takes anything back. (This is not a
    /// client's flush: the promises about the origin alone do not change.)
    pub fn removed(&mut self) {
        self.now();
        for sector in 0..self.sectors.len() {
            for entry in &mut self.sectors[sector] {
                let killer = &self.versions[entry.killer as usize];
                entry.is_gone |= entry.dead_at != NEVER && killer.is_good && killer.end != NEVER;
            }
        }
    }

    /// The server died. Requests in flight may have happened.
    pub fn server_died(&mut self) {
        let now = self.now();
        for version in self.versions.iter_mut().filter(|version| version.end == NEVER) {
            version.end = now;
        }
        self.reads.clear();
        (0..self.sectors.len()).for_each(|sector| self.undecide(sector));
    }

    /// Versions are alive again if they died of a write that has not ended well, and no read that
    /// began after it has shown this.
    fn undecide(&mut self, sector: usize) {
        let entries = &mut self.sectors[sector];
        let ended: Vec<u32> = entries.iter().map(|entry| entry.version).collect();
        for entry in entries.iter_mut().filter(|entry| entry.is_raced && !entry.is_gone) {
            let killer = &self.versions[entry.killer as usize];
            if killer.is_good || killer.end == NEVER {
                continue;
            }
            let end = self.versions[entry.version as usize].end;
            let is_later = |other: &&u32| {
                let other = &self.versions[**other as usize];
                other.is_good && other.begin > end
            };
            entry.is_raced = false;
            match ended.iter().find(is_later) {
                Some(later) => entry.killer = *later,
                None => entry.dead_at = NEVER,
            }
        }
    }

    /// All unflushed data may be lost. The server is dead. `is_power_cut`: the remaining data
    /// is on a medium.
    pub fn lose_unflushed(&mut self, is_power_cut: bool) {
        self.epoch += 1;
        for sector in 0..self.sectors.len() {
            if self.sectors[sector].len() == 1 {
                continue;
            }
            for entry in &mut self.sectors[sector] {
                if entry.until == EPOCH_MAX && !entry.is_gone {
                    entry.dead_at = NEVER;
                    entry.is_survivor |= is_power_cut;
                    entry.is_outlived = false;
                }
            }
            self.forget(sector);
        }
    }

    /// Lets go of what neither readers nor crashes can meet.
    fn forget(&mut self, sector: usize) {
        let oldest = self.reads.iter().copied().min().unwrap_or(NEVER);
        let past = &mut self.past[sector];
        self.sectors[sector].retain(|entry| {
            let is_kept = entry.until == EPOCH_MAX || (entry.dead_at > oldest && !entry.is_gone);
            if !is_kept {
                past.push((entry.version, entry.until));
            }
            is_kept || entry.dead_at == NEVER
        });
    }

    /// Whether every sector of `image` is a content that a read could return now.
    pub fn check_current(&self, image: &[u8]) -> Result<(), String> {
        for (sector, bytes) in image.chunks(SECTOR).enumerate() {
            let found = decode(sector, bytes)?;
            let is_alive = |entry: &Entry| {
                self.is(found, entry.version) && entry.dead_at == NEVER && !entry.is_gone
            };
            if !self.sectors[sector].iter().any(is_alive) {
                return Err(format!("sector {sector}: {}", self.tell(sector, found)));
            }
        }
        Ok(())
    }

    /// Whether every sector of `image` holds something that was written there once.
    pub fn check_known(&self, image: &[u8]) -> Result<(), String> {
        for (sector, bytes) in image.chunks(SECTOR).enumerate() {
            let found = decode(sector, bytes)?;
            if !self.known(sector).any(|(version, _)| self.is(found, version)) {
                return Err(format!("sector {sector}: {}", self.tell(sector, found)));
            }
        }
        Ok(())
    }

    /// Whether the origin alone is in a state that a power cut at some epoch could have left.
    pub fn check_alone(&self, image: &[u8]) -> Result<(), String> {
        let (mut from, mut from_sector) = (0, 0);
        let (mut until, mut until_sector) = (EPOCH_MAX, 0);
        for (sector, bytes) in image.chunks(SECTOR).enumerate() {
            let found = decode(sector, bytes)?;
            let fitting = self.known(sector).filter(|(version, _)| self.is(found, *version));
            // Zeroes may be of several writes: of the hull of their times.
            let hull = fitting.fold(None, |hull: Option<(u32, u32)>, (version, until)| {
                let from = self.versions[version as usize].epoch;
                Some(hull.map_or((from, until), |hull| (hull.0.min(from), hull.1.max(until))))
            });
            let Some(hull) = hull else {
                return Err(format!("origin sector {sector}: {}", self.tell(sector, found)));
            };
            if hull.0 > from {
                (from, from_sector) = (hull.0, sector);
            }
            if hull.1 < until {
                (until, until_sector) = (hull.1, sector);
            }
        }
        if from < until {
            return Ok(());
        }
        Err(format!(
            "the origin alone is of no flush: sector {from_sector} is of epoch {from} at least, \
             but sector {until_sector} of before {until}"
        ))
    }

    fn known(&self, sector: usize) -> impl Iterator<Item = (u32, u32)> {
        let entries = self.sectors[sector].iter().map(|entry| (entry.version, entry.until));
        entries.chain(self.past[sector].iter().copied())
    }

    fn is(&self, found: Option<u32>, version: u32) -> bool {
        match found {
            Some(number) => number == version,
            None => self.versions[version as usize].is_zero,
        }
    }

    fn tell(&self, sector: usize, found: Option<u32>) -> String {
        let name = |version: Option<u32>| match version {
            Some(version) if !self.versions[version as usize].is_zero => format!("v{version}"),
            Some(version) => format!("v{version} (zeroes)"),
            None => "zeroes".to_string(),
        };
        let list: Vec<String> = self.sectors[sector]
            .iter()
            .map(|entry| {
                let is_alive = entry.dead_at == NEVER && !entry.is_gone;
                format!("{}{}", name(Some(entry.version)), if is_alive { "" } else { " (dead)" })
            })
            .collect();
        let when = match found {
            Some(number) if number as usize >= self.versions.len() => "never written".to_string(),
            Some(number) => {
                let version = &self.versions[number as usize];
                format!("of {}..{}, good: {}", version.begin, version.end, version.is_good)
            }
            None => String::new(),
        };
        let found = found.map_or("zeroes".to_string(), |number| format!("v{number}"));
        format!("found {found} {when}; known are [{}], now is {}", list.join(", "), self.clock)
    }
}

impl Entry {
    fn new(version: u32) -> Entry {
        Entry {
            version,
            dead_at: NEVER,
            killer: 0,
            until: EPOCH_MAX,
            is_gone: false,
            is_survivor: false,
            is_raced: false,
            is_outlived: false,
        }
    }

    fn die(&mut self, now: u64, killer: u32) {
        if self.dead_at == NEVER {
            self.dead_at = now;
            self.killer = killer;
        }
    }
}

/// Puts the content of `version` into a run of sectors.
pub fn encode(first: usize, version: u32, bytes: &mut [u8]) {
    for (nth, sector) in bytes.chunks_mut(SECTOR).enumerate() {
        let mark = (first + nth) as u128 | u128::from(version) << 64 | 0x5EC << 112;
        sector.as_chunks_mut::<16>().0.fill(mark.to_le_bytes());
    }
}

/// The version that a sector's content carries; `None` is zeroes.
pub fn decode(sector: usize, bytes: &[u8]) -> Result<Option<u32>, String> {
    let (head, _) = bytes.split_first_chunk::<16>().expect("a sector has 512 bytes");
    if bytes[16..] != bytes[..SECTOR - 16] {
        return Err(format!("sector {sector} is torn or damaged: {:?}", &bytes[..24]));
    }
    let mark = u128::from_le_bytes(*head);
    if mark == 0 {
        return Ok(None);
    }
    if mark as u64 != sector as u64 || mark >> 112 != 0x5EC {
        return Err(format!("sector {sector} is foreign: of sector {}", mark as u64));
    }
    Ok(Some((mark >> 64) as u32))
}
