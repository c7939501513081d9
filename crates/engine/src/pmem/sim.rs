//! A malicious simulated medium: after a crash, memory has as little of the pending data, and in as
//! odd a form, as the contract allows.
//!
//! 1. `load` sees every store immediately, as the CPU that made it would.
//! 2. A store is *pending* until the thread that made it drains (`Persistence::Cpu`), or until it
//!    was drained and any thread syncs (`Persistence::Msync`). A store that is not pending any more
//!    survives every crash.
//! 3. Pending stores are cut into 8-byte words at 8-byte borders. A crash keeps or loses each word
//!    as a whole. Every cache line decides for itself: mostly it keeps a prefix of its words in
//!    store order (the cache wrote the line back once), sometimes any subset (write-combining
//!    buffers leave in pieces).
//! 4. Everything random comes from the caller's `Prng`, and lines are visited in ascending order,
//!    so that a seed replays.
//!
//! Pages are allocated at their first store, and are shared with crashed copies until written, so a
//! medium of 512 MiB costs what was stored to it.

mod state;

use state::{PAGE, Stage, State, count_down, pieces, read, write};

use super::{Medium, Persistence, Pmem};
use crate::error::Status;
use crate::prng::Prng;
use crate::shm::SharedWords;
use crate::sync::{Mutex, MutexGuard, current_thread, lock};

/// Operations on a medium, to assert exact costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Calls of `store` and `zero`.
    pub stores: u64,
    /// Bytes that they stored.
    pub stored_bytes: u64,
    /// Calls of `load`.
    pub loads: u64,
    /// Bytes that they copied.
    pub loaded_bytes: u64,
    /// Calls of `drain`.
    pub drains: u64,
    /// Calls of `sync`.
    pub syncs: u64,
}

/// Simulated persistent memory. Shared by reference or `Arc`; all methods take `&self`.
#[derive(Debug)]
pub struct SimPmem {
    len_bytes: u64,
    medium: Medium,
    state: Mutex<State>,
}

impl SimPmem {
    /// A medium of `len_bytes` zero bytes.
    pub fn new(len_bytes: u64, persistence: Persistence) -> SimPmem {
        SimPmem::with_state(len_bytes, persistence, State::default())
    }

    /// A medium that durably holds `bytes`.
    pub fn from_image(bytes: &[u8], persistence: Persistence) -> SimPmem {
        let sim = SimPmem::new(bytes.len() as u64, persistence);
        sim.load_image(bytes);
        sim
    }

