//! The writecache target: a write-back cache that admits writes only, on the media of Linux's
//! dm-writecache, over persistent memory (mode `p`) or a disk (mode `s`).

pub mod args;
pub mod format;
pub mod inspect;
pub mod layout;
pub mod media;
pub mod walk;

pub use args::{ArgError, Mode, TableArgs};
