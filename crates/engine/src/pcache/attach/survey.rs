//! The one walk over the whole log before a cache serves: it checks every key, finds which segments
//! are in use, and puts keys that only the cache has into the index. read.rs does the work on the
//! keys; this file adds up and judges the results.
//!
//! A short log goes into the index completely while it is checked, and is read once. The rest of a
//! long one, which can only be clean data, is left to the running cache (replay.rs), which reads it
//! a second time: putting a key into the index takes several times as long as checking it, and
//! requests should not wait for clean data.

use crate::base::attaching::AttachProgress;
use crate::error::{Error, Result};
use crate::pcache::args::LogDamage;

use super::read::{Batch, Counts, Headers, Rules, Run, Sharing, Told};
use super::replay::Replay;
use super::structures::{Structures, has_data_crc};
use super::walk::{Walk, damage_behind, outline};
use crate::pcache::datacrc::DataCrcs;
use crate::pcache::index::Index;
use crate::pcache::keylog::KeyCounts;
use crate::pcache::layout::Position;
use crate::pcache::media::Media;
use crate::pcache::segment::Segments;

/// The results of the survey of the log.
#[derive(Debug)]
pub struct Replayed {
    /// Logical block -> place: at least for all data that only the cache has.
    pub index: Index,
    /// Keys that are still to be replayed into it.
    pub rest: Option<Replay>,
    /// Checksums of data, with `data_crc`.
    pub crcs: Option<DataCrcs>,
    /// The end of the log.
    pub head: Position,
    /// Where collection continues; not the medium's key_tail after damage before dirty_tail.
    pub key_tail: Position,
    /// Where write-back continues.
    pub dirty_tail: Position,
    /// Counts of its keys.
    pub counts: Counts,
    /// The last position in the log after a CLEAN key that other keys hide: the CLEAN key may be
    /// older than these (a kernel whose append failed wrote it), and must not outlive them.
    pub hidden_until: Option<Position>,
    /// Whether there are keys at or after dirty_tail and after the last flush mark.
    pub is_unmarked: bool,
    /// Until write-back has reached this position, the state of the backing device alone does not
    /// match any flush.
    pub torn_until: Option<Position>,
    /// Whether flush marks are known to exist from `marks_from` on.
    pub has_met_marks: bool,
    /// Defects that were tolerated.
    pub notes: Vec<String>,
}

/// How the log is to be read.
pub struct Reading<'a> {
    /// Bytes of the backing device; no key reaches beyond them.
    pub backing_bytes: u64,
    /// What to do about damage.
    pub log_damage: LogDamage,
    /// A log of at most this many keys is replayed completely.
    pub at_once_max: u64,
    /// Clean data is older than the backing device: only dirty data counts.
    pub drops_clean: bool,
    /// How threads share the reading.
    pub sharing: Sharing,
    /// Makes an empty index.
    pub new_index: &'a dyn Fn() -> Index,
    /// Receives the progress.
    pub progress: &'a AttachProgress,
}

/// Walks the log: checks every key, finds the segments in use, and puts into an index the keys
/// whose data only the cache has, or all keys of a short log. The rest is left to
/// [`Replayed::finish`] or to the running cache.
pub fn survey(media: &Media, found: &Structures, reading: &Reading<'_>) -> Result<Replayed> {
    reading.progress.begin("keys of the log", 0);
    let mut notes = Vec::new();
    let tails = match reading.drops_clean {
        false => (found.key_tail.position, found.dirty_tail.position),
        true => {
            let (_, dirty_tail) = believable_tails(media, found, &mut notes)?;
            (dirty_tail, dirty_tail)
        }
    };
    let mut out = Replayed { notes, ..Replayed::new(found, (reading.new_index)(), tails) };
    let surveyed = Survey::new(media, found, reading, &mut out).walk();
    let has_met = surveyed.as_ref().map_or_else(|(_, has_met)| *has_met, |_| true);
    let is_whole = if has_met {
        surveyed.map_err(|(error, _)| error)?
    } else {
        let mut notes = Vec::new();
        let tails = believable_tails(media, found, &mut notes)?;
        out = Replayed { notes, ..Replayed::new(found, (reading.new_index)(), tails) };
        let again = Survey::new(media, found, reading, &mut out).walk();
        again.map_err(|(error, _)| error)?
    };
    if let Some(until) = out.torn_until {
        out.notes.push(format!(
            "the backing device alone is not consistent until write-back has reached {until}"
        ));
    }
    // If all keys are dirty, no key is left.
    out.rest = (out.counts.keys_left > 0 && !is_whole && !reading.drops_clean)
        .then(|| Replay::new(out.key_tail, out.head, out.counts.keys, out.index.sibling()));
    Ok(out)
}

