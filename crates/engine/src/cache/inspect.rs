//! What `inspect` reports of a metadata device.

use super::metadata::source::read_one;
use super::metadata::superblock::Superblock;
use super::metadata::survey::{Survey, superblock, survey};
use super::metadata::{Contents, Source};
use crate::base::crc::crc32c_raw;
use crate::common::contents::{Contents as Report, Shape, Value};
use crate::error::Result;
use crate::pmem::Pmem;
use crate::sync::Arc;
use crate::units::{SECTOR, human_bytes};

/// Findings that are shown; `udm cache check` lists the others.
const FINDINGS_MAX: usize = 16;

/// Whether `pmem` begins with a cache's metadata, as far as the magic number says.
pub fn is_cache(pmem: &Arc<dyn Pmem>) -> bool {
    read_one(pmem, 0).is_ok_and(|block| Superblock::unchecked(&block).has_magic())
}

/// A checksum of the mark that binds devices to the metadata; `None` if it cannot be read.
pub fn binding_of(pmem: &Arc<dyn Pmem>) -> Option<u64> {
    let block = read_one(pmem, 0).ok()?;
    let superblock = Superblock::parse(&block).ok().flatten()?;
    Some(u64::from(crc32c_raw(u32::MAX, &superblock.fields.uuid)))
}

/// Reads all of the metadata. Never writes.
pub fn contents(pmem: &Arc<dyn Pmem>) -> Result<Report> {
    let found = survey(pmem as &dyn Source, superblock(pmem)?);
    let superblock = found.superblock.clone();
    let space = (found.counts.used.ones(), found.counts.managed);
    let mut damage = findings(&found);
    let contents = match found.loaded() {
        Ok(loaded) => Some(loaded.contents.opened(&superblock)),
        Err(_) => {
            damage.push("`udm cache repair` keeps what can be kept".into());
            None
        }
    };
    Ok(Report {
        rows: rows(&superblock, contents.as_ref(), space),
        fields: fields(&superblock, contents.as_ref(), space),
        damage,
        served: None,
        shape: Shape { sectors: 0, words: Vec::new() },
    })
}

fn findings(found: &Survey) -> Vec<String> {
    let mut lines: Vec<String> =
        found.findings().take(FINDINGS_MAX).map(ToString::to_string).collect();
    let more = found.damage.count() + found.remarks.count() - lines.len() as u64;
    if more > 0 {
        lines.push(format!("and {more} more findings, which `udm cache check` lists"));
    }
    lines
}

fn block_bytes(superblock: &Superblock) -> u64 {
    u64::from(superblock.fields.data_sectors.get()) * SECTOR
}

fn rows(
    superblock: &Superblock,
    contents: Option<&Contents>,
    (used, managed): (u64, u64),
) -> Vec<(&'static str, String)> {
    let block = block_bytes(superblock);
    let unknown = || "unknown: the metadata is damaged".to_owned();
    let shutdown = match superblock.is_clean() {
        true => "clean",
        false => "not clean: all blocks in use count as dirty",
    };
    let policy = superblock.policy();
    let mut rows = vec![
        ("Metadata version", superblock.version().to_string()),
        ("Metadata blocks", format!("{used} of {managed} in use")),
        ("Block size", human_bytes(block)),
        ("Blocks", superblock.slots().to_string()),
        ("Blocks in use", contents.map_or_else(unknown, |contents| contents.mapped().to_string())),
        (
            "Dirty blocks",
            contents.map_or_else(unknown, |contents| contents.dirty.ones().to_string()),
        ),
        (
            "Dirty data",
            contents.map_or_else(unknown, |contents| human_bytes(contents.dirty.ones() * block)),
        ),
        (
            "Policy",
            if policy.is_empty() { "none yet".into() } else { policy.escape_debug().to_string() },
        ),
        ("Shutdown", shutdown.into()),
    ];
    if superblock.needs_check() {
        rows.push(("Needs check", "yes: the kernel refuses the cache".into()));
    }
    rows
}

fn fields(
    superblock: &Superblock,
    contents: Option<&Contents>,
    (used, managed): (u64, u64),
) -> Vec<(&'static str, Value)> {
    let block = block_bytes(superblock);
    let number = |number: Option<u64>| number.map_or(Value::Nothing, Value::Number);
    let fields = &superblock.fields;
    let dirty = contents.map(|contents| contents.dirty.ones());
    vec![
        ("version", Value::Number(superblock.version().into())),
        ("metadata_blocks_used", Value::Number(used)),
        ("metadata_blocks", Value::Number(managed)),
        ("block_bytes", Value::Number(block)),
        ("blocks", Value::Number(superblock.slots())),
        ("blocks_used", number(contents.map(Contents::mapped))),
        ("dirty_blocks", number(dirty)),
        ("dirty_bytes", number(dirty.and_then(|dirty| dirty.checked_mul(block)))),
        ("policy", Value::Text(superblock.policy())),
        ("is_clean_shutdown", Value::Flag(superblock.is_clean())),
        ("needs_check", Value::Flag(superblock.needs_check())),
        ("has_hints", Value::Flag(contents.is_some_and(|contents| contents.hints.is_some()))),
        ("discard_block_sectors", Value::Number(fields.discard_sectors.get())),
        ("discard_blocks", Value::Number(fields.discard_blocks.get())),
        ("read_hits", Value::Number(fields.read_hits.get().into())),
        ("read_misses", Value::Number(fields.read_misses.get().into())),
        ("write_hits", Value::Number(fields.write_hits.get().into())),
        ("write_misses", Value::Number(fields.write_misses.get().into())),
    ]
}
