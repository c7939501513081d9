//! Changes of a device's state: load, clear, suspend, resume, remove.
//!
//! Each change visits all ports, one lock at a time. A port that is suspending parks every bio from
//! then on. So once each port's count has been seen at 0, no bio is inside a target.

use super::table::{Active, LoadedTable};
use super::{Device, DeviceState};
use crate::error::{Error, Kind, Result};
use crate::sync::{Arc, lock};
use crate::table::Table;
use crate::targets;

impl Device {
    /// Whether `table` may be loaded now. Called before its devices are opened.
    pub fn check_load(&self, table: &Table) -> Result<()> {
        let names = table.lines.iter().map(|line| line.target.text.as_str());
        self.check_load_of(names)
    }

    /// Puts `table` into the inactive slot, replacing the table there; resume activates it.
    pub fn load(&self, table: LoadedTable) -> Result<()> {
        let _change = lock(&self.change);
        self.check_load_of(table.names()).inspect_err(|_| table.detach())?;
        let replaced = lock(&self.slots).inactive.replace(table);
        replaced.iter().for_each(LoadedTable::detach);
        Ok(())
    }

    /// Empties the inactive slot.
    pub fn clear(&self) {
        let replaced = lock(&self.slots).inactive.take();
        replaced.iter().for_each(LoadedTable::detach);
    }

    fn check_load_of<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> Result<()> {
        let slots = lock(&self.slots);
        let Some(active) = &slots.active else { return Ok(()) };
        let is_immutable = |name: &&str| targets::features(name).is_immutable;
        let found = active.lines().iter().map(|line| line.target.name()).find(is_immutable);
        if let Some(name) = found.or_else(|| names.find(is_immutable)) {
            let message = format!(
                "{}: a table is active, and {name} cannot replace a table or be replaced: remove \
                 the device and create it again",
                slots.name
            );
            return Err(Error::new(Kind::Unsupported, message));
        }
        Ok(())
    }

    /// From now on new bios are parked. Poll [`Device::finish_suspend`] until it returns true.
    pub fn begin_suspend(&self) -> Result<()> {
        let _change = lock(&self.change);
        {
            let mut slots = lock(&self.slots);
            match slots.state {
                DeviceState::Active => slots.state = DeviceState::Suspending,
                DeviceState::Suspending | DeviceState::Suspended => return Ok(()),
                DeviceState::Empty => {
                    let message = format!("{}: no table is active", slots.name);
                    return Err(Error::new(Kind::Invalid, message));
                }
            }
        }
        for cell in &self.seats {
            lock(&cell.0).set_suspended(true);
        }
        Ok(())
    }

    /// Whether no bio is inside a target. While suspending, once true it stays true.
    pub fn is_quiet(&self) -> bool {
        self.seats.iter().all(|cell| lock(&cell.0).in_flight() == 0)
    }

    /// Continues a suspend that has begun; true once no bio and no I/O is in flight. Drivers
    /// continue to complete I/O and to tick in the meantime. After an error the device keeps its
    /// state; `resume` takes the suspend back.
    pub fn finish_suspend(&self) -> Result<bool> {
        let _change = lock(&self.change);
        let (active, mut suspended) = {
            let slots = lock(&self.slots);
            match (slots.state, &slots.active) {
                (DeviceState::Suspending, Some(active)) => (active.clone(), slots.suspended_lines),
                (DeviceState::Suspended, _) => return Ok(true),
                _ => {
                    let message = format!("{}: suspend has not begun", slots.name);
                    return Err(Error::new(Kind::Invalid, message));
                }
            }
        };
        if !self.is_quiet() {
            return Ok(false);
        }
        while let Some(line) = active.lines().get(suspended) {
            line.target.suspend().map_err(|error| error.at(self.name()))?;
            suspended += 1;
            lock(&self.slots).suspended_lines = suspended;
        }
        if !active.lines().iter().all(|line| line.target.is_idle()) {
            return Ok(false);
        }
        lock(&self.slots).state = DeviceState::Suspended;
        Ok(true)
    }

