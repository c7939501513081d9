//! One step instead of many: from an origin and a fast device to the line of a table.
//!
//! A type of cache says for which fast devices it is chosen, and makes the words of its line out
//! of what is wanted and what the devices are. A cache that is there already is taken as it is, so
//! the same wish makes the same table, however often, and after a crash at whatever moment.

use super::{TARGETS, TargetType, caches};
use crate::contents::Shape;
use crate::error::{Error, Kind, Result};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::table::Word;
use crate::units::{SECTOR, human_bytes};

/// What a fast device is, as far as that chooses a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fast {
    /// Memory that is stored to: a DAX device, a file on a DAX file system, or a file in memory.
    Memory,
    /// Anything that takes reads and writes of blocks.
    Disk,
}

/// How clients' writes meet the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// They are done when the cache has them.
    Writeback,
    /// They are done when the origin has them, too.
    Writethrough,
}

/// What is wanted of a cache.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The slow device, as a table names it.
    pub origin: &'a str,
    /// Its size.
    pub origin_bytes: u64,
    /// The fast device, as a table names it.
    pub fast: &'a str,
    /// Its size.
    pub fast_bytes: u64,
    /// What it is.
    pub nature: Fast,
    /// The largest logical block of the two.
    pub device_block_bytes: u64,
    /// The mode, if one was given.
    pub mode: Option<CacheMode>,
    /// The policy of a `cache`, if one was given.
    pub policy: Option<&'a str>,
    /// The block size in bytes, if one was given.
    pub block_bytes: Option<u64>,
    /// What the fast device's cache is like, if it holds one of this type.
    pub found: Option<Shape>,
}

/// How a type of cache is set up in one step.
#[derive(Debug)]
pub struct Setup {
    /// It is chosen for such a device and such a mode, where nobody names a target.
    pub is_for: Option<(Fast, CacheMode)>,
    /// The words of the line after the target's name.
    pub(super) words: fn(&Wanted<'_>) -> Result<String>,
}

/// The type whose cache `pmem` begins with.
pub fn held(pmem: &Arc<dyn Pmem>) -> Option<&'static TargetType> {
    // In the order of `inspect`.
    let mut all = caches().rev();
    all.find(|(_, cache)| (cache.is_at)(pmem, 0)).map(|(kind, _)| kind)
}

/// The type that is chosen for such a device. Where no type for it has the mode, it is the type
/// that the device has without one, which says what it lacks.
pub fn chosen_for(nature: Fast, mode: Option<CacheMode>) -> Option<&'static TargetType> {
    let find = |mode| {
        TARGETS.into_iter().find(|kind| {
            let cache = kind.cache.as_ref();
            cache.is_some_and(|cache| cache.setup.is_for == Some((nature, mode)))
        })
    };
    mode.and_then(find).or_else(|| find(CacheMode::Writeback))
}

impl TargetType {
    /// What the cache of this type on `pmem` is like; none if that cannot be read.
    pub fn shape_of(&self, pmem: &Arc<dyn Pmem>) -> Option<Shape> {
        (self.cache.as_ref()?.shape_of)(pmem)
    }

    /// The line of a table that means what is wanted: as long as the origin.
    pub fn line(&self, wanted: &Wanted<'_>) -> Result<String> {
        let Some(cache) = &self.cache else {
            return Err(Error::new(Kind::Invalid, format!("{} is no cache", self.name)));
        };
        let sectors = wanted.origin_bytes / SECTOR;
        let words = (cache.setup.words)(wanted)
            .map_err(|error| Error::new(error.kind(), format!("{}: {error}", self.name)))?;
        Ok(format!("0 {sectors} {} {words}", self.name))
    }
}

impl Wanted<'_> {
    /// The two words as a line has them: origin and fast device.
    pub(super) fn quoted(&self) -> (String, String) {
        (Word::new(self.origin).quoted(), Word::new(self.fast).quoted())
    }

    /// An error unless writes are to be written back, by the one policy that there is.
    pub(super) fn only_writes_back(&self) -> Result<()> {
        if self.mode == Some(CacheMode::Writethrough) {
            let other = match self.found {
                None => ", or give --target cache",
                Some(_) => "",
            };
            return invalid(&format!(
                "it has no mode writethrough: a write is done when the cache has it; leave --mode \
                 out{other}"
            ));
        }
        if self.policy.is_some() {
            return invalid("it has one policy: leave --policy out");
        }
        Ok(())
    }

    /// The size of blocks: what was given, what is there, or else up to `usual_bytes`, as large
    /// as the origin is a multiple of.
    pub(super) fn choose_block(&self, found: Option<u64>, usual_bytes: u64) -> Result<u64> {
        if let (Some(found), Some(given)) = (found, self.block_bytes)
            && found != given
        {
            return invalid(&format!(
                "{} holds a cache with blocks of {}, not {}: leave --block-size out",
                self.fast,
                human_bytes(found),
                human_bytes(given)
            ));
        }
        let whole = 1 << self.origin_bytes.trailing_zeros().min(63);
        let auto = usual_bytes.max(self.device_block_bytes).min(whole);
        let block = found.or(self.block_bytes).unwrap_or(auto);
        if !self.origin_bytes.is_multiple_of(block) {
            return invalid(&format!(
                "{} has {} bytes, which is no multiple of blocks of {block}",
                self.origin, self.origin_bytes
            ));
        }
        Ok(block)
    }
}

