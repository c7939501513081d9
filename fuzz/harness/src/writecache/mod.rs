//! Writecaches with arbitrary content, in both modes: looked at, opened, used, removed and opened
//! again.
//!
//! The input first makes a cache by using it, then damages it field by field (`damage`), then uses
//! what still opens. The promises are those of `pcache`.

mod damage;
mod world;

use udm::error::Result;
use udm::units::SECTOR;
use udm::writecache::inspect::inspect;

use crate::check_error;
use crate::input::Input;
use damage::damage;
use world::{ORIGIN_BYTES, World};

const OPERATIONS_MAX: u8 = 48;
const DAMAGE_MAX: u8 = 16;

/// A cache device's content and what happens to it.
pub fn writecache(bytes: &[u8]) {
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

    if let Err(error) = look(&world) {
        check_error(&error);
    }
    if let Err(error) = world.open() {
        return check_error(&error);
    }
    use_opened(&mut world, &mut input);
}

/// `inspect` says what there is, or what is wrong, and writes nothing.
fn look(world: &World) -> Result<()> {
    let writes = world.writes_to_cache();
    let looked = inspect(&world.medium, world.start(), None);
    assert_eq!(world.writes_to_cache(), writes, "inspect has written");
    looked.map(drop)
}

fn use_opened(world: &mut World, input: &mut Input<'_>) {
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        operate(world, input);
    }
    world.client.check_model(world.is_poisoned, world.is_poisoned);
    match input.u8() % 4 {
        0 => world.client.kill(),
        1 => {
            world.client.drain(world.is_poisoned);
            world.client.remove();
        }
        _ => world.client.remove(),
    }
    if let Err(error) = look(world) {
        assert!(world.is_poisoned, "opened before, but not to be looked at: {error}");
    }
    world.is_formatting = false;
    match world.open() {
        Ok(()) => {}
        Err(error) => assert!(world.is_poisoned, "opened before, but not again: {error}"),
    }
    if world.client.is_open() {
        world.client.check_model(world.is_poisoned, world.is_poisoned);
        world.client.drain(world.is_poisoned);
    }
}

/// One step of a client or of time.
fn operate(world: &mut World, input: &mut Input<'_>) {
    let kind = input.u8();
    let block = world.block_bytes;
    let first = input.below(ORIGIN_BYTES / block);
    let room = ORIGIN_BYTES / block - first;
    let blocks = match input.u8() {
        long @ 250.. => u64::from(long - 249) * 16,
        short => u64::from(short % 8) + 1,
    };
    let (offset, len) = (first * block, blocks.min(room) * block);
    debug_assert!(len.is_multiple_of(SECTOR));
    match kind % 16 {
        0..=6 => world.client.write(offset, len, kind & 0x80 != 0),
        7 | 8 => drop(world.client.read(offset, len)),
        9 => world.client.zero(offset, len, kind & 0x80 != 0),
        10 | 11 => world.client.flush(),
        12 => world.message(input.u8()),
        13 => world.client.set_draining(kind & 0x80 != 0),
        _ => world.client.tick(u64::from(kind >> 4) * 100_000_000),
    }
}
