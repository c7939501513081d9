//! See `udm_fuzz_harness::control`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| udm_fuzz_harness::control(bytes));
