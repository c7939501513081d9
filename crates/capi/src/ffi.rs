//! The functions of `udm.h`.
//!
//! Each function checks its pointers for NULL, checks its thread, and catches panics. It cannot
//! check pointers further: their validity is the program's part of the header's contract.

#![allow(unsafe_code)]
#![allow(non_camel_case_types, reason = "names of C")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::time::Duration;

use udm::bio::Op;
use udm::error::{Error, Kind, Result};
use udm::sync::Arc;
use udm::volume::{Options, Volume};
use udm_export::vhost::{Uri, front::Front};

use crate::errors::{answer, last, missing, only_flags, utf8};
use crate::forked;
use crate::queue::{Completed, Queue, Way, this_thread};

/// A flag of udm_open: format the cache device even if it may hold other data.
pub const UDM_FORCE_FORMAT: c_uint = 1;
/// A flag of writes and write-zeroes requests (force unit access): complete only when durable.
pub const UDM_FUA: c_uint = 1;
/// Maximum bytes of one request.
pub const UDM_REQUEST_BYTES_MAX: u64 = 33_554_432;
/// Maximum requests of one queue in flight.
pub const UDM_REQUESTS_MAX: c_uint = 4096;

/// A mapped device, in this process or on a server. Any thread may call its functions.
///
/// fork: a child that is created after udm_open or udm_connect cannot use the parent's devices. In
/// the child, every function fails with EINVAL (udm_size and udm_block_bytes return 0) until it
/// calls exec; the parent is not affected. A process that forks to become a daemon must open its
/// devices afterwards.
///
/// Threads: udm_open starts the thread udm-background, which ends in udm_close. For a cache in
/// memory it also starts udm-prefault, and for "?io=lazy" udm-write-out. These two may end shortly
/// after udm_close has returned (0.1 s, or the duration of the current write), and do not use the
/// program's memory. dlclose leaves the library loaded.
///
/// SIGBUS: the first device with a cache in mapped memory, or on a server, installs a SIGBUS
/// handler for the process, which stays after udm_close. With it, a truncated or damaged medium
/// causes an error of the request. Other faults are passed to the previous handler. A program that
/// installs its own handler later must pass faults at unknown addresses on to the handler that
/// sigaction returned; otherwise it receives the library's faults. The library uses no other
/// signal; udm_reap continues after signals. Under a limit of file sizes, ignore SIGXFSZ.
#[derive(Debug)]
pub struct udm_device {
    way: Reached,
}

/// The location of a device.
#[derive(Debug)]
enum Reached {
    Here(Volume),
    Served(Arc<Front>),
}

/// The requests of one thread: only the thread that created the queue may use and destroy it.
#[derive(Debug)]
pub struct udm_queue {
    queue: Queue,
    thread: usize,
}

/// The result of a request.
#[derive(Debug)]
#[repr(C)]
pub struct udm_completion {
    /// The value that was passed with the request.
    pub user_data: u64,
    /// 0, or a negative errno: EIO, EINVAL (not whole blocks, or beyond the device's end), ENOSPC
    /// (a write beyond the end), EROFS, EOPNOTSUPP, ETIMEDOUT.
    pub result: c_int,
    /// Always 0.
    pub reserved: u32,
}

/// A piece of memory, like `struct iovec`.
#[derive(Debug)]
#[repr(C)]
pub struct udm_iovec {
    /// Its first byte.
    pub base: *mut c_void,
    /// Its length in bytes.
    pub len: usize,
}

/// # Safety
///
/// `text` is NULL, or a string that ends with a NUL.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: it is not NULL, so the caller guarantees that it ends with a NUL.
    utf8(unsafe { CStr::from_ptr(text) }, what).map(Some)
}

/// # Safety
///
/// `device` is NULL, or was returned by udm_open or udm_connect and not closed since.
unsafe fn device<'a>(device: *const udm_device) -> Result<&'a udm_device> {
    forked::refuse()?;
    // SAFETY: the caller's guarantee.
    unsafe { device.as_ref() }.ok_or_else(|| missing("the device"))
}

/// # Safety
///
/// `queue` is NULL, or was returned by udm_queue_create and not destroyed since.
unsafe fn queue<'a>(queue: *mut udm_queue) -> Result<&'a mut Queue> {
    // SAFETY: as the caller says. Of another thread's queue, only the constant `thread` is read.
    if unsafe { queue.is_null() || (*queue).thread != this_thread() } {
        let wrong = "a queue is used by the thread that made it, and by no other";
        return Err(match queue.is_null() {
            true => missing("the queue"),
            false => Error::new(Kind::Invalid, wrong),
        });
    }
    // SAFETY: the queue belongs to this thread, which runs one function at a time.
    Ok(unsafe { &mut (*queue).queue })
}

