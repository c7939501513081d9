//! The states that a crash may leave of a disk: each sector keeps its durable content, or any that
//! was written since the last flush that covers it, whether that write had completed or not.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use crate::sim::PendingLine;

pub const SECTOR: usize = 512;

/// What happens to a disk.
#[derive(Clone, Debug)]
pub enum DiskEvent {
    Write {
        id: u32,
        at: u32,
        bytes: Box<[u8]>,
    },
    /// Of these sectors: those of one disk.
    Flush {
        id: u32,
        sectors: Range<u32>,
    },
    Done {
        id: u32,
        end: End,
    },
}

/// How an I/O ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Good,
    /// It fails; it is read from now on or not, and no later flush settles which.
    Failed {
        arrives: bool,
    },
    /// Its sender is gone, and it never arrives.
    Dropped,
}

/// Written and not flushed: number of the write, content, and whether no later flush helps.
type Later = (u32, Box<[u8]>, bool);

/// The writes of a disk that are not durable.
#[derive(Clone, Debug, Default)]
pub struct Sectors {
    later: BTreeMap<u32, Vec<Later>>,
    in_flight: Vec<(u32, u32, Box<[u8]>)>,
    /// Flushes under way: the sectors of the disk, and the last write that had completed when the
    /// flush started.
    flushes: HashMap<u32, (Range<u32>, u32)>,
    newest: u32,
}

impl Sectors {
    pub fn begin(&mut self, id: u32, at: u32, bytes: Box<[u8]>) {
        self.in_flight.push((id, at, bytes));
    }

    pub fn begin_flush(&mut self, id: u32, sectors: Range<u32>) {
        self.flushes.insert(id, (sectors, self.newest));
    }

    /// From now on later flushes settle what failures have left open.
    pub fn forget_failures(&mut self) {
        self.later.values_mut().flatten().for_each(|later| later.2 = false);
    }

    /// Whether it is a flush under way.
    pub fn is_flush(&self, id: u32) -> bool {
        self.flushes.contains_key(&id)
    }

    /// Ends an I/O. A good flush hands the sectors that are durable now, with their contents, to
    /// `settle`; `read` knows what was durable before.
    pub fn end(
        &mut self,
        id: u32,
        end: End,
        read: impl Fn(u32) -> Box<[u8]>,
        mut settle: impl FnMut(u32, &[u8]),
    ) {
        if let Some((sectors, upto)) = self.flushes.remove(&id) {
            match end {
                End::Good => self.flush(&sectors, upto, &mut settle),
                End::Failed { .. } => {
                    let later = self.later.range_mut(sectors).flat_map(|(_, later)| later);
                    later.for_each(|later| later.2 = true);
                }
                End::Dropped => {}
            }
            return;
        }
        let Some(place) = self.in_flight.iter().position(|write| write.0 == id) else { return };
        let (_, at, bytes) = self.in_flight.remove(place);
        self.newest += 1;
        for (nth, content) in bytes.chunks(SECTOR).enumerate() {
            let sector = at / SECTOR as u32 + nth as u32;
            let later = self.later.entry(sector).or_default();
            let before = later.last().map_or_else(|| read(sector), |later| later.1.clone());
            let content: Box<[u8]> = content.into();
            match end {
                End::Good => later.push((self.newest, content, false)),
                End::Failed { arrives } => {
                    let (first, last) = if arrives { (before, content) } else { (content, before) };
                    later.push((self.newest, first, true));
                    later.push((self.newest, last, true));
                }
                End::Dropped => {}
            }
        }
    }

    fn flush(&mut self, of: &Range<u32>, upto: u32, settle: &mut impl FnMut(u32, &[u8])) {
        self.later.retain(|sector, later| {
            if !of.contains(sector) {
                return true;
            }
            let covered = later.iter().rposition(|entry| entry.0 <= upto && !entry.2);
            if let Some(covered) = covered {
                settle(*sector, &later[covered].1);
                later.drain(..=covered);
            }
            !later.is_empty()
        });
    }

    /// The state when the sender of the I/O is gone, and these sectors arrived.
    pub fn left_behind(&self, arrived: impl Iterator<Item = (u32, Box<[u8]>)>) -> Sectors {
        let mut left =
            Sectors { later: self.later.clone(), newest: self.newest, ..Sectors::default() };
        for (sector, content) in arrived {
            left.later.entry(sector).or_default().push((left.newest, content, false));
        }
        left
    }

    /// Readable content that is not durable: sector and content.
    pub fn visible(&self) -> impl Iterator<Item = (u32, &[u8])> {
        self.later.iter().filter_map(|(sector, later)| Some((*sector, &*later.last()?.1)))
    }

    /// The sectors whose content may differ from the durable one.
    pub fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.later.keys().copied().collect();
        for (_, at, bytes) in &self.in_flight {
            let first = at / SECTOR as u32;
            numbers.extend(first..first + (bytes.len() / SECTOR) as u32);
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// The states after a power failure, over the durable content.
    pub fn left_by_power_cut(&self, durable: impl Fn(u32) -> Box<[u8]>) -> Arc<[PendingLine]> {
        let left = |number: u32| {
            let later = self.later.get(&number).into_iter().flatten();
            line(
                number,
                durable(number),
                later.map(|later| &*later.1).chain(self.under_way(number)),
            )
        };
        self.numbers().into_iter().filter_map(left).collect()
    }

    /// The states after the death of the process, over the readable content: writes in flight
    /// arrive or do not.
    pub fn left_by_death(&self, durable: impl Fn(u32) -> Box<[u8]>) -> Arc<[PendingLine]> {
        let left = |number: u32| {
            let now = self.later.get(&number).and_then(|later| later.last());
            let now = now.map_or_else(|| durable(number), |later| later.1.clone());
            line(number, now, self.under_way(number))
        };
        self.numbers().into_iter().filter_map(left).collect()
    }

    fn under_way(&self, number: u32) -> impl Iterator<Item = &[u8]> {
        self.in_flight.iter().filter_map(move |(_, at, bytes)| {
            let from = (number as usize * SECTOR).checked_sub(*at as usize)?;
            bytes.get(from..from + SECTOR)
        })
    }
}

fn line<'a>(
    number: u32,
    first: Box<[u8]>,
    others: impl Iterator<Item = &'a [u8]>,
) -> Option<PendingLine> {
    let mut options = vec![first];
    for content in others {
        if options.iter().all(|option| **option != *content) {
            options.push(content.into());
        }
    }
    (options.len() > 1).then_some(PendingLine { number, options })
}
