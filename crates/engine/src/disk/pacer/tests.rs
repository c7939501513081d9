//! The pacer against a model: writers, files and a slow, failing or stuck device, driven by a seed.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::prng::Prng;

const BUDGET: u64 = 8 * MIB;

/// A write that waits or is in flight: its writer and its pages.
type Write = (usize, Range<u64>);

/// A writer of the model: writes of one size, in order or anywhere, one or more at a time.
#[derive(Clone, Debug)]
struct Load {
    file: usize,
    bytes: u64,
    depth: usize,
    is_random: bool,
    /// It pauses this many steps after each write.
    thinks: u64,
}

impl Load {
    fn busy(file: usize, bytes: u64) -> Load {
        Load { file, bytes, depth: 1, is_random: false, thinks: 0 }
    }
}

/// How a file's device does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    /// This many steps for a batch.
    Takes(u64),
    /// Write-outs never end.
    Stuck,
}

/// The results of a load.
#[derive(Clone, Debug, Default)]
struct Done {
    bytes: u64,
    writes: u64,
    in_flight: usize,
    place: u64,
    ready_at: u64,
    /// The longest that a write waited.
    longest: u64,
}

struct Fixture {
    pacer: Pacer<(Write, u64)>,
    files: Vec<u32>,
    devices: Vec<Device>,
    loads: Vec<Load>,
    done: Vec<Done>,
    prng: Prng,
    now: u64,
    /// Writes that copy into the page cache, and when they end.
    copying: Vec<(u64, Write)>,
    /// Batches under write-out: when they end, by file.
    out: BTreeMap<usize, VecDeque<(u64, u64)>>,
    /// Pages that are dirty or under write-out, by the model, and in which batch (0: dirty).
    unclean: BTreeMap<(usize, u64), u64>,
}

impl Fixture {
    fn new(devices: &[Device], loads: &[Load], seed: u64) -> Fixture {
        let mut pacer = Pacer::new();
        Fixture {
            files: devices.iter().map(|_| pacer.open(BUDGET)).collect(),
            pacer,
            devices: devices.to_vec(),
            loads: loads.to_vec(),
            done: vec![Done::default(); loads.len()],
            prng: Prng::new(seed),
            now: 0,
            copying: Vec::new(),
            out: BTreeMap::new(),
            unclean: BTreeMap::new(),
        }
    }

    fn writer(&self, nth: usize) -> Writer {
        Writer { file: self.files[self.loads[nth].file], ring: nth as u64 }
    }

