//! Damage to a writecache that its format cannot notice: fields near the limits of what they may
//! hold, entries that contradict each other, labels that are right. And some that is blunt.

use std::sync::atomic::Ordering;

use udm::writecache::layout::{FREE, LABEL_AT, Label};
use zerocopy::IntoBytes;

use super::world::{ORIGIN_BYTES, World};
use crate::input::Input;

/// A field of the superblock: its place and bytes.
const SUPERBLOCK: [(u64, usize); 5] = [(0, 4), (4, 4), (8, 4), (16, 8), (24, 8)];

/// Does one thing to the media that nobody should do.
pub fn damage(world: &mut World, input: &mut Input<'_>) {
    let kind = input.u8();
    match kind % 16 {
        0..=2 => {
            let (at, width) = SUPERBLOCK[usize::from(input.u8()) % SUPERBLOCK.len()];
            let near = [world.blocks(), world.block_bytes, world.seq_count(), FREE];
            let value = input.near(near[usize::from(kind >> 4) % near.len()]);
            world.poke(world.start() + at, &value.to_le_bytes()[..width]);
        }
        3..=8 => plant_entry(world, input),
        9 => {
            let origin = if kind & 0x80 == 0 { "ram" } else { "other" };
            let label = Label::new(origin, input.near(ORIGIN_BYTES), input.near(4));
            world.poke(world.start() + LABEL_AT, label.as_bytes());
        }
        10 | 11 => {
            let words = world.shared.words();
            let near = if kind & 0x80 == 0 { 32 } else { words.len() as u64 };
            let nth = input.below(near) as usize;
            let value = input.near(world.seq_count());
            words[nth % words.len()].store(value, Ordering::Relaxed);
        }
        12 => world.poison(input),
        _ => blunt(world, input, kind),
    }
}

/// An entry of which most parts make sense.
fn plant_entry(world: &mut World, input: &mut Input<'_>) {
    let nth = input.below(world.blocks().max(1));
    let choice = input.u8();
    let block = world.block_bytes / 512;
    let sector = match choice % 8 {
        0 => input.near(ORIGIN_BYTES / 512),
        1 => input.near(u64::MAX),
        // Few blocks meet often.
        2..=5 => u64::from(input.u8() % 8) * block,
        _ => input.below(ORIGIN_BYTES / 512 / block) * block,
    };
    let counter = world.seq_count();
    let seq = match choice >> 4 {
        0..=7 => counter.saturating_sub(1 + u64::from(input.u8() % 4)),
        8..=11 => input.near(counter),
        12 | 13 => FREE,
        _ => input.near(FREE),
    };
    let at = world.start() + 64 + 16 * nth;
    if at + 16 <= world.len_bytes() {
        world.poke(at, &[sector.to_le_bytes(), seq.to_le_bytes()].concat());
    }
}

/// Bytes that obey no structure.
fn blunt(world: &mut World, input: &mut Input<'_>, kind: u8) {
    let len_bytes = world.len_bytes();
    let at = input.near(len_bytes);
    let Some(room) = len_bytes.checked_sub(at).map(|room| room as usize) else { return };
    match kind >> 4 & 3 {
        0 | 1 => {
            let count = usize::from(input.u8()).min(room);
            let bytes = input.take(count).to_vec();
            world.poke(at, &bytes);
        }
        2 => world.poke(at, &vec![0; usize::from(input.u16()).min(room)]),
        _ => {
            let from = input.below(len_bytes);
            let len = usize::from(input.u16()).min(room).min((len_bytes - from) as usize);
            let bytes = world.peek(from, len);
            world.poke(at, &bytes);
        }
    }
}
