//! Attaching a cache device: reads its contents before requests are served. This code does not
//! write, except that `takeup` logs the keys that a dead server left.
//!
//! | file | job |
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

pub(super) use read::Sharing;
pub(super) use replay::Replay;
pub use replay::ReplayPace;
pub use structures::{Structures, check_size, extent, has_data_crc, load_info, load_structures};
pub use survey::{Reading, Replayed, survey};
pub(super) use takeup::{Left, difference, keys_left, log_taken_up, take_up};
pub(super) use walk::{Step, Walk, damage_behind, outline};
