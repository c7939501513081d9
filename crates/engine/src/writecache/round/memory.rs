//! A round of mode `p`: stores, within the call, under the lock of round. A thread that had to wait
//! for that lock may find its batch committed already.

use zerocopy::IntoBytes;

use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pmem::Pmem;

use super::Round;
use crate::writecache::Writecache;
use crate::writecache::layout::{Entry, FREE, Geometry, SEQ_COUNT_AT};
use crate::writecache::media::Medium;

/// Entries stored together.
const RUN_MAX: usize = 16;

/// Neighbouring slots that hold neighbouring blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    slot: u32,
    count: u32,
    block: u64,
}

impl Run {
    /// Adds a slot to a list of runs.
    fn add(runs: &mut Vec<Run>, slot: u32, block: u64) {
        if let Some(last) = runs.last_mut()
            && last.slot + last.count == slot
            && last.block + u64::from(last.count) == block
        {
            last.count += 1;
        } else {
            runs.push(Run { slot, count: 1, block });
        }
    }

    fn blocks(&self) -> std::ops::Range<u64> {
        self.block..self.block + u64::from(self.count)
    }
}

/// Entries of neighbouring slots, with the same number, to be stored together, in whole lines where
/// possible.
struct Row<'a> {
    pmem: &'a dyn Pmem,
    geometry: &'a Geometry,
    seq: u64,
    first: u32,
    count: usize,
    entries: [Entry; RUN_MAX],
}

impl<'a> Row<'a> {
    fn new(cache: &'a Writecache, pmem: &'a dyn Pmem, seq: u64) -> Row<'a> {
        let entries = [Entry::FRESH; RUN_MAX];
        Row { pmem, geometry: &cache.device.geometry, seq, first: 0, count: 0, entries }
    }

    fn add(&mut self, slot: u32, block: u64) {
        if self.count == RUN_MAX || self.first + self.count as u32 != slot {
            self.store();
            self.first = slot;
        }
        self.entries[self.count] = Entry::new(block * self.geometry.block_sectors(), self.seq);
        self.count += 1;
    }

    /// Stores the collected entries.
    fn store(&mut self) {
        if self.count > 0 {
            let at = self.geometry.entry_at(u64::from(self.first));
            self.pmem.store(at, self.entries[..self.count].as_bytes());
            self.count = 0;
        }
    }
}

/// All that was stored is durable.
fn settle(pmem: &dyn Pmem) -> Result<(), Status> {
    pmem.drain().and_then(|()| pmem.sync())
}

impl Writecache {
    /// A round. Returns whether it freed slots.
    pub(in crate::writecache) fn memory_round(&self, round: &mut Round) -> bool {
        let Medium::Pmem(pmem) = &self.device.medium else { unreachable!("mode p uses memory") };
        if !self.close(round) {
            self.rounds.end();
            return false;
        }
        match self.store_round(&**pmem, round) {
            Ok(()) => self.finish_round(round),
            Err(_) => {
                self.fail();
                false
            }
        }
    }

    fn store_round(&self, pmem: &dyn Pmem, round: &mut Round) -> Result<(), Status> {
        #[cfg(feature = "mutants")]
        if let Some(result) = self.store_round_wrongly(pmem, round) {
            return result;
        }
        self.store_entries(pmem, round);
        settle(pmem)?;
        if round.has_batch {
            let seq = round.seq + 1;
            self.lists.memory().announce_seq(seq);
            self.store_counter(pmem, seq)?;
            self.lists.memory().confirm_seq(seq);
            round.seq = seq;
        }
        Ok(())
    }

    fn store_counter(&self, pmem: &dyn Pmem, seq: u64) -> Result<(), Status> {
        pmem.store(self.device.geometry.start + SEQ_COUNT_AT, &seq.to_le_bytes());
        settle(pmem)
    }

    /// Stores the entries of the batch, and free marks.
    fn store_entries(&self, pmem: &dyn Pmem, round: &mut Round) {
        let mut batch = std::mem::take(&mut round.batch);
        for stripe in round.stripes() {
            self.closing(stripe).for_each(|(block, slot)| Run::add(&mut batch, slot, block));
        }
        batch.sort_unstable_by_key(|run| run.slot);
        let mut row = Row::new(self, pmem, round.seq);
        for run in &batch {
            run.blocks().zip(run.slot..).for_each(|(block, slot)| row.add(slot, block));
        }
        row.store();
        batch.clear();
        round.batch = batch;
        if round.marks.is_empty() {
            return;
        }
        self.begin_marks(&round.marks);
        let mut row = Row::new(self, pmem, FREE);
        for slot in round.marks.slots() {
            let block = if mutants::is(Mutant::MarkRenames) {
                0
            } else {
                // The block does not change: a torn entry, still with its number, must not name
                // another block.
                self.index.word(slot).block()
            };
            row.add(slot, block);
        }
        row.store();
    }
}

#[cfg(feature = "mutants")]
impl Writecache {
    fn store_round_wrongly(
        &self,
        pmem: &dyn Pmem,
        round: &mut Round,
    ) -> Option<Result<(), Status>> {
        let wrong =
            [Mutant::CounterBeforeEntries, Mutant::CounterUnannounced, Mutant::CounterUnconfirmed];
        let mut store = || {
            self.store_entries(pmem, round);
            if !mutants::is(Mutant::CounterBeforeEntries) {
                settle(pmem)?;
            }
            if round.has_batch {
                let seq = round.seq + 1;
                if !mutants::is(Mutant::CounterUnannounced) {
                    self.lists.memory().announce_seq(seq);
                }
                self.store_counter(pmem, seq)?;
                if !mutants::is(Mutant::CounterUnconfirmed) {
                    self.lists.memory().confirm_seq(seq);
                }
                round.seq = seq;
            }
            Ok(())
        };
        wrong.into_iter().any(mutants::is).then(&mut store)
    }
}
