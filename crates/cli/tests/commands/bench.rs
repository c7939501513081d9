//! `udm bench` runs the program udm-bench, which is installed beside udm or elsewhere in `$PATH`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::common::Udm;

/// A udm without a udm-bench in its folder.
fn alone(udm: &Udm) -> Command {
    let program = udm.path("udm");
    if !program.exists() {
        fs::copy(crate::PROGRAM, &program).unwrap();
    }
    udm.at_home(Command::new(program))
}

#[test]
fn bench_becomes_the_program_of_benchmarks() {
    let udm = Udm::new();
    let bin = udm.path("bin");
    fs::create_dir(&bin).unwrap();
    let run = || {
        let words = ["bench", "randwrite", "--small", "--help"];
        alone(&udm).args(words).env("PATH", &bin).output().unwrap()
    };
    let output = run();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("udm-bench is not installed"), "{err}");
    let script = bin.join("udm-bench");
    fs::write(&script, "#!/bin/sh\necho \"$@\"\nexit 3\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let output = run();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "randwrite --small --help\n");
    // The one beside udm comes first.
    fs::write(udm.path("udm-bench"), "#!/bin/sh\necho own\n").unwrap();
    fs::set_permissions(udm.path("udm-bench"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(String::from_utf8(run().stdout).unwrap(), "own\n");
}
