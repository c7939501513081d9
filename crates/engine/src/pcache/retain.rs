//! Keeping hot data: the treatment of clean data when collection passes its key.
//!
//! If data is kept in its place, its key is logged again, CLEAN: the new key takes its own
//! reference before the old one gives its reference up, so the segment is not reused. If data is
//! moved, it is copied to a segment of the main part, and has left the CPU before its key is
//! pushed. Both kinds of keys join the stripe's open set, under the stripe's lock, after a check
//! that the index still names the place: a newer write of the range can only follow them in the
//! log, and an older one cannot be left. Losing these keys loses no data: the backing device has
//! the same data.
//!
//! While writes would wait for space (see pressure.rs) no data is kept in its place, because its
//! space could not be freed soon: the hottest data is moved, and the rest is dropped.
//!
//! The index has places, not keys. Zeroes are stored once, so an old key of zeroes and a new, dirty
//! one may name the same place, and the index does not tell which key set it. Collection does not
//! touch such a place, and the zeroes are dropped with their segment. (Data that was kept also has
//! two keys; both are CLEAN.)
//!
//! If data cannot be moved for lack of space, it is kept in its place for another lap and loses
//! a use; so hot data is not dropped because collection began a moment too late.

use crate::mutants::{self, Mutant};
use crate::sync::atomic::Ordering;
use crate::units::{BLOCK, SECTOR};

use super::Pcache;
use super::index::Place;
use super::layout::{KEYS_MAX, Key, Position};
use super::retention::{Class, Verdict};
use super::segment::Space;
use super::stripes::{Close, Sums};

/// Most bytes that are moved in one step.
const MOVE_BYTES: u64 = 64 << 10;
/// While writes would wait, at most this part (1 / n) of the passed data is moved.
const MOVED_SHARE: u64 = 8;
/// And no more than this per slice.
const MOVED_BYTES_MAX: u64 = 1 << 20;

/// How a slice of the log is passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Pass {
    /// Everything is dropped.
    #[default]
    Drop,
    /// Writes would wait: all data is dropped except the hottest, which is moved.
    Yield,
    /// Hot data stays.
    Keep,
}

/// State of keeping while a slice of the log is passed.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    pass: Pass,
    /// Bytes that may be moved although writes would wait.
    credit: u64,
    keeps_window: bool,
    has_kept: bool,
    scratch: Vec<u8>,
    lap: Option<Lap>,
}

/// A walk of collection from key_tail to the end that the log had when the walk began: it meets
/// every key once, and so counts the current data of each segment.
#[derive(Debug)]
struct Lap {
    until: Position,
    turns: u64,
    current_bytes: Vec<u32>,
}

impl Keeper {
    /// Begins collection. With `keeps_window`, no data of the window is dropped.
    pub(super) fn begin(&mut self, keeps_window: bool) {
        self.has_kept = false;
        self.keeps_window = keeps_window;
    }

    /// Begins a slice.
    pub(super) fn begin_slice(&mut self, pass: Pass) {
        self.pass = pass;
    }

    /// Whether the index must be asked about every key.
    pub(super) fn looks_at_uses(&self) -> bool {
        self.pass != Pass::Drop
    }

    /// Takes this many bytes of the credit for moves, if there are enough.
    fn spend(&mut self, bytes: u64) -> bool {
        let is_enough = self.credit >= bytes;
        self.credit -= if is_enough { bytes } else { 0 };
        is_enough
    }

    /// Whether keys were logged again since collection began.
    pub(super) fn has_kept(&self) -> bool {
        self.has_kept
    }
}

/// A run of the logical device for which the index has the place of a passed key.
#[derive(Clone, Copy, Debug)]
struct Run {
    offset: u64,
    len: u64,
    place: Place,
}

impl Pcache {
    /// Condemns segments of the main part beyond its share, when space is short.
    pub(super) fn condemn(&self) {
        if self.collector.retention().fills_cache() && self.is_space_short() {
            let usable = self.segments.count().saturating_sub(self.free_wanted());
            self.segments.condemn(self.collector.retention().main_max(usable));
        }
    }

