//! A mapped device: a name, an active and an inactive table, a state. The kernel's `dm.c`,
//! `dm-table.c` and `dm-ioctl.c`.
//!
//! A driver (a queue, an in-process caller, the simulator) has a [`PortHandle`] at the device and
//! its [`Port`], and calls the device as it would a target: `submit`, `complete`, `tick`, and
//! [`Device::retry`] for parked bios when [`Events::room_epoch`] of [`Device::events`] changed. All
//! but the simulator use a [`Driver`] for that.
//!
//! 1. Each port has a state with its own lock on its own cache lines, contended only by suspend and
//!    resume. The lock covers everything that a request needs, so ports share no state.
//! 2. A request handed to a target is within its line, whole sectors, and at most
//!    [`BIO_BYTES_MAX`](crate::units::BIO_BYTES_MAX) long. For clients that do not know the block
//!    size, [`Bio::allows_parts`] makes whole blocks of other requests.
//! 3. Each bio comes out exactly once; the port state counts the bios inside, and asserts it.
//! 4. Tables change only while no bio and no I/O is inside, that is, while suspended.
//! 5. No function here waits: the caller of a suspend polls [`Device::finish_suspend`].

mod block_locks;
mod change;
mod driver;
mod fast_path;
mod lock_switch;
mod parts;
mod port_state;
mod slow;
mod split;
mod table;

use crate::bio::Bio;
use crate::disk::DiskIo;
use crate::error::{Error, Kind, Result};
use crate::pmem::client_memory::Source;
use crate::pmem::copy_target::CopyTarget;
use crate::sync::{Arc, Mutex, MutexGuard, lock};
#[allow(unused_imports, reason = "for the documentation")]
use crate::target::Target;
use crate::target::{
    Dirty, Events, Extent, Fact, Health, OnlyCached, Port, TargetLimits, Waiting, Wake,
};
use crate::units::{Nanos, SECTOR};

pub use driver::Driver;
pub use fast_path::FastPath;
pub use port_state::Reported;
pub use slow::{InFlight, SLOW_SECONDS, SlowRequest};
pub use table::LoadedTable;

use lock_switch::LockSwitch;
use port_state::PortState;
use slow::SlowRequests;
use table::Active;

/// At most this many ports are attached to a device at a time.
pub const PORTS_MAX: usize = 256;

/// At most this many bytes in a device's name; the kernel's own limit.
pub const NAME_BYTES_MAX: usize = 127;

/// The state of a mapped device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// No table is active; requests fail.
    Empty,
    /// Serves requests.
    Active,
    /// New bios are parked; those inside are completed.
    Suspending,
    /// New bios are parked, and no bio is inside a target.
    Suspended,
}

/// What `info` says of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: DeviceState,
    /// Bytes, 0 without an active table.
    pub size_bytes: u64,
    /// Lines of the active table.
    pub targets: usize,
    /// Whether a table is loaded that the next resume will activate.
    pub has_inactive: bool,
    /// Ports attached.
    pub ports: usize,
    /// Bios inside targets at the moment.
    pub bios_in_flight: u64,
}

/// Facts of one line of the active table beyond its status line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineFacts {
    /// First sector of the line.
    pub start: u64,
    /// Sectors of the line.
    pub len: u64,
    /// The target's name.
    pub target: &'static str,
    /// The facts.
    pub facts: Vec<Fact>,
}

/// A mapped device.
#[derive(Debug)]
pub struct Device {
    events: Arc<Events>,
    seats: Box<[Cell]>,
    slots: Mutex<Slots>,
    /// Held during each change of state; never while a bio is served.
    change: Mutex<()>,
    slow: SlowRequests,
    locks: LockSwitch,
}

/// A seat on cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Cell(Mutex<PortState>);

/// The part of a device's state that requests do not touch.
#[derive(Debug)]
struct Slots {
    name: String,
    state: DeviceState,
    active: Option<Arc<Active>>,
    inactive: Option<LoadedTable>,
    /// Lines of the active table whose targets are suspended: a prefix.
    suspended_lines: usize,
    generation: u64,
}

