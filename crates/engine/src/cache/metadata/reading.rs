//! The blocks that a reader of the metadata has reached so far, and the defects that it found.
//!
//! Every block is read at most once, for any content of the trees. So reading ends, takes no more
//! memory than the device has blocks, and a block that two parents claim is noticed.

use super::bits::Bits;
use super::block::{Block, BlockKind, Finding, damaged};
use super::source::{Source, read_each};

/// The most findings of a kind that are kept; the others are counted.
pub const FINDINGS_MAX: usize = 1000;

/// A list of defects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The first of them.
    pub list: Vec<Finding>,
    /// How many there are beside those.
    pub more: u64,
}

impl Findings {
    /// Adds one.
    pub fn add(&mut self, finding: Finding) {
        match self.list.len() < FINDINGS_MAX {
            true => self.list.push(finding),
            false => self.more += 1,
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.list.len() as u64 + self.more
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// A reader's way through the metadata.
pub struct Reading<'a> {
    source: &'a dyn Source,
    /// The blocks that were reached.
    pub reached: Bits,
    /// Defects that make a part unreadable, or contradict another part.
    pub damage: Findings,
    /// Harmless irregularities.
    pub remarks: Findings,
}

impl std::fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reading({} blocks reached)", self.reached.ones())
    }
}

impl<'a> Reading<'a> {
    /// Begins with the superblock. No address is `end` or more.
    pub fn new(source: &'a dyn Source, end: u64) -> Reading<'a> {
        let mut reached = Bits::new(end.max(1));
        reached.set(0);
        Reading { source, reached, damage: Findings::default(), remarks: Findings::default() }
    }

    /// `address` is about to be read, because block `parent` names it.
    pub fn reach(&mut self, parent: u64, address: u64) -> Result<(), Finding> {
        if address >= self.reached.len() {
            let blocks = self.reached.len();
            let what = format!("it leads to block {address}, but there are {blocks}");
            return Err(damaged(parent, what));
        }
        if self.reached.is_set(address) {
            let what = format!("it leads to block {address}, which is in use elsewhere");
            return Err(damaged(parent, what));
        }
        self.reached.set(address);
        Ok(())
    }

    /// Reads blocks of a kind that were reached. `visit` gets those that are such blocks, with
    /// their places in the list.
    pub fn read(
        &mut self,
        kind: BlockKind,
        addresses: &[u64],
        mut visit: impl FnMut(&mut Reading<'a>, usize, &Block),
    ) {
        let source = self.source;
        read_each(source, addresses, |nth, read| {
            let checked = read.and_then(|block| {
                kind.check(&block, addresses[nth])?;
                Ok(block)
            });
            match checked {
                Ok(block) => visit(self, nth, &block),
                Err(finding) => self.damage.add(finding),
            }
        });
    }
}
