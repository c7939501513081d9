//! The allowed states: for each slot, the versions that clients wrote and the oldest allowed one;
//! and the allowed data on the origin.

use std::collections::HashMap;

use crate::trace::Ask;

pub const SECTOR: usize = 512;
/// First sector and number of slots of each span.
pub const SPANS: [(u64, usize); 2] = [(0, 12), (8190, 8)];
pub const SLOTS: usize = 20;
/// Size of the origin: both spans, and little more.
pub const ORIGIN_BYTES: u64 = (4 << 20) + 8192;

/// The first byte of a slot.
pub fn offset_of(slot: usize) -> u64 {
    let (first, len) = SPANS[0];
    let sector = if slot < len { first + slot as u64 } else { SPANS[1].0 + (slot - len) as u64 };
    sector * SECTOR as u64
}

/// The slot at a byte, if the explorer looks at it.
pub fn slot_at(offset: u64) -> Option<usize> {
    let sector = offset / SECTOR as u64;
    let mut before = 0;
    for (first, len) in SPANS {
        if (first..first + len as u64).contains(&sector) {
            return Some(before + (sector - first) as usize);
        }
        before += len;
    }
    None
}

/// The content of a version of a slot: the same word 64 times; 0 for zeroes.
pub fn stamp(salt: u64, slot: usize, version: u64) -> u64 {
    let mut word = salt ^ (slot as u64) << 48 ^ version.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (word ^ (word >> 31)) | 1
}

/// The stamp that fills a sector; `None`: torn.
pub fn stamp_of(sector: &[u8]) -> Option<u64> {
    let (first, rest) = sector.split_first_chunk::<8>()?;
    rest.chunks_exact(8).all(|word| word == first).then(|| u64::from_le_bytes(*first))
}

pub fn fill(sector: &mut [u8], stamp: u64) {
    for word in sector.chunks_exact_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
}

/// The allowed contents of a sector of the origin.
#[derive(Clone, Debug, Default)]
pub struct OriginSlot {
    pub durable: u64,
    /// Written and not flushed: number of the write, content, and whether no later flush helps
    /// (a failed flush may have dropped it).
    later: Vec<(u32, u64, bool)>,
    in_flight: Vec<(u32, u64)>,
}

impl OriginSlot {
    /// Everything that a power cut may leave.
    pub fn possible(&self) -> impl Iterator<Item = u64> {
        let later = self.later.iter().map(|entry| entry.1);
        std::iter::once(self.durable).chain(later).chain(self.in_flight.iter().map(|e| e.1))
    }

    /// Everything that may be there when only the process died.
    pub fn visible(&self) -> impl Iterator<Item = u64> {
        let now = self.later.last().map_or(self.durable, |entry| entry.1);
        std::iter::once(now).chain(self.in_flight.iter().map(|e| e.1))
    }

    /// After a crash it holds `now`; a power cut also empties the device's own cache.
    pub fn settle(&mut self, now: u64, is_power_cut: bool) {
        self.in_flight.clear();
        if is_power_cut {
            self.later.clear();
            self.durable = now;
        } else if self.visible().next() != Some(now) {
            let newest = self.later.last().map_or(0, |entry| entry.0);
            self.later.push((newest, now, false));
        }
    }

    fn flush(&mut self, upto: u32) {
        let covered = self.later.iter().rposition(|entry| entry.0 <= upto && !entry.2);
        if let Some(covered) = covered {
            self.durable = self.later[covered].1;
            self.later.drain(..=covered);
        }
    }
}

/// The interval between two moments at which a client was notified of durable data.
#[derive(Clone, Debug)]
struct Interval {
    /// The oldest version of each slot that a power cut could have left.
    oldest: Vec<usize>,
    /// The newest; none yet for the present interval.
    newest: Option<Vec<usize>>,
}

