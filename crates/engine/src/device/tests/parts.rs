//! Requests that are not whole blocks, through several ports, with other changes of the same blocks
//! by ports that write whole blocks.

use std::collections::HashMap;
use std::ops::Range;

use crate::bio::{Bio, Op};
use crate::buffer::Buffer;
use crate::build::{BuildOptions, NamedDevices, build};
use crate::device::{Device, LoadedTable};
use crate::disk::{Disk, DiskIo, DiskLimits, Effect, Fault, RamDisk, Ring, SimDisk};
use crate::error::Status;
use crate::local::{Local, ManualClock};
use crate::prng::Prng;
use crate::sync::Arc;
use crate::table::Table;
use crate::units::{MIB, SECOND};

const BLOCK: u64 = 4096;
/// Bytes of the device: few blocks, so that requests meet.
const SIZE: u64 = 4 * BLOCK;
/// Requests of a run; each write has its own value.
const REQUESTS_MAX: u64 = 200;
const CLIENTS: usize = 4;

/// Tables of that size: with a target that parks requests, and with several lines.
const TABLES: [&str; 3] = [
    "0 32 linear /a 0",
    "0 32 delay /a 0 2 /a 0 5",
    "0 8 linear /a 0\n8 16 delay /a 8 3\n24 8 linear /a 24",
];

fn load(disks: &[(&str, Arc<dyn Disk>)], text: &str) -> LoadedTable {
    let mut devices = NamedDevices::new();
    disks.iter().for_each(|(name, disk)| devices.add_disk(name, Arc::clone(disk)));
    build(&Table::parse(text).unwrap(), &devices, &BuildOptions::named(1)).unwrap()
}

fn client(device: &Arc<Device>) -> Local {
    Local::without_kernel(device).unwrap()
}

/// A request of any bytes.
fn request(op: Op, range: Range<u64>, value: u8, fua: bool, token: u64) -> Bio {
    let len = range.end - range.start;
    let mut bio = Bio::bare(op, range.start, len, fua, token);
    bio.buffer = match op {
        Op::Read | Op::Write => Buffer::from_bytes(&vec![value; len as usize]),
        _ => Buffer::empty(),
    };
    bio.allows_parts = true;
    bio
}

fn carry_out(local: &mut Local, bio: Bio) -> Bio {
    local.submit(bio);
    local.wait().unwrap()
}

/// A change, from its submission to its answer.
#[derive(Clone, Debug)]
struct Change {
    range: Range<u64>,
    value: u8,
    start: u64,
    end: Option<u64>,
    /// A discard: the disk may keep older content.
    is_hint: bool,
}

/// All changes so far. A read may return a change that has begun before the read ended, unless
/// another change replaced it before the read began.
#[derive(Debug)]
struct History {
    changes: Vec<Change>,
    now: u64,
}

impl History {
    fn new() -> History {
        let zeroes = Change { range: 0..SIZE, value: 0, start: 0, end: Some(0), is_hint: false };
        History { changes: vec![zeroes], now: 1 }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn check(&self, offset: u64, bytes: &[u8], since: u64) -> Result<(), String> {
        let end = offset + bytes.len() as u64;
        let bounds = self.changes.iter().flat_map(|change| [change.range.start, change.range.end]);
        let mut bounds: Vec<u64> = bounds.filter(|at| (offset..end).contains(at)).collect();
        bounds.extend([offset, end]);
        bounds.sort_unstable();
        for pair in bounds.windows(2).filter(|pair| pair[0] < pair[1]) {
            let here: Vec<&Change> =
                self.changes.iter().filter(|change| change.range.contains(&pair[0])).collect();
            let replaces = |newer: &Change, older: &Change| {
                !newer.is_hint
                    && newer.end.is_some_and(|end| end < since)
                    && older.end.is_some_and(|end| end < newer.start)
            };
            let legal = here.iter().filter(|it| !here.iter().any(|other| replaces(other, it)));
            let legal: Vec<u8> = legal.map(|change| change.value).collect();
            let part = &bytes[(pair[0] - offset) as usize..(pair[1] - offset) as usize];
            if let Some(at) = part.iter().position(|byte| !legal.contains(byte)) {
                let place = pair[0] + at as u64;
                return Err(format!("byte {place} is {}, not one of {legal:?}", part[at]));
            }
        }
        Ok(())
    }
}

/// A request in flight: the time of its submission, and its change, if it is one.
#[derive(Debug)]
struct Asked {
    start: u64,
    change: Option<usize>,
}

struct Run {
    device: Arc<Device>,
    disk: Arc<SimDisk>,
    clock: ManualClock,
    /// The first client does the background work.
    clients: Vec<(Local, HashMap<u64, Asked>)>,
    history: History,
    prng: Prng,
    requests: u64,
}

impl Run {
    fn new(table: &str, seed: u64) -> Run {
        let disk = Arc::new(SimDisk::new(MIB, BLOCK as u32));
        let device = Device::with_table("d", load(&[("/a", disk.clone())], table)).unwrap();
        disk.hold(true);
        let clock = ManualClock::default();
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| (client(&device), HashMap::new())).collect();
        clients[0].0 = client(&device).with_background(clock.clone());
        let (history, prng) = (History::new(), Prng::new(seed));
        Run { device, disk, clock, clients, history, prng, requests: 0 }
    }

