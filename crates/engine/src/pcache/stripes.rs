//! Stripes: the locks of the device's regions, and the state under them. Every `n`-th 4 MiB region
//! shares a short lock, an open key set, and a count of dirty bytes.
//!
//! Keys join the open set of their stripe, and the set is logged when it is full, old or requested.

use zerocopy::FromZeros;

use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock, lock_soon};

use super::Pcache;
use super::fills::Fills;
use super::keylog::AppendError;
use super::layout::{KEY_CLEAN, KEYS_MAX, Key, REGION_BYTES};
use super::openset::OpenSets;
use super::segment::Space;

/// Most stripes, that is open key sets.
pub(super) const STRIPES_MAX: usize = 16;

/// Values remembered of data with its key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    /// Its CRC, with `data_crc`.
    pub(super) crc: u32,
    /// A fingerprint of it, to recognise the data when the key is found in memory.
    pub(super) look: u32,
}

/// How an append to an open key set ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// The set stays open, unless it is full.
    No,
    /// The set is logged.
    Yes,
    /// The set is logged with a flush mark after it.
    Marked,
}

/// The lock of every `n`-th 4 MiB region, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Stripe {
    fills: Mutex<Fills>,
    /// Dirty bytes that were ever written here. Changes under the lock, is read without it.
    dirtied_bytes: AtomicU64,
}

/// All stripes of a cache.
#[derive(Debug)]
pub(super) struct Stripes {
    stripes: Box<[Stripe]>,
    open: OpenSets,
    /// Scratch space for the keys of a set that is being logged.
    scratch: Mutex<Vec<Key>>,
    /// Dirty bytes that the attach found.
    dirty_at_start: u64,
    /// Dirty bytes that were written back since.
    cleaned_bytes: AtomicU64,
    /// About how many of the dirty bytes are zeroes, which take no space.
    zeroed_bytes: AtomicU64,
}

impl Stripes {
    /// One for each open set, of a cache with `dirty_bytes` dirty bytes.
    pub(super) fn new(open: OpenSets, dirty_bytes: u64) -> Stripes {
        let count = open.stripes();
        Stripes {
            stripes: (0..count).map(|_| Stripe::default()).collect(),
            open,
            scratch: Mutex::new(Vec::with_capacity(count * KEYS_MAX)),
            dirty_at_start: dirty_bytes,
            cleaned_bytes: AtomicU64::new(0),
            zeroed_bytes: AtomicU64::new(0),
        }
    }

    /// The stripe of a byte of the device.
    pub(super) fn of(&self, offset: u64) -> usize {
        (offset / REGION_BYTES) as usize % self.stripes.len()
    }

    pub(super) fn lock(&self, stripe: usize) -> MutexGuard<'_, Fills> {
        lock(&self.stripes[stripe].fills)
    }

    /// For writes: spins for a moment before it sleeps.
    pub(super) fn lock_soon(&self, stripe: usize) -> MutexGuard<'_, Fills> {
        lock_soon(&self.stripes[stripe].fills)
    }

    /// The open key sets.
    pub(super) fn open(&self) -> &OpenSets {
        &self.open
    }

    pub(super) fn has_open_keys(&self) -> bool {
        (0..self.open.stripes()).any(|stripe| self.open.len(stripe) > 0)
    }

    /// The caller holds the stripe's lock, so this needs no atomic addition.
    pub(super) fn add_dirty(&self, stripe: usize, bytes: u64) {
        let dirtied = &self.stripes[stripe].dirtied_bytes;
        let sum = dirtied.load(Ordering::Relaxed) + bytes;
        dirtied.store(sum, Ordering::Release);
    }

    /// `bytes` more dirty bytes are on the backing device now; `zeroes` of them were known zeroes.
    pub(super) fn note_cleaned(&self, bytes: u64, zeroes: u64) {
        // Zeroes may have been forgotten, so there may seem to be more than there is dirty data.
        let dirty = self.dirty_bytes().saturating_sub(bytes);
        let rest = |zeroed: u64| Some(zeroed.saturating_sub(zeroes).min(dirty));
        let _ = self.zeroed_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, rest);
        self.cleaned_bytes.fetch_add(bytes, Ordering::SeqCst);
    }

    /// `bytes` of the dirty bytes are zeroes.
    pub(super) fn note_zeroed(&self, bytes: u64) {
        self.zeroed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// About how many dirty bytes take space.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.dirty_bytes().saturating_sub(self.zeroed_bytes.load(Ordering::Relaxed))
    }

    /// Dirty bytes that were written back since the attach.
    pub(super) fn cleaned_bytes(&self) -> u64 {
        self.cleaned_bytes.load(Ordering::SeqCst)
    }

    /// All dirty bytes ever stored, including those that the attach found.
    pub(super) fn came_bytes(&self) -> u64 {
        let dirtied = |stripe: &Stripe| stripe.dirtied_bytes.load(Ordering::Acquire);
        self.dirty_at_start + self.stripes.iter().map(dirtied).sum::<u64>()
    }

    /// Bytes that only the cache has.
    pub(super) fn dirty_bytes(&self) -> u64 {
        // Cleaned bytes are read first, then all dirty bytes: so the difference is never too small.
        let cleaned = self.cleaned_bytes();
        self.came_bytes().saturating_sub(cleaned)
    }
}

