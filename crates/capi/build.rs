//! The shared library contains its own name, so that a program finds a compatible version.

fn main() {
    // This number changes when programs that were built with an older header would break.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libudm.so.0");
    // Its SIGBUS handler and the last of its threads need the code after dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
