//! writecache's media, read and written by hand from the format's specification, as a kernel would:
//! the data that a kernel would show, and the state that it may leave.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::elsewhere::What;
use crate::model::{Model, ORIGIN_BYTES, SECTOR, SLOTS, fill, offset_of, stamp_of};
use crate::sim::SimMedium;

const MAGIC: u32 = 0x2348_9321;
const FREE: u64 = u64::MAX;

/// The media that a kernel finds when it activates the target.
struct Media<'a> {
    sim: &'a SimMedium,
    start: u64,
    block: u64,
    data_at: u64,
    /// S.
    counter: u64,
    /// Sector and number of each entry.
    entries: Vec<(u64, u64)>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

impl<'a> Media<'a> {
    /// `None`: it is not a cache.
    fn read(sim: &'a SimMedium, start: u64, block: u64) -> Option<Media<'a>> {
        let mut superblock = [0; 64];
        sim.read(start, &mut superblock);
        if word(&superblock, 0) != u64::from(MAGIC) | 1 << 32 {
            return None;
        }
        let blocks = word(&superblock, 16);
        let mut bytes = vec![0; 16 * blocks as usize];
        sim.read(start + 64, &mut bytes);
        let entry = |bytes: &[u8]| (word(bytes, 0), word(bytes, 8));
        Some(Media {
            sim,
            start,
            block,
            data_at: (64 + 16 * blocks).next_multiple_of(block),
            counter: word(&superblock, 24),
            entries: bytes.chunks_exact(16).map(entry).collect(),
        })
    }

    fn place(&self, nth: usize) -> u64 {
        self.start + self.data_at + nth as u64 * self.block
    }

    /// The newest live entry of each sector.
    fn newest(&self) -> Result<BTreeMap<u64, usize>, String> {
        let mut newest = BTreeMap::new();
        for (nth, &(sector, seq)) in self.entries.iter().enumerate() {
            if seq >= self.counter {
                continue;
            }
            let other = newest.entry(sector).or_insert(nth);
            if *other != nth && self.entries[*other].1 == seq {
                return Err(format!("two identical entries, position {nth}, sector {sector}"));
            }
            if self.entries[*other].1 < seq {
                *other = nth;
            }
        }
        Ok(newest)
    }
}

/// A kernel that attached now would not show data older than the flushed data either.
pub fn kernel_reads(
    sim: &Arc<SimMedium>,
    start: u64,
    block: u64,
    model: &Model,
) -> Result<(), String> {
    let Some(media) = Media::read(sim, start, block) else {
        let what = || Err("a kernel does not take it for a cache".into());
        return if model.is_labelled { what() } else { Ok(()) };
    };
    let newest = media.newest()?;
    for (&sector, _) in newest.iter().filter(|_| model.is_pure) {
        if sector >= ORIGIN_BYTES / 512 || sector % (block / 512) != 0 {
            return Err(format!("a live entry is for sector {sector}"));
        }
    }
    for slot in 0..SLOTS {
        let sector = offset_of(slot) / 512;
        let first = sector / (block / 512) * (block / 512);
        let bad = match newest.get(&first) {
            Some(nth) => {
                let mut bytes = [0; SECTOR];
                media.sim.read(media.place(*nth) + (sector - first) * 512, &mut bytes);
                let stamp = stamp_of(&bytes);
                !stamp.is_some_and(|stamp| model.may_show(slot, stamp, true))
            }
            None => model.origin[slot].possible().any(|stamp| !model.may_show(slot, stamp, true)),
        };
        if bad {
            let cached = newest.contains_key(&first);
            return Err(format!("a kernel would show slot {slot} wrongly (cached: {cached})"));
        }
    }
    Ok(())
}

/// A kernel's changes of the media; returns the slots that got new versions, in order.
pub fn change(
    sim: &SimMedium,
    start: u64,
    block: u64,
    what: What,
    model: &mut Model,
) -> Vec<(usize, u64)> {
    let Some(mut media) = Media::read(sim, start, block) else { return Vec::new() };
    let block_slots = (block / 512) as usize;
    let wrote = match what {
        What::TwoFlushes { first, second } => {
            media.activate();
            // Blocks of more than a sector would need what the rest of them holds.
            let slots = if block_slots == 1 { vec![first, second] } else { Vec::new() };
            let mut wrote = Vec::new();
            for (nth, slot) in slots.into_iter().enumerate() {
                if nth == 1 && slot == first {
                    continue;
                }
                let stamp = model.next_stamp(slot, false);
                if media.add(slot, media.counter, stamp) {
                    media.commit();
                    wrote.push((slot, stamp));
                }
            }
            wrote
        }
        What::Uncommitted { first, beyond } => {
            let seq = (media.counter + beyond).min(FREE - 1);
            media.add(first / block_slots * block_slots, seq, 0xA5A5_A5A5);
            Vec::new()
        }
        What::OlderVersion { slot } => {
            let slot = slot / block_slots * block_slots;
            let sector = offset_of(slot) / 512;
            let live = media.entries.iter().find(|(of, seq)| *of == sector && *seq < media.counter);
            if let Some(older) = live.and_then(|(_, seq)| seq.checked_sub(1)) {
                media.add(slot, older, 0xA5A5_A5A5);
            }
            Vec::new()
        }
        What::StaleKeys | What::CleanBehindDirty { .. } => unreachable!("no writecache"),
    };
    model.elsewhere_wrote(&wrote);
    wrote
}

impl Media<'_> {
    /// Uncommitted entries and superseded entries are marked free, before the first commit could
    /// make them live.
    fn activate(&mut self) {
        let newest = self.newest().unwrap_or_default();
        for nth in 0..self.entries.len() {
            let (sector, seq) = self.entries[nth];
            let is_superseded = newest.get(&sector).is_some_and(|of| self.entries[*of].1 > seq);
            if seq != FREE && (seq >= self.counter || is_superseded) {
                self.mark(nth, FREE);
            }
        }
    }

    fn mark(&mut self, nth: usize, seq: u64) {
        self.entries[nth].1 = seq;
        let at = (self.start + 64) as usize + 16 * nth + 8;
        self.sim.poke(at, &seq.to_le_bytes());
    }

    /// Fills a free block with `stamp`. `false`: there is none.
    fn add(&mut self, slot: usize, seq: u64, stamp: u64) -> bool {
        let Some(nth) = self.entries.iter().rposition(|entry| entry.1 == FREE) else {
            return false;
        };
        let mut data = vec![0; self.block as usize];
        fill(&mut data, stamp);
        self.sim.poke(self.place(nth) as usize, &data);
        let sector = offset_of(slot) / 512;
        self.entries[nth].0 = sector;
        self.sim.poke((self.start + 64) as usize + 16 * nth, &sector.to_le_bytes());
        self.mark(nth, seq);
        true
    }

    fn commit(&mut self) {
        self.counter += 1;
        self.sim.poke(self.start as usize + 24, &self.counter.to_le_bytes());
    }
}
