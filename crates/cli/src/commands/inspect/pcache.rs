//! `inspect` of a pcache.

use serde_json::{Value, json};
use udm::pcache::inspect::{LabelReport, Report};
use udm::pcache::layout::Geometry;
use udm::units::human_bytes;

/// For people.
pub fn rows(report: &Report, has_more: bool) -> Vec<(&'static str, String)> {
    let segments = u64::from(report.segments);
    let used = u64::from(report.used_segments);
    let mut rows = vec![
        ("Segments", format!("{segments} of {}", human_bytes(Geometry::KERNEL.segment_bytes))),
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

/// The log tells how much there is at most; what is in memory comes on top.
fn dirty(report: &Report, has_more: bool) -> String {
    let bytes = human_bytes(report.dirty_bytes);
    if has_more {
        format!("{bytes} in the log, and what is in memory")
    } else {
        format!("at most {bytes}")
    }
}

/// What is damaged, a sentence each.
pub fn damage(report: &Report) -> Vec<String> {
    let mut lines = report.notes.clone();
    for (offset, len) in report.label.iter().flat_map(|label| &label.bad_ranges) {
        lines.push(format!(
            "dirty data of {} at byte {offset} of the device is lost; reads of it fail",
            human_bytes(*len)
        ));
    }
    lines
}

/// For programs.
pub fn shape(report: &Report) -> Value {
    let label = |label: &LabelReport| {
        let ranges: Vec<Value> = label
            .bad_ranges
            .iter()
            .map(|(offset, len)| json!({ "offset": offset, "len": len }))
            .collect();
        json!({
            "backing_identity": label.identity,
            "backing_bytes": label.backing_bytes,
            "bad_ranges": ranges,
        })
    };
    json!({
        "format": "pcache",
        "segment_bytes": Geometry::KERNEL.segment_bytes,
        "segments": report.segments,
        "used_segments": report.used_segments,
        "gc_percent": report.gc_percent,
        "has_data_crc": report.has_data_crc,
        "head": report.head.to_string(),
        "dirty_tail": report.dirty_tail.to_string(),
        "key_tail": report.key_tail.to_string(),
        "keys": report.keys,
        "stale_keys": report.stale_keys,
        "dirty_bytes": report.dirty_bytes,
        "label": report.label.as_ref().map(label),
        "damage": damage(report),
    })
}
