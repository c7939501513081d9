//! A reference front end of vhost-user-blk, written from the specifications, without code of the
//! server: a memfd for the guest's memory, rings of both kinds, the driver's
//! side.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::host_endian_bytes)]

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use udm::pmem::client_memory::ClientMemory;

pub const MEMORY_BYTES: u64 = 64 << 20;
/// Where the guest and the front end's process see the memory.
pub const GUEST: u64 = 0x1_0000_0000;
pub const USER: u64 = 0x7f00_0000_0000;
/// Where data is; before it each ring has its own 64 KiB.
pub const DATA: u64 = 2 << 20;
const RING_BYTES: u64 = 64 << 10;
const TABLES: u64 = 0x8000;

pub const EVENT_IDX: u64 = 1 << 29;
pub const INDIRECT: u64 = 1 << 28;
pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL: u64 = 1 << 30;
pub const FLUSH: u64 = 1 << 9;
pub const USUAL: u64 = EVENT_IDX | INDIRECT | VERSION_1 | PROTOCOL | FLUSH;
/// One table of descriptors, in which both sides go round.
pub const PACKED: u64 = 1 << 34;

pub const NEXT: u16 = 1;
pub const WRITABLE: u16 = 2;
pub const TABLE: u16 = 4;
/// Of packed rings: whose a descriptor is, in odd laps; where a ring begins.
pub const AVAILABLE: u16 = 1 << 7;
pub const USED: u16 = 1 << 15;
pub const ODD: u16 = 1 << 15;
pub const BEGIN: u32 = 0x8000_8000;

const SECONDS: u64 = 60;

/// The connection.
pub struct Front {
    pub stream: UnixStream,
    pub file: OwnedFd,
    pub memory: ClientMemory,
    pub features: u64,
}

pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn pair(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl Front {
    pub fn connect(path: &Path) -> Front {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(SECONDS))).unwrap();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, MEMORY_BYTES).unwrap();
        let memory = ClientMemory::map(&file, 0, MEMORY_BYTES).unwrap();
        Front { stream, file, memory, features: 0 }
    }

    /// A connection on the memory of another one.
    pub fn reconnect(self, path: &Path) -> Front {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(SECONDS))).unwrap();
        Front { stream, ..self }
    }

    pub fn tell(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.tell_with(request, 1, payload, fds);
    }

    pub fn tell_with(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut bytes: Vec<u8> = Vec::new();
        for word in [request, flags, payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, flags);
        // A server that hung up is for the next read to find.
        if let Ok(sent) = sent {
            assert_eq!(sent, bytes.len());
        }
    }

    pub fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut head = [0; 12];
        self.stream.read_exact(&mut head).unwrap();
        let word = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, 5), "a reply of version 1");
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload).unwrap();
        payload
    }

    pub fn number(&mut self, request: u32) -> u64 {
        self.tell(request, &[], &[]);
        u64::from_ne_bytes(self.reply(request).try_into().unwrap())
    }

    /// Tells, and waits until it is done.
    pub fn tell_and_wait(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.tell_with(request, 1 | 8, payload, fds);
        assert_eq!(self.reply(request), 0_u64.to_ne_bytes());
    }

    /// Negotiates, and shares the memory.
    pub fn negotiate(&mut self, features: u64) {
        self.tell(3, &[], &[]);
        let offered = self.number(1);
        assert_eq!(features & !offered, 0, "offered {offered:#x}");
        let protocol = self.number(15);
        // MQ, REPLY_ACK, BACKEND_REQ, CONFIG, INFLIGHT_SHMFD, CONFIGURE_MEM_SLOTS.
        let wanted = 1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15;
        assert_eq!(wanted & !protocol, 0, "offered {protocol:#x}");
        self.tell(16, &words(&[wanted]), &[]);
        self.tell_and_wait(2, &words(&[features]), &[]);
        self.features = features;
        self.share(MEMORY_BYTES);
    }

    /// Shares the first `bytes` of the memory as the only region.
    pub fn share(&mut self, bytes: u64) {
        let table = [&pair(1, 0)[..], &words(&[GUEST, bytes, USER, 0])].concat();
        self.tell_with(5, 1 | 8, &table, &[self.file.as_fd()]);
        assert_eq!(self.reply(5), 0_u64.to_ne_bytes());
    }

    /// Asks for a file for requests in flight. Returns the server's description and the file.
    pub fn get_in_flight(&mut self, rings: u16, entries: u16) -> (Vec<u8>, OwnedFd) {
        let numbers = [rings.to_ne_bytes(), entries.to_ne_bytes()].concat();
        self.tell(31, &[words(&[0, 0]), numbers, vec![0; 4]].concat(), &[]);
        let mut bytes = [0; 36];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let vectors = &mut [IoSliceMut::new(&mut bytes)];
        let got = recvmsg(&self.stream, vectors, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        assert_eq!(got.bytes, 36);
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (bytes[12..].to_vec(), file.unwrap())
    }

    pub fn set_in_flight(&mut self, (extent, file): &(Vec<u8>, OwnedFd)) {
        self.tell_and_wait(32, extent, &[file.as_fd()]);
    }

    /// Gives the server a channel of its own; returns our end.
    pub fn hear(&mut self) -> UnixStream {
        let (ours, its) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(SECONDS))).unwrap();
        self.tell_and_wait(21, &[], &[its.as_fd()]);
        ours
    }

    /// The device's size in sectors, as the configuration has it.
    pub fn sectors(&mut self) -> u64 {
        u64::from_ne_bytes(self.config()[..8].try_into().unwrap())
    }

    pub fn config(&mut self) -> Vec<u8> {
        let head = [0_u32, 60, 0].iter().flat_map(|word| word.to_ne_bytes());
        let payload: Vec<u8> = head.chain([0; 60]).collect();
        self.tell(24, &payload, &[]);
        self.reply(24)[12..].to_vec()
    }

    /// Starts ring `index` from its beginning.
    pub fn ring(&mut self, index: u32, entries: u16) -> Ring {
        let at = u64::from(index) * RING_BYTES;
        self.memory.store(at, &vec![0; RING_BYTES as usize]);
        let is_packed = self.features & PACKED != 0;
        let begin = if is_packed { ODD } else { 0 };
        let ring = Ring {
            index,
            entries,
            at,
            is_packed,
            available: begin,
            used: begin,
            unkicked: 0,
            free: (0..entries).rev().collect(),
            chains: vec![Vec::new(); usize::from(entries)],
            features: self.features,
            kick: new_eventfd(),
            call: new_eventfd(),
            kicks: 0,
        };
        self.start(&ring, if is_packed { BEGIN } else { 0 });
        ring
    }

    /// Starts a ring from `base` on: of a split one the number of the next request, of a packed one
    /// two places.
    pub fn start(&mut self, ring: &Ring, base: u32) {
        self.tell(8, &pair(ring.index, ring.entries.into()), &[]);
        self.tell(10, &pair(ring.index, base), &[]);
        let [descriptors, available, used] = ring.parts().map(|at| USER + at);
        let addresses = words(&[ring.index.into(), descriptors, used, available, 0]);
        self.tell(9, &addresses, &[]);
        self.tell(13, &words(&[ring.index.into()]), &[ring.call.as_fd()]);
        self.tell(12, &words(&[ring.index.into()]), &[ring.kick.as_fd()]);
        self.tell_and_wait(18, &pair(ring.index, 1), &[]);
    }

    /// Takes the ring back; returns the number, or the place, of its next request.
    pub fn stop(&mut self, ring: &Ring) -> u16 {
        self.stop_at(ring) as u16
    }

    /// Takes the ring back; returns all that is needed to start it again.
    pub fn stop_at(&mut self, ring: &Ring) -> u32 {
        self.tell(11, &pair(ring.index, 0), &[]);
        let state = self.reply(11);
        u32::from_ne_bytes(state[4..].try_into().unwrap())
    }

    /// Whether the server closes the connection.
    pub fn is_closed(&mut self) -> bool {
        let mut byte = [0];
        matches!(self.stream.read(&mut byte), Ok(0))
            || self.stream.write(&byte).is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock)
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.load(at, &mut bytes);
        bytes
    }
}

