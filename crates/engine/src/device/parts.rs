//! Requests that are not whole blocks of the device, from clients that do not know its block size.
//! Only bios with [`Bio::allows_parts`] may be such requests.
//!
//! A request has up to three pieces: a part of its first block, the whole blocks after that, and a
//! part of its last block. They are served one after the other, each by bios of whole blocks.
//!
//! 1. A part is read by a read of its block. A part is written, or zeroed, by a read and a write of
//!    its block, while a [lock](super::block_locks) keeps other changes out of the block. A part is
//!    not discarded: a discard is rounded inwards.
//! 2. FUA applies to each piece. The first error of a piece is the error of the request.
//! 3. A crash tears the write of a block only where it tears other writes of the device. The rest
//!    of the block is written with the bytes that it had.
//! 4. A request comes out, done or parked, without the help of other ports, so it does not hold up
//!    a suspend. It is parked for two reasons. Either its lock is not free, and it waits
//!    without a lock. Or a target has parked its piece: then it keeps the lock, because the piece
//!    may be half written.
//! 5. After a change of tables, a parked request begins again: the block size, and the rest of its
//!    blocks, may have changed. The data of the request is kept for that until it is done.

use std::ops::Range;

use super::block_locks::BlockLocks;
use crate::base::pending::Pending;
use crate::bio::{Bio, Op, Part};
use crate::buffer::{Buffer, BufferPool};
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;

/// What becomes of a request.
pub(super) enum Next {
    /// This piece goes to the targets.
    Submit(Bio),
    /// The request is done.
    Finish(Bio, Result<(), Status>),
    /// The request is parked.
    Park(Bio),
}

/// A piece of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// The part of the first block. If the request is within one block: all of it.
    Head,
    /// The whole blocks.
    Middle,
    /// The part of the last block.
    Tail,
}

/// The whole blocks are read first, into the start of the buffer, and then moved to their place.
const READS: [Piece; 3] = [Piece::Middle, Piece::Head, Piece::Tail];
/// The whole blocks are changed last: their data is moved to the start of the buffer.
const CHANGES: [Piece; 3] = [Piece::Head, Piece::Tail, Piece::Middle];

/// The lock that a request has for its piece.
#[derive(Debug)]
struct Lock {
    epoch: u16,
    blocks: Range<u64>,
    is_part: bool,
}

/// A request, while it is served or parked.
#[derive(Debug)]
struct Job {
    /// `None` while it is parked.
    request: Option<Bio>,
    block_bytes: u64,
    /// The generation of the table.
    generation: u64,
    /// Number of its pieces that are done or left out.
    done: usize,
    lock: Option<Lock>,
    /// The bio of its piece, if a target has parked it.
    parked: Option<Bio>,
    /// Memory for a block.
    block: Buffer,
}

impl Job {
    fn request(&mut self) -> &mut Bio {
        self.request.as_mut().expect("a request is here while a piece of it is served")
    }

    /// The bytes of a piece; it may have none.
    fn range(&mut self, piece: Piece) -> Range<u64> {
        let block = self.block_bytes;
        let request = self.request();
        let (start, end) = (request.offset, request.end());
        let (first, last) = (start.next_multiple_of(block), end / block * block);
        match piece {
            Piece::Head => start..first.min(end),
            Piece::Middle => first..last.max(first),
            Piece::Tail => last.max(first).min(end)..end,
        }
    }

    /// The next piece, and its bytes.
    fn piece(&mut self) -> Option<(Piece, Range<u64>)> {
        let op = self.request().op;
        let order = if op == Op::Read { READS } else { CHANGES };
        while let Some(&piece) = order.get(self.done) {
            let range = self.range(piece);
            let is_left_out = op == Op::Discard && piece != Piece::Middle;
            if !range.is_empty() && !is_left_out {
                return Some((piece, range));
            }
            self.done += 1;
        }
        None
    }

    /// The whole blocks around the bytes of a piece.
    fn blocks(&self, range: &Range<u64>) -> Range<u64> {
        let block = self.block_bytes;
        range.start / block * block..range.end.next_multiple_of(block)
    }

    /// A bio for the blocks of a piece.
    fn bio(&mut self, op: Op, blocks: Range<u64>, buffer: Buffer, token: u64) -> Bio {
        let (fua, is_metadata) = (self.request().fua, self.request().is_metadata);
        let fua = fua && op != Op::Read && !mutants::is(Mutant::PartForgetsFua);
        let mut bio = Bio::bare(op, blocks.start, blocks.end - blocks.start, fua, token);
        (bio.buffer, bio.part, bio.is_metadata) = (buffer, Part::Piece, is_metadata);
        bio
    }

