//! Read-only recovery of a cache that must not be changed: its dirty data for the backing device,
//! by reading alone.
//!
//! Only dirty data counts: the backing device also has the clean data. So the log is followed from
//! dirty_tail on, and each key that is not CLEAN names the newest data of its range. If a device
//! was cut short, segments at its end are missing, whole or in part:
//!
//! 1. The chain of segments leads from one to the next and ends at the first missing one. Later
//!    segments cannot be located: data that a key names there is lost.
//! 2. Dirty data in a segment whose generation cannot be read is lost, not stale: collection never
//!    passes dirty data.
//! 3. If the log itself continues in the missing part, the blocks with newer data are unknown. That
//!    is refused, unless the user gives `log_damage truncate`.
//! 4. Writes that a dead server had acknowledged and not logged are in memory, and are found there
//!    in the same way as in an attach. The memory is not changed.

use crate::base::attaching::AttachProgress;
use crate::disk::{Disk, DiskLimits};
use crate::error::{Error, Kind, Result};
use crate::pmem::Pmem;
use crate::pmem::rest::Rest;
use crate::recovery::{Cut, Recovery, Sum};
use crate::shm::SharedStore;
use crate::sync::Arc;
use crate::units::{SECTOR, human_bytes};

use super::args::{LogDamage, TableArgs};
use super::attach::{
    Reading, Sharing, Step, Structures, Walk, damage_behind, difference, has_data_crc, load_info,
    load_structures, outline, survey,
};
use super::backing::Backing;
use super::index::Index;
use super::key::check_key;
use super::layout::{Geometry, KEY_CLEAN, Key, Position};
use super::media::{Media, missing};
use super::memory::its_memory;
use super::openset::{self, LeftBehind, OpenSets};
use super::segment::Segments;

/// How much of the pcache on `pmem` is missing, if it is a pcache that was cut short; and whether
/// its keys have checksums.
pub fn cut_of(pmem: &Arc<dyn Pmem>, geometry: Geometry) -> Option<(Cut, bool)> {
    let media = Media { pmem: Arc::clone(pmem), geometry, shared: None };
    let cut = missing(&media)?;
    let has_crc = load_info(&media).is_ok_and(|info| has_data_crc(&info.record));
    Some((cut, has_crc))
}

/// The dirty data that the cache on `pmem` has for its backing device.
pub fn recover(
    args: &TableArgs,
    pmem: Arc<dyn Pmem>,
    shared_store: &SharedStore,
    geometry: Geometry,
    backing: &Arc<dyn Disk>,
) -> Result<Recovery> {
    let limits = backing.limits();
    let mut media = Media { pmem, geometry, shared: None };
    let cut = missing(&media);
    if let Some(cut) = cut {
        media.pmem = match cut.left_bytes < media.pmem.left_bytes() {
            true => Rest::of_cut(media.pmem, cut.left_bytes),
            false => Rest::of(media.pmem, cut.wanted_bytes),
        };
    }
    let mut notes: Vec<String> = cut.iter().map(ToString::to_string).collect();
    media.shared = its_memory(&media, shared_store, args.accepts_loss, &mut notes)?;
    let found = load_structures(&media)?;
    let binding = Backing::of(backing, &found);
    binding.check_binding(&media, &found, args)?;
    let mut out = Recovery::new(Arc::clone(&media.pmem));
    out.notes = notes;
    let mut recoverer = Recoverer { args, media: &media, found: &found, cut, limits, out };
    let log = recoverer.log()?;
    recoverer.memory(&log)?;
    let (dirty, lost) = (recoverer.out.dirty_bytes(), recoverer.out.lost_bytes());
    if dirty + lost > 0 {
        binding.check(args, dirty + lost)?;
    }
    Ok(recoverer.out)
}

struct Recoverer<'a> {
    args: &'a TableArgs,
    media: &'a Media,
    found: &'a Structures,
    cut: Option<Cut>,
    limits: &'a DiskLimits,
    out: Recovery,
}

/// How the log was followed.
struct Log {
    end: Position,
    /// Whether it continues, but cannot be read further.
    is_torn: bool,
}

