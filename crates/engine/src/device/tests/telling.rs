//! Errors of lost writes: each port that was open gets one error, whichever port wrote the data.

use crate::bio::Op;
use crate::build::{BuildOptions, NamedDevices, build};
use crate::device::Device;
use crate::disk::{Disk, DiskIo, DiskLimits, Effect, Fault, RamDisk, Ring, SimDisk};
use crate::error::Status;
use crate::local::Local;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::table::Table;
use crate::units::MIB;

/// A disk whose write-out loses data without a flush, as a file with `?io=lazy` does.
#[derive(Debug)]
struct Lossy {
    ram: RamDisk,
    losses: AtomicU64,
}

impl Disk for Lossy {
    fn limits(&self) -> &DiskLimits {
        self.ram.limits()
    }

    fn start(&self, io: DiskIo, ring: &mut Ring) {
        self.ram.start(io, ring);
    }

    fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }
}

const LINES: &str = "0 1024 linear /a 0\n1024 1024 linear /b 0";

fn device(disks: &[(&str, Arc<dyn Disk>)], text: &str) -> Arc<Device> {
    let mut devices = NamedDevices::new();
    disks.iter().for_each(|(name, disk)| devices.add_disk(name, Arc::clone(disk)));
    let table = build(&Table::parse(text).unwrap(), &devices, &BuildOptions::named(1)).unwrap();
    Device::with_table("d", table).unwrap()
}

fn client(device: &Arc<Device>) -> Local {
    Local::without_kernel(device).unwrap()
}

const LOST: Result<(), Status> = Err(Status::Io);

/// One client writes, the flush of another fails.
fn a_flush_of_somebody_fails() -> Result<(), &'static str> {
    let disk = Arc::new(SimDisk::new(MIB, 512));
    disk.say_to_all();
    let device = device(&[("/a", disk.clone())], "0 2048 linear /a 0");
    let [mut writer, mut other, mut asker] = [(); 3].map(|()| client(&device));
    writer.write_at(&[3; 512], 0, false).unwrap();
    disk.inject(Fault::new(Effect::Fail(Status::Io)).of(Op::Flush).times(1));
    let hears = |local: &mut Local, wanted: Result<(), Status>, what: &'static str| {
        if local.flush() == wanted { Ok(()) } else { Err(what) }
    };
    hears(&mut asker, LOST, "the client whose flush failed")?;
    hears(&mut other, LOST, "a client without writes whose flush covers the write")?;
    hears(&mut writer, LOST, "the client whose write is lost")?;
    for local in [&mut asker, &mut other, &mut writer] {
        hears(local, Ok(()), "a client that got the error")?;
    }
    hears(&mut client(&device), Ok(()), "a client that connected after the others got the error")
}

#[test]
fn every_client_hears_once_of_a_flush_that_failed() {
    assert_eq!(a_flush_of_somebody_fails(), Ok(()));
}

#[cfg(feature = "mutants")]
#[test]
fn every_mutant_of_losses_is_found() {
    for mutant in crate::mutants::Mutant::LOSSES {
        crate::mutants::set(Some(*mutant));
        let found = a_flush_of_somebody_fails();
        crate::mutants::set(None);
        assert!(found.is_err(), "{mutant:?} was not found");
    }
}

#[test]
fn what_nobody_heard_of_the_next_client_hears() {
    let lossy = Arc::new(Lossy { ram: RamDisk::new(MIB, 512), losses: AtomicU64::new(0) });
    let device = device(&[("/a", lossy.clone()), ("/b", Arc::new(RamDisk::new(MIB, 512)))], LINES);
    let mut before = client(&device);
    assert_eq!(before.flush(), Ok(()));
    lossy.losses.store(1, Ordering::SeqCst);
    let mut newcomer = client(&device);
    // A write with FUA also answers for earlier writes; a write without FUA does not.
    assert_eq!(newcomer.write_at(&[1; 512], 0, false), Ok(()));
    assert_eq!(newcomer.write_at(&[1; 512], 0, true), LOST);
    assert_eq!(newcomer.write_at(&[1; 512], 0, true), Ok(()));
    assert_eq!(client(&device).flush(), Ok(()), "another client got the error");
    assert_eq!([before.flush(), before.flush()], [LOST, Ok(())]);
    // A second loss is another one.
    lossy.losses.store(2, Ordering::SeqCst);
    lossy.losses.store(3, Ordering::SeqCst);
    assert_eq!([newcomer.flush(), newcomer.flush()], [LOST, Ok(())]);
}

