//! Test cases of a whole cache: its device, in-process callers with their wake-ups, the background.

use shuttle::thread;

use super::fixture::{Fixture, Plan};
use crate::local::ManualClock;
use crate::prng::Prng;
use crate::schedules::base::deaths;
use crate::schedules::simulator::{Ask, Client, Frozen, together};
use crate::target::Target;
use crate::writecache::Mode;

/// The first block of the other stripe.
const OTHER: u64 = 2048;
const TWO_AREAS: &[(u64, u64)] = &[(0, 8), (OTHER, 8)];

pub fn any_mode(prng: &mut Prng) -> Mode {
    if prng.one_in(2) { Mode::Pmem } else { Mode::Ssd }
}

/// Random words of a table: commits by need only, or after every write; write-back of all blocks
/// immediately, when half is used, or of a full cache only; blocks overwritten or not.
fn any_options(prng: &mut Prng, mode: Mode) -> &'static str {
    const OPTIONS: [&str; 10] = [
        "0",
        "0 atomic_blocks false",
        "2 autocommit_blocks 2",
        "2 autocommit_blocks 2 atomic_blocks false",
        "4 high_watermark 0 low_watermark 0",
        "4 high_watermark 0 low_watermark 0 atomic_blocks false",
        "4 high_watermark 100 low_watermark 100",
        "4 high_watermark 100 low_watermark 100 atomic_blocks false",
        "2 max_age 0",
        "2 max_age 0 atomic_blocks false",
    ];
    let overwrites = mode == Mode::Ssd && prng.one_in(2);
    OPTIONS[2 * prng.below(5) as usize + usize::from(overwrites)]
}

fn any_plan(prng: &mut Prng, slots: u64, areas: &'static [(u64, u64)]) -> Plan {
    let list_max = [2, 3, 8][prng.below(3) as usize];
    let mode = any_mode(prng);
    Plan { mode, slots, options: any_options(prng, mode), list_max, areas }
}

/// Random blocks, in sectors, out of the four from `base` on.
fn any_range(prng: &mut Prng, base: u64) -> (u64, u64) {
    let from = prng.below(4);
    (base + from * 2, (1 + prng.below((4 - from).min(2))) * 2)
}

/// One request of any kind that a client may make, within four blocks of each stripe.
fn anything(client: &mut Client, prng: &mut Prng) {
    let base = if prng.one_in(3) { OTHER } else { 0 };
    let (sector, count) = any_range(prng, base);
    match prng.below(8) {
        0..=3 => client.write(sector, count, prng.one_in(4)),
        4..=5 => drop(client.read(sector, count).unwrap()),
        6 => client.flush(),
        _ => client.several(&any_asks(prng)),
    }
}

fn any_asks(prng: &mut Prng) -> [Ask; 3] {
    std::array::from_fn(|_| {
        let (sector, count) = any_range(prng, 0);
        match prng.below(4) {
            0..=1 => Ask::Write(sector, count, prng.one_in(3)),
            2 => Ask::Read(sector, count),
            _ => Ask::Flush,
        }
    })
}

/// Clients that overlap in all ways, with write-back at work.
pub fn blocks(mut prng: Prng) {
    let slots = 4 + prng.below(6);
    let fixture = Fixture::new(any_plan(&mut prng, slots, TWO_AREAS));
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            (0..4).for_each(|_| anything(client, prng));
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Blocks are written and read while their slots are used again and again.
pub fn recycle(mut prng: Prng) {
    let slots = 2 + prng.below(3);
    let fixture = Fixture::new(any_plan(&mut prng, slots, &[(0, 6)]));
    fixture.device.set_draining(prng.one_in(2));
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for _ in 0..2 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..4 {
                client.write(prng.below(3) * 2, 2, false);
            }
        }));
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..4 {
                let from = prng.below(3);
                client.read(from * 2, (1 + prng.below(3 - from)) * 2).unwrap();
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Discards of blocks that are being written back, and of blocks that are being written.
pub fn wipe(mut prng: Prng) {
    let slots = 4 + prng.below(5);
    let fixture = Fixture::new(any_plan(&mut prng, slots, &[(0, 12), (OTHER, 4)]));
    let mut first = fixture.client();
    first.write(0, 4, false);
    first.write(OTHER, 4, false);
    if prng.one_in(2) {
        first.flush();
    }
    drop(first);
    fixture.device.set_draining(prng.below(4) > 0);
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..2 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for at in [(nth * OTHER, 2), (nth * OTHER + 2, 2), (4 + nth * 4, 4)] {
                if prng.one_in(3) {
                    client.write(at.0, at.1, false);
                }
                match prng.below(3) {
                    0 => client.discard(at.0, at.1),
                    _ => client.zero(at.0, at.1, prng.one_in(2)),
                }
            }
        }));
    }
    parts.push(fixture.part(&mut prng, |client, prng| {
        for _ in 0..4 {
            match prng.below(3) {
                0 => client.write(prng.below(6) * 2, 2, prng.one_in(3)),
                1 => drop(client.read(0, 12).unwrap()),
                _ => drop(client.read(OTHER, 4).unwrap()),
            }
        }
    }));
    together(parts);
    background.stop();
    fixture.judge();
}

