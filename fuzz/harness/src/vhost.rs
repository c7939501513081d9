//! vhost-user clients that send arbitrary messages and have arbitrary bytes in their memory.
//!
//! Half of the inputs are messages to a session, which serves rings with its own threads on a
//! small device; half are a ring alone, split or packed, in one thread, so that failures repeat.
//! In addition to the promises of every target:
//!
//! 1. A request's memory is within the client's, and a mapped device accepts each bio.
//! 2. A descriptor is not taken again while its request is in flight. For every log of requests
//!    in flight, each of its requests is carried out once more.
//! 3. A session that ends leaves no port of the device in use.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::{Bio, Op};
use udm::device::{Device, Driver, LoadedTable};
use udm::disk::{DiskIo, RamDisk};
use udm::error::Status;
use udm::pmem::client_memory::Source;
use udm::pmem::copy_target::CopyTarget;
use udm::simple::{Linear, LinearArgs};
use udm::sync::Arc;
use udm::table::Table;
use udm::target::{Port, Target, TargetLimits, Wake};
use udm::units::{BIO_BYTES_MAX, KIB, SECTOR};
use udm_export::vhost::chain::{Chain, Shape};
use udm_export::vhost::counts::Counts;
use udm_export::vhost::inflight::{Extent, Notes};
use udm_export::vhost::memory::Memory;
use udm_export::vhost::packed::Cursor;
use udm_export::vhost::poll::Poll;
use udm_export::vhost::proto::{
    Header, Message, Region, Request as Asked, RingAddresses, Violation, feature,
};
use udm_export::vhost::request::{Begun, Facts, ID_BYTES, Request};
use udm_export::vhost::session::Session;
use udm_export::vhost::virtqueue::Virtqueue;

use crate::input::Input;

const MEMORY_BYTES: u64 = 64 * KIB;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const TABLE: u64 = 0x3000;
const DATA: u64 = 0x4000;
const ENTRIES: u16 = 16;
const STORED_BYTES: u64 = 64 * KIB;
/// Where a packed ring begins: both places in the first, odd lap.
const BEGIN: u32 = 0x8000_8000;
/// Most steps of one input.
const STEPS_MAX: usize = 600;

/// A client's messages and memory.
pub fn vhost(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.u8() {
        0..=63 => messages(&mut input),
        features => {
            let all = feature::INDIRECT | feature::EVENT_IDX;
            let packed = if features >= 192 { feature::RING_PACKED } else { 0 };
            let features = if features & 1 == 0 { all } else { all & u64::from(features) << 28 };
            let features = features | packed;
            if let Some(mut ring) = Bench::new(features) {
                ring.run(&mut input);
            }
        }
    }
}

/// Checks that a violation is one line with words in it.
fn check(violation: &Violation) {
    let words = violation.to_string();
    assert!(!words.is_empty() && !words.contains('\n'), "{words:?}");
}

