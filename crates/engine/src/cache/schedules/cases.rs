//! Test cases of a whole cache: its device, in-process callers with their wake-ups, the background.

use super::fixture::{BLOCK, BLOCKS, Fixture, Plan};
use crate::prng::Prng;
use crate::schedules::simulator::{Ask, Client, Frozen, together};

const BACK: &str = "1 metadata2 smq 0";
const IN_PART: &str = "1 metadata2 probation 0";
const THROUGH: &str = "2 metadata2 writethrough smq 0";

fn any_plan(prng: &mut Prng, slots: u64, cached: u64) -> Plan {
    Plan { slots, cached, options: if prng.one_in(3) { THROUGH } else { BACK } }
}

/// One or both of the sectors that are used of a block.
fn any_range(prng: &mut Prng, block: u64) -> (u64, u64) {
    let from = prng.below(2);
    (block * BLOCK + from, 1 + prng.below(2 - from))
}

/// The same of one of the first `blocks`.
fn in_one_of(prng: &mut Prng, blocks: u64) -> (u64, u64) {
    let block = prng.below(blocks);
    any_range(prng, block)
}

/// One of everything that a client may ask, in `block`.
fn anything(client: &mut Client, prng: &mut Prng, block: u64) {
    let (sector, count) = any_range(prng, block);
    match prng.below(8) {
        0..=3 => client.write(sector, count, prng.one_in(5)),
        4..=6 => drop(client.read(sector, count).unwrap()),
        _ => client.flush(),
    }
}

/// Clients that overlap in all ways, while blocks are promoted, dropped and written back.
pub fn swap(mut prng: Prng) {
    let slots = 1 + prng.below(3);
    let fixture = Fixture::new(any_plan(&mut prng, slots, slots));
    fixture.device.set_draining(prng.one_in(2));
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.wishes(&mut prng, &[0, 1, 2, 3])];
    for _ in 0..3 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..4 {
                let block = prng.below(BLOCKS);
                anything(client, prng, block);
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// One slot, for which blocks compete while they are read and written.
pub fn evict(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 1, 1));
    fixture.device.set_draining(prng.one_in(2));
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.wishes(&mut prng, &[1, 2]), fixture.wishes(&mut prng, &[0, 1])];
    for nth in 0..2 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..4 {
                let (sector, count) = in_one_of(prng, 2);
                match nth == 0 || prng.one_in(2) {
                    true => drop(client.read(sector, count).unwrap()),
                    false => client.write(sector, count, false),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Blocks are admitted in part while they are written to, and compete for slots.
pub fn part(mut prng: Prng) {
    let slots = 1 + prng.below(3);
    let cached = prng.below(2);
    let fixture = Fixture::new(Plan { slots, cached, options: IN_PART });
    fixture.device.set_draining(prng.one_in(4));
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for turn in 0..4 {
                let (sector, count) = in_one_of(prng, 3);
                match prng.below(7) {
                    0..=2 => drop(client.read(sector, count).unwrap()),
                    3..=4 => client.write(sector, count, prng.one_in(6)),
                    // Zeroes of two discards look the same.
                    5 if nth == 0 && turn == 1 => client.discard(sector / BLOCK * BLOCK, BLOCK),
                    _ => drop(client.read(sector / BLOCK * BLOCK, BLOCK).unwrap()),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// A block is promoted while a write to it bypasses the cache.
pub fn bypass(mut prng: Prng) {
    let cached = prng.below(2);
    let fixture = Fixture::new(any_plan(&mut prng, 2, cached));
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.wishes(&mut prng, &[2])];
    for _ in 0..2 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..3 {
                let (sector, count) = any_range(prng, 2);
                match prng.one_in(3) {
                    true => drop(client.read(sector, count).unwrap()),
                    false => client.write(sector, count, false),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Blocks are written to while they are written back.
pub fn copied(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 2, 2));
    let mut first = fixture.client();
    first.write(0, 2, false);
    first.write(BLOCK, 1, false);
    drop(first);
    fixture.device.set_draining(true);
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..2 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..3 {
                let block = if prng.one_in(3) { 1 - nth } else { nth };
                let (sector, count) = any_range(prng, block);
                client.write(sector, count, prng.one_in(6));
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Whole blocks are zeroed while they are read and written, and while other blocks want their
/// slots.
pub fn erase(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 2, 2));
    if prng.one_in(2) {
        fixture.client().write(0, 2, false);
    }
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.wishes(&mut prng, &[0, 2, 3])];
    parts.push(fixture.part(&mut prng, |client, prng| match prng.one_in(2) {
        true => client.discard(0, BLOCK),
        false => client.zero(0, BLOCK, prng.one_in(2)),
    }));
    for nth in 0..2 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..3 {
                let block = if prng.one_in(3) { 2 + nth } else { 0 };
                anything(client, prng, block);
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Many clients want their data to be durable; then the power fails.
pub fn durable(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 2, 2));
    fixture.device.set_draining(prng.one_in(3));
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.wishes(&mut prng, &[2, 3])];
    for _ in 0..3 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..2 {
                let (sector, count) = in_one_of(prng, 3);
                client.write(sector, count, prng.one_in(4));
                match prng.one_in(3) {
                    true => client.several(&[
                        Ask::Write(prng.below(2) * BLOCK, 1, prng.one_in(3)),
                        Ask::Flush,
                    ]),
                    false => client.flush(),
                }
            }
        }));
    }
    together(parts);
    let left = fixture.cut(&mut prng);
    background.stop();
    Fixture::judge_left(fixture.plan, left);
    fixture.judge();
}

/// Time does not advance: events must wake a waiting request, not a clock.
pub fn still(mut prng: Prng) {
    let slots = 1 + prng.below(2);
    let fixture = Fixture::new(any_plan(&mut prng, slots, slots));
    let background = fixture.start_background(Frozen);
    let mut parts = Vec::new();
    for nth in 0..2 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for turn in 0..1 + prng.below(2) {
                let (sector, count) = in_one_of(prng, 2);
                match nth == 0 && turn == 0 && prng.one_in(2) {
                    true => client.discard(0, BLOCK),
                    false => client.write(sector, count, prng.one_in(3)),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}
