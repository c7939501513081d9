//! Mapped media: on tmpfs, on a disk, cut short, in use.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::super::conformance::conformance;
use super::super::copy_target::FilePart;
use super::*;

const LEN: u64 = 1 << 20;

/// A folder in memory, if the machine has one.
fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

/// A folder next to the test's own program, which is on a disk on most machines.
fn folder_on_disk() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn path_of(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("cache")
}

fn file(folder: &tempfile::TempDir, len: u64) -> PathBuf {
    let path = path_of(folder);
    File::create(&path).unwrap().set_len(len).unwrap();
    path
}

fn open(path: &Path) -> DaxPmem {
    DaxPmem::open(path, DaxOptions::default()).unwrap()
}

#[test]
fn memory_conforms_with_every_primitive() {
    let folder = folder_in_memory();
    let mut pmem = open(&file(&folder, LEN));
    assert!(pmem.medium().is_volatile);
    assert_eq!(pmem.medium().persistence, Persistence::Cpu);
    assert!(pmem.medium().description.contains("tmpfs"), "{:?}", pmem.medium());
    conformance(&pmem);
    for primitive in Primitive::available().into_iter().filter(|p| p.is_durable()) {
        pmem.set_plan(CopyPlan::only(primitive));
        conformance(&pmem);
    }
}

#[test]
fn a_file_on_disk_conforms() {
    let folder = folder_on_disk();
    let path = file(&folder, LEN);
    let nature = media::open(&path, Access::ReadOnly, Area::default()).unwrap().nature;
    let mut wishes = vec![None, Some(Persistence::Msync)];
    if CAN_FLUSH {
        wishes.push(Some(Persistence::Cpu));
    }
    for persistence in wishes {
        let pmem =
            DaxPmem::open(&path, DaxOptions { persistence, ..DaxOptions::default() }).unwrap();
        let medium = pmem.medium();
        // As a table must say it, to be told the same.
        let wish = match persistence {
            None => "",
            Some(Persistence::Msync) => "?persist=msync",
            Some(Persistence::Cpu) => "?persist=cpu",
        };
        assert_eq!(medium.kernel_name, format!("{}{wish}", path.display()));
        if nature == Nature::File && !pmem.mapping.is_synchronous {
            assert!(!medium.is_volatile);
            assert_eq!(medium.persistence, persistence.unwrap_or(Persistence::Msync));
        }
        conformance(&pmem);
        pmem.store(4000, b"still here");
        pmem.drain().unwrap();
        pmem.sync().unwrap();
    }
    assert_eq!(std::fs::read(&path).unwrap()[4000..4010], *b"still here");
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= LEN, "its blocks are reserved");
}

#[test]
fn lengths_need_not_be_pages() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        conformance(&open(&file(&folder, LEN + 777)));
    }
}

#[test]
fn a_medium_has_one_user() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        let path = file(&folder, LEN);
        let first = open(&path);
        let error = DaxPmem::open(&path, DaxOptions::default()).unwrap_err();
        assert_eq!(error.kind(), Kind::Busy);
        assert!(error.to_string().contains("in use"), "{error}");
        first.store(5, b"seen");
        let onlooker = DaxPmem::open_read_only(&path, Area::default()).unwrap();
        let mut bytes = [0; 4];
        onlooker.load(5, &mut bytes).unwrap();
        assert_eq!(&bytes, b"seen");
        onlooker.sync().unwrap();
        drop(first);
        drop(open(&path));
    }
}

#[test]
#[should_panic(expected = "opened to look at")]
fn looking_does_not_store() {
    let folder = folder_in_memory();
    let path = file(&folder, LEN);
    DaxPmem::open_read_only(&path, Area::default()).unwrap().store(0, &[1]);
}

#[test]
#[cfg(target_arch = "x86_64")]
#[should_panic(expected = "not durable")]
fn plans_must_be_durable() {
    let folder = folder_in_memory();
    let mut pmem = open(&file(&folder, LEN));
    pmem.set_plan(CopyPlan::only(Primitive::Plain));
}