impl Device {
    /// A device without a table.
    pub fn new(name: &str) -> Result<Arc<Device>> {
        check_name(name)?;
        let events = Arc::default();
        Ok(Arc::new(Device {
            locks: LockSwitch::new(&events),
            events,
            seats: (0..PORTS_MAX).map(|_| Cell::default()).collect(),
            slots: Mutex::new(Slots {
                name: name.to_string(),
                state: DeviceState::Empty,
                active: None,
                inactive: None,
                suspended_lines: 0,
                generation: 0,
            }),
            change: Mutex::new(()),
            slow: SlowRequests::default(),
        }))
    }

    /// A device that serves `table`.
    pub fn with_table(name: &str, table: LoadedTable) -> Result<Arc<Device>> {
        let device = Device::new(name)?;
        device.load(table)?;
        device.resume()?;
        Ok(device)
    }

    /// Gives a driver a port state, and the port that belongs to it. `wake` is called when parked
    /// bios should be retried.
    pub fn attach_port(self: &Arc<Device>, wake: Arc<dyn Wake>) -> Result<(PortHandle, Port)> {
        // A change of table or state visits all ports, so no port may be added meanwhile.
        let _change = lock(&self.change);
        let slots = lock(&self.slots);
        for (id, cell) in self.seats.iter().enumerate() {
            let mut seat = lock(&cell.0);
            if !seat.is_attached() {
                seat.attach(slots.active.clone(), slots.generation, slots.is_suspended());
                self.events.listen(wake.clone());
                return Ok((PortHandle { device: self.clone(), id, wake }, Port::new(id)));
            }
        }
        let message =
            format!("{}: {PORTS_MAX} ports are attached, which is the maximum", slots.name);
        Err(Error::new(Kind::Busy, message))
    }

    /// Serves `bio`. It comes out of `port` exactly once, in `done` or in `parked`.
    /// [`Device::retry`] returns a parked bio to the device.
    #[inline]
    pub fn submit(&self, bio: Bio, port: &mut Port) {
        let may_want_locks = bio.allows_parts;
        let mut seat = self.seat(port);
        seat.submit(bio, port);
        if may_want_locks && seat.parts().wants_locks() {
            drop(seat);
            self.begin_locks(port.id);
        }
    }

    /// Reads the range that begins at `offset` directly into client memory, if that takes no more
    /// than a copy; `port` is the number of the caller's port. False: the caller must submit a bio,
    /// and must ignore the bytes copied so far.
    #[inline]
    pub fn read_into(&self, offset: u64, into: CopyTarget<'_>, port: usize) -> bool {
        self.seat_of(port).read_into(offset, into, port)
    }

