//! Random logs, whole and damaged, read by one thread and by several, in batches of every size: the
//! result must equal the result of reading the log record by record.

use zerocopy::IntoBytes;

use super::super::structures::load_structures;
use super::super::walk::Step;
use super::*;
use crate::pcache::format::format;
use crate::pcache::key::{check_key, is_stale, keep_crc, put};
use crate::pcache::layout::{
    DIRTY_TAIL_AT, Generation, Geometry, KEY_CLEAN, KEY_TAIL_AT, KEYS_MAX, KSET_HEADER_BYTES, Key,
    KsetHeader, REGION_BYTES, SEGMENTS_AT, Tail, kset_bytes, seal_kset,
};
use crate::pmem::Persistence;
use crate::pmem::sim::SimPmem;
use crate::prng::Prng;
use crate::sync::Arc;
use crate::units::SECTOR;

const GEOMETRY: Geometry = Geometry { segment_bytes: 32 << 10, device_bytes_min: 0 };
const SEGMENTS: u32 = 14;
/// Those before it are for the log, the others for data.
const LOG_SEGMENTS: u32 = 7;
const REGIONS: u64 = 5;
const BACKING_BYTES: u64 = REGIONS * REGION_BYTES;

/// A cache whose log is being made.
struct Maker {
    media: Media,
    prng: Prng,
    generations: Vec<u64>,
    head: Position,
    /// Where records begin.
    starts: Vec<Position>,
}

impl Maker {
    fn new(seed: u64) -> (Maker, Arc<SimPmem>) {
        let mut prng = Prng::new(seed);
        let bytes = SEGMENTS_AT + u64::from(SEGMENTS) * GEOMETRY.segment_bytes;
        let sim = Arc::new(SimPmem::new(bytes, Persistence::Cpu));
        let media = Media { pmem: sim.clone(), geometry: GEOMETRY, shared: None };
        format(&media, prng.one_in(2)).expect("an empty cache");
        let generations: Vec<u64> = (0..SEGMENTS).map(|_| prng.below(3)).collect();
        for (segment, generation) in (0..).zip(&generations) {
            let record = Generation::new(2, *generation);
            media.store(GEOMETRY.generation_at(segment), record.as_bytes());
        }
        let head = Position::default();
        (Maker { media, prng, generations, head, starts: vec![head] }, sim)
    }

    fn data_at(&self, position: Position) -> u64 {
        GEOMETRY.data_at(position.segment) + u64::from(position.offset)
    }

    fn store(&mut self, record: &[u8]) {
        self.media.store(self.data_at(self.head), record);
    }

    /// Room in the head's segment.
    fn left(&self) -> usize {
        (GEOMETRY.data_bytes() - self.head.offset) as usize
    }

    fn key(&mut self) -> Key {
        let prng = &mut self.prng;
        let segment = LOG_SEGMENTS + prng.below(u64::from(SEGMENTS - LOG_SEGMENTS)) as u32;
        let longest = if prng.one_in(4) { 40 } else { 9 };
        let len = (1 + prng.below(longest)) * SECTOR;
        // Few blocks, so that keys meet.
        let off = prng.below(REGIONS) * REGION_BYTES + prng.below(80) * SECTOR;
        let at = prng.below((u64::from(GEOMETRY.data_bytes()) - len) / SECTOR) * SECTOR;
        let reached = self.generations[segment as usize];
        let age = if prng.one_in(8) { prng.below(3) } else { 0 };
        Key {
            off: off.into(),
            len: (len as u32).into(),
            flags: if prng.one_in(4) { KEY_CLEAN } else { 0 }.into(),
            segment: segment.into(),
            segment_off: (at as u32).into(),
            generation: reached.saturating_sub(age).into(),
            data_crc: (prng.next_u64() as u32).into(),
            reserved: 0.into(),
        }
    }

    /// A key that is wrong in one of all possible ways.
    fn wrong_key(&mut self) -> Key {
        let mut key = self.key();
        match self.prng.below(8) {
            0 => key.generation = (key.generation.get() + 3).into(),
            1 => key.segment = (SEGMENTS + self.prng.below(2) as u32).into(),
            2 => key.segment = (self.prng.below(u64::from(LOG_SEGMENTS)) as u32).into(),
            3 => key.flags = 8.into(),
            4 => key.len = (self.prng.next_u64() as u32).into(),
            5 => key.off = self.prng.next_u64().into(),
            6 => key.off = (REGION_BYTES - SECTOR).into(),
            _ => key.segment_off = (GEOMETRY.data_bytes() / 512 * 512).into(),
        }
        key
    }

