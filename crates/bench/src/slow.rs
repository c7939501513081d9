//! A disk with an arm, in memory: content is a [`RamDisk`]'s, and each read and write takes as long
//! as `delay` with `?seek=disk` says, in real time. So a study says the same on any machine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;
use udm::base::seek::Seek;
use udm::bio::Op;
use udm::disk::{Disk, DiskIo, DiskLimits, RamDisk, Ring};
use udm::ring::RemoteJob;

/// A disk that is slow when it is to be.
#[derive(Debug)]
pub struct SlowDisk {
    content: Arc<RamDisk>,
    is_slow: AtomicBool,
    arm: Arc<Arm>,
    thread: Option<JoinHandle<()>>,
}

/// The state that the disk and its thread share.
#[derive(Debug)]
struct Arm {
    seek: Seek,
    begun: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which the arm serves them, with the time when each is done.
    queue: VecDeque<(u64, DiskIo, RemoteJob<DiskIo>)>,
    position: u64,
    free_at: u64,
    is_over: bool,
}

impl Arm {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// Serves requests until the disk is gone.
    fn serve(&self, content: &RamDisk) {
        let mut ring = Ring::without_kernel();
        let mut state = self.lock();
        while !state.is_over || !state.queue.is_empty() {
            let left = state.queue.front().map(|(due, ..)| due.saturating_sub(self.now()));
            match left {
                None => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Some(0) => {
                    let Some((_, io, remote)) = state.queue.pop_front() else { continue };
                    drop(state);
                    content.start(io, &mut ring);
                    remote.end(ring.pop_completed().expect("memory completes within the call"));
                    state = self.lock();
                }
                Some(left) => {
                    let left = Duration::from_nanos(left);
                    let woken = self.changed.wait_timeout(state, left);
                    state = woken.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }
}

impl SlowDisk {
    /// Of `bytes` bytes; not slow yet.
    pub fn new(bytes: u64) -> Result<Arc<SlowDisk>> {
        let content = Arc::new(RamDisk::new(bytes, 512).named("slow"));
        let arm = Arc::new(Arm {
            seek: Seek::parse("disk")?,
            begun: Instant::now(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let of_thread = (Arc::clone(&arm), Arc::clone(&content));
        let named = std::thread::Builder::new().name("udm-bench-arm".into());
        let thread = Some(named.spawn(move || of_thread.0.serve(&of_thread.1))?);
        Ok(Arc::new(SlowDisk { content, is_slow: AtomicBool::new(false), arm, thread }))
    }

    /// Makes the disk slow or fast from now on. No request is in flight.
    pub fn set_slow(&self, is_slow: bool) {
        self.is_slow.store(is_slow, Ordering::SeqCst);
    }
}

impl Disk for SlowDisk {
    fn limits(&self) -> &DiskLimits {
        self.content.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        let is_moved = matches!(io.op, Op::Read | Op::Write);
        if !is_moved || !self.is_slow.load(Ordering::SeqCst) {
            return self.content.start(io, ring);
        }
        let remote = ring.remote_job().expect("a ring of the kernel");
        let mut state = self.arm.lock();
        let start = state.free_at.max(self.arm.now());
        let span = self.limits().size_bytes;
        let due = self.arm.seek.end(start, state.position, io.offset, io.len, span);
        state.free_at = due;
        state.position = io.offset + io.len;
        state.queue.push_back((due, io, remote));
        drop(state);
        self.arm.changed.notify_one();
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        self.arm.lock().is_over = true;
        self.arm.changed.notify_one();
        let is_other =
            |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = self.thread.take().filter(is_other) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rig::linear_device;
    use udm::local::Local;
    use udm::units::MIB;

    #[test]
    fn random_reads_take_a_disks_time_and_content_is_right() {
        let slow = SlowDisk::new(64 * MIB).unwrap();
        let device = linear_device(slow.clone()).unwrap();
        let mut local = Local::new(&device).unwrap();
        local.write_at(&[7; 4096], 40 * MIB, false).unwrap();
        slow.set_slow(true);
        let (begun, mut bytes) = (Instant::now(), [0; 4096]);
        for at in [0, 40, 3, 40] {
            local.read_at(&mut bytes, at * MIB).unwrap();
        }
        assert_eq!(bytes, [7; 4096]);
        // Strokes of three quarters of the square root each, and less than a turn.
        let taken = begun.elapsed();
        assert!(taken > Duration::from_millis(20), "{taken:?}");
        slow.set_slow(false);
        let free_at = slow.arm.lock().free_at;
        local.read_at(&mut bytes, 30 * MIB).unwrap();
        let arm = slow.arm.lock();
        assert_eq!((arm.free_at, arm.position), (free_at, 40 * MIB + 4096), "the arm rests");
    }
}
