//! Fills, writes and the background in any order, on plain arrays: valid sectors equal the origin.

use super::*;
use crate::prng::Prng;

const SECTORS: u32 = 24;

/// An I/O in flight: at first at the origin, then perhaps to the slot.
struct Io {
    id: u32,
    sectors: Range<u32>,
    /// The written value; `None`: a read.
    value: Option<u64>,
    has_data: bool,
    /// The data for the slot.
    carried: Vec<u64>,
    is_at_slot: bool,
}

struct Model {
    partials: Partials,
    origin: Vec<u64>,
    slot: Vec<u64>,
    ios: Vec<Io>,
    prng: Prng,
    next: u64,
}

impl Model {
    fn range(&mut self) -> Range<u32> {
        let start = self.prng.below(SECTORS.into()) as u32;
        start..(start + 1 + self.prng.below(5) as u32).min(SECTORS)
    }

    fn begin(&mut self) {
        let sectors = self.range();
        let (carried, is_at_slot) = (Vec::new(), false);
        match self.prng.below(5) {
            0 | 1 => {
                let has_data = !self.prng.one_in(4);
                let id = self.partials.write_begins(7, sectors.clone(), has_data);
                self.next += 1;
                let value = Some(self.next);
                self.ios.push(Io { id, sectors, value, has_data, carried, is_at_slot });
            }
            2 | 3 => {
                if let Some(id) = self.partials.read_begins(7, sectors.clone()) {
                    let (value, has_data) = (None, true);
                    self.ios.push(Io { id, sectors, value, has_data, carried, is_at_slot });
                }
            }
            _ => {
                self.partials.wish(7, sectors);
                if let Some(Gap { block, id, sectors }) = self.partials.next_gap(3) {
                    assert_eq!(block, 7);
                    assert!(!sectors.is_empty() && !self.partials.has(7, &sectors));
                    let (value, has_data) = (None, true);
                    self.ios.push(Io { id, sectors, value, has_data, carried, is_at_slot });
                }
            }
        }
    }

    /// An I/O in flight ends, at the origin or at the slot.
    fn end(&mut self) {
        let nth = self.prng.below(self.ios.len() as u64) as usize;
        let mut io = self.ios.swap_remove(nth);
        let at = io.sectors.start as usize..io.sectors.end as usize;
        let is_done = !self.prng.one_in(8);
        if io.is_at_slot {
            if is_done {
                self.slot[at].copy_from_slice(&io.carried);
            } else {
                self.slot[at].fill(u64::MAX);
            }
            self.partials.ended(7, io.id, is_done);
            return;
        }
        if let Some(value) = io.value {
            self.origin[at.clone()].fill(value);
        }
        io.carried = self.origin[at].to_vec();
        if self.partials.answered(7, io.id, is_done && io.has_data) {
            io.is_at_slot = true;
            self.ios.push(io);
        }
    }

    fn check(&self) {
        for sector in 0..SECTORS {
            if self.partials.has(7, &(sector..sector + 1)) {
                let at = sector as usize;
                assert_eq!(self.slot[at], self.origin[at], "sector {sector}");
                let is_written = |io: &&Io| io.value.is_some() && io.sectors.contains(&sector);
                assert!(self.ios.iter().find(is_written).is_none(), "sector {sector} is written");
            }
        }
        let at_slot: Vec<&Io> = self.ios.iter().filter(|io| io.is_at_slot).collect();
        for (nth, one) in at_slot.iter().enumerate() {
            let meets = |other: &&Io| overlap(&one.sectors, &other.sectors);
            assert!(!at_slot[nth + 1..].iter().any(meets), "two get to the slot together");
        }
    }
}

#[test]
fn what_is_valid_equals_the_origin() {
    for seed in 0..300 {
        let mut partials = Partials::new(SECTORS, 100, 100);
        partials.begin(7, 3);
        let origin = (0..u64::from(SECTORS)).map(|sector| 1 << 40 | sector).collect();
        let slot = vec![u64::MAX; SECTORS as usize];
        let mut model =
            Model { partials, origin, slot, ios: Vec::new(), prng: Prng::new(seed), next: 0 };
        let mut most = 0;
        for _ in 0..400 {
            match model.ios.is_empty() || model.ios.len() < 6 && model.prng.one_in(2) {
                true => model.begin(),
                false => model.end(),
            }
            model.check();
            most = most.max(model.partials.filled(7));
        }
        assert!(most > 3, "something gets there");
        while !model.ios.is_empty() {
            model.end();
            model.check();
        }
        assert!(!model.partials.is_busy() && model.partials.filling() == [0; 2]);
    }
}

#[test]
fn what_is_lost_is_not_valid() {
    let mut partials = Partials::new(64, 1 << 20, 1 << 20);
    partials.begin(1, 0);
    let id = partials.read_begins(1, 0..8).unwrap();
    assert!(partials.answered(1, id, true) && !partials.ended(1, id, true));
    assert!(partials.has(1, &(0..8)));
    let id = partials.read_begins(1, 8..16).unwrap();
    partials.wish(1, 0..u32::MAX);
    partials.lose();
    assert!(!partials.has(1, &(0..1)) && !partials.answered(1, id, true));
    assert_eq!((partials.filled(1), partials.next_gap(8)), (0, None));
}

#[test]
fn gaps_are_what_is_missing_and_not_under_way() {
    let mut partials = Partials::new(64, 1 << 20, 1 << 20);
    partials.begin(1, 0);
    for sectors in [8..16, 24..32] {
        let id = partials.read_begins(1, sectors).unwrap();
        assert!(partials.answered(1, id, true) && !partials.ended(1, id, true));
    }
    let write = partials.write_begins(1, 40..48, false);
    partials.wish(1, 0..u32::MAX);
    let mut gaps = Vec::new();
    while let Some(gap) = partials.next_gap(10) {
        gaps.push(gap);
    }
    let found: Vec<Range<u32>> = gaps.iter().map(|gap| gap.sectors.clone()).collect();
    assert_eq!(found, [0..8, 16..24, 32..40, 48..58, 58..64]);
    for gap in gaps {
        assert!(partials.answered(1, gap.id, true) && !partials.ended(1, gap.id, true));
    }
    assert_eq!(partials.next_gap(64), None);
    assert!(!partials.answered(1, write, false));
    // Zeroes cannot fill a slot, so the background reads their sectors like the rest.
    let last = partials.next_gap(64).unwrap();
    assert_eq!(last.sectors, 40..48);
    assert!(partials.answered(1, last.id, true) && partials.ended(1, last.id, true));
}