/// Clients write more than there are slots, and time does not advance: events must wake a waiting
/// write, not a clock, and no write may be refused.
pub fn crowded(mut prng: Prng) {
    let slots = 1 + prng.below(4);
    let fixture = Fixture::new(any_plan(&mut prng, slots, &[(0, 8)]));
    let background = fixture.start_background(Frozen);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..1 + prng.below(3) {
                match prng.below(4) {
                    0 => client.write(0, 8, false),
                    1 => client.write(nth * 2, 2, false),
                    2 => client.write(prng.below(2) * 2, 2, prng.one_in(4)),
                    _ => client.several(&[
                        Ask::Write(prng.below(4) * 2, 2, false),
                        Ask::Write(prng.below(3) * 2, 4, prng.one_in(4)),
                    ]),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Many clients want their data to be durable, on a few rounds; then the power fails.
pub fn group(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 12, TWO_AREAS));
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.push(fixture.part(&mut prng, |client, prng| {
            for _ in 0..2 {
                let base = if prng.one_in(2) { OTHER } else { 0 };
                let (sector, count) = any_range(prng, base);
                client.write(sector, count, prng.one_in(3));
                match prng.one_in(2) {
                    true => client.flush(),
                    false => client.several(&any_asks(prng)),
                }
            }
        }));
    }
    together(parts);
    let rest = fixture.cut(&mut prng);
    background.stop();
    Fixture::judge_rest(fixture.plan, rest);
    fixture.judge();
}

/// Rounds of mode `s` are handed over between clients that want different ones, while write-back
/// frees slots. A finished client is not driven any more: others would wait forever for a round
/// that it leaves in progress.
pub fn handover(mut prng: Prng) {
    let options = ["0", "2 autocommit_blocks 1", "2 max_age 0"][prng.below(3) as usize];
    let plan = Plan { mode: Mode::Ssd, slots: 8, options, list_max: 8, areas: TWO_AREAS };
    let fixture = Fixture::new(plan);
    fixture.device.set_draining(prng.below(4) > 0);
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..4 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for turn in 0..1 + prng.below(3) {
                match prng.below(3) {
                    0 => client.flush(),
                    1 => client.write((nth % 2) * OTHER + turn * 2, 2, prng.one_in(2)),
                    _ => {
                        client.write((nth % 2) * OTHER + turn * 2, 2, false);
                        client.flush();
                    }
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// The server dies while several clients have several requests in flight each: at a few moments, of
/// which some are in the middle of a round. The next server has all acknowledged writes.
pub fn death(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 12, TWO_AREAS));
    let background = fixture.random_background(&mut prng);
    let mut threads = Vec::new();
    for _ in 0..3 {
        threads.push(thread::spawn(fixture.part(&mut prng, |client, prng| {
            for _ in 0..3 {
                match prng.below(3) {
                    0 => client.several(&any_asks(prng)),
                    1 => client.flush(),
                    _ => {}
                }
                let base = if prng.one_in(2) { OTHER } else { 0 };
                let (sector, count) = any_range(prng, base);
                client.write(sector, count, false);
            }
        })));
    }
    let rests = deaths(&mut prng, || fixture.die());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    let plan = fixture.plan;
    drop(fixture);
    rests.into_iter().for_each(|rest| Fixture::judge_rest(plan, rest));
}

/// Writes with pauses, in which the background may fall asleep. It must commit anyway.
pub fn park(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 12, TWO_AREAS));
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for nth in 0..1 + prng.below(2) {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            for _ in 0..1 + prng.below(2) {
                let pause = if prng.one_in(2) { 0 } else { prng.below(30) };
                (0..pause).for_each(|_| thread::yield_now());
                let (sector, count) = any_range(prng, nth * OTHER);
                client.write(sector, count, false);
            }
        }));
    }
    together(parts);
    let mut looks = 0;
    while !fixture.cache.is_settled() {
        looks += 1;
        assert!(looks < 2000, "the background sleeps while data is not committed");
        thread::yield_now();
    }
    background.stop();
    fixture.judge();
}

