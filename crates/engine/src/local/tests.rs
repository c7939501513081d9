//! In-process callers: blocking and asynchronous, parked bios, the background.

use super::*;
use crate::buffer::Buffer;
use crate::device::LoadedTable;
use crate::disk::RamDisk;
use crate::simple::{Linear, LinearArgs};
use crate::table::Word;
use crate::units::MIB;

fn linear(disk: Arc<RamDisk>, len: u64) -> Arc<Device> {
    let args = LinearArgs::parse(&[Word::new("ram"), Word::new("8")]).unwrap();
    let target = Arc::new(Linear::new(&args, len, disk).unwrap());
    Device::with_table("test", LoadedTable::single(target, len)).unwrap()
}

#[test]
fn reads_what_was_written() {
    let disk = Arc::new(RamDisk::new(MIB, 512));
    let device = linear(disk.clone(), MIB / 2);
    let mut local = Local::without_kernel(&device).unwrap();
    local.write_at(&[7; 1024], 512, true).unwrap();
    let mut bytes = [1; 2048];
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[511], bytes[512], bytes[1535], bytes[1536]), (0, 7, 7, 0));
    disk.peek(4096 + 512, &mut bytes[..1024]);
    assert!(bytes[..1024].iter().all(|b| *b == 7));
    assert_eq!(disk.counts().flushes, 1);
    local.flush().unwrap();
    local.write_zeroes(512, 512, false).unwrap();
    local.discard(1024, 512).unwrap();
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 2048]);
    assert_eq!(local.read_at(&mut bytes, MIB / 2 - 512), Err(Status::Invalid));
    assert_eq!(local.write_at(&bytes, MIB / 2 - 512, false), Err(Status::NoSpace));
    assert_eq!(local.write_at(&bytes[..3], 0, false), Err(Status::Invalid));
}

/// A linear device over a real file, and the directory that holds it.
fn file_device() -> (Arc<Device>, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("slow");
    std::fs::File::create(&path).unwrap().set_len(MIB).unwrap();
    let text = format!("0 1024 linear {} 8", path.display());
    let table = crate::table::Table::parse(&text).unwrap();
    let opener = crate::build::SystemOpener::without_memory();
    let table =
        crate::build::build(&table, &opener, &crate::build::BuildOptions::named(1)).unwrap();
    (Device::with_table("file", table).unwrap(), dir)
}

#[test]
fn waits_for_files() {
    let (device, dir) = file_device();
    let mut local = Local::new(&device).unwrap();
    local.write_at(&[7; 4096], 4096, true).unwrap();
    let mut bytes = [0; 4096];
    local.read_at(&mut bytes, 4096).unwrap();
    assert_eq!(bytes, [7; 4096]);
    for n in 0..32 {
        let mut buffer = local.pool().take(4096);
        buffer.as_mut_slice().fill(n as u8);
        local.submit(Bio::write(n * 4096, buffer, false, n));
    }
    // A blocking call leaves the others' completions alone.
    local.flush().unwrap();
    let mut tokens: Vec<u64> = std::iter::from_fn(|| local.wait()).map(|bio| bio.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..32).collect::<Vec<_>>());
    assert!(local.wait().is_none() && local.poll().is_none());
    // I/O in flight when a caller is dropped still reaches the disk.
    local.submit(Bio::write(0, Buffer::from_bytes(&[9; 512]), false, 1));
    drop(local);
    drop(device);
    let bytes = std::fs::read(dir.path().join("slow")).unwrap();
    assert_eq!((bytes[4096], bytes[4608], bytes[4096 * 32]), (9, 0, 31));
}

#[test]
fn sleeps_until_the_device_is_resumed() {
    let device = linear(Arc::new(RamDisk::new(MIB, 512)), MIB / 2);
    device.begin_suspend().unwrap();
    assert!(device.finish_suspend().unwrap());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut local = Local::without_kernel(&device).unwrap();
            local.write_at(&[1; 512], 0, false)
        });
        while device.info().ports == 0 {
            std::thread::yield_now();
        }
        device.resume().unwrap();
        assert_eq!(writer.join().unwrap(), Ok(()));
    });
}

/// Whether a file descriptor becomes readable within `milliseconds`.
fn is_readable(fd: BorrowedFd<'_>, milliseconds: i64) -> bool {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    let seconds = milliseconds / 1000;
    let rest = milliseconds % 1000 * 1_000_000;
    let timeout = rustix::event::Timespec { tv_sec: seconds, tv_nsec: rest };
    rustix::event::poll(&mut fds, Some(&timeout)).unwrap() == 1
}

#[test]
fn a_programs_own_loop_learns_of_everything_by_one_descriptor() {
    let in_memory = || linear(Arc::new(RamDisk::new(MIB, 512)), MIB / 2);
    let (on_disk, _dir) = file_device();
    for device in [in_memory(), on_disk] {
        let mut local = Local::new(&device).unwrap();
        // Bios that were submitted before the first call count as well.
        local.submit(Bio::write(0, Buffer::zeroed(4096), true, 1));
        assert!(is_readable(local.fd().unwrap(), 60_000), "the first write is done");
        while local.poll().is_none() {
            assert!(is_readable(local.fd().unwrap(), 60_000));
        }
        for round in 0..100 {
            assert!(local.poll().is_none());
            assert!(!is_readable(local.fd().unwrap(), 0), "round {round}: no request");
            let op = [Op::Write, Op::Read, Op::Flush][round % 3];
            let bio = match op {
                Op::Write => Bio::write(0, Buffer::zeroed(4096), round % 2 == 0, 2),
                Op::Read => Bio::read(0, Buffer::zeroed(4096), 2),
                _ => Bio::flush(2),
            };
            local.submit(bio);
            loop {
                assert!(is_readable(local.fd().unwrap(), 60_000), "round {round}: {op:?}");
                if let Some(bio) = local.poll() {
                    assert_eq!((bio.token, bio.status), (2, Ok(())));
                    break;
                }
            }
        }
        // Another thread makes room.
        assert!(local.poll().is_none());
        let events = device.events().clone();
        std::thread::spawn(move || events.room()).join().unwrap();
        assert!(is_readable(local.fd().unwrap(), 60_000), "there may be room");
    }
}

#[test]
fn a_wait_with_a_deadline_ends_there() {
    let device = linear(Arc::new(RamDisk::new(MIB, 512)), MIB / 2);
    let mut local = Local::new(&device).unwrap();
    assert!(local.wait_until(u64::MAX).is_none(), "no request is in flight");
    local.suspend().unwrap();
    local.submit(Bio::flush(3));
    let before = now();
    assert!(local.wait_until(before + 20_000_000).is_none());
    assert!(now() >= before + 20_000_000, "it waits as long as it was asked to");
    assert!(local.wait_until(0).is_none(), "a past deadline");
    device.resume().unwrap();
    assert_eq!(local.wait_until(u64::MAX).unwrap().token, 3);
}
