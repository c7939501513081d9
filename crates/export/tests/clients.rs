//! Real clients against the server: nbdinfo, nbdcopy, qemu-img, qemu-io and fio. They must be
//! installed; `UDM_SKIP_CLIENTS=1` skips these tests, loudly.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::Command;

use common::Served;
use udm::disk::{FileDisk, FileOptions};
use udm::prng::Prng;
use udm::sync::Arc;
use udm_export::nbd::Server;

const SIZE: u64 = 64 << 20;

/// Whether to run; complains about missing tools.
fn have(tools: &[&str]) -> bool {
    if std::env::var_os("UDM_SKIP_CLIENTS").is_some_and(|value| !value.is_empty()) {
        eprintln!("SKIPPED because UDM_SKIP_CLIENTS is set: needs {}", tools.join(", "));
        return false;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    for tool in tools {
        assert!(
            std::env::split_paths(&path).any(|folder| folder.join(tool).is_file()),
            "{tool} is not installed: install fio, libnbd-bin and qemu-utils, or set \
             UDM_SKIP_CLIENTS=1"
        );
    }
    true
}

/// fio with NBD at `uri` and verification; leaves no files.
fn fio(uri: &str, more: &[&str]) {
    let uri = format!("--uri={uri}");
    let always = ["--name=v", "--ioengine=nbd", &uri, "--verify=crc32c", "--verify_fatal=1"];
    run("fio", &[&always[..], &["--verify_state_save=0"], more].concat());
}

/// Runs a tool and returns what it printed; it must succeed.
fn run(tool: &str, args: &[&str]) -> String {
    let output = Command::new(tool).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{tool} {args:?}: {}\n{out}\n{errors}", output.status);
    out
}

fn random_file(path: &Path, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    Prng::new(seed).fill(&mut bytes);
    std::fs::write(path, &bytes).unwrap();
    bytes
}

#[test]
fn nbdinfo_sees_what_is_offered() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let served = Served::start(SIZE);
    let text = run("nbdinfo", &[&served.uri()]);
    for line in [
        "protocol: newstyle-fixed without TLS, using structured packets",
        "export=\"memory\"",
        "export-size: 67108864",
        "can_cache: true",
        "can_df: true",
        "can_fast_zero: true",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "is_read_only: false",
        "block_size_minimum: 512",
        "block_size_preferred: 4096",
        "block_size_maximum: 33554432",
        "base:allocation",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    assert!(run("nbdinfo", &["--list", &served.uri()]).contains("export=\"memory\""));
    assert!(run("nbdinfo", &["--map", &served.uri()]).contains("data"));
    let named = served.uri().replace("nbd+unix:///?", "nbd+unix:///memory?");
    assert_eq!(run("nbdinfo", &["--size", &named]).trim(), SIZE.to_string());
    let stranger = served.uri().replace("nbd+unix:///?", "nbd+unix:///stranger?");
    let output = Command::new("nbdinfo").arg(stranger).output().unwrap();
    assert!(!output.status.success());
}

#[test]
fn tcp_serves_ipv4_and_ipv6() {
    if !have(&["nbdinfo"]) {
        return;
    }
    for uri in ["nbd://127.0.0.1:0", "nbd://[::1]:0"] {
        let served = Served::start_at(SIZE, tempfile::tempdir().unwrap(), uri);
        assert_eq!(run("nbdinfo", &["--size", &served.uri()]).trim(), SIZE.to_string());
    }
}

#[test]
fn nbdcopy_copies_there_and_back() {
    if !have(&["nbdcopy"]) {
        return;
    }
    let served = Served::start(SIZE);
    let file = served.folder.path().join("there");
    let bytes = random_file(&file, 1);
    run("nbdcopy", &["--flush", file.to_str().unwrap(), &served.uri()]);
    assert!(served.disk.image() == bytes, "the device holds the file");
    let back = served.folder.path().join("back");
    run("nbdcopy", &[&served.uri(), back.to_str().unwrap()]);
    assert!(std::fs::read(back).unwrap() == bytes, "the file came back");
    let large = ["--request-size=33554432", "--connections=2"];
    run("nbdcopy", &[&large[..], &[&served.uri(), "null:"]].concat());
    served.wait_until("all have left", |counts| counts.current == 0);
    assert_eq!(served.server.connections().violations, 0);
}

#[test]
fn qemu_img_converts_and_compares() {
    if !have(&["qemu-img"]) {
        return;
    }
    let served = Served::start(SIZE);
    let file = served.folder.path().join("there");
    let mut bytes = random_file(&file, 2);
    // A hole, so that zeroes are written as such.
    bytes[10 << 20..30 << 20].fill(0);
    std::fs::write(&file, &bytes).unwrap();
    let file = file.to_str().unwrap();
    served.disk.poke(15 << 20, &[1; 4096]);
    run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "-W", file, &served.uri()]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", file, &served.uri()]);
    assert!(served.disk.image() == bytes, "the device holds the file");
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    if !have(&["qemu-io"]) {
        return;
    }
    let served = Served::start(SIZE);
    let mut args = vec!["-f".to_string(), "raw".into()];
    for command in [
        "write -P 0xab 0 1M",
        "write -f -P 0xcd 1M 64k",
        "read -P 0xab 0 1M",
        "read -P 0xcd 1M 64k",
        "write -z 512k 256k",
        "write -z -u 4k 4k",
        "read -P 0 512k 256k",
        "read -P 0 4k 4k",
        "read -P 0xab 768k 256k",
        "discard 1M 64k",
        "read -P 0 1M 64k",
        "writev -P 0x11 2M 512 4096 1536",
        "read -P 0x11 2M 6144",
        "aio_write -P 0x22 8M 16M",
        "aio_flush",
        "read -P 0x22 8M 16M",
        "flush",
    ] {
        args.extend(["-c".into(), command.into()]);
    }
    args.push(served.uri());
    let out = run("qemu-io", &args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(!out.contains("failed") && !out.contains("error"), "{out}");
}

#[test]
fn sockets_and_files_share_a_ring() {
    if !have(&["fio", "nbdcopy"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let bytes = random_file(&path, 3);
    let disk = FileDisk::open(&path, &FileOptions::default()).unwrap();
    let device = common::linear(Arc::new(disk));
    let uri = format!("nbd+unix://{}/socket", folder.path().display()).parse().unwrap();
    let server = Server::start(&device, &uri).unwrap();
    let back = folder.path().join("back");
    run("nbdcopy", &[&uri.for_clients(), back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == bytes, "the file came out");
    let what = ["--rw=randwrite", "--iodepth=32", "--bsrange=512-1M", "--size=32M", "--fsync=64"];
    fio(&uri.for_clients(), &[&what[..], &["--do_verify=1"]].concat());
    server.stop();
}

#[test]
fn fio_verifies_what_it_wrote() {
    if !have(&["fio"]) {
        return;
    }
    let served = Served::start(SIZE);
    for depth in ["--iodepth=1", "--iodepth=32"] {
        let what = ["--rw=randwrite", "--bsrange=512-128k", "--size=16M", "--io_size=32M", depth];
        fio(&served.uri(), &[&what[..], &["--fsync=64", "--do_verify=1"]].concat());
    }
    // Several clients at the same time, each in a part of its own.
    let jobs = ["--rw=randrw", "--iodepth=8", "--bs=4k", "--numjobs=4", "--thread"];
    fio(&served.uri(), &[&jobs[..], &["--size=8M", "--offset_increment=8M"]].concat());
    served.wait_until("all have left", |counts| counts.current == 0);
    assert_eq!(served.server.connections().violations, 0);
}
