//! A cache that is full of clean data is room for writes at the speed of memory: without a wait for
//! the origin, a bounded piece of work for each write, and the hottest goes last.

use udm::bio::Bio;
use udm::buffer::Buffer;
use udm::pmem::Persistence;
use udm::target::{Port, Target};
use udm::units::{KIB, MIB, SECOND};

use crate::fixture::{Fixture, Setup};

const BLOCK: u64 = 4 * KIB;
/// The hot range, which is read again and again, from the start of the device.
const HOT: u64 = 64 * KIB;
/// Blocks of data in a segment.
const SEGMENT_BLOCKS: u64 = 13;
/// Segments of the cache.
const SEGMENTS: u64 = 64;
/// Most keys that one write may pass: those that free a segment, and the key set at its end.
const PIECE_KEYS: u64 = 8192 + 128;
/// Most bytes that one write may copy for others.
const PIECE_BYTES: u64 = MIB;

fn setup(table: &'static str) -> Setup {
    Setup {
        cache_bytes: 20480 + SEGMENTS * (64 << 10),
        backing_bytes: 64 << 20,
        ..Setup::small().table(table)
    }
}

/// A cache full of clean data: laps of reads went through it, and the hot range was read again each
/// time; much of it is in the main part, because it came a second time.
fn full(table: &'static str) -> Fixture {
    let mut fixture = Fixture::new(setup(table));
    fixture.open();
    for lap in 0..4 {
        for at in (HOT..6 * MIB).step_by(16 << 10) {
            // One half of the laps meets what the lap before has dropped.
            fixture.read(at + lap / 2 * MIB, 16 << 10);
            // Key sets are small compared with the cache, as in a real one.
            fixture.flush();
            if at.is_multiple_of(256 << 10) {
                fixture.read(0, HOT as usize);
                fixture.tick(SECOND / 10);
            }
        }
    }
    // The data that was kept last is logged, and known to be clean.
    (0..3).for_each(|_| fixture.tick(2 * SECOND));
    // With checksums the space is cut into smaller pieces; the kernel's policy leaves 30 percent.
    let free_max = if table.contains("fifo") { 32 } else { 16 };
    assert!(fixture.fact("free_segments") < free_max, "{}", fixture.target().status());
    fixture
}

fn block(fixture: &Fixture, at: u64, tag: u8) -> Bio {
    assert!(at + BLOCK <= fixture.setup.backing_bytes);
    Bio::write(at, Buffer::from_bytes(&[tag; BLOCK as usize]), false, 0)
}

/// Writes new blocks until one has to wait. Returns how many did not. With `ticks`, the background
/// gets its turn once in this many writes; without, writers have every processor.
fn burst(fixture: &mut Fixture, ticks: Option<u64>) -> u64 {
    fixture.is_held = true;
    for nth in 0..SEGMENTS * SEGMENT_BLOCKS {
        let before = (fixture.fact("collected_keys_total"), fixture.fact("moved_bytes_total"));
        let helped = fixture.fact("inline_reclaims_total");
        let bio = block(fixture, 32 * MIB + nth * BLOCK, nth as u8);
        fixture.submit(bio);
        let passed = fixture.fact("collected_keys_total") - before.0;
        let moved = fixture.fact("moved_bytes_total") - before.1;
        assert!(passed <= PIECE_KEYS && moved <= PIECE_BYTES, "{passed} keys, {moved} bytes");
        assert!(
            fixture.fact("inline_reclaims_total") <= helped + 2,
            "a piece before, and one behind"
        );
        if fixture.port.done.pop_front().is_none() {
            fixture.port.parked.clear();
            return nth;
        }
        if nth % 8 == 7 {
            fixture.submit(Bio::flush(1));
            fixture.port.done.pop_front().unwrap();
        }
        if ticks.is_some_and(|every| nth % every == 0) {
            fixture.tick(SECOND / 1000);
        }
    }
    panic!("more writes than there is room for");
}

/// While the origin hangs, writes get at least this percentage of the clean data's space.
const SHARE: u64 = 75;

#[test]
fn what_is_clean_is_room_while_the_origin_hangs() {
    let tables = ["C B 0", "C B 0 retention fifo", "C B 2 data_crc true"];
    for (table, ticks) in tables.map(|table| [(table, None), (table, Some(3))]).concat() {
        let mut fixture = full(table);
        let clean = fixture.fact("cached_bytes") / BLOCK;
        assert!(clean > SEGMENTS * SEGMENT_BLOCKS / 3, "{table}: {clean} blocks are clean");
        let written = burst(&mut fixture, ticks);
        assert!(
            written * 100 >= clean * SHARE,
            "{table}, {ticks:?}: {written} writes found room among {clean} clean blocks"
        );
        // None of it was written back, and all of it is there.
        assert_eq!(fixture.fact("dirty_bytes"), written * BLOCK);
        fixture.release();
        for nth in 0..written {
            let found = fixture.read(32 * MIB + nth * BLOCK, BLOCK as usize);
            assert_eq!(found, [nth as u8; BLOCK as usize], "{table}, write {nth}");
        }
        fixture.drain();
    }
}