#[derive(Clone, Debug)]
pub struct Model {
    pub salt: u64,
    next_version: u64,
    /// The versions of each slot that a dead process has left, until the next server starts.
    left: Vec<usize>,
    /// Contents in the order in which they were asked for.
    pub versions: Vec<Vec<u64>>,
    /// The oldest version that a power cut may leave.
    pub flushed: Vec<usize>,
    /// The newest acknowledged version, which a process death must leave.
    pub done: Vec<usize>,
    pending: HashMap<u32, (Ask, Vec<usize>)>,
    /// The oldest version that a flush makes durable: a flush that failed may have lost older ones,
    /// and its client knows.
    sure_from: Vec<usize>,
    /// Whether that may be: of a target that does not write again what passed it by.
    pub forgets: bool,
    /// A flush of the origin failed, and no client got the error yet: if the server dies, no other
    /// one can know.
    owes_doubt: bool,
    /// A write failed. Its data may appear after a death even if clients did not see it before, and
    /// may arrive, until the sector is written again, and flushed.
    has_ghosts: bool,
    /// With the version that clients saw then.
    ghosts: Vec<Vec<(usize, u64)>>,
    intervals: Vec<Interval>,
    pub origin: Vec<OriginSlot>,
    flushes: HashMap<u32, u32>,
    newest_write: u32,
    /// Percentages that a crash may leave.
    pub percents: Vec<u32>,
    pub is_labelled: bool,
    pub is_formatting: bool,
    /// The cache's disk has failed, and no server has started since.
    has_cache_failed: bool,
    /// No kernel has written to the medium.
    pub is_pure: bool,
    /// Whether the server reports that the origin alone is consistent.
    pub claims_consistent: bool,
}

impl Model {
    pub fn new(salt: u64) -> Model {
        let versions: Vec<Vec<u64>> = (0..SLOTS).map(|slot| vec![stamp(salt, slot, 0)]).collect();
        let origin = versions
            .iter()
            .map(|versions| OriginSlot { durable: versions[0], ..OriginSlot::default() })
            .collect();
        Model {
            salt,
            next_version: 1,
            left: Vec::new(),
            versions,
            flushed: vec![0; SLOTS],
            done: vec![0; SLOTS],
            pending: HashMap::new(),
            sure_from: vec![0; SLOTS],
            forgets: false,
            owes_doubt: false,
            has_ghosts: false,
            ghosts: vec![Vec::new(); SLOTS],
            intervals: vec![Interval { oldest: vec![0; SLOTS], newest: None }],
            origin,
            flushes: HashMap::new(),
            newest_write: 0,
            percents: vec![70],
            is_labelled: false,
            is_formatting: false,
            has_cache_failed: false,
            is_pure: true,
            claims_consistent: true,
        }
    }

    /// The content that the next write of a slot has.
    pub fn next_stamp(&self, slot: usize, is_zero: bool) -> u64 {
        if is_zero { 0 } else { stamp(self.salt, slot, self.next_version) }
    }

    /// The server serves: clients see what the crash left, and its label is stored.
    pub fn attached(&mut self) {
        self.show();
        if self.is_formatting {
            self.percents = vec![70];
        }
        self.is_formatting = false;
        self.is_labelled = true;
        self.has_cache_failed = false;
        if self.forgets {
            // A server does not know the failures of others: later flushes settle those.
            let later = self.origin.iter_mut().flat_map(|slot| &mut slot.later);
            later.for_each(|entry| entry.2 = false);
        }
    }

    /// A format by force begins: binding and percentage may go.
    pub fn unbound(&mut self) {
        self.is_formatting = true;
        self.is_labelled = false;
        self.percents.push(70);
    }

    pub fn submit(&mut self, id: u32, ask: Ask) {
        if let Ask::Write { first, count, is_zero, .. } = ask {
            for slot in first..first + count {
                let stamp = self.next_stamp(slot, is_zero);
                self.versions[slot].push(stamp);
            }
            self.next_version += 1;
        }
        if let Ask::Percent(percent) = ask {
            self.percents.push(percent);
        }
        let newest = match ask {
            Ask::Flush => self.done.clone(),
            _ => self.newest(),
        };
        self.pending.insert(id, (ask, newest));
    }

    fn newest(&self) -> Vec<usize> {
        self.versions.iter().map(|versions| versions.len() - 1).collect()
    }

    pub fn ack(&mut self, id: u32) {
        let (ask, newest) = self.pending.remove(&id).unwrap();
        match ask {
            Ask::Write { first, count, fua, .. } => {
                for (slot, newest) in newest.iter().enumerate().skip(first).take(count) {
                    // The results of requests before a failure of the cache may arrive only now.
                    if fua || !self.has_cache_failed {
                        self.done[slot] = self.done[slot].max(*newest);
                    }
                    if fua {
                        self.flushed[slot] = self.flushed[slot].max(*newest);
                        self.ghosts[slot].retain(|(seen, _)| newest <= seen);
                    }
                }
                if fua {
                    self.border();
                }
            }
            Ask::Flush => {
                for (slot, flushed) in self.flushed.iter_mut().enumerate() {
                    if newest[slot] >= self.sure_from[slot] && newest[slot] > *flushed {
                        *flushed = newest[slot];
                        self.ghosts[slot].retain(|(seen, _)| newest[slot] <= *seen);
                    }
                }
                self.border();
            }
            Ask::Percent(percent) => self.percents = vec![percent],
        }
    }

