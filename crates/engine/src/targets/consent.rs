//! Options by which a user allows something for one attach: to take another disk, or to accept a
//! loss. The attach uses them up, so no table that udm prints or stores has them.

use crate::table::{Table, TableLine};

/// The table without the options that hold for one attach.
pub fn without_consents(table: &Table) -> Table {
    let mut table = table.clone();
    table.lines.iter_mut().for_each(remove);
    table
}

/// Removes them from a line.
pub(super) fn remove(line: &mut TableLine) {
    let Some(kind) = super::find(&line.target.text) else { return };
    let Some(cache) = &kind.cache else { return };
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
        for (line, left) in [
            ("pcache C B 0 rebind true", "pcache C B 0"),
            ("pcache C B 4 rebind true data_crc true", "pcache C B 2 data_crc true"),
            (
                "pcache C B 4 data_crc true log_damage truncate max_age 5",
                "pcache C B 2 data_crc true max_age 5",
            ),
            (
                "pcache C B 2 data_crc true max_age 5 rebind true",
                "pcache C B 2 data_crc true max_age 5",
            ),
            (
                "pcache C B 2 data_crc true lost_memory accept max_age 5",
                "pcache C B 2 data_crc true max_age 5",
            ),
            ("pcache rebind lost_memory 0 rebind false", "pcache rebind lost_memory 0"),
            (
                "writecache s O C 4096 1 cleaner lost_memory accept atomic_blocks true rebind true",
                "writecache s O C 4096 1 cleaner atomic_blocks true",
            ),
            ("writecache s O C 4096 0 lost_entries accept", "writecache s O C 4096 0"),
            (
                "cache M C O 64 1 writeback smq 2 migration_threshold 9 rebind true",
                "cache M C O 64 1 writeback smq 2 migration_threshold 9",
            ),
            ("cache M C O 64 0 smq 0", "cache M C O 64 0 smq 0"),
            ("linear rebind 0", "linear rebind 0"),
        ] {
            let table = Table::parse(&format!("0 8 {line}")).unwrap();
            let found = without_consents(&table).to_string();
            assert_eq!(found.trim_end(), format!("0 8 {left}"));
            Table::parse(&found).unwrap();
        }
    }
}
