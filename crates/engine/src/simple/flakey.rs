//! flakey: a linear mapping that misbehaves periodically.
//!
//! `flakey <device> <offset> <up> <down> [<#words> <features>...]`: available for `up` seconds
//! from the first tick on, then unreliable for `down` seconds, and so on. Without features
//! reads and writes fail while it is down. The kernel's `dm-flakey`.
//!
//! A target does not have a clock: the background's tick switches it. Without a background it keeps
//! its first state, available unless `up` is 0. Randomness is seeded, so a test replays.

use super::{Carrier, Location, Mapping, wrong_count};
use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::{Kind, Result, Status};
use crate::prng::Prng;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, lock};
use crate::table::Word;
use crate::target::{Events, Port, Target, TargetLimits};
use crate::units::{Nanos, SECOND};

/// Probabilities are in parts of this.
const PROBABILITY_MAX: u64 = 1_000_000_000;

/// The note on a bio that was submitted while the target was down.
const SUBMITTED_DOWN: u64 = 1;

/// The words of a flakey line.
pub const FLAKEY_WORDS: &str = "<device> <offset> <up> <down> [<#words> <features>...]";

/// The arguments of a flakey line.
#[derive(Clone, Debug)]
pub struct FlakeyArgs {
    /// The location that the line maps to.
    pub location: Location,
    /// Seconds available.
    pub up: u64,
    /// Seconds unreliable.
    pub down: u64,
    /// The effects while the target is down.
    pub features: Features,
}

/// The effects of a flakey target while it is down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Reads fail.
    pub error_reads: bool,
    /// Writes succeed without effect.
    pub drop_writes: bool,
    /// Writes fail.
    pub error_writes: bool,
    /// One byte of each bio changes.
    pub corrupt: Option<CorruptByte>,
    /// The chance, in parts of a billion, that a random byte of a read changes.
    pub random_read_corrupt: u64,
    /// The same for writes.
    pub random_write_corrupt: u64,
}

/// `corrupt_bio_byte`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CorruptByte {
    /// Which byte of a bio; the first is 1.
    pub nth: u64,
    /// Whether writes are corrupted, not reads.
    pub is_write: bool,
    /// The byte's new value.
    pub value: u8,
    /// Flags that a bio must have. Bios carry no kernel flags here, so anything but 0 fits none.
    pub flags: u64,
}

impl FlakeyArgs {
    /// Reads the words after `flakey`.
    pub fn parse(args: &[Word]) -> Result<FlakeyArgs> {
        let [device, offset, up, down, rest @ ..] = args else {
            let message = format!("Invalid argument count: flakey {FLAKEY_WORDS}");
            return Err(wrong_count(args, 4, &message));
        };
        let location = Location::parse(device, offset)?;
        let max = u64::from(u32::MAX);
        let up_seconds = up.number_up_to("the up interval in seconds", max)?;
        let down_seconds = down.number_up_to("the down interval in seconds", max)?;
        if up_seconds + down_seconds == 0 {
            return Err(down.error(Kind::Invalid, "Total (up + down) interval is zero"));
        }
        let features = match rest {
            [] => Features::parse(&Word::new("0"), &[])?,
            [count, words @ ..] => Features::parse(count, words)?,
        };
        Ok(FlakeyArgs { location, up: up_seconds, down: down_seconds, features })
    }
}

