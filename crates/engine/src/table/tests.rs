//! Tests of this folder.

use proptest::prelude::*;

use super::*;
use crate::disk::{IoMode, ReadMode};
use crate::pmem::Persistence;

fn message(text: &str) -> String {
    Table::parse(text).unwrap_err().to_string()
}

fn drawing(text: &str) -> String {
    pointer(text, &Table::parse(text).unwrap_err()).unwrap()
}

#[test]
fn reads_what_the_manual_shows() {
    let table = Table::parse(
        "# A table to join two disks together\n0 1028160 linear /dev/hda 0\n\n   # more\n\
         \t1028160 3903762\tlinear /dev/hdb 0 # the rest\r\n",
    )
    .unwrap();
    assert_eq!(table.lines.len(), 2);
    assert_eq!(table.len_sectors(), 4_931_922);
    assert_eq!(table.lines[1].args, [Word::new("/dev/hdb"), Word::new("0")]);
    assert_eq!(table.lines[1].target.line, 5);
    assert_eq!(table.lines[1].target.column, 18);
    assert_eq!(
        table.to_string(),
        "0 1028160 linear /dev/hda 0\n1028160 3903762 linear /dev/hdb 0\n"
    );
}

#[test]
fn a_backslash_quotes_and_a_hash_ends_the_line() {
    let table = Table::parse(r"0 8 linear /my\ disk\\s\#1 0 #end").unwrap();
    assert_eq!(table.lines[0].args, [Word::new(r"/my disk\s#1"), Word::new("0")]);
    assert_eq!(table.to_string(), "0 8 linear /my\\ disk\\\\s\\#1 0\n");
    for text in ["0 8 linear /data/a#b 0", "0 8 linear /data/a 0#end"] {
        let said = message(text);
        assert!(said.contains("a comment would begin here") && said.contains(r"`\#`"), "{said}");
    }
    assert_eq!(drawing("0 8 linear /a#b 0"), "0 8 linear /a#b 0\n             ^");
    // As in the kernel, a last backslash is ignored.
    assert_eq!(Table::parse("0 8 linear a\\").unwrap().lines[0].args, [Word::new("a\\")]);
    assert_eq!(Table::parse("+0 +8 zero").unwrap().to_string(), "0 8 zero\n");
    // The first three words are not arguments.
    assert_eq!(Table::parse("0 8 ze\\#ro").unwrap().lines[0].target.text, "ze\\#ro");
}

