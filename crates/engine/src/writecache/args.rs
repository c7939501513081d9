//! writecache's words in a table line.
//!
//! ```text
//! writecache p|s <origin> <cache> <block size> <#words> [<option> ...] [rebind true|false]
//!     [atomic_blocks true|false] [lost_memory refuse|accept]
//! ```
//!
//! The kernel ignores the words after the counted ones. udm takes its own options there, and
//! refuses anything else: an option outside the count was meant to have an effect. Numbers that do
//! not fit are refused, where the kernel takes them modulo 2^32.

use std::fmt::Write as _;

use crate::error::{Error, Kind, Result};
use crate::table::Word;
use crate::units::SECTOR;

use super::layout::is_block_size;

/// The words of a line that the kernel knows.
pub const WORDS: &str = "p|s <origin> <cache device> <block size> <#words>
  [start_sector SECTOR]
  [high_watermark PERCENT] [low_watermark PERCENT]
  [writeback_jobs COUNT]
  [autocommit_blocks COUNT] [autocommit_time MILLISECONDS]
  [max_age MILLISECONDS]
  [pause_writeback MILLISECONDS]   with s
  [fua|nofua]                      with p
  [cleaner]
  [metadata_only]
and, not counted:
  [atomic_blocks true|false]
  [rebind true|false]
  [lost_memory refuse|accept]
  [lost_entries refuse|accept]";

/// The kind of the cache device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `p`: persistent memory, or any device that can be mapped like it.
    Pmem,
    /// `s`: a disk.
    Ssd,
}

impl Mode {
    /// As the table line has it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Pmem => "p",
            Mode::Ssd => "s",
        }
    }
}

/// The options that a table line gives; `None`: not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Where the cache begins on its device.
    pub start_sector: Option<u64>,
    /// Write-back begins when this many percent are used.
    pub high_watermark: Option<u32>,
    /// And ends at this many.
    pub low_watermark: Option<u32>,
    /// Blocks under write-back at most; 0: no limit.
    pub writeback_jobs: Option<u32>,
    /// Commit after this many new blocks.
    pub autocommit_blocks: Option<u32>,
    /// Commit this many milliseconds after the first of them.
    pub autocommit_time: Option<u32>,
    /// Write back data that is older than this many milliseconds.
    pub max_age: Option<u32>,
    /// Admit no new blocks.
    pub cleaner: bool,
    /// How write-back makes the origin durable, by FUA or by flushes. We flush either way.
    pub fua: Option<bool>,
    /// Admit metadata of file systems only.
    pub metadata_only: bool,
    /// Write-back rests for this many milliseconds after each write that bypassed the cache.
    pub pause_writeback: Option<u32>,
}

/// The parsed words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableArgs {
    /// The kind of the cache device.
    pub mode: Mode,
    /// The word that names the origin.
    pub origin: Word,
    /// The word that names the cache device.
    pub cache: Word,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// The options.
    pub options: Options,
    /// Attach although the label names another origin.
    pub rebinds: bool,
    /// Attach although acknowledged writes that were not flushed are lost with the memory of the
    /// last server.
    pub accepts_loss: bool,
    /// Read a cache that was cut short although a part of its entries is lost.
    pub accepts_lost_entries: bool,
    /// Whether a block is never half old and half new after a power failure. This needs a device
    /// that writes blocks atomically (by default as the device declares), or that blocks are never
    /// overwritten in place.
    pub atomic_blocks: Option<bool>,
}

/// The options of udm, which follow the counted words.
const OWN: [&str; 4] = ["atomic_blocks", "rebind", "lost_memory", "lost_entries"];
/// Most counted words.
const COUNTED_MAX: usize = 18;
/// The default `high_watermark` and `low_watermark`.
const WATERMARKS: (u32, u32) = (50, 45);

/// An error about word `nth`, or about its absence.
fn wrong(words: &[Word], nth: usize, what: &str, details: &str) -> Error {
    let error = Error::new(Kind::Invalid, format!("writecache: {what}: {details}"));
    Word::point_at(words, nth, error)
}

