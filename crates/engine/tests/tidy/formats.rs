//! Whether docs/formats.md describes the bytes that the code writes: the fields of its tables, with
//! their places and sizes, the words of shared memory, and magic numbers and versions.

use std::collections::BTreeMap;

use super::root;

/// Sizes of the types that fields have, in bytes.
const TYPES: [(&str, usize); 8] = [
    ("u8", 1),
    ("U16", 2),
    ("U32", 4),
    ("U64", 8),
    ("Header", 8),
    ("BadRange", 16),
    ("CacheInfo", 24),
    ("Label", 32),
];

fn source(file: &str) -> String {
    let path = root().join("crates/engine/src").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tables of the document that have a mark of this kind: the mark's text, and their rows.
fn tables(kind: &str) -> Vec<(String, Vec<Vec<String>>)> {
    let text = std::fs::read_to_string(root().join("docs/formats.md")).unwrap();
    let begin = format!("<!-- {kind}");
    let tables = text.split(&begin).skip(1).map(|rest| {
        let (mark, rest) = rest.split_once(" -->\n").unwrap();
        let rows = rest.lines().skip(2).take_while(|line| line.starts_with('|'));
        let cells = |row: &str| {
            let cells = row.trim_matches('|').split(" | ");
            cells.map(|cell| cell.trim().trim_matches('`').to_owned()).collect()
        };
        (mark.trim_start_matches(": ").to_owned(), rows.map(cells).collect())
    });
    tables.collect()
}

/// The constants of a file, as written in the code.
fn constants(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let line = line.trim_start_matches("pub(super) ").trim_start_matches("pub ");
        let Some((name, rest)) = line.strip_prefix("const ").and_then(|l| l.split_once(": "))
        else {
            continue;
        };
        if let Some((value, _)) = rest.split_once(" = ").and_then(|(_, r)| r.split_once(';')) {
            found.insert(name.to_owned(), value.to_owned());
        }
    }
    found
}

/// The fields of a structure in a file: their names and sizes.
fn fields(text: &str, name: &str) -> Vec<(String, usize)> {
    let constants = constants(text);
    let size = |of: &str| -> usize {
        let known = |of: &str| TYPES.iter().find(|(name, _)| *name == of).map(|(_, size)| *size);
        let array = of.trim_matches(['[', ']']).split_once("; ").map(|(of, count)| {
            let count = constants.get(count).map_or(count, String::as_str);
            known(of).unwrap() * count.parse::<usize>().unwrap()
        });
        array.or_else(|| known(of)).unwrap_or_else(|| panic!("a field of the type {of}"))
    };
    let plain = text.split_once(&format!("struct {name} {{\n"));
    let (_, body) = plain.or_else(|| text.split_once(&format!(" {name}, "))).unwrap();
    let lines = body.lines().skip_while(|line| line.contains(", {"));
    let lines = lines.take_while(|line| !line.trim_start().starts_with('}'));
    let fields = lines.filter(|line| !line.trim_start().starts_with("//")).filter_map(|line| {
        let line = line.trim().trim_start_matches("pub ").trim_end_matches(',');
        let (name, of) = line.split_once(": ")?;
        Some((name.to_owned(), size(of.split(" = ").next().unwrap())))
    });
    fields.collect()
}

#[test]
fn formats_have_the_fields_of_the_code() {
    let tables = tables("struct");
    assert_eq!(tables.len(), 8);
    for (mark, rows) in tables {
        let (file, name) = mark.split_once(' ').unwrap();
        let fields = fields(&source(file), name);
        assert_eq!(fields.len(), rows.len(), "{mark}");
        let mut at = 0;
        for ((field, size), row) in fields.into_iter().zip(rows) {
            let expected = [at.to_string(), size.to_string(), field];
            assert_eq!(row[..3], expected, "{mark} in docs/formats.md");
            at += size;
        }
    }
}

#[test]
fn formats_have_the_words_of_the_code() {
    let tables = tables("words");
    assert_eq!(tables.len(), 2);
    for (file, rows) in tables {
        let known = constants(&source(&file));
        let words = known.iter().filter(|(name, _)| name.starts_with("WORD_"));
        let mut words: Vec<_> = words.map(|(name, at)| [at.clone(), name.clone()]).collect();
        words.sort_by_key(|[at, _]| at.parse::<u32>().unwrap());
        let rows: Vec<_> = rows.into_iter().map(|row| [row[0].clone(), row[1].clone()]).collect();
        assert_eq!(rows, words, "{file} in docs/formats.md");
    }
}

#[test]
fn formats_have_the_constants_of_the_code() {
    let tables = tables("constants");
    let [(_, rows)] = &tables[..] else { panic!("docs/formats.md has one table of constants") };
    assert!(rows.len() > 30);
    for row in rows {
        let known = constants(&source(&row[0]));
        assert_eq!(known.get(&row[1]), Some(&row[2]), "{} of {} in the code", row[1], row[0]);
    }
}
