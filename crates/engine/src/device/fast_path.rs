//! The fast path of a request: the target tries to copy directly from or to the client's memory. If
//! it cannot, the request gets memory for a bio.

use super::Device;
use crate::buffer::BufferPool;
use crate::pmem::client_memory::Source;
use crate::pmem::copy_target::CopyTarget;
use crate::target::Port;

/// See the module.
#[derive(Debug)]
pub struct FastPath<'a> {
    /// Memory for bios.
    pub pool: &'a mut BufferPool,
    port: usize,
    device: &'a Device,
}

impl<'a> FastPath<'a> {
    pub(super) fn new(device: &'a Device, port: &'a mut Port) -> FastPath<'a> {
        FastPath { pool: &mut port.pool, port: port.id, device }
    }

    /// See [`Device::read_into`].
    #[inline]
    pub fn read_into(&self, offset: u64, into: CopyTarget<'_>) -> bool {
        self.device.read_into(offset, into, self.port)
    }

    /// See [`Device::write_from`].
    #[inline]
    pub fn write_from(&self, offset: u64, from: Source<'_>, fua: bool) -> bool {
        self.device.write_from(offset, from, fua, self.port)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::super::tests::Deaf;
    use super::super::{Driver, LoadedTable};
    use super::*;
    use crate::bio::{Bio, Op};
    use crate::disk::DiskIo;
    use crate::pmem::client_memory::ClientMemory;
    use crate::sync::{Arc, Mutex, lock};
    use crate::table::Table;
    use crate::target::{Target, TargetLimits};

    /// A target that can serve every request by a copy.
    #[derive(Debug, Default)]
    struct Ready(Mutex<Vec<(u64, usize)>>);

    impl Target for Ready {
        fn name(&self) -> &'static str {
            "ready"
        }

        fn submit(&self, bio: Bio, port: &mut Port) {
            port.finish(bio, Ok(()));
        }

        fn read_into(&self, offset: u64, into: CopyTarget<'_>, _port: usize) -> bool {
            lock(&self.0).push((offset, into.len()));
            into.store(&vec![7; into.len()])
        }

        fn write_from(&self, offset: u64, from: Source<'_>, fua: bool, port: usize) -> bool {
            let mut bytes = [0];
            from.part(0, 1).bytes().load(&mut bytes);
            assert!(bytes == [7] && fua && from.is_whole(), "{bytes:?}");
            lock(&self.0).push((offset, from.bytes().len()));
            port < 64
        }

        fn complete(&self, _io: DiskIo, _port: &mut Port) {
            unreachable!("emits no I/O");
        }

        fn limits(&self) -> TargetLimits {
            TargetLimits::new(512, false)
        }

        fn status(&self) -> String {
            String::new()
        }

        fn table(&self) -> String {
            String::new()
        }
    }

    #[test]
    fn what_is_copied_in_place_is_in_one_line_of_a_device_that_serves() {
        for is_read in [true, false] {
            ranges_that_are_served(is_read);
        }
    }

    fn ranges_that_are_served(is_read: bool) {
        let file = memfd_create("intake", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 64 << 20).unwrap();
        let memory = ClientMemory::map(&file, 0, 64 << 20).unwrap();
        let targets: [Arc<Ready>; 2] = Default::default();
        let table = Table::parse("0 8 ready\n8 131072 ready").unwrap();
        let table = LoadedTable::new(&table, targets.iter().map(|t| t.clone() as _).collect());
        let device = Device::with_table("ready", table).unwrap();
        let mut driver = Driver::new(&device, Arc::new(Deaf)).unwrap();
        let mut read = |offset, len| match is_read {
            true => driver.intake().read_into(offset, memory.shared(0, len).into()),
            false => driver.intake().write_from(offset, memory.source(0, len), true),
        };
        if !is_read {
            memory.store(0, &[7]);
        }
        assert!(read(512, 1024) && read(4096, 4096));
        let mut bytes = [0; 2];
        memory.load(4095, &mut bytes);
        assert_eq!(bytes, [if is_read { 7 } else { 0 }, 0]);
        for (offset, len) in [(0, 8192), (0, 0), (100, 512), (512, 100), (0, 40 << 20)] {
            assert!(!read(offset, len), "{offset}+{len}");
        }
        let end = 131_080 * 512;
        assert!(read(end - 512, 512) && !read(end - 512, 1024) && !read(end, 512));
        assert!(!read(4096, 33 << 20), "longer than any bio");
        assert!(!read(u64::MAX - 511, 512));
        device.begin_suspend().unwrap();
        assert!(!read(512, 1024), "suspended");
        let seen = targets.each_ref().map(|target| std::mem::take(&mut *lock(&target.0)));
        assert_eq!(seen, [vec![(512, 1024)], vec![(0, 4096), (end - 4096 - 512, 512)]]);
    }

    #[test]
    fn writes_take_a_bio_while_blocks_are_locked() {
        let file = memfd_create("intake", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        let memory = ClientMemory::map(&file, 0, 4096).unwrap();
        memory.store(0, &[7]);
        let target = Arc::new(Ready::default());
        let table = LoadedTable::single(target, 1 << 20);
        let device = Device::with_table("ready", table).unwrap();
        let drivers = || Driver::new(&device, Arc::new(Deaf)).unwrap();
        let (mut driver, mut other) = (drivers(), drivers());
        let mut writes = || driver.intake().write_from(0, memory.source(0, 4096), true);
        assert!(writes());
        let mut bio = Bio::bare(Op::WriteZeroes, 100, 1, false, 1);
        bio.allows_parts = true;
        other.submit(bio);
        assert!(!writes());
        let mut read = || driver.intake().read_into(0, memory.shared(0, 512).into());
        assert!(read(), "a read does not change blocks");
        other.retry_parked();
        assert!(other.pop_done().unwrap().status.is_ok());
        drop(other);
        let mut writes = || driver.intake().write_from(0, memory.source(0, 4096), true);
        memory.store(0, &[7]);
        assert!(writes());
    }
}
