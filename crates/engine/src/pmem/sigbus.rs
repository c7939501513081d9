//! Converts SIGBUS on mapped memory into an error of the call that touched the memory.
//!
//! A mapped file can be cut short, its blocks can be unreadable, its memory can fail. The CPU then
//! faults in the middle of a copy, and the kernel sends SIGBUS to that thread, which would end the
//! process and all its exports. Instead:
//!
//! 1. Every mapping is [`watch`]ed before its first access, and until just before it is unmapped.
//! 2. The handler looks for the faulting address among the watched ranges. If it finds it, it first
//!    records the page as damaged, then maps private zeroes over it, and returns. The interrupted
//!    instruction runs again and succeeds, on memory that is no longer the medium.
//! 3. Therefore the code that touched the medium checks afterwards ([`Watch::is_damaged`] and
//!    [`Watch::has_damage`]), and returns an error if it may have read from, or written to, such a
//!    page. The record is made before the zeroes become visible, so no thread can load them and
//!    miss it. Records are never removed.
//! 4. A fault at any other address does not concern udm: the handler calls the handler that was
//!    installed before it. It stays installed, because the earlier handler may jump out of the
//!    fault and continue. Without an earlier handler, the default action is restored and the
//!    repeated fault ends the process by SIGBUS.
//! 5. The handler stays until the process ends. A program that installs its own handler later gets
//!    our faults as well, and has to pass on faults that it does not know.
//!
//! The handler runs at any point of any code. It uses only atomics in static memory and the system
//! calls mmap, sigaction and raise. It takes no lock, does not allocate, and does not change errno
//! (rustix makes the system calls without libc, or errno is restored).

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::error::{Error, Kind, Result};
use crate::sync::OnceLock;
use crate::sync::statics::Mutex;
use crate::sync::statics::atomic::{AtomicUsize, Ordering};

/// At most this many mappings of cache devices are watched in a process.
pub(crate) const MEDIA_MAX: usize = 64;
/// At most this many mappings of other processes' memory.
pub(crate) const FOREIGN_MAX: usize = 320;
const WATCHED_MAX: usize = MEDIA_MAX + FOREIGN_MAX;

/// At most this many damaged pages are recorded for a mapping; after that the whole mapping counts
/// as damaged.
const DAMAGED_MAX: usize = 64;

/// A watched range, in static memory so that the handler can always read it.
struct Slot {
    /// 0 while the slot is free: set last, cleared first.
    len: AtomicUsize,
    start: AtomicUsize,
    /// The kernel maps and unmaps this many bytes as a unit here; a power of two.
    page_bytes: AtomicUsize,
    /// Faults so far.
    damages: AtomicUsize,
    /// Addresses of damaged pages, the first `damages` of them; 0 where one is being entered.
    pages: [AtomicUsize; DAMAGED_MAX],
}

impl Slot {
    const fn free() -> Slot {
        Slot {
            len: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
            damages: AtomicUsize::new(0),
            pages: [const { AtomicUsize::new(0) }; DAMAGED_MAX],
        }
    }
}

static SLOTS: [Slot; WATCHED_MAX] = [const { Slot::free() }; WATCHED_MAX];

/// Serialises changes of slots, and the handler's installation. The handler never takes it.
static CHANGES: Mutex<()> = Mutex::new(());

/// The action for SIGBUS before ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// The kind of mapped memory. Each kind has its own slots, so that client memory leaves
/// slots free for caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// A cache device.
    Medium,
    /// Another process's memory.
    ClientMemory,
}

impl Watched {
    fn slots(self) -> &'static [Slot] {
        match self {
            Watched::Medium => &SLOTS[..MEDIA_MAX],
            Watched::ClientMemory => &SLOTS[MEDIA_MAX..],
        }
    }

    fn too_many(self) -> Error {
        let message = match self {
            Watched::Medium => format!("this process already maps {MEDIA_MAX} cache devices"),
            Watched::ClientMemory => format!("{FOREIGN_MAX} regions of clients' memory are mapped"),
        };
        Error::new(Kind::NoSpace, message)
    }
}

/// Keeps a range watched until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    slot: &'static Slot,
}

/// Watches `len` bytes at `start`, a mapping of `what` whose pages are `page_bytes` long.
///
/// # Safety
/// The range is a mapping of the caller's, a multiple of `page_bytes` long and aligned to it. It is
/// accessed as volatile memory only (its content may turn to zeroes at any moment), and it stays
/// mapped until the `Watch` is dropped.
pub(crate) unsafe fn watch(
    start: *mut u8,
    len: usize,
    page_bytes: usize,
    what: Watched,
) -> Result<Watch> {
    assert!(page_bytes.is_power_of_two() && len > 0);
    assert!(len.is_multiple_of(page_bytes), "a mapping of whole pages");
    assert!(start.addr().is_multiple_of(page_bytes), "a mapping starts with a page");
    let _guard = CHANGES.lock().expect("threads do not panic with this lock");
    install()?;
    let is_free = |slot: &&Slot| slot.len.load(Ordering::Relaxed) == 0;
    let slot = what.slots().iter().find(is_free).ok_or_else(|| what.too_many())?;
    // The handler makes a pointer of it again.
    slot.start.store(start.expose_provenance(), Ordering::Relaxed);
    slot.page_bytes.store(page_bytes, Ordering::Relaxed);
    slot.damages.store(0, Ordering::Relaxed);
    slot.pages.iter().for_each(|page| page.store(0, Ordering::Relaxed));
    slot.len.store(len, Ordering::SeqCst);
    Ok(Watch { slot })
}

