//! Children of fork: a device's threads exist only in the parent, and the inherited rings and files
//! belong to the parent. A child that used them would take the parent's completions, or wait for a
//! thread that it does not have.

#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use udm::error::{Error, Kind, Result};

/// Whether this process is a child of one that had opened a device.
static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Marks all future children of this process.
pub(crate) fn watch() -> Result<()> {
    static ONCE: Once = Once::new();
    let mut failed = 0;
    // SAFETY: the function only stores to static memory.
    ONCE.call_once(|| failed = unsafe { libc::pthread_atfork(None, None, Some(in_child)) });
    match failed {
        0 => Ok(()),
        errno => {
            let source = std::io::Error::from_raw_os_error(errno);
            Err(Error::from_io("watching for", "fork", source))
        }
    }
}

/// Returns an error in a child.
pub(crate) fn refuse() -> Result<()> {
    if !IS_CHILD.load(Ordering::Relaxed) {
        return Ok(());
    }
    let what = "this process was forked after udm_open or udm_connect: devices stay with the \
                parent; call exec first, or open devices only after the fork";
    Err(Error::new(Kind::Invalid, what))
}
