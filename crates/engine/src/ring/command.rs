//! Commands to the driver of a file (`IORING_OP_URING_CMD`).
//!
//! The driver defines the meaning of a command, and the command's bytes may hold an address. So
//! only this file makes commands. Each has its driver's own number, which encodes the driver, the
//! direction and the length as numbers of ioctl do: a driver of another kind refuses it. The only
//! memory that a command may name is the buffer that goes with it, and it names all of that. One
//! buffer holds an address itself: `client_memory` makes it, and the driver only records the pages.

/// Bytes of an entry that belong to the command, as far as the commands here use them.
const OWN_BYTES: usize = 32;
/// The same, as an entry has them.
pub(super) const BYTES: usize = 80;

/// Bytes of a command to ublk's control device.
const CONTROL_BYTES: u32 = 32;
/// Bytes of a command to the file of one of ublk's devices.
const REQUEST_BYTES: u32 = 16;
/// Bytes of the description of memory that a device's clients share.
pub const UBLK_MEMORY_BYTES: usize = 24;
/// Directions of an ioctl's number.
const READ: u32 = 2;
const READ_WRITE: u32 = 3;

/// A command, apart from its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    number: u32,
    bytes: [u8; OWN_BYTES],
    /// Whether the command's bytes include the buffer's length and address.
    names_buffer: bool,
}

/// Commands to ublk's control device (`/dev/ublk-control`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UblkControl {
    /// The processors whose requests are sent to a queue: into the buffer; with the queue's number.
    QueueAffinity,
    /// The properties of a device: into the buffer.
    DeviceInfo,
    /// Makes a device as the buffer describes, and stores the result there.
    Add,
    /// Removes a device; completes when no process has it open.
    Delete,
    /// Removes a device; its number is free when no process has it open (Linux 6.9).
    DeleteSoon,
    /// Lets clients in; with the server's process number.
    Start,
    /// Ends clients' requests.
    Stop,
    /// Says limits and size, from the buffer.
    SetParams,
    /// Asks for them: into the buffer.
    GetParams,
    /// A server for a device without one.
    StartRecovery,
    /// It serves; with its process number.
    EndRecovery,
    /// The abilities of the driver: into the buffer.
    Features,
    /// A new size, in sectors.
    UpdateSize,
    /// Holds new requests for the next server; with milliseconds to wait.
    Quiesce,
    /// Clients share the memory that the buffer names (`ClientMemory::ublk_memory`). Results in its
    /// index.
    ShareMemory,
    /// They do so no more; with its index.
    ForgetMemory,
}

impl UblkControl {
    /// Its number, as `linux/ublk_cmd.h` composes it.
    pub(super) fn number(self) -> u32 {
        let (direction, which) = match self {
            UblkControl::QueueAffinity => (READ, 0x01),
            UblkControl::DeviceInfo => (READ, 0x02),
            UblkControl::Add => (READ_WRITE, 0x04),
            UblkControl::Delete => (READ_WRITE, 0x05),
            UblkControl::DeleteSoon => (READ, 0x14),
            UblkControl::Start => (READ_WRITE, 0x06),
            UblkControl::Stop => (READ_WRITE, 0x07),
            UblkControl::SetParams => (READ_WRITE, 0x08),
            UblkControl::GetParams => (READ, 0x09),
            UblkControl::StartRecovery => (READ_WRITE, 0x10),
            UblkControl::EndRecovery => (READ_WRITE, 0x11),
            UblkControl::Features => (READ, 0x13),
            UblkControl::UpdateSize => (READ_WRITE, 0x15),
            UblkControl::Quiesce => (READ_WRITE, 0x16),
            UblkControl::ShareMemory => (READ_WRITE, 0x18),
            UblkControl::ForgetMemory => (READ_WRITE, 0x19),
        };
        encode(direction, CONTROL_BYTES, which)
    }
}

/// The bytes that are sent with [`UblkControl::ShareMemory`]: they describe memory of this process.
pub(crate) fn ublk_memory(address: u64, len: u64) -> [u8; UBLK_MEMORY_BYTES] {
    let mut bytes = [0; UBLK_MEMORY_BYTES];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..16].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// A number as those of ioctl are, of ublk's type.
fn encode(direction: u32, bytes: u32, which: u32) -> u32 {
    direction << 30 | bytes << 16 | u32::from(b'u') << 8 | which
}

impl Command {
    /// To a socket (Linux 6.7): how many bytes could be received by one call.
    pub fn receivable() -> Command {
        const SIOCINQ: u32 = 0;
        Command { number: SIOCINQ, bytes: [0; OWN_BYTES], names_buffer: false }
    }

    /// To ublk's control device, about `device`, with the command's own number. The driver reads or
    /// fills the buffer.
    pub fn ublk_control(what: UblkControl, device: u32, value: u64) -> Command {
        let mut bytes = [0; OWN_BYTES];
        bytes[..4].copy_from_slice(&device.to_le_bytes());
        // No command is about one queue.
        bytes[4..6].copy_from_slice(&u16::MAX.to_le_bytes());
        bytes[16..24].copy_from_slice(&value.to_le_bytes());
        Command { number: what.number(), bytes, names_buffer: true }
    }

