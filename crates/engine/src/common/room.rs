//! Waiting for free space in a full cache: which bios wait, which are woken, and how much space
//! each port gets.
//!
//! A bio that finds no free space is parked in its port, and the background is woken to free some.
//! When there is free space, every listener is woken, and each port submits its parked bios again.
//!
//! **No wake-up is lost.** A bio is parked before `is_wanted` is set, and the background is woken
//! after that. So a tick that finds no waiting bio is followed by another tick. `tell` clears
//! `is_wanted` first; a bio that is parked afterwards sets it again.
//!
//! **Shares.** When the slow device limits the rate, space is freed in large pieces, and the thread
//! that runs first would take a whole piece while others wait for the next one. So if several ports
//! asked recently, each may take an equal share. Shares are added to a *level*. A port whose
//! account has reached the level *backs off*: its bio waits as if the cache was full. The
//! background wakes it again at its next tick, when the other ports have had their turn. A port
//! that did not run in time is below the level and catches up, so shares are equal in the long run.
//! No limit applies to a port that alone has asked for a while.
//!
//! A used-up share alone does not fail a bio: when no more space can be freed, ports take the rest,
//! and a bio fails only if it finds no space at all.

use crate::bio::Bio;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::target::{Events, Port};
use crate::units::{KIB, MIB, SECTOR};

/// A port counts as recent if it asked within this many calls of `tell`: a port that was woken may
/// still wait for a CPU.
const RECENT: u32 = 32;
/// Ports with an account of their own; ports that are this many numbers apart share one.
const ACCOUNTS: usize = 64;
/// The rest of a piece is given out in shares of this size, but of no more than this part (1 / n)
/// of the cache: each back-off costs a tick of the background.
const REST_BYTES: u64 = 256 * KIB;
const REST_PART: u64 = 64;
/// A large request may overdraw its port's account by this many small shares: its port may then get
/// no space for that many calls of `tell`.
const OVERDRAFT: u64 = 8;
/// A port that asks again after a pause catches up by this much at most, and by no more than this
/// part (1 / n) of the cache.
const CATCH_UP_BYTES: u64 = 32 * MIB;
const CATCH_UP_PART: u64 = 8;
/// The level while ports may take what they find.
const NO_LIMIT: u64 = u64::MAX;

/// Which bios wait for room, and what each port may take.
#[derive(Debug)]
pub(crate) struct Room {
    events: Arc<Events>,
    is_wanted: AtomicBool,
    /// No more room can be made: bios that find none fail.
    gives_up: AtomicBool,
    /// A device fails, so waiting bios get EIO. Otherwise the cache is full, and they get ENOSPC.
    is_io_error: AtomicBool,
    has_stepped_back: AtomicBool,
    /// Requests that have waited.
    pub(crate) waited: AtomicU64,
    /// Number of calls of [`Room::tell`] that found bios waiting.
    told: AtomicU32,
    /// The limit of all accounts, in sectors; [`NO_LIMIT`] while ports may take all that they find.
    level: AtomicU64,
    /// The last level other than [`NO_LIMIT`].
    last_level: AtomicU64,
    /// In bytes, as is the next one.
    catch_up: u64,
    share_of_rest: u64,
    accounts: Box<[Account]>,
}

/// The sectors that a port has taken, and the time when it last asked.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Account {
    /// Sectors, while there was a level.
    taken: AtomicU64,
    /// The value of `told` when the port asked last.
    asked: AtomicU32,
}

impl Room {
    /// For a cache that has room for this many bytes in all.
    pub(crate) fn new(events: &Arc<Events>, bytes: u64) -> Room {
        Room {
            catch_up: CATCH_UP_BYTES.min(bytes / CATCH_UP_PART),
            share_of_rest: REST_BYTES.min(bytes / REST_PART).max(SECTOR),
            events: events.clone(),
            is_wanted: AtomicBool::new(false),
            gives_up: AtomicBool::new(false),
            is_io_error: AtomicBool::new(false),
            has_stepped_back: AtomicBool::new(false),
            waited: AtomicU64::new(0),
            // No port has asked recently.
            told: AtomicU32::new(2 * RECENT),
            level: AtomicU64::new(NO_LIMIT),
            last_level: AtomicU64::new(0),
            accounts: (0..ACCOUNTS).map(|_| Account::default()).collect(),
        }
    }

