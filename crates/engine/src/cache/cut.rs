//! Metadata that its device has lost: the file below was cut, and may be as long as it was again.
//!
//! 1. A cut takes the end of a file, so the last block in use is a witness. If it was data and is a
//!    hole now, it is lost, with others.
//! 2. It is checked before each commit, before its superblock, and with each flush of a client.
//! 3. From then on no commit succeeds, and no flush while any block is dirty: a server that starts
//!    later would not find the dirty data. Memory knows where dirty data is, so write-back goes on.

use crate::disk::{Disk, Extent};

use super::metadata::{BLOCK_BYTES, Writer};

/// The state of the checks of the metadata device.
#[derive(Debug, Default)]
pub(super) struct Witness {
    /// A block that has data.
    block: Option<u64>,
    /// The loss of the device, in words that follow its name.
    loss: Option<String>,
}

impl Witness {
    /// After a commit, or at the start.
    pub(super) fn new(metadata: &dyn Disk, writer: &Writer) -> Witness {
        let block = writer.last_used().filter(|block| !is_hole(metadata, *block));
        Witness { block, loss: None }
    }

    /// Checks. Whether this is the first sign of a loss.
    pub(super) fn look(&mut self, metadata: &dyn Disk) -> bool {
        if self.loss.is_some() {
            return false;
        }
        let hole = self.block.filter(|block| is_hole(metadata, *block));
        let hole =
            hole.map(|block| format!("lost what was written to it, as metadata block {block}"));
        self.loss = metadata.loss().or(hole);
        self.loss.is_some()
    }

    /// The loss, if there is one.
    pub(super) fn loss(&self) -> Option<&str> {
        self.loss.as_deref()
    }
}

fn is_hole(metadata: &dyn Disk, block: u64) -> bool {
    let len = BLOCK_BYTES as u64;
    metadata.extent(block * len, len) == (len, Extent::Zeroes)
}
