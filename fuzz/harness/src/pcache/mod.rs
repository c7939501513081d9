//! Pcaches with arbitrary content: inspected, opened, used, removed and opened again.
//!
//! The input first makes a cache on a small simulated device by using it, then damages it field
//! by field and corrects the checksums (`damage`), then uses it if it still opens.
//!
//! In addition to the promises of every target:
//! 1. `inspect` does not write.
//! 2. An opened cache serves every request in bounded time, and drains, unless memory fails.
//! 3. Data written after the attach is read back, then and after the next attach, for every
//!    content of the medium.
//! 4. A cache that was opened and removed in order opens again.

mod damage;
mod fixture;

use udm::pcache::inspect::inspect;
use udm::units::SECTOR;

use crate::check_error;
use crate::input::Input;
use damage::damage;
use fixture::{BACKING_BYTES, DAMAGE_MAX, Fixture, OPERATIONS_MAX};

/// The content of a cache device, and the steps that follow.
pub fn pcache(bytes: &[u8]) {
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

    let stores = fixture.pmem.counts().stores;
    if let Err(error) = inspect(fixture.pmem.clone(), fixture.geometry) {
        check_error(&error);
    }
    assert_eq!(fixture.pmem.counts().stores, stores, "inspect has written");
    if let Err(error) = fixture.open() {
        return check_error(&error);
    }
    use_opened(&mut fixture, &mut input);
}

fn use_opened(fixture: &mut Fixture, input: &mut Input<'_>) {
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        operate(fixture, input);
    }
    fixture.client.check_model(fixture.is_poisoned, fixture.has_poisoned_records);
    match input.u8() % 4 {
        0 => fixture.client.kill(),
        1 => {
            fixture.drain();
            fixture.client.remove();
        }
        _ => fixture.client.remove(),
    }
    if let Err(error) = inspect(fixture.pmem.clone(), fixture.geometry) {
        assert!(fixture.is_poisoned, "opened before, but not to be looked at: {error}");
    }
    fixture.is_formatting = false;
    match fixture.open() {
        Ok(()) => {}
        Err(error) => assert!(fixture.is_poisoned, "opened before, but not again: {error}"),
    }
    if fixture.client.is_open() {
        fixture.client.check_model(fixture.is_poisoned, fixture.has_poisoned_records);
        fixture.drain();
    }
}

/// One step of a client or of time.
fn operate(fixture: &mut Fixture, input: &mut Input<'_>) {
    let kind = input.u8();
    let sector = input.below(BACKING_BYTES / SECTOR);
    let room = BACKING_BYTES / SECTOR - sector;
    let sectors = match input.u8() {
        long @ 250.. => u64::from(long - 249) * 64,
        short => u64::from(short % 16) + 1,
    };
    let (offset, len) = (sector * SECTOR, sectors.min(room) * SECTOR);
    match kind % 16 {
        0..=5 => fixture.client.write(offset, len, kind & 0x80 != 0),
        6..=8 => drop(fixture.client.read(offset, len)),
        9 => fixture.client.zero(offset, len, kind & 0x80 != 0),
        10 | 11 => fixture.client.flush(),
        12 => fixture.message(input.u8()),
        13 => fixture.client.set_draining(kind & 0x80 != 0),
        _ => fixture.client.tick(u64::from(kind >> 4) * 100_000_000),
    }
    fixture.check_background();
}
