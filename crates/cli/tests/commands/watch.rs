//! `metrics --serve`, and reports for bug reports.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use crate::common::{Udm, pattern, text, wait_until, write_export};

const MIB: u64 = 1 << 20;

/// `udm metrics --serve`, and its address.
struct Endpoint {
    child: Child,
    address: String,
}

impl Endpoint {
    fn new(udm: &Udm) -> Endpoint {
        let mut command = udm.command(&["metrics", "--serve", "127.0.0.1:0"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().strip_prefix("metrics are at http://").unwrap();
        let address = address.strip_suffix("/metrics").unwrap().to_owned();
        Endpoint { child, address }
    }

    /// Its answer, with the head.
    fn get(&self) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn one_endpoint_has_the_metrics_of_all_devices() {
    let udm = Udm::new();
    udm.ok(&["create", "a", "--table", "0 8 zero"]);
    udm.ok(&["create", "b", "--table", "0 16 zero"]);
    let endpoint = Endpoint::new(&udm);
    let up = |name: &str, value: u8| format!("\nudm_device_up{{device=\"{name}\"}} {value}\n");
    // On a busy machine a server may be late for one answer.
    let wait_for = |parts: &[String]| {
        let mut reply = String::new();
        wait_until("all answer", || {
            reply = endpoint.get();
            parts.iter().all(|part| reply.contains(part))
        });
        reply
    };
    let reply = wait_for(&[up("a", 1), up("b", 1)]);
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
    assert!(reply.contains("udm_device_bytes{device=\"b\"} 8192\n"), "{reply}");
    udm.kill_server("b");
    udm.ok(&["create", "c", "--table", "0 8 zero"]);
    let reply = wait_for(&[up("a", 1), up("b", 0), up("c", 1)]);
    assert!(!reply.contains("udm_device_bytes{device=\"b\"}"), "{reply}");
    udm.ok(&["remove", "a"]);
    assert!(!endpoint.get().contains("device=\"a\""));
}

#[test]
fn a_report_has_what_a_bug_report_needs_and_no_name_if_asked() {
    let udm = Udm::new();
    std::fs::create_dir(udm.path("etc")).unwrap();
    let (slow, fast) =
        (udm.file("secret-slow.img", 16 * MIB), udm.file("secret-fast.img", 32 * MIB));
    let uri = udm.uri("hidden.sock");
    let table = format!("0 32768 writecache s {} {} 4096 0", text(&slow), text(&fast));
    udm.ok(&["create", "payroll", "--table", &table, "--export", &uri]);
    write_export(&udm, &uri, &pattern(1, MIB as usize));
    std::fs::write(udm.path("etc/payroll.conf"), "# a file for payroll\n").unwrap();
    let headings = [
        "== report ==\nudm ",
        "== machine ==\nMACHINE",
        "== device ==\n{",
        "== active table ==\n{",
        "== inactive table ==\n{",
        "== running configuration ==\n{",
    ];
    let report = udm.ok(&["report", "payroll"]);
    for words in headings {
        assert!(report.contains(words), "{words}: {report}");
    }
    let parts =
        ["\"dirty_bytes\": 1048576", text(&slow), "# a file for payroll", "payroll: process"];
    for part in parts {
        assert!(report.contains(part), "{part}: {report}");
    }
    // A report of a dead device, with the reason.
    udm.kill_server("payroll");
    let file = udm.path("report.txt");
    let said = udm.ok(&["report", "payroll", "--anonymous", "-o", text(&file)]);
    assert!(said.starts_with("payroll: report in "), "{said}");
    let report = std::fs::read_to_string(&file).unwrap();
    assert!(report.contains("== device ==\ndead: "), "{report}");
    for name in ["payroll", "secret", "hidden"] {
        assert!(!report.contains(name), "{name}: {report}");
    }
    assert!(report.contains("writecache") && report.contains("serves"), "{report}");
}

/// Links are followed, a file keeps its rights, and a pipe stays one.
#[test]
fn what_is_written_to_keeps_its_kind() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    let udm = Udm::new();
    udm.ok(&["create", "a", "--table", "0 8 zero"]);
    let (file, link, pipe) = (udm.file("file", 0), udm.path("link"), udm.path("pipe"));
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&file, &link).unwrap();
    udm.ok(&["save", "a", "-o", text(&link)]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    let saved = std::fs::read_to_string(&file).unwrap();
    assert!(saved.contains("0 8 zero"), "{saved}");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut save = udm.spawn(&["save", "a", "-o", text(&pipe)]);
    assert_eq!(std::fs::read_to_string(&pipe).unwrap(), saved);
    assert!(save.wait().unwrap().success());
    assert!(std::fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    let refused = udm.refused(&["save", "a", "-o", text(&udm.runtime())]);
    assert!(refused.contains("this is not a file that can be replaced"), "{refused}");
}
