//! The verdict on one state: the real attach, every slot read, everything written back.

use std::sync::Arc;

use udm::bio::{Bio, Op};
use udm::buffer::Buffer;
use udm::disk::DiskIo;
use udm::shm::SharedWords;
use udm::target::Port;
use udm::units::SECOND;

use crate::machine::Origin;
use crate::model::{Model, SECTOR, SLOTS, SPANS, fill, offset_of, stamp_of};
use crate::serving::known_contents;
use crate::sim::SimMedium;
use crate::ssd::is_for_cache;
use crate::subject::{Devices, Kind, Subject, Who};

/// Stands for "whatever the origin has", which no version looks like.
const ORIGIN_MARK: u64 = 0x5EE_0816_1234_5678 & !1;

/// cache: a format by force was cut off, and left a block that is half old metadata and half new,
/// which may be data for all that the next server knows. The same command continues.
pub fn is_torn_format(error: &str) -> bool {
    error.contains("is not empty where a format would write")
}

/// The version that a slot showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    Cached(u64),
    Origin,
}

/// What to look at besides content.
#[derive(Clone, Copy, Debug)]
pub struct Scope {
    /// The machine crashed; else only the process died.
    pub is_power_cut: bool,
    /// The origin alone is consistent.
    pub is_origin_fine: bool,
    /// Also inspect the medium.
    pub inspects: bool,
}

pub struct Judge {
    kind: Arc<dyn Kind>,
    pub devices: Devices,
    other: Arc<Origin>,
    port: Port,
    buffers: Vec<Buffer>,
}

/// The versions that the slots showed.
pub type Verdict = Result<[Shown; SLOTS], String>;

impl Judge {
    pub fn new(kind: &Arc<dyn Kind>, devices: Devices) -> Judge {
        Judge {
            kind: kind.clone(),
            other: Origin::named("other", &devices.sim),
            devices,
            port: Port::new(0),
            buffers: SPANS.iter().map(|(_, len)| Buffer::zeroed(len * SECTOR)).collect(),
        }
    }

    fn open(
        &self,
        origin: &Arc<Origin>,
        attaches: u64,
        is_power_cut: bool,
    ) -> Result<Box<dyn Subject>, String> {
        let mut devices = self.devices.clone();
        devices.origin = origin.clone();
        // After a power failure, shared memory belongs to an earlier boot of the machine.
        let boot = devices.shared.boot() + u64::from(is_power_cut);
        devices.shared = devices.shared.in_boot(boot);
        self.kind.open(devices, attaches, Who::Judge)
    }

    /// Attaches to the state that `sim` stands for and compares all it shows with `model`.
    pub fn state(
        &mut self,
        sim: &Arc<SimMedium>,
        model: &Model,
        scope: Scope,
        attaches: u64,
    ) -> Verdict {
        if scope.inspects {
            self.kind.look(sim, model, scope.is_power_cut)?;
        }
        let subject = match self.open(&self.devices.origin, attaches, scope.is_power_cut) {
            Ok(subject) => subject,
            Err(error) if model.is_formatting && is_torn_format(&error) => {
                let formatted = self.kind.open(self.devices.clone(), attaches, Who::Formatter);
                formatted.map_err(|error| format!("a second format is refused: {error}"))?
            }
            Err(error) => return Err(format!("attach is refused: {error}")),
        };
        if subject.is_origin_consistent() && !scope.is_origin_fine {
            return Err("the recovered cache takes the origin alone for consistent".into());
        }
        let shown = self.read(&*subject)?;
        for (slot, shown) in shown.iter().enumerate() {
            check(model, slot, *shown, scope.is_power_cut)?;
        }
        self.kind.check(&*subject, model)?;
        if subject.is_complete() {
            self.write_back(&*subject, model, &shown, scope.is_power_cut)?;
            return Ok(shown);
        }
        let dirty = shown;
        while !subject.is_complete() {
            subject.tick(0, &mut self.port);
        }
        // Of write-back, which may have begun.
        let held = std::mem::take(&mut self.port.ios);
        let shown = self.read(&*subject)?;
        for (slot, (before, shown)) in dirty.iter().zip(&shown).enumerate() {
            check(model, slot, *shown, scope.is_power_cut)?;
            has_not_changed(model, slot, *before, *shown, scope.is_power_cut)?;
        }
        self.port.ios = held;
        self.write_back(&*subject, model, &shown, scope.is_power_cut)?;
        Ok(shown)
    }

    /// A cache is not attached to an origin that it does not belong to; unless it is empty, and
    /// new or about to be formatted, or of a target that lets empty caches go.
    pub fn other_origin(&mut self, model: &Model, attaches: u64) -> Result<(), String> {
        let opened = self.open(&self.other, attaches, true);
        let Ok(subject) = opened else { return Ok(()) };
        let is_bound = model.is_labelled && self.kind.binds_empty();
        if is_bound || self.read(&*subject)? != [Shown::Origin; SLOTS] {
            return Err("attached to an origin that it does not belong to".into());
        }
        Ok(())
    }