    /// Any bytes, most of them within a block.
    fn bytes(&mut self) -> Range<u64> {
        let start = self.prng.below(SIZE);
        let most = if self.prng.one_in(3) { 3 * BLOCK } else { 600 };
        let len = 1 + self.prng.below(most);
        start..(start + len).min(SIZE)
    }

    fn ask(&mut self) {
        let of = self.prng.below(CLIENTS as u64) as usize;
        if self.clients[of].1.len() >= 4 || self.requests == REQUESTS_MAX {
            return;
        }
        self.requests += 1;
        let (token, value) = (self.requests, self.requests as u8);
        // The last client, and sometimes others, use whole blocks.
        let is_whole = of == CLIENTS - 1 || self.prng.one_in(4);
        let mut range = self.bytes();
        if is_whole {
            range = range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK);
        }
        let op = match self.prng.below(12) {
            0..=3 => Op::Read,
            4..=9 => Op::Write,
            10 => Op::WriteZeroes,
            _ => Op::Discard,
        };
        let mut bio = request(op, range.clone(), value, false, token);
        bio.allows_parts = !is_whole;
        let start = self.history.tick();
        if op == Op::Discard {
            range = range.start.next_multiple_of(BLOCK)..range.end / BLOCK * BLOCK;
        }
        let change = bio.is_change().then(|| {
            let value = if op == Op::Write { value } else { 0 };
            let is_hint = op == Op::Discard;
            self.history.changes.push(Change { range, value, start, end: None, is_hint });
            self.history.changes.len() - 1
        });
        self.clients[of].1.insert(token, Asked { start, change });
        self.clients[of].0.submit(bio);
    }

    /// One client does its work, after the disk has completed one of its requests.
    fn work(&mut self, of: usize) -> Result<(), String> {
        let (local, asked) = &mut self.clients[of];
        self.disk.step(local.ring(), &mut self.prng);
        local.turn();
        while let Some(bio) = local.poll() {
            let Asked { start, change } = asked.remove(&bio.token).expect("it comes out once");
            assert_eq!(bio.status, Ok(()));
            let now = self.history.tick();
            match change {
                Some(change) => self.history.changes[change].end = Some(now),
                None => self.history.check(bio.offset, bio.buffer.as_slice(), start)?,
            }
        }
        Ok(())
    }

    fn pass_time(&self) {
        self.clock.advance(SECOND / 500);
        self.device.events().work();
    }

    fn step(&mut self) -> Result<(), String> {
        let of = self.prng.below(CLIENTS as u64) as usize;
        match self.prng.below(40) {
            0..=15 => self.ask(),
            16..=34 => self.work(of)?,
            35..=37 => self.pass_time(),
            38 if of > 0 && self.clients[of].1.is_empty() => {
                // The locks end with the last client that needs them, and begin again.
                self.clients[of].0 = client(&self.device);
            }
            _ if self.prng.one_in(2) => self.device.begin_suspend().unwrap(),
            _ => self.device.cancel_suspend().unwrap(),
        }
        Ok(())
    }

    /// All requests end, and the content is right.
    fn end(&mut self) -> Result<(), String> {
        self.device.cancel_suspend().unwrap();
        for _ in 0..2000 {
            if self.clients.iter().all(|(_, asked)| asked.is_empty()) {
                break;
            }
            self.pass_time();
            (0..CLIENTS).try_for_each(|of| self.work(of))?;
        }
        let left: usize = self.clients.iter().map(|(_, asked)| asked.len()).sum();
        let info = self.device.info();
        if left > 0 || info.bios_in_flight > 0 {
            return Err(format!("{left} requests hang"));
        }
        let mut image = vec![0; SIZE as usize];
        self.disk.peek(0, &mut image);
        let now = self.history.tick();
        self.history.check(0, &image, now)
    }
}