impl Features {
    fn parse(count: &Word, words: &[Word]) -> Result<Features> {
        let counted = count.number("the number of feature words")?;
        if counted > words.len() as u64 {
            let message = format!("Invalid number of feature args: {} follow", words.len());
            return Err(count.error(Kind::Invalid, message));
        }
        // As in the kernel, words after the counted words are ignored.
        let words = &words[..counted as usize];
        let mut features = Features::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut value = |what: &str| {
                words.next().ok_or_else(|| word.behind(format!("{what} is missing after this")))
            };
            let is_new = match word.text.as_str() {
                "error_reads" => !std::mem::replace(&mut features.error_reads, true),
                "drop_writes" => !std::mem::replace(&mut features.drop_writes, true),
                "error_writes" => !std::mem::replace(&mut features.error_writes, true),
                "corrupt_bio_byte" => {
                    let corrupt = CorruptByte::parse(&mut value)?;
                    features.corrupt.replace(corrupt).is_none()
                }
                "random_read_corrupt" => set_chance(&mut features.random_read_corrupt, &mut value)?,
                "random_write_corrupt" => {
                    set_chance(&mut features.random_write_corrupt, &mut value)?
                }
                _ => return Err(word.error(Kind::Invalid, "Unrecognised flakey feature requested")),
            };
            if !is_new {
                let message = format!("Feature {} duplicated", word.text);
                return Err(word.error(Kind::Invalid, message));
            }
            if let Some(conflict) = features.conflict() {
                return Err(word.error(Kind::Invalid, conflict));
            }
        }
        if features == Features::default() {
            features.error_reads = true;
            features.error_writes = true;
        }
        Ok(features)
    }

    fn conflict(&self) -> Option<&'static str> {
        let corrupts = |is_write, chance| {
            chance > 0 || self.corrupt.is_some_and(|corrupt| corrupt.is_write == is_write)
        };
        let corrupts_writes = corrupts(true, self.random_write_corrupt);
        if self.drop_writes && self.error_writes {
            Some("Feature error_writes conflicts with feature drop_writes")
        } else if self.error_reads && corrupts(false, self.random_read_corrupt) {
            Some(
                "error_reads is incompatible with random_read_corrupt or corrupt_bio_byte with \
                 the READ flag set",
            )
        } else if self.drop_writes && corrupts_writes {
            Some(
                "drop_writes is incompatible with random_write_corrupt or corrupt_bio_byte with \
                 the WRITE flag set",
            )
        } else if self.error_writes && corrupts_writes {
            Some(
                "error_writes is incompatible with random_write_corrupt or corrupt_bio_byte with \
                 the WRITE flag set",
            )
        } else {
            None
        }
    }

    fn print(&self) -> String {
        let mut words = Vec::new();
        let flags = [
            (self.error_reads, "error_reads"),
            (self.drop_writes, "drop_writes"),
            (self.error_writes, "error_writes"),
        ];
        words.extend(flags.iter().filter(|(is_set, _)| *is_set).map(|(_, word)| word.to_string()));
        if let Some(CorruptByte { nth, is_write, value, flags }) = self.corrupt {
            let direction = if is_write { "w" } else { "r" };
            words.push("corrupt_bio_byte".into());
            words.extend([nth.to_string(), direction.into(), value.to_string(), flags.to_string()]);
        }
        let chances = [
            (self.random_read_corrupt, "random_read_corrupt"),
            (self.random_write_corrupt, "random_write_corrupt"),
        ];
        for (chance, word) in chances {
            if chance > 0 {
                words.extend([word.to_string(), chance.to_string()]);
            }
        }
        let mut line = words.len().to_string();
        words.iter().for_each(|word| {
            line.push(' ');
            line.push_str(word);
        });
        line
    }
}

impl CorruptByte {
    fn parse<'a>(value: &mut dyn FnMut(&str) -> Result<&'a Word>) -> Result<CorruptByte> {
        let max = u64::from(u32::MAX);
        let nth_word = value("the byte's number")?;
        let nth = nth_word.number_up_to("the byte's number", max)?;
        if nth == 0 {
            return Err(nth_word.error(Kind::Invalid, "Invalid corrupt bio byte: the first is 1"));
        }
        let direction = value("the direction")?;
        let is_write = match direction.text.as_str() {
            "r" => false,
            "w" => true,
            _ => {
                let message = "Invalid corrupt bio direction (r or w)";
                return Err(direction.error(Kind::Invalid, message));
            }
        };
        let byte = value("the value")?.number_up_to("the value", 255)? as u8;
        let flags = value("the flags")?.number_up_to("the flags mask", max)?;
        Ok(CorruptByte { nth, is_write, value: byte, flags })
    }
}

/// Whether the chance was not given before.
fn set_chance<'a>(
    chance: &mut u64,
    value: &mut dyn FnMut(&str) -> Result<&'a Word>,
) -> Result<bool> {
    let word = value("the probability")?;
    let new = word.number_up_to("the probability in parts of a billion", PROBABILITY_MAX)?;
    Ok(std::mem::replace(chance, new) == 0)
}

/// The flakey target.
#[derive(Debug)]
pub struct Flakey {
    mapping: Mapping,
    up: Nanos,
    down: Nanos,
    features: Features,
    carrier: Carrier,
    is_down: AtomicBool,
    /// The time of the first tick.
    loaded_at: Mutex<Option<Nanos>>,
    prng: Mutex<Prng>,
}

impl Flakey {
    /// Maps `len` bytes to `disk`, which `args` names.
    pub fn new(args: &FlakeyArgs, len: u64, disk: Arc<dyn Disk>) -> Result<Flakey> {
        Ok(Flakey {
            mapping: Mapping::new(&args.location, len, disk)?,
            up: args.up * SECOND,
            down: args.down * SECOND,
            features: args.features.clone(),
            carrier: Carrier::default(),
            is_down: AtomicBool::new(args.up == 0),
            loaded_at: Mutex::new(None),
            prng: Mutex::new(Prng::new(args.location.offset)),
        })
    }

