//! Memory for direct I/O: the program's own, or, where the environment has LAB_MEMORY=FILE, parts
//! of that file, so that a server that has mapped it too sees what is read and written.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, OnceLock};

const PAGE: usize = 4096;

// SAFETY: as the C library of Linux on 64 bits has it.
unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        len: usize,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        from: i64,
    ) -> *mut c_void;
}

/// The part of the file that is not in use.
static REST: OnceLock<Mutex<&'static mut [u8]>> = OnceLock::new();

/// Whole pages for as many bytes, which are taken for good.
pub fn take(bytes: usize) -> io::Result<&'static mut [u8]> {
    let whole = bytes.next_multiple_of(PAGE);
    let Some(path) = std::env::var_os("LAB_MEMORY") else {
        let own = vec![0; whole + PAGE].leak();
        let skip = own.as_ptr().align_offset(PAGE);
        return Ok(&mut own[skip..][..bytes]);
    };
    let mut rest = match REST.get() {
        Some(rest) => rest,
        None => {
            let mapped = map(&path)?;
            REST.get_or_init(|| Mutex::new(mapped))
        }
    }
    .lock()
    .expect("threads do not panic with this lock");
    let all = std::mem::take(&mut *rest);
    if all.len() < whole {
        return Err(io::Error::other("LAB_MEMORY is too short"));
    }
    let (part, left) = all.split_at_mut(whole);
    *rest = left;
    Ok(&mut part[..bytes])
}

fn map(path: &std::ffi::OsStr) -> io::Result<&'static mut [u8]> {
    const READ_AND_WRITE: c_int = 3;
    const SHARED: c_int = 1;
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let len = file.metadata()?.len() as usize;
    // SAFETY: a new mapping, which is never unmapped. Another process that has mapped the file
    // stores only into the target of a read call of this program, as a device would.
    unsafe {
        let at = mmap(std::ptr::null_mut(), len, READ_AND_WRITE, SHARED, file.as_raw_fd(), 0);
        if at.addr() == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        Ok(std::slice::from_raw_parts_mut(at.cast(), len))
    }
}