    /// The first bio of a piece.
    fn begin(
        &mut self,
        piece: Piece,
        blocks: Range<u64>,
        token: u64,
        pool: &mut BufferPool,
    ) -> Bio {
        let len = (blocks.end - blocks.start) as usize;
        if piece != Piece::Middle {
            let kept = std::mem::replace(&mut self.block, Buffer::empty());
            let buffer = if kept.len() == len { kept } else { pool.take(len) };
            return self.bio(Op::Read, blocks, buffer, token);
        }
        let request = self.request();
        let (op, head) = (request.op, (blocks.start - request.offset) as usize);
        let mut buffer = std::mem::replace(&mut request.buffer, Buffer::empty());
        if op == Op::Write {
            // The data before the whole blocks is kept after them.
            buffer.as_mut_slice()[..head + len].rotate_left(head);
        }
        if !buffer.is_empty() {
            buffer.set_len(len);
        }
        self.bio(op, blocks, buffer, token)
    }

    /// Takes the memory of the request back from the bio of its whole blocks. A read may come back
    /// with other memory, in which only the whole blocks fit.
    fn take_back(&mut self, mut buffer: Buffer, pool: &mut BufferPool) {
        let Range { start, end } = self.range(Piece::Middle);
        let request = self.request();
        if matches!(request.op, Op::Read | Op::Write) {
            let (head, len) = ((start - request.offset) as usize, (end - start) as usize);
            if buffer.capacity() < request.len as usize {
                assert!(request.op == Op::Read, "a write lost its buffer");
                let mut larger = pool.take(request.len as usize);
                larger.as_mut_slice()[..len].copy_from_slice(buffer.as_slice());
                pool.put(std::mem::replace(&mut buffer, larger));
            }
            buffer.set_len(request.len as usize);
            buffer.as_mut_slice()[..head + len].rotate_right(head);
        }
        request.buffer = buffer;
    }

    /// A bio of a piece has succeeded. Returns the piece's next bio; `None`: the piece is done.
    fn advance(&mut self, bio: Bio, pool: &mut BufferPool) -> Option<Bio> {
        let (piece, range) = self.piece().expect("a piece has a bio until it is done");
        if piece == Piece::Middle {
            self.take_back(bio.buffer, pool);
            return None;
        }
        let (blocks, token, is_written) = (bio.offset..bio.end(), bio.token, bio.op == Op::Write);
        let within = (range.start - blocks.start) as usize..(range.end - blocks.start) as usize;
        let mut block = bio.buffer;
        let request = self.request();
        let own = (range.start - request.offset) as usize..(range.end - request.offset) as usize;
        if request.op == Op::Read {
            request.buffer.as_mut_slice()[own].copy_from_slice(&block.as_slice()[within]);
        } else if !is_written {
            let bytes = &mut block.as_mut_slice()[within];
            match request.op {
                Op::Write => bytes.copy_from_slice(&request.buffer.as_slice()[own]),
                _ => bytes.fill(0),
            }
            return Some(self.bio(Op::Write, blocks, block, token));
        }
        self.block = block;
        None
    }
}

/// A port's requests that are not whole blocks, and its access to the locks of blocks.
#[derive(Debug, Default)]
pub(super) struct Parts {
    jobs: Pending<Job>,
    /// The number of the port.
    port: usize,
    /// The locks of the device, while any port needs them.
    locks: Option<Arc<BlockLocks>>,
    /// Number of times that ports began to need locks, up to now. 0: never.
    epoch: u16,
    /// Whether this port is one that needs locks.
    is_user: bool,
    /// Whether it waits to become one.
    wants_locks: bool,
    /// Its bios that were inside targets when changes began to be listed.
    unlisted: u64,
    is_given_up: bool,
    is_active: bool,
}

impl Parts {
    /// Whether there is more to do for the bios of this port than to pass them on.
    #[inline]
    pub fn is_active(&self) -> bool {
        self.is_active
    }

    /// Whether parts wait until the changes of all ports are locked.
    #[inline]
    pub fn wants_locks(&self) -> bool {
        self.wants_locks
    }

    fn update(&mut self) {
        self.is_active = self.locks.is_some() || self.jobs.count() > 0;
    }