    /// One step of time. Writers begin writes unless `is_over`.
    fn step(&mut self, is_over: bool) {
        self.now += 1;
        if !is_over {
            // None is always the first.
            let first = self.prng.below(self.loads.len() as u64) as usize;
            let order = (first..self.loads.len()).chain(0..first);
            order.for_each(|nth| self.begin(nth));
        }
        let now = self.now;
        let (ended, copying) = std::mem::take(&mut self.copying)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| *at <= now);
        self.copying = copying;
        for (_, (nth, pages)) in ended {
            self.end(nth, pages);
        }
        (0..self.files.len()).for_each(|file| self.drive(file));
        self.check();
    }

    fn begin(&mut self, nth: usize) {
        let Load { bytes, depth, is_random, thinks, .. } = self.loads[nth];
        while self.done[nth].in_flight < depth && self.done[nth].ready_at <= self.now {
            let done = &mut self.done[nth];
            done.place += 1;
            let place = if is_random { self.prng.below(4096) } else { done.place % 4096 };
            done.in_flight += 1;
            done.ready_at = self.now + thinks;
            let start = ((nth as u64) << 40) + place * bytes;
            let pages = Pacer::<Write>::pages(start..start + bytes);
            let writer = self.writer(nth);
            let who = ((nth, pages.clone()), self.now);
            if let Some((write, _)) = ask(&mut self.pacer, writer, pages, who) {
                self.copying.push((self.now + 1, write));
            }
            self.take_admitted();
            if thinks > 0 {
                break;
            }
        }
    }

    fn take_admitted(&mut self) {
        for (_, (write, since)) in self.pacer.take_admitted() {
            let waited = self.now - since;
            self.done[write.0].longest = self.done[write.0].longest.max(waited);
            self.copying.push((self.now + 1, write));
        }
    }

    fn end(&mut self, nth: usize, pages: Range<u64>) {
        let file = self.loads[nth].file;
        for page in pages.clone().step_by(PAGE as usize) {
            self.unclean.insert((file, page), 0);
        }
        self.done[nth].in_flight -= 1;
        self.done[nth].writes += 1;
        self.done[nth].bytes += pages.end - pages.start;
        self.pacer.written(self.writer(nth), pages);
        self.take_admitted();
    }

    /// The background of one file.
    fn drive(&mut self, file: usize) {
        let number = self.files[file];
        loop {
            let out = self.out.entry(file).or_default();
            match self.pacer.step(number) {
                Some(Step::Start { batch, runs }) => {
                    assert!(runs.is_sorted_by_key(|run| run.start), "{runs:?}");
                    for run in &runs {
                        for page in (run.start..run.end).step_by(PAGE as usize) {
                            let there = self.unclean.insert((file, page), batch);
                            assert_eq!(there, Some(0), "only what is dirty is written out");
                        }
                    }
                    let begins = out.back().map_or(self.now, |(at, _)| *at);
                    let ends = match self.devices[file] {
                        Device::Takes(steps) => begins + steps,
                        Device::Stuck => u64::MAX,
                    };
                    out.push_back((ends, batch));
                }
                Some(Step::Wait { batch }) => {
                    let Some((at, first)) = out.front().copied() else { panic!("none is out") };
                    assert_eq!(first, batch);
                    if at > self.now {
                        return;
                    }
                    out.pop_front();
                    self.unclean.retain(|_, by| *by != batch);
                    self.pacer.ended(number, batch);
                    self.take_admitted();
                }
                Some(Step::Rest { .. }) => return,
                None => panic!("no file is closed here"),
            }
        }
    }

    fn check(&self) {
        let usage = self.pacer.usage();
        let used = usage.dirty + usage.under_write_out + usage.reserved;
        let others = self.files.len() as u64 - 1;
        let beyond = others * (self.pacer.write_bytes_max() + 2 * PAGE);
        assert!(used <= usage.budget + beyond, "{usage:?}");
        let real = self.unclean.len() as u64 * PAGE;
        assert!(real <= usage.dirty + usage.under_write_out, "{real} are unclean, {usage:?}");
        assert_eq!(used, self.pacer.held);
    }

    fn run(&mut self, steps: u64) {
        (0..steps).for_each(|_| self.step(false));
    }

    /// Lets all writes and write-outs end, and checks that the pacer is empty.
    fn settle(&mut self) {
        for _ in 0..100_000 {
            self.step(true);
            self.files.iter().for_each(|file| self.pacer.idle(*file));
            if self.unclean.is_empty() && self.copying.is_empty() && self.pacer.held == 0 {
                assert!(self.done.iter().all(|done| done.in_flight == 0), "a write still waits");
                assert!(self.pacer.writers.is_empty(), "idle writers are forgotten");
                return;
            }
        }
        panic!("something is never written out: {:?}", self.pacer.usage());
    }
}

#[test]
fn busy_writers_get_equal_shares_within_a_tenth() {
    let sizes: [&[u64]; 5] = [
        &[MIB / 2; 4],
        &[4 * KIB; 3],
        &[4 * KIB, 512 * KIB],
        &[64 * KIB, 4 * KIB, 512 * KIB, 256 * KIB],
        &[128 * KIB; 16],
    ];
    for sizes in sizes {
        // Each always has more to write than a batch makes room for.
        let busy =
            |bytes: &u64| Load { depth: (2 * MIB / bytes) as usize, ..Load::busy(0, *bytes) };
        let loads: Vec<Load> = sizes.iter().map(busy).collect();
        let mut fixture = Fixture::new(&[Device::Takes(8)], &loads, 1);
        // The budget is free at first: the first writers take more of it.
        fixture.run(200);
        let before: Vec<u64> = fixture.done.iter().map(|done| done.bytes).collect();
        fixture.run(2000);
        let since = fixture.done.iter().zip(&before).map(|(done, before)| done.bytes - before);
        let (most, least) = (since.clone().max().unwrap(), since.min().unwrap());
        assert!(least as f64 >= 0.9 * most as f64, "{sizes:?}: {least} and {most}");
        fixture.settle();
    }
}

