//! libudm: mapped devices in a C program's own process.
//!
//! `include/udm.h` is made from this crate, and says all that a program needs to know; a test
//! compares the two.
//!
//! | file | what |
//! |---|---|
//! | `ffi` | the functions of the header: hostile pointers, panics and threads end here |
//! | `queue` | requests of one thread, and what became of them |
//! | `memory` | the program's memory |
//! | `errors` | the last error of each thread |

#![deny(unsafe_code)]

mod errors;
mod ffi;
mod memory;
mod queue;

pub use ffi::*;
