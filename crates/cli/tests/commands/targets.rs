//! What commands tell of the types of targets, word by word: their names, the errors about their
//! words, the fields of their status lines, and what `inspect` finds.

use crate::common::Udm;
use serde_json::json;

const MIB: u64 = 1 << 20;

/// Table lines, and their errors.
const WRONG_LINES: [(&str, &str); 47] = [
    (
        "0 8 nonesuch",
        "column 5: `nonesuch`: unknown target type; there are cache, delay, error, flakey, \
             linear, pcache, writecache, zero",
    ),
    ("0 8 linear", "column 11: Invalid argument count: linear <device> <offset>"),
    ("0 8 linear o1", "column 14: Invalid argument count: linear <device> <offset> (`{dir}/o1`)"),
    ("0 8 linear o1 0 0", "column 17: `0`: Invalid argument count: linear <device> <offset>"),
    ("0 8 error o1", "column 13: Invalid argument count: error [<device> <offset>] (`{dir}/o1`)"),
    ("0 8 error o1 0 0", "column 16: `0`: Invalid argument count: error [<device> <offset>]"),
    (
        "0 8 flakey o1 0 1",
        "column 18: Invalid argument count: flakey <device> <offset> <up> <down> \
             [<#words> <features>...] (`1`)",
    ),
    (
        "0 8 delay o1 0",
        "column 15: Requires exactly 3, 6 or 9 arguments: <device> <offset> <delay> for \
             all, for reads and writes, or for reads, writes and flushes (`0`)",
    ),
    ("0 8 zero 0", "column 10: `0`: No arguments required"),
    ("0 8 pcache", "column 11: pcache: cache device is missing"),
    ("0 8 pcache p.img", "column 17: pcache: backing device is missing"),
    (
        "0 8 pcache p.img o1 x",
        "column 21: pcache: 'x' is not a number of optional words (invalid argument count)",
    ),
    ("0 8 pcache p.img o1 1", "column 21: pcache: 1 optional words announced, 0 present"),
    ("0 8 pcache p.img o1 1 crc true", "column 23: pcache: option 'crc' lacks its value"),
    ("0 8 pcache p.img o1 2 crc", "column 21: pcache: 2 optional words announced, 1 present"),
    ("0 8 pcache p.img o1 2 crc maybe", "column 27: pcache: invalid option for crc: 'maybe'"),
    (
        "0 8 pcache p.img o1 0 max_age 4294967296",
        "column 31: pcache: invalid option for max_age: '4294967296': from 0 to 4294967295",
    ),
    (
        "0 8 pcache p.img o1 0 high_watermark 101",
        "column 38: pcache: invalid option for high_watermark: '101': from 0 to 100",
    ),
    (
        "0 8 pcache p.img o1 0 high_watermark x",
        "column 38: pcache: invalid option for high_watermark: 'x': from 0 to 100",
    ),
    (
        "0 8 pcache p.img o1 2 cache_mode wt",
        "column 34: pcache: cache_mode 'wt' is not supported: only writeback",
    ),
    (
        "0 8 pcache p.img o1 0 retention cold",
        "column 33: pcache: invalid option for retention: 'cold'",
    ),
    ("0 8 pcache p.img o1 0 junk 1", "column 23: pcache: unrecognised optional argument 'junk'"),
    ("0 8 pcache p.img o1 0 max_age", "column 23: pcache: option 'max_age' lacks its value"),
    (
        "0 8 pcache p.img?io=foo o1 0 junk 1",
        "column 30: pcache: unrecognised optional argument 'junk'",
    ),
    (
        "0 8 pcache p.img?io=foo o1",
        "column 12: `p.img?io=foo`: io=foo: expected direct, buffered, dontcache or lazy",
    ),
    (
        "0 8 pcache p.img?io=direct o1",
        "column 12: `{dir}/p.img?io=direct`: io is for slow devices; a cache device takes persist",
    ),
    (
        "0 8 pcache p.img o1?persist=cpu",
        "column 18: `{dir}/o1?persist=cpu`: persist is for cache devices; a slow device takes io",
    ),
    (
        "0 8 pcache p.img o1?readonly",
        "column 18: `{dir}/o1?readonly`: a cache writes to both of its devices, or to none if both \
             names have ?readonly",
    ),
    ("0 8 writecache", "column 15: writecache: Bad arguments: the mode is missing; it is p or s"),
    ("0 8 writecache x", "column 16: writecache: Bad arguments: mode 'x' is not p or s"),
    ("0 8 writecache p", "column 17: writecache: Bad arguments: the origin is missing"),
    ("0 8 writecache p o1", "column 20: writecache: Bad arguments: the cache device is missing"),
    (
        "0 8 writecache p o1 w.img",
        "column 26: writecache: Bad arguments: the block size is missing",
    ),
    (
        "0 8 writecache p o1 w.img 100",
        "column 27: writecache: Invalid block size: '100' is not a power of two from 512 to 65536",
    ),
    (
        "0 8 writecache p o1 w.img 4096",
        "column 31: writecache: Invalid number of feature args: it is missing",
    ),
    (
        "0 8 writecache p o1 w.img 4096 x",
        "column 32: writecache: Invalid number of feature args: 'x' is not a number up to 18",
    ),
    (
        "0 8 writecache p o1 w.img 4096 1",
        "column 32: writecache: Invalid number of feature args: 1 announced, 0 present",
    ),
    (
        "0 8 writecache p o1 w.img 4096 1 junk",
        "column 34: writecache: Invalid optional argument: 'junk' is unknown",
    ),
    (
        "0 8 writecache p o1 w.img 4096 2 max_age x",
        "column 42: writecache: Invalid optional argument: max_age 'x' is not a number \
             up to 86400000",
    ),
    (
        "0 8 writecache p o1 w.img 4096 0 junk",
        "column 34: writecache: Invalid optional argument: 'junk' follows the 0 counted arguments",
    ),
    (
        "0 8 writecache p o1 w.img 4096 0 atomic_blocks false",
        "column 34: writecache: Invalid optional argument: mode p never overwrites a block in \
             place",
    ),
    (
        "0 8 writecache p o1 w.img 4096 2 low_watermark 60",
        "column 32: writecache: High watermark must be greater than or equal to low \
             watermark: 50 and 60",
    ),
    (
        "0 8 writecache p o1 o1 4096 0",
        "column 21: `{dir}/o1`: the cache device and the origin are the same",
    ),
    (
        "0 8 writecache p nonesuch w.img 4096 0",
        "column 18: Origin data device lookup failed: opening {dir}/nonesuch: No such \
             file or directory",
    ),
    (
        "0 8 writecache s o1 nonesuch 4096 0",
        "column 21: Cache data device lookup failed: opening {dir}/nonesuch: No such \
             file or directory",
    ),
    (
        "0 8 writecache p o1 nonesuch 4096 0",
        "column 21: Cache data device lookup failed: open cache device {dir}/nonesuch: \
             No such file or directory",
    ),
    (
        "0 8 writecache p o1?readonly w.img 4096 0",
        "column 18: `{dir}/o1?readonly`: a cache writes to both of its devices, or to none if both \
             names have ?readonly",
    ),
];

