//! Mapped devices over RAM disks: splitting, parking, swapping tables, contracts.

mod parts;
mod telling;

use proptest::prelude::*;

use super::*;
use crate::bio::Op;
use crate::buffer::Buffer;
use crate::build::{BuildOptions, NamedDevices, build};
use crate::disk::{Disk, DiskLimits, RamDisk, Ring};
use crate::error::Status;
use crate::local::{Local, ManualClock};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::table::Table;
use crate::target::Target;
use crate::units::{BIO_BYTES_MAX, KIB, MIB, SECOND};

fn devices() -> (NamedDevices, Arc<RamDisk>) {
    let mut devices = NamedDevices::new();
    let disk = Arc::new(RamDisk::new(MIB, 512).named("/a"));
    devices.add_disk("/a", disk.clone());
    (devices, disk)
}

fn load(devices: &NamedDevices, text: &str) -> LoadedTable {
    build(&Table::parse(text).unwrap(), devices, &BuildOptions::named(1)).unwrap()
}

fn device(text: &str) -> Arc<Device> {
    Device::with_table("d", load(&devices().0, text)).unwrap()
}

/// A disk that keeps its I/O until the test has it carried out.
#[derive(Debug)]
struct HeldDisk {
    ram: RamDisk,
    held: Mutex<Vec<DiskIo>>,
}

impl HeldDisk {
    fn new() -> Arc<HeldDisk> {
        Arc::new(HeldDisk { ram: RamDisk::new(MIB, 512), held: Mutex::default() })
    }

    fn release(&self, ring: &mut Ring) {
        for io in std::mem::take(&mut *lock(&self.held)) {
            self.ram.start(io, ring);
        }
    }
}

impl Disk for HeldDisk {
    fn limits(&self) -> &DiskLimits {
        self.ram.limits()
    }

    fn start(&self, io: DiskIo, _ring: &mut Ring) {
        lock(&self.held).push(io);
    }

    fn carry_out(&self, ios: Vec<DiskIo>) -> Vec<DiskIo> {
        self.ram.carry_out(ios)
    }
}

/// A target that answers immediately and records its requests.
#[derive(Debug, Default)]
struct Probe {
    log: Mutex<Vec<String>>,
    is_busy: AtomicBool,
    fails_suspend: AtomicBool,
}

impl Probe {
    fn taken(&self) -> Vec<String> {
        std::mem::take(&mut lock(&self.log))
    }
}

impl Target for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        lock(&self.log).push(format!("{:?} {}+{}", bio.op, bio.offset, bio.len));
        port.finish(bio, Ok(()));
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {
        unreachable!("emits no I/O");
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(4096, false)
    }

    fn status(&self) -> String {
        "all well".into()
    }

    fn table(&self) -> String {
        "1 2".into()
    }

    fn message(&self, words: &[String]) -> Result<String> {
        Ok(words.join("+"))
    }

    fn dirty(&self) -> Dirty {
        Dirty { bytes: 7, is_failing: false }
    }

    fn suspend(&self) -> Result<()> {
        if self.fails_suspend.load(Ordering::SeqCst) {
            return Err(Error::new(Kind::Io, "no"));
        }
        lock(&self.log).push("suspend".into());
        Ok(())
    }

    fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::SeqCst)
    }

    fn resume(&self) -> Result<()> {
        lock(&self.log).push("resume".into());
        Ok(())
    }
}

fn probes() -> (Arc<Device>, [Arc<Probe>; 2]) {
    let probes: [Arc<Probe>; 2] = Default::default();
    let table = Table::parse("0 8 probe\n8 16 probe").unwrap();
    let table = LoadedTable::new(&table, probes.iter().map(|p| p.clone() as _).collect());
    (Device::with_table("p", table).unwrap(), probes)
}

#[test]
fn names_are_those_that_need_no_mangling() {
    for good in ["a", "vg-lv_1.x:y=z@#+", &"n".repeat(127)] {
        check_name(good).unwrap();
    }
    for bad in ["", ".", "..", "-a", "a/b", "a b", "\u{e9}", "a\n", &"n".repeat(128)] {
        assert_eq!(check_name(bad).unwrap_err().kind(), Kind::Invalid, "{bad}");
    }
}

