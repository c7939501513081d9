//! Runs files through a target: `cargo run -p udm-fuzz-harness --example one TARGET FILE...`.

#![allow(clippy::unwrap_used)]

fn main() {
    let mut words = std::env::args().skip(1);
    let name = words.next().expect("a target");
    let target = udm_fuzz_harness::TARGETS.iter().find(|(known, _)| *known == name).unwrap();
    for path in words {
        target.1(&std::fs::read(path).unwrap());
    }
}
