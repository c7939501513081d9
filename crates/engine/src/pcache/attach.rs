//! Attaching a cache device: checks, the chain of segments, the tails, and the replay of the log.
//!
//! Nothing here writes. What is found comes back as [`Attached`]; whoever goes on to serve the
//! cache stores what has to be stored.
//!
//! Rules of replay beyond the kernel's (each is a defect of its own there):
//! 1. The generation is looked at before anything else of a key. A stale key removes older keys
//!    of its range instead of letting them shine through.
//! 2. A CLEAN key fills gaps only: dirty data is never hidden by a copy of the backing device.
//! 3. The end of the log is believed only if dirty_tail was passed on the way.
//! 4. Every number is checked before it is used; data CRCs are checked when data is used.

use crate::attaching::AttachProgress;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::slots::SlotState;
use crate::sync::Arc;
use crate::units::SECTOR;

use super::chain::load_chain;
use super::datacrc::DataCrcs;
use super::index::{Index, Place};
use super::keylog::TailOnMedia;
use super::label::Label;
use super::layout::{
    CACHE_INFO_AT, CacheInfo, DIRTY_TAIL_AT, INFO_DATA_CRC, INFO_INIT_DONE, KEY_CLEAN, KEY_TAIL_AT,
    KSET_HEADER_BYTES, Key, PAGE_STRIDE, Position, REGION_BYTES, SEGMENTS_MAX, SMALL_STRIDE,
    SUPERBLOCK_AT, SUPERBLOCK_BIG_ENDIAN, SUPERBLOCK_MAGIC, Sealed, Superblock, Tail,
};
use super::media::{Found, Media};
use super::replay::Replay;
use super::segment::{SEGMENTS_MIN, Segments};
use super::walk::{Step, Walk, appended_later, is_damaged_last, outline};

/// What to do about a log that ends in the middle of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LogDamage {
    /// Do not attach.
    #[default]
    Refuse,
    /// Go on without what stands behind the damage, as the kernel does silently.
    Truncate,
}

/// The fixed structures, checked.
#[derive(Debug)]
pub struct Structures {
    /// The superblock.
    pub superblock: Superblock,
    /// cache_info.
    pub info: Found<CacheInfo>,
    /// The segments, all free.
    pub segments: Arc<Segments>,
    /// key_tail.
    pub key_tail: TailOnMedia,
    /// dirty_tail.
    pub dirty_tail: TailOnMedia,
    /// Our label.
    pub label: Option<(Label, SlotState)>,
}

/// What the log says.
#[derive(Debug)]
pub struct Replayed {
    /// Logical block -> place: at least what only the cache has.
    pub index: Index,
    /// What is still to be replayed into it.
    pub rest: Option<Replay>,
    /// Checksums of data, with `data_crc`.
    pub crcs: Option<DataCrcs>,
    /// The end of the log.
    pub head: Position,
    /// Where collection goes on; differs from the medium's after damage before dirty_tail.
    pub key_tail: Position,
    /// Where write-back goes on.
    pub dirty_tail: Position,
    /// Keys in the log.
    pub keys: u64,
    /// Those that are not in the index yet.
    pub keys_left: u64,
    /// Keys whose segment was reused since.
    pub stale_keys: u64,
    /// The last place in the log behind a CLEAN key that other keys hide: it may be older than
    /// they are (a kernel whose append failed wrote it), and must not outlive them.
    pub hidden_until: Option<Position>,
    /// Bytes in keys at or behind dirty_tail that are not CLEAN.
    pub dirty_bytes: u64,
    /// Whether keys at or behind dirty_tail stand behind the last flush mark.
    pub is_unmarked: bool,
    /// The backing device alone is no state of any flush until write-back has come here.
    pub torn_until: Option<Position>,
    /// Whether flush marks are known to stand from `marks_from` on.
    pub has_met_marks: bool,
    /// What was wrong and could be lived with.
    pub notes: Vec<String>,
}

