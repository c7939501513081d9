//! Parts of a file or block device as disks of their own.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::conformance::{SIZE, check_all};
use super::disks::{Loop, folder};
use super::{bare, pattern, read, write};
use crate::base::area::Area;
use crate::bio::Op;
use crate::disk::{Claims, Disk, Extent, FileDisk, FileOptions, IoMode, Ring};
use crate::error::{Kind, Status};
use crate::sync::Arc;
use crate::units::MIB;

fn options(io: IoMode, start: u64, len: u64) -> FileOptions {
    FileOptions { io, area: Area::new(start, len), ..FileOptions::default() }
}

fn part(path: &Path, start: u64, len: u64, claims: &Claims) -> crate::Result<Arc<dyn Disk>> {
    let disk = FileDisk::open_shared(path, &options(IoMode::Auto, start, len), claims)?;
    Ok(Arc::new(disk))
}

#[test]
fn a_part_conforms_and_leaves_its_neighbours_alone() {
    let folder = folder();
    let path = folder.path().join("disk.img");
    for (io, start) in
        [(IoMode::Auto, MIB), (IoMode::Auto, 512), (IoMode::Buffered, 4096), (IoMode::Lazy, 1536)]
    {
        let mut bytes = vec![7; (start + SIZE + MIB) as usize];
        bytes[start as usize..(start + SIZE) as usize].fill(0);
        std::fs::write(&path, &bytes).unwrap();
        let disk: Arc<dyn Disk> =
            Arc::new(FileDisk::open(&path, &options(io, start, SIZE)).unwrap());
        check_all(&disk, &mut Ring::new(64).unwrap());
        assert_eq!(disk.begins_at(), start);
        drop(disk);
        let found = std::fs::read(&path).unwrap();
        assert_eq!(found.len(), bytes.len());
        assert!(found[..start as usize].iter().all(|byte| *byte == 7), "in front of {start}");
        assert!(found[(start + SIZE) as usize..].iter().all(|byte| *byte == 7), "behind {start}");
    }
}

#[test]
fn holes_are_those_of_the_part() {
    let folder = folder();
    let path = folder.path().join("disk.img");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(8 * MIB).unwrap();
    file.write_all_at(&[7; 65536], 2 * MIB).unwrap();
    file.sync_all().unwrap();
    let disk = FileDisk::open(&path, &options(IoMode::Auto, MIB, 4 * MIB)).unwrap();
    assert_eq!(disk.extent(0, 4 * MIB), (MIB, Extent::Zeroes));
    assert_eq!(disk.extent(MIB, 3 * MIB), (65536, Extent::Data));
}

#[test]
fn parts_of_one_file_are_open_beside_each_other_and_never_overlap() {
    let folder = folder();
    let path = folder.path().join("disk.img");
    std::fs::write(&path, vec![0; 4 << 20]).unwrap();
    let other_name = folder.path().join("other.img");
    std::fs::hard_link(&path, &other_name).unwrap();
    let claims = Claims::apart();
    let one = part(&path, 0, MIB, &claims).unwrap();
    let two = part(&other_name, MIB, MIB, &claims).unwrap();
    for (start, len) in [(0, MIB), (MIB - 512, 512), (512, 512), (0, 4 * MIB), (MIB, 512)] {
        let error = part(&path, start, len, &claims).unwrap_err();
        assert_eq!(error.kind(), Kind::Invalid, "{error}");
        assert!(error.to_string().contains("overlaps"), "{error}");
    }
    // A process that does not know the claims is refused by the lock, even for the rest of the
    // file.
    let stranger = Claims::apart();
    assert_eq!(part(&path, 3 * MIB, MIB, &stranger).unwrap_err().kind(), Kind::Busy);
    let mut ring = Ring::new(8).unwrap();
    write(&one, &mut ring, 0, &pattern(4096, 1)).unwrap();
    write(&two, &mut ring, 0, &pattern(4096, 2)).unwrap();
    assert!(read(&one, &mut ring, 0, 4096).unwrap() == pattern(4096, 1));
    assert!(read(&two, &mut ring, 0, 4096).unwrap() == pattern(4096, 2));
    assert_ne!(one.limits().identity, two.limits().identity);
    assert!(two.limits().kernel_name.ends_with("?offset=2048&size=2048"), "{:?}", two.limits());
    // The lock is held as long as any of them lives.
    drop(one);
    assert_eq!(part(&path, 0, MIB, &stranger).unwrap_err().kind(), Kind::Busy);
    drop(two);
    part(&path, 0, MIB, &stranger).unwrap();
}

#[test]
fn a_file_that_is_cut_is_cut_for_all_of_its_parts() {
    let folder = folder();
    let path = folder.path().join("disk.img");
    std::fs::write(&path, vec![1; 8 << 20]).unwrap();
    let claims = Claims::apart();
    let front = part(&path, 0, 4 * MIB, &claims).unwrap();
    let back = part(&path, 4 * MIB, 4 * MIB, &claims).unwrap();
    let mut ring = Ring::new(8).unwrap();
    write(&back, &mut ring, 2 * MIB, &[2; 4096]).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(3 * MIB).unwrap();
    // A write of one part makes the file longer again, and leaves a hole in the other.
    std::thread::sleep(std::time::Duration::from_millis(1));
    let _ = write(&back, &mut ring, 2 * MIB, &[2; 4096]);
    assert_eq!(read(&front, &mut ring, 3 * MIB, 4096), Err(Status::Io));
    assert_eq!(bare(&front, &mut ring, Op::Flush, 0, 0), Err(Status::Io));
    assert_eq!(write(&front, &mut ring, 0, &[3; 512]), Err(Status::Io));
    assert!(read(&front, &mut ring, 0, 4096).unwrap() == [1; 4096]);
    assert!(front.loss().is_some() && back.loss().is_some());
}

#[test]
fn what_a_device_does_not_have_is_no_part_of_it() {
    let folder = folder();
    let path = folder.path().join("disk.img");
    std::fs::write(&path, vec![0; 1 << 20]).unwrap();
    let refused = |path: &Path, start, len| {
        let error = FileDisk::open(path, &options(IoMode::Auto, start, len)).unwrap_err();
        assert!(error.to_string().contains(&Area::new(start, len).words().join("&")), "{error}");
        error.kind()
    };
    assert_eq!(refused(&path, 512, MIB), Kind::NoSpace);
    assert_eq!(refused(&path, MIB, 512), Kind::NoSpace);
    assert_eq!(refused(&path, i64::MAX as u64 / 512 * 512, 512), Kind::NoSpace);
    let Some(device) = Loop::attach(&path, 4096) else { return };
    assert_eq!(refused(&device.0, 512, 4096), Kind::Invalid);
    assert_eq!(refused(&device.0, 4096, 512), Kind::Invalid);
    let disk = FileDisk::open(&device.0, &options(IoMode::Auto, 4096, 8192)).unwrap();
    assert_eq!(disk.limits().size_bytes, 8192);
}
