//! Commands to `/dev/ublk-control`, one at a time, on the caller's thread.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use udm::buffer::Buffer;
use udm::error::{Error, Kind, Result};
use udm::ring::{Command, Desk, Ring, UblkControl};
use udm::sync::Arc;

use super::memory::{Known, Memory};
use super::proto::{INFO_BYTES, Info, PARAMS_BYTES, feature, sectors_of};

const PLACE: &str = "/dev/ublk-control";
/// A command that is not answered for this long is given up.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Bytes of what the driver is able to do.
const FEATURES_BYTES: usize = 8;
/// Bytes of a set of processors: room for 1024 of them.
pub const PROCESSORS_BYTES: usize = 128;
/// The index of the memory that a server has shared. There is one at a time, and the driver gives
/// the lowest that is free.
const FIRST_MEMORY: u64 = 0;
/// A number that the driver chooses.
pub const ANY_NUMBER: u32 = u32::MAX;

/// The way to the driver.
pub struct Control {
    file: Arc<OwnedFd>,
    desk: Desk<(), ()>,
}

impl Control {
    /// Opens it. Call it on the thread that uses it.
    pub fn open() -> Result<Control> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(PLACE, flags, Mode::empty()).map_err(no_driver)?;
        Ok(Control { file: Arc::new(file), desk: Desk::new(Ring::with_commands(4)?) })
    }

    /// Gives a command, and returns what the driver has put into `bytes`.
    fn give<const N: usize>(
        &mut self,
        what: UblkControl,
        number: u32,
        value: u64,
        bytes: [u8; N],
    ) -> std::result::Result<[u8; N], Errno> {
        self.give_and_count(what, number, value, bytes).map(|(_, filled)| filled)
    }

    /// The same, and what the command results in.
    fn give_and_count<const N: usize>(
        &mut self,
        what: UblkControl,
        number: u32,
        value: u64,
        bytes: [u8; N],
    ) -> std::result::Result<(u32, [u8; N]), Errno> {
        let command = Command::ublk_control(what, number, value);
        self.desk.command(&self.file, command, Buffer::from_bytes(&bytes), ());
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            if let Some(event) = self.desk.pop_event() {
                let failed =
                    |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
                let result = event.result.map_err(failed)?;
                let filled = event.buffer.as_slice().try_into();
                return Ok((result, filled.expect("a buffer comes back as it went")));
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Err(Errno::TIMEDOUT);
            }
            self.desk.ring_mut().submit_and_wait(Some(rest));
        }
    }

    fn order(&mut self, what: UblkControl, number: u32, value: u64) -> Result<()> {
        let done = self.give(what, number, value, []);
        done.map(|_| ()).map_err(|errno| refused(what, number, errno))
    }

    /// An error if this kernel's driver lacks what is needed; else what it is able to do.
    pub fn features(&mut self) -> Result<u64> {
        let what = UblkControl::Features;
        let features = match self.give(what, ANY_NUMBER, 0, [0; FEATURES_BYTES]) {
            Ok(bytes) => u64::from_le_bytes(bytes),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => 0,
            Err(errno) => return Err(refused(what, ANY_NUMBER, errno)),
        };
        if features & feature::NEEDED != feature::NEEDED {
            let message = "this kernel's ublk driver is too old: Linux 6.5 or later is needed; \
                           an nbd export works on every kernel";
            return Err(Error::new(Kind::Unsupported, message));
        }
        Ok(features)
    }

    /// What a device is; `None` if there is none of that number.
    pub fn info(&mut self, number: u32) -> Result<Option<Info>> {
        let what = UblkControl::DeviceInfo;
        match self.give(what, number, 0, [0; INFO_BYTES]) {
            Ok(bytes) => Ok(Some(Info::parse(&bytes))),
            Err(Errno::NODEV) => Ok(None),
            Err(errno) => Err(refused(what, number, errno)),
        }
    }

    /// Makes a device, and returns what became of it.
    pub fn add(&mut self, info: &Info) -> Result<Info> {
        let what = UblkControl::Add;
        let made = self.give(what, info.number, 0, info.bytes());
        made.map(|bytes| Info::parse(&bytes)).map_err(|errno| refused(what, info.number, errno))
    }

    /// Says limits and size of a device that was not started.
    pub fn set_params(&mut self, number: u32, params: [u8; PARAMS_BYTES]) -> Result<()> {
        let what = UblkControl::SetParams;
        let said = self.give(what, number, 0, params);
        said.map(|_| ()).map_err(|errno| refused(what, number, errno))
    }

    /// A device's size in sectors.
    pub fn sectors(&mut self, number: u32) -> Result<u64> {
        let what = UblkControl::GetParams;
        let mut params = [0; PARAMS_BYTES];
        params[..4].copy_from_slice(&(PARAMS_BYTES as u32).to_le_bytes());
        let said = self.give(what, number, 0, params);
        said.map(|params| sectors_of(&params)).map_err(|errno| refused(what, number, errno))
    }

    /// The processors whose requests come to a queue, one bit for each.
    pub fn processors_of(&mut self, number: u32, queue: u16) -> Result<[u8; PROCESSORS_BYTES]> {
        let what = UblkControl::QueueAffinity;
        let said = self.give(what, number, queue.into(), [0; PROCESSORS_BYTES]);
        said.map_err(|errno| refused(what, number, errno))
    }

    /// Lets clients in, when all queues fetch.
    pub fn start(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::Start, number, std::process::id().into())
    }

    /// Ends all requests of clients: those in flight when they are answered, later ones with an
    /// error.
    pub fn stop(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::Stop, number, 0)
    }

    /// Removes a device whose file is closed.
    pub fn delete(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::Delete, number, 0)
    }

    /// Whether a device without a server may have one; `Busy` while the last one is ending.
    pub fn start_recovery(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::StartRecovery, number, 0)
    }

    /// The device has a server again, when all queues fetch.
    pub fn end_recovery(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::EndRecovery, number, std::process::id().into())
    }

    /// Gives the device a new size.
    pub fn update_size(&mut self, number: u32, sectors: u64) -> Result<()> {
        self.order(UblkControl::UpdateSize, number, sectors)
    }

    /// Takes all commands back from the driver, and holds requests for the next server.
    pub fn quiesce(&mut self, number: u32, milliseconds: u64) -> Result<()> {
        self.order(UblkControl::Quiesce, number, milliseconds)
    }

    /// Tells the driver of memory that the clients of a device share.
    pub fn share(&mut self, number: u32, memory: Memory) -> Result<Known> {
        let (what, bytes) = (UblkControl::ShareMemory, memory.foreign().ublk_memory());
        let done = self.give_and_count(what, number, 0, bytes);
        let (index, _) = done.map_err(|errno| refused(what, number, errno))?;
        let no_index = |_| refused(what, number, Errno::RANGE);
        Ok(Known { index: index.try_into().map_err(no_index)?, memory })
    }

    /// The driver forgets the memory that a server before this one has told it of, if there is
    /// some. It waits until all requests that are under way are answered.
    pub fn forget_memory(&mut self, number: u32) -> Result<()> {
        let what = UblkControl::ForgetMemory;
        match self.give(what, number, FIRST_MEMORY, []) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(refused(what, number, errno)),
        }
    }
}

