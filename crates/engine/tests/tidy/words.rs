//! Phrases that strangers stumble over, in comments and documents, each with what to write instead.

use super::{documents, sources};

/// Each phrase stands between other words, in any case.
const BANNED: [(&str, &str); 28] = [
    ("a read more", "one more read"),
    ("all the same", "anyway, still"),
    ("anew", "again"),
    ("at once", "immediately; at the same time, as a unit"),
    ("behind", "after (in order), beyond (in place), below (in a stack); lags"),
    ("dear", "expensive"),
    ("for so long", "for this long"),
    ("he", "it"),
    ("him", "it"),
    ("himself", "itself"),
    ("his", "its"),
    ("in circles", "it spins"),
    ("in earnest", "in production"),
    ("is none that", "is not"),
    ("is told", "is woken, is shown, gets"),
    ("news again", "name the event"),
    ("nobody is to", "must not"),
    ("so many", "this many"),
    ("so much", "this much"),
    ("so often", "this often"),
    ("tells of", "reports, says"),
    ("that is none", "that is not one"),
    ("the when-th", "the order in which"),
    ("told of", "reported, said of"),
    ("what is with", "I/O in flight at, work of"),
    ("who asks", "the caller, the client"),
    ("who waits", "a thread that waits, a request that waits"),
    ("whoever", "the thread, the caller, the client"),
];

/// The comment of a line of Rust, without what stands in backquotes.
pub fn comment_of(line: &str) -> Option<String> {
    // A `//` after a colon is an address in a string.
    let at = line.match_indices("//").map(|(at, _)| at).find(|at| !line[..*at].ends_with(':'))?;
    Some(prose(line[at..].trim_start_matches(['/', '!'])))
}

/// The text outside of backquotes.
fn prose(text: &str) -> String {
    text.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// The lines of prose of a document; `None` for the others.
pub fn lines_of(text: &str) -> Vec<Option<String>> {
    let mut is_code = false;
    let of = |line: &str| {
        is_code ^= line.starts_with("```");
        (!is_code && !line.starts_with("    ")).then(|| prose(line))
    };
    text.lines().map(of).collect()
}

/// Whether `phrase` begins in the first `len` bytes of `text`, between other words.
fn has(text: &str, len: usize, phrase: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + phrase.len()..]);
        at < len && !before.ends_with(is_part) && !after.starts_with(is_part)
    })
}

/// The errors in these lines. A phrase may continue in the next one.
fn complaints(name: &str, lines: &[Option<String>]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (nth, line) in lines.iter().enumerate() {
        let Some(line) = line.as_deref().map(str::trim) else { continue };
        let next = lines.get(nth + 1).and_then(Option::as_deref).unwrap_or_default();
        let both = format!("{line} {}", next.trim()).to_ascii_lowercase();
        for (phrase, better) in BANNED {
            if has(&both, line.len(), phrase) {
                wrong.push(format!("{name}:{}: '{phrase}': write {better}", nth + 1));
            }
        }
    }
    wrong
}

#[test]
fn prose_is_plain() {
    let mut wrong = Vec::new();
    for (name, text) in sources() {
        if name.ends_with("tests/tidy/words.rs") {
            continue;
        }
        let lines: Vec<_> = text.lines().map(comment_of).collect();
        wrong.extend(complaints(&name, &lines));
    }
    for (name, text) in documents() {
        wrong.extend(complaints(&name, &lines_of(&text)));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn banned_phrases_are_found_where_they_stand_as_words() {
    let of = |text: &str| {
        let lines: Vec<_> = text.lines().map(comment_of).collect();
        complaints("x.rs", &lines)
    };
    assert_eq!(
        of("let a = 1; // At\n// once."),
        ["x.rs:1: 'at once': write immediately; at \
        the same time, as a unit"]
    );
    assert_eq!(of("let at_once = \"nbd://behind\"; // the cache, `behind`"), [""; 0]);
    assert_eq!(complaints("x.md", &lines_of("    he\n```\nhim\n```\nHis: a")).len(), 1);
}
