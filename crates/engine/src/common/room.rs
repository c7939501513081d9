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
//! **Shares.** When the slow device limits the rate, the background gives out space at that rate
//! ([`throttle`](super::throttle)): in short intervals, each port that asked lately gets an equal
//! share.
//! Shares are added to a *level*. A port whose account has reached the level *backs off*: its bio
//! waits as if the cache was full, until the level rises. A port that did not run in time is below
//! the level and catches up a little, so shares are equal in the long run. A large request may
//! overdraw its port's account; then the port waits until the level has risen above it.
//!
//! A used-up share alone does not fail a bio: when no more space can be freed, ports take the rest,
//! and a bio fails only if it finds no space at all.

use crate::bio::Bio;
use crate::error::Status;
use crate::mutants::{self, Mutant};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::target::{Events, Port};
use crate::units::{KIB, Nanos, SECTOR};

/// A port counts as recent if it asked within this many shares: a port that was woken may still
/// wait for a CPU.
const RECENT: u32 = 32;
/// Ports with an account of their own; ports that are this many numbers apart share one.
const ACCOUNTS: usize = 64;
/// A port that asks again after a pause catches up by this much, or by two shares if that is more.
const CATCH_UP_BYTES: u64 = 32 * KIB;
/// In the note of a bio: it is counted as one that waited. Targets use the other bits.
const WAITED: u64 = 1 << 63;
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
    /// The background gives out the next share at a time of its own: no bio need wake it.
    is_paced: AtomicBool,
    /// Requests that have waited.
    pub(crate) waited: AtomicU64,
    /// Number of shares that were given out.
    shares: AtomicU32,
    /// The limit of all accounts, in sectors; [`NO_LIMIT`] while ports may take all that they find.
    level: AtomicU64,
    /// The last level other than [`NO_LIMIT`].
    last_level: AtomicU64,
    /// Sectors by which a port may catch up.
    catch_up: AtomicU64,
    /// The rest of the last division, in bytes.
    rest: AtomicU64,
    accounts: Box<[Account]>,
}

/// The sectors that a port has taken, and the time when it last asked.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Account {
    /// Sectors, while there was a level.
    taken: AtomicU64,
    /// The value of `shares` when the port asked last.
    asked: AtomicU32,
}

impl Room {
    /// Room that tells `events`.
    pub(crate) fn new(events: &Arc<Events>) -> Room {
        Room {
            events: events.clone(),
            is_wanted: AtomicBool::new(false),
            gives_up: AtomicBool::new(false),
            is_io_error: AtomicBool::new(false),
            is_paced: AtomicBool::new(false),
            waited: AtomicU64::new(0),
            // No port has asked recently.
            shares: AtomicU32::new(2 * RECENT),
            level: AtomicU64::new(NO_LIMIT),
            last_level: AtomicU64::new(0),
            catch_up: AtomicU64::new(CATCH_UP_BYTES / SECTOR),
            rest: AtomicU64::new(0),
            accounts: (0..ACCOUNTS).map(|_| Account::default()).collect(),
        }
    }

