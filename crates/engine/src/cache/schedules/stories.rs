//! Stories of a whole cache: its device, in-process callers with their waking, the background.

use super::world::{BLOCK, BLOCKS, Plan, World};
use crate::prng::Prng;
use crate::schedules::stage::{Ask, Client, Frozen, together};

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

/// Clients that overlap in all ways, while blocks come, go and are written back.
pub fn swap(mut prng: Prng) {
    let slots = 1 + prng.below(3);
    let world = World::new(any_plan(&mut prng, slots, slots));
    world.device.set_draining(prng.one_in(2));
    let keeper = world.keeper(&mut prng);
    let mut parts = vec![world.wishes(&mut prng, &[0, 1, 2, 3])];
    for _ in 0..3 {
        parts.push(world.part(&mut prng, |client, prng| {
            for _ in 0..4 {
                let block = prng.below(BLOCKS);
                anything(client, prng, block);
            }
        }));
    }
    together(parts);
    keeper.stop();
    world.judge();
}

/// One slot, which blocks take from each other while they are read and written.
pub fn evict(mut prng: Prng) {
    let world = World::new(any_plan(&mut prng, 1, 1));
    world.device.set_draining(prng.one_in(2));
    let keeper = world.keeper(&mut prng);
    let mut parts = vec![world.wishes(&mut prng, &[1, 2]), world.wishes(&mut prng, &[0, 1])];
    for nth in 0..2 {
        parts.push(world.part(&mut prng, move |client, prng| {
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
    keeper.stop();
    world.judge();
}

/// Blocks come by parts while they are written to, and take slots from each other.
pub fn part(mut prng: Prng) {
    let slots = 1 + prng.below(3);
    let cached = prng.below(2);
    let world = World::new(Plan { slots, cached, options: IN_PART });
    world.device.set_draining(prng.one_in(4));
    let keeper = world.keeper(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(world.part(&mut prng, move |client, prng| {
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
    keeper.stop();
    world.judge();
}

/// A block comes into the cache while it is written to past the cache.
pub fn bypass(mut prng: Prng) {
    let cached = prng.below(2);
    let world = World::new(any_plan(&mut prng, 2, cached));
    let keeper = world.keeper(&mut prng);
    let mut parts = vec![world.wishes(&mut prng, &[2])];
    for _ in 0..2 {
        parts.push(world.part(&mut prng, |client, prng| {
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
    keeper.stop();
    world.judge();
}

/// Blocks are written to while they are written back.
pub fn copied(mut prng: Prng) {
    let world = World::new(any_plan(&mut prng, 2, 2));
    let mut first = world.client();
    first.write(0, 2, false);
    first.write(BLOCK, 1, false);
    drop(first);
    world.device.set_draining(true);
    let keeper = world.keeper(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..2 {
        parts.push(world.part(&mut prng, move |client, prng| {
            for _ in 0..3 {
                let block = if prng.one_in(3) { 1 - nth } else { nth };
                let (sector, count) = any_range(prng, block);
                client.write(sector, count, prng.one_in(6));
            }
        }));
    }
    together(parts);
    keeper.stop();
    world.judge();
}

/// Whole blocks are zeroed while they are read and written, and while others want their slots.
pub fn erase(mut prng: Prng) {
    let world = World::new(any_plan(&mut prng, 2, 2));
    if prng.one_in(2) {
        world.client().write(0, 2, false);
    }
    let keeper = world.keeper(&mut prng);
    let mut parts = vec![world.wishes(&mut prng, &[0, 2, 3])];
    parts.push(world.part(&mut prng, |client, prng| match prng.one_in(2) {
        true => client.discard(0, BLOCK),
        false => client.zero(0, BLOCK, prng.one_in(2)),
    }));
    for nth in 0..2 {
        parts.push(world.part(&mut prng, move |client, prng| {
            for _ in 0..3 {
                let block = if prng.one_in(3) { 2 + nth } else { 0 };
                anything(client, prng, block);
            }
        }));
    }
    together(parts);
    keeper.stop();
    world.judge();
}

/// Many that want their data to be durable; then the power is cut.
pub fn durable(mut prng: Prng) {
    let world = World::new(any_plan(&mut prng, 2, 2));
    world.device.set_draining(prng.one_in(3));
    let keeper = world.keeper(&mut prng);
    let mut parts = vec![world.wishes(&mut prng, &[2, 3])];
    for _ in 0..3 {
        parts.push(world.part(&mut prng, |client, prng| {
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
    let left = world.cut(&mut prng);
    keeper.stop();
    World::judge_left(world.plan, left);
    world.judge();
}

/// Time stands still: a request that waits must be woken by what happens, not by a clock.
pub fn still(mut prng: Prng) {
    let slots = 1 + prng.below(2);
    let world = World::new(any_plan(&mut prng, slots, slots));
    let keeper = world.keep(Frozen);
    let mut parts = Vec::new();
    for nth in 0..2 {
        parts.push(world.part(&mut prng, move |client, prng| {
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
    keeper.stop();
    world.judge();
}