impl Watch {
    /// Whether any page was ever replaced.
    pub(crate) fn has_damage(&self) -> bool {
        self.slot.damages.load(Ordering::Acquire) != 0
    }

    /// Whether any of these addresses was ever replaced.
    pub(crate) fn is_damaged(&self, range: Range<usize>) -> bool {
        let damages = self.slot.damages.load(Ordering::Acquire);
        if damages == 0 || range.is_empty() {
            return false;
        }
        let page_bytes = self.slot.page_bytes.load(Ordering::Relaxed);
        damages > DAMAGED_MAX
            || self.slot.pages[..damages].iter().any(|page| {
                // 0: another thread's handler is just entering a page, and it could be any page.
                let page = page.load(Ordering::Acquire);
                page == 0 || (range.start < page + page_bytes && page < range.end)
            })
    }

    /// Number of faults.
    pub(crate) fn damages(&self) -> usize {
        self.slot.damages.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _guard = CHANGES.lock().expect("threads do not panic with this lock");
        self.slot.len.store(0, Ordering::SeqCst);
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let start = self.start.load(Ordering::Relaxed);
        write!(f, "{start:#x}+{:#x}", self.len.load(Ordering::Relaxed))
    }
}

/// Installs the handler, once per process.
fn install() -> Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: an all-zero sigaction is a valid one (default action, empty mask).
    let mut ours: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    ours.sa_sigaction = on_sigbus as *const () as usize;
    // SA_ONSTACK: a signal stack that was given to a thread is used. The mask stays empty: SIGBUS
    // itself is blocked while the handler runs, so a fault in it is final.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `before` has space for an action. This call reads the installed action first, so that
    // it is known before our handler can run.
    let before = unsafe {
        if libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) != 0 {
            return Err(last_error());
        }
        before.assume_init()
    };
    BEFORE.set(before).expect("the lock is held, and it was empty");
    // SAFETY: `on_sigbus` has the signature that SA_SIGINFO asks for and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()) } != 0 {
        return Err(last_error());
    }
    Ok(())
}

fn last_error() -> Error {
    Error::from_io("install the handler of", "SIGBUS", std::io::Error::last_os_error())
}

extern "C" fn on_sigbus(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands SA_SIGINFO handlers a valid siginfo_t; si_addr is set for every
    // SIGBUS that the kernel itself sends (a positive si_code).
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code > 0 && replace_page(address) {
        return;
    }
    let before = BEFORE.get().filter(|before| {
        before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN
    });
    match before {
        // SAFETY: the program installed it as a handler of SIGBUS, and gets what the kernel gave.
        Some(before) => unsafe {
            call(before, signal, info, context);
            // Rust's own handler restores the default action and expects the fault once more. A
            // signal that was sent does not come again.
            if code <= 0 && is_default() {
                libc::raise(libc::SIGBUS);
            }
        },
        None if code <= 0 => die(),
        None => step_aside(),
    }
}

/// Whether SIGBUS has the default action now.
fn is_default() -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: there is room for an action, and an all-zero one is valid.
    let now = unsafe {
        libc::sigaction(libc::SIGBUS, ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    now.sa_sigaction == libc::SIG_DFL
}

/// Calls a handler as the kernel would.
///
/// # Safety
/// `action` is one of sigaction's with a function in it; the other arguments are the ones that the
/// kernel passed to our own handler, which is running.
unsafe fn call(
    action: &libc::sigaction,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    type Plain = extern "C" fn(c_int);
    type WithInfo = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
    let function = ptr::with_exposed_provenance::<c_void>(action.sa_sigaction);
    // SAFETY: the flag selects one of the two signatures of the function.
    unsafe {
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            std::mem::transmute::<*const c_void, WithInfo>(function)(signal, info, context);
        } else {
            std::mem::transmute::<*const c_void, Plain>(function)(signal);
        }
    }
}

