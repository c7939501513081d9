//! Short test cases with one topic each.

use shuttle::thread;

use super::fixture::{Fixture, Plan};
use super::whole::any_mode;
use crate::prng::Prng;
use crate::schedules::simulator::{Frozen, together};
use crate::sync::Arc;
use crate::writecache::Mode;
use crate::writecache::index::State;
use crate::writecache::layout::{Entry, EntryState, SEQ_COUNT_AT};
use crate::writecache::pool::{Pool, Slots};

/// Flushes of several threads: each thread's earlier writes are committed when its own flush ends.
pub fn flushes(mut prng: Prng) {
    let mode = any_mode(&mut prng);
    let areas = &[(0, 4), (2048, 4)];
    let fixture = Fixture::new(Plan { mode, slots: 12, options: "0", list_max: 8, areas });
    let background = (mode == Mode::Ssd).then(|| fixture.start_background(Frozen));
    let mut parts = Vec::new();
    for nth in 0..2 {
        let cache = fixture.cache.clone();
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..3 {
                let sector = nth * 2 + if prng.one_in(2) { 2048 } else { 0 };
                client.write(sector, 2, false);
                client.flush();
                assert!(cache.is_committed(sector / 2), "a flush ends before its data is durable");
            }
        }));
    }
    together(parts);
    background.into_iter().for_each(|background| background.stop());
    fixture.judge();
}

/// Two blocks are written again and again to three slots of memory, and read meanwhile.
pub fn reread(mut prng: Prng) {
    let (options, areas) = ("0", &[(0, 4)]);
    let fixture = Fixture::new(Plan { mode: Mode::Pmem, slots: 3, options, list_max: 32, areas });
    let mut first = fixture.client();
    (0..2).for_each(|block| first.write(block * 2, 2, false));
    drop(first);
    let mut parts = vec![fixture.part(&mut prng, |client, prng| {
        (0..5).for_each(|_| client.write(prng.below(2) * 2, 2, false));
    })];
    for _ in 0..2 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            (0..3).for_each(|_| drop(client.read(prng.below(2) * 2, 2).unwrap()));
        }));
    }
    together(parts);
    fixture.judge();
}

/// One slot for all threads, and time does not advance: each write waits until the previous one is
/// on the origin.
pub fn single(mut prng: Prng) {
    let plan =
        Plan { mode: any_mode(&mut prng), slots: 1, options: "0", list_max: 2, areas: &[(0, 6)] };
    let fixture = Fixture::new(plan);
    let background = fixture.start_background(Frozen);
    let mut parts = Vec::new();
    for nth in 0..2 + prng.below(2) {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            (0..1 + prng.below(2)).for_each(|_| client.write(nth * 2, 2, false));
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Two blocks are made durable again and again, and written back: a slot that is free is durably
/// marked so.
pub fn free(mut prng: Prng) {
    let (mode, areas) = (any_mode(&mut prng), &[(0, 4)]);
    let fixture = Fixture::new(Plan { mode, slots: 6, options: "0", list_max: 8, areas });
    fixture.device.set_draining(prng.below(4) > 0);
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for _ in 0..2 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..4 {
                client.write(prng.below(2) * 2, 2, prng.below(4) > 0);
            }
        }));
    }
    let (cache, sim) = (fixture.cache.clone(), fixture.sim.clone());
    parts.push(Box::new(move || {
        for nth in 0..60 {
            let slot = nth % 6;
            let before = cache.index.word(slot);
            let image = sim.durable();
            if before.state() == State::Free && cache.index.word(slot) == before {
                let word =
                    |at: u64| u64::from_le_bytes(image[at as usize..][..8].try_into().unwrap());
                let at = cache.device.geometry.entry_at(u64::from(slot));
                let (entry, seq) = (Entry::new(word(at), word(at + 8)), word(SEQ_COUNT_AT));
                let is_live = matches!(
                    cache.device.geometry.state_of(&entry, seq, None),
                    EntryState::Live { .. }
                );
                assert!(!is_live, "slot {slot} is free, and its entry is not");
            }
        }
    }));
    together(parts);
    background.stop();
    fixture.judge();
}

