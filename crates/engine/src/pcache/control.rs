//! Controlling a cache: status, table, messages, suspend and the end.

use crate::disk::Stamp;
use crate::error::{Error, Kind, Result};
use crate::mutants::{self, Mutant};
use crate::table::Word;

use super::Pcache;
use super::keylog::AppendError;
use super::layout::{GC_PERCENT_MAX, gc_percent_of};

impl Pcache {
    /// No more bios arrive. Once the background has stopped, all keys are logged: afterwards the
    /// media alone hold every completed write. On an error the cache is not suspended.
    pub(super) fn log_all_and_suspend(&self) -> Result<()> {
        if mutants::is(Mutant::DetachedSaidEarly) {
            self.identity.say_at_rest(None);
        }
        self.background.set_suspended(true);
        // Collection in progress logs keys again: it sees that it has to stop.
        drop(self.background.lock());
        self.close_all(false).map_err(|error| {
            self.background.set_suspended(false);
            self.signals.work();
            let kind = match error {
                AppendError::NoRoom => Kind::NoSpace,
                AppendError::Medium(_) => Kind::Io,
            };
            Error::new(
                kind,
                format!("pcache: {}: open key sets cannot be logged", self.media.name()),
            )
        })
    }

    /// The server detaches. The label records this if all acknowledged writes are in the log;
    /// otherwise the label is not changed, and the next server takes the cache up. Returns whether
    /// it has the origin's state.
    pub(super) fn end(&self) -> bool {
        if self.stripes.has_open_keys() || self.log.has_failed() {
            return false;
        }
        let stamp = Stamp::at_end(&self.backing, self.identity.backing_bytes());
        let is_at_rest = self.identity.say_at_rest(stamp);
        if is_at_rest {
            self.stripes.open().end();
        }
        is_at_rest && stamp.is_some()
    }

    /// The kernel's status: `sb_flags segs segs used gc% flags head dirty_tail key_tail`.
    pub(super) fn status_line(&self) -> String {
        let (superblock_flags, seg_num) = self.identity.superblock();
        let flags = self.identity.flags();
        format!(
            "{:x} {} {} {} {} {:x} {} {} {}",
            superblock_flags,
            seg_num,
            seg_num,
            self.segments.used(),
            gc_percent_of(flags),
            flags,
            self.log.head(),
            self.log.dirty_tail(),
            self.log.key_tail()
        )
    }

    /// The kernel's table words (it prints `crc` but requires `data_crc`), then udm's own.
    pub(super) fn table_words(&self) -> String {
        format!(
            "{} {} 4 cache_mode writeback crc {}{}",
            Word::new(self.media.pmem.medium().kernel_name.as_str()).quoted(),
            Word::new(self.backing.limits().kernel_name.as_str()).quoted(),
            self.args.has_data_crc,
            self.args.own_words()
        )
    }

    /// `gc_percent <0..90>`, stored durably before it is answered.
    pub(super) fn take_message(&self, words: &[String]) -> Result<String> {
        let invalid = |what: String| Error::new(Kind::Invalid, format!("pcache: message {what}"));
        let [name, value] = words else {
            return Err(invalid(format!(
                "of {} words: only 'gc_percent <n>' is supported",
                words.len()
            )));
        };
        if !name.eq_ignore_ascii_case("gc_percent") {
            return Err(invalid(format!("'{name}': only 'gc_percent <n>' is supported")));
        }
        let digits = value.strip_prefix('+').unwrap_or(value);
        let is_plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let percent = digits.parse::<u32>().ok().filter(|n| is_plain && *n <= GC_PERCENT_MAX);
        let percent = percent.ok_or_else(|| {
            invalid(format!("gc_percent '{value}': not a number from 0 to {GC_PERCENT_MAX}"))
        })?;
        self.identity.set_gc_percent(percent, self.stripes.open())?;
        self.signals.work();
        Ok(String::new())
    }
}
