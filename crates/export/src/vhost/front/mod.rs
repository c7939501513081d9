//! The client side of vhost-user-blk, for programs. The server may be udm or another one.
//!
//! | file | job |
//! |---|---|
//! | `wire` | the socket |
//! | `ring` | a split ring, from the driver's side |
//! | `arena` | memory for data |
//! | [`queue`] | requests of one thread |
//! | `again` | reconnecting to the next server |
//! | this one | a connection, and the server's device |
//!
//! A connection shares one memory file with the server, with a part for each queue. The server may
//! write there at any time; the client uses only its notice that a request is answered, and the
//! answer. A server that breaks its ring ends all requests with an error. So does a server that
//! disconnects, if no other appears in time (`again`).

#![allow(clippy::host_endian_bytes, reason = "vhost-user is spoken within one machine")]

mod again;
mod arena;
mod outage;
pub mod queue;
mod ring;
mod wire;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use udm::error::{Error, Kind, Result};
use udm::pmem::client_memory::ClientMemory;
use udm::sync::{Arc, Mutex, lock};
use udm::units::{BIO_BYTES_MAX, MIB, Nanos, SECOND, SECTOR};

use super::config::{QUEUES_MAX, blk};
use super::poll::{Lookers, Poll, Poller, Spent};
use super::proto::{Request, RingAddresses, feature, protocol, u16_at, u32_at, u64_at};
use super::uri::{RECONNECT_SECONDS, Uri};
use again::Link;
pub use queue::{Ask, Bytes, Queue};
use ring::{ENTRIES, RING_BYTES};
use wire::{ANSWER_LONGEST, Wire};

/// The address of the memory for the server, as if it were a guest's.
const BASE: u64 = 1 << 32;
/// Bytes of a queue's memory for data.
const DATA_BYTES: u64 = 64 * MIB;
/// Bytes of a queue's part of the memory.
const PART_BYTES: u64 = RING_BYTES + DATA_BYTES;
/// Bytes of the configuration that the client reads.
const CONFIG_BYTES: usize = 60;
/// Maximum requests of a queue in flight.
pub const DEPTH_MAX: usize = ENTRIES as usize;

/// The pollers of this process.
static LOOKERS: Lookers = Lookers::new();

/// The properties of the server's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Unit of requests, in bytes.
    pub block_bytes: u32,
    /// Maximum bytes of a read or a write.
    pub request_bytes_max: u64,
    /// Maximum bytes of a discard; 0 if it has none.
    pub discard_bytes_max: u64,
    /// Maximum bytes of a write-zeroes request; 0 if it has none.
    pub zeroes_bytes_max: u64,
    /// Maximum bytes of a piece of data.
    piece_bytes_max: u32,
    /// Whether writes are refused.
    pub is_read_only: bool,
    /// Whether writes are durable only after a flush; if not, when they end.
    has_flush: bool,
    queues: usize,
}

/// A connection to a server.
#[derive(Debug)]
pub struct Front {
    path: PathBuf,
    poll: Poll,
    link: Mutex<Link>,
    file: OwnedFd,
    memory: Arc<ClientMemory>,
    facts: Facts,
    /// The features, which every server must support.
    features: u64,
    /// Maximum wait for the next server.
    patience: Nanos,
    taken: Mutex<[bool; QUEUES_MAX]>,
    spent: Arc<Spent>,
}

impl Front {
    /// Connects to the server at `uri`, whose `poll` applies to the client.
    pub fn connect(uri: &Uri) -> Result<Arc<Front>> {
        let mut wire = Wire::connect(&uri.path, ANSWER_LONGEST)?;
        let features = negotiate(&mut wire)?;
        let facts = facts(&mut wire, features)?;
        let (file, memory) = memory(PART_BYTES * facts.queues as u64)?;
        share(&mut wire, &file, memory.len_bytes())?;
        Ok(Arc::new(Front {
            path: uri.path.clone(),
            poll: uri.poll,
            link: Mutex::new(Link::first(wire)),
            file,
            memory: Arc::new(memory),
            facts,
            features,
            patience: Nanos::from(uri.reconnect.unwrap_or(RECONNECT_SECONDS)) * SECOND,
            taken: Mutex::default(),
            spent: Arc::default(),
        }))
    }

