//! Reads the log of a cache that is being opened, one batch of records after the other, so that
//! threads can share the work.
//!
//! 1. One thread follows the log by the headers of its records ([`Headers`]). This is little work,
//!    because a record has up to 128 keys. It trusts only the length of a key set, and not even
//!    that beyond the segment; a record that leads to another segment is checked before it is
//!    followed.
//! 2. Each thread has a stretch of the batch: it loads the key sets and checks their CRCs and every
//!    key, up to the first error ([`Batch::check`]). These results are private to the thread,
//!    because the first error may be in another stretch.
//! 3. One thread adds up the results, up to the first error in the order of the log (survey.rs):
//!    some numbers for each stretch and a little work for each record, but no work for each key.
//! 4. Each thread puts the keys of its own regions into the index, in the order of the log
//!    ([`Batch::put`]), and the checksums of its own segments into their table.
//!
//! So the result depends neither on the number of threads nor on the borders of batches, and a
//! wrong header costs the reading of one batch.

use std::ops::Range;

use zerocopy::FromBytes;

use crate::base::parallel;
use crate::error::Result;
use crate::mutants::{self, Mutant};

use super::walk::check_way;
use crate::pcache::datacrc::DataCrcs;
use crate::pcache::index::Index;
use crate::pcache::key::check_key;
use crate::pcache::key::{is_stale, keep_crc, put};
use crate::pcache::keylog::KeyCounts;
use crate::pcache::layout::{
    Heading, KEY_BYTES, KEY_CLEAN, KSET_HEADER_BYTES, Key, Position, REGION_BYTES, Record,
    kset_bytes, parse_heading, parse_record,
};
use crate::pcache::media::Media;
use crate::pcache::segment::Segments;
use crate::recovery::{CUT_ADVICE, IN_HOLE};

/// Distances of prefetch, in keys: memory of the index is prefetched in two steps, and the second
/// step uses the data that the first one has loaded.
const AHEAD: [usize; 2] = [32, 16];
/// More threads than these would wait for the memory.
const THREADS_MAX: usize = 16;
/// Records that are loaded together.
const LOADED_TOGETHER: usize = 16;

/// How threads share the work.
#[derive(Clone, Copy, Debug)]
pub(in crate::pcache) struct Sharing {
    /// How many.
    pub(in crate::pcache) threads: usize,
    /// Bytes of the log that a batch has for each of them.
    pub(in crate::pcache) stretch_bytes: u32,
    /// Each must have at least this many.
    pub(in crate::pcache) stretch_bytes_min: u32,
}

impl Sharing {
    /// One thread: a batch that fits the thread's caches. Several: a batch large enough to pay for
    /// starting them.
    pub(in crate::pcache) fn among(threads: usize) -> Sharing {
        let threads = threads.clamp(1, THREADS_MAX);
        let stretch_bytes = if threads == 1 { 128 << 10 } else { 1 << 20 };
        Sharing { threads, stretch_bytes, stretch_bytes_min: 256 << 10 }
    }

    fn batch_bytes(&self) -> u32 {
        self.stretch_bytes * self.threads as u32
    }

    /// How many threads this many bytes are worth.
    fn threads_for(&self, bytes: u32) -> usize {
        ((bytes / self.stretch_bytes_min) as usize).clamp(1, self.threads)
    }
}

/// A record, as its header describes it.
#[derive(Clone, Copy, Debug)]
pub(in crate::pcache) struct Told {
    /// The position of the record.
    pub(in crate::pcache) position: Position,
    /// The position after it.
    pub(in crate::pcache) next: Position,
    /// Whether dirty_tail was passed before it.
    pub(in crate::pcache) is_dirty: bool,
    bytes: u32,
    /// Bytes of the batch up to its end.
    end: u32,
}

impl Told {
    /// Whether it is a LAST record: the log continues in another segment.
    pub(in crate::pcache) fn is_last(&self) -> bool {
        self.next.segment != self.position.segment
    }

    /// Whether it is a key set with keys.
    pub(in crate::pcache) fn has_keys(&self) -> bool {
        !self.is_last() && self.bytes > KSET_HEADER_BYTES as u32
    }