#[test]
fn bios_that_are_wrong_are_refused() {
    let device = device("0 131072 zero");
    let mut local = Local::without_kernel(&device).unwrap();
    let mut status = |op: Op, offset: u64, len: u64| {
        let mut bio = Bio::bare(op, offset, len, false, 1);
        if matches!(op, Op::Read | Op::Write) {
            bio.buffer = Buffer::zeroed(len as usize);
        }
        local.submit(bio);
        local.wait().unwrap().status
    };
    let size = 131_072 * SECTOR;
    assert_eq!(status(Op::Write, size - 512, 512), Ok(()));
    assert_eq!(status(Op::Write, size - 512, 1024), Err(Status::NoSpace));
    assert_eq!(status(Op::WriteZeroes, size, 512), Err(Status::NoSpace));
    assert_eq!(status(Op::Read, size, 512), Err(Status::Invalid));
    assert_eq!(status(Op::Discard, u64::MAX - 511, 512), Err(Status::Invalid));
    assert_eq!(status(Op::Write, 256, 512), Err(Status::Invalid));
    assert_eq!(status(Op::Read, 0, 511), Err(Status::Invalid));
    assert_eq!(status(Op::Read, 0, BIO_BYTES_MAX), Ok(()));
    assert_eq!(status(Op::Read, 0, BIO_BYTES_MAX + 512), Err(Status::Invalid));
    assert_eq!(status(Op::Discard, 0, BIO_BYTES_MAX + 512), Err(Status::Invalid));
    assert_eq!(status(Op::Write, 0, 0), Ok(()));
    assert_eq!(status(Op::Flush, 0, 0), Ok(()));
}

#[test]
fn a_bio_across_lines_is_cut_and_joined() {
    let (device, [first, second]) = probes();
    let mut local = Local::without_kernel(&device).unwrap();
    local.discard(3584, 1024).unwrap();
    local.flush().unwrap();
    local.write_zeroes(4096, 512, false).unwrap();
    assert_eq!(first.taken(), ["Discard 3584+512", "Flush 0+0"]);
    assert_eq!(second.taken(), ["Discard 0+512", "Flush 0+0", "WriteZeroes 0+512"]);
    assert_eq!(device.limits(), TargetLimits::new(4096, false));
    assert_eq!(device.dirty().bytes, 14);
}

#[test]
fn lines_are_printed_and_messages_find_theirs() {
    let (device, _) = probes();
    assert_eq!(device.status(), ["0 8 probe all well", "8 16 probe all well"]);
    assert_eq!(device.table(), ["0 8 probe 1 2", "8 16 probe 1 2"]);
    assert_eq!(device.facts().len(), 2);
    assert_eq!(device.message(23, &["a".into(), "b".into()]).unwrap(), "a+b");
    let error = device.message(24, &["a".into()]).unwrap_err();
    assert_eq!(error.to_string(), "p: Target message sector outside device: 24");
    assert!(device.message(0, &[]).is_err());
    let device = self::device("0 8 zero");
    let error = device.message(0, &["a".into()]).unwrap_err();
    assert_eq!(error.to_string(), "d: Target type does not support messages: zero");
}

#[test]
fn a_device_without_a_table_fails_requests() {
    let device = Device::new("d").unwrap();
    let mut local = Local::without_kernel(&device).unwrap();
    assert_eq!(local.flush(), Err(Status::Io));
    assert_eq!(device.resume().unwrap_err().to_string(), "d: no table is loaded");
    assert_eq!(device.begin_suspend().unwrap_err().to_string(), "d: no table is active");
    assert_eq!(device.info().state, DeviceState::Empty);
    device.load(load(&devices().0, "0 8 zero")).unwrap();
    assert_eq!(device.inactive_table(), ["0 8 zero "]);
    assert_eq!((device.table().len(), device.size_bytes()), (0, 0));
    device.resume().unwrap();
    assert_eq!((device.table().len(), device.size_bytes()), (1, 4096));
    local.flush().unwrap();
    let info = device.info();
    assert_eq!((info.state, info.targets, info.ports), (DeviceState::Active, 1, 1));
}

