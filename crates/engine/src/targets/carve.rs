//! One fast device for a `cache`: metadata at its front, then the cached blocks.
//!
//! The metadata on the medium describes this layout: the number of metadata blocks, the size of the
//! cache's blocks, and their number. So a later set-up finds the same layout.

use super::setup::{CacheMode, Wanted, invalid};
use crate::base::area::Area;
use crate::cache::SLOTS_MAX;
use crate::cache::metadata::BLOCK_BYTES;
use crate::cache::metadata::source::read_one;
use crate::cache::metadata::superblock::{DATA_SECTORS_MAX, DATA_SECTORS_MIN, Superblock};
use crate::common::contents::Shape;
use crate::error::Result;
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::table::Word;
use crate::units::{GIB, KIB, MIB, SECTOR, human_bytes};

/// The smallest block that is chosen: LVM's usual one.
const USUAL_BLOCK_BYTES: u64 = 64 * KIB;
/// Blocks become larger before there are more of them than this; the kernel warns of more.
const USUAL_SLOTS_MAX: u64 = 1 << 20;
/// The metadata size that thin-provisioning-tools recommend: this, and some more for each slot.
const METADATA_BYTES: u64 = 4 * MIB;
const METADATA_BYTES_OF_SLOT: u64 = 28;

/// How a fast device is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    version: u64,
    metadata_bytes: u64,
    block_bytes: u64,
    slots: u64,
}

/// The layout that the metadata at the front of `pmem` describes.
pub(super) fn shape_of(pmem: &Arc<dyn Pmem>) -> Option<Shape> {
    let block = read_one(pmem, 0).ok()?;
    let superblock = Superblock::parse(&block).ok().flatten()?;
    let fields = &superblock.fields;
    let numbers = [
        u64::from(superblock.version()),
        fields.map.managed.get(),
        fields.data_sectors.get().into(),
        superblock.slots(),
    ];
    Some(Shape { sectors: 1, words: numbers.map(|number| number.to_string()).into() })
}

/// The arguments of the line for this request.
pub(super) fn words(wanted: &Wanted<'_>) -> Result<String> {
    let layout = match &wanted.found {
        Some(shape) => found(wanted, shape)?,
        None => fresh(wanted)?,
    };
    let Layout { version, metadata_bytes, block_bytes, slots } = layout;
    let metadata = part(wanted.fast, 0, metadata_bytes)?;
    let cache = part(wanted.fast, metadata_bytes, slots * block_bytes)?;
    let (origin, _) = wanted.quoted();
    let mode = match wanted.mode {
        None | Some(CacheMode::Writeback) => "writeback",
        Some(CacheMode::Writethrough) => "writethrough",
    };
    let features = match version {
        1 => format!("1 {mode}"),
        _ => format!("2 metadata2 {mode}"),
    };
    let (sectors, policy) = (block_bytes / SECTOR, wanted.policy.unwrap_or("smq"));
    Ok(format!("{metadata} {cache} {origin} {sectors} {features} {policy} 0"))
}

/// The layout of the cache that is there.
fn found(wanted: &Wanted<'_>, shape: &Shape) -> Result<Layout> {
    let numbers: Vec<u64> = shape.words.iter().filter_map(|word| word.parse().ok()).collect();
    let &[version, blocks, sectors, slots] = numbers.as_slice() else {
        return invalid("the metadata does not record how the device is divided");
    };
    let (metadata_bytes, block_bytes) =
        (blocks.saturating_mul(BLOCK_BYTES as u64), sectors * SECTOR);
    if let Some(given) = wanted.block_bytes.filter(|given| *given != block_bytes) {
        return invalid(&format!(
            "{} holds a cache with blocks of {}, not {}: omit --block-size",
            wanted.fast,
            human_bytes(block_bytes),
            human_bytes(given)
        ));
    }
    // A server that died early may have formatted without counting slots.
    let slots = match slots {
        0 => wanted.fast_bytes.saturating_sub(metadata_bytes) / block_bytes.max(1),
        slots => slots,
    };
    let needed = slots.saturating_mul(block_bytes).saturating_add(metadata_bytes);
    if slots == 0 || metadata_bytes == 0 || needed > wanted.fast_bytes {
        return invalid(&format!(
            "{} begins with the metadata of a cache of {slots} blocks of {}, which take {} \
             together with it, and has {}: either the data is on another device, and you need a \
             table with all three devices (--table), or the device was cut short",
            wanted.fast,
            human_bytes(block_bytes),
            human_bytes(needed),
            human_bytes(wanted.fast_bytes)
        ));
    }
    Ok(Layout { version, metadata_bytes, block_bytes, slots })
}