impl TableArgs {
    /// Reads the words after `writecache`, in the kernel's order.
    pub fn parse(words: &[Word]) -> Result<TableArgs> {
        let required = |nth: usize, what: &str| {
            let missing = || wrong(words, nth, "Bad arguments", what);
            words.get(nth).ok_or_else(missing)
        };
        let mode = match &required(0, "the mode is missing; it is p or s")?.text {
            word if word.eq_ignore_ascii_case("p") => Mode::Pmem,
            word if word.eq_ignore_ascii_case("s") => Mode::Ssd,
            word => {
                let details = format!("mode '{word}' is not p or s");
                return Err(wrong(words, 0, "Bad arguments", &details));
            }
        };
        let origin = required(1, "the origin is missing")?.clone();
        let cache = required(2, "the cache device is missing")?.clone();
        let word = &required(3, "the block size is missing")?.text;
        let block_bytes = number(word).filter(|&bytes| is_block_size(bytes)).ok_or_else(|| {
            let details = format!("'{word}' is not a power of two from 512 to 65536");
            wrong(words, 3, "Invalid block size", &details)
        })? as u32;
        let mut args = TableArgs {
            mode,
            origin,
            cache,
            block_bytes,
            options: Options::default(),
            rebinds: false,
            accepts_loss: false,
            accepts_lost_entries: false,
            atomic_blocks: None,
        };
        args.take_counted(words)?;
        args.check_watermarks(words)?;
        Ok(args)
    }

    fn take_counted(&mut self, words: &[Word]) -> Result<()> {
        let bad_count =
            |details: &str| Err(wrong(words, 4, "Invalid number of feature args", details));
        let Some(Word { text: word, .. }) = words.get(4) else {
            return bad_count("it is missing");
        };
        let count = number(word).filter(|&count| count <= COUNTED_MAX as u64);
        let Some(count) = count.map(|count| count as usize) else {
            return bad_count(&format!("'{word}' is not a number up to {COUNTED_MAX}"));
        };
        let rest: Vec<&str> = words[5..].iter().map(|word| word.text.as_str()).collect();
        if count > rest.len() {
            return bad_count(&format!("{count} announced, {} present", rest.len()));
        }
        let bad_option =
            |nth: usize, details: &str| wrong(words, nth, "Invalid optional argument", details);
        let (counted, ours) = rest.split_at(count);
        if let Some(nth) = counted.iter().position(|word| OWN.contains(word)) {
            let pair = &counted[nth..counted.len().min(nth + 2)];
            let details = format!(
                "'{0}' is an option of udm and follows the counted arguments: `{1}`",
                counted[nth],
                self.moved_behind(counted, pair, ours)
            );
            return Err(bad_option(5 + nth, &details));
        }
        let mut at = 0;
        while at < counted.len() {
            at += self
                .take_option(&counted[at..])
                .map_err(|(nth, details)| bad_option(5 + at + nth, &details))?;
        }
        for (nth, ours) in ours.chunks(2).enumerate() {
            self.take_own(ours, count).map_err(|what| bad_option(5 + count + 2 * nth, &what))?;
        }
        Ok(())
    }

    /// The words from the target's name on, with `pair` after the counted words.
    fn moved_behind(&self, counted: &[&str], pair: &[&str], ours: &[&str]) -> String {
        let nth = counted.iter().position(|word| Some(word) == pair.first()).unwrap_or(0);
        let others = [&counted[..nth], &counted[nth + pair.len()..]].concat();
        let mut line = vec!["writecache".to_owned(), self.mode.word().to_owned()];
        line.extend([self.origin.quoted(), self.cache.quoted()]);
        line.extend([self.block_bytes.to_string(), others.len().to_string()]);
        line.extend([&others, ours, pair].concat().iter().map(|word| Word::new(*word).quoted()));
        line.join(" ")
    }

    /// Takes an option and its value from after the counted words.
    fn take_own(&mut self, words: &[&str], count: usize) -> std::result::Result<(), String> {
        match words {
            ["rebind", "true"] => self.rebinds = true,
            ["rebind", "false"] => self.rebinds = false,
            ["lost_memory", "accept"] => self.accepts_loss = true,
            ["lost_memory", "refuse"] => self.accepts_loss = false,
            ["lost_entries", "accept"] => self.accepts_lost_entries = true,
            ["lost_entries", "refuse"] => self.accepts_lost_entries = false,
            ["atomic_blocks", "true"] => self.atomic_blocks = Some(true),
            ["atomic_blocks", "false"] if self.mode == Mode::Ssd => {
                self.atomic_blocks = Some(false);
            }
            ["atomic_blocks", "false"] => {
                return Err("mode p never overwrites a block in place".into());
            }
            _ => {
                let what = words.join(" ");
                return Err(format!("'{what}' follows the {count} counted arguments"));
            }
        }
        Ok(())
    }

    fn check_watermarks(&self, words: &[Word]) -> Result<()> {
        let (high, low) = self.watermarks();
        if high >= low {
            return Ok(());
        }
        let what = "High watermark must be greater than or equal to low watermark";
        Err(wrong(words, 4, what, &format!("{high} and {low}")))
    }