    /// Writes from client memory to the range that begins at `offset`, if that takes no more than a
    /// copy; `port` is the number of the caller's port. True: the write is complete. False: the
    /// caller must submit a bio, if all of the memory still exists.
    #[inline]
    pub fn write_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
        self.seat_of(port).write_from(offset, from, fua, port)
    }

    /// Takes back an I/O that came out of `port.ios`.
    pub fn complete(&self, io: DiskIo, port: &mut Port) {
        self.seat(port).complete(io, port);
    }

    /// Submits the parked bios of `port` again, in order. Call it when the room epoch of
    /// [`Device::events`] has changed since the last submit or retry.
    pub fn retry(&self, port: &mut Port) {
        let mut seat = self.seat(port);
        if seat.is_suspended() {
            return;
        }
        seat.begin_retry();
        for _ in 0..port.parked.len() {
            let Some(bio) = port.parked.pop_front() else { break };
            seat.submit(bio, port);
        }
        seat.parked_bios_are_current();
        if seat.parts().wants_locks() {
            drop(seat);
            self.begin_locks(port.id);
        }
    }

    /// Does the targets' background work; one thread at a time. Returns when to call again at the
    /// latest; `None`: only when the background wake of [`Device::events`] is called.
    pub fn tick(&self, now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.seat(port).tick(now, port)
    }

    /// The events of free space and of work, for all tables that become active.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Bytes, 0 without an active table.
    pub fn size_bytes(&self) -> u64 {
        self.active().map_or(0, |active| active.size_bytes())
    }

    /// The limits that clients should know.
    pub fn limits(&self) -> TargetLimits {
        self.active().map_or_else(TargetLimits::default, |active| active.limits())
    }

    /// The state of the first bytes of the range, and how many bytes have this state; see
    /// [`Target::extent`]. The state beyond the end is unknown.
    pub fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        let active = self.active();
        let Some(line) = active.as_ref().and_then(|active| active.line_at(offset)) else {
            return (len, Extent::Data);
        };
        let len = len.min(line.end - offset);
        let (known, extent) = line.target.extent(offset - line.start, len);
        assert!(known > 0 && known <= len, "an extent is within what was asked for");
        (known, extent)
    }

    /// Whether writing zeroes is much faster than writing data, everywhere.
    pub fn has_fast_zeroes(&self) -> bool {
        let is_fast =
            |active: Arc<Active>| active.lines().iter().all(|line| line.target.has_fast_zeroes());
        self.active().is_some_and(is_fast)
    }

    /// Whether some line refuses writes: then clients should not write at all.
    pub fn is_read_only(&self) -> bool {
        let is_any =
            |active: Arc<Active>| active.lines().iter().any(|line| line.target.is_read_only());
        self.active().is_some_and(is_any)
    }

    /// Its name.
    pub fn name(&self) -> String {
        lock(&self.slots).name.clone()
    }

    /// Gives it another name.
    pub fn rename(&self, name: &str) -> Result<()> {
        check_name(name)?;
        lock(&self.slots).name = name.to_string();
        Ok(())
    }

    /// Its state, for `info`.
    pub fn info(&self) -> DeviceInfo {
        let slots = lock(&self.slots);
        let mut info = DeviceInfo {
            name: slots.name.clone(),
            state: slots.state,
            size_bytes: slots.active.as_ref().map_or(0, |active| active.size_bytes()),
            targets: slots.active.as_ref().map_or(0, |active| active.lines().len()),
            has_inactive: slots.inactive.is_some(),
            ports: 0,
            bios_in_flight: 0,
        };
        drop(slots);
        for cell in &self.seats {
            let seat = lock(&cell.0);
            info.ports += usize::from(seat.is_attached());
            info.bios_in_flight += seat.in_flight();
        }
        info
    }

    /// The status lines, as `dmsetup status` prints them.
    pub fn status(&self) -> Vec<String> {
        self.active().map_or_else(Vec::new, |active| active.print(|target| target.status()))
    }

    /// The active table, as `dmsetup table` prints it.
    pub fn table(&self) -> Vec<String> {
        self.active().map_or_else(Vec::new, |active| active.print(|target| target.table()))
    }

    /// The table that the next resume will activate, as `dmsetup table --inactive` prints it.
    pub fn inactive_table(&self) -> Vec<String> {
        let slots = lock(&self.slots);
        slots.inactive.as_ref().map_or_else(Vec::new, LoadedTable::print)
    }

    /// Facts of the targets that their status lines do not show.
    pub fn facts(&self) -> Vec<LineFacts> {
        self.active().map_or_else(Vec::new, |active| active.facts())
    }

    /// The health of the lines of the active table, with their first sectors and their targets.
    pub fn health(&self) -> Vec<(u64, &'static str, Health)> {
        let active = self.active();
        let lines = active.iter().flat_map(|active| active.lines());
        lines.map(|line| (line.start / SECTOR, line.target.name(), line.target.health())).collect()
    }

    /// Data that is not on the origins yet.
    pub fn dirty(&self) -> Dirty {
        let mut sum = Dirty::default();
        for line in self.active().iter().flat_map(|active| active.lines()) {
            let dirty = line.target.dirty();
            sum.bytes += dirty.bytes;
            sum.is_failing |= dirty.is_failing;
        }
        sum
    }

    /// The data that would be lost with the cache devices, with the first sectors of their lines.
    pub fn only_cached(&self) -> Vec<(u64, OnlyCached)> {
        let active = self.active();
        let lines = active.iter().flat_map(|active| active.lines());
        lines.filter_map(|line| Some((line.start / SECTOR, line.target.only_cached()?))).collect()
    }

    /// Makes the targets write everything back as fast as they can, or as usual again.
    pub fn set_draining(&self, draining: bool) {
        for line in self.active().iter().flat_map(|active| active.lines()) {
            line.target.set_draining(draining);
        }
    }

    /// The devices that the background I/O of lines waits for, by the sectors where the lines
    /// begin.
    pub fn waits(&self) -> Vec<(u64, Waiting)> {
        let active = self.active();
        let lines = active.iter().flat_map(|active| active.lines());
        lines.filter_map(|line| Some((line.start / SECTOR, line.target.waits_for()?))).collect()
    }

    /// Bytes that were dirty when the drain began and that the origins do not have yet.
    pub fn left_to_drain(&self) -> u64 {
        let active = self.active();
        let lines = active.iter().flat_map(|active| active.lines());
        lines.map(|line| line.target.left_to_drain()).sum()
    }

    /// Whether everything that was acknowledged is durable, once the device is suspended.
    pub fn is_durable(&self) -> bool {
        let active = self.active();
        active.iter().flat_map(|active| active.lines()).all(|line| line.target.is_durable())
    }

    /// Passes `words` to the target whose line holds `sector`. The work of the message may continue
    /// after this returns: see [`Device::is_carrying_out`].
    pub fn message(&self, sector: u64, words: &[String]) -> Result<String> {
        let name = self.name();
        if words.is_empty() {
            return Err(Error::new(Kind::Invalid, format!("{name}: the message is empty")));
        }
        let target = self.target_at(sector)?;
        target.message(words).map_err(|error| error.at(name))
    }

    /// Whether the target whose line holds `sector` is still carrying out a message.
    pub fn is_carrying_out(&self, sector: u64) -> bool {
        self.target_at(sector).is_ok_and(|target| target.is_carrying_out())
    }

    fn target_at(&self, sector: u64) -> Result<Arc<dyn Target>> {
        let name = self.name();
        let active = self
            .active()
            .ok_or_else(|| Error::new(Kind::Invalid, format!("{name}: no table is active")))?;
        let line = active.line_at(sector.saturating_mul(SECTOR)).ok_or_else(|| {
            let message = format!("{name}: Target message sector outside device: {sector}");
            Error::new(Kind::Invalid, message)
        })?;
        Ok(line.target.clone())
    }

    fn active(&self) -> Option<Arc<Active>> {
        lock(&self.slots).active.clone()
    }

    #[inline]
    fn seat(&self, port: &Port) -> MutexGuard<'_, PortState> {
        self.seat_of(port.id)
    }

    #[inline]
    fn seat_of(&self, port: usize) -> MutexGuard<'_, PortState> {
        let seat = lock(&self.seats[port].0);
        assert!(seat.is_attached(), "port {port} is not attached to this device");
        seat
    }
}

