//! Set-up in one step: from an origin and a fast device to the line of a table.
//!
//! Each type of cache declares the fast devices that it is chosen for, and makes the arguments of
//! its line from the request and the devices. An existing cache is kept, so the same request always
//! makes the same table, also after a crash at any moment.

use super::{TARGETS, TargetType, caches};
use crate::common::contents::Shape;
use crate::error::{Error, Kind, Result};
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::table::Word;
use crate::units::{SECTOR, human_bytes};

/// The kind of a fast device, as far as it decides the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fast {
    /// Memory that is accessed by stores: a DAX device, a file on a DAX file system, or a file in
    /// memory.
    Memory,
    /// Anything that takes reads and writes of blocks.
    Disk,
}

/// How clients' writes meet the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMode {
    /// They are done when the cache has them.
    Writeback,
    /// Writes are acknowledged when the origin also has them.
    Writethrough,
}

/// A request for a cache.
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
    /// The kind of the fast device.
    pub nature: Fast,
    /// The slow device's logical block.
    pub origin_block_bytes: u64,
    /// The fast device's.
    pub fast_block_bytes: u64,
    /// The mode, if one was given.
    pub mode: Option<CacheMode>,
    /// The policy of a `cache`, if one was given.
    pub policy: Option<&'a str>,
    /// The block size in bytes, if one was given.
    pub block_bytes: Option<u64>,
    /// The shape of the fast device's existing cache, if it holds one of this type.
    pub found: Option<Shape>,
}

/// How a type of cache is set up in one step.
#[derive(Debug)]
pub struct Setup {
    /// The device and the mode for which this type is chosen if no target is given.
    pub is_for: Option<(Fast, CacheMode)>,
    /// It writes whole blocks of the fast device.
    pub(super) writes_blocks: bool,
    /// The words of the line after the target's name.
    pub(super) words: fn(&Wanted<'_>) -> Result<String>,
}

/// The type whose cache `pmem` begins with.
pub fn held(pmem: &Arc<dyn Pmem>) -> Option<&'static TargetType> {
    // In the order of `inspect`.
    let mut all = caches().rev();
    all.find(|(_, cache)| (cache.is_at)(pmem, 0)).map(|(kind, _)| kind)
}

/// The type that is chosen for such a device. If no type for the device has the mode, this is the
/// device's default type, whose error names the missing mode.
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
    /// The shape of the cache of this type on `pmem`; `None` if it cannot be read.
    pub fn shape_of(&self, pmem: &Arc<dyn Pmem>) -> Option<Shape> {
        (self.cache.as_ref()?.shape_of)(pmem)
    }

    /// The block size that the devices impose on clients: a line has as many whole blocks as the
    /// origin. A cache on memory takes requests of any size.
    fn unit_of(&self, wanted: &Wanted<'_>) -> u64 {
        let writes_blocks = self.cache.as_ref().is_some_and(|cache| cache.setup.writes_blocks);
        let fast = if writes_blocks { wanted.fast_block_bytes } else { SECTOR };
        wanted.origin_block_bytes.max(fast).max(SECTOR)
    }

    /// The line of a table for the request, as long as the origin.
    pub fn line(&self, wanted: &Wanted<'_>) -> Result<String> {
        let Some(cache) = &self.cache else {
            return Err(Error::new(Kind::Invalid, format!("{} is not a cache", self.name)));
        };
        let whole = wanted.origin_bytes - wanted.origin_bytes % self.unit_of(wanted);
        if whole == 0 {
            let message = format!("{} is smaller than a block of its cache", wanted.origin);
            return Err(Error::new(Kind::NoSpace, message));
        }
        let wanted = &Wanted { origin_bytes: whole, ..wanted.clone() };
        let sectors = whole / SECTOR;
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

    /// An error unless the request is for write-back with the only policy that the type has.
    pub(super) fn only_writes_back(&self) -> Result<()> {
        if self.mode == Some(CacheMode::Writethrough) {
            let other = match self.found {
                None => ", or give --target cache",
                Some(_) => "",
            };
            return invalid(&format!("it does not offer mode writethrough: omit --mode{other}"));
        }
        if self.policy.is_some() {
            return invalid("it has only one policy: omit --policy");
        }
        Ok(())
    }

    /// The block size: the requested one, the existing one, or else up to `usual_bytes`, as large
    /// as the origin is a multiple of.
    pub(super) fn choose_block(&self, found: Option<u64>, usual_bytes: u64) -> Result<u64> {
        if let (Some(found), Some(given)) = (found, self.block_bytes)
            && found != given
        {
            return invalid(&format!(
                "{} holds a cache with blocks of {}, not {}: omit --block-size",
                self.fast,
                human_bytes(found),
                human_bytes(given)
            ));
        }
        let whole = 1 << self.origin_bytes.trailing_zeros().min(63);
        let auto = usual_bytes.max(self.origin_block_bytes).max(self.fast_block_bytes).min(whole);
        let block = found.or(self.block_bytes).unwrap_or(auto);
        if !self.origin_bytes.is_multiple_of(block) {
            return invalid(&format!(
                "{} has {} bytes, which is not a multiple of blocks of {block}",
                self.origin, self.origin_bytes
            ));
        }
        Ok(block)
    }
}

