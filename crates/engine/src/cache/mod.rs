//! The target `cache`: a block cache on a fast disk, with its mapping on a metadata device.
//!
//! | file | what |
//! |---|---|
//! | `metadata` | the metadata device: every byte of it, reading, transactions, checks |
//! | `policy` | which blocks the cache has: pure decisions |
//!
//! So far there is what works on a cache at rest: reading, checking and repairing its metadata, and
//! writing its dirty blocks back. It is not served yet.

pub mod metadata;
pub mod policy;
