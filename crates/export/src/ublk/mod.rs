//! ublk: mapped devices as disks of this host, `/dev/ublkbN`, through the kernel's ublk driver.
//!
//! | file | job |
//! |---|---|
//! | [`proto`] | messages to and from the driver |
//! | [`control`] | commands about a disk |
//! | [`requests`] | state of each request of a queue |
//! | [`memory`] | memory that clients share |
//! | [`worker`] | one queue, served by a thread of its own |
//! | [`uri`], [`counts`], [`users`] | address; counters; users of a disk |
//! | this one | a disk: create or take over, and shutdown |
//!
//! A disk outlives a killed server: the kernel holds unanswered and new requests for the next
//! server, which recognizes its disks by a mark that the driver stores ([`proto::mark_of`]).

pub mod control;
pub mod counts;
pub mod memory;
pub mod proto;
pub mod requests;
pub mod uri;
pub mod users;
pub mod worker;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use udm::base::limits::{Limit, limit};
use udm::device::Device;
use udm::error::{Error, Kind, Result};
use udm::queue::Queue;
use udm::sync::atomic::{AtomicBool, Ordering};
use udm::sync::{Arc, OnceLock};
use udm::target::{Fact, FactValue};

use crate::export::Export;

use control::{ANY_NUMBER, Control, PROCESSORS_BYTES};
use counts::Counts;
use memory::{Known, Memory};
use proto::{Info, Params, State, feature};
pub use uri::Uri;
use worker::Worker;

/// Maximum number of queues of a disk.
pub const QUEUES_MAX: u16 = 16;
/// Default maximum number of queues.
const QUEUES: u16 = 4;
/// Maximum depth of a queue in requests.
pub const DEPTH_MAX: u16 = 1024;
/// Maximum wait for the file of a new disk.
const FILE_MAX: Duration = Duration::from_secs(5);

/// Returns every stated maximum.
pub fn limits() -> [Limit; 4] {
    [
        limit("ublk_queues", QUEUES_MAX.into(), "queues of a ublk export"),
        limit("ublk_depth", DEPTH_MAX.into(), "requests that a queue takes at a time"),
        limit("ublk_io_bytes", proto::IO_BYTES_MAX.into(), "a request's data"),
        limit("ublk_held_bytes", worker::HELD_BYTES_MAX, "a queue's requests, if more than one"),
    ]
}

/// State that a disk's queues share.
#[derive(Debug)]
pub struct Shared {
    device: Arc<Device>,
    counts: Counts,
    /// Whether the driver may copy from any memory of the process: see [`feature::SAFE_STOP`].
    copies_by_address: bool,
    /// Memory that clients share, once the driver knows it.
    memory: OnceLock<Known>,
    is_given_up: AtomicBool,
}

impl Shared {
    /// Whether the driver does not answer, so that queues end without it.
    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::SeqCst)
    }
}

/// A disk. Dropping it stops and removes the disk.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    uri: Uri,
    info: Info,
    was_taken_over: bool,
    queues: Vec<Queue>,
    /// Memory that clients share, until the driver knows it.
    memory: Option<Memory>,
    /// Whether the disk accepts requests.
    has_begun: bool,
}

impl Server {
    /// Creates the disk of `uri` for `device`, or takes it over from a server that died. `home` is
    /// the directory of this server's state: only a server of the same home and device name takes
    /// over.
    pub fn start(device: &Arc<Device>, uri: &Uri, home: &str) -> Result<Server> {
        let mut server = Server::open(device, uri, home)?;
        server.begin()?;
        Ok(server)
    }