/// The numbers of all devices.
pub fn numbers() -> Vec<u32> {
    let entries = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    let mut all: Vec<u32> =
        entries.filter_map(|entry| number(entry.file_name().to_str()?)).collect();
    all.sort_unstable();
    all
}

fn no_driver(errno: Errno) -> Error {
    match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => Error::new(
            Kind::NotFound,
            format!(
                "{PLACE} is not there: this kernel has no ublk, or has not loaded it; \
                 `modprobe ublk_drv` does (Linux 6.5 or later), and an nbd export needs no driver"
            ),
        ),
        Errno::ACCESS | Errno::PERM => not_allowed(),
        _ => Error::from_io("opening", PLACE, errno.into()),
    }
}

fn not_allowed() -> Error {
    let message = "a ublk export needs root (CAP_SYS_ADMIN); an nbd export does not";
    Error::new(Kind::Refused, message)
}

fn refused(what: UblkControl, number: u32, errno: Errno) -> Error {
    if matches!(errno, Errno::PERM | Errno::ACCESS) && what != UblkControl::SetParams {
        return not_allowed();
    }
    let device = if number == ANY_NUMBER { "a disk".into() } else { format!("ublkb{number}") };
    Error::from_io("ublk:", format!("{what:?} of {device}"), errno.into())
}