/// Step 2 of the module's header. False if the address is not watched.
fn replace_page(address: usize) -> bool {
    let Some((slot, start)) = find(address) else { return false };
    let page_bytes = slot.page_bytes.load(Ordering::Relaxed);
    let page = start + (address - start) / page_bytes * page_bytes;
    let number = slot.damages.fetch_add(1, Ordering::SeqCst);
    if let Some(entry) = slot.pages.get(number) {
        entry.store(page, Ordering::SeqCst);
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the page lies within a mapping whose owner accesses it as volatile memory and has
    // agreed to this (`watch`). It stays mapped while its owner's thread, which is this one, is
    // inside an access.
    let zeroes = unsafe {
        let at = ptr::with_exposed_provenance_mut(page);
        mmap_anonymous(at, page_bytes, protection, MapFlags::PRIVATE | MapFlags::FIXED)
    };
    zeroes.is_ok()
}

/// The watched range with this address, and its start. The slot of a live mapping does not change
/// while the handler of a fault in it runs. Other slots may appear and vanish; a slot is skipped
/// when its length changes while its start is read.
fn find(address: usize) -> Option<(&'static Slot, usize)> {
    SLOTS.iter().find_map(|slot| {
        let len = slot.len.load(Ordering::SeqCst);
        let start = slot.start.load(Ordering::SeqCst);
        let is_stable = slot.len.load(Ordering::SeqCst) == len;
        (is_stable && address.wrapping_sub(start) < len).then_some((slot, start))
    })
}

/// Restores the earlier handler of SIGBUS; the fault happens again when our handler returns.
fn step_aside() {
    match BEFORE.get() {
        // SAFETY: an action that sigaction gave us.
        Some(before) => unsafe { set_action(before) },
        None => die(),
    }
}

/// A process sent this SIGBUS, so no fault would repeat. It is raised again; it arrives when
/// the handler returns, and takes the default action.
fn die() {
    // SAFETY: an all-zero sigaction is the default action; raise is async-signal-safe.
    unsafe {
        set_action(&MaybeUninit::zeroed().assume_init());
        libc::raise(libc::SIGBUS);
    }
}

/// # Safety
/// `action` is one that may be installed. The process is about to end, so errno does not matter.
unsafe fn set_action(action: &libc::sigaction) {
    // SAFETY: sigaction is async-signal-safe; the caller vouches for the action.
    unsafe { libc::sigaction(libc::SIGBUS, action, ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "UDM_TEST_SIGBUS_CHILD";

    /// Maps one page of an empty file.
    fn beyond_the_end() -> *mut u8 {
        let file = tempfile::tempfile().unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, to which no other code has a reference.
        unsafe {
            rustix::mm::mmap(ptr::null_mut(), 4096, protection, MapFlags::SHARED, &file, 0)
                .unwrap()
                .cast()
        }
    }

    /// Runs this test alone in another process, which does `what`, and returns its signal.
    fn signal_of_child(test: &str, what: &str) -> Option<i32> {
        let status = Command::new(std::env::current_exe().unwrap())
            .args([&format!("pmem::sigbus::tests::{test}"), "--exact"])
            .env(CHILD, what)
            .output()
            .unwrap()
            .status;
        status.signal()
    }

    #[test]
    fn faults_of_others_still_kill() {
        match std::env::var(CHILD).as_deref() {
            Err(_) => {
                for what in ["fault", "raise"] {
                    assert_eq!(signal_of_child("faults_of_others_still_kill", what), Some(7));
                }
            }
            Ok(what) => {
                let watched = beyond_the_end();
                // SAFETY: the mapping is never unmapped, and is only accessed as volatile memory.
                let _watch = unsafe { watch(watched, 4096, 4096, Watched::Medium).unwrap() };
                if what == "raise" {
                    // SAFETY: it may be called at any time.
                    unsafe { libc::raise(libc::SIGBUS) };
                } else {
                    // SAFETY: mapped, although the kernel cannot provide a page there.
                    unsafe { beyond_the_end().read_volatile() };
                }
            }
        }
    }

    #[test]
    fn a_watched_fault_is_noted_and_survived() {
        let start = beyond_the_end();
        // SAFETY: the mapping is never unmapped, and is only accessed as volatile memory.
        let watch = unsafe { watch(start, 4096, 4096, Watched::Medium).unwrap() };
        let range = start.addr()..start.addr() + 4096;
        assert!(!watch.has_damage() && !watch.is_damaged(range.clone()));
        // SAFETY: mapped, and the handler puts zeroes where the kernel has none.
        unsafe {
            start.write_volatile(9);
            assert_eq!(start.add(1).read_volatile(), 0);
            assert_eq!(start.read_volatile(), 9);
        }
        assert_eq!(watch.damages(), 1, "the page is replaced once");
        assert!(watch.has_damage() && watch.is_damaged(range.start + 5..range.start + 6));
        assert!(!watch.is_damaged(range.end..range.end + 1));
        assert!(!watch.is_damaged(range.start - 1..range.start));
        assert!(!watch.is_damaged(range.start..range.start));
    }

    #[test]
    fn slots_are_reused() {
        let start = beyond_the_end();
        for _ in 0..3 * WATCHED_MAX {
            // SAFETY: the mapping is never unmapped, and never accessed.
            drop(unsafe { watch(start, 4096, 4096, Watched::Medium).unwrap() });
        }
    }
}