/// The layout of a new cache.
fn fresh(wanted: &Wanted<'_>) -> Result<Layout> {
    let fast = wanted.fast_bytes;
    let [least, most] =
        [DATA_SECTORS_MIN, DATA_SECTORS_MAX].map(|sectors| u64::from(sectors) * SECTOR);
    let block_bytes = match wanted.block_bytes {
        Some(given) if (least..=most).contains(&given) && given.is_multiple_of(least) => given,
        Some(given) => {
            return invalid(&format!(
                "--block-size {given} is not a multiple of {} from that to {}",
                human_bytes(least),
                human_bytes(most)
            ));
        }
        None => auto_block(fast),
    };
    if wanted.origin_bytes < block_bytes {
        return invalid(&format!(
            "{} has {}, less than one block of {}",
            wanted.origin,
            human_bytes(wanted.origin_bytes),
            human_bytes(block_bytes)
        ));
    }
    let metadata_bytes =
        (METADATA_BYTES + METADATA_BYTES_OF_SLOT * (fast / block_bytes)).next_multiple_of(MIB);
    let slots = fast.saturating_sub(metadata_bytes) / block_bytes;
    if slots == 0 {
        return invalid(&format!(
            "{} has {}: metadata and one block of {} take {}",
            wanted.fast,
            human_bytes(fast),
            human_bytes(block_bytes),
            human_bytes(metadata_bytes + block_bytes)
        ));
    }
    if slots > SLOTS_MAX {
        let wish = human_bytes(auto_block(fast));
        return invalid(&format!(
            "--block-size {block_bytes} makes {slots} blocks, and a cache has at most {SLOTS_MAX}; \
             auto would be {wish}"
        ));
    }
    Ok(Layout { version: 2, metadata_bytes, block_bytes, slots })
}

/// The block size for a fast device of this size.
fn auto_block(fast_bytes: u64) -> u64 {
    let mut block = USUAL_BLOCK_BYTES;
    while fast_bytes / block > USUAL_SLOTS_MAX && block < GIB {
        block *= 2;
    }
    block
}

/// The word for `len` bytes, from byte `start` on, of the device in `text`, with its other options.
fn part(text: &str, start: u64, len: u64) -> Result<String> {
    let device = Word::new(text).device()?;
    let area = Area::new(device.options.area.start() + start, len);
    let options = text.strip_prefix(device.path.as_str()).unwrap_or_default();
    let options = options.trim_start_matches('?').split('&');
    let is_other = |option: &&str| {
        !option.is_empty() && !option.starts_with("offset=") && !option.starts_with("size=")
    };
    let mut options: Vec<String> = options.filter(is_other).map(str::to_owned).collect();
    if area.start() > 0 {
        options.push(format!("offset={}", in_units(area.start())));
    }
    options.push(format!("size={}", in_units(len)));
    Ok(Word::new(format!("{}?{}", device.path, options.join("&"))).quoted())
}