    fn append(&mut self, keys: &[Key]) {
        let mut set = vec![0; kset_bytes(keys.len())];
        set[KSET_HEADER_BYTES..].copy_from_slice(keys.as_bytes());
        seal_kset(&mut set, keys.len());
        self.store(&set);
        self.head.offset += set.len() as u32;
        self.starts.push(self.head);
    }

    fn go_on_in(&mut self, segment: u32) {
        self.store(KsetHeader::last(segment).as_bytes());
        self.head = Position { segment, offset: 0 };
        self.starts.push(self.head);
    }

    fn fill(&mut self, sets: u64, wrong: bool) {
        let wrong_set = if wrong { self.prng.below(sets) } else { sets };
        for nth in 0..sets {
            let most = if self.prng.one_in(3) { KEYS_MAX as u64 } else { 6 };
            let count = self.prng.below(most + 1) as usize;
            if self.left() < kset_bytes(count) + KSET_HEADER_BYTES {
                if self.head.segment + 1 == LOG_SEGMENTS {
                    return;
                }
                self.go_on_in(self.head.segment + 1);
            }
            let mut keys: Vec<Key> = (0..count).map(|_| self.key()).collect();
            if nth == wrong_set && count > 0 {
                let which = self.prng.below(count as u64) as usize;
                keys[which] = self.wrong_key();
            }
            self.append(&keys);
        }
        if wrong && self.prng.one_in(8) {
            // To the very end of its segment.
            while self.left() >= kset_bytes(1) {
                let count = ((self.left() - KSET_HEADER_BYTES) / size_of::<Key>()).min(KEYS_MAX);
                let keys: Vec<Key> = (0..count).map(|_| self.key()).collect();
                self.append(&keys);
            }
        } else if wrong && self.prng.one_in(4) {
            // Back to an earlier segment, to a segment that does not exist, or to a position with
            // old bytes.
            let segment = self.prng.below(u64::from(SEGMENTS) + 2) as u32;
            self.go_on_in(segment);
        }
    }

    fn somewhere(&mut self) -> u64 {
        let nth = self.prng.below(self.starts.len() as u64) as usize;
        let start = self.starts[nth];
        self.data_at(start)
    }

    /// A tail somewhere, mostly where a record begins.
    fn set_tail(&mut self, at: u64) {
        let nth = self.prng.below(self.starts.len() as u64) as usize;
        let mut tail = self.starts[nth];
        if tail.segment >= SEGMENTS || self.prng.one_in(20) {
            tail = Position { segment: self.prng.below(3) as u32, offset: 64 };
        }
        if u64::from(tail.offset) + 24 <= u64::from(GEOMETRY.data_bytes()) {
            self.media.store(at, Tail::new(2, tail).as_bytes());
        }
    }
}

/// A random log, and whether only this test would write such a log.
fn make(seed: u64) -> (Media, bool) {
    let (mut maker, sim) = Maker::new(seed);
    let has_wrong = maker.prng.one_in(3);
    let sets = 1 + maker.prng.below(60);
    maker.fill(sets, has_wrong);
    maker.set_tail(DIRTY_TAIL_AT);
    if maker.prng.one_in(6) {
        maker.set_tail(KEY_TAIL_AT);
    }
    if maker.prng.one_in(3) {
        for _ in 0..1 + maker.prng.below(3) {
            let at = maker.somewhere() + maker.prng.below(80);
            let bit = 1 << maker.prng.below(8);
            sim.corrupt(at, |byte| byte ^ bit);
        }
    }
    let is_poisoned = maker.prng.one_in(10);
    if is_poisoned {
        let at = maker.somewhere() + maker.prng.below(80);
        sim.poison(at, 1 + maker.prng.below(64));
    }
    (maker.media, is_poisoned)
}

/// Everything that a reading finds, in words.
fn told(found: &Structures, out: &Replayed) -> Vec<String> {
    let Replayed { index, crcs, rest, counts, notes, .. } = out;
    let Counts { keys, keys_left, stale_keys, dirty_bytes, .. } = counts;
    let mut told = vec![format!(
        "{keys} keys, {keys_left} left, {stale_keys} stale, {dirty_bytes} dirty, {notes:?}, {} {} \
         {} {:?} {} {:?} {} {}",
        out.head,
        out.key_tail,
        out.dirty_tail,
        out.hidden_until,
        out.is_unmarked,
        out.torn_until,
        out.has_met_marks,
        rest.is_some(),
    )];
    told.push(format!("{crcs:?}"));
    let segments = &found.segments;
    told.extend((0..SEGMENTS).map(|segment| {
        let (references, is_log) = (segments.references(segment), segments.is_log(segment));
        format!("segment {segment}: {references} keys, log {is_log}")
    }));
    told.push(format!("{} used", segments.used()));
    told.extend(content(index));
    told
}

