//! Changes of the runtime directory, as the kernel reports them: created, removed and renamed
//! files, renamed folders, and file systems that are mounted over it (inotify(7),
//! proc_pid_mountinfo(5)).
//!
//! Other programs' files cause reports as well. The replacement of a symbolic link in the
//! directory's path causes none.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Result;

/// The reports of the kernel.
#[derive(Debug)]
pub struct Changes {
    inotify: OwnedFd,
    /// Becomes ready when something is mounted or unmounted.
    #[expect(dead_code, reason = "only its readiness is used")]
    mounts: File,
    /// Ready when there is a report.
    epoll: OwnedFd,
}

impl Changes {
    /// Reports begin with [`Changes::watch`]. An error: this user has all of its inotify instances
    /// in use, or `/proc` is not mounted.
    pub fn new() -> Result<Changes> {
        let inotify =
            inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        let mounts = File::open("/proc/self/mountinfo").map_err(|error| {
            rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
        })?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &inotify, EventData::new_u64(0), EventFlags::IN)?;
        epoll::add(&epoll, &mounts, EventData::new_u64(0), EventFlags::PRI)?;
        Ok(Changes { inotify, mounts, epoll })
    }

    /// Reports changes of `folder` and of the folders above it.
    pub fn watch(&self, folder: &Path) -> Result<()> {
        let moves = WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR;
        let files =
            WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::MOVED_TO;
        inotify::add_watch(&self.inotify, folder, moves | files)?;
        for above in folder.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()) {
            inotify::add_watch(&self.inotify, above, moves)?;
        }
        Ok(())
    }

    /// Forgets the reports so far.
    pub fn forget(&self) {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
        while rustix::io::read(&self.inotify, &mut buffer).is_ok() {}
    }

    /// For poll(2): readable when there is a report.
    pub fn polled(&self) -> PollFd<'_> {
        PollFd::new(&self.epoll, PollFlags::IN)
    }

    /// Where other descriptors can be added that shall count as a report.
    pub fn polled_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{Timespec, poll};

    use super::*;

    fn has_report(changes: &Changes) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [changes.polled()], Some(&now)).unwrap() > 0
    }

    #[test]
    fn changes_are_reported_until_they_are_forgotten() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("a/b");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("old"), "").unwrap();
        let changes = Changes::new().unwrap();
        changes.watch(&folder).unwrap();
        // The first poll may find a mount that came before.
        has_report(&changes);
        assert!(!has_report(&changes));
        let steps: [&dyn Fn(); 5] = [
            &|| std::fs::write(folder.join("new"), "").unwrap(),
            &|| std::fs::remove_file(folder.join("old")).unwrap(),
            &|| std::fs::rename(folder.join("new"), top.path().join("new")).unwrap(),
            &|| std::fs::rename(top.path().join("new"), folder.join("new")).unwrap(),
            &|| std::fs::rename(top.path().join("a"), top.path().join("c")).unwrap(),
        ];
        for (nth, step) in steps.iter().enumerate() {
            step();
            assert!(has_report(&changes), "step {nth}");
            assert!(has_report(&changes), "step {nth}, again");
            changes.forget();
            assert!(!has_report(&changes), "step {nth}, after it");
        }
    }
}
