//! Backing devices that another program changed while no server had the cache.

use udm::prng::Prng;
use udm::target::Target;

use crate::fixture::{Fixture, Setup};

const A: u64 = 0;
const B: u64 = 64 << 10;

fn notes(fixture: &Fixture) -> usize {
    fixture.target().facts().iter().filter(|fact| fact.name == "attach_note").count()
}

/// Clean data at A, changed on the backing device; dirty data at B if asked for.
fn changed(has_dirty: bool) -> Fixture {
    let mut fixture = Fixture::new(Setup::small());
    fixture.open();
    fixture.write(A, &[1; 4096], true);
    fixture.drain();
    if has_dirty {
        fixture.write(B, &[2; 4096], true);
    }
    fixture.remove();
    fixture.open();
    assert_eq!((notes(&fixture), fixture.read(A, 4096)), (0, vec![1; 4096]));
    fixture.remove();
    fixture.disk.poke(A, &[9; 4096]);
    fixture
}

#[test]
fn a_clean_cache_is_formatted() {
    let mut fixture = changed(false);
    fixture.open();
    assert_eq!((notes(&fixture), fixture.read(A, 4096)), (1, vec![9; 4096]));
    fixture.write(B, &[3; 4096], false);
    fixture.kill();
    fixture.open();
    assert_eq!((fixture.read(A, 4096), fixture.read(B, 4096)), (vec![9; 4096], vec![3; 4096]));
    fixture.remove();
    fixture.open();
    assert_eq!(notes(&fixture), 0);
}

#[test]
fn dirty_data_is_refused_and_clean_data_never_comes_back() {
    let mut fixture = changed(true);
    let error = fixture.try_open(false).unwrap_err().to_string();
    assert!(error.contains("was changed") && error.contains("rebind true"), "{error}");
    fixture.setup.table = "C B 0 rebind true";
    fixture.open();
    assert_eq!((fixture.read(A, 4096), fixture.read(B, 4096)), (vec![9; 4096], vec![2; 4096]));
    fixture.setup.table = "C B 0";
    // By a kill, a power failure, an orderly end: dropped data does not reappear.
    for end in 0..3 {
        match end {
            0 => fixture.kill(),
            1 => fixture.power_cut(&mut Prng::new(3)),
            _ => fixture.remove(),
        }
        fixture.open();
        let found = (fixture.read(A, 4096), fixture.read(B, 4096));
        assert_eq!(found, (vec![9; 4096], vec![2; 4096]), "after end {end}");
    }
    // Once no data is dirty, the cache is formatted.
    fixture.drain();
    fixture.remove();
    fixture.open();
    assert_eq!((fixture.read(A, 4096), fixture.read(B, 4096)), (vec![9; 4096], vec![2; 4096]));
    fixture.remove();
    fixture.open();
    assert_eq!(notes(&fixture), 0);
}

#[test]
fn after_a_death_nothing_is_known() {
    let mut fixture = changed(true);
    fixture.disk.poke(A, &[1; 4096]);
    fixture.open();
    fixture.kill();
    fixture.disk.poke(A, &[9; 4096]);
    fixture.open();
    assert_eq!((notes(&fixture), fixture.read(B, 4096)), (0, vec![2; 4096]));
}