#[test]
fn another_table_does_not_make_a_loss_forgotten() {
    let lossy = Arc::new(Lossy { ram: RamDisk::new(MIB, 512), losses: AtomicU64::new(0) });
    let mut devices = NamedDevices::new();
    devices.add_disk("/a", lossy.clone());
    let load = |text: &str| {
        build(&Table::parse(text).unwrap(), &devices, &BuildOptions::named(1)).unwrap()
    };
    let device = Device::with_table("d", load("0 1024 linear /a 0")).unwrap();
    let [mut first, mut second] = [(); 2].map(|()| client(&device));
    lossy.losses.store(1, Ordering::SeqCst);
    assert_eq!(first.flush(), LOST);
    device.load(load("0 2048 linear /a 0")).unwrap();
    device.begin_suspend().unwrap();
    assert!(device.finish_suspend().unwrap());
    device.resume().unwrap();
    assert_eq!([second.flush(), second.flush()], [LOST, Ok(())]);
    assert_eq!(first.flush(), Ok(()), "it got the error before");
}

/// A client whose thread ends and starts again, as a virtual machine's does when it is paused.
#[test]
fn a_client_that_continues_on_another_port_gets_its_error() {
    let lossy = Arc::new(Lossy { ram: RamDisk::new(MIB, 512), losses: AtomicU64::new(0) });
    let mut devices = NamedDevices::new();
    devices.add_disk("/a", lossy.clone());
    let load = |text: &str| {
        build(&Table::parse(text).unwrap(), &devices, &BuildOptions::named(1)).unwrap()
    };
    let device = Device::with_table("d", load("0 1024 linear /a 0")).unwrap();
    let continued = |local: &Local| {
        let reported = local.driver().reported();
        let mut next = client(&device);
        next.driver_mut().continue_from(reported);
        next
    };
    let [mut asker, mut paused] = [(); 2].map(|()| client(&device));
    assert_eq!([asker.flush(), paused.flush()], [Ok(()), Ok(())]);
    // Lost before the pause, and during it.
    for _ in 0..2 {
        lossy.losses.fetch_add(1, Ordering::SeqCst);
        assert_eq!([asker.flush(), asker.flush()], [LOST, Ok(())]);
        paused = continued(&paused);
        assert_eq!([paused.flush(), paused.flush()], [LOST, Ok(())]);
        assert_eq!(continued(&paused).flush(), Ok(()), "it got its error");
        let reported = paused.driver().reported();
        lossy.losses.fetch_add(1, Ordering::SeqCst);
        assert_eq!(asker.flush(), LOST);
        paused = client(&device);
        paused.driver_mut().continue_from(reported);
        assert_eq!([paused.flush(), paused.flush()], [LOST, Ok(())]);
    }
    // Another table in the meantime does not make the error forgotten.
    lossy.losses.fetch_add(1, Ordering::SeqCst);
    let reported = paused.driver().reported();
    drop(paused);
    assert_eq!(asker.flush(), LOST);
    device.load(load("0 2048 linear /a 0")).unwrap();
    device.begin_suspend().unwrap();
    assert!(device.finish_suspend().unwrap());
    device.resume().unwrap();
    let mut next = client(&device);
    next.driver_mut().continue_from(reported);
    assert_eq!([next.flush(), next.flush(), asker.flush()], [LOST, Ok(()), Ok(())]);
}
