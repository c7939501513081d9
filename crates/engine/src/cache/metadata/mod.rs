//! The metadata device of a `cache`, in both of its versions.
//!
//! The device is an array of blocks of 4096 bytes. Block 0 is the superblock, and the only one that
//! is written where it is. Everything else is reached from it by trees, and is copied on write: a
//! transaction writes to blocks that the last one does not use, and the superblock makes it count.
//!
//! | file | what |
//! |---|---|
//! | `block` | checksums, and what every block says of itself |
//! | `source` | where blocks are read from |
//! | `superblock` | block 0 |
//! | `bits` | a row of bits |
//! | `btree` | trees: reading one of any shape |
//! | `array` | arrays, which are trees over packed blocks |
//! | `counts` | the space map: which blocks are in use |
//! | `reading` | what was reached so far, and what is wrong |
//! | `survey` | reads all of it, and says what is wrong with each part |
//! | `contents` | what the caches' blocks are: mappings, dirty bits, hints, discards |
//! | `shape` | the tree that we write over an array's blocks |
//! | `writer` | what a transaction changes, and where it goes |
//! | `transaction` | the blocks of one transaction, to be written by somebody else |
//! | `format` | a new metadata device |
//!
//! 1. Whatever is on the device, reading it ends, with an error that names the block, or without.
//! 2. To prepare a transaction changes nothing, on the device or in memory. It is carried out in
//!    this order: its blocks, a flush, the superblock, a flush. It counts when the last is done.
//! 3. No block is written that the last superblock on the device, or one that may be there, leads
//!    to.

pub mod array;
pub mod bits;
pub mod block;
pub mod btree;
pub mod contents;
pub mod counts;
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
pub use format::{Formatted, format};
pub use source::Source;
pub use superblock::Superblock;
pub use survey::{Loaded, Survey, load, survey};
pub use transaction::Transaction;
pub use writer::{Change, Next, Writer};