    /// Whether a bio waits for room.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }

    /// Parks the bio, unless no more room can be made.
    pub(crate) fn wait(&self, bio: Bio, port: &mut Port) {
        if self.gives_up.load(Ordering::Relaxed) {
            let is_io_error = self.is_io_error.load(Ordering::SeqCst);
            let status = if is_io_error { Status::Io } else { Status::NoSpace };
            return port.finish(bio, Err(status));
        }
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.note_asker(port.id);
        port.parked.push_back(bio);
        if mutants::is(Mutant::WantsRoomLate) {
            self.events.work();
            return self.is_wanted.store(true, Ordering::SeqCst);
        }
        self.is_wanted.store(true, Ordering::SeqCst);
        self.events.work();
    }

    fn note_asker(&self, port: usize) {
        let now = self.told.load(Ordering::Relaxed);
        self.accounts[port % ACCOUNTS].asked.store(now, Ordering::Relaxed);
    }

    /// Ports that share the room.
    fn crowd(&self, now: u32) -> u64 {
        let is_recent =
            |account: &&Account| now.wrapping_sub(account.asked.load(Ordering::Relaxed)) <= RECENT;
        self.accounts.iter().filter(is_recent).count() as u64
    }

    /// Whether a port may take space. If not, its bio must wait: the port backs off.
    #[inline]
    pub(crate) fn may_take(&self, port: usize) -> bool {
        let level = self.level.load(Ordering::Relaxed);
        level == NO_LIMIT || self.is_below(level, port)
    }

    #[cold]
    fn is_below(&self, level: u64, port: usize) -> bool {
        let taken = self.accounts[port % ACCOUNTS].taken.load(Ordering::Relaxed);
        let may_take = taken < level || self.gives_up.load(Ordering::Relaxed);
        if !may_take {
            self.has_stepped_back.store(true, Ordering::SeqCst);
        }
        may_take
    }

    /// A port has taken `bytes` of room.
    #[inline]
    pub(crate) fn took(&self, port: usize, bytes: u64) {
        let level = self.level.load(Ordering::Relaxed);
        if level != NO_LIMIT {
            self.charge(level, port, bytes.div_ceil(SECTOR));
        }
    }

    #[cold]
    fn charge(&self, level: u64, port: usize, sectors: u64) {
        let account = &self.accounts[port % ACCOUNTS].taken;
        let lowest = level.saturating_sub(self.catch_up / SECTOR);
        let highest = level + OVERDRAFT * self.share_of_rest / SECTOR;
        let taken = account.load(Ordering::Relaxed).max(lowest) + sectors;
        account.store(taken.min(highest), Ordering::Relaxed);
    }

    /// Whether a port stepped back although there was room.
    pub(crate) fn has_stepped_back(&self) -> bool {
        self.has_stepped_back.load(Ordering::SeqCst)
    }

    /// Wakes ports whose bios wait. There are `bytes` of free space, in addition to the space that
    /// ports left when they backed off. `is_limited`: further space is freed only as fast as the
    /// slow device takes data.
    pub(crate) fn tell(&self, bytes: u64, is_limited: bool) {
        if self.is_wanted() && self.is_wanted.swap(false, Ordering::SeqCst) {
            self.has_stepped_back.store(false, Ordering::SeqCst);
            self.divide(bytes, is_limited);
            self.events.room();
        }
    }

