//! The small targets over RAM disks: their effects on data and time, and their words.

use super::*;
use crate::device::{Device, LoadedTable};
use crate::disk::{Effect, Fault, RamDisk, SimDisk};
use crate::error::Status;
use crate::local::{Local, ManualClock};
use crate::target::Target;
use crate::units::{KIB, MIB, SECOND};

const LEN: u64 = 64 * KIB;

fn words(text: &str) -> Vec<Word> {
    text.split_whitespace().map(Word::new).collect()
}

fn device(target: impl Target + 'static) -> Arc<Device> {
    Device::with_table("t", LoadedTable::single(Arc::new(target), LEN)).unwrap()
}

fn flakey(features: &str) -> (Arc<Device>, Arc<RamDisk>) {
    let disk = Arc::new(RamDisk::new(MIB, 512));
    let args = FlakeyArgs::parse(&words(&format!("d 0 10 5 {features}"))).unwrap();
    (device(Flakey::new(&args, LEN, disk.clone()).unwrap()), disk)
}

/// A local over a flakey device, its clock, and the device in its down interval.
fn fallen(features: &str) -> (Local, ManualClock, Arc<RamDisk>) {
    let (device, disk) = flakey(features);
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&device).unwrap().with_background(clock.clone());
    local.write_at(&[1; 1024], 0, false).unwrap();
    clock.advance(11 * SECOND);
    device.events().work();
    local.turn();
    (local, clock, disk)
}

#[test]
fn linear_maps_and_follows_fua_with_a_flush() {
    let disk = Arc::new(RamDisk::new(MIB, 512));
    let args = LinearArgs::parse(&words("d 16")).unwrap();
    let device = device(Linear::new(&args, LEN, disk.clone()).unwrap());
    let mut local = Local::without_kernel(&device).unwrap();
    local.write_at(&[3; 512], 0, false).unwrap();
    assert_eq!((disk.counts().writes, disk.counts().flushes), (1, 0));
    local.write_at(&[4; 512], 512, true).unwrap();
    local.write_zeroes(1024, 512, true).unwrap();
    assert_eq!((disk.counts().writes, disk.counts().flushes), (3, 2));
    local.flush().unwrap();
    assert_eq!(disk.counts().flushes, 3);
    let mut bytes = [0; 1024];
    disk.peek(16 * 512, &mut bytes);
    assert_eq!((bytes[0], bytes[512]), (3, 4));
}

#[test]
fn each_client_of_a_linear_device_hears_once_of_a_failed_flush() {
    let disk = Arc::new(SimDisk::new(MIB, 512));
    disk.say_to_all();
    let args = LinearArgs::parse(&words("d 0")).unwrap();
    let device = device(Linear::new(&args, LEN, disk.clone()).unwrap());
    let mut clients: Vec<Local> = (0..3).map(|_| Local::without_kernel(&device).unwrap()).collect();
    for client in &mut clients[..2] {
        client.write_at(&[3; 512], 0, false).unwrap();
    }
    disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    assert_eq!(clients[2].flush(), Err(Status::Io), "it asked");
    for expected in [Err(Status::Io), Ok(())] {
        clients[..2].iter_mut().for_each(|client| assert_eq!(client.flush(), expected));
        assert_eq!(clients[2].flush(), Ok(()));
    }
    // FUA causes a flush.
    clients[0].write_at(&[3; 512], 0, false).unwrap();
    disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    assert_eq!(clients[1].flush(), Err(Status::Io));
    assert_eq!(clients[0].write_at(&[3; 512], 512, true), Err(Status::Io));
    assert_eq!(clients[0].write_at(&[3; 512], 512, true), Ok(()));
}

