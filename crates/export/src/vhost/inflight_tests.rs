//! The log of split rings: deaths at each moment, and invalid logs.

#![allow(clippy::unwrap_used)]
use super::*;

const ENTRIES: u16 = 16;

fn notes() -> Notes {
    let extent = Extent { bytes: 0, offset: 0, rings: 2, entries: 32, is_packed: false };
    let extent = extent.needed();
    Notes::map(&extent.make().unwrap(), extent).unwrap()
}

/// Returns the requests that a new server repeats.
fn again(notes: &Notes, used: u16) -> Vec<u16> {
    notes.open(1, ENTRIES, used).unwrap().1
}

#[test]
fn the_layout_is_that_of_the_specification() {
    let notes = notes();
    assert_eq!(notes.extent.bytes, 2 * 576);
    let (mut tracker, _) = notes.open(1, ENTRIES, 9).unwrap();
    [3, 5].iter().for_each(|head| tracker.note(*head));
    tracker.answered(3);
    tracker.answered(5);
    let mut bytes = [0; 112];
    notes.client_memory.load(576, &mut bytes);
    assert_eq!(bytes[..16], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 16, 0, 5, 0, 9, 0]);
    assert_eq!(bytes[64..80], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(bytes[96..112], [1, 0, 0, 0, 0, 0, 3, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    tracker.published(11).unwrap();
    notes.client_memory.load(576, &mut bytes);
    assert_eq!((bytes[14], bytes[64], bytes[96]), (11, 0, 0));
}

#[test]
fn requests_are_done_again_in_the_order_they_were_taken() {
    let notes = notes();
    let (mut tracker, first) = notes.open(1, ENTRIES, 100).unwrap();
    assert_eq!(first, []);
    [7, 0, 12, 3].iter().for_each(|head| tracker.note(*head));
    tracker.answered(12);
    tracker.published(101).unwrap();
    assert_eq!(again(&notes, 101), [7, 0, 3]);
    // The next server's requests follow them.
    let (mut tracker, _) = notes.open(1, ENTRIES, 101).unwrap();
    tracker.note(1);
    assert_eq!(again(&notes, 101), [7, 0, 3, 1]);
    assert_eq!(notes.open(0, ENTRIES, 0).unwrap().1, [], "the other ring is empty");
}

/// SPDK's issue 3766: the very first request is lost if no request had completed, because the end
/// of the empty list is also a request's number.
#[test]
fn request_0_is_not_lost_if_none_had_completed() {
    let notes = notes();
    let (mut tracker, _) = notes.open(1, ENTRIES, 0).unwrap();
    tracker.note(0);
    assert_eq!(again(&notes, 0), [0]);
    // The same with an answer that was prepared, but not published.
    tracker.answered(0);
    assert_eq!(again(&notes, 0), [0]);
}

#[test]
fn a_file_that_is_new_to_a_ring_that_is_not_has_nothing_in_flight() {
    let notes = notes();
    assert_eq!(again(&notes, 40_000), []);
    assert_eq!(again(&notes, 40_000), []);
}

/// Each moment between the visible answer and the last clearing.
#[test]
fn a_death_after_the_answer_does_nothing_again() {
    for crossed_out in 0..=3 {
        for used in [0, u16::MAX - 1] {
            let notes = notes();
            let (mut tracker, _) = notes.open(1, ENTRIES, used).unwrap();
            [0, 4, 9, 2, 6].iter().for_each(|head| tracker.note(*head));
            tracker.answered(4);
            tracker.published(used.wrapping_add(1)).unwrap();
            [9, 0, 6].iter().for_each(|head| tracker.answered(*head));
            [9, 0, 6].iter().take(crossed_out).for_each(|head| tracker.cross_out(*head));
            // The used index shows all four.
            assert_eq!(again(&notes, used.wrapping_add(4)), [2]);
            assert_eq!(again(&notes, used.wrapping_add(4)), [2], "and once more");
        }
    }
}

/// Before the answer is visible, every unpublished request is repeated.
#[test]
fn a_death_before_the_answer_loses_nothing() {
    for answered in 0..=3 {
        let notes = notes();
        let (mut tracker, _) = notes.open(1, ENTRIES, 5).unwrap();
        [0, 4, 9].iter().for_each(|head| tracker.note(*head));
        [9, 0, 4].iter().take(answered).for_each(|head| tracker.answered(*head));
        assert_eq!(again(&notes, 5), [0, 4, 9]);
    }
}

#[test]
fn notes_that_cannot_be_are_refused() {
    let part = |change: fn(&ClientMemory)| {
        let notes = notes();
        let (mut tracker, _) = notes.open(1, ENTRIES, 5).unwrap();
        tracker.note(0);
        change(&notes.client_memory);
        notes.open(1, ENTRIES, 6).unwrap_err().to_string()
    };
    let said = part(|client_memory| client_memory.u16_at(576 + 8).store(2, Ordering::Relaxed));
    assert_eq!(said, "requests in flight of version 2");
    let said = part(|client_memory| client_memory.u16_at(576 + 14).store(900, Ordering::Relaxed));
    assert!(said.contains("requests answered at a time in a ring of 16"), "{said}");
    let said = part(|client_memory| client_memory.u16_at(576 + 12).store(16, Ordering::Relaxed));
    assert_eq!(said, "request 16 answered in a ring of 16");
    let notes = notes();
    assert!(notes.open(2, ENTRIES, 0).is_err() && notes.open(0, 64, 0).is_err());
    let extent = notes.extent;
    let file = extent.make().unwrap();
    for wrong in [
        Extent { bytes: extent.bytes - 1, ..extent },
        Extent { offset: 1, ..extent },
        Extent { offset: 1 << 40, ..extent },
        Extent { offset: u64::MAX - 63, ..extent },
    ] {
        assert!(Notes::map(&file, wrong).is_err(), "{wrong:?}");
    }
    for payload in [vec![], vec![0; 20], vec![0xff; 24], vec![1; 22]] {
        assert!(Extent::parse(&payload, false).is_err());
    }
    let padded = [extent.print(), vec![0; 4]].concat();
    assert_eq!(
        (Extent::parse(&padded, false), Extent::parse(&extent.print(), false)),
        (Ok(extent), Ok(extent))
    );
}