impl Recoverer<'_> {
    fn segments(&self) -> &Segments {
        &self.found.segments
    }

    /// The content of the log, from dirty_tail to its end.
    fn log(&mut self) -> Result<Log> {
        let label = self.found.label.as_ref().map(|(label, _)| label);
        for bad in label.iter().flat_map(|label| &label.bad) {
            let size = self.limits.size_bytes;
            let (start, len) = (bad.offset.get().min(size), bad.len.get());
            self.out.lose(start, len.min(size - start));
        }
        let from = match self.cut {
            // An attach refuses keys whose data is gone. Here each such key is lost separately.
            None if self.media.pmem.hole_at_end().is_some() => {
                self.whole_log().unwrap_or_else(|_| self.tail_of_rest())
            }
            None => self.whole_log()?,
            Some(_) => self.tail_of_rest(),
        };
        let (end, torn) = self.follow(from)?;
        let Some(what) = torn else { return Ok(Log { end, is_torn: false }) };
        let why = match self.cut {
            Some(cut) => format!("{cut}; {what}"),
            None => what,
        };
        let what = format!("{why}: it is unknown which data after this is dirty");
        if self.args.log_damage == LogDamage::Refuse {
            return Err(self.media.damaged(format_args!(
                "{what}; to continue without the rest of the log, add `log_damage truncate` to the \
                 table: reads may then return older data"
            )));
        }
        self.out.has_more = true;
        self.out.notes.push(format!("{what}; READS MAY RETURN OLDER DATA, in unknown places"));
        Ok(Log { end, is_torn: true })
    }

    /// Checks the log as an attach does. Returns where dirty keys begin.
    fn whole_log(&mut self) -> Result<Position> {
        let reading = Reading {
            backing_bytes: self.limits.size_bytes,
            log_damage: self.args.log_damage,
            at_once_max: 0,
            drops_clean: false,
            sharing: Sharing::among(1),
            new_index: &|| Index::new(0),
            progress: &AttachProgress::default(),
        };
        let replayed = survey(self.media, self.found, &reading)?;
        self.out.notes.extend(replayed.notes);
        Ok(replayed.dirty_tail)
    }

    /// The same for a device without its end. An older copy of dirty_tail may be before key_tail:
    /// then all of the log counts as dirty.
    fn tail_of_rest(&self) -> Position {
        let (key, dirty) = (self.found.key_tail.position, self.found.dirty_tail.position);
        let is_there = |at: Position| at.segment < self.segments().count();
        let leads = |from: Position, to: Position| {
            is_there(from)
                && outline(self.media, self.segments(), from, to).is_ok_and(|o| o.has_met)
        };
        if !leads(key, dirty) && leads(dirty, key) { key } else { dirty }
    }

    /// Follows the log from a position to its end, or to the first unreadable part; returns that
    /// position, and the reason.
    fn follow(&mut self, from: Position) -> Result<(Position, Option<String>)> {
        if from.segment >= self.segments().count() {
            let what = format!("the log continues at {from}, which is missing");
            return Ok((from, Some(what)));
        }
        let (media, found) = (self.media, self.found);
        let mut walk = Walk::new(media, &found.segments, from);
        let mut keys = Vec::new();
        loop {
            let at = walk.position;
            match walk.step(&mut keys) {
                Ok(Step::Last) => {}
                Ok(Step::Keys(set)) => {
                    if let Some(what) = set.iter().find_map(|key| self.key(key).err()) {
                        return Ok((at, Some(format!("log at {at}: {what}"))));
                    }
                    keys = set;
                }
                Ok(Step::End) if walk.ends_cleanly() => return Ok((at, None)),
                Ok(Step::End) => {
                    // A torn append looks like damage, and the data that tells them apart may be
                    // missing.
                    let what = match self.cut {
                        Some(_) => {
                            Some(format!("the log ends at {at} with other data than zeroes"))
                        }
                        None => damage_behind(media, &found.segments, at)?,
                    };
                    return Ok((at, what));
                }
                Err(error) => return Ok((at, Some(error.to_string()))),
            }
        }
    }

    /// A key of the log, or of memory.
    fn key(&mut self, key: &Key) -> std::result::Result<(), String> {
        if key.flags.get() & KEY_CLEAN != 0 {
            return Ok(());
        }
        let (off, len) = (key.off.get(), u64::from(key.len.get()));
        let (segment, at) = (key.segment.get(), key.segment_off.get());
        let size = self.limits.size_bytes;
        if self.is_missing(segment) {
            let is_whole = len > 0 && len % SECTOR == 0 && off % SECTOR == 0;
            if !is_whole || off.checked_add(len).is_none_or(|end| end > size) {
                return Err(format!("{len} bytes at {off} of {size}: a key is damaged"));
            }
            self.out.lose(off, len);
            return Ok(());
        }
        check_key(self.media, self.segments(), size, key)?;
        let generation = self.segments().generation(segment);
        match key.generation.get().cmp(&generation) {
            // As an attach does: a stale key removes older ones.
            std::cmp::Ordering::Less => self.out.forget(off, len),
            std::cmp::Ordering::Greater => self.out.lose(off, len),
            std::cmp::Ordering::Equal => {
                let at = self.segments().data_at(segment, at);
                if self.media.pmem.was_hole(at, len) {
                    self.out.lose(off, len);
                    return Ok(());
                }
                let has_crc = has_data_crc(&self.found.info.record);
                let sum = Sum { range: (at, len), crc: key.data_crc.get() };
                self.out.put(off, len, at, has_crc.then_some(sum));
            }
        }
        Ok(())
    }

    /// Whether a segment was one of the cache, and is gone now.
    fn is_missing(&self, segment: u32) -> bool {
        let count = self.found.info.record.n_segs.get();
        self.cut.is_some() && (self.segments().count()..count).contains(&segment)
    }

    /// The keys that a dead server left in memory.
    fn memory(&mut self, log: &Log) -> Result<()> {
        let Some(shared) = &self.media.shared else { return Ok(()) };
        let Some(left) = OpenSets::left_behind(shared)? else { return Ok(()) };
        let info = &self.found.info.record;
        if openset::has_failed(shared) {
            // Their data may be an older version: it was in flight when the medium failed.
            return self.lose_left(&left, "the cache device failed then");
        }
        if !left.knows(info) {
            let why = match left.is_ahead_of(info) {
                true => "cache_info on the medium is damaged, or this is an old copy of it",
                false => "another program has used the medium since",
            };
            return self.refuse_left(&left, why.into(), !left.is_ahead_of(info));
        }
        let end = (!log.is_torn).then_some(log.end);
        if let Some(what) = difference(self.media, self.found, end, &left) {
            let what = format!("{what}: this is an older copy of the medium of the last server");
            return self.refuse_left(&left, what, false);
        }
        for (key, _) in &left.keys {
            self.key(key).map_err(|what| {
                let what = format_args!("a key in the memory of the last server: {what}");
                self.media.damaged(what)
            })?;
        }
        Ok(())
    }

    /// Keys that the log does not have, and that must not be used.
    fn unlogged<'a>(&self, left: &'a LeftBehind) -> Vec<&'a Key> {
        let segments = self.segments();
        let is_logged = |key: &Key| {
            let segment = key.segment.get();
            segment < segments.count()
                && self.out.is_at(key.off.get(), segments.data_at(segment, key.segment_off.get()))
        };
        let keys = left.keys.iter().map(|(key, _)| key);
        keys.filter(|key| key.flags.get() & KEY_CLEAN == 0 && !is_logged(key)).collect()
    }

    /// The data of these keys is lost: older data must not be read in its place.
    fn lose_left(&mut self, left: &LeftBehind, why: &str) -> Result<()> {
        let keys = self.unlogged(left);
        let size = self.limits.size_bytes;
        let ranges = keys.iter().map(|key| (key.off.get(), u64::from(key.len.get())));
        let ranges: Vec<_> = ranges.filter(|(at, len)| at.saturating_add(*len) <= size).collect();
        if !ranges.is_empty() {
            let bytes = ranges.iter().map(|(_, len)| len).sum();
            self.out.notes.push(format!(
                "{} of acknowledged, unflushed writes of the last server are LOST: {why}",
                human_bytes(bytes)
            ));
        }
        ranges.into_iter().for_each(|(at, len)| self.out.lose(at, len));
        Ok(())
    }

    /// The memory belongs to another medium. `is_past`: its content is lost anyway.
    fn refuse_left(&mut self, left: &LeftBehind, why: String, is_past: bool) -> Result<()> {
        let keys = self.unlogged(left).len();
        if keys == 0 {
            return Ok(());
        }
        if is_past || self.args.accepts_loss || self.args.log_damage == LogDamage::Truncate {
            self.out.has_more = true;
            let what = "acknowledged, unflushed writes of the last server are LOST";
            self.out.notes.push(format!("{keys} {what}: {why}"));
            return Ok(());
        }
        Err(Error::new(
            Kind::Refused,
            format!(
                "{}: {why}, and {keys} acknowledged, unflushed writes are in shared memory; use \
                 the newest copy, or add `lost_memory accept` to the table to continue without \
                 them",
                self.media.name()
            ),
        ))
    }
}