/// Suspends and resumes while clients and the background are at work, and the origin fails at
/// times: while suspended, no data changes, and all blocks are committed.
pub fn pause(mut prng: Prng) {
    let slots = 4 + prng.below(5);
    let fixture = Fixture::new(any_plan(&mut prng, slots, TWO_AREAS));
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..1 + prng.below(2) {
        parts.push(fixture.part(&mut prng, |client, prng| {
            (0..3).for_each(|_| anything(client, prng));
        }));
    }
    if prng.one_in(2) {
        fixture.message("flush_on_suspend");
        fixture.origin.fail(prng.below(4));
    }
    let (device, sim, origin) =
        (fixture.device.clone(), fixture.sim.clone(), fixture.origin.clone());
    let (cache, pauses) = (fixture.cache.clone(), prng.below(30));
    parts.push(Box::new(move || {
        (0..pauses).for_each(|_| thread::yield_now());
        device.begin_suspend().unwrap();
        while !device.finish_suspend().unwrap() {
            thread::yield_now();
        }
        assert!(cache.is_settled(), "something is not committed while suspended");
        let before = (sim.image(), origin.works());
        (0..60).for_each(|_| thread::yield_now());
        assert!(sim.image() == before.0, "the cache changes while it is suspended");
        assert_eq!(origin.works(), before.1, "the origin is used while suspended");
        device.resume().unwrap();
    }));
    together(parts);
    background.stop();
    fixture.origin.fail(0);
    fixture.judge();
}

/// Status, facts and messages while requests are served. When a message `flush` is carried out, all
/// writes before it are on the origin.
pub fn talk(mut prng: Prng) {
    let fixture = Fixture::new(any_plan(&mut prng, 9, TWO_AREAS));
    let background = fixture.random_background(&mut prng);
    let mut parts = vec![fixture.part(&mut prng, |client, prng| {
        (0..2).for_each(|_| anything(client, prng));
    })];
    let (cache, word) = (fixture.cache.clone(), ["cleaner", "clear_stats"][prng.below(2) as usize]);
    parts.push(Box::new(move || {
        for _ in 0..3 {
            assert_eq!(cache.status().split(' ').count(), 14);
            assert!(!cache.facts().is_empty());
            thread::yield_now();
        }
        cache.message(&[word.to_string()]).unwrap();
    }));
    together(parts);
    let mut client = fixture.client();
    for _ in 0..3 {
        let (sector, count) = any_range(&mut prng, 0);
        (0..prng.below(20)).for_each(|_| thread::yield_now());
        client.write(sector, count, false);
        let wanted: Vec<Vec<u64>> =
            TWO_AREAS.iter().map(|&(at, count)| client.read(at, count).unwrap()).collect();
        fixture.message("flush");
        let mut looks = 0;
        while fixture.cache.is_carrying_out() {
            looks += 1;
            assert!(looks < 2000, "a message is not carried out");
            thread::yield_now();
        }
        fixture.compare(&wanted);
        assert!(fixture.cache.is_origin_consistent(), "all data is clean, and the origin is torn");
    }
    drop(client);
    background.stop();
    fixture.judge();
}

/// The power is cut at some moment of `blocks`.
pub fn loss(mut prng: Prng) {
    let slots = 3 + prng.below(6);
    let fixture = Fixture::new(any_plan(&mut prng, slots, TWO_AREAS));
    let background = fixture.random_background(&mut prng);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(fixture.part(&mut prng, move |client, prng| {
            (0..4).for_each(|_| anything(client, prng));
            match nth {
                0 if prng.one_in(2) => client.zero(0, 4, true),
                _ if prng.one_in(2) => client.flush(),
                _ => {}
            }
        }));
    }
    let threads: Vec<_> = parts.into_iter().map(thread::spawn).collect();
    (0..prng.below(150)).for_each(|_| thread::yield_now());
    let rest = fixture.cut(&mut prng);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    let plan = fixture.plan;
    drop(fixture);
    Fixture::judge_rest(plan, rest);
}
