//! Counts the users of a disk on this host: mounts, swaps, and stacked devices that this process
//! can see. It does not open the disk: even a brief open could make a mount fail.

use std::fs::{read_dir, read_to_string};

/// Returns the number of mounts, swaps and devices on `/dev/{name}` and its partitions.
pub fn count(name: &str) -> u64 {
    let entries = |path: &str| read_dir(path).into_iter().flatten().flatten();
    let folder = format!("/sys/block/{name}");
    let parts = entries(&folder).filter_map(|entry| entry.file_name().into_string().ok());
    let parts = parts.filter(|part| part.starts_with(name)).map(|part| format!("{folder}/{part}"));
    let folders: Vec<String> = std::iter::once(folder.clone()).chain(parts).collect();
    let numbers: Vec<String> = folders
        .iter()
        .filter_map(|folder| read_to_string(format!("{folder}/dev")).ok())
        .map(|number| number.trim().to_owned())
        .collect();
    let holders = folders.iter().map(|folder| entries(&format!("{folder}/holders")).count());
    let mounts = read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let swaps = read_to_string("/proc/swaps").unwrap_or_default();
    (holders.sum::<usize>() + of_mounts(&mounts, name, &numbers) + of_swaps(&swaps, name)) as u64
}

/// Whether `place` is the disk's file or a partition's.
fn is_of(place: &str, name: &str) -> bool {
    let rest = place.strip_prefix("/dev/").and_then(|place| place.strip_prefix(name));
    let is_partition = |rest: &str| rest.strip_prefix('p').is_some_and(|part| !part.is_empty());
    rest.is_some_and(|rest| rest.is_empty() || is_partition(rest))
}

/// Counts mounts by the disk's number or by its name: file systems over several disks have numbers
/// of their own.
fn of_mounts(text: &str, name: &str, numbers: &[String]) -> usize {
    let is_it = |line: &&str| {
        let number = line.split(' ').nth(2).unwrap_or_default();
        let source = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1));
        numbers.iter().any(|own| own == number) || is_of(source.unwrap_or_default(), name)
    };
    text.lines().filter(is_it).count()
}

fn of_swaps(text: &str, name: &str) -> usize {
    let places = text.lines().map(|line| line.split_whitespace().next().unwrap_or_default());
    places.filter(|place| is_of(place, name)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_and_swaps_of_the_disk_are_counted_and_those_of_others_are_not() {
        let mounts = "\
24 1 259:3 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
31 24 259:5 / /mnt rw,relatime shared:2 - xfs /dev/ublkb1 rw
32 24 259:6 / /srv/x rw shared:3 - xfs /dev/mapper/x rw
33 24 0:44 /a /pool rw - btrfs /dev/ublkb1p2 rw
34 24 259:9 / /other rw - xfs /dev/ublkb12 rw
nonsense";
        let numbers = ["259:5".to_owned(), "259:6".to_owned()];
        assert_eq!(of_mounts(mounts, "ublkb1", &numbers), 3);
        assert_eq!(of_mounts(mounts, "ublkb2", &[]), 0);
        let swaps = "Filename Type Size\n/dev/ublkb1p1 partition 8\n/dev/ublkb10 partition 8\n";
        assert_eq!((of_swaps(swaps, "ublkb1"), of_swaps("", "ublkb1")), (1, 0));
        assert_eq!(count("ublkb-none"), 0);
    }
}
