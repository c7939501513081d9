//! Test cases of a whole cache: its device, in-process callers with their wake-ups, the background.

use shuttle::thread;

use super::fixture::{Fixture, Plan};
use crate::disk::{Disk, Ring};
use crate::error::Status;
use crate::local::ManualClock;
use crate::pcache::Pcache;
use crate::prng::Prng;
use crate::schedules::base::deaths;
use crate::schedules::simulator::{Client, Frozen, Origin, Part, content, together};
use crate::target::{Port, Target};
use crate::units::SECOND;

/// The first block of the other stripe.
const OTHER: u64 = 8192;

/// Tables by chance: without and with checksums.
fn any_table(prng: &mut Prng) -> &'static str {
    if prng.one_in(3) { "C B 2 data_crc true" } else { "C B 0" }
}

/// A part: the actions of one client.
fn part(
    fixture: &Fixture,
    prng: &mut Prng,
    act: impl FnOnce(&mut Client, &mut Prng) + Send + 'static,
) -> Part {
    let mut client = fixture.client();
    let mut prng = Prng::new(prng.next_u64());
    Box::new(move || act(&mut client, &mut prng))
}

/// One request of any kind that a client may make, within two blocks of each stripe.
fn anything(client: &mut Client, prng: &mut Prng) {
    let base = if prng.one_in(3) { OTHER } else { 0 };
    let from = prng.below(16);
    let count = match prng.below(3) {
        0 => (8 - from % 8).min(16 - from),
        _ => 1 + prng.below((16 - from).min(6)),
    };
    match prng.below(8) {
        0..=3 => client.write(base + from, count, prng.one_in(4)),
        4..=6 => drop(client.read(base + from, count).unwrap()),
        _ => client.flush(),
    }
}

/// Sectors whose data is damaged, each the first of a block.
const DAMAGED: [u64; 4] = [0, 8, 16, 24];
const TWO_BLOCKS: &[(u64, u64)] = &[(0, 16), (OTHER, 16)];