#[test]
fn what_is_hottest_goes_last() {
    let mut fixture = full("C B 0");
    let cold = (HOT..8 * MIB).step_by(BLOCK as usize);
    let cached = |fixture: &Fixture, at| fixture.target().cached_bytes_in(at, BLOCK) > 0;
    let cold: Vec<u64> = cold.filter(|&at| cached(&fixture, at)).collect();
    assert_eq!(fixture.target().cached_bytes_in(0, HOT), HOT);
    // Half of the cache is written; the origin does not answer.
    fixture.is_held = true;
    for nth in 0..SEGMENTS * SEGMENT_BLOCKS / 2 {
        let bio = block(&fixture, 32 * MIB + nth * BLOCK, 1);
        fixture.submit(bio);
        assert!(fixture.port.done.pop_front().is_some(), "write {nth}");
        if nth % 8 == 7 {
            fixture.submit(Bio::flush(1));
            fixture.port.done.pop_front().unwrap();
        }
    }
    let left = cold.iter().filter(|&&at| cached(&fixture, at)).count();
    assert!(left * 3 < cold.len() * 2, "{left} of {} cold blocks are there", cold.len());
    assert!(fixture.fact("reclaimed_clean_bytes_total") > 0);
    assert_eq!(fixture.target().cached_bytes_in(0, HOT), HOT, "hot blocks have gone");
    assert_eq!(fixture.read(0, HOT as usize), [0; HOT as usize]);
}

#[test]
fn reads_get_no_room_that_way() {
    let mut fixture = full("C B 0");
    fixture.is_held = true;
    let mut nth = 0;
    // Until the next segment is one that writes have to make.
    while fixture.fact("inline_reclaims_total") == 0 {
        let bio = block(&fixture, 32 * MIB + nth * BLOCK, 1);
        fixture.submit(bio);
        fixture.port.done.pop_front().unwrap();
        nth += 1;
    }
    fixture.release();
    let before =
        ["inline_reclaims_total", "reclaimed_clean_bytes_total"].map(|name| fixture.fact(name));
    for at in (16 * MIB..17 * MIB).step_by(64 << 10) {
        fixture.submit(Bio::read(at, Buffer::zeroed(64 << 10), 0));
        fixture.settle();
        fixture.port.done.pop_front().unwrap();
    }
    assert_eq!(
        ["inline_reclaims_total", "reclaimed_clean_bytes_total"].map(|name| fixture.fact(name)),
        before
    );
}

/// Where a sync is the longest part, it is the background's.
#[test]
fn media_that_are_synced_are_left_to_the_background() {
    let mut fixture = Fixture::new(Setup { persistence: Persistence::Msync, ..setup("C B 0") });
    fixture.open();
    for at in (0..4 * MIB).step_by(64 << 10) {
        fixture.write(at, &[1; 64 << 10], false);
    }
    fixture.drain();
    let written = burst(&mut fixture, None);
    assert!(written > 0 && fixture.fact("inline_reclaims_total") == 0);
    fixture.release();
    // With a background, clean data is free space here as well.
    fixture.drain();
    let written = burst(&mut fixture, Some(3));
    assert!(written * 100 >= (SEGMENTS - 8) * SEGMENT_BLOCKS * SHARE, "{written} writes");
    fixture.release();
    fixture.drain();
}

/// The rest of a replay needs the log: collection is off, and writes wait.
#[test]
fn nobody_collects_while_the_log_is_replayed() {
    let mut fixture = full("C B 0");
    fixture.kill();
    fixture.setup = fixture.setup.clone().late();
    fixture.open();
    let before = fixture.fact("collected_keys_total");
    let written = burst(&mut fixture, None);
    assert!(fixture.fact("replay_left_keys") > 0);
    assert_eq!(
        (fixture.fact("inline_reclaims_total"), fixture.fact("collected_keys_total")),
        (0, before)
    );
    assert!(written < SEGMENTS * SEGMENT_BLOCKS / 4, "{written} writes");
    fixture.release();
    for nth in written..SEGMENTS * SEGMENT_BLOCKS {
        fixture.write(32 * MIB + nth * BLOCK, &[nth as u8; BLOCK as usize], false);
    }
    for nth in 0..SEGMENTS * SEGMENT_BLOCKS {
        let found = fixture.read(32 * MIB + nth * BLOCK, BLOCK as usize);
        assert_eq!(found, [nth as u8; BLOCK as usize], "write {nth}");
    }
}

/// Free segments that writes leave to the log, and to data that collection moves.
const RESERVE: u64 = 4;
/// Where each writer writes, more than the cache has.
const WRITER_BYTES: u64 = 80 * MIB;

/// A thread that writes new blocks as long as it finds room.
struct Writer {
    port: Port,
    next: u64,
    room_epoch: u64,
    done: u64,
}

