//! Linux's device-mapper caches in user space, on the kernel's own media.
//!
//! A table, in the syntax of `dmsetup`, becomes a [`Volume`]: a device to read and write, from any
//! number of threads, with a cache in front of a slow device. Both devices may be files, block
//! devices or memory. The formats are the kernel's: udm opens media that dm-pcache, dm-writecache
//! and dm-cache wrote, and they open media that udm wrote.
//!
//! ```
//! use std::fs::File;
//! use std::thread;
//!
//! use udm::{Options, Volume};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let temporary = tempfile::tempdir()?;
//! # let folder = temporary.path();
//! let (slow, fast) = (folder.join("slow.img"), folder.join("fast.img"));
//! File::create(&slow)?.set_len(64 << 20)?;
//! File::create(&fast)?.set_len(16 << 20)?;
//!
//! // 131072 sectors of 512 bytes, cached in blocks of 4096 bytes.
//! let table = format!("0 131072 writecache s {} {} 4096 0", slow.display(), fast.display());
//! // Unflushed writes survive the death of this process: their memory has files in the folder.
//! let volume = Volume::open("disk", &table, &Options::with_memory_in(folder))?;
//!
//! // Each thread has a caller of its own.
//! thread::scope(|scope| {
//!     for half in [0, 1] {
//!         let volume = &volume;
//!         scope.spawn(move || {
//!             let mut caller = volume.caller().expect("there is a port left");
//!             caller.write_at(&[half + 1; 8192], u64::from(half) * 8192, false)?;
//!             // What was written before is durable when this returns.
//!             caller.flush()
//!         });
//!     }
//! });
//!
//! let mut caller = volume.caller()?;
//! let mut bytes = [0; 16384];
//! caller.read_at(&mut bytes, 0)?;
//! assert_eq!((bytes[0], bytes[8191], bytes[8192], bytes[16383]), (1, 1, 2, 2));
//! drop(caller);
//! volume.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! # The rooms
//!
//! [`Volume`] is enough for most programs. Its parts can also be combined in other ways:
//!
//! * [`table`]: table lines; [`targets`]: the types of target and their arguments;
//! * [`build`]: from tables to targets, with real devices or a test's own;
//! * [`device`]: a mapped device, with its active and inactive table, suspend and resume;
//! * [`local`]: a caller in this process, blocking or not; [`bio`], [`buffer`], [`units`]: the
//!   requests and their memory;
//! * [`queue`]: threads that serve a device; a program that adds an export writes the role;
//! * [`target`], [`disk`], [`pmem`]: the contracts of engines, slow devices and cache devices.
//!
//! The other modules are public for this project's tests and commands, and are not shown here; they
//! change without notice. ARCHITECTURE.md lists the folders that each folder may use.

#![deny(unsafe_code)]

#[doc(hidden)]
pub mod base;
pub mod bio;
pub mod buffer;
pub mod build;
#[doc(hidden)]
pub mod cache;
#[doc(hidden)]
pub mod common;
pub mod device;
pub mod disk;
pub mod error;
pub mod local;
#[doc(hidden)]
pub mod mutants;
#[cfg(test)]
#[cfg(feature = "loom")]
mod orderings;
#[doc(hidden)]
pub mod pcache;
pub mod pmem;
#[doc(hidden)]
pub mod prng;
#[doc(hidden)]
pub mod probe;
pub mod queue;
#[doc(hidden)]
pub mod recovery;
#[doc(hidden)]
pub mod ring;
#[cfg(test)]
#[cfg(feature = "shuttle")]
mod schedules;
#[doc(hidden)]
pub mod shm;
#[doc(hidden)]
pub mod simple;
#[doc(hidden)]
pub mod sync;
pub mod table;
pub mod target;
pub mod targets;
pub mod topology;
pub mod units;
pub mod volume;
#[doc(hidden)]
pub mod writecache;

pub use bio::{Bio, Op};
pub use buffer::Buffer;
pub use error::{Error, Kind, Result, Status};
pub use local::{Local, SystemClock};
pub use volume::{Options, Volume};
