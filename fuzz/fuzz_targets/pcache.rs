//! See `udm_fuzz_harness::pcache`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| udm_fuzz_harness::pcache(bytes));
