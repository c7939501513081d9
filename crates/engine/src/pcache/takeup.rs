//! Keys that a dead server left in shared memory: acknowledged, but not in the log.
//!
//! They belong to one attach of one medium. When label and cache_info on the medium are those of
//! that attach, the keys are taken up and logged. When they are not, the keys must not be
//! believed; but they are acknowledged writes, so they are never dropped in silence: if damage of
//! the medium is why they cannot be recognised, the attach is refused until the user says that
//! they may be lost; if somebody else has used the medium since, or the machine was started again,
//! they are lost already, and the attach says so.

use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::shm::SharedWords;
use crate::units::human_bytes;

use super::attach::{LogDamage, Structures, check_key};
use super::index::Place;
use super::keylog::KeyLog;
use super::label::Label;
use super::layout::{CACHE_INFO_AT, KEY_CLEAN, Key, PAGE_STRIDE};
use super::media::Media;
use super::openset::{self, LeftBehind, OpenSets};
use super::survey::Replayed;

/// The keys to take up. Refuses, or adds a note, when there are some that cannot be.
pub(super) fn keys_left(
    media: &Media,
    found: &Structures,
    replayed: &mut Replayed,
    shared: &SharedWords,
    damage: LogDamage,
) -> Result<Vec<Key>> {
    let Some(left) = OpenSets::left_behind(shared) else { return Ok(Vec::new()) };
    if mutants::is(Mutant::SharedIgnored) {
        return Ok(Vec::new());
    }
    let attach_id = found.label.as_ref().map(|(label, _)| label.attach_id);
    let is_of_attach = attach_id == Some(left.attach_id);
    let is_ours = is_of_attach && left.knows(&found.info.record);
    let has_failed = openset::has_failed(shared);
    if is_ours && !has_failed || mutants::is(Mutant::SharedOfAnybody) && attach_id.is_some() {
        return Ok(left.keys);
    }
    replayed.finish(media, &found.segments)?;
    let Some(lost) = loss(&left, replayed) else { return Ok(Vec::new()) };
    if is_ours && has_failed {
        // Their data may be what it was before: it was on its way when the medium failed.
        replayed.notes.push(format!("{lost}, and they are LOST: the cache device failed then"));
        return Ok(Vec::new());
    }
    let damaged = if !left.is_of_this_boot {
        None
    } else if is_of_attach && left.is_ahead_of(&found.info.record) {
        Some("cache_info")
    } else if !is_of_attach && Label::has_damaged_slot(media) {
        Some("the label")
    } else {
        None
    };
    let Some(damaged) = damaged else {
        replayed.notes.push(format!(
            "{lost}, and they are LOST: the medium is another one, or was used otherwise since, or \
             the machine was started again"
        ));
        return Ok(Vec::new());
    };
    let at = if damaged == "cache_info" { CACHE_INFO_AT } else { 0 };
    let stride = if damaged == "cache_info" { PAGE_STRIDE } else { Label::STRIDE };
    let why = format!("{damaged} on the medium is damaged (byte {at} or {})", at + stride);
    if damage == LogDamage::Truncate {
        replayed.notes.push(format!("{lost}, and they are LOST: {why}"));
        return Ok(Vec::new());
    }
    Err(Error::new(
        Kind::Io,
        format!(
            "{}: {lost}, and cannot be taken up: {why}, or this is an old copy of it; \
             `log_damage truncate` in the table goes on without them",
            media.name()
        ),
    ))
}

/// What is lost with these keys, in words; `None` if nothing: data that the backing device has,
/// and keys that reached the log before their server died.
fn loss(left: &LeftBehind, replayed: &Replayed) -> Option<String> {
    let is_logged = |key: &Key| {
        let off = key.off.get();
        let end = off.saturating_add(u64::from(key.len.get()));
        let place = Place::new(key.segment.get(), key.segment_off.get(), key.generation.get());
        replayed.index.lookup(off, end, |_| true).place == Some(place)
    };
    let is_lost = |key: &&Key| key.flags.get() & KEY_CLEAN == 0 && !is_logged(key);
    let lost: Vec<&Key> = left.keys.iter().filter(is_lost).collect();
    let bytes = lost.iter().map(|key| u64::from(key.len.get())).sum();
    (!lost.is_empty()).then(|| {
        format!(
            "the last server had acknowledged, but not flushed, {} writes ({})",
            lost.len(),
            human_bytes(bytes)
        )
    })
}

/// Puts keys that were only in memory into index and accounts; the caller logs them.
pub(super) fn take_up(
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
            // As with a key in the log: what the client was told is there, but cannot be trusted.
            return Err(media.damaged(format_args!(
                "a key of the last server has generation {} of segment {}, which has only \
                 reached {generation}",
                key.generation.get(),
                key.segment.get()
            )));
        }
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
            replayed.dirty_bytes += u64::from(len);
        }
        keys.push(*key);
    }
    Ok(keys)
}

/// Logs the keys that a dead server left, between the marks that ordered write-back needs.
pub(super) fn log_taken_up(
    log: &KeyLog,
    media: &Media,
    keys: &[Key],
    is_mark_owed: bool,
) -> Result<()> {
    // Also before the keys of a server that died owing a mark: clients saw what it had found.
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
