//! The last bytes of an origin that no block of a device reaches.

use std::path::Path;

use super::SystemOpener;
use crate::device::LoadedTable;
use crate::disk::end_of;
use crate::table::{DeviceWord, Table};
use crate::targets::{self, Opener, WordRole};
use crate::units::SECTOR;

/// Facts about the origins of a table that was made with real devices, for the user: one sentence
/// for each whose last bytes are less than a block of the device, and therefore left out. A line
/// that ends earlier was meant to.
pub fn left_out(table: &Table, loaded: &LoadedTable) -> Vec<String> {
    let block = u64::from(loaded.limits().block_bytes);
    let mut notes = Vec::new();
    for line in &table.lines {
        let Some(kind) = targets::find(&line.target.text) else { continue };
        for nth in kind.places(&[WordRole::Origin]) {
            let device = line.args.get(nth).and_then(|word| word.device().ok());
            let offset = kind.places(&[WordRole::Offset]).find(|offset| *offset == nth + 1);
            let offset = offset.and_then(|nth| line.args.get(nth)?.text.parse::<u64>().ok());
            let end = offset.unwrap_or(0).saturating_add(line.len).saturating_mul(SECTOR);
            notes.extend(device.and_then(|device| left_out_of(&device, end, block)));
        }
    }
    notes.sort();
    notes.dedup();
    notes
}

/// The sentence about one device, of which a line uses bytes up to `end` of the part it names.
fn left_out_of(word: &DeviceWord, end: u64, block: u64) -> Option<String> {
    let word = SystemOpener::without_memory().resolve(word).ok()?;
    let area = word.options.area;
    let device_end = end_of(Path::new(&word.path)).ok()?;
    let part_end = area.len_bytes().map_or(u64::MAX, |len| area.start().saturating_add(len));
    let end = area.start().saturating_add(end);
    let rest = device_end.min(part_end).checked_sub(end)?;
    let is_less = rest > 0 && rest < block;
    is_less.then(|| {
        let path = &word.path;
        let bytes = if rest == 1 { "byte is" } else { "bytes are" };
        format!(
            "{path}: the last {rest} {bytes} unused, because the device consists of whole blocks \
             of {block} bytes"
        )
    })
}
