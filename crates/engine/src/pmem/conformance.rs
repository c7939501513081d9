//! The contract of `Pmem`, checked against a plain array. Run for each implementation.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::copy_target::{CopyTarget, FilePart};
use super::sim::SimPmem;
use super::{Persistence, Pmem};
use crate::base::fingerprint::fingerprint_of;
use crate::pmem::client_memory::ClientMemory;
use crate::prng::Prng;

/// The part of the medium that the suite uses, and a plain array that must stay equal to it.
struct Compared<'a> {
    pmem: &'a dyn Pmem,
    model: Vec<u8>,
    /// Memory that others could use too, and its file.
    shared: ClientMemory,
    file: OwnedFd,
    prng: Prng,
}

/// Bytes on either side of a range that must stay as they were.
const GUARD: usize = 96;

/// Lengths around words, lines and pages; each is extended by 0 to 63 bytes.
const LENGTHS: [usize; 4] = [0, 64, 192, 4096 - 32];

impl Compared<'_> {
    fn store(&mut self, at: usize, len: usize) {
        let mut bytes = vec![0; len];
        self.prng.fill(&mut bytes);
        self.pmem.store(at as u64, &bytes);
        self.model[at..at + len].copy_from_slice(&bytes);
        self.compare(at, len);
    }

    /// A store from memory that other threads could use as well, at any alignment.
    fn store_shared(&mut self, at: usize, len: usize) {
        let mut bytes = vec![0; len];
        self.prng.fill(&mut bytes);
        self.shared.store(3, &bytes);
        let look = self.pmem.store_shared(at as u64, self.shared.shared(3, len));
        assert_eq!(look, fingerprint_of(&bytes), "{at}+{len}");
        self.model[at..at + len].copy_from_slice(&bytes);
        self.compare(at, len);
    }

    fn zero(&mut self, at: usize, len: usize) {
        self.pmem.zero(at as u64, len as u64);
        self.model[at..at + len].fill(0);
        self.compare(at, len);
    }

    /// The range and its guards, by one load, and the range alone.
    fn compare(&self, at: usize, len: usize) {
        self.load(at - GUARD, len + 2 * GUARD);
        self.load(at, len);
    }

    fn load(&self, at: usize, len: usize) {
        let mut found = vec![0xA5; len + 16];
        self.pmem.load(at as u64, &mut found[8..8 + len]).unwrap();
        assert!(found[8..8 + len] == self.model[at..at + len], "{at}+{len} differs");
        assert_eq!([&found[..8], &found[8 + len..]], [[0xA5; 8]; 2], "load writes its range only");
        let whole = [
            CopyTarget::from(self.shared.shared(0, len + 16)),
            CopyTarget::from(FilePart::new(&self.file, 0, len + 16)),
        ];
        for into in whole {
            found.fill(0x5A);
            self.shared.store(0, &found);
            self.pmem.load_shared(at as u64, into.part(8, len)).unwrap();
            self.shared.load(0, &mut found);
            assert!(found[8..8 + len] == self.model[at..at + len], "{at}+{len} differs, {into:?}");
            assert_eq!([&found[..8], &found[8 + len..]], [[0x5A; 8]; 2], "and that its range only");
        }
    }
}

/// Runs the suite on a medium of at least 64 KiB, whose content it overwrites.
pub(super) fn conformance(pmem: &dyn Pmem) {
    let file = memfd_create("conformance", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 128 << 10).unwrap();
    let shared = ClientMemory::map(&file, 0, 128 << 10).unwrap();
    let mut compared =
        Compared { pmem, model: vec![0; 64 << 10], shared, file, prng: Prng::new(1) };
    compared.pmem.zero(0, compared.model.len() as u64);
    for length in LENGTHS {
        for offset in 0..64 {
            for extra in 0..64 {
                let at = 8192 - 128 + offset;
                compared.store(at, length + extra);
                if extra % 2 == offset % 2 {
                    compared.zero(at, length + extra);
                }
            }
        }
        pmem.drain().unwrap();
        pmem.sync().unwrap();
    }
    for _ in 0..200 {
        let at = GUARD + compared.prng.below(20_000) as usize;
        let len = compared.prng.below(20_000) as usize;
        if compared.prng.one_in(3) {
            compared.zero(at, len)
        } else {
            compared.store(at, len)
        }
        pmem.drain().unwrap();
    }
    for len in [512, 1024, 1536, 4096, 4608, 8192, 12_288, 33_280] {
        for offset in (0..64).step_by(8).chain([1, 63, 512]) {
            compared.store_shared(8192 - 128 + offset, len);
            pmem.drain().unwrap();
        }
    }
    compared.load(0, 64 << 10);
    pmem.sync().unwrap();
    ends_are_guarded(pmem);
}

/// The last byte can be reached, the next one is our bug.
fn ends_are_guarded(pmem: &dyn Pmem) {
    let len = pmem.len_bytes();
    pmem.store(len - 1, &[1]);
    pmem.store(len, &[]);
    pmem.zero(len - 8, 8);
    pmem.load(len - 8, &mut [0; 8]).unwrap();
    pmem.load(len, &mut []).unwrap();
    let panics = |call: &dyn Fn()| catch_unwind(AssertUnwindSafe(call)).is_err();
    for at in [len - 7, len, u64::MAX - 7, u64::MAX] {
        assert!(panics(&|| pmem.store(at, &[0; 8])), "store at {at}");
        assert!(panics(&|| pmem.zero(at, 8)), "zero at {at}");
        assert!(panics(&|| pmem.load(at, &mut [0; 8]).unwrap()), "load at {at}");
    }
}

#[test]
fn the_malicious_twin_conforms() {
    for persistence in [Persistence::Cpu, Persistence::Msync] {
        let sim = SimPmem::new(1 << 20, persistence);
        conformance(&sim);
        sim.drain().unwrap();
        sim.sync().unwrap();
        assert_eq!(sim.snapshot_durable().image(), sim.image());
    }
}
