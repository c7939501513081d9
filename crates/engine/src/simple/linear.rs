//! linear: a range of the mapped device is a range of another one.
//!
//! `linear <device> <offset>`. The kernel's `dm-linear`.

use super::{Carrier, Location, Mapping, wrong_count};
use crate::bio::{Bio, Op};
use crate::disk::{Disk, DiskIo};
use crate::error::Result;
use crate::sync::Arc;
use crate::table::Word;
use crate::target::{Events, Extent, Fact, Health, Port, Target, TargetLimits, pacing_facts};
use crate::units::Nanos;

/// The words of a linear line.
pub const LINEAR_WORDS: &str = "<device> <offset>";

/// The arguments of a linear line.
#[derive(Clone, Debug)]
pub struct LinearArgs {
    /// The location that the line maps to.
    pub location: Location,
}

impl LinearArgs {
    /// Reads the words after `linear`.
    pub fn parse(args: &[Word]) -> Result<LinearArgs> {
        let [device, offset] = args else {
            let message = format!("Invalid argument count: linear {LINEAR_WORDS}");
            return Err(wrong_count(args, 2, &message));
        };
        Ok(LinearArgs { location: Location::parse(device, offset)? })
    }
}

/// The linear target.
#[derive(Debug)]
pub struct Linear {
    mapping: Mapping,
    carrier: Carrier,
}

impl Linear {
    /// Maps `len` bytes to `disk`, which `args` names.
    pub fn new(args: &LinearArgs, len: u64, disk: Arc<dyn Disk>) -> Result<Linear> {
        Ok(Linear {
            mapping: Mapping::new(&args.location, len, disk)?,
            carrier: Carrier::default(),
        })
    }

    /// Flushes what an earlier server may have written: it may have died before its clients could
    /// flush. If the disk refuses, a suspend tries again.
    pub fn settle(&self) {
        let disk = &self.mapping.disk;
        let flushed = disk.carry_out(vec![DiskIo::bare(disk, Op::Flush, 0, 0, 0)]);
        if flushed.iter().any(|io| io.result.is_err()) {
            self.carrier.rest.note(Op::Write);
        }
    }
}

impl Target for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        self.carrier.send(bio, &self.mapping, port);
    }

    fn complete(&self, io: DiskIo, port: &mut Port) {
        if let Some(bio) = self.carrier.complete(io, port) {
            port.done.push_back(bio);
        }
    }

    fn tick(&self, _now: Nanos, port: &mut Port) -> Option<Nanos> {
        self.carrier.tick(&self.mapping, port);
        None
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(self.carrier.rest.events())
    }

    fn losses(&self) -> u64 {
        self.mapping.losses()
    }

    fn extent(&self, offset: u64, len: u64) -> (u64, Extent) {
        self.mapping.extent(offset, len)
    }

    fn health(&self) -> Health {
        self.mapping.health()
    }

    fn facts(&self) -> Vec<Fact> {
        pacing_facts(&*self.mapping.disk)
    }

    fn limits(&self) -> TargetLimits {
        self.mapping.limits()
    }

    fn is_read_only(&self) -> bool {
        self.mapping.disk.is_read_only()
    }

    fn suspend(&self) -> Result<()> {
        self.carrier.rest.begin();
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.carrier.rest.is_idle()
    }

    fn is_durable(&self) -> bool {
        self.carrier.rest.is_durable()
    }

    fn resume(&self) -> Result<()> {
        self.carrier.rest.resume();
        Ok(())
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        self.mapping.words()
    }
}
