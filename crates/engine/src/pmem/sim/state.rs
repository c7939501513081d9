//! The content of a simulated medium: the visible bytes, the bytes that survive a crash, and the
//! pending stores.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use super::SimCounts;
use crate::error::Status;
use crate::shm::SharedWords;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, ThreadId, current_thread};

pub(super) const PAGE: u64 = 4096;
/// Bytes in a cache line, the unit that leaves the CPU.
const LINE: u64 = 64;
const WORD: u64 = 8;

type Page = [u8; PAGE as usize];
pub(super) type Pages = HashMap<u64, Arc<Page>>;

#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// What loads see.
    pub(super) visible: Pages,
    /// The content that survives, for pages with pending stores only; other pages survive with
    /// their visible content.
    pub(super) durable: Pages,
    /// In store order; none crosses a page.
    pub(super) pending: Vec<Store>,
    pub(super) poison: Vec<Range<u64>>,
    pub(super) counts: SimCounts,
    /// Calls left until drains (or syncs) fail; 0 means that all further calls fail.
    pub(super) drains_left: Option<u64>,
    pub(super) syncs_left: Option<u64>,
    /// A sync has failed at some time.
    pub(super) has_given_up: bool,
    /// Whether that is a failure of the medium.
    pub(super) tells_failure: bool,
    /// Fences left until the state is put aside.
    pub(super) cut_in: Option<u64>,
    pub(super) cut: Option<Box<State>>,
    /// Shared memory of the server that is saved at the cut, and its saved content.
    pub(super) beside: Option<SharedWords>,
    pub(super) beside_at_cut: Vec<u64>,
}

/// A store that a crash may lose, wholly or in part.
#[derive(Clone, Debug)]
pub(super) struct Store {
    at: u64,
    bytes: Box<[u8]>,
    thread: ThreadId,
    stage: Stage,
}

/// How far a store has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// In the CPU.
    Stored,
    /// Drained by its thread, on a medium that must be synced as well.
    Drained,
    /// A sync of it has failed: no later one tries again, unless its page is stored to.
    GivenUp,
    /// Survives; still listed only because it must be applied after older words of its line.
    Durable,
}

/// One 8-byte piece of a pending store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Word<'a> {
    pub(super) at: u64,
    pub(super) bytes: &'a [u8],
    pub(super) stage: Stage,
}

impl State {
    pub(super) fn store_in_page(&mut self, at: u64, bytes: &[u8]) {
        let number = at / PAGE;
        // Not `visible`'s entry API: a page that was never stored to survives as zeroes.
        let before = self.visible.get(&number).cloned().unwrap_or_else(zero_page);
        self.durable.entry(number).or_insert(before);
        write(&mut self.visible, at, bytes);
        let thread = current_thread().id();
        if self.has_given_up {
            let is_tried_again =
                |store: &&mut Store| store.stage == Stage::GivenUp && store.at / PAGE == number;
            let again = self.pending.iter_mut().filter(is_tried_again);
            again.for_each(|store| store.stage = Stage::Drained);
        }
        self.pending.push(Store { at, bytes: bytes.into(), thread, stage: Stage::Stored });
    }

    pub(super) fn fence(&mut self) {
        let Some(left) = &mut self.cut_in else { return };
        *left -= 1;
        if *left == 0 {
            self.cut_in = None;
            let words = self.beside.iter().flat_map(|memory| memory.words());
            self.beside_at_cut = words.map(|word| word.load(Ordering::SeqCst)).collect();
            self.cut = Some(Box::new(self.clone()));
        }
    }

    pub(super) fn drain(&mut self, thread: ThreadId) {
        for store in &mut self.pending {
            if store.thread == thread && store.stage == Stage::Stored {
                store.stage = Stage::Drained;
            }
        }
    }

    /// A sync has failed. As in Linux, pages that could not be written count as clean.
    pub(super) fn give_up(&mut self) {
        let drained = |store: &&mut Store| store.stage == Stage::Drained;
        self.pending.iter_mut().filter(drained).for_each(|store| store.stage = Stage::GivenUp);
        self.has_given_up = true;
    }

    /// Makes drained stores durable. One that follows an undrained store of another thread to the
    /// same line stays listed, or a crash would apply the older one over it.
    pub(super) fn settle(&mut self) {
        let mut blocked = HashSet::new();
        let durable = &mut self.durable;
        self.pending.retain_mut(|store| {
            let mut lines = store.at / LINE..(store.at + store.bytes.len() as u64).div_ceil(LINE);
            if matches!(store.stage, Stage::Stored | Stage::GivenUp) {
                blocked.extend(lines);
                return true;
            }
            store.stage = Stage::Durable;
            if !blocked.is_empty() && lines.any(|line| blocked.contains(&line)) {
                return true;
            }
            write(durable, store.at, &store.bytes);
            false
        });
        if self.pending.is_empty() {
            self.durable.clear();
        } else {
            let busy: HashSet<u64> = self.pending.iter().map(|store| store.at / PAGE).collect();
            self.durable.retain(|number, _| busy.contains(number));
        }
    }

    /// The pending words of every line, in store order.
    pub(super) fn pending_words(&self) -> BTreeMap<u64, Vec<Word<'_>>> {
        let mut lines: BTreeMap<u64, Vec<Word<'_>>> = BTreeMap::new();
        for store in &self.pending {
            for (at, bytes) in pieces(store.at, &store.bytes, WORD) {
                let word = Word { at, bytes, stage: store.stage };
                lines.entry(at / LINE).or_default().push(word);
            }
        }
        lines
    }
}

/// `bytes` at `at`, cut at multiples of `border`.
pub(super) fn pieces(at: u64, bytes: &[u8], border: u64) -> impl Iterator<Item = (u64, &[u8])> {
    let mut at = at;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let piece;
        let start = at;
        (piece, rest) = rest.split_at(rest.len().min((border - at % border) as usize));
        at += piece.len() as u64;
        Some((start, piece))
    })
}

fn zero_page() -> Arc<Page> {
    Arc::new([0; PAGE as usize])
}

/// Writes what lies within one page.
pub(super) fn write(pages: &mut Pages, at: u64, bytes: &[u8]) {
    let page = Arc::make_mut(pages.entry(at / PAGE).or_insert_with(zero_page));
    let start = (at % PAGE) as usize;
    page[start..start + bytes.len()].copy_from_slice(bytes);
}

/// Reads any range; pages that do not exist are zeroes.
pub(super) fn read(pages: &Pages, at: u64, into: &mut [u8]) {
    let mut at = at;
    let mut rest = into;
    while !rest.is_empty() {
        let start = (at % PAGE) as usize;
        let piece;
        (piece, rest) = rest.split_at_mut(rest.len().min(PAGE as usize - start));
        match pages.get(&(at / PAGE)) {
            Some(page) => piece.copy_from_slice(&page[start..start + piece.len()]),
            None => piece.fill(0),
        }
        at += piece.len() as u64;
    }
}

/// One more call: fails when none is left, and from then on.
pub(super) fn count_down(left: &mut Option<u64>) -> Result<(), Status> {
    match left {
        Some(0) => Err(Status::Io),
        Some(left) => {
            *left -= 1;
            Ok(())
        }
        None => Ok(()),
    }
}
