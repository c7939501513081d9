//! Test cases for the tests of schedules (`crate::schedules` runs them): a few threads on a cache
//! so small that all of them collide, judged by the data that clients may see and by the accounts.
//!
//! `fixture` is the cache that the test cases need. `whole` has test cases of a whole cache with
//! its device and in-process callers, `parts` has test cases of single modules.

mod fixture;
mod parts;
mod whole;

use super::Pcache;
use super::keylog::{LogReader, after};
use super::layout::{KEY_CLEAN, Key, Record};
use crate::schedules::Case;

/// All of them.
pub(crate) const CASES: &[Case] = &[
    Case { name: "spaces", play: parts::spaces, times: 8 },
    Case { name: "checks", play: parts::checks, times: 4 },
    Case { name: "rows", play: parts::rows, times: 8 },
    Case { name: "room", play: parts::room, times: 4 },
    Case { name: "overlap", play: whole::overlap, times: 1 },
    Case { name: "reuse", play: whole::reuse, times: 1 },
    Case { name: "fills", play: whole::fills, times: 1 },
    Case { name: "full", play: whole::full, times: 4 },
    Case { name: "zeroes", play: whole::zeroes, times: 1 },
    Case { name: "shared", play: whole::shared, times: 2 },
    Case { name: "alone", play: whole::alone, times: 2 },
    Case { name: "sleep", play: whole::sleep, times: 2 },
    Case { name: "suspend", play: whole::suspend, times: 1 },
    Case { name: "rest", play: whole::rest, times: 2 },
    Case { name: "damage", play: whole::damage, times: 2 },
    Case { name: "late", play: whole::late, times: 1 },
    Case { name: "joins", play: whole::joins, times: 2 },
    Case { name: "cut", play: whole::cut, times: 1 },
    Case { name: "dies", play: whole::dies, times: 1 },
    Case { name: "moves", play: whole::moves, times: 2 },
];

impl Pcache {
    /// The errors in the accounts, if there are any. No thread is at work.
    fn audit(&self) -> Result<(), String> {
        let work = self.background.lock();
        if work.writeback.is_stuck() || self.collector.lock().is_stuck() {
            return Err("the background takes the log for damaged".to_string());
        }
        drop(work);
        let mut open = Vec::new();
        for stripe in 0..self.stripes.open().stripes() {
            self.stripes.open().collect(stripe, &mut open);
        }
        let mut segments: Vec<u32> = open.iter().map(|key| key.segment.get()).collect();
        segments.extend(self.zeroes.segment());
        open.iter().try_for_each(|key| self.audit_crc(key))?;
        let is_dirty = |key: &&Key| key.flags.get() & KEY_CLEAN == 0;
        let bytes = |keys: &[Key]| {
            keys.iter().filter(is_dirty).map(|key| u64::from(key.len.get())).sum::<u64>()
        };
        let mut dirty = bytes(&open);
        let (head, mut is_behind) = (self.log.head(), false);
        let mut at = self.log.key_tail();
        let mut reader = LogReader::default();
        loop {
            is_behind |= at == self.log.dirty_tail();
            if at == head {
                break;
            }
            let record = reader.read(&self.media, &self.segments, at, Some(head));
            let record = record.ok().flatten().ok_or_else(|| format!("the log ends at {at}"))?;
            if let Record::Keys(keys) = &record {
                let live = |key: &&Key| {
                    self.segments.generation(key.segment.get()) == key.generation.get()
                };
                keys.iter().filter(live).try_for_each(|key| self.audit_crc(key))?;
                segments.extend(keys.iter().filter(live).map(|key| key.segment.get()));
                dirty += if is_behind { bytes(keys) } else { 0 };
            }
            at = after(at, &record);
        }
        if !is_behind {
            return Err(format!("dirty_tail {} is not in the log", self.log.dirty_tail()));
        }
        if dirty != self.stripes.dirty_bytes() {
            return Err(format!(
                "{} bytes count as dirty, but {dirty} are",
                self.stripes.dirty_bytes()
            ));
        }
        self.segments.audit(&segments)
    }

    /// A key's data must have a known checksum wherever a read needs it.
    fn audit_crc(&self, key: &Key) -> Result<(), String> {
        let (segment, offset) = (key.segment.get(), key.segment_off.get());
        match &self.crcs {
            Some(crcs) if crcs.crc_at(segment, offset) != Some(key.data_crc.get()) => {
                Err(format!("the checksum of segment {segment}, byte {offset} is not known"))
            }
            _ => Ok(()),
        }
    }
}
