//! NBD over TLS with real clients, and who may connect: libnbd's tools, QEMU's and nbdkit get in
//! with a certificate, nobody gets in without; a socket file has the mode and owner asked for.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::common::{Udm, client, pattern, text, wait_until};

const MIB: u64 = 1 << 20;

/// Certificates of an authority of its own.
fn certificates(udm: &Udm, name: &str) -> PathBuf {
    let folder = udm.path(name);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/certificates.sh");
    client(text(&script), &[text(&folder)]);
    folder
}

/// Opens a door with TLS to `vol`; returns its port.
fn open(udm: &Udm, pki: &Path, more: &str) -> String {
    let uri = format!("nbds://127.0.0.1:0?tls={}{more}", pki.display());
    let answer = udm.json(&["export", "vol", &uri]);
    let client_uri = answer["client_uri"].as_str().unwrap().to_owned();
    client_uri.strip_prefix("nbds://127.0.0.1:").unwrap().to_owned()
}

/// What libnbd's tools take.
fn libnbd(port: &str, pki: &Path) -> String {
    format!("nbds://127.0.0.1:{port}/?tls-certificates={}", pki.display())
}

fn fails(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).output().unwrap();
    assert!(!output.status.success(), "{program} {words:?} got in");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn violations(udm: &Udm) -> (u64, String) {
    let door = &udm.json(&["info", "vol"])["exports"][0];
    let last = door["last_violation"].as_str().unwrap_or_default().to_owned();
    (door["violations"].as_u64().unwrap(), last)
}

#[test]
fn nbdcopy_qemu_and_nbdkit_read_what_was_written() {
    let udm = Udm::new();
    let origin = udm.file("origin", 64 * MIB);
    let pki = certificates(&udm, "pki");
    let table = format!("0 131072 linear {} 0", origin.display());
    udm.ok(&["create", "vol", "--table", &table]);
    let port = open(&udm, &pki, "");
    let uri = libnbd(&port, &pki);
    let data = pattern(11, 64 * MIB as usize);
    let (written, read) = (udm.path("written"), udm.path("read"));
    std::fs::write(&written, &data).unwrap();

    // Four connections with 64 requests each, which is what nbdcopy does by itself.
    client("nbdcopy", &["--flush", text(&written), &uri]);
    assert!(std::fs::read(&origin).unwrap() == data);
    client("nbdcopy", &[&uri, text(&read)]);
    assert!(std::fs::read(&read).unwrap() == data);
    assert!(client("nbdinfo", &["--list", &uri]).contains("vol"));

    let credentials = format!("tls-creds-x509,id=t,dir={},endpoint=client", pki.display());
    let image = format!("driver=nbd,host=127.0.0.1,port={port},tls-creds=t");
    let words = ["convert", "--object", &credentials, "--image-opts", &image, "-O", "raw"];
    client("qemu-img", &[&words[..], &[text(&read)]].concat());
    assert!(std::fs::read(&read).unwrap() == data);

    let peer = format!("uri=nbds://127.0.0.1:{port}");
    let folder = format!("tls-certificates={}", pki.display());
    let run = format!("nbdcopy \"$uri\" {}", read.display());
    client("nbdkit", &["-U", "-", "nbd", &peer, "tls=require", &folder, "--run", &run]);
    assert!(std::fs::read(&read).unwrap() == data);

    assert_eq!(violations(&udm), (0, String::new()));
    // As clients write it, and with its options.
    udm.ok(&["unexport", "vol", &format!("nbds://127.0.0.1:{port}")]);
    udm.ok(&["remove", "vol"]);
}

#[test]
fn nobody_gets_in_unencrypted_or_as_a_stranger() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    let other = certificates(&udm, "other");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let port = open(&udm, &pki, "");

    fails("nbdinfo", &[&format!("nbd://127.0.0.1:{port}")]);
    assert_eq!(violations(&udm).0, 0, "to ask without TLS and leave is no violation");
    // Its certificate is of another authority, and so is the one it expects.
    fails("nbdinfo", &[&libnbd(&port, &other)]);
    // It expects the right one, and has none.
    let bare = udm.path("bare");
    std::fs::create_dir(&bare).unwrap();
    std::fs::copy(pki.join("ca-cert.pem"), bare.join("ca-cert.pem")).unwrap();
    fails("nbdinfo", &[&libnbd(&port, &bare)]);
    // The first one may have left without a word.
    wait_until("strangers are counted", || violations(&udm).0 >= 1);
    assert!(violations(&udm).1.starts_with("TLS: "), "{:?}", violations(&udm));
    client("nbdinfo", &[&libnbd(&port, &pki)]);

    // Such a client may come where `clients=any` says so, encrypted still.
    udm.ok(&["unexport", "vol", &format!("nbds://127.0.0.1:{port}")]);
    let port = open(&udm, &pki, "&clients=any");
    client("nbdinfo", &[&libnbd(&port, &bare)]);
    fails("nbdinfo", &[&format!("nbd://127.0.0.1:{port}")]);
}

