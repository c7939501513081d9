//! Keys that a dead server left in shared memory: acknowledged, but not in the log.
//!
//! The keys belong to one attach of one medium. They are taken up and logged if the medium has the
//! cache_info and the log's end that the memory records, and also the data of the keys. Otherwise
//! the keys must not be used. But they are acknowledged writes, so they are never dropped silently.
//! If they cannot be matched because the medium is damaged or is an older copy of itself, the
//! attach is refused until the user accepts the loss. If the medium was used elsewhere since, the
//! keys are lost already, and the attach reports that.

use crate::base::fingerprint::{fingerprint_offsets, mix_fingerprint};
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::pcache::args::LogDamage;
use crate::units::human_bytes;

use super::structures::Structures;
use super::survey::Replayed;
use crate::pcache::args::TableArgs;
use crate::pcache::index::Place;
use crate::pcache::key::check_key;
use crate::pcache::keylog::KeyLog;
use crate::pcache::layout::{CACHE_INFO_AT, KEY_CLEAN, Key, PAGE_STRIDE, Position};
use crate::pcache::media::Media;
use crate::pcache::openset::{self, LastSet, LeftBehind, LogEnd};
use crate::pcache::segment::Segments;

/// What to do with the memory that was found.
pub(in crate::pcache) enum Left {
    /// It is this medium's: these keys are taken up.
    Keys(Vec<Key>),
    /// The memory belongs to another medium, of which this one is a copy or which this one once
    /// was; and the user accepts the loss that the note describes.
    OfAnother(String),
}

/// The keys to take up. Refuses, or adds a note, if some cannot be taken up.
pub(in crate::pcache) fn keys_left(
    media: &Media,
    found: &Structures,
    replayed: &mut Replayed,
    left: Option<LeftBehind>,
    args: &TableArgs,
) -> Result<Left> {
    let nothing = Left::Keys(Vec::new());
    let Some(left) = left.filter(|_| !mutants::is(Mutant::SharedIgnored)) else {
        return Ok(nothing);
    };
    let accepts_loss = args.accepts_loss || args.log_damage == LogDamage::Truncate;
    let has_failed = media.shared.as_ref().is_some_and(openset::has_failed);
    let is_known = left.knows(&found.info.record);
    let keys = || left.keys.iter().map(|(key, _)| *key).collect();
    if is_known && !has_failed {
        let Some(what) = difference(media, found, Some(replayed.head), &left) else {
            return Ok(Left::Keys(keys()));
        };
        let what = format!(
            "{what}: this is an older copy of the medium of the last server, which died with {} \
             keys in memory",
            left.keys.len()
        );
        if accepts_loss {
            return Ok(Left::OfAnother(format!("{what}; they are LOST")));
        }
        return Err(Error::new(
            Kind::Refused,
            format!(
                "{}: {what}; use the newest copy, or add `lost_memory accept` to the table to \
                 continue without them",
                media.name()
            ),
        ));
    }
    replayed.finish(media, &found.segments)?;
    let Some(lost) = loss(&left, replayed) else { return Ok(nothing) };
    if has_failed {
        // Their data may be an older version: it was in flight when the medium failed.
        replayed.notes.push(format!("{lost}, and they are LOST: the cache device failed then"));
        return Ok(nothing);
    }
    if !left.is_ahead_of(&found.info.record) {
        replayed
            .notes
            .push(format!("{lost}, and they are LOST: another program has used the medium since"));
        return Ok(nothing);
    }
    let why = format!(
        "cache_info on the medium is damaged (byte {CACHE_INFO_AT} or {})",
        CACHE_INFO_AT + PAGE_STRIDE
    );
    if accepts_loss {
        replayed.notes.push(format!("{lost}, and they are LOST: {why}"));
        return Ok(nothing);
    }
    Err(Error::new(
        Kind::Io,
        format!(
            "{}: {lost}, and cannot be recovered: {why}, or this is an old copy of it; to continue \
             without them, add `lost_memory accept` to the table",
            media.name()
        ),
    ))
}

/// The difference between memory and medium: the log has another end, or the data of a key in
/// memory is missing. `head`: the log's end, if it is known.
pub(in crate::pcache) fn difference(
    media: &Media,
    found: &Structures,
    head: Option<Position>,
    left: &LeftBehind,
) -> Option<String> {
    if let Some(head) = head
        && let Some([end, next]) = left.ends
        && !ends_at(&found.segments, head, end, next)
    {
        return Some(format!(
            "its log ends at {head}, but the last server's memory says {}",
            end.position
        ));
    }
    let segments = &found.segments;
    let is_current = |key: &Key| {
        key.segment.get() < segments.count()
            && segments.generation(key.segment.get()) == key.generation.get()
    };
    let sampled = left.keys.iter().filter(|(key, look)| *look != 0 && is_current(key));
    for (key, look) in sampled {
        let (segment, at, len) = (key.segment.get(), key.segment_off.get(), key.len.get());
        if len < 8 || u64::from(at) + u64::from(len) > u64::from(media.geometry.data_bytes()) {
            continue;
        }
        let word = |place: usize| {
            let mut bytes = [0; 8];
            segments.load(segment, at + place as u32, &mut bytes).ok()?;
            Some(u64::from_le_bytes(bytes))
        };
        // Unreadable data is damage, which shows when it is used.
        let [Some(first), Some(middle), Some(last)] = fingerprint_offsets(len as usize).map(word)
        else {
            continue;
        };
        if mix_fingerprint([first, middle, last]) != *look {
            return Some(format!(
                "the data of a write of {len} bytes at byte {} of the device, which the last \
                 server's memory lists, is missing on the medium (segment {segment}, byte {at})",
                key.off.get()
            ));
        }
    }
    None
}

