//! zero and error: targets without a device.
//!
//! `zero` reads as zeroes and discards writes. `error` fails every request to its area; a flush
//! does not have an area and succeeds, as in the kernel.

use super::{Location, wrong_count};
use crate::bio::{Bio, Op};
use crate::disk::DiskIo;
use crate::error::{Result, Status};
use crate::table::Word;
use crate::target::{Extent, Port, Target, TargetLimits};
use crate::units::SECTOR;

/// The zero target.
#[derive(Debug)]
pub struct Zero;

impl Zero {
    /// Reads the words after `zero`: there are none.
    pub fn parse(args: &[Word]) -> Result<Zero> {
        if !args.is_empty() {
            return Err(wrong_count(args, 0, "No arguments required"));
        }
        Ok(Zero)
    }
}

impl Target for Zero {
    fn name(&self) -> &'static str {
        "zero"
    }

    fn submit(&self, mut bio: Bio, port: &mut Port) {
        if bio.op == Op::Read {
            bio.buffer.as_mut_slice().fill(0);
        }
        port.finish(bio, Ok(()));
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {
        unreachable!("zero emits no I/O");
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(SECTOR as u32, true)
    }

    fn extent(&self, _offset: u64, len: u64) -> (u64, Extent) {
        (len, Extent::Zeroes)
    }

    fn has_fast_zeroes(&self) -> bool {
        true
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        String::new()
    }
}

/// The words of an error line.
pub const ERROR_WORDS: &str = "[<device> <offset>]";

/// The error target. It may name a device and a sector, which it does not use.
#[derive(Debug)]
pub struct ErrorTarget;

impl ErrorTarget {
    /// Reads the words after `error`.
    pub fn parse(args: &[Word]) -> Result<ErrorTarget> {
        match args {
            [] => {}
            [device, offset] => drop(Location::parse(device, offset)?),
            _ => {
                let message = format!("Invalid argument count: error {ERROR_WORDS}");
                return Err(wrong_count(args, 2, &message));
            }
        }
        Ok(ErrorTarget)
    }
}

impl Target for ErrorTarget {
    fn name(&self) -> &'static str {
        "error"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        let status = if bio.op == Op::Flush { Ok(()) } else { Err(Status::Io) };
        port.finish(bio, status);
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {
        unreachable!("error emits no I/O");
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(SECTOR as u32, false)
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        String::new()
    }
}
