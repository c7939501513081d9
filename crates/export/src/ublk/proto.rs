//! The messages between udm and the kernel's ublk driver, laid out as in `linux/ublk_cmd.h`: the
//! driver's features, device information, limits, and requests.
//!
//! Unknown bits are ignored: newer kernels define more of them.

use std::fmt;

use rustix::io::Errno;
use udm::bio::Op;
use udm::device::Device;
use udm::topology::TargetLimits;
use udm::units::{BIO_BYTES_MAX, SECTOR};

/// Size of [`Info`] in bytes.
pub const INFO_BYTES: usize = 64;
/// Bytes of limits and size that udm sends; the kernel's structure is longer.
pub const PARAMS_BYTES: usize = 60;
/// Size of a request's description in bytes.
pub const DESCRIPTION_BYTES: usize = 24;
/// The kernel's maximum of descriptions per queue, and the distance between two queues' tables.
pub const DEPTH_MAX_OF_KERNEL: usize = 4096;
/// Maximum data bytes of one request.
pub const IO_BYTES_MAX: u32 = 1 << 20;

/// The driver's features, and the subset that a device uses.
pub mod feature {
    /// A device outlives its server.
    pub const RECOVERY: u64 = 1 << 3;
    /// The driver reissues unanswered requests to the next server.
    pub const REISSUE: u64 = 1 << 4;
    /// Commands are numbered like ioctls.
    pub const IOCTL_NUMBERS: u64 = 1 << 6;
    /// The server reads and writes data through the device's file.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size may change.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// The driver may hold new requests for the next server.
    pub const QUIESCE: u64 = 1 << 12;
    /// The driver can stop a disk only if no program has it open. udm does not use this command,
    /// only the bit: drivers that have it (since Linux 7.0) copy data like any system call (since
    /// 6.19). Older drivers pin the pages at an address and copy from there; a page with a memory
    /// error then crashes the machine.
    pub const SAFE_STOP: u64 = 1 << 17;
    /// Clients may share memory with the server (Linux 7.1).
    pub const SHARED_MEMORY: u64 = 1 << 19;
    /// A driver without one of these features cannot serve an export.
    pub const NEEDED: u64 = RECOVERY | REISSUE | IOCTL_NUMBERS | USER_COPY;
    /// Features that udm uses when the driver has them.
    pub const WANTED: u64 = NEEDED | UPDATE_SIZE | QUIESCE;
}

/// The state of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The device was never started, or was stopped.
    Dead,
    /// A server serves the device.
    Live,
    /// The server has ended; the driver holds the requests.
    Quiesced,
    /// A state of newer kernels, or one that udm does not use.
    Other(u16),
}

impl State {
    fn of(number: u16) -> State {
        match number {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            other => State::Other(other),
        }
    }
}

/// Device information (`ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Number of queues.
    pub queues: u16,
    /// Maximum requests of a queue in flight.
    pub depth: u16,
    /// State of the device.
    pub state: State,
    /// Maximum data bytes of one request.
    pub io_bytes_max: u32,
    /// Device number.
    pub number: u32,
    /// Process id of the server, or -1.
    pub server: i32,
    /// Features in use.
    pub features: u64,
    /// A value of the server's own that the driver stores.
    pub mark: u64,
}

impl Info {
    /// Describes a device to create; `u32::MAX` asks for the next free number.
    pub fn new(number: u32, queues: u16, depth: u16, features: u64, mark: u64) -> Info {
        let io_bytes_max = IO_BYTES_MAX;
        Info { queues, depth, state: State::Dead, io_bytes_max, number, server: -1, features, mark }
    }

    /// Encodes for the driver.
    pub fn bytes(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &self.queues.to_le_bytes());
        put(2, &self.depth.to_le_bytes());
        put(8, &self.io_bytes_max.to_le_bytes());
        put(12, &self.number.to_le_bytes());
        put(16, &self.server.to_le_bytes());
        put(24, &self.features.to_le_bytes());
        put(32, &self.mark.to_le_bytes());
        bytes
    }

    /// Decodes the driver's answer.
    pub fn parse(bytes: &[u8; INFO_BYTES]) -> Info {
        Info {
            queues: u16_at(bytes, 0),
            depth: u16_at(bytes, 2),
            state: State::of(u16_at(bytes, 4)),
            io_bytes_max: u32_at(bytes, 8),
            number: u32_at(bytes, 12),
            server: u32_at(bytes, 16) as i32,
            features: u64_at(bytes, 24),
            mark: u64_at(bytes, 32),
        }
    }
}

/// Limits and size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Params {
    /// The limits that all exports report.
    pub limits: TargetLimits,
    /// Size in sectors.
    pub sectors: u64,
    /// Whether the driver refuses writes.
    pub is_read_only: bool,
}

impl Params {
    /// Returns the limits and size of `device`.
    pub fn of(device: &Device) -> Params {
        Params {
            limits: device.limits(),
            sectors: device.size_bytes() / SECTOR,
            is_read_only: device.is_read_only(),
        }
    }