    fn begin(&self) -> u32 {
        self.end - self.bytes
    }

    fn is_before(&self, other: &Told) -> bool {
        !self.is_last() && self.next == other.position
    }
}

/// Follows the log by the headers of its records.
pub(in crate::pcache) struct Headers<'a> {
    media: &'a Media,
    segments: &'a Segments,
    /// The present position.
    pub(in crate::pcache) position: Position,
    dirty_tail: Position,
    /// Whether it has passed dirty_tail.
    pub(in crate::pcache) is_dirty: bool,
    is_log: Vec<bool>,
}

impl<'a> Headers<'a> {
    pub(in crate::pcache) fn new(
        media: &'a Media,
        segments: &'a Segments,
        from: Position,
        dirty_tail: Position,
    ) -> Headers<'a> {
        let mut is_log = vec![false; segments.count() as usize];
        is_log[from.segment as usize] = true;
        Headers { media, segments, position: from, dirty_tail, is_dirty: false, is_log }
    }

    /// The next record, if there is one.
    fn next(&mut self) -> Result<Option<Told>> {
        let position = self.position;
        self.is_dirty |= position == self.dirty_tail;
        let left = self.media.geometry.data_bytes().saturating_sub(position.offset) as usize;
        if left < KSET_HEADER_BYTES {
            // A key set without space for its end; the check of its content reports it.
            return Ok(None);
        }
        let mut header = [0; KSET_HEADER_BYTES];
        load(self.media, self.segments, position, &mut header)?;
        let (bytes, next) = match parse_heading(&header) {
            None => return Ok(None),
            Some(Heading::Last(segment)) => {
                check_way(self.media, &mut self.is_log, position, segment)?;
                (KSET_HEADER_BYTES, Position { segment, offset: 0 })
            }
            Some(Heading::Keys(count)) if kset_bytes(count) > left => return Ok(None),
            Some(Heading::Keys(count)) => {
                let offset = position.offset + kset_bytes(count) as u32;
                (kset_bytes(count), Position { offset, ..position })
            }
        };
        self.position = next;
        Ok(Some(Told { position, next, is_dirty: self.is_dirty, bytes: bytes as u32, end: 0 }))
    }

    /// Whether the log has at most this many records and keys.
    pub(in crate::pcache) fn has_at_most(mut self, keys_max: u64) -> bool {
        let mut keys = 0;
        // An end that is an error is found again later.
        while let Ok(Some(record)) = self.next() {
            keys += (record.bytes as usize / KEY_BYTES).max(1) as u64;
            if keys > keys_max {
                return false;
            }
        }
        true
    }
}

/// Loads what stands in the log from `position` on.
fn load(media: &Media, segments: &Segments, position: Position, into: &mut [u8]) -> Result<()> {
    let at = segments.data_at(position.segment, position.offset);
    media.pmem.load(at, into).map_err(|status| {
        media.damaged(format_args!("cannot read the log at {position}: {status}"))
    })
}

/// The checks of keys, and the use of the checked keys.
#[derive(Clone, Copy, Debug)]
pub(in crate::pcache) struct Rules<'a> {
    pub(in crate::pcache) media: &'a Media,
    pub(in crate::pcache) segments: &'a Segments,
    pub(in crate::pcache) backing_bytes: u64,
    /// Whether all keys go to the index, or only keys whose data the backing device does not have.
    pub(in crate::pcache) is_whole: bool,
    /// Whether keys carry CRCs.
    pub(in crate::pcache) has_crcs: bool,
}

/// Counts of keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// All of them.
    pub keys: u64,
    /// Keys at or after dirty_tail that are not CLEAN, and keys that are.
    pub keys_dirty: u64,
    pub keys_kept: u64,
    /// Keys that need not be in the index before the first request.
    pub keys_left: u64,
    /// Those whose segment was reused since.
    pub stale_keys: u64,
    /// Bytes in keys at or after dirty_tail that are not CLEAN.
    pub dirty_bytes: u64,
}

