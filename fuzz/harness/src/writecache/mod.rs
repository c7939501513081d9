//! Writecaches with arbitrary content, in both modes: inspected, opened, used, removed and opened
//! again.
//!
//! The input first makes a cache by using it, then damages it field by field (`damage`), then uses
//! it if it still opens. The promises are those of `pcache`.

mod damage;
mod fixture;

use udm::error::Result;
use udm::units::SECTOR;
use udm::writecache::inspect::inspect;

use crate::check_error;
use crate::input::Input;
use damage::damage;
use fixture::{Fixture, ORIGIN_BYTES};

const OPERATIONS_MAX: u8 = 48;
const DAMAGE_MAX: u8 = 16;

/// The content of a cache device, and the steps that follow.
pub fn writecache(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut fixture = Fixture::from_input(&mut input);
    if fixture.open().is_ok() {
        for _ in 0..input.u8() % OPERATIONS_MAX {
            operate(&mut fixture, &mut input);
        }
        if input.u8().is_multiple_of(4) {
            fixture.client.remove();
        } else {
            fixture.client.kill();
        }
    }
    for _ in 0..input.u8() % DAMAGE_MAX {
        damage(&mut fixture, &mut input);
    }
    fixture.change_table(&mut input);
    // Earlier data does not count any more.
    fixture.client.model.clear();

    if let Err(error) = look(&fixture) {
        check_error(&error);
    }
    if let Err(error) = fixture.open() {
        return check_error(&error);
    }
    use_opened(&mut fixture, &mut input);
}

/// `inspect` returns the contents or an error, and does not write.
fn look(fixture: &Fixture) -> Result<()> {
    let writes = fixture.writes_to_cache();
    let looked = inspect(&fixture.medium, fixture.start(), None);
    assert_eq!(fixture.writes_to_cache(), writes, "inspect has written");
    looked.map(drop)
}

fn use_opened(fixture: &mut Fixture, input: &mut Input<'_>) {
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        operate(fixture, input);
    }
    fixture.client.check_model(fixture.is_poisoned, fixture.is_poisoned);
    match input.u8() % 4 {
        0 => fixture.client.kill(),
        1 => {
            fixture.client.drain(fixture.is_poisoned);
            fixture.client.remove();
        }
        _ => fixture.client.remove(),
    }
    if let Err(error) = look(fixture) {
        assert!(fixture.is_poisoned, "opened before, but not to be looked at: {error}");
    }
    fixture.is_formatting = false;
    match fixture.open() {
        Ok(()) => {}
        Err(error) => assert!(fixture.is_poisoned, "opened before, but not again: {error}"),
    }
    if fixture.client.is_open() {
        fixture.client.check_model(fixture.is_poisoned, fixture.is_poisoned);
        fixture.client.drain(fixture.is_poisoned);
    }
}

/// One step of a client or of time.
fn operate(fixture: &mut Fixture, input: &mut Input<'_>) {
    let kind = input.u8();
    let block = fixture.block_bytes;
    let first = input.below(ORIGIN_BYTES / block);
    let room = ORIGIN_BYTES / block - first;
    let blocks = match input.u8() {
        long @ 250.. => u64::from(long - 249) * 16,
        short => u64::from(short % 8) + 1,
    };
    let (offset, len) = (first * block, blocks.min(room) * block);
    debug_assert!(len.is_multiple_of(SECTOR));
    match kind % 16 {
        0..=6 => fixture.client.write(offset, len, kind & 0x80 != 0),
        7 | 8 => drop(fixture.client.read(offset, len)),
        9 => fixture.client.zero(offset, len, kind & 0x80 != 0),
        10 | 11 => fixture.client.flush(),
        12 => fixture.message(input.u8()),
        13 => fixture.client.set_draining(kind & 0x80 != 0),
        _ => fixture.client.tick(u64::from(kind >> 4) * 100_000_000),
    }
}