#[test]
fn errors_say_what_and_where() {
    let cases = [
        ("", "the table is empty: expected `start length target arguments`"),
        ("# only\n \n", "the table is empty: expected `start length target arguments`"),
        (
            "0x10 8 zero",
            "table line 1, column 1: `0x10`: the start sector is a plain decimal number",
        ),
        (
            "0 -8 zero",
            "table line 1, column 3: `-8`: the length in sectors is a plain decimal number",
        ),
        ("0", "table line 1, column 2: the length in sectors is missing after this (`0`)"),
        ("0 8 ", "table line 1, column 4: the target's name is missing after this (`8`)"),
        ("0 0 zero", "table line 1, column 3: `0`: zero-length target"),
        ("8 8 zero", "table line 1, column 1: `8`: Gap in table: this line must start at sector 0"),
        (
            "0 8 zero\n\n 7 8 zero",
            "table line 3, column 2: `7`: Gap in table (overlap): this line must start at sector 8",
        ),
        (
            "0 18446744073709551616 zero",
            "table line 1, column 3: `18446744073709551616`: the length in sectors is too large",
        ),
        ("0 8 linear \u{1}", "table line 1, column 12: a control character in a table"),
        (
            "0 8 a-target-of-16-b",
            "table line 1, column 5: `a-target-of-16-b`: a target's name has at most 15 characters",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(message(text), expected, "{text:?}");
        assert_eq!(Table::parse(text).unwrap_err().kind(), Kind::Invalid);
    }
    assert_eq!(
        Table::parse_bytes(b"0 8 zero\n8 \xff zero").unwrap_err().to_string(),
        "table line 2, column 3: not UTF-8 text"
    );
    let most = TABLE_SECTORS_MAX;
    assert!(Table::parse(&format!("0 {most} zero")).is_ok());
    assert!(message(&format!("0 {most} zero\n{most} 1 zero")).contains("too long"));
}

#[test]
fn the_caret_stands_under_the_word() {
    assert_eq!(drawing("0 8 zero\n\t9 8  zero"), " 9 8  zero\n ^");
    assert_eq!(
        drawing("0 80000000000000000000 zero"),
        "0 80000000000000000000 zero\n  ^^^^^^^^^^^^^^^^^^^^"
    );
    assert_eq!(drawing("0 8\r"), "0 8\n   ^");
    // Quoted words are as wide as they are written.
    let text = r"0 8 linear a\ b\\c?io=slow";
    let table = Table::parse(text).unwrap();
    let error = table.lines[0].args[0].device().unwrap_err();
    assert_eq!(pointer(text, &error).unwrap(), format!("{text}\n           ^^^^^^^^^^^^^^^"));
    // Errors without a place are not drawn.
    assert_eq!(pointer("", &Table::parse("").unwrap_err()), None);
}

#[test]
fn limits_hold() {
    let words = "w ".repeat(LINE_WORDS_MAX);
    assert!(Table::parse(&format!("0 8 zero {words}")).is_ok());
    assert!(message(&format!("0 8 zero {words} w")).contains("more than 256 arguments"));
    let lines = |count: usize| (0..count).map(|n| format!("{n} 1 zero\n")).collect::<String>();
    assert!(Table::parse(&lines(TABLE_LINES_MAX)).is_ok());
    assert!(message(&lines(TABLE_LINES_MAX + 1)).contains("more than 4096 targets"));
    assert!(message(&" ".repeat(TABLE_BYTES_MAX + 1)).contains("at most 262144"));
}

#[test]
fn device_words_carry_options() {
    let parse = |text: &str| Word::new(text).device();
    let plain = parse("/data/slow.img").unwrap();
    assert_eq!((plain.path.as_str(), plain.options), ("/data/slow.img", DeviceOptions::default()));
    let both = parse("/x?persist=msync&io=dontcache").unwrap();
    assert_eq!(both.path, "/x");
    assert_eq!(both.options.io, Some(IoMode::DontCache));
    assert_eq!(both.options.persist, Some(Persistence::Msync));
    // A question mark that no option follows belongs to the name.
    assert_eq!(parse("/what?").unwrap().path, "/what?");
    assert_eq!(parse("/what?now").unwrap().path, "/what?now");
    assert_eq!(parse("/odd?io=direct?io=buffered").unwrap().path, "/odd?io=direct");
    assert_eq!(
        parse("/x?io=fast").unwrap_err().to_string(),
        "`/x?io=fast`: io=fast: expected direct, buffered, dontcache or lazy"
    );
    let lazy = parse("/x?io=lazy,read=buffered&window=8M").unwrap().options;
    assert_eq!((lazy.io, lazy.reads), (Some(IoMode::Lazy), ReadMode::Buffered));
    assert_eq!(lazy.window, Some(8 << 20));
    for (wrong, why) in [
        ("io=lazy,read=direct", "only read=buffered can follow the comma"),
        ("io=direct,read=buffered", "only lazy has a separate read mode"),
        ("io=direct&window=8M", "window is for io=lazy"),
        ("window=8M", "window is for io=lazy"),
        ("io=lazy&window=512K", "expected whole KiB from 1M to 4096M"),
        ("io=lazy&window=5G", "expected whole KiB from 1M to 4096M"),
        ("io=lazy&window=3001", "expected whole KiB from 1M to 4096M"),
        ("io=lazy&window=", "window="),
        ("io=lazy&io=direct", "io=direct: it is given twice"),
        ("offset=0&size=8&offset=8", "offset=8: it is given twice"),
        ("readonly&io=direct&readonly", "readonly: it is given twice"),
    ] {
        let error = parse(&format!("/x?{wrong}")).unwrap_err().to_string();
        assert!(error.contains(why), "{wrong}: {error}");
    }
    assert!(parse("/x?speed=9").unwrap_err().to_string().contains("unknown option speed"));
    assert!(parse("/x?persist=").unwrap_err().to_string().contains("expected cpu or msync"));
    assert!(parse("?io=direct").unwrap_err().to_string().contains("path is missing"));
}

fn any_table() -> impl Strategy<Value = Table> {
    let word = "[^\\p{C}\\s]([^\\p{C}]{0,12})".prop_map(Word::new);
    let target = "[a-z][a-z0-9_-]{0,14}".prop_map(Word::new);
    let line = (1..1u64 << 40, target, prop::collection::vec(word, 0..6));
    prop::collection::vec(line, 1..8).prop_map(|lines| {
        let mut start = 0;
        let mut table = Table { lines: Vec::new() };
        for (len, target, args) in lines {
            table.lines.push(TableLine { start, len, target, args });
            start += len;
        }
        table
    })
}

proptest! {
    #[test]
    fn what_is_printed_is_read_back(table in any_table()) {
        prop_assert_eq!(Table::parse(&table.to_string()).unwrap(), table);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Table::parse_bytes(&bytes);
    }

    #[test]
    fn near_misses_never_panic(text in "([0-9#\\\\ \t\nlinear/?=&\u{e9}\u{1}]{0,12}[ \n]){0,10}") {
        match Table::parse(&text) {
            Ok(table) => {
                prop_assert_eq!(Table::parse(&table.to_string()).unwrap(), table.clone());
                for word in table.lines.iter().flat_map(|line| &line.args) {
                    let _ = word.device();
                }
            }
            Err(error) => {
                let _ = pointer(&text, &error);
            }
        }
    }
}

#[test]
fn a_word_is_cut_into_parts() {
    let part = |text: &str, start, len| Word::new(text).device().unwrap().part(start, len).text;
    assert_eq!(part("/d", 0, 4096), "/d?size=8");
    assert_eq!(part("/d?io=direct&offset=8&size=1G", 4096, 8192), "/d?io=direct&offset=16&size=16");
    assert_eq!(part("/what?", 4096, 4096), "/what??offset=8&size=8");
    let word = part("/what?", 4096, 4096);
    assert_eq!(Word::new(word).device().unwrap().path, "/what?");
}