    /// Like [`Server::start`], but the disk does not accept requests yet.
    pub(crate) fn open(device: &Arc<Device>, uri: &Uri, home: &str) -> Result<Server> {
        let mut control = Control::open()?;
        let features = control.features()?;
        let memory = uri.shared.as_deref().map(Memory::map).transpose()?;
        let wanted = wanted(features, uri)?;
        let mark = proto::mark_of(&device.name(), home);
        let shared = Arc::new(Shared {
            device: device.clone(),
            counts: Counts::default(),
            copies_by_address: features & feature::SAFE_STOP != 0,
            memory: OnceLock::new(),
            is_given_up: AtomicBool::new(false),
        });
        let left = find(&mut control, uri.number, mark)?;
        let was_taken_over = left.is_some();
        let info = match left {
            Some(info) => {
                may_share(&info, uri)?;
                control.start_recovery(info.number)?;
                info
            }
            None => add(&mut control, device, uri, wanted, mark)?,
        };
        let uri = Uri { number: Some(info.number), ..uri.clone() };
        let (queues, has_begun) = (Vec::new(), false);
        let mut server = Server { shared, uri, info, was_taken_over, queues, memory, has_begun };
        // If this fails, dropping the server undoes it.
        server.serve(&mut control)?;
        Ok(server)
    }

    fn serve(&mut self, control: &mut Control) -> Result<()> {
        let Info { number, queues, depth, .. } = self.info;
        let file = open_file(number)?;
        for queue in 0..queues {
            let (shared, file) = (self.shared.clone(), file.clone());
            // If the driver does not know the processors, the scheduler chooses.
            let processors = control.processors_of(number, queue).ok();
            let name = format!("udm-ublk{number}.{queue}");
            self.queues.push(Queue::run_with_commands(&name, move |core| {
                if let Some(processors) = processors {
                    run_on(&processors);
                }
                Worker::start(core, shared, file, queue, depth)
            })?);
        }
        Ok(())
    }

    fn take_requests(&mut self, control: &mut Control) -> Result<()> {
        let (number, memory) = (self.info.number, self.memory.take());
        if !self.was_taken_over {
            self.share(control, memory)?;
            return control.start(number);
        }
        control.end_recovery(number)?;
        if self.info.features & feature::SHARED_MEMORY != 0 {
            control.forget_memory(number)?;
        }
        self.share(control, memory)?;
        self.update_size(control)
    }

    /// Registers the memory that clients share, if there is any.
    fn share(&self, control: &mut Control, memory: Option<Memory>) -> Result<()> {
        let Some(memory) = memory else { return Ok(()) };
        let known = control.share(self.info.number, memory)?;
        self.shared.memory.set(known).expect("a disk begins once");
        Ok(())
    }

