//! Tests of the malicious medium itself.

use std::collections::HashSet;

use super::*;

const CPU: Persistence = Persistence::Cpu;
const MSYNC: Persistence = Persistence::Msync;

#[test]
fn what_was_fenced_always_survives() {
    for (persistence, seed) in [(CPU, 1), (MSYNC, 2)] {
        let prng = &mut Prng::new(seed);
        let sim = SimPmem::new(64 << 10, persistence);
        let mut bytes = vec![0; 10_000];
        prng.fill(&mut bytes);
        sim.store(33, &bytes);
        sim.drain().unwrap();
        if persistence == MSYNC {
            assert_eq!(sim.pending(), (33_usize + 10_000).div_ceil(8) - 33 / 8);
            sim.sync().unwrap();
        }
        assert_eq!(sim.pending(), 0);
        for _ in 0..20 {
            assert_eq!(sim.crash(prng).image(), sim.image());
        }
    }
}

#[test]
fn an_undrained_store_does_not_become_durable_by_sync() {
    let sim = SimPmem::new(4096, MSYNC);
    sim.store(0, &[1; 8]);
    sim.sync().unwrap();
    assert_eq!(sim.pending(), 1);
    assert_eq!(sim.snapshot_durable().peek(0, 8), [0; 8]);
    sim.drain().unwrap();
    sim.sync().unwrap();
    assert_eq!(sim.snapshot_durable().peek(0, 8), [1; 8]);
}

#[test]
fn what_a_sync_could_not_make_durable_no_other_does_unless_it_is_stored_again() {
    let sim = SimPmem::new(8192, MSYNC);
    sim.store(0, &[1; 8]);
    sim.store(4096, &[2; 8]);
    sim.drain().unwrap();
    sim.fail_syncs_from(1);
    sim.sync().unwrap_err();
    sim.fail_syncs_from(u64::MAX);
    sim.store(4104, &[3; 8]);
    sim.drain().unwrap();
    sim.sync().unwrap();
    assert_eq!((sim.peek(0, 8), sim.snapshot_durable().peek(0, 8)), (vec![1; 8], vec![0; 8]));
    // A page is written whole.
    assert_eq!(sim.snapshot_durable().peek(4096, 16), [[2; 8], [3; 8]].concat());
}

#[test]
fn lines_keep_prefixes_in_store_order() {
    let sim = SimPmem::new(4096, CPU);
    sim.store(8, &[1; 8]);
    sim.store(0, &[2; 8]);
    sim.store(8, &[3; 8]);
    sim.store(64, &[4; 12]);
    assert_eq!(sim.pending_lines(), [(0, 3), (1, 2)]);
    let line = |prefix| sim.crash_with(|line, _| if line == 0 { prefix } else { 0 }).peek(0, 16);
    assert_eq!(line(0), [0; 16]);
    assert_eq!(line(1), [[0; 8], [1; 8]].concat());
    assert_eq!(line(2), [[2; 8], [1; 8]].concat());
    assert_eq!(line(3), [[2; 8], [3; 8]].concat());
    let edge = sim.crash_with(|_, words| words - 1).peek(64, 12);
    assert_eq!(edge, [[4; 8].as_slice(), &[0; 4]].concat());
}

#[test]
fn eight_aligned_bytes_are_never_torn_and_all_states_are_met() {
    let sim = SimPmem::new(8192, CPU);
    sim.store(0, &[0x11; 8192]);
    sim.drain().unwrap();
    sim.store(4090, &[0x22; 28]);
    let mut states = HashSet::new();
    let prng = &mut Prng::new(3);
    for _ in 0..400 {
        let image = sim.crash(prng).image();
        assert!(image[..4090].iter().chain(&image[4118..]).all(|byte| *byte == 0x11));
        let touched = &image[4090..4118];
        for word in [&touched[..6], &touched[6..14], &touched[14..22], &touched[22..]] {
            assert!(word.iter().all(|byte| *byte == word[0]), "torn word {word:?}");
        }
        states.insert(touched.to_vec());
    }
    assert_eq!(states.len(), 16, "two lines, one and three words, any subset");
}

