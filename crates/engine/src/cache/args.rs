//! cache's words in a table line.
//!
//! ```text
//! cache <metadata> <cache> <origin> <block size> <#features> [<feature> ...]
//!     <policy> <#words> [<key> <value> ...] [rebind true|false]
//! ```
//!
//! The kernel ignores words after the last policy argument. udm refuses those that it does not
//! know: they were meant to have an effect.

use crate::error::{Error, Kind, Result};
use crate::table::Word;

use super::metadata::superblock::check_data_sectors;

/// The words of a line that the kernel knows.
pub const WORDS: &str = "<metadata device> <cache device> <origin> <block size in sectors>
  <#features> [writeback|writethrough|passthrough] [metadata2] [no_discard_passdown]
  smq|mq|cleaner|probation|default <#words> [migration_threshold SECTORS] [<key> <value>...]
and, not counted:
  [rebind true|false]";

/// Most features.
const FEATURES_MAX: u64 = 3;
/// Most words of a policy.
const POLICY_WORDS_MAX: u64 = 1024;
/// Settings of the policy mq, which the kernel accepts and ignores since mq became smq.
pub(super) const MQ_KEYS: [&str; 5] = [
    "random_threshold",
    "sequential_threshold",
    "discard_promote_adjustment",
    "read_promote_adjustment",
    "write_promote_adjustment",
];
/// The key of the core's own setting.
const THRESHOLD: &str = "migration_threshold";
/// Its value where none is given, in sectors.
const THRESHOLD_SECTORS: u64 = 2048;

/// What becomes of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Dirty data stays on the cache device.
    #[default]
    Writeback,
    /// A write is done when both devices have it.
    Writethrough,
    /// All I/O goes to the origin, and a write drops its block from the cache.
    Passthrough,
}

impl Mode {
    /// As the table line has it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Writeback => "writeback",
            Mode::Writethrough => "writethrough",
            Mode::Passthrough => "passthrough",
        }
    }
}

/// The features that a line gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// What becomes of writes.
    pub mode: Mode,
    /// A blank metadata device is formatted as version 2.
    pub has_metadata2: bool,
    /// Discards are not sent to the origin as such.
    pub has_no_passdown: bool,
}

/// Which policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyName {
    /// `smq`, or `default`.
    Smq,
    /// `mq`: the same, with settings that are ignored.
    Mq,
    /// `probation`, our own: blocks are admitted in part, and kept if they are used again.
    Probation,
    /// `cleaner`: all dirty blocks are written back, and no new ones are admitted.
    Cleaner,
}

impl PolicyName {
    /// As status lines and the medium have it.
    pub fn word(self) -> &'static str {
        match self {
            PolicyName::Smq => "smq",
            PolicyName::Mq => "mq",
            PolicyName::Probation => "probation",
            PolicyName::Cleaner => "cleaner",
        }
    }
}

/// The parsed words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableArgs {
    /// The word that names the metadata device.
    pub metadata: Word,
    /// The word that names the cache device.
    pub cache: Word,
    /// The word that names the origin.
    pub origin: Word,
    /// Sectors of a block.
    pub block_sectors: u32,
    /// The features.
    pub features: Features,
    /// The policy.
    pub policy: PolicyName,
    /// How much may be on its way between the devices, in sectors.
    pub migration_threshold: u64,
    /// The metadata may belong to another cache device or origin.
    pub rebinds: bool,
    /// The words from the block size on, as they were given, without those that hold for one attach
    /// only.
    rest: Vec<String>,
}

/// An error about word `nth`, or about its absence.
fn wrong(words: &[Word], nth: usize, what: &str, details: &str) -> Error {
    let error = Error::new(Kind::Invalid, format!("cache: {what}: {details}"));
    Word::point_at(words, nth, error)
}