/// The tails to continue from: the medium's own where the log confirms them.
fn believable_tails(
    media: &Media,
    found: &Structures,
    notes: &mut Vec<String>,
) -> Result<(Position, Position)> {
    let (key_tail, dirty_tail) = (found.key_tail.position, found.dirty_tail.position);
    let from_key = outline(media, &found.segments, key_tail, dirty_tail)?;
    if from_key.has_met {
        return Ok((key_tail, dirty_tail));
    }
    let from_dirty = outline(media, &found.segments, dirty_tail, key_tail)?;
    if from_dirty.has_met {
        // An older copy of dirty_tail won. The data in between was written back already.
        notes.push(format!(
            "dirty_tail {dirty_tail} is behind key_tail {key_tail}: all data in the log counts as \
             dirty"
        ));
        return Ok((key_tail, key_tail));
    }
    if !from_key.is_clean && (from_dirty.records > 0 || from_dirty.is_clean) {
        notes.push(format!(
            "log damaged at {}, before dirty_tail {dirty_tail}: clean data between them is \
             dropped, and no dirty data is affected",
            from_key.end
        ));
        return Ok((dirty_tail, dirty_tail));
    }
    Err(media.damaged(format_args!(
        "log ends at {} without passing dirty_tail {dirty_tail}: dirty data cannot be found",
        from_key.end
    )))
}

struct Survey<'a> {
    media: &'a Media,
    segments: &'a Segments,
    reading: &'a Reading<'a>,
    /// Segments that current keys point into, with the first such key's place in the log.
    targets: Vec<Option<Position>>,
    /// How many do.
    references: Vec<u32>,
    /// The segments of the log.
    is_log: Vec<bool>,
    /// The label's record of write-back that was merging across flushes.
    torn_until: Option<Position>,
    marks_from: Option<Position>,
    is_dirty: bool,
    out: &'a mut Replayed,
}