/// Reads and checks everything but the log.
pub fn load_structures(media: &Media) -> Result<Structures> {
    check_size(media)?;
    Label::refuse_newer(media)?;
    let superblock: Superblock = media.load(SUPERBLOCK_AT)?;
    check_superblock(media, &superblock)?;
    let seg_num = superblock.seg_num.get();
    let info = load_info(media)?;
    let n_segs = info.record.n_segs.get();
    if n_segs < SEGMENTS_MIN || n_segs > seg_num {
        return Err(media.damaged(format_args!(
            "cache_info: {n_segs} segments in the chain, but the superblock has {seg_num}, and \
             fewer than {SEGMENTS_MIN} could not be written to"
        )));
    }
    let chain = load_chain(media, info.record.first_segment.get(), n_segs, seg_num)?;
    let key_tail = load_tail(media, "key_tail", KEY_TAIL_AT, n_segs)?;
    let dirty_tail = load_tail(media, "dirty_tail", DIRTY_TAIL_AT, n_segs)?;
    Ok(Structures {
        superblock,
        info,
        segments: Arc::new(Segments::new(media.clone(), &chain)),
        key_tail,
        dirty_tail,
        label: Label::load(media).filter(|(label, _)| !label.is_of_format()),
    })
}

/// A device without room for the fixed structures and a few segments holds no cache.
pub fn check_size(media: &Media) -> Result<()> {
    let len = media.pmem.len_bytes();
    if media.geometry.segments_on(len) >= u64::from(SEGMENTS_MIN) {
        return Ok(());
    }
    let cut = cut_short(media);
    let message = format!("{}: {len} bytes are too few for a cache{cut}", media.name());
    Err(Error::new(Kind::NoSpace, message))
}

fn check_superblock(media: &Media, superblock: &Superblock) -> Result<()> {
    let invalid = |what: String| Error::new(Kind::Invalid, format!("{}: {what}", media.name()));
    if superblock.magic.get() != SUPERBLOCK_MAGIC {
        return Err(invalid(format!(
            "not a pcache: magic {:#018x} at byte {SUPERBLOCK_AT}",
            superblock.magic.get()
        )));
    }
    if !superblock.is_sealed() {
        return Err(invalid(format!("superblock at byte {SUPERBLOCK_AT} has a wrong CRC")));
    }
    if superblock.flags.get() & SUPERBLOCK_BIG_ENDIAN != 0 {
        return Err(invalid("formatted on a big-endian host".to_string()));
    }
    let seg_num = u64::from(superblock.seg_num.get());
    let room = media.geometry.segments_on(media.pmem.len_bytes());
    if seg_num == 0 || seg_num > room || seg_num > SEGMENTS_MAX {
        let cut = if seg_num > room && seg_num <= SEGMENTS_MAX { ": it was cut short" } else { "" };
        return Err(media.damaged(format_args!(
            "superblock says {seg_num} segments, but the device holds {room}{cut}"
        )));
    }
    Ok(())
}

/// Behind an error about a small device: what is missing, if it is a cache cut short.
pub fn cut_short(media: &Media) -> String {
    let words = |missing| format!("; it was cut short: {missing} of its segments are gone");
    missing_segments(media).map_or_else(String::new, words)
}

fn missing_segments(media: &Media) -> Option<u64> {
    let len = media.pmem.len_bytes();
    let has_superblock = len >= SUPERBLOCK_AT + size_of::<Superblock>() as u64;
    let superblock: Superblock = has_superblock.then(|| media.load(SUPERBLOCK_AT).ok())??;
    let is_ours = superblock.magic.get() == SUPERBLOCK_MAGIC && superblock.is_sealed();
    let seg_num = u64::from(superblock.seg_num.get());
    let missing = seg_num.checked_sub(media.geometry.segments_on(len))?;
    (is_ours && missing > 0).then_some(missing)
}

/// cache_info, of a finished format.
pub fn load_info(media: &Media) -> Result<Found<CacheInfo>> {
    let info = media
        .load_slots::<CacheInfo>(CACHE_INFO_AT, PAGE_STRIDE)
        .filter(|info| info.record.flags.get() & INFO_INIT_DONE != 0);
    info.ok_or_else(|| {
        media.damaged(format_args!(
            "cache_info is missing (bytes {CACHE_INFO_AT} and {}): a format was interrupted, or \
             both copies are damaged and the log may hold dirty data; --force-format starts over",
            CACHE_INFO_AT + PAGE_STRIDE
        ))
    })
}