/// A driver's connection to a device. Dropping it ends the connection; no bio may be in flight
/// then.
pub struct PortHandle {
    device: Arc<Device>,
    id: usize,
    wake: Arc<dyn Wake>,
}

impl std::fmt::Debug for PortHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PortHandle({} of {})", self.id, self.device.name())
    }
}

impl PortHandle {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for PortHandle {
    fn drop(&mut self) {
        self.device.events.forget(&self.wake);
        let Ok(mut seat) = self.device.seats[self.id].0.lock() else { return };
        let left = seat.in_flight();
        let was_user = seat.parts().is_user();
        seat.detach();
        drop(seat);
        if was_user {
            self.device.end_locks();
        }
        assert!(left == 0 || std::thread::panicking(), "{left} bios left when a port was detached");
    }
}

impl Slots {
    fn is_suspended(&self) -> bool {
        matches!(self.state, DeviceState::Suspending | DeviceState::Suspended)
    }
}

/// The rules for names: at most 127 of the characters that need no mangling, and that also suit
/// names of files: letters, digits and `#+-.:=@_`, not starting with a dot or a dash.
pub fn check_name(name: &str) -> Result<()> {
    let shown = name.escape_debug();
    let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"#+-.:=@_".contains(&b);
    let wrong = if name.is_empty() {
        "a device's name is empty".to_string()
    } else if name.len() > NAME_BYTES_MAX {
        format!("the device's name is too long: at most {NAME_BYTES_MAX} characters")
    } else if !name.bytes().all(is_plain) {
        format!("`{shown}` is not a device's name: only letters, digits and #+-.:=@_ are allowed")
    } else if name.starts_with(['.', '-']) {
        format!("`{shown}` is not a device's name: it must not start with a dot or a dash")
    } else {
        return Ok(());
    };
    Err(Error::new(Kind::Invalid, wrong))
}

#[cfg(test)]
mod tests;
