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
    let reply = endpoint.get();
    assert!(reply.starts_with("HTTP/1.1 200 OK\r\n"), "{reply}");
    assert!(reply.contains(&up("a", 1)) && reply.contains(&up("b", 1)), "{reply}");
    assert!(reply.contains("udm_device_bytes{device=\"b\"} 8192\n"), "{reply}");
    udm.kill_server("b");
    udm.ok(&["create", "c", "--table", "0 8 zero"]);
    wait_until("the dead device is seen", || endpoint.get().contains(&up("b", 0)));
    let reply = endpoint.get();
    assert!(reply.contains(&up("a", 1)) && reply.contains(&up("c", 1)), "{reply}");
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
