//! NBD over TLS with real clients, and access control. libnbd's tools, QEMU's and nbdkit connect
//! with a certificate and are refused without one. A socket file has the requested mode and owner.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{PATIENCE, Udm, client, pattern, text, wait_until};

const MIB: u64 = 1 << 20;

/// Certificates of an authority of its own.
fn certificates(udm: &Udm, name: &str) -> PathBuf {
    let folder = udm.path(name);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/certificates.sh");
    client(text(&script), &[text(&folder)]);
    folder
}

/// Opens an export with TLS to `vol`; returns its port.
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
    let export = &udm.json(&["info", "vol"])["exports"][0];
    let last = export["last_violation"].as_str().unwrap_or_default().to_owned();
    (export["violations"].as_u64().unwrap(), last)
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

    // Four connections with 64 requests each, which are nbdcopy's defaults.
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
    assert_eq!(violations(&udm).0, 0, "a client may ask without TLS and disconnect");
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

    // With `clients=any`, such a client may connect, still encrypted.
    udm.ok(&["unexport", "vol", &format!("nbds://127.0.0.1:{port}")]);
    let port = open(&udm, &pki, "&clients=any");
    client("nbdinfo", &[&libnbd(&port, &bare)]);
    fails("nbdinfo", &[&format!("nbd://127.0.0.1:{port}")]);
}

/// A client that stops in the middle of TLS, or sends garbage, does not delay others.
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
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
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
    assert!(said.contains("server-key.pem does not match server-cert.pem"), "{said}");
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
    // No socket was opened: a mistake does not admit every client of a network.
    assert!(udm.json(&["info", "vol"])["exports"].as_array().unwrap().is_empty());
    let said = udm.refused(&["export", "vol", "nbd://0.0.0.0:0"]);
    assert!(said.contains("?insecure"), "{said}");
}

