//! Writecaches with arbitrary content, in both modes: looked at, opened, used, removed and opened
//! again.
//!
//! The input first makes a cache by using it, then damages it field by field (`damage`), then uses
//! what still opens. The promises are those of `attach`.

mod damage;
mod world;

use udm::units::SECTOR;
use udm::writecache::inspect::inspect;

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
            world.remove();
        } else {
            world.kill();
        }
    }
    for _ in 0..input.u8() % DAMAGE_MAX {
        damage(&mut world, &mut input);
    }
    world.change_table(&mut input);
    // Nothing of before counts any more.
    world.model.clear();

    look(&world);
    if let Err(error) = world.open() {
        return check_error(&error);
    }
    use_opened(&mut world, &mut input);
}

/// `inspect` says what there is, or what is wrong, and writes nothing.
fn look(world: &World) {
    let writes = world.writes_to_cache();
    if let Err(error) = inspect(&world.medium, world.start(), None) {
        check_error(&error);
    }
    assert_eq!(world.writes_to_cache(), writes, "inspect has written");
}

/// An error is one line with words in it.
fn check_error(error: &udm::error::Error) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
}

fn use_opened(world: &mut World, input: &mut Input<'_>) {
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        operate(world, input);
    }
    world.check_model();
    match input.u8() % 4 {
        0 => world.kill(),
        1 => {
            world.drain();
            world.remove();
        }
        _ => world.remove(),
    }
    look(world);
    world.is_formatting = false;
    match world.open() {
        Ok(()) => {}
        Err(error) => assert!(world.is_poisoned, "opened before, but not again: {error}"),
    }
    if world.is_open() {
        world.check_model();
        world.drain();
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
        0..=6 => world.write(offset, len, kind & 0x80 != 0),
        7 | 8 => drop(world.read(offset, len)),
        9 => world.zero(offset, len, kind & 0x80 != 0),
        10 | 11 => world.flush(),
        12 => world.message(input.u8()),
        13 => world.set_draining(kind & 0x80 != 0),
        _ => world.tick(u64::from(kind >> 4) * 100_000_000),
    }
}