#[test]
fn suspend_parks_new_bios_and_waits_for_old_ones() {
    let mut devices = NamedDevices::new();
    let disk = HeldDisk::new();
    devices.add_disk("/h", disk.clone());
    for text in ["0 64 linear /h 0", "0 32 linear /h 0\n32 32 linear /h 32"] {
        let device = Device::with_table("d", load(&devices, text)).unwrap();
        let local = Local::without_kernel(&device).unwrap();
        let mut local = local.with_background(ManualClock::default());
        local.submit(Bio::write(0, Buffer::zeroed(32 * KIB as usize), true, 1));
        local.turn();
        device.begin_suspend().unwrap();
        local.submit(Bio::flush(2));
        assert_eq!((local.parked(), device.info().bios_in_flight), (1, 1));
        assert!(!device.finish_suspend().unwrap());
        // The write, then the flush that FUA asks for.
        for _ in 0..2 {
            disk.release(local.ring());
            local.turn();
        }
        assert_eq!(local.poll().unwrap().token, 1);
        assert!(local.poll().is_none());
        // Then each written line is flushed once.
        assert!(device.is_quiet() && !device.finish_suspend().unwrap());
        local.turn();
        assert!(!device.finish_suspend().unwrap());
        disk.release(local.ring());
        local.turn();
        assert!(device.finish_suspend().unwrap());
        assert_eq!(device.info().state, DeviceState::Suspended);
        // Suspending again has no effect.
        device.begin_suspend().unwrap();
        assert!(device.finish_suspend().unwrap());
        device.resume().unwrap();
        local.turn();
        disk.release(local.ring());
        let bio = local.poll().unwrap();
        assert_eq!((bio.token, bio.status), (2, Ok(())));
    }
}

#[test]
fn targets_are_suspended_once_each_and_resumed() {
    let (device, [first, second]) = probes();
    second.is_busy.store(true, Ordering::SeqCst);
    device.begin_suspend().unwrap();
    assert!(!device.finish_suspend().unwrap());
    assert!(!device.finish_suspend().unwrap());
    second.is_busy.store(false, Ordering::SeqCst);
    assert!(device.finish_suspend().unwrap());
    assert_eq!((first.taken(), second.taken()), (vec!["suspend".into()], vec!["suspend".into()]));
    device.resume().unwrap();
    assert_eq!((first.taken(), second.taken()), (vec!["resume".into()], vec!["resume".into()]));
    // A target that cannot: those before it are taken back.
    second.fails_suspend.store(true, Ordering::SeqCst);
    device.begin_suspend().unwrap();
    assert_eq!(device.finish_suspend().unwrap_err().to_string(), "p: no");
    device.resume().unwrap();
    assert_eq!(first.taken(), ["suspend", "resume"]);
    assert_eq!(second.taken(), Vec::<String>::new());
    assert_eq!(device.info().state, DeviceState::Active);
}

/// A target that parks bios until it has free space, and signals when it has.
#[derive(Debug, Default)]
struct Narrow {
    events: Arc<Events>,
    has_room: AtomicBool,
}

impl Target for Narrow {
    fn name(&self) -> &'static str {
        "narrow"
    }

    fn submit(&self, bio: Bio, port: &mut Port) {
        match self.has_room.load(Ordering::SeqCst) {
            true => port.finish(bio, Ok(())),
            false => port.parked.push_back(bio),
        }
    }

    fn complete(&self, _io: DiskIo, _port: &mut Port) {
        unreachable!("emits no I/O");
    }

    fn events(&self) -> Option<&Arc<Events>> {
        Some(&self.events)
    }

    fn limits(&self) -> TargetLimits {
        TargetLimits::new(512, false)
    }

    fn status(&self) -> String {
        String::new()
    }

    fn table(&self) -> String {
        String::new()
    }
}