/// Runs openssl in `folder`; its input files are in `files`.
fn openssl(folder: &Path, words: &str) {
    let output = Command::new("openssl").args(words.split(' ')).current_dir(folder).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Signs `NAME-key.pem` again, by the folder's authority.
fn sign(folder: &Path, name: &str, words: &str) {
    let what = format!(
        "req -x509 -key {name}-key.pem -subj /CN=udm -CA ca-cert.pem -CAkey ca-key.pem -addext \
         basicConstraints=critical,CA:FALSE {words} -out {name}-cert.pem"
    );
    openssl(folder, &what);
}

const OF_SERVER: &str = "-addext extendedKeyUsage=serverAuth -addext subjectAltName=IP:127.0.0.1";

#[test]
fn each_fault_of_a_certificate_has_its_own_words() {
    let udm = Udm::new();
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let original = certificates(&udm, "pki");
    let folder = udm.path("try");
    let uri = format!("nbds://127.0.0.1:0?tls={}", folder.display());
    let begin = || {
        let _ = std::fs::remove_dir_all(&folder);
        client("cp", &["-r", text(&original), text(&folder)]);
    };
    let refused = |words: &str| {
        let said = udm.refused(&["export", "vol", &uri]);
        assert!(said.contains(words), "{said}");
    };
    begin();
    write_pem(&folder, "server-cert.pem", "CERTIFICATE", "AAAA");
    refused("server-cert.pem does not parse");
    begin();
    write_pem(&folder, "ca-cert.pem", "CERTIFICATE", "AAAA");
    refused("ca-cert.pem does not parse");
    begin();
    sign_for(&folder, "20200101000000Z", "20210101000000Z");
    refused("server-cert.pem expired ");
    begin();
    sign_for(&folder, "21000101000000Z", "21010101000000Z");
    refused("server-cert.pem becomes valid in ");
    begin();
    let (pkcs8, sec1) = ("PRIVATE KEY", "EC PRIVATE KEY");
    for (kind, body) in [(pkcs8, "AAAA"), (sec1, "MAA="), (pkcs8, "?")] {
        write_pem(&folder, "server-key.pem", kind, body);
        refused("server-key.pem does not parse");
    }
    begin();
    sign(&folder, "server", "-addext extendedKeyUsage=clientAuth");
    refused("server-cert.pem is not a server's certificate");
    begin();
    std::fs::copy(folder.join("client-cert.pem"), folder.join("server-cert.pem")).unwrap();
    std::fs::copy(folder.join("client-key.pem"), folder.join("server-key.pem")).unwrap();
    refused("server-cert.pem is not a server's certificate");
    begin();
    std::fs::copy(folder.join("client-key.pem"), folder.join("server-key.pem")).unwrap();
    refused("server-key.pem does not match server-cert.pem");
    openssl(&folder, "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-521 -out server-key.pem");
    refused("server-key.pem is not a key that TLS can use here");
    openssl(&folder, "genpkey -algorithm ED25519 -aes256 -pass pass:secret -out server-key.pem");
    refused("server-key.pem is encrypted");
    begin();
    write_pem(&folder, "ca-crl.pem", "X509 CRL", "AAAA");
    refused("ca-crl.pem does not parse");
    begin();
    crl(&folder, "-crl_lastupdate 20200101000000Z -crl_nextupdate 20200201000000Z");
    refused("ca-crl.pem is too old: a newer list of revoked certificates was due ");
    crl(&folder, "-crldays 3");
    udm.ok(&["export", "vol", &uri]);
}

/// Writes a PEM file of this kind.
fn write_pem(folder: &Path, name: &str, kind: &str, body: &str) {
    let text = format!("-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\n");
    std::fs::write(folder.join(name), text).unwrap();
}

/// The files that `openssl ca` needs for the authority.
fn authority(folder: &Path) {
    let conf = "[ca]\ndefault_ca=a\n[a]\ndatabase=index.txt\ndefault_md=sha256\n\
                new_certs_dir=.\nserial=serial\npolicy=p\ncrlnumber=crlnumber\ncrl_extensions=e\n\
                [e]\nauthorityKeyIdentifier=keyid\n[p]\ncommonName=supplied\n";
    std::fs::write(folder.join("ca.conf"), conf).unwrap();
    std::fs::write(folder.join("index.txt"), "").unwrap();
    std::fs::write(folder.join("crlnumber"), "01\n").unwrap();
    std::fs::write(folder.join("ext.conf"), "extendedKeyUsage=serverAuth\n").unwrap();
}

/// Writes the authority's list of revoked certificates, which is empty.
fn crl(folder: &Path, words: &str) {
    authority(folder);
    let what = "ca -config ca.conf -gencrl -keyfile ca-key.pem -cert ca-cert.pem -out ca-crl.pem";
    openssl(folder, &format!("{what} {words}"));
}

/// Signs the server's key for a period.
fn sign_for(folder: &Path, start: &str, end: &str) {
    authority(folder);
    openssl(folder, "req -new -key server-key.pem -subj /CN=udm -out server.csr");
    let what = format!(
        "ca -config ca.conf -batch -notext -create_serial -keyfile ca-key.pem -cert ca-cert.pem \
         -extfile ext.conf -startdate {start} -enddate {end} -in server.csr -out server-cert.pem"
    );
    openssl(folder, &what);
}

/// GnuTLS writes a key's number without the zeroes that it begins with: the number 1, on P-256.
#[test]
fn a_key_whose_number_begins_with_zeroes_is_taken() {
    let udm = Udm::new();
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let pki = certificates(&udm, "pki");
    let point = "046B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C2964FE342E2FE1A7F9B\
                 8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5";
    let number = |number: &str| {
        let conf = format!(
            "asn1=SEQUENCE:key\n[key]\nversion=INTEGER:1\nnumber=FORMAT:HEX,OCTETSTRING:{number}\n\
             curve=EXPLICIT:0,OID:prime256v1\npoint=EXPLICIT:1,FORMAT:HEX,BITSTRING:{point}\n"
        );
        std::fs::write(pki.join("key.conf"), conf).unwrap();
        openssl(&pki, "asn1parse -genconf key.conf -noout -out key.der");
        openssl(&pki, "base64 -in key.der -out key.b64");
        let lines = std::fs::read_to_string(pki.join("key.b64")).unwrap();
        let pem = format!("-----BEGIN EC PRIVATE KEY-----\n{lines}-----END EC PRIVATE KEY-----\n");
        std::fs::write(pki.join("server-key.pem"), pem).unwrap();
    };
    number(&format!("{:064x}", 1));
    sign(&pki, "server", OF_SERVER);
    for written in ["01", &format!("{:066x}", 1), &format!("{:064x}", 1)] {
        number(written);
        let port = open(&udm, &pki, "");
        client("nbdinfo", &[&libnbd(&port, &pki)]);
        udm.ok(&["unexport", "vol", &format!("nbds://127.0.0.1:{port}")]);
    }
}

#[test]
fn new_certificates_are_taken_without_cutting_clients() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    let other = certificates(&udm, "other");
    udm.ok(&["create", "vol", "--table", "0 2048 zero"]);
    let port = open(&udm, &pki, "");
    let (old, new) = (udm.path("old"), udm.path("new"));
    client("cp", &["-r", text(&pki), text(&old)]);
    client("cp", &["-r", text(&other), text(&new)]);
    // One that stays while all of this happens.
    let credentials = format!("tls-creds-x509,id=t,dir={},endpoint=client", old.display());
    let image = format!("driver=nbd,host=127.0.0.1,port={port},tls-creds=t");
    let mut stays = Command::new("qemu-io")
        .args(["-r", "--object", &credentials, "--image-opts", &image])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(stays.stdout.take().unwrap()).lines();
    let mut reads = |stays: &mut Child| {
        stays.stdin.as_mut().unwrap().write_all(b"read 0 512\n").unwrap();
        lines.any(|line| line.unwrap().contains("read 512/512 bytes at offset 0"))
    };
    assert!(reads(&mut stays));
    // In the middle of a change the files do not go together: those before them count.
    let problem = || udm.json(&["info", "vol"])["exports"][0]["certificates_problem"].clone();
    let logged = |what: &str| {
        let log = std::fs::read_to_string(udm.runtime().join("vol.log")).unwrap();
        log.lines().filter(|line| line.contains(what)).count()
    };
    std::fs::copy(new.join("server-cert.pem"), pki.join("server-cert.pem")).unwrap();
    client("nbdinfo", &[&libnbd(&port, &old)]);
    let said = problem().as_str().unwrap().to_owned();
    assert!(said.contains("server-key.pem does not match server-cert.pem"), "{said}");
    let not_used = "the new certificates are not used, the previous ones stay: ";
    wait_until("the log has the problem", || logged(&said) == 1);
    for name in ["server-key.pem", "ca-cert.pem"] {
        std::fs::copy(new.join(name), pki.join(name)).unwrap();
    }
    client("nbdinfo", &[&libnbd(&port, &new)]);
    assert!(problem().is_null());
    wait_until("the log has the end", || logged("the new certificates are used") == 1);
    assert_eq!(logged(not_used), 1);
    fails("nbdinfo", &[&libnbd(&port, &old)]);
    assert!(reads(&mut stays), "it was cut off");
    drop(stays.stdin.take());
    assert!(stays.wait().unwrap().success());
}

