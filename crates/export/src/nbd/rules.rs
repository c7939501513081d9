//! Which requests are valid, their actions, and the errors for the others.
//!
//! **Block sizes.** If a client has asked for them with GO, its requests must be whole blocks, or
//! they are refused. For other clients, the protocol recommends that the smallest block is a byte.
//! Debian's nbd-client is one of them, and sends sectors of 512 bytes. As qemu-nbd does, the device
//! reads and writes the whole blocks around such requests.

use udm::bio::Op;
use udm::error::Status;
use udm::sync::atomic::{AtomicU64, Ordering};
use udm::units::BIO_BYTES_MAX;

use super::handshake::Agreement;
use super::known::Known;
use super::proto::{Request, command, command_flag, errno};

/// The reason of a refusal: the protocol's error, and a message.
pub type Refusal = (u32, &'static str);

/// The action of a valid request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A bio.
    Serve(Op),
    /// The answer tells the state of a range.
    Status,
    /// The answer is immediate.
    Nothing,
    /// The end of the connection.
    Disconnect,
}

/// Counts of an export's requests that are not whole blocks of the device.
#[derive(Debug, Default)]
pub struct Unaligned {
    requests: AtomicU64,
    clients: AtomicU64,
}

impl Unaligned {
    /// Counts a request. `is_first`: its client has sent no such request before.
    pub fn count(&self, is_first: bool) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.clients.fetch_add(is_first.into(), Ordering::Relaxed);
    }

    /// Such requests.
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Clients that have sent any.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::Relaxed)
    }
}

/// Whether the range of a request is whole blocks.
pub fn is_whole(request: &Request, block_bytes: u32) -> bool {
    (request.offset | u64::from(request.len)).is_multiple_of(block_bytes.into())
}

/// Checks `request` on a device of `size_bytes`, and returns its action.
pub fn check(
    request: &Request,
    size_bytes: u64,
    agreement: &Agreement,
    known: Option<&dyn Known>,
) -> Result<Action, Refusal> {
    // The protocol allows FUA on every command; it has an effect where bytes are stored.
    let allowed = command_flag::FUA
        | match request.command {
            command::READ if agreement.is_structured => command_flag::DF,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
    if request.flags & !allowed != 0 {
        return Err((errno::EINVAL, "the command does not support these flags"));
    }
    let action = match request.command {
        command::DISC => return Ok(Action::Disconnect),
        command::FLUSH if request.offset == 0 && request.len == 0 => {
            return Ok(Action::Serve(Op::Flush));
        }
        command::FLUSH => return Err((errno::EINVAL, "a flush has no range")),
        command::READ => Action::Serve(Op::Read),
        command::WRITE => Action::Serve(Op::Write),
        command::TRIM => Action::Serve(Op::Discard),
        command::WRITE_ZEROES => Action::Serve(Op::WriteZeroes),
        command::CACHE => Action::Nothing,
        command::BLOCK_STATUS => Action::Status,
        _ => return Err((errno::EINVAL, "unknown command")),
    };
    check_range(request, size_bytes, agreement)?;
    let is_change =
        matches!(request.command, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if is_change && agreement.is_read_only {
        return Err((errno::EPERM, "this export is read-only"));
    }
    // Parts of blocks are zeroed by writes.
    let has_fast_zeroes = || {
        let are_whole = is_whole(request, agreement.block_bytes);
        are_whole && known.is_some_and(|known| known.has_fast_zeroes())
    };
    match request.command {
        command::READ | command::WRITE if u64::from(request.len) > BIO_BYTES_MAX => {
            Err((errno::EINVAL, "the request is longer than 32 MiB"))
        }
        command::WRITE_ZEROES
            if request.flags & command_flag::FAST_ZERO != 0 && !has_fast_zeroes() =>
        {
            Err((errno::ENOTSUP, "zeroes may take as long as a write"))
        }
        command::BLOCK_STATUS if !agreement.has_block_status => {
            Err((errno::EINVAL, "no context was chosen in the handshake"))
        }
        _ => Ok(action),
    }
}

fn check_range(request: &Request, size_bytes: u64, agreement: &Agreement) -> Result<(), Refusal> {
    let len = u64::from(request.len);
    if len == 0 {
        return Err((errno::EINVAL, "the range is empty"));
    }
    let end = request.offset.checked_add(len);
    if end.is_none_or(|end| end > size_bytes) {
        // The protocol's errors: ENOSPC for commands that store bytes, EINVAL for all others.
        let error = match request.command {
            command::WRITE | command::WRITE_ZEROES => errno::ENOSPC,
            _ => errno::EINVAL,
        };
        return Err((error, "the range goes beyond the end of the device"));
    }
    // These do not touch the data.
    let is_free = matches!(request.command, command::CACHE | command::BLOCK_STATUS);
    let is_bound = agreement.has_block_sizes && !is_free;
    if is_bound && !is_whole(request, agreement.block_bytes) {
        return Err((
            errno::EINVAL,
            "the range is not a multiple of the smallest block, which the client asked for",
        ));
    }
    Ok(())
}

/// The answer to a request that the device failed.
pub fn refusal_of(status: Status) -> Refusal {
    match status {
        Status::Io => (errno::EIO, "input/output error"),
        Status::Corrupt => (errno::EIO, "data is damaged"),
        Status::Timeout => (errno::EIO, "the device did not answer in time"),
        Status::NoSpace => (errno::ENOSPC, "no space left"),
        Status::ReadOnly => (errno::EPERM, "device is read-only"),
        Status::Unsupported => (errno::ENOTSUP, "operation not supported"),
        Status::Invalid => (errno::EINVAL, "invalid request"),
    }
}
