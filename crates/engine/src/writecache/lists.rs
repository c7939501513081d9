//! The lists of uncommitted blocks. Each stripe has two: one is filled while the batch of the other
//! one is being committed. The lists' content is in shared memory (`openlist`); this file tracks
//! which of them are filled, and where space is promised.

use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::target::Events;

use super::index::Locked;
use super::openlist::{Held, OpenLists};

/// Totals of the lists that are being filled, in one word: a bit for each stripe with a list that
/// is not empty, and above the bits the number of blocks since the last commit began.
#[derive(Debug, Default)]
struct Filled(AtomicU64);

const BLOCKS_SHIFT: u32 = 32;

impl Filled {
    /// Counts `count` new blocks in the list of a stripe, whose lock is held. `is_first`: the list
    /// was empty.
    #[inline]
    fn add(&self, stripe: usize, is_first: bool, count: u64) {
        let more = count << BLOCKS_SHIFT | u64::from(is_first) << stripe;
        let before = self.0.fetch_add(more, Ordering::SeqCst);
        debug_assert!(!is_first || before >> stripe & 1 == 0, "a full list is taken for empty");
    }
}

/// Room in a list of uncommitted blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListRoom {
    /// It was free, and is promised now.
    Promised,
    /// It will be there when the list's content is committed.
    AfterRound,
    /// The list is empty, and all of it is promised to others.
    AfterOthers,
}

/// The lists of all stripes. A method with a locked stripe as argument changes state under that
/// lock.
#[derive(Debug)]
pub(super) struct Lists {
    memory: OpenLists,
    /// Which of its two lists each stripe fills.
    filling: Box<[AtomicU32]>,
    filled: Filled,
    /// Mode `s`, for each list of each stripe: whether it has blocks that need entries, in addition
    /// to overwritten ones.
    has_fresh: Box<[AtomicBool]>,
    /// Room promised in the list that is being filled.
    promised: Box<[AtomicU32]>,
    /// Number of the batch that is open.
    batch: AtomicU64,
    /// A write may wait for other writes, which have been promised a whole list.
    wants_room: AtomicBool,
    events: Arc<Events>,
}

impl Lists {
    /// Empty lists, in `memory`. `seq`: the commit counter.
    pub(super) fn new(memory: OpenLists, stripes: usize, seq: u64, events: &Arc<Events>) -> Lists {
        Lists {
            memory,
            filling: (0..stripes).map(|_| AtomicU32::new(0)).collect(),
            filled: Filled::default(),
            has_fresh: (0..stripes * 2).map(|_| AtomicBool::new(false)).collect(),
            promised: (0..stripes).map(|_| AtomicU32::new(0)).collect(),
            batch: AtomicU64::new(seq),
            wants_room: AtomicBool::new(false),
            events: events.clone(),
        }
    }

    /// The memory that holds the lists.
    #[inline]
    pub(super) fn memory(&self) -> &OpenLists {
        &self.memory
    }

    /// The list that a stripe fills, read without the stripe's lock.
    #[inline]
    pub(super) fn filling_of(&self, stripe: usize) -> usize {
        self.filling[stripe].load(Ordering::Relaxed) as usize
    }

    /// Which list the stripe fills.
    #[inline]
    pub(super) fn filling(&self, locked: &Locked<'_>) -> usize {
        self.filling_of(locked.stripe())
    }

    /// The list whose batch is being committed. For the thread that makes the round.
    #[inline]
    pub(super) fn closed(&self, stripe: usize) -> usize {
        1 - self.filling_of(stripe)
    }

    /// Whether any list that is being filled has an entry.
    #[inline]
    pub(super) fn has_any(&self) -> bool {
        self.filled_stripes() != 0
    }

    /// A bit for each stripe whose list that is being filled is not empty.
    #[inline]
    pub(super) fn filled_stripes(&self) -> u32 {
        self.filled.0.load(Ordering::SeqCst) as u32
    }

    /// The number of blocks that writes added since the last round began.
    #[inline]
    pub(super) fn blocks(&self) -> u64 {
        self.filled.0.load(Ordering::Relaxed) >> BLOCKS_SHIFT
    }

    /// Entries that a list has room for.
    #[inline]
    pub(super) fn list_max(&self) -> usize {
        self.memory.list_max()
    }

    /// Whether a list has room for more blocks.
    #[inline]
    pub(super) fn has_room(&self, locked: &Locked<'_>, list: usize, count: usize) -> bool {
        self.memory.len(locked.stripe(), list) + count <= self.list_max()
    }

    /// Adds blocks to the list that is being filled: `slots` hold the blocks from `first` on, with
    /// this `data`. Returns whether they are its first ones. A commit does not see them before
    /// [`Lists::count`].
    #[inline]
    pub(super) fn push(
        &self,
        locked: &Locked<'_>,
        list: usize,
        first: u64,
        slots: &[u32],
        data: &[u8],
    ) -> bool {
        let stripe = locked.stripe();
        let batch = self.batch.load(Ordering::Relaxed);
        let is_first = self.memory.len(stripe, list) == 0;
        self.memory.push(stripe, list, first, slots, (batch, data));
        is_first && !slots.is_empty()
    }

