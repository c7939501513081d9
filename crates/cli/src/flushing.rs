//! A flush that was requested over the control socket: carried out on that call's own thread, and
//! watched as a client's request is, so that a hanging flush is reported in the log and in `info`.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use udm::bio::Op;
use udm::device::{Device, SLOW_SECONDS, SlowRequest};
use udm::disk::DiskErrors;
use udm::local::Local;
use udm::sync::Arc;
use udm::target::Health;

/// Time between two checks of a slow flush.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Makes everything that was written to `device` durable.
pub fn flush(device: &Arc<Device>) -> Result<()> {
    let mut local = Local::new(device)?;
    let port = local.port_id();
    let (done, is_done) = channel::<()>();
    let flushed = thread::scope(|scope| {
        // Without a thread, the flush is not watched.
        let watch = move || watch(device, port, &is_done);
        let _ = thread::Builder::new().name("flush".into()).spawn_scoped(scope, watch);
        let flushed = local.flush();
        drop(done);
        flushed
    });
    flushed.map_err(|status| anyhow!("flush: {status}{}", errors_below(device)))
}

/// The devices whose last error was not of a read, with that error. A flush can fail because an
/// earlier one did, of another client, so the device may work again.
fn errors_below(device: &Device) -> String {
    let of_line = |(start, target, health): (u64, &str, Health)| {
        let Health { origin, medium, metadata, .. } = health;
        let roles = [("origin", origin), ("cache device", medium), ("metadata device", metadata)];
        let may_fail_flushes =
            |errors: DiskErrors| errors.last.is_some_and(|(op, _)| op != Op::Read);
        let failed = roles.into_iter().filter(|(_, errors)| may_fail_flushes(*errors));
        let sentence = |(role, errors): (&str, DiskErrors)| {
            format!("; {target} at {start}: the last error of its {role}: {errors}")
        };
        failed.map(sentence).collect::<String>()
    };
    device.health().into_iter().map(of_line).collect()
}

/// Reports a slow flush to the device until the flush is done.
fn watch(device: &Device, port: usize, is_done: &Receiver<()>) {
    let start = Instant::now();
    let mut wait = Duration::from_secs(SLOW_SECONDS);
    let mut is_new = true;
    while is_done.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let age = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let waits_for = "the devices below (asked for by a command)";
        let slow = SlowRequest { port, op: Op::Flush, offset: 0, len: 0, age, waits_for, is_new };
        device.set_slow_of(port, vec![slow]);
        (wait, is_new) = (LOOK_EVERY, false);
    }
    device.set_slow_of(port, Vec::new());
}