/// Whether the log ends at its recorded end, or at the end that was about to be, or in between.
fn ends_at(segments: &Segments, head: Position, end: LogEnd, next: LogEnd) -> bool {
    let is_there = |last: LastSet| {
        let mut crc = [0; 4];
        let LastSet { position, crc: Some(known) } = last else { return true };
        position.segment < segments.count()
            && segments.load(position.segment, position.offset, &mut crc).is_ok()
            && LastSet::new(position, u32::from_le_bytes(crc)) == LastSet::new(position, known)
    };
    let begin = if next.position.segment == end.position.segment { end.position.offset } else { 0 };
    let is_between = end != next
        && head.segment == next.position.segment
        && (begin..=next.position.offset).contains(&head.offset);
    (head == end.position || is_between) && is_there(end.last)
}

/// The loss of these keys, in words; `None` if all their data is safe: the backing device has it,
/// or the keys reached the log before their server died.
fn loss(left: &LeftBehind, replayed: &Replayed) -> Option<String> {
    let is_logged = |key: &Key| {
        let off = key.off.get();
        let end = off.saturating_add(u64::from(key.len.get()));
        let place = Place::new(key.segment.get(), key.segment_off.get(), key.generation.get());
        replayed.index.lookup(off, end, |_| true).place == Some(place)
    };
    let is_lost = |key: &&Key| key.flags.get() & KEY_CLEAN == 0 && !is_logged(key);
    let lost: Vec<&Key> = left.keys.iter().map(|(key, _)| key).filter(is_lost).collect();
    let bytes = lost.iter().map(|key| u64::from(key.len.get())).sum();
    (!lost.is_empty()).then(|| {
        format!(
            "the last server had acknowledged {} writes ({}), but not flushed them",
            lost.len(),
            human_bytes(bytes)
        )
    })
}

/// Puts keys that were only in memory into index and accounts; the caller logs them.
pub(in crate::pcache) fn take_up(
    media: &Media,
    found: &Structures,
    replayed: &mut Replayed,
    backing_bytes: u64,
    left: &[Key],
) -> Result<Vec<Key>> {
    let segments = &found.segments;
    let mut keys = Vec::with_capacity(left.len());
    for key in left {
        if check_key(media, segments, backing_bytes, key).is_err() {
            continue;
        }
        let generation = segments.generation(key.segment.get());
        if key.generation.get() > generation {
            // As with a key in the log: a client's acknowledged data exists, but cannot be trusted.
            return Err(media.damaged(format_args!(
                "a key of the last server has generation {} of segment {}, which has only \
                 reached {generation}",
                key.generation.get(),
                key.segment.get()
            )));
        }
        // The server died after the key was logged, written back and collected, but before its
        // thread had emptied the set: the segment now holds other keys' data.
        if key.generation.get() < generation || segments.is_log(key.segment.get()) {
            continue;
        }
        let (segment, offset, len) = (key.segment.get(), key.segment_off.get(), key.len.get());
        segments.mark_data(segment);
        segments.reference(segment);
        if let Some(crcs) = &replayed.crcs {
            crcs.insert(segment, offset, len, key.data_crc.get());
        }
        let place = Place::new(segment, offset, key.generation.get());
        replayed.index.set(key.off.get(), u64::from(len), Some(place));
        if key.flags.get() & KEY_CLEAN == 0 {
            replayed.counts.dirty_bytes += u64::from(len);
        }
        keys.push(*key);
    }
    Ok(keys)
}

/// Logs the keys that a dead server left, between the marks that ordered write-back needs.
pub(in crate::pcache) fn log_taken_up(
    log: &KeyLog,
    media: &Media,
    keys: &[Key],
    is_mark_owed: bool,
) -> Result<()> {
    // A mark is also due before the keys of a server that died owing a mark: clients saw the state
    // that it had found.
    if is_mark_owed && !mutants::is(Mutant::AttachUnmarked) {
        log.owe_mark();
    }
    log.append(keys, false).map_err(|error| {
        media.damaged(format_args!("keys of the last server cannot be logged: {error:?}"))
    })?;
    if !keys.is_empty() && !mutants::is(Mutant::AttachUnmarked) {
        log.owe_mark();
    }
    Ok(())
}
