//! A flush of a device fails, and its server is killed. The device returns the lost data until the
//! power fails, and the next server does not know this from the device.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::disk::{Disk, Effect, Fault, Ring, SimDisk};
use udm::error::Status;
use udm::pmem::Persistence;
use udm::pmem::sim::SimPmem;
use udm::shm::SharedStore;
use udm::units::SECOND;

use crate::fixture::{Cache, Fixture};

const MIB: u64 = 1 << 20;
/// Blocks that the disk writes whole are overwritten in place.
const TABLE: &str = "s O C 512 0";
const BLOCK: u64 = 512;
/// Slots of the caches here.
const BLOCKS: u64 = 40;
const SEEDS: u64 = 24;

fn fail(op: Op) -> Fault {
    Fault::new(Effect::Fail(Status::Io)).of(op)
}

fn disk_of(fixture: &Fixture) -> Arc<SimDisk> {
    match &fixture.cache {
        Cache::Disk(disk) => disk.clone(),
        Cache::Memory(_) => panic!("mode s"),
    }
}

/// A cache that has blocks 0 to 9 committed with data 1, and block 10 to 19 on the origin only,
/// with data 9.
fn written(seed: u64) -> Fixture {
    let mut fixture = Fixture::new(TABLE, MIB, 4 * MIB);
    fixture.origin.poke(10 * BLOCK, &[9; 10 * BLOCK as usize]);
    let disk = disk_of(&fixture);
    disk.seed(seed);
    disk.show_lost();
    fixture.open();
    for block in 0..10 {
        fixture.write(block * BLOCK, &[1; BLOCK as usize], false);
    }
    fixture.flush();
    fixture
}

/// A client's knowledge of blocks.
struct Client {
    /// The data that each block may have.
    blocks: Vec<Vec<u8>>,
}

impl Client {
    fn new() -> Client {
        let of = |block: u64| {
            if block < 10 {
                1
            } else if block < 20 {
                9
            } else {
                0
            }
        };
        Client { blocks: (0..BLOCKS).map(|block| vec![of(block)]).collect() }
    }

    fn write(&mut self, fixture: &mut Fixture, block: u64, data: u8) {
        fixture.write(block * BLOCK, &[data; BLOCK as usize], false);
        self.blocks[block as usize].push(data);
    }

    /// All that is read now is known from here on, if a flush succeeds.
    fn read(&mut self, fixture: &mut Fixture, what: &str) {
        for (block, known) in self.blocks.iter_mut().enumerate() {
            let data = fixture.read(block as u64 * BLOCK, BLOCK as usize);
            let one = data[0];
            assert!(known.contains(&one) && data == [one; BLOCK as usize], "{what}: {block} {one}");
            *known = vec![one];
        }
    }
}

/// A power failure that keeps only durable data.
fn lose_power(fixture: &mut Fixture) {
    let (cache, origin) = (disk_of(fixture), fixture.origin.clone());
    fixture.kill();
    fixture.cache = Cache::Disk(Arc::new(cache.crash_with(|_, _| 0)));
    fixture.origin = Arc::new(origin.crash_with(|_, _| 0));
    fixture.reboot();
}

/// The next server reads, writes and flushes; then the power fails.
fn go_on(fixture: &mut Fixture, client: &mut Client, what: &str) {
    client.read(fixture, what);
    for (block, data) in [(0, 50), (12, 51), (30, 52)] {
        client.write(fixture, block, data);
        client.blocks[block as usize] = vec![data];
    }
    fixture.flush();
    lose_power(fixture);
    fixture.open();
    client.read(fixture, &format!("{what}, after the power failure"));
    fixture.drain();
    let origin = fixture.origin.image();
    for (block, known) in client.blocks.iter().enumerate() {
        assert_eq!(origin[block * BLOCK as usize], known[0], "{what}: {block} of the origin");
    }
}