/// The three targets that have a disk, over one with a volatile cache.
fn over_a_volatile_disk() -> Vec<(Arc<SimDisk>, Arc<Device>)> {
    let disks: Vec<_> = (0..3).map(|_| Arc::new(SimDisk::new(MIB, 512))).collect();
    let linear = LinearArgs::parse(&words("d 0")).unwrap();
    let delay = DelayArgs::parse(&words("d 0 0 e 0 1 f 0 9")).unwrap();
    let flakey = FlakeyArgs::parse(&words("d 0 10 5")).unwrap();
    // The disks of the other lanes are not used: writes go to the lane of writes.
    let mut lanes = |location: &Location| -> Result<Arc<dyn Disk>> {
        let is_written = location.device.path == "e";
        Ok(if is_written { disks[1].clone() } else { Arc::new(RamDisk::new(MIB, 512)) })
    };
    let delay = Delay::new(&delay, LEN, &mut lanes).unwrap();
    let devices = [
        device(Linear::new(&linear, LEN, disks[0].clone()).unwrap()),
        device(delay),
        device(Flakey::new(&flakey, LEN, disks[2].clone()).unwrap()),
    ];
    disks.into_iter().zip(devices).collect()
}

#[test]
fn a_suspend_makes_durable_all_that_was_written() {
    for (disk, device) in over_a_volatile_disk() {
        let clock = ManualClock::default();
        let mut local = Local::without_kernel(&device).unwrap().with_background(clock.clone());
        for byte in 1..4 {
            local.write_at(&[byte; 512], u64::from(byte) * 512, false).unwrap();
            local.suspend().unwrap();
            assert!(device.is_durable(), "{:?}", device.table());
            let mut kept = [0];
            disk.crash(&mut crate::prng::Prng::new(1)).peek(u64::from(byte) * 512, &mut kept);
            assert_eq!(kept, [byte], "{:?}", device.table());
            device.resume().unwrap();
        }
        // Durable data needs no flush.
        local.suspend().unwrap();
        device.resume().unwrap();
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush));
        local.suspend().unwrap();
        assert!(device.is_durable(), "{:?}", device.table());
        device.resume().unwrap();
        local.write_zeroes(0, 512, false).unwrap();
        local.suspend().unwrap();
        assert!(!device.is_durable(), "{:?}", device.table());
        device.resume().unwrap();
        disk.heal();
        local.suspend().unwrap();
        assert!(device.is_durable(), "{:?}", device.table());
    }
}

/// A server that was killed leaves writes that no client has flushed.
#[test]
fn linear_makes_durable_what_an_earlier_server_wrote() {
    for refused in 0..2 {
        let disk = Arc::new(SimDisk::new(MIB, 512));
        let target: Arc<dyn Disk> = disk.clone();
        let write = DiskIo::new(&target, Op::Write, 512, Buffer::from_bytes(&[7; 512]), 0);
        disk.carry_out(vec![write]);
        let linear = LinearArgs::parse(&words("d 0")).unwrap();
        let linear = Linear::new(&linear, LEN, target).unwrap();
        disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(refused));
        linear.settle();
        assert_eq!(linear.is_durable(), refused == 0);
        let device = device(linear);
        let background = ManualClock::default();
        let mut local = Local::without_kernel(&device).unwrap().with_background(background);
        local.suspend().unwrap();
        assert!(device.is_durable());
        let mut kept = [0];
        disk.crash(&mut crate::prng::Prng::new(1)).peek(512, &mut kept);
        // A refused flush may have lost what it was to make durable.
        assert!(kept == [7] || refused > 0);
    }
}