fn content(index: &Index) -> Vec<String> {
    let mut content = Vec::new();
    let mut at = 0;
    while at < BACKING_BYTES {
        let piece = index.lookup(at, BACKING_BYTES, |_| true);
        content.push(format!("{piece:?}, used {}", index.uses(at)));
        at += piece.len;
    }
    content
}

fn reading(sharing: Sharing, at_once_max: u64, log_damage: LogDamage) -> Reading<'static> {
    let progress = Box::leak(Box::default());
    let new_index = &|| Index::with_flats(BACKING_BYTES, 5);
    Reading {
        backing_bytes: BACKING_BYTES,
        log_damage,
        at_once_max,
        drops_clean: false,
        sharing,
        new_index,
        progress,
    }
}

fn read(media: &Media, reading: &Reading<'_>) -> Result<(Structures, Replayed)> {
    let found = load_structures(media)?;
    survey(media, &found, reading).map(|out| (found, out))
}

fn in_words(result: &Result<(Structures, Replayed)>) -> std::result::Result<Vec<String>, String> {
    match result {
        Ok((found, out)) => Ok(told(found, out)),
        Err(error) => Err(error.to_string()),
    }
}

/// The same, record by record.
fn read_in_order(media: &Media, reading: &Reading<'_>) -> Result<(Structures, Replayed)> {
    let found = load_structures(media)?;
    let once = |out: &mut Replayed| {
        let mut survey = Survey::new(media, &found, reading, out);
        let is_whole = keys_in_order(&mut survey).map_err(|error| (error, survey.is_dirty))?;
        if !survey.is_dirty {
            let what = format_args!("log ends at {} without dirty_tail", survey.out.head);
            return Err((media.damaged(what), false));
        }
        let checked = survey.check_end(reading.log_damage).and_then(|()| survey.finish());
        checked.map(|()| is_whole).map_err(|error| (error, true))
    };
    let tails = (found.key_tail.position, found.dirty_tail.position);
    let mut out = Replayed::new(&found, (reading.new_index)(), tails);
    let is_whole = match once(&mut out) {
        Ok(is_whole) => is_whole,
        Err((error, true)) => return Err(error),
        Err((_, false)) => {
            let mut notes = Vec::new();
            let tails = believable_tails(media, &found, &mut notes)?;
            out = Replayed { notes, ..Replayed::new(&found, (reading.new_index)(), tails) };
            once(&mut out).map_err(|(error, _)| error)?
        }
    };
    out.rest = (out.counts.keys_left > 0 && !is_whole)
        .then(|| Replay::new(out.key_tail, out.head, out.counts.keys, out.index.sibling()));
    Ok((found, out))
}

fn keys_in_order(survey: &mut Survey<'_>) -> Result<bool> {
    let is_whole = survey.reading.at_once_max == u64::MAX;
    let mut walk = Walk::new(survey.media, survey.segments, survey.out.key_tail);
    let mut keys = Vec::new();
    let mut is_dirty = false;
    loop {
        let position = walk.position;
        is_dirty |= position == survey.out.dirty_tail;
        survey.come_to(position, is_dirty);
        match walk.step(&mut keys)? {
            Step::End => break,
            Step::Last => {}
            Step::Keys(set) => {
                survey.out.is_unmarked = is_dirty && !set.is_empty();
                for (nth, key) in set.iter().enumerate() {
                    let hides = key_in_order(survey, key, is_whole).map_err(|what| {
                        survey.media.damaged(format_args!("log at {position}, key {nth}: {what}"))
                    })?;
                    if hides {
                        survey.out.hidden_until = Some(walk.position);
                    }
                }
                keys = set;
            }
        }
    }
    survey.is_log = walk.is_log;
    Ok(is_whole)
}