#[test]
fn a_medium_cut_short_fails_and_the_process_lives() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        let path = file(&folder, LEN);
        let pmem = open(&path);
        pmem.store(100, &[7; 100]);
        pmem.drain().unwrap();
        pmem.sync().unwrap();
        assert!(pmem.failure().is_none());
        File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();

        // A load that meets the end, twice; one that does not.
        let mut bytes = [0; 5000];
        assert_eq!(pmem.load(8000, &mut bytes), Err(Status::Io));
        assert_eq!(pmem.load(8192, &mut bytes[..1]), Err(Status::Io));
        assert_eq!(pmem.load(100, &mut bytes[..100]), Ok(()));
        assert_eq!(bytes[..100], [7; 100]);
        // The medium cannot promise durability any more.
        pmem.store(0, &[1; 100]);
        assert_eq!([pmem.drain(), pmem.sync(), pmem.sync()], [Err(Status::Io); 3]);
        assert!(pmem.failure().unwrap().contains("cut short"));
        // Neither by growing the file again.
        File::options().write(true).open(&path).unwrap().set_len(LEN).unwrap();
        assert_eq!(pmem.drain(), Err(Status::Io));
        assert!(pmem.failure().unwrap().contains("cut short, from 1048576 to 8192 bytes"));
        assert_eq!(pmem.load(500_000, &mut bytes[..1]), Err(Status::Io), "not zeroes");
        drop(pmem);
        assert!(open(&path).drain().is_ok(), "a new user finds what there is");
    }
}

/// At rest: the stored data is inspected before the holes are filled.
#[test]
fn holes_of_a_file_with_data_are_known_until_its_space_is_reserved() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        let path = file(&folder, LEN);
        let pmem = open(&path);
        assert!(!pmem.was_hole(0, LEN), "a fresh file has its space");
        for at in (0..LEN).step_by(4096) {
            pmem.store(at, &[7; 4096]);
        }
        assert_eq!([pmem.drain(), pmem.sync()], [Ok(()), Ok(())]);
        drop(pmem);
        let other = File::options().write(true).open(&path).unwrap();
        other.set_len(65536).unwrap();
        other.set_len(LEN).unwrap();
        let onlooker = DaxPmem::open_read_only(&path, Area::default()).unwrap();
        assert_eq!(onlooker.hole_at_end(), Some(65536));
        drop(onlooker);
        let pmem = open(&path);
        assert!(!pmem.was_hole(0, 65536) && pmem.was_hole(65535, 2) && pmem.was_hole(LEN - 1, 1));
        assert_eq!(pmem.hole_at_end(), Some(65536));
        pmem.reserve().unwrap();
        assert!(!pmem.was_hole(0, LEN) && pmem.hole_at_end().is_none());
        drop(pmem);
        assert!(!open(&path).was_hole(0, LEN));
    }
}

/// The file was not accessed while it was short, so no page fault showed the cut.
#[test]
fn a_medium_cut_and_made_as_long_again_while_idle_has_lost_what_was_there() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        for is_met_by_a_load in [false, true] {
            let path = file(&folder, LEN);
            let pmem = open(&path);
            for at in (0..LEN).step_by(8192) {
                pmem.store(at, &[7; 4096]);
            }
            assert_eq!([pmem.drain(), pmem.sync()], [Ok(()), Ok(())]);
            // Zeroes that were never stored are valid as long as the file was not cut.
            let mut bytes = [0; 512];
            assert_eq!(pmem.load(500_000 / 8192 * 8192 + 4096, &mut bytes), Ok(()));
            assert_eq!(pmem.failure(), None);
            let other = File::options().write(true).open(&path).unwrap();
            other.set_len(16384).unwrap();
            other.set_len(LEN).unwrap();

            if is_met_by_a_load {
                let place = 500_000 / 8192 * 8192;
                assert_eq!(pmem.load(place, &mut bytes), Err(Status::Io));
                assert_eq!(pmem.load(place, &mut bytes), Err(Status::Io), "the page is back now");
                let shared: OwnedFd = tempfile::tempfile().unwrap().into();
                let into = FilePart::new(&shared, 0, 512).into();
                assert_eq!(pmem.load_shared(place + 8192, into), Err(Status::Io));
                assert_eq!(pmem.load(8192, &mut bytes), Ok(()));
                assert_eq!(bytes, [7; 512]);
            } else {
                // On media where syncs only check, they check at most every 20 ms.
                std::thread::sleep(std::time::Duration::from_millis(50));
                assert_eq!(pmem.sync(), Err(Status::Io));
            }
            pmem.store(0, &[1; 100]);
            assert_eq!([pmem.drain(), pmem.sync()], [Err(Status::Io); 2]);
            let failure = pmem.failure().unwrap();
            assert!(
                failure.contains("cut short") && failure.contains("extended again"),
                "{failure}"
            );
        }
    }
}