impl Counts {
    /// Both together.
    pub(in crate::pcache) fn add(&mut self, more: &Counts) {
        self.keys += more.keys;
        self.keys_dirty += more.keys_dirty;
        self.keys_kept += more.keys_kept;
        self.keys_left += more.keys_left;
        self.stale_keys += more.stale_keys;
        self.dirty_bytes += more.dirty_bytes;
    }

    /// The counts that the log keeps for itself.
    pub(in crate::pcache) fn of_log(&self) -> KeyCounts {
        KeyCounts { all: self.keys, dirty: self.keys_dirty, kept: self.keys_kept }
    }
}

/// Keys one after the other that point into the same segment.
#[derive(Clone, Copy, Debug)]
pub(in crate::pcache) struct Run {
    pub(in crate::pcache) segment: u32,
    pub(in crate::pcache) keys: u32,
    /// Where the first of them stands in the log.
    pub(in crate::pcache) position: Position,
}

/// Results of a stretch.
#[derive(Debug, Default)]
struct Findings {
    counts: Counts,
    runs: Vec<Run>,
    /// Positions of keys that go to the index, for each thread.
    wanted: Vec<Vec<u32>>,
    /// The same of keys whose CRCs are kept.
    wanted_crcs: Vec<Vec<u32>>,
}

/// The part of a batch that one thread checks.
#[derive(Debug, Default)]
struct Stretch {
    records: Range<usize>,
    bytes: Vec<u8>,
    found: Findings,
    /// The record at which the log ends, or is damaged.
    end: Option<(usize, Result<()>)>,
}

/// The keys that one thread puts into the index.
#[derive(Clone, Copy, Debug)]
struct Share {
    nth: usize,
    /// The last of its CLEAN keys that other keys hide: its stretch, and its position there.
    hidden: Option<(usize, u32)>,
}

/// A piece of the log, and memory to work on it.
#[derive(Debug)]
pub(in crate::pcache) struct Batch {
    sharing: Sharing,
    pub(in crate::pcache) records: Vec<Told>,
    stretches: Vec<Stretch>,
    /// How many of them are in use.
    count: usize,
}

impl Batch {
    pub(in crate::pcache) fn new(sharing: Sharing) -> Batch {
        let stretches = (0..sharing.threads).map(|_| Stretch::default()).collect();
        Batch { sharing, records: Vec::new(), stretches, count: 0 }
    }

    /// Takes the next records. `Some`: there are no more, at present, according to the headers; an
    /// error applies after all records of the batch.
    pub(in crate::pcache) fn fill(&mut self, headers: &mut Headers<'_>) -> Option<Result<()>> {
        let batch_bytes = self.sharing.batch_bytes();
        self.records.clear();
        let mut bytes = 0;
        while bytes < batch_bytes {
            match headers.next() {
                Ok(Some(record)) => {
                    bytes += record.bytes;
                    self.records.push(Told { end: bytes, ..record });
                }
                Ok(None) => return Some(Ok(())),
                Err(error) => return Some(Err(error)),
            }
        }
        None
    }

    /// Checks all records of the batch. Returns the first record that is damaged, or at which the
    /// log ends.
    pub(in crate::pcache) fn check(&mut self, rules: &Rules<'_>) -> Option<(usize, Result<()>)> {
        self.cut();
        let (records, count) = (&self.records, self.count);
        parallel::each(&mut self.stretches[..count], |stretch| {
            stretch.check(records, rules, count)
        });
        let is_ended = |stretch: &Stretch| stretch.end.is_some();
        let nth = self.stretches[..count].iter().position(is_ended)?;
        // Later stretches do not count.
        self.stretches[nth + 1..count].iter_mut().for_each(|stretch| stretch.found.clear(count));
        self.stretches[nth].end.take()
    }

    /// Divides the batch into stretches of equal length, one for each thread, if there is enough
    /// for all.
    fn cut(&mut self) {
        let bytes = self.records.last().map_or(0, |record| record.end);
        self.count = self.sharing.threads_for(bytes);
        let mut start = 0;
        for nth in 0..self.count {
            let until = u64::from(bytes) * (nth as u64 + 1) / self.count as u64;
            let end = self.records.partition_point(|record| u64::from(record.end) <= until);
            self.stretches[nth].records = start..end;
            start = end;
        }
    }

