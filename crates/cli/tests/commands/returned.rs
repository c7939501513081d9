//! An origin on FUSE whose program ended, and that is at its path again: the server has the old
//! file open, which fails for good. It reports that, and `remove` and `create` continue.

use crate::common::{Udm, for_clients, pattern, text, wait_until, write_export};
use crate::disks::Disks;

const MIB: u64 = 1 << 20;

#[test]
fn an_origin_that_is_back_at_its_path_is_said_and_goes_on_with_a_new_server() {
    for target in ["pcache", "writecache", "cache"] {
        let udm = Udm::new();
        let sizes = [("disk".to_owned(), 16 * MIB)];
        let mount = || Disks::mount(&udm.path("disks"), &sizes, 1);
        let Some(disks) = mount() else { return };
        let origin = disks.path("disk");
        let (fast, meta) = (udm.file("fast", 520 * MIB), udm.file("meta", 4 * MIB));
        let (o, f, m) = (text(&origin), text(&fast), text(&meta));
        let table = match target {
            "pcache" => format!("0 32768 pcache {f} {o} 0 max_age 3600000"),
            "writecache" => format!("0 32768 writecache s {o} {f} 4096 2 max_age 3600000"),
            _ => format!("0 32768 cache {m} {f} {o} 128 0 smq 0"),
        };
        let uri = udm.uri("vol.sock");
        let create = ["create", "vol", "--table", &table, "--export", &uri];
        udm.ok(&create);
        write_export(&udm, &uri, &pattern(1, MIB as usize));
        disks.die();
        let fails = || {
            let mut read = std::process::Command::new("qemu-io");
            read.args(["-f", "raw", "-c", "read 8M 4k", &for_clients(&uri)]);
            let output = read.output().unwrap();
            !String::from_utf8_lossy(&output.stdout).contains("read 4096/4096")
        };
        wait_until("the origin fails", fails);
        let info = udm.json(&["info", "vol"]).to_string();
        assert!(!info.contains("leads to another file"), "{target}: nothing is there: {info}");
        let Some(again) = mount() else { return };
        assert!(fails(), "{target}: the old file stays open");
        let told = "the path leads to another file than the one that is open, which fails";
        let info = udm.ok(&["info", "vol"]);
        assert!(info.contains(told) && info.contains("`udm remove`"), "{target}: {info}");
        let log = udm.runtime().join("vol.log");
        wait_until("the log has it", || {
            let _ = fails();
            std::fs::read_to_string(&log).unwrap().contains(told)
        });
        let count = std::fs::read_to_string(&log).unwrap().matches(told).count();
        assert_eq!(count, 1, "{target}: once");
        // The state of a file that fails cannot be recorded.
        let removed = udm.run(&["remove", "vol"]);
        assert_eq!(removed.code, 0, "{target}: {removed:?}");
        assert!(removed.err.contains("will not notice if another program changes"), "{removed:?}");
        assert!(removed.err.contains("`udm remove vol --drain --wipe`"), "{removed:?}");
        udm.ok(&create);
        assert!(!fails(), "{target}: the new server has the new file");
        let removed = udm.run(&["remove", "vol", "--drain"]);
        assert!(removed.code == 0 && !removed.err.contains("notice"), "{removed:?}");
        drop(again);
    }
}