    /// Encodes for the driver (`ublk_params`): basic parameters, and those of discards and zeroes.
    pub fn bytes(&self) -> [u8; PARAMS_BYTES] {
        const BASIC_AND_DISCARD: u32 = 1 | 2;
        const READ_ONLY: u32 = 1;
        const WRITE_CACHE: u32 = 1 << 2;
        const FUA: u32 = 1 << 3;
        let attributes = if self.is_read_only { READ_ONLY } else { WRITE_CACHE | FUA };
        let TargetLimits { block_bytes, physical_bytes, optimal_bytes, minimum_bytes, .. } =
            self.limits;
        let units = [block_bytes, physical_bytes, optimal_bytes, minimum_bytes];
        let sectors_max = (BIO_BYTES_MAX / SECTOR) as u32;
        let can_write = u32::from(!self.is_read_only);
        let can_discard = u32::from(self.limits.has_discard) * can_write;
        let mut bytes = [0; PARAMS_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &(PARAMS_BYTES as u32).to_le_bytes());
        put(4, &BASIC_AND_DISCARD.to_le_bytes());
        put(8, &attributes.to_le_bytes());
        // Logical and physical block, optimal and smallest efficient I/O.
        put(12, &units.map(|bytes| bytes.ilog2() as u8));
        put(16, &(IO_BYTES_MAX / SECTOR as u32).to_le_bytes());
        put(24, &self.sectors.to_le_bytes());
        put(44, &self.limits.discard_bytes.to_le_bytes());
        put(48, &(sectors_max * can_discard).to_le_bytes());
        put(52, &(sectors_max * can_write).to_le_bytes());
        put(56, &1_u16.to_le_bytes());
        bytes
    }
}

/// Returns the size, in sectors, of the driver's parameters.
pub fn sectors_of(params: &[u8; PARAMS_BYTES]) -> u64 {
    u64_at(params, 24)
}

/// A request, as the driver describes it (`ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Operation in the low byte, flags above it.
    pub op_flags: u32,
    /// Length in sectors.
    pub sectors: u32,
    /// First sector.
    pub start_sector: u64,
    /// Address of the data, if it is in memory that clients share.
    pub address: u64,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Description { op_flags, sectors, start_sector, address } = self;
        let (op, flags) = (op_flags & 0xFF, op_flags >> 8);
        write!(f, "operation {op} with flags {flags:#x}: {sectors} sectors at {start_sector}")?;
        if self.memory().is_some() { write!(f, ", data at {address:#x}") } else { Ok(()) }
    }
}

/// Address of a request's data in memory that clients share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InMemory {
    /// The driver's index of the memory.
    pub index: u16,
    /// Offset of the first byte.
    pub at: u32,
    /// Reserved bits: they must be zero.
    pub reserved: u16,
}

/// The contents of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Operation.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// Force unit access: the request ends only when its data is durable.
    pub fua: bool,
    /// Whether the data is file system metadata.
    pub is_metadata: bool,
    /// Offset of the data in the memory that clients share, if it is there.
    pub shared_at: Option<u64>,
}

impl Description {
    /// Decodes the request, or returns the errno to answer with.
    pub fn wish(&self) -> Result<Wish, Errno> {
        const METADATA: u32 = 1 << 11;
        const FUA: u32 = 1 << 13;
        let op = match self.op_flags & 0xFF {
            0 => Op::Read,
            1 => Op::Write,
            2 => Op::Flush,
            3 => Op::Discard,
            5 => Op::WriteZeroes,
            _ => return Err(Errno::OPNOTSUPP),
        };
        let has = |flag| self.op_flags & flag != 0;
        if op == Op::Flush {
            let (fua, is_metadata, shared_at) = (false, false, None);
            return Ok(Wish { op, offset: 0, len: 0, fua, is_metadata, shared_at });
        }
        let len = u64::from(self.sectors) * SECTOR;
        let max =
            if matches!(op, Op::Read | Op::Write) { IO_BYTES_MAX.into() } else { BIO_BYTES_MAX };
        let offset = self.start_sector.checked_mul(SECTOR).ok_or(Errno::INVAL)?;
        if len == 0 || len > max || offset.checked_add(len).is_none() {
            return Err(Errno::INVAL);
        }
        let (fua, is_metadata) = (has(FUA), has(METADATA));
        Ok(Wish { op, offset, len, fua, is_metadata, shared_at: None })
    }

    /// Returns the address of the data, if the driver has found the request's pages in shared
    /// memory.
    pub fn memory(&self) -> Option<InMemory> {
        const IN_MEMORY: u32 = 1 << 19;
        let [word, index, reserved] = [0, 32, 48].map(|shift| (self.address >> shift) as u32);
        let (index, reserved) = (index as u16, reserved as u16);
        (self.op_flags & IN_MEMORY != 0).then_some(InMemory { index, at: word, reserved })
    }
}

