//! The parts of a running server: the device, its background queue and its exports.
//!
//! Only this file drives the engine's devices and the exports, except for `inspect` and `recover`,
//! which work without a server. `platform.rs` opens devices and exports for this file.
//!
//! 1. Relative paths in tables are relative to the directory of the user who gave them, and are
//!    made absolute: the server's own directory is `/`.
//! 2. Changes (load, suspend, resume, close) happen one at a time, and none while the device is
//!    being removed (`served/rest.rs`).
//! 3. The exports are closed before the device is brought to rest. The background queue runs until
//!    the device is at rest, since it moves the I/O that has to end first.

// The fuzz targets include this file from another folder.
#[path = "served/rest.rs"]
mod rest;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use udm::device::{Device, DeviceState, SlowRequest};
use udm::disk::TableClaims;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::target::{Dirty, Health, OnlyCached, TargetLimits};
use udm_export::{Export, Uri};

use crate::exports::{Exports, OpenExport, fact_json};
use crate::flushing::flush;
use crate::loading::{Given, LoadHow, current_directory, load_table};
use crate::log;
use crate::platform;
use crate::runtime::{NameLock, RuntimeDir};
use crate::samples;
use crate::spec::Spec;
use crate::stalls::{Stall, Stalls};
use crate::work::Watch;

/// How long a removal waits for requests in flight. Those still in flight then get no answer, as in
/// a crash.
pub const REST_MAX: Duration = Duration::from_secs(30);

/// Time between two checks whether the device has come to rest.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The device with all its parts.
#[derive(Debug)]
pub struct Served {
    device: Arc<Device>,
    background: Mutex<Option<Queue>>,
    exports: Mutex<Exports>,
    /// Exports that were closed for an end that may still be cancelled.
    closed_exports: Mutex<Vec<String>>,
    change: Mutex<()>,
    end: rest::End,
    drainers: Mutex<usize>,
    cache: Mutex<Option<String>>,
    claims: Arc<TableClaims>,
    given: Mutex<Given>,
    /// Notes about the table that the device was made with.
    first_notes: Mutex<Vec<String>>,
    runtime: Arc<RuntimeDir>,
    /// Connections served at most for each export, if `create` was given a number.
    pub queues: Option<u16>,
    stalls: Stalls,
}

impl Served {
    /// Builds the device and starts its background work.
    pub fn build(spec: &Spec, runtime: Arc<RuntimeDir>, name: &NameLock) -> Result<Served> {
        let device = Device::new(&spec.name)?;
        let name_in_log = spec.name.clone();
        device.on_slow(move |slow| log::line(&format!("{name_in_log}: slow: {slow}")));
        let served = Served {
            background: Mutex::default(),
            exports: Mutex::default(),
            closed_exports: Mutex::default(),
            change: Mutex::default(),
            end: rest::End::default(),
            drainers: Mutex::default(),
            cache: Mutex::default(),
            claims: Arc::default(),
            given: Mutex::default(),
            first_notes: Mutex::default(),
            runtime,
            queues: spec.queues,
            stalls: Stalls::default(),
            device,
        };
        let directory = current_directory();
        let how = LoadHow {
            force_format: spec.force_format,
            after_death: name.is_inherited(),
            progress: Arc::clone(&spec.progress),
            ..served.how()
        };
        // The thread is started first: if that fails, no device is open yet that must be closed.
        let background = Queue::background("udm-background", &served.device)?;
        *lock(&served.background) = Some(background);
        let notes = served.load_with(&spec.table, &directory, &how)?;
        *lock(&served.first_notes) = notes;
        served.device.resume().inspect_err(|_| served.device.clear())?;
        lock(&served.given).end_change(true);
        Ok(served)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The kernel's status lines.
    pub fn status(&self) -> Vec<String> {
        self.device.status()
    }

    /// The active table's lines, or the inactive one's.
    pub fn table(&self, inactive: bool) -> Vec<String> {
        if inactive { self.device.inactive_table() } else { self.device.table() }
    }

    /// Gives a message to the target at `sector`, and waits until it is carried out, as the kernel
    /// does. A failing slow device, or a caller that is gone, ends the wait but not the work, since
    /// targets cannot cancel a message.
    pub fn message(&self, sector: u64, words: &[String], watch: &Watch) -> Result<String> {
        self.refuse_ending()?;
        let text = self.device.message(sector, words)?;
        while self.device.is_carrying_out(sector) {
            watch.check()?;
            let has_failed = |(_, _, health): &(u64, &str, Health)| {
                health.medium_failure.is_some() || health.metadata_failure.is_some()
            };
            if self.device.dirty().is_failing || self.device.health().iter().any(has_failed) {
                let what = words.join(" ");
                bail!(
                    "message {what}: a device fails; dirty data stays in the cache, and udm retries"
                );
            }
            self.refuse_suspended()?;
            thread::sleep(LOOK_EVERY);
        }
        Ok(text)
    }

    /// Parks new requests, and waits for those in flight. Cancelled if they do not end in time, or
    /// if the caller is gone.
    pub fn suspend(&self, watch: &Watch) -> Result<()> {
        let _change = self.change(watch)?;
        self.wait_for_suspend(watch)
    }

    /// Serves requests again, by the loaded table if there is one; suspends for that, as dmsetup.
    /// The caller keeps the right to change the device until it has written down the new table.
    pub fn resume(&self, watch: &Watch) -> Result<MutexGuard<'_, ()>> {
        let change = self.change(watch)?;
        let was_active = self.device.info().state == DeviceState::Active;
        if was_active && self.has_inactive_table() {
            self.wait_for_suspend(watch)?;
        }
        let resumed = self.device.resume();
        lock(&self.given).end_change(resumed.is_ok());
        match resumed {
            // The drain also covers the new table, which replaced the one that was being drained.
            Ok(()) if *lock(&self.drainers) > 0 => self.device.set_draining(true),
            Err(_) if was_active => self.device.cancel_suspend()?,
            _ => {}
        }
        for export in lock(&self.exports).open.iter() {
            if let Err(error) = export.device_has_changed() {
                log::line(&format!("{}: {error}", export.uri()));
            }
        }
        resumed?;
        Ok(change)
    }

