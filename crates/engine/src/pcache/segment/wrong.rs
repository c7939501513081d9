//! Wrong copies of functions of `segment.rs`, with deliberate bugs that would be woven into every
//! line of the right ones. Only the builds of the nets have them.

use super::{HeadPlace, LOG_RESERVE, NO_PLACE, REFERENCES_AHEAD, Segments, Space};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::pcache::retention::Class;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::lock;

pub(super) fn opens_heads() -> bool {
    [Mutant::ReserveTaken, Mutant::ReferencesLate, Mutant::HeadRelaxed].into_iter().any(mutants::is)
}

pub(super) fn takes_space() -> bool {
    [Mutant::SpaceTakenTwice, Mutant::SpaceUnfenced].into_iter().any(mutants::is)
}

pub(super) fn recycles() -> bool {
    let bugs = [
        Mutant::ReleasedForgotten,
        Mutant::FreeBeforeRaised,
        Mutant::GenerationNotRaised,
        Mutant::CrcsForgottenLate,
    ];
    bugs.into_iter().any(mutants::is)
}

impl Segments {
    pub(super) fn take_at_head_wrongly(
        &self,
        nth: usize,
        len: u32,
        reserve: Option<u32>,
    ) -> Option<Space> {
        let head = &self.heads[nth];
        let mut seen = head.place.load(Ordering::Acquire);
        loop {
            let Some(at) = HeadPlace::unpack(seen) else {
                seen = self.open_head(nth, reserve?)?;
                continue;
            };
            let left = self.media.geometry.data_bytes() - at.offset;
            let len = len.min(left);
            let keys = at.keys + 1;
            let next = match len == left {
                true => NO_PLACE,
                false => HeadPlace { offset: at.offset + len, keys, ..at }.pack(),
            };
            let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
            let taken = match mutants::is(Mutant::SpaceTakenTwice) {
                true => Ok(head.place.swap(next, success)),
                false => head.place.compare_exchange_weak(seen, next, success, failure),
            };
            if let Err(now) = taken {
                seen = now;
                continue;
            }
            if !mutants::is(Mutant::SpaceUnfenced) {
                fence(Ordering::Release);
            }
            let generation = self.generation(at.segment);
            if next == NO_PLACE {
                self.release_many(at.segment, REFERENCES_AHEAD - keys);
            }
            return Some(Space { segment: at.segment, offset: at.offset, len, generation });
        }
    }

    /// The head's lock is held, and the head is not placed.
    pub(super) fn open_head_wrongly(&self, nth: usize, reserve: u32) -> Option<u64> {
        let head = &self.heads[nth];
        let reserve = match mutants::is(Mutant::ReserveTaken) {
            true => 0,
            false => LOG_RESERVE + reserve,
        };
        let segment = self.take_free(&mut lock(&self.allocator), reserve)?;
        self.set_class(segment, self.class_of_head(nth));
        let references = &self.segments[segment as usize].references;
        let is_late = mutants::is(Mutant::ReferencesLate);
        if !is_late {
            references.fetch_add(REFERENCES_AHEAD, Ordering::Relaxed);
        }
        let place = HeadPlace { segment, offset: 0, keys: 0 }.pack();
        let order = match mutants::is(Mutant::HeadRelaxed) {
            true => Ordering::Relaxed,
            false => Ordering::Release,
        };
        head.place.store(place, order);
        if is_late {
            references.fetch_add(REFERENCES_AHEAD, Ordering::Relaxed);
        }
        Some(place)
    }

    pub(super) fn recycle_wrongly(&self, before_reuse: impl Fn(u32)) -> Result<u32, Status> {
        let is_forgotten = mutants::is(Mutant::ReleasedForgotten);
        if !is_forgotten {
            self.has_released.store(false, Ordering::Relaxed);
        }
        let candidates = std::mem::take(&mut *lock(&self.released));
        if is_forgotten {
            self.has_released.store(false, Ordering::Relaxed);
        }
        let is_early = mutants::is(Mutant::FreeBeforeRaised);
        let is_late = mutants::is(Mutant::CrcsForgottenLate);
        let mut freed = 0;
        for segment in candidates {
            if !self.is_reusable(segment) {
                continue;
            }
            if is_early {
                self.set_free(segment);
            }
            if !mutants::is(Mutant::GenerationNotRaised) {
                self.raise_generation(segment)?;
            }
            if !is_late {
                before_reuse(segment);
            }
            self.set_class(segment, Class::Window);
            if !is_early {
                self.set_free(segment);
            }
            if is_late {
                before_reuse(segment);
            }
            freed += 1;
        }
        Ok(freed)
    }
}