    /// To the file of a ublk device: completes when there is a request with this tag.
    pub fn ublk_fetch(queue: u16, tag: u16) -> Command {
        Command::ublk_request(0x20, queue, tag, 0)
    }

    /// The same, and the request with this tag is answered first: with bytes, or a negative errno.
    pub fn ublk_answer(queue: u16, tag: u16, result: i32) -> Command {
        Command::ublk_request(0x21, queue, tag, result)
    }

    /// It names no memory: data is read from the file and written to it.
    fn ublk_request(which: u32, queue: u16, tag: u16, result: i32) -> Command {
        let mut bytes = [0; OWN_BYTES];
        bytes[..2].copy_from_slice(&queue.to_le_bytes());
        bytes[2..4].copy_from_slice(&tag.to_le_bytes());
        bytes[4..8].copy_from_slice(&result.to_le_bytes());
        let number = encode(READ_WRITE, REQUEST_BYTES, which);
        Command { number, bytes, names_buffer: false }
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Its bytes, with length and address of `buffer` if it names that.
    pub(super) fn bytes(&self, buffer: &mut [u8]) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..OWN_BYTES].copy_from_slice(&self.bytes);
        if self.names_buffer && !buffer.is_empty() {
            let len = u16::try_from(buffer.len()).expect("a command's buffer is short");
            bytes[6..8].copy_from_slice(&len.to_le_bytes());
            let address = buffer.as_mut_ptr().expose_provenance() as u64;
            bytes[8..16].copy_from_slice(&address.to_le_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A C compiler's values for `linux/ublk_cmd.h` of Linux 7.3.
    #[test]
    fn numbers_are_those_of_the_kernels_header() {
        let expected = [
            (UblkControl::QueueAffinity, 0x8020_7501),
            (UblkControl::DeviceInfo, 0x8020_7502),
            (UblkControl::Add, 0xC020_7504),
            (UblkControl::Delete, 0xC020_7505),
            (UblkControl::DeleteSoon, 0x8020_7514),
            (UblkControl::Start, 0xC020_7506),
            (UblkControl::Stop, 0xC020_7507),
            (UblkControl::SetParams, 0xC020_7508),
            (UblkControl::GetParams, 0x8020_7509),
            (UblkControl::StartRecovery, 0xC020_7510),
            (UblkControl::EndRecovery, 0xC020_7511),
            (UblkControl::Features, 0x8020_7513),
            (UblkControl::UpdateSize, 0xC020_7515),
            (UblkControl::Quiesce, 0xC020_7516),
            (UblkControl::ShareMemory, 0xC020_7518),
            (UblkControl::ForgetMemory, 0xC020_7519),
        ];
        for (what, number) in expected {
            assert_eq!(Command::ublk_control(what, 0, 0).number(), number, "{what:?}");
        }
        assert_eq!(Command::ublk_fetch(0, 0).number(), 0xC010_7520);
        assert_eq!(Command::ublk_answer(0, 0, 0).number(), 0xC010_7521);
    }

    #[test]
    fn bytes_are_where_the_driver_looks_for_them() {
        let mut buffer = [0_u8; 64];
        let address = (buffer.as_mut_ptr().addr() as u64).to_le_bytes();
        let command = Command::ublk_control(UblkControl::Start, 0x0403_0201, 0x1716_1514_1312_1110);
        let bytes = command.bytes(&mut buffer);
        assert_eq!(bytes[..8], [1, 2, 3, 4, 0xFF, 0xFF, 64, 0]);
        assert_eq!(bytes[8..16], address);
        assert_eq!(bytes[16..24], [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]);
        assert_eq!(bytes[24..], [0; 56]);
        assert_eq!(command.bytes(&mut [])[6..16], [0; 10], "no buffer is named");
        let answer = Command::ublk_answer(0x0201, 0x0403, -5).bytes(&mut buffer);
        assert_eq!(answer[..8], [1, 2, 3, 4, 0xFB, 0xFF, 0xFF, 0xFF]);
        assert_eq!(answer[8..], [0; 72], "a request's command names no memory");
    }

    /// `ublk_shmem_buf_reg`: address, length, no flags.
    #[test]
    fn memory_is_named_as_a_whole() {
        let bytes = ublk_memory(0x7654_3210_7000, 12288);
        assert_eq!(bytes[..8], [0, 0x70, 0x10, 0x32, 0x54, 0x76, 0, 0]);
        assert_eq!(bytes[8..], [0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let command = Command::ublk_control(UblkControl::ForgetMemory, 5, 2).bytes(&mut []);
        assert_eq!((command[0], command[16]), (5, 2), "the memory's index is its number");
    }
}