/// Puts a descriptor (address, length, flags, next) into a table.
pub fn put_descriptor(memory: &ClientMemory, table: u64, index: u16, words: (u64, u32, u16, u16)) {
    let (guest, len, flags, next) = words;
    let mut bytes = guest.to_ne_bytes().to_vec();
    bytes.extend(len.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(next.to_ne_bytes());
    memory.store(table + u64::from(index) * 16, &bytes);
}

/// A piece of a request: where in the memory, how long, and whether the device writes it.
pub type Piece = (u64, u32, bool);

/// A ring, from the driver's side.
#[derive(Debug)]
pub struct Ring {
    pub index: u32,
    pub entries: u16,
    pub at: u64,
    pub is_packed: bool,
    /// For a packed ring these are places, with the parity of the lap in the highest bit.
    pub available: u16,
    pub used: u16,
    /// Descriptors of a packed ring since a kick was last considered.
    pub unkicked: u16,
    /// Descriptors of a split ring; as many names of a packed one.
    pub free: Vec<u16>,
    /// The descriptors of the request with each head, or name.
    pub chains: Vec<Vec<u16>>,
    pub features: u64,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub kicks: u64,
}

impl Ring {
    /// Descriptors; available, or the driver's wish; used, or the device's wish.
    pub fn parts(&self) -> [u64; 3] {
        [self.at, self.at + 0x4000, self.at + 0x5000]
    }

    pub fn descriptor(&self, front: &Front, table: u64, index: u16, words: (u64, u32, u16, u16)) {
        put_descriptor(&front.memory, table, index, words);
    }

    /// Makes a request available, without a kick. Returns its head.
    pub fn offer(&mut self, front: &Front, pieces: &[Piece], is_indirect: bool) -> u16 {
        let flags_of = |piece: &Piece| if piece.2 { WRITABLE } else { 0 };
        if is_indirect {
            let head = self.free.pop().unwrap();
            let table = self.at + TABLES + u64::from(head) * 128;
            assert!(pieces.len() <= 8);
            for (nth, piece) in pieces.iter().enumerate() {
                let next = if nth + 1 < pieces.len() { NEXT } else { 0 };
                // A packed ring's table is read in order, and has the flags last.
                let (one, other) = match self.is_packed {
                    true => (head, flags_of(piece)),
                    false => (flags_of(piece) | next, nth as u16 + 1),
                };
                let words = (GUEST + piece.0, piece.1, one, other);
                self.descriptor(front, table, nth as u16, words);
            }
            let words = (GUEST + table, pieces.len() as u32 * 16, TABLE, 0);
            if self.is_packed {
                self.chains[usize::from(head)] = vec![head];
                self.put(front, head, &[(words.0, words.1, TABLE)]);
                return head;
            }
            self.descriptor(front, self.at, head, words);
            self.chains[usize::from(head)] = vec![head];
            self.publish(front, head);
            return head;
        }
        let chain: Vec<u16> = pieces.iter().map(|_| self.free.pop().unwrap()).collect();
        if self.is_packed {
            let id = chain[0];
            let next = |nth: usize| if nth + 1 < pieces.len() { NEXT } else { 0 };
            let flags = |(nth, piece): (usize, &Piece)| {
                (GUEST + piece.0, piece.1, flags_of(piece) | next(nth))
            };
            let words: Vec<_> = pieces.iter().enumerate().map(flags).collect();
            self.chains[usize::from(id)] = chain;
            self.put(front, id, &words);
            return id;
        }
        for (nth, piece) in pieces.iter().enumerate() {
            let next = chain.get(nth + 1).copied();
            let flags = flags_of(piece) | if next.is_some() { NEXT } else { 0 };
            let words = (GUEST + piece.0, piece.1, flags, next.unwrap_or(0));
            self.descriptor(front, self.at, chain[nth], words);
        }
        let head = chain[0];
        self.chains[usize::from(head)] = chain;
        self.publish(front, head);
        head
    }

    /// The place `count` entries after `place`, in a packed ring.
    pub fn after(&self, place: u16, count: u16) -> u16 {
        let (index, lap) = ((place & !ODD) + count, place & ODD);
        if index < self.entries { index | lap } else { (index - self.entries) | (lap ^ ODD) }
    }

    /// Makes a request of a packed ring available: addresses, lengths, flags.
    pub fn put(&mut self, front: &Front, id: u16, words: &[(u64, u32, u16)]) {
        let mut place = self.available;
        let mut head = None;
        for (guest, len, flags) in words {
            let at = self.at + u64::from(place & !ODD) * 16;
            let flags = flags | if place & ODD != 0 { AVAILABLE } else { USED };
            let bytes = [&guest.to_ne_bytes()[..], &len.to_ne_bytes(), &id.to_ne_bytes()].concat();
            front.memory.store(at, &bytes);
            // With the first one's flags all of them are there.
            match head {
                None => head = Some((at, flags)),
                Some(_) => front.memory.u16_at(at + 14).store(flags, Ordering::Relaxed),
            }
            place = self.after(place, 1);
        }
        let (at, flags) = head.unwrap();
        front.memory.u16_at(at + 14).store(flags, Ordering::Release);
        self.available = place;
        self.unkicked += words.len() as u16;
    }

    /// Makes the chain from `head` on available.
    pub fn publish(&mut self, front: &Front, head: u16) {
        let [_, available, _] = self.parts();
        let entry = u64::from(self.available % self.entries);
        front.memory.u16_at(available + 4 + entry * 2).store(head, Ordering::Relaxed);
        self.available = self.available.wrapping_add(1);
        front.memory.u16_at(available + 2).store(self.available, Ordering::Release);
    }

    /// Whether the device wants a kick for what came after `before`.
    pub fn wants_kick(&mut self, front: &Front, before: u16) -> bool {
        fence(Ordering::SeqCst);
        let [_, _, used] = self.parts();
        if self.is_packed {
            let count = std::mem::take(&mut self.unkicked);
            let wish = [0, 2].map(|at| front.memory.u16_at(used + at).load(Ordering::Acquire));
            // One of those that were made available is the one that it waits for.
            let mut news = (1..=count).map(|nth| self.after(wish[0], nth));
            return match wish[1] {
                0 => true,
                1 => false,
                _ => news.any(|place| place == self.available),
            };
        }
        if self.features & EVENT_IDX == 0 {
            return front.memory.u16_at(used).load(Ordering::Relaxed) & 1 == 0;
        }
        let at = used + 4 + u64::from(self.entries) * 8;
        let event = front.memory.u16_at(at).load(Ordering::Relaxed);
        let passed = self.available.wrapping_sub(event).wrapping_sub(1);
        passed < self.available.wrapping_sub(before)
    }

    pub fn kick(&mut self) {
        self.kicks += 1;
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).unwrap();
    }

    /// Kicks if the device wants it for the last `count` requests.
    pub fn kick_for(&mut self, front: &Front, count: u16) {
        let before = if self.is_packed { 0 } else { self.available.wrapping_sub(count) };
        if self.wants_kick(front, before) {
            self.kick();
        }
    }

    /// Asks for a call after the next request that is used.
    pub fn want_call(&self, front: &Front) {
        let [_, available, _] = self.parts();
        if self.is_packed {
            // Where it is, or always.
            let (place, wish) =
                if self.features & EVENT_IDX != 0 { (self.used, 2) } else { (0, 0) };
            front.memory.u16_at(available).store(place, Ordering::Relaxed);
            front.memory.u16_at(available + 2).store(wish, Ordering::Release);
        } else if self.features & EVENT_IDX != 0 {
            let at = available + 4 + u64::from(self.entries) * 2;
            front.memory.u16_at(at).store(self.used, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
    }

    /// The next request that was used: its head, and the bytes written.
    pub fn pop(&mut self, front: &Front) -> Option<(u16, u32)> {
        if self.is_packed {
            return self.pop_packed(front);
        }
        let [_, _, used] = self.parts();
        if front.memory.u16_at(used + 2).load(Ordering::Acquire) == self.used {
            return None;
        }
        let at = used + 4 + u64::from(self.used % self.entries) * 8;
        let head = front.memory.u32_at(at).load(Ordering::Relaxed) as u16;
        let len = front.memory.u32_at(at + 4).load(Ordering::Relaxed);
        self.used = self.used.wrapping_add(1);
        let chain = std::mem::take(&mut self.chains[usize::from(head)]);
        assert!(!chain.is_empty(), "descriptor {head} was used twice, or never made available");
        self.free.extend(chain);
        Some((head, len))
    }

    fn pop_packed(&mut self, front: &Front) -> Option<(u16, u32)> {
        let at = self.at + u64::from(self.used & !ODD) * 16;
        let flags = front.memory.u16_at(at + 14).load(Ordering::Acquire);
        let expected = if self.used & ODD != 0 { AVAILABLE | USED } else { 0 };
        if flags & (AVAILABLE | USED) != expected {
            return None;
        }
        let id = front.memory.u16_at(at + 12).load(Ordering::Relaxed);
        let len = front.memory.u32_at(at + 8).load(Ordering::Relaxed);
        let chain = std::mem::take(&mut self.chains[usize::from(id)]);
        assert!(!chain.is_empty(), "request {id} was used twice, or never made available");
        assert_eq!(flags & WRITABLE != 0, len > 0);
        self.used = self.after(self.used, chain.len() as u16);
        self.free.extend(chain);
        Some((id, len))
    }

    /// Waits in the call for the next request that was used.
    pub fn wait(&mut self, front: &Front) -> (u16, u32) {
        let deadline = Instant::now() + Duration::from_secs(SECONDS);
        loop {
            self.want_call(front);
            if let Some(used) = self.pop(front) {
                return used;
            }
            assert!(Instant::now() < deadline, "ring {}: no answer", self.index);
            self.sleep(SECONDS * 1000);
        }
    }

    /// Waits for a call, at most this long.
    pub fn sleep(&self, milliseconds: u64) -> bool {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let timeout = rustix::time::Timespec {
            tv_sec: (milliseconds / 1000) as i64,
            tv_nsec: (milliseconds % 1000 * 1_000_000) as _,
        };
        let count = poll(&mut fds, Some(&timeout)).unwrap();
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
        count > 0
    }

    /// A header at `at`.
    pub fn header(front: &Front, at: u64, kind: u32, sector: u64) {
        let mut bytes = kind.to_ne_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_ne_bytes());
        front.memory.store(at, &bytes);
    }

    /// One request with `data` for the device, or room for `room` bytes from it. Returns the
    /// answer, and what came. Its memory is slot `slot` of 1 MiB.
    pub fn request(
        &mut self,
        front: &Front,
        (kind, sector): (u32, u64),
        data: &[u8],
        room: u32,
    ) -> (u8, Vec<u8>) {
        let slot = u64::from(self.index);
        self.begin(front, slot, (kind, sector), data, room, false);
        self.kick_for(front, 1);
        let (_, len) = self.wait(front);
        let at = DATA + (slot << 20);
        let status = front.bytes(at + 16, 1)[0];
        assert_eq!(len, if room > 0 && status == 0 { room + 1 } else { 1 });
        (status, front.bytes(at + 4096, room as usize))
    }

    /// The same, but only made available. Its answer will be at 16 in its slot.
    pub fn begin(
        &mut self,
        front: &Front,
        slot: u64,
        (kind, sector): (u32, u64),
        data: &[u8],
        room: u32,
        is_indirect: bool,
    ) -> u16 {
        let at = DATA + (slot << 20);
        Ring::header(front, at, kind, sector);
        front.memory.store(at + 16, &[0xee]);
        front.memory.store(at + 4096, data);
        let mut pieces = vec![(at, 16, false)];
        if !data.is_empty() {
            pieces.push((at + 4096, data.len() as u32, false));
        }
        if room > 0 {
            pieces.push((at + 4096, room, true));
        }
        pieces.push((at + 16, 1, true));
        self.offer(front, &pieces, is_indirect)
    }

    pub fn write(&mut self, front: &Front, sector: u64, data: &[u8]) -> u8 {
        self.request(front, (1, sector), data, 0).0
    }

    pub fn read(&mut self, front: &Front, sector: u64, len: u32) -> (u8, Vec<u8>) {
        self.request(front, (0, sector), &[], len)
    }

    pub fn flush(&mut self, front: &Front) -> u8 {
        self.request(front, (4, 0), &[], 0).0
    }
}
