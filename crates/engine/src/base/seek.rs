//! A model of the time that a hard disk needs for a request: a disk with an arm and a turning
//! platter, for the target `delay`.
//!
//! 1. *The arm.* A seek takes the track-to-track time, and a share of the rest of a full stroke.
//!    The share grows as the square root of the distance, because the arm speeds up halfway and
//!    slows down again. A request that starts where the previous one ended needs no seek.
//! 2. *The platter.* Then the first byte must rotate under the head. The angle of a byte is its
//!    position on its track of [`TRACK_BYTES`]; tracks are not skewed. The time alone decides the
//!    platter's angle, so the same requests at the same times always take the same time.
//! 3. *The transfer* takes a track's share of a revolution.
//! 4. Requests are served one at a time, in order.

use std::fmt;

use crate::error::{Error, Kind, Result};
use crate::units::{MIB, Nanos};

/// Bytes that pass by in a turn.
pub const TRACK_BYTES: u64 = MIB;
/// The longest time that can be said.
const MICROSECONDS_MAX: u64 = 10_000_000;
const MICROSECOND: Nanos = 1000;

/// The times of a disk, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seek {
    track: u64,
    full: u64,
    turn: u64,
}

/// A disk of 7200 turns a minute, as they are made today.
const DISK: Seek = Seek { track: 500, full: 15_000, turn: 8333 };

impl Seek {
    /// Reads `disk`, or `TRACK,FULL,TURN` in microseconds.
    pub fn parse(value: &str) -> Result<Seek> {
        let wrong = |what: &str| Error::new(Kind::Invalid, format!("seek={value}: {what}"));
        if value == "disk" {
            return Ok(DISK);
        }
        let number = |digits: &str| {
            let is_plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|us| is_plain && *us <= MICROSECONDS_MAX)
        };
        let times: Vec<Option<u64>> = value.split(',').map(number).collect();
        let [Some(track), Some(full), Some(turn)] = times[..] else {
            return Err(wrong(
                "expected disk, or the times from track to track, of a full stroke, and of a \
                 turn, in microseconds up to 10000000: 500,15000,8333",
            ));
        };
        if track > full {
            return Err(wrong("a full stroke takes at least as long as one track"));
        }
        Ok(Seek { track, full, turn })
    }

    /// The arm's way between two places of a disk of `span` bytes.
    fn stroke(&self, from: u64, to: u64, span: u64) -> Nanos {
        let distance = from.abs_diff(to).min(span);
        if distance == 0 {
            return 0;
        }
        // The root of the share, in 2^-20.
        let share = ((u128::from(distance) << 40) / u128::from(span.max(1))).isqrt();
        let rest = (u128::from((self.full - self.track) * MICROSECOND) * share) >> 20;
        self.track * MICROSECOND + rest as Nanos
    }

    /// How long from `now` on until byte `at` comes by.
    fn wait(&self, now: Nanos, at: u64) -> Nanos {
        let turn = self.turn * MICROSECOND;
        if turn == 0 {
            return 0;
        }
        let angle = u128::from(at % TRACK_BYTES) * u128::from(turn) / u128::from(TRACK_BYTES);
        (angle as Nanos + turn - now % turn) % turn
    }

    /// The end of a request for `len` bytes at `at` that is begun at `now`, with the arm at
    /// `position`, on a disk of `span` bytes.
    pub fn end(&self, now: Nanos, position: u64, at: u64, len: u64, span: u64) -> Nanos {
        let transfer = u128::from(len) * u128::from(self.turn * MICROSECOND);
        let transfer = (transfer / u128::from(TRACK_BYTES)) as Nanos;
        if position == at {
            return now + transfer;
        }
        let there = now + self.stroke(position, at, span);
        there + self.wait(there, at) + transfer
    }
}

impl fmt::Display for Seek {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.track, self.full, self.turn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::GIB;

    const MS: Nanos = 1_000_000;

    #[test]
    fn distance_costs_as_its_root_and_going_on_costs_nothing() {
        let seek = Seek::parse("1000,11000,0").unwrap();
        assert_eq!(seek.end(5, 0, 0, 4096, GIB), 5);
        assert_eq!(seek.end(0, 0, GIB, 0, GIB), 11 * MS);
        assert_eq!(seek.end(0, GIB, 0, 0, GIB), 11 * MS, "the same both ways");
        assert_eq!(seek.end(0, 0, GIB / 4, 0, GIB), 6 * MS);
        assert_eq!(seek.end(0, GIB / 2, GIB / 4, 0, GIB), 6 * MS);
        let near = seek.end(0, 0, 4096, 0, GIB);
        assert!((MS..MS + MS / 20).contains(&near), "{near}");
    }

    #[test]
    fn the_platter_turns_with_the_time() {
        let seek = Seek::parse("0,0,8000").unwrap();
        let quarter = TRACK_BYTES / 4;
        assert_eq!(seek.end(0, 0, quarter, 0, GIB), 2 * MS);
        assert_eq!(seek.end(2 * MS, 0, quarter, 0, GIB), 2 * MS, "it is just there");
        assert_eq!(seek.end(2 * MS + 1, 0, quarter, 0, GIB), 10 * MS, "it has just gone by");
        assert_eq!(seek.end(0, 0, 0, 2 * TRACK_BYTES, GIB), 16 * MS, "a track in a turn");
        assert_eq!(seek.end(MS, 8, 8 + TRACK_BYTES, 0, GIB), 8 * MS + 61);
    }

    #[test]
    fn a_disk_of_today_makes_a_hundred_random_requests_a_second() {
        let (seek, mut now, mut position) = (Seek::parse("disk").unwrap(), 0, 0);
        let mut prng = crate::prng::Prng::new(1);
        for _ in 0..1000 {
            let at = prng.below(GIB / 4096) * 4096;
            now = seek.end(now, position, at, 4096, GIB);
            position = at + 4096;
        }
        let per_second = 1000 * 1000 * MS / now;
        assert!((60..120).contains(&per_second), "{per_second}");
    }

    #[test]
    fn hostile_times_are_refused() {
        for wrong in ["", "fast", "1,2", "1,2,3,4", "-1,2,3", "3,2,1", "1,10000001,1", "1,,2"] {
            let error = Seek::parse(wrong).unwrap_err().to_string();
            assert!(error.starts_with(&format!("seek={wrong}: ")), "{error}");
        }
        let slowest = Seek::parse("10000000,10000000,10000000").unwrap();
        assert!(slowest.end(u64::MAX / 2, 0, u64::MAX, 32 * MIB, u64::MAX) > u64::MAX / 2);
        assert_eq!(Seek::parse(&slowest.to_string()).unwrap(), slowest);
    }
}
