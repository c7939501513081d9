//! Maps the pages of a cache device in memory in the background, while the first requests are
//! already served. A page fault costs as much as a request, and mapping all of a large device
//! before the first request would take seconds.

use std::time::Duration;

use crate::pmem::Pmem;
use crate::pmem::dax::DaxPmem;
use crate::ring::give_way;
use crate::sync::Arc;
use crate::units::KIB;

/// Mapped in one call of about 80 us, during which no thread can start and no memory be allocated.
const STEP_BYTES: u64 = 256 * KIB;
/// The first request comes first.
const BEGIN_AFTER: Duration = Duration::from_millis(100);

/// Starts a thread that maps all pages of `pmem`. It ends when all pages are mapped, or when the
/// device is closed. If the thread cannot be started, requests work but are slower.
pub fn prefault(pmem: &Arc<DaxPmem>) {
    let len = pmem.len_bytes();
    let pmem = Arc::downgrade(pmem);
    let body = move || {
        std::thread::sleep(BEGIN_AFTER);
        // Clients come first.
        give_way();
        for at in (0..len).step_by(STEP_BYTES as usize) {
            let Some(pmem) = pmem.upgrade() else { return };
            pmem.prefault(at, STEP_BYTES.min(len - at));
        }
    };
    let _ = std::thread::Builder::new().name("udm-prefault".into()).spawn(body);
}
