//! What is said to the kernel's ublk driver and by it, as `linux/ublk_cmd.h` lays it out: what it
//! is able to do, what a device is, its limits, and its requests.
//!
//! Bits that are not known here are left alone: a newer kernel has more of them.

use std::fmt;

use rustix::io::Errno;
use udm::bio::Op;
use udm::device::Device;
use udm::units::{BIO_BYTES_MAX, SECTOR};

/// Bytes of what a device is.
pub const INFO_BYTES: usize = 64;
/// Bytes of limits and size, as far as they are said here.
pub const PARAMS_BYTES: usize = 60;
/// Bytes of a request's description.
pub const DESCRIPTION_BYTES: usize = 24;
/// Descriptions of one queue that there may be: so far apart are those of two queues.
pub const DEPTH_MAX_OF_KERNEL: usize = 4096;
/// Most bytes of a request's data.
pub const IO_BYTES_MAX: u32 = 1 << 20;

/// What the driver is able to do, and what of it a device uses.
pub mod feature {
    /// A device outlives its server.
    pub const RECOVERY: u64 = 1 << 3;
    /// What the server had not answered comes again.
    pub const REISSUE: u64 = 1 << 4;
    /// Commands have numbers as those of ioctl.
    pub const IOCTL_NUMBERS: u64 = 1 << 6;
    /// Data is read from the device's file and written to it.
    pub const USER_COPY: u64 = 1 << 7;
    /// The size may change.
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// New requests may be held for the next server.
    pub const QUIESCE: u64 = 1 << 12;
    /// Disks that nobody has open may be stopped. It is not used: drivers that have it (since Linux
    /// 7.0) copy data as any call does (since 6.19). Those before take hold of the pages at an
    /// address, and copy from there: a page that turns out to be broken is the end of the machine.
    pub const SAFE_STOP: u64 = 1 << 17;
    /// Clients may share memory with the server (Linux 7.1).
    pub const SHARED_MEMORY: u64 = 1 << 19;
    /// Without these there is no door.
    pub const NEEDED: u64 = RECOVERY | REISSUE | IOCTL_NUMBERS | USER_COPY;
    /// Used where they are.
    pub const WANTED: u64 = NEEDED | UPDATE_SIZE | QUIESCE;
}

/// What a device is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not been started, or was stopped.
    Dead,
    /// It is served.
    Live,
    /// Its server has gone, and its requests wait.
    Quiesced,
    /// A state of newer kernels, or one that udm does not ask for.
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

/// What a device is (`ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// How many queues it has.
    pub queues: u16,
    /// How many requests a queue takes at a time.
    pub depth: u16,
    /// What it is doing.
    pub state: State,
    /// Most bytes of a request's data.
    pub io_bytes_max: u32,
    /// Its number.
    pub number: u32,
    /// Its server's process, or -1.
    pub server: i32,
    /// What it uses.
    pub features: u64,
    /// Its server's own word, which the driver keeps for it.
    pub mark: u64,
}

impl Info {
    /// To make a device of; `u32::MAX` is the next free number.
    pub fn new(number: u32, queues: u16, depth: u16, features: u64, mark: u64) -> Info {
        let io_bytes_max = IO_BYTES_MAX;
        Info { queues, depth, state: State::Dead, io_bytes_max, number, server: -1, features, mark }
    }

    /// As the driver takes it.
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

    /// As the driver says it.
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
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Size.
    pub sectors: u64,
    /// Writes are refused.
    pub is_read_only: bool,
    /// Discards are taken.
    pub has_discard: bool,
}

impl Params {
    /// Those of `device`.
    pub fn of(device: &Device) -> Params {
        let limits = device.limits();
        Params {
            block_bytes: limits.block_bytes,
            sectors: device.size_bytes() / SECTOR,
            is_read_only: device.is_read_only(),
            has_discard: limits.has_discard,
        }
    }