impl TableArgs {
    /// Reads the words after `cache`, in the kernel's order.
    pub fn parse(words: &[Word]) -> Result<TableArgs> {
        let required = |nth: usize, what: &str| {
            let details = format!("{what} is missing");
            words.get(nth).ok_or_else(|| wrong(words, nth, "Insufficient args", &details))
        };
        let metadata = required(0, "the metadata device")?.clone();
        let cache = required(1, "the cache device")?.clone();
        let origin = required(2, "the origin")?.clone();
        let block_sectors = block_sectors(&required(3, "the block size")?.text)
            .map_err(|details| wrong(words, 3, "Invalid data block size", &details))?;
        let what = "Invalid number of cache feature arguments";
        let count = counted(words, 4, FEATURES_MAX, what)?;
        let features = features(words, 5, count)?;
        let at = 5 + count;
        let policy = match required(at, "the policy")?.text.as_str() {
            "default" | "smq" => PolicyName::Smq,
            "mq" => PolicyName::Mq,
            "probation" => PolicyName::Probation,
            "cleaner" => PolicyName::Cleaner,
            other => {
                let details = format!("'{other}' is not default, smq, mq, probation or cleaner");
                return Err(wrong(words, at, "Error creating cache's policy", &details));
            }
        };
        let what = "Invalid number of policy arguments";
        let count = counted(words, at + 1, POLICY_WORDS_MAX, what)?;
        let end = at + 2 + count;
        let after: Vec<&str> = words.iter().skip(end).map(|word| word.text.as_str()).collect();
        let rebinds = match after.as_slice() {
            [] | ["rebind", "false"] => false,
            ["rebind", "true"] => true,
            [first, ..] => {
                let details = format!(
                    "'{first}' follows the policy's {count} arguments, where only `rebind \
                     true|false` is possible"
                );
                return Err(wrong(words, end, "Too many args", &details));
            }
        };
        let mut args = TableArgs {
            metadata,
            cache,
            origin,
            block_sectors,
            features,
            policy,
            migration_threshold: THRESHOLD_SECTORS,
            rebinds,
            rest: words[3..end].iter().map(Word::quoted).collect(),
        };
        args.take_settings(&words[..end], at + 2)?;
        Ok(args)
    }

    fn take_settings(&mut self, words: &[Word], from: usize) -> Result<()> {
        let what = "Error setting cache policy's config values";
        for (nth, pair) in words[from..].chunks(2).enumerate() {
            let at = from + 2 * nth;
            if pair[0].text == "rebind" {
                let details = self.with_rebind_behind(&words[from..], 2 * nth, from - 4);
                return Err(wrong(words, at, what, &details));
            }
            let [key, value] = pair else {
                return Err(wrong(words, at, what, "a key without a value"));
            };
            let set = setting(self.policy, &key.text, &value.text);
            if let Some(threshold) = set.map_err(|details| wrong(words, at, what, &details))? {
                self.migration_threshold = threshold;
            }
        }
        Ok(())
    }

    /// An explanation for `rebind`, word `nth` of the policy's `words`, with the right line, whose
    /// `policy`th word from the block size on is their count.
    fn with_rebind_behind(&self, words: &[Word], nth: usize, policy: usize) -> String {
        let mut others: Vec<String> = words.iter().map(Word::quoted).collect();
        let pair: Vec<String> = others.drain(nth..words.len().min(nth + 2)).collect();
        let devices = [&self.metadata, &self.cache, &self.origin].map(Word::quoted).join(" ");
        let before = self.rest[..policy].join(" ");
        let line = [vec![others.len().to_string()], others, pair].concat().join(" ");
        format!(
            "'rebind' is an option of udm and follows the counted arguments: `cache {devices} \
             {before} {line}`"
        )
    }

    /// The words from the block size on, as they were given, without those that hold for one attach
    /// only.
    pub fn words(&self) -> String {
        self.rest.join(" ")
    }
}

/// Takes a setting, of a table or of a message. `Some`: the new migration threshold.
pub(super) fn setting(
    policy: PolicyName,
    key: &str,
    value: &str,
) -> std::result::Result<Option<u64>, String> {
    let name = key.to_ascii_lowercase();
    let is_mq = policy == PolicyName::Mq && MQ_KEYS.contains(&name.as_str());
    if name != THRESHOLD && !is_mq {
        return Err(format!("'{key}' is unknown to the policy {}", policy.word()));
    }
    let Some(number) = number(value).filter(|number| u32::try_from(*number).is_ok()) else {
        return Err(format!("{name} '{value}' is not a number up to {}", u32::MAX));
    };
    Ok((name == THRESHOLD).then_some(number))
}

fn block_sectors(word: &str) -> std::result::Result<u32, String> {
    let sectors = number(word).and_then(|sectors| u32::try_from(sectors).ok());
    let sectors = sectors.ok_or_else(|| format!("'{word}' is not a number of sectors"))?;
    check_data_sectors(sectors).map_err(|error| error.to_string())?;
    Ok(sectors)
}

/// The count at word `at`, of words after it which must be there.
fn counted(words: &[Word], at: usize, max: u64, what: &str) -> Result<usize> {
    let Some(word) = words.get(at) else {
        return Err(wrong(words, at, what, "it is missing"));
    };
    let Some(count) = number(&word.text).filter(|count| *count <= max) else {
        let details = format!("'{}' is not a number up to {max}", word.text);
        return Err(wrong(words, at, what, &details));
    };
    let left = words.len() - at - 1;
    if count as usize > left {
        let details = format!("{count} announced, {left} present");
        return Err(wrong(words, at, what, &details));
    }
    Ok(count as usize)
}

