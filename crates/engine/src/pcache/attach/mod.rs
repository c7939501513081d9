//! Attaching a cache device: what it holds, before requests are served. Nothing here writes, except
//! that `takeup` logs what a dead server left.
//!
//! | file | what it does |
//! |---|---|
//! | `structures`, `chain` | everything but the log: checks, tails, the chain of segments |
//! | `survey`, `read` | the one walk over the log before a cache serves, on several threads |
//! | `replay` | the part of the log that can wait, in the background |
//! | `walk` | the log record by record, and what follows its end |
//! | `takeup` | the keys that a dead server left in memory |

mod chain;
mod read;
mod replay;
mod structures;
mod survey;
mod takeup;
mod walk;

pub use chain::SegmentOnMedia;
pub(super) use read::Sharing;
pub(super) use replay::Replay;
pub use replay::ReplayPace;
pub use structures::{
    LogDamage, Structures, check_size, cut_short, extent, has_data_crc, load_info, load_structures,
};
pub use survey::{Reading, Replayed, survey};
pub(super) use takeup::{Left, difference, keys_left, log_taken_up, take_up};
pub(super) use walk::{Step, Walk, damage_behind, outline};
