//! A cache without a server: its background work is done by the thread that calls, so that a study
//! decides when it happens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use udm::device::{Device, Driver};
use udm::disk::Ring;
use udm::target::Wake;

/// Does a device's background work on the thread that calls it.
#[derive(Debug)]
pub struct Background {
    ring: Ring,
    started: Instant,
    /// Ahead of real time, so that pauses take no time.
    skipped: Duration,
    // Dropped last: a port is released when no part of it is in use.
    driver: Driver,
}

impl Background {
    /// The background of `device`, with an io_uring if its disks need one.
    pub fn new(device: &Arc<Device>, ring: Ring) -> Result<Background> {
        let deaf = Arc::new(Deaf);
        let driver = Driver::new(device, deaf.clone())?;
        device.events().set_background(Some(deaf));
        let (started, skipped) = (Instant::now(), Duration::ZERO);
        Ok(Background { ring, started, skipped, driver })
    }

    /// Ticks once and moves I/O. Returns the time for which no work is due.
    pub fn turn(&mut self) -> Duration {
        let now = (self.started.elapsed() + self.skipped).as_nanos() as u64;
        let next = self.driver.tick(now);
        loop {
            self.driver.pump(&mut self.ring, |_, _, _| {});
            self.ring.submit();
            if !self.ring.has_ended() {
                break;
            }
        }
        if self.ring.in_flight() > 0 {
            self.ring.submit_and_wait(Some(Duration::from_millis(10)));
            return Duration::ZERO;
        }
        next.map_or(Duration::from_millis(100), |next| {
            Duration::from_nanos(next.saturating_sub(now)).min(Duration::from_millis(100))
        })
    }

    /// Writes everything back, and lets collection make room.
    pub fn drain(&mut self) {
        let device = self.driver.device().clone();
        device.set_draining(true);
        while device.dirty().bytes > 0 || self.ring.in_flight() > 0 {
            if self.turn() > Duration::ZERO {
                self.skipped += Duration::from_millis(200);
            }
        }
        self.turn();
        device.set_draining(false);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.driver.device().events().set_background(None);
        while self.ring.in_flight() > 0 {
            self.turn();
        }
    }
}

/// The background finds work by itself.
#[derive(Debug)]
struct Deaf;

impl Wake for Deaf {
    fn wake(&self) {}
}
