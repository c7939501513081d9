//! The last error of each thread: an errno for the program, a line for its user.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};

use udm::error::{Error, Kind, Result};

use crate::forked;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the header. An error becomes a negative errno. A panic is a bug
/// of the library; it becomes EIO and never leaves the library.
pub(crate) fn answer(body: impl FnOnce() -> Result<i32>) -> i32 {
    match catch_unwind(AssertUnwindSafe(|| {
        forked::refuse()?;
        body()
    })) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => {
            keep(&error);
            -error.kind().errno()
        }
        Err(_) => {
            keep(&"a bug in libudm: see the details on standard error");
            -5
        }
    }
}

fn keep(error: &dyn std::fmt::Display) {
    let text = error.to_string().replace('\0', " ");
    LAST.set(CString::new(text).expect("NUL characters were replaced"));
}

/// Returns the last error's line; empty if there was none.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// Converts `text` for the engine.
pub(crate) fn utf8<'a>(text: &'a CStr, what: &str) -> Result<&'a str> {
    text.to_str().map_err(|_| Error::new(Kind::Invalid, format!("{what} is not valid UTF-8")))
}

/// The error for a NULL pointer.
pub(crate) fn missing(what: &str) -> Error {
    Error::new(Kind::Invalid, format!("{what} is NULL"))
}

/// Returns an error if `flags` has bits that are not in `known`.
pub(crate) fn only_flags(flags: c_uint, known: c_uint) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::new(Kind::Invalid, format!("flag {unknown:#x} is not known"))),
    }
}
