//! The note of the origin: it exists at rest, and at no other time; it decides which blocks count.

use std::sync::Arc;

use udm::bio::Op;
use udm::cache::metadata::block::BlockKind;
use udm::cache::metadata::superblock::OriginNote;
use udm::cache::metadata::{BLOCK_BYTES, load};
use udm::disk::{Disk, Effect, Fault};
use udm::error::Status;
use udm::prng::Prng;
use udm::target::Target;

use crate::fixture::{BLOCK, Fixture};

const ORIGIN: u64 = 8 * BLOCK;
const TABLE: &str = "64 1 metadata2 smq 0";

/// A cache with a clean block 1 and a dirty block 3.
fn filled() -> Fixture {
    let mut fixture = Fixture::opened(TABLE, 4, ORIGIN);
    fixture.bring(1);
    fixture.bring(3);
    fixture.write(3 * BLOCK, &[7; 512]);
    fixture
}

fn note(fixture: &Fixture) -> Option<OriginNote> {
    let disk: Arc<dyn Disk> = fixture.disks[0].clone();
    load(&disk).unwrap().superblock.note
}

fn notes(fixture: &Fixture) -> usize {
    fixture.target().facts().iter().filter(|fact| fact.name == "attach_note").count()
}

#[test]
fn the_note_is_there_at_rest_and_gone_before_the_first_request() {
    let mut fixture = filled();
    assert_eq!(note(&fixture), None);
    fixture.remove();
    assert!(note(&fixture).is_some());
    fixture.open();
    assert_eq!((note(&fixture), notes(&fixture)), (None, 0));
    assert_eq!(fixture.fact("cached_bytes"), 2 * BLOCK);
    // A server that dies leaves none, and neither does one that never came to rest.
    fixture.target().detach();
    assert_eq!(note(&fixture), None);
    fixture.crash(&mut Prng::new(1));
    fixture.open();
    assert_eq!((fixture.fact("cached_bytes"), notes(&fixture)), (2 * BLOCK, 0));
}

#[test]
fn clean_blocks_of_a_changed_origin_go_durably_and_dirty_ones_are_refused() {
    let mut fixture = filled();
    fixture.remove();
    fixture.disks[2].poke(BLOCK, &[9; 512]);
    let error = fixture.try_open().unwrap_err().to_string();
    assert!(error.contains("was changed") && error.contains("rebind true"), "{error}");
    assert!(note(&fixture).is_some(), "a refused attach keeps the note");
    fixture.table = format!("{TABLE} rebind true");
    fixture.open();
    assert_eq!((fixture.fact("cached_bytes"), notes(&fixture)), (BLOCK, 1));
    assert_eq!(fixture.read(BLOCK, 512), [9; 512]);
    // Dropped blocks do not reappear.
    fixture.crash(&mut Prng::new(2));
    fixture.table = TABLE.into();
    fixture.open();
    assert_eq!((fixture.fact("cached_bytes"), fixture.fact("dirty_bytes")), (BLOCK, BLOCK));
    assert_eq!(
        (fixture.read(BLOCK, 512), fixture.read(3 * BLOCK, 512)),
        (vec![9; 512], vec![7; 512])
    );
}

#[test]
fn a_note_of_metadata_that_somebody_else_has_written_counts_no_more() {
    let mut fixture = filled();
    fixture.remove();
    // As a kernel does it that serves a read.
    let mut block = [0; BLOCK_BYTES];
    fixture.disks[0].peek(0, &mut block);
    block[256] ^= 1;
    BlockKind::Superblock.seal(&mut block, 0);
    fixture.disks[0].poke(0, &block);
    fixture.disks[2].poke(BLOCK, &[9; 512]);
    assert_eq!(note(&fixture), None);
    fixture.open();
    assert_eq!((fixture.fact("cached_bytes"), notes(&fixture)), (2 * BLOCK, 0));
}

#[test]
fn no_failure_and_no_power_cut_leaves_a_note_that_is_wrong() {
    for seed in 0..40 {
        let mut prng = Prng::new(seed);
        let mut fixture = filled();
        for _ in 0..6 {
            fixture.suspend();
            let op = if prng.one_in(2) { Op::Write } else { Op::Flush };
            let fault = Fault::new(Effect::Fail(Status::Io)).of(op).after(prng.below(3));
            let disk = [0, 2][prng.below(2) as usize];
            fixture.disks[disk].inject(fault);
            fixture.target().detach();
            fixture.crash(&mut prng);
            fixture.disks[disk].heal();
            fixture.open();
            assert_eq!(notes(&fixture), 0, "seed {seed}");
            assert_eq!(fixture.fact("dirty_bytes"), BLOCK, "seed {seed}");
            assert_eq!(fixture.read(3 * BLOCK, 512), [7; 512], "seed {seed}");
            // A write that passes by.
            fixture.write(6 * BLOCK, &[seed as u8; 512]);
            fixture.flush();
        }
    }
}