fn features(words: &[Word], from: usize, count: usize) -> Result<Features> {
    let mut features = Features::default();
    let mut mode = None;
    for (nth, word) in words.iter().enumerate().skip(from).take(count) {
        let given = match word.text.to_ascii_lowercase().as_str() {
            "writeback" => Mode::Writeback,
            "writethrough" => Mode::Writethrough,
            "passthrough" => Mode::Passthrough,
            "metadata2" => {
                features.has_metadata2 = true;
                continue;
            }
            "no_discard_passdown" => {
                features.has_no_passdown = true;
                continue;
            }
            _ => {
                let details = format!("'{}' is unknown", word.text);
                return Err(wrong(words, nth, "Unrecognised cache feature requested", &details));
            }
        };
        if mode.replace(given).is_some() {
            let details = format!("'{}' is a second mode", word.text);
            return Err(wrong(words, nth, "Duplicate cache io_mode features requested", &details));
        }
    }
    features.mode = mode.unwrap_or_default();
    Ok(features)
}

/// A plain decimal number.
pub(super) fn number(word: &str) -> Option<u64> {
    let is_plain = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<TableArgs> {
        TableArgs::parse(&Word::list(line))
    }

    #[test]
    fn every_wrong_line_says_what_the_kernel_says() {
        let (features, policy) =
            ("Invalid number of cache feature arguments", "Invalid number of policy arguments");
        let config = "Error setting cache policy's config values";
        for (line, words) in [
            ("", "Insufficient args"),
            ("M C", "Insufficient args"),
            ("M C O", "Insufficient args"),
            ("M C O x 0 smq 0", "Invalid data block size"),
            ("M C O 32 0 smq 0", "Invalid data block size"),
            ("M C O 96 0 smq 0", "Invalid data block size"),
            ("M C O 2097216 0 smq 0", "Invalid data block size"),
            ("M C O 64", features),
            ("M C O 64 4 a b c d smq 0", features),
            ("M C O 64 2 writeback", features),
            ("M C O 64 1 fast smq 0", "Unrecognised cache feature requested"),
            ("M C O 64 2 writeback writeback smq 0", "Duplicate cache io_mode features requested"),
            ("M C O 64 0", "Insufficient args"),
            ("M C O 64 0 SMQ 0", "Error creating cache's policy"),
            ("M C O 64 0 smq", policy),
            ("M C O 64 0 smq 1025", policy),
            ("M C O 64 0 smq 2 a", policy),
            ("M C O 64 0 smq 1 migration_threshold", config),
            ("M C O 64 0 smq 2 sequential_threshold 1", config),
            ("M C O 64 0 mq 2 sequential_threshold x", config),
            ("M C O 64 0 smq 0 more", "Too many args"),
        ] {
            let text = parse(line).expect_err(line).to_string();
            assert!(text.starts_with(&format!("cache: {words}: ")), "{line}: {text}");
        }
    }

    #[test]
    fn rebind_among_the_counted_words_is_shown_behind_them() {
        for (line, right) in [
            ("M C O 64 0 smq 2 rebind true", "M C O 64 0 smq 0 rebind true"),
            (
                "M C O 64 1 metadata2 mq 4 rebind true random_threshold 1",
                "M C O 64 1 metadata2 mq 2 random_threshold 1 rebind true",
            ),
        ] {
            let text = parse(line).expect_err(line).to_string();
            assert!(text.ends_with(&format!("counted arguments: `cache {right}`")), "{text}");
            assert!(parse(right).is_ok(), "{right}");
        }
        assert!(parse("M C O 64 0 smq 1 rebind").is_err());
    }

    #[test]
    fn the_table_line_has_what_was_given() {
        let line = "M C O 192 3 METADATA2 writethrough no_discard_passdown default 2 \
                    Migration_Threshold 100";
        let args = parse(line).unwrap();
        let mode = Mode::Writethrough;
        let features = Features { mode, has_metadata2: true, has_no_passdown: true };
        assert_eq!((args.block_sectors, args.features), (192, features));
        assert_eq!((args.policy, args.migration_threshold), (PolicyName::Smq, 100));
        assert_eq!(format!("M C O {}", args.words()), line);
        let args = parse("M C O 64 0 mq 4 random_threshold 1 sequential_threshold 2").unwrap();
        assert_eq!((args.policy, args.migration_threshold), (PolicyName::Mq, 2048));
    }
}