    /// Updates the kernel's size of the disk, if the device's size has changed.
    fn update_size(&self, control: &mut Control) -> Result<()> {
        let sectors = self.shared.device.size_bytes() / udm::units::SECTOR;
        if control.sectors(self.info.number)? == sectors {
            return Ok(());
        }
        if self.info.features & feature::UPDATE_SIZE == 0 {
            let message = format!(
                "{}: this kernel cannot change its size; close the export and open it again",
                self.disk()
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        control.update_size(self.info.number, sectors)
    }

    fn disk(&self) -> String {
        format!("ublkb{}", self.info.number)
    }

    /// Undoes [`Server::open`] if the disk was not begun: a new disk is deleted, a disk to be taken
    /// over waits for the next server.
    fn undo(&mut self) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
        let Ok(mut control) = Control::open() else { return self.end_queues(false) };
        let number = self.info.number;
        if self.was_taken_over {
            let _ = control.quiesce(number, 1);
            self.end_queues(false);
        } else {
            let stopped = control.stop(number);
            self.end_queues(stopped.is_ok());
            let _ = control.delete(number);
        }
    }

    /// Waits for the queues to end. If the driver does not take their tags back, they end without
    /// it.
    fn end_queues(&mut self, is_stopped: bool) {
        if !is_stopped {
            self.shared.is_given_up.store(true, Ordering::SeqCst);
        }
        self.queues.iter().for_each(Queue::stop);
        self.queues.clear();
    }

    fn end(&mut self) {
        if !self.has_begun {
            // The disk was undone, or another export of the device failed to open.
            return self.undo();
        }
        if self.queues.is_empty() {
            return;
        }
        // From now on the queues answer requests in bounded time: the driver waits for that.
        self.queues.iter().for_each(Queue::stop);
        let control = Control::open();
        let stopped = control.and_then(|mut control| {
            let stopped = control.stop(self.info.number);
            self.end_queues(stopped.is_ok());
            control.delete(self.info.number)
        });
        // Another process may have removed the disk.
        drop(stopped);
        self.end_queues(false);
    }
}

/// Removes the disks that a dead server of `device` and `home` has left. Waiting clients get an
/// error. Returns the disks' files.
pub fn forget(device: &str, home: &str) -> Result<Vec<String>> {
    let mark = proto::mark_of(device, home);
    let mut gone = Vec::new();
    let numbers = control::numbers();
    if numbers.is_empty() {
        return Ok(gone);
    }
    let mut control = Control::open()?;
    for number in numbers {
        let info = control.info(number)?;
        if info.is_some_and(|info| info.mark == mark && info.state != State::Live) {
            control.stop(number)?;
            control.delete(number)?;
            gone.push(format!("/dev/ublkb{number}"));
        }
    }
    Ok(gone)
}

/// Finds the disk that an earlier server has left.
fn find(control: &mut Control, number: Option<u32>, mark: u64) -> Result<Option<Info>> {
    let numbers = number.map_or_else(control::numbers, |number| vec![number]);
    for candidate in numbers {
        let Some(info) = control.info(candidate)? else { continue };
        let is_named = number.is_some();
        let disk = format!("/dev/ublkb{candidate}");
        if info.mark != mark {
            if is_named {
                let message = format!(
                    "{disk} exists, and does not belong to this device; choose another number"
                );
                return Err(Error::new(Kind::Exists, message));
            }
            continue;
        }
        match info.state {
            State::Quiesced => return Ok(Some(info)),
            State::Live if info.server == std::process::id() as i32 && !is_named => {}
            State::Live if info.server == std::process::id() as i32 => {
                return Err(Error::new(Kind::Exists, format!("{disk} is open already")));
            }
            // Its server died before it started the disk, or while it removed it.
            State::Dead => {
                let _ = control.stop(candidate);
                control.delete(candidate)?;
            }
            State::Live | State::Other(_) => {
                let message = format!("{disk}: the previous server has not ended yet");
                return Err(Error::new(Kind::Busy, message));
            }
        }
    }
    Ok(None)
}

/// Returns the features that a new disk uses.
fn wanted(features: u64, uri: &Uri) -> Result<u64> {
    let wanted = features & feature::WANTED;
    if uri.shared.is_none() {
        return Ok(wanted);
    }
    if features & feature::SHARED_MEMORY == 0 {
        let message = "this kernel's ublk driver does not support shared=, which needs Linux 7.1 \
            or later";
        return Err(Error::new(Kind::Unsupported, message));
    }
    Ok(wanted | feature::SHARED_MEMORY)
}

/// Returns an error if `uri` shares memory, but the existing disk was created without that feature.
fn may_share(info: &Info, uri: &Uri) -> Result<()> {
    if uri.shared.is_none() || info.features & feature::SHARED_MEMORY != 0 {
        return Ok(());
    }
    let disk = info.number;
    let message = format!(
        "/dev/ublkb{disk} was created without shared=, and waits for a server without it; to use \
         shared=, close that export and open it again"
    );
    Err(Error::new(Kind::Unsupported, message))
}

/// Creates a disk without starting it.
fn add(
    control: &mut Control,
    device: &Arc<Device>,
    uri: &Uri,
    features: u64,
    mark: u64,
) -> Result<Info> {
    let block_bytes = u64::from(device.limits().block_bytes);
    if block_bytes > rustix::param::page_size() as u64 {
        let message = format!("ublk: blocks of {block_bytes} bytes are larger than a page");
        return Err(Error::new(Kind::Unsupported, message));
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = uri.queues.unwrap_or(QUEUES.min(processors.try_into().unwrap_or(QUEUES)));
    let number = uri.number.unwrap_or(ANY_NUMBER);
    let info = control.add(&Info::new(number, queues, uri.depth, features, mark))?;
    let said = control.set_params(info.number, Params::of(device).bytes());
    if let Err(error) = said {
        let _ = control.delete(info.number);
        return Err(error);
    }
    Ok(info)
}

/// Opens the file through which a disk is served. The file may appear shortly after the disk was
/// created.
fn open_file(number: u32) -> Result<Arc<OwnedFd>> {
    let place = format!("/dev/ublkc{number}");
    let deadline = Instant::now() + FILE_MAX;
    loop {
        match rustix::fs::open(&place, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::NOENT) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(errno) => return Err(Error::from_io("opening", place, errno.into())),
            Ok(file) => return Ok(Arc::new(file)),
        }
    }
}

/// Binds this thread to those of `processors` on which it may run: a waiting client and its server
/// then take turns on one processor, and neither needs a wake-up from idle.
fn run_on(processors: &[u8; PROCESSORS_BYTES]) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let mut wanted = CpuSet::new();
    for processor in 0..CpuSet::MAX_CPU.min(8 * PROCESSORS_BYTES) {
        let is_meant = processors[processor / 8] & 1 << (processor % 8) != 0;
        if is_meant && allowed.is_set(processor) {
            wanted.set(processor);
        }
    }
    if wanted.count() > 0 {
        let _ = sched_setaffinity(None, &wanted);
    }
}