/// Returns the version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn udm_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Returns one line about this thread's last error; never NULL. It is valid until the thread's next
/// call that fails.
#[unsafe(no_mangle)]
pub extern "C" fn udm_error() -> *const c_char {
    last()
}

/// Opens the devices of `table` (lines as for `dmsetup create`; paths are relative to the current
/// directory) and serves them in this process. `name` is used in messages.
///
/// `memory` is an existing folder for data that must survive this process. If the process dies, the
/// next one that names the same folder finds all acknowledged writes, as long as the machine was
/// not restarted. With NULL, acknowledged writes without a flush are lost with the process.
///
/// An empty cache device is formatted. A device that may hold other data is refused (EPERM), unless
/// `flags` has UDM_FORCE_FORMAT.
///
/// Returns 0 and the device, to be closed with udm_close; or a negative errno.
///
/// # Safety
///
/// Strings are NULL or end with a NUL; `device` is NULL or writable.
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
        forked::watch()?;
        let volume = Volume::open(name, table, &options)?;
        let opened = Box::into_raw(Box::new(udm_device { way: Reached::Here(volume) }));
        // SAFETY: not NULL, so by the contract it is writable.
        unsafe { *device = opened };
        Ok(0)
    })
}

/// Connects to a vhost-user-blk server: `udm create --export`, or another implementation. `uri` is
/// "vhost-user:///PATH". Before udm_reap sleeps, it polls the memory that it shares with the
/// server, as long as that pays off; at most a tenth of the time is wasted on polling. With
/// "?poll=never" after the path it sleeps immediately, with "?poll=always" never. `flags` is 0.
///
/// The differences to udm_open are: udm_status fails (EOPNOTSUPP). The server sets the maximum size
/// of a request (31.5 MiB for udm; larger ones end with EINVAL). UDM_FUA takes an additional flush.
/// If the server dies, udm_reap waits for the next server at this address, for 30 s or
/// "?reconnect=SECONDS", and unanswered requests are sent to it again. If no server appears in
/// time, all requests end with EIO: destroy the queues, close the device, and connect again.
///
/// Returns 0 and the device, to be closed with udm_close; or a negative errno.
///
/// # Safety
///
/// `uri` is NULL or ends with a NUL; `device` is NULL or writable.
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
        forked::watch()?;
        let front = Front::connect(&uri.parse::<Uri>()?)?;
        let made = Box::into_raw(Box::new(udm_device { way: Reached::Served(front) }));
        // SAFETY: not NULL, so by the contract it is writable.
        unsafe { *device = made };
        Ok(0)
    })
}

/// Closes a device: all acknowledged data is then durable, in its cache or on its origin. Waits up
/// to 30 seconds for requests in flight, and returns a negative errno if they do not end in time.
/// The device is closed in any case, and requests of its remaining queues fail. A server's device
/// stays open on the server. NULL is ignored.
///
/// # Safety
///
/// `device` is NULL, or was returned by udm_open or udm_connect, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_close(device: *mut udm_device) -> c_int {
    answer(|| {
        if device.is_null() {
            return Ok(0);
        }
        // SAFETY: udm_open or udm_connect has made it, and this is its last use.
        let opened = unsafe { Box::from_raw(device) };
        match opened.way {
            Reached::Here(volume) => volume.close().map(|()| 0),
            Reached::Served(_) => Ok(0),
        }
    })
}

/// Returns the size of the device in bytes; 0 for NULL.
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

/// Returns the device's block size in bytes, usually 512 or 4096. Offset and length of a request
/// must be multiples of it; otherwise the request ends with EINVAL. Returns 0 for NULL.
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

/// Writes the status lines of the device to `buffer`, in the format of `dmsetup status`, each with
/// a newline. At most `len` bytes are written, including the final NUL. Returns the length of the
/// whole text without the NUL (`len` or more: the text was truncated), or a negative errno.
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
            let message = "a server has the device: `udm status NAME` prints its status";
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

