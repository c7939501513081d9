//! `udm bench` runs `udm-bench`. Alone in its program: a file that is being written while another
//! thread forks cannot be run.

#![allow(clippy::unwrap_used)]

mod common;

use common::Udm;

#[test]
fn bench_is_run_as_git_runs_its_commands() {
    use std::os::unix::fs::PermissionsExt;
    let udm = Udm::new();
    let program = udm.path("udm-bench");
    std::fs::write(&program, "#!/bin/sh\necho bench \"$@\"\nexit 7\n").unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    // udm itself is linked into an empty folder, so that no udm-bench is beside it.
    let alone = udm.path("bin");
    std::fs::create_dir(&alone).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_udm"), alone.join("udm")).unwrap();
    let path = format!("{}:/usr/bin:/bin", udm.path("").display());
    let run = |path: &str| {
        std::process::Command::new(alone.join("udm"))
            .args(["bench", "study", "--flag", "--help"])
            .env("PATH", path)
            .output()
            .unwrap()
    };
    let found = run(&path);
    assert_eq!(found.stdout, b"bench study --flag --help\n");
    assert_eq!(found.status.code(), Some(7));
    let missing = run("/nonexistent");
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).starts_with("udm: bench: udm-bench is"));
}
