//! Status, table line, messages; suspend and resume.

use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::table::Word;
use crate::units::SECTOR;

use super::Cache;
use super::args::{MQ_KEYS, Mode, PolicyName, setting};
use super::metadata::source::read_one;

/// The user's orders for an open cache.
#[derive(Debug)]
pub(super) struct Orders {
    is_draining: AtomicBool,
    is_suspended: AtomicBool,
    /// Another table was to take the media over.
    has_handed_over: AtomicBool,
    threshold_sectors: AtomicU64,
}

impl Orders {
    pub(super) fn new(threshold_sectors: u64) -> Orders {
        Orders {
            is_draining: AtomicBool::new(false),
            is_suspended: AtomicBool::new(false),
            has_handed_over: AtomicBool::new(false),
            threshold_sectors: AtomicU64::new(threshold_sectors),
        }
    }

    pub(super) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    pub(super) fn set_draining(&self, is_draining: bool) {
        self.is_draining.store(is_draining, Ordering::SeqCst);
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::SeqCst)
    }

    /// Whether another table was to take the media over.
    pub(super) fn has_handed_over(&self) -> bool {
        self.has_handed_over.load(Ordering::SeqCst)
    }

    /// How much may be on its way between the devices, in bytes.
    pub(super) fn threshold_bytes(&self) -> u64 {
        self.threshold_sectors.load(Ordering::Relaxed) * SECTOR
    }
}

impl Cache {
    /// No bio is in flight: I/O between the devices ends, and the medium gets the exact state,
    /// driven by the background.
    pub(super) fn begin_suspend(&self) {
        self.begin_rest();
        self.commits.lock().has_rested = false;
        self.orders.is_suspended.store(true, Ordering::SeqCst);
        // Not earlier: from here on, a failed try is the last one.
        self.commits.lock().may_tell();
        self.events.work();
    }

    /// Whether, after a suspend, no I/O is in flight and no work is left.
    pub(super) fn is_at_rest(&self) -> bool {
        let is_idle = self.background.lock().is_idle();
        let state = self.commits.lock();
        let is_untold = self.blocks().trouble.is_untold() && state.tell_at(0).is_some();
        is_idle && state.is_idle() && state.has_rested && !is_untold
    }

    /// See [`Target::is_durable`](crate::target::Target::is_durable). The failure of a cache device
    /// matters only for data that the origin lacks.
    pub(super) fn is_all_durable(&self) -> bool {
        let is_dirty = self.blocks().slots.dirty_count() > 0;
        !(self.origin.owes_flush() || is_dirty && self.cache.owes_flush())
    }

    /// Another table takes the media over, and reads its state from them. An error if they do not
    /// have the whole state.
    pub(super) fn leave_media(&self) -> Result<()> {
        let trouble = self.blocks().trouble;
        let is_doubted =
            trouble.doubts > trouble.inherited && !mutants::is(Mutant::DoubtLeftUnsaid);
        let why = match (trouble.has_lost, trouble.is_stuck, is_doubted) {
            (true, ..) => "its cache device failed a flush: remove the device and create it again",
            (_, true, _) => "its metadata cannot be written at the moment",
            (.., true) => {
                "its origin failed a flush, and another table would not know which clients must \
                 get an error"
            }
            _ => {
                self.orders.has_handed_over.store(true, Ordering::SeqCst);
                return Ok(());
            }
        };
        Err(Error::new(Kind::Refused, format!("cache: no other table can take effect: {why}")))
    }

    /// The other table did not take the media over. An error if it changed them.
    pub(super) fn take_media_back(&self) -> Result<()> {
        if !self.orders.has_handed_over.load(Ordering::SeqCst) {
            return Ok(());
        }
        let found = read_one(&self.metadata, 0).map_err(Error::from)?;
        if *found != self.commits.lock().writer.superblock().build() {
            let what = "cache: a table that failed to take effect has changed the metadata: remove \
                        the device, and create it again";
            return Err(Error::new(Kind::Io, what));
        }
        self.orders.has_handed_over.store(false, Ordering::SeqCst);
        Ok(())
    }

    /// Bios arrive again. The dirty bits on the medium are right, and remain so.
    pub(super) fn end_suspend(&self) {
        self.orders.is_suspended.store(false, Ordering::SeqCst);
        self.commits.lock().may_tell();
        self.events.work();
    }

