//! Sentence patterns that docs/style-english.md advises against, counted in the comments and
//! documents of each folder. A folder has a budget, which may only shrink.

use std::collections::BTreeMap;

use super::words::{comment_of, lines_of};
use super::{documents, sources};

/// Hits that each folder may have. Lower a number when its folder has fewer hits.
const BUDGETS: [(&str, usize); 19] = [
    (".", 2),
    ("crates/bench", 9),
    ("crates/cli", 10),
    ("crates/engine/src/cache", 14),
    ("crates/engine/src/device", 3),
    ("crates/engine/src/pcache", 7),
    ("crates/engine/src/pmem", 2),
    ("crates/engine/src/queue", 1),
    ("crates/engine/src/ring", 2),
    ("crates/engine/src/shm", 2),
    ("crates/engine/src/writecache", 2),
    ("crates/engine/tests/cache", 1),
    ("crates/engine/tests/explore", 8),
    ("crates/engine/tests/pcache", 4),
    ("crates/engine/tests/simulate", 4),
    ("crates/engine/tests/writecache", 1),
    ("crates/export", 7),
    ("docs", 5),
    ("docs/decisions", 11),
];

/// The test prints a new budget for a folder that is further below its old one than this.
const SLACK: usize = 0;

const LINKS: &str = "of to and or is with in by from for on that than";
const QUESTIONS: &str = "what who whoever whatever";
const VERBS: &str = "is are was were has have had goes comes stands lies stays needs may can \
                     cannot must does did it they a the one no nobody udm client clients other \
                     others";
const DETERMINERS: &str = "a an the each all its what these those them it";
const DATA: &str = "data block blocks key keys segment segments bytes sector sectors it they";
const MOVES: &str = "come comes goes stand stands lie lies leave leaves";

/// Patterns of words that follow each other. Words in one string are alternatives; `*` is any
/// word, and a string that begins with `!` is any word but these.
const PATTERNS: [&[&str]; 26] = [
    &["is are was were", "said told"],
    &["say says", "so which that whether what how where who"],
    &["hear hears", "of"],
    &["heard"],
    &["is are was were has have", "no", "!more longer such"],
    &["nobody nothing somebody whoever"],
    &["also", "if"],
    &["go goes", "on", "with"],
    &["go", "on", "where"],
    &["goes", "on"],
    &["at", "hand"],
    &["by", "and", "by"],
    &["for", "ever"],
    &["beside", "it that them the a each"],
    &["besides", ","],
    &["in", "vain"],
    &["as", "it", "is"],
    &["is", "over"],
    &["come comes", "alive"],
    &[",", "too", ". , ;"],
    &[DATA, MOVES],
    &["that those", "of", "the a an its other others"],
    &[LINKS, QUESTIONS, VERBS],
    &[LINKS, QUESTIONS, "*", VERBS],
    &["^ . : ; , (", QUESTIONS, VERBS],
    &["^ . : ; , (", QUESTIONS, "*", VERBS],
];

/// The words and punctuation marks of a line, after the mark `^` of its beginning.
fn tokens(line: &str) -> Vec<String> {
    let mut found = vec!["^".to_string()];
    let mut is_in_word = false;
    for c in line.chars() {
        let is_part = c.is_alphanumeric() || "'_-`".contains(c);
        if is_part && is_in_word {
            found.last_mut().unwrap().push(c);
        } else if !c.is_whitespace() {
            found.push(c.to_string());
        }
        is_in_word = is_part;
    }
    found
}

fn is_match(token: &str, allowed: &str) -> bool {
    let is_word = token.starts_with(|c: char| c.is_alphanumeric());
    match allowed.strip_prefix('!') {
        Some(others) => is_word && !others.split(' ').any(|word| token.eq_ignore_ascii_case(word)),
        None if allowed == "*" => is_word,
        None => allowed.split_whitespace().any(|word| token.eq_ignore_ascii_case(word)),
    }
}

