//! Options by which a user allows something once: to take another disk, or to accept a loss. The
//! attach uses most of them up, so no table that udm prints or stores has them. A read-only table
//! keeps them, because it records no attach; and a damaged log is met by each attach until udm has
//! written to the log again. A configuration file must have none of them.

use super::{CacheType, TargetType, WordRole};
use crate::table::{Table, TableLine, Word};

/// Values that are not a consent.
const REFUSALS: [&str; 2] = ["false", "refuse"];

/// Something that a user allows once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consent {
    /// Another disk than the cache knows.
    Rebind,
    /// The loss of data that the cache cannot return.
    Loss,
}

/// The table without the options that hold for one attach.
pub fn without_consents(table: &Table) -> Table {
    let mut table = table.clone();
    for line in &mut table.lines {
        if let Some((kind, cache)) = cache_of(line).filter(|(kind, _)| !is_read_only(line, kind)) {
            remove(line, kind, cache, &|name| cache.consents.contains(&name));
        }
    }
    table
}

/// The table without any option by which a user allows something.
pub fn without_all_consents(table: &Table) -> Table {
    let mut table = table.clone();
    for line in &mut table.lines {
        if let Some((kind, cache)) = cache_of(line) {
            remove(line, kind, cache, &|name| consent_of(cache, name).is_some());
        }
    }
    table
}

/// The first option of the table that allows something, with its value.
pub fn find_consent(table: &Table) -> Option<(Consent, &Word, &Word)> {
    table.lines.iter().find_map(|line| {
        let (kind, cache) = cache_of(line)?;
        let mut options = line.args.get(kind.roles.len()..)?.windows(2);
        options.find_map(|pair| {
            let consent = consent_of(cache, &pair[0].text)?;
            let allows = !REFUSALS.contains(&pair[1].text.as_str());
            allows.then_some((consent, &pair[0], &pair[1]))
        })
    })
}

/// Adds the options that give this consent to each cache of the table. False if no cache has such
/// an option.
pub fn add_consent(table: &mut Table, consent: Consent) -> bool {
    let mut has_one = false;
    for line in &mut table.lines {
        let Some((kind, cache)) = cache_of(line) else { continue };
        let options = options_for(cache, consent);
        if options.is_empty() {
            continue;
        }
        has_one = true;
        remove(line, kind, cache, &|name| consent_of(cache, name) == Some(consent));
        // The first word after the devices is the number of options that follow it.
        if cache.consents_are_counted_at == Some(line.args.len()) {
            line.args.push(Word::new("0"));
        }
        line.args.extend(options.iter().flat_map(|option| Word::list(option)));
    }
    has_one
}

fn cache_of(line: &TableLine) -> Option<(&'static TargetType, &'static CacheType)> {
    let kind = super::find(&line.target.text)?;
    Some((kind, kind.cache.as_ref()?))
}

fn is_read_only(line: &TableLine, kind: &TargetType) -> bool {
    let mut origins = kind.places(&[WordRole::Origin]).filter_map(|nth| line.args.get(nth));
    origins.any(|word| word.device().is_ok_and(|device| device.options.is_read_only))
}

/// The consent that the option `name` gives, if it gives one.
fn consent_of(cache: &CacheType, name: &str) -> Option<Consent> {
    let accepts_damage = cache.words_to_accept_damage.split(' ').next() == Some(name);
    match name {
        "rebind" if cache.consents.contains(&name) => Some(Consent::Rebind),
        _ if accepts_damage || cache.consents.contains(&name) => Some(Consent::Loss),
        _ => None,
    }
}

/// The options that give a consent, with their values.
fn options_for(cache: &CacheType, consent: Consent) -> Vec<String> {
    let damage = cache.words_to_accept_damage;
    let of_attach = cache.consents.iter().filter(|name| consent_of(cache, name) == Some(consent));
    let is_other = |name: &&&str| damage.split(' ').next() != Some(**name);
    match consent {
        Consent::Rebind => of_attach.map(|name| format!("{name} true")).collect(),
        Consent::Loss => {
            let others = of_attach.filter(is_other).map(|name| format!("{name} accept"));
            others.chain((!damage.is_empty()).then(|| damage.to_owned())).collect()
        }
    }
}

