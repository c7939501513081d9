//! libudm: mapped devices in a C program's own process.
//!
//! `include/udm.h` is generated from this crate and documents the interface for programs; a test
//! compares the two.
//!
//! | file | job |
//! |---|---|
//! | `ffi` | the functions of the header: checks pointers and threads, catches panics |
//! | `queue` | the requests of one thread, and their results |
//! | `memory` | the program's memory |
//! | `errors` | the last error of each thread |

#![deny(unsafe_code)]

mod errors;
mod ffi;
mod forked;
mod memory;
mod queue;

pub use ffi::*;
