//! Pcaches with arbitrary content: looked at, opened, used, removed and opened again.
//!
//! The input first makes a cache on a small simulated device by using it, then damages it field
//! by field with checksums put right (`damage`), then uses what still opens.
//!
//! Beside the promises of every target:
//! 1. `inspect` stores nothing.
//! 2. What was opened serves every request in bounded time, and drains, unless memory fails.
//! 3. What is written after the attach is read back, then and after the next attach: no content
//!    of a medium lets new data go wrong.
//! 4. What was opened and removed in order opens again.

mod damage;
mod world;

use udm::pcache::inspect::inspect;
use udm::units::SECTOR;

use crate::check_error;
use crate::input::Input;
use damage::damage;
use world::{BACKING_BYTES, DAMAGE_MAX, OPERATIONS_MAX, World};

/// A cache device's content and what happens to it.
pub fn pcache(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut world = World::from_input(&mut input);
    if world.open().is_ok() {
        for _ in 0..input.u8() % OPERATIONS_MAX {
            operate(&mut world, &mut input);
        }
        if input.u8().is_multiple_of(4) {
            world.client.remove();
        } else {
            world.client.kill();
        }
    }
    for _ in 0..input.u8() % DAMAGE_MAX {
        damage(&mut world, &mut input);
    }
    world.change_table(&mut input);
    // Nothing of before counts any more.
    world.client.model.clear();

    let stores = world.pmem.counts().stores;
    if let Err(error) = inspect(world.pmem.clone(), world.geometry) {
        check_error(&error);
    }
    assert_eq!(world.pmem.counts().stores, stores, "inspect has written");
    if let Err(error) = world.open() {
        return check_error(&error);
    }
    use_opened(&mut world, &mut input);
}

fn use_opened(world: &mut World, input: &mut Input<'_>) {
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        operate(world, input);
    }
    world.client.check_model(world.is_poisoned, world.has_poisoned_records);
    match input.u8() % 4 {
        0 => world.client.kill(),
        1 => {
            world.drain();
            world.client.remove();
        }
        _ => world.client.remove(),
    }
    if let Err(error) = inspect(world.pmem.clone(), world.geometry) {
        assert!(world.is_poisoned, "opened before, but not to be looked at: {error}");
    }
    world.is_formatting = false;
    match world.open() {
        Ok(()) => {}
        Err(error) => assert!(world.is_poisoned, "opened before, but not again: {error}"),
    }
    if world.client.is_open() {
        world.client.check_model(world.is_poisoned, world.has_poisoned_records);
        world.drain();
    }
}

/// One step of a client or of time.
fn operate(world: &mut World, input: &mut Input<'_>) {
    let kind = input.u8();
    let sector = input.below(BACKING_BYTES / SECTOR);
    let room = BACKING_BYTES / SECTOR - sector;
    let sectors = match input.u8() {
        long @ 250.. => u64::from(long - 249) * 64,
        short => u64::from(short % 16) + 1,
    };
    let (offset, len) = (sector * SECTOR, sectors.min(room) * SECTOR);
    match kind % 16 {
        0..=5 => world.client.write(offset, len, kind & 0x80 != 0),
        6..=8 => drop(world.client.read(offset, len)),
        9 => world.client.zero(offset, len, kind & 0x80 != 0),
        10 | 11 => world.client.flush(),
        12 => world.message(input.u8()),
        13 => world.client.set_draining(kind & 0x80 != 0),
        _ => world.client.tick(u64::from(kind >> 4) * 100_000_000),
    }
    world.check_background();
}
