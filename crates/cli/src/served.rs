//! What a server serves: the device, its background queue and its doors.
//!
//! `inspect` and `recover` have no server; of the rest, this is the only file that drives the
//! engine's devices and the exports. `ground.rs` opens them for it.
//!
//! 1. Relative paths in tables are relative to the directory of the user who gave them, and are
//!    made absolute: the server's own directory is `/`.
//! 2. Changes (load, suspend, resume, close) happen one at a time.
//! 3. The exports are closed before the device is brought to rest. The background queue runs until
//!    the device is at rest, since it moves the I/O that has to end first.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use udm::device::{Device, DeviceState, LateRequest};
use udm::disk::TableClaims;
use udm::queue::Queue;
use udm::sync::Arc;
use udm::target::{Dirty, Fact, FactValue, Health, OnlyCached};
use udm::units::human_bytes;
use udm_export::{Door, Uri};

use crate::flushing::flush;
use crate::ground;
use crate::loading::{Given, LoadHow, attach_notes, load_table};
use crate::log;
use crate::runtime::{NameLock, RuntimeDir};
use crate::spec::Spec;
use crate::work::Watch;

/// How long a removal waits for requests in flight. Those still in flight then get no answer, as in
/// a crash.
pub const REST_MAX: Duration = Duration::from_secs(30);

/// Time between two checks whether the device has come to rest.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The state of a door at one moment.
#[derive(Clone, Debug)]
pub struct OpenDoor {
    /// Its address, as `udm unexport` takes it.
    pub uri: String,
    /// The same as clients write it.
    pub client_uri: String,
    /// How many clients use it.
    pub clients: u64,
    /// Its other facts.
    pub facts: Vec<Fact>,
}

impl OpenDoor {
    fn of(door: &dyn Door) -> OpenDoor {
        let uri = door.uri();
        OpenDoor {
            client_uri: uri.for_clients(),
            uri: uri.to_string(),
            clients: door.clients(),
            facts: door.facts(),
        }
    }

    /// In the form of the control protocol.
    pub fn json(&self) -> Value {
        json!({
            "uri": self.uri,
            "client_uri": self.client_uri,
            "clients": self.clients,
            "facts": self.facts.iter().map(fact_json).collect::<Vec<_>>(),
        })
    }

    /// How many clients broke the protocol, and what the last of them did.
    pub fn violations(&self) -> (u64, Option<&str>) {
        let value = |name| self.facts.iter().find(|fact| fact.name == name).map(|fact| &fact.value);
        let count = match value("violations") {
            Some(FactValue::Number(count)) => *count,
            _ => 0,
        };
        match value("last_violation") {
            Some(FactValue::Text(last)) => (count, Some(last)),
            _ => (count, None),
        }
    }
}

/// What stays in a cache when its device is removed.
#[derive(Clone, Debug)]
pub struct Left {
    /// Bytes that only the cache has.
    pub dirty_bytes: u64,
    /// The cache device, as the table names it.
    pub cache: Option<String>,
    /// Whether the cache device was deleted, so that its content is lost.
    pub is_lost: bool,
    /// What had happened to the devices.
    pub troubles: Vec<String>,
}

/// The device with all its parts.
#[derive(Debug)]
pub struct Served {
    device: Arc<Device>,
    background: Mutex<Option<Queue>>,
    doors: Mutex<Vec<Box<dyn Door>>>,
    /// Doors that were closed for an end that may still be cancelled.
    closed_doors: Mutex<Vec<String>>,
    change: Mutex<()>,
    drainers: Mutex<usize>,
    cache: Mutex<Option<String>>,
    claims: Arc<TableClaims>,
    given: Mutex<Given>,
    runtime: Arc<RuntimeDir>,
    queues: Option<u16>,
}