/// Whether a sentence begins with `Of` and a noun, and its subject follows after a comma.
fn is_fronted(tokens: &[String]) -> bool {
    let [start, of, determiner, rest @ ..] = tokens else { return false };
    let end = rest.iter().take(12).find(|token| is_match(token, ". ,"));
    is_match(start, "^ . : ;")
        && of == "Of"
        && is_match(determiner, DETERMINERS)
        && end.is_some_and(|token| token == ",")
}

/// How often the patterns begin in `line`. Patterns that begin at one word count once.
fn hits(line: &str) -> usize {
    let tokens = tokens(line);
    let begins = |at: &usize| {
        let rest = &tokens[*at..];
        let fits = |pattern: &&&[&str]| {
            rest.len() >= pattern.len()
                && pattern.iter().zip(rest).all(|(allowed, token)| is_match(token, allowed))
        };
        is_fronted(rest) || PATTERNS.iter().any(|pattern| fits(&pattern))
    };
    (0..tokens.len()).filter(begins).count()
}

/// The folder that a file's hits count for: `crates/engine/src/pcache`, `crates/cli`, `docs`.
fn folder_of(name: &str) -> String {
    let folders: Vec<&str> = name.split('/').collect();
    let depth = if name.starts_with("crates/engine/") { 4 } else { 2 };
    let depth = depth.min(folders.len() - 1);
    if depth == 0 { ".".to_string() } else { folders[..depth].join("/") }
}

/// The hits of each folder, and their places.
fn counted() -> BTreeMap<String, Vec<String>> {
    let sources = sources().into_iter().map(|(name, text)| {
        let lines: Vec<_> = text.lines().map(comment_of).collect();
        (name, lines)
    });
    let documents = documents().into_iter().map(|(name, text)| (name, lines_of(&text)));
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, lines) in sources.chain(documents) {
        if name.ends_with("tidy/style.rs") || name.ends_with("tidy/words.rs") {
            continue;
        }
        let places = found.entry(folder_of(&name)).or_default();
        for (nth, line) in lines.iter().enumerate() {
            let line = line.as_deref().unwrap_or_default().trim();
            let place = format!("{name}:{}: {line}", nth + 1);
            places.extend(std::iter::repeat_n(place, hits(line)));
        }
    }
    found
}

#[test]
fn each_folder_keeps_its_budget_of_foreign_patterns() {
    let mut wrong = Vec::new();
    for (folder, places) in counted() {
        let budget = BUDGETS.iter().find(|(name, _)| *name == folder).map_or(0, |(_, most)| *most);
        let count = places.len();
        if count > budget {
            let shown = places[..count.min(20)].join("\n  ");
            wrong.push(format!(
                "{folder} has {count} hits, and its budget is {budget}. See \
                 docs/style-english.md and mend {} of these:\n  {shown}",
                count - budget
            ));
        } else if count + SLACK < budget {
            println!("{folder}: lower its budget in tidy/style.rs from {budget} to {count}");
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn budgets_name_folders_that_exist() {
    let counted = counted();
    for (folder, _) in BUDGETS {
        assert!(counted.contains_key(folder), "{folder} has no files: remove its budget");
    }
}

#[test]
fn patterns_are_found_and_plain_sentences_are_not() {
    let foreign = [
        "What it lacks is read by the background.",
        "It waits for what the disk has.",
        "Of each fill its sectors are known, and more.",
        "A failed flush is said to each.",
        "That is no state.",
        "Nobody waits.",
        "It works also if the disk is full.",
        "That is a block, too.",
        "A block comes with its data.",
        "Its length and that of the file.",
    ];
    for line in foreign {
        assert_eq!(hits(line), 1, "{line}");
    }
    let plain = [
        "The background reads the missing sectors.",
        "It is no longer open, and has no more data.",
        "udm reports which block the client wrote.",
        "Half of the blocks, which are dirty, are written back.",
        "The cache continues even if the disk is full.",
    ];
    for line in plain {
        assert_eq!(hits(line), 0, "{line}");
    }
}
