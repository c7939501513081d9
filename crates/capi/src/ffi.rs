//! The functions of `udm.h`.
//!
//! Each one checks its pointers for NULL and its thread, and catches panics. What else a pointer
//! may be, only the program knows: that is the contract of the header.

#![allow(unsafe_code)]
#![allow(non_camel_case_types, reason = "names of C")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::time::Duration;

use udm::bio::Op;
use udm::error::{Error, Kind, Result};
use udm::sync::Arc;
use udm::volume::{Options, Volume};
use udm_export::vhost::{Uri, front::Front};

use crate::errors::{answer, last, utf8};
use crate::queue::{Completed, Queue, Way};

/// A flag of udm_open: format the cache device even if it may hold something else.
pub const UDM_FORCE_FORMAT: c_uint = 1;
/// A flag of a write, or of zeroes: complete only when it is durable.
pub const UDM_FUA: c_uint = 1;
/// Most bytes of one request.
pub const UDM_REQUEST_BYTES_MAX: u64 = 33_554_432;
/// Most requests of one queue in flight.
pub const UDM_REQUESTS_MAX: c_uint = 4096;

/// A mapped device, in this process or of a server. Its functions may be called by any thread.
#[derive(Debug)]
pub struct udm_device {
    way: Reached,
}

/// Where a device is.
#[derive(Debug)]
enum Reached {
    Here(Volume),
    Served(Arc<Front>),
}

/// Requests of one thread: the one that made it uses it, and ends it.
#[derive(Debug)]
pub struct udm_queue {
    queue: Queue,
    thread: usize,
}

/// What became of a request.
#[derive(Debug)]
#[repr(C)]
pub struct udm_completion {
    /// As it was given with the request.
    pub user_data: u64,
    /// 0, or a negative errno: EIO, EINVAL (not whole blocks, or beyond the device's end), ENOSPC
    /// (a write beyond the end), EROFS, EOPNOTSUPP, ETIMEDOUT.
    pub result: c_int,
    /// 0.
    pub reserved: u32,
}

/// A piece of memory, as `struct iovec`.
#[derive(Debug)]
#[repr(C)]
pub struct udm_iovec {
    /// Its first byte.
    pub base: *mut c_void,
    /// Its bytes.
    pub len: usize,
}

/// A number that is this thread's alone, as long as it lives.
fn this_thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.with(|mark| std::ptr::from_ref(mark).addr())
}

fn missing(what: &str) -> Error {
    Error::new(Kind::Invalid, format!("{what} is NULL"))
}

/// # Safety
///
/// `text` is NULL, or a string that ends.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, so it ends, as the caller says.
    utf8(unsafe { CStr::from_ptr(text) }, what).map(Some)
}

/// # Safety
///
/// `device` is NULL, or came from udm_open or udm_connect and was not closed.
unsafe fn device<'a>(device: *const udm_device) -> Result<&'a udm_device> {
    // SAFETY: as the caller says.
    unsafe { device.as_ref() }.ok_or_else(|| missing("the device"))
}

/// # Safety
///
/// `queue` is NULL, or came from udm_queue_create and was not destroyed.
unsafe fn queue<'a>(queue: *mut udm_queue) -> Result<&'a mut Queue> {
    // SAFETY: as the caller says. Another thread's queue is only asked for the number that says so,
    // which nobody ever changes.
    if unsafe { queue.is_null() || (*queue).thread != this_thread() } {
        let wrong = "a queue is used by the thread that made it, and by no other";
        return Err(match queue.is_null() {
            true => missing("the queue"),
            false => Error::new(Kind::Invalid, wrong),
        });
    }
    // SAFETY: it is this thread's, which runs one function at a time.
    Ok(unsafe { &mut (*queue).queue })
}

/// The version of the library, as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn udm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// One line about what failed last in this thread; never NULL. It is valid until the thread's next
/// call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn udm_error() -> *const c_char {
    last()
}