/// Many requests of several clients, which collide.
fn run(table: &str, seed: u64) -> Result<(), String> {
    let mut run = Run::new(table, seed);
    let result = (0..1000).try_for_each(|_| run.step()).and_then(|()| run.end());
    // The end of a client waits for its requests.
    if result.is_err() {
        run.clients.into_iter().for_each(std::mem::forget);
    }
    result
}

#[test]
fn no_change_of_another_client_is_undone() {
    for seed in 0..60 {
        for table in TABLES {
            run(table, seed).unwrap_or_else(|what| panic!("{table}, seed {seed}: {what}"));
        }
    }
}

/// A part that is parked with its data continues in a table whose block has other bytes, or whose
/// blocks have another size.
fn a_table_is_replaced(block_bytes: u32) -> Result<(), String> {
    let old = Arc::new(RamDisk::new(MIB, BLOCK as u32));
    let new = Arc::new(RamDisk::new(MIB, block_bytes));
    old.poke(0, &[1; SIZE as usize]);
    new.poke(0, &[2; SIZE as usize]);
    let disks: [(&str, Arc<dyn Disk>); 2] = [("/a", old), ("/b", new.clone())];
    let device = Device::with_table("d", load(&disks, "0 32 delay /a 0 0 /a 0 5")).unwrap();
    let clock = ManualClock::default();
    let mut local = client(&device).with_background(clock.clone());
    let mut other = client(&device);
    local.submit(request(Op::Write, 100..9000, 7, false, 1));
    local.turn();
    // This one waits for the block, which the other client's request has.
    other.submit(request(Op::Write, 0..BLOCK, 9, false, 2));
    other.turn();
    assert_eq!((local.parked(), other.parked()), (1, 1), "the piece is delayed");
    device.begin_suspend().unwrap();
    assert!(device.finish_suspend().unwrap());
    device.load(load(&disks, "0 32 linear /b 0")).unwrap();
    device.resume().unwrap();
    let mut expected = vec![2; SIZE as usize];
    for (local, range, value) in [(&mut local, 100..9000, 7), (&mut other, 0..4096, 9)] {
        let bio = local.wait().unwrap();
        assert_eq!((bio.status, bio.buffer.len() as u64), (Ok(()), bio.len));
        expected[range].fill(value);
        let mut image = vec![0; SIZE as usize];
        new.peek(0, &mut image);
        if image != expected {
            return Err("the data of the old table was written to the new one".into());
        }
    }
    Ok(())
}

#[test]
fn a_parked_part_begins_again_in_a_new_table() {
    for block_bytes in [512, BLOCK as u32] {
        a_table_is_replaced(block_bytes).unwrap();
    }
}

/// After a part with FUA, or a flush, the data of all pieces is durable.
fn pieces_are_durable(op: Op, range: Range<u64>, fua: bool) -> Result<(), String> {
    let disk = Arc::new(SimDisk::new(MIB, BLOCK as u32));
    disk.poke(0, &[1; SIZE as usize]);
    let device = Device::with_table("d", load(&[("/a", disk.clone())], TABLES[0])).unwrap();
    let mut local = client(&device);
    assert_eq!(carry_out(&mut local, request(op, range.clone(), 7, fua, 1)).status, Ok(()));
    if !fua {
        local.flush().unwrap();
    }
    let mut expected = vec![1; SIZE as usize];
    let value = if op == Op::Write { 7 } else { 0 };
    expected[range.start as usize..range.end as usize].fill(value);
    let is_durable = disk.durable_image()[..SIZE as usize] == expected;
    if is_durable { Ok(()) } else { Err(format!("{op:?} {range:?}, FUA: {fua}")) }
}

fn all_pieces_are_durable() -> Result<(), String> {
    for op in [Op::Write, Op::WriteZeroes] {
        for range in [100..200, 4000..4200, 1..3 * BLOCK + 1, BLOCK..2 * BLOCK + 512] {
            pieces_are_durable(op, range.clone(), true)?;
            pieces_are_durable(op, range, false)?;
        }
    }
    Ok(())
}