/// Its flush is in flight then, and writes pass it.
#[test]
fn a_suspend_that_was_taken_back_has_made_nothing_durable() {
    let rest = Rest::default();
    rest.begin();
    assert!(rest.is_idle() && rest.start().is_none(), "no write was noted");
    rest.note(Op::Read);
    rest.note(Op::Flush);
    rest.begin();
    assert!(rest.is_idle() && rest.is_durable());
    rest.note(Op::Discard);
    rest.begin();
    assert!(!rest.is_idle() && !rest.is_durable());
    let early = rest.start().unwrap();
    assert!(rest.start().is_none(), "one is enough");
    rest.resume();
    rest.note(Op::Write);
    rest.begin();
    // The early one may also end between the two steps of the next.
    assert!(rest.end(early, Ok(())) && !rest.is_idle());
    let late = rest.start().unwrap();
    assert!(rest.end(early, Ok(())) && !rest.is_idle() && !rest.is_durable());
    assert!(rest.end(late, Ok(())) && rest.is_idle() && rest.is_durable());
    assert!(!rest.end(7, Ok(())), "a bio's");
}

#[test]
fn error_fails_all_but_flushes_and_zero_forgets() {
    let mut local = Local::without_kernel(&device(ErrorTarget)).unwrap();
    assert_eq!(local.read_at(&mut [0; 512], 0), Err(Status::Io));
    assert_eq!(local.write_at(&[0; 512], 0, false), Err(Status::Io));
    assert_eq!(local.discard(0, 512), Err(Status::Io));
    assert_eq!(local.flush(), Ok(()));
    let mut local = Local::without_kernel(&device(Zero)).unwrap();
    let mut bytes = [7; 512];
    local.write_at(&bytes, 0, true).unwrap();
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [0; 512]);
}

#[test]
fn delay_reads_its_three_forms() {
    let table = |text: &str| {
        let args = DelayArgs::parse(&words(text)).unwrap();
        let mut open = |location: &Location| -> Result<Arc<dyn Disk>> {
            Ok(Arc::new(RamDisk::new(MIB, 512).named(&location.device.path)))
        };
        Delay::new(&args, LEN, &mut open).unwrap().table()
    };
    for text in ["d 0 500", "d 8 0 e 16 400", "d 0 50 e 0 100 f 0 333"] {
        assert_eq!(table(text), text);
    }
    for text in ["", "d", "d 0", "d 0 1 d", "d 0 1 d 0 1 d 0", "d 0 1 d 0 1 d 0 1 x"] {
        assert!(
            DelayArgs::parse(&words(text))
                .unwrap_err()
                .to_string()
                .contains("exactly 3, 6 or 9 arguments")
        );
    }
    assert!(DelayArgs::parse(&words("d 0 4294967296")).is_err());
}

#[test]
fn delay_is_never_early_and_keeps_its_bios() {
    let disk = Arc::new(RamDisk::new(MIB, 512));
    let args = DelayArgs::parse(&words("d 0 0 d 0 400 d 0 1000")).unwrap();
    let mut open = |_: &Location| -> Result<Arc<dyn Disk>> { Ok(disk.clone()) };
    let device = device(Delay::new(&args, LEN, &mut open).unwrap());
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&device).unwrap().with_background(clock.clone());
    local.read_at(&mut [0; 512], 0).unwrap();
    for n in 0..3 {
        let buffer = Buffer::from_bytes(&[n as u8 + 1; 512]);
        local.submit(Bio::write(n * 512, buffer, false, n));
    }
    local.submit(Bio::flush(9));
    assert!(local.poll().is_none());
    assert_eq!(device.status(), ["0 128 delay 0 3 1"]);
    clock.advance(399 * SECOND / 1000);
    device.events().work();
    assert!(local.poll().is_none());
    // Waiting goes to the next deadline, not beyond it.
    let order: Vec<u64> = std::iter::from_fn(|| local.wait()).map(|bio| bio.token).collect();
    assert_eq!(order, [0, 1, 2, 9]);
    assert_eq!(local::now(&clock), SECOND);
    assert_eq!(device.status(), ["0 128 delay 0 0 0"]);
    let mut bytes = [0; 1536];
    disk.peek(0, &mut bytes);
    assert_eq!((bytes[0], bytes[512], bytes[1024]), (1, 2, 3));
    // A blocking write takes its time too.
    local.write_at(&[9; 512], 0, false).unwrap();
    assert_eq!(local::now(&clock), SECOND + 400 * SECOND / 1000);
}