fn with_devices() -> Udm {
    let udm = Udm::new();
    for (name, len) in [("p.img", 512), ("w.img", 512), ("o1", 64), ("o2", 64)] {
        udm.file(name, len * MIB);
    }
    udm
}

#[test]
fn a_wrong_word_is_named_with_what_is_wrong() {
    let udm = with_devices();
    let folder = udm.path("");
    let folder = folder.to_str().unwrap().trim_end_matches('/');
    for (table, error) in WRONG_LINES {
        let line = udm.run(&["create", "bad", "--table", table]).err;
        let first = line.lines().next().unwrap_or_default();
        let expected = format!("udm: create: table line 1, {}", error.replace("{dir}", folder));
        assert_eq!(first, expected, "{table}");
    }
}

#[test]
fn the_types_have_the_versions_of_the_kernels_own() {
    let versions = [
        ("cache", "2.4.0"),
        ("delay", "1.4.0"),
        ("error", "1.7.0"),
        ("flakey", "1.5.0"),
        ("linear", "1.5.0"),
        ("pcache", "0.1.0"),
        ("writecache", "1.6.0"),
        ("zero", "1.2.0"),
    ];
    let expected: Vec<_> =
        versions.map(|(name, version)| json!({ "name": name, "version": version })).into();
    assert_eq!(Udm::new().json(&["targets"]), json!(expected));
}