/// Opens the devices that `table` names (lines as for `dmsetup create`; paths are relative to the
/// current directory) and serves them in this process. `name` is for messages.
///
/// `memory` is a folder that exists, for what must survive this process: when it dies, what it
/// had acknowledged is found by the next one that names the same folder, as long as the machine is
/// not restarted. With NULL, what was acknowledged and not flushed dies with the process.
///
/// A cache device that holds nothing is formatted. One that may hold something else is refused
/// (EPERM), unless `flags` has UDM_FORCE_FORMAT.
///
/// Returns 0 and the device, which udm_close ends; or a negative errno.
///
/// # Safety
///
/// Strings are NULL or end with a NUL; `device` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_open(
    name: *const c_char,
    table: *const c_char,
    memory: *const c_char,
    flags: c_uint,
    device: *mut *mut udm_device,
) -> c_int {
    answer(|| {
        // SAFETY: the header's contract.
        let (name, table, memory) = unsafe {
            (text(name, "the name")?, text(table, "the table")?, text(memory, "the folder")?)
        };
        let name = name.ok_or_else(|| missing("the name"))?;
        let table = table.ok_or_else(|| missing("the table"))?;
        if device.is_null() {
            return Err(missing("the place for the device"));
        }
        only_flags(flags, UDM_FORCE_FORMAT)?;
        let options = memory.map_or_else(Options::without_memory, Options::with_memory_in);
        let is_forced = flags & UDM_FORCE_FORMAT != 0;
        let options = if is_forced { options.force_format() } else { options };
        let volume = Volume::open(name, table, &options)?;
        let opened = Box::into_raw(Box::new(udm_device { way: Reached::Here(volume) }));
        // SAFETY: not NULL, so it may be written.
        unsafe { *device = opened };
        Ok(0)
    })
}

/// Connects to a server of vhost-user-blk: `udm create --export`, or one of another kind. `uri` is
/// "vhost-user:///PATH". udm_reap looks at the memory that it shares with the server before it
/// sleeps, as long as that pays and at most a tenth of the time in vain; with "?poll=never" after
/// the path it sleeps immediately, with "?poll=always" never. `flags` is 0.
///
/// Everything else is as with udm_open, but: udm_status fails (EOPNOTSUPP), a request may have at
/// most as many bytes as the server takes (31.5 MiB if it is udm; more ends with EINVAL), UDM_FUA
/// takes a flush of its own. If the server dies, udm_reap waits for the next one there, 30 s or
/// "?reconnect=SECONDS", and it does what was not answered, once more. If none comes, all requests
/// end with EIO: then end the queues and the device, and connect again.
///
/// Returns 0 and the device, which udm_close ends; or a negative errno.
///
/// # Safety
///
/// `uri` is NULL or ends with a NUL; `device` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_connect(
    uri: *const c_char,
    flags: c_uint,
    device: *mut *mut udm_device,
) -> c_int {
    answer(|| {
        // SAFETY: the header's contract.
        let uri = unsafe { text(uri, "the URI")? }.ok_or_else(|| missing("the URI"))?;
        if device.is_null() {
            return Err(missing("the place for the device"));
        }
        only_flags(flags, 0)?;
        let front = Front::connect(&uri.parse::<Uri>()?)?;
        let made = Box::into_raw(Box::new(udm_device { way: Reached::Served(front) }));
        // SAFETY: not NULL, so it may be written.
        unsafe { *device = made };
        Ok(0)
    })
}

/// Ends a device: what was acknowledged is durable in its cache or on its origin. Waits up to 30
/// seconds for requests in flight, and returns a negative errno if they do not come back. The
/// device is gone in any case; requests of queues that are left fail. A server's device goes on
/// without this program. NULL is nothing to end.
///
/// # Safety
///
/// `device` is NULL, or came from udm_open or udm_connect, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_close(device: *mut udm_device) -> c_int {
    answer(|| {
        if device.is_null() {
            return Ok(0);
        }
        // SAFETY: it came from `Box::into_raw` in udm_open, and this is its last use.
        let opened = unsafe { Box::from_raw(device) };
        match opened.way {
            Reached::Here(volume) => volume.close().map(|()| 0),
            Reached::Served(_) => Ok(0),
        }
    })
}

/// Bytes of the device; 0 for NULL.
///
/// # Safety
///
/// `device` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_size(device: *const udm_device) -> u64 {
    // SAFETY: the header's contract.
    unsafe { self::device(device) }.map_or(0, |device| match &device.way {
        Reached::Here(volume) => volume.device().size_bytes(),
        Reached::Served(front) => front.facts().size_bytes,
    })
}

/// The device's block in bytes, 512 or 4096 for most: requests are multiples of it, in place and
/// length, or end with EINVAL. 0 for NULL.
///
/// # Safety
///
/// `device` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_block_bytes(device: *const udm_device) -> u32 {
    // SAFETY: the header's contract.
    let device = unsafe { self::device(device) };
    device.map_or(0, |device| match &device.way {
        Reached::Here(volume) => volume.device().limits().block_bytes,
        Reached::Served(front) => front.facts().block_bytes,
    })
}

