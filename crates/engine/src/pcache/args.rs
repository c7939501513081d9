//! pcache's words in a table line.
//!
//! ```text
//! pcache <cache device> <backing device> [<#words> [<option> <value>]...] [<option> <value>]...
//! ```
//!
//! [`OPTIONS`] lists the options. The kernel knows two of them, `cache_mode` and `data_crc`. Its
//! own table prints the latter as `crc`, which the kernel does not accept as input, but udm does.
//! The other options are udm's. They follow the counted words, where the kernel ignores them, so
//! that one table serves both; udm also accepts them among the counted words.

use crate::error::{Error, Kind, Result};
use crate::table::Word;

use super::retention::RetentionKind;

/// Dirty data waits this long, in milliseconds, unless the table sets another time.
pub(super) const MAX_AGE_MS: u32 = 10_000;
/// This many percent of the cache's space may be dirty before write-back begins, unless the table
/// sets another mark.
pub(super) const HIGH_WATERMARK: u32 = 40;
/// The words of a line that the kernel knows.
pub const WORDS: &str = "\
<cache device> <backing device> [<#words> [cache_mode writeback] [data_crc true|false]]
and, not counted:
  [writeback_order ordered|fast|adaptive]
  [max_age MILLISECONDS]
  [high_watermark PERCENT]
  [read_fill always|never]
  [retention hot|fifo]
  [rebind true|false]
  [log_damage refuse|truncate]
  [lost_memory refuse|accept]";

/// What to do about a log that ends in the middle of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LogDamage {
    /// Do not attach.
    #[default]
    Refuse,
    /// Continue without the records after the damage, as the kernel does silently.
    Truncate,
}

/// How strictly write-back keeps the order of clients' flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WritebackOrder {
    /// The backing device alone always has a state that a power failure could have left: writes are
    /// merged and reordered only between two flushes of the clients.
    #[default]
    Ordered,
    /// Also merges across flushes. While such a batch is in progress, the state of the backing
    /// device alone does not match any flush; the status shows when.
    Fast,
    /// Ordered while write-back keeps up. Changes to `Fast` when much more of the cache is dirty
    /// than `high_watermark` (a quarter of the way from there to all of it), or space is short,
    /// until less than that mark is dirty.
    Adaptive,
}

/// The parsed words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableArgs {
    /// The word that names the cache device.
    pub cache: Word,
    /// The word that names the backing device.
    pub backing: Word,
    /// Whether keys carry CRCs of their data; must be the same as at the format.
    pub has_data_crc: bool,
    /// Order of write-back.
    pub writeback_order: WritebackOrder,
    /// Data that has been dirty for this many milliseconds is written back.
    pub max_age_ms: u32,
    /// Write-back begins when this many percent of the cache's space are dirty.
    pub high_watermark: u32,
    /// Whether reads that miss are cached.
    pub fills_reads: bool,
    /// Which data stays when space is short.
    pub retention: RetentionKind,
    /// What to do about a damaged log.
    pub log_damage: LogDamage,
    /// Attach although the label names another backing device.
    pub rebinds: bool,
    /// Attach although acknowledged writes that were not flushed are lost with the memory of the
    /// last server.
    pub accepts_loss: bool,
}

/// An option: all there is to say of it, but for its field.
struct TableOption {
    /// Its name, and others that are taken for it.
    names: &'static [&'static str],
    values: Values,
    /// Takes a value: a number, or the index of a word among the words.
    set: fn(&mut TableArgs, u32),
    /// The value, in the same way.
    get: fn(&TableArgs) -> u32,
    /// Whether a printed table has it, unless it has its default value. The kernel's own options
    /// are printed separately, and options that hold for one attach only are not printed.
    is_printed: bool,
}

/// The values of an option.
enum Values {
    Words(&'static [&'static str]),
    UpTo(u32),
}

/// The options, in the order in which a table prints them.
const OPTIONS: [TableOption; 10] = [
    TableOption {
        names: &["cache_mode"],
        values: Values::Words(&["writeback"]),
        set: |_, _| {},
        get: |_| 0,
        is_printed: false,
    },
    TableOption {
        names: &["data_crc", "crc"],
        values: Values::Words(&["false", "true"]),
        set: |args, word| args.has_data_crc = word == 1,
        get: |args| args.has_data_crc.into(),
        is_printed: false,
    },
    TableOption {
        names: &["writeback_order"],
        values: Values::Words(&["ordered", "fast", "adaptive"]),
        set: |args, word| {
            let orders = [WritebackOrder::Ordered, WritebackOrder::Fast, WritebackOrder::Adaptive];
            args.writeback_order = orders[word as usize];
        },
        get: |args| args.writeback_order as u32,
        is_printed: true,
    },
    TableOption {
        names: &["max_age"],
        values: Values::UpTo(u32::MAX),
        set: |args, milliseconds| args.max_age_ms = milliseconds,
        get: |args| args.max_age_ms,
        is_printed: true,
    },
    TableOption {
        names: &["high_watermark"],
        values: Values::UpTo(100),
        set: |args, percent| args.high_watermark = percent,
        get: |args| args.high_watermark,
        is_printed: true,
    },
    TableOption {
        names: &["read_fill"],
        values: Values::Words(&["always", "never"]),
        set: |args, word| args.fills_reads = word == 0,
        get: |args| (!args.fills_reads).into(),
        is_printed: true,
    },
    TableOption {
        names: &["retention"],
        values: Values::Words(&["hot", "fifo"]),
        set: |args, word| {
            args.retention = [RetentionKind::Hot, RetentionKind::Fifo][word as usize];
        },
        get: |args| (args.retention == RetentionKind::Fifo).into(),
        is_printed: true,
    },
    TableOption {
        names: &["log_damage"],
        values: Values::Words(&["refuse", "truncate"]),
        set: |args, word| {
            args.log_damage = [LogDamage::Refuse, LogDamage::Truncate][word as usize];
        },
        get: |args| (args.log_damage == LogDamage::Truncate).into(),
        is_printed: true,
    },
    TableOption {
        names: &["rebind"],
        values: Values::Words(&["false", "true"]),
        set: |args, word| args.rebinds = word == 1,
        get: |args| args.rebinds.into(),
        is_printed: false,
    },
    TableOption {
        names: &["lost_memory"],
        values: Values::Words(&["refuse", "accept"]),
        set: |args, word| args.accepts_loss = word == 1,
        get: |args| args.accepts_loss.into(),
        is_printed: false,
    },
];

