//! Wrong copies of functions of `disk.rs`, with deliberate bugs that would be woven into every
//! line of the right ones. Only the builds of the nets have them.

use super::{Ended, Phase, Round};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::target::Port;
use crate::writecache::Writecache;

pub(super) fn steps() -> bool {
    [Mutant::CacheFlushErrorIgnored, Mutant::DiskCounterUnannounced].into_iter().any(mutants::is)
}

impl Writecache {
    pub(super) fn disk_round_step_wrongly(
        &self,
        round: &mut Round,
        result: Result<(), Status>,
        port: &mut Port,
    ) -> Option<Ended> {
        let has_batch = round.has_batch;
        match &mut round.phase {
            Phase::Idle => panic!("no round is under way"),
            Phase::Entries { outstanding, failure, .. } => {
                *outstanding -= 1;
                *failure = failure.or(result.err());
                self.emit_entries(round, port);
            }
            _ if result.is_err() && !mutants::is(Mutant::CacheFlushErrorIgnored) => {
                self.fail_round(round);
            }
            Phase::EntriesFlush if has_batch => {
                let seq = round.seq;
                if !mutants::is(Mutant::DiskCounterUnannounced) {
                    self.lists.memory().announce_seq(seq + 1);
                }
                round.phase = Phase::Counter;
                let buffer = port.pool.take(self.device.unit_bytes() as usize);
                port.ios.push_back(self.metadata_write(0, 1, seq, seq + 1, buffer));
            }
            Phase::Counter => {
                round.phase = Phase::CounterFlush;
                port.ios.push_back(self.cache_flush());
            }
            Phase::EntriesFlush | Phase::CounterFlush => return Some(self.end_disk_round(round)),
        }
        None
    }
}