    /// `high_watermark` and `low_watermark`, in percent.
    pub fn watermarks(&self) -> (u32, u32) {
        let options = &self.options;
        let (high, low) = WATERMARKS;
        (options.high_watermark.unwrap_or(high), options.low_watermark.unwrap_or(low))
    }

    /// Takes the option at the start of `words`, and returns the number of its words.
    fn take_option(&mut self, words: &[&str]) -> std::result::Result<usize, (usize, String)> {
        let name = words[0].to_ascii_lowercase();
        let is_of_mode = |mode: Mode| {
            let is_so = self.mode == mode;
            let details = format!("{name} is for mode {} only", mode.word());
            if is_so { Ok(()) } else { Err((0, details)) }
        };
        match name.as_str() {
            "fua" | "nofua" => is_of_mode(Mode::Pmem)?,
            "pause_writeback" => is_of_mode(Mode::Ssd)?,
            _ => {}
        }
        let options = &mut self.options;
        match name.as_str() {
            "cleaner" => options.cleaner = true,
            "metadata_only" => options.metadata_only = true,
            "fua" => options.fua = Some(true),
            "nofua" => options.fua = Some(false),
            _ => {
                let field = match name.as_str() {
                    "start_sector" => {
                        let max = u64::MAX / SECTOR;
                        options.start_sector = Some(value(&name, words, max)?);
                        return Ok(2);
                    }
                    "high_watermark" => (&mut options.high_watermark, 100),
                    "low_watermark" => (&mut options.low_watermark, 100),
                    "writeback_jobs" => (&mut options.writeback_jobs, u32::MAX),
                    "autocommit_blocks" => (&mut options.autocommit_blocks, u32::MAX),
                    "autocommit_time" => (&mut options.autocommit_time, 3_600_000),
                    "max_age" => (&mut options.max_age, 86_400_000),
                    "pause_writeback" => (&mut options.pause_writeback, 60_000),
                    _ => return Err((0, format!("'{}' is unknown", words[0]))),
                };
                *field.0 = Some(value(&name, words, u64::from(field.1))? as u32);
                return Ok(2);
            }
        }
        Ok(1)
    }

    /// The table line's words after the devices: only explicitly given ones, in the kernel's order.
    pub fn words(&self) -> String {
        let options = &self.options;
        let mut words = String::new();
        let mut count = 0;
        let mut put = |name: &str, value: Option<u64>| {
            if let Some(value) = value {
                let _ = write!(words, " {name} {value}");
                count += 2;
            }
        };
        put("start_sector", options.start_sector);
        put("high_watermark", options.high_watermark.map(u64::from));
        put("low_watermark", options.low_watermark.map(u64::from));
        put("writeback_jobs", options.writeback_jobs.map(u64::from));
        put("autocommit_blocks", options.autocommit_blocks.map(u64::from));
        put("autocommit_time", options.autocommit_time.map(u64::from));
        put("max_age", options.max_age.map(u64::from));
        let flags = [
            ("cleaner", options.cleaner),
            ("fua", options.fua == Some(true)),
            ("nofua", options.fua == Some(false)),
            ("metadata_only", options.metadata_only),
        ];
        for (name, is_given) in flags {
            if is_given {
                let _ = write!(words, " {name}");
                count += 1;
            }
        }
        if let Some(value) = options.pause_writeback {
            let _ = write!(words, " pause_writeback {value}");
            count += 2;
        }
        if let Some(is_atomic) = self.atomic_blocks {
            let _ = write!(words, " atomic_blocks {is_atomic}");
        }
        format!("{} {count}{words}", self.block_bytes)
    }
}

/// The number after an option's name.
fn value(name: &str, words: &[&str], max: u64) -> std::result::Result<u64, (usize, String)> {
    let Some(word) = words.get(1) else { return Err((0, format!("{name} lacks its value"))) };
    number(word)
        .filter(|&value| value <= max)
        .ok_or_else(|| (1, format!("{name} '{word}' is not a number up to {max}")))
}