    /// The kernel's words.
    pub(super) fn status_line(&self) -> String {
        let (used, space) = self.commits.lock().writer.space();
        let args = &self.plan.args;
        let blocks = self.blocks();
        let (slots, free) = (blocks.slots.count(), blocks.slots.free());
        let (dirty, stats, trouble) = (blocks.slots.dirty_count(), blocks.stats, blocks.trouble);
        drop(blocks);
        let mut features = vec![args.features.mode.word()];
        if args.features.has_metadata2 {
            features.insert(0, "metadata2");
        }
        if !self.plan.passes_down {
            features.push("no_discard_passdown");
        }
        let policy = match args.policy {
            PolicyName::Mq => {
                let settings: Vec<String> = MQ_KEYS.iter().map(|key| format!("{key} 0")).collect();
                format!("mq 10 {}", settings.join(" "))
            }
            policy => format!("{} 0", policy.word()),
        };
        format!(
            "8 {used}/{space} {} {}/{slots} {} {} {} {} {} {} {dirty} {} {} 2 migration_threshold \
             {} {policy} {} - ",
            args.block_sectors,
            slots - free,
            stats.read_hits as u32,
            stats.read_misses as u32,
            stats.write_hits as u32,
            stats.write_misses as u32,
            stats.demotions as u32,
            stats.promotions as u32,
            features.len(),
            features.join(" "),
            self.orders.threshold_bytes() / SECTOR,
            if trouble.is_stuck || trouble.has_lost { "ro" } else { "rw" },
        )
    }

    /// The kernel's table words.
    pub(super) fn table_words(&self) -> String {
        let name = |name: &str| Word::new(name).quoted();
        format!(
            "{} {} {} {}",
            name(&self.metadata.limits().kernel_name),
            name(&self.cache.disk().limits().kernel_name),
            name(&self.origin.disk().limits().kernel_name),
            self.plan.args.words()
        )
    }

    /// `migration_threshold`, `invalidate_cblocks`, and the policy's keys.
    pub(super) fn take_message(&self, words: &[String]) -> Result<String> {
        let error = |kind: Kind, what: String| Err(Error::new(kind, format!("cache: {what}")));
        let trouble = self.blocks().trouble;
        if trouble.is_stuck || trouble.has_lost {
            return error(Kind::Unsupported, "it is read-only at the moment".into());
        }
        match words {
            [name, ranges @ ..] if name.eq_ignore_ascii_case("invalidate_cblocks") => {
                if self.plan.args.features.mode != Mode::Passthrough {
                    let what = "cache has to be in passthrough mode for invalidation";
                    return error(Kind::Refused, what.into());
                }
                self.invalidate_slots(ranges)?;
            }
            [key, value] => match setting(self.plan.args.policy, key, value) {
                Ok(Some(threshold)) => {
                    self.orders.threshold_sectors.store(threshold, Ordering::Relaxed);
                    self.blocks().may_copy = threshold > 0;
                    self.events.work();
                }
                Ok(None) => {}
                Err(what) => return error(Kind::Invalid, what),
            },
            _ => return error(Kind::Invalid, format!("unsupported message: {}", words.join(" "))),
        }
        Ok(String::new())
    }

    /// Gives up the slots of all of `ranges`, each a number, or a first one and an end; none if one
    /// of them is wrong. The background commits that.
    fn invalidate_slots(&self, ranges: &[String]) -> Result<()> {
        let mut blocks = self.blocks();
        let count = u64::from(blocks.slots.count());
        let mut slots = Vec::new();
        for range in ranges {
            let (first, end) = match range.split_once('-') {
                Some((first, end)) => (super::args::number(first), super::args::number(end)),
                None => (super::args::number(range), None),
            };
            let end = end.or(first.filter(|_| !range.contains('-')).map(|first| first + 1));
            match (first, end) {
                (Some(first), Some(end)) if first < end && end <= count => {
                    let is_short = end > first + 1 && mutants::is(Mutant::LastKeptInRange);
                    slots.extend(first as u32..end as u32 - u32::from(is_short));
                }
                _ => {
                    let message = format!(
                        "cache: invalid cblock range {range}: a number, or FIRST-END, below {count}"
                    );
                    return Err(Error::new(Kind::Invalid, message));
                }
            }
        }
        let is_quiet = |slot: u32| match blocks.slots.block(slot) {
            Some(block) => blocks.in_flight.is_quiet(block),
            None => true,
        };
        if let Some(slot) = slots.iter().find(|slot| !is_quiet(**slot)) {
            let message = format!("cache: cblock {slot} is in use: try again");
            return Err(Error::new(Kind::Busy, message));
        }
        for slot in slots {
            if let Some(block) = blocks.slots.block(slot) {
                blocks.leave(block, slot);
            }
        }
        drop(blocks);
        self.events.work();
        Ok(())
    }
}
