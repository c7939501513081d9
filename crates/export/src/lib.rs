//! Ways in for clients of a mapped device.

#![deny(unsafe_code)]

pub mod nbd;