#[test]
fn delay_with_an_arm_takes_the_time_of_the_way_in_order() {
    let disk = Arc::new(RamDisk::new(MIB, 512));
    // An arm of 1 ms a track and 11 ms a stroke, without a platter.
    let args = DelayArgs::parse(&words("d?seek=1000,11000,0 0 0 d 0 0 d 0 50")).unwrap();
    let mut open = |_: &Location| -> Result<Arc<dyn Disk>> { Ok(disk.clone()) };
    let len = 128 * 512;
    let device = device(Delay::new(&args, len, &mut open).unwrap());
    let clock = ManualClock::default();
    let mut local = Local::without_kernel(&device).unwrap().with_background(clock.clone());
    let ms = |clock: &ManualClock| local::now(clock) * 1000 / SECOND;
    let quarter = len / 4;
    local.write_at(&[1; 512], 0, false).unwrap();
    assert_eq!(ms(&clock), 0, "the arm is there");
    local.write_at(&[2; 512], 512, false).unwrap();
    assert_eq!(ms(&clock), 0, "the arm is there already");
    local.read_at(&mut [0; 512], 1024 + quarter).unwrap();
    assert_eq!(ms(&clock), 6, "half of the stroke's time for a quarter of the way");
    local.read_at(&mut [0; 512], 512).unwrap();
    let back = ms(&clock);
    assert!((11..14).contains(&back), "{back}");
    // Concurrent requests take the same time as consecutive ones, in the order of their arrival.
    for (token, at) in [(0, 0), (1, 2 * quarter), (2, 0)] {
        local.submit(Bio::write(at, Buffer::from_bytes(&[7; 512]), false, token));
    }
    local.submit(Bio::flush(9));
    assert_eq!(device.status(), ["0 128 delay 0 3 1"]);
    let order: Vec<u64> = std::iter::from_fn(|| local.wait()).map(|bio| bio.token).collect();
    assert_eq!(order, [0, 1, 2, 9]);
    let took = ms(&clock) - back;
    assert_eq!(took, 50, "the flush has its delay, and no arm");
    assert_eq!(device.table(), ["0 128 delay ram?seek=1000,11000,0 0 0 ram 0 0 ram 0 50"]);
}

#[test]
fn one_line_has_one_arm() {
    let error = DelayArgs::parse(&words("d 0 0 d?seek=disk 0 0")).unwrap_err().to_string();
    assert!(error.contains("follow the first device"), "{error}");
    assert!(
        DelayArgs::parse(&words("d?seek=slow 0 0")).unwrap_err().to_string().contains("seek=slow")
    );
}

mod local {
    use crate::local::{Clock, ManualClock};

    pub fn now(clock: &ManualClock) -> u64 {
        clock.clone().now()
    }
}

#[test]
fn flakey_turns_over_by_the_clock() {
    let (mut local, clock, _) = fallen("");
    assert_eq!(local.read_at(&mut [0; 512], 0), Err(Status::Io));
    assert_eq!(local.write_at(&[0; 512], 0, false), Err(Status::Io));
    assert_eq!(local.flush(), Err(Status::Io));
    clock.advance(4 * SECOND);
    local.device().events().work();
    local.turn();
    let mut bytes = [0; 512];
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes[0], 1);
    clock.advance(10 * SECOND);
    local.device().events().work();
    local.turn();
    assert_eq!(local.read_at(&mut [0; 512], 0), Err(Status::Io));
}

