//! pcache's words in a table line.
//!
//! ```text
//! pcache <cache device> <backing device> [<#words> [cache_mode writeback] [data_crc true|false]]
//!        [writeback_order ordered|fast|adaptive] [read_fill always|never]
//!        [retention hot|fifo] [max_age <milliseconds>] [high_watermark <percent>]
//!        [log_damage refuse|truncate] [rebind false|true]
//!        [lost_memory refuse|accept]
//! ```
//!
//! The first line is the kernel's; its own table also prints `crc`, which it does not take back,
//! but we do. The other lines are ours and stand behind the counted words, where the kernel
//! ignores them, so that one table serves both; inside the counted words they are welcome too.

use crate::error::{Error, Kind};

use super::attach::LogDamage;
use super::pace::{HIGH_WATERMARK, MAX_AGE_MS};
use super::retention::RetentionKind;

/// How strictly write-back keeps the order of clients' flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritebackOrder {
    /// The backing device alone always is a state that a power cut could have left: writes are
    /// merged and reordered between two flushes of the clients only.
    #[default]
    Ordered,
    /// Merges across flushes too. While a batch that does so is under way, the backing device
    /// alone is no state of any flush; status says when that is.
    Fast,
    /// Ordered while write-back keeps up; as `Fast` when much more of the cache is dirty than
    /// `high_watermark` says (a quarter of the way from there to all of it), or space is short,
    /// until it is less than that mark.
    Adaptive,
}

/// The parsed words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableArgs {
    /// The cache device, as written.
    pub cache: String,
    /// The backing device, as written.
    pub backing: String,
    /// Whether keys carry CRCs of their data; must equal what the cache was formatted with.
    pub has_data_crc: bool,
    /// Order of write-back.
    pub writeback_order: WritebackOrder,
    /// What is dirty for so many milliseconds is written back.
    pub max_age_ms: u32,
    /// Write-back begins when so many percent of the cache's room are dirty.
    pub high_watermark: u32,
    /// Whether reads that miss are cached.
    pub fills_reads: bool,
    /// Which data stays when space is short.
    pub retention: RetentionKind,
    /// What to do about a damaged log.
    pub log_damage: LogDamage,
    /// Attach although the label names another backing device.
    pub rebinds: bool,
    /// Attach although writes that were acknowledged and not flushed are lost with the memory that
    /// the last server left.
    pub accepts_loss: bool,
}

/// An error about one of the words.
#[derive(Debug)]
pub struct ArgError {
    /// Which word, counted from the cache device as 0; the number of words if one is missing.
    pub word: usize,
    /// What is wrong with it.
    pub error: Error,
}

/// Options whose other values are errors.
const VALUED: [&str; 10] = [
    "data_crc",
    "crc",
    "writeback_order",
    "max_age",
    "high_watermark",
    "read_fill",
    "retention",
    "log_damage",
    "rebind",
    "lost_memory",
];

/// Most words that a table line of ours has.
const WORDS_MAX: usize = 64;

impl TableArgs {
    /// Parses the words behind `pcache`.
    pub fn parse(words: &[&str]) -> Result<TableArgs, ArgError> {
        let wrong = |word: usize, what: String| ArgError {
            word,
            error: Error::new(Kind::Invalid, format!("pcache: {what}")),
        };
        let device = |nth: usize, what: &str| match words.get(nth) {
            Some(word) => Ok((*word).to_string()),
            None => Err(wrong(nth, format!("{what} is missing"))),
        };
        let mut args = TableArgs {
            cache: device(0, "cache device")?,
            backing: device(1, "backing device")?,
            has_data_crc: false,
            writeback_order: WritebackOrder::Ordered,
            max_age_ms: MAX_AGE_MS,
            high_watermark: HIGH_WATERMARK,
            fills_reads: true,
            retention: RetentionKind::Hot,
            log_damage: LogDamage::Refuse,
            rebinds: false,
            accepts_loss: false,
        };
        if words.len() > WORDS_MAX {
            return Err(wrong(WORDS_MAX, format!("more than {WORDS_MAX} words")));
        }
        let Some(count) = words.get(2) else { return Ok(args) };
        let counted = parse_count(count).ok_or_else(|| {
            wrong(
                2,
                format!("'{count}' is not a number of optional words (invalid argument count)"),
            )
        })?;
        if counted > words.len() - 3 {
            return Err(wrong(
                2,
                format!("{counted} optional words announced, {} present", words.len() - 3),
            ));
        }
        let mut at = 3;
        while at < words.len() {
            let value = words.get(at + 1).filter(|_| at >= 3 + counted || at + 1 < 3 + counted);
            let Some(value) = value else {
                return Err(wrong(at, format!("option '{}' has no value", words[at])));
            };
            args.option(words[at], value).map_err(|(nth, what)| wrong(at + nth, what))?;
            at += 2;
        }
        Ok(args)
    }