#[test]
fn a_private_key_that_others_may_read_has_a_note() {
    let udm = Udm::new();
    let pki = certificates(&udm, "pki");
    let key = pki.join("server-key.pem");
    let uri = format!("nbds://127.0.0.1:0?tls={}", pki.display());
    let said = udm.run(&["create", "vol", "--table", "0 2048 zero", "--export", &uri]);
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    for (mode, can) in [(0o640, "read"), (0o604, "read"), (0o620, "change")] {
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
        let said = udm.run(&["export", "vol", &uri]);
        let note = format!("has mode {mode:04o}: other users may {can} the private key");
        assert!(said.code == 0 && said.err.contains(&note), "{said:?}");
        assert!(!said.err.contains("belongs to user"), "{said:?}");
    }
    let said = udm.run(&["create", "new", "--table", "0 2048 zero", "--export", &uri]);
    assert!(said.code == 0 && said.err.contains("may change the private key"), "{said:?}");
    if !rustix::process::geteuid().is_root() {
        return;
    }
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::chown(&key, Some(12_345), None).unwrap();
    let said = udm.run(&["export", "vol", &uri]);
    let note = "server-key.pem belongs to user 12345, who may read the private key";
    assert!(said.code == 0 && said.err.contains(note), "{said:?}");
    assert!(!said.err.contains("other users"), "{said:?}");
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

    let uri = format!("nbd+unix://{}?owner=no-user-of-this-name", open.display());
    let said = udm.refused(&["export", "vol", &uri]);
    assert!(said.contains("no-user-of-this-name"), "{said}");
    assert!(!open.exists(), "a refused export leaves no socket");
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
    // What an export would read, `doctor` reads.
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