fn load_tail(media: &Media, name: &str, at: u64, n_segs: u32) -> Result<TailOnMedia> {
    let found = media.load_slots::<Tail>(at, SMALL_STRIDE).ok_or_else(|| {
        media.damaged(format_args!("{name}: both copies are damaged (byte {at})"))
    })?;
    let position = found.record.position();
    let data_bytes = media.geometry.data_bytes();
    // Behind every position there is room for a LAST record at least.
    let is_record = position.offset % 8 == 0
        && u64::from(position.offset) + KSET_HEADER_BYTES as u64 <= u64::from(data_bytes);
    if position.segment >= n_segs || !is_record {
        return Err(media.damaged(format_args!(
            "{name} {position} is not a place in {n_segs} segments of {data_bytes} bytes"
        )));
    }
    Ok(TailOnMedia { position, slot: found.slot })
}

/// Whether keys carry CRCs.
pub fn has_data_crc(info: &CacheInfo) -> bool {
    info.flags.get() & INFO_DATA_CRC != 0
}

/// The first byte behind every key of the log: how large the backing device is at least. For
/// looking at a cache without its backing device; hence a bound on what is believed.
pub fn extent(media: &Media, found: &Structures) -> Result<u64> {
    let mut walk = Walk::new(media, &found.segments, found.key_tail.position);
    let mut extent = 0;
    let mut keys = Vec::new();
    loop {
        match walk.step(&mut keys)? {
            Step::End => return Ok(extent),
            Step::Last => {}
            Step::Keys(set) => {
                let ends =
                    set.iter().map(|key| key.off.get().saturating_add(u64::from(key.len.get())));
                extent = ends.filter(|end| *end <= super::BACKING_BYTES_MAX).fold(extent, u64::max);
                keys = set;
            }
        }
    }
}

/// Walks the log for a backing device of `backing_bytes`: checks every key, finds what is in use,
/// and puts into `index` what only the cache has. What else the log says is left to
/// [`Replayed::finish`] or to the running cache.
pub fn survey(
    media: &Media,
    found: &Structures,
    backing_bytes: u64,
    index: Index,
    log_damage: LogDamage,
    progress: &AttachProgress,
) -> Result<Replayed> {
    progress.begin("keys of the log", 0);
    let tails = (found.key_tail.position, found.dirty_tail.position);
    let mut out = Replayed::new(found, index, tails);
    let surveyed = Survey::new(media, found, backing_bytes, &mut out).walk(log_damage, progress);
    let has_met = surveyed.as_ref().map_or_else(|(_, has_met)| *has_met, |()| true);
    if !has_met {
        // Nothing is in the index yet: only the dirty part gets there.
        let mut notes = Vec::new();
        let tails = believable_tails(media, found, &mut notes)?;
        out = Replayed { notes, ..Replayed::new(found, out.index, tails) };
        let again = Survey::new(media, found, backing_bytes, &mut out).walk(log_damage, progress);
        again.map_err(|(error, _)| error)?;
    } else {
        surveyed.map_err(|(error, _)| error)?;
    }
    if let Some(until) = out.torn_until {
        out.notes.push(format!(
            "the backing device alone is not consistent until write-back has come to {until}"
        ));
    }
    // With nothing but dirty keys there is nothing left.
    out.rest = (out.keys_left > 0)
        .then(|| Replay::new(out.key_tail, out.head, out.keys, out.index.sibling()));
    Ok(out)
}