    /// The result of a bio while the target is down; `None`: the bio is sent to the disk.
    fn verdict(&self, op: Op) -> Option<std::result::Result<(), Status>> {
        let features = &self.features;
        match op {
            Op::Read => features.error_reads.then_some(Err(Status::Io)),
            _ if features.error_writes => Some(Err(Status::Io)),
            _ if features.drop_writes => Some(Ok(())),
            _ => None,
        }
    }

    /// Whether the data of such a bio may be changed while the target is down.
    fn corrupts(&self, op: Op) -> bool {
        let chance = match op {
            Op::Read => self.features.random_read_corrupt,
            Op::Write => self.features.random_write_corrupt,
            Op::Flush | Op::Discard | Op::WriteZeroes => return false,
        };
        chance > 0 || self.features.corrupt.is_some_and(|c| c.is_write == (op == Op::Write))
    }

    fn corrupt(&self, op: Op, bytes: &mut [u8]) {
        if let Some(corrupt) = self.features.corrupt
            && corrupt.is_write == (op == Op::Write)
            && corrupt.flags == 0
            && let Some(byte) = bytes.get_mut(corrupt.nth as usize - 1)
        {
            *byte = corrupt.value;
        }
        let features = &self.features;
        let chance = match op {
            Op::Read => features.random_read_corrupt,
            _ => features.random_write_corrupt,
        };
        let mut prng = lock(&self.prng);
        if chance > 0 && prng.below(PROBABILITY_MAX) < chance {
            let at = prng.below(bytes.len() as u64) as usize;
            bytes[at] = prng.next_u64() as u8;
        }
    }
}

impl Target for Flakey {
    fn name(&self) -> &'static str {
        "flakey"
    }

    fn submit(&self, mut bio: Bio, port: &mut Port) {
        if !self.is_down.load(Ordering::SeqCst) {
            return self.carrier.send(bio, &self.mapping, port);
        }
        if let Some(status) = self.verdict(bio.op) {
            return port.finish(bio, status);
        }
        if bio.op == Op::Write && self.corrupts(bio.op) {
            // The client's own bytes must not change.
            let mut copy = port.pool.take(bio.buffer.len());
            copy.as_mut_slice().copy_from_slice(bio.buffer.as_slice());
            self.corrupt(bio.op, copy.as_mut_slice());
            return self.carrier.send_with(bio, copy, &self.mapping, port);
        }
        bio.note = SUBMITTED_DOWN;
        self.carrier.send(bio, &self.mapping, port);
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        let Some(mut bio) = self.carrier.complete(io, port) else { return };
        let was_down = std::mem::take(&mut bio.note) == SUBMITTED_DOWN;
        if was_down && bio.op == Op::Read && bio.status.is_ok() && self.corrupts(bio.op) {
            self.corrupt(bio.op, bio.buffer.as_mut_slice());
        }
        port.done.push_back(bio);
    }

    fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        let loaded_at = *lock(&self.loaded_at).get_or_insert(now);
        let cycle = self.up + self.down;
        let phase = now.saturating_sub(loaded_at) % cycle;
        let is_down = phase >= self.up;
        self.is_down.store(is_down, Ordering::SeqCst);
        match self.verdict(Op::Flush).filter(|_| is_down) {
            Some(status) => self.carrier.tick_without_disk(status),
            None => self.carrier.tick(&self.mapping, port),
        }
        let turns = self.up > 0 && self.down > 0;
        turns.then_some(now - phase + if is_down { cycle } else { self.up })
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(self.carrier.rest.events())
    }

    fn losses(&self) -> u64 {
        self.mapping.losses()
    }

    fn limits(&self) -> TargetLimits {
        self.mapping.limits()
    }

    fn is_read_only(&self) -> bool {
        self.mapping.disk.is_read_only()
    }

    fn suspend(&self) -> Result<()> {
        self.carrier.rest.begin();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.carrier.rest.is_idle()
    }

    fn is_durable(&self) -> bool {
        self.carrier.rest.is_durable()
    }

    fn resume(&self) -> Result<()> {
        self.carrier.rest.resume();
        Ok(())
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        let (up, down) = (self.up / SECOND, self.down / SECOND);
        format!("{} {up} {down} {}", self.mapping.words(), self.features.print())
    }
}