impl TableOption {
    /// The value that `word` names; `name` is the option's, as written.
    fn value(&self, name: &str, word: &str) -> std::result::Result<u32, String> {
        match self.values {
            Values::Words(words) => {
                let place = words.iter().position(|known| *known == word);
                place.map(|place| place as u32).ok_or_else(|| match words {
                    [only] => format!("{name} '{word}' is not supported: only {only}"),
                    _ => format!("invalid option for {name}: '{word}'"),
                })
            }
            Values::UpTo(max) => plain_number(word)
                .filter(|number| *number <= u64::from(max))
                .map(|number| number as u32)
                .ok_or_else(|| format!("invalid option for {name}: '{word}': from 0 to {max}")),
        }
    }
}

/// Most words that a table line of ours has.
const WORDS_MAX: usize = 64;

impl TableArgs {
    /// Reads the words after `pcache`.
    pub fn parse(words: &[Word]) -> Result<TableArgs> {
        let text = |nth: usize| words[nth].text.as_str();
        let device = |nth: usize, what: &str| {
            words.get(nth).ok_or_else(|| wrong(words, nth, format!("{what} is missing")))
        };
        let (cache, backing) = (device(0, "cache device")?, device(1, "backing device")?);
        if words.len() > WORDS_MAX {
            return Err(wrong(words, WORDS_MAX, format!("more than {WORDS_MAX} words")));
        }
        let counted = match words.get(2) {
            Some(word) => parse_count(&word.text).ok_or_else(|| {
                let count = &word.text;
                let what = "is not a number of optional words (invalid argument count)";
                wrong(words, 2, format!("'{count}' {what}"))
            })?,
            None => 0,
        };
        let present = words.len().saturating_sub(3);
        if counted > present {
            let what = format!("{counted} optional words announced, {present} present");
            return Err(wrong(words, 2, what));
        }
        let mut args = TableArgs::usual(cache.clone(), backing.clone());
        for at in (3..words.len()).step_by(2) {
            let name = text(at);
            if at + 1 == words.len() || at + 1 == 3 + counted {
                return Err(wrong(words, at, format!("option '{name}' lacks its value")));
            }
            let option = OPTIONS.iter().find(|option| option.names.contains(&name));
            let option = option.ok_or_else(|| {
                wrong(words, at, format!("unrecognised optional argument '{name}'"))
            })?;
            let value =
                option.value(name, text(at + 1)).map_err(|what| wrong(words, at + 1, what))?;
            (option.set)(&mut args, value);
        }
        Ok(args)
    }

    /// A line without options.
    fn usual(cache: Word, backing: Word) -> TableArgs {
        TableArgs {
            cache,
            backing,
            has_data_crc: false,
            writeback_order: WritebackOrder::Ordered,
            max_age_ms: MAX_AGE_MS,
            high_watermark: HIGH_WATERMARK,
            fills_reads: true,
            retention: RetentionKind::Hot,
            log_damage: LogDamage::Refuse,
            rebinds: false,
            accepts_loss: false,
        }
    }

    /// The optional words that differ from their defaults and that the kernel does not know.
    pub fn own_words(&self) -> String {
        let usual = TableArgs::usual(self.cache.clone(), self.backing.clone());
        let mut words = String::new();
        for option in OPTIONS.iter().filter(|option| option.is_printed) {
            let value = (option.get)(self);
            if value != (option.get)(&usual) {
                words += match option.values {
                    Values::Words(known) => {
                        format!(" {} {}", option.names[0], known[value as usize])
                    }
                    Values::UpTo(_) => format!(" {} {value}", option.names[0]),
                }
                .as_str();
            }
        }
        words
    }
}

/// An error about word `nth`, or about its absence.
fn wrong(words: &[Word], nth: usize, what: String) -> Error {
    Word::point_at(words, nth, Error::new(Kind::Invalid, format!("pcache: {what}")))
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
    use crate::table::Table;

    fn parse(line: &str) -> Result<TableArgs> {
        TableArgs::parse(&Word::list(line))
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
            let table = Table::parse(&format!("0 8 pcache {line}")).unwrap();
            let words = &table.lines[0].args;
            let place = TableArgs::parse(words).unwrap_err().place();
            let before = |word: &&Word| place.is_some_and(|place| word.column < place.column);
            assert_eq!(words.iter().filter(before).count(), word, "{line}");
        }
    }
}