    /// The counts of each stretch, and the segments that its keys need.
    pub(in crate::pcache) fn found(&self) -> impl Iterator<Item = (&Counts, &[Run])> {
        let stretches = self.stretches[..self.count].iter();
        stretches.map(|stretch| (&stretch.found.counts, &stretch.found.runs[..]))
    }

    /// Puts the results into index and checksums. Returns the end of the last key set with a CLEAN
    /// key that other keys hide.
    pub(in crate::pcache) fn put(
        &self,
        segments: &Segments,
        index: &Index,
        crcs: Option<&DataCrcs>,
    ) -> Option<Position> {
        let stretches = &self.stretches[..self.count];
        let is_idle = |stretch: &Stretch| stretch.found.wanted.iter().all(Vec::is_empty);
        if stretches.iter().all(is_idle) {
            return None;
        }
        let share = |nth| Share { nth, hidden: None };
        let mut shares: Vec<Share> = (0..self.count).map(share).collect();
        parallel::each(&mut shares, |share| share.put(stretches, segments, index, crcs));
        let (nth, at) = shares.iter().filter_map(|share| share.hidden).max()?;
        let records = &self.records[stretches[nth].records.clone()];
        let base = records.first()?.begin();
        let record = records.partition_point(|record| record.end - base <= at);
        records.get(record).map(|record| record.next)
    }
}

impl Findings {
    fn clear(&mut self, shares: usize) {
        self.counts = Counts::default();
        self.runs.clear();
        for wanted in [&mut self.wanted, &mut self.wanted_crcs] {
            wanted.resize_with(shares, Vec::new);
            wanted.iter_mut().for_each(Vec::clear);
        }
    }

    /// Checks a key that stands at byte `at` of the stretch.
    fn key(
        &mut self,
        record: &Told,
        at: u32,
        key: &Key,
        rules: &Rules<'_>,
    ) -> std::result::Result<(), String> {
        check_key(rules.media, rules.segments, rules.backing_bytes, key)?;
        let segment = key.segment.get();
        let reached = rules.segments.generation(segment);
        if key.generation.get() > reached {
            return Err(format!(
                "generation {} of segment {segment}, which has only reached {reached}",
                key.generation.get()
            ));
        }
        let is_dirty = record.is_dirty;
        let at_data = rules.segments.data_at(segment, key.segment_off.get());
        if rules.media.pmem.was_hole(at_data, u64::from(key.len.get())) {
            return Err(format!("its data {IN_HOLE}: {CUT_ADVICE}"));
        }
        let is_clean = key.flags.get() & KEY_CLEAN != 0 && !mutants::is(Mutant::CleanHidesDirty);
        self.counts.keys += 1;
        self.counts.keys_dirty += u64::from(is_dirty && !is_clean);
        self.counts.keys_kept += u64::from(is_dirty && is_clean);
        self.counts.keys_left += u64::from(is_clean || !is_dirty);
        let off = key.off.get();
        let share = |number: u32| number as usize % self.wanted.len();
        let region_share = share((off / REGION_BYTES) as u32);
        if is_stale(rules.segments, key) {
            self.counts.stale_keys += 1;
            if rules.is_whole || is_dirty {
                self.wanted[region_share].push(at);
            }
            return Ok(());
        }
        let segment_share = share(segment);
        match self.runs.last_mut() {
            Some(run) if run.segment == segment => run.keys += 1,
            _ => self.runs.push(Run { segment, keys: 1, position: record.position }),
        }
        let is_owed = is_dirty && !is_clean;
        if is_owed && key.flags.get() & KEY_CLEAN == 0 && !mutants::is(Mutant::DirtyNotCounted) {
            self.counts.dirty_bytes += u64::from(key.len.get());
        }
        if rules.is_whole || is_owed {
            self.wanted[region_share].push(at);
            if rules.has_crcs {
                self.wanted_crcs[segment_share].push(at);
            }
        }
        Ok(())
    }
}

