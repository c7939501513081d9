//! The runtime directory: one that others may enter is refused, and existing files do not change.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::common::{Outcome, Udm, text};

fn run_in(udm: &Udm, runtime: &Path, words: &[&str]) -> Outcome {
    let output = udm.command(words).env("UDM_RUNTIME_DIR", runtime).output().unwrap();
    Outcome {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn mode_of(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().mode() & 0o7777
}

#[test]
fn tmp_stays_as_it_is() {
    let udm = Udm::new();
    let tmp = Path::new("/tmp");
    let before = mode_of(tmp);
    assert!(before & 0o077 != 0, "this test wants a /tmp for everybody");
    for words in [&["ls"][..], &["create", "v", "--table", "0 8 zero"], &["remove", "v"]] {
        let outcome = run_in(&udm, tmp, words);
        assert_eq!(outcome.code, 1);
        let line = outcome.one_line(words[0]);
        assert!(line.contains("runtime directory /tmp: ") && line.contains("UDM_RUNTIME_DIR"));
    }
    assert_eq!(mode_of(tmp), before);
    assert!(!tmp.join("v.lock").exists() && !tmp.join("v.log").exists());
}

#[test]
fn what_others_may_enter_is_refused_and_says_what_to_do() {
    let udm = Udm::new();
    let own = udm.path("open");
    std::fs::create_dir(&own).unwrap();
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o755)).unwrap();
    let line = run_in(&udm, &own, &["ls"]).one_line("ls");
    let advice = format!(
        "other users may enter it (mode 0755); if only udm uses it, `chmod 700 {}`",
        text(&own)
    );
    assert!(line.contains(&advice), "{line}");
    assert_eq!(mode_of(&own), 0o755);
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(run_in(&udm, &own, &["ls"]).out, "No devices found\n");

    symlink(&own, udm.path("link")).unwrap();
    let line = run_in(&udm, &udm.path("link"), &["ls"]).one_line("ls");
    assert!(line.contains("symbolic link"), "{line}");
    // One that is not there is made, and closed.
    assert_eq!(run_in(&udm, &udm.path("new/below"), &["ls"]).code, 0);
    assert_eq!(mode_of(&udm.path("new/below")), 0o700);
}

#[test]
fn root_takes_no_directory_of_another_user() {
    if std::fs::metadata(Udm::new().path("")).unwrap().uid() != 0 {
        return;
    }
    let udm = Udm::new();
    let theirs = udm.path("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(&theirs, Some(12345), None).unwrap();
    let line = run_in(&udm, &theirs, &["ls"]).one_line("ls");
    assert!(line.contains("belongs to user 12345, and this is user 0"), "{line}");
    let line = run_in(&udm, &theirs.join("udm"), &["ls"]).one_line("ls");
    assert!(line.contains("above it belongs to user 12345"), "{line}");
    assert!(std::fs::read_dir(&theirs).unwrap().count() <= 1, "only a directory is made");
}