/// The status lines of the device, as `dmsetup status` prints them, each with a newline. At most
/// `len` bytes, the last of them NUL, are written to `buffer`. Returns how many bytes the text has
/// without its NUL (if that is `len` or more, it was cut), or a negative errno.
///
/// # Safety
///
/// `device` is NULL or open; `buffer` has `len` bytes, or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_status(
    device: *const udm_device,
    buffer: *mut c_char,
    len: usize,
) -> c_int {
    answer(|| {
        // SAFETY: the header's contract.
        let device = unsafe { self::device(device)? };
        let Reached::Here(volume) = &device.way else {
            let message = "the device is a server's, which says its status: udm status NAME";
            return Err(Error::new(Kind::Unsupported, message));
        };
        let text: String =
            volume.device().status().iter().map(|line| format!("{line}\n")).collect();
        if !buffer.is_null() && len > 0 {
            let count = text.len().min(len - 1);
            // SAFETY: `buffer` has `len` bytes, which is more than `count`.
            unsafe {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), count);
                *buffer.add(count) = 0;
            }
        }
        Ok(c_int::try_from(text.len()).unwrap_or(c_int::MAX))
    })
}

/// Makes a queue for the calling thread. A device has at most 255 at a time; one of a server, as
/// many as that says, and 16 at most (EBUSY).
///
/// Returns 0 and the queue, which udm_queue_destroy ends; or a negative errno.
///
/// # Safety
///
/// `device` is NULL or open; `queue` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_queue_create(
    device: *const udm_device,
    queue: *mut *mut udm_queue,
) -> c_int {
    answer(|| {
        // SAFETY: the header's contract.
        let device = unsafe { self::device(device)? };
        if queue.is_null() {
            return Err(missing("the place for the queue"));
        }
        let way = match &device.way {
            Reached::Here(volume) => Way::Local(Box::new(volume.caller()?)),
            Reached::Served(front) => Way::Served(Box::new(front.queue()?)),
        };
        let made = Queue::new(way);
        let made = Box::new(udm_queue { queue: made, thread: this_thread() });
        // SAFETY: not NULL, so it may be written.
        unsafe { *queue = Box::into_raw(made) };
        Ok(0)
    })
}

/// Ends a queue, on the thread that made it. Waits until the disks have answered what is in flight;
/// how it ended is not said, and reads that were not reaped leave their memory as it was. NULL
/// is nothing to end.
///
/// # Safety
///
/// `queue` is NULL, or came from udm_queue_create, and this is its last use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_queue_destroy(queue: *mut udm_queue) -> c_int {
    answer(|| {
        if queue.is_null() {
            return Ok(0);
        }
        // SAFETY: the header's contract; this checks the thread.
        unsafe { self::queue(queue)? };
        // SAFETY: it came from `Box::into_raw` in udm_queue_create, and this is its last use.
        drop(unsafe { Box::from_raw(queue) });
        Ok(0)
    })
}

/// A file descriptor for a program's own loop (poll, epoll): it is readable when there may be
/// something to reap. Then call udm_reap with `min` 0 until it returns less than `max`. It belongs
/// to the queue, which reads it itself. Before the first call a request that is answered
/// immediately costs no system call, from then on it costs one.
///
/// Returns the file descriptor, or a negative errno.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_queue_fd(queue: *mut udm_queue) -> c_int {
    use std::os::fd::AsRawFd;
    // SAFETY: the header's contract.
    answer(|| Ok(unsafe { self::queue(queue)? }.fd()?.as_raw_fd()))
}

fn only_flags(flags: c_uint, known: c_uint) -> Result<()> {
    match flags & !known {
        0 => Ok(()),
        unknown => Err(Error::new(Kind::Invalid, format!("flag {unknown:#x} is not known"))),
    }
}

/// Reads `len` bytes at byte `offset`, both multiples of the device's block, into `buffer`.
///
/// This and all other requests return 0, and are completed later by udm_reap with their
/// `user_data`; or a negative errno, and nothing follows: EINVAL (NULL, no bytes, not whole
/// sectors, too many bytes, unknown flags, another thread) or EBUSY (UDM_REQUESTS_MAX are in
/// flight). Memory of a request stays valid and untouched until it was reaped, or its queue
/// destroyed. A server (udm_connect) sees a request immediately if it has no other of this queue;
/// of several it may see the last seven only with the next udm_reap, unless udm_queue_fd was
/// called.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread; `buffer` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_read(
    queue: *mut udm_queue,
    offset: u64,
    buffer: *mut c_void,
    len: usize,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    let piece = udm_iovec { base: buffer, len };
    // SAFETY: the header's contract.
    unsafe { udm_readv(queue, offset, &raw const piece, 1, user_data, flags) }
}

/// Writes `len` bytes at byte `offset`, both multiples of the device's block, from `buffer`.
/// `flags` may be UDM_FUA.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread; `buffer` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_write(
    queue: *mut udm_queue,
    offset: u64,
    buffer: *const c_void,
    len: usize,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    let piece = udm_iovec { base: buffer.cast_mut(), len };
    // SAFETY: the header's contract. What is written from is never written to.
    unsafe { udm_writev(queue, offset, &raw const piece, 1, user_data, flags) }
}

