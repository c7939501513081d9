//! The metadata device of a `cache`, in both of its versions.
//!
//! The device is an array of blocks of 4096 bytes. Block 0 is the superblock, and the only block
//! that is overwritten in place. All other blocks are reached from it by trees, and are copied on
//! write: a transaction writes to blocks that the last one does not use, and the new superblock
//! makes it valid.
//!
//! | file | content |
//! |---|---|
//! | `block` | checksums, and the header of every block |
//! | `source` | where blocks are read from |
//! | `superblock` | block 0 |
//! | `doubt` | the mark of devices that failed a flush, in block 0 |
//! | `bits` | a row of bits |
//! | `btree` | trees: reading one of any shape |
//! | `array` | arrays, which are trees over packed blocks |
//! | `counts` | the space map: which blocks are in use |
//! | `reading` | the blocks reached so far, and their defects |
//! | `survey` | reads all of it, and reports the defects of each part |
//! | `contents` | the state of a cache's blocks: mappings, dirty bits, hints, discards |
//! | `shape` | the tree that we write over an array's blocks |
//! | `writer` | the changes of a transaction, and their new addresses |
//! | `transaction` | the blocks of one transaction, for the caller to write |
//! | `format` | a new metadata device |
//!
//! 1. For any content of the device, reading it ends, perhaps with an error that names the block.
//! 2. Preparing a transaction has no effect on the device or in memory. It is carried out in this
//!    order: its blocks, a flush, the superblock, a flush. It is valid when the last flush is done.
//! 3. No block is written that the last superblock on the device, or one that may be there, leads
//!    to.

pub mod array;
pub mod bits;
pub mod block;
pub mod btree;
pub mod contents;
pub mod counts;
pub mod doubt;
pub mod format;
pub mod reading;
mod shape;
pub mod source;
pub mod superblock;
pub mod survey;
pub mod transaction;
pub mod writer;

#[cfg(test)]
mod tests;

pub use block::{BLOCK_BYTES, Block, Finding};
pub use contents::Contents;
pub use doubt::Doubt;
pub use format::{Formatted, format};
pub use source::Source;
pub use superblock::Superblock;
pub use survey::{Loaded, Survey, load, survey};
pub use transaction::Transaction;
pub use writer::{Change, Next, Writer};
