//! What is on its way to the cache's medium: stores to memory, or writes of a disk.

use std::sync::Arc;

use crate::sectors::{DiskEvent, SECTOR, Sectors};
use crate::subject::Ground;
use crate::trace::Stores;
use crate::twin::{Decision, LINE, PendingLine, Twin};

#[derive(Debug)]
pub enum InFlight {
    Memory(Stores),
    Disk(Sectors),
}

impl InFlight {
    /// What a server finds whose predecessor left `sectors`.
    pub fn found(ground: Ground, sectors: &Sectors) -> InFlight {
        match ground {
            Ground::Memory(_) => InFlight::Memory(Stores::default()),
            Ground::Disk => InFlight::Disk(sectors.clone()),
        }
    }

    /// What the next server finds on the disk beyond what is durable.
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
    pub fn disk(&mut self, event: DiskEvent, twin: &Twin, mut settle: impl FnMut(u32, &[u8])) {
        let InFlight::Disk(sectors) = self else { unreachable!("memory is no disk") };
        match event {
            DiskEvent::Write { id, at, bytes } => sectors.begin(id, at, bytes),
            DiskEvent::Flush { id } => sectors.begin_flush(id),
            DiskEvent::Done { id, end } => {
                sectors.end(
                    id,
                    end,
                    |sector| peek(twin, sector),
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

    /// The lines that may hold something else than what is durable.
    pub fn numbers(&self) -> Vec<u32> {
        match self {
            InFlight::Memory(stores) => stores.line_numbers(),
            InFlight::Disk(sectors) => sectors.numbers(),
        }
    }

    /// What a power cut may leave, over the durable content in `twin`.
    pub fn left_by_power_cut(&self, twin: &Twin) -> Arc<[PendingLine]> {
        match self {
            InFlight::Memory(stores) => stores.lines(|line| {
                let bytes = twin.peek(line as usize * LINE, LINE);
                bytes.try_into().unwrap()
            }),
            InFlight::Disk(sectors) => sectors.left_by_power_cut(|sector| peek(twin, sector)),
        }
    }

    /// What the death of the process may leave, over what can be read.
    pub fn left_by_death(&self, twin: &Twin) -> Arc<[PendingLine]> {
        match self {
            InFlight::Memory(_) => Arc::new([]),
            InFlight::Disk(sectors) => sectors.left_by_death(|sector| peek(twin, sector)),
        }
    }

    /// What can be read and is not durable, in order: place and content.
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

fn peek(twin: &Twin, sector: u32) -> Box<[u8]> {
    twin.peek(sector as usize * SECTOR, SECTOR).into()
}