    fn wait_for_suspend(&self, watch: &Watch) -> Result<()> {
        let rested = come_to_rest(&self.device, watch);
        if rested.is_err() && self.device.info().state == DeviceState::Suspending {
            self.device.cancel_suspend()?;
        }
        rested
    }

    /// The right to change the device's state, unless an end is under way.
    fn change(&self, watch: &Watch) -> Result<MutexGuard<'_, ()>> {
        self.change_when(watch, || self.refuse_ending())
    }

    /// The same, if `may` allows it. Each holder has the right for a bounded time.
    fn change_when(
        &self,
        watch: &Watch,
        may: impl Fn() -> Result<()>,
    ) -> Result<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + REST_MAX;
        loop {
            let change = match self.change.try_lock() {
                Ok(change) => Some(change),
                Err(TryLockError::Poisoned(change)) => Some(change.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            // After the lock was taken, so an end that begins later waits for this change.
            may()?;
            if let Some(change) = change {
                return Ok(change);
            }
            watch.check()?;
            if Instant::now() >= deadline {
                bail!(
                    "another change of the device (load, suspend, resume or remove) is still in \
                     progress after {} s; try again",
                    REST_MAX.as_secs()
                );
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Makes everything written so far durable.
    pub fn flush(&self) -> Result<()> {
        self.refuse_suspended()?;
        flush(&self.device)
    }

    /// Options for loading a further table.
    pub fn how(&self) -> LoadHow {
        LoadHow { claims: Arc::clone(&self.claims), ..LoadHow::default() }
    }

    /// Loads a table into the inactive slot. If the caller is gone by then, the table is dropped
    /// again.
    pub fn load(
        &self,
        text: &str,
        directory: &Path,
        how: &LoadHow,
        watch: &Watch,
    ) -> Result<Vec<String>> {
        let _change = self.change(watch)?;
        let notes = self.load_with(text, directory, how)?;
        watch.check().inspect_err(|_| {
            self.device.clear();
            lock(&self.given).inactive = None;
        })?;
        Ok(notes)
    }

    /// Opens an export, and returns its address.
    pub fn add_export(&self, uri: &str) -> Result<OpenExport> {
        self.refuse_ending()?;
        let export = self.add_again(uri)?;
        // An end may have begun while an address in use was waited for.
        self.refuse_ending().inspect_err(|_| drop(self.close_export(&export.uri, true)))?;
        Ok(export)
    }

    fn add_again(&self, uri: &str) -> Result<OpenExport> {
        let mut export = self.open_export(uri)?;
        export.begin()?;
        self.keep_export(export)
    }

    /// Opens exports that refuse clients until [`Served::let_in`].
    pub fn open_exports(&self, uris: &[String]) -> Result<()> {
        uris.iter().try_for_each(|uri| self.keep_export(self.open_export(uri)?).map(drop))
    }

    /// Lets clients in at all exports.
    pub fn let_in(&self) -> Result<()> {
        Ok(lock(&self.exports).open.iter_mut().try_for_each(|export| export.begin())?)
    }

    /// An address in use is waited for, so no lock is held meanwhile: `info` and `remove` still
    /// work.
    fn open_export(&self, uri: &str) -> Result<Box<dyn Export>> {
        let uri: Uri = uri.parse()?;
        if lock(&self.exports).open.iter().any(|export| export.uri() == uri) {
            bail!("export {uri}: it is open already");
        }
        let export = platform::open_export(&self.device, &uri, &self.runtime)?;
        if let Some(queues) = self.queues {
            export.set_clients_max(queues.into());
        }
        Ok(export)
    }

    fn keep_export(&self, export: Box<dyn Export>) -> Result<OpenExport> {
        let open = OpenExport::of(&*export);
        let mut exports = lock(&self.exports);
        if exports.are_shut {
            drop(exports);
            bail!("export {}: the device is being removed", open.uri);
        }
        exports.open.push(export);
        Ok(open)
    }

    /// Closes an export.
    pub fn remove_export(&self, uri: &str, force: bool) -> Result<()> {
        self.refuse_ending()?;
        self.close_export(uri, force)
    }

    /// The same, even while an end is under way.
    pub fn close_export(&self, uri: &str, force: bool) -> Result<()> {
        let parsed = uri.parse::<Uri>();
        let is_it = |it: Uri| it.is_at(uri) || parsed.as_ref().is_ok_and(|uri| *uri == it);
        let mut exports = lock(&self.exports);
        // An end that closed it does not open it again.
        lock(&self.closed_exports).retain(|closed| closed != uri);
        let Some(at) = exports.open.iter().position(|export| is_it(export.uri())) else {
            bail!("no export {uri}; `udm info` lists them");
        };
        match exports.open[at].clients() {
            0 => {}
            _ if force => {}
            1 => bail!("{uri}: 1 client is connected; disconnect it first, or use --force"),
            n => bail!("{uri}: {n} clients are connected; disconnect them first, or use --force"),
        }
        let export = exports.open.remove(at);
        drop(exports);
        export.stop();
        Ok(())
    }

    /// The exports.
    pub fn exports(&self) -> Vec<OpenExport> {
        lock(&self.exports).open.iter().map(|export| OpenExport::of(&**export)).collect()
    }

    /// The exports in the form of the control protocol.
    pub fn exports_json(&self) -> Vec<Value> {
        self.exports().iter().map(OpenExport::json).collect()
    }

    /// Clients of all exports.
    pub fn clients(&self) -> u64 {
        lock(&self.exports).open.iter().map(|export| export.clients()).sum()
    }

    /// Slow requests, oldest first, and their number since the start.
    pub fn slow_requests(&self) -> (Vec<SlowRequest>, u64) {
        self.device.slow_requests()
    }

    /// The health of the table's lines.
    pub fn health(&self) -> Vec<(u64, &'static str, Health)> {
        self.device.health()
    }

    /// The active table as it was given, with absolute paths.
    pub fn given_table(&self) -> String {
        lock(&self.given).active.clone()
    }

    /// Data that is not on the origins.
    pub fn dirty(&self) -> Dirty {
        self.device.dirty()
    }

    /// The device that write-back waits for, if it is known: preferably one that does not answer.
    pub fn waits_for(&self) -> Option<&'static str> {
        let stalled = self.stalls().first().map(|stall| stall.device);
        stalled.or_else(|| self.device.waits().first().map(|(_, waiting)| waiting.device))
    }

    /// Lines whose background I/O a device below does not answer.
    pub fn stalls(&self) -> Vec<Stall> {
        self.stalls.list(Instant::now())
    }

    /// Looks for such lines. Returns lines for the log.
    pub fn look_for_stalls(&self) -> Vec<String> {
        self.stalls.look(&self.device.waits(), Instant::now())
    }

    /// Bytes that a drain still waits for.
    pub fn left_to_drain(&self) -> u64 {
        self.device.left_to_drain()
    }

    /// Whether everything that was acknowledged is durable, now that the device is at rest.
    pub fn is_durable(&self) -> bool {
        self.device.is_durable()
    }

    /// The data that would be lost with the cache devices, by the sectors where their lines begin.
    pub fn only_cached(&self) -> Vec<(u64, OnlyCached)> {
        self.device.only_cached()
    }

    /// Reads samples of the data that would be lost with the cache devices: how many, and how many
    /// of them cannot be read.
    pub fn sample_only_cached(&self, watch: &Watch) -> Result<(u64, u64)> {
        if self.is_suspended() { Ok((0, 0)) } else { samples::read(&self.device, watch) }
    }

    /// Writes back at full speed until the last of the returned guards is dropped.
    pub fn start_draining(&self) -> Draining<'_> {
        let mut drainers = lock(&self.drainers);
        *drainers += 1;
        self.device.set_draining(true);
        Draining(self)
    }

    /// Whether requests wait for `resume`.
    pub fn is_suspended(&self) -> bool {
        matches!(self.device.info().state, DeviceState::Suspending | DeviceState::Suspended)
    }

    /// An error if requests wait for `resume`, or the device comes to rest for its end.
    pub fn refuse_suspended(&self) -> Result<()> {
        if self.is_stopping() {
            bail!("the device is being removed");
        }
        if self.is_suspended() {
            bail!("the device is suspended; resume it first");
        }
        Ok(())
    }

    /// Gives the device its new name.
    pub fn rename(&self, to: &str) -> Result<()> {
        Ok(self.device.rename(to)?)
    }

    /// Whether a table is loaded that `resume` makes live.
    pub fn has_inactive_table(&self) -> bool {
        self.device.info().has_inactive
    }

    /// Whether clients may only read.
    pub fn is_read_only(&self) -> bool {
        self.device.is_read_only()
    }

    /// The limits that all exports report.
    pub fn limits(&self) -> TargetLimits {
        self.device.limits()
    }

    /// The device's size.
    pub fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Notes about the table that the device was made with.
    pub fn first_notes(&self) -> Vec<String> {
        lock(&self.first_notes).clone()
    }

    /// The cache device, if there is one, as the table names it.
    pub fn cache(&self) -> Option<String> {
        lock(&self.cache).clone()
    }

    /// The active table's lines with all facts of their targets.
    pub fn lines(&self) -> Vec<Value> {
        let (status, table) = (self.device.status(), self.device.table());
        let text = |lines: &[String], at: usize| lines.get(at).cloned().unwrap_or_default();
        let facts = self.device.facts();
        let line = |(at, line): (usize, &udm::device::LineFacts)| {
            json!({
                "start": line.start,
                "sectors": line.len,
                "target": line.target,
                "status": text(&status, at),
                "table": text(&table, at),
                "facts": line.facts.iter().map(fact_json).collect::<Vec<_>>(),
            })
        };
        facts.iter().enumerate().map(line).collect()
    }

    /// Gives the device's shared memory new files after its files were removed. For that, it
    /// suspends the device for a moment, if `may` allows it.
    pub fn renew_memory(&self, may: impl Fn() -> Result<()>) -> Result<()> {
        let watch = Watch::default();
        let _change = self.change_when(&watch, may)?;
        let was_suspended = self.is_suspended();
        if !was_suspended {
            self.wait_for_suspend(&watch)?;
        }
        let renewed = udm::shm::renew_nameless();
        if !was_suspended {
            self.device.cancel_suspend()?;
        }
        Ok(renewed?)
    }

    /// Loads a table whose relative paths start at `directory`.
    fn load_with(&self, text: &str, directory: &Path, how: &LoadHow) -> Result<Vec<String>> {
        if !directory.as_os_str().is_empty() {
            std::env::set_current_dir(directory)
                .with_context(|| format!("directory {}", directory.display()))?;
        }
        let loaded = load_table(&self.device, text, directory, &self.runtime, how);
        // Even after an error this process must not keep a file system from being unmounted.
        std::env::set_current_dir("/")?;
        let loaded = loaded?;
        *lock(&self.cache) = loaded.cache;
        lock(&self.given).inactive = Some(loaded.table);
        Ok(loaded.notes)
    }
}

/// Suspends `device`, whose background queue must be running, within bounded time.
pub fn come_to_rest(device: &Device, watch: &Watch) -> Result<()> {
    if device.info().state == DeviceState::Empty {
        return Ok(());
    }
    device.begin_suspend()?;
    let deadline = Instant::now() + REST_MAX;
    while !device.finish_suspend()? {
        watch.check()?;
        if Instant::now() >= deadline {
            let waiting = match device.info().bios_in_flight {
                0 => "write-back to its devices is".to_owned(),
                1 => "1 request to its devices is".to_owned(),
                n => format!("{n} requests to its devices are"),
            };
            bail!(
                "{waiting} still not answered after {} s; no completed write is lost",
                REST_MAX.as_secs()
            );
        }
        thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Write-back runs at full speed as long as one of these lives.
#[derive(Debug)]
pub struct Draining<'a>(&'a Served);

impl Drop for Draining<'_> {
    fn drop(&mut self) {
        let mut drainers = lock(&self.0.drainers);
        *drainers -= 1;
        if *drainers == 0 {
            self.0.device.set_draining(false);
        }
    }
}

/// Takes a lock; a thread that panicked in it has ended the process already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
