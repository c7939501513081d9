//! The contents of a writecache for `inspect`, and the table arguments that attach it unchanged.

use crate::common::contents::{Contents, Shape, Value, has_more};
use crate::error::Result;
use crate::pmem::{Persistence, Pmem};
use crate::shm::{Served, SharedStore};
use crate::sync::Arc;
use crate::units::{SECTOR, human_bytes};

use super::args::Mode;
use super::inspect::{LabelReport, Report, inspect, load_geometry};
use super::layout::Geometry;
use super::media::Medium;
use super::memory::served;

/// Reads the same data as an attach of the cache that begins at byte `start`; never writes.
/// `shared_store` finds the memory of a server.
pub fn contents(pmem: &Arc<dyn Pmem>, start: u64, shared_store: &SharedStore) -> Result<Contents> {
    let medium = Medium::Pmem(Arc::clone(pmem));
    let report = inspect(&medium, start, None)?;
    let served = report.served(&medium, shared_store);
    let damage = damage(&report);
    Ok(Contents {
        rows: rows(&report, has_more(served.as_ref())),
        fields: fields(&report),
        damage,
        served,
        shape: shape(&**pmem, start, report.geometry.block_bytes),
    })
}

/// The attach that the label names, and its server if that did not end in order.
pub fn attach_of(
    pmem: &Arc<dyn Pmem>,
    start: u64,
    shared_store: &SharedStore,
) -> Option<(u64, Option<Served>)> {
    let medium = Medium::Pmem(Arc::clone(pmem));
    let (superblock, geometry) = load_geometry(&medium, start, None).ok()?;
    let label = &superblock.label;
    label.is_valid().then(|| (label.attach_id(), served(&medium, &geometry, label, shared_store)))
}

/// The table arguments of the cache at the first byte of `pmem`, if they can be read.
pub fn shape_of(pmem: &Arc<dyn Pmem>) -> Option<Shape> {
    let superblock = Medium::Pmem(Arc::clone(pmem)).superblock(0).ok()?;
    let geometry = Geometry::of_superblock(&superblock, 0, u64::MAX, None).ok()?;
    Some(shape(&**pmem, 0, geometry.block_bytes))
}

/// The table arguments of such a cache on `pmem`. The format is the same in both modes; the kind of
/// the medium decides the mode.
pub fn shape(pmem: &dyn Pmem, start: u64, block_bytes: u32) -> Shape {
    let mode = match pmem.medium().persistence {
        Persistence::Cpu => Mode::Pmem,
        Persistence::Msync => Mode::Ssd,
    };
    let mut words = vec![mode.word().to_owned(), block_bytes.to_string()];
    match start / SECTOR {
        0 => words.push("0".into()),
        start => words.extend(["2".into(), "start_sector".into(), start.to_string()]),
    }
    Shape { sectors: u64::from(block_bytes) / SECTOR, words }
}

fn rows(report: &Report, has_more: bool) -> Vec<(&'static str, String)> {
    let (geometry, census) = (&report.geometry, &report.census);
    let more = if has_more { " committed, and more in shared memory" } else { "" };
    let mut rows = vec![
        ("First sector", (geometry.start / SECTOR).to_string()),
        ("Block size", human_bytes(geometry.block_bytes.into())),
        ("Blocks", geometry.blocks.to_string()),
        ("Data from", human_bytes(geometry.data_at)),
        ("Commits", report.seq_count.to_string()),
        ("Live blocks", format!("{} ({} have older versions)", census.live, census.superseded)),
        ("Uncommitted blocks", census.uncommitted.to_string()),
        ("Free blocks", census.free.to_string()),
        ("Dirty data", format!("{}{more}", human_bytes(report.dirty_bytes))),
    ];
    match report.label {
        Some(label) => {
            rows.push(("Origin size", human_bytes(label.origin_bytes)));
            rows.push(("Last attach", format!("{:#x}", label.attach_id)));
        }
        None => rows.push(("Origin", "not recorded (a kernel's cache)".into())),
    }
    rows
}

fn damage(report: &Report) -> Vec<String> {
    let census = &report.census;
    let mut lines: Vec<String> = census.places.iter().map(ToString::to_string).collect();
    if census.damaged > lines.len() as u64 {
        lines.push(format!("and {} more entries", census.damaged - lines.len() as u64));
    }
    lines
}

fn fields(report: &Report) -> Vec<(&'static str, Value)> {
    let (geometry, census) = (&report.geometry, &report.census);
    let label = |label: LabelReport| {
        Value::Group(vec![
            ("origin_bytes", Value::Number(label.origin_bytes)),
            ("attach_id", Value::Number(label.attach_id)),
        ])
    };
    vec![
        ("start_sector", Value::Number(geometry.start / SECTOR)),
        ("block_bytes", Value::Number(geometry.block_bytes.into())),
        ("blocks", Value::Number(geometry.blocks)),
        ("data_offset_bytes", Value::Number(geometry.data_at)),
        ("seq_count", Value::Number(report.seq_count)),
        ("live_blocks", Value::Number(census.live)),
        ("superseded_blocks", Value::Number(census.superseded)),
        ("uncommitted_blocks", Value::Number(census.uncommitted)),
        ("free_blocks", Value::Number(census.free)),
        ("damaged_blocks", Value::Number(census.damaged)),
        ("dirty_bytes", Value::Number(report.dirty_bytes)),
        ("label", report.label.map_or(Value::Nothing, label)),
    ]
}