/// A client that stops in the middle of TLS, or sends rubbish, holds nobody up.
#[test]
fn clients_that_break_off_hold_nobody_up() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let port = open(&udm, &pki, "");
    let starttls = [&[0, 0, 0, 3][..], b"IHAVEOPT", &[0, 0, 0, 5, 0, 0, 0, 0]].concat();
    let mut halves = Vec::new();
    for rubbish in [&b""[..], &[22, 3, 1, 2, 0, 1], &[0; 4000], &[23, 3, 3, 64, 0]] {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.read_exact(&mut [0; 18]).unwrap();
        stream.write_all(&starttls).unwrap();
        let mut answer = [0; 20];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[12..16], [0, 0, 0, 1]);
        stream.write_all(rubbish).unwrap();
        halves.push(stream);
    }
    client("nbdinfo", &[&libnbd(&port, &pki)]);
    drop(halves);
    client("nbdinfo", &[&libnbd(&port, &pki)]);
    udm.ok(&["remove", "vol"]);
}

#[test]
fn what_is_wrong_with_certificates_is_said() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    let other = certificates(&udm, "other");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let uri = format!("nbds://127.0.0.1:0?tls={}", pki.display());
    let refused = || udm.refused(&["export", "vol", &uri]);

    std::fs::copy(other.join("server-key.pem"), pki.join("server-key.pem")).unwrap();
    let said = refused();
    assert!(said.contains("server-key.pem does not go with server-cert.pem"), "{said}");
    std::fs::write(pki.join("server-key.pem"), "no key").unwrap();
    assert!(refused().contains("server-key.pem holds no private key"), "{}", refused());
    std::fs::remove_file(pki.join("server-key.pem")).unwrap();
    assert!(refused().contains("server-key.pem"), "{}", refused());
    std::fs::write(pki.join("ca-cert.pem"), "").unwrap();
    std::fs::copy(other.join("server-key.pem"), pki.join("server-key.pem")).unwrap();
    std::fs::copy(other.join("server-cert.pem"), pki.join("server-cert.pem")).unwrap();
    assert!(refused().contains("ca-cert.pem"), "{}", refused());
    std::fs::remove_dir_all(&pki).unwrap();
    assert!(refused().contains("No such file"), "{}", refused());
    // Nothing was opened, and everybody on a network is not let in by mistake.
    assert!(udm.json(&["info", "vol"])["exports"].as_array().unwrap().is_empty());
    let said = udm.refused(&["export", "vol", "nbd://0.0.0.0:0"]);
    assert!(said.contains("?insecure"), "{said}");
}

#[test]
fn a_socket_has_the_mode_and_owner_asked_for() {
    let udm = Udm::new();
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let (plain, open) = (udm.path("plain.sock"), udm.path("open.sock"));
    udm.ok(&["export", "vol", &format!("nbd+unix://{}", plain.display())]);
    assert_eq!(plain.metadata().unwrap().permissions().mode() & 0o7777, 0o600);
    let own = format!("{}:{}", own_user(&udm), open.parent().unwrap().metadata().unwrap().gid());
    let uri = format!("nbd+unix://{}?mode=0660&owner={own}", open.display());
    let answer = udm.json(&["export", "vol", &uri]);
    assert_eq!(answer["uri"].as_str().unwrap(), uri);
    assert_eq!(open.metadata().unwrap().permissions().mode() & 0o7777, 0o660);
    client("nbdinfo", &[&format!("nbd+unix:///?socket={}", open.display())]);
    udm.ok(&["unexport", "vol", &format!("nbd+unix://{}", open.display())]);
    assert!(!open.exists());

    let uri = format!("nbd+unix://{}?owner=nobody-of-this-name", open.display());
    let said = udm.refused(&["export", "vol", &uri]);
    assert!(said.contains("nobody-of-this-name"), "{said}");
    assert!(!open.exists(), "a refused door leaves no socket");
}

/// The user who runs the tests.
fn own_user(udm: &Udm) -> u32 {
    udm.runtime().metadata().unwrap().uid()
}

#[test]
fn an_address_with_tls_has_one_export_and_the_folder_can_be_tried() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    udm.ok(&["create", "other", "--table", "0 2048 zero"]);
    let uri = format!("nbds://127.0.0.1:0/name?tls={}", pki.display());
    let answer = udm.json(&["export", "vol", &uri]);
    let place = answer["client_uri"].as_str().unwrap().strip_suffix("/name").unwrap().to_owned();
    let clients = format!("{place}/name?tls-certificates={}", pki.display());
    assert_eq!(client("nbdinfo", &["--size", &clients]).trim(), MIB.to_string());
    let second = format!("{place}/second?tls={}", pki.display());
    for device in ["vol", "other"] {
        let refused = udm.refused(&["export", device, &second]);
        assert!(refused.contains("an address with TLS has one export"), "{refused}");
    }
    // What a door would read, `doctor` reads.
    let said = || {
        let places = udm.json(&["doctor", text(&pki)])["places"].take();
        let checks = places[0]["checks"].as_array().unwrap().clone();
        checks.into_iter().find(|check| check["name"] == "certificates").unwrap()
    };
    assert_eq!(said()["works"], true);
    std::fs::write(pki.join("server-key.pem"), "no key").unwrap();
    let check = said();
    assert_eq!(check["works"], false);
    assert!(check["what"].as_str().unwrap().contains("server-key.pem"), "{check}");
}