/// Discards meet the only batch of write-back, or the only overwrite, without other
/// events: if they have to wait, only its end can wake them.
pub fn awaited(mut prng: Prng) {
    let (mode, areas) = (any_mode(&mut prng), &[(0, 4)]);
    let is_overwritten = mode == Mode::Ssd && prng.one_in(4);
    let options = if is_overwritten { "0 atomic_blocks false" } else { "0" };
    let fixture = Fixture::new(Plan { mode, slots: 4, options, list_max: 8, areas });
    fixture.client().write(0, 4, true);
    fixture.device.set_draining(!is_overwritten);
    let background = fixture.start_background(Frozen);
    let mut parts = Vec::new();
    for sector in [0, 2] {
        parts.push(fixture.part(&mut prng, move |client, _| {
            client.catch_up();
            client.discard(sector, 2);
        }));
    }
    if is_overwritten {
        parts.push(fixture.part(&mut prng, |client, _| client.write(0, 4, false)));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// A block is overwritten in place, and meanwhile written once more, durably: the slot is in use
/// until the first of these writes is complete.
pub fn overtaken(mut prng: Prng) {
    let (mode, options, areas) = (Mode::Ssd, "0 atomic_blocks false", &[(0, 2)]);
    let fixture = Fixture::new(Plan { mode, slots: 3, options, list_max: 8, areas });
    fixture.client().write(0, 2, true);
    let background = fixture.start_background(Frozen);
    let parts =
        [false, true].map(|fua| fixture.part(&mut prng, move |client, _| client.write(0, 2, fua)));
    together(parts.into());
    background.stop();
    fixture.judge();
}

/// A block is durably zeroed while it is written again, and the power fails: the data before both
/// is gone as soon as the zeroes are acknowledged.
pub fn zeroed(mut prng: Prng) {
    let areas = &[(0, 2)];
    let (mode, options) = (Mode::Ssd, "0 atomic_blocks false");
    let plan = Plan { mode, slots: 4, options, list_max: 8, areas };
    let fixture = Fixture::new(plan);
    let background = fixture.random_background(&mut prng);
    fixture.client().write(0, 2, true);
    let parts = [
        fixture.part(&mut prng, |client, _| client.zero(0, 2, true)),
        fixture.part(&mut prng, |client, _| client.write(0, 2, false)),
    ];
    let threads = parts.map(thread::spawn);
    (0..prng.below(60)).for_each(|_| thread::yield_now());
    let rest = fixture.cut(&mut prng);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    drop(fixture);
    Fixture::judge_rest(plan, rest);
}

/// Slots are taken and put back by several threads, each of which has a reserve.
pub fn pool(mut prng: Prng) {
    let count = [1, 2, 70][prng.below(3) as usize];
    let pool = Arc::new(Pool::new(count));
    (0..count).for_each(|slot| pool.put(slot));
    let taken = Arc::new(std::sync::Mutex::new(vec![false; count as usize]));
    let mut threads = Vec::new();
    for port in 0..3 {
        let (pool, taken) = (pool.clone(), taken.clone());
        let mut prng = Prng::new(prng.next_u64());
        threads.push(thread::spawn(move || {
            for _ in 0..4 {
                let mut slots = Slots::default();
                pool.take(port, 1 + prng.below(2) as usize, &mut slots);
                for slot in slots.iter() {
                    let other = std::mem::replace(&mut taken.lock().unwrap()[*slot as usize], true);
                    assert!(!other, "slot {slot} is given twice");
                }
                thread::yield_now();
                slots.iter().for_each(|slot| taken.lock().unwrap()[*slot as usize] = false);
                pool.put_all(&slots);
            }
        }));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let (mut free, is_counted) = pool.audit();
    free.sort_unstable();
    assert!(is_counted && free == (0..count).collect::<Vec<u32>>(), "slots are lost: {free:?}");
}