/// A waker that wakes no thread.
pub(super) struct Deaf;

impl Wake for Deaf {
    fn wake(&self) {
        // The port's driver checks by itself.
    }
}

/// A flush of two lines: one waits for free space, the other for its disk. Free space is signalled,
/// and used, while the disk is still busy. Such a request once remained unanswered.
#[test]
fn room_that_is_signalled_while_a_child_is_at_a_disk_is_not_missed() {
    let (disk, narrow) = (HeldDisk::new(), Arc::new(Narrow::default()));
    let table = Table::parse("0 8 linear /h 0\n8 8 narrow").unwrap();
    let args = crate::simple::LinearArgs::parse(&table.lines[0].args).unwrap();
    let linear = crate::simple::Linear::new(&args, 4096, disk.clone()).unwrap();
    let targets: Vec<Arc<dyn Target>> = vec![Arc::new(linear), narrow.clone()];
    let device = Device::with_table("d", LoadedTable::new(&table, targets)).unwrap();
    let mut ring = Ring::without_kernel();
    let (_seat, mut port) = device.attach_port(Arc::new(Deaf)).unwrap();
    device.submit(Bio::flush(1), &mut port);
    let io = port.ios.pop_front().unwrap();
    io.disk.clone().start(io, &mut ring);
    assert!(port.parked.is_empty() && port.done.is_empty());
    // As a queue does when the epoch has moved.
    narrow.has_room.store(true, Ordering::SeqCst);
    device.retry(&mut port);
    disk.release(&mut ring);
    device.complete(ring.pop_completed().unwrap(), &mut port);
    assert!(port.parked.is_empty(), "no later signal would wake it");
    assert_eq!(port.done.pop_front().unwrap().status, Ok(()));
    // Where no room was signalled, it waits as ever.
    narrow.has_room.store(false, Ordering::SeqCst);
    device.submit(Bio::flush(2), &mut port);
    let io = port.ios.pop_front().unwrap();
    io.disk.clone().start(io, &mut ring);
    disk.release(&mut ring);
    device.complete(ring.pop_completed().unwrap(), &mut port);
    assert_eq!((port.parked.len(), port.done.len()), (1, 0));
    narrow.has_room.store(true, Ordering::SeqCst);
    device.retry(&mut port);
    assert_eq!(port.done.pop_front().unwrap().token, 2);
}

#[test]
fn a_suspend_is_taken_back_whatever_is_loaded() {
    let (devices, _) = devices();
    let (device, [first, second]) = probes();
    device.load(load(&devices, "0 64 linear /a 0")).unwrap();
    device.cancel_suspend().unwrap();
    second.is_busy.store(true, Ordering::SeqCst);
    device.begin_suspend().unwrap();
    assert!(!device.finish_suspend().unwrap());
    assert_eq!(device.resume().unwrap_err().kind(), Kind::Busy, "that would change the table");
    device.cancel_suspend().unwrap();
    assert_eq!(device.info().state, DeviceState::Active);
    assert_eq!(first.taken(), ["suspend", "resume"]);
    assert_eq!(device.inactive_table(), ["0 64 linear /a 0"]);
    let mut local = Local::without_kernel(&device).unwrap();
    local.flush().unwrap();
}

#[test]
fn a_new_table_takes_over_parked_bios() {
    let (devices, disk) = devices();
    for text in ["0 64 delay /a 0 1000", "0 32 zero\n32 32 delay /a 0 1000"] {
        let device = Device::with_table("d", load(&devices, text)).unwrap();
        let mut local = Local::without_kernel(&device).unwrap();
        local.submit(Bio::write(24 * KIB, Buffer::from_bytes(&[6; 512]), false, 1));
        local.turn();
        assert_eq!(local.parked(), 1);
        device.load(load(&devices, "0 64 linear /a 0")).unwrap();
        assert_eq!(device.resume().unwrap_err().kind(), Kind::Busy);
        device.begin_suspend().unwrap();
        assert!(device.finish_suspend().unwrap());
        device.resume().unwrap();
        assert_eq!(device.table(), ["0 64 linear /a 0"]);
        assert_eq!(local.wait().unwrap().status, Ok(()));
        let mut byte = [0];
        disk.peek(24 * KIB, &mut byte);
        assert_eq!(byte, [6]);
    }
}

