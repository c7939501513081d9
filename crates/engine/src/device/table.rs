//! Tables as a device holds them: ranges and the targets that serve them.

use super::LineFacts;
use crate::bio::{Bio, Op};
use crate::error::{Result, Status};
use crate::sync::Arc;
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

    /// Lets go of what was never served.
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
        Active { lines: self.lines, room }
    }
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

    /// The largest block of any line: a request that keeps to it suits them all.
    pub fn limits(&self) -> TargetLimits {
        let mut all = TargetLimits { block_bytes: SECTOR as u32, has_discard: false };
        for limits in self.lines.iter().map(|line| line.target.limits()) {
            all.block_bytes = all.block_bytes.max(limits.block_bytes);
            all.has_discard |= limits.has_discard;
        }
        all
    }

    /// The index of the line that holds byte `at` of the device.
    pub fn index_at(&self, at: u64) -> usize {
        self.lines.partition_point(|line| line.end <= at)
    }

    pub fn line_at(&self, at: u64) -> Option<&Line> {
        self.lines.get(self.index_at(at))
    }

    /// Whether a target may be given this bio. Beyond the end, a write fails for lack of room; any
    /// other request is invalid.
    pub fn check(&self, bio: &Bio) -> std::result::Result<(), Status> {
        match bio.op {
            Op::Flush => return if bio.len == 0 { Ok(()) } else { Err(Status::Invalid) },
            Op::Read | Op::Write => {
                assert_eq!(bio.len, bio.buffer.len() as u64, "a bio is as long as its buffer");
            }
            Op::Discard | Op::WriteZeroes => {}
        }
        let is_whole = (bio.offset | bio.len).is_multiple_of(SECTOR);
        if !is_whole || bio.len > BIO_BYTES_MAX {
            return Err(Status::Invalid);
        }
        match bio.offset.checked_add(bio.len) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ if matches!(bio.op, Op::Write | Op::WriteZeroes) => Err(Status::NoSpace),
            _ => Err(Status::Invalid),
        }
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
