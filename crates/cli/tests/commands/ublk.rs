//! ublk where the kernel has no driver for it, as on most machines that build udm: the error gives
//! the remedy, and the failed command leaves no traces. The lab tests the disks themselves.

use crate::common::Udm;

#[test]
fn without_the_driver_the_error_says_what_to_do() {
    if std::path::Path::new("/dev/ublk-control").exists() {
        eprintln!("SKIPPED: this kernel has ublk");
        return;
    }
    let udm = Udm::new();
    let error = udm.refused(&["create", "vol", "--table", "0 2048 zero", "--export", "ublk:"]);
    assert!(error.contains("modprobe ublk_drv") && error.contains("nbd"), "{error}");
    assert!(udm.ok(&["ls"]).contains("No devices found"), "the device stayed");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let error = udm.refused(&["export", "vol", "ublk:3?queues=2"]);
    assert!(error.contains("/dev/ublk-control does not exist"), "{error}");
    let error = udm.refused(&["export", "vol", "ublk:three"]);
    assert!(error.contains("which is not a number from 0 to 1048575"), "{error}");
    // The device continues. A device whose server died is also removed without a driver.
    udm.kill_server("vol");
    assert!(udm.ok(&["remove", "vol", "--force"]).contains("had died"));
}