impl<'a> Survey<'a> {
    fn new(
        media: &'a Media,
        found: &'a Structures,
        reading: &'a Reading<'a>,
        out: &'a mut Replayed,
    ) -> Survey<'a> {
        let count = found.segments.count() as usize;
        let label = found.label.as_ref().map(|(label, _)| label);
        let mut is_log = vec![false; count];
        is_log[out.key_tail.segment as usize] = true;
        Survey {
            media,
            segments: &found.segments,
            reading,
            targets: vec![None; count],
            references: vec![0; count],
            is_log,
            torn_until: label.and_then(|label| label.torn_until),
            marks_from: label.map(|label| label.marks_from),
            is_dirty: false,
            out,
        }
    }

    /// The whole walk; whether the whole log is in the index. An error comes with whether
    /// dirty_tail was passed before; the end of a log without it is one.
    fn walk(mut self) -> std::result::Result<bool, (Error, bool)> {
        let is_whole = self.keys().map_err(|error| (error, self.is_dirty))?;
        if !self.is_dirty {
            let what = format_args!("log ends at {} without dirty_tail", self.out.head);
            return Err((self.media.damaged(what), false));
        }
        self.check_end(self.reading.log_damage)
            .and_then(|()| self.finish())
            .map(|()| is_whole)
            .map_err(|error| (error, true))
    }

    fn headers(&self) -> Headers<'a> {
        let (from, dirty_tail) = (self.out.key_tail, self.out.dirty_tail);
        Headers::new(self.media, self.segments, from, dirty_tail)
    }

    /// Every record up to the log's end, a batch at a time.
    fn keys(&mut self) -> Result<bool> {
        let drops_clean = self.reading.drops_clean;
        let at_once_max = if drops_clean { 0 } else { self.reading.at_once_max };
        let rules = Rules {
            media: self.media,
            segments: self.segments,
            backing_bytes: self.reading.backing_bytes,
            is_whole: at_once_max == u64::MAX
                || at_once_max > 0 && self.headers().has_at_most(at_once_max),
            has_crcs: self.out.crcs.is_some(),
        };
        let mut headers = self.headers();
        let mut batch = Batch::new(self.reading.sharing);
        loop {
            let end_of_headers = batch.fill(&mut headers);
            let stop = batch.check(&rules);
            let passed = stop.as_ref().map_or(batch.records.len(), |(nth, _)| *nth);
            batch.records[..passed].iter().for_each(|record| self.pass(record));
            let end = match stop {
                Some((nth, end)) => {
                    self.come_to(batch.records[nth].position, batch.records[nth].is_dirty);
                    Some(end)
                }
                None => end_of_headers.inspect(|_| {
                    self.come_to(headers.position, headers.is_dirty);
                }),
            };
            if let Some(Err(error)) = end {
                return Err(error);
            }
            batch.found().for_each(|(counts, runs)| self.count(counts, runs));
            let hidden_until = batch.put(self.segments, &self.out.index, self.out.crcs.as_ref());
            self.out.hidden_until = hidden_until.or(self.out.hidden_until);
            self.reading.progress.has_come_to(self.out.counts.keys);
            if end.is_some() {
                return Ok(rules.is_whole);
            }
        }
    }

    /// The walk has reached a position, which may be the log's end.
    fn come_to(&mut self, position: Position, is_dirty: bool) {
        self.is_dirty = is_dirty;
        if is_dirty {
            self.out.has_met_marks |= Some(position) == self.marks_from;
            if position != self.out.dirty_tail && self.torn_until == Some(position) {
                self.out.torn_until = self.torn_until;
            }
        }
        self.out.head = position;
    }

    /// A record is as its header said.
    fn pass(&mut self, record: &Told) {
        self.come_to(record.position, record.is_dirty);
        if record.is_last() {
            self.is_log[record.next.segment as usize] = true;
        } else {
            self.out.is_unmarked = record.is_dirty && record.has_keys();
        }
    }

    fn count(&mut self, counts: &Counts, runs: &[Run]) {
        self.out.counts.add(counts);
        for run in runs {
            self.targets[run.segment as usize].get_or_insert(run.position);
            self.references[run.segment as usize] += run.keys;
        }
    }

    /// A log that ends in something other than zeroes ends in a torn append, or in damage. It is
    /// damage if a record follows that was appended later.
    fn check_end(&mut self, log_damage: LogDamage) -> Result<()> {
        let end = self.out.head;
        if Walk::new(self.media, self.segments, end).ends_cleanly() {
            return Ok(());
        }
        let Some(what) = damage_behind(self.media, self.segments, end)? else { return Ok(()) };
        match log_damage {
            LogDamage::Truncate => {
                // It is unknown how far write-back had got into what is lost.
                if self.torn_until.is_some()
                    && self.out.torn_until.is_none()
                    && end != self.out.dirty_tail
                {
                    self.out.torn_until = Some(end);
                }
                self.out.notes.push(what);
                Ok(())
            }
            LogDamage::Refuse => Err(self.media.damaged(format_args!(
                "{what}; to continue without them, add `log_damage truncate` to the table"
            ))),
        }
    }

    /// Marks the log's segments and makes sure that no key points into the log.
    fn finish(self) -> Result<()> {
        for (segment, _) in self.is_log.iter().enumerate().filter(|(_, is_log)| **is_log) {
            if let Some(position) = self.targets[segment] {
                return Err(self.media.damaged(format_args!(
                    "log at {position}: a key points into segment {segment}, which holds the log"
                )));
            }
            self.segments.mark_log(segment as u32);
        }
        for (segment, references) in (0..).zip(self.references) {
            if references > 0 {
                self.segments.mark_data(segment);
                self.segments.reference_many(segment, references);
            }
        }
        Ok(())
    }
}

impl Replayed {
    fn new(found: &Structures, index: Index, tails: (Position, Position)) -> Replayed {
        let (key_tail, dirty_tail) = tails;
        let count = found.segments.count();
        Replayed {
            index,
            crcs: has_data_crc(&found.info.record).then(|| DataCrcs::new(count)),
            head: key_tail,
            key_tail,
            dirty_tail,
            counts: Counts::default(),
            hidden_until: None,
            is_unmarked: false,
            torn_until: None,
            has_met_marks: false,
            notes: Vec::new(),
            rest: None,
        }
    }

    /// How many keys the log has.
    pub fn key_counts(&self) -> KeyCounts {
        self.counts.of_log()
    }

    /// Replays all remaining keys in one step. No requests are served yet.
    pub fn finish(&mut self, media: &Media, segments: &Segments) -> Result<()> {
        let Some(mut rest) = self.rest.take() else { return Ok(()) };
        rest.read(media, segments, self.crcs.as_ref(), u64::MAX).map_err(|status| {
            media.damaged(format_args!("cannot read the log a second time: {status}"))
        })?;
        (self.index, self.hidden_until) = rest.into_parts();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
