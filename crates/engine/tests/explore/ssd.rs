//! The twin as a disk, whose volatile cache may keep or lose any unflushed sector.
//!
//! What an attach starts through a ring of its own is carried out immediately; what a server emits
//! into its port is begun and ended by the machine, in any order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, Ring};
use udm::error::Status;

use crate::sectors::{DiskEvent, End};
use crate::trace::Event;
use crate::twin::Twin;

#[derive(Debug)]
pub struct Ssd {
    limits: DiskLimits,
    twin: Arc<Twin>,
    next_id: AtomicU32,
}

const NAME: &str = "cache";

/// Whether an I/O is for the cache.
pub fn is_for_cache(io: &DiskIo) -> bool {
    io.disk.limits().name == NAME
}

impl Ssd {
    pub fn new(twin: &Arc<Twin>, size_bytes: usize) -> Arc<Ssd> {
        let limits = DiskLimits {
            name: NAME.into(),
            size_bytes: size_bytes as u64,
            block_bytes: 512,
            atomic_bytes: 512,
            has_discard: true,
            identity: NAME.into(),
            kernel_name: NAME.into(),
        };
        Arc::new(Ssd { limits, twin: twin.clone(), next_id: AtomicU32::new(0) })
    }

    /// An I/O is on its way.
    pub fn begin(&self, io: &DiskIo) -> u32 {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let event = match io.op {
            Op::Write => {
                DiskEvent::Write { id, at: io.offset as u32, bytes: io.buffer.as_slice().into() }
            }
            Op::WriteZeroes => DiskEvent::Write {
                id,
                at: io.offset as u32,
                bytes: vec![0; io.len as usize].into(),
            },
            Op::Flush => DiskEvent::Flush { id },
            Op::Read | Op::Discard => return id,
        };
        self.twin.note(Event::Disk(event));
        id
    }

    /// An I/O ends; `end` matters to writes and flushes.
    pub fn end(&self, id: u32, io: &mut DiskIo, end: End) {
        io.result = if end == End::Good { Ok(()) } else { Err(Status::Io) };
        let arrives = end == End::Good || end == End::Failed { arrives: true };
        match io.op {
            Op::Read => return self.twin.read(io.offset, io.buffer.as_mut_slice()),
            Op::Discard => return,
            Op::Write if arrives => self.twin.write(io.offset, io.buffer.as_slice()),
            Op::WriteZeroes if arrives => self.twin.write(io.offset, &vec![0; io.len as usize]),
            Op::Write | Op::WriteZeroes | Op::Flush => {}
        }
        self.note_end(id, end);
    }

    /// The end of an I/O, as the record has it.
    pub fn note_end(&self, id: u32, end: End) {
        self.twin.note(Event::Disk(DiskEvent::Done { id, end }));
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
