//! Fast memory that keeps its content: the `Pmem` half of the boundary between engines and the
//! outside world.
//!
//! Stores become durable in two steps, because media differ in the step that costs time:
//!
//! 1. [`Pmem::drain`]: every store that *this thread* made so far has left the CPU (a store fence
//!    after non-temporal or flushed stores). On page-cache media it does nothing.
//! 2. [`Pmem::sync`]: every drained store *of any thread* is durable. On media where leaving the
//!    CPU is enough it does nothing; on page-cache media it is `msync`.
//!
//! So `drain` follows every copy of data (before it, other threads may see the stores in any order
//! or not at all), and `sync` separates any two stores whose order a crash must respect. Eight
//! aligned bytes are stored whole or not at all; larger stores may be torn.
//!
//! [`dax`] is the real implementation and [`sim`] the malicious one; one conformance suite runs on
//! both. `dax` uses `media` (opens the medium, and determines how stores become durable), [`copy`]
//! (the instructions), [`copy_target`] (the targets of loads) and the module `sigbus` (memory that
//! fails while it is used). [`calibrate`] measures the fastest copy instructions, and [`copies`]
//! remembers them. [`rest`] is the remaining part of a medium that was cut short.

pub mod calibrate;
pub mod client_memory;
#[cfg(test)]
mod conformance;
pub mod copies;
pub mod copy;
pub mod copy_target;
pub mod dax;
mod media;
pub mod rest;
mod sigbus;
pub mod sim;

use crate::base::fingerprint::mix_fingerprint;
use crate::error::Status;
use copy::SharedBytes;
use copy_target::CopyTarget;

/// A process maps at most this many cache devices.
pub const MAPPINGS_MAX: usize = sigbus::MEDIA_MAX;

/// What makes stores durable on a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// CPU cache flush or non-temporal stores, then a fence (DAX).
    Cpu,
    /// `msync` of the mapped file (page cache).
    Msync,
}

/// The kind and the properties of a cache medium.
#[derive(Clone, Debug)]
pub struct Medium {
    /// As the user named it, for messages.
    pub name: String,
    /// What makes stores durable.
    pub persistence: Persistence,
    /// Whether a power failure loses all of it (tmpfs, hugetlbfs, anonymous memory).
    pub is_volatile: bool,
    /// One sentence about how this was found out, for `udm info`.
    pub description: String,
    /// `major:minor` for device nodes, as the kernel would print it in a table; then the method
    /// that makes stores durable, if the user chose one.
    pub kernel_name: String,
}

/// Byte-addressable memory that survives. All ranges are checked against `len_bytes` by
/// assertion: engines validate what comes from media before they use it as an address.
pub trait Pmem: Send + Sync + std::fmt::Debug {
    /// Size in bytes.
    fn len_bytes(&self) -> u64;

    /// Bytes that exist, from the start on: all of `len_bytes`, unless the medium was cut short and
    /// is opened to inspect it.
    fn left_bytes(&self) -> u64 {
        self.len_bytes()
    }

    /// The kind and the properties of the medium.
    fn medium(&self) -> &Medium;

    /// Copies `bytes` to `at`. Any alignment and length.
    fn store(&self, at: u64, bytes: &[u8]);

    /// As [`Pmem::store`], from memory that other threads may be changing: each byte is loaded
    /// once, and the stored bytes may be a mixture. Returns a fingerprint of the stored bytes.
    /// Whole sectors only.
    fn store_shared(&self, at: u64, from: SharedBytes<'_>) -> u32 {
        let mut place = at;
        mix_fingerprint(from.by_pieces(|piece| {
            self.store(place, piece);
            place += piece.len() as u64;
        }))
    }

    /// Stores `len` zero bytes at `at`.
    fn zero(&self, at: u64, len: u64);

    /// Copies from `at` into `into`. Safe against concurrent stores: the bytes may then be any
    /// mixture, and the caller must find out by other means (generations) that it must not use
    /// them.
    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status>;

    /// As [`Pmem::load`], but a medium that cannot be read here is not failed by it: other loads
    /// and stores work as before. Slower.
    fn probe(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        self.load(at, into)
    }

    /// As [`Pmem::load`], to memory that is shared with other processes. If the target does not
    /// take all bytes, the result is an error as well.
    fn load_shared(&self, at: u64, into: CopyTarget<'_>) -> Result<(), Status> {
        let mut piece = [0; 4096];
        for from in (0..into.len()).step_by(piece.len()) {
            let bytes = (into.len() - from).min(piece.len());
            self.load(at + from as u64, &mut piece[..bytes])?;
            if !into.part(from, bytes).store(&piece[..bytes]) {
                return Err(Status::Io);
            }
        }
        Ok(())
    }

    /// After this, all of this thread's stores have left the CPU.
    fn drain(&self) -> Result<(), Status>;

    /// After this, all drained stores are durable. After a failure the medium must not be trusted
    /// again.
    fn sync(&self) -> Result<(), Status>;

    /// Whether a sync has failed for good: later syncs do not make the lost stores durable,
    /// although they can be read, because pages of a file that could not be written count as clean.
    /// Only data that is stored again becomes durable.
    fn has_given_up(&self) -> bool {
        false
    }

    /// The primitives of stores, by their size in bytes, if there is a choice.
    fn copies(&self) -> Option<String> {
        None
    }

    /// Why the medium is not trusted any more, as a sentence; `None` while it is trusted.
    fn failure(&self) -> Option<String> {
        None
    }

    /// Whether a part of a range was a hole of a file when the medium was opened: data that was
    /// stored there is lost, and loads return zeroes that were never stored.
    fn was_hole(&self, _at: u64, _len: u64) -> bool {
        false
    }

    /// The start of the hole with which the medium ended when it was opened, if there was one.
    fn hole_at_end(&self) -> Option<u64> {
        None
    }

    /// The content was inspected, or is to be formatted: from now on no store meets a full file
    /// system, and the earlier holes are unknown.
    fn reserve(&self) -> crate::error::Result<()> {
        Ok(())
    }

    /// Path by which it can still be opened in this process.
    fn open_as(&self) -> Option<String> {
        None
    }

    /// Where on that it begins, if it is a part of something.
    fn begins_at(&self) -> u64 {
        0
    }

    /// Whether the file was deleted: its content is lost when its last user closes it.
    fn is_deleted(&self) -> bool {
        false
    }
}