#[test]
fn parts_are_as_durable_as_blocks() {
    all_pieces_are_durable().unwrap();
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_of_parts_is_found() {
    use crate::mutants::{self, Mutant};
    for mutant in Mutant::PARTS {
        mutants::set(Some(*mutant));
        let found = all_pieces_are_durable()
            .and_then(|()| a_table_is_replaced(BLOCK as u32))
            .and_then(|()| {
                let mut runs = (0..200).flat_map(|seed| TABLES.map(|table| (table, seed)));
                runs.try_for_each(|(table, seed)| run(table, seed))
            });
        mutants::set(None);
        assert!(found.is_err(), "{mutant:?} was not found");
    }
}

#[test]
fn an_error_of_any_piece_is_the_error_of_the_request() {
    let disk = Arc::new(SimDisk::new(MIB, BLOCK as u32));
    let device = Device::with_table("d", load(&[("/a", disk.clone())], TABLES[0])).unwrap();
    let mut local = client(&device);
    // The end of block 0, block 1 and the start of block 2.
    let range = 100..2 * BLOCK + 100;
    let cases = [
        (Op::Write, Op::Read, [true, false, true]),
        (Op::Write, Op::Write, [true; 3]),
        (Op::WriteZeroes, Op::Read, [true, false, true]),
        (Op::WriteZeroes, Op::Write, [true, false, true]),
        (Op::WriteZeroes, Op::WriteZeroes, [false, true, false]),
        (Op::Read, Op::Read, [true; 3]),
        (Op::Discard, Op::Read, [false; 3]),
    ];
    for (op, failing, fails) in cases {
        for (block, fails) in (0..).zip(fails) {
            let place = block * BLOCK..block * BLOCK + 1;
            disk.inject(Fault::new(Effect::Fail(Status::Corrupt)).of(failing).within(place));
            let bio = carry_out(&mut local, request(op, range.clone(), 7, false, 1));
            let status = if fails { Err(Status::Corrupt) } else { Ok(()) };
            assert_eq!(bio.status, status, "{op:?}, {failing:?} fails in block {block}");
            let has_data = matches!(op, Op::Read | Op::Write);
            assert_eq!(bio.buffer.len() as u64, if has_data { bio.len } else { 0 });
            disk.heal();
            // No block is locked.
            local.write_at(&[5; SIZE as usize], 0, false).unwrap();
        }
    }
}

/// A disk that refuses I/O that is not whole blocks, as disks of such blocks do.
#[derive(Debug)]
struct Strict(RamDisk);

impl Disk for Strict {
    fn limits(&self) -> &DiskLimits {
        self.0.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        match (io.offset | io.len).is_multiple_of(BLOCK) {
            true => self.0.start(io, ring),
            false => ring.finish(io, Err(Status::Invalid)),
        }
    }
}

#[test]
fn only_bios_that_allow_it_are_served_in_parts() {
    let disk = Arc::new(Strict(RamDisk::new(MIB, BLOCK as u32)));
    let device = Device::with_table("d", load(&[("/a", disk)], TABLES[0])).unwrap();
    let mut local = client(&device);
    let mut status = |op: Op, range: Range<u64>, allows_parts: bool| {
        let bio = Bio { allows_parts, ..request(op, range, 7, false, 1) };
        carry_out(&mut local, bio).status
    };
    for op in [Op::Read, Op::Write, Op::WriteZeroes] {
        assert_eq!(status(op, 1..2, true), Ok(()));
        assert_eq!(status(op, 512..2 * BLOCK + 512, true), Ok(()));
        assert_eq!(status(op, 1..2, false), Err(Status::Invalid));
        assert!(status(op, 512..1024, false).is_err(), "the disk refuses it");
    }
    assert_eq!(status(Op::Write, SIZE - 1..SIZE, true), Ok(()));
    assert_eq!(status(Op::Write, SIZE - 1..SIZE + 1, true), Err(Status::NoSpace));
    assert_eq!(status(Op::Read, SIZE..SIZE + 1, true), Err(Status::Invalid));
    assert_eq!(status(Op::Read, u64::MAX - 1..u64::MAX, true), Err(Status::Invalid));
}

/// The device is removed, or its user leaves, while a request waits for a block.
#[test]
fn requests_that_wait_for_a_block_end_with_their_device_or_client() {
    for is_removed in [true, false] {
        let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(MIB, BLOCK as u32));
        let device = Device::with_table("d", load(&[("/a", disk)], "0 32 delay /a 0 0 /a 0 5"));
        let device = device.unwrap();
        let mut holder = client(&device).with_background(ManualClock::default());
        let mut waiter = client(&device);
        holder.submit(request(Op::Write, 100..200, 7, false, 1));
        holder.turn();
        waiter.submit(request(Op::Write, 0..512, 8, false, 2));
        waiter.turn();
        assert_eq!((holder.parked(), waiter.parked()), (1, 1));
        let bio = device.seat_of(waiter.port_id()).parked_for(&waiter.driver().port().parked[0]);
        assert_eq!(bio, "other changes of its blocks");
        if is_removed {
            device.begin_suspend().unwrap();
            assert!(device.finish_suspend().unwrap());
            device.remove().unwrap();
            assert_eq!(holder.wait().unwrap().status, Err(Status::Io));
            assert_eq!(waiter.wait().unwrap().status, Err(Status::Io));
        } else {
            drop(holder);
            waiter = waiter.with_background(ManualClock::default());
            assert_eq!(waiter.wait().unwrap().status, Ok(()));
        }
    }
}