#[test]
fn a_writer_that_holds_little_does_not_wait_for_those_that_run_ahead() {
    let mut loads = vec![Load { depth: 16, ..Load::busy(0, 512 * KIB) }; 3];
    loads.push(Load { thinks: 50, ..Load::busy(0, 4 * KIB) });
    let mut fixture = Fixture::new(&[Device::Takes(10)], &loads, 2);
    fixture.run(5000);
    assert!(fixture.done[0].longest > 10, "the others do wait");
    assert_eq!(fixture.done[3].longest, 0);
    assert!(fixture.done[3].writes >= 95, "{:?}", fixture.done[3]);
}

#[test]
fn a_writer_that_is_alone_has_nearly_all_and_the_first_write_of_another_finds_room() {
    let mut pacer: Pacer<u32> = Pacer::new();
    let file = pacer.open(16 * MIB);
    let writer = |ring| Writer { file, ring };
    let mib = |at: u64| at * MIB..(at + 1) * MIB;
    let fits = |pacer: &mut Pacer<u32>, ring, from: u64| {
        (from..).take_while(|at| pacer.try_hold(writer(ring), mib(*at))).count()
    };
    assert_eq!(fits(&mut pacer, 1, 0), 14);
    assert!(pacer.try_hold(writer(2), mib(100)), "it is as large as a write can be");
    // Now there are two: the writer with more bytes gets no budget before it has less than its
    // share.
    assert_eq!(fits(&mut pacer, 1, 20), 0);
    write_out(&mut pacer, file, writer(1), 0..6);
    assert_eq!((pacer.held, fits(&mut pacer, 1, 20)), (9 * MIB, 4));
    // All bytes of the second writer are clean.
    write_out(&mut pacer, file, writer(2), 100..101);
    assert_eq!((pacer.held, fits(&mut pacer, 1, 30)), (12 * MIB, 2));
    // The device of another file may be stuck or not: each file leaves budget for the other.
    pacer.open(16 * MIB);
    write_out(&mut pacer, file, writer(1), 6..8);
    assert_eq!((pacer.held, fits(&mut pacer, 1, 40)), (12 * MIB, 0));
}

/// Writes of a MiB each end, and are written out.
fn write_out(pacer: &mut Pacer<u32>, file: u32, writer: Writer, places: Range<u64>) {
    places.for_each(|at| pacer.written(writer, at * MIB..(at + 1) * MIB));
    pacer.idle(file);
    while let Some(Step::Start { batch, .. }) = pacer.step(file) {
        pacer.ended(file, batch);
    }
}

/// Two writers have written for long. A third one appears while they wait. Returns the order in
/// which writes begin from then on.
fn order_with_a_newcomer() -> Vec<u32> {
    let mut pacer: Pacer<u32> = Pacer::new();
    let file = pacer.open(16 * MIB);
    let writer = |ring| Writer { file, ring };
    let mib = |at: u64| at * MIB..(at + 1) * MIB;
    for at in 0..40 {
        [1, 2].into_iter().for_each(|ring| assert!(pacer.try_hold(writer(ring), mib(at))));
        [1, 2].into_iter().for_each(|ring| write_out(&mut pacer, file, writer(ring), at..at + 1));
    }
    // Until neither has room.
    let mut held = [0, 0];
    while let Some(nth) = (0..2).find(|nth| pacer.try_hold(writer(*nth + 1), mib(100))) {
        held[nth as usize] += 1;
    }
    for who in 0..3 {
        pacer.wait(writer(1), mib(200), 10 + who);
        pacer.wait(writer(2), mib(200), 20 + who);
    }
    for who in 0..8 {
        pacer.wait(writer(3), mib(200), 30 + who);
    }
    let mut order = Vec::new();
    for at in 0..64 {
        order.extend(pacer.take_admitted().into_iter().map(|(_, who)| who));
        let ring = at % 2 + 1;
        if held[ring as usize - 1] > 0 {
            held[ring as usize - 1] -= 1;
            write_out(&mut pacer, file, writer(ring), 300 + at..301 + at);
        }
    }
    order
}

/// Whether each of the two waiting writers got its turn before the newcomer had a second one.
fn is_in_turn(order: &[u32]) -> bool {
    let place = |who: u32| order.iter().position(|other| *other == who).unwrap_or(usize::MAX);
    place(10) < place(31) && place(20) < place(32)
}

