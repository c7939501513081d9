//! The driver of a device: it submits bios, starts the I/O of the device's disks and returns
//! completions, retries parked bios, and hands out finished bios. Each loop that serves a device (a
//! queue's thread, an in-process caller, a study) has one.
//!
//! A driver never waits and does not own a ring: the loop decides whether, where and how long to
//! wait.

use std::collections::VecDeque;

use super::{Device, FastPath, PortHandle, Reported};
use crate::bio::Bio;
use crate::buffer::BufferPool;
use crate::disk::Ring;
use crate::error::Result;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::target::{Port, Wake};
use crate::units::Nanos;

/// One thread's end of a device. Dropping it gives its port up; the only bios left then may be
/// parked ones.
pub struct Driver {
    /// Bios that the next [`Driver::pump`] submits.
    pub bios: VecDeque<Bio>,
    port: Port,
    /// The room epoch at the last retry of parked bios.
    room_epoch: u64,
    /// Bios submitted that have not come out as done.
    in_flight: usize,
    // Dropped last: a port is detached when all of its bios are gone.
    seat: PortHandle,
}

impl Driver {
    /// A driver of `device`. `wake` is called when there may be free space for parked bios.
    pub fn new(device: &Arc<Device>, wake: Arc<dyn Wake>) -> Result<Driver> {
        let (seat, port) = device.attach_port(wake)?;
        Ok(Driver { bios: VecDeque::new(), port, room_epoch: 0, in_flight: 0, seat })
    }

    /// The losses that were reported to this driver, for [`Driver::continue_from`].
    pub fn reported(&self) -> Reported {
        self.seat.device().seat(&self.port).reported()
    }

    /// Continues for the client of an earlier driver, to which `earlier` was reported: the client
    /// gets one error for each later loss.
    pub fn continue_from(&mut self, earlier: Reported) {
        self.seat.device().seat(&self.port).continue_from(earlier);
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        self.seat.device()
    }

    /// Its port, with bios that are done or parked, and I/O that is to be sent to disks.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Memory for bios: put the buffer of a finished bio back into this pool.
    pub fn pool(&mut self) -> &mut BufferPool {
        &mut self.port.pool
    }

    /// The bios that the next [`Driver::pump`] submits, and memory for more of them.
    pub fn bios_and_pool(&mut self) -> (&mut VecDeque<Bio>, &mut BufferPool) {
        (&mut self.bios, &mut self.port.pool)
    }

    /// The fast path for the requests of a client.
    pub fn intake(&mut self) -> FastPath<'_> {
        FastPath::new(self.seat.device(), &mut self.port)
    }

    /// Bios that were submitted and have not come out as done.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether targets are done with all bios except parked ones.
    pub fn is_all_parked(&self) -> bool {
        self.in_flight <= self.port.parked.len()
    }

    /// The driver will not be used or dropped any more, because a device does not return its bios:
    /// its parked bios do not hold up other ports.
    pub fn abandon(&mut self) {
        self.seat.device().seat(&self.port).parts().give_up();
    }

    /// Whether no bio is submitted or waits to be submitted.
    pub fn is_quiet(&self) -> bool {
        self.in_flight == 0 && self.bios.is_empty()
    }

    /// Carries out all work that can be done without waiting. Each finished bio is passed to
    /// `finish`, which may append further ones to be submitted. Returns whether any bio or I/O
    /// completed.
    pub fn pump(
        &mut self,
        ring: &mut Ring,
        mut finish: impl FnMut(Bio, &mut VecDeque<Bio>, &mut BufferPool),
    ) -> bool {
        self.retry_parked();
        let mut has_progress = false;
        loop {
            while let Some(bio) = self.bios.pop_front() {
                self.submit(bio);
            }
            self.start_ios(ring);
            has_progress |= self.take_completed(ring);
            while let Some(bio) = self.pop_done() {
                has_progress = true;
                finish(bio, &mut self.bios, &mut self.port.pool);
            }
            if self.bios.is_empty() && self.port.ios.is_empty() {
                return has_progress;
            }
        }
    }

    /// Gives `bio` to the device.
    #[inline]
    pub fn submit(&mut self, bio: Bio) {
        self.in_flight += 1;
        self.seat.device().submit(bio, &mut self.port);
    }

    /// The next finished bio.
    #[inline]
    pub fn pop_done(&mut self) -> Option<Bio> {
        let bio = self.port.done.pop_front()?;
        self.in_flight -= 1;
        Some(bio)
    }

    /// The finished bio with `token`, if there is one; the newest are tried first.
    #[inline]
    pub fn take_done(&mut self, token: u64) -> Option<Bio> {
        let at = self.port.done.iter().rposition(|bio| bio.token == token)?;
        self.in_flight -= 1;
        self.port.done.remove(at)
    }

    /// Starts the I/O that targets want. Returns whether there was any.
    pub fn start_ios(&mut self, ring: &mut Ring) -> bool {
        let has_any = !self.port.ios.is_empty();
        while let Some(io) = self.port.ios.pop_front() {
            let disk = io.disk.clone();
            disk.start(io, ring);
        }
        has_any
    }

    /// Gives completed I/O back to the targets. Returns whether there was any.
    pub fn take_completed(&mut self, ring: &mut Ring) -> bool {
        let mut has_any = false;
        while let Some(io) = ring.pop_completed() {
            has_any = true;
            self.seat.device().complete(io, &mut self.port);
        }
        has_any
    }

    /// Submits parked bios again if free space was signalled since the last retry. Returns whether
    /// there were any.
    pub fn retry_parked(&mut self) -> bool {
        // Read before any bio is submitted: free space that is signalled while a bio is being
        // parked must cause another retry.
        let device = self.seat.device();
        let epoch = device.events().room_epoch();
        if epoch == self.room_epoch {
            return false;
        }
        self.room_epoch = epoch;
        let has_any = !self.port.parked.is_empty();
        device.retry(&mut self.port);
        if mutants::is(Mutant::RoomEpochLate) {
            self.room_epoch = self.seat.device().events().room_epoch();
        }
        has_any
    }

    /// Does the device's background work; returns when to call again at the latest. See
    /// [`Device::tick`].
    pub fn tick(&mut self, now: Nanos) -> Option<Nanos> {
        self.seat.device().tick(now, &mut self.port)
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver({:?}, {} in flight)", self.seat, self.in_flight)
    }
}
