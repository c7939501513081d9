//! The rest of a cache device that was cut short, presented with its old length, to inspect it.
//! Reads of the missing part fail as reads of bad sectors do, so code that can handle bad sectors
//! can also handle a missing part.

use super::{Medium, Pmem};
use crate::error::Status;
use crate::sync::Arc;

/// See the module.
#[derive(Debug)]
pub struct Rest {
    left: Arc<dyn Pmem>,
    left_bytes: u64,
    len_bytes: u64,
}

impl Rest {
    /// `left`, with the length `len_bytes`; unchanged if it has that length.
    pub fn of(left: Arc<dyn Pmem>, len_bytes: u64) -> Arc<dyn Pmem> {
        let left_bytes = left.len_bytes();
        if len_bytes <= left_bytes {
            return left;
        }
        Arc::new(Rest { left, left_bytes, len_bytes })
    }

    /// `whole`, of which only the first `left_bytes` count.
    pub fn of_cut(whole: Arc<dyn Pmem>, left_bytes: u64) -> Arc<dyn Pmem> {
        let len_bytes = whole.len_bytes();
        Arc::new(Rest { left: whole, left_bytes: left_bytes.min(len_bytes), len_bytes })
    }
}

impl Pmem for Rest {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn left_bytes(&self) -> u64 {
        self.left_bytes
    }

    fn was_hole(&self, at: u64, len: u64) -> bool {
        self.left.was_hole(at, len)
    }

    fn hole_at_end(&self) -> Option<u64> {
        self.left.hole_at_end()
    }

    fn medium(&self) -> &Medium {
        self.left.medium()
    }

    fn store(&self, at: u64, _bytes: &[u8]) {
        panic!("a store at byte {at} of a cache device that was cut short");
    }

    fn zero(&self, at: u64, _len: u64) {
        panic!("a store at byte {at} of a cache device that was cut short");
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), Status> {
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.len_bytes);
        assert!(end.is_some(), "{} bytes at {at} of {}", into.len(), self.len_bytes);
        match end {
            Some(end) if end <= self.left_bytes() => self.left.load(at, into),
            _ => Err(Status::Io),
        }
    }

    fn drain(&self) -> Result<(), Status> {
        Ok(())
    }

    fn sync(&self) -> Result<(), Status> {
        Ok(())
    }

    fn failure(&self) -> Option<String> {
        self.left.failure()
    }

    fn is_deleted(&self) -> bool {
        self.left.is_deleted()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Persistence;
    use super::super::sim::SimPmem;
    use super::*;

    #[test]
    fn what_is_gone_cannot_be_read() {
        let left = || Arc::new(SimPmem::from_image(&[7; 8192], Persistence::Cpu));
        let rest = Rest::of(left(), 16384);
        assert_eq!((rest.len_bytes(), rest.left_bytes()), (16384, 8192));
        let mut bytes = [0; 16];
        assert_eq!(rest.load(8176, &mut bytes), Ok(()));
        assert_eq!(bytes, [7; 16]);
        assert_eq!(rest.load(8177, &mut bytes), Err(Status::Io));
        assert_eq!(rest.load(16368, &mut bytes), Err(Status::Io));
        let rest = Rest::of_cut(left(), 4096);
        assert_eq!((rest.len_bytes(), rest.left_bytes()), (8192, 4096));
        assert_eq!(rest.load(4080, &mut bytes), Ok(()));
        assert_eq!(rest.load(4096, &mut bytes), Err(Status::Io));
        let whole = Rest::of(left(), 4096);
        assert_eq!((whole.len_bytes(), whole.left_bytes()), (8192, 8192));
    }
}
