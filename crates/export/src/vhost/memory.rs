//! A client's memory: the regions that it has shared, by guest addresses and by addresses of the
//! client's process.
//!
//! Every address is untrusted. An access outside the regions, or to a truncated part, is a
//! violation, the only kind of error here.

use std::os::fd::OwnedFd;

use udm::pmem::client_memory::{ClientMemory, Source};
use udm::pmem::copy::SharedBytes;
use udm::sync::Arc;
use udm::units::GIB;

use super::proto::{Region, Violation, wrong};

/// Maximum regions of a client.
pub const REGIONS_MAX: usize = 32;
/// Maximum total bytes of a client's regions, which take addresses of this process.
pub const BYTES_MAX: u64 = 4096 * GIB;

/// The regions, in the order of the guest's addresses. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    regions: Vec<Mapped>,
}

#[derive(Clone, Debug)]
struct Mapped {
    region: Region,
    client_memory: Arc<ClientMemory>,
}

/// A range of memory within one region, checked once.
#[derive(Clone, Debug)]
pub struct Place {
    /// The region's memory.
    pub client_memory: Arc<ClientMemory>,
    /// Offset of the range.
    pub at: u64,
}

impl Place {
    /// Returns an error if a part of the region's memory was truncated.
    #[inline]
    pub fn check(&self) -> Result<(), Violation> {
        check(&self.client_memory)
    }
}

/// Returns an error if a part of `client_memory` was truncated.
#[inline]
pub fn check(client_memory: &ClientMemory) -> Result<(), Violation> {
    if client_memory.has_damage() { wrong("a part of its memory was truncated") } else { Ok(()) }
}

impl Memory {
    /// Number of regions.
    pub fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Adds a region of `file`.
    pub fn add(&mut self, region: Region, file: &OwnedFd) -> Result<(), Violation> {
        let Region { guest, len, user, .. } = region;
        let (Some(end), Some(user_end)) = (guest.checked_add(len), user.checked_add(len)) else {
            return wrong(format!("a region of {len} bytes at {guest:#x} and {user:#x}"));
        };
        if len == 0 {
            return wrong("a region without bytes");
        }
        if self.regions.len() >= REGIONS_MAX {
            return wrong(format!("more than {REGIONS_MAX} regions"));
        }
        let overlaps = |other: &Mapped| {
            let other = other.region;
            let is_guest = guest < other.guest + other.len && other.guest < end;
            is_guest || (user < other.user + other.len && other.user < user_end)
        };
        if self.regions.iter().any(overlaps) {
            return wrong(format!("regions overlap at {guest:#x} or {user:#x}"));
        }
        let bytes: u64 = self.regions.iter().map(|mapped| mapped.region.len).sum();
        if len > BYTES_MAX - bytes {
            return wrong(format!("more than {BYTES_MAX} bytes of memory"));
        }
        let client_memory = ClientMemory::map(file, region.offset, len).map_err(|error| {
            Violation::new(format!("its memory at {guest:#x} cannot be used: {error}"))
        })?;
        let at = self.regions.partition_point(|mapped| mapped.region.guest < guest);
        self.regions.insert(at, Mapped { region, client_memory: Arc::new(client_memory) });
        Ok(())
    }

    /// Removes a region.
    pub fn remove(&mut self, region: Region) -> Result<(), Violation> {
        let is_it = |mapped: &Mapped| {
            let Region { guest, len, user, .. } = mapped.region;
            (guest, len, user) == (region.guest, region.len, region.user)
        };
        let Some(at) = self.regions.iter().position(is_it) else {
            return wrong(format!("there is no region at {:#x} to remove", region.guest));
        };
        self.regions.remove(at);
        Ok(())
    }

