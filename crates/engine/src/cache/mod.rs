//! The target `cache`: a block cache on a fast disk, with its mapping on a metadata device.
//!
//! | file | what |
//! |---|---|
//! | `metadata` | the metadata device: every byte of it, reading, transactions, checks |
//! | `policy` | which blocks the cache has: pure decisions |
//! | `xml` | metadata as text, as thin-provisioning-tools have it |
//! | `repair` | what can be kept of damaged metadata |
//! | `drain` | brings an origin up to date from a cache at rest |
//! | `inspect` | what `inspect` reports of a metadata device |
//!
//! So far there is what works on a cache at rest: reading, checking and repairing its metadata, and
//! writing its dirty blocks back. It is not served yet.

pub mod drain;
pub mod inspect;
pub mod metadata;
pub mod policy;
pub mod repair;
pub mod xml;