impl Pcache {
    /// If a set is full, logging it failed before for lack of space: try again, before any other
    /// change.
    pub(super) fn make_set_room(&self, stripe: usize) -> Result<(), AppendError> {
        match self.stripes.open.len(stripe) {
            KEYS_MAX => self.close_set(stripe, false),
            _ => Ok(()),
        }
    }

    /// The set has room, its stripe is locked.
    pub(super) fn push_key(&self, stripe: usize, at: u64, space: Space, sums: Sums, flags: u32) {
        let mut key = Key::new_zeroed();
        key.off.set(at);
        key.len.set(space.len);
        key.flags.set(flags);
        key.segment.set(space.segment);
        key.segment_off.set(space.offset);
        key.generation.set(space.generation);
        key.data_crc.set(sums.crc);
        self.stripes.open.push(stripe, &key, sums.look);
    }

    /// Logs the set if it is full or `close` requests it. A full set that finds no space stays
    /// open: its keys are as safe as the keys of any open set.
    pub(super) fn close_after_push(&self, stripe: usize, close: Close) -> Result<(), AppendError> {
        if close == Close::No {
            if self.stripes.open.len(stripe) == KEYS_MAX {
                match self.close_set(stripe, false) {
                    Err(AppendError::NoRoom) | Ok(()) => {}
                    failed => return failed,
                }
            }
            return Ok(());
        }
        self.close_set(stripe, close == Close::Marked)
    }

    /// Logs one open set, durably. Its stripe is locked.
    fn close_set(&self, stripe: usize, mark: bool) -> Result<(), AppendError> {
        if mutants::is(Mutant::ServedSaidLate) {
            self.identity.say_served();
        }
        if self.stripes.open.len(stripe) == 1 {
            // Usually a FUA write: it needs no state that other stripes use.
            self.log.append(&[self.stripes.open.key(stripe, 0)], mark)?;
            self.stripes.open.clear(stripe);
            return Ok(());
        }
        let mut keys = lock_soon(&self.stripes.scratch);
        keys.clear();
        self.stripes.open.collect(stripe, &mut keys);
        self.log.append(&keys, mark)?;
        self.stripes.open.clear(stripe);
        Ok(())
    }

    /// Logs every open set, one after the other: a write waits for no more than one of them.
    pub(super) fn close_each(&self) -> Result<(), AppendError> {
        (0..self.stripes.open.stripes()).try_for_each(|stripe| {
            let _state = self.stripes.lock_soon(stripe);
            match self.stripes.open.len(stripe) {
                0 => Ok(()),
                _ => self.close_set(stripe, false),
            }
        })
    }

    /// Logs every open set, together, durably. With `mark`, as a client's flush.
    pub(super) fn close_all(&self, mark: bool) -> Result<(), AppendError> {
        // All stripes together, in order: a key of a locked stripe cannot overtake one that is
        // being logged, and keys of many stripes share key sets.
        let guards: [_; STRIPES_MAX] = std::array::from_fn(|nth| {
            self.stripes.stripes.get(nth).map(|stripe| lock(&stripe.fills))
        });
        let mut keys = lock(&self.stripes.scratch);
        keys.clear();
        let skipped = usize::from(mutants::is(Mutant::FlushSkipsStripe));
        for stripe in 0..self.stripes.open.stripes() - skipped {
            self.stripes.open.collect(stripe, &mut keys);
        }
        if keys.is_empty() && !mark {
            return Ok(());
        }
        if mutants::is(Mutant::SetClearedUnlocked) {
            drop(guards);
        }
        self.log.append(&keys, mark)?;
        for stripe in 0..self.stripes.open.stripes() - skipped {
            self.stripes.open.clear(stripe);
        }
        Ok(())
    }

    /// A CLEAN key for data that the backing device has too.
    pub(super) fn push_clean(&self, stripe: usize, at: u64, space: Space, sums: Sums) {
        self.point(at, space, sums);
        self.push_clean_key(stripe, at, space, sums);
    }

    /// As [`Pcache::push_clean`], for data that is already in the index.
    pub(super) fn push_clean_key(&self, stripe: usize, at: u64, space: Space, sums: Sums) {
        self.push_key(stripe, at, space, sums, KEY_CLEAN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pcache::layout::{CacheInfo, Position};
    use crate::shm::SharedWords;

    /// 100 dirty bytes, of which 60 are zeroes.
    fn some() -> Stripes {
        let shared = SharedWords::private(super::super::shared_words(1));
        let info = CacheInfo::new(1, 0, 31, 0x1182);
        let open = OpenSets::begin(shared, 1, 1, &info, Position::default());
        let stripes = Stripes::new(open, 0);
        stripes.add_dirty(0, 100);
        stripes.note_zeroed(60);
        assert_eq!(stripes.stored_bytes(), 40);
        stripes
    }

    #[test]
    fn exactly_what_is_written_back_is_subtracted() {
        let stripes = some();
        stripes.note_cleaned(40, 0);
        assert_eq!((stripes.dirty_bytes(), stripes.stored_bytes()), (60, 0), "data goes first");
        let stripes = some();
        stripes.note_cleaned(60, 60);
        assert_eq!((stripes.dirty_bytes(), stripes.stored_bytes()), (40, 40), "zeroes go first");
    }

    #[test]
    fn forgotten_zeroes_do_not_hide_later_data() {
        let stripes = some();
        stripes.note_cleaned(100, 0);
        assert_eq!(stripes.stored_bytes(), 0);
        stripes.add_dirty(0, 10);
        assert_eq!(stripes.stored_bytes(), 10);
    }
}
