//! `inspect` of a writecache.

use serde_json::{Value, json};
use udm::units::{SECTOR, human_bytes};
use udm::writecache::inspect::Report;

/// For people.
pub fn rows(report: &Report, has_more: bool) -> Vec<(&'static str, String)> {
    let (geometry, census) = (&report.geometry, &report.census);
    let more = if has_more { " committed, and what is in memory" } else { "" };
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

/// What is damaged, a sentence each.
pub fn damage(report: &Report) -> Vec<String> {
    let census = &report.census;
    let mut lines: Vec<String> = census.places.iter().map(ToString::to_string).collect();
    if census.damaged > lines.len() as u64 {
        lines.push(format!("and {} entries more", census.damaged - lines.len() as u64));
    }
    lines
}

/// For programs.
pub fn shape(report: &Report) -> Value {
    let (geometry, census) = (&report.geometry, &report.census);
    json!({
        "format": "writecache",
        "start_sector": geometry.start / SECTOR,
        "block_bytes": geometry.block_bytes,
        "blocks": geometry.blocks,
        "data_offset_bytes": geometry.data_at,
        "seq_count": report.seq_count,
        "live_blocks": census.live,
        "superseded_blocks": census.superseded,
        "uncommitted_blocks": census.uncommitted,
        "free_blocks": census.free,
        "damaged_blocks": census.damaged,
        "dirty_bytes": report.dirty_bytes,
        "label": report.label.map(|label| json!({
            "origin_bytes": label.origin_bytes,
            "attach_id": label.attach_id,
        })),
        "damage": damage(report),
    })
}
