//! Signals: wakes the background when there is work, and waiting bios when there is free space.

use crate::bio::Bio;
use crate::common::room::Room;
use crate::common::wakeup::Wakeup;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use crate::target::{Events, Port};

/// Rings once for each segment taken.
#[derive(Debug, Default)]
struct Notifier {
    /// Segments in use when it last rang; 0: not recently.
    told: AtomicU32,
}

impl Notifier {
    fn is_news(&self, used: u32) -> bool {
        self.told.load(Ordering::Relaxed) != used && self.told.swap(used, Ordering::Relaxed) != used
    }

    fn forget(&self) {
        self.told.store(0, Ordering::Relaxed);
    }
}

/// The bells of a cache.
#[derive(Debug)]
pub(super) struct Signals {
    events: Arc<Events>,
    wakeup: Wakeup,
    room: Room,
    /// With this many segments in use, enough may be dirty that write-back has to begin.
    filled_from: u32,
    filled: Notifier,
    /// Few segments are free.
    short: Notifier,
    /// A write did a piece of collection.
    helped: Notifier,
    /// Recently, writes waited for write-back alone.
    is_origin_limiting: AtomicBool,
}

impl Signals {
    /// For a cache of `segments` segments with `room_bytes` bytes of space, of which
    /// `high_watermark` percent may be dirty.
    pub(super) fn new(segments: u32, room_bytes: u64, high_watermark: u32) -> Signals {
        let events = Arc::default();
        Signals {
            wakeup: Wakeup::new(&events),
            room: Room::new(&events, room_bytes),
            events,
            filled_from: (u64::from(segments) * u64::from(high_watermark) / 100) as u32,
            filled: Notifier::default(),
            short: Notifier::default(),
            helped: Notifier::default(),
            is_origin_limiting: AtomicBool::new(false),
        }
    }

    pub(super) fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(super) fn wakeup(&self) -> &Wakeup {
        &self.wakeup
    }

    pub(super) fn room(&self) -> &Room {
        &self.room
    }

    /// Wakes the background now.
    pub(super) fn work(&self) {
        self.events.work();
    }

    /// Wakes the background. While a bio waits for space, a key that was added since the last check
    /// may be the only one that takes that space, so the background is woken in any case.
    pub(super) fn arm(&self) {
        self.wakeup.arm(self.room.is_wanted());
    }

    /// `used` segments are in use. Wakes the background once for each such number if write-back or
    /// collection may have to begin, and always while bios wait for space. `is_short`: collection
    /// should begin.
    pub(super) fn note_used(&self, used: u32, is_short: bool) {
        let is_news = is_short && self.short.is_news(used);
        let is_filled = used >= self.filled_from && self.filled.is_news(used);
        if is_filled || is_news || self.room.is_wanted() {
            self.work();
        }
    }

    /// Whether a write should do a piece of collection: once for each segment taken.
    pub(super) fn is_help_due(&self, used: u32) -> bool {
        self.helped.is_news(used)
    }

    /// Collection is done: re-arms the bells.
    pub(super) fn note_collected(&self) {
        self.short.forget();
        self.helped.forget();
    }

    /// The bio waits for room.
    pub(super) fn wait(&self, bio: Bio, port: &mut Port) {
        self.room.wait(bio, port);
    }

    /// Sets whether the backing device limits the rate of writes.
    pub(super) fn set_origin_limiting(&self, is_limiting: bool) {
        self.is_origin_limiting.store(is_limiting, Ordering::Relaxed);
    }

    /// There are `bytes` bytes of room: wakes the bios that wait.
    pub(super) fn tell_room(&self, bytes: u64) {
        if bytes > 0 {
            self.room.hope();
        }
        if bytes > 0 || self.room.has_stepped_back() {
            self.room.tell(bytes, self.is_origin_limiting.load(Ordering::Relaxed));
        }
    }
}