/// As udm_read, into `count` pieces, one after the other. The array itself may be reused when this
/// returns.
///
/// # Safety
///
/// As udm_read; `pieces` has `count` pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_readv(
    queue: *mut udm_queue,
    offset: u64,
    pieces: *const udm_iovec,
    count: c_int,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    answer(|| {
        only_flags(flags, 0)?;
        // SAFETY: the header's contract.
        unsafe { transfer(queue, Op::Read, offset, (pieces, count), user_data, false) }
    })
}

/// As udm_write, from `count` pieces, one after the other. The array itself may be reused when this
/// returns.
///
/// # Safety
///
/// As udm_write; `pieces` has `count` pieces.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_writev(
    queue: *mut udm_queue,
    offset: u64,
    pieces: *const udm_iovec,
    count: c_int,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    answer(|| {
        only_flags(flags, UDM_FUA)?;
        let fua = flags & UDM_FUA != 0;
        // SAFETY: the header's contract.
        unsafe { transfer(queue, Op::Write, offset, (pieces, count), user_data, fua) }
    })
}

/// # Safety
///
/// As udm_readv and udm_writev.
unsafe fn transfer(
    queue: *mut udm_queue,
    op: Op,
    offset: u64,
    (pieces, count): (*const udm_iovec, c_int),
    user_data: u64,
    fua: bool,
) -> Result<i32> {
    // SAFETY: as the caller says.
    let queue = unsafe { self::queue(queue)? };
    if pieces.is_null() {
        return Err(missing("the list of pieces"));
    }
    let count = usize::try_from(count)
        .map_err(|_| Error::new(Kind::Invalid, "the number of pieces is negative"))?;
    queue.transfer(op, offset, fua, user_data, |memory| {
        (0..count).all(|at| {
            // SAFETY: there are `count` pieces, and each is valid as long as `Memory` needs it.
            unsafe {
                let piece = &*pieces.add(at);
                memory.add(piece.base.cast(), piece.len)
            }
        })
    })?;
    Ok(0)
}

/// Makes durable what was completed before this was called.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_flush(queue: *mut udm_queue, user_data: u64, flags: c_uint) -> c_int {
    answer(|| {
        only_flags(flags, 0)?;
        // SAFETY: the header's contract.
        unsafe { self::queue(queue)? }.bare(Op::Flush, 0, 0, false, user_data)?;
        Ok(0)
    })
}

/// The range is not needed any more; it reads as zeroes afterwards.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_discard(
    queue: *mut udm_queue,
    offset: u64,
    len: u64,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    answer(|| {
        only_flags(flags, 0)?;
        // SAFETY: the header's contract.
        unsafe { self::queue(queue)? }.bare(Op::Discard, offset, len, false, user_data)?;
        Ok(0)
    })
}

/// Makes a range read as zeroes. `flags` may be UDM_FUA.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_write_zeroes(
    queue: *mut udm_queue,
    offset: u64,
    len: u64,
    user_data: u64,
    flags: c_uint,
) -> c_int {
    answer(|| {
        only_flags(flags, UDM_FUA)?;
        let fua = flags & UDM_FUA != 0;
        // SAFETY: the header's contract.
        unsafe { self::queue(queue)? }.bare(Op::WriteZeroes, offset, len, fua, user_data)?;
        Ok(0)
    })
}

/// Takes completions: those that are there, at most `max`; if they are less than `min`, waits for
/// more, at most `timeout_ns` nanoseconds, or without an end if that is negative. The order is that
/// in which requests end.
///
/// Returns how many there are, or a negative errno: EINVAL if `min` is more than `max`, or than
/// what is in flight.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread; `completions` has room for `max`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_reap(
    queue: *mut udm_queue,
    completions: *mut udm_completion,
    min: c_int,
    max: c_int,
    timeout_ns: i64,
) -> c_int {
    answer(|| {
        // SAFETY: the header's contract.
        let queue = unsafe { self::queue(queue)? };
        let numbers = usize::try_from(min).ok().zip(usize::try_from(max).ok());
        let (min, max) = numbers.filter(|(min, max)| min <= max).ok_or_else(|| {
            let message = format!("at least {min} and at most {max} completions cannot be");
            Error::new(Kind::Invalid, message)
        })?;
        if min > queue.in_flight() {
            let in_flight = queue.in_flight();
            let message = format!("{min} completions never come of {in_flight} requests");
            return Err(Error::new(Kind::Invalid, message));
        }
        if completions.is_null() && max > 0 {
            return Err(missing("the room for completions"));
        }
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        let count = queue.reap(min, max, timeout, |at, Completed { user_data, result }| {
            // SAFETY: there is room for `max`, and `at` is less.
            unsafe { completions.add(at).write(udm_completion { user_data, result, reserved: 0 }) };
        });
        Ok(count as c_int)
    })
}
