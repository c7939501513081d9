//! Signals: wakes the background when there is work, and waiting bios when there is free space.

use crate::bio::Bio;
use crate::common::room::Room;
use crate::common::wakeup::Wakeup;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU32, Ordering};
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
}

impl Signals {
    /// For a cache of `segments` segments, of which `high_watermark` percent may be dirty.
    pub(super) fn new(segments: u32, high_watermark: u32) -> Signals {
        let events = Arc::default();
        Signals {
            wakeup: Wakeup::new(&events),
            room: Room::new(&events),
            events,
            filled_from: (u64::from(segments) * u64::from(high_watermark) / 100) as u32,
            filled: Notifier::default(),
            short: Notifier::default(),
            helped: Notifier::default(),
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
        self.wakeup.arm(self.room.is_short());
    }

    /// `used` segments are in use. Wakes the background once for each such number if write-back or
    /// collection may have to begin, and always while bios wait for space. `is_short`: collection
    /// should begin.
    pub(super) fn note_used(&self, used: u32, is_short: bool) {
        let is_news = is_short && self.short.is_news(used);
        let is_filled = used >= self.filled_from && self.filled.is_news(used);
        if is_filled || is_news || self.room.is_short() {
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

    /// There is room: wakes the bios that wait for it.
    pub(super) fn tell_room(&self) {
        self.room.hope();
        self.room.tell();
    }
}