impl Writer {
    fn new(id: usize) -> Writer {
        Writer { port: Port::new(id), next: 0, room_epoch: 0, done: 0 }
    }

    /// Goes on until it has to wait.
    fn turn(&mut self, fixture: &Fixture) {
        let epoch = fixture.target().events().unwrap().room_epoch();
        if epoch != std::mem::replace(&mut self.room_epoch, epoch) {
            for bio in std::mem::take(&mut self.port.parked) {
                fixture.target().submit(bio, &mut self.port);
            }
        }
        while self.port.parked.is_empty() {
            let at = self.port.id as u64 * WRITER_BYTES + self.next % WRITER_BYTES;
            fixture.target().submit(block(fixture, at, 1), &mut self.port);
            self.next += BLOCK;
        }
        self.done += self.port.done.drain(..).filter(|bio| bio.status == Ok(())).count() as u64;
    }
}

/// A cache twice as large as a batch, whose batches come back one by one.
fn slow() -> Fixture {
    let mut fixture = Fixture::new(Setup {
        cache_bytes: 20480 + 1024 * (64 << 10),
        backing_bytes: 4 * WRITER_BYTES,
        ..Setup::small()
    });
    fixture.open();
    fixture.is_held = true;
    fixture
}

#[test]
fn writers_that_wait_for_the_origin_get_equal_shares() {
    let mut fixture = slow();
    let mut writers: Vec<Writer> = (0..4).map(Writer::new).collect();
    let mut before = 0;
    for round in 0..400 {
        // The same one always comes first, and takes all that it finds.
        writers.iter_mut().for_each(|writer| writer.turn(&fixture));
        fixture.tick(SECOND / 100);
        if round % 4 == 0 {
            fixture.release_held();
        }
        if round == 200 {
            writers.iter_mut().for_each(|writer| writer.done = 0);
            before = fixture.fact("written_back_bytes_total");
        }
    }
    let done: Vec<u64> = writers.iter().map(|writer| writer.done).collect();
    let (most, least) = (*done.iter().max().unwrap(), *done.iter().min().unwrap());
    assert!(most * 10 <= least * 11, "{done:?}");
    let written = (fixture.fact("written_back_bytes_total") - before) / BLOCK;
    let all = done.iter().sum::<u64>();
    assert!(all * 10 >= written * 8 && written > 1000, "{all} of {written} blocks");
}

/// Before the cache is full, writers get space at the rate of the origin, a little at a time.
#[test]
fn no_writer_waits_for_a_lump_of_space() {
    let mut fixture = slow();
    let mut writers: Vec<Writer> = (0..4).map(Writer::new).collect();
    let mut rounds = Vec::new();
    let mut dirty_max = 0;
    for round in 0..4000 {
        writers.iter_mut().for_each(|writer| writer.turn(&fixture));
        fixture.tick(SECOND / 1000);
        if round % 10 == 0 {
            fixture.release_held();
        }
        let done: u64 = writers.iter_mut().map(|writer| std::mem::take(&mut writer.done)).sum();
        rounds.push(done);
        dirty_max = dirty_max.max(fixture.target().dirty().bytes);
    }
    let first = *rounds.iter().max().unwrap();
    assert!(first > 1000, "a burst is not limited: {first}");
    let rounds = &rounds[2000..];
    let mean = rounds.iter().sum::<u64>() as f64 / rounds.len() as f64;
    let least = rounds.windows(20).map(|window| window.iter().sum::<u64>()).min().unwrap();
    assert!(least as f64 >= 20.0 * mean * 0.4, "{least} blocks in 20 ms, {mean} in the mean ms");
    let most = rounds.windows(100).map(|window| window.iter().sum::<u64>()).max().unwrap();
    assert!(most as f64 <= 100.0 * mean * 1.3, "{most} blocks in 100 ms, {mean} in the mean ms");
    assert!(dirty_max < 60 * MIB, "{dirty_max} bytes are dirty");
}

#[test]
fn what_a_writer_steps_back_from_is_not_lost_when_the_origin_fails() {
    let mut fixture = slow();
    let mut writers: Vec<Writer> = (0..2).map(Writer::new).collect();
    // Until both have waited for the origin, and a lot of room comes.
    for round in 0.. {
        assert!(round < 200);
        writers.iter_mut().for_each(|writer| writer.turn(&fixture));
        fixture.tick(SECOND / 100);
        fixture.release_held();
        if round > 20 && fixture.fact("free_segments") > 12 {
            break;
        }
    }
    // From here on the origin does not answer. One of the two stops: the other gets all space.
    let free = fixture.fact("free_segments");
    let before = writers[0].done;
    for _ in 0..200 {
        writers[0].turn(&fixture);
        fixture.tick(SECOND / 100);
    }
    let done = writers[0].done - before;
    assert!(done >= (free - RESERVE) * SEGMENT_BLOCKS, "{done} of {free} segments");
    assert!(fixture.fact("free_segments") <= RESERVE + 1);
}
