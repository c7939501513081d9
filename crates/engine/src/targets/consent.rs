//! Options by which a user allows something for one attach: to take another disk, or to accept a
//! loss. The attach uses them up, so no table that udm prints or stores has them. A read-only table
//! keeps them, because it records no attach.

use super::WordRole;
use crate::table::{Table, TableLine};

/// The table without the options that hold for one attach.
pub fn without_consents(table: &Table) -> Table {
    let mut table = table.clone();
    table.lines.iter_mut().for_each(remove);
    table
}

/// Removes them from a line.
fn remove(line: &mut TableLine) {
    let Some(kind) = super::find(&line.target.text) else { return };
    let Some(cache) = &kind.cache else { return };
    let mut origins = kind.places(&[WordRole::Origin]).filter_map(|nth| line.args.get(nth));
    if origins.any(|word| word.device().is_ok_and(|device| device.options.is_read_only)) {
        return;
    }
    let counted_at = cache.consents_are_counted_at;
    let mut at = kind.roles.len();
    while at + 1 < line.args.len() {
        if !cache.consents.contains(&line.args[at].text.as_str()) {
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
}
