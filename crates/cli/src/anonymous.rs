//! Texts without names: paths, devices, hosts and addresses are replaced by numbers, the same name
//! by the same number.
//!
//! A name is a component of a path or of a URI, a network address, or one of the given names. Words
//! of udm, of the kernel's tables and of common folders stay, because a report without them cannot
//! be read. It is better to replace a harmless word than to leave a name.

use std::collections::BTreeSet;
use std::net::IpAddr;

/// Components that do not identify their owner.
const COMMON: [&str; 45] = [
    "block",
    "bus",
    "by-id",
    "by-label",
    "by-partuuid",
    "by-path",
    "by-uuid",
    "class",
    "conf",
    "cpu",
    "dev",
    "device",
    "devices",
    "disk",
    "etc",
    "fd",
    "home",
    "http",
    "https",
    "lib",
    "log",
    "mapper",
    "max",
    "metrics",
    "mnt",
    "nbd",
    "nbd+unix",
    "nbds",
    "nbds+unix",
    "opt",
    "proc",
    "root",
    "run",
    "self",
    "shm",
    "socket",
    "srv",
    "sys",
    "tmp",
    "ublk",
    "udm",
    "usr",
    "var",
    "vhost-user",
    "wipe",
];
/// Stands for an escaped space.
const JOINT: &str = "\u{1}";
/// Shorter components are not replaced.
const NAME_CHARS_MIN: usize = 2;

/// `text` with numbers in place of names; `own`: more names, such as the device's.
pub fn anonymous(text: &str, own: &[&str]) -> String {
    let mut names: BTreeSet<String> = own.iter().map(|name| (*name).to_owned()).collect();
    // In tables, spaces in paths are escaped, in JSON twice.
    let joined = text.replace("\\\\ ", JOINT).replace("\\ ", JOINT);
    for word in joined.split(is_separator) {
        let word = word.trim_end_matches(['.', ':']);
        if word.contains('/') || word.contains(JOINT) {
            names.extend(word.split(is_inside).filter(|part| is_name(part)).map(str::to_owned));
            // In other places, as in the log, the same path may stand unescaped.
            let whole = word.split(|c| is_inside(c) && !JOINT.contains(c));
            names.extend(whole.filter(|part| is_name(part)).map(|part| part.replace(JOINT, " ")));
        }
        names.extend(addresses(word).map(str::to_owned));
    }
    // Elsewhere, paths with spaces stand in quotes.
    let is_path = |words: &&str| words.starts_with('/') && !words.contains('\n');
    for path in text.split(['"', '\'']).filter(is_path) {
        let parts = path.split(|c| is_inside(c) || is_separator(c));
        names.extend(parts.filter(|part| is_name(part)).map(str::to_owned));
    }
    names.remove("");
    // A name may be a part of a longer one, which has to be replaced first.
    let mut names: Vec<String> = names.into_iter().collect();
    names.sort_by_key(|name| std::cmp::Reverse(name.len()));
    let mut text = text.to_owned();
    for (nth, name) in names.iter().enumerate() {
        text = replace_words(&text, name, &format!("NAME{}", nth + 1));
    }
    text
}

fn is_separator(c: char) -> bool {
    c.is_whitespace() || "\"'`,;()<>|{}\\".contains(c)
}

/// Whether `c` separates the parts of a path or a URI.
fn is_inside(c: char) -> bool {
    matches!(c, '/' | '?' | '&' | '@' | '=' | ':') || JOINT.contains(c)
}

fn is_name(part: &str) -> bool {
    let is_number = part.chars().all(|c| c.is_ascii_digit() || c == '.');
    part.len() >= NAME_CHARS_MIN && !is_number && !COMMON.contains(&part)
}

/// The network addresses in a word, which may have a port and stand in a URI.
fn addresses(word: &str) -> impl Iterator<Item = &str> {
    word.split(['/', '[', ']', '?', '=', '@']).filter_map(|part| {
        let host = part.rsplit_once(':').map_or(part, |(host, _)| host);
        [part, host].into_iter().find(|host| is_address(host))
    })
}

/// Whether it is an address, perhaps of one interface.
fn is_address(host: &str) -> bool {
    host.split('%').next().is_some_and(|address| address.parse::<IpAddr>().is_ok())
}

/// Replaces `name`, except inside a longer word.
fn replace_words(text: &str, name: &str, number: &str) -> String {
    let is_inner = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let (mut replaced, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(name) {
        let (before, after) = (&rest[..at], &rest[at + name.len()..]);
        let last = before.chars().next_back().or_else(|| replaced.chars().next_back());
        let is_word = !is_inner(last) && !is_inner(after.chars().next());
        replaced.push_str(before);
        replaced.push_str(if is_word { number } else { name });
        rest = after;
    }
    replaced + rest
}

#[cfg(test)]
mod tests {
    use super::anonymous;

    #[test]
    fn no_name_is_left_and_the_rest_can_be_read() {
        let text = "vol: 0 8 pcache /dev/mapper/secret--vg-fast /data/big\\\\ disk.img writeback\n\
                    also /srv/tall\\ (Ann\\ Lee).img '/opt/wide disk.img', [fe80::7%2]:9180\n\
                    export nbd://backup.example.org:10809/vol?socket=/run/udm/hidden.sock\n\
                    metrics 192.0.2.7:9180, [2001:db8::1]:9180; 512/1024 blocks, vol-2, volume";
        let text = format!("{text}\nlog: cannot read /data/big disk.img: I/O error");
        let done = anonymous(&text, &["vol", "myhost"]);
        let names = [
            "secret",
            "data",
            "big",
            "disk.img",
            "tall",
            "Ann",
            "Lee",
            "wide",
            "fe80",
            "backup",
            "example",
            "hidden",
            "192.0.2.7",
            "2001:db8",
        ];
        for name in names {
            assert!(!done.contains(name), "{name}: {done}");
        }
        for word in
            ["pcache", "writeback", "/dev/mapper/", "/run/udm/", "512/1024", "volume", ":9180"]
        {
            assert!(done.contains(word), "{word}: {done}");
        }
        assert!(!done.contains("vol:") && !done.contains("vol-2"), "{done}");
        let first = done.split(':').next().unwrap();
        assert!(done.contains(&format!("/{first}?socket=")), "one number for one name: {done}");
    }

    #[test]
    fn any_text_is_taken() {
        assert_eq!(anonymous("", &[""]), "");
        assert_eq!(anonymous("//", &[]), "//");
        assert_eq!(anonymous("x /\u{e4}\u{f6}/x", &["x"]), "NAME2 /NAME1/NAME2");
        assert_eq!(anonymous("aa/aab/aa", &[]), "NAME2/NAME1/NAME2");
    }
}