#[test]
fn caches_are_told_in_their_own_words() {
    let udm = with_devices();
    let pcache = "0 131072 pcache p.img o1 2 data_crc true";
    let writecache = "0 131072 writecache p o2 w.img 4096 0";
    let fields = [
        (
            pcache,
            "sb_flags seg_total cache_segs segs_used gc_percent cache_flags key_head dirty_tail \
             key_tail",
        ),
        (
            writecache,
            "error blocks free_blocks writeback_blocks reads read_hits writes \
             write_hits_uncommitted write_hits_committed writes_around writes_allocated \
             writes_blocked flushes discards",
        ),
    ];
    for (table, fields) in fields {
        udm.ok(&["create", "vol", "--table", table]);
        let all = udm.ok(&["status", "--all", "vol"]);
        let told: Vec<&str> =
            all.lines().skip(3).filter_map(|line| line.split_whitespace().next()).collect();
        let expected: Vec<&str> = fields.split_whitespace().collect();
        assert_eq!(told[..expected.len()], expected, "{all}");
        udm.ok(&["remove", "vol"]);
    }
    let mut found = udm.json(&["inspect", "p.img"]);
    assert!(found["label"]["backing_identity"].take().is_string());
    let expected = json!({
        "cache_device": "p.img", "damage": [], "dirty_bytes": 0, "dirty_tail": "0:0",
        "format": "pcache", "gc_percent": 70, "has_data_crc": true, "head": "0:0",
        "is_in_use": false, "key_tail": "0:0", "keys": 0,
        "label": { "backing_bytes": 67108864, "backing_identity": null, "bad_ranges": [] },
        "segment_bytes": 16777216, "segments": 31, "served": null, "size_bytes": 536870912,
        "stale_keys": 0, "used_segments": 1,
    });
    assert_eq!(found, expected);
    let mut found = udm.json(&["inspect", "w.img"]);
    assert!(found["label"]["attach_id"].take().is_u64());
    let expected = json!({
        "block_bytes": 4096, "blocks": 130561, "cache_device": "w.img", "damage": [],
        "damaged_blocks": 0, "data_offset_bytes": 2093056, "dirty_bytes": 0,
        "format": "writecache", "free_blocks": 130561, "is_in_use": false,
        "label": { "attach_id": null, "origin_bytes": 67108864 }, "live_blocks": 0,
        "seq_count": 0, "served": null, "size_bytes": 536870912, "start_sector": 0,
        "superseded_blocks": 0, "uncommitted_blocks": 0,
    });
    assert_eq!(found, expected);
    let line = udm.refused(&["recover", "w.img", "o2", "--truncate"]);
    assert_eq!(
        line,
        "udm: recover: --truncate applies to the log of a pcache, which w.img does not have"
    );
}

#[test]
fn a_pcache_neither_replaces_a_table_nor_is_replaced() {
    let udm = with_devices();
    let tables = ["0 131072 pcache p.img o1", "0 8 zero"];
    for (table, other) in [(tables[0], tables[1]), (tables[1], tables[0])] {
        udm.ok(&["create", "vol", "--table", table]);
        let line = udm.refused(&["load", "vol", "--table", other]);
        let expected = "vol: a table is active, and pcache cannot replace a table or be replaced: \
                        remove the device and create it again";
        assert!(line.ends_with(expected), "{line}");
        udm.ok(&["remove", "vol"]);
    }
}
