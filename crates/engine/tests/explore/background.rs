//! The background of a target that calls it when there is work, and that signals when requests may
//! be tried again. Other targets' backgrounds look at their devices when time passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::target::Wake;

use crate::machine::{Machine, Outcome};
use crate::model::SECTOR;
use crate::subject::PassesBy;

/// Sector of each block that brings it: the explorer does not look at it otherwise.
const QUIET_SECTOR: u64 = 20;
/// Reads until a policy has promoted any block that it wants.
const READS_MAX: usize = 1000;

#[derive(Debug, Default)]
struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Its unanswered calls.
#[derive(Debug, Default)]
pub struct Background {
    calls: Arc<Flag>,
    room_epoch: u64,
}

impl Machine {
    /// A server has started.
    pub(crate) fn begin_background(&mut self) {
        if self.kind.passes_by() != PassesBy::Always {
            return;
        }
        let Some(events) = self.target().events() else { return };
        let background = Background { calls: Arc::default(), room_epoch: events.room_epoch() };
        events.set_background(Some(background.calls.clone()));
        self.background = background;
    }

    /// Answers the target's calls. Whether there was one.
    pub(crate) fn turn_background(&mut self) -> bool {
        if self.kind.passes_by() != PassesBy::Always {
            return false;
        }
        let subject = self.subject.clone().expect("the server runs");
        let is_called = self.background.calls.0.swap(false, Ordering::SeqCst);
        if is_called {
            subject.tick(self.now, &mut self.port);
        }
        let epoch = subject.events().map_or(0, |events| events.room_epoch());
        let has_room = std::mem::replace(&mut self.background.room_epoch, epoch) != epoch;
        if has_room {
            for parked in std::mem::take(&mut self.port.parked) {
                subject.submit(parked, &mut self.port);
            }
        }
        is_called || has_room
    }

    /// Reads a block until the cache has it, which must happen if the cache admits blocks.
    pub(crate) fn bring(&mut self, block: u64, must: bool) -> Outcome {
        self.is_holding_reads = false;
        for _ in 0..READS_MAX {
            let hits = self.read_hits();
            self.read_quietly(block)?;
            if self.read_hits() != hits {
                return Ok(());
            }
        }
        let table = self.target().table();
        let is_unwanted = ["passthrough", "cleaner"].iter().any(|word| table.contains(word));
        match must && !is_unwanted {
            true => {
                self.excused(format!("block {block} does not come: {}", self.target().status()))
            }
            false => Ok(()),
        }
    }

    /// Reads a block until the cache copies it.
    pub(crate) fn begin_copy(&mut self, block: u64) -> Outcome {
        self.is_holding_reads = false;
        self.is_holding_cache = true;
        let before = self.cache_ios.len();
        for _ in 0..READS_MAX {
            self.read_quietly(block)?;
            if self.cache_ios.len() > before {
                break;
            }
        }
        Ok(())
    }

    fn read_quietly(&mut self, block: u64) -> Outcome {
        let at = self.kind.copied_bytes() * block + QUIET_SECTOR * SECTOR as u64;
        let id = self.id();
        let done = self.serve(Bio::read(at, Buffer::zeroed(SECTOR), u64::from(id)))?;
        if let Err(status) = done.status {
            return self.excused(format!("read failed: {status}"));
        }
        match done.buffer.as_slice().iter().any(|byte| *byte != 0) {
            true => Err(format!("block {block} shows data that was never written")),
            false => Ok(()),
        }
    }

    fn read_hits(&self) -> Option<String> {
        self.target().status().split(' ').nth(4).map(String::from)
    }
}
