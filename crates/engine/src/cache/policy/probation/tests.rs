//! The policy's decisions in single cases.

use super::*;

const BLOCK_BYTES: u32 = 256 << 10;

/// A policy with this many slots that are kept, and as many blocks.
fn kept(slots: u32) -> Probation {
    let shape = Shape { slots, block_bytes: BLOCK_BYTES, origin_blocks: 1 << 20 };
    let mut policy = Probation::new(&shape, Arc::new(Uses::new(slots)));
    (0..slots).for_each(|slot| policy.load(slot, None, false));
    policy
}

/// A policy in which block 7 has just entered slot 0 by a request.
fn entered(is_write: bool) -> Probation {
    let shape = Shape { slots: 8, block_bytes: BLOCK_BYTES, origin_blocks: 1 << 20 };
    let mut policy = Probation::new(&shape, Arc::new(Uses::new(8)));
    assert_eq!(policy.miss(&asked(0, is_write)), Admission::Enter(Fill::Asked));
    policy.enter(0, 7);
    policy
}

fn asked(offset: u32, is_write: bool) -> Miss {
    Miss { block: 7, offset, len: 4096, is_write }
}

#[test]
fn a_block_that_will_stay_is_brought_in_whole_at_once() {
    let mut policy = entered(false);
    let fills = [3, 1, 5].map(|nth| policy.gap(0, &asked(nth << 15, false), 4096));
    assert_eq!(fills, [Fill::Ahead(4096), Fill::Ahead(4096), Fill::Whole]);
}

#[test]
fn a_block_that_is_there_and_written_to_is_brought_in_whole() {
    for is_write in [false, true] {
        let mut policy = entered(is_write);
        assert_eq!(policy.gap(0, &asked(1 << 15, true), 4096), Fill::Whole);
    }
}

#[test]
fn uses_before_are_those_of_the_block_that_enters() {
    let mut policy = entered(false);
    (0..2).for_each(|_| assert!(policy.gap(0, &asked(0, false), 4096) != Fill::Whole));
    policy.leave(0, 7);
    // Another block is asked about, and finds no slot.
    policy.miss(&Miss { block: 7, ..asked(0, false) });
    policy.miss(&Miss { block: 8, ..asked(0, false) });
    policy.enter(0, 7);
    assert_eq!(policy.uses.of(0), 3);
}

#[test]
fn a_dirty_block_leaves_when_it_is_clean_and_uses_of_others_stay() {
    let mut policy = kept(8);
    (0..4).for_each(|slot| policy.set_dirty(slot, true));
    (4..8).for_each(|slot| policy.uses.set(slot, 2));
    assert_eq!(policy.next(), Some(Next::Clean(0)));
    assert_eq!(policy.next(), Some(Next::Clean(1)));
    assert!((4..8).all(|slot| policy.uses.of(slot) == 2), "the hand was not there");
    policy.set_dirty(1, false);
    assert_eq!(policy.next(), Some(Next::Leave(1)));
    policy.leave(1, 11);
    // One that was used meanwhile stays.
    policy.set_dirty(0, false);
    policy.uses.touch(0);
    assert_eq!(policy.next(), Some(Next::Clean(2)));
}

#[test]
fn what_could_not_be_written_back_is_taken_again() {
    let mut policy = kept(3);
    (0..3).for_each(|slot| policy.set_dirty(slot, true));
    let taken: Vec<_> = (0..4).map(|_| policy.next()).collect();
    assert_eq!(
        taken,
        [0, 1, 2].map(|slot| Some(Next::Clean(slot))).into_iter().chain([None]).collect::<Vec<_>>(),
        "a block in write-back is not named again"
    );
    policy.stay(1);
    assert_eq!(policy.next(), Some(Next::Clean(1)));
}