    /// Whether the window is too small because collection has yet to empty some segments.
    pub(super) fn is_window_small(&self) -> bool {
        if !self.collector.retention().fills_cache() || !self.is_space_short() {
            return false;
        }
        let usable = self.segments.count().saturating_sub(self.free_wanted());
        let (window, emptying) = self.segments.window_and_emptying();
        emptying > 0 && window <= self.collector.retention().window_min(usable)
    }

    /// Collection has reached `at`. At the end of a lap, sparse segments are found.
    pub(super) fn count_lap(&self, keeper: &mut Keeper, at: Position) {
        if keeper.lap.as_ref().is_some_and(|lap| lap.until != at) {
            return;
        }
        if let Some(lap) = keeper.lap.take() {
            let percent = u64::from(self.collector.retention().dense_percent());
            let bytes_min = u64::from(self.media.geometry.data_bytes()) * percent / 100;
            self.segments.find_sparse(&lap.current_bytes, lap.turns, bytes_min as u32);
        }
        keeper.lap = Some(Lap {
            until: self.log.head(),
            turns: self.segments.turns(),
            current_bytes: vec![0; self.segments.count() as usize],
        });
    }

    /// Condemns this many segments more than the main part's share requires.
    pub(super) fn condemn_more(&self, count: u32) {
        let main = self.segments.condemn(u32::MAX);
        self.segments.condemn(main.saturating_sub(count));
    }

