//! Wrong copies of functions of `write.rs`, with deliberate bugs that would be woven into every
//! line of the right ones. Only the builds of the nets have them.

use crate::mutants::{self, Mutant};
use crate::pcache::Pcache;
use crate::pcache::keylog::AppendError;
use crate::pcache::segment::Space;
use crate::pcache::stripes::{Close, Sums};
use crate::pmem::client_memory::Source;

const BUGS: [Mutant; 3] =
    [Mutant::IndexBeforeLock, Mutant::KeyAfterUnlock, Mutant::DirtyCountedLate];

pub(super) fn is_wanted() -> bool {
    BUGS.iter().any(|bug| mutants::is(*bug))
}

impl Pcache {
    /// The fingerprint and checksums of data from memory that its owner may change.
    pub(super) fn sums_of_second_reading(&self, from: Source<'_>, sums: Sums) -> Sums {
        let mut data = vec![0; from.bytes().len()];
        from.bytes().load(&mut data);
        let second = self.sums_of(&data);
        let look = if mutants::is(Mutant::LookedAtTwice) { second.look } else { sums.look };
        Sums { crc: second.crc, look }
    }

    pub(super) fn commit_key_wrongly(
        &self,
        at: u64,
        space: Space,
        sums: Sums,
        close: Close,
    ) -> Result<(), AppendError> {
        let stripe = self.stripes.of(at);
        if mutants::is(Mutant::IndexBeforeLock) {
            self.point(at, space, sums);
        }
        let mut fills = self.stripes.lock_soon(stripe);
        if let Err(error) = self.make_set_room(stripe) {
            self.segments.release(space.segment);
            return Err(error);
        }
        let len = u64::from(space.len);
        fills.cancel(at, len);
        if !mutants::is(Mutant::IndexBeforeLock) {
            self.point(at, space, sums);
        }
        let fills = (!mutants::is(Mutant::KeyAfterUnlock)).then_some(fills);
        self.push_key(stripe, at, space, sums, 0);
        let fills = fills.filter(|_| !mutants::is(Mutant::DirtyCountedLate));
        self.stripes.add_dirty(stripe, len);
        self.close_after_push(stripe, close)?;
        drop(fills);
        self.signals.arm();
        Ok(())
    }
}