/// Removes the options of a line whose names `is_meant` accepts, with their values.
fn remove(
    line: &mut TableLine,
    kind: &TargetType,
    cache: &CacheType,
    is_meant: &dyn Fn(&str) -> bool,
) {
    let counted_at = cache.consents_are_counted_at;
    let mut at = kind.roles.len();
    while at + 1 < line.args.len() {
        if !is_meant(&line.args[at].text) {
            at += 1;
            continue;
        }
        line.args.drain(at..at + 2);
        let Some(count) = counted_at.and_then(|place| line.args.get_mut(place)) else { continue };
        let counted = count.text.parse::<usize>().unwrap_or(0);
        if at < counted_at.unwrap_or(0) + 1 + counted {
            count.text = counted.saturating_sub(2).to_string();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_a_line_stays() {
        let with_crc = "pcache C B 2 data_crc true max_age 5";
        let policy = "cache M C O 64 1 writeback smq 2 migration_threshold 9";
        let disk = "writecache s O C 4096 1 cleaner";
        let atomic = &format!("{disk} atomic_blocks true");
        for (line, left) in [
            ("pcache C B 0 rebind true", "pcache C B 0"),
            ("pcache C B 4 rebind true data_crc true max_age 5", with_crc),
            ("pcache C B 0 log_damage truncate", "pcache C B 0 log_damage truncate"),
            (
                "pcache C?readonly B?readonly 0 rebind true",
                "pcache C?readonly B?readonly 0 rebind true",
            ),
            ("pcache C B 2 data_crc true max_age 5 rebind true", with_crc),
            ("pcache C B 2 data_crc true lost_memory accept max_age 5", with_crc),
            ("pcache rebind lost_memory 0 rebind false", "pcache rebind lost_memory 0"),
            (&format!("{disk} lost_memory accept atomic_blocks true rebind true"), atomic),
            (&format!("{disk} lost_entries accept"), disk),
            (&format!("{policy} rebind true"), policy),
            (policy, policy),
            ("linear rebind 0", "linear rebind 0"),
        ] {
            let table = Table::parse(&format!("0 8 {line}")).unwrap();
            let found = without_consents(&table).to_string();
            assert_eq!(found.trim_end(), format!("0 8 {left}"));
            Table::parse(&found).unwrap();
        }
    }

    #[test]
    fn consents_are_found_removed_and_added() {
        let disk = "writecache s O C 4096 1 cleaner";
        let table = |line: &str| Table::parse(&format!("0 8 {line}")).unwrap();
        let text = |table: &Table| table.to_string().trim_end()["0 8 ".len()..].to_owned();
        for (line, found, left) in [
            ("pcache C B 0 log_damage truncate", Some(Consent::Loss), "pcache C B 0"),
            ("pcache C B 2 log_damage truncate max_age 5", Some(Consent::Loss), "0 max_age 5"),
            ("pcache C B 0 log_damage refuse", None, "pcache C B 0"),
            ("pcache C?readonly B?readonly 0 rebind true", Some(Consent::Rebind), "readonly 0"),
            ("cache M C O 64 1 writeback smq 0 rebind false", None, "smq 0"),
            ("writecache s O C 4096 0 lost_entries accept", Some(Consent::Loss), "4096 0"),
            ("linear rebind 0", None, "linear rebind 0"),
        ] {
            let table = table(line);
            assert_eq!(find_consent(&table).map(|(consent, ..)| consent), found, "{line}");
            let rest = without_all_consents(&table);
            assert!(text(&rest).ends_with(left) && find_consent(&rest).is_none(), "{line}");
            crate::build::check(&rest).unwrap();
        }
        let loss = "lost_memory accept log_damage truncate";
        for (line, consent, added) in [
            ("pcache C B", Consent::Rebind, Some("pcache C B 0 rebind true".to_owned())),
            ("pcache C B 2 rebind false", Consent::Rebind, Some("pcache C B 0 rebind true".into())),
            ("pcache C B", Consent::Loss, Some(format!("pcache C B 0 {loss}"))),
            (disk, Consent::Rebind, Some(format!("{disk} rebind true"))),
            (disk, Consent::Loss, Some(format!("{disk} lost_memory accept lost_entries accept"))),
            ("cache M C O 64 0 smq 0", Consent::Loss, None),
            ("linear D 0", Consent::Rebind, None),
        ] {
            let mut table = table(line);
            assert_eq!(add_consent(&mut table, consent), added.is_some(), "{line}");
            assert_eq!(text(&table), added.unwrap_or_else(|| line.into()));
            crate::build::check(&table).unwrap();
        }
    }
}