    fn option(&mut self, name: &str, value: &str) -> Result<(), (usize, String)> {
        let below = |max: u32| {
            let number = plain_number(value).filter(|number| *number <= u64::from(max));
            let what = || (1, format!("invalid option for {name}: '{value}': from 0 to {max}"));
            number.map(|number| number as u32).ok_or_else(what)
        };
        match (name, value) {
            ("max_age", _) => self.max_age_ms = below(u32::MAX)?,
            ("high_watermark", _) => self.high_watermark = below(100)?,
            ("cache_mode", "writeback") => {}
            ("cache_mode", _) => {
                return Err((1, format!("cache_mode '{value}' is not supported: only writeback")));
            }
            ("data_crc" | "crc", "true") => self.has_data_crc = true,
            ("data_crc" | "crc", "false") => self.has_data_crc = false,
            ("writeback_order", "ordered") => self.writeback_order = WritebackOrder::Ordered,
            ("writeback_order", "fast") => self.writeback_order = WritebackOrder::Fast,
            ("writeback_order", "adaptive") => self.writeback_order = WritebackOrder::Adaptive,
            ("read_fill", "always") => self.fills_reads = true,
            ("read_fill", "never") => self.fills_reads = false,
            ("retention", "hot") => self.retention = RetentionKind::Hot,
            ("retention", "fifo") => self.retention = RetentionKind::Fifo,
            ("log_damage", "refuse") => self.log_damage = LogDamage::Refuse,
            ("log_damage", "truncate") => self.log_damage = LogDamage::Truncate,
            ("rebind", "true") => self.rebinds = true,
            ("rebind", "false") => self.rebinds = false,
            ("lost_memory", "accept") => self.accepts_loss = true,
            ("lost_memory", "refuse") => self.accepts_loss = false,
            _ if VALUED.contains(&name) => {
                return Err((1, format!("invalid option for {name}: '{value}'")));
            }
            _ => return Err((0, format!("unrecognised optional argument '{name}'"))),
        }
        Ok(())
    }

    /// The optional words that differ from their defaults and that the kernel does not know.
    pub fn own_words(&self) -> String {
        let mut words = String::new();
        words.push_str(match self.writeback_order {
            WritebackOrder::Ordered => "",
            WritebackOrder::Fast => " writeback_order fast",
            WritebackOrder::Adaptive => " writeback_order adaptive",
        });
        if self.max_age_ms != MAX_AGE_MS {
            words.push_str(&format!(" max_age {}", self.max_age_ms));
        }
        if self.high_watermark != HIGH_WATERMARK {
            words.push_str(&format!(" high_watermark {}", self.high_watermark));
        }
        if !self.fills_reads {
            words.push_str(" read_fill never");
        }
        if self.retention == RetentionKind::Fifo {
            words.push_str(" retention fifo");
        }
        if self.log_damage == LogDamage::Truncate {
            words.push_str(" log_damage truncate");
        }
        words
    }
}

/// A plain unsigned decimal, as the kernel takes it.
fn plain_number(word: &str) -> Option<u64> {
    let is_plain = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| is_plain)
}

fn parse_count(word: &str) -> Option<usize> {
    let count = usize::try_from(plain_number(word)?).ok()?;
    (count <= WORDS_MAX).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<TableArgs, ArgError> {
        TableArgs::parse(&line.split_whitespace().collect::<Vec<_>>())
    }

    #[test]
    fn the_kernels_lines_and_ours_are_taken() {
        let plain = parse("C B").unwrap();
        assert!(!plain.has_data_crc && plain.fills_reads);
        assert_eq!(plain, parse("C B 0").unwrap());
        assert_eq!(plain, parse("C B 2 data_crc false").unwrap());
        assert_eq!(plain, parse("C B 4 cache_mode writeback crc false").unwrap());
        assert!(parse("C B 4 cache_mode writeback data_crc true").unwrap().has_data_crc);
        assert!(parse("C B 4 data_crc false data_crc true").unwrap().has_data_crc);
        let adaptive = parse("C B 0 writeback_order adaptive").unwrap();
        assert_eq!(adaptive.own_words(), " writeback_order adaptive");
        let ours = parse("C B 2 data_crc true writeback_order fast read_fill never").unwrap();
        assert_eq!(ours.writeback_order, WritebackOrder::Fast);
        assert!(!ours.fills_reads);
        assert_eq!(
            ours,
            parse("C B 6 data_crc true writeback_order fast read_fill never").unwrap()
        );
        assert_eq!(ours.own_words(), " writeback_order fast read_fill never");
    }

    #[test]
    fn the_bad_word_is_named() {
        for (line, word) in [
            ("", 0),
            ("C", 1),
            ("C B x", 2),
            ("C B -1", 2),
            ("C B 4 cache_mode writeback", 2),
            ("C B 1 data_crc", 3),
            ("C B 1 data_crc true", 3),
            ("C B 2 cache_mode writethrough", 4),
            ("C B 2 data_crc TRUE", 4),
            ("C B 2 Data_crc true", 3),
            ("C B 0 nonsense 1", 3),
            ("C B 99999999999999999999", 2),
        ] {
            assert_eq!(parse(line).unwrap_err().word, word, "{line}");
        }
    }
}