impl Export for Server {
    fn uri(&self) -> crate::Uri {
        crate::Uri::Ublk(self.uri.clone())
    }

    fn clients(&self) -> u64 {
        users::count(&self.disk())
    }

    fn facts(&self) -> Vec<Fact> {
        let (counts, memory) = (&self.shared.counts, self.shared.memory.get());
        let number = |name, count, about| Fact { name, value: FactValue::Number(count), about };
        let text = |name, text: Option<String>, about| {
            let value = text.map_or(FactValue::Nothing, FactValue::Text);
            Fact { name, value, about }
        };
        let (wrong, last_wrong) = counts.wrong();
        let (ended, failure) = counts.ended();
        let was_taken_over = FactValue::Flag(self.was_taken_over);
        vec![
            number("queues", self.info.queues.into(), "queues of the disk"),
            number("depth", self.info.depth.into(), "requests that each queue takes at a time"),
            number("requests", counts.answered(), "requests that were answered"),
            number("failed", counts.failed(), "answered requests that failed"),
            number("read_in_place", counts.read_in_place(), "reads copied once, by the driver"),
            number("shared", counts.shared(), "requests whose data was in the file of shared="),
            Fact {
                name: "shared_is_lost",
                value: FactValue::Flag(memory.is_some_and(|known| known.memory.is_lost())),
                about: "whether that file was truncated and is no longer used",
            },
            Fact {
                name: "was_taken_over",
                value: was_taken_over,
                about: "whether the disk belongs to a server that died",
            },
            number("queues_ended", ended, "queues that the driver no longer uses"),
            text("queue_failure", failure, "the command that the driver refused"),
            number("violations", wrong, "invalid requests"),
            text("last_violation", last_wrong, "the last invalid request"),
        ]
    }

    fn set_clients_max(&self, _max: usize) {}

    fn begin(&mut self) -> Result<()> {
        self.take_requests(&mut Control::open()?).inspect_err(|_| self.undo())?;
        self.has_begun = true;
        Ok(())
    }

    fn device_has_changed(&self) -> Result<()> {
        self.update_size(&mut Control::open()?)
    }

    fn stop(mut self: Box<Self>) {
        self.end();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_is_shared_only_where_the_driver_and_the_disk_have_it() {
        let (plain, sharing): (Uri, Uri) =
            ("ublk:0".parse().unwrap(), "ublk:0?shared=/dev/shm/x".parse().unwrap());
        let (old, new) = (feature::WANTED | 1 << 17, feature::WANTED | 1 << 17 | 1 << 19);
        assert_eq!(wanted(new, &plain).unwrap(), feature::WANTED);
        assert_eq!(wanted(new, &sharing).unwrap(), feature::WANTED | 1 << 19);
        let error = wanted(old, &sharing).unwrap_err().to_string();
        assert!(error.contains("shared=, which needs Linux 7.1 or later"), "{error}");
        let made_with = |features| Info::new(7, 1, 1, features, 0);
        may_share(&made_with(feature::WANTED), &plain).unwrap();
        may_share(&made_with(feature::WANTED | 1 << 19), &plain).unwrap();
        may_share(&made_with(feature::WANTED | 1 << 19), &sharing).unwrap();
        let error = may_share(&made_with(feature::WANTED), &sharing).unwrap_err().to_string();
        assert!(error.contains("/dev/ublkb7 was created without shared="), "{error}");
    }
}