/// The tails to go on from: the medium's own where the log bears them out.
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
        // An older copy of dirty_tail won. What lies between was written back already.
        notes.push(format!(
            "dirty_tail {dirty_tail} is behind key_tail {key_tail}: everything in the log is \
             taken for dirty"
        ));
        return Ok((key_tail, key_tail));
    }
    if !from_key.is_clean && (from_dirty.records > 0 || from_dirty.is_clean) {
        notes.push(format!(
            "log damaged at {}, before dirty_tail {dirty_tail}: clean data between them is \
             dropped, no dirty data is concerned",
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
    backing_bytes: u64,
    /// Segments that current keys point into, with the first such key's place in the log.
    targets: Vec<Option<Position>>,
    /// How many do.
    references: Vec<u32>,
    /// What the label says of write-back that was merging across flushes.
    torn_until: Option<Position>,
    marks_from: Option<Position>,
    is_dirty: bool,
    out: &'a mut Replayed,
}

impl<'a> Survey<'a> {
    fn new(
        media: &'a Media,
        found: &'a Structures,
        backing_bytes: u64,
        out: &'a mut Replayed,
    ) -> Survey<'a> {
        let count = found.segments.count() as usize;
        let label = found.label.as_ref().map(|(label, _)| label);
        Survey {
            media,
            segments: &found.segments,
            backing_bytes,
            targets: vec![None; count],
            references: vec![0; count],
            torn_until: label.and_then(|label| label.torn_until),
            marks_from: label.map(|label| label.marks_from),
            is_dirty: false,
            out,
        }
    }

    /// The whole walk. An error comes with whether dirty_tail was passed before; the end of a log
    /// without it is one.
    fn walk(
        mut self,
        log_damage: LogDamage,
        progress: &AttachProgress,
    ) -> std::result::Result<(), (Error, bool)> {
        let is_log = self.keys(progress).map_err(|error| (error, self.is_dirty))?;
        if !self.is_dirty {
            let what = format_args!("log ends at {} without dirty_tail", self.out.head);
            return Err((self.media.damaged(what), false));
        }
        self.check_end(log_damage)
            .and_then(|()| self.finish(&is_log))
            .map_err(|error| (error, true))
    }

    /// Every key; the segments of the log.
    fn keys(&mut self, progress: &AttachProgress) -> Result<Vec<bool>> {
        let dirty_tail = self.out.dirty_tail;
        let mut walk = Walk::new(self.media, self.segments, self.out.key_tail);
        let mut keys = Vec::new();
        loop {
            let position = walk.position;
            self.is_dirty |= position == dirty_tail;
            if self.is_dirty {
                self.out.has_met_marks |= Some(position) == self.marks_from;
            }
            if self.is_dirty && position != dirty_tail && self.torn_until == Some(position) {
                self.out.torn_until = self.torn_until;
            }
            self.out.head = position;
            match walk.step(&mut keys)? {
                Step::End => return Ok(walk.is_log),
                Step::Last => {}
                Step::Keys(set) => {
                    self.out.is_unmarked = self.is_dirty && !set.is_empty();
                    if self.is_dirty {
                        // Their cache misses at once, not one after the other.
                        set.iter().for_each(|key| self.out.index.touch(key.off.get()));
                        set.iter().for_each(|key| self.out.index.touch_row(key.off.get()));
                    }
                    for (nth, key) in set.iter().enumerate() {
                        self.key(position, nth, key)?;
                    }
                    progress.has_come_to(self.out.keys);
                    keys = set;
                }
            }
        }
    }

    fn key(&mut self, position: Position, nth: usize, key: &Key) -> Result<()> {
        if let Err(what) = check_key(self.media, self.segments, self.backing_bytes, key) {
            return Err(self.media.damaged(format_args!("log at {position}, key {nth}: {what}")));
        }
        self.out.keys += 1;
        let is_clean = key.flags.get() & KEY_CLEAN != 0 && !mutants::is(Mutant::CleanHidesDirty);
        self.out.keys_left += u64::from(is_clean || !self.is_dirty);
        let (off, len) = (key.off.get(), u64::from(key.len.get()));
        let segment = key.segment.get();
        let generation = self.segments.generation(segment);
        if key.generation.get() > generation {
            return Err(self.media.damaged(format_args!(
                "log at {position}, key {nth}: generation {} of segment {segment}, which has \
                 only reached {generation}",
                key.generation.get()
            )));
        }
        if key.generation.get() < generation && !mutants::is(Mutant::StaleKeyBelieved) {
            self.out.stale_keys += 1;
            if self.is_dirty && !mutants::is(Mutant::StaleKeySkipped) {
                self.out.index.set(off, len, None);
            }
            return Ok(());
        }
        self.targets[segment as usize].get_or_insert(position);
        self.references[segment as usize] += 1;
        if is_clean || !self.is_dirty {
            return Ok(());
        }
        if key.flags.get() & KEY_CLEAN == 0 && !mutants::is(Mutant::DirtyNotCounted) {
            self.out.dirty_bytes += len;
        }
        if let Some(crcs) = &self.out.crcs {
            crcs.insert(segment, key.segment_off.get(), key.len.get(), key.data_crc.get());
        }
        let place = Place::new(segment, key.segment_off.get(), generation);
        self.out.index.set(off, len, Some(place));
        Ok(())
    }

    /// A log that ends in something other than zeroes ends in a torn append, or in damage. It is
    /// damage when something follows that was appended later.
    fn check_end(&mut self, log_damage: LogDamage) -> Result<()> {
        let end = self.out.head;
        if Walk::new(self.media, self.segments, end).ends_cleanly() {
            return Ok(());
        }
        let mut bytes = vec![0; (self.media.geometry.data_bytes() - end.offset) as usize];
        self.segments.load(end.segment, end.offset, &mut bytes).map_err(|status| {
            self.media.damaged(format_args!("cannot read the log at {end}: {status}"))
        })?;
        let what = if let Some(distance) = appended_later(self.segments, &bytes) {
            format!(
                "log damaged at {end}: more of it follows {distance} bytes further on, so flushed \
                 writes may be lost"
            )
        } else if is_damaged_last(&bytes) {
            format!(
                "log damaged at {end}: it goes on in another segment, but which one cannot be \
                 read, so flushed writes may be lost"
            )
        } else {
            return Ok(());
        };
        match log_damage {
            LogDamage::Truncate => {
                // How far write-back had got into what is lost is not known.
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
                "{what}; `log_damage truncate` in the table goes on without them"
            ))),
        }
    }

    /// Marks the log's segments and makes sure that no key points into the log.
    fn finish(self, is_log: &[bool]) -> Result<()> {
        for (segment, _) in is_log.iter().enumerate().filter(|(_, is_log)| **is_log) {
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
            keys: 0,
            keys_left: 0,
            stale_keys: 0,
            hidden_until: None,
            dirty_bytes: 0,
            is_unmarked: false,
            torn_until: None,
            has_met_marks: false,
            notes: Vec::new(),
            rest: None,
        }
    }

    /// Replays what is left, at once. Nobody is served yet.
    pub fn finish(&mut self, media: &Media, segments: &Segments) -> Result<()> {
        let Some(mut rest) = self.rest.take() else { return Ok(()) };
        rest.read(media, segments, self.crcs.as_ref(), u64::MAX).map_err(|status| {
            media.damaged(format_args!("cannot read the log a second time: {status}"))
        })?;
        (self.index, self.hidden_until) = rest.into_parts();
        Ok(())
    }
}