fn memfd(bytes: u64) -> OwnedFd {
    let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn pair(one: u32, other: u32) -> Vec<u8> {
    [one.to_le_bytes(), other.to_le_bytes()].concat()
}

// --- a ring alone ------------------------------------------------------------------------------

struct Bench {
    file: OwnedFd,
    memory: Memory,
    shape: Shape,
    ring: Virtqueue,
    notes: Notes,
    /// Requests that were in flight when a server died, and are not taken again yet.
    expected: Vec<u16>,
    /// The index of a split ring's answers.
    answered: u16,
    /// The next place of a packed ring at which the driver makes a descriptor available.
    available: Cursor,
    requests: Vec<Request>,
    in_flight: VecDeque<Bio>,
    facts: Facts,
    driver: Driver,
    device: Vec<u8>,
}

fn base(shape: &Shape) -> u32 {
    if shape.features & feature::RING_PACKED != 0 { BEGIN } else { 0 }
}

/// The first half of its data is ready.
#[derive(Debug)]
struct AtHand;

impl Target for AtHand {
    fn name(&self) -> &'static str {
        "at-hand"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        port.finish(bio, Ok(()));
    }

    fn read_into(&self, offset: u64, into: CopyTarget<'_>, _port: usize) -> bool {
        let end = offset + into.len() as u64;
        assert!(end <= STORED_BYTES && (offset | end).is_multiple_of(SECTOR), "{offset}..{end}");
        into.store(&vec![7; into.len()]) && offset < STORED_BYTES / 2
    }

    fn write_from(&self, offset: u64, from: Source<'_>, _fua: bool, _port: usize) -> bool {
        let end = offset + from.bytes().len() as u64;
        assert!(end <= STORED_BYTES && (offset | end).is_multiple_of(SECTOR), "{offset}..{end}");
        from.bytes().load(&mut vec![0; from.bytes().len()]);
        offset < STORED_BYTES / 2 && from.is_whole()
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {
        unreachable!("asks for no I/O");
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(SECTOR as u32, true)
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        String::new()
    }
}

struct Nobody;

impl Wake for Nobody {
    fn wake(&self) {}
}

fn at_hand() -> Arc<Device> {
    Device::with_table("at-hand", LoadedTable::single(Arc::new(AtHand), STORED_BYTES)).unwrap()
}

impl Bench {
    fn new(features: u64) -> Option<Bench> {
        let file = memfd(MEMORY_BYTES);
        let mut memory = Memory::default();
        let region = Region { guest: 0, len: MEMORY_BYTES, user: 0, offset: 0 };
        memory.add(region, &file).ok()?;
        let addresses = RingAddresses { descriptors: 0, used: USED, available: AVAILABLE };
        let shape = Shape { entries: ENTRIES, addresses, features };
        let is_packed = features & feature::RING_PACKED != 0;
        let extent = Extent { bytes: 0, offset: 0, rings: 1, entries: ENTRIES, is_packed }.needed();
        let notes = Notes::map(&extent.make().ok()?, extent).ok()?;
        let ring = Virtqueue::open(shape, &memory, base(&shape), Some(&notes), 0).ok()?;
        Some(Bench {
            file,
            memory,
            shape,
            ring,
            notes,
            expected: Vec::new(),
            answered: 0,
            available: Cursor::parse(BEGIN as u16),
            requests: (0..ENTRIES).map(|_| Request::default()).collect(),
            in_flight: VecDeque::new(),
            facts: Facts { id: [b'x'; ID_BYTES], is_write_through: features & 1 == 0 },
            driver: Driver::new(&at_hand(), Arc::new(Nobody)).unwrap(),
            device: vec![0; STORED_BYTES as usize],
        })
    }

    fn is_packed(&self) -> bool {
        matches!(self.ring, Virtqueue::Packed(_))
    }

    /// Until the input or the ring ends.
    fn run(&mut self, input: &mut Input<'_>) {
        for _ in 0..STEPS_MAX {
            if input.is_empty() {
                return;
            }
            if let Err(violation) = self.step(input) {
                return check(&violation);
            }
        }
    }

    fn step(&mut self, input: &mut Input<'_>) -> Result<(), Violation> {
        match input.u8() {
            0..=129 if self.is_packed() => offer(&self.memory, &mut self.available, input)?,
            0..=89 => put_descriptor(&self.memory, input)?,
            90..=129 => publish(&self.memory, u16::from(input.u8() % 18))?,
            130..=149 => poke(&self.memory, input)?,
            150..=169 => put_header(&self.memory, input)?,
            170..=209 => self.fetch()?,
            210..=234 => self.finish(usize::from(input.u8()))?,
            235..=244 => self.restart(input)?,
            245 => ftruncate(&self.file, input.below(MEMORY_BYTES)).unwrap(),
            246 => self.memory.store(AVAILABLE + 2, &input.u16().to_le_bytes())?,
            _ => {
                self.ring.may_sleep()?;
                self.ring.needs_call();
                self.ring.refuse_kicks();
            }
        }
        Ok(())
    }

    /// Takes all available requests.
    fn fetch(&mut self) -> Result<(), Violation> {
        let mut chain = Chain::default();
        for _ in 0..2 * ENTRIES {
            let Some(head) = self.ring.peek(&self.memory, &mut chain)? else { return Ok(()) };
            self.check(head, &chain);
            if self.in_flight.iter().any(|bio| bio.token == u64::from(head)) {
                return Err(Violation::new("a descriptor in use"));
            }
            match self.ring.accept(head) {
                None => self.expected.retain(|expected| *expected != head),
                Some(_) => {
                    assert!(self.expected.is_empty(), "{head} is new, {:?} lost", self.expected)
                }
            }
            let request = &mut self.requests[usize::from(head)];
            std::mem::swap(&mut request.chain, &mut chain);
            let mut intake = self.driver.intake();
            match request.begin(&self.memory, &self.facts, &mut intake, u64::from(head))? {
                Begun::Bio(bio) => {
                    check_bio(&bio);
                    self.in_flight.push_back(bio);
                }
                Begun::Done(written) => self.answer(head, written)?,
            }
        }
        Ok(())
    }

    fn check(&self, head: u16, chain: &Chain) {
        assert!(head < ENTRIES);
        for piece in chain.readable.iter().chain(&chain.writable) {
            let end = piece.guest.checked_add(piece.len.into());
            assert!(piece.len > 0 && end.is_some_and(|end| end <= MEMORY_BYTES), "{piece:?}");
        }
    }

    fn answer(&mut self, head: u16, written: u32) -> Result<(), Violation> {
        self.ring.answer(head, written);
        self.ring.publish()?;
        self.answered = self.answered.wrapping_add(1);
        self.ring.needs_call();
        Ok(())
    }

    /// One of the bios in flight completes.
    fn finish(&mut self, nth: usize) -> Result<(), Violation> {
        if self.in_flight.is_empty() {
            return Ok(());
        }
        let bio = self.in_flight.remove(nth % self.in_flight.len()).unwrap();
        let bio = self.serve(bio);
        let head = bio.token as u16;
        let written = self.requests[usize::from(head)].finish(&bio, &self.memory)?;
        self.answer(head, written)
    }

    fn serve(&mut self, mut bio: Bio) -> Bio {
        if bio.end() > STORED_BYTES {
            return bio.finished(Err(Status::Invalid));
        }
        let range = bio.offset as usize..bio.end() as usize;
        match bio.op {
            Op::Read => bio.buffer.as_mut_slice().copy_from_slice(&self.device[range]),
            Op::Write => self.device[range].copy_from_slice(bio.buffer.as_slice()),
            Op::Discard | Op::WriteZeroes => self.device[range].fill(0),
            Op::Flush => {}
        }
        bio
    }

    /// The server dies, or the next one finds a damaged log.
    fn restart(&mut self, input: &mut Input<'_>) -> Result<(), Violation> {
        self.expected.extend(self.in_flight.drain(..).map(|bio| bio.token as u16));
        let mut used = [0; 2];
        self.memory.load(USED + 2, &mut used)?;
        let used = u16::from_le_bytes(used);
        // A driver that changes the answers that its device wrote may lose its requests.
        if !self.is_packed() && used != self.answered {
            self.expected.clear();
            self.answered = used;
        }
        let is_moved = input.u8() & 1 != 0;
        let notes = Some(&self.notes);
        self.ring = Virtqueue::open(self.shape, &self.memory, base(&self.shape), notes, 0)?;
        if is_moved {
            self.ring.moved(&self.memory)?;
        }
        Ok(())
    }
}

/// A mapped device accepts every bio.
fn check_bio(bio: &Bio) {
    assert!((bio.offset | bio.len).is_multiple_of(SECTOR) && bio.len <= BIO_BYTES_MAX);
    assert!(bio.offset.checked_add(bio.len).is_some());
    assert_eq!(bio.op == Op::Flush, bio.len == 0, "{bio:?}");
    let has_data = matches!(bio.op, Op::Read | Op::Write);
    assert_eq!(bio.buffer.len() as u64, if has_data { bio.len } else { 0 });
}

fn put_descriptor(memory: &Memory, input: &mut Input<'_>) -> Result<(), Violation> {
    let table = if input.u8() & 1 == 0 { 0 } else { TABLE };
    let index = u64::from(input.u8() % 16);
    let (mut bytes, flags, next) = descriptor(input);
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    memory.store(table + index * 16, &bytes)
}

/// A descriptor in a table, or the next one of a packed ring.
fn offer(memory: &Memory, available: &mut Cursor, input: &mut Input<'_>) -> Result<(), Violation> {
    let is_in_table = input.u8() & 1 != 0;
    let index = u64::from(input.u8() % 16);
    let (mut bytes, flags, id) = descriptor(input);
    bytes.extend(id.to_le_bytes());
    let owner = if available.is_odd { 1 << 7 } else { 1 << 15 };
    bytes.extend((flags | owner).to_le_bytes());
    if is_in_table {
        return memory.store(TABLE + index * 16, &bytes);
    }
    let at = u64::from(available.index) * 16;
    *available = available.after(1, ENTRIES);
    memory.store(at, &bytes)
}

/// Address and length of a descriptor, its flags, and a number.
fn descriptor(input: &mut Input<'_>) -> (Vec<u8>, u16, u16) {
    let guest = match input.u8() {
        0..=159 => DATA + input.below(MEMORY_BYTES - DATA),
        160..=199 => TABLE,
        _ => input.near(MEMORY_BYTES),
    };
    let len = match input.u8() {
        0..=79 => u32::from(input.u8()) * 512,
        80..=219 => u32::from(input.u8()),
        _ => input.near(MEMORY_BYTES) as u32,
    };
    let (flags, next) = (u16::from(input.u8() & 7), u16::from(input.u8() % 18));
    let mut bytes = guest.to_le_bytes().to_vec();
    bytes.extend(len.to_le_bytes());
    (bytes, flags, next)
}

fn publish(memory: &Memory, head: u16) -> Result<(), Violation> {
    let mut count = [0; 2];
    memory.load(AVAILABLE + 2, &mut count)?;
    let count = u16::from_le_bytes(count);
    memory.store(AVAILABLE + 4 + u64::from(count % ENTRIES) * 2, &head.to_le_bytes())?;
    memory.store(AVAILABLE + 2, &count.wrapping_add(1).to_le_bytes())
}

fn poke(memory: &Memory, input: &mut Input<'_>) -> Result<(), Violation> {
    let at = input.below(MEMORY_BYTES - 16);
    let count = usize::from(input.u8() % 16);
    memory.store(at, input.take(count))
}

/// A request's header in one of 64 places.
fn put_header(memory: &Memory, input: &mut Input<'_>) -> Result<(), Violation> {
    let at = DATA + u64::from(input.u8() % 64) * 16;
    let kind = u32::from(input.u8() % 16);
    let sector = match input.u8() {
        0..=220 => u64::from(input.u8()),
        _ => input.near(u64::MAX / SECTOR),
    };
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(sector.to_le_bytes());
    memory.store(at, &bytes)
}

// --- messages ----------------------------------------------------------------------------------

fn device() -> Arc<Device> {
    let table = Table::parse(&format!("0 {} linear memory 0", STORED_BYTES / SECTOR)).unwrap();
    let args = LinearArgs::parse(&table.lines[0].args).unwrap();
    let disk = Arc::new(RamDisk::new(STORED_BYTES, 512));
    let linear = Linear::new(&args, STORED_BYTES, disk).unwrap();
    Device::with_table("memory", LoadedTable::single(Arc::new(linear), STORED_BYTES)).unwrap()
}

/// The memory and descriptors of a client.
struct Client {
    memory_file: OwnedFd,
    memory: Memory,
    kick: OwnedFd,
    notes: OwnedFd,
}

fn messages(input: &mut Input<'_>) {
    let device = device();
    let counts = Arc::new(Counts::default());
    let mut session = Session::new("udm-fuzz", &device, Poll::Never, counts);
    let memory_file = memfd(MEMORY_BYTES);
    let mut memory = Memory::default();
    let region = Region { guest: 0, len: MEMORY_BYTES, user: 0, offset: 0 };
    memory.add(region, &memory_file).unwrap();
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let client = Client { memory_file, memory, kick, notes: memfd(8 * KIB) };
    let style = input.u8();
    if style & 1 == 0 {
        for message in usual(&client, style & 2 != 0) {
            session.take(message).unwrap();
        }
    }
    for _ in 0..STEPS_MAX / 10 {
        if input.is_empty() || say(&mut session, &client, input).is_err() {
            break;
        }
    }
    session.end();
    drop(session);
    assert_eq!(device.info().ports, 0, "a session has left a seat taken");
}

fn say(session: &mut Session, client: &Client, input: &mut Input<'_>) -> Result<(), Violation> {
    match input.u8() {
        0..=39 => put_descriptor(&client.memory, input)?,
        40..=59 => publish(&client.memory, u16::from(input.u8() % 18))?,
        60..=69 => poke(&client.memory, input)?,
        70..=89 => put_header(&client.memory, input)?,
        90..=129 => {
            let _ = rustix::io::write(&client.kick, &1_u64.to_le_bytes());
        }
        130 => ftruncate(&client.memory_file, input.below(MEMORY_BYTES)).unwrap(),
        _ => {
            let Some(message) = message(client, input)? else { return Ok(()) };
            if let Some(reply) = session.take(message).inspect_err(check)? {
                assert!(reply.bytes.len() <= 12 + 12 + 256);
            }
        }
    }
    Ok(())
}

fn file(client: &Client, kind: u8) -> OwnedFd {
    let file = match kind % 4 {
        0 | 1 => &client.kick,
        2 => &client.memory_file,
        _ => &client.notes,
    };
    rustix::io::dup(file).unwrap()
}

/// A message, usually with a payload of the right type.
fn message(client: &Client, input: &mut Input<'_>) -> Result<Option<Message>, Violation> {
    let number = u32::from(input.u8() % 40);
    let mut header = [number.to_le_bytes(), [1, 0, 0, 0], [0; 4]].concat();
    let style = input.u8();
    let index = if style & 1 == 0 { 0 } else { u32::from(input.u8()) };
    let near = input.near(0x1000);
    let payload = match number {
        _ if style >= 240 => {
            let count = usize::from(input.u8());
            input.take(count).to_vec()
        }
        1 | 3 | 4 | 15 | 17 | 21 | 36 => vec![],
        5 => [pair(1, 0), words(&[near & !0xfff, MEMORY_BYTES, 0, 0])].concat(),
        8 | 10 | 11 | 18 => pair(index, if style & 2 == 0 { 16 } else { near as u32 }),
        9 => words(&[index.into(), near, USED, AVAILABLE, 0]),
        12..=14 => words(&[u64::from(index) | near & 0x100]),
        24 | 25 => [pair(index, 8), vec![0; 4], vec![0; 8]].concat(),
        31 | 32 => {
            let rings = [2_u16.to_le_bytes(), 16_u16.to_le_bytes()].concat();
            [words(&[8 * KIB, near & !63]), rings].concat()
        }
        37 | 38 => [words(&[0, near << 12, 0x1000, near << 12, 0])].concat(),
        _ => words(&[near]),
    };
    header[8..12].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    let header = header.first_chunk().unwrap();
    let Header { request, .. } = Header::parse(header).inspect_err(check)?;
    let wants = u8::from(matches!(number, 5 | 12..=14 | 21 | 32 | 37));
    let count = if style & 4 == 0 { wants } else { input.u8() % 3 };
    let kind = match number {
        5 | 37 => 2,
        32 => 3,
        _ => style >> 3,
    };
    let fds = (0..count).map(|_| file(client, kind)).collect();
    Ok(Some(Message { request, needs_reply: style & 8 == 0, payload, fds }))
}

/// The first messages of every client, until its ring is served.
fn usual(client: &Client, is_packed: bool) -> Vec<Message> {
    let say = |request, payload, kind: Option<u8>| {
        let fds = kind.into_iter().map(|kind| file(client, kind)).collect();
        Message { request, needs_reply: false, payload, fds }
    };
    let features = feature::VERSION_1 | feature::PROTOCOL | feature::INDIRECT | feature::EVENT_IDX;
    let packed = if is_packed { feature::RING_PACKED } else { 0 };
    let base = if is_packed { BEGIN } else { 0 };
    vec![
        say(Asked::SetProtocolFeatures, words(&[1 | 8]), None),
        say(Asked::SetFeatures, words(&[features | packed]), None),
        say(Asked::SetMemTable, [pair(1, 0), words(&[0, MEMORY_BYTES, 0, 0])].concat(), Some(2)),
        say(Asked::SetVringNum, pair(0, ENTRIES.into()), None),
        say(Asked::SetVringBase, pair(0, base), None),
        say(Asked::SetVringAddr, words(&[0, 0, USED, AVAILABLE, 0]), None),
        say(Asked::SetVringCall, words(&[0]), Some(0)),
        say(Asked::SetVringKick, words(&[0]), Some(0)),
        say(Asked::SetVringEnable, pair(0, 1), None),
    ]
}
