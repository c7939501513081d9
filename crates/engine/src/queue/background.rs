//! The role of a queue that does a device's background work: it calls `tick` when the device
//! signals work, when its I/O completes, and at its deadline. Its thread lets those of clients
//! preempt it, at the latest after a call with few submissions.

use std::convert::Infallible;

use super::{Core, Queue, Role, Turn, now};
use crate::device::{Device, Driver};
use crate::error::Result;
use crate::ring::{Event, give_way};
use crate::sync::Arc;

/// Submissions with one call: a direct write takes the kernel about 6 us, and clients' threads
/// cannot interrupt a call.
const SUBMITS_BY: u32 = 4;

impl Queue {
    /// Runs the background work of `device`. A device has one such queue at a time.
    pub fn background(name: &str, device: &Arc<Device>) -> Result<Queue> {
        let device = device.clone();
        Queue::run(name, move |core| Background::new(&device, core))
    }
}

struct Background {
    driver: Driver,
}

impl Background {
    fn new(device: &Arc<Device>, core: &mut Core<Infallible>) -> Result<Background> {
        // Clients come first.
        give_way();
        core.ring_mut().submit_by(SUBMITS_BY);
        let driver = core.driver(device)?;
        device.events().set_background(Some(core.waker()));
        Ok(Background { driver })
    }
}

impl Role for Background {
    /// It makes no requests.
    type Tag = Infallible;

    fn event(&mut self, event: Event<Infallible>, _core: &mut Core<Infallible>) {
        match event.tag {}
    }

    fn turn(&mut self, core: &mut Core<Infallible>, is_stopping: bool) -> Turn {
        if is_stopping {
            return Turn::Over;
        }
        let mut is_busy = self.driver.pump(core.ring_mut(), |_, _, _| {});
        let deadline = self.driver.tick(now());
        is_busy |= self.driver.pump(core.ring_mut(), |_, _, _| {});
        if is_busy {
            core.ring_mut().submit();
            return Turn::Again;
        }
        Turn::Idle(deadline)
    }

    fn leave(self, core: &mut Core<Infallible>) {
        self.driver.device().events().set_background(None);
        core.leave(self.driver);
    }
}