/// An error in what is wanted.
pub(super) fn invalid<T>(what: &str) -> Result<T> {
    Err(Error::new(Kind::Invalid, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;
    use crate::units::{GIB, MIB};

    fn wanted() -> Wanted<'static> {
        Wanted {
            origin: "/data/slow disk",
            origin_bytes: GIB,
            fast: "/dev/fast?offset=8",
            fast_bytes: 64 * MIB,
            nature: Fast::Disk,
            device_block_bytes: 512,
            mode: None,
            policy: None,
            block_bytes: None,
            found: None,
        }
    }

    fn line(target: &str, wanted: &Wanted<'_>) -> std::result::Result<String, String> {
        let kind = super::super::find(target).unwrap();
        let line = kind.line(wanted).map_err(|error| error.to_string())?;
        crate::world::check(&Table::parse(&line).unwrap()).unwrap();
        Ok(line)
    }

    #[test]
    fn each_sort_of_device_has_a_cache() {
        let (back, through) = (Some(CacheMode::Writeback), Some(CacheMode::Writethrough));
        for (nature, mode, name) in [
            (Fast::Memory, None, "pcache"),
            (Fast::Memory, back, "pcache"),
            (Fast::Memory, through, "pcache"),
            (Fast::Disk, None, "writecache"),
            (Fast::Disk, back, "writecache"),
            (Fast::Disk, through, "cache"),
        ] {
            assert_eq!(chosen_for(nature, mode).unwrap().name, name, "{nature:?} {mode:?}");
        }
    }

    #[test]
    fn a_wish_is_a_line() {
        assert_eq!(
            line("writecache", &wanted()).unwrap(),
            r"0 2097152 writecache s /data/slow\ disk /dev/fast?offset=8 4096 0"
        );
        assert_eq!(
            line("pcache", &wanted()).unwrap(),
            r"0 2097152 pcache /dev/fast?offset=8 /data/slow\ disk 4 cache_mode writeback data_crc "
                .to_owned() + "false"
        );
        let memory = Wanted { nature: Fast::Memory, ..wanted() };
        assert!(line("writecache", &memory).unwrap().contains(" p "));
    }

    #[test]
    fn what_is_there_is_taken_as_it_is() {
        let shape =
            |words: [&str; 3]| Some(Shape { sectors: 1, words: words.map(str::to_owned).into() });
        let found = Wanted { found: shape(["2", "data_crc", "true"]), ..wanted() };
        assert!(line("pcache", &found).unwrap().ends_with("data_crc true"));
        let found = Wanted { found: shape(["s", "1024", "0"]), ..wanted() };
        assert!(line("writecache", &found).unwrap().ends_with(" 1024 0"));
        let other = Wanted { block_bytes: Some(4096), ..found };
        assert!(line("writecache", &other).unwrap_err().contains("blocks of 1.0 KiB, not 4.0 KiB"));
    }

    #[test]
    fn blocks_fit_the_origin_and_the_devices() {
        let blocks = |wanted: &Wanted<'_>| {
            let line = line("writecache", wanted)?;
            Ok::<_, String>(line.split(' ').rev().nth(1).unwrap().parse::<u64>().unwrap())
        };
        assert_eq!(blocks(&Wanted { origin_bytes: GIB + 512, ..wanted() }), Ok(512));
        assert_eq!(blocks(&Wanted { origin_bytes: GIB + 2048, ..wanted() }), Ok(2048));
        assert_eq!(blocks(&Wanted { device_block_bytes: 8192, ..wanted() }), Ok(8192));
        assert_eq!(blocks(&Wanted { block_bytes: Some(65536), ..wanted() }), Ok(65536));
        let odd = Wanted { origin_bytes: GIB + 512, block_bytes: Some(4096), ..wanted() };
        assert!(blocks(&odd).unwrap_err().contains("no multiple of blocks of 4096"));
        for bytes in [0, 1, 1000, 131_072, u64::MAX] {
            let wrong = Wanted { block_bytes: Some(bytes), ..wanted() };
            assert!(blocks(&wrong).unwrap_err().contains("power of two"), "{bytes}");
        }
    }

    #[test]
    fn what_a_target_does_not_have_is_an_error_that_says_so() {
        let through = Wanted { mode: Some(CacheMode::Writethrough), ..wanted() };
        let words = ["s", "1024", "0"].map(str::to_owned).into();
        let held = Wanted { found: Some(Shape { sectors: 1, words }), ..through.clone() };
        for target in ["pcache", "writecache"] {
            let error = line(target, &through).unwrap_err();
            assert!(error.starts_with(&format!("{target}: it has no mode")), "{error}");
            assert!(error.ends_with("or give --target cache"), "{error}");
            // That would be refused for the cache that is there.
            let error = line(target, &held).unwrap_err();
            assert!(error.ends_with("leave --mode out"), "{error}");
        }
        let back = Wanted { mode: Some(CacheMode::Writeback), ..wanted() };
        assert_eq!(line("pcache", &back), line("pcache", &wanted()));
        let block = Wanted { block_bytes: Some(4096), ..wanted() };
        assert!(line("pcache", &block).unwrap_err().contains("no blocks of one size"));
        assert!(super::super::find("linear").unwrap().line(&wanted()).is_err());
    }
}