/// A plain decimal number.
fn number(word: &str) -> Option<u64> {
    let is_plain = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;

    fn parse(line: &str) -> Result<TableArgs> {
        TableArgs::parse(&Word::list(line))
    }

    #[test]
    fn every_wrong_line_says_what_the_kernel_says_and_where() {
        let high = "High watermark must be greater than or equal to low watermark";
        let (count, option) = ("Invalid number of feature args", "Invalid optional argument");
        for (line, word, words) in [
            ("", 0, "Bad arguments"),
            ("x O C 4096 0", 0, "Bad arguments"),
            ("p", 1, "Bad arguments"),
            ("p O", 2, "Bad arguments"),
            ("p O C", 3, "Bad arguments"),
            ("p O C x 0", 3, "Invalid block size"),
            ("p O C 256 0", 3, "Invalid block size"),
            ("p O C 131072 0", 3, "Invalid block size"),
            ("p O C 4097 0", 3, "Invalid block size"),
            ("p O C 4294971392 0", 3, "Invalid block size"),
            ("p O C 4096", 4, count),
            ("p O C 4096 x", 4, count),
            ("p O C 4096 19", 4, count),
            ("p O C 4096 1", 4, count),
            ("p O C 4096 -1", 4, count),
            ("p O C 4096 1 nonsense", 5, option),
            ("p O C 4096 1 start_sector", 5, option),
            ("p O C 4096 2 start_sector x", 6, option),
            ("p O C 4096 2 high_watermark 101", 6, option),
            ("p O C 4096 2 low_watermark -1", 6, option),
            ("p O C 4096 2 writeback_jobs 4294967297", 6, option),
            ("p O C 4096 2 autocommit_time 3600001", 6, option),
            ("p O C 4096 2 max_age 86400001", 6, option),
            ("s O C 4096 2 pause_writeback 60001", 6, option),
            ("p O C 4096 2 pause_writeback 1", 5, option),
            ("s O C 4096 1 fua", 5, option),
            ("s O C 4096 1 nofua", 5, option),
            ("p O C 4096 3 cleaner max_age x", 7, option),
            ("p O C 4096 0 junk trailing", 5, option),
            ("p O C 4096 3 cleaner rebind true", 6, option),
            ("p O C 4096 2 high_watermark 40", 4, high),
            ("p O C 4096 2 low_watermark 51", 4, high),
        ] {
            let table = Table::parse(&format!("0 8 writecache {line}")).unwrap();
            let args = &table.lines[0].args;
            let place = TableArgs::parse(args).expect_err(line).place();
            let before = |word: &&Word| place.is_some_and(|place| word.column < place.column);
            assert_eq!(args.iter().filter(before).count(), word, "{line}");
            let text = parse(line).expect_err(line).to_string();
            assert!(text.starts_with(&format!("writecache: {words}: ")), "{line}: {text}");
        }
    }

    #[test]
    fn own_options_among_the_counted_words_are_shown_behind_them() {
        for (line, right) in [
            ("s O C 4096 2 lost_memory accept", "s O C 4096 0 lost_memory accept"),
            (
                "s O C 4096 5 max_age 7 rebind true cleaner",
                "s O C 4096 3 max_age 7 cleaner rebind true",
            ),
            (
                "s O C 4096 2 rebind true atomic_blocks true",
                "s O C 4096 0 atomic_blocks true rebind true",
            ),
        ] {
            let text = parse(line).expect_err(line).to_string();
            assert!(text.ends_with(&format!("counted arguments: `writecache {right}`")), "{text}");
            assert!(parse(right).is_ok(), "{right}");
        }
        // A name without its value.
        assert!(parse("s O C 4096 1 rebind").is_err());
    }

    #[test]
    fn the_table_line_has_what_was_given_in_the_kernels_order() {
        assert_eq!(parse("P O C 4096 0").unwrap().words(), "4096 0");
        let all = "p O C 512 18 metadata_only nofua FUA Cleaner max_age 7 autocommit_time 6 \
                   autocommit_blocks 5 writeback_jobs 4 low_watermark 3 high_watermark 20 \
                   start_sector 8";
        assert_eq!(
            parse(all).unwrap().words(),
            "512 17 start_sector 8 high_watermark 20 low_watermark 3 writeback_jobs 4 \
             autocommit_blocks 5 autocommit_time 6 max_age 7 cleaner fua metadata_only"
        );
        let line = "S O C 1024 6 pause_writeback 0 pause_writeback 9 writeback_jobs 0";
        let args = parse(line).unwrap();
        assert_eq!(args.words(), "1024 4 writeback_jobs 0 pause_writeback 9");
        assert_eq!(args.mode, Mode::Ssd);
        // A printed line parses to the same arguments.
        let again = format!("s O C {}", args.words());
        assert_eq!(parse(&again).unwrap(), args);
        assert!(parse("s O C 4096 1 cleaner rebind true").unwrap().rebinds);
        let args = parse("s O C 4096 1 cleaner atomic_blocks true rebind true").unwrap();
        assert_eq!((args.rebinds, args.atomic_blocks), (true, Some(true)));
        assert_eq!(args.words(), "4096 1 cleaner atomic_blocks true");
        assert!(parse("p O C 4096 0 atomic_blocks false").is_err());
        assert!(parse("s O C 4096 0 atomic_blocks").is_err());
        assert_eq!(
            parse("s O C 4096 4 high_watermark 40 low_watermark 40").unwrap().watermarks(),
            (40, 40)
        );
    }
}
