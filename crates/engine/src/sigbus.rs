//! Memory that fails while it is used: SIGBUS becomes an error of the call.
//!
//! A mapped file can be cut short, its blocks can be unreadable, its memory can fail. The CPU then
//! faults in the middle of a copy, and the kernel sends SIGBUS to that thread, which would end the
//! process and all its exports. Instead:
//!
//! 1. Every mapping is [`watch`]ed before it is touched, and until just before it is unmapped.
//! 2. The handler looks for the faulting address among the watched ranges. If it finds it, it
//!    first notes the page as damaged, then maps private zeroes over it, and returns; the
//!    interrupted instruction runs again and succeeds, on memory that is no longer the medium.
//! 3. Therefore the code that touched the medium checks afterwards ([`Watch::is_damaged`] and
//!    [`Watch::has_damage`]), and returns an error if what it read, or may have written, was not
//!    the medium. The note is made before the zeroes can be seen, so no thread can load them and
//!    miss it. Notes are never removed.
//! 4. A fault anywhere else is not ours: the handler restores the handler that was there before it
//!    and returns, and the fault, repeated, takes its usual course: death by SIGBUS.
//!
//! The handler runs at any point of any code. It uses atomics of static memory and the system
//! calls mmap, sigaction and raise, and nothing else: no lock, no allocation, no errno
//! (system calls are made through rustix, which makes them itself, or errno is put back).

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

/// At most this many damaged pages are recorded for a mapping; beyond that all of it counts.
const DAMAGED_MAX: usize = 64;

/// A range that is watched, in static memory, so that the handler can always look at it.
struct Slot {
    /// 0 while the slot is free: set after everything else, cleared before everything else.
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

/// What a mapping is of. Each has places of its own: what clients map leaves room for caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watched {
    /// A cache device.
    Medium,
    /// Another process's memory.
    Foreign,
}

impl Watched {
    fn slots(self) -> &'static [Slot] {
        match self {
            Watched::Medium => &SLOTS[..MEDIA_MAX],
            Watched::Foreign => &SLOTS[MEDIA_MAX..],
        }
    }

    fn too_many(self) -> Error {
        let message = match self {
            Watched::Medium => format!("this process already maps {MEDIA_MAX} cache devices"),
            Watched::Foreign => format!("{FOREIGN_MAX} regions of clients' memory are mapped"),
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
/// The range is a mapping of the caller's, a multiple of `page_bytes` long and aligned to it, that
/// is accessed as volatile memory only (its content may turn to zeroes at any moment), and that
/// stays mapped until the `Watch` is dropped.
pub(crate) unsafe fn watch(
    start: *mut u8,
    len: usize,
    page_bytes: usize,
    what: Watched,
) -> Result<Watch> {
    assert!(page_bytes.is_power_of_two() && len > 0);
    assert!(len.is_multiple_of(page_bytes), "a mapping of whole pages");
    assert!(start.addr().is_multiple_of(page_bytes), "a mapping starts with a page");
    let _guard = CHANGES.lock().expect("nobody panics while slots change");
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
        let _guard = CHANGES.lock().expect("nobody panics while slots change");
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
    // SAFETY: `before` has room for what was installed. It is asked for first, so that it is
    // known before our handler can run.
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

extern "C" fn on_sigbus(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands SA_SIGINFO handlers a valid siginfo_t; si_addr is set for every
    // SIGBUS that the kernel itself sends (a positive si_code).
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    if code <= 0 {
        die();
    } else if !replace_page(address) {
        step_aside();
    }
}

/// Step 2 of the module's prose. False if nobody watches the address.
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
/// while the handler of a fault in it runs; others may come and go, and are skipped when their
/// length is not the same before and after their start was read.
fn find(address: usize) -> Option<(&'static Slot, usize)> {
    SLOTS.iter().find_map(|slot| {
        let len = slot.len.load(Ordering::SeqCst);
        let start = slot.start.load(Ordering::SeqCst);
        let is_stable = slot.len.load(Ordering::SeqCst) == len;
        (is_stable && address.wrapping_sub(start) < len).then_some((slot, start))
    })
}

/// Restores what handled SIGBUS before; the fault happens again when the handler returns.
fn step_aside() {
    match BEFORE.get() {
        // SAFETY: an action that sigaction gave us.
        Some(before) => unsafe { set_action(before) },
        None => die(),
    }
}

/// For a SIGBUS that was sent by a process: nothing will fault again, so it is raised again; it
/// arrives when the handler returns, and finds the default action.
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
        // SAFETY: a new mapping, which nobody else refers to.
        unsafe {
            rustix::mm::mmap(ptr::null_mut(), 4096, protection, MapFlags::SHARED, &file, 0)
                .unwrap()
                .cast()
        }
    }

    /// Runs this test alone in another process, which does `what`, and returns its signal.
    fn signal_of_child(test: &str, what: &str) -> Option<i32> {
        let status = Command::new(std::env::current_exe().unwrap())
            .args([&format!("sigbus::tests::{test}"), "--exact"])
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
                // SAFETY: the mapping stays for ever, and is only accessed as volatile memory.
                let _watch = unsafe { watch(watched, 4096, 4096, Watched::Medium).unwrap() };
                if what == "raise" {
                    // SAFETY: it may be called at any time.
                    unsafe { libc::raise(libc::SIGBUS) };
                } else {
                    // SAFETY: mapped, though the kernel has no memory to put there.
                    unsafe { beyond_the_end().read_volatile() };
                }
            }
        }
    }

    #[test]
    fn a_watched_fault_is_noted_and_survived() {
        let start = beyond_the_end();
        // SAFETY: the mapping stays for ever, and is only accessed as volatile memory.
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
            // SAFETY: the mapping stays for ever, and nobody accesses it.
            drop(unsafe { watch(start, 4096, 4096, Watched::Medium).unwrap() });
        }
    }
}
