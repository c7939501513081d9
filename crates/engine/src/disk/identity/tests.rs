//! Tests of the rules: an absent fact never counts as equal, two parts of a disk differ, and an
//! earlier spelling counts where it was right.

use super::*;

const UUID: Uuid = *b"0123456789abcdef";
const FSID: u64 = 0x1111_2222_3333_4444;
/// `f_fsid` of a file system that has the number of its device there, 7:1.
const NUMBER: u64 = 0x0000_0701_0000_0000;

/// A file on ext4, which has all facts.
fn file() -> FileFacts {
    FileFacts {
        uuid: Uuid::default(),
        late_uuid: UUID,
        fsid: FSID,
        subvolume: 0,
        inode: 12,
        inodes_last: true,
        has_twins: false,
        born: (1_700_000_000, 5),
        generation: 7,
        mount: "ext4 /dev/sda1".into(),
        path: "/srv/o".into(),
    }
}

fn disk(attributes: &[(&'static str, &str)]) -> DiskFacts {
    let attributes = attributes.iter().map(|(name, text)| (*name, (*text).to_owned()));
    let (name, bytes) = ("sda".into(), 1 << 30);
    DiskFacts { attributes: attributes.collect(), name, bytes, backing: None }
}

fn loop_on(found: Option<Facts>, start: u64, bytes: u64) -> Facts {
    let attributes = [("loop/backing_file", "/srv/img")];
    let place = "/srv/img (device 8:1 inode 12)".into();
    let backing = Some(Backing { found: found.map(Box::new), place, start });
    Facts::Disk(DiskFacts { bytes, backing, name: "loop0".into(), ..disk(&attributes) })
}

fn known(facts: &Facts) -> Identity {
    of(facts, 1 << 30, 0)
}

/// Compares `now` with the record of `then`.
fn compare(then: &Facts, now: &Facts) -> Match {
    let recorded = known(then);
    known(now).compare(|words| words == recorded.words())
}

/// How `now` compares with what an earlier udm recorded of `then`.
fn compare_former(then: &Facts, now: &Facts) -> Match {
    let recorded = former_of(then, 1 << 30).words;
    known(now).compare(|words| words == recorded)
}

fn changed(change: impl Fn(&mut FileFacts)) -> Facts {
    let mut file = file();
    change(&mut file);
    Facts::File(file)
}

/// A kernel, or a server of files, that is new enough reports when a file was born.
#[test]
fn a_birth_that_came_late_does_not_make_another_file() {
    let on_fuse = |born| changed(|file| (file.inodes_last, file.born) = (false, born));
    let (with, without) = (on_fuse((1, 2)), on_fuse((0, 0)));
    assert_eq!(compare(&without, &with), Match::Possible);
    assert_eq!(compare(&with, &on_fuse((1, 3))), Match::Other);
    assert_eq!(compare(&with, &without), Match::Other, "a downgrade");
    let on_ext4 = |born| changed(|file| file.born = born);
    assert_eq!(compare(&on_ext4((0, 0)), &on_ext4((1, 2))), Match::Other);
}

#[test]
fn a_file_is_known_by_its_place_only_without_an_inode_that_tells_it() {
    assert!(is_by_place(&changed(|file| file.inodes_last = false)));
    assert!(!is_by_place(&changed(|_| {})));
    assert!(!is_by_place(&changed(|file| file.has_twins = true)), "its times are its own");
    assert!(!is_by_place(&Facts::Disk(disk(&[]))));
}

#[test]
fn each_fact_tells_one_file_from_another() {
    let first = changed(|_| {});
    assert_eq!(compare(&first, &first), Match::Exact);
    let others: [fn(&mut FileFacts); 4] = [
        |file| file.fsid += 1,
        |file| file.inode += 1,
        |file| file.born.0 += 1,
        |file| file.born.1 += 1,
    ];
    for other in others {
        assert_eq!(compare(&first, &changed(other)), Match::Other);
    }
    // The place and the device's number do not count where there are better facts.
    let same: [fn(&mut FileFacts); 4] = [
        |file| file.path = "/mnt/o".into(),
        |file| file.mount = "ext4 /dev/sdb1".into(),
        |file| file.late_uuid[0] += 1,
        |file| file.generation = 8,
    ];
    for same in same {
        assert_eq!(compare(&first, &changed(same)), Match::Exact);
    }
    assert_eq!(known(&first).doubt(), None);
    let words = "file on 1111222233334444 inode 12 born 1700000000.000000005";
    assert_eq!(known(&first).words(), words);
}

/// XFS has the device's number where others have a checksum of the UUID.
#[test]
fn the_uuid_of_xfs_counts_and_its_number_does_not() {
    let of = |uuid, fsid| changed(move |file| (file.uuid, file.fsid) = (uuid, fsid));
    let first = of(UUID, NUMBER);
    let words = "file on 30313233-3435-3637-3839-616263646566 inode 12 born 1700000000.000000005";
    assert_eq!(known(&first).words(), words);
    assert_eq!(compare(&first, &of(UUID, 0x0000_0702_0000_0000)), Match::Exact);
    assert_eq!(compare(&first, &of(*b"1123456789abcdef", NUMBER)), Match::Other);
    assert_eq!(compare(&first, &of(Uuid::default(), NUMBER)), Match::Other);
}

/// Linux 6.9 reports the UUIDs of more file systems.
#[test]
fn a_newer_kernel_knows_the_disks_of_an_older_one() {
    let of = |fsid, is_born: bool| {
        [Uuid::default(), UUID].map(|late_uuid| {
            let born = if is_born { (1_700_000_000, 5) } else { (0, 0) };
            changed(move |file| (file.fsid, file.born, file.late_uuid) = (fsid, born, late_uuid))
        })
    };
    let on_loop = |facts: [Facts; 2]| facts.map(|facts| loop_on(Some(facts), 0, 32 << 20));
    // ext4 and btrfs, also without a time of birth, and f2fs.
    for (fsid, is_born) in [(FSID, true), (FSID, false), (NUMBER, true)] {
        for [old, new] in [of(fsid, is_born), on_loop(of(fsid, is_born))] {
            assert_eq!(compare(&old, &new), Match::Exact, "{fsid:#x}, {is_born}");
            assert_eq!(compare(&new, &old), Match::Exact, "{fsid:#x}, {is_born}");
        }
    }
    // f2fs without a time of birth. The older kernel has too few facts to tell.
    for [old, new] in [of(NUMBER, false), on_loop(of(NUMBER, false))] {
        assert_eq!(compare(&new, &new), Match::Exact);
        assert_eq!(compare(&old, &new), Match::Possible, "after the upgrade");
        assert_eq!(compare(&new, &old), Match::Other, "an older kernel refuses it");
    }
    let other = changed(|file| (file.fsid, file.born, file.inode) = (NUMBER, (0, 0), 13));
    let [old, _] = of(NUMBER, false);
    assert_eq!(compare(&old, &other), Match::Other);
}

#[test]
fn a_subvolume_counts_unless_it_is_zero() {
    let of = |number| changed(move |file| file.subvolume = number);
    let inode = "inode 12 born 1700000000.000000005";
    let on = "file on 1111222233334444";
    assert_eq!(known(&of(0)).words(), format!("{on} {inode}"));
    assert_eq!(known(&of(10)).words(), format!("{on} subvolume 000000000000000a {inode}"));
    for (then, now) in [(10, 0), (10, 11)] {
        assert_eq!(compare(&of(then), &of(now)), Match::Other, "{then}, {now}");
    }
    assert_eq!(compare(&of(0), &of(10)), Match::Possible, "an older kernel did not report it");
    assert_eq!(compare(&of(10), &of(10)), Match::Exact);
}

/// Clones on one server, and snapshots, have the same inodes, births and generations.
#[test]
fn a_file_that_may_have_twins_is_never_certain() {
    let nfs = |inode| {
        changed(move |file| {
            (file.fsid, file.late_uuid, file.has_twins) = (0, Uuid::default(), true);
            file.inode = inode;
        })
    };
    assert_eq!(known(&nfs(12)).words(), "file inode 12 born 1700000000.000000005");
    assert!(known(&nfs(12)).doubt().is_some_and(|doubt| doubt.contains("clone")));
    assert_eq!(compare(&nfs(12), &nfs(12)), Match::Possible);
    assert_eq!(compare_former(&nfs(12), &nfs(12)), Match::Possible);
    assert_eq!(compare(&nfs(12), &nfs(13)), Match::Other);
    let image = loop_on(Some(nfs(12)), 0, 32 << 20);
    assert_eq!(compare(&image, &image), Match::Possible, "a loop device on it");
}

/// bcachefs reports the subvolume since Linux 6.10.
#[test]
fn a_snapshot_is_another_subvolume() {
    let of = |number| changed(move |file| (file.subvolume, file.has_twins) = (number, number == 0));
    assert_eq!(compare(&of(1), &of(1)), Match::Exact);
    assert_eq!(compare(&of(1), &of(2)), Match::Other, "a snapshot");
    assert_eq!(compare(&of(0), &of(0)), Match::Possible, "an older kernel");
    assert_eq!(compare(&of(0), &of(2)), Match::Possible, "after an upgrade of the kernel");
    assert_eq!(compare(&of(1), &of(0)), Match::Other, "an older kernel refuses it");
}

#[test]
fn the_generation_stands_for_the_birth() {
    let unborn =
        |generation| changed(move |file| (file.born, file.generation) = ((0, 0), generation));
    assert_eq!(compare(&unborn(7), &unborn(7)), Match::Exact);
    assert_eq!(compare(&unborn(7), &unborn(8)), Match::Other);
    assert_eq!(known(&unborn(7)).doubt(), None);
    assert!(known(&unborn(0)).doubt().is_some(), "another file may get this inode");
}

#[test]
fn a_number_of_the_device_is_not_one_of_the_file_system() {
    let numbered = |fsid| changed(move |file| file.fsid = fsid);
    // 7:0 and 7:1, as XFS has it.
    let (first, second) = (numbered(0x0000_0700_0000_0000), numbered(NUMBER));
    assert_eq!(compare(&first, &second), Match::Exact);
    assert!(!known(&first).words().contains(" on "));
    // Neither half of a number may be absent.
    for part in [0x0000_0000_1234_5678, 0x1234_5678_0000_0000, 0] {
        assert!(!known(&numbered(part)).words().contains(" on "), "{part:#x}");
    }
    // A folded UUID counts.
    assert_eq!(compare(&numbered(FSID), &numbered(FSID + 1)), Match::Other);
}

/// As on a FUSE mount.
fn vague(mount: &str, path: &str) -> Facts {
    Facts::File(FileFacts {
        inode: 2,
        mount: mount.into(),
        path: path.into(),
        ..FileFacts::default()
    })
}

#[test]
fn without_facts_the_place_stands_in() {
    let first = vague("fuse nbdfuse", "/a/o");
    assert_eq!(compare(&first, &first), Match::Possible, "it is the same place");
    assert_eq!(compare(&first, &vague("fuse nbdfuse", "/b/o")), Match::Other);
    assert_eq!(compare(&first, &vague("fuse other", "/a/o")), Match::Other);
    let doubt = known(&first);
    let doubt = doubt.doubt().unwrap();
    assert!(doubt.contains("/a/o") && doubt.contains("fuse nbdfuse"), "{doubt}");
    // Inodes that a mount draws do not count, and neither do zeroes.
    let changes: [fn(&mut FileFacts); 2] = [|file| file.inode = 3, |file| file.inode = 0];
    for change in changes {
        let Facts::File(mut file) = first.clone() else { unreachable!() };
        change(&mut file);
        assert_eq!(compare(&first, &Facts::File(file)), Match::Possible);
    }
    // A time of birth counts, but alone it is not a proof.
    let born = |at| changed(move |file| (file.inodes_last, file.born) = (false, (at, 0)));
    assert_eq!(compare(&born(1), &born(2)), Match::Other);
    assert_eq!(compare(&born(1), &born(1)), Match::Possible);
    let zero_inode = changed(|file| file.inode = 0);
    assert!(known(&zero_inode).doubt().is_some());
}

#[test]
fn a_loop_device_is_a_part_of_its_file() {
    let on =
        |change: fn(&mut FileFacts), start, bytes| loop_on(Some(changed(change)), start, bytes);
    let first = on(|_| {}, 0, 32 << 20);
    assert_eq!(compare(&first, &first), Match::Exact);
    assert_eq!(compare(&first, &on(|_| {}, 32 << 20, 32 << 20)), Match::Other, "another part");
    assert_eq!(compare(&first, &on(|_| {}, 0, 16 << 20)), Match::Other, "another limit");
    assert_eq!(compare(&first, &on(|file| file.inode = 13, 0, 32 << 20)), Match::Other);
    assert_eq!(compare(&first, &on(|file| file.born.1 = 6, 0, 32 << 20)), Match::Other);
    assert_eq!(
        compare(&first, &on(|file| file.path = "/mnt/img".into(), 0, 32 << 20)),
        Match::Exact
    );
    let lost = loop_on(None, 0, 32 << 20);
    assert_eq!(compare(&first, &lost), Match::Other);
    assert_eq!(compare(&lost, &lost), Match::Possible);
    // The doubt about a file is one about the device.
    let fuse = loop_on(Some(vague("fuse nbdfuse", "/a/o")), 0, 32 << 20);
    assert!(known(&fuse).doubt().is_some_and(|doubt| doubt.contains("/a/o")));
    // The file is not the device.
    assert_eq!(compare(&changed(|_| {}), &first), Match::Other);
}

#[test]
fn a_partition_is_a_part_of_its_disk() {
    let serial = || disk(&[("wwid", "naa.500a075112345678")]);
    let part = |disk, nth, start, len| Facts::Partition(disk, nth, start, len);
    let first = part(serial(), 1, 1 << 20, 8 << 20);
    assert_eq!(compare(&first, &part(serial(), 1, 1 << 20, 8 << 20)), Match::Exact);
    assert_eq!(compare(&first, &part(serial(), 2, 1 << 20, 8 << 20)), Match::Exact, "renumbered");
    assert_eq!(compare(&first, &part(serial(), 1, 2 << 20, 8 << 20)), Match::Other);
    assert_eq!(compare(&first, &part(serial(), 1, 1 << 20, 9 << 20)), Match::Other);
    let other = disk(&[("wwid", "naa.500a075112345679")]);
    assert_eq!(compare(&first, &part(other, 1, 1 << 20, 8 << 20)), Match::Other);
    assert_eq!(compare(&first, &Facts::Disk(serial())), Match::Other);
    let nameless = part(disk(&[]), 1, 1 << 20, 8 << 20);
    assert!(known(&nameless).doubt().is_some());
}

#[test]
fn a_serial_number_counts_with_size_and_model() {
    for name in ["wwid", "device/wwid", "serial", "device/serial", "backend"] {
        let numbered = |text, model| Facts::Disk(disk(&[(name, text), ("device/model", model)]));
        let first = numbered("S3Z9NB0K", "870 EVO");
        // Another server may have been given this name.
        let same = if name == "backend" { Match::Possible } else { Match::Exact };
        assert_eq!(compare(&first, &first), same, "{name}");
        assert_eq!(compare(&first, &numbered("S3Z9NB0L", "870 EVO")), Match::Other, "{name}");
        assert_eq!(compare(&first, &numbered("S3Z9NB0K", "860 EVO")), Match::Other, "{name}");
        let Facts::Disk(mut longer) = first.clone() else { unreachable!() };
        longer.bytes += 512;
        assert_eq!(compare(&first, &Facts::Disk(longer)), Match::Other, "{name}");
    }
}

#[test]
fn a_serial_number_of_many_counts_for_nothing() {
    for text in [
        "0000000000",
        "naa.0000000000000000",
        "eui.ffffffffffffffff",
        "0x00",
        "None",
        "0123456789ABCDEF",
        "To be filled by O.E.M.",
        "Not Specified",
        "-",
        "N/A",
    ] {
        let identity = known(&Facts::Disk(disk(&[("wwid", text)])));
        assert_eq!(identity.words(), "block device sda of 1073741824 bytes", "{text}");
        assert!(identity.doubt().is_some_and(|doubt| doubt.contains("sda")), "{text}");
        // The next one, which is distinctive, counts.
        let second = disk(&[("wwid", text), ("device/serial", "S3Z9NB0K")]);
        assert!(known(&Facts::Disk(second)).words().starts_with("serial S3Z9NB0K"), "{text}");
    }
}

#[test]
fn a_number_after_the_names_of_maker_and_model_counts() {
    let ata = |serial| format!("t10.ATA     {:<40}{serial}", "QEMU HARDDISK 00");
    let nvme = |serial: &str| {
        let hex: String = serial.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!("nvme.1b36-{hex}-51454d55204e564d65-00000001")
    };
    let telling = [
        ata("WD-WCC7K0123456"),
        ata("QM0000A"),
        ata("QM000001"),
        ata("S3Z9000"),
        nvme("S3Z9NB0K"),
        "t10.LIO-ORG 6d2f0b1a".into(),
        "naa.5000c50012345678".into(),
        "eui.0025385b71b00000".into(),
        "QMX".into(),
        "SN: 4711".into(),
        "eui.0025385b70000000".into(),
    ];
    for text in telling {
        assert!(is_telling(&text), "{text}");
    }
    let of_many = [
        ata(""),
        ata("00000000000000000000"),
        ata("QM00001"),
        ata("QM00013"),
        ata("SSD0000"),
        ata("0123456789ABCDEF"),
        nvme(""),
        nvme("00000000"),
        nvme("None"),
        "QM00001".into(),
        nvme("nvme_card0"),
        nvme("nvme_card-pd"),
        "SN: 000001".into(),
        "eui.0000000100000000".into(),
        "t10.LIO-ORG 00000000".into(),
        "t10.IET     00010001".into(),
        "naa.5000c50000000000".into(),
        "eui.0025385000000000".into(),
    ];
    for text in of_many {
        assert!(!is_telling(&text), "{text}");
        let identity = known(&Facts::Disk(disk(&[("device/wwid", text.as_str())])));
        assert!(identity.doubt().is_some_and(|doubt| doubt.contains("sda")), "{text}");
    }
}

#[test]
fn the_uuid_of_an_array_comes_first_and_the_array_may_grow() {
    let names =
        [("dm/uuid", "dm LVM-x1"), ("md/uuid", "md LVM-x1"), ("device/uuid", "region LVM-x1")];
    for (name, words) in names {
        let mut grown = disk(&[(name, "LVM-x1"), ("dm/name", "vg-lv"), ("serial", "S3Z9")]);
        grown.bytes *= 2;
        let first = Facts::Disk(disk(&[(name, "LVM-x1")]));
        assert_eq!(known(&first).words(), words);
        assert_eq!(compare(&first, &Facts::Disk(grown)), Match::Exact);
    }
    let named = known(&Facts::Disk(disk(&[("dm/name", "vg-lv")])));
    assert_eq!(named.words(), "dm name vg-lv of 1073741824 bytes");
    assert!(named.doubt().is_some_and(|doubt| doubt.contains("vg-lv")));
    let zero = disk(&[("dm/uuid", "00000000-0000"), ("dm/name", "vg-lv")]);
    assert_eq!(known(&Facts::Disk(zero)).words(), named.words(), "a UUID of zeroes is absent");
}

/// cryptsetup makes the UUIDs of some formats of the mapping's name.
#[test]
fn a_uuid_that_is_only_a_name_counts_as_a_name() {
    let mapping = |uuid: &str| Facts::Disk(disk(&[("dm/uuid", uuid), ("dm/name", "vault")]));
    let plain = known(&mapping("CRYPT-PLAIN-vault"));
    assert_eq!(plain.words(), "dm name vault of 1073741824 bytes");
    assert!(plain.doubt().is_some());
    // The first udm recorded it as a UUID.
    assert_eq!(plain.compare(|words| words == "dm CRYPT-PLAIN-vault"), Match::Possible);
    let hex = "0123456789abcdef0123456789abcdef";
    let luks = format!("CRYPT-LUKS2-{hex}-vault");
    assert_eq!(known(&mapping(&luks)).words(), format!("dm {luks}"));
    for name in [
        format!("CRYPT-PLAIN-{hex}"),
        format!("CRYPT-TCRYPT-{hex}-1"),
        format!("CRYPT-LUKS2-vault-{hex}"),
        format!("CRYPT-LUKS2-{hex}0-vault"),
        "CRYPT-PLAIN-a".into(),
        "CRYPT-".into(),
    ] {
        assert!(known(&mapping(&name)).words().starts_with("dm name"), "{name}");
    }
}

#[test]
fn a_part_begins_somewhere() {
    let facts = changed(|_| {});
    let at = |start| of(&facts, 1 << 30, start);
    assert_ne!(at(0).words(), at(4096).words());
    assert_ne!(at(4096).words(), at(8192).words());
    let recorded = former_of(&facts, 1 << 30).words + " from byte 4096";
    assert_eq!(at(4096).compare(|words| words == recorded), Match::Exact, "an earlier mark");
    assert_eq!(at(8192).compare(|words| words == recorded), Match::Other);
}

#[test]
fn earlier_marks_count_where_they_were_right() {
    let file = changed(|_| {});
    let words = "file on 1111222233334444 inode 12 born 1700000000.000000005";
    assert_eq!(former_of(&file, 1 << 30).words, words);
    assert_eq!(compare_former(&file, &file), Match::Exact);
    assert_eq!(compare_former(&file, &changed(|file| file.inode = 13)), Match::Other);
    assert_eq!(compare_former(&file, &changed(|file| file.fsid += 1)), Match::Other);
    // Too coarse: these agree with other disks.
    let fuse = vague("fuse nbdfuse", "/a/o");
    assert_eq!(compare_former(&fuse, &vague("fuse nbdfuse", "/b/o")), Match::Possible);
    let image = loop_on(Some(changed(|_| {})), 0, 32 << 20);
    let other = loop_on(Some(changed(|file| file.inode = 13)), 0, 32 << 20);
    assert_eq!(former_of(&image, 32 << 20).words, "loop on /srv/img of 33554432 bytes");
    assert_eq!(compare_former(&image, &other), Match::Possible);
    let bridge = Facts::Disk(disk(&[("device/wwid", "t10.USB 0123"), ("device/model", "X")]));
    assert_eq!(former_of(&bridge, 1 << 30).words, "wwid t10.USB 0123");
    assert_eq!(compare_former(&bridge, &bridge), Match::Possible);
    let part = Facts::Partition(disk(&[]), 3, 1 << 20, 8 << 20);
    assert_eq!(former_of(&part, 8 << 20).words, "block device sda3 partition 3 of 8388608 bytes");
    // Exact, then as now.
    let array = Facts::Disk(disk(&[("md/uuid", "a:b:c")]));
    assert_eq!(compare_former(&array, &array), Match::Exact);
}

#[test]
fn long_identities_stay_distinct() {
    let long = |end: &str| shortened(format!("{}{end}", "\u{e9}".repeat(300)));
    assert_ne!(long("a"), long("b"));
    assert!(long("a").len() <= IDENTITY_BYTES_MAX);
    for bytes in [5, IDENTITY_BYTES_MAX] {
        assert_eq!(shortened("s".repeat(bytes)), "s".repeat(bytes));
    }
    let cut = shortened("s".repeat(IDENTITY_BYTES_MAX + 1));
    assert!(cut.len() <= IDENTITY_BYTES_MAX && cut.contains('~'), "{cut}");
}