#[test]
fn a_writer_that_comes_later_begins_at_the_turn_of_those_that_are_there() {
    let order = order_with_a_newcomer();
    assert!(order.len() > 4 && is_in_turn(&order), "{order:?}");
}

#[cfg(feature = "mutants")]
#[test]
fn a_newcomer_that_begins_at_turn_zero_is_found() {
    mutants::set(Some(Mutant::NewcomerAtTurnZero));
    let order = order_with_a_newcomer();
    mutants::set(None);
    assert!(!is_in_turn(&order), "{order:?}");
}

#[test]
fn waiting_is_spread_over_the_writes_that_cause_it() {
    // A batch takes 10 steps: 4 writers of half a batch each would wait 20 at best.
    let loads = vec![Load::busy(0, 512 * KIB); 4];
    let mut fixture = Fixture::new(&[Device::Takes(10)], &loads, 3);
    fixture.run(4000);
    for done in &fixture.done {
        let mean = 4000 / done.writes;
        assert!(done.longest <= 2 * mean, "{done:?}, {mean} in the mean");
    }
}

#[test]
fn a_stuck_file_leaves_room_to_the_others() {
    let mut loads = vec![Load { depth: 16, ..Load::busy(0, 512 * KIB) }; 2];
    loads.extend(vec![Load { depth: 16, ..Load::busy(1, 512 * KIB) }; 2]);
    let mut fixture = Fixture::new(&[Device::Stuck, Device::Takes(10)], &loads, 4);
    fixture.run(2000);
    let [first, second] = [&fixture.done[2], &fixture.done[3]];
    // As fast as the device: a batch in 10 steps.
    let written = first.bytes + second.bytes;
    assert!(written >= 2000 / 10 * fixture.pacer.batch_bytes() * 8 / 10, "{written}");
    assert!(fixture.done[0].bytes < BUDGET);
    fixture.devices[0] = Device::Takes(1);
    fixture.out.get_mut(&0).unwrap().iter_mut().for_each(|(at, _)| *at = fixture.now);
    fixture.settle();
}

/// The shares of a few stuck files would leave less than one write.
#[test]
fn many_stuck_files_leave_room_for_a_write_at_a_time() {
    for stuck in [3, 5, 9] {
        let mut devices = vec![Device::Stuck; stuck];
        devices.extend([Device::Takes(10), Device::Takes(10)]);
        let loads: Vec<Load> =
            (0..stuck + 2).map(|file| Load { depth: 16, ..Load::busy(file, 512 * KIB) }).collect();
        let mut fixture = Fixture::new(&devices, &loads, stuck as u64);
        fixture.run(2000);
        for done in &fixture.done[stuck..] {
            assert!(done.writes > 20, "{stuck} files are stuck: {:?}", fixture.done);
        }
        for (file, device) in fixture.devices.iter_mut().enumerate().take(stuck) {
            *device = Device::Takes(1);
            let now = fixture.now;
            fixture.out.get_mut(&file).unwrap().iter_mut().for_each(|(at, _)| *at = now);
        }
        fixture.settle();
    }
}

#[test]
fn a_page_that_is_written_again_and_again_takes_room_once() {
    let mut pacer = Pacer::new();
    let file = pacer.open(BUDGET);
    for nth in 0..1000 {
        let writer = Writer { file, ring: nth % 3 };
        assert_eq!(ask(&mut pacer, writer, 0..8192, nth), Some(nth));
        pacer.written(writer, 0..8192);
    }
    assert_eq!(pacer.usage().dirty, 8192);
    assert_eq!(pacer.usage().waited, 0);
}

