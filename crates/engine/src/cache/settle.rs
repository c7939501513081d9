//! The flushes of a suspend. Writes that bypassed the cache are in no transaction, and perhaps no
//! client will flush them: an orderly end makes them durable.

use crate::disk::DiskIo;
use crate::mutants::{self, Mutant};
use crate::target::Port;

use super::{Cache, TOKEN_SETTLED, waits};

/// The flushes of one suspend, of the cache device and of the origin.
#[derive(Debug, Default)]
pub(super) struct Settling {
    has_begun: bool,
    /// In flight.
    in_flight: [bool; 2],
    /// The marks that the flushes cover.
    marks: [u64; 2],
}

impl Settling {
    /// Whether none is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight == [false; 2]
    }

    /// The device that one of them waits for.
    pub(super) fn waits_for(&self) -> Option<&'static str> {
        let awaited = self.in_flight.iter().zip([waits::CACHE, waits::ORIGIN]);
        awaited.filter(|(is_awaited, _)| **is_awaited).map(|(_, device)| device).next()
    }
}

impl Cache {
    /// Flushes the devices that have writes that may not be durable, once for each suspend. Returns
    /// whether a flush is in flight.
    pub(super) fn begin_settling(&self, settling: &mut Settling, port: &mut Port) -> bool {
        if std::mem::replace(&mut settling.has_begun, true) {
            return false;
        }
        for (nth, side) in [&self.cache, &self.origin].into_iter().enumerate() {
            if side.owes_flush() && !mutants::is(Mutant::RestedUnflushed) {
                settling.marks[nth] = side.mark();
                settling.in_flight[nth] = true;
                port.ios.push_back(side.flush(TOKEN_SETTLED | nth as u64));
            }
        }
        !settling.is_idle()
    }

    /// A flush of a suspend is back.
    pub(super) fn end_settling(&self, settling: &mut Settling, io: &DiskIo) {
        let nth = (io.token & 1) as usize;
        settling.in_flight[nth] = false;
        [&self.cache, &self.origin][nth].flushed(settling.marks[nth], io.result);
        match (nth, io.result) {
            (0, Err(_)) => self.lose(),
            (_, Err(_)) => self.doubt(),
            _ => {}
        }
    }
}
