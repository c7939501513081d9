//! A read-only view of a cache and its origin together: neither is written to.

use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::Status;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::target::{Fact, Health, Port, Target, TargetLimits, flag, number, origin_facts, text};

use super::gather::{Gather, Run};
use super::{Piece, Recovery};

/// The target.
#[derive(Debug)]
pub struct View {
    target: &'static str,
    /// The table's words after the target's name.
    words: String,
    recovery: Recovery,
    origin: Arc<dyn Disk>,
    gather: Gather,
    lost_reads: AtomicU64,
}

impl View {
    /// Serves `recovery` over `origin`. `words`: the table line's, after the target's name.
    pub fn new(
        target: &'static str,
        words: String,
        recovery: Recovery,
        origin: Arc<dyn Disk>,
    ) -> View {
        let (gather, lost_reads) = (Gather::default(), AtomicU64::new(0));
        View { target, words, recovery, origin, gather, lost_reads }
    }

    fn read(&self, mut bio: Bio, port: &mut Port) {
        let mut runs = Vec::new();
        let (mut at, end) = (bio.offset, bio.end());
        while at < end {
            let from = (at - bio.offset) as usize;
            match self.recovery.piece(at, end) {
                Piece::Origin(len) => {
                    let (disk, from) = (self.origin.clone(), from as u64);
                    runs.push(Run { disk, at, from, len });
                    at += len;
                }
                Piece::Cache(part) => {
                    let into = &mut bio.buffer.as_mut_slice()[from..from + part.len as usize];
                    if let Err(status) = self.recovery.load(&part, into) {
                        self.lost_reads.fetch_add(1, Ordering::Relaxed);
                        return port.finish(bio, Err(status));
                    }
                    at += part.len;
                }
            }
        }
        self.gather.read(bio, runs, port);
    }
}

impl Target for View {
    fn name(&self) -> &'static str {
        self.target
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        match bio.op {
            Op::Read => self.read(bio, port),
            // This target holds no volatile data.
            Op::Flush => port.finish(bio, Ok(())),
            Op::Write | Op::Discard | Op::WriteZeroes => port.finish(bio, Err(Status::ReadOnly)),
        }
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        self.gather.complete(io, port);
    }

    fn health(&self) -> Health {
        Health { origin: self.origin.errors(), ..Health::default() }
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits { has_discard: false, ..self.origin.limits().of_target() }
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn status(&self) -> String {
        let (dirty, lost) = (self.recovery.dirty_bytes(), self.recovery.lost_bytes());
        format!("read-only {dirty} {lost}")
    }

    fn table(&self) -> String {
        self.words.clone()
    }

    fn facts(&self) -> Vec<Fact> {
        let recovery = &self.recovery;
        let medium = recovery.pmem.medium();
        let mut facts = vec![
            text("cache_device", &medium.name, "where cached data is"),
            flag("cache_is_read_only", true, "udm writes to neither device"),
            number("readable_dirty_bytes", recovery.dirty_bytes(), "data that only the cache has"),
            number("lost_bytes", recovery.lost_bytes(), "data that only the cache had; reads fail"),
            number("lost_ranges", recovery.lost().len() as u64, "how many ranges have lost data"),
            flag("lost_is_truncated", recovery.has_more, "more data is lost, in unknown places"),
            number(
                "lost_reads_total",
                self.lost_reads.load(Ordering::Relaxed),
                "reads that failed because data is lost",
            ),
        ];
        facts.extend(origin_facts(&*self.origin, "origin"));
        let failure = recovery.pmem.failure();
        let about = "why udm no longer trusts the cache device";
        facts.extend(failure.map(|failure| text("medium_failure", &failure, about)));
        let notes = recovery.notes.iter();
        facts.extend(notes.map(|note| {
            text("attach_note", note, "damage or losses that udm found when it opened the cache")
        }));
        facts
    }
}