/// Returns the offset of a request's data in the device's file.
pub fn data_offset(queue: u16, tag: u16) -> u64 {
    const DATA_AT: u64 = 0x8000_0000;
    DATA_AT + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// Returns the mark by which a server recognizes its devices: a hash of device name and home.
pub fn mark_of(device: &str, home: &str) -> u64 {
    const MAGIC: u64 = 0x7564 << 48;
    // FNV-1a.
    let words = device.bytes().chain([0]).chain(home.bytes());
    let hash = words.fold(0xCBF2_9CE4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    });
    MAGIC | hash >> 16
}

fn chunk<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("a field lies within its structure")
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(chunk(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(chunk(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(chunk(bytes, at))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The bytes that a C compiler produces from `linux/ublk_cmd.h` of Linux 7.3.
    #[test]
    fn structures_are_those_of_the_kernels_header() {
        let features = feature::WANTED;
        let mut info = Info::new(7, 3, 128, features, 0x7564_0001_0203_0405);
        let said = "03008000020000000000100007000000ffffffff00000000d814000000000000\
                    0504030201006475000000000000000000000000000000000000000000000000";
        // The driver sets the state.
        assert_eq!(hex(&info.bytes()), said.replacen("030080000200", "030080000000", 1));
        let byte = |at: usize| u8::from_str_radix(&said[2 * at..2 * at + 2], 16).unwrap();
        info.state = State::Quiesced;
        assert_eq!(Info::parse(&std::array::from_fn(byte)), info);

        let limits = TargetLimits::new(512, true);
        let params = Params { limits, sectors: 16384, is_read_only: false };
        let said = "3c000000030000000c0000000909090900080000000000000040000000000000\
                    00000000000000000000000000020000000001000000010001000000";
        assert_eq!((hex(&params.bytes()), sectors_of(&params.bytes())), (said.into(), 16384));
        let limits = TargetLimits {
            physical_bytes: 8192,
            minimum_bytes: 65536,
            optimal_bytes: 1 << 20,
            ..TargetLimits::new(4096, true)
        };
        let params = Params { limits, is_read_only: true, ..params };
        let said = "3c00000003000000010000000c0d141000080000000000000040000000000000\
                    00000000000000000000000000100000000000000000000001000000";
        assert_eq!(hex(&params.bytes()), said);
        assert_eq!((data_offset(5, 77), data_offset(0, 0)), (0xA01_1A00_0000, 0x8000_0000));
    }

    #[test]
    fn requests_that_make_no_sense_are_refused() {
        let wish = |op_flags, sectors, start_sector| {
            Description { op_flags, sectors, start_sector, address: u64::MAX }.wish()
        };
        let write = wish(0x2801, 8, 1000).unwrap();
        let (op, offset, len, shared_at) = (Op::Write, 512_000, 4096, None);
        let expected = Wish { op, offset, len, fua: true, is_metadata: true, shared_at };
        assert_eq!(write, expected);
        assert_eq!(wish(0x800, 2048, 0).unwrap().len, 1 << 20);
        // Flags of newer kernels are ignored.
        assert!(wish(0xFFFF_D003, 65536, 8).is_ok_and(|wish| wish.op == Op::Discard && !wish.fua));
        assert_eq!(wish(2, 7, u64::MAX).unwrap().len, 0, "a flush has neither start nor length");
        for (op, sectors, start) in [
            (0, 0, 0),
            (1, 2049, 0),
            (0, u32::MAX, 0),
            (3, 65537, 0),
            (5, 0, 8),
            (1, 8, u64::MAX),
            (1, 8, u64::MAX / 512),
        ] {
            assert_eq!(wish(op, sectors, start), Err(Errno::INVAL), "{op} {sectors} {start}");
        }
        for op in [4, 10, 15, 18, 255] {
            assert_eq!(wish(op, 8, 0), Err(Errno::OPNOTSUPP));
        }
    }

    /// `UBLK_IO_F_SHMEM_ZC`; the address is decoded as in `ublk_shmem_zc_index` and `_offset`.
    #[test]
    fn data_is_in_memory_where_the_driver_says_so() {
        let said = |op_flags, address| {
            Description { op_flags, sectors: 8, start_sector: 9, address }.memory()
        };
        assert_eq!(said(1, 0x0003_0000_2000), None);
        let memory = InMemory { index: 3, at: 0x8000_2000, reserved: 0 };
        assert_eq!(said(1 | 1 << 19, 0x0003_8000_2000), Some(memory));
        let all = InMemory { index: u16::MAX, at: u32::MAX, reserved: u16::MAX };
        assert_eq!(said(u32::MAX, u64::MAX), Some(all));
        let text = Description { op_flags: 1 << 19, sectors: 8, start_sector: 9, address: 4096 };
        assert_eq!(
            text.to_string(),
            "operation 0 with flags 0x800: 8 sectors at 9, data at 0x1000"
        );
    }

    #[test]
    fn a_server_knows_its_own_mark_alone() {
        let mark = mark_of("vol", "/run/udm");
        assert_eq!(mark, mark_of("vol", "/run/udm"));
        assert_eq!(mark >> 48, 0x7564);
        let others = [("vol", "/run/udm2"), ("vol2", "/run/udm"), ("vo", "l/run/udm"), ("", "")];
        assert!(others.iter().all(|(name, home)| mark_of(name, home) != mark));
    }
}
