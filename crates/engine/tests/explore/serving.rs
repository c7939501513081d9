//! The machine at work: requests and their ends, and the I/O of both disks in any order.

use std::collections::VecDeque;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::error::Status;
use udm::pmem::client_memory::ClientMemory;
use udm::units::SECOND;

use crate::machine::{Machine, Outcome};
use crate::model::{SECTOR, SLOTS, SPANS, fill, offset_of, slot_at, stamp_of};
use crate::sectors::End;
use crate::ssd::is_for_cache;
use crate::subject::{Ground, Kind, PassesBy};
use crate::trace::{Ask, Event};

thread_local! {
    /// A client's memory, with room for any write.
    static CLIENT: ClientMemory = {
        let bytes = (SLOTS * SECTOR) as u64;
        let file = memfd_create("client", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        ClientMemory::map(&file, 0, bytes).unwrap()
    };
}

impl Machine {
    /// Submits a request, and waits for its end or leaves it under way.
    pub(crate) fn ask(&mut self, ask: Ask, waits: bool) -> Outcome {
        let ask = self.in_blocks(ask);
        // Of two writes in flight, either may win: let the other one end first.
        if ask.slots().is_some_and(|(first, count)| self.is_under_way(first, count)) {
            self.end_posted()?;
        }
        let id = self.id();
        let bio = self.bio(id, ask);
        self.note(Event::Submit(id, ask));
        self.model.submit(id, ask);
        self.has_origin_failed &= !self.posted.is_empty() || self.tells_later();
        if !waits {
            self.posted.push((id, ask));
            self.submit(bio);
            return self.collect();
        }
        let done = self.serve(bio)?;
        self.ended(id, done.status)
    }

    /// Whether a posted request writes to these slots.
    fn is_under_way(&self, first: usize, count: usize) -> bool {
        let posted = self.posted.iter().filter_map(|posted| posted.1.slots());
        posted.into_iter().any(|(other, others)| other < first + count && first < other + others)
    }

    /// Waits for everything that was posted.
    pub(crate) fn end_posted(&mut self) -> Outcome {
        for _ in 0..400 {
            self.release();
            self.collect()?;
            if self.posted.is_empty() {
                return Ok(());
            }
            self.go_on();
        }
        Err(format!("requests wait indefinitely: {}", self.target().status()))
    }

    /// Time passes, and parked requests are tried again.
    fn go_on(&mut self) {
        self.release();
        self.tick(SECOND / 10);
        for parked in std::mem::take(&mut self.port.parked) {
            self.submit(parked);
        }
    }

    fn whole(&self, first: usize, count: usize) -> (usize, usize) {
        let block = self.kind.block_slots();
        let end = (first + count).next_multiple_of(block);
        (first / block * block, end - first / block * block)
    }

    /// The same for whole blocks.
    pub(crate) fn in_blocks(&self, ask: Ask) -> Ask {
        match ask {
            Ask::Write { first, count, fua, is_zero } => {
                let (first, count) = self.whole(first, count);
                Ask::Write { first, count, fua, is_zero }
            }
            Ask::Flush | Ask::Percent(_) => ask,
        }
    }

    pub(crate) fn bio(&mut self, id: u32, ask: Ask) -> Bio {
        let token = u64::from(id);
        match ask {
            Ask::Write { first, count, fua, is_zero: true } => {
                let len = self.bytes_of(first, count);
                let op = if self.prng.one_in(2) { Op::Discard } else { Op::WriteZeroes };
                Bio::bare(op, offset_of(first), len, fua, token)
            }
            Ask::Write { first, count, fua, .. } => {
                let mut buffer = Buffer::zeroed(self.bytes_of(first, count) as usize);
                let sectors = buffer.as_mut_slice().chunks_mut(SECTOR).take(count);
                for (nth, sector) in sectors.enumerate() {
                    fill(sector, self.model.next_stamp(first + nth, false));
                }
                Bio::write(offset_of(first), buffer, fua, token)
            }
            Ask::Flush | Ask::Percent(_) => Bio::flush(token),
        }
    }

    /// Whether the next flush of a client reports a failed flush that no client had asked for.
    pub(crate) fn tells_later(&self) -> bool {
        self.kind.passes_by() == PassesBy::Always
    }

    /// Bytes of a request for these slots. All slots of a block mean all of the block.
    fn bytes_of(&self, first: usize, count: usize) -> u64 {
        let whole = self.kind.copied_bytes();
        let is_whole = whole > 0 && (first, count) == (0, SPANS[0].1);
        if is_whole { whole } else { (count * SECTOR) as u64 }
    }

    fn ended(&mut self, id: u32, status: Result<(), Status>) -> Outcome {
        match status {
            Ok(()) => {
                self.note(Event::Ack(id));
                self.model.ack(id);
                Ok(())
            }
            Err(status) => {
                self.note(Event::Failed(id));
                self.model.failed(id);
                // A target that lets requests pass by answers for the origin's failures.
                match self.has_origin_failed && self.kind.passes_by() != PassesBy::Never {
                    true => Ok(()),
                    false => self.excused(format!("request failed: {status}")),
                }
            }
        }
    }

    fn submit(&mut self, bio: Bio) {
        match self.is_copied(&bio) {
            true => self.port.finish(bio, Ok(())),
            false => self.subject.as_ref().unwrap().submit(bio, &mut self.port),
        }
        self.settle();
    }

    /// Whether a write was done without a bio: every second one comes from a client's memory.
    fn is_copied(&self, bio: &Bio) -> bool {
        let fits = bio.buffer.len() <= SLOTS * SECTOR;
        if bio.op != Op::Write || !fits || bio.progress > 0 || bio.token.is_multiple_of(2) {
            return false;
        }
        CLIENT.with(|memory| {
            memory.store(0, bio.buffer.as_slice());
            let from = memory.source(0, bio.buffer.len());
            let subject = self.subject.as_ref().unwrap();
            subject.write_from(bio.offset, from, bio.fua, self.port.id)
        })
    }

    /// Ends completed requests without a waiting client.
    pub(crate) fn collect(&mut self) -> Outcome {
        let mut others = VecDeque::new();
        while let Some(bio) = self.port.done.pop_front() {
            let id = bio.token as u32;
            if let Some(place) = self.posted.iter().position(|posted| posted.0 == id) {
                self.posted.remove(place);
                self.ended(id, bio.status)?;
            } else if let Some((first, oldest)) = self.asked.remove(&id) {
                self.has_read(&bio, first, &oldest)?;
            } else {
                others.push_back(bio);
            }
        }
        self.port.done = others;
        Ok(())
    }

    /// Submits a bio and waits for it, with background ticks while it is parked.
    pub(crate) fn serve(&mut self, bio: Bio) -> Result<Bio, String> {
        let token = bio.token;
        self.submit(bio);
        for _ in 0..400 {
            self.collect()?;
            if let Some(place) = self.port.done.iter().position(|done| done.token == token) {
                return Ok(self.port.done.remove(place).unwrap());
            }
            // Waiting ends only if the disks are let go on.
            self.go_on();
        }
        Err(format!("a request waits indefinitely: {}", self.target().status()))
    }

    /// Starts what the target wants; completes it unless it is held.
    pub(crate) fn settle(&mut self) {
        loop {
            while let Some(io) = self.port.ios.pop_front() {
                self.start(io);
            }
            if !self.is_holding_reads {
                self.reads.append(&mut self.held_reads);
            }
            if !self.reads.is_empty() {
                let io = self.reads.remove(0);
                self.finish_read(io);
                continue;
            }
            if self.turn_background() {
                continue;
            }
            let origin = !self.is_holding_writes && !self.writes.is_empty();
            let cache = !self.is_holding_cache && !self.free_cache_ios().is_empty();
            match (origin, cache) {
                (false, false) => return,
                (true, false) => self.one_write(),
                (true, true) if self.prng.one_in(2) => self.one_write(),
                (_, true) => self.one_cache_io(),
            }
        }
    }

    fn is_on_disk(&self) -> bool {
        self.kind.ground() == Ground::Disk
    }

    fn start(&mut self, io: DiskIo) {
        match io.op {
            // Write-back also reads a disk, and must not wait for clients' reads.
            Op::Read if self.is_holding_reads && (self.is_reading || !self.is_on_disk()) => {
                self.held_reads.push(io);
            }
            Op::Read => self.reads.push(io),
            _ if is_for_cache(&io) => {
                let id = self.devices.ssds.of(&io).begin(&io);
                self.cache_ios.push((id, io));
            }
            Op::Flush => {
                let id = self.id();
                self.note(Event::OriginFlush(id));
                self.writes.push((id, io));
            }
            Op::Write | Op::Discard | Op::WriteZeroes => {
                self.claim();
                let id = self.id();
                self.note(Event::OriginWrite(id, known_contents(&*self.kind, &io)));
                self.writes.push((id, io));
            }
        }
    }

    fn finish_read(&mut self, mut io: DiskIo) {
        if is_for_cache(&io) {
            self.devices.ssds.of(&io).carry_out(&mut io);
        } else {
            for (nth, sector) in io.buffer.as_mut_slice().chunks_mut(SECTOR).enumerate() {
                let slot = slot_at(io.offset + (nth * SECTOR) as u64);
                fill(sector, slot.map_or(0, |slot| self.visible[slot]));
            }
        }
        self.subject.as_ref().unwrap().complete(io, &mut self.port);
    }

    /// Completes any one write or flush of the origin.
    pub(crate) fn one_write(&mut self) {
        if !self.writes.is_empty() {
            let nth = self.prng.below(self.writes.len() as u64) as usize;
            self.end_write(nth);
        }
    }

    /// Completes a write or flush of the origin, in the order in which they were begun.
    pub(crate) fn end_write(&mut self, nth: usize) {
        if nth >= self.writes.len() {
            return;
        }
        let (id, mut io) = self.writes.remove(nth);
        let fails = match &mut self.failing {
            Some((op, left)) if *op == io.op => {
                *left -= 1;
                if *left == 0 {
                    self.failing = None;
                }
                true
            }
            _ => false,
        };
        // A discarded sector reads as zeroes or as before; clients cannot rely on either.
        let is_void = io.op == Op::Discard && self.prng.one_in(2);
        if fails {
            self.has_origin_failed = true;
            io.result = Err(Status::Io);
        } else if io.op != Op::Flush && !is_void {
            self.arrive(&io);
        }
        self.note(Event::OriginDone(id, !fails && !is_void));
        self.subject.as_ref().unwrap().complete(io, &mut self.port);
        self.claim();
    }

    pub(crate) fn arrive(&mut self, io: &DiskIo) {
        for (slot, stamp) in contents(io) {
            if slot < SLOTS {
                self.visible[slot] = stamp;
                self.devices.origin.has(slot, stamp);
            }
        }
    }

    /// Writes and flushes of the cache that may come back, by number.
    fn free_cache_ios(&self) -> Vec<usize> {
        let is_held = |io: &DiskIo| self.is_holding_flushes && io.op == Op::Flush;
        let ios = self.cache_ios.iter().enumerate();
        ios.filter(|(_, (_, io))| !is_held(io)).map(|(nth, _)| nth).collect()
    }

    /// Completes any one write or flush of the cache.
    pub(crate) fn one_cache_io(&mut self) {
        let free = self.free_cache_ios();
        if free.is_empty() {
            return;
        }
        let nth = free[self.prng.below(free.len() as u64) as usize];
        let (id, mut io) = self.cache_ios.remove(nth);
        let fails = self.failing_cache == Some(io.op);
        let end = match fails {
            true => End::Failed { arrives: self.prng.one_in(2) },
            false => End::Good,
        };
        if fails {
            self.failing_cache = None;
            self.has_cache_failed = true;
            self.note(Event::CacheRefused);
            self.model.write_failed();
            // A write of data fails alone; anything else is the end of the cache.
            if io.op == Op::Flush
                || self.kind.is_telling(self.devices.ssds.of(&io).place(&io) as u32)
            {
                self.note(Event::CacheFailed);
                self.model.cache_failed();
            }
        }
        if fails && io.op == Op::Flush {
            // A server that is killed between the end of a flush and its completion cannot report
            // the result.
            io.result = Err(Status::Io);
            self.subject.as_ref().unwrap().complete(io, &mut self.port);
            return self.devices.ssds.data.note_end(id, end);
        }
        self.devices.ssds.of(&io).end(id, &mut io, end);
        self.subject.as_ref().unwrap().complete(io, &mut self.port);
        self.claim();
    }

    pub(crate) fn release(&mut self) {
        self.is_holding_writes = false;
        self.is_holding_cache = false;
        self.is_holding_flushes = false;
        self.settle();
    }

    pub(crate) fn read(&mut self, first: usize, count: usize) -> Outcome {
        let (first, count) = self.whole(first, count);
        let id = self.id();
        let bio = Bio::read(offset_of(first), Buffer::zeroed(count * SECTOR), u64::from(id));
        let oldest = self.model.done[first..first + count].to_vec();
        if self.is_holding_reads || self.is_holding_cache {
            self.asked.insert(id, (first, oldest));
            self.is_reading = true;
            self.submit(bio);
            self.is_reading = false;
            return self.collect();
        }
        let done = self.serve(bio)?;
        self.has_read(&done, first, &oldest)
    }

    fn has_read(&self, bio: &Bio, first: usize, oldest: &[usize]) -> Outcome {
        if let Err(status) = bio.status {
            return self.excused(format!("read failed: {status}"));
        }
        for (nth, sector) in bio.buffer.as_slice().chunks(SECTOR).enumerate() {
            let slot = first + nth;
            let stamp = stamp_of(sector);
            if !stamp.is_some_and(|stamp| self.model.is_since(slot, oldest[nth], stamp)) {
                return Err(format!("a live read of slot {slot} does not show the last write"));
            }
        }
        Ok(())
    }

    /// Clients read all slots after a death: these versions must remain from now on.
    pub(crate) fn take_stock(&mut self) -> Outcome {
        let mut found = Vec::with_capacity(SLOTS);
        for first in (0..SLOTS).step_by(self.kind.block_slots()) {
            let count = self.kind.block_slots();
            let id = self.id();
            let read = Bio::read(offset_of(first), Buffer::zeroed(count * SECTOR), u64::from(id));
            let done = self.serve(read)?;
            if let Err(status) = done.status {
                return self.excused(format!("a read after a death fails: {status}"));
            }
            for (nth, sector) in done.buffer.as_slice().chunks(SECTOR).enumerate() {
                let stamp = stamp_of(sector);
                let stamp = stamp.filter(|stamp| self.model.may_show(first + nth, *stamp, false));
                let Some(stamp) = stamp else {
                    let slot = first + nth;
                    return Err(format!("slot {slot} does not show the last write after a death"));
                };
                found.push(stamp);
            }
        }
        self.model.left(&found);
        self.note(Event::Left(found));
        Ok(())
    }

    pub(crate) fn check_content(&mut self) -> Outcome {
        self.is_holding_reads = false;
        self.settle();
        self.collect()?;
        self.read(0, 12)?;
        self.read(12, 8)
    }
}

/// The content of a write: slot (or a number beyond, for foreign sectors) and content.
pub fn contents(io: &DiskIo) -> Vec<(usize, u64)> {
    let slot = |nth: usize| slot_at(io.offset + (nth * SECTOR) as u64).unwrap_or(usize::MAX);
    if io.buffer.is_empty() {
        return (0..io.len as usize / SECTOR).map(|nth| (slot(nth), 0)).collect();
    }
    let sectors = io.buffer.as_slice().chunks(SECTOR).enumerate();
    sectors.map(|(nth, sector)| (slot(nth), stamp_of(sector).unwrap_or(u64::MAX))).collect()
}

/// The same, without the zeroes that a target copies along with the explorer's sectors.
pub fn known_contents(kind: &dyn Kind, io: &DiskIo) -> Vec<(usize, u64)> {
    let mut contents = contents(io);
    if kind.copied_bytes() > 0 {
        contents.retain(|content| *content != (usize::MAX, 0));
    }
    contents
}