    /// As the driver takes them (`ublk_params`): the basic ones, and those of discards and zeroes.
    pub fn bytes(&self) -> [u8; PARAMS_BYTES] {
        const BASIC_AND_DISCARD: u32 = 1 | 2;
        const READ_ONLY: u32 = 1;
        const WRITE_CACHE: u32 = 1 << 2;
        const FUA: u32 = 1 << 3;
        let attributes = if self.is_read_only { READ_ONLY } else { WRITE_CACHE | FUA };
        let shift = self.block_bytes.trailing_zeros() as u8;
        let sectors_max = (BIO_BYTES_MAX / SECTOR) as u32;
        let can_write = u32::from(!self.is_read_only);
        let can_discard = u32::from(self.has_discard) * can_write;
        let mut bytes = [0; PARAMS_BYTES];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &(PARAMS_BYTES as u32).to_le_bytes());
        put(4, &BASIC_AND_DISCARD.to_le_bytes());
        put(8, &attributes.to_le_bytes());
        // Logical and physical block, best and smallest unit of I/O.
        put(12, &[shift; 4]);
        put(16, &(IO_BYTES_MAX / SECTOR as u32).to_le_bytes());
        put(24, &self.sectors.to_le_bytes());
        put(44, &self.block_bytes.to_le_bytes());
        put(48, &(sectors_max * can_discard).to_le_bytes());
        put(52, &(sectors_max * can_write).to_le_bytes());
        put(56, &1_u16.to_le_bytes());
        bytes
    }
}

/// The size in limits that the driver says, in sectors.
pub fn sectors_of(params: &[u8; PARAMS_BYTES]) -> u64 {
    u64_at(params, 24)
}

/// A request, as the driver describes it (`ublksrv_io_desc`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// Operation, and flags above it.
    pub op_flags: u32,
    /// Length.
    pub sectors: u32,
    /// Beginning.
    pub start_sector: u64,
    /// Where its data is, if that is in memory that clients share.
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

/// Where a request's data is in memory that clients share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InMemory {
    /// Which memory: what the driver called it.
    pub index: u16,
    /// The first byte there.
    pub at: u32,
    /// Bits that have no meaning yet, and must be zero.
    pub reserved: u16,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// What to do.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Bytes; none for a flush.
    pub len: u64,
    /// Done only when durable.
    pub fua: bool,
    /// It is metadata of a file system.
    pub is_metadata: bool,
    /// Where its data is in the memory that clients share, if it is there.
    pub shared_at: Option<u64>,
}

impl Description {
    /// What it asks for, or the errno to answer with.
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

    /// Where the data is, if the driver has found the request's pages in memory that is
    /// shared.
    pub fn memory(&self) -> Option<InMemory> {
        const IN_MEMORY: u32 = 1 << 19;
        let [word, index, reserved] = [0, 32, 48].map(|shift| (self.address >> shift) as u32);
        let (index, reserved) = (index as u16, reserved as u16);
        (self.op_flags & IN_MEMORY != 0).then_some(InMemory { index, at: word, reserved })
    }
}

/// Where the data of a request is in the device's file.
pub fn data_offset(queue: u16, tag: u16) -> u64 {
    const DATA_AT: u64 = 0x8000_0000;
    DATA_AT + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

/// What a server notes in a device that it makes, to know it again: a hash of its own words.
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

    /// What a C compiler makes of `linux/ublk_cmd.h` of Linux 7.3.
    #[test]
    fn structures_are_those_of_the_kernels_header() {
        let features = feature::WANTED;
        let mut info = Info::new(7, 3, 128, features, 0x7564_0001_0203_0405);
        let said = "03008000020000000000100007000000ffffffff00000000d814000000000000\
                    0504030201006475000000000000000000000000000000000000000000000000";
        // The state is the driver's to say.
        assert_eq!(hex(&info.bytes()), said.replacen("030080000200", "030080000000", 1));
        let byte = |at: usize| u8::from_str_radix(&said[2 * at..2 * at + 2], 16).unwrap();
        info.state = State::Quiesced;
        assert_eq!(Info::parse(&std::array::from_fn(byte)), info);

        let params =
            Params { block_bytes: 512, sectors: 16384, is_read_only: false, has_discard: true };
        let said = "3c000000030000000c0000000909090900080000000000000040000000000000\
                    00000000000000000000000000020000000001000000010001000000";
        assert_eq!((hex(&params.bytes()), sectors_of(&params.bytes())), (said.into(), 16384));
        let params = Params { block_bytes: 4096, is_read_only: true, ..params };
        let said = "3c00000003000000010000000c0c0c0c00080000000000000040000000000000\
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
        // Flags of newer kernels are left alone.
        assert!(wish(0xFFFF_D003, 65536, 8).is_ok_and(|wish| wish.op == Op::Discard && !wish.fua));
        assert_eq!(wish(2, 7, u64::MAX).unwrap().len, 0, "a flush has no place");
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

    /// `UBLK_IO_F_SHMEM_ZC`, and what `ublk_shmem_zc_index` and `_offset` make of an address.
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
