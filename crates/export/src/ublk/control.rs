//! Commands to `/dev/ublk-control`, one at a time, on the caller's thread.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use udm::buffer::Buffer;
use udm::error::{Error, Kind, Result};
use udm::ring::{Command, Ring, SubmissionQueue, UblkControl};
use udm::sync::Arc;

use super::memory::{Known, Memory};
use super::proto::{INFO_BYTES, Info, PARAMS_BYTES, feature, sectors_of};

const PLACE: &str = "/dev/ublk-control";
/// A command without an answer for this long fails.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Bytes of the feature bits.
const FEATURES_BYTES: usize = 8;
/// Bytes of a set of processors, enough for 1024 of them.
pub const PROCESSORS_BYTES: usize = 128;
/// The index of the server's shared memory. There is one at a time, and the driver assigns the
/// lowest free index.
const FIRST_MEMORY: u64 = 0;
/// Lets the driver choose the number.
pub const ANY_NUMBER: u32 = u32::MAX;

/// A connection to the driver.
pub struct Control {
    file: Arc<OwnedFd>,
    submissions: SubmissionQueue<(), ()>,
}

impl Control {
    /// Opens the control device. Call this on the thread that uses it.
    pub fn open() -> Result<Control> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(PLACE, flags, Mode::empty()).map_err(no_driver)?;
        Ok(Control {
            file: Arc::new(file),
            submissions: SubmissionQueue::new(Ring::with_commands(4)?),
        })
    }

    /// Issues a command, and returns the bytes that the driver stored into `bytes`.
    fn give<const N: usize>(
        &mut self,
        what: UblkControl,
        number: u32,
        value: u64,
        bytes: [u8; N],
    ) -> std::result::Result<[u8; N], Errno> {
        self.give_and_count(what, number, value, bytes).map(|(_, filled)| filled)
    }

    /// Like [`Control::give`], and also returns the command's result.
    fn give_and_count<const N: usize>(
        &mut self,
        what: UblkControl,
        number: u32,
        value: u64,
        bytes: [u8; N],
    ) -> std::result::Result<(u32, [u8; N]), Errno> {
        let command = Command::ublk_control(what, number, value);
        self.submissions.command(&self.file, command, Buffer::from_bytes(&bytes), ());
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            if let Some(event) = self.submissions.pop_event() {
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
            self.submissions.ring_mut().submit_and_wait(Some(rest));
        }
    }

    fn order(&mut self, what: UblkControl, number: u32, value: u64) -> Result<()> {
        let done = self.give(what, number, value, []);
        done.map(|_| ()).map_err(|errno| refused(what, number, errno))
    }

    /// Returns the driver's features, or an error if a needed one is missing.
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

    /// Returns information on a device; `None` if the number is not in use.
    pub fn info(&mut self, number: u32) -> Result<Option<Info>> {
        let what = UblkControl::DeviceInfo;
        match self.give(what, number, 0, [0; INFO_BYTES]) {
            Ok(bytes) => Ok(Some(Info::parse(&bytes))),
            Err(Errno::NODEV) => Ok(None),
            Err(errno) => Err(refused(what, number, errno)),
        }
    }

    /// Creates a device, and returns its information.
    pub fn add(&mut self, info: &Info) -> Result<Info> {
        let what = UblkControl::Add;
        let made = self.give(what, info.number, 0, info.bytes());
        made.map(|bytes| Info::parse(&bytes)).map_err(|errno| refused(what, info.number, errno))
    }

    /// Sets limits and size of a device that was not started.
    pub fn set_params(&mut self, number: u32, params: [u8; PARAMS_BYTES]) -> Result<()> {
        let what = UblkControl::SetParams;
        let said = self.give(what, number, 0, params);
        said.map(|_| ()).map_err(|errno| refused(what, number, errno))
    }

    /// Returns a device's size in sectors.
    pub fn sectors(&mut self, number: u32) -> Result<u64> {
        let what = UblkControl::GetParams;
        let mut params = [0; PARAMS_BYTES];
        params[..4].copy_from_slice(&(PARAMS_BYTES as u32).to_le_bytes());
        let said = self.give(what, number, 0, params);
        said.map(|params| sectors_of(&params)).map_err(|errno| refused(what, number, errno))
    }

    /// Returns the processors whose requests a queue serves, one bit for each.
    pub fn processors_of(&mut self, number: u32, queue: u16) -> Result<[u8; PROCESSORS_BYTES]> {
        let what = UblkControl::QueueAffinity;
        let said = self.give(what, number, queue.into(), [0; PROCESSORS_BYTES]);
        said.map_err(|errno| refused(what, number, errno))
    }

    /// Lets clients in. All queues must be fetching.
    pub fn start(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::Start, number, std::process::id().into())
    }

    /// Ends all requests of clients: requests in flight once they are answered, later ones with an
    /// error.
    pub fn stop(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::Stop, number, 0)
    }

    /// Deletes a device whose file is closed. A program that has the disk open gets errors, and
    /// only the number stays taken until the program closes the disk. Before Linux 6.9, this call
    /// waits for the program to close it.
    pub fn delete(&mut self, number: u32) -> Result<()> {
        delete_with(|what| self.give(what, number, 0, []).map(|_| ()))
            .map_err(|(what, errno)| refused(what, number, errno))
    }

    /// Asks whether a device without a server may get a new one; returns `Busy` while the last
    /// server is ending.
    pub fn start_recovery(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::StartRecovery, number, 0)
    }

    /// Completes recovery: the device has a server again. All queues must be fetching.
    pub fn end_recovery(&mut self, number: u32) -> Result<()> {
        self.order(UblkControl::EndRecovery, number, std::process::id().into())
    }

    /// Changes the size of the device.
    pub fn update_size(&mut self, number: u32, sectors: u64) -> Result<()> {
        self.order(UblkControl::UpdateSize, number, sectors)
    }

    /// Takes all commands back from the driver, which holds requests for the next server.
    pub fn quiesce(&mut self, number: u32, milliseconds: u64) -> Result<()> {
        self.order(UblkControl::Quiesce, number, milliseconds)
    }

    /// Registers memory that the device's clients share.
    pub fn share(&mut self, number: u32, memory: Memory) -> Result<Known> {
        let (what, bytes) = (UblkControl::ShareMemory, memory.client_memory().ublk_memory());
        let done = self.give_and_count(what, number, 0, bytes);
        let (index, _) = done.map_err(|errno| refused(what, number, errno))?;
        let no_index = |_| refused(what, number, Errno::RANGE);
        Ok(Known { index: index.try_into().map_err(no_index)?, memory })
    }

    /// Unregisters the shared memory of an earlier server, if there is any. Waits until all
    /// requests in flight are answered.
    pub fn forget_memory(&mut self, number: u32) -> Result<()> {
        let what = UblkControl::ForgetMemory;
        match self.give(what, number, FIRST_MEMORY, []) {
            Ok(_) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(refused(what, number, errno)),
        }
    }
}