    fn with_state(len_bytes: u64, persistence: Persistence, state: State) -> SimPmem {
        let medium = Medium {
            name: "sim".into(),
            persistence,
            is_volatile: false,
            description: "simulated persistent memory".into(),
            kernel_name: "sim".into(),
        };
        SimPmem { len_bytes, medium, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn check(&self, at: u64, len: u64) {
        let end = at.checked_add(len).expect("a range of memory does not wrap");
        assert!(end <= self.len_bytes, "{at}+{len} is beyond {} bytes", self.len_bytes);
    }

    /// A state that could be found after a power cut now. `self` continues as if there had been
    /// none.
    pub fn crash(&self, prng: &mut Prng) -> SimPmem {
        self.crash_words(|_, kept| {
            if prng.one_in(4) {
                kept.iter_mut().for_each(|keep| *keep = prng.one_in(2));
            } else {
                let prefix = prng.below(kept.len() as u64 + 1) as usize;
                kept[..prefix].fill(true);
            }
        })
    }

    /// As [`SimPmem::crash`], but the caller chooses how many of its pending words each line keeps:
    /// `prefix(line, words)` is called in ascending order of line (address / 64).
    pub fn crash_with(&self, mut prefix: impl FnMut(u64, usize) -> usize) -> SimPmem {
        self.crash_words(|line, kept| {
            let prefix = prefix(line, kept.len());
            kept[..prefix].fill(true);
        })
    }

    /// The least that can be found after a power cut: everything pending is lost.
    pub fn snapshot_durable(&self) -> SimPmem {
        self.crash_with(|_, _| 0)
    }

    fn crash_words(&self, mut choose: impl FnMut(u64, &mut [bool])) -> SimPmem {
        let state = self.state();
        let mut pages = state.visible.clone();
        pages.extend(state.durable.iter().map(|(number, page)| (*number, page.clone())));
        for (line, words) in state.pending_words() {
            let mut kept = vec![false; words.len()];
            choose(line, &mut kept);
            for (word, keep) in words.iter().zip(kept) {
                if keep || word.stage == Stage::Durable {
                    write(&mut pages, word.at, word.bytes);
                }
            }
        }
        let poison = state.poison.clone();
        let after = State { visible: pages, poison, ..State::default() };
        SimPmem::with_state(self.len_bytes, self.medium.persistence, after)
    }

    /// Number of 8-byte words that a crash could lose.
    pub fn pending(&self) -> usize {
        let state = self.state();
        let words = state.pending_words();
        words.values().flatten().filter(|word| word.stage != Stage::Durable).count()
    }

    /// Every line (address / 64) that a crash could leave in more than one state, with its number
    /// of pending words; ascending.
    pub fn pending_lines(&self) -> Vec<(u64, usize)> {
        let state = self.state();
        state.pending_words().iter().map(|(line, words)| (*line, words.len())).collect()
    }

    /// Saves the state just before the `n`-th fence (`drain` or `sync`) from now, 1 being the next;
    /// [`SimPmem::take_cut`] returns it.
    pub fn arm_cut(&self, n: u64) {
        assert!(n > 0, "the cut is after a future fence");
        let mut state = self.state();
        state.cut_in = Some(n);
        state.cut = None;
    }

    /// As [`SimPmem::arm_cut`], and also saves `memory` at that moment, for
    /// [`SimPmem::memory_at_cut`]. A server that dies leaves both in that state.
    pub fn arm_cut_with(&self, n: u64, memory: SharedWords) {
        self.arm_cut(n);
        self.state().beside = Some(memory);
    }

    /// The words of the memory that was armed with the cut, as they were at the cut.
    pub fn memory_at_cut(&self) -> Vec<u64> {
        self.state().beside_at_cut.clone()
    }

    /// The medium just before the armed fence, pending stores included, if that fence was reached.
    pub fn take_cut(&self) -> Option<SimPmem> {
        let cut = self.state().cut.take()?;
        Some(SimPmem::with_state(self.len_bytes, self.medium.persistence, *cut))
    }

    /// Loads of these bytes fail from now on, also after a crash.
    pub fn poison(&self, at: u64, len: u64) {
        self.check(at, len);
        self.state().poison.push(at..at + len);
    }

    /// Undoes every [`SimPmem::poison`].
    pub fn heal(&self) {
        self.state().poison.clear();
    }

    /// Damages one byte, durably and unnoticed.
    pub fn corrupt(&self, at: u64, f: impl FnOnce(u8) -> u8) {
        let byte = f(self.peek(at, 1)[0]);
        self.poke(at, &[byte]);
    }

    /// Changes the medium durably, without counting and without failing.
    pub fn poke(&self, at: u64, bytes: &[u8]) {
        self.check(at, bytes.len() as u64);
        let mut state = self.state();
        for (at, bytes) in pieces(at, bytes, PAGE) {
            write(&mut state.visible, at, bytes);
            if state.durable.contains_key(&(at / PAGE)) {
                write(&mut state.durable, at, bytes);
            }
        }
    }

    /// What loads see, without counting and without failing.
    pub fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        self.check(at, len as u64);
        let mut bytes = vec![0; len];
        read(&self.state().visible, at, &mut bytes);
        bytes
    }

    /// Everything that loads see.
    pub fn image(&self) -> Vec<u8> {
        self.peek(0, self.len_bytes as usize)
    }

    /// Replaces the whole content, durably. `bytes` is as long as the medium.
    pub fn load_image(&self, bytes: &[u8]) {
        assert_eq!(bytes.len() as u64, self.len_bytes, "an image is as long as its medium");
        let mut state = self.state();
        state.visible.clear();
        state.durable.clear();
        state.pending.clear();
        for (at, piece) in pieces(0, bytes, PAGE) {
            if piece.iter().any(|byte| *byte != 0) {
                write(&mut state.visible, at, piece);
            }
        }
    }

    /// Drains fail from the `n`-th call on, 1 being the next.
    pub fn fail_drains_from(&self, n: u64) {
        assert!(n > 0, "calls are counted from 1");
        self.state().drains_left = Some(n - 1);
    }

    /// Syncs fail from the `n`-th call on, 1 being the next.
    pub fn fail_syncs_from(&self, n: u64) {
        assert!(n > 0, "calls are counted from 1");
        self.state().syncs_left = Some(n - 1);
    }

    /// From now on, whether a failed sync also counts as a failure of the medium, as with files
    /// until they are opened again.
    pub fn tell_failure(&self, tells: bool) {
        self.state().tells_failure = tells;
    }

    /// The operations so far.
    pub fn counts(&self) -> SimCounts {
        self.state().counts
    }

    /// Counts from zero again.
    pub fn reset_counts(&self) {
        self.state().counts = SimCounts::default();
    }
}

impl Pmem for SimPmem {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn medium(&self) -> &Medium {
        &self.medium
    }

    fn store(&self, at: u64, bytes: &[u8]) {
        self.check(at, bytes.len() as u64);
        let mut state = self.state();
        state.counts.stores += 1;
        state.counts.stored_bytes += bytes.len() as u64;
        for (at, bytes) in pieces(at, bytes, PAGE) {
            state.store_in_page(at, bytes);
        }
    }

    fn zero(&self, at: u64, len: u64) {
        self.check(at, len);
        let mut state = self.state();
        state.counts.stores += 1;
        state.counts.stored_bytes += len;
        let zeroes = [0; PAGE as usize];
        let (mut at, end) = (at, at + len);
        while at < end {
            let piece = (end - at).min(PAGE - at % PAGE);
            state.store_in_page(at, &zeroes[..piece as usize]);
            at += piece;
        }
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        self.check(at, into.len() as u64);
        let end = at + into.len() as u64;
        let mut state = self.state();
        state.counts.loads += 1;
        state.counts.loaded_bytes += into.len() as u64;
        if state.poison.iter().any(|bad| at < bad.end && bad.start < end) {
            return Err(Status::Io);
        }
        read(&state.visible, at, into);
        Ok(())
    }

    fn drain(&self) -> Result<(), Status> {
        let mut state = self.state();
        state.counts.drains += 1;
        state.fence();
        count_down(&mut state.drains_left)?;
        state.drain(current_thread().id());
        if self.medium.persistence == Persistence::Cpu {
            state.settle();
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        let mut state = self.state();
        state.counts.syncs += 1;
        state.fence();
        if let Err(status) = count_down(&mut state.syncs_left) {
            if self.medium.persistence == Persistence::Msync {
                state.give_up();
            }
            return Err(status);
        }
        if self.medium.persistence == Persistence::Msync {
            state.settle();
        }
        Ok(())
    }

    fn has_given_up(&self) -> bool {
        self.state().has_given_up
    }

    fn failure(&self) -> Option<String> {
        let name = &self.medium.name;
        let state = self.state();
        let has_failed = state.has_given_up && state.tells_failure;
        has_failed.then(|| format!("cache device {name} failed: msync reported an error"))
    }
}

#[cfg(test)]
mod tests;