    /// Collection passes a current key. Its reference is given up afterwards.
    pub(super) fn retain(&self, key: &Key, keeper: &mut Keeper) {
        let (offset, len) = (key.off.get(), u64::from(key.len.get()));
        // Damaged dirty data is not what the backing device has.
        if keeper.pass == Pass::Drop || self.bad.overlaps(offset, len) {
            return;
        }
        self.collector.note_retained();
        if keeper.pass == Pass::Yield {
            return self.yield_key(key, keeper);
        }
        let place = Place::new(key.segment.get(), key.segment_off.get(), key.generation.get());
        let class = match self.segments.class(place.segment) {
            // Judged like data that stays in its place.
            Class::Window if keeper.keeps_window => Class::Main,
            class => class,
        };
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let place = place.plus(at - offset);
            let judge = |uses| self.collector.retention().judge(class, uses);
            let (len, verdict) = self.judge(at, end, place, class, judge);
            let run = Run { offset: at, len, place };
            let verdict = verdict.filter(|_| !self.may_be_anothers(run));
            at += len;
            keeper.has_kept |= matches!(verdict, Some(Verdict::Keep | Verdict::Move(_)));
            match verdict {
                None => {}
                Some(Verdict::Keep) => {
                    if let Some(lap) = &mut keeper.lap {
                        lap.current_bytes[run.place.segment as usize] += run.len as u32;
                    }
                    self.keep(run, key);
                }
                Some(Verdict::Move(uses)) => {
                    self.move_run(run, uses, key, &mut keeper.scratch);
                }
                Some(Verdict::Forget) => self.forget(run, false),
                Some(Verdict::Remember) => self.forget(run, true),
            }
        }
    }

    /// Collection passes a current key while writes would wait. The data is dropped with its
    /// segment, and the index needs no change; the hottest data is moved, as far as there is
    /// credit.
    fn yield_key(&self, key: &Key, keeper: &mut Keeper) {
        let (offset, len) = (key.off.get(), u64::from(key.len.get()));
        keeper.credit = (keeper.credit + len / MOVED_SHARE).min(MOVED_BYTES_MAX);
        let place = Place::new(key.segment.get(), key.segment_off.get(), key.generation.get());
        let class = self.segments.class(place.segment);
        let judge = |uses| self.collector.retention().judge_pressed(class, uses);
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let place = place.plus(at - offset);
            let (len, verdict) = self.judge(at, end, place, class, judge);
            let run = Run { offset: at, len, place };
            at += len;
            match verdict {
                // A write may wait for this, so only data that would be moved is examined.
                Some(Verdict::Move(uses)) if !self.may_be_anothers(run) && keeper.spend(len) => {
                    keeper.has_kept |= self.rescue(run, uses, &mut keeper.scratch);
                }
                Some(_) => {
                    self.counters.yielded_bytes.fetch_add(len, Ordering::Relaxed);
                }
                None => {}
            }
        }
    }

    /// Copies data into the main part, unless a write wants the space. Returns whether it did.
    fn rescue(&self, run: Run, uses: u8, scratch: &mut Vec<u8>) -> bool {
        let mut done = 0;
        while done < run.len {
            let (offset, place) = (run.offset + done, run.place.plus(done));
            let len = self.piece_len(offset, (run.len - done).min(MOVE_BYTES));
            let is_roomy = self.log.has_room();
            let reserve = self.collector.write_reserve();
            let space = is_roomy.then(|| self.segments.take_main(0, len as u32, reserve)).flatten();
            let Some(space) = space else { break };
            let len = u64::from(space.len);
            if !self.move_piece(Run { offset, len, place }, space, uses, scratch) {
                self.segments.release(space.segment);
                break;
            }
            done += len;
        }
        done > 0
    }

    /// The longest run from `at` with one verdict; `None`: the index has a newer place.
    fn judge(
        &self,
        at: u64,
        end: u64,
        place: Place,
        class: Class,
        verdict_of: impl Fn(u8) -> Verdict,
    ) -> (u64, Option<Verdict>) {
        let of_block = |from: u64| {
            let block_end = (from / BLOCK + 1) * BLOCK;
            let piece = self.index.lookup(from, block_end.min(end), |place| self.is_live(place));
            let is_blind = match class {
                Class::Main => mutants::is(Mutant::KeptUnchecked),
                _ => mutants::is(Mutant::DroppedUnchecked),
            };
            let is_current = piece.place == Some(place.plus(from - at)) || is_blind;
            let verdict = is_current.then(|| verdict_of(self.index.uses(from)));
            (piece.len, verdict)
        };
        let (mut len, verdict) = of_block(at);
        while at + len < end {
            let (more, next) = of_block(at + len);
            if next != verdict {
                break;
            }
            len += more;
        }
        (len, verdict)
    }

    /// Whether the index may have this place from another key than the passed one: a newer key,
    /// whose data need not be on the backing device. Zeroes are stored once for many keys, so a
    /// block that was zeroed, written and zeroed again may have two keys with the same place.
    fn may_be_anothers(&self, run: Run) -> bool {
        if !self.segments.is_shared(run.place.segment) || mutants::is(Mutant::SharedPlaceTrusted) {
            return false;
        }
        let mut sector = [0; SECTOR as usize];
        // Unreadable data may also be zeroes.
        (0..run.len).step_by(sector.len()).all(|at| {
            let place = run.place.plus(at);
            let loaded = self.segments.load(place.segment, place.offset, &mut sector);
            loaded.is_err() || sector.iter().all(|&byte| byte == 0)
        })
    }

    /// Whether the index still has the same places for the whole run. The stripe is locked.
    fn is_current(&self, run: Run) -> bool {
        let piece = self.index.lookup(run.offset, run.offset + run.len, |p| self.is_live(p));
        piece.place == Some(run.place) && piece.len == run.len
    }

    /// Logs the key of data that is kept in its place, if the log has space. Without a key the data
    /// is dropped with its segment.
    fn keep(&self, run: Run, key: &Key) {
        let is_whole = run.len == u64::from(key.len.get());
        let is_roomy = self.segments.free() > 0 && self.log.has_room();
        // The checksum of a part of a key's data is not known.
        if !is_roomy || self.crcs.is_some() && !is_whole {
            return;
        }
        let stripe = self.stripes.of(run.offset);
        let state = self.stripes.lock(stripe);
        if !self.is_current(run) && !mutants::is(Mutant::KeptUnchecked) {
            return;
        }
        if !self.has_set_room(stripe) {
            return;
        }
        if !mutants::is(Mutant::KeptUnreferenced) {
            self.segments.reference(run.place.segment);
        }
        let space = Space {
            segment: run.place.segment,
            offset: run.place.offset,
            len: run.len as u32,
            generation: key.generation.get(),
        };
        // Its data was there when the key was logged the first time.
        let sums = Sums { crc: key.data_crc.get(), look: 0 };
        self.push_clean_key(stripe, run.offset, space, sums);
        self.note_pinned(run.place.segment);
        let _ = self.close_after_push(stripe, Close::No);
        drop(state);
        self.counters.kept_bytes.fetch_add(run.len, Ordering::Relaxed);
    }

    fn has_set_room(&self, stripe: usize) -> bool {
        self.make_set_room(stripe).is_ok() && self.stripes.open().len(stripe) < KEYS_MAX
    }

    /// Copies data into the main part. Data without space there may be kept in its place; damaged
    /// data is dropped.
    fn move_run(&self, run: Run, uses: u8, key: &Key, scratch: &mut Vec<u8>) {
        let mut done = 0;
        while done < run.len {
            let (offset, place) = (run.offset + done, run.place.plus(done));
            let rest = Run { offset, len: run.len - done, place };
            let len = self.piece_len(offset, rest.len.min(MOVE_BYTES));
            let is_roomy = self.segments.free() > 0 && self.log.has_room();
            let space = is_roomy.then(|| self.segments.take_main(0, len as u32, 0)).flatten();
            let Some(space) = space else {
                return self.keep_or_forget(rest, key);
            };
            let len = u64::from(space.len);
            if !self.move_piece(Run { len, ..rest }, space, uses, scratch) {
                self.segments.release(space.segment);
                return self.forget(rest, true);
            }
            done += len;
        }
    }

    /// Data that should have moved is kept in its place. It loses a use, so it is dropped in the
    /// end.
    fn keep_or_forget(&self, run: Run, key: &Key) {
        let uses = self.index.uses(run.offset);
        if uses == 0 {
            return self.forget(run, true);
        }
        self.keep(run, key);
        let _state = self.stripes.lock(self.stripes.of(run.offset));
        self.index.set_uses(run.offset, run.len, uses - 1);
    }

    /// `false`: no change.
    fn move_piece(&self, run: Run, space: Space, uses: u8, scratch: &mut Vec<u8>) -> bool {
        scratch.resize(run.len as usize, 0);
        let loaded = self.segments.load(run.place.segment, run.place.offset, scratch);
        let verified = match &self.crcs {
            Some(crcs) => loaded.and_then(|()| crcs.verify(&self.segments, run.place, scratch)),
            None => loaded,
        };
        if verified.is_err() {
            return false;
        }
        self.media.store(self.segments.data_at(space.segment, space.offset), scratch);
        let sums = self.sums_of(scratch);
        if !mutants::is(Mutant::MoveUndrained) && self.media.pmem.drain().is_err() {
            return false;
        }
        let stripe = self.stripes.of(run.offset);
        let _state = self.stripes.lock(stripe);
        if !self.is_current(run) || !self.has_set_room(stripe) {
            return false;
        }
        self.push_clean(stripe, run.offset, space, sums);
        self.index.set_uses(run.offset, run.len, uses);
        let _ = self.close_after_push(stripe, Close::No);
        self.counters.moved_bytes.fetch_add(run.len, Ordering::Relaxed);
        true
    }

    /// Removes what the index has of the run.
    fn forget(&self, run: Run, is_remembered: bool) {
        let stripe = self.stripes.of(run.offset);
        let _state = self.stripes.lock(stripe);
        let end = run.offset + run.len;
        let mut at = run.offset;
        while at < end {
            let piece = self.index.lookup(at, end, |place| self.is_live(place));
            let is_blind = mutants::is(Mutant::DroppedUnchecked);
            if piece.place == Some(run.place.plus(at - run.offset)) || is_blind {
                let dropped = &self.counters.dropped_bytes;
                let time = dropped.fetch_add(piece.len, Ordering::Relaxed) / BLOCK;
                match is_remembered {
                    true => self.index.leave_ghosts(at, piece.len, time),
                    false => self.index.set(at, piece.len, None),
                }
            }
            at += piece.len;
        }
    }
}