/// Writes of each kind: to new blocks, over committed ones, over blocks that were written back.
fn write_some(fixture: &mut Fixture, client: &mut Client) {
    fixture.drain();
    for (block, data) in [(3, 33), (4, 34), (11, 41), (25, 42), (26, 43)] {
        client.write(fixture, block, data);
    }
}

/// The last flush of a client fails, by flush `nth` of the cache device.
fn fail_flush(fixture: &mut Fixture, nth: u64) {
    let disk = disk_of(fixture);
    disk.inject(fail(Op::Flush).after(nth).times(1));
    assert!(fixture.run(Bio::flush(0)).status.is_err());
    fixture.settle();
    fixture.kill();
    disk.heal();
}

pub fn known_from_memory() {
    for seed in 0..SEEDS {
        let (mut fixture, mut client) = (written(seed), Client::new());
        let nth = seed % 2;
        if seed % 3 == 0 {
            (5..8).for_each(|block| client.write(&mut fixture, block, 77));
        } else {
            write_some(&mut fixture, &mut client);
        }
        fail_flush(&mut fixture, if seed % 3 == 0 { 0 } else { nth });
        fixture.open();
        go_on(&mut fixture, &mut client, &format!("seed {seed}"));
    }
}

/// The runtime directory is gone, and the user accepts the loss of unflushed writes.
pub fn memory_is_lost() {
    for seed in 0..SEEDS {
        let (mut fixture, mut client) = (written(seed), Client::new());
        if seed % 3 == 0 {
            (5..8).for_each(|block| client.write(&mut fixture, block, 77));
        } else {
            write_some(&mut fixture, &mut client);
        }
        fail_flush(&mut fixture, if seed % 3 == 0 { 0 } else { seed % 2 });
        fixture.lose_memory();
        assert!(fixture.try_open(false).is_err());
        fixture.table = "s O C 512 0 lost_memory accept".into();
        // The first attempt does not come to its end.
        let disk = disk_of(&fixture);
        disk.inject(fail(Op::Flush).after(seed % 5).times(1));
        let _ = fixture.try_open(false);
        fixture.kill();
        disk.heal();
        fixture.open();
        go_on(&mut fixture, &mut client, &format!("seed {seed}"));
    }
}

/// The memory of the server does not outlive it.
pub fn memory_is_private() {
    for seed in 0..SEEDS {
        let mut fixture = Fixture::new(TABLE, MIB, 4 * MIB);
        fixture.origin.poke(10 * BLOCK, &[9; 10 * BLOCK as usize]);
        let disk = disk_of(&fixture);
        disk.seed(seed);
        disk.show_lost();
        fixture.store = Some(SharedStore::nowhere().unwrap());
        fixture.open();
        let mut client = Client::new();
        for block in 0..10 {
            fixture.write(block * BLOCK, &[1; BLOCK as usize], false);
        }
        fixture.flush();
        if seed % 2 == 0 {
            fixture.remove();
            fixture.open();
        }
        let overwrites = seed % 3 == 0;
        match overwrites {
            true => (5..8).for_each(|block| client.write(&mut fixture, block, 77)),
            false => write_some(&mut fixture, &mut client),
        }
        fail_flush(&mut fixture, if overwrites { 0 } else { seed % 2 });
        fixture.open();
        go_on(&mut fixture, &mut client, &format!("seed {seed}"));
    }
}

/// The server is killed while the flush is in flight: its failure is not reported.
pub fn flush_fails_after_the_death() {
    for seed in 0..SEEDS {
        let (mut fixture, mut client) = (written(seed), Client::new());
        write_some(&mut fixture, &mut client);
        let mut before = seed % 2;
        fixture.holds = Box::new(move |io| {
            let is_flush = io.disk.limits().name == "cache" && io.op == Op::Flush;
            let holds = is_flush && before == 0;
            before -= u64::from(is_flush && before > 0);
            holds
        });
        fixture.submit(Bio::flush(0));
        fixture.settle();
        let flush = fixture.held.pop_front().expect("a flush is in flight");
        let disk = disk_of(&fixture);
        fixture.kill();
        disk.inject(fail(Op::Flush).times(1));
        disk.start(flush, &mut Ring::without_kernel());
        disk.heal();
        if seed % 4 > 1 {
            // So is the server that takes the writes up.
            disk.inject(fail(Op::Flush).after(seed % 3).times(1));
            let _ = fixture.try_open(false);
            fixture.kill();
            disk.heal();
        }
        fixture.open();
        go_on(&mut fixture, &mut client, &format!("seed {seed}"));
    }
}

