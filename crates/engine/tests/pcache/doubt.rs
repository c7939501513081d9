//! A sync of a file as cache device fails, and its server is killed. The file returns the lost data
//! until the power fails, and the memory that would tell the next server is gone.

use udm::bio::Bio;
use udm::pmem::Persistence;
use udm::shm::SharedStore;
use udm::target::Target;

use crate::fixture::{Fixture, Setup};

const BLOCK: usize = 4096;

fn opened(is_private: bool) -> Fixture {
    let setup = Setup { persistence: Persistence::Msync, ..Setup::small() };
    let mut fixture = Fixture::new(setup.table("C B 0 lost_memory accept"));
    fixture.store = is_private.then(|| SharedStore::nowhere().unwrap());
    fixture.open();
    fixture.write(0, &[1; BLOCK], true);
    fixture
}

/// The keys of these writes take more than a page of the log.
const WRITES: u64 = 100;

fn place(nth: u64) -> u64 {
    (1 << 20) + nth * 2 * BLOCK as u64
}

/// After the error of a client's flush, in sync `nth`. Returns false if the flush has fewer syncs.
fn lose(is_private: bool, nth: u64) -> bool {
    let what = format!("private: {is_private}, sync {nth}");
    let mut fixture = opened(is_private);
    (0..WRITES).for_each(|nth| fixture.write(place(nth), &[2; 512], false));
    fixture.pmem.tell_failure(true);
    fixture.pmem.fail_syncs_from(nth);
    if fixture.run(Bio::flush(0)).status.is_ok() {
        return false;
    }
    fixture.kill();
    fixture.pmem.tell_failure(false);
    fixture.pmem.fail_syncs_from(u64::MAX);
    fixture.lose_memory();
    fixture.open();
    let mut wanted: Vec<(u64, Vec<u8>)> =
        (0..WRITES).map(|nth| (place(nth), fixture.read(place(nth), 512))).collect();
    fixture.write(2 * BLOCK as u64, &[3; 512], false);
    fixture.flush();
    fixture.kill();
    fixture.pmem = std::sync::Arc::new(fixture.pmem.snapshot_durable());
    fixture.reboot();
    fixture.open();
    wanted.extend([(0, vec![1; 512]), (2 * BLOCK as u64, vec![3; 512])]);
    for (at, wanted) in wanted {
        assert!(fixture.read(at, 512) == wanted, "{what}: the data at {at} is another");
    }
    true
}

pub fn all_is_stored_again() {
    for is_private in [false, true] {
        assert!((1..6).filter(|nth| lose(is_private, *nth)).count() > 0);
    }
}

#[test]
fn without_the_memory_of_the_last_server_all_is_stored_again() {
    all_is_stored_again();
}

/// Such a server ends in order like any other.
#[test]
fn private_memory_is_no_reason_to_refuse_a_cache() {
    let mut fixture = opened(true);
    fixture.setup.table = "C B 0";
    fixture.remove();
    fixture.open();
    fixture.kill();
    fixture.store = None;
    fixture.open();
    assert_eq!(fixture.read(0, BLOCK), [1; BLOCK]);
    assert_eq!(fixture.target().dirty().bytes, BLOCK as u64);
}

#[cfg(feature = "mutants")]
#[test]
fn a_bug_that_trusts_such_a_file_is_found() {
    use udm::mutants::{Mutant, set};
    set(Some(Mutant::LostOpenSetsTrusted));
    let found = std::panic::catch_unwind(all_is_stored_again);
    set(None);
    assert!(found.is_err());
}