/// The kernel meets the end while it copies, and the call returns an error.
#[test]
fn a_medium_cut_short_fails_the_call_that_copies_it_elsewhere() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        let path = file(&folder, LEN);
        let pmem = open(&path);
        pmem.store(100, &[7; 100]);
        let other: OwnedFd = tempfile::tempfile().unwrap().into();
        let into = |len| FilePart::new(&other, 0, len).into();
        assert_eq!(pmem.load_shared(500_000, into(100)), Ok(()));
        File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
        assert_eq!(pmem.load_shared(8000, into(5000)), Err(Status::Io));
        assert_eq!(pmem.load_shared(100, into(100)), Ok(()));
        let mut bytes = [0; 100];
        File::from(other).read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [7; 100]);
        assert!(pmem.failure().unwrap().contains("cut short"));
        assert_eq!(pmem.drain(), Err(Status::Io));
    }
}

/// An error of the copy's target is not an error of the medium.
#[test]
fn a_place_that_takes_no_data_fails_the_call_and_not_the_medium() {
    let folder = folder_in_memory();
    let pmem = open(&file(&folder, LEN));
    pmem.store(0, &[7; 8192]);
    let sealed = memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&sealed, 4096).unwrap();
    fcntl_add_seals(&sealed, SealFlags::GROW).unwrap();
    let shown: OwnedFd = File::open(path_of(&folder)).unwrap().into();
    for (file, at, len) in [(&sealed, 0, 8192), (&sealed, 4096, 1), (&shown, 0, 1)] {
        let into = FilePart::new(file, at, len);
        assert_eq!(pmem.load_shared(0, into.into()), Err(Status::Io), "{into:?}");
    }
    assert_eq!(pmem.load_shared(0, FilePart::new(&sealed, u64::MAX, 1).into()), Err(Status::Io));
    assert_eq!(pmem.load_shared(0, FilePart::new(&sealed, 0, 4096).into()), Ok(()));
    assert_eq!((pmem.failure(), pmem.drain()), (None, Ok(())));
}

#[test]
fn a_deleted_medium_is_whole_but_known_to_be_deleted() {
    let folder = folder_on_disk();
    let path = file(&folder, LEN);
    let pmem = open(&path);
    assert!(!pmem.is_deleted());
    std::fs::remove_file(&path).unwrap();
    assert!(pmem.is_deleted());
    pmem.store(100, &[7; 100]);
    assert_eq!([pmem.drain(), pmem.sync()], [Ok(()), Ok(())]);
    assert_eq!(pmem.failure(), None);
}

#[test]
fn a_store_that_finds_no_memory_fails_at_its_fence() {
    for (folder, len) in [(folder_in_memory(), 100_000), (folder_on_disk(), 1)] {
        let path = file(&folder, LEN);
        let pmem = open(&path);
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        pmem.store(3000, &vec![1; len]);
        assert_eq!(pmem.drain(), Err(Status::Io));
        assert_eq!(pmem.sync(), Err(Status::Io));
        assert!(pmem.load(0, &mut [0; 1 << 20]).is_err());
    }
}