    fn read(&mut self, subject: &dyn Subject) -> Result<[Shown; SLOTS], String> {
        let mut shown = [Shown::Origin; SLOTS];
        let mut slot = 0;
        for span in 0..SPANS.len() {
            let buffer = std::mem::replace(&mut self.buffers[span], Buffer::empty());
            subject.submit(Bio::read(offset_of(slot), buffer, 0), &mut self.port);
            while let Some(mut io) = self.port.ios.pop_front() {
                match is_for_cache(&io) {
                    true => self.devices.ssds.of(&io).carry_out(&mut io),
                    false => fill(io.buffer.as_mut_slice(), ORIGIN_MARK),
                }
                subject.complete(io, &mut self.port);
            }
            let bio = self.port.done.pop_front().ok_or("a read waits")?;
            for sector in bio.buffer.as_slice().chunks(SECTOR) {
                let stamp = stamp_of(sector)
                    .ok_or_else(|| format!("slot {slot} is torn within a sector"))?;
                shown[slot] =
                    if stamp == ORIGIN_MARK { Shown::Origin } else { Shown::Cached(stamp) };
                slot += 1;
            }
            bio.status
                .map_err(|status| format!("a read of slots before {slot} fails: {status}"))?;
            self.buffers[span] = bio.buffer;
        }
        Ok(shown)
    }

    /// Writes everything back; the origin must then be what was shown, and consistent on the way.
    fn write_back(
        &mut self,
        subject: &dyn Subject,
        model: &Model,
        shown: &[Shown; SLOTS],
        is_power_cut: bool,
    ) -> Result<(), String> {
        let mut written = [None; SLOTS];
        subject.set_draining(true);
        let mut now = 0;
        let mut unflushed = false;
        while subject.dirty().bytes > 0 {
            now += SECOND / 10;
            if now > 40 * SECOND {
                return Err("write-back of the recovered cache makes no progress".into());
            }
            subject.tick(now, &mut self.port);
            while let Some(mut io) = self.port.ios.pop_front() {
                if is_for_cache(&io) {
                    self.devices.ssds.of(&io).carry_out(&mut io);
                    subject.complete(io, &mut self.port);
                    continue;
                }
                match io.op {
                    Op::Write => note(&*self.kind, &io, &mut written)?,
                    Op::Flush => unflushed = false,
                    Op::Read => fill(io.buffer.as_mut_slice(), ORIGIN_MARK),
                    op => return Err(format!("write-back does {op:?}")),
                }
                unflushed |= io.op == Op::Write;
                subject.complete(io, &mut self.port);
            }
        }
        if unflushed {
            return Err("write-back ended without a flush of the origin".into());
        }
        for slot in 0..SLOTS {
            let Shown::Cached(stamp) = shown[slot] else {
                if written[slot].is_some() {
                    return Err(format!("write-back wrote slot {slot}, which was not cached"));
                }
                continue;
            };
            let origin = &model.origin[slot];
            let agrees = match written[slot] {
                Some(written) => written == stamp,
                None if is_power_cut => origin.possible().all(|origin| origin == stamp),
                None => origin.visible().all(|origin| origin == stamp),
            };
            if !agrees {
                return Err(format!(
                    "after write-back the origin's slot {slot} is not what was read ({})",
                    if written[slot].is_some() { "written wrongly" } else { "not written" }
                ));
            }
        }
        Ok(())
    }
}

fn note(kind: &dyn Kind, io: &DiskIo, written: &mut [Option<u64>; SLOTS]) -> Result<(), String> {
    for (slot, stamp) in known_contents(kind, io) {
        *written.get_mut(slot).ok_or("write-back wrote a foreign sector")? = Some(stamp);
    }
    Ok(())
}

fn check(model: &Model, slot: usize, shown: Shown, is_power_cut: bool) -> Result<(), String> {
    let why = |what: &str, stamp: u64| {
        let versions = &model.versions[slot];
        let oldest = if is_power_cut { model.flushed[slot] } else { model.done[slot] };
        let kind = if is_power_cut { "flushed" } else { "acknowledged" };
        match versions.iter().rposition(|version| *version == stamp) {
            Some(nth) => format!("{what} slot {slot} shows version {nth}, but {oldest} was {kind}"),
            None => format!("{what} slot {slot} shows foreign data {stamp:#x}"),
        }
    };
    match shown {
        Shown::Cached(stamp) if !model.may_show(slot, stamp, is_power_cut) => {
            Err(why("the cache's", stamp))
        }
        Shown::Cached(_) => Ok(()),
        Shown::Origin => {
            let origin = &model.origin[slot];
            let bad = if is_power_cut {
                origin.possible().find(|stamp| !model.may_show(slot, *stamp, true))
            } else {
                origin.visible().find(|stamp| !model.may_show(slot, *stamp, false))
            };
            bad.map_or(Ok(()), |stamp| Err(why("not cached, the origin's", stamp)))
        }
    }
}

/// Reads before and after the end of the replay return the same data: where the cache had no data
/// yet, the origin has the data that the cache has now; also for data dropped for lack of space.
fn has_not_changed(
    model: &Model,
    slot: usize,
    before: Shown,
    after: Shown,
    is_power_cut: bool,
) -> Result<(), String> {
    let is_same = match (before, after) {
        (Shown::Origin, Shown::Cached(stamp)) | (Shown::Cached(stamp), Shown::Origin) => {
            let origin = &model.origin[slot];
            match is_power_cut {
                true => origin.possible().all(|origin| origin == stamp),
                false => origin.visible().all(|origin| origin == stamp),
            }
        }
        _ => before == after,
    };
    match is_same {
        true => Ok(()),
        false => Err(format!("slot {slot} changes by the replay: {before:?}, then {after:?}")),
    }
}

/// What shared memory holds.
pub fn words(shared: &SharedWords) -> Vec<u64> {
    let words = shared.words().iter();
    words.map(|word| word.load(std::sync::atomic::Ordering::SeqCst)).collect()
}