    /// Locates `len` bytes at `user`, an address of the client's process. Both that address and the
    /// local one must be multiples of `align`.
    pub fn place(&self, user: u64, len: u64, align: u64) -> Result<Place, Violation> {
        let is_inside = |mapped: &&Mapped| {
            let region = mapped.region;
            let at = user.wrapping_sub(region.user);
            user >= region.user && at < region.len && len <= region.len - at
        };
        let Some(mapped) = self.regions.iter().find(is_inside) else {
            return wrong(format!("{len} bytes of a ring at {user:#x} are outside of its memory"));
        };
        let at = user - mapped.region.user;
        if !user.is_multiple_of(align) || !mapped.client_memory.is_aligned(at, align) {
            return wrong(format!(
                "a part of a ring at {user:#x}, which is not a multiple of {align}"
            ));
        }
        Ok(Place { client_memory: mapped.client_memory.clone(), at })
    }

    /// Whether all `len` bytes at `guest` are in the regions.
    #[inline]
    pub fn has(&self, guest: u64, len: u64) -> bool {
        self.visit(guest, len, |_, _, _, _| Ok(())).is_ok()
    }

    /// Returns a range to copy to, if it is in one region. Call `check` on its memory afterwards.
    #[inline]
    pub fn shared(&self, guest: u64, len: usize) -> Option<(&ClientMemory, SharedBytes<'_>)> {
        let (client_memory, at) = self.in_one(guest, len)?;
        Some((client_memory, client_memory.shared(at, len)))
    }