    /// The same, for a target whose requests may pass it by at any time.
    pub fn forgetting(mut self, forgets: bool) -> Model {
        self.forgets = forgets;
        self
    }

    /// A request failed: it may have had an effect, or not.
    pub fn failed(&mut self, id: u32) {
        let Some((ask, _)) = self.pending.remove(&id) else { return };
        if self.forgets && matches!(ask, Ask::Flush | Ask::Write { fua: true, .. }) {
            self.owes_doubt = false;
            self.sure_from = self.versions.iter().map(Vec::len).collect();
        }
    }

    /// A write to the cache's disk, or to the origin, failed.
    pub fn write_failed(&mut self) {
        self.has_ghosts = self.forgets;
    }

    /// From here on a power cut leaves at least what is flushed now.
    fn border(&mut self) {
        let newest = self.newest();
        self.intervals.last_mut().unwrap().newest = Some(newest);
        self.intervals.push(Interval { oldest: self.flushed.clone(), newest: None });
    }

    /// The cache's disk has failed: unflushed data may be lost.
    pub fn cache_failed(&mut self) {
        self.done.clone_from(&self.flushed);
        self.has_cache_failed = true;
    }

    /// A kernel wrote and flushed, once for each slot.
    pub fn elsewhere_wrote(&mut self, writes: &[(usize, u64)]) {
        self.is_pure = false;
        for &(slot, stamp) in writes {
            self.versions[slot].push(stamp);
            let newest = self.versions[slot].len() - 1;
            self.done[slot] = newest;
            self.flushed[slot] = newest;
            self.border();
        }
        self.next_version += 1;
    }

    /// Clients see what the crash left: versions beyond never were.
    pub fn show(&mut self) {
        for (slot, now) in std::mem::take(&mut self.left).into_iter().enumerate() {
            let gone = self.versions[slot].split_off(now + 1);
            if self.has_ghosts {
                self.ghosts[slot].extend(gone.into_iter().map(|stamp| (now, stamp)));
            }
            self.sure_from[slot] = self.sure_from[slot].min(now + 1);
        }
        for interval in &mut self.intervals {
            let newest = interval.newest.iter_mut().flatten();
            for (newest, versions) in newest.zip(&self.versions) {
                *newest = (*newest).min(versions.len() - 1);
            }
        }
    }

    /// A crash left these contents. The next attach shows them; but of a dead process, another
    /// version may still be what a power cut leaves, until an attach has settled that.
    pub fn adopt(&mut self, found: &[u64], is_power_cut: bool) {
        self.pending.clear();
        self.flushes.clear();
        self.left.clear();
        // For such a target the origin's present content counts.
        self.claims_consistent &= !self.forgets;
        self.has_ghosts &= !is_power_cut;
        if std::mem::take(&mut self.owes_doubt) && !is_power_cut {
            self.sure_from = self.versions.iter().map(Vec::len).collect();
        }
        for (slot, &stamp) in found.iter().enumerate() {
            let oldest = if is_power_cut { self.flushed[slot] } else { self.done[slot] };
            let versions = &self.versions[slot];
            let now = versions[oldest..].iter().rposition(|version| *version == stamp);
            let now = now.map_or(versions.len(), |now| oldest + now);
            if now == versions.len() {
                debug_assert!(self.is_ghost(slot, stamp), "it was not allowed");
                self.versions[slot].push(stamp);
            }
            if is_power_cut {
                self.ghosts[slot].clear();
            }
            self.left.push(now);
            self.done[slot] = now;
            if is_power_cut {
                self.flushed[slot] = now;
            }
        }
        if is_power_cut {
            self.show();
            self.border();
        }
    }

    /// A process died, and clients have seen what the next one shows.
    pub fn left(&mut self, found: &[u64]) {
        self.adopt(found, false);
        self.show();
    }