/// A file in the page cache as memory: its pages count as clean after a failed sync.
pub fn sync_of_a_file_fails() {
    const MANY: usize = 20 * BLOCK as usize;
    for (nth, loses_memory) in [(1, false), (2, false), (1, true), (2, true)] {
        let pmem = SimPmem::new(MIB, Persistence::Msync);
        let origin = Arc::new(SimDisk::new(4 * MIB, 512).named("origin").with_evidence());
        let cache = Cache::Memory(Arc::new(pmem));
        let mut fixture = Fixture::over("p O C 512 0", cache, origin);
        let Cache::Memory(pmem) = fixture.cache.clone() else { unreachable!() };
        fixture.open();
        fixture.write(0, &[1; BLOCK as usize], true);
        // More than a page of data: a page that is stored to again becomes durable.
        fixture.write(BLOCK, &[2; MANY], false);
        pmem.tell_failure(true);
        pmem.fail_syncs_from(nth);
        assert!(fixture.run(Bio::flush(0)).status.is_err());
        fixture.tick(SECOND);
        fixture.kill();
        pmem.tell_failure(false);
        pmem.fail_syncs_from(u64::MAX);
        if loses_memory {
            fixture.lose_memory();
            fixture.table = "p O C 512 0 lost_memory accept".into();
        }
        fixture.open();
        let seen = fixture.read(BLOCK, MANY);
        fixture.write(64 * BLOCK, &[3; BLOCK as usize], false);
        fixture.flush();
        fixture.kill();
        fixture.cache = Cache::Memory(Arc::new(pmem.snapshot_durable()));
        fixture.reboot();
        fixture.open();
        let what = format!("sync {nth}, memory lost: {loses_memory}");
        assert_eq!(fixture.read(0, BLOCK as usize), [1; BLOCK as usize], "{what}");
        assert!(fixture.read(BLOCK, MANY) == seen, "{what}");
        assert_eq!(fixture.read(64 * BLOCK, BLOCK as usize), [3; BLOCK as usize], "{what}");
    }
}

#[test]
fn a_failed_flush_is_known_from_memory() {
    known_from_memory();
}

#[test]
fn without_the_memory_of_the_last_server_all_is_written_again() {
    memory_is_lost();
}

#[test]
fn private_memory_is_known_to_be_lost() {
    memory_is_private();
}

#[test]
fn a_flush_that_fails_after_the_death_of_its_server_loses_nothing() {
    flush_fails_after_the_death();
}

#[test]
fn a_failed_sync_of_a_file_is_known_from_memory() {
    sync_of_a_file_fails();
}

#[cfg(feature = "mutants")]
#[test]
fn a_bug_that_trusts_such_a_device_is_found() {
    use udm::mutants::{Mutant, set};
    let cases = [
        (Mutant::FailureForgotten, known_from_memory as fn()),
        (Mutant::LostMemoryTrusted, memory_is_lost),
        (Mutant::LostMemoryTrusted, memory_is_private),
        (Mutant::FlushAtDeathTrusted, flush_fails_after_the_death),
        (Mutant::FailedSyncForgotten, sync_of_a_file_fails),
    ];
    for (mutant, case) in cases {
        set(Some(mutant));
        let found = std::panic::catch_unwind(case);
        set(None);
        assert!(found.is_err(), "{mutant:?}");
    }
}
