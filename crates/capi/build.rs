//! The shared library says its own name, so that a program finds one that it can use.

fn main() {
    // The number changes when a program that was built with an older header would break.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libudm.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