    /// Serves bios again; parked ones are retried. A loaded table becomes the active one; if the
    /// device is already active, it must be suspended before. If the loaded table cannot become
    /// active, it is dropped, and the device stays suspended with its present table.
    pub fn resume(&self) -> Result<()> {
        let _change = lock(&self.change);
        let mut slots = lock(&self.slots);
        let has_inactive = slots.inactive.is_some();
        match slots.state {
            DeviceState::Active if !has_inactive => return Ok(()),
            DeviceState::Active | DeviceState::Suspending if has_inactive => {
                let message =
                    format!("{}: suspend the device before changing its table", slots.name);
                return Err(Error::new(Kind::Busy, message));
            }
            DeviceState::Empty if !has_inactive => {
                let message = format!("{}: no table is loaded", slots.name);
                return Err(Error::new(Kind::Invalid, message));
            }
            _ => {}
        }
        if let Some(table) = slots.inactive.take() {
            let old = slots.active.clone();
            drop(slots);
            let table =
                take_effect(table, old.as_deref()).map_err(|error| error.at(self.name()))?;
            old.iter().flat_map(|old| old.lines()).for_each(|line| line.target.detach());
            let active = Arc::new(table.activate(&self.events));
            self.set_table(Some(active), DeviceState::Active);
        } else {
            drop(slots);
            self.serve_on()?;
        }
        self.events.room();
        // The background may have missed work while it was suspended.
        self.events.work();
        Ok(())
    }

    /// Takes a suspend back, whether it is complete or not: the active table serves bios again,
    /// even if another one is loaded.
    pub fn cancel_suspend(&self) -> Result<()> {
        let _change = lock(&self.change);
        if matches!(lock(&self.slots).state, DeviceState::Active | DeviceState::Empty) {
            return Ok(());
        }
        self.serve_on()?;
        self.events.room();
        self.events.work();
        Ok(())
    }

    /// Takes the active table's targets out of suspension, then the ports.
    fn serve_on(&self) -> Result<()> {
        let (active, suspended) = {
            let slots = lock(&self.slots);
            (slots.active.clone(), slots.suspended_lines)
        };
        let lines = active.as_ref().map_or(&[][..], |active| active.lines());
        for index in (0..suspended).rev() {
            lines[index].target.resume().map_err(|error| error.at(self.name()))?;
            lock(&self.slots).suspended_lines = index;
        }
        lock(&self.slots).state = DeviceState::Active;
        for cell in &self.seats {
            lock(&cell.0).set_suspended(false);
        }
        Ok(())
    }

    /// Drops the tables and all devices under them. Parked and later bios fail. The device must be
    /// suspended, or never have been active. Returns whether the next attach can find out that
    /// another program has changed an origin meanwhile.
    pub fn remove(&self) -> Result<bool> {
        let _change = lock(&self.change);
        {
            let slots = lock(&self.slots);
            if matches!(slots.state, DeviceState::Active | DeviceState::Suspending) {
                let message = format!("{}: the device is active; suspend it first", slots.name);
                return Err(Error::new(Kind::Busy, message));
            }
        }
        self.clear();
        let old = lock(&self.slots).active.clone();
        let lines = || old.iter().flat_map(|old| old.lines());
        lines().for_each(|line| line.target.detach());
        let are_marked = lines().all(|line| line.target.is_origin_marked());
        drop(old);
        self.set_table(None, DeviceState::Empty);
        self.events.room();
        Ok(are_marked)
    }

    /// Replaces the active table, first in the slot, then in each port.
    fn set_table(&self, active: Option<Arc<Active>>, state: DeviceState) {
        let generation = {
            let mut slots = lock(&self.slots);
            slots.active = active.clone();
            slots.state = state;
            slots.suspended_lines = 0;
            slots.generation += 1;
            slots.generation
        };
        for cell in &self.seats {
            lock(&cell.0).set_table(active.clone(), generation);
        }
    }
}

/// The table that serves after `old`, if there is one.
fn take_effect(mut table: LoadedTable, old: Option<&Active>) -> Result<LoadedTable> {
    let lines = old.map_or(&[][..], Active::lines);
    let handed_over = lines.iter().try_for_each(|line| line.target.hand_over());
    handed_over.and_then(|()| table.take_effect()).inspect_err(|_| table.detach())?;
    Ok(table)
}