    /// Whether a bio waits for room.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::SeqCst)
    }

    /// Whether a bio waits for space to become free, not for its port's share of free space.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.is_wanted() && !self.is_shared()
    }

    /// Parks the bio, unless no more room can be made.
    pub(crate) fn wait(&self, mut bio: Bio, port: &mut Port) {
        if self.gives_up.load(Ordering::Relaxed) {
            let is_io_error = self.is_io_error.load(Ordering::SeqCst);
            let status = if is_io_error { Status::Io } else { Status::NoSpace };
            return port.finish(bio, Err(status));
        }
        if bio.note & WAITED == 0 {
            bio.note |= WAITED;
            self.waited.fetch_add(1, Ordering::Relaxed);
        }
        self.wants(port.id);
        port.parked.push_back(bio);
        if mutants::is(Mutant::WantsRoomLate) {
            self.events.work();
            return self.is_wanted.store(true, Ordering::SeqCst);
        }
        self.is_wanted.store(true, Ordering::SeqCst);
        if !self.is_paced.load(Ordering::SeqCst) {
            self.events.work();
        }
    }

    /// A port has a bio that waits.
    pub(super) fn wants(&self, port: usize) {
        let now = self.shares.load(Ordering::Relaxed);
        self.accounts[port % ACCOUNTS].asked.store(now, Ordering::Relaxed);
    }

    /// Ports that share the room: those that asked lately.
    pub(crate) fn askers(&self) -> u64 {
        let now = self.shares.load(Ordering::Relaxed);
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
        taken < level || self.gives_up.load(Ordering::Relaxed)
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
        let lowest = level.saturating_sub(self.catch_up.load(Ordering::Relaxed));
        account.store(account.load(Ordering::Relaxed).max(lowest) + sectors, Ordering::Relaxed);
    }

    /// There is free space: wakes ports whose bios wait, unless they wait for their shares.
    pub(crate) fn tell(&self) {
        if self.level.load(Ordering::SeqCst) == NO_LIMIT {
            self.wake();
        }
    }

    fn wake(&self) {
        if self.is_wanted() && self.is_wanted.swap(false, Ordering::SeqCst) {
            self.events.room();
        }
    }

    /// Ports that asked lately may take equal shares of `bytes` in addition to earlier ones.
    pub(crate) fn share(&self, bytes: u64) {
        let askers = self.askers().max(1);
        self.shares.fetch_add(1, Ordering::Relaxed);
        let bytes = bytes + self.rest.load(Ordering::Relaxed);
        let share = bytes / askers / SECTOR;
        self.rest.store(bytes - share * askers * SECTOR, Ordering::Relaxed);
        self.catch_up.store((CATCH_UP_BYTES / SECTOR).max(2 * share), Ordering::Relaxed);
        let level = self.last_level.fetch_add(share, Ordering::Relaxed) + share;
        self.level.store(level, Ordering::SeqCst);
        self.wake();
    }

    /// Whether ports may only take their shares.
    pub(crate) fn is_shared(&self) -> bool {
        self.level.load(Ordering::Relaxed) != NO_LIMIT
    }

    /// Ports may take all that they find.
    pub(crate) fn unlimit(&self) {
        self.rest.store(0, Ordering::Relaxed);
        if self.level.swap(NO_LIMIT, Ordering::SeqCst) == NO_LIMIT {
            return;
        }
        // No port begins with a debt when there is a limit again.
        let taken = self.accounts.iter().map(|account| account.taken.load(Ordering::Relaxed));
        self.last_level.fetch_max(taken.max().unwrap_or(0), Ordering::Relaxed);
        self.wake();
    }

    /// The background would give out the next share at `next`. Returns that, if a bio waits for it:
    /// then the background looks again by that time, and bios that wait do not wake it. Otherwise
    /// the next bio that waits wakes the background.
    pub(crate) fn plan(&self, next: Option<Nanos>) -> Option<Nanos> {
        let was_paced = self.is_paced.swap(next.is_some(), Ordering::SeqCst);
        if was_paced && next.is_none() && self.is_wanted() {
            // It may have waited for the share that does not come now.
            self.events.work();
        }
        if next.is_none() || self.is_wanted() {
            return next;
        }
        self.is_paced.store(false, Ordering::SeqCst);
        // A bio may have waited in between.
        next.filter(|_| self.is_wanted())
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
    use crate::units::MIB;

    fn room() -> Room {
        Room::new(&Arc::default())
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

    /// Blocks that a port may take in addition when it did not run in time.
    const LATE: u64 = CATCH_UP_BYTES / 4096;

    #[test]
    fn ports_that_asked_have_equal_shares() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.share(16 * MIB);
        let first = take(&room, 0, 5000);
        assert_eq!((first, take(&room, 3, 1000)), (1024, 1000), "the second wants no more");
        ask(&room, 0);
        room.share(16 * KIB * 4);
        assert_eq!(take(&room, 0, 5000), 4);
        assert_eq!(take(&room, 1, 5000), LATE, "late, and catches up a little");
        assert_eq!(take(&room, 0, 5000), 0);
    }

    #[test]
    fn small_shares_add_up() {
        let room = room();
        (0..3).for_each(|port| ask(&room, port));
        room.share(0);
        for _ in 0..48 {
            (0..3).for_each(|port| ask(&room, port));
            room.share(700);
        }
        let taken: Vec<u64> = (0..3).map(|port| take(&room, port, 100)).collect();
        // 48 times 700 bytes are 8.2 blocks; each may overdraw.
        assert_eq!(taken, [3, 3, 3]);
    }

    #[test]
    fn a_port_that_asks_alone_has_all() {
        let room = room();
        (0..3).for_each(|port| ask(&room, port));
        room.share(MIB);
        // The others ask no more.
        for _ in 0..=RECENT {
            ask(&room, 0);
            room.share(0);
            take(&room, 0, 5000);
        }
        ask(&room, 0);
        room.share(MIB);
        assert_eq!(take(&room, 0, 5000), 256);
        room.unlimit();
        assert_eq!(take(&room, 0, 5000), 5000);
    }

    #[test]
    fn what_is_left_is_for_everybody_when_nobody_makes_room() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.share(MIB);
        take(&room, 0, 5000);
        ask(&room, 0);
        room.give_up(Status::NoSpace);
        assert!(room.may_take(0), "its bio would fail while there is room");
    }

    #[test]
    fn a_request_larger_than_a_share_goes_on() {
        let room = room();
        (0..4).for_each(|port| ask(&room, port));
        room.share(0);
        room.took(1, MIB);
        let mut shares = 0;
        while !room.may_take(1) {
            (0..4).for_each(|port| ask(&room, port));
            room.share(64 * KIB);
            shares += 1;
        }
        assert_eq!(shares, MIB / (16 * KIB) + 1, "its account was overdrawn");
        assert!(room.may_take(2));
    }

    #[test]
    fn free_space_wakes_only_bios_that_wait_for_it() {
        let room = room();
        ask(&room, 0);
        room.share(0);
        ask(&room, 0);
        room.tell();
        assert!(room.is_wanted(), "it waits for its share");
        room.unlimit();
        assert!(!room.is_wanted());
    }

    #[test]
    fn a_request_counts_once_however_often_it_waits() {
        let (room, mut port) = (room(), Port::new(0));
        room.wait(bio(), &mut port);
        for _ in 0..3 {
            let parked = port.parked.pop_front().unwrap();
            room.wait(parked, &mut port);
        }
        room.wait(bio(), &mut port);
        assert_eq!(room.waited.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_bio_wakes_the_background_unless_that_looks_again_soon() {
        let room = room();
        assert_eq!(room.plan(Some(7)), None, "no bio waits");
        assert!(!room.is_paced.load(Ordering::SeqCst));
        ask(&room, 0);
        assert_eq!(room.plan(Some(7)), Some(7));
        assert!(room.is_paced.load(Ordering::SeqCst));
        assert_eq!(room.plan(None), None);
        assert!(!room.is_paced.load(Ordering::SeqCst));
    }
}
