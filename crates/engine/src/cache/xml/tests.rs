//! Tests of metadata as text: the tools' output is parsed, and mistakes are located.

use super::*;
use crate::cache::metadata::{load, survey};
use crate::disk::RamDisk;

/// What `cache_dump` 0.9.0 prints.
const TEXT: &str = concat!(
    r#"<superblock uuid="" block_size="128" nr_cache_blocks="1200" policy="smq" hint_width="4">"#,
    r#"
  <mappings>
    <mapping cache_block="0" origin_block="5" dirty="false"/>
    <mapping cache_block="1" origin_block="4096" dirty="true"/>
    <mapping cache_block="600" origin_block="7" dirty="true"/>
    <mapping cache_block="1199" origin_block="1000000" dirty="false"/>
  </mappings>
  <hints>
    <hint cache_block="0" data="AQAAAA=="/>
    <hint cache_block="1" data="PwAAAA=="/>
    <hint cache_block="600" data="CgAAAA=="/>
    <hint cache_block="1199" data="AAAAAA=="/>
  </hints>
</superblock>
"#
);

fn printed(superblock: &Superblock, contents: &Contents) -> String {
    let mut text = String::new();
    print(superblock, contents, |part| {
        text += part;
        Ok(())
    })
    .unwrap();
    text
}

#[test]
fn what_was_restored_is_dumped_as_it_was() {
    let description = parse(TEXT, 10_000).unwrap();
    assert_eq!(description.contents.hints.as_ref().unwrap()[600], 10);
    for version in [1, 2] {
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(4 << 20, 512));
        description.write(&disk, version, true).unwrap();
        let found = survey(&disk, survey::superblock(&disk).unwrap());
        assert_eq!(found.findings().count(), 0);
        let loaded = found.loaded().unwrap();
        assert_eq!(printed(&loaded.superblock, &loaded.contents), TEXT);
        let fields = &loaded.superblock.fields;
        assert_eq!((fields.hint_bytes.get(), fields.policy_version[0].get()), (4, 2));
        // Without a clean shutdown the kernel takes every block for dirty.
        description.write(&disk, version, false).unwrap();
        let loaded = load(&disk).unwrap();
        let contents = loaded.contents.opened(&loaded.superblock);
        let text = printed(&loaded.superblock, &contents);
        assert_eq!((text.matches("dirty=\"true\"").count(), text.contains("<hint ")), (4, false));
    }
}

#[test]
fn other_ways_to_write_the_same_are_understood() {
    let text = TEXT
        .replace("<mappings>", "<!-- > four <a --><mappings>")
        .replace("\"5\"", " '5'")
        .replace(
            "cache_block=\"1\" origin_block=\"4096\"",
            "origin_block=\"4096\"\n cache_block = \"1\"",
        )
        .replace("dirty=\"false\"/>\n  </mappings>", "dirty=\"false\"></mapping></mappings >");
    let text = format!("<?xml version=\"1.0\"?>\n{text}\n<!-- end -->\n");
    assert_eq!(parse(&text, 10_000).unwrap(), parse(TEXT, 10_000).unwrap());
    let policy = "policy=\"a&lt;&amp;&quot;\"";
    let numbers = "block_size=\"64\" nr_cache_blocks=\"7\" hint_width=\"0\"";
    let description = parse(&format!("<superblock {numbers} {policy}/>"), 10).unwrap();
    assert_eq!((description.policy.as_str(), description.contents.slots()), ("a<&\"", 7));
    assert_eq!(escaped(&description.policy), "a&lt;&amp;&quot;");
}

#[test]
fn a_byte_order_mark_is_passed_over_and_a_uuid_is_kept() {
    let marked = format!("\u{FEFF}{TEXT}").replace("uuid=\"\"", "uuid=\"udm2&amp;234567890AB\"");
    let description = parse(text_of(marked.as_bytes()).unwrap(), 10_000).unwrap();
    assert_eq!(&description.uuid, b"udm2&234567890AB");
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(4 << 20, 512));
    description.write(&disk, 2, true).unwrap();
    let mut loaded = load(&disk).unwrap();
    let text = printed(&loaded.superblock, &loaded.contents);
    assert_eq!(text, marked.trim_start_matches('\u{FEFF}'));
    loaded.superblock.fields.uuid = *b"udm\x01567890123456";
    assert_eq!(printed(&loaded.superblock, &loaded.contents), TEXT, "binary is left out");
}