/// Checks what does not depend on generations.
pub fn check_key(
    media: &Media,
    segments: &Segments,
    backing_bytes: u64,
    key: &Key,
) -> std::result::Result<(), String> {
    let (off, len) = (key.off.get(), u64::from(key.len.get()));
    let (segment, at) = (key.segment.get(), u64::from(key.segment_off.get()));
    if key.flags.get() & !KEY_CLEAN != 0 {
        return Err(format!("unknown flags {:#x}", key.flags.get()));
    }
    if len == 0 || len % SECTOR != 0 || off % SECTOR != 0 || at % SECTOR != 0 {
        return Err(format!("{len} bytes at {off}, cached at {at}: not whole sectors"));
    }
    if off.checked_add(len).is_none_or(|end| end > backing_bytes) {
        return Err(format!(
            "{len} bytes at {off}, but the backing device has {backing_bytes} bytes"
        ));
    }
    if off / REGION_BYTES != (off + len - 1) / REGION_BYTES {
        return Err(format!("{len} bytes at {off} cross a border of 4 MiB"));
    }
    if segment >= segments.count() {
        return Err(format!("data in segment {segment} of {}", segments.count()));
    }
    if at + len > u64::from(media.geometry.data_bytes()) {
        return Err(format!("data at {at} + {len} leaves segment {segment}"));
    }
    Ok(())
}