/// An error in the request.
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
            origin_block_bytes: 512,
            fast_block_bytes: 512,
            mode: None,
            policy: None,
            block_bytes: None,
            found: None,
        }
    }

    fn line(target: &str, wanted: &Wanted<'_>) -> std::result::Result<String, String> {
        let kind = super::super::find(target).unwrap();
        let line = kind.line(wanted).map_err(|error| error.to_string())?;
        crate::build::check(&Table::parse(&line).unwrap()).unwrap();
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
        assert_eq!(blocks(&Wanted { fast_block_bytes: 8192, ..wanted() }), Ok(8192));
        assert_eq!(blocks(&Wanted { block_bytes: Some(65536), ..wanted() }), Ok(65536));
        let odd = Wanted { origin_bytes: GIB + 512, block_bytes: Some(4096), ..wanted() };
        assert!(blocks(&odd).unwrap_err().contains("not a multiple of blocks of 4096"));
        for bytes in [0, 1, 1000, 131_072, u64::MAX] {
            let wrong = Wanted { block_bytes: Some(bytes), ..wanted() };
            assert!(blocks(&wrong).unwrap_err().contains("power of two"), "{bytes}");
        }
    }

    #[test]
    fn a_line_is_whole_blocks_of_the_devices_that_have_some() {
        let sectors = |target: &str, origin: u64, fast: u64| {
            let blocks = Wanted { origin_block_bytes: origin, fast_block_bytes: fast, ..wanted() };
            let odd = Wanted { origin_bytes: GIB + 5 * 512, ..blocks };
            let line = line(target, &odd).unwrap();
            line.split(' ').nth(1).unwrap().parse::<u64>().unwrap() - GIB / SECTOR
        };
        for target in ["pcache", "writecache", "cache"] {
            assert_eq!(sectors(target, 512, 512), 5, "{target}");
            assert_eq!(sectors(target, 2048, 512), 4, "{target}");
            assert_eq!(sectors(target, 4096, 512), 0, "{target}");
        }
        assert_eq!(sectors("pcache", 512, 4096), 5, "it is stored to");
        assert_eq!(sectors("writecache", 512, 4096), 0);
        assert_eq!(sectors("cache", 512, 2048), 4);
        let tiny = Wanted { origin_bytes: 512, origin_block_bytes: 4096, ..wanted() };
        assert!(line("pcache", &tiny).unwrap_err().contains("smaller than a block"));
    }

    #[test]
    fn what_a_target_does_not_have_is_an_error_that_says_so() {
        let through = Wanted { mode: Some(CacheMode::Writethrough), ..wanted() };
        let words = ["s", "1024", "0"].map(str::to_owned).into();
        let held = Wanted { found: Some(Shape { sectors: 1, words }), ..through.clone() };
        for target in ["pcache", "writecache"] {
            let error = line(target, &through).unwrap_err();
            assert!(error.starts_with(&format!("{target}: it does not offer mode")), "{error}");
            assert!(error.ends_with("or give --target cache"), "{error}");
            // That would be refused for the cache that is there.
            let error = line(target, &held).unwrap_err();
            assert!(error.ends_with("omit --mode"), "{error}");
        }
        let back = Wanted { mode: Some(CacheMode::Writeback), ..wanted() };
        assert_eq!(line("pcache", &back), line("pcache", &wanted()));
        let block = Wanted { block_bytes: Some(4096), ..wanted() };
        assert!(line("pcache", &block).unwrap_err().contains("block size is not fixed"));
        assert!(super::super::find("linear").unwrap().line(&wanted()).is_err());
    }
}
