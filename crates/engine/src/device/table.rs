//! Tables as a device holds them: ranges and the targets that serve them.

use super::LineFacts;
use crate::bio::{Bio, Op};
use crate::error::{Kind, Result, Status};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::Table;
use crate::target::{Events, Target, TargetLimits, Wake};
use crate::units::{BIO_BYTES_MAX, SECTOR};

/// A table whose targets are made, ready to be activated.
#[derive(Debug)]
pub struct LoadedTable {
    lines: Vec<Line>,
}

/// A line: bytes `start..end` of the device and the target that serves them.
#[derive(Debug)]
pub(super) struct Line {
    pub start: u64,
    pub end: u64,
    pub target: Arc<dyn Target>,
}

impl LoadedTable {
    /// Puts `table` together with its lines' targets.
    pub fn new(table: &Table, targets: Vec<Arc<dyn Target>>) -> LoadedTable {
        assert_eq!(table.lines.len(), targets.len(), "each line has one target");
        assert!(!targets.is_empty(), "a table has a line");
        let lines = table.lines.iter().zip(targets);
        let lines = lines
            .map(|(line, target)| Line {
                start: line.start * SECTOR,
                end: (line.start + line.len) * SECTOR,
                target,
            })
            .collect();
        LoadedTable { lines }
    }

    /// A table of one line of `len_bytes` from sector 0.
    pub fn single(target: Arc<dyn Target>, len_bytes: u64) -> LoadedTable {
        assert!(len_bytes > 0 && len_bytes.is_multiple_of(SECTOR), "a line is whole sectors");
        LoadedTable { lines: vec![Line { start: 0, end: len_bytes, target }] }
    }

    /// The limits that every export will announce.
    pub fn limits(&self) -> TargetLimits {
        stacked(&self.lines)
    }

    /// An error if a line, or all of them together, is not a multiple of the block that exports
    /// announce: clients could not reach the last bytes.
    pub(crate) fn check_blocks(&self, table: &Table) -> Result<()> {
        let all = u64::from(self.limits().block_bytes);
        let last = self.lines.len() - 1;
        for (nth, (line, given)) in self.lines.iter().zip(&table.lines).enumerate() {
            let own = u64::from(line.target.limits().block_bytes);
            let whole = |at: u64, block: u64| at.is_multiple_of(block);
            let block = match () {
                () if !whole(line.start, own) || !whole(line.end, own) => own,
                () if nth == last && !whole(line.end, all) => all,
                () => continue,
            };
            let message = format!(
                "table line {nth} (start sect {} len {}) not aligned to h/w logical block size \
                 {block}: give multiples of {} sectors",
                given.start,
                given.len,
                block / SECTOR
            );
            return Err(given.target.error(Kind::Invalid, message));
        }
        Ok(())
    }

    /// The names of the lines' targets.
    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.lines.iter().map(|line| line.target.name())
    }

    /// Has targets opened that had to wait for this.
    pub(super) fn take_effect(&mut self) -> Result<()> {
        for line in &mut self.lines {
            if let Some(target) = line.target.take_effect()? {
                line.target = target;
            }
        }
        Ok(())
    }

    /// Closes targets that never served.
    pub fn detach(&self) {
        self.lines.iter().for_each(|line| line.target.detach());
    }

    pub(super) fn print(&self) -> Vec<String> {
        self.lines.iter().map(|line| line.print(line.target.table())).collect()
    }

    pub(super) fn activate(self, events: &Arc<Events>) -> Active {
        let room: Arc<dyn Wake> = Arc::new(ForwardRoom(events.clone()));
        for line in &self.lines {
            if let Some(own) = line.target.events() {
                own.listen(room.clone());
                own.set_background(Some(Arc::new(ForwardWork(events.clone()))));
            }
        }
        let block_bytes = stacked(&self.lines).block_bytes.into();
        let active = Active { lines: self.lines, block_bytes, told: AtomicU64::new(0), room };
        // Earlier losses of the disks concern only the tables that used them then.
        active.note_told(active.losses());
        active
    }
}

