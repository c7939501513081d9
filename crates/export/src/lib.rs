//! Exports: the ways in which clients access a mapped device.
//!
//! | room | job |
//! |---|---|
//! | [`uri`], `options` | the address of an export, as users write it |
//! | [`export`] | the common interface of all exports, and opening one |
//! | [`nbd`] | the export for NBD clients |
//! | [`ublk`] | the export to this host: a disk of the kernel's ublk driver |
//! | [`vhost`] | the export to virtual machines: vhost-user-blk |
//! | [`socket`], [`activation`] | Unix sockets, and sockets that this process was given |
//! | [`budget`] | memory that all clients share |
//! | [`check`] | the exports that work on this machine |
//!
//! Callers use [`Uri`] and [`Export`], and are independent of the protocol. To add an export: add a
//! module here, a variant of [`Uri`], and an arm in `export` and `uri`, which match on the
//! variants.

#![deny(unsafe_code)]

pub mod activation;
pub mod budget;
pub mod check;
pub mod export;
pub mod nbd;
mod open;
mod options;
pub mod socket;
pub mod ublk;
pub mod uri;
pub mod vhost;

pub use export::Export;
pub use open::{limits, open};
pub use uri::{FORMS, Uri};