#[test]
fn one_threads_drain_leaves_the_others_stores_pending() {
    let sim = SimPmem::new(4096, CPU);
    std::thread::scope(|scope| {
        scope.spawn(|| sim.store(0, &[1; 24])).join().unwrap();
    });
    sim.store(8, &[2; 8]);
    sim.drain().unwrap();
    assert_eq!(sim.pending(), 3);
    assert_eq!(sim.snapshot_durable().peek(0, 24), [[0; 8], [2; 8], [0; 8]].concat());
    let all = sim.crash_with(|_, words| words);
    assert_eq!(all.peek(0, 24), [[1; 8], [2; 8], [1; 8]].concat());
    assert_eq!(all.image(), sim.image());
}

#[test]
fn faults_are_injected_as_asked() {
    let sim = SimPmem::new(8192, CPU);
    sim.poison(100, 10);
    assert_eq!(sim.load(90, &mut [0; 11]), Err(Status::Io));
    assert_eq!(sim.load(109, &mut [0; 1]), Err(Status::Io));
    assert_eq!(sim.load(90, &mut [0; 10]), Ok(()));
    assert_eq!(sim.load(110, &mut [0; 10]), Ok(()));
    assert_eq!(sim.snapshot_durable().load(100, &mut [0; 1]), Err(Status::Io));
    sim.heal();
    assert_eq!(sim.load(100, &mut [0; 1]), Ok(()));

    sim.store(200, &[1; 8]);
    sim.corrupt(200, |byte| byte ^ 0x80);
    assert_eq!(sim.peek(200, 2), [0x81, 1]);

    sim.fail_drains_from(2);
    sim.fail_syncs_from(1);
    assert_eq!(sim.drain(), Ok(()));
    assert_eq!(sim.pending(), 0);
    sim.store(0, &[1; 8]);
    assert_eq!([sim.drain(), sim.drain(), sim.sync()], [Err(Status::Io); 3]);
    assert_eq!(sim.pending(), 1);
}

#[test]
fn a_cut_shows_the_moment_before_a_fence() {
    let sim = SimPmem::new(8192, CPU);
    sim.arm_cut(2);
    for value in 1..=3 {
        sim.store(0, &[value; 8]);
        sim.drain().unwrap();
    }
    let cut = sim.take_cut().unwrap();
    assert_eq!(cut.peek(0, 1), [2]);
    assert_eq!(cut.pending(), 1);
    assert_eq!(cut.snapshot_durable().peek(0, 1), [1]);
    assert!(sim.take_cut().is_none());
}

#[test]
fn costs_are_counted_and_large_media_are_cheap() {
    let sim = SimPmem::new(512 << 20, CPU);
    sim.store((512 << 20) - 100, &[9; 100]);
    sim.zero(5, 5000);
    sim.load(0, &mut [0; 16]).unwrap();
    sim.drain().unwrap();
    let counts = sim.counts();
    let expected = SimCounts {
        stores: 2,
        stored_bytes: 5100,
        loads: 1,
        loaded_bytes: 16,
        drains: 1,
        syncs: 0,
    };
    assert_eq!(counts, expected);
    assert_eq!(sim.snapshot_durable().peek((512 << 20) - 101, 3), [0, 9, 9]);
    sim.reset_counts();
    assert_eq!(sim.counts(), SimCounts::default());
}

#[test]
fn images_come_and_go() {
    let mut image = vec![0; 12288];
    image[5000] = 1;
    let sim = SimPmem::from_image(&image, MSYNC);
    assert_eq!(sim.image(), image);
    assert_eq!(sim.snapshot_durable().image(), image);
    sim.poke(4095, &[7, 8]);
    assert_eq!(sim.snapshot_durable().peek(4095, 2), [7, 8]);
}

#[test]
#[should_panic(expected = "beyond")]
fn stores_beyond_the_end_are_our_bug() {
    SimPmem::new(4096, CPU).store(4090, &[0; 7]);
}