    /// Begins to lock the changes of this port, or stops that. `inside`: its bios inside targets.
    pub fn set_locks(
        &mut self,
        port: usize,
        locks: Option<&Arc<BlockLocks>>,
        epoch: u16,
        inside: u64,
    ) {
        self.unlisted = if locks.is_some() && !self.is_given_up { inside } else { 0 };
        if let Some(locks) = locks {
            locks.add_unlisted(self.unlisted);
        }
        (self.port, self.locks, self.epoch) = (port, locks.cloned(), epoch);
        self.update();
    }

    /// Changes of parts may begin. Returns whether that is new for this port.
    pub fn become_user(&mut self) -> bool {
        self.wants_locks = false;
        !std::mem::replace(&mut self.is_user, true)
    }

    /// Whether this port is one for which changes are locked.
    pub fn is_user(&self) -> bool {
        self.is_user
    }

    /// The same for the next port of this number. This port is detached, or was never attached.
    pub fn renewed(&mut self) -> Parts {
        self.forget();
        let (port, locks, epoch) = (self.port, self.locks.take(), self.epoch);
        let mut next = Parts { port, locks, epoch, ..Parts::default() };
        next.update();
        next
    }

    /// No bio is inside, and parked bios will enter again from the start.
    pub fn forget(&mut self) {
        self.jobs.values_mut().for_each(|job| job.lock = None);
        if let Some(locks) = &self.locks {
            locks.forget(self.port, true);
        }
    }

    /// The port is abandoned: its parked bios will not be submitted again. Parts do not wait for
    /// the bios that a device does not return.
    pub fn give_up(&mut self) {
        self.is_given_up = true;
        let Some(locks) = &self.locks else { return };
        (0..std::mem::take(&mut self.unlisted)).for_each(|_| locks.unlisted_left());
        locks.forget(self.port, false);
        let parked = self.jobs.values().filter(|job| job.request.is_none());
        for lock in parked.filter_map(|job| job.lock.as_ref()) {
            self.leave(lock);
        }
    }

    /// Lists a bio of whole blocks that enters a target. False: it must wait.
    pub fn admit(&self, bio: &mut Bio) -> bool {
        let Some(locks) = &self.locks else { return true };
        if bio.is_change() && !locks.enter(self.port, bio.offset..bio.end(), false) {
            return false;
        }
        bio.epoch = self.epoch;
        true
    }

    /// A bio that is not a piece has come out of targets, done or parked.
    pub fn came_out(&mut self, bio: &mut Bio) {
        let epoch = std::mem::take(&mut bio.epoch);
        let is_request = bio.part == Part::Request;
        if is_request && bio.note == 0 {
            bio.part = Part::None;
        }
        let Some(locks) = &self.locks else { return };
        if epoch != self.epoch {
            self.unlisted -= 1;
            locks.unlisted_left();
        } else if bio.is_change() && !is_request {
            locks.leave(self.port, bio.offset..bio.end(), false);
        }
    }

    /// Updates the state after bios came out.
    pub fn settle(&mut self) {
        self.update();
    }

    /// Whether a request may begin. If not, it waits until changes are locked.
    pub fn may_begin(&mut self, bio: &Bio) -> bool {
        self.wants_locks |= matches!(bio.op, Op::Write | Op::WriteZeroes) && !self.is_user;
        !self.wants_locks
    }

    /// Begins a request.
    pub fn begin(
        &mut self,
        mut request: Bio,
        block_bytes: u64,
        generation: u64,
        pool: &mut BufferPool,
    ) -> Next {
        (request.part, request.epoch) = (Part::Request, self.epoch);
        let place = self.jobs.insert(Job {
            request: Some(request),
            block_bytes,
            generation,
            done: 0,
            lock: None,
            parked: None,
            block: Buffer::empty(),
        });
        self.is_active = true;
        self.proceed(place, pool)
    }

    /// Continues a request that was parked. An error: it has to begin again.
    pub fn resume(
        &mut self,
        mut request: Bio,
        generation: u64,
        pool: &mut BufferPool,
    ) -> Result<Next, Bio> {
        let place = (request.note - 1) as u32;
        (request.note, request.epoch) = (0, self.epoch);
        let job = self.jobs.value(place);
        job.request = Some(request);
        let parked = job.parked.take();
        if job.generation == generation || mutants::is(Mutant::StalePart) {
            return Ok(match parked {
                Some(bio) if !self.is_locked(place, &bio) => {
                    self.jobs.value(place).parked = Some(bio);
                    self.park(place)
                }
                Some(bio) => Next::Submit(bio),
                None => self.proceed(place, pool),
            });
        }
        if let (Some(bio), Some((Piece::Middle, _))) = (parked, job.piece()) {
            job.take_back(bio.buffer, pool);
        }
        let mut request = self.jobs.remove(place).request.expect("it was just put there");
        (request.part, request.epoch) = (Part::None, 0);
        Err(request)
    }