#[test]
fn a_file_that_is_closed_gives_its_room_back() {
    let mut pacer = Pacer::new();
    let [one, two] = [16 * MIB, 2 * MIB].map(|window| pacer.open(window));
    let [first, second] = [one, two].map(|file| Writer { file, ring: 1 });
    assert_eq!(pacer.usage().budget, 16 * MIB, "the largest window counts");
    for at in 0..10 {
        let pages = at * MIB..(at + 1) * MIB;
        ask(&mut pacer, first, pages.clone(), at).unwrap();
        pacer.written(first, pages);
    }
    assert!(matches!(pacer.step(one), Some(Step::Start { .. })));
    assert_eq!(ask(&mut pacer, second, 0..5 * MIB, 99), None);
    pacer.close(one);
    assert_eq!(pacer.step(one), None);
    assert_eq!(pacer.take_admitted(), [(second, 99)], "larger than the budget, but alone");
    assert_eq!(pacer.usage().budget, 2 * MIB);
    pacer.written(second, 0..5 * MIB);
    pacer.written(first, 0..4096);
    assert_eq!(pacer.usage().dirty, 5 * MIB);
}

/// Begins a write, or lets it wait. Returns the write if it may begin.
fn ask<W>(pacer: &mut Pacer<W>, writer: Writer, pages: Range<u64>, who: W) -> Option<W> {
    if pacer.try_hold(writer, pages.clone()) {
        return Some(who);
    }
    pacer.wait(writer, pages, who);
    None
}

fn any_load() -> impl Strategy<Value = Load> {
    let size = prop_oneof![Just(512), Just(4 * KIB), 1..512 * KIB];
    (0..3_usize, size, 1..20_usize, any::<bool>(), 0..20_u64).prop_map(
        |(file, bytes, depth, is_random, thinks)| Load { file, bytes, depth, is_random, thinks },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn nothing_exceeds_the_budget_nothing_is_left_nobody_starves(
        loads in prop::collection::vec(any_load(), 1..8),
        speeds in prop::collection::vec(1..30_u64, 3),
        seed in any::<u64>(),
    ) {
        let devices: Vec<Device> = speeds.into_iter().map(Device::Takes).collect();
        let mut fixture = Fixture::new(&devices, &loads, seed);
        fixture.run(400);
        // 8 MiB in batches of 1 MiB, on the slowest device, and once more.
        let longest = fixture.done.iter().map(|done| done.longest).max();
        prop_assert!(longest <= Some(2 * 8 * 30), "{:?}", fixture.done);
        fixture.settle();
    }

    #[test]
    fn pages_leave_in_passes_and_are_counted_for_who_made_them_dirty(
        steps in prop::collection::vec(
            (any::<bool>(), 0..300_u64, 1..150_u64, 0..3_u64, 1..6_usize), 1..80)
    ) {
        // Owners of the pages of the next pass, and of this one.
        let (mut pages, mut next, mut pass) = (Pages::default(), BTreeMap::new(), BTreeMap::new());
        for (adds, at, len, owner, count) in steps {
            if adds {
                let range = at..at + len;
                let is_new = |page: &u64| !next.contains_key(page) && !pass.contains_key(page);
                let fresh: Vec<u64> = range.filter(is_new).collect();
                let added = pages.add(at * PAGE..(at + len) * PAGE, owner);
                prop_assert_eq!(added, fresh.len() as u64 * PAGE);
                next.extend(fresh.into_iter().map(|page| (page, owner)));
            } else {
                if pass.is_empty() {
                    std::mem::swap(&mut pass, &mut next);
                }
                let (runs, owners) = expected(&mut pass, len, count);
                let mut taken = pages.take(len * PAGE, count);
                taken.owners.sort_unstable();
                prop_assert_eq!((taken.runs, taken.owners), (runs, owners));
                prop_assert_eq!(pages.pass_bytes(), pass.len() as u64 * PAGE);
            }
            prop_assert_eq!(pages.bytes(), (next.len() + pass.len()) as u64 * PAGE);
        }
    }
}

/// The pages that a pass must yield: its first pages, in runs, with their owners.
fn expected(pass: &mut BTreeMap<u64, u64>, len: u64, count: usize) -> (Vec<Run>, Vec<(u64, u64)>) {
    let (mut runs, mut owners) = (Vec::<Run>::new(), BTreeMap::new());
    for _ in 0..len {
        let Some((page, owner)) = pass.first_key_value().map(|(page, by)| (*page, *by)) else {
            break;
        };
        let (start, end) = (page * PAGE, (page + 1) * PAGE);
        let is_full = runs.len() == count;
        match runs.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ if is_full => break,
            _ => runs.push(Run { start, end }),
        }
        *owners.entry(owner).or_insert(0) += PAGE;
        pass.remove(&page);
    }
    (runs, owners.into_iter().collect())
}