/// Creates a queue for the calling thread. A device has at most 255 queues at a time; a server's
/// device has as many as the server allows, at most 16 (EBUSY).
///
/// Returns 0 and the queue, to be destroyed with udm_queue_destroy; or a negative errno.
///
/// # Safety
///
/// `device` is NULL or open; `queue` is NULL or writable.
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
        // SAFETY: not NULL, so by the contract it is writable.
        unsafe { *queue = Box::into_raw(made) };
        Ok(0)
    })
}

/// Destroys a queue, on the thread that created it. Waits until the disks have answered the
/// requests in flight, whose results are dropped; reads that were not reaped leave their memory
/// unchanged. NULL is ignored.
///
/// # Safety
///
/// `queue` is NULL, or was returned by udm_queue_create, and this is its last use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn udm_queue_destroy(queue: *mut udm_queue) -> c_int {
    answer(|| {
        if queue.is_null() {
            return Ok(0);
        }
        // SAFETY: the header's contract; this checks the thread.
        unsafe { self::queue(queue)? };
        // SAFETY: it was returned by `Box::into_raw` in udm_queue_create; this is its last use.
        drop(unsafe { Box::from_raw(queue) });
        Ok(0)
    })
}

/// Returns a file descriptor for a program's own loop (poll, epoll): it is readable when there may
/// be completions to reap. Then call udm_reap with `min` 0 until it returns less than `max`. The
/// descriptor belongs to the queue, which reads it itself. Before the first call of this function,
/// a request that is answered immediately costs no system call; afterwards it costs one.
///
/// Returns a negative errno on failure.
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

/// Reads `len` bytes at byte `offset` into `buffer`. Offset and length must be multiples of the
/// device's block size.
///
/// This and all other requests return 0 or a negative errno. After 0, udm_reap later returns the
/// completion with the request's `user_data`. After an error, no completion follows: EINVAL (NULL,
/// no bytes, not whole sectors, too many bytes, unknown flags, wrong thread) or EBUSY
/// (UDM_REQUESTS_MAX are in flight). A request's memory must stay valid and untouched until the
/// request was reaped or its queue was destroyed. A server (udm_connect) sees a request
/// immediately if no other request of this queue is in flight. It may see the last seven of
/// several requests only with the next udm_reap, unless udm_queue_fd was called.
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

/// Writes `len` bytes from `buffer` to byte `offset`. Offset and length must be multiples of the
/// device's block size. `flags` may be UDM_FUA.
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
    // SAFETY: the header's contract. The memory of a write is only read.
    unsafe { udm_writev(queue, offset, &raw const piece, 1, user_data, flags) }
}

/// Like udm_read, into `count` pieces in order. The array itself may be reused after the return.
///
/// # Safety
///
/// As for udm_read; `pieces` has `count` pieces.
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

/// Like udm_write, from `count` pieces in order. The array itself may be reused after the return.
///
/// # Safety
///
/// As for udm_write; `pieces` has `count` pieces.
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
/// As for udm_readv and udm_writev.
unsafe fn transfer(
    queue: *mut udm_queue,
    op: Op,
    offset: u64,
    (pieces, count): (*const udm_iovec, c_int),
    user_data: u64,
    fua: bool,
) -> Result<i32> {
    // SAFETY: the caller's guarantee.
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

/// Flush: makes all requests durable that were completed before this call.
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

/// Discards a range that is not needed any more; it reads as zeroes afterwards.
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

/// Takes at most `max` completions, in the order in which requests end. If fewer than `min` are
/// ready, it waits for more, at most `timeout_ns` nanoseconds, or without limit if that is
/// negative.
///
/// Returns their number, or a negative errno: EINVAL if `min` is more than `max`, or more than the
/// requests in flight.
///
/// # Safety
///
/// `queue` is NULL, or a queue of this thread; `completions` has space for `max`.
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
            let message = format!("at least {min} and at most {max} completions are impossible");
            Error::new(Kind::Invalid, message)
        })?;
        if min > queue.in_flight() {
            let in_flight = queue.in_flight();
            let message = format!("{min} completions, but only {in_flight} requests in flight");
            return Err(Error::new(Kind::Invalid, message));
        }
        if completions.is_null() && max > 0 {
            return Err(missing("the room for completions"));
        }
        let timeout = u64::try_from(timeout_ns).ok().map(Duration::from_nanos);
        let count = queue.reap(min, max, timeout, |at, Completed { user_data, result }| {
            // SAFETY: there is space for `max`, and `at` is less.
            unsafe { completions.add(at).write(udm_completion { user_data, result, reserved: 0 }) };
        });
        Ok(count as c_int)
    })
}
