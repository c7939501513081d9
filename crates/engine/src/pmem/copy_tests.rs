//! Every primitive, at every offset and length within a line, between guard bytes.

use std::cell::RefCell;

use super::*;

thread_local! {
    /// Addresses of the edges that this thread flushed.
    static FLUSHED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn note_flush(edge: *mut u8) {
    FLUSHED.with_borrow_mut(|flushed| flushed.push(edge.addr()));
}

/// Memory whose first byte is a multiple of 4096.
#[repr(align(4096))]
struct Area([u8; 16384]);

const GUARD: u8 = 0xA5;

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251 + 1) as u8).collect()
}

/// The lines that a range covers in part, as numbers.
fn partial_lines(start: usize, end: usize) -> Vec<usize> {
    let mut lines = Vec::new();
    if start < end && (!start.is_multiple_of(LINE) || end / LINE == start / LINE) {
        lines.push(start / LINE);
    }
    if !end.is_multiple_of(LINE) && end / LINE > start / LINE {
        lines.push(end / LINE);
    }
    lines
}

fn check_copy(primitive: Primitive, area: &mut Area, offset: usize, src: &[u8]) {
    area.0.fill(GUARD);
    FLUSHED.take();
    copy_with(primitive, &mut area.0[offset..offset + src.len()], src);
    fence();
    let end = offset + src.len();
    let name = primitive.name();
    let base = area.0.as_ptr().addr();
    let flushed: Vec<usize> = FLUSHED.take().into_iter().map(|edge| edge / LINE).collect();
    let edges =
        if primitive.is_durable() { partial_lines(base + offset, base + end) } else { vec![] };
    assert_eq!(flushed, edges, "{name} flushes the edges of {offset}+{}", src.len());
    assert!(area.0[offset..end] == *src, "{name} at {offset}+{}", src.len());
    assert!(area.0[..offset].iter().all(|b| *b == GUARD), "{name} before {offset}+{}", src.len());
    assert!(area.0[end..].iter().all(|b| *b == GUARD), "{name} after {offset}+{}", src.len());
}

#[test]
fn every_offset_and_length_of_every_primitive() {
    let mut area = Box::new(Area([0; 16384]));
    let source = pattern(5000);
    for primitive in Primitive::available() {
        for offset in 0..64 {
            for len in (0..200).chain([4096 - 64 + offset, 4096]) {
                // The source's alignment varies as well.
                let start = len % 17;
                check_copy(primitive, &mut area, 4096 + offset, &source[start..start + len]);
            }
        }
    }
}

#[test]
fn zeroes_of_every_primitive() {
    let mut area = Box::new(Area([0; 16384]));
    for primitive in Primitive::available() {
        for offset in 0..64 {
            for len in (0..130).chain([4095, 4096, 4097, 9001]) {
                area.0.fill(GUARD);
                let (at, end) = (1000 + offset, 1000 + offset + len);
                // SAFETY: `area` is exclusively ours and longer than `end`.
                unsafe { zero_raw(primitive, area.0[at..end].as_mut_ptr(), len) };
                fence();
                assert!(area.0[at..end].iter().all(|byte| *byte == 0));
                assert!(area.0[..at].iter().chain(&area.0[end..]).all(|byte| *byte == GUARD));
            }
        }
    }
}

#[test]
fn loads_of_every_offset_and_length() {
    let mut area = Box::new(Area([0; 16384]));
    area.0.copy_from_slice(&pattern(16384));
    for offset in 0..64 {
        for len in (0..300).chain([4095, 4096, 4097, 8000 + offset]) {
            let mut into = vec![GUARD; len + 2];
            // SAFETY: `area` is longer than offset + len.
            unsafe { load_raw(area.0[offset..].as_ptr(), &mut into[1..=len]) };
            assert_eq!(into[1..=len], area.0[offset..offset + len]);
            assert_eq!([into[0], into[len + 1]], [GUARD; 2]);
        }
    }
}

#[test]
fn plans_choose_by_size() {
    let mut by_class = [Primitive::Plain; COPY_CLASSES];
    assert_eq!([0, 1, 63, 64, 127, 128].map(CopyPlan::class), [0, 0, 0, 1, 1, 2]);
    assert_eq!([4095, 4096, 65535, 65536, 1 << 30].map(CopyPlan::class), [6, 7, 10, 11, 11]);
    assert!(!CopyPlan::new(by_class).is_durable());
    assert_eq!(CopyPlan::usual().is_durable(), CAN_FLUSH);
    if CAN_FLUSH {
        by_class[7] = Primitive::Movnti;
        assert_eq!(CopyPlan::new(by_class).choose(5000), Primitive::Movnti);
        assert_eq!(CopyPlan::new(by_class).choose(4095), Primitive::Plain);
    }
}

#[test]
fn a_plan_says_where_it_changes() {
    assert_eq!(CopyPlan::only(Primitive::Plain).to_string(), "plain");
    if Primitive::Movnti.is_available() {
        let by_class: [Primitive; COPY_CLASSES] = std::array::from_fn(|class| match class {
            0..=2 => Primitive::Plain,
            _ => Primitive::Movnti,
        });
        let plan = CopyPlan::new(by_class);
        assert_eq!(plan.to_string(), "plain, movnti from 256");
        assert_eq!((plan.choose(255), plan.choose(256)), (Primitive::Plain, Primitive::Movnti));
    }
}
