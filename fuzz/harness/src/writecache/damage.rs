//! Damage to a writecache that its format cannot notice: fields with values near their limits,
//! entries that contradict each other, valid labels. In addition, random bytes.

use std::sync::atomic::Ordering;

use udm::writecache::layout::{FREE, LABEL_AT, Label};
use zerocopy::IntoBytes;

use super::fixture::{Fixture, ORIGIN_BYTES};
use crate::input::Input;

/// A field of the superblock: its place and bytes.
const SUPERBLOCK: [(u64, usize); 5] = [(0, 4), (4, 4), (8, 4), (16, 8), (24, 8)];

/// Damages the media in one way.
pub fn damage(fixture: &mut Fixture, input: &mut Input<'_>) {
    let kind = input.u8();
    match kind % 16 {
        0..=2 => {
            let (at, width) = SUPERBLOCK[usize::from(input.u8()) % SUPERBLOCK.len()];
            let near = [fixture.blocks(), fixture.block_bytes, fixture.seq_count(), FREE];
            let value = input.near(near[usize::from(kind >> 4) % near.len()]);
            fixture.poke(fixture.start() + at, &value.to_le_bytes()[..width]);
        }
        3..=8 => plant_entry(fixture, input),
        9 => {
            let origin = if kind & 0x80 == 0 { "ram" } else { "other" };
            let label = Label::new(origin, input.near(ORIGIN_BYTES), input.near(4));
            fixture.poke(fixture.start() + LABEL_AT, label.as_bytes());
        }
        10 | 11 => {
            let words = fixture.shared.words();
            let near = if kind & 0x80 == 0 { 32 } else { words.len() as u64 };
            let nth = input.below(near) as usize;
            let value = input.near(fixture.seq_count());
            words[nth % words.len()].store(value, Ordering::Relaxed);
        }
        12 => fixture.poison(input),
        _ => blunt(fixture, input, kind),
    }
}

/// An entry of which most parts make sense.
fn plant_entry(fixture: &mut Fixture, input: &mut Input<'_>) {
    let nth = input.below(fixture.blocks().max(1));
    let choice = input.u8();
    let block = fixture.block_bytes / 512;
    let sector = match choice % 8 {
        0 => input.near(ORIGIN_BYTES / 512),
        1 => input.near(u64::MAX),
        // Few blocks, so that entries meet often.
        2..=5 => u64::from(input.u8() % 8) * block,
        _ => input.below(ORIGIN_BYTES / 512 / block) * block,
    };
    let counter = fixture.seq_count();
    let seq = match choice >> 4 {
        0..=7 => counter.saturating_sub(1 + u64::from(input.u8() % 4)),
        8..=11 => input.near(counter),
        12 | 13 => FREE,
        _ => input.near(FREE),
    };
    let at = fixture.start() + 64 + 16 * nth;
    if at + 16 <= fixture.len_bytes() {
        fixture.poke(at, &[sector.to_le_bytes(), seq.to_le_bytes()].concat());
    }
}

/// Bytes without a structure.
fn blunt(fixture: &mut Fixture, input: &mut Input<'_>, kind: u8) {
    let len_bytes = fixture.len_bytes();
    let at = input.near(len_bytes);
    let Some(room) = len_bytes.checked_sub(at).map(|room| room as usize) else { return };
    match kind >> 4 & 3 {
        0 | 1 => {
            let count = usize::from(input.u8()).min(room);
            let bytes = input.take(count).to_vec();
            fixture.poke(at, &bytes);
        }
        2 => fixture.poke(at, &vec![0; usize::from(input.u16()).min(room)]),
        _ => {
            let from = input.below(len_bytes);
            let len = usize::from(input.u16()).min(room).min((len_bytes - from) as usize);
            let bytes = fixture.peek(from, len);
            fixture.poke(at, &bytes);
        }
    }
}