    /// Raises the level by an equal share for each port.
    fn divide(&self, bytes: u64, is_limited: bool) {
        let now = self.told.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let crowd = self.crowd(now);
        if crowd < 2 || !is_limited {
            return self.level.store(NO_LIMIT, Ordering::Relaxed);
        }
        let share = match bytes {
            0 => self.share_of_rest / SECTOR,
            _ => (bytes / crowd / SECTOR).max(1),
        };
        let level = self.last_level.fetch_add(share, Ordering::Relaxed) + share;
        self.level.store(level, Ordering::Relaxed);
    }

    /// No more space can be freed. Waiting bios are tried again, and fail with `why`: `Io` or
    /// `NoSpace`.
    pub(crate) fn give_up(&self, why: Status) {
        self.is_io_error.store(why == Status::Io, Ordering::SeqCst);
        if self.is_wanted() && !self.gives_up.swap(true, Ordering::SeqCst) {
            self.events.room();
        }
    }

    /// A success that may lead to free space: bios may wait again.
    pub(crate) fn hope(&self) {
        if self.gives_up.load(Ordering::Relaxed) {
            self.gives_up.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;

    fn room() -> Room {
        Room::new(&Arc::default(), 64 * MIB)
    }

    fn bio() -> Bio {
        Bio::write(0, Buffer::from_bytes(&[0; 512]), false, 0)
    }

    fn ask(room: &Room, port: usize) {
        room.wait(bio(), &mut Port::new(port));
    }

    /// Takes blocks for a port until it has to back off, or has `most`.
    fn take(room: &Room, port: usize, most: u64) -> u64 {
        let takes = |_: &u64| {
            let may_take = room.may_take(port);
            room.took(port, if may_take { 4096 } else { 0 });
            may_take
        };
        (0..most).take_while(takes).count() as u64
    }

    #[test]
    fn ports_that_asked_have_equal_shares() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.tell(16 * MIB, true);
        assert_eq!(take(&room, 0, 5000), 1024);
        assert_eq!(take(&room, 3, 1000), 1000, "below its share");
        ask(&room, 0);
        assert!(room.has_stepped_back());
        // The rest is given out in small shares until the other ports had time to ask.
        room.tell(0, true);
        assert_eq!(take(&room, 0, 5000), REST_BYTES / 4096);
        assert_eq!(take(&room, 3, 5000), 24 + 64, "the rest of its share, and the new share");
        assert_eq!(take(&room, 1, 5000), 1024 + 64, "late, and has all of its share");
    }

    #[test]
    fn a_port_that_asks_alone_has_no_limit() {
        let room = room();
        ask(&room, 0);
        room.tell(MIB, true);
        assert_eq!(take(&room, 0, 5000), 5000);
        (0..3).for_each(|port| ask(&room, port));
        room.tell(MIB, true);
        assert!(take(&room, 0, 5000) < 100);
        // The others ask no more.
        for _ in 0..=RECENT {
            ask(&room, 0);
            room.tell(0, true);
        }
        assert_eq!(take(&room, 0, 5000), 5000);
    }

    #[test]
    fn nothing_is_divided_while_room_comes_at_the_speed_of_memory() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.tell(MIB, false);
        assert_eq!(take(&room, 0, 5000), 5000);
    }

    #[test]
    fn what_is_left_is_for_everybody_when_nobody_makes_room() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.tell(MIB, true);
        take(&room, 0, 5000);
        ask(&room, 0);
        room.give_up(Status::NoSpace);
        assert!(room.may_take(0), "its bio would fail while there is room");
    }

    #[test]
    fn a_request_larger_than_a_share_goes_on() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.tell(MIB, true);
        assert_eq!(take(&room, 1, 1), 1);
        room.took(1, 32 * MIB);
        for _ in 0..=OVERDRAFT {
            assert!(!room.may_take(1), "its account is overdrawn");
            ask(&room, 1);
            room.tell(0, true);
        }
        assert!(room.may_take(1), "but not indefinitely");
        assert!(room.may_take(2));
    }
}