#[test]
fn a_failed_sync_is_never_retried_into_success() {
    const CHILD: &str = "UDM_TEST_SYNC_CHILD";
    if std::env::var(CHILD).is_err() {
        // In a process of its own: other tests' mappings must not fall into the hole made below.
        let name = "pmem::dax::tests::a_failed_sync_is_never_retried_into_success";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let output = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let folder = folder_on_disk();
    let options = DaxOptions { persistence: Some(Persistence::Msync), ..DaxOptions::default() };
    let pmem = DaxPmem::open(&file(&folder, LEN), options).unwrap();
    assert_eq!(pmem.sync(), Ok(()));
    // A hole in the mapping is an error of msync that a test can cause, and undo.
    let last_page = pmem.mapping.place(LEN - 4096, 4096).cast();
    // SAFETY: the page is not accessed while it is unmapped.
    unsafe { munmap(last_page, 4096).unwrap() };
    assert_eq!(pmem.sync(), Err(Status::Io));
    let (protection, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED);
    // SAFETY: fills the hole just made.
    unsafe { rustix::mm::mmap_anonymous(last_page, 4096, protection, flags).unwrap() };
    assert_eq!([pmem.drain(), pmem.sync()], [Ok(()), Err(Status::Io)]);
    assert!(pmem.failure().unwrap().contains("msync"));
}

#[test]
fn more_damage_than_can_be_told_apart_is_bounded() {
    let folder = folder_on_disk();
    let path = file(&folder, LEN);
    let pmem = open(&path);
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    for page in (0..LEN).step_by(4096) {
        assert_eq!(pmem.load(page, &mut [0; 1]), Err(Status::Io));
    }
    assert!(pmem.mapping.watch.damages() <= 65);
}

#[test]
fn loads_beside_stores_of_other_threads() {
    let folder = folder_in_memory();
    let pmem = Arc::new(open(&file(&folder, LEN)));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for value in [0x11, 0x22] {
            let (pmem, done) = (&pmem, &done);
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    pmem.store(4096, &[value; 4096]);
                    pmem.drain().unwrap();
                }
            });
        }
        let mut bytes = [0; 4096];
        for _ in 0..2000 {
            pmem.load(4096, &mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| [0, 0x11, 0x22].contains(byte)), "any mixture");
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_part_conforms_and_leaves_its_neighbours_alone() {
    for folder in [folder_in_memory(), folder_on_disk()] {
        let path = folder.path().join("cache");
        let mut bytes = vec![7; 3 * LEN as usize];
        bytes[LEN as usize..2 * LEN as usize].fill(0);
        std::fs::write(&path, &bytes).unwrap();
        let options = DaxOptions { area: Area::new(LEN, LEN), ..DaxOptions::default() };
        let pmem = DaxPmem::open(&path, options).unwrap();
        assert_eq!((pmem.len_bytes(), pmem.begins_at()), (LEN, LEN));
        assert!(pmem.medium().kernel_name.ends_with("?offset=2048&size=2048"));
        conformance(&pmem);
        pmem.store(0, &[9; 8]);
        pmem.drain().and_then(|()| pmem.sync()).unwrap();
        // The lock covers the whole medium.
        let whole = DaxPmem::open(&path, DaxOptions::default());
        assert_eq!(whole.unwrap_err().kind(), Kind::Busy);
        drop(pmem);
        let found = std::fs::read(&path).unwrap();
        let is_old = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 7);
        assert!(is_old(&found[..LEN as usize]) && is_old(&found[2 * LEN as usize..]));
        assert_eq!(found[LEN as usize..][..8], [9; 8]);
    }
}

#[test]
fn a_part_begins_at_a_page_and_fails_when_its_file_is_cut() {
    let folder = folder_in_memory();
    let path = file(&folder, 2 * LEN);
    let part = |start, len| {
        DaxPmem::open(&path, DaxOptions { area: Area::new(start, len), ..DaxOptions::default() })
    };
    let error = part(512, LEN).unwrap_err();
    assert!(error.kind() == Kind::Invalid && error.to_string().contains("?offset=1&size=2048"));
    assert_eq!(part(LEN, LEN + 4096).unwrap_err().kind(), Kind::NoSpace);
    let pmem = part(LEN, LEN).unwrap();
    pmem.store(0, &[1; 8192]);
    pmem.drain().unwrap();
    File::options().write(true).open(&path).unwrap().set_len(LEN + 4096).unwrap();
    assert!(pmem.failure().is_some());
    let mut bytes = [0; 512];
    assert_eq!(pmem.load(4096, &mut bytes), Err(Status::Io));
    assert_eq!(pmem.load(0, &mut bytes), Ok(()));
    assert_eq!(pmem.drain(), Err(Status::Io));
}

/// The fingerprint belongs to the stored bytes, even if the memory's owner changes the source.
#[test]
fn what_others_change_is_loaded_once() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use crate::base::fingerprint::fingerprint_of;
    use crate::pmem::client_memory::ClientMemory;

    let folder = folder_in_memory();
    let pmem = open(&file(&folder, LEN));
    let memfd = memfd_create("changing", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&memfd, 8192).unwrap();
    let memory = ClientMemory::map(&memfd, 0, 8192).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in (1..=255).cycle() {
                memory.store(0, &[byte; 8192]);
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut stored = vec![0; 4096];
        // Aligned and not: each has its way.
        for at in [0, 8].into_iter().cycle().take(20_000) {
            let look = pmem.store_shared(at, memory.shared(512, 4096));
            pmem.drain().unwrap();
            pmem.load(at, &mut stored).unwrap();
            assert_eq!(look, fingerprint_of(&stored), "at {at}");
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