#[test]
fn what_is_wrong_in_a_text_has_a_line_and_a_column() {
    let cases = [
        ("", "<mappings>", "line 1, column 1: expected <superblock ...>"),
        ("block_size=\"128\"", "block_size=\"x\"", "line 1, column 21: block_size \"x\": expected"),
        (" block_size=\"128\"", "", "line 1, column 1: superblock without block_size"),
        ("\"1200\"", "\"4294967296\"", "nr_cache_blocks \"4294967296\": expected a number"),
        ("\"1200\"", "\"10001\"", "10001 blocks; the metadata device has room for 10000"),
        ("\"1200\"", "\"1199\"", "line 6, column 14: cache block 1199, but there are 1199"),
        ("hint_width=\"4\"", "hint_width=\"8\"", "hints of 8 bytes; only 4 are supported"),
        ("\"smq\"", "\"a name too long!\"", "a policy's name has 15 bytes at most"),
        ("uuid", "guid", "line 1, column 13: unknown attribute guid of superblock"),
        ("uuid=\"\"", "uuid=\"\" uuid=\"\"", "line 1, column 21: uuid is there twice"),
        ("uuid=\"\"", "uuid=\"a name that is long\"", "line 1, column 13: the uuid has 19 bytes"),
        ("\"7\" dirty", "\"5\" dirty", "cache blocks 0 and 600 both hold origin block 5"),
        ("cache_block=\"600\" o", "cache_block=\"1\" o", "cache block 1 is mapped twice"),
        ("\"1000000\"", "\"281474976710656\"", "expected a number of 0 to 281474976710655"),
        ("\"1000000\"", "\"-1\"", "line 6, column 33: origin_block \"-1\": expected"),
        ("dirty=\"true\"", "dirty=\"yes\"", "line 4, column 50: \"yes\": expected true or false"),
        ("AQAAAA==", "AQAAAA=", "line 9, column 27: \"AQAAAA=\": expected 4 bytes in base64"),
        ("AQAAAA==", "AQAAAB==", "\"AQAAAB==\": expected 4 bytes in base64"),
        ("AQAAAA==", "AQ-AAA==", "\"AQ-AAA==\": expected 4 bytes in base64"),
        ("  </hints>", "", "line 14, column 1: </superblock> where hints is open"),
        ("</superblock>", "", "superblock is not closed"),
        ("</superblock>", "</superblock><superblock/>", "more than one superblock"),
        ("<hints>", "<hints", "line 9, column 5: expected a name"),
        ("<hints>", "text <hints>", "line 8, column 3: expected an element"),
        ("<hints>", "<hint>", "hint within superblock; expected mappings or hints"),
        ("<hints>", "<!-- <hints>", "line 8, column 3: a comment without an end"),
        ("uuid=\"\"", "uuid=\"&x;\"", "line 1, column 19: an & that begins no known entity"),
        ("uuid=\"\"", "uuid=\"<", "line 1, column 13: uuid does not end"),
        ("uuid=\"\"", "uuid", "line 1, column 18: expected ="),
        ("\"\" block", "\"\"block", "line 1, column 20: expected a blank, > or />"),
    ];
    for (from, to, expected) in cases {
        let text = if from.is_empty() { to.to_owned() } else { TEXT.replacen(from, to, 1) };
        let error = parse(&text, 10_000).unwrap_err();
        assert!(error.to_string().contains(expected), "{expected}: {error}");
        assert!(error.place().is_some());
    }
    for end in 0..TEXT.len() - 1 {
        parse(&TEXT[..end], 10_000).unwrap_err();
    }
    let error = text_of(b"\xFF\xFE<\0").unwrap_err().to_string();
    assert!(error.starts_with("it is UTF-16"), "{error}");
    assert_eq!(text_of(b"ab\xFF").unwrap_err().to_string(), "byte 2: it is not UTF-8");
}

#[test]
fn hints_are_numbers_in_base64() {
    for hint in [0, 1, 63, 0x1234_5678, u32::MAX] {
        let text = base64(hint.to_le_bytes());
        assert_eq!(from_base64(&text), Some(hint.to_le_bytes()));
    }
    assert_eq!(base64(10_u32.to_le_bytes()), "CgAAAA==");
}