/// A device does not return the read of a client, whose port is given up.
#[test]
fn a_bio_that_never_returns_does_not_hold_up_parts_for_ever() {
    let disk = Arc::new(SimDisk::new(MIB, BLOCK as u32));
    let device = Device::with_table("d", load(&[("/a", disk.clone())], TABLES[0])).unwrap();
    let (mut hung, mut early, mut late) = (client(&device), client(&device), client(&device));
    disk.inject(Fault::new(Effect::Stick).of(Op::Read).within(3 * BLOCK..SIZE).times(1));
    hung.submit(request(Op::Read, 3 * BLOCK..SIZE, 0, false, 1));
    hung.turn();
    early.submit(request(Op::Write, 100..200, 7, false, 2));
    for _ in 0..5 {
        early.turn();
    }
    assert_eq!(early.parked(), 1, "it may be a change that was not listed");
    hung.driver_mut().abandon();
    let done = (0..100).find_map(|_| early.poll());
    assert_eq!(done.expect("the write ends").status, Ok(()));
    drop(early);
    // Changes begin to be listed again.
    assert_eq!(carry_out(&mut late, request(Op::Write, 100..200, 8, false, 3)).status, Ok(()));
    drop(late);
    std::mem::forget(hung);
}

/// The target parks the whole blocks of a discard before changes are locked.
#[test]
fn a_parked_change_is_locked_when_it_continues() {
    let disk = Arc::new(RamDisk::new(MIB, BLOCK as u32));
    disk.poke(0, &[9; SIZE as usize]);
    let table = "0 32 delay /a 0 0 /a 0 5";
    let device = Device::with_table("d", load(&[("/a", disk.clone())], table)).unwrap();
    let clock = ManualClock::default();
    let mut discards = client(&device).with_background(clock.clone());
    let mut writes = client(&device);
    discards.submit(request(Op::Discard, 100..3 * BLOCK, 0, false, 1));
    discards.turn();
    writes.submit(request(Op::Write, BLOCK + 100..BLOCK + 200, 7, false, 2));
    for _ in 0..5 {
        writes.turn();
    }
    assert_eq!((discards.parked(), writes.parked()), (1, 1));
    for _ in 0..20 {
        clock.advance(SECOND);
        device.events().work();
        discards.turn();
        writes.turn();
    }
    assert_eq!(writes.poll().expect("the write ends").status, Ok(()));
    assert_eq!(discards.poll().expect("the discard ends").status, Ok(()));
    let mut block = [0; BLOCK as usize];
    disk.peek(BLOCK, &mut block);
    assert!(!block.contains(&9), "the write brought back what was discarded");
}

/// Without a client of this kind, changes are not locked.
#[test]
fn locks_end_with_the_last_client_that_needs_them() {
    let disk: Arc<dyn Disk> = Arc::new(RamDisk::new(MIB, BLOCK as u32));
    let device = Device::with_table("d", load(&[("/a", disk)], TABLES[0])).unwrap();
    let other = client(&device);
    let is_locked = || device.seat_of(other.port_id()).parts().is_active();
    let mut users = [client(&device), client(&device)];
    for (nth, user) in users.iter_mut().enumerate() {
        for op in [Op::Read, Op::Discard] {
            carry_out(user, request(op, 100..200, 0, false, 1)).status.unwrap();
            assert_eq!(is_locked(), nth > 0, "{op:?} changes no part");
        }
        carry_out(user, request(Op::Write, 100..200, 0, false, 1)).status.unwrap();
        assert!(is_locked());
    }
    let [first, second] = users;
    drop(first);
    assert!(is_locked());
    drop(second);
    assert!(!is_locked());
}
