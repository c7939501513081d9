//! Types and small tools that know neither engines nor the operating system.

pub mod area;
pub mod attaching;
pub mod crc;
pub(crate) mod fingerprint;
pub mod limits;
pub(crate) mod parallel;
pub(crate) mod pending;
pub(crate) mod prefetch;
pub(crate) mod retry;
pub mod seek;