    /// The pushed blocks can be committed now.
    #[inline]
    pub(super) fn count(&self, locked: &Locked<'_>, is_first: bool, count: u64) {
        self.filled.add(locked.stripe(), is_first, count);
    }

    /// Blocks that need entries were added to a list.
    pub(super) fn note_fresh(&self, locked: &Locked<'_>, list: usize) {
        self.has_fresh[locked.stripe() * 2 + list].store(true, Ordering::Relaxed);
    }

    /// Promises room in the list that is being filled.
    pub(super) fn promise(&self, locked: &Locked<'_>, count: usize) -> ListRoom {
        let stripe = locked.stripe();
        let promised = self.promised[stripe].load(Ordering::Relaxed);
        let len = self.memory.len(stripe, self.filling(locked));
        if len + promised as usize + count <= self.list_max() {
            self.promised[stripe].store(promised + count as u32, Ordering::Relaxed);
            return ListRoom::Promised;
        }
        if len > 0 {
            return ListRoom::AfterRound;
        }
        // Under the lock: a thread that uses or gives up its promise sees it.
        self.wants_room.store(true, Ordering::SeqCst);
        ListRoom::AfterOthers
    }

    /// The promise of space for `count` blocks is used, or not needed. [`Lists::tell`] follows.
    #[inline]
    pub(super) fn keep_promise(&self, locked: &Locked<'_>, count: usize) {
        let promised = &self.promised[locked.stripe()];
        promised.store(promised.load(Ordering::Relaxed) - count as u32, Ordering::Relaxed);
    }

    /// Promises were used or given up, and a write may wait for that.
    #[inline]
    pub(super) fn tell(&self) {
        if mutants::is(Mutant::PromisesUnheard) {
            return;
        }
        if self.wants_room.load(Ordering::SeqCst) && self.wants_room.swap(false, Ordering::SeqCst) {
            self.events.room();
        }
    }

    /// Records that `slots` are about to be overwritten, and promises list space for them. `false`:
    /// the lists are full.
    pub(super) fn begin_overwrite(&self, locked: &Locked<'_>, slots: &[u32]) -> bool {
        let stripe = locked.stripe();
        let promised = self.promised[stripe].load(Ordering::Relaxed) as usize + slots.len();
        let has_room = self.has_room(locked, self.filling(locked), promised)
            && self.memory.begin_overwrite(stripe, slots);
        if has_room {
            self.promised[stripe].store(promised as u32, Ordering::Relaxed);
        }
        has_room
    }

    /// A slot has been overwritten, with `data`: adds it to the list that is being filled.
    pub(super) fn push_overwritten(&self, locked: &Locked<'_>, held: Held, data: &[u8]) {
        let (stripe, list) = (locked.stripe(), self.filling(locked));
        let batch = self.batch.load(Ordering::Relaxed);
        self.filled.add(stripe, self.memory.len(stripe, list) == 0, 1);
        self.memory.push_overwritten(stripe, list, held, (batch, data));
    }

    /// No write to `slots` is in flight any more. Called after their entries: at every moment the
    /// next server finds one or the other.
    pub(super) fn end_overwrite(&self, locked: &Locked<'_>, slots: &[u32]) {
        self.memory.end_overwrite(locked.stripe(), slots);
        self.keep_promise(locked, slots.len());
    }

    /// Empties the totals. Returns a bit for each stripe whose list is not empty: each must be
    /// closed.
    #[inline]
    pub(super) fn take_filled(&self) -> u32 {
        self.filled.0.swap(0, Ordering::SeqCst) as u32
    }

    /// Another batch is open. `seq`: the commit counter.
    pub(super) fn begin_batch(&self, seq: u64) {
        // Not by the counter, which a round of overwritten blocks does not change: the next server
        // must know which of a stripe's two lists is newer.
        match mutants::is(Mutant::BatchByCounter) {
            true => self.batch.store(seq + 1, Ordering::Release),
            false => _ = self.batch.fetch_add(1, Ordering::AcqRel),
        }
    }

    /// From here on writes fill the other list. Returns whether the closed one has blocks that need
    /// entries.
    #[inline]
    pub(super) fn close(&self, locked: &Locked<'_>) -> bool {
        let (stripe, list) = (locked.stripe(), self.filling(locked));
        let has_fresh = self.has_fresh[stripe * 2 + list].load(Ordering::Relaxed);
        self.filling[stripe].store(1 - list as u32, Ordering::Release);
        has_fresh
    }

    /// The entries of a closed list, including the entries of overwritten slots.
    #[inline]
    pub(super) fn closed_entries(&self, stripe: usize) -> impl ExactSizeIterator<Item = Held> + '_ {
        self.memory.all(stripe, self.closed(stripe))
    }

    /// Empties a closed list: its batch is durable.
    #[inline]
    pub(super) fn clear_closed(&self, stripe: usize) {
        let list = self.closed(stripe);
        self.has_fresh[stripe * 2 + list].store(false, Ordering::Relaxed);
        self.memory.clear(stripe, list);
    }

    /// The number of promised entries.
    #[cfg(all(test, feature = "shuttle"))]
    pub(super) fn promised(&self) -> usize {
        self.promised.iter().map(|count| count.load(Ordering::SeqCst) as usize).sum()
    }
}