impl Served {
    /// Builds the device and starts its background work.
    pub fn build(spec: &Spec, runtime: Arc<RuntimeDir>, name: &NameLock) -> Result<Served> {
        let device = Device::new(&spec.name)?;
        let name_in_log = spec.name.clone();
        device.on_late(move |late| log::line(&format!("{name_in_log}: late: {late}")));
        let served = Served {
            background: Mutex::default(),
            doors: Mutex::default(),
            closed_doors: Mutex::default(),
            change: Mutex::default(),
            drainers: Mutex::default(),
            cache: Mutex::default(),
            claims: Arc::default(),
            given: Mutex::default(),
            runtime,
            queues: spec.queues,
            device,
        };
        let directory = std::env::current_dir().context("the current directory")?;
        let how = LoadHow {
            force_format: spec.force_format,
            after_death: name.is_inherited(),
            progress: Arc::clone(&spec.progress),
            ..served.how()
        };
        // First: if there is no thread, nothing is open yet that would have to be closed.
        let background = Queue::background("udm-background", &served.device)?;
        *lock(&served.background) = Some(background);
        served.load_with(&spec.table, &directory, &how)?;
        served.device.resume().inspect_err(|_| served.device.clear())?;
        lock(&served.given).end_change(true);
        Ok(served)
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
    /// does. A failing slow device ends the wait, not the work; so does a caller that is gone,
    /// since targets cannot cancel a message.
    pub fn message(&self, sector: u64, words: &[String], watch: &Watch) -> Result<String> {
        let text = self.device.message(sector, words)?;
        while self.device.is_carrying_out(sector) {
            watch.check()?;
            if self.device.dirty().is_failing {
                let what = words.join(" ");
                bail!("message {what}: a device fails; what is dirty stays, and is tried again");
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
    pub fn resume(&self, watch: &Watch) -> Result<()> {
        let _change = self.change(watch)?;
        let was_active = self.device.info().state == DeviceState::Active;
        if was_active && self.has_inactive_table() {
            self.wait_for_suspend(watch)?;
        }
        let resumed = self.device.resume();
        lock(&self.given).end_change(resumed.is_ok());
        match resumed {
            // Also what has come in the place of what was being drained.
            Ok(()) if *lock(&self.drainers) > 0 => self.device.set_draining(true),
            Err(_) if was_active => self.device.cancel_suspend()?,
            _ => {}
        }
        for door in lock(&self.doors).iter() {
            if let Err(error) = door.device_has_changed() {
                log::line(&format!("{}: {error}", door.uri()));
            }
        }
        Ok(resumed?)
    }

    fn wait_for_suspend(&self, watch: &Watch) -> Result<()> {
        let rested = come_to_rest(&self.device, watch);
        if rested.is_err() && self.device.info().state == DeviceState::Suspending {
            self.device.cancel_suspend()?;
        }
        rested
    }

    /// The right to change the device's state; others hold it for a bounded time.
    fn change(&self, watch: &Watch) -> Result<MutexGuard<'_, ()>> {
        let deadline = Instant::now() + REST_MAX;
        loop {
            match self.change.try_lock() {
                Ok(change) => return Ok(change),
                Err(TryLockError::Poisoned(change)) => return Ok(change.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
            watch.check()?;
            if Instant::now() >= deadline {
                bail!(
                    "another change of the device (load, suspend, resume or remove) is still at \
                     work after {} s; try again",
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
    pub fn load(&self, text: &str, directory: &Path, how: &LoadHow, watch: &Watch) -> Result<()> {
        let _change = self.change(watch)?;
        self.load_with(text, directory, how)?;
        watch.check().inspect_err(|_| {
            self.device.clear();
            lock(&self.given).inactive = None;
        })
    }

    /// Opens a door, and returns its address.
    pub fn add_export(&self, uri: &str) -> Result<OpenDoor> {
        let uri: Uri = uri.parse()?;
        let mut doors = lock(&self.doors);
        if doors.iter().any(|door| door.uri() == uri) {
            bail!("export {uri}: it is open already");
        }
        let door = ground::open_door(&self.device, &uri, &self.runtime)?;
        if let Some(queues) = self.queues {
            door.set_clients_max(queues.into());
        }
        let open = OpenDoor::of(&*door);
        doors.push(door);
        Ok(open)
    }

    /// Closes a door.
    pub fn remove_export(&self, uri: &str, force: bool) -> Result<()> {
        let parsed = uri.parse::<Uri>();
        let is_it = |it: Uri| it.is_at(uri) || parsed.as_ref().is_ok_and(|uri| *uri == it);
        let mut doors = lock(&self.doors);
        let Some(at) = doors.iter().position(|door| is_it(door.uri())) else {
            bail!("no export {uri}; `udm info` lists them");
        };
        match doors[at].clients() {
            0 => {}
            _ if force => {}
            1 => bail!("{uri}: 1 client is connected; disconnect it first, or use --force"),
            n => bail!("{uri}: {n} clients are connected; disconnect them first, or use --force"),
        }
        let door = doors.remove(at);
        drop(doors);
        door.stop();
        Ok(())
    }

    /// The doors.
    pub fn exports(&self) -> Vec<OpenDoor> {
        lock(&self.doors).iter().map(|door| OpenDoor::of(&**door)).collect()
    }

    /// The doors in the form of the control protocol.
    pub fn exports_json(&self) -> Vec<Value> {
        self.exports().iter().map(OpenDoor::json).collect()
    }

    /// Clients of all exports.
    pub fn clients(&self) -> u64 {
        lock(&self.doors).iter().map(|door| door.clients()).sum()
    }

    /// Late requests, oldest first, and how many there were since the start.
    pub fn late_requests(&self) -> (Vec<LateRequest>, u64) {
        self.device.late_requests()
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

    /// What is lost with the cache devices, by the sectors where their lines begin.
    pub fn only_cached(&self) -> Vec<(u64, OnlyCached)> {
        self.device.only_cached()
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

    /// An error if requests wait for `resume`.
    pub fn refuse_suspended(&self) -> Result<()> {
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

    /// The device's size.
    pub fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    /// Notes for the user about the new device: one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let note = "the cache lies in memory that a power cut empties, and dirty data with it";
        let volatile = self.has_flag("medium_is_volatile").then(|| note.to_owned());
        volatile.into_iter().chain(attach_notes(&self.device)).collect()
    }

    /// Whether the cache device was deleted and holds data that no other device has: it is lost
    /// when the service ends.
    pub fn would_lose_data(&self) -> bool {
        self.dirty().bytes > 0 && self.has_flag("medium_is_deleted")
    }

    /// Whether the slow device was deleted, so that all it holds ends with the service.
    pub fn would_lose_origin(&self) -> bool {
        self.has_flag("origin_is_deleted")
    }

    /// What happened to the devices below besides failing I/O: one sentence each.
    pub fn troubles(&self) -> Vec<String> {
        let facts = self.device.facts();
        let facts = || facts.iter().flat_map(|line| &line.facts);
        let told = facts().filter_map(|fact| match (fact.name, &fact.value) {
            ("medium_failure" | "origin_failure" | "origin_absence", FactValue::Text(text)) => {
                Some(text.clone())
            }
            ("medium_is_deleted", FactValue::Flag(true)) => {
                Some("the cache device was deleted: its data ends with this server".to_owned())
            }
            _ => None,
        });
        told.collect()
    }

    /// Why dirty data cannot get to where its origin is looked for, if so.
    pub fn why_not_drained(&self) -> Option<String> {
        let facts = self.device.facts();
        let text = |name: &str| {
            let mut all = facts.iter().flat_map(|line| &line.facts);
            all.find_map(|fact| match &fact.value {
                FactValue::Text(text) if fact.name == name => Some(text.clone()),
                _ => None,
            })
        };
        let dirty = human_bytes(self.dirty().bytes);
        if self.dirty().bytes == 0 {
            return text("origin_absence");
        }
        if let Some(failure) = text("medium_failure") {
            return Some(format!(
                "{failure}; {dirty} of dirty data were there, and nothing more is written back \
                 from it here: `udm remove --force`, then `udm recover`, writes back what is left"
            ));
        }
        let failure = text("origin_failure")?;
        Some(format!("{failure}; {dirty} of dirty data stay in the cache"))
    }

    /// The cache device, if there is one, as the table names it.
    pub fn cache(&self) -> Option<String> {
        lock(&self.cache).clone()
    }

    /// Damaged dirty data that no device has.
    pub fn quarantined_bytes(&self) -> u64 {
        let facts = self.device.facts();
        let all = facts.iter().flat_map(|line| &line.facts);
        let numbers = all.filter_map(|fact| match (fact.name, &fact.value) {
            ("quarantined_bytes", FactValue::Number(bytes)) => Some(*bytes),
            _ => None,
        });
        numbers.sum()
    }

    fn has_flag(&self, name: &str) -> bool {
        let facts = self.device.facts();
        let mut all = facts.iter().flat_map(|line| &line.facts);
        all.any(|fact| fact.name == name && fact.value == FactValue::Flag(true))
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

    /// Disconnects clients and brings the device to rest, before its end. After an error the
    /// service can only end, or [go on](Served::go_on).
    pub fn rest(&self, watch: &Watch) -> Result<()> {
        let doors = std::mem::take(&mut *lock(&self.doors));
        for door in doors {
            lock(&self.closed_doors).push(door.uri().to_string());
            door.stop();
        }
        let _change = self.change(watch)?;
        come_to_rest(&self.device, watch)
    }

    /// Cancels a rest: the device serves, and its doors are open. Returns what cannot be opened.
    pub fn go_on(&self, stay_suspended: bool) -> Result<()> {
        if !stay_suspended {
            self.device.cancel_suspend()?;
        }
        let uris = std::mem::take(&mut *lock(&self.closed_doors));
        let failed: Vec<String> = uris
            .iter()
            .filter_map(|uri| self.add_export(uri).err().map(|error| format!("{error:#}")))
            .collect();
        if !failed.is_empty() {
            bail!("{}", failed.join("; "));
        }
        Ok(())
    }

    /// Ends the service of a device at rest: no device is open after this. Dirty data stays. A
    /// device that does not rest is left to the end of the process.
    pub fn end(&self) -> Left {
        let cache = lock(&self.cache).clone();
        let is_lost = self.would_lose_data();
        let troubles = self.troubles();
        let left = Left { dirty_bytes: self.device.dirty().bytes, cache, is_lost, troubles };
        // This is refused only if the device is not at rest.
        let _ = self.device.remove();
        drop(lock(&self.background).take());
        left
    }

    /// The device was not announced to anybody: removes it, and leaves nothing on its media or in
    /// memory.
    pub fn undo(&self) {
        if self.rest(&Watch::default()).is_ok() {
            self.end();
        }
    }

    /// Loads a table whose relative paths start at `directory`.
    fn load_with(&self, text: &str, directory: &Path, how: &LoadHow) -> Result<()> {
        std::env::set_current_dir(directory)
            .with_context(|| format!("directory {}", directory.display()))?;
        let loaded = load_table(&self.device, text, directory, &self.runtime, how);
        // Even after an error this process must not keep a file system from being unmounted.
        std::env::set_current_dir("/")?;
        let loaded = loaded?;
        *lock(&self.cache) = loaded.cache;
        lock(&self.given).inactive = Some(loaded.table);
        Ok(())
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
                "{waiting} still not answered after {} s; nothing that was completed is lost",
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

fn fact_json(fact: &Fact) -> Value {
    let value = match &fact.value {
        FactValue::Number(number) => json!(number),
        FactValue::Flag(flag) => json!(flag),
        FactValue::Text(text) => json!(text),
        FactValue::Nothing => Value::Null,
    };
    json!({ "name": fact.name, "value": value, "about": fact.about })
}

/// Takes a lock; a thread that panicked in it has ended the process already.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
