//! The user of a cache that was opened over hostile bytes: drives its target from one thread, and
//! remembers all written data.

use std::collections::HashMap;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::Ring;
use udm::error::Status;
use udm::target::{Port, Target};
use udm::units::{Nanos, SECOND, SECTOR};

/// Each request, drain and suspend must end within this many ticks of a second.
const PATIENCE: usize = 400;

pub struct Client {
    /// The expected content of each sector: all its bytes are the same.
    pub model: HashMap<u64, u8>,
    target: Option<Box<dyn Target>>,
    port: Port,
    ring: Ring,
    now: Nanos,
    writes: u8,
}

impl Client {
    pub fn new() -> Client {
        Client {
            model: HashMap::new(),
            target: None,
            port: Port::new(0),
            ring: Ring::without_kernel(),
            now: 0,
            writes: 0,
        }
    }

    pub fn is_open(&self) -> bool {
        self.target.is_some()
    }

    pub fn open(&mut self, target: impl Target + 'static) {
        self.target = Some(Box::new(target));
    }

    pub fn target(&self) -> &dyn Target {
        self.target.as_deref().unwrap()
    }

    /// The process ends: devices and shared memory stay.
    pub fn kill(&mut self) {
        self.target = None;
        self.port = Port::new(0);
        self.ring = Ring::without_kernel();
    }

    /// An orderly end, unless space is missing for open keys, which then stay in shared memory.
    pub fn remove(&mut self) {
        let _ = self.target().suspend();
        for _ in 0..PATIENCE {
            self.settle();
            if self.target().is_idle() {
                return self.kill();
            }
            self.tick(SECOND);
        }
        panic!("no rest after a suspend: {}", self.target().status());
    }

    /// Carries out all work of the target that is possible now.
    pub fn settle(&mut self) {
        let target = self.target.as_deref().unwrap();
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                io.disk.clone().start(io, &mut self.ring);
            }
            let Some(io) = self.ring.pop_completed() else { return };
            let range = (io.op, io.offset, io.len);
            assert_ne!(io.result, Err(Status::Invalid), "I/O outside the device: {range:?}");
            target.complete(io, &mut self.port);
        }
    }

    pub fn tick(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.target.as_deref().unwrap().tick(self.now, &mut self.port);
        self.settle();
        // The target's status can be printed.
        assert!(!self.target().status().is_empty() && !self.target().facts().is_empty());
    }

    fn run(&mut self, bio: Bio) -> Bio {
        self.target.as_deref().unwrap().submit(bio, &mut self.port);
        for _ in 0..PATIENCE {
            self.settle();
            if let Some(done) = self.port.done.pop_front() {
                assert!(self.port.parked.is_empty());
                assert_ne!(done.status, Err(Status::Invalid));
                return done;
            }
            self.tick(SECOND);
            if let Some(parked) = self.port.parked.pop_front() {
                self.target.as_deref().unwrap().submit(parked, &mut self.port);
            }
        }
        panic!("a request waits indefinitely: {}", self.target().status());
    }

    /// Writes a byte that no earlier write used, while there are unused ones.
    pub fn write(&mut self, offset: u64, len: u64, fua: bool) {
        self.writes = self.writes.wrapping_add(1);
        let mut buffer = Buffer::zeroed(len as usize);
        buffer.as_mut_slice().fill(self.writes);
        let done = self.run(Bio::write(offset, buffer, fua, 0));
        self.note(&done, self.writes);
    }

    pub fn zero(&mut self, offset: u64, len: u64, fua: bool) {
        let done = self.run(Bio::bare(Op::WriteZeroes, offset, len, fua, 0));
        self.note(&done, 0);
    }

    /// A failed write may have stored any part of its data.
    fn note(&mut self, done: &Bio, byte: u8) {
        for sector in done.offset / SECTOR..done.end() / SECTOR {
            match done.status {
                Ok(()) => self.model.insert(sector, byte),
                Err(_) => self.model.remove(&sector),
            };
        }
    }

    pub fn read(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, Status> {
        let done = self.run(Bio::read(offset, Buffer::zeroed(len as usize), 0));
        done.status.map(|()| done.buffer.as_slice().to_vec())
    }

    pub fn flush(&mut self) {
        self.run(Bio::flush(0));
    }

    pub fn set_draining(&self, is_draining: bool) {
        self.target().set_draining(is_draining);
    }

    /// Every sector written since the damage has its data. `may_fail`: some memory cannot be read;
    /// `may_differ`: data stored there may be lost as well.
    pub fn check_model(&mut self, may_fail: bool, may_differ: bool) {
        let mut sectors: Vec<(u64, u8)> =
            self.model.iter().map(|(sector, byte)| (*sector, *byte)).collect();
        sectors.sort_unstable();
        for run in sectors.chunk_by(|(a, _), (b, _)| a + 1 == *b) {
            let offset = run[0].0 * SECTOR;
            let found = match self.read(offset, run.len() as u64 * SECTOR) {
                Ok(found) => found,
                Err(status) => {
                    assert!(may_fail, "{offset}: new data reads as {status:?}");
                    continue;
                }
            };
            for ((sector, byte), found) in run.iter().zip(found.chunks(SECTOR as usize)) {
                let is_right = found.iter().all(|found| found == byte);
                assert!(is_right || may_differ, "sector {sector}: {byte}");
            }
        }
    }

    /// Writes everything back, or fails with a reason.
    pub fn drain(&mut self, may_fail: bool) {
        self.set_draining(true);
        for _ in 0..PATIENCE {
            let dirty = self.target().dirty();
            if dirty.bytes == 0 || dirty.is_failing {
                break;
            }
            self.tick(SECOND);
        }
        let dirty = self.target().dirty();
        let is_done = dirty.bytes == 0 || dirty.is_failing || may_fail;
        assert!(is_done, "{dirty:?} after a drain: {}", self.target().status());
        self.set_draining(false);
    }
}