#[test]
fn remove_fails_what_waits_and_lets_go_of_devices() {
    let (devices, disk) = devices();
    let device = Device::with_table("d", load(&devices, "0 64 delay /a 0 1000")).unwrap();
    drop(devices);
    let mut local = Local::without_kernel(&device).unwrap();
    local.submit(Bio::flush(1));
    assert_eq!(device.remove().unwrap_err().kind(), Kind::Busy);
    device.begin_suspend().unwrap();
    assert!(device.finish_suspend().unwrap());
    device.remove().unwrap();
    assert_eq!(local.wait().unwrap().status, Err(Status::Io));
    assert_eq!(Arc::strong_count(&disk), 1);
}

#[test]
fn seats_are_limited_and_used_again() {
    let device = device("0 8 zero");
    let mut locals: Vec<Local> =
        (0..PORTS_MAX).map(|_| Local::without_kernel(&device).unwrap()).collect();
    assert_eq!(Local::without_kernel(&device).unwrap_err().kind(), Kind::Busy);
    locals.remove(7);
    let mut again = Local::without_kernel(&device).unwrap();
    again.flush().unwrap();
    assert_eq!(device.info().ports, PORTS_MAX);
}

#[test]
fn nothing_moves_while_suspended() {
    let (devices, disk) = devices();
    let device = Device::with_table("d", load(&devices, "0 64 linear /a 0\n64 64 zero")).unwrap();
    let is_over = AtomicBool::new(false);
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (device, is_over, written) = (&device, &is_over, &written);
            scope.spawn(move || {
                let mut local = Local::without_kernel(device).unwrap();
                while !is_over.load(Ordering::SeqCst) {
                    local.write_at(&[thread; 1024], 64 * SECTOR - 512, false).unwrap();
                    written.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let background = Local::without_kernel(&device).unwrap();
        let mut background = background.with_background(ManualClock::default());
        for _ in 0..50 {
            background.suspend().unwrap();
            let before = disk.counts().writes;
            std::thread::yield_now();
            assert_eq!(disk.counts().writes, before);
            device.resume().unwrap();
        }
        is_over.store(true, Ordering::SeqCst);
    });
    assert_eq!(disk.counts().writes, written.load(Ordering::SeqCst));
}

/// An action of the model test on a device of 96 sectors.
#[derive(Clone, Debug)]
enum Step {
    Write { sector: u64, count: u64, value: u8, fua: bool },
    Zero { sector: u64, count: u64, op: Op },
    Read { sector: u64, count: u64 },
    Flush,
    Suspend,
    Resume,
    Settle,
}

fn any_step() -> impl Strategy<Value = Step> {
    let range = (0..96u64, 1..40u64).prop_map(|(sector, count)| (sector, count.min(96 - sector)));
    prop_oneof![
        4 => (range.clone(), any::<u8>(), any::<bool>())
            .prop_map(|((sector, count), value, fua)| Step::Write { sector, count, value, fua }),
        1 => (range.clone(), any::<bool>()).prop_map(|((sector, count), discards)| Step::Zero {
            sector,
            count,
            op: if discards { Op::Discard } else { Op::WriteZeroes },
        }),
        4 => range.prop_map(|(sector, count)| Step::Read { sector, count }),
        1 => Just(Step::Flush),
        1 => Just(Step::Suspend),
        2 => Just(Step::Resume),
        2 => Just(Step::Settle),
    ]
}

/// Tables of 96 sectors; sectors 80 and up of the last one are not stored.
const TABLES: [&str; 3] = [
    "0 96 linear /a 0",
    "0 10 linear /a 50\n10 30 delay /a 200 3 /a 200 7\n40 1 linear /a 7\n41 55 delay /a 600 0",
    "0 8 delay /a 8 5\n8 8 delay /a 0 2\n16 64 linear /a 100\n80 16 zero",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// A step that may conflict with one in flight first waits for it, so the model can follow.
    #[test]
    fn any_table_behaves_as_its_bytes(
        table in 0..TABLES.len(),
        steps in prop::collection::vec(any_step(), 1..40),
    ) {
        let (devices, _) = devices();
        let device = Device::with_table("d", load(&devices, TABLES[table])).unwrap();
        let clock = ManualClock::default();
        let mut local = Local::without_kernel(&device).unwrap().with_background(clock.clone());
        let stored = if table == 2 { 80 } else { 96 };
        let mut model = [0u8; 96];
        let mut expected: Vec<Option<Vec<u8>>> = Vec::new();
        let settle = |local: &mut Local, expected: &mut Vec<Option<Vec<u8>>>| {
            device.resume().unwrap();
            while let Some(bio) = local.wait() {
                assert_eq!(bio.status, Ok(()));
                let expected = expected[bio.token as usize].take().expect("each comes out once");
                if bio.op == Op::Read {
                    let sectors = bio.buffer.as_slice().chunks(512);
                    assert!(sectors.clone().all(|s| s.iter().all(|b| *b == s[0])));
                    assert_eq!(sectors.map(|s| s[0]).collect::<Vec<_>>(), expected);
                }
            }
            assert!(expected.drain(..).all(|left| left.is_none()), "all came out");
        };
        for step in steps {
            let token = expected.len() as u64;
            match step {
                Step::Write { sector, count, value, fua } => {
                    settle(&mut local, &mut expected);
                    let buffer = Buffer::from_bytes(&vec![value; (count * SECTOR) as usize]);
                    local.submit(Bio::write(sector * SECTOR, buffer, fua, 0));
                    expected.push(Some(Vec::new()));
                    settle(&mut local, &mut expected);
                    model[sector as usize..(sector + count) as usize].fill(value);
                    model[stored..].fill(0);
                }
                Step::Zero { sector, count, op } => {
                    settle(&mut local, &mut expected);
                    local.submit(Bio::bare(op, sector * SECTOR, count * SECTOR, false, 0));
                    expected.push(Some(Vec::new()));
                    settle(&mut local, &mut expected);
                    model[sector as usize..(sector + count) as usize].fill(0);
                }
                Step::Read { sector, count } => {
                    let buffer = Buffer::zeroed((count * SECTOR) as usize);
                    local.submit(Bio::read(sector * SECTOR, buffer, token));
                    let range = sector as usize..(sector + count) as usize;
                    expected.push(Some(model[range].to_vec()));
                }
                Step::Flush => {
                    local.submit(Bio::flush(token));
                    expected.push(Some(Vec::new()));
                }
                Step::Suspend => {
                    local.suspend().unwrap();
                }
                Step::Resume => {
                    device.resume().unwrap();
                    clock.advance(SECOND / 500);
                    device.events().work();
                    local.turn();
                }
                Step::Settle => settle(&mut local, &mut expected),
            }
        }
        settle(&mut local, &mut expected);
        prop_assert_eq!(device.info().bios_in_flight, 0);
    }
}

#[test]
fn of_a_request_across_lines_the_first_error_counts() {
    let device = device("0 8 error\n8 8 linear /a 8\n16 8 error");
    let mut local = Local::without_kernel(&device).unwrap();
    assert_eq!(local.write_at(&[7; 1024], 3584, false), Err(Status::Io), "the first child");
    assert_eq!(local.write_at(&[7; 1024], 7680, false), Err(Status::Io), "the last one");
    assert_eq!(local.write_at(&[7; 512], 4096, true), Ok(()), "neither");
    assert_eq!(local.read_at(&mut [0; 1024], 3584), Err(Status::Io));
    assert_eq!(local.write_zeroes(3584, 1024, false), Err(Status::Io));
}
