//! Data in flight to the cache's medium: stores to memory, or writes of a disk.

use std::sync::Arc;

use crate::sectors::{DiskEvent, SECTOR, Sectors};
use crate::sim::{Decision, LINE, PendingLine, SimMedium};
use crate::subject::Ground;
use crate::trace::Stores;

#[derive(Debug)]
pub enum InFlight {
    Memory(Stores),
    Disk(Sectors),
}

impl InFlight {
    /// The state that a server finds whose predecessor left `sectors`.
    pub fn found(ground: Ground, sectors: &Sectors) -> InFlight {
        match ground {
            Ground::Memory(_) => InFlight::Memory(Stores::default()),
            Ground::Disk => InFlight::Disk(sectors.clone()),
        }
    }

    /// The data that the next server finds on the disk in addition to durable data.
    pub fn left_behind(&self, lines: &[PendingLine], decisions: &[Decision]) -> Sectors {
        let InFlight::Disk(sectors) = self else { return Sectors::default() };
        let arrived = decisions.iter().filter(|decision| decision.choice > 0).map(|decision| {
            let place = lines.binary_search_by_key(&decision.line, |line| line.number).unwrap();
            (decision.line, lines[place].options[decision.choice as usize].clone())
        });
        sectors.left_behind(arrived)
    }

    pub fn store(&mut self, at: u32, bytes: Box<[u8]>) {
        match self {
            InFlight::Memory(stores) => stores.push(at, bytes),
            InFlight::Disk(_) => unreachable!("a disk is not stored to"),
        }
    }

    /// Every store so far is durable: they are handed to `settle`.
    pub fn fence(&mut self, mut settle: impl FnMut(u32, &[u8])) {
        if let InFlight::Memory(stores) = self {
            stores.take().iter().for_each(|(at, bytes)| settle(*at, bytes));
        }
    }

    /// Something happens to the disk; what becomes durable is handed to `settle`.
    pub fn disk(&mut self, event: DiskEvent, sim: &SimMedium, mut settle: impl FnMut(u32, &[u8])) {
        let InFlight::Disk(sectors) = self else { unreachable!("memory is not a disk") };
        match event {
            DiskEvent::Write { id, at, bytes } => sectors.begin(id, at, bytes),
            DiskEvent::Flush { id, sectors: of } => sectors.begin_flush(id, of),
            DiskEvent::Done { id, end } => {
                sectors.end(
                    id,
                    end,
                    |sector| peek(sim, sector),
                    |sector, bytes| {
                        settle(sector * SECTOR as u32, bytes);
                    },
                );
            }
        }
    }

    /// Whether the end of this I/O makes something durable.
    pub fn is_flush(&self, id: u32) -> bool {
        matches!(self, InFlight::Disk(sectors) if sectors.is_flush(id))
    }

    pub fn touches(&self, wanted: impl FnMut(u32) -> bool) -> bool {
        match self {
            InFlight::Memory(stores) => stores.touches(wanted),
            InFlight::Disk(sectors) => {
                sectors.numbers().into_iter().map(|sector| sector * SECTOR as u32).any(wanted)
            }
        }
    }

    /// The lines whose content may differ from the durable one.
    pub fn numbers(&self) -> Vec<u32> {
        match self {
            InFlight::Memory(stores) => stores.line_numbers(),
            InFlight::Disk(sectors) => sectors.numbers(),
        }
    }

    /// The lines after a power failure, over the durable content in `sim`.
    pub fn left_by_power_cut(&self, sim: &SimMedium) -> Arc<[PendingLine]> {
        match self {
            InFlight::Memory(stores) => stores.lines(|line| {
                let bytes = sim.peek(line as usize * LINE, LINE);
                bytes.try_into().unwrap()
            }),
            InFlight::Disk(sectors) => sectors.left_by_power_cut(|sector| peek(sim, sector)),
        }
    }

    /// The lines after the death of the process, over the readable content.
    pub fn left_by_death(&self, sim: &SimMedium) -> Arc<[PendingLine]> {
        match self {
            InFlight::Memory(_) => Arc::new([]),
            InFlight::Disk(sectors) => sectors.left_by_death(|sector| peek(sim, sector)),
        }
    }

    /// Readable data that is not durable, in order: address and content.
    pub fn visible(&self) -> Vec<(u32, &[u8])> {
        match self {
            InFlight::Memory(stores) => stores.stores().collect(),
            InFlight::Disk(sectors) => {
                let visible = sectors.visible();
                visible.map(|(sector, bytes)| (sector * SECTOR as u32, bytes)).collect()
            }
        }
    }
}

fn peek(sim: &SimMedium, sector: u32) -> Box<[u8]> {
    sim.peek(sector as usize * SECTOR, SECTOR).into()
}
