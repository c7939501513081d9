//! What failed last, for each thread: a number for the program, a line for its user.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use udm::error::{Error, Result};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the header. An error becomes a negative errno, and so does a
/// panic, which never leaves the library: a bug of ours is EIO.
pub(crate) fn answer(body: impl FnOnce() -> Result<i32>) -> i32 {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => {
            keep(&error);
            -error.kind().errno()
        }
        Err(_) => {
            keep(&"a bug in libudm: it said more on the standard error output");
            -5
        }
    }
}

fn keep(error: &dyn std::fmt::Display) {
    let text = error.to_string().replace('\0', " ");
    LAST.set(CString::new(text).expect("there is no NUL in it any more"));
}

/// The last error's line; empty if there was none.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}

/// `text` as words for the engine.
pub(crate) fn utf8<'a>(text: &'a CStr, what: &str) -> Result<&'a str> {
    text.to_str()
        .map_err(|_| Error::new(udm::error::Kind::Invalid, format!("{what} is not valid UTF-8")))
}
