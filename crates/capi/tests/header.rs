//! The header matches the crate. `UDM_WRITE_HEADER=1` generates it again.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;

use cbindgen::{Braces, Builder, Config, Language, Style};

/// The first lines of the header.
const HEAD: &str = "\
/* libudm: Linux's device-mapper caches in a program's own process.
 *
 *     udm_open(\"vol\", \"0 2097152 pcache /dev/pmem0 /dev/sdb\", \"/run/mine\", 0, &device);
 *     udm_queue_create(device, &queue);          // one for each thread
 *     udm_write(queue, 0, bytes, 4096, 1, 0);    // ... many, then
 *     udm_reap(queue, completions, 1, 64, -1);
 *     udm_queue_destroy(queue);
 *     udm_close(device);
 *
 * udm_connect(\"vhost-user:///run/udm/vol.vhost\", 0, &device) uses a server instead.
 *
 * Functions that return an int return 0 or more, or a negative errno; udm_error() then describes
 * the error in one line. Link with -ludm.
 *
 * Generated from crates/capi/src; do not edit. SPDX-License-Identifier: MIT OR Apache-2.0
 */";

fn generated() -> String {
    let config = Config {
        language: Language::C,
        header: Some(HEAD.to_owned()),
        include_guard: Some("UDM_H".to_owned()),
        cpp_compat: true,
        no_includes: true,
        sys_includes: vec!["stddef.h".to_owned(), "stdint.h".to_owned()],
        usize_is_size_t: true,
        style: Style::Both,
        braces: Braces::SameLine,
        line_length: 100,
        ..Config::default()
    };
    let mut text = Vec::new();
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let bindings = Builder::new().with_config(config).with_crate(crate_dir).generate().unwrap();
    bindings.write(&mut text);
    let text = String::from_utf8(text).unwrap().replace(" * # Safety\n *\n *", " * The contract:");
    // C89 has no such comments.
    text.replace("// __cplusplus", "/* __cplusplus */")
        .replace("// extern \"C\"", "/* extern \"C\" */")
}

#[test]
fn the_header_is_what_the_crate_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/udm.h");
    let generated = generated();
    if std::env::var_os("UDM_WRITE_HEADER").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(kept == generated, "include/udm.h is old: UDM_WRITE_HEADER=1 writes it again");
}

#[test]
fn the_header_is_c_of_1989_and_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let body = "#include \"udm.h\"\nint main(void) { return udm_version() == NULL; }\n";
    for (language, standard) in
        [("c", "c89"), ("c", "c99"), ("c", "c17"), ("c++", "c++11"), ("c++", "c++17")]
    {
        let source = folder.path().join("source");
        std::fs::write(&source, body).unwrap();
        let output = Command::new("cc")
            .args(["-x", language, &format!("-std={standard}"), "-pedantic", "-Wall", "-Wextra"])
            .args(["-Werror", "-fsyntax-only", "-I"])
            .args([&include, &source])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        // A machine that builds Rust has a C compiler, but maybe no C++ compiler.
        if language == "c++" && said.contains("cc1plus") {
            eprintln!("SKIPPED: no compiler of C++: {said}");
            continue;
        }
        assert!(output.status.success(), "{standard}: {said}");
    }
}