    /// Returns the properties of the server's device.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the time that its queues have spent polling their rings.
    pub fn polled(&self) -> &Spent {
        &self.spent
    }

    /// Creates a queue, for the thread that will use it.
    pub fn queue(self: &Arc<Front>) -> Result<Queue> {
        let index = {
            let mut taken = lock(&self.taken);
            let free = taken[..self.facts.queues].iter().position(|is_taken| !is_taken);
            let index = free.ok_or_else(|| {
                let message = format!("all {} rings of the server are in use", self.facts.queues);
                Error::new(Kind::Busy, message)
            })?;
            taken[index] = true;
            index
        };
        let at = PART_BYTES * index as u64;
        let poller = Poller::new(self.poll, &LOOKERS, self.spent.clone());
        Queue::new(self.clone(), index, at, poller).inspect_err(|_| self.give_back(index))
    }

    fn give_back(&self, index: usize) {
        lock(&self.taken)[index] = false;
    }

    /// Starts ring `index` at the server, if the connection is still the one with this number.
    fn start(
        &self,
        index: usize,
        number: u64,
        addresses: RingAddresses,
        [kick, call]: [BorrowedFd<'_>; 2],
    ) -> Result<()> {
        let mut link = lock(&self.link);
        let wire = link.wire(number)?;
        wire.tell(Request::SetVringNum, &pair(index, ENTRIES.into()), &[])?;
        wire.tell(Request::SetVringBase, &pair(index, 0), &[])?;
        let RingAddresses { descriptors, used, available } = addresses;
        let words = [index as u64, descriptors, used, available, 0].map(u64::to_ne_bytes).concat();
        wire.tell(Request::SetVringAddr, &words, &[])?;
        let ring = (index as u64).to_ne_bytes();
        wire.tell(Request::SetVringCall, &ring, &[call])?;
        wire.tell(Request::SetVringKick, &ring, &[kick])?;
        if self.features & feature::PROTOCOL != 0 {
            wire.tell(Request::SetVringEnable, &pair(index, 1), &[])?;
        }
        Ok(())
    }

    /// Stops ring `index` once its requests are answered. Does nothing if the server
    /// is gone.
    fn stop(&self, index: usize, number: u64) {
        if let Ok(wire) = lock(&self.link).wire(number) {
            let _ = wire.ask(Request::GetVringBase, &pair(index, 0));
        }
        self.give_back(index);
    }
}

/// Shares the memory with the server.
fn share(wire: &mut Wire, file: &OwnedFd, bytes: u64) -> Result<()> {
    let region = [1, BASE, bytes, BASE, 0].map(u64::to_ne_bytes).concat();
    wire.tell(Request::SetMemTable, &region, &[file.as_fd()])
}

fn pair(index: usize, value: u32) -> Vec<u8> {
    [(index as u32).to_ne_bytes(), value.to_ne_bytes()].concat()
}

/// Negotiates features, and returns them.
fn negotiate(wire: &mut Wire) -> Result<u64> {
    wire.tell(Request::SetOwner, &[], &[])?;
    let offered = wire.number(Request::GetFeatures)?;
    let needed = feature::VERSION_1 | feature::INDIRECT | feature::PROTOCOL;
    if offered & needed != needed {
        let missing = needed & !offered;
        return Err(
            wire.wrong(format_args!("it lacks the features {missing:#x}, which are needed"))
        );
    }
    let words = wire.number(Request::GetProtocolFeatures)?;
    if words & protocol::CONFIG == 0 {
        return Err(wire.wrong("it does not report the size of its device"));
    }
    let words = words & (protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG);
    wire.tell(Request::SetProtocolFeatures, &words.to_ne_bytes(), &[])?;
    wire.has_reply_ack = words & protocol::REPLY_ACK != 0;
    let wanted = needed
        | feature::EVENT_IDX
        | blk::SIZE_MAX
        | blk::SEG_MAX
        | blk::READ_ONLY
        | blk::BLOCK_BYTES
        | blk::FLUSH
        | blk::MQ
        | blk::DISCARD
        | blk::WRITE_ZEROES;
    let features = offered & wanted;
    wire.tell(Request::SetFeatures, &features.to_ne_bytes(), &[])?;
    Ok(features)
}

/// Reads the configuration, which may hold any values.
fn facts(wire: &mut Wire, features: u64) -> Result<Facts> {
    let head = [0, CONFIG_BYTES as u32, 0].map(u32::to_ne_bytes).concat();
    let asked = [head.clone(), vec![0; CONFIG_BYTES]].concat();
    let answer = wire.ask(Request::GetConfig, &asked)?;
    if answer.len() != asked.len() {
        return Err(wire.wrong(format_args!("a configuration of {} bytes", answer.len())));
    }
    let config = &answer[head.len()..];
    let has = |bit: u64| features & bit != 0;
    let sectors = u64_at(config, 0);
    let size_bytes = sectors.checked_mul(SECTOR);
    let size_bytes =
        size_bytes.ok_or_else(|| wire.wrong(format_args!("a device of {sectors} sectors")))?;
    let block_bytes = if has(blk::BLOCK_BYTES) { u32_at(config, 20) } else { SECTOR as u32 };
    if !block_bytes.is_power_of_two() || !(512..=65536).contains(&block_bytes) {
        return Err(wire.wrong(format_args!("blocks of {block_bytes} bytes")));
    }
    // QEMU's servers offer the feature and set 0 here: no limit.
    let piece_bytes_max = if has(blk::SIZE_MAX) { u32_at(config, 8) } else { 0 };
    let piece_bytes_max = if piece_bytes_max == 0 { BIO_BYTES_MAX as u32 } else { piece_bytes_max };
    let pieces_max = if has(blk::SEG_MAX) { u32_at(config, 12) } else { 1 };
    // Descriptors of a slot, without the header and the answer.
    let pieces_max = pieces_max.min(ring::DESCRIPTORS_MAX as u32 - 2);
    let request_bytes_max = u64::from(piece_bytes_max) * u64::from(pieces_max);
    let request_bytes_max =
        request_bytes_max.min(BIO_BYTES_MAX) / u64::from(block_bytes) * u64::from(block_bytes);
    if request_bytes_max == 0 {
        return Err(wire.wrong(format_args!("{pieces_max} pieces of {piece_bytes_max} bytes")));
    }
    let sectors = |bit: u64, at: usize| match has(bit) {
        true => (u64::from(u32_at(config, at)) * SECTOR).min(BIO_BYTES_MAX),
        false => 0,
    };
    let queues = if has(blk::MQ) { usize::from(u16_at(config, 34)) } else { 1 };
    Ok(Facts {
        size_bytes,
        block_bytes,
        request_bytes_max,
        discard_bytes_max: sectors(blk::DISCARD, 36),
        zeroes_bytes_max: sectors(blk::WRITE_ZEROES, 48),
        piece_bytes_max,
        is_read_only: has(blk::READ_ONLY),
        has_flush: has(blk::FLUSH),
        queues: queues.clamp(1, QUEUES_MAX),
    })
}

/// Creates mapped memory of this length. It is sealed: the server cannot truncate it.
fn memory(bytes: u64) -> Result<(OwnedFd, ClientMemory)> {
    let failed = |errno: rustix::io::Errno| {
        Error::from_io("creating memory to share with", "a server", errno.into())
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("udm-front", flags).map_err(failed)?;
    ftruncate(&file, bytes).map_err(failed)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).map_err(failed)?;
    let memory = ClientMemory::map(&file, 0, bytes)?;
    Ok((file, memory))
}