#[test]
fn flakey_features_do_what_they_say() {
    let mut bytes = [0; 1024];
    let (mut local, _, _) = fallen("1 error_reads");
    assert_eq!(local.read_at(&mut bytes, 0), Err(Status::Io));
    assert_eq!(local.write_at(&[2; 512], 0, true), Ok(()));

    let (mut local, _, disk) = fallen("1 drop_writes");
    local.write_at(&[2; 512], 0, true).unwrap();
    local.flush().unwrap();
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[0], disk.counts().flushes), (1, 0));

    let (mut local, _, _) = fallen("1 error_writes");
    assert_eq!(local.write_at(&[2; 512], 0, false), Err(Status::Io));
    local.read_at(&mut bytes, 0).unwrap();

    let (mut local, _, disk) = fallen("5 corrupt_bio_byte 32 r 77 0");
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!((bytes[30], bytes[31], bytes[32]), (1, 77, 1));
    disk.peek(0, &mut bytes);
    assert_eq!(bytes[31], 1);

    let (mut local, _, disk) = fallen("5 corrupt_bio_byte 1 w 77 0");
    let buffer = Buffer::from_bytes(&[5; 512]);
    local.submit(Bio::write(0, buffer, true, 3));
    let bio = local.wait().unwrap();
    assert_eq!(bio.buffer.as_slice(), [5; 512], "the client's own bytes stay");
    disk.peek(0, &mut bytes);
    assert_eq!((bytes[0], bytes[1]), (77, 5));

    let (mut local, _, _) = fallen("5 corrupt_bio_byte 1 r 77 32");
    local.read_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes[0], 1, "no bio has kernel flags");

    let (mut local, _, disk) = fallen("2 random_read_corrupt 1000000000");
    let changed = (0..20).any(|_| {
        local.read_at(&mut bytes, 0).unwrap();
        bytes != [1; 1024]
    });
    assert!(changed);
    disk.peek(0, &mut bytes);
    assert_eq!(bytes, [1; 1024]);

    let (mut local, _, disk) = fallen("2 random_write_corrupt 1000000000");
    let changed = (0..20).any(|_| {
        local.write_at(&[1; 1024], 0, false).unwrap();
        disk.peek(0, &mut bytes);
        bytes != [1; 1024]
    });
    assert!(changed);
}

#[test]
fn flakey_prints_what_it_reads() {
    for features in [
        "1 drop_writes",
        "2 error_reads error_writes",
        "6 error_reads corrupt_bio_byte 224 w 0 32",
        "4 random_read_corrupt 5 random_write_corrupt 1000000000",
    ] {
        let (device, _) = flakey(features);
        assert_eq!(device.table(), [format!("0 128 flakey ram 0 10 5 {features}")]);
        assert_eq!(device.status(), ["0 128 flakey "]);
    }
    for (written, printed) in [
        ("", "2 error_reads error_writes"),
        ("0", "2 error_reads error_writes"),
        ("1 drop_writes more", "1 drop_writes"),
    ] {
        assert_eq!(flakey(written).0.table(), [format!("0 128 flakey ram 0 10 5 {printed}")]);
    }
    for wrong in [
        "d 0 10",
        "d 0 0 0",
        "d 0 1 1 x",
        "d 0 1 1 2 drop_writes",
        "d 0 1 1 8 error_reads corrupt_bio_byte 1 r 0 0 random_read_corrupt 5",
        "d 0 1 1 3 error_writes random_write_corrupt 5",
        "d 0 1 1 1 lose_writes",
        "d 0 1 1 2 drop_writes drop_writes",
        "d 0 1 1 2 drop_writes error_writes",
        "d 0 1 1 6 corrupt_bio_byte 1 w 0 0 drop_writes",
        "d 0 1 1 4 corrupt_bio_byte 1 w 0",
        "d 0 1 1 5 corrupt_bio_byte 0 r 0 0",
        "d 0 1 1 5 corrupt_bio_byte 1 x 0 0",
        "d 0 1 1 5 corrupt_bio_byte 1 r 256 0",
        "d 0 1 1 2 random_read_corrupt 1000000001",
    ] {
        FlakeyArgs::parse(&words(wrong)).unwrap_err();
    }
}
