//! Tests of the second descriptor of an open file.

use super::*;

#[test]
fn only_the_open_file_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let [first, second] = ["a", "b"].map(|name| folder.path().join(name));
    std::fs::write(&first, [1; 512]).unwrap();
    std::fs::write(&second, [1; 512]).unwrap();
    let known = stat(&std::fs::File::open(&first).unwrap().into()).unwrap();
    let again =
        |path: &Path| open_again(path, &known, OFlags::RDONLY).map(|(_, stat)| stat.stx_ino);
    assert_eq!(again(&first), Ok(known.stx_ino));
    assert_eq!(again(&second), Err(rustix::io::Errno::STALE));
    std::fs::rename(&second, &first).unwrap();
    assert_eq!(again(&first), Err(rustix::io::Errno::STALE), "it was replaced");
    std::fs::remove_file(&first).unwrap();
    assert_eq!(again(&first), Err(rustix::io::Errno::NOENT));
}

/// Two devices that have a number in common.
#[test]
fn another_device_is_not_the_open_one() {
    let known = stat(&std::fs::File::open("/dev/null").unwrap().into()).unwrap();
    let again = |path: &str| open_again(Path::new(path), &known, OFlags::RDONLY).map(|_| ());
    assert_eq!(again("/dev/null"), Ok(()));
    assert_eq!(again("/dev/zero"), Err(rustix::io::Errno::STALE));
}