/// Clients that overlap in all ways, with write-back and collection at work.
pub fn overlap(mut prng: Prng) {
    let table = any_table(&mut prng);
    let fixture = Fixture::new(Plan { segments: 9, table, areas: TWO_BLOCKS });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            (0..5).for_each(|_| anything(client, prng));
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Whole blocks are written and read while their segments are reused again and again.
pub fn reuse(mut prng: Prng) {
    let table = any_table(&mut prng);
    let fixture = Fixture::new(Plan { segments: 7, table, areas: &[(0, 24)] });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..2 {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            for _ in 0..5 {
                client.write(prng.below(3) * 8, 8, false);
            }
        }));
        parts.push(part(&fixture, &mut prng, |client, prng| {
            for _ in 0..5 {
                let from = prng.below(20);
                client.read(from, 1 + prng.below(8).min(23 - from)).unwrap();
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Reads of data that is not cached, with concurrent writes.
pub fn fills(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 8, table: "C B 0", areas: &[(0, 16)] });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(part(&fixture, &mut prng, move |client, prng| {
            for _ in 0..4 {
                let (block, from) = (prng.below(2) * 8, prng.below(6));
                match nth {
                    0 if prng.one_in(2) => client.write(block, 8, false),
                    0 => client.write(block + from, 1 + prng.below(2), false),
                    _ => drop(client.read(block, 8).unwrap()),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Clients write more than fits into the cache, and time does not advance: events must wake a
/// waiting write, not a clock.
pub fn full(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 6, table: "C B 0", areas: &[(0, 32)] });
    // The log is advanced, so that it needs another segment at some time.
    let mut first = fixture.client_alone();
    (0..prng.below(50)).for_each(|_| first.write(0, 1, true));
    drop(first);
    let background = fixture.start_background(Frozen);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(part(&fixture, &mut prng, move |client, prng| {
            for _ in 0..1 + prng.below(5) {
                let block = (nth + prng.below(2)) * 8;
                client.write(block, 8, prng.one_in(4));
            }
            if prng.one_in(3) {
                client.flush();
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Discards, which share zeroes, while the background takes the zeroes away again.
pub fn zeroes(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 7, table: "C B 0", areas: &[(0, 32)] });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(part(&fixture, &mut prng, move |client, prng| match nth {
            0 | 1 => {
                for at in 0..4 {
                    let len = 1 + prng.below(2);
                    client.discard(nth * 8 + at * 2, len);
                    if prng.one_in(2) {
                        client.write(nth * 8 + at * 2, 1, false);
                    }
                }
            }
            _ => (0..4).for_each(|_| client.write(16 + prng.below(2) * 8, 8, false)),
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// A few discards share zeroes, and another thread removes the zeroes at the same time.
pub fn shared(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 7, table: "C B 0", areas: &[(0, 16)] });
    let mut parts = vec![part(&fixture, &mut prng, |client, prng| {
        (0..3).for_each(|_| client.discard(prng.below(15), 1));
    })];
    let cache = fixture.cache.clone();
    parts.push(Box::new(move || {
        for _ in 0..3 {
            cache.drop_zero_extent();
            if cache.segments.has_released() {
                cache.recycle().unwrap();
            }
        }
    }));
    together(parts);
    fixture.judge();
}

/// One writer fills the cache, and only the background can help.
pub fn alone(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 6, table: "C B 0", areas: &[(0, 32)] });
    let background = fixture.start_background(Frozen);
    together(vec![part(&fixture, &mut prng, |client, prng| {
        let first = prng.below(4);
        (first..first + 8).for_each(|nth| client.write(nth % 4 * 8, 8, false));
    })]);
    background.stop();
    fixture.judge();
}

/// Writes with pauses, in which the background may fall asleep. It must do its work anyway.
pub fn sleep(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 9, table: "C B 0", areas: TWO_BLOCKS });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for nth in 0..1 + prng.below(2) {
        parts.push(part(&fixture, &mut prng, move |client, prng| {
            for _ in 0..1 + prng.below(2) {
                let pause = if prng.one_in(2) { 0 } else { prng.below(30) };
                (0..pause).for_each(|_| thread::yield_now());
                client.write(nth * OTHER + prng.below(8), 1 + prng.below(4), false);
            }
        }));
    }
    together(parts);
    let mut looks = 0;
    while fixture.device.dirty().bytes > 0 {
        looks += 1;
        assert!(looks < 2000, "the background sleeps while data is dirty");
        thread::yield_now();
    }
    background.stop();
    fixture.judge();
}

/// Suspends and resumes while clients and the background are at work: between suspend and resume,
/// no data changes.
pub fn suspend(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 8, table: "C B 0", areas: TWO_BLOCKS });
    // As with a drain before a suspend: write-back does not wait.
    fixture.device.set_draining(prng.one_in(2));
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..1 + prng.below(2) {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            (0..3).for_each(|_| anything(client, prng));
        }));
    }
    let (device, sim, origin) =
        (fixture.device.clone(), fixture.sim.clone(), fixture.origin.clone());
    let pauses = prng.below(30);
    parts.push(Box::new(move || {
        (0..pauses).for_each(|_| thread::yield_now());
        device.begin_suspend().unwrap();
        while !device.finish_suspend().unwrap() {
            thread::yield_now();
        }
        let before = (sim.image(), origin.works());
        (0..30).for_each(|_| thread::yield_now());
        assert!(sim.image() == before.0, "the cache changes while it is suspended");
        assert_eq!(origin.works(), before.1, "the backing device is used while suspended");
        device.resume().unwrap();
    }));
    together(parts);
    background.stop();
    fixture.judge();
}

/// Ticks, each with all the I/O that it wants.
fn tick(cache: &Pcache, origin: &Origin, times: std::ops::Range<u64>) {
    let (mut port, mut ring) = (Port::new(9), Ring::without_kernel());
    for time in times {
        cache.tick(time * SECOND, &mut port);
        while let Some(io) = port.ios.pop_front() {
            origin.start(io, &mut ring);
            let io = ring.pop_completed().expect("the origin ends what it starts");
            cache.complete(io, &mut port);
        }
    }
}

/// A cache is suspended while its background is at work: the background must come to rest.
pub fn rest(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 9, table: "C B 0", areas: TWO_BLOCKS });
    fixture.cache.set_draining(true);
    let mut client = fixture.client();
    for _ in 0..1 + prng.below(3) {
        client.write(prng.below(8), 1 + prng.below(4), prng.one_in(2));
    }
    drop(client);
    if prng.one_in(2) {
        // The cache is clean, but the log is to be collected.
        tick(&fixture.cache, &fixture.origin, 1..4);
        fixture.cache.message(&["gc_percent".to_string(), "0".to_string()]).unwrap();
    }
    let (cache, origin) = (fixture.cache.clone(), fixture.origin.clone());
    let ticking = thread::spawn(move || tick(&cache, &origin, 4..7));
    fixture.cache.suspend().unwrap();
    while !fixture.cache.is_idle() {
        thread::yield_now();
    }
    let before = (fixture.sim.image(), fixture.origin.works());
    ticking.join().unwrap();
    assert!(fixture.sim.image() == before.0, "the cache changes while it is suspended");
    assert_eq!(fixture.origin.works(), before.1, "the backing device is used while suspended");
    fixture.cache.resume().unwrap();
    fixture.judge();
}

/// Dirty data is damaged, and is dropped from the cache while it is read: outdated data must not
/// show.
pub fn damage(mut prng: Prng) {
    let table = "C B 2 data_crc true";
    let fixture = Fixture::new(Plan { segments: 9, table, areas: &[(32, 16)] });
    let mut first = fixture.client();
    // Each is a batch of its own when it is written back, and a segment of its own.
    for sector in DAMAGED {
        first.write(sector, 8, true);
        let tag = first.read(sector, 1).unwrap()[0];
        fixture.sim.corrupt(&content(sector, 1, tag));
    }
    drop(first);
    fixture.device.set_draining(true);
    fixture.cache.message(&["gc_percent".to_string(), "0".to_string()]).unwrap();
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            for _ in 0..6 {
                match client.read(DAMAGED[prng.below(4) as usize], 1) {
                    Ok(_) | Err(Status::Corrupt) => {}
                    Err(other) => panic!("a read of damaged data ends with {other}"),
                }
            }
        }));
    }
    if prng.one_in(2) {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            client.write(DAMAGED[prng.below(4) as usize], 1, false);
            (0..3).for_each(|_| client.write(32 + prng.below(2) * 8, 8, false));
        }));
    }
    together(parts);
    background.stop();
    fixture.judge();
}