    /// Returns a range to copy from, if it is in one region. Call `check` on its memory afterwards.
    #[inline]
    pub fn source(&self, guest: u64, len: usize) -> Option<Source<'_>> {
        let (client_memory, at) = self.in_one(guest, len)?;
        Some(client_memory.source(at, len))
    }

    /// Returns the region that contains the whole range, and the range's offset there.
    #[inline]
    fn in_one(&self, guest: u64, len: usize) -> Option<(&ClientMemory, u64)> {
        let after = self.regions.partition_point(|mapped| mapped.region.guest <= guest);
        let mapped = &self.regions[after.checked_sub(1)?];
        let at = guest - mapped.region.guest;
        let is_inside = at < mapped.region.len && len as u64 <= mapped.region.len - at;
        is_inside.then_some((&*mapped.client_memory, at))
    }

    /// Copies the bytes at `guest`.
    #[inline]
    pub fn load(&self, guest: u64, into: &mut [u8]) -> Result<(), Violation> {
        self.visit(guest, into.len() as u64, |client_memory, at, from, to| {
            client_memory.load(at, &mut into[from..to]);
            check(client_memory)
        })
    }

    /// Copies to `guest`.
    #[inline]
    pub fn store(&self, guest: u64, bytes: &[u8]) -> Result<(), Violation> {
        self.visit(guest, bytes.len() as u64, |client_memory, at, from, to| {
            client_memory.store(at, &bytes[from..to]);
            check(client_memory)
        })
    }

    /// Calls `call` for each region's part of the range: its memory, its offset there, and its
    /// start and end within the range.
    #[inline]
    fn visit(
        &self,
        guest: u64,
        len: u64,
        mut call: impl FnMut(&ClientMemory, u64, usize, usize) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let outside = || Violation::new(format!("{len} bytes at {guest:#x} are not in its memory"));
        let mut done = 0;
        while done < len {
            let address = guest.checked_add(done).ok_or_else(outside)?;
            let after = self.regions.partition_point(|mapped| mapped.region.guest <= address);
            let mapped = after.checked_sub(1).map(|at| &self.regions[at]).ok_or_else(outside)?;
            let at = address - mapped.region.guest;
            if at >= mapped.region.len {
                return Err(outside());
            }
            let part = (len - done).min(mapped.region.len - at);
            call(&mapped.client_memory, at, done as usize, (done + part) as usize)?;
            done += part;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memfd(bytes: u64) -> OwnedFd {
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, bytes).unwrap();
        file
    }

    fn region(guest: u64, len: u64, offset: u64) -> Region {
        Region { guest, len, user: guest.wrapping_add(0x7000_0000_0000), offset }
    }

    /// Two adjacent regions in one file, in reverse order, and one in a file of its own.
    fn memory() -> (Memory, OwnedFd) {
        let file = memfd(0x8000);
        let mut memory = Memory::default();
        memory.add(region(0x2000, 0x1000, 0), &file).unwrap();
        memory.add(region(0x1000, 0x1000, 0x4000), &file).unwrap();
        memory.add(region(0x8000, 0x1000, 0x6000), &file).unwrap();
        (memory, file)
    }

    #[test]
    fn a_range_may_cross_regions_that_touch() {
        let (memory, _file) = memory();
        memory.store(0x1ffe, b"abcd").unwrap();
        let mut bytes = [0; 4];
        memory.load(0x1ffe, &mut bytes).unwrap();
        assert_eq!(&bytes, b"abcd");
        assert!(memory.has(0x1000, 0x2000) && memory.has(0x8fff, 1) && memory.has(5, 0));
    }

    #[test]
    fn a_range_that_is_not_all_there_is_refused() {
        let (memory, _file) = memory();
        for (guest, len) in
            [(0, 1), (0xfff, 2), (0x2fff, 2), (0x1000, 0x7001), (0x9000, 1), (u64::MAX, 2)]
        {
            assert!(!memory.has(guest, len), "{guest:#x}+{len:#x}");
            assert!(memory.load(guest, &mut vec![0; len as usize]).is_err());
            assert!(memory.store(guest, &vec![0; len as usize]).is_err());
        }
    }

    #[test]
    fn rings_lie_in_one_region_and_on_their_words() {
        let (memory, _file) = memory();
        let user = 0x7000_0000_0000_u64;
        assert_eq!(memory.place(user + 0x1100, 0x100, 16).unwrap().at, 0x100);
        for (at, len, align) in
            [(0x1ff0, 0x20, 16), (0x1108, 16, 16), (0, 1, 2), (0x1000, u64::MAX, 2)]
        {
            assert!(memory.place(user + at, len, align).is_err(), "{at:#x}");
        }
        // Aligned for the client, but not in this process.
        let mut odd = Memory::default();
        odd.add(Region { offset: 1, ..region(0x1000, 0x1000, 0) }, &memfd(0x4000)).unwrap();
        assert!(odd.place(user + 0x1100, 4, 4).is_err());
    }

    #[test]
    fn regions_that_cannot_be_are_refused() {
        let (mut memory, file) = memory();
        let cases = [
            (region(0x2fff, 0x1000, 0), "overlap"),
            (Region { user: 0x7000_0000_2001, ..region(0x10_0000, 0x10, 0) }, "overlap"),
            (region(0x10_0000, 0, 0), "without bytes"),
            (region(u64::MAX, 2, 0), "2 bytes at"),
            (Region { user: u64::MAX, ..region(0x10_0000, 0x10, 0) }, "16 bytes at"),
            (region(0x10_0000, 0x8001, 0), "not in a file of 32768 bytes"),
            (region(0x10_0000, 0x1000, u64::MAX), "not in a file"),
            (region(0x10_0000, BYTES_MAX, 0), "more than 4398046511104 bytes"),
        ];
        for (region, words) in cases {
            let violation = memory.add(region, &file).unwrap_err();
            assert!(violation.to_string().contains(words), "{violation}");
        }
        assert!(memory.remove(region(0x3000, 0x1000, 0)).is_err());
        memory.remove(region(0x2000, 0x1000, 9)).unwrap();
        assert!(!memory.has(0x2000, 1) && memory.regions() == 2);
        for nth in 2..REGIONS_MAX as u64 {
            memory.add(region(nth << 32, 1, 0), &file).unwrap();
        }
        let violation = memory.add(region(99 << 32, 1, 0), &file).unwrap_err();
        assert_eq!(violation.to_string(), "more than 32 regions");
    }

    #[test]
    fn memory_that_was_cut_off_is_noticed() {
        let (memory, file) = memory();
        let place = memory.place(0x7000_0000_8000, 16, 16).unwrap();
        ftruncate(&file, 0x5000).unwrap();
        memory.store(0x2000, b"still there").unwrap();
        place.check().unwrap();
        let violation = memory.store(0x8000, b"lost").unwrap_err();
        assert_eq!(violation.to_string(), "a part of its memory was truncated");
        assert!(place.check().is_err());
    }
}
