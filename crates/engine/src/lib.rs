//! Linux's device-mapper caches in user space, on the kernel's own media.
//!
//! The house, from the ground up; an arrow points one way only:
//!
//! * nouns: [`units`], [`error`], [`bio`], [`buffer`], [`crc`], [`prng`];
//! * ground, the only rooms that touch the world: [`ring`], [`disk`] and [`pmem`];
//! * [`table`]: dmsetup's lines;
//! * engines, plain state machines without clock, thread or file: [`target`] is their contract,
//!   [`simple`], [`pcache`] and [`writecache`] keep it;
//! * assembly: [`targets`] (one description for each type of target), [`world`] (from lines to
//!   targets), [`device`] (active and inactive table), [`local`] (the in-process caller),
//!   [`queue`] (one thread, one ring, one loop), `crew` (threads that help to open a cache).

#![deny(unsafe_code)]

mod alarm;
pub mod attaching;
pub mod bio;
pub mod buffer;
pub mod contents;
pub mod crc;
mod crew;
pub mod device;
pub mod disk;
pub mod error;
pub mod limits;
pub mod local;
mod look;
pub mod mutants;
mod near;
#[cfg(test)]
#[cfg(feature = "loom")]
mod orderings;
pub mod pcache;
pub mod pending;
pub mod per_port;
pub mod pmem;
pub mod prng;
pub mod probe;
pub mod queue;
pub mod rescue;
mod retry;
pub mod ring;
mod room;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod schedules;
pub mod shm;
pub mod simple;
pub mod slots;
pub mod sync;
pub mod table;
pub mod target;
pub mod targets;
pub mod units;
pub mod world;
pub mod writecache;