    /// Whether a slot may show `stamp` after a power cut, or after the death of the process.
    pub fn may_show(&self, slot: usize, stamp: u64, is_power_cut: bool) -> bool {
        let oldest = if is_power_cut { self.flushed[slot] } else { self.done[slot] };
        self.is_since(slot, oldest, stamp)
    }

    /// Whether `stamp` may be what a slot has had since its version `oldest`.
    pub fn is_since(&self, slot: usize, oldest: usize, stamp: u64) -> bool {
        self.versions[slot][oldest..].contains(&stamp) || self.is_ghost(slot, stamp)
    }

    fn is_ghost(&self, slot: usize, stamp: u64) -> bool {
        self.ghosts[slot].iter().any(|ghost| ghost.1 == stamp)
    }

    pub fn origin_write(&mut self, id: u32, slots: &[(usize, u64)]) {
        for &(slot, stamp) in slots {
            self.origin[slot].in_flight.push((id, stamp));
        }
    }

    /// The end of a write or flush of the origin.
    pub fn origin_done(&mut self, id: u32, is_good: bool) {
        if let Some(upto) = self.flushes.remove(&id) {
            for slot in &mut self.origin {
                if is_good {
                    slot.flush(upto);
                } else {
                    slot.later.iter_mut().for_each(|entry| entry.2 = true);
                }
            }
            self.owes_doubt |= !is_good && self.forgets;
            return;
        }
        self.newest_write += 1;
        if !is_good {
            self.write_failed();
        }
        for slot in &mut self.origin {
            while let Some(place) = slot.in_flight.iter().position(|entry| entry.0 == id) {
                let (_, stamp) = slot.in_flight.remove(place);
                if is_good {
                    slot.later.push((self.newest_write, stamp, false));
                } else {
                    // It may have arrived or not, and no flush settles which.
                    let before = slot.later.last().map_or(slot.durable, |entry| entry.1);
                    slot.later.push((self.newest_write, stamp, true));
                    slot.later.push((self.newest_write, before, true));
                }
            }
        }
    }

    pub fn origin_gone(&mut self, id: u32) {
        self.flushes.remove(&id);
        for slot in &mut self.origin {
            slot.in_flight.retain(|entry| entry.0 != id);
        }
    }

    pub fn origin_flush(&mut self, id: u32) {
        self.flushes.insert(id, self.newest_write);
    }

    pub fn is_origin_flush(&self, id: u32) -> bool {
        self.flushes.contains_key(&id)
    }

    /// Whether what the server says of the origin is true.
    pub fn claim_holds(&self) -> Result<(), String> {
        if self.claims_consistent { self.origin_alone() } else { Ok(()) }
    }

    /// Whether everything that the origin may hold is a state that a power cut could have left
    /// of a device without cache: one interval must explain all slots.
    pub fn origin_alone(&self) -> Result<(), String> {
        let explains = |interval: &Interval, slot: usize| {
            let versions = &self.versions[slot];
            let newest = interval.newest.as_ref().map_or(versions.len() - 1, |newest| newest[slot]);
            let allowed = &versions[interval.oldest[slot]..=newest];
            self.origin[slot]
                .possible()
                .all(|stamp| allowed.contains(&stamp) || self.is_ghost(slot, stamp))
        };
        let is_fine = self
            .intervals
            .iter()
            .rev()
            .any(|interval| (0..SLOTS).all(|slot| explains(interval, slot)));
        if is_fine {
            return Ok(());
        }
        let nearest = self.intervals.iter().rev().map(|interval| {
            let slots = (0..SLOTS).filter(|&slot| !explains(interval, slot)).collect::<Vec<_>>();
            (slots, interval)
        });
        let Some((slots, interval)) = nearest.min_by_key(|(slots, _)| slots.len()) else {
            return Ok(());
        };
        let versions = |slot: usize| -> Vec<_> {
            let place = |stamp| self.versions[slot].iter().rposition(|other| *other == stamp);
            self.origin[slot].possible().map(place).collect()
        };
        let slot = slots[0];
        Err(format!(
            "the origin alone is no state of any flush: the nearest interval does not explain \
             slots {slots:?}; slot {slot} may hold versions {:?}, and needs {} to {:?}",
            versions(slot),
            interval.oldest[slot],
            interval.newest.as_ref().map(|newest| newest[slot])
        ))
    }
}