/// Deletes a device by the command that does not wait; if the driver does not know that command, by
/// the one that waits.
fn delete_with(
    mut give: impl FnMut(UblkControl) -> std::result::Result<(), Errno>,
) -> std::result::Result<(), (UblkControl, Errno)> {
    /// The driver's errno for an unknown command; newer drivers return `EOPNOTSUPP`.
    const NOT_SUPPORTED: Errno = Errno::from_raw_os_error(524);
    let (soon, waiting) = (UblkControl::DeleteSoon, UblkControl::Delete);
    match give(soon) {
        Err(Errno::OPNOTSUPP | Errno::INVAL | NOT_SUPPORTED) => {
            give(waiting).map_err(|errno| (waiting, errno))
        }
        done => done.map_err(|errno| (soon, errno)),
    }
}

/// Returns the numbers of all devices.
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
                "{PLACE} does not exist; load the driver with `modprobe ublk_drv` (Linux 6.5 or \
                 later), or use an nbd export, which needs no driver"
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
    let message = match (what, errno) {
        (UblkControl::Delete, Errno::TIMEDOUT) => format!(
            "a program still has /dev/{device} open (`fuser /dev/{device}`): the disk is deleted, \
             and its number becomes free when the program closes it"
        ),
        (UblkControl::Add, Errno::EXIST) => format!(
            "{device} was deleted while a program had it open: choose another number until the \
             program closes it"
        ),
        _ => return Error::from_io("ublk:", format!("{what:?} of {device}"), errno.into()),
    };
    Error::new(Kind::Busy, message)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Deletes a disk with a driver that gives `answers`. Returns the commands issued, and the
    /// error.
    fn delete(answers: &[std::result::Result<(), Errno>]) -> (Vec<UblkControl>, Option<String>) {
        let mut asked = Vec::new();
        let mut answers = answers.iter();
        let deleted = delete_with(|what| {
            asked.push(what);
            *answers.next().unwrap()
        });
        (asked, deleted.err().map(|(what, errno)| refused(what, 3, errno).to_string()))
    }

    #[test]
    fn a_disk_is_removed_without_waiting_for_those_who_have_it_open() {
        let (soon, waiting) = (UblkControl::DeleteSoon, UblkControl::Delete);
        assert_eq!(delete(&[Ok(())]), (vec![soon], None));
        for unknown in [Errno::OPNOTSUPP, Errno::INVAL, Errno::from_raw_os_error(524)] {
            assert_eq!(delete(&[Err(unknown), Ok(())]), (vec![soon, waiting], None));
        }
        let (asked, error) = delete(&[Err(Errno::NODEV)]);
        assert_eq!(asked, [soon]);
        assert!(error.unwrap().contains("DeleteSoon of ublkb3"));
        let (_, error) = delete(&[Err(Errno::OPNOTSUPP), Err(Errno::TIMEDOUT)]);
        assert!(error.unwrap().contains("a program still has /dev/ublkb3 open"));
    }

    #[test]
    fn a_number_that_is_taken_until_a_program_closes_the_disk_is_explained() {
        let error = refused(UblkControl::Add, 5, Errno::EXIST).to_string();
        assert!(error.contains("ublkb5 was deleted while a program had it open"), "{error}");
        let error = refused(UblkControl::Add, 5, Errno::NOMEM).to_string();
        assert!(error.contains("Add of ublkb5"), "{error}");
    }
}