/// A request that keeps to these limits suits all lines.
fn stacked(lines: &[Line]) -> TargetLimits {
    let each = lines.iter().map(|line| line.target.limits().from(line.start));
    each.fold(TargetLimits::default(), TargetLimits::and)
}

impl Line {
    fn print(&self, words: String) -> String {
        let (start, len) = (self.start / SECTOR, (self.end - self.start) / SECTOR);
        // dmsetup prints the blank after the name even if no words follow.
        format!("{start} {len} {} {words}", self.target.name())
    }
}

/// The active table. What its targets signal reaches the device's own events while it lives.
pub(super) struct Active {
    lines: Vec<Line>,
    /// A block that is whole blocks of each line: a power of two.
    block_bytes: u64,
    /// The losses that were reported to some port.
    told: AtomicU64,
    room: Arc<dyn Wake>,
}

impl std::fmt::Debug for Active {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.lines).finish()
    }
}

impl Active {
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    pub fn size_bytes(&self) -> u64 {
        self.lines.last().map_or(0, |line| line.end)
    }

    /// The limits that every export announces, whatever its protocol.
    pub fn limits(&self) -> TargetLimits {
        stacked(&self.lines)
    }

    /// See [`Target::losses`].
    pub fn losses(&self) -> u64 {
        self.lines.iter().map(|line| line.target.losses()).sum()
    }

    /// The losses that were reported to some port: a new port does not get them again.
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::SeqCst)
    }

    /// This many losses were reported to a port.
    pub fn note_told(&self, losses: u64) {
        self.told.fetch_max(losses, Ordering::SeqCst);
    }

    /// The index of the line that holds byte `at` of the device.
    pub fn index_at(&self, at: u64) -> usize {
        self.lines.partition_point(|line| line.end <= at)
    }

    pub fn line_at(&self, at: u64) -> Option<&Line> {
        self.lines.get(self.index_at(at))
    }

    /// Whether a target may get this bio. A write beyond the end fails with an error for lack of
    /// space; any other request there is invalid.
    pub fn check(&self, bio: &Bio) -> std::result::Result<(), Status> {
        match bio.op {
            Op::Flush => return if bio.len == 0 { Ok(()) } else { Err(Status::Invalid) },
            Op::Read | Op::Write => {
                assert_eq!(bio.len, bio.buffer.len() as u64, "a bio is as long as its buffer");
            }
            Op::Discard | Op::WriteZeroes => {}
        }
        let is_whole = (bio.offset | bio.len).is_multiple_of(SECTOR);
        if !is_whole && !bio.allows_parts || bio.len > BIO_BYTES_MAX {
            return Err(Status::Invalid);
        }
        match bio.offset.checked_add(bio.len) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ if matches!(bio.op, Op::Write | Op::WriteZeroes) => Err(Status::NoSpace),
            _ => Err(Status::Invalid),
        }
    }

    /// The block in which clients should read and write, in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Whether a bio is whole blocks of all lines.
    pub fn is_whole(&self, bio: &Bio) -> bool {
        bio.op == Op::Flush || (bio.offset | bio.len) & (self.block_bytes - 1) == 0
    }

    pub fn print(&self, words: impl Fn(&dyn Target) -> String) -> Vec<String> {
        self.lines.iter().map(|line| line.print(words(&*line.target))).collect()
    }

    pub fn facts(&self) -> Vec<LineFacts> {
        let facts = |line: &Line| LineFacts {
            start: line.start / SECTOR,
            len: (line.end - line.start) / SECTOR,
            target: line.target.name(),
            facts: line.target.facts(),
        };
        self.lines.iter().map(facts).collect()
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        for own in self.lines.iter().filter_map(|line| line.target.events()) {
            own.forget(&self.room);
            own.set_background(None);
        }
    }
}

/// Passes a target's `room` signal on to the device's listeners.
#[derive(Debug)]
struct ForwardRoom(Arc<Events>);

impl Wake for ForwardRoom {
    fn wake(&self) {
        self.0.room();
    }
}

/// Passes a target's `work` signal on to the device's background.
#[derive(Debug)]
struct ForwardWork(Arc<Events>);

impl Wake for ForwardWork {
    fn wake(&self) {
        self.0.work();
    }
}
