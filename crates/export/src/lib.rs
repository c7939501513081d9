//! Doors: ways in for clients of a mapped device.
//!
//! | room | what |
//! |---|---|
//! | [`uri`], `options` | where a door is, as users write it |
//! | [`door`] | what all doors have in common, and how one is opened |
//! | [`nbd`] | the door of NBD's clients |
//! | [`ublk`] | the door of this host: a disk of the kernel's ublk driver |
//! | [`vhost`] | the door of virtual machines: vhost-user-blk |
//! | [`socket`], [`activation`] | Unix sockets, and sockets that this process was given |
//! | [`budget`] | memory that all clients share |
//! | [`check`] | which doors work on this machine |
//!
//! Callers use [`Uri`] and [`Door`], and know no protocol. To add a door: add a module here, a
//! variant of [`Uri`], and an arm where `door` and `uri` tell the variants apart.

#![deny(unsafe_code)]

pub mod activation;
pub mod budget;
pub mod check;
pub mod door;
pub mod nbd;
mod options;
pub mod socket;
pub mod ublk;
pub mod uri;
pub mod vhost;

pub use door::{Door, limits, open};
pub use uri::{FORMS, Uri};