    /// The bio of a piece is done.
    pub fn piece_done(&mut self, bio: Bio, pool: &mut BufferPool) -> Next {
        let place = bio.token as u32;
        let job = self.jobs.value(place);
        if let Err(status) = bio.status {
            match job.piece() {
                Some((Piece::Middle, _)) => job.take_back(bio.buffer, pool),
                _ => pool.put(bio.buffer),
            }
            return self.finish(place, Err(status), pool);
        }
        if let Some(next) = job.advance(bio, pool) {
            return Next::Submit(next);
        }
        job.done += 1;
        self.unlock(place);
        self.proceed(place, pool)
    }

    /// A target has parked the bio of a piece.
    pub fn piece_parked(&mut self, bio: Bio) -> Next {
        let place = bio.token as u32;
        self.jobs.value(place).parked = Some(bio);
        if mutants::is(Mutant::ParkedUnlocked) {
            self.unlock(place);
        }
        self.park(place)
    }

    /// The bio that a parked request waits for; `None` if it waits for a lock.
    pub fn parked_piece(&self, request: &Bio) -> Option<&Bio> {
        let job = self.jobs.get((request.note - 1) as u32)?;
        job.parked.as_ref()
    }

    /// Whether a parked bio of whole blocks waits for a lock.
    pub fn is_locked_out(&self, bio: &Bio) -> bool {
        let waits = |locks: &Arc<BlockLocks>| locks.is_waiting(self.port, bio.offset..bio.end());
        bio.is_change() && self.locks.as_ref().is_some_and(waits)
    }

    /// Begins the next piece of a request.
    fn proceed(&mut self, place: u32, pool: &mut BufferPool) -> Next {
        let job = self.jobs.value(place);
        let Some((piece, range)) = job.piece() else { return self.finish(place, Ok(()), pool) };
        let (blocks, is_part) = (job.blocks(&range), piece != Piece::Middle);
        if job.request().is_change()
            && let Some(locks) = &self.locks
        {
            if !locks.enter(self.port, blocks.clone(), is_part) {
                return self.park(place);
            }
            job.lock = Some(Lock { epoch: self.epoch, blocks: blocks.clone(), is_part });
        }
        Next::Submit(job.begin(piece, blocks, place.into(), pool))
    }

    /// Whether the piece of a request that was parked may continue. If changes were not locked yet
    /// when it was parked, it needs a lock now.
    fn is_locked(&mut self, place: u32, bio: &Bio) -> bool {
        let Some(locks) = &self.locks else { return true };
        let job = self.jobs.value(place);
        let has_lock = job.lock.as_ref().is_some_and(|lock| lock.epoch == self.epoch);
        if has_lock || !job.request().is_change() {
            return true;
        }
        let blocks = bio.offset..bio.end();
        let is_part = !matches!(job.piece(), Some((Piece::Middle, _)));
        let may_continue = locks.enter(self.port, blocks.clone(), is_part);
        if may_continue {
            job.lock = Some(Lock { epoch: self.epoch, blocks, is_part });
        }
        may_continue
    }

    fn park(&mut self, place: u32) -> Next {
        let request = self.jobs.value(place).request.take();
        let mut request = request.expect("a request is parked once");
        request.note = u64::from(place) + 1;
        Next::Park(request)
    }

    fn finish(&mut self, place: u32, status: Result<(), Status>, pool: &mut BufferPool) -> Next {
        self.unlock(place);
        let job = self.jobs.remove(place);
        pool.put(job.block);
        Next::Finish(job.request.expect("a request ends while it is served"), status)
    }

    fn unlock(&mut self, place: u32) {
        if let Some(lock) = self.jobs.value(place).lock.take() {
            self.leave(&lock);
        }
    }

    fn leave(&self, lock: &Lock) {
        if let Some(locks) = self.locks.as_ref().filter(|_| lock.epoch == self.epoch) {
            locks.leave(self.port, lock.blocks.clone(), lock.is_part);
        }
    }
}
