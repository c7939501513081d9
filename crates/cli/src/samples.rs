//! Samples of dirty data: whether a cache device that has not failed yet can be read.

use anyhow::Result;
use udm::device::Device;
use udm::local::Local;
use udm::sync::Arc;
use udm::units::SECTOR;

use crate::work::Watch;

/// The number of samples at most, and the bytes of each at most.
const SAMPLES_MAX: usize = 16;
const SAMPLE_BYTES: u64 = 4096;

/// Reads samples of the data that only the caches of an active device have. Returns their number,
/// and the number of those that cannot be read.
pub fn read(device: &Arc<Device>, watch: &Watch) -> Result<(u64, u64)> {
    let mut places = Vec::new();
    for (start, only) in device.only_cached() {
        let of_device = |(at, len): (u64, u64)| (start * SECTOR + at, SAMPLE_BYTES.min(len));
        places.extend(only.ranges.into_iter().map(of_device));
    }
    let mut local = Local::new(device)?;
    let every = places.len().div_ceil(SAMPLES_MAX).max(1);
    let (mut samples, mut unread) = (0, 0);
    for (at, len) in places.into_iter().step_by(every) {
        watch.check()?;
        let mut sample = vec![0; len as usize];
        samples += 1;
        unread += u64::from(local.read_at(&mut sample, at).is_err());
    }
    Ok((samples, unread))
}
