//! The simulated medium as disks, whose volatile caches may keep or lose any unflushed sector.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::error::Status;
use udm::topology::Topology;

use crate::sectors::{DiskEvent, End, SECTOR};
use crate::sim::SimMedium;
use crate::trace::Event;

#[derive(Debug)]
pub struct Ssd {
    limits: DiskLimits,
    sim: Arc<SimMedium>,
    /// The first byte of the medium that is this disk's.
    base: u64,
    /// Shared by the disks of a medium.
    next_id: Arc<AtomicU32>,
}

const CACHE: &str = "cache";
const METADATA: &str = "metadata";

/// Whether an I/O is for the cache.
pub fn is_for_cache(io: &DiskIo) -> bool {
    matches!(&*io.disk.limits().name, CACHE | METADATA)
}

/// The disks of a medium: its data, and its metadata if a second disk has it.
#[derive(Clone, Debug)]
pub struct Ssds {
    pub data: Arc<Ssd>,
    pub metadata: Arc<Ssd>,
}

impl Ssds {
    /// The metadata follows the data.
    pub fn new(sim: &Arc<SimMedium>, data_bytes: usize, metadata_bytes: usize) -> Ssds {
        let next_id = Arc::new(AtomicU32::new(0));
        let ssd = |name: &str, base: usize, size_bytes: usize| {
            let limits = DiskLimits {
                name: name.into(),
                size_bytes: size_bytes as u64,
                block_bytes: 512,
                atomic_bytes: 512,
                has_discard: true,
                topology: Topology::default(),
                identity: name.into(),
                kernel_name: name.into(),
            };
            let (sim, next_id) = (sim.clone(), next_id.clone());
            Arc::new(Ssd { limits, sim, base: base as u64, next_id })
        };
        Ssds {
            data: ssd(CACHE, 0, data_bytes),
            metadata: ssd(METADATA, data_bytes, metadata_bytes),
        }
    }

    /// The disk that an I/O is for.
    pub fn of(&self, io: &DiskIo) -> &Ssd {
        if io.disk.limits().name == METADATA { &self.metadata } else { &self.data }
    }
}

impl Ssd {
    /// The beginning of it.
    pub fn beginning(&self, size_bytes: u64) -> Arc<Ssd> {
        let limits = DiskLimits { size_bytes, ..self.limits.clone() };
        let (sim, next_id) = (self.sim.clone(), self.next_id.clone());
        Arc::new(Ssd { limits, sim, base: self.base, next_id })
    }

    /// The byte of the medium where an I/O begins.
    pub fn place(&self, io: &DiskIo) -> u64 {
        self.base + io.offset
    }

    /// An I/O is on its way.
    pub fn begin(&self, io: &DiskIo) -> u32 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let at = self.place(io) as u32;
        let event = match io.op {
            Op::Write => DiskEvent::Write { id, at, bytes: io.buffer.as_slice().into() },
            Op::WriteZeroes => DiskEvent::Write { id, at, bytes: vec![0; io.len as usize].into() },
            Op::Flush => {
                let sector = |at: u64| (at / SECTOR as u64) as u32;
                let sectors = sector(self.base)..sector(self.base + self.limits.size_bytes);
                DiskEvent::Flush { id, sectors }
            }
            Op::Read | Op::Discard => return id,
        };
        self.sim.note(Event::Disk(event));
        id
    }

    /// An I/O ends; `end` matters to writes and flushes.
    pub fn end(&self, id: u32, io: &mut DiskIo, end: End) {
        io.result = if end == End::Good { Ok(()) } else { Err(Status::Io) };
        let arrives = end == End::Good || end == End::Failed { arrives: true };
        let at = self.place(io);
        match io.op {
            Op::Read => return self.sim.read(at, io.buffer.as_mut_slice()),
            Op::Discard => return,
            Op::Write if arrives => self.sim.write(at, io.buffer.as_slice()),
            Op::WriteZeroes if arrives => self.sim.write(at, &vec![0; io.len as usize]),
            Op::Write | Op::WriteZeroes | Op::Flush => {}
        }
        self.note_end(id, end);
    }

    /// The end of an I/O, as the record has it.
    pub fn note_end(&self, id: u32, end: End) {
        self.sim.note(Event::Disk(DiskEvent::Done { id, end }));
    }

    /// An I/O is carried out immediately.
    pub fn carry_out(&self, io: &mut DiskIo) {
        let id = self.begin(io);
        self.end(id, io, End::Good);
    }
}

impl Disk for Ssd {
    fn limits(&self) -> &DiskLimits {
        &self.limits
    }

    fn start(&self, mut io: DiskIo, ring: &mut Ring) {
        self.carry_out(&mut io);
        ring.finish(io, Ok(()));
    }
}
