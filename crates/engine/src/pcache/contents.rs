//! The contents of a pcache for `inspect`, and the table arguments that attach it unchanged.

use crate::common::contents::{Contents, Shape, Value, has_more};
use crate::error::Result;
use crate::pmem::Pmem;
use crate::shm::{Served, SharedStore};
use crate::sync::Arc;
use crate::units::human_bytes;

use super::attach::{has_data_crc, load_info};
use super::inspect::{LabelReport, Report, inspect};
use super::label::Label;
use super::layout::Geometry;
use super::media::Media;
use super::memory::served;

/// Reads the same data as an attach; never writes. `shared_store` finds the memory of a server.
pub fn contents(
    pmem: Arc<dyn Pmem>,
    geometry: Geometry,
    shared_store: &SharedStore,
) -> Result<Contents> {
    let report = inspect(pmem, geometry)?;
    let served = report.served(shared_store);
    let damage = damage(&report);
    Ok(Contents {
        rows: rows(&report, geometry, has_more(served.as_ref())),
        fields: fields(&report, geometry),
        damage,
        served,
        shape: shape(report.has_data_crc),
    })
}

/// The attach that the label names, and its server if that did not end in order.
pub fn attach_of(
    pmem: &Arc<dyn Pmem>,
    geometry: Geometry,
    shared_store: &SharedStore,
) -> Option<(u64, Option<Served>)> {
    let media = Media { pmem: Arc::clone(pmem), geometry, shared: None };
    let (label, _) = Label::load(&media).filter(|(label, _)| !label.is_of_format())?;
    Some((label.attach_id, served(&label, shared_store)))
}

/// The table arguments of the cache on `pmem`, if they can be read.
pub fn shape_of(pmem: &Arc<dyn Pmem>, geometry: Geometry) -> Option<Shape> {
    let media = Media { pmem: Arc::clone(pmem), geometry, shared: None };
    let info = load_info(&media).ok()?;
    Some(shape(has_data_crc(&info.record)))
}

/// The table arguments of such a cache.
pub fn shape(has_data_crc: bool) -> Shape {
    let words = ["2", "data_crc", if has_data_crc { "true" } else { "false" }];
    Shape { sectors: 1, words: words.map(str::to_owned).into() }
}

fn rows(report: &Report, geometry: Geometry, has_more: bool) -> Vec<(&'static str, String)> {
    let segments = u64::from(report.segments);
    let used = u64::from(report.used_segments);
    let mut rows = vec![
        ("Segments", format!("{segments} of {}", human_bytes(geometry.segment_bytes))),
        ("Used segments", format!("{used} ({} %)", used * 100 / segments.max(1))),
        ("Collection from", format!("{} %", report.gc_percent)),
        ("Data CRC", if report.has_data_crc { "yes" } else { "no" }.into()),
        ("Log head", report.head.to_string()),
        ("Dirty tail", report.dirty_tail.to_string()),
        ("Key tail", report.key_tail.to_string()),
        ("Keys", format!("{} ({} of reused segments)", report.keys, report.stale_keys)),
        ("Dirty data", dirty(report, has_more)),
    ];
    match &report.label {
        Some(label) => {
            rows.push(("Backing device", label.identity.clone()));
            rows.push(("Backing size", human_bytes(label.backing_bytes)));
        }
        None => rows.push(("Backing device", "not recorded (last written by a kernel)".into())),
    }
    rows
}

/// The log gives the most dirty data that it may hold; keys in memory come on top.
fn dirty(report: &Report, has_more: bool) -> String {
    let bytes = human_bytes(report.dirty_bytes);
    if has_more {
        format!("{bytes} in the log, and more in shared memory")
    } else {
        format!("at most {bytes}")
    }
}

fn damage(report: &Report) -> Vec<String> {
    let mut lines = report.notes.clone();
    for (offset, len) in report.label.iter().flat_map(|label| &label.bad_ranges) {
        lines.push(format!(
            "dirty data of {} at byte {offset} of the device is lost; reads of it fail",
            human_bytes(*len)
        ));
    }
    lines
}

fn fields(report: &Report, geometry: Geometry) -> Vec<(&'static str, Value)> {
    vec![
        ("segment_bytes", Value::Number(geometry.segment_bytes)),
        ("segments", Value::Number(report.segments.into())),
        ("used_segments", Value::Number(report.used_segments.into())),
        ("gc_percent", Value::Number(report.gc_percent.into())),
        ("has_data_crc", Value::Flag(report.has_data_crc)),
        ("head", Value::Text(report.head.to_string())),
        ("dirty_tail", Value::Text(report.dirty_tail.to_string())),
        ("key_tail", Value::Text(report.key_tail.to_string())),
        ("keys", Value::Number(report.keys)),
        ("stale_keys", Value::Number(report.stale_keys)),
        ("dirty_bytes", Value::Number(report.dirty_bytes)),
        ("label", report.label.as_ref().map_or(Value::Nothing, label)),
    ]
}

fn label(label: &LabelReport) -> Value {
    let range = |(offset, len): &(u64, u64)| {
        Value::Group(vec![("offset", Value::Number(*offset)), ("len", Value::Number(*len))])
    };
    Value::Group(vec![
        ("backing_identity", Value::Text(label.identity.clone())),
        ("backing_bytes", Value::Number(label.backing_bytes)),
        ("bad_ranges", Value::List(label.bad_ranges.iter().map(range).collect())),
    ])
}