impl Stretch {
    fn check(&mut self, records: &[Told], rules: &Rules<'_>, shares: usize) {
        self.found.clear(shares);
        self.end = None;
        let records = &records[self.records.clone()];
        let (Some(first), Some(last)) = (records.first(), records.last()) else { return };
        let base = first.begin();
        self.bytes.resize((last.end - base) as usize, 0);
        let mut nth = self.records.start;
        let together =
            records.chunk_by(Told::is_before).flat_map(|run| run.chunks(LOADED_TOGETHER));
        for together in together {
            let is_loaded = self.load(together, base, rules).is_ok();
            for record in together {
                let loaded = match is_loaded {
                    true => Ok(()),
                    // Part of it may be readable.
                    false => self.load(std::slice::from_ref(record), base, rules),
                };
                let checked = loaded.and_then(|()| self.record(record, base, rules));
                if !matches!(checked, Ok(true)) {
                    self.end = Some((nth, checked.map(|_| ())));
                    return;
                }
                nth += 1;
            }
        }
    }

    /// Loads consecutive records into the batch, after its byte `base`.
    fn load(&mut self, records: &[Told], base: u32, rules: &Rules<'_>) -> Result<()> {
        let (Some(first), Some(last)) = (records.first(), records.last()) else { return Ok(()) };
        let into = &mut self.bytes[(first.begin() - base) as usize..(last.end - base) as usize];
        load(rules.media, rules.segments, first.position, into)
    }

    /// Checks a record. `false`: it is not valid, and the log ends here.
    fn record(&mut self, record: &Told, base: u32, rules: &Rules<'_>) -> Result<bool> {
        if record.is_last() {
            return Ok(true);
        }
        let from = record.begin() - base;
        let bytes = &self.bytes[from as usize..(record.end - base) as usize];
        let keys = match parse_record(bytes) {
            Some(Record::Keys(keys)) if kset_bytes(keys.len()) == bytes.len() => keys,
            _ => return Ok(false),
        };
        let position = record.position;
        let damaged = |what: std::fmt::Arguments<'_>| rules.media.damaged(what);
        if record.next.offset + KSET_HEADER_BYTES as u32 > rules.media.geometry.data_bytes() {
            return Err(damaged(format_args!(
                "log at {position}: key set leaves no space for its end"
            )));
        }
        let places = (from + KSET_HEADER_BYTES as u32..).step_by(KEY_BYTES);
        for (nth, (key, at)) in keys.iter().zip(places).enumerate() {
            self.found
                .key(record, at, key, rules)
                .map_err(|what| damaged(format_args!("log at {position}, key {nth}: {what}")))?;
        }
        Ok(true)
    }

    /// The key that was found at byte `at`.
    fn key_at(&self, at: u32) -> Option<&Key> {
        Key::ref_from_prefix(self.bytes.get(at as usize..)?).ok().map(|(key, _)| key)
    }
}

impl Share {
    fn put(
        &mut self,
        stretches: &[Stretch],
        segments: &Segments,
        index: &Index,
        crcs: Option<&DataCrcs>,
    ) {
        for (nth, stretch) in stretches.iter().enumerate() {
            let wanted = &stretch.found.wanted[self.nth];
            let offset_of = |nth: usize| Some(stretch.key_at(*wanted.get(nth)?)?.off.get());
            for (place, &at) in wanted.iter().enumerate() {
                offset_of(place + AHEAD[0]).into_iter().for_each(|offset| index.touch(offset));
                offset_of(place + AHEAD[1]).into_iter().for_each(|offset| index.touch_row(offset));
                let Some(key) = stretch.key_at(at) else { continue };
                if put(index, segments, key) {
                    self.hidden = Some((nth, at));
                }
            }
            let Some(crcs) = crcs else { continue };
            let keys = stretch.found.wanted_crcs[self.nth].iter();
            keys.filter_map(|at| stretch.key_at(*at)).for_each(|key| keep_crc(segments, crcs, key));
        }
    }
}
