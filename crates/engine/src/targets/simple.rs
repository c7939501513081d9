//! The types of the small targets.

use super::WordRole::{Offset, Origin, Other, Unused};
use super::{Features, Opening, Plan, TargetType, boxed};
use crate::error::Result;
use crate::simple::{
    DELAY_WORDS, Delay, DelayArgs, ERROR_WORDS, ErrorTarget, FLAKEY_WORDS, Flakey, FlakeyArgs,
    LINEAR_WORDS, Linear, LinearArgs, Location, Zero,
};
use crate::sync::Arc;
use crate::table::TableLine;
use crate::target::Target;

pub(super) const DELAY: TargetType = TargetType {
    name: "delay",
    version: "1.4.0",
    words: DELAY_WORDS,
    features: Features { is_singleton: false, is_immutable: false },
    roles: &[Origin, Offset, Other, Origin, Offset, Other, Origin, Offset, Other],
    status_fields: &[],
    limits: Vec::new,
    cache: None,
    plan: |words| boxed(DelayArgs::parse(words)),
};

pub(super) const ERROR: TargetType = TargetType {
    name: "error",
    version: "1.7.0",
    words: ERROR_WORDS,
    roles: &[Unused, Other],
    plan: |words| boxed(ErrorTarget::parse(words)),
    ..DELAY
};

pub(super) const FLAKEY: TargetType = TargetType {
    name: "flakey",
    version: "1.5.0",
    words: FLAKEY_WORDS,
    roles: &[Origin, Offset],
    plan: |words| boxed(FlakeyArgs::parse(words)),
    ..DELAY
};

pub(super) const LINEAR: TargetType = TargetType {
    name: "linear",
    version: "1.5.0",
    words: LINEAR_WORDS,
    roles: &[Origin, Offset],
    plan: |words| boxed(LinearArgs::parse(words)),
    ..DELAY
};

pub(super) const ZERO: TargetType = TargetType {
    name: "zero",
    version: "1.2.0",
    words: "",
    roles: &[],
    plan: |words| boxed(Zero::parse(words)),
    ..DELAY
};

impl Plan for DelayArgs {
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        let mut open = |location: &Location| opening.shared(&location.device);
        Ok(Arc::new(Delay::new(self, line.len_bytes(), &mut open)?))
    }
}

impl Plan for ErrorTarget {
    fn open(&self, _: &TableLine, _: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        Ok(Arc::new(ErrorTarget))
    }
}

impl Plan for FlakeyArgs {
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        self.location.device.refuse_seek()?;
        let disk = opening.shared(&self.location.device)?;
        Ok(Arc::new(Flakey::new(self, line.len_bytes(), disk)?))
    }
}

impl Plan for LinearArgs {
    fn open(&self, line: &TableLine, opening: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        self.location.device.refuse_seek()?;
        let disk = opening.shared(&self.location.device)?;
        let linear = Linear::new(self, line.len_bytes(), disk)?;
        linear.settle();
        Ok(Arc::new(linear))
    }
}

impl Plan for Zero {
    fn open(&self, _: &TableLine, _: &mut Opening<'_>) -> Result<Arc<dyn Target>> {
        Ok(Arc::new(Zero))
    }
}
