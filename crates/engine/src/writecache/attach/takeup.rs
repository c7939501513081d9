//! Takes up the acknowledged, uncommitted writes of a server that died: their data is in its slots,
//! only the entries are missing.

use std::collections::BTreeMap;

use zerocopy::IntoBytes;

use crate::disk::DiskLimits;
use crate::error::{Kind, Result};
use crate::mutants::{self, Mutant};
use crate::shm::SharedWords;

use super::Found;
use super::look::Part;
use crate::writecache::index::State;
use crate::writecache::layout::{ENTRY_SEQ_AT, Entry, FREE, Geometry, SEQ_COUNT_AT};
use crate::writecache::media::Medium;
use crate::writecache::memory::{rewrite, rewrite_blocks};
use crate::writecache::openlist::{Held, LeftBehind, announce_seq, found_seq};
use crate::writecache::walk::Finder;

/// Commits these writes.
pub(in crate::writecache) fn take_up(
    medium: &Medium,
    geometry: &Geometry,
    seq: &mut u64,
    found: &mut Found,
    shared: &SharedWords,
    left: LeftBehind,
    origin: &DiskLimits,
) -> Result<()> {
    let is_believed = mutants::is(Mutant::HeldOfAnybody) || mutants::is(Mutant::OldHeldOfAnybody);
    let is_ours = left.seqs.contains(seq) || is_believed;
    let mut wanted: BTreeMap<u64, u32> = BTreeMap::new();
    wanted.extend(left.held.iter().copied());
    let was_flushing = left.was_flushing && !mutants::is(Mutant::FoundUnsettled);
    if (left.has_failed || was_flushing) && is_ours {
        rewrite(medium, geometry)?;
    }
    if is_ours {
        // A flush that failed after its server's death may have lost any data that it covered.
        let held = left.held.iter().map(|held| held.1).filter(|_| was_flushing);
        let slots: Vec<u32> = left.overwritten.iter().copied().chain(held).collect();
        rewrite_blocks(medium, geometry, &slots, &mut found.notes)?;
    }
    if !is_ours || left.has_failed {
        if !wanted.is_empty() {
            found.notes.push(format!(
                "acknowledged, uncommitted writes of the last server to {} blocks are LOST: the \
                 medium has failed, or another program has used it since",
                wanted.len()
            ));
        }
        return Ok(());
    }
    let mut missing: Vec<Held> = Vec::new();
    for (block, slot) in wanted {
        if is_to_be_committed(medium, geometry, found, origin, (block, slot))? {
            missing.push((block, slot));
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    commit_left(medium, geometry, seq, found, shared, &missing)
}

/// Whether the entry of a write that was left in memory is still missing on the medium.
fn is_to_be_committed(
    medium: &Medium,
    geometry: &Geometry,
    found: &Found,
    origin: &DiskLimits,
    (block, slot): Held,
) -> Result<bool> {
    let nonsense = |why: &str| {
        let what = format_args!(
            "the last server's shared memory says that slot {slot} holds block {block}, but {why}"
        );
        medium.error(Kind::Io, what)
    };
    let end = (block.saturating_add(1)).saturating_mul(u64::from(geometry.block_bytes));
    if u64::from(slot) >= geometry.blocks || end > origin.size_bytes {
        return Err(nonsense("there is no such slot or block"));
    }
    let word = found.index.word(slot);
    match word.state() {
        State::Free => Ok(true),
        // The commit was done, but its end was not recorded.
        State::Live if word.block() == block => Ok(false),
        // Its own entry, from the commit in progress; or it was superseded.
        State::Marking => match found.uncommitted.binary_search(&slot) {
            Ok(_) => Ok(true),
            Err(_) => Err(nonsense("that is an older version")),
        },
        _ => Err(nonsense("the medium says otherwise")),
    }
}

/// A normal commit: entries and marks, then the counter. A server that died while it wrote the
/// counter may have left a counter that is readable but not durable yet, and an older version must
/// not be marked free before the version that this counter commits is safe. Storing the label of
/// this attach has made all of that durable.
fn commit_left(
    medium: &Medium,
    geometry: &Geometry,
    seq: &mut u64,
    found: &mut Found,
    shared: &SharedWords,
    missing: &[Held],
) -> Result<()> {
    let entry = |block: u64| Entry::new(block * geometry.block_sectors(), *seq);
    let entries: BTreeMap<u32, Entry> =
        missing.iter().map(|(block, slot)| (*slot, entry(*block))).collect();
    let freed = std::mem::take(&mut found.stale);
    let at = |slot: u32| geometry.entry_at(u64::from(slot));
    let (mark, fresh) = (FREE.to_le_bytes(), Entry::FRESH);
    // The other half of the entry does not change: a torn mark would be a live entry for a wrong
    // block.
    let mark_of = |slot: u32| match mutants::is(Mutant::MarkTorn) {
        true => (at(slot), fresh.as_bytes()),
        false => (at(slot) + ENTRY_SEQ_AT, &mark[..]),
    };
    let marked = freed.iter().filter(|slot| !entries.contains_key(*slot));
    let mut changes: Vec<(u64, &[u8])> = marked.map(|slot| mark_of(*slot)).collect();
    changes.extend(entries.iter().map(|(slot, entry)| (at(*slot), entry.as_bytes())));
    changes.sort_unstable_by_key(|change| change.0);
    medium.store_each(&changes)?;
    medium.settle()?;
    found_seq(shared, *seq);
    *seq += 1;
    announce_seq(shared, *seq);
    medium.store(geometry.start + SEQ_COUNT_AT, &seq.to_le_bytes())?;
    medium.settle()?;
    freed.into_iter().for_each(|slot| found.index.retire(slot));
    let mut part = Part::of(&found.index, 0, 1);
    missing.iter().for_each(|&(block, slot)| part.live(block, u64::from(slot)));
    found.stale.extend(part.stale);
    found
        .notes
        .push(format!("writes to {} blocks were recovered from shared memory", missing.len()));
    Ok(())
}