/// Clients are served while the log is still being replayed.
pub fn late(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 12, table: "C B 0", areas: &[(0, 24)] });
    let mut first = fixture.client_alone();
    for block in 0..3 {
        first.write(block * 8, 8, true);
        first.write(block * 8 + prng.below(6), 2, true);
    }
    drop(first);
    fixture.drain();
    let fixture = fixture.opened_late();
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(part(&fixture, &mut prng, move |client, prng| {
            for _ in 0..4 {
                let (block, from) = (prng.below(3) * 8, prng.below(6));
                match nth {
                    0 => drop(client.read(block, 8).unwrap()),
                    _ if prng.one_in(2) => client.write(block, 8, prng.one_in(4)),
                    _ => client.write(block + from, 1 + prng.below(2), false),
                }
            }
        }));
    }
    together(parts);
    background.stop();
    fixture.read_all();
    fixture.drain();
    fixture.judge();
}

/// As `late`, with more blocks, each of which is written for the first time again while the replay
/// joins the index.
pub fn joins(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 24, table: "C B 0", areas: &[(0, 64)] });
    let mut first = fixture.client_alone();
    (0..8).for_each(|block| first.write(block * 8, 8, false));
    first.flush();
    drop(first);
    fixture.drain();
    let fixture = fixture.opened_late();
    let background = fixture.start_background(ManualClock::default());
    let mut client = fixture.client();
    // Among them one at the present position of the replay, in the best case.
    let first = prng.below(8);
    (0..8).for_each(|nth| client.write((first + nth) % 8 * 8, 8, false));
    drop(client);
    background.stop();
    fixture.read_all();
    fixture.drain();
    fixture.judge();
}

/// The power is cut at some moment of `overlap`.
pub fn cut(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 9, table: "C B 0", areas: TWO_BLOCKS });
    let background = fixture.start_background(ManualClock::default());
    let mut parts = Vec::new();
    for _ in 0..3 {
        parts.push(part(&fixture, &mut prng, |client, prng| {
            (0..4).for_each(|_| anything(client, prng));
            if prng.one_in(2) {
                client.flush();
            }
        }));
    }
    let threads: Vec<_> = parts.into_iter().map(thread::spawn).collect();
    (0..prng.below(120)).for_each(|_| thread::yield_now());
    let rest = fixture.cut(&mut prng);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    let plan = fixture.plan;
    drop(fixture);
    Fixture::judge_rest(plan, rest);
}

/// The server dies at a few moments of `overlap`: the next one has all acknowledged writes.
pub fn dies(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 9, table: "C B 0", areas: TWO_BLOCKS });
    let background = fixture.start_background(ManualClock::default());
    let mut threads = Vec::new();
    for _ in 0..3 {
        threads.push(thread::spawn(part(&fixture, &mut prng, |client, prng| {
            (0..4).for_each(|_| anything(client, prng));
        })));
    }
    let rests = deaths(&mut prng, || fixture.die());
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    let plan = fixture.plan;
    drop(fixture);
    rests.into_iter().for_each(|rest| Fixture::judge_rest(plan, rest));
}

/// Some blocks are read again and again, so that collection moves them, while other blocks pass
/// through the segments. Clients flush, which logs the moved blocks together with their own writes.
/// A reader that finds a moved block in its new place must find its data there; the power fails at
/// some moment.
pub fn moves(mut prng: Prng) {
    let fixture = Fixture::new(Plan { segments: 9, table: "C B 0", areas: &[(0, 40)] });
    let background = fixture.start_background(ManualClock::default());
    let mut first = fixture.client();
    (0..2).for_each(|block| first.write(block * 8, 8, true));
    (0..4).for_each(|nth| drop(first.read(nth % 2 * 8, 8).unwrap()));
    drop(first);
    let mut parts = Vec::new();
    for nth in 0..3 {
        parts.push(part(&fixture, &mut prng, move |client, prng| {
            for turn in 0..6 {
                match nth {
                    0 => client.write((2 + turn % 3) * 8, 8, prng.one_in(3)),
                    _ if prng.one_in(4) => client.flush(),
                    _ => drop(client.read(prng.below(2) * 8, 8).unwrap()),
                }
            }
        }));
    }
    let threads: Vec<_> = parts.into_iter().map(thread::spawn).collect();
    (0..prng.below(400)).for_each(|_| thread::yield_now());
    let rest = fixture.cut(&mut prng);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    background.stop();
    let plan = fixture.plan;
    fixture.judge();
    Fixture::judge_rest(plan, rest);
}
