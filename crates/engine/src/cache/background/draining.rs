//! The orders to drain, and to stop draining.

use crate::cache::Cache;

impl Cache {
    /// See `Target::set_draining`.
    pub(in crate::cache) fn order_drain(&self, is_draining: bool) {
        let mut agenda = self.background.lock();
        agenda.is_older = !agenda.is_idle();
        if is_draining {
            agenda.end_pause();
        }
        let mut blocks = self.blocks();
        blocks.slots.await_dirty(is_draining);
        if is_draining {
            blocks.slots.aside.end_pauses();
        }
        drop(blocks);
        self.orders.set_draining(is_draining);
        drop(agenda);
        self.events.work();
    }

    /// See [`Target::left_to_drain`](crate::target::Target::left_to_drain).
    pub(in crate::cache) fn bytes_to_drain(&self) -> u64 {
        u64::from(self.blocks().slots.to_drain()) * self.plan.block_bytes
    }
}