/// A number of bytes as a word has it.
fn in_units(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(GIB) => format!("{}G", bytes / GIB),
        _ if bytes.is_multiple_of(MIB) => format!("{}M", bytes / MIB),
        _ if bytes.is_multiple_of(KIB) => format!("{}K", bytes / KIB),
        _ => (bytes / SECTOR).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::targets::setup::Fast;

    fn wanted() -> Wanted<'static> {
        Wanted {
            origin: "/data/slow",
            origin_bytes: 10 * GIB,
            fast: "/dev/fast",
            fast_bytes: GIB,
            nature: Fast::Disk,
            origin_block_bytes: 512,
            fast_block_bytes: 512,
            mode: None,
            policy: None,
            block_bytes: None,
            found: None,
        }
    }

    fn shape(numbers: [u64; 4]) -> Option<Shape> {
        Some(Shape { sectors: 1, words: numbers.map(|number| number.to_string()).into() })
    }

    fn error(wanted: &Wanted<'_>) -> String {
        words(wanted).unwrap_err().to_string()
    }

    #[test]
    fn a_device_is_cut_in_two() {
        assert_eq!(
            words(&wanted()).unwrap(),
            "/dev/fast?size=5M /dev/fast?offset=5M&size=1019M /data/slow 128 2 metadata2 writeback \
             smq 0"
        );
        let through = Wanted {
            fast: "/dev/fast?io=buffered&offset=1G&size=2049",
            fast_bytes: 16 * MIB,
            mode: Some(CacheMode::Writethrough),
            policy: Some("probation"),
            block_bytes: Some(32 * KIB),
            ..wanted()
        };
        assert_eq!(
            words(&through).unwrap(),
            "/dev/fast?io=buffered&offset=1G&size=5M /dev/fast?io=buffered&offset=1029M&size=11M \
             /data/slow 64 2 metadata2 writethrough probation 0"
        );
    }

    #[test]
    fn blocks_grow_before_there_are_a_million() {
        for (fast, block) in [
            (MIB, 64 * KIB),
            (64 * GIB, 64 * KIB),
            (64 * GIB + 64 * KIB, 128 * KIB),
            (1024 * GIB, MIB),
            (1024 * 1024 * GIB, GIB),
        ] {
            assert_eq!(auto_block(fast), block, "{fast}");
        }
        let large = fresh(&Wanted { fast_bytes: 1024 * GIB, ..wanted() }).unwrap();
        assert!(large.slots <= USUAL_SLOTS_MAX && large.metadata_bytes == 32 * MIB, "{large:?}");
    }

    #[test]
    fn what_is_there_is_cut_as_it_was() {
        let found = Wanted { found: shape([1, 2048, 64, 100]), ..wanted() };
        assert_eq!(
            words(&found).unwrap(),
            "/dev/fast?size=8M /dev/fast?offset=8M&size=3200K /data/slow 64 1 writeback smq 0"
        );
        let given = Wanted { block_bytes: Some(64 * KIB), ..found.clone() };
        assert!(error(&given).contains("blocks of 32.0 KiB, not 64.0 KiB"));
        // It was formatted, and its server died.
        let empty = Wanted { found: shape([2, 2048, 128, 0]), ..wanted() };
        assert!(words(&empty).unwrap().contains("offset=8M&size=1016M"));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let given = |bytes| error(&Wanted { block_bytes: Some(bytes), ..wanted() });
        for bytes in [0, 512, 4096, 48 * KIB, 2 * GIB, u64::MAX] {
            assert!(given(bytes).contains("not a multiple of 32.0 KiB"), "{bytes}");
        }
        let small = Wanted { fast_bytes: 5 * MIB, ..wanted() };
        assert!(error(&small).contains("metadata and one block of 64.0 KiB take 5.1 MiB"));
        let short = Wanted { origin_bytes: 4096, ..wanted() };
        assert!(error(&short).contains("less than one block"));
        let many = Wanted { fast_bytes: 16 * 1024 * GIB, block_bytes: Some(32 * KIB), ..wanted() };
        assert!(error(&many).contains("auto would be 16.0 MiB"));
        for numbers in [[2, 1 << 18, 128, 10], [2, 1024, 128, 1 << 20], [2, u64::MAX, 128, 10]] {
            let apart = Wanted { found: shape(numbers), ..wanted() };
            assert!(error(&apart).contains("on another device"), "{numbers:?}");
        }
    }
}