fn key_in_order(
    survey: &mut Survey<'_>,
    key: &Key,
    is_whole: bool,
) -> std::result::Result<bool, String> {
    let (segments, position) = (survey.segments, survey.out.head);
    check_key(survey.media, segments, survey.reading.backing_bytes, key)?;
    let (segment, generation) = (key.segment.get(), key.generation.get());
    let reached = segments.generation(segment);
    if generation > reached {
        return Err(format!(
            "generation {generation} of segment {segment}, which has only reached {reached}"
        ));
    }
    let is_clean = key.flags.get() == KEY_CLEAN;
    survey.out.counts.keys += 1;
    survey.out.counts.keys_left += u64::from(is_clean || !survey.is_dirty);
    let is_wanted = is_whole || survey.is_dirty && (!is_clean || generation < reached);
    if is_stale(segments, key) {
        survey.out.counts.stale_keys += 1;
    } else {
        survey.targets[segment as usize].get_or_insert(position);
        survey.references[segment as usize] += 1;
        if survey.is_dirty && !is_clean {
            survey.out.counts.dirty_bytes += u64::from(key.len.get());
        }
    }
    if !is_wanted {
        return Ok(false);
    }
    survey.out.crcs.iter().for_each(|crcs| keep_crc(segments, crcs, key));
    Ok(put(&survey.out.index, segments, key))
}

fn sharings(prng: &mut Prng) -> Vec<Sharing> {
    let threads = [1, 1, 2, 3, 4];
    let sharing = |threads| Sharing {
        threads,
        stretch_bytes: 24 + prng.below(12_000) as u32,
        stretch_bytes_min: 1 + prng.below(200) as u32,
    };
    let mut sharings: Vec<Sharing> = threads.map(sharing).to_vec();
    sharings.push(Sharing::among(1));
    sharings
}

#[test]
fn threads_and_batches_make_no_difference() {
    let (mut errors, mut ends, mut hidden) = (Vec::new(), 0, 0);
    for seed in 0..600 {
        let (media, is_poisoned) = make(seed);
        let mut prng = Prng::new(seed + 1_000_000);
        let at_once_max = if prng.one_in(2) { u64::MAX } else { 0 };
        let damage = if prng.one_in(2) { LogDamage::Refuse } else { LogDamage::Truncate };
        let mut expected = None;
        for sharing in sharings(&mut prng) {
            let reading = reading(sharing, at_once_max, damage);
            let found = in_words(&read(&media, &reading));
            let expected = expected.get_or_insert_with(|| {
                let in_order = in_words(&read_in_order(&media, &reading));
                // A batch loads more at a time, and may meet unreadable bytes after the log's end.
                if is_poisoned && in_order.is_err() { found.clone() } else { in_order }
            });
            assert!(
                found == *expected,
                "seed {seed}, {sharing:?}: {found:#?} is not {expected:#?}"
            );
        }
        match expected.expect("there are several ways") {
            Ok(told) => {
                ends += usize::from(told[0].contains("damaged"));
                hidden += usize::from(told[0].contains("Some"));
            }
            Err(error) => errors.push(error),
        }
    }
    // The logs were of all kinds.
    for what in [
        "only reached",
        "has a cycle",
        "continues in segment",
        "no space for its end",
        "cannot read the log",
        "dirty_tail",
        "which holds the log",
        "more of it follows",
        "not whole sectors",
        "cross a border",
        "unknown flags",
        "leaves segment",
    ] {
        assert!(errors.iter().any(|error| error.contains(what)), "nothing of {what}: {errors:#?}");
    }
    assert!(errors.len() < 400 && ends > 20 && hidden > 20, "{} {ends} {hidden}", errors.len());
}

#[test]
fn a_short_log_is_read_once_and_a_long_one_ends_with_the_same() {
    let mut rests = 0;
    for seed in 0..300 {
        let (media, is_poisoned) = make(seed);
        let of = |at_once_max| {
            let reading = reading(Sharing::among(1), at_once_max, LogDamage::Truncate);
            read(&media, &reading)
        };
        let Ok((_, whole)) = of(u64::MAX) else { continue };
        assert!(whole.rest.is_none());
        let (_, short) = of(1 << 20).expect("as before");
        assert!(short.rest.is_none());
        assert_eq!(content(&short.index), content(&whole.index), "seed {seed}");
        let (found, mut long) = of(whole.counts.keys.saturating_sub(1).min(1)).expect("as before");
        assert_eq!(
            (long.counts.keys, long.counts.keys_left),
            (whole.counts.keys, whole.counts.keys_left),
            "seed {seed}"
        );
        rests += usize::from(long.rest.is_some());
        if long.finish(&media, &found.segments).is_err() {
            assert!(is_poisoned, "seed {seed}");
            continue;
        }
        assert_eq!(content(&long.index), content(&whole.index), "seed {seed}");
        assert_eq!(long.hidden_until, whole.hidden_until, "seed {seed}");
    }
    assert!(rests > 50, "{rests}");
}
