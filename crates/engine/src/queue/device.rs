//! A queue's end of a device: its port, what waits there, and the background role.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use super::{Core, Role, STOP_SECONDS_MAX, Turn, now};
use crate::bio::Bio;
use crate::buffer::BufferPool;
use crate::device::{Device, PortSeat};
use crate::disk::{DiskIo, Ring};
use crate::error::Result;
use crate::ring::{Desk, Event};
use crate::sync::Arc;
use crate::target::{Port, Wake};
use crate::units::SECOND;

/// One queue's port of a device.
pub(super) struct DeviceEnd {
    /// Bios to submit.
    pub(super) bios: VecDeque<Bio>,
    pub(super) port: Port,
    wake: Arc<dyn Wake>,
    /// Room signalled up to here has been used for the parked bios.
    room_epoch: u64,
    /// Bios submitted that have not come out as done.
    in_flight: usize,
    // Dropped last: a port is detached when nothing of it is left.
    seat: PortSeat,
}

impl DeviceEnd {
    pub(super) fn new<T>(device: &Arc<Device>, core: &Core<T>) -> Result<DeviceEnd> {
        let wake: Arc<dyn Wake> = core.shared.clone();
        let seat = device.attach_port(wake.clone())?;
        let port = seat.port();
        Ok(DeviceEnd { bios: VecDeque::new(), port, wake, room_epoch: 0, in_flight: 0, seat })
    }

    /// Carries out everything that can be carried out without waiting; each finished bio goes to
    /// `finish`, which may append further ones to be submitted. Says whether any came back, or
    /// any I/O.
    pub(super) fn pump(
        &mut self,
        ring: &mut Ring,
        mut finish: impl FnMut(Bio, &mut VecDeque<Bio>, &mut BufferPool),
    ) -> bool {
        self.retry_parked();
        let device = self.seat.device();
        let mut has_progress = false;
        loop {
            while let Some(bio) = self.bios.pop_front() {
                self.in_flight += 1;
                device.submit(bio, &mut self.port);
            }
            while let Some(io) = self.port.ios.pop_front() {
                let disk = io.disk.clone();
                disk.start(io, ring);
            }
            while let Some(io) = ring.pop_completed() {
                has_progress = true;
                device.complete(io, &mut self.port);
            }
            while let Some(bio) = self.port.done.pop_front() {
                has_progress = true;
                self.in_flight -= 1;
                finish(bio, &mut self.bios, &mut self.port.pool);
            }
            if self.bios.is_empty() && self.port.ios.is_empty() {
                return has_progress;
            }
        }
    }

    /// Lets parked bios try again if room was signalled since they last did.
    fn retry_parked(&mut self) {
        // Read before anything is submitted: room that is signalled while a bio is being parked
        // must count as news the next time.
        let device = self.seat.device();
        let epoch = device.events().room_epoch();
        if epoch != self.room_epoch {
            self.room_epoch = epoch;
            device.retry(&mut self.port);
        }
    }

    /// The device.
    pub(super) fn device(&self) -> &Arc<Device> {
        self.seat.device()
    }

    /// Whether targets are done with everything but what they parked.
    pub(super) fn is_all_parked(&self) -> bool {
        self.in_flight <= self.port.parked.len()
    }

    /// Whether nothing is submitted, or waits to be.
    pub(super) fn is_quiet(&self) -> bool {
        self.in_flight == 0 && self.bios.is_empty()
    }

    /// Waits for what is in flight and gives the port up. Parked bios are dropped: their client
    /// is gone, or has waited long enough.
    pub(super) fn leave<T: Copy + PartialEq>(mut self, desk: &mut Desk<T, DiskIo>) {
        let deadline = now() + STOP_SECONDS_MAX * SECOND;
        loop {
            self.pump(desk.ring_mut(), |_, _, _| {});
            if self.is_all_parked() && desk.ring().awaited() == 0 {
                return;
            }
            if now() >= deadline {
                // A device that keeps a bio for ever keeps its port too; the rest goes on.
                std::mem::forget(self);
                return;
            }
            desk.ring_mut().submit_and_wait(Some(Duration::from_millis(10)));
            while desk.pop_event().is_some() {}
        }
    }
}

/// Calls `tick` when the device signals work, when its I/O completes, and at its deadline.
pub(super) struct Background {
    end: DeviceEnd,
}

impl Background {
    pub(super) fn new(end: DeviceEnd) -> Background {
        end.seat.device().events().set_background(Some(end.wake.clone()));
        Background { end }
    }

    pub(super) fn leave(self, desk: &mut Desk<Infallible, DiskIo>) {
        self.end.seat.device().events().set_background(None);
        self.end.leave(desk);
    }
}

impl Role for Background {
    /// It asks for nothing.
    type Tag = Infallible;

    fn event(&mut self, event: Event<Infallible>, _core: &mut Core<Infallible>) {
        match event.tag {}
    }

    fn turn(&mut self, core: &mut Core<Infallible>, is_stopping: bool) -> Turn {
        if is_stopping {
            return Turn::Over;
        }
        let mut is_busy = self.end.pump(core.desk.ring_mut(), |_, _, _| {});
        let deadline = self.end.seat.device().tick(now(), &mut self.end.port);
        is_busy |= self.end.pump(core.desk.ring_mut(), |_, _, _| {});
        if is_busy {
            core.desk.ring_mut().submit();
            return Turn::Again;
        }
        Turn::Idle(deadline)
    }
}
